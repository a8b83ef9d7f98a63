//! Sessions whose queue pairs and control connections break, under a server that keeps sessions.

use super::*;

/// Programs with copies of all sizes and both ways, launches, and streams that wait.
pub(super) const SURVIVORS: [&str; 6] =
    ["copies", "pinned_bulk", "many_small_copies", "launch_storm", "streams_events", "held_streams"];

/// Starts another `vhost-rgpu`, for programs at a socket of its own, and waits until it serves.
fn bridge(machine: &Machine, name: &str, port: u16) -> Result<Process> {
    let daemon = machine.spawn(&format!(
        "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/{name}.sock --server tcp:127.0.0.1:{port} --transport verbs --rdma-device {} --status-socket /run/{name}.status 2>/run/{name}.log",
        rdma::CLIENT.1
    ))?;
    machine.check(&format!("for i in $(seq 3000); do [ -S /run/{name}.sock ] && [ -S /run/{name}.status ] && exit 0; sleep 0.1; done; cat /run/{name}.log; exit 1"), LONG)?;
    Ok(daemon)
}

/// How often its sessions were resumed.
fn resumed(machine: &Machine, name: &str) -> Result<usize> {
    let count = machine.run(&format!("grep -c 'link restored' /run/{name}.log"), LONG)?;
    count.text().trim().parse().with_context(|| format!("how often sessions were resumed: {count}"))
}

/// Each control connection breaks some seconds after its handshake, whatever the queue pairs carry then: they are given
/// up with everything that is under way.
pub(super) fn programs_survive_broken_control_connections(rgpu: &Rgpu) -> Result<()> {
    let machine = &rgpu.machine;
    let relay = machine.spawn("exec hostile relay 127.0.0.1:9702 --do 127.0.0.1:9700")?;
    relay.wait_for("listening", LONG)?;
    let daemon = bridge(machine, "relayed", 9702)?;
    let resumed = || resumed(machine, "relayed");
    let mut ran = 0;
    while ran < SURVIVORS.len() || resumed()? < 12 {
        let program = SURVIVORS[ran % SURVIVORS.len()];
        let output = machine
            .spawn(&format!("{ENVIRONMENT} RGPU_SOCKET=/run/relayed.sock exec /opt/rgpu/programs/{program}"))?
            .wait(LONG)?;
        let log = || machine.run("tail -n 30 /run/relayed.log", LONG).map(|o| o.text()).unwrap_or_default();
        ensure!(
            output.success() && output.text().contains("PASS"),
            "{program}: {output}\n{}\n{}",
            log(),
            rgpu.logs()
        );
        ran += 1;
        eprintln!("      {program} passed; sessions were resumed {} times so far", resumed()?);
        ensure!(ran < 60, "too few sessions were resumed:\n{}\n{}", log(), rgpu.logs());
    }
    daemon.kill()?;
    relay.kill()?;
    rgpu.nothing_left()
}

/// The device process that carries the session of a program is killed again and again, whatever is under way. The next
/// one registers the program's memory anew and goes on.
pub(super) fn programs_survive_killed_device_processes(rgpu: &Rgpu) -> Result<()> {
    /// A keeper gives up after eight in a row, so each program has one of its own.
    const OF_A_PROGRAM: usize = 6;
    let machine = &rgpu.machine;
    let mut continued = 0;
    for program in SURVIVORS {
        let daemon = bridge(machine, "killed", 9700)?;
        let restored = || resumed(machine, "killed");
        let running = machine.spawn(&format!(
            "{ENVIRONMENT} RGPU_SOCKET=/run/killed.sock exec /opt/rgpu/programs/{program}"
        ))?;
        let output = std::thread::scope(|scope| -> Result<_> {
            let waiting = scope.spawn(move || running.wait(LONG));
            let mut kills = 0;
            while !waiting.is_finished() && kills < OF_A_PROGRAM {
                let Some(process) = serving_process(machine, "/run/killed.status")? else { continue };
                let before = restored()?;
                // One that has ended meanwhile is no matter.
                if machine.run(&format!("kill -9 {process}"), LONG)?.success() {
                    kills += 1;
                    while !waiting.is_finished() && restored()? == before {}
                }
            }
            waiting.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })?;
        ensure!(
            output.success() && output.text().contains("PASS"),
            "{program}: {output}\n{}\n{}",
            machine.run("tail -n 40 /run/killed.log", LONG)?.text(),
            rgpu.logs()
        );
        continued += restored()?;
        eprintln!("      {program} passed; sessions were resumed {continued} times so far");
        daemon.kill()?;
        rgpu.nothing_left()?;
        machine.check("rm -f /run/killed.*", LONG)?;
    }
    ensure!(continued >= SURVIVORS.len(), "sessions were resumed {continued} times only\n{}", rgpu.logs());
    Ok(())
}

