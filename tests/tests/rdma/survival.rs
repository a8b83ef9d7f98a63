//! Sessions whose queue pairs and control connections break, or whose processes are killed and whose guest is
//! stopped, under a server that keeps sessions.

use protocol::fuzzing::Random;

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

/// Each control connection breaks some seconds after its handshake, whatever the queue pairs carry then: they
/// are given up with everything that is under way.
pub(super) fn programs_survive_broken_control_connections(rgpu: &Rgpu) -> Result<()> {
    let machine = &rgpu.machine;
    let run = |name: &str, program: &str| {
        machine
            .spawn(&format!("{ENVIRONMENT} RGPU_SOCKET=/run/{name}.sock exec /opt/rgpu/programs/{program}"))?
            .wait(LONG)
    };
    // However fast or busy this machine is, connections are reset while a program runs.
    let undisturbed = bridge(machine, "undisturbed", 9700)?;
    let begun = Instant::now();
    let output = run("undisturbed", SURVIVORS[0])?;
    ensure!(output.success(), "{output}");
    let life = begun.elapsed() / 4;
    undisturbed.kill()?;
    let relay = format!("exec hostile relay 127.0.0.1:9702 --do 127.0.0.1:9700 --life {}", life.as_millis());
    let relay = machine.spawn(&relay)?;
    relay.wait_for("listening", LONG)?;
    let daemon = bridge(machine, "relayed", 9702)?;
    let resumed = || resumed(machine, "relayed");
    let mut ran = 0;
    while ran < SURVIVORS.len() || resumed()? < 12 {
        let program = SURVIVORS[ran % SURVIVORS.len()];
        let output = run("relayed", program)?;
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

/// The device process that carries the session of a program is killed again and again, whatever is under way.
/// The next one registers the program's memory anew and goes on.
pub(super) fn programs_survive_killed_device_processes(rgpu: &Rgpu) -> Result<()> {
    /// A keeper gives up after eight in a row, so each program has one of its own.
    const OF_A_PROGRAM: usize = 3;
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

/// The packets of the queue pairs get lost, so that these are given up, and those that take their place, too,
/// until the link is back.
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
    rgpu.passes_behind_mended_link("vectorAdd")
}

/// The program `rounds`, which checks every byte of each round.
struct Rounds {
    process: Process,
}

impl Rounds {
    /// Starts it as a program of the `vhost-rgpu` called `name`, and waits for its first rounds.
    fn start(rgpu: &Rgpu, name: &str) -> Result<Rounds> {
        let command =
            format!("{ENVIRONMENT} RGPU_SOCKET=/run/{name}.sock exec /opt/rgpu/programs/rounds until");
        let rounds = Rounds { process: rgpu.machine.spawn(&command)? };
        rounds.goes_on(rgpu, 0)?;
        Ok(rounds)
    }

    fn count(&self) -> u64 {
        rounds_of(&self.process)
    }

    /// Waits until it has made two more rounds than `before`: the second one began after that.
    fn goes_on(&self, rgpu: &Rgpu, before: u64) -> Result<()> {
        more_rounds(&self.process, before).with_context(|| rgpu.logs())
    }

    /// Has it end, which must be with the right bytes. Returns how many rounds it has made.
    fn end(self, rgpu: &Rgpu) -> Result<u64> {
        rgpu.machine.check("kill -TERM $(pidof rounds)", LONG)?;
        let output = self.process.wait(LONG)?;
        let passed = output.success() && output.text().contains("PASS rounds");
        ensure!(passed, "{output}\n{}", rgpu.logs());
        Ok(output.text().matches("ROUND ").count() as u64)
    }
}

/// The rounds that a process has told of.
fn rounds_of(process: &Process) -> u64 {
    process.stdout().split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"ROUND ")).count() as u64
}

