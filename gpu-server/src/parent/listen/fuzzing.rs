//! Peers that do whatever they like with their connections to the daemon, as a fuzzer says: bytes of any
//! kind, hellos, TLS that is changed on its way, connections that say nothing.
//!
//! [`handshake_any`] drives a [`Greeter`] as its thread does, on a daemon without workers. It checks that
//! silent connections keep to their limits, that only who has a client's key is taken for one, and that what
//! a peer reads in the clear is a welcome or a TLS record.

use std::io::{Cursor, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use handover::Inherited;
use identity::principals::now;
use identity::{Identity, tls};
use protocol::device::Answer;
use protocol::fuzzing::Steps;
use protocol::link::{Hello, MAGIC, Welcome, purpose};
use protocol::version::OURS;
use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::asks;
use super::super::state::{Server, State};
use super::{Arrival, Greeter, HELLO_WITHIN, MAX_SILENT, MAX_SILENT_OF_ONE, Phase, Socket, Source};
use crate::config::Serve;

/// Steps of one program, and its connections.
const STEPS: usize = 120;
const CONNECTIONS: usize = 100;

/// A daemon that speaks TLS, one that does not, and the keys of a client and of somebody.
struct Fixture {
    servers: [Arc<Server>; 2],
    client: Identity,
    stranger: Identity,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = std::env::temp_dir().join(format!("rgpu-fuzz-{}", std::process::id()));
        let server = |insecure: &str| {
            let folder = folder.to_str().expect("a path in UTF-8");
            let flags = ["--listen=tcp:127.0.0.1:1", "--identity", folder, insecure];
            let server = Server::new(Serve::from_flags(&flags), &mut Inherited::default());
            let server = Arc::new(server.expect("a daemon"));
            asks::start(&server).expect("a thread");
            server
        };
        let servers = [server("--insecure=false"), server("--insecure=true")];
        let client = Identity::generate().expect("a key");
        let trust = servers[0].trust.as_ref().expect("it speaks TLS");
        let secret = trust.enroll("fuzz", Duration::from_secs(60)).expect("a token");
        trust.change(|all| all.join(&secret, client.fingerprint(), now())).expect("a client");
        // What is in it is in memory, too.
        let _ = std::fs::remove_dir_all(&folder);
        Fixture { servers, client, stranger: Identity::generate().expect("a key") }
    }
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(Fixture::new);
/// Programs share the daemons, and so run one after the other.
static ONE: Mutex<()> = Mutex::new(());

/// A peer's end of a connection.
struct Peer {
    stream: UnixStream,
    number: u64,
    tls: Option<ClientConnection>,
    /// It has the key of a client, and what it says under TLS is what the client says.
    is_client: bool,
    read: Vec<u8>,
}

/// Runs a program, whatever it is. Gives how many clients wait for a worker in the end.
pub fn handshake_any(bytes: &[u8]) -> usize {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut steps = Steps::new(bytes);
    let server = &FIXTURE.servers[usize::from(steps.byte() & 1)];
    let greeter = Greeter::new(Arc::clone(server), Vec::new()).expect("a greeter");
    let mut program = Program { server, greeter, peers: Vec::new(), opened: 0, now: Instant::now() };
    for _ in 0..STEPS {
        if steps.is_over() {
            break;
        }
        program.step(&mut steps);
        program.check();
    }
    for at in 0..program.peers.len() {
        program.hear(at);
    }
    let State { gpu, nvml, .. } = std::mem::take(&mut *server.lock());
    let waiting = gpu.queue.len() + nvml.queue.len();
    if server.trust.is_some() && !program.peers.iter().any(|peer| peer.is_client) && program.opened == 0 {
        assert_eq!(waiting, 0, "somebody without a client's key waits for a worker");
    }
    waiting
}

struct Program<'p> {
    server: &'p Arc<Server>,
    greeter: Greeter,
    peers: Vec<Peer>,
    /// Connections that a client's key, or a Unix socket, may have opened a session over.
    opened: usize,
    now: Instant,
}

