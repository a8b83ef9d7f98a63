//! The transport `verbs`, over RoCE in software, in machines that the tests boot.
//!
//! The first half drives the layer itself, by `host-bridge/examples/verbs.rs`: two processes that check every byte. See `rgpu_tests::machine::rdma` for the machine.

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
    bed.machine.check("/bin/ip link set v0 down; sleep 1; /bin/ip link set v0 up; /bin/ip addr show v0", SHORT)?;
    let output = job.wait(LONG)?;
    ensure!(output.success(), "{output}");
    Ok(())
}

#[test]
fn a_link_down_for_good_ends_both_sides_in_time() -> Result<()> {
    let bed = Bed::new()?;
    let job = bed.machine.spawn(&bed.command("--do h2d --size 1000000 --count 100000 --sleep"))?;
    std::thread::sleep(Duration::from_secs(2));
    bed.machine.check("/bin/ip link set v0 down", SHORT)?;
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