/// Waits until there are two more rounds than `before`.
fn more_rounds(process: &Process, before: u64) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while rounds_of(process) < before + 2 {
        let said = || {
            String::from_utf8_lossy(&process.stdout()).lines().rev().take(5).collect::<Vec<_>>().join("\n")
        };
        ensure!(
            !process.has_ended(),
            "the program has ended after {} rounds: {}",
            rounds_of(process),
            said()
        );
        ensure!(
            Instant::now() < deadline,
            "the program stands after {} rounds: {}",
            rounds_of(process),
            said()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The status of a daemon, once it answers.
pub(super) fn status(machine: &Machine, socket: &str) -> Result<serde_json::Value> {
    let deadline = Instant::now() + LONG;
    loop {
        let said = machine.run(&format!("/opt/rgpu/rgpuctl status --json --socket {socket}"), LONG)?;
        let status: Option<serde_json::Value> = serde_json::from_str(&said.text()).ok();
        if let Some(status) = status.filter(|status| !status[socket]["sessions"].is_null()) {
            return Ok(status[socket].clone());
        }
        ensure!(Instant::now() < deadline, "no status from {socket}: {said}");
    }
}

/// The keeper is killed, and its service manager starts another one; or it executes the program that is
/// installed. Its device processes go with it.
pub(super) fn a_program_survives_killed_and_upgraded_keepers(rgpu: &Rgpu) -> Result<()> {
    const SOCKET: &str = "/run/kept.status";
    let machine = &rgpu.machine;
    let service = machine.spawn(&format!(
        "export NO_COLOR=1; exec supervisor /run/kept.notify /opt/rgpu/vhost-rgpu --insecure --native-socket /run/kept.sock --server tcp:127.0.0.1:9700 --transport verbs --rdma-device {} --status-socket {SOCKET} --admin-socket /run/kept.admin 2>/run/kept.log",
        rdma::CLIENT.1
    ))?;
    service.wait_for("serves", LONG)?;
    let program = Rounds::start(rgpu, "kept")?;
    for number in 1..=4 {
        let before = (status(machine, SOCKET)?, resumed(machine, "kept")?);
        let process = before.0["process"].clone();
        if number % 2 == 0 {
            machine.check("/opt/rgpu/rgpuctl upgrade --socket /run/kept.admin", LONG)?;
        } else {
            // It answers no request: the program asks for nothing between its first round and its last.
            machine.check(&format!("kill -9 {process}"), LONG)?;
        }
        let deadline = Instant::now() + LONG;
        let now = loop {
            let now = status(machine, SOCKET)?;
            if now["keepers_before"] == number && resumed(machine, "kept")? > before.1 {
                break now;
            }
            let log = || machine.run("tail -n 40 /run/kept.log", LONG).map(|o| o.text()).unwrap_or_default();
            ensure!(Instant::now() < deadline, "keeper {number}: {now}\n{}\n{}", log(), rgpu.logs());
        };
        ensure!((now["process"] == process) == (number % 2 == 0), "{process} is followed by {now}");
        program.goes_on(rgpu, program.count())?;
    }
    let rounds = program.end(rgpu)?;
    let after = status(machine, SOCKET)?;
    ensure!(after["sessions_lost"] == 0, "{after}");
    eprintln!(
        "      {rounds} rounds under 5 keepers; the session was resumed {} times",
        resumed(machine, "kept")?
    );
    rgpu.nothing_left()?;
    // Its device processes go with it. (The pattern does not find the shell that looks for it.)
    let found = "grep -l 'kept[.]sock' /proc/[0-9]*/cmdline 2>/dev/null";
    let serving = machine.check(&format!("{found} | wc -l"), LONG)?;
    ensure!(serving != "0", "no process of the keeper is found");
    service.kill()?;
    let gone =
        format!("for i in $(seq 3000); do {found} > /dev/null || exit 0; sleep 0.1; done; {found}; exit 1");
    machine.check(&gone, LONG).context("processes are left")?;
    Ok(())
}

/// QEMU stops the guest, for longer than anybody may be silent, and continues it. Meanwhile no queue pair
/// reaches its memory; once its device process is killed, too.
pub(super) fn a_stopped_guest_goes_on(rgpu: &Rgpu, guest: &Process) -> Result<()> {
    /// Longer than the 10 seconds after which a link counts as lost.
    const SECONDS: u64 = 13;
    let machine = &rgpu.machine;
    let tell = |pipe: &str, words: &str| machine.check(&format!("echo {words} > {pipe}"), LONG);
    let states = || -> Result<String> {
        let status = status(machine, "/run/vhost.status")?;
        Ok(status["sessions"]
            .as_array()
            .context("no sessions")?
            .iter()
            .map(|row| row["state"].to_string())
            .collect())
    };
    tell(nested::CONSOLE, "go")?;
    for kills in [false, true] {
        more_rounds(guest, rounds_of(guest))?;
        let before = rgpu.bridge_counter("resumed")?;
        tell(nested::MONITOR, "stop")?;
        let deadline = Instant::now() + LONG;
        let parked = loop {
            let status = status(machine, "/run/server.status")?;
            let parked = status["sessions"][0]["parked_seconds"].as_u64().unwrap_or(0);
            if parked >= SECONDS {
                break parked;
            }
            ensure!(Instant::now() < deadline, "it is not stopped: {status}\n{}", rgpu.logs());
        };
        let made = rounds_of(guest);
        // A device process that a busy machine keeps from answering is in the status as it was before.
        while states()? != "\"paused\"" {
            ensure!(Instant::now() < deadline, "{}\n{}", states()?, rgpu.logs());
        }
        // The one that opens and closes memory windows is connected to itself.
        let others =
            r"rdma resource show qp link rxe1 | grep 'type RC' | grep -cv 'lqpn \([0-9]*\) rqpn \1 ' || true";
        let pairs = machine.check(others, LONG)?;
        ensure!(pairs == "0", "{pairs} queue pairs reach a stopped guest");
        if kills {
            let row = status(machine, "/run/vhost.status")?["device_processes"][0]["process"].clone();
            machine.check(&format!("kill -9 {row}"), LONG)?;
            loop {
                let now = status(machine, "/run/vhost.status")?["device_processes"][0]["process"].clone();
                if !now.is_null() && now != row {
                    break;
                }
                ensure!(Instant::now() < deadline, "nobody replaces {row}\n{}", rgpu.logs());
            }
        }
        ensure!(rounds_of(guest) == made, "a stopped guest makes rounds");
        tell(nested::MONITOR, "cont")?;
        more_rounds(guest, made).with_context(|| rgpu.logs())?;
        let deadline = Instant::now() + LONG;
        while !kills && rgpu.bridge_counter("resumed")? <= before {
            ensure!(Instant::now() < deadline, "nothing was resumed\n{}", rgpu.logs());
        }
        eprintln!("      went on after {parked} s; {made} rounds before");
    }
    tell(nested::CONSOLE, "end")?;
    guest.wait_for("PASS rounds", LONG)?;
    let lost = status(machine, "/run/vhost.status")?["sessions_lost"].clone();
    ensure!(lost == 0, "{lost} sessions were lost\n{}", rgpu.logs());
    Ok(())
}

/// What happens to a session again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interruption {
    /// Its device process is killed.
    Kill,
    /// Its control connection is reset.
    Reset,
    /// The link of the queue pairs has no carrier, for up to 15 s.
    Cut,
    /// All packets are dropped for 0.1 to 60 s, and neither end gets an error.
    Silence,
}

pub(super) const INTERRUPTIONS: [Interruption; 4] =
    [Interruption::Kill, Interruption::Reset, Interruption::Cut, Interruption::Silence];

impl Interruption {
    pub(super) fn name(self) -> &'static str {
        match self {
            Interruption::Kill => "kills",
            Interruption::Reset => "resets",
            Interruption::Cut => "cuts",
            Interruption::Silence => "silences",
        }
    }
}

