//! Memory windows: keys with which the peer may write a part of registered memory, for as long as somebody
//! waits for what it writes.
//!
//! A registration takes the kernel, and stays for as long as the memory may be used. What the peer may write
//! of it changes with every copy. A window (InfiniBand specification, 10.6.7) is opened and closed by the
//! device itself, within a microsecond or so, and has another key each time: one that was kept is worth
//! nothing.
//!
//! Windows are of type 1: they serve all queue pairs of their domain, also those that replace others. They
//! are opened and closed by requests of a queue pair that is connected to itself and carries nothing else, so
//! nothing about them depends on the link or is repeated with it.

use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::device::Device;
use super::error::VerbsError;
use super::queue::{Completions, Depth, POLL_BATCH, QueuePair, Shown, Target, first_packet_number, lacks};
use super::registration::{Domain, Registration};
use super::sys::{self, Library, Wc, number};

/// How long a device may take to open or close a window, which normally takes microseconds.
const WITHIN: Duration = Duration::from_secs(10);

/// The windows of a session's domain.
#[derive(Debug)]
pub struct Windows {
    domain: Arc<Domain>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Closed ones, to be opened again. Dropped before the queue pair.
    closed: Vec<Handle>,
    /// Made with the first window.
    requests: Option<Loop>,
}

/// An `ibv_mw`.
#[derive(Debug)]
struct Handle {
    mw: NonNull<sys::Mw>,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs allows every call on a window from any thread.
unsafe impl Send for Handle {}

/// A window that is open. Dropping it closes it: after that the peer writes nothing with its key.
#[derive(Debug)]
pub struct Window {
    /// `None` only while it is dropped.
    handle: Option<Handle>,
    shown: Shown,
    key: u32,
    windows: Arc<Windows>,
}

// SAFETY: what is shared of it is a number; any thread may drop it.
unsafe impl Send for Window {}
// SAFETY: likewise.
unsafe impl Sync for Window {}

/// A queue pair that is connected to itself.
#[derive(Debug)]
struct Loop {
    pair: QueuePair,
    completions: Arc<Completions>,
}

impl Windows {
    /// Windows to memory that is registered in `domain`. `None`: the device has none.
    pub fn new(domain: &Arc<Domain>) -> Option<Arc<Windows>> {
        let has = domain.device().limits().windows;
        has.then(|| Arc::new(Windows { domain: Arc::clone(domain), state: Mutex::default() }))
    }

    /// Makes sure that windows can be opened now.
    ///
    /// # Errors
    /// [`VerbsError::Broken`]: the port has no address.
    pub fn prepare(&self) -> Result<(), VerbsError> {
        let mut state = self.lock();
        if state.requests.is_none() {
            state.requests = Some(Loop::new(&self.domain)?);
        }
        Ok(())
    }

