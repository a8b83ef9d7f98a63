//! Decides whose memory is on the devices. A state machine without I/O; times are ns of any clock.
//!
//! Sessions together may hold more memory than a device has. Each is in one of two states: its movable memory
//! is **on** its devices, or **away**, in memory of this machine. A session that is away has no movable
//! memory on any device, and returns only when there is room for all of it. So no session waits for another
//! while holding half of its memory.
//!
//! Sessions that need room wait in line, and keep their place for a moment after getting some, because
//! programs allocate in pieces. For the first in line, other sessions are ordered to leave: idle ones before
//! busy ones, then those of its own principal first, then those that have been without a command for longest.
//! A session keeps its memory for some time after it arrived on the devices ([`Rules::residency`]), or five
//! times as long if it has commands. Two busy sessions therefore alternate every few seconds, not
//! milliseconds. Nobody is ordered to leave if even all candidates together would not make enough room. A
//! session further back in line that can leave meanwhile does so immediately: otherwise, two sessions that
//! each have a part of what they want would wait for each other.
//!
//! A session's own reports can only make it wait or leave: see [`View`].

use std::collections::{BTreeMap, HashMap};

use crate::worker_protocol::MemoryOrder;

/// A session with commands keeps its memory this many times as long as one without.
const BUSY: u64 = 5;
/// A session without a command for this long is idle.
const IDLE: u64 = 100_000_000;
/// How long a session keeps its place in line after it got what it wanted.
const KEEPS_PLACE: u64 = 1_000_000_000;
/// The first and the longest pause before a session that could not carry out an order is ordered again.
const AGAIN: u64 = 100_000_000;
const MOST_AGAIN: u64 = 10_000_000_000;
/// A session that has not started to leave within this time is in the middle of a command, and is no longer
/// counted on.
const BEGINS_WITHIN: u64 = 1_000_000_000;
/// A session that has not left within this time is never counted on again.
const LEAVES_WITHIN: u64 = 120_000_000_000;

/// Bytes on devices, by their numbers.
pub(super) type Bytes = BTreeMap<u32, u64>;

/// The operator's settings.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// How long a session keeps its memory.
    pub(super) residency: u64,
    /// Bytes of this machine's memory for what is away.
    pub(super) memory: u64,
    /// The same for one session.
    pub(super) memory_each: u64,
    /// Whether there are files for what does not fit there.
    pub(super) files: bool,
}

/// The current state of a session. Its worker's reports are bounded by what the daemon has granted.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    pub(super) worker: u32,
    pub(super) principal: String,
    /// Whether it may be ordered to leave.
    pub(super) swap: bool,
    /// Bytes that it has on devices, the part of them that can leave, and those that are away.
    pub(super) on: Bytes,
    pub(super) movable: Bytes,
    pub(super) away: Bytes,
    /// New memory that it waits for.
    pub(super) needs: Bytes,
    /// Whether it can leave while it waits for new memory.
    pub(super) yields: bool,
    /// Whether it waits until what is away is back.
    pub(super) returns: bool,
    /// When it last had no command. `None`: it has unfinished work, or always had.
    pub(super) rested: Option<u64>,
    /// When the session began.
    pub(super) began: u64,
    /// The last order that it has started to carry out; the last that it has finished, and whether it
    /// succeeded.
    pub(super) begun: u32,
    pub(super) done: (u32, bool),
    /// Bytes of this machine's memory that it reports as kept.
    pub(super) keeps: u64,
}

/// What is remembered of a session.
#[derive(Debug, Default)]
struct Known {
    /// Since when its memory is on the devices.
    since: u64,
    /// Whether it was away when it was last seen.
    away: bool,
    /// Its unfinished order, and since when.
    order: Option<(u32, MemoryOrder, u64)>,
    /// Whether it has taken too long to leave.
    slow: bool,
    /// When it may be ordered again to leave or return, and the next pause.
    not_before: u64,
    again: u64,
    /// Its place in line: when it started to wait. If it doesn't wait: since when.
    place: Option<u64>,
    served: Option<u64>,
    /// Whether it was noted that only others' residency makes it wait.
    held_back: bool,
    /// Bytes of this machine's memory that it may be using.
    keeps: u64,
}

/// The result of a step.
#[derive(Debug, Default)]
pub(super) struct Decided {
    /// Orders: the worker, the order's number, the order, and whether it comes with a file.
    pub(super) orders: Vec<(u32, u32, MemoryOrder, bool)>,
    /// Sessions that wait for room only because of others' residency.
    pub(super) held_back: Vec<u32>,
    /// Whether another step is needed before anybody rings.
    pub(super) pending: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Residency {
    rules: Rules,
    sessions: HashMap<u32, Known>,
    /// Free memory reserved for those in line, in their order.
    reserved: Vec<(u32, Bytes)>,
    /// How often sessions have carried out orders.
    moves: u64,
}

/// What devices have free now.
struct Room {
    free: Bytes,
    /// What leaving sessions still have to release for those that already return.
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

/// How much of `wanted` is missing in `there`.
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

