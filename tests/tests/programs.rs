//! Every CUDA test program as a native client on the software GPU, over both transports, and with NVIDIA's own runtime inside
//! the program, as nvcc builds it by default. Programs that need a GPU of NVIDIA's are in `gpu.rs` alone.
//!
//! `cargo xtask test programs` builds what this needs and runs it. Each test starts its own server and daemon.

use rgpu_tests::program_tests;
use rgpu_tests::programs::{Way, passes};

program_tests!(local, |name| super::passes(name, super::Way::Client("software", "local"), &[]).map(drop));
program_tests!(tcp, |name| super::passes(name, super::Way::Client("software", "tcp"), &[]).map(drop));
program_tests!(with_nvidias_runtime, |name| super::passes(
    name,
    super::Way::Inside("software", "local"),
    &[]
)
.map(drop));

/// Where userfaultfd is refused, as in containers, managed memory is made of page protection; all but system calls on it works.
mod by_page_protection {
    use rgpu_tests::programs::{Way, passes_with};

    fn passes(name: &str) -> anyhow::Result<()> {
        for transport in ["local", "tcp"] {
            passes_with(name, Way::Client("software", transport), &[], &[("RGPU_PAGES", "signal")])?;
        }
        Ok(())
    }

    #[test]
    fn managed_memory() -> anyhow::Result<()> {
        passes("managed_memory")
    }

    #[test]
    fn managed_variables() -> anyhow::Result<()> {
        passes("managed_variables")
    }

    #[test]
    fn managed_api() -> anyhow::Result<()> {
        passes("managed_api")
    }

    #[test]
    fn mapped_memory() -> anyhow::Result<()> {
        passes("mapped_memory")
    }
}