    /// Lets the peer write `len` bytes at `offset` of a registration, which was made with
    /// [`Access::Windows`](super::Access::Windows) in the same domain. Waits until it may.
    ///
    /// # Safety
    /// The window is dropped before the registration.
    ///
    /// # Errors
    /// The bytes are not all inside, or the device refuses. [`VerbsError::Broken`]: the queue pair has
    /// failed, and there can be no other one before the port has an address again.
    pub unsafe fn open(
        self: &Arc<Self>,
        registration: &Registration,
        offset: u64,
        len: u64,
    ) -> Result<Window, VerbsError> {
        let end = offset.checked_add(len).filter(|end| *end <= registration.len() as u64);
        if end.is_none() || len == 0 {
            return Err(VerbsError::Wrong(format!("a window to {len} bytes at {offset:#x}")));
        }
        let mut state = self.lock();
        let shown = Shown { mr: registration.mr(), address: registration.address() + offset, len };
        let had_requests = state.requests.is_some();
        // SAFETY: the registration lives, and the caller drops the window before it.
        let handle = match unsafe { state.open(&self.domain, shown) } {
            // The queue pair may have failed since the last request, as those of the link do. Another one
            // takes its place.
            // SAFETY: likewise.
            Err(_) if had_requests => unsafe { state.open(&self.domain, shown) },
            opened => opened,
        }?;
        let key = handle.key();
        Ok(Window { handle: Some(handle), shown, key, windows: Arc::clone(self) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Opens a window.
    ///
    /// # Safety
    /// As for [`bind`](Self::bind).
    unsafe fn open(&mut self, domain: &Arc<Domain>, shown: Shown) -> Result<Handle, VerbsError> {
        let handle = self.closed.pop().map_or_else(|| Handle::new(domain), Ok)?;
        // SAFETY: the caller's promise; the window lives, and after an error its request is gone.
        unsafe { self.bind(domain, &handle, shown) }?;
        Ok(handle)
    }

    /// Opens or closes a window, and waits until the device has done so. After an error nothing is known of
    /// the window: it is to be dropped.
    ///
    /// # Safety
    /// As for [`QueuePair::bind`].
    unsafe fn bind(&mut self, domain: &Arc<Domain>, window: &Handle, shown: Shown) -> Result<(), VerbsError> {
        let requests = match self.requests.take() {
            Some(requests) => requests,
            None => Loop::new(domain)?,
        };
        // SAFETY: the caller's promise. If this fails, the queue pair is gone, and a request with it.
        unsafe { requests.bind(window, shown) }?;
        self.requests = Some(requests);
        Ok(())
    }
}

impl Window {
    /// The key for the peer. Addresses are those of the registration.
    pub fn key(&self) -> u32 {
        self.key
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        let (nothing, mut state) = (Shown { len: 0, ..self.shown }, self.windows.lock());
        // SAFETY: the window lives, and so does the registration, by the promise of `open`.
        match unsafe { state.bind(&self.windows.domain, &handle, nothing) } {
            Ok(()) => state.closed.push(handle),
            // The kernel takes it away when the handle is dropped.
            Err(e) => tracing::warn!("a memory window could not be closed and is removed: {e}"),
        }
    }
}

impl Handle {
    fn new(domain: &Arc<Domain>) -> Result<Handle, VerbsError> {
        // SAFETY: an open context.
        let alloc_mw = unsafe { domain.device().context().as_ref().ops.alloc_mw };
        let alloc_mw = alloc_mw.ok_or_else(|| lacks("alloc_mw"))?;
        // SAFETY: a domain that lives.
        let mw = unsafe { alloc_mw(domain.pd().as_ptr(), number::MW_TYPE_1) };
        let mw =
            NonNull::new(mw).ok_or_else(|| VerbsError::call("ibv_alloc_mw", io::Error::last_os_error()))?;
        Ok(Handle { mw, domain: Arc::clone(domain) })
    }

    fn key(&self) -> u32 {
        // SAFETY: a window that lives. The library changes the key in `bind` only, which its owner calls.
        unsafe { self.mw.as_ref().rkey }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: an open context.
        let dealloc_mw = unsafe { self.domain.device().context().as_ref().ops.dealloc_mw };
        // SAFETY: made by `new`, dropped once.
        if dealloc_mw.is_none_or(|dealloc_mw| unsafe { dealloc_mw(self.mw.as_ptr()) } != 0) {
            tracing::warn!("ibv_dealloc_mw: {}", io::Error::last_os_error());
        }
    }
}

impl Loop {
    fn new(domain: &Arc<Domain>) -> Result<Loop, VerbsError> {
        let device: &Arc<Device> = domain.device();
        // Without an address, it is as for the link's queue pairs: there is none now.
        let lost = |e: VerbsError| VerbsError::Broken(e.to_string());
        let (port, psn) = (device.port().map_err(lost)?, first_packet_number()?);
        let completions = Completions::new(device, 4)?;
        let depth = Depth { sends: 2, receives: 1, receive_segments: 1, inline: 0 };
        let pair = QueuePair::new(domain, &completions, &port, depth)?;
        let own = Target { qpn: pair.number(), psn, lid: port.lid, gid: port.gid, mtu: port.mtu };
        // A port that went down may still say which address it had.
        pair.connect(&port, &own, psn, WITHIN)
            .map_err(|e| if device.check_usable().is_err() { lost(e) } else { e })?;
        Ok(Loop { pair, completions })
    }

    /// See [`State::bind`].
    ///
    /// # Safety
    /// As there; after an error this is dropped before the window.
    unsafe fn bind(&self, window: &Handle, shown: Shown) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { self.pair.bind(window.mw, shown) }?;
        let begun = Instant::now();
        let mut completions = [Wc::default(); POLL_BATCH];
        loop {
            match self.completions.poll(&mut completions)? {
                [] if begun.elapsed() > WITHIN => {
                    let why = format!("the device has not opened or closed a window for {WITHIN:?}");
                    return Err(VerbsError::Wrong(why));
                }
                // Software RoCE may need this processor.
                [] => std::thread::yield_now(),
                [Wc { status: number::WC_SUCCESS, .. }, ..] => return Ok(()),
                [Wc { status, .. }, ..] => {
                    let status = Library::get()?.status_text(*status);
                    return Err(VerbsError::Wrong(format!("a memory window: {status}")));
                }
            }
        }
    }
}
