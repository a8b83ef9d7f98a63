//! The transport `local`, against the worker's real end in a thread of this process.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use protocol::Status;
use protocol::channel::{NO_SLOT, State};
use protocol::device::{Answer, Extent};
use protocol::handle::StreamId;
use protocol::link::{
    ATTACH_FUTEX, ATTACH_SUCCESSION, Ack, Attach, FrameHeader, Hello, MEMORIES_SINCE, Memory,
    REGION_READ_ONLY, RegionAdd, frame,
};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::version::Version;
use rgpu_host_bridge::bridge::{
    ChannelMemory, Closed, ConnectError, Prepared, RegionError, Session, SessionConfig, Turn, Wakeup,
};
use rgpu_host_bridge::endpoint::{Commands, LocalCommands, Polling};
use rgpu_host_bridge::framing::{Address, recv_frame, recv_struct, send_frame, send_message};
use rgpu_host_bridge::memory::Memories;
use test_kit::channel::{Channel, in_a_file};
use test_kit::link::welcome;
use test_kit::local_server::{Behavior, LocalServer};
use test_kit::session::{Client, RAM};
use test_kit::*;
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn commands_and_data_travel_through_the_clients_memory() {
    let server = LocalServer::start(Behavior::Good);
    let mut client = Client::connect(&server.config);
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
    let server = LocalServer::start(Behavior::Good);
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
    let server = LocalServer::start(Behavior::Dies);
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
    let server = LocalServer::start(Behavior::Leaves);
    let mut client = Client::connect(&server.config);
    client.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    eventually(|| client.lost.lock().unwrap().is_some());
    assert_eq!(client.header().state(), State::Lost);
    assert!(client.header().reason().contains("fallen off the bus"), "{}", client.header().reason());
    assert!(client.lost.lock().unwrap().as_ref().unwrap().contains("fallen off the bus"));
}

#[test]
fn a_malformed_record_ends_only_its_session() {
    let server = LocalServer::start(Behavior::Good);
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
    let refused = LocalServer::start(Behavior::Refuses);
    let error = Client::try_connect(&refused.config).err().unwrap();
    assert!(matches!(error, ConnectError::Refused { answer: Answer::NoResources, .. }), "{error}");
    assert!(error.to_string().contains("all GPUs are taken"), "{error}");
    let refused = LocalServer::start(Behavior::RefusesMemory);
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
    let server = LocalServer::start(Behavior::Good);
    for round in 1..=20 {
        let mut client = Client::connect(&server.config);
        client.synchronize();
        assert_eq!(client.session.close("next", PATIENCE), Closed::Released);
        assert!(client.lost.lock().unwrap().is_none(), "a close that was asked for is no loss");
        eventually(|| server.ended.load(Ordering::SeqCst) == round);
    }
}

#[test]
fn a_worker_of_an_older_version_is_not_told_of_memory_that_was_plugged_in() {
    let server = LocalServer::start(Behavior::Good);
    let older = Version { minor: MEMORIES_SINCE.minor - 1, ..MEMORIES_SINCE };
    for (version, plugs) in [(MEMORIES_SINCE, true), (older, false)] {
        let mut client = Client::of_version(&server.config, version);
        let places = [0, RAM].map(|addr| Memory { addr, size: RAM, file_offset: 0 });
        let (_, first) = client.memories.files().next().unwrap();
        let files = [first.try_clone().unwrap(), memfd(RAM)];
        client.memories = Memories::map(places.into_iter().zip(files).collect()).unwrap();
        let extents = |addr| vec![Extent { addr, len: 4096 }];
        match client.register(1, extents(RAM), false) {
            Err(error @ RegionError::NewMemory { .. }) if !plugs => {
                assert!(error.to_string().contains(&format!("version {MEMORIES_SINCE}")), "{error}");
            }
            result => assert!(result.is_ok() && plugs, "{result:?}"),
        }
        // What the worker has can be registered as before.
        client.register(2, extents(0x200_0000), false).unwrap();
        client.synchronize();
    }
}

#[test]
fn a_worker_that_cannot_map_the_clients_memories_refuses_them_and_goes_on() {
    let (worker, first) = Succeeded::begin();
    let answer = || {
        let mut body = Vec::new();
        assert_eq!(recv_frame(first.as_fd(), &mut body, &mut Vec::new()).unwrap(), Some(frame::ACK));
        Answer::from_number(Ack::read_from_prefix(&body).unwrap().0.status)
    };
    let memories = |size: u64, files: &[OwnedFd]| {
        let memory = Memory { addr: 0, size, file_offset: 0 };
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_frame(first.as_fd(), frame::MEMORIES, &[memory.as_bytes()], &files).unwrap();
        answer()
    };
    let adds = |region| {
        (&first).write_all(&add(region, 0, &[1])).unwrap();
        answer()
    };
    assert_eq!(adds(1), Answer::Ok);
    assert_eq!(memories(1 << 20, &[memfd(1 << 20)]), Answer::Ok);
    assert_eq!(adds(2), Answer::Ok);
    // A file that is shorter than it should be, and too few files.
    assert_eq!(memories(1 << 30, &[memfd(1 << 20)]), Answer::NoResources);
    assert_eq!(adds(3), Answer::Invalid);
    assert_eq!(memories(1 << 20, &[]), Answer::Invalid);
    assert_eq!(memories(1 << 20, &[memfd(1 << 20)]), Answer::Ok);
    assert_eq!(adds(3), Answer::Ok);
    drop(first);
    assert_eq!(worker.ended(), Ok(()));
}

