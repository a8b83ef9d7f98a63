//! Initialization, devices and their primary contexts. `cuInit` has fetched everything that these functions
//! return.

use std::ffi::c_char;
use std::sync::atomic::Ordering;

use crate::abi::arguments::{Out, Text, non_null};
use crate::abi::result::Result;
use crate::abi::types::DevProp;
use crate::api::teardown;
use crate::process::device_attributes::attr;
use crate::process::driver::{self, device, driver};
use crate::work::direct_copy;
use client::Status;
use client::servers::parse_pci;

/// Writes NUL-terminated text, truncated to `len` bytes.
unsafe fn put_text(to: *mut c_char, len: i32, text: &str) -> Result {
    let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(Status::INVALID_VALUE)?;
    non_null(to)?;
    let n = text.len().min(len - 1);
    // SAFETY: the program promises that `len` bytes at `to` are writable; n + 1 ≤ len.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, n);
        to.add(n).write(0);
    }
    Ok(())
}

fn pci_bus_id(pci: &[u32; 3]) -> String {
    // The domain has four digits, as in NVIDIA's driver, or more if necessary.
    format!("{:04X}:{:02X}:{:02X}.0", pci[0], pci[1], pci[2])
}

/// Parses `[domain]:[bus]:[device].[function]`, `[domain]:[bus]:[device]` or `[bus]:[device].[function]`, all
/// hexadecimal.
fn parse_pci_bus_id(text: &str) -> Option<[u32; 3]> {
    let (address, function) = parse_pci(text)?;
    (u32::from_str_radix(function.unwrap_or("0"), 16) == Ok(0)).then_some(address)
}

api! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        driver::init().map(|_| ())
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        // Works before `cuInit` and without a server: the version of the API that this library implements.
        version.put(driver().map_or(crate::process::driver::API_VERSION, |driver| driver.version))
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        device.required()?;
        driver::device(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        let driver = driver()?;
        count.put(driver.devices.len() as i32)
    }

    unsafe fn cuDeviceGetName(name: *mut c_char, len: i32, dev: i32) {
        // SAFETY: the program passes a buffer of that length, by CUDA's manual.
        unsafe { put_text(name, len, &device(dev)?.info.name) }
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, dev: i32) {
        uuid.put(device(dev)?.info.uuid)
    }
    alias cuDeviceGetUuid = cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, dev: i32);

    fn cuDeviceGetLuid(luid: *mut c_char, mask: Out<u32>, dev: i32) {
        // Only Windows has such names for devices.
        let _ = (luid, mask);
        device(dev)?;
        Err(Status::NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, dev: i32) {
        let total = device(dev)?.info.total_memory;
        bytes.put(total as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, dev: i32) {
        value.required()?;
        let device = device(dev)?;
        let found = device.attributes.get(attribute as usize).copied().flatten();
        if found.is_none() {
            client::log::debug(format_args!("device attribute {attribute} is not known to the server"));
        }
        value.put(found.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuDeviceGetProperties(prop: Out<DevProp>, dev: i32) {
        let d = device(dev)?;
        let three = |first: usize| [d.attribute(first), d.attribute(first + 1), d.attribute(first + 2)];
        prop.put(DevProp {
            maxThreadsPerBlock: d.attribute(attr::MAX_THREADS_PER_BLOCK),
            maxThreadsDim: three(attr::MAX_BLOCK_DIM_X),
            maxGridSize: three(attr::MAX_GRID_DIM_X),
            sharedMemPerBlock: d.attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK),
            totalConstantMemory: d.attribute(attr::TOTAL_CONSTANT_MEMORY),
            SIMDWidth: d.attribute(attr::WARP_SIZE),
            memPitch: d.attribute(attr::MAX_PITCH),
            regsPerBlock: d.attribute(attr::MAX_REGISTERS_PER_BLOCK),
            clockRate: d.attribute(attr::CLOCK_RATE),
            textureAlign: d.attribute(attr::TEXTURE_ALIGNMENT),
        })
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, dev: i32) {
        let device = device(dev)?;
        minor.required()?;
        major.put(device.attribute(attr::COMPUTE_CAPABILITY_MAJOR))?;
        minor.put(device.attribute(attr::COMPUTE_CAPABILITY_MINOR))
    }

    unsafe fn cuDeviceGetPCIBusId(text: *mut c_char, len: i32, dev: i32) {
        // SAFETY: the program passes a buffer of that length, by CUDA's manual.
        unsafe { put_text(text, len, &pci_bus_id(&device(dev)?.info.pci)) }
    }

    fn cuDeviceGetByPCIBusId(dev: Out<i32>, text: Text) {
        dev.required()?;
        text.required()?;
        let driver = driver()?;
        let wanted = text.get()?.to_str().ok().and_then(parse_pci_bus_id).ok_or(Status::INVALID_VALUE)?;
        let found = driver.devices.iter().find(|device| device.info.pci == wanted).ok_or(Status::INVALID_DEVICE)?;
        dev.put(found.ordinal as i32)
    }

    fn cuDeviceGetExecAffinitySupport(value: Out<i32>, kind: u32, dev: i32) {
        device(dev)?;
        if kind != 0 {
            return Err(Status::INVALID_VALUE);
        }
        value.put(0)
    }

    fn cuDevicePrimaryCtxRetain(context: Out<usize>, dev: i32) {
        context.required()?;
        let device = device(dev)?;
        driver()?.check()?;
        device.primary.retain();
        direct_copy::used(device.server);
        context.put(device.primary.handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: i32) {
        let device = device(dev)?;
        teardown::release(device.primary)
    }
    alias cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease_v2(dev: i32);

    fn cuDevicePrimaryCtxReset_v2(dev: i32) {
        teardown::reset(device(dev)?.primary)
    }
    alias cuDevicePrimaryCtxReset = cuDevicePrimaryCtxReset_v2(dev: i32);

    fn cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32) {
        device(dev)?.primary.set_flags(flags)
    }
    alias cuDevicePrimaryCtxSetFlags = cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32);

    fn cuDevicePrimaryCtxGetState(dev: i32, flags: Out<u32>, active: Out<i32>) {
        let primary = device(dev)?.primary;
        active.required()?;
        flags.put(primary.flags.load(Ordering::Relaxed))?;
        active.put(primary.is_alive().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bus_id_is_read_as_it_is_written() {
        assert_eq!(parse_pci_bus_id(&pci_bus_id(&[0, 0x9a, 1])), Some([0, 0x9a, 1]));
        assert_eq!(parse_pci_bus_id("9a:00.0"), Some([0, 0x9a, 0]));
        for wrong in ["", "x", "1:2:3:4", "0:0:0.1", "99999999999:0:0"] {
            assert_eq!(parse_pci_bus_id(wrong), None, "{wrong}");
        }
    }
}
