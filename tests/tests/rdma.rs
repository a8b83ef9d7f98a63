//! The transport `verbs`, over RoCE in software, in machines that the tests boot.
//!
//! Booting is slow, so each test boots one machine and runs its parts there one after another. If a part
//! fails, its name is printed and the others still run. `RGPU_RDMA_PART=word` runs only parts with that word
//! in their names. Limits are generous, because machines may be emulated on busy hosts.
//!
//! `cargo xtask test rdma` runs three tests at once, in the order of their names.
//!
//! - The layer itself, by `tests/peers/src/bin/verbs.rs`: two processes that check every byte.
//! - rgpu: `rgpu-server` with the software GPU on one end of the link, `vhost-rgpu` and programs of the host
//!   on the other.
//! - Both of these once more on a virtual function: whatever may depend on the device.
//! - Peers that break the protocol, by `tests/peers/src/bin/hostile.rs`, against both daemons.
//! - Queue pairs and control connections that break, under a server that keeps sessions. All other tests have one
//!   that does not (`--grace-seconds 0`).
//! - Copies between two servers, one at each end of the link (`rdma/copies.rs`).
//!
//! See `rgpu_tests::machine::rdma` for the machine.

#[path = "rdma/copies.rs"]
mod copies;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::machine::nested::{self, Nested};
use rgpu_tests::machine::{Builder, Machine, Process, rdma};
use rgpu_tests::tree;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit of everything in an emulated machine on a busy host. No test depends on how long something
/// takes.
const LONG: Duration = Duration::from_secs(900);

/// Where the daemons and the examples are; `cargo xtask test rdma` builds them.
fn built() -> Result<PathBuf> {
    let binaries = tree::binaries();
    for name in ["rgpu-server", "vhost-rgpu", "rgpuctl", "verbs", "hostile", "hostile_direct"] {
        ensure!(binaries.join(name).exists(), "{name} is missing: run `cargo xtask test rdma`");
    }
    Ok(binaries)
}

/// The parts of a test, which share a machine.
#[derive(Default)]
struct Parts {
    ran: usize,
    failed: Vec<String>,
}

impl Parts {
    fn run(&mut self, name: &str, part: impl FnOnce() -> Result<()>) {
        if std::env::var("RGPU_RDMA_PART").is_ok_and(|word| !name.contains(&word)) {
            return;
        }
        let begin = Instant::now();
        self.ran += 1;
        let result = part();
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        eprintln!("    {name}: {verdict}, {:.1} s", begin.elapsed().as_secs_f64());
        if let Err(e) = result {
            self.failed.push(format!("{name}: {e:#}"));
        }
    }

    /// Fails if a part failed, or if `RGPU_RDMA_PART` matched none.
    fn end(self) -> Result<()> {
        ensure!(self.ran > 0, "no part of this test ran: RGPU_RDMA_PART fits none");
        match self.failed.as_slice() {
            [] => Ok(()),
            failed => bail!("{} of {} parts failed:\n{}", failed.len(), self.ran, failed.join("\n")),
        }
    }
}

/// A machine with a listener on the server's side.
struct Bed {
    machine: Machine,
    listener: Process,
    server: &'static str,
    client: &'static str,
}

impl Bed {
    fn new(machine: Machine, server: &'static str, client: &'static str) -> Result<Bed> {
        let listener = listen(&machine, server)?;
        Ok(Bed { machine, listener, server, client })
    }

    fn builder() -> Result<Builder> {
        Ok(rdma::builder()?.program(built()?.join("verbs"), "/bin/verbs"))
    }

    fn command(&self, what: &str) -> String {
        format!("verbs connect 127.0.0.1:9800 --device {} {what}", self.client)
    }

    /// Runs a job that must succeed.
    fn job(&self, what: &str) -> Result<String> {
        self.machine.check(&self.command(what), LONG)
    }

