//! Examples of what is held and what is not, one rule at a time. `model` tries commands in any order.

mod model;

use protocol::channel::{NO_SLOT, RECORD_HEADER};
use protocol::data::{HostIn, HostRange, Place};
use protocol::handle::{EventId, FunctionId, GreenId, ModuleId};
use protocol::ops::context::PrimaryReset;
use protocol::ops::copy::{MemcpyDtoHInline, MemcpyHtoD, Pitched};
use protocol::ops::direct::{DirectReceiveAll, DirectSendAll};
use protocol::ops::event::{EventDestroy, EventRecord};
use protocol::ops::launch::Launch;
use protocol::ops::memory::{HostRead, MemAlloc, MemGetInfo};
use protocol::ops::module::{FunctionPreset, ModuleGetGlobal, ModuleLoadByName, ModuleUnload};
use protocol::ops::stream::{StreamMark, StreamWaitEvent};

use super::*;

/// A dispatcher that only records what it would execute.
#[derive(Default)]
struct Fake {
    waits: HostWaits,
    seq: u64,
    executed: Vec<u64>,
    /// Streams that do not exist.
    missing: Vec<StreamId>,
    /// The last executed record of each event.
    records: HashMap<EventId, u64>,
    /// The record that each executed wait for an event found.
    found: HashMap<u64, Option<u64>>,
    /// Whether events cannot be set aside.
    refuses: bool,
}

impl Fake {
    fn run(&mut self, record: Record, body: &[u8]) {
        if self.waits.keeps(&record, body) {
            return;
        }
        self.executed.push(record.seq);
        if let Some(op) = decoded::<EventRecord>(record.opcode, body) {
            self.records.insert(op.event, record.seq);
        } else if let Some(op) = decoded::<StreamWaitEvent>(record.opcode, body) {
            self.found.insert(record.seq, self.records.get(&op.event).copied());
        } else if let Some(op) = decoded::<EventDestroy>(record.opcode, body) {
            self.records.remove(&op.event);
        }
        let stream = decoded::<StreamHostWait>(record.opcode, body).map(|op| op.stream);
        let done = stream.is_none_or(|stream| !self.missing.contains(&stream));
        self.waits.executed(&record, body, done).expect("few signals");
    }

