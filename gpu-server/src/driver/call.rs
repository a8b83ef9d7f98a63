//! One command being executed, and answers that are given later.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use host_bridge::endpoint::{Client, Incoming, Lost, Mapped, Placed, Sink, Source};
use protocol::Status;
use protocol::channel::MAX_DEVICES;
use protocol::data::{HostIn, HostOut};
use protocol::handle::ContextId;
use protocol::link::{ProgressUpdate, progress};
use protocol::ops::Answer;
use protocol::wire::{Wire, Writer};

/// What most functions here return. A [`Status`] is the error.
pub type Result<T = (), E = Status> = std::result::Result<T, E>;

/// The result of an operation of class `sync`.
pub type Reply<R> = Result<Answer<R>>;

/// Called with success when the awaited work is done, or else with the error.
pub type End = Box<dyn FnOnce(Status) + Send>;

/// The ID of no context.
const UNNAMED: ContextId = ContextId(u32::MAX);

/// The context of one call of a [`protocol::ops::Driver`] method.
pub struct Call {
    /// The session's client.
    pub client: Arc<dyn Client>,
    /// The command.
    pub seq: u64,
    /// Its reply slot.
    pub slot: u16,
    /// The context that gets the error if the command fails; `UNNAMED` until the command has named one.
    pub context: ContextId,
    /// Number of the next piece of bulk data outside the record.
    pub piece: u32,
    /// Whether the command's output was already taken.
    pub sink_taken: bool,
    /// Whether the session records what its devices do: see [`activity`](super::activity).
    pub records_activity: bool,
    /// Set if the answer is given later; true once it has been given.
    answered: OnceCell<Arc<AtomicBool>>,
}

/// Where a command's input is.
#[derive(Debug)]
pub enum Input<'a> {
    /// In the record.
    Inline(&'a [u8]),
    /// In mapped memory.
    Mapped(Mapped),
    /// Still arriving.
    Incoming(Incoming),
    /// Still arriving, in memory that the device can read.
    Placed(Placed),
}

impl Input<'_> {
    /// Total size in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Input::Inline(bytes) => bytes.len() as u64,
            Input::Mapped(mapped) => mapped.len() as u64,
            Input::Incoming(incoming) => incoming.len(),
            Input::Placed(placed) => placed.len(),
        }
    }

    /// Collects all bytes, waiting for those that are still arriving. More than `limit` bytes are
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn collect(self, limit: u64) -> Result<Vec<u8>, Status> {
        if self.len() > limit {
            return Err(Status::INVALID_VALUE);
        }
        match self {
            Input::Inline(bytes) => Ok(bytes.to_vec()),
            Input::Mapped(mapped) => {
                let mut bytes = vec![0; mapped.len()];
                mapped.read(0, &mut bytes);
                Ok(bytes)
            }
            Input::Incoming(incoming) => incoming.collect().map_err(|_| Status::DEVICE_UNAVAILABLE),
            Input::Placed(placed) => {
                let mut bytes = vec![0; placed.len() as usize];
                let read = placed.read::<Lost>(|at, chunk| {
                    chunk.read(&mut bytes[at as usize..at as usize + chunk.len()]);
                    Ok(())
                });
                read.map(|()| bytes).map_err(|_| Status::DEVICE_UNAVAILABLE)
            }
        }
    }
}

impl Call {
    /// A call context for a session.
    pub fn new(client: Arc<dyn Client>) -> Call {
        let answered = OnceCell::new();
        Call {
            client,
            seq: 0,
            slot: 0,
            context: UNNAMED,
            piece: 0,
            sink_taken: false,
            records_activity: false,
            answered,
        }
    }

    /// Begins the next command.
    pub fn begin(&mut self, seq: u64, slot: u16) {
        self.seq = seq;
        self.slot = slot;
        self.context = UNNAMED;
        self.piece = 0;
        self.sink_taken = false;
        self.answered.take();
    }

    /// Answers with an error, unless a [later](Self::later) answer was already given: the client may already
    /// use its slot for another command.
    pub fn refuse(&self, status: Status) {
        if self.answered.get().is_none_or(|answered| !answered.swap(true, Ordering::AcqRel)) {
            refuse(&self.client, self.context, self.seq, self.slot, status);
        }
    }

