//! Sessions whose queue pairs and control connections break, under a server that keeps sessions.

use super::*;

/// Programs with copies of all sizes and both ways, launches, and streams that wait.
pub(super) const SURVIVORS: [&str; 6] =
    ["copies", "pinned_bulk", "many_small_copies", "launch_storm", "streams_events", "held_streams"];

/// Each control connection breaks some seconds after its handshake, whatever the queue pairs carry then: they are given
/// up with everything that is under way.
pub(super) fn programs_survive_broken_control_connections(rgpu: &Rgpu) -> Result<()> {
    let machine = &rgpu.machine;
    let relay = machine.spawn("exec hostile relay 127.0.0.1:9702 --do 127.0.0.1:9700")?;
    relay.wait_for("listening", LONG)?;
    let daemon = machine.spawn(&format!(
        "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/relayed.sock --server tcp:127.0.0.1:9702 --transport verbs --rdma-device {} 2>/run/relayed.log",
        rdma::CLIENT.1
    ))?;
    machine.check("for i in $(seq 3000); do [ -S /run/relayed.sock ] && exit 0; sleep 0.1; done; cat /run/relayed.log; exit 1", LONG)?;
    let resumed = || -> Result<u64> {
        let count = machine.run("grep -c 'link restored' /run/relayed.log", LONG)?;
        count.text().trim().parse().with_context(|| format!("how often sessions were resumed: {count}"))
    };
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