/// A worker whose bridge's process can be replaced.
struct Succeeded {
    /// Gives how the session ended.
    worker: std::thread::JoinHandle<Result<(), String>>,
    /// Where the next process says that it is there.
    next: OwnedFd,
}

impl Succeeded {
    /// A worker, and the connection of its bridge's first process.
    fn begin() -> (Succeeded, UnixStream) {
        let (worker, first, _) = Succeeded::begin_with(|commands| {
            let end = commands.next(&mut Vec::new(), &mut || {}).map_err(|e| e.reason);
            assert!(end.as_ref().is_ok_and(Option::is_none) || end.is_err(), "no command was sent");
            end.map(drop)
        });
        (worker, first)
    }

    /// The same with what the worker does, and with the channel.
    fn begin_with(
        serve: impl FnOnce(&mut LocalCommands) -> Result<(), String> + Send + 'static,
    ) -> (Succeeded, UnixStream, Channel) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || {
            let (mut commands, client) =
                LocalCommands::attach(theirs, Polling::default(), Duration::from_secs(60))
                    .map_err(|e| e.reason)?;
            let end = serve(&mut commands);
            rgpu_host_bridge::endpoint::Client::close(&*client);
            end
        });
        let (next, end) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let (file, view) = in_a_file(1 << 20, "succeeded");
        let size = view.geometry().size as u64;
        let (memory, extent) = (Memory { addr: 0, size, file_offset: 0 }, Extent { addr: 0, len: size });
        let flags = ATTACH_FUTEX | ATTACH_SUCCESSION;
        let attach = Attach { memory_count: 1, extent_count: 1, flags, reserved: 0, size };
        let doorbell = EventFd::new().unwrap();
        let parts = [attach.as_bytes(), memory.as_bytes(), extent.as_bytes()];
        send_frame(ours.as_fd(), frame::ATTACH, &parts, &[file.as_fd(), doorbell.as_fd(), end.as_fd()])
            .unwrap();
        assert_eq!(recv_frame(ours.as_fd(), &mut Vec::new(), &mut Vec::new()).unwrap(), Some(frame::ACK));
        let channel = Channel::new(view, move || _ = doorbell.write(1).unwrap());
        (Succeeded { worker, next }, ours, channel)
    }

    /// Sends a packet with descriptors to where the worker waits for the next process.
    fn packet(&self, bytes: &[u8], fds: &[i32]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let parts = [std::io::IoSlice::new(bytes)];
        sendmsg::<()>(self.next.as_raw_fd(), &parts, &rights, MsgFlags::empty(), None).unwrap();
    }

    /// The connection of another process, and the regions that the worker says there are.
    fn take_over(&self) -> (UnixStream, Vec<RegionAdd>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.packet(FrameHeader { kind: frame::TAKE_OVER, len: 0 }.as_bytes(), &[theirs.as_raw_fd()]);
        drop(theirs);
        let mut body = Vec::new();
        assert_eq!(recv_frame(ours.as_fd(), &mut body, &mut Vec::new()).unwrap(), Some(frame::TAKEN_OVER));
        let (regions, rest) = body.as_chunks::<{ size_of::<RegionAdd>() }>();
        assert!(rest.is_empty());
        let mut regions: Vec<_> =
            regions.iter().map(|bytes| RegionAdd::read_from_bytes(bytes).unwrap()).collect();
        regions.sort_by_key(|add| add.region);
        (ours, regions)
    }

    /// Waits until the session has ended.
    fn ended(self) -> Result<(), String> {
        drop(self.next);
        self.worker.join().unwrap()
    }
}

/// A frame that registers pages of the channel, as one region.
fn add(region: u32, flags: u32, pages: &[u64]) -> Vec<u8> {
    let extents: Vec<_> = pages.iter().map(|page| Extent { addr: page * 4096, len: 4096 }).collect();
    let (extent_count, size) = (extents.len() as u32, extents.len() as u64 * 4096);
    let add = RegionAdd { region, extent_count, flags, reserved: 0, size };
    let len = (add.as_bytes().len() + extents.as_bytes().len()) as u32;
    [FrameHeader { kind: frame::REGION_ADD, len }.as_bytes(), add.as_bytes(), extents.as_bytes()].concat()
}

