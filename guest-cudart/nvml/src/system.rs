//! Initialization and shutdown, functions without a device, finding devices, and queries of two devices.

use std::ffi::{CStr, c_char};

use client::ops::nvml::{self, NvmlPair, NvmlText, status};
use client::servers::parse_pci;

use crate::error::{Result, of_session};
use crate::query::{ask, non_null, put_text};
use crate::state::{self, Connected, Handle};

/// Room for the text in an `nvmlUUID_v1_t`, in bytes.
const UUID_TEXT: usize = 41;

/// # Safety
///
/// `text` is NULL or has room for `length` bytes.
unsafe fn system_text(answer: &NvmlText, text: *mut c_char, length: u32) -> Result {
    non_null(text)?;
    match answer.status {
        // SAFETY: the caller guarantees room for `length` bytes.
        status::SUCCESS => unsafe { put_text(answer.text.as_bytes(), text, length) },
        failure => Err(failure),
    }
}

/// # Safety
///
/// `to` is NULL or writable.
unsafe fn put<T>(to: *mut T, value: T) -> Result {
    non_null(to)?;
    // SAFETY: checked for NULL; the caller makes it writable.
    unsafe { to.write(value) };
    Ok(())
}

/// The first device for which `is` returns true.
fn find(connected: &Connected, is: impl Fn(Handle) -> bool) -> Result<Handle> {
    (0..connected.device_count())
        .filter_map(|ordinal| state::handle(connected, ordinal).ok())
        .find(|device| is(*device))
        .ok_or(status::NOT_FOUND)
}

/// The device for which a query returns the text `wanted`.
fn find_by_text(query: &nvml::Query, wanted: &[u8]) -> Result<Handle> {
    let connected = state::connected()?;
    find(connected, |device| ask(device, query, &[], &[]).is_ok_and(|text| text.eq_ignore_ascii_case(wanted)))
}

/// Whether an `nvmlPciInfo_t` is for this address. The numbers follow 16 bytes of text.
fn is_at(info: &[u8], place: [u32; 3]) -> bool {
    let words = info.get(16..28).map(|bytes| bytes.chunks_exact(4));
    words.is_some_and(|words| words.zip(place).all(|(bytes, number)| bytes == number.to_le_bytes()))
}

/// # Safety
///
/// `text` is a C string or NULL; `device` is NULL or writable.
unsafe fn by_pci(text: *const c_char, device: *mut Handle) -> Result {
    non_null(text)?;
    non_null(device)?;
    // SAFETY: checked for NULL; the caller passes a C string.
    let parsed = unsafe { CStr::from_ptr(text) }.to_str().ok().and_then(parse_pci);
    let (place, _function) = parsed.ok_or(status::INVALID_ARGUMENT)?;
    let at = |device| ask(device, nvml::PCI_INFO, &[], &[]).is_ok_and(|info| is_at(&info, place));
    // SAFETY: the caller passes NULL or a writable pointer.
    unsafe { put(device, find(state::connected()?, at)?) }
}

/// # Safety
///
/// `device` is NULL or writable.
unsafe fn by_index(index: u32, device: *mut Handle) -> Result {
    // SAFETY: the caller passes NULL or a writable pointer.
    unsafe { put(device, state::handle(state::connected()?, index)?) }
}

/// # Safety
///
/// `count` is NULL or writable.
unsafe fn device_count(count: *mut u32) -> Result {
    // SAFETY: the caller passes NULL or a writable pointer.
    unsafe { put(count, state::connected()?.device_count()) }
}

/// The answers about two devices of different servers.
fn between_servers(question: u32) -> Result<u32> {
    /// `NVML_TOPOLOGY_SYSTEM`.
    const SYSTEM: u32 = 50;
    /// `NVML_P2P_STATUS_NOT_SUPPORTED`.
    const NO_PEERS: u32 = 5;
    match question {
        nvml::pair::TOPOLOGY_COMMON_ANCESTOR => Ok(SYSTEM),
        nvml::pair::ON_SAME_BOARD => Ok(0),
        nvml::pair::P2P_STATUS => Ok(NO_PEERS),
        _ => Err(status::NOT_SUPPORTED),
    }
}

fn pair(device: Handle, peer: Handle, question: u32, argument: u32) -> Result<u32> {
    let connected = state::connected()?;
    let (device, peer) = (state::ordinal(connected, device)?, state::ordinal(connected, peer)?);
    let ((server, device), (other, peer)) = (connected.place(device)?, connected.place(peer)?);
    if !std::ptr::eq(server, other) {
        return between_servers(question);
    }
    let reply = server.session.call(&NvmlPair { device, peer, question, argument }).map_err(of_session)?;
    if reply.status == status::SUCCESS { Ok(reply.value) } else { Err(reply.status) }
}

