//! `cargo xtask test`: runs the tests, in parts that can be selected.
//!
//! `demo` is the demonstration, which must succeed like any test. `unit` is the tests of every package.
//! `loom` checks the channel's atomics exhaustively. Each file in `tests/tests/` is a part with the file's
//! name; this module prepares what it needs. Some parts run only on request: `gpu` needs a GPU, `miri` a
//! nightly compiler, and `libvirt` many packages; `fuzz` compiles nearly everything once more,
//! `guest_packages` compiles the driver in an emulated guest, `image` makes a disk and boots it,
//! `debug_kernels` compiles two kernels, `many_guests` boots 64 guests, and `newcomer` does most of that in a
//! new machine.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rgpu_tests::tree::{self, Build};

use crate::unit_tests::{self, Executables};
use crate::{
    artifacts, bench, debian, demo, dist, fuzz, image, machines, nightly, package, process, programs,
};

/// Parts that run only on request.
const ON_REQUEST: &[&str] = &[
    "debug_kernels",
    "fuzz",
    "gpu",
    "guest_packages",
    "image",
    "libvirt",
    "many_guests",
    "miri",
    "newcomer",
];

/// Run the tests: all that need no GPU, or selected parts.
#[derive(Args)]
pub struct Arguments {
    /// `demo`, `unit`, `loom`, `fuzz`, `miri`, or a file in tests/tests without `.rs`. The default is all
    /// parts except `gpu`, `debug_kernels`, `guest_packages`, `image`, `libvirt`, `many_guests`, `newcomer`,
    /// `fuzz` and `miri`
    parts: Vec<String>,
}

/// Parts that boot machines, the longest and `dist` first. They run one after another. The others run beside
/// them, also one after another: most of their tests wait for a server that was killed, a link that is cut,
/// or a lease to end. Whichever of both has ended takes what the other one has left.
const MACHINES: &[&str] = &[
    "rdma",
    "packages",
    "dist",
    "vm",
    "driver",
    "guest_counts",
    "debug_kernels",
    "guest_packages",
    "image",
    "libvirt",
    "many_guests",
    "newcomer",
];

/// Parts that write the same folder, so that one must not run beside another.
const WRITE_DIST: &[&str] = &["dist", "guest_packages", "image", "newcomer", "packages"];

/// Debian packages that only one part needs, and what for.
const DEBIAN: &[(&str, &[&str], &str)] = &[
    ("containers", &["crun", "podman", "uidmap"], "running programs in containers"),
    ("image", &["genisoimage"], "giving a guest its seed"),
    (
        "libvirt",
        &["libvirt-clients", "libvirt-daemon", "libvirt-daemon-driver-qemu"],
        "testing a domain of libvirt",
    ),
    ("metrics", &["prometheus", "python3-jsonschema"], "testing the metrics"),
    ("newcomer", &["debootstrap", "systemd-container"], "following the book in a new machine"),
    ("packages", &["fish", "man-db", "zsh"], "checking man pages and completions"),
    (
        "slurm",
        &[
            "iproute2",
            "mariadb-server",
            "munge",
            "shellcheck",
            "slurm-client",
            "slurmctld",
            "slurmd",
            "slurmdbd",
        ],
        "testing a cluster of Slurm",
    ),
    ("survive", &["iproute2"], "testing with networks of their own"),
];

/// Parts that run neither the optimized daemons nor test programs.
const WITHOUT_BUILDS: &[&str] = &["compatibility", "debug_kernels", "docs", "driver"];

/// Parts that come before all others.
const FIRST: &[&str] = &["demo", "unit", "loom", "fuzz", "miri"];

/// What the parts of a run have reported.
#[derive(Default)]
struct Report {
    tally: Tally,
    /// The parts that failed.
    broken: Vec<String>,
    /// Each part's name and duration, and the processor time of its tests.
    times: Vec<String>,
    /// The processor time of the part that runs.
    processors: Duration,
    /// The lines of a part that runs beside others, which are shown when it has ended.
    kept: Option<String>,
}

/// How many tests passed and failed, as reported by the test runners, and what the failed ones said.
#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    /// What each failed test said.
    said: Vec<Said>,
    /// Whether the next line is one of the last of them.
    saying: bool,
}

