//! The functions of the activity API.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use cupti_records::{Kernel, Memcpy, MemcpyPtoP, Memset, attribute, channel, copy, flag, kind};

use crate::calls::{self, SYSTEM_THREADS, WANTED};
use crate::clock::{self, Times};
use crate::driver::{DeviceRecord, table, work};
use crate::names::{DRIVER, RUNTIME};
use crate::result::{
    CUptiResult, INVALID_CONTEXT, INVALID_KIND, INVALID_OPERATION, INVALID_PARAMETER, INVALID_STREAM,
    NOT_SUPPORTED, PARAMETER_SIZE_NOT_SUFFICIENT, Result, finish, put,
};
use crate::{buffers, lock, names, subscriber};

/// `CUPTI_API_VERSION` of CUDA 13.0.
const VERSION: u32 = 130_001;
/// `CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC` and `CUPTI_ACTIVITY_FLAG_MEMSET_ASYNC`.
const ASYNC: u8 = 1;

/// The kinds of records that a device's work has, as bits.
const DEVICE_KINDS: u64 = 1 << kind::KERNEL
    | 1 << kind::CONCURRENT_KERNEL
    | 1 << kind::MEMCPY
    | 1 << kind::MEMCPY2
    | 1 << kind::MEMSET;
/// Kinds that are accepted but never have records, because such activity never happens here.
const EMPTY_KINDS: u64 = 1 << kind::OVERHEAD;

/// The kinds that are enabled, as bits.
static ENABLED: AtomicU64 = AtomicU64::new(0);
/// Held while kinds are enabled or disabled.
static CHANGING: Mutex<()> = Mutex::new(());
/// Held while the records of devices are fetched: see [`Turn`].
static FETCHING: Mutex<()> = Mutex::new(());
thread_local! {
    /// Whether this thread fetches records.
    static FETCHES: Cell<bool> = const { Cell::new(false) };
}
/// Values of attributes, which have no effect here.
static ATTRIBUTES: Mutex<[u64; attribute::LAST as usize + 1]> = Mutex::new([0; attribute::LAST as usize + 1]);

fn is_enabled(number: u32) -> bool {
    ENABLED.load(Ordering::Relaxed) & 1 << number != 0
}

/// Whether any records of devices are wanted.
pub fn any_device_kind() -> bool {
    ENABLED.load(Ordering::Relaxed) & DEVICE_KINDS != 0
}

fn enable(number: u32) -> Result {
    let _turn = lock(&CHANGING);
    if number == 0 || number >= kind::COUNT {
        return Err(INVALID_KIND);
    }
    let bit = 1 << number;
    match number {
        kind::DRIVER => WANTED[0].set(true),
        kind::RUNTIME => WANTED[1].set(true),
        kind::EXTERNAL_CORRELATION => calls::EXTERNAL.store(true, Ordering::Relaxed),
        _ if bit & DEVICE_KINDS != 0 => {
            if !any_device_kind() {
                table()?.start()?;
            }
        }
        _ if bit & EMPTY_KINDS != 0 => {}
        _ => return Err(NOT_SUPPORTED),
    }
    ENABLED.fetch_or(bit, Ordering::Relaxed);
    calls::observe()
}

fn disable(number: u32) -> Result {
    if number == 0 || number >= kind::COUNT {
        return Err(INVALID_KIND);
    }
    let bit = 1 << number;
    // In this order: a thread that fetches calls the program, which may enable a kind then.
    let turn = if bit & DEVICE_KINDS != 0 { Turn::wait() } else { None };
    let _changing = lock(&CHANGING);
    if !is_enabled(number) {
        return Ok(());
    }
    let others = ENABLED.load(Ordering::Relaxed) & !bit;
    match number {
        kind::DRIVER => WANTED[0].set(false),
        kind::RUNTIME => WANTED[1].set(false),
        kind::EXTERNAL_CORRELATION => calls::EXTERNAL.store(false, Ordering::Relaxed),
        _ if bit & DEVICE_KINDS != 0 && others & DEVICE_KINDS == 0 => {
            // Fetch the records of what the devices have done until now.
            let _ = turn.as_ref().map(|turn| turn.fetch(true));
            table()?.stop();
        }
        // Fetch the records of this kind until now.
        _ if bit & DEVICE_KINDS != 0 => _ = turn.as_ref().map(|turn| turn.fetch(true)),
        _ => {}
    }
    ENABLED.fetch_and(!bit, Ordering::Relaxed);
    calls::observe()
}

/// Fetches all records as [`Turn::fetch`] does, after those that another thread is fetching were written.
fn fetch() -> Result {
    Turn::wait().map_or(Ok(()), |turn| turn.fetch(true))
}

/// Fetches the records that the server has, unless a thread is fetching already.
pub fn fetch_some() -> Result {
    let turn = FETCHING.try_lock().ok().map(Turn::begin);
    turn.map_or(Ok(()), |turn| turn.fetch(false))
}

