//! Many guests on one host: 64 virtual machines that one `vhost-rgpu` serves, each with eight programs at a
//! time.
//!
//! It runs on request. Emulated guests take ten minutes on two processors, and 12 GiB of memory.
//! `RGPU_GUESTS` sets another number. The figures that it prints are in docs/benchmarks/tenants.md.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest;
use rgpu_tests::machine::Machine;
use rgpu_tests::programs;
use rgpu_tests::tree;

/// Programs of each guest at a time.
const PROGRAMS: usize = 8;
/// Guests that boot at a time.
const AT_ONCE: usize = 4;
/// How long one step may take on a busy machine.
const LONG: Duration = Duration::from_secs(1800);

/// Does `act` for each number below `count`, `at_once` of them at a time, and stops at the first error.
fn each(count: usize, at_once: usize, act: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        while failed.lock().is_ok_and(|failed| failed.is_none()) {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                return;
            }
            if let (Err(e), Ok(mut failed)) = (act(n).with_context(|| format!("guest {n}")), failed.lock()) {
                failed.get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
    failed.into_inner().ok().flatten().map_or(Ok(()), Err)
}

fn rows(daemon: &Daemon, name: &str) -> Result<usize> {
    Ok(daemon.status()?[name].as_array().with_context(|| format!("the status has no {name}"))?.len())
}

fn wait_until(what: &str, condition: impl Fn() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !condition()? {
        ensure!(begin.elapsed() < LONG, "not within {} s: {what}", LONG.as_secs());
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Threads and descriptors of a process and of its children, and their private memory in MiB.
fn holdings(daemon: &Daemon) -> Result<[usize; 4]> {
    let pid = daemon.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let mut sum = [0; 4];
    for pid in children.split_whitespace().chain([pid.to_string().as_str()]) {
        let count =
            |what: &str| Ok::<_, std::io::Error>(std::fs::read_dir(format!("/proc/{pid}/{what}"))?.count());
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let private =
            status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
        let kib: usize = private.unwrap_or("0").trim().parse()?;
        let more = [1, count("task")?, count("fd")?, kib];
        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    sum[3] >>= 10;
    Ok(sum)
}

#[test]
fn every_program_of_many_guests_is_served() -> Result<()> {
    let guests: usize = std::env::var("RGPU_GUESTS").map_or(Ok(64), |text| text.parse())?;
    let (folder, logs) = (tempfile::tempdir()?, tree::logs().join("many-guests"));
    let path = |name: String| folder.path().join(name).display().to_string();
    let address = format!("unix:{}", path("server.sock".into()));
    let most = (guests * PROGRAMS).to_string();
    let arguments = ["--listen", &address, "--backend", "software", "--software-memory", "256M"];
    let arguments =
        [&arguments[..], &["--workers", "2", "--max-sessions", &most, "--client-sessions", "0"]].concat();
    let status = folder.path().join("server.status");
    let server = Daemon::start("rgpu-server", arguments, &logs.join("rgpu-server.log"), &status)?;
    let mut config = String::new();
    for n in 0..guests {
        let socket = path(format!("vm{n}.sock"));
        write!(config, "[[vm]]\nname = \"guest{n}\"\nsocket = \"{socket}\"\nserver = \"{address}\"\n\n")?;
    }
    std::fs::write(path("vhost-rgpu.toml".into()), config)?;
    let config = path("vhost-rgpu.toml".into());
    let status = folder.path().join("vhost-rgpu.status");
    let bridge = Daemon::start("vhost-rgpu", ["--config", &config], &logs.join("vhost-rgpu.log"), &status)?;
    let keeper = holdings(&bridge)?;

    let mut chosen = programs::portable()?;
    chosen.retain(|program| program.name == "vectorAdd");
    let machines: Vec<Mutex<Option<Machine>>> = (0..guests).map(|_| Mutex::new(None)).collect();
    let begin = Instant::now();
    each(guests, AT_ONCE, |n| {
        let builder = guest::builder(&chosen).memory_mib(256).boot_timeout(LONG);
        let machine = builder.rgpu_socket(folder.path().join(format!("vm{n}.sock"))).boot()?;
        if let Ok(mut place) = machines[n].lock() {
            *place = Some(machine);
        }
        Ok(())
    })?;
    println!("{guests} guests up after {} s", begin.elapsed().as_secs());
    let idle = holdings(&bridge)?;

    let (begin, over, peak) = (Instant::now(), AtomicBool::new(false), AtomicUsize::new(0));
    // Staging areas that fit into a small guest eight times.
    let one = "RGPU_ARENA_MIB=4 vectorAdd > /tmp/said.$i 2>&1 || echo exit status $? >> /tmp/said.$i";
    let all = format!("for i in $(seq {PROGRAMS}); do ({one}) & done; wait; cat /tmp/said.*");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                peak.fetch_max(rows(&server, "sessions").unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let done = each(guests, guests, |n| {
            let machine = machines[n].lock().ok().and_then(|mut place| place.take()).context("no machine")?;
            let said = machine.check(&all, LONG);
            if let Ok(mut place) = machines[n].lock() {
                *place = Some(machine);
            }
            let said = said?;
            let passed = said.lines().filter(|line| line.starts_with("PASS vectorAdd")).count();
            ensure!(passed == PROGRAMS, "{passed} of {PROGRAMS} programs passed: {said}");
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        done
    })?;
    let seconds = begin.elapsed().as_secs();
    println!(
        "{} programs served in {seconds} s, up to {} sessions at a time",
        guests * PROGRAMS,
        peak.load(Ordering::Relaxed)
    );
    wait_until("no session is left", || Ok(rows(&server, "sessions")? + rows(&bridge, "sessions")? == 0))?;
    // Threads of a session end after it has left the status.
    let left = || Ok(holdings(&bridge)?[..3].iter().zip(&idle).all(|(now, before)| now <= before));
    wait_until("nothing is left of the programs", left)?;
    let after = holdings(&bridge)?;
    println!(
        "vhost-rgpu's processes, threads, descriptors, MiB: {keeper:?} without guests, {idle:?} with them, {after:?} after their programs"
    );
    machines.iter().try_for_each(|machine| {
        let machine = machine.lock().ok().and_then(|mut place| place.take()).context("no machine")?;
        machine.check_console()
    })?;
    wait_until("nothing is left of the guests", || Ok(holdings(&bridge)?[0] <= keeper[0] + guests))
}
