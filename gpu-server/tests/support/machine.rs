//! Machines of clients.

use std::sync::Arc;

use host_bridge::bridge::{Security, SessionConfig, join};
use host_bridge::framing::{Address, with_causes};
use identity::{ClientFiles, Credentials, Fingerprint, Identity, Token, servers};
use protocol::ops::device::SessionInfo;
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use serde_json::json;
use test_kit::arena;
use test_kit::session::Client;

use super::Server;

/// The machine of a client: its identity folder.
pub struct Machine {
    /// Its identity folder.
    pub folder: tempfile::TempDir,
}

impl Machine {
    /// A machine that has joined no server.
    pub fn new() -> Machine {
        Machine { folder: tempfile::tempdir().unwrap() }
    }

    /// Its key, created if there is none.
    pub fn identity(&self) -> Identity {
        Identity::load_or_create(self.folder.path()).unwrap()
    }

    /// What `rgpuctl join` does.
    pub fn join(&self, server: &Server, token: &Token) -> Result<String, String> {
        let credentials = Credentials::pinning(self.identity(), token.server).unwrap();
        let name = join(&address(server.port), &credentials, &token.secret).map_err(|e| with_causes(&e))?;
        self.pin(server.port, token.server);
        Ok(name)
    }

    /// Trusts the server at this port if it has this key.
    pub fn pin(&self, port: u16, key: Fingerprint) {
        servers::add(self.folder.path(), &[address(port).to_string()], key, "").unwrap();
    }

    /// How it opens sessions through this port.
    pub fn config(&self, port: u16) -> SessionConfig {
        let files = ClientFiles { folder: self.folder.path().to_owned() };
        SessionConfig {
            security: Security::Tls(Arc::new(files)),
            ..SessionConfig::new(address(port), "a liar")
        }
    }

    /// Opens a session, or returns why there is none.
    pub fn try_connect(&self, port: u16) -> Result<Client, String> {
        Client::try_connect(&self.config(port)).map_err(|e| with_causes(&e))
    }
}

/// The address of a port of this host.
pub fn address(port: u16) -> Address {
    Address::Tcp("127.0.0.1".into(), port)
}

/// What `rgpuctl enroll` does.
pub fn enroll(server: &Server, name: &str) -> Token {
    let answer = server.ask(json!({ "enroll": { "name": name, "valid_seconds": 3600 } }));
    answer["token"].as_str().unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
}

/// A machine that the server knows by this name.
pub fn joined(server: &Server, name: &str) -> Machine {
    let machine = Machine::new();
    assert_eq!(machine.join(server, &enroll(server, name)).unwrap(), name);
    machine
}

/// Makes a call, and copies data to the device and back.
pub fn works(client: &mut Client) {
    client.push(&SessionInfo {}, 0);
    assert!(client.answer(0).0.status.ok().is_ok());
    client.push(&MemGrow { device: 0, address: window(0), size: 4 << 20 }, 0);
    assert!(client.answer(0).0.status.ok().is_ok());
    client.push(&MemAlloc { address: window(0), size: 4 << 20 }, protocol::channel::NO_SLOT);
    let bytes: Vec<u8> = (0..1_500_000u32).map(|n| (n.wrapping_mul(97) >> 5) as u8).collect();
    client.write_arena(0, &bytes);
    client.htod(window(0), arena(0, bytes.len() as u64));
    client.dtoh(window(0), arena(2 << 20, bytes.len() as u64));
    client.synchronize();
    assert!(client.read_arena(2 << 20, bytes.len() as u64) == bytes);
}
