//! What a program's steady state costs, in counts instead of times: a loop of calls that need no answer makes no round trip, however long it is.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{LIMIT, built, counter as counter_of, run};
use rgpu_tests::tree;

/// The counters that a client prints after `bench loop NAME count`, over a private server: a line for all, and one for each function of the driver API. Those of the runtime's functions tell the same
/// commands again.
fn stats(transport: &str, name: &str, count: u32) -> Result<Vec<String>> {
    stats_of(transport, "bench", &["loop", name, &count.to_string()])
}

/// The same for any program.
fn stats_of(transport: &str, program: &str, arguments: &[&str]) -> Result<Vec<String>> {
    let logs =
        tree::logs().join("round-trips").join(format!("{program}-{}-{transport}", arguments.join("-")));
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["run", "--backend", "software", "--transport", transport, "--log-dir"])
        .arg(&logs)
        .arg("--")
        .arg(built(program)?)
        .args(arguments)
        .env("RGPU_LIB_DIR", tree::guest_libraries())
        .env("RGPU_STATS", "1");
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict(program).is_ok(), "{program} {arguments:?} over {transport}: {outcome:?}");
    let lines = outcome.stderr.lines().filter_map(|line| line.strip_prefix("rgpu: stats: "));
    let runtimes = |line: &str| line.starts_with("cuda") || line.starts_with("__cuda");
    Ok(lines.filter(|line| !runtimes(line)).map(str::to_owned).collect())
}

/// One of the client's counters, for the whole process.
fn counter(transport: &str, name: &str, count: u32, counter: &str) -> Result<u64> {
    counter_of(stats(transport, name, count)?.first().context("no counters")?, counter)
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
fn synchronous_copies_between_a_kernel_and_work_beside_it_need_no_round_trip() -> Result<()> {
    no_round_trip("launch_and_copy")
}

#[test]
fn allocating_and_freeing_needs_no_round_trip() -> Result<()> {
    no_round_trip("alloc_free")
}

#[test]
fn what_a_call_takes_is_put_down_to_its_function() -> Result<()> {
    let lines = stats("local", "launches", 300)?;
    let launches = lines
        .iter()
        .find(|line| line.starts_with("cuLaunchKernel "))
        .context("no line for cuLaunchKernel")?;
    assert_eq!(counter_of(launches, "calls")?, 301, "{launches}");
    assert_eq!(counter_of(launches, "commands")?, 301, "{launches}");
    assert_eq!(counter_of(launches, "round_trips")?, 0, "{launches}");
    // What the functions took is no more than what the process took.
    for counter in ["commands", "round_trips", "doorbells", "system_calls", "copied_bytes"] {
        let sum = lines[1..].iter().map(|line| counter_of(line, counter)).sum::<Result<u64>>()?;
        assert!(sum <= counter_of(&lines[0], counter)?, "{counter}: {lines:#?}");
    }
    Ok(())
}

/// From its first call to its result a program waits four times: for what there is (the server and its device, asked together), for memory, for its code with all its functions'
/// parameters and attributes, and for the result. Queries of the device, its attributes, the functions and the limits are answered from what came with these.
#[test]
fn a_program_waits_four_times_from_its_first_call_to_its_result() -> Result<()> {
    for transport in ["local", "tcp"] {
        let lines = stats_of(transport, "vectorAdd", &[])?;
        let of = |line: &str, name| counter_of(line, name);
        let answered: Vec<&str> = lines[1..]
            .iter()
            .filter(|line| !matches!(of(line, "exchanges"), Ok(0)))
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(answered, ["cuMemAlloc_v2", "cuLibraryLoadData", "cuMemcpyDtoH_v2"], "{lines:#?}");
        // The session's own beginning is put down to no function.
        assert_eq!((of(&lines[0], "exchanges")?, of(&lines[0], "round_trips")?), (4, 5), "{lines:#?}");
    }
    Ok(())
}
