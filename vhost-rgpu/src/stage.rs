//! How far a channel's session has come, and with which server, as it is stored for the next device process.
//!
//! That process may have another configuration, so the server is stored by its address. Its index is where it
//! was before.

use host_bridge::bridge::{Saved, SessionConfig};

/// Marks the number of the server of a channel that waits. (A process of a version without the mark takes
/// such a number for a server that it does not have.)
const WAITS: u64 = 1 << 63;
/// Marks that number if the server's address is stored with it. Earlier versions stored none.
const NAMED: u64 = 1 << 62;
/// The longest address that is stored, in bytes.
const MAX_ADDRESS: usize = 1024;
/// The most bytes that are [stored](Stage::stored) besides the number.
pub const MAX_STORED: usize = size_of::<u64>() + MAX_ADDRESS;

/// How far a channel's session has come.
#[derive(Debug, Clone, Copy)]
pub enum Stage<'s> {
    /// No server has begun it. Its program may have been told to wait, so the next process asks again.
    Waits,
    /// It has begun. Without what was saved of it, it ends with this process. A program that has not been
    /// told of it yet gets another one.
    Began(Option<&'s Saved>),
}

impl<'s> Stage<'s> {
    /// What is stored of it and of its server, whose index in the configuration this is: a number, and bytes.
    pub fn stored(self, (index, server): (usize, &SessionConfig)) -> (u64, Vec<u8>) {
        let word = index as u64 | if matches!(self, Stage::Waits) { WAITS } else { 0 };
        let address = server.server.to_string();
        if address.len() > MAX_ADDRESS {
            return (word, Vec::new());
        }
        (word | NAMED, [&(address.len() as u64).to_le_bytes(), address.as_bytes()].concat())
    }

    /// What was saved of the session.
    pub fn saved(self) -> Option<&'s Saved> {
        match self {
            Stage::Waits => None,
            Stage::Began(saved) => saved,
        }
    }
}

/// The server of a stored channel.
#[derive(Debug)]
pub struct StoredServer {
    /// How its sessions are opened. `Err`: its name, if the configuration has it no more.
    pub config: Result<SessionConfig, String>,
    /// Whether the channel waits for its session.
    pub waits: bool,
}

impl StoredServer {
    /// What was [stored](Stage::stored), the bytes at the beginning of `bytes`. Returns the others, too.
    /// `None`: it is malformed.
    pub fn read<'b>(
        word: u64,
        bytes: &'b [u8],
        servers: &[SessionConfig],
    ) -> Option<(StoredServer, &'b [u8])> {
        let index = usize::try_from(word & !(WAITS | NAMED)).ok()?;
        let there = servers.get(index);
        let (config, rest) = if word & NAMED == 0 {
            (there.cloned().ok_or_else(|| format!("server {index}")), bytes)
        } else {
            let (length, rest) = bytes.split_first_chunk()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (address, rest) = rest.split_at_checked(length)?;
            let address = str::from_utf8(address).ok()?;
            // The same server may be there more than once, with other devices.
            let found = there.into_iter().chain(servers).find(|config| config.server.to_string() == address);
            (found.cloned().ok_or_else(|| address.to_owned()), rest)
        };
        Some((StoredServer { config, waits: word & WAITS != 0 }, rest))
    }

    /// How its sessions are opened. The error tells the program why its session is over.
    pub fn config(&self) -> Result<&SessionConfig, String> {
        let gone = |name| format!("the configuration of vhost-rgpu does not name its server {name} any more");
        self.config.as_ref().map_err(gone)
    }

    /// Tells the worker or the server that a session of it is over. A server that the configuration does not
    /// name cannot be told: it finds that nobody comes.
    pub fn end(&self, saved: &Saved) {
        saved.end(self.config.as_ref().ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(addresses: &[&str]) -> Vec<SessionConfig> {
        addresses.iter().map(|address| SessionConfig::new(address.parse().unwrap(), "test")).collect()
    }

    #[test]
    fn a_server_is_found_by_its_address_or_by_its_index_if_an_earlier_version_stored_it() {
        let before = servers(&["tcp:a:1", "tcp:b:1"]);
        let (word, mut bytes) = Stage::Waits.stored((1, &before[1]));
        bytes.extend(b"rest");
        let found = |word, bytes, addresses: &[&str]| {
            let (server, _) = StoredServer::read(word, bytes, &servers(addresses)).unwrap();
            (server.config.map(|config| config.server.to_string()), server.waits)
        };
        assert_eq!(found(word, &bytes, &["tcp:b:1", "tcp:c:1"]), (Ok("tcp:b:1".to_owned()), true));
        assert_eq!(found(word, &bytes, &["tcp:a:1", "tcp:c:1"]), (Err("tcp:b:1".to_owned()), true));
        assert_eq!(StoredServer::read(word, &bytes, &before).unwrap().1, b"rest");
        assert!(StoredServer::read(word, &bytes[..10], &before).is_none());
        assert_eq!(found(1, b"rest", &["tcp:a:1", "tcp:c:1"]), (Ok("tcp:c:1".to_owned()), false));
        assert_eq!(found(1, b"rest", &["tcp:a:1"]), (Err("server 1".to_owned()), false));
    }
}
