//! The transport `verbs`, over RoCE in software, in machines that the tests boot.
//!
//! The first half drives the layer itself, by `host-bridge/examples/verbs.rs`: two processes that check every byte. The second half runs rgpu: `rgpu-server` with the software GPU
//! on one end of the link, `vhost-rgpu` and programs of the host on the other. See `rgpu_tests::machine::rdma` for the machine.

use anyhow::{Context, Result, ensure};
use rgpu_tests::machine::{Machine, Process, rdma};
use rgpu_tests::tree;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(180);

/// The two processes' program, built.
fn pair() -> Result<PathBuf> {
    static BUILT: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let build = || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let status = Command::new(cargo)
            .args(["build", "--release", "-p", "rgpu-host-bridge", "--example", "verbs"])
            .current_dir(tree::root())
            .status()
            .map_err(|e| format!("cannot start cargo: {e}"))?;
        if status.success() { Ok(()) } else { Err("the example `verbs` does not build".to_owned()) }
    };
    BUILT.get_or_init(build).clone().map_err(anyhow::Error::msg)?;
    Ok(tree::binaries().join("examples/verbs"))
}

/// A machine with a listener on the server's side.
struct Bed {
    machine: Machine,
    listener: Process,
    server: &'static str,
    client: &'static str,
}

impl Bed {
    fn new() -> Result<Bed> {
        let machine = rdma::boot(rdma::builder()?.program(pair()?, "/bin/verbs"))?;
        let listener = listen(&machine, rdma::SERVER.1, "")?;
        Ok(Bed { machine, listener, server: rdma::SERVER.1, client: rdma::CLIENT.1 })
    }

    fn command(&self, what: &str) -> String {
        format!("verbs connect 127.0.0.1:9800 --device {} {what}", self.client)
    }

    /// Runs a job that must succeed.
    fn job(&self, what: &str) -> Result<String> {
        self.machine.check(&self.command(what), LONG)
    }

