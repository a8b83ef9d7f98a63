//! Maps CUDA's ordinals to NVML devices.
//!
//! NVML numbers devices by PCI address and ignores CUDA's environment. CUDA numbers those that
//! `CUDA_VISIBLE_DEVICES` selects: by PCI address if `CUDA_DEVICE_ORDER` says so, otherwise fastest first. If
//! all devices are of one model, both orders are the same and NVML suffices. Otherwise (different models,
//! partitioned devices, a variable that cannot be parsed), the CUDA driver is asked for the devices' UUIDs,
//! which needs no context either.

use std::env;

use protocol::Status;
use protocol::ops::nvml::{self, status};

use super::library::Library;
use crate::driver::cuda::{api, attribute, device_name, probe};

/// A device in CUDA's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub name: String,
    by: Vec<By>,
}

/// How NVML finds a device.
#[derive(Debug, Clone, PartialEq, Eq)]
enum By {
    Uuid(String),
    Pci(String),
}

impl Listed {
    /// NVML's handle.
    pub fn handle(&self, library: &Library) -> Option<usize> {
        self.by.iter().find_map(|by| match by {
            By::Uuid(uuid) => library.device(c"nvmlDeviceGetHandleByUUID", uuid),
            By::Pci(address) => library.device(c"nvmlDeviceGetHandleByPciBusId_v2", address),
        })
    }
}

/// A device as NVML lists it.
#[derive(Debug, Clone)]
struct Found {
    name: String,
    uuid: String,
    /// Whether it is partitioned (MIG): CUDA then sees its parts.
    partitioned: bool,
}

/// All devices that CUDA sees in this process's environment, in its order.
pub(super) fn devices(library: &Library) -> Result<Vec<Listed>, u32> {
    // NVML has no name for a lost GPU, so CUDA is asked which others it still has.
    let found = list(library).unwrap_or_else(|failure| {
        tracing::warn!("NVML cannot list the devices: {failure}");
        Vec::new()
    });
    let variable = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let (order, visible) = (variable("CUDA_DEVICE_ORDER"), variable("CUDA_VISIBLE_DEVICES"));
    match arrange(&found, order.as_deref(), visible.as_deref()) {
        Some(places) => Ok(places
            .into_iter()
            .filter_map(|place| found.get(place))
            .map(|device| Listed { name: device.name.clone(), by: vec![By::Uuid(device.uuid.clone())] })
            .collect()),
        None => ask_cuda().map_err(|error| {
            tracing::warn!("NVML: the order of the devices: {error}");
            status::DRIVER_NOT_LOADED
        }),
    }
}

fn list(library: &Library) -> Result<Vec<Found>, u32> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (0..library.number(c"nvmlDeviceGetCount_v2")?)
        .map(|index| {
            let device = library.device_at(index)?;
            Ok(Found {
                name: text(library.ask(device, nvml::NAME)?),
                uuid: text(library.ask(device, nvml::UUID)?),
                // The current mode is first.
                partitioned: library.ask(device, nvml::MIG_MODE).is_ok_and(|modes| modes.first() == Some(&1)),
            })
        })
        .collect()
}

/// The indices in `found` of the devices that CUDA sees, in its order. `None` if uncertain.
fn arrange(found: &[Found], order: Option<&str>, visible: Option<&str>) -> Option<Vec<usize>> {
    let one_model = found.windows(2).all(|pair| pair[0].name == pair[1].name);
    let certain = !found.is_empty() && (one_model || order == Some("PCI_BUS_ID"));
    if !certain || found.iter().any(|device| device.partitioned) {
        return None;
    }
    let Some(visible) = visible else { return Some((0..found.len()).collect()) };
    let mut places = Vec::new();
    for entry in visible.split(',').map(str::trim) {
        let place = match entry.parse::<usize>() {
            Ok(index) => Some(index).filter(|index| *index < found.len()),
            Err(_) if entry.starts_with("GPU-") => {
                let mut matching = (0..found.len()).filter(|place| found[*place].uuid.starts_with(entry));
                let first = matching.next();
                // Several match: only CUDA knows what it does then.
                if matching.next().is_some() {
                    return None;
                }
                first
            }
            // Negative numbers and empty entries name no device.
            Err(_) if entry.is_empty() || entry.parse::<i64>().is_ok() => None,
            Err(_) => return None,
        };
        match place {
            Some(place) if places.contains(&place) => return None,
            Some(place) => places.push(place),
            // An entry that names no device ends the list.
            None => break,
        }
    }
    Some(places)
}

