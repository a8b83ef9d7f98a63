//! Decides who may give a GPU work, and when. A state machine without I/O.
//!
//! While only one principal has work for a group of devices, all gates are open and nothing is measured. When
//! a second one has work, principals take **turns**:
//!
//! ```text
//!             ┌──────────── used up, or no work left ────────────┐
//!             ▼                                                  │
//!   choose the next: highest priority, ─▶ its gates open ─▶ its turn ─▶ its gates close ─▶ its work finishes
//!   then least time per weight                                             └ sessions that the principal's
//!   others wait for continue step by step
//! ```
//!
//! - A principal's sessions have their turn together, on all devices that they use. Devices used by the same
//!   principals form a group, so that the ranks of a program on several GPUs never wait for each other's
//!   turns.
//! - Principals of one client's leases that use the same devices share the client's weight.
//! - Time is charged while a principal has its turn, until its work is finished. Work that outlasts its turn
//!   runs next to the next principal's, and each is charged an equal share of that time. So an endless kernel
//!   gets its principal no further turns, and no more of the device than its share.
//! - A worker that reports work it doesn't have uses up its own principal's time; one that doesn't report its
//!   work gets no turn.
//! - A turn ends early if there is no work, so idle time goes to whoever has some. A principal that returns
//!   after a pause starts level with the others, without credit for the time before. So do groups that a
//!   principal joins by using devices of both: what each has had is comparable only within a group.
//! - A principal that pauses, or whose last session ends, still owes what it has had more than its share.
//!   This **debt** lapses as the others can have caught up. Until then, and while one with a higher priority
//!   has work, its first work after the pause waits for a turn. Everybody else's starts immediately.
//! - A program that gives its device one short kernel after another, and waits for none of them, often leaves
//!   it idle between them. If the holder does, the next principal has its turn beside it, provided that it
//!   leaves room as well when it is alone: neither keeps the other waiting for long. Work that fills the
//!   device never runs beside another principal's: it would get more than its share, and both would lose time
//!   to the driver's switching.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use crate::limits::Limits;

/// Time in ns between two steps while principals take turns.
const STEP: u64 = 1_000_000;
/// The same while somebody is held back who takes no part in turns. It rings when it has work, but a worker
/// of an earlier version may not.
const HELD: u64 = 1_000_000_000;
/// Length of a turn in ns of charged time; work that was started may last longer.
const TURN: u64 = 20_000_000;
/// A principal that had no work for this long, in ns, takes no turns until it has some.
const PAUSE: u64 = 100_000_000;
/// A turn ends if there was no work for this long, in ns.
const IDLE: u64 = 2_000_000;
/// Both limits for devices that imitate time, which stands still while no work is reported, however long that
/// takes. Only a principal that is gone for this long ends its turn early.
const IMITATED_PAUSE: u64 = 60_000_000_000;
/// If unfinished work makes no progress for this much longer, in ns, than its sessions' work usually takes,
/// it may be waiting for work behind a closed gate.
const STUCK: u64 = 1_000_000;
/// After this many steps, unfinished work is assumed to be running, not waiting for other work.
const STEPS: u32 = 3;
/// Part of its time alone on its devices from which on a principal without unfinished work leaves room for
/// others, and the time in ns over which that is averaged.
const ROOM: f64 = 0.4;
const AVERAGED: u64 = 10_000_000;
/// Maximum usual duration of a session's work, in ns, whatever its worker reports.
const MOST_USUAL: u64 = 200_000_000;
/// Maximum time in ns between closing the gates and the next turn, even with unfinished work.
const MOST_CLOSING: u64 = 500_000_000;

/// How charged time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    /// By the time that passes here.
    Observed,
    /// By the workers' reports, for software devices that imitate a GPU's time.
    Reported,
}

