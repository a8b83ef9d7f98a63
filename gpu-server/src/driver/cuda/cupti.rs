//! NVIDIA's CUPTI, loaded only when a session requests activity.
//!
//! CUPTI has one record for a driver call and one for the device's work, with the same correlation ID. While
//! the dispatcher executes a command, an ID for the command is on the thread's stack of external correlations
//! ([`Cupti::mark`]). CUPTI notes it for each call, which connects the device's records to the command.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cupti_records::{ExternalCorrelation, Kernel, Memcpy, MemcpyPtoP, Memset, external, flag, kind};
use protocol::handle::StreamId;
use protocol::ops::activity::{self, ActivityRecord};

use crate::driver::activity::{Activity, blank};

/// Converts a record of the library: what all kinds have, and these fields.
macro_rules! converted {
    ($found:ident, $kind:ident { $($field:ident $(: $value:expr)?),* $(,)? }) => {
        ActivityRecord {
            kind: activity::kind::$kind,
            device: $found.deviceId,
            begin: $found.start,
            end: $found.end,
            graph: $found.graphId,
            node: $found.graphNodeId,
            $($field $(: $value)?,)*
            ..blank()
        }
    };
}

/// Size of a record buffer, in bytes.
const BUFFER: usize = 1 << 20;
/// Alignment of buffers.
const ALIGNMENT: usize = 8;
/// Maximum number of driver calls remembered until their device records arrive.
const MOST_CALLS: usize = 1 << 20;
/// Maximum number of device records waiting for their call's record.
const MOST_WAITING: usize = 1 << 16;

/// The record kinds for devices, and those that connect them to commands: CUPTI notes external correlations
/// only if it also records driver calls.
const KINDS: [u32; 6] = [
    kind::EXTERNAL_CORRELATION,
    kind::DRIVER,
    kind::CONCURRENT_KERNEL,
    kind::MEMCPY,
    kind::MEMCPY2,
    kind::MEMSET,
];

/// Where the toolkit's and Python's packages put the library, in the folders that a worker sees. The loader's
/// own path is tried first.
const PLACES: [&str; 4] = [
    "/usr/local/cuda/extras/CUPTI/lib64",
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/opt/cuda/extras/CUPTI/lib64",
];
/// Its names, newest first.
const NAMES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];

type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

