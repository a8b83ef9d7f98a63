//! `rgpuctl bench`: measures the latency of calls and the bandwidth of copies on this installation, as a
//! program sees them.
//!
//! ```text
//!  rgpuctl bench ──▶ rgpuctl bench --measure   a client of rgpu: its libcuda comes first in LD_LIBRARY_PATH
//!                └─▶ rgpuctl bench --measure   with --native: the libcuda that this machine has
//! ```
//!
//! The measuring process is an ordinary program of the driver API ([`measure`]), and the same for both. So it
//! measures the link as a program uses it: the wire has nothing that only carries bytes to the server, and
//! every figure includes what the GPU needs. What the network alone takes for a round trip is the kernel's
//! figure, which `vhost-rgpu` reports ([`Link`]).

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
use measure::{IN_A_ROW, ROUND_TRIP};

/// Measure the latency of calls and the bandwidth of copies on this installation.
///
/// Prints latencies in microseconds and copies in GB/s: the median, and the 10th and 90th percentile. Copies
/// carry random data, which is compared with what comes back; a difference fails the run. A server with a
/// cache is sent other data each time.
///
/// The link's figures are "round trip", the time until the program knows that an event has come which it has
/// just recorded, and "in a row": copies of pinned memory that are not waited for one by one, a quarter of
/// --largest each. They end in the GPU's memory, and so show the link's bandwidth if the server's bus carries
/// more. At most --largest bytes are on their way, so a link that carries more in a round trip is not filled.
///
/// Below the table is what programs notice: the network's share of a round trip, as the kernel measures it
/// for TCP; how much longer a step takes that ends with a value for the program; how long the start of
/// PyTorch waits; and how long it takes to copy a model's data.
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

/// The way to the server, by the status of `vhost-rgpu`.
#[derive(Debug, PartialEq)]
struct Link {
    /// By its name: `local`, `tcp` or `verbs`.
    transport: String,
    server: String,
    /// The kernel's smoothed round-trip time in microseconds, of TCP.
    round_trip: Option<f64>,
}

impl Link {
    /// The link of the session that a process has begun first. `None`: the process has none.
    fn of(status: &Value, process: u32) -> Option<Link> {
        let sessions = status["sessions"].as_array()?;
        let session = sessions.iter().find(|session| session["pid"] == process)?;
        Some(Link {
            transport: session["transport"].as_str()?.to_owned(),
            server: session["server"].as_str()?.to_owned(),
            round_trip: session["round_trip_us"].as_f64(),
        })
    }
}

