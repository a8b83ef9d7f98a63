//! Clients on other machines: how they join, what protects their connections, and who is refused.

#![allow(clippy::unwrap_used)]

mod support;

use base64::Engine;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host_bridge::ask::Question;
use host_bridge::bridge::{ConnectError, Security, SessionConfig, ask, join};
use host_bridge::framing::with_causes;
use host_bridge::stream::Stream;
use identity::tls::{client_pinning, session_name};
use identity::{Credentials, Fingerprint, Identity, Secret, servers};
use protocol::channel::NO_SLOT;
use protocol::device::{Answer, untext};

use protocol::link::*;

use protocol::ops::Op as _;
use protocol::ops::device::SessionInfo;
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use serde_json::json;
use support::machine::*;
use support::*;
use test_kit::link::{LocalBridge, Session as _, greet, hello, record};
use test_kit::resources::{family, until_idle};
use test_kit::session::Client;

use test_kit::{arena, be_patient, free_port, until};
use zerocopy::{FromZeros, IntoBytes};

fn key_file(folder: &Path) -> PathBuf {
    folder.join("identity/key.pem")
}

#[test]
fn a_client_joins_once_and_its_sessions_have_the_name_that_it_was_enrolled_with() {
    let server = Server::start_protected(&[]);
    let token = enroll(&server, "host1");
    let machine = Machine::new();
    assert_eq!(machine.join(&server, &token).unwrap(), "host1");
    let mut client = machine.try_connect(server.port).unwrap();
    works(&mut client);
    let session = &server.status()["sessions"][0];
    assert_eq!((session["principal"].as_str(), session["client"].as_str()), (Some("host1"), Some("a liar")));
    // The token is used up. Its user may show it again, as it might not have heard the answer.
    let late = Machine::new();
    let refusal = late.join(&server, &token).unwrap_err();
    assert!(refusal.contains("was used already"), "{refusal}");
    assert_eq!(machine.join(&server, &token).unwrap(), "host1");
    // The first client's identity is worthless without its key.
    late.pin(server.port, token.server);
    let refusal = late.try_connect(server.port).err().unwrap();
    assert!(
        refusal.contains("does not know this client's key") && refusal.contains("rgpuctl enroll"),
        "{refusal}"
    );
    // Neither the secret nor the token is in a log.
    let secret = Fingerprint(token.secret.0).to_string();
    assert!(!server.log().contains(&secret) && !server.log().contains(&token.to_string()));
}

#[test]
fn programs_of_one_machine_that_start_at_the_same_moment_are_all_answered_and_served() {
    const PROGRAMS: usize = 48;
    let server = Server::start_protected(&["--max-sessions=80", "--client-sessions=0"]);
    let machine = joined(&server, "host1");
    let mut config = machine.config(server.port);
    be_patient(&mut config);
    let start = Barrier::new(PROGRAMS);
    let program = || {
        start.wait();
        ask(&config.server, config.security.clone(), &Question::Inventory {}).unwrap();
        works(&mut Client::connect(&config));
    };
    std::thread::scope(|scope| (0..PROGRAMS).for_each(|_| drop(scope.spawn(program))));
}

#[test]
fn keys_and_clients_outlive_the_server() {
    let mut server = Server::start_protected(&[]);
    let machine = joined(&server, "host1");
    let key = std::fs::read(key_file(server.folder().path())).unwrap();
    let folder = Arc::clone(server.folder());
    server.end(nix::sys::signal::Signal::SIGTERM);
    drop(server);
    let server = Server::start_protected_in(&folder, &[]);
    assert_eq!(std::fs::read(key_file(folder.path())).unwrap(), key);
    let pins = servers::known(machine.folder.path()).unwrap();
    machine.pin(server.port, pins[0].key);
    works(&mut machine.try_connect(server.port).unwrap());
}

#[test]
fn a_revoked_client_loses_its_sessions_and_gets_no_new_one() {
    let server = Server::start_protected(&[]);
    let (one, other) = (joined(&server, "one"), joined(&server, "other"));
    let mut lost = one.try_connect(server.port).unwrap();
    let mut kept = other.try_connect(server.port).unwrap();
    works(&mut lost);
    assert_eq!(server.ask(json!({ "revoke": { "name": "one" } })), json!({ "ended_sessions": 1 }));
    let reason = lost.wait_lost();
    assert!(reason.contains("the access of one to this server was revoked"), "{reason}");
    works(&mut kept);
    let refusal = one.try_connect(server.port).err().unwrap();
    assert!(refusal.contains("does not know this client's key"), "{refusal}");
    let answer = server.ask(json!({ "revoke": { "name": "one" } }));
    assert!(answer["error"].as_str().unwrap().contains("no client is called"), "{answer}");
    let names = server.ask(json!({ "clients": {} }));
    assert_eq!(names["clients"].as_array().unwrap().len(), 1);
    until("the sessions are over", || server.sessions() == 1);
}

