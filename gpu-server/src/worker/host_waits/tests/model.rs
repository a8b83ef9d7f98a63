//! Commands in any order, compared with a model that derives from the rules alone what must follow what.

use proptest::prelude::*;
use protocol::handle::{EventId, FunctionId};
use protocol::ops::array::TextureDestroy;
use protocol::ops::context::PrimaryReset;
use protocol::ops::event::{EventCreate, EventDestroy, EventElapsed, EventRecord};
use protocol::ops::memory::MemGetInfo;
use protocol::ops::module::FunctionPreset;
use protocol::ops::stream::{StreamSynchronize, StreamWaitEvent};

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Work(u32),
    Launch(u32, u64),
    Change(u64),
    Record(u32, u32),
    Await(u32, u32),
    Elapsed(u32, u32),
    RenewEvent(u32),
    RenewStream(u32),
    Hold(u32),
    /// A signal; if `true`, for a wait that comes later.
    Release(u16, bool),
    Synchronize(u32),
    SynchronizeContext(u32),
    Destroy,
    Ask,
    Reset(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (stream, event, function) = (0u32..8, 0u32..4, 0u64..3);
    let step = prop_oneof![
        8 => stream.clone().prop_map(Step::Work),
        3 => (stream.clone(), function.clone()).prop_map(|(s, f)| Step::Launch(s, f)),
        1 => function.prop_map(Step::Change),
        2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Record(s, e)),
        2 => (stream.clone(), event.clone()).prop_map(|(s, e)| Step::Await(s, e)),
        1 => (event.clone(), event.clone()).prop_map(|(a, b)| Step::Elapsed(a, b)),
        1 => event.prop_map(Step::RenewEvent),
        1 => (1u32..5).prop_map(Step::RenewStream),
        4 => stream.clone().prop_map(Step::Hold),
        4 => (any::<u16>(), prop::bool::weighted(0.2)).prop_map(|(n, early)| Step::Release(n, early)),
        1 => stream.prop_map(Step::Synchronize),
        1 => (0u32..2).prop_map(Step::SynchronizeContext),
        1 => Just(Step::Destroy),
        1 => Just(Step::Ask),
        1 => (0u32..2).prop_map(Step::Reset),
    ];
    proptest::collection::vec(step, 1..150)
}

/// A command as the model sees it.
#[derive(Debug, Clone)]
struct Said {
    seq: u64,
    order: Order,
    streams: Vec<u32>,
    /// Whether it is no operation of its stream, and so not ordered with the legacy default stream.
    asks: bool,
    events: Vec<u32>,
    reads: bool,
    /// Whether it is a record that need not come after earlier uses of the event.
    renews: bool,
    function: Option<u64>,
    scope: Option<u32>,
    ticket: Option<u64>,
}

impl Said {
    fn new(seq: u64, order: Order) -> Said {
        let (streams, events) = (Vec::new(), Vec::new());
        Said {
            seq,
            order,
            streams,
            asks: false,
            events,
            reads: false,
            renews: false,
            function: None,
            scope: None,
            ticket: None,
        }
    }

    fn on(mut self, stream: u32) -> Said {
        self.streams.push(stream);
        self
    }

    fn with(mut self, event: u32) -> Said {
        self.events.push(event);
        self
    }

    /// Whether it must come after `earlier`, by the rules alone. `recorded`: which of its events were not
    /// recorded anew since then.
    fn follows(&self, earlier: &Said, recorded: impl Fn(u32) -> bool) -> bool {
        if earlier.order == Order::Session {
            return true;
        }
        let contexts = |said: &Said| said.streams.iter().map(|s| context(*s)).collect::<Vec<_>>();
        if matches!(self.order, Order::Earlier | Order::Session) {
            return self.scope.is_none_or(|scope| contexts(earlier).contains(&scope));
        }
        let ordered = |a: u32, b: u32| {
            a == b
                || (!self.asks
                    && !earlier.asks
                    && context(a) == context(b)
                    && [(a, b), (b, a)].iter().any(|(l, s)| is_legacy(*l) && is_blocking(*s)))
        };
        let by_stream = self.streams.iter().any(|a| earlier.streams.iter().any(|b| ordered(*a, *b)));
        let by_event = self.events.iter().any(|event| earlier.events.contains(event) && recorded(*event));
        let by_event = by_event && !(self.reads && earlier.reads);
        let changes = self.order == Order::Object || earlier.order == Order::Object;
        let by_function = changes && self.function.is_some() && self.function == earlier.function;
        by_stream || by_event || by_function
    }
}

/// The context of a stream in the model: 0 is the legacy default stream of context 0, 1 and 2 are ordered
/// with it, 3 and 4 are not. 5 is that of context 1, 6 is ordered with it, 7 is not.
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

