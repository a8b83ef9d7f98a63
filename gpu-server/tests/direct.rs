//! Direct connections between workers of two servers: good ones, bad tickets, and peers that break the
//! protocol.

#![allow(clippy::unwrap_used)]

#[path = "direct/boxes.rs"]
mod boxes;
mod support;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use protocol::Status;
use protocol::channel::MAX_CONTEXTS;
use protocol::data::HostIn;
use protocol::device::{Answer, untext};
use protocol::handle::*;
use protocol::link::{DirectHeader, DirectQueue, Hello, Welcome, purpose};
use protocol::ops::copy::*;
use protocol::ops::direct::*;
use protocol::ops::memory::*;
use protocol::ops::stream::*;
use support::*;
use test_kit::link::{LocalBridge, Session, connect_tcp, greet, hello, welcome};
use test_kit::*;
use zerocopy::{FromZeros, IntoBytes};

const BASE: u64 = window(0);
const STREAM: StreamId = StreamId(0);

fn session(server: &Server) -> LocalBridge {
    let mut session = LocalBridge::connect(&server.socket());
    session.call(&MemGrow { device: 0, address: BASE, size: 2 << 20 }).unwrap();
    session.push(&MemAlloc { address: BASE, size: 2 << 20 });
    session
}

fn tcp(server: &Server) -> String {
    format!("tcp:127.0.0.1:{}", server.port)
}

fn unix(server: &Server) -> String {
    format!("unix:{}", server.socket().display())
}

fn allowing(addresses: &[String]) -> Vec<String> {
    addresses.iter().map(|address| format!("--direct-to={address}")).collect()
}

fn offer(from: &mut impl Session, to: &mut impl Session, direct: u32) -> DirectTicket {
    let key = from.call(&DirectKey {}).unwrap().key;
    to.call(&DirectOffer { direct, key }).unwrap().ticket
}

fn open(from: &mut impl Session, direct: u32, ticket: &DirectTicket) -> Result<(), String> {
    let refusal = from.call(&DirectOpen { direct, ticket: ticket.clone() }).unwrap().refusal;
    if refusal.is_empty() { Ok(()) } else { Err(refusal) }
}

fn row(address: u64, len: u64) -> (Pitched, [u64; 3]) {
    (Pitched { address, pitch: len, slice: len }, [len, 1, 1])
}

fn send(from: &mut impl Session, direct: u32, number: u64, at: u64, len: u64) {
    let (src, extent) = row(at, len);
    from.push(&DirectSend { stream: STREAM, direct, number, src, extent });
}

fn land(to: &mut impl Session, direct: u32, number: u64, at: u64, len: u64) {
    let (dst, extent) = row(at, len);
    to.push(&DirectLand { stream: STREAM, direct, number, dst, extent });
}

fn put(session: &mut impl Session, at: u64, bytes: &[u8]) {
    session.push(&MemcpyHtoD { stream: STREAM, dst: at, src: HostIn::Inline(bytes) });
}

fn get(session: &mut impl Session, at: u64, len: u32) -> Vec<u8> {
    session.call(&MemcpyDtoHInline { stream: STREAM, src: at, len }).unwrap().bytes.0
}

/// One piece is sent and landed.
fn copies(from: &mut impl Session, to: &mut impl Session, direct: u32, number: u64) {
    let bytes = number.to_le_bytes();
    put(from, BASE, &bytes);
    send(from, direct, number, BASE, 8);
    assert_eq!(to.call(&DirectArrival { direct, number }).unwrap().upto, number);
    land(to, direct, number, BASE + 512, 8);
    assert_eq!(get(to, BASE + 512, 8), bytes);
}

fn rejects(to: &mut impl Session, direct: u32, number: u64) -> bool {
    to.call(&DirectArrival { direct, number }).is_err()
}

#[test]
fn pieces_travel_over_unix_sockets_over_tcp_and_under_tls() {
    let plain = Server::start(&[]);
    let protected = Server::start_protected(&[]);
    for (target, address) in [(&plain, unix(&plain)), (&plain, tcp(&plain)), (&protected, tcp(&protected))] {
        let allowed = allowing(std::slice::from_ref(&address));
        let allowed: Vec<&str> = allowed.iter().map(String::as_str).collect();
        let source = Server::start(&allowed);
        let (mut from, mut to) = (session(&source), session(target));
        let ticket = offer(&mut from, &mut to, 1);
        assert!(ticket.addresses.contains(&address), "{:?} without {address}", ticket.addresses);
        open(&mut from, 1, &ticket).unwrap();
        (1..40).for_each(|number| copies(&mut from, &mut to, 1, number));
        // Many at once, all reported by one answer.
        (40..48).for_each(|number| send(&mut from, 1, number, BASE, 1 << 20));
        assert_eq!(to.call(&DirectArrival { direct: 1, number: 47 }).unwrap().upto, 47);
        assert_eq!(to.call(&DirectArrival { direct: 1, number: 40 }).unwrap().upto, 47);
        (40..48).for_each(|number| land(&mut to, 1, number, BASE, 1 << 20));
        to.call(&StreamSynchronize { stream: STREAM }).unwrap();
        assert_eq!((from.error(0), to.error(0)), (None, None));
        // When one session ends, so does the connection.
        drop(from);
        assert!(rejects(&mut to, 1, 48));
    }
}

