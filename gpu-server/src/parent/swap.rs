//! Device memory beyond what the devices have: carries out the decisions of [`Residency`]. The thread of
//! [`super::turns`] calls it when a worker rings, and repeatedly while somebody waits for room.
//!
//! What a session holds is what it was granted ([`super::accounts`]), and what it needs is at most what it
//! has just asked for. Its worker reports where the memory is, and is trusted up to these amounts. A worker
//! that lies can have more memory on a device than is counted, as can one that allocates from NVIDIA's
//! driver without asking the daemon; NVML shows both, and what NVML shows is counted.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::clock;
use nix::fcntl::OFlag;

use super::accounts::account::Account;
use super::residency::{Bytes, Residency, Rules, Swapping, View};
use super::session::Session;
use super::state::{Server, State};
use super::workers::{Stage, Worker};
use crate::config::{Backend, Serve, Swap};
use crate::confinement;
use crate::limits::Resource;
use crate::worker_protocol::{Kind, MemoryOrder, ToWorker};

/// Memory of an NVIDIA device that stays free.
const RESERVE: u64 = 1 << 30;

/// Whether memory can be moved to files, if the options ask for that.
pub(super) fn check(swap: &Swap) -> anyhow::Result<()> {
    let Some(folder) = &swap.folder else { return Ok(()) };
    file(folder).map(drop).with_context(|| format!("making a file in --swap-folder={}", folder.display()))
}

/// Starts moving device memory, if the options ask for it. Called before any session begins.
pub(super) fn prepare(server: &Server) -> anyhow::Result<()> {
    if server.options.worker.swap.on() {
        check(&server.options.worker.swap)?;
        server.lock().swapping = Some(swapping(&server.options));
    }
    Ok(())
}

/// Moving device memory by these options, before anything has moved.
fn swapping(options: &Serve) -> Swapping {
    let Swap { memory, folder, residency_ms, .. } = &options.worker.swap;
    let rules = Rules {
        residency: u64::from(*residency_ms) * 1_000_000,
        memory: *memory,
        // A worker that uses more than its group may is killed by the kernel.
        memory_each: confinement::memory_limit(options.sandbox.memory) / 4 * 3,
        files: folder.is_some(),
    };
    Swapping { residency: Residency::new(rules), ..Swapping::default() }
}

/// Starts moving device memory without being asked to by the options, if a session waits for memory that an
/// earlier daemon has moved away: it returns, and nobody leaves, because there is no place for what leaves.
fn bring_back(server: &Server) {
    let mut state = server.lock();
    let waits = |session: &Session| {
        let account = &session.account;
        takes_part(session)
            && session.daemons > 0
            && account.meter().memory.returns.load(Ordering::Acquire) != 0
            && session.devices.iter().any(|number| account.away(*number) > 0)
    };
    if state.swapping.is_none() && state.sessions.values().any(waits) {
        tracing::info!(
            "device memory that an earlier daemon has moved returns to its devices (there is no --swap-memory and no --swap-folder any more)"
        );
        state.swapping = Some(swapping(&server.options));
    }
}

/// How long a first reading of the devices' memory may take, and how long until the next is taken, if that
/// knew too little.
const READ_WITHIN: Duration = Duration::from_secs(2);
const READ_AGAIN: Duration = Duration::from_secs(5);

/// Learns how much memory the devices have of which that is not known yet: NVML may know one later that was
/// being reset.
fn learn_budget(server: &Server) {
    let within = {
        let state = server.lock();
        let Some(swapping) = &state.swapping else { return };
        let devices = state.devices(&server.options);
        match swapping.read {
            _ if devices.iter().all(|number| swapping.budget.contains_key(number)) => return,
            None => READ_WITHIN,
            // Turns go on meanwhile, so this takes what another look has read.
            Some(at) if at.elapsed() >= READ_AGAIN => Duration::ZERO,
            Some(_) => return,
        }
    };
    let found = budget(server, within);
    let mut state = server.lock();
    let devices = state.devices(&server.options);
    let Some(swapping) = &mut state.swapping else { return };
    swapping.read = Some(Instant::now());
    for (number, bytes) in found {
        swapping.budget.entry(number).or_insert(bytes);
    }
    let unknown: Vec<u32> =
        devices.into_iter().filter(|number| !swapping.budget.contains_key(number)).collect();
    if !unknown.is_empty() && !std::mem::replace(&mut swapping.warned, true) {
        tracing::warn!(
            devices = ?unknown,
            "no memory leaves these devices until NVML says how much they have (--swap-device-memory says it, too)"
        );
    }
}

