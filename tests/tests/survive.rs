//! Sessions over TCP whose links are cut, by resets and by silence, while programs copy, launch, wait and
//! share memory. Their results must be the same as without cuts, and nothing may be left behind.
//!
//! The link is a relay on this host ([`Link`]) or a network of two namespaces. `RGPU_SURVIVE_CUTS` is the
//! least number of cuts for each; without it, each program runs once. `RGPU_SURVIVE_SILENCE` is how long the
//! network of the namespaces is silent at most, in seconds. The figures are in
//! `target/logs/survive-*/figures`.

#[path = "survive/host.rs"]
mod host;
mod support;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use host_bridge::framing::{recv_frame, send_frame};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use protocol::channel::NO_SLOT;
use protocol::device::{Answer, untext};
use protocol::fuzzing::Random;
use protocol::handle::StreamId;
use protocol::link::{Hello, Received, frame, purpose};
use protocol::ops::stream::StreamMark;
use protocol::ops::{Op, encode};
use rgpu_tests::{programs, tree};
use support::network::{Network, SERVER};
use support::{Bystanders, PATIENCE, Rig, Running, Transport, eventually, on_this_host};
use test_kit::link::{TcpBridge, connect_tcp, greet, hello};
use zerocopy::{FromBytes, IntoBytes};

/// Programs with copies of all sizes, launches, host functions, graphs, managed and mapped memory, events,
/// threads, and memory and events that processes share.
const PROGRAMS: &[&str] = &[
    "copies",
    "copies_3d",
    "graph_host",
    "host_registration",
    "ipc_events",
    "ipc_memory",
    "managed_memory",
    "many_small_copies",
    "mapped_memory",
    "memcpy_batch",
    "pinned_bulk",
    "stream_callbacks",
    "stream_memory",
    "streams_events",
    "threads",
];

/// Programs that run over a network that loses packets unless cuts are asked for: TCP takes its time after
/// each loss.
const SAMPLE: &[&str] = &["copies", "graph_host", "streams_events", "threads"];

/// What the link does with bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Up,
    /// It holds them, like a network that loses packets until they are sent again.
    Silent,
    /// It refuses connections with a reset.
    Refusing,
}

/// A link between a bridge and a server that can be cut.
struct Link {
    state: Mutex<State>,
    changed: Condvar,
    /// The open connections by number, both sides of each.
    connections: Mutex<HashMap<u64, [TcpStream; 2]>>,
    /// Bytes passed on.
    passed: AtomicU64,
    log: Cuts,
}

/// When the link was cut, and when it was up again.
#[derive(Default)]
struct Cuts {
    count: AtomicU64,
    /// Times of day.
    ups: Mutex<Vec<Duration>>,
}

