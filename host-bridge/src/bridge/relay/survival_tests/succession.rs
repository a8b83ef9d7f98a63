//! The bridge's process ends, between any two words that it writes into its ledger, and another one goes on.

use proptest::prelude::*;

use protocol::link::{ARENA_KEY, GRANTED_SLOTS, SLOT_DATA};

use super::super::schedule::Schedule;
use super::super::{Restored, RestoredLane, RestoredSlots, Slots};
use super::*;

impl Model<'_> {
    /// Another process goes on.
    fn succeed(&mut self) {
        self.crashes += 1;
        let schedule = Flows::new(DATA, 0, self.cache).noted();
        let memory = (arena(), Vec::new());
        let silence = Duration::from_secs(60);
        self.rooms = rooms(&self.compressed_file, DATA).unwrap();
        let files = (&self.file, &self.rooms[..]);
        let restored = Machine::restore(self.session, memory, schedule, silence, files, DATA).unwrap();
        let Restored { machine, out, lanes, generation } = restored;
        assert_eq!(generation, self.crashes);
        (self.machine, self.out) = (machine, out);
        self.hashing.clear();
        let lane = |RestoredLane { received, base, sent }| NearData {
            journal: Journal::restored(base, sent),
            received,
            ..NearData::default()
        };
        self.data = lanes.into_iter().map(lane).collect();
    }

    /// Does a step in a process that ends after it has written `words` more words into its ledger, if it has
    /// not ended before. What it did is not undone; its successor goes on.
    fn crash(&mut self, what: usize, words: u64) {
        self.machine.end_after(Some(words));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            self.step(what);
            self.near_frames();
        }));
        if let Err(why) = ended
            && !why.is::<Ended>()
        {
            std::panic::resume_unwind(why);
        }
        if self.unknown {
            return;
        }
        // Nobody serves the client meanwhile.
        self.check();
        (0..self.random.below(4)).for_each(|_| self.command());
        self.succeed();
        self.cut();
    }
}

#[test]
fn any_number_of_chunks_may_be_acknowledged_at_once() {
    let (session, _) = session();
    let file = ledger::file().unwrap();
    let mut machine = Machine::new(&session, arena(), slots(), Duration::from_secs(60));
    machine.note_in(Ledger::begin(&file, 16).unwrap());
    // As many as may be under way on that many connections.
    for lane in 0..16 {
        (0..4032).for_each(|_| machine.arrived(lane, 16));
    }
    machine.commit();
}

#[test]
fn room_that_a_process_had_no_time_to_return_comes_from_the_next() {
    let (session, _) = session();
    let mut model = Model::new(&session, 1);
    while model.producer.last_seq() < COMMANDS {
        match model.random.below(9) {
            7 | 8 => model.command(),
            what => drop(model.step(what)),
        }
    }
    model.settle();
    let (view, header) = (&session.channel.view, session.header());
    let released = view.progress().released();
    assert!(released > 0 && !header.has_records());
    // Its last words are in the ledger, and that was all that it did.
    view.progress().set_released(0);
    view.consumer(protocol::channel::Position::default()).publish();
    assert!(header.has_records());
    model.succeed();
    assert!(!header.has_records(), "the client would wait for room for ever");
    assert_eq!(view.progress().released(), released, "the client would wait for its memory for ever");
}

/// A session whose bridge's process ends about every `every` steps. Gives how often, and how many bytes were
/// compressed. False: one of them could not say what its predecessor had done.
fn crash_often(seed: u64, every: usize) -> (u64, u64, bool) {
    let (session, _) = session();
    let mut model = Model::new(&session, seed);
    while (model.producer.last_seq() < COMMANDS || model.random.below(300) > 0) && !model.unknown {
        match model.random.below(9) {
            7 | 8 => model.command(),
            what if model.random.below(every) == 0 => {
                let words = [0, 3, 30, 300][model.random.below(4)];
                let words = model.random.number() % (words + 1);
                model.crash(what, words);
            }
            what => drop(model.step(what)),
        }
    }
    if !model.unknown {
        model.settle();
    }
    (model.crashes, model.compressed, !model.unknown)
}

