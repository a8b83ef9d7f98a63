//! `Out` data: what commands expect from the server.

use std::collections::HashMap;

use super::end::EndReason;
use super::regions::{Awaited, ClientMemory, Span};

/// `Out` data of one command.
#[derive(Debug)]
struct Expected<M: ClientMemory> {
    /// Which piece of data, and where it goes. Nearly always one; `more` holds the others.
    first: (u32, Awaited<M>),
    more: Vec<(u32, Awaited<M>)>,
    /// Bytes of the chunks that come or have come, and how many of them are here.
    announced: u64,
    received: u64,
    total: u64,
}

impl<M: ClientMemory> Expected<M> {
    /// Counts `len` more bytes that come, if there are so many more to come.
    fn announce(&mut self, len: u64) -> bool {
        let room = len <= self.total - self.announced;
        self.announced += if room { len } else { 0 };
        room
    }
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

    /// Expects a piece of command `seq`'s data.
    pub(super) fn expect(&mut self, seq: u64, piece: u32, span: Awaited<M>) {
        let len = span.span().len();
        self.bytes += len;
        match self.commands.get_mut(&seq) {
            Some(expected) => {
                expected.more.push((piece, span));
                expected.total += len;
            }
            None => {
                let (first, more) = ((piece, span), Vec::new());
                self.commands.insert(seq, Expected { first, more, announced: 0, received: 0, total: len });
            }
        }
    }

    /// Where `len` bytes from `offset` of that piece go, which come now. A server that announces more than
    /// the command expects is refused before any of it comes: by then the command might be settled, and its
    /// memory in use for something else.
    pub(super) fn target(
        &mut self,
        seq: u64,
        piece: u32,
        offset: u64,
        len: u64,
    ) -> Result<Span<M>, EndReason> {
        let wrong = |what| {
            EndReason::Server(format!("it sent {len} bytes of data for command {seq}, piece {piece}, {what}"))
        };
        let expected = self.commands.get_mut(&seq).ok_or_else(|| wrong("which expects none"))?;
        let span = std::iter::once(&expected.first)
            .chain(&expected.more)
            .find_map(|(number, awaited)| (*number == piece).then(|| awaited.span()))
            .ok_or_else(|| wrong("which the command does not have"))?;
        let span = span.part(offset, len).ok_or_else(|| wrong("beyond its end"))?;
        if expected.announce(len) { Ok(span) } else { Err(wrong("more than the command expects")) }
    }

    /// Says that `len` bytes for command `seq` are in the client's memory, where the server wrote them by
    /// itself.
    pub(super) fn came(&mut self, seq: u64, len: u64) -> Result<(), EndReason> {
        if let Some(expected) = self.commands.get_mut(&seq) {
            expected.announce(len);
        }
        self.received(seq, len)
    }

    /// Says that `len` bytes for command `seq` are in the client's memory, where [`target`](Self::target)
    /// said.
    pub(super) fn received(&mut self, seq: u64, len: u64) -> Result<(), EndReason> {
        let wrong = |what: &str| {
            EndReason::Server(format!("it sent {len} bytes of data for command {seq}, which expects {what}"))
        };
        let expected = self.commands.get_mut(&seq).ok_or_else(|| wrong("none"))?;
        let Expected { announced, received, total, .. } = *expected;
        if len > announced - received {
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
        let Some(&Expected { announced, received, total, .. }) = self.commands.get(&seq) else {
            return Err(wrong("which expects none".into()));
        };
        if bytes > total || announced > bytes {
            return Err(wrong(format!("which expects {total} and of which {announced} come or have come")));
        }
        if received < bytes {
            return Ok(false);
        }
        self.bytes -= total - received;
        self.commands.remove(&seq);
        Ok(true)
    }
}
