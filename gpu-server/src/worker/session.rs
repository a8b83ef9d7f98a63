//! The dispatcher: takes commands in order and executes them, except those of streams that wait for the
//! client ([`super::host_waits`]).

use std::collections::HashSet;
use std::sync::Arc;
use std::thread::Scope;

use host_bridge::endpoint::{Client, Commands, Lost, Mapped};
use protocol::Status;
use protocol::channel::{NO_SLOT, Record};
use protocol::data::DataUse;
use protocol::ops::memory::{MemGrow, MemoryCreate};
use protocol::ops::nvml::NvmlSystem;
use protocol::ops::{self, Class, Lane, Malformed, Op, OpInfo, Outcome, dispatch};

use protocol::trace::{RECORDER, Stage};

use super::Shared;
use super::host_waits::{HostWaits, Verdict};
use super::read_ahead::Ahead;
use super::residence::{Patience, Residence};
use super::timeline::{Timeline, work_stream};
use super::turns::Turns;
use crate::driver::express::Express;
use crate::driver::{Backend, Call, Errors};
use crate::worker_protocol::Kind;

/// Executes a session to its end. Returns why it was lost, if it was.
pub fn run(
    commands: &mut dyn Commands,
    client: &Arc<dyn Client>,
    backend: &mut dyn Backend,
    shared: &Shared,
    kind: Kind,
    turns: Turns,
    residence: Residence,
) -> Option<Lost> {
    backend.begin(Arc::clone(client));
    let mut dispatcher = Dispatcher {
        call: Call::new(Arc::clone(client)),
        errors: Errors::new(Arc::clone(client)),
        backend,
        shared,
        kind,
        turns,
        residence,
        timeline: Timeline::default(),
        reply: Vec::with_capacity(4096),
        waits: HostWaits::default(),
        executed: 0,
        unsupported: HashSet::new(),
    };
    dispatcher.timeline.begin(&mut *dispatcher.backend, &mut dispatcher.call);
    let (beside, directs) = (dispatcher.backend.beside(), Arc::clone(&shared.directs));
    let (mirrors, told) = (Arc::downgrade(&beside), Arc::downgrade(client));
    client.set_before_news(Box::new(move || {
        if let (Some(beside), Some(client)) = (mirrors.upgrade(), told.upgrade()) {
            beside.watches().before_news(&*client, &*beside);
        }
    }));
    let ahead = Ahead::new(commands, Express { client: Arc::clone(client), beside, directs });
    let lost = std::thread::scope(|scope| {
        let _ending = ahead.ending();
        dispatcher.run(&ahead, scope)
    });
    if let Some(lost) = &lost {
        client.lose(&lost.reason);
    }
    client.close();
    dispatcher.timeline.end(&mut *dispatcher.backend);
    dispatcher.backend.end();
    lost
}

/// Whether an operation is an NVML query.
fn asks_nvml(opcode: u16) -> bool {
    opcode >> 8 == NvmlSystem::INFO.opcode >> 8
}

/// Whether an operation waits for room on a device.
fn takes_memory(opcode: u16) -> bool {
    [MemGrow::INFO.opcode, MemoryCreate::INFO.opcode].contains(&opcode)
}

/// The client memory that a command names, kept while the result exists.
fn keep(client: &dyn Client, opcode: u16, body: &[u8]) -> Vec<Mapped> {
    let mut kept = Vec::new();
    if let Some(info) = ops::info(opcode).filter(|info| info.carries_data) {
        // A command that cannot be decoded is refused when it is executed.
        let _ = (info.visit_data)(body, &mut |data| {
            let (DataUse::In(range) | DataUse::Late(range) | DataUse::Out(range)) = data;
            kept.extend(client.keep(range));
        });
    }
    kept
}

