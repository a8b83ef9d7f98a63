//! Tests of the state machine.

use std::cell::Cell;

use super::*;
use crate::driver::store::memory_for;
use proptest::prelude::*;

thread_local! {
    /// How many sessions were looked at for others.
    pub(super) static LOOKED: Cell<usize> = const { Cell::new(0) };
}

const SECOND: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

fn rules(memory: u64) -> Rules {
    Rules { residency: 2 * SECOND, memory, memory_each: memory, files: false }
}

fn on(device: u32, bytes: u64) -> Bytes {
    Bytes::from([(device, bytes)])
}

/// A session with all its memory on device 0, idle since 1.
fn idle(worker: u32, principal: &str, bytes: u64) -> View {
    View {
        worker,
        principal: principal.into(),
        swap: true,
        on: on(0, bytes),
        movable: on(0, bytes),
        rested: Some(1),
        ..View::default()
    }
}

fn newcomer(worker: u32, principal: &str, bytes: u64) -> View {
    View { worker, principal: principal.into(), swap: true, needs: on(0, bytes), ..View::default() }
}

fn leaving(decided: &Decided) -> Vec<u32> {
    let leave = |(worker, _, order, _): &(u32, u32, MemoryOrder, bool)| {
        matches!(order, MemoryOrder::Leave { .. }).then_some(*worker)
    };
    decided.orders.iter().filter_map(leave).collect()
}

#[test]
fn nothing_is_decided_while_everything_fits() {
    let mut residency = Residency::new(rules(u64::MAX));
    let views = [idle(1, "a", 40), idle(2, "b", 40), newcomer(3, "c", 20)];
    let decided = residency.step(10 * SECOND, &on(0, 100), &views);
    assert!(decided.orders.is_empty() && decided.held_back.is_empty());
}

#[test]
fn the_own_principals_sessions_leave_first_then_the_longest_idle() {
    for (wanted, expected) in [(30, vec![3]), (50, vec![3, 2]), (80, vec![3, 2, 1])] {
        let mut residency = Residency::new(rules(u64::MAX));
        let views = [
            View { rested: Some(2), ..idle(1, "a", 30) },
            idle(2, "a", 30),
            View { rested: Some(3), ..idle(3, "b", 30) },
            newcomer(4, "b", wanted),
        ];
        let decided = residency.step(10 * SECOND, &on(0, 90), &views);
        assert_eq!(leaving(&decided), expected, "{wanted}");
        assert!(residency.step(10 * SECOND, &on(0, 90), &views).orders.is_empty(), "once");
    }
}

#[test]
fn unswappable_sessions_stay_and_nobody_leaves_in_vain() {
    let stays = [
        View { swap: false, ..idle(2, "a", 50) },
        View { movable: Bytes::new(), ..idle(2, "a", 50) },
        View { needs: on(1, 1), ..idle(2, "a", 50) },
        View { began: 9 * SECOND, ..idle(2, "a", 50) },
        View { on: on(1, 50), movable: on(1, 50), ..idle(2, "a", 50) },
    ];
    // Without the second session's memory, the first one would leave in vain.
    for (number, view) in stays.into_iter().enumerate() {
        let mut residency = Residency::new(rules(u64::MAX));
        let views = [idle(1, "a", 50), view, newcomer(3, "a", 101 - 50 * u64::from(number < 4))];
        let decided = residency.step(10 * SECOND, &Bytes::from([(0, 100), (1, 100)]), &views);
        assert!(decided.orders.is_empty(), "{number}: {decided:?}");
        assert_eq!(decided.held_back, if number == 3 { vec![3] } else { Vec::<u32>::new() }, "{number}");
    }
}

#[test]
fn where_no_limit_is_known_nobody_leaves_and_whoever_is_away_returns() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), newcomer(2, "b", 60)];
    assert!(residency.step(10 * SECOND, &Bytes::new(), &views).orders.is_empty());
    views[1] = View { away: on(0, 60), returns: true, ..newcomer(2, "b", 0) };
    let decided = residency.step(10 * SECOND, &Bytes::new(), &views);
    assert_eq!(decided.orders, [(2, 1, MemoryOrder::Return, false)]);
}

/// The daemon decides every 10 ms while anybody waits, and all sessions wait for that.
#[test]
fn each_session_in_line_looks_at_the_others_only_a_few_times() {
    const WAIT: u32 = 100;
    let mut residency = Residency::new(rules(u64::MAX));
    // Pairs that belong together, and whose time on the device is not over.
    let holds = |worker| View { group: Some(worker / 2), began: 10 * SECOND, ..idle(worker, "a", 1) };
    let waits = |worker| View { began: u64::from(worker), ..newcomer(worker, "b", 1) };
    let views: Vec<View> = (0..WAIT).map(holds).chain((WAIT..2 * WAIT).map(waits)).collect();
    LOOKED.set(0);
    let decided = residency.step(10 * SECOND, &on(0, WAIT.into()), &views);
    assert_eq!(decided.held_back.len(), WAIT as usize);
    assert!(LOOKED.get() <= 10 * views.len() * WAIT as usize, "{}", LOOKED.get());
}

