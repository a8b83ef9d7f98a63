//! Streams that wait for the client, and the commands that are held back with them.
//!
//! A stream waits for the client from a [`StreamHostWait`] until the [`StreamHostSignal`] with the same
//! ticket. The server keeps this wait to itself: the device never sees it, so it occupies no device queue and
//! no driver call can block because of it. What comes after the wait is **held** until the signal, and then
//! given to the driver.
//!
//! Waiting spreads from stream to stream: through events, and through the order between a context's legacy
//! default stream and its blocking streams. It also spreads through the order that each operation has in the
//! table ([`Order`]), except that an event may always be recorded again, waits for one record do not follow
//! each other, and a function may always get more dynamic shared memory. Commands that nothing orders after a
//! held one are executed, because the client may need their results before it signals.
//!
//! Held commands and open waits form a graph. Each counts the earlier ones that it still has to follow. For
//! everything that commands can have in common, [`Ends`] knows the last one held. So a signal costs only as
//! much as it releases, however much is held. And of two commands of which the second follows the first, a
//! later one follows the second only. So the graph grows with the number of commands, not with its square.
//!
//! A client limits what is held: it asks for room ([`StreamRoom`]) before it sends much more, and is answered
//! when there is some. [`MAX_HELD`] is only for clients that do not.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use host_bridge::endpoint::{Lost, Mapped};
use protocol::channel::{MAX_CONTEXTS, MAX_STREAMS, Record};
use protocol::handle::{ContextId, EventId, FunctionId, Handle, StreamId, TicketId};
use protocol::ops::activity::ActivityStart;
use protocol::ops::context::{
    ContextCreate, ContextDestroy, ContextSetLimit, ContextSynchronize, PeerDisable, PrimaryReset,
};
use protocol::ops::event::{EventElapsed, EventRecord, EventSynchronize};
use protocol::ops::green::{GreenDestroy, GreenStream};
use protocol::ops::memory::MemShrink;
use protocol::ops::module::{FunctionPreset, FunctionSetAttribute};
use protocol::ops::stream::{
    StreamCreate, StreamDestroy, StreamHostSignal, StreamHostWait, StreamRoom, StreamSynchronize,
    StreamWaitEvent,
};
use protocol::ops::{self, Lane, Op, Order};
use protocol::wire::Reader;

/// Maximum bytes of held commands. Beyond it the session is lost. A client that asks for room stays far below
/// it.
const MAX_HELD: usize = 256 << 20;
/// Maximum number of questions for room that are not answered at once: as many as a client has reply slots.
const MAX_ASKED: usize = 64;
/// Maximum number of earlier records of events that are kept for held commands. A record beyond that comes
/// after the commands that use the one before it.
const MAX_ASIDE: usize = 4096;
/// Maximum number of signals remembered before their waits. A client signals only after it has requested the
/// wait, so few are in transit at a time.
const MAX_EARLY: usize = 1 << 16;
/// Maximum number of functions whose dynamic shared memory is known.
const MAX_FUNCTIONS: usize = 1 << 16;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: u32 = 8;
/// The most that any function may have without that attribute.
const DEFAULT_DYNAMIC_SHARED: i32 = 48 << 10;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

const CONTEXT_CREATE: u16 = <ContextCreate as Op>::INFO.opcode;
const STREAM_CREATE: u16 = <StreamCreate as Op>::INFO.opcode;
const GREEN_STREAM: u16 = <GreenStream as Op>::INFO.opcode;
const PRESET: u16 = <FunctionPreset as Op>::INFO.opcode;
const SET_ATTRIBUTE: u16 = <FunctionSetAttribute as Op>::INFO.opcode;
const RECORD: u16 = <EventRecord as Op>::INFO.opcode;
const WAIT_EVENT: u16 = <StreamWaitEvent as Op>::INFO.opcode;
const SYNCHRONIZE: u16 = <EventSynchronize as Op>::INFO.opcode;
const ELAPSED: u16 = <EventElapsed as Op>::INFO.opcode;
const WAIT: u16 = <StreamHostWait as Op>::INFO.opcode;
const SIGNAL: u16 = <StreamHostSignal as Op>::INFO.opcode;
const ROOM: u16 = <StreamRoom as Op>::INFO.opcode;
const STREAM_SYNCHRONIZE: u16 = <StreamSynchronize as Op>::INFO.opcode;
const RESET: u16 = <PrimaryReset as Op>::INFO.opcode;

