//! The table of functions through which rgpu's libcuda serves this library. Another libcuda does not have it.

use std::ffi::{c_char, c_void};

use crate::result::{CUptiResult, INVALID_PARAMETER, NOT_INITIALIZED, NOT_SUPPORTED, Result};

/// libcuda's table: its size, and functions. Statuses are `CUresult`s.
#[repr(C)]
pub struct Table {
    size: usize,
    observe: unsafe extern "C" fn(*const Observer) -> u32,
    start: unsafe extern "C" fn() -> u32,
    stop: unsafe extern "C" fn() -> u32,
    read:
        unsafe extern "C" fn(u32, unsafe extern "C" fn(*mut c_void, *const DeviceRecord), *mut c_void) -> u32,
    dropped: unsafe extern "C" fn() -> u64,
    context_ids: unsafe extern "C" fn(usize, *mut u32, *mut u32) -> u32,
    stream_id: unsafe extern "C" fn(usize, u32, *mut u32) -> u32,
    observe_resources: unsafe extern "C" fn(Option<ResourceObserver>) -> u32,
    current_context: unsafe extern "C" fn(*mut u32) -> usize,
    graph_id: unsafe extern "C" fn(usize, *mut u32) -> u32,
    graph_node_id: unsafe extern "C" fn(usize, *mut u64) -> u32,
}

/// A call of the program's, as in the crate `client`.
#[repr(C)]
pub struct Called {
    /// The function's name, which stays as long as the process.
    pub name: *const c_char,
    /// The function's arguments, laid out as the structure `…_params` in NVIDIA's headers.
    pub arguments: *const c_void,
    /// Names the kernel that the call launches: takes these two.
    pub kernel: Option<unsafe extern "C" fn(*const c_char, *const c_void) -> *const c_char>,
    /// The major version of the runtime whose function it is; 0 for the driver's.
    pub runtime: u32,
    /// The correlation of the runtime's call that makes this one; 0 if the program itself makes it.
    pub within: u32,
    /// The function's number; 0: its name and the runtime's version tell it.
    pub number: u32,
}

/// Something that the program has made, as in the crate `client`.
#[repr(C)]
pub struct Made {
    /// `CUpti_CallbackIdResource`.
    pub what: u32,
    pub context: usize,
    pub graph: GraphData,
}

/// `CUpti_GraphData`.
#[repr(C)]
pub struct GraphData {
    graph: usize,
    original_graph: usize,
    node: usize,
    original_node: usize,
    node_type: u32,
    dependency: usize,
    exec: usize,
}

pub type ResourceObserver = unsafe extern "C" fn(*const Made);

/// The observer of calls, as in the crate `client`.
#[repr(C)]
pub struct Observer {
    pub enters: unsafe extern "C" fn(*const Called) -> u32,
    pub leaves: unsafe extern "C" fn(*const Called, u32, u32),
}

/// A record of what a device did, as in libcuda.
#[repr(C)]
pub struct DeviceRecord {
    pub kind: u32,
    pub correlation: u32,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub registers: u32,
    pub local: u32,
    pub value: u32,
    pub begin: u64,
    pub end: u64,
    pub bytes: u64,
    pub node: u64,
    pub graph: u32,
    pub memory: [u8; 4],
    pub ends: [u32; 2],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    pub shared: [u32; 2],
    pub name: *const c_char,
}

/// [`DeviceRecord`]'s `kind`.
pub mod work {
    pub const KERNEL: u32 = 1;
    pub const COPY: u32 = 2;
    pub const FILL: u32 = 3;
}

#[cfg(not(test))]
const ID: &[u8; 16] = b"rgpu device work";
/// `CUDA_ERROR_NOT_SUPPORTED`.
const CUDA_NOT_SUPPORTED: u32 = 801;

#[cfg(not(test))]
fn find() -> Option<&'static Table> {
    type Find = unsafe extern "C" fn(*mut *const Table, *const u8) -> u32;
    // SAFETY: names that end with NUL. The library stays loaded, as every user of CUDA's driver leaves it.
    let found = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        if library.is_null() {
            log::warn(format_args!("libcupti: there is no libcuda.so.1"));
            return None;
        }
        libc::dlsym(library, c"cuGetExportTable".as_ptr())
    };
    let mut table = std::ptr::null();
    if !found.is_null() {
        // SAFETY: the symbol has this type by CUDA's header; it writes one address.
        unsafe { std::mem::transmute::<*mut c_void, Find>(found)(&mut table, ID.as_ptr()) };
    }
    // SAFETY: NULL, or a table of rgpu's libcuda, which begins with its size.
    let whole = unsafe { table.as_ref() }.filter(|table| table.size == size_of::<Table>());
    if whole.is_none() {
        log::warn(format_args!(
            "libcupti: this one is rgpu's and works with rgpu's libcuda of the same version only; a profiler sees nothing"
        ));
    }
    whole
}

/// libcuda's table.
#[cfg(test)]
pub fn table() -> Result<&'static Table> {
    Ok(&fake::TABLE)
}

/// libcuda's table.
#[cfg(not(test))]
pub fn table() -> Result<&'static Table> {
    use std::sync::OnceLock;
    static TABLE: OnceLock<Option<&'static Table>> = OnceLock::new();
    TABLE.get_or_init(find).ok_or(NOT_INITIALIZED)
}

/// Converts a status of libcuda to a result of CUPTI.
fn result(status: u32, otherwise: CUptiResult) -> Result {
    match status {
        0 => Ok(()),
        CUDA_NOT_SUPPORTED => Err(NOT_SUPPORTED),
        _ => Err(otherwise),
    }
}