/// Two programs that allocate at the same time would otherwise each wait for the other's part.
#[test]
fn a_session_further_back_in_line_leaves_immediately_if_it_can() {
    for yields in [true, false] {
        let mut residency = Residency::new(rules(u64::MAX));
        let part = |worker, bytes| View {
            on: on(0, bytes),
            movable: on(0, bytes),
            yields,
            rested: None,
            ..newcomer(worker, "a", 10)
        };
        let mut views = [part(1, 50), View { needs: Bytes::new(), ..part(2, 50) }];
        residency.step(SECOND, &on(0, 100), &views);
        views[1] = part(2, 50);
        let decided = residency.step(2 * SECOND, &on(0, 100), &views);
        assert_eq!(leaving(&decided), if yields { vec![2] } else { vec![] });
        // What it releases does not go to whoever asks next.
        let number = decided.orders.first().map_or(0, |order| order.1);
        views[1] =
            View { on: Bytes::new(), away: on(0, 50), returns: true, done: (number, true), ..part(2, 50) };
        residency.step(2 * SECOND, &on(0, 100), &views);
        assert_eq!(
            (residency.reserved(1, 0), residency.reserved(2, 0), residency.reserved(7, 0)),
            (0, 10, 10)
        );
        // The first keeps its place between two pieces.
        views[0] = View { on: on(0, 60), movable: on(0, 60), needs: Bytes::new(), ..part(1, 60) };
        residency.step(2 * SECOND + 1, &on(0, 100), &views);
        views[0] = part(1, 60);
        residency.step(2 * SECOND + 2, &on(0, 100), &views);
        assert_eq!(residency.reserved(1, 0), 0, "nobody is before it");
    }
}

#[test]
fn a_busy_session_leaves_only_after_a_longer_time() {
    let mut residency = Residency::new(rules(u64::MAX));
    let views = [View { rested: None, ..idle(1, "a", 60) }, newcomer(2, "b", 60)];
    let budget = on(0, 100);
    let early = residency.step(9 * SECOND, &budget, &views);
    assert_eq!((leaving(&early), early.held_back), (vec![], vec![2]));
    assert!(residency.step(9 * SECOND, &budget, &views).held_back.is_empty(), "noted once");
    let late = residency.step(10 * SECOND, &budget, &views);
    assert_eq!(late.orders, [(1, 1, MemoryOrder::Leave { busy: true }, false)]);
}

/// Programs that need their memory with two servers at the same time would otherwise hardly ever have both.
#[test]
fn a_busy_session_works_for_longer_than_its_memory_moves() {
    for (takes, stays) in [(4, 10), (8, 16), (100, 60)] {
        let mut residency = Residency::new(rules(u64::MAX));
        let away = View { on: Bytes::new(), away: on(0, 60), rested: None, ..idle(1, "a", 60) };
        let asks = View { returns: true, ..away };
        let decided = residency.step(SECOND, &on(0, 100), std::slice::from_ref(&asks));
        assert_eq!(decided.orders, [(1, 1, MemoryOrder::Return, false)]);
        let there = View { rested: None, done: (1, true), ..idle(1, "a", 60) };
        let mut views = vec![there];
        let began = (1 + takes) * SECOND;
        residency.step(began, &on(0, 100), &views);
        views.push(newcomer(2, "b", 60));
        for (after, leaves) in [(stays * SECOND - 1, vec![]), (stays * SECOND, vec![1])] {
            assert_eq!(leaving(&residency.step(began + after, &on(0, 100), &views)), leaves, "{takes}");
        }
    }
}

#[test]
fn a_sessions_time_on_the_devices_begins_when_all_its_bytes_are_back() {
    let mut residency = Residency::new(rules(u64::MAX));
    let budget = on(0, 100);
    let idle = View { rested: None, ..idle(1, "a", 60) };
    let away = View { on: Bytes::new(), away: on(0, 60), returns: true, ..idle.clone() };
    let decided = residency.step(SECOND, &budget, &[away]);
    assert_eq!(decided.orders, [(1, 1, MemoryOrder::Return, false)]);
    let copies = View { begun: 1, returns: true, ..idle.clone() };
    residency.step(2 * SECOND, &budget, &[copies, newcomer(2, "b", 60)]);
    let views = [View { done: (1, true), begun: 1, ..idle }, newcomer(2, "b", 60)];
    let back = residency.step(11 * SECOND, &budget, &views);
    assert_eq!((leaving(&back), back.held_back), (vec![], vec![2]));
    assert_eq!(leaving(&residency.step(31 * SECOND, &budget, &views)), [1]);
}

