//! Direct connections between workers of two servers: tickets for incoming connections, and rules for
//! outgoing ones.
//!
//! A ticket has passed through a client, so only the token and the secret that this daemon made itself are
//! trusted. The addresses in another server's ticket are only a request: this server connects only to
//! addresses that the operator has listed (`--direct-to`), so that no client can make it connect to something
//! else in its network.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use host_bridge::framing::{Address, connect_tcp};
use identity::Secret;
use protocol::ops::direct::{MAX_ADDRESSES, MAX_DIRECTS};

use super::workers::Worker;
use super::{Server, Token, admin};
use crate::cuda_ipc::random_token;
use crate::worker_protocol::{Refusal, Reply};

/// How long a ticket is valid.
const VALID: Duration = Duration::from_secs(30);
/// How long connecting may take, for each address of a name.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of connections being established.
const MAX_CONNECTING: usize = 32;

/// Unused tickets.
#[derive(Default)]
pub(super) struct Tickets(HashMap<Token, Ticket>);

struct Ticket {
    worker: Arc<Worker>,
    secret: Secret,
    until: Instant,
}

impl Tickets {
    /// Makes one for a connection to a worker. `None`: the worker has its maximum.
    fn add(&mut self, worker: &Arc<Worker>, now: Instant) -> io::Result<Option<(Token, [u8; 32])>> {
        self.0.retain(|_, ticket| ticket.until > now);
        let own = self.0.values().filter(|ticket| ticket.worker.pid() == worker.pid());
        if own.count() >= MAX_DIRECTS {
            return Ok(None);
        }
        let (token, secret) = (random_token()?, Secret::random()?);
        let bytes = secret.0;
        self.0.insert(token, Ticket { worker: Arc::clone(worker), secret, until: now + VALID });
        Ok(Some((token, bytes)))
    }

    /// The worker of a ticket.
    pub(super) fn find(&self, token: &Token, now: Instant) -> Option<&Arc<Worker>> {
        self.0.get(token).filter(|ticket| ticket.until > now).map(|ticket| &ticket.worker)
    }

    /// Consumes a ticket. Without its secret, it is neither consumed nor revealed.
    pub(super) fn take(&mut self, token: &Token, secret: &[u8; 32], now: Instant) -> Option<Arc<Worker>> {
        self.0.get(token).filter(|ticket| ticket.until > now && ticket.secret.matches(secret))?;
        self.0.remove(token).map(|ticket| ticket.worker)
    }

    /// Removes the tickets of a worker that has ended.
    pub(super) fn remove_all_of(&mut self, pid: u32) {
        self.0.retain(|_, ticket| ticket.worker.pid() != pid);
    }
}

/// A worker's ticket.
pub(super) fn ticket(server: &Server, tickets: &mut Tickets, worker: &Arc<Worker>) -> Reply {
    let encrypted = server.trust.is_some();
    let unix = server.options.listen.iter().filter(|address| matches!(address, Address::Unix(_)));
    let mut addresses: Vec<String> = unix.map(ToString::to_string).collect();
    addresses.extend(admin::own_addresses(server));
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

/// Connects a worker to another server, if that is allowed, and answers the worker's request. Never blocks.
pub(super) fn serve(server: &Arc<Server>, worker: &Arc<Worker>, request: u64, text: &str, encrypted: bool) {
    static CONNECTING: AtomicUsize = AtomicUsize::new(0);
    let refuse = |why: String| worker.answer(request, Reply::NotConnected(why), None);
    let address = match allowed(server, text, encrypted) {
        Ok(address) => address,
        Err(why) => return refuse(why),
    };
    if CONNECTING.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTING {
        CONNECTING.fetch_sub(1, Ordering::AcqRel);
        return refuse("this server is busy with other connections".into());
    }
    let told = Arc::clone(worker);
    let connecting = std::thread::Builder::new().name("rgpu-direct".into()).spawn(move || {
        let connected = connect(&address);
        CONNECTING.fetch_sub(1, Ordering::AcqRel);
        match connected {
            Ok(socket) => told.answer(request, Reply::Connected, Some(&socket)),
            Err(e) => told.answer(request, Reply::NotConnected(format!("{address}: {e}")), None),
        }
    });
    if let Err(e) = connecting {
        CONNECTING.fetch_sub(1, Ordering::AcqRel);
        refuse(format!("cannot start a thread: {e}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_valid_once_for_a_while_and_with_its_secret() {
        let (worker, now) = (Worker::fake(7), Instant::now());
        let mut tickets = Tickets::default();
        let (token, secret) = tickets.add(&worker, now).unwrap().unwrap();
        let mut wrong = secret;
        wrong[31] ^= 1;
        assert!(
            tickets.take(&token, &wrong, now).is_none() && tickets.take(&[0; 16], &secret, now).is_none()
        );
        assert!(tickets.find(&token, now).is_some() && tickets.find(&token, now + VALID).is_none());
        assert!(tickets.take(&token, &secret, now + VALID).is_none(), "it has expired");
        assert!(tickets.take(&token, &secret, now).is_some_and(|found| found.pid() == 7));
        assert!(tickets.take(&token, &secret, now).is_none() && tickets.find(&token, now).is_none());
    }

    #[test]
    fn a_worker_has_limited_tickets_and_none_after_its_end() {
        let (worker, other, now) = (Worker::fake(7), Worker::fake(8), Instant::now());
        let mut tickets = Tickets::default();
        let mut all: Vec<Token> = Vec::new();
        while let Some((token, _)) = tickets.add(&worker, now).unwrap() {
            all.push(token);
        }
        assert_eq!(all.len(), MAX_DIRECTS);
        let (others, _) = tickets.add(&other, now).unwrap().unwrap();
        // Expired tickets make room.
        assert!(tickets.add(&worker, now + VALID).unwrap().is_some());
        assert!(tickets.find(&others, now).is_none());
        tickets.remove_all_of(7);
        assert!(tickets.0.is_empty());
    }
}
