//! Programs over verbs: `rgpu-server` with the software GPU on one end of the link, `vhost-rgpu` and programs
//! of the host on the other.

use super::*;

/// A machine in which rgpu runs over verbs. The server's driver blocks its caller as NVIDIA's does.
pub(super) struct Rgpu {
    pub(super) machine: Machine,
    pub(super) server: Process,
    _daemon: Process,
}

pub(super) const ENVIRONMENT: &str =
    "export LD_LIBRARY_PATH=/opt/rgpu/lib RGPU_SOCKET=/run/native.sock; cd /tmp;";

impl Rgpu {
    /// With a server that ends a session with its connections.
    pub(super) fn new(server: &str, client: &str, machine: Machine) -> Result<Rgpu> {
        Rgpu::with_grace(server, client, machine, 0)
    }

    pub(super) fn with_grace(server: &str, client: &str, machine: Machine, seconds: u32) -> Result<Rgpu> {
        let server = machine.spawn(&format!(
            "export NO_COLOR=1; exec /opt/rgpu/rgpu-server --insecure --grace-seconds {seconds} --listen tcp:127.0.0.1:9700 --backend software --software-memory 512M --software-imitate queue=600,waiting-calls --rdma-device {server} --status-socket /run/server.status 2>/run/server.log"
        ))?;
        let daemon = machine.spawn(&format!(
            "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --socket /run/vm.sock --native-socket /run/native.sock --server tcp:127.0.0.1:9700 --transport verbs --rdma-device {client} --status-socket /run/vhost.status 2>/run/vhost.log"
        ))?;
        machine.check("for i in $(seq 3000); do [ -S /run/server.status ] && [ -S /run/native.sock ] && exit 0; sleep 0.1; done; cat /run/*.log; exit 1", LONG)?;
        Ok(Rgpu { machine, server, _daemon: daemon })
    }

    pub(super) fn builder() -> Result<Builder> {
        let binaries = built()?;
        let mut builder = Bed::builder()?.memory_mib(3072);
        for name in ["rgpu-server", "vhost-rgpu", "rgpuctl"] {
            builder = builder.program(binaries.join(name), format!("/opt/rgpu/{name}"));
        }
        for needed in [tree::guest_libraries(), tree::programs()] {
            ensure!(
                needed.is_dir(),
                "{} is missing: run `cargo xtask build` and `cargo xtask programs`",
                needed.display()
            );
        }
        // Not all programs: the machine unpacks them when it boots.
        for name in PROGRAMS.iter().chain(&SURVIVORS).chain(&OTHER_PROGRAMS) {
            builder = builder.file(tree::programs().join(name), format!("/opt/rgpu/programs/{name}"));
        }
        Ok(builder
            .program(binaries.join("hostile"), "/bin/hostile")
            .program(binaries.join("supervisor"), "/bin/supervisor")
            .dir(tree::guest_libraries(), "/opt/rgpu/lib"))
    }

    /// Starts a test program.
    pub(super) fn spawn(&self, program: &str) -> Result<Process> {
        self.machine.spawn(&format!("{ENVIRONMENT} exec /opt/rgpu/programs/{program}"))
    }

    /// Starts a program that copies pinned and pageable memory both ways endlessly, and waits until it does.
    pub(super) fn endless_copies(&self) -> Result<Process> {
        self.nothing_left()?;
        let process = self.spawn("kill_me copy")?;
        process.wait_for("RUNNING copy", LONG)?;
        self.more_data_flows()?;
        Ok(process)
    }

    /// Waits until more of `kill_me`'s data has gone over the link, both ways, than before the call.
    pub(super) fn more_data_flows(&self) -> Result<()> {
        let flow = || -> Result<[u64; 2]> {
            Ok([self.bridge_counter("data_bytes_sent")?, self.bridge_counter("data_bytes_received")?])
        };
        let before = flow()?;
        let deadline = Instant::now() + LONG;
        loop {
            let now = flow()?;
            if now.iter().zip(before).all(|(now, before)| *now > before) {
                return Ok(());
            }
            let running = self.machine.run("pidof kill_me", LONG)?.success();
            ensure!(running, "the program has ended: {before:?} bytes, then {now:?}");
            ensure!(Instant::now() < deadline, "no data flows: {before:?} bytes, then {now:?}");
        }
    }

    /// Runs a test program, which must pass.
    pub(super) fn passes(&self, program: &str) -> Result<()> {
        let output = self.spawn(program)?.wait(LONG)?;
        ensure!(output.success() && output.text().contains("PASS"), "{program}: {output}\n{}", self.logs());
        Ok(())
    }