#[test]
fn a_session_that_does_not_begin_to_leave_is_not_waited_for() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), View { rested: Some(2), ..idle(2, "a", 60) }, newcomer(3, "b", 60)];
    let budget = on(0, 120);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    assert_eq!(leaving(&residency.step(11 * SECOND, &budget, &views)), [] as [u32; 0]);
    assert_eq!(leaving(&residency.step(11 * SECOND + 1, &budget, &views)), [2]);
    views[1].begun = 1;
    assert_eq!(leaving(&residency.step(60 * SECOND, &budget, &views)), [] as [u32; 0]);
    // It is ordered again to do what it could not, later each time.
    (views[0].done, views[1].done) = ((1, false), (1, false));
    assert!(residency.step(60 * SECOND, &budget, &views).orders.is_empty());
    assert_eq!(leaving(&residency.step(60 * SECOND + AGAIN, &budget, &views)), [1]);
}

#[test]
fn nobody_leaves_before_there_is_room_for_its_memory() {
    let mut residency = Residency::new(rules(64 * MIB));
    let mut views = [idle(1, "a", 60), View { keeps: 64 * MIB, ..idle(2, "a", 30) }, newcomer(3, "b", 60)];
    let budget = on(0, 90);
    let first = residency.step(10 * SECOND, &budget, &views);
    assert_eq!(first.orders, [(2, 1, MemoryOrder::Forget, false)]);
    views[1].done = (1, true);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    // With files, there is room immediately.
    let mut residency = Residency::new(Rules { files: true, ..rules(0) });
    let decided = residency.step(10 * SECOND, &budget, &views);
    assert_eq!(decided.orders, [(1, 1, MemoryOrder::Leave { busy: false }, true)]);
}

#[test]
fn what_goes_to_a_file_takes_a_chunk_of_memory_on_its_way() {
    let chunk = memory_for(1);
    let mut residency = Residency::new(Rules { files: true, ..rules(chunk) });
    let views = [idle(1, "a", 2 * chunk), View { rested: Some(2), ..idle(2, "a", chunk) }];
    let views = [&views[..], &[newcomer(3, "b", 3 * chunk)]].concat();
    let decided = residency.step(10 * SECOND, &on(0, 3 * chunk), &views);
    let order = |worker| (worker, 1, MemoryOrder::Leave { busy: false }, true);
    assert_eq!(decided.orders, [order(1), order(2)]);
}

#[test]
fn a_session_that_waits_because_there_is_no_memory_for_what_others_have_is_named_once() {
    let mut residency = Residency::new(rules(64 * MIB));
    let away = View { away: on(0, 60), keeps: 64 * MIB, returns: true, ..View::default() };
    let mut views = [View { worker: 1, movable: on(0, 60), ..away }, idle(2, "a", 60), newcomer(3, "b", 60)];
    let mut named = |views: &[View]| residency.step(10 * SECOND, &on(0, 100), views).no_store;
    assert_eq!(named(&views), [1, 3]);
    assert_eq!(named(&views), [] as [u32; 0]);
    // When it has been served and waits again, that is another time.
    views[2].needs = Bytes::new();
    assert_eq!(named(&views), [] as [u32; 0]);
    views[2].needs = on(0, 60);
    assert_eq!(named(&views), [3]);
    // While memory is on its way, or if it may go to files, nobody is named.
    let (rule, files) = (rules(64 * MIB), Rules { files: true, ..rules(0) });
    let keeps = [View { keeps: 64 * MIB, ..idle(1, "a", 30) }, idle(2, "a", 60), newcomer(3, "b", 60)];
    for (rules, views) in [(rule, keeps), (files, views)] {
        let decided = Residency::new(rules).step(10 * SECOND, &on(0, 100), &views);
        assert_eq!((decided.no_store.len(), decided.orders.is_empty()), (0, false));
    }
}

#[test]
fn only_one_session_returns_into_memory_being_released() {
    let mut residency = Residency::new(rules(u64::MAX));
    let away = |worker| View { on: Bytes::new(), away: on(0, 60), returns: true, ..idle(worker, "a", 60) };
    let mut views = [idle(1, "a", 60), away(2), View { began: 1, ..away(3) }];
    let budget = on(0, 100);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    (views[0].begun, views[0].on, views[0].away) = (1, on(0, 50), on(0, 10));
    let decided = residency.step(10 * SECOND, &budget, &views);
    assert_eq!(decided.orders, [(2, 1, MemoryOrder::Return, false)]);
    assert!(residency.step(10 * SECOND, &budget, &views).orders.is_empty());
}

