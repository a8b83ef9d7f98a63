//! Requests of the guest: taken from the request queue, copied out of guest memory, each executed in a thread
//! of its own, and answered.
//!
//! [`control`] defines valid requests, and [`channels`](super::channels) executes them.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::device::{Answer, CONTROL_QUEUE, Response};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};
use zerocopy::IntoBytes;

use super::Device;
use crate::refusal::{Refusal, invalid, no_resources};
use crate::vm::control::{self, FIXED, Order};
use crate::vm::gate::Inside;
use crate::vm::queue::{QUEUE_SIZE, Vring};
use crate::vm::recovery;

/// Maximum number of requests in progress. Each has a thread, except those that may not be refused and find
/// none: they wait for one, at most as many as a queue has descriptors.
pub(super) const MAX_JOBS: usize = 256;
/// Maximum bytes of extents in requests in progress.
const MAX_JOB_BYTES: usize = 64 << 20;

/// A writable piece of a request's chain: address and length.
type Piece = (GuestAddress, usize);

/// Those of the writable pieces that an answer fills. A chain may have tens of thousands, and a request keeps
/// them until it is answered.
fn for_answer(writable: impl Iterator<Item = Piece>) -> Vec<Piece> {
    let (mut pieces, mut left) = (Vec::new(), size_of::<Response>());
    for piece in writable.filter(|(_, len)| *len > 0) {
        pieces.push(piece);
        left = left.saturating_sub(piece.1);
        if left == 0 {
            break;
        }
    }
    pieces
}

/// A request taken from the queue.
pub(super) struct Fetched {
    head: u16,
    /// Whether a predecessor had taken it, and may have executed it.
    again: bool,
    answer: Vec<Piece>,
    pub(super) order: Result<Order, Refusal>,
    bytes: usize,
}

/// A valid request that was not executed yet.
pub(super) struct Work {
    epoch: u64,
    head: u16,
    again: bool,
    answer: Vec<Piece>,
    order: Order,
    bytes: usize,
}

impl Work {
    /// Whether it must be executed, if necessary later. If it releases memory of the guest, a refusal would
    /// help nobody: the driver could only ask again. If a predecessor had taken it, the guest's memory may be
    /// in use for it already, and after a refusal the driver would take that for free.
    fn must_be_executed(&self) -> bool {
        self.again || matches!(self.order, Order::Destroy { .. } | Order::Unregister { .. })
    }
}

impl Device {
    /// Takes all requests from the queue.
    pub(super) fn take_requests(&self, vring: &Vring) {
        {
            let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
            if control.is_none() {
                *control = Some(vring.clone());
            }
        }
        let epoch = self.gate.epoch();
        if self.gate.is_paused() {
            return;
        }
        if self.resumes[usize::from(CONTROL_QUEUE)].swap(false, Ordering::SeqCst) {
            self.resume(vring, epoch);
        }
        // A queue that claims to have requests but yields none is broken or has just been stopped.
        let mut fruitless = 0;
        loop {
            fruitless += 1;
            // These write to guest memory as well.
            let Some(inside) = self.gate.try_enter(epoch) else { return };
            let _ = vring.disable_notification();
            drop(inside);
            while let Some(fetched) = self.fetch(vring, epoch) {
                fruitless = 0;
                self.start_job(fetched, epoch);
            }
            let Some(inside) = self.gate.try_enter(epoch) else { return };
            let enabled = vring.enable_notification();
            drop(inside);
            match enabled {
                Ok(true) if fruitless < 2 => {}
                Ok(true) => return self.limit.warn(&self.who, "the request queue cannot be read"),
                Ok(false) => return,
                Err(e) => return self.limit.warn(&self.who, &format!("request queue: {e}")),
            }
        }
    }

    /// Copies the next request out of guest memory, exactly once, and checks it.
    fn fetch(&self, vring: &Vring, epoch: u64) -> Option<Fetched> {
        let _inside = self.gate.try_enter(epoch)?;
        let memory = self.guest.memory();
        let chain = vring.get_mut().get_queue_mut().pop_descriptor_chain(memory.clone())?;
        let head = chain.head_index();
        self.requests.taken(head);
        let place = |d: Descriptor| (d.addr(), d.len() as usize);
        let request: Vec<Piece> = chain.clone().readable().map(place).collect();
        let answer = for_answer(chain.writable().map(place));
        let mut bytes = 0;
        let order = self.check(&memory, &request, &mut bytes);
        Some(Fetched { head, again: false, answer, order, bytes })
    }

