//! Reads commands ahead while the dispatcher is blocked in one.
//!
//! The dispatcher reads a session's commands and executes each before reading the next. A driver call may
//! block until a kernel continues that waits for memory written by the client, while the command that writes
//! it, or sends what it waits for, comes later. So while that can happen ([`Express::is_needed`]), the
//! dispatcher lends its source of commands to a watcher before executing a command:
//!
//! ```text
//!  dispatcher   next ─ lend ─ execute ────────────────────────── take back ─ next (commands read ahead come first)
//!  watcher                     checks each millisecond: still the same command? then reads ahead and executes commands of the express lane
//! ```
//!
//! All other commands keep their order. The watcher is started when it is first needed, and sleeps while the
//! session is idle.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::{Builder, Scope, Thread};
use std::time::Duration;

use host_bridge::endpoint::{Commands, Lost};
use protocol::channel::Record;

use crate::driver::express::{Express, is_served};

/// How often the watcher checks.
const TICK: Duration = Duration::from_millis(1);
/// Number of checks without a command after which the watcher sleeps until there is one.
const IDLE: u32 = 100;
/// Maximum bytes of commands read ahead. A client stays far below it, because it asks for room in between and
/// waits for the answer ([`protocol::ops::stream::StreamRoom`]), which comes from the dispatcher.
const MAX_BYTES: usize = 64 << 20;

/// A session's commands, including those that were read ahead.
pub(super) struct Source<'a> {
    commands: &'a mut dyn Commands,
    ahead: VecDeque<Next>,
    bytes: usize,
    /// Why there is no further command.
    lost: Option<Lost>,
}

/// A command that was read ahead.
struct Next {
    record: Record,
    /// Empty once it was served.
    body: Vec<u8>,
    served: bool,
}

impl Next {
    fn cost(&self) -> usize {
        self.body.len() + size_of::<Next>()
    }
}

impl Source<'_> {
    /// Like [`Commands::next`]; also returns whether the command has already been executed.
    #[inline]
    pub(super) fn next(
        &mut self,
        body: &mut Vec<u8>,
        rest: &mut dyn FnMut(),
    ) -> Result<Option<(Record, bool)>, Lost> {
        if let Some(next) = self.ahead.pop_front() {
            self.bytes -= next.cost();
            *body = next.body;
            return Ok(Some((next.record, next.served)));
        }
        match self.lost.take() {
            Some(lost) => Err(lost),
            None => Ok(self.commands.next(body, rest)?.map(|record| (record, false))),
        }
    }
}

/// The source of commands, shared by the dispatcher and the watcher.
pub(super) struct Ahead<'a> {
    source: Mutex<Source<'a>>,
    express: Express,
    /// How many times the source was lent.
    turns: AtomicU64,
    /// Whether the watcher sleeps until the source is lent.
    resting: AtomicBool,
    over: AtomicBool,
    /// Set when the source is first lent; empty if no thread could be started.
    watcher: OnceLock<Option<Thread>>,
}