#[test]
fn a_session_that_fits_passes_one_that_cannot_be_served() {
    let mut residency = Residency::new(rules(u64::MAX));
    let waits = |worker, bytes| View {
        on: Bytes::new(),
        away: on(0, bytes),
        returns: true,
        ..idle(worker, "a", bytes)
    };
    let endless = View { swap: false, ..idle(1, "a", 60) };
    residency.step(SECOND, &on(0, 100), &[endless.clone(), waits(2, 60)]);
    let decided = residency.step(2 * SECOND, &on(0, 100), &[endless, waits(2, 60), waits(3, 30)]);
    assert_eq!(decided.orders, [(3, 1, MemoryOrder::Return, false)]);
}

/// Its worker hangs, or lies.
#[test]
fn a_session_that_does_not_take_the_room_that_it_has_keeps_it_from_nobody_for_long() {
    let mut residency = Residency::new(rules(u64::MAX));
    let hangs = newcomer(1, "a", 90);
    residency.step(SECOND, &on(0, 100), std::slice::from_ref(&hangs));
    let away = View { on: Bytes::new(), away: on(0, 60), returns: true, ..idle(2, "b", 60) };
    let views = [hangs, away];
    let orders = |residency: &mut Residency, at| residency.step(at, &on(0, 100), &views).orders;
    assert_eq!(orders(&mut residency, 2 * SECOND), []);
    assert_eq!(residency.reserved(3, 0), 90);
    assert_eq!(orders(&mut residency, 2 * SECOND + 1), [(2, 1, MemoryOrder::Return, false)]);
    assert_eq!(residency.reserved(3, 0), 60);
}

#[test]
fn a_worker_that_says_it_has_left_and_stays_makes_nobody_wait() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), View { rested: Some(2), ..idle(2, "a", 60) }, newcomer(3, "b", 60)];
    let budget = on(0, 120);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    // It has carried out everything, and all of it is where it was.
    (views[0].begun, views[0].done) = (1, (1, true));
    assert_eq!(leaving(&residency.step(10 * SECOND + 1, &budget, &views)), [2]);
    assert_eq!(residency.moves(), 0, "others see no progress");
}

#[test]
fn a_worker_that_begins_to_leave_and_moves_nothing_is_not_waited_for() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), View { rested: Some(2), ..idle(2, "a", 60) }, newcomer(3, "b", 60)];
    let budget = on(0, 120);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    views[0].begun = 1;
    let mut later = |seconds, views: &[View]| leaving(&residency.step(seconds * SECOND, &budget, views));
    assert_eq!(later(19, &views), [] as [u32; 0]);
    // One that takes long, but moves, is.
    (views[0].away, views[0].on) = (on(0, 10), on(0, 50));
    assert_eq!(later(20, &views), [] as [u32; 0]);
    assert_eq!(later(30, &views), [] as [u32; 0]);
    assert_eq!(later(31, &views), [2]);
}

#[test]
fn what_is_free_stays_reserved_while_a_large_piece_may_be_leaving() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), newcomer(2, "b", 70)];
    let budget = on(0, 75);
    let mut step = |seconds, views: &[View]| {
        let decided = residency.step(seconds * SECOND, &budget, views);
        (leaving(&decided), residency.reserved(3, 0), residency.moves())
    };
    assert_eq!(step(10, &views), (vec![1], 15, 0));
    views[0].begun = 1;
    assert_eq!(step(10, &views), (vec![], 15, 0));
    // It is not counted on any more, but others do not take the 15 that are free.
    assert_eq!(step(21, &views), (vec![], 15, 0));
    assert_eq!(step(40, &views), (vec![], 15, 0));
    // The waiting session has given up by now, unless its worker lies.
    assert_eq!(step(41, &views), (vec![], 0, 0));
    // Whoever waits sees that something moves.
    (views[0].away, views[0].on) = (on(0, 30), on(0, 30));
    assert_eq!(step(42, &views), (vec![], 45, 1));
}

#[test]
fn whoever_waits_sees_what_moves_as_long_as_it_moves_in_time() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), newcomer(2, "b", 60)];
    assert_eq!(leaving(&residency.step(10 * SECOND, &on(0, 60), &views)), [1]);
    views[0].begun = 1;
    let mut moves = Vec::new();
    for piece in 1..=6 {
        (views[0].away, views[0].on) = (on(0, piece), on(0, 60 - piece));
        residency.step((10 + 29 * piece) * SECOND, &on(0, 60), &views);
        moves.push(residency.moves());
    }
    // 120 s are over with the fifth.
    assert_eq!(moves, [1, 2, 3, 4, 4, 4]);
}

#[test]
fn a_worker_that_begins_late_to_leave_is_counted_on_from_then() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [idle(1, "a", 60), View { rested: Some(2), ..idle(2, "a", 60) }, newcomer(3, "b", 60)];
    let budget = on(0, 120);
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
    views[0].begun = 1;
    assert_eq!(leaving(&residency.step(25 * SECOND, &budget, &views)), [] as [u32; 0]);
    assert_eq!(leaving(&residency.step(36 * SECOND, &budget, &views)), [2]);
}

