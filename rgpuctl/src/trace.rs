//! `rgpuctl trace`: runs a program as a native client and shows where its calls spend their time.
//!
//! Each process records what it does with every command ([`recording`](crate::recording)). This module makes
//! tables from the recordings and, with `--output`, a [timeline](crate::timeline).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use host_bridge::framing::with_causes;
use protocol::trace::{DEVICES, VARIABLE};

use crate::recording::{self, Command, Commands, FIRST, STAGES};
use crate::run::{self, run_program};
use crate::session::Target;
use crate::timeline;

/// Run a program like `run`, and show where its calls spend their time
///
/// Prints a line for each operation that was sent to the server: the number of calls, the total time of a
/// call, and the time from each stage to the next. Times are medians in microseconds. An operation without an
/// answer ends when it is executed. The stages are: appended to the ring; taken by the bridge; received by
/// the worker; begun; executed (for work on a stream: enqueued); answered; delivered by the bridge; woken
/// (the program's thread has the answer). With the transport local there are no stages of the bridge. With
/// --server HOST the stages on that host are missing.
///
/// Below is a line for each function that waited for the server: the number of calls, how many answers they
/// waited for, and the time that they spent waiting in milliseconds, the longest first. Over a slow network,
/// these are the calls that make a program slow.
#[derive(Args)]
///
/// --output writes a timeline that shows every call and command, and with --devices every kernel and copy.
/// Open it at https://ui.perfetto.dev, which keeps it in the browser, or in chrome://tracing.
#[command(after_long_help = "Examples:
  rgpuctl trace --transport tcp -- ./vectorAdd
  rgpuctl trace --output train.json --devices -- python3 train.py")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Write a timeline to this file, in Chrome's trace format. By default none is written
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// With --output: show the device's kernels and copies, too. Each costs the server some microseconds. By
    /// default the timeline only has calls and commands
    #[arg(long, requires = "output")]
    devices: bool,
    /// Keep the timestamps of every command in this folder, which is created if needed and may not have those
    /// of another run. By default they are not kept
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the program, prints the table on standard error, and returns the program's exit status.
pub fn trace(arguments: &Arguments) -> Result<ExitCode> {
    let folder = match &arguments.keep {
        Some(folder) => kept(folder)?,
        None => nix::unistd::mkdtemp(&std::env::temp_dir().join("rgpu-trace-XXXXXX"))
            .context("cannot create a folder for the timestamps")?,
    };
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var(VARIABLE, &folder) };
    if arguments.devices {
        // SAFETY: as above.
        unsafe { std::env::set_var(DEVICES, "1") };
    }
    // Before the program runs, perhaps for hours.
    let output = arguments.output.as_deref().map(|path| {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok((path, file))
    });
    let ended = output.transpose().and_then(|output| {
        let status = run_program(&arguments.target, &arguments.program)?;
        let shown = show(&folder, output);
        Ok((status, shown))
    });
    let unread = matches!(ended, Ok((_, Err(_))));
    if arguments.keep.is_none() && !unread {
        // Files that cannot be removed do no harm.
        let _ = std::fs::remove_dir_all(&folder);
    }
    let (status, shown) = ended?;
    if let Err(error) = shown {
        let (why, folder) = (with_causes(error.as_ref()), folder.display());
        say!("rgpuctl: {why}; the recordings are in {folder}");
    }
    Ok(run::exit(status))
}

/// The absolute path of a folder to keep recordings in.
fn kept(folder: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Commands are counted anew in each run, so those of two runs would be taken for the same.
    if let Some(file) = recording::any(folder)? {
        bail!("{} has recordings of another run, such as {file}: name another folder", folder.display());
    }
    folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))
}

/// Writes the timeline, and prints what is in the recordings.
fn show(folder: &Path, output: Option<(&Path, File)>) -> Result<()> {
    let traced = recording::read(folder)?;
    let output = output.map(|(path, file)| (path, timeline::write(&traced, file)));
    if traced.is_empty() {
        say!(
            "rgpuctl: there is no recording: a process that uses the GPU writes one when it exits, not if a signal ends it"
        );
    }
    for program in &traced {
        tell!("rgpuctl: process {}, microseconds:\n{}", program.pid, table(&program.commands()));
    }
    for (program, table) in waits(folder)? {
        tell!("rgpuctl: process {program}, functions that waited for the server:\n{table}");
    }
    if let Some((path, written)) = output {
        let written = written.with_context(|| format!("cannot write {}", path.display()))?;
        say!("rgpuctl: {written} events in {}; open it at https://ui.perfetto.dev", path.display());
    }
    let lost: u64 = traced.iter().map(recording::Traced::lost).sum();
    if lost > 0 {
        say!("rgpuctl: {lost} entries are missing: a process keeps the first million");
    }
    Ok(())
}

/// A table of the functions that waited, for each process with such functions, with its process id.
fn waits(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((recording::WAITS, program)) = name.split_once('-') else { continue };
        let text = std::fs::read_to_string(entry.path()).with_context(|| format!("cannot read {name}"))?;
        let rows: Option<Vec<_>> = text.lines().map(waiting).collect();
        let rows = rows.with_context(|| format!("{name} was written by another version"))?;
        if !rows.is_empty() {
            all.push((program.to_owned(), wait_table(rows)));
        }
    }
    all.sort();
    Ok(all)
}