    /// [`passes`](Self::passes) behind a link that has been mended: on a busy machine, the kernel may still
    /// find that nobody has the other port's address.
    pub(super) fn passes_behind_mended_link(&self, program: &str) -> Result<()> {
        let until = Instant::now() + LONG;
        loop {
            match self.passes(program) {
                Err(e) if Instant::now() < until && format!("{e:#}").contains("ibv_modify_qp to RTR") => {}
                result => return result,
            }
        }
    }

    /// Waits until neither daemon lists a session: all have logged and counted what there is.
    fn at_rest(&self) -> Result<()> {
        let deadline = Instant::now() + LONG;
        for socket in ["/run/server.status", "/run/vhost.status"] {
            while !status(&self.machine, socket)?["sessions"].as_array().is_some_and(Vec::is_empty) {
                ensure!(Instant::now() < deadline, "sessions are left\n{}", self.logs());
            }
        }
        Ok(())
    }

    /// A counter of `vhost-rgpu`, summed over all sessions so far.
    pub(super) fn bridge_counter(&self, name: &str) -> Result<u64> {
        let said = self.machine.check("/opt/rgpu/rgpuctl status --json --socket /run/vhost.status", LONG)?;
        let status: serde_json::Value = serde_json::from_str(&said).context("the daemon's status")?;
        let totals = &status["/run/vhost.status"]["totals"];
        // Before the first session there are none.
        if totals.as_object().is_some_and(serde_json::Map::is_empty) {
            return Ok(0);
        }
        let value = &totals[name];
        value.as_u64().with_context(|| format!("no counter {name} in {said}"))
    }

    /// How many sessions the server has said are ended.
    fn sessions_ended(&self) -> Result<usize> {
        let count = self.machine.run("grep -c 'session ended' /run/server.log", LONG)?.text();
        count.trim().parse().with_context(|| format!("sessions that ended: {count:?}"))
    }

    /// A counter of the session that the server ended last, from its log.
    fn server_counter(&self, name: &str) -> Result<u64> {
        let line = self.machine.check("grep 'session ended' /run/server.log | tail -n 1", LONG)?;
        let words = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        words.and_then(|v| v.parse().ok()).with_context(|| format!("no {name} in {line:?}"))
    }

    /// Bytes in the logs of the server and of `vhost-rgpu`.
    pub(super) fn log_sizes(&self) -> Result<[usize; 2]> {
        let size = |log: &str| -> Result<usize> {
            self.machine.check(&format!("wc -c < {log}"), LONG)?.trim().parse().context("a log's size")
        };
        Ok([size("/run/server.log")?, size("/run/vhost.log")?])
    }

    /// What was logged since.
    pub(super) fn logs_since(&self, [server, vhost]: [usize; 2]) -> Result<[String; 2]> {
        let rest = |log: &str, from: usize| self.machine.check(&format!("tail -c +{} {log}", from + 1), LONG);
        Ok([rest("/run/server.log", server)?, rest("/run/vhost.log", vhost)?])
    }

    pub(super) fn logs(&self) -> String {
        self.machine
            .run(
                "tail -n 20 /run/server.log /run/vhost.log; cd /sys/class/infiniband; \
                 grep . */ports/1/hw_counters/{duplicate_request,completer_retry_err,rcvd_seq_err}",
                LONG,
            )
            .map(|o| o.text())
            .unwrap_or_default()
    }

    /// Waits until no memory is registered: all sessions and their keys are gone.
    pub(super) fn nothing_left(&self) -> Result<()> {
        self.machine.check("for i in $(seq 3000); do [ -z \"$(rdma resource show mr)\" ] && exit 0; sleep 0.1; done; rdma resource show mr; exit 1", LONG).context("registered memory is left")?;
        Ok(())
    }
}

pub(super) const PROGRAMS: [&str; 21] = [
    "vectorAdd",
    "copies",
    "streams_events",
    "matrixMul",
    "reduction",
    "atomics",
    "errors",
    "globals",
    "multi",
    "threads",
    "two_processes",
    "alloc_churn",
    "launch_storm",
    "templates",
    "driver_ptx",
    "device_list",
    "held_streams",
    "held_by_value",
    "fair_streams",
    "many_small_copies",
    "batched_asks",
];

/// Programs of single parts.
const OTHER_PROGRAMS: [&str; 5] = ["idle", "kill_me", "pinned_bulk", "rounds", "two_servers"];