    /// The command's next piece of bulk input. Call this and [`Call::output`] in field order.
    pub fn input<'a>(&mut self, data: HostIn<'a>) -> Result<Input<'a>, Status> {
        match data {
            HostIn::Inline(bytes) => Ok(Input::Inline(bytes)),
            HostIn::Range(range) | HostIn::Late(range) => {
                let late = matches!(data, HostIn::Late(_));
                let piece = self.piece;
                self.piece += 1;
                match self.client.source(self.seq, piece, range)? {
                    Source::Mapped(mapped) => Ok(Input::Mapped(mapped)),
                    Source::Incoming(incoming) if late => Ok(Input::Incoming(incoming.late())),
                    Source::Incoming(incoming) => Ok(Input::Incoming(incoming)),
                    Source::Placed(placed) => Ok(Input::Placed(placed)),
                }
            }
        }
    }

    /// The command's next piece of bulk output.
    pub fn output(&mut self, data: HostOut) -> Result<Sink, Status> {
        let piece = self.piece;
        self.piece += 1;
        let sink = self.client.sink(self.seq, piece, data.0)?;
        self.sink_taken = true;
        Ok(sink)
    }

    /// Writes `bytes` to the command's next piece of output if they fit there.
    pub fn write_if_it_fits(&mut self, room: HostOut, bytes: &[u8]) -> Result<(), Status> {
        if bytes.len() as u64 > room.0.len {
            return Ok(());
        }
        match self.output(room)? {
            Sink::Mapped(mapped) => mapped.write(0, bytes),
            Sink::Outgoing(outgoing) => outgoing.write(bytes).map_err(|_| Status::DEVICE_UNAVAILABLE)?,
        }
        Ok(())
    }

    /// The context that gets the error if the command fails: the first one if the command has named none.
    pub fn failing_context(&self) -> ContextId {
        if self.context == UNNAMED { ContextId(0) } else { self.context }
    }

    /// Publishes errors to the client.
    pub fn errors(&self) -> Errors {
        Errors::new(Arc::clone(&self.client))
    }

    /// Takes the command's answer in order to give it later. Call this when nothing can fail any more: if the
    /// answer is dropped and the command then fails, its status is lost.
    pub fn later(&self) -> Pending {
        Pending {
            client: Arc::clone(&self.client),
            context: self.context,
            seq: self.seq,
            slot: self.slot,
            fallback: Mutex::new(Status::DEVICE_UNAVAILABLE),
            answered: Arc::clone(self.answered.get_or_init(Arc::default)),
        }
    }
}

/// The outstanding answer of a `sync` command. If it is dropped unanswered, it answers with its fallback
/// status.
pub struct Pending {
    client: Arc<dyn Client>,
    context: ContextId,
    seq: u64,
    slot: u16,
    fallback: Mutex<Status>,
    answered: Arc<AtomicBool>,
}

impl Pending {
    /// The answer of a command that the dispatcher does not execute. It is about no context.
    pub fn new(client: Arc<dyn Client>, seq: u64, slot: u16) -> Pending {
        let (fallback, answered) = (Mutex::new(Status::DEVICE_UNAVAILABLE), Arc::default());
        Pending { client, context: UNNAMED, seq, slot, fallback, answered }
    }

    /// Sets the fallback status, with which this answers when dropped. The first failure wins.
    pub fn settle(&self, status: Status) {
        let mut fallback = self.fallback.lock().unwrap_or_else(|e| e.into_inner());
        if *fallback == Status::DEVICE_UNAVAILABLE || fallback.is_success() {
            *fallback = status;
        }
    }

    /// Answers with `reply` or with an error status.
    pub fn answer<R: for<'r> Wire<'r>>(&self, result: Result<R, Status>) {
        if self.answered.swap(true, Ordering::AcqRel) {
            return;
        }
        match result {
            Ok(reply) => {
                let mut payload = Vec::new();
                reply.put(&mut Writer(&mut payload));
                self.client.before_news();
                self.client.reply(self.seq, self.slot, Status::SUCCESS, &payload);
            }
            Err(status) => refuse(&self.client, self.context, self.seq, self.slot, status),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.answered.swap(true, Ordering::AcqRel) {
            let status = *self.fallback.lock().unwrap_or_else(|e| e.into_inner());
            refuse(&self.client, self.context, self.seq, self.slot, status);
        }
    }
}

/// Answers with a status alone. An error that leaves the context unusable is published first: a client that
/// has the answer finds the context failed, whichever thread was about to publish the error.
fn refuse(client: &Arc<dyn Client>, context: ContextId, seq: u64, slot: u16, status: Status) {
    if is_sticky(status) && context != UNNAMED {
        Errors::new(Arc::clone(client)).publish(context, status, 0);
    }
    client.before_news();
    client.reply(seq, slot, status, &[]);
}

/// Publishes contexts' errors.
#[derive(Clone)]
pub struct Errors {
    client: Arc<dyn Client>,
}

impl Errors {
    /// For a client.
    pub fn new(client: Arc<dyn Client>) -> Errors {
        Errors { client }
    }

    /// `context` failed with `status` at command `seq` (0: unknown).
    pub fn publish(&self, context: ContextId, status: Status, seq: u64) {
        let sticky = u32::from(is_sticky(status)) << 31;
        let update =
            ProgressUpdate { kind: progress::ERROR, index: context.0 | sticky, seq, value: status.0.into() };
        self.client.before_news();
        self.client.publish(&[update]);
    }

    /// `context` is as good as new.
    pub fn clear(&self, context: ContextId) {
        self.client.publish(&[ProgressUpdate { kind: progress::ERROR, index: context.0, seq: 0, value: 0 }]);
    }

