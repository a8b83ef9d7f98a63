//! Streams that wait for the client, and the commands that wait with them.
//!
//! A stream that waits for the client ([`StreamHostWait`]) goes on only with a later command of the same ring, and a device queue holds only so much: when it is full, the
//! driver's call blocks, and the command that would release it is never read. So while a stream waits, only some hundred commands go on it ahead, few of them with data, and none
//! that may wait for the device. After that its commands are **set aside**, and only its own: what the client does meanwhile on other streams may be
//! just what it waits for before it lets this one go on.
//!
//! Who waits is followed from stream to stream: by events, and by the order of a context's legacy default stream with its others. A command that touches a stream or
//! an event of one that was set aside is set aside as well, behind it. One that makes, unmakes or changes something else (a module, a graph, a texture) keeps the order of the
//! session: everything behind it waits for it. Only what can have no part in any of this (queries, device memory) goes ahead of that.

use std::collections::{HashMap, HashSet, VecDeque};

use protocol::channel::{MAX_CONTEXTS, Record};
use protocol::handle::{EventId, Handle, StreamId, TicketId};
use protocol::ops::event::EventRecord;
use protocol::ops::stream::{StreamCreate, StreamDestroy, StreamHostSignal, StreamHostWait, StreamWaitEvent};
use protocol::ops::{self, Lane, MayBlock, Op, Order};
use protocol::wire::Reader;

/// Commands executed on a stream while it waits for the client; far fewer than a device queue holds.
const AHEAD: u32 = 256;
/// Copies with data of the client's enqueued on streams that wait for it, all together: so many at a time find their staging buffers, and leave as many to others.
const COPIES_AHEAD: u32 = 3;
/// Bytes of commands that may be set aside. A client that goes beyond is held back, as by a full queue.
const MOST_ASIDE: usize = 64 << 20;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// The order that a command keeps, and its lane. A command with an unknown opcode is refused when its turn in the session's order comes.
fn order(opcode: u16) -> (Order, Lane) {
    ops::info(opcode).map_or((Order::Session, Lane::Main), |info| (info.order, info.lane))
}

/// Whether the driver may keep a command's call until its stream has come to it.
fn waits_for_its_stream(opcode: u16) -> bool {
    ops::info(opcode).is_some_and(|info| info.may_block == MayBlock::Stream)
}

/// Whether a command may take buffers between client and device.
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
            // What does not decode is refused when it is executed.
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
    /// Commands executed on it since it began to wait, and those of them that move data.
    ahead: u32,
    copies: u32,
}

/// What commands that were set aside touch.
#[derive(Default)]
struct Blocked {
    streams: HashSet<StreamId>,
    events: HashSet<EventId>,
    /// Tickets that a stream will wait for.
    tickets: HashSet<TicketId>,
    /// One that keeps the session's order is among them.
    all: bool,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Held {
    /// Made streams that are ordered with the legacy default stream of their context: that stream.
    blocking: HashMap<StreamId, StreamId>,
    waits: HashMap<StreamId, Waits>,
    /// What streams waited for when they were destroyed: their work still does.
    gone: HashSet<TicketId>,
    /// Events that were recorded on a stream that waits, with what it waits for.
    events: HashMap<EventId, HashSet<TicketId>>,
    aside: VecDeque<(Record, Vec<u8>)>,
    aside_bytes: usize,
    blocked: Blocked,
    /// Tickets that were signalled before the command to wait for them was executed.
    signalled: HashSet<TicketId>,
    /// The last command that came.
    last: u64,
    /// A stream has ceased to wait since commands were last taken from those set aside.
    moved: bool,
}

/// What is to become of a command that has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is to be executed now.
    Execute,
    /// It was set aside.
    Aside,
    /// It is done: it waited for what has come about already, or lets something go on that has not begun to wait.
    Done,
}

impl Held {
    /// Judges the next command of the session. `may_wait`: executing it may wait for the device.
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

    /// Whether a command waits for what was signalled already.
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

    /// Whether a command that was set aside comes before whatever goes on this stream.
    fn is_blocked(&self, stream: StreamId) -> bool {
        !self.blocked.streams.is_empty()
            && (self.blocked.streams.contains(&stream)
                || self.related(stream).any(|other| self.blocked.streams.contains(&other)))
    }

