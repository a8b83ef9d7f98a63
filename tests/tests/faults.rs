//! Programs, workers, servers and bridges are killed in the middle of their work, servers are missing or are
//! not rgpu servers, and limits are reached: everything else must continue to work.

mod support;

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::link::{MAGIC, Welcome};
use protocol::version::{OURS, VERSION, Version};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{self, Outcome};
use rgpu_tests::tree;
use support::{Idle, PATIENCE, Rig, Running, TRANSPORTS, Transport, eventually, program, told_beside_waits};
use zerocopy::{FromZeros, IntoBytes};

/// Number of programs to kill: half of them over each transport, half of them in each state.
const KILLS: usize = 100;

#[test]
fn a_hundred_programs_killed_in_copies_and_kernels_leave_nothing_behind() -> Result<()> {
    let mut rig = Rig::start("faults-kill")?;
    let kill_one = |rig: &Rig, index: usize| -> Result<()> {
        let transport = TRANSPORTS[index % 2];
        let state = ["copy", "kernel"][index / 2 % 2];
        let running = Running::start(rig.program(transport, "kill_me")?.arg(state), "RUNNING")?;
        // At different points of the copy.
        std::thread::sleep(Duration::from_millis(index as u64 % 7));
        running.kill()
    };
    // The first ones fill caches.
    for index in 0..8 {
        kill_one(&rig, index)?;
    }
    let before = rig.idle_holdings()?;
    for index in 0..KILLS {
        kill_one(&rig, index).with_context(|| format!("program {index}"))?;
    }
    rig.check_left_nothing(&before)?;
    for transport in TRANSPORTS {
        rig.passes(transport, "copies", &[])?;
    }
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

#[test]
fn programs_killed_all_at_once_leave_nothing_behind() -> Result<()> {
    let mut rig = Rig::start("faults-kill-many")?;
    let crowd = |rig: &Rig, count: usize| -> Result<()> {
        let mut running = Vec::new();
        for index in 0..count {
            let mut command = rig.program(TRANSPORTS[index % 2], "kill_me")?;
            running.push(Running::start(command.arg("copy"), "RUNNING")?);
        }
        running.into_iter().try_for_each(Running::kill)
    };
    crowd(&rig, 4)?;
    let before = rig.idle_holdings()?;
    crowd(&rig, 10)?;
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

/// Checks that a program whose server is gone has ended by itself with one line on stderr that contains
/// `why`.
fn told(ended: (Option<i32>, String), why: &str) -> Result<()> {
    let (status, errors) = ended;
    ensure!(status == Some(1), "exit status {status:?}: {errors}");
    let lines = told_beside_waits(&errors);
    ensure!(
        lines.len() == 1 && lines[0].starts_with("rgpu: ") && lines[0].contains(why),
        "{why:?} is not in {errors:?}"
    );
    Ok(())
}

/// The worker of a program's only session. Ended programs' sessions may still be listed.
fn worker_of(rig: &Rig, program: &str) -> Result<Pid> {
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    let session = sessions.iter().find(|session| session["program"] == program);
    let worker = session.and_then(|session| session["worker"].as_i64());
    Ok(Pid::from_raw(i32::try_from(worker.with_context(|| format!("{program} has no worker: {status}"))?)?))
}

#[test]
fn a_worker_that_is_killed_costs_one_session() -> Result<()> {
    let mut rig = Rig::start("faults-worker")?;
    for transport in TRANSPORTS {
        rig.passes(transport, "vectorAdd", &[])?;
    }
    let before = rig.idle_holdings()?;
    for transport in TRANSPORTS {
        for state in ["copy", "kernel", "queue"] {
            let killed = || rig.server.log_text().matches("its worker was killed by signal 9").count();
            let before = killed();
            let running = Running::start(rig.program(transport, "kill_me")?.arg(state), "RUNNING")?;
            kill(worker_of(&rig, "kill_me")?, Signal::SIGKILL)?;
            told(running.ended()?, "is lost")?;
            // The program may notice before the server has seen that the worker ended. The next program must
            // not be taken for this one.
            eventually(|| {
                ensure!(killed() == before + 1, "{}", rig.server.log_text());
                ensure!(worker_of(&rig, "kill_me").is_err(), "the session is still listed");
                Ok(())
            })?;
            rig.passes(transport, "vectorAdd", &[])?;
        }
    }
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}

/// A killed server's sessions end with it. Over the network, that looks the same as a link that is down until
/// the server is back.
#[test]
fn a_server_that_is_killed_and_comes_back_serves_the_next_program() -> Result<()> {
    let mut rig = Rig::start("faults-server")?;
    for round in 0..3 {
        let start = |transport| Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING");
        let (local, tcp) = (start(Transport::Local)?, start(Transport::Tcp)?);
        rig.server.signal(Signal::SIGKILL)?;
        rig.server.wait(PATIENCE)?;
        told(local.ended()?, "is lost").with_context(|| format!("round {round}"))?;
        // First without a server and then with one, through the same bridges.
        for transport in TRANSPORTS {
            let outcome = programs::run(&mut rig.program(transport, "vectorAdd")?, programs::LIMIT)?;
            refused(&outcome, "cannot be reached", "cudaErrorDevicesUnavailable (46)")?;
        }
        rig.restart_server()?;
        let (status, errors) = tcp.ended()?;
        // Earlier lines may say that the program waits. The worker may have said why it ended.
        let last = errors.lines().last().unwrap_or_default().to_owned();
        let why = ["rgpu-server has ended", "no session has this token"];
        let why = why.iter().find(|why| last.contains(**why)).unwrap_or(&why[0]);
        told((status, last), why).with_context(|| format!("round {round}"))?;
        for transport in TRANSPORTS {
            rig.passes(transport, "vectorAdd", &[])?;
        }
    }
    rig.check_healthy()
}

#[test]
fn a_bridge_that_is_killed_and_comes_back_serves_the_next_program() -> Result<()> {
    // The server keeps the session of a lost bridge this long. A busy machine may take some seconds to bring
    // back a link.
    let mut rig = Rig::with("faults-bridge", &["--grace-seconds", "20"], &[])?;
    for transport in TRANSPORTS {
        rig.passes(transport, "vectorAdd", &[])?;
        let running = Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING")?;
        rig.restart_bridge(transport)?;
        told(running.ended()?, "vhost-rgpu")?;
        rig.passes(transport, "copies", &[])?;
    }
    rig.idle_holdings()?;
    rig.check_healthy()
}

/// Checks that a program ended with CUDA's error `code` and exactly one line on stderr, which contains `why`.
fn refused(outcome: &Outcome, why: &str, code: &str) -> Result<()> {
    let lines = told_beside_waits(&outcome.stderr);
    ensure!(
        lines.len() == 1 && lines[0].starts_with("rgpu: ") && lines[0].contains(why),
        "not exactly one line with {why:?}: {outcome:?}"
    );
    ensure!(outcome.status == Some(1) && outcome.stdout.contains(code), "no {code}: {outcome:?}");
    Ok(())
}

/// Runs `vectorAdd` against a socket and checks how it was refused.
fn refusal_at(socket: &Path, why: &str, code: &str) -> Result<()> {
    refused(&programs::run(&mut program(socket, "vectorAdd")?, programs::LIMIT)?, why, code)
}

#[test]
fn without_a_bridge_the_program_says_what_to_start() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let nowhere = folder.path().join("native.sock");
    refusal_at(&nowhere, "start vhost-rgpu", "cudaErrorNoDevice (100)")?;
    let file = folder.path().join("file");
    std::fs::write(&file, "not a socket")?;
    refusal_at(&file, "not vhost-rgpu's socket for programs", "cudaErrorDevicesUnavailable (46)")?;
    // A socket whose daemon has ended.
    let stale = folder.path().join("stale");
    drop(UnixListener::bind(&stale)?);
    refusal_at(&stale, "nobody listens: start vhost-rgpu", "(46)")?;
    // A socket of another kind: the server's instead of the bridge's.
    let mut rig = Rig::start("faults-wrong-socket")?;
    refusal_at(&rig.server_socket(), "not vhost-rgpu's socket for programs", "(46)")?;
    rig.check_healthy()
}

/// A bridge whose server is at `address`.
fn bridge_to(folder: &Path, name: &str, address: &str) -> Result<(Daemon, std::path::PathBuf)> {
    let socket = folder.join("native.sock");
    let arguments = ["--insecure", "--server", address, "--native-socket", &socket.display().to_string()]
        .map(str::to_owned);
    let log = tree::logs().join(name).join("vhost-rgpu.log");
    Ok((Daemon::start("vhost-rgpu", arguments, &log, &folder.join("status"))?, socket))
}

/// A listener that answers every connection with some bytes.
fn answering(bytes: Vec<u8>) -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // The bridge may close the connection early.
            let _ = stream.and_then(|mut stream| {
                std::io::Read::read_exact(&mut stream, &mut [0; size_of::<protocol::link::Hello>()])?;
                stream.write_all(&bytes)
            });
        }
    });
    Ok(port)
}

