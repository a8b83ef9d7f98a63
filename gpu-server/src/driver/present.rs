//! Whether this machine has an NVIDIA GPU, whatever its driver says.

use std::path::Path;

use anyhow::bail;

use crate::config::{Backend, Backing};

/// Where Linux lists PCI devices, one folder each.
const PCI: &str = "/sys/bus/pci/devices";
/// Where NVIDIA's driver lists the parts of GPUs (MIG), below a folder for each GPU.
const PARTS: &str = "/proc/driver/nvidia/capabilities";

/// Decides that `auto` means CUDA if this machine has an NVIDIA GPU: one whose driver fails must not be
/// replaced by a GPU in software, which is a thousand times slower and which nobody asked for. Without one,
/// the first worker decides. Returns what to tell the operator if CUDA then cannot be used.
pub fn decide_backend(backing: &mut Backing) -> Option<String> {
    decide_backend_in(backing, Path::new(PCI))
}

fn decide_backend_in(backing: &mut Backing, pci: &Path) -> Option<String> {
    if backing.backend != Backend::Auto {
        return None;
    }
    let gpu = nvidia_gpus(pci).into_iter().min()?;
    backing.backend = Backend::Cuda;
    Some(format!(
        "this machine has an NVIDIA GPU (PCI {gpu}), so --backend=auto serves none in software. If NVIDIA's driver is the cause, --backend=software serves one"
    ))
}

/// Checks that this machine has the devices that the options name, as far as that is known without its
/// driver, which may show fewer than there are.
pub fn check_devices(backing: &Backing) -> anyhow::Result<()> {
    check_devices_in(backing, Path::new(PCI), Path::new(PARTS))
}

fn check_devices_in(backing: &Backing, pci: &Path, parts: &Path) -> anyhow::Result<()> {
    let gpus = nvidia_gpus(pci).len();
    // There may be none because they are not PCI devices, and more devices if GPUs are partitioned.
    let known = gpus > 0 && !has_parts(parts);
    let missing = backing.devices.iter().find(|number| known && **number as usize >= gpus);
    match missing {
        Some(number) if backing.backend != Backend::Software => {
            let s = if gpus == 1 { "" } else { "s" };
            bail!("devices: there is no device {number}: this machine has {gpus} NVIDIA GPU{s}, from 0 on")
        }
        _ => Ok(()),
    }
}

/// Whether a GPU below this folder is partitioned: `gpu0/mig/gi1`.
fn has_parts(folder: &Path) -> bool {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("gi");
    entries(folder).any(|gpu| entries(&gpu.path().join("mig")).any(is_part))
}

/// The addresses of the NVIDIA GPUs below this folder.
fn nvidia_gpus(pci: &Path) -> Vec<String> {
    let is = |folder: &Path, file: &str, begins: &str| {
        std::fs::read_to_string(folder.join(file)).is_ok_and(|text| text.starts_with(begins))
    };
    let devices = std::fs::read_dir(pci).into_iter().flatten().flatten().map(|entry| entry.path());
    // Display controllers only: NVIDIA also makes network adapters and bridges.
    let gpus = devices.filter(|device| is(device, "vendor", "0x10de") && is(device, "class", "0x03"));
    gpus.filter_map(|gpu| Some(gpu.file_name()?.to_string_lossy().into_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Serve;

    #[test]
    fn auto_means_cuda_where_there_is_an_nvidia_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let settled = |flags: &[&str]| {
            let mut backing = Serve::from_flags(flags).worker.backing;
            let why = decide_backend_in(&mut backing, folder.path());
            (backing.backend, why)
        };
        let add = |address: &str, vendor: &str, class: &str| {
            let device = folder.path().join(address);
            std::fs::create_dir(&device).unwrap();
            std::fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(device.join("class"), format!("{class}\n")).unwrap();
        };
        add("0000:00:02.0", "0x8086", "0x030000");
        add("0000:05:00.0", "0x10de", "0x068000");
        assert_eq!(settled(&[]), (Backend::Auto, None), "another vendor's GPU, and an NVSwitch");
        add("0000:17:00.0", "0x10de", "0x030200");
        let (backend, why) = settled(&[]);
        assert!(backend == Backend::Cuda && why.unwrap().contains("0000:17:00.0"));
        assert_eq!(settled(&["--backend=software"]), (Backend::Software, None), "as the operator says");
        let parts = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(parts.path().join("gpu0/mig")).unwrap();
        let check = |flags: &[&str]| {
            check_devices_in(&Serve::from_flags(flags).worker.backing, folder.path(), parts.path())
        };
        assert!(check(&["--devices=0"]).is_ok() && check(&["--devices=3", "--backend=software"]).is_ok());
        let missing = check(&["--devices=0,7"]).unwrap_err().to_string();
        assert_eq!(missing, "devices: there is no device 7: this machine has 1 NVIDIA GPU, from 0 on");
        std::fs::create_dir(parts.path().join("gpu0/mig/gi7")).unwrap();
        assert!(check(&["--devices=0,7"]).is_ok(), "a partitioned GPU has several");
    }
}
