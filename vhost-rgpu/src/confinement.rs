//! What a device process may access: its sockets, the memory that a guest or program shares with it, and the
//! RDMA devices for sessions over verbs. Even the connections to its server are made by the keeper
//! ([`KeeperConnects`]), because they belong to the host and the process has no network.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use host_bridge::bridge::{Connector, TransportKind};
use sandbox::{Access, Orders, OtherCalls, Policy, Reach, Report, Sandboxes, Syscalls, Visible};

use crate::config::Config;
use crate::link::{self, Control, ToKeeper, keeper_has_ended};
use crate::memory_file::memory_file;

/// Prepares the sandboxes of a keeper's device processes.
pub fn prepare(config: &Config) -> Sandboxes {
    let traces = std::env::var_os(protocol::trace::VARIABLE).map(PathBuf::from);
    // Traces are written as files of the daemon's user.
    let users = config.sandbox.users.filter(|_| traces.is_none());
    let policy = Policy { users, ..config.sandbox.clone() };
    let verbs = config.sessions().any(|session| session.transport == TransportKind::Verbs);
    let mut visible: Vec<Visible> = Visible::basic_devices().collect();
    visible.extend(traces.map(|folder| Visible::new(folder, Access::Write)));
    if verbs {
        visible.extend(Visible::libraries());
        visible.push(Visible::new("/sys", Access::Read));
        visible.extend(Visible::rdma());
    }
    Sandboxes::new(policy, "vhost-rgpu", Reach { visible, other_calls: OtherCalls::End })
}

/// The system calls that a device process makes.
fn calls(rdma: bool) -> Syscalls {
    // A VMM's connection arrives on a listening socket.
    let list = Syscalls::basic().files().allow(&[libc::SYS_accept, libc::SYS_accept4]);
    if rdma { list.rdma() } else { list }
}

/// Orders or a report, in a sealed file.
pub fn to_file(what: &impl serde::Serialize) -> io::Result<OwnedFd> {
    memory_file(c"sandbox", &serde_json::to_vec(what)?)
}

/// Reads what [`to_file`] wrote, at most 1 MiB of it.
pub fn from_file<T: serde::de::DeserializeOwned>(file: OwnedFd) -> io::Result<T> {
    let mut text = Vec::new();
    io::Seek::rewind(&mut std::fs::File::from(file.try_clone()?))?;
    std::fs::File::from(file).take(1 << 20).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Confines this device process. The error says why it must not serve.
pub fn enter(orders: &Orders) -> Result<Report, String> {
    orders.enter(&calls(orders.has_rdma()))
}

/// Asks the keeper to connect to one of this process's servers.
#[derive(Debug)]
pub struct KeeperConnects {
    /// The connection to the keeper.
    pub control: Arc<Control>,
    /// The server's index in the configuration.
    pub server: usize,
}

impl Connector for KeeperConnects {
    fn connect(&self, timeout: Duration) -> io::Result<OwnedFd> {
        let (ours, reply) = link::pair()?;
        let question = ToKeeper::Connect { server: self.server, timeout, reply };
        self.control.tell_keeper(&question)?;
        // So that a keeper dropping its end without an answer is noticed.
        drop(question);
        Ok(ours.connected()?.unwrap_or_else(|| keeper_has_ended()))
    }
}