#[test]
fn room_is_not_kept_for_a_worker_that_only_says_that_it_returns() {
    let waits = |bytes, needs| View {
        on: Bytes::new(),
        movable: on(0, bytes),
        away: on(0, bytes),
        needs: on(0, needs),
        returns: true,
        swap: true,
        worker: 1,
        ..View::default()
    };
    let budget = on(0, 100);
    // It never does: what it will want then is kept for it as long as it may be on its way.
    let mut residency = Residency::new(rules(u64::MAX));
    let hangs = [waits(1, 90)];
    assert_eq!(residency.step(SECOND, &budget, &hangs).orders, [(1, 1, MemoryOrder::Return, false)]);
    residency.step(11 * SECOND, &budget, &hangs);
    assert_eq!(residency.reserved(2, 0), 90);
    residency.step(11 * SECOND + 1, &budget, &hangs);
    assert_eq!(residency.reserved(2, 0), 0);
    // Nothing of it is away: it waits for new memory like others.
    let mut residency = Residency::new(rules(u64::MAX));
    let nothing = [View { away: Bytes::new(), movable: Bytes::new(), ..waits(0, 90) }];
    assert!(residency.step(SECOND, &budget, &nothing).orders.is_empty());
    residency.step(2 * SECOND + 1, &budget, &nothing);
    assert_eq!(residency.reserved(2, 0), 0);
    // It says that it cannot: others come first, and before it is ordered again, everybody may have the room.
    let mut residency = Residency::new(rules(u64::MAX));
    let other = View { worker: 2, began: 1, ..waits(60, 0) };
    let mut views = [waits(60, 0), other];
    let order = |worker| vec![(worker, 1, MemoryOrder::Return, false)];
    assert_eq!(residency.step(SECOND, &budget, &views).orders, order(1));
    views[0].done = (1, false);
    assert_eq!(residency.step(2 * SECOND, &budget, &views).orders, order(2));
}

#[test]
fn room_that_is_not_taken_again_and_again_is_offered_less_and_less_often() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut hangs = newcomer(1, "a", 90);
    let kept = |residency: &mut Residency, hangs: &View, from: u64| {
        let keeps = |step: &u64| {
            residency.step(step * AGAIN, &on(0, 100), std::slice::from_ref(hangs));
            residency.reserved(2, 0) > 0
        };
        (from..from + 600).filter(keeps).count()
    };
    assert!(kept(&mut residency, &hangs, 10) < 300);
    assert!(kept(&mut residency, &hangs, 610) < 100);
    // One that takes some is trusted again.
    (hangs.on, hangs.needs) = (on(0, 10), on(0, 80));
    residency.step(1300 * AGAIN, &on(0, 100), std::slice::from_ref(&hangs));
    assert_eq!(residency.reserved(2, 0), 80);
}

#[test]
fn a_worker_does_not_say_that_it_keeps_more_memory_of_the_machine_than_it_may() {
    let mut residency = Residency::new(Rules { memory_each: 16 * MIB, ..rules(64 * MIB) });
    let liar = View { keeps: u64::MAX, swap: false, ..idle(1, "a", 10) };
    let views = [liar, idle(2, "a", 60), newcomer(3, "b", 60)];
    assert_eq!(leaving(&residency.step(10 * SECOND, &on(0, 90), &views)), [2]);
}

/// A rank of a program: 60 of a device's 100 bytes.
fn rank(worker: u32, device: u32, group: u32) -> View {
    let (on, movable) = (on(device, 60), on(device, 60));
    View { group: Some(group), on, movable, ..idle(worker, "a", 0) }
}

/// The same, away, with a command.
fn waits(view: &View) -> View {
    View { on: Bytes::new(), away: view.movable.clone(), returns: true, rested: None, ..view.clone() }
}

const TWO: [(u32, u64); 2] = [(0, 100), (1, 100)];

#[test]
fn sessions_that_belong_together_leave_together_when_all_of_them_are_idle() {
    let mut residency = Residency::new(rules(u64::MAX));
    let mut views = [rank(1, 0, 1), View { rested: None, ..rank(2, 1, 1) }, newcomer(3, "b", 60)];
    let decided = residency.step(60 * SECOND, &Bytes::from(TWO), &views);
    assert_eq!((leaving(&decided), decided.outlasted), (vec![], vec![3]));
    let decided = residency.step(61 * SECOND, &Bytes::from(TWO), &views);
    assert!(decided.outlasted.is_empty(), "noted once");
    views[1].rested = Some(1);
    assert_eq!(leaving(&residency.step(62 * SECOND, &Bytes::from(TWO), &views)), [1, 2]);
    // Nobody moves if there is no memory for all of them.
    let mut residency = Residency::new(rules(memory_for(1)));
    let views = [rank(1, 0, 1), rank(2, 1, 1), newcomer(3, "b", 60)];
    assert!(residency.step(60 * SECOND, &Bytes::from(TWO), &views).orders.is_empty());
    // Nor for one of their own.
    let mut residency = Residency::new(rules(u64::MAX));
    let views = [rank(1, 0, 1), rank(2, 1, 1), View { group: Some(1), ..newcomer(3, "a", 60) }];
    assert!(residency.step(60 * SECOND, &Bytes::from(TWO), &views).orders.is_empty());
}

