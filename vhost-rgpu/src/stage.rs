//! How far a channel's session has come, as it is stored for the next device process.

use host_bridge::bridge::{Saved, SessionConfig};

/// Marks the number of the server of a channel that waits. (A process of a version without the mark takes
/// such a number for a server that it does not have.)
const WAITS: u64 = 1 << 63;

/// How far a channel's session has come.
#[derive(Debug, Clone, Copy)]
pub enum Stage<'s> {
    /// No server has begun it. Its program may have been told to wait, so the next process asks again.
    Waits,
    /// It has begun. Without what was saved of it, it ends with this process.
    Began(Option<&'s Saved>),
}

impl<'s> Stage<'s> {
    /// What is stored of it and of the server's index in the configuration.
    pub fn word(self, server: usize) -> u64 {
        server as u64 | if matches!(self, Stage::Waits) { WAITS } else { 0 }
    }

    /// What was saved of the session.
    pub fn saved(self) -> Option<&'s Saved> {
        match self {
            Stage::Waits => None,
            Stage::Began(saved) => saved,
        }
    }
}

/// The server whose index was stored in a [word](Stage::word), and whether the channel waits. `None`: there
/// is no such server.
pub fn stored_server(word: u64, servers: &[SessionConfig]) -> Option<(SessionConfig, bool)> {
    let index = usize::try_from(word & !WAITS).ok()?;
    Some((servers.get(index)?.clone(), word & WAITS != 0))
}