/// A thread's turn at fetching records.
struct Turn(#[expect(dead_code, reason = "held until the turn is over")] MutexGuard<'static, ()>);

impl Turn {
    fn begin(turn: MutexGuard<'static, ()>) -> Turn {
        let _ = FETCHES.try_with(|fetches| fetches.set(true));
        Turn(turn)
    }

    /// Waits for this thread's turn. `None` if it has it: it is writing records, and the program's function
    /// for buffers has called this library.
    fn wait() -> Option<Turn> {
        let waits = FETCHES.try_with(|fetches| !fetches.get()).unwrap_or(false);
        waits.then(|| Turn::begin(lock(&FETCHING)))
    }

    /// Fetches the records of what the devices did and writes them into the program's buffers. `all`:
    /// includes records that the server does not have from its driver yet.
    fn fetch(&self, all: bool) -> Result {
        let table = table()?;
        let mut found = Vec::new();
        let fetched = table.read(all, |record| found.push(device_record(record)));
        let times = clock::compare();
        for record in found {
            record.write(&times);
        }
        buffers::lose(table.dropped());
        fetched
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = FETCHES.try_with(|fetches| fetches.set(false));
    }
}

/// A record with times of the system's clock.
enum Device {
    Kernel(Kernel),
    Memcpy(Memcpy),
    MemcpyPtoP(MemcpyPtoP),
    Memset(Memset),
    None,
}

/// A device's record: what all kinds have, and these fields.
macro_rules! record {
    ($r:ident, $record:ident { $($field:ident : $value:expr),* $(,)? }) => {
        Device::$record($record {
            start: $r.begin,
            end: $r.end,
            deviceId: $r.device,
            contextId: $r.context,
            streamId: $r.stream,
            correlationId: $r.correlation,
            graphNodeId: $r.node,
            graphId: $r.graph,
            $($field: $value,)*
            ..$record::zeroed()
        })
    };
}

fn device_record(r: &DeviceRecord) -> Device {
    let [copy, from, to, _] = r.memory;
    match r.kind {
        work::KERNEL => record!(
            r,
            Kernel {
                kind: if is_enabled(kind::KERNEL) && !is_enabled(kind::CONCURRENT_KERNEL) {
                    kind::KERNEL
                } else {
                    kind::CONCURRENT_KERNEL
                },
                registersPerThread: r.registers as u16,
                gridX: r.grid[0].cast_signed(),
                gridY: r.grid[1].cast_signed(),
                gridZ: r.grid[2].cast_signed(),
                blockX: r.block[0].cast_signed(),
                blockY: r.block[1].cast_signed(),
                blockZ: r.block[2].cast_signed(),
                staticSharedMemory: r.shared[0].cast_signed(),
                dynamicSharedMemory: r.shared[1].cast_signed(),
                localMemoryPerThread: r.local,
                gridId: r.correlation.into(),
                name: r.name,
                channelType: channel::COMPUTE,
                clusterX: r.cluster[0],
                clusterY: r.cluster[1],
                clusterZ: r.cluster[2],
            }
        ),
        work::COPY if copy == copy::PTOP => record!(
            r,
            MemcpyPtoP {
                kind: kind::MEMCPY2,
                copyKind: copy,
                srcKind: from,
                dstKind: to,
                flags: ASYNC,
                bytes: r.bytes,
                srcDeviceId: r.ends[0],
                srcContextId: r.ends[0] + 1,
                dstDeviceId: r.ends[1],
                dstContextId: r.ends[1] + 1,
                channelType: channel::ASYNC_MEMCPY,
            }
        ),
        work::COPY => record!(
            r,
            Memcpy {
                kind: kind::MEMCPY,
                copyKind: copy,
                srcKind: from,
                dstKind: to,
                flags: ASYNC,
                bytes: r.bytes,
                channelType: channel::ASYNC_MEMCPY,
                copyCount: 1,
            }
        ),
        work::FILL => record!(
            r,
            Memset {
                kind: kind::MEMSET,
                value: r.value,
                bytes: r.bytes,
                flags: ASYNC.into(),
                memoryKind: to.into(),
                channelType: channel::COMPUTE,
            }
        ),
        _ => Device::None,
    }
}

impl Device {
    /// Writes it to the program's buffers, if its kind is enabled, with times of the program's clock.
    fn write(self, times: &Times) {
        let span = |begin, end| (times.of(begin), times.of(end));
        match self {
            Device::Kernel(mut record) if is_enabled(record.kind) => {
                (record.start, record.end) = span(record.start, record.end);
                record.completed = record.end;
                buffers::write(&record);
            }
            Device::Memcpy(mut record) if is_enabled(kind::MEMCPY) => {
                (record.start, record.end) = span(record.start, record.end);
                buffers::write(&record);
            }
            Device::MemcpyPtoP(mut record) if is_enabled(kind::MEMCPY2) || is_enabled(kind::MEMCPY) => {
                (record.start, record.end) = span(record.start, record.end);
                buffers::write(&record);
            }
            Device::Memset(mut record) if is_enabled(kind::MEMSET) => {
                (record.start, record.end) = span(record.start, record.end);
                buffers::write(&record);
            }
            _ => {}
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetVersion(version: *mut u32) -> CUptiResult {
    // SAFETY: the caller gives a place for a number.
    finish(unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnable(kind: u32) -> CUptiResult {
    finish(enable(kind))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityDisable(kind: u32) -> CUptiResult {
    finish(disable(kind))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityRegisterCallbacks(
    requested: Option<buffers::Requested>,
    completed: Option<buffers::Completed>,
) -> CUptiResult {
    let (Some(requested), Some(completed)) = (requested, completed) else { return INVALID_PARAMETER };
    buffers::register(requested, completed);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityFlushAll(_flag: u32) -> CUptiResult {
    // Both flags have the same effect: the server returns the records of everything that its devices have
    // completed.
    const { assert!(flag::FLUSH_FORCED == 1) };
    let fetched = if any_device_kind() { fetch() } else { Ok(()) };
    buffers::flush();
    finish(fetched)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityFlush(_context: *mut c_void, _stream: u32, flag: u32) -> CUptiResult {
    cuptiActivityFlushAll(flag)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityFlushPeriod(_milliseconds: u32) -> CUptiResult {
    // Buffers are only returned when they are full or flushed.
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNextRecord(
    buffer: *mut u8,
    valid: usize,
    record: *mut *mut u32,
) -> CUptiResult {
    if record.is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: not NULL; the caller gives a buffer that this library has filled, and NULL or a record of it.
    finish(unsafe { buffers::next(buffer, valid, *record).and_then(|next| put(record, next)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNumDroppedRecords(
    _context: *mut c_void,
    _stream: u32,
    dropped: *mut usize,
) -> CUptiResult {
    if dropped.is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: the caller gives a place for a number.
    finish(unsafe { put(dropped, buffers::dropped() as usize) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityPushExternalCorrelationId(kind: u32, id: u64) -> CUptiResult {
    finish(calls::push(kind, id))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityPopExternalCorrelationId(kind: u32, last: *mut u64) -> CUptiResult {
    let popped = calls::pop(kind);
    // SAFETY: NULL, or a place for a number.
    finish(popped.and_then(|id| if last.is_null() { Ok(()) } else { unsafe { put(last, id) } }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivitySetAttribute(
    number: u32,
    size: *mut usize,
    value: *mut c_void,
) -> CUptiResult {
    // SAFETY: NULL, or how many bytes the caller's value has, of which no more are read.
    finish(unsafe { attribute_size(number, size, value) }.map(|wanted| {
        let mut bytes = [0; 8];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), wanted) };
        lock(&ATTRIBUTES)[number as usize] = u64::from_le_bytes(bytes);
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetAttribute(
    number: u32,
    size: *mut usize,
    value: *mut c_void,
) -> CUptiResult {
    // SAFETY: NULL, or how much room the caller has.
    finish(unsafe { attribute_size(number, size, value) }.map(|wanted| {
        let bytes = lock(&ATTRIBUTES)[number as usize].to_le_bytes();
        // SAFETY: there is room for that.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), wanted);
            *size = wanted;
        }
    }))
}

/// Bytes of an attribute, if the caller's value has as many: a flag has one, a size eight.
///
/// # Safety
/// `size` is NULL or points to a number.
unsafe fn attribute_size(number: u32, size: *const usize, value: *const c_void) -> Result<usize> {
    /// `CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER` and
    /// `CUPTI_ACTIVITY_ATTR_MEM_ALLOCATION_TYPE_HOST_PINNED`.
    const FLAGS: [u32; 3] = [5, 8, attribute::PER_THREAD_ACTIVITY_BUFFER];
    if number > attribute::LAST || size.is_null() || value.is_null() {
        return Err(INVALID_PARAMETER);
    }
    let wanted = if FLAGS.contains(&number) { 1 } else { 8 };
    // SAFETY: not NULL, so it points to a number.
    if unsafe { *size } < wanted { Err(PARAMETER_SIZE_NOT_SUFFICIENT) } else { Ok(wanted) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityRegisterTimestampCallback(callback: Option<clock::Callback>) -> CUptiResult {
    // Otherwise device records before and after the call would have times of different clocks.
    if any_device_kind() {
        return INVALID_OPERATION;
    }
    clock::use_callback(callback);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetTimestamp(timestamp: *mut u64) -> CUptiResult {
    // SAFETY: the caller gives a place for a number.
    finish(unsafe { put(timestamp, clock::now()) })
}

fn enable_call(domain: u32, cbid: u32, enable: u8) -> Result {
    if cbid == 0 || names::of(domain).and_then(|names| names.name(cbid)).is_none() {
        return Err(INVALID_PARAMETER);
    }
    WANTED[usize::from(domain == RUNTIME)].set_one(cbid, enable != 0);
    calls::observe()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableDriverApi(cbid: u32, enable: u8) -> CUptiResult {
    finish(enable_call(DRIVER, cbid, enable))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableRuntimeApi(cbid: u32, enable: u8) -> CUptiResult {
    finish(enable_call(RUNTIME, cbid, enable))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetDeviceId(context: usize, id: *mut u32) -> CUptiResult {
    let found = table().and_then(|table| table.context_ids(context, INVALID_CONTEXT));
    // SAFETY: the caller gives a place for a number.
    finish(found.and_then(|(_, device)| unsafe { put(id, device) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetContextId(context: usize, id: *mut u32) -> CUptiResult {
    let found = table().and_then(|table| table.context_ids(context, INVALID_CONTEXT));
    // SAFETY: the caller gives a place for a number.
    finish(found.and_then(|(number, _)| unsafe { put(id, number) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetGraphId(graph: usize, id: *mut u32) -> CUptiResult {
    let found = table().and_then(|table| table.graph_id(graph));
    // SAFETY: the caller gives a place for a number.
    finish(found.and_then(|number| unsafe { put(id, number) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetGraphExecId(exec: usize, id: *mut u32) -> CUptiResult {
    // SAFETY: as the caller says. Graphs and instances have no handles and no numbers in common.
    unsafe { cuptiGetGraphId(exec, id) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetGraphNodeId(node: usize, id: *mut u64) -> CUptiResult {
    let found = table().and_then(|table| table.graph_node_id(node));
    // SAFETY: the caller gives a place for a number.
    finish(found.and_then(|number| unsafe { put(id, number) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetStreamIdEx(
    _context: usize,
    stream: usize,
    per_thread: u8,
    id: *mut u32,
) -> CUptiResult {
    let found = table().and_then(|table| table.stream_id(stream, per_thread != 0, INVALID_STREAM));
    // SAFETY: the caller gives a place for a number.
    finish(found.and_then(|number| unsafe { put(id, number) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetStreamId(context: usize, stream: usize, id: *mut u32) -> CUptiResult {
    // SAFETY: as the caller says.
    unsafe { cuptiGetStreamIdEx(context, stream, 0, id) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiSetThreadIdType(kind: u32) -> CUptiResult {
    if kind > 1 {
        return INVALID_PARAMETER;
    }
    SYSTEM_THREADS.store(kind == 1, Ordering::Relaxed);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetThreadIdType(kind: *mut u32) -> CUptiResult {
    // SAFETY: the caller gives a place for a number.
    finish(unsafe { put(kind, SYSTEM_THREADS.load(Ordering::Relaxed).into()) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiFinalize() -> CUptiResult {
    // The program may call this from its subscriber's function, and may be unloaded afterwards: nothing of it
    // is called any more.
    let ended = subscriber::end();
    for number in 1..kind::COUNT {
        // A kind that is not enabled needs nothing.
        let _ = disable(number);
    }
    buffers::end();
    WANTED.iter().for_each(|wanted| wanted.set(false));
    clock::use_callback(None);
    SYSTEM_THREADS.store(false, Ordering::Relaxed);
    *lock(&ATTRIBUTES) = [0; attribute::LAST as usize + 1];
    finish(ended.and_then(|()| calls::observe()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake::READING;
    use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::time::Duration;

    static READS: AtomicU32 = AtomicU32::new(0);
    static DISABLED: AtomicBool = AtomicBool::new(false);

    /// The first read takes long: so long that a thread which does not wait for it is through.
    fn read() {
        for _ in 0..200 {
            if READS.load(Ordering::SeqCst) > 0 || DISABLED.load(Ordering::SeqCst) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        READS.fetch_add(1, Ordering::SeqCst);
        // As a function for buffers may.
        assert_eq!(cuptiActivityFlushAll(0), 0);
    }

    #[test]
    fn a_kind_is_enabled_until_the_records_that_are_being_fetched_are_written() {
        enable(kind::MEMSET).unwrap();
        *lock(&READING) = Some(read);
        std::thread::scope(|scope| {
            scope.spawn(|| fetch_some().unwrap());
            while FETCHING.try_lock().is_ok() {
                std::thread::yield_now();
            }
            disable(kind::MEMSET).unwrap();
            DISABLED.store(true, Ordering::SeqCst);
            assert_eq!(READS.load(Ordering::SeqCst), 2, "those of the other thread, and then the last ones");
        });
        *lock(&READING) = None;
    }
}