/// A line of such a file: the function, its calls, the answers that it waited for, and the microseconds.
fn waiting(line: &str) -> Option<(&str, [u64; 3])> {
    let mut words = line.split(' ');
    let name = words.next()?;
    let mut number = || words.next()?.parse().ok();
    Some((name, [number()?, number()?, number()?]))
}

fn wait_table(mut rows: Vec<(&str, [u64; 3])>) -> String {
    rows.sort_by_key(|(_, [.., microseconds])| std::cmp::Reverse(*microseconds));
    let mut text = format!("{:<54}{:>10}{:>10}{:>12}\n", "function", "calls", "answers", "waited [ms]");
    for (name, [calls, answers, microseconds]) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<54}{calls:>10}{answers:>10}{:>12.2}", microseconds as f64 / 1e3);
    }
    text
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

/// When a command reached the stages after the first, none later than a stage that follows it. An answer that
/// waits for a device is given by another thread than the one that executes commands. So the answer can be on
/// its way, or have arrived, before the worker notes that the command is executed.
fn in_order(command: &Command) -> [Option<u64>; STAGES.len()] {
    let mut times = STAGES.map(|stage| command.at(stage));
    let mut after = u64::MAX;
    for at in times.iter_mut().rev().flatten() {
        *at = (*at).min(after);
        after = *at;
    }
    times
}

fn table(commands: &Commands) -> String {
    let mut by_operation: BTreeMap<&str, Times> = BTreeMap::new();
    for command in commands.values() {
        let Some(first) = command.at(FIRST) else { continue };
        let times = by_operation.entry(&command.operation).or_default();
        let mut before = first;
        for (at, steps) in in_order(command).into_iter().zip(&mut times.steps) {
            if let Some(at) = at {
                steps.push(at.saturating_sub(before));
                before = before.max(at);
            }
        }
        times.total.push(before.saturating_sub(first));
    }
    let mut rows: Vec<_> = by_operation.into_iter().collect();
    // The operation with the longest total time comes first.
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
    fn functions_that_waited_are_listed_with_the_longest_wait_first() {
        let folder = std::env::temp_dir().join(format!("rgpuctl-waits-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("waits-7"), "cuMemAlloc_v2 4 4 400\ncuStreamSynchronize 9 9 12345\n")
            .unwrap();
        std::fs::write(folder.join("waits-8"), "").unwrap();
        let all = waits(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((all.len(), all[0].0.as_str()), (1, "7"));
        let lines: Vec<Vec<&str>> = all[0].1.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["cuStreamSynchronize", "9", "9", "12.35"]);
        assert_eq!(lines[2], ["cuMemAlloc_v2", "4", "4", "0.40"]);
    }

    #[test]
    fn a_folder_keeps_the_recordings_of_one_run() {
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("a/b");
        assert_eq!(kept(&new).unwrap(), new.canonicalize().unwrap());
        std::fs::write(new.join("notes-1"), "").unwrap();
        kept(&new).unwrap();
        for role in ["program", "bridge", "worker", "waits"] {
            let file = new.join(format!("{role}-7"));
            std::fs::write(&file, "").unwrap();
            let refused = kept(&new).unwrap_err().to_string();
            assert!(refused.contains(&format!("{role}-7: name another folder")), "{refused}");
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn timestamps_of_three_processes_are_joined_in_one_line() {
        let folder = std::env::temp_dir().join(format!("rgpuctl-trace-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files = [
            (
                "program-7",
                "1 appended 1000 stream_synchronize 1\n1 woken 29000 - 1\n2 appended 5000 launch 1\n",
            ),
            ("bridge-7", "1 taken 2000 stream_synchronize 1\n1 delivered 21000 - 1\n"),
            (
                "worker-9",
                "1 received 4500 stream_synchronize 1\n1 begun 5000 stream_synchronize 1\n1 executed 6000 - 1\n1 answered 16000 - 1\n2 begun 7000 launch 1\n2 executed 8000 launch 1\n",
            ),
            // From an earlier session.
            ("worker-8", "1 begun 500 stream_synchronize 1\n1 answered 600 - 1\n"),
        ];
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let all = recording::read(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((all.len(), all[0].pid, all[0].worker.as_ref().map(|(pid, _)| *pid)), (1, 7, Some(9)));
        let table = table(&all[0].commands());
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[1],
            ["stream_synchronize", "1", "28.0", "1.0", "2.5", "0.5", "1.0", "10.0", "5.0", "8.0"]
        );
        assert_eq!(lines[2], ["launch", "1", "3.0", "–", "–", "2.0", "1.0", "–", "–", "–"]);
    }

    #[test]
    fn the_stages_add_up_if_the_worker_notes_the_execution_after_the_answer() {
        let mut command = Command { operation: "stream_synchronize".to_owned(), ..Command::default() };
        let times = [
            (FIRST, 1000),
            ("taken", 2000),
            ("received", 4500),
            ("begun", 5000),
            ("executed", 30000),
            ("answered", 16000),
            ("delivered", 21000),
            ("woken", 29000),
        ];
        for (stage, at) in times {
            command.stages.insert(stage.to_owned(), recording::Moment { at, thread: 1 });
        }
        let table = table(&BTreeMap::from([(1, command)]));
        let words: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            words,
            ["stream_synchronize", "1", "28.0", "1.0", "2.5", "0.5", "11.0", "0.0", "5.0", "8.0"]
        );
    }
}
