//! Decides whose memory is on the devices. A state machine without I/O; times are ns of any clock.
//!
//! Sessions together may hold more memory than a device has. Each is in one of two states: its movable memory
//! is **on** its devices, or **away**, in memory of this machine. A session that is away has no movable
//! memory on any device, and returns only when there is room for all of it. So no session waits for another
//! while holding half of its memory. If leaving fails halfway, the session is ordered again to leave with the
//! rest, also while it waits to return, if others come first.
//!
//! Sessions that need room wait in line, and keep their place for a moment after getting some, because
//! programs allocate in pieces. One that has room, and does not take it, goes to the end of the line. For
//! the first in line, other sessions are ordered to leave: idle ones before busy ones, then those of its own
//! principal first, then those that have been without a command for longest. A session keeps its memory for
//! some time after it arrived on the devices ([`Rules::residency`]), or five times as long if it has
//! commands, and then at least twice as long as it took to bring the memory back. Two busy sessions therefore
//! alternate every few seconds, not milliseconds, and work for longer than their memory moves. That also lets
//! programs go on whose sessions with two servers need their memory at the same time. Nobody is ordered to
//! leave if even all candidates together would not make enough room. A session further back in line that can
//! leave meanwhile does so immediately: otherwise, two sessions that each have a part of what they want
//! would wait for each other.
//!
//! Sessions that **belong together** ([`View::group`]) may be the ranks of one program, whose kernels wait
//! for each other. If one rank's memory were away and another's on its device, that one's kernel would not
//! end, and so keep the memory there, perhaps from another program in the same position: neither would ever
//! go on. So they are on the devices together or away together. They are ordered to leave only if all of them
//! are idle. What the first of them releases is kept for it until the last has left: if one of them has work
//! after all, the others can return at any time. They return when there is room for all of them, and it is
//! kept for those that return later.
//!
//! A session's own reports can only make it wait or leave: see [`View`]. A worker that lies may say that it
//! has carried out an order, or is about to, or that it waits for room. It is believed as far as it shows in
//! where its memory is: others do not wait for it for long, and room that it does not take is not kept for
//! it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use crate::worker_protocol::MemoryOrder;

/// A session with commands keeps its memory this many times as long as one without.
const BUSY: u64 = 5;
/// A session with commands keeps its memory at least this many times as long as it took to bring it back,
/// but for that not longer than [`MOST_STAY`]: otherwise moving would take more time than work.
const STAYS: u64 = 2;
const MOST_STAY: u64 = 60_000_000_000;
/// A session without a command for this long is idle.
const IDLE: u64 = 100_000_000;
/// How long a session keeps its place in line after it got what it wanted.
const KEEPS_PLACE: u64 = 1_000_000_000;
/// A session that has had room for this long, and has not taken it, goes to the end of the line.
const TAKES_WITHIN: u64 = 1_000_000_000;
/// The first and the longest pause before a session that could not carry out an order is ordered again.
const AGAIN: u64 = 100_000_000;
const MOST_AGAIN: u64 = 10_000_000_000;
/// A session that has not started to leave within this time is in the middle of a command, and is no longer
/// counted on.
const BEGINS_WITHIN: u64 = 1_000_000_000;
/// A session that has not left within this time is never counted on again.
const LEAVES_WITHIN: u64 = 120_000_000_000;