impl<'a> Ahead<'a> {
    pub(super) fn new(commands: &'a mut dyn Commands, express: Express) -> Ahead<'a> {
        Ahead {
            source: Mutex::new(Source { commands, ahead: VecDeque::new(), bytes: 0, lost: None }),
            express,
            turns: AtomicU64::new(0),
            resting: AtomicBool::new(false),
            over: AtomicBool::new(false),
            watcher: OnceLock::new(),
        }
    }

    /// Takes the source back. It is not lent while the guard exists.
    pub(super) fn source(&self) -> MutexGuard<'_, Source<'a>> {
        self.source.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether a command may block in a driver call and need a later one. One of the express lane does not,
    /// and must not be overtaken by another one, however long it takes.
    #[inline]
    pub(super) fn is_needed(&self, record: &Record) -> bool {
        self.express.is_needed() && !is_served(record.opcode)
    }

    /// Lends the source until the caller takes it back. The caller must not be holding it.
    pub(super) fn lend<'scope, 'env>(&'env self, scope: &'scope Scope<'scope, 'env>) {
        // Sequentially consistent with the watcher's accesses: either it sees this turn, or this thread sees
        // that it rests.
        self.turns.fetch_add(1, Ordering::SeqCst);
        let watcher = self.watcher.get_or_init(|| {
            let thread = Builder::new().name("rgpu-ahead".into()).spawn_scoped(scope, || self.watch());
            thread
                .inspect_err(|e| tracing::error!("cannot start a thread to read commands ahead: {e}"))
                .ok()
                .map(|thread| thread.thread().clone())
        });
        if self.resting.swap(false, Ordering::SeqCst)
            && let Some(watcher) = watcher
        {
            watcher.unpark();
        }
    }

    /// Ends the watcher when the returned guard is dropped, even by a panic.
    pub(super) fn ending(&self) -> Ending<'_, 'a> {
        Ending(self)
    }

    fn watch(&self) {
        let (mut seen, mut idle) = (0, 0);
        while !self.over.load(Ordering::SeqCst) {
            std::thread::park_timeout(TICK);
            let turn = self.turns.load(Ordering::SeqCst);
            let source = match self.source.try_lock() {
                Ok(source) => Some(source),
                Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            match source {
                Some(source) if turn == seen => self.read_ahead(source),
                None if turn == seen && idle >= IDLE => self.rest(turn),
                None if turn == seen => idle += 1,
                _ => idle = 0,
            }
            seen = turn;
        }
    }

    /// Sleeps until the source is lent again.
    fn rest(&self, turn: u64) {
        self.resting.store(true, Ordering::SeqCst);
        while self.turns.load(Ordering::SeqCst) == turn
            && self.resting.load(Ordering::SeqCst)
            && !self.over.load(Ordering::SeqCst)
        {
            std::thread::park();
        }
        self.resting.store(false, Ordering::SeqCst);
    }

    fn read_ahead(&self, mut source: MutexGuard<'_, Source<'_>>) {
        while source.lost.is_none() && source.bytes < MAX_BYTES {
            let mut body = Vec::new();
            match source.commands.try_next(&mut body) {
                Ok(Some(record)) => {
                    let mut next = Next { record, body, served: false };
                    self.serve(&mut next);
                    source.bytes += next.cost();
                    source.ahead.push_back(next);
                }
                Ok(None) => return,
                Err(lost) => source.lost = Some(lost),
            }
        }
    }

    /// Executes a command if it belongs to the express lane. A failing one is left to the dispatcher.
    fn serve(&self, next: &mut Next) {
        let Next { record, body, served } = next;
        if self.express.serve(record, body) {
            *served = true;
            // Only commands that the dispatcher executes count against the limit with their bytes.
            *body = Vec::new();
        }
    }
}

/// The guard of [`Ahead::ending`].
pub(super) struct Ending<'e, 'a>(&'e Ahead<'a>);

impl Drop for Ending<'_, '_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::SeqCst);
        self.0.watcher.get().into_iter().flatten().for_each(Thread::unpark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::Directs;
    use crate::doubles::{Listener, Told, Zeros};
    use crate::driver::beside::Beside;
    use crate::driver::watches::Watches;
    use host_bridge::endpoint::Client;
    use protocol::Status;
    use protocol::handle::{ContextId, StreamId};
    use protocol::ops::memory::{HostPatch, HostRead, HostWrite, WordPatch};
    use protocol::ops::stream::StreamMark;
    use protocol::ops::{self, Op};
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const LONG: Duration = Duration::from_secs(240);
    const MIRROR: u64 = 0x10_0000;

    struct Queue(Receiver<(Record, Vec<u8>)>);

    impl Commands for Queue {
        fn next(&mut self, body: &mut Vec<u8>, _rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
            let Ok((record, bytes)) = self.0.recv() else { return Ok(None) };
            *body = bytes;
            Ok(Some(record))
        }

        fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
            let Ok((record, bytes)) = self.0.try_recv() else { return Ok(None) };
            *body = bytes;
            Ok(Some(record))
        }
    }

    /// A client that sends commands and receives answers.
    struct Peer {
        sender: Sender<(Record, Vec<u8>)>,
        seq: u64,
        answers: Receiver<(u64, Vec<u8>)>,
    }

    impl Peer {
        fn new() -> (Peer, Queue, Arc<dyn Client>) {
            let ((sender, commands), (answer, answers)) = (channel(), channel());
            let client = Listener::new(move |told: Told<'_>| {
                let Told::Reply { seq, slot, status, payload } = told else { return };
                assert!(slot == 3 && status.is_success());
                answer.send((seq, payload.to_vec())).expect("the client is there");
            });
            (Peer { sender, seq: 0, answers }, Queue(commands), Arc::new(client))
        }

        fn send<'a, T: Op<'a>>(&mut self, op: &T) -> u64 {
            self.seq += 1;
            let mut body = Vec::new();
            ops::encode(op, &mut body);
            let sync = T::INFO.class == ops::Class::Sync;
            let reply_slot = if sync { 3 } else { protocol::channel::NO_SLOT };
            let record = Record { opcode: T::INFO.opcode, reply_slot, seq: self.seq };
            self.sender.send((record, body)).expect("the dispatcher is there");
            self.seq
        }

        fn mark(&mut self) -> u64 {
            self.send(&StreamMark { stream: StreamId(0) })
        }
    }