/// The device process that carries a session of a program, if there is one.
fn serving_process(machine: &Machine, socket: &str) -> Result<Option<i64>> {
    let said = machine.check(&format!("/opt/rgpu/rgpuctl status --json --socket {socket}"), LONG)?;
    let status: serde_json::Value = serde_json::from_str(&said).context("the daemon's status")?;
    let has_sessions = status[socket]["sessions"].as_array().is_some_and(|sessions| !sessions.is_empty());
    let row = status[socket]["device_processes"].as_array().and_then(|rows| rows.first());
    Ok(row.filter(|_| has_sessions).and_then(|row| row["process"].as_i64()))
}

/// The packets of the queue pairs get lost, so that these are given up, and those that take their place, too, until
/// the link is back.
pub(super) fn a_program_survives_a_long_cut(rgpu: &Rgpu) -> Result<()> {
    let before = rgpu.bridge_counter("resumed")?;
    let program = rgpu.endless_copies()?;
    let log = rgpu.log_sizes()?;
    let checked = rgpu.spawn("copies")?;
    // A session does not begin while the port is down.
    let opened = "for i in $(seq 3000); do grep -q 'session opened.*program=copies' /run/vhost.log && exit 0; sleep 0.1; done; exit 1";
    rgpu.machine.check(opened, LONG)?;
    rgpu.machine.check(rdma::CUT, LONG)?;
    let deadline = Instant::now() + LONG;
    // Both give up what they had, and at least one attempt comes to nothing.
    let given_up = loop {
        let [server, vhost] = rgpu.logs_since(log)?;
        if vhost.contains("link lost") && server.contains("opens new connections") {
            std::thread::sleep(Duration::from_secs(20));
            break Ok(());
        }
        if Instant::now() > deadline {
            break Err(anyhow::anyhow!("no link was given up: {server}\n{vhost}"));
        }
    };
    rgpu.machine.check(rdma::MEND, LONG)?;
    rdma::wait_up(&rgpu.machine)?;
    given_up?;
    rgpu.more_data_flows()?;
    let output = checked.wait(LONG)?;
    ensure!(output.success() && output.text().contains("PASS"), "{output}\n{}", rgpu.logs());
    ensure!(rgpu.bridge_counter("resumed")? > before, "nothing was resumed\n{}", rgpu.logs());
    program.kill()?;
    rgpu.nothing_left()
}

/// A link that does not come back ends the program when it has waited as long as it is to.
pub(super) fn a_cut_that_lasts_too_long_ends_the_program(rgpu: &Rgpu) -> Result<()> {
    let program = rgpu
        .machine
        .spawn(&format!("{ENVIRONMENT} RGPU_LOST_AFTER=15 exec /opt/rgpu/programs/kill_me copy"))?;
    program.wait_for("RUNNING copy", LONG)?;
    rgpu.machine.check(rdma::CUT, LONG)?;
    let output = program.wait(LONG);
    rgpu.machine.check(rdma::MEND, LONG)?;
    rdma::wait_up(&rgpu.machine)?;
    let output = output?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && said.contains("did not come back within"), "{output}\n{}", rgpu.logs());
    rgpu.nothing_left()?;
    rgpu.passes("vectorAdd")
}
