//! `rgpuctl bench`: measures the latency of calls and the bandwidth of copies on this installation, as a
//! program sees them.
//!
//! ```text
//!  rgpuctl bench ──▶ rgpuctl bench --measure   a client of rgpu: its libcuda comes first in LD_LIBRARY_PATH
//!                └─▶ rgpuctl bench --measure   with --native: the libcuda that this machine has
//! ```
//!
//! The measuring process is an ordinary program of the driver API ([`measure`]), and the same for both.

mod measure;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, IsTerminal};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};

use crate::daemon::{describe, end_with_parent};
use crate::session::{Session, Target};

/// Measure the latency of calls and the bandwidth of copies on this installation.
///
/// Prints latencies in microseconds and copies in GB/s: the median, and the 10th and 90th percentile. Copies
/// carry random data, which is compared with what comes back; a difference fails the run. Below the table are
/// the consequences for programs: how long each wait for the GPU takes, and how long it takes to copy a
/// model's data.
///
/// Without --server, a private server is started that uses this machine's GPU or a GPU in software.
#[derive(Args)]
#[command(after_long_help = "Examples:
  rgpuctl bench --server gpu7.example               with a GPU server on the network
  rgpuctl bench --native                            also with this machine's own GPU, with the ratio to it
  rgpuctl bench --installed                         inside a guest, or wherever rgpu is installed for all programs")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Start no daemon. Use the libcuda that programs find in this environment, such as in a guest
    #[arg(long, conflicts_with_all = ["servers", "pool", "gpus", "backend", "transport", "log_dir", "native"])]
    installed: bool,
    /// Also measure NVIDIA's driver on this machine, and show the ratio to it
    #[arg(long)]
    native: bool,
    /// Size of the largest copy, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    largest: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Run as the measuring process.
    #[arg(long, hide = true)]
    measure: bool,
}

/// Erases the progress line.
const ERASE: &str = "\r\x1b[K";

/// One line of output of the measuring process.
#[derive(Debug, PartialEq)]
struct Measurement {
    name: String,
    unit: String,
    median: f64,
    low: f64,
    high: f64,
}

