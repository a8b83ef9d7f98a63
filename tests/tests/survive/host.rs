//! Programs of a host whose device process is killed and whose daemon is replaced, again and again.

use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;

use super::*;

/// Programs with commands, copies, host memory and threads, some with several processes.
const HOST_PROGRAMS: &[&str] =
    &["copies", "graph_host", "host_registration", "ipc_memory", "mapped_memory", "pinned_bulk", "threads"];

/// In turn, kills the device process of the running programs, if there is one, or makes the daemon execute
/// the installed program. Waits until others serve.
fn replace(host: &Daemon, number: u64) -> Result<bool> {
    let status = host.status()?;
    let keepers = |status: &serde_json::Value| status["keepers_before"].as_u64().unwrap_or(0);
    let restarts = |status: &serde_json::Value| status["device_processes_restarted"].as_u64().unwrap_or(0);
    if number.is_multiple_of(2) {
        host.signal(Signal::SIGUSR2)?;
        eventually(|| {
            ensure!(keepers(&host.status()?) > keepers(&status), "it was not upgraded");
            Ok(())
        })?;
        return Ok(true);
    }
    let serving = status["device_processes"].as_array().and_then(|rows| rows.first());
    let has_sessions = status["sessions"].as_array().is_some_and(|sessions| !sessions.is_empty());
    let Some(process) = serving.filter(|_| has_sessions).and_then(|row| row["process"].as_i64()) else {
        return Ok(false);
    };
    match kill(Pid::from_raw(i32::try_from(process)?), Signal::SIGKILL) {
        // Its programs have ended meanwhile, and so has it.
        Err(Errno::ESRCH) => return Ok(false),
        killed => killed?,
    }
    eventually(|| {
        let now = host.status()?;
        // All its programs may have ended meanwhile.
        let over = now["device_processes"].as_array().is_some_and(Vec::is_empty);
        ensure!(over || restarts(&now) > restarts(&status), "nobody serves its programs");
        Ok(())
    })?;
    Ok(true)
}

/// Runs a program while its host's processes end, and counts how often they do.
fn while_hosts_end(host: &Daemon, mut command: Command, name: &str, random: &mut Random) -> Result<u64> {
    let (mut ends, failed) = (0, Failed::default());
    let outcome = std::thread::scope(|scope| -> Result<_> {
        // Its session does not begin if the process ends while it waits for a worker.
        let running = scope.spawn(|| retry(&mut command, &failed));
        for number in 0.. {
            if running.is_finished() {
                break;
            }
            std::thread::sleep(failed.longer(Duration::from_millis(random.number() % 300)));
            ends += u64::from(replace(host, number)?);
        }
        running.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })?;
    outcome.verdict(name).map(|_| ends).with_context(|| format!("after {ends} ends"))
}

fn note(part: &str, runs: u64, ends: u64) -> Result<()> {
    let figures = format!(
        "{runs} programs run, device processes and daemons of their host ended {ends} times under them\n"
    );
    print!("{figures}");
    std::fs::write(tree::logs().join(part).join("figures"), figures)?;
    Ok(())
}

#[test]
fn programs_pass_while_their_hosts_processes_are_killed_and_upgraded() -> Result<()> {
    let mut rig = Rig::start("survive-host")?;
    rig.passes(Transport::Tcp, "vectorAdd", &[])?;
    let (most, mut random, mut ends, mut runs) = (most_cuts()?, Random(30), 0, 0);
    while runs == 0 || ends < most {
        for name in HOST_PROGRAMS {
            for transport in [Transport::Local, Transport::Tcp] {
                let command = rig.program(transport, name)?;
                ends += while_hosts_end(rig.bridge(transport), command, name, &mut random)
                    .with_context(|| format!("over {transport:?}"))?;
                runs += 1;
            }
        }
    }
    note("survive-host", runs, ends)?;
    rig.idle_holdings()?;
    rig.check_healthy()
}

#[test]
fn sessions_under_tls_continue_in_the_next_process_of_their_host() -> Result<()> {
    let (folder, logs) = (tempfile::tempdir()?, tree::logs().join("survive-tls"));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let listen = format!("tcp:127.0.0.1:{}", free_port()?);
    let (admin, client, socket) = (path("admin"), path("client"), path("native"));
    let of_server = ["--backend", "software", "--listen", &listen, "--identity", &path("server")];
    let of_server = [&of_server[..], &["--admin-socket", &admin]].concat();
    let status = folder.path().join("server.status");
    let _server = Daemon::start("rgpu-server", of_server, &logs.join("rgpu-server.log"), &status)?;
    let rgpuctl = |words: &[&str]| {
        programs::run(Command::new(tree::binaries().join("rgpuctl")).args(words), programs::LIMIT)
    };
    let enrolled = rgpuctl(&["enroll", "host1", "--socket", &admin])?;
    let mut words: Vec<&str> = enrolled.stdout.split_whitespace().skip(1).collect();
    words.extend(["--identity", &client]);
    let joined = rgpuctl(&words)?;
    ensure!(joined.status == Some(0), "{joined:?}");
    let of_host = ["--server", &listen, "--identity", &client, "--native-socket", &socket];
    let log = logs.join("vhost-rgpu.log");
    let host = Daemon::start("vhost-rgpu", of_host, &log, &folder.path().join("vhost-rgpu.status"))?;
    let (mut ends, mut runs, mut random) = (0, 0, Random(31));
    // Each of them once, and on until a session has gone on: no process may have ended just while there was
    // one.
    for name in SAMPLE.iter().cycle().take(50) {
        if runs >= SAMPLE.len() as u64 && host.log_text().contains("link restored") {
            break;
        }
        ends += while_hosts_end(&host, support::program(Path::new(&socket), name)?, name, &mut random)?;
        runs += 1;
    }
    let text = host.log_text();
    ensure!(
        text.contains("link restored") && !text.contains("insecure"),
        "no session was resumed under TLS:\n{text}"
    );
    note("survive-tls", runs, ends)
}
