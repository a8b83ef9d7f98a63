//! Copies between two servers over verbs, and what becomes of them without verbs, with a cut link, killed
//! workers and hostile ends.

use super::*;

/// Two servers with a software GPU each, one at each end of the link, which may connect to each other.
/// Programs reach both over TCP.
struct Pair {
    machine: Machine,
    servers: Vec<Process>,
}

/// The servers' ports.
const PORTS: [u16; 2] = [9700, 9701];

impl Pair {
    fn new() -> Result<Pair> {
        let hostile = built()?.join("hostile_direct");
        let machine = rdma::boot(Rgpu::builder()?.program(hostile, "/bin/hostile_direct"))?;
        let mut pair = Pair { machine, servers: Vec::new() };
        for (place, device) in [rdma::SERVER.1, rdma::CLIENT.1].into_iter().enumerate() {
            let (own, other) = (PORTS[place], PORTS[1 - place]);
            let in_place = if place == 0 { "--direct-device-memory" } else { "" };
            pair.servers.push(pair.machine.spawn(&format!(
                "export NO_COLOR=1; exec /opt/rgpu/rgpu-server --insecure --listen tcp:127.0.0.1:{own} --direct-to tcp:127.0.0.1:{other} --direct-to tcp:127.0.0.1:9810 --direct-verbs {in_place} --grace-seconds 0 --backend software --software-memory 512M --rdma-device {device} --status-socket /run/{place}.status 2>/run/{place}.log"
            ))?);
        }
        let up = "for i in $(seq 3000); do [ -S /run/0.status ] && [ -S /run/1.status ] && exit 0; sleep 0.1; done; cat /run/*.log; exit 1";
        pair.machine.check(up, LONG)?;
        Ok(pair)
    }

    fn command(servers: [u16; 2], arguments: &str) -> String {
        let [first, second] = servers;
        format!(
            "cd /tmp; export RGPU_LIB_DIR=/opt/rgpu/lib RGPU_LOST_AFTER=2; exec /opt/rgpu/rgpuctl run --insecure --server 127.0.0.1:{first} --server 127.0.0.1:{second} -- /opt/rgpu/programs/two_servers {arguments} 2>&1"
        )
    }

    /// Copies of 4 bytes to 64 MiB in both directions, whose bytes are all checked. Returns how many bytes
    /// that was each way.
    fn copies(&self) -> Result<u64> {
        let output = self.machine.run(&Self::command(PORTS, "direct"), LONG)?;
        let said = output.text();
        let line = said.lines().find_map(|line| line.strip_prefix("PASS two_servers "));
        let bytes = line.and_then(|line| line.split(' ').next()?.parse().ok());
        bytes.with_context(|| format!("{output}\n{}", self.logs()))
    }

    /// Starts copies that never end, and waits until some were made.
    fn endless_copies(&self) -> Result<Process> {
        let process = self.machine.spawn(&Self::command(PORTS, "copies"))?;
        process.wait_for("COPIED\nCOPIED\n", LONG).with_context(|| self.logs())?;
        Ok(process)
    }

    fn logs(&self) -> String {
        self.machine.run("tail -n 20 /run/0.log /run/1.log", LONG).map(|o| o.text()).unwrap_or_default()
    }

    fn log(&self, server: usize) -> Result<String> {
        self.machine.check(&format!("cat /run/{server}.log"), LONG)
    }

    /// Waits until a server's log has a line with all of these words, after so many lines.
    fn logged(&self, server: usize, after: usize, words: &[&str]) -> Result<String> {
        let deadline = Instant::now() + LONG;
        loop {
            let log = self.log(server)?;
            let found = log.lines().skip(after).find(|line| words.iter().all(|word| line.contains(word)));
            if let Some(line) = found {
                return Ok(line.to_owned());
            }
            ensure!(Instant::now() < deadline, "server {server} does not say {words:?}:\n{log}");
        }
    }

    fn lines(&self) -> Result<[usize; 2]> {
        Ok([self.log(0)?.lines().count(), self.log(1)?.lines().count()])
    }