    /// Sixteen bytes of mirrored memory.
    #[derive(Default)]
    struct Bytes(Mutex<[u8; 16]>, Watches);

    impl Beside for Bytes {
        fn is_needed(&self) -> bool {
            true
        }

        fn holds(&self, address: u64, len: u64) -> bool {
            address.checked_sub(MIRROR).is_some_and(|at| at.saturating_add(len) <= 16)
        }

        fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status> {
            let from = address.checked_sub(MIRROR).ok_or(Status::INVALID_VALUE)? as usize;
            let all = self.0.lock().expect("no panic");
            bytes.copy_from_slice(all.get(from..from + bytes.len()).ok_or(Status::INVALID_VALUE)?);
            Ok(())
        }

        fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Status> {
            let to = address.checked_sub(MIRROR).ok_or(Status::INVALID_VALUE)? as usize;
            let mut all = self.0.lock().expect("no panic");
            all.get_mut(to..to + bytes.len()).ok_or(Status::INVALID_VALUE)?.copy_from_slice(bytes);
            Ok(())
        }

        fn patch(&self, words: &[WordPatch]) -> Result<(), Status> {
            words.iter().try_for_each(|patch| {
                let mut word = [0; 8];
                self.read(patch.address, &mut word)?;
                self.write(patch.address, &patch.apply(u64::from_le_bytes(word)).to_le_bytes())
            })
        }

        fn watches(&self) -> &Watches {
            &self.1
        }

        fn fail_device(&self, _number: u32, _status: Status) {}
    }

    fn express(client: Arc<dyn Client>, beside: Arc<dyn Beside>) -> Express {
        Express { client, beside, directs: Directs::double() }
    }

