//! `cargo xtask demo`: a guest without a GPU runs CUDA programs, and a server on this machine executes them.
//!
//! On a fresh checkout, most of the time goes into compiling rgpu, compiling the programs and fetching a
//! guest. All of that runs concurrently, limited to what the demonstration needs. rgpu (except the software
//! GPU) is compiled without optimization, which takes a third of the time and shares dependencies with xtask.
//! `cargo xtask test demo` runs the same code.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use rgpu_tests::guest::{self, Host, Options};
use rgpu_tests::machine::{self, Accelerator, Machine};
use rgpu_tests::programs::{Program, portable};
use rgpu_tests::tree::{self, Build};

use crate::programs::{self, Runtime};
use crate::progress::{self, Step};
use crate::{artifacts, debian, demo_shell, machines, toolchain};

/// The programs in the order in which they run, and what each does. All of them run on the software GPU.
const PROGRAMS: [(&str, &str); 10] = [
    ("device_list", "asks for the devices, as nvidia-smi does"),
    ("vectorAdd", "adds two vectors"),
    ("matrixMul", "multiplies matrices in shared memory"),
    ("reduction", "sums with shuffles, shared memory, atomics"),
    ("streams_events", "overlaps streams, orders them with events"),
    ("managed_variables", "host and device share unified memory"),
    ("cooperative_tiles", "splits blocks into cooperative groups"),
    ("device_printf", "prints from a kernel"),
    ("textures", "samples textures in two and three dimensions"),
    ("graph_explicit", "builds CUDA graphs and launches them"),
];

/// The maximum length of a program's result in the table, in characters.
const WIDTH: usize = 48;

/// Why Debian packages are needed.
const PURPOSE: &str = "the CUDA compiler and the guest";

/// How long one program may run in an emulated guest.
const LIMIT: Duration = Duration::from_secs(900);

/// Boot a guest and run CUDA programs in it, on a GPU server on this machine.
///
/// Run it as root on Debian 12: it installs what it needs (packages, NVIDIA's compiler, QEMU, a guest). The
/// server uses this machine's GPU, or the software GPU if there is none.
#[derive(Args)]
pub struct Arguments {
    /// Keep the guest running afterwards and open a shell in it
    #[arg(long)]
    keep: bool,
}

/// A line of the table at the end: the outcome of one program.
struct Row {
    name: &'static str,
    what: &'static str,
    passed: bool,
    detail: String,
    time: Duration,
}

/// Runs the demonstration. Fails if any program fails.
pub fn demo(arguments: &Arguments) -> Result<()> {
    let start = Instant::now();
    demonstrate(arguments.keep, false)?;
    println!(
        "Done in {:.0} s. What to do next:

  cargo xtask demo --keep                         the same, then a shell in the guest
  cargo xtask build                               build rgpu for use: optimized, with all its libraries
  target/release/rgpuctl run -- ./your_program    then run a CUDA program of yours on this machine
  target/release/rgpuctl doctor                   and see what it lacks for a GPU server or for guests
  docs/README.md                                  the book: guests, containers, GPU servers and hosts",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Prepares everything, boots the guest and runs the programs. Returns how many programs ran, all of which
/// passed. `before_tests` is that of [`artifacts::build_quickly`].
pub fn demonstrate(keep: bool, before_tests: bool) -> Result<u64> {
    let programs = chosen()?;
    let accelerator = prepare(&programs, before_tests)?;

    let step = Step::spinner("starting rgpu-server and vhost-rgpu");
    let options =
        Options { transport: "local", backend: "auto", poll_us: None, grace: 3, build: Build::Debug };
    let host = Host::start("demo", options)?;
    let logs = host.logs();
    step.done(&format!("logs in {}", logs.display()));

    let folder = tempfile::Builder::new().prefix("rgpu-demo-").tempdir().context("cannot create a folder")?;
    let console = folder.path().join("shell.sock");
    let step = Step::spinner("booting the guest");
    let mut builder =
        guest::builder_of(Build::Debug, &programs, &tree::programs_static()).rgpu_socket(host.socket());
    if keep {
        builder = demo_shell::console(builder, &console);
    }
    let machine = builder.boot()?;
    step.done(match accelerator {
        Accelerator::Kvm => "with KVM",
        Accelerator::Tcg => "emulated, since this machine has no usable KVM",
    });

    let step = Step::bar("running CUDA programs in the guest", programs.len());
    let mut rows = Vec::new();
    let mut devices = String::new();
    for (program, (name, what)) in programs.iter().zip(PROGRAMS) {
        step.note(name);
        let (row, output) = run(&machine, program, name, what);
        keep_output(logs, name, &output)?;
        if name == "device_list" {
            devices = output;
        }
        rows.push(row);
        step.advance();
    }
    let failed = rows.iter().filter(|row| !row.passed).count();
    step.done(&format!("{} of {} passed", rows.len() - failed, rows.len()));

    println!("\nThe guest has no GPU. Its programs see the one of rgpu-server on this machine:\n");
    devices.lines().filter(|line| !line.starts_with("PASS ")).for_each(|line| println!("  {line}"));
    print_table(&rows);
    if keep {
        demo_shell::run(&machine, &console)?;
    }
    keep_output(logs, "guest-console", &machine.console_log())?;
    if failed > 0 {
        bail!(
            "{failed} of {} programs failed. Their output, the daemons' logs and the guest's console are in {}",
            rows.len(),
            logs.display()
        );
    }
    machine.check_console()?;
    machine.shutdown()?;
    Ok(rows.len() as u64)
}

/// The programs of [`PROGRAMS`], from the manifest.
fn chosen() -> Result<Vec<Program>> {
    let all = portable()?;
    let find = |(name, _): (&str, &str)| {
        let found = all.iter().find(|program| program.name == name);
        found.cloned().with_context(|| format!("programs.toml has no {name} that runs on any device"))
    };
    PROGRAMS.into_iter().map(find).collect()
}

/// Builds and fetches rgpu, the programs and the guest concurrently.
fn prepare(programs: &[Program], before_tests: bool) -> Result<Accelerator> {
    let packages = [&toolchain::packages()[..], &machine::PACKAGES].concat();
    debian::check(&packages, PURPOSE)?;
    std::thread::scope(|scope| {
        // Compiling takes longest and needs nothing else, so it starts first.
        let build = scope.spawn(|| report_error(artifacts::build_quickly(before_tests)));
        let others = debian::packages(&packages, PURPOSE).and_then(|()| {
            let compile = scope.spawn(|| report_error(programs::build_these(programs, &[Runtime::Static])));
            let accelerator = report_error(machines::prepare());
            joined(compile.join())?;
            accelerator
        });
        joined(build.join())?;
        others
    })
}

/// Prints an error immediately, because other steps may continue for minutes.
fn report_error<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| {
        progress::print(&format!(
            "error: {error:#}\nThe demonstration stops once the running steps have finished."
        ));
        anyhow!("a step of the preparation failed: see above")
    })
}