/// Operations with [`Order::Session`] in the table that later commands need not wait for. What a client sends
/// after their answer comes after them anyway, and until then it uses nothing that they destroy, nor its
/// number for something new. If later commands did wait, a copy between servers could, and with it the stream
/// that this command waits for. (The table itself is part of the wire's fingerprint.)
const AS_EARLIER: [u16; 5] = [
    <ContextDestroy as Op>::INFO.opcode,
    <ContextSetLimit as Op>::INFO.opcode,
    <PeerDisable as Op>::INFO.opcode,
    <GreenDestroy as Op>::INFO.opcode,
    <ActivityStart as Op>::INFO.opcode,
];

/// A command's decoded body, if it is this operation.
fn decoded<'a, T: Op<'a>>(opcode: u16, body: &'a [u8]) -> Option<T> {
    (opcode == T::INFO.opcode).then(|| T::get(&mut Reader::new(body)).ok()).flatten()
}

/// The function whose dynamic shared memory a command sets, and its maximum in bytes.
fn resize(opcode: u16, body: &[u8]) -> Option<(FunctionId, i32)> {
    let op = decoded::<FunctionPreset>(opcode, body).map(|op| (op.function, op.attribute, op.value));
    let set = || decoded::<FunctionSetAttribute>(opcode, body);
    let (function, attribute, value) =
        op.or_else(|| set().map(|op| (op.function, op.attribute, op.value)))?;
    (attribute == MAX_DYNAMIC_SHARED).then_some((function, value))
}

/// The body of a command that records an event or uses its last record, with another ID for the event.
fn renamed(opcode: u16, body: &[u8], from: EventId, to: EventId) -> Option<Vec<u8>> {
    let of = |event: EventId| if event == from { to } else { event };
    let mut out = Vec::new();
    match opcode {
        RECORD => {
            let op = decoded::<EventRecord>(opcode, body)?;
            ops::encode(&EventRecord { event: of(op.event), ..op }, &mut out);
        }
        WAIT_EVENT => {
            let op = decoded::<StreamWaitEvent>(opcode, body)?;
            ops::encode(&StreamWaitEvent { event: of(op.event), ..op }, &mut out);
        }
        SYNCHRONIZE => {
            let op = decoded::<EventSynchronize>(opcode, body)?;
            ops::encode(&EventSynchronize { event: of(op.event) }, &mut out);
        }
        ELAPSED => {
            let op = decoded::<EventElapsed>(opcode, body)?;
            ops::encode(&EventElapsed { start: of(op.start), end: of(op.end) }, &mut out);
        }
        _ => return None,
    }
    Some(out)
}

/// The held commands that name an event.
#[derive(Default)]
struct EventUses {
    held: BTreeSet<u64>,
    /// The stream that they are all on.
    stream: Option<StreamId>,
    /// Number of those that neither record it nor only use its last record, such as its destruction.
    others: usize,
}

impl EventUses {
    fn is_other(opcode: u16) -> bool {
        !matches!(opcode, RECORD | WAIT_EVENT | SYNCHRONIZE | ELAPSED)
    }
}

/// Everything that orders a command relative to others.
struct Ties {
    order: Order,
    /// The objects that it changes, if its order depends on that: it is ordered between the earlier and later
    /// commands that use or change them. A command of a stream changes the stream.
    changes: Vec<Handle>,
    /// Those that it uses, so that it is ordered only with what changes them. A command of a blocking stream
    /// uses its context's legacy default stream.
    uses: Vec<Handle>,
    /// Which work it comes after, if its order is [`Order::Earlier`] or [`Order::Session`].
    scope: Scope,
}

