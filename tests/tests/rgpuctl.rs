//! The operator's command, as an operator runs it.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{LIMIT, run};
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
fn bench_says_what_is_missing_where_no_libcuda_is_installed() -> Result<()> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    let outcome = run(command.args(["bench", "--installed"]).env("LD_LIBRARY_PATH", "/nonexistent"), LIMIT)?;
    // A machine with a driver of its own has one.
    if outcome.status != Some(0) {
        assert!(outcome.stderr.contains("no libcuda.so.1 can be loaded"), "{outcome:?}");
    }
    Ok(())
}
