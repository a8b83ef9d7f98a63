//! Event sets. No events of the server's GPUs are reported, so no event type is supported: a set can be
//! created, accepts no events, and waiting on it times out.

use std::sync::Mutex;
use std::time::Duration;

use client::lock;
use client::ops::nvml::status;

use crate::error::Result;
use crate::query::non_null;
use crate::state::{self, Handle};

/// `NVML_ERROR_TIMEOUT`.
const TIMEOUT: u32 = 10;

/// An `nvmlEventSet_t` as a program passes it: a set's number, from 1.
type Set = usize;

/// The existing sets.
static SETS: Mutex<Sets> = Mutex::new(Sets { last: 0, live: Vec::new() });

struct Sets {
    last: Set,
    live: Vec<Set>,
}

impl Sets {
    fn check(&self, set: Set) -> Result {
        if self.live.contains(&set) { Ok(()) } else { Err(status::INVALID_ARGUMENT) }
    }
}

fn wait(set: Set, milliseconds: u32) -> Result {
    state::connected()?;
    lock(&SETS).check(set)?;
    std::thread::sleep(Duration::from_millis(milliseconds.into()));
    Err(TIMEOUT)
}

nvml! {
    fn nvmlEventSetCreate(set: *mut Set) {
        state::connected()?;
        non_null(set)?;
        let mut sets = lock(&SETS);
        sets.last += 1;
        let number = sets.last;
        sets.live.push(number);
        set.write(number);
        Ok(())
    }

    fn nvmlEventSetFree(set: Set) {
        state::connected()?;
        let mut sets = lock(&SETS);
        sets.check(set)?;
        sets.live.retain(|other| *other != set);
        Ok(())
    }

    fn nvmlEventSetWait(set: Set, _event: *mut u8, milliseconds: u32) {
        wait(set, milliseconds)
    }

    fn nvmlEventSetWait_v2(set: Set, _event: *mut u8, milliseconds: u32) {
        wait(set, milliseconds)
    }

    fn nvmlDeviceGetSupportedEventTypes(device: Handle, types: *mut u64) {
        state::ordinal(state::connected()?, device)?;
        non_null(types)?;
        types.write(0);
        Ok(())
    }

    fn nvmlDeviceRegisterEvents(device: Handle, types: u64, set: Set) {
        state::ordinal(state::connected()?, device)?;
        lock(&SETS).check(set)?;
        if types == 0 { Ok(()) } else { Err(status::NOT_SUPPORTED) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_set_is_an_invalid_argument() {
        assert_eq!(lock(&SETS).check(12345), Err(status::INVALID_ARGUMENT));
        // SAFETY: the output is NULL.
        assert_eq!(unsafe { nvmlEventSetCreate(std::ptr::null_mut()) }, status::UNINITIALIZED);
    }
}
