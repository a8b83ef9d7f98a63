//! Streams that wait for the client, and the commands that are held back with them.
//!
//! A stream waits for the client from a [`StreamHostWait`] until the [`StreamHostSignal`] with the same ticket. The server keeps that wait to itself: the device never sees it. So it takes no
//! place in the device's queues, and no call of the driver can block because of it. What comes behind the wait is **held** until the signal, and then given to the driver.
//!
//! Waiting spreads from stream to stream: by events, and by the order between a context's legacy default stream and its blocking streams. It also spreads by the order that each operation
//! has in the table ([`Order`]). Commands that nothing orders with a held one are executed, because the client may need their results before it signals.
//!
//! Held commands and open waits form a graph. Each counts the earlier ones that it still has to follow; [`Ends`] knows, for everything that commands can have in common, the last one held.
//! So a signal costs what it releases, however much is held.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use host_bridge::endpoint::{Lost, Mapped};
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS, Record};
use protocol::handle::{ContextId, Handle, StreamId, TicketId};
use protocol::ops::context::{ContextCreate, ContextSynchronize};
use protocol::ops::green::GreenStream;
use protocol::ops::memory::MemShrink;
use protocol::ops::stream::{StreamCreate, StreamDestroy, StreamHostSignal, StreamHostWait};
use protocol::ops::{self, Lane, Op, Order};
use protocol::wire::Reader;

/// Maximum bytes of held commands.
const MAX_HELD: usize = 256 << 20;
/// Maximum number of signals remembered whose waits have not come. A client signals after it has asked for the wait, so few are under way at a time.
const MAX_EARLY: usize = 1 << 16;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

const CONTEXT_CREATE: u16 = <ContextCreate as Op>::INFO.opcode;
const STREAM_CREATE: u16 = <StreamCreate as Op>::INFO.opcode;
const GREEN_STREAM: u16 = <GreenStream as Op>::INFO.opcode;
const WAIT: u16 = <StreamHostWait as Op>::INFO.opcode;
const SIGNAL: u16 = <StreamHostSignal as Op>::INFO.opcode;

/// A command's body, decoded, if it is this operation.
fn decoded<'a, T: Op<'a>>(opcode: u16, body: &'a [u8]) -> Option<T> {
    (opcode == T::INFO.opcode).then(|| T::get(&mut Reader::new(body)).ok()).flatten()
}

/// Everything by which a command is ordered with others.
struct Ties {
    order: Order,
    /// What it names, if its order depends on that.
    named: Vec<Handle>,
    /// Which work it comes after, if its order is [`Order::Earlier`].
    scope: Scope,
}

/// The work that an [`Order::Earlier`] command comes after.
#[derive(Clone, Copy)]
enum Scope {
    Session,
    Context(ContextId),
    Device(u32),
}

impl Ties {
    /// A command with an unknown opcode keeps the session's order, and one that cannot be decoded names nothing. Both are refused when they are executed.
    fn of(opcode: u16, body: &[u8]) -> Ties {
        let (mut order, mut named, mut scope) = (Order::Session, Vec::new(), Scope::Session);
        if let Some(info) = ops::info(opcode) {
            order = info.order;
            if matches!(order, Order::Streams | Order::Object) {
                let _ = (info.visit_handles)(body, &mut |handle| named.push(handle));
                if named.is_empty() {
                    order = Order::Earlier;
                }
            }
            if let Some(op) = decoded::<ContextSynchronize>(opcode, body) {
                scope = Scope::Context(op.context);
            } else if let Some(op) = decoded::<MemShrink>(opcode, body) {
                scope = Scope::Device(op.device);
            }
        }
        Ties { order, named, scope }
    }

    /// Whether it changes this object, so that it comes between the earlier and the later commands that use it.
    fn changes(&self, handle: &Handle) -> bool {
        self.order == Order::Object || matches!(handle, Handle::Stream(_) | Handle::Event(_))
    }
}

/// A command that is held, or a wait that is open.
struct Held {
    record: Record,
    body: Vec<u8>,
    named: Vec<Handle>,
    /// The number of earlier commands that it has to follow and that are still there.
    missing: usize,
    /// The commands that have to follow it.
    followers: Vec<u64>,
    /// Bytes that it takes, without its body.
    cost: usize,
    /// Memory of the client's that it names.
    _kept: Vec<Mapped>,
}