impl Program<'_> {
    fn step(&mut self, steps: &mut Steps<'_>) {
        let at = steps.below(self.peers.len().max(1));
        match steps.below(12) {
            0 | 1 => {
                let (count, how) = (steps.byte() % 8, steps.byte());
                (0..=count).for_each(|_| self.connect(how));
            }
            _ if self.peers.is_empty() => {}
            2 | 3 => self.say(at, steps.bytes()),
            4 | 5 => {
                let hello = hello(steps);
                let cut = hello.len().min(usize::from(steps.byte()) * 4);
                let hello = if steps.byte() < 200 { &hello[..] } else { &hello[..cut] };
                match self.peers[at].tls.as_mut() {
                    Some(tls) => drop(tls.writer().write_all(hello)),
                    None => self.say(at, hello),
                }
            }
            6..=8 => self.pump(at, steps),
            9 => {
                let peer = self.peers.swap_remove(at);
                self.opened += usize::from(peer.is_client);
                drop(peer.stream);
                self.greeter.advance(peer.number);
            }
            10 => {
                self.now += HELLO_WITHIN / 4;
                self.greeter.close_late(self.now);
            }
            _ => self.hear(at),
        }
    }

    fn check(&self) {
        let Greeter { silent, groups, .. } = &self.greeter;
        assert!(silent.len() <= MAX_SILENT && groups.values().all(|all| all.len() <= MAX_SILENT_OF_ONE));
        assert_eq!(silent.len(), groups.values().map(|all| all.len()).sum::<usize>());
        for (number, arrival) in silent {
            assert!(groups[&arrival.group()].contains(number));
            if let Phase::Plain(said) | Phase::Tls(_, said, _) = &arrival.phase {
                assert!(said.len() <= super::MAX_SAID);
            }
        }
    }

    fn connect(&mut self, how: u8) {
        if self.peers.len() >= CONNECTIONS {
            return;
        }
        let Ok((ours, theirs)) = UnixStream::pair() else { return };
        ours.set_nonblocking(true).expect("a socket");
        let local = how % 8 == 7;
        let source = if local { Source::Here } else { Source::V4([10, 0, 0, how >> 6]) };
        let (socket, phase) = match local {
            true => (Socket::Unix(theirs), Phase::Plain(Vec::new())),
            // What is done with a TCP socket can be done with any other.
            false => (Socket::Tcp(OwnedFd::from(theirs).into()), Phase::First),
        };
        let (peer, until) = (format!("10.0.0.{}:9", how >> 6), self.now + HELLO_WITHIN);
        let number = self.greeter.next;
        self.greeter.admit(Arrival { socket, source, peer, until, phase });
        let identity = [None, Some(&FIXTURE.client), Some(&FIXTURE.stranger), None][usize::from(how) % 4];
        let identity = identity.filter(|_| !local);
        let tls = identity.map(|identity| {
            let server = FIXTURE.servers[0].trust.as_ref().map(super::super::Trust::fingerprint);
            let config =
                tls::client_pinning(identity, &[server.expect("it speaks TLS")]).expect("a configuration");
            let name = match how & 0x30 {
                0 => tls::session_name(&[how; 16]),
                _ => ServerName::try_from("localhost").expect("a name"),
            };
            ClientConnection::new(config, name).expect("a client")
        });
        let is_client = local || identity.is_some_and(|identity| std::ptr::eq(identity, &FIXTURE.client));
        self.peers.push(Peer { stream: ours, number, tls, is_client, read: Vec::new() });
    }

    /// A peer sends bytes as they are.
    fn say(&mut self, at: usize, bytes: &[u8]) {
        let peer = &mut self.peers[at];
        // It may be closed, or full.
        let _ = peer.stream.write(bytes);
        let number = peer.number;
        self.greeter.advance(number);
    }

    /// A peer's TLS goes on. What it sends may be changed on its way.
    fn pump(&mut self, at: usize, steps: &mut Steps<'_>) {
        self.receive(at);
        let peer = &mut self.peers[at];
        let Some(tls) = peer.tls.as_mut() else { return };
        let mut heard = Cursor::new(std::mem::take(&mut peer.read));
        while tls.read_tls(&mut heard).is_ok_and(|n| n > 0) {
            if tls.process_new_packets().is_err() {
                break;
            }
        }
        let mut out = Vec::new();
        while tls.wants_write() && tls.write_tls(&mut out).is_ok_and(|n| n > 0) {}
        match steps.byte() {
            255 if !out.is_empty() => {
                let place = usize::from(steps.u16()) % out.len();
                out[place] ^= steps.byte() | 1;
            }
            254 => out.truncate(usize::from(steps.u16())),
            253 => out.extend(steps.bytes()),
            _ => {}
        }
        let cut = usize::from(steps.byte()).min(out.len());
        let (first, rest) = out.split_at(cut);
        let parts = [first.to_vec(), rest.to_vec()];
        parts.iter().filter(|part| !part.is_empty()).for_each(|part| self.say(at, part));
    }

    fn receive(&mut self, at: usize) {
        let peer = &mut self.peers[at];
        let mut part = [0; 4096];
        while let Ok(n @ 1..) = peer.stream.read(&mut part) {
            peer.read.extend_from_slice(&part[..n]);
        }
    }

    /// Looks at what a peer without TLS was told.
    fn hear(&mut self, at: usize) {
        self.receive(at);
        let peer = &self.peers[at];
        if peer.tls.is_some() || peer.read.is_empty() {
            return;
        }
        // An alert, or the server's side of a handshake that the peer's bytes began.
        if matches!(peer.read[0], 20..=23) {
            return;
        }
        let (welcome, _) = Welcome::read_from_prefix(&peer.read).expect("a whole welcome");
        assert_eq!(welcome.magic, MAGIC);
        let refused = welcome.status != Answer::Ok as u32;
        assert!(!refused || welcome.reason[0] != 0 || welcome.ahead > 0, "a refusal without a reason");
        if self.server.trust.is_some() && !peer.is_client {
            assert!(refused, "somebody without a key is welcome");
        }
    }
}

