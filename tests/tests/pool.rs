//! One program with the devices of two servers, natively: over shared memory, over TCP, and with one of each.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rgpu_tests::programs;
use rgpu_tests::tree;
use support::{Ended, Rig, Transport, eventually};

const PROGRAM: &str = "two_servers";

/// A server's address by a transport.
fn address(rig: &Rig, transport: Transport) -> String {
    match transport {
        Transport::Local => format!("unix:{}", rig.server_socket().display()),
        Transport::Tcp => format!("127.0.0.1:{}", rig.port),
    }
}

/// `rgpuctl run` with these servers, and a test program.
fn with_servers(servers: &[String], program: &str) -> Result<Command> {
    let mut command = run_with(servers);
    command.arg(programs::built(program)?);
    Ok(command)
}

/// `rgpuctl run` with these servers, without its program.
fn run_with(servers: &[String]) -> Command {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["run", "--insecure"]).env("RGPU_LIB_DIR", tree::guest_libraries());
    for server in servers {
        command.args(["--server", server]);
    }
    command.arg("--");
    command
}

fn two(name: &str) -> Result<[Rig; 2]> {
    let second = Rig::with(&format!("{name}-2"), &["--software-devices", "3"], &[])?;
    Ok([Rig::start(&format!("{name}-1"))?, second])
}

/// The servers by these transports: the first one's only device, and the second one's third device, which has
/// its own number and UUID.
fn servers(rigs: &[Rig; 2], transports: [Transport; 2]) -> [String; 2] {
    let [first, second] = [0, 1].map(|place| address(&rigs[place], transports[place]));
    [first, format!("{second}/2")]
}