/// The last of the held commands in every order that there is, by `seq`. Whatever follows these follows all.
#[derive(Default)]
struct Ends {
    /// Of a stream or an event; of those that change a function or a graph.
    of: HashMap<Handle, u64>,
    /// Those that use a function or a graph as it is now.
    users: HashMap<Handle, BTreeSet<u64>>,
    /// Those that name nothing, and those that destroy a stream, with what it was: another stream may get its number before they are executed.
    others: BTreeMap<u64, Option<Made>>,
    /// In the session's order.
    session: Option<u64>,
}

impl Ends {
    /// All of them.
    fn all(&self) -> impl Iterator<Item = u64> {
        let users = self.users.values().flatten();
        self.of.values().chain(self.others.keys()).chain(users).copied().chain(self.session)
    }

    fn add(&mut self, seq: u64, ties: &Ties) {
        match ties.order {
            Order::Session => *self = Ends { session: Some(seq), ..Ends::default() },
            Order::Earlier | Order::None => drop(self.others.insert(seq, None)),
            Order::Streams | Order::Object => {
                for handle in &ties.named {
                    if ties.changes(handle) {
                        self.of.insert(*handle, seq);
                        self.users.remove(handle);
                    } else {
                        self.users.entry(*handle).or_default().insert(seq);
                    }
                }
            }
        }
    }

    fn remove(&mut self, seq: u64, named: &[Handle]) {
        for handle in named {
            if self.of.get(handle) == Some(&seq) {
                self.of.remove(handle);
            }
            if let Some(users) = self.users.get_mut(handle) {
                users.remove(&seq);
                if users.is_empty() {
                    self.users.remove(handle);
                }
            }
        }
        self.others.remove(&seq);
        self.session = self.session.filter(|session| *session != seq);
    }
}

/// A stream's context, and whether it is ordered with that context's legacy default stream.
#[derive(Clone, Copy)]
struct Made {
    context: ContextId,
    blocking: bool,
}

/// The streams that wait for the client, and what is held.
#[derive(Default)]
pub(super) struct HostWaits {
    streams: HashMap<StreamId, Made>,
    /// The devices of contexts that the program made.
    devices: HashMap<ContextId, u32>,
    held: HashMap<u64, Held>,
    ends: Ends,
    /// Held commands that have nothing left to follow.
    ready: BTreeSet<u64>,
    /// Open waits: each ticket, and the command that waits for it.
    open: HashMap<TicketId, u64>,
    /// Tickets that were signalled before their wait was executed.
    early: HashSet<TicketId>,
    /// Held commands that name data of the client's.
    with_data: BTreeSet<u64>,
    bytes: usize,
    /// `seq` of the last command that came.
    last: u64,
}

/// What to do with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Execute it now.
    Execute,
    /// Nothing: it is held.
    Hold,
}

impl HostWaits {
    /// Decides what to do with the next command of the session. `keep` takes hold of the memory that it names, in case it is held.
    #[inline]
    pub(super) fn judge(
        &mut self,
        record: &Record,
        body: &[u8],
        keep: impl FnOnce() -> Vec<Mapped>,
    ) -> Verdict {
        self.last = record.seq;
        if matches!(record.opcode, CONTEXT_CREATE | STREAM_CREATE | GREEN_STREAM) {
            self.note(record.opcode, body);
        }
        if self.held.is_empty() { Verdict::Execute } else { self.judge_slowly(record, body, keep) }
    }

    /// Notes how a new stream or context is related to others.
    fn note(&mut self, opcode: u16, body: &[u8]) {
        if let Some(op) = decoded::<ContextCreate>(opcode, body).filter(|op| op.context.0 < MAX_CONTEXTS) {
            self.devices.insert(op.context, op.device);
        } else if let Some(op) = decoded::<StreamCreate>(opcode, body).filter(|op| op.stream.0 < MAX_STREAMS)
        {
            let made = Made { context: op.context, blocking: op.flags & NON_BLOCKING == 0 };
            self.streams.insert(op.stream, made);
        } else if let Some(op) = decoded::<GreenStream>(opcode, body) {
            // Not ordered with any other, and of a context that only the driver knows.
            self.streams.remove(&op.stream);
        }
    }

    fn judge_slowly(&mut self, record: &Record, body: &[u8], keep: impl FnOnce() -> Vec<Mapped>) -> Verdict {
        let info = ops::info(record.opcode);
        if info.is_some_and(|info| info.lane == Lane::Express) {
            return Verdict::Execute;
        }
        let ties = Ties::of(record.opcode, body);
        let mut first = self.to_follow(&ties);
        first.sort_unstable();
        first.dedup();
        if first.is_empty() {
            return Verdict::Execute;
        }
        for seq in &first {
            if let Some(held) = self.held.get_mut(seq) {
                held.followers.push(record.seq);
            }
        }
        if let Some(op) = decoded::<StreamDestroy>(record.opcode, body)
            && let Some(made) = self.streams.get(&op.stream)
        {
            self.ends.others.insert(record.seq, Some(*made));
        }
        if info.is_some_and(|info| info.carries_data) {
            self.with_data.insert(record.seq);
        }
        self.hold(record, body.to_vec(), ties, first.len(), keep());
        Verdict::Hold
    }

