//! The papers' two studies of RDMA, made again: bandwidth against size for 1 to 4 queue pairs, and against the queues' depth, beside perftest's own curves.
//!
//! ```text
//!  one machine, booted here ─┬─ ib_write_bw, ib_write_lat                        ─┐ by turns, point by point
//!                            └─ the layer's `verbs` example: h2d, d2h, ping      ─┴─▶ medians ─▶ verbs.md, verbs-*.svg
//! ```
//!
//! Without a card RoCE is in software, so speeds are the processor's. What counts is the ratio between two lines that were measured one after the other.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::machine::{Machine, rdma};
use rgpu_tests::tree;

const USAGE: &str = "rdma-bench [--repetitions N] [--rounds N] [--out FOLDER]";
const LIMIT: Duration = Duration::from_secs(300);
const SIZES: [u64; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const PAIRS: [u32; 4] = [1, 2, 3, 4];
const DEPTHS: [u32; 8] = [2, 4, 8, 16, 32, 64, 128, 256];
/// What depths are compared at: as much as one request of the study carries.
const DEPTH_SIZE: u64 = 64 << 10;
/// What the ratios are taken at, with perftest's number of queue pairs and ours: equal ones, and either's default.
const RATIO_SIZES: [u64; 2] = [1 << 20, 4 << 20];
const RATIO_PAIRS: [(u32, u32); 3] = [(1, 1), (1, 2), (2, 2)];
/// Bytes of one measurement.
const VOLUME: u64 = 32 << 20;

/// A point: who, size, queue pairs, depth. Megabytes (10⁶) a second, one for each repetition.
type Key = (&'static str, u64, u32, u32);
type Points = BTreeMap<Key, Vec<f64>>;
/// Ours by perftest's, one for each round: size, perftest's queue pairs, ours, direction.
type Ratios = BTreeMap<(u64, u32, u32, &'static str), Vec<f64>>;

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
            _ => bail!(USAGE),
        }
    }
    ensure!(repetitions > 0 && rounds > 0, "at least one repetition and one round");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "-p", "rgpu-host-bridge", "--example", "verbs"])
        .current_dir(tree::root())
        .status()
        .context("cannot start cargo")?;
    ensure!(built.success(), "the example `verbs` does not build");
    let bed = Bed::new()?;
    let mut points = Points::new();
    let mut latencies: [Vec<f64>; 3] = Default::default();
    let mut ratios = Ratios::new();
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        bed.round(&mut ratios, &mut latencies)?;
    }
    for repetition in 1..=repetitions {
        eprintln!("repetition {repetition} of {repetitions}");
        for pairs in PAIRS {
            for size in SIZES {
                bed.all(&mut points, size, pairs, 128)?;
            }
        }
        for depth in DEPTHS {
            bed.all(&mut points, DEPTH_SIZE, 2, depth)?;
        }
    }
    let points: BTreeMap<Key, f64> =
        points.into_iter().map(|(key, mut all)| (key, median(&mut all))).collect();
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let put = |name: &str, text: String| {
        std::fs::write(out.join(name), text).with_context(|| format!("cannot write {name}"))
    };
    for (who, file, title) in
        [("h2d", "verbs-h2d.svg", "to the server"), ("d2h", "verbs-d2h.svg", "from the server")]
    {
        let x: Vec<f64> = SIZES.iter().map(|size| *size as f64).collect();
        let curves = PAIRS.iter().flat_map(|pairs| {
            let (points, pairs) = (&points, *pairs);
            ["ib_write_bw", who].map(|who| {
                let y =
                    SIZES.iter().filter_map(|size| points.get(&(who, *size, pairs, 128)).copied()).collect();
                (format!("{who}, {pairs} queue pairs"), pairs as usize, who == "ib_write_bw", y)
            })
        });
        put(file, plot(&format!("Bandwidth {title}, depth 128"), "bytes", &x, &curves.collect::<Vec<_>>()))?;
    }
    let x: Vec<f64> = DEPTHS.iter().map(|depth| f64::from(*depth)).collect();
    let curves: Vec<Curve> = ["ib_write_bw", "h2d", "d2h"]
        .iter()
        .enumerate()
        .map(|(i, who)| {
            let y = DEPTHS
                .iter()
                .filter_map(|depth| points.get(&(*who, DEPTH_SIZE, 2, *depth)).copied())
                .collect();
            ((*who).to_owned(), i + 1, i == 0, y)
        })
        .collect();
    put(
        "verbs-depth.svg",
        plot(
            "Bandwidth against depth, 64 KiB, 2 queue pairs",
            "requests under way on a queue pair",
            &x,
            &curves,
        ),
    )?;
    put(
        "verbs.md",
        report(
            &points,
            &ratios,
            &mut latencies,
            repetitions,
            bed.machine.accelerator() == rgpu_tests::machine::Accelerator::Kvm,
        ),
    )?;
    println!("{}", out.join("verbs.md").display());
    Ok(())
}

