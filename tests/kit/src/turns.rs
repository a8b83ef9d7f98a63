//! A relay in front of a server that counts round trips: once it is [told to](Turns::hold), it lets a
//! connection have one answer, and only when the other end has said all that it says before it hears
//! anything.
//!
//! ```text
//!   bridge ── everything, at once ──▶ relay ── everything, at once ──▶ server
//!          ◀── one answer, once both have said what they say ──  relay ◀──
//! ```
//!
//! So an end that needs one answer more than the test expects waits for ever. What ends do in their own time
//! says nothing about round trips, and the relay measures no time.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use host_bridge::bridge::SessionConfig;
use host_bridge::framing::Address;
use protocol::link::Hello;
use zerocopy::FromBytes;

/// Bytes that one end says before it hears anything, and that the other one answers.
#[derive(Debug, Clone, Copy)]
pub struct Exchange {
    /// The client's, with its hello.
    pub says: usize,
    /// The server's.
    pub hears: usize,
}

/// How a connection is held, by what its hello says that it is for.
pub type Exchanges = fn(u32) -> Exchange;

/// The relay.
pub struct Turns {
    /// How to reach the server through it.
    pub config: SessionConfig,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How connections are held that come from now on.
    exchanges: Option<Exchanges>,
    /// As many of an attempt must have said theirs before one hears anything.
    beside: usize,
    connections: Vec<Connection>,
    /// What clients say is thrown away.
    loses: bool,
    lost: usize,
}

/// The client's address.
type Id = Option<SocketAddr>;

struct Connection {
    id: Id,
    purpose: u32,
    attempt: u32,
    exchange: Option<Exchange>,
    said: usize,
    /// What the server has said: how much, how much of that was passed on, the rest, and whether that is all.
    heard: usize,
    passed: usize,
    waiting: Vec<u8>,
    over: bool,
    sockets: [TcpStream; 2],
}

