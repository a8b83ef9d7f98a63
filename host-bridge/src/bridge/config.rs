//! How to open sessions: the server, and what carries them.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use identity::{ClientFiles, Secret, Source};
use protocol::link::{MAX_DEVICE_LIST, purpose};
use protocol::polling;

use super::relay::CacheUse;
use crate::compression::CompressUse;
use crate::framing::{self, Address};
use crate::verbs::Settings;

/// Which transport carries a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// The server is on this host and maps the client's memory.
    Local,
    /// Over sockets.
    Tcp,
    /// Over InfiniBand or RoCE.
    Verbs,
}

impl TransportKind {
    /// The usual one for an address.
    pub fn default_for(address: &Address) -> TransportKind {
        match address {
            Address::Unix(_) => TransportKind::Local,
            Address::Tcp(..) => TransportKind::Tcp,
        }
    }

    /// Whether it can reach such an address.
    pub fn reaches(self, address: &Address) -> bool {
        self != TransportKind::Local || matches!(address, Address::Unix(_))
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "local" => Ok(TransportKind::Local),
            "tcp" => Ok(TransportKind::Tcp),
            "verbs" => Ok(TransportKind::Verbs),
            _ => Err(format!("{s:?} is not a transport: local, tcp and verbs are")),
        }
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TransportKind::Local => "local",
            TransportKind::Tcp => "tcp",
            TransportKind::Verbs => "verbs",
        })
    }
}

/// How connections to a server on another machine are protected.
#[derive(Debug, Clone)]
pub enum Security {
    /// By TLS, with the key and the pins that this has.
    Tls(Arc<dyn Source>),
    /// Not at all: everybody on the network can read and change what passes.
    Insecure,
}

impl Security {
    /// Data connections to ask for where nobody says how many. Each connection's data is sealed and opened by
    /// threads of its own, and that takes longer than sending it.
    pub fn usual_data_connections(&self) -> u32 {
        match self {
            Security::Tls(_) => 6,
            Security::Insecure => 4,
        }
    }
}

/// Connects to a session's server for a process that cannot do so itself.
pub trait Connector: std::fmt::Debug + Send + Sync {
    /// A connected socket. `timeout` counts for each address that the server's name has.
    fn connect(&self, timeout: Duration) -> io::Result<OwnedFd>;
}

/// How to open sessions.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// The server.
    pub server: Address,
    /// The devices to ask the server for, by its numbers and in this order. Empty: those that it gives
    /// anyway.
    pub devices: Vec<u8>,
    /// The lease under which to open sessions, if any.
    pub lease: Option<Secret>,
    /// What connects to it. `None`: this process.
    pub connector: Option<Arc<dyn Connector>>,
    /// What carries the session.
    pub transport: TransportKind,
    /// How connections to other machines are protected. Those to a server of this host need no protection.
    pub security: Security,
    /// Name of the virtual machine or host, for display.
    pub client: String,
    /// Longest time to poll for work before sleeping.
    pub poll: Duration,
    /// Data connections to ask for.
    pub data_connections: u32,
    /// Whether each data connection gets threads of its own for long chunks of data (transport `tcp`).
    pub io_threads: bool,
    /// Longest time to wait for a connection.
    pub connect_timeout: Duration,
    /// Longest time, after that, that the server may be silent before its welcome. A server that lets the
    /// session wait its turn says so again and again.
    pub handshake_timeout: Duration,
    /// A server silent for longer is lost.
    pub silence: Duration,
    /// A server that keeps the session without connections, and is silent for longer, is asked for new ones
    /// (transport `tcp`).
    pub link_silence: Duration,
    /// How long a client tries again if the server's daemon has ended: one that has heard nothing yet, and
    /// one that was told to wait in the server's queue.
    pub again_within: [Duration; 2],
    /// The most bytes that one session may register; 0: no limit.
    pub max_registered: u64,
    /// The most regions that one session may register.
    pub max_regions: usize,
    /// How to use verbs, for that transport.
    pub verbs: Settings,
    /// When the server's cache is used (transport `tcp`).
    pub cache: CacheUse,
    /// When data to the server is compressed, and whether data from it may be (transport `tcp`).
    pub compress: CompressUse,
    /// Held by the session, and after its end until the server knows of that or would have dropped the
    /// session anyway.
    pub until_told: Option<Arc<dyn Any + Send + Sync>>,
}

impl SessionConfig {
    /// Where credentials for the server come from, if its connections are protected.
    pub fn source(&self) -> Option<&Arc<dyn Source>> {
        match (&self.server, &self.security) {
            (Address::Tcp(..), Security::Tls(source)) => Some(source),
            (Address::Unix(_), _) | (_, Security::Insecure) => None,
        }
    }

    /// The lease's key, as a hello that opens a session has it.
    pub(super) fn lease_key(&self, purpose: u32) -> [u8; 32] {
        self.lease.filter(|_| opens_session(purpose)).map_or([0; 32], |key| key.0)
    }

    /// The devices to ask for, as a hello that opens a session names them.
    pub(super) fn device_list(&self, purpose: u32) -> [u8; MAX_DEVICE_LIST] {
        let mut list = [0; MAX_DEVICE_LIST];
        if opens_session(purpose) {
            for (place, device) in list.iter_mut().zip(&self.devices) {
                *place = device.saturating_add(1);
            }
        }
        list
    }

    /// Connects to the server. `timeout` counts for each address that its name has.
    pub(super) fn dial(&self, timeout: Duration) -> io::Result<OwnedFd> {
        match &self.connector {
            Some(connector) => connector.connect(timeout),
            None => framing::connect(&self.server, timeout),
        }
    }

    /// The usual settings for a server.
    pub fn new(server: Address, client: &str) -> SessionConfig {
        SessionConfig {
            transport: TransportKind::default_for(&server),
            devices: Vec::new(),
            lease: None,
            connector: None,
            security: Security::Tls(Arc::new(ClientFiles::of_machine())),
            server,
            client: client.to_owned(),
            poll: polling::RELAY.here(),
            data_connections: 4,
            io_threads: polling::processors() >= polling::SPARE,
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(15),
            silence: Duration::from_secs(10),
            link_silence: Duration::from_secs(2),
            again_within: [3, 30].map(Duration::from_secs),
            max_registered: 0,
            max_regions: 65536,
            verbs: Settings::default(),
            cache: CacheUse::Slow,
            compress: CompressUse::Auto,
            until_told: None,
        }
    }
}

fn opens_session(purpose: u32) -> bool {
    matches!(purpose, purpose::CONTROL | purpose::LOCAL | purpose::VERBS)
}