struct Dispatcher<'a> {
    call: Call,
    errors: Errors,
    backend: &'a mut dyn Backend,
    shared: &'a Shared,
    kind: Kind,
    turns: Turns,
    residence: Residence,
    timeline: Timeline,
    reply: Vec<u8>,
    waits: HostWaits,
    /// All commands up to this one have been executed, and the client knows.
    executed: u64,
    /// Operations already logged as unsupported.
    unsupported: HashSet<u16>,
}

impl Dispatcher<'_> {
    fn run<'scope, 'env>(
        &mut self,
        ahead: &'env Ahead<'_>,
        scope: &'scope Scope<'scope, 'env>,
    ) -> Option<Lost> {
        let mut body = Vec::with_capacity(4096);
        let mut source = ahead.source();
        loop {
            let mut rest = || {
                self.turns.rest(self.backend, &mut self.call);
                self.residence.rest(self.backend, &mut self.call);
            };
            let (record, served) = match source.next(&mut body, &mut rest) {
                Ok(Some(next)) => next,
                Ok(None) => return None,
                Err(lost) => return Some(lost),
            };
            self.residence.works();
            let taken = if ahead.is_needed(&record) {
                drop(source);
                ahead.lend(scope);
                let taken = self.take(record, &body, served);
                source = ahead.source();
                taken
            } else {
                self.take(record, &body, served)
            };
            if let Err(lost) = taken {
                return Some(lost);
            }
        }
    }

    /// Handles the next command. `served`: it was already executed, next to this thread.
    fn take(&mut self, record: Record, body: &[u8], served: bool) -> Result<(), Lost> {
        let client = &*self.call.client;
        let keep = || keep(client, record.opcode, body);
        let renew = |event, aside| self.backend.renew_event(event, aside);
        match self.waits.judge(&record, body, keep, renew) {
            Verdict::Execute if served => self.shared.executed(record.opcode, record.reply_slot != NO_SLOT),
            Verdict::Execute => self.execute(record, body)?,
            Verdict::Hold => self.waits.check_size()?,
        }
        while let Some((record, body)) = self.waits.next_ready() {
            self.execute(record, &body)?;
            while let Some(event) = self.waits.next_unused_event() {
                self.backend.end_event(event);
            }
        }
        self.tell_executed();
        Ok(())
    }

    /// Tells the client up to which command everything has been executed.
    #[inline]
    fn tell_executed(&mut self) {
        let upto = self.waits.executed_upto();
        if upto > self.executed {
            self.executed = upto;
            self.call.client.executed(upto);
        }
    }

    fn execute(&mut self, record: Record, body: &[u8]) -> Result<(), Lost> {
        if self.waits.keeps(&record, body) {
            return Ok(());
        }
        let outcome = self.perform(record, body)?;
        self.shared.executed(record.opcode, record.reply_slot != NO_SLOT);
        self.waits.executed(&record, body, outcome == Outcome::Done)
    }

    fn perform(&mut self, record: Record, body: &[u8]) -> Result<Outcome, Lost> {
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
        let taken = RECORDER.clock();
        RECORDER.note_at(Stage::Begun, record.seq, record.opcode, taken);
        let metered = (self.turns.is_limited() || self.residence.is_away()) && self.wait(record.opcode)?;
        let outcome = if self.kind == Kind::Nvml && !asks_nvml(record.opcode) {
            // Whatever the client claimed about itself, this process makes no context.
            Outcome::Failed(Status::NOT_PERMITTED)
        } else {
            let stream = if self.call.records_activity { work_stream(info, body) } else { None };
            if let Some(stream) = stream {
                self.backend.mark_work(Some((record.seq, stream)));
            }
            let outcome = dispatch(&mut *self.backend, &mut self.call, record.opcode, body, &mut self.reply);
            if stream.is_some() {
                self.backend.mark_work(None);
            }
            match outcome.map_err(malformed)? {
                Outcome::Failed(Status::NOT_READY) if takes_memory(record.opcode) => {
                    self.grow_when_there_is_room(&record, body)?
                }
                outcome => outcome,
            }
        };
        RECORDER.note(Stage::Executed, record.seq, record.opcode);
        tracing::trace!(seq = record.seq, op = info.name, ?outcome);
        if info.carries_data && self.call.client.streams_data() {
            self.excuse_data(info, &record, body);
        }
        match outcome {
            Outcome::Done | Outcome::Later => {}
            Outcome::Replied => {
                // Those of the express lane are about mirrors, and not about work.
                if info.lane != Lane::Express {
                    self.call.client.before_news();
                }
                self.call.client.reply(record.seq, record.reply_slot, Status::SUCCESS, &self.reply)
            }
            Outcome::Failed(status) => self.failed(info, &record, status),
        }
        if taken != 0 && outcome == Outcome::Done {
            self.timeline.executed(self.backend, &mut self.call, &record, body, taken);
        }
        if metered {
            self.turns.after(self.backend, &mut self.call, record.opcode, body);
        }
        Ok(outcome)
    }

    /// Repeats a command that found no room for more device memory. In between, the session's memory may
    /// leave for one that came earlier.
    fn grow_when_there_is_room(&mut self, record: &Record, body: &[u8]) -> Result<Outcome, Lost> {
        let over = || self.shared.is_over();
        let mut patience = Patience::default();
        let outcome = loop {
            if !self.residence.until_room(self.backend, &mut self.call, &mut patience, over)? {
                break Outcome::Failed(Status::OUT_OF_MEMORY);
            }
            self.call.begin(record.seq, record.reply_slot);
            self.reply.clear();
            let outcome = dispatch(&mut *self.backend, &mut self.call, record.opcode, body, &mut self.reply);
            match outcome.map_err(|e| Lost::new(format!("command {}: {e}", record.seq)))? {
                Outcome::Failed(Status::NOT_READY) => {}
                outcome => break outcome,
            }
        };
        self.residence.room_found();
        Ok(outcome)
    }

    /// Waits until a command may be executed. Returns whether the work that it gives a device must be
    /// counted.
    fn wait(&mut self, opcode: u16) -> Result<bool, Lost> {
        let over = || self.shared.is_over();
        // What waits at its gate needs no memory before that opens.
        let waiting = |backend: &mut dyn Backend, call: &mut Call| self.residence.obey_all(backend, call);
        let metered = self.turns.before(self.backend, &mut self.call, opcode, over, waiting);
        if !asks_nvml(opcode) {
            self.residence.before(self.backend, &mut self.call, over)?;
        }
        Ok(metered)
    }

    fn failed(&mut self, info: &'static OpInfo, record: &Record, status: Status) {
        if status == Status::NOT_SUPPORTED && self.unsupported.insert(info.opcode) {
            tracing::warn!(
                op = info.name,
                seq = record.seq,
                "answered CUDA_ERROR_NOT_SUPPORTED (logged once per operation)"
            );
        } else {
            tracing::debug!(op = info.name, seq = record.seq, "failed: {status}");
        }
        match info.class {
            Class::Sync => self.call.refuse(status),
            Class::Async if status == Status::INVALID_HANDLE && self.waits.was_overtaken(record) => {}
            Class::Async => self.errors.publish(self.call.failing_context(), status, record.seq),
        }
    }

    /// The bridge has data for the command that was never requested, or waits for output that will not come.
    /// Releases both.
    fn excuse_data(&self, info: &OpInfo, record: &Record, body: &[u8]) {
        let (mut wanted, mut piece) = (false, 0);
        let client = &self.call.client;
        // It was decoded before, so this cannot fail.
        let _ = (info.visit_data)(body, &mut |data| {
            match data {
                DataUse::Out(_) => wanted = true,
                DataUse::In(_) | DataUse::Late(_) if piece >= self.call.piece => {
                    client.nothing_read(record.seq, piece);
                }
                DataUse::In(_) | DataUse::Late(_) => {}
            }
            piece += 1;
        });
        if wanted && !self.call.sink_taken {
            client.nothing_sent(record.seq);
        }
    }
}