/// What a peer says first.
fn hello(steps: &mut Steps<'_>) -> Vec<u8> {
    let mut hello = Hello::new_zeroed();
    (hello.magic, hello.version, hello.fingerprint) = (MAGIC, OURS.version(), OURS.fingerprint());
    hello.purpose = steps.pick(&[
        purpose::CONTROL,
        purpose::CONTROL,
        purpose::LOCAL,
        purpose::VERBS,
        purpose::DATA,
        purpose::RESUME,
        purpose::END,
        purpose::JOIN,
        purpose::DIRECT,
        purpose::ASK,
        purpose::ASK,
    ]);
    hello.wishes = steps.byte().into();
    hello.index = u32::from(steps.byte());
    hello.slot_count = steps.number() as u32;
    hello.attempt = steps.byte().into();
    match steps.byte() {
        250 => hello.token = [steps.byte(); 16],
        251 => hello.secret = [steps.byte(); 32],
        252 => hello.devices = [steps.byte(); 32],
        253 => hello.purpose = steps.number() as u32,
        254 => hello.fingerprint = steps.u64(),
        255 => hello.magic = steps.u64(),
        any => hello.client[0] = any,
    }
    let mut bytes = hello.as_bytes().to_vec();
    if hello.purpose == purpose::ASK {
        let questions: [&[u8]; 4] = [
            br#"{"ask":"inventory"}"#,
            br#"{"ask":"lease","gpus":1,"seconds":60}"#,
            br#"{"ask":"renew","key":"00"}"#,
            steps.bytes(),
        ];
        let question = steps.pick(&questions);
        let len = (question.len() as u32).to_le_bytes();
        let index = std::mem::offset_of!(Hello, index);
        bytes[index..index + 4].copy_from_slice(&len);
        bytes.extend_from_slice(question);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_clients_keep_ready_take_no_place_of_those_that_shake_hands() {
        let _one = ONE.lock().unwrap();
        let mut greeter = Greeter::new(Arc::clone(&FIXTURE.servers[0]), Vec::new()).unwrap();
        let mut admit = |says: &[u8]| {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            ours.write_all(says).unwrap();
            let (number, socket) = (greeter.next, Socket::Tcp(OwnedFd::from(theirs).into()));
            let (source, until) = (Source::V4([10, 0, 0, 1]), Instant::now() + HELLO_WITHIN);
            greeter.admit(Arrival { socket, source, peer: String::new(), until, phase: Phase::First });
            (number, ours)
        };
        // The beginning of a client's part of TLS's handshake.
        let hello = &[22, 3, 1, 2, 0, 1];
        let busy: Vec<_> = (0..MAX_SILENT_OF_ONE).map(|_| admit(hello)).collect();
        let ready: Vec<_> = (0..2 * MAX_SILENT_OF_ONE).map(|_| admit(&[])).collect();
        let (oldest, (late, stream)) = (busy[0].0, ready.last().unwrap());
        let is_kept = |greeter: &Greeter, number| greeter.silent.contains_key(&number);
        assert!(busy.iter().all(|(number, _)| is_kept(&greeter, *number)));
        assert_eq!(greeter.silent.len(), 2 * MAX_SILENT_OF_ONE);
        // One that is used counts with the others from then on.
        (&*stream).write_all(hello).unwrap();
        greeter.advance(*late);
        assert!(is_kept(&greeter, *late) && !is_kept(&greeter, oldest));
        assert_eq!(greeter.silent.len(), 2 * MAX_SILENT_OF_ONE - 1);
    }

    #[test]
    fn who_sends_tls_forever_without_a_hello_is_closed() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let server = &FIXTURE.servers[0];
        let greeter = Greeter::new(Arc::clone(server), Vec::new()).unwrap();
        let mut program = Program { server, greeter, peers: Vec::new(), opened: 0, now: Instant::now() };
        // A stranger's key, and no session's name.
        program.connect(0x12);
        let shakes_hands = |program: &Program<'_>| program.peers[0].tls.as_ref().unwrap().is_handshaking();
        while shakes_hands(&program) {
            program.pump(0, &mut Steps::new(&[]));
        }
        let mut hello = Hello::new_zeroed();
        (hello.magic, hello.version, hello.fingerprint) = (MAGIC, OURS.version(), OURS.fingerprint());
        // As many new keys as the library allows before there must be data again.
        for byte in &hello.as_bytes()[..size_of::<Hello>() - 1] {
            let tls = program.peers[0].tls.as_mut().unwrap();
            tls.writer().write_all(&[*byte]).unwrap();
            (0..31).for_each(|_| tls.refresh_traffic_keys().unwrap());
            program.pump(0, &mut Steps::new(&[]));
        }
        assert!(program.greeter.silent.is_empty(), "a peer may send as much as it likes");
    }

    #[test]
    fn whatever_peers_say_the_limits_hold_and_only_clients_get_anything() {
        let programs = protocol::fuzzing::programs("handshake", 200, 600);
        let waiting: usize = programs.iter().map(|program| handshake_any(program)).sum();
        assert!(waiting > 0, "no peer was taken for a client");
    }
}
