//! A timeline in Chrome's trace format ("Trace Event Format", JSON), which Perfetto opens.
//!
//! ```text
//!  program PID        a track for each thread: the calls; and the commands that have an answer, until that was there
//!  link of PID        commands and answers on their way between the hosts
//!  worker of PID      the dispatcher: commands that are being executed; and answers that wait for the device
//!  GPU for PID        a track for each stream: kernels, copies, fills
//! ```
//!
//! Arrows lead from the call to the dispatcher and to the device. All times must come from one clock, so only
//! processes of one machine are shown.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};

use serde_json::{Value, json};

use crate::recording::{Command, FIRST, Traced};

/// Writes the timeline. Returns the number of its events.
pub fn write(traced: &[Traced], file: File) -> std::io::Result<usize> {
    let events = events(traced);
    let mut file = BufWriter::new(file);
    // One event in each line, so that the file can be searched and cut by hand.
    let mut put = |text: &str| file.write_all(text.as_bytes());
    put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    for (at, event) in events.iter().enumerate() {
        put(&format!("{event}{}\n", if at + 1 < events.len() { "," } else { "" }))?;
    }
    put("]}\n")?;
    file.flush()?;
    Ok(events.len())
}

/// The processes that a timeline shows for each program.
#[derive(Clone, Copy)]
enum Part {
    Program,
    Link,
    Worker,
    Gpu,
}

impl Part {
    const ALL: [Part; 4] = [Part::Program, Part::Link, Part::Worker, Part::Gpu];

    fn name(self, traced: &Traced) -> String {
        let pid = traced.pid;
        match (self, &traced.worker) {
            (Part::Program, _) => format!("program {pid}"),
            (Part::Link, _) => format!("link of {pid}"),
            (Part::Worker, Some((worker, _))) => format!("worker {worker} of {pid}"),
            (Part::Worker, None) => format!("worker of {pid}"),
            (Part::Gpu, _) => format!("GPU for {pid}"),
        }
    }
}

struct Writer {
    events: Vec<Value>,
    /// The time of the first event, in nanoseconds.
    begin: u64,
    /// Tracks that have events, by the number of their process.
    tracks: BTreeSet<(usize, u32)>,
}

impl Writer {
    /// Microseconds since the first event.
    fn time(&self, at: u64) -> f64 {
        at.saturating_sub(self.begin) as f64 / 1e3
    }

    /// A span of a track. Two spans of a track do not overlap, except if one contains the other.
    fn span(&mut self, (pid, tid): (usize, u32), [begin, end]: [u64; 2], name: &str, args: Value) {
        self.tracks.insert((pid, tid));
        let took = end.saturating_sub(begin) as f64 / 1e3;
        self.events.push(json!({
            "ph": "X", "pid": pid, "tid": tid, "ts": self.time(begin), "dur": took, "name": name, "args": args,
        }));
    }

    /// A span that may overlap with others of its kind.
    fn overlapping(&mut self, pid: usize, [begin, end]: [u64; 2], name: &str, kind: &str, id: &str) {
        for (ph, at) in [("b", begin), ("e", end.max(begin))] {
            self.events.push(json!({
                "ph": ph, "pid": pid, "tid": 0, "ts": self.time(at), "name": name, "cat": kind, "id2": { "local": id },
            }));
        }
    }

    /// A step of an arrow: `s` begins the arrow, `t` continues it, `f` ends it.
    fn arrow(&mut self, ph: &str, (pid, tid): (usize, u32), at: u64, id: &str) {
        self.events.push(json!({
            "ph": ph, "bp": "e", "pid": pid, "tid": tid, "ts": self.time(at), "name": "command", "cat": "command", "id": id,
        }));
    }

    fn called(&mut self, what: &str, (pid, tid): (usize, u32), args: Value) {
        self.events.push(json!({ "ph": "M", "pid": pid, "tid": tid, "name": what, "args": args }));
    }
}