/// The devices as the CUDA driver lists them.
fn ask_cuda() -> Result<Vec<Listed>, String> {
    let api = api::load()?;
    (0..probe()?)
        .map(|ordinal| {
            let failed = |status: Status| format!("device {ordinal}: {}", api.name(status));
            let mut device = 0;
            // SAFETY: writes a device handle.
            unsafe { api.device_get(&mut device, ordinal as i32) }.map_err(failed)?;
            let mut uuid = [0; 16];
            // SAFETY: writes 16 bytes.
            unsafe { api.device_uuid(&mut uuid, device) }.map_err(failed)?;
            let uuid = nvml::uuid_text(&uuid);
            // CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, …BUS_ID, …DEVICE_ID
            let [domain, bus, number] =
                [50, 33, 34].map(|number| attribute(api, device, number).unwrap_or(0));
            Ok(Listed {
                name: device_name(api, device).map_err(failed)?,
                by: vec![
                    By::Uuid(format!("GPU-{uuid}")),
                    By::Uuid(format!("MIG-{uuid}")),
                    By::Pci(format!("{domain:08X}:{bus:02X}:{number:02X}.0")),
                ],
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(models: &[&str]) -> Vec<Found> {
        let device = |(index, model): (usize, &&str)| Found {
            name: (*model).into(),
            uuid: format!("GPU-{index}0000000-0000-0000-0000-000000000000"),
            partitioned: false,
        };
        models.iter().enumerate().map(device).collect()
    }

    #[test]
    fn devices_of_one_model_are_in_the_order_of_their_addresses() {
        let found = machine(&["H200", "H200", "H200"]);
        assert_eq!(arrange(&found, None, None), Some(vec![0, 1, 2]));
        assert_eq!(arrange(&found, Some("FASTEST_FIRST"), None), Some(vec![0, 1, 2]));
    }

    #[test]
    fn cuda_is_asked_about_different_models_unless_ordered_by_address() {
        let found = machine(&["T4", "H200"]);
        assert_eq!(arrange(&found, None, None), None);
        assert_eq!(arrange(&found, Some("PCI_BUS_ID"), None), Some(vec![0, 1]));
    }

    #[test]
    fn visible_devices_are_chosen_and_ordered_by_index_or_uuid() {
        let found = machine(&["H200", "H200", "H200"]);
        let arranged = |visible| arrange(&found, None, Some(visible));
        assert_eq!(arranged("2,0"), Some(vec![2, 0]));
        assert_eq!(arranged("GPU-1, 0"), Some(vec![1, 0]));
        assert_eq!(arranged("GPU-10000000-0000-0000-0000-000000000000"), Some(vec![1]));
        assert_eq!(arranged(""), Some(vec![]));
    }

    #[test]
    fn an_entry_that_names_no_device_ends_the_list() {
        let found = machine(&["H200", "H200"]);
        for visible in ["1,7,0", "1,-1,0", "1,GPU-9,0", "1,,0"] {
            assert_eq!(arrange(&found, None, Some(visible)), Some(vec![1]), "{visible}");
        }
    }

    #[test]
    fn cuda_is_asked_if_a_variable_cannot_be_parsed() {
        let mut found = machine(&["H200", "H200"]);
        for visible in ["GPU-", "0,0", "MIG-0", "all"] {
            assert_eq!(arrange(&found, None, Some(visible)), None, "{visible}");
        }
        found[1].partitioned = true;
        assert_eq!(arrange(&found, None, None), None);
        assert_eq!(arrange(&[], None, None), None);
    }
}
