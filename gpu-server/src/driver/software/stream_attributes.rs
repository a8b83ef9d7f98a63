//! Attributes of streams. All of them are only hints here: they are checked, stored and returned.

use crate::driver::call::Result;
use protocol::Status;
use protocol::ops::launch::LaunchAttribute;
use protocol::ops::stream::attribute::*;

use super::properties::{MAX_WINDOW, MEM_SYNC_DOMAINS};

/// A stream's attributes by number, if they were set.
#[derive(Clone, Default)]
pub(super) struct StreamAttributes(Vec<LaunchAttribute>);

fn words(value: &[u8; 64]) -> [u32; 16] {
    zerocopy::transmute!(*value)
}

/// `CUaccessPolicyWindow`: an address, a size, the ratio of hits, the properties of hits and misses.
fn is_window(value: &[u8; 64]) -> bool {
    let words = words(value);
    let size = u64::from(words[3]) << 32 | u64::from(words[2]);
    let ratio = f32::from_bits(words[4]);
    // Misses cannot persist.
    size <= MAX_WINDOW.into() && (0.0..=1.0).contains(&ratio) && words[5] <= 2 && words[6] <= 1
}

impl StreamAttributes {
    /// # Errors
    /// `INVALID_VALUE` for an invalid value, or an attribute that streams don't have.
    pub(super) fn set(&mut self, new: &LaunchAttribute) -> Result {
        let words = words(&new.value);
        let good = match new.id {
            ACCESS_POLICY_WINDOW => is_window(&new.value),
            // CU_SYNC_POLICY_AUTO to …_BLOCKING_SYNC.
            SYNCHRONIZATION_POLICY => (1..=4).contains(&words[0]),
            // There is only one priority.
            PRIORITY => words[0] == 0,
            MEM_SYNC_DOMAIN_MAP => new.value[..2].iter().all(|id| u32::from(*id) < MEM_SYNC_DOMAINS),
            MEM_SYNC_DOMAIN => words[0] <= 1,
            _ => false,
        };
        if !good {
            return Err(Status::INVALID_VALUE);
        }
        self.0.retain(|other| other.id != new.id);
        self.0.push(new.clone());
        Ok(())
    }

    /// # Errors
    /// `INVALID_VALUE` for an attribute that streams don't have.
    pub(super) fn get(&self, id: u32) -> Result<[u8; 64]> {
        if !ALL.contains(&id) {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(found) = self.0.iter().find(|found| found.id == id) {
            return Ok(found.value);
        }
        let mut value = [0; 64];
        match id {
            SYNCHRONIZATION_POLICY => value[0] = 1,
            MEM_SYNC_DOMAIN_MAP => value[1] = 1,
            _ => {}
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(size: u64, ratio: f32, hit: u32, miss: u32) -> LaunchAttribute {
        let mut value = [0; 64];
        value[8..16].copy_from_slice(&size.to_le_bytes());
        value[16..20].copy_from_slice(&ratio.to_le_bytes());
        value[20..24].copy_from_slice(&hit.to_le_bytes());
        value[24..28].copy_from_slice(&miss.to_le_bytes());
        LaunchAttribute { id: ACCESS_POLICY_WINDOW, value }
    }

    #[test]
    fn a_window_is_bounded_and_its_misses_do_not_persist() {
        let mut all = StreamAttributes::default();
        for bad in [
            window(u64::from(MAX_WINDOW) + 1, 0.5, 0, 0),
            window(1, f32::NAN, 0, 0),
            window(1, 1.5, 0, 0),
            window(1, 0.5, 3, 0),
            window(1, 0.5, 2, 2),
        ] {
            assert_eq!(all.set(&bad), Err(Status::INVALID_VALUE), "{bad:?}");
        }
        assert_eq!(all.get(ACCESS_POLICY_WINDOW), Ok([0; 64]));
        let good = window(4096, 0.25, 2, 1);
        all.set(&good).unwrap();
        assert_eq!(all.get(ACCESS_POLICY_WINDOW), Ok(good.value));
    }

    #[test]
    fn attributes_that_streams_lack_are_neither_set_nor_returned() {
        let mut all = StreamAttributes::default();
        for id in [0, 2, 4, 7, 99] {
            assert_eq!(all.set(&LaunchAttribute { id, value: [0; 64] }), Err(Status::INVALID_VALUE), "{id}");
            assert_eq!(all.get(id), Err(Status::INVALID_VALUE), "{id}");
        }
    }
}