/// The bytes of each device that sessions may use, if they are known within that time.
fn budget(server: &Server, within: Duration) -> Bytes {
    let Serve { worker, .. } = &server.options;
    let (devices, cuda) = {
        let state = server.lock();
        let cuda = state.serving.as_ref().is_some_and(|(backend, _)| backend == "cuda");
        (state.devices(&server.options), cuda)
    };
    let most = worker.swap.device_memory;
    if most > 0 {
        return devices.into_iter().map(|number| (number, most)).collect();
    }
    if !cuda && worker.backing.backend != Backend::Cuda {
        return devices.into_iter().map(|number| (number, worker.backing.software_memory)).collect();
    }
    let readings = server.gpus.fresh(within);
    let memory = |number: u32| {
        let reading = readings.iter().find(|reading| reading.device == number)?;
        let (free, used) = reading.memory?;
        Some((number, free.saturating_add(used).saturating_sub(RESERVE)))
    };
    devices.into_iter().filter_map(memory).collect()
}

/// A nameless file.
fn file(folder: &Path) -> io::Result<OwnedFd> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600).custom_flags(OFlag::O_TMPFILE.bits());
    Ok(options.open(folder)?.into())
}

/// An order that comes with a file.
struct InFile {
    worker: Arc<Worker>,
    number: u32,
    order: MemoryOrder,
}

/// The thread that makes files for device memory, and gives the orders that come with one. While a disk is
/// busy, a file takes seconds, and nobody else waits for that.
pub(super) struct Files(Sender<InFile>);

impl Files {
    /// Starts the thread, if there is a folder for files.
    pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<Files> {
        Files::made_by(server, file)
    }

    fn made_by(
        server: &Arc<Server>,
        make: impl Fn(&Path) -> io::Result<OwnedFd> + Send + 'static,
    ) -> anyhow::Result<Files> {
        let (orders, given) = channel();
        if let Some(folder) = server.options.worker.swap.folder.clone() {
            let server = Arc::clone(server);
            std::thread::Builder::new()
                .name("rgpu-files".into())
                .spawn(move || given.iter().for_each(|order| send_with_file(&server, &order, make(&folder))))
                .context("starting to make files for device memory")?;
        }
        Ok(Files(orders))
    }
}

fn send_with_file(server: &Server, InFile { worker, number, order }: &InFile, file: io::Result<OwnedFd>) {
    match file {
        Ok(file) => {
            // The watcher notices when the worker is gone.
            let _ = worker.send(&ToWorker::Memory { number: *number, order: *order }, &[file.as_fd()]);
        }
        Err(e) => {
            tracing::warn!("device memory stays where it is: no file in --swap-folder: {e}");
            if let Some(swapping) = &mut server.lock().swapping {
                swapping.residency.refuse(worker.pid(), clock::to_ns(Instant::now()));
            }
        }
    }
}