    /// Whether a worker has an unfinished order.
    pub(super) fn is_asked(&self, worker: u32) -> bool {
        self.ordered(worker).is_some()
    }

    /// A worker's unfinished order.
    pub(super) fn ordered(&self, worker: u32) -> Option<MemoryOrder> {
        self.sessions.get(&worker)?.order.map(|(_, order, _)| order)
    }

    /// How often sessions have carried out orders.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Bytes of a device that are free but reserved for sessions ahead of this one in line.
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

    /// Decides what happens now. `budget`: the bytes of each device. Every session that has device memory is
    /// in `views`.
    pub(super) fn step(&mut self, now: u64, budget: &Bytes, views: &[View]) -> Decided {
        self.sessions.retain(|worker, _| views.iter().any(|view| view.worker == *worker));
        views.iter().for_each(|view| self.note(now, view));
        let mut used = Bytes::new();
        for view in views {
            add(&mut used, &view.on);
            // Its memory is already returning.
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

    /// Reserves free memory for the next in line.
    fn reserve(&mut self, worker: u32, wanted: &Bytes, room: &mut Room) {
        let of = |(device, bytes): (&u32, &u64)| {
            (*device, (*bytes).min(room.free.get(device).copied().unwrap_or(0)))
        };
        self.reserved.push((worker, wanted.iter().map(of).collect()));
        take(&mut room.free, wanted);
    }

    /// Updates what is remembered of a session.
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

    /// Makes room for a waiting session, or gives it the room that exists.
    fn serve(&mut self, now: u64, view: &View, room: &mut Room, views: &[View], decided: &mut Decided) {
        let mut wanted = view.needs.clone();
        match self.ordered(view.worker) {
            // It will want more when it has returned.
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
        // What is already leaving may be enough.
        let mut coming = Bytes::new();
        for other in views.iter().filter(|other| self.leaves(now, other)) {
            add(&mut coming, &other.movable);
            take(&mut coming, &other.away);
        }
        take(&mut coming, &room.owed);
        // It returns into memory that others are releasing at this moment, so that both move at the same
        // time.
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
            // Nobody behind it in line may take what is free for it.
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

    /// Whether a session that could not carry out its last order may be ordered again.
    fn may(&self, now: u64, view: &View) -> bool {
        self.sessions.get(&view.worker).is_some_and(|known| known.not_before <= now)
    }

    /// What sessions that have partly left will release in the next moments.
    fn given_up(&self, now: u64, views: &[View]) -> Bytes {
        let mut bytes = Bytes::new();
        for view in views.iter().filter(|view| self.leaves(now, view) && sum(&view.away) > 0) {
            add(&mut bytes, &view.movable);
            take(&mut bytes, &view.away);
        }
        bytes
    }

    /// Whether a session's memory is leaving, as far as it can be counted on.
    fn leaves(&self, now: u64, view: &View) -> bool {
        let known = self.sessions.get(&view.worker);
        known.and_then(|known| known.order).is_some_and(|(number, order, at)| {
            let within = if view.begun == number { LEAVES_WITHIN } else { BEGINS_WITHIN };
            matches!(order, MemoryOrder::Leave { .. }) && now.saturating_sub(at) <= within
        })
    }

    /// The sessions that may be ordered to leave for `waiting`, in this order, and whether each is busy.
    /// `kept`: what others could release later, once their residency is over.
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

    /// Orders a session to leave, if there is room for its memory; otherwise has room made.
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
        // What sessions keep for reuse, although their memory is on the devices.
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
        // A session that has just been ordered to release that leaves later.
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
        // It is ordered again to do what it could not, later each time.
        (views[0].done, views[1].done) = ((1, false), (1, false));
        assert!(residency.step(60 * SECOND, &budget, &views).orders.is_empty());
        assert_eq!(leaving(&residency.step(60 * SECOND + AGAIN, &budget, &views)), [1]);
    }

    #[test]
    fn nobody_leaves_before_there_is_room_for_its_memory() {
        let mut residency = Residency::new(rules(64 * MIB));
        let mut views =
            [idle(1, "a", 60), View { keeps: 64 * MIB, ..idle(2, "a", 30) }, newcomer(3, "b", 60)];
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
    fn only_one_session_returns_into_memory_being_released() {
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

    /// The state of a simulated session.
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

        /// Whatever sessions do: a device never holds more than it has, nor the machine's memory more than it
        /// may; unswappable sessions stay; nobody leaves before its residency is over; and if all may leave
        /// and none works endlessly, all make progress.
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
                            // Half of its memory leaves along the way, unless it cannot.
                            let half = all / 2;
                            if matches!(what, MemoryOrder::Leave { busy } if takes || !one.endless && (*busy || view.rested.is_some())) {
                                (view.away, view.on) = (on(0, half), on(0, all - half));
                            }
                            continue;
                        }
                        // A returning session waits until the others have left.
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
                        prop_assert!(one.swap && state.view.away.is_empty());
                        // New memory counts from the session's start. A session with only a part of what it
                        // wants keeps it from nobody.
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
