//! Code images as programs pass them: a pointer without a length. The length is found in the image.
//!
//! | begins with | what | length |
//! |---|---|---|
//! | 0x466243B1 | fat binary wrapper | that of the fat binary it points to |
//! | 0xBA55ED50 | fat binary | header + size from the header |
//! | 0x7F 'E' 'L' 'F' | cubin | end of its last section or table |
//! | anything else | PTX text | up to and including its NUL |
//!
//! A wrapper of version 2 (`nvcc -rdc=true`) also points to the fat binaries that its own was linked from,
//! for devices it has no machine code for. They are sent to the server after it, each at a multiple of 8
//! bytes: a driver that can use the first stops there.

use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::abi::result::Result;
use client::Status;

const WRAPPER: u32 = 0x4662_43B1;
const FAT_BINARY: u32 = 0xBA55_ED50;
const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
/// No image is larger. A larger length means that the data is not an image.
const MOST: usize = 4 << 30;

/// The bytes of an image.
///
/// # Safety
/// `image` points to one complete image of the forms above, which does not change during `'a`.
pub(crate) unsafe fn bytes<'a>(image: *const c_void) -> Result<Cow<'a, [u8]>> {
    if image.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the shortest form, PTX text, may have fewer than four bytes, so its NUL is looked for first.
    let first = unsafe { first_word(image.cast()) };
    // SAFETY: the caller passes a complete image of whichever form.
    unsafe {
        match first {
            Some(WRAPPER) => wrapped(image.cast()),
            Some(FAT_BINARY) => fat_binary(image).map(Cow::Borrowed),
            Some(ELF) => slice(image, elf_len(image.cast())).map(Cow::Borrowed),
            _ => {
                let text = CStr::from_ptr(image.cast()).to_bytes_with_nul();
                if text.len() <= 1 { Err(Status::INVALID_IMAGE) } else { Ok(Cow::Borrowed(text)) }
            }
        }
    }
}

/// The fat binaries that a wrapper points to.
unsafe fn wrapped<'a>(wrapper: *const u8) -> Result<Cow<'a, [u8]>> {
    // SAFETY: a wrapper is 24 bytes: magic, version, the code, and with version 2 a NULL-terminated list of
    // prelinked fat binaries.
    unsafe {
        let version = wrapper.add(4).cast::<u32>().read_unaligned();
        let data = wrapper.add(8).cast::<*const c_void>().read_unaligned();
        let mut list = wrapper.add(16).cast::<*const *const c_void>().read_unaligned();
        let first = if data.is_null() {
            Cow::Borrowed(&[][..])
        } else if matches!(first_word(data.cast()), Some(WRAPPER) | None) {
            return Err(Status::INVALID_IMAGE);
        } else {
            bytes(data)?
        };
        if version < 2 || list.is_null() || (*list).is_null() {
            return if first.is_empty() { Err(Status::INVALID_IMAGE) } else { Ok(first) };
        }
        let mut all = first.into_owned();
        while !(*list).is_null() {
            if first_word((*list).cast()) != Some(FAT_BINARY) {
                return Err(Status::INVALID_IMAGE);
            }
            all.resize(all.len().next_multiple_of(8), 0);
            all.extend_from_slice(fat_binary(*list)?);
            list = list.add(1);
        }
        Ok(Cow::Owned(all))
    }
}

unsafe fn fat_binary<'a>(image: *const c_void) -> Result<&'a [u8]> {
    // SAFETY: a fat binary's header is 16 bytes: magic, version, its own size, the size of what follows.
    unsafe {
        let header = image.cast::<u8>().add(6).cast::<u16>().read_unaligned();
        let size = image.cast::<u8>().add(8).cast::<u64>().read_unaligned();
        slice(image, usize::try_from(size).ok().and_then(|size| size.checked_add(header.into())))
    }
}

unsafe fn slice<'a>(image: *const c_void, len: Option<usize>) -> Result<&'a [u8]> {
    let len = len.filter(|len| *len <= MOST).ok_or(Status::INVALID_IMAGE)?;
    // SAFETY: the caller's image is as long as its own header says.
    Ok(unsafe { std::slice::from_raw_parts(image.cast(), len) })
}

/// The first four bytes, unless one of the first three is NUL.
unsafe fn first_word(image: *const u8) -> Option<u32> {
    let mut word = [0; 4];
    for (i, byte) in word.iter_mut().enumerate() {
        // SAFETY: nothing after a NUL is read; in a magic number only the last byte may be NUL.
        *byte = unsafe { image.add(i).read() };
        if *byte == 0 {
            return None;
        }
    }
    Some(u32::from_le_bytes(word))
}

