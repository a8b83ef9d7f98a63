//! A server whose workers are the real ends of `tcp` and `verbs` sessions, in threads, over "device memory"
//! in a map. Sessions outlive their connections.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use host_bridge::bridge::{Security, SessionConfig};
use host_bridge::endpoint::{
    Allowance, Client, Commands, CompressUse, Lost, Polling, Survivor, TcpClient, TcpCommands, VerbsClient,
    VerbsCommands,
};
use host_bridge::framing::Address;
use host_bridge::stream::Stream;
use host_bridge::verbs::Settings;
use protocol::channel::Record;
use protocol::device::Answer;
use protocol::link::{Hello, MAGIC, Welcome, purpose, wish};
use zerocopy::{FromZeros, IntoBytes};

use crate::link::welcome;
use crate::local_server::{Behavior, Kept, execute};
use crate::{PATIENCE, be_patient};

/// Data connections of each session.
const DATA: u32 = 3;

/// A server on a port of this host.
pub struct TcpServer {
    /// How to reach it.
    pub config: SessionConfig,
    shared: Arc<Shared>,
}

/// The end of a session.
#[derive(Clone)]
enum Worker {
    Tcp(Arc<TcpClient>),
    Verbs(Arc<VerbsClient>),
}

impl Worker {
    fn survivor(&self) -> &dyn Survivor {
        match self {
            Worker::Tcp(client) => &**client,
            Worker::Verbs(client) => &**client,
        }
    }

    fn client(&self) -> &dyn Client {
        match self {
            Worker::Tcp(client) => &**client,
            Worker::Verbs(client) => &**client,
        }
    }
}

#[derive(Default)]
struct Shared {
    sessions: Mutex<HashMap<[u8; 16], Worker>>,
    begun: AtomicUsize,
    resumed: AtomicUsize,
    ended: AtomicUsize,
    farewells: AtomicUsize,
    /// How many of the next ones are refused.
    refuses_farewells: AtomicUsize,
    trouble: Mutex<Vec<String>>,
    /// Whether data connections are left without an answer, and those that were.
    holds_data: AtomicBool,
    held: Mutex<Vec<(Hello, TcpStream)>>,
    /// Whether commands wait that have come.
    holds_commands: AtomicBool,
}

/// Commands that wait while the server holds them.
struct Held<'s, C> {
    commands: C,
    holds: &'s AtomicBool,
}

impl<C: Commands> Commands for Held<'_, C> {
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
        let next = self.commands.next(body, rest);
        while self.holds.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        next
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        if self.holds.load(Ordering::SeqCst) { Ok(None) } else { self.commands.try_next(body) }
    }
}

impl TcpServer {
    /// Starts one.
    pub fn start() -> TcpServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let shared = Arc::<Shared>::default();
        let for_thread = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), shared) = (stream, for_thread.clone()) else { return };
                std::thread::spawn(move || shared.greet(stream));
            }
        });
        let mut config = SessionConfig::new(address, "test-host");
        be_patient(&mut config);
        config.security = Security::Insecure;
        TcpServer { config, shared }
    }

    /// Attempts to resume a session that came with its secret.
    pub fn resumed(&self) -> usize {
        self.shared.resumed.load(Ordering::SeqCst)
    }

    /// Sessions that have ended.
    pub fn ended(&self) -> usize {
        self.shared.ended.load(Ordering::SeqCst)
    }

    /// Connections that say that a session has ended.
    pub fn farewells(&self) -> usize {
        self.shared.farewells.load(Ordering::SeqCst)
    }

    /// Has no room for so many of the next ones.
    pub fn refuse_farewells(&self, count: usize) {
        self.shared.refuses_farewells.store(count, Ordering::SeqCst);
    }

    /// Leaves the data connections that come from now on open and without an answer.
    pub fn hold_data(&self) {
        self.shared.holds_data.store(true, Ordering::SeqCst);
    }

    /// Answers data connections again, those that are held, too.
    pub fn release_data(&self) {
        for (hello, stream) in self.answer_data_again() {
            self.shared.answer(&hello, stream);
        }
    }

    /// Closes the data connections that are held, and answers those that come from now on.
    pub fn drop_data(&self) {
        drop(self.answer_data_again());
    }

    fn answer_data_again(&self) -> Vec<(Hello, TcpStream)> {
        let mut held = self.shared.held.lock().unwrap();
        self.shared.holds_data.store(false, Ordering::SeqCst);
        std::mem::take(&mut held)
    }

    /// Stops executing commands, in all sessions, or continues.
    pub fn hold_commands(&self, hold: bool) {
        self.shared.holds_commands.store(hold, Ordering::SeqCst);
    }

    /// Data connections without an answer.
    pub fn held(&self) -> usize {
        self.shared.held.lock().unwrap().len()
    }

    /// Why sessions ended otherwise than by their clients' will.
    pub fn trouble(&self) -> Vec<String> {
        self.shared.trouble.lock().unwrap().clone()
    }
}