    fn hold(&mut self, record: &Record, body: Vec<u8>, ties: Ties, missing: usize, kept: Vec<Mapped>) {
        self.ends.add(record.seq, &ties);
        let Ties { named, .. } = ties;
        let cost = size_of::<Held>() + missing * size_of::<u64>();
        self.bytes += cost + body.len();
        let held = Held { record: *record, body, named, missing, followers: Vec::new(), cost, _kept: kept };
        self.held.insert(record.seq, held);
    }

    /// The held commands that one with these ties has to follow.
    fn to_follow(&self, ties: &Ties) -> Vec<u64> {
        let ends = &self.ends;
        let mut first: Vec<u64> = ends.session.into_iter().collect();
        match (ties.order, ties.scope) {
            (Order::None, _) => {}
            (Order::Session, _) | (Order::Earlier, Scope::Session) => first.extend(ends.all()),
            (Order::Earlier, scope) => {
                let inside = ends.of.iter().filter(|(handle, _)| self.is_inside(handle, scope));
                first.extend(inside.map(|(_, seq)| seq));
                let destroyed =
                    |made: &Option<Made>| made.is_some_and(|made| self.covers(scope, made.context));
                first.extend(ends.others.iter().filter(|(_, made)| destroyed(made)).map(|(seq, _)| seq));
            }
            (Order::Streams | Order::Object, _) => {
                for handle in &ties.named {
                    first.extend(ends.of.get(handle));
                    if ties.changes(handle) {
                        first.extend(ends.users.get(handle).into_iter().flatten());
                    }
                    if let Handle::Stream(stream) = handle {
                        self.follow_related(*stream, &mut first);
                    }
                }
            }
        }
        first
    }

    /// Adds the last held commands of the streams with which all work of this one is ordered.
    fn follow_related(&self, stream: StreamId, first: &mut Vec<u64>) {
        let ends = &self.ends;
        if stream.0 < MAX_CONTEXTS {
            let related = |made: &Made| made.blocking && made.context.0 == stream.0;
            let blocking = |handle: &Handle| match handle {
                Handle::Stream(other) => self.streams.get(other).is_some_and(related),
                _ => false,
            };
            first.extend(ends.of.iter().filter(|(handle, _)| blocking(handle)).map(|(_, seq)| seq));
            let destroyed = ends.others.iter().filter(|(_, made)| made.as_ref().is_some_and(related));
            first.extend(destroyed.map(|(seq, _)| seq));
        } else if let Some(made) = self.streams.get(&stream).filter(|made| made.blocking) {
            first.extend(ends.of.get(&Handle::Stream(StreamId(made.context.0))));
        }
    }

    /// Whether an object is a stream that may be in this scope. A stream whose context is not known may be.
    fn is_inside(&self, handle: &Handle, scope: Scope) -> bool {
        let Handle::Stream(stream) = handle else { return false };
        let made = self.streams.get(stream).map(|made| made.context);
        let context = made.or((stream.0 < MAX_CONTEXTS).then_some(ContextId(stream.0)));
        context.is_none_or(|context| self.covers(scope, context))
    }

    fn covers(&self, scope: Scope, context: ContextId) -> bool {
        match scope {
            Scope::Session => true,
            Scope::Context(of) => of == context,
            // Other contexts are the devices' primary ones.
            Scope::Device(device) => *self.devices.get(&context).unwrap_or(&context.0) == device,
        }
    }

    /// A command has been executed. `done`: without an error.
    ///
    /// # Errors
    /// A client that signals what nothing waits for, over and over.
    #[inline]
    pub(super) fn executed(&mut self, record: &Record, body: &[u8], done: bool) -> Result<(), Lost> {
        match record.opcode {
            SIGNAL => {
                if let Some(op) = decoded::<StreamHostSignal>(SIGNAL, body) {
                    self.signal(op.ticket)?;
                }
            }
            WAIT => self.begin_wait(record, body, done),
            _ if !self.held.is_empty() => self.finish(record.seq),
            _ => {}
        }
        Ok(())
    }

