//! Which of the session's devices the program sees, and in which order: its container's devices, filtered by
//! `CUDA_VISIBLE_DEVICES`.
//!
//! Both only select ([`client::container`]); the server decides what a program may use.
//!
//! The list is read as NVIDIA's driver reads it: ordinals or UUIDs (`GPU-…`; a prefix is enough if it is
//! unique), separated by commas. The first entry that names no device ends the list. Ordinals follow the
//! server's order: `CUDA_DEVICE_ORDER` has no effect.

use client::{Status, container};

/// The ordinals of the devices that this process sees, or `None` for all. `uuids` lists all devices.
///
/// # Errors
/// `NO_DEVICE` if none is left, or if the list names one twice.
pub(crate) fn of_process(uuids: &[[u8; 16]]) -> Result<Option<Vec<u32>>, Status> {
    let list = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    chosen(container::devices(uuids.len()), list.as_deref(), uuids)
}

/// The same for given devices of a container and a given `CUDA_VISIBLE_DEVICES`.
fn chosen(
    container: Option<Vec<u32>>,
    list: Option<&str>,
    uuids: &[[u8; 16]],
) -> Result<Option<Vec<u32>>, Status> {
    let Some(container) = container else {
        return list.map(|list| select(list, uuids)).transpose();
    };
    if container.is_empty() {
        return Err(Status::NO_DEVICE);
    }
    let Some(list) = list else { return Ok(Some(container)) };
    let own: Vec<[u8; 16]> = container.iter().map(|ordinal| uuids[*ordinal as usize]).collect();
    let selected = select(list, &own)?;
    Ok(Some(selected.into_iter().map(|ordinal| container[ordinal as usize]).collect()))
}

/// The ordinals of the devices that `list` names. `uuids` lists all devices.
///
/// # Errors
/// `NO_DEVICE` if the list names no device, or one twice.
fn select(list: &str, uuids: &[[u8; 16]]) -> Result<Vec<u32>, Status> {
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

/// A UUID as `nvidia-smi -L` prints it, without `GPU-`.
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
    fn a_container_without_devices_that_are_there_has_none() {
        assert_eq!(chosen(None, None, &uuids()), Ok(None));
        assert_eq!(chosen(Some(vec![0, 2]), None, &uuids()), Ok(Some(vec![0, 2])));
        assert_eq!(chosen(Some(vec![]), None, &uuids()), Err(Status::NO_DEVICE));
    }

    #[test]
    fn the_list_selects_among_the_containers_devices() {
        let chosen = |list| chosen(Some(vec![1, 2]), Some(list), &uuids());
        assert_eq!(chosen("1,0"), Ok(Some(vec![2, 1])));
        assert_eq!(chosen("1"), Ok(Some(vec![2])));
        assert_eq!(chosen("2"), Err(Status::NO_DEVICE));
        assert_eq!(chosen("GPU-11"), Err(Status::NO_DEVICE));
        assert_eq!(chosen("GPU-ab"), Ok(Some(vec![2])));
    }

    #[test]
    fn a_unique_uuid_prefix_is_enough() {
        assert_eq!(select("GPU-ABab,GPU-11111111-1111", &uuids()), Ok(vec![2, 0]));
        assert_eq!(select("GPU-1", &uuids()), Err(Status::NO_DEVICE));
        assert_eq!(name(&[0xab; 16]), "abababab-abab-abab-abab-abababababab");
    }
}