/// The work that an [`Order::Earlier`] or [`Order::Session`] command comes after.
#[derive(Clone, Copy)]
enum Scope {
    Session,
    Context(ContextId),
    Device(u32),
}

impl Ties {
    /// A command with an unknown opcode keeps the session's order, and one that cannot be decoded names
    /// nothing. Both are refused when they are executed.
    fn of(opcode: u16, body: &[u8], streams: &HashMap<StreamId, Made>) -> Ties {
        let (mut order, mut scope) = (Order::Session, Scope::Session);
        let mut ties = Ties { order, changes: Vec::new(), uses: Vec::new(), scope };
        if let Some(info) = ops::info(opcode) {
            order = if AS_EARLIER.contains(&opcode) { Order::Earlier } else { info.order };
            if matches!(order, Order::Streams | Order::Object) {
                let reads_events = matches!(opcode, WAIT_EVENT | SYNCHRONIZE | ELAPSED);
                let _ = (info.visit_handles)(body, &mut |handle| match handle {
                    // Not an operation of its stream: it does not wait for the legacy default stream's later
                    // work, which may wait for what the client does after the answer.
                    Handle::Stream(_) if opcode == STREAM_SYNCHRONIZE => ties.changes.push(handle),
                    Handle::Stream(stream) => ties.add_stream(stream, streams),
                    Handle::Event(_) if !reads_events => ties.changes.push(handle),
                    _ if order == Order::Object => ties.changes.push(handle),
                    _ => ties.uses.push(handle),
                });
                if ties.changes.is_empty() && ties.uses.is_empty() {
                    order = Order::Earlier;
                }
            }
            if let Some(op) = decoded::<ContextSynchronize>(opcode, body) {
                scope = Scope::Context(op.context);
            } else if let Some(op) = decoded::<MemShrink>(opcode, body) {
                scope = Scope::Device(op.device);
            } else if let Some(op) = decoded::<PrimaryReset>(opcode, body) {
                // A copy between servers may hold another device's stream, and would come after this.
                scope = Scope::Device(op.device);
            }
        }
        Ties { order, scope, ..ties }
    }

    /// Those of work on a stream.
    fn of_work(stream: StreamId, streams: &HashMap<StreamId, Made>) -> Ties {
        let (changes, uses) = Default::default();
        let mut ties = Ties { order: Order::Streams, changes, uses, scope: Scope::Session };
        ties.add_stream(stream, streams);
        ties
    }

    fn add_stream(&mut self, stream: StreamId, streams: &HashMap<StreamId, Made>) {
        self.changes.push(Handle::Stream(stream));
        if let Some(made) = streams.get(&stream).filter(|made| made.blocking) {
            self.uses.push(Handle::Stream(StreamId(made.context.0)));
        }
    }
}

/// A held command, or an open wait.
struct Held {
    record: Record,
    body: Vec<u8>,
    /// What it changes and uses.
    named: Vec<Handle>,
    /// Number of unfinished earlier commands that it has to follow.
    missing: usize,
    /// The commands that have to follow it.
    followers: Vec<u64>,
    /// Its size in bytes without its body.
    cost: usize,
    /// The client memory that it names.
    _kept: Vec<Mapped>,
}

/// The last held commands in each kind of order, by `seq`. Whatever follows these follows all.
#[derive(Default, PartialEq, Eq)]
struct Ends {
    /// For an object, the command that changes it.
    of: HashMap<Handle, u64>,
    /// The commands that use it in its current state.
    users: HashMap<Handle, BTreeSet<u64>>,
    /// Commands that destroy a stream, with what it was: another stream may get its ID before they are
    /// executed.
    destroyed: BTreeMap<u64, Made>,
    /// In session order. The reset of a device comes after that device's commands only, so those of others
    /// stay here.
    session: Option<u64>,
    /// One that follows all that were held before it.
    all: Option<u64>,
}

