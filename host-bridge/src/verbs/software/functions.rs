//! The functions of libibverbs. They check their callers like a strict device.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use super::fabric::{Events, FIRST_LID, Fabric, Memory, Pair, Payload, Queue, Request, Shown, fabric};
use crate::verbs::sys::{
    AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Gid, Library, Mr, Mw, MwBind, Pd, PortAttr, Qp,
    QpAttr, QpInitAttr, RecvWr, SendWr, Sge, Wc, number,
};

/// The port's MTU as `enum ibv_mtu`.
const MTU: u32 = 5;
/// The port's partitions.
const PARTITIONS: [u16; 2] = [0xffff, 0x8001];

fn eventfd() -> RawFd {
    // SAFETY: takes two numbers.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) }
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
            (device, -1, eventfd(), 3);
        context.ops.alloc_mw = Some(alloc_mw);
        context.ops.bind_mw = Some(bind_mw);
        context.ops.dealloc_mw = Some(dealloc_mw);
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        Some(context)
    };
    make(context, |fabric, at, context| {
        fabric.contexts.insert(at, Events { fd: context.async_fd, kinds: VecDeque::new() });
    })
}

extern "C" fn close_device(context: *mut Context) -> c_int {
    let mut fabric = fabric();
    assert!(fabric.contexts.remove(&(context as usize)).is_some(), "an unknown context");
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
    let mut fabric = fabric();
    fabric.looked += u64::from(fabric.unaddressed);
    // IBV_PORT_DOWN is 1.
    let state = if fabric.is_down { 1 } else { number::PORT_ACTIVE };
    let (lid, active_mtu, gid_tbl_len, link_layer) = (fabric.lid(), MTU, 1, 1);
    let pkey_tbl_len = PARTITIONS.len() as u16;
    let port =
        PortAttr { state, active_mtu, gid_tbl_len, pkey_tbl_len, link_layer, lid, ..PortAttr::default() };
    // SAFETY: the caller passes a writable structure.
    unsafe { *attr = port };
    0
}

extern "C" fn query_gid(_context: *mut Context, _port: u8, _index: c_int, gid: *mut Gid) -> c_int {
    if fabric().unaddressed {
        return -1;
    }
    // SAFETY: the caller passes a writable GID.
    unsafe { *gid = Gid([FIRST_LID as u8; 16]) };
    0
}

extern "C" fn query_pkey(_context: *mut Context, _port: u8, index: c_int, pkey: *mut u16) -> c_int {
    let Some(key) = usize::try_from(index).ok().and_then(|index| PARTITIONS.get(index)) else { return -1 };
    // SAFETY: the caller passes a writable number.
    unsafe { *pkey = key.to_be() };
    0
}

extern "C" fn get_async_event(context: *mut Context, event: *mut AsyncEvent) -> c_int {
    let mut fabric = fabric();
    let Some(events) = fabric.contexts.get_mut(&(context as usize)) else { panic!("an unknown context") };
    let Some(event_type) = events.kinds.pop_front() else { return -1 };
    let mut count = [0u8; 8];
    // SAFETY: the buffer has the size that is given.
    let read = unsafe { libc::read(events.fd, count.as_mut_ptr().cast(), count.len()) };
    assert!(read > 0, "an event without a signal");
    // SAFETY: the caller passes a writable structure.
    unsafe { *event = AsyncEvent { element: 1, event_type } };
    0
}

extern "C" fn ack_async_event(_event: *mut AsyncEvent) {}

extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    make(
        |_| Some(Pd { context }),
        |fabric, at, _| {
            fabric.domains.insert(at, context as usize);
        },
    )
}

extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    let mut fabric = fabric();
    let domain = pd as usize;
    assert!(fabric.domains.remove(&domain).is_some(), "an unknown domain");
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
    let wr_id = of!(bind, wr_id);
    if !stands {
        let status = number::WC_WR_FLUSH_ERR;
        fabric.completed(queue, Wc { wr_id, status, qp_num: number, ..Wc::default() });
        return 0;
    }
    let Some(window) = fabric.windows.remove(&old) else { panic!("an unknown window") };
    assert!(window.domain == domain, "a window and a queue pair that do not fit");
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
    comp_vector: c_int,
) -> *mut Cq {
    assert!((0..of!(context, num_comp_vectors)).contains(&comp_vector), "no such completion vector");
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
            lid: 0,
            partition: 0,
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
    let (number, to, unaddressed) = (of!(qp, qp_num), of!(attr, qp_state), fabric.unaddressed);
    let Some(pair) = fabric.pairs.get_mut(&number) else { panic!("an unknown queue pair") };
    match (pair.state, to) {
        (_, number::QPS_ERR) => fabric.stop(number),
        (0, number::QPS_INIT) => {
            assert!(mask & number::QP_PKEY_INDEX != 0, "a queue pair in no partition");
            (pair.state, pair.partition) = (to, of!(attr, pkey_index));
            if usize::from(pair.partition) >= PARTITIONS.len() {
                return libc::EINVAL;
            }
        }
        (number::QPS_RTR, number::QPS_RTS) => pair.state = to,
        (number::QPS_INIT, number::QPS_RTR) => {
            let (mtu, peer, way) = (of!(attr, path_mtu), of!(attr, dest_qp_num), of!(attr, ah_attr));
            if !(1..=MTU).contains(&mtu) || !(1..=0xff_ffff).contains(&peer) {
                return libc::EINVAL;
            }
            if unaddressed && way.dlid == 0 {
                return libc::EINVAL;
            }
            (pair.state, pair.peer, pair.lid) = (to, Some(peer), way.dlid);
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
        let qp_num = of!($qp, qp_num);
        let Some(pair) = $fabric.pairs.get(&qp_num) else { panic!("an unknown queue pair") };
        if $fabric.refuses && pair.state == number::QPS_ERR {
            return libc::EINVAL;
        }
        (qp_num, pair.domain, segments(of!($wr, sg_list), of!($wr, num_sge), pair.$($most)+))
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

pub(super) static LIBRARY: Library = Library {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid,
    query_pkey,
    get_async_event,
    ack_async_event,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    reg_dmabuf_mr: None,
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
