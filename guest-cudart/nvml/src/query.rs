//! Sends queries of each form, and writes the reply where the program wants it.

use std::ffi::c_char;
use std::ops::Range;

use client::ops::nvml::{
    FIELD_SIZE, MAX_FIELDS, NVLINK_CAPABILITY, NVLINK_REMOTE_PCI_INFO, NVLINK_STATE, NvmlQuery, Output,
    PCI_INFO, PCI_INFO_EXT, Query, status, struct_size,
};
use client::servers;

use crate::error::{Result, of_session};
use crate::state::{self, Handle};

/// Sends a query. The reply is what the function wrote on the server.
pub(crate) fn ask(device: Handle, query: &Query, arguments: &[u32], input: &[u8]) -> Result<Vec<u8>> {
    let connected = state::connected()?;
    let (server, device) = connected.place(state::ordinal(connected, device)?)?;
    let mut all = [0; 3];
    for (place, argument) in all.iter_mut().zip(arguments) {
        *place = *argument;
    }
    let question = NvmlQuery { device, query: query.number, arguments: all, input };
    let reply = server.session.call(&question).map_err(of_session)?;
    if reply.status != status::SUCCESS {
        return Err(reply.status);
    }
    let mut output = reply.output.0;
    if connected.has_several_servers() {
        hide_links(query, &mut output);
    }
    if server.session.index() > 0 {
        if [PCI_INFO.number, NVLINK_REMOTE_PCI_INFO.number].contains(&query.number) {
            // A short address, the numbers, two IDs, and a long address.
            distinguish(&mut output, server.session.index(), Some(0..16), 16, 36..68);
        } else if query.number == PCI_INFO_EXT.number {
            // The version, the numbers, four IDs, and a long address.
            distinguish(&mut output, server.session.index(), None, 4, 32..64);
        }
    }
    Ok(output)
}

/// For a program with devices of several servers, their NVLinks are off. Links that lead to a switch look as
/// if they led to the other servers' devices as well, and NCCL refuses to start where devices with NVLinks
/// cannot access each other's memory.
fn hide_links(query: &Query, output: &mut [u8]) {
    if [NVLINK_STATE.number, NVLINK_CAPABILITY.number].contains(&query.number) {
        output.fill(0);
    }
}

/// Replaces the PCI domain in a structure by the one that the program sees for this server, as the CUDA
/// library does.
fn distinguish(
    info: &mut [u8],
    server: usize,
    short: Option<Range<usize>>,
    number: usize,
    long: Range<usize>,
) -> Option<()> {
    let at = number..number + 4;
    let domain = u32::from_le_bytes(info.get(at.clone())?.try_into().ok()?);
    let domain = servers::distinct_domain(server, domain);
    info.get_mut(at)?.copy_from_slice(&domain.to_le_bytes());
    for (place, digits) in short.map(|place| (place, 4)).into_iter().chain([(long, 8)]) {
        // The digits of the domain come first; their number does not change.
        let text = format!("{domain:0digits$X}");
        info.get_mut(place)?.get_mut(..digits)?.copy_from_slice(text.as_bytes());
    }
    Some(())
}

/// `Err` for a NULL pointer.
pub(crate) fn non_null<T>(pointer: *const T) -> Result {
    if pointer.is_null() { Err(status::INVALID_ARGUMENT) } else { Ok(()) }
}

/// Copies out a reply of exactly `size` bytes. Another size means that the server is a different build.
unsafe fn write(answer: &[u8], size: usize, out: *mut u8) -> Result {
    if answer.len() != size {
        return Err(status::UNKNOWN);
    }
    // SAFETY: the caller guarantees that `size` bytes are writable.
    unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), out, size) };
    Ok(())
}

/// A query with [`Output::Block`].
///
/// # Safety
///
/// `out` is NULL or has room for the block.
pub(crate) unsafe fn block(device: Handle, query: &Query, arguments: &[u32], out: *mut u8) -> Result {
    let Output::Block(size) = query.output else { return Err(status::UNKNOWN) };
    non_null(out)?;
    // SAFETY: the caller guarantees room for the block.
    unsafe { write(&ask(device, query, arguments, &[])?, size, out) }
}

/// The first `size` bytes of a block, for a function whose structure has grown since.
///
/// # Safety
///
/// `out` is NULL or has room for `size` bytes.
pub(crate) unsafe fn front(
    device: Handle,
    query: &Query,
    arguments: &[u32],
    size: usize,
    out: *mut u8,
) -> Result {
    non_null(out)?;
    let answer = ask(device, query, arguments, &[])?;
    // SAFETY: the caller guarantees room for `size` bytes.
    unsafe { write(answer.get(..size).ok_or(status::UNKNOWN)?, size, out) }
}

/// A query with [`Output::Words`].
///
/// # Safety
///
/// Each pointer is NULL or writable.
pub(crate) unsafe fn words<const N: usize>(device: Handle, query: &Query, out: [*mut u32; N]) -> Result {
    // If the device does not support the query, that error comes before those of the pointers.
    let answer = ask(device, query, &[], &[])?;
    out.into_iter().try_for_each(|to| non_null(to))?;
    if answer.len() != 4 * N {
        return Err(status::UNKNOWN);
    }
    for (bytes, to) in answer.chunks_exact(4).zip(out) {
        // SAFETY: the caller guarantees writable words of four bytes.
        unsafe { write(bytes, 4, to.cast())? };
    }
    Ok(())
}

