//! The servers of a virtual machine, or of the programs of this host: which ones there are, and which one a channel is for.
//!
//! A program has one channel for each of its servers. Its header names the server by its place in the configured list, or, for programs of this host that were started with
//! `RGPU_SERVERS`, by its address. Nobody can have this host connect to an address that its configuration does not name.

use std::fmt;
use std::str::FromStr;

use host_bridge::bridge::{ChannelMemory, SessionConfig};
use host_bridge::framing::{Address, AddressError};
use identity::Secret;
use protocol::channel::MAX_SERVERS;
use protocol::link::MAX_DEVICE_LIST;
use thiserror::Error;

use crate::refusal::{Refusal, invalid};

/// A server as a configuration or a user names it: an address, and the devices to use there, or a lease of some.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its address.
    pub address: Address,
    /// Numbers of its devices, in the order in which programs see them. Empty: those that the server gives.
    pub devices: Vec<u8>,
    /// The key of the lease under which to use it, if any.
    pub lease: Option<Secret>,
}

/// Why a text names no server.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ServerError {
    /// It has no address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Its list of devices is wrong.
    #[error(
        "{0:?}: the devices behind the last \"/\" are numbers below 255, separated by commas, none twice, at most {MAX_DEVICE_LIST}"
    )]
    Devices(String),
    /// What is behind its "#" is no lease's key. The text is not repeated, because part of a key may be in it.
    #[error("what follows \"#\" is the key of a lease, 64 hexadecimal digits, as rgpuctl lease prints it")]
    Lease,
}

impl FromStr for Server {
    type Err = ServerError;

    /// `ADDRESS` or `ADDRESS/DEVICE,DEVICE…`, and then perhaps `#LEASE`.
    fn from_str(text: &str) -> Result<Server, ServerError> {
        let (text, lease) = match text.rsplit_once('#') {
            Some((text, key)) => (text, Some(Secret::from_text(key).ok_or(ServerError::Lease)?)),
            None => (text, None),
        };
        let is_list = |list: &str| !list.is_empty() && list.chars().all(|c| c.is_ascii_digit() || c == ',');
        let (address, list) = match text.rsplit_once('/') {
            Some((address, list)) if is_list(list) => (address, list),
            _ => return Ok(Server { address: text.parse()?, devices: Vec::new(), lease }),
        };
        let wrong = || ServerError::Devices(text.to_owned());
        let mut devices = Vec::new();
        for number in list.split(',') {
            let number = number.parse().ok().filter(|number| *number < u8::MAX).ok_or_else(wrong)?;
            if devices.contains(&number) || devices.len() == MAX_DEVICE_LIST {
                return Err(wrong());
            }
            devices.push(number);
        }
        Ok(Server { address: address.parse()?, devices, lease })
    }
}

impl fmt::Display for Server {
    /// Without the lease's key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        let numbers: Vec<String> = self.devices.iter().map(u8::to_string).collect();
        if numbers.is_empty() { Ok(()) } else { write!(f, "/{}", numbers.join(",")) }
    }
}

/// How sessions with each server are opened. There is at least one.
#[derive(Debug, Clone)]
pub struct Servers {
    /// First those that every program gets, then those that programs may name.
    all: Vec<SessionConfig>,
    offered: usize,
}

impl Servers {
    /// Servers that every program gets, the first of them apart, and others that programs may name.
    pub fn new(first: SessionConfig, more: Vec<SessionConfig>, to_name: Vec<SessionConfig>) -> Servers {
        let offered = 1 + more.len();
        Servers { all: std::iter::once(first).chain(more).chain(to_name).collect(), offered }
    }

    /// The first one.
    pub fn first(&self) -> &SessionConfig {
        &self.all[0]
    }

    /// All of them. Their places here are what the keeper and a device process call them by.
    pub fn all(&self) -> &[SessionConfig] {
        &self.all
    }

    /// The same, to be changed.
    pub fn all_mut(&mut self) -> &mut [SessionConfig] {
        &mut self.all
    }

    /// The server that a channel is for, and its place in [`all`](Self::all). Tells the client how many servers there are.
    ///
    /// # Errors
    /// If there is none such, or if this client may not name it.
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

/// The most servers that a list in the configuration has.
pub const MOST: usize = MAX_SERVERS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_an_address_and_its_devices() {
        let parse = |text: &str| text.parse::<Server>().map(|server| (server.to_string(), server.devices));
        assert_eq!(parse("gpu1"), Ok(("tcp:gpu1:9700".to_owned(), vec![])));
        assert_eq!(parse("gpu2:9701/2,0"), Ok(("tcp:gpu2:9701/2,0".to_owned(), vec![2, 0])));
        assert_eq!(
            parse("unix:/run/rgpu/server.sock"),
            Ok(("unix:/run/rgpu/server.sock".to_owned(), vec![]))
        );
        assert_eq!(parse("unix:/run/server.sock/1"), Ok(("unix:/run/server.sock/1".to_owned(), vec![1])));
        for wrong in ["gpu1/0,0", "gpu1/255", "gpu1/0,", "gpu1/,", "gpu1/999"] {
            assert!(matches!(parse(wrong), Err(ServerError::Devices(_))), "{wrong}");
        }
        assert!(matches!(parse("gpu1/x"), Err(ServerError::Address(_))));
        // A key is kept, and not shown.
        let leased: Server = format!("gpu1/2#{}", "0a".repeat(32)).parse().unwrap();
        assert_eq!((leased.to_string(), leased.lease.unwrap().0), ("tcp:gpu1:9700/2".to_owned(), [10; 32]));
        assert!(matches!(parse("gpu1#12"), Err(ServerError::Lease)));
    }
}
