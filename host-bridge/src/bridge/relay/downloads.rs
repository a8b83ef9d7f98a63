//! `Out` data: what commands expect from the server.

use std::collections::HashMap;

use super::end::EndReason;
use super::regions::{Awaited, ClientMemory, MemoryKey, Span};

/// `Out` data of one command.
#[derive(Debug)]
struct Expected<M: ClientMemory> {
    /// Which piece of data, and where it goes. Nearly always one; `more` holds the others.
    first: (u32, Awaited<M>),
    more: Vec<(u32, Awaited<M>)>,
    received: u64,
    total: u64,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Downloads<M: ClientMemory> {
    commands: HashMap<u64, Expected<M>>,
    /// Bytes that have not come yet, if the server sends all that commands name.
    bytes: u64,
}

impl<M: ClientMemory> Downloads<M> {
    pub(super) fn new() -> Downloads<M> {
        Downloads { commands: HashMap::new(), bytes: 0 }
    }

    /// Number of commands that expect data.
    pub(super) fn commands(&self) -> usize {
        self.commands.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Expects a piece of command `seq`'s data, which the server may write from now on. Gives a key for it
    /// that the server must be told before the command.
    pub(super) fn expect(
        &mut self,
        seq: u64,
        piece: u32,
        span: Span<M>,
    ) -> Result<Option<MemoryKey>, EndReason> {
        let len = span.len();
        let (span, key) = Awaited::new(span)?;
        self.bytes += len;
        match self.commands.get_mut(&seq) {
            Some(expected) => {
                expected.more.push((piece, span));
                expected.total += len;
            }
            None => {
                let expected = Expected { first: (piece, span), more: Vec::new(), received: 0, total: len };
                self.commands.insert(seq, expected);
            }
        }
        Ok(key)
    }

    /// Where `len` bytes from `offset` of that piece go.
    pub(super) fn target(&self, seq: u64, piece: u32, offset: u64, len: u64) -> Result<Span<M>, EndReason> {
        let wrong = |what| {
            EndReason::Server(format!("it sent {len} bytes of data for command {seq}, piece {piece}, {what}"))
        };
        let expected = self.commands.get(&seq).ok_or_else(|| wrong("which expects none"))?;
        let span = std::iter::once(&expected.first)
            .chain(&expected.more)
            .find_map(|(number, awaited)| (*number == piece).then(|| awaited.span()))
            .ok_or_else(|| wrong("which the command does not have"))?;
        span.part(offset, len).ok_or_else(|| wrong("beyond its end"))
    }

    /// Says that `len` bytes for command `seq` are in the client's memory.
    pub(super) fn received(&mut self, seq: u64, len: u64) -> Result<(), EndReason> {
        let wrong = |what: &str| {
            EndReason::Server(format!("it sent {len} bytes of data for command {seq}, which expects {what}"))
        };
        let expected = self.commands.get_mut(&seq).ok_or_else(|| wrong("none"))?;
        let Expected { received, total, .. } = *expected;
        if len > total - received {
            return Err(wrong(&format!("{total} and has got {received}")));
        }
        expected.received += len;
        self.bytes -= len;
        Ok(())
    }

    /// Acts on the server's word that it has sent `bytes` bytes for `seq` in all. True: they are all here,
    /// and the command is forgotten.
    pub(super) fn settle(&mut self, seq: u64, bytes: u64) -> Result<bool, EndReason> {
        let wrong = |what: String| {
            EndReason::Server(format!(
                "it says that {bytes} bytes of data of command {seq} were sent, {what}"
            ))
        };
        let Some(Expected { received, total, .. }) = self.commands.get(&seq) else {
            return Err(wrong("which expects none".into()));
        };
        if bytes > *total || *received > bytes {
            return Err(wrong(format!("which expects {total} and has got {received}")));
        }
        if *received < bytes {
            return Ok(false);
        }
        self.bytes -= *total - *received;
        self.commands.remove(&seq);
        Ok(true)
    }
}