/// A session that carries out an order, and has moved nothing for this long, is not counted on meanwhile: nor
/// is room kept for what it will want when it has returned.
const MOVES_WITHIN: u64 = 10_000_000_000;
/// What is free stays reserved for this long for a session that waits for such a one to leave: it may be
/// moving a single large piece, of which nothing shows before all is moved. After that, whoever waits gives
/// up ([`crate::room::WITHIN`]).
const GIVES_UP: u64 = crate::room::WITHIN.as_nanos() as u64;

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
    /// The sessions that it belongs to, if any.
    pub(super) group: Option<u32>,
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
    /// Since when it has had no command. `None`: it has one, or unfinished work.
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
    /// Since when its memory is on the devices, and how long it took to bring it back.
    since: u64,
    took: u64,
    /// Whether it was away when it was last seen.
    away: bool,
    /// Its unfinished order, and since when.
    order: Option<(u32, MemoryOrder, u64)>,
    /// How many orders it was given.
    orders: u64,
    /// Bytes that were away when it last moved some for that order, and when that was, or when it began.
    moved: (u64, u64),
    /// Whether it has begun to carry that order out.
    begun: bool,
    /// Whether it has taken too long to leave.
    slow: bool,
    /// When it may be ordered again to leave or return, and the next pause.
    not_before: u64,
    again: u64,
    /// Whether what it could not carry out was to return.
    stays_away: bool,
    /// Its place in line: when it started to wait. If it doesn't wait: since when.
    place: Option<u64>,
    served: Option<u64>,
    /// Since when there is room for the new memory that it waits for.
    offered: Option<u64>,
    /// It has not taken what it was offered: when it is offered room again, and the pause after the next
    /// time.
    passed_until: u64,
    pass: u64,
    /// Bytes that it had when it was last seen.
    total: u64,
    /// Whether it was noted that only others' residency makes it wait.
    held_back: bool,
    /// Whether it was noted that it waits because there is no memory for what others would move away.
    no_store: bool,
    /// Whether it was noted that it waits for sessions that belong together and have commands.
    outlasted: bool,
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
    /// Sessions that wait for room, perhaps until another session ends: others would leave, but this machine
    /// has no more memory for what they have.
    pub(super) no_store: Vec<u32>,
    /// Sessions that wait for room, perhaps until others end: these belong together, and not all are idle.
    pub(super) outlasted: Vec<u32>,
    /// Whether another step is needed before anybody rings.
    pub(super) pending: bool,
}

/// The state of moving device memory.
#[derive(Debug, Default)]
pub(super) struct Swapping {
    pub(super) residency: Residency,
    /// Bytes of each device. A device without an entry has no known limit.
    pub(super) budget: Bytes,
    /// What devices must at least have for sessions of earlier daemons, as they were seen last.
    pub(super) least: Bytes,
    /// Whether it was noted that some devices have no known limit.
    pub(super) warned: bool,
    /// When the devices were asked for it last.
    pub(super) read: Option<Instant>,
    /// Times that a session had to wait because others had only just got their memory back.
    pub(super) held_back: u64,
    /// Bytes that ended sessions have moved off the devices and back.
    pub(super) settled: [u64; 2],
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Residency {
    rules: Rules,
    sessions: HashMap<u32, Known>,
    /// Bytes of this machine's memory that workers may still have whose sessions have ended.
    leaving: HashMap<u32, u64>,
    /// Free memory reserved for those in line, in their order.
    reserved: Vec<(u32, Bytes)>,
    /// Sessions that belong to others of which some are on the devices: their room there is kept.
    kept: HashSet<u32>,
    /// How often sessions have moved something for an order, or have carried it out.
    moves: u64,
}

/// What sessions could release later.
#[derive(Default)]
struct Later {
    /// Once their residency is over.
    kept: Bytes,
    /// Once all of those that belong together are idle.
    busy: Bytes,
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

/// What a session can still move off its devices.
fn left(view: &View) -> Bytes {
    missing(&view.movable, &view.away)
}

/// A session, and what it can still move off its devices.
struct Member<'v> {
    view: &'v View,
    left: Bytes,
}

/// Sessions that leave and return together: one, or all that belong together.
#[derive(Default)]
struct Unit<'v> {
    members: Vec<Member<'v>>,
    /// What is free once they have left.
    releases: Bytes,
}

impl<'v> Unit<'v> {
    fn add(&mut self, view: &'v View) {
        let left = left(view);
        // What is away of sessions that belong together is kept free as long as one of them is there.
        add(&mut self.releases, if view.group.is_some() { &view.movable } else { &left });
        self.releases.retain(|_, bytes| *bytes > 0);
        self.members.push(Member { view, left });
    }

    /// Those that can move something off their devices.
    fn there(&self) -> impl Iterator<Item = &Member<'v>> {
        self.members.iter().filter(|member| !member.left.is_empty())
    }
}

/// The units of a step. Each session in line looks at all of them, so they are made once.
struct Units<'v> {
    all: Vec<Unit<'v>>,
    /// Their places, by worker.
    places: HashMap<u32, usize>,
}

