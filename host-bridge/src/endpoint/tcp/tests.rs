//! What the worker's end of a `tcp` session says on its connections, and over new ones.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use protocol::data::Place;
use protocol::link::{DataHeader, FrameHeader, frame, progress};
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::compression::CompressUse;
use crate::endpoint::{Held, Polling};
use crate::framing::{FrameReader, resumed_body};

const ALLOWANCE: Allowance =
    Allowance { grace: Duration::ZERO, replay: 0, eager: 0, compress: CompressUse::Never };

/// The kinds of the frames that have come.
fn kinds(stream: &mut TcpStream) -> Vec<u32> {
    let mut reader = FrameReader::new();
    reader.fill(stream).unwrap();
    let mut all = Vec::new();
    while let Some((kind, body)) = reader.next_frame().unwrap() {
        assert!(kind != frame::PROGRESS || body[0] == progress::EXECUTED as u8);
        all.push(kind);
    }
    assert_eq!(reader.buffered(), 0);
    all
}

#[test]
fn what_was_executed_goes_along_with_an_answer_and_alone_only_when_it_is_to_be_told() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut bridge = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let control = listener.accept().unwrap().0;
    let (_commands, client) =
        TcpCommands::start(control.into(), 64, 1, Polling::default(), ALLOWANCE).unwrap();
    client.executed(1);
    client.executed(2);
    client.reply(3, 0, Status::SUCCESS, &[]);
    assert_eq!(kinds(&mut bridge), [frame::PROGRESS, frame::REPLY]);
    client.flush_executed();
    client.executed(3);
    client.publish(&[]);
    client.flush_executed();
    assert_eq!(kinds(&mut bridge), [frame::PROGRESS]);
    client.flush_executed();
    client.reply(4, 0, Status::SUCCESS, &[]);
    assert_eq!(kinds(&mut bridge), [frame::REPLY]);
    client.close();
}

struct Bytes;

impl Held for Bytes {
    fn bytes(&self) -> &[u8] {
        b"download"
    }
}

#[test]
fn datas_end_is_told_with_the_next_words_or_alone_and_before_the_data_has_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connect = || {
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    };
    let ((mut bridge, control), (mut data, theirs)) = (connect(), connect());
    let (_commands, client) =
        TcpCommands::start(control.into(), 64, 1, Polling::default(), ALLOWANCE).unwrap();
    client.add_data_connection(0, 0, theirs.into()).unwrap();
    let outgoing = |seq| {
        let range = HostRange { place: Place::Arena, offset: 0, len: 8 };
        let Ok(Sink::Outgoing(outgoing)) = client.sink(seq, 0, range) else { panic!("no data") };
        outgoing
    };
    let download = outgoing(1);
    let leaving = download.send_held(0, 0, Box::new(Bytes)).unwrap();
    let telling = download.end();
    client.reply(2, 0, Status::SUCCESS, &[]);
    assert_eq!(kinds(&mut bridge), [frame::DATA_SENT, frame::REPLY]);
    drop(leaving);
    let mut chunk = [0; size_of::<DataHeader>() + 8];
    data.read_exact(&mut chunk).unwrap();
    assert!(chunk.ends_with(Bytes.bytes()));
    drop(telling);
    drop(outgoing(3).end());
    assert_eq!(kinds(&mut bridge), [frame::DATA_SENT]);
    client.close();
}

/// Both ends of a new connection.
fn pair() -> (TcpStream, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (ours, listener.accept().unwrap().0.into())
}

/// A session that outlives its connections, and the bridge's ends of these: control, and data.
fn session(lanes: u32) -> (TcpCommands, Arc<TcpClient>, TcpStream, Vec<TcpStream>) {
    let (bridge, control) = pair();
    let allowance = Allowance { grace: Duration::from_secs(600), ..ALLOWANCE };
    let (commands, client) = TcpCommands::start(control, 64, lanes, Polling::default(), allowance).unwrap();
    let connect = |index| {
        let (ours, theirs) = pair();
        client.add_data_connection(0, index, theirs).unwrap();
        ours
    };
    let data = (0..lanes).map(connect).collect();
    (commands, client, bridge, data)
}

/// Data of command `seq` for the client's arena.
fn download(client: &TcpClient, seq: u64, offset: u64, len: usize) -> Outgoing {
    let range = HostRange { place: Place::Arena, offset, len: len as u64 };
    let Ok(Sink::Outgoing(outgoing)) = client.sink(seq, 0, range) else { panic!("no data") };
    outgoing
}

/// So many bytes of the same value.
struct Filled(Vec<u8>);