#[test]
fn where_an_end_cannot_use_verbs_pieces_take_the_socket_and_the_log_says_why() {
    // This machine may have an RDMA device: one by that name it has not.
    let verbs = ["--direct-verbs", "--rdma-device=none"];
    let (target, unwilling) = (Server::start(&verbs), Server::start(&[]));
    let to = [format!("--direct-to={}", unix(&target)), format!("--direct-to={}", unix(&unwilling))];
    let willing = Server::start(&[&verbs[..], &[&to[0], &to[1]]].concat());
    let plain = Server::start(&[&to[0]]);
    for (source, target, why) in [
        (&willing, &target, "RDMA|libibverbs"),
        (&willing, &unwilling, "RDMA|libibverbs"),
        (&plain, &target, "--direct-verbs"),
    ] {
        let (mut from, mut to) = (session(source), session(target));
        let ticket = offer(&mut from, &mut to, 1);
        open(&mut from, 1, &ticket).unwrap();
        (1..4).for_each(|number| copies(&mut from, &mut to, 1, number));
        until("the log says why", || {
            let log = source.log();
            let lines = log.lines().filter(|line| line.contains("another server is open"));
            let mut lines = lines.filter(|line| line.contains("its socket, because"));
            lines.any(|line| why.split('|').any(|why| line.contains(why)))
        });
    }
    // The receiving end refuses an offer for the same reasons, and then takes pieces from the socket.
    for (server, why) in [(&target, "RDMA|libibverbs"), (&unwilling, "--direct-verbs")] {
        let mut to = session(server);
        let mut stream = pretend(server, &mut to, 1);
        let queue = DirectQueue { queue_pair: 17, mtu: 1024, ..DirectQueue::new_zeroed() };
        stream.write_all(&[DirectHeader::offer().as_bytes(), queue.as_bytes()].concat()).unwrap();
        let mut answer = DirectQueue::new_zeroed();
        std::io::Read::read_exact(&mut stream, answer.as_mut_bytes()).unwrap();
        let reason = untext(&answer.reason);
        assert!(answer.queue_pair == 0 && why.split('|').any(|why| reason.contains(why)), "{reason}");
        stream.write_all(&[header(1, 2).as_bytes(), &[1, 2]].concat()).unwrap();
        assert_eq!(to.call(&DirectArrival { direct: 1, number: 1 }).unwrap().upto, 1);
        land(&mut to, 1, 1, BASE, 2);
        assert_eq!(get(&mut to, BASE, 2), [1, 2]);
        // A second offer is none.
        stream.write_all(&[DirectHeader::offer().as_bytes(), queue.as_bytes()].concat()).unwrap();
        assert!(rejects(&mut to, 1, 2));
    }
}

#[test]
fn a_server_connects_only_where_its_operator_allows_it() {
    let (target, listener) = (Server::start(&[]), TcpListener::bind("127.0.0.1:0").unwrap());
    listener.set_nonblocking(true).unwrap();
    let victim = format!("tcp:{}", listener.local_addr().unwrap());
    // It does not even follow a listed name with another port or spelling.
    let source = Server::start(&["--direct-to=tcp:127.0.0.1:1"]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    let mut direct = 0;
    let mut refused = |addresses: Vec<String>, why: &str| {
        direct += 1;
        let refusal = open(&mut from, direct, &DirectTicket { addresses, ..ticket.clone() }).unwrap_err();
        assert!(refusal.contains(why), "{refusal}");
    };
    refused(ticket.addresses.clone(), "--direct-to");
    refused(vec![victim.clone()], "--direct-to");
    refused(vec!["unix:/run/systemd/notify".into(), victim], "--direct-to");
    refused(vec!["gopher://x\n\u{1b}[2J".into()], "is not an address");
    refused(vec![String::new(); 17], "17 addresses");
    refused(Vec::new(), "0 addresses");
    refused(vec!["tcp:127.0.0.1:1".into()], "127.0.0.1:1");
    assert!(listener.accept().is_err(), "something has connected");
    assert!(!source.log().contains('\u{1b}'));

    // Nothing is sent unencrypted where encryption is required.
    let source = Server::start_protected(&[&format!("--direct-to={}", tcp(&target))]);
    let mut from = session(&source);
    let ticket = offer(&mut from, &mut to, 2);
    let refusal = open(&mut from, 1, &ticket).unwrap_err();
    assert!(refusal.contains("TLS"), "{refusal}");
}

fn shown(ticket: &DirectTicket) -> Hello {
    Hello { secret: ticket.secret, ..hello(purpose::DIRECT, ticket.token, 0) }
}

#[test]
fn a_ticket_is_good_once_and_only_as_it_was_made() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", tcp(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    let mut forged = vec![ticket.clone(), ticket.clone()];
    forged[0].secret[31] ^= 1;
    forged[1].token[0] ^= 1;
    for forged in &forged {
        for answer in [
            greet(connect_tcp(target.port).unwrap(), &shown(forged)).unwrap(),
            greet(UnixStream::connect(target.socket()).unwrap(), &shown(forged)).unwrap(),
        ] {
            assert_ne!(answer.status, Answer::Ok as u32);
        }
    }
    open(&mut from, 7, &forged[0]).unwrap_err();
    // None of this has used the ticket up.
    open(&mut from, 1, &ticket).unwrap();
    copies(&mut from, &mut to, 1, 1);
    let refusal = open(&mut from, 2, &ticket).unwrap_err();
    assert!(refusal.contains("this ticket does not exist"), "{refusal}");
    // Nor has the second try harmed the connection.
    copies(&mut from, &mut to, 1, 2);
    // Numbers are used once, and their number is limited.
    let key = [0; 32];
    assert_eq!(to.call(&DirectOffer { direct: 1, key }).unwrap_err(), Status::INVALID_HANDLE);
    (2..=MAX_DIRECTS as u32).for_each(|direct| drop(to.call(&DirectOffer { direct, key }).unwrap()));
    assert_eq!(to.call(&DirectOffer { direct: 1000, key }).unwrap_err(), Status::OUT_OF_MEMORY);
    copies(&mut from, &mut to, 1, 3);
}

