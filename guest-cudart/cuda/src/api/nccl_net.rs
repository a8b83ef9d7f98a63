//! NCCL's interface to network plugins, version 8: `src/include/plugin/net/net_v8.h` of NCCL. NCCL 2.20 and
//! later accept it.
//!
//! NCCL loads `libnccl-net.so`, which is a link to this library, and calls `init` in each process before it
//! looks for other networks. `init` declines if the user has chosen another one with `NCCL_NET`.
//!
//! The network takes host memory only. NCCL's kernels then write messages into page-locked memory and read
//! them from there, as with NCCL's own network for sockets.

use std::ffi::{CStr, c_char, c_float, c_int, c_void};
use std::sync::Mutex;

use crate::process::driver::driver;
use crate::work::nccl_net::{Accepting, Broken, End, HANDLE, Place, Requests};
use client::{lock, log};

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INTERNAL_ERROR: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const REMOTE_ERROR: c_int = 6;

/// `NCCL_PTR_HOST`.
const POINTER_HOST: c_int = 1;

/// The plugin's name in NCCL's messages, and as a value of `NCCL_NET`.
const NAME: &CStr = c"rgpu";

/// `ncclNetProperties_v8_t`.
#[repr(C)]
pub struct Properties {
    name: *const c_char,
    pci_path: *const c_char,
    guid: u64,
    pointers: c_int,
    registrations_are_global: c_int,
    /// In Mbit/s.
    speed: c_int,
    port: c_int,
    /// In microseconds.
    latency: c_float,
    max_comms: c_int,
    max_receives: c_int,
    /// `NCCL_NET_DEVICE_HOST`: NCCL's kernels don't use the network by themselves.
    device_type: c_int,
    device_version: c_int,
}

/// `ncclNet_v8_t`.
#[repr(C)]
pub struct Net {
    name: *const c_char,
    init: unsafe extern "C" fn(*const c_void) -> c_int,
    devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    properties: unsafe extern "C" fn(c_int, *mut Properties) -> c_int,
    listen: unsafe extern "C" fn(c_int, *mut [u8; HANDLE], *mut *mut c_void) -> c_int,
    connect: unsafe extern "C" fn(c_int, *mut [u8; HANDLE], *mut *mut c_void, *mut *mut c_void) -> c_int,
    accept: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_int,
    register: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> c_int,
    register_dma_buf: Option<unsafe extern "C" fn()>,
    deregister: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    send:
        unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> c_int,
    receive: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> c_int,
    flush: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> c_int,
    test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> c_int,
    close_send: unsafe extern "C" fn(*mut c_void) -> c_int,
    close_receive: unsafe extern "C" fn(*mut c_void) -> c_int,
    close_listen: unsafe extern "C" fn(*mut c_void) -> c_int,
    device_memory: Option<unsafe extern "C" fn()>,
    receive_consumed: Option<unsafe extern "C" fn()>,
}

// SAFETY: constants.
unsafe impl Sync for Net {}

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: Net = Net {
    name: NAME.as_ptr(),
    init,
    devices,
    properties,
    listen,
    connect,
    accept,
    register,
    register_dma_buf: None,
    deregister,
    send,
    receive,
    flush,
    test,
    close_send: close,
    close_receive: close,
    close_listen,
    device_memory: None,
    receive_consumed: None,
};

/// An end of a connection, as NCCL knows it. A request is its address plus the request's number.
#[repr(align(64))]
struct Comm(End);

const _: () = assert!(align_of::<Comm>() >= Requests::MOST);

fn comm<'a>(pointer: *mut c_void) -> Option<&'a Comm> {
    // SAFETY: NCCL passes what `connect` and `accept` returned, until it closes it.
    unsafe { pointer.cast::<Comm>().as_ref() }
}

fn answer(result: Result<(), Broken>) -> c_int {
    match result {
        Ok(()) => SUCCESS,
        Err(Broken::Peer(_)) => REMOTE_ERROR,
        Err(Broken::Here(_)) => SYSTEM_ERROR,
    }
}