/// How many interruptions of each kind there are to be at least: `RGPU_SURVIVE_CUTS`. Without it there are
/// only those of the other parts.
pub(super) fn interruptions() -> Result<Option<u64>> {
    let number = |text: String| text.trim().parse().with_context(|| format!("RGPU_SURVIVE_CUTS: {text:?}"));
    std::env::var("RGPU_SURVIVE_CUTS").ok().map(number).transpose()
}

/// Interrupts programs so often. Each has to make rounds after each interruption, and to end with the right
/// bytes.
pub(super) fn a_program_survives_many(rgpu: &Rgpu, kind: Interruption, least: u64) -> Result<()> {
    let machine = &rgpu.machine;
    let of_a_program = if kind == Interruption::Kill { 6 } else { 40 };
    let (mut random, begun) = (Random(40), Instant::now());
    let (mut count, mut programs, mut rounds, mut continued, mut waits) = (0, 0, 0, 0, Vec::new());
    while count < least {
        let relay = (kind == Interruption::Reset)
            .then(|| machine.spawn("exec hostile relay 127.0.0.1:9703 --do 127.0.0.1:9700 --life 300"))
            .transpose()?;
        relay.iter().try_for_each(|relay| relay.wait_for("listening", LONG))?;
        let daemon = bridge(machine, "many", if relay.is_some() { 9703 } else { 9700 })?;
        let program = Rounds::start(rgpu, "many")?;
        programs += 1;
        for _ in 0..of_a_program.min(least - count) {
            std::thread::sleep(Duration::from_millis(random.number() % 300));
            interrupt(rgpu, kind, &mut random)?;
            let back = Instant::now();
            program.goes_on(rgpu, program.count()).with_context(|| {
                let log = machine.run("tail -n 40 /run/many.log", LONG).map(|output| output.text());
                format!("after {count} interruptions: {}", log.unwrap_or_default())
            })?;
            waits.push(back.elapsed().as_secs_f64());
            count += 1;
        }
        continued += resumed(machine, "many")?;
        rounds += program.end(rgpu)?;
        let lost = status(machine, "/run/many.status")?["sessions_lost"].clone();
        ensure!(lost == 0, "{lost} sessions were lost\n{}", rgpu.logs());
        daemon.kill()?;
        relay.iter().try_for_each(Process::kill)?;
        rgpu.nothing_left()?;
        machine.check("rm -f /run/many.*", LONG)?;
        eprintln!("      {count} of {least} {}; {continued} times resumed", kind.name());
    }
    waits.sort_by(f64::total_cmp);
    let wait = |share: f64| waits.get((waits.len() as f64 * share) as usize).or(waits.last()).copied();
    let figures = format!(
        "{count} {}: {programs} programs with {rounds} rounds, {continued} times resumed, {:.0} s; two more rounds after the end of an interruption: median {:.2} s, 95 % {:.2} s, longest {:.2} s\n",
        kind.name(),
        begun.elapsed().as_secs_f64(),
        wait(0.5).unwrap_or_default(),
        wait(0.95).unwrap_or_default(),
        wait(1.0).unwrap_or_default(),
    );
    eprint!("      {figures}");
    let folder = tree::logs().join("survive-verbs");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(kind.name()), figures)?;
    Ok(())
}

