//! libibverbs without a device: queue pairs that are in this process only, for tests and for fuzzing.
//!
//! ```text
//!   Device, Domain, QueuePair, … ─▶ Library ─▶ functions of this module ─▶ Fabric
//!                                                                            ▲
//!                                              a test: send, write, complete ┘   the peer of a queue pair
//! ```
//!
//! After [`install`], [`Library::get`](super::sys::Library::get) gives these functions, so everything above the C library runs as it does with a device, `unsafe` code included. Two queue
//! pairs of this process that are connected to each other exchange messages and writes at once. What a queue pair sends to any other number is kept: a test sees it ([`sent`]), decides
//! what becomes of it ([`complete`]), and sends whatever it likes ([`send`], [`write`]).
//!
//! It checks its callers like a strict device: requests outside registered memory, full queues, and objects that are destroyed while others need them are bugs of rgpu, and end the process. It does not lose,
//! delay or reorder anything, and it has one port, of InfiniBand.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
#[cfg(feature = "software-verbs")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

use super::sys::{
    AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Gid, Library, Mr, Mw, MwBind, Pd, PortAttr, Qp,
    QpAttr, QpInitAttr, RecvWr, SendWr, Sge, Wc, number,
};

/// The peer's message was longer than its receive.
const LOCAL_LENGTH: u32 = 1;
/// Reached memory that the peer may not write.
const REMOTE_ACCESS: u32 = 10;
/// The port's local identifier, and its MTU as `enum ibv_mtu`.
const LID: u16 = 7;
const MTU: u32 = 5;

static INSTALLED: AtomicBool = AtomicBool::new(false);
#[cfg(feature = "software-verbs")]
static WORDS: AtomicU64 = AtomicU64::new(u64::MAX);
#[cfg(feature = "software-verbs")]
static ENDED: AtomicU64 = AtomicU64::new(0);
static FABRIC: LazyLock<Mutex<Fabric>> = LazyLock::new(Mutex::default);

/// Puts this module in the place of libibverbs, for the rest of the process.
pub fn install() {
    INSTALLED.store(true, Ordering::Release);
}

pub(super) fn installed() -> Option<&'static Library> {
    INSTALLED.load(Ordering::Acquire).then_some(&LIBRARY)
}

fn fabric() -> MutexGuard<'static, Fabric> {
    FABRIC.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A relay's thread ends when it has written so many more words into its ledger, as if its process did: nothing is said to anybody, and its queue pairs and registrations are gone.
#[cfg(feature = "software-verbs")]
pub fn end_process_after(words: u64) {
    WORDS.store(words, Ordering::SeqCst);
}

/// How many have ended so.
#[cfg(feature = "software-verbs")]
pub fn processes_ended() -> u64 {
    ENDED.load(Ordering::SeqCst)
}

/// What a thread ends with.
#[cfg(feature = "software-verbs")]
pub(crate) struct Ended;

/// Counts a word of a ledger.
#[cfg(feature = "software-verbs")]
pub(crate) fn writes_word() {
    let left = |words: u64| words.checked_sub(1).filter(|_| words < u64::MAX);
    if WORDS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left) == Err(0) {
        WORDS.store(u64::MAX, Ordering::SeqCst);
        std::panic::resume_unwind(Box::new(Ended));
    }
}

/// Whether a thread ended in this way.
#[cfg(feature = "software-verbs")]
pub(crate) fn has_ended(why: &(dyn std::any::Any + Send)) -> bool {
    let ended = why.is::<Ended>();
    if ended {
        ENDED.fetch_add(1, Ordering::SeqCst);
    }
    ended
}

/// What becomes of requests to a peer that is not in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Outside {
    /// They wait for [`complete`].
    #[default]
    Kept,
    /// They complete at once, with this status; 0 is success.
    Done(u32),
}

/// What a queue pair sent to a peer outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// Its bytes, read from the sender's memory now, as a device does that sends them once more.
    pub bytes: Vec<u8>,
    /// For a write with immediate data: address, key, and the data.
    pub write: Option<(u64, u32, u32)>,
}

/// Sets what becomes of what is sent to peers outside from now on.
pub fn outside(what: Outside) {
    fabric().outside = what;
}