/// Whether a command must come after another one, both given by their places.
fn follows(said: &[Said], at: usize, earlier: usize) -> bool {
    let renewed =
        |event| said[earlier + 1..=at].iter().any(|said| said.renews && said.events.contains(&event));
    said[at].follows(&said[earlier], |event| !renewed(event))
}

/// What may have been executed by now: everything that follows only finished commands.
fn expected(said: &[Said], signalled: &HashSet<u64>) -> BTreeSet<u64> {
    let (mut executed, mut done) = (BTreeSet::new(), Vec::new());
    for (at, command) in said.iter().enumerate() {
        let free = done.iter().enumerate().all(|(earlier, done)| *done || !follows(said, at, earlier));
        if free {
            executed.insert(command.seq);
        }
        done.push(free && command.ticket.is_none_or(|ticket| signalled.contains(&ticket)));
    }
    executed
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn exactly_what_the_rules_allow_is_executed_after_every_step(steps in steps(), refuses in any::<bool>()) {
        let mut fake = Fake { refuses, ..Fake::default() };
        let mut said: Vec<Said> = Vec::new();
        for stream in [1, 2, 3, 4, 6, 7] {
            let seq = create(&mut fake, stream);
            said.push(Said::new(seq, Order::Streams).on(stream));
        }
        let (mut open, mut tickets) = (Vec::new(), 0);
        let (mut signalled, mut coming) = (HashSet::new(), Vec::new());
        let mut signals = BTreeSet::new();
        let (mut records, mut last, mut awaited) = (HashSet::new(), HashMap::new(), HashMap::new());
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
                    let is_pending = |said: &Said| {
                        said.events == [e] && !said.reads && !records.contains(&said.seq) && !fake.has_executed(said.seq)
                    };
                    let renews = !refuses && !said.iter().any(is_pending);
                    let seq = fake.push(&EventRecord { event: EventId(e), stream: id(s), flags: 0 });
                    records.insert(seq);
                    last.insert(e, seq);
                    said.push(Said { renews, ..streams(seq).on(s).with(e) });
                }
                Step::Await(s, e) => {
                    let seq = fake.push(&StreamWaitEvent { stream: id(s), event: EventId(e), flags: 0 });
                    awaited.insert(seq, last.get(&e).copied());
                    said.push(Said { reads: true, ..streams(seq).on(s).with(e) });
                }
                Step::Elapsed(a, b) => {
                    let seq = fake.push(&EventElapsed { start: EventId(a), end: EventId(b) });
                    said.push(Said { reads: true, ..streams(seq).with(a).with(b) });
                }
                Step::RenewEvent(e) => {
                    last.remove(&e);
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
                    let seq = fake.push(&StreamSynchronize { stream: id(s) });
                    said.push(Said { asks: !is_legacy(s), ..streams(seq).on(s) });
                }
                Step::SynchronizeContext(c) => {
                    let seq = fake.push(&ContextSynchronize { context: ContextId(c) });
                    said.push(Said { scope: Some(c), ..Said::new(seq, Order::Earlier) });
                }
                Step::Destroy => said.push(Said::new(fake.push(&TextureDestroy { context: ContextId(0), texture: 1 }), Order::Earlier)),
                Step::Ask => said.push(Said::new(fake.push(&MemGetInfo { device: 0 }), Order::None)),
                Step::Reset(device) => {
                    let seq = fake.push(&PrimaryReset { device });
                    said.push(Said { scope: Some(device), ..Said::new(seq, Order::Session) });
                }
            }
            let executed: BTreeSet<u64> = fake.executed.iter().copied().filter(|seq| !signals.contains(seq)).collect();
            prop_assert_eq!(executed, expected(&said, &signalled));
        }
        // Everything was executed after all that it must follow.
        let position: HashMap<u64, usize> = fake.executed.iter().enumerate().map(|(at, seq)| (*seq, at)).collect();
        for (at, command) in said.iter().enumerate() {
            let Some(mine) = position.get(&command.seq) else { continue };
            let first = (0..at).filter(|earlier| follows(&said, at, *earlier));
            prop_assert!(first.map(|earlier| position[&said[earlier].seq]).all(|place| place < *mine));
        }
        open.into_iter().for_each(|ticket| fake.signal(ticket));
        prop_assert_eq!(fake.executed.len() as u64, fake.seq);
        prop_assert_eq!(&fake.found, &awaited);
        prop_assert!(fake.waits.of_event.is_empty() && fake.waits.aside.is_empty());
        prop_assert!(fake.waits.held.is_empty() && fake.waits.open.is_empty() && fake.waits.bytes == 0);
        prop_assert!(fake.waits.ends == Ends::default() && fake.waits.with_data.is_empty());
        prop_assert_eq!(fake.waits.executed_upto(), fake.seq);
    }
}
