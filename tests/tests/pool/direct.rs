//! Copies from server to server, and what becomes of them when something fails in the middle.

use super::*;

#[test]
fn copies_between_servers_pass_from_worker_to_worker() -> Result<()> {
    // Also as with servers before version 2.6, which a program asks for each piece.
    let ways = support::TRANSPORTS.map(|transport| [(transport, ""), (transport, "8")]);
    for (transport, depth) in ways.into_iter().flatten() {
        let rigs = connected("pool-direct", &[transport])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?;
        let outcome = programs::run(command.arg("direct").env("RGPU_DIRECT_DEPTH", depth), programs::LIMIT)?;
        let said = outcome.verdict(PROGRAM).with_context(|| format!("over {transport:?} {depth}"))?;
        let bytes: u64 = said.split(' ').next().context("no number")?.parse()?;
        for rig in &rigs {
            eventually(|| {
                let direct = counter(rig, "bytes_direct")?;
                ensure!(direct == 2 * bytes, "{direct} bytes where {bytes} were copied each way");
                let client = counter(rig, "bytes_in")? + counter(rig, "bytes_out")?;
                ensure!(client < 1 << 20, "{client} bytes were exchanged with the client");
                Ok(())
            })?;
        }
        // Everything else works as well, and copies of all kinds go this way.
        let mut command = with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?;
        programs::run(command.env("RGPU_DIRECT_DEPTH", depth), programs::LIMIT)?
            .verdict(PROGRAM)
            .with_context(|| format!("over {transport:?} {depth}"))?;
    }
    Ok(())
}

#[test]
fn a_copy_between_servers_needs_one_question_whatever_its_size() -> Result<()> {
    const FEW: u64 = 2;
    const MANY: u64 = 42;
    let rigs = connected("pool-questions", &[Transport::Tcp])?;
    let exchanges = |count: u64, bytes: u64, depth: &str| -> Result<u64> {
        let mut command = with_servers(&servers(&rigs, [Transport::Tcp, Transport::Tcp]), PROGRAM)?;
        command.arg(format!("{count}x{bytes}")).env("RGPU_STATS", "1").env("RGPU_DIRECT_DEPTH", depth);
        // Opening others takes questions as well, at a time of its own.
        command.env("RGPU_DIRECT_CONNECTIONS", "1");
        let outcome = programs::run(&mut command, programs::LIMIT)?;
        outcome.verdict(PROGRAM)?;
        // Round trips at the same time are one exchange.
        stats(&outcome.stderr, "exchanges")
    };
    for bytes in [4, 256 << 10, 3 << 20, 40 << 20] {
        let each = |depth| -> Result<u64> {
            Ok(exchanges(MANY, bytes, depth)?.saturating_sub(exchanges(FEW, bytes, depth)?))
        };
        // How many others a program needs depends a little on how busy the machine is.
        let (asked, copies) = (each("")?, MANY - FEW);
        ensure!(asked < copies * 3 / 2, "{bytes} bytes: {asked} exchanges of {copies} copies");
    }
    // A program that asks for each piece needs more, and so would notice that this counts something.
    let asked = exchanges(MANY, 3 << 20, "1")? - exchanges(FEW, 3 << 20, "1")?;
    ensure!(asked > 10 * (MANY - FEW), "{asked} exchanges");
    Ok(())
}