#[test]
fn under_tls_a_stolen_ticket_is_worth_nothing() {
    let target = Server::start_protected(&[]);
    let source = Server::start(&[&format!("--direct-to={}", tcp(&target))]);
    let (mut from, mut thief, mut to) = (session(&source), session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut thief, 1, &ticket).unwrap_err();
    // Nor without TLS, nor with a ticket for another server.
    let answer = greet(connect_tcp(target.port).unwrap(), &shown(&ticket)).unwrap();
    assert_ne!(answer.status, Answer::Ok as u32, "{}", untext(&answer.reason));
    let mut pretended = ticket.clone();
    pretended.key[0] ^= 1;
    open(&mut from, 2, &pretended).unwrap_err();
    pretended = DirectTicket { encrypted: false, ..ticket.clone() };
    open(&mut from, 3, &pretended).unwrap_err();
    open(&mut from, 1, &ticket).unwrap();
    copies(&mut from, &mut to, 1, 1);
}

/// A connection to `to` that the test makes itself.
fn pretend(server: &Server, to: &mut impl Session, direct: u32) -> TcpStream {
    let ticket = to.call(&DirectOffer { direct, key: [0; 32] }).unwrap().ticket;
    let stream = connect_tcp(server.port).unwrap();
    assert_eq!(greet(&stream, &shown(&ticket)).unwrap().status, Answer::Ok as u32);
    stream
}

fn header(number: u64, len: u32) -> DirectHeader {
    DirectHeader { number, len, reserved: 0 }
}

#[test]
fn what_a_peer_sends_wrongly_ends_its_connection_and_nothing_else() {
    let server = Server::start(&[]);
    let mut to = session(&server);
    let mut direct = 0;
    let mut after = |bytes: &[u8], close: bool, number: u64| {
        direct += 1;
        let mut stream = pretend(&server, &mut to, direct);
        stream.write_all(&[header(1, 2).as_bytes(), &[1, 2]].concat()).unwrap();
        assert_eq!(to.call(&DirectArrival { direct, number: 1 }).unwrap().upto, 1);
        // The connection may be closed before everything is written.
        let _ = stream.write_all(bytes);
        let kept = (!close).then_some(stream);
        assert!(rejects(&mut to, direct, number));
        // Pieces that arrived before are there.
        land(&mut to, direct, 1, BASE, 2);
        assert_eq!(get(&mut to, BASE, 2), [1, 2]);
        assert_eq!(to.error(0), None);
        drop(kept);
    };
    after(header(2, MAX_PIECE as u32 + 1).as_bytes(), false, 2);
    after(header(2, u32::MAX).as_bytes(), false, 2);
    after(DirectHeader { reserved: 1, ..header(2, 1) }.as_bytes(), false, 2);
    after(&[header(1, 1).as_bytes(), &[1]].concat(), false, 2);
    after(header(0, 1).as_bytes(), false, 2);
    // Closed: between pieces, in a header, in a piece.
    after(&[], true, 2);
    after(&header(2, 1000).as_bytes()[..7], true, 2);
    after(&[header(2, 1000).as_bytes(), &[7; 999]].concat(), true, 2);
    // Pieces announced as missing, and pieces left out.
    after(header(2, 0).as_bytes(), false, 2);
    after(&[header(3, 1).as_bytes(), &[1]].concat(), false, 2);

    // A client that lands pieces that did not arrive, lands one twice, or with a wrong length.
    direct += 1;
    let mut stream = pretend(&server, &mut to, direct);
    stream.write_all(&[header(1, 2).as_bytes(), &[1, 2]].concat()).unwrap();
    to.call(&DirectArrival { direct, number: 1 }).unwrap();
    for (number, len) in [(2, 2), (1, 3), (1, 2)] {
        land(&mut to, direct, number, BASE, len);
    }
    land(&mut to, 9999, 1, BASE, 2);
    send(&mut to, direct, 1, BASE, 2);
    assert_eq!(to.call(&DirectArrival { direct: 9999, number: 1 }).unwrap_err(), Status::INVALID_HANDLE);
    assert!(to.error(0).is_some_and(|(_, sticky)| !sticky));
    drop(to);
    until("its session has ended", || server.sessions() == 0);
}