impl Ends {
    /// Those that a command follows because of the objects that it changes and uses, or by the session's
    /// order.
    fn before<'e>(&'e self, ties: &'e Ties) -> impl Iterator<Item = u64> + 'e {
        let changed = ties.changes.iter().chain(&ties.uses).filter_map(|handle| self.of.get(handle));
        let used = ties.changes.iter().filter_map(|handle| self.users.get(handle)).flatten();
        self.session.iter().chain(changed).chain(used).copied()
    }

    fn add(&mut self, seq: u64, ties: &Ties) {
        if matches!((ties.order, ties.scope), (Order::Session | Order::Earlier, Scope::Session)) {
            self.all = Some(seq);
        }
        match (ties.order, ties.scope) {
            (Order::Session, Scope::Session) => {
                *self = Ends { session: Some(seq), all: self.all, ..Ends::default() };
            }
            (Order::Session, _) => self.session = Some(seq),
            _ => {}
        }
        for handle in &ties.changes {
            self.of.insert(*handle, seq);
            self.users.remove(handle);
        }
        for handle in &ties.uses {
            self.users.entry(*handle).or_default().insert(seq);
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
        self.destroyed.remove(&seq);
        self.session = self.session.filter(|session| *session != seq);
        self.all = self.all.filter(|all| *all != seq);
    }
}

/// A stream's context, and whether it is ordered with that context's legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Made {
    context: ContextId,
    blocking: bool,
}

/// The streams that wait for the client, and what is held.
#[derive(Default)]
pub(super) struct HostWaits {
    streams: HashMap<StreamId, Made>,
    /// The devices of contexts that the program has made.
    devices: HashMap<ContextId, u32>,
    /// The most dynamic shared memory that each function was ever given.
    dynamic_shared: HashMap<FunctionId, i32>,
    /// The held changes of it.
    resizes: HashMap<FunctionId, BTreeSet<u64>>,
    held: BTreeMap<u64, Held>,
    ends: Ends,
    of_event: HashMap<EventId, EventUses>,
    /// The IDs of events whose records held commands use and that were recorded again since: see
    /// [`set_aside`](Self::set_aside).
    aside: HashSet<EventId>,
    /// Number of these so far.
    aside_ever: u32,
    /// Those that no held command uses any more.
    unused: Vec<EventId>,
    /// Held commands that have nothing left to follow.
    ready: BTreeSet<u64>,
    /// Open waits: each ticket, and the command of the wait.
    open: HashMap<TicketId, u64>,
    /// Tickets that were signaled before their wait was executed.
    early: HashSet<TicketId>,
    /// Held commands that name the client's data.
    with_data: BTreeSet<u64>,
    bytes: usize,
    /// Questions for room that are not answered yet.
    asked: Vec<(Record, Vec<u8>)>,
    /// Whether less is held than when the questions were last looked at.
    shrunk: bool,
    /// `seq` of the latest command.
    last: u64,
    /// `seq` of the latest executed reset of a device.
    reset: u64,
}

/// What to do with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Execute it now.
    Execute,
    /// Nothing: it is now held.
    Hold,
}

impl HostWaits {
    /// Decides what to do with the session's next command. `keep` keeps the memory that it names, in case it
    /// is held. `renew` gives the first event's ID to a new event, and the second, which is not in use, to
    /// the event that had the first; it returns whether that was possible.
    #[inline]
    pub(super) fn judge(
        &mut self,
        record: &Record,
        body: &[u8],
        keep: impl FnOnce() -> Vec<Mapped>,
        renew: impl FnOnce(EventId, EventId) -> bool,
    ) -> Verdict {
        self.last = record.seq;
        if matches!(record.opcode, CONTEXT_CREATE | STREAM_CREATE | GREEN_STREAM) {
            self.note(record.opcode, body);
        }
        let permits = matches!(record.opcode, PRESET | SET_ATTRIBUTE) && self.only_permits(record, body);
        if self.held.is_empty() || permits {
            return Verdict::Execute;
        }
        if let Some(op) = decoded::<EventRecord>(record.opcode, body) {
            self.set_aside(&op, renew);
        }
        self.judge_slowly(record, body, keep)
    }