    /// A stream has come to a wait. It waits from now on, unless it was signalled already or the stream does not exist.
    fn begin_wait(&mut self, record: &Record, body: &[u8], done: bool) {
        let Some(op) = decoded::<StreamHostWait>(WAIT, body) else { return };
        if self.early.remove(&op.ticket) || !done {
            return self.finish(record.seq);
        }
        self.open.insert(op.ticket, record.seq);
        if !self.held.contains_key(&record.seq) {
            self.hold(record, Vec::new(), Ties::of(WAIT, body), 0, Vec::new());
        }
    }

    fn signal(&mut self, ticket: TicketId) -> Result<(), Lost> {
        if let Some(seq) = self.open.remove(&ticket) {
            self.finish(seq);
        } else if self.early.len() < MAX_EARLY {
            self.early.insert(ticket);
        } else {
            return Err(Lost::new(format!(
                "the client has signalled {MAX_EARLY} tickets for which no stream waits"
            )));
        }
        Ok(())
    }

    /// A held command is done with, or a wait is over: what followed it may go on.
    fn finish(&mut self, seq: u64) {
        let Some(held) = self.held.remove(&seq) else { return };
        self.bytes -= held.cost + held.body.len();
        self.with_data.remove(&seq);
        self.ends.remove(seq, &held.named);
        for follower in held.followers {
            if let Some(held) = self.held.get_mut(&follower) {
                held.missing -= 1;
                if held.missing == 0 {
                    self.ready.insert(follower);
                }
            }
        }
    }

    /// A held command that must be executed now, and then given to [`HostWaits::executed`] like any other.
    pub(super) fn next_ready(&mut self) -> Option<(Record, Vec<u8>)> {
        let held = self.held.get_mut(&self.ready.pop_first()?)?;
        let body = std::mem::take(&mut held.body);
        self.bytes -= body.len();
        Some((held.record, body))
    }

    /// Whether so much is held that the session cannot go on.
    ///
    /// # Errors
    /// Says so to the program's user.
    pub(super) fn check_size(&self) -> Result<(), Lost> {
        if self.bytes < MAX_HELD {
            return Ok(());
        }
        Err(Lost::new(format!(
            "{} MiB of commands wait behind a host function or a memory wait of the program",
            MAX_HELD >> 20
        )))
    }

    /// Of all commands up to this `seq`, none will ask for its data any more. Call this only when [`HostWaits::next_ready`] has nothing left.
    #[inline]
    pub(super) fn executed_upto(&self) -> u64 {
        self.with_data.first().map_or(self.last, |seq| seq - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::channel::NO_SLOT;
    use protocol::data::{HostIn, HostRange, Place};
    use protocol::handle::{EventId, FunctionId, ModuleId};
    use protocol::ops::array::TextureDestroy;
    use protocol::ops::context::{ContextDestroy, ContextSetLimit};
    use protocol::ops::copy::{MemcpyDtoHInline, MemcpyHtoD};
    use protocol::ops::event::{EventCreate, EventDestroy, EventRecord};
    use protocol::ops::launch::Launch;
    use protocol::ops::memory::{HostRead, MemAlloc, MemGetInfo};
    use protocol::ops::module::{FunctionPreset, ModuleGetGlobal, ModuleLoadByName, ModuleUnload};
    use protocol::ops::stream::{StreamMark, StreamSynchronize, StreamWaitEvent};

    /// A dispatcher that only records what it would execute.
    #[derive(Default)]
    struct Fake {
        waits: HostWaits,
        seq: u64,
        executed: Vec<u64>,
        /// Streams that do not exist.
        missing: Vec<StreamId>,
    }

    impl Fake {
        fn run(&mut self, record: Record, body: &[u8]) {
            self.executed.push(record.seq);
            let stream = decoded::<StreamHostWait>(record.opcode, body).map(|op| op.stream);
            let done = stream.is_none_or(|stream| !self.missing.contains(&stream));
            self.waits.executed(&record, body, done).expect("few signals");
        }

        fn push<'a, T: Op<'a>>(&mut self, op: &T) -> u64 {
            self.seq += 1;
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let record = Record { opcode: T::INFO.opcode, reply_slot: NO_SLOT, seq: self.seq };
            if self.waits.judge(&record, &body, Vec::new) == Verdict::Execute {
                self.run(record, &body);
            }
            while let Some((record, body)) = self.waits.next_ready() {
                self.run(record, &body);
            }
            self.seq
        }

        fn stream(&mut self, stream: u32, flags: u32) -> StreamId {
            self.stream_in(ContextId(0), stream, flags)
        }

        fn stream_in(&mut self, context: ContextId, stream: u32, flags: u32) -> StreamId {
            let stream = StreamId(stream);
            self.push(&StreamCreate { context, stream, flags, priority: 0 });
            stream
        }

        fn mark(&mut self, stream: StreamId) -> u64 {
            self.push(&StreamMark { stream })
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

        fn launch(&mut self, stream: StreamId, function: FunctionId) -> u64 {
            let (grid, block) = ([1; 3], [1; 3]);
            let attributes = Vec::new();
            self.push(&Launch { function, stream, grid, block, dynamic_shared: 0, attributes, params: &[] })
        }
    }

    #[test]
    fn answers_to_page_faults_are_never_held() {
        let mut fake = Fake::default();
        let stream = fake.stream(100, NON_BLOCKING);
        fake.wait(stream, 1);
        let session = fake.push(&ContextSetLimit { context: ContextId(0), limit: 0, value: 0 });
        let read = fake.push(&HostRead { context: ContextId(0), address: 8192, len: 8 });
        assert!(!fake.has_executed(session) && fake.has_executed(read));
        fake.signal(1);
        assert!(fake.has_executed(session));
    }

    #[test]
    fn only_commands_of_the_waiting_stream_are_held_and_in_order() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let behind: Vec<u64> = (0..100).map(|_| fake.mark(held)).collect();
        let beside = fake.mark(other);
        assert!(!fake.has_executed(behind[0]) && fake.has_executed(beside));
        fake.signal(1);
        assert!(fake.executed.ends_with(&behind));
        assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0);
    }

    #[test]
    fn a_wait_holds_its_stream_until_its_own_signal() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let between = fake.mark(held);
        fake.wait(held, 2);
        let behind = fake.mark(held);
        fake.signal(1);
        assert!(fake.has_executed(between) && !fake.has_executed(behind));
        fake.signal(2);
        assert!(fake.has_executed(behind));
    }

