//! Measures the latency of calls and the bandwidth of copies, natively and through rgpu, and writes the
//! results to files.
//!
//! ```text
//!  for each repetition:  bench natively, bench over local, bench over tcp      one process each, interleaved
//!  medians of the repetitions' medians  ──▶  bench.json, bench.md (ratios to native), one SVG for each family of curves
//! ```
//!
//! The program that measures is `tests/bench/bench.cu`, one binary for all ways. `cargo xtask bench` builds
//! it and runs this; `cargo xtask bench --stage` puts both, with everything they need, into a folder for a
//! machine without a compiler.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::programs::run;
use rgpu_tests::tree;
use serde::{Deserialize, Serialize};

const USAGE: &str = "usage: rgpu-bench [--device cuda|software] [--repetitions N] [--out FOLDER] [--compare OLD.json] [--ways native,local,tcp]";

/// How long one process may take.
const LIMIT: Duration = Duration::from_secs(240);

struct Options {
    device: String,
    repetitions: usize,
    out: PathBuf,
    compare: Option<PathBuf>,
    ways: Vec<String>,
}

/// A measurement's median over the repetitions, with the lowest and highest of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Figure {
    median: f64,
    low: f64,
    high: f64,
}

/// Everything that a run measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Results {
    machine: String,
    device: String,
    repetitions: usize,
    /// Seconds since 1970.
    time: u64,
    /// Way → measurement ("name" or "name/bytes") → figure: microseconds, except GB/s for copies that have a
    /// size, and launches per second.
    ways: BTreeMap<String, BTreeMap<String, Figure>>,
}

