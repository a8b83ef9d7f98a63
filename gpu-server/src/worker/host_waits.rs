//! Streams that wait for the client, and the commands that are held back with them.
//!
//! A stream that waits for the client ([`StreamHostWait`]) continues only after a later command of the same ring. A device queue has a limited size: when it is full, the driver's call
//! blocks, and the command that would release the stream is never read. So while a stream waits, only a few hundred of its commands are enqueued ahead, few of them with data, and none
//! that may wait for the device. Its further commands are **set aside**. Commands of other streams are executed, because the client may need their results before it releases this
//! stream.
//!
//! Waiting spreads from stream to stream: by events, and by the order between a context's legacy default stream and its blocking streams. A command that uses a stream or an event of a
//! command set aside is set aside behind it. A command that creates, destroys or changes another object (a module, a graph, a texture) keeps the order of the session, so everything behind
//! it waits for it. Only commands without any order (queries, device memory) pass it.

use std::collections::{HashMap, HashSet, VecDeque};

use protocol::channel::{MAX_CONTEXTS, Record};
use protocol::handle::{EventId, Handle, StreamId, TicketId};
use protocol::ops::event::EventRecord;
use protocol::ops::stream::{StreamCreate, StreamDestroy, StreamHostSignal, StreamHostWait, StreamWaitEvent};
use protocol::ops::{self, Lane, MayBlock, Op, Order};
use protocol::wire::Reader;

/// Maximum number of commands executed on a stream while it waits for the client. A device queue holds many more.
const AHEAD: u32 = 256;
/// Maximum number of copies with client data enqueued on all waiting streams together. This many find staging buffers and leave as many for other streams.
const COPIES_AHEAD: u32 = 3;
/// Maximum bytes of commands set aside. Beyond it the session blocks, as with a full queue.
const MAX_ASIDE: usize = 64 << 20;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A command's order and lane. A command with an unknown opcode keeps the session's order; it is refused when it is executed.
fn order(opcode: u16) -> (Order, Lane) {
    ops::info(opcode).map_or((Order::Session, Lane::Main), |info| (info.order, info.lane))
}

/// Whether the driver call of a command may block until its stream has reached it.
fn waits_for_its_stream(opcode: u16) -> bool {
    ops::info(opcode).is_some_and(|info| info.may_block == MayBlock::Stream)
}

/// Whether a command may need staging buffers.
fn moves_data(opcode: u16) -> bool {
    waits_for_its_stream(opcode) || ops::info(opcode).is_some_and(|info| info.carries_data)
}

/// A command's body, decoded, if it is this operation.
fn decoded<'a, T: Op<'a>>(opcode: u16, body: &'a [u8]) -> Option<T> {
    (opcode == T::INFO.opcode).then(|| T::get(&mut Reader::new(body)).ok()).flatten()
}

/// The streams and events that a command touches.
#[derive(Default)]
struct Touched {
    streams: Vec<StreamId>,
    events: Vec<EventId>,
}

impl Touched {
    fn by(record: &Record, body: &[u8]) -> Touched {
        let mut touched = Touched::default();
        if let Some(info) = ops::info(record.opcode) {
            // A command that cannot be decoded is refused when it is executed.
            let _ = (info.visit_handles)(body, &mut |handle| match handle {
                Handle::Stream(stream) => touched.streams.push(stream),
                Handle::Event(event) => touched.events.push(event),
            });
        }
        touched
    }

    fn is_empty(&self) -> bool {
        self.streams.is_empty() && self.events.is_empty()
    }
}

/// A stream that waits.
#[derive(Default)]
struct Waits {
    tickets: HashSet<TicketId>,
    /// Number of commands executed on it since it began to wait, and how many of them move data.
    ahead: u32,
    copies: u32,
}

/// What the commands set aside use.
#[derive(Default)]
struct Blocked {
    streams: HashSet<StreamId>,
    events: HashSet<EventId>,
    /// Tickets that a stream will wait for.
    tickets: HashSet<TicketId>,
    /// Whether one of them keeps the session's order.
    all: bool,
}

