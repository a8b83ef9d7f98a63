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
mod tests {
    use super::*;
    use crate::worker::pace::{Pace, Takes};
    use std::collections::VecDeque;

    const US: u64 = 1000;
    const MS: u64 = 1000 * US;
    /// The simulation's time step.
    const TICK: u64 = 100 * US;
    /// Maximum number of kernels that a worker gives its device per tick.
    const QUICK: u64 = 50;
    /// Work is fenced at most this often, unless the worker waits or sleeps.
    const FENCE_EVERY: u64 = 100 * US;

    /// A kernel that was given to a device.
    struct Kernel {
        left: u64,
        /// The fence after it, covering this many kernels.
        fence: Option<(u64, Takes, u64)>,
    }

    /// A session of a simulated program that always has another kernel, with its worker.
    struct Program {
        worker: u32,
        principal: &'static str,
        weight: u32,
        priority: i32,
        devices: u64,
        kernel: u64,
        /// Kernels whose number is divisible by the first value take the second as their time.
        now_and_then: (u64, u64),
        /// How many kernels the program launches ahead of the one it waits for.
        ahead: u64,
        /// Whether its kernels are collectives with its principal's other sessions: each waits for their
        /// kernels with the same number.
        collective: bool,
        /// When it has work.
        works: std::ops::Range<u64>,
        queue: VecDeque<Kernel>,
        pace: Pace,
        /// Kernels without a fence, whether some were enqueued while nobody counted, and the last fence.
        unfenced: u64,
        backlog: bool,
        fenced: u64,
        /// Since when it has waited at a metered gate.
        deep: Option<u64>,
        begun: u64,
        ended: u64,
        finished: u64,
        gate: Gate,
        taken: u32,
        waits: bool,
        issued: u64,
        /// Whether it rings the daemon: it has reached a closed gate, or its work behind one is done.
        rings: bool,
        told: Option<Gate>,
        ran: u64,
        /// When its time starts to count.
        counted_from: u64,
    }

    impl Program {
        /// Like `spin`, which measures shares on a GPU, it launches about 20 ms of kernels at a time, twice.
        fn new(worker: u32, principal: &'static str, kernel: u64) -> Program {
            Program {
                worker,
                principal,
                weight: 100,
                priority: 0,
                devices: 1,
                kernel,
                now_and_then: (u64::MAX, 0),
                ahead: 2 * (20 * MS / kernel).clamp(1, 500),
                collective: false,
                works: 0..u64::MAX,
                queue: VecDeque::new(),
                pace: Pace::default(),
                unfenced: 0,
                backlog: false,
                fenced: 0,
                deep: None,
                begun: 0,
                ended: 0,
                finished: 0,
                gate: Gate::Open,
                taken: 0,
                waits: false,
                issued: 0,
                rings: false,
                told: None,
                ran: 0,
                counted_from: 0,
            }
        }

        fn fence(&mut self, now: u64) {
            let takes = if std::mem::take(&mut self.backlog) { Takes::Backlog } else { Takes::Measured };
            let pieces = std::mem::take(&mut self.unfenced);
            if let Some(last) = self.queue.back_mut().filter(|_| pieces > 0) {
                last.fence = Some((pieces, takes, now));
                self.pace.begin(pieces, takes);
            }
            self.fenced = now;
        }

        fn may_go_on(&mut self, now: u64) -> bool {
            self.waits = false;
            if !matches!(self.gate, Gate::Open | Gate::Tell) && self.backlog {
                self.fence(now);
            }
            match self.gate {
                Gate::Open | Gate::Tell => true,
                Gate::Metered { steps, .. } => {
                    (self.taken, self.told) = (steps, None);
                    if !self.pace.is_deep() {
                        self.deep = None;
                        return true;
                    }
                    self.fence(now);
                    let since = *self.deep.get_or_insert(now);
                    let on = now - since >= self.pace.patience();
                    self.deep = self.deep.filter(|_| !on);
                    on
                }
                Gate::Closed { steps } if steps != self.taken => {
                    self.taken += 1;
                    true
                }
                Gate::Closed { .. } => {
                    self.fence(now);
                    self.waits = true;
                    self.rings |= self.told.replace(self.gate) != Some(self.gate);
                    false
                }
            }
        }