nvml! {
    fn nvmlInit() {
        state::init()
    }

    fn nvmlInit_v2() {
        state::init()
    }

    // The flags allow a missing or detached GPU, which never occurs here.
    fn nvmlInitWithFlags(_flags: u32) {
        state::init()
    }

    fn nvmlShutdown() {
        state::shutdown()
    }

    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) {
        system_text(&state::connected()?.first().system.driver_version, version, length)
    }

    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) {
        system_text(&state::connected()?.first().system.nvml_version, version, length)
    }

    fn nvmlSystemGetCudaDriverVersion(version: *mut i32) {
        put(version, state::connected()?.first().system.cuda_version as i32)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) {
        put(version, state::connected()?.first().system.cuda_version as i32)
    }

    fn nvmlDeviceGetCount(count: *mut u32) {
        device_count(count)
    }

    fn nvmlDeviceGetCount_v2(count: *mut u32) {
        device_count(count)
    }

    fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut Handle) {
        by_index(index, device)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Handle) {
        by_index(index, device)
    }

    fn nvmlDeviceGetHandleByPciBusId(text: *const c_char, device: *mut Handle) {
        by_pci(text, device)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, device: *mut Handle) {
        by_pci(text, device)
    }

    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut Handle) {
        non_null(serial)?;
        non_null(device)?;
        put(device, find_by_text(nvml::SERIAL, CStr::from_ptr(serial).to_bytes())?)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Handle) {
        non_null(uuid)?;
        non_null(device)?;
        put(device, find_by_text(nvml::UUID, CStr::from_ptr(uuid).to_bytes())?)
    }

    // `nvmlUUID_v1_t`: version, kind (1: text, 2: 16 bytes), value.
    fn nvmlDeviceGetHandleByUUIDV(uuid: *const [u8; 52], device: *mut Handle) {
        non_null(uuid)?;
        non_null(device)?;
        let uuid = uuid.read();
        let (words, value) = uuid.split_at(8);
        let text: Vec<u8> = match words {
            [52, 0, 0, 1, 1, 0, 0, 0] => {
                value.iter().take(UUID_TEXT).copied().take_while(|byte| *byte != 0).collect()
            }
            [52, 0, 0, 1, 2, 0, 0, 0] => {
                let bytes = value.first_chunk().ok_or(status::UNKNOWN)?;
                format!("GPU-{}", nvml::uuid_text(bytes)).into_bytes()
            }
            [52, 0, 0, 1, ..] => return Err(status::INVALID_ARGUMENT),
            _ => return Err(status::ARGUMENT_VERSION_MISMATCH),
        };
        put(device, find_by_text(nvml::UUID, &text)?)
    }

    fn nvmlDeviceGetIndex(device: Handle, index: *mut u32) {
        put(index, state::ordinal(state::connected()?, device)?)
    }

    // Devices are whole GPUs, or whatever the server's driver presents as one.
    fn nvmlDeviceIsMigDeviceHandle(device: Handle, is: *mut u32) {
        state::ordinal(state::connected()?, device)?;
        put(is, 0)
    }

    fn nvmlGetExcludedDeviceCount(count: *mut u32) {
        put(count, 0)
    }

    // Units are enclosures of S-class systems, of which there are none.
    fn nvmlUnitGetCount(count: *mut u32) {
        state::connected()?;
        put(count, 0)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(device: Handle, peer: Handle, level: *mut u32) {
        non_null(level)?;
        put(level, pair(device, peer, 0, 0)?)
    }

    fn nvmlDeviceOnSameBoard(device: Handle, peer: Handle, same: *mut i32) {
        non_null(same)?;
        put(same, pair(device, peer, 1, 0)? as i32)
    }

    fn nvmlDeviceGetP2PStatus(device: Handle, peer: Handle, kind: u32, answer: *mut u32) {
        non_null(answer)?;
        put(answer, pair(device, peer, 2, kind)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_s_address_follows_its_short_name() {
        let mut info = [0; 68];
        info[16..28].copy_from_slice(&[1, 0, 0, 0, 0x1b, 0, 0, 0, 2, 0, 0, 0]);
        assert!(is_at(&info, [1, 0x1b, 2]));
        assert!(!is_at(&info, [0, 0x1b, 2]));
        assert!(!is_at(&info[..20], [1, 0x1b, 2]));
    }

    #[test]
    fn shutdown_without_initialization_is_an_error() {
        // SAFETY: the function takes nothing.
        assert_eq!(unsafe { nvmlShutdown() }, status::UNINITIALIZED);
    }
}