/// The streams that wait, and the commands set aside.
#[derive(Default)]
pub(super) struct Held {
    /// Blocking streams, with the legacy default stream of their context.
    blocking: HashMap<StreamId, StreamId>,
    waits: HashMap<StreamId, Waits>,
    /// Tickets of streams that were destroyed while they waited. Their work still waits.
    gone: HashSet<TicketId>,
    /// Events recorded on a waiting stream, with the stream's tickets at that time.
    events: HashMap<EventId, HashSet<TicketId>>,
    aside: VecDeque<(Record, Vec<u8>)>,
    aside_bytes: usize,
    blocked: Blocked,
    /// Tickets that were signalled before the command that waits for them was executed.
    signalled: HashSet<TicketId>,
    /// `seq` of the last command that came.
    last: u64,
    /// Whether a stream has stopped waiting since commands were last taken from those set aside.
    released: bool,
}

/// What to do with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Execute it now.
    Execute,
    /// It was set aside.
    Aside,
    /// Nothing: it waits for a ticket that has been signalled, or signals a ticket that no stream waits for yet.
    Done,
}

impl Held {
    /// Decides what to do with the next command of the session. `may_wait` tells whether executing it may wait for the device.
    #[inline]
    pub(super) fn judge(&mut self, record: &Record, body: &[u8], may_wait: impl FnOnce() -> bool) -> Verdict {
        self.last = record.seq;
        if !self.is_waiting() && self.aside.is_empty() {
            return Verdict::Execute;
        }
        let verdict = self.judge_slowly(record, body, may_wait());
        if verdict == Verdict::Aside {
            self.set_aside(*record, body.to_vec());
        }
        verdict
    }

    /// Whether any work waits for the client.
    fn is_waiting(&self) -> bool {
        !self.waits.is_empty() || !self.gone.is_empty()
    }

    fn judge_slowly(&mut self, record: &Record, body: &[u8], may_wait: bool) -> Verdict {
        let (order, lane) = order(record.opcode);
        if lane == Lane::Express {
            let ticket = decoded::<StreamHostSignal>(record.opcode, body).map(|op| op.ticket);
            return match ticket {
                Some(ticket) if self.blocked.tickets.contains(&ticket) => {
                    self.signalled.insert(ticket);
                    Verdict::Done
                }
                _ => Verdict::Execute,
            };
        }
        let touched = Touched::by(record, body);
        if !self.holds_back(order, record.opcode, &touched, may_wait) {
            return if self.is_passed(record, body) { Verdict::Done } else { Verdict::Execute };
        }
        self.blocked.all |= order == Order::Session || (order == Order::Streams && touched.is_empty());
        self.blocked.streams.extend(&touched.streams);
        self.blocked.events.extend(&touched.events);
        self.blocked.tickets.extend(decoded::<StreamHostWait>(record.opcode, body).map(|op| op.ticket));
        Verdict::Aside
    }

    fn set_aside(&mut self, record: Record, body: Vec<u8>) {
        self.aside_bytes += cost(&body);
        self.aside.push_back((record, body));
    }

    /// Whether a command waits for a ticket that has been signalled already.
    fn is_passed(&mut self, record: &Record, body: &[u8]) -> bool {
        let wait = decoded::<StreamHostWait>(record.opcode, body);
        wait.is_some_and(|op| self.signalled.remove(&op.ticket))
    }

    fn holds_back(&self, order: Order, opcode: u16, touched: &Touched, may_wait: bool) -> bool {
        let waits = may_wait && self.is_waiting();
        match order {
            Order::None => self.blocked.all || waits,
            Order::Session | Order::Earlier => !self.aside.is_empty() || waits,
            Order::Streams if touched.is_empty() => !self.aside.is_empty() || waits,
            Order::Streams => {
                self.blocked.all
                    || waits
                    || touched.streams.iter().any(|stream| self.is_blocked(*stream))
                    || touched.events.iter().any(|event| self.blocked.events.contains(event))
                    || touched.streams.iter().any(|stream| self.is_full(*stream, opcode))
            }
        }
    }

    /// Whether a command set aside must come before any further command of this stream.
    fn is_blocked(&self, stream: StreamId) -> bool {
        !self.blocked.streams.is_empty()
            && (self.blocked.streams.contains(&stream)
                || self.related(stream).any(|other| self.blocked.streams.contains(&other)))
    }

    /// The streams with which all work of this one is ordered.
    fn related(&self, stream: StreamId) -> impl Iterator<Item = StreamId> {
        let legacy = stream.0 < MAX_CONTEXTS;
        let mine = self.blocking.get(&stream).copied();
        let others =
            self.blocking.iter().filter(move |(_, of)| legacy && **of == stream).map(|(other, _)| *other);
        others.chain(mine)
    }