        fn issue(&mut self, now: u64) {
            for _ in 0..QUICK {
                // The program waits for its kernels, and the worker for the program.
                if !self.works.contains(&now) || self.begun - self.ended >= self.ahead {
                    self.waits = false;
                    self.fence(now);
                    return;
                }
                if !self.may_go_on(now) {
                    return;
                }
                self.begun += 1;
                let (every, long) = self.now_and_then;
                let left = if self.begun.is_multiple_of(every) { long } else { self.kernel };
                self.queue.push_back(Kernel { left, fence: None });
                self.unfenced += 1;
                self.issued += u64::from(self.gate != Gate::Open);
                self.backlog |= matches!(self.gate, Gate::Open | Gate::Tell);
                if !self.backlog && now - self.fenced >= FENCE_EVERY {
                    self.fence(now);
                }
            }
        }

        /// Runs its first kernel on its device for at most `time`, up to `now`. Returns for how long.
        fn run(&mut self, time: u64, now: u64) -> u64 {
            let Some(kernel) = self.queue.front_mut() else { return 0 };
            let ran = kernel.left.min(time);
            kernel.left -= ran;
            self.ran += if now < self.counted_from { 0 } else { ran };
            if kernel.left == 0 {
                let now = now - (time - ran);
                if let Some((pieces, takes, begun)) = kernel.fence {
                    self.pace.end(pieces, takes, begun, now);
                    self.finished += pieces;
                    self.rings |= self.pace.unfinished() == 0 && matches!(self.gate, Gate::Closed { .. });
                }
                self.queue.pop_front();
                self.ended += 1;
            }
            ran
        }