#[test]
fn a_peer_that_keeps_sending_fills_its_buffers_and_no_more() {
    let server = Server::start(&[]);
    let mut to = session(&server);
    let stream = pretend(&server, &mut to, 1);
    stream.set_nonblocking(true).unwrap();
    let piece = vec![5; 64 << 10];
    let (mut number, mut left) = (0, Vec::new());
    let mut sent = 0;
    // Until the connection accepts nothing for some time after the buffers are full.
    let mut quiet = 0;
    // The one behind those that fit is whole, however slowly the other end takes them.
    while quiet < 200 || number <= PIECES as u64 + 1 {
        if left.is_empty() {
            number += 1;
            left = [header(number, piece.len() as u32).as_bytes(), &piece].concat();
        }
        match (&stream).write(&left) {
            Ok(n) => {
                left.drain(..n);
                (sent, quiet) = (sent + n, 0);
            }
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                quiet += 1;
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        assert!(sent < 256 << 20, "it takes whatever comes");
    }
    // Those that have arrived can be landed, and then it continues.
    let last = to.call(&DirectArrival { direct: 1, number: PIECES as u64 }).unwrap().upto;
    assert_eq!(last, PIECES as u64);
    (1..=last).for_each(|number| land(&mut to, 1, number, BASE, piece.len() as u64));
    to.call(&DirectArrival { direct: 1, number: last + 1 }).unwrap();
    assert_eq!(to.error(0), None);
}

#[test]
fn a_receiver_that_is_none_costs_the_sender_nothing_but_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let server = Server::start(&[&format!("--direct-to={address}")]);
    let mut from = session(&server);
    let ticket = DirectTicket {
        token: [1; 16],
        secret: [2; 32],
        key: [0; 32],
        encrypted: false,
        addresses: vec![address],
    };
    let accept = |answer: Option<Welcome>| {
        let stream = listener.accept().unwrap().0;
        let mut said = Hello::new_zeroed();
        std::io::Read::read_exact(&mut (&stream), said.as_mut_bytes()).unwrap();
        assert_eq!((said.purpose, said.token, said.secret), (purpose::DIRECT, [1; 16], [2; 32]));
        answer.inspect(|answer| (&stream).write_all(answer.as_bytes()).unwrap());
        stream
    };
    std::thread::scope(|scope| {
        let refuses = scope.spawn(|| drop(accept(Some(welcome(Answer::Denied, "not\x1b[2J you")))));
        assert!(open(&mut from, 1, &ticket).unwrap_err().contains("not"));
        refuses.join().unwrap();
        let closes = scope.spawn(|| drop(accept(None)));
        open(&mut from, 2, &ticket).unwrap_err();
        closes.join().unwrap();
        let other = Welcome { magic: 7, ..welcome(Answer::Ok, "") };
        let babbles = scope.spawn(move || drop(accept(Some(other))));
        open(&mut from, 3, &ticket).unwrap_err();
        babbles.join().unwrap();
        // A receiver that reads nothing: the session's own work continues, and so does its end.
        let sleeps = scope.spawn(|| accept(Some(welcome(Answer::Ok, ""))));
        open(&mut from, 4, &ticket).unwrap();
        let kept = sleeps.join().unwrap();
        (1..=200).for_each(|number| send(&mut from, 4, number, BASE, 1 << 20));
        put(&mut from, BASE, &[9; 4]);
        assert_eq!((get(&mut from, BASE, 4), from.error(0)), (vec![9; 4], None));
        drop(kept);
        // And then one that is gone.
        (201..=220).for_each(|number| send(&mut from, 4, number, BASE, 1 << 20));
        assert_eq!((get(&mut from, BASE, 4), from.error(0)), (vec![9; 4], None));
    });
    // A connection that never existed, memory outside the session's, too many bytes, none.
    send(&mut from, 5, 1, BASE, 4);
    get(&mut from, BASE, 4);
    assert_eq!(from.error(0), Some((Status::INVALID_HANDLE, false)));
    drop(from);
    until("its session has ended", || server.sessions() == 0);
}