    fn push<'a, T: Op<'a>>(&mut self, op: &T) -> u64 {
        self.seq += 1;
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        let record = Record { opcode: T::INFO.opcode, reply_slot: NO_SLOT, seq: self.seq };
        let renew = |event, aside| {
            if self.refuses {
                return false;
            }
            if let Some(last) = self.records.remove(&event) {
                self.records.insert(aside, last);
            }
            true
        };
        if self.waits.judge(&record, &body, Vec::new, renew) == Verdict::Execute {
            self.run(record, &body);
        }
        while let Some((record, body)) = self.waits.next_ready() {
            self.run(record, &body);
            while let Some(event) = self.waits.next_unused_event() {
                self.records.remove(&event);
            }
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

    fn ask_for_room(&mut self, stream: Option<StreamId>, bytes: usize) -> u64 {
        self.push(&StreamRoom { stream, bytes: bytes as u64 })
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
fn a_function_gets_more_shared_memory_while_another_change_of_it_is_held() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    let function = FunctionId(7);
    fake.wait(held, 1);
    fake.launch(held, function);
    // The preferred carveout of shared memory.
    let carveout = fake.push(&FunctionPreset { function, attribute: 9, value: 50 });
    assert!(!fake.has_executed(carveout));
    let more = fake.push(&FunctionPreset { function, attribute: MAX_DYNAMIC_SHARED, value: 60_000 });
    assert!(fake.has_executed(more));
    let less = fake.push(&FunctionPreset { function, attribute: MAX_DYNAMIC_SHARED, value: 50_000 });
    let again = fake.push(&FunctionPreset { function, attribute: MAX_DYNAMIC_SHARED, value: 60_000 });
    fake.signal(1);
    assert!(fake.executed.ends_with(&[carveout, less, again]));
    assert!(fake.waits.resizes.is_empty());
}

#[test]
fn answers_to_page_faults_are_never_held() {
    let mut fake = Fake::default();
    let stream = fake.stream(100, NON_BLOCKING);
    fake.wait(stream, 1);
    let session = fake.push(&PrimaryReset { device: 0 });
    let read = fake.push(&HostRead { context: ContextId(0), address: 8192, len: 8 });
    assert!(!fake.has_executed(session) && fake.has_executed(read));
    fake.signal(1);
    assert!(fake.has_executed(session));
}

#[test]
fn a_function_gets_more_shared_memory_while_a_launch_of_it_is_held() {
    let mut fake = Fake::default();
    let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
    let function = FunctionId(7);
    fake.wait(held, 1);
    fake.launch(held, function);
    let set = |fake: &mut Fake, attribute, value| {
        let seq = fake.push(&FunctionPreset { function, attribute, value });
        fake.has_executed(seq)
    };
    assert!(set(&mut fake, MAX_DYNAMIC_SHARED, 60_000));
    let launch = fake.launch(other, function);
    assert!(fake.has_executed(launch));
    // What takes something away comes after the held launch, and what comes after that does not overtake it.
    assert!(!set(&mut fake, MAX_DYNAMIC_SHARED, 50_000));
    assert!(!set(&mut fake, MAX_DYNAMIC_SHARED, 70_000));
    let launch = fake.launch(other, function);
    assert!(!fake.has_executed(launch));
    fake.signal(1);
    assert!(fake.has_executed(launch));
    fake.wait(held, 2);
    fake.launch(held, function);
    assert!(!set(&mut fake, MAX_DYNAMIC_SHARED + 1, 90_000));
    fake.signal(2);
    assert!(fake.waits.held.is_empty());
}

#[test]
fn a_held_wait_for_an_event_does_not_hold_other_uses_of_its_record() {
    let mut fake = Fake::default();
    let [held, other] = [100, 101].map(|stream| fake.stream(stream, NON_BLOCKING));
    let [event, later] = [1, 2].map(EventId);
    fake.wait(held, 1);
    let wait = fake.push(&StreamWaitEvent { stream: held, event, flags: 0 });
    let beside = [
        fake.push(&StreamWaitEvent { stream: other, event, flags: 0 }),
        fake.push(&EventSynchronize { event }),
        fake.push(&EventElapsed { start: event, end: event }),
    ];
    assert!(!fake.has_executed(wait) && beside.iter().all(|seq| fake.has_executed(*seq)));
    // The last record is held, and so is what uses it.
    fake.push(&EventRecord { event: later, stream: held, flags: 0 });
    let [synchronize, elapsed] = [
        fake.push(&EventSynchronize { event: later }),
        fake.push(&EventElapsed { start: event, end: later }),
    ];
    assert!(!fake.has_executed(synchronize) && !fake.has_executed(elapsed));
    fake.signal(1);
    assert!(fake.has_executed(wait) && fake.has_executed(elapsed) && fake.waits.held.is_empty());
}

#[test]
fn an_event_is_recorded_again_while_held_commands_use_its_last_record() {
    let mut fake = Fake::default();
    let [held, behind, other] = [100, 101, 102].map(|stream| fake.stream(stream, NON_BLOCKING));
    let event = EventId(1);
    fake.wait(held, 1);
    let mut waits = Vec::new();
    for _ in 0..3 {
        let first = fake.push(&EventRecord { event, stream: held, flags: 0 });
        let wait = fake.push(&StreamWaitEvent { stream: behind, event, flags: 0 });
        let again = fake.push(&EventRecord { event, stream: other, flags: 0 });
        let beside = fake.push(&StreamWaitEvent { stream: other, event, flags: 0 });
        assert!(!fake.has_executed(first) && !fake.has_executed(wait));
        assert_eq!(fake.found[&beside], Some(again));
        waits.push((wait, first));
    }
    fake.signal(1);
    assert!(waits.iter().all(|(wait, first)| fake.found[wait] == Some(*first)));
    assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0 && fake.waits.aside.is_empty());
    assert_eq!(fake.records.len(), 1);

    // Where that is not possible, the record comes after them.
    fake.refuses = true;
    let last = fake.records[&event];
    fake.wait(held, 2);
    let wait = fake.push(&StreamWaitEvent { stream: held, event, flags: 0 });
    let again = fake.push(&EventRecord { event, stream: other, flags: 0 });
    assert!(!fake.has_executed(again));
    fake.signal(2);
    assert!(fake.has_executed(again) && fake.found[&wait] == Some(last));
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
fn a_blocking_stream_is_synchronized_while_later_work_on_the_legacy_default_stream_waits() {
    let mut fake = Fake::default();
    let (stream, legacy) = (fake.stream(101, 0), StreamId(0));
    fake.wait(legacy, 1);
    let asked = fake.push(&StreamSynchronize { stream });
    assert!(fake.has_executed(asked), "the client may signal only after the answer");
    let marked = fake.mark(stream);
    let behind = fake.push(&StreamSynchronize { stream });
    let of_legacy = fake.push(&StreamSynchronize { stream: legacy });
    assert!(![marked, behind, of_legacy].iter().any(|seq| fake.has_executed(*seq)));
    fake.signal(1);
    assert!([marked, behind, of_legacy].iter().all(|seq| fake.has_executed(*seq)));
}

#[test]
fn work_still_counts_after_its_streams_id_is_reused() {
    let mut fake = Fake::default();
    let held = fake.stream(100, 0);
    fake.wait(held, 1);
    fake.push(&StreamDestroy { stream: held });
    fake.stream_in(ContextId(1), held.0, NON_BLOCKING);
    let synchronize = fake.push(&ContextSynchronize { context: ContextId(0) });
    let legacy = fake.mark(StreamId(0));
    let elsewhere = fake.mark(StreamId(1));
    assert!(!fake.has_executed(synchronize) && !fake.has_executed(legacy) && fake.has_executed(elsewhere));
    fake.signal(1);
    assert!(fake.has_executed(synchronize) && fake.has_executed(legacy));
}

#[test]
fn a_context_is_synchronized_while_anothers_streams_wait() {
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
fn session_order_holds_everything_and_memory_operations_nothing() {
    let mut fake = Fake::default();
    let (held, other) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
    fake.wait(held, 1);
    let memory = fake.push(&MemAlloc { address: 0, size: 1 });
    let unload = fake.push(&ModuleUnload { module: ModuleId(1) });
    let ahead = fake.mark(other);
    assert!(fake.has_executed(memory) && !fake.has_executed(unload) && fake.has_executed(ahead));
    let reset = fake.push(&PrimaryReset { device: 0 });
    let behind = [fake.mark(other), fake.push(&MemGetInfo { device: 0 })];
    assert!(!fake.has_executed(reset) && behind.iter().all(|seq| !fake.has_executed(*seq)));
    fake.signal(1);
    assert!(fake.executed.ends_with(&[unload, reset, behind[0], behind[1]]));
}

#[test]
fn a_copy_between_servers_does_not_wait_for_a_call_behind_the_stream_that_it_holds() {
    let copied = |fake: &mut Fake, hidden| {
        let place = || Pitched { address: 0, pitch: 0, slice: 0 };
        let (direct, first, piece, extent) = (1, 1, 4, [4, 1, 1]);
        let (send, receive) = (
            DirectSendAll { stream: hidden, direct, first, piece, src: place(), extent },
            DirectReceiveAll { stream: hidden, direct, first, piece, dst: place(), extent },
        );
        let src = HostIn::Inline(&[0; 4]);
        [fake.push(&send), fake.push(&receive), fake.push(&MemcpyHtoD { stream: hidden, dst: 0, src })]
    };
    let context = ContextId(40);
    let calls: [fn(&mut Fake, ContextId) -> u64; 5] = [
        |fake, context| fake.push(&ContextSetLimit { context, limit: 0, value: 0 }),
        |fake, context| fake.push(&ContextDestroy { context }),
        |fake, context| fake.push(&PeerDisable { context, peer: ContextId(0) }),
        |fake, _| fake.push(&GreenDestroy { green: GreenId(1) }),
        |fake, _| fake.push(&ActivityStart {}),
    ];
    for call in calls {
        let mut fake = Fake::default();
        fake.push(&ContextCreate { context, device: 0, flags: 0 });
        let (stream, hidden) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
        fake.wait(stream, 1);
        let behind = fake.mark(stream);
        let called = call(&mut fake, context);
        assert!(!fake.has_executed(called), "it comes after all earlier work");
        let created = fake.stream(102, NON_BLOCKING);
        let copied = [copied(&mut fake, hidden), copied(&mut fake, created)];
        assert!(copied.iter().flatten().all(|seq| fake.has_executed(*seq)));
        fake.signal(1);
        assert!(fake.executed.ends_with(&[behind, called]));
        assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0);
    }
}

#[test]
fn the_reset_of_a_device_comes_behind_its_own_streams_and_before_everything_later() {
    let mut fake = Fake::default();
    fake.push(&ContextCreate { context: ContextId(40), device: 0, flags: 0 });
    let own = [(100, 0), (101, 40)].map(|(stream, context)| fake.stream_in(ContextId(context), stream, 1));
    let other = fake.stream_in(ContextId(1), 102, NON_BLOCKING);
    for held in own {
        fake.wait(other, 1);
        fake.wait(held, 2);
        // On the other device, behind the first wait: what names an event that ends with the device, too.
        let event = EventId(7);
        let waits = fake.push(&StreamWaitEvent { stream: other, event, flags: 0 });
        let unload = fake.push(&ModuleUnload { module: ModuleId(1) });
        let reset = fake.push(&PrimaryReset { device: 0 });
        let later =
            [fake.mark(other), fake.push(&MemGetInfo { device: 0 }), fake.launch(other, FunctionId(1))];
        let has_executed = |fake: &Fake| later.map(|seq| fake.has_executed(seq));
        assert!(!fake.has_executed(reset) && has_executed(&fake) == [false; 3]);
        fake.signal(2);
        assert!(fake.has_executed(reset) && !fake.has_executed(waits) && !fake.has_executed(unload));
        assert_eq!(has_executed(&fake), [false, true, false], "the other device's stream is still held");
        // One on an idle device waits for nothing.
        let again = fake.push(&PrimaryReset { device: 0 });
        assert!(fake.has_executed(again) && !fake.has_executed(waits));
        fake.signal(1);
        assert_eq!(has_executed(&fake), [true; 3]);
        let position = |seq| fake.executed.iter().position(|executed| *executed == seq);
        assert!(position(waits) < position(later[0]) && position(later[0]) < position(later[2]));
        let record = |seq| Record { opcode: 0, reply_slot: NO_SLOT, seq };
        let overtaken = [waits, unload, later[0]].map(|seq| fake.waits.was_overtaken(&record(seq)));
        assert_eq!(overtaken, [true, true, true]);
        assert!(!fake.waits.was_overtaken(&record(again + 1)));
        assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0);
    }
}

#[test]
fn a_question_about_a_module_stays_behind_its_load() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    let reset = fake.push(&PrimaryReset { device: 0 });
    let (context, module, image) = (ContextId(1), ModuleId(1), HostIn::Inline(&[]));
    let load = fake.push(&ModuleLoadByName { context, module, image });
    let question = fake.push(&ModuleGetGlobal { module, name: "variable" });
    assert!(!fake.has_executed(load) && !fake.has_executed(question));
    fake.signal(1);
    assert!(fake.executed.ends_with(&[reset, load, question]));
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
fn a_result_is_not_awaited_before_its_stream_continues() {
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

#[test]
fn a_question_for_room_is_answered_when_little_enough_is_held() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    let early = fake.ask_for_room(Some(held), 0);
    assert!(fake.has_executed(early), "nothing is held");
    fake.wait(held, 1);
    fake.mark(held);
    let little = fake.waits.bytes;
    fake.wait(held, 2);
    (0..50).for_each(|_| _ = fake.mark(held));
    let much = fake.waits.bytes;
    let [none, some, all] = [0, little, much].map(|bytes| fake.ask_for_room(None, bytes));
    assert!(fake.has_executed(all) && !fake.has_executed(some) && !fake.has_executed(none));
    // What is behind the second wait is still more than that.
    fake.signal(1);
    assert!(!fake.has_executed(some));
    fake.signal(2);
    assert!(fake.has_executed(some) && fake.has_executed(none));
    assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0 && fake.waits.asked.is_empty());
}

#[test]
fn a_question_is_answered_when_a_wait_ends_that_nothing_follows() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    let asked = fake.ask_for_room(None, 0);
    assert!(!fake.has_executed(asked));
    fake.signal(1);
    assert!(fake.has_executed(asked));
}

