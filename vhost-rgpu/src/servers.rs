//! The servers of a virtual machine or of this host's programs, and which of them a channel is for.
//!
//! A program has one channel for each of its servers. The channel's header names the server by its index in
//! the configured list, or, for programs of this host that were started with `RGPU_SERVERS`, by its address.
//! Nobody can make this host connect to an address that is not in its configuration.

use std::fmt;

use host_bridge::bridge::{ChannelMemory, SessionConfig};
use host_bridge::server::{Server, ServerError};
use protocol::channel::MAX_SERVERS;

use crate::refusal::{Refusal, invalid};

/// How sessions with each server are opened. There is at least one.
#[derive(Debug, Clone)]
pub struct Servers {
    /// First those that every program gets, then those that programs may name.
    all: Vec<SessionConfig>,
    offered: usize,
}

impl Servers {
    /// The servers that every program gets, with the first one separately, and others that programs may name.
    pub fn new(first: SessionConfig, more: Vec<SessionConfig>, to_name: Vec<SessionConfig>) -> Servers {
        let offered = 1 + more.len();
        Servers { all: std::iter::once(first).chain(more).chain(to_name).collect(), offered }
    }

    /// The first one.
    pub fn first(&self) -> &SessionConfig {
        &self.all[0]
    }

    /// All of them. The keeper and device processes refer to servers by their index here.
    pub fn all(&self) -> &[SessionConfig] {
        &self.all
    }

    /// The same, mutable.
    pub fn all_mut(&mut self) -> &mut [SessionConfig] {
        &mut self.all
    }

    /// The server of a channel, and its index in [`all`](Self::all). Tells the client how many servers there
    /// are.
    ///
    /// # Errors
    /// If there is no such server, or this client may not name it.
    pub fn choose(&self, channel: &ChannelMemory) -> Result<(usize, SessionConfig), Refusal> {
        channel.tell_servers(self.offered as u32);
        if channel.asked_server.is_empty() {
            let place = channel.server as usize;
            let found = self.all[..self.offered].get(place).cloned();
            let found = found.map(|session| (place, session));
            return found.ok_or_else(|| {
                invalid(format!("a channel for server {place}, and there are {}", self.offered))
            });
        }
        let asked: Server = channel.asked_server.parse().map_err(|e: ServerError| invalid(e.to_string()))?;
        let allows = |session: &SessionConfig| {
            session.server == asked.address
                && (session.devices.is_empty()
                    || asked.devices.iter().all(|device| session.devices.contains(device)))
        };
        let place = self.all.iter().position(allows).ok_or_else(|| self.not_allowed(&asked))?;
        let mut session = self.all[place].clone();
        if !asked.devices.is_empty() {
            session.devices = asked.devices;
        }
        session.lease = asked.lease.or(session.lease);
        Ok((place, session))
    }

    fn not_allowed(&self, asked: &Server) -> Refusal {
        invalid(format!(
            "RGPU_SERVERS names {asked}; the configuration of vhost-rgpu (server, named_servers) allows {}",
            names(&self.all)
        ))
    }
}

impl fmt::Display for Servers {
    /// The servers that every program gets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&names(&self.all[..self.offered]))
    }
}

fn names(sessions: &[SessionConfig]) -> String {
    let name = |session: &SessionConfig| {
        Server { address: session.server.clone(), devices: session.devices.clone(), lease: None }.to_string()
    };
    sessions.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Maximum number of servers in a list of the configuration.
pub const MOST: usize = MAX_SERVERS;