#[test]
fn what_one_of_them_has_left_is_kept_for_it_until_all_have_left() {
    let mut residency = Residency::new(rules(u64::MAX));
    let budget = Bytes::from(TWO);
    let mut views = [rank(1, 0, 1), rank(2, 1, 1), newcomer(3, "b", 60)];
    assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1, 2]);
    let left = |view: &View| View {
        on: Bytes::new(),
        away: view.movable.clone(),
        begun: 1,
        done: (1, true),
        ..view.clone()
    };
    views[0] = left(&views[0]);
    residency.step(10 * SECOND, &budget, &views);
    assert!(residency.keeps_room(1));
    // The other one has work, and stays. What that waits for comes before everybody else.
    views[1] = View { begun: 1, done: (1, false), rested: None, ..views[1].clone() };
    views[0] = View { returns: true, rested: None, ..views[0].clone() };
    let decided = residency.step(10 * SECOND, &budget, &views);
    assert_eq!(decided.orders, [(1, 2, MemoryOrder::Return, false)]);
    // If both have left, the room is everybody's.
    views[0] = View { returns: false, rested: Some(1), ..views[0].clone() };
    let mut residency = Residency::new(rules(u64::MAX));
    views[1] = left(&rank(2, 1, 1));
    residency.step(10 * SECOND, &budget, &views);
    assert_eq!((residency.keeps_room(1), residency.reserved(9, 0)), (false, 60));
}

#[test]
fn they_return_when_there_is_room_for_all_of_them() {
    let mut residency = Residency::new(rules(u64::MAX));
    let budget = Bytes::from(TWO);
    let stays = View { swap: false, group: None, ..rank(3, 1, 0) };
    let away = |worker, device, group| View { returns: false, ..waits(&rank(worker, device, group)) };
    let first = waits(&rank(1, 0, 1));
    let mut views = vec![first, away(2, 1, 1), stays];
    assert!(residency.step(SECOND, &budget, &views).orders.is_empty(), "the second one's device is full");
    views.pop();
    let decided = residency.step(2 * SECOND, &budget, &views);
    assert_eq!(decided.orders, [(1, 1, MemoryOrder::Return, false)]);
    views[0] = View { begun: 1, done: (1, true), rested: None, ..rank(1, 0, 1) };
    // Nobody gets the second one's room meanwhile.
    views.push(waits(&View { group: None, ..rank(4, 1, 0) }));
    assert!(residency.step(3 * SECOND, &budget, &views).orders.is_empty());
    assert!(residency.keeps_room(2));
    views[1].returns = true;
    let decided = residency.step(4 * SECOND, &budget, &views);
    assert_eq!(decided.orders, [(2, 1, MemoryOrder::Return, false)]);
}

/// Two programs with a rank on each of two devices. A rank's kernels end only if the other rank is on its
/// device. Returns how much each program has done.
fn pairs(together: bool) -> [u64; 2] {
    const STEP: u64 = 100_000_000;
    let mut residency = Residency::new(rules(u64::MAX));
    let ranks = [(1, 0, 1), (2, 1, 1), (3, 0, 2), (4, 1, 2)];
    let mut views = ranks.map(|(worker, device, group)| rank(worker, device, group));
    for view in &mut views[2..] {
        *view = View { returns: false, ..waits(view) };
    }
    let (mut orders, mut done) = ([None; 4], [0; 2]);
    for step in 0..6000u64 {
        for index in 0..4 {
            let partner = views[index ^ 1].away.is_empty() && orders[index ^ 1].is_none();
            let view = &mut views[index];
            // Each program has commands most of the time. A rank notices that a little later than the other.
            let works = (step + 137 * (index as u64 / 2) + index as u64 % 2) % 400 < 380;
            let runs = view.away.is_empty() && view.rested.is_none();
            match orders[index].take() {
                // A kernel that waits for the other rank stays.
                Some((number, MemoryOrder::Leave { busy })) => {
                    let can = if runs { busy && partner } else { !works };
                    (view.begun, view.done) = (number, (number, can));
                    if can {
                        (view.away, view.on) = (view.movable.clone(), Bytes::new());
                    }
                }
                Some((number, _)) => {
                    (view.begun, view.done, view.returns) = (number, (number, true), false);
                    (view.on, view.away) = (view.movable.clone(), Bytes::new());
                }
                None => {}
            }
            if !view.away.is_empty() {
                view.returns |= works;
                view.rested = if works { None } else { Some(step * STEP) };
            } else if works || runs && !partner {
                // What was launched is finished first.
                view.rested = None;
                done[index / 2] += u64::from(partner);
            } else {
                view.rested = view.rested.or(Some(step * STEP));
            }
        }
        let seen = views.clone().map(|view| View { group: view.group.filter(|_| together), ..view });
        for (worker, number, order, _) in residency.step(step * STEP, &Bytes::from(TWO), &seen).orders {
            orders[worker as usize - 1] = Some((number, order));
        }
        for device in 0..2 {
            let used: u64 = views.iter().filter_map(|view| view.on.get(&device)).sum();
            assert!(used <= 100, "{used}");
        }
    }
    done
}