#[test]
fn copies_that_are_queued_do_not_wait_for_each_others_answers() -> Result<()> {
    const FEW: u64 = 2;
    const MANY: u64 = 42;
    let rigs = connected("pool-queued", &[Transport::Tcp])?;
    for form in ["queued", "default"] {
        let exchanges = |count: u64, depth: &str| -> Result<u64> {
            let mut command = with_servers(&servers(&rigs, [Transport::Tcp, Transport::Tcp]), PROGRAM)?;
            command.arg(format!("{form}_{count}x{}", 1 << 20)).env("RGPU_STATS", "1");
            command.env("RGPU_DIRECT_CONNECTIONS", "1").env("RGPU_DIRECT_DEPTH", depth);
            let outcome = programs::run(&mut command, programs::LIMIT)?;
            outcome.verdict(PROGRAM)?;
            // Round trips at the same time are one exchange.
            stats(&outcome.stderr, "exchanges")
        };
        let asked = exchanges(MANY, "")?.saturating_sub(exchanges(FEW, "")?);
        ensure!(asked < (MANY - FEW) / 2, "{form}: {asked} exchanges of {} copies", MANY - FEW);
        // A program that asks for each piece copies one after the other, and would notice that this counts
        // something.
        let asked = exchanges(MANY, "8")? - exchanges(FEW, "8")?;
        ensure!(asked >= MANY - FEW, "{form}: {asked} exchanges");
    }
    Ok(())
}

