//! `cargo xtask demo`: the whole path once, in sight: a guest without a GPU runs CUDA programs, and a server on this
//! machine computes them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use rgpu_tests::guest::{self, Host, Options};
use rgpu_tests::machine::{Accelerator, Kernel, Machine, Qemu};
use rgpu_tests::programs::Program;

use crate::progress::Step;
use crate::{artifacts, demo_shell, programs};

/// How long one program may run in an emulated guest before the demonstration gives up on it.
const LIMIT: Duration = Duration::from_secs(300);

/// Boot a guest and run CUDA programs in it, on a GPU server of this machine.
///
/// Sets up everything it needs, as root on Debian 12: packages, NVIDIA's compiler, QEMU, a guest. The server uses
/// this machine's GPU if there is one, else a GPU in software.
#[derive(Args)]
pub struct Arguments {
    /// Leave the guest up afterwards, with a shell in it
    #[arg(long)]
    keep: bool,
}

/// One line of the closing table.
struct Row {
    name: String,
    passed: bool,
    detail: String,
    time: Duration,
}

/// Runs the demonstration; fails if any program does.
pub fn demo(arguments: &Arguments) -> Result<()> {
    artifacts::build()?;
    let programs = programs::build()?;
    let accelerator = prepare_machine()?;

    let step = Step::spinner("starting rgpu-server and vhost-rgpu");
    let options = Options { transport: "local", backend: "auto", poll_us: None };
    let host = Host::start("demo", options)?;
    let logs = host.logs();
    step.done(&format!("logs in {}", logs.display()));

    let folder = tempfile::Builder::new().prefix("rgpu-demo-").tempdir().context("cannot create a folder")?;
    let console = folder.path().join("shell.sock");
    let step = Step::spinner("booting the guest");
    let mut builder = guest::builder(&programs).rgpu_socket(host.socket());
    if arguments.keep {
        builder = demo_shell::console(builder, &console);
    }
    let machine = builder.boot()?;
    step.done("");

    let step = Step::bar("running the programs in the guest", programs.len());
    let mut rows = Vec::new();
    let mut listing = String::new();
    for program in &programs {
        step.note(&program.name);
        let (row, output) = run(&machine, program);
        keep_output(logs, &program.name, &output)?;
        if program.name == "device_list" {
            listing = output;
        }
        rows.push(row);
        step.advance();
    }
    let failed = rows.iter().filter(|row| !row.passed).count();
    step.done(&format!("{} of {} passed", rows.len() - failed, rows.len()));

    let how = match accelerator {
        Accelerator::Kvm => "KVM",
        Accelerator::Tcg => "emulated",
    };
    println!("\nThe guest has no GPU of its own. Its programs see:\n");
    listing.lines().filter(|line| !line.starts_with("PASS ")).for_each(|line| println!("  {line}"));
    let device = device_name(&listing).unwrap_or_else(|| "an unknown device".to_owned());
    print_table(&rows, &format!("guest ({how}) → {device}"));
    if arguments.keep {
        demo_shell::run(&machine, &console)?;
    }
    keep_output(logs, "guest-console", &machine.console_log())?;
    if failed > 0 {
        bail!(
            "{failed} of {} programs failed; what they and the guest's kernel said, and the daemons' logs, are in {}",
            rows.len(),
            logs.display()
        );
    }
    machine.check_console()?;
    machine.shutdown()
}

/// Fetches and builds what a machine needs, a step at a time, so that each is seen.
fn prepare_machine() -> Result<Accelerator> {
    let step = Step::spinner("finding a QEMU that can give a guest an rgpu device");
    let qemu = Qemu::find()?;
    let accelerator = qemu.accelerator()?;
    step.done(&format!("{}, {accelerator:?}", qemu.version()));
    let step = Step::spinner("fetching the guest's kernel and building its driver");
    let kernel = Kernel::default();
    let version = kernel.files()?.version;
    kernel.driver()?;
    step.done(&version);
    Ok(accelerator)
}

/// Runs one program in the guest; gives its line of the table and everything it printed.
fn run(machine: &Machine, program: &Program) -> (Row, String) {
    let start = Instant::now();
    let result = machine.run(&format!("{} {}", program.name, program.args.join(" ")), LIMIT);
    let time = start.elapsed();
    let row = |passed, detail| Row { name: program.name.clone(), passed, detail, time };
    let output = match result {
        Ok(output) => output,
        Err(error) => {
            return (row(false, format!("no answer within {} s", LIMIT.as_secs())), format!("{error:#}\n"));
        }
    };
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = stdout.lines().last().unwrap_or_default();
    let passed = output.status == 0 && last.starts_with(&format!("PASS {}", program.name));
    let detail = last.splitn(3, ' ').nth(2).unwrap_or(last).to_owned();
    let detail = if passed || !detail.is_empty() { detail } else { format!("exit status {}", output.status) };
    (row(passed, detail), format!("{stdout}{stderr}"))
}

/// The first device's name in what `device_list` prints.
fn device_name(output: &str) -> Option<String> {
    let line = output.lines().find_map(|line| line.trim().strip_prefix("0: "))?;
    Some(line.split(", capability").next()?.to_owned())
}

fn keep_output(logs: &Path, name: &str, output: &str) -> Result<()> {
    let path = logs.join(format!("{name}.log"));
    std::fs::write(&path, output).with_context(|| format!("cannot write {}", path.display()))
}

fn print_table(rows: &[Row], place: &str) {
    let width = |header: &str, column: fn(&Row) -> usize| {
        rows.iter().map(column).max().unwrap_or(0).max(header.len())
    };
    let name = width("program", |row| row.name.len());
    println!(
        "\n{:name$}  {:place_width$}  {:7}  {:>7}  what it checked against the CPU",
        "program",
        "where it ran",
        "result",
        "time",
        place_width = place.chars().count()
    );
    for row in rows {
        let result = if row.passed { "correct" } else { "FAILED" };
        println!(
            "{:name$}  {place}  {result:7}  {:>5.1} s  {}",
            row.name,
            row.time.as_secs_f64(),
            row.detail
        );
    }
    println!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_devices_name_is_found_in_the_listing() {
        let output =
            "CUDA driver 13.0\n  0: rgpu software GPU, capability 7.5, 4 multiprocessors\nPASS device_list";
        assert_eq!(device_name(output).as_deref(), Some("rgpu software GPU"));
        assert_eq!(device_name("FAIL device_list"), None);
    }
}