impl Table {
    /// Sets the observer of calls.
    pub fn observe(&self, observer: Option<&'static Observer>) {
        let observer = observer.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: NULL, or a static; this library is never unloaded.
        unsafe { (self.observe)(observer) };
    }

    /// Sets the function that is called for new contexts, graphs, nodes and instances.
    pub fn observe_resources(&self, observer: Option<ResourceObserver>) {
        // SAFETY: none, or a function of this library, which is never unloaded.
        unsafe { (self.observe_resources)(observer) };
    }

    /// Starts recording the devices' work.
    pub fn start(&self) -> Result {
        // SAFETY: takes nothing.
        result(unsafe { (self.start)() }, NOT_INITIALIZED)
    }

    /// Stops recording the devices' work.
    pub fn stop(&self) {
        // SAFETY: takes nothing. Errors are ignored, because a lost session records nothing anyway.
        unsafe { (self.stop)() };
    }

    /// Calls `sink` for each record.
    pub fn read(&self, flush: bool, mut sink: impl FnMut(&DeviceRecord)) -> Result {
        unsafe extern "C" fn pass<F: FnMut(&DeviceRecord)>(user: *mut c_void, record: *const DeviceRecord) {
            // SAFETY: the closure below, and a record of libcuda's.
            unsafe { (*user.cast::<F>())(&*record) }
        }
        fn passing<F: FnMut(&DeviceRecord)>(_: &F) -> unsafe extern "C" fn(*mut c_void, *const DeviceRecord) {
            pass::<F>
        }
        let function = passing(&sink);
        // SAFETY: the function takes the closure's address, which lives until the call returns.
        result(unsafe { (self.read)(flush.into(), function, (&raw mut sink).cast()) }, NOT_INITIALIZED)
    }

    /// Number of records that were dropped since the last call.
    pub fn dropped(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.dropped)() }
    }

    /// The numbers of a context and its device; 0 stands for the current context.
    pub fn context_ids(&self, context: usize, otherwise: CUptiResult) -> Result<(u32, u32)> {
        let (mut id, mut device) = (0, 0);
        // SAFETY: writes two numbers.
        result(unsafe { (self.context_ids)(context, &mut id, &mut device) }, otherwise)?;
        Ok((id, device))
    }

    /// The calling thread's current context and its number; 0 for both if there is none.
    pub fn current_context(&self) -> (usize, u32) {
        let mut number = 0;
        // SAFETY: writes a number.
        let context = unsafe { (self.current_context)(&mut number) };
        (context, number)
    }

    /// The number of a graph or an instance.
    pub fn graph_id(&self, handle: usize) -> Result<u32> {
        let mut id = 0;
        // SAFETY: writes a number.
        result(unsafe { (self.graph_id)(handle, &mut id) }, INVALID_PARAMETER)?;
        Ok(id)
    }

    /// The number of a graph's node.
    pub fn graph_node_id(&self, node: usize) -> Result<u64> {
        let mut id = 0;
        // SAFETY: writes a number.
        result(unsafe { (self.graph_node_id)(node, &mut id) }, INVALID_PARAMETER)?;
        Ok(id)
    }

    /// A stream's number.
    pub fn stream_id(&self, stream: usize, per_thread: bool, otherwise: CUptiResult) -> Result<u32> {
        let mut id = 0;
        // SAFETY: writes a number.
        result(unsafe { (self.stream_id)(stream, per_thread.into(), &mut id) }, otherwise)?;
        Ok(id)
    }
}

/// A libcuda for tests, whose devices have no records.
#[cfg(test)]
pub mod fake {
    use super::*;
    use std::sync::Mutex;

    /// What is done when records are read.
    pub static READING: Mutex<Option<fn()>> = Mutex::new(None);

    unsafe extern "C" fn observe(_: *const Observer) -> u32 {
        0
    }

    unsafe extern "C" fn done() -> u32 {
        0
    }

    unsafe extern "C" fn read(
        _: u32,
        _: unsafe extern "C" fn(*mut c_void, *const DeviceRecord),
        _: *mut c_void,
    ) -> u32 {
        let reading = *crate::lock(&READING);
        reading.into_iter().for_each(|reading| reading());
        0
    }

    unsafe extern "C" fn dropped() -> u64 {
        0
    }

    unsafe extern "C" fn context_ids(_: usize, _: *mut u32, _: *mut u32) -> u32 {
        0
    }

    unsafe extern "C" fn stream_id(_: usize, _: u32, _: *mut u32) -> u32 {
        0
    }

    unsafe extern "C" fn observe_resources(_: Option<ResourceObserver>) -> u32 {
        0
    }

    unsafe extern "C" fn graph_id(_: usize, _: *mut u32) -> u32 {
        0
    }

    unsafe extern "C" fn graph_node_id(_: usize, _: *mut u64) -> u32 {
        0
    }

    pub const CURRENT: (usize, u32) = (0x1234, 5);

    unsafe extern "C" fn current_context(number: *mut u32) -> usize {
        // SAFETY: the caller's place.
        unsafe { *number = CURRENT.1 };
        CURRENT.0
    }

    pub static TABLE: Table = Table {
        size: size_of::<Table>(),
        observe,
        start: done,
        stop: done,
        read,
        dropped,
        context_ids,
        stream_id,
        observe_resources,
        current_context,
        graph_id,
        graph_node_id,
    };
}