/// Measures and prints.
pub fn bench(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.measure {
        measure::measure(arguments.largest << 20)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut ways = Vec::new();
    if arguments.installed {
        ways.push(("here", run(arguments.largest, "here", |_| Ok(()))?));
    } else {
        let mut session = Session::start(&arguments.target)?;
        let outcome = run(arguments.largest, "rgpu", |command| session.environment(command));
        session.report_ended();
        ways.push(("rgpu", outcome?));
    }
    if arguments.native {
        ways.push(("native", run(arguments.largest, "native", |_| Ok(()))?));
    }
    if arguments.json {
        println!("{}", object(&ways));
    } else {
        print!("{}", table(&ways));
        if let Some((_, measurements)) = ways.first() {
            print!("{}", consequences(measurements));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the measuring process to its end. Shows progress on stderr.
fn run(
    largest: u64,
    way: &str,
    environment: impl FnOnce(&mut Command) -> Result<()>,
) -> Result<Vec<Measurement>> {
    let own = std::env::current_exe().context("cannot find rgpuctl's own path")?;
    let mut command = Command::new(own);
    command.args(["bench", "--measure", "--largest", &largest.to_string()]).stdout(Stdio::piped());
    environment(&mut command)?;
    end_with_parent(&mut command, Signal::SIGKILL);
    let mut child = command.spawn().context("cannot start the measuring process")?;
    let terminal = std::io::stderr().is_terminal();
    let mut measurements = Vec::new();
    for line in BufReader::new(child.stdout.take().context("the measuring process has no output")?).lines() {
        let measurement = parse(&line.context("cannot read the measurements")?)?;
        if terminal {
            eprint!("{ERASE}{way}: {}", measurement.name);
        }
        measurements.push(measurement);
    }
    if terminal {
        eprint!("{ERASE}");
    }
    let status = child.wait().context("cannot wait for the measuring process")?;
    if !status.success() {
        bail!("{way}: the measurement failed ({}); the reason is above", describe(status));
    }
    Ok(measurements)
}

fn parse(line: &str) -> Result<Measurement> {
    let words: Vec<&str> = line.split('\t').collect();
    let [name, unit, median, low, high] = words[..] else { bail!("{line:?} is not a measurement") };
    let number = |word: &str| word.parse().with_context(|| format!("{line:?} is not a measurement"));
    Ok(Measurement {
        name: name.to_owned(),
        unit: unit.to_owned(),
        median: number(median)?,
        low: number(low)?,
        high: number(high)?,
    })
}

fn object(ways: &[(&str, Vec<Measurement>)]) -> Value {
    let way = |measurements: &[Measurement]| {
        let figure =
            |m: &Measurement| json!({ "unit": m.unit, "median": m.median, "p10": m.low, "p90": m.high });
        Value::Object(measurements.iter().map(|m| (m.name.clone(), figure(m))).collect::<Map<_, _>>())
    };
    Value::Object(ways.iter().map(|(name, all)| ((*name).to_owned(), way(all))).collect())
}

/// A line for each measurement: the figures of the first way, and those of each other way with the ratio
/// between them.
fn table(ways: &[(&str, Vec<Measurement>)]) -> String {
    let Some(((name, first), others)) = ways.split_first() else { return String::new() };
    let mut text = format!("{:<28}{:>24}", "", name);
    for (name, _) in others {
        let _ = write!(text, "{name:>24}{:>8}", "ratio");
    }
    text.push('\n');
    for measurement in first {
        let _ = write!(text, "{:<28}{:>24}", measurement.name, cell(measurement));
        for (_, all) in others {
            match all.iter().find(|other| other.name == measurement.name) {
                Some(other) => {
                    let _ = write!(text, "{:>24}{:>8.2}", cell(other), measurement.median / other.median);
                }
                None => text.push_str(&" ".repeat(32)),
            }
        }
        let _ = writeln!(text, "  {}", measurement.unit);
    }
    text
}

/// What these figures mean for a program: the duration of waits, and the time to copy a model's data.
fn consequences(measurements: &[Measurement]) -> String {
    let median = |name: &str| {
        measurements.iter().rfind(|measurement| measurement.name.starts_with(name)).map(|m| m.median)
    };
    let mut text = String::new();
    if let Some(wait) = median("launch and synchronize") {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "\nEach wait for the GPU takes {}. A step of training in PyTorch waits once, a generated token about twice;\nprograms that copy small results back after every kernel wait each time.",
            time(wait / 1e6)
        );
    }
    if let (Some(up), Some(down)) = (median("pageable to device"), median("pageable to host")) {
        let _ = writeln!(
            text,
            "10 GB, a large model, take {} to the GPU and {} back.",
            time(10.0 / up),
            time(10.0 / down)
        );
    }
    text
}

/// Seconds with a unit that fits.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.1} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} µs", s * 1e6),
    }
}

fn cell(measurement: &Measurement) -> String {
    let number = |value: f64| match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    };
    format!("{} ({}–{})", number(measurement.median), number(measurement.low), number(measurement.high))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(median: f64) -> Vec<Measurement> {
        vec![Measurement {
            name: "launch".into(),
            unit: "µs".into(),
            median,
            low: median / 2.0,
            high: median * 2.0,
        }]
    }

    #[test]
    fn a_line_that_is_not_a_measurement_is_refused() {
        assert_eq!(parse("launch\tµs\t2\t1\t4").unwrap(), one(2.0)[0]);
        assert!(parse("launch\tµs\t2\t1").is_err());
        assert!(parse("launch\tµs\ttwo\t1\t4").is_err());
    }

    #[test]
    fn the_table_shows_the_ratio_to_the_other_way() {
        let text = table(&[("rgpu", one(2.0)), ("native", one(4.0))]);
        let line = text.lines().nth(1).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words, ["launch", "2.00", "(1.00–4.00)", "4.00", "(2.00–8.00)", "0.50", "µs"]);
    }

    #[test]
    fn consequences_follow_from_waits_and_from_the_largest_copies() {
        let figure = |name: &str, median| Measurement { name: name.into(), median, ..one(1.0).remove(0) };
        let text = consequences(&[
            figure("launch and synchronize", 10_040.0),
            figure("pageable to device, 4 KiB", 0.1),
            figure("pageable to device, 64 MiB", 5.0),
            figure("pageable to host, 64 MiB", 20.0),
        ]);
        assert!(text.contains("takes 10.0 ms."), "{text}");
        assert!(text.contains("take 2.0 s to the GPU and 500.0 ms back"), "{text}");
    }

    #[test]
    fn the_object_has_a_member_for_each_way() {
        let all = object(&[("rgpu", one(2.0)), ("native", one(4.0))]);
        assert_eq!(all["native"]["launch"]["median"], 4.0);
        assert_eq!(all["rgpu"]["launch"]["unit"], "µs");
    }
}