/// Looks at all sessions and gives orders. Returns whether somebody waits, so that it must be called again
/// soon.
pub(super) fn step(server: &Server, files: &Files) -> bool {
    bring_back(server);
    learn_budget(server);
    let mut state = server.lock();
    let Some(swapping) = &state.swapping else { return false };
    let groups = groups(&state.sessions);
    let least = least_for_earlier(&state.sessions, &groups, &swapping.budget);
    let left = |(device, bytes): (&u32, &u64)| {
        let least = least.get(device).copied().unwrap_or(0);
        (*device, bytes.saturating_sub(state.beside(*device)).max(least))
    };
    let budget: Bytes = swapping.budget.iter().map(left).collect();
    let State { sessions, workers, swapping: Some(swapping), .. } = &mut *state else { return false };
    swapping.least = least;
    let now = Instant::now();
    let views: Vec<View> = sessions
        .iter()
        .filter(|(_, session)| takes_part(session))
        .map(|(worker, session)| View {
            group: groups.get(worker).copied(),
            ..view(*worker, session, &budget, now)
        })
        .collect();
    let now = clock::to_ns(now);
    let decided = swapping.residency.step(now, &budget, &views);
    for worker in decided.held_back {
        swapping.held_back += 1;
        let Some(session) = sessions.get(&worker) else { continue };
        tracing::info!(
            worker,
            client = session.client,
            program = session.program,
            "a session waits for device memory that others have only just got back (--swap-residency-ms)"
        );
    }
    for worker in decided.no_store {
        let Some(session) = sessions.get(&worker) else { continue };
        tracing::warn!(
            worker,
            client = session.client,
            program = session.program,
            "a session waits for device memory until others end or free some: --swap-memory has no room for what they would move, or --worker-memory does not allow it, and there is no --swap-folder"
        );
    }
    for worker in decided.outlasted {
        let Some(session) = sessions.get(&worker) else { continue };
        tracing::warn!(
            worker,
            client = session.client,
            program = session.program,
            "a session waits for device memory of sessions that share memory or events with each other: they leave together, when all of them are idle"
        );
    }
    for (worker, number, order, to_file) in decided.orders {
        let Some(managed) = workers.get(&worker) else { continue };
        tracing::debug!(worker, number, ?order, to_file, "ordered");
        if to_file {
            // The thread ends only with this one.
            let _ = files.0.send(InFile { worker: Arc::clone(&managed.worker), number, order });
        } else {
            // The watcher notices when the worker is gone.
            let _ = managed.worker.send(&ToWorker::Memory { number, order }, &[]);
        }
    }
    for (worker, session) in sessions.iter_mut() {
        session.account.set_asked(swapping.residency.is_asked(*worker));
        session.account.set_moves(swapping.residency.moves());
    }
    decided.pending
}

/// The groups of sessions that belong together, by worker: those of which one has opened what another shares.
/// They may be the ranks of one program. A session that belongs to no other has none.
fn groups(sessions: &HashMap<u32, Session>) -> HashMap<u32, u32> {
    let mut groups = HashMap::new();
    let links = || {
        let linked = |(worker, session): (&u32, &Session)| {
            let (worker, others) = (*worker, session.linked.clone());
            others.into_iter().map(move |other| (worker, other))
        };
        sessions.iter().flat_map(linked).filter(|(_, other)| sessions.contains_key(other))
    };
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for (one, other) in links() {
            let of = |worker: u32| groups.get(&worker).copied().unwrap_or(worker);
            let first = of(one).min(of(other));
            changed |= [one, other].into_iter().any(|worker| groups.get(&worker) != Some(&first));
            groups.extend([(one, first), (other, first)]);
        }
    }
    groups
}

/// What devices must at least have for sessions that earlier daemons began, whose `--swap-device-memory` may
/// have been larger: each returns as a whole, and at the same time as those that it belongs to.
fn least_for_earlier(sessions: &HashMap<u32, Session>, groups: &HashMap<u32, u32>, budget: &Bytes) -> Bytes {
    let unit = |worker: &u32| groups.get(worker).copied().unwrap_or(*worker);
    let all = || sessions.iter().filter(|(_, session)| takes_part(session));
    let earlier: HashSet<u32> =
        all().filter(|(_, session)| session.daemons > 0).map(|(worker, _)| unit(worker)).collect();
    let mut sums: HashMap<(u32, u32), u64> = HashMap::new();
    for (worker, session) in all().filter(|(worker, _)| earlier.contains(&unit(worker))) {
        for number in budget.keys() {
            let sum = sums.entry((unit(worker), *number)).or_default();
            let account = &session.account;
            *sum = sum.saturating_add(account.on(*number)).saturating_add(account.away(*number));
        }
    }
    let mut least = Bytes::new();
    for ((_, number), sum) in sums {
        let most = least.entry(number).or_default();
        *most = sum.max(*most);
    }
    least
}

/// Whether a session's memory can be ordered to move.
fn takes_part(session: &Session) -> bool {
    session.kind == Kind::Gpu && session.begun && !session.ended
}