impl Shared {
    fn greet(&self, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut hello = Hello::new_zeroed();
        if stream.read_exact(hello.as_mut_bytes()).is_err() {
            return;
        }
        assert_eq!(hello.magic, MAGIC);
        let mut held = self.held.lock().unwrap();
        if hello.purpose == purpose::DATA && self.holds_data.load(Ordering::SeqCst) {
            return held.push((hello, stream));
        }
        drop(held);
        self.answer(&hello, stream);
    }

    fn answer(&self, hello: &Hello, mut stream: TcpStream) {
        let mut refused = false;
        if hello.purpose == purpose::END {
            let left = |left: usize| left.checked_sub(1);
            refused = self.refuses_farewells.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok();
            self.farewells.fetch_add(1, Ordering::SeqCst);
        }
        let opens = matches!(hello.purpose, purpose::CONTROL | purpose::VERBS);
        let number = if opens { self.begun.fetch_add(1, Ordering::SeqCst) as u8 } else { 0 };
        let token = if opens { [number; 16] } else { hello.token };
        let known = self.sessions.lock().unwrap().get(&token).filter(|_| !refused).cloned();
        let welcome = match &known {
            None if refused => welcome(Answer::NoResources, "there is no room for a farewell"),
            None if !opens => welcome(Answer::Denied, "no session has this token"),
            _ => Welcome {
                token,
                secret: [number; 32],
                data_connections: DATA,
                grace: PATIENCE.as_secs() as u32,
                ..welcome(Answer::Ok, "")
            },
        };
        if opens {
            return self.serve(token, stream, hello, &welcome);
        }
        let (Ok(()), Some(worker)) = (stream.write_all(welcome.as_bytes()), known) else { return };
        let stream = Stream::from(OwnedFd::from(stream));
        assert_eq!(hello.secret, [token[0]; 32]);
        // A session may end meanwhile.
        let _ = match hello.purpose {
            purpose::DATA => match worker {
                Worker::Tcp(client) => client.add_data_connection(hello.attempt, hello.index, stream),
                Worker::Verbs(_) => panic!("a data connection over verbs"),
            },
            purpose::RESUME => {
                self.resumed.fetch_add(1, Ordering::SeqCst);
                worker.survivor().resume(hello.attempt, stream)
            }
            purpose::END => {
                worker.client().close();
                Ok(())
            }
            other => panic!("a connection for {other}"),
        };
    }

    fn serve(&self, token: [u8; 16], mut socket: TcpStream, hello: &Hello, welcome: &Welcome) {
        let control = Stream::from(OwnedFd::from(socket.try_clone().unwrap()));
        if hello.purpose == purpose::VERBS {
            let _ = socket.write_all(welcome.as_bytes());
            let (slots, settings) = (hello.slot_count, Settings::default());
            let begun = VerbsCommands::start(control, slots, &settings, Polling::default(), PATIENCE);
            let (commands, client) = begun.unwrap();
            return self.work(token, commands, Worker::Verbs(client));
        }
        let takes = hello.wishes & wish::COMPRESSED != 0;
        let compress = CompressUse::Always.over(takes, false);
        let allowance = Allowance { grace: PATIENCE, replay: 64 << 20, eager: 0, compress };
        let (commands, client) =
            TcpCommands::start(control, hello.slot_count, DATA, Polling::default(), allowance).unwrap();
        // The data connections come as soon as the client is welcome.
        self.sessions.lock().unwrap().insert(token, Worker::Tcp(client.clone()));
        let _ = socket.write_all(welcome.as_bytes());
        self.work(token, commands, Worker::Tcp(client));
    }

    fn work(&self, token: [u8; 16], commands: impl Commands, worker: Worker) {
        let mut commands = Held { commands, holds: &self.holds_commands };
        self.sessions.lock().unwrap().insert(token, worker.clone());
        let executed = execute(&mut commands, worker.client(), Behavior::Good, &Kept::default());
        if let Err(e) = executed {
            self.trouble.lock().unwrap().push(e);
        }
        worker.client().close();
        self.sessions.lock().unwrap().remove(&token);
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}
