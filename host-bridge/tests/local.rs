//! The transport `local`, against the worker's real end in a thread of this process.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use protocol::Status;
use protocol::channel::{NO_SLOT, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::Answer;
use protocol::handle::StreamId;
use protocol::link::{Hello, MAGIC, frame, purpose};
use protocol::ops::Op;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamSynchronize;
use protocol::wire::{Reader, Wire};
use rgpu_host_bridge::bridge::{Closed, ConnectError, RegionError, SessionConfig};
use rgpu_host_bridge::endpoint::{Client as Worker, Commands, LocalCommands, Polling, Sink, Source};
use rgpu_host_bridge::framing::{Address, recv_frame, recv_struct, send_frame, send_message};
use test_kit::link::welcome;
use test_kit::session::Client;
use test_kit::*;
use zerocopy::IntoBytes;

/// What a worker does when a session has been opened with it.
#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    Good,
    /// Closes the socket at the first command, as a crash does.
    Dies,
    /// Says why it ends at the first command.
    Leaves,
    /// Refuses in the welcome.
    Refuses,
    /// Refuses the channel's memory.
    RefusesMemory,
}

struct Server {
    config: SessionConfig,
    ended: Arc<AtomicUsize>,
    trouble: Arc<Mutex<Vec<String>>>,
    _folder: tempfile::TempDir,
}

fn server(behaviour: Behaviour) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (ended, trouble) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (for_thread, for_trouble) = (ended.clone(), trouble.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(stream), ended, trouble) = (stream, for_thread.clone(), for_trouble.clone()) else {
                return;
            };
            std::thread::spawn(move || {
                if let Err(e) = work(stream, behaviour) {
                    trouble.lock().unwrap().push(e);
                }
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
    });
    Server { config: SessionConfig::new(Address::Unix(path), "test-host"), ended, trouble, _folder: folder }
}

fn work(socket: UnixStream, behaviour: Behaviour) -> Result<(), String> {
    let hello: Hello = recv_struct(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
    assert_eq!((hello.magic, hello.purpose), (MAGIC, purpose::LOCAL));
    let refuses = behaviour == Behaviour::Refuses;
    let welcome = match refuses {
        true => welcome(Answer::NoResources, "all GPUs are taken"),
        false => welcome(Answer::Ok, ""),
    };
    send_message(socket.as_fd(), &[welcome.as_bytes()], &[]).unwrap();
    if refuses {
        return Ok(());
    }
    if behaviour == Behaviour::RefusesMemory {
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        assert_eq!(recv_frame(socket.as_fd(), &mut body, &mut fds).unwrap(), Some(frame::ATTACH));
        assert_eq!(fds.len(), 3, "one memory, doorbell, wake");
        let ack = protocol::link::Ack { status: Answer::Invalid as u32, reserved: 0 };
        send_frame(socket.as_fd(), frame::ACK, &[ack.as_bytes(), b"I do not like it"], &[]).unwrap();
        return Ok(());
    }
    let (mut commands, client) =
        LocalCommands::attach(socket, Polling::default()).map_err(|e| e.to_string())?;
    let mut memory = std::collections::HashMap::new();
    let mut body = Vec::new();
    let result = loop {
        let record = match commands.next(&mut body) {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(e) => break Err(e.reason),
        };
        let mut reader = Reader::new(&body);
        match behaviour {
            Behaviour::Dies => break Err("died".into()),
            Behaviour::Leaves => {
                client.lose("this GPU has fallen off the bus");
                break Err("left".into());
            }
            _ => {}
        }
        if record.opcode == MemcpyHtoD::INFO.opcode {
            let op = MemcpyHtoD::get(&mut reader).unwrap();
            let HostIn::Range(range) = op.src else { panic!("inline") };
            let Source::Mapped(mapped) = client.source(record.seq, 0, range).unwrap() else {
                panic!("not mapped")
            };
            let mut bytes = Vec::new();
            for (at, len) in mapped.runs() {
                // SAFETY: a mapped run, not written by anybody now.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at.as_ptr(), *len) });
            }
            memory.insert(op.dst, bytes);
        } else if record.opcode == MemcpyDtoH::INFO.opcode {
            let op = MemcpyDtoH::get(&mut reader).unwrap();
            let HostOut(range) = op.dst;
            let Sink::Mapped(mapped) = client.sink(record.seq, 0, range).unwrap() else {
                panic!("not mapped")
            };
            let mut rest = &memory[&op.src][..];
            for (at, len) in mapped.runs() {
                // SAFETY: a mapped run, not used by anybody else now.
                unsafe { at.copy_from(std::ptr::NonNull::from(rest).cast(), *len) };
                rest = &rest[*len..];
            }
        }
        client.executed(record.seq);
        if record.reply_slot != NO_SLOT {
            client.reply(record.seq, record.reply_slot, Status::SUCCESS, &record.seq.to_le_bytes());
        }
    };
    client.close();
    result
}

#[test]
fn commands_and_data_travel_through_the_clients_memory() {
    let server = server(Behaviour::Good);
    let mut client = Client::connect(&server.config);
    assert!(client.session.capabilities().server_reads_ring);
    let extents = scattered(1_234_567, 3);
    let bytes = pattern(1_234_567, 3);
    client.write(&extents, &bytes);
    client.register(4, extents.clone(), false).unwrap();
    client.htod(1, region(4, 0, 1_234_567));
    client.synchronize();
    client.write(&extents, &vec![0; 1_234_567]);
    client.dtoh(1, region(4, 0, 1_234_567));
    client.synchronize();
    assert!(client.read(&extents) == bytes);
    client.session.unregister_region(4).unwrap();
    assert!(matches!(client.session.unregister_region(4), Err(RegionError::Unknown(4))));
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
    eventually(|| server.ended.load(Ordering::SeqCst) == 1);
    assert!(server.trouble.lock().unwrap().is_empty());
}

#[test]
fn a_doorbell_wakes_the_worker_and_an_answer_wakes_the_client() {
    let server = server(Behaviour::Good);
    let mut client = Client::connect(&server.config);
    for round in 1..=20 {
        // The worker sleeps; so does the client's thread, as far as its slot says.
        eventually(|| client.header().host_sleep.is_asleep());
        client.prepare(1);
        let seq = client.push(&StreamSynchronize { stream: StreamId(0) }, 1);
        let (completion, payload) = client.answer(1);
        assert_eq!((completion.status, payload), (Status::SUCCESS, seq.to_le_bytes().to_vec()));
        assert_eq!(seq, round);
    }
}

#[test]
fn a_dead_worker_ends_the_session_and_every_wait() {
    let server = server(Behaviour::Dies);
    let mut client = Client::connect(&server.config);
    client.prepare(7);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 7);
    assert_eq!(client.answer(7).0.status, Status::DEVICE_UNAVAILABLE);
    let reason = client.wait_lost();
    assert!(reason.contains("server.sock"), "{reason}");
    assert!(matches!(client.register(1, scattered(10, 1), false), Err(RegionError::Over(_))));
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
}