    /// Runs a job that must fail, and returns what it said.
    fn fails(&self, what: &str) -> Result<String> {
        let output = self.machine.run(&self.command(what), LONG)?;
        ensure!(!output.success(), "{what} succeeded: {output}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// The listener's output.
    fn log(&self) -> String {
        String::from_utf8_lossy(&self.listener.stdout()).into_owned()
    }

    /// Restarts the listener.
    fn restart(&mut self) -> Result<()> {
        self.listener.kill()?;
        self.machine.check("while pidof verbs; do sleep 0.1; done", LONG)?;
        self.listener = listen(&self.machine, self.server)?;
        Ok(())
    }

    /// Starts a transfer that does not end by itself, and waits until it is under way.
    fn endless(&self, what: &str) -> Result<Process> {
        let job =
            self.machine.spawn(&self.command(&format!("--do {what} --size 1000000 --count 1000000")))?;
        job.wait_for("begun", LONG)?;
        Ok(job)
    }
}

fn listen(machine: &Machine, device: &str) -> Result<Process> {
    let listener = machine.spawn(&format!("exec verbs listen 127.0.0.1:9800 --device {device}"))?;
    listener.wait_for("listening", LONG)?;
    Ok(listener)
}

fn every_depth_and_number_of_queues(bed: &Bed) -> Result<()> {
    for (pairs, depth, sleep) in
        [(1, 1, "--sleep"), (2, 2, ""), (2, 128, "--sleep"), (4, 16, ""), (7, 256, "--sleep")]
    {
        for what in ["h2d", "d2h"] {
            for (size, count) in [(1, 40), (4097, 20), (1_500_001, 2)] {
                bed.job(&format!(
                    "--do {what} --size {size} --count {count} --queue-pairs {pairs} --queue-depth {depth} {sleep}"
                ))
                .with_context(|| format!("{pairs} queue pairs, depth {depth}"))?;
            }
        }
    }
    bed.job("--do ping --size 64 --count 300 --queue-depth 1")?;
    bed.job("--do ping --size 200000 --count 5 --sleep")?;
    Ok(())
}

fn a_wrong_choice_is_named(bed: &Bed) -> Result<()> {
    for (options, words) in [
        ("--device nope", "have: \"rxe0, rxe1\""),
        ("--port 2", "NoPort"),
        ("--mtu 8192", "name: \"mtu\", value: 8192"),
        ("--mtu 1000", "active: 4096"),
        ("--gid-index 200", "entry 200"),
        ("--queue-pairs 8", "name: \"queue_pairs\", value: 8"),
        ("--queue-depth 0", "name: \"queue_depth\", value: 0"),
    ] {
        let said = bed.fails(options)?;
        ensure!(said.contains(words), "{options}: {said}");
    }
    bed.machine.check("/bin/ip link set v1 down", LONG)?;
    let said = bed.fails("");
    bed.machine.check("/bin/ip link set v1 up", LONG)?;
    rdma::wait_up(&bed.machine)?;
    ensure!(said.as_ref().is_ok_and(|said| said.contains("PortDown")), "{said:?}");
    Ok(())
}

/// Takes the link down for a second. Returns false if it was down for much longer: that happens on a busy
/// host, and a session may then have given the link up after the configured ten seconds.
fn cut_for_a_second(machine: &Machine) -> Result<bool> {
    let said = machine.check(
        &format!(
            "cut -d. -f1 /proc/uptime; {}; sleep 1; {}; cut -d. -f1 /proc/uptime",
            rdma::CUT,
            rdma::MEND
        ),
        LONG,
    )?;
    rdma::wait_up(machine)?;
    let times: Vec<u64> =
        said.lines().map(str::parse).collect::<Result<_, _>>().context("seconds of uptime")?;
    let [before, after] = times[..] else { bail!("expected two times: {said}") };
    Ok(after - before <= 4)
}

/// How often the link may be down for too long because the host is busy.
const CUTS: usize = 10;

fn a_link_down_for_a_second_is_outlived(bed: &Bed) -> Result<()> {
    for _ in 0..CUTS {
        let job = bed.machine.spawn(&bed.command("--do h2d --size 1000000 --count 60 --sleep"))?;
        job.wait_for("begun", LONG)?;
        let short = cut_for_a_second(&bed.machine)?;
        let output = job.wait(LONG)?;
        if output.success() {
            return Ok(());
        }
        ensure!(!short, "{output}");
    }
    bail!("the link could not be cut for a short time: the host is too busy")
}

fn a_link_down_for_good_ends_both_sides(bed: &Bed) -> Result<()> {
    let job = bed.endless("h2d --sleep")?;
    bed.machine.check(rdma::CUT, LONG)?;
    // This takes the configured ten seconds.
    let output = job.wait(LONG)?;
    bed.machine.check(rdma::MEND, LONG)?;
    rdma::wait_up(&bed.machine)?;
    // The side that notices first logs the cause. The other one learns that the control connection was
    // closed.
    let said = String::from_utf8_lossy(&output.stderr);
    bed.listener.wait_for("lost: ", LONG)?;
    let cause = "does not answer any more";
    ensure!(
        !output.success() && (said.contains(cause) || bed.log().contains(cause)),
        "{output}\nlistener: {}",
        bed.log()
    );
    ensure!(said.contains(cause) || said.contains("closed the control connection"), "{output}");
    bed.job("--do d2h --size 100000 --count 3").context("after the link was mended")?;
    Ok(())
}

fn a_killed_peer_is_noticed_and_leaves_nothing_behind(bed: &mut Bed) -> Result<()> {
    let job = bed.endless("h2d --sleep")?;
    bed.restart()?;
    let output = job.wait(LONG)?;
    ensure!(!output.success() && !output.stderr.is_empty(), "{output}");
    bed.job("--do d2h --size 100000 --count 3")?;
    // When a client is killed, the listener continues.
    let job = bed.endless("d2h --sleep")?;
    job.kill()?;
    let again = bed.machine.run(&bed.command("--do h2d --size 100000 --count 3"), LONG)?;
    ensure!(again.success(), "{again}\nlistener: {}", bed.log());
    bed.restart()?;
    let left = bed.machine.check("rdma resource show qp; rdma resource show mr; true", LONG)?;
    ensure!(!left.contains("verbs"), "left behind: {left}");
    Ok(())
}

/// The queue pairs are stopped wherever they are, in both directions, with requests of all kinds under way, and
/// everything goes on through new ones. Every byte is checked.
fn queue_pairs_are_replaced_and_nothing_is_lost_or_repeated(bed: &Bed) -> Result<()> {
    let mut renewed = 0;
    for (what, size, count) in [
        ("h2d", 300_000, 40),
        ("h2d", 1, 300),
        ("d2h", 300_000, 30),
        ("d2h", 2_000_001, 4),
        ("ping", 1000, 100),
        ("ping", 100_000, 20),
    ] {
        for (breaks, depth) in [(8, 16), (30, 128)] {
            let job =
                format!("--do {what} --size {size} --count {count} --break {breaks} --queue-depth {depth}");
            let said = bed.job(&job).with_context(|| format!("{job}\nlistener: {}", bed.log()))?;
            let number = said.split_whitespace().find_map(|word| word.strip_prefix("renewed="));
            renewed += number.and_then(|n| n.parse::<u64>().ok()).context("how often")?;
        }
    }
    eprintln!("      replaced {renewed} times");
    ensure!(renewed > 20, "replaced only {renewed} times");
    Ok(())
}

fn loss_and_reordering_do_no_harm(bed: &Bed) -> Result<()> {
    bed.machine.check("/sbin/tc qdisc add dev v1 root netem loss 1% delay 1ms reorder 10% 50%", LONG)?;
    let jobs = [
        "--do h2d --size 300000 --count 10 --sleep",
        "--do d2h --size 300000 --count 10 --sleep",
        "--do ping --size 1000 --count 50 --sleep",
    ];
    let done = jobs.iter().try_for_each(|job| bed.job(job).map(drop));
    bed.machine.check("/sbin/tc qdisc del dev v1 root", LONG)?;
    done
}

fn eight_clients_at_once_get_their_own_data(bed: &Bed) -> Result<()> {
    let mut jobs = Vec::new();
    for i in 0..8 {
        let port = 9900 + i;
        let listener =
            bed.machine.spawn(&format!("exec verbs listen 127.0.0.1:{port} --device {}", bed.server))?;
        listener.wait_for("listening", LONG)?;
        let what = if i % 2 == 0 { "h2d" } else { "d2h" };
        let client = format!(
            "verbs connect 127.0.0.1:{port} --device {} --do {what} --size 200001 --count 5 --sleep",
            bed.client
        );
        jobs.push((listener, bed.machine.spawn(&client)?));
    }
    let mut done = Ok(());
    for (listener, job) in jobs {
        let output = job.wait(LONG)?;
        if !output.success() {
            done = Err(anyhow::anyhow!("{output}"));
        }
        listener.kill()?;
    }
    done
}

#[test]
fn the_verbs_layer_delivers_data_intact_and_detects_failures() -> Result<()> {
    let machine = rdma::boot(Bed::builder()?)?;
    let mut bed = Bed::new(machine, rdma::SERVER.1, rdma::CLIENT.1)?;
    let mut parts = Parts::default();
    parts.run("every depth and number of queues", || every_depth_and_number_of_queues(&bed));
    parts.run("a wrong choice is named", || a_wrong_choice_is_named(&bed));
    parts.run("loss and reordering", || loss_and_reordering_do_no_harm(&bed));
    parts.run("replaced queue pairs", || queue_pairs_are_replaced_and_nothing_is_lost_or_repeated(&bed));
    parts.run("eight clients at once", || eight_clients_at_once_get_their_own_data(&bed));
    parts.run("a link down for a second", || a_link_down_for_a_second_is_outlived(&bed));
    parts.run("a link down for good", || a_link_down_for_good_ends_both_sides(&bed));
    parts.run("a killed peer", || a_killed_peer_is_noticed_and_leaves_nothing_behind(&mut bed));
    parts.run("the kernel's log", || bed.machine.check_console());
    parts.end()
}

/// A machine in which rgpu runs over verbs. The server's driver blocks its caller as NVIDIA's does.
struct Rgpu {
    machine: Machine,
    server: Process,
    _daemon: Process,
}

const ENVIRONMENT: &str = "export LD_LIBRARY_PATH=/opt/rgpu/lib RGPU_SOCKET=/run/native.sock; cd /tmp;";

impl Rgpu {
    /// With a server that ends a session with its connections.
    fn new(server: &str, client: &str, machine: Machine) -> Result<Rgpu> {
        Rgpu::with_grace(server, client, machine, 0)
    }

    fn with_grace(server: &str, client: &str, machine: Machine, seconds: u32) -> Result<Rgpu> {
        let server = machine.spawn(&format!(
            "export NO_COLOR=1; exec /opt/rgpu/rgpu-server --insecure --grace-seconds {seconds} --listen tcp:127.0.0.1:9700 --backend software --software-memory 512M --software-imitate queue=600,waiting-calls --rdma-device {server} --status-socket /run/server.status 2>/run/server.log"
        ))?;
        let daemon = machine.spawn(&format!(
            "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --socket /run/vm.sock --native-socket /run/native.sock --server tcp:127.0.0.1:9700 --transport verbs --rdma-device {client} --status-socket /run/vhost.status 2>/run/vhost.log"
        ))?;
        machine.check("for i in $(seq 3000); do [ -S /run/server.status ] && [ -S /run/native.sock ] && exit 0; sleep 0.1; done; cat /run/*.log; exit 1", LONG)?;
        Ok(Rgpu { machine, server, _daemon: daemon })
    }

    fn builder() -> Result<Builder> {
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
            .dir(tree::guest_libraries(), "/opt/rgpu/lib"))
    }

    /// Starts a test program.
    fn spawn(&self, program: &str) -> Result<Process> {
        self.machine.spawn(&format!("{ENVIRONMENT} exec /opt/rgpu/programs/{program}"))
    }

    /// Starts a program that copies pinned and pageable memory both ways endlessly, and waits until it does.
    fn endless_copies(&self) -> Result<Process> {
        self.nothing_left()?;
        let process = self.spawn("kill_me copy")?;
        process.wait_for("RUNNING copy", LONG)?;
        self.more_data_flows()?;
        Ok(process)
    }

    /// Waits until more of `kill_me`'s data has gone over the link, both ways, than before the call.
    fn more_data_flows(&self) -> Result<()> {
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
    fn passes(&self, program: &str) -> Result<()> {
        let output = self.spawn(program)?.wait(LONG)?;
        ensure!(output.success() && output.text().contains("PASS"), "{program}: {output}\n{}", self.logs());
        Ok(())
    }

    /// A counter of `vhost-rgpu`, summed over all sessions so far.
    fn bridge_counter(&self, name: &str) -> Result<u64> {
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

    /// A counter of the session that the server ended last, from its log.
    fn server_counter(&self, name: &str) -> Result<u64> {
        let line = self.machine.check("grep 'session ended' /run/server.log | tail -n 1", LONG)?;
        let words = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        words.and_then(|v| v.parse().ok()).with_context(|| format!("no {name} in {line:?}"))
    }

    /// Bytes in the logs of the server and of `vhost-rgpu`.
    fn log_sizes(&self) -> Result<[usize; 2]> {
        let size = |log: &str| -> Result<usize> {
            self.machine.check(&format!("wc -c < {log}"), LONG)?.trim().parse().context("a log's size")
        };
        Ok([size("/run/server.log")?, size("/run/vhost.log")?])
    }

    /// What was logged since.
    fn logs_since(&self, [server, vhost]: [usize; 2]) -> Result<[String; 2]> {
        let rest = |log: &str, from: usize| self.machine.check(&format!("tail -c +{} {log}", from + 1), LONG);
        Ok([rest("/run/server.log", server)?, rest("/run/vhost.log", vhost)?])
    }

    fn logs(&self) -> String {
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
    fn nothing_left(&self) -> Result<()> {
        self.machine.check("for i in $(seq 3000); do [ -z \"$(rdma resource show mr)\" ] && exit 0; sleep 0.1; done; rdma resource show mr; exit 1", LONG).context("registered memory is left")?;
        Ok(())
    }
}

const PROGRAMS: [&str; 21] = [
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
const OTHER_PROGRAMS: [&str; 4] = ["idle", "kill_me", "pinned_bulk", "two_servers"];

/// While a session is idle, no thread of the daemons and the worker is scheduled. Afterwards it continues.
fn an_idle_session_takes_no_processor(rgpu: &Rgpu) -> Result<()> {
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
fn bulk_data_is_copied_by_no_cpu(rgpu: &Rgpu, program: &str) -> Result<()> {
    no_cpu_copies(rgpu, program, || rgpu.passes(program))
}

fn no_cpu_copies(rgpu: &Rgpu, program: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    let before =
        ["copied_bytes", "data_bytes_sent", "data_bytes_received"].map(|name| rgpu.bridge_counter(name));
    run()?;
    rgpu.nothing_left()?;
    let [copied, sent, received] =
        ["copied_bytes", "data_bytes_sent", "data_bytes_received"].map(|name| rgpu.bridge_counter(name));
    let [copied_before, sent_before, received_before] = before;
    let (copied, sent, received) =
        (copied? - copied_before?, sent? - sent_before?, received? - received_before?);
    let (came, went, by_cpu) = (
        rgpu.server_counter("bytes_in")?,
        rgpu.server_counter("bytes_out")?,
        rgpu.server_counter("bytes_copied")?,
    );
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

fn eight_programs_at_once_pass(rgpu: &Rgpu) -> Result<()> {
    let running = (0..8).map(|i| rgpu.spawn(PROGRAMS[i % 4])).collect::<Result<Vec<_>>>()?;
    for program in running {
        let output = program.wait(LONG)?;
        ensure!(output.success(), "{output}\n{}", rgpu.logs());
    }
    rgpu.nothing_left()
}

fn a_killed_program_takes_nobody_along(rgpu: &Rgpu) -> Result<()> {
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

fn a_short_cut_is_outlived_and_a_long_one_ends_the_program(rgpu: &Rgpu) -> Result<()> {
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
    rgpu.passes("vectorAdd")
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

fn programs_pass_over_a_bad_link(rgpu: &Rgpu) -> Result<()> {
    let disturb = "/sbin/tc qdisc add dev v1 root netem loss 0.5% delay 1ms reorder 10% 50%";
    rgpu.machine.check(disturb, LONG)?;
    let passed = ["vectorAdd", "pinned_bulk"].iter().try_for_each(|program| rgpu.passes(program));
    rgpu.machine.check("/sbin/tc qdisc del dev v1 root", LONG)?;
    passed
}

fn a_killed_server_ends_the_program_with_a_reason(rgpu: &Rgpu) -> Result<()> {
    let program = rgpu.endless_copies()?;
    rgpu.server.kill()?;
    let output = program.wait(LONG)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && said.contains("lost"), "{output}\n{}", rgpu.logs());
    rgpu.nothing_left()
}

/// A hostile bridge's attacks, each with a word of the expected answer from the server or from the refusing
/// device.
const HOSTILE_BRIDGES: [(&str, &str); 16] = [
    ("longer-header", "no piece of data"),
    ("no-header", "no piece of data"),
    ("across-slots", "no piece of data"),
    ("immediate", "no piece of data"),
    ("slot-in-use", "which is in use"),
    ("outside", "access error"),
    ("before", "access error"),
    ("wild-key", "access error"),
    ("foreign-key", "access error"),
    ("replayed-key", "access error"),
    ("swapped-queues", "ended"),
    ("beyond-credit", "refused"),
    ("unknown-frame", "frame of kind 99"),
    ("huge-frame", "more than 33554432"),
    ("wild-record", "record"),
    ("impossible-key", "key that cannot be"),
];

fn a_hostile_bridge_is_shown_out(rgpu: &Rgpu) -> Result<()> {
    // Its session survives all attacks and gets the right data.
    let bystander = rgpu.spawn("copies")?;
    for (what, words) in HOSTILE_BRIDGES {
        let output = rgpu
            .machine
            .run(&format!("hostile bridge 127.0.0.1:9700 --device {} --do {what}", rdma::CLIENT.1), LONG)?;
        let said = output.text();
        // The device refuses an access and stops the queue. The server may learn of either first.
        let refused = words == "access error" && said.contains("asked for what it may not");
        ensure!(output.success() && (said.contains(words) || refused), "{what}: {output}\n{}", rgpu.logs());
        ensure!(said.starts_with("ended: ") || said.starts_with("refused: "), "{what}: {said}");
        eprintln!("      {what}: {said}");
    }
    let output = bystander.wait(LONG)?;
    ensure!(output.success(), "the bystander: {output}\n{}", rgpu.logs());
    rgpu.nothing_left()?;
    rgpu.passes("vectorAdd")
}

/// The same when it comes back to its session. The server keeps sessions.
const HOSTILE_RETURNS: [(&str, &str); 5] = [
    ("resume-more", "of which"),
    ("resume-less", "its device has acknowledged"),
    ("resume-queues", "other queues than it began with"),
    ("resume-stranger", "no session has this token"),
    ("resume-twice", "not the latest"),
];

fn a_bridge_that_comes_back_and_lies_harms_itself_alone(rgpu: &Rgpu) -> Result<()> {
    let bystander = rgpu.spawn("copies")?;
    for (what, words) in HOSTILE_RETURNS {
        let output = rgpu
            .machine
            .run(&format!("hostile bridge 127.0.0.1:9700 --device {} --do {what}", rdma::CLIENT.1), LONG)?;
        let said = output.text();
        ensure!(output.success() && said.contains(words), "{what}: {output}\n{}", rgpu.logs());
        eprintln!("      {what}: {said}");
    }
    let output = bystander.wait(LONG)?;
    ensure!(output.success(), "the bystander: {output}\n{}", rgpu.logs());
    Ok(())
}

/// Programs with copies of all sizes and both ways, launches, and streams that wait.
const SURVIVORS: [&str; 6] =
    ["copies", "pinned_bulk", "many_small_copies", "launch_storm", "streams_events", "held_streams"];

/// Each control connection breaks some seconds after its handshake, whatever the queue pairs carry then: they are given
/// up with everything that is under way.
fn programs_survive_broken_control_connections(rgpu: &Rgpu) -> Result<()> {
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
fn a_program_survives_a_long_cut(rgpu: &Rgpu) -> Result<()> {
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
fn a_cut_that_lasts_too_long_ends_the_program(rgpu: &Rgpu) -> Result<()> {
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

#[test]
fn sessions_survive_broken_queue_pairs_and_control_connections() -> Result<()> {
    let machine = rdma::boot(Rgpu::builder()?)?;
    let rgpu = Rgpu::with_grace(rdma::SERVER.1, rdma::CLIENT.1, machine, 120)?;
    let mut parts = Parts::default();
    parts.run("broken control connections", || programs_survive_broken_control_connections(&rgpu));
    parts.run("a long cut", || a_program_survives_a_long_cut(&rgpu));
    parts.run("a cut that lasts too long", || a_cut_that_lasts_too_long_ends_the_program(&rgpu));
    parts.run("lies", || a_bridge_that_comes_back_and_lies_harms_itself_alone(&rgpu));
    parts.run("nothing is left", || rgpu.nothing_left());
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

/// A hostile server's attacks, each with a word of its peer's answer.
const HOSTILE_SERVERS: [(&str, &str); 9] = [
    ("immediate", "for command"),
    ("wild-write", "access error"),
    ("free-slot", "which is not in use"),
    ("free-wild-slot", "which is not in use"),
    ("unasked-data", "which expects none"),
    ("unasked-reply", "60000"),
    ("unknown-progress", "kind 99"),
    ("unknown-frame", "unknown kind 99"),
    ("huge-frame", "more than 33554432"),
];

fn a_hostile_server_loses_its_client(rgpu: &Rgpu) -> Result<()> {
    let machine = &rgpu.machine;
    let daemon = machine.spawn(&format!(
        "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/victim.sock --server tcp:127.0.0.1:9701 --transport verbs --rdma-device {} 2>/run/vhost.log",
        rdma::CLIENT.1
    ))?;
    machine.check("for i in $(seq 3000); do [ -S /run/victim.sock ] && exit 0; sleep 0.1; done; cat /run/vhost.log; exit 1", LONG)?;
    for (what, words) in HOSTILE_SERVERS {
        let hostile = machine
            .spawn(&format!("exec hostile server 127.0.0.1:9701 --device {} --do {what}", rdma::SERVER.1))?;
        hostile.wait_for("listening", LONG)?;
        let program = machine.spawn(&format!(
            "{ENVIRONMENT} RGPU_SOCKET=/run/victim.sock exec /opt/rgpu/programs/vectorAdd"
        ))?;
        let output = hostile.wait(LONG)?;
        ensure!(output.success() && output.text().contains(words), "{what}: {output}\n{}", rgpu.logs());
        let ended = program.wait(LONG)?;
        ensure!(!ended.success(), "{what}: the program succeeded: {ended}");
        eprintln!("      {what}: {}", output.text().lines().last().unwrap_or_default());
    }
    // It still works with other servers.
    daemon.kill()?;
    let output = daemon.wait(LONG)?;
    ensure!(output.status == 128 + 9, "the daemon had ended before: {output}\n{}", rgpu.logs());
    rgpu.nothing_left()
}

#[test]
fn every_program_runs_over_verbs_and_hostile_peers_harm_no_other_session() -> Result<()> {
    let rgpu = Rgpu::new(rdma::SERVER.1, rdma::CLIENT.1, rdma::boot(Rgpu::builder()?)?)?;
    let mut parts = Parts::default();
    for program in PROGRAMS {
        parts.run(program, || rgpu.passes(program));
    }
    for program in ["pinned_bulk", "copies"] {
        parts.run(&format!("no copy of {program}"), || bulk_data_is_copied_by_no_cpu(&rgpu, program));
    }
    parts.run("an idle session", || an_idle_session_takes_no_processor(&rgpu));
    parts.run("nothing is left", || rgpu.nothing_left());
    parts.run("eight programs at once", || eight_programs_at_once_pass(&rgpu));
    parts.run("a killed program", || a_killed_program_takes_nobody_along(&rgpu));
    parts.run("a hostile bridge", || a_hostile_bridge_is_shown_out(&rgpu));
    parts.run("a hostile server", || a_hostile_server_loses_its_client(&rgpu));
    parts.run("a bad link", || programs_pass_over_a_bad_link(&rgpu));
    parts.run("a cut link", || a_short_cut_is_outlived_and_a_long_one_ends_the_program(&rgpu));
    parts.run("a killed server", || a_killed_server_ends_the_program_with_a_reason(&rgpu));
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

/// The whole chain: a program in a virtual machine, on a host that reaches the server by RDMA. The hosts are
/// in an emulated machine, so the virtual machine is emulated twice.
#[test]
fn guests_reach_the_server_over_verbs_and_no_cpu_copies_their_data() -> Result<()> {
    let nested = Nested::new("export LD_LIBRARY_PATH=/opt/rgpu/lib; RGPU_STATS=1 /opt/rgpu/pinned_bulk")?
        .dir(&tree::guest_libraries(), "/opt/rgpu/lib")?
        .file(&tree::programs().join("pinned_bulk"), "/opt/rgpu/pinned_bulk")?;
    let machine = rdma::boot(nested.put_into(Rgpu::builder()?)?)?;
    let rgpu = Rgpu::new(rdma::SERVER.1, rdma::CLIENT.1, machine)?;
    let mut guest = String::new();
    let mut parts = Parts::default();
    parts.run("no copy of what a guest sends", || {
        no_cpu_copies(&rgpu, "the guest", || {
            // It takes minutes to boot even on an idle host.
            let output = rgpu.machine.run(&Nested::command("/run/vm.sock"), 3 * LONG)?;
            guest = output.text();
            ensure!(guest.contains("PASS pinned_bulk"), "{output}\n{}", rgpu.logs());
            ensure!(guest.contains(&format!("{}0", nested::STATUS)), "{output}");
            Ok(())
        })
    });
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

/// Takes the link down until its peers count as lost, and up again.
fn a_function_taken_down_ends_the_program(rgpu: &Rgpu) -> Result<()> {
    let program = rgpu.endless_copies()?;
    rgpu.machine.check("/bin/ip link set vf0 down", LONG)?;
    let output = program.wait(LONG);
    rgpu.machine.check("/bin/ip link set vf0 up", LONG)?;
    let up = "for i in $(seq 3000); do rdma link | grep -c 'state ACTIVE' | grep -qx 4 && exit 0; sleep 0.1; done; rdma link; exit 1";
    rgpu.machine.check(up, LONG)?;
    let output = output?;
    ensure!(!output.success(), "the program succeeded: {output}");
    rgpu.nothing_left()?;
    rgpu.passes("vectorAdd")
}

#[test]
fn programs_run_over_virtual_functions() -> Result<()> {
    let machine = rdma::boot(rdma::with_virtual_functions(Rgpu::builder()?))?;
    rdma::virtual_function(&machine)?;
    let bed = Bed::new(machine, "rxepeer", rdma::FUNCTION)?;
    let mut parts = Parts::default();
    for what in ["h2d --size 300001 --count 4", "d2h --size 300001 --count 4", "ping --size 64 --count 50"] {
        parts.run(what, || bed.job(&format!("--do {what} --sleep")).map(drop));
    }
    bed.listener.kill()?;
    let rgpu = Rgpu::new("rxepeer", rdma::FUNCTION, bed.machine)?;
    for program in ["vectorAdd", "copies", "streams_events"] {
        parts.run(program, || rgpu.passes(program));
    }
    parts.run("no copy", || bulk_data_is_copied_by_no_cpu(&rgpu, "pinned_bulk"));
    parts.run("a function taken down", || a_function_taken_down_ends_the_program(&rgpu));
    parts.run("a killed server", || a_killed_server_ends_the_program_with_a_reason(&rgpu));
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}