macro_rules! library {
    ($($name:ident = $symbol:literal ($($arg:ty),* $(,)?);)*) => {
        /// The library's functions.
        struct Library {
            $($name: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Library {
            fn of(handle: *mut c_void) -> Result<Library, String> {
                Ok(Library {
                    $($name: {
                        let found = symbol(handle, $symbol).ok_or(concat!("it lacks ", $symbol))?;
                        // SAFETY: the symbol has the field's type, by CUPTI's header.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> u32>(found) }
                    },)*
                })
            }
        }
    };
}

library! {
    register = "cuptiActivityRegisterCallbacks" (Requested, Completed);
    enable = "cuptiActivityEnable" (u32);
    disable = "cuptiActivityDisable" (u32);
    flush = "cuptiActivityFlushAll" (u32);
    next = "cuptiActivityGetNextRecord" (*mut u8, usize, *mut *mut u32);
    dropped = "cuptiActivityGetNumDroppedRecords" (*mut c_void, u32, *mut usize);
    push = "cuptiActivityPushExternalCorrelationId" (u32, u64);
    pop = "cuptiActivityPopExternalCorrelationId" (u32, *mut u64);
    timestamp = "cuptiGetTimestamp" (*mut u64);
    version = "cuptiGetVersion" (*mut u32);
    text = "cuptiGetResultString" (u32, *mut *const c_char);
}

fn symbol(handle: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: an open library, and a NUL-terminated name.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// In a command's ID on the stack of external correlations, the low bits of this number hold its stream, and
/// the others its `seq`. Streams with larger IDs, which no client uses, share one value.
const STREAM_BITS: u32 = 24;
const MOST_STREAM: u64 = (1 << STREAM_BITS) - 1;

/// A command's ID, computed so that marking takes no lock.
fn mark_of(seq: u64, stream: u32) -> u64 {
    seq << STREAM_BITS | u64::from(stream).min(MOST_STREAM)
}

/// The library, loaded once.
pub(super) struct Cupti {
    library: Library,
    state: Mutex<State>,
}

/// State for combining its records.
#[derive(Default)]
struct State {
    activity: Option<Arc<Activity>>,
    /// The session's number for each device, by the driver's number.
    devices: HashMap<u32, u32>,
    /// The mark of each call ([`mark_of`]) by its correlation ID, and these IDs in the order of arrival.
    calls: HashMap<u32, u64>,
    order: VecDeque<u32>,
    /// Device records whose call is not known yet.
    waiting: VecDeque<(u32, ActivityRecord, String)>,
}

static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();

/// The paths to try: only the configured one, or all usual ones.
fn paths(configured: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = configured {
        return vec![path.to_owned()];
    }
    let by_name = NAMES.iter().map(PathBuf::from);
    let in_folders =
        PLACES.iter().flat_map(|folder| NAMES.iter().map(move |name| Path::new(folder).join(name)));
    by_name.chain(in_folders).collect()
}

fn open(path: &Path) -> Result<*mut c_void, String> {
    let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: a NUL-terminated name; the administrator's library is trusted, like the driver.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the loader's NUL-terminated text for its last error in this thread.
    let error = unsafe { libc::dlerror().cast_const().as_ref().map(|text| CStr::from_ptr(text)) };
    Err(error.map_or("unknown error".into(), |text| text.to_string_lossy().into_owned()))
}

/// The library, loaded if necessary. The error is a one-line reason.
pub(super) fn load(configured: Option<&Path>) -> Result<&'static Cupti, &'static str> {
    let loaded = CUPTI.get_or_init(|| {
        let mut first = None;
        for path in paths(configured) {
            match open(&path) {
                Ok(handle) => {
                    let library = Library::of(handle).map_err(|e| format!("{}: {e}", path.display()))?;
                    let mut version = 0;
                    // SAFETY: writes one number.
                    unsafe { (library.version)(&mut version) };
                    tracing::info!(version, "loaded CUPTI from {}", path.display());
                    return Ok(Cupti { library, state: Mutex::default() });
                }
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        let why = first.unwrap_or_default();
        Err(format!("this machine has no CUPTI, so profilers see no kernels; install it or name it with --cupti: {why}"))
    });
    loaded.as_ref().map_err(String::as_str)
}

/// Where a worker would find the library, in one line for display.
pub fn report(configured: Option<&Path>) -> Result<String, String> {
    let found = paths(configured).into_iter().find(|path| open(path).is_ok());
    let missing = || "no CUPTI: profilers of clients will see no kernels (see --cupti)".to_owned();
    found.map(|path| format!("CUPTI, for profilers of clients: {}", path.display())).ok_or_else(missing)
}

impl Cupti {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, what: &str, result: u32) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: writes the address of a constant text.
        unsafe { (self.library.text)(result, &mut text) };
        // SAFETY: NULL, or a NUL-terminated text of the library.
        let text = unsafe { text.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy().into_owned()) };
        Err(format!("{what}: {} ({result})", text.unwrap_or_default()))
    }

    /// Starts passing records to `activity`. `devices`: the session's number for each device, by the driver's
    /// number.
    pub(super) fn start(&self, activity: &Arc<Activity>, devices: HashMap<u32, u32>) -> Result<(), String> {
        *self.lock() = State { activity: Some(Arc::clone(activity)), devices, ..State::default() };
        let library = &self.library;
        // SAFETY: two functions of this module that do what the manual requires.
        self.check("cuptiActivityRegisterCallbacks", unsafe { (library.register)(requested, completed) })?;
        for number in KINDS {
            // SAFETY: takes only numbers.
            self.check("cuptiActivityEnable", unsafe { (library.enable)(number) })?;
        }
        Ok(())
    }

    /// Ends recording.
    pub(super) fn stop(&self) {
        self.flush();
        for number in KINDS {
            // SAFETY: takes only numbers. Kinds that are not enabled are refused.
            unsafe { (self.library.disable)(number) };
        }
    }

    /// Makes the library deliver all its records.
    pub(super) fn flush(&self) {
        let mut dropped = 0;
        // SAFETY: takes a number, calls `completed` for its buffers, and writes a number.
        unsafe {
            (self.library.flush)(flag::FLUSH_FORCED);
            (self.library.dropped)(std::ptr::null_mut(), 0, &mut dropped);
        }
        if let Some(activity) = self.lock().activity.as_ref().filter(|_| dropped > 0) {
            activity.lose(dropped as u64);
        }
    }

    /// Makes this thread's calls part of a command, or of none.
    pub(super) fn mark(&self, command: Option<(u64, StreamId)>) {
        let Some((seq, stream)) = command else {
            let mut last = 0;
            // SAFETY: writes a number.
            unsafe { (self.library.pop)(external::CUSTOM0, &mut last) };
            return;
        };
        let number = mark_of(seq, stream.0);
        // SAFETY: takes only numbers.
        unsafe { (self.library.push)(external::CUSTOM0, number) };
    }

    /// Its records' clock.
    pub(super) fn now(&self) -> Option<u64> {
        let mut now = 0;
        // SAFETY: writes a number.
        (unsafe { (self.library.timestamp)(&mut now) } == 0).then_some(now)
    }
}

impl State {
    /// Notes a driver call's correlation ID, and the mark under which it was made.
    fn called(&mut self, correlation: u32, mark: u64) {
        if self.calls.insert(correlation, mark).is_none() {
            self.order.push_back(correlation);
        }
        if self.order.len() > MOST_CALLS
            && let Some(oldest) = self.order.pop_front()
        {
            self.calls.remove(&oldest);
        }
    }

    /// Notes what a device did for a call. It may arrive before the call's own record.
    fn done(&mut self, correlation: u32, record: ActivityRecord, name: String) {
        if !self.pass_on(correlation, &record, &name) {
            // The oldest must be the server's own work: no command's call has arrived for it.
            if self.waiting.len() >= MOST_WAITING {
                self.waiting.pop_front();
            }
            self.waiting.push_back((correlation, record, name));
        }
    }

    fn pass_on(&self, correlation: u32, record: &ActivityRecord, name: &str) -> bool {
        let Some(mark) = self.calls.get(&correlation) else { return false };
        if let Some(activity) = &self.activity {
            let (seq, stream) = (mark >> STREAM_BITS, (mark & MOST_STREAM) as u32);
            let device = self.devices.get(&record.device).copied().unwrap_or(0);
            let ends = record.ends.map(|end| self.devices.get(&end).copied().unwrap_or(0));
            activity.push(ActivityRecord { seq, stream, device, ends, ..record.clone() }, name);
        }
        true
    }

    /// Passes on waiting records whose calls have arrived. The rest is the server's own work and belongs to
    /// no command.
    fn settle(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|(correlation, record, name)| !self.pass_on(*correlation, record, name));
        self.waiting = waiting;
    }

    /// Handles one of the library's records.
    ///
    /// # Safety
    /// It is complete, at least as far as the structure for its kind here.
    unsafe fn take(&mut self, record: *const u32) {
        // SAFETY: every record begins with its kind; the rest is guaranteed by the caller.
        unsafe {
            match *record {
                kind::EXTERNAL_CORRELATION => {
                    let found = record.cast::<ExternalCorrelation>().read_unaligned();
                    if found.externalKind == external::CUSTOM0 {
                        self.called(found.correlationId, found.externalId);
                    }
                }
                kind::KERNEL | kind::CONCURRENT_KERNEL => {
                    let found = record.cast::<Kernel>().read_unaligned();
                    let name =
                        found.name.as_ref().map(|name| CStr::from_ptr(name).to_string_lossy().into_owned());
                    let (correlation, record) = kernel(&found);
                    self.done(correlation, record, name.unwrap_or_default());
                }
                kind::MEMCPY => {
                    let found = record.cast::<Memcpy>().read_unaligned();
                    let memory = [found.copyKind, found.srcKind, found.dstKind];
                    let record = converted!(found, COPY { bytes: found.bytes, memory });
                    self.done(found.correlationId, record, String::new());
                }
                kind::MEMCPY2 => {
                    let found = record.cast::<MemcpyPtoP>().read_unaligned();
                    let memory = [found.copyKind, found.srcKind, found.dstKind];
                    let ends = [found.srcDeviceId, found.dstDeviceId];
                    let record = converted!(found, COPY { bytes: found.bytes, ends, memory });
                    self.done(found.correlationId, record, String::new());
                }
                kind::MEMSET => {
                    let found = record.cast::<Memset>().read_unaligned();
                    let memory = [0, 0, found.memoryKind as u8];
                    let record = converted!(found, FILL { bytes: found.bytes, value: found.value, memory });
                    self.done(found.correlationId, record, String::new());
                }
                _ => {}
            }
        }
    }
}

/// Converts a kernel's record. Returns its correlation ID, too.
fn kernel(found: &Kernel) -> (u32, ActivityRecord) {
    let dimensions = |all: [i32; 3]| all.map(i32::cast_unsigned);
    let record = converted!(
        found,
        KERNEL {
            grid: dimensions([found.gridX, found.gridY, found.gridZ]),
            block: dimensions([found.blockX, found.blockY, found.blockZ]),
            cluster: [found.clusterX, found.clusterY, found.clusterZ],
            shared: [found.staticSharedMemory.cast_unsigned(), found.dynamicSharedMemory.cast_unsigned()],
            registers: found.registersPerThread.into(),
            local: found.localMemoryPerThread,
        }
    );
    (found.correlationId, record)
}

fn layout() -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(BUFFER, ALIGNMENT).ok()
}

