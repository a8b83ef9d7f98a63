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
//! - Time is charged while a principal has its turn, until its work is finished. Work that outlasts its turn
//!   runs next to the next principal's, and each is charged an equal share of that time. So an endless kernel
//!   gets its principal no further turns, and no more of the device than its share.
//! - A worker that reports work it doesn't have uses up its own principal's time; one that doesn't report its
//!   work gets no turn.
//! - A turn ends early if there is no work, so idle time goes to whoever has some. A principal that returns
//!   after a pause starts level with the others, without credit for the time before.

use std::collections::{BTreeMap, HashMap};

use crate::worker_protocol::Limits;

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
    pub(super) principal: &'a str,
    pub(super) weight: u32,
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

/// A principal's share.
#[derive(Debug, Default)]
struct Part {
    /// Charged time in ns per unit of weight.
    weighted: f64,
    /// Charged time in ns.
    charged: u64,
    /// Whether it takes part in turns.
    active: bool,
    /// When it last had work.
    worked: u64,
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
    seen: HashMap<u32, Seen>,
    turns: Vec<Turn>,
}

/// The combined state of a principal's sessions.
#[derive(Debug, Default)]
struct Together {
    devices: u64,
    weight: u32,
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

impl Arbiter {
    pub(super) fn new(clock: Clock) -> Arbiter {
        Arbiter { clock, last: 0, parts: HashMap::new(), seen: HashMap::new(), turns: Vec::new() }
    }