    /// Runs a job that must fail within `within`, and gives what it said.
    fn fails(&self, what: &str, within: Duration) -> Result<String> {
        let output = self.machine.run(&self.command(what), within)?;
        ensure!(!output.success(), "{what} succeeded: {output}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// What the listener has said.
    fn log(&self) -> String {
        String::from_utf8_lossy(&self.listener.stdout()).into_owned()
    }

    fn restart(&mut self) -> Result<()> {
        self.listener.kill()?;
        self.machine.check("while pidof verbs; do sleep 0.1; done", SHORT)?;
        self.listener = listen(&self.machine, self.server, "")?;
        Ok(())
    }
}

fn listen(machine: &Machine, device: &str, options: &str) -> Result<Process> {
    let listener = machine.spawn(&format!("exec verbs listen 127.0.0.1:9800 --device {device} {options}"))?;
    listener.wait_for("listening", SHORT)?;
    Ok(listener)
}

#[test]
fn data_crosses_whole_both_ways_at_every_depth_and_number_of_queues() -> Result<()> {
    let bed = Bed::new()?;
    for (pairs, depth) in [(1, 1), (2, 2), (2, 128), (4, 16), (7, 256)] {
        for (what, size, count) in [
            ("h2d", 1, 40),
            ("h2d", 4097, 20),
            ("h2d", 1_500_001, 2),
            ("d2h", 1, 40),
            ("d2h", 4097, 20),
            ("d2h", 1_500_001, 2),
        ] {
            for sleep in ["", "--sleep"] {
                bed.job(&format!("--do {what} --size {size} --count {count} --queue-pairs {pairs} --queue-depth {depth} {sleep}"))
                    .with_context(|| format!("{pairs} queue pairs, depth {depth}"))?;
            }
        }
    }
    bed.job("--do ping --size 64 --count 300 --queue-depth 1")?;
    bed.job("--do ping --size 200000 --count 5 --sleep")?;
    bed.machine.check_console()
}

#[test]
fn a_wrong_choice_is_named() -> Result<()> {
    let bed = Bed::new()?;
    for (options, words) in [
        ("--device nope", "have: \"rxe0, rxe1\""),
        ("--port 2", "NoPort"),
        ("--mtu 8192", "active: 4096"),
        ("--gid-index 200", "entry 200"),
        ("--queue-pairs 8", "rdma_queue_pairs"),
        ("--queue-depth 0", "rdma_queue_depth"),
    ] {
        let said = bed.fails(options, SHORT)?;
        ensure!(said.contains(words), "{options}: {said}");
    }
    bed.machine.check("/bin/ip link set v1 down", SHORT)?;
    let said = bed.fails("", SHORT)?;
    ensure!(said.contains("PortDown"), "{said}");
    Ok(())
}

#[test]
fn a_link_down_for_a_second_is_outlived() -> Result<()> {
    let bed = Bed::new()?;
    let job = bed.machine.spawn(&bed.command("--do h2d --size 1000000 --count 60 --sleep"))?;
    std::thread::sleep(Duration::from_secs(1));
    bed.machine.check(&format!("{}; sleep 1; {}", rdma::CUT, rdma::MEND), SHORT)?;
    let output = job.wait(LONG)?;
    ensure!(output.success(), "{output}");
    Ok(())
}

#[test]
fn a_link_down_for_good_ends_both_sides_in_time() -> Result<()> {
    let bed = Bed::new()?;
    let job = bed.machine.spawn(&bed.command("--do h2d --size 1000000 --count 100000 --sleep"))?;
    std::thread::sleep(Duration::from_secs(2));
    bed.machine.check(rdma::CUT, SHORT)?;
    let cut = Instant::now();
    let output = job.wait(Duration::from_secs(60))?;
    // Ten seconds are configured; the rest is for a busy host.
    ensure!(cut.elapsed() < Duration::from_secs(30), "noticed after {:?}", cut.elapsed());
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("does not answer any more"), "{output}");
    Ok(())
}

#[test]
fn a_peer_that_is_killed_is_noticed_and_leaves_nothing_behind() -> Result<()> {
    let mut bed = Bed::new()?;
    let job = bed.machine.spawn(&bed.command("--do h2d --size 1000000 --count 100000 --sleep"))?;
    std::thread::sleep(Duration::from_secs(2));
    bed.restart()?;
    let output = job.wait(Duration::from_secs(60))?;
    ensure!(!output.success() && !output.stderr.is_empty(), "{output}");
    bed.job("--do d2h --size 100000 --count 3")?;
    // A client that is killed: the listener goes on.
    let job = bed.machine.spawn(&bed.command("--do d2h --size 1000000 --count 100000"))?;
    std::thread::sleep(Duration::from_secs(2));
    job.kill()?;
    let again = bed.machine.run(&bed.command("--do h2d --size 100000 --count 3"), Duration::from_secs(90))?;
    ensure!(again.success(), "{again}\nlistener: {}", bed.log());
    bed.listener.kill()?;
    bed.machine.check("while pidof verbs; do sleep 0.1; done", SHORT)?;
    let left = bed.machine.check("rdma resource show qp; rdma resource show mr; true", SHORT)?;
    ensure!(!left.contains("verbs"), "left behind: {left}");
    Ok(())
}

#[test]
fn loss_and_reordering_do_no_harm() -> Result<()> {
    let bed = Bed::new()?;
    bed.machine.check("/sbin/tc qdisc add dev v1 root netem loss 1% delay 1ms reorder 10% 50%", SHORT)?;
    bed.job("--do h2d --size 300000 --count 10 --sleep")?;
    bed.job("--do d2h --size 300000 --count 10 --sleep")?;
    bed.job("--do ping --size 1000 --count 50 --sleep")?;
    Ok(())
}

#[test]
fn eight_clients_at_once_get_their_own_data() -> Result<()> {
    let machine = rdma::boot(rdma::builder()?.program(pair()?, "/bin/verbs"))?;
    let mut jobs = Vec::new();
    for i in 0..8 {
        let port = 9900 + i;
        let listener =
            machine.spawn(&format!("exec verbs listen 127.0.0.1:{port} --device {}", rdma::SERVER.1))?;
        listener.wait_for("listening", SHORT)?;
        let what = if i % 2 == 0 { "h2d" } else { "d2h" };
        let client = format!(
            "verbs connect 127.0.0.1:{port} --device {} --do {what} --size 200001 --count 5 --sleep",
            rdma::CLIENT.1
        );
        jobs.push((listener, machine.spawn(&client)?));
    }
    for (_listener, job) in jobs {
        let output = job.wait(LONG)?;
        ensure!(output.success(), "{output}");
    }
    Ok(())
}

#[test]
fn a_virtual_function_carries_it_all() -> Result<()> {
    let machine = rdma::boot(rdma::with_virtual_functions(rdma::builder()?.program(pair()?, "/bin/verbs")))?;
    rdma::virtual_function(&machine)?;
    let listener = listen(&machine, "rxepeer", "")?;
    let bed = Bed { machine, listener, server: "rxepeer", client: rdma::FUNCTION };
    for what in ["h2d", "d2h"] {
        bed.job(&format!("--do {what} --size 300001 --count 4 --sleep"))?;
    }
    bed.job("--do ping --size 64 --count 50 --sleep")?;
    Ok(())
}

/// A machine in which rgpu runs: server and daemon started, over verbs.
struct Rgpu {
    machine: Machine,
    server: Process,
    _daemon: Process,
}

const ENVIRONMENT: &str = "export LD_LIBRARY_PATH=/opt/rgpu/lib RGPU_SOCKET=/run/native.sock; cd /tmp;";

impl Rgpu {
    fn new(server: &str, client: &str, machine: Machine) -> Result<Rgpu> {
        let server = machine.spawn(&format!(
            "exec /opt/rgpu/rgpu-server --listen tcp:127.0.0.1:9700 --backend software --software-memory 512M --rdma-device {server} --status-socket /run/server.status 2>/run/server.log"
        ))?;
        let daemon = machine.spawn(&format!(
            "exec /opt/rgpu/vhost-rgpu --native-socket /run/native.sock --server tcp:127.0.0.1:9700 --transport verbs --rdma-device {client} 2>/run/vhost.log"
        ))?;
        machine.check("for i in $(seq 200); do [ -S /run/server.status ] && [ -S /run/native.sock ] && exit 0; sleep 0.1; done; cat /run/*.log; exit 1", SHORT)?;
        Ok(Rgpu { machine, server, _daemon: daemon })
    }