/// When the first call or command of any program began.
fn first_moment(traced: &[Traced]) -> u64 {
    let calls = traced.iter().flat_map(|one| one.program.calls.iter().map(|call| call.begin));
    let commands = traced.iter().flat_map(|one| one.program.commands.values());
    calls.chain(commands.filter_map(|command| command.at(FIRST))).min().unwrap_or(0)
}

fn events(traced: &[Traced]) -> Vec<Value> {
    let mut writer = Writer { events: Vec::new(), begin: first_moment(traced), tracks: BTreeSet::new() };
    for (index, one) in traced.iter().enumerate() {
        let within = Within::calls(one);
        let process = |part: Part| index * Part::ALL.len() + part as usize + 1;
        for call in &one.program.calls {
            let track = (process(Part::Program), call.thread);
            writer.span(track, [call.begin, call.end], &call.name, json!({}));
        }
        let commands = one.commands();
        let worker = one.worker.as_ref().map(|(_, worker)| worker);
        let work = worker.map_or(&[][..], |worker| worker.work.as_slice());
        for (seq, command) in &commands {
            put_command(&mut writer, process, (one.pid, *seq), command, &within);
        }
        for work in work {
            let track = (process(Part::Gpu), work.stream);
            let operation = commands.get(&work.seq).map_or("work", |command| command.operation.as_str());
            let told = Some(&work.kernel).filter(|name| !name.is_empty());
            let kernel = told.or_else(|| one.program.kernels.get(&work.seq)).map(|name| demangled(name));
            let name = kernel.as_deref().unwrap_or(operation);
            writer.span(
                track,
                [work.begin, work.end],
                name,
                json!({ "command": work.seq, "operation": operation }),
            );
            if commands.get(&work.seq).is_some_and(|command| within.began(command)) {
                writer.arrow("f", track, work.begin, &id(one.pid, work.seq));
            }
        }
        for part in Part::ALL {
            let process = process(part);
            writer.called("process_name", (process, 0), json!({ "name": part.name(one) }));
            writer.called("process_sort_index", (process, 0), json!({ "sort_index": process }));
            let threads: Vec<u32> =
                writer.tracks.iter().filter(|(pid, _)| *pid == process).map(|(_, tid)| *tid).collect();
            for tid in threads {
                let name = match part {
                    Part::Gpu => format!("stream {tid}"),
                    Part::Program | Part::Link | Part::Worker => format!("thread {tid}"),
                };
                writer.called("thread_name", (process, tid), json!({ "name": name }));
            }
        }
    }
    writer.events
}

/// The id of a command. Perfetto accepts only numbers, in hexadecimal if they are text.
fn id(pid: u32, seq: u64) -> String {
    format!("{:#x}", u64::from(pid) << 32 | seq & u64::from(u32::MAX))
}

/// When a program's threads are in calls. An arrow can begin only in a call; commands that rgpu itself sends
/// belong to no call.
struct Within {
    /// The end of each sequence of calls without a gap, by thread and beginning.
    calls: BTreeMap<(u32, u64), u64>,
}

impl Within {
    fn calls(traced: &Traced) -> Within {
        let mut all: Vec<_> =
            traced.program.calls.iter().map(|call| (call.thread, call.begin, call.end)).collect();
        all.sort_unstable();
        let mut calls: BTreeMap<(u32, u64), u64> = BTreeMap::new();
        for (thread, begin, end) in all {
            match calls.last_entry() {
                Some(mut last) if last.key().0 == thread && *last.get() >= begin => {
                    let end = end.max(*last.get());
                    last.insert(end);
                }
                _ => drop(calls.insert((thread, begin), end)),
            }
        }
        Within { calls }
    }

    /// Whether this command was appended during a call.
    fn began(&self, command: &Command) -> bool {
        command.stages.get(FIRST).is_some_and(|moment| {
            let before = self.calls.range(..=(moment.thread, moment.at)).next_back();
            before.is_some_and(|((thread, _), end)| *thread == moment.thread && *end >= moment.at)
        })
    }
}