#[test]
fn a_piece_that_cannot_be_sent_is_announced_to_the_other_end() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut from, 1, &ticket).unwrap();
    // Outside the session's memory, too long, empty.
    for (number, at, len) in [(1, BASE + (2 << 20) - 4, 8), (2, BASE, MAX_PIECE + 1), (3, BASE, 0)] {
        send(&mut from, 1, number, at, len);
        assert!(rejects(&mut to, 1, number));
    }
    assert_eq!(from.error(0), Some((Status::INVALID_VALUE, false)));
    copies(&mut from, &mut to, 1, 4);
}

/// Says where a piece goes. Returns the command's number.
fn receive(to: &mut impl Session, direct: u32, number: u64, at: u64, len: u64) -> u64 {
    to.push(&DirectReceive { direct, number, dst: at, len })
}

/// Sends a piece at once. Returns the command's number.
fn send_now(from: &mut impl Session, direct: u32, number: u64, at: u64, len: u64) -> u64 {
    from.push(&DirectSendNow { direct, number, src: at, len })
}

/// Prepares a connection for pieces in all memory of the session.
fn prepare(session: &mut impl Session, direct: u32, outgoing: bool) {
    session.call(&DirectPrepare { direct, outgoing, stream: STREAM }).unwrap();
    session.call(&memory(direct, outgoing, true)).unwrap();
}

fn memory(direct: u32, outgoing: bool, allowed: bool) -> DirectMemory {
    DirectMemory { direct, outgoing, address: BASE, len: 2 << 20, allowed }
}

/// Waits until the stream's progress word has reached a command.
fn landed(to: &mut impl Session, seq: u64) {
    until("the piece is there", || to.word(STREAM.0) >= seq);
}

#[test]
fn pieces_are_received_without_the_client_whoever_comes_first() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    prepare(&mut to, 1, false);
    open(&mut from, 1, &ticket).unwrap();
    put(&mut from, BASE, &[1, 2, 3, 4]);
    // Expected before they are sent.
    let expected = [1, 2, 3].map(|number| receive(&mut to, 1, number, BASE + 512 * number, 4));
    assert!(to.word(STREAM.0) < expected[0]);
    (1..=3).for_each(|number| send(&mut from, 1, number, BASE, 4));
    landed(&mut to, expected[2]);
    (1..=3).for_each(|number| assert_eq!(get(&mut to, BASE + 512 * number, 4), [1, 2, 3, 4]));
    // Arrived before they are expected, and one that the client lands itself between them.
    (4..=6).for_each(|number| send(&mut from, 1, number, BASE, 4));
    assert_eq!(to.call(&DirectArrival { direct: 1, number: 6 }).unwrap().upto, 6);
    receive(&mut to, 1, 4, BASE + 4096, 4);
    land(&mut to, 1, 5, BASE + 5120, 4);
    let last = receive(&mut to, 1, 6, BASE + 6144, 4);
    landed(&mut to, last);
    for at in [4096, 5120, 6144] {
        assert_eq!(get(&mut to, BASE + at, 4), [1, 2, 3, 4]);
    }
    // More than the buffers at both ends, over and over.
    for round in 0..8 {
        let mut last = 0;
        for number in 7 + round * 12..19 + round * 12 {
            last = receive(&mut to, 1, number, BASE, 1 << 20);
            send(&mut from, 1, number, BASE, 1 << 20);
        }
        landed(&mut to, last);
    }
    assert_eq!((from.error(0), to.error(0)), (None, None));
}

#[test]
fn an_expected_piece_that_does_not_come_or_has_another_size_is_a_failure() {
    let server = Server::start(&[]);
    let mut to = session(&server);
    put(&mut to, BASE, &[7; 8]);
    let sent = |number, len, bytes: &[u8]| [header(number, len).as_bytes(), bytes].concat();
    let wrong = [
        // Another size, announced as missing, left out.
        (sent(1, 2, &[1, 2]), false),
        (sent(1, 0, &[]), false),
        (sent(2, 8, &[1; 8]), false),
        // Closed at once, in the piece, and with something that is no piece.
        (Vec::new(), true),
        (sent(1, 8, &[1; 7]), true),
        (sent(1, u32::MAX, &[]), false),
    ];
    for (direct, (bytes, close)) in (1..).zip(&wrong) {
        for late in [false, true] {
            let direct = 2 * direct + u32::from(late);
            let mut stream = pretend(&server, &mut to, direct);
            prepare(&mut to, direct, false);
            if late {
                let _ = stream.write_all(bytes);
            } else {
                receive(&mut to, direct, 1, BASE, 8);
                let _ = stream.write_all(bytes);
            }
            let kept = (!*close).then_some(stream);
            if late {
                let arrived = to.call(&DirectArrival { direct, number: 1 });
                assert_eq!(arrived.is_ok(), bytes.len() == size_of::<DirectHeader>() + 2);
                receive(&mut to, direct, 1, BASE, 8);
            }
            assert_eq!(to.call(&DirectFailures {}).unwrap().directs, [direct]);
            // Nothing later is written.
            receive(&mut to, direct, 2, BASE, 8);
            assert_eq!((get(&mut to, BASE, 8), to.error(0)), (vec![7; 8], None));
            to.call(&DirectClose { direct, outgoing: false }).unwrap();
            drop(kept);
        }
    }
}