/// Interrupts the session of the program of `many`, and returns when the interruption is over.
fn interrupt(rgpu: &Rgpu, kind: Interruption, random: &mut Random) -> Result<()> {
    let machine = &rgpu.machine;
    match kind {
        Interruption::Kill => {
            let process =
                serving_process(machine, "/run/many.status")?.context("nobody serves the program")?;
            machine.check(&format!("kill -9 {process}"), LONG)?;
        }
        Interruption::Reset => {
            // The relay does it by itself.
            let (before, deadline) = (resumed(machine, "many")?, Instant::now() + LONG);
            while resumed(machine, "many")? == before {
                ensure!(Instant::now() < deadline, "no connection was reset\n{}", rgpu.logs());
            }
        }
        Interruption::Cut => {
            let pause = 0.1 + (random.number() % 15_000) as f64 / 1000.0;
            machine.check(&format!("{}; sleep {pause:.1}; {}", rdma::CUT, rdma::MEND), LONG)?;
            rdma::wait_up(machine)?;
        }
        Interruption::Silence => {
            // Every order of magnitude as often as every other.
            let pause = 0.1 * 600f64.powf((random.number() % 1000) as f64 / 1000.0);
            let each = |what: &str, how: &str| {
                ["lo", "v0", "v1"].map(|end| format!("/sbin/tc qdisc {what} dev {end} root {how}")).join("; ")
            };
            let (lose, mend) = (each("add", "netem loss 100%"), each("del", ""));
            machine.check(&format!("{lose}; sleep {pause:.1}; {mend}"), LONG)?;
        }
    }
    Ok(())
}
