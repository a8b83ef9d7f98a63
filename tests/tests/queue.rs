//! Programs that start together, many of them or while creating contexts is slow. They wait, say so, and are
//! served, also if the server's daemon ends meanwhile. NVML queries do not wait.

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rgpu_tests::programs::{self, Outcome};
use support::{Ended, Rig, TRANSPORTS, Transport, eventually};

/// Runs this many copies of a program at once.
fn together(rig: &Rig, transport: Transport, name: &str, count: usize) -> Result<Vec<Outcome>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..count)
            .map(|_| scope.spawn(|| programs::run(&mut rig.program(transport, name)?, programs::LIMIT)))
            .collect();
        running
            .into_iter()
            .map(|program| program.join().unwrap_or_else(|_| anyhow::bail!("a thread of the test failed")))
            .collect()
    })
}

/// Half of them over each transport, on one server. All of them have had a result, and keep their sessions,
/// before they go on together with `RGPU_TURNS` turns each.
#[test]
fn a_hundred_and_twenty_eight_programs_at_once_are_all_served() -> Result<()> {
    const PROGRAMS: u64 = 128;
    let more: u64 = std::env::var("RGPU_TURNS").map_or(Ok(100), |number| number.parse())?;
    let mut rig = Rig::with("queue-many", &["--software-memory", "64M"], &[])?;
    let start = |number| {
        let transport = TRANSPORTS[number as usize % TRANSPORTS.len()];
        let mut command = rig.program(transport, "turns")?;
        // On their standard error, all of them say that they wait.
        command.arg("wait").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Ended(command.spawn()?))
    };
    let mut programs = (0..PROGRAMS).map(start).collect::<Result<Vec<Ended>>>()?;
    let mut outputs = Vec::new();
    for Ended(program) in &mut programs {
        let mut output = BufReader::new(program.stdout.take().context("no standard output")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line.starts_with("FIRST "), "a program has no result: {line:?}");
        outputs.push(output);
    }
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().map(|sessions| sessions.len() as u64);
    ensure!(sessions == Some(PROGRAMS), "{sessions:?} at the same time");
    for Ended(program) in &mut programs {
        writeln!(program.stdin.take().context("no standard input")?, "{more}")?;
    }
    for (Ended(program), mut output) in programs.iter_mut().zip(outputs) {
        let mut last = String::new();
        output.read_to_string(&mut last)?;
        ensure!(last == format!("PASS turns {} turns\n", more + 1), "{last:?}");
        ensure!(program.wait()?.success(), "a program failed");
    }
    eventually(|| {
        let status = rig.server.status()?;
        let counted = ["sessions_begun", "sessions_lost", "workers_crashed", "sessions_waiting"];
        let counted = counted.map(|name| status[name].as_u64());
        ensure!(counted == [Some(PROGRAMS), Some(0), Some(0), Some(0)], "{status}");
        ensure!(status["sessions"].as_array().is_some_and(Vec::is_empty), "{status}");
        Ok(())
    })?;
    rig.check_healthy()
}

#[test]
fn programs_report_that_they_wait_in_the_queue() -> Result<()> {
    // At most as many contexts are created at a time as there are processors, so the last programs wait for
    // several.
    let processors = std::thread::available_parallelism().map_or(1, usize::from).max(2);
    // No worker is ready, so even a program that a busy machine starts after all others were served has to
    // wait.
    let rig = Rig::with("queue", &["--workers", "0", "--software-imitate", "context-ms=3000"], &[])?;
    for transport in TRANSPORTS {
        let outcomes = together(&rig, transport, "vectorAdd", 3 * processors)?;
        for outcome in &outcomes {
            outcome.verdict("vectorAdd")?;
        }
        let waited = outcomes.iter().any(|outcome| {
            outcome.stderr.contains("rgpu: waiting for a GPU session on ")
                && outcome.stderr.contains(" ahead of this program")
                && outcome.stderr.contains("rgpu: the GPU session on ")
        });
        ensure!(waited, "over {transport:?}: no program said that it waited: {outcomes:?}");
    }
    Ok(())
}

#[test]
fn nvml_works_without_a_context_while_programs_wait() -> Result<()> {
    let rig = Rig::with("queue-nvml", &["--workers", "0", "--software-imitate", "context-ms=600000"], &[])?;
    for transport in TRANSPORTS {
        let mut waiting = rig.program(transport, "vectorAdd")?.spawn()?;
        eventually(|| {
            let status = rig.server.status()?;
            ensure!(status["sessions_waiting"] == 1, "{status}");
            Ok(())
        })?;
        rig.passes(transport, "nvml_questions", &[])?;
        waiting.kill()?;
        waiting.wait()?;
        eventually(|| {
            let status = rig.server.status()?;
            ensure!(status["sessions_waiting"] == 0, "a killed program waits still: {status}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn programs_that_wait_are_served_by_the_servers_next_daemon() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("server.toml");
    // Contexts take so long that all programs wait until a daemon has begun that read the other file.
    let [slow, fast] = ["[software]\nimitate = \"context-ms=600000\"\n", ""];
    std::fs::write(&config, slow)?;
    let arguments = ["--workers", "0", "--config", &config.display().to_string()];
    let mut rig = Rig::with("queue-ended", &arguments, &[])?;
    for upgraded in [false, true] {
        let programs = TRANSPORTS.map(|transport| rig.program(transport, "vectorAdd"));
        std::thread::scope(|scope| {
            let running =
                programs.map(|program| scope.spawn(|| programs::run(&mut program?, programs::LIMIT)));
            eventually(|| {
                let status = rig.server.status()?;
                ensure!(status["sessions_waiting"] == TRANSPORTS.len(), "{status}");
                Ok(())
            })?;
            std::fs::write(&config, fast)?;
            match upgraded {
                false => rig.crash_server()?,
                true => rig.server.signal(Signal::SIGUSR2)?,
            }
            for program in running {
                let outcome = program.join().unwrap_or_else(|_| anyhow::bail!("a thread of the test failed"));
                outcome?.verdict("vectorAdd").with_context(|| format!("upgraded: {upgraded}"))?;
            }
            anyhow::Ok(())
        })?;
        std::fs::write(&config, slow)?;
        rig.restart_server_with(&[])?;
    }
    rig.check_healthy()
}