    /// Streams with which all that goes on this one is ordered.
    fn related(&self, stream: StreamId) -> impl Iterator<Item = StreamId> {
        let legacy = stream.0 < MAX_CONTEXTS;
        let mine = self.blocking.get(&stream).copied();
        let others =
            self.blocking.iter().filter(move |(_, of)| legacy && **of == stream).map(|(other, _)| *other);
        others.chain(mine)
    }

    /// Whether a stream waits and has enough to do already. A copy that answers a waiting caller is never put behind what waits: NVIDIA's driver was seen to stay in that call until the stream
    /// had gone on, and with it the dispatcher, whose answer the client needed for that.
    fn is_full(&self, stream: StreamId, opcode: u16) -> bool {
        let waits = self.waits.get(&stream);
        let waits = waits.or_else(|| self.related(stream).find_map(|other| self.waits.get(&other)));
        let Some(waits) = waits else { return false };
        waits.ahead >= AHEAD
            || waits_for_its_stream(opcode)
            || (moves_data(opcode) && self.waits.values().map(|w| w.copies).sum::<u32>() >= COPIES_AHEAD)
    }

    /// Follows a command that was executed; `done`: with success.
    pub(super) fn executed(&mut self, record: &Record, body: &[u8], done: bool) {
        let opcode = record.opcode;
        if let Some(op) = decoded::<StreamCreate>(opcode, body)
            && op.flags & NON_BLOCKING == 0
        {
            self.blocking.insert(op.stream, StreamId(op.context.0));
        } else if let Some(op) = decoded::<StreamDestroy>(opcode, body) {
            // What is still on it goes on; another stream may have its number now.
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
        self.moved |= self.waits.len() < before || last_gone;
    }

    /// The commands that were set aside, in their order, if some of them may be executed now. Each is to be judged by [`Held::judge_aside`].
    pub(super) fn take(&mut self) -> Option<VecDeque<(Record, Vec<u8>)>> {
        if !std::mem::take(&mut self.moved) || self.aside.is_empty() {
            return None;
        }
        self.blocked = Blocked::default();
        self.aside_bytes = 0;
        Some(std::mem::take(&mut self.aside))
    }

    /// Judges a command that was set aside, after all that were set aside before it. `Some`: it is to be executed now.
    pub(super) fn judge_aside(&mut self, record: Record, body: Vec<u8>, may_wait: bool) -> Option<Vec<u8>> {
        match self.judge_slowly(&record, &body, may_wait) {
            Verdict::Execute => return Some(body),
            Verdict::Aside => self.set_aside(record, body),
            Verdict::Done => {}
        }
        None
    }

    /// The first command that was set aside, if so many were that it must be executed now, whatever it waits for.
    pub(super) fn take_surplus(&mut self) -> Option<(Record, Vec<u8>)> {
        while self.aside_bytes >= MOST_ASIDE {
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

    /// All commands up to this have been executed. To be asked when none of those taken by [`Held::take`] is left to be judged.
    #[inline]
    pub(super) fn executed_upto(&self) -> u64 {
        self.aside.front().map_or(self.last, |(record, _)| record.seq - 1)
    }
}

/// Bytes that a command takes while it is set aside.
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

    /// A dispatcher that executes nothing, but writes down what it would execute.
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

        /// As [`push`](Self::push), of one that the driver may keep until the device's work is done, whenever it is executed.
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

        fn did(&self, seq: u64) -> bool {
            self.executed.contains(&seq)
        }
    }

    #[test]
    fn what_answers_a_fault_of_a_host_function_is_never_set_aside() {
        let mut fake = Fake::default();
        let stream = fake.stream(100, NON_BLOCKING);
        fake.wait(stream, 1);
        fake.marks(stream, AHEAD + 1);
        // It keeps the session's order, so that all that come later come after it.
        let unmap = fake.push(&HostUnmap { context: ContextId(0), address: 4096 });
        let read = fake.push(&HostRead { context: ContextId(0), address: 8192, len: 8 });
        assert!(!fake.executed.contains(&unmap) && fake.executed.contains(&read));
        fake.push(&StreamHostSignal { ticket: TicketId(1) });
        assert!(fake.executed.contains(&unmap));
    }

    #[test]
    fn a_stream_that_waits_sets_its_own_commands_aside_and_no_others() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let last = fake.marks(held, AHEAD + 10);
        assert!(!fake.did(last));
        let done = fake.marks(other, 3 * AHEAD);
        assert!(fake.did(done));
        assert!(fake.held.executed_upto() < last);
        fake.signal(1);
        assert!(fake.did(last) && fake.held.executed_upto() == fake.seq);
    }