#[test]
fn an_unreachable_or_incompatible_server_is_named_in_one_line() -> Result<()> {
    let unavailable = "cudaErrorDevicesUnavailable (46)";
    let free = free_port()?;
    let next = Version { major: VERSION.major + 1, minor: 0 };
    let other = Welcome { magic: MAGIC, version: next, ..Welcome::new_zeroed() };
    let version = format!("version {next} of rgpu, this host speaks version {VERSION}");
    let other_build = Welcome { version: VERSION, fingerprint: !OURS.fingerprint(), ..other };
    let missing = "/nonexistent/server.sock";
    let cases = [
        (format!("tcp:127.0.0.1:{free}"), format!("127.0.0.1:{free}"), unavailable),
        (format!("unix:{missing}"), missing.to_owned(), unavailable),
        (format!("tcp:127.0.0.1:{}", answering(other.as_bytes().to_vec())?), version.clone(), ""),
        // The welcome of another version may be shorter.
        (format!("tcp:127.0.0.1:{}", answering(other.as_bytes()[..12].to_vec())?), version, ""),
        (
            format!("tcp:127.0.0.1:{}", answering(other_build.as_bytes().to_vec())?),
            "different sources".to_owned(),
            "",
        ),
        (
            format!("tcp:127.0.0.1:{}", answering(b"HTTP/1.1 400 Bad Request\r\n".repeat(20))?),
            "no rgpu-server".to_owned(),
            unavailable,
        ),
    ];
    for (number, (address, why, code)) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir()?;
        let (bridge, socket) = bridge_to(folder.path(), &format!("faults-no-server-{number}"), &address)?;
        refusal_at(&socket, &why, code).with_context(|| address.clone())?;
        eventually(|| {
            let log = bridge.log_text();
            ensure!(log.contains(&why), "{why:?} is not in the bridge's log:\n{log}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn sigterm_ends_both_daemons_with_their_sockets() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut rig = Rig::start("faults-sigterm")?;
        let running = TRANSPORTS
            .map(|transport| Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING"));
        let sockets = [rig.server_socket(), rig.socket(Transport::Local), rig.socket(Transport::Tcp)];
        ensure!(sockets.iter().all(|socket| socket.exists()), "not all sockets are there: {sockets:?}");
        for daemon in [&mut rig.local, &mut rig.tcp, &mut rig.server] {
            daemon.signal(signal)?;
            let status = daemon.wait(PATIENCE)?;
            ensure!(status.success(), "{signal}: {status}\n{}", daemon.log_text());
        }
        ensure!(!sockets.iter().any(|socket| socket.exists()), "sockets are left: {sockets:?}");
        for running in running {
            told(running?.ended()?, "is lost")?;
        }
    }
    Ok(())
}

#[test]
fn a_server_that_gets_sigterm_lets_programs_finish() -> Result<()> {
    let mut rig = Rig::with("faults-drain", &["--drain-seconds", "600"], &[])?;
    let programs = TRANSPORTS.map(|transport| Idle::start(&rig, transport));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    rig.server.signal(Signal::SIGTERM)?;
    eventually(|| {
        ensure!(rig.server.status()?["draining"] == true, "the server is not about to end");
        Ok(())
    })?;
    programs.into_iter().try_for_each(Idle::passes)?;
    ensure!(rig.server.wait(PATIENCE)?.success(), "{}", rig.server.log_text());
    Ok(())
}

/// A running `rgpuctl drain` that the server has received.
struct Draining(std::process::Child);

impl Draining {
    fn start(rig: &Rig, within: u32) -> Result<Draining> {
        let mut command = std::process::Command::new(tree::binaries().join("rgpuctl"));
        command.args(["drain", "--within", &within.to_string(), "--socket"]).arg(rig.server_admin());
        let child = command.stdout(std::process::Stdio::piped()).spawn().context("cannot start rgpuctl")?;
        eventually(|| {
            // A server that has ended does not answer.
            let left = rig.server.status().map(|status| status["drain_seconds_left"].as_u64());
            let obeys = left.map_or(true, |left| left.is_some_and(|left| left <= within.into()));
            ensure!(obeys, "the server does not drain within {within} s");
            Ok(())
        })?;
        Ok(Draining(child))
    }

    /// Returns its exit status and output.
    fn ended(self) -> Result<(Option<i32>, String)> {
        let output = self.0.wait_with_output()?;
        Ok((output.status.code(), String::from_utf8(output.stdout)?))
    }
}

#[test]
fn a_server_that_drains_lets_programs_finish_and_begins_no_session() -> Result<()> {
    let mut rig = Rig::with("faults-drain-finish", &["--drain-seconds", "1"], &[])?;
    let programs = TRANSPORTS.map(|transport| Idle::start(&rig, transport));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    let draining = Draining::start(&rig, 100_000)?;
    for transport in TRANSPORTS {
        let outcome = programs::run(&mut rig.program(transport, "vectorAdd")?, programs::LIMIT)?;
        let refused = outcome.stderr.contains("shutting down");
        ensure!(outcome.status == Some(1) && refused, "a program began: {outcome:?}");
    }
    let pids = programs.iter().map(Idle::pid).collect::<Vec<_>>();
    programs.into_iter().try_for_each(Idle::passes)?;
    let (status, said) = draining.ended()?;
    // It returns when the server has ended: only the process's exit status remains to be collected.
    ensure!(!rig.server_socket().exists(), "the server still listens");
    ensure!(rig.server.wait(PATIENCE)?.success(), "{}", rig.server.log_text());
    ensure!(status == Some(0) && said.contains("2 sessions finished, 0 lost, 0 ended"), "{status:?}: {said}");
    for pid in pids {
        let line = said.lines().find(|line| line.contains(&format!("idle (process {pid} of ")));
        ensure!(line.is_some_and(|line| line.contains("has finished")), "{pid} in {said}");
    }
    Ok(())
}

#[test]
fn a_server_that_drains_ends_sessions_when_the_time_is_over() -> Result<()> {
    let mut rig = Rig::start("faults-drain-end")?;
    let programs =
        TRANSPORTS.map(|transport| Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING"));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    let patient = Draining::start(&rig, 100_000)?;
    // A second drain of the same server, with another deadline.
    let hurried = Draining::start(&rig, 0)?;
    for program in programs {
        let (status, errors) = program.ended()?;
        ensure!(status == Some(1) && errors.contains("is lost"), "{errors:?}");
    }
    for draining in [hurried, patient] {
        let (status, said) = draining.ended()?;
        let all = said.matches("was ended: its time was over").count() == 2
            && said.contains("0 sessions finished, 0 lost, 2 ended");
        ensure!(status == Some(3) && all, "{status:?}: {said}");
    }
    ensure!(rig.server.wait(PATIENCE)?.success(), "{}", rig.server.log_text());
    Ok(())
}

#[test]
fn a_draining_server_reports_a_lost_session() -> Result<()> {
    let mut rig = Rig::start("faults-drain-lost")?;
    let running = Running::start(rig.program(Transport::Tcp, "kill_me")?.arg("copy"), "RUNNING")?;
    let worker = worker_of(&rig, "kill_me")?;
    let draining = Draining::start(&rig, 100_000)?;
    kill(worker, Signal::SIGKILL)?;
    told(running.ended()?, "is lost")?;
    let (status, said) = draining.ended()?;
    ensure!(status == Some(3) && said.contains("was lost: the worker of this session"), "{status:?}: {said}");
    ensure!(rig.server.wait(PATIENCE)?.success(), "{}", rig.server.log_text());
    Ok(())
}

#[test]
fn a_server_without_sessions_drains_at_once() -> Result<()> {
    let mut rig = Rig::start("faults-drain-idle")?;
    let (status, said) = Draining::start(&rig, 100_000)?.ended()?;
    ensure!(status == Some(0) && said.contains("0 sessions finished"), "{status:?}: {said}");
    ensure!(rig.server.wait(PATIENCE)?.success(), "{}", rig.server.log_text());
    Ok(())
}

#[test]
fn draining_a_missing_server_reports_what_to_check() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = std::process::Command::new(tree::binaries().join("rgpuctl"));
    let outcome =
        programs::run(command.args(["drain", "--socket"]).arg(folder.path().join("none")), programs::LIMIT)?;
    ensure!(outcome.status == Some(125) && outcome.stderr.contains("--admin-socket"), "{outcome:?}");
    Ok(())
}

#[test]
fn refusals_name_the_limit_that_was_hit() -> Result<()> {
    let mut rig = Rig::with(
        "faults-limits",
        &["--max-sessions", "2", "--memory-limit", "64M"],
        &["--max-channels", "3"],
    )?;
    let first = [Transport::Local, Transport::Tcp]
        .map(|transport| Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING"));
    let first: Vec<Running> = first.into_iter().collect::<Result<_>>()?;
    for transport in TRANSPORTS {
        let outcome = programs::run(&mut rig.program(transport, "vectorAdd")?, programs::LIMIT)?;
        refused(&outcome, "--max-sessions", "")?;
    }
    first.into_iter().try_for_each(Running::kill)?;
    rig.idle_holdings()?;
    for transport in TRANSPORTS {
        rig.passes(transport, "vectorAdd", &[])?;
        // More device memory than a session may have: the program gets CUDA's error and continues.
        let outcome =
            programs::run(rig.program(transport, "kill_me")?.args(["copy", "--full"]), programs::LIMIT)?;
        ensure!(
            outcome.status == Some(1) && outcome.stdout.contains("cudaErrorMemoryAllocation (2)"),
            "{outcome:?}"
        );
        rig.passes(transport, "vectorAdd", &[])?;
    }
    rig.check_healthy()
}