/// Why a test failed, in a few lines: those from its error to its backtrace. One that names no error has its
/// last lines here.
#[derive(Default)]
struct Said {
    test: String,
    lines: VecDeque<String>,
    failed: bool,
}

/// Most lines that are repeated of a failed test.
const MOST_SAID: usize = 20;

/// How many of them may be what it printed before its error.
const SAID_BEFORE: usize = 4;

impl Said {
    fn add(&mut self, line: &str) {
        if line.starts_with("Error: ") || line.contains("' panicked at ") {
            self.failed = true;
            self.lines.drain(..self.lines.len().saturating_sub(SAID_BEFORE));
        }
        if self.lines.len() < MOST_SAID {
            self.lines.push_back(line.to_owned());
        } else if !self.failed {
            self.lines.pop_front();
            self.lines.push_back(line.to_owned());
        }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.test)?;
        self.lines.iter().try_for_each(|line| write!(f, "\n{line}"))
    }
}

/// Some tests have both ends of hundreds of connections, and a new machine lets a shell's processes open 1024
/// files.
fn raise_descriptor_limit() {
    const ENOUGH: u64 = 1 << 14;
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(ENOUGH);
        if soft < wanted { setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) } else { Ok(()) }
    });
    if let Err(e) = raised {
        eprintln!("cannot raise the limit of open files, without which some tests fail: {e}");
    }
}

