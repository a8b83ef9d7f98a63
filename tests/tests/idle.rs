//! An idle session uses no processor time in the program, `vhost-rgpu`, `rgpu-server` or the worker. This is
//! counted, not timed: no thread of these processes is scheduled while a session is idle.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use support::{Idle, Rig, TRANSPORTS, eventually};

/// How long nothing may happen: longer than any polling time in this project.
const QUIET: Duration = Duration::from_secs(6);

/// A thread's use of the processor: context switches (voluntary and involuntary) and clock ticks (user and
/// system).
type Taken = (u64, u64);

fn field(text: &str, name: &str) -> Result<u64> {
    let value =
        text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    Ok(value.trim().parse()?)
}

/// Every thread of a process, by its name and number.
fn threads(pid: u32) -> Result<BTreeMap<String, Taken>> {
    let mut all = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        let status = std::fs::read_to_string(task.path().join("status"))?;
        let stat = std::fs::read_to_string(task.path().join("stat"))?;
        let name = std::fs::read_to_string(task.path().join("comm"))?;
        // The name can contain anything. What follows it contains no parenthesis.
        let after = stat.rsplit(')').next().context("no name in stat")?;
        let numbers: Vec<&str> = after.split_whitespace().collect();
        let ticks = numbers[11].parse::<u64>()? + numbers[12].parse::<u64>()?;
        let switches =
            field(&status, "voluntary_ctxt_switches:")? + field(&status, "nonvoluntary_ctxt_switches:")?;
        all.insert(format!("{pid} {} {}", name.trim(), task.file_name().display()), (switches, ticks));
    }
    Ok(all)
}

fn children(pid: u32) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let list = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        all.extend(list.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(all)
}

/// All threads of the daemons, of the workers, and of `more`.
fn everybody(rig: &Rig, more: &[u32]) -> Result<BTreeMap<String, Taken>> {
    let mut all = BTreeMap::new();
    for daemon in rig.daemons() {
        for pid in children(daemon.pid())?.into_iter().chain([daemon.pid()]) {
            all.append(&mut threads(pid)?);
        }
    }
    for pid in more {
        all.append(&mut threads(*pid)?);
    }
    Ok(all)
}

/// Waits until no thread is scheduled for [`QUIET`].
fn comes_to_rest(rig: &Rig, more: &[u32]) -> Result<()> {
    eventually(|| {
        let before = everybody(rig, more)?;
        std::thread::sleep(QUIET);
        let after = everybody(rig, more)?;
        let moved: Vec<String> = after
            .iter()
            .filter(|(name, taken)| before.get(*name) != Some(taken))
            .map(|(name, taken)| format!("{name}: {:?} became {taken:?}", before.get(name)))
            .collect();
        ensure!(
            moved.is_empty() && before.len() == after.len(),
            "in {QUIET:?} of quiet:\n{}",
            moved.join("\n")
        );
        Ok(())
    })
}

#[test]
fn idle_daemons_and_sessions_take_no_processor_time() -> Result<()> {
    let rig = Rig::start("idle")?;
    comes_to_rest(&rig, &[]).context("with no session")?;
    let programs = TRANSPORTS.map(|transport| Idle::start(&rig, transport));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    let pids: Vec<u32> = programs.iter().map(Idle::pid).collect();
    comes_to_rest(&rig, &pids).context("with a session of each transport that has worked")?;
    // The status is still correct, and idle sessions continue to work.
    let sessions = rig.server.status()?["sessions"].as_array().map_or(0, Vec::len);
    assert_eq!(sessions, 2);
    for program in programs {
        program.passes()?;
    }
    comes_to_rest(&rig, &[]).context("after the sessions' end")?;
    Ok(())
}
