//! A native client that breaks the rules: it writes the channel's memory directly, word by word.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use host_bridge::memory::ChannelView;
use protocol::Status;
use protocol::channel::{Geometry, HeaderFields, NO_SLOT, State};
use protocol::device::Answer;
use protocol::ops::{Class, Op, SyncOp, decode_reply, encode};
use test_kit::channel::{in_a_file, word, write_record};
use test_kit::native_client::{NativeClient, create_channel};
use zerocopy::IntoBytes;

use super::PATIENCE;

/// Bytes of the arena.
const ARENA: usize = 4 << 20;

/// A client with a channel.
pub struct Client {
    pub connection: NativeClient,
    pub doorbell: OwnedFd,
    pub geometry: Geometry,
    view: ChannelView,
    tail: u64,
    seq: u64,
}

impl Client {
    /// Connects with an ordinary channel and 4 MiB of arena.
    pub fn connect(socket: &Path, program: &str) -> Result<Self> {
        let fields = Geometry::with_arena(ARENA).fields(7, program);
        let (client, answer, reason) = Self::try_connect(socket, ARENA, &fields)?;
        client.with_context(|| format!("{answer:?}: {reason}"))
    }

    /// Connects with a channel for `arena` bytes of arena and any header. Also returns the answer and its
    /// reason.
    pub fn try_connect(
        socket: &Path,
        arena: usize,
        fields: &HeaderFields,
    ) -> Result<(Option<Self>, Answer, String)> {
        let (file, view) = in_a_file(arena, "hostile");
        let geometry = *view.geometry();
        view.header().write_fields(fields);
        let connection = NativeClient::connect(socket)?;
        connection.send(create_channel(geometry.size as u64).as_bytes(), &[&file])?;
        let (answer, reason, mut fds) = connection.response()?.context("the daemon closed the connection")?;
        let client = fds.pop().map(|doorbell| Self { connection, doorbell, geometry, view, tail: 0, seq: 0 });
        Ok((client, answer, reason))
    }

    /// A word of the channel, at a multiple of 8.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        word(&self.view, offset)
    }

    /// Sets the ring's tail and rings the doorbell.
    pub fn set_tail(&mut self, tail: u64) -> Result<()> {
        self.tail = tail;
        self.word(0x100).store(tail, Ordering::Release);
        Ok(self.ring()?)
    }

    /// Rings the doorbell, whether or not the other side sleeps.
    pub fn ring(&self) -> io::Result<()> {
        nix::unistd::write(&self.doorbell, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Writes a record exactly as given, publishes `advance` bytes, and rings.
    pub fn raw(
        &mut self,
        size: u32,
        opcode: u16,
        slot: u16,
        seq: u64,
        body: &[u8],
        advance: u64,
    ) -> Result<()> {
        let tail = write_record(&self.view, self.tail, (size, opcode, slot, seq), body, advance);
        self.set_tail(tail)
    }

    /// Appends a whole record with the right `seq`.
    pub fn record(&mut self, opcode: u16, slot: u16, body: &[u8]) -> Result<()> {
        self.seq += 1;
        let size = (16 + body.len()).next_multiple_of(16) as u32;
        self.raw(size, opcode, slot, self.seq, body, size.into())
    }

    /// Appends an operation.
    pub fn push<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> Result<()> {
        let mut body = Vec::new();
        encode(op, &mut body);
        if let (Class::Sync, Some(slot)) = (T::INFO.class, self.view.slot(slot)) {
            slot.prepare();
        }
        self.record(T::INFO.opcode, slot, &body)
    }

    /// Appends an operation that is not answered.
    pub fn tell<'a, T: Op<'a>>(&mut self, op: &T) -> Result<()> {
        self.push(op, NO_SLOT)
    }

    /// Appends an operation and waits for its answer in slot 0.
    pub fn call<'a, T: SyncOp<'a>>(&mut self, op: &T) -> Result<std::result::Result<T::Reply, Status>> {
        self.push(op, 0)?;
        let deadline = Instant::now() + PATIENCE;
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = self.view.slot(0).and_then(|slot| slot.poll(&mut payload)) {
                if !completion.status.is_success() {
                    return Ok(Err(completion.status));
                }
                return Ok(Ok(decode_reply::<T::Reply>(&payload)?));
            }
            ensure!(Instant::now() < deadline, "no answer; the session: {:?}", self.reason());
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Takes the context's error, if there is one.
    pub fn take_error(&self, context: usize) -> Option<Status> {
        let word = self.word(self.geometry.progress_offset + 0x40 + 16 * context);
        let status = word.load(Ordering::Acquire) as u32;
        // SAFETY: the lower half of an aligned word of the channel. Only the status is cleared, as a library
        // does.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }.store(0, Ordering::Release);
        (status != 0).then_some(Status(status))
    }

    /// Writes the arena.
    pub fn write_arena(&self, bytes: &[u8]) {
        for (at, word) in bytes.chunks(8).enumerate() {
            let mut le = [0; 8];
            le[..word.len()].copy_from_slice(word);
            self.word(self.geometry.arena_offset + at * 8).store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
    }

    /// Reads the arena.
    pub fn read_arena(&self, len: usize) -> Vec<u8> {
        let word = |at| self.word(self.geometry.arena_offset + at).load(Ordering::Relaxed);
        let mut bytes: Vec<u8> = (0..len).step_by(8).flat_map(|at| word(at).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }

    /// Why the session was lost, if it was.
    pub fn reason(&self) -> Option<String> {
        let header = self.view.header();
        (header.state() == State::Lost).then(|| header.reason())
    }

    /// Waits until the session is lost, and returns the reason.
    pub fn lost(&self) -> Result<String> {
        let mut reason = String::new();
        super::eventually(|| {
            reason = self.reason().context("the session is not lost")?;
            Ok(())
        })?;
        Ok(reason)
    }
}