#[test]
fn who_enrolls_a_name_that_is_in_use_is_told_so_and_the_replaced_key_is_on_record() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit");
    let server = Server::start_protected(&[&format!("--audit-log={}", audit.display())]);
    let enroll = || {
        let answer = server.ask(json!({ "enroll": { "name": "host1", "valid_seconds": 3600 } }));
        (answer["token"].as_str().unwrap().parse().unwrap(), answer["replaces"].clone())
    };
    let (token, replaces) = enroll();
    assert!(replaces.is_null(), "{replaces}");
    let machine = Machine::new();
    // The second time, it shows the same key.
    for _ in 0..2 {
        machine.join(&server, &token).unwrap();
    }
    let before = server.ask(json!({ "clients": {} }))["clients"][0].clone();
    let (token, replaces) = enroll();
    assert_eq!(replaces, json!({ "key": before["key"], "since": before["since"] }));
    assert!(!server.log().contains("is not accepted any more"), "{}", server.log());
    Machine::new().join(&server, &token).unwrap();
    assert!(server.log().contains("host1 joins with another key"), "{}", server.log());
    until("the audit log has the earlier key", || {
        let text = std::fs::read_to_string(&audit).unwrap();
        let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let replaced: Vec<_> = events.filter(|event| event["event"] == "replaced").collect();
        replaced.len() == 1 && replaced[0]["key"] == before["key"] && replaced[0]["principal"] == "host1"
    });
}

#[test]
fn what_began_with_a_replaced_key_goes_on_until_its_name_is_revoked() {
    let server = Server::start_protected(&[]);
    let before = joined(&server, "host1");
    let mut client = before.try_connect(server.port).unwrap();
    works(&mut client);
    let after = joined(&server, "host1");
    for round in 1..=2 {
        server.signal(nix::sys::signal::Signal::SIGHUP);
        until("the rules are read again", || server.log().matches("SIGHUP: read").count() == round);
        works_on(&mut client, round as u64);
    }
    server.signal(nix::sys::signal::Signal::SIGUSR2);
    until("the next program serves", || {
        let status = server.try_status();
        status.is_some_and(|status| status["sessions"][0]["daemons_before"] == 1)
    });
    works_on(&mut client, 3);
    // The earlier key begins nothing more.
    let refusal = before.try_connect(server.port).err().unwrap();
    assert!(refusal.contains("does not know this client's key"), "{refusal}");
    works(&mut after.try_connect(server.port).unwrap());
    server.ask(json!({ "revoke": { "name": "host1" } }));
    let reason = client.wait_lost();
    assert!(reason.contains("revoked") || reason.contains("does not know this client's key"), "{reason}");
}

#[test]
fn without_tls_the_network_is_refused_with_what_to_do() {
    let server = Server::start_protected(&[]);
    let stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let welcome = greet(&stream, &hello(purpose::CONTROL, [0; 16], 1)).unwrap();
    assert_eq!(welcome.status, Answer::Denied as u32);
    let reason = untext(&welcome.reason);
    assert!(reason.contains("without TLS") && reason.contains("rgpuctl join"), "{reason}");
    // The Unix socket needs none.
    let mut local = LocalBridge::connect(&server.socket());
    local.call(&SessionInfo {}).unwrap();
    assert_eq!(server.status()["sessions"][0]["principal"], format!("uid:{}", nix::unistd::geteuid()));
}

#[test]
fn a_client_without_a_key_or_a_pin_connects_nowhere() {
    let server = Server::start_protected(&[]);
    let machine = Machine::new();
    let refusal = machine.try_connect(server.port).err().unwrap();
    assert!(refusal.contains("has no key") && refusal.contains("rgpuctl join"), "{refusal}");
    machine.identity();
    let refusal = machine.try_connect(server.port).err().unwrap();
    assert!(refusal.contains("no key is pinned for tcp:127.0.0.1"), "{refusal}");
    // An impostor answers at the address.
    machine.pin(server.port, machine.identity().fingerprint());
    let Err(e @ ConnectError::Unsafe { .. }) = Client::try_connect(&machine.config(server.port)) else {
        panic!("another key than the pinned one was trusted")
    };
    assert!(with_causes(&e).contains("is pinned"), "{}", with_causes(&e));
}