/// A command on its way, up to the dispatcher, and its answer's way back.
fn put_command(
    writer: &mut Writer,
    process: impl Fn(Part) -> usize,
    (pid, seq): (u32, u64),
    command: &Command,
    within: &Within,
) {
    let moment = |stage: &str| command.stages.get(stage).copied();
    let (id, name) = (id(pid, seq), command.operation.as_str());
    let Some(appended) = moment(FIRST) else { return };
    let own = (process(Part::Program), appended.thread);
    if let Some(woken) = command.at("woken") {
        writer.overlapping(own.0, [appended.at, woken], name, "answer awaited", &id);
    }
    if let (Some(taken), Some(received)) = (command.at("taken"), command.at("received")) {
        writer.overlapping(process(Part::Link), [taken, received], name, "command", &id);
    }
    if let (Some(answered), Some(delivered)) = (command.at("answered"), command.at("delivered")) {
        writer.overlapping(process(Part::Link), [answered, delivered], name, "answer", &id);
    }
    let (Some(begun), Some(executed)) = (moment("begun"), command.at("executed")) else { return };
    let track = (process(Part::Worker), begun.thread);
    writer.span(track, [begun.at, executed], name, json!({ "command": seq }));
    if within.began(command) {
        writer.arrow("s", own, appended.at, &id);
        writer.arrow("t", track, begun.at, &id);
    }
    if let Some(answered) = command.at("answered").filter(|answered| *answered > executed) {
        writer.overlapping(process(Part::Worker), [executed, answered], name, "waits for the device", &id);
    }
}

/// A kernel's name as in its source, if it can be demangled.
fn demangled(name: &str) -> String {
    cpp_demangle::Symbol::new(name)
        .ok()
        .and_then(|symbol| symbol.demangle().ok())
        .unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording;

    #[test]
    fn a_launch_shows_as_a_call_a_command_and_a_kernel() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            (
                "program-7",
                "call 2 900 1500 cudaLaunchKernel\n1 appended 1000 launch 2\nkernel 1 _Z3addPi\n3 appended 1600 device_info 2\n2 appended 2000 stream_synchronize 2\n2 woken 9000 - 2\n",
            ),
            ("bridge-7", "1 taken 1100 launch 1\n2 taken 2100 - 1\n2 delivered 8900 - 1\n"),
            (
                "worker-9",
                "1 received 1200 launch 3\n1 begun 1300 launch 3\n1 executed 1400 - 3\n3 begun 1700 device_info 3\n3 executed 1800 - 3\nwork 5 1300 8000 1\n2 received 2200 - 3\n2 begun 2300 stream_synchronize 3\n2 executed 2400 - 3\n2 answered 8500 - 4\n",
            ),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let path = folder.path().join("out.json");
        let count = write(&recording::read(folder.path()).unwrap(), File::create(&path).unwrap()).unwrap();
        let all: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let events = all["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), count);
        let span = |name: &str| {
            let found: Vec<&Value> =
                events.iter().filter(|event| event["ph"] == "X" && event["name"] == name).collect();
            assert_eq!(found.len(), 1, "{name}: {events:#?}");
            (
                found[0]["pid"].as_u64().unwrap(),
                found[0]["tid"].as_u64().unwrap(),
                found[0]["ts"].as_f64().unwrap(),
                found[0]["dur"].as_f64().unwrap(),
            )
        };
        assert_eq!(span("cudaLaunchKernel"), (1, 2, 0.0, 0.6));
        assert_eq!(span("launch"), (3, 3, 0.4, 0.1));
        assert_eq!(span("add(int*)"), (4, 5, 0.4, 6.7));
        let steps: Vec<&str> = events
            .iter()
            .filter(|event| event["id"] == "0x700000001" || event["id2"]["local"] == "0x700000001")
            .filter(|event| event["cat"] == "command")
            .filter_map(|event| event["ph"].as_str())
            .collect();
        assert_eq!(steps, ["b", "e", "s", "t", "f"]);
        assert!(events.iter().any(|event| event["args"]["name"] == "stream 5"));
        // The third command belongs to no call, so no arrow leads to it.
        assert!(events.iter().all(|event| event["id"] != "0x700000003"), "{events:#?}");
        assert!(events.iter().any(|event| event["args"]["command"] == 3), "{events:#?}");
    }
}
