//! The dispatcher: takes commands in order and executes them.
//!
//! A stream that waits for the client ([`StreamHostWait`]) goes on only with a later command of the same ring, and a device queue holds only so much: when it
//! is full, the driver's call blocks, and the command that would release it is never read. So while a stream waits for the client, the dispatcher
//! executes only some hundred commands ahead, and none that may wait for the device; after that it sets commands aside, still in order, and looks among them for the one signal alone.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use host_bridge::endpoint::{Client, Commands, Lost};
use protocol::Status;
use protocol::channel::{NO_SLOT, Record};
use protocol::data::DataUse;
use protocol::ops::copy::MemcpyDtoHInline;
use protocol::ops::stream::{StreamHostSignal, StreamHostWait};
use protocol::ops::{self, Class, Malformed, Op, OpInfo, Outcome, dispatch};

use super::Shared;
use crate::driver::{Backend, Call, Errors};

/// Commands executed while a stream waits for the client; far fewer than a device queue holds.
const AHEAD: u32 = 256;
/// Copies with data of the client's enqueued while a stream waits for it; so many at a time find their staging buffers.
const COPIES_AHEAD: u32 = 3;
/// Bytes of commands that may be set aside. A client that goes beyond is held back, as by a full queue.
const ASIDE: usize = 64 << 20;

/// Executes a session to its end. `Some`: why it was lost.
pub fn run(
    commands: &mut dyn Commands,
    client: &Arc<dyn Client>,
    backend: &mut dyn Backend,
    shared: &Shared,
) -> Option<Lost> {
    backend.begin(Arc::clone(client));
    let mut dispatcher = Dispatcher {
        call: Call::new(Arc::clone(client)),
        errors: Errors::new(Arc::clone(client)),
        backend,
        shared,
        reply: Vec::with_capacity(4096),
        waits: HashSet::new(),
        ahead: 0,
        copies_ahead: 0,
        aside: VecDeque::new(),
        aside_bytes: 0,
        unsupported: HashSet::new(),
    };
    let lost = dispatcher.run(commands);
    if let Some(lost) = &lost {
        client.lose(&lost.reason);
    }
    client.close();
    dispatcher.backend.end();
    lost
}

/// Whether a command may take buffers between client and device.
fn moves_data(record: &Record) -> bool {
    record.opcode == <MemcpyDtoHInline as Op>::INFO.opcode
        || ops::info(record.opcode).is_some_and(|info| info.carries_data)
}

struct Dispatcher<'a> {
    call: Call,
    errors: Errors,
    backend: &'a mut dyn Backend,
    shared: &'a Shared,
    reply: Vec<u8>,
    /// Tickets for which a stream waits.
    waits: HashSet<u64>,
    /// Commands executed since `waits` was last empty.
    ahead: u32,
    copies_ahead: u32,
    aside: VecDeque<(Record, Vec<u8>)>,
    aside_bytes: usize,
    /// Operations of which the log already says that they are not supported.
    unsupported: HashSet<u16>,
}