/// The state of a session.
#[derive(Debug, Clone)]
pub(super) struct View<'a> {
    /// The worker's process ID.
    pub(super) worker: u32,
    /// When the session began, in ns of any clock. The rules may have changed since the principal's others
    /// began: the newest session's weight and priority are those of all.
    pub(super) began: u64,
    pub(super) principal: &'a str,
    /// Whose it is: the client's, for those of all its leases. Begins the principal's name.
    pub(super) owner: &'a str,
    pub(super) weight: u32,
    /// The weight of its client, for the principals of all its leases together.
    pub(super) client_weight: u32,
    pub(super) priority: i32,
    /// Its devices, as bits by their numbers.
    pub(super) devices: u64,
    /// Counts work that the worker has enqueued or wants to enqueue, except work enqueued while its gate was
    /// [`Gate::Open`].
    pub(super) issued: u64,
    /// Whether enqueued work is unfinished.
    pub(super) unfinished: bool,
    /// Counts finished work.
    pub(super) finished: u64,
    /// Duration in ns of the longest of its recent work.
    pub(super) longest: u64,
    /// Whether it waits at its gate.
    pub(super) waits: bool,
    /// Device time in ns that it has reported. Used only with [`Clock::Reported`].
    pub(super) reported: u64,
}

/// What a session may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// Enqueue work; nothing is measured.
    Open,
    /// Enqueue work and report it.
    Tell,
    /// Enqueue a little work at a time, and report it.
    Metered {
        /// Steps so far; they no longer matter.
        steps: u32,
        /// It stops when it has reported this many ns of device time, until it may report more.
        allowance: u64,
    },
    /// Enqueue no work, except one piece for each step granted.
    Closed {
        /// Counts steps.
        steps: u32,
    },
}

/// The principals among which the one with the least time is next: those of a group with one priority. The
/// group's number in the last step, and the priority.
type Class = (usize, i32);

/// What a principal that takes no part in turns has had more than those that do.
#[derive(Debug, Default)]
struct Debt {
    /// In ns per unit of weight.
    time: f64,
    /// Whom it concerns: those with this priority in the groups with these devices.
    devices: u64,
    priority: i32,
    /// Their weights together; 0 if there is nobody.
    weights: f64,
    /// Whether one in these groups has a higher priority.
    outranked: bool,
}

impl Debt {
    /// How much of it lapses in each ns: as much as those that it concerns can have had of it.
    fn lapses(&self) -> f64 {
        let normal = f64::from(Limits::WEIGHT);
        if self.weights > 0.0 { normal / self.weights } else { 1.0 }
    }

    /// Notes whom it concerns. `groups`: the devices of each, and the weights of those with each priority.
    fn concern(&mut self, groups: &[(u64, BTreeMap<i32, f64>)]) {
        (self.weights, self.outranked) = (0.0, false);
        for (_, weights) in groups.iter().filter(|(devices, _)| devices & self.devices != 0) {
            self.weights += weights.get(&self.priority).copied().unwrap_or(0.0);
            self.outranked |= weights.last_key_value().is_some_and(|(highest, _)| *highest > self.priority);
        }
    }
}

/// A principal's share.
#[derive(Debug, Default)]
struct Part {
    /// Whose it is.
    owner: String,
    /// While it is in a class: charged time in ns per unit of weight, comparable with that of others in it.
    weighted: f64,
    class: Option<Class>,
    /// While it is in none.
    debt: Debt,
    /// Charged time in ns.
    charged: u64,
    /// Whether it takes part in turns.
    active: bool,
    /// When it last had work.
    worked: u64,
    /// Average part of the recent time alone on its devices in which it had no unfinished work.
    idle: f64,
    /// When it last made progress, by itself or by a step, and the number of steps granted since it last
    /// progressed by itself.
    moved: u64,
    granted: u32,
}

/// A principal's turn.
#[derive(Debug)]
struct Turn {
    holder: String,
    /// Charged time since it began, in ns.
    used: u64,
    /// When the gates closed.
    closed: Option<u64>,
}

