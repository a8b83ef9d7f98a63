//! A data connection's compressor: a thread that compresses its next chunk while others are being sent.
//!
//! [`Compression`] says which chunk, and whether it has paid. The thread copies the chunk first, since a
//! client may write its memory meanwhile, and leaves the compressed bytes in the connection's [`Room`].
//! Nothing of it needs the connection, so it goes on when that is lost.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::io_thread::{Alarm, IoThread};
use super::memory::{SocketMemory, copy};
use crate::bridge::relay::{Chunk, Compressed, Room, Sent};
use crate::bridge::state::thread_name;
use crate::compression::{CompressUse, Compression, SAMPLE, Trial, compress};

/// A chunk that may be compressed.
#[derive(Debug)]
struct Task {
    chunk: Chunk<SocketMemory>,
    trial: Trial,
    room: Arc<Room>,
    /// What came of it: whether it pays, and where the bytes are, if they had a place.
    paid: bool,
    bytes: Option<Arc<Compressed>>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Compressor {
    /// From the first trial on.
    thread: Option<IoThread<Task>>,
    /// What the thread raises when it is done with a chunk.
    alarm: Arc<Alarm>,
    rule: Compression,
    room: Arc<Room>,
}

/// What the thread works with.
#[derive(Debug, Default)]
struct Buffers {
    plain: Vec<u8>,
    compressed: Vec<u8>,
}

impl Buffers {
    /// Compresses the first `len` bytes of a chunk. Gives how many it made of them, if that pays.
    fn compress(&mut self, task: &mut Task, len: u64) -> Option<usize> {
        let begun = Instant::now();
        let Buffers { plain, compressed } = self;
        plain.resize(len as usize, 0);
        if !copy(&task.chunk.span, task.chunk.at, plain) {
            return None;
        }
        compress(&mut task.trial, plain, compressed, begun)
    }

    fn work(&mut self, task: &mut Task) {
        let len = u64::from(task.chunk.len);
        if len > SAMPLE && self.compress(task, SAMPLE).is_none() {
            return;
        }
        if let Some(made) = self.compress(task, len) {
            task.paid = true;
            task.bytes = task.room.keep(&self.compressed[..made]);
        }
    }
}

impl Compressor {
    /// One that raises the alarm when it is done with a chunk.
    pub(super) fn new(when: CompressUse, room: &Arc<Room>, alarm: &Arc<Alarm>) -> Compressor {
        let (room, alarm) = (Arc::clone(room), Arc::clone(alarm));
        Compressor { thread: None, alarm, rule: Compression::new(when), room }
    }

    /// Whether it has a chunk. It has one at a time.
    pub(super) fn is_busy(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| thread.held() > 0)
    }

    /// Whether a chunk of `len` bytes had better wait until the server has some of what was compressed.
    pub(super) fn is_full(&self, len: u64) -> bool {
        len >= SAMPLE && self.rule.is_on() && !self.room.has_place(len)
    }

    /// Whether a chunk of `len` bytes is to be given to it, over a link that carries so many bytes a second.
    pub(super) fn tries(&mut self, len: u64, link: Option<u64>) -> Option<Trial> {
        self.rule.tries(len, link)
    }

    /// Gives it a chunk. Fails if its thread cannot be started.
    pub(super) fn give(&mut self, chunk: Chunk<SocketMemory>, trial: Trial) -> io::Result<()> {
        let thread = match &mut self.thread {
            Some(thread) => thread,
            none => none.insert(start(&self.alarm)?),
        };
        thread.give(Task { chunk, trial, room: Arc::clone(&self.room), paid: false, bytes: None });
        Ok(())
    }

    /// What is to be sent of the chunk that it was given, once that is known.
    pub(super) fn take(&mut self) -> Option<Sent<SocketMemory>> {
        let (Task { chunk, trial, paid, bytes, .. }, _) = self.thread.as_ref()?.take()?;
        self.rule.tried(&trial, chunk.len.into(), paid);
        Some(match bytes {
            Some(bytes) => Sent::Compressed(chunk, bytes),
            None => Sent::Chunk(chunk),
        })
    }

    /// Waits until it reads nothing of the client's memory.
    pub(super) fn wait_for_rest(&self) {
        self.thread.iter().for_each(IoThread::wait_for_rest);
    }
}

fn start(alarm: &Arc<Alarm>) -> io::Result<IoThread<Task>> {
    let buffers = RefCell::new(Buffers::default());
    let work = move |task: &mut Task| {
        buffers.borrow_mut().work(task);
        Ok(())
    };
    let raised = Arc::clone(alarm);
    IoThread::start(thread_name("compress"), work, move || raised.raise())
}