    /// A counter of the session that has ended on a server, from its log.
    fn counter(&self, server: usize, after: usize, name: &str) -> Result<u64> {
        let line = self.logged(server, after, &["session ended"])?;
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse().ok()).with_context(|| format!("no {name} in {line:?}"))
    }

    /// The process that serves a server's one session.
    fn worker(&self, server: usize) -> Result<i64> {
        let socket = format!("/run/{server}.status");
        let said = self.machine.check(&format!("/opt/rgpu/rgpuctl status --json --socket {socket}"), LONG)?;
        let status: serde_json::Value = serde_json::from_str(&said).context("a server's status")?;
        status[&socket]["sessions"][0]["worker"].as_i64().with_context(|| format!("no worker in {said}"))
    }

    /// Waits until no memory is registered and no queue pair is left.
    fn nothing_left(&self) -> Result<()> {
        let left = "rdma resource show mr; rdma resource show qp | grep -E 'rgpu-server|worker'";
        self.machine.check(&format!("for i in $(seq 3000); do [ -z \"$({left})\" ] && exit 0; sleep 0.1; done; {left}; cat /run/*.log; exit 1"), LONG).context("something is left")?;
        Ok(())
    }
}

/// All of a program's copies between the servers go over verbs, and none of their bytes through the program
/// or the connection's socket.
fn copies_go_over_verbs(pair: &Pair) -> Result<()> {
    let before = pair.lines()?;
    let bytes = pair.copies()?;
    for (server, before) in before.into_iter().enumerate() {
        pair.logged(server, before, &["a direct connection to another server is open", "over=\"verbs\""])?;
        pair.logged(server, before, &["pieces of a direct connection of another server come over verbs"])?;
        // Short ones without a buffer at the first server.
        let memory =
            if server == 0 { "are sent from device memory" } else { "--direct-device-memory is not set" };
        pair.logged(server, before, &[memory])?;
        let counter = |name| pair.counter(server, before, name);
        let (direct, verbs) = (counter("bytes_direct")?, counter("bytes_direct_verbs")?);
        let client = counter("bytes_in")? + counter("bytes_out")?;
        eprintln!("      server {server}: {direct} bytes, {verbs} over verbs, {client} with the program");
        ensure!(direct == 2 * bytes && verbs == direct, "{direct} and {verbs} of 2 × {bytes} bytes");
        ensure!(client < 1 << 20, "{client} bytes were exchanged with the program");
    }
    pair.nothing_left()
}

/// Without a way for the devices' packets, both ends notice when they connect, and pieces take the socket.
fn copies_take_the_socket_where_verbs_do_not_work(pair: &Pair) -> Result<()> {
    let before = pair.lines()?;
    pair.machine.check(
        "/sbin/tc qdisc add dev v0 root netem loss 100%; /sbin/tc qdisc add dev v1 root netem loss 100%",
        LONG,
    )?;
    let copied = pair.copies();
    pair.machine.check("/sbin/tc qdisc del dev v0 root; /sbin/tc qdisc del dev v1 root", LONG)?;
    let bytes = copied?;
    for (server, before) in before.into_iter().enumerate() {
        pair.logged(server, before, &["its socket, because", "does not answer within"])?;
        let (direct, verbs) = (
            pair.counter(server, before, "bytes_direct")?,
            pair.counter(server, before, "bytes_direct_verbs")?,
        );
        ensure!((direct, verbs) == (2 * bytes, 0), "{direct} and {verbs} of 2 × {bytes} bytes");
    }
    pair.nothing_left()
}

/// When a worker is killed in the middle of copies, the program has an error and no wrong bytes, and the
/// other worker notices.
fn a_killed_worker_ends_the_copies_at_both_ends(pair: &Pair, killed: usize) -> Result<()> {
    let before = pair.lines()?;
    let program = pair.endless_copies()?;
    pair.machine.check(&format!("kill -9 {}", pair.worker(killed)?), LONG)?;
    let output = program.wait(LONG)?;
    let said = output.text();
    ensure!(!output.success() && !said.contains("wrong words"), "{output}\n{}", pair.logs());
    let other = 1 - killed;
    pair.logged(other, before[other], &["session ended"])?;
    pair.nothing_left()?;
    ensure!(!pair.logs().contains("panicked"), "{}", pair.logs());
    Ok(())
}

