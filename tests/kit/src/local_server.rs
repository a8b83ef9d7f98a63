//! A server of this host whose workers are the real ends of `local` sessions, in threads, over "device
//! memory" in a map.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use host_bridge::bridge::SessionConfig;
use host_bridge::endpoint::{Client, Commands, Held, LocalCommands, Lost, Mapped, Polling, Sink, Source};
use host_bridge::framing::{Address, recv_frame, recv_struct, send_frame, send_message};
use protocol::Status;
use protocol::channel::NO_SLOT;
use protocol::data::{HostIn, HostOut};
use protocol::device::Answer;
use protocol::link::{Ack, Hello, MAGIC, frame, purpose};
use protocol::ops::Op;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::wire::{Reader, Wire};
use zerocopy::IntoBytes;

use crate::link::welcome;
use crate::{PATIENCE, be_patient};

/// What a worker does when a session has been opened with it.
#[derive(Clone, Copy, PartialEq)]
pub enum Behavior {
    /// Executes all commands.
    Good,
    /// Does not let go of the memory of copies to the device until [`LocalServer::let_go`].
    Keeps,
    /// Closes the socket at the first command, as a crash does.
    Dies,
    /// Says why it ends at the first command.
    Leaves,
    /// Refuses in the welcome.
    Refuses,
    /// Refuses the channel's memory.
    RefusesMemory,
}

/// A server with the real end of `local` sessions, one thread for each.
pub struct LocalServer {
    /// How to reach it.
    pub config: SessionConfig,
    /// Sessions that have ended.
    pub ended: Arc<AtomicUsize>,
    /// Why sessions ended otherwise than by their clients' will.
    pub trouble: Arc<Mutex<Vec<String>>>,
    kept: Kept,
    _folder: tempfile::TempDir,
}

pub(crate) type Kept = Arc<Mutex<Vec<Mapped>>>;

impl LocalServer {
    /// Lets go of the memory that it [keeps](Behavior::Keeps).
    pub fn let_go(&self) {
        self.kept.lock().unwrap().clear();
    }

    /// Copies whose memory it keeps.
    pub fn keeps(&self) -> usize {
        self.kept.lock().unwrap().len()
    }

    /// Starts one.
    pub fn start(behavior: Behavior) -> LocalServer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (ended, trouble) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (for_thread, for_trouble, kept) = (ended.clone(), trouble.clone(), Kept::default());
        let for_kept = kept.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let (ended, trouble, kept) = (for_thread.clone(), for_trouble.clone(), for_kept.clone());
                std::thread::spawn(move || {
                    if let Err(e) = work(stream, behavior, &kept) {
                        trouble.lock().unwrap().push(e);
                    }
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        let mut config = SessionConfig::new(Address::Unix(path), "test-host");
        be_patient(&mut config);
        LocalServer { config, ended, trouble, kept, _folder: folder }
    }
}

fn work(socket: UnixStream, behavior: Behavior, kept: &Kept) -> Result<(), String> {
    let hello: Hello = recv_struct(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
    assert_eq!((hello.magic, hello.purpose), (MAGIC, purpose::LOCAL));
    let refuses = behavior == Behavior::Refuses;
    let welcome = match refuses {
        true => welcome(Answer::NoResources, "all GPUs are taken"),
        false => welcome(Answer::Ok, ""),
    };
    send_message(socket.as_fd(), &[welcome.as_bytes()], &[]).unwrap();
    if refuses {
        return Ok(());
    }
    if behavior == Behavior::RefusesMemory {
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        assert_eq!(recv_frame(socket.as_fd(), &mut body, &mut fds).unwrap(), Some(frame::ATTACH));
        assert!(fds.len() >= 3, "one memory, doorbell, wake");
        let ack = Ack { status: Answer::Invalid as u32, reserved: 0 };
        send_frame(socket.as_fd(), frame::ACK, &[ack.as_bytes(), b"I do not like it"], &[]).unwrap();
        return Ok(());
    }
    serve(socket, behavior, kept)
}

/// Executes a session's commands after the welcome.
fn serve(socket: UnixStream, behavior: Behavior, kept: &Kept) -> Result<(), String> {
    let (mut commands, client) =
        LocalCommands::attach(socket, Polling::default(), PATIENCE).map_err(|e| e.to_string())?;
    let result = execute(&mut commands, &*client, behavior, kept);
    client.close();
    result
}

/// Executes a session's commands over "device memory" in a map, until it ends.
pub(crate) fn execute(
    commands: &mut dyn Commands,
    client: &dyn Client,
    behavior: Behavior,
    kept: &Kept,
) -> Result<(), String> {
    let mut memory = std::collections::HashMap::new();
    let mut body = Vec::new();
    loop {
        let record = match commands.next(&mut body, &mut || {}) {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(e) => break Err(e.reason),
        };
        let (mut reader, mut sent) = (Reader::new(&body), None);
        match behavior {
            Behavior::Dies => break Err("died".into()),
            Behavior::Leaves => {
                client.lose("this GPU has fallen off the bus");
                break Err("left".into());
            }
            _ => {}
        }
        if record.opcode == MemcpyHtoD::INFO.opcode {
            let op = MemcpyHtoD::get(&mut reader).unwrap();
            let HostIn::Range(range) = op.src else { panic!("inline") };
            let mut bytes = Vec::new();
            match client.source(record.seq, 0, range).unwrap() {
                Source::Mapped(mapped) => {
                    for (at, len) in mapped.runs() {
                        // SAFETY: a mapped run, not written by anybody now.
                        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at.as_ptr(), *len) });
                    }
                    if behavior == Behavior::Keeps {
                        kept.lock().unwrap().push(mapped);
                    }
                }
                Source::Incoming(incoming) => match incoming.collect() {
                    Ok(came) => bytes = came,
                    Err(e) => break Err(e.reason),
                },
                Source::Placed(placed) => {
                    let read = placed.read::<Lost>(|_, chunk| {
                        let at = bytes.len();
                        bytes.resize(at + chunk.len(), 0);
                        chunk.read(&mut bytes[at..]);
                        Ok(())
                    });
                    if let Err(e) = read {
                        break Err(e.reason);
                    }
                }
            }
            memory.insert(op.dst, bytes);
        } else if record.opcode == MemcpyDtoH::INFO.opcode {
            let op = MemcpyDtoH::get(&mut reader).unwrap();
            let HostOut(range) = op.dst;
            // A copy may be of its first bytes only.
            let bytes = &memory[&op.src];
            let mut rest = &bytes[..bytes.len().min(range.len as usize)];
            match client.sink(record.seq, 0, range).unwrap() {
                Sink::Mapped(mapped) => {
                    for (at, len) in mapped.runs() {
                        // SAFETY: a mapped run, not used by anybody else now.
                        unsafe { at.copy_from(std::ptr::NonNull::from(rest).cast(), *len) };
                        rest = &rest[*len..];
                    }
                }
                // As with a device that goes on before its data has left.
                Sink::Outgoing(outgoing) => {
                    match outgoing.send_held(record.seq as usize, 0, Box::new(Made(rest.to_vec()))) {
                        Ok(leaving) => sent = Some((leaving, outgoing.end())),
                        Err(e) => break Err(e.reason),
                    }
                }
            }
        }
        client.executed(record.seq);
        if record.reply_slot != NO_SLOT {
            client.reply(record.seq, record.reply_slot, Status::SUCCESS, &record.seq.to_le_bytes());
        }
        drop(sent);
    }
}

/// Data that was made for a command.
struct Made(Vec<u8>);

impl Held for Made {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}