/// Sets a variable of NCCL's, unless the user has.
fn set(name: &CStr, value: &CStr) {
    // SAFETY: two strings. NCCL calls this before it reads the variables, and its documentation asks plugins
    // to do it like this.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 0) };
}

/// Whether the user has chosen another network.
fn is_declined() -> bool {
    std::env::var("NCCL_NET").is_ok_and(|wanted| !wanted.is_empty() && !wanted.eq_ignore_ascii_case("rgpu"))
}

/// All processes of a collective must find the same settings, whatever devices they have: NCCL assumes that.
unsafe extern "C" fn init(_log: *const c_void) -> c_int {
    if is_declined() || driver().is_err() {
        return SYSTEM_ERROR;
    }
    // NCCL believes that GPUs of processes on one machine are in that machine, and would have their kernels
    // synchronize through a file in /dev/shm.
    set(c"NCCL_SHM_DISABLE", c"1");
    // As large as the steps of collectives: a step takes longer than over NCCL's own network, because its
    // counters are mirrored host memory.
    set(c"NCCL_P2P_NET_CHUNKSIZE", c"524288");
    log::info(format_args!("NCCL uses the network of rgpu"));
    SUCCESS
}

unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    // SAFETY: NCCL passes a place for the result.
    unsafe { count.write(1) };
    SUCCESS
}

unsafe extern "C" fn properties(_device: c_int, properties: *mut Properties) -> c_int {
    let all = Properties {
        name: NAME.as_ptr(),
        pci_path: std::ptr::null(),
        guid: 0x7267_7075,
        pointers: POINTER_HOST,
        registrations_are_global: 0,
        speed: 100_000,
        port: 0,
        latency: 0.0,
        max_comms: 1 << 16,
        max_receives: 1,
        device_type: 0,
        device_version: 0,
    };
    // SAFETY: NCCL passes a place for the result.
    unsafe { properties.write(all) };
    SUCCESS
}

unsafe extern "C" fn listen(_device: c_int, handle: *mut [u8; HANDLE], listener: *mut *mut c_void) -> c_int {
    answer(Accepting::new().inspect_err(|why| log::warn(format_args!("{why}"))).map(|new| {
        // SAFETY: NCCL passes places for the results.
        unsafe {
            handle.write(new.handle());
            listener.write(Box::into_raw(Box::new(Mutex::new(new))).cast());
        }
    }))
}

unsafe extern "C" fn connect(
    _device: c_int,
    handle: *mut [u8; HANDLE],
    end: *mut *mut c_void,
    _of_device: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL passes the handle that `listen` made, and calls again with the same memory.
    let connected = End::connect(handle as usize, &unsafe { handle.read() });
    put(end, connected.inspect_err(|why| log::warn(format_args!("{why}"))))
}

unsafe extern "C" fn accept(
    listener: *mut c_void,
    end: *mut *mut c_void,
    _of_device: *mut *mut c_void,
) -> c_int {
    // SAFETY: what `listen` made.
    let Some(listener) = (unsafe { listener.cast::<Mutex<Accepting>>().as_ref() }) else {
        return INVALID_ARGUMENT;
    };
    put(end, lock(listener).accept())
}

fn put(place: *mut *mut c_void, end: Result<Option<End>, Broken>) -> c_int {
    answer(end.map(|end| {
        let end = end.map_or(std::ptr::null_mut(), |end| Box::into_raw(Box::new(Comm(end))).cast());
        // SAFETY: NCCL passes a place for the result.
        unsafe { place.write(end) };
    }))
}

/// Memory that NCCL has registered for a connection.
struct Registered {
    place: Place,
    at: u64,
    len: u64,
}