/// Runs the selected parts, or all. Fails if a test failed.
pub fn test(arguments: &Arguments) -> Result<()> {
    raise_descriptor_limit();
    let known = known_parts()?;
    for part in &arguments.parts {
        if !known.contains(part) {
            bail!("unknown part {part:?}; the parts are: {}", known.join(", "));
        }
    }
    let parts: Vec<&str> = match arguments.parts.as_slice() {
        [] => known.iter().map(String::as_str).filter(|part| !ON_REQUEST.contains(part)).collect(),
        named => named.iter().map(String::as_str).collect(),
    };

    let files = parts.iter().filter(|part| !FIRST.contains(part)).map(|part| (*part).to_owned());
    // The part debug_kernels runs tests of the part driver, too.
    let driver =
        (parts.contains(&"debug_kernels") && !parts.contains(&"driver")).then(|| "driver".to_owned());
    let executables = Executables::of(parts.contains(&"unit"), files.chain(driver).collect());

    let mut report = Report::default();
    let (first, others): (Vec<&str>, Vec<&str>) = parts.into_iter().partition(|part| FIRST.contains(part));
    let (mut machines, others): (Vec<&str>, Vec<&str>) =
        others.into_iter().partition(|part| MACHINES.contains(part));
    machines.sort_by_key(|part| MACHINES.iter().position(|name| name == part));
    let builds = machines.iter().chain(&others).any(|part| !WITHOUT_BUILDS.contains(part));
    // The demonstration builds what it needs by itself.
    let (demo, first): (Vec<&str>, Vec<&str>) = first.into_iter().partition(|part| *part == "demo");
    demo.into_iter().for_each(|part| report.run(part, &executables));
    // What the other parts need is built meanwhile: unit tests wait a good part of their time. Those parts
    // build once more, and say what is wrong.
    let built = std::thread::scope(|scope| {
        let building = builds.then(|| {
            scope.spawn(|| {
                let start = Instant::now();
                let _ = artifacts::build().and_then(|()| programs::build());
                start.elapsed()
            })
        });
        first.into_iter().for_each(|part| report.run(part, &executables));
        building.map(|building| building.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    report.times.extend(built.map(|took| format!("builds {:.0} s", took.as_secs_f64())));
    let (machines, others) = (Mutex::new(VecDeque::from(machines)), Mutex::new(VecDeque::from(others)));
    let lock = |parts| Mutex::lock(parts).unwrap_or_else(PoisonError::into_inner);
    let two = !lock(&machines).is_empty();
    // Those that boot machines are taken from both ends: the short ones by whoever has run the others.
    let first = || lock(&machines).pop_front().or_else(|| lock(&others).pop_front());
    let second = || {
        let last = || lock(&machines).pop_back_if(|part| !WRITE_DIST.contains(part));
        lock(&others).pop_front().or_else(last)
    };
    let beside = std::thread::scope(|scope| {
        let beside = two.then(|| {
            scope.spawn(|| {
                let mut report = Report { kept: Some(String::new()), ..Report::default() };
                std::iter::from_fn(second).for_each(|part| report.run(part, &executables));
                report
            })
        });
        std::iter::from_fn(first).for_each(|part| report.run(part, &executables));
        beside.map(|beside| beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    report.add(beside.unwrap_or_default());
    println!("how long each part took, and the processor time of its tests: {}", report.times.join(", "));
    // Repeated, because a failure is far up by now, and whoever sees only the end is to see it too.
    report.tally.said.iter().for_each(|said| println!("{said}"));
    println!("{} passed, {} failed", report.tally.passed, report.tally.failed);
    if !report.broken.is_empty() {
        bail!("these parts failed: {}; the logs are in {}", report.broken.join(", "), tree::logs().display());
    }
    Ok(())
}

impl Report {
    /// Runs a part.
    fn run(&mut self, part: &str, executables: &Executables) {
        if self.kept.is_none() {
            eprintln!("== {part}");
        }
        let start = Instant::now();
        let before = self.tally.failed;
        let succeeded = run_part(part, executables, self).unwrap_or_else(|error| {
            let told = format!("error: {error:#}");
            match &mut self.kept {
                Some(kept) => *kept += &format!("{told}\n"),
                None => eprintln!("{told}"),
            }
            false
        });
        // A runner that failed before reporting a test counts as one failed test.
        if !succeeded && self.tally.failed == before {
            self.tally.failed += 1;
        }
        if !succeeded {
            self.broken.push(part.to_owned());
        }
        let processors = std::mem::take(&mut self.processors).as_secs_f64();
        self.times.push(format!("{part} {:.0} s ({processors:.0} s)", start.elapsed().as_secs_f64()));
        if let Some(kept) = &mut self.kept {
            print!("== {part}, which ran beside others\n{}", std::mem::take(kept));
        }
    }

    /// Runs a command of a part. Shows its lines, or keeps them, and counts the tests. Returns whether it
    /// succeeded.
    fn command(&mut self, command: &mut Command, log: &Path) -> Result<bool> {
        let ended = process::lines(command, log, |line| {
            match &mut self.kept {
                Some(kept) => *kept += &format!("{line}\n"),
                None => println!("{line}"),
            }
            self.tally.count(line);
        })?;
        self.processors += ended.processors;
        Ok(ended.status.success())
    }

    fn add(&mut self, other: Report) {
        self.tally.passed += other.tally.passed;
        self.tally.failed += other.tally.failed;
        self.tally.said.extend(other.tally.said);
        self.broken.extend(other.broken);
        self.times.extend(other.times);
    }
}

/// The built-in parts and the names of the files in `tests/tests/`.
fn known_parts() -> Result<Vec<String>> {
    let folder = tree::root().join("tests/tests");
    let mut parts = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        if let (Some(name), Some("rs")) = (path.file_stem(), path.extension().and_then(|e| e.to_str())) {
            parts.push(name.to_string_lossy().into_owned());
        }
    }
    parts.sort();
    parts.splice(0..0, ["demo", "unit", "loom", "fuzz", "miri"].map(str::to_owned));
    Ok(parts)
}

/// Fetches what the parts that run by default need, so that downloads can run while something else uses the
/// processors.
pub fn fetch() -> Result<()> {
    machines::fetch()?;
    package::tools()?;
    install(
        &DEBIAN.iter().map(|(part, ..)| *part).filter(|part| !ON_REQUEST.contains(part)).collect::<Vec<_>>(),
    )
}

/// Installs Debian packages that only these parts need.
fn install(parts: &[&str]) -> Result<()> {
    let mut wanted = DEBIAN.iter().filter(|(part, ..)| parts.contains(part));
    wanted.try_for_each(|(_, names, purpose)| debian::packages(names, purpose))
}

/// Prepares and runs a part. Returns whether it succeeded as a whole.
fn run_part(part: &str, executables: &Executables, report: &mut Report) -> Result<bool> {
    let log = process::log(&format!("test-{part}"))?;
    install(&[part])?;
    // The arguments of the part's program.
    let arguments: &[&str] = match part {
        "demo" => {
            report.tally.passed += demo::demonstrate(false, executables.have_unit())?;
            return Ok(true);
        }
        "unit" => {
            let (succeeded, processors) =
                unit_tests::run(&executables.unit(&log)?, &log, |line| report.tally.count(line))?;
            report.processors += processors;
            // The examples in the documentation.
            let mut command = process::cargo();
            command.args(["test", "--no-fail-fast", "--workspace", "--doc"]);
            return Ok(report.command(&mut command, &log)? && succeeded);
        }
        "loom" => {
            // loom replaces the atomics. A separate target folder keeps this build from invalidating others.
            let mut command = process::cargo();
            command.args(["test", "-p", "rgpu-protocol", "--lib", "--target-dir"]);
            command.arg(tree::target().join("loom")).arg("loom").env("RUSTFLAGS", "--cfg loom");
            return report.command(&mut command, &log);
        }
        "fuzz" => {
            let (passed, failed) = fuzz::fuzz(&log)?;
            report.tally.passed += passed;
            report.tally.failed += failed;
            return Ok(failed == 0);
        }
        "miri" => {
            let [mut protocol, mut shared] = nightly::miri()?;
            let succeeded = report.command(&mut protocol, &log)?;
            return Ok(report.command(&mut shared, &log)? && succeeded);
        }
        "programs" => {
            artifacts::build()?;
            programs::build()?;
            // Each test starts a server with its own workers: two at once are enough for a small machine.
            &["--test-threads", "2"]
        }
        "compatibility" | "docs" => &["--test-threads", "1"],
        "driver" => {
            machines::prepare_all_kernels()?;
            // Each test has its own machine and device and mostly waits for the boot.
            &["--test-threads", "2"]
        }
        "debug_kernels" => {
            artifacts::build()?;
            programs::build()?;
            machines::prepare()?;
            let mut succeeded = true;
            for kernel in machines::debug_kernels()? {
                // Run the tests in `driver` that boot this kernel. After a suspend, the kernel runs code
                // before KCSAN can work.
                let skipped = ["--skip", "the_driver_works_on_linux"];
                let asleep: &[&str] = if kernel.ends_with("kcsan") { &["--skip", "a_suspend"] } else { &[] };
                for part in ["driver", part] {
                    let mut command = executables.part(part, &log)?;
                    command.args(["--test-threads", "2", "--nocapture"]).args(skipped).args(asleep);
                    command.env("RGPU_TEST_KERNEL", &kernel);
                    succeeded &= report.command(&mut command, &log)?;
                }
            }
            return Ok(succeeded);
        }
        "dist" => {
            dist::dist()?;
            programs::build()?;
            &[]
        }
        "guest_packages" => {
            package::make(&package::folder(), Build::Release, 1, package::QUICK)?;
            programs::build()?;
            machines::prepare_dkms()?;
            &["--nocapture"]
        }
        "image" => {
            image::make(&image::Wanted::usual())?;
            programs::build()?;
            machines::prepare()?;
            &["--test-threads", "2", "--nocapture"]
        }
        "newcomer" => {
            package::make(&package::folder(), Build::Release, 1, package::QUICK)?;
            programs::build()?;
            machines::prepare_slurm()?;
            &["--nocapture"]
        }
        "packages" => {
            package::make(&package::folder(), Build::Release, 1, package::QUICK)?;
            programs::build()?;
            machines::prepare_systemd()?;
            &["--test-threads", "2", "--nocapture"]
        }
        _ => {
            artifacts::build()?;
            programs::build()?;
            if matches!(part, "guest_counts" | "rgpuctl" | "round_trips") {
                bench::compile()?;
            }
            match part {
                "guest_counts" | "libvirt" | "many_guests" | "vm" => drop(machines::prepare()?),
                "rdma" => {
                    artifacts::peers()?;
                    machines::prepare_rdma()?;
                }
                _ => {}
            }
            // Whole daemons run one at a time, so that tests do not affect each other's counters. Tests with
            // a machine have daemons of their own, too, and wait for it most of the time, so two run at once.
            match part {
                "vm" => &["--test-threads", "2"],
                // Its tests also wait until links and peers count as lost, for 10 to 30 seconds each.
                "rdma" => &["--test-threads", "3"],
                // Each test has a cluster in namespaces of its own, and one waits for a lease to end.
                "slurm" => &["--test-threads", "4"],
                // Its figures are part of what it is for.
                "many_guests" => &["--nocapture"],
                _ => &["--test-threads", "1"],
            }
        }
    };
    let mut command = executables.part(part, &log)?;
    report.command(command.args(arguments), &log)
}

impl Tally {
    /// Takes note of a line: adds up one like `test result: ok. 5 passed; 0 failed; …`, and keeps those
    /// behind one like `---- test stdout ----`.
    fn count(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.said.push(Said { test: line.to_owned(), ..Said::default() });
            self.saying = true;
        } else if line == "failures:" || line.eq_ignore_ascii_case("stack backtrace:") {
            self.saying = false;
        } else if let (Some(said), true) = (self.said.last_mut(), self.saying) {
            said.add(line);
        }
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for part in counts.split(';') {
            match part.trim().split_once(' ') {
                Some((number, "passed")) => self.passed += number.parse::<u64>().unwrap_or(0),
                Some((number, "failed")) => self.failed += number.parse::<u64>().unwrap_or(0),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_with_a_place_of_their_own_exist() {
        let known = known_parts().unwrap();
        for part in MACHINES.iter().chain(FIRST).chain(ON_REQUEST).chain(WITHOUT_BUILDS) {
            assert!(known.iter().any(|name| name == part), "{part}");
        }
    }

    #[test]
    fn what_runs_beside_others_is_counted_and_kept() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut beside = Report { kept: Some(String::new()), ..Report::default() };
        let mut command = Command::new("printf");
        command.arg("test a ... ok\\ntest result: ok. 1 passed; 0 failed; 0 ignored\\n");
        assert!(beside.command(&mut command, log.path()).unwrap());
        assert_eq!(
            beside.kept.as_deref(),
            Some("test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n")
        );
        assert!(!beside.command(&mut Command::new("false"), log.path()).unwrap());
        let mut all =
            Report { tally: Tally { passed: 2, failed: 1, ..Tally::default() }, ..Report::default() };
        all.add(beside);
        assert_eq!((all.tally.passed, all.tally.failed), (3, 1));
    }

    #[test]
    fn result_lines_are_added_up() {
        let mut tally = Tally::default();
        tally.count(
            "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.05s",
        );
        tally.count("test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out");
        tally.count("test something ... ok");
        assert_eq!((tally.passed, tally.failed), (6, 3));
    }

    #[test]
    fn why_tests_failed_is_kept_for_the_end() {
        let mut tally = Tally::default();
        let output = "test a ... FAILED\n\nfailures:\n\n---- a stdout ----\nError: known-twice\n\nCaused by:\n    \
                      0: it is not closed\n\nStack backtrace:\n   0: main\n---- b stdout ----\nx\n\nfailures:\n    a\n    b\n";
        output.lines().for_each(|line| tally.count(line));
        let said = |tally: &Tally| tally.said.iter().map(Said::to_string).collect::<Vec<_>>();
        let a = "---- a stdout ----\nError: known-twice\n\nCaused by:\n    0: it is not closed\n";
        assert_eq!(said(&tally), [a, "---- b stdout ----\nx\n"]);

        // What a test printed while all was well does not keep out why it failed.
        tally.count("---- c stdout ----");
        (0..100).for_each(|line| tally.count(&line.to_string()));
        assert_eq!(tally.said[2].lines.len(), MOST_SAID);
        assert_eq!(tally.said[2].lines.back().unwrap(), "99");
        tally.count("Error: 1 program failed");
        (0..100).for_each(|line| tally.count(&line.to_string()));
        let c = said(&tally)[2].clone();
        assert!(c.starts_with("---- c stdout ----\n96\n97\n98\n99\nError: 1 program failed\n0\n1\n"), "{c}");
        assert_eq!(tally.said[2].lines.len(), MOST_SAID);
    }
}
