//! `rgpuctl trace`: runs a program as a native client and shows where its calls spend their time.
//!
//! With `RGPU_TRACE=FOLDER` each process records per-command timestamps: the program's library in `program-PID`, the bridge in `bridge-PID` (with the program's PID), the worker in
//! `worker-PID`. Each line is `seq stage nanoseconds operation`. This command joins them by `seq`.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::run::run_program;
use crate::session::Target;

/// Run a program as `run` does, and show where its calls spend their time
///
/// Prints a line for each operation that was sent to the server: the number of calls, the total time of one call, and the time from each stage to the next. Times are medians in
/// microseconds. An operation without an answer ends when it is executed. The stages are: appended to the ring; taken by the bridge; received by the worker; begun; executed (for work on
/// a stream: enqueued); answered; delivered by the bridge; woken (the program's thread has the answer). With transport local there are no stages of the bridge. With --server HOST the
/// stages on that host are missing.
#[derive(Args)]
#[command(after_long_help = "Example:
  rgpuctl trace --transport tcp -- ./vectorAdd")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Keep the timestamps of every command in this folder. It is created if needed
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// The stages after the first, in order.
const STAGES: [&str; 7] = ["taken", "received", "begun", "executed", "answered", "delivered", "woken"];
const FIRST: &str = "appended";

/// Runs the program, prints the table on standard error, and returns the program's exit status.
pub fn trace(arguments: &Arguments) -> Result<ExitCode> {
    let folder = match &arguments.keep {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
            folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?
        }
        None => nix::unistd::mkdtemp(&std::env::temp_dir().join("rgpu-trace-XXXXXX"))
            .context("cannot create a folder for the timestamps")?,
    };
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var("RGPU_TRACE", &folder) };
    let code = run_program(&arguments.target, &arguments.program);
    let tables = tables(&folder);
    if arguments.keep.is_none() {
        // Files that cannot be removed do no harm.
        let _ = std::fs::remove_dir_all(&folder);
    }
    let code = code?;
    for (program, table) in tables? {
        eprint!("rgpuctl: process {program}, microseconds:\n{table}");
    }
    Ok(code)
}

/// The times at which a command reached each stage.
#[derive(Default)]
struct Command {
    operation: String,
    at: HashMap<String, u64>,
}

type Commands = BTreeMap<u64, Command>;

fn read(text: &str, commands: &mut Commands) -> Option<()> {
    for line in text.lines() {
        let mut words = line.split(' ');
        let (seq, stage, at) = (words.next()?.parse().ok()?, words.next()?, words.next()?.parse().ok()?);
        let operation = words.next()?;
        let command: &mut Command = commands.entry(seq).or_default();
        if operation != "-" {
            operation.clone_into(&mut command.operation);
        }
        command.at.insert(stage.to_owned(), at);
    }
    Some(())
}

/// When the first command reached a stage.
fn begin(commands: &Commands, stage: &str) -> Option<u64> {
    commands.first_key_value()?.1.at.get(stage).copied()
}

/// A table for each process that recorded timestamps, with its process id.
fn tables(folder: &Path) -> Result<Vec<(String, String)>> {
    let (mut programs, mut bridges, mut workers) = (Vec::new(), HashMap::new(), Vec::new());
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((role, pid)) = name.split_once('-') else { continue };
        let text = std::fs::read_to_string(entry.path()).with_context(|| format!("cannot read {name}"))?;
        let mut commands = Commands::new();
        read(&text, &mut commands).with_context(|| format!("{name} was written by another version"))?;
        match role {
            "program" => programs.push((pid.to_owned(), commands)),
            "bridge" => drop(bridges.insert(pid.to_owned(), commands)),
            "worker" => workers.push(commands),
            _ => {}
        }
    }
    programs.sort_by_key(|(_, commands)| begin(commands, FIRST));
    Ok(programs
        .into_iter()
        .map(|(pid, mut commands)| {
            let start = begin(&commands, FIRST);
            // The worker of this program is the first to begin a command after the program's first command was appended.
            let worker = workers.iter().filter(|worker| begin(worker, "begun") >= start);
            let worker = worker.min_by_key(|worker| begin(worker, "begun"));
            for more in bridges.get(&pid).into_iter().chain(worker) {
                for (seq, command) in more {
                    if let Some(known) = commands.get_mut(seq) {
                        known.at.extend(command.at.iter().map(|(stage, at)| (stage.clone(), *at)));
                    }
                }
            }
            (pid, table(&commands))
        })
        .collect())
}

/// Times of one operation, in nanoseconds: from the first stage to the last, and from each stage to the next.
#[derive(Default)]
struct Times {
    total: Vec<u64>,
    steps: [Vec<u64>; STAGES.len()],
}

fn median(values: &mut [u64]) -> String {
    values.sort_unstable();
    match values.get(values.len() / 2) {
        Some(nanoseconds) => format!("{:.1}", *nanoseconds as f64 / 1e3),
        None => "–".to_owned(),
    }
}

fn table(commands: &Commands) -> String {
    let mut by_operation: BTreeMap<&str, Times> = BTreeMap::new();
    for command in commands.values() {
        let Some(first) = command.at.get(FIRST) else { continue };
        let times = by_operation.entry(&command.operation).or_default();
        let mut before = *first;
        for (stage, steps) in STAGES.iter().zip(&mut times.steps) {
            if let Some(at) = command.at.get(*stage) {
                steps.push(at.saturating_sub(before));
                before = *at;
            }
        }
        times.total.push(before.saturating_sub(*first));
    }
    let mut rows: Vec<_> = by_operation.into_iter().collect();
    // The operation that took most time in total comes first.
    rows.sort_by_key(|(_, times)| std::cmp::Reverse(times.total.iter().sum::<u64>()));
    let mut text = format!("{:<26}{:>8}{:>10} ", "operation", "count", "total");
    STAGES.iter().for_each(|stage| text.extend([format!("{stage:>10}")]));
    text.push('\n');
    for (operation, mut times) in rows {
        // Writing to a string does not fail.
        let _ = write!(text, "{operation:<26}{:>8}{:>10} ", times.total.len(), median(&mut times.total));
        times.steps.iter_mut().for_each(|steps| text.extend([format!("{:>10}", median(steps))]));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_of_three_processes_are_joined_in_one_line() {
        let folder = std::env::temp_dir().join(format!("rgpuctl-trace-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files = [
            ("program-7", "1 appended 1000 stream_synchronize\n1 woken 29000 -\n2 appended 5000 launch\n"),
            ("bridge-7", "1 taken 2000 stream_synchronize\n1 delivered 21000 -\n"),
            (
                "worker-9",
                "1 received 4500 stream_synchronize\n1 begun 5000 stream_synchronize\n1 executed 6000 -\n1 answered 16000 -\n2 begun 7000 launch\n2 executed 8000 launch\n",
            ),
            // Of an earlier session.
            ("worker-8", "1 begun 500 stream_synchronize\n1 answered 600 -\n"),
        ];
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let all = tables(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((all.len(), all[0].0.as_str()), (1, "7"));
        let lines: Vec<Vec<&str>> = all[0].1.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[1],
            ["stream_synchronize", "1", "28.0", "1.0", "2.5", "0.5", "1.0", "10.0", "5.0", "8.0"]
        );
        assert_eq!(lines[2], ["launch", "1", "3.0", "–", "–", "2.0", "1.0", "–", "–", "–"]);
    }
}