/// The state last seen of a session, and the gate last set.
#[derive(Debug)]
struct Seen {
    issued: u64,
    finished: u64,
    reported: u64,
    gate: Gate,
    steps: u32,
    /// Device time in ns up to which it may work in this turn.
    allowance: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Arbiter {
    clock: Clock,
    last: u64,
    parts: HashMap<String, Part>,
    /// What principals without sessions owe, and whose they were: a later one of the same client takes it
    /// over.
    left: Vec<(String, Debt)>,
    seen: HashMap<u32, Seen>,
    turns: Vec<Turn>,
    /// The least time in ns after which somebody may no longer be held back.
    held: Option<u64>,
}

/// The combined state of a principal's sessions.
#[derive(Debug, Default)]
struct Together<'a> {
    owner: &'a str,
    devices: u64,
    /// When its newest session began, and that session's worker; its rules are below.
    newest: (u64, u32),
    weight: u32,
    client_weight: u32,
    priority: i32,
    works: bool,
    /// Whether any enqueued work is unfinished.
    unfinished: bool,
    /// Whether any session waits at its gate.
    waits: bool,
    moved: bool,
    longest: u64,
    reported: u64,
    /// Its gates were open, so nothing was measured: it counts as having work until it is measured again.
    unknown: bool,
}

/// What whoever has had least has had, of each class.
fn least_of<'a>(parts: impl Iterator<Item = &'a Part>) -> HashMap<Class, f64> {
    let mut all = HashMap::new();
    for part in parts {
        if let Some(class) = part.class {
            let least = all.entry(class).or_insert(part.weighted);
            *least = part.weighted.min(*least);
        }
    }
    all
}

impl Arbiter {
    pub(super) fn new(clock: Clock) -> Arbiter {
        let (parts, left, seen, turns) = Default::default();
        Arbiter { clock, last: 0, parts, left, seen, turns, held: None }
    }

    /// Time in ns within which the next step must follow, even if nobody rings.
    pub(super) fn next_within(&self) -> Option<u64> {
        if self.turns.is_empty() { self.held } else { Some(STEP) }
    }

    /// Time in ns that a principal has been charged.
    pub(super) fn charged(&self, principal: &str) -> u64 {
        self.parts.get(principal).map_or(0, |part| part.charged)
    }

    /// Runs the next step, at `now` in ns. Returns what each session may do from now on.
    pub(super) fn step(&mut self, now: u64, views: &[View<'_>]) -> Vec<(u32, Gate)> {
        let passed = now.saturating_sub(std::mem::replace(&mut self.last, now));
        let all = self.look(views);
        self.admit(&all);
        self.charge(passed, &all);
        self.lapse(passed);
        self.notice_room(passed, &all);
        self.notice_work(now, &all);
        let groups = self.groups(&all);
        self.note_debts(&groups, &all);
        self.level(&groups, &all);
        let contended = |name: &str| groups.iter().any(|group| group.len() > 1 && group.contains(&name));
        self.turns.retain(|turn| contended(&turn.holder));
        for group in groups.iter().filter(|group| group.len() > 1) {
            self.take_turns(now, group, &all, views);
            self.grant_steps(now, group, &all, views);
        }
        let has_turn = |name: &&&str| self.turns.iter().any(|turn| turn.holder == **name);
        let beside = |name: &str| {
            let group = groups.iter().find(|group| group.contains(&name));
            group.is_some_and(|group| group.iter().filter(has_turn).count() > 1)
        };
        let mut held = None::<u64>;
        let mut decide = |view: &View<'_>| {
            let mine = all.get(view.principal).map_or(0, |together| together.devices);
            let shared = all.iter().any(|(name, other)| *name != view.principal && other.devices & mine != 0);
            let active = self.parts.get(view.principal).is_some_and(|part| part.active);
            let turn = self.turns.iter().find(|turn| turn.holder == view.principal);
            match turn {
                _ if !shared => Gate::Open,
                _ if !active => match self.held_for(view.principal, &all) {
                    Some(time) => {
                        held = Some(held.map_or(time, |least| least.min(time)));
                        Gate::Closed { steps: 0 }
                    }
                    None => Gate::Tell,
                },
                _ if !contended(view.principal) => Gate::Open,
                // Side by side, the driver's own switching is what divides the time, and it is best at that
                // if all have work ready.
                Some(Turn { closed: None, .. }) if beside(view.principal) => Gate::Tell,
                Some(Turn { closed: None, .. }) => Gate::Metered { steps: 0, allowance: 0 },
                _ => Gate::Closed { steps: 0 },
            }
        };
        let decided: Vec<Gate> = views.iter().map(&mut decide).collect();
        self.held = held;
        let tell = |(view, gate): (&View<'_>, Gate)| {
            let Some(seen) = self.seen.get_mut(&view.worker) else { return (view.worker, gate) };
            let steps = seen.steps;
            seen.gate = match gate {
                Gate::Closed { .. } => Gate::Closed { steps },
                Gate::Metered { .. } => Gate::Metered { steps, allowance: seen.allowance },
                other => other,
            };
            (view.worker, seen.gate)
        };
        views.iter().zip(decided).map(tell).collect()
    }