/// A machine with a listener of each kind.
struct Bed {
    machine: Machine,
    /// GID index of both ends for perftest, which does not find it by itself.
    gid: [String; 2],
}

impl Bed {
    fn new() -> Result<Bed> {
        let example = tree::binaries().join("examples/verbs");
        let machine = rdma::boot(rdma::builder()?.program(example, "/bin/verbs"))?;
        let gid = |device: &str| {
            machine.check(
                &format!("cd /sys/class/infiniband/{device}/ports/1; for i in 0 1 2 3 4 5; do grep -q ffff:0a00 gids/$i && grep -q v2 gid_attrs/types/$i && echo $i && exit 0; done; exit 1"),
                LIMIT,
            )
        };
        let gid = [gid(rdma::SERVER.1)?, gid(rdma::CLIENT.1)?];
        machine
            .spawn(&format!("exec verbs listen 127.0.0.1:9800 --device {}", rdma::SERVER.1))?
            .wait_for("listening", LIMIT)?;
        Ok(Bed { machine, gid })
    }

    fn all(&self, points: &mut Points, size: u64, pairs: u32, depth: u32) -> Result<()> {
        let mut row = vec![self.perftest(size, pairs, depth)?];
        for who in ["h2d", "d2h"] {
            let count = (VOLUME / size).clamp(1, 4000);
            let said = self.verbs(&format!("--do {who} --size {size} --count {count} --queue-pairs {pairs} --queue-depth {depth} --fast --sleep"))?;
            row.push(field(&said, "mb_per_s")?);
        }
        eprintln!("{:>8}, {pairs} queue pairs, depth {depth}: {row:.0?} MB/s", bytes(size));
        for (who, value) in ["ib_write_bw", "h2d", "d2h"].into_iter().zip(row) {
            points.entry((who, size, pairs, depth)).or_default().push(value);
        }
        Ok(())
    }

    fn verbs(&self, what: &str) -> Result<String> {
        self.machine.check(&format!("verbs connect 127.0.0.1:9800 --device {} {what}", rdma::CLIENT.1), LIMIT)
    }

    /// Both sides once, as short and as close together as can be: what else the host does then hits both.
    fn round(&self, ratios: &mut Ratios, latencies: &mut [Vec<f64>; 3]) -> Result<()> {
        for size in RATIO_SIZES {
            let count = (VOLUME / size).max(1);
            let mut theirs = BTreeMap::new();
            for (pairs, ours) in RATIO_PAIRS {
                let base = match theirs.get(&pairs) {
                    Some(base) => *base,
                    None => self.perftest(size, pairs, 128)?,
                };
                theirs.insert(pairs, base);
                for who in ["h2d", "d2h"] {
                    let said = self.verbs(&format!(
                        "--do {who} --size {size} --count {count} --queue-pairs {ours} --fast --sleep"
                    ))?;
                    ratios
                        .entry((size, pairs, ours, who))
                        .or_default()
                        .push(field(&said, "mb_per_s")? / base);
                }
            }
        }
        let theirs = self.perftest_latency()?;
        let ours = self.round_trip()? / 2.0;
        eprintln!("    64 bytes one way: {theirs:.1} µs, {ours:.1} µs");
        latencies[0].push(theirs);
        latencies[1].push(ours);
        latencies[2].push(ours / theirs);
        Ok(())
    }

    /// A round trip of 64 bytes and its answer, in microseconds: the median of many, and polled, as perftest does it.
    fn round_trip(&self) -> Result<f64> {
        field(&self.verbs("--do ping --size 64 --count 2000")?, "us_median")
    }

    /// Runs one of perftest's programs on both ends. Gives the columns of its last row.
    fn pair(&self, program: &str, options: &str) -> Result<Vec<f64>> {
        let ends = [rdma::SERVER.1, rdma::CLIENT.1];
        // The same time before a packet is sent again as rgpu's queue pairs have.
        let side = |end: usize| {
            format!("{program} -d {} -x {} -m 4096 -F -u 16 {options}", ends[end], self.gid[end])
        };
        let server = self.machine.spawn(&format!("exec {} 2>&1", side(0)))?;
        // It says that it waits, but only when it ends: its output is no terminal. Port 18515 in hexadecimal, listening.
        self.machine.check("for i in $(seq 600); do grep -q ':4853 00000000:0000 0A' /proc/net/tcp && exit 0; grep -q ':4853 0*:0000 0A' /proc/net/tcp6 && exit 0; sleep 0.02; done; exit 1", LIMIT).with_context(|| format!("{program} does not listen"))?;
        let said = self.machine.check(&format!("{} 127.0.0.1 2>&1", side(1)), LIMIT);
        if said.is_err() {
            server.kill()?;
        }
        let (said, _) = (said?, server.wait(LIMIT)?);
        let numbers = |line: &str| {
            line.split_whitespace().map(str::parse).collect::<std::result::Result<Vec<f64>, _>>()
        };
        let row = said.lines().rev().find_map(|line| numbers(line).ok().filter(|row| row.len() > 3));
        row.with_context(|| format!("{program} gives no figures: {said}"))
    }

