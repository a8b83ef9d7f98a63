//! What there is: queue pairs, registrations, windows and completion queues, and what goes between queue
//! pairs.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

use crate::verbs::sys::{Sge, Wc, number};

/// The port's first local identifier.
pub(super) const FIRST_LID: u16 = 7;
/// The peer's message was longer than its receive.
const LOCAL_LENGTH: u32 = 1;

static FABRIC: LazyLock<Mutex<Fabric>> = LazyLock::new(Mutex::default);

pub(super) fn fabric() -> MutexGuard<'static, Fabric> {
    FABRIC.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What becomes of requests to a peer that is not in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Outside {
    /// They wait for [`complete`](super::complete).
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

#[derive(Default)]
pub(super) struct Fabric {
    pub(super) contexts: HashMap<usize, Events>,
    /// With their contexts.
    pub(super) domains: HashMap<usize, usize>,
    /// By key.
    pub(super) regions: HashMap<u32, Memory>,
    pub(super) windows: HashMap<u32, Shown>,
    pub(super) lacks_windows: bool,
    pub(super) channels: HashMap<usize, RawFd>,
    pub(super) queues: HashMap<usize, Queue>,
    pub(super) pairs: HashMap<u32, Pair>,
    /// The last key or queue pair's number that was given out.
    pub(super) last: u32,
    pub(super) outside: Outside,
    pub(super) failing: Option<u32>,
    pub(super) silent: bool,
    pub(super) refuses: bool,
    /// The port is down.
    pub(super) is_down: bool,
    /// The port has no address.
    pub(super) unaddressed: bool,
    pub(super) looked: u64,
    /// How often the port was given another local identifier.
    pub(super) moved: u16,
}

/// What a context has to tell, in order, and the descriptor that says so.
pub(super) struct Events {
    pub(super) fd: RawFd,
    pub(super) kinds: VecDeque<u32>,
}

pub(super) struct Memory {
    pub(super) domain: usize,
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) access: c_int,
}

/// A window.
pub(super) struct Shown {
    pub(super) domain: usize,
    /// The registration's key, and what of it: address and length. `None`: it is closed.
    pub(super) shown: Option<(u32, u64, u64)>,
}

/// A completion queue.
pub(super) struct Queue {
    pub(super) channel: usize,
    pub(super) capacity: usize,
    pub(super) entries: VecDeque<Wc>,
    pub(super) armed: bool,
}

pub(super) struct Pair {
    pub(super) domain: usize,
    pub(super) send_queue: usize,
    pub(super) receive_queue: usize,
    pub(super) most_sends: usize,
    pub(super) most_receives: usize,
    pub(super) most_segments: (c_int, c_int),
    pub(super) state: u32,
    pub(super) peer: Option<u32>,
    /// The local identifier to which it sends.
    pub(super) lid: u16,
    /// Its index.
    pub(super) partition: u16,
    pub(super) sends: VecDeque<Request>,
    pub(super) receives: VecDeque<(u64, Vec<Sge>)>,
}

pub(super) struct Request {
    pub(super) id: u64,
    pub(super) opcode: u32,
    /// Its success is reported. (Its failure always is.)
    pub(super) signalled: bool,
    pub(super) payload: Payload,
    pub(super) write: Option<(u64, u32, u32)>,
}

pub(super) enum Payload {
    Segments(Vec<Sge>),
    Inline(Vec<u8>),
}

impl Fabric {
    pub(super) fn lid(&self) -> u16 {
        if self.unaddressed { 0 } else { FIRST_LID.wrapping_add(self.moved) }
    }

    pub(super) fn next(&mut self) -> u32 {
        self.last = self.last % 0xff_ffff + 1;
        self.last
    }

    /// Whether this call is to fail; then the reason is in `errno`.
    pub(super) fn fails(&mut self) -> bool {
        let fails = self.failing == Some(0);
        self.failing = self.failing.and_then(|left| left.checked_sub(1));
        if fails {
            Errno::ENOMEM.set();
        }
        fails
    }

    /// The memory of a work request.
    pub(super) fn memory<'s>(
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

    pub(super) fn gather(&self, domain: usize, request: &Request) -> Sent {
        let bytes = match &request.payload {
            Payload::Inline(bytes) => bytes.clone(),
            Payload::Segments(segments) => {
                let mut bytes = Vec::new();
                for (at, len) in self.memory(domain, segments, 0) {
                    // SAFETY: registered memory, which its owner keeps mapped and does not change as long as
                    // the request is posted.
                    bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) });
                }
                bytes
            }
        };
        Sent { bytes, write: request.write }
    }

    /// Whether a peer of a queue pair in this domain may write there.
    pub(super) fn writable(&self, domain: usize, (address, key): (u64, u32), len: u64) -> bool {
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
    pub(super) fn arrive(&mut self, to: u32, sent: &Sent) -> Result<(), u32> {
        let able = |pair: &&Pair| matches!(pair.state, number::QPS_RTR | number::QPS_RTS);
        let pair = self.pairs.get(&to).filter(able).ok_or(number::WC_RETRY_EXC_ERR)?;
        let mut bytes = &sent.bytes[..];
        if let Some((address, key, _)) = sent.write
            && !bytes.is_empty()
        {
            if !self.writable(pair.domain, (address, key), bytes.len() as u64) {
                self.stop(to);
                return Err(number::WC_REM_ACCESS_ERR);
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
                // SAFETY: registered memory of a posted receive, which nobody else touches until it has
                // completed.
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

    pub(super) fn complete(&mut self, from: u32, status: u32) -> bool {
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

    pub(super) fn stop(&mut self, number: u32) {
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

    /// Something happened to the device, of which the owner of a queue pair is told.
    pub(super) fn happened(&mut self, number: u32, kind: u32) {
        let context = self.pairs.get(&number).and_then(|pair| self.domains.get(&pair.domain));
        if let Some(events) = context.and_then(|context| self.contexts.get_mut(context)) {
            events.kinds.push_back(kind);
            signal(events.fd);
        }
    }

    pub(super) fn completed(&mut self, queue: usize, wc: Wc) {
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
    pub(super) fn carry(&mut self, from: u32) {
        while let Some(pair) = self.pairs.get(&from)
            && let Some(request) = pair.sends.front()
        {
            let there =
                pair.peer.filter(|peer| self.pairs.get(peer).is_some_and(|peer| peer.peer == Some(from)));
            let partition = there.and_then(|peer| Some(self.pairs.get(&peer)?.partition));
            let is_elsewhere =
                there.is_some() && (pair.lid != self.lid() || partition != Some(pair.partition));
            if (self.silent || self.is_down || is_elsewhere) && pair.peer != Some(from) {
                return;
            }
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

fn signal(fd: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer has the size that is given. A full counter has signaled.
    let _ = unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
}