/// A session's memory, as far as the daemon trusts the report. `budget`: the devices whose memory is limited,
/// of which it may have some without having the device.
fn view(worker: u32, session: &Session, budget: &Bytes, now: Instant) -> View {
    let account = &session.account;
    let is_away = session.devices.iter().any(|number| account.away(*number) > 0);
    let memory = &account.meter().memory;
    let done = memory.done.load(Ordering::Acquire);
    let mut view = View {
        worker,
        principal: session.limits.principal.clone(),
        // Where nobody knows how much room there is, nobody can tell when it can return.
        swap: session.limits.swappable && session.devices.iter().all(|number| budget.contains_key(number)),
        returns: memory.returns.load(Ordering::Acquire) != 0,
        yields: memory.yields.load(Ordering::Acquire) != 0,
        rested: Some(memory.rested.load(Ordering::Relaxed))
            .filter(|at| *at > 0 && account.meter().unfinished.load(Ordering::Acquire) == 0),
        began: clock::to_ns(session.since),
        begun: memory.begun.load(Ordering::Acquire),
        done: ((done >> 32) as u32, done & 1 == 1),
        // What a session keeps that began under this daemon is known here.
        keeps: if session.daemons > 0 { memory.keeps.load(Ordering::Relaxed) } else { 0 },
        ..View::default()
    };
    for number in session.devices.iter().chain(budget.keys()) {
        let at = *number as usize;
        let Some((movable, needs)) = memory.movable.get(at).zip(memory.needs.get(at)) else { continue };
        let granted = account.counted(*number);
        let needs = needs.load(Ordering::Acquire).min(account.wanted(*number, is_away, now));
        for (to, bytes) in [
            (&mut view.on, account.on(*number)),
            (&mut view.movable, movable.load(Ordering::Relaxed).min(granted)),
            (&mut view.away, account.away(*number)),
            (&mut view.needs, needs),
        ] {
            if bytes > 0 {
                to.insert(*number, bytes);
            }
        }
    }
    view
}

impl Account {
    /// The session's bytes that are away from a device.
    pub(super) fn away(&self, number: u32) -> u64 {
        let granted = self.counted(number);
        let said = self.meter().memory.away.get(number as usize);
        said.map_or(0, |bytes| bytes.load(Ordering::Acquire)).min(granted)
    }

    /// The session's bytes on a device. Of a session that began when no memory was moved, which asks nobody,
    /// only NVML knows them.
    fn on(&self, number: u32) -> u64 {
        if !self.asks && self.record.granted(Resource::Device(number)) == 0 {
            return self.used(number as usize);
        }
        (self.counted(number) - self.away(number)).saturating_add(self.implicit(number as usize))
    }

    /// Bytes that the session has moved off devices, and back.
    pub(super) fn moved(&self) -> [u64; 2] {
        let memory = &self.meter().memory;
        [&memory.left[0], &memory.returned[0]].map(|bytes| bytes.load(Ordering::Relaxed))
    }
}

impl State {
    /// Bytes of a device that no order moves: workers that wait for a session have contexts, and sessions
    /// that begin or end may have any memory.
    fn beside(&self, number: u32) -> u64 {
        let waiting = self.workers.values().filter(|managed| managed.stage != Stage::Serving);
        let waiting = waiting.filter_map(|managed| managed.takes.get(&number).copied());
        let others = self.sessions.values().filter(|session| !takes_part(session));
        waiting.chain(others.map(|session| session.account.on(number))).fold(0, u64::saturating_add)
    }