    /// Bandwidth by perftest. RoCE in software loses a connection now and then when the machine is busy: then once more.
    fn perftest(&self, size: u64, pairs: u32, depth: u32) -> Result<f64> {
        let count = (VOLUME / size).clamp(16, 4000);
        let options = format!("-s {size} -q {pairs} -t {depth} -n {count}");
        let mut row = self.pair("ib_write_bw", &options);
        for _ in 0..3 {
            if let Err(e) = &row {
                eprintln!("once more: {e:#}");
                row = self.pair("ib_write_bw", &options);
            }
        }
        let row = row?;
        // Bytes, iterations, peak, average in MiB a second, messages.
        row.get(3).map(|mib| mib * 1.048_576).context("a row of ib_write_bw is cut off")
    }

    /// One way, in microseconds.
    fn perftest_latency(&self) -> Result<f64> {
        let row = self.pair("ib_write_lat", "-s 64 -n 2000")?;
        // Bytes, iterations, least, most, typical.
        row.get(4).copied().context("a row of ib_write_lat is cut off")
    }
}

fn field(text: &str, name: &str) -> Result<f64> {
    let word = text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(word.with_context(|| format!("no {name} in {text:?}"))?.parse()?)
}

fn median(all: &mut [f64]) -> f64 {
    all.sort_by(f64::total_cmp);
    (all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0
}

/// Median, least and most.
fn spread(all: &[f64], scale: f64, unit: &str) -> String {
    let mut all: Vec<f64> = all.iter().map(|value| value * scale).collect();
    let middle = median(&mut all);
    let digits = if scale > 1.0 { 0 } else { 1 };
    format!("{middle:.digits$}{unit} ({:.digits$} to {:.digits$})", all[0], all[all.len() - 1])
}

fn bytes(size: u64) -> String {
    if size < 1 << 20 { format!("{} KiB", size >> 10) } else { format!("{} MiB", size >> 20) }
}

fn report(
    points: &BTreeMap<Key, f64>,
    ratios: &Ratios,
    latencies: &mut [Vec<f64>; 3],
    repetitions: usize,
    kvm: bool,
) -> String {
    let get = |who, size, pairs, depth| points.get(&(who, size, pairs, depth)).copied().unwrap_or(f64::NAN);
    let mut text = format!(
        "# Verbs beside perftest\n\n\
         Made by `cargo run --release -p rgpu-tests --bin rdma-bench`: medians of {repetitions} measurement(s) of {} MB each, perftest's and rgpu's taken by turns in one\n\
         machine with RoCE in software (`rdma_rxe`), {}. There is no card: speeds are those of processors that copy and\n\
         checksum each packet for both ends, and only ratios say something. `h2d` is from a client's scattered pages into the server's slots, `d2h` from the server's\n\
         registered memory into such pages, both by `host-bridge/examples/verbs.rs`, which drives the layer that both daemons use, without what the daemons do beside it.\n\
         On a host with other work the same point moves by a factor of two from one repetition to the next, perftest's own as well: a single cell says little.\n\n\
         ## Bandwidth against size\n\n![to the server](verbs-h2d.svg)\n![from the server](verbs-d2h.svg)\n\nMB/s of `ib_write_bw`, and what the layer reaches of it, depth 128:\n\n",
        VOLUME / 1_000_000,
        if kvm { "virtualised by KVM" } else { "emulated, on a host that may do other work" },
    );
    let _ =
        writeln!(text, "| size |{}", PAIRS.map(|p| format!(" {p} queue pairs: MB/s | h2d | d2h |")).concat());
    let _ = writeln!(text, "|---|{}", "---|".repeat(3 * PAIRS.len()));
    for size in SIZES {
        let cells = PAIRS.map(|pairs| {
            let base = get("ib_write_bw", size, pairs, 128);
            let share = |who| 100.0 * get(who, size, pairs, 128) / base;
            format!(" {base:.0} | {:.0} % | {:.0} % |", share("h2d"), share("d2h"))
        });
        let _ = writeln!(text, "| {} |{}", bytes(size), cells.concat());
    }
    let _ = writeln!(
        text,
        "\n## Bandwidth against depth\n\n![depth](verbs-depth.svg)\n\n{}, 2 queue pairs:\n\n| depth | ib_write_bw, MB/s | h2d | d2h |\n|---|---|---|---|",
        bytes(DEPTH_SIZE)
    );
    for depth in DEPTHS {
        let base = get("ib_write_bw", DEPTH_SIZE, 2, depth);
        let share = |who| 100.0 * get(who, DEPTH_SIZE, 2, depth) / base;
        let _ = writeln!(text, "| {depth} | {base:.0} | {:.0} % | {:.0} % |", share("h2d"), share("d2h"));
    }
    let rounds = latencies[0].len();
    let _ = writeln!(
        text,
        "\n## Against `ib_write_bw`, round by round\n\n{rounds} rounds; in each, perftest and the layer right after one another, {} MB each, depth 128, and their ratio. Median of the ratios (least to most):\n\n| size | ib_write_bw's queue pairs | ours | h2d | d2h |\n|---|---|---|---|---|",
        VOLUME / 1_000_000
    );
    for size in RATIO_SIZES {
        for (theirs, ours) in RATIO_PAIRS {
            let cell = |who| {
                ratios
                    .get(&(size, theirs, ours, who))
                    .map_or_else(String::new, |all| spread(all, 100.0, " %"))
            };
            let _ =
                writeln!(text, "| {} | {theirs} | {ours} | {} | {} |", bytes(size), cell("h2d"), cell("d2h"));
        }
    }
    let _ = writeln!(
        text,
        "\n`ib_write_bw` has one queue pair and rgpu two unless told otherwise. With two, all of perftest's requests are posted before the first is done, queue after queue; then each\nqueue pair of `rdma_rxe` (Linux 6.1) stays on the processor that posted to it, and two processors work. rgpu posts to both by turns as slots become free, so that both follow the\nposting thread from one processor to the other and mostly share one. A card has no such processors.\n\n## Latency\n\n64 bytes one way, in {rounds} rounds of 2000 exchanges each, polled on both ends by both programs: median of the rounds' medians (least to most). `ib_write_lat` {} µs; half a question and answer by messages,\nwhich is the network's part of a synchronous call, {} µs; their ratio, round by round, {}. The aim is 3.",
        spread(&latencies[0], 1.0, ""),
        spread(&latencies[1], 1.0, ""),
        spread(&latencies[2], 1.0, "")
    );
    text
}

/// Name, colour, dashed, values.
type Curve = (String, usize, bool, Vec<f64>);

/// A plot with a logarithmic x axis.
fn plot(title: &str, unit: &str, x: &[f64], curves: &[Curve]) -> String {
    const COLOURS: [&str; 5] = ["#000", "#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00"];
    let (left, right, top, bottom) = (70.0, 560.0, 40.0, 380.0);
    let most = curves.iter().flat_map(|curve| &curve.3).copied().fold(1.0, f64::max) * 1.05;
    let span = (x[x.len() - 1] / x[0]).ln();
    let at = |x0: f64, y: f64| {
        (left + (x0 / x[0]).ln() / span * (right - left), bottom - y / most * (bottom - top))
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 820 440\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"820\" height=\"440\" fill=\"#fff\"/>\n<text x=\"{left}\" y=\"22\" font-size=\"15\">{title}</text>\n<text x=\"{left}\" y=\"425\">{unit}</text>\n"
    );
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let y = at(x[0], value).1;
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.0} MB/s</text>",
            left - 4.0,
            y + 4.0
        );
    }
    for value in x {
        let label = if *value >= 1024.0 { bytes(*value as u64) } else { format!("{value}") };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"400\" text-anchor=\"middle\">{label}</text>",
            at(*value, 0.0).0
        );
    }
    for (i, (name, colour, dashed, values)) in curves.iter().enumerate() {
        let points: String = x
            .iter()
            .zip(values)
            .map(|(x, y)| {
                let (px, py) = at(*x, *y);
                format!("{px:.1},{py:.1} ")
            })
            .collect();
        let stroke = format!(
            "stroke=\"{}\"{}",
            COLOURS[colour % COLOURS.len()],
            if *dashed { " stroke-dasharray=\"5 4\"" } else { "" }
        );
        let y = top + 18.0 * i as f64;
        let _ = writeln!(
            svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke-width=\"2\" {stroke}/>\n<line x1=\"580\" y1=\"{y}\" x2=\"610\" y2=\"{y}\" stroke-width=\"2\" {stroke}/><text x=\"616\" y=\"{}\">{name}</text>",
            y + 4.0
        );
    }
    svg + "</svg>\n"
}