/// Lets the `n`-th call from now on fail for lack of memory, of those that may fail. `None`: none fails.
pub fn fail(n: Option<u32>) {
    fabric().failing = n;
}

/// Numbers of the queue pairs that there are, in ascending order, but for those that are connected to themselves.
pub fn pairs() -> Vec<u32> {
    let fabric = fabric();
    let others = fabric.pairs.iter().filter(|(number, pair)| pair.peer != Some(**number));
    let mut pairs: Vec<u32> = others.map(|(number, _)| *number).collect();
    pairs.sort_unstable();
    pairs
}

/// Number of objects of all kinds that were made and not destroyed.
pub fn objects() -> usize {
    let fabric = fabric();
    let Fabric { contexts, domains, regions, windows, channels, queues, pairs, .. } = &*fabric;
    let memory = regions.len() + windows.len();
    contexts.len() + domains.len() + memory + channels.len() + queues.len() + pairs.len()
}

/// What the windows that are open show: address, length and key, in no order.
pub fn windows() -> Vec<(u64, u64, u32)> {
    let shown = |(key, window): (&u32, &Shown)| window.shown.map(|(_, at, len)| (at, len, *key));
    fabric().windows.iter().filter_map(shown).collect()
}

/// Whether devices that are opened from now on have windows. They do unless told otherwise.
pub fn have_windows(have: bool) {
    fabric().lacks_windows = !have;
}

/// Number of registrations with these rights (`IBV_ACCESS_REMOTE_WRITE` is 2).
pub fn registered_for(access: i32) -> usize {
    fabric().regions.values().filter(|region| region.access & access != 0).count()
}

/// The peer that a queue pair is connected to.
pub fn peer(pair: u32) -> Option<u32> {
    fabric().pairs.get(&pair)?.peer
}

/// Number of receives that a queue pair has posted.
pub fn receives(pair: u32) -> usize {
    fabric().pairs.get(&pair).map_or(0, |pair| pair.receives.len())
}

/// Number of requests of a queue pair that have not completed.
pub fn sends(pair: u32) -> usize {
    fabric().pairs.get(&pair).map_or(0, |pair| pair.sends.len())
}

/// Sends a message to a queue pair, as its peer.
///
/// # Errors
/// The status with which the peer's request completes.
pub fn send(to: u32, bytes: &[u8]) -> Result<(), u32> {
    fabric().arrive(to, &Sent { bytes: bytes.to_vec(), write: None })
}

/// Writes with immediate data, as a queue pair's peer.
///
/// # Errors
/// The status with which the peer's request completes.
pub fn write(to: u32, (address, key): (u64, u32), immediate: u32, bytes: &[u8]) -> Result<(), u32> {
    fabric().arrive(to, &Sent { bytes: bytes.to_vec(), write: Some((address, key, immediate)) })
}

/// Whether the peer of a queue pair may write `len` bytes at an address with a key.
pub fn writable(to: u32, place: (u64, u32), len: u64) -> bool {
    let fabric = fabric();
    fabric.pairs.get(&to).is_some_and(|pair| fabric.writable(pair.domain, place, len))
}

/// The `n`-th request of a queue pair that has not completed; 0 is the oldest.
pub fn sent(from: u32, n: usize) -> Option<Sent> {
    let fabric = fabric();
    let pair = fabric.pairs.get(&from)?;
    pair.sends.get(n).map(|request| fabric.gather(pair.domain, request))
}

/// Completes the oldest request of a queue pair. Another status than 0 stops the pair. False: there is none.
pub fn complete(from: u32, status: u32) -> bool {
    fabric().complete(from, status)
}

/// The device gives a queue pair's connection up: everything that is posted completes as flushed.
pub fn stop(pair: u32) {
    fabric().stop(pair);
}

#[derive(Default)]
struct Fabric {
    contexts: HashSet<usize>,
    domains: HashSet<usize>,
    /// By key.
    regions: HashMap<u32, Memory>,
    windows: HashMap<u32, Shown>,
    lacks_windows: bool,
    channels: HashMap<usize, RawFd>,
    queues: HashMap<usize, Queue>,
    pairs: HashMap<u32, Pair>,
    /// The last key or queue pair's number that was given out.
    last: u32,
    outside: Outside,
    failing: Option<u32>,
}