fn main() -> ExitCode {
    match options().and_then(|options| bench(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options> {
    let mut options = Options {
        device: "cuda".into(),
        repetitions: 5,
        out: tree::root().join("docs/benchmarks"),
        compare: None,
        ways: Vec::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().context(USAGE)?;
        match name.as_str() {
            "--device" => options.device = value,
            "--repetitions" => options.repetitions = value.parse().context(USAGE)?,
            "--out" => options.out = value.into(),
            "--compare" => options.compare = Some(value.into()),
            "--ways" => options.ways = value.split(',').map(str::to_owned).collect(),
            _ => bail!(USAGE),
        }
    }
    ensure!(matches!(options.device.as_str(), "cuda" | "software"), "{USAGE}");
    ensure!(options.repetitions > 0, "at least one repetition");
    if options.ways.is_empty() {
        let all = ["native", "local", "tcp"];
        // Without a GPU there is nothing to compare with.
        let from = usize::from(options.device == "software");
        options.ways = all[from..].iter().map(|way| (*way).to_owned()).collect();
    }
    Ok(options)
}

/// A server and a bridge for one transport.
struct Daemons {
    socket: PathBuf,
    /// Dropped before the server.
    _bridge: Daemon,
    _server: Daemon,
}

impl Daemons {
    fn start(device: &str, transport: &str, folder: &Path) -> Result<Daemons> {
        let folder = folder.join(transport);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let address = match transport {
            "local" => format!("unix:{}", folder.join("server.sock").display()),
            "tcp" => {
                let free = std::net::TcpListener::bind("127.0.0.1:0").context("no free port")?;
                format!("tcp:127.0.0.1:{}", free.local_addr()?.port())
            }
            other => bail!("{other:?} is not a way to run: use native, local or tcp"),
        };
        let socket = folder.join("native.sock");
        let server = Daemon::start(
            "rgpu-server",
            [
                "--insecure",
                "--listen",
                &address,
                "--backend",
                device,
                "--workers",
                "2",
                "--drain-seconds",
                "1",
            ],
            &tree::logs().join(format!("bench-{transport}-server.log")),
            &folder.join("server.status"),
        )?;
        let native = socket.display().to_string();
        let bridge = Daemon::start(
            "vhost-rgpu",
            ["--insecure", "--native-socket", &native, "--server", &address, "--transport", transport],
            &tree::logs().join(format!("bench-{transport}-bridge.log")),
            &folder.join("bridge.status"),
        )?;
        Ok(Daemons { socket, _bridge: bridge, _server: server })
    }

    /// Whether a worker is ready: programs are measured as they run on a server that is already up.
    fn wait_until_ready(&self) {
        for _ in 0..400 {
            let idle = self._server.status().ok().and_then(|status| status["workers_ready"].as_u64());
            if idle.is_none_or(|ready| ready > 1) {
                break;
            }
            std::thread::sleep(Duration::from_millis(25));
        }
    }
}

fn bench(options: &Options) -> Result<()> {
    let program = tree::programs().join("bench");
    ensure!(program.is_file(), "{} does not exist: `cargo xtask bench` builds it", program.display());
    let folder = tempfile::tempdir().context("no folder for sockets")?;
    let mut daemons = BTreeMap::new();
    for way in options.ways.iter().filter(|way| *way != "native") {
        daemons.insert(way.clone(), Daemons::start(&options.device, way, folder.path())?);
    }
    let mut samples: BTreeMap<String, BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    for repetition in 1..=options.repetitions {
        for way in &options.ways {
            eprintln!("repetition {repetition} of {}: {way}", options.repetitions);
            let mut command = Command::new(&program);
            if options.device == "software" {
                command.arg("--small");
            }
            match daemons.get(way) {
                None => command.env("LD_LIBRARY_PATH", tree::cuda_runtime()),
                Some(daemons) => {
                    daemons.wait_until_ready();
                    command
                        .env("LD_LIBRARY_PATH", tree::guest_libraries())
                        .env("RGPU_SOCKET", &daemons.socket)
                }
            };
            let outcome = run(command.env("RGPU_BENCH_START", monotonic_ns().to_string()), LIMIT)?;
            ensure!(
                outcome.status == Some(0),
                "{way}: exit status {:?}\n{}{}",
                outcome.status,
                outcome.stdout,
                outcome.stderr
            );
            let of_way = samples.entry(way.clone()).or_default();
            for (name, value) in outcome.stdout.lines().map(measurement).collect::<Result<Vec<_>>>()? {
                of_way.entry(name).or_default().push(value);
            }
        }
    }
    let results = Results {
        machine: machine(),
        device: options.device.clone(),
        repetitions: options.repetitions,
        time: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs(),
        ways: samples.into_iter().map(|(way, all)| (way, all.into_iter().map(figure).collect())).collect(),
    };
    write(options, &results)
}

/// Nanoseconds of the clock that the program reads, too.
fn monotonic_ns() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure. This clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// A line of the program: `name size median low high`.
fn measurement(line: &str) -> Result<(String, f64)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, size, median, _, _] = words[..] else { bail!("{line:?} is not a measurement") };
    let name = match size {
        _ if !name.starts_with("pinned") && !name.starts_with("pageable") => name.to_owned(),
        size => format!("{name}/{size}"),
    };
    Ok((name, median.parse().with_context(|| format!("{line:?} is not a measurement"))?))
}

fn figure((name, mut values): (String, Vec<f64>)) -> (String, Figure) {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values[0], values[values.len() - 1]);
    (name, Figure { median: values[values.len() / 2], low, high })
}