    /// Called for a record of an event. Held commands that use an earlier record of the event, or make it, do
    /// so under another ID from now on, so the new record needs not come after them.
    fn set_aside(&mut self, op: &EventRecord, renew: impl FnOnce(EventId, EventId) -> bool) {
        let Some(uses) = self.of_event.get(&op.event) else { return };
        // If they are all on its stream, it comes after them anyway.
        if uses.others > 0 || uses.stream == Some(op.stream) || self.aside.len() >= MAX_ASIDE {
            return;
        }
        let aside = EventId(u32::MAX - self.aside_ever);
        self.aside_ever = self.aside_ever.wrapping_add(1);
        if self.of_event.contains_key(&aside) || !renew(op.event, aside) {
            return;
        }
        let Some(uses) = self.of_event.remove(&op.event) else { return };
        let (from, to) = (Handle::Event(op.event), Handle::Event(aside));
        for seq in &uses.held {
            let Some(held) = self.held.get_mut(seq) else { continue };
            let Some(body) = renamed(held.record.opcode, &held.body, op.event, aside) else { continue };
            self.bytes = self.bytes - held.body.len() + body.len();
            held.body = body;
            held.named.iter_mut().filter(|handle| **handle == from).for_each(|handle| *handle = to);
        }
        if let Some(seq) = self.ends.of.remove(&from) {
            self.ends.of.insert(to, seq);
        }
        if let Some(users) = self.ends.users.remove(&from) {
            self.ends.users.insert(to, users);
        }
        self.of_event.insert(aside, uses);
        self.aside.insert(aside);
    }

    /// An event that was set aside and that no held command uses any more.
    pub(super) fn next_unused_event(&mut self) -> Option<EventId> {
        self.unused.pop()
    }