    /// Whether principals are taking turns, so that the next step must follow soon.
    pub(super) fn is_contended(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Time in ns that a principal has been charged.
    pub(super) fn charged(&self, principal: &str) -> u64 {
        self.parts.get(principal).map_or(0, |part| part.charged)
    }

    /// Runs the next step, at `now` in ns. Returns what each session may do from now on.
    pub(super) fn step(&mut self, now: u64, views: &[View<'_>]) -> Vec<(u32, Gate)> {
        let passed = now.saturating_sub(std::mem::replace(&mut self.last, now));
        let all = self.look(views);
        self.parts.retain(|name, _| all.contains_key(name.as_str()));
        self.charge(passed, &all);
        self.notice_work(now, &all);
        let groups = self.groups(&all);
        let contended = |name: &str| groups.iter().any(|group| group.len() > 1 && group.contains(&name));
        self.turns.retain(|turn| contended(&turn.holder));
        for group in groups.iter().filter(|group| group.len() > 1) {
            self.take_turns(now, group, &all, views);
            self.grant_steps(now, group, &all, views);
        }
        let decide = |view: &View<'_>| {
            let mine = all.get(view.principal).map_or(0, |together| together.devices);
            let shared = all.iter().any(|(name, other)| *name != view.principal && other.devices & mine != 0);
            let active = self.parts.get(view.principal).is_some_and(|part| part.active);
            let turn = self.turns.iter().find(|turn| turn.holder == view.principal);
            match turn {
                _ if !shared => Gate::Open,
                _ if !active => Gate::Tell,
                _ if !contended(view.principal) => Gate::Open,
                Some(Turn { closed: None, .. }) => Gate::Metered { steps: 0, allowance: 0 },
                _ => Gate::Closed { steps: 0 },
            }
        };
        let decided: Vec<Gate> = views.iter().map(decide).collect();
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
    fn look<'a>(&mut self, views: &[View<'a>]) -> BTreeMap<&'a str, Together> {
        self.seen.retain(|worker, _| views.iter().any(|view| view.worker == *worker));
        let mut all: BTreeMap<&str, Together> = BTreeMap::new();
        for view in views {
            // What a session had reported to the previous daemon was charged there.
            let reported = view.reported;
            let fresh =
                || Seen { issued: 0, finished: 0, reported, gate: Gate::Open, steps: 0, allowance: 0 };
            let seen = self.seen.entry(view.worker).or_insert_with(fresh);
            let together = all.entry(view.principal).or_default();
            together.devices |= view.devices;
            together.weight = view.weight.max(1);
            together.priority = view.priority;
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

    fn charge(&mut self, passed: u64, all: &BTreeMap<&str, Together>) {
        if self.clock == Clock::Reported {
            for (name, together) in all {
                self.add(name, together, together.reported);
            }
            return;
        }
        let holders: Vec<String> = self.turns.iter().map(|turn| turn.holder.clone()).collect();
        for holder in &holders {
            let Some(held) = all.get(holder.as_str()) else { continue };
            // Work from before its gates closed runs next to the holder's, unless it waits for work behind
            // its gates.
            let beside = |(name, other): &(&&str, &Together)| {
                let runs =
                    || !other.waits || self.parts.get(**name).is_some_and(|part| part.granted >= STEPS);
                **name != holder && other.unfinished && other.devices & held.devices != 0 && runs()
            };
            let others: Vec<&str> = all.iter().filter(beside).map(|(name, _)| *name).collect();
            let part = passed / (1 + others.len() as u64);
            for name in others.into_iter().chain([holder.as_str()]) {
                if let Some(together) = all.get(name) {
                    self.add(name, together, part);
                }
            }
        }
    }

    /// Charges time in ns to a principal.
    fn add(&mut self, name: &str, together: &Together, time: u64) {
        let part = self.parts.entry(name.to_owned()).or_default();
        part.charged = part.charged.saturating_add(time);
        part.weighted += time as f64 * f64::from(Limits::WEIGHT) / f64::from(together.weight);
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

    fn notice_work(&mut self, now: u64, all: &BTreeMap<&str, Together>) {
        let (_, pause) = self.patience();
        let begin = self.parts.values().filter(|part| part.active).map(|part| part.weighted);
        let begin = begin.fold(f64::INFINITY, f64::min);
        for (name, together) in all {
            let part = self.parts.entry((*name).to_owned()).or_default();
            if together.works || together.unknown {
                part.worked = now;
            }
            if together.works && !part.active {
                part.active = true;
                if begin.is_finite() {
                    part.weighted = part.weighted.max(begin);
                }
            } else if part.active && now.saturating_sub(part.worked) > pause {
                part.active = false;
            }
        }
    }

    /// Groups of active principals that use the same devices, directly or through others.
    fn groups<'a>(&self, all: &BTreeMap<&'a str, Together>) -> Vec<Vec<&'a str>> {
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
    fn next<'a>(&self, now: u64, group: &[&'a str], all: &BTreeMap<&str, Together>) -> Option<&'a str> {
        let worked = |name: &str| self.parts.get(name).map_or(0, |part| part.worked);
        let (idle, _) = self.patience();
        let works = group.iter().copied().filter(|name| now.saturating_sub(worked(name)) <= idle);
        let weighted = |name: &str| self.parts.get(name).map_or(0.0, |part| part.weighted);
        works.min_by(|a, b| {
            let priority = |name: &str| std::cmp::Reverse(all.get(name).map_or(0, |t| t.priority));
            priority(a).cmp(&priority(b)).then(weighted(a).total_cmp(&weighted(b))).then(a.cmp(b))
        })
    }

    fn take_turns(&mut self, now: u64, group: &[&str], all: &BTreeMap<&str, Together>, views: &[View<'_>]) {
        let mut held =
            self.turns.iter().enumerate().filter(|(_, turn)| group.contains(&turn.holder.as_str()));
        let (first, others): (Option<usize>, Vec<usize>) =
            (held.next().map(|(at, _)| at), held.map(|(at, _)| at).collect());
        // Groups that have merged had several turns.
        for at in others.into_iter().rev() {
            self.turns.swap_remove(at);
        }
        let next = self.next(now, group, all);
        let (most_idle, _) = self.patience();
        let Some(at) = first else {
            let holder = next.or(group.first().copied()).unwrap_or_default().to_owned();
            self.allow(&holder, views);
            self.turns.push(Turn { holder, used: 0, closed: None });
            return;
        };
        let turn = &mut self.turns[at];
        let holder = all.get(turn.holder.as_str());
        match turn.closed {
            None => {
                let worked = self.parts.get(&turn.holder).map_or(0, |part| part.worked);
                let idle = now.saturating_sub(worked) > most_idle;
                let outranked = next.and_then(|name| all.get(name)).zip(holder);
                let outranked = outranked.is_some_and(|(next, holder)| next.priority > holder.priority);
                match next {
                    Some(next) if turn.used >= TURN || idle || outranked => {
                        if next == turn.holder {
                            turn.used = 0;
                            let holder = turn.holder.clone();
                            self.allow(&holder, views);
                        } else {
                            turn.closed = Some(now);
                        }
                    }
                    _ => {}
                }
            }
            Some(since) => {
                let done = holder.is_none_or(|holder| !holder.unfinished);
                if done || now.saturating_sub(since) > MOST_CLOSING {
                    let other = group.iter().copied().filter(|name| *name != turn.holder).collect::<Vec<_>>();
                    let next = self.next(now, &other, all).map(str::to_owned);
                    // Those that wanted it no longer do: it continues.
                    let holder = next.unwrap_or_else(|| self.turns[at].holder.clone());
                    self.allow(&holder, views);
                    self.turns[at] = Turn { holder, used: 0, closed: None };
                }
            }
        }
    }

    /// Unfinished work of a principal whose gates are closed may wait for work behind them. If it makes no
    /// progress for longer than usual, the principal's sessions each continue by one command; then again,
    /// later each time.
    fn grant_steps(&mut self, now: u64, group: &[&str], all: &BTreeMap<&str, Together>, views: &[View<'_>]) {
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