#[test]
fn a_program_uses_the_devices_of_two_servers() -> Result<()> {
    let rigs = two("pool")?;
    let ways = [
        [Transport::Local, Transport::Local],
        [Transport::Tcp, Transport::Local],
        [Transport::Tcp, Transport::Tcp],
    ];
    for transports in ways {
        let outcome =
            programs::run(&mut with_servers(&servers(&rigs, transports), PROGRAM)?, programs::LIMIT)?;
        outcome.verdict(PROGRAM).with_context(|| format!("over {transports:?}"))?;
    }
    // The program's own choice and order, by number and by UUID. An address window then belongs to another
    // device.
    let servers = servers(&rigs, [Transport::Tcp, Transport::Local]);
    let uuid = |number: u8| format!("GPU-72677075-2d73-6f66-7477-6172652d00{number:02x}");
    for visible in ["1,0".to_owned(), format!("{},{}", uuid(2), uuid(0))] {
        let mut program = with_servers(&servers, PROGRAM)?;
        let outcome = programs::run(program.env("CUDA_VISIBLE_DEVICES", &visible), programs::LIMIT)?;
        outcome.verdict(PROGRAM).with_context(|| format!("with CUDA_VISIBLE_DEVICES={visible}"))?;
    }
    // NCCL's GPUs are in one process, yet not in one machine. Its own network has to be told.
    let told = |named: &[String], net: &str| -> Result<String> {
        let output = run_with(named)
            .args(["sh", "-c", "echo ${NCCL_SHM_DISABLE-unset} ${NCCL_BUFFSIZE-unset}"])
            .env("NCCL_NET", net)
            .output()?;
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    for (named, net, expected) in [
        (&servers[..], "Socket", "1 524288"),
        (&servers[..], "rgpu", "unset unset"),
        (&servers[..], "", "unset unset"),
        (&servers[..1], "Socket", "unset unset"),
    ] {
        let found = told(named, net)?;
        ensure!(found == expected, "NCCL_NET={net}: NCCL is told {found:?} instead of {expected:?}");
    }
    // Management programs.
    for program in ["nvidia_smi", "nvml"] {
        programs::run(&mut with_servers(&servers, program)?, programs::LIMIT)?.verdict(program)?;
    }
    Ok(())
}

#[test]
fn if_a_kernel_cannot_reach_memory_of_the_other_server_only_its_device_has_the_error() -> Result<()> {
    let rigs = two("pool-unreachable")?;
    for transport in support::TRANSPORTS {
        let servers = servers(&rigs, [transport, transport]);
        let mut command = with_servers(&servers, PROGRAM)?;
        programs::run(command.arg("unreachable"), programs::LIMIT)?
            .verdict(PROGRAM)
            .with_context(|| format!("over {transport:?}"))?;
        let mut command = with_servers(&servers, PROGRAM)?;
        let outcome = programs::run(command.arg("pinned"), programs::LIMIT)?;
        let reached = outcome.verdict(PROGRAM).with_context(|| format!("over {transport:?}"))?;
        ensure!(reached == "both servers", "pinned memory over {transport:?}: kernels of {reached}");
    }
    // More than kernels of two servers can use. Only the error of the kernel that uses it has an explanation.
    let servers = servers(&rigs, [Transport::Tcp; 2]);
    let outcome = programs::run(with_servers(&servers, PROGRAM)?.arg("much_pinned"), programs::LIMIT)?;
    ensure!(outcome.verdict(PROGRAM)? == "one server", "{outcome:?}");
    ensure!(
        outcome.stderr.matches("cannot use the 2097152 bytes of pinned memory").count() == 1,
        "{outcome:?}"
    );
    Ok(())
}

#[test]
fn kernels_of_two_servers_use_the_same_pinned_memory() -> Result<()> {
    const PROGRAM: &str = "two_servers_pinned";
    let rigs = two("pool-pinned")?;
    // With page faults by the kernel, and by signals.
    for (transport, pages) in
        [(Transport::Tcp, "userfaultfd"), (Transport::Tcp, "signal"), (Transport::Local, "userfaultfd")]
    {
        let mut command = with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?;
        programs::run(command.env("RGPU_PAGES", pages), programs::LIMIT)?
            .verdict(PROGRAM)
            .with_context(|| format!("over {transport:?}, RGPU_PAGES={pages}"))?;
    }
    Ok(())
}

/// Two servers, each of which may connect to the other by these transports.
fn connected(name: &str, transports: &[Transport]) -> Result<[Rig; 2]> {
    connected_with(name, transports, &[])
}

/// The same, with further arguments.
fn connected_with(name: &str, transports: &[Transport], more: &[&str]) -> Result<[Rig; 2]> {
    let mut first = Rig::start(&format!("{name}-1"))?;
    let arguments = |rig: &Rig| -> Vec<String> {
        let to = transports.iter().map(|transport| format!("--direct-to={}", address(rig, *transport)));
        to.chain(more.iter().map(|one| (*one).to_owned())).collect()
    };
    let allowed = arguments(&first);
    let mut seconds = vec!["--software-devices", "3"];
    seconds.extend(allowed.iter().map(String::as_str));
    let second = Rig::with(&format!("{name}-2"), &seconds, &[])?;
    first.restart_server_with(&arguments(&second))?;
    Ok([first, second])
}

/// A counter of the one session that a server has had.
fn counter(rig: &Rig, name: &str) -> Result<u64> {
    let log = rig.server.log_text();
    let last = log.lines().rev().find_map(|line| line.split_once(&format!(" {name}="))?.1.split(' ').next());
    let last = last.with_context(|| format!("the log has no {name}:\n{log}"))?;
    last.trim().parse().with_context(|| format!("{name}={last:?}"))
}

#[test]
fn synchronous_copies_come_before_what_other_devices_do_afterwards() -> Result<()> {
    const PROGRAM: &str = "promises_across";
    let rigs = connected("pool-promises", &support::TRANSPORTS)?;
    for transport in support::TRANSPORTS {
        let two_servers = servers(&rigs, [transport; 2]);
        let two_devices = [format!("{}/0,1", address(&rigs[1], transport))];
        let both = ["read", "write", "fill", "send", "receive"];
        let cases = both.map(|case| (&two_servers[..], case)).into_iter().chain(
            both.into_iter().chain(["kernel", "contexts", "default"]).map(|case| (&two_devices[..], case)),
        );
        for (servers, case) in cases {
            let forms = ["CASE", "busy-CASE", "CASE-8000000", "held-CASE"];
            for form in forms.map(|form| form.replace("CASE", case)) {
                let outcome = programs::run(with_servers(servers, PROGRAM)?.arg(&form), programs::LIMIT)?;
                outcome.verdict(PROGRAM).with_context(|| format!("{form} of {servers:?}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn threads_share_streams_on_two_devices() -> Result<()> {
    const PROGRAM: &str = "shared_streams";
    for direct in [true, false] {
        let rigs =
            if direct { connected("pool-shared-direct", &support::TRANSPORTS)? } else { two("pool-shared")? };
        for transport in support::TRANSPORTS {
            let two_servers = servers(&rigs, [transport; 2]);
            let two_devices = [format!("{}/0,1", address(&rigs[1], transport))];
            for servers in [&two_servers[..], &two_devices[..]] {
                let outcome = programs::run(&mut with_servers(servers, PROGRAM)?, programs::LIMIT)?;
                outcome.verdict(PROGRAM).with_context(|| format!("{servers:?}, {direct}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn copies_between_servers_and_what_comes_behind_them_do_not_wait_for_each_other() -> Result<()> {
    const PROGRAM: &str = "held_across";
    for direct in [true, false] {
        let rigs =
            if direct { connected("pool-held-direct", &support::TRANSPORTS)? } else { two("pool-held")? };
        for transport in support::TRANSPORTS {
            let servers = servers(&rigs, [transport; 2]);
            // The first two of its devices are of one server.
            let [first, second] = [0, 1].map(|place| address(&rigs[place], transport));
            let three = [format!("{second}/0,1"), first];
            let cases = ["per_thread", "context", "limit", "destroy", "free", "first", "blocking", "default"];
            let cases = cases.map(|case| (&servers[..], case));
            for (servers, case) in cases.into_iter().chain([(&three[..], "reset")]) {
                let mut command = with_servers(servers, PROGRAM)?;
                let outcome = programs::run(command.arg(case), programs::LIMIT)?;
                outcome.verdict(PROGRAM).with_context(|| format!("{case} over {transport:?}, {direct}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_server_that_does_not_answer_stops_only_what_concerns_itself() -> Result<()> {
    const PROGRAM: &str = "held_across";
    let signal = |worker, signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), signal);
    let cases = ["stalled", "stalled_memory"];
    for (transport, case) in support::TRANSPORTS.into_iter().flat_map(|it| cases.map(|case| (it, case))) {
        let rigs = two("pool-stalled")?;
        let third = Rig::start("pool-stalled-3")?;
        let [first, second] = servers(&rigs, [transport; 2]);
        let mut command = with_servers(&[first, second, address(&third, transport)], PROGRAM)?;
        command.arg(case).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.spawn()?;
        ensure!(line(&mut program)? == "READY\n", "the program has ended");
        let stopped = worker(&third)?;
        signal(stopped, Signal::SIGSTOP)?;
        drop(program.stdin.take());
        let copied = line(&mut program)?;
        signal(stopped, Signal::SIGCONT)?;
        ensure!(copied == "COPIED\n", "{case} over {transport:?}: the other server's part fails: {copied:?}");
        let (text, _) = ended(program)?;
        ensure!(text.contains("PASS"), "{case} over {transport:?}: {text}");
    }
    Ok(())
}

/// Passes bytes between a server's port and one of its own, once it is let.
struct Gate {
    port: u16,
    opens: std::sync::mpsc::Sender<()>,
}

impl Gate {
    /// Connections wait.
    fn closed(server: u16) -> Result<Gate> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (opens, open) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            if open.recv().is_err() {
                return;
            }
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { return };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Ok(Gate { port, opens })
    }
}

#[test]
fn programs_that_each_have_a_server_for_themselves_do_not_wait_for_each_other() -> Result<()> {
    let start = |name| Rig::with(name, &["--sharing", "exclusive"], &[]);
    let rigs = [start("pool-exclusive-1")?, start("pool-exclusive-2")?];
    let count = |rig: &Rig, what| -> Result<usize> {
        let status = rig.server.status()?;
        let counted = status[what].as_array().map(Vec::len).or(status[what].as_u64().map(|n| n as usize));
        counted.with_context(|| format!("no {what}: {status}"))
    };
    let becomes = |rig: &Rig, what, expected| {
        eventually(|| {
            let found = count(rig, what)?;
            ensure!(found == expected, "{found} {what}");
            Ok(())
        })
    };
    let start = |servers: &[String]| {
        let mut command = with_servers(servers, "device_list")?;
        anyhow::Ok(Ended(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?))
    };
    // The first program has the first server and cannot reach the second one.
    let gate = Gate::closed(rigs[1].port)?;
    let first = [address(&rigs[0], Transport::Tcp), format!("127.0.0.1:{}", gate.port)];
    let mut first = start(&first)?;
    becomes(&rigs[0], "sessions", 1)?;
    // The second program is another client. It has the second server and waits for the first one.
    let mut second = start(&[1, 0].map(|place: usize| address(&rigs[place], Transport::Local)))?;
    becomes(&rigs[1], "sessions", 1)?;
    becomes(&rigs[0], "sessions_waiting", 1)?;
    gate.opens.send(())?;
    for Ended(program) in [&mut first, &mut second] {
        let (mut text, mut said) = (String::new(), String::new());
        program.stdout.take().context("no output")?.read_to_string(&mut text)?;
        program.stderr.take().context("no errors")?.read_to_string(&mut said)?;
        ensure!(program.wait()?.success() && text.contains("PASS device_list"), "{text}{said}");
    }
    Ok(())
}

#[test]
fn programs_that_move_their_memory_for_each_other_on_two_servers_both_go_on() -> Result<()> {
    const ROUNDS: usize = 40;
    // Each device has room for one of the two programs. Each program has one server, and waits for the other
    // one's memory there, again and again.
    let swap = ["--software-memory=200M", "--swap-memory=1G", "--swap-residency-ms=1"];
    let rigs = connected_with("pool-swap", &[Transport::Local], &swap)?;
    let [first, second] = servers(&rigs, [Transport::Local; 2]);
    let start = |servers: [&String; 2]| -> Result<(Ended, Arc<AtomicUsize>)> {
        let mut command = with_servers(&servers.map(String::clone), PROGRAM)?;
        let mut program = Ended(command.arg("copies").stdout(Stdio::piped()).spawn()?);
        let output = BufReader::new(program.0.stdout.take().context("no output")?);
        let rounds = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&rounds);
        std::thread::spawn(move || {
            let copied = output.lines().map_while(Result::ok).filter(|line| line == "COPIED");
            copied.for_each(|_| _ = counted.fetch_add(1, Ordering::Relaxed));
        });
        Ok((program, rounds))
    };
    let programs = [start([&first, &second])?, start([&second, &first])?];
    eventually(|| {
        let rounds = programs.each_ref().map(|(_, rounds)| rounds.load(Ordering::Relaxed));
        ensure!(rounds.iter().all(|rounds| *rounds >= ROUNDS), "{rounds:?} rounds");
        Ok(())
    })
}

#[test]
fn less_usual_calls_work_across_servers() -> Result<()> {
    const PROGRAM: &str = "two_servers_forms";
    for direct in [false, true] {
        let rigs =
            if direct { connected("pool-forms-direct", &support::TRANSPORTS)? } else { two("pool-forms")? };
        for transports in [[Transport::Local; 2], [Transport::Tcp, Transport::Local], [Transport::Tcp; 2]] {
            let outcome =
                programs::run(&mut with_servers(&servers(&rigs, transports), PROGRAM)?, programs::LIMIT)?;
            outcome.verdict(PROGRAM).with_context(|| format!("over {transports:?}, direct: {direct}"))?;
        }
    }
    Ok(())
}

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

/// The process that serves a server's one session.
fn worker(rig: &Rig) -> Result<i32> {
    let status = rig.server.status()?;
    let worker = status["sessions"][0]["worker"].as_i64().context("no worker")?;
    Ok(i32::try_from(worker)?)
}

/// Shuts down a process's connection to a port, as a network might, once there is one.
fn cut(process: i32, port: u16) -> Result<()> {
    eventually(|| {
        let connections = connections(process, port)?;
        let [stream] = connections.as_slice() else {
            anyhow::bail!("the process has {} connections to port {port}", connections.len());
        };
        Ok(stream.shutdown(Shutdown::Both)?)
    })
}

/// A process's connections to a port.
fn connections(process: i32, port: u16) -> Result<Vec<TcpStream>> {
    let owned = |fd: libc::c_long| -> Result<OwnedFd> {
        ensure!(fd >= 0, "a descriptor of process {process}: {}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just created it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
    };
    // SAFETY: no memory is passed.
    let handle = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let number: i32 = entry?.file_name().to_string_lossy().parse()?;
        // SAFETY: no memory is passed.
        let copied = unsafe { libc::syscall(libc::SYS_pidfd_getfd, handle.as_raw_fd(), number, 0) };
        // It may already be closed.
        let Ok(copied) = owned(copied) else { continue };
        let stream = TcpStream::from(copied);
        if stream.peer_addr().is_ok_and(|peer| peer.port() == port) {
            found.push(stream);
        }
    }
    Ok(found)
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
    // One for each 2 MiB of a copy, and at most four.
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

const NCCL: &str = "nccl_net";

/// A count of `RGPU_STATS=1`, the total of the process.
fn stats(text: &str, name: &str) -> Result<u64> {
    let total = text.lines().find(|line| line.contains("rgpu: stats: pid=")).context("no statistics")?;
    let found = total.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(found.with_context(|| format!("{total:?} has no {name}"))?.parse()?)
}

/// The numbers that the program tells: bytes between kernels' memory, and the others.
fn told(said: &str) -> Result<[u64; 2]> {
    let mut numbers = said.split(' ').filter_map(|word| word.parse().ok());
    Ok([(); 2].map(|()| numbers.next().unwrap_or(0)))
}

/// Which of the messages between kernels go from server to server over this transport. Over `local`, they are
/// in memory that the processes share with the servers.
fn direct_of(transport: Transport, kernels: u64) -> u64 {
    if matches!(transport, Transport::Local) { 0 } else { kernels }
}

/// What went from server to server, and what through the processes.
fn ways(stderr: &str) -> Result<[u64; 2]> {
    Ok([stats(stderr, "nccl_direct_bytes")?, stats(stderr, "nccl_staged_bytes")?])
}

#[test]
fn nccls_messages_between_kernels_go_from_server_to_server() -> Result<()> {
    for transport in support::TRANSPORTS {
        let rigs = connected("nccl-direct", &[transport])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), NCCL)?;
        let outcome = programs::run(command.env("RGPU_STATS", "1"), programs::LIMIT)?;
        let [kernels, others] = told(outcome.verdict(NCCL).with_context(|| format!("over {transport:?}"))?)?;
        let [direct, staged] = ways(&outcome.stderr)?;
        let expected = direct_of(transport, kernels);
        // Some of what is interrupted counts as well, and all of it goes from kernel to kernel.
        let as_expected = if expected > 0 {
            direct >= expected && staged == others
        } else {
            direct == 0 && staged >= kernels
        };
        ensure!(as_expected, "{transport:?}: {direct} and {staged} of {kernels} and {others} bytes");
        for rig in &rigs {
            eventually(|| {
                let bytes = counter(rig, "bytes_direct")?;
                ensure!(bytes >= expected, "{bytes} bytes where the program sent {expected}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn nccls_messages_arrive_while_calls_of_the_driver_wait_for_kernels_that_wait_for_them() -> Result<()> {
    for transport in support::TRANSPORTS {
        let rigs = connected_with("nccl-waiting", &[transport], &["--software-imitate", "waiting-calls"])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), NCCL)?;
        let outcome = programs::run(command.arg("waiting").env("RGPU_STATS", "1"), programs::LIMIT)?;
        let [kernels, _] = told(outcome.verdict(NCCL).with_context(|| format!("over {transport:?}"))?)?;
        let direct = direct_of(transport, kernels);
        let counted = ways(&outcome.stderr)?;
        ensure!(counted == [direct, kernels - direct], "{transport:?}: {counted:?} of {kernels} bytes");
    }
    Ok(())
}

#[test]
fn where_servers_have_no_connection_nccls_messages_pass_through_the_processes() -> Result<()> {
    let rigs = two("nccl-staged")?;
    for transports in [[Transport::Tcp, Transport::Tcp], [Transport::Local, Transport::Tcp]] {
        let mut command = with_servers(&servers(&rigs, transports), NCCL)?;
        command.env("RGPU_STATS", "1").env("RGPU_LOG", "info");
        let outcome = programs::run(&mut command, programs::LIMIT)?;
        let [kernels, others] = told(outcome.verdict(NCCL).with_context(|| format!("over {transports:?}"))?)?;
        let [direct, staged] = ways(&outcome.stderr)?;
        ensure!(direct == 0 && staged >= kernels + others, "{direct} and {staged} bytes");
        ensure!(outcome.stderr.contains("NCCL's messages to"), "it is not said why: {}", outcome.stderr);
    }
    Ok(())
}

/// A process that receives and one that sends, each with the device of its own server.
fn two_processes(rigs: &[Rig; 2], transport: Transport, modes: [&str; 2]) -> Result<[Child; 2]> {
    let start = |rig: &Rig, arguments: &[&str]| -> Result<Child> {
        let mut command = with_servers(&[address(rig, transport)], NCCL)?;
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.env("RGPU_STATS", "1").spawn()?)
    };
    let mut receiver = start(&rigs[0], &modes[..1])?;
    let handle = line(&mut receiver)?;
    let sender = start(&rigs[1], &[modes[1], handle.trim()])?;
    Ok([receiver, sender])
}

/// The program that `rgpuctl run` has started.
fn program_of(run: &Child) -> Result<i32> {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id()))?;
    let mut children = children.split(' ').filter_map(|pid| pid.parse().ok());
    let is_it = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == NCCL)
    };
    children.find(is_it).context("there is no such program")
}

/// What a program printed until its end, and its last line.
fn ended(program: Child) -> Result<(String, String)> {
    let output = program.wait_with_output()?;
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let last = stdout.lines().last().unwrap_or_default().to_owned();
    Ok((format!("{stdout}{stderr}"), last))
}

#[test]
fn nccls_messages_go_from_server_to_server_for_two_processes_as_well() -> Result<()> {
    for (transport, direct) in [(Transport::Tcp, true), (Transport::Local, true), (Transport::Tcp, false)] {
        let rigs = if direct { connected("nccl-two", &[transport])? } else { two("nccl-two")? };
        let [receiver, sender] = two_processes(&rigs, transport, ["receive", "send"])?;
        let ends = [ended(receiver)?, ended(sender)?];
        ensure!(ends.iter().all(|(_, last)| last.starts_with("PASS")), "over {transport:?}: {ends:?}");
        let [_, (text, last)] = ends;
        let [kernels, others] = told(&last)?;
        let direct = if direct { direct_of(transport, kernels) } else { 0 };
        let (expected, counted) = ([direct, kernels + others - direct], ways(&text)?);
        ensure!(counted == expected, "{counted:?} bytes instead of {expected:?}");
    }
    Ok(())
}

#[test]
fn if_one_end_of_nccls_messages_dies_the_other_one_has_an_error() -> Result<()> {
    for round in 0..5 {
        let mut rigs = connected("nccl-killed", &[Transport::Tcp])?;
        let before: Vec<_> = rigs.iter().map(Rig::idle_holdings).collect::<Result<_>>()?;
        let mut both = two_processes(&rigs, Transport::Tcp, ["endless", "flood"])?;
        for program in &mut both {
            ensure!(line(program)? == "under way\n", "round {round}: nothing is sent");
        }
        let [receiver, sender] = both;
        let kill = |pid| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
        // A process, a server's worker, or the connection between the workers.
        match round {
            0 => kill(program_of(&receiver)?)?,
            1 => kill(program_of(&sender)?)?,
            2 => kill(worker(&rigs[0])?)?,
            3 => kill(worker(&rigs[1])?)?,
            _ => cut(worker(&rigs[1])?, rigs[0].port)?,
        }
        let ends = [ended(receiver)?, ended(sender)?];
        for (end, (text, last)) in ends.iter().enumerate() {
            let killed = round == end;
            let own = round == end + 2;
            // Where the server is lost, CUDA has an error before the network has.
            let fine = last.contains("error 6") || own && (last.contains("error 2") || last.contains("FAIL"));
            ensure!(killed || fine, "round {round}, end {end}: {text}");
            ensure!(!text.contains("instead of"), "bytes that were not sent: {text}");
        }
        for (rig, before) in rigs.iter_mut().zip(&before) {
            rig.check_left_nothing(before).with_context(|| format!("round {round}"))?;
            rig.check_healthy()?;
        }
    }
    Ok(())
}

/// The program's next line.
fn line(program: &mut Child) -> Result<String> {
    let stdout = program.stdout.as_mut().context("the program's output is not read")?;
    let mut line = String::new();
    BufReader::with_capacity(1, stdout).read_line(&mut line)?;
    Ok(line)
}

#[test]
fn if_a_server_is_lost_the_other_ones_devices_keep_working() -> Result<()> {
    // The program loses its second device: once the second server's, once the first one's.
    for (transport, lost, visible) in [(Transport::Local, 1, "0,1"), (Transport::Tcp, 0, "1,0")] {
        let rigs = two("pool-lost")?;
        let servers = servers(&rigs, [transport, transport]);
        let mut command = with_servers(&servers, PROGRAM)?;
        // Long enough for a busy machine to bring back a link that nobody has cut.
        command.arg("lost").env("RGPU_LOST_AFTER", "20").env("CUDA_VISIBLE_DEVICES", visible);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = command.spawn()?;
        let first = line(&mut program)?;
        ensure!(first == "READY\n", "{first:?}");
        rigs[lost].server.signal(Signal::SIGKILL)?;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        program.stdout.take().context("stdout")?.read_to_string(&mut stdout)?;
        program.stderr.take().context("stderr")?.read_to_string(&mut stderr)?;
        let status = program.wait()?;
        ensure!(
            status.success() && stdout.contains("PASS two_servers the other server's devices go on"),
            "over {transport:?}: {status}: {stdout}{stderr}"
        );
    }
    Ok(())
}

#[test]
fn the_server_gives_the_requested_devices_and_names_those_it_lacks() -> Result<()> {
    let rig = Rig::with("pool-devices", &["--software-devices", "3"], &[])?;
    let server = address(&rig, Transport::Tcp);
    let devices = |server: String| -> Result<String> {
        let outcome = programs::run(&mut with_servers(&[server], "device_list")?, programs::LIMIT)?;
        Ok(outcome.verdict("device_list")?.to_owned())
    };
    let all = devices(server.clone())?;
    let some = devices(format!("{server}/2,0"))?;
    ensure!((all.as_str(), some.as_str()) == ("3 device(s)", "2 device(s)"), "{all:?}, {some:?}");
    let refused =
        programs::run(&mut with_servers(&[format!("{server}/7")], "device_list")?, programs::LIMIT)?;
    ensure!(refused.stderr.contains("asks for device 7"), "{}", refused.stderr);
    Ok(())
}

#[test]
fn devices_of_one_server_reach_each_others_memory() -> Result<()> {
    let rig = Rig::with("pool-peers", &["--software-devices", "2"], &[])?;
    for transport in [Transport::Local, Transport::Tcp] {
        let peers = |program: &programs::Program| program.device == programs::Device::Peers;
        for program in programs::manifest()?.iter().filter(|program| peers(program)) {
            programs::run(&mut rig.program(transport, &program.name)?, programs::LIMIT)?
                .verdict(&program.name)
                .with_context(|| format!("over {transport:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn memory_of_another_process_is_closed_when_no_device_uses_it() -> Result<()> {
    let rig = Rig::with("pool-busy", &["--software-devices", "2"], &[])?;
    let mut program = rig.program(Transport::Local, "ipc_peers")?;
    programs::run(program.arg("busy"), programs::LIMIT)?.verdict("ipc_peers").map(drop)
}

#[test]
fn with_several_servers_memory_of_a_device_that_is_not_visible_is_opened() -> Result<()> {
    let second = Rig::with("pool-hidden-2", &["--software-devices", "3"], &[])?;
    let rigs = [Rig::start("pool-hidden-1")?, second];
    for transport in [Transport::Local, Transport::Tcp] {
        let [first, second] = [0, 1].map(|place| address(&rigs[place], transport));
        let mut program = with_servers(&[first, format!("{second}/1,2")], "hidden_peers")?;
        programs::run(program.arg("servers"), programs::LIMIT)?
            .verdict("hidden_peers")
            .with_context(|| format!("over {transport:?}"))?;
    }
    Ok(())
}

#[test]
fn a_line_says_that_memory_of_a_device_is_not_for_a_session() -> Result<()> {
    let rig = Rig::with("pool-others-device", &["--software-devices", "2"], &[])?;
    let server = address(&rig, Transport::Tcp);
    let host = Rig::with("pool-others-host", &[], &["--named-servers", &server])?;
    let mut program = host.program(Transport::Tcp, "hidden_peers")?;
    program.arg("refused").env("RGPU_SERVERS", format!("{server}/0"));
    program.env("OTHERS_SERVERS", format!("{server}/1"));
    let outcome = programs::run(&mut program, programs::LIMIT)?;
    outcome.verdict("hidden_peers")?;
    ensure!(
        outcome.stderr.matches("a GPU that this process's session does not have").count() == 1,
        "{outcome:?}"
    );
    Ok(())
}

#[test]
fn in_a_container_nvml_has_the_devices_that_cuda_has() -> Result<()> {
    let rig = Rig::with("pool-container", &["--software-devices", "3"], &[])?;
    for devices in [&["RGPU_GPU_1"][..], &["RGPU_GPU_2", "RGPU_GPU_0"], &["RGPU_GPU_ALL"]] {
        let mut program = rig.program(Transport::Local, "nvml")?;
        program.arg("container").envs(devices.iter().map(|name| (name, "void")));
        programs::run(&mut program, programs::LIMIT)?
            .verdict("nvml")
            .with_context(|| format!("with {devices:?}"))?;
    }
    Ok(())
}

#[test]
fn programs_name_only_the_servers_that_the_host_allows() -> Result<()> {
    let other = Rig::with("pool-named-other", &["--software-devices", "3"], &[])?;
    let named = address(&other, Transport::Tcp);
    let rig = Rig::with("pool-named", &[], &["--named-servers", &named])?;
    let run = |servers: &str| -> Result<programs::Outcome> {
        let mut program = rig.program(Transport::Tcp, PROGRAM)?;
        programs::run(program.env("RGPU_SERVERS", servers), programs::LIMIT)
    };
    let both = format!("{} {named}/2", address(&rig, Transport::Tcp));
    run(&both)?.verdict(PROGRAM)?;
    let refused = run("127.0.0.1:1")?;
    ensure!(refused.stderr.contains("RGPU_SERVERS names tcp:127.0.0.1:1"), "{}", refused.stderr);
    eventually(|| {
        let status = other.server.status()?;
        ensure!(status["sessions"].as_array().is_none_or(Vec::is_empty), "{status}");
        Ok(())
    })
}
