//! Finds the PTX to run in an image: PTX text or a fat binary.

use device_code::fatbin::{self, Entry, Kind};

use crate::error::{Error, Result};

/// `__fatBinC_Wrapper_t`, which only holds pointers.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// Maximum bytes of an image's PTX, after decompression. No real image has more, but a few compressed bytes
/// can expand to any number.
const MAX_PTX: u64 = 256 << 20;

fn too_large(size: u64) -> Error {
    Error::InvalidImage(format!(
        "it contains {size} bytes of code when decompressed; at most {MAX_PTX} are accepted"
    ))
}

impl From<fatbin::Error> for Error {
    fn from(error: fatbin::Error) -> Error {
        Error::InvalidImage(error.to_string())
    }
}

/// Whether the code in `image` for a GPU of architecture `arch` contains `word` in its strings, symbols or
/// text. The image may be machine code, PTX or a fat binary of either. Returns `None` if the format is
/// unknown or the code is longer than `most` bytes when decompressed.
pub fn mentions(image: &[u8], arch: u32, word: &[u8], most: usize) -> Option<bool> {
    let has = |data: &[u8]| data.windows(word.len()).any(|bytes| bytes == word);
    if !fatbin::is_fat_binary(image) {
        return (image.len() >= 4 && image.len() <= most).then(|| has(image));
    }
    let mut left = most as u64;
    for entries in fatbin::containers(image) {
        for entry in entries.ok()? {
            // Machine code runs only on its own generation; PTX also on all later ones.
            let runs = entry.arch <= arch && (entry.kind != Kind::Elf || entry.arch / 10 == arch / 10);
            if runs {
                left = left.checked_sub(entry.len())?;
                if has(&entry.code(MAX_PTX).ok()?) {
                    return Some(true);
                }
            }
        }
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
        if fatbin::is_fat_binary(image) {
            return from_containers(image, arch);
        }
        if image.starts_with(&WRAPPER_MAGIC.to_le_bytes()) {
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

fn from_containers(image: &[u8], arch: u32) -> Result<Vec<String>> {
    let mut out = Vec::new();
    let mut seen = Vec::new();
    let mut first = true;
    let mut left = MAX_PTX;
    for entries in fatbin::containers(image) {
        if let Some(entry) = best_entry(entries?, arch, &mut seen) {
            let size = entry.len();
            left = left.checked_sub(size).ok_or_else(|| too_large((MAX_PTX - left).saturating_add(size)))?;
            out.push(text(&entry.code(MAX_PTX)?)?);
            if first {
                break;
            }
        }
        first = false;
    }
    if out.is_empty() {
        return Err(Error::NoBinaryForGpu(format!(
            "the fat binary contains only {}; build it with PTX (-gencode … code=compute_XX, at most {arch})",
            seen.join(", ")
        )));
    }
    Ok(out)
}

/// The best PTX of one container.
fn best_entry<'a>(entries: Vec<Entry<'a>>, arch: u32, seen: &mut Vec<String>) -> Option<Entry<'a>> {
    let mut best: Option<Entry<'_>> = None;
    for entry in entries {
        let what = match entry.kind {
            Kind::Ptx => "PTX",
            Kind::Elf => "machine code",
            Kind::Other(_) => "unknown kind",
        };
        seen.push(format!("{what} sm_{}", entry.arch));
        if entry.kind == Kind::Ptx
            && entry.arch <= arch
            && best.as_ref().is_none_or(|best| entry.arch > best.arch)
        {
            best = Some(entry);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container with one entry of PTX, which claims to have `size` bytes when decompressed.
    fn container(size: u64) -> Vec<u8> {
        let payload = [0_u8; 8];
        let mut entry = vec![0_u8; 64];
        entry[..2].copy_from_slice(&1_u16.to_le_bytes());
        entry[4..8].copy_from_slice(&64_u32.to_le_bytes());
        entry[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        entry[28..32].copy_from_slice(&80_u32.to_le_bytes());
        entry[40..48].copy_from_slice(&0x8000_u64.to_le_bytes());
        entry[56..64].copy_from_slice(&size.to_le_bytes());
        entry.extend(payload);
        let mut container = Vec::new();
        container.extend(fatbin::MAGIC.to_le_bytes());
        container.extend(1_u16.to_le_bytes());
        container.extend(16_u16.to_le_bytes());
        container.extend((entry.len() as u64).to_le_bytes());
        container.extend(entry);
        container
    }

    #[test]
    fn an_image_that_would_become_too_large_is_refused() {
        let error = select_ptx(&container(MAX_PTX + 1), 90).unwrap_err().to_string();
        assert!(error.contains("268435457 bytes of code"), "{error}");
        let fits = select_ptx(&container(MAX_PTX), 90).unwrap_err().to_string();
        assert!(fits.contains("zstd"), "{fits}");
    }
}