#[test]
fn there_is_always_room_on_a_stream_that_is_not_held() {
    let mut fake = Fake::default();
    let (held, free) = (fake.stream(100, NON_BLOCKING), fake.stream(101, NON_BLOCKING));
    let blocking = fake.stream(102, 0);
    fake.wait(held, 1);
    let first = fake.ask_for_room(Some(free), 0);
    assert!(fake.has_executed(first));
    // By an event, and by the order with the legacy default stream.
    let event = EventId(7);
    fake.push(&EventRecord { event, stream: held, flags: 0 });
    fake.push(&StreamWaitEvent { stream: free, event, flags: 0 });
    fake.wait(StreamId(0), 2);
    let asked = [free, blocking].map(|stream| fake.ask_for_room(Some(stream), 0));
    assert!(asked.iter().all(|seq| !fake.has_executed(*seq)));
    fake.signal(2);
    assert!(fake.has_executed(asked[1]) && !fake.has_executed(asked[0]));
    fake.signal(1);
    assert!(fake.has_executed(asked[0]));
}

#[test]
fn later_commands_do_not_wait_for_the_answer_to_a_question() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    // Held itself, behind what keeps the session's order, and then without an answer.
    let session = fake.push(&PrimaryReset { device: 0 });
    let asked = fake.ask_for_room(None, 0);
    fake.wait(held, 2);
    fake.signal(1);
    assert!(fake.has_executed(session) && !fake.has_executed(asked));
    let other = fake.stream(101, NON_BLOCKING);
    fake.signal(2);
    let synchronized = fake.push(&ContextSynchronize { context: ContextId(0) });
    assert!(fake.has_executed(asked) && fake.has_executed(synchronized));
    let free = fake.mark(other);
    assert!(fake.has_executed(free) && fake.waits.held.is_empty());
}