/// A query with [`Output::Text`].
///
/// # Safety
///
/// `text` is NULL or has room for `length` bytes.
pub(crate) unsafe fn text(
    device: Handle,
    query: &Query,
    arguments: &[u32],
    text: *mut c_char,
    length: u32,
) -> Result {
    non_null(text)?;
    // SAFETY: the caller guarantees room for `length` bytes.
    unsafe { put_text(&ask(device, query, arguments, &[])?, text, length) }
}

/// Writes a text with its terminating NUL.
///
/// # Safety
///
/// `to` has room for `length` bytes.
pub(crate) unsafe fn put_text(text: &[u8], to: *mut c_char, length: u32) -> Result {
    if text.len() >= length as usize {
        return Err(status::INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its NUL fit into `length` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// A query with [`Output::List`]. If there is too little room, the program learns the number of elements.
///
/// # Safety
///
/// `count` is NULL or readable and writable; `list` is NULL or has room for `*count` elements.
pub(crate) unsafe fn list(
    device: Handle,
    query: &Query,
    arguments: &[u32],
    count: *mut u32,
    list: *mut u8,
) -> Result {
    let Output::List(size) = query.output else { return Err(status::UNKNOWN) };
    non_null(count)?;
    let answer = ask(device, query, arguments, &[])?;
    let found = answer.len() / size;
    // SAFETY: the caller guarantees room for `*count` elements, and there are at most that many.
    unsafe {
        let room = count.replace(found as u32) as usize;
        if room < found {
            return Err(status::INSUFFICIENT_SIZE);
        }
        if found > 0 {
            non_null(list)?;
            write(&answer, found * size, list)?;
        }
    }
    Ok(())
}

/// A query with [`Output::Struct`], in the version that the structure's first word names.
///
/// # Safety
///
/// `structure` is NULL or points to a structure as long as its first word says.
pub(crate) unsafe fn versioned(device: Handle, queries: &[&Query], structure: *mut u8) -> Result {
    non_null(structure)?;
    // SAFETY: checked for NULL, and at least one word long.
    let word = unsafe { structure.cast::<u32>().read_unaligned() };
    let query = queries.iter().find(|query| query.output == Output::Struct(word));
    // nvml.h documents ARGUMENT_VERSION_MISMATCH, but NVIDIA's library 580 returns this for
    // nvmlDeviceGetMemoryInfo_v2.
    let query = query.ok_or(status::FUNCTION_NOT_FOUND)?;
    let size = struct_size(word);
    // SAFETY: the caller guarantees that the structure is as long as its version says.
    unsafe {
        let input = std::slice::from_raw_parts(structure, size).to_vec();
        write(&ask(device, query, &[], &input)?, size, structure)
    }
}

/// A query with [`Output::Fields`].
///
/// # Safety
///
/// `values` is NULL or points to `count` writable values.
pub(crate) unsafe fn fields(device: Handle, query: &Query, count: i32, values: *mut u8) -> Result {
    non_null(values)?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(status::INVALID_ARGUMENT)?;
    for first in (0..count).step_by(MAX_FIELDS) {
        let size = (count - first).min(MAX_FIELDS) * FIELD_SIZE;
        // SAFETY: the caller guarantees `count` writable values, and these are among them.
        unsafe {
            let at = values.add(first * FIELD_SIZE);
            let input = std::slice::from_raw_parts(at, size).to_vec();
            write(&ask(device, query, &[], &input)?, size, at)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_needs_room_for_its_nul() {
        let mut room = [1 as c_char; 4];
        // SAFETY: the buffer is as long as the length passed.
        unsafe {
            assert_eq!(put_text(b"abcd", room.as_mut_ptr(), 4), Err(status::INSUFFICIENT_SIZE));
            assert_eq!(put_text(b"abc", room.as_mut_ptr(), 4), Ok(()));
        }
        assert_eq!(room.map(|c| c as u8), *b"abc\0");
    }

    #[test]
    fn the_second_servers_devices_have_another_pci_domain() {
        let mut info = [0; 68];
        info[..12].copy_from_slice(b"0000:41:00.0");
        info[20..24].copy_from_slice(&0x41u32.to_le_bytes());
        info[36..52].copy_from_slice(b"00000000:41:00.0");
        assert!(distinguish(&mut info, 1, Some(0..16), 16, 36..68).is_some());
        assert_eq!(&info[..12], b"1000:41:00.0");
        assert_eq!(info[16..24], [0, 0x10, 0, 0, 0x41, 0, 0, 0]);
        assert_eq!(&info[36..52], b"00001000:41:00.0");
        assert!(distinguish(&mut [0; 10], 1, None, 4, 32..64).is_none());
    }

    #[test]
    fn links_are_off_and_other_answers_stay() {
        let mut answer = [1, 0, 0, 0];
        hide_links(client::ops::nvml::NVLINK_VERSION, &mut answer);
        assert_eq!(answer, [1, 0, 0, 0]);
        hide_links(NVLINK_STATE, &mut answer);
        assert_eq!(answer, [0; 4]);
    }

    #[test]
    fn queries_fail_before_initialization() {
        let mut out = [0; 4];
        // SAFETY: the output has room for one word.
        let answer =
            unsafe { block(std::ptr::null(), client::ops::nvml::POWER_USAGE, &[], out.as_mut_ptr()) };
        assert_eq!(answer, Err(status::UNINITIALIZED));
    }
}