struct Memory {
    domain: usize,
    at: u64,
    len: u64,
    access: c_int,
}

/// A window.
struct Shown {
    domain: usize,
    /// The registration's key, and what of it: address and length. `None`: it is closed.
    shown: Option<(u32, u64, u64)>,
}

/// A completion queue.
struct Queue {
    channel: usize,
    capacity: usize,
    entries: VecDeque<Wc>,
    armed: bool,
}

struct Pair {
    domain: usize,
    send_queue: usize,
    receive_queue: usize,
    most_sends: usize,
    most_receives: usize,
    most_segments: (c_int, c_int),
    state: u32,
    peer: Option<u32>,
    sends: VecDeque<Request>,
    receives: VecDeque<(u64, Vec<Sge>)>,
}

struct Request {
    id: u64,
    opcode: u32,
    /// Its success is reported. (Its failure always is.)
    signalled: bool,
    payload: Payload,
    write: Option<(u64, u32, u32)>,
}

enum Payload {
    Segments(Vec<Sge>),
    Inline(Vec<u8>),
}

impl Fabric {
    fn next(&mut self) -> u32 {
        self.last = self.last % 0xff_ffff + 1;
        self.last
    }

    /// Whether this call is to fail; then the reason is in `errno`.
    fn fails(&mut self) -> bool {
        let fails = self.failing == Some(0);
        self.failing = self.failing.and_then(|left| left.checked_sub(1));
        if fails {
            Errno::ENOMEM.set();
        }
        fails
    }

