//! Whose memory is on the devices: without I/O, in ns of any clock.
//!
//! Sessions together may hold more memory than a device has. Each is in one of two states: its movable memory is **on** its devices, or **away**, in memory of this machine. A session that is away
//! has none of it on any device, and comes back only when there is room for all of it. So no session waits for another with half of its memory in hand.
//!
//! Whoever wants room waits in line, and keeps its place for a moment after it has got some: programs take their memory in pieces. For the first in line, sessions are told to leave: idle ones before busy ones, of these those of its own principal first, and of these the one that has been without a command for longest. A session
//! keeps its memory for some time once it is on the devices ([`Rules::residency`]); one that has commands, for five times as long. Two busy sessions therefore take turns of seconds, and not of
//! milliseconds. Nobody is told to leave when even all who may would not make enough room.
//! Who waits further back in line, and can leave meanwhile, does so at once: two sessions that each have a part of what they want would wait for each other otherwise.
//!
//! What a session says of itself can make it wait or leave, and nothing else: see [`View`].

use std::collections::{BTreeMap, HashMap};

use crate::worker_protocol::MemoryOrder;

/// A session with commands keeps its memory for so many times as long as one without.
const BUSY: u64 = 5;
/// A session without a command for so long is idle.
const IDLE: u64 = 100_000_000;
/// A session keeps its place in line for so long when it has got what it wanted.
const KEEPS_PLACE: u64 = 1_000_000_000;
/// A session that could not do what it was told is not told again for so long at first, and at most.
const AGAIN: u64 = 100_000_000;
const MOST_AGAIN: u64 = 10_000_000_000;
/// A session that has not begun to leave within this time is in the middle of a command. Whoever waits does not count on it.
const BEGINS_WITHIN: u64 = 1_000_000_000;
/// A session that has not left within this time will not be counted on again.
const LEAVES_WITHIN: u64 = 120_000_000_000;

/// Bytes on devices, by their numbers.
pub(super) type Bytes = BTreeMap<u32, u64>;

/// What the operator says.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// For how long a session keeps its memory.
    pub(super) residency: u64,
    /// Bytes of this machine's memory for what is away.
    pub(super) memory: u64,
    /// The same for one session.
    pub(super) memory_each: u64,
    /// Whether there are files for what does not fit there.
    pub(super) files: bool,
}

/// A session, as it is now. What its worker says is bounded by what the daemon has granted.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    pub(super) worker: u32,
    pub(super) principal: String,
    /// Whether it may be told to leave.
    pub(super) swap: bool,
    /// Bytes that it has on devices; those of them that can leave; and those that are away.
    pub(super) on: Bytes,
    pub(super) movable: Bytes,
    pub(super) away: Bytes,
    /// New memory that it waits for.
    pub(super) needs: Bytes,
    /// Whether it can leave while it waits for new memory.
    pub(super) yields: bool,
    /// Whether it waits until what is away is back.
    pub(super) returns: bool,
    /// When it last had no command. `None`: it has unfinished work, or was never without.
    pub(super) rested: Option<u64>,
    /// When the session began.
    pub(super) began: u64,
    /// The last order that it has begun to deal with; the last that it has dealt with, and whether it was carried out.
    pub(super) begun: u32,
    pub(super) done: (u32, bool),
    /// Bytes of this machine's memory that it says it keeps.
    pub(super) keeps: u64,
}

/// What is known of a session.
#[derive(Debug, Default)]
struct Known {
    /// Since when its memory is on the devices.
    since: u64,
    /// Whether it was away when it was last seen.
    away: bool,
    /// The order that it has not dealt with, and since when.
    order: Option<(u32, MemoryOrder, u64)>,
    /// Whether it has taken too long to leave.
    slow: bool,
    /// When it may be told again to leave, or to return, and how long it has to wait the next time.
    not_before: u64,
    again: u64,
    /// Its place in line: when it began to wait. Since when it does not wait, if it does not.
    place: Option<u64>,
    served: Option<u64>,
    /// Whether it was noted that it waits only for others' residency.
    held_back: bool,
    /// Bytes of this machine's memory that it may be using.
    keeps: u64,
}