/// While a session is idle, no thread of the daemons and the worker is scheduled. Afterwards it continues.
pub(super) fn an_idle_session_takes_no_processor(rgpu: &Rgpu) -> Result<()> {
    rgpu.nothing_left()?;
    let idle = rgpu.machine.spawn(&format!(
        "{ENVIRONMENT} rm -f go; mkfifo go; exec /opt/rgpu/programs/idle wait < go > idle.out"
    ))?;
    let opened =
        rgpu.machine.spawn("cd /tmp; while [ ! -p go ]; do sleep 0.1; done; exec sleep 1000 > go")?;
    rgpu.machine.check(
        "cd /tmp; for i in $(seq 3000); do grep -q IDLE idle.out && exit 0; sleep 0.1; done; exit 1",
        LONG,
    )?;
    let switches = || -> Result<Vec<String>> {
        let said = rgpu.machine.check(
            "for p in $(pidof rgpu-server) $(pidof vhost-rgpu); do for t in /proc/$p/task/*; do echo $t $(cat $t/comm) $(grep ctxt $t/status); done; done",
            LONG,
        )?;
        Ok(said.lines().map(str::to_owned).collect())
    };
    let mut moved = Vec::new();
    // Wait until the rest of the start-up work is done.
    for _ in 0..30 {
        let before = switches()?;
        std::thread::sleep(Duration::from_secs(6));
        let after = switches()?;
        moved = after.iter().filter(|line| !before.contains(line)).cloned().collect();
        if moved.is_empty() && before.len() > 4 {
            break;
        }
    }
    ensure!(moved.is_empty(), "in six seconds of quiet:\n{}", moved.join("\n"));
    opened.kill()?;
    let output = idle.wait(LONG)?;
    ensure!(output.success(), "after its rest: {output}\n{}", rgpu.logs());
    Ok(())
}

/// Page-locked memory travels between the program's pages and the buffers that the device reads; neither
/// host's CPU copies it.
pub(super) fn bulk_data_is_copied_by_no_cpu(rgpu: &Rgpu, program: &str) -> Result<()> {
    // What the program before has logged and counted is not to be taken for this one's.
    rgpu.at_rest()?;
    no_cpu_copies(rgpu, program, || rgpu.passes(program))
}

pub(super) fn no_cpu_copies(rgpu: &Rgpu, program: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    const COUNTERS: [&str; 3] = ["copied_bytes", "data_bytes_sent", "data_bytes_received"];
    let (ended, deadline) = (rgpu.sessions_ended()?, Instant::now() + LONG);
    let mut before = [0; 3];
    for (before, name) in before.iter_mut().zip(COUNTERS) {
        *before = rgpu.bridge_counter(name)?;
    }
    run()?;
    rgpu.nothing_left()?;
    // Memory is released before the last line is in the log.
    while rgpu.sessions_ended()? == ended {
        ensure!(Instant::now() < deadline, "no session has ended\n{}", rgpu.logs());
    }
    let (came, went, by_cpu) = (
        rgpu.server_counter("bytes_in")?,
        rgpu.server_counter("bytes_out")?,
        rgpu.server_counter("bytes_copied")?,
    );
    let counted = || -> Result<[u64; 3]> {
        let mut counted = [0; 3];
        for ((counted, name), before) in counted.iter_mut().zip(COUNTERS).zip(before) {
            *counted = rgpu.bridge_counter(name)? - before;
        }
        Ok(counted)
    };
    // A device process that a busy machine keeps from answering is in the status as it was before.
    let deadline = Instant::now() + Duration::from_secs(60);
    let [copied, sent, received] = loop {
        let now = counted()?;
        if now[1..] == [came, went] || Instant::now() > deadline {
            break now;
        }
    };
    eprintln!(
        "      {program}: {came} bytes to the device and {went} from it; copied: {by_cpu} there, {copied} here (commands and answers)"
    );
    ensure!(came > 8 << 20 && went > 8 << 20, "{came} and {went} bytes are not much");
    ensure!(sent == came && received == went, "the bridge sent {sent} and received {received}");
    ensure!(by_cpu == 0, "the server's CPU copied {by_cpu} bytes");
    // Only commands and answers are copied.
    ensure!(copied < (came + went) / 20, "the bridge's CPU copied {copied} bytes");
    Ok(())
}

pub(super) fn eight_programs_at_once_pass(rgpu: &Rgpu) -> Result<()> {
    let running = (0..8).map(|i| rgpu.spawn(PROGRAMS[i % 4])).collect::<Result<Vec<_>>>()?;
    for program in running {
        let output = program.wait(LONG)?;
        ensure!(output.success(), "{output}\n{}", rgpu.logs());
    }
    rgpu.nothing_left()
}

pub(super) fn a_killed_program_takes_nobody_along(rgpu: &Rgpu) -> Result<()> {
    let victim = rgpu.endless_copies()?;
    let other = rgpu.spawn("streams_events")?;
    victim.kill()?;
    let output = other.wait(LONG)?;
    ensure!(output.success(), "{output}\n{}", rgpu.logs());
    rgpu.passes("vectorAdd")?;
    rgpu.nothing_left()
}

