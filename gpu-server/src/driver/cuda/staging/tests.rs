use std::num::NonZeroUsize;

use host_bridge::endpoint::Region;

use super::*;

const CHUNK: usize = slots::KINDS[0].size;

/// Slots without a device: a test does what streams would do.
fn staging() -> Arc<Staging> {
    let staging = Staging::new(Api::idle(), &Words::new().unwrap()).unwrap();
    staging.prepare().unwrap();
    staging
}

fn begin(staging: &Arc<Staging>, flow: Flow, chunks: usize) -> Arc<Transfer> {
    let health = Health::new(std::ptr::null_mut(), std::ptr::null_mut());
    staging.begin(flow, (chunks * CHUNK) as u64, |slot| slot, &health).unwrap()
}

fn memory(chunks: usize) -> Mapped {
    let region = Region::own(NonZeroUsize::new(chunks * CHUNK).unwrap()).unwrap();
    Mapped::of(&region, (chunks * CHUNK) as u64).unwrap()
}

/// A transfer that is sent by calls of a test, to nowhere.
fn departure(transfer: &Arc<Transfer>, next: u64, senders: usize) -> Departure {
    let (next, left) = (AtomicU64::new(next), AtomicUsize::new(transfer.uses.len()));
    Departure { transfer: Arc::clone(transfer), sink: Mutex::new(None), next, left, senders }
}

