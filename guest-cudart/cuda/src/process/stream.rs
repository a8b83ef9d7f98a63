//! A stream's state: how far its work is known to be done.
//!
//! A stream's progress word rises to the `seq` of the last publishing record (a mark or an event's record)
//! that the stream has passed. A query appends a mark if there is work behind the last one. From then on it
//! only reads memory.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::abi::types::launch_attr::PRIORITY;
use crate::process::capture::{self, Capture};
use crate::process::context::Context;
use crate::process::copies_ahead::Wait;
use crate::process::fences::Promise;
use crate::process::green::Green;
use crate::process::host_calls;
use crate::process::ids::unique_id;
use crate::process::work_signal;
use client::handle::{StreamId, TicketId};
use client::lock;
use client::ops::Op;
use client::ops::launch::LaunchAttribute;
use client::ops::stream::{StreamHostWait, StreamMark, StreamSynchronize};
use client::seq::{LastSeq, Seq};
use client::session::{Session, Slot};

/// `CU_STREAM_LEGACY`.
pub(crate) const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD: usize = 2;
pub(crate) const NON_BLOCKING: u32 = 1;

/// A stream.
pub(crate) struct Stream {
    pub id: StreamId,
    pub context: &'static Context,
    /// Its green context.
    pub green: Option<Arc<Green>>,
    pub flags: u32,
    pub priority: AtomicI32,
    /// Attributes set on the stream, which its kernels inherit.
    pub attributes: Mutex<Vec<LaunchAttribute>>,
    pub unique: u64,
    pub legacy: bool,
    /// Whether it is this library's own: it waits only for what this library makes it wait for.
    pub own: bool,
    /// `seq` of its last work and of its last publishing record, and the `seq` up to which it is known to be
    /// done.
    pub last_work: LastSeq,
    /// `seq` of its last work that may hold up what comes behind it, and of its last copy that nothing holds
    /// up (see [`pending_writes`](crate::memory::pending_writes)). Event records and copies whose source has
    /// been read are neither.
    pub last_holding: LastSeq,
    pub last_unheld: LastSeq,
    pub last_mark: LastSeq,
    /// `seq` of its last [wait for a ticket](Self::wait_for_ticket).
    pub last_wait: LastSeq,
    pub synced: LastSeq,
    /// Of a legacy default stream: its own work is known to be done up to this `seq`, because work behind it
    /// on a stream that waits for it is.
    pub own_synced: LastSeq,
    /// Its last wait for a function of this process that directly follows the mark before it, and the last
    /// one whose function has returned or was not called. See [`synchronize`](Self::synchronize).
    pub last_call: LastSeq,
    pub called: LastSeq,
    /// The records of other streams that this one has waited for: the wait's own `seq`, the stream, and the
    /// record's `seq` in that stream's session. Once this stream is known to have passed the wait, the other
    /// is known to have passed the record, even if its progress word doesn't show it yet.
    pub waited_for: Mutex<Vec<(Seq, Arc<Stream>, Seq)>>,
    /// The last record of each session that was dropped from `waited_for`.
    pub forgotten: Mutex<Vec<Seq>>,
    /// All its work is done; another stream may be using its progress word.
    pub finished: AtomicBool,
    /// Its current or latest capture.
    pub capturing: Mutex<Option<Arc<Capture>>>,
    /// What its synchronous copies have promised the program.
    pub promise: Promise,
    /// The number of bytes in the session's ring up to which its work needs no other [`room`](super::room).
    pub room_until: AtomicU64,
}

/// All that a mark on a stream waits for: the last record of its own work, or for a legacy default stream of
/// its context's, and the last one of the legacy default stream that it waits for.
pub(crate) struct Before {
    last: Option<Seq>,
    legacy: Option<Seq>,
}

impl Stream {
    /// The legacy default stream of a context.
    pub fn legacy(context: &'static Context) -> Arc<Stream> {
        Arc::new(Stream::new(StreamId(context.id.0), context, 0, 0, true))
    }