/// When only the devices lose each other, the connections end, what was lost is copied again through the
/// program, and all bytes are right.
fn a_cut_link_makes_copies_go_through_the_program(pair: &Pair) -> Result<()> {
    let before = pair.lines()?;
    let program = pair.endless_copies()?;
    pair.machine.check(rdma::CUT, LONG)?;
    let on = program.wait_for("pass through this machine until there is another one", LONG);
    let copied = program.stdout().split(|byte| *byte == b'\n').count();
    let deadline = Instant::now() + LONG;
    while on.is_ok() && program.stdout().split(|byte| *byte == b'\n').count() < copied + 4 {
        ensure!(Instant::now() < deadline, "the copies have ended\n{}", pair.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    pair.machine.check(rdma::MEND, LONG)?;
    rdma::wait_up(&pair.machine)?;
    on.with_context(|| pair.logs())?;
    program.kill()?;
    let said = program.wait(LONG)?.text();
    ensure!(!said.contains("wrong words"), "{said}");
    let ended = (0..2).any(|server| {
        let log = pair.log(server).unwrap_or_default();
        log.lines().skip(before[server]).any(|line| {
            line.contains("a direct connection to another server is over")
                && (line.contains("has taken no piece") || line.contains("does not answer any more"))
        })
    });
    ensure!(ended, "no end says what happened:\n{}", pair.logs());
    pair.nothing_left()
}

/// What hostile senders and receivers of pieces do, by `tests/peers/src/bin/hostile_direct.rs`, which checks
/// that its own session goes on and that the connection ends, or takes the socket.
const HOSTILE_DIRECTS: [(&str, &[&str]); 2] = [
    (
        "sender",
        &[
            "nonsense",
            "no-probe",
            "half-agreed",
            "wild-write",
            "empty-write",
            "long-piece",
            "wrong-length",
            "number-again",
            "socket-bytes",
            "beyond-receives",
            "silent",
        ],
    ),
    (
        "receiver",
        &[
            "nonsense",
            "wild-queue",
            "too-many-receives",
            "closes-early",
            "closes",
            "grants-too-many",
            "refuses-a-piece",
            "no-grants",
        ],
    ),
];

fn hostile_ends_lose_their_connection_and_nothing_else(pair: &Pair) -> Result<()> {
    for (role, attacks) in HOSTILE_DIRECTS {
        for what in attacks {
            let before = pair.lines()?;
            let command =
                format!("hostile_direct {role} {} --device {} --do {what}", PORTS[0], rdma::CLIENT.1);
            let output = pair.machine.run(&command, LONG)?;
            ensure!(output.text() == "harmless", "{role} {what}: {output}\n{}", pair.logs());
            let log = pair.log(0)?;
            let lines: Vec<&str> =
                log.lines().skip(before[0]).filter(|line| line.contains("direct connection")).collect();
            eprintln!("      {role} {what}: {}", lines.last().unwrap_or(&"nothing"));
        }
    }
    ensure!(!pair.logs().contains("panicked"), "{}", pair.logs());
    pair.nothing_left()
}

#[test]
fn copies_between_servers_go_over_verbs() -> Result<()> {
    let pair = Pair::new()?;
    let mut parts = Parts::default();
    parts.run("copies over verbs", || copies_go_over_verbs(&pair));
    parts.run("copies over sockets", || copies_take_the_socket_where_verbs_do_not_work(&pair));
    parts.run("hostile ends", || hostile_ends_lose_their_connection_and_nothing_else(&pair));
    parts.run("a killed sender", || a_killed_worker_ends_the_copies_at_both_ends(&pair, 0));
    parts.run("a killed receiver", || a_killed_worker_ends_the_copies_at_both_ends(&pair, 1));
    parts.run("a cut link between servers", || a_cut_link_makes_copies_go_through_the_program(&pair));
    parts.run("copies over verbs again", || copies_go_over_verbs(&pair));
    parts.run("the kernel's log", || pair.machine.check_console());
    parts.end()
}