    fn builder() -> Result<rgpu_tests::machine::Builder> {
        let binaries = tree::binaries();
        let mut builder = rdma::builder()?.memory_mib(3072);
        for name in ["rgpu-server", "vhost-rgpu"] {
            builder = builder.program(binaries.join(name), format!("/opt/rgpu/{name}"));
        }
        Ok(builder.dir(tree::guest_libraries(), "/opt/rgpu/lib").dir(tree::programs(), "/opt/rgpu/programs"))
    }

    fn boot() -> Result<Rgpu> {
        Rgpu::new(rdma::SERVER.1, rdma::CLIENT.1, rdma::boot(Rgpu::builder()?)?)
    }

    /// Starts a test program.
    fn spawn(&self, program: &str) -> Result<Process> {
        self.machine.spawn(&format!("{ENVIRONMENT} exec /opt/rgpu/programs/{program}"))
    }

    /// Runs a test program, which must pass.
    fn passes(&self, program: &str) -> Result<()> {
        let output = self.spawn(program)?.wait(LONG)?;
        ensure!(output.success() && output.text().contains("PASS"), "{program}: {output}\n{}", self.logs());
        Ok(())
    }

    fn logs(&self) -> String {
        self.machine
            .run("tail -n 20 /run/server.log /run/vhost.log", SHORT)
            .map(|o| o.text())
            .unwrap_or_default()
    }

