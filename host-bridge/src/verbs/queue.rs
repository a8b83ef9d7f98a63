//! Completion queues and queue pairs: making, connecting, posting, polling.
//!
//! Posting and polling allocate nothing and make no system call of their own (the provider may).

use std::ffi::c_int;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::device::{Device, Port, RESENDS, mtu_number, nonblocking};
use super::error::VerbsError;
use super::registration::Domain;
use super::sys::{
    self, AhAttr, Gid, GlobalRoute, Library, MwBind, QpAttr, QpCap, QpInitAttr, RecvWr, SendWr, Sge, Wc,
    check, number,
};

/// Maximum number of completions that one poll takes.
pub(super) const POLL_BATCH: usize = 32;

/// A completion queue, with the file descriptor that signals completions.
#[derive(Debug)]
pub(super) struct Completions {
    cq: NonNull<sys::Cq>,
    channel: NonNull<sys::CompChannel>,
    library: &'static Library,
    poll: unsafe extern "C" fn(*mut sys::Cq, i32, *mut Wc) -> i32,
    notify: unsafe extern "C" fn(*mut sys::Cq, i32) -> i32,
    _device: Arc<Device>,
}

// SAFETY: libibverbs allows every call on a completion queue from any thread.
unsafe impl Send for Completions {}
// SAFETY: it allows them at the same time, too.
unsafe impl Sync for Completions {}

pub(super) fn lacks(what: &str) -> VerbsError {
    VerbsError::call(what, io::Error::new(io::ErrorKind::Unsupported, "the provider does not have it"))
}

/// Completion queues of this process so far.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Which of the device's completion vectors, of which there is at least one, the `made`-th queue of a process
/// uses. Each vector has an interrupt, and each interrupt a processor, so the sessions of a server, which
/// have a process each, do not all use the first one.
fn vector(process: u32, made: u32, vectors: c_int) -> c_int {
    (process.wrapping_add(made) % vectors.max(1) as u32) as c_int
}

impl Completions {
    pub(super) fn new(device: &Arc<Device>, entries: u32) -> Result<Arc<Completions>, VerbsError> {
        let library = Library::get()?;
        let context = device.context();
        // SAFETY: an open context.
        let ops = unsafe { &context.as_ref().ops };
        let (poll, notify) = (
            ops.poll_cq.ok_or_else(|| lacks("poll_cq"))?,
            ops.req_notify_cq.ok_or_else(|| lacks("req_notify_cq"))?,
        );
        // SAFETY: an open context.
        let channel = unsafe { (library.create_comp_channel)(context.as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| VerbsError::call("ibv_create_comp_channel", io::Error::last_os_error()))?;
        let drop_channel = || {
            // SAFETY: made above; nothing uses it yet.
            let _ = unsafe { (library.destroy_comp_channel)(channel.as_ptr()) };
        };
        // SAFETY: the channel's descriptor lives as long as it.
        let fd = unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) };
        if let Err(e) = nonblocking(fd) {
            drop_channel();
            return Err(VerbsError::call("preparing the completion channel", e));
        }
        // SAFETY: an open context.
        let vectors = unsafe { context.as_ref().num_comp_vectors };
        let vector = vector(std::process::id(), MADE.fetch_add(1, Ordering::Relaxed), vectors);
        // SAFETY: an open context, its channel, and a vector that it has.
        let cq = unsafe {
            (library.create_cq)(context.as_ptr(), entries as i32, ptr::null_mut(), channel.as_ptr(), vector)
        };
        let Some(cq) = NonNull::new(cq) else {
            let error = io::Error::last_os_error();
            drop_channel();
            return Err(VerbsError::call(&format!("ibv_create_cq of {entries} entries"), error));
        };
        Ok(Arc::new(Completions { cq, channel, library, poll, notify, _device: Arc::clone(device) }))
    }

    /// Takes completions.
    pub(super) fn poll<'w>(&self, into: &'w mut [Wc; POLL_BATCH]) -> Result<&'w [Wc], VerbsError> {
        // SAFETY: a queue that lives; `into` has room for as many as are asked for.
        let count = unsafe { (self.poll)(self.cq.as_ptr(), POLL_BATCH as i32, into.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) => Ok(&into[..count.min(POLL_BATCH)]),
            Err(_) => Err(VerbsError::call("ibv_poll_cq", io::Error::last_os_error())),
        }
    }

    /// Makes the next completion signal the descriptor. Earlier completions do not, so poll once more after
    /// this and before sleeping.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: a queue that lives.
        check("ibv_req_notify_cq", unsafe { (self.notify)(self.cq.as_ptr(), 0) })
    }

    /// Clears the descriptor.
    pub(super) fn disarm(&self) {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a channel that lives and does not block; the places are writable.
        while unsafe { (self.library.get_cq_event)(self.channel.as_ptr(), &mut cq, &mut context) } == 0 {
            // SAFETY: the event is of the one queue that this channel has.
            unsafe { (self.library.ack_cq_events)(self.cq.as_ptr(), 1) };
        }
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor lives as long as it.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold an `Arc` of this, so none is left; all events were acknowledged.
        unsafe {
            if (self.library.destroy_cq)(self.cq.as_ptr()) != 0 {
                tracing::warn!("ibv_destroy_cq: {}", io::Error::last_os_error());
            }
            (self.library.destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// What a peer must know to reach a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    pub(super) mtu: u32,
}

/// The capacity of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    pub(super) sends: u32,
    pub(super) receives: u32,
    pub(super) receive_segments: u32,
    pub(super) inline: u32,
}

/// What a memory window shows: `len` bytes at `address` of a registration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shown {
    pub(super) mr: NonNull<sys::Mr>,
    pub(super) address: u64,
    /// 0: it shows nothing. (The registration is named all the same: software RoCE's library looks at it.)
    pub(super) len: u64,
}