    /// Whether a command only gives a function more dynamic shared memory than it ever had. What held
    /// launches of the function do does not depend on that, so it need not come after them, nor after held
    /// changes of something else: a graph that is instantiated next, which follows no change, may need it. A
    /// held change of the dynamic shared memory is not overtaken.
    fn only_permits(&mut self, record: &Record, body: &[u8]) -> bool {
        let Some((function, value)) = resize(record.opcode, body) else { return false };
        let known = self.dynamic_shared.len();
        let most = match self.dynamic_shared.entry(function) {
            Entry::Occupied(most) => most.into_mut(),
            Entry::Vacant(vacant) if known < MAX_FUNCTIONS => vacant.insert(DEFAULT_DYNAMIC_SHARED),
            Entry::Vacant(_) => return false,
        };
        let is_more = value >= *most;
        *most = value.max(*most);
        let is_changing = self.resizes.contains_key(&function);
        is_more && !is_changing && self.ends.session.is_none()
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
            // Not ordered with any other stream, and of a context that only the driver knows.
            self.streams.remove(&op.stream);
        }
    }

    fn judge_slowly(&mut self, record: &Record, body: &[u8], keep: impl FnOnce() -> Vec<Mapped>) -> Verdict {
        let info = ops::info(record.opcode);
        if info.is_some_and(|info| info.lane == Lane::Express) {
            return Verdict::Execute;
        }
        let ties = Ties::of(record.opcode, body, &self.streams);
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
            self.ends.destroyed.insert(record.seq, *made);
        }
        if info.is_some_and(|info| info.carries_data) {
            self.with_data.insert(record.seq);
        }
        self.hold(record, body.to_vec(), ties, first.len(), keep());
        Verdict::Hold
    }

    fn hold(&mut self, record: &Record, body: Vec<u8>, ties: Ties, missing: usize, kept: Vec<Mapped>) {
        self.ends.add(record.seq, &ties);
        let is_other = EventUses::is_other(record.opcode);
        let stream = ties.changes.iter().find_map(|handle| match handle {
            Handle::Stream(stream) => Some(*stream),
            _ => None,
        });
        let Ties { changes: mut named, uses, .. } = ties;
        named.extend(uses);
        for handle in &named {
            let Handle::Event(event) = handle else { continue };
            let uses = self.of_event.entry(*event).or_default();
            uses.stream = stream.filter(|_| uses.held.is_empty() || uses.stream == stream);
            if uses.held.insert(record.seq) && is_other {
                uses.others += 1;
            }
        }
        if let Some((function, _)) = resize(record.opcode, &body) {
            self.resizes.entry(function).or_default().insert(record.seq);
        }
        let cost = size_of::<Held>() + missing * size_of::<u64>();
        self.bytes += cost + body.len();
        let held = Held { record: *record, body, named, missing, followers: Vec::new(), cost, _kept: kept };
        self.held.insert(record.seq, held);
    }

    /// The held commands that a command with these ties has to follow.
    fn to_follow(&self, ties: &Ties) -> Vec<u64> {
        let ends = &self.ends;
        let mut first: Vec<u64> = ends.before(ties).collect();
        match (ties.order, ties.scope) {
            (Order::None | Order::Streams | Order::Object, _) => {}
            (Order::Session | Order::Earlier, Scope::Session) => {
                first.extend(self.held.range(ends.all.unwrap_or(0)..).map(|(seq, _)| seq));
            }
            (Order::Session | Order::Earlier, scope) => {
                let inside = ends.of.iter().filter(|(handle, _)| self.is_inside(handle, scope));
                first.extend(inside.map(|(_, seq)| seq));
                let destroyed = ends.destroyed.iter().filter(|(_, made)| self.covers(scope, made.context));
                first.extend(destroyed.map(|(seq, _)| seq));
            }
        }
        first
    }

    /// Whether an object is a stream that may be in this scope, as is one with an unknown context.
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

    /// Notes that a command has been executed. `done`: without an error.
    ///
    /// # Errors
    /// If a client repeatedly signals what nothing waits for.
    #[inline]
    pub(super) fn executed(&mut self, record: &Record, body: &[u8], done: bool) -> Result<(), Lost> {
        match record.opcode {
            SIGNAL => {
                if let Some(op) = decoded::<StreamHostSignal>(SIGNAL, body) {
                    self.signal(op.ticket)?;
                }
            }
            WAIT => self.begin_wait(record, body, done),
            RESET => {
                self.reset = self.reset.max(record.seq);
                self.finish(record.seq);
            }
            _ if !self.held.is_empty() => self.finish(record.seq),
            _ => {}
        }
        Ok(())
    }

    /// A stream has reached a wait. It now waits, unless it was already signaled or the stream doesn't exist.
    fn begin_wait(&mut self, record: &Record, body: &[u8], done: bool) {
        let Some(op) = decoded::<StreamHostWait>(WAIT, body) else { return };
        if self.early.remove(&op.ticket) || !done {
            return self.finish(record.seq);
        }
        self.open.insert(op.ticket, record.seq);
        if !self.held.contains_key(&record.seq) {
            let ties = Ties::of(WAIT, body, &self.streams);
            self.hold(record, Vec::new(), ties, 0, Vec::new());
        }
    }

    fn signal(&mut self, ticket: TicketId) -> Result<(), Lost> {
        if let Some(seq) = self.open.remove(&ticket) {
            self.finish(seq);
        } else if self.early.len() < MAX_EARLY {
            self.early.insert(ticket);
        } else {
            return Err(Lost::new(format!(
                "the client has signaled {MAX_EARLY} tickets that no stream waits for"
            )));
        }
        Ok(())
    }

    /// A held command is finished, or a wait is over: releases what followed it.
    fn finish(&mut self, seq: u64) {
        let Some(held) = self.held.remove(&seq) else { return };
        self.bytes -= held.cost + held.body.len();
        self.shrunk = true;
        self.with_data.remove(&seq);
        self.ends.remove(seq, &held.named);
        for handle in &held.named {
            if let Handle::Function(function) = handle
                && let Entry::Occupied(mut resizes) = self.resizes.entry(*function)
            {
                resizes.get_mut().remove(&seq);
                if resizes.get().is_empty() {
                    resizes.remove();
                }
            }
            let Handle::Event(event) = handle else { continue };
            let Some(uses) = self.of_event.get_mut(event) else { continue };
            if uses.held.remove(&seq) && EventUses::is_other(held.record.opcode) {
                uses.others -= 1;
            }
            if uses.held.is_empty() {
                self.of_event.remove(event);
                self.unused.extend(self.aside.take(event));
            }
        }
        for follower in held.followers {
            if let Some(held) = self.held.get_mut(&follower) {
                held.missing -= 1;
                if held.missing == 0 {
                    self.ready.insert(follower);
                }
            }
        }
    }

    /// A held command, or a question for room, that must be executed now, and then passed to
    /// [`HostWaits::executed`] like any other.
    pub(super) fn next_ready(&mut self) -> Option<(Record, Vec<u8>)> {
        let asked = self.next_with_room();
        if asked.is_some() {
            return asked;
        }
        let held = self.held.get_mut(&self.ready.pop_first()?)?;
        let body = std::mem::take(&mut held.body);
        self.bytes -= body.len();
        Some((held.record, body))
    }

    /// Keeps a command that is to be executed, if it is a question for room and there is none. Returns
    /// whether it was kept.
    #[inline]
    pub(super) fn keeps(&mut self, record: &Record, body: &[u8]) -> bool {
        if record.opcode != ROOM || self.asked.len() == MAX_ASKED || self.has_room(body) {
            return false;
        }
        // Nothing has to come after its answer.
        self.finish(record.seq);
        self.asked.push((*record, body.to_vec()));
        true
    }

    /// A question for room that can be answered now.
    #[inline]
    fn next_with_room(&mut self) -> Option<(Record, Vec<u8>)> {
        if !self.shrunk || self.asked.is_empty() {
            return None;
        }
        let next = self.asked.iter().position(|(_, body)| self.has_room(body));
        self.shrunk = next.is_some();
        Some(self.asked.remove(next?))
    }

    /// Whether a question for room can be answered. One that cannot be decoded is refused when it is
    /// executed.
    fn has_room(&self, body: &[u8]) -> bool {
        let Some(op) = decoded::<StreamRoom>(ROOM, body) else { return true };
        let would_be_held = |stream| self.ends.before(&Ties::of_work(stream, &self.streams)).next().is_some();
        self.bytes as u64 <= op.bytes || op.stream.is_some_and(|stream| !would_be_held(stream))
    }

    /// Checks that not too much is held for the session to continue.
    ///
    /// # Errors
    /// The error is a message for the program's user.
    pub(super) fn check_size(&self) -> Result<(), Lost> {
        if self.bytes < MAX_HELD {
            return Ok(());
        }
        Err(Lost::new(format!(
            "{} MiB of commands are waiting behind a host function or a memory wait of the program",
            MAX_HELD >> 20
        )))
    }

    /// Whether a reset of a device was executed before this command, although it came later. What the command
    /// names may have ended with the device: an event that another device's stream waits for, or a texture
    /// that is destroyed.
    pub(super) fn was_overtaken(&self, record: &Record) -> bool {
        record.seq < self.reset
    }

    /// All commands up to this `seq` have fetched their data. Call this only when [`HostWaits::next_ready`]
    /// has nothing left.
    #[inline]
    pub(super) fn executed_upto(&self) -> u64 {
        self.with_data.first().map_or(self.last, |seq| seq - 1)
    }
}

#[cfg(test)]
mod tests;