    pub fn new(id: StreamId, context: &'static Context, flags: u32, priority: i32, legacy: bool) -> Stream {
        Stream {
            id,
            context,
            green: None,
            flags,
            priority: AtomicI32::new(priority),
            attributes: Mutex::default(),
            unique: unique_id(),
            legacy,
            own: false,
            last_work: LastSeq::new(),
            last_holding: LastSeq::new(),
            last_unheld: LastSeq::new(),
            last_mark: LastSeq::new(),
            last_wait: LastSeq::new(),
            synced: LastSeq::new(),
            own_synced: LastSeq::new(),
            last_call: LastSeq::new(),
            called: LastSeq::new(),
            waited_for: Mutex::default(),
            forgotten: Mutex::default(),
            finished: AtomicBool::new(false),
            capturing: Mutex::default(),
            promise: Promise::new(),
            room_until: AtomicU64::new(0),
        }
    }

    /// Its session.
    #[inline]
    pub fn session(&self) -> &'static Session {
        self.context.server.session
    }

    /// Whether it is a non-blocking stream: it and the legacy default stream don't wait for each other.
    pub fn is_free(&self) -> bool {
        self.flags & NON_BLOCKING != 0
    }

    /// Whether it is a legacy default stream.
    pub fn is_legacy(&self) -> bool {
        self.legacy
    }

    /// The handle of its context.
    pub fn context_handle(&self) -> usize {
        self.green.as_ref().map_or(self.context.handle, |green| green.convert())
    }

    /// Its green context, also if it is that context's default stream.
    pub fn green(&self) -> Option<&Arc<Green>> {
        self.green.as_ref()
    }

    /// A number that no other stream of the process has ever had.
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// The attributes set on the stream for all its kernels.
    pub fn attributes(&self) -> &Mutex<Vec<LaunchAttribute>> {
        &self.attributes
    }

    pub fn set_priority(&self, priority: i32) {
        self.priority.store(priority, Ordering::Release);
    }

    /// Its current capture.
    #[inline]
    pub fn capture(&self) -> Option<Arc<Capture>> {
        if !capture::any() {
            return None;
        }
        lock(&self.capturing).clone().filter(|capture| !capture.is_ended())
    }

    pub fn set_capture(&self, capture: Arc<Capture>) {
        *lock(&self.capturing) = Some(capture);
    }

    /// Puts an operation on the stream, which must not be in a capture. Returns the record's `seq`.
    #[inline]
    pub fn work<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        self.append(op, |seq| self.note_holding(seq))
    }

    /// Puts a copy on the stream that nothing holds up, and whose source has not been read.
    pub fn unheld_work<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        self.append(op, |seq| self.note_unheld(seq))
    }

    /// Puts an operation on the stream that the program need not wait for once everything before it is done:
    /// a copy to the device whose source has been read, or an event's record. See
    /// [`fences::synchronize`](crate::process::fences::synchronize).
    pub fn settled_work<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        self.append(op, |_| ())
    }

    /// Appends an operation, has its `seq` noted, and counts it as work: whoever finds it as the last work
    /// must already find what is noted about it.
    #[inline]
    fn append<'a, T: Op<'a>>(&self, op: &T, note: impl FnOnce(Seq)) -> Result<Seq> {
        let _appending = self.context.appending(self.is_free());
        let seq = self.session().append(op)?;
        note(seq);
        self.worked(seq);
        Ok(seq)
    }

    /// Notes that the program must wait for the stream's last work after all, because the host can see what
    /// it does.
    pub fn host_sees_last_work(&self) {
        if let Some(last) = self.last_work.get() {
            self.note_unheld(last);
        }
    }

    /// Notes that record `seq` is work that the program has to wait for, and that may hold up what comes
    /// behind it.
    #[inline]
    fn note_holding(&self, seq: Seq) {
        self.last_holding.raise(seq);
        if !self.is_free() {
            self.context.last_holding.raise(seq);
        }
    }

    /// Notes that record `seq` is work that the program has to wait for, and that holds up nothing.
    fn note_unheld(&self, seq: Seq) {
        self.last_unheld.raise(seq);
        if !self.is_free() {
            self.context.last_unheld.raise(seq);
        }
    }

    /// Puts a publishing operation, an event's record, on the stream. It counts as work too.
    pub fn publishing_work<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        let seq = self.settled_work(op)?;
        self.last_mark.raise(seq);
        Ok(seq)
    }

    /// Puts a mark on the stream that counts as work, like [`publishing_work`](Self::publishing_work).
    /// Returns its `seq`, and all that it waits for, unless another thread is putting something there. Once
    /// that [is known to be done](Self::has_done), the stream has reached the mark, even if its progress word
    /// doesn't show it yet.
    ///
    /// Every record before the mark was announced before the mark was appended. So if none was open before
    /// the last ones were looked up, and the mark's own is the only one since, no other record is before it.
    pub fn mark_behind_all(&self) -> Result<(Seq, Option<Before>)> {
        let announced = self.context.announced(self.is_free());
        let settled = announced.settled();
        let legacy = self.context.legacy();
        let waits = !self.legacy && !self.is_free();
        let before = Before { last: self.due(), legacy: waits.then(|| legacy.last_work.get()).flatten() };
        let mark = self.publishing_work(&StreamMark { stream: self.id })?;
        let is_all = settled.is_some_and(|count| announced.count() == count + 1);
        Ok((mark, is_all.then_some(before)))
    }

    /// Whether all that is known to be done, without asking.
    pub fn has_done(&self, before: &Before) -> bool {
        // What is known of a legacy default stream's own work says nothing of what it waits for.
        let own = |last| if self.legacy { self.is_known_done(last) } else { self.own_is_known_done_to(last) };
        before.last.is_none_or(own)
            && before.legacy.is_none_or(|last| self.context.legacy().own_is_known_done_to(last))
    }

    /// Whether all that is known to be done but `wait`, if the stream has reached the mark that this wait for
    /// a ticket directly follows.
    pub fn has_done_but(&self, before: &Before, wait: Seq) -> bool {
        let legacy_is_done =
            |last: Seq| !last.may_be_after(wait) || self.context.legacy().own_is_known_done_to(last);
        before.last == Some(wait) && before.legacy.is_none_or(legacy_is_done)
    }

    /// Whether another stream has waited for all that, so that work put there now comes behind it.
    pub fn was_waited_for(&self, before: &Before, other: &Stream) -> bool {
        let waited_for = lock(&other.waited_for);
        let covers = |last: Seq| {
            waited_for
                .iter()
                .any(|(_, stream, record)| std::ptr::eq(&**stream, self) && !last.may_be_after(*record))
        };
        before.legacy.is_none() && before.last.is_none_or(covers)
    }

    /// Makes the stream wait for a ticket. Returns the record's `seq`.
    ///
    /// The server holds back what follows, and the device never sees the wait. So it doesn't order the stream
    /// with the legacy default stream, as an operation does. Where that matters, a mark comes before it.
    pub fn wait_for_ticket(&self, ticket: TicketId) -> Result<Seq> {
        self.append(&StreamHostWait { stream: self.id, ticket }, |seq| {
            self.note_holding(seq);
            self.last_wait.raise(seq);
        })
    }

    /// `seq` of its last operation, or of an earlier one if a [wait for a ticket](Self::wait_for_ticket) has
    /// followed since.
    pub fn last_operation(&self) -> Option<Seq> {
        let last = self.last_work.get()?;
        if self.last_wait.has_reached(last) { self.last_mark.get() } else { Some(last) }
    }

    /// Puts a publishing operation of this library on the stream, for which the program never waits.
    pub fn publish<'a, T: Op<'a>>(&self, op: &T) -> Result<Seq> {
        let seq = self.session().append(op)?;
        self.last_mark.raise(seq);
        Ok(seq)
    }

    /// Notes that record `seq` is work on this stream.
    #[inline]
    fn worked(&self, seq: Seq) {
        self.last_work.raise(seq);
        self.context.worked(seq, self.is_free());
        work_signal::work_came();
    }

    /// `seq` of the last work that this stream has to pass. For the legacy default stream that includes the
    /// streams it waits for.
    pub fn due(&self) -> Option<Seq> {
        if self.legacy { self.context.last_work() } else { self.last_work.get() }
    }

    /// Whether all work that it [has to pass](Self::due) is known to be done.
    pub fn is_known_idle(&self) -> bool {
        self.due().is_none_or(|due| self.synced.has_reached(due))
    }

    /// Whether it is known, without asking, that nothing the stream has to pass is pending except
    /// [`settled_work`](Self::settled_work).
    ///
    /// A stream that waits for the legacy default stream need not pass what others that do have queued,
    /// unless the legacy default stream has work behind that. If that is settled work, the others count as
    /// [watching](super::fences) what the host may see.
    pub fn is_settled(&self) -> bool {
        if self.legacy {
            [&self.context.last_holding, &self.context.last_unheld]
                .iter()
                .all(|last| last.get().is_none_or(|last| self.context.has_synced(last, false)))
        } else {
            self.own_is_settled() && (self.is_free() || self.context.legacy().own_is_settled())
        }
    }

    /// The same for its own work.
    pub fn own_is_settled(&self) -> bool {
        [&self.last_holding, &self.last_unheld]
            .iter()
            .all(|last| last.get().is_none_or(|last| self.own_is_known_done_to(last)))
    }

    /// Whether the stream is known, without asking, to be done up to record `seq`.
    pub fn is_known_done(&self, seq: Seq) -> bool {
        self.synced.has_reached(seq) || self.context.has_synced(seq, self.is_free())
    }

    /// Whether work on this stream implicitly waits for earlier work on another stream of the same context.
    pub fn waits_by_itself(&self, other: &Stream) -> bool {
        (self.legacy || other.legacy) && !self.is_free() && !other.is_free()
    }

    /// Whether the program was told that a copy behind record `seq` is done, and so knows that the record is,
    /// too.
    pub fn has_promised(&self, seq: Seq) -> bool {
        self.promise.covers(seq) || !self.is_free() && self.context.legacy_has_promised(seq)
    }

    /// Whether the stream has passed the publishing record `seq`.
    pub fn has_passed(&self, seq: Seq) -> bool {
        if self.is_known_done(seq) {
            return true;
        }
        // Another stream may be using the word by now, but then it was zeroed after `finished` was set.
        self.word_has_passed(seq) || self.finished.load(Ordering::Acquire)
    }

    /// Whether its progress word says that it has passed the publishing record `seq`.
    pub fn word_has_passed(&self, seq: Seq) -> bool {
        let word = self.session().progress().stream(self.id).map_or(0, |word| word.load(Ordering::Acquire));
        seq.is_reached_at(word)
    }

    /// Appends a publishing record after all work so far. Returns its `seq`.
    pub fn mark(&self) -> Result<Seq> {
        let last = match self.due() {
            Some(due) => self.last_mark.if_reached(due),
            None => self.last_mark.get(),
        };
        last.map_or_else(|| self.publish(&StreamMark { stream: self.id }), Ok)
    }

    /// Appends a publishing record behind everything that the stream's next operation waits for: the same as
    /// [`mark`](Self::mark), and the legacy default stream's work so far. Returns its `seq`.
    pub fn mark_as_operation(&self) -> Result<Seq> {
        let legacy = self.context.legacy();
        // A wait for this stream since then tells nothing of the legacy one: only operations wait for that.
        if self.waits_by_itself(legacy)
            && let Some(last) = legacy.last_work.get()
            && !legacy.own_is_known_done_to(last)
            && !self.last_mark.has_reached(last)
        {
            // It counts as work of this stream, so later marks are behind it.
            return self.publishing_work(&StreamMark { stream: self.id });
        }
        self.mark()
    }

    /// Waits until everything is done that the stream's next operation waits for: the same as
    /// [`synchronize`](Self::synchronize), and the legacy default stream's work so far. For operations that
    /// this process carries out itself.
    pub fn synchronize_as_operation(&self) -> Result {
        if !self.legacy && !self.is_free() && !self.context.legacy().own_is_known_done() {
            let mark = self.mark_as_operation()?;
            self.session().wait_progress(|| self.has_passed(mark))?;
            self.is_synced(mark);
        }
        self.synchronize()
    }

    /// Whether everything on the stream is done. Takes a round trip only if the program was already told that
    /// it is.
    pub fn is_done(&self) -> Result<bool> {
        let Some(due) = self.due().filter(|due| !self.synced.has_reached(*due)) else { return Ok(true) };
        let mark = self.mark()?;
        if !self.has_passed(mark) {
            if !self.has_promised(due) {
                return Ok(false);
            }
            self.synchronize()?;
        }
        self.is_synced(mark);
        Ok(true)
    }

    /// Whether its own work is known to be done, without asking.
    pub fn own_is_known_done(&self) -> bool {
        self.last_work.get().is_none_or(|last| self.own_is_known_done_to(last))
    }

    /// Whether its own work up to record `seq` is known to be done, without asking.
    pub fn own_is_known_done_to(&self, seq: Seq) -> bool {
        self.own_synced.has_reached(seq) || self.is_known_done(seq)
    }

    /// Whether it is known, without asking, that nothing can hold up the stream's next work: before that come
    /// only copies whose source has been read, which nothing holds up either.
    pub fn starts_at_once(&self) -> bool {
        if self.legacy {
            return !self.context.is_busy();
        }
        self.own_is_settled() && (self.is_free() || self.context.legacy().own_is_known_done())
    }

    /// Whether its own work is known to be done, without waiting.
    pub fn is_idle(&self) -> bool {
        self.own_is_known_done() || self.mark().is_ok_and(|mark| self.has_passed(mark))
    }

    /// Whether it was destroyed and all its work is done.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// Notes that everything on the stream up to `seq` is done.
    pub fn is_synced(&self, seq: Seq) {
        if !self.synced.raise(seq) {
            return;
        }
        if self.legacy {
            self.context.legacy_is_synced(seq);
        } else if !self.is_free()
            && let Some(last) = self.last_operation().filter(|last| !last.may_be_after(seq))
        {
            self.context.legacy().own_synced.raise(last);
        }
        let mut waited_for = lock(&self.waited_for);
        if waited_for.is_empty() {
            return;
        }
        let passed: Vec<_> = waited_for.extract_if(.., |(wait, ..)| !wait.may_be_after(seq)).collect();
        drop(waited_for);
        for (_, other, record) in passed {
            other.is_synced(record);
        }
    }

    /// Notes that record `wait` makes this stream wait for `record` of another stream.
    pub fn waits_for(&self, wait: Seq, other: &Arc<Stream>, record: Seq) {
        if std::ptr::eq(self, &**other) || other.synced.has_reached(record) {
            return;
        }
        let mut waited_for = lock(&self.waited_for);
        // Once passed, a later wait for the same stream tells more; earlier ones are kept while there are
        // few.
        if waited_for.len() >= 64 {
            let (_, _, record) = waited_for.remove(0);
            let mut forgotten = lock(&self.forgotten);
            match forgotten.iter_mut().find(|other| other.is_of_session_of(record)) {
                Some(last) if record.may_be_after(*last) => *last = record,
                Some(_) => {}
                None => forgotten.push(record),
            }
        }
        waited_for.push((wait, other.clone(), record));
    }

    /// Whether work put on this stream now may be ordered behind record `seq` of another, directly or through
    /// other streams. True also if unknown.
    pub fn may_be_behind(&self, other: &Stream, seq: Seq) -> bool {
        let mut seen: HashSet<u64> = HashSet::new();
        let mut open: Vec<Arc<Stream>> = Vec::new();
        if self.leads_to(other, seq, &mut open) {
            return true;
        }
        while let Some(stream) = open.pop() {
            if seen.insert(stream.unique) && stream.leads_to(other, seq, &mut open) {
                return true;
            }
        }
        false
    }

    /// Whether this stream is `other`, or may be directly behind it. Otherwise adds the streams it has waited
    /// for to `open`.
    fn leads_to(&self, other: &Stream, seq: Seq, open: &mut Vec<Arc<Stream>>) -> bool {
        let forgotten = || lock(&self.forgotten).iter().any(|record| record.may_be_after(seq));
        if std::ptr::eq(self, other) || forgotten() {
            return true;
        }
        // Blocking streams are ordered behind each other through the legacy default stream, whatever that has
        // waited for.
        let legacy = self.context.legacy();
        let later = || legacy.last_work.get().is_some_and(|last| last.may_be_after(seq));
        let through = self.legacy || other.legacy || later();
        if !self.is_free() && through {
            return true;
        }
        // Only waits for later records can lead there.
        let waited_for = lock(&self.waited_for);
        open.extend(
            waited_for.iter().filter(|(.., record)| record.may_be_after(seq)).map(|(_, via, _)| via.clone()),
        );
        false
    }

    /// A reply slot for a question that is answered when everything on the stream is done. If so many threads
    /// wait already that other calls would find none, this waits for the stream first, without a slot.
    pub fn slot_to_wait(&self) -> Result<Slot<'static>> {
        let session = self.session();
        loop {
            if let Some(slot) = session.slot_to_wait()? {
                return Ok(slot);
            }
            if self.is_known_idle() {
                return session.slot();
            }
            let mark = self.mark()?;
            session.wait_progress(|| self.has_passed(mark))?;
            self.is_synced(mark);
        }
    }

    /// Waits until everything on the stream is done. No round trip if that is already known.
    ///
    /// If the last thing on the stream is a function of this process, the stream is done when the function
    /// has returned, which nobody needs to ask the server about.
    pub fn synchronize(&self) -> Result {
        if let Some(due) = self.due()
            && self.last_call.get() == Some(due)
        {
            host_calls::wait_for_return(|| self.called.has_reached(due));
        }
        if self.is_known_idle() {
            self.session().show_output();
            self.session().check()?;
            return self.context.deferred();
        }
        let slot = self.slot_to_wait()?;
        let wait = || slot.submit(&StreamSynchronize { stream: self.id });
        let pending = if self.legacy { self.context.submit_wait(Wait::Work, wait)? } else { wait()? };
        let seq = pending.seq();
        let result = pending.wait().map(|_| ());
        if result.is_ok() {
            self.is_synced(seq);
        }
        self.context.settle(result)
    }
}

