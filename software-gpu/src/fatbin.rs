//! Finds the PTX to run in an image: PTX text or a fat binary.
//!
//! A fat binary is one or more containers. Each has a header (magic, version, header size, size of the rest)
//! and entries with a kind, an architecture and a payload that may be compressed with LZ4 or zstd.

use std::io::Read;

use crate::error::{Error, Result};

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const CONTAINER_MAGIC: u32 = 0xba55_ed50;
const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
/// No real PTX is larger, but a corrupt header could claim to be.
const MAX_PTX: u64 = 1 << 30;

fn bytes<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N]> {
    let slice = data.get(at..at.saturating_add(N));
    slice.and_then(|s| s.try_into().ok()).ok_or_else(|| truncated(at, data.len()))
}

fn truncated(at: usize, len: usize) -> Error {
    Error::InvalidImage(format!("the fat binary ends at byte {len}, inside the header at {at}"))
}

fn u16_at(data: &[u8], at: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(bytes(data, at)?))
}
fn u32_at(data: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(bytes(data, at)?))
}
fn u64_at(data: &[u8], at: usize) -> Result<u64> {
    Ok(u64::from_le_bytes(bytes(data, at)?))
}

struct Entry<'a> {
    arch: u32,
    flags: u64,
    /// Bytes when decompressed; 0 when not compressed.
    size: u64,
    payload: &'a [u8],
}

/// Whether the code in `image` for a GPU of architecture `arch` contains `word` in its strings, symbols or
/// text. The image may be machine code, PTX or a fat binary of either. Returns `None` if the format is
/// unknown or the code is longer than `most` bytes when decompressed.
pub fn mentions(image: &[u8], arch: u32, word: &[u8], most: usize) -> Option<bool> {
    let has = |data: &[u8]| data.windows(word.len()).any(|bytes| bytes == word);
    if u32_at(image, 0).ok()? != CONTAINER_MAGIC {
        return (image.len() <= most).then(|| has(image));
    }
    let (mut data, mut left) = (image, most as u64);
    while data.len() >= 16 && u32_at(data, 0).ok()? == CONTAINER_MAGIC {
        let header = usize::from(u16_at(data, 6).ok()?);
        let end = usize::try_from(u64_at(data, 8).ok()?).ok()?.checked_add(header)?;
        let container = data.get(..end).filter(|container| !container.is_empty())?;
        let mut at = header;
        while at.saturating_add(16) <= container.len() {
            let (kind, entry, next) = entry(container, at).ok()?;
            // Machine code runs only on its own generation; PTX also on all later ones.
            let runs = entry.arch <= arch && (kind != KIND_ELF || entry.arch / 10 == arch / 10);
            if runs {
                left = left.checked_sub(entry.size.max(entry.payload.len() as u64))?;
                if has(&unpack(&entry).ok()?) {
                    return Some(true);
                }
            }
            at = next;
        }
        data = &data[end.next_multiple_of(8).min(data.len())..];
    }
    Some(false)
}

/// The texts of the best PTX in `image` for a GPU of architecture `arch` (90 for compute capability 9.0): the
/// newest that is not newer than the GPU.
///
/// `nvcc -rdc=true` produces the device linker's output followed by the containers that it linked. If the
/// first container has no PTX, the best PTX of each of the others is returned, to be linked here.
pub(crate) fn select_ptx(image: &[u8], arch: u32) -> Result<Vec<String>> {
    if image.len() >= 4 {
        let magic = u32_at(image, 0)?;
        if magic == CONTAINER_MAGIC {
            return from_containers(image, arch);
        }
        if magic == WRAPPER_MAGIC {
            return Err(Error::InvalidImage(
                "a fat binary wrapper only holds pointers: pass the container that it points to".into(),
            ));
        }
        if image.starts_with(b"\x7fELF") {
            return Err(Error::NoBinaryForGpu("the image is machine code (a cubin)".into()));
        }
    }
    let text = text(image)?;
    let target = ptx_target(&text);
    match target {
        None => Err(Error::InvalidImage("it begins with no magic number and has no .target".into())),
        Some(target) if target > arch => Err(Error::NoBinaryForGpu(format!("its target is sm_{target}"))),
        Some(_) => Ok(vec![text]),
    }
}

/// PTX text without trailing zeros.
fn text(data: &[u8]) -> Result<String> {
    let end = data.iter().position(|&b| b == 0).unwrap_or(data.len());
    String::from_utf8(data[..end].to_vec())
        .map_err(|e| Error::InvalidImage(format!("the PTX is not UTF-8: {e}")))
}