    #[test]
    fn a_later_command_releases_the_blocked_one() {
        let (mut peer, mut queue, client) = Peer::new();
        let context = ContextId(0);
        let waits = peer.mark();
        let ahead = Ahead::new(&mut queue, express(client, Arc::<Bytes>::default()));
        std::thread::scope(|scope| {
            let _ending = ahead.ending();
            let mut body = Vec::new();
            let first = ahead.source().next(&mut body, &mut || {}).expect("a session").expect("a command");
            assert_eq!((first.0.seq, first.1), (waits, false));
            ahead.lend(scope);
            // The watcher has checked several times and found nothing.
            std::thread::sleep(5 * TICK);
            let between = peer.mark();
            peer.send(&HostWrite { context, address: MIRROR + 8, bytes: &[5, 6] });
            peer.send(&HostPatch {
                context,
                words: vec![WordPatch { address: MIRROR, mask: 255, value: 9 }],
            });
            // Outside the mirror, so it is left to the dispatcher.
            let wrong = peer.send(&HostWrite { context, address: MIRROR + 15, bytes: &[1, 2] });
            let read = peer.send(&HostRead { context, address: MIRROR, len: 16 });
            let (seq, payload) = peer.answers.recv_timeout(LONG).expect("an answer");
            assert_eq!(seq, read);
            assert_eq!(payload[4..], [9, 0, 0, 0, 0, 0, 0, 0, 5, 6, 0, 0, 0, 0, 0, 0]);
            // Every command is returned in order, including those executed already.
            let mut source = ahead.source();
            for seq in waits + 1..=peer.seq {
                let (record, served) =
                    source.next(&mut body, &mut || {}).expect("a session").expect("a command");
                assert_eq!((record.seq, served), (seq, ![between, wrong].contains(&seq)));
            }
            drop(peer);
            assert_eq!(source.next(&mut body, &mut || {}), Ok(None));
        });
    }

    #[test]
    fn a_write_to_a_mirror_is_not_overtaken() {
        let (mut peer, mut queue, client) = Peer::new();
        peer.send(&HostWrite { context: ContextId(0), address: MIRROR, bytes: &[5] });
        peer.mark();
        let ahead = Ahead::new(&mut queue, express(client, Arc::<Bytes>::default()));
        let mut body = Vec::new();
        let needed = [(); 2].map(|()| {
            let next = ahead.source().next(&mut body, &mut || {}).expect("a session").expect("a command");
            ahead.is_needed(&next.0)
        });
        assert_eq!(needed, [false, true]);
    }

    #[test]
    fn what_the_dispatcher_does_not_execute_again_takes_no_room() {
        let (mut peer, mut queue, client) = Peer::new();
        let context = ContextId(0);
        peer.mark();
        let ahead = Ahead::new(&mut queue, express(client, Arc::<Zeros>::default()));
        std::thread::scope(|scope| {
            let _ending = ahead.ending();
            let mut body = Vec::new();
            let first = ahead.source().next(&mut body, &mut || {}).expect("a session").expect("a command");
            assert_eq!((first.0.seq, first.1), (1, false));
            ahead.lend(scope);
            let bytes = &[0; 8 << 10];
            let writes = MAX_BYTES / bytes.len() + 10;
            (0..writes).for_each(|_| _ = peer.send(&HostWrite { context, address: MIRROR, bytes }));
            let read = peer.send(&HostRead { context, address: MIRROR, len: 16 });
            let (seq, _) = peer.answers.recv_timeout(LONG).expect("an answer");
            assert_eq!(seq, read);
            let source = ahead.source();
            assert!(source.ahead.len() == writes + 1 && source.bytes < MAX_BYTES / 8);
        });
    }

    #[test]
    fn commands_keep_their_order_whether_read_ahead_or_not() {
        let (mut peer, mut queue, client) = Peer::new();
        let mut turns = 0;
        let ahead = Ahead::new(&mut queue, express(client, Arc::<Bytes>::default()));
        std::thread::scope(|scope| {
            let _ending = ahead.ending();
            scope.spawn(move || {
                for n in 0..2000 {
                    peer.mark();
                    if n % 500 == 499 {
                        peer.send(&HostWrite { context: ContextId(0), address: MIRROR, bytes: &[1] });
                        std::thread::sleep(3 * TICK);
                    }
                }
            });
            let (mut body, mut last) = (Vec::new(), 0);
            loop {
                let Ok(Some((record, _))) = ahead.source().next(&mut body, &mut || {}) else { break };
                assert_eq!(record.seq, last + 1);
                last = record.seq;
                ahead.lend(scope);
                turns += 1;
                if turns % 400 == 0 {
                    // The dispatcher is blocked in this one.
                    std::thread::sleep(5 * TICK);
                }
            }
            assert_eq!(last, 2004);
        });
    }
}