fn write(options: &Options, results: &Results) -> Result<()> {
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot create {}", options.out.display()))?;
    let put = |name: &str, text: String| {
        let path = options.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    let stem = if results.device == "software" { "software" } else { "bench" };
    put(&format!("{stem}.json"), serde_json::to_string_pretty(results)? + "\n")?;
    let mut text = table(results);
    if let Some(old) = &options.compare {
        let old_text =
            std::fs::read_to_string(old).with_context(|| format!("cannot read {}", old.display()))?;
        text += &compare(&serde_json::from_str(&old_text)?, results);
    }
    print!("{text}");
    put(&format!("{stem}.md"), text)?;
    for (file, title, families) in [
        ("pinned", "Pinned copies", ["pinned_htod", "pinned_dtoh"]),
        ("pageable", "Pageable copies", ["pageable_htod", "pageable_dtoh"]),
    ] {
        put(&format!("{stem}-{file}.svg"), plot(title, results, &families))?;
    }
    Ok(())
}

/// The order of a size in a name, so that 16 comes before 128.
fn order(name: &str) -> (String, u64) {
    match name.split_once('/') {
        Some((family, size)) => (family.to_owned(), size.parse().unwrap_or(0)),
        None => (name.to_owned(), 0),
    }
}

fn number(value: f64) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn table(results: &Results) -> String {
    let mut text = format!(
        "Machine: {}. Device: {}. {} repetitions, interleaved; medians, in brackets the lowest and the highest repetition.\n\
         Microseconds, GB/s for copies by size (bytes), launches a second. ×: to native.\n\n| |",
        results.machine, results.device, results.repetitions
    );
    let native = results.ways.get("native");
    let mut ways: Vec<&String> = results.ways.keys().collect();
    ways.sort_by_key(|way| ["native", "local", "tcp"].iter().position(|w| w == way));
    for way in &ways {
        let _ = write!(text, " {way} |");
        if native.is_some() && *way != "native" {
            text.push_str(" × |");
        }
    }
    text.push_str("\n|---|");
    let columns = ways.iter().map(|way| if native.is_some() && *way != "native" { 2 } else { 1 }).sum();
    text.push_str(&"---|".repeat(columns));
    text.push('\n');
    let mut names: Vec<&String> = results.ways.values().flat_map(BTreeMap::keys).collect();
    names.sort_by_key(|name| order(name));
    names.dedup();
    for name in names {
        let _ = write!(text, "| {name} |");
        for way in &ways {
            let Some(figure) = results.ways[*way].get(name) else {
                text.push_str(" |");
                continue;
            };
            let _ =
                write!(text, " {} ({}–{}) |", number(figure.median), number(figure.low), number(figure.high));
            if let (Some(native), true) = (native, *way != "native") {
                match native.get(name) {
                    Some(native) => {
                        let _ = write!(text, " {:.2} |", figure.median / native.median);
                    }
                    None => text.push_str(" |"),
                }
            }
        }
        text.push('\n');
    }
    text
}

/// Figures that changed by more than the spread of both runs.
fn compare(old: &Results, new: &Results) -> String {
    let mut text = "\nWhat moved, against the older run, by more than either run's spread:\n\n".to_owned();
    let mut moved = 0;
    for (way, figures) in &new.ways {
        for (name, figure) in figures {
            let Some(before) = old.ways.get(way).and_then(|way| way.get(name)) else { continue };
            if figure.low > before.high || figure.high < before.low {
                moved += 1;
                let _ = writeln!(
                    text,
                    "- {way}, {name}: {} → {} (× {:.2})",
                    number(before.median),
                    number(figure.median),
                    figure.median / before.median
                );
            }
        }
    }
    if moved == 0 {
        text.push_str("- nothing\n");
    }
    text
}

/// GB/s against bytes, both axes logarithmic, a line for each way and direction.
fn plot(title: &str, results: &Results, families: &[&str]) -> String {
    const LEFT: f64 = 70.0;
    const TOP: f64 = 40.0;
    const WIDTH: f64 = 560.0;
    const HEIGHT: f64 = 340.0;
    let (sizes, rates) = ((4096f64.log2(), 268_435_456f64.log2()), (0.01f64.log10(), 100f64.log10()));
    let x = |size: f64| LEFT + (size.log2() - sizes.0) / (sizes.1 - sizes.0) * WIDTH;
    let y = |rate: f64| TOP + HEIGHT - (rate.max(0.01).log10() - rates.0) / (rates.1 - rates.0) * HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 820 440\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"820\" height=\"440\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{title}: GB/s against bytes</text>\n"
    );
    for rate in [0.01, 0.1, 1.0, 10.0, 100.0] {
        let y = y(rate);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"30\" y=\"{:.1}\">{rate}</text>",
            LEFT + WIDTH,
            y + 4.0
        );
    }
    for (size, name) in [
        (4096.0, "4 KiB"),
        (65536.0, "64 KiB"),
        (1_048_576.0, "1 MiB"),
        (16_777_216.0, "16 MiB"),
        (268_435_456.0, "256 MiB"),
    ] {
        let x = x(size);
        let _ = writeln!(
            svg,
            "<line y1=\"{TOP}\" y2=\"{}\" x1=\"{x:.1}\" x2=\"{x:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{}\">{name}</text>",
            TOP + HEIGHT,
            x - 20.0,
            TOP + HEIGHT + 18.0
        );
    }
    let colours = [("native", "#222222"), ("local", "#1f77b4"), ("tcp", "#d62728"), ("verbs", "#2ca02c")];
    let mut legend = TOP + 10.0;
    for (way, colour) in colours {
        let Some(figures) = results.ways.get(way) else { continue };
        for (index, family) in families.iter().enumerate() {
            let mut points: Vec<(f64, f64)> = figures
                .iter()
                .filter_map(|(name, figure)| {
                    let size = name.strip_prefix(family)?.strip_prefix('/')?.parse().ok()?;
                    Some((size, figure.median))
                })
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let path: String =
                points.iter().map(|(size, rate)| format!("{:.1},{:.1} ", x(*size), y(*rate))).collect();
            let dash = if index == 0 { "" } else { " stroke-dasharray=\"6 3\"" };
            let _ = writeln!(
                svg,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\n\
                 <line x1=\"645\" x2=\"675\" y1=\"{legend}\" y2=\"{legend}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/><text x=\"682\" y=\"{}\">{way}, {}</text>",
                legend + 4.0,
                if index == 0 { "to device" } else { "to host" }
            );
            legend += 20.0;
        }
    }
    svg + "</svg>\n"
}