    /// Combines the sessions of each principal.
    fn look<'a>(&mut self, views: &[View<'a>]) -> BTreeMap<&'a str, Together<'a>> {
        self.seen.retain(|worker, _| views.iter().any(|view| view.worker == *worker));
        let mut all: BTreeMap<&str, Together<'_>> = BTreeMap::new();
        for view in views {
            // What a session had reported to the previous daemon was charged there.
            let reported = view.reported;
            let fresh =
                || Seen { issued: 0, finished: 0, reported, gate: Gate::Open, steps: 0, allowance: 0 };
            let seen = self.seen.entry(view.worker).or_insert_with(fresh);
            let together = all.entry(view.principal).or_default();
            together.owner = view.owner;
            together.devices |= view.devices;
            if (view.began, view.worker) >= together.newest {
                together.newest = (view.began, view.worker);
                together.weight = view.weight.max(1);
                together.client_weight = view.client_weight.max(1);
                together.priority = view.priority;
            }
            together.works |= view.waits || view.unfinished || view.issued != seen.issued;
            together.unfinished |= view.unfinished;
            together.waits |= view.waits;
            together.moved |= view.finished != seen.finished;
            // Nothing is known yet about a session that hasn't finished anything.
            let longest = if view.finished == 0 && view.unfinished { MOST_USUAL } else { view.longest };
            together.longest = together.longest.max(longest.min(MOST_USUAL));
            together.unknown |= seen.gate == Gate::Open;
            together.reported = together.reported.saturating_add(view.reported.saturating_sub(seen.reported));
            (seen.issued, seen.finished, seen.reported) = (view.issued, view.finished, view.reported);
        }
        all
    }

    /// Begins the parts of principals that have their first session.
    fn admit(&mut self, all: &BTreeMap<&str, Together<'_>>) {
        for (name, together) in all {
            let part = self.parts.entry((*name).to_owned()).or_insert_with(|| {
                let own = |(owner, debt): &(String, Debt)| {
                    owner == together.owner && debt.devices & together.devices != 0
                };
                let left = self.left.iter().position(own).map(|at| self.left.swap_remove(at).1);
                Part { owner: together.owner.to_owned(), debt: left.unwrap_or_default(), ..Part::default() }
            });
            (part.debt.devices, part.debt.priority) = (together.devices, together.priority);
        }
    }

    /// Debts lapse with the time that those have had whom they concern.
    fn lapse(&mut self, passed: u64) {
        let own = self.parts.values_mut().map(|part| &mut part.debt);
        for debt in own.chain(self.left.iter_mut().map(|(_, debt)| debt)) {
            debt.time = (debt.time - passed as f64 * debt.lapses()).max(0.0);
        }
        self.left.retain(|(_, debt)| debt.time > 0.0);
    }

    fn charge(&mut self, passed: u64, all: &BTreeMap<&str, Together<'_>>) {
        if self.clock == Clock::Reported {
            for (name, together) in all {
                self.add(name, all, together.reported);
            }
            return;
        }
        let running: Vec<&str> = all.keys().copied().filter(|name| self.runs(name, all)).collect();
        for name in &running {
            let beside = |other: &&&str| all[**other].devices & all[*name].devices != 0;
            let part = passed / running.iter().filter(beside).count() as u64;
            self.add(name, all, part);
        }
    }

    /// Whether a principal's work has a part of its devices' time: it has its turn, or work from before its
    /// gates closed runs next to a holder's and does not wait for work behind them.
    fn runs(&self, name: &str, all: &BTreeMap<&str, Together<'_>>) -> bool {
        let together = &all[name];
        let beside = |turn: &Turn| {
            all.get(turn.holder.as_str()).is_some_and(|held| held.devices & together.devices != 0)
        };
        let stuck = || together.waits && self.parts.get(name).is_none_or(|part| part.granted < STEPS);
        self.turns.iter().any(|turn| turn.holder == name)
            || together.unfinished && !stuck() && self.turns.iter().any(beside)
    }

    /// Notes how much of its devices' time a principal leaves to others. That shows only while it is alone on
    /// them.
    fn notice_room(&mut self, passed: u64, all: &BTreeMap<&str, Together<'_>>) {
        let share = 1.0 - (-(passed as f64) / AVERAGED as f64).exp();
        for turn in self.turns.iter().filter(|turn| turn.closed.is_none()) {
            let Some(held) = all.get(turn.holder.as_str()) else { continue };
            let alone = all.iter().all(|(name, other)| {
                *name == turn.holder || other.devices & held.devices == 0 || !self.runs(name, all)
            });
            if let Some(part) = self.parts.get_mut(&turn.holder).filter(|_| alone) {
                let idle = f64::from(u8::from(!held.unfinished));
                part.idle += (idle - part.idle) * share;
            }
        }
    }

    /// A principal's weight. Those of a client's leases that have work for the same devices share the
    /// client's weight, so that leases give a client no more time than it has without them.
    fn weight(&self, name: &str, all: &BTreeMap<&str, Together<'_>>) -> f64 {
        let own = &all[name];
        let counts = |(other, together): &(&&str, &Together<'_>)| {
            together.owner == own.owner
                && together.devices & own.devices != 0
                && (**other == name || self.parts.get(**other).is_some_and(|part| part.active))
        };
        // They are in the order of their names, which begin with the client's.
        let from = (Bound::Included(own.owner), Bound::Unbounded);
        let near = all.range::<str, _>(from).take_while(|(other, _)| other.starts_with(own.owner));
        let sum: f64 = near.filter(counts).map(|(_, together)| f64::from(together.weight)).sum();
        f64::from(own.weight) * (f64::from(own.client_weight) / sum).min(1.0)
    }

    /// Charges time in ns to a principal.
    fn add(&mut self, name: &str, all: &BTreeMap<&str, Together<'_>>, time: u64) {
        let weight = self.weight(name, all);
        let Some(part) = self.parts.get_mut(name) else { return };
        part.charged = part.charged.saturating_add(time);
        part.weighted += time as f64 * f64::from(Limits::WEIGHT) / weight;
        if let Some(turn) = self.turns.iter_mut().find(|turn| turn.holder == name) {
            turn.used = turn.used.saturating_add(time);
        }
    }

    /// How long in ns a principal may have no work before its turn ends, and before it takes no part in
    /// turns.
    fn patience(&self) -> (u64, u64) {
        match self.clock {
            Clock::Observed => (IDLE, PAUSE),
            Clock::Reported => (IMITATED_PAUSE, IMITATED_PAUSE),
        }
    }

    fn notice_work(&mut self, now: u64, all: &BTreeMap<&str, Together<'_>>) {
        let (_, pause) = self.patience();
        for (name, part) in &mut self.parts {
            let Some(together) = all.get(name.as_str()) else {
                part.active = false;
                continue;
            };
            if together.works || together.unknown {
                part.worked = now;
            }
            part.active = together.works || part.active && now.saturating_sub(part.worked) <= pause;
        }
    }

    /// Notes what principals owe that no longer take part in turns, and whom all debts concern now.
    /// Principals without sessions leave their debts to their client.
    fn note_debts(&mut self, groups: &[Vec<&str>], all: &BTreeMap<&str, Together<'_>>) {
        let least = least_of(self.parts.values().filter(|part| part.active));
        for part in self.parts.values_mut().filter(|part| !part.active) {
            if let Some(class) = part.class.take() {
                // With nobody left in its class, it owes nothing.
                part.debt.time = least.get(&class).map_or(0.0, |least| (part.weighted - least).max(0.0));
            }
        }
        let ended = self.parts.extract_if(|name, _| !all.contains_key(name.as_str()));
        self.left.extend(ended.map(|(_, part)| (part.owner, part.debt)).filter(|(_, debt)| debt.time > 0.0));
        let weigh = |group: &Vec<&str>| {
            let (mut devices, mut weights) = (0, BTreeMap::new());
            for (name, together) in group.iter().filter_map(|name| all.get_key_value(name)) {
                devices |= together.devices;
                *weights.entry(together.priority).or_default() += self.weight(name, all);
            }
            (devices, weights)
        };
        let groups: Vec<(u64, BTreeMap<i32, f64>)> = groups.iter().map(weigh).collect();
        let own = self.parts.values_mut().filter(|part| !part.active).map(|part| &mut part.debt);
        own.chain(self.left.iter_mut().map(|(_, debt)| debt)).for_each(|debt| debt.concern(&groups));
    }

    /// The time in ns for which a principal that takes no part in turns may have to wait for one when it has
    /// work again. `None`: it does not wait.
    fn held_for(&self, name: &str, all: &BTreeMap<&str, Together<'_>>) -> Option<u64> {
        let debt = &self.parts.get(name)?.debt;
        // Where time is imitated, nobody's turn ends soon if there is no work.
        if self.clock == Clock::Reported {
            return None;
        }
        // After its own turn, everybody is ahead of its share by as much.
        let more = debt.time - TURN as f64 * f64::from(Limits::WEIGHT) / self.weight(name, all);
        match debt.weights {
            _ if debt.outranked => Some(HELD),
            owed_to if owed_to > 0.0 && more > 0.0 => Some(((more / debt.lapses()).ceil() as u64).min(HELD)),
            _ => None,
        }
    }

    /// Makes what principals have had comparable within each class. Those that were in one together stay as
    /// far apart as they were. Those that begin, and classes that come together, start level with whoever has
    /// had least. A principal that returns is ahead by what it still owes.
    fn level(&mut self, groups: &[Vec<&str>], all: &BTreeMap<&str, Together<'_>>) {
        let mut classes: BTreeMap<Class, Vec<&str>> = BTreeMap::new();
        for (number, group) in groups.iter().enumerate() {
            for name in group {
                let priority = all.get(name).map_or(0, |together| together.priority);
                classes.entry((number, priority)).or_default().push(name);
            }
        }
        for (class, names) in classes {
            let least = least_of(names.iter().filter_map(|name| self.parts.get(*name)));
            let begin = least.values().copied().fold(0.0, f64::max);
            for name in names {
                let Some(part) = self.parts.get_mut(name) else { continue };
                let ahead = match part.class.and_then(|before| least.get(&before)) {
                    Some(least) => part.weighted - least,
                    None => std::mem::take(&mut part.debt.time),
                };
                (part.weighted, part.class) = (begin + ahead, Some(class));
            }
        }
    }

    /// Groups of active principals that use the same devices, directly or through others.
    fn groups<'a>(&self, all: &BTreeMap<&'a str, Together<'_>>) -> Vec<Vec<&'a str>> {
        let mut groups: Vec<(u64, Vec<&str>)> = Vec::new();
        for (name, together) in all {
            if !self.parts.get(*name).is_some_and(|part| part.active) {
                continue;
            }
            let (mut devices, mut names) = (together.devices, vec![*name]);
            while let Some(at) = groups.iter().position(|(others, _)| others & devices != 0) {
                let (more, others) = groups.swap_remove(at);
                devices |= more;
                names.extend(others);
            }
            groups.push((devices, names));
        }
        groups.into_iter().map(|(_, names)| names).collect()
    }

    /// Gives each session of the principal whose turn begins its allowance of reported time.
    fn allow(&mut self, holder: &str, views: &[View<'_>]) {
        for view in views.iter().filter(|view| view.principal == holder) {
            if let Some(seen) = self.seen.get_mut(&view.worker) {
                seen.allowance = match self.clock {
                    Clock::Observed => u64::MAX,
                    Clock::Reported => view.reported.saturating_add(TURN),
                };
            }
        }
    }

    /// Among those that have, or recently had, work: the one with the highest priority; among equals, the one
    /// with the least time per weight.
    fn next<'a>(&self, now: u64, group: &[&'a str], all: &BTreeMap<&str, Together<'_>>) -> Option<&'a str> {
        let worked = |name: &str| self.parts.get(name).map_or(0, |part| part.worked);
        let (idle, _) = self.patience();
        let works = group.iter().copied().filter(|name| now.saturating_sub(worked(name)) <= idle);
        let weighted = |name: &str| self.parts.get(name).map_or(0.0, |part| part.weighted);
        works.min_by(|a, b| {
            let priority = |name: &str| std::cmp::Reverse(all.get(name).map_or(0, |t| t.priority));
            priority(a).cmp(&priority(b)).then(weighted(a).total_cmp(&weighted(b))).then(a.cmp(b))
        })
    }

    fn take_turns(
        &mut self,
        now: u64,
        group: &[&str],
        all: &BTreeMap<&str, Together<'_>>,
        views: &[View<'_>],
    ) {
        let (mine, others): (Vec<Turn>, Vec<Turn>) = std::mem::take(&mut self.turns)
            .into_iter()
            .partition(|turn| group.contains(&turn.holder.as_str()));
        self.turns = others;
        let mut mine = mine.into_iter();
        let Some(first) = mine.next() else {
            let holder = self.next(now, group, all).or(group.first().copied()).unwrap_or_default();
            return self.begin(holder, views);
        };
        // Groups that have merged had turns of their own, which are not meant to be side by side.
        let beside: Vec<Turn> =
            mine.filter(|turn| self.leaves_room(&first.holder) && self.leaves_room(&turn.holder)).collect();
        let mut held: Vec<Turn> = [first].into_iter().chain(beside).collect();
        let mut ended = None;
        for at in (0..held.len()).rev() {
            let beside = held.len() > 1;
            let others =
                |name: &&str| held.iter().enumerate().all(|(n, turn)| n == at || turn.holder != *name);
            let free: Vec<&str> = group.iter().copied().filter(others).collect();
            let next = self.next(now, &free, all);
            let turn = &mut held[at];
            match turn.closed {
                None if self.is_over(now, turn, next, all) => {
                    // Beside others it ends, too: then the others are alone, and it shows how much room they
                    // leave.
                    if !beside && next == Some(turn.holder.as_str()) {
                        turn.used = 0;
                        self.allow(&turn.holder, views);
                    } else if next.is_some() {
                        turn.closed = Some(now);
                    }
                }
                None => {}
                Some(since) => {
                    let done = all.get(turn.holder.as_str()).is_none_or(|holder| !holder.unfinished);
                    if done || now.saturating_sub(since) > MOST_CLOSING {
                        ended = Some(held.remove(at).holder);
                    }
                }
            }
        }
        let next = if held.is_empty() {
            let others: Vec<&str> =
                group.iter().copied().filter(|name| ended.as_deref() != Some(name)).collect();
            // Those that wanted it may no longer do: it continues.
            self.next(now, &others, all).map(str::to_owned).or(ended)
        } else {
            self.next_beside(now, group, &held, all).map(str::to_owned)
        };
        self.turns.extend(held);
        if let Some(next) = next {
            self.begin(&next, views);
        }
    }

    fn begin(&mut self, holder: &str, views: &[View<'_>]) {
        self.allow(holder, views);
        self.turns.push(Turn { holder: holder.to_owned(), used: 0, closed: None });
    }

    /// Whether a turn is to end, if there is somebody for the next one.
    fn is_over(&self, now: u64, turn: &Turn, next: Option<&str>, all: &BTreeMap<&str, Together<'_>>) -> bool {
        let (most_idle, _) = self.patience();
        let worked = self.parts.get(&turn.holder).map_or(0, |part| part.worked);
        let priority = |name: &str| all.get(name).map(|together| together.priority);
        let outranked =
            next.and_then(priority).zip(priority(&turn.holder)).is_some_and(|(next, own)| next > own);
        turn.used >= TURN || now.saturating_sub(worked) > most_idle || outranked
    }

    /// Whether a principal's work, alone on its devices, leaves much of their time to others.
    fn leaves_room(&self, name: &str) -> bool {
        self.clock == Clock::Observed && self.parts.get(name).is_some_and(|part| part.idle >= ROOM)
    }

    /// Who may have its turn beside those who have theirs: none of them fills the devices, and it is not
    /// ahead of its share.
    fn next_beside<'a>(
        &self,
        now: u64,
        group: &[&'a str],
        held: &[Turn],
        all: &BTreeMap<&str, Together<'_>>,
    ) -> Option<&'a str> {
        let has_turn = |name: &&str| held.iter().any(|turn| turn.holder == *name);
        let free: Vec<&str> = group.iter().copied().filter(|name| !has_turn(name)).collect();
        let next = self.next(now, &free, all).filter(|name| self.leaves_room(name))?;
        let weighted = |name: &str| self.parts.get(name).map_or(0.0, |part| part.weighted);
        let least = held.iter().map(|turn| weighted(&turn.holder)).fold(f64::INFINITY, f64::min);
        let priority = |name: &str| all.get(name).map(|together| together.priority);
        let fits = |turn: &Turn| {
            turn.closed.is_none()
                && self.leaves_room(&turn.holder)
                && priority(&turn.holder) == priority(next)
        };
        (held.iter().all(fits) && weighted(next) <= least + TURN as f64).then_some(next)
    }

    /// Unfinished work of a principal whose gates are closed may wait for work behind them. If it makes no
    /// progress for longer than usual, the principal's sessions each continue by one command; then again,
    /// later each time.
    fn grant_steps(
        &mut self,
        now: u64,
        group: &[&str],
        all: &BTreeMap<&str, Together<'_>>,
        views: &[View<'_>],
    ) {
        for name in group {
            let (Some(together), Some(part)) = (all.get(name), self.parts.get_mut(*name)) else { continue };
            let open = self.turns.iter().any(|turn| turn.holder == *name && turn.closed.is_none());
            if together.moved || !together.unfinished {
                (part.moved, part.granted) = (now, 0);
            }
            if open || now.saturating_sub(part.moved) <= (together.longest + STUCK) << part.granted.min(8) {
                continue;
            }
            (part.moved, part.granted) = (now, part.granted.saturating_add(1));
            // First those without unfinished work, since the others may be waiting for them.
            let sessions = || views.iter().filter(|view| view.principal == *name && view.waits);
            let idle = sessions().any(|view| !view.unfinished);
            for view in sessions().filter(|view| !idle || !view.unfinished) {
                if let Some(seen) = self.seen.get_mut(&view.worker) {
                    seen.steps = seen.steps.wrapping_add(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