impl<'v> Units<'v> {
    fn new(views: &'v [View]) -> Units<'v> {
        let (mut all, mut places, mut groups) = (Vec::<Unit<'v>>::new(), HashMap::new(), HashMap::new());
        for view in views {
            let new = all.len();
            let place = view.group.map_or(new, |group| *groups.entry(group).or_insert(new));
            if place == new {
                all.push(Unit::default());
            }
            all[place].add(view);
            places.insert(view.worker, place);
        }
        Units { all, places }
    }

    fn all(&self) -> &[Unit<'v>] {
        #[cfg(test)]
        tests::LOOKED.set(tests::LOOKED.get() + self.places.len());
        &self.all
    }

    /// The sessions that leave and return with a worker's, itself among them.
    fn with(&self, worker: u32) -> &[Member<'v>] {
        let unit = self.places.get(&worker).and_then(|place| self.all.get(*place));
        unit.map_or(&[], |unit| &unit.members)
    }
}

/// The part of `bytes` that is in `other`, too.
fn both(bytes: &Bytes, other: &Bytes) -> Bytes {
    let common = |(device, bytes): (&u32, &u64)| Some((*device, (*bytes).min(*other.get(device)?)));
    bytes.iter().filter_map(common).collect()
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

    /// How often a worker was ordered to move its memory. `None`: it is carrying that out, or so it says: not
    /// for ever.
    pub(super) fn orders(&self, worker: u32, now: u64) -> Option<u64> {
        let Some(known) = self.sessions.get(&worker) else { return Some(0) };
        let moves = known.order.is_some_and(|(.., since)| now.saturating_sub(since) <= LEAVES_WITHIN);
        (!moves).then_some(known.orders)
    }

    /// How often sessions have moved something for an order, or have carried it out. A session that waits for
    /// room does not give up as long as this number rises.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Whether what a worker has moved off its devices still has its room there.
    pub(super) fn keeps_room(&self, worker: u32) -> bool {
        self.kept.contains(&worker) || self.ordered(worker) == Some(MemoryOrder::Return)
    }

    /// Bytes of a device that are free but reserved for sessions ahead of this one in line.
    pub(super) fn reserved(&self, worker: u32, device: u32) -> u64 {
        let before = self.reserved.iter().take_while(|(other, _)| *other != worker);
        before.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(bytes.get(&device).copied().unwrap_or(0)))
    }

    /// A worker has ended, and has nothing any more.
    pub(super) fn gone(&mut self, worker: u32) {
        self.sessions.remove(&worker);
        self.leaving.remove(&worker);
    }

    /// A worker's order cannot be given.
    pub(super) fn refuse(&mut self, worker: u32, now: u64) {
        if let Some(known) = self.sessions.get_mut(&worker) {
            known.order = None;
            known.not_before = now.saturating_add(MOST_AGAIN);
        }
    }

    /// Decides what happens now. `budget`: the bytes of each device; others have room for everything. Every
    /// session that has device memory is in `views`.
    pub(super) fn step(&mut self, now: u64, budget: &Bytes, views: &[View]) -> Decided {
        let units = Units::new(views);
        let Residency { sessions, leaving, .. } = self;
        sessions.retain(|worker, known| {
            let stays = units.places.contains_key(worker);
            if !stays {
                leaving.insert(*worker, known.keeps);
            }
            stays
        });
        views.iter().for_each(|view| self.note(now, view));
        let is_there = |Member { view, left }: &Member<'_>| {
            !left.is_empty() || self.ordered(view.worker) == Some(MemoryOrder::Return)
        };
        let kept = units.all().iter().filter(|unit| unit.members.iter().any(is_there));
        let kept = kept.flat_map(|unit| &unit.members).filter(|member| member.view.group.is_some());
        self.kept = kept.map(|member| member.view.worker).collect();
        let mut used = Bytes::new();
        for view in views {
            add(&mut used, &view.on);
            if self.keeps_room(view.worker) {
                add(&mut used, &view.away);
            }
        }
        let mut room = Room { free: missing(budget, &used), owed: missing(&used, budget) };
        let known = |device: &u32| budget.contains_key(device);
        room.owed.retain(|device, _| known(device));
        let wanted = views.iter().flat_map(|view| view.needs.keys().chain(view.away.keys()));
        room.free.extend(wanted.filter(|device| !known(device)).map(|device| (*device, u64::MAX)));
        let mut line: Vec<&View> = views.iter().filter(|view| self.place(view).is_some()).collect();
        line.sort_by_key(|view| self.place(view));
        self.reserved.clear();
        let mut decided = Decided::default();
        for view in &line {
            self.serve(now, view, &mut room, &units, &mut decided);
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
        let bytes_away = sum(&view.away);
        let (away, total) = (bytes_away > 0, sum(&view.on).saturating_add(bytes_away));
        // A worker that uses more memory than that is killed.
        let keeps = view.keeps.min(self.rules.memory_each);
        let known = self.sessions.entry(view.worker).or_insert_with(|| Known {
            since: view.began,
            away,
            again: AGAIN,
            pass: AGAIN,
            total,
            keeps,
            ..Known::default()
        });
        let has_moved = match known.order {
            Some((_, MemoryOrder::Leave { .. }, _)) => bytes_away > known.moved.0,
            Some((_, MemoryOrder::Return, _)) => bytes_away < known.moved.0,
            _ => false,
        };
        let is_begun = known.order.is_some_and(|(number, ..)| view.begun == number);
        let begins = is_begun && !std::mem::replace(&mut known.begun, true);
        if has_moved || begins {
            known.moved = (bytes_away, now);
        }
        // Not for longer: a worker that lies may move a little each time.
        let in_time = known.order.is_some_and(|(.., at)| now.saturating_sub(at) <= LEAVES_WITHIN);
        self.moves += u64::from(has_moved && in_time);
        if std::mem::replace(&mut known.total, total) < total {
            (known.passed_until, known.pass, known.offered) = (0, AGAIN, None);
        }
        if let Some((number, order, at)) = known.order
            && view.done.0 == number
        {
            known.slow |= now.saturating_sub(at) > LEAVES_WITHIN;
            known.order = None;
            // What it says counts if it shows.
            let shows = match order {
                MemoryOrder::Leave { .. } => left(view).is_empty(),
                MemoryOrder::Return => !away,
                MemoryOrder::Forget => true,
            };
            let carried_out = view.done.1 && shows;
            self.moves += u64::from(carried_out);
            known.stays_away = !carried_out && order == MemoryOrder::Return;
            if known.stays_away {
                known.place = known.place.map(|_| now);
            }
            if carried_out && order == MemoryOrder::Return {
                // It had its places earlier, but not its bytes.
                (known.since, known.took) = (now, now.saturating_sub(at));
            }
            match order {
                _ if carried_out => known.again = AGAIN,
                MemoryOrder::Forget => {}
                MemoryOrder::Leave { .. } | MemoryOrder::Return => {
                    known.not_before = now.saturating_add(known.again);
                    known.again = known.again.saturating_mul(2).min(MOST_AGAIN);
                }
            }
            if order == MemoryOrder::Forget && carried_out {
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
            known.offered = None;
            known.held_back = false;
            known.no_store = false;
            known.outlasted = false;
        }
    }

    /// Makes room for a waiting session, or gives it the room that exists.
    fn serve(&mut self, now: u64, view: &View, room: &mut Room, units: &Units<'_>, decided: &mut Decided) {
        let mut wanted = view.needs.clone();
        let Some(known) = self.sessions.get_mut(&view.worker) else { return };
        let offered = known.offered.take();
        match known.order {
            // It will want more when it has returned.
            Some((_, MemoryOrder::Return, _)) if now.saturating_sub(known.moved.1) <= MOVES_WITHIN => {
                return self.reserve(view.worker, &wanted, room);
            }
            Some(_) => return,
            None if now < known.passed_until || known.stays_away && now < known.not_before => return,
            None => {}
        }
        let returns = view.returns && sum(&view.away) > 0;
        if returns && self.kept.contains(&view.worker) {
            // The room is counted as its own, but others may still have to leave it.
            add(&mut wanted, &both(&view.away, &room.owed));
        } else if returns {
            units.with(view.worker).iter().for_each(|member| add(&mut wanted, &member.view.away));
        }
        let short = missing(&wanted, &room.free);
        if short.is_empty() {
            // Its worker hangs or lies, or the device has less room than is known here.
            let since = offered.unwrap_or(now);
            if let Some(known) = self.sessions.get_mut(&view.worker).filter(|_| !returns) {
                if now.saturating_sub(since) > TAKES_WITHIN {
                    known.place = Some(now);
                    known.passed_until = now.saturating_add(known.pass);
                    known.pass = known.pass.saturating_mul(2).min(MOST_AGAIN);
                    return;
                }
                known.offered = Some(since);
            }
            self.reserve(view.worker, &wanted, room);
            if returns && self.may(now, view) {
                self.take_back(now, view, units, decided);
            }
            return;
        }
        // What is already leaving may be enough.
        let mut coming = Bytes::new();
        for unit in units.all() {
            let mut there = unit.there().peekable();
            if there.peek().is_some() && there.all(|member| self.leaves(now, member.view, MOVES_WITHIN)) {
                add(&mut coming, &unit.releases);
            }
        }
        take(&mut coming, &room.owed);
        // It returns into memory that others are releasing at this moment, so that both move at the same
        // time.
        let mut given_up = self.given_up(now, units);
        take(&mut given_up, &room.owed);
        if returns && self.may(now, view) && missing(&short, &given_up).is_empty() {
            add(&mut room.owed, &short);
            self.reserve(view.worker, &wanted, room);
            self.take_back(now, view, units, decided);
            return;
        }
        let mut short = missing(&short, &coming);
        let (mut chosen, mut later) = (Vec::new(), Later::default());
        for (busy, unit) in self.candidates(now, view, units, &mut later) {
            if short.is_empty() {
                break;
            }
            if short.keys().any(|device| unit.releases.contains_key(device)) {
                short = missing(&short, &unit.releases);
                chosen.push((busy, unit));
            }
        }
        if short.is_empty() {
            // Nobody behind it in line may take what is free for it.
            self.reserve(view.worker, &wanted, room);
            for (busy, unit) in chosen {
                self.send_away(now, unit, busy, units, decided);
            }
            let nobody_moves = self.sessions.values().all(|known| known.order.is_none());
            if nobody_moves
                && let Some(known) = self.sessions.get_mut(&view.worker)
                && !std::mem::replace(&mut known.no_store, true)
            {
                decided.no_store.push(view.worker);
            }
        } else if missing(&short, &self.stuck(now, units, &room.owed)).is_empty() {
            // Nobody leaves for it meanwhile, and nobody takes what is free for it.
            self.reserve(view.worker, &wanted, room);
        } else if let Some(known) = self.sessions.get_mut(&view.worker) {
            if missing(&short, &later.kept).is_empty() {
                if !std::mem::replace(&mut known.held_back, true) {
                    decided.held_back.push(view.worker);
                }
            } else if missing(&missing(&short, &later.kept), &later.busy).is_empty()
                && !std::mem::replace(&mut known.outlasted, true)
            {
                decided.outlasted.push(view.worker);
            }
        }
    }

    /// Orders a session to return. Those that it belongs to may then return at any time.
    fn take_back(&mut self, now: u64, view: &View, units: &Units<'_>, decided: &mut Decided) {
        if view.group.is_some() {
            self.kept.extend(units.with(view.worker).iter().map(|member| member.view.worker));
        }
        self.order(now, view, MemoryOrder::Return, false, decided);
    }

    /// Whether a session that could not carry out its last order may be ordered again.
    fn may(&self, now: u64, view: &View) -> bool {
        self.sessions.get(&view.worker).is_some_and(|known| known.not_before <= now)
    }

    /// What sessions that have partly left will release in the next moments.
    fn given_up(&self, now: u64, units: &Units<'_>) -> Bytes {
        let mut bytes = Bytes::new();
        let leaves = |view: &&View| {
            view.group.is_none() && self.leaves(now, view, MOVES_WITHIN) && sum(&view.away) > 0
        };
        let members = units.all().iter().flat_map(|unit| &unit.members);
        for view in members.map(|member| member.view).filter(leaves) {
            add(&mut bytes, &view.movable);
            take(&mut bytes, &view.away);
        }
        bytes
    }

    /// What sessions have to release that are leaving, and have moved nothing for so long that they are not
    /// counted on. `owed`: what others return into, perhaps of theirs.
    fn stuck(&self, now: u64, units: &Units<'_>, owed: &Bytes) -> Bytes {
        let mut bytes = Bytes::new();
        let leaves = |member: &Member<'_>, within| self.leaves(now, member.view, within);
        let stuck = |member: &&Member<'_>| leaves(member, GIVES_UP) && !leaves(member, MOVES_WITHIN);
        let members = units.all().iter().flat_map(|unit| &unit.members);
        members.filter(stuck).for_each(|member| add(&mut bytes, &member.left));
        take(&mut bytes, owed);
        bytes
    }

    /// Whether a session's memory is leaving, and it has moved some `within` this time, or has just begun to.
    fn leaves(&self, now: u64, view: &View, within: u64) -> bool {
        let Some(known) = self.sessions.get(&view.worker) else { return false };
        known.order.is_some_and(|(number, order, at)| {
            let since = |time: u64| now.saturating_sub(time);
            let on_its_way = if view.begun == number {
                since(known.moved.1) <= within && since(at) <= LEAVES_WITHIN
            } else {
                since(at) <= BEGINS_WITHIN
            };
            matches!(order, MemoryOrder::Leave { .. }) && on_its_way
        })
    }

    /// The sessions that may be ordered to leave for `waiting`, in this order, and whether they are busy.
    /// `later`: what others could release, but not now.
    fn candidates<'u, 'v>(
        &self,
        now: u64,
        waiting: &View,
        units: &'u Units<'v>,
        later: &mut Later,
    ) -> Vec<(bool, &'u Unit<'v>)> {
        let mut found = Vec::new();
        for unit in units.all() {
            let Some(first) = unit.there().next().map(|member| member.view) else { continue };
            let may =
                unit.members.iter().map(|member| member.view.worker).all(|worker| {
                    worker != waiting.worker && self.ordered(worker) != Some(MemoryOrder::Return)
                }) && unit.there().all(|member| self.may_leave(member.view, waiting));
            if !may {
                continue;
            }
            let (mut busy, mut since, mut keeps) = (false, 0, false);
            for member in unit.there().map(|member| member.view) {
                let Some(known) = self.sessions.get(&member.worker) else { continue };
                if self.place(member).is_some() && known.not_before <= now {
                    // It can do nothing with what it has.
                    continue;
                }
                let rested = member.rested.filter(|since| since.saturating_add(IDLE) <= now);
                let residency = match rested {
                    Some(_) => self.rules.residency,
                    None => {
                        let stay = known.took.saturating_mul(STAYS).min(MOST_STAY);
                        self.rules.residency.saturating_mul(BUSY).max(stay)
                    }
                };
                busy |= rested.is_none();
                keeps |= known.since.saturating_add(residency) > now || known.not_before > now;
                since = since.max(rested.unwrap_or(known.since));
            }
            if busy && first.group.is_some() {
                add(&mut later.busy, &unit.releases);
            } else if keeps {
                add(&mut later.kept, &unit.releases);
            } else {
                found.push(((busy, first.principal != waiting.principal, since, first.worker), unit));
            }
        }
        found.sort_by_key(|(order, _)| *order);
        found.into_iter().map(|((busy, ..), unit)| (busy, unit)).collect()
    }

    /// Whether a session may ever be ordered to leave for `waiting`.
    fn may_leave(&self, view: &View, waiting: &View) -> bool {
        self.sessions.get(&view.worker).is_some_and(|known| {
            let place = self.place(view);
            let yields = (view.yields || view.returns) && place > self.place(waiting);
            view.swap && known.order.is_none() && !known.slow && (place.is_none() || yields)
        })
    }

    /// Orders sessions to leave together, if there is room for their memory; otherwise has room made.
    fn send_away(&mut self, now: u64, unit: &Unit<'_>, busy: bool, units: &Units<'_>, decided: &mut Decided) {
        let leaving: HashSet<u32> = unit.there().map(|member| member.view.worker).collect();
        let is_leaving = |worker| leaving.contains(&worker);
        let mut taken = self.leaving.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        for (worker, known) in &self.sessions {
            taken = taken.saturating_add(if is_leaving(*worker) { 0 } else { known.keeps });
        }
        let fits = |taken: u64, bytes: u64| {
            bytes <= self.rules.memory_each && taken.saturating_add(bytes) <= self.rules.memory
        };
        let mut places = Vec::new();
        for member in unit.there().map(|member| member.view) {
            let bytes = crate::driver::store::memory_for(sum(&member.movable));
            let (fits, small) = (fits(taken, bytes), bytes <= self.rules.memory_each);
            // What goes to a file passes through a chunk of memory.
            let keeps = if fits { bytes } else { crate::driver::store::memory_for(1) };
            taken = taken.saturating_add(keeps);
            places.push((member, fits, small, keeps));
        }
        if self.rules.files || places.iter().all(|(_, fits, ..)| *fits) {
            for (member, fits, _, keeps) in places {
                if let Some(known) = self.sessions.get_mut(&member.worker) {
                    known.keeps = known.keeps.max(keeps);
                }
                self.order(now, member, MemoryOrder::Leave { busy }, !fits, decided);
            }
            return;
        }
        // What sessions keep for reuse, although their memory is on the devices.
        let members = units.all().iter().flat_map(|unit| &unit.members);
        let keepers = members.map(|member| member.view).filter(|other| {
            let known = self.sessions.get(&other.worker);
            known.is_some_and(|known| known.keeps > 0 && !known.away && known.order.is_none())
        });
        for keeper in keepers.collect::<Vec<_>>() {
            if places.iter().all(|(_, _, small, _)| *small) && !is_leaving(keeper.worker) {
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
            known.orders += 1;
            (known.moved, known.begun) = ((sum(&view.away), now), false);
            decided.orders.push((view.worker, number, order, file));
        }
    }
}

#[cfg(test)]
mod tests;
