//! The operator's command, as an operator runs it.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{LIMIT, built, run};
use rgpu_tests::tree;
use serde_json::Value;

/// What `rgpuctl bench --json` prints for a private server with a GPU in software.
fn bench(transport: &str) -> Result<Value> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["bench", "--json", "--largest", "1", "--backend", "software", "--transport", transport])
        .env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.status == Some(0), "bench over {transport}: {outcome:?}");
    serde_json::from_str(&outcome.stdout).with_context(|| format!("no JSON: {:?}", outcome.stdout))
}

#[test]
fn bench_measures_calls_and_copies_over_both_transports() -> Result<()> {
    for transport in ["local", "tcp"] {
        let figures = bench(transport)?;
        for name in [
            "launch",
            "launch and synchronize",
            "64 B to host",
            "pinned to device, 1 MiB",
            "pageable to host, 4 KiB",
        ] {
            let median = figures["rgpu"][name]["median"].as_f64();
            assert!(median.is_some_and(|figure| figure > 0.0), "{name} over {transport}: {figures}");
        }
    }
    Ok(())
}

#[test]
fn bench_reports_a_missing_libcuda() -> Result<()> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    let outcome = run(command.args(["bench", "--installed"]).env("LD_LIBRARY_PATH", "/nonexistent"), LIMIT)?;
    // A machine with a driver of its own has one.
    if outcome.status != Some(0) {
        assert!(outcome.stderr.contains("cannot load libcuda.so.1"), "{outcome:?}");
    }
    Ok(())
}

/// One line of `rgpuctl trace`'s table: an operation's count, and its times; none where the stage does not exist.
fn traced(transport: &str, operation: &str) -> Result<(u64, Vec<Option<f64>>)> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["trace", "--backend", "software", "--transport", transport, "--"])
        .arg(built("bench")?)
        .args(["loop", "launches", "100"])
        .env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict("bench").is_ok(), "{outcome:?}");
    let line = outcome.stderr.lines().find(|line| line.split_whitespace().next() == Some(operation));
    let line = line.with_context(|| format!("no {operation} over {transport}:\n{}", outcome.stderr))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    Ok((words[1].parse()?, words[2..].iter().map(|word| word.parse().ok()).collect()))
}

#[test]
fn trace_shows_the_stages_of_commands_in_every_process() -> Result<()> {
    // Total; taken, received, begun, executed, answered, delivered, woken.
    let local = [true, false, false, true, true, true, false, true];
    for (transport, stages) in [("local", local), ("tcp", [true; 8])] {
        let (count, times) = traced(transport, "stream_synchronize")?;
        let there: Vec<bool> = times.iter().map(Option::is_some).collect();
        assert_eq!((count, there.as_slice()), (1, &stages[..]), "over {transport}: {times:?}");
        // The parts of one command's time are its whole time.
        let parts: f64 = times[1..].iter().flatten().sum();
        assert!((parts - times[0].unwrap_or(0.0)).abs() < 1.0, "over {transport}: {times:?}");
        let (count, times) = traced(transport, "launch")?;
        assert!(count == 101 && times[4].is_some() && times[5].is_none(), "over {transport}: {times:?}");
    }
    Ok(())
}

#[test]
fn a_private_server_starts_no_unused_worker() -> Result<()> {
    let logs = tree::logs().join("rgpuctl-private");
    for transport in ["local", "tcp"] {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command
            .args(["run", "--backend", "software", "--transport", transport, "--log-dir"])
            .arg(&logs)
            .arg("--")
            .arg(built("vectorAdd")?)
            .env("RGPU_LIB_DIR", tree::guest_libraries());
        run(&mut command, LIMIT)?.verdict("vectorAdd")?;
        let log = std::fs::read_to_string(logs.join("rgpu-server.log"))?;
        ensure!(log.contains("session begins") && log.contains("session ends"), "over {transport}:\n{log}");
        // When it was told to end, it had no worker left to end.
        ensure!(!log.contains("workers that had no session"), "over {transport}:\n{log}");
    }
    Ok(())
}