/// What a step decides.
#[derive(Debug, Default)]
pub(super) struct Decided {
    /// Orders: the worker, the order's number, and whether a file goes along.
    pub(super) orders: Vec<(u32, u32, MemoryOrder, bool)>,
    /// Sessions that wait for room which others keep for their residency alone.
    pub(super) held_back: Vec<u32>,
    /// Whether something is to be looked at again before anybody rings.
    pub(super) pending: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Residency {
    rules: Rules,
    sessions: HashMap<u32, Known>,
    /// What is free for those in line, in their order.
    reserved: Vec<(u32, Bytes)>,
    /// How often sessions have done what they were told.
    moves: u64,
}

/// What devices have now.
struct Room {
    free: Bytes,
    /// What sessions that are leaving have to give up for those that return already.
    owed: Bytes,
}

fn add(to: &mut Bytes, more: &Bytes) {
    for (device, bytes) in more {
        let sum = to.entry(*device).or_default();
        *sum = sum.saturating_add(*bytes);
    }
}

fn take(from: &mut Bytes, less: &Bytes) {
    for (device, bytes) in less {
        let left = from.entry(*device).or_default();
        *left = left.saturating_sub(*bytes);
    }
}

/// What is missing of `wanted` in `there`.
fn missing(wanted: &Bytes, there: &Bytes) -> Bytes {
    let of = |device: &u32| there.get(device).copied().unwrap_or(0);
    let short = wanted.iter().map(|(device, bytes)| (*device, bytes.saturating_sub(of(device))));
    short.filter(|(_, bytes)| *bytes > 0).collect()
}

fn sum(bytes: &Bytes) -> u64 {
    bytes.values().fold(0, |sum: u64, more| sum.saturating_add(*more))
}

impl Residency {
    pub(super) fn new(rules: Rules) -> Residency {
        Residency { rules, ..Residency::default() }
    }

    /// Whether a worker has an order that it has not dealt with.
    pub(super) fn is_asked(&self, worker: u32) -> bool {
        self.ordered(worker).is_some()
    }

    /// The order that a worker has not dealt with.
    pub(super) fn ordered(&self, worker: u32) -> Option<MemoryOrder> {
        self.sessions.get(&worker)?.order.map(|(_, order, _)| order)
    }

    /// How often sessions have done what they were told.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Bytes of a device that are free, and for sessions that are before this one in line.
    pub(super) fn reserved(&self, worker: u32, device: u32) -> u64 {
        let before = self.reserved.iter().take_while(|(other, _)| *other != worker);
        before.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(bytes.get(&device).copied().unwrap_or(0)))
    }

    /// A worker's order cannot be given.
    pub(super) fn refuse(&mut self, worker: u32, now: u64) {
        if let Some(known) = self.sessions.get_mut(&worker) {
            known.order = None;
            known.not_before = now.saturating_add(MOST_AGAIN);
        }
    }

    /// Decides what happens now. `budget`: the bytes of each device. Every session that has device memory is in `views`.
    pub(super) fn step(&mut self, now: u64, budget: &Bytes, views: &[View]) -> Decided {
        self.sessions.retain(|worker, _| views.iter().any(|view| view.worker == *worker));
        views.iter().for_each(|view| self.note(now, view));
        let mut used = Bytes::new();
        for view in views {
            add(&mut used, &view.on);
            // Its memory is on its way.
            if self.ordered(view.worker) == Some(MemoryOrder::Return) {
                add(&mut used, &view.away);
            }
        }
        let mut room = Room { free: missing(budget, &used), owed: missing(&used, budget) };
        let mut line: Vec<&View> = views.iter().filter(|view| self.place(view).is_some()).collect();
        line.sort_by_key(|view| self.place(view));
        self.reserved.clear();
        let mut decided = Decided::default();
        for view in &line {
            self.serve(now, view, &mut room, views, &mut decided);
        }
        decided.pending = !line.is_empty() || self.sessions.values().any(|known| known.order.is_some());
        decided
    }