/// Connects to the daemon under TLS with this key.
fn greeted(server: &Server, machine: &Machine, hello: &Hello) -> (Stream, Welcome) {
    let pins = servers::known(machine.folder.path()).unwrap();
    let config = client_pinning(&machine.identity(), &[pins[0].key]).unwrap();
    let socket = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let stream = Stream::tls_client(socket.into(), &config, name, soon()).unwrap();
    stream.write_all(hello.as_bytes()).unwrap();
    let welcome = hear(&stream).unwrap();
    (stream, welcome)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn hear(stream: &Stream) -> std::io::Result<Welcome> {
    let mut welcome = Welcome::new_zeroed();
    stream.read_exact(welcome.as_mut_bytes())?;
    Ok(welcome)
}

/// Opens a connection of the session that `welcome` began, with `machine`'s key and this hello.
fn of_session(
    server: &Server,
    machine: &Machine,
    welcome: &Welcome,
    hello: &Hello,
) -> std::io::Result<(Stream, Welcome)> {
    let stream = to_session(server, machine, welcome)?;
    stream.write_all(hello.as_bytes())?;
    let welcome = hear(&stream)?;
    Ok((stream, welcome))
}

/// A connection to the session that `welcome` began, with `machine`'s key.
fn to_session(server: &Server, machine: &Machine, welcome: &Welcome) -> std::io::Result<Stream> {
    let config = client_pinning(&machine.identity(), &[Fingerprint(welcome.session_key)]).unwrap();
    let socket = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    Stream::tls_client(socket.into(), &config, session_name(&welcome.token), soon())
}

#[test]
fn a_session_takes_no_connection_but_its_clients_own_and_no_more_than_agreed() {
    let server = Server::start_protected(&[]);
    let (machine, other) = (joined(&server, "one"), joined(&server, "other"));
    let (_daemon, welcome) = greeted(&server, &machine, &hello(purpose::CONTROL, [0; 16], 2));
    assert_eq!((welcome.status, welcome.data_connections), (0, 2));
    let right = |purpose, index| Hello { secret: welcome.secret, ..hello(purpose, welcome.token, index) };
    // Another client, even though it knows everything.
    assert!(of_session(&server, &other, &welcome, &right(purpose::CONTROL, 0)).is_err());
    // The client's key, without the secret.
    let guess = Hello { secret: [7; 32], ..right(purpose::CONTROL, 0) };
    let (_, refused) = of_session(&server, &machine, &welcome, &guess).unwrap();
    assert_eq!(refused.status, Answer::Denied as u32);
    let (_control, answer) = of_session(&server, &machine, &welcome, &right(purpose::CONTROL, 0)).unwrap();
    assert_eq!(answer.status, 0);
    let mut data = Vec::new();
    for index in 0..2 {
        let (stream, answer) = of_session(&server, &machine, &welcome, &right(purpose::DATA, index)).unwrap();
        assert_eq!(answer.status, 0);
        data.push(stream);
    }
    for (purpose, index) in [(purpose::DATA, 0), (purpose::DATA, 2), (purpose::CONTROL, 0)] {
        let (_, refused) = of_session(&server, &machine, &welcome, &right(purpose, index)).unwrap();
        assert_eq!(refused.status, Answer::NoResources as u32, "{}", untext(&refused.reason));
    }
    // A name that no session has.
    let unknown = Welcome { token: [9; 16], ..welcome };
    assert!(of_session(&server, &machine, &unknown, &right(purpose::CONTROL, 0)).is_err());
    // The same secret opens nothing without TLS.
    let stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let refused = greet(&stream, &right(purpose::DATA, 0)).unwrap();
    assert_eq!(refused.status, Answer::Denied as u32);
}

/// A man in the middle between clients and the server.
struct Middle {
    port: u16,
    /// Every connection so far, both sides of each.
    connections: Arc<Mutex<Vec<[TcpStream; 2]>>>,
}

impl Middle {
    /// Forwards bytes. `meddle` gets the connection's number, whether the bytes come from the client, their
    /// position in that direction, and the bytes. It returns what to forward.
    fn between(
        server: u16,
        meddle: impl Fn(usize, bool, usize, Vec<u8>) -> Vec<u8> + Send + Sync + 'static,
    ) -> Middle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::<Mutex<Vec<[TcpStream; 2]>>>::default();
        let (meddle, all) = (Arc::new(meddle), Arc::clone(&connections));
        std::thread::spawn(move || {
            for (number, near) in listener.incoming().enumerate() {
                let Ok(near) = near else { return };
                let Ok(far) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                all.lock().unwrap().push([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                for upwards in [true, false] {
                    let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    if !upwards {
                        std::mem::swap(&mut from, &mut to);
                    }
                    let meddle = Arc::clone(&meddle);
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 1 << 16];
                        let mut at = 0;
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            let passed = meddle(number, upwards, at, bytes[..n].to_vec());
                            at += n;
                            if passed.is_empty() || to.write_all(&passed).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                        let _ = from.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Middle { port, connections }
    }

    /// Cuts the open connections.
    fn cut(&self) {
        let cut = std::mem::take(&mut *self.connections.lock().unwrap());
        cut.iter().flatten().for_each(|side| drop(side.shutdown(Shutdown::Both)));
    }

    /// Waits until there are so many connections.
    fn stands(&self, count: usize) {
        until("there are all connections", || self.connections.lock().unwrap().len() >= count);
    }
}

/// The connections that a session's start takes under TLS: to the daemon, and the session's own.
const CONNECTIONS: usize = 6;
/// A session's first connection, to the daemon.
const DAEMON: usize = 0;

/// A man in the middle who holds back what the first connections carry, each in one direction. Under TLS the
/// handshakes pass.
struct Holding {
    middle: Middle,
    all: Arc<[Held; CONNECTIONS]>,
    /// Whether a session has begun, as far as its client knows.
    begun: Arc<AtomicBool>,
}

/// What a connection carries behind its handshake, in one direction.
#[derive(Default)]
struct Held {
    /// The client's bytes.
    said: Mutex<Vec<u8>>,
    holds: AtomicBool,
    passes: AtomicBool,
}

impl Held {
    /// Whether something is held back.
    fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }

    /// Lets it pass, and what comes from now on.
    fn pass(&self) {
        self.passes.store(true, Ordering::SeqCst);
    }

    fn hold(&self) {
        self.holds.store(true, Ordering::SeqCst);
        until("it may pass", || self.passes.load(Ordering::SeqCst));
    }
}

/// Whether the server's part of a handshake is over, by what the client has sent: under TLS, something
/// encrypted. Without, there is none.
fn is_past_servers_part(client: &[u8]) -> bool {
    if client.starts_with(&MAGIC.to_le_bytes()) {
        return true;
    }
    let mut rest = client;
    while let [kind, _, _, high, low, ..] = *rest {
        if kind == 23 {
            return true;
        }
        rest = rest.get(5 + usize::from(u16::from_be_bytes([high, low]))..).unwrap_or_default();
    }
    false
}

impl Holding {
    /// Holds back what the daemon answers, and of the session's own connections what the client sends
    /// (`upwards`) or what the server sends.
    fn between(server: u16, upwards: bool) -> Holding {
        let all = Arc::<[Held; CONNECTIONS]>::default();
        let held = Arc::clone(&all);
        let middle = Middle::between(server, move |number, way, _at, bytes| {
            let Some(held) = held.get(number) else { return bytes };
            if way {
                held.said.lock().unwrap().extend(&bytes);
            }
            if way == (upwards && number != DAEMON) && is_past_servers_part(&held.said.lock().unwrap()) {
                held.hold();
            }
            bytes
        });
        Holding { middle, all, begun: Arc::default() }
    }

    /// Opens a session from `machine`, under TLS or not, makes a call and copies data to the device, in a
    /// thread.
    fn begin(&self, server: &Server, machine: Machine, security: Option<Security>) -> JoinHandle<Client> {
        assert_eq!(server.sessions(), 0);
        let begun = Arc::clone(&self.begun);
        let mut config = machine.config(self.middle.port);
        // It hears nothing while its answers are held back.
        be_patient(&mut config);
        config.security = security.unwrap_or(config.security);
        std::thread::spawn(move || {
            let _machine = machine;
            let mut client = Client::try_connect(&config).unwrap();
            begun.store(true, Ordering::SeqCst);
            client.push(&SessionInfo {}, 0);
            // Beside what `works` allocates.
            let (address, size) = (window(0) + (64 << 20), 4 << 20);
            client.push(&MemGrow { device: 0, address, size }, 1);
            client.push(&MemAlloc { address, size }, NO_SLOT);
            client.write_arena(0, &[7; COPIED as usize]);
            client.htod(address, arena(0, COPIED));
            for slot in 0..2 {
                assert!(client.answer(slot).0.status.ok().is_ok());
            }
            client
        })
    }

    fn begin_protected(&self, server: &Server) -> JoinHandle<Client> {
        let machine = joined(server, "host1");
        machine.pin(self.middle.port, servers::known(machine.folder.path()).unwrap()[0].key);
        self.begin(server, machine, None)
    }

    /// The session's own connections under TLS.
    fn own(&self) -> &[Held] {
        &self.all[DAEMON + 1..]
    }

    fn connections(&self) -> usize {
        self.middle.connections.lock().unwrap().len()
    }

    /// Cuts the session's own connections under TLS.
    fn cut_own(&self) {
        let own = self.middle.connections.lock().unwrap().split_off(DAEMON + 1);
        own.iter().flatten().for_each(|side| side.shutdown(Shutdown::Both).unwrap());
    }
}

/// Bytes that are copied to the device at a session's start. They are not sent with their command.
const COPIED: u64 = 100_000;

fn counted(server: &Server, name: &str) -> u64 {
    server.status()["sessions"][0][name].as_u64().unwrap_or(0)
}

fn commands(server: &Server) -> u64 {
    counted(server, "commands")
}

/// Plays a session's start until the client has made no connection besides its first ones. It makes others if
/// it hears nothing for two seconds, as on a busy machine while its answers are held back. If the start
/// needed one of these answers, it would come to its end in no other way.
fn undisturbed(start: impl Fn() -> bool) {
    assert!((0..20).any(|_| start()), "the client has made further connections each time");
}

/// Each step is a round trip, and nothing before its end needs another answer.
#[test]
fn a_programs_first_command_and_its_first_data_come_after_four_round_trips() {
    undisturbed(four_round_trips);
}

fn four_round_trips() -> bool {
    let server = Server::start_protected(&[]);
    let holding = Holding::between(server.port, false);
    let disturbed = || holding.connections() > CONNECTIONS;
    let client = holding.begin_protected(&server);
    // First the connection, second the daemon's part of TLS's handshake. The hello went along with the
    // client's.
    until("the daemon has welcomed the session", || holding.all[DAEMON].holds());
    // Third its welcome, and meanwhile the connections to the worker.
    until("there are all connections", || holding.connections() >= CONNECTIONS);
    holding.all[DAEMON].pass();
    // Fourth the worker's part of TLS's handshakes. Hello and what is sent went along with the client's.
    until("the worker has welcomed the connections", || disturbed() || holding.own().iter().all(Held::holds));
    until("the commands are executed", || disturbed() || commands(&server) == 4);
    until("the data has come", || disturbed() || counted(&server, "bytes_in") == COPIED);
    let undisturbed = !disturbed();
    holding.own().iter().for_each(Held::pass);
    let mut client = client.join().unwrap();
    works(&mut client);
    drop(client);
    until("the session is over", || server.sessions() == 0);
    assert_eq!((server.number("sessions_begun"), server.number("sessions_lost")), (1, 0));
    undisturbed
}

/// The same without TLS.
#[test]
fn without_tls_a_programs_first_command_and_its_first_data_come_after_two_round_trips() {
    undisturbed(two_round_trips);
}

fn two_round_trips() -> bool {
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let server = Server::start_by(Command::new(binary()), &folder, free_port(), &[]).ready();
    let holding = Holding::between(server.port, false);
    let disturbed = || holding.connections() > CONNECTIONS - 1;
    let client = holding.begin(&server, Machine::new(), Some(Security::Insecure));
    let (control, data) = holding.all[..CONNECTIONS - 1].split_first().unwrap();
    // First the connection. Second the welcome, and meanwhile the connections for data.
    until("the daemon has welcomed the session", || control.holds());
    until("there are all connections", || holding.connections() >= CONNECTIONS - 1);
    control.pass();
    until("the server has welcomed the connections", || disturbed() || data.iter().all(Held::holds));
    until("the commands are executed", || disturbed() || commands(&server) == 4);
    until("the data has come", || disturbed() || counted(&server, "bytes_in") == COPIED);
    let undisturbed = !disturbed();
    data.iter().for_each(Held::pass);
    let mut client = client.join().unwrap();
    works(&mut client);
    assert!(!undisturbed || resumed(&server) == 0);
    undisturbed
}

#[test]
fn a_session_begins_though_the_connections_that_were_kept_for_it_are_cut() {
    let server = Server::start_protected(&[]);
    let holding = Holding::between(server.port, false);
    let client = holding.begin_protected(&server);
    until("there are all connections", || holding.connections() >= CONNECTIONS);
    until("the daemon has welcomed the session", || holding.all[DAEMON].holds());
    holding.cut_own();
    holding.all[DAEMON].pass();
    let mut client = client.join().unwrap();
    works(&mut client);
    assert!(!holding.own().iter().any(Held::holds));
    assert_eq!(resumed(&server), 0);
}

/// The client continues as soon as it knows the worker, even though the worker has not seen the hellos yet.
#[test]
fn a_session_goes_on_whose_connections_are_lost_with_the_hellos_and_what_came_behind_them() {
    let server = Server::start_protected(&[]);
    let holding = Holding::between(server.port, true);
    let client = holding.begin_protected(&server);
    until("there are all connections", || holding.connections() >= CONNECTIONS);
    holding.all[DAEMON].pass();
    until("the client believes that its session has begun", || holding.begun.load(Ordering::SeqCst));
    until("nothing of it has come", || holding.own().iter().all(Held::holds));
    assert_eq!(commands(&server), 0);
    holding.cut_own();
    let mut client = client.join().unwrap();
    works(&mut client);
    until("the session has resumed", || resumed(&server) >= 1);
    assert_eq!(client.lost(), None);
}

#[test]
fn commands_behind_a_hello_are_executed_only_if_it_is_welcome() {
    let server = Server::start_protected(&[]);
    let machine = joined(&server, "one");
    let (_daemon, welcome) = greeted(&server, &machine, &hello(purpose::CONTROL, [0; 16], 1));
    let right = Hello { secret: welcome.secret, ..hello(purpose::CONTROL, welcome.token, 0) };
    let info = record(1, SessionInfo::INFO.opcode, 0, &[]);
    let header = FrameHeader { kind: frame::COMMANDS, len: info.len() as u32 };
    let say = |hello: &Hello| {
        let stream = to_session(&server, &machine, &welcome).unwrap();
        stream.write_all(&[hello.as_bytes(), header.as_bytes(), &info].concat()).unwrap();
        stream
    };
    // Each connection may be reset before its answer is read: not all that came on it was taken.
    for wrong in [Hello { secret: [7; 32], ..right }, Hello { fingerprint: !right.fingerprint, ..right }] {
        let stream = say(&wrong);
        assert!(hear(&stream).is_err() || stream.read_exact(&mut [0]).is_err());
    }
    let control = say(&right);
    assert_eq!(hear(&control).unwrap().status, 0);
    let mut body = Vec::new();
    until("the answer", || control.recv_frame(&mut body).unwrap() == Some(frame::REPLY));
    until("the command is counted", || commands(&server) > 0);
    assert_eq!(commands(&server), 1);
}

/// All traffic, by connection and direction.
type Passed = Arc<Mutex<Vec<((usize, bool), Vec<u8>)>>>;

/// A man in the middle that forwards everything, and the traffic.
fn recording(server: u16) -> (Middle, Passed) {
    let passed = Passed::default();
    let to = Arc::clone(&passed);
    let middle = Middle::between(server, move |number, upwards, _at, bytes| {
        to.lock().unwrap().push(((number, upwards), bytes.clone()));
        bytes
    });
    (middle, passed)
}

#[test]
fn somebody_who_reads_everything_finds_no_secret_and_can_replay_nothing() {
    let server = Server::start_protected(&[]);
    let token = enroll(&server, "host1");
    let (Middle { port, .. }, passed) = recording(server.port);
    let machine = Machine::new();
    let credentials = Credentials::pinning(machine.identity(), token.server).unwrap();
    join(&address(port), &credentials, &token.secret).unwrap();
    machine.pin(port, token.server);
    let mut client = machine.try_connect(port).unwrap();
    works(&mut client);
    let marker = b"the bytes of a program that nobody else may read";
    client.write_arena(0, marker);
    client.htod(window(0), arena(0, marker.len() as u64));
    client.synchronize();
    let passed = passed.lock().unwrap().clone();
    let mut whole = std::collections::HashMap::<_, Vec<u8>>::new();
    for (way, bytes) in passed {
        whole.entry(way).or_default().extend(bytes);
    }
    assert!(whole.len() >= 12, "{} directions", whole.len());
    let finds = |what: &[u8]| whole.values().any(|bytes| bytes.windows(what.len()).any(|w| w == what));
    assert!(!finds(&token.secret.0) && !finds(marker) && !finds(b"test-program") && !finds(b"rGPUlink"));
    // Replaying a client's bytes from elsewhere achieves nothing.
    let before = server.status()["sessions_begun"].clone();
    for ((_, upwards), bytes) in &whole {
        if *upwards {
            let mut replay = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
            replay.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            // It may be cut off before the end.
            let _ = replay.write_all(bytes);
            let _ = replay.read_to_end(&mut Vec::new());
        }
    }
    assert_eq!(server.status()["sessions_begun"], before);
    client.push(&SessionInfo {}, 0);
    assert!(client.answer(0).0.status.ok().is_ok());
}

/// What a man in the middle does to bytes from `place` on: forge one, leave the rest out, reorder, or repeat.
fn meddle(kind: usize, place: usize, bytes: &mut Vec<u8>) {
    match kind % 4 {
        0 => bytes[place] ^= 1,
        1 => bytes.truncate(place),
        2 => bytes[place..].reverse(),
        _ => bytes.extend_from_within(place..),
    }
}

/// A man in the middle who meddles with byte `at` of one direction of each connection that `which` selects.
/// The number says how often he has changed something.
fn meddling(
    server: u16,
    kind: usize,
    at: usize,
    up: bool,
    which: impl Fn(usize) -> bool + Send + Sync + 'static,
) -> (Middle, Arc<AtomicUsize>) {
    let hits = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&hits);
    let middle = Middle::between(server, move |connection, upwards, offset, mut bytes| {
        if upwards == up && which(connection) && (offset..offset + bytes.len()).contains(&at) {
            let before = bytes.clone();
            meddle(kind, at - offset, &mut bytes);
            counted.fetch_add(usize::from(bytes != before), Ordering::SeqCst);
        }
        bytes
    });
    (middle, hits)
}

#[test]
fn whoever_forges_drops_swaps_or_repeats_bytes_during_the_setup_gets_nothing_accepted() {
    let server = Server::start_protected(&[]);
    let machine = joined(&server, "host1");
    let key = servers::known(machine.folder.path()).unwrap()[0].key;
    let info = |client: &mut Client| {
        client.push(&SessionInfo {}, 0);
        let mut payload = Vec::new();
        until("an answer, or the session's end", || {
            client.lost().is_some() || client.view().slot(0).unwrap().poll(&mut payload).is_some()
        });
        payload
    };
    let begun = Instant::now();
    let right = info(&mut machine.try_connect(server.port).unwrap());
    assert!(!right.is_empty());
    // Connections that are held end soon, but not before a busy machine has come to the byte in question.
    let patience = (begun.elapsed() * 10).max(Duration::from_secs(2));
    let (mut tries, mut hit) = (0, 0);
    // The setup takes a few hundred bytes each way on each connection, a few thousand in all.
    for (step, at) in (0..2400).step_by(298).enumerate() {
        // The session's data connections begin as its first connection does: fewer of them are enough.
        for number in 0..if step % 4 == 0 { CONNECTIONS } else { 2 } {
            for upwards in [true, false] {
                let kind = step + number;
                until("a worker is ready", || server.number("workers_ready") > 0);
                let (middle, hits) = meddling(server.port, kind, at, upwards, move |other| other == number);
                machine.pin(middle.port, key);
                let mut config = machine.config(middle.port);
                (config.connect_timeout, config.handshake_timeout) = (patience, patience);
                // There is no session, or one that works or is over: never a wrong answer.
                if let Ok(mut client) = Client::try_connect(&config) {
                    let answer = info(&mut client);
                    assert!(answer == right || client.lost().is_some(), "{number} {upwards} {at} {kind}");
                }
                tries += 1;
                hit += usize::from(hits.load(Ordering::SeqCst) > 0);
            }
        }
    }
    assert!(hit > tries / 3, "{hit} of {tries} changed something");
    // None of this has harmed anyone else.
    works(&mut machine.try_connect(server.port).unwrap());
}

#[test]
fn whoever_meddles_while_a_machine_joins_becomes_nobody_and_spoils_no_token() {
    let server = Server::start_protected(&[]);
    let known = |name: &str| {
        let answer = server.ask(json!({ "clients": {} }));
        let all = answer["clients"].as_array().unwrap().clone();
        all.into_iter().find(|client| client["name"] == name).map(|client| client["key"].clone())
    };
    let mut hit = 0;
    for (step, at) in (0..1500).step_by(311).enumerate() {
        for upwards in [true, false] {
            let name = format!("host{step}{upwards}");
            let (token, machine) = (enroll(&server, &name), Machine::new());
            let credentials = Credentials::pinning(machine.identity(), token.server).unwrap();
            // Whoever leaves bytes out makes both sides wait for the rest: not here.
            let kind = [0, 2, 3][step % 3];
            let (middle, hits) = meddling(server.port, kind, at, upwards, |_| true);
            let answer = join(&address(middle.port), &credentials, &token.secret);
            let own = json!(machine.identity().fingerprint().to_string());
            match known(&name) {
                // The server has heard the right client, and perhaps the client has not heard that.
                Some(key) => assert_eq!(key, own),
                None => {
                    assert!(answer.is_err());
                    // The server may still be about to hear it.
                    match machine.join(&server, &token) {
                        Ok(joined) => assert_eq!(joined, name),
                        Err(why) => assert_eq!(known(&name), Some(own), "{why}"),
                    }
                }
            }
            hit += hits.load(Ordering::SeqCst);
        }
    }
    assert!(hit > 3, "{hit} changes");
}

#[test]
fn whoever_meddles_while_a_session_resumes_only_delays_it() {
    let server = Server::start_protected(&[]);
    let machine = joined(&server, "host1");
    let key = servers::known(machine.folder.path()).unwrap()[0].key;
    let mut hit = 0;
    for (kind, (at, upwards)) in [(5, true), (390, false), (700, true), (1100, false)].into_iter().enumerate()
    {
        // As many connections as a link has: the next ones pass.
        let first = Arc::new(AtomicUsize::new(usize::MAX));
        let from = Arc::clone(&first);
        let (middle, hits) = meddling(server.port, kind, at, upwards, move |number| {
            let first = from.load(Ordering::SeqCst);
            number >= first && number - first < CONNECTIONS
        });
        machine.pin(middle.port, key);
        let mut client = machine.try_connect(middle.port).unwrap();
        works(&mut client);
        first.store(middle.connections.lock().unwrap().len(), Ordering::SeqCst);
        middle.cut();
        works_on(&mut client, kind as u64);
        until("the session has resumed", || resumed(&server) > 0);
        hit += usize::from(hits.load(Ordering::SeqCst) > 0);
        drop(client);
        until("the session is over", || server.sessions() == 0);
    }
    assert!(hit > 1, "{hit} of 4 changed something");
}

/// A machine's first session, through a man in the middle that forwards everything.
fn through_a_middle(server: &Server, name: &str) -> (Machine, Middle, Client) {
    let machine = joined(server, name);
    let middle = Middle::between(server.port, |_, _, _, bytes| bytes);
    machine.pin(middle.port, servers::known(machine.folder.path()).unwrap()[0].key);
    let mut client = machine.try_connect(middle.port).unwrap();
    works(&mut client);
    (machine, middle, client)
}

fn resumed(server: &Server) -> u64 {
    server.status()["sessions"][0]["resumed"].as_u64().unwrap()
}

#[test]
fn a_session_goes_on_under_tls_when_its_connections_are_cut() {
    let server = Server::start_protected(&[]);
    let (_machine, middle, mut client) = through_a_middle(&server, "host1");
    let bytes: Vec<u8> = (0..1_500_000u32).map(|n| (n.wrapping_mul(89) >> 3) as u8).collect();
    for round in 1..=4 {
        // The first link also has a connection to the daemon, besides its own five. A session continues with
        // the first of the five; the others follow a moment later.
        middle.stands(if round == 1 { 6 } else { 5 });
        client.write_arena(0, &bytes);
        client.write_arena(2 << 20, &vec![0; bytes.len()]);
        // Data is in flight in both directions.
        client.htod(window(0), arena(0, bytes.len() as u64));
        client.dtoh(window(0), arena(2 << 20, bytes.len() as u64));
        middle.cut();
        client.synchronize();
        assert!(client.read_arena(2 << 20, bytes.len() as u64) == bytes);
        until("the session has resumed", || resumed(&server) >= round);
        assert_eq!(client.lost(), None);
    }
    let session = &server.status()["sessions"][0];
    assert_eq!(session["principal"], "host1");
    // The server does not keep a session that its client has ended.
    drop(client);
    until("the session is over", || server.sessions() == 0);
    assert_eq!(server.number("sessions_lost"), 0);
}

#[test]
fn a_session_under_tls_resumes_and_is_revoked_under_the_next_daemon() {
    let server = Server::start_protected(&[]);
    let (_machine, middle, mut client) = through_a_middle(&server, "host1");
    let upgraded = |times: u64| {
        let before = |status: &serde_json::Value| status["sessions"][0]["daemons_before"].as_u64();
        server.try_status().as_ref().and_then(before) == Some(times)
    };
    for round in 1..=2 {
        server.signal(nix::sys::signal::Signal::SIGUSR2);
        until("the next program serves", || upgraded(round));
        // Its connections end in its worker, so it has noticed nothing. Now they are cut, and the next daemon
        // passes new ones on.
        middle.cut();
        works_on(&mut client, round);
        until("the session has resumed", || resumed(&server) >= round);
    }
    assert_eq!(server.ask(json!({ "revoke": { "name": "host1" } })), json!({ "ended_sessions": 1 }));
    let reason = client.wait_lost();
    assert!(reason.contains("revoked") || reason.contains("does not know this client's key"), "{reason}");
}

/// Copies data to the device and back in a session that has done so before.
fn works_on(client: &mut Client, seed: u64) {
    let bytes: Vec<u8> = (0..1_500_000u64).map(|n| (n.wrapping_mul(83 + seed) >> 4) as u8).collect();
    client.write_arena(0, &bytes);
    client.htod(window(0), arena(0, bytes.len() as u64));
    client.dtoh(window(0), arena(2 << 20, bytes.len() as u64));
    client.synchronize();
    assert!(client.read_arena(2 << 20, bytes.len() as u64) == bytes);
}

#[test]
fn a_session_that_ends_while_its_connections_are_cut_is_told_so() {
    let mut server = Server::start_protected(&[]);
    let (_one, middle, client) = through_a_middle(&server, "one");
    // The client is revoked, and the message that says so never arrives.
    middle.cut();
    server.ask(json!({ "revoke": { "name": "one" } }));
    let reason = client.wait_lost();
    assert!(reason.contains("does not know this client's key") || reason.contains("was revoked"), "{reason}");
    let (_other, middle, client) = through_a_middle(&server, "other");
    let (folder, port) = (Arc::clone(server.folder()), server.port);
    // The server ends at once, and another one with the same key takes its place.
    middle.cut();
    server.end(nix::sys::signal::Signal::SIGKILL);
    drop(server);
    let _successor = Server::start_protected_at(&folder, port, &[]);
    let reason = client.wait_lost();
    assert!(reason.contains("no session has this token and this secret"), "{reason}");
}

#[test]
fn no_worker_has_the_servers_key() {
    let server = Server::start_protected(&[]);
    let machine = joined(&server, "host1");
    let (_daemon, welcome) = greeted(&server, &machine, &hello(purpose::CONTROL, [0; 16], 1));
    let hello = Hello { secret: welcome.secret, ..hello(purpose::CONTROL, welcome.token, 0) };
    let _control = of_session(&server, &machine, &welcome, &hello).unwrap();
    let worker = server.status()["sessions"][0]["worker"].as_u64().unwrap();
    let pem = std::fs::read_to_string(key_file(server.folder().path())).unwrap();
    let identity = Identity::load(&server.path("identity")).unwrap().unwrap();
    // The key in PEM, and as the library uses it: 32 bytes after these five, in either order.
    let middle = pem.lines().nth(1).unwrap();
    let whole = base64::engine::general_purpose::STANDARD
        .decode(pem.lines().filter(|line| !line.starts_with('-')).collect::<String>())
        .unwrap();
    let at = whole.windows(5).position(|bytes| bytes == [2, 1, 1, 4, 32]).unwrap() + 5;
    let scalar = &whole[at..at + 32];
    let backwards: Vec<u8> = scalar.iter().rev().copied().collect();
    let finds = |bytes: &[u8]| test_kit::daemon::memory_contains(worker, bytes);
    match finds(&welcome.secret) {
        // Only root can look into a worker.
        None => assert!(!nix::unistd::geteuid().is_root()),
        Some(found) => {
            assert!(found, "the secret of the worker's own session is to be found");
            for key in [middle.as_bytes(), scalar, &backwards] {
                assert_eq!(finds(key), Some(false));
            }
        }
    }
    assert_ne!(Fingerprint(welcome.session_key), identity.fingerprint());
}

#[test]
fn insecure_on_one_side_alone_says_what_to_do() {
    let server = Server::start(&[]);
    assert!(
        server.log().contains("--insecure: connections over tcp are neither encrypted nor authenticated")
    );
    let machine = Machine::new();
    machine.pin(server.port, machine.identity().fingerprint());
    let refusal = machine.try_connect(server.port).err().unwrap();
    assert!(refusal.contains("does not speak TLS") && refusal.contains("--insecure"), "{refusal}");
    assert_eq!(server.sessions(), 0);
    // What this machine would need to join.
    let answer = Server::start_protected(&["--insecure"]).ask(json!({ "clients": {} }));
    let refusal = answer["error"].as_str().unwrap();
    assert!(refusal.contains("without --insecure"), "{refusal}");
    // The other way round.
    let server = Server::start_protected(&[]);
    assert!(!server.log().contains("--insecure"));
    let config = SessionConfig { security: Security::Insecure, ..machine.config(server.port) };
    let refusal = with_causes(&Client::try_connect(&config).err().unwrap());
    assert!(refusal.contains("rgpuctl join") && refusal.contains("--insecure"), "{refusal}");
    assert_eq!(server.sessions(), 0);
}

#[test]
fn strangers_cannot_flood_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit");
    let server = Server::start_protected(&[&format!("--audit-log={}", audit.display())]);
    let strange = || {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        // Neither TLS nor rgpu, or rgpu without TLS.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
        let stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        let welcome = greet(&stream, &hello(purpose::CONTROL, [0; 16], 1)).unwrap();
        assert_eq!(welcome.status, Answer::Denied as u32);
    };
    // A line is written for each second, so a slow machine needs more strangers until some are left out.
    let mut count = 0;
    until("lines are left out, and that is said", || {
        for _ in 0..30 {
            strange();
        }
        count += 60;
        server.log().contains("earlier messages not shown")
    });
    let lines = |text: &str, what: &str| text.lines().filter(|line| line.contains(what)).count();
    let log = server.log();
    let written = lines(&log, "closed in its handshake") + lines(&log, "refused: ");
    assert!(written < count, "{written} lines of {count} strangers");
    until("refusals are in the audit log", || {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        lines(&text, "refused") == lines(&server.log(), "refused: ")
    });
    // A client is still heard.
    works(&mut joined(&server, "host1").try_connect(server.port).unwrap());
    assert!(server.log().contains("session begins"));
}

#[test]
fn silent_connections_of_one_source_lock_nobody_out_and_cost_no_thread() {
    let server = Server::start_protected(&[]);
    let machine = joined(&server, "host1");
    until_idle(|| family(server.pid()));
    let (_, threads) = server.resources();
    let mut silent = Vec::new();
    for round in 0..4 {
        for n in 0..128 {
            let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
            // Some send a little: the beginning of a TLS record, or of a hello.
            match n % 3 {
                0 => stream.write_all(&[22, 3, 1, 2, 0, 1]).unwrap(),
                1 => stream.write_all(b"rGPU").unwrap(),
                _ => {}
            }
            silent.push(stream);
        }
        works(&mut machine.try_connect(server.port).unwrap_or_else(|e| panic!("round {round}: {e}")));
        LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
    }
    until("the sessions are over", || server.sessions() == 0);
    // Threads end a moment after what they have done.
    until("silent connections have no threads and few descriptors", || {
        let (descriptors, now) = server.resources();
        now <= threads + 4 && descriptors < 200
    });
    drop(silent);
}

#[test]
fn a_token_cannot_be_used_without_tls_and_names_that_mislead_cannot_be_enrolled() {
    let server = Server::start_protected(&[]);
    let token = enroll(&server, "host1");
    let stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let joining = Hello { secret: token.secret.0, ..hello(purpose::JOIN, [0; 16], 0) };
    assert_ne!(greet(&stream, &joining).unwrap().status, 0);
    // It was not used up.
    let machine = Machine::new();
    machine.join(&server, &token).unwrap();
    let answer = server.ask(json!({ "enroll": { "name": "uid:0", "valid_seconds": 60 } }));
    assert!(answer["error"].as_str().unwrap().contains("is not a name"), "{answer}");
    let guess = Credentials::pinning(Identity::generate().unwrap(), token.server).unwrap();
    assert!(join(&address(server.port), &guess, &Secret([0; 32])).is_err());
}