    /// The memory of a work request.
    fn memory<'s>(
        &self,
        domain: usize,
        segments: &'s [Sge],
        access: c_int,
    ) -> impl Iterator<Item = (NonNull<u8>, usize)> + use<'s, '_> {
        segments.iter().filter(|segment| segment.length > 0).map(move |segment| {
            let region = self.regions.get(&segment.lkey);
            let region = region.unwrap_or_else(|| panic!("a request with an unknown key: {segment:?}"));
            let end = segment.addr.checked_add(segment.length.into());
            assert!(
                region.domain == domain
                    && region.access & access == access
                    && segment.addr >= region.at
                    && end.is_some_and(|end| end <= region.at + region.len),
                "a request outside its registration: {segment:?}"
            );
            let at = NonNull::new(segment.addr as *mut u8);
            (at.unwrap_or_else(|| panic!("memory at 0")), segment.length as usize)
        })
    }

    fn gather(&self, domain: usize, request: &Request) -> Sent {
        let bytes = match &request.payload {
            Payload::Inline(bytes) => bytes.clone(),
            Payload::Segments(segments) => {
                let mut bytes = Vec::new();
                for (at, len) in self.memory(domain, segments, 0) {
                    // SAFETY: registered memory, which its owner keeps mapped and does not change as long as the
                    // request is posted.
                    bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) });
                }
                bytes
            }
        };
        Sent { bytes, write: request.write }
    }

    /// Whether a peer of a queue pair in this domain may write there.
    fn writable(&self, domain: usize, (address, key): (u64, u32), len: u64) -> bool {
        let region = self
            .regions
            .get(&key)
            .filter(|region| region.domain == domain && region.access & number::ACCESS_REMOTE_WRITE != 0);
        let window = self.windows.get(&key).filter(|window| window.domain == domain);
        let shown = region.map(|region| (region.at, region.len)).or_else(|| {
            let (_, at, len) = window?.shown?;
            Some((at, len))
        });
        let end = address.checked_add(len);
        shown.is_some_and(|(at, most)| address >= at && end.is_some_and(|end| end <= at + most))
    }

    /// Something from its peer reaches a queue pair. The error is the status of the peer's request.
    fn arrive(&mut self, to: u32, sent: &Sent) -> Result<(), u32> {
        let able = |pair: &&Pair| matches!(pair.state, number::QPS_RTR | number::QPS_RTS);
        let pair = self.pairs.get(&to).filter(able).ok_or(number::WC_RETRY_EXC_ERR)?;
        let mut bytes = &sent.bytes[..];
        if let Some((address, key, _)) = sent.write
            && !bytes.is_empty()
        {
            if !self.writable(pair.domain, (address, key), bytes.len() as u64) {
                self.stop(to);
                return Err(REMOTE_ACCESS);
            }
            // SAFETY: inside registered memory that the peer may write, so no Rust reference covers it.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
            bytes = &[];
        }
        let Some((id, segments)) = pair.receives.front() else {
            return Err(number::WC_RNR_RETRY_EXC_ERR);
        };
        let room: usize = segments.iter().map(|segment| segment.length as usize).sum();
        let fits = bytes.len() <= room;
        if fits {
            for (at, len) in self.memory(pair.domain, segments, number::ACCESS_LOCAL_WRITE) {
                let (now, rest) = bytes.split_at(len.min(bytes.len()));
                // SAFETY: registered memory of a posted receive, which nobody else touches until it has completed.
                unsafe { ptr::copy_nonoverlapping(now.as_ptr(), at.as_ptr(), now.len()) };
                bytes = rest;
            }
        }
        let (opcode, imm_data) = match sent.write {
            Some((.., immediate)) => (number::WC_RECV_RDMA_WITH_IMM, immediate),
            None => (number::WC_RECV, 0),
        };
        let status = if fits { number::WC_SUCCESS } else { LOCAL_LENGTH };
        let byte_len = sent.bytes.len() as u32;
        let wc = Wc { wr_id: *id, status, opcode, byte_len, imm_data, qp_num: to, ..Wc::default() };
        let queue = pair.receive_queue;
        self.pairs.get_mut(&to).and_then(|pair| pair.receives.pop_front());
        self.completed(queue, wc);
        if fits {
            return Ok(());
        }
        self.stop(to);
        Err(number::WC_REM_INV_REQ_ERR)
    }

    fn complete(&mut self, from: u32, status: u32) -> bool {
        let Some(pair) = self.pairs.get_mut(&from) else { return false };
        let Some(request) = pair.sends.pop_front() else { return false };
        let queue = pair.send_queue;
        if status == number::WC_SUCCESS && !request.signalled {
            return true;
        }
        // IBV_WC_SEND is 0, IBV_WC_RDMA_WRITE is 1.
        let opcode = u32::from(request.opcode == number::WR_RDMA_WRITE_WITH_IMM);
        self.completed(queue, Wc { wr_id: request.id, status, opcode, qp_num: from, ..Wc::default() });
        if status != number::WC_SUCCESS {
            self.stop(from);
        }
        true
    }

    fn stop(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = number::QPS_ERR;
        let (send_queue, receive_queue) = (pair.send_queue, pair.receive_queue);
        let sends = std::mem::take(&mut pair.sends).into_iter().map(|request| (send_queue, request.id));
        let receives = std::mem::take(&mut pair.receives).into_iter().map(|(id, _)| (receive_queue, id));
        for (queue, wr_id) in sends.chain(receives).collect::<Vec<_>>() {
            let status = number::WC_WR_FLUSH_ERR;
            self.completed(queue, Wc { wr_id, status, qp_num: number, ..Wc::default() });
        }
    }

    fn completed(&mut self, queue: usize, wc: Wc) {
        let Some(queue) = self.queues.get_mut(&queue) else { panic!("a completion queue was destroyed") };
        assert!(queue.entries.len() < queue.capacity, "a completion queue is full");
        queue.entries.push_back(wc);
        if std::mem::take(&mut queue.armed)
            && let Some(fd) = self.channels.get(&queue.channel)
        {
            signal(*fd);
        }
    }

    /// What was posted goes to its peer, if that is known.
    fn carry(&mut self, from: u32) {
        while let Some(pair) = self.pairs.get(&from)
            && let Some(request) = pair.sends.front()
        {
            let there =
                pair.peer.filter(|peer| self.pairs.get(peer).is_some_and(|peer| peer.peer == Some(from)));
            let status = match (there, self.outside) {
                (Some(peer), _) => {
                    let sent = self.gather(pair.domain, request);
                    self.arrive(peer, &sent).err().unwrap_or(number::WC_SUCCESS)
                }
                (None, Outside::Done(status)) => status,
                (None, Outside::Kept) => return,
            };
            self.complete(from, status);
        }
    }
}