/// The attributes of a kernel captured on a stream: those of its launch, then those of the stream.
pub(crate) fn of_captured(stream: &Stream, mut attributes: Vec<LaunchAttribute>) -> Vec<LaunchAttribute> {
    let given = attributes.len();
    for attribute in lock(stream.attributes()).iter() {
        if !attributes[..given].iter().any(|other| other.id == attribute.id) {
            attributes.push(attribute.clone());
        }
    }
    // The priority with which the stream was created: "copied from stream priority during stream capture"
    // (cuda.h, cudaLaunchAttributePriority).
    let priority = stream.priority.load(Ordering::Acquire);
    if priority != 0 && !attributes.iter().any(|attribute| attribute.id == PRIORITY) {
        let mut value = [0; 64];
        value[..4].copy_from_slice(&priority.to_le_bytes());
        attributes.push(LaunchAttribute { id: PRIORITY, value });
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::driver::Server;
    use client::channel::MAX_CONTEXTS;
    use client::handle::ContextId;

    fn seq(number: u64) -> Seq {
        Seq::for_tests(0, number)
    }

    fn streams(flags: [u32; 3]) -> [Arc<Stream>; 3] {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let mut id = MAX_CONTEXTS;
        flags.map(|flags| {
            id += 1;
            Arc::new(Stream::new(StreamId(id), context, flags, 0, false))
        })
    }

    #[test]
    fn a_wait_orders_later_work_behind_the_other_stream() {
        let [a, b, c] = streams([NON_BLOCKING; 3]);
        assert!(a.may_be_behind(&a, seq(10)));
        assert!(!b.may_be_behind(&a, seq(10)) && !c.may_be_behind(&a, seq(10)));
        // An earlier record is not ordered behind it.
        b.waits_for(seq(12), &a, seq(9));
        assert!(!b.may_be_behind(&a, seq(10)));
        b.waits_for(seq(14), &a, seq(11));
        c.waits_for(seq(16), &b, seq(15));
        assert!(b.may_be_behind(&a, seq(10)) && c.may_be_behind(&a, seq(10)));
        assert!(!a.may_be_behind(&c, seq(10)));
        // A cycle through other streams does no harm.
        a.waits_for(seq(20), &c, seq(19));
        assert!(!a.may_be_behind(&b, seq(30)));
    }

    #[test]
    fn a_stream_is_settled_whatever_streams_do_that_it_does_not_wait_for() {
        let [stream, other, free] = streams([0, 0, NON_BLOCKING]);
        let legacy = stream.context.legacy();
        let settled = || [&stream, &other, &free, legacy].map(|stream| stream.is_settled());
        assert_eq!(settled(), [true; 4]);
        other.note_holding(seq(10));
        assert_eq!(settled(), [true, false, true, false]);
        other.is_synced(seq(10));
        // The legacy default stream would have to know that of each stream.
        assert_eq!(settled(), [true, true, true, false]);
        legacy.note_holding(seq(11));
        assert_eq!(settled(), [false, false, true, false]);
        stream.last_work.raise(seq(12));
        stream.is_synced(seq(13));
        assert_eq!(settled(), [true, true, true, false], "the default stream's work comes before record 12");
        legacy.note_holding(seq(14));
        stream.is_synced(seq(15));
        assert_eq!(settled(), [false, false, true, false], "and not before what comes later");
        legacy.is_synced(seq(16));
        free.note_holding(seq(17));
        assert_eq!(settled(), [true, true, false, true]);
    }

    #[test]
    fn a_wait_for_a_ticket_says_nothing_of_the_legacy_streams_work_before_it() {
        let [stream, ..] = streams([0; 3]);
        let legacy = stream.context.legacy();
        let work = |stream: &Stream| stream.work(&StreamMark { stream: stream.id }).unwrap();
        let waits_behind_a_mark = |between: &dyn Fn()| {
            stream.publishing_work(&StreamMark { stream: stream.id }).unwrap();
            between();
            stream.wait_for_ticket(TicketId(1)).unwrap();
        };
        let is_over = || {
            stream.is_synced(stream.session().append(&StreamSynchronize { stream: stream.id }).unwrap());
            assert!(stream.own_is_known_done());
        };
        work(legacy);
        waits_behind_a_mark(&|| {});
        is_over();
        assert!(legacy.own_is_known_done(), "the mark comes behind it");
        // Another thread's work.
        waits_behind_a_mark(&|| _ = work(legacy));
        is_over();
        assert!(!legacy.own_is_known_done(), "the wait does not");
        work(&stream);
        is_over();
        assert!(legacy.own_is_known_done());
    }

    #[test]
    fn a_mark_comes_behind_its_threads_work_whatever_another_thread_puts_on_the_stream() {
        // Another thread's mark has to come between two instructions of this one's, so many times.
        for _ in 0..100 {
            let [stream, ..] = streams([NON_BLOCKING; 3]);
            let work = || {
                for _ in 0..500 {
                    let work = stream.work(&StreamMark { stream: stream.id }).unwrap();
                    let mark = stream.mark().unwrap();
                    assert!(!work.may_be_after(mark), "{work:?} is not before {mark:?}");
                }
            };
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(work);
                }
            });
        }
    }

    #[test]
    fn a_stream_has_reached_a_mark_once_all_before_it_is_known_to_be_done() {
        let [stream, other, free] = streams([0, 0, NON_BLOCKING]);
        let legacy = stream.context.legacy();
        let work = |stream: &Stream| stream.work(&StreamMark { stream: stream.id }).unwrap();
        // Whether that is known right away.
        let knows = |stream: &Stream| {
            let (mark, before) = stream.mark_behind_all().unwrap();
            let known = stream.has_done(&before.expect("no other thread puts work there"));
            stream.is_synced(mark);
            known
        };
        assert_eq!([legacy, &stream, &other, &free].map(|stream| knows(stream)), [true; 4]);
        for (at, own) in [(0, &stream), (2, &free)] {
            let last = work(own);
            assert!(!knows(own), "{at}");
            assert!(!last.may_be_after(own.synced.get().unwrap()));
            assert!(knows(own), "its next mark was passed");
        }
        // The legacy default stream waits for a blocking one, which waits for it.
        let last = work(&other);
        assert_eq!([&stream, &free, legacy].map(|stream| knows(stream)), [true, true, false]);
        other.is_synced(last);
        let last = work(legacy);
        assert!(knows(&free), "it waits for neither");
        let (mark, before) = stream.mark_behind_all().unwrap();
        let before = before.unwrap();
        assert!(!stream.has_done(&before) && !last.may_be_after(mark));
        legacy.is_synced(last);
        assert!(stream.has_done(&before));
    }

    #[test]
    fn what_is_before_a_mark_is_not_known_while_others_put_work_there() {
        for flags in [0, NON_BLOCKING] {
            let [stream, ..] = streams([flags; 3]);
            // Work, and a copy to the host that is none.
            for announce in [Context::appending, Context::reading] {
                let open = announce(stream.context, stream.is_free());
                assert!(stream.mark_behind_all().unwrap().1.is_none());
                drop(open);
                assert!(stream.mark_behind_all().unwrap().1.is_some());
            }
            // Whatever several threads do, no record is between what is known and the mark.
            let (mut seqs, mut marks) = (Vec::new(), Vec::new());
            std::thread::scope(|scope| {
                let each = || {
                    let (mut seqs, mut marks) = (Vec::new(), Vec::new());
                    for _ in 0..500 {
                        seqs.push(stream.work(&StreamMark { stream: stream.id }).unwrap());
                        let (mark, before) = stream.mark_behind_all().unwrap();
                        seqs.push(mark);
                        marks.extend(before.and_then(|before| Some((before.last?, mark))));
                    }
                    (seqs, marks)
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(each)).collect();
                for thread in threads {
                    let (more, known) = thread.join().unwrap();
                    seqs.extend(more);
                    marks.extend(known);
                }
            });
            seqs.sort_by_key(|seq| seq.in_timeline());
            for (before, mark) in marks {
                let at = seqs.iter().position(|seq| *seq == mark).unwrap();
                assert_eq!(seqs[at - 1], before, "{mark:?}");
            }
        }
    }

    #[test]
    fn blocking_streams_are_ordered_once_the_legacy_stream_has_work() {
        let [a, b, free] = streams([0, 0, NON_BLOCKING]);
        assert!(!b.may_be_behind(&a, seq(10)));
        a.context.legacy().last_work.raise(seq(11));
        assert!(b.may_be_behind(&a, seq(10)) && !free.may_be_behind(&a, seq(10)));
        assert!(a.context.legacy().may_be_behind(&a, seq(10)));
    }

    #[test]
    fn a_mark_as_an_operation_is_behind_the_legacy_stream_although_its_own_was_waited_for_since() {
        let [stream, ..] = streams([0; 3]);
        let legacy = stream.context.legacy();
        let work = |stream: &Stream| stream.work(&StreamMark { stream: stream.id }).unwrap();
        work(&stream);
        let own = stream.mark().unwrap();
        let other = work(legacy);
        // The program waits for the stream. The answer comes while the legacy stream is still at work.
        stream.is_synced(stream.session().append(&StreamSynchronize { stream: stream.id }).unwrap());
        assert_eq!(stream.mark(), Ok(own));
        let mark = stream.mark_as_operation().unwrap();
        assert!(!other.may_be_after(mark));
        assert_eq!(stream.mark_as_operation(), Ok(mark));
    }

    #[test]
    fn what_this_process_does_itself_waits_for_the_legacy_stream_like_any_operation() {
        let [stream, _, free] = streams([0, 0, NON_BLOCKING]);
        let legacy = stream.context.legacy();
        legacy.work(&StreamMark { stream: legacy.id }).unwrap();
        assert_eq!(free.synchronize_as_operation(), Ok(()));
        assert_eq!(stream.synchronize(), Ok(()), "it has nothing to do");
        let waiting = stream.clone();
        let waits = std::thread::spawn(move || waiting.synchronize_as_operation());
        let mark = loop {
            assert!(!waits.is_finished(), "it waited for nothing");
            match stream.last_mark.get() {
                Some(mark) => break mark,
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        };
        let word = stream.session().progress().stream(stream.id).unwrap();
        while !mark.is_reached_at(word.load(Ordering::Relaxed)) {
            word.fetch_add(1, Ordering::Release);
        }
        assert_eq!(waits.join().unwrap(), Ok(()));
    }

    #[test]
    fn captured_kernels_have_the_priority_of_their_launch_or_their_stream() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let on = |priority, attributes| {
            let stream = Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, priority, false);
            let all = of_captured(&stream, attributes);
            let found = all.iter().filter(|attribute| attribute.id == PRIORITY);
            found
                .map(|attribute| i32::from_le_bytes(*attribute.value.first_chunk().unwrap()))
                .collect::<Vec<_>>()
        };
        let own = |priority: i32| {
            let mut value = [0; 64];
            value[..4].copy_from_slice(&priority.to_le_bytes());
            vec![LaunchAttribute { id: PRIORITY, value }]
        };
        assert_eq!(on(0, vec![]), []);
        assert_eq!(on(-5, vec![]), [-5]);
        assert_eq!(on(-5, own(-2)), [-2]);
    }

    #[test]
    fn a_dropped_wait_may_have_led_anywhere() {
        let [a, b, c] = streams([NON_BLOCKING; 3]);
        for record in 0..65 {
            b.waits_for(seq(200 + record), &c, seq(100 + record));
        }
        assert!(b.may_be_behind(&a, seq(99)) && !b.may_be_behind(&a, seq(300)));
    }
}