    /// Waits until no worker holds registered memory: every session is gone, and its keys with it.
    fn nothing_left(&self) -> Result<()> {
        self.machine.check("for i in $(seq 300); do [ -z \"$(rdma resource show mr)\" ] && exit 0; sleep 0.1; done; rdma resource show mr; exit 1", Duration::from_secs(90))?;
        Ok(())
    }
}

const PROGRAMS: [&str; 16] = [
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
];

#[test]
fn every_program_passes_over_verbs() -> Result<()> {
    let rgpu = Rgpu::boot()?;
    for program in PROGRAMS {
        rgpu.passes(program)?;
    }
    rgpu.nothing_left()?;
    rgpu.machine.check_console()
}

#[test]
fn eight_programs_at_once_pass_over_verbs() -> Result<()> {
    let rgpu = Rgpu::boot()?;
    let running = (0..8).map(|i| rgpu.spawn(PROGRAMS[i % 4])).collect::<Result<Vec<_>>>()?;
    for program in running {
        let output = program.wait(LONG)?;
        ensure!(output.success(), "{output}\n{}", rgpu.logs());
    }
    rgpu.nothing_left()
}

#[test]
fn a_killed_program_takes_nobody_along() -> Result<()> {
    let rgpu = Rgpu::boot()?;
    let victim = rgpu.spawn("copies")?;
    std::thread::sleep(Duration::from_secs(3));
    let other = rgpu.spawn("streams_events")?;
    victim.kill()?;
    let output = other.wait(LONG)?;
    ensure!(output.success(), "{output}\n{}", rgpu.logs());
    rgpu.passes("vectorAdd")?;
    rgpu.nothing_left()
}

#[test]
fn a_killed_server_ends_the_program_with_a_reason() -> Result<()> {
    let rgpu = Rgpu::boot()?;
    let program = rgpu.spawn("copies")?;
    std::thread::sleep(Duration::from_secs(3));
    rgpu.server.kill()?;
    let output = program.wait(Duration::from_secs(60))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && said.contains("lost"), "{output}\n{}", rgpu.logs());
    rgpu.nothing_left()
}

#[test]
fn a_cut_link_ends_the_program_in_time_and_a_short_cut_does_not() -> Result<()> {
    let rgpu = Rgpu::boot()?;
    let program = rgpu.spawn("copies")?;
    std::thread::sleep(Duration::from_secs(3));
    rgpu.machine.check(&format!("{}; sleep 1; {}", rdma::CUT, rdma::MEND), SHORT)?;
    let output = program.wait(LONG)?;
    ensure!(output.success(), "after a second without a link: {output}\n{}", rgpu.logs());
    let program = rgpu.spawn("copies")?;
    std::thread::sleep(Duration::from_secs(3));
    rgpu.machine.check(rdma::CUT, SHORT)?;
    let cut = Instant::now();
    let output = program.wait(Duration::from_secs(60))?;
    ensure!(
        !output.success() && cut.elapsed() < Duration::from_secs(40),
        "{:?} after the cut: {output}",
        cut.elapsed()
    );
    // The link comes back, and so does service.
    rgpu.machine.check(&format!("{}; sleep 2", rdma::MEND), SHORT)?;
    rgpu.passes("vectorAdd")
}

#[test]
fn programs_pass_over_a_virtual_function() -> Result<()> {
    let machine = rdma::boot(rdma::with_virtual_functions(Rgpu::builder()?))?;
    rdma::virtual_function(&machine)?;
    let rgpu = Rgpu::new("rxepeer", rdma::FUNCTION, machine)?;
    for program in ["vectorAdd", "copies", "streams_events"] {
        rgpu.passes(program)?;
    }
    Ok(())
}
