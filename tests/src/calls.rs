//! Where the functions of the three APIs are served: in the process, by a command, or by a round trip.
//! `tests/calls.txt` records what was counted when the test programs called them.
//!
//! The client library counts (`RGPU_STATS=1`), for each function, the commands that its calls sent and the
//! answers they waited for. A runtime API function and the driver function that it calls both count the work,
//! except what a thread's first call needs to start. `docs/compatibility.md` shows the record. A run fails if
//! most of its calls of a function go farther than recorded.
//!
//! To record again: `RGPU_RECORD=1 cargo test --release -p rgpu-tests --test programs`, a few times (into
//! `target/calls`), then `UPDATE_DOCS=1 cargo test -p rgpu-tests --test compatibility`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::tree;

/// The farthest that a function's calls went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// All calls were answered in the program's own process.
    Local,
    /// Commands were sent to the server without waiting for answers.
    Forwarded,
    /// A call waited for an answer.
    Awaited,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Local => "local",
            Place::Forwarded => "forwarded",
            Place::Awaited => "awaited",
        })
    }
}

/// Minimum number of calls of a function for which the record is compared.
const OFTEN: u64 = 4;

/// The record, by function.
pub type Places = BTreeMap<String, Place>;

fn merge(all: &mut Places, name: &str, place: Place) {
    let known = all.entry(name.to_owned()).or_insert(place);
    *known = place.max(*known);
}

/// Whether a line begins with a function of one of the APIs. Other lines are about a whole session or about
/// functions that only compiled programs call.
fn is_function(line: &str) -> bool {
    ["cu", "cuda", "nvml"].iter().any(|api| {
        line.strip_prefix(api).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    })
}