fn eventfd() -> RawFd {
    // SAFETY: takes two numbers.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) }
}

fn signal(fd: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer has the size that is given. A full counter has signaled.
    let _ = unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
}

fn close(fd: RawFd) {
    // SAFETY: made by `eventfd`, closed once.
    unsafe { libc::close(fd) };
}

/// A new object of the C library's, unless this call is to fail.
fn make<T>(
    value: impl FnOnce(&mut Fabric) -> Option<T>,
    keep: impl FnOnce(&mut Fabric, usize, &T),
) -> *mut T {
    let mut fabric = fabric();
    if fabric.fails() {
        return ptr::null_mut();
    }
    let Some(value) = value(&mut fabric) else { return ptr::null_mut() };
    let value = Box::new(value);
    let at = &raw const *value as usize;
    keep(&mut fabric, at, &value);
    Box::into_raw(value)
}

/// Ends an object.
fn end<T>(object: *mut T) {
    // SAFETY: made by `make` for the library's caller, who destroys it once.
    drop(unsafe { Box::from_raw(object) });
}

/// A field of a live object, which the caller of the library names.
macro_rules! of {
    ($object:expr, $($field:tt)+) => {
        // SAFETY: the caller of the library passes a live object that `make` has made, or a valid structure.
        unsafe { (*$object).$($field)+ }
    };
}

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Device {
    // SAFETY: the caller passes a writable number.
    unsafe { *count = 1 };
    Box::into_raw(Box::new(NonNull::<Device>::dangling().as_ptr()))
}

extern "C" fn free_device_list(list: *mut *mut Device) {
    end(list);
}

extern "C" fn get_device_name(_device: *mut Device) -> *const c_char {
    c"software0".as_ptr()
}

extern "C" fn open_device(device: *mut Device) -> *mut Context {
    let context = |_: &mut Fabric| {
        // SAFETY: pointers, numbers, and functions that may be missing: all of it may be zero.
        let mut context: Context = unsafe { std::mem::zeroed() };
        (context.device, context.cmd_fd, context.async_fd, context.num_comp_vectors) =
            (device, -1, eventfd(), 1);
        context.ops.alloc_mw = Some(alloc_mw);
        context.ops.bind_mw = Some(bind_mw);
        context.ops.dealloc_mw = Some(dealloc_mw);
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        Some(context)
    };
    make(context, |fabric, at, _| {
        fabric.contexts.insert(at);
    })
}

extern "C" fn close_device(context: *mut Context) -> c_int {
    let mut fabric = fabric();
    assert!(fabric.contexts.remove(&(context as usize)), "an unknown context");
    if fabric.contexts.is_empty() {
        // Programs of a fuzzer find the same numbers in each run.
        fabric.last = 0;
    }
    close(of!(context, async_fd));
    end(context);
    0
}

extern "C" fn query_device(_context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    let mut of_device = DeviceAttr::zeroed();
    (of_device.max_qp_wr, of_device.max_cqe, of_device.phys_port_cnt) = (1 << 14, 1 << 16, 1);
    if !fabric().lacks_windows {
        of_device.device_cap_flags = number::DEVICE_MEM_WINDOW;
    }
    // SAFETY: the caller passes a writable structure.
    unsafe { *attr = of_device };
    0
}

extern "C" fn query_port(_context: *mut Context, _port: u8, attr: *mut PortAttr) -> c_int {
    let (state, active_mtu, gid_tbl_len, link_layer) = (number::PORT_ACTIVE, MTU, 1, 1);
    // SAFETY: the caller passes a writable structure.
    unsafe {
        *attr = PortAttr { state, active_mtu, gid_tbl_len, link_layer, lid: LID, ..PortAttr::default() }
    };
    0
}

extern "C" fn query_gid(_context: *mut Context, _port: u8, _index: c_int, gid: *mut Gid) -> c_int {
    // SAFETY: the caller passes a writable GID.
    unsafe { *gid = Gid([LID as u8; 16]) };
    0
}

extern "C" fn get_async_event(_context: *mut Context, _event: *mut AsyncEvent) -> c_int {
    -1
}

extern "C" fn ack_async_event(_event: *mut AsyncEvent) {}

extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    make(
        |_| Some(Pd { context }),
        |fabric, at, _| {
            fabric.domains.insert(at);
        },
    )
}

extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    let mut fabric = fabric();
    let domain = pd as usize;
    assert!(fabric.domains.remove(&domain), "an unknown domain");
    let used = fabric.regions.values().any(|region| region.domain == domain)
        || fabric.windows.values().any(|window| window.domain == domain)
        || fabric.pairs.values().any(|pair| pair.domain == domain);
    assert!(!used, "a domain is deallocated while it is used");
    end(pd);
    0
}

extern "C" fn reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    let region = |fabric: &mut Fabric| {
        let key = fabric.next();
        let context = of!(pd, context);
        Some(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key })
    };
    make(region, |fabric, _, region| {
        let (domain, at, len) = (pd as usize, addr as u64, length as u64);
        fabric.regions.insert(region.lkey, Memory { domain, at, len, access });
    })
}

extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    let (mut fabric, key) = (fabric(), of!(mr, lkey));
    assert!(fabric.regions.remove(&key).is_some(), "an unknown registration");
    let shows = |window: &Shown| window.shown.is_some_and(|(region, ..)| region == key);
    assert!(!fabric.windows.values().any(shows), "memory is deregistered that a window shows");
    end(mr);
    0
}

extern "C" fn alloc_mw(pd: *mut Pd, kind: c_uint) -> *mut Mw {
    let window = |fabric: &mut Fabric| {
        assert_eq!(kind, number::MW_TYPE_1);
        let context = of!(pd, context);
        Some(Mw { context, pd, rkey: fabric.next(), handle: 0, kind })
    };
    make(window, |fabric, _, window| {
        fabric.windows.insert(window.rkey, Shown { domain: pd as usize, shown: None });
    })
}

extern "C" fn dealloc_mw(mw: *mut Mw) -> c_int {
    assert!(fabric().windows.remove(&of!(mw, rkey)).is_some(), "an unknown window");
    end(mw);
    0
}

extern "C" fn bind_mw(qp: *mut Qp, mw: *mut Mw, bind: *mut MwBind) -> c_int {
    let mut fabric = fabric();
    if fabric.fails() {
        return libc::ENOMEM;
    }
    let (number, old) = (of!(qp, qp_num), of!(mw, rkey));
    let (at, len) = (of!(bind, addr), of!(bind, length));
    let Some(Pair { domain, state, send_queue, .. }) = fabric.pairs.get(&number) else {
        panic!("an unknown queue pair")
    };
    let (domain, stands, queue) = (*domain, *state == number::QPS_RTS, *send_queue);
    let Some(window) = fabric.windows.remove(&old) else { panic!("an unknown window") };
    assert!(window.domain == domain && stands, "a window and a queue pair that do not fit");
    let mr = of!(bind, mr);
    let region_key = of!(mr, lkey);
    let Some(region) = fabric.regions.get(&region_key) else { panic!("an unknown registration") };
    let rights = number::ACCESS_LOCAL_WRITE | number::ACCESS_MW_BIND;
    assert!(region.domain == domain && region.access & rights == rights, "no window can show that");
    assert!(at >= region.at && at + len <= region.at + region.len, "a window outside its memory");
    let shown = (len > 0).then_some((region_key, at, len));
    let key = fabric.next();
    fabric.windows.insert(key, Shown { domain, shown });
    // SAFETY: the caller passes a live window, which nobody else uses now.
    unsafe { (*mw).rkey = key };
    let wr_id = of!(bind, wr_id);
    assert!(of!(bind, send_flags) & number::SEND_SIGNALED != 0, "a request that nobody waits for");
    // IBV_WC_BIND_MW.
    fabric.completed(queue, Wc { wr_id, opcode: 5, qp_num: number, ..Wc::default() });
    0
}

extern "C" fn create_comp_channel(context: *mut Context) -> *mut CompChannel {
    make(
        |_| Some(CompChannel { context, fd: eventfd() }),
        |fabric, at, channel| {
            fabric.channels.insert(at, channel.fd);
        },
    )
}