fn joined<T>(result: std::thread::Result<Result<T>>) -> Result<T> {
    result.unwrap_or_else(|_| Err(anyhow!("a thread of the preparation panicked")))
}

/// Runs a program in the guest. Returns its line of the table and its complete output.
fn run(machine: &Machine, program: &Program, name: &'static str, what: &'static str) -> (Row, String) {
    let start = Instant::now();
    let result = machine.run(&format!("{name} {}", program.args.join(" ")), LIMIT);
    let time = start.elapsed();
    let row = |passed, detail| Row { name, what, passed, detail, time };
    let output = match result {
        Ok(output) => output,
        Err(error) => {
            return (row(false, format!("no result within {} s", LIMIT.as_secs())), format!("{error:#}\n"));
        }
    };
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = stdout.lines().last().unwrap_or_default();
    let passed = output.success() && last.starts_with(&format!("PASS {name}"));
    let detail = last.splitn(3, ' ').nth(2).unwrap_or(last).to_owned();
    let detail = if passed || !detail.is_empty() { detail } else { format!("exit status {}", output.status) };
    (row(passed, detail), format!("{stdout}{stderr}"))
}

fn keep_output(logs: &Path, name: &str, output: &str) -> Result<()> {
    let path = logs.join(format!("{name}.log"));
    std::fs::write(&path, output).with_context(|| format!("cannot write {}", path.display()))
}

fn print_table(rows: &[Row]) {
    let width = |header: &str, column: fn(&Row) -> &str| {
        rows.iter().map(|row| column(row).chars().count()).max().unwrap_or(0).max(header.len())
    };
    let (name, what) = (width("program", |row| row.name), width("what it does", |row| row.what));
    println!(
        "\n  {:name$}  {:what$}  {:7}  {:>6}  result, as it printed it",
        "program", "what it does", "", "time"
    );
    for row in rows {
        let verdict = if row.passed { "correct" } else { "FAILED" };
        let seconds = row.time.as_secs_f64();
        let detail = shortened(&row.detail);
        println!("  {:name$}  {:what$}  {verdict:7}  {seconds:>4.1} s  {detail}", row.name, row.what);
    }
    println!();
}

/// Shortened to [`WIDTH`] characters for the table. The logs have the complete output.
fn shortened(text: &str) -> String {
    if text.chars().count() <= WIDTH {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(WIDTH - 1).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_result_is_shortened_for_the_table() {
        assert_eq!(shortened("20077 elements"), "20077 elements");
        let short = shortened(&"é".repeat(200));
        assert_eq!((short.chars().count(), short.chars().last()), (WIDTH, Some('…')));
    }

    #[test]
    fn every_program_of_the_demonstration_runs_on_the_software_gpu() {
        let names: Vec<String> = chosen().unwrap().into_iter().map(|program| program.name).collect();
        assert_eq!(names, PROGRAMS.map(|(name, _)| name));
    }
}
