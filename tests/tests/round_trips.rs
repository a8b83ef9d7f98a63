//! What a program's steady state costs, in counts instead of times: a loop of calls that need no answer makes no round trip, however long it is.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{LIMIT, built, run};
use rgpu_tests::tree;

/// One of the client's counters after `bench loop NAME count`, over a private server.
fn counter(transport: &str, name: &str, count: u32, counter: &str) -> Result<u64> {
    let logs = tree::logs().join("round-trips").join(format!("{name}-{transport}-{count}"));
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["run", "--backend", "software", "--transport", transport, "--log-dir"])
        .arg(&logs)
        .arg("--")
        .arg(built("bench")?)
        .args(["loop", name, &count.to_string()])
        .env("RGPU_LIB_DIR", tree::guest_libraries())
        .env("RGPU_STATS", "1");
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict("bench").is_ok(), "{name} over {transport}: {outcome:?}");
    let stats =
        outcome.stderr.lines().find(|line| line.starts_with("rgpu: stats:")).context("no counters")?;
    let word = stats.split(' ').find_map(|word| word.strip_prefix(counter)?.strip_prefix('='));
    word.with_context(|| format!("no counter {counter} in {stats:?}"))?.parse().context("a counter")
}

fn no_round_trip(name: &str) -> Result<()> {
    for transport in ["local", "tcp"] {
        let few = counter(transport, name, 10, "round_trips")?;
        let many = counter(transport, name, 300, "round_trips")?;
        assert_eq!(
            few,
            many,
            "{name} over {transport}: 290 more of them made {} more round trips",
            many - few
        );
        // The counters do count: the calls themselves are there.
        if name != "event_queries" {
            let commands = counter(transport, name, 300, "commands")?;
            assert!(commands >= 300, "{name} over {transport}: {commands} commands for 300 calls");
        }
    }
    Ok(())
}

#[test]
fn launches_need_no_round_trip() -> Result<()> {
    no_round_trip("launches")
}

#[test]
fn async_copies_both_ways_need_no_round_trip() -> Result<()> {
    no_round_trip("async_copies")
}

#[test]
fn event_records_need_no_round_trip() -> Result<()> {
    no_round_trip("event_records")
}

#[test]
fn event_queries_need_no_round_trip() -> Result<()> {
    no_round_trip("event_queries")
}

#[test]
fn small_pageable_copies_to_the_device_need_no_round_trip() -> Result<()> {
    no_round_trip("small_pageable")
}

#[test]
fn allocating_and_freeing_needs_no_round_trip() -> Result<()> {
    no_round_trip("alloc_free")
}