impl Cuts {
    fn cut(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn up(&self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let today = Duration::from_micros((now.as_micros() % DAY.as_micros()) as u64);
        self.ups.lock().unwrap_or_else(PoisonError::into_inner).push(today);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Writes down how many cuts there were and how long after its link was up each session continued,
    /// according to the bridge's log. Returns how often sessions continued.
    fn report(&self, name: &str, rig: &Rig, programs: u64) -> Result<usize> {
        let ups = self.ups.lock().unwrap_or_else(PoisonError::into_inner);
        let after = |time: Duration| {
            let up = ups.iter().copied().filter(|up| *up <= time).max()?;
            // Nothing is known about a session that continues before the link is officially up, or past
            // midnight.
            Some(time - up)
        };
        let log = rig.tcp.log_text();
        let resumed: Vec<&str> = log.lines().filter(|line| line.contains("link restored")).collect();
        let mut times: Vec<f64> = resumed
            .iter()
            .copied()
            .filter_map(time_of_day)
            .filter_map(after)
            .map(|t| t.as_secs_f64())
            .collect();
        times.sort_by(f64::total_cmp);
        let part = |share: f64| {
            times.get(((times.len() as f64 - 1.0) * share) as usize).copied().unwrap_or(f64::NAN)
        };
        let figures = format!(
            "{programs} programs run, {} cuts, {} times resumed; seconds from the link's return: median {:.3}, 95 % {:.3}, longest {:.3}\n",
            self.count(),
            resumed.len(),
            part(0.5),
            part(0.95),
            part(1.0)
        );
        print!("{name}: {figures}");
        std::fs::write(tree::logs().join(format!("survive-{name}")).join("figures"), figures)?;
        Ok(resumed.len())
    }
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The time of day of a line in a daemon's log, which begins like 2026-01-31T23:59:59.123456Z.
fn time_of_day(line: &str) -> Option<Duration> {
    let time = line.split_whitespace().next()?.split_once('T')?.1.strip_suffix('Z')?;
    let mut parts = time.splitn(3, ':');
    let (hours, minutes) = (parts.next()?.parse::<u64>().ok()?, parts.next()?.parse::<u64>().ok()?);
    let seconds: f64 = parts.next()?.parse().ok()?;
    Some(Duration::from_secs(hours * 3600 + minutes * 60) + Duration::try_from_secs_f64(seconds).ok()?)
}

impl Link {
    fn new() -> Arc<Link> {
        Arc::new(Link {
            state: Mutex::new(State::Up),
            changed: Condvar::new(),
            connections: Mutex::default(),
            passed: AtomicU64::new(0),
            log: Cuts::default(),
        })
    }

    /// Passes connections on to `port`, until the test's process ends. Returns the port to connect to.
    fn serve(self: &Arc<Link>, port: u16) -> Result<u16> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let own = listener.local_addr()?.port();
        let link = Arc::clone(self);
        std::thread::spawn(move || {
            for (number, near) in (0..).zip(listener.incoming().flatten()) {
                let link = Arc::clone(&link);
                std::thread::spawn(move || link.connect(number, near, port));
            }
        });
        Ok(own)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<u64, [TcpStream; 2]>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the link is silent. Returns false if it refuses connections.
    fn passes(&self) -> bool {
        let mut state = self.lock();
        while *state == State::Silent {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        *state == State::Up
    }

    fn connect(self: Arc<Link>, number: u64, near: TcpStream, port: u16) {
        if !self.passes() {
            reset(&near);
            return;
        }
        let open = || -> std::io::Result<[TcpStream; 4]> {
            let far = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            Ok([near.try_clone()?, far.try_clone()?, far.try_clone()?, near.try_clone()?])
        };
        // The server may be gone; then the connection closes.
        let Ok([from_near, to_far, from_far, to_near]) = open() else { return };
        let (Ok(near_side), Ok(far_side)) = (near.try_clone(), from_far.try_clone()) else { return };
        self.connections().insert(number, [near_side, far_side]);
        let back = Arc::clone(&self);
        let other = std::thread::spawn(move || back.pass_on(from_far, to_near));
        self.pass_on(from_near, to_far);
        let _ = other.join();
        self.connections().remove(&number);
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(got @ 1..) = from.read(&mut buffer) {
            if !self.passes() || to.write_all(&buffer[..got]).is_err() {
                break;
            }
            self.passed.fetch_add(got as u64, Ordering::Relaxed);
        }
        // One that is already closed needs no closing.
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    /// Resets all connections.
    fn reset(&self) {
        self.log.cut();
        for (_, sides) in self.connections().drain() {
            sides.iter().for_each(reset);
        }
    }

    /// Resets one of the connections.
    fn reset_one(&self, which: u64) {
        self.log.cut();
        let mut connections = self.connections();
        let numbers: Vec<u64> = connections.keys().copied().collect();
        let Some(number) = numbers.get((which % numbers.len().max(1) as u64) as usize) else { return };
        if let Some(sides) = connections.remove(number) {
            sides.iter().for_each(reset);
        }
    }
}

/// Closes a connection with a reset, whoever else has it open.
fn reset(stream: &TcpStream) {
    let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
    // It may already be closed.
    let _ = setsockopt(&stream, sockopt::Linger, &at_once);
    let _ = stream.shutdown(Shutdown::Both);
}

fn rig(name: &str, link: &Arc<Link>, server: &[&str]) -> Result<Rig> {
    Rig::through(&format!("survive-{name}"), server, &[], |port| Ok(on_this_host(link.serve(port)?)))
}

/// How much a link passes on before a session has resumed over new connections, at most, and a little of the
/// session's own data.
const GREETINGS: u64 = 16 << 10;

/// How long a link usually stays up for its session to resume.
const UP: Duration = Duration::from_secs(2);
/// The same on a machine that is so busy that sessions have not resumed in less, at most.
const MOST_UP: Duration = Duration::from_secs(64);

/// Cuts the link again and again, in one way or another, while `work` runs. It usually waits for the session
/// to resume before the next cut, for longer each time in vain; otherwise a machine so busy that new
/// connections take longer than the time between two cuts would never get anywhere.
fn while_cut<T>(link: &Arc<Link>, seed: u64, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut random, mut patience) = (Random(seed), UP);
            while !over.load(Ordering::Relaxed) {
                let (before, up) = (link.passed.load(Ordering::Relaxed), Instant::now());
                let resumed = || link.passed.load(Ordering::Relaxed) - before >= GREETINGS;
                if random.below(4) != 0 {
                    while !resumed() && up.elapsed() < patience && !over.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    patience = if resumed() { UP } else { (2 * patience).min(MOST_UP) };
                }
                std::thread::sleep(Duration::from_millis(20 + random.number() % 300));
                let pause = Duration::from_millis(random.number() % 300);
                match random.below(4) {
                    0 => link.reset(),
                    1 => link.reset_one(random.number() % (1 << 20)),
                    2 => {
                        link.set(State::Refusing);
                        link.reset();
                        std::thread::sleep(pause);
                    }
                    _ => {
                        link.set(State::Silent);
                        std::thread::sleep(pause);
                        if random.below(2) == 0 {
                            link.reset();
                        } else {
                            link.log.cut();
                        }
                    }
                }
                link.set(State::Up);
                link.log.up();
            }
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}

/// How often to cut each link at least.
fn most_cuts() -> Result<u64> {
    let text = std::env::var("RGPU_SURVIVE_CUTS").unwrap_or_else(|_| "0".to_owned());
    text.trim().parse().with_context(|| format!("RGPU_SURVIVE_CUTS: {text:?} is not a number"))
}

/// Runs programs over TCP, each at least once, until `cuts` counts enough cuts. `cut` runs one while its link
/// is cut; its number differs each time. It is also told how often the program's session did not begin.
fn run_all(
    rig: &Rig,
    programs: &[&str],
    cuts: &Cuts,
    mut cut: impl FnMut(u64, &Failed, &mut dyn FnMut() -> Result<programs::Outcome>) -> Result<programs::Outcome>,
) -> Result<u64> {
    let most = most_cuts()?;
    for (number, name) in (0..).zip(programs.iter().cycle()) {
        if number >= programs.len() as u64 && cuts.count() >= most {
            return Ok(number);
        }
        let failed = Failed::default();
        let outcome = cut(number, &failed, &mut || {
            let mut command = rig.program(Transport::Tcp, name)?;
            // Its session cannot begin while the link is down, which is not what this tests.
            retry(&mut command, &failed)
        });
        outcome?.verdict(name).map(drop).with_context(|| format!("run {number}, {name}"))?;
    }
    Ok(0)
}

#[test]
fn programs_pass_while_their_links_are_cut() -> Result<()> {
    let link = Link::new();
    let mut rig = rig("programs", &link, &[])?;
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let before = rig.idle_holdings()?;
    let programs = run_all(&rig, PROGRAMS, &link.log, |number, _, run| while_cut(&link, number, run))?;
    ensure!(link.log.report("programs", &rig, programs)? > 0, "no session was resumed");
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

#[test]
fn uploads_that_the_server_has_survive_cuts() -> Result<()> {
    const MUCH: u64 = 40 << 20;
    let (folder, link) = (tempfile::tempdir()?, Link::new());
    let cache = folder.path().join("cache").display().to_string();
    let (server, bridge) = (["--cache", &cache], ["--cache", "always"]);
    let mut rig =
        Rig::through("survive-cache", &server, &bridge, |port| Ok(on_this_host(link.serve(port)?)))?;
    // From the second run on, the server has most of it.
    rig.passes(Transport::Tcp, "model_upload", &[])?;
    let known = || -> Result<u64> {
        let status = rig.bridge(Transport::Tcp).status()?;
        Ok(status["totals"]["data_bytes_known"].as_u64().unwrap_or(0))
    };
    let mut resumed = 0;
    for number in 1..50 {
        let run = || retry(&mut rig.program(Transport::Tcp, "model_upload")?, &Failed::default());
        while_cut(&link, number, run)?.verdict("model_upload")?;
        resumed = link.log.report("cache", &rig, number)?;
        if resumed > 0 && number >= 3 && known()? > MUCH {
            break;
        }
    }
    ensure!(resumed > 0, "no session was resumed");
    eventually(|| {
        ensure!(known()? > MUCH, "{} bytes were not sent", known()?);
        Ok(())
    })?;
    rig.check_healthy()
}

/// How often a program's session did not begin, because its link or a process was gone meanwhile. Whoever
/// interrupts it leaves it longer in peace each time, so that it begins on the busiest machine, too.
#[derive(Default)]
struct Failed(AtomicU32);

impl Failed {
    /// This long, or twice as long for each time.
    fn longer(&self, pause: Duration) -> Duration {
        pause * (1 << self.0.load(Ordering::Relaxed).min(5))
    }
}

/// Runs a program until its session has begun.
fn retry(command: &mut std::process::Command, failed: &Failed) -> Result<programs::Outcome> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let outcome = programs::run(command, programs::LIMIT)?;
        let begun = !outcome.stderr.contains("All CUDA calls of this process will fail");
        if begun || Instant::now() > deadline {
            return Ok(outcome);
        }
        failed.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A program that copies forever, over a link that is up.
fn copying(rig: &Rig, lost_after: Option<u64>) -> Result<Running> {
    let mut command = rig.program(Transport::Tcp, "kill_me")?;
    if let Some(seconds) = lost_after {
        command.env("RGPU_LOST_AFTER", seconds.to_string());
    }
    Running::start(command.arg("copy"), "RUNNING")
}

fn session(rig: &Rig) -> Result<serde_json::Value> {
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    sessions.iter().find(|session| session["program"] == "kill_me").cloned().context("no session")
}

#[test]
fn a_long_interruption_and_its_end_are_each_reported_once() -> Result<()> {
    let link = Link::new();
    let mut rig = rig("pause", &link, &[])?;
    let mut running = copying(&rig, None)?;
    let before = session(&rig)?["resumed"].as_u64();
    link.set(State::Refusing);
    link.reset();
    running.until_told("is interrupted")?;
    eventually(|| {
        let parked = session(&rig)?["parked_seconds"].as_u64();
        ensure!(parked.is_some_and(|seconds| seconds >= 7), "parked for {parked:?} s");
        Ok(())
    })?;
    link.set(State::Up);
    goes_on(&rig, before)?;
    running.until_told("is back")?;
    let errors = running.killed()?;
    let lines: Vec<&str> = errors.lines().collect();
    ensure!(
        lines.len() == 2 && lines[0].contains("is interrupted") && lines[1].contains("is back"),
        "{errors:?}"
    );
    rig.idle_holdings()?;
    rig.check_healthy()
}

/// Requires that a program's last line says that its session is lost, and why. Returns what follows that.
fn lost(running: Running, why: &str) -> Result<String> {
    let (status, errors) = running.ended()?;
    let last = errors.lines().last().unwrap_or_default();
    let after = last.split_once(why).map(|(_, after)| after.to_owned());
    let after = after.filter(|_| status == Some(1) && last.contains("is lost"));
    after.with_context(|| format!("{why:?}: {errors:?}"))
}

/// Requires that a program's session is lost because its link was gone for this many seconds: for longer on a
/// busy machine, which looks later, but for less than servers keep sessions in these tests without such a
/// limit.
fn lost_after(running: Running, seconds: u64) -> Result<()> {
    const LATER: u64 = 50;
    let after = lost(running, "did not come back within ")?;
    let waited = after.split_once(" s").and_then(|(waited, _)| waited.parse::<u64>().ok());
    let right = waited.is_some_and(|waited| (seconds..seconds + LATER).contains(&waited));
    ensure!(right, "it waited for {after:?} instead of {seconds} s");
    Ok(())
}

#[test]
fn an_interruption_lasts_no_longer_than_the_program_waits() -> Result<()> {
    let link = Link::new();
    let mut rig = rig("limit", &link, &[])?;
    let running = copying(&rig, Some(2))?;
    link.set(State::Refusing);
    link.reset();
    lost_after(running, 2)?;
    link.set(State::Up);
    // The bridge says farewell as soon as it can, long before the server would give up.
    rig.idle_holdings()?;
    rig.check_healthy()
}

#[test]
fn a_session_is_kept_for_the_grace_period_and_no_longer() -> Result<()> {
    let link = Link::new();
    // Long enough for a busy machine to bring back a link that nobody has cut.
    let mut rig = rig("grace", &link, &["--grace-seconds", "10"])?;
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let before = rig.idle_holdings()?;
    let running = copying(&rig, None)?;
    link.set(State::Refusing);
    link.reset();
    lost_after(running, 10)?;
    rig.check_left_nothing(&before)?;
    link.set(State::Up);
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

#[test]
fn a_session_that_cannot_be_resumed_ends_when_the_link_is_back() -> Result<()> {
    let link = Link::new();
    let mut rig = rig("dead", &link, &[])?;
    let running = copying(&rig, None)?;
    let worker = session(&rig)?["worker"].as_i64().context("no worker")?;
    link.set(State::Refusing);
    link.reset();
    kill(Pid::from_raw(i32::try_from(worker)?), Signal::SIGKILL)?;
    eventually(|| {
        ensure!(session(&rig).is_err(), "the session still stands");
        Ok(())
    })?;
    link.set(State::Up);
    lost(running, "was killed by signal 9")?;
    rig.check_healthy()
}

#[test]
fn a_program_that_ends_without_a_link_leaves_nothing_behind() -> Result<()> {
    let link = Link::new();
    let mut rig = rig("ended", &link, &[])?;
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let before = rig.idle_holdings()?;
    for state in [State::Refusing, State::Silent] {
        let running = copying(&rig, None)?;
        link.set(state);
        if state == State::Refusing {
            link.reset();
        }
        running.kill()?;
        std::thread::sleep(Duration::from_millis(300));
        ensure!(session(&rig).is_ok(), "the server knows without a link");
        link.set(State::Up);
        rig.check_left_nothing(&before)?;
    }
    rig.check_healthy()
}

/// A rig whose bridge over TCP and whose server are in their own networks. `None` if this user may not make
/// any.
fn across(name: &str, server: &[&str]) -> Result<Option<(Network, Rig)>> {
    let Some(network) = Network::new()? else { return Ok(None) };
    let address = format!("tcp:{SERVER}:7070");
    network.enter_server()?;
    let rig = Rig::through(
        &format!("survive-{name}"),
        &[&["--listen", address.as_str()], server].concat(),
        &[],
        |_| network.enter_host().map(|()| address.clone()),
    )?;
    network.leave()?;
    Ok(Some((network, rig)))
}

/// Waits until the copying program's session has resumed over new connections.
fn goes_on(rig: &Rig, resumed_before: Option<u64>) -> Result<()> {
    eventually(|| {
        let session = session(rig)?;
        let resumed = session["resumed"].as_u64() > resumed_before && session["parked_seconds"].is_null();
        ensure!(resumed, "{session}");
        Ok(())
    })?;
    let commands = session(rig)?["commands"].as_u64();
    eventually(|| {
        ensure!(session(rig)?["commands"].as_u64() > commands, "the program does not go on");
        Ok(())
    })
}

#[test]
fn both_ends_notice_a_network_that_loses_everything_without_a_word() -> Result<()> {
    let Some((network, mut rig)) = across("silence", &[])? else { return Ok(()) };
    let running = copying(&rig, None)?;
    let before = session(&rig)?["resumed"].as_u64();
    network.lose(true)?;
    // TCP alone would take a quarter of an hour, because data is in flight.
    eventually(|| {
        ensure!(rig.tcp.log_text().contains("link lost"), "the bridge has not noticed");
        Ok(())
    })?;
    eventually(|| {
        ensure!(!session(&rig)?["parked_seconds"].is_null(), "the server has not noticed");
        Ok(())
    })?;
    network.lose(false)?;
    goes_on(&rig, before)?;
    running.kill()?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

/// The longest silence of a network in seconds, if one is asked for: `RGPU_SURVIVE_SILENCE`.
fn longest_silence() -> Result<Option<f64>> {
    let number =
        |text: String| text.trim().parse().with_context(|| format!("RGPU_SURVIVE_SILENCE: {text:?}"));
    std::env::var("RGPU_SURVIVE_SILENCE").ok().map(number).transpose()
}

/// Whether a session waits for its link, according to the server.
fn is_parked(rig: &Rig) -> Result<bool> {
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    Ok(sessions.iter().any(|session| !session["parked_seconds"].is_null()))
}

/// Lets the network lose packets now and then until the work is done.
fn lose_packets(
    (network, rig): (&Network, &Rig),
    cuts: &Cuts,
    (over, failed): (&AtomicBool, &Failed),
    mut random: Random,
) -> Result<()> {
    let longest = longest_silence()?;
    while !over.load(Ordering::Relaxed) {
        // On a busy machine, no session would get anywhere if none had the time to resume.
        let (up, waits) = (Instant::now(), random.below(4) != 0);
        while waits && is_parked(rig)? && up.elapsed() < MOST_UP && !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(failed.longer(Duration::from_millis(100 + random.number() % 1000)));
        network.lose(true)?;
        cuts.cut();
        // Mostly short, sometimes longer than the bridge tolerates.
        let most = if random.below(8) == 0 { 5000 } else { 600 };
        let usual = Duration::from_millis(100 + random.number() % most);
        // From 0.1 s on, every order of magnitude as often as every other.
        let share = (random.number() % 1000) as f64 / 1000.0;
        let silence = longest.map(|longest| Duration::from_secs_f64(0.1 * (10.0 * longest).powf(share)));
        std::thread::sleep(silence.unwrap_or(usual));
        network.lose(false)?;
        cuts.up();
    }
    Ok(())
}

/// With silences of every length: the ends notice the long ones, and TCP itself gets over the others.
#[test]
fn programs_pass_while_their_network_loses_packets() -> Result<()> {
    let Some((network, mut rig)) = across("network", &[])? else { return Ok(()) };
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let before = rig.idle_holdings()?;
    let cuts = Cuts::default();
    let programs = if most_cuts()? == 0 { SAMPLE } else { PROGRAMS };
    let programs = run_all(&rig, programs, &cuts, |number, failed, run| {
        let (over, lost) = (AtomicBool::new(false), Mutex::new(Ok(())));
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                *lost.lock().unwrap_or_else(PoisonError::into_inner) =
                    lose_packets((&network, &rig), &cuts, (&over, failed), Random(number));
            });
            let outcome = run();
            over.store(true, Ordering::Relaxed);
            outcome
        });
        lost.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        outcome
    })?;
    cuts.report("network", &rig, programs)?;
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

#[test]
fn a_host_whose_address_changes_keeps_its_sessions() -> Result<()> {
    let Some((network, mut rig)) = across("address", &[])? else { return Ok(()) };
    let running = copying(&rig, None)?;
    let before = session(&rig)?;
    network.move_host()?;
    goes_on(&rig, before["resumed"].as_u64())?;
    let after = session(&rig)?;
    ensure!(after["peer"] != before["peer"], "the session still comes from {}", after["peer"]);
    running.kill()?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

#[test]
fn a_silent_network_does_not_make_a_program_wait_for_longer_than_it_wants() -> Result<()> {
    let Some((network, mut rig)) = across("patience", &["--grace-seconds", "60"])? else { return Ok(()) };
    let running = copying(&rig, Some(4))?;
    network.lose(true)?;
    lost_after(running, 4)?;
    network.lose(false)?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

/// What happens to the server's daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is killed, and its service manager starts another one.
    Killed,
    /// It executes the program that is installed.
    Upgraded,
}

/// Makes the daemon end, and waits until another one serves.
fn replace_daemon(rig: &mut Rig, end: End) -> Result<()> {
    if end == End::Killed {
        return rig.crash_server();
    }
    let taken = |rig: &Rig| rig.server.log_text().matches("takes over").count();
    let before = taken(rig);
    rig.server.signal(Signal::SIGUSR2)?;
    eventually(|| {
        ensure!(taken(rig) > before, "it goes on");
        rig.server.status().map(drop)
    })
}

/// Runs a program while the server's daemon ends again and again, and counts how often.
fn while_daemons_end(rig: &mut Rig, transport: Transport, name: &str, random: &mut Random) -> Result<u64> {
    let mut command = rig.program(transport, name)?;
    let (mut ends, failed) = (0, Failed::default());
    let outcome = std::thread::scope(|scope| -> Result<_> {
        // Its session does not begin if the daemon ends while the client waits in its queue.
        let running = scope.spawn(|| retry(&mut command, &failed));
        while !running.is_finished() {
            std::thread::sleep(failed.longer(Duration::from_millis(random.number() % 400)));
            replace_daemon(rig, if random.below(2) == 0 { End::Killed } else { End::Upgraded })?;
            ends += 1;
        }
        running.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })?;
    outcome.verdict(name).map(|_| ends).with_context(|| format!("over {transport:?}, after {ends} ends"))
}

#[test]
fn programs_pass_while_their_servers_daemon_is_killed_and_upgraded() -> Result<()> {
    let mut rig = Rig::kept("survive-daemon", |port| Ok(on_this_host(port)))?;
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let (most, mut random, mut ends, mut runs) = (most_cuts()?, Random(20), 0, 0);
    while runs == 0 || ends < most {
        for name in PROGRAMS {
            for transport in [Transport::Local, Transport::Tcp] {
                ends += while_daemons_end(&mut rig, transport, name, &mut random)?;
                runs += 1;
            }
        }
    }
    let figures = format!("{runs} programs run, the server's daemon ended {ends} times under them\n");
    print!("{figures}");
    std::fs::write(tree::logs().join("survive-daemon/figures"), figures)?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

#[test]
fn a_lost_link_and_a_dead_daemon_at_once_are_survived() -> Result<()> {
    let link = Link::new();
    let mut rig = Rig::kept("survive-both", |port| Ok(on_this_host(link.serve(port)?)))?;
    let running = copying(&rig, None)?;
    let before = session(&rig)?["worker"].clone();
    for end in [End::Killed, End::Upgraded] {
        let resumed = session(&rig)?["resumed"].as_u64();
        link.set(State::Refusing);
        link.reset();
        replace_daemon(&mut rig, end)?;
        link.set(State::Up);
        goes_on(&rig, resumed)?;
        ensure!(session(&rig)?["worker"] == before, "another worker has the session");
    }
    running.kill()?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

/// Opens a session without a bridge.
fn bare(rig: &Rig) -> Result<TcpBridge> {
    TcpBridge::connect(rig.port, &hello(purpose::CONTROL, [0; 16], 1)).map_err(anyhow::Error::msg)
}

/// Appends a mark as command `seq`.
fn mark(bridge: &TcpBridge, seq: u64) -> Result<()> {
    let mut body = Vec::new();
    encode(&StreamMark { stream: StreamId(0) }, &mut body);
    Ok(bridge.record(seq, StreamMark::INFO.opcode, NO_SLOT, &body)?)
}

/// Greets as a link of the session, saying how much of the control stream has arrived. Returns the connection
/// once the server has welcomed it, or why the server refused.
fn come_back(rig: &Rig, hello: &Hello, received: u64) -> Result<Result<TcpStream, String>> {
    let stream = connect_tcp(rig.port)?;
    let welcome = greet(&stream, hello)?;
    if Answer::from_number(welcome.status) != Answer::Ok {
        return Ok(Err(untext(&welcome.reason)));
    }
    let counts = [(0, received), (1, 0)].map(|(stream, bytes)| Received { stream, reserved: 0, bytes });
    send_frame(stream.as_fd(), frame::RESUMED, &[counts.as_bytes()], &[])?;
    Ok(Ok(stream))
}

/// Reads frames until one of `kind` arrives. Returns the kinds of all of them.
fn until(stream: &TcpStream, kind: u32) -> Result<Vec<u32>> {
    let (mut body, mut kinds) = (Vec::new(), Vec::new());
    while !kinds.contains(&kind) {
        kinds.push(recv_frame(stream.as_fd(), &mut body, &mut Vec::new())?.context("closed")?);
    }
    Ok(kinds)
}

/// How much of the control stream the server has received.
fn its_count(stream: &TcpStream) -> Result<u64> {
    let mut body = Vec::new();
    let kind = recv_frame(stream.as_fd(), &mut body, &mut Vec::new())?;
    ensure!(kind == Some(frame::RESUMED), "a frame of kind {kind:?}");
    let (first, _) = Received::read_from_prefix(&body).map_err(|_| anyhow::anyhow!("a short frame"))?;
    Ok(first.bytes)
}

#[test]
fn a_session_whose_welcome_was_lost_is_not_kept() -> Result<()> {
    let mut rig = Rig::start("survive-unknown")?;
    let stream = connect_tcp(rig.port)?;
    greet(&stream, &hello(purpose::CONTROL, [0; 16], 1))?;
    eventually(|| {
        ensure!(has_session(&rig)?, "no session");
        Ok(())
    })?;
    // As if the bridge had never heard of it.
    drop(stream);
    eventually(|| {
        ensure!(!has_session(&rig)?, "the session is kept");
        Ok(())
    })?;
    rig.check_healthy()
}

fn has_session(rig: &Rig) -> Result<bool> {
    let status = rig.server.status()?;
    Ok(status["sessions"].as_array().context("no sessions")?.iter().any(|s| s["program"] == "a test"))
}

#[test]
fn resuming_takes_the_secret_and_the_later_attempt_wins() -> Result<()> {
    let mut rig = Rig::start("survive-secret")?;
    let bystanders = Bystanders::start(&rig)?;
    let bridge = bare(&rig)?;
    mark(&bridge, 1)?;
    until(&bridge.control, frame::PROGRESS)?;
    let right = bridge.hello(purpose::RESUME, 1, 0);
    let mut wrong = right;
    wrong.secret[31] ^= 1;
    for purpose in [purpose::RESUME, purpose::DATA, purpose::END] {
        for hello in [Hello { purpose, ..wrong }, Hello { purpose, secret: [0; 32], ..right }] {
            let refused = come_back(&rig, &hello, 0)?;
            ensure!(refused.is_err_and(|why| why.contains("no session has this token")), "not refused");
        }
    }
    // The session is as it was.
    mark(&bridge, 2)?;
    // Two at once: the later one wins, in whatever order they arrive, and the earlier connections close.
    let second = come_back(&rig, &Hello { attempt: 2, ..right }, 0)?.map_err(anyhow::Error::msg)?;
    let first = come_back(&rig, &right, 0)?.map_err(anyhow::Error::msg)?;
    let data = connect_tcp(rig.port)?;
    greet(&data, &Hello { purpose: purpose::DATA, attempt: 2, ..right })?;
    ensure!(its_count(&second)? >= 40, "the server forgot what it had");
    for mut loser in [first, bridge.control.try_clone()?] {
        loser.set_read_timeout(Some(PATIENCE))?;
        let mut rest = Vec::new();
        // Closed, by a reset or not.
        let closed = loser.read_to_end(&mut rest);
        ensure!(
            closed.is_ok() || closed.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
            "open"
        );
    }
    // The stream of frames starts again from its beginning, because this end has received nothing.
    (&second).write_all(protocol::link::FrameHeader { kind: frame::ALIVE, len: 0 }.as_bytes())?;
    let kinds = until(&second, frame::ALIVE)?;
    ensure!(kinds.contains(&frame::PROGRESS), "what was said before is said again: {kinds:?}");
    // The session's other way to end.
    ensure!(has_session(&rig)?, "no session");
    greet(connect_tcp(rig.port)?, &Hello { purpose: purpose::END, ..right })?;
    eventually(|| {
        ensure!(!has_session(&rig)?, "the session still stands");
        Ok(())
    })?;
    bystanders.check()?;
    rig.check_healthy()
}

#[test]
fn lies_in_acknowledgements_end_only_the_liars_session() -> Result<()> {
    let mut rig = Rig::start("survive-lies")?;
    let bystanders = Bystanders::start(&rig)?;
    let logged = |words: &str| {
        eventually(|| {
            ensure!(rig.server.log_text().contains(words), "{words:?} is not in the log");
            Ok(())
        })
    };
    // More than was sent in the stream.
    let liar = bare(&rig)?;
    mark(&liar, 1)?;
    liar.frame(frame::RECEIVED, Received { stream: 0, reserved: 0, bytes: 1 << 40 }.as_bytes())?;
    logged("1099511627776 bytes of a stream are acknowledged")?;
    // Of a data connection's stream, and of one that does not exist.
    let liar = bare(&rig)?;
    liar.frame(frame::RECEIVED, Received { stream: 1, reserved: 0, bytes: 66_666 }.as_bytes())?;
    logged("66666 bytes of a stream are acknowledged")?;
    let liar = bare(&rig)?;
    liar.frame(frame::RECEIVED, Received { stream: 9, reserved: 0, bytes: 0 }.as_bytes())?;
    logged("acknowledges stream 9, which the session does not have")?;
    // On a data connection.
    let liar = bare(&rig)?;
    let header = protocol::link::DataHeader { seq: 0, offset: 77_777, piece: 0, len: 0 };
    liar.send_data(0, header, &[])?;
    logged("77777 bytes of a stream are acknowledged")?;
    // When it comes back.
    let liar = bare(&rig)?;
    mark(&liar, 1)?;
    let hello = liar.hello(purpose::RESUME, 1, 0);
    let control = come_back(&rig, &hello, 88_888)?.map_err(anyhow::Error::msg)?;
    greet(connect_tcp(rig.port)?, &Hello { purpose: purpose::DATA, ..hello })?;
    logged("88888 bytes of a stream are acknowledged")?;
    drop(control);
    eventually(|| {
        ensure!(!has_session(&rig)?, "a liar's session still stands");
        Ok(())
    })?;
    bystanders.check()?;
    rig.check_healthy()
}
