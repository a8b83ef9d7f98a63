//! Repeats the papers' two RDMA studies: bandwidth by size for 1 to 4 queue pairs, and bandwidth by queue
//! depth, next to perftest's own curves. Also compares rgpu with perftest, round by round.
//!
//! ```text
//!  one machine, booted here ─┬─ ib_write_bw, ib_write_lat                               ─┐
//!                            ├─ the layer's `verbs` example: h2d, d2h, ping              ├─ by turns ─▶ medians ─▶ verbs.md, verbs-*.svg
//!                            └─ a CUDA program through vhost-rgpu and rgpu-server        ─┘
//! ```
//!
//! [`bed`] is the machine and the measurements, [`report`] the text, [`plot`] the curves. `cargo xtask bench
//! --verbs` builds what this needs and runs it.
//!
//! Without a card, RoCE is in software, so the processor limits all speeds. Only the ratio between two lines
//! that are measured one after the other has a meaning.

mod bed;
mod plot;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::tree;

use bed::{Bed, Bulk, Cost, WAYS, field};

const USAGE: &str =
    "rdma-bench [--repetitions N] [--rounds N] [--out FOLDER]\n       rdma-bench --peers ROUNDS";
const SIZES: [u64; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const PAIRS: [u32; 4] = [1, 2, 3, 4];
const DEPTHS: [u32; 8] = [2, 4, 8, 16, 32, 64, 128, 256];
/// The transfer size for comparing depths: what one request of the study carries.
const DEPTH_SIZE: u64 = 64 << 10;
/// The transfer sizes of the rounds.
const ROUND_SIZES: [u64; 2] = [1 << 20, 4 << 20];
/// The sizes of copies between servers, and the bytes of one measurement of them.
const PEER_SIZES: [u64; 4] = [1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// The sizes of pieces.
const PIECE_SIZES: [u64; 2] = [256 << 10, 1 << 20];
const PEER_VOLUME: u64 = 64 << 20;
const DIRECTIONS: [&str; 2] = ["h2d", "d2h"];

/// A point of the studies: program, size, queue pairs, depth. The values are megabytes (10⁶) per second, one
/// for each repetition.
type Points = BTreeMap<(&'static str, u64, u32, u32), Vec<f64>>;

/// The programs whose bulk transfers a round measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    /// `ib_write_bw` with this many queue pairs.
    Perftest(u32),
    /// The same, each end on its own processor.
    Held(u32),
    /// The layer with this many queue pairs.
    Layer(u32, &'static str),
    /// A CUDA program, with two queue pairs.
    Program(&'static str),
}

/// The results of the rounds, one value for each round.
#[derive(Debug, Default)]
struct Rounds {
    bulk: BTreeMap<(u64, Who), Vec<Bulk>>,
    /// `ib_write_lat`, one way.
    one_way: Vec<f64>,
    /// A message and its answer over the layer.
    round_trip: Vec<f64>,
    /// Synchronous calls: way, name.
    calls: BTreeMap<(&'static str, &'static str), Vec<f64>>,
}

/// What the layer counted in one transfer of [`bed::VOLUME`] bytes in pieces of 1 MiB, by direction.
type Counts = BTreeMap<&'static str, [f64; 4]>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let (mut repetitions, mut rounds, mut out) = (3, 9, tree::root().join("docs/benchmarks"));
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().context(USAGE)?;
        match name.as_str() {
            "--repetitions" => repetitions = value.parse().context(USAGE)?,
            "--rounds" => rounds = value.parse().context(USAGE)?,
            "--out" => out = PathBuf::from(value),
            "--peers" => return peers(value.parse().context(USAGE)?),
            _ => bail!(USAGE),
        }
    }
    ensure!(repetitions > 0 && rounds > 0, "at least one repetition and one round");
    let bed = Bed::new()?;
    let (counts, cost) = (counts(&bed)?, bed.cost()?);
    eprintln!("{counts:?} {cost:?}");
    let mut found = Rounds::default();
    for number in 1..=rounds {
        eprintln!("round {number} of {rounds}");
        round(&bed, &mut found)?;
    }
    let mut points = Points::new();
    for repetition in 1..=repetitions {
        eprintln!("repetition {repetition} of {repetitions}");
        for pairs in PAIRS {
            for size in SIZES {
                point(&bed, &mut points, size, pairs, 128)?;
            }
        }
        for depth in DEPTHS {
            point(&bed, &mut points, DEPTH_SIZE, 2, depth)?;
        }
    }
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let study =
        report::Study { points: &points, rounds: &found, counts: &counts, cost: &cost, fast: bed.is_fast() };
    for (name, text) in report::files(&study) {
        std::fs::write(out.join(name), text).with_context(|| format!("cannot write {name}"))?;
    }
    println!("{}", out.join("verbs.md").display());
    Ok(())
}

/// Measures one point of the studies for all three lines.
fn point(bed: &Bed, points: &mut Points, size: u64, pairs: u32, depth: u32) -> Result<()> {
    let mut row = vec![("ib_write_bw", bed.perftest(size, pairs, depth, false, 0.0)?.rate)];
    for who in DIRECTIONS {
        row.push((who, bed.layer(who, size, pairs, depth)?.0.rate));
    }
    eprintln!("{:>8}, {pairs} queue pairs, depth {depth}: {row:.0?} MB/s", report::bytes(size));
    for (who, rate) in row {
        points.entry((who, size, pairs, depth)).or_default().push(rate);
    }
    Ok(())
}

/// Measures everything once, each measurement as short and as close to the next as possible, so that other
/// load on the host affects all of them alike.
fn round(bed: &Bed, found: &mut Rounds) -> Result<()> {
    for size in ROUND_SIZES {
        let mut note = |who: Who, bulk: Bulk| {
            eprintln!(
                "    {:>8} {who:?}: {:.1} MB/s, {:.2} processors",
                report::bytes(size),
                bulk.rate,
                bulk.busy
            );
            found.bulk.entry((size, who)).or_default().push(bulk);
        };
        for pairs in [1, 2] {
            // The kernel's time is reported only for the first size.
            let but = if size == ROUND_SIZES[0] { bed.perftest_start(pairs)? } else { 0.0 };
            note(Who::Perftest(pairs), bed.perftest(size, pairs, 128, false, but)?);
            if size == ROUND_SIZES[0] {
                note(Who::Held(pairs), bed.perftest(size, pairs, 128, true, but)?);
            }
            for what in DIRECTIONS {
                note(Who::Layer(pairs, what), bed.layer(what, size, pairs, 128)?.0);
                if pairs == 1 {
                    note(Who::Program(what), bed.copies(what, size)?);
                }
            }
        }
    }
    found.one_way.push(bed.perftest_latency()?);
    found.round_trip.push(bed.round_trip()?);
    for way in WAYS {
        for what in ["memory_info", "dtoh"] {
            let time = bed.call(way, what)?;
            eprintln!("    {what} over {way}: {time:.1} µs");
            found.calls.entry((way, what)).or_default().push(time);
        }
    }
    Ok(())
}

/// Compares copies from server to server with `ib_write_bw`, and prints a table.
fn peers(rounds: usize) -> Result<()> {
    ensure!(rounds > 0, "at least one round");
    let bed = Bed::new()?;
    bed.start_pair()?;
    let mut found: BTreeMap<(&str, u64), [Vec<f64>; 3]> = BTreeMap::new();
    let pieces = PIECE_SIZES.map(|size| ("pieces", size));
    let copies = PEER_SIZES.map(|size| ("copies", size));
    for round in 1..=rounds {
        for (what, size) in pieces.into_iter().chain(copies) {
            let theirs = bed.perftest(1 << 20, 1, 128, false, 0.0)?.rate;
            let (ours, connections) = match what {
                "pieces" => (bed.pieces(size, bed::VOLUME)?, 1),
                _ => {
                    let (bulk, connections) = bed.peer_copies(size, PEER_VOLUME)?;
                    (bulk.rate, connections)
                }
            };
            eprintln!(
                "{round}: {what} {}: {ours:.1} MB/s, ib_write_bw {theirs:.1}; connections: {connections}",
                report::bytes(size)
            );
            let row = found.entry((what, size)).or_default();
            row.iter_mut()
                .zip([ours, theirs, 100.0 * ours / theirs])
                .for_each(|(all, value)| all.push(value));
        }
    }
    println!(
        "| what | bytes of each | MB/s | `ib_write_bw`, MB/s | % of `ib_write_bw` |\n|---|---|---|---|---|"
    );
    for ((what, size), columns) in found {
        let [ours, theirs, share] = columns.map(|all| report::spread(all.into_iter(), 0, ""));
        println!("| {what} | {} | {ours} | {theirs} | {share} |", report::bytes(size));
    }
    Ok(())
}

fn counts(bed: &Bed) -> Result<Counts> {
    let mut counts = Counts::new();
    for what in DIRECTIONS {
        let (_, said) = bed.layer(what, 1 << 20, 2, 128)?;
        let all = [
            field(&said, "writes")?,
            field(&said, "placed")?,
            field(&said, "sent")?,
            field(&said, "received")?,
        ];
        counts.insert(what, all);
    }
    Ok(counts)
}