/// The stream writes a chunk to its slot, which it must not have to wait for.
fn fill(transfer: &Transfer, chunk: u64) {
    let (slot, uses) = transfer.place(chunk);
    assert!(transfer.slot(slot).free.get() + 1 >= uses, "chunk {chunk} has to wait");
    transfer.slot(slot).gpu.set(uses);
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < limit, "not {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// More chunks than a flow gets slots, so that some slot is used twice.
const MANY: usize = 20;

#[test]
fn a_transfer_from_the_device_that_the_driver_has_refused_keeps_no_slots() {
    let (staging, flow) = (staging(), Flow::fresh());
    let transfer = begin(&staging, flow, MANY);
    staging.send(Arc::clone(&transfer), Sink::Mapped(memory(MANY)));
    // The driver has taken the work for one chunk, and refused that for the next.
    let (slot, uses) = transfer.place(0);
    transfer.slot(slot).gpu.set(uses);
    transfer.abandon_departure();
    drop(transfer);
    wait_until("given back", || staging.slots.are_unused());
    let next = begin(&staging, flow, MANY);
    for chunk in 0..next.own {
        let (slot, uses) = next.place(chunk);
        assert!(next.slot(slot).free.get() + 1 >= uses, "the stream may fill the slot of chunk {chunk}");
    }
}

#[test]
fn an_abandoned_chunk_leaves_a_slot_alone_whose_data_may_be_sent_again() {
    let transfer = begin(&staging(), Flow::fresh(), MANY);
    let sent = Filled { transfer: Arc::clone(&transfer), chunk: 0 };
    transfer.abandon_departure();
    let same = |chunk: &u64| transfer.place(*chunk).0 == transfer.place(0).0;
    let again = (1..transfer.chunks()).find(same).unwrap();
    let departure = departure(&transfer, again, 1);
    assert!(!departure.send_next(0, &mut None));
    drop(sent);
    assert!(departure.send_next(0, &mut None));
}

#[test]
fn a_sender_that_is_busy_holds_up_the_chunk_that_it_has_and_no_other() {
    const SENDERS: usize = 4;
    let staging = staging();
    let transfer = begin(&staging, Flow::fresh(), MANY);
    let departure = departure(&transfer, 0, SENDERS);
    let all = transfer.own;
    (0..all).for_each(|chunk| fill(&transfer, chunk));
    let sent = || departure.next.load(Ordering::Relaxed);
    (0..SENDERS).for_each(|sender| staging.look_for_chunks(sender, true));
    // While all are free, each chunk is one thread's.
    for turn in (0..2).flat_map(|_| 0..SENDERS) {
        let others = (0..SENDERS).filter(|sender| *sender != turn);
        assert!(others.into_iter().all(|other| !departure.send_next(other, &mut None)));
        assert!(departure.send_next(turn, &mut None));
    }
    assert_eq!(sent(), 8);
    // The first thread's connection takes its chunk slowly.
    assert!(departure.send_next(0, &mut None));
    staging.look_for_chunks(0, false);
    let mut counts = [0; SENDERS];
    let mut send = |sender: usize| {
        let sends = departure.send_next(sender, &mut None);
        counts[sender] += u64::from(sends);
        sends
    };
    while (1..SENDERS).map(&mut send).fold(false, |any, one| any | one) {}
    assert_eq!(counts, [0, 3, 2, 2]);
    // It is back, and has a part of the rest again, of which slots are free.
    staging.look_for_chunks(0, true);
    (all..transfer.chunks()).for_each(|chunk| fill(&transfer, chunk));
    let mut counts = [0; SENDERS];
    while !departure.is_given_out() {
        (0..SENDERS).for_each(|sender| counts[sender] += u64::from(departure.send_next(sender, &mut None)));
    }
    assert_eq!((counts, sent(), departure.left.load(Ordering::Relaxed)), ([1; SENDERS], MANY as u64, 0));
}

#[test]
fn all_bytes_arrive_once_whichever_thread_sends_them() {
    let staging = staging();
    let region = Region::own(NonZeroUsize::new(MANY * CHUNK).unwrap()).unwrap();
    let mapped = || Mapped::of(&region, (MANY * CHUNK) as u64).unwrap();
    for round in 1..4u8 {
        let transfer = begin(&staging, Flow::fresh(), MANY);
        staging.send(Arc::clone(&transfer), Sink::Mapped(mapped()));
        for (chunk, place) in (0..).zip(transfer.outbound()) {
            let (slot, uses) = transfer.place(chunk);
            wait_until("free", || transfer.slot(slot).free.get() + 1 >= uses);
            // SAFETY: a slot that this test's stream may fill.
            unsafe { place.at.as_ptr().write_bytes(round * 50 + chunk as u8, place.len) };
            fill(&transfer, chunk);
        }
        let is_sent = |last: &Use| transfer.slot(last.slot).host.get() >= last.number;
        wait_until("sent", || transfer.last.iter().all(is_sent));
        let mut bytes = vec![0; MANY * CHUNK];
        mapped().read(0, &mut bytes);
        let is_right = |(chunk, bytes): (usize, &[u8])| bytes.iter().all(|b| *b == round * 50 + chunk as u8);
        assert!(bytes.chunks(CHUNK).enumerate().all(is_right), "round {round}");
    }
    wait_until("given back", || staging.slots.are_unused());
}

#[test]
fn a_transfer_to_the_device_that_the_driver_has_refused_keeps_no_slots() {
    let (staging, flow) = (staging(), Flow::fresh());
    let completer = Completer::start(Api::idle()).unwrap();
    let (before, refused) = (begin(&staging, flow, 1), begin(&staging, flow, MANY));
    refused.feed(memory(MANY), None).unwrap();
    refused.abandon_arrivals(&completer);
    // The stream waits for what it was given, but has not yet taken what the earlier transfer brings.
    let (earlier, _) = before.place(0);
    let is_there = |last: &Use| refused.slot(last.slot).host.get() >= last.number;
    for last in refused.last.iter().filter(|last| last.slot != earlier) {
        wait_until("let go on", || is_there(last));
    }
    let same = refused.last.iter().find(|last| last.slot == earlier).unwrap();
    assert!(!is_there(same));
    before.slot(earlier).gpu.set(1);
    wait_until("let go on", || is_there(same));
    completer.stop();
    drop((before, refused));
    wait_until("given back", || staging.slots.are_unused());
}

#[test]
fn held_chunks_are_copied_only_when_nothing_moves() {
    let begun = Instant::now();
    let mut quiet = Quiet { since: begun, arrived: 0 };
    // The client reads slowly: each acknowledgement arrives just in time.
    for number in 1..100 {
        let just_before = begun + (SETTLE - Duration::from_nanos(1)) * number;
        assert!(!quiet.is_long(u64::from(number), just_before));
    }
    let last = quiet.since;
    assert!(!quiet.is_long(99, last + SETTLE / 2) && quiet.is_long(99, last + SETTLE));
    quiet.since = last + SETTLE;
    assert!(!quiet.is_long(99, last + SETTLE), "it has sent something");
}