    /// Copies a request out of guest memory that a predecessor had taken but not answered. It may have
    /// executed one that this process refuses: it may have had other limits, or other requests in progress.
    pub(super) fn fetch_again(&self, memory: &GuestMemoryMmap, table: u64, size: u16, head: u16) -> Fetched {
        let chain = recovery::chain(memory, table, size, head);
        let (answer, request): (Vec<_>, Vec<_>) = chain.into_iter().partition(|d| d.is_write_only());
        let place = |d: Descriptor| (d.addr(), d.len() as usize);
        let request: Vec<Piece> = request.into_iter().map(place).collect();
        let answer = for_answer(answer.into_iter().map(place));
        let mut bytes = 0;
        let order = self.check(memory, &request, &mut bytes).or_else(|refusal| {
            let mut fixed = [0; FIXED];
            match copy_out(memory, &request, 0, &mut fixed) {
                Ok(()) => control::undo(&fixed, refusal),
                Err(_) => Err(refusal),
            }
        });
        Fetched { head, again: true, answer, order, bytes }
    }

    fn check(
        &self,
        memory: &GuestMemoryMmap,
        request: &[Piece],
        bytes: &mut usize,
    ) -> Result<Order, Refusal> {
        let total: usize = request.iter().map(|(_, len)| len).sum();
        let mut fixed = [0; FIXED];
        copy_out(memory, request, 0, &mut fixed)?;
        let size = control::extents_size(&fixed, &self.config.limits)?;
        if total != FIXED + size {
            return Err(invalid(format!(
                "a request of {total} bytes, but its header announced {}",
                FIXED + size
            )));
        }
        if self.job_bytes.fetch_add(size, Ordering::Relaxed) + size > MAX_JOB_BYTES {
            self.job_bytes.fetch_sub(size, Ordering::Relaxed);
            return Err(no_resources("too many large requests at the same time"));
        }
        *bytes = size;
        let mut extents = vec![0; size];
        copy_out(memory, request, FIXED, &mut extents)?;
        control::parse(&fixed, &extents, &self.config.limits)
    }

    pub(super) fn start_job(&self, fetched: Fetched, epoch: u64) {
        let Fetched { head, again, answer, order, bytes } = fetched;
        let order = match order {
            Ok(order) => order,
            Err(refusal) => {
                self.job_bytes.fetch_sub(bytes, Ordering::Relaxed);
                return self.refuse(epoch, head, answer, refusal);
            }
        };
        let work = Work { epoch, head, again, answer, order, bytes };
        let result = if self.jobs.fetch_add(1, Ordering::Relaxed) < MAX_JOBS {
            let short = |(work, e)| (work, format!("the host is short of threads: {e}"));
            self.start_thread(work).map_err(short)
        } else {
            Err((work, format!("{MAX_JOBS} requests are in progress")))
        };
        match result {
            Ok(()) => {}
            // A driver has no more requests than the queue has descriptors.
            Err((work, _)) if work.must_be_executed() && self.deferred().len() < QUEUE_SIZE => {
                self.defer(work)
            }
            Err((Work { epoch, head, answer, bytes, .. }, why)) => {
                self.jobs.fetch_sub(1, Ordering::Relaxed);
                self.job_bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.refuse(epoch, head, answer, no_resources(why));
            }
        }
    }

