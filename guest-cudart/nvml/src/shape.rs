//! Questions in each of their shapes: asked of the server, and the answer written where the program wants it.

use std::ffi::c_char;

use client::ops::nvml::{FIELD_SIZE, MAX_FIELDS, NvmlQuery, Output, Query, status, struct_size};

use crate::error::{Result, of_session};
use crate::state::{self, Handle};

/// Asks; the answer is what the function wrote on the server.
pub(crate) fn ask(device: Handle, query: &Query, arguments: &[u32], input: &[u8]) -> Result<Vec<u8>> {
    let connected = state::connected()?;
    let device = state::ordinal(connected, device)?;
    let mut all = [0; 3];
    for (place, argument) in all.iter_mut().zip(arguments) {
        *place = *argument;
    }
    let question = NvmlQuery { device, query: query.number, arguments: all, input };
    let reply = connected.session.call(&question).map_err(of_session)?;
    if reply.status == status::SUCCESS { Ok(reply.output.0) } else { Err(reply.status) }
}

/// `Err` for a NULL pointer.
pub(crate) fn non_null<T>(pointer: *const T) -> Result {
    if pointer.is_null() { Err(status::INVALID_ARGUMENT) } else { Ok(()) }
}

/// Copies an answer of exactly `size` bytes out; another size is an answer of a server of another build.
unsafe fn write(answer: &[u8], size: usize, out: *mut u8) -> Result {
    if answer.len() != size {
        return Err(status::UNKNOWN);
    }
    // SAFETY: the caller says that `size` bytes may be written.
    unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), out, size) };
    Ok(())
}

/// A question whose answer is [`Output::Block`].
///
/// # Safety
/// `out` is NULL or has room for the block.
pub(crate) unsafe fn block(device: Handle, query: &Query, arguments: &[u32], out: *mut u8) -> Result {
    let Output::Block(size) = query.output else { return Err(status::UNKNOWN) };
    non_null(out)?;
    // SAFETY: the caller's.
    unsafe { write(&ask(device, query, arguments, &[])?, size, out) }
}

/// The first `size` bytes of a block, for a function whose structure has grown since.
///
/// # Safety
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
    // SAFETY: the caller's.
    unsafe { write(answer.get(..size).ok_or(status::UNKNOWN)?, size, out) }
}

/// A question whose answer is [`Output::Words`].
///
/// # Safety
/// Each pointer is NULL or may be written.
pub(crate) unsafe fn words<const N: usize>(device: Handle, query: &Query, out: [*mut u32; N]) -> Result {
    // A device that has no answer says so whatever the pointers are.
    let answer = ask(device, query, &[], &[])?;
    out.into_iter().try_for_each(|to| non_null(to))?;
    if answer.len() != 4 * N {
        return Err(status::UNKNOWN);
    }
    for (bytes, to) in answer.chunks_exact(4).zip(out) {
        // SAFETY: the caller's; four bytes are one word.
        unsafe { write(bytes, 4, to.cast())? };
    }
    Ok(())
}

/// A question whose answer is [`Output::Text`].
///
/// # Safety
/// `text` is NULL or has room for `length` bytes.
pub(crate) unsafe fn text(
    device: Handle,
    query: &Query,
    arguments: &[u32],
    text: *mut c_char,
    length: u32,
) -> Result {
    non_null(text)?;
    // SAFETY: the caller's.
    unsafe { put_text(&ask(device, query, arguments, &[])?, text, length) }
}

/// Writes a text with its NUL.
///
/// # Safety
/// `to` has room for `length` bytes.
pub(crate) unsafe fn put_text(text: &[u8], to: *mut c_char, length: u32) -> Result {
    if text.len() >= length as usize {
        return Err(status::INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its NUL are no longer than `length`.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// A question whose answer is [`Output::List`]. With less room than there are elements, the program learns how many.
///
/// # Safety
/// `count` is NULL or may be read and written; `list` is NULL or has room for `*count` elements.
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
    // SAFETY: the caller's; the elements fit into what the program has room for.
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

/// A question whose answer is [`Output::Struct`], in the version that the program's structure begins with.
///
/// # Safety
/// `structure` is NULL or points to a structure as long as its first word says.
pub(crate) unsafe fn versioned(device: Handle, queries: &[&Query], structure: *mut u8) -> Result {
    non_null(structure)?;
    // SAFETY: not NULL, and at least one word long.
    let word = unsafe { structure.cast::<u32>().read_unaligned() };
    let query = queries.iter().find(|query| query.output == Output::Struct(word));
    // Not ARGUMENT_VERSION_MISMATCH, as nvml.h has it: this is what NVIDIA's 580 answers for nvmlDeviceGetMemoryInfo_v2.
    let query = query.ok_or(status::FUNCTION_NOT_FOUND)?;
    let size = struct_size(word);
    // SAFETY: the caller's: the structure is of the version that it names.
    unsafe {
        let input = std::slice::from_raw_parts(structure, size).to_vec();
        write(&ask(device, query, &[], &input)?, size, structure)
    }
}

/// A question whose answer is [`Output::Fields`].
///
/// # Safety
/// `values` is NULL or points to `count` values, which may be written.
pub(crate) unsafe fn fields(device: Handle, query: &Query, count: i32, values: *mut u8) -> Result {
    non_null(values)?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(status::INVALID_ARGUMENT)?;
    for first in (0..count).step_by(MAX_FIELDS) {
        let size = (count - first).min(MAX_FIELDS) * FIELD_SIZE;
        // SAFETY: the caller's: these values are among the `count`.
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
    fn a_text_needs_room_for_its_nul() {
        let mut room = [1 as c_char; 4];
        // SAFETY: the room is as long as is said.
        unsafe {
            assert_eq!(put_text(b"abcd", room.as_mut_ptr(), 4), Err(status::INSUFFICIENT_SIZE));
            assert_eq!(put_text(b"abc", room.as_mut_ptr(), 4), Ok(()));
        }
        assert_eq!(room.map(|c| c as u8), *b"abc\0");
    }

    #[test]
    fn nothing_is_asked_before_initialization() {
        let mut out = [0; 4];
        // SAFETY: the output has room for one word.
        let answer =
            unsafe { block(std::ptr::null(), client::ops::nvml::POWER_USAGE, &[], out.as_mut_ptr()) };
        assert_eq!(answer, Err(status::UNINITIALIZED));
    }
}
