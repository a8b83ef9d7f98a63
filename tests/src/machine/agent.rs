//! The host's side of the agent in a machine (`agent.c`): a thread that reads its frames, and the processes
//! they belong to.

use anyhow::{Context, Result, anyhow, bail, ensure};
use std::collections::HashMap;
use std::fmt;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 16] = b"\x7frgpu-agent-1\n\n\n";
/// Bytes of a file in one frame; the agent takes frames below 1 MiB.
const PUT_CHUNK: usize = 512 << 10;

/// Kinds of frame, as in `agent.c`.
mod kind {
    pub const RUN: u32 = 1;
    pub const KILL: u32 = 2;
    pub const PUT: u32 = 3;
    pub const REBOOT: u32 = 4;
    pub const POWEROFF: u32 = 5;

    pub const STDOUT: u32 = 1;
    pub const STDERR: u32 = 2;
    pub const EXIT: u32 = 3;
}

/// The result of a command in a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// The exit code, or 128 plus the signal that ended it.
    pub status: i32,
    /// What it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Standard output as text, without white space at the end.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    /// Whether the status is 0.
    pub fn success(&self) -> bool {
        self.status == 0
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "status {}\n--- stdout\n{}\n--- stderr\n{}",
            self.status,
            String::from_utf8_lossy(&self.stdout),
            String::from_utf8_lossy(&self.stderr)
        )
    }
}

#[derive(Default)]
struct Record {
    output: Output,
    exited: bool,
}

#[derive(Default)]
struct State {
    /// Counts the agent's greetings, that is, boots.
    boots: u32,
    /// Why nothing more will arrive.
    closed: Option<String>,
    records: HashMap<u32, Record>,
    next_id: u32,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    writer: Mutex<UnixStream>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, kind: u32, id: u32, payload: &[u8]) -> Result<()> {
        let mut frame = Vec::with_capacity(12 + payload.len());
        for word in [payload.len() as u32, kind, id] {
            frame.extend_from_slice(&word.to_le_bytes());
        }
        frame.extend_from_slice(payload);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(&frame).context("cannot write to the machine's agent")
    }

    /// Waits until `ready` returns something, for at most `timeout` (then `Ok(None)`).
    fn wait<T>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(Some(value));
            }
            if let Some(why) = &state.closed {
                bail!("the machine is gone: {why}");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A connection to the agent of a machine.
pub(crate) struct Agent {
    shared: Arc<Shared>,
}

impl Agent {
    /// Takes over the connection that QEMU has made.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let writer = Mutex::new(stream.try_clone().context("cannot duplicate the agent's socket")?);
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), writer });
        let reader = Arc::clone(&shared);
        std::thread::spawn(move || {
            let why = match read_frames(&reader, stream) {
                Ok(()) => "QEMU closed the agent's port".to_owned(),
                Err(e) => format!("{e:#}"),
            };
            reader.state().closed = Some(why);
            reader.changed.notify_all();
        });
        Ok(Self { shared })
    }

    /// How often the agent has started.
    pub fn boots(&self) -> u32 {
        self.shared.state().boots
    }

    /// Waits until the agent has started more than `before` times.
    pub fn wait_boot(&self, before: u32, timeout: Duration) -> Result<()> {
        self.shared
            .wait(timeout, |state| (state.boots > before).then_some(()))?
            .with_context(|| format!("the machine did not boot within {timeout:?}"))
    }

    /// Starts a command line in the machine's shell.
    pub fn spawn(&self, command: &str) -> Result<Process> {
        let process = self.record();
        self.shared.send(kind::RUN, process.id, command.as_bytes())?;
        Ok(process)
    }

    /// Writes a file in the machine.
    pub fn put(&self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        let mut rest = data;
        let mut append = 0u32;
        loop {
            let (chunk, left) = rest.split_at(rest.len().min(PUT_CHUNK));
            let mut payload = Vec::new();
            payload.extend_from_slice(&append.to_le_bytes());
            payload.extend_from_slice(&mode.to_le_bytes());
            payload.extend_from_slice(path.as_bytes());
            payload.push(0);
            payload.extend_from_slice(chunk);
            let process = self.record();
            self.shared.send(kind::PUT, process.id, &payload)?;
            let status = process.wait(Duration::from_secs(240))?.status;
            ensure!(status == 0, "cannot write {path} in the machine: errno {status}");
            if left.is_empty() {
                return Ok(());
            }
            rest = left;
            append = 1;
        }
    }

    pub fn reboot(&self) -> Result<()> {
        self.shared.send(kind::REBOOT, 0, &[])
    }

    pub fn power_off(&self) -> Result<()> {
        self.shared.send(kind::POWEROFF, 0, &[])
    }

    fn record(&self) -> Process {
        let mut state = self.shared.state();
        state.next_id += 1;
        let id = state.next_id;
        state.records.insert(id, Record::default());
        Process { shared: Arc::clone(&self.shared), id, boot: state.boots }
    }
}

/// A command that runs in a machine. Dropping this does not end it.
pub struct Process {
    shared: Arc<Shared>,
    id: u32,
    boot: u32,
}