/// A program that continues to copy after the link was down for a second.
fn after_a_short_cut(rgpu: &Rgpu) -> Result<Process> {
    for _ in 0..CUTS {
        let program = rgpu.endless_copies()?;
        let short = cut_for_a_second(&rgpu.machine)?;
        match rgpu.more_data_flows() {
            Ok(()) => return Ok(program),
            Err(error) if short => {
                return Err(error).with_context(|| format!("after a second without a link\n{}", rgpu.logs()));
            }
            Err(_) => program.kill()?,
        }
    }
    bail!("the link could not be cut for a short time: the host is too busy")
}

pub(super) fn a_short_cut_is_outlived_and_a_long_one_ends_the_program(rgpu: &Rgpu) -> Result<()> {
    let program = after_a_short_cut(rgpu)?;
    let before = rgpu.log_sizes()?;
    rgpu.machine.check(rdma::CUT, LONG)?;
    // This takes the configured ten seconds. Both sides release everything before the link is back.
    let output = program.wait(LONG);
    let left = rgpu.nothing_left();
    let told = output.and_then(|output| {
        ensure!(!output.success(), "the program ignored the cut: {output}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let deadline = Instant::now() + LONG;
        // Memory is released before the last line is in the log.
        loop {
            let told = both_sides_say_what_happened(&said, &rgpu.logs_since(before)?);
            if told.is_ok() || Instant::now() > deadline {
                return told;
            }
        }
    });
    rgpu.machine.check(rdma::MEND, LONG)?;
    rdma::wait_up(&rgpu.machine)?;
    left.context("while the link was down")?;
    told?;
    // When the link is back, programs are served again.
    rgpu.nothing_left()?;
    rgpu.passes_behind_mended_link("vectorAdd")
}

/// The program's last message and both daemons' logs say which peer was lost, over which device, and why.
fn both_sides_say_what_happened(program: &str, [server, vhost]: &[String; 2]) -> Result<()> {
    const CAUSES: [&str; 2] = ["does not answer any more", "nothing came over RDMA device rxe"];
    let told = |who: &str, text: &str, words: &[&str]| {
        let line = text.lines().find(|line| CAUSES.iter().any(|cause| line.contains(cause)));
        let line = line.with_context(|| format!("{who} names no cause:\n{text}"))?;
        eprintln!("      {who}: {line}");
        words.iter().try_for_each(|word| {
            ensure!(line.contains(word), "{who} does not say {word:?}: {line}");
            Ok(())
        })
    };
    let server_at = "the server at tcp:127.0.0.1:9700";
    told("the program", program, &["lost", "127.0.0.1:9700", "port 1"])?;
    told("vhost-rgpu", vhost, &["session lost", "program=kill_me", server_at, "port 1"])?;
    told(
        "rgpu-server",
        server,
        &["session lost", "program=kill_me", "the client at 127.0.0.1:", "rxe0 port 1"],
    )?;
    for (who, log, device) in [("vhost-rgpu", vhost, rdma::CLIENT.1), ("rgpu-server", server, rdma::SERVER.1)]
    {
        let down = |line: &str| {
            line.contains("RDMA port went down") && line.contains(&format!("device=\"{device}\""))
        };
        ensure!(log.lines().any(down), "{who} does not say that the port of {device} went down:\n{log}");
    }
    Ok(())
}

pub(super) fn programs_pass_over_a_bad_link(rgpu: &Rgpu) -> Result<()> {
    let disturb = "/sbin/tc qdisc add dev v1 root netem loss 0.5% delay 1ms reorder 10% 50%";
    rgpu.machine.check(disturb, LONG)?;
    let passed = ["vectorAdd", "pinned_bulk"].iter().try_for_each(|program| rgpu.passes(program));
    rgpu.machine.check("/sbin/tc qdisc del dev v1 root", LONG)?;
    passed
}

pub(super) fn a_killed_server_ends_the_program_with_a_reason(rgpu: &Rgpu) -> Result<()> {
    let program = rgpu.endless_copies()?;
    rgpu.server.kill()?;
    let output = program.wait(LONG)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && said.contains("lost"), "{output}\n{}", rgpu.logs());
    rgpu.nothing_left()
}

/// Takes the link down until its peers count as lost, and up again.
pub(super) fn a_function_taken_down_ends_the_program(rgpu: &Rgpu) -> Result<()> {
    let program = rgpu.endless_copies()?;
    rgpu.machine.check("/bin/ip link set vf0 down", LONG)?;
    let output = program.wait(LONG);
    rgpu.machine.check("/bin/ip link set vf0 up", LONG)?;
    let up = "for i in $(seq 3000); do rdma link | grep -c 'state ACTIVE' | grep -qx 4 && exit 0; sleep 0.1; done; rdma link; exit 1";
    rgpu.machine.check(up, LONG)?;
    let output = output?;
    ensure!(!output.success(), "the program succeeded: {output}");
    rgpu.nothing_left()?;
    rgpu.passes_behind_mended_link("vectorAdd")
}