    /// Executes a request in a thread of its own, then those that wait for a thread. Returns it if there is
    /// no thread.
    fn start_thread(&self, work: Work) -> Result<(), (Work, io::Error)> {
        let Some(device) = self.me.upgrade() else { return Ok(()) };
        let work = Arc::new(Mutex::new(Some(work)));
        let take = |work: &Mutex<Option<Work>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&work);
        let run = move || {
            take(&theirs).into_iter().for_each(|work| device.run(work));
            device.run_deferred();
        };
        match std::thread::Builder::new().name("request".to_owned()).spawn(run) {
            Ok(_) => Ok(()),
            Err(e) => take(&work).map_or(Ok(()), |work| Err((work, e))),
        }
    }

    fn run(&self, work: Work) {
        let Work { epoch, head, again, answer: pieces, order, bytes } = work;
        let mut job = Job { device: self, epoch, head, again, pieces, bytes, answered: false };
        let result = self.execute(order, &mut job);
        job.answer(result);
    }

    /// The requests that wait for a thread.
    fn deferred(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a request until a thread has time for it.
    fn defer(&self, work: Work) {
        if let Order::Destroy { channel } = work.order
            && let Ok(session) = self.session(channel, work.epoch)
        {
            // It is over now, however long the request waits.
            self.count_end(&session);
            session.close("the program has ended its session", Duration::ZERO);
        }
        self.deferred().push_back(work);
        // The thread lives as long as the device.
        let _ = self.reserve.send(());
    }

    /// Executes the requests that wait for a thread.
    pub(super) fn run_deferred(&self) {
        let next = || self.deferred().pop_front();
        while let Some(work) = next() {
            self.run(work);
        }
    }

    /// Refuses a request in the queue's thread, or in another one if the guest was just stopped.
    fn refuse(&self, epoch: u64, head: u16, answer: Vec<Piece>, refusal: Refusal) {
        if let Some(inside) = self.gate.try_enter(epoch) {
            return self.answer_inside(&inside, head, &answer, Err(refusal));
        }
        let Some(device) = self.me.upgrade() else { return };
        let later = move || device.answer(epoch, head, &answer, Err(refusal));
        if let Err(e) = std::thread::Builder::new().name("refusal".to_owned()).spawn(later) {
            tracing::error!("{}: a request remains unanswered: {e}", self.who);
        }
    }

    /// Answers a request once the guest runs, unless the device was reset since it arrived.
    fn answer(&self, epoch: u64, head: u16, pieces: &[Piece], result: Result<(), Refusal>) {
        if let Some(inside) = self.gate.enter(epoch) {
            self.answer_inside(&inside, head, pieces, result);
        }
    }

    fn answer_inside(&self, _inside: &Inside<'_>, head: u16, pieces: &[Piece], result: Result<(), Refusal>) {
        let response = match result {
            Ok(()) => Response::new(Answer::Ok, ""),
            Err(Refusal(answer, reason)) => {
                if answer == Answer::Invalid {
                    self.registry.totals.malformed.fetch_add(1, Ordering::Relaxed);
                }
                self.limit.warn(&self.who, &reason);
                Response::new(answer, &reason)
            }
        };
        let Some(vring) = self.control.lock().unwrap_or_else(PoisonError::into_inner).clone() else { return };
        let memory = self.guest.memory();
        let mut rest = response.as_bytes();
        for (at, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(*len));
            if let Err(e) = memory.write_slice(now, *at) {
                self.limit.warn(&self.who, &format!("answering a request: {e}"));
                break;
            }
            rest = later;
        }
        if !rest.is_empty() {
            self.limit.warn(&self.who, "a request has no room for its answer");
        }
        let written = (response.as_bytes().len() - rest.len()) as u32;
        let added = {
            let mut vring = vring.get_mut();
            self.requests.answering(head);
            let added = vring.add_used(head, written);
            self.requests.answered(head, vring.get_queue().next_used());
            added
        };
        let given = added.map_err(|e| e.to_string()).and_then(|()| {
            if vring.needs_notification().unwrap_or(true) {
                vring.signal_used_queue().map_err(|e| e.to_string())
            } else {
                Ok(())
            }
        });
        if let Err(e) = given {
            self.limit.warn(&self.who, &format!("answering a request: {e}"));
        }
    }
}

/// A request in progress, with what is needed to answer it.
pub(super) struct Job<'d> {
    device: &'d Device,
    pub(super) epoch: u64,
    head: u16,
    pub(super) again: bool,
    pieces: Vec<Piece>,
    bytes: usize,
    pub(super) answered: bool,
}

