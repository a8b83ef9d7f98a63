//! GPUDirect RDMA: whether a transfer goes between the NIC and the GPU's own memory, past the staging buffers.
//!
//! Only the decision and its reasons are here; the registration is [`Domain::register_dmabuf`](super::Domain::register_dmabuf). **This has never been run**: it needs
//! a NIC and a GPU under one PCIe root, and a driver that exports DMA-bufs. It pays for short transfers only: above some 200 KiB reading GPU memory across PCIe is
//! slower than the pipeline through host memory (rCUDA's measurements), so longer ones are staged in any case.

use std::fmt;

/// Transfers below this many bytes go directly, unless configured otherwise.
pub const DEFAULT_LIMIT: u64 = 200 << 10;

/// What was found out about this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` of the device.
    pub driver_exports: bool,
    /// Whether libibverbs has `ibv_reg_dmabuf_mr`.
    pub library_registers: bool,
    /// Result of registering a first DMA-buf with the NIC, once it was tried: the kernel and the NIC's driver have a say.
    pub registration: Option<Result<(), String>>,
}

/// Whether GPUDirect is used on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuDirect {
    /// For transfers of fewer bytes than this.
    Below(u64),
    /// Not at all, and why.
    Off(Why),
}

/// Why GPUDirect is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// The limit is configured to 0.
    Configured,
    /// The GPU's driver does not export DMA-bufs.
    Driver,
    /// libibverbs does not register them.
    Library,
    /// The NIC or the kernel refused one.
    Refused(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Configured => f.write_str("it is switched off (limit 0)"),
            Why::Driver => f.write_str(
                "the GPU's driver does not export DMA-bufs (open kernel modules and Linux 5.12 are needed)",
            ),
            Why::Library => f.write_str("libibverbs does not register DMA-bufs (rdma-core 34 is needed)"),
            Why::Refused(reason) => write!(f, "the RDMA device refused to register GPU memory: {reason}"),
        }
    }
}

impl GpuDirect {
    /// Decides from what is configured (`limit` in bytes, 0: off) and what was found.
    pub fn decide(limit: u64, found: &Found) -> GpuDirect {
        match found {
            _ if limit == 0 => GpuDirect::Off(Why::Configured),
            Found { driver_exports: false, .. } => GpuDirect::Off(Why::Driver),
            Found { library_registers: false, .. } => GpuDirect::Off(Why::Library),
            Found { registration: Some(Err(reason)), .. } => GpuDirect::Off(Why::Refused(reason.clone())),
            _ => GpuDirect::Below(limit),
        }
    }

    /// Whether a transfer of so many bytes goes directly.
    pub fn takes(&self, bytes: u64) -> bool {
        matches!(self, GpuDirect::Below(limit) if bytes < *limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Found = Found { driver_exports: true, library_registers: true, registration: Some(Ok(())) };

    #[test]
    fn short_transfers_go_directly_where_everything_is_there() {
        let decided = GpuDirect::decide(DEFAULT_LIMIT, &ALL);
        assert!(decided.takes(1) && decided.takes(DEFAULT_LIMIT - 1) && !decided.takes(DEFAULT_LIMIT));
    }

    #[test]
    fn anything_that_is_lacking_switches_it_off_and_is_named() {
        let refused = Some(Err("Operation not supported".to_owned()));
        for (limit, found, word) in [
            (0, ALL, "switched off"),
            (1, Found { driver_exports: false, ..ALL }, "GPU's driver"),
            (1, Found { library_registers: false, ..ALL }, "libibverbs"),
            (1, Found { registration: refused, ..ALL }, "Operation not supported"),
        ] {
            let GpuDirect::Off(why) = GpuDirect::decide(limit, &found) else { panic!("{found:?} is on") };
            assert!(why.to_string().contains(word), "{why}");
            assert!(!GpuDirect::Off(why).takes(0));
        }
    }
}