/// A connection, a piece's number, where it goes, and its size.
type Piece = (u32, u64, u64, u64);

#[test]
fn what_a_client_expects_wrongly_is_refused() {
    let server = Server::start(&[]);
    let most = 1024;
    let wrong: [(&[Piece], Status); 7] = [
        (&[(2, 1, BASE, 8)], Status::INVALID_HANDLE),
        (&[(1, 1, BASE + (2 << 20) - 4, 8)], Status::INVALID_VALUE),
        (&[(1, 1, BASE, 0)], Status::INVALID_VALUE),
        (&[(1, 1, BASE, MAX_PIECE + 1)], Status::INVALID_VALUE),
        (&[(1, 5, BASE, 2), (1, 5, BASE, 2)], Status::INVALID_VALUE),
        (&[(1, 5, BASE, 2), (1, 4, BASE, 2)], Status::INVALID_VALUE),
        (&[(1, 0, BASE, 2)], Status::INVALID_VALUE),
    ];
    let mut all: Vec<(Vec<Piece>, Status)> =
        wrong.into_iter().map(|(pieces, status)| (pieces.to_vec(), status)).collect();
    all.push(((1..=most + 1).map(|number| (1, number, BASE, 2)).collect(), Status::OUT_OF_MEMORY));
    for (pieces, status) in all {
        let mut to = session(&server);
        let mut stream = pretend(&server, &mut to, 1);
        prepare(&mut to, 1, false);
        let (last, before) = pieces.split_last().unwrap();
        let expect = |to: &mut LocalBridge, (direct, number, at, len)| {
            let seq = receive(to, direct, number, at, len);
            to.call(&StreamSynchronize { stream: STREAM }).map(|_| seq).ok()
        };
        let first = before.first().map(|first| (expect(&mut to, *first).unwrap(), first.1));
        for piece in before.iter().skip(1) {
            expect(&mut to, *piece).unwrap();
        }
        assert_eq!(to.error(0), None);
        expect(&mut to, *last);
        assert_eq!(to.error(0), Some((status, false)), "{last:?}");
        // What was expected before is not harmed.
        if let Some((seq, number)) = first {
            stream.write_all(&[header(number, 2).as_bytes(), &[1, 2]].concat()).unwrap();
            landed(&mut to, seq);
            assert_eq!(get(&mut to, BASE, 2), [1, 2]);
        }
    }
    let mut to = session(&server);
    assert_eq!(to.call(&DirectClose { direct: 1, outgoing: false }).unwrap_err(), Status::INVALID_HANDLE);
    // The question is asked once at a time.
    Session::send(&mut to, 1, &DirectFailures {});
    assert_eq!(to.call(&DirectFailures {}).unwrap_err(), Status::INVALID_VALUE);
    drop(to);
    until("its session has ended", || server.sessions() == 0);
}

#[test]
fn a_prepared_connection_has_its_buffers_from_the_beginning() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let early = |direct, outgoing| DirectPrepare { direct, outgoing, stream: STREAM };
    for direct in 1..=3 {
        assert_eq!(to.call(&early(direct, false)).unwrap_err(), Status::INVALID_HANDLE);
        assert_eq!(from.call(&early(direct, true)).unwrap_err(), Status::INVALID_HANDLE);
        let ticket = offer(&mut from, &mut to, direct);
        prepare(&mut to, direct, false);
        open(&mut from, direct, &ticket).unwrap();
        // A second time does no harm.
        (0..2).for_each(|_| prepare(&mut from, direct, true));
        // More pieces than buffers, half of those in flight.
        let mut last = 0;
        for number in 1..=64 {
            last = receive(&mut to, direct, number, BASE, 1 << 20);
            if direct == 1 {
                send(&mut from, direct, number, BASE, 1 << 20);
            } else {
                send_now(&mut from, direct, number, BASE, 1 << 20);
            }
            if number % (PIECES as u64 / 2) == 0 {
                landed(&mut to, last);
            }
        }
        landed(&mut to, last);
        from.call(&DirectClose { direct, outgoing: true }).unwrap();
        to.call(&DirectClose { direct, outgoing: false }).unwrap();
    }
    assert_eq!((from.error(0), to.error(0)), (None, None));
}