    /// Raises the stream's progress word to `seq`.
    pub fn progress(&self, stream: u32, seq: u64) {
        self.client.before_news();
        self.client.publish(&[ProgressUpdate { kind: progress::STREAM, index: stream, seq, value: 0 }]);
    }
}

/// Whether CUDA documents this error as leaving the process in an inconsistent state, so that every later
/// call returns it.
pub fn is_sticky(status: Status) -> bool {
    matches!(status.0, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721)
}

/// Checks a selection, in order, of a session's `count` devices.
///
/// # Errors
/// `INVALID_DEVICE` if it is empty, names a device twice, or names one that doesn't exist.
pub fn check_selection(devices: &[u32], count: u32) -> Result<(), Status> {
    let first = |(at, number): (usize, &u32)| *number < count && !devices[..at].contains(number);
    if !devices.is_empty() && devices.iter().enumerate().all(first) {
        Ok(())
    } else {
        Err(Status::INVALID_DEVICE)
    }
}

/// The windows of the selected devices: those that the client names, or the first ones.
///
/// # Errors
/// `INVALID_VALUE` unless there is one window per device, in ascending order.
pub fn check_windows(windows: Vec<u32>, devices: usize) -> Result<Vec<u32>, Status> {
    if windows.is_empty() {
        return Ok((0..devices as u32).collect());
    }
    let ascending = windows.is_sorted_by(|one, next| one < next);
    let exist = windows.last().is_some_and(|last| *last < MAX_DEVICES);
    if windows.len() == devices && ascending && exist { Ok(windows) } else { Err(Status::INVALID_VALUE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doubles::{Listener, Told};

    type Answers = Arc<Mutex<Vec<(u64, Status)>>>;

    /// The statuses of the answers, and of the errors that are published: those as of command 0.
    fn call() -> (Call, Answers) {
        let answers = Answers::default();
        let kept = answers.clone();
        let client = Listener::new(move |told: Told<'_>| {
            let mut kept = kept.lock().unwrap();
            match told {
                Told::Reply { seq, status, .. } => kept.push((seq, status)),
                Told::Published(updates) => {
                    kept.extend(updates.iter().map(|update| (0, Status(update.value as u32))));
                }
            }
        });
        (Call::new(Arc::new(client)), answers)
    }

    #[test]
    fn a_failed_command_is_answered_once_even_with_a_later_answer() {
        let (mut call, answers) = call();
        call.begin(1, 0);
        call.refuse(Status::INVALID_VALUE);
        // Dropped before the command is refused.
        call.begin(2, 0);
        drop(call.later());
        call.refuse(Status::OUT_OF_MEMORY);
        // Dropped afterwards.
        call.begin(3, 0);
        let pending = call.later();
        call.refuse(Status::OUT_OF_MEMORY);
        pending.answer(Ok(protocol::ops::memory::MemShrinkReply {}));
        drop(pending);
        call.begin(4, 0);
        call.refuse(Status::INVALID_HANDLE);
        let expected = [
            (1, Status::INVALID_VALUE),
            (2, Status::DEVICE_UNAVAILABLE),
            (3, Status::OUT_OF_MEMORY),
            (4, Status::INVALID_HANDLE),
        ];
        assert_eq!(*answers.lock().unwrap(), expected);
    }

    #[test]
    fn a_client_that_has_a_sticky_error_finds_the_context_failed() {
        let (mut call, answers) = call();
        let fault = Status::ILLEGAL_ADDRESS;
        call.begin(1, 0);
        call.context = ContextId(2);
        call.refuse(fault);
        call.begin(2, 0);
        call.context = ContextId(2);
        call.later().answer::<protocol::ops::memory::MemShrinkReply>(Err(fault));
        call.begin(3, 0);
        call.context = ContextId(2);
        call.later().settle(fault);
        // Nobody knows whose it is.
        call.begin(4, 0);
        call.refuse(fault);
        assert_eq!(
            *answers.lock().unwrap(),
            [(0, fault), (1, fault), (0, fault), (2, fault), (0, fault), (3, fault), (4, fault)]
        );
    }

    #[test]
    fn windows_are_as_many_as_devices_and_ascend() {
        assert_eq!(check_windows(Vec::new(), 2), Ok(vec![0, 1]));
        assert_eq!(check_windows(vec![3, 31], 2), Ok(vec![3, 31]));
        for wrong in [vec![3], vec![3, 3], vec![4, 3], vec![3, 32], vec![1, 2, 3]] {
            assert_eq!(check_windows(wrong.clone(), 2), Err(Status::INVALID_VALUE), "{wrong:?}");
        }
    }

    #[test]
    fn a_selection_names_existing_devices_once_each() {
        assert_eq!(check_selection(&[1, 0], 2), Ok(()));
        for wrong in [&[][..], &[2], &[0, 0], &[u32::MAX]] {
            assert_eq!(check_selection(wrong, 2), Err(Status::INVALID_DEVICE), "{wrong:?}");
        }
    }
}