impl<'d> Job<'d> {
    /// A request that a predecessor has answered and that is carried on here.
    pub(super) fn answered(device: &'d Device, epoch: u64) -> Job<'d> {
        Job { device, epoch, head: 0, again: true, pieces: Vec::new(), bytes: 0, answered: true }
    }

    /// Answers the request, unless it was already answered, and stops counting it.
    pub(super) fn answer(&mut self, result: Result<(), Refusal>) {
        if std::mem::replace(&mut self.answered, true) {
            if let Err(Refusal(_, why)) = result {
                self.device.limit.warn(&self.device.who, &why);
            }
            return;
        }
        self.device.job_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.device.jobs.fetch_sub(1, Ordering::Relaxed);
        self.device.answer(self.epoch, self.head, &self.pieces, result);
    }
}

/// Copies `buf.len()` bytes out of the concatenated pieces, starting at `skip`.
fn copy_out(
    memory: &GuestMemoryMmap,
    pieces: &[Piece],
    mut skip: usize,
    buf: &mut [u8],
) -> Result<(), Refusal> {
    let mut at = 0;
    for (address, len) in pieces {
        if skip >= *len {
            skip -= len;
            continue;
        }
        let n = (len - skip).min(buf.len() - at);
        let outside =
            || invalid(format!("a descriptor of {len} bytes at {:#x} is outside guest memory", address.0));
        let from = address.0.checked_add(skip as u64).map(GuestAddress).ok_or_else(outside)?;
        memory.read_slice(&mut buf[at..at + n], from).map_err(|_| outside())?;
        at += n;
        skip = 0;
        if at == buf.len() {
            break;
        }
    }
    if at < buf.len() {
        return Err(invalid(format!("the request ends {} bytes too early", buf.len() - at)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::fuzzing::with_channel_after_reset;
    use protocol::device::{Extent, Request, request};
    use test_kit::until;

    #[test]
    fn a_request_keeps_no_more_pieces_than_an_answer_has_bytes() {
        let pieces = |lens: &[usize]| -> Vec<usize> {
            let all = lens.iter().map(|len| (GuestAddress(0), *len));
            for_answer(all).iter().map(|(_, len)| *len).collect()
        };
        let size = size_of::<Response>();
        assert_eq!(pieces(&[1; 65_535]).len(), size);
        assert_eq!(pieces(&[0, size - 1, 0, 9, 7]), [size - 1, 9]);
        assert_eq!(pieces(&[size, 0]), [size]);
        assert_eq!(pieces(&[0, 3]), [3]);
    }

    #[test]
    fn a_request_to_destroy_a_channel_is_never_refused_for_lack_of_threads() {
        with_channel_after_reset(|device, _| {
            device.jobs.fetch_add(MAX_JOBS, Ordering::Relaxed);
            let order = Ok(Order::Destroy { channel: 0 });
            let fetched = Fetched { head: 0, again: false, answer: Vec::new(), order, bytes: 0 };
            device.start_job(fetched, device.gate.epoch());
            until("it is answered", || device.jobs.load(Ordering::Relaxed) == MAX_JOBS);
            assert!(device.channels().is_empty(), "it is still there");
            device.jobs.fetch_sub(MAX_JOBS, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_request_that_a_predecessor_had_taken_is_never_refused_for_lack_of_threads() {
        with_channel_after_reset(|device, extent| {
            device.jobs.fetch_add(MAX_JOBS, Ordering::Relaxed);
            for (again, region) in [(false, 1), (true, 2)] {
                let (extents, size) = (vec![extent], extent.len);
                let order = Ok(Order::Register { channel: 0, region, extents, size, read_only: false });
                let fetched = Fetched { head: 0, again, answer: Vec::new(), order, bytes: 0 };
                device.start_job(fetched, device.gate.epoch());
            }
            until("both are answered", || device.jobs.load(Ordering::Relaxed) == MAX_JOBS);
            let session = device.session(0, device.gate.epoch()).expect("it is open");
            assert!(!session.has_region(1), "the limit does not count");
            assert!(session.has_region(2), "it was refused");
            device.jobs.fetch_sub(MAX_JOBS, Ordering::Relaxed);
        });
    }

    /// A request that a predecessor had taken, as it lies in guest memory: with so many extents of one page.
    fn taken(device: &Device, kind: u32, (channel, region): (u32, u32), count: u32) -> Fetched {
        const TABLE: u64 = 0x8000;
        let memory = device.guest.memory();
        let extents = vec![Extent { addr: 0x9000, len: 4096 }; count as usize];
        let size = u64::from(count) * 4096;
        let request = Request { kind, channel, region, extent_count: count, size, flags: 0, reserved: 0 };
        let bytes = [request.as_bytes(), extents.as_bytes()].concat();
        let descriptor = Descriptor::new(TABLE + 16, bytes.len() as u32, 0, 0);
        memory.write_obj(descriptor, GuestAddress(TABLE)).expect("a descriptor");
        memory.write_slice(&bytes, GuestAddress(TABLE + 16)).expect("a request");
        device.fetch_again(&memory, TABLE, 1, 0)
    }

    /// The predecessor may have had another limit.
    #[test]
    fn memory_that_a_predecessor_registered_is_released_before_it_is_refused() {
        with_channel_after_reset(|device, extent| {
            let epoch = device.gate.epoch();
            let order = Order::Register {
                channel: 0,
                region: 3,
                extents: vec![extent],
                size: extent.len,
                read_only: false,
            };
            let before = Fetched { head: 0, again: false, answer: Vec::new(), order: Ok(order), bytes: 0 };
            device.start_job(before, epoch);
            until("it is answered", || device.jobs.load(Ordering::Relaxed) == 0);
            let session = device.session(0, epoch).expect("it is open");
            assert!(session.has_region(3));
            let most = device.config.limits.max_extents;
            device.start_job(taken(device, request::REGISTER_MEMORY, (0, 3), most + 1), epoch);
            until("it is answered", || device.jobs.load(Ordering::Relaxed) == 0);
            assert!(!session.has_region(3), "the session still has memory that is the guest's");
        });
    }

    /// Requests that a predecessor had taken are taken again in another order.
    #[test]
    fn memory_that_a_predecessor_registered_is_released_however_large_the_other_requests_are() {
        with_channel_after_reset(|device, _| {
            device.job_bytes.fetch_add(MAX_JOB_BYTES, Ordering::Relaxed);
            let fetched = taken(device, request::REGISTER_MEMORY, (0, 3), 1);
            let undo = matches!(fetched.order, Ok(Order::Undo { channel: 0, region: Some(3), .. }));
            assert!(undo, "{:?}", fetched.order);
            device.job_bytes.fetch_sub(MAX_JOB_BYTES, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_request_that_this_process_refuses_may_have_been_executed_by_a_predecessor_only_if_it_gave_memory() {
        with_channel_after_reset(|device, _| {
            let most = device.config.limits.max_extents;
            let taken = |kind| taken(device, kind, (7, 1), most + 1).order;
            let create = taken(request::CREATE_CHANNEL);
            assert!(matches!(create, Ok(Order::Undo { channel: 7, region: None, .. })), "{create:?}");
            let destroy = taken(request::DESTROY_CHANNEL);
            assert!(matches!(destroy, Err(Refusal(Answer::NoResources, _))), "{destroy:?}");
        });
    }

    #[test]
    fn no_more_requests_wait_for_a_thread_than_a_queue_has_descriptors() {
        with_channel_after_reset(|device, _| {
            device.jobs.fetch_add(MAX_JOBS, Ordering::Relaxed);
            let start = || {
                let order = Ok(Order::Unregister { channel: 0, region: 1 });
                let fetched = Fetched { head: 0, again: false, answer: Vec::new(), order, bytes: 0 };
                device.start_job(fetched, device.gate.epoch());
            };
            let jobs = || device.jobs.load(Ordering::Relaxed) - MAX_JOBS;
            // The thread that executes those that wait has one, and does not come further.
            let channels = device.channels();
            start();
            until("it has a thread", || device.deferred().is_empty());
            (0..QUEUE_SIZE).for_each(|_| start());
            assert_eq!(jobs(), 1 + QUEUE_SIZE);
            start();
            assert_eq!(jobs(), 1 + QUEUE_SIZE, "it waits as well");
            drop(channels);
            until("all others are answered", || jobs() == 0);
            device.jobs.fetch_sub(MAX_JOBS, Ordering::Relaxed);
        });
    }
}
