//! Writes records into buffers that the program provides, and returns filled buffers to it.
//!
//! A buffer is requested when there is something to record, and returned when it is full or when the program
//! flushes. No lock is held while a function of the program runs, because it may call this library.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cupti_records::{Api, ExternalCorrelation, Kernel, Memcpy, MemcpyPtoP, Memset, kind};

use crate::lock;
use crate::result::{INVALID_KIND, INVALID_PARAMETER, MAX_LIMIT_REACHED, Result};

pub type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
pub type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// Records begin at multiples of this.
const ALIGNMENT: usize = 8;

struct Buffer {
    start: *mut u8,
    size: usize,
    used: usize,
    /// Maximum number of further records.
    left: usize,
}

// SAFETY: the program has given the memory to this library until it gets it back.
unsafe impl Send for Buffer {}

struct Buffers {
    callbacks: Option<(Requested, Completed)>,
    current: Option<Buffer>,
}

static BUFFERS: Mutex<Buffers> = Mutex::new(Buffers { callbacks: None, current: None });
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A record: a structure of `cupti_records`.
///
/// # Safety
/// It begins with its kind, may be copied with its padding, and has the size that [`size`] returns for its
/// kind.
pub unsafe trait Record: Copy {}

macro_rules! records {
    ($($record:ty),*) => {
        $(
            // SAFETY: it has the layout of CUPTI's record, whose first field is the kind.
            unsafe impl Record for $record {}
        )*
    };
}

records!(Api, ExternalCorrelation, Kernel, Memcpy, MemcpyPtoP, Memset);

/// Size in bytes of a record of this kind.
fn size(kind: u32) -> Option<usize> {
    Some(match kind {
        kind::DRIVER | kind::RUNTIME => size_of::<Api>(),
        kind::EXTERNAL_CORRELATION => size_of::<ExternalCorrelation>(),
        kind::KERNEL | kind::CONCURRENT_KERNEL => size_of::<Kernel>(),
        kind::MEMCPY => size_of::<Memcpy>(),
        kind::MEMCPY2 => size_of::<MemcpyPtoP>(),
        kind::MEMSET => size_of::<Memset>(),
        _ => return None,
    })
}

/// Sets the program's functions.
pub fn register(requested: Requested, completed: Completed) {
    lock(&BUFFERS).callbacks = Some((requested, completed));
}

/// Number of records that were dropped since the last call.
pub fn dropped() -> u64 {
    DROPPED.swap(0, Ordering::Relaxed)
}

/// Counts dropped records.
pub fn lose(records: u64) {
    DROPPED.fetch_add(records, Ordering::Relaxed);
}

impl Buffers {
    /// Writes a record if there is a buffer with room.
    fn write<T: Record>(&mut self, record: &T) -> bool {
        let Some(buffer) = &mut self.current else { return false };
        let bytes = size_of::<T>();
        if buffer.left == 0 || buffer.size - buffer.used < bytes {
            return false;
        }
        // SAFETY: this many bytes are left in the program's buffer. The write is unaligned, so the buffer's
        // alignment does not matter.
        unsafe { buffer.start.add(buffer.used).cast::<T>().write_unaligned(*record) };
        buffer.used += bytes.next_multiple_of(ALIGNMENT);
        buffer.left -= 1;
        true
    }
}

/// Requests a buffer from the program. `None`: it provides none.
fn request(requested: Requested) -> Option<Buffer> {
    let (mut start, mut size, mut most) = (std::ptr::null_mut(), 0, 0);
    // SAFETY: the program's function, as it has registered it.
    unsafe { requested(&mut start, &mut size, &mut most) };
    let left = if most == 0 { usize::MAX } else { most };
    // In a buffer that does not begin at a multiple of 8, records would be misaligned for the program.
    (!start.is_null() && start.addr().is_multiple_of(ALIGNMENT)).then_some(Buffer {
        start,
        size,
        used: 0,
        left,
    })
}

fn give_back(completed: Completed, buffer: Buffer) {
    // SAFETY: the program's function, as it has registered it, with a buffer of its own.
    unsafe { completed(std::ptr::null_mut(), 0, buffer.start, buffer.size, buffer.used) };
}

/// Requests a buffer if there is none, as CUPTI does when a program calls CUDA.
pub fn prepare() {
    let (requested, completed) = {
        let buffers = lock(&BUFFERS);
        match buffers.callbacks {
            Some(callbacks) if buffers.current.is_none() => callbacks,
            _ => return,
        }
    };
    let Some(fresh) = request(requested) else { return };
    let unused = {
        let mut buffers = lock(&BUFFERS);
        if buffers.current.is_none() { buffers.current.replace(fresh) } else { Some(fresh) }
    };
    if let Some(unused) = unused {
        give_back(completed, unused);
    }
}