extern "C" fn destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    let mut fabric = fabric();
    assert!(fabric.channels.remove(&(channel as usize)).is_some(), "an unknown channel");
    let used = fabric.queues.values().any(|queue| queue.channel == channel as usize);
    assert!(!used, "a channel is destroyed before its queue");
    close(of!(channel, fd));
    end(channel);
    0
}

extern "C" fn create_cq(
    context: *mut Context,
    cqe: c_int,
    _cq_context: *mut c_void,
    channel: *mut CompChannel,
    _comp_vector: c_int,
) -> *mut Cq {
    make(
        |_| Some(Cq { context }),
        |fabric, at, _| {
            let (channel, capacity) = (channel as usize, cqe.max(0) as usize);
            fabric.queues.insert(at, Queue { channel, capacity, entries: VecDeque::new(), armed: false });
        },
    )
}

extern "C" fn destroy_cq(cq: *mut Cq) -> c_int {
    let mut fabric = fabric();
    let queue = cq as usize;
    assert!(fabric.queues.remove(&queue).is_some(), "an unknown completion queue");
    let used = fabric.pairs.values().any(|pair| pair.send_queue == queue || pair.receive_queue == queue);
    assert!(!used, "a completion queue is destroyed before its queue pairs");
    end(cq);
    0
}

extern "C" fn get_cq_event(channel: *mut CompChannel, cq: *mut *mut Cq, context: *mut *mut c_void) -> c_int {
    let (fd, mut count) = (of!(channel, fd), [0u8; 8]);
    // SAFETY: the buffer has the size that is given.
    let read = unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
    if read < 0 {
        return -1;
    }
    // Callers have one queue for each channel, and know it.
    // SAFETY: the caller passes writable pointers.
    unsafe { (*cq, *context) = (ptr::null_mut(), ptr::null_mut()) };
    0
}

extern "C" fn ack_cq_events(_cq: *mut Cq, _count: c_uint) {}

extern "C" fn poll_cq(cq: *mut Cq, count: c_int, wc: *mut Wc) -> c_int {
    let mut fabric = fabric();
    let Some(queue) = fabric.queues.get_mut(&(cq as usize)) else { panic!("an unknown completion queue") };
    let count = queue.entries.len().min(count.max(0) as usize);
    for (n, entry) in queue.entries.drain(..count).enumerate() {
        // SAFETY: the caller has room for as many as it asks for.
        unsafe { *wc.add(n) = entry };
    }
    count as c_int
}

extern "C" fn req_notify_cq(cq: *mut Cq, _solicited_only: c_int) -> c_int {
    let mut fabric = fabric();
    if fabric.fails() {
        return libc::ENOMEM;
    }
    let Some(queue) = fabric.queues.get_mut(&(cq as usize)) else { panic!("an unknown completion queue") };
    queue.armed = true;
    0
}