#[test]
fn two_programs_whose_ranks_wait_for_each_other_take_turns() {
    let done = pairs(true);
    assert!(done.iter().all(|done| *done > 500), "{done:?}");
    // One by one, each of them comes to have one device and to wait for the other.
    let alone = pairs(false);
    assert!(alone.iter().any(|done| *done < 500), "{alone:?}");
}

/// A session of a simulated server.
#[derive(Debug, Clone)]
struct Simulated {
    bytes: u64,
    /// Steps with commands, then steps without, repeatedly.
    works: u64,
    rests: u64,
    phase: u64,
    swap: bool,
    /// Whether a device works for it endlessly.
    endless: bool,
    /// Steps that it takes to carry out an order.
    takes: u64,
    /// How many of its orders to leave fail halfway.
    fails: u64,
}

fn simulated() -> impl Strategy<Value = Simulated> {
    (
        20u64..70,
        1u64..40,
        1u64..60,
        0u64..100,
        prop::bool::weighted(0.85),
        prop::bool::weighted(0.1),
        0u64..20,
        prop_oneof![2 => Just(0u64), 1 => 1u64..4],
    )
        .prop_map(|(bytes, works, rests, phase, swap, endless, takes, fails)| Simulated {
            bytes: bytes * MIB,
            works,
            rests,
            phase,
            swap,
            endless,
            takes,
            fails,
        })
}

/// The state of a simulated session.
#[derive(Debug, Clone, Default)]
struct Now {
    view: View,
    order: Option<(MemoryOrder, u64)>,
    came: u64,
    done: u64,
    waited: u64,
    late: u64,
    failed: u64,
}

