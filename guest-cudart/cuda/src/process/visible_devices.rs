//! `CUDA_VISIBLE_DEVICES`: which of the session's devices the program sees, and in which order.
//!
//! The list is read as NVIDIA's driver reads it: ordinals, or UUIDs (`GPU-…`, of which a beginning that only one device has will do), separated by commas; the first
//! entry that names no device ends the list. Ordinals are the server's: `CUDA_DEVICE_ORDER` says nothing here.

use client::Status;

/// The devices that `list` names, by their ordinals; `uuids` are those of all devices.
///
/// # Errors
/// `NO_DEVICE`: the list names none, or one of them twice.
pub(crate) fn select(list: &str, uuids: &[[u8; 16]]) -> Result<Vec<u32>, Status> {
    let names: Vec<String> = uuids.iter().map(name).collect();
    let mut chosen = Vec::new();
    for entry in list.split(',') {
        let Some(ordinal) = find(entry.trim(), &names) else { break };
        if chosen.contains(&ordinal) {
            return Err(Status::NO_DEVICE);
        }
        chosen.push(ordinal);
    }
    if chosen.is_empty() { Err(Status::NO_DEVICE) } else { Ok(chosen) }
}

fn find(entry: &str, names: &[String]) -> Option<u32> {
    if let Some(beginning) = entry.strip_prefix("GPU-").filter(|beginning| !beginning.is_empty()) {
        let beginning = beginning.to_ascii_lowercase();
        let mut found = (0..).zip(names).filter(|(_, name)| name.starts_with(&beginning));
        let (ordinal, _) = found.next()?;
        return found.next().is_none().then_some(ordinal);
    }
    entry.parse::<u32>().ok().filter(|ordinal| (*ordinal as usize) < names.len())
}

/// A UUID as `nvidia-smi -L` shows it, without `GPU-`.
fn name(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuids() -> Vec<[u8; 16]> {
        vec![[0x11; 16], [0x12; 16], [0xab; 16]]
    }

    #[test]
    fn ordinals_choose_and_order() {
        assert_eq!(select("2,0", &uuids()), Ok(vec![2, 0]));
        assert_eq!(select(" 1 ", &uuids()), Ok(vec![1]));
    }

    #[test]
    fn the_first_entry_that_names_none_ends_the_list() {
        assert_eq!(select("0,7,1", &uuids()), Ok(vec![0]));
        assert_eq!(select("1,-1,0", &uuids()), Ok(vec![1]));
    }

    #[test]
    fn a_list_without_a_device_hides_all() {
        for list in ["", "-1", "none", "9", "0,0", "GPU-", "MIG-1"] {
            assert_eq!(select(list, &uuids()), Err(Status::NO_DEVICE), "{list:?}");
        }
    }

    #[test]
    fn a_beginning_of_a_uuid_will_do_if_one_device_has_it() {
        assert_eq!(select("GPU-ABab,GPU-11111111-1111", &uuids()), Ok(vec![2, 0]));
        assert_eq!(select("GPU-1", &uuids()), Err(Status::NO_DEVICE));
        assert_eq!(name(&[0xab; 16]), "abababab-abab-abab-abab-abababababab");
    }
}
