//! Links that lose everything for a while, without an error. The devices of these tests repeat nothing by
//! themselves, as if their timers never ran out.

use std::collections::HashMap;

use protocol::link::{FrameHeader, Queues, Received};
use test_kit::turns::{Exchange, Turns};

use super::*;

/// Longer than any test runs.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// No device repeats anything, and nobody is lost for being silent: a request that takes too long is all
/// there is to notice the silence by, and nudges are all that has what was sent meanwhile come through new
/// queue pairs.
#[test]
fn a_silent_link_is_replaced_and_the_new_one_goes_on_when_it_carries_something_again() {
    let times = number("RGPU_SURVIVAL_CUTS", 6);
    let (mut silences, mut kept) = (0, 0);
    disturbed_with(
        10,
        times,
        |config| SessionConfig { silence: FOREVER, ..config },
        |bridge, random| {
            let counters = bridge.session().counters();
            let (resumed, sent) = (counters.resumed.get(), counters.data_bytes_sent.get());
            until("it goes on", || counters.data_bytes_sent.get() > sent);
            std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
            let before = software::pairs();
            software::silence(true);
            let fresh = || software::pairs().into_iter().filter(|pair| !before.contains(pair));
            // Twice: queue pairs that carried nothing are replaced, too.
            until("something is sent through other queue pairs", || {
                fresh().any(|pair| software::sends(pair) > 0) || bridge.lost().is_some()
            });
            let first: Vec<u32> = fresh().collect();
            until("something is sent through others again", || {
                fresh().any(|pair| !first.contains(&pair) && software::sends(pair) > 0)
                    || bridge.lost().is_some()
            });
            let last: Vec<u32> = software::pairs();
            software::silence(false);
            until("it is resumed", || counters.resumed.get() > resumed || bridge.lost().is_some());
            silences += 1;
            kept += usize::from(software::pairs() == last);
        },
    );
    println!("{silences} silences, after which {kept} links went on that began during one");
    assert!(silences == times && kept > 0, "{silences} {kept}");
}

/// Of the control connection, one answer is all that comes; what was under way is sent again before anything
/// has come through the new queue pairs.
#[test]
fn a_session_is_resumed_in_three_round_trips() {
    const LEN: u64 = 700_000;
    let _one = alone();
    let server = TcpServer::start();
    let turns = Turns::before(&server.config);
    let (bridge, mut client) = Bridge::begin(&turns.config, true);
    client.synchronize();
    let from = [Extent { len: LEN, ..extents(1)[0] }];
    // A thread that did not run for long enough sees only queue pairs that have the place of the first new
    // ones. Then it is done again.
    let saw = (1..20).any(|round| {
        let (resumed, attempts) = (bridge.session().counters().resumed.get(), server.resumed());
        // A write does not come.
        software::silence(true);
        let before = software::pairs();
        write(&bridge.memories, &from, &pattern(LEN as usize, round));
        client.htod(1, region(1, 0, LEN));
        until("it is under way", || before.iter().filter(|pair| software::sends(**pair) > 0).count() > 1);
        turns.hold(1, |_| {
            let numbers = 3 * size_of::<Received>() + size_of::<Queues>() + 2 * size_of::<FrameHeader>();
            Exchange { says: size_of::<Hello>() + numbers, hears: size_of::<Welcome>() + numbers }
        });
        // A message, and the write on another queue, though nothing has come.
        let fresh = |pair: &u32| !before.contains(pair) && software::sends(*pair) > 0;
        let sent_again = || software::pairs().iter().filter(|pair| fresh(pair)).count() > 1;
        let mut saw = false;
        until("it is sent again", || {
            saw |= sent_again();
            saw || server.resumed() > attempts + 1
        });
        assert_eq!(bridge.session().counters().resumed.get(), resumed);
        software::silence(false);
        until("it is resumed", || bridge.session().counters().resumed.get() > resumed);
        turns.release();
        client.dtoh(1, region(2, 0, LEN));
        client.synchronize();
        let to = [Extent { len: LEN, ..extents(2)[0] }];
        assert!(read(&bridge.memories, &to) == pattern(LEN as usize, round));
        saw
    });
    assert!(saw, "what was under way waits for an answer");
    leaves_nothing(bridge);
}

/// As [`disturbed_with`], with devices that repeat what is under way on each queue every 2.1 s, as software
/// RoCE does, whether it was lost or not.
fn with_slow_timers(seed: u64, times: u64, disturb: impl FnMut(&mut Bridge, &mut Random)) {
    const TIMER: Duration = Duration::from_millis(2100);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut due = HashMap::new();
            while !over.load(Ordering::SeqCst) {
                let now = Instant::now();
                for pair in software::pairs() {
                    let due = due.entry(pair).or_insert(now + TIMER);
                    if now >= *due {
                        software::repeat(pair);
                        *due = now + TIMER;
                    }
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        disturbed_with(seed, times, |config| config, disturb);
        over.store(true, Ordering::SeqCst);
    });
}

/// A measurement that checks no limit: prints how soon work continues after silences of 0.1 to 8 s.
/// `RGPU_SURVIVAL_CUTS` is their number.
#[test]
fn work_goes_on_after_a_silence() {
    let times = number("RGPU_SURVIVAL_CUTS", 2);
    let (mut waits, mut undisturbed) = (Vec::new(), Vec::new());
    with_slow_timers(11, times, |bridge, random| {
        // More data than before, both ways.
        let goes_on = |since: Instant| {
            let counters = bridge.session().counters();
            let (sent, received) = (counters.data_bytes_sent.get(), counters.data_bytes_received.get());
            until("it goes on", || {
                bridge.lost().is_some()
                    || counters.data_bytes_sent.get() > sent && counters.data_bytes_received.get() > received
            });
            since.elapsed()
        };
        undisturbed.push(goes_on(Instant::now()));
        std::thread::sleep(Duration::from_millis(random.below(50) as u64));
        let silence = Duration::from_millis(100 + random.below(if times > 10 { 8000 } else { 2000 }) as u64);
        let resumed = bridge.session().counters().resumed.get();
        software::silence(true);
        std::thread::sleep(silence);
        software::silence(false);
        waits.push(goes_on(Instant::now()));
        let resumed = bridge.session().counters().resumed.get() - resumed;
        println!(
            "{silence:.1?} of silence, and {:.2?} until work went on; resumed {resumed} times",
            waits[waits.len() - 1]
        );
    });
    assert_eq!(waits.len() as u64, times);
    for (what, mut waits) in
        [("work goes on after a silence", waits), ("undisturbed, as much work takes", undisturbed)]
    {
        waits.sort();
        let share = |percent: usize| waits[(waits.len() * percent / 100).min(waits.len() - 1)];
        println!(
            "{what}: {:.2?} (median), {:.2?} (95 %), {:.2?} (longest)",
            share(50),
            share(95),
            share(100)
        );
    }
}