impl Held for Filled {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn filled(byte: u8, len: usize) -> Box<Filled> {
    Box::new(Filled(vec![byte; len]))
}

/// The next chunk on a data connection.
fn chunk(data: &mut TcpStream) -> (DataHeader, Vec<u8>) {
    let mut header = DataHeader::new_zeroed();
    data.read_exact(header.as_mut_bytes()).unwrap();
    let mut bytes = vec![0; header.len as usize];
    data.read_exact(&mut bytes).unwrap();
    (header, bytes)
}

/// Brings the session new connections, and says that the bridge has `received` of each stream.
fn resume(client: &TcpClient, attempt: u32, received: &[u64]) -> (TcpStream, Vec<TcpStream>) {
    let (mut control, theirs) = pair();
    client.resume(attempt, theirs).unwrap();
    let connect = |index| {
        let (ours, theirs) = pair();
        client.add_data_connection(attempt, index, theirs).unwrap();
        ours
    };
    let data = (0..received.len() as u32 - 1).map(connect).collect();
    let body = resumed_body(received);
    control.write_all(FrameHeader { kind: frame::RESUMED, len: body.len() as u32 }.as_bytes()).unwrap();
    control.write_all(&body).unwrap();
    // What it has is said as long.
    control.read_exact(&mut vec![0; size_of::<FrameHeader>() + body.len()]).unwrap();
    (control, data)
}

#[test]
fn later_data_for_the_same_bytes_follows_the_earlier_on_its_connection() {
    let (_commands, client, _bridge, mut data) = session(2);
    let first = download(&client, 1, 0, 1000);
    let leaving = first.send_held(1, 0, filled(1, 1000)).unwrap();
    drop(first.end());
    // It has been queued, as the client will hear, and has not left.
    let second = download(&client, 2, 900, 50);
    drop(second.send_held(0, 0, filled(2, 50)).unwrap());
    drop(second.end());
    drop(leaving);
    let mut seqs = [0; 2];
    seqs.fill_with(|| chunk(&mut data[1]).0.seq);
    assert_eq!(seqs, [1, 2]);
    // Other bytes go where they like.
    drop(download(&client, 3, 1000, 10).send_held(0, 0, filled(3, 10)).unwrap());
    assert_eq!(chunk(&mut data[0]).0.seq, 3);
    client.close();
}

#[test]
fn data_that_was_announced_and_had_not_left_when_the_link_was_cut_comes_over_the_next() {
    let (_commands, client, bridge, data) = session(1);
    let first = download(&client, 1, 0, 1000);
    let leaving = first.send_held(0, 0, filled(1, 1000)).unwrap();
    let telling = first.end();
    drop((bridge, data));
    let (mut control, mut data) = resume(&client, 1, &[0; 2]);
    assert_eq!(kinds(&mut control), [frame::DATA_SENT]);
    let (header, bytes) = chunk(&mut data[0]);
    assert_eq!((header.seq, bytes), (1, vec![1; 1000]));
    // Once, and what follows does so.
    drop((leaving, telling));
    drop(download(&client, 2, 0, 10).send_held(0, 0, filled(2, 10)).unwrap());
    assert_eq!(chunk(&mut data[0]).0.seq, 2);
    client.close();
}

/// Its bridge reads no more of the control connection before it has the data.
#[test]
fn data_comes_over_a_new_link_also_if_the_bridge_does_not_read_what_was_said_meanwhile() {
    let (_commands, client, bridge, data) = session(1);
    drop((bridge, data));
    let first = download(&client, 1, 0, 8);
    drop(first.send_held(0, 0, filled(1, 8)).unwrap());
    drop(first.end());
    // More than any connection holds.
    (0..16 << 10).for_each(|seq| client.reply(seq, 0, Status::SUCCESS, &[0; 1 << 10]));
    let (_control, mut data) = resume(&client, 1, &[0; 2]);
    assert_eq!(chunk(&mut data[0]).0.seq, 1);
    client.close();
}

/// Whoever brings it may have others to hear.
#[test]
fn a_first_data_connection_is_added_without_waiting_until_what_was_kept_for_it_has_left() {
    let (_bridge, control) = pair();
    let allowance = Allowance { grace: Duration::from_secs(600), replay: 64 << 20, ..ALLOWANCE };
    let (_commands, client) = TcpCommands::start(control, 64, 1, Polling::default(), allowance).unwrap();
    let len = 32 << 20;
    let first = download(&client, 1, 0, len);
    drop(first.send_held(0, 0, filled(1, len)).unwrap());
    let (mut data, theirs) = pair();
    let (adding, added) = channel();
    let adds = Arc::clone(&client);
    std::thread::spawn(move || adding.send(adds.add_data_connection(0, 0, theirs).is_ok()));
    assert_eq!(added.recv_timeout(Duration::from_secs(20)), Ok(true));
    let mut came = 0;
    while came < len {
        came += chunk(&mut data).1.len();
    }
    client.close();
}
