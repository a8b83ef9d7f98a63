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
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use host_bridge::framing::{Address, connect_tcp};
use nix::errno::Errno;
use nix::sys::socket::sockopt::SendTimeout;
use nix::sys::socket::{self as net, AddressFamily, SockFlag, SockType, UnixAddr, setsockopt, socket};
use nix::sys::time::TimeVal;
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

/// Where other servers reach this one. Must not be called under the state's lock.
pub(super) fn addresses(server: &Server) -> Vec<String> {
    let unix = server.options.listen.iter().filter(|address| matches!(address, Address::Unix(_)));
    let mut addresses: Vec<String> = unix.map(ToString::to_string).collect();
    addresses.extend(listen::own_addresses(server));
    addresses.truncate(MAX_ADDRESSES);
    addresses
}

/// A worker's ticket, with these addresses.
pub(super) fn ticket(
    server: &Server,
    tickets: &mut Tickets,
    worker: &Arc<Worker>,
    addresses: Vec<String>,
) -> Reply {
    let encrypted = server.trust.is_some();
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
        Address::Unix(path) => connect_unix(path, CONNECT_WITHIN)?,
        Address::Tcp(host, port) => connect_tcp(host, *port, CONNECT_WITHIN)?.into(),
    })
}

/// Connects to a Unix stream socket, or gives up if its server accepts nothing for so long.
fn connect_unix(path: &Path, within: Duration) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // For Unix sockets this also limits how long a connection waits for its place at the listener.
    let limit = |time: Duration| {
        let time = TimeVal::new(time.as_secs().cast_signed(), time.subsec_micros().into());
        setsockopt(&socket, SendTimeout, &time)
    };
    limit(within)?;
    net::connect(socket.as_raw_fd(), &UnixAddr::new(path)?).map_err(|e| match e {
        Errno::EAGAIN => io::Error::new(io::ErrorKind::TimedOut, "it accepts no connection"),
        other => other.into(),
    })?;
    limit(Duration::ZERO)?;
    Ok(socket)
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{Backlog, bind, listen};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_server_that_accepts_nothing_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server");
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let moment = Duration::from_millis(10);
        let mut held = Vec::new();
        let refused = loop {
            match connect_unix(&path, moment) {
                Ok(socket) => held.push(socket),
                Err(e) => break e,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut, "{refused}");
        assert!(!held.is_empty());
        let listener = UnixListener::from(listener);
        listener.accept().unwrap();
        connect_unix(&path, moment).unwrap();
    }
}