/// The GPU and the processors of this machine.
fn machine() -> String {
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let gpu = Command::new("nvidia-smi").args(query).output().map_or_else(
        |_| "no GPU".to_owned(),
        |output| {
            format!("{} (name, driver)", String::from_utf8_lossy(&output.stdout).trim().replace('\n', "; "))
        },
    );
    format!("{gpu}, {} cores", std::thread::available_parallelism().map_or(0, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(way: &str, name: &str, values: [f64; 3]) -> Results {
        let (_, figure) = figure((String::new(), values.to_vec()));
        Results {
            machine: "a machine".into(),
            device: "cuda".into(),
            repetitions: 3,
            time: 0,
            ways: BTreeMap::from([(way.to_owned(), BTreeMap::from([(name.to_owned(), figure)]))]),
        }
    }

    #[test]
    fn a_figure_is_the_median_of_the_repetitions_with_their_range() {
        let all = results("local", "launch", [3.0, 1.0, 2.0]);
        assert_eq!(all.ways["local"]["launch"], Figure { median: 2.0, low: 1.0, high: 3.0 });
    }

    #[test]
    fn the_table_has_ratios_to_native() {
        let mut all = results("native", "launch", [2.0; 3]);
        all.ways.extend(results("local", "launch", [1.0; 3]).ways);
        assert!(
            table(&all).contains("| launch | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) | 0.50 |"),
            "{}",
            table(&all)
        );
    }

    #[test]
    fn only_a_change_outside_both_spreads_counts() {
        let old = results("tcp", "launch", [1.0, 2.0, 3.0]);
        assert!(compare(&old, &results("tcp", "launch", [2.5, 3.5, 4.5])).contains("nothing"));
        assert!(compare(&old, &results("tcp", "launch", [3.5, 4.0, 4.5])).contains("× 2.00"));
    }

    #[test]
    fn only_copies_by_size_keep_their_size_in_the_name() {
        assert_eq!(measurement("pinned_htod 4096 1.5 1 2").unwrap(), ("pinned_htod/4096".into(), 1.5));
        assert_eq!(measurement("htod_64 64 0.5 1 2").unwrap(), ("htod_64".into(), 0.5));
        assert!(measurement("what else").is_err());
    }

    #[test]
    fn a_plot_has_a_line_for_each_way_and_direction() {
        let all = results("local", "pinned_htod/4096", [1.0; 3]);
        assert_eq!(plot("t", &all, &["pinned_htod", "pinned_dtoh"]).matches("<polyline").count(), 2);
    }
}