#[test]
fn a_workers_own_reason_is_what_the_client_reads() {
    let server = server(Behaviour::Leaves);
    let mut client = Client::connect(&server.config);
    client.push(&protocol::ops::stream::StreamMark { stream: StreamId(0) }, NO_SLOT);
    eventually(|| client.lost.lock().unwrap().is_some());
    assert_eq!(client.header().state(), State::Lost);
    assert!(client.header().reason().contains("fallen off the bus"), "{}", client.header().reason());
    assert!(client.lost.lock().unwrap().as_ref().unwrap().contains("fallen off the bus"));
}

#[test]
fn a_malformed_record_ends_only_its_session() {
    let server = server(Behaviour::Good);
    let mut bystander = Client::connect(&server.config);
    let client = Client::connect(&server.config);
    client.tail().store(7, Ordering::Release);
    client.session.doorbell();
    client.wait_lost();
    assert!(client.header().reason().contains("cursor"), "{}", client.header().reason());
    bystander.synchronize();
}

#[test]
fn refusals_come_with_the_servers_words() {
    let refused = server(Behaviour::Refuses);
    let error = Client::try_connect(&refused.config).err().unwrap();
    assert!(matches!(error, ConnectError::Refused { answer: Answer::NoResources, .. }), "{error}");
    assert!(error.to_string().contains("all GPUs are taken"), "{error}");
    let refused = server(Behaviour::RefusesMemory);
    let error = Client::try_connect(&refused.config).err().unwrap();
    assert_eq!(error.answer(), Answer::Invalid);
    assert!(error.to_string().contains("I do not like it"), "{error}");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let config = SessionConfig::new("unix:/nonexistent/server.sock".parse().unwrap(), "test-host");
    let error = Client::try_connect(&config).err().unwrap();
    assert_eq!(error.answer(), Answer::NoServer);
    assert!(error.to_string().contains("/nonexistent/server.sock"), "{error}");
}

#[test]
fn closing_waits_until_the_worker_has_released_memory() {
    let server = server(Behaviour::Good);
    for round in 1..=20 {
        let mut client = Client::connect(&server.config);
        client.synchronize();
        assert_eq!(client.session.close("next", PATIENCE), Closed::Released);
        assert!(client.lost.lock().unwrap().is_none(), "a close that was asked for is no loss");
        eventually(|| server.ended.load(Ordering::SeqCst) == round);
    }
}
