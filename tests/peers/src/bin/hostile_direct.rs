//! Ends of direct connections over verbs that do not keep to the protocol: what the tests set on a running
//! `rgpu-server`.
//!
//! ```text
//! hostile_direct sender 9700 --device rxe1 --do long-piece        against the receiving end of the server at that port
//! hostile_direct receiver 9700 --device rxe1 --do no-grants       against its sending end; the server must have --direct-to tcp:127.0.0.1:9810
//! ```
//!
//! It opens a session of its own, agrees on verbs properly, does one forbidden thing, and checks that only
//! the connection has ended and the session continues. Then it prints `harmless`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_bridge::framing::{recv_struct, send_message};
use host_bridge::verbs::pieces::End;
use host_bridge::verbs::{
    Access, Device, Domain, PieceBuffer, Pieces, Put, Registration, Settings, Slab, Unconnected,
};
use protocol::data::HostIn;
use protocol::device::Answer;
use protocol::handle::StreamId;
use protocol::link::{DirectHeader, DirectQueue, Hello, Queues, purpose};
use protocol::ops::copy::{MemcpyDtoHInline, MemcpyHtoD, Pitched};
use protocol::ops::direct::*;
use protocol::ops::memory::{FIRST_WINDOW, MemAlloc, MemGrow};
use test_kit::link::{Session, TcpSession, connect_tcp, greet, hello, welcome};
use zerocopy::{FromZeros, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long the other side may take for anything.
const PATIENCE: Duration = Duration::from_secs(120);
const BASE: u64 = FIRST_WINDOW;
const STREAM: StreamId = StreamId(0);
/// Pieces that the server is to send: fewer than it has buffers.
const PIECES_SENT: u64 = 12;
/// Where the receivers listen.
const LISTEN: &str = "127.0.0.1:9810";

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (role, port) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let (mut settings, mut what) = (Settings::default(), String::new());
    while let Some(option) = args.next() {
        let value = args.next().ok_or(format!("{option} wants a value"))?;
        match option.as_str() {
            "--device" => settings.device = Some(value),
            "--do" => what = value,
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    let domain = Domain::new(Device::open(&settings)?)?;
    let mut session = TcpSession::connect(port.parse()?);
    session.call(&MemGrow { device: 0, address: BASE, size: 2 << 20 })?;
    session.push(&MemAlloc { address: BASE, size: 2 << 20 });
    match role.as_str() {
        "sender" => sender(&mut session, port.parse()?, &domain, &settings, &what)?,
        "receiver" => receiver(&mut session, &domain, &settings, &what)?,
        _ => return Err("hostile_direct sender|receiver PORT --device NAME --do WHAT".into()),
    }
    // The session continues, without an error.
    session.push(&MemcpyHtoD { stream: STREAM, dst: BASE, src: HostIn::Inline(&[7; 8]) });
    let back = session.call(&MemcpyDtoHInline { stream: STREAM, src: BASE, len: 8 })?.bytes.0;
    if back != [7; 8] || session.error(0).is_some() || session.lost().is_some() {
        return Err(format!("{what}: {back:?}, {:?}, {:?}", session.error(0), session.lost()).into());
    }
    println!("harmless");
    Ok(())
}

/// A buffer of this program's.
struct Own(Arc<Slab>);

// SAFETY: the slab keeps its registration and its memory; nothing here touches the bytes while the device
// may.
unsafe impl PieceBuffer for Own {
    fn registration(&self) -> Option<&Registration> {
        Some(self.0.registration())
    }
}

fn header(number: u64, len: u32) -> DirectHeader {
    DirectHeader { number, len, reserved: 0 }
}

/// Waits until the queue has completed something, or has broken.
fn settle(queue: &mut Pieces<Own>) -> Result<()> {
    let (mut done, begin) = (Vec::new(), Instant::now());
    while done.is_empty() {
        queue.poll(&mut done)?;
        if begin.elapsed() > PATIENCE {
            return Err("nothing completes".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn sender(
    session: &mut TcpSession,
    port: u16,
    domain: &Arc<Domain>,
    settings: &Settings,
    what: &str,
) -> Result<()> {
    let ticket = session.call(&DirectOffer { direct: 1, key: [0; 32] })?.ticket;
    let mut socket = connect_tcp(port)?;
    let shown = Hello { secret: ticket.secret, ..hello(purpose::DIRECT, ticket.token, 0) };
    if greet(&socket, &shown)?.status != Answer::Ok as u32 {
        return Err("the server refuses the ticket".into());
    }
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut agree = |offer: &DirectQueue| -> Result<DirectQueue> {
        socket.write_all(&[DirectHeader::offer().as_bytes(), offer.as_bytes()].concat())?;
        let mut answer = DirectQueue::new_zeroed();
        socket.read_exact(answer.as_mut_bytes())?;
        Ok(answer)
    };
    let buffer = Arc::new(Slab::new(domain, 2 << 20, Access::Write)?);
    let piece = |len: usize| Some((Own(Arc::clone(&buffer)), len));
    if let "wild-write" | "empty-write" = what {
        // The queue pair of an ordinary link, which can write.
        let link = Unconnected::new(domain, settings)?;
        let ours = link.offer(None);
        let answer = agree(&DirectQueue {
            queue_pair: ours.queue_pairs[1],
            psn: ours.psn,
            mtu: ours.mtu,
            lid: ours.lid,
            global: ours.global,
            gid: ours.gid,
            ..DirectQueue::new_zeroed()
        })?;
        let peer = Queues {
            count: 2,
            receives: 16,
            message: 8192,
            mtu: answer.mtu,
            psn: answer.psn,
            lid: answer.lid,
            global: answer.global,
            gid: answer.gid,
            queue_pairs: [answer.queue_pair; _],
            depth: 16,
            ..Queues::new_zeroed()
        };
        let mut link = link.connect(&peer)?;
        socket.write_all(&[1])?;
        let source = buffer.registration().slice(0, if what == "wild-write" { 64 } else { 0 });
        link.put(&Put {
            queue: 1,
            source: source.ok_or("no source")?,
            header: None,
            address: buffer.registration().address(),
            key: buffer.registration().remote_key(),
            place: (0, 0),
            immediate: 1,
            token: 0,
            signal: true,
        })?;
        return ends(session, &socket, 1);
    }
    let mut queue: Pieces<Own> = Pieces::new(domain, End::Sending, PIECES, settings)?;
    if what == "nonsense" {
        let nonsense =
            DirectQueue { queue_pair: u32::MAX, mtu: 7, gid: [0xff; 16], ..DirectQueue::new_zeroed() };
        if agree(&nonsense)?.queue_pair != 0 {
            return Err("it has agreed to nonsense".into());
        }
        // Pieces take the socket then.
        socket.write_all(&[header(1, 8).as_bytes(), &[5; 8]].concat())?;
        lands(session, 1, 5)?;
        drop(socket);
        return Ok(());
    }
    let answer = agree(&queue.offer())?;
    queue.connect(&answer)?;
    if what == "no-probe" {
        queue.send(&header(1, 8), piece(8), false)?;
        settle(&mut queue)?;
        socket.write_all(&[1])?;
        return ends(session, &socket, 1);
    }
    queue.send(&DirectHeader::new_zeroed(), None, false)?;
    settle(&mut queue)?;
    if what == "half-agreed" {
        // It neither agrees nor declines.
        drop(socket);
        return rejected(session, 1);
    }
    socket.write_all(&[1])?;
    store(&buffer, &[6; 8])?;
    queue.send(&header(1, 8), piece(8), false)?;
    settle(&mut queue)?;
    // Whatever comes next has a receive.
    while !queue.may_send() {
        let mut granted = [0];
        socket.read_exact(&mut granted)?;
        queue.grant(granted[0].into())?;
    }
    match what {
        "long-piece" => queue.send(&header(2, 2 << 20), piece(2 << 20), false)?,
        "wrong-length" => queue.send(&header(2, 10), piece(20), false)?,
        "number-again" => queue.send(&header(1, 8), piece(8), false)?,
        "socket-bytes" => socket.write_all(&[1])?,
        "beyond-receives" => {
            // Nobody lands them, so not all of them can come; the server's device refuses one.
            let last = 2 + 2 * PIECES as u64;
            if (2..=last).try_for_each(|number| push(&mut queue, &header(number, 8), piece(8))).is_ok() {
                return Err("all of them were taken".into());
            }
            drop((queue, socket));
            lands(session, 1, 6)?;
            return rejected(session, last);
        }
        "silent" => {
            drop((queue, socket));
            lands(session, 1, 6)?;
            return rejected(session, 2);
        }
        _ => return Err(format!("there is no attack {what:?}").into()),
    }
    // What came before can be landed.
    lands(session, 1, 6)?;
    ends(session, &socket, 2)
}

/// Sends a piece, whether or not there is a receive for it, and waits until it has left.
fn push(queue: &mut Pieces<Own>, header: &DirectHeader, piece: Option<(Own, usize)>) -> Result<()> {
    if !queue.may_send() {
        queue.grant(1)?;
    }
    queue.send(header, piece, false)?;
    settle(queue)
}

/// Writes into a buffer.
fn store(buffer: &Slab, bytes: &[u8]) -> Result<()> {
    let at = buffer.pointer(0, bytes.len()).ok_or("no memory")?;
    // SAFETY: inside the slab, which no request under way uses.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.as_ptr(), bytes.len()) };
    Ok(())
}

fn rejected(session: &mut TcpSession, number: u64) -> Result<()> {
    match session.call(&DirectArrival { direct: 1, number }) {
        Ok(_) => Err(format!("piece {number} has come").into()),
        Err(_) => Ok(()),
    }
}

/// A piece of 8 bytes has come, each of which is `value`.
fn lands(session: &mut TcpSession, number: u64, value: u8) -> Result<()> {
    session.call(&DirectArrival { direct: 1, number })?;
    let dst = Pitched { address: BASE + 512, pitch: 8, slice: 8 };
    session.push(&DirectLand { stream: STREAM, direct: 1, number, dst, extent: [8, 1, 1] });
    let landed = session.call(&MemcpyDtoHInline { stream: STREAM, src: BASE + 512, len: 8 })?.bytes.0;
    if landed == [value; 8] { Ok(()) } else { Err(format!("{landed:?} has landed").into()) }
}

/// The server closes the connection, and the piece will not come.
fn ends(session: &mut TcpSession, mut socket: &TcpStream, number: u64) -> Result<()> {
    rejected(session, number)?;
    // Grants may come before the end.
    while socket.read(&mut [0; 16]).is_ok_and(|n| n > 0) {}
    Ok(())
}

fn receiver(session: &mut TcpSession, domain: &Arc<Domain>, settings: &Settings, what: &str) -> Result<()> {
    let listener = TcpListener::bind(LISTEN)?;
    let ticket = DirectTicket {
        token: [1; 16],
        secret: [2; 32],
        key: [0; 32],
        encrypted: false,
        addresses: vec![format!("tcp:{LISTEN}")],
    };
    let (domain, settings, attack) = (Arc::clone(domain), settings.clone(), what.to_owned());
    let peer = std::thread::spawn(move || -> std::result::Result<(), String> {
        receive(&listener, &domain, &settings, &attack).map_err(|e| e.to_string())
    });
    let refusal = session.call(&DirectOpen { direct: 1, ticket })?.refusal;
    if (what == "closes-early") == refusal.is_empty() {
        return Err(format!("{what}: {refusal:?}").into());
    }
    if refusal.is_empty() {
        let src = Pitched { address: BASE, pitch: 8, slice: 8 };
        session.push(&MemcpyHtoD { stream: STREAM, dst: BASE, src: HostIn::Inline(&[9; 8]) });
        for number in 1..=PIECES_SENT {
            session.push(&DirectSend {
                stream: STREAM,
                direct: 1,
                number,
                src: src.clone(),
                extent: [8, 1, 1],
            });
        }
    }
    peer.join().map_err(|_| "the receiver has panicked")??;
    Ok(())
}

fn receive(listener: &TcpListener, domain: &Arc<Domain>, settings: &Settings, what: &str) -> Result<()> {
    let mut socket = listener.accept()?.0;
    socket.set_read_timeout(Some(PATIENCE))?;
    recv_struct::<Hello>(socket.as_fd(), &mut Vec::new())?.ok_or("no hello")?;
    send_message(socket.as_fd(), &[welcome(Answer::Ok, "").as_bytes()], &[])?;
    let (mut offer, mut theirs) = (DirectHeader::new_zeroed(), DirectQueue::new_zeroed());
    socket.read_exact(offer.as_mut_bytes())?;
    socket.read_exact(theirs.as_mut_bytes())?;
    if offer != DirectHeader::offer() {
        return Err("no offer of verbs".into());
    }
    if what == "closes-early" {
        return Ok(());
    }
    let mut queue: Pieces<Own> = Pieces::new(domain, End::Receiving, PIECES, settings)?;
    for _ in 0..2 {
        queue.receive(Own(Arc::new(Slab::new(domain, MAX_PIECE as usize, Access::Write)?)))?;
    }
    queue.connect(&DirectQueue { receives: 0, ..theirs })?;
    let honest = queue.offer();
    let answer = match what {
        "wild-queue" => DirectQueue { queue_pair: 0xab_cdef, ..honest },
        "nonsense" => DirectQueue { mtu: 7, ..honest },
        "too-many-receives" => DirectQueue { receives: 1000, ..honest },
        _ => honest,
    };
    socket.write_all(answer.as_bytes())?;
    let mut agreed = [9];
    socket.read_exact(&mut agreed)?;
    if answer != honest {
        if agreed != [0] {
            return Err(format!("it has agreed to {what}").into());
        }
        // All of its pieces come over the socket.
        for number in 1..=PIECES_SENT {
            let mut piece = [0; size_of::<DirectHeader>() + 8];
            socket.read_exact(&mut piece)?;
            if piece != [header(number, 8).as_bytes(), &[9; 8]].concat()[..] {
                return Err(format!("{piece:?} came").into());
            }
        }
        return Ok(());
    }
    if agreed != [1] {
        return Err("it has declined".into());
    }
    settle(&mut queue)?;
    match what {
        "grants-too-many" => socket.write_all(&[200])?,
        // It takes the piece for which there is a receive, and no more.
        "no-grants" => {}
        "refuses-a-piece" => drop(queue),
        "closes" => return Ok(()),
        _ => return Err(format!("there is no attack {what:?}").into()),
    }
    // It closes the connection.
    while socket.read(&mut [0; 16]).is_ok_and(|n| n > 0) {}
    Ok(())
}