#[test]
fn a_worker_goes_on_with_the_next_process_of_its_bridge() {
    let (worker, mut first) = Succeeded::begin();
    // Two regions, of which nobody reads the answers, and half of a third.
    first.write_all(&add(9, REGION_READ_ONLY, &[7])).unwrap();
    first.write_all(&add(4, 0, &[1, 3, 4])).unwrap();
    first.write_all(&add(5, 0, &[1, 3])[..30]).unwrap();
    drop(first);
    let (mut second, regions) = worker.take_over();
    let told: Vec<_> =
        regions.iter().map(|add| (add.region, add.flags, add.size, add.extent_count)).collect();
    assert_eq!(told, [(4, 0, 3 * 4096, 2), (9, REGION_READ_ONLY, 4096, 1)]);
    second.write_all(&add(5, 0, &[1])).unwrap();
    assert_eq!(recv_frame(second.as_fd(), &mut Vec::new(), &mut Vec::new()).unwrap(), Some(frame::ACK));
    drop(second);
    // One that ends at once, and one that has everything from its predecessors.
    drop(worker.take_over());
    let (last, regions) = worker.take_over();
    assert_eq!(regions.iter().map(|add| add.region).collect::<Vec<_>>(), [4, 5, 9]);
    send_frame(last.as_fd(), frame::BYE, &[], &[]).unwrap();
    assert_eq!(worker.ended(), Ok(()));
}

#[test]
fn a_worker_that_executes_a_command_is_not_at_rest() {
    /// After so long, the memory is kept from a command that still runs.
    const EXECUTES: Duration = Duration::from_secs(2);
    let (executes, begun) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel();
    let (worker, first, mut channel) = Succeeded::begin_with(move |commands| {
        let mut body = Vec::new();
        assert!(commands.next(&mut body, &mut || {}).map_err(|e| e.reason)?.is_some());
        // As another thread does to read ahead.
        assert!(commands.try_next(&mut body).map_err(|e| e.reason)?.is_none());
        executes.send(()).unwrap();
        is_done.recv().unwrap();
        commands.next(&mut body, &mut || {}).map_err(|e| e.reason).map(drop)
    });
    channel.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    begun.recv().unwrap();
    let asked = Instant::now();
    send_frame(worker.next.as_fd(), frame::PAUSE, &[], &[]).unwrap();
    let said = recv_frame(worker.next.as_fd(), &mut Vec::new(), &mut Vec::new());
    assert_eq!(said.unwrap(), Some(frame::PAUSED));
    assert!(asked.elapsed() >= EXECUTES, "it says so while it executes");
    done.send(()).unwrap();
    send_frame(first.as_fd(), frame::BYE, &[], &[]).unwrap();
    assert_eq!(worker.ended(), Ok(()));
}

#[test]
fn a_session_ends_when_nobody_is_left_who_could_take_over() {
    let (worker, first) = Succeeded::begin();
    let (worker, second) = {
        drop(first);
        let (second, _) = worker.take_over();
        (worker, second)
    };
    drop(second);
    assert_eq!(worker.ended(), Ok(()));
}

#[test]
fn what_does_not_take_over_properly_ends_the_session() {
    let (worker, first) = Succeeded::begin();
    drop(first);
    worker.packet(FrameHeader { kind: frame::BYE, len: 0 }.as_bytes(), &[]);
    assert!(worker.ended().unwrap_err().contains("successor"));
    // Something else than a socket is a process that is gone already.
    let (worker, first) = Succeeded::begin();
    drop(first);
    let file = memfd(4096);
    worker.packet(FrameHeader { kind: frame::TAKE_OVER, len: 0 }.as_bytes(), &[file.as_raw_fd()]);
    assert!(worker.ended().is_err());
}

/// A server with a worker that has the client's memory, and then does this with the socket where it waits for
/// another process.
fn worker_that(
    act: impl FnOnce(OwnedFd) + Send + 'static,
) -> (SessionConfig, std::thread::JoinHandle<()>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let worker = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        recv_struct::<Hello>(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
        send_message(socket.as_fd(), &[welcome(Answer::Ok, "").as_bytes()], &[]).unwrap();
        let (mut body, mut fds) = (Vec::new(), Vec::new());
        assert_eq!(recv_frame(socket.as_fd(), &mut body, &mut fds).unwrap(), Some(frame::ATTACH));
        send_frame(socket.as_fd(), frame::ACK, &[Ack { status: 0, reserved: 0 }.as_bytes()], &[]).unwrap();
        act(fds.pop().unwrap());
    });
    (SessionConfig::new(Address::Unix(path), "test-host"), worker, folder)
}