/// A reliable connection. After it is dropped, neither the device nor the peer touches any memory through it.
#[derive(Debug)]
pub(super) struct QueuePair {
    qp: NonNull<sys::Qp>,
    library: &'static Library,
    post_send: unsafe extern "C" fn(*mut sys::Qp, *mut SendWr, *mut *mut SendWr) -> i32,
    post_recv: unsafe extern "C" fn(*mut sys::Qp, *mut RecvWr, *mut *mut RecvWr) -> i32,
    /// Maximum number of bytes that a send can carry inside its work request.
    pub(super) inline: u32,
    _completions: Arc<Completions>,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs allows every call on a queue pair from any thread.
unsafe impl Send for QueuePair {}
// SAFETY: it allows them at the same time, too.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Makes a queue pair that accepts receives but is not connected. The peer may write memory that is
    /// registered for it.
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        port: &Port,
        depth: Depth,
    ) -> Result<QueuePair, VerbsError> {
        let library = Library::get()?;
        let ops = {
            // SAFETY: an open context.
            unsafe { &domain.device().context().as_ref().ops }
        };
        let (post_send, post_recv) = (
            ops.post_send.ok_or_else(|| lacks("post_send"))?,
            ops.post_recv.ok_or_else(|| lacks("post_recv"))?,
        );
        // Providers differ in how much can be inline, and only say so by refusing.
        let mut made = None;
        for inline in [depth.inline, depth.inline / 2, 0] {
            let mut attr = QpInitAttr {
                qp_context: ptr::null_mut(),
                send_cq: completions.cq.as_ptr(),
                recv_cq: completions.cq.as_ptr(),
                srq: ptr::null_mut(),
                cap: QpCap {
                    max_send_wr: depth.sends,
                    max_recv_wr: depth.receives,
                    max_send_sge: 2,
                    max_recv_sge: depth.receive_segments.max(1),
                    max_inline_data: inline,
                },
                qp_type: number::QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: a domain and queues that live; `attr` is writable.
            if let Some(qp) = NonNull::new(unsafe { (library.create_qp)(domain.pd().as_ptr(), &mut attr) }) {
                made = Some((qp, attr.cap.max_inline_data.min(inline)));
                break;
            }
        }
        let (qp, inline) = made.ok_or_else(|| {
            VerbsError::call(
                &format!("ibv_create_qp with {} sends and {} receives", depth.sends, depth.receives),
                io::Error::last_os_error(),
            )
        })?;
        let (completions, domain) = (Arc::clone(completions), Arc::clone(domain));
        let pair = QueuePair { qp, library, post_send, post_recv, inline, _completions: completions, domain };
        let mut attr = QpAttr {
            qp_state: number::QPS_INIT,
            port_num: port.number,
            pkey_index: port.pkey_index,
            qp_access_flags: number::ACCESS_REMOTE_WRITE as u32,
            ..QpAttr::default()
        };
        let mask = number::QP_STATE | number::QP_PKEY_INDEX | number::QP_PORT | number::QP_ACCESS_FLAGS;
        pair.modify("ibv_modify_qp to INIT", &mut attr, mask)?;
        Ok(pair)
    }

    fn modify(&self, what: &str, attr: &mut QpAttr, mask: i32) -> Result<(), VerbsError> {
        // SAFETY: a queue pair that lives; `attr` holds what the mask names.
        check(what, unsafe { (self.library.modify_qp)(self.qp.as_ptr(), attr, mask) })
    }

    /// Its number, by which the peer reaches it.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a queue pair that lives.
        unsafe { self.qp.as_ref().qp_num }
    }

    /// Connects it, from this port. `psn` is this side's first packet number, `loss` the time after which a
    /// silent peer is considered lost.
    pub(super) fn connect(
        &self,
        port: &Port,
        target: &Target,
        psn: u32,
        loss: Duration,
    ) -> Result<(), VerbsError> {
        let grh = GlobalRoute {
            dgid: Gid(target.gid),
            flow_label: 0,
            sgid_index: port.gid_index,
            hop_limit: 64,
            traffic_class: port.traffic_class,
        };
        let mut attr = QpAttr {
            qp_state: number::QPS_RTR,
            path_mtu: mtu_number(target.mtu)
                .ok_or_else(|| VerbsError::Peer(format!("an MTU of {} bytes", target.mtu)))?,
            dest_qp_num: target.qpn,
            rq_psn: target.psn & 0xff_ffff,
            min_rnr_timer: 12,
            ah_attr: AhAttr {
                grh: if port.global { grh } else { GlobalRoute::default() },
                dlid: target.lid,
                is_global: port.global.into(),
                port_num: port.number,
                ..AhAttr::default()
            },
            ..QpAttr::default()
        };
        let mask = number::QP_STATE
            | number::QP_AV
            | number::QP_PATH_MTU
            | number::QP_DEST_QPN
            | number::QP_RQ_PSN
            | number::QP_MAX_DEST_RD_ATOMIC
            | number::QP_MIN_RNR_TIMER;
        self.modify(
            "ibv_modify_qp to RTR (can the peer's address be reached from this port?)",
            &mut attr,
            mask,
        )?;
        let mut attr = QpAttr {
            qp_state: number::QPS_RTS,
            sq_psn: psn & 0xff_ffff,
            timeout: retry_timeout(loss, self.domain.device().limits().resends),
            retry_cnt: RESENDS,
            // Credits ensure that the peer is ready. If it is not, that is a bug, which retries would hide.
            rnr_retry: 0,
            ..QpAttr::default()
        };
        let mask = number::QP_STATE
            | number::QP_SQ_PSN
            | number::QP_TIMEOUT
            | number::QP_RETRY_CNT
            | number::QP_RNR_RETRY
            | number::QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut attr, mask)
    }

    /// Stops it. All posted requests complete as flushed.
    pub(super) fn stop(&self) {
        let mut attr = QpAttr { qp_state: number::QPS_ERR, ..QpAttr::default() };
        if let Err(e) = self.modify("ibv_modify_qp to ERR", &mut attr, number::QP_STATE) {
            tracing::warn!("{e}");
        }
    }

    /// Posts a receive into `segments`, one behind the other (none: for writes with immediate data, which
    /// bring their own address).
    ///
    /// # Safety
    /// The segments' memory is registered for the device's writes, stays registered until the receive
    /// completes, and no Rust reference covers it until then.
    pub(super) unsafe fn receive(&self, wr_id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        let (sg_list, num_sge) = (segments.as_ptr(), segments.len() as i32);
        let mut wr = RecvWr { wr_id, next: ptr::null_mut(), sg_list, num_sge };
        let mut bad = ptr::null_mut();
        // SAFETY: a queue pair that lives, a well-formed request that the call reads to its end, memory as
        // the caller promises.
        check("ibv_post_recv", unsafe { (self.post_recv)(self.qp.as_ptr(), &mut wr, &mut bad) })
    }

    /// Has a window show something of a registration to the peer, for writing, from when the request
    /// completes on, or nothing of it any more. In any case its key is a new one.
    ///
    /// # Safety
    /// The window and the registration live, the window until the request completes and the registration
    /// until the window shows something else, or nothing.
    pub(super) unsafe fn bind(&self, window: NonNull<sys::Mw>, shown: Shown) -> Result<(), VerbsError> {
        let ops = {
            // SAFETY: an open context.
            unsafe { &self.domain.device().context().as_ref().ops }
        };
        let bind_mw = ops.bind_mw.ok_or_else(|| lacks("bind_mw"))?;
        let Shown { mr, address: addr, len: length } = shown;
        let access = if length > 0 { number::ACCESS_REMOTE_WRITE as u32 } else { 0 };
        let (mr, send_flags) = (mr.as_ptr(), number::SEND_SIGNALED);
        let mut bind = MwBind { wr_id: 0, send_flags, mr, addr, length, access };
        // SAFETY: a queue pair that lives, a well-formed request, objects as the caller promises.
        check("ibv_bind_mw", unsafe { bind_mw(self.qp.as_ptr(), window.as_ptr(), &mut bind) })
    }

    /// Posts one send request. `wr` names its segments itself.
    ///
    /// # Safety
    /// The segments' memory is mapped and registered until the request completes (until the call returns, for
    /// an inline one).
    pub(super) unsafe fn send(&self, wr: &mut SendWr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: a queue pair that lives, a well-formed request, memory as the caller promises.
        check("ibv_post_send", unsafe { (self.post_send)(self.qp.as_ptr(), wr, &mut bad) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by `new`, dropped once; its events were acknowledged when they were taken.
        if unsafe { (self.library.destroy_qp)(self.qp.as_ptr()) } != 0 {
            tracing::warn!("ibv_destroy_qp: {}", io::Error::last_os_error());
        }
    }
}

/// A first packet number that an outsider cannot know.
pub(super) fn first_packet_number() -> Result<u32, VerbsError> {
    let failed = |e: io::Error| VerbsError::call("/dev/urandom", e);
    let mut random = [0; 4];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random)).map_err(failed)?;
    Ok(u32::from_le_bytes(random) & 0xff_ffff)
}