#[test]
fn pieces_are_sent_at_once_from_named_memory_and_from_no_other() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let to_whom = |direct| DirectSendNow { direct, number: 1, src: BASE, len: 8 };
    let names = |address, len| DirectMemory { direct: 1, outgoing: true, address, len, allowed: true };
    // Refused, each in a session of its own. Nothing is sent, so the number can be used.
    for (forget, send, status) in [
        (None, to_whom(2), Status::INVALID_HANDLE),
        (None, DirectSendNow { src: BASE + (2 << 20) - 4, ..to_whom(1) }, Status::INVALID_VALUE),
        (None, DirectSendNow { len: 0, ..to_whom(1) }, Status::INVALID_VALUE),
        (None, DirectSendNow { len: MAX_PIECE + 1, ..to_whom(1) }, Status::INVALID_VALUE),
        (Some(false), to_whom(1), Status::INVALID_VALUE),
        (Some(true), to_whom(1), Status::INVALID_VALUE),
    ] {
        let (mut from, mut to) = (session(&source), session(&target));
        let ticket = offer(&mut from, &mut to, 1);
        open(&mut from, 1, &ticket).unwrap();
        assert_eq!(from.call(&names(BASE, 8)).unwrap_err(), Status::INVALID_HANDLE);
        prepare(&mut from, 1, true);
        for (address, len) in
            [(BASE - 1, 2), (BASE + (2 << 20) - 1, 2), (0, 8), (u64::MAX, 8), (BASE, u64::MAX)]
        {
            assert_eq!(from.call(&names(address, len)).unwrap_err(), Status::INVALID_VALUE, "{address:x}");
        }
        put(&mut from, BASE, &[5; 8]);
        from.call(&StreamSynchronize { stream: STREAM }).unwrap();
        match forget {
            // Named again once it is there again, and by nobody else.
            Some(true) => {
                from.push(&MemFree { address: BASE });
                from.push(&MemAlloc { address: BASE, size: 2 << 20 });
            }
            Some(false) => _ = from.call(&memory(1, true, false)).unwrap(),
            None => {}
        }
        from.push(&send);
        from.call(&StreamSynchronize { stream: STREAM }).unwrap();
        assert_eq!(from.error(0), Some((status, false)), "{send:?}");
        if forget.is_some() {
            from.call(&names(BASE, 8)).unwrap();
        }
        prepare(&mut to, 1, false);
        let expected = receive(&mut to, 1, 1, BASE, 8);
        let sent = send_now(&mut from, 1, 1, BASE, 8);
        landed(&mut to, expected);
        // The bytes have been read.
        landed(&mut from, sent);
        assert_eq!(get(&mut to, BASE, 8), [5; 8]);
    }
}

#[test]
fn pieces_are_in_mirrors_of_the_clients_memory_as_well() {
    const MIRROR: u64 = 0x6000_0000_0000;
    const SIZE: u64 = 2 << 20;
    let context = ContextId(0);
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut from, 1, &ticket).unwrap();
    for (session, outgoing) in [(&mut from, true), (&mut to, false)] {
        prepare(session, 1, outgoing);
        session.call(&HostMirror { context, address: MIRROR, size: SIZE }).unwrap();
        let names = |address, len| DirectMemory { direct: 1, outgoing, address, len, allowed: true };
        for (address, len) in [(MIRROR - 1, 2), (MIRROR + SIZE - 1, 2), (MIRROR, u64::MAX), (MIRROR, 0)] {
            assert_eq!(session.call(&names(address, len)).unwrap_err(), Status::INVALID_VALUE, "{address:x}");
        }
        session.call(&names(MIRROR, SIZE)).unwrap();
    }
    from.push(&HostWrite { context, address: MIRROR, bytes: &[1, 2, 3, 4] });
    put(&mut from, BASE, &[5, 6, 7, 8]);
    from.call(&StreamSynchronize { stream: STREAM }).unwrap();
    // From memory of both kinds to memory of both kinds. Some pieces come before the client says where they
    // go.
    let mut number = 0;
    for (src, dst) in [(MIRROR, MIRROR + 4096), (MIRROR, BASE), (BASE, MIRROR + 8192), (BASE, BASE + 4096)] {
        for early in [false, true] {
            number += 1;
            let mut expected = None;
            if !early {
                expected = Some(receive(&mut to, 1, number, dst, 4));
            }
            let sent = send_now(&mut from, 1, number, src, 4);
            if early {
                assert_eq!(to.call(&DirectArrival { direct: 1, number }).unwrap().upto, number);
            }
            let expected = expected.unwrap_or_else(|| receive(&mut to, 1, number, dst, 4));
            landed(&mut to, expected);
            landed(&mut from, sent);
            let bytes = if (BASE..BASE + SIZE).contains(&dst) {
                get(&mut to, dst, 4)
            } else {
                to.call(&HostRead { context, address: dst, len: 4 }).unwrap().bytes.0
            };
            assert_eq!(bytes, if src == MIRROR { [1, 2, 3, 4] } else { [5, 6, 7, 8] });
        }
    }
    assert_eq!((from.error(0), to.error(0)), (None, None));
    // Memory that is gone is an error, and costs no buffer, at either end.
    to.push(&HostUnmap { context, address: MIRROR });
    for _ in 0..2 * PIECES {
        number += 1;
        let expected = receive(&mut to, 1, number, MIRROR, 4);
        send_now(&mut from, 1, number, BASE, 4);
        landed(&mut to, expected);
    }
    assert_eq!(to.error(0), Some((Status::INVALID_VALUE, false)));
    from.push(&HostUnmap { context, address: MIRROR });
    for _ in 0..2 * PIECES {
        number += 1;
        send_now(&mut from, 1, number, MIRROR, 4);
        assert!(rejects(&mut to, 1, number));
    }
    for _ in 0..2 * PIECES {
        number += 1;
        copies(&mut from, &mut to, 1, number);
    }
}