    /// A session's place in line, if it waits.
    fn place(&self, view: &View) -> Option<(u64, u32)> {
        let known = self.sessions.get(&view.worker)?;
        known.place.filter(|_| known.served.is_none()).map(|place| (place, view.worker))
    }

    /// What is free is for the next in line.
    fn reserve(&mut self, worker: u32, wanted: &Bytes, room: &mut Room) {
        let of = |(device, bytes): (&u32, &u64)| {
            (*device, (*bytes).min(room.free.get(device).copied().unwrap_or(0)))
        };
        self.reserved.push((worker, wanted.iter().map(of).collect()));
        take(&mut room.free, wanted);
    }

    /// Notes how a session is now.
    fn note(&mut self, now: u64, view: &View) {
        let away = sum(&view.away) > 0;
        let known = self.sessions.entry(view.worker).or_insert_with(|| Known {
            since: view.began,
            away,
            again: AGAIN,
            keeps: view.keeps,
            ..Known::default()
        });
        if let Some((number, order, at)) = known.order
            && view.done.0 == number
        {
            known.slow |= now.saturating_sub(at) > LEAVES_WITHIN;
            known.order = None;
            self.moves += u64::from(view.done.1);
            match order {
                _ if view.done.1 => known.again = AGAIN,
                MemoryOrder::Forget => {}
                MemoryOrder::Leave { .. } | MemoryOrder::Return => {
                    known.not_before = now.saturating_add(known.again);
                    known.again = known.again.saturating_mul(2).min(MOST_AGAIN);
                }
            }
            if order == MemoryOrder::Forget && view.done.1 {
                known.keeps = 0;
            }
        }
        if std::mem::replace(&mut known.away, away) && !away {
            known.since = now;
        }
        let waits = view.returns && away || sum(&view.needs) > 0;
        if waits {
            known.place = known.place.or(Some(now));
            known.served = None;
        } else {
            let since = *known.served.get_or_insert(now);
            known.place = known.place.filter(|_| now.saturating_sub(since) < KEEPS_PLACE);
            known.held_back = false;
        }
    }

    /// Makes room for a session that waits, or gives it the room that there is.
    fn serve(&mut self, now: u64, view: &View, room: &mut Room, views: &[View], decided: &mut Decided) {
        let mut wanted = view.needs.clone();
        match self.ordered(view.worker) {
            // It will want more once it is back.
            Some(MemoryOrder::Return) => return self.reserve(view.worker, &wanted, room),
            Some(_) => return,
            None => {}
        }
        if view.returns {
            add(&mut wanted, &view.away);
        }
        let short = missing(&wanted, &room.free);
        if short.is_empty() {
            self.reserve(view.worker, &wanted, room);
            if view.returns && self.may(now, view) {
                self.order(now, view, MemoryOrder::Return, false, decided);
            }
            return;
        }
        // What leaves already is enough, if it is.
        let mut coming = Bytes::new();
        for other in views.iter().filter(|other| self.leaves(now, other)) {
            add(&mut coming, &other.movable);
            take(&mut coming, &other.away);
        }
        take(&mut coming, &room.owed);
        // It returns into memory that others are giving up at this moment, so that both move at a time.
        let mut given_up = self.given_up(now, views);
        take(&mut given_up, &room.owed);
        if view.returns && self.may(now, view) && missing(&short, &given_up).is_empty() {
            add(&mut room.owed, &short);
            self.reserve(view.worker, &wanted, room);
            self.order(now, view, MemoryOrder::Return, false, decided);
            return;
        }
        let mut short = missing(&short, &coming);
        let (mut chosen, mut kept) = (Vec::new(), Bytes::new());
        for (busy, other) in self.candidates(now, view, views, &mut kept) {
            if short.is_empty() {
                break;
            }
            if short.keys().any(|device| other.movable.contains_key(device)) {
                short = missing(&short, &other.movable);
                chosen.push((busy, other));
            }
        }
        if short.is_empty() {
            // Nobody behind it in line takes what is free for it.
            self.reserve(view.worker, &wanted, room);
            for (busy, other) in chosen {
                self.send_away(now, other, busy, views, decided);
            }
        } else if missing(&short, &kept).is_empty()
            && let Some(known) = self.sessions.get_mut(&view.worker)
            && !std::mem::replace(&mut known.held_back, true)
        {
            decided.held_back.push(view.worker);
        }
    }