#[test]
fn a_client_that_only_asks_is_answered() {
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    (0..1000).for_each(|_| _ = fake.ask_for_room(None, 0));
    assert_eq!(fake.waits.asked.len(), MAX_ASKED);
}

/// How many commands the held ones follow, all together.
fn followed(fake: &Fake) -> usize {
    fake.waits.held.values().map(|held| held.missing).sum()
}

#[test]
fn what_destructions_follow_grows_with_their_number_only() {
    const DESTROYED: u32 = 4000;
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    let first = fake.seq;
    for n in 0..DESTROYED {
        fake.launch(held, FunctionId(n.into()));
        fake.push(&ModuleUnload { module: ModuleId(n) });
    }
    let count = 2 * DESTROYED as usize;
    assert!(fake.waits.bytes < count * 512, "{} KiB are held", fake.waits.bytes >> 10);
    assert!(followed(&fake) <= 4 * count);
    fake.signal(1);
    let last = first + 2 * u64::from(DESTROYED);
    assert!(fake.executed.ends_with(&(first + 1..=last).collect::<Vec<_>>()));
    assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0);
}

#[test]
fn what_work_on_the_legacy_stream_follows_grows_with_the_number_of_commands_only() {
    const STREAMS: u32 = 100;
    const LAUNCHED: u32 = 4000;
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    let event = EventId(1);
    fake.push(&EventRecord { event, stream: held, flags: 0 });
    let blocking: Vec<StreamId> = (0..STREAMS).map(|n| fake.stream(101 + n, 0)).collect();
    let first = fake.seq;
    blocking.iter().for_each(|stream| _ = fake.push(&StreamWaitEvent { stream: *stream, event, flags: 0 }));
    (0..LAUNCHED).for_each(|_| _ = fake.launch(StreamId(0), FunctionId(7)));
    let last = fake.seq;
    let count = (STREAMS + LAUNCHED) as usize;
    assert!(fake.waits.bytes < count * 512, "{} KiB are held", fake.waits.bytes >> 10);
    assert!(followed(&fake) <= 4 * count);
    fake.signal(1);
    assert!(fake.executed.ends_with(&(first + 1..=last).collect::<Vec<_>>()));
    assert!(fake.waits.held.is_empty() && fake.waits.bytes == 0);
}

/// The client's numbers: `MOST_HELD` and twice `STEP` in `guest-cudart/cuda/src/process/room.rs`.
#[test]
fn a_client_that_asks_for_room_stays_far_below_the_limit() {
    const ANSWERED_BELOW: usize = 64 << 20;
    const SENT_MEANWHILE: usize = 16 << 20;
    let mut fake = Fake::default();
    let held = fake.stream(100, NON_BLOCKING);
    fake.wait(held, 1);
    let before = fake.waits.bytes;
    // A shorter command than this names no stream.
    fake.mark(held);
    let record = (RECORD_HEADER + size_of::<StreamId>()).next_multiple_of(16);
    let most = ANSWERED_BELOW + SENT_MEANWHILE / record * (fake.waits.bytes - before);
    assert!(most < MAX_HELD / 4 * 3, "{} MiB", most >> 20);
}