/// Called when the library needs a buffer.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    // SAFETY: the size is not 0.
    let made = layout().map_or(std::ptr::null_mut(), |layout| unsafe { std::alloc::alloc_zeroed(layout) });
    // SAFETY: the library passes three writable places.
    unsafe {
        *buffer = made;
        *size = if made.is_null() { 0 } else { BUFFER };
        *most = 0;
    }
}

/// Called when the library has filled a buffer, in any thread, possibly inside a flush.
unsafe extern "C" fn completed(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    if let Some(Ok(cupti)) = CUPTI.get() {
        let mut state = cupti.lock();
        let mut record = std::ptr::null_mut();
        // SAFETY: a buffer from the library with this many valid bytes; each step returns a complete record.
        while unsafe { (cupti.library.next)(buffer, valid, &mut record) } == 0 && !record.is_null() {
            // SAFETY: as above. Newer libraries' records are longer than these structures, not shorter; an
            // older library's stay within the zeroed buffer.
            unsafe { state.take(record.cast_const()) };
        }
        state.settle();
    }
    if let Some(layout) = layout() {
        // SAFETY: `requested` allocated it with this layout.
        unsafe { std::alloc::dealloc(buffer, layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> (State, Arc<Activity>) {
        let activity = Arc::<Activity>::default();
        let devices = HashMap::from([(4, 1)]);
        (State { activity: Some(Arc::clone(&activity)), devices, ..State::default() }, activity)
    }

    #[test]
    fn a_device_record_finds_its_command_in_either_order() {
        let (mut state, activity) = state();
        let of = |device| ActivityRecord { device, ..blank() };
        state.called(1, mark_of(100, 7));
        state.done(1, of(4), "first".into());
        state.done(2, of(4), "second".into());
        state.done(3, of(4), "the server's own".into());
        state.called(2, mark_of(101, 8));
        state.settle();
        let (records, dropped) = activity.drain();
        let found: Vec<_> = records.iter().map(|(r, name)| (r.seq, r.stream, r.device, &**name)).collect();
        assert_eq!(found, [(100, 7, 1, "first"), (101, 8, 1, "second")]);
        assert_eq!((dropped, state.waiting.len()), (0, 1));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut state, activity) = state();
        for correlation in 0..MOST_CALLS as u32 + 10 {
            state.called(correlation, 0);
        }
        assert_eq!((state.calls.len(), state.order.len()), (MOST_CALLS, MOST_CALLS));
        for _ in 0..MOST_WAITING + 3 {
            state.done(u32::MAX, blank(), String::new());
        }
        assert_eq!((state.waiting.len(), activity.drain().1), (MOST_WAITING, 0));
    }

    #[test]
    fn the_servers_own_work_does_not_crowd_out_commands() {
        let (mut state, activity) = state();
        for _ in 0..MOST_WAITING + 3 {
            state.done(u32::MAX, blank(), String::new());
        }
        state.done(7, ActivityRecord { device: 4, ..blank() }, "kernel".into());
        state.called(7, mark_of(100, 2));
        state.settle();
        let (records, dropped) = activity.drain();
        assert_eq!((records.len(), records[0].0.seq, dropped), (1, 100, 0));
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = open(Path::new("/nowhere/libcupti.so.13")).unwrap_err();
        assert!(error.contains("/nowhere/libcupti.so.13"), "{error}");
        assert_eq!(paths(Some(Path::new("/a"))), [PathBuf::from("/a")]);
    }
}