/// Writes a record. If the program provides no buffer with room for it, the record is dropped and counted.
pub fn write<T: Record>(record: &T) {
    let (callbacks, full) = {
        let mut buffers = lock(&BUFFERS);
        if buffers.write(record) {
            return;
        }
        (buffers.callbacks, buffers.current.take())
    };
    let Some((requested, completed)) = callbacks else { return lose(1) };
    if let Some(full) = full {
        give_back(completed, full);
    }
    let fresh = request(requested);
    let (written, unused) = {
        let mut buffers = lock(&BUFFERS);
        let unused = if buffers.current.is_none() {
            buffers.current = fresh;
            None
        } else {
            fresh
        };
        (buffers.write(record), unused)
    };
    if !written {
        lose(1);
    }
    if let Some(unused) = unused {
        give_back(completed, unused);
    }
}

/// Returns the buffer to the program.
pub fn flush() {
    let (callbacks, current) = {
        let mut buffers = lock(&BUFFERS);
        if buffers.callbacks.is_none() {
            return;
        }
        (buffers.callbacks, buffers.current.take())
    };
    if let (Some((_, completed)), Some(buffer)) = (callbacks, current) {
        give_back(completed, buffer);
    }
}

/// Returns the buffer to the program, and forgets its functions.
pub fn end() {
    flush();
    lock(&BUFFERS).callbacks = None;
}

/// The record after `record` in a buffer with `valid` bytes. For NULL, the first record.
///
/// # Safety
/// The buffer was filled by this library, and `record` is NULL or one of its records.
pub unsafe fn next(buffer: *mut u8, valid: usize, record: *mut u32) -> Result<*mut u32> {
    if buffer.is_null() {
        return Err(INVALID_PARAMETER);
    }
    let at = if record.is_null() {
        0
    } else {
        let at =
            record.addr().checked_sub(buffer.addr()).filter(|at| *at < valid).ok_or(INVALID_PARAMETER)?;
        // SAFETY: a record of this buffer's, which begins with its kind.
        let bytes = size(unsafe { record.read_unaligned() }).ok_or(INVALID_KIND)?;
        at + bytes.next_multiple_of(ALIGNMENT)
    };
    if at >= valid {
        return Err(MAX_LIMIT_REACHED);
    }
    // SAFETY: within the buffer.
    Ok(unsafe { buffer.add(at) }.cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    static GIVEN: AtomicUsize = AtomicUsize::new(0);
    static BACK: Mutex<Vec<(u32, u32)>> = Mutex::new(Vec::new());
    /// Room for two and a half records.
    const SIZE: usize = size_of::<Api>() * 5 / 2;

    unsafe extern "C" fn give(start: *mut *mut u8, size: *mut usize, most: *mut usize) {
        let refuse = GIVEN.fetch_add(1, Ordering::Relaxed) >= 3;
        let buffer = Box::leak(Box::new([0u64; SIZE.div_ceil(8)]));
        // SAFETY: three places to write.
        unsafe {
            *start = if refuse { std::ptr::null_mut() } else { buffer.as_mut_ptr().cast() };
            (*size, *most) = (SIZE, 0);
        }
    }

    unsafe extern "C" fn take(_: *mut c_void, _: u32, start: *mut u8, _: usize, valid: usize) {
        let mut record = std::ptr::null_mut();
        // SAFETY: a buffer that this library has filled.
        while let Ok(found) = unsafe { next(start, valid, record) } {
            record = found;
            // SAFETY: only such records are written here.
            let api = unsafe { record.cast::<Api>().read_unaligned() };
            lock(&BACK).push((api.kind, api.correlationId));
        }
    }

    #[test]
    fn each_record_comes_once_and_records_without_room_are_counted() {
        let record = |correlationId| Api { kind: kind::DRIVER, correlationId, ..Api::zeroed() };
        write(&record(0));
        assert_eq!(dropped(), 1, "the program has no buffers yet");
        register(give, take);
        prepare();
        (1..=8).for_each(|number| write(&record(number)));
        flush();
        let expected: Vec<_> = (1..=6).map(|number| (kind::DRIVER, number)).collect();
        assert_eq!((lock(&BACK).clone(), dropped()), (expected, 2));
    }

    #[test]
    fn a_pointer_outside_the_buffer_is_refused() {
        let mut buffer = [0u64; 8];
        let start = buffer.as_mut_ptr().cast::<u8>();
        let mut other = [kind::DRIVER; 2];
        // SAFETY: neither is followed.
        unsafe {
            assert_eq!(next(start, 64, other.as_mut_ptr()), Err(INVALID_PARAMETER));
            assert_eq!(next(std::ptr::null_mut(), 64, std::ptr::null_mut()), Err(INVALID_PARAMETER));
            assert_eq!(next(start, 0, std::ptr::null_mut()), Err(MAX_LIMIT_REACHED));
            assert_eq!(next(start, 64, start.cast()), Err(INVALID_KIND));
        }
    }
}
