//! One program with the devices of two servers, natively: over shared memory, over TCP, and with one of each.

#[path = "pool/direct.rs"]
mod direct;
#[path = "pool/nccl.rs"]
mod nccl;
mod support;

use std::io::{BufRead, BufReader, Read, Write};
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

/// The same over all transports, or else two servers that may not connect.
fn connected_if(direct: bool, name: &str) -> Result<[Rig; 2]> {
    if direct { connected(&format!("{name}-direct"), &support::TRANSPORTS) } else { two(name) }
}

/// Like [`connected`], with further arguments.
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
        let rigs = connected_if(direct, "pool-shared")?;
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
        let rigs = connected_if(direct, "pool-held")?;
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
    let finish = |Ended(program): &mut Ended| -> Result<(bool, String)> {
        let (mut text, mut said) = (String::new(), String::new());
        program.stdout.take().context("no output")?.read_to_string(&mut text)?;
        program.stderr.take().context("no errors")?.read_to_string(&mut said)?;
        Ok((program.wait()?.success() && text.contains("PASS device_list"), text + &said))
    };
    // The server behind the gate has some seconds to answer the first program. A busy machine may take longer
    // to start the second one.
    const ATTEMPTS: usize = 5;
    for attempt in 1..=ATTEMPTS {
        // The first program has the first server and cannot reach the second one.
        let gate = Gate::closed(rigs[1].port)?;
        let first = [address(&rigs[0], Transport::Tcp), format!("127.0.0.1:{}", gate.port)];
        let mut first = start(&first)?;
        becomes(&rigs[0], "sessions", 1)?;
        // The second program is another client. It has the second server and waits for the first one.
        let mut second = start(&[1, 0].map(|place: usize| address(&rigs[place], Transport::Local)))?;
        becomes(&rigs[1], "sessions", 1)?;
        let waits = becomes(&rigs[0], "sessions_waiting", 1);
        gate.opens.send(())?;
        let (passed, said) = finish(&mut first)?;
        let too_late = said.contains(&gate.port.to_string()) && said.contains("no answer in time");
        ensure!(passed || (too_late && attempt < ATTEMPTS), "{said}");
        let (other_passed, said) = finish(&mut second)?;
        ensure!(other_passed, "{said}");
        if passed {
            return waits;
        }
        rigs.iter().try_for_each(|rig| becomes(rig, "sessions", 0))?;
    }
    unreachable!("the last attempt is judged")
}

#[test]
fn programs_that_move_their_memory_for_each_other_on_two_servers_both_go_on() -> Result<()> {
    const ROUNDS: usize = 8;
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
    // A busy machine takes seconds for each round.
    for some in (ROUNDS / 4..=ROUNDS).step_by(ROUNDS / 4) {
        eventually(|| {
            let rounds = programs.each_ref().map(|(_, rounds)| rounds.load(Ordering::Relaxed));
            ensure!(rounds.iter().all(|rounds| *rounds >= some), "{rounds:?} rounds");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn less_usual_calls_work_across_servers() -> Result<()> {
    const PROGRAM: &str = "two_servers_forms";
    for direct in [false, true] {
        let rigs = connected_if(direct, "pool-forms")?;
        for transports in [[Transport::Local; 2], [Transport::Tcp, Transport::Local], [Transport::Tcp; 2]] {
            let outcome =
                programs::run(&mut with_servers(&servers(&rigs, transports), PROGRAM)?, programs::LIMIT)?;
            outcome.verdict(PROGRAM).with_context(|| format!("over {transports:?}, direct: {direct}"))?;
        }
    }
    Ok(())
}

/// The process that serves a server's one session.
fn worker(rig: &Rig) -> Result<i32> {
    let status = rig.server.status()?;
    let worker = status["sessions"][0]["worker"].as_i64().context("no worker")?;
    Ok(i32::try_from(worker)?)
}

/// A count of `RGPU_STATS=1`, the total of the process.
fn stats(text: &str, name: &str) -> Result<u64> {
    let total = text.lines().find(|line| line.contains("rgpu: stats: pid=")).context("no statistics")?;
    let found = total.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(found.with_context(|| format!("{total:?} has no {name}"))?.parse()?)
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

/// What a program printed until its end, and its last line.
fn ended(program: Child) -> Result<(String, String)> {
    let output = program.wait_with_output()?;
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let last = stdout.lines().last().unwrap_or_default().to_owned();
    Ok((format!("{stdout}{stderr}"), last))
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
fn devices_of_one_server_without_access_to_each_other_copy_between_them() -> Result<()> {
    let rig =
        Rig::with("pool-no-peers", &["--software-devices", "2", "--software-imitate", "no-peers"], &[])?;
    for transport in [Transport::Local, Transport::Tcp] {
        let outcome = programs::run(&mut rig.program(transport, "two_gpus")?, programs::LIMIT)?;
        outcome.verdict("two_gpus").with_context(|| format!("over {transport:?}"))?;
        ensure!(outcome.stdout.contains("peers: 0 0"), "{}", outcome.stdout);
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
