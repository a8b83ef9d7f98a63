//! The layer itself, by `tests/peers/src/bin/verbs.rs`: two processes that check every byte.

use super::*;

/// A machine with a listener on the server's side.
pub(super) struct Bed {
    pub(super) machine: Machine,
    pub(super) listener: Process,
    pub(super) server: &'static str,
    client: &'static str,
}

impl Bed {
    pub(super) fn new(machine: Machine, server: &'static str, client: &'static str) -> Result<Bed> {
        let listener = listen(&machine, server)?;
        Ok(Bed { machine, listener, server, client })
    }

    pub(super) fn builder() -> Result<Builder> {
        Ok(rdma::builder()?.program(built()?.join("verbs"), "/bin/verbs"))
    }

    pub(super) fn command(&self, what: &str) -> String {
        format!("verbs connect 127.0.0.1:9800 --device {} {what}", self.client)
    }

    /// Runs a job that must succeed.
    pub(super) fn job(&self, what: &str) -> Result<String> {
        self.machine.check(&self.command(what), LONG)
    }

    /// Runs a job that must fail, and returns what it said.
    fn fails(&self, what: &str) -> Result<String> {
        let output = self.machine.run(&self.command(what), LONG)?;
        ensure!(!output.success(), "{what} succeeded: {output}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// The listener's output.
    pub(super) fn log(&self) -> String {
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

pub(super) fn listen(machine: &Machine, device: &str) -> Result<Process> {
    let listener = machine.spawn(&format!("exec verbs listen 127.0.0.1:9800 --device {device}"))?;
    listener.wait_for("listening", LONG)?;
    Ok(listener)
}

pub(super) fn every_depth_and_number_of_queues(bed: &Bed) -> Result<()> {
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

pub(super) fn a_wrong_choice_is_named(bed: &Bed) -> Result<()> {
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

pub(super) fn a_link_down_for_a_second_is_outlived(bed: &Bed) -> Result<()> {
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

pub(super) fn a_link_down_for_good_ends_both_sides(bed: &Bed) -> Result<()> {
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

pub(super) fn a_killed_peer_is_noticed_and_leaves_nothing_behind(bed: &mut Bed) -> Result<()> {
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

/// Stops the queue pairs in both directions, at any point and with requests of all kinds under way. The work
/// continues on new queue pairs, and every byte is checked.
pub(super) fn queue_pairs_are_replaced_and_nothing_is_lost_or_repeated(bed: &Bed) -> Result<()> {
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

/// The peer has written a region, and tries once more when the window to it is closed.
pub(super) fn a_key_that_was_taken_back_is_refused(bed: &Bed) -> Result<()> {
    for size in [1, 4096, 1_500_001] {
        let said = bed.job(&format!("--do stale --size {size} --count 500"))?;
        ensure!(said.contains("refused: ") && said.contains("ok do=stale"), "{said}");
        let each = said.lines().find(|line| line.starts_with("us_each_window="));
        eprintln!("      {size} bytes: {}", each.unwrap_or_default());
        bed.listener.wait_for("lost: ", LONG)?;
    }
    ensure!(bed.log().contains("remote access"), "{}", bed.log());
    Ok(())
}

pub(super) fn loss_and_reordering_do_no_harm(bed: &Bed) -> Result<()> {
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

pub(super) fn eight_clients_at_once_get_their_own_data(bed: &Bed) -> Result<()> {
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