    #[test]
    fn what_waits_goes_on_waiting_when_its_stream_is_destroyed() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let context = ContextId(0);
        let before = fake.push_one(&ContextSynchronize { context }, true);
        fake.push(&StreamDestroy { stream: held });
        let after = fake.push_one(&ContextSynchronize { context }, true);
        assert!(!fake.did(before) && !fake.did(after));
        fake.signal(1);
        assert!(fake.did(before) && fake.did(after) && fake.held.executed_upto() == fake.seq);
    }

    #[test]
    fn a_copy_that_answers_a_caller_is_not_put_behind_what_waits() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let ahead = fake.marks(held, 1);
        let copy = |stream| MemcpyDtoHInline { stream, src: 0, len: 4 };
        let behind = fake.push(&copy(held));
        let beside = fake.push(&copy(other));
        assert!(fake.did(ahead) && !fake.did(behind) && fake.did(beside));
        fake.signal(1);
        assert!(fake.did(behind));
    }

    #[test]
    fn waiting_passes_on_by_events_and_by_the_legacy_default_stream() {
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
        assert!(!fake.did(on_event) && !fake.did(on_legacy) && !fake.did(on_blocking) && fake.did(on_free));
        fake.signal(1);
        assert!(fake.did(on_event) && fake.did(on_legacy) && fake.did(on_blocking));
    }

    #[test]
    fn a_signal_before_its_wait_was_executed_is_not_lost() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        fake.marks(held, 2 * AHEAD);
        let second = fake.wait(held, 2);
        let last = fake.marks(held, 10);
        fake.signal(2);
        assert!(!fake.did(last));
        fake.signal(1);
        // The second wait has nothing to wait for any more.
        assert!(!fake.did(second) && fake.did(last));
    }

    #[test]
    fn what_keeps_the_sessions_order_waits_for_what_was_set_aside_and_memory_does_not() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        fake.marks(held, 2 * AHEAD);
        let memory = fake.push(&MemAlloc { address: 0, size: 1 });
        let look = fake.push(&ContextSynchronize { context: ContextId(0) });
        let ahead = fake.marks(other, 1);
        let unload = fake.push(&ModuleUnload { module: ModuleId(1) });
        let behind = fake.marks(other, 1);
        assert!(fake.did(memory) && fake.did(ahead));
        assert!(!fake.did(look) && !fake.did(unload) && !fake.did(behind));
        fake.signal(1);
        assert!(fake.did(look) && fake.did(unload) && fake.did(behind));
    }

    #[test]
    fn what_is_set_aside_is_bounded() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let body = vec![0; 60_000];
        for _ in 0..2 * MOST_ASIDE / body.len() {
            let src = protocol::data::HostIn::Inline(&body);
            fake.push(&protocol::ops::copy::MemcpyHtoD { stream: held, dst: 0, src });
        }
        assert!(fake.held.aside_bytes < MOST_ASIDE);
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
        fn commands_of_one_stream_or_event_keep_their_order_and_all_are_executed_in_the_end(steps in steps()) {
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
            let place: HashMap<u64, usize> = fake.executed.iter().enumerate().map(|(at, seq)| (*seq, at)).collect();
            for seqs in touched.values() {
                let places: Vec<usize> = seqs.iter().filter_map(|seq| place.get(seq).copied()).collect();
                prop_assert!(places.is_sorted());
                // And none is executed while an earlier one is set aside.
                prop_assert!(seqs.iter().skip_while(|seq| place.contains_key(seq)).all(|seq| !place.contains_key(seq)));
            }
            for ticket in open {
                fake.signal(ticket);
            }
            prop_assert!(fake.held.waits.is_empty() && fake.held.events.is_empty() && fake.held.signalled.is_empty());
            let executed: BTreeSet<u64> = fake.executed.iter().copied().collect();
            // But for waits and signals that met before they were executed.
            let missing = (1..=fake.seq).filter(|seq| !executed.contains(seq)).count();
            prop_assert_eq!(fake.executed.len(), executed.len());
            prop_assert!(missing <= 2 * unexecuted.len());
            prop_assert_eq!(fake.held.executed_upto(), fake.seq);
        }
    }
}