    /// Whether a session that could not do what it was told may be told again.
    fn may(&self, now: u64, view: &View) -> bool {
        self.sessions.get(&view.worker).is_some_and(|known| known.not_before <= now)
    }

    /// What sessions of which a part has left will give up in the next moments.
    fn given_up(&self, now: u64, views: &[View]) -> Bytes {
        let mut bytes = Bytes::new();
        for view in views.iter().filter(|view| self.leaves(now, view) && sum(&view.away) > 0) {
            add(&mut bytes, &view.movable);
            take(&mut bytes, &view.away);
        }
        bytes
    }

    /// Whether a session's memory is leaving, as far as can be counted on.
    fn leaves(&self, now: u64, view: &View) -> bool {
        let known = self.sessions.get(&view.worker);
        known.and_then(|known| known.order).is_some_and(|(number, order, at)| {
            let within = if view.begun == number { LEAVES_WITHIN } else { BEGINS_WITHIN };
            matches!(order, MemoryOrder::Leave { .. }) && now.saturating_sub(at) <= within
        })
    }

    /// Who may be told to leave for `waiting`, in this order, and whether each of them is busy. `kept`: what others could give up if they had been there for long enough.
    fn candidates<'v>(
        &self,
        now: u64,
        waiting: &View,
        views: &'v [View],
        kept: &mut Bytes,
    ) -> Vec<(bool, &'v View)> {
        let mut found = Vec::new();
        for other in views {
            let Some(known) = self.sessions.get(&other.worker) else { continue };
            let may = other.worker != waiting.worker
                && other.swap
                && known.order.is_none()
                && !known.slow
                && (self.place(other).is_none() || other.yields && self.place(other) > self.place(waiting))
                && !known.away
                && sum(&other.movable) > 0;
            if !may {
                continue;
            }
            if self.place(other).is_some() {
                // It can do nothing with what it has.
                found.push((false, other.principal != waiting.principal, 0, other));
                continue;
            }
            let rested = other.rested.filter(|since| since.saturating_add(IDLE) <= now);
            let residency = self.rules.residency.saturating_mul(if rested.is_none() { BUSY } else { 1 });
            if known.since.saturating_add(residency) > now || known.not_before > now {
                add(kept, &other.movable);
                continue;
            }
            let others = other.principal != waiting.principal;
            found.push((rested.is_none(), others, rested.unwrap_or(known.since), other));
        }
        found.sort_by_key(|(busy, others, since, other)| (*busy, *others, *since, other.worker));
        found.into_iter().map(|(busy, _, _, other)| (busy, other)).collect()
    }

    /// Tells a session to leave, if there is a place for its memory; otherwise has that made.
    fn send_away(&mut self, now: u64, view: &View, busy: bool, views: &[View], decided: &mut Decided) {
        let bytes = crate::driver::store::memory_for(sum(&view.movable));
        let mut taken: u64 = 0;
        for (worker, known) in &self.sessions {
            taken = taken.saturating_add(if *worker == view.worker { 0 } else { known.keeps });
        }
        let fits = bytes <= self.rules.memory_each && taken.saturating_add(bytes) <= self.rules.memory;
        if fits || self.rules.files {
            if let Some(known) = self.sessions.get_mut(&view.worker).filter(|_| fits) {
                known.keeps = known.keeps.max(bytes);
            }
            self.order(now, view, MemoryOrder::Leave { busy }, !fits, decided);
            return;
        }
        // What sessions keep for the next time, although their memory is on the devices.
        let keepers = views.iter().filter(|other| {
            let known = self.sessions.get(&other.worker);
            known.is_some_and(|known| known.keeps > 0 && !known.away && known.order.is_none())
        });
        for keeper in keepers.collect::<Vec<_>>() {
            if bytes <= self.rules.memory_each && keeper.worker != view.worker {
                self.order(now, keeper, MemoryOrder::Forget, false, decided);
            }
        }
    }

    fn order(&mut self, now: u64, view: &View, order: MemoryOrder, file: bool, decided: &mut Decided) {
        let number = view.done.0.wrapping_add(1);
        // One that has just been told to forget leaves later.
        let known = self.sessions.get_mut(&view.worker).filter(|known| known.order.is_none());
        if let Some(known) = known {
            known.order = Some((number, order, now));
            decided.orders.push((view.worker, number, order, file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;
    const MIB: u64 = 1 << 20;

    fn rules(memory: u64) -> Rules {
        Rules { residency: 2 * SECOND, memory, memory_each: memory, files: false }
    }

    fn on(device: u32, bytes: u64) -> Bytes {
        Bytes::from([(device, bytes)])
    }

    /// A session with all of its memory on device 0, which has rested since 1.
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
    fn the_own_principal_leaves_first_and_then_who_was_idle_for_longest() {
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
    fn who_may_not_leave_stays_and_nobody_leaves_in_vain() {
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

    /// Two programs that take their memory at the same time would each wait for the other's part.
    #[test]
    fn who_waits_further_back_in_line_leaves_at_once_if_it_can() {
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
            // What it gives up is not for whoever asks next.
            let number = decided.orders.first().map_or(0, |order| order.1);
            views[1] = View {
                on: Bytes::new(),
                away: on(0, 50),
                returns: true,
                done: (number, true),
                ..part(2, 50)
            };
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
    fn a_busy_session_leaves_after_a_longer_time_only() {
        let mut residency = Residency::new(rules(u64::MAX));
        let views = [View { rested: None, ..idle(1, "a", 60) }, newcomer(2, "b", 60)];
        let budget = on(0, 100);
        let early = residency.step(9 * SECOND, &budget, &views);
        assert_eq!((leaving(&early), early.held_back), (vec![], vec![2]));
        assert!(residency.step(9 * SECOND, &budget, &views).held_back.is_empty(), "noted once");
        let late = residency.step(10 * SECOND, &budget, &views);
        assert_eq!(late.orders, [(1, 1, MemoryOrder::Leave { busy: true }, false)]);
    }

    #[test]
    fn a_session_that_does_not_begin_to_leave_is_not_waited_for() {
        let mut residency = Residency::new(rules(u64::MAX));
        let mut views =
            [idle(1, "a", 60), View { rested: Some(2), ..idle(2, "a", 60) }, newcomer(3, "b", 60)];
        let budget = on(0, 120);
        assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
        assert_eq!(leaving(&residency.step(11 * SECOND, &budget, &views)), [] as [u32; 0]);
        assert_eq!(leaving(&residency.step(11 * SECOND + 1, &budget, &views)), [2]);
        views[1].begun = 1;
        assert_eq!(leaving(&residency.step(60 * SECOND, &budget, &views)), [] as [u32; 0]);
        // What it could not do it is told again, each time later.
        (views[0].done, views[1].done) = ((1, false), (1, false));
        assert!(residency.step(60 * SECOND, &budget, &views).orders.is_empty());
        assert_eq!(leaving(&residency.step(60 * SECOND + AGAIN, &budget, &views)), [1]);
    }

    #[test]
    fn without_a_place_for_its_memory_nobody_leaves_until_one_was_made() {
        let mut residency = Residency::new(rules(64 * MIB));
        let mut views =
            [idle(1, "a", 60), View { keeps: 64 * MIB, ..idle(2, "a", 30) }, newcomer(3, "b", 60)];
        let budget = on(0, 90);
        let first = residency.step(10 * SECOND, &budget, &views);
        assert_eq!(first.orders, [(2, 1, MemoryOrder::Forget, false)]);
        views[1].done = (1, true);
        assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
        // With files, there is a place at once.
        let mut residency = Residency::new(Rules { files: true, ..rules(0) });
        let decided = residency.step(10 * SECOND, &budget, &views);
        assert_eq!(decided.orders, [(1, 1, MemoryOrder::Leave { busy: false }, true)]);
    }

    #[test]
    fn a_session_returns_into_memory_that_is_being_given_up_and_only_one_does() {
        let mut residency = Residency::new(rules(u64::MAX));
        let away =
            |worker| View { on: Bytes::new(), away: on(0, 60), returns: true, ..idle(worker, "a", 60) };
        let mut views = [idle(1, "a", 60), away(2), View { began: 1, ..away(3) }];
        let budget = on(0, 100);
        assert_eq!(leaving(&residency.step(10 * SECOND, &budget, &views)), [1]);
        (views[0].begun, views[0].on, views[0].away) = (1, on(0, 50), on(0, 10));
        let decided = residency.step(10 * SECOND, &budget, &views);
        assert_eq!(decided.orders, [(2, 1, MemoryOrder::Return, false)]);
        assert!(residency.step(10 * SECOND, &budget, &views).orders.is_empty());
    }

    #[test]
    fn who_fits_passes_who_cannot_be_served() {
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

    /// A session of a simulated server.
    #[derive(Debug, Clone)]
    struct Simulated {
        bytes: u64,
        /// Steps for which it has commands, and then for which it has none; again and again.
        works: u64,
        rests: u64,
        phase: u64,
        swap: bool,
        /// Whether a device works on without end.
        endless: bool,
        /// Steps that it takes to carry out an order.
        takes: u64,
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
        )
            .prop_map(|(bytes, works, rests, phase, swap, endless, takes)| Simulated {
                bytes: bytes * MIB,
                works,
                rests,
                phase,
                swap,
                endless,
                takes,
            })
    }

    /// How a simulated session is.
    #[derive(Debug, Clone, Default)]
    struct Now {
        view: View,
        order: Option<(MemoryOrder, u64)>,
        came: u64,
        done: u64,
        waited: u64,
        late: u64,
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Whatever sessions do: the device never holds more than it has, and the machine's memory no more than it may; who may not leave does not; nobody leaves before its time; and if all may leave
        /// and none works on without end, all get on.
        #[test]
        fn memory_is_never_exceeded_and_everybody_gets_on(all in prop::collection::vec(simulated(), 1..7), memory in 0u64..16) {
            const STEP: u64 = 100_000_000;
            // Programs take their memory in pieces.
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
            for step in 0..2000u64 {
                let time = step * STEP;
                for index in 0..now.len() {
                    let others: u64 = now.iter().map(|state| sum(&state.view.on)).sum::<u64>() - sum(&now[index].view.on);
                    let (one, state) = (&all[index], &mut now[index]);
                    let Now { view, order, came, done, waited, late } = state;
                    let (all, takes) = (sum(&view.movable), sum(&view.needs) > 0);
                    if let Some((what, left)) = order {
                        if *left > 0 {
                            *left -= 1;
                            // Half of its memory leaves on the way, unless it cannot.
                            let half = all / 2;
                            if matches!(what, MemoryOrder::Leave { busy } if takes || !one.endless && (*busy || view.rested.is_some())) {
                                (view.away, view.on) = (on(0, half), on(0, all - half));
                            }
                            continue;
                        }
                        // Whoever returns waits until the others have left.
                        if *what == MemoryOrder::Return && others + all > capacity {
                            *late += 1;
                            prop_assert!(*late < 50, "others have not left");
                            continue;
                        }
                        *late = 0;
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
                // A newcomer asks for its memory again and again.
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
                        prop_assert!(one.swap && state.view.away.is_empty());
                        // Memory that is new counts from the session's beginning. Who has only a part of what it wants keeps it for nobody.
                        let least = if busy { BUSY } else { 1 } * 2 * SECOND;
                        let takes = sum(&state.view.needs) > 0;
                        prop_assert!(takes || time >= state.came + least, "{time} {}", state.came);
                        state.view.keeps = 64 * MIB * sum(&state.view.movable).div_ceil(64 * MIB);
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
}
