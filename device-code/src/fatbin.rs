//! Fat binaries: one or more containers, each with a header (magic, version, header size, size of the rest)
//! and entries. An entry has a kind, an architecture, and a payload that may be compressed with LZ4 or zstd.

use std::borrow::Cow;
use std::io::Read as _;

/// The magic at the start of a container, as a little-endian number.
pub const MAGIC: u32 = 0xba55_ed50;

const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// Code for one architecture and no later one (`sm_90a`, `compute_90a`), or for its family (`sm_100f`).
const SPECIFIC: u64 = 0x0010_0000;
/// Bytes of a container's header and of the shortest header of an entry.
const HEADER: usize = 16;
const ENTRY: usize = 0x30;

/// What is wrong with a fat binary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is cut off.
    #[error("the fat binary ends at byte {len}, inside the part that begins at {at}")]
    Truncated {
        /// Where the cut part begins.
        at: usize,
        /// Size of the fat binary in bytes.
        len: usize,
    },
    /// An entry's header is shorter than any valid one.
    #[error("an entry's header of {len} bytes at {at}")]
    Header {
        /// Where the entry begins.
        at: usize,
        /// Bytes of its header.
        len: usize,
    },
    /// The unpacked payload would be longer than the caller allows.
    #[error("code of {0} bytes")]
    TooLong(u64),
    /// A payload cannot be unpacked.
    #[error("{0}")]
    Packed(String),
}

type Result<T> = std::result::Result<T, Error>;

/// What an entry contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// PTX text.
    Ptx,
    /// Machine code: a cubin.
    Elf,
    /// Something else.
    Other(u16),
}

/// An entry of a container.
#[derive(Debug, Clone)]
pub struct Entry<'a> {
    /// What it contains.
    pub kind: Kind,
    /// The architecture that it was compiled for: 90 for compute capability 9.0.
    pub arch: u32,
    /// Whether it is only for that architecture or its family, not for later ones. This holds for PTX, too.
    pub specific: bool,
    flags: u64,
    /// Size of the unpacked payload in bytes; 0 if it is not packed.
    size: u64,
    payload: &'a [u8],
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N]> {
    let found = data.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().ok_or(Error::Truncated { at, len: data.len() })
}

fn half(data: &[u8], at: usize) -> Result<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn word(data: &[u8], at: usize) -> Result<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn long(data: &[u8], at: usize) -> Result<u64> {
    bytes(data, at).map(u64::from_le_bytes)
}

/// Whether an image is a fat binary.
pub fn is_fat_binary(image: &[u8]) -> bool {
    word(image, 0) == Ok(MAGIC)
}

/// The containers of a fat binary, each with its entries. Anything after the last container is ignored.
pub fn containers(image: &[u8]) -> impl Iterator<Item = Result<Vec<Entry<'_>>>> {
    let mut rest = image;
    std::iter::from_fn(move || {
        if rest.len() < HEADER || !is_fat_binary(rest) {
            return None;
        }
        let (entries, next) = match container(rest) {
            Ok((entries, end)) => (Ok(entries), end.next_multiple_of(8).min(rest.len())),
            Err(error) => (Err(error), rest.len()),
        };
        rest = &rest[next..];
        Some(entries)
    })
}

/// The entries of the first container, and where it ends.
fn container(data: &[u8]) -> Result<(Vec<Entry<'_>>, usize)> {
    let (header, size) = (usize::from(half(data, 6)?), long(data, 8)?);
    let end = usize::try_from(size).ok().and_then(|size| size.checked_add(header));
    let end = end.filter(|end| header >= HEADER && *end <= data.len());
    let end = end.ok_or(Error::Truncated { at: header, len: data.len() })?;
    let (data, mut at, mut entries) = (&data[..end], header, Vec::new());
    while at.saturating_add(16) <= end {
        let (entry, next) = entry(data, at)?;
        entries.push(entry);
        at = next;
    }
    Ok((entries, end))
}

/// The entry at `at`, and where the next one begins.
fn entry(data: &[u8], at: usize) -> Result<(Entry<'_>, usize)> {
    let (head, length) = (word(data, at + 4)? as usize, long(data, at + 8)? as usize);
    if head < ENTRY {
        return Err(Error::Header { at, len: head });
    }
    let start = at.saturating_add(head);
    let stop = start.saturating_add(length);
    if stop > data.len() {
        return Err(Error::Truncated { at, len: data.len() });
    }
    let (packed, flags) = (word(data, at + 0x10)? as usize, long(data, at + 0x28)?);
    let compressed = flags & (LZ4 | ZSTD) != 0;
    let size = if compressed { long(data, at + 0x38)? } else { 0 };
    let used = if compressed && packed != 0 { packed.min(length) } else { length };
    let kind = match half(data, at)? {
        1 => Kind::Ptx,
        2 => Kind::Elf,
        other => Kind::Other(other),
    };
    let (arch, payload) = (word(data, at + 0x1c)?, &data[start..start + used]);
    Ok((Entry { kind, arch, specific: flags & SPECIFIC != 0, flags, size, payload }, stop))
}

impl<'a> Entry<'a> {
    /// Bytes of its code.
    pub fn len(&self) -> u64 {
        if self.is_packed() { self.size } else { self.payload.len() as u64 }
    }

    /// Whether it has no code.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether its code is compressed.
    pub fn is_packed(&self) -> bool {
        self.flags & (LZ4 | ZSTD) != 0
    }

    /// Its code, unpacked, if that has at most `most` bytes.
    ///
    /// # Errors
    /// [`Error::TooLong`], or [`Error::Packed`] if the payload is damaged.
    pub fn code(&self, most: u64) -> Result<Cow<'a, [u8]>> {
        if self.len() > most {
            return Err(Error::TooLong(self.len()));
        }
        if !self.is_packed() {
            return Ok(Cow::Borrowed(self.payload));
        }
        let (method, unpacked) = if self.flags & ZSTD != 0 {
            ("zstd", zstd(self.payload, self.size))
        } else {
            ("LZ4", lz4(self.payload, self.size))
        };
        let unpacked = unpacked.and_then(|code| {
            let len = code.len() as u64;
            if len == self.size {
                Ok(code)
            } else {
                Err(format!("{len} bytes or more instead of {}", self.size))
            }
        });
        unpacked.map(Cow::Owned).map_err(|error| Error::Packed(format!("{method}: {error}")))
    }
}

/// Unpacks at most `size` + 1 bytes.
fn zstd(payload: &[u8], size: u64) -> std::result::Result<Vec<u8>, String> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(payload).map_err(|error| error.to_string())?;
    let mut code = Vec::new();
    code.try_reserve_exact(size as usize).map_err(|error| error.to_string())?;
    decoder.take(size.saturating_add(1)).read_to_end(&mut code).map_err(|error| error.to_string())?;
    Ok(code)
}

fn lz4(payload: &[u8], size: u64) -> std::result::Result<Vec<u8>, String> {
    // A byte of LZ4 stands for at most 255 bytes.
    let plausible = (payload.len() as u64).saturating_mul(255);
    if size > plausible {
        return Err(format!("{} bytes cannot become {size}", payload.len()));
    }
    lz4_flex::block::decompress(payload, size as usize).map_err(|error| error.to_string())
}
