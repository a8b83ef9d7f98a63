//! Counts what calls cost in a steady loop in a guest. Times in an emulated guest mean little, but a doorbell
//! is an exit there as anywhere else.
//!
//! `UPDATE_DOCS=1` writes the measured table to `docs/benchmarks/guest.md`.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rgpu_tests::guest::{self, Host, Options, PROGRAMS};
use rgpu_tests::machine::Machine;
use rgpu_tests::programs::counted;
use rgpu_tests::tree;

const LIMIT: Duration = Duration::from_secs(600);
/// Numbers of calls to compare. The difference excludes the program's start and end.
const CALLS: [u64; 2] = [100, 1100];
/// How many more commands one run may take than another: where answers take long, device memory is requested
/// ahead, and whether that happens varies from run to run.
const AHEAD: u64 = 4;
/// The loops of the program `bench`, what each does, and its calls per iteration.
const LOOPS: [(&str, &str, u64); 6] = [
    ("launches", "launch a kernel", 1),
    ("async_copies", "copy 4 KiB of pinned memory, asynchronously", 2),
    ("event_records", "record an event", 1),
    ("event_queries", "query an event", 1),
    ("small_pageable", "copy 1 KiB of pageable memory to the device", 1),
    ("alloc_free", "allocate or free 1 MiB", 2),
];
const COLUMNS: [&str; 6] =
    ["commands", "round_trips", "doorbells", "interrupts", "system_calls", "copied_bytes"];

/// The counters of `bench loop NAME count` in the guest, and the number of interrupts meanwhile.
fn counts(host: &Host, machine: &Machine, name: &str, count: u64) -> Result<Vec<u64>> {
    let raised = guest::interrupts(machine)?;
    let output = machine.run(&format!("RGPU_STATS=1 bench loop {name} {count}"), LIMIT)?;
    ensure!(output.success(), "{name}: {output}");
    host.settled()?;
    let raised = guest::interrupts(machine)? - raised;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let one = |column: &&str| if *column == "interrupts" { Ok(raised) } else { counted(&stderr, column) };
    COLUMNS.iter().map(one).collect()
}

/// Measures every loop over a transport. Returns the rows of the table.
fn measure(transport: &'static str) -> Result<String> {
    // Long enough that a busy machine does not cause doorbells by preempting a thread.
    let options = Options { poll_us: Some(1000), ..Options::software(transport) };
    let host = Host::start(&format!("guest-counts/{transport}"), options)?;
    let bench = tree::programs().join("bench");
    let machine =
        guest::builder(&[]).file(bench, format!("{PROGRAMS}/bench")).rgpu_socket(host.socket()).boot()?;
    let mut rows = String::new();
    for (name, what, calls) in LOOPS {
        let few = counts(&host, &machine, name, CALLS[0])?;
        let many = counts(&host, &machine, name, CALLS[1])?;
        let more: Vec<u64> = few.iter().zip(&many).map(|(few, many)| many.saturating_sub(*few)).collect();
        let turns = CALLS[1] - CALLS[0];
        println!(
            "{transport}: {name}: {turns} more turns took {:?}",
            COLUMNS.iter().zip(&more).collect::<Vec<_>>()
        );
        let of = |column: &str| more[COLUMNS.iter().position(|name| *name == column).unwrap_or(usize::MAX)];
        ensure!(of("round_trips") == 0, "{name} over {transport}: {} round trips", of("round_trips"));
        match name {
            "event_queries" => ensure!(of("commands") <= AHEAD, "{name}: {} commands", of("commands")),
            "small_pageable" => {
                ensure!(of("copied_bytes") == turns * 1024, "{name}: {} bytes copied", of("copied_bytes"))
            }
            _ => {
                ensure!(
                    of("commands") + AHEAD >= turns * calls,
                    "{name}: {} commands for {turns} turns",
                    of("commands")
                );
                ensure!(
                    of("copied_bytes") == 0,
                    "{name} over {transport}: {} bytes copied in the guest",
                    of("copied_bytes")
                );
            }
        }
        let _ = write!(rows, "| {what} | {transport} |");
        for value in &more {
            let _ = write!(rows, " {} |", per_call(*value, turns * calls));
        }
        rows.push('\n');
    }
    machine.check_console()?;
    Ok(rows)
}

fn per_call(value: u64, calls: u64) -> String {
    if value.is_multiple_of(calls) {
        (value / calls).to_string()
    } else {
        format!("{:.3}", value as f64 / calls as f64)
    }
}

#[test]
fn steady_calls_need_no_round_trip_and_pinned_copies_no_copy_in_a_guest() -> Result<()> {
    let mut text = format!(
        "# What a call costs in a guest\n\n\
         Of each call, in a loop of {} turns less one of {}: what the client counts (`RGPU_STATS=1`), and the interrupts that the device raised. A doorbell is \
         an exit. The guest is emulated (QEMU, TCG), both daemons run on its two processors with `--poll-us 1000`, and the GPU is one in software. Made by \
         `UPDATE_DOCS=1 cargo xtask test guest_counts`, which also checks that no call needs a round trip and that pinned memory is not copied.\n\n| call | transport |",
        CALLS[1], CALLS[0]
    );
    for column in COLUMNS {
        let _ = write!(text, " {} |", column.replace('_', " "));
    }
    let _ = writeln!(text, "\n|---|---|{}", "---|".repeat(COLUMNS.len()));
    for transport in ["local", "tcp"] {
        text += &measure(transport)?;
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(tree::root().join("docs/benchmarks/guest.md"), text)
            .context("cannot write the page")?;
    }
    Ok(())
}
