//! Maps CUDA's ordinals to NVML devices.
//!
//! NVML numbers devices by PCI address and ignores CUDA's environment. CUDA numbers those that
//! `CUDA_VISIBLE_DEVICES` selects: by PCI address if `CUDA_DEVICE_ORDER` says so, otherwise fastest first. If
//! all devices are of one model, both orders are the same and NVML suffices. Otherwise (different models,
//! partitioned devices, a variable that cannot be parsed), the CUDA driver is asked for the devices' UUIDs,
//! which needs no context either.

use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use protocol::Status;
use protocol::ops::nvml::{self, status};

use super::library::Library;
use crate::driver::cuda::{api, attribute, device_name, probe};

/// A device in CUDA's order.
#[derive(Debug)]
pub(super) struct Listed {
    pub name: String,
    by: Vec<By>,
    /// NVML's last handle; 0 if there has been none.
    last: AtomicUsize,
}

/// How NVML finds a device.
#[derive(Debug)]
enum By {
    Uuid(String),
    Pci(String),
}

impl Listed {
    /// NVML's handle. It is looked up each time, because a GPU gets a new one when it is reset. If NVML does
    /// not find it, as may be while any other GPU is lost, its last one still answers for it.
    pub fn handle(&self, library: &Library) -> Option<usize> {
        self.handle_by(|by| match by {
            By::Uuid(uuid) => library.device(c"nvmlDeviceGetHandleByUUID", uuid),
            By::Pci(address) => library.device(c"nvmlDeviceGetHandleByPciBusId_v2", address),
        })
    }

    fn handle_by(&self, look_up: impl Fn(&By) -> Option<usize>) -> Option<usize> {
        let found = self.by.iter().find_map(look_up).unwrap_or_else(|| self.last.load(Ordering::Relaxed));
        self.last.store(found, Ordering::Relaxed);
        Some(found).filter(|handle| *handle != 0)
    }
}

/// A device as NVML lists it.
#[derive(Debug, Clone)]
struct Found {
    handle: usize,
    name: String,
    uuid: String,
    /// Whether it is partitioned (MIG): CUDA then sees its parts.
    partitioned: bool,
}

/// All devices that CUDA sees in this process's environment, in its order. They are listed once: those of a
/// GPU that is lost later would be missing, and the others would have its number.
pub(super) fn devices(library: &Library) -> Result<&'static [Listed], u32> {
    static DEVICES: OnceLock<Vec<Listed>> = OnceLock::new();
    listed_once(&DEVICES, || in_order(library))
}

fn listed_once<E>(
    devices: &OnceLock<Vec<Listed>>,
    list: impl FnOnce() -> Result<Vec<Listed>, E>,
) -> Result<&[Listed], E> {
    match devices.get() {
        Some(devices) => Ok(devices),
        None => list().map(|found| devices.get_or_init(|| found).as_slice()),
    }
}

fn in_order(library: &Library) -> Result<Vec<Listed>, u32> {
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
            .map(|device| Listed {
                name: device.name.clone(),
                by: vec![By::Uuid(device.uuid.clone())],
                last: device.handle.into(),
            })
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
                handle: device,
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
                last: AtomicUsize::default(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(models: &[&str]) -> Vec<Found> {
        let device = |(index, model): (usize, &&str)| Found {
            handle: index + 1,
            name: (*model).into(),
            uuid: format!("GPU-{index}0000000-0000-0000-0000-000000000000"),
            partitioned: false,
        };
        models.iter().enumerate().map(device).collect()
    }

    fn listed(uuid: &str) -> Listed {
        Listed { name: uuid.into(), by: vec![By::Uuid(uuid.into())], last: AtomicUsize::default() }
    }

    #[test]
    fn devices_keep_their_numbers_when_one_is_lost() {
        let devices = OnceLock::new();
        assert!(listed_once(&devices, || Err(())).is_err());
        let names = |devices: &[Listed]| devices.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
        let all = || Ok::<_, ()>(vec![listed("a"), listed("b"), listed("c")]);
        assert_eq!(listed_once(&devices, all).map(names), Ok(vec!["a".into(), "b".into(), "c".into()]));
        let rest = listed_once(&devices, || Ok::<_, ()>(vec![listed("a"), listed("c")]));
        assert_eq!(rest.map(names), Ok(vec!["a".into(), "b".into(), "c".into()]));
    }

    #[test]
    fn a_device_that_is_no_longer_found_has_its_last_handle() {
        let device = listed("a");
        assert_eq!(device.handle_by(|_| None), None);
        assert_eq!(
            [Some(5), None, Some(6), None].map(|found| device.handle_by(|_| found)),
            [5, 5, 6, 6].map(Some)
        );
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