/// The lines about functions that a program printed on standard error: name, calls, commands, answers waited
/// for.
fn lines(stderr: &str) -> impl Iterator<Item = (String, [u64; 3])> {
    let ours = stderr.lines().filter_map(|line| line.strip_prefix("rgpu: stats: "));
    ours.filter(|line| is_function(line)).map(|line| {
        let count = |name: &str| {
            let word = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            word.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        let name = line.split(' ').next().unwrap_or_default().to_owned();
        (name, [count("calls"), count("commands"), count("round_trips")])
    })
}

/// How far a program's calls went.
pub fn counted(stderr: &str) -> Places {
    let mut all = Places::new();
    for (name, [_, commands, answers]) in lines(stderr) {
        let place = match (commands, answers) {
            (0, 0) => Place::Local,
            (_, 0) => Place::Forwarded,
            _ => Place::Awaited,
        };
        merge(&mut all, &name, place);
    }
    all
}

/// The functions that a program called many times, and how far most of their calls went. What a single call
/// does may depend on timing (for example, it may return memory that was freed in stream order), so one call
/// that goes farther is not a failure.
fn as_a_rule(stderr: &str) -> Places {
    let often = lines(stderr).filter(|(_, [calls, ..])| *calls >= OFTEN);
    often
        .map(|(name, [calls, commands, answers])| {
            let place = match () {
                () if answers >= calls => Place::Awaited,
                () if commands >= calls => Place::Forwarded,
                () => Place::Local,
            };
            (name, place)
        })
        .collect()
}

fn read(text: &str) -> Result<Places> {
    let mut all = Places::new();
    for line in text.lines() {
        let (name, place) = line.split_once(' ').with_context(|| format!("{line:?} names no place"))?;
        let place = match place {
            "local" => Place::Local,
            "forwarded" => Place::Forwarded,
            "awaited" => Place::Awaited,
            other => bail!("{other:?} is not a place"),
        };
        merge(&mut all, name, place);
    }
    Ok(all)
}

fn text(all: &Places) -> String {
    all.iter().map(|(name, place)| format!("{name} {place}\n")).collect()
}

fn record() -> PathBuf {
    tree::root().join("tests/calls.txt")
}

fn fresh() -> PathBuf {
    tree::root().join("target/calls")
}

/// Reads the record.
pub fn recorded() -> Result<Places> {
    let path = record();
    read(&std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?)
}

/// Writes the record from the files of the last recording runs, if there are any.
pub fn update_record() -> Result<()> {
    let mut all = Places::new();
    let Ok(entries) = std::fs::read_dir(fresh()) else { return Ok(()) };
    for entry in entries {
        let path = entry.context("cannot list what was counted")?.path();
        for (name, place) in read(&std::fs::read_to_string(&path).context("cannot read what was counted")?)? {
            merge(&mut all, &name, place);
        }
    }
    std::fs::write(record(), text(&all)).context("cannot write the record")
}

/// Compares what a run counted with the record, or saves it for a new record.
pub fn agree(run: &str, stderr: &str) -> Result<()> {
    if std::env::var_os("RGPU_RECORD").is_some() {
        std::fs::create_dir_all(fresh()).context("cannot make a folder for what is counted")?;
        let mut all = counted(stderr);
        if let Ok(earlier) = std::fs::read_to_string(fresh().join(run)) {
            read(&earlier)?.iter().for_each(|(name, place)| merge(&mut all, name, *place));
        }
        return std::fs::write(fresh().join(run), text(&all)).context("cannot write what was counted");
    }
    let recorded = recorded()?;
    for (name, place) in as_a_rule(stderr) {
        // The record has nothing about functions that no program has called.
        if let Some(known) = recorded.get(&name).filter(|known| **known < place) {
            bail!("{run}: {name} was {place}, and tests/calls.txt says {known}: see tests/src/calls.rs");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_where_the_farthest_of_its_calls_was() {
        let stderr = "rgpu: stats: pid=7 commands=9 round_trips=9\n\
            rgpu: stats: nvml-pid=7 commands=9 round_trips=9\n\
            rgpu: stats: __cudaLaunchKernel calls=3 commands=3 round_trips=0 exchanges=0\n\
            rgpu: stats: cudaMalloc calls=3 commands=0 round_trips=0 exchanges=0\n\
            rgpu: stats: nvmlInit_v2 calls=1 commands=1 round_trips=1 exchanges=1\n\
            rgpu: stats: cuLaunchKernel calls=3 commands=3 round_trips=0 exchanges=0\n\
            something else\n\
            rgpu: stats: cuCtxGetDevice calls=3 commands=0 round_trips=0 exchanges=0\n\
            rgpu: stats: cuCtxGetDevice calls=1 commands=1 round_trips=1 exchanges=1\n";
        assert_eq!(
            text(&counted(stderr)),
            "cuCtxGetDevice awaited\ncuLaunchKernel forwarded\ncudaMalloc local\nnvmlInit_v2 awaited\n"
        );
    }

    #[test]
    fn one_call_of_many_does_not_decide() {
        let line = |calls, commands, answers| {
            format!("rgpu: stats: cuX calls={calls} commands={commands} round_trips={answers}\n")
        };
        let rule = |calls, commands, answers| as_a_rule(&line(calls, commands, answers)).get("cuX").copied();
        assert_eq!(rule(3, 3, 3), None);
        assert_eq!(rule(9, 1, 1), Some(Place::Local));
        assert_eq!(rule(9, 9, 1), Some(Place::Forwarded));
        assert_eq!(rule(9, 9, 9), Some(Place::Awaited));
        assert_eq!(counted(&line(9, 1, 1)).get("cuX"), Some(&Place::Awaited));
    }

    #[test]
    fn written_fields_are_read_and_unknown_ones_are_ignored() {
        let all = counted("rgpu: stats: cuInit calls=1 commands=2 round_trips=2\n");
        assert_eq!(read(&text(&all)).unwrap(), all);
        assert!(read("cuInit somewhere\n").is_err());
        assert!(read("cuInit\n").is_err());
    }
}