#[test]
fn sessions_go_on_in_any_number_of_processes() {
    let wanted = std::env::var("RGPU_SURVIVAL_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000);
    let first = std::env::var("RGPU_SURVIVAL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut crashes, mut compressed, mut sessions, mut lost) = (0, 0, 0, 0);
    for seed in first.. {
        let every = [2, 10, 50, 300][seed as usize / 2 % 4];
        let (more, fewer, survived) = crash_often(seed, every);
        (crashes, compressed) = (crashes + more, compressed + fewer);
        sessions += 1;
        lost += u64::from(!survived);
        if crashes >= wanted {
            break;
        }
    }
    println!(
        "{sessions} sessions went on in {crashes} more processes; {lost} were lost; {compressed} bytes compressed"
    );
    assert!(compressed > 0 && lost * 20 < sessions, "{lost} of {sessions} sessions lost");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// What a process leaves that its client has taken over harms nobody.
    #[test]
    fn whatever_a_process_leaves_the_next_one_goes_on_or_says_what_is_wrong(
        seed in 1u64..1000, steps in 0usize..300,
        spoiled in prop::collection::vec((0u64..1000, prop_oneof![0u64..70, any::<u64>(), Just(u64::MAX), Just(1 << 59)]), 1..6),
    ) {
        let (session, _) = session();
        let mut model = Model::new(&session, seed);
        for _ in 0..steps {
            match model.random.below(9) {
                7 | 8 => model.command(),
                what => drop(model.step(what)),
            }
        }
        for (at, value) in spoiled {
            Ledger::spoil(&model.file, at, 1000, value);
        }
        let (schedule, silence) = (Flows::new(DATA, 0, model.cache).noted(), Duration::from_secs(60));
        let memory = (arena(), Vec::new());
        let rooms = rooms(&model.compressed_file, DATA).unwrap();
        let restored = Machine::restore(&session, memory, schedule, silence, (&model.file, &rooms), DATA);
        let Ok(Restored { mut machine, mut out, lanes, .. }) = restored else { return Ok(()) };
        let known = machine.frames_resume(&mut out, model.far.received).is_ok();
        for (index, (lane, far)) in lanes.into_iter().zip(&model.far.data).enumerate() {
            let mut journal = Journal::restored(lane.base, lane.sent);
            let _ = journal.resume(far.received, |what| freed(&mut machine, index, &what));
        }
        machine.finish_turn();
        let said = model.far.out.unsent().to_vec();
        let mut rest = said.as_slice();
        while !rest.is_empty() {
            machine.read(&mut rest).unwrap();
        }
        let _ = machine.take_frames();
        while known && machine.take_records(&mut out).is_ok_and(|worked| worked) {}
        while machine.schedule().next_chunk().is_some() {}
        machine.commit();
    }
}

/// The server's slots, and queues of writes.
const SLOTS: u32 = GRANTED_SLOTS + 6;
const SLOT_SIZE: u32 = SLOT_DATA + (64 << 10);

fn slots() -> Slots<TestMemory> {
    Slots::new(SLOTS, SLOT_SIZE, DATA, 16).acknowledged().noted()
}

/// A session over `verbs`, of which a server has had `steps` things.
fn begun_over_verbs(
    session: &SessionState,
    file: &impl std::os::fd::AsFd,
    steps: usize,
    random: &mut Random,
) {
    let mut machine = Machine::new(session, arena(), slots(), Duration::from_secs(60));
    machine.note_in(Ledger::begin(file, DATA).unwrap());
    let (mut producer, mut out) = (producer(session), SendBuffer::keeping());
    let (mut tokens, mut slots_used, mut came) = (VecDeque::new(), Vec::new(), 0);
    for _ in 0..steps {
        let range = HostRange { place: Place::Arena, offset: 64, len: random.pick(&LENGTHS) };
        let stream = StreamId(0);
        match random.below(9) {
            0 => {
                push(&mut producer, &MemcpyHtoD { stream, dst: 0, src: HostIn::Range(range) }, NO_SLOT);
            }
            1 => {
                push(&mut producer, &MemcpyHtoD { stream, dst: 0, src: HostIn::Late(range) }, NO_SLOT);
            }
            2 => {
                push(&mut producer, &MemcpyDtoH { stream, src: 0, dst: HostOut(range) }, NO_SLOT);
            }
            3 | 4 => drop(machine.take_records(&mut out).unwrap()),
            5 | 6 => {
                if let Some(write) = machine.schedule().next_write() {
                    let lane = random.below(DATA);
                    machine.posting(lane, &write.header, write.slot);
                    tokens.push_back((lane, write.token));
                    slots_used.push(write.slot);
                }
            }
            7 if !tokens.is_empty() => {
                let (lane, token) = tokens.pop_front().unwrap();
                let (seq, len) = machine.schedule().written(token).unwrap();
                machine.sent(seq, len);
                machine.arrived(lane, 1);
                machine.commit();
            }
            _ if !slots_used.is_empty() => {
                let free = slots_used.remove(0).to_le_bytes();
                machine.schedule().frame(frame::SLOTS_FREE, &free).unwrap();
            }
            _ => {
                came += 1;
                let grant = DataGrant { seq: came, piece: 0, reserved: 0, upto: random.pick(&LENGTHS) };
                machine.schedule().grant(grant).unwrap();
                machine.commit();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The same over `verbs`.
    #[test]
    fn whatever_a_process_leaves_of_slots_the_next_one_goes_on_or_says_what_is_wrong(
        seed in 1u64..1000, steps in 0usize..300,
        spoiled in prop::collection::vec((0u64..1000, prop_oneof![0u64..70, any::<u64>(), Just(u64::MAX), Just(1 << 59)]), 0..6),
    ) {
        let (session, _) = session();
        let file = ledger::file().unwrap();
        begun_over_verbs(&session, &file, steps, &mut Random(seed));
        for (at, value) in &spoiled {
            Ledger::spoil(&file, *at, 1000, *value);
        }
        let (memory, silence) = ((arena(), Vec::new()), Duration::from_secs(60));
        let restored = Machine::restore_verbs(&session, memory, slots(), silence, &file, (DATA, SLOTS));
        let restored = match restored {
            Ok(restored) => restored,
            Err(end) => {
                prop_assert!(!spoiled.is_empty(), "{end:?}");
                return Ok(());
            }
        };
        let RestoredSlots { mut machine, mut out, writes, keys, .. } = restored;
        prop_assert!(keys.iter().all(|key| (key.region, key.key) == (ARENA_KEY, 7)));
        while machine.take_records(&mut out).is_ok_and(|worked| worked) {}
        for write in writes.into_iter().flat_map(|writes| writes.under_way) {
            prop_assert!(write.slot < SLOTS && u64::from(write.header.len) == write.source.len());
            let (seq, len) = machine.schedule().written(write.token).unwrap();
            machine.sent(seq, len);
        }
        while let Some(write) = machine.schedule().next_write() {
            machine.posting(0, &write.header, write.slot);
            let (seq, len) = machine.schedule().written(write.token).unwrap();
            machine.sent(seq, len);
        }
        for slot in 0..SLOTS {
            let _ = machine.schedule().frame(frame::SLOTS_FREE, &slot.to_le_bytes());
        }
        machine.finish_turn();
        machine.commit();
    }
}

#[test]
fn an_answer_is_given_once_whatever_the_client_does_before_the_next_process_comes() {
    let (mut given, mut used_again, mut slept) = (0, 0, 0);
    for (words, uses_again) in (0..30).flat_map(|words| [(words, false), (words, true)]) {
        let (session, _) = session();
        let mut model = Model::new(&session, 7);
        let ask = |model: &mut Model<'_>| {
            model.session.channel.view.slot(3).unwrap().prepare();
            let seq = model.append(&StreamSynchronize { stream: StreamId(0) }, 3);
            model.slots.insert(3, seq);
            model.awaited += 1;
        };
        ask(&mut model);
        while model.far.arrived == 0 || model.execute() || model.far.out.kept() == 0 {
            model.machine.take_records(&mut model.out).unwrap();
            model.send_there(0);
            model.deliver_there(0);
        }
        while !model.far.out.is_empty() {
            model.send_back(0);
        }
        model.machine.end_after(Some(words));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while !model.back[0].0.is_empty() {
                model.deliver_back(0);
            }
        }));
        assert!(ended.is_ok() || ended.unwrap_err().is::<Ended>());
        model.check();
        let answered = model.slots.is_empty();
        given += u32::from(answered);
        if answered && uses_again {
            used_again += 1;
            ask(&mut model);
        }
        if !model.slots.is_empty() {
            slept += 1;
            assert!(session.channel.view.slot(3).unwrap().announce_sleep());
        }
        model.succeed();
        model.cut();
        model.settle();
    }
    println!("given before: {given}, slot used again: {used_again}, thread asleep: {slept}");
    assert!(given > 4 && used_again > 4 && slept > used_again);
}