    /// Whether a stream waits and takes no further command ahead. A copy whose result a caller waits for is never enqueued behind a wait: NVIDIA's driver blocks in that call until the stream
    /// continues. That would block the dispatcher, although the client may need its answers before it releases the stream.
    fn is_full(&self, stream: StreamId, opcode: u16) -> bool {
        let waits = self.waits.get(&stream);
        let waits = waits.or_else(|| self.related(stream).find_map(|other| self.waits.get(&other)));
        let Some(waits) = waits else { return false };
        waits.ahead >= AHEAD
            || waits_for_its_stream(opcode)
            || (moves_data(opcode) && self.waits.values().map(|w| w.copies).sum::<u32>() >= COPIES_AHEAD)
    }

    /// Records the effect of a command that was executed. `done` tells whether it succeeded.
    pub(super) fn executed(&mut self, record: &Record, body: &[u8], done: bool) {
        let opcode = record.opcode;
        if let Some(op) = decoded::<StreamCreate>(opcode, body)
            && op.flags & NON_BLOCKING == 0
        {
            self.blocking.insert(op.stream, StreamId(op.context.0));
        } else if let Some(op) = decoded::<StreamDestroy>(opcode, body) {
            // The stream's pending work continues, and another stream may get its number.
            self.blocking.remove(&op.stream);
            if let Some(waits) = self.waits.remove(&op.stream) {
                self.gone.extend(waits.tickets);
            }
        } else if let Some(op) = decoded::<StreamHostSignal>(opcode, body) {
            self.signal(op.ticket);
        } else if let Some(op) = decoded::<StreamHostWait>(opcode, body)
            && done
        {
            self.waits.entry(op.stream).or_default().tickets.insert(op.ticket);
        }
        if !self.waits.is_empty() && order(opcode).0 == Order::Streams {
            self.follow(opcode, body, &Touched::by(record, body));
        }
    }

    fn follow(&mut self, opcode: u16, body: &[u8], touched: &Touched) {
        let mut inherited: HashSet<TicketId> = HashSet::new();
        for stream in &touched.streams {
            let related = self.related(*stream).filter_map(|other| self.waits.get(&other));
            related.for_each(|waits| inherited.extend(&waits.tickets));
        }
        if let Some(op) = decoded::<StreamWaitEvent>(opcode, body) {
            inherited.extend(self.events.get(&op.event).into_iter().flatten());
        }
        for stream in &touched.streams {
            if !inherited.is_empty() {
                self.waits.entry(*stream).or_default().tickets.extend(&inherited);
            }
            if let Some(waits) = self.waits.get_mut(stream) {
                waits.ahead += 1;
                waits.copies += u32::from(moves_data(opcode));
            }
        }
        if let Some(op) = decoded::<EventRecord>(opcode, body) {
            match self.waits.get(&op.stream) {
                Some(waits) => drop(self.events.insert(op.event, waits.tickets.clone())),
                None => drop(self.events.remove(&op.event)),
            }
        }
    }

    fn signal(&mut self, ticket: TicketId) {
        let before = self.waits.len();
        self.waits.retain(|_, waits| !(waits.tickets.remove(&ticket) && waits.tickets.is_empty()));
        self.events.retain(|_, tickets| !(tickets.remove(&ticket) && tickets.is_empty()));
        let last_gone = self.gone.remove(&ticket) && self.gone.is_empty();
        self.released |= self.waits.len() < before || last_gone;
    }

    /// Takes the commands set aside, in order, if some of them may be executed now. Each must be given to [`Held::judge_aside`].
    pub(super) fn take(&mut self) -> Option<VecDeque<(Record, Vec<u8>)>> {
        if !std::mem::take(&mut self.released) || self.aside.is_empty() {
            return None;
        }
        self.blocked = Blocked::default();
        self.aside_bytes = 0;
        Some(std::mem::take(&mut self.aside))
    }

    /// Decides again about a command that was set aside, after all earlier ones. `Some` if it must be executed now.
    pub(super) fn judge_aside(&mut self, record: Record, body: Vec<u8>, may_wait: bool) -> Option<Vec<u8>> {
        match self.judge_slowly(&record, &body, may_wait) {
            Verdict::Execute => return Some(body),
            Verdict::Aside => self.set_aside(record, body),
            Verdict::Done => {}
        }
        None
    }

