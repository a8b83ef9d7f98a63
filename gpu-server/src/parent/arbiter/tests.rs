//! Tests of the state machine.

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

/// Here, a lease of `a` is called `a 1`.
fn owner(principal: &str) -> &str {
    principal.split(' ').next().unwrap_or(principal)
}

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
    /// Time that the program spends on each launch; 0: none. After a step of `ahead` launches, such a program
    /// waits for all of its kernels.
    host: u64,
    /// Time that it has spent on all launches so far.
    prepared: u64,
    /// When it has work.
    works: std::ops::Range<u64>,
    /// How long it pauses after each kernel that has finished.
    pause: u64,
    /// The principals of its sessions, if it has another one after each pause.
    sessions: &'static [&'static str],
    /// Until when it pauses.
    paused: u64,
    /// How often it has waited at a closed gate.
    held: u64,
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
            host: 0,
            prepared: 0,
            works: 0..u64::MAX,
            pause: 0,
            sessions: &[],
            paused: 0,
            held: 0,
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

    /// Whether it has a session. The next one begins some time before its first kernel.
    fn has_session(&self, now: u64) -> bool {
        self.sessions.is_empty() || now + 5 * MS >= self.paused
    }

    /// Begins its pause after a kernel, and ends its session if it has another one for each.
    fn pause(&mut self, now: u64) {
        self.paused = now + self.pause;
        if !self.sessions.is_empty() {
            self.worker += 100;
            self.principal = self.sessions[self.worker as usize / 100 % self.sessions.len()];
            (self.issued, self.finished, self.unfenced, self.taken) = (0, 0, 0, 0);
            (self.gate, self.told, self.pace) = (Gate::Open, None, Pace::default());
        }
        self.rings = true;
    }

    fn may_go_on(&mut self, now: u64) -> bool {
        let waited = std::mem::take(&mut self.waits);
        if !matches!(self.gate, Gate::Open | Gate::Tell) && self.backlog {
            self.fence(now);
        }
        match self.gate {
            Gate::Open => true,
            Gate::Tell => {
                self.rings |= self.told.replace(self.gate) != Some(self.gate);
                true
            }
            Gate::Metered { steps, .. } => {
                self.taken = steps;
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
                self.rings |= !waited;
                self.held += u64::from(!waited);
                false
            }
        }
    }

    /// How many kernels the program has launched in all, if it takes time for each.
    fn launched(&mut self) -> u64 {
        let step = (self.ended / self.ahead + 1) * self.ahead;
        self.prepared = (self.prepared + TICK).min(step * self.host);
        self.prepared / self.host
    }

    fn issue(&mut self, now: u64) {
        let launched = if self.host > 0 { self.launched() } else { u64::MAX };
        for _ in 0..QUICK {
            // The program waits for its kernels, and the worker for the program.
            let waits = self.host == 0 && self.begun - self.ended >= self.ahead;
            let pauses = now < self.paused;
            if !self.works.contains(&now) || waits || pauses || self.begun >= launched {
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
            if self.pause > 0 {
                self.pause(now);
            }
        }
        ran
    }

    fn view(&self) -> View<'_> {
        View {
            worker: self.worker,
            began: 0,
            principal: self.principal,
            owner: owner(self.principal),
            weight: self.weight,
            client_weight: self.weight.max(100),
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
    let (mut now, mut stepped, mut sessions) = (0, 0, Vec::new());
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
        let present = |program: &&mut Program| program.has_session(now);
        let mut rings = false;
        programs.iter_mut().for_each(|program| rings |= std::mem::take(&mut program.rings));
        let workers: Vec<u32> = programs.iter_mut().filter(present).map(|program| program.worker).collect();
        rings |= std::mem::replace(&mut sessions, workers) != sessions;
        let due = arbiter.next_within().is_some_and(|within| now - stepped >= within);
        if due || rings {
            stepped = now;
            let views: Vec<View<'_>> =
                programs.iter().filter(|program| program.has_session(now)).map(Program::view).collect();
            let gates = arbiter.step(now, &views);
            for (program, (worker, gate)) in programs.iter_mut().filter(present).zip(gates) {
                assert_eq!(program.worker, worker);
                if program.gate != gate {
                    (program.gate, program.told) = (gate, None);
                }
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

/// The rules were read again in between.
#[test]
fn a_principals_newest_session_says_its_weight_and_priority() {
    let view = |worker, began, weight: u32| {
        let program = Program { weight, priority: weight as i32, ..Program::new(worker, "a", MS) };
        (program, began)
    };
    let views = [view(3, 1, 100), view(1, 2, 300), view(2, 1, 200)];
    let mut views: Vec<View<'_>> =
        views.iter().map(|(program, began)| View { began: *began, ..program.view() }).collect();
    for _ in 0..3 {
        views.rotate_left(1);
        let mut arbiter = Arbiter::new(Clock::Observed);
        let together = &arbiter.look(&views)["a"];
        assert_eq!((together.weight, together.client_weight, together.priority), (300, 300, 300));
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
fn a_client_gets_its_share_once_however_many_leases_it_has() {
    let leases = ["a 1", "a 2", "a 3", "a 4"];
    let mut programs: Vec<Program> =
        (0..).zip(leases).map(|(worker, name)| Program::new(worker, name, MS)).collect();
    programs.push(Program::new(9, "b", MS));
    simulate(&mut programs, 10_000 * MS);
    assert_shares(&programs, &[12.5, 12.5, 12.5, 12.5, 50.0]);
    // What one lease does not use goes to the client's others.
    let mut programs = [Program::new(1, "a 1", MS), Program::new(2, "a 2", MS), Program::new(3, "b", MS)];
    programs[1].works = 0..0;
    simulate(&mut programs, 10_000 * MS);
    assert_shares(&programs, &[50.0, 0.0, 50.0]);
    // Leases may have a part of their client's weight each.
    let mut programs = [Program::new(1, "a 1", MS), Program::new(2, "a 2", MS), Program::new(3, "b", MS)];
    (programs[0].weight, programs[1].weight) = (75, 25);
    simulate(&mut programs, 10_000 * MS);
    assert_shares(&programs, &[37.5, 12.5, 50.0]);
}

#[test]
fn clients_whose_names_have_slashes_are_different_clients() {
    let names = ["cert:spiffe://x/a", "cert:spiffe://x/a/b", "b"];
    let mut programs: Vec<Program> =
        (0..).zip(names).map(|(worker, name)| Program::new(worker, name, MS)).collect();
    simulate(&mut programs, 10_000 * MS);
    assert_shares(&programs, &[33.3, 33.3, 33.3]);
}

#[test]
fn idle_time_goes_to_whoever_has_work_and_earns_no_credit() {
    let mut programs = [Program::new(1, "a", MS), Program::new(2, "b", MS)];
    programs[1].works = 3_000 * MS..6_000 * MS;
    simulate(&mut programs, 10_000 * MS);
    let [a, b] = [programs[0].ran, programs[1].ran];
    assert!(a > 8_300 * MS && (1_350..1_650).contains(&(b / MS)), "{a} {b}");
}

/// Who works on another device has had no time there, which says nothing about this one.
#[test]
fn a_newcomer_starts_level_with_those_on_its_own_device() {
    let mut programs = [
        Program::new(1, "a", MS),
        Program::new(2, "b", MS),
        Program::new(3, "c", MS),
        Program::new(4, "x", MS),
    ];
    programs[2].works = 5_000 * MS..u64::MAX;
    programs[3].devices = 2;
    programs.iter_mut().for_each(|program| program.counted_from = 5_000 * MS);
    simulate(&mut programs, 10_000 * MS);
    assert_shares(&programs[..3], &[33.3; 3]);
}

#[test]
fn groups_that_come_together_start_level() {
    let mut programs: Vec<Program> =
        (0..).zip(["a", "b", "x", "y", "z"]).map(|(worker, name)| Program::new(worker, name, MS)).collect();
    // One is alone on the second device for some time, and has had little there.
    programs[2..4].iter_mut().for_each(|program| program.devices = 2);
    programs[3].works = 5_000 * MS..u64::MAX;
    // It uses the devices of both, at the same time.
    (programs[4].devices, programs[4].works) = (3, 6_000 * MS..u64::MAX);
    programs.iter_mut().for_each(|program| program.counted_from = 6_000 * MS);
    simulate(&mut programs, 10_000 * MS);
    let ran: Vec<u64> = programs.iter().map(|program| program.ran / MS).collect();
    assert!(ran[..4].iter().all(|ran| (700..900).contains(ran)), "{ran:?}");
}

#[test]
fn who_pauses_after_a_long_kernel_has_had_its_share() {
    let mut programs: Vec<Program> =
        (0..).zip(["a", "a", "b"]).map(|(worker, name)| Program::new(worker, name, MS)).collect();
    // A single kernel, and more work shortly afterwards.
    (programs[0].works, programs[0].now_and_then) = (1_000 * MS..1_000 * MS + TICK, (1, 400 * MS));
    programs[0].ahead = 1;
    programs[1].works = 1_600 * MS..u64::MAX;
    programs.iter_mut().for_each(|program| program.counted_from = 1_000 * MS);
    simulate(&mut programs, 2_600 * MS);
    let share = shares(&programs)[2];
    assert!((share - 50.0).abs() <= 3.0, "{share}");
}

/// A program that launches one kernel, waits for it and pauses.
fn pausing(worker: u32, principal: &'static str, kernel: u64, pause: u64) -> Program {
    Program { ahead: 1, pause, ..Program::new(worker, principal, kernel) }
}

#[test]
fn pauses_undo_neither_weights_nor_priorities() {
    for (weight, priority, kernel, pause, most) in [
        (300, 0, 400 * MS, 150 * MS, 26.0),
        (900, 0, 400 * MS, 500 * MS, 11.0),
        (900, 0, 50 * MS, 110 * MS, 11.0),
        (100, 1, 1_000 * MS, 150 * MS, 4.0),
        (100, 1, 50 * MS, 110 * MS, 1.0),
    ] {
        let mut programs = [pausing(1, "a", kernel, pause), Program::new(2, "b", 5 * MS)];
        (programs[1].weight, programs[1].priority) = (weight, priority);
        simulate(&mut programs, 30_000 * MS);
        let share = shares(&programs)[0];
        assert!(share <= most, "{share} instead of {most} % beside {weight}, {priority}");
    }
}

#[test]
fn a_debt_lapses_by_the_weight_of_those_that_it_is_owed_to() {
    let simulated = |weight, kernel, works| {
        let mut programs: Vec<Program> =
            (0..).zip(["a", "a", "b"]).map(|(worker, name)| Program::new(worker, name, MS)).collect();
        // A single kernel, and more work after a pause.
        (programs[0].works, programs[0].now_and_then) = (1_000 * MS..1_000 * MS + TICK, (1, kernel));
        programs[0].ahead = 1;
        (programs[1].works, programs[2].weight) = (works, weight);
        programs[1].ahead = if programs[1].works.end < u64::MAX { 1 } else { programs[1].ahead };
        programs.iter_mut().for_each(|program| program.counted_from = 1_000 * MS);
        simulate(&mut programs, 4_000 * MS);
        programs
    };
    // Those with a higher weight take longer to catch up.
    let share = shares(&simulated(300, 400 * MS, 2_000 * MS..u64::MAX))[2];
    assert!((share - 75.0).abs() <= 2.0, "{share}");
    // Those with a lower one less: the next kernel does not wait.
    let programs = simulated(50, 480 * MS, 1_800 * MS..1_800 * MS + TICK);
    assert_eq!((programs[1].held, programs[1].begun), (0, 1));
}

#[test]
fn a_debt_outlives_its_session() {
    let leases: &[&str] = &["a 1", "a 2", "a 3"];
    for sessions in [&["a"][..], leases] {
        for (kernel, weight, most) in
            [(400, 100, 53.0), (150, 100, 53.0), (1_000, 100, 53.0), (400, 900, 12.0)]
        {
            let mut programs = [pausing(1, "a", kernel * MS, 90 * MS), Program::new(2, "b", 5 * MS)];
            (programs[0].sessions, programs[1].weight) = (sessions, weight);
            programs[0].principal = sessions[0];
            simulate(&mut programs, 30_000 * MS);
            let share = shares(&programs)[0];
            assert!(share <= most, "{share} instead of {most} % with {kernel} ms, {sessions:?}");
        }
    }
}

#[test]
fn who_owes_nothing_never_waits_for_its_first_launch() {
    // Now and then some work, and a new process each time.
    for sessions in [&[][..], &["a"], &["a 1", "a 2"]] {
        for weight in [100, 300] {
            let mut programs = [pausing(1, "a", 40 * MS, 500 * MS), Program::new(2, "b", 5 * MS)];
            (programs[0].sessions, programs[1].weight) = (sessions, weight);
            simulate(&mut programs, 10_000 * MS);
            assert!(programs[0].ended > 14, "{}", programs[0].ended);
            assert_eq!(programs[0].held, 0, "{sessions:?} beside {weight}");
        }
    }
    // It has paid off a long kernel: nobody rings, but its gate opens.
    let mut programs = [pausing(1, "a", 400 * MS, 5_000 * MS), Program::new(2, "b", 5 * MS)];
    programs[1].weight = 300;
    simulate(&mut programs, 20_000 * MS);
    assert_eq!((programs[0].held, programs[0].ended), (0, 4));
}

#[test]
fn a_device_never_waits_for_who_is_held_back() {
    for priority in [0, 1] {
        let mut programs = [pausing(1, "a", 400 * MS, 150 * MS), Program::new(2, "b", 5 * MS)];
        (programs[1].weight, programs[1].priority) = (900, priority);
        programs[1].works = 0..5_000 * MS;
        programs[0].counted_from = 5_000 * MS;
        simulate(&mut programs, 10_450 * MS);
        // In 5.45 s: ten times a kernel, a pause and what little passes until the other's turn has ended.
        let [ran, held] = [programs[0].ran, programs[0].held];
        assert!(ran >= 3_900 * MS && held > 0, "{ran} {held}");
    }
}

#[test]
fn a_principal_alone_is_neither_measured_nor_stopped() {
    let mut programs = [Program::new(1, "a", MS), Program::new(2, "b", MS)];
    programs[1].works = 0..0;
    let arbiter = simulate(&mut programs, 1_000 * MS);
    assert_eq!((programs[0].gate, programs[1].gate), (Gate::Open, Gate::Tell));
    assert!(arbiter.next_within().is_none() && arbiter.charged("a") < 10 * MS);
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
    for (program, (principal, devices)) in programs.iter_mut().zip([("a", 1), ("a", 2), ("b", 1), ("b", 2)]) {
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
        began: 0,
        principal,
        owner: principal,
        weight: 100,
        client_weight: 100,
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
            let views = [nonsense(1, "liar", n), nonsense(2, "liar", n), nonsense(3, "other", n), honest(n)];
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

/// Trains a small model: a step has 1,100 kernels of 10 µs, and the program takes 17 µs for each.
fn small_model(worker: u32, principal: &'static str, weight: u32) -> Program {
    Program { weight, ahead: 1100, host: 17 * US, ..Program::new(worker, principal, 10 * US) }
}

#[test]
fn programs_that_leave_room_run_side_by_side() {
    let duration = 10_000 * MS;
    for count in [2, 3, 4, 8] {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let mut programs: Vec<Program> =
            names.iter().zip(1..).take(count).map(|(name, worker)| small_model(worker, name, 100)).collect();
        simulate(&mut programs, duration);
        assert_shares(&programs, &vec![100.0 / count as f64; count]);
        let busy: u64 = programs.iter().map(|program| program.ran).sum();
        assert!(busy * 100 > duration * 93, "{count} programs use {busy} ns of {duration}");
    }
}

#[test]
fn weights_hold_for_programs_that_leave_room() {
    let mut programs = [small_model(1, "a", 300), small_model(2, "b", 100)];
    let duration = 10_000 * MS;
    simulate(&mut programs, duration);
    // The first cannot use three quarters of the device: alone it takes 59 %.
    assert_shares(&programs, &[68.0, 32.0]);
    let busy: u64 = programs.iter().map(|program| program.ran).sum();
    assert!(busy * 100 > duration * 78, "they use {busy} ns of {duration}");
}

#[test]
fn work_that_fills_the_device_does_not_run_beside_a_turn() {
    let mut programs = [small_model(1, "a", 100), Program::new(2, "b", MS)];
    simulate(&mut programs, 10_000 * MS);
    // It was alone for half of the time.
    let steps = programs[0].ended / 1100;
    assert!((235..=320).contains(&steps), "{steps} steps");
    assert!(programs[1].ran > 4_700 * MS, "{} ns", programs[1].ran);
}