/// The number in `.target sm_NN`.
fn ptx_target(text: &str) -> Option<u32> {
    let line = text.lines().find_map(|l| l.trim_start().strip_prefix(".target"))?;
    let name = line.split(',').next()?.trim().strip_prefix("sm_")?;
    name.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok()
}

fn from_containers(mut data: &[u8], arch: u32) -> Result<Vec<String>> {
    let mut out = Vec::new();
    let mut seen = Vec::new();
    let mut first = true;
    while data.len() >= 16 && u32_at(data, 0)? == CONTAINER_MAGIC {
        let header = usize::from(u16_at(data, 6)?);
        let size = u64_at(data, 8)?;
        let end = usize::try_from(size).ok().and_then(|s| s.checked_add(header)).filter(|&e| e <= data.len());
        let end = end.filter(|&e| e > 0).ok_or_else(|| truncated(header, data.len()))?;
        if let Some(entry) = best_entry(&data[..end], header, arch, &mut seen)? {
            out.push(text(&unpack(&entry)?)?);
            if first {
                break;
            }
        }
        first = false;
        data = &data[end.next_multiple_of(8).min(data.len())..];
    }
    if out.is_empty() {
        return Err(Error::NoBinaryForGpu(format!(
            "the fat binary contains only {}; build it with PTX (-gencode … code=compute_XX, at most {arch})",
            seen.join(", ")
        )));
    }
    Ok(out)
}

/// The best PTX of one container, whose entries begin at `at`.
fn best_entry<'a>(
    data: &'a [u8],
    mut at: usize,
    arch: u32,
    seen: &mut Vec<String>,
) -> Result<Option<Entry<'a>>> {
    let mut best: Option<Entry<'_>> = None;
    while at.saturating_add(16) <= data.len() {
        let (kind, entry, next) = entry(data, at)?;
        let what = match kind {
            KIND_PTX => "PTX",
            KIND_ELF => "machine code",
            _ => "unknown kind",
        };
        seen.push(format!("{what} sm_{}", entry.arch));
        if kind == KIND_PTX && entry.arch <= arch && best.as_ref().is_none_or(|b| entry.arch > b.arch) {
            best = Some(entry);
        }
        at = next;
    }
    Ok(best)
}

/// The kind of the entry at `at` of a container, the entry, and where the next one begins.
fn entry(data: &[u8], at: usize) -> Result<(u16, Entry<'_>, usize)> {
    let kind = u16_at(data, at)?;
    let head = u32_at(data, at + 4)? as usize;
    let length = u64_at(data, at + 8)? as usize;
    if head < 0x30 {
        return Err(Error::InvalidImage(format!("an entry's header of {head} bytes at {at}")));
    }
    let start = at.saturating_add(head);
    let stop = start.saturating_add(length);
    if stop > data.len() {
        return Err(truncated(at, data.len()));
    }
    let packed = u32_at(data, at + 0x10)? as usize;
    let flags = u64_at(data, at + 0x28)?;
    let compressed = flags & (FLAG_LZ4 | FLAG_ZSTD) != 0;
    let size = if compressed { u64_at(data, at + 0x38)? } else { 0 };
    let used = if compressed && packed != 0 { packed.min(length) } else { length };
    let entry = Entry { arch: u32_at(data, at + 0x1c)?, flags, size, payload: &data[start..start + used] };
    Ok((kind, entry, stop))
}

fn unpack(entry: &Entry<'_>) -> Result<Vec<u8>> {
    if entry.size > MAX_PTX {
        return Err(Error::InvalidImage(format!("code of {} bytes", entry.size)));
    }
    if entry.flags & FLAG_ZSTD != 0 {
        let mut out = Vec::with_capacity(entry.size as usize);
        let decoder = ruzstd::decoding::StreamingDecoder::new(entry.payload)
            .map_err(|e| Error::InvalidImage(format!("zstd: {e}")))?;
        decoder
            .take(entry.size.max(1))
            .read_to_end(&mut out)
            .map_err(|e| Error::InvalidImage(format!("zstd: {e}")))?;
        return Ok(out);
    }
    if entry.flags & FLAG_LZ4 != 0 {
        let out = lz4_flex::block::decompress(entry.payload, entry.size as usize)
            .map_err(|e| Error::InvalidImage(format!("LZ4: {e}")))?;
        return Ok(out);
    }
    Ok(entry.payload.to_vec())
}