extern "C" fn create_qp(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp {
    let (cap, send_cq, recv_cq) = (of!(attr, cap), of!(attr, send_cq), of!(attr, recv_cq));
    let pair = |fabric: &mut Fabric| {
        assert_eq!(of!(attr, qp_type), number::QPT_RC);
        let (context, qp_num) = (of!(pd, context), fabric.next());
        let (qp_context, srq) = (ptr::null_mut(), ptr::null_mut());
        Some(Qp { context, qp_context, pd, send_cq, recv_cq, srq, handle: 0, qp_num })
    };
    make(pair, |fabric, _, qp| {
        let pair = Pair {
            domain: pd as usize,
            send_queue: send_cq as usize,
            receive_queue: recv_cq as usize,
            most_sends: cap.max_send_wr as usize,
            most_receives: cap.max_recv_wr as usize,
            most_segments: (cap.max_send_sge as c_int, cap.max_recv_sge as c_int),
            state: 0,
            peer: None,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
        };
        fabric.pairs.insert(qp.qp_num, pair);
    })
}

extern "C" fn modify_qp(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int {
    let mut fabric = fabric();
    if fabric.fails() {
        return libc::ENOMEM;
    }
    assert!(mask & number::QP_STATE != 0, "a change of something else than the state");
    let (number, to) = (of!(qp, qp_num), of!(attr, qp_state));
    let Some(pair) = fabric.pairs.get_mut(&number) else { panic!("an unknown queue pair") };
    match (pair.state, to) {
        (_, number::QPS_ERR) => fabric.stop(number),
        (0, number::QPS_INIT) | (number::QPS_RTR, number::QPS_RTS) => pair.state = to,
        (number::QPS_INIT, number::QPS_RTR) => {
            let (mtu, peer) = (of!(attr, path_mtu), of!(attr, dest_qp_num));
            if !(1..=MTU).contains(&mtu) || !(1..=0xff_ffff).contains(&peer) {
                return libc::EINVAL;
            }
            (pair.state, pair.peer) = (to, Some(peer));
        }
        _ => return libc::EINVAL,
    }
    0
}

extern "C" fn destroy_qp(qp: *mut Qp) -> c_int {
    assert!(fabric().pairs.remove(&of!(qp, qp_num)).is_some(), "an unknown queue pair");
    end(qp);
    0
}

fn segments(list: *const Sge, count: c_int, most: c_int) -> Vec<Sge> {
    assert!((0..=most).contains(&count), "{count} segments where {most} are possible");
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's request has so many segments.
    unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec()
}

/// What is posted to a queue of a pair: the pair's number, its protection domain, and the request's segments.
macro_rules! posted {
    ($fabric:ident, $qp:ident, $wr:ident, $($most:tt)+) => {{
        if $fabric.fails() {
            return libc::ENOMEM;
        }
        assert!(of!($wr, next).is_null(), "a chain of requests");
        let number = of!($qp, qp_num);
        let Some(pair) = $fabric.pairs.get(&number) else { panic!("an unknown queue pair") };
        (number, pair.domain, segments(of!($wr, sg_list), of!($wr, num_sge), pair.$($most)+))
    }};
}

extern "C" fn post_send(qp: *mut Qp, wr: *mut SendWr, _bad: *mut *mut SendWr) -> c_int {
    let mut fabric = fabric();
    let (from, domain, parts) = posted!(fabric, qp, wr, most_segments.0);
    let opcode = of!(wr, opcode);
    let write = (opcode == number::WR_RDMA_WRITE_WITH_IMM)
        .then(|| (of!(wr, remote_addr), of!(wr, rkey), of!(wr, imm_data)));
    assert!(write.is_some() || opcode == number::WR_SEND, "a request of kind {opcode}");
    let signalled = of!(wr, send_flags) & number::SEND_SIGNALED != 0;
    let payload = if of!(wr, send_flags) & number::SEND_INLINE != 0 {
        let mut bytes = Vec::new();
        for part in parts {
            // SAFETY: the caller's memory, which is read before this call returns.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(part.addr as *const u8, part.length as usize)
            });
        }
        Payload::Inline(bytes)
    } else {
        // Checks all of them.
        fabric.memory(domain, &parts, 0).for_each(drop);
        Payload::Segments(parts)
    };
    let Some(pair) = fabric.pairs.get_mut(&from) else { return libc::EINVAL };
    if pair.sends.len() >= pair.most_sends {
        return libc::ENOMEM;
    }
    pair.sends.push_back(Request { id: of!(wr, wr_id), opcode, signalled, payload, write });
    match pair.state {
        number::QPS_RTS => fabric.carry(from),
        number::QPS_ERR => fabric.stop(from),
        _ => return libc::EINVAL,
    }
    0
}

extern "C" fn post_recv(qp: *mut Qp, wr: *mut RecvWr, _bad: *mut *mut RecvWr) -> c_int {
    let mut fabric = fabric();
    let (number, domain, parts) = posted!(fabric, qp, wr, most_segments.1);
    fabric.memory(domain, &parts, number::ACCESS_LOCAL_WRITE).for_each(drop);
    let Some(pair) = fabric.pairs.get_mut(&number) else { return libc::EINVAL };
    if pair.receives.len() >= pair.most_receives {
        return libc::ENOMEM;
    }
    pair.receives.push_back((of!(wr, wr_id), parts));
    if pair.state == number::QPS_ERR {
        fabric.stop(number);
    }
    0
}

extern "C" fn wc_status_str(_status: c_uint) -> *const c_char {
    c"as a test says".as_ptr()
}

static LIBRARY: Library = Library {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid,
    get_async_event,
    ack_async_event,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp,
    modify_qp,
    destroy_qp,
    wc_status_str,
};