/// Length of a 64-bit little-endian ELF file: the end of its last part.
unsafe fn elf_len(image: *const u8) -> Option<usize> {
    // SAFETY: the header is 64 bytes; its tables are where the header says, all inside the image.
    unsafe {
        let half = |at: usize| usize::from(image.add(at).cast::<u16>().read_unaligned());
        let word = |at: usize| usize::try_from(image.add(at).cast::<u64>().read_unaligned()).ok();
        if image.add(4).read() != 2 || image.add(5).read() != 1 {
            return None;
        }
        let (programs, sections) = (word(32)?, word(40)?);
        let (header, program_size, program_count) = (half(52), half(54), half(56));
        let (section_size, section_count) = (half(58), half(60));
        let mut end = header.max(64);
        if program_count != 0 {
            end = end.max(programs.checked_add(program_size.checked_mul(program_count)?)?);
            for i in 0..program_count {
                let at = programs.checked_add(i * program_size)?;
                end = end.max(word(at.checked_add(8)?)?.checked_add(word(at.checked_add(32)?)?)?);
            }
        }
        if section_count != 0 {
            end = end.max(sections.checked_add(section_size.checked_mul(section_count)?)?);
            for i in 0..section_count {
                let at = sections.checked_add(i * section_size)?;
                let kind = image.add(at.checked_add(4)?).cast::<u32>().read_unaligned();
                // SHT_NOBITS has no bytes in the file.
                if kind != 8 {
                    end = end.max(word(at.checked_add(24)?)?.checked_add(word(at.checked_add(32)?)?)?);
                }
            }
        }
        (end <= MOST).then_some(end)
    }
}

/// A file's bytes, with a NUL after them in case they are PTX.
pub(crate) fn read_file(name: &CStr) -> Result<Vec<u8>> {
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let mut bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Status::FILE_NOT_FOUND,
        _ => Status::INVALID_SOURCE,
    })?;
    bytes.push(0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Result<Cow<'_, [u8]>> {
        // SAFETY: the tests pass complete images.
        unsafe { super::bytes(bytes.as_ptr().cast()) }
    }

    fn fat(payload: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(FAT_BINARY.to_le_bytes());
        bytes.extend(1u16.to_le_bytes());
        bytes.extend(16u16.to_le_bytes());
        bytes.extend((payload as u64).to_le_bytes());
        bytes.resize(16 + payload, 7);
        bytes
    }

    #[test]
    fn ptx_ends_with_its_nul() {
        assert_eq!(*of(b".version 7.0\0trailing").unwrap(), *b".version 7.0\0");
        assert_eq!(*of(b"x\0").unwrap(), *b"x\0");
        assert_eq!(of(b"\0"), Err(Status::INVALID_IMAGE));
    }

    #[test]
    fn a_fat_binarys_length_is_in_its_header() {
        let mut bytes = fat(100);
        bytes.extend([9; 50]);
        assert_eq!(of(&bytes).unwrap().len(), 116);
    }

    fn wrapper(version: u32, data: *const u8, list: *const *const u8) -> Vec<u8> {
        let mut wrapper = Vec::new();
        wrapper.extend(WRAPPER.to_le_bytes());
        wrapper.extend(version.to_le_bytes());
        wrapper.extend((data as u64).to_le_bytes());
        wrapper.extend((list as u64).to_le_bytes());
        wrapper
    }

    #[test]
    fn a_wrapper_leads_to_its_fat_binary() {
        let inner = fat(40);
        assert_eq!(*of(&wrapper(1, inner.as_ptr(), std::ptr::null())).unwrap(), *inner);
        assert_eq!(*of(&wrapper(2, inner.as_ptr(), std::ptr::null())).unwrap(), *inner);
        assert_eq!(of(&wrapper(1, std::ptr::null(), std::ptr::null())), Err(Status::INVALID_IMAGE));
    }

    #[test]
    fn prelinked_fat_binaries_follow_the_linked_one() {
        let (linked, one, two) = (fat(33), fat(8), fat(16));
        let list = [one.as_ptr(), two.as_ptr(), std::ptr::null()];
        let all = of(&wrapper(2, linked.as_ptr(), list.as_ptr())).unwrap().into_owned();
        assert_eq!(all.len(), 49 + 7 + 24 + 32);
        assert_eq!((&all[..49], &all[56..80], &all[80..]), (&linked[..], &one[..], &two[..]));
    }

    #[test]
    fn a_cubin_ends_where_its_last_part_does() {
        let mut elf = vec![0u8; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[52..54].copy_from_slice(&64u16.to_le_bytes());
        elf[40..48].copy_from_slice(&64u64.to_le_bytes());
        elf[58..60].copy_from_slice(&64u16.to_le_bytes());
        elf[60..62].copy_from_slice(&1u16.to_le_bytes());
        let mut section = [0u8; 64];
        section[4..8].copy_from_slice(&1u32.to_le_bytes());
        section[24..32].copy_from_slice(&128u64.to_le_bytes());
        section[32..40].copy_from_slice(&72u64.to_le_bytes());
        elf.extend(section);
        elf.resize(400, 0);
        assert_eq!(of(&elf).unwrap().len(), 200);
    }
}