/// Measures and prints.
pub fn bench(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.measure {
        measure::measure(arguments.largest << 20)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (mut ways, mut link) = (Vec::new(), None);
    if arguments.installed {
        ways.push(("here", run(arguments.largest, "here", |_| Ok(()), |_, _| ())?));
    } else {
        let mut session = Session::start(&arguments.target)?;
        let begin = |command: &mut Command| session.environment(command);
        let outcome = run(arguments.largest, "rgpu", begin, |name, process| {
            // The connection was just used for this figure, and for nothing else.
            if name == ROUND_TRIP {
                link = session.status().ok().and_then(|status| Link::of(&status, process));
            }
        });
        session.report_ended(outcome.is_err());
        ways.push(("rgpu", outcome?));
    }
    // This machine may have no driver. What was measured is shown all the same.
    let native = arguments.native.then(|| run(arguments.largest, "native", |_| Ok(()), |_, _| ()));
    let native = native.transpose().map(|measured| ways.extend(measured.map(|figures| ("native", figures))));
    if arguments.json {
        println!("{}", object(&ways, link.as_ref()));
    } else {
        print!("{}", table(&ways));
        if let Some((_, measurements)) = ways.first() {
            print!("{}", consequences(measurements, link.as_ref()));
        }
    }
    native.map(|()| ExitCode::SUCCESS)
}

/// Runs the measuring process to its end. Shows progress on stderr. After each figure, `measured` gets its
/// name and the process's ID.
fn run(
    largest: u64,
    way: &str,
    environment: impl FnOnce(&mut Command) -> Result<()>,
    mut measured: impl FnMut(&str, u32),
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
            tell!("{ERASE}{way}: {}", measurement.name);
        }
        measured(&measurement.name, child.id());
        measurements.push(measurement);
    }
    if terminal {
        tell!("{ERASE}");
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

/// A member for each way, and `link` if it is known.
fn object(ways: &[(&str, Vec<Measurement>)], link: Option<&Link>) -> Value {
    let way = |measurements: &[Measurement]| {
        let figure =
            |m: &Measurement| json!({ "unit": m.unit, "median": m.median, "p10": m.low, "p90": m.high });
        Value::Object(measurements.iter().map(|m| (m.name.clone(), figure(m))).collect::<Map<_, _>>())
    };
    let link = link.map(|link| {
        let fields =
            json!({ "transport": link.transport, "server": link.server, "tcp_round_trip_us": link.round_trip });
        ("link".to_owned(), fields)
    });
    Value::Object(ways.iter().map(|(name, all)| ((*name).to_owned(), way(all))).chain(link).collect())
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

/// Round trips that PyTorch's start waits for, at most: where the server is near, and elsewhere, where device
/// code is read in the process (docs/benchmarks/distance.md).
const START: (f64, f64) = (370.0, 40.0);
/// A server with shorter round trips than this, in seconds, is near: `NEAR` of the client's `reading.rs`.
const NEAR: f64 = 150e-6;

/// What these figures mean for a program: the link, the duration of waits, and the time to copy a model's
/// data.
fn consequences(measurements: &[Measurement], link: Option<&Link>) -> String {
    let median = |name: &str| {
        measurements.iter().rfind(|measurement| measurement.name.starts_with(name)).map(|m| m.median)
    };
    let mut text = String::new();
    // Writing to a string does not fail.
    if let (Some(wait), [Some(up), Some(down)]) = (median(ROUND_TRIP), IN_A_ROW.map(median)) {
        let wait = wait / 1e6;
        let way = match link {
            Some(link) if link.transport == "local" => "Memory shared with the server, no network".to_owned(),
            Some(link) => format!("The link ({} to {})", link.transport, link.server),
            None => "The link".to_owned(),
        };
        let network = link.and_then(|link| link.round_trip).map(|network| {
            format!(" (by the kernel's measure, the network takes {} of it)", time(network / 1e6))
        });
        let _ = writeln!(
            text,
            "\n{way}: a round trip takes {}{}.\nCopies of pinned memory in a row carry {up:.2} GB/s to the GPU and {down:.2} GB/s back: what the link carries,\nunless the GPU's bus or the processors at either end are slower.",
            time(wait),
            network.unwrap_or_default(),
        );
        let (start, how) = if wait < NEAR { (START.0, "at most") } else { (START.1, "about") };
        let _ = writeln!(
            text,
            "A step that ends with a value for the program, like a training step or a generated token of PyTorch, waits for one round trip:\nat most {:.0} steps a second. Programs that copy small results back after every kernel wait each time.\nThe start of PyTorch waits {how} {start:.0} times, {} in all, and for its code and data to be sent.",
            1.0 / wait,
            time(start * wait),
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

    fn figure(name: &str, median: f64) -> Measurement {
        Measurement { name: name.into(), median, ..one(1.0).remove(0) }
    }

    fn far() -> Link {
        Link { transport: "tcp".into(), server: "tcp:gpu7:9700".into(), round_trip: Some(9_000.0) }
    }

    #[test]
    fn consequences_follow_from_the_link_and_from_the_largest_copies() {
        let all = [
            figure("round trip", 10_040.0),
            figure("in a row to device", 1.25),
            figure("in a row to host", 0.5),
            figure("pageable to device, 4 KiB", 0.1),
            figure("pageable to device, 64 MiB", 5.0),
            figure("pageable to host, 64 MiB", 20.0),
        ];
        let text = consequences(&all, Some(&far()));
        assert!(text.contains("(tcp to tcp:gpu7:9700): a round trip takes 10.0 ms"), "{text}");
        assert!(text.contains("the network takes 9.0 ms of it"), "{text}");
        assert!(text.contains("1.25 GB/s to the GPU and 0.50 GB/s back"), "{text}");
        assert!(text.contains("at most 100 steps a second"), "{text}");
        assert!(text.contains("waits about 40 times, 401.6 ms in all"), "{text}");
        assert!(text.contains("take 2.0 s to the GPU and 500.0 ms back"), "{text}");
        // In a guest, only what a program sees is known.
        let text = consequences(&all, None);
        assert!(
            text.contains("The link: a round trip takes 10.0 ms.") && !text.contains("network"),
            "{text}"
        );
        assert_eq!(consequences(&all[..2], None), "", "a figure is missing");
    }

    #[test]
    fn the_link_is_that_of_the_measuring_process() {
        let status = json!({ "sessions": [
            { "pid": 6, "transport": "tcp", "server": "tcp:elsewhere:1", "round_trip_us": 7 },
            { "pid": 7, "transport": "tcp", "server": "tcp:gpu7:9700", "round_trip_us": 9000 },
            { "pid": 8, "transport": "local", "server": "unix:/run/a" },
        ]});
        assert_eq!(Link::of(&status, 7), Some(far()));
        assert_eq!(Link::of(&status, 8).unwrap().round_trip, None);
        assert_eq!(Link::of(&status, 9), None);
        assert_eq!(Link::of(&json!({ "sessions": "none" }), 7), None);
    }

    #[test]
    fn the_object_has_a_member_for_each_way_and_for_the_link() {
        let ways = [("rgpu", one(2.0)), ("native", one(4.0))];
        let all = object(&ways, Some(&far()));
        assert_eq!(all["native"]["launch"]["median"], 4.0);
        assert_eq!(all["rgpu"]["launch"]["unit"], "µs");
        assert_eq!(all["link"]["transport"], "tcp");
        assert_eq!(all["link"]["tcp_round_trip_us"], 9_000.0);
        assert!(object(&ways, None).get("link").is_none());
    }
}