/// The connection of the process that takes over.
fn successor(succession: &OwnedFd) -> OwnedFd {
    let mut fds = Vec::new();
    assert_eq!(recv_frame(succession.as_fd(), &mut Vec::new(), &mut fds).unwrap(), Some(frame::TAKE_OVER));
    fds.pop().unwrap()
}

fn wait_for_the_end(next: &OwnedFd) {
    while !matches!(recv_frame(next.as_fd(), &mut Vec::new(), &mut Vec::new()), Ok(None) | Err(_)) {}
}

/// A server whose worker answers the process that takes over with these frames, and lets go when that one
/// hangs up.
fn answers_successors_with(
    frames: Vec<(u32, Vec<u8>)>,
) -> (SessionConfig, std::thread::JoinHandle<()>, tempfile::TempDir) {
    worker_that(move |succession| {
        let next = successor(&succession);
        for (kind, body) in frames {
            // The bridge may have hung up already.
            let _ = send_frame(next.as_fd(), kind, &[&body], &[]);
        }
        wait_for_the_end(&next);
    })
}

/// The session of a process, and that of another one that takes it over.
fn taken_over(config: &SessionConfig, lost: Box<dyn FnOnce(&str) + Send>) -> (Session, Session) {
    let (memories, channel) = session::channel(1 << 20);
    let (extents, size) = (channel.extents.clone(), channel.size);
    let mut prepared = Prepared::connect(config, &channel, &mut Patient).unwrap();
    let saved = prepared.save(&channel).unwrap().unwrap();
    let wakeup = || Wakeup::Call(Arc::new(|| {}));
    let first = prepared.open().unwrap().start(channel, wakeup(), Box::new(|_| {})).unwrap();
    let again = ChannelMemory::new(memories, extents, size).unwrap();
    let second = Session::resume(config, &saved, again, None, wakeup(), lost).unwrap();
    (first, second)
}

#[test]
fn a_worker_that_has_paused_for_one_process_must_pause_again_for_the_next() {
    let (rests, may_rest) = std::sync::mpsc::channel();
    let (lets_go, may_let_go) = std::sync::mpsc::channel();
    let (config, worker, _folder) = worker_that(move |succession| {
        // The process to which this is said ends before it reads that.
        send_frame(succession.as_fd(), frame::PAUSED, &[], &[]).unwrap();
        let next = successor(&succession);
        // As one does whose GPU still works for a command that came before.
        may_let_go.recv().unwrap();
        let said = poll(&mut [PollFd::new(succession.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        assert_eq!(said, Ok(0), "it is asked before it has said that it is taken over");
        send_frame(next.as_fd(), frame::TAKEN_OVER, &[], &[]).unwrap();
        let pause = recv_frame(succession.as_fd(), &mut Vec::new(), &mut Vec::new());
        assert_eq!(pause.unwrap(), Some(frame::PAUSE));
        may_rest.recv().unwrap();
        send_frame(succession.as_fd(), frame::PAUSED, &[], &[]).unwrap();
        wait_for_the_end(&next);
    });
    let (first, second) = taken_over(&config, Box::new(|_| {}));
    second.pause();
    assert!(!second.is_paused(Duration::from_millis(10)), "it is not taken over yet");
    lets_go.send(()).unwrap();
    assert!(!second.is_paused(Duration::from_millis(10)), "it still uses the memory");
    rests.send(()).unwrap();
    assert!(second.is_paused(PATIENCE));
    assert_eq!(second.close("done", PATIENCE), Closed::Released);
    worker.join().unwrap();
    assert_eq!(first.close("done", PATIENCE), Closed::Released);
}

#[test]
fn a_worker_that_lies_about_its_regions_ends_only_the_session() {
    let region = RegionAdd { region: 1, extent_count: u32::MAX, flags: 0, reserved: 0, size: u64::MAX };
    let list = |count: usize| region.as_bytes().repeat(count);
    for frames in [
        vec![(frame::TAKEN_OVER, vec![0; 33])],
        vec![(frame::TAKEN_OVER, list(3))],
        vec![(frame::TAKEN_OVER, list(1)), (frame::TAKEN_OVER, list(1))],
    ] {
        let (mut config, worker, _folder) = answers_successors_with(frames);
        config.max_regions = 2;
        let (lost, is_lost) = std::sync::mpsc::channel();
        let lost = Box::new(move |why: &str| lost.send(why.to_owned()).unwrap());
        let (first, second) = taken_over(&config, lost);
        let why = is_lost.recv_timeout(PATIENCE).unwrap();
        assert!(why.contains("does not keep to the protocol"), "{why}");
        worker.join().unwrap();
        assert_eq!(second.close("done", PATIENCE), Closed::Released);
        assert_eq!(first.close("done", PATIENCE), Closed::Released);
    }
}

/// Waits its turn and tells nobody.
struct Patient;

impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}