/// The local ACK timeout, as the exponent that InfiniBand wants (4.096 µs × 2^n), such that a packet and its
/// `resends` together take about a quarter of `loss`: devices may stretch the timeout up to four times
/// (InfiniBand specification, C9-141).
///
/// `rdma_rxe` resends without end and never stretches. For it one timeout takes a quarter of `loss`, because
/// each that ends without need may make it number packets wrongly (docs/rdma.md).
fn retry_timeout(loss: Duration, resends: Option<u8>) -> u8 {
    let each = loss.as_nanos() / 4 / u128::from(1 + resends.unwrap_or(0));
    (8..=24).rev().find(|n| 4096u128 << n <= each).unwrap_or(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queues_of_a_process_and_of_others_are_spread_over_the_vectors_that_there_are() {
        let used: std::collections::BTreeSet<_> = (0..4).map(|made| vector(u32::MAX - 1, made, 4)).collect();
        assert!(used.into_iter().eq(0..4));
        assert_ne!(vector(100, 0, 8), vector(101, 0, 8));
        assert_eq!((vector(7, 7, 1), vector(7, 7, 0)), (0, 0));
    }

    #[test]
    fn retries_outlast_a_second_and_end_within_the_time_given() {
        let timeout = |loss, resends| 4096 * (1u64 << retry_timeout(Duration::from_secs(loss), resends));
        let all = timeout(10, Some(RESENDS)) * u64::from(RESENDS + 1);
        // Even four times as long, it is below the limit; on its own, it is longer than a short link failure.
        assert!(all * 4 <= 10_000_000_000 && all > 1_000_000_000, "{all}");
        // Software RoCE: several timeouts fit in, and none ends because a processor was busy for a moment.
        let one = timeout(10, None);
        assert!(one * 4 <= 10_000_000_000 && one > 2_000_000_000, "{one}");
        let shortest = retry_timeout(Duration::ZERO, None);
        assert_eq!((shortest, retry_timeout(Duration::from_secs(100_000), None)), (8, 24));
    }
}