impl Dispatcher<'_> {
    fn run(&mut self, commands: &mut dyn Commands) -> Option<Lost> {
        let mut body = Vec::with_capacity(4096);
        loop {
            while let Some((record, body)) = self.take_from_aside() {
                if let Err(lost) = self.execute(record, &body) {
                    return Some(lost);
                }
            }
            let record = match commands.next(&mut body) {
                Ok(Some(record)) => record,
                Ok(None) => return None,
                Err(lost) => return Some(lost),
            };
            let result = if self.holds_back(&record, &body) {
                self.set_aside(record, &body)
            } else {
                self.execute(record, &body)
            };
            if let Err(lost) = result {
                return Some(lost);
            }
        }
    }

    /// Whether `record` must not reach the device now.
    fn holds_back(&self, record: &Record, body: &[u8]) -> bool {
        if self.waits.is_empty() || self.aside_bytes >= ASIDE {
            return false;
        }
        !self.aside.is_empty()
            || self.ahead >= AHEAD
            || (self.copies_ahead >= COPIES_AHEAD && moves_data(record))
            || self.backend.may_wait(record.opcode, body)
    }

    /// The next command that was set aside, if it may be executed now.
    fn take_from_aside(&mut self) -> Option<(Record, Vec<u8>)> {
        let may = self.waits.is_empty() || self.aside_bytes >= ASIDE;
        let (record, body) = if may { self.aside.pop_front()? } else { return None };
        self.aside_bytes -= body.len() + 64;
        Some((record, body))
    }

    fn set_aside(&mut self, record: Record, body: &[u8]) -> Result<(), Lost> {
        if record.opcode == <StreamHostSignal as Op>::INFO.opcode {
            // Executed at once, out of its order: all that it does is to let a stream go on that waits for it. In its order it does nothing more.
            self.perform(record, body)?;
        }
        self.aside_bytes += body.len() + 64;
        self.aside.push_back((record, body.to_vec()));
        Ok(())
    }

    fn execute(&mut self, record: Record, body: &[u8]) -> Result<(), Lost> {
        self.perform(record, body)?;
        self.call.client.executed(record.seq);
        if self.waits.is_empty() {
            (self.ahead, self.copies_ahead) = (0, 0);
        } else {
            self.ahead += 1;
            self.copies_ahead += u32::from(moves_data(&record));
        }
        self.shared.executed();
        Ok(())
    }

    fn perform(&mut self, record: Record, body: &[u8]) -> Result<(), Lost> {
        let malformed = |e: Malformed| {
            let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
            Lost::new(format!("command {} is malformed: {e}{cause}", record.seq))
        };
        let info = ops::info(record.opcode).ok_or(Malformed::Opcode(record.opcode)).map_err(malformed)?;
        if (info.class == Class::Sync) != (record.reply_slot != NO_SLOT) {
            return Err(malformed(Malformed::Slot(info.name)));
        }
        self.call.begin(record.seq, record.reply_slot);
        self.reply.clear();
        let outcome = dispatch(&mut *self.backend, &mut self.call, record.opcode, body, &mut self.reply)
            .map_err(malformed)?;
        tracing::trace!(seq = record.seq, op = info.name, ?outcome);
        self.follow_waits(&record, body, outcome);
        if info.carries_data && !self.call.sink_taken && self.call.client.streams_data() {
            self.excuse_output(info, &record, body);
        }
        match outcome {
            Outcome::Done | Outcome::Later => {}
            Outcome::Replied => {
                self.call.client.reply(record.seq, record.reply_slot, Status::SUCCESS, &self.reply)
            }
            Outcome::Failed(status) => self.failed(info, &record, status),
        }
        if info.opcode >> 8 == 0x03 {
            self.shared.device_memory.store(self.backend.device_memory(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn failed(&mut self, info: &'static OpInfo, record: &Record, status: Status) {
        if status == Status::NOT_SUPPORTED && self.unsupported.insert(info.opcode) {
            tracing::warn!(
                op = info.name,
                seq = record.seq,
                "answered CUDA_ERROR_NOT_SUPPORTED (said once for each operation)"
            );
        } else {
            tracing::debug!(op = info.name, seq = record.seq, "failed: {status}");
        }
        match info.class {
            Class::Sync => self.call.client.reply(record.seq, record.reply_slot, status, &[]),
            Class::Async => self.errors.publish(self.call.context, status, record.seq),
        }
    }

    fn follow_waits(&mut self, record: &Record, body: &[u8], outcome: Outcome) {
        let ticket = |skip: usize| {
            body.get(skip..skip + 8).and_then(|b| b.first_chunk::<8>()).map(|b| u64::from_le_bytes(*b))
        };
        if record.opcode == <StreamHostWait as Op>::INFO.opcode && outcome == Outcome::Done {
            self.waits.extend(ticket(4));
        } else if record.opcode == <StreamHostSignal as Op>::INFO.opcode
            && let Some(ticket) = ticket(0)
        {
            self.waits.remove(&ticket);
        }
    }

    /// The command's output is awaited by the bridge, and there will be none.
    fn excuse_output(&self, info: &OpInfo, record: &Record, body: &[u8]) {
        let mut wanted = false;
        // It has been decoded before, so this cannot fail.
        let _ = (info.visit_data)(body, &mut |data| wanted |= matches!(data, DataUse::Out(_)));
        if wanted {
            self.call.client.nothing_sent(record.seq);
        }
    }
}
