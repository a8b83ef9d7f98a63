//! `cargo xtask demo`: the whole path once, in sight: a guest without a GPU runs CUDA programs, and a server on this
//! machine computes them.

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::machine::{Accelerator, Kernel, Machine, Qemu};
use rgpu_tests::programs::Program;
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{artifacts, programs};

/// How long one program may run in an emulated guest before the demonstration gives up on it.
const LIMIT: Duration = Duration::from_secs(300);

/// Where the libraries and the programs are in the guest.
const LIBRARIES: &str = "/opt/rgpu/lib";
const PROGRAMS: &str = "/opt/rgpu/programs";

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

    let logs = tree::logs().join("demo");
    let folder = tempfile::Builder::new().prefix("rgpu-demo-").tempdir().context("cannot create a folder")?;
    let (_server, _bridge) = start_daemons(folder.path(), &logs)?;
    let machine = boot(&folder.path().join("vhost.sock"), &programs)?;

    let step = Step::bar("running the programs in the guest", programs.len());
    let mut rows = Vec::new();
    let mut device = "an unknown device".to_owned();
    for program in &programs {
        step.note(&program.name);
        let (row, output) = run(&machine, program)?;
        if program.name == "device_list" {
            device = device_name(&output).unwrap_or(device);
        }
        if !row.passed {
            keep_output(&logs, program, &output)?;
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
    print_table(&rows, &format!("guest ({how}) → {device}"));
    if arguments.keep {
        shell(&machine)?;
    }
    machine.shutdown()?;
    if failed > 0 {
        bail!(
            "{failed} of {} programs failed; their output and the daemons' logs are in {}",
            rows.len(),
            logs.display()
        );
    }
    Ok(())
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

fn start_daemons(folder: &Path, logs: &Path) -> Result<(Daemon, Daemon)> {
    let step = Step::spinner("starting rgpu-server and vhost-rgpu");
    let address = format!("unix:{}", folder.join("server.sock").display());
    let server = Daemon::start(
        "rgpu-server",
        ["--listen", &address, "--backend", "auto", "--workers", "2"],
        &logs.join("rgpu-server.log"),
        &folder.join("server.status"),
    )?;
    let socket = folder.join("vhost.sock");
    let socket = socket.to_str().context("a path is not UTF-8")?;
    let bridge = Daemon::start(
        "vhost-rgpu",
        ["--socket", socket, "--server", &address, "--transport", "local"],
        &logs.join("vhost-rgpu.log"),
        &folder.join("vhost-rgpu.status"),
    )?;
    step.done("");
    Ok((server, bridge))
}

fn boot(socket: &Path, programs: &[Program]) -> Result<Machine> {
    let step = Step::spinner("booting the guest");
    let mut builder = Machine::builder().memory_mib(1024).driver(true).host_libraries().rgpu_socket(socket);
    for library in artifacts::LIBRARIES {
        let file = tree::guest_libraries().join(library.name);
        if file.is_file() {
            builder = builder.file(file, format!("{LIBRARIES}/{}", library.name));
        }
    }
    for program in programs {
        builder = builder.file(tree::programs().join(&program.name), format!("{PROGRAMS}/{}", program.name));
    }
    let machine = builder.boot()?;
    step.done("");
    Ok(machine)
}

/// Runs one program in the guest; gives its line of the table and everything it printed.
fn run(machine: &Machine, program: &Program) -> Result<(Row, String)> {
    let command = [
        format!("LD_LIBRARY_PATH={LIBRARIES}"),
        format!("{PROGRAMS}/{}", program.name),
        program.args.join(" "),
    ]
    .join(" ");
    let start = Instant::now();
    let output = machine.run(&command, LIMIT)?;
    let time = start.elapsed();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = stdout.lines().last().unwrap_or_default();
    let passed = output.status == 0 && last.starts_with(&format!("PASS {}", program.name));
    let detail = last.splitn(3, ' ').nth(2).unwrap_or(last).to_owned();
    let detail = if passed || !detail.is_empty() { detail } else { format!("exit status {}", output.status) };
    Ok((Row { name: program.name.clone(), passed, detail, time }, format!("{stdout}{stderr}")))
}

/// The first device's name in what `device_list` prints.
fn device_name(output: &str) -> Option<String> {
    let line = output.lines().find_map(|line| line.trim().strip_prefix("0: "))?;
    Some(line.split(", capability").next()?.to_owned())
}

fn keep_output(logs: &Path, program: &Program, output: &str) -> Result<()> {
    let path = logs.join(format!("{}.log", program.name));
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

/// Hands each line that is typed to the guest's shell, until the end of the input.
fn shell(machine: &Machine) -> Result<()> {
    println!(
        "The guest is up. Each line runs in its shell, as root; the programs are in {PROGRAMS}. Ctrl-D ends it."
    );
    let environment = format!("export LD_LIBRARY_PATH={LIBRARIES}; cd {PROGRAMS};");
    let mut lines = std::io::stdin().lock().lines();
    loop {
        print!("guest# ");
        std::io::stdout().flush().ok();
        let Some(line) = lines.next() else { break };
        let line = line.context("cannot read the standard input")?;
        if line.trim() == "exit" {
            break;
        }
        match machine.run(&format!("{environment} {line}"), Duration::from_secs(24 * 3600)) {
            Ok(output) => {
                print!("{}", String::from_utf8_lossy(&output.stdout));
                eprint!("{}", String::from_utf8_lossy(&output.stderr));
                if !output.success() {
                    eprintln!("(exit status {})", output.status);
                }
            }
            Err(error) => eprintln!("{error:#}"),
        }
    }
    println!();
    Ok(())
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