impl Turns {
    /// Starts one in front of a server on this host.
    pub fn before(config: &SessionConfig) -> Turns {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let Address::Tcp(host, server) = &config.server else { panic!("a server without a port") };
        let (host, server, shared) = (host.clone(), *server, Arc::<Shared>::default());
        let relay = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect((&*host, server))) else { return };
                let relay = Arc::clone(&relay);
                std::thread::spawn(move || relay.carry(client, server));
            }
        });
        let config = SessionConfig { server: Address::Tcp("127.0.0.1".into(), port), ..config.clone() };
        Turns { config, shared }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    /// Throws away what clients say from now on, on all connections that there are.
    pub fn lose(&self) {
        self.state().loses = true;
    }

    /// Passes on again what clients say. What was thrown away is missing from the connections that there are.
    pub fn restore(&self) {
        self.state().loses = false;
    }

    /// Bytes that were thrown away.
    pub fn lost(&self) -> usize {
        self.state().lost
    }

    /// Closes all connections, and lets those that come from now on have one answer, once so many of an
    /// attempt have said all that they say before one.
    pub fn hold(&self, beside: usize, exchanges: Exchanges) {
        let mut state = self.state();
        (state.exchanges, state.beside, state.loses) = (Some(exchanges), beside, false);
        for connection in state.connections.drain(..) {
            for socket in connection.sockets {
                // One end may have closed it already.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
        self.shared.changed.notify_all();
    }

    /// Passes on everything from now on.
    pub fn release(&self) {
        let mut state = self.state();
        (state.exchanges, state.beside) = (None, 0);
        state.connections.iter_mut().for_each(|connection| connection.exchange = None);
        self.shared.changed.notify_all();
    }

    /// Bytes that clients have said on the connections for this purpose that there are, and bytes that the
    /// server has said there, whether passed on or not.
    pub fn said(&self, purpose: u32) -> (usize, usize) {
        let state = self.state();
        let these = state.connections.iter().filter(|connection| connection.purpose == purpose);
        these.fold((0, 0), |(said, heard), connection| (said + connection.said, heard + connection.heard))
    }
}

impl Shared {
    fn carry(self: Arc<Shared>, mut client: TcpStream, mut server: TcpStream) {
        let mut hello = [0; size_of::<Hello>()];
        if client.set_nodelay(true).and(server.set_nodelay(true)).and(client.read_exact(&mut hello)).is_err()
        {
            return;
        }
        let Hello { purpose, attempt, .. } = Hello::read_from_bytes(&hello).unwrap();
        let sockets = [client.try_clone().unwrap(), server.try_clone().unwrap()];
        let mut state = self.state.lock().unwrap();
        let exchange = state.exchanges.map(|exchanges| exchanges(purpose));
        let said = hello.len();
        let id = client.peer_addr().ok();
        let (heard, passed, waiting, over) = (0, 0, Vec::new(), false);
        state.connections.push(Connection {
            id,
            purpose,
            attempt,
            exchange,
            said,
            heard,
            passed,
            waiting,
            over,
            sockets,
        });
        drop(state);
        if server.write_all(&hello).is_err() {
            return;
        }
        let (listens, answers) = (Arc::clone(&self), Arc::clone(&self));
        let (from, to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || listens.listen(id, from));
        std::thread::spawn(move || answers.answer(id, to));
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            let mut state = self.state.lock().unwrap();
            if state.loses {
                state.lost += count;
                continue;
            }
            state.with(id, |connection| connection.said += count);
            drop(state);
            self.changed.notify_all();
            if server.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = server.shutdown(Shutdown::Both);
    }

    /// Takes what the server says, as fast as it says it.
    fn listen(&self, id: Id, mut server: TcpStream) {
        let mut bytes = vec![0; 1 << 16];
        loop {
            let count = server.read(&mut bytes).unwrap_or(0);
            let mut state = self.state.lock().unwrap();
            let known = state.with(id, |connection| {
                connection.heard += count;
                connection.waiting.extend_from_slice(&bytes[..count]);
                connection.over |= count == 0;
            });
            self.changed.notify_all();
            if count == 0 || known.is_none() {
                return;
            }
        }
    }

    /// Passes it on.
    fn answer(&self, id: Id, mut client: TcpStream) {
        let mut state = self.state.lock().unwrap();
        while let Some((bytes, over)) = state.pass(id) {
            if !bytes.is_empty() {
                drop(state);
                if client.write_all(&bytes).is_err() {
                    return;
                }
                state = self.state.lock().unwrap();
            } else if over {
                break;
            } else {
                state = self.changed.wait(state).unwrap();
            }
        }
        drop(state);
        let _ = client.shutdown(Shutdown::Both);
    }
}

impl State {
    /// What may be passed on to a client now, and whether that is all that its server has said. `None`: the
    /// connection was closed.
    fn pass(&mut self, id: Id) -> Option<(Vec<u8>, bool)> {
        let attempt = self.with(id, |connection| connection.attempt)?;
        let is = |connection: &&Connection| connection.attempt == attempt && connection.has_said_all();
        let held = self.connections.iter().filter(is).count() < self.beside;
        self.with(id, |connection| (connection.pass(held || !connection.has_said_all()), connection.over))
    }

    /// `None`: the connection was closed.
    fn with<T>(&mut self, id: Id, what: impl FnOnce(&mut Connection) -> T) -> Option<T> {
        let is = |connection: &&mut Connection| connection.id == id;
        self.connections.iter_mut().find(is).map(what)
    }
}

impl Connection {
    fn has_said_all(&self) -> bool {
        self.exchange.is_none_or(|exchange| self.said >= exchange.says)
    }

    /// What may be passed on now. `held`: nothing of an exchange.
    fn pass(&mut self, held: bool) -> Vec<u8> {
        let waiting = self.waiting.len();
        let may = match self.exchange {
            None => waiting,
            Some(_) if held => 0,
            Some(exchange) => waiting.min(exchange.hears.saturating_sub(self.passed)),
        };
        self.passed += may;
        self.waiting.drain(..may).collect()
    }
}