    /// The first command set aside, if there are so many that it must be executed now, whatever it waits for.
    pub(super) fn take_surplus(&mut self) -> Option<(Record, Vec<u8>)> {
        while self.aside_bytes >= MAX_ASIDE {
            let (record, body) = self.aside.pop_front()?;
            self.aside_bytes -= cost(&body);
            if let Some(op) = decoded::<StreamHostWait>(record.opcode, &body) {
                self.blocked.tickets.remove(&op.ticket);
            }
            if !self.is_passed(&record, &body) {
                return Some((record, body));
            }
        }
        None
    }

    /// All commands up to this `seq` have been executed. Call this only when no command taken by [`Held::take`] is left undecided.
    #[inline]
    pub(super) fn executed_upto(&self) -> u64 {
        self.aside.front().map_or(self.last, |(record, _)| record.seq - 1)
    }
}

/// Bytes that a command needs while it is set aside.
fn cost(body: &[u8]) -> usize {
    body.len() + 64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::channel::NO_SLOT;
    use protocol::handle::{ContextId, ModuleId};
    use protocol::ops::context::ContextSynchronize;
    use protocol::ops::copy::MemcpyDtoHInline;
    use protocol::ops::event::{EventCreate, EventDestroy};
    use protocol::ops::memory::{HostRead, HostUnmap, MemAlloc};
    use protocol::ops::module::ModuleUnload;
    use protocol::ops::stream::{StreamMark, StreamSynchronize};
    use std::collections::BTreeSet;

    /// A dispatcher that only records what it would execute.
    #[derive(Default)]
    struct Fake {
        held: Held,
        seq: u64,
        executed: Vec<u64>,
        waiting_calls: HashSet<u16>,
    }

    impl Fake {
        fn run(&mut self, record: Record, body: &[u8]) {
            self.executed.push(record.seq);
            self.held.executed(&record, body, true);
        }

        fn push<'a, T: Op<'a>>(&mut self, op: &T) -> u64 {
            self.push_one(op, false)
        }

        /// Like [`push`](Self::push), for a command whose driver call may wait for the device whenever it is executed.
        fn push_one<'a, T: Op<'a>>(&mut self, op: &T, may_wait: bool) -> u64 {
            let opcode = T::INFO.opcode;
            self.waiting_calls.extend(may_wait.then_some(opcode));
            self.seq += 1;
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let record = Record { opcode: T::INFO.opcode, reply_slot: NO_SLOT, seq: self.seq };
            if self.held.judge(&record, &body, || may_wait) == Verdict::Execute {
                self.run(record, &body);
            }
            while let Some((record, body)) = self.held.take_surplus() {
                self.run(record, &body);
            }
            while let Some(mut aside) = self.held.take() {
                while let Some((record, body)) = aside.pop_front() {
                    let may_wait = self.waiting_calls.contains(&record.opcode);
                    if let Some(body) = self.held.judge_aside(record, body, may_wait) {
                        self.run(record, &body);
                    }
                }
            }
            self.seq
        }

        fn stream(&mut self, stream: u32, flags: u32) -> StreamId {
            let stream = StreamId(stream);
            self.push(&StreamCreate { context: ContextId(0), stream, flags, priority: 0 });
            stream
        }

        fn marks(&mut self, stream: StreamId, count: u32) -> u64 {
            (0..count).map(|_| self.push(&StreamMark { stream })).max().unwrap_or(0)
        }

        fn wait(&mut self, stream: StreamId, ticket: u64) -> u64 {
            self.push(&StreamHostWait { stream, ticket: TicketId(ticket) })
        }

        fn signal(&mut self, ticket: u64) {
            self.push(&StreamHostSignal { ticket: TicketId(ticket) });
        }

        fn has_executed(&self, seq: u64) -> bool {
            self.executed.contains(&seq)
        }
    }

    #[test]
    fn answers_to_page_faults_are_never_set_aside() {
        let mut fake = Fake::default();
        let stream = fake.stream(100, NON_BLOCKING);
        fake.wait(stream, 1);
        fake.marks(stream, AHEAD + 1);
        // This one keeps the session's order, so later commands come after it.
        let unmap = fake.push(&HostUnmap { context: ContextId(0), address: 4096 });
        let read = fake.push(&HostRead { context: ContextId(0), address: 8192, len: 8 });
        assert!(!fake.executed.contains(&unmap) && fake.executed.contains(&read));
        fake.push(&StreamHostSignal { ticket: TicketId(1) });
        assert!(fake.executed.contains(&unmap));
    }

    #[test]
    fn only_commands_of_the_waiting_stream_are_set_aside() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let last = fake.marks(held, AHEAD + 10);
        assert!(!fake.has_executed(last));
        let done = fake.marks(other, 3 * AHEAD);
        assert!(fake.has_executed(done));
        assert!(fake.held.executed_upto() < last);
        fake.signal(1);
        assert!(fake.has_executed(last) && fake.held.executed_upto() == fake.seq);
    }

    #[test]
    fn work_still_waits_after_its_stream_is_destroyed() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let context = ContextId(0);
        let before = fake.push_one(&ContextSynchronize { context }, true);
        fake.push(&StreamDestroy { stream: held });
        let after = fake.push_one(&ContextSynchronize { context }, true);
        assert!(!fake.has_executed(before) && !fake.has_executed(after));
        fake.signal(1);
        assert!(
            fake.has_executed(before) && fake.has_executed(after) && fake.held.executed_upto() == fake.seq
        );
    }

    #[test]
    fn a_copy_whose_result_is_awaited_is_not_enqueued_behind_a_wait() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let ahead = fake.marks(held, 1);
        let copy = |stream| MemcpyDtoHInline { stream, src: 0, len: 4 };
        let behind = fake.push(&copy(held));
        let beside = fake.push(&copy(other));
        assert!(fake.has_executed(ahead) && !fake.has_executed(behind) && fake.has_executed(beside));
        fake.signal(1);
        assert!(fake.has_executed(behind));
    }

    #[test]
    fn waiting_spreads_by_events_and_by_the_legacy_default_stream() {
        let mut fake = Fake::default();
        let held = fake.stream(100, 0);
        let (by_event, by_legacy, free) =
            (fake.stream(101, NON_BLOCKING), fake.stream(102, 0), fake.stream(103, NON_BLOCKING));
        fake.wait(held, 1);
        let event = EventId(7);
        fake.push(&EventRecord { event, stream: held, flags: 0 });
        fake.push(&StreamWaitEvent { stream: by_event, event, flags: 0 });
        let on_event = fake.marks(by_event, 2 * AHEAD);
        let on_legacy = fake.marks(StreamId(0), 2 * AHEAD);
        let on_blocking = fake.marks(by_legacy, 2 * AHEAD);
        let on_free = fake.marks(free, 2 * AHEAD);
        assert!(
            !fake.has_executed(on_event)
                && !fake.has_executed(on_legacy)
                && !fake.has_executed(on_blocking)
                && fake.has_executed(on_free)
        );
        fake.signal(1);
        assert!(
            fake.has_executed(on_event) && fake.has_executed(on_legacy) && fake.has_executed(on_blocking)
        );
    }

    #[test]
    fn a_signal_that_comes_before_its_wait_is_not_lost() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        fake.marks(held, 2 * AHEAD);
        let second = fake.wait(held, 2);
        let last = fake.marks(held, 10);
        fake.signal(2);
        assert!(!fake.has_executed(last));
        fake.signal(1);
        // The second wait is not needed any more.
        assert!(!fake.has_executed(second) && fake.has_executed(last));
    }

    #[test]
    fn commands_in_session_order_wait_for_those_set_aside_but_memory_does_not() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        fake.marks(held, 2 * AHEAD);
        let memory = fake.push(&MemAlloc { address: 0, size: 1 });
        let look = fake.push(&ContextSynchronize { context: ContextId(0) });
        let ahead = fake.marks(other, 1);
        let unload = fake.push(&ModuleUnload { module: ModuleId(1) });
        let behind = fake.marks(other, 1);
        assert!(fake.has_executed(memory) && fake.has_executed(ahead));
        assert!(!fake.has_executed(look) && !fake.has_executed(unload) && !fake.has_executed(behind));
        fake.signal(1);
        assert!(fake.has_executed(look) && fake.has_executed(unload) && fake.has_executed(behind));
    }

    #[test]
    fn the_commands_set_aside_are_bounded() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let body = vec![0; 60_000];
        for _ in 0..2 * MAX_ASIDE / body.len() {
            let src = protocol::data::HostIn::Inline(&body);
            fake.push(&protocol::ops::copy::MemcpyHtoD { stream: held, dst: 0, src });
        }
        assert!(fake.held.aside_bytes < MAX_ASIDE);
        fake.signal(1);
        assert_eq!(fake.executed.len() as u64, fake.seq);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Work(u32),
        Record(u32, u32),
        Await(u32, u32),
        Renew(u32),
        Hold(u32),
        Release(u16),
        Synchronize(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (stream, event) = (0u32..5, 0u32..4);
        let step = prop_oneof![
            8 => stream.clone().prop_map(Step::Work),
            2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Record(s, e)),
            2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Await(s, e)),
            1 => event.prop_map(Step::Renew),
            2 => stream.clone().prop_map(Step::Hold),
            2 => any::<u16>().prop_map(Step::Release),
            1 => stream.prop_map(Step::Synchronize),
        ];
        proptest::collection::vec(step, 1..1200)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// Stream 0 is the legacy default stream, 1 and 2 are ordered with it, 3 and 4 are not.
        #[test]
        fn commands_of_one_stream_or_event_keep_their_order_and_all_are_executed(steps in steps()) {
            let mut fake = Fake::default();
            let id = |s: u32| StreamId(if s == 0 { 0 } else { 100 + s });
            for s in 1..5 {
                fake.stream(100 + s, if s < 3 { 0 } else { NON_BLOCKING });
            }
            let mut touched: HashMap<String, Vec<u64>> = HashMap::new();
            let (mut open, mut tickets) = (Vec::new(), 0);
            let mut unexecuted = BTreeSet::new();
            for step in steps {
                let (seq, names) = match step {
                    Step::Work(s) => (fake.push(&StreamMark { stream: id(s) }), vec![format!("s{s}")]),
                    Step::Record(s, e) => (
                        fake.push(&EventRecord { event: EventId(e), stream: id(s), flags: 0 }),
                        vec![format!("s{s}"), format!("e{e}")],
                    ),
                    Step::Await(s, e) => (
                        fake.push(&StreamWaitEvent { stream: id(s), event: EventId(e), flags: 0 }),
                        vec![format!("s{s}"), format!("e{e}")],
                    ),
                    Step::Renew(e) => {
                        let gone = fake.push(&EventDestroy { event: EventId(e) });
                        touched.entry(format!("e{e}")).or_default().push(gone);
                        let event = EventCreate { context: ContextId(0), event: EventId(e), flags: 0 };
                        (fake.push(&event), vec![format!("e{e}")])
                    }
                    Step::Hold(s) => {
                        tickets += 1;
                        open.push(tickets);
                        let seq = fake.wait(id(s), tickets);
                        unexecuted.insert(seq);
                        (seq, vec![])
                    }
                    Step::Release(n) if !open.is_empty() => {
                        let ticket = open.swap_remove(n as usize % open.len());
                        fake.signal(ticket);
                        continue;
                    }
                    Step::Release(_) => continue,
                    Step::Synchronize(s) => (fake.push(&StreamSynchronize { stream: id(s) }), vec![format!("s{s}")]),
                };
                for name in names {
                    touched.entry(name).or_default().push(seq);
                }
            }
            let position: HashMap<u64, usize> = fake.executed.iter().enumerate().map(|(at, seq)| (*seq, at)).collect();
            for seqs in touched.values() {
                let positions: Vec<usize> = seqs.iter().filter_map(|seq| position.get(seq).copied()).collect();
                prop_assert!(positions.is_sorted());
                // No command is executed while an earlier one of the same stream or event is set aside.
                prop_assert!(seqs.iter().skip_while(|seq| position.contains_key(seq)).all(|seq| !position.contains_key(seq)));
            }
            for ticket in open {
                fake.signal(ticket);
            }
            prop_assert!(fake.held.waits.is_empty() && fake.held.events.is_empty() && fake.held.signalled.is_empty());
            let executed: BTreeSet<u64> = fake.executed.iter().copied().collect();
            // A wait and its signal that met before they were executed are missing.
            let missing = (1..=fake.seq).filter(|seq| !executed.contains(seq)).count();
            prop_assert_eq!(fake.executed.len(), executed.len());
            prop_assert!(missing <= 2 * unexecuted.len());
            prop_assert_eq!(fake.held.executed_upto(), fake.seq);
        }
    }
}