    #[test]
    fn an_early_signal_is_remembered_once() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.signal(7);
        fake.wait(held, 7);
        let free = fake.mark(held);
        assert!(fake.has_executed(free));
        fake.wait(held, 1);
        fake.wait(held, 2);
        let last = fake.mark(held);
        fake.signal(2);
        assert!(!fake.has_executed(last));
        fake.signal(1);
        assert!(fake.has_executed(last) && fake.waits.early.is_empty());
    }

    #[test]
    fn signals_that_nothing_waits_for_are_bounded() {
        let mut waits = HostWaits::default();
        let signal = |waits: &mut HostWaits, ticket| {
            let mut body = Vec::new();
            ops::encode(&StreamHostSignal { ticket: TicketId(ticket) }, &mut body);
            let record = Record { opcode: SIGNAL, reply_slot: NO_SLOT, seq: ticket + 1 };
            waits.executed(&record, &body, true)
        };
        for ticket in 0..MAX_EARLY as u64 {
            assert_eq!(signal(&mut waits, ticket), Ok(()));
        }
        assert!(signal(&mut waits, 1 << 40).is_err());
    }

    #[test]
    fn a_wait_of_a_stream_that_does_not_exist_holds_nothing() {
        let mut fake = Fake::default();
        let nowhere = StreamId(99);
        fake.missing.push(nowhere);
        fake.wait(nowhere, 1);
        let behind = fake.mark(nowhere);
        assert!(fake.has_executed(behind) && fake.waits.held.is_empty());
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
        let beside = fake.mark(by_legacy);
        let behind = [fake.mark(by_event), fake.mark(StreamId(0)), fake.mark(by_legacy)];
        let on_free = fake.mark(free);
        assert!(fake.has_executed(beside), "blocking streams are not ordered with each other");
        assert!(behind.iter().all(|seq| !fake.has_executed(*seq)) && fake.has_executed(on_free));
        fake.signal(1);
        assert!(behind.iter().all(|seq| fake.has_executed(*seq)));
    }

    #[test]
    fn work_still_counts_after_its_stream_is_destroyed_and_its_number_used_again() {
        let mut fake = Fake::default();
        let held = fake.stream(100, 0);
        fake.wait(held, 1);
        fake.push(&StreamDestroy { stream: held });
        fake.stream_in(ContextId(1), held.0, NON_BLOCKING);
        let synchronize = fake.push(&ContextSynchronize { context: ContextId(0) });
        let legacy = fake.mark(StreamId(0));
        let elsewhere = fake.mark(StreamId(1));
        assert!(
            !fake.has_executed(synchronize) && !fake.has_executed(legacy) && fake.has_executed(elsewhere)
        );
        fake.signal(1);
        assert!(fake.has_executed(synchronize) && fake.has_executed(legacy));
    }

    #[test]
    fn a_context_is_synchronized_while_another_ones_streams_wait() {
        let mut fake = Fake::default();
        fake.push(&ContextCreate { context: ContextId(40), device: 1, flags: 0 });
        let held = fake.stream_in(ContextId(40), 100, NON_BLOCKING);
        fake.wait(held, 1);
        let shrink = |device| MemShrink { device, address: 0, size: 1 };
        let free = [
            fake.push(&ContextSynchronize { context: ContextId(0) }),
            fake.push(&ContextSynchronize { context: ContextId(1) }),
            fake.push(&shrink(0)),
        ];
        assert!(free.iter().all(|seq| fake.has_executed(*seq)));
        let bound = [fake.push(&ContextSynchronize { context: ContextId(40) }), fake.push(&shrink(1))];
        assert!(bound.iter().all(|seq| !fake.has_executed(*seq)));
        fake.signal(1);
        assert!(bound.iter().all(|seq| fake.has_executed(*seq)));
    }

    #[test]
    fn the_session_order_holds_everything_and_memory_nothing() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let memory = fake.push(&MemAlloc { address: 0, size: 1 });
        let unload = fake.push(&ModuleUnload { module: ModuleId(1) });
        let ahead = fake.mark(other);
        assert!(fake.has_executed(memory) && !fake.has_executed(unload) && fake.has_executed(ahead));
        let destroy = fake.push(&ContextDestroy { context: ContextId(0) });
        let behind = [fake.mark(other), fake.push(&MemGetInfo { device: 0 })];
        assert!(!fake.has_executed(destroy) && behind.iter().all(|seq| !fake.has_executed(*seq)));
        fake.signal(1);
        assert!(fake.executed.ends_with(&[unload, destroy, behind[0], behind[1]]));
    }

    #[test]
    fn a_question_about_a_module_stays_behind_its_load() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let destroy = fake.push(&ContextDestroy { context: ContextId(0) });
        let (context, module, image) = (ContextId(1), ModuleId(1), HostIn::Inline(&[]));
        let load = fake.push(&ModuleLoadByName { context, module, image });
        let question = fake.push(&ModuleGetGlobal { module, name: "variable" });
        assert!(!fake.has_executed(load) && !fake.has_executed(question));
        fake.signal(1);
        assert!(fake.executed.ends_with(&[destroy, load, question]));
    }

    #[test]
    fn a_functions_change_stays_between_its_launches() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        let (function, another) = (FunctionId(1), FunctionId(2));
        fake.wait(held, 1);
        let first = fake.launch(held, function);
        let beside = fake.launch(other, function);
        let change = fake.push(&FunctionPreset { function, attribute: 8, value: 1 });
        let changed_freely = fake.push(&FunctionPreset { function: another, attribute: 8, value: 1 });
        let second = fake.launch(other, function);
        assert!(fake.has_executed(beside) && fake.has_executed(changed_freely));
        assert!(!fake.has_executed(change) && !fake.has_executed(second));
        fake.signal(1);
        assert!(fake.executed.ends_with(&[first, change, second]));
    }

    #[test]
    fn a_result_is_not_awaited_before_its_stream_goes_on() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        let copy = |stream| MemcpyDtoHInline { stream, src: 0, len: 4 };
        let behind = fake.push(&copy(held));
        let beside = fake.push(&copy(other));
        assert!(!fake.has_executed(behind) && fake.has_executed(beside));
        fake.signal(1);
        assert!(fake.has_executed(behind));
    }

    #[test]
    fn only_held_data_keeps_the_data_of_later_commands() {
        let mut fake = Fake::default();
        let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(held, 1);
        fake.mark(held);
        let beside = fake.mark(other);
        assert_eq!(fake.waits.executed_upto(), beside);
        let src = HostIn::Range(HostRange { place: Place::Arena, offset: 0, len: 8 });
        let copy = fake.push(&MemcpyHtoD { stream: held, dst: 0, src });
        fake.mark(other);
        assert_eq!(fake.waits.executed_upto(), copy - 1);
        fake.signal(1);
        assert_eq!(fake.waits.executed_upto(), fake.seq);
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut fake = Fake::default();
        let held = fake.stream(100, NON_BLOCKING);
        fake.wait(held, 1);
        let body = vec![0; 60_000];
        let mut count = 0;
        while fake.waits.check_size().is_ok() {
            fake.push(&MemcpyHtoD { stream: held, dst: 0, src: HostIn::Inline(&body) });
            count += 1;
        }
        assert!(count >= MAX_HELD / 2 / body.len() && count <= MAX_HELD / body.len() + 1);
        fake.signal(1);
        assert!(fake.waits.check_size().is_ok() && fake.waits.bytes == 0);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Work(u32),
        Launch(u32, u64),
        Change(u64),
        Record(u32, u32),
        Await(u32, u32),
        RenewEvent(u32),
        RenewStream(u32),
        Hold(u32),
        /// A signal, for a wait that is yet to come if `true`.
        Release(u16, bool),
        Synchronize(u32),
        SynchronizeContext(u32),
        Destroy,
        Ask,
        Session,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (stream, event, function) = (0u32..8, 0u32..4, 0u64..3);
        let step = prop_oneof![
            8 => stream.clone().prop_map(Step::Work),
            3 => (stream.clone(), function.clone()).prop_map(|(s, f)| Step::Launch(s, f)),
            1 => function.prop_map(Step::Change),
            2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Record(s, e)),
            2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Await(s, e)),
            1 => event.prop_map(Step::RenewEvent),
            1 => (1u32..5).prop_map(Step::RenewStream),
            4 => stream.clone().prop_map(Step::Hold),
            4 => (any::<u16>(), prop::bool::weighted(0.2)).prop_map(|(n, early)| Step::Release(n, early)),
            1 => stream.prop_map(Step::Synchronize),
            1 => (0u32..2).prop_map(Step::SynchronizeContext),
            1 => Just(Step::Destroy),
            1 => Just(Step::Ask),
            1 => Just(Step::Session),
        ];
        proptest::collection::vec(step, 1..150)
    }

    /// A command as the model sees it.
    #[derive(Debug, Clone)]
    struct Said {
        seq: u64,
        order: Order,
        streams: Vec<u32>,
        events: Vec<u32>,
        function: Option<u64>,
        scope: Option<u32>,
        ticket: Option<u64>,
    }

    impl Said {
        fn new(seq: u64, order: Order) -> Said {
            let (streams, events) = (Vec::new(), Vec::new());
            Said { seq, order, streams, events, function: None, scope: None, ticket: None }
        }

        fn on(mut self, stream: u32) -> Said {
            self.streams.push(stream);
            self
        }

        fn with(mut self, event: u32) -> Said {
            self.events.push(event);
            self
        }

        /// Whether it must come after `earlier`, said from the rules alone.
        fn follows(&self, earlier: &Said) -> bool {
            if self.order == Order::Session || earlier.order == Order::Session {
                return true;
            }
            let contexts = |said: &Said| said.streams.iter().map(|s| context(*s)).collect::<Vec<_>>();
            if self.order == Order::Earlier {
                return self.scope.is_none_or(|scope| contexts(earlier).contains(&scope));
            }
            let ordered = |a: u32, b: u32| {
                a == b
                    || (context(a) == context(b)
                        && [(a, b), (b, a)].iter().any(|(l, s)| is_legacy(*l) && is_blocking(*s)))
            };
            let by_stream = self.streams.iter().any(|a| earlier.streams.iter().any(|b| ordered(*a, *b)));
            let by_event = self.events.iter().any(|event| earlier.events.contains(event));
            let changes = self.order == Order::Object || earlier.order == Order::Object;
            let by_function = changes && self.function.is_some() && self.function == earlier.function;
            by_stream || by_event || by_function
        }
    }

    /// Streams of the model: 0 is the legacy default stream of context 0, 1 and 2 are ordered with it, 3 and 4 are not. 5 is that of context 1, 6 is ordered with it, 7 is not.
    fn context(stream: u32) -> u32 {
        u32::from(stream >= 5)
    }

    fn is_legacy(stream: u32) -> bool {
        stream == 0 || stream == 5
    }

    fn is_blocking(stream: u32) -> bool {
        [1, 2, 6].contains(&stream)
    }

    fn id(stream: u32) -> StreamId {
        StreamId(if is_legacy(stream) { context(stream) } else { 100 + stream })
    }

    fn create(fake: &mut Fake, stream: u32) -> u64 {
        let flags = if is_blocking(stream) { 0 } else { NON_BLOCKING };
        fake.stream_in(ContextId(context(stream)), id(stream).0, flags);
        fake.seq
    }

    /// What may be executed by now: everything that follows only commands that are done.
    fn expected(said: &[Said], signalled: &HashSet<u64>) -> BTreeSet<u64> {
        let (mut executed, mut done) = (BTreeSet::new(), Vec::new());
        for (at, command) in said.iter().enumerate() {
            let free = said[..at].iter().zip(&done).all(|(earlier, done)| *done || !command.follows(earlier));
            if free {
                executed.insert(command.seq);
            }
            done.push(free && command.ticket.is_none_or(|ticket| signalled.contains(&ticket)));
        }
        executed
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn exactly_what_the_rules_allow_is_executed_after_every_step(steps in steps()) {
            let mut fake = Fake::default();
            let mut said: Vec<Said> = Vec::new();
            for stream in [1, 2, 3, 4, 6, 7] {
                let seq = create(&mut fake, stream);
                said.push(Said::new(seq, Order::Streams).on(stream));
            }
            let (mut open, mut tickets) = (Vec::new(), 0);
            let (mut signalled, mut coming) = (HashSet::new(), Vec::new());
            let mut signals = BTreeSet::new();
            for step in steps {
                let streams = |seq| Said::new(seq, Order::Streams);
                match step {
                    Step::Work(s) => said.push(streams(fake.mark(id(s))).on(s)),
                    Step::Launch(s, f) => {
                        let seq = fake.launch(id(s), FunctionId(f));
                        said.push(Said { function: Some(f), ..streams(seq).on(s) });
                    }
                    Step::Change(f) => {
                        let seq = fake.push(&FunctionPreset { function: FunctionId(f), attribute: 8, value: 1 });
                        said.push(Said { function: Some(f), ..Said::new(seq, Order::Object) });
                    }
                    Step::Record(s, e) => {
                        let seq = fake.push(&EventRecord { event: EventId(e), stream: id(s), flags: 0 });
                        said.push(streams(seq).on(s).with(e));
                    }
                    Step::Await(s, e) => {
                        let seq = fake.push(&StreamWaitEvent { stream: id(s), event: EventId(e), flags: 0 });
                        said.push(streams(seq).on(s).with(e));
                    }
                    Step::RenewEvent(e) => {
                        said.push(streams(fake.push(&EventDestroy { event: EventId(e) })).with(e));
                        let event = EventCreate { context: ContextId(0), event: EventId(e), flags: 0 };
                        said.push(streams(fake.push(&event)).with(e));
                    }
                    Step::RenewStream(s) => {
                        said.push(streams(fake.push(&StreamDestroy { stream: id(s) })).on(s));
                        let seq = create(&mut fake, s);
                        said.push(streams(seq).on(s));
                    }
                    Step::Hold(s) => {
                        let ticket = coming.pop().unwrap_or_else(|| {
                            tickets += 1;
                            open.push(tickets);
                            tickets
                        });
                        let seq = fake.wait(id(s), ticket);
                        said.push(Said { ticket: Some(ticket), ..streams(seq).on(s) });
                    }
                    Step::Release(n, early) => {
                        let ticket = if early || open.is_empty() {
                            tickets += 1;
                            coming.push(tickets);
                            tickets
                        } else {
                            open.swap_remove(n as usize % open.len())
                        };
                        fake.signal(ticket);
                        signalled.insert(ticket);
                        signals.insert(fake.seq);
                    }
                    Step::Synchronize(s) => {
                        said.push(streams(fake.push(&StreamSynchronize { stream: id(s) })).on(s));
                    }
                    Step::SynchronizeContext(c) => {
                        let seq = fake.push(&ContextSynchronize { context: ContextId(c) });
                        said.push(Said { scope: Some(c), ..Said::new(seq, Order::Earlier) });
                    }
                    Step::Destroy => said.push(Said::new(fake.push(&TextureDestroy { texture: 1 }), Order::Earlier)),
                    Step::Ask => said.push(Said::new(fake.push(&MemGetInfo { device: 0 }), Order::None)),
                    Step::Session => {
                        let seq = fake.push(&ContextSetLimit { context: ContextId(0), limit: 0, value: 0 });
                        said.push(Said::new(seq, Order::Session));
                    }
                }
                let executed: BTreeSet<u64> = fake.executed.iter().copied().filter(|seq| !signals.contains(seq)).collect();
                prop_assert_eq!(executed, expected(&said, &signalled));
            }
            // Whatever was executed came after all that it follows.
            let position: HashMap<u64, usize> = fake.executed.iter().enumerate().map(|(at, seq)| (*seq, at)).collect();
            for (at, command) in said.iter().enumerate() {
                let Some(mine) = position.get(&command.seq) else { continue };
                prop_assert!(said[..at].iter().filter(|earlier| command.follows(earlier)).all(|earlier| position[&earlier.seq] < *mine));
            }
            open.into_iter().for_each(|ticket| fake.signal(ticket));
            prop_assert_eq!(fake.executed.len() as u64, fake.seq);
            prop_assert!(fake.waits.held.is_empty() && fake.waits.open.is_empty() && fake.waits.bytes == 0);
            prop_assert!(fake.waits.ends.all().next().is_none() && fake.waits.with_data.is_empty());
            prop_assert_eq!(fake.waits.executed_upto(), fake.seq);
        }
    }
}