unsafe extern "C" fn register(
    end: *mut c_void,
    at: *mut c_void,
    size: usize,
    kind: c_int,
    memory: *mut *mut c_void,
) -> c_int {
    let Some(Comm(end)) = comm(end).filter(|_| kind == POINTER_HOST) else { return INVALID_ARGUMENT };
    let (at, len) = (at as u64, size as u64);
    let registered = Registered { place: end.register(at, len), at, len };
    // SAFETY: NCCL passes a place for the result.
    unsafe { memory.write(Box::into_raw(Box::new(registered)).cast()) };
    SUCCESS
}

unsafe extern "C" fn deregister(end: *mut c_void, memory: *mut c_void) -> c_int {
    if !memory.is_null() {
        // SAFETY: what `register` made, which NCCL uses no more.
        let Registered { place, at, len } = *unsafe { Box::from_raw(memory.cast::<Registered>()) };
        if let Some(Comm(end)) = comm(end) {
            end.deregister(place, at, len);
        }
    }
    SUCCESS
}

/// # Safety
/// `memory` is null or what `register` made.
unsafe fn registered(memory: *mut c_void) -> Place {
    // SAFETY: guaranteed by the caller.
    unsafe { memory.cast::<Registered>().as_ref() }.map_or(Place::Here, |memory| memory.place)
}

/// Writes a request, or null for "not now".
fn begun(end: *mut c_void, place: *mut *mut c_void, request: Result<Option<usize>, Broken>) -> c_int {
    answer(request.map(|request| {
        let request = request.map_or(std::ptr::null_mut(), |request| end.wrapping_byte_add(request));
        // SAFETY: NCCL passes a place for the result.
        unsafe { place.write(request) };
    }))
}

unsafe extern "C" fn send(
    end: *mut c_void,
    data: *mut c_void,
    size: c_int,
    _tag: c_int,
    memory: *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    let (Some(Comm(to)), Ok(size)) = (comm(end), u64::try_from(size)) else { return INVALID_ARGUMENT };
    // SAFETY: NCCL passes what it registered, and keeps it until the request is done.
    begun(end, request, unsafe { to.send(registered(memory), data as u64, size) })
}

unsafe extern "C" fn receive(
    end: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _tags: *mut c_int,
    memories: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    if count != 1 {
        return INTERNAL_ERROR;
    }
    // SAFETY: NCCL passes arrays of `count` elements. It may have none of registrations for host memory.
    let (at, size, memory) =
        unsafe { (*data as u64, *sizes, if memories.is_null() { std::ptr::null_mut() } else { *memories }) };
    let (Some(Comm(from)), Ok(size)) = (comm(end), u64::try_from(size)) else { return INVALID_ARGUMENT };
    // SAFETY: NCCL passes what it registered, and keeps it until the request is done.
    begun(end, request, unsafe { from.receive(registered(memory), at, size) })
}

/// A request to receive is done only when a kernel sees the bytes.
unsafe extern "C" fn flush(
    _end: *mut c_void,
    _count: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _memories: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL passes a place for the result.
    unsafe { request.write(std::ptr::null_mut()) };
    SUCCESS
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, size: *mut c_int) -> c_int {
    let number = request.addr() % align_of::<Comm>();
    let Some(Comm(end)) = comm(request.wrapping_byte_sub(number)) else { return INVALID_ARGUMENT };
    answer(end.test(number).map(|bytes| {
        // SAFETY: NCCL passes a place for the result, and may pass one for the size.
        unsafe {
            done.write(bytes.is_some().into());
            if let (Some(bytes), false) = (bytes, size.is_null()) {
                size.write(bytes as c_int);
            }
        }
    }))
}

unsafe extern "C" fn close(end: *mut c_void) -> c_int {
    if !end.is_null() {
        // SAFETY: what `connect` or `accept` returned, which NCCL uses no more.
        let Comm(end) = *unsafe { Box::from_raw(end.cast::<Comm>()) };
        end.close();
    }
    SUCCESS
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> c_int {
    if !listener.is_null() {
        // SAFETY: what `listen` made, which NCCL uses no more.
        drop(unsafe { Box::from_raw(listener.cast::<Mutex<Accepting>>()) });
    }
    SUCCESS
}
