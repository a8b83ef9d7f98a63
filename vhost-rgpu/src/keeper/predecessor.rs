//! What one keeper leaves to the next about a VMM's connection.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use handover::{Inherited, Store};
use serde::{Deserialize, Serialize};
use vhost::vhost_user::message::FrontendReq;

use super::kept::{Found, Kept, Renamed, Words};
use super::negotiation::{self, Negotiation};
use super::process::{Owner, Process, Reply};
use super::ties::{self, Tied, Ties};
use crate::link::Stored;

/// Prefix of the names.
const GUEST: &str = "guest-";

/// A VMM's connection in saved form.
#[derive(Default, Serialize, Deserialize)]
pub struct Vmm {
    socket: Option<u64>,
    requests: Option<u64>,
    /// Whether a message of the VMM was taken but not answered.
    busy: bool,
    negotiation: negotiation::Saved,
    ties: Ties,
}

impl Words for Vmm {
    type Step = ties::Step;

    fn numbers(&self) -> Vec<u64> {
        let mut all = Vec::from_iter(self.negotiation.numbers());
        all.extend([self.socket, self.requests].into_iter().flatten());
        all.extend(self.ties.numbers());
        all
    }

    fn step(&mut self, step: ties::Step) -> Renamed {
        self.ties.step(step)
    }
}

impl Tied for Vmm {
    fn ties(&self) -> &Ties {
        &self.ties
    }

    fn ties_mut(&mut self) -> &mut Ties {
        &mut self.ties
    }

    fn tie(step: ties::Step) -> ties::Step {
        step
    }
}

/// A VMM's connection, kept for the next keeper.
#[derive(Debug)]
pub struct Connection {
    /// What is kept of it.
    pub kept: Kept<Vmm>,
}

impl Connection {
    /// A new connection of the virtual machine with this name.
    pub fn new(store: Arc<Store>, name: &str, vmm: &OwnedFd) -> io::Result<Connection> {
        let kept = Kept::<Vmm>::new(store, &format!("{GUEST}{name}"))?;
        let socket = kept.hold(vmm);
        kept.change(|words| words.socket = Some(socket));
        Ok(Connection { kept })
    }

    /// Keeps the memory for requests in progress.
    pub fn requests(&self, memory: &OwnedFd) {
        let number = self.kept.hold(memory);
        self.kept.change(|words| words.requests = Some(number));
    }

    /// Called before a message is taken out of the VMM's socket.
    pub fn begins(&self) {
        self.kept.change(|words| words.busy = true);
    }

    /// Called after the message was answered.
    pub fn done(&self, negotiation: negotiation::Saved) {
        self.kept.change(|words| (words.busy, words.negotiation) = (false, negotiation));
    }

    /// The VMM's socket, the memory for requests in progress, and what was negotiated.
    pub fn restore(&self, found: &Found) -> io::Result<(OwnedFd, OwnedFd, Negotiation)> {
        self.kept.read(|words| {
            if words.busy {
                let why = "it ended while it answered the VMM, and nobody knows whether the answer was sent: start the guest again";
                return Err(io::Error::other(why));
            }
            let get = |number: Option<u64>| found.get(number.unwrap_or(u64::MAX));
            Ok((get(words.socket)?, get(words.requests)?, Negotiation::restore(&words.negotiation, found)?))
        })
    }
}

impl Owner for Connection {
    fn left(&self, _process: &Arc<Process>, _number: u64) {}

    fn gone(&self, _process: &Arc<Process>, _number: u64) {}

    fn over(&self, _process: &Arc<Process>) {
        // The virtual machine's thread watches `Process::ended`.
    }

    fn answer(&self, _process: &Arc<Process>, _answer: Reply) {
        // A guest's answers go through its rings.
    }

    fn stored(&self, _process: &Arc<Process>, channel: u64, stored: Option<&Stored>) {
        self.kept.stored(channel, stored);
    }
}

/// The previous keeper's VMM connection.
#[derive(Debug)]
pub struct Predecessor {
    /// What was kept of it.
    pub connection: Arc<Connection>,
    /// The descriptors.
    pub found: Found,
}

impl Predecessor {
    /// What was kept for the virtual machine with this name, if anything. If its device process has outlived
    /// its keeper, it is killed immediately.
    pub fn find(store: &Arc<Store>, name: &str, inherited: &mut Inherited) -> Option<Predecessor> {
        match Kept::<Vmm>::take_over(store.clone(), &format!("{GUEST}{name}"), inherited) {
            Ok(Some((kept, found))) => {
                kept.kill_device_process(&found);
                Some(Predecessor { connection: Arc::new(Connection { kept }), found })
            }
            Ok(None) => None,
            Err(e) => {
                tracing::error!(
                    "vm {name}: the previous keeper's record cannot be read, so its VMM is disconnected: {e}"
                );
                None
            }
        }
    }

    /// Drops what was kept for virtual machines that nobody serves any more.
    pub fn drop_others(store: &Arc<Store>, inherited: &mut Inherited) {
        for rest in inherited.names(GUEST) {
            if let Some(name) = rest.strip_suffix("-record")
                && let Some(before) = Predecessor::find(store, name, inherited)
            {
                tracing::warn!("vm {name}: not served any more, and its VMM is disconnected");
                before.connection.kept.end();
            }
        }
        // For connections that had ended.
        for rest in inherited.names(GUEST) {
            let name = format!("{GUEST}{rest}");
            drop(inherited.remove(&name));
            store.forget(&name);
        }
    }
}

/// Repeats to a handler of vhost-user messages what a VMM told the previous handler, as far as handlers
/// remember it. `theirs` is the other end of its socket, and `handle` handles one message. Its replies are
/// not read.
pub fn repeat<E: std::error::Error + Send + Sync + 'static>(
    mut theirs: &UnixStream,
    protocol: Option<u64>,
    features: Option<u64>,
    mut handle: impl FnMut() -> Result<(), E>,
) -> io::Result<()> {
    /// The version of the messages in their flags.
    const VERSION: u32 = 1;
    let said = [
        (protocol.is_some() || features.is_some()).then_some((FrontendReq::GET_FEATURES, None)),
        protocol.map(|bits| (FrontendReq::SET_PROTOCOL_FEATURES, Some(bits))),
        features.map(|bits| (FrontendReq::SET_FEATURES, Some(bits))),
    ];
    for (request, bits) in said.into_iter().flatten() {
        let body = bits.map(u64::to_ne_bytes);
        let body = body.as_ref().map_or(&[][..], |body| body);
        let header = [u32::from(request), VERSION, body.len() as u32].map(u32::to_ne_bytes);
        theirs.write_all(&[&header.concat(), body].concat())?;
        handle().map_err(io::Error::other)?;
    }
    Ok(())
}
