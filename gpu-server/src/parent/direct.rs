//! Direct connections between workers of two servers: tickets for incoming connections, and rules for
//! outgoing ones.
//!
//! A ticket has passed through a client, so only the token and the secret that this daemon made itself are
//! trusted. The addresses in another server's ticket are only a request: this server connects only to
//! addresses that the operator has listed (`--direct-to`), so that no client can make it connect to something
//! else in its network.

pub(super) mod connecting;
pub(super) mod tickets;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use host_bridge::framing::{Address, connect_tcp};
use protocol::ops::direct::{MAX_ADDRESSES, MAX_DIRECTS};

use self::connecting::{Queue, Refused};
use self::tickets::Tickets;
use super::listen;
use super::state::Server;
use super::workers::Worker;
use crate::worker_protocol::{Refusal, Reply};

/// How long connecting may take, for each address of a name.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of connections being established. A program may open as many as a session may have at the
/// same moment, and so may all others: they wait their turn.
const MAX_CONNECTING: usize = 32;

/// A worker's ticket.
pub(super) fn ticket(server: &Server, tickets: &mut Tickets, worker: &Arc<Worker>) -> Reply {
    let encrypted = server.trust.is_some();
    let unix = server.options.listen.iter().filter(|address| matches!(address, Address::Unix(_)));
    let mut addresses: Vec<String> = unix.map(ToString::to_string).collect();
    addresses.extend(listen::own_addresses(server));
    addresses.truncate(MAX_ADDRESSES);
    match tickets.add(worker, Instant::now()) {
        Ok(Some((token, secret))) => Reply::Ticket { token, secret, encrypted, addresses },
        Ok(None) => Reply::Refused(Refusal::Full),
        Err(e) => {
            tracing::error!("cannot read random numbers: {e}");
            Reply::Refused(Refusal::Full)
        }
    }
}

/// Whether the operator allows a connection to this address, with or without TLS.
fn allowed(server: &Server, text: &str, encrypted: bool) -> Result<Address, String> {
    let address = text.parse::<Address>().map_err(|e| e.to_string())?;
    if !server.options.direct_to.contains(&address) {
        return Err(format!("this server connects to {address} only if --direct-to lists it"));
    }
    if matches!(address, Address::Tcp(..)) && !encrypted && !server.options.insecure {
        return Err(format!("{address} speaks no TLS (--insecure), and this server sends nothing without"));
    }
    Ok(address)
}

fn connect(address: &Address) -> io::Result<OwnedFd> {
    Ok(match address {
        Address::Unix(path) => UnixStream::connect(path)?.into(),
        Address::Tcp(host, port) => connect_tcp(host, *port, CONNECT_WITHIN)?.into(),
    })
}

/// Connections that are being established, and those that wait for that.
static CONNECTING: LazyLock<Arc<Queue>> = LazyLock::new(|| Queue::new(MAX_CONNECTING, MAX_DIRECTS));

/// A worker is gone, and its connections are no longer wanted.
pub(super) fn forget(worker: u32) {
    CONNECTING.forget(worker);
}

/// Connects a worker to another server, if that is allowed, and answers the worker's request. Never blocks.
pub(super) fn serve(server: &Arc<Server>, worker: &Arc<Worker>, request: u64, text: &str, encrypted: bool) {
    let refuse = |why: String| worker.answer(request, Reply::NotConnected(why), None);
    let address = match allowed(server, text, encrypted) {
        Ok(address) => address,
        Err(why) => return refuse(why),
    };
    let told = Arc::clone(worker);
    let connecting = CONNECTING.join(worker.pid(), move || match connect(&address) {
        Ok(socket) => told.answer(request, Reply::Connected, Some(&socket)),
        Err(e) => told.answer(request, Reply::NotConnected(format!("{address}: {e}")), None),
    });
    match connecting {
        Ok(()) => {}
        Err(Refused::Full) => refuse("the session has all its connections waiting already".into()),
        Err(Refused::NoThread(e)) => refuse(format!("cannot start a thread: {e}")),
    }
}
