//! A client's memory as the device and the server may use it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use protocol::link::REGION_KEYS;

use crate::bridge::relay::{ClientMemory, EndReason, MemoryKey};
use crate::verbs::{Domain, RegisteredRegion, Registration, VerbsError, Window, Windows};

/// Most windows of one memory that are open at a time. The last one shows all of it.
const MOST_WINDOWS: usize = 4;

/// How the server gets keys for the client's memory.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// `None`: the device has no windows.
    windows: Option<Arc<Windows>>,
    /// A memory may have several keys at a time. Otherwise the one that it has is for all of it.
    several: bool,
    said: Said,
}

impl Keys {
    /// For memory that is registered in this domain. `several`: the server, and the process after this one,
    /// can do with several keys for a memory.
    pub(super) fn new(domain: &Arc<Domain>, several: bool) -> Keys {
        Keys::beside(domain, several, Said::default())
    }

    /// The same in a session that another process had. Whether the server can do with several keys is not
    /// known here, nor how many it was told.
    pub(super) fn of_another_process(domain: &Arc<Domain>) -> Keys {
        Keys::beside(domain, false, Said::many())
    }

    /// Makes sure that keys can be given now. [`VerbsError::Broken`]: the port has no address.
    pub(super) fn prepare(&self) -> Result<(), VerbsError> {
        self.windows.as_ref().map_or(Ok(()), |windows| windows.prepare())
    }

    fn beside(domain: &Arc<Domain>, several: bool, said: Said) -> Keys {
        let windows = Windows::new(domain);
        if windows.is_none() {
            let device = domain.device().name();
            tracing::warn!(
                device,
                "this RDMA device has no memory windows: from the first copy into a piece of page-locked memory on, the server can write to it until it is freed (docs/security.md)"
            );
        }
        Keys { windows, several, said }
    }
}

/// How many keys the server was told, where each memory has one for good. Once there are more than it keeps,
/// it may have forgotten any for which nothing waits.
#[derive(Debug, Clone, Default)]
struct Said(Arc<AtomicU64>);

impl Said {
    fn many() -> Said {
        Said(Arc::new(AtomicU64::new(REGION_KEYS as u64)))
    }

    /// Whether the server has to be told a key before a command that waits for data in its memory. `first`:
    /// nothing else does; `told`: it was told before.
    fn says(&self, first: bool, told: &mut bool) -> bool {
        let says = first && (!*told || self.0.load(Ordering::Relaxed) >= REGION_KEYS as u64);
        if says {
            *told = true;
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        says
    }
}

/// Memory of the client that is registered with the device. The server can write the part of it that commands
/// are waiting for, while they do.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    /// Dropped first: a window must not outlive the registration that it shows.
    admitted: Mutex<Admitted>,
    registered: RegisteredRegion,
    read_only: bool,
    keys: Keys,
}

/// What the server may write now.
#[derive(Debug, Default)]
struct Admitted {
    /// How many wait for something.
    count: u64,
    /// The server was told the key that the memory has for good.
    told: bool,
    /// What `windows` show: offsets. The last one shows all of it.
    from: u64,
    to: u64,
    windows: Vec<Window>,
}

impl DeviceMemory {
    pub(super) fn new(registered: RegisteredRegion, read_only: bool, keys: &Keys) -> DeviceMemory {
        DeviceMemory { admitted: Mutex::default(), registered, read_only, keys: keys.clone() }
    }

    pub(super) fn registration(&self) -> &Registration {
        self.registered.registration()
    }

    fn lock(&self) -> MutexGuard<'_, Admitted> {
        self.admitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with(&self, key: u32) -> MemoryKey {
        let registration = self.registration();
        MemoryKey { address: registration.address(), size: registration.len() as u64, key }
    }
}

impl ClientMemory for DeviceMemory {
    fn size(&self) -> u64 {
        self.registration().len() as u64
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn admit(&self, offset: u64, len: u64) -> Result<Option<MemoryKey>, EndReason> {
        let mut admitted = self.lock();
        let first = admitted.count == 0;
        admitted.count += 1;
        let Some(windows) = &self.keys.windows else {
            let says = self.keys.said.says(first, &mut admitted.told);
            return Ok(says.then(|| self.with(self.registration().remote_key())));
        };
        let end = offset.saturating_add(len);
        let shown = !admitted.windows.is_empty();
        if len == 0 || shown && admitted.from <= offset && end <= admitted.to {
            return Ok(None);
        }
        let (from, to) = match shown {
            _ if !self.keys.several || admitted.windows.len() + 1 >= MOST_WINDOWS => (0, self.size()),
            true => (admitted.from.min(offset), admitted.to.max(end)),
            false => (offset, end),
        };
        // SAFETY: `admitted` is dropped before `registered`.
        let opened = unsafe { windows.open(self.registration(), from, to - from) };
        let window = opened.inspect_err(|_| admitted.count -= 1)?;
        let key = window.key();
        (admitted.from, admitted.to) = (from, to);
        admitted.windows.push(window);
        Ok(Some(self.with(key)))
    }

    fn release(&self) {
        let mut admitted = self.lock();
        admitted.count = admitted.count.saturating_sub(1);
        if admitted.count == 0 {
            admitted.windows.clear();
        }
    }

    fn key(&self) -> Option<MemoryKey> {
        if self.keys.windows.is_none() {
            return Some(self.with(self.registration().remote_key()));
        }
        self.lock().windows.last().map(|window| self.with(window.key()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_for_good_is_said_once_as_long_as_the_server_forgets_none() {
        let (said, mut told) = (Said::default(), false);
        assert!(said.says(true, &mut told));
        assert!(!said.says(false, &mut told) && !said.says(true, &mut told));
        // Others are said, each once. The server keeps so many.
        for number in 1..REGION_KEYS {
            assert!(!said.says(true, &mut told), "{number} others");
            assert!(said.says(true, &mut false));
        }
        // From now on it may have been forgotten whenever nothing waits.
        for _ in 0..3 {
            assert!(said.says(true, &mut told) && !said.says(false, &mut told));
        }
        // What another process has said is not known.
        let said = Said::many();
        assert!(said.says(true, &mut told) && said.says(true, &mut told));
    }
}