impl Process {
    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.shared.state().records.get(&self.id).is_none_or(|record| record.exited)
    }

    /// What the command has written to its standard output so far.
    pub fn stdout(&self) -> Vec<u8> {
        self.shared.state().records.get(&self.id).map(|r| r.output.stdout.clone()).unwrap_or_default()
    }

    /// Waits until standard output contains `text`.
    pub fn wait_for(&self, text: &str, timeout: Duration) -> Result<()> {
        let found = self.shared.wait(timeout, |state| {
            let record = state.records.get(&self.id)?;
            if record.output.stdout.windows(text.len().max(1)).any(|w| w == text.as_bytes()) {
                return Some(Ok(()));
            }
            record
                .exited
                .then(|| Err(anyhow!("the command ended without printing {text:?}: {}", record.output)))
        })?;
        found.unwrap_or_else(|| Err(anyhow!("the command did not print {text:?} within {timeout:?}")))
    }

    /// Kills the command and what it has started (its process group), with SIGKILL.
    pub fn kill(&self) -> Result<()> {
        self.shared.send(kind::KILL, self.id, &[])
    }

    /// Waits for the command to end; after `timeout` it is killed, and that is an error.
    pub fn wait(self, timeout: Duration) -> Result<Output> {
        if let Some(output) = self.shared.wait(timeout, |state| self.ended(state))? {
            return output;
        }
        self.kill()?;
        let output = self.shared.wait(Duration::from_secs(60), |state| self.ended(state))?;
        match output {
            Some(Ok(output)) => bail!("not done within {timeout:?}, and killed: {output}"),
            Some(Err(e)) => Err(e),
            None => bail!("not done within {timeout:?}, and not even killed by SIGKILL"),
        }
    }

    fn ended(&self, state: &mut State) -> Option<Result<Output>> {
        if state.boots != self.boot {
            return Some(Err(anyhow!("the machine was rebooted meanwhile")));
        }
        let record = state.records.get(&self.id)?;
        record.exited.then(|| Ok(record.output.clone()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Frames for an id without a record are ignored.
        self.shared.state().records.remove(&self.id);
    }
}

/// Reads until the end: greetings, each of which begins a new boot, and frames between them.
fn read_frames(shared: &Shared, mut stream: UnixStream) -> Result<()> {
    let mut buffer: Vec<u8> = Vec::new();
    let mut greeted = false;
    let mut chunk = vec![0; 64 << 10];
    loop {
        let n = match stream.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
            Err(e) => return Err(e).context("cannot read from the machine's agent"),
        };
        buffer.extend_from_slice(&chunk[..n]);
        // The machine may be reset, and so greet, at any time. No frame begins like a greeting, because its
        // first word would be a length of 2 GiB or more, but a payload may. So look only where a frame would
        // begin, or after a frame that was cut off.
        loop {
            if !greeted || cut_off_by_greeting(&buffer) {
                let Some(at) = find_magic(&buffer) else { break };
                buffer.drain(..at + MAGIC.len());
                greeted = true;
                shared.state().boots += 1;
                let mut writer = shared.writer.lock().unwrap_or_else(PoisonError::into_inner);
                writer.write_all(MAGIC).context("cannot greet the machine's agent")?;
                drop(writer);
                shared.changed.notify_all();
                continue;
            }
            let Some((kind, id, payload, used)) = frame(&buffer) else { break };
            let mut state = shared.state();
            if let Some(record) = state.records.get_mut(&id) {
                match kind {
                    kind::STDOUT => record.output.stdout.extend_from_slice(payload),
                    kind::STDERR => record.output.stderr.extend_from_slice(payload),
                    kind::EXIT => {
                        record.output.status = word(payload, 0).unwrap_or(u32::MAX) as i32;
                        record.exited = true;
                    }
                    _ => bail!("the machine's agent sent a frame of unknown kind {kind}"),
                }
            }
            drop(state);
            shared.changed.notify_all();
            buffer.drain(..used);
        }
    }
}

/// Whether the buffer begins with an incomplete frame and a greeting follows.
fn cut_off_by_greeting(buffer: &[u8]) -> bool {
    frame(buffer).is_none() && find_magic(buffer).is_some()
}

fn find_magic(buffer: &[u8]) -> Option<usize> {
    buffer.windows(MAGIC.len()).position(|w| w == MAGIC)
}

fn word(bytes: &[u8], index: usize) -> Option<u32> {
    let at = bytes.get(index * 4..index * 4 + 4)?;
    Some(u32::from_le_bytes([at[0], at[1], at[2], at[3]]))
}

/// The frame at the beginning, if it is complete: kind, id, payload, total bytes.
fn frame(buffer: &[u8]) -> Option<(u32, u32, &[u8], usize)> {
    let len = word(buffer, 0)? as usize;
    let payload = buffer.get(12..12usize.checked_add(len)?)?;
    Some((word(buffer, 1)?, word(buffer, 2)?, payload, 12 + len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_taken_only_when_it_is_whole() {
        let bytes = [3, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, b'a', b'b', b'c', 0xff];
        assert_eq!(frame(&bytes), Some((1, 9, &b"abc"[..], 15)));
        assert_eq!(frame(&bytes[..14]), None);
        assert_eq!(frame(&bytes[..3]), None);
    }

    #[test]
    fn a_greeting_ends_a_frame_that_was_cut_off() {
        let mut bytes = vec![200, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, b'a'];
        assert!(!cut_off_by_greeting(&bytes));
        bytes.extend_from_slice(MAGIC);
        assert!(cut_off_by_greeting(&bytes));
    }
}