    /// Whether a device has room for more of a session's memory, if that is limited. An error: not even if
    /// everybody else left.
    pub(super) fn has_room(&self, worker: u32, resource: Resource, bytes: u64) -> Result<bool, ()> {
        let (Some(swapping), Resource::Device(number)) = (&self.swapping, resource) else { return Ok(true) };
        let Some(most) = swapping.budget.get(&number) else { return Ok(true) };
        let least = swapping.least.get(&number).copied().unwrap_or(0);
        let beside = self.beside(number);
        let mut all = bytes.saturating_add(swapping.residency.reserved(worker, number));
        all = all.saturating_add(beside);
        let mut own = bytes;
        for (other, session) in self.sessions.iter().filter(|(_, session)| takes_part(session)) {
            let account = &session.account;
            let mut on = account.on(number);
            if swapping.residency.keeps_room(*other) {
                on = on.saturating_add(account.away(number));
            }
            all = all.saturating_add(on);
            if *other == worker {
                own = own.saturating_add(on);
            }
        }
        let most_of_all = (*most).max(beside.saturating_add(least));
        if own > (*most).max(least) { Err(()) } else { Ok(all <= most_of_all) }
    }

    /// All sessions' bytes that are away from a device.
    pub(super) fn away(&self, number: u32) -> u64 {
        self.sessions.values().fold(0, |sum: u64, session| sum.saturating_add(session.account.away(number)))
    }

    /// Bytes of this machine's memory that sessions report as kept for device memory.
    pub(super) fn kept_for_swap(&self) -> u64 {
        let kept = |session: &Session| session.account.meter().memory.keeps.load(Ordering::Relaxed);
        self.sessions.values().map(kept).fold(0, u64::saturating_add)
    }

    /// A session is over.
    pub(super) fn settle_moved(&mut self, session: &Session) {
        if let Some(swapping) = &mut self.swapping {
            for (sum, moved) in swapping.settled.iter_mut().zip(session.account.moved()) {
                *sum = sum.saturating_add(moved);
            }
        }
    }

