//! Event sets. No event of the server's GPUs is reported here, so no type of event is supported: a set can be made, takes
//! no events, and waiting for it ends when the time is up.

use std::sync::Mutex;
use std::time::Duration;

use client::lock;
use client::ops::nvml::status;

use crate::error::Result;
use crate::shape::non_null;
use crate::state::{self, Handle};

/// `NVML_ERROR_TIMEOUT`.
const TIMEOUT: u32 = 10;

/// An `nvmlEventSet_t` as a program passes it: the number of a set, from 1.
type Set = usize;

/// The sets that there are.
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
    fn a_set_that_was_not_made_is_no_argument() {
        assert_eq!(lock(&SETS).check(12345), Err(status::INVALID_ARGUMENT));
        // SAFETY: the output is NULL.
        assert_eq!(unsafe { nvmlEventSetCreate(std::ptr::null_mut()) }, status::UNINITIALIZED);
    }
}