/// The first to wait gets the rest of what has left in part, whether its session is idle or waits, too.
#[test]
fn a_session_that_has_left_in_part_is_ordered_to_leave_with_the_rest() {
    for returns in [false, true] {
        let mut residency = Residency::new(rules(u64::MAX));
        let mut views = vec![idle(1, "a", 60), newcomer(2, "a", 50)];
        let decided = residency.step(10 * SECOND, &on(0, 100), &views);
        assert_eq!(leaving(&decided), [1]);
        views[0] =
            View { done: (1, false), begun: 1, away: on(0, 5), on: on(0, 55), returns, ..idle(1, "a", 60) };
        let early = residency.step(10 * SECOND + AGAIN / 2, &on(0, 100), &views);
        assert!(leaving(&early).is_empty(), "after a pause");
        let decided = residency.step(10 * SECOND + 2 * AGAIN, &on(0, 100), &views);
        assert_eq!(leaving(&decided), [1], "{returns}");
        // What is away already makes no room.
        views[0] = View { away: on(0, 60), on: Bytes::new(), done: (2, true), ..views[0].clone() };
        views[1].needs = on(0, 50);
        views.push(newcomer(3, "a", 60));
        let decided = residency.step(20 * SECOND, &on(0, 100), &views);
        assert!(decided.orders.is_empty(), "{decided:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever sessions do: a device never holds more than it has, nor the machine's memory more than it
    /// may; unswappable sessions stay; nobody leaves before its residency is over; and if all may leave
    /// and none works endlessly, all make progress, although some orders to leave fail halfway.
    #[test]
    fn memory_is_never_exceeded_and_everybody_makes_progress(all in prop::collection::vec(simulated(), 1..7), memory in 0u64..16) {
        const STEP: u64 = 100_000_000;
        // Programs allocate in pieces.
        let next = |bytes: u64, have: u64| on(0, (bytes - have).min(10 * MIB));
        let (capacity, memory) = (100 * MIB, memory * 64 * MIB);
        let mut residency = Residency::new(rules(memory));
        let mut now: Vec<Now> = (0..).zip(&all).map(|(worker, one)| Now {
            view: View {
                worker,
                principal: format!("{}", worker % 2),
                swap: one.swap,
                needs: next(one.bytes, 0),
                yields: true,
                ..View::default()
            },
            ..Now::default()
        }).collect();
        let somebody_fails = all.iter().any(|one| one.fails > 0);
        for step in 0..2000u64 {
            let time = step * STEP;
            for index in 0..now.len() {
                let others: u64 = now.iter().map(|state| sum(&state.view.on)).sum::<u64>() - sum(&now[index].view.on);
                let (one, state) = (&all[index], &mut now[index]);
                let Now { view, order, came, done, waited, late, failed } = state;
                let (all, takes) = (sum(&view.movable), sum(&view.needs) > 0);
                if let Some((what, left)) = order {
                    if *left > 0 {
                        *left -= 1;
                        // Half of its memory leaves along the way, unless it cannot.
                        let half = (all / 2).max(sum(&view.away));
                        if matches!(what, MemoryOrder::Leave { busy } if takes || !one.endless && (*busy || view.rested.is_some())) {
                            (view.away, view.on) = (on(0, half), on(0, all - half));
                        }
                        continue;
                    }
                    // A returning session waits until the others have left, and gives up if one fails to.
                    if *what == MemoryOrder::Return && others + all > capacity {
                        *late += 1;
                        prop_assert!(*late < 50 || somebody_fails, "others have not left");
                        if *late == 50 {
                            (view.done, *order, *late) = ((view.begun, false), None, 0);
                        }
                        continue;
                    }
                    *late = 0;
                    if matches!(what, MemoryOrder::Leave { .. }) && sum(&view.away) > 0 && *failed < one.fails {
                        *failed += 1;
                        (view.done, *order) = ((view.begun, false), None);
                        continue;
                    }
                    let number = view.begun;
                    let idle = view.rested.is_some();
                    let can = match what {
                        MemoryOrder::Leave { busy } => takes || !one.endless && (*busy || idle),
                        _ => true,
                    };
                    view.done = (number, can);
                    match what {
                        MemoryOrder::Leave { .. } if can => (view.away, view.on) = (view.movable.clone(), Bytes::new()),
                        MemoryOrder::Return => {
                            (view.on, view.away, view.returns) = (view.movable.clone(), Bytes::new(), false);
                            *came = time;
                        }
                        MemoryOrder::Forget => view.keeps = 0,
                        MemoryOrder::Leave { .. } => {}
                    }
                    *order = None;
                }
                let at = (step + one.phase) % (one.works + one.rests);
                let wants = one.endless || at < one.works;
                *waited += 1;
                if takes {
                    view.returns = !view.away.is_empty();
                    continue;
                }
                if !view.away.is_empty() {
                    view.returns = wants || view.returns;
                    if !view.returns { *waited = 0; }
                    continue;
                }
                *waited = 0;
                *done += u64::from(wants);
                view.rested = if wants { None } else { view.rested.or(Some(time)) };
            }
            // A newcomer requests its memory again and again.
            for index in 0..now.len() {
                let used: u64 = now.iter().map(|state| sum(&state.view.on)
                    + if matches!(state.order, Some((MemoryOrder::Return, _))) { sum(&state.view.away) } else { 0 }).sum();
                let state = &mut now[index];
                let (asks, needs) = (state.order.is_none() && state.view.away.is_empty(), sum(&state.view.needs));
                if asks && needs > 0 && used + needs + residency.reserved(index as u32, 0) <= capacity {
                    let have = sum(&state.view.movable) + needs;
                    (state.view.on, state.view.movable) = (on(0, have), on(0, have));
                    state.view.needs = next(all[index].bytes, have);
                    state.view.needs.retain(|_, bytes| *bytes > 0);
                }
            }
            let views: Vec<View> = now.iter().map(|state| state.view.clone()).collect();
            let decided = residency.step(time, &on(0, capacity), &views);
            for (worker, number, order, file) in decided.orders {
                let (one, state) = (&all[worker as usize], &mut now[worker as usize]);
                prop_assert!(!file && state.order.is_none());
                if let MemoryOrder::Leave { busy } = order {
                    prop_assert!(one.swap && !left(&state.view).is_empty());
                    prop_assert!(state.view.away.is_empty() || one.fails > 0);
                    // New memory counts from the session's start. A session with only a part of what it
                    // wants keeps it from nobody.
                    let least = if busy { BUSY } else { 1 } * 2 * SECOND;
                    let takes = sum(&state.view.needs) > 0;
                    prop_assert!(takes || time >= state.came + least, "{time} {}", state.came);
                    state.view.keeps = memory_for(sum(&state.view.movable));
                }
                state.view.begun = number;
                state.order = Some((order, one.takes));
            }
            let used: u64 = now.iter().map(|state| sum(&state.view.on)).sum();
            prop_assert!(used <= capacity, "{used}");
            prop_assert!(now.iter().map(|state| state.view.keeps).sum::<u64>() <= memory);
            if all.iter().all(|one| one.swap && !one.endless) && memory >= 64 * MIB * 2 * all.len() as u64 {
                // Each of the others may keep its memory for ten seconds and take its time.
                let most = all.len() as u64 * (100 + 2 * 20 + 30) * 4;
                prop_assert!(now.iter().all(|state| state.waited <= most), "{step}: {now:?}");
            }
        }
    }
}