    /// Bytes that sessions have moved off devices and back since the daemon started.
    pub(super) fn moved(&self) -> [u64; 2] {
        let settled = self.swapping.as_ref().map_or([0; 2], |swapping| swapping.settled);
        self.sessions.values().fold(settled, |sum, session| {
            let moved = session.account.moved();
            [sum[0].saturating_add(moved[0]), sum[1].saturating_add(moved[1])]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::tests::{server, session_of_limits};
    use super::super::watch::remove_worker;
    use super::super::workers::Managed;
    use super::*;
    use crate::driver::cuda::nvml::readings::Reading;
    use crate::driver::store::memory_for;
    use crate::limits::Limits;
    use crate::pages::Whereabouts;
    use crate::worker_protocol::{Refusal, Reply};
    use std::sync::atomic::AtomicBool;
    use test_kit::{PATIENCE, eventually};

    const DEVICE: Resource = Resource::Device(0);

    /// Sessions on device 0, which has 100 bytes.
    fn state(workers: &[u32]) -> State {
        let mut state = State::default();
        for worker in workers {
            let mut session = session_of_limits(Limits::default());
            (session.begun, session.devices) = (true, vec![0]);
            state.sessions.insert(*worker, session);
        }
        state.swapping = Some(Swapping { budget: budget(), ..Swapping::default() });
        state
    }

    fn budget() -> Bytes {
        Bytes::from([(0, 100)])
    }

    #[test]
    fn a_lying_worker_is_trusted_only_up_to_its_grant() {
        let mut state = state(&[1, 2]);
        assert!(matches!(state.charge(1, 1, DEVICE, 60, None), Reply::Charged));
        assert!(matches!(state.charge(2, 1, DEVICE, 60, None), Reply::Refused(Refusal::Crowded)));
        assert!(matches!(state.charge(2, 2, DEVICE, 101, None), Reply::Refused(Refusal::Full)), "never");
        let memory = &state.sessions[&1].account.meter().memory;
        for all in [&memory.movable, &memory.away, &memory.needs] {
            all[0].store(u64::MAX, Ordering::Relaxed);
        }
        memory.rested.store(u64::MAX, Ordering::Relaxed);
        memory.keeps.store(u64::MAX, Ordering::Relaxed);
        let seen = view(1, &state.sessions[&1], &budget(), Instant::now());
        let granted = Bytes::from([(0, 60)]);
        assert_eq!((&seen.movable, &seen.away, &seen.needs), (&granted, &granted, &granted));
        assert!(seen.on.is_empty());
        // Another session has its place now, and its reports cannot change that.
        assert!(matches!(state.charge(2, 3, DEVICE, 100, None), Reply::Charged));
        assert!(matches!(state.charge(1, 2, DEVICE, 1, None), Reply::Refused(Refusal::Crowded)));
        assert_eq!((state.away(0), state.kept_for_swap()), (60, u64::MAX));
        let mut residency = Residency::default();
        let views: Vec<View> = state
            .sessions
            .iter()
            .map(|(worker, one)| view(*worker, one, &budget(), Instant::now()))
            .collect();
        assert!(residency.step(1, &Bytes::from([(0, 100)]), &views).orders.is_empty());
    }

    #[test]
    fn a_session_needs_no_more_than_it_has_just_asked_for() {
        let mut state = state(&[1, 2]);
        assert!(matches!(state.charge(1, 1, DEVICE, 98, None), Reply::Charged));
        let needs = |state: &State, at| view(2, &state.sessions[&2], &budget(), at).needs;
        state.sessions[&2].account.meter().memory.needs[0].store(90, Ordering::Relaxed);
        let before = Instant::now();
        assert_eq!(needs(&state, before), Bytes::new(), "it has asked for nothing");
        assert!(matches!(state.charge(2, 1, DEVICE, 5, None), Reply::Refused(Refusal::Crowded)));
        let (after, asked) = (Instant::now(), Bytes::from([(0, 5)]));
        // A smaller piece meanwhile.
        state.sessions.get_mut(&2).unwrap().account.note_wanted(DEVICE, 1, before);
        assert_eq!(needs(&state, before), asked);
        // One that waits asks again and again, unless it carries out an order.
        let later = after + Duration::from_secs(2);
        assert_eq!(needs(&state, later), Bytes::new());
        state.sessions.get_mut(&2).unwrap().account.set_asked(true);
        assert_eq!(needs(&state, later), asked);
    }

    #[test]
    fn a_device_that_is_known_later_gets_its_limit_then() {
        let server = server(&["--backend=cuda", "--swap-memory=1G"]);
        prepare(&server).unwrap();
        server.lock().serving = Some(("cuda".into(), vec!["a".into(), "b".into()]));
        let reading = |device| Reading { device, memory: Some((RESERVE, 7)), ..Reading::default() };
        let read = |at| server.lock().swapping.as_mut().unwrap().read = at;
        let budget = || server.lock().swapping.as_ref().unwrap().budget.clone();
        server.gpus.set(vec![reading(1)]);
        learn_budget(&server);
        assert_eq!(budget(), Bytes::from([(1, 7)]));
        server.gpus.set(vec![reading(0), reading(1)]);
        read(Some(Instant::now() + PATIENCE));
        learn_budget(&server);
        assert_eq!(budget(), Bytes::from([(1, 7)]), "too early for another look");
        read(Instant::now().checked_sub(READ_AGAIN));
        learn_budget(&server);
        assert_eq!(budget(), Bytes::from([(0, 7), (1, 7)]));
    }

    /// A server with sessions that an earlier daemon began. The memory of the first, 60 bytes, is away, and
    /// it waits for that.
    fn successor(flags: &[&str]) -> Arc<Server> {
        let server = server(flags);
        let mut filled = state(&[1, 2]);
        filled.swapping = None;
        assert!(matches!(filled.charge(1, 1, DEVICE, 60, None), Reply::Charged));
        for session in filled.sessions.values_mut() {
            session.daemons = 1;
        }
        let memory = &filled.sessions[&1].account.meter().memory;
        memory.away[0].store(60, Ordering::Relaxed);
        memory.returns.store(1, Ordering::Relaxed);
        {
            let mut state = server.lock();
            state.sessions = filled.sessions;
            state.workers.insert(1, Managed::fake(1, Stage::Serving));
            state.serving = Some(("software".into(), vec!["a".into()]));
        }
        prepare(&server).unwrap();
        server
    }

    fn ordered(server: &Server) -> Option<MemoryOrder> {
        server.lock().swapping.as_ref()?.residency.ordered(1)
    }

    #[test]
    fn memory_that_an_earlier_daemon_moved_returns_although_this_one_moves_none() {
        let server = successor(&[]);
        let returns = |value| {
            server.lock().sessions[&1].account.meter().memory.returns.store(value, Ordering::Relaxed);
        };
        returns(0);
        assert!(!step(&server, &Files(channel().0)) && server.lock().swapping.is_none());
        returns(1);
        assert!(step(&server, &Files(channel().0)));
        assert_eq!(ordered(&server), Some(MemoryOrder::Return));
    }

    #[test]
    fn a_session_returns_that_has_more_than_this_daemon_gives_a_session() {
        let server = successor(&["--swap-memory=1G", "--swap-device-memory=40"]);
        step(&server, &Files(channel().0));
        assert_eq!(ordered(&server), Some(MemoryOrder::Return));
        let charge = |bytes| server.lock().charge(2, bytes, DEVICE, bytes, None);
        assert!(matches!(charge(1), Reply::Refused(Refusal::Crowded)), "its room is kept");
        server.lock().sessions.remove(&1);
        step(&server, &Files(channel().0));
        assert!(matches!(charge(41), Reply::Refused(Refusal::Full)));
        assert!(matches!(charge(40), Reply::Charged));
    }

    #[test]
    fn a_session_from_before_memory_was_moved_has_what_nvml_says() {
        let mut state = state(&[1, 2]);
        let account = &state.sessions[&1].account;
        account.meter().held[0].store(60, Ordering::Relaxed);
        account.measured(0, 65);
        assert!(matches!(state.charge(2, 1, DEVICE, 36, None), Reply::Refused(Refusal::Crowded)));
        // Whatever its worker says.
        state.sessions[&1].account.meter().held[0].store(u64::MAX, Ordering::Relaxed);
        state.sessions[&1].account.measured(0, 65);
        assert!(matches!(state.charge(2, 2, DEVICE, 35, None), Reply::Charged));
    }

    #[test]
    fn nobody_leaves_a_device_of_which_nobody_knows_how_much_it_has() {
        let mut state = state(&[1]);
        let swap = |state: &State| view(1, &state.sessions[&1], &budget(), Instant::now()).swap;
        assert!(swap(&state));
        state.sessions.get_mut(&1).unwrap().devices = vec![0, 1];
        assert!(!swap(&state));
    }

    #[test]
    fn sessions_belong_together_if_one_has_opened_what_another_shares() {
        let mut state = state(&[1, 2, 3, 4, 5]);
        let link = |state: &mut State, one: u32, other| {
            state.sessions.get_mut(&one).unwrap().linked.insert(other);
        };
        link(&mut state, 5, 3);
        link(&mut state, 2, 3);
        // Its session is over.
        link(&mut state, 4, 9);
        assert_eq!(groups(&state.sessions), HashMap::from([(2, 2), (3, 2), (5, 2)]));
    }

    /// A charge and a step see the same memory: a session does not wait for room that only one of them sees.
    #[test]
    fn what_others_have_without_having_the_device_takes_room_of_it() {
        let server = server(&["--swap-memory=1G"]);
        let filled = state(&[1, 2, 3]);
        {
            let mut state = server.lock();
            (state.sessions, state.swapping) = (filled.sessions, filled.swapping);
            // Contexts: of a session that has another device, and of one that ends.
            for (worker, bytes) in [(1, 30), (3, 30)] {
                let session = state.sessions.get_mut(&worker).unwrap();
                (session.devices, session.ended) = (vec![worker], worker == 3);
                session.account.measured(0, bytes);
            }
            assert!(matches!(state.charge(2, 1, DEVICE, 50, None), Reply::Refused(Refusal::Crowded)));
            state.sessions[&2].account.meter().memory.needs[0].store(50, Ordering::Relaxed);
        }
        let step = || {
            // However long this test stands still.
            server.lock().sessions.get_mut(&2).unwrap().account.set_asked(true);
            step(&server, &Files(channel().0));
        };
        step();
        let reserved = |server: &Server| server.lock().swapping.as_ref().unwrap().residency.reserved(9, 0);
        assert_eq!(reserved(&server), 0, "nobody is offered what is not free");
        server.lock().sessions.remove(&3);
        step();
        assert_eq!(reserved(&server), 50);
        assert!(matches!(server.lock().charge(2, 2, DEVICE, 50, None), Reply::Charged));
    }

    #[test]
    fn what_an_ended_session_keeps_counts_until_its_worker_is_gone() {
        let server = server(&["--swap-memory=1G"]);
        {
            let filled = state(&[1, 2, 3]);
            let mut state = server.lock();
            (state.sessions, state.swapping) = (filled.sessions, filled.swapping);
            // Room for one of them.
            let (memory, memory_each) = (memory_for(60), memory_for(60));
            state.swapping.as_mut().unwrap().residency =
                Residency::new(Rules { memory, memory_each, ..Rules::default() });
            for worker in [1, 2] {
                state.workers.insert(worker, Managed::fake(worker, Stage::Serving));
            }
        }
        // A session has 60 bytes of the device's 100, which the next one needs.
        let memory = |worker: u32, set: &dyn Fn(&Whereabouts)| {
            set(&server.lock().sessions[&worker].account.meter().memory);
        };
        let takes = |worker: u32| {
            assert!(matches!(server.lock().charge(worker, 1, DEVICE, 60, None), Reply::Charged));
            memory(worker, &|memory| memory.needs[0].store(0, Ordering::Relaxed));
            memory(worker, &|memory| memory.movable[0].store(60, Ordering::Relaxed));
        };
        let waits = |worker: u32| {
            let refused = server.lock().charge(worker, 1, DEVICE, 60, None);
            assert!(matches!(refused, Reply::Refused(Refusal::Crowded)));
            memory(worker, &|memory| memory.needs[0].store(60, Ordering::Relaxed));
        };
        let ordered_for = |other: u32, worker: u32| {
            // However long this test stands still.
            server.lock().sessions.get_mut(&worker).unwrap().account.set_asked(true);
            step(&server, &Files(channel().0));
            server.lock().swapping.as_ref().unwrap().residency.is_asked(other)
        };
        takes(1);
        waits(2);
        assert!(ordered_for(1, 2));
        memory(1, &|memory| memory.away[0].store(60, Ordering::Relaxed));
        memory(1, &|memory| memory.done.store(1 << 32 | 1, Ordering::Relaxed));
        takes(2);
        waits(3);
        server.lock().sessions.get_mut(&1).unwrap().ended = true;
        assert!(!ordered_for(2, 3), "there is no memory for it");
        remove_worker(&mut server.lock(), 1, true, "ended", None);
        assert!(ordered_for(2, 3));
    }

    #[test]
    fn nobody_waits_for_a_file_that_a_busy_disk_makes_slowly() {
        let server = server(&["--swap-folder=/somewhere"]);
        let (go, goes) = channel::<()>();
        let made = Arc::new(AtomicBool::new(false));
        let making = Arc::clone(&made);
        let files = Files::made_by(&server, move |_| {
            let _ = goes.recv_timeout(PATIENCE);
            making.store(true, Ordering::SeqCst);
            Err(io::Error::other("the disk is full"))
        });
        {
            let filled = state(&[1, 2]);
            let mut state = server.lock();
            (state.sessions, state.swapping) = (filled.sessions, filled.swapping);
            state.workers.insert(1, Managed::fake(1, Stage::Serving));
            let rules = Rules { files: true, ..Rules::default() };
            state.swapping.as_mut().unwrap().residency = Residency::new(rules);
            assert!(matches!(state.charge(1, 1, DEVICE, 60, None), Reply::Charged));
            assert!(matches!(state.charge(2, 1, DEVICE, 60, None), Reply::Refused(Refusal::Crowded)));
            let memory = |worker| &state.sessions[&worker].account.meter().memory;
            memory(1).movable[0].store(60, Ordering::Relaxed);
            memory(2).needs[0].store(60, Ordering::Relaxed);
            // However long this test stands still.
            state.sessions.get_mut(&2).unwrap().account.set_asked(true);
        }
        let ordered = || server.lock().swapping.as_ref().unwrap().residency.is_asked(1);
        assert!(step(&server, &files.unwrap()) && ordered());
        assert!(!made.load(Ordering::SeqCst), "it waited for the file");
        go.send(()).unwrap();
        eventually(|| !ordered());
    }
}
