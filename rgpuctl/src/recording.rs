//! Reads what the processes of traced programs have recorded ([`protocol::trace`]).
//!
//! With `RGPU_TRACE=FOLDER` each process writes a file there: the program's library `program-PID`, the bridge
//! `bridge-PID` (with the program's PID), the worker `worker-PID`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result};

/// The stages after the first, in order.
pub const STAGES: [&str; 7] = ["taken", "received", "begun", "executed", "answered", "delivered", "woken"];
/// The first stage.
pub const FIRST: &str = "appended";

/// How the names of files with commands begin, before `-`.
const ROLES: [&str; 3] = ["program", "bridge", "worker"];
/// How the names of files with functions that waited begin.
pub const WAITS: &str = "waits";

/// A point in time: nanoseconds since 1970, and the thread of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub at: u64,
    pub thread: u32,
}

/// The times at which a command reached each stage.
#[derive(Debug, Default, Clone)]
pub struct Command {
    pub operation: String,
    pub stages: HashMap<String, Moment>,
}

impl Command {
    /// When it reached this stage.
    pub fn at(&self, stage: &str) -> Option<u64> {
        self.stages.get(stage).map(|moment| moment.at)
    }
}

/// Commands by `seq`.
pub type Commands = BTreeMap<u64, Command>;

/// A function that a thread was executing from `begin` to `end`.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    pub thread: u32,
    pub begin: u64,
    pub end: u64,
    pub name: String,
}

/// A command that kept a stream of a device busy.
#[derive(Debug, PartialEq, Eq)]
pub struct Work {
    pub stream: u32,
    pub begin: u64,
    pub end: u64,
    pub seq: u64,
    /// The kernel's mangled name; empty if it is unknown or there is none.
    pub kernel: String,
}

/// One process's file.
#[derive(Debug, Default)]
pub struct Recording {
    pub commands: Commands,
    pub calls: Vec<Call>,
    pub work: Vec<Work>,
    /// Mangled names of the kernels that commands launch, by `seq`.
    pub kernels: HashMap<u64, String>,
    /// Number of entries that were not kept.
    pub lost: u64,
}

impl Recording {
    fn read(text: &str) -> Option<Recording> {
        let mut all = Recording::default();
        for line in text.lines() {
            let (first, rest) = line.split_once(' ')?;
            let mut words = rest.split(' ');
            match first {
                "call" => {
                    let (thread, begin) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                    let (end, name) = (words.next()?.parse().ok()?, words.next()?.to_owned());
                    all.calls.push(Call { thread, begin, end, name });
                }
                "work" => {
                    let (stream, begin) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                    let (end, seq) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                    let kernel = words.collect::<Vec<_>>().join(" ");
                    all.work.push(Work { stream, begin, end, seq, kernel });
                }
                "kernel" => {
                    let (seq, name) = rest.split_once(' ')?;
                    all.kernels.insert(seq.parse().ok()?, name.to_owned());
                }
                "lost" => all.lost += words.next()?.parse::<u64>().ok()?,
                seq => {
                    let (stage, at) = (words.next()?, words.next()?.parse().ok()?);
                    let (operation, thread) = (words.next()?, words.next()?.parse().ok()?);
                    let command = all.commands.entry(seq.parse().ok()?).or_default();
                    if operation != "-" {
                        operation.clone_into(&mut command.operation);
                    }
                    command.stages.insert(stage.to_owned(), Moment { at, thread });
                }
            }
        }
        Some(all)
    }

    /// When the first command reached this stage.
    fn begin(&self, stage: &str) -> Option<u64> {
        self.commands.first_key_value()?.1.at(stage)
    }
}

/// A program, and the processes that worked for it.
#[derive(Debug)]
pub struct Traced {
    pub pid: u32,
    pub program: Recording,
    pub bridge: Option<Recording>,
    /// The worker's process id, and what it recorded.
    pub worker: Option<(u32, Recording)>,
}

impl Traced {
    /// The program's commands, with the stages of all processes.
    pub fn commands(&self) -> Commands {
        let mut commands = self.program.commands.clone();
        let others = self.bridge.iter().chain(self.worker.iter().map(|(_, worker)| worker));
        for (seq, command) in others.flat_map(|recording| &recording.commands) {
            if let Some(known) = commands.get_mut(seq) {
                known.stages.extend(command.stages.iter().map(|(stage, moment)| (stage.clone(), *moment)));
            }
        }
        commands
    }

    /// Number of entries that the processes did not keep.
    pub fn lost(&self) -> u64 {
        let others = self.bridge.iter().chain(self.worker.iter().map(|(_, worker)| worker));
        others.chain([&self.program]).map(|recording| recording.lost).sum()
    }
}

/// The name of a file that a traced program, or a process that worked for it, has written into this folder.
pub fn any(folder: &Path) -> Result<Option<String>> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let role = name.split_once('-').map(|(role, _)| role);
        if role.is_some_and(|role| role == WAITS || ROLES.contains(&role)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Reads the files of a folder: the programs in the order in which they began.
pub fn read(folder: &Path) -> Result<Vec<Traced>> {
    let (mut programs, mut bridges, mut workers) = (Vec::new(), HashMap::new(), Vec::new());
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((role, pid)) = name.split_once('-') else { continue };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        if !ROLES.contains(&role) {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).with_context(|| format!("cannot read {name}"))?;
        let recording =
            Recording::read(&text).with_context(|| format!("{name} was written by another version"))?;
        match role {
            "program" => programs.push((pid, recording)),
            "bridge" => drop(bridges.insert(pid, recording)),
            _ => workers.push((pid, recording)),
        }
    }
    programs.sort_by_key(|(_, program)| program.begin(FIRST));
    let traced = programs.into_iter().map(|(pid, program)| {
        let start = program.begin(FIRST);
        // This program's worker is the one that begins a command first after the program appended its first
        // command.
        let later = workers.iter().enumerate().filter(|(_, (_, worker))| worker.begin("begun") >= start);
        let worker = later.min_by_key(|(_, (_, worker))| worker.begin("begun")).map(|(at, _)| at);
        let worker = worker.map(|at| workers.remove(at));
        Traced { pid, program, bridge: bridges.remove(&pid), worker }
    });
    Ok(traced.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_line_is_read_and_other_lines_are_refused() {
        let text = "1 appended 1000 launch 2\ncall 2 900 1100 cudaLaunchKernel\nwork 3 2000 2500 1 add(int *)\nkernel 1 add(int *, int)\nlost 4\n";
        let all = Recording::read(text).unwrap();
        assert_eq!(all.commands[&1].stages[FIRST], Moment { at: 1000, thread: 2 });
        assert_eq!(all.calls, [Call { thread: 2, begin: 900, end: 1100, name: "cudaLaunchKernel".into() }]);
        assert_eq!(
            all.work,
            [Work { stream: 3, begin: 2000, end: 2500, seq: 1, kernel: "add(int *)".into() }]
        );
        assert_eq!((all.kernels[&1].as_str(), all.lost), ("add(int *, int)", 4));
        for wrong in
            ["1 appended", "call 2 900 1100", "work 1 2 3", "kernel x", "lost", "x appended 1 launch 1"]
        {
            assert!(Recording::read(wrong).is_none(), "{wrong}");
        }
    }
}
