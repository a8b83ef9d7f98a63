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
    let left = AtomicUsize::new(MANY);
    let departure = Departure { transfer: Arc::clone(&transfer), sink: Mutex::new(None), left, senders: 1 };
    let sent = Filled { transfer: Arc::clone(&transfer), chunk: 0 };
    transfer.abandon_departure();
    let same = |chunk: &u64| transfer.place(*chunk).0 == transfer.place(0).0;
    let again = (1..transfer.chunks()).find(same).unwrap();
    assert!(!departure.try_send(0, again, &mut None));
    drop(sent);
    assert!(departure.try_send(0, again, &mut None));
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
