//! A guest whose machine is stopped (QMP's `stop`, `virsh suspend`) while programs run, and then continues.

use super::*;

/// Programs that launch, copy much and little, wait for events, and make the host call their functions.
const WORKING: [&str; 9] = [
    "launch_storm 3000",
    "copies",
    "many_small_copies",
    "graph_host",
    "managed_memory",
    "streams_events",
    "pinned_answers",
    "pinned_kernels",
    "threads",
];

/// The least number of stops of a guest: `RGPU_STOPS`.
fn stops() -> u64 {
    std::env::var("RGPU_STOPS").ok().and_then(|text| text.parse().ok()).unwrap_or(40)
}

/// Daemons that keep sessions without a link for `grace` seconds.
pub fn patient_host(name: &str, transport: &'static str, grace: u32) -> Result<Host> {
    Host::start(&format!("vm/{name}-{transport}"), Options { grace, ..Options::software(transport) })
}

/// A guest with programs that work.
pub fn working(host: Host) -> Result<Bed> {
    let mut programs = programs::portable()?;
    let named =
        |name: &str| SOME.contains(&name) || WORKING.iter().any(|line| line.split(' ').next() == Some(name));
    programs.retain(|program| named(&program.name));
    let machine = guest::builder(&programs).rgpu_socket(host.socket()).boot()?;
    Ok(Bed { host, machine })
}

/// The states of the guest's sessions, according to the daemon.
fn states(host: &Host) -> Result<Vec<String>> {
    let status = host.bridge()?.status()?;
    let rows = status["sessions"].as_array().context("the status has no sessions")?;
    Ok(rows.iter().filter_map(|row| row["state"].as_str()).map(str::to_owned).collect())
}

/// Waits until every session is in one of these states. (A device process that a busy machine keeps from
/// answering is in the status as it was before.)
fn in_states(host: &Host, expected: &[&str]) -> Result<()> {
    let deadline = Instant::now() + LONG;
    loop {
        let states = states(host)?;
        if states.iter().all(|state| expected.contains(&state.as_str())) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the sessions are {states:?}, not {expected:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs all programs at the same time, does `interrupt` again and again meanwhile, and checks that all pass.
/// Returns how often it did.
pub fn work_through(
    bed: &mut Bed,
    least: u64,
    mut interrupt: impl FnMut(&mut Bed) -> Result<()>,
) -> Result<u64> {
    let mut count = 0;
    while count < least {
        let mut running = Vec::new();
        for line in WORKING {
            running.push((line, bed.machine.spawn(line)?));
        }
        while count < least && running.iter().any(|(_, process)| !process.has_ended()) {
            interrupt(bed)?;
            count += 1;
            // The programs should make some progress in between, a different amount each time.
            in_states(&bed.host, &["ready", "ended"])?;
            std::thread::sleep(Duration::from_millis(37 * (count % 7)));
        }
        for (line, process) in running {
            let name = line.split(' ').next().unwrap_or(line);
            passed(name, &process.wait(LONG)?)
                .with_context(|| format!("the daemons' logs are in {}", bed.host.logs().display()))?;
        }
    }
    Ok(count)
}

/// Stops, resets and kills guests and device processes. Checks that no session is left, and that the next
/// programs pass.
fn stopped_guests_are_reset_or_lose_their_device_process(transport: &'static str) -> Result<()> {
    let bed = working(patient_host("stopped", transport, 600)?)?;
    let before = bed.base_line()?;

    // Another device process takes over while the guest is stopped.
    for line in ["launch_storm 3000", "copies"] {
        let deadline = Instant::now() + LONG;
        while !states(&bed.host)?.is_empty() {
            ensure!(Instant::now() < deadline, "a session from before does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        let process = bed.machine.spawn(line)?;
        bed.machine.stop()?;
        let serving = bed.host.device_process()?;
        kill(Pid::from_raw(serving), Signal::SIGKILL)?;
        while bed.host.device_process().is_ok_and(|now| now == serving) {
            ensure!(Instant::now() < deadline, "no process replaces the device process");
        }
        bed.machine.cont()?;
        let name = line.split(' ').next().unwrap_or(line);
        passed(name, &process.wait(LONG)?)
            .context("its device process was killed while the guest was stopped")?;
    }
    ensure!(bed.host.bridge()?.status()?["sessions_lost"] == 0, "sessions were lost");
    bed.check_after("kill -9 of the device process of a stopped guest", &before)?;

    // A reset ends the guest's sessions, whether it runs or is stopped.
    for stopped in [false, true] {
        let in_copy = start_kill_me(&bed.machine, "copy")?;
        let in_kernel = start_kill_me(&bed.machine, "kernel")?;
        if stopped {
            bed.machine.stop()?;
            bed.machine.qmp("system_reset")?;
            bed.machine.booted_after(|| bed.machine.cont())?;
        } else {
            bed.machine.booted_after(|| bed.machine.qmp("system_reset").map(drop))?;
        }
        drop((in_copy, in_kernel));
        bed.check_after("a reset of the guest by its VMM", &before)?;
    }

    // When QEMU ends, so do the sessions of a stopped guest.
    let in_copy = start_kill_me(&bed.machine, "copy")?;
    bed.machine.stop()?;
    bed.machine.kill9()?;
    drop(in_copy);
    bed.host.settled()
}

#[test]
fn stopped_guests_are_reset_or_lose_their_device_process_over_local() -> Result<()> {
    stopped_guests_are_reset_or_lose_their_device_process("local")
}

#[test]
fn stopped_guests_are_reset_or_lose_their_device_process_over_tcp() -> Result<()> {
    stopped_guests_are_reset_or_lose_their_device_process("tcp")
}

fn programs_go_on_after_the_guest_was_stopped(transport: &'static str) -> Result<()> {
    let mut bed = working(patient_host("stop", transport, 600)?)?;
    let before = bed.base_line()?;
    let count = work_through(&mut bed, stops(), |bed| {
        bed.machine.stop()?;
        // Nothing moves while it is stopped, and every session survives.
        in_states(&bed.host, &["paused", "ended"])?;
        bed.machine.cont()
    })?;
    println!("{transport}: stopped {count} times");
    ensure!(bed.host.bridge()?.status()?["sessions_lost"] == 0, "sessions were lost");
    bed.check_after("stops", &before)
}

#[test]
fn programs_continue_after_the_guest_was_stopped_over_local() -> Result<()> {
    programs_go_on_after_the_guest_was_stopped("local")
}

#[test]
fn programs_continue_after_the_guest_was_stopped_over_tcp() -> Result<()> {
    programs_go_on_after_the_guest_was_stopped("tcp")
}
