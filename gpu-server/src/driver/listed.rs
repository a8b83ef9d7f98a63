//! What identifies a device, whatever its number.

use serde::{Deserialize, Serialize};

/// A device as CUDA lists it; all is empty of one that does not answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name. NVML has none for a lost GPU.
    pub name: String,
    /// Its UUID, or that of the part of a GPU (MIG) that it is, without `GPU-` or `MIG-`.
    pub uuid: String,
    /// Its GPU's PCI address, as NVML writes it.
    pub pci: String,
}

/// The place in `there` of the device with a number, which is its place in `known`. Without a lost device,
/// CUDA counts those after it otherwise.
///
/// # Errors
/// Why it cannot be used. No other one takes its place.
pub fn place(known: &[Listed], there: &[Listed], number: u32) -> Result<u32, String> {
    let all = known.len();
    let device = known.get(number as usize);
    let device = device.ok_or_else(|| format!("device {number} does not exist: CUDA sees {all}"))?;
    let is_it = |other: &Listed| other.uuid == device.uuid;
    // Where servers are stacked, devices of two of them may have one UUID.
    if there.get(number as usize).is_some_and(is_it) {
        return Ok(number);
    }
    let found = there.iter().position(is_it).filter(|_| !device.uuid.is_empty()).map(|place| place as u32);
    let Listed { name, uuid, pci } = device;
    found.ok_or_else(|| {
        format!("device {number} ({name}, {uuid}, PCI {pci}) is no longer among CUDA's devices")
    })
}

#[cfg(test)]
impl Listed {
    /// A device with this UUID.
    pub fn test(uuid: &str) -> Listed {
        Listed { name: "a GPU".into(), uuid: uuid.into(), pci: "1".into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stays_with_its_device_when_another_one_is_lost() {
        let [a, b, c] = ["a", "b", "c"].map(Listed::test);
        let known = [a.clone(), b.clone(), c.clone()];
        let places = |there: &[Listed]| [0, 1, 2].map(|number| place(&known, there, number).ok());
        assert_eq!(places(&known), [Some(0), Some(1), Some(2)]);
        assert_eq!(places(&[b.clone(), c.clone()]), [None, Some(0), Some(1)]);
        assert_eq!(places(&[a.clone(), c]), [Some(0), None, Some(1)]);
        let why = place(&known, &[b], 0).unwrap_err();
        assert_eq!(why, "device 0 (a GPU, a, PCI 1) is no longer among CUDA's devices");
        assert_eq!(place(&known, &known, 3).unwrap_err(), "device 3 does not exist: CUDA sees 3");
        let [unknown, none] = [[Listed::default(), a.clone()], [a.clone(), Listed::default()]];
        assert_eq!([&unknown, &none].map(|there| place(&unknown, there, 0).ok()), [Some(0), None]);
        assert_eq!(place(&[a.clone(), a.clone()], &[a.clone(), a], 1), Ok(1), "two of one UUID");
    }
}