#[test]
fn copies_from_two_devices_of_a_server_at_once_keep_their_connections() -> Result<()> {
    const COUNT: u64 = 60;
    let rigs = connected("pool-two-devices", &[Transport::Tcp])?;
    let [one, two] = [0, 1].map(|place| address(&rigs[place], Transport::Tcp));
    for bytes in [256 << 10, 1 << 20, 4 << 20] {
        let mut command = with_servers(&[format!("{two}/0,1"), one.clone()], PROGRAM)?;
        let outcome = programs::run(command.arg(format!("both_{COUNT}x{bytes}")), programs::LIMIT)?;
        outcome.verdict(PROGRAM)?;
        ensure!(!outcome.stderr.contains("pass through this machine"), "{bytes}: {}", outcome.stderr);
        eventually(|| {
            let direct = counter(&rigs[1], "bytes_direct")?;
            ensure!(
                direct == 2 * COUNT * bytes,
                "{direct} bytes where {COUNT} times {bytes} were copied from each"
            );
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn if_one_of_several_copies_under_way_fails_all_are_made_again_in_order() -> Result<()> {
    const BYTES: usize = 8 << 20;
    let rigs = connected("pool-queued-broken", &[Transport::Tcp])?;
    let signal = |rig: &Rig, signal| -> Result<()> {
        Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker(rig)?), signal)?)
    };
    let mut command = with_servers(&servers(&rigs, [Transport::Tcp, Transport::Tcp]), PROGRAM)?;
    command.arg(format!("broken_6x{BYTES}")).env("RGPU_DIRECT_CONNECTIONS", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = command.spawn()?;
    let mut begin = program.stdin.take().context("no input")?;
    ensure!(line(&mut program)? == "QUEUED\n", "the program has ended");
    let mut sending = Vec::new();
    eventually(|| {
        sending = connections(worker(&rigs[0])?, rigs[1].port)?;
        ensure!(sending.len() == 1, "{} connections", sending.len());
        Ok(())
    })?;
    signal(&rigs[1], Signal::SIGSTOP)?;
    begin.write_all(b"\n")?;
    // The first copy is under way, and cannot be over: the other end takes nothing.
    let stuck = eventually(|| {
        let mut unsent = 0;
        // SAFETY: an open socket, and a place for a number.
        let asked = unsafe { libc::ioctl(sending[0].as_raw_fd(), libc::TIOCOUTQ, &mut unsent) };
        ensure!(asked == 0 && unsent > 0, "{asked}: {unsent} bytes");
        Ok(())
    });
    sending[0].shutdown(Shutdown::Both)?;
    signal(&rigs[1], Signal::SIGCONT)?;
    stuck?;
    ensure!(line(&mut program)? == "QUEUED\n", "a copy has wrong bytes");
    drop(begin);
    let (text, last) = ended(program)?;
    ensure!(last.contains("PASS"), "{text}");
    ensure!(text.contains("pass through this machine until there is another one"), "{text}");
    Ok(())
}

#[test]
fn servers_connect_when_a_program_uses_devices_of_both() -> Result<()> {
    let rigs = connected("pool-ahead", &[Transport::Tcp])?;
    let mut command = with_servers(&servers(&rigs, [Transport::Tcp, Transport::Tcp]), PROGRAM)?;
    // It copies nothing from one to the other before it says this; then it waits.
    let mut program = command.arg("lost").stdout(Stdio::piped()).spawn()?;
    ensure!(line(&mut program)? == "READY\n", "the program has ended");
    for rig in &rigs {
        eventually(|| {
            let log = rig.server.log_text();
            for way in [
                "a direct connection to another server is open",
                "a direct connection of another server is open",
            ] {
                ensure!(log.contains(way), "{way:?} is not in the log:\n{log}");
            }
            Ok(())
        })?;
    }
    program.kill()?;
    program.wait()?;
    Ok(())
}

/// What fails in the middle of copies between servers. Numbers are the servers'.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Program,
    Worker(usize),
    Daemon(usize),
    /// The direct connection that this server's worker has made, or accepted.
    Connection(usize),
}

/// How often something fails with each transport: each kind once, or as often as `RGPU_POOL_KILLS` says.
fn failures(transport: Transport) -> Result<Vec<Failure>> {
    use Failure::{Connection, Daemon, Program, Worker};
    let mut kinds = vec![Program, Worker(0), Worker(1), Daemon(0), Daemon(1)];
    if transport == Transport::Tcp {
        kinds.extend([Connection(0), Connection(1)]);
    }
    let count = std::env::var("RGPU_POOL_KILLS").map_or(Ok(kinds.len()), |text| text.parse())?;
    Ok(kinds.into_iter().cycle().take(count).collect())
}

#[test]
fn whatever_fails_in_the_middle_of_copies_leaves_nothing_behind() -> Result<()> {
    for transport in support::TRANSPORTS {
        let mut rigs = connected("pool-killed", &[transport])?;
        let mut before: Vec<_> = rigs.iter().map(Rig::idle_holdings).collect::<Result<_>>()?;
        for (round, failure) in failures(transport)?.into_iter().enumerate() {
            let lost = fails(&mut rigs, transport, round, failure);
            lost.with_context(|| format!("{transport:?}, round {round}: {failure:?}"))?;
            for (number, rig) in rigs.iter_mut().enumerate() {
                if matches!(failure, Failure::Daemon(killed) if killed == number) {
                    before[number] = rig.idle_holdings()?;
                }
                let left = rig.check_left_nothing(&before[number]).and_then(|()| rig.check_healthy());
                left.with_context(|| format!("{transport:?}, round {round}: {failure:?}, server {number}"))?;
            }
        }
    }
    Ok(())
}

/// Something fails while a program copies between servers. No copy has wrong bytes, and the program learns of
/// it, unless copies can go on in another way.
fn fails(rigs: &mut [Rig; 2], transport: Transport, round: usize, failure: Failure) -> Result<()> {
    let kill = |pid| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
    let mut command = with_servers(&servers(rigs, [transport, transport]), PROGRAM)?;
    // Those that take several connections, too, unless it is one that fails.
    let large = round % 2 == 1 && !matches!(failure, Failure::Connection(_));
    command.arg(if large { "large" } else { "copies" }).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("RGPU_DIRECT_CONNECTIONS", if large { "4" } else { "1" });
    let mut program = command.spawn()?;
    let copied = |program: &mut Child| -> Result<()> {
        let copied = line(program)?;
        ensure!(copied == "COPIED\n", "{copied:?}");
        Ok(())
    };
    for _ in 0..2 {
        copied(&mut program)?;
    }
    // At another moment of its copies each time.
    std::thread::sleep(std::time::Duration::from_millis(round as u64 * 37 % 200));
    match failure {
        Failure::Program => program.kill()?,
        Failure::Worker(number) => kill(worker(&rigs[number])?)?,
        Failure::Daemon(number) => {
            rigs[number].server.signal(Signal::SIGKILL)?;
            rigs[number].server.wait(support::PATIENCE)?;
            // Over TCP, the program learns from the next one that its session is over.
            rigs[number].restart_server()?;
        }
        Failure::Connection(number) => {
            cut(worker(&rigs[number])?, rigs[1 - number].port)?;
            for _ in 0..2 {
                copied(&mut program)?;
            }
            program.kill()?;
        }
    }
    let (mut stdout, mut stderr) = (String::new(), String::new());
    program.stdout.take().context("stdout")?.read_to_string(&mut stdout)?;
    program.stderr.take().context("stderr")?.read_to_string(&mut stderr)?;
    let status = program.wait()?;
    ensure!(!stdout.contains("wrong words"), "bytes that did not come: {stdout}");
    ensure!(!status.success(), "the program passes: {stdout}{stderr}");
    Ok(())
}

#[test]
fn if_a_connection_between_servers_breaks_copies_go_through_the_client_until_there_is_another() -> Result<()>
{
    for from in 0..2 {
        let rigs = connected("pool-broken", &[Transport::Tcp])?;
        let mut command = with_servers(&servers(&rigs, [Transport::Tcp, Transport::Tcp]), PROGRAM)?;
        command.arg("copies").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("RGPU_DIRECT_CONNECTIONS", "1");
        let mut program = command.spawn()?;
        ensure!(line(&mut program)? == "COPIED\n", "no copies");
        cut(worker(&rigs[from])?, rigs[1 - from].port)?;
        // Copies continue, and all of their bytes are right. Some go through the client.
        let mut copied = || -> Result<()> {
            ensure!(line(&mut program)? == "COPIED\n", "the copies have ended");
            Ok(())
        };
        eventually(|| {
            copied()?;
            let log = rigs[from].server.log_text();
            let opened = log.matches("a direct connection to another server is open").count();
            ensure!(opened >= 2, "{opened} connections were opened:\n{log}");
            Ok(())
        })?;
        for _ in 0..4 {
            copied()?;
        }
        program.kill()?;
        let mut stderr = String::new();
        program.stderr.take().context("stderr")?.read_to_string(&mut stderr)?;
        program.wait()?;
        ensure!(stderr.contains("pass through this machine until there is another one"), "{stderr}");
        for rig in &rigs {
            eventually(|| {
                let client = counter(rig, "bytes_in")? + counter(rig, "bytes_out")?;
                ensure!(client > 3 << 20, "{client} bytes passed through the client");
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn large_copies_take_several_connections() -> Result<()> {
    // One for each 512 KiB of a copy, and at most four.
    const MOST: usize = 4;
    for (transport, from) in [(Transport::Tcp, 0), (Transport::Tcp, 1), (Transport::Local, 0)] {
        let mut rigs = connected("pool-large", &[transport])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?;
        command.arg("large").stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = command.spawn()?;
        let mut copied = || -> Result<()> {
            let said = line(&mut program)?;
            ensure!(said == "COPIED\n", "the copies have ended: {said:?}");
            Ok(())
        };
        let mut has_opened = |least: usize| {
            eventually(|| {
                copied()?;
                let log = rigs[from].server.log_text();
                let opened = log.matches("a direct connection to another server is open").count();
                ensure!(opened >= least, "{opened} connections were opened:\n{log}");
                Ok(())
            })
        };
        has_opened(MOST)?;
        if transport == Transport::Tcp {
            // If one of them breaks, all are opened again, and no copy has a wrong byte.
            let streams = connections(worker(&rigs[from])?, rigs[1 - from].port)?;
            streams.last().context("there is no connection")?.shutdown(Shutdown::Both)?;
            has_opened(2 * MOST)?;
        }
        program.kill()?;
        program.wait()?;
        for rig in &mut rigs {
            rig.check_healthy()?;
        }
    }
    Ok(())
}