        fn view(&self) -> View<'_> {
            View {
                worker: self.worker,
                principal: self.principal,
                weight: self.weight,
                priority: self.priority,
                devices: self.devices,
                issued: self.issued,
                finished: self.finished,
                longest: self.pace.longest(),
                unfinished: self.pace.unfinished() > 0,
                waits: self.waits,
                reported: 0,
            }
        }
    }

    /// Runs programs for a simulated time. Each device runs one kernel at a time, alternating between
    /// sessions.
    fn simulate(programs: &mut [Program], duration: u64) -> Arbiter {
        let mut arbiter = Arbiter::new(Clock::Observed);
        let mut now = 0;
        while now < duration {
            programs.iter_mut().for_each(|program| program.issue(now));
            now += TICK;
            let all = programs.iter().fold(0, |all, program| all | program.devices);
            for device in (0..2).filter(|device| all >> device & 1 == 1) {
                let mut left = TICK;
                let mut at = (now / TICK) as usize;
                let mut idle = 0;
                while left > 0 && idle < programs.len() {
                    at = (at + 1) % programs.len();
                    let runs = programs[at].devices >> device & 1 == 1 && !programs[at].queue.is_empty();
                    let (name, number) = (programs[at].principal, programs[at].ended);
                    let together = !programs[at].collective
                        || programs.iter().all(|p| p.principal != name || p.begun > number);
                    if !runs || !together {
                        idle += 1;
                        continue;
                    }
                    idle = 0;
                    // Until the end of the tick: a session's short kernels run one after another.
                    while left > 0 && !programs[at].queue.is_empty() {
                        left -= programs[at].run(left, now);
                        if programs[at].collective {
                            break;
                        }
                    }
                }
            }
            let rings = programs.iter_mut().any(|program| std::mem::take(&mut program.rings));
            if now.is_multiple_of(MS) || rings {
                let views: Vec<View<'_>> = programs.iter().map(Program::view).collect();
                let gates = arbiter.step(now, &views);
                for (program, (worker, gate)) in programs.iter_mut().zip(gates) {
                    assert_eq!(program.worker, worker);
                    program.gate = gate;
                }
            }
        }
        arbiter
    }

    /// Each program's share of the time that all of them ran, in percent.
    fn shares(programs: &[Program]) -> Vec<f64> {
        let all: u64 = programs.iter().map(|program| program.ran).sum();
        programs.iter().map(|program| program.ran as f64 * 100.0 / all as f64).collect()
    }

    #[track_caller]
    fn assert_shares(programs: &[Program], expected: &[f64]) {
        let shares = shares(programs);
        let near = shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() <= 3.0);
        assert!(near, "{shares:?} instead of {expected:?}");
    }

    #[test]
    fn time_is_shared_by_weight_for_short_and_long_kernels() {
        let kernels = [10 * US, 300 * US, 10 * MS, 100 * MS];
        let pairs = || kernels.iter().flat_map(|first| kernels.iter().map(move |second| (*first, *second)));
        let even = pairs().filter(|(first, second)| first <= second).map(|(a, b)| (a, b, 100));
        let mut wrong = Vec::new();
        for (first, second, weight) in even.chain(pairs().map(|(a, b)| (a, b, 300))) {
            let mut programs = [Program::new(1, "a", first), Program::new(2, "b", second)];
            programs[0].weight = weight;
            simulate(&mut programs, 10_000 * MS);
            let busy: u64 = programs.iter().map(|program| program.ran).sum();
            let expected = f64::from(weight) * 100.0 / f64::from(weight + 100);
            let share = shares(&programs)[0];
            if (share - expected).abs() > 3.0 || busy < 9_700 * MS {
                wrong.push(format!(
                    "{} against {} us: {share:.1} instead of {expected} %, busy for {} ms",
                    first / US,
                    second / US,
                    busy / MS
                ));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn programs_with_waits_or_occasional_long_kernels_get_their_share() {
        for (ahead, now_and_then) in [(1, (1, 100 * MS)), (1, (1, 10 * MS)), (200, (100, 50 * MS))] {
            for other in [10 * US, MS, 100 * MS] {
                let mut programs = [Program::new(1, "a", 100 * US), Program::new(2, "b", other)];
                (programs[0].ahead, programs[0].now_and_then) = (ahead, now_and_then);
                simulate(&mut programs, 10_000 * MS);
                assert_shares(&programs, &[50.0, 50.0]);
            }
        }
    }

    #[test]
    fn a_principal_gets_its_share_once_however_many_sessions_it_has() {
        let mut programs: Vec<Program> = (0..4).map(|worker| Program::new(worker, "many", MS)).collect();
        programs.push(Program::new(9, "one", MS));
        simulate(&mut programs, 10_000 * MS);
        let shares = shares(&programs);
        assert!((shares[4] - 50.0).abs() <= 3.0, "{shares:?}");
    }

    #[test]
    fn idle_time_goes_to_whoever_has_work_and_earns_no_credit() {
        let mut programs = [Program::new(1, "a", MS), Program::new(2, "b", MS)];
        programs[1].works = 3_000 * MS..6_000 * MS;
        simulate(&mut programs, 10_000 * MS);
        let [a, b] = [programs[0].ran, programs[1].ran];
        assert!(a > 8_300 * MS && (1_350..1_650).contains(&(b / MS)), "{a} {b}");
    }

    #[test]
    fn a_principal_alone_is_neither_measured_nor_stopped() {
        let mut programs = [Program::new(1, "a", MS), Program::new(2, "b", MS)];
        programs[1].works = 0..0;
        let arbiter = simulate(&mut programs, 1_000 * MS);
        assert_eq!((programs[0].gate, programs[1].gate), (Gate::Open, Gate::Tell));
        assert!(!arbiter.is_contended() && arbiter.charged("a") < 10 * MS);
        assert!(programs[0].ran > 999 * MS, "it lost {} us", (1_000 * MS - programs[0].ran) / US);
        // On other devices, it does not matter who works.
        programs[1].works = 0..u64::MAX;
        programs[1].devices = 2;
        simulate(&mut programs, 1_000 * MS);
        assert_eq!((programs[0].gate, programs[1].gate), (Gate::Open, Gate::Open));
    }

    #[test]
    fn a_lower_priority_gets_only_the_remaining_time() {
        let mut programs = [Program::new(1, "low", 100 * US), Program::new(2, "high", 100 * US)];
        programs[1].priority = 1;
        programs[1].works = 2_000 * MS..4_000 * MS;
        simulate(&mut programs, 6_000 * MS);
        let [low, high] = [programs[0].ran / MS, programs[1].ran / MS];
        assert!(high > 1_900 && low > 3_700, "{low} {high}");
    }

    #[test]
    fn collectives_of_two_principals_do_not_deadlock_and_share_the_time() {
        let mut programs: Vec<Program> = (0..4).map(|n| Program::new(n, "a", 3 * MS)).collect();
        for (program, (principal, devices)) in
            programs.iter_mut().zip([("a", 1), ("a", 2), ("b", 1), ("b", 2)])
        {
            (program.principal, program.devices, program.collective) = (principal, devices, true);
        }
        // One rank of each begins later, so that ranks are out of step when a turn ends.
        programs[1].works = 7 * MS..u64::MAX;
        programs[2].works = 13 * MS..u64::MAX;
        simulate(&mut programs, 10_000 * MS);
        assert_shares(&programs, &[25.0; 4]);
        assert!(
            programs.iter().all(|program| program.finished > 1_200),
            "{:?}",
            programs.iter().map(|p| p.finished).collect::<Vec<_>>()
        );
    }

    #[test]
    fn an_endless_kernel_does_not_take_the_others_share() {
        for (weight, works, rest) in [(300, 0..1, 25.0), (100, 0..u64::MAX, 50.0), (300, 0..u64::MAX, 25.0)] {
            // Both if it has launched no kernel behind that one and if it always has another.
            let mut programs = [Program::new(1, "endless", u64::MAX), Program::new(2, "b", MS)];
            programs[0].weight = weight;
            programs[0].works = works;
            programs.iter_mut().for_each(|program| program.counted_from = 4_000 * MS);
            simulate(&mut programs, 12_000 * MS);
            let share = shares(&programs)[1];
            assert!((share - rest).abs() <= 3.0, "{share} instead of {rest}");
        }
    }

    #[test]
    fn false_reports_harm_neither_other_principals_nor_the_daemon() {
        let nonsense = |worker: u32, principal: &'static str, n: u64| View {
            worker,
            principal,
            weight: 100,
            priority: 0,
            devices: 1,
            issued: n,
            unfinished: true,
            finished: u64::MAX - n,
            longest: u64::MAX,
            waits: true,
            reported: if n.is_multiple_of(2) { u64::MAX } else { 0 },
        };
        let honest = |n: u64| View {
            finished: n,
            unfinished: false,
            longest: MS,
            reported: n,
            ..nonsense(9, "honest", n)
        };
        for clock in [Clock::Observed, Clock::Reported] {
            let mut arbiter = Arbiter::new(clock);
            let mut held = 0;
            for n in 1..10_000 {
                let views =
                    [nonsense(1, "liar", n), nonsense(2, "liar", n), nonsense(3, "other", n), honest(n)];
                let gates = arbiter.step(n * MS, &views);
                held += u64::from(matches!(gates[3].1, Gate::Metered { .. }));
            }
            assert!(held > 3_000, "{held} ms of ten seconds are left for whoever tells the truth");
            assert!(arbiter.charged("honest") <= 10_000 * MS);
        }
    }

    #[test]
    fn endless_work_delays_others_for_a_bounded_time() {
        let mut programs =
            [Program::new(1, "stuck", 5 * MS), Program::new(2, "b", MS), Program::new(3, "stuck", MS)];
        // The first session's kernel waits for one of the third's, which never arrives.
        (programs[0].collective, programs[2].collective) = (true, true);
        programs[2].works = 0..0;
        simulate(&mut programs, 10_000 * MS);
        assert!(programs[1].finished > 4_000, "{}", programs[1].finished);
    }
}