#[test]
fn while_a_call_of_the_driver_waits_pieces_are_landed_in_mirrors_and_not_on_the_device() {
    const MIRROR: u64 = 0x6000_0000_0000;
    const GO: u64 = MIRROR + 8192;
    let context = ContextId(0);
    let target = Server::start(&["--software-imitate=waiting-calls"]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    to.call(&HostMirror { context, address: MIRROR, size: 2 << 20 }).unwrap();
    for direct in [1, 2] {
        let ticket = offer(&mut from, &mut to, direct);
        open(&mut from, direct, &ticket).unwrap();
    }
    let [mirrors, device, held] = [STREAM, StreamId(MAX_CONTEXTS), StreamId(MAX_CONTEXTS + 1)];
    to.push(&StreamCreate { context, stream: device, flags: 0, priority: 0 });
    let names = |direct, address| DirectMemory { direct, outgoing: false, address, len: 4096, allowed: true };
    for (direct, stream, address) in [(1, mirrors, MIRROR), (2, device, BASE)] {
        to.call(&DirectPrepare { direct, outgoing: false, stream }).unwrap();
        to.call(&names(direct, address)).unwrap();
    }
    put(&mut from, BASE, &[5, 6, 7, 8]);
    // The device waits for a word of the mirror, and the dispatcher for the device.
    let wait = MemoryOp { operation: memory_op::WAIT_32, flags: 0, address: GO, value: 1 };
    to.push(&StreamCreate { context, stream: held, flags: 1, priority: 0 });
    to.push(&StreamBatchMemOp { stream: held, operations: vec![wait] });
    let grows = to.send(3, &MemGrow { device: 0, address: BASE + (2 << 20), size: 2 << 20 });
    let on_device = receive(&mut to, 2, 1, BASE, 4);
    let in_mirror = [1, 2].map(|number| receive(&mut to, 1, number, MIRROR, 4));
    // Once the first one is there, the server knows where the others go. Copying one to the device would
    // occupy the thread that reads commands now.
    for (direct, number, seq) in [(1, 1, in_mirror[0]), (2, 1, 0), (1, 2, in_mirror[1])] {
        send(&mut from, direct, number, BASE, 4);
        until("the piece is in the mirror", || to.word(mirrors.0) >= seq);
    }
    assert!(to.word(device.0) < on_device, "a piece was copied to the device");
    to.push(&HostWrite { context, address: GO, bytes: &1_u32.to_le_bytes() });
    assert_eq!(to.wait(3, grows).0, Status::SUCCESS);
    until("the piece is on the device", || to.word(device.0) >= on_device);
    assert_eq!(to.call(&HostRead { context, address: MIRROR, len: 4 }).unwrap().bytes.0, [5, 6, 7, 8]);
    assert_eq!(get(&mut to, BASE, 4), [5, 6, 7, 8]);
    assert_eq!((from.error(0), to.error(0)), (None, None));
}

#[test]
fn closed_connections_make_room_for_others() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let close = |direct, outgoing| DirectClose { direct, outgoing };
    for direct in 1..=2 * MAX_DIRECTS as u32 {
        let ticket = offer(&mut from, &mut to, direct);
        prepare(&mut to, direct, false);
        open(&mut from, direct, &ticket).unwrap();
        let expected = receive(&mut to, direct, 1, BASE + 512, 8);
        put(&mut from, BASE, &u64::from(direct).to_le_bytes());
        send(&mut from, direct, 1, BASE, 8);
        from.call(&StreamSynchronize { stream: STREAM }).unwrap();
        // What was sent before the end still comes, and the end is no failure.
        from.call(&close(direct, true)).unwrap();
        landed(&mut to, expected);
        assert_eq!(get(&mut to, BASE + 512, 8), u64::from(direct).to_le_bytes());
        to.call(&close(direct, false)).unwrap();
        assert_eq!(to.call(&close(direct, false)).unwrap_err(), Status::INVALID_HANDLE);
        assert_eq!(from.call(&close(direct, true)).unwrap_err(), Status::INVALID_HANDLE);
    }
    // Closed by the receiving end, with a piece that does not come: nobody is told, and the sender finds out.
    let ticket = offer(&mut from, &mut to, 1);
    prepare(&mut to, 1, false);
    open(&mut from, 1, &ticket).unwrap();
    receive(&mut to, 1, 1, BASE, 8);
    to.call(&close(1, false)).unwrap();
    let mut number = 0;
    until("the connection is over", || {
        number += 1;
        send(&mut from, 1, number, BASE, 8);
        from.call(&StreamSynchronize { stream: STREAM }).unwrap();
        source.log().contains("a direct connection to another server is over: ")
    });
    assert_eq!((from.error(0), to.error(0)), (None, None));
}
