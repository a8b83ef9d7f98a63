//! The host's end of the native socket: one connection, served by a thread that does with each record what a
//! test says.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use host_bridge::framing::recv_some;
use host_bridge::memory::{ChannelView, Memories};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, listen, socket};
use protocol::Status;
use protocol::channel::{Header, Position, Record};
use protocol::device::{Answer, Extent, Response, request};
use protocol::link::Memory;
use protocol::native::{MAGIC, Request};
use protocol::version::{OURS, Speaks};
use zerocopy::{FromBytes, IntoBytes};

use crate::native_client::send_packet;

/// The host's view of a channel.
pub struct Host(ChannelView);

impl Host {
    /// The channel's memory.
    pub fn view(&self) -> &ChannelView {
        &self.0
    }

    /// Wakes every thread that sleeps on the word at `offset` of the channel.
    fn wake(&self, offset: usize) {
        assert!(offset + 4 <= self.0.geometry().size);
        // SAFETY: the address of a word inside the mapping, as just checked; the call only looks for sleepers
        // there.
        unsafe { libc::syscall(libc::SYS_futex, self.0.base().add(offset), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Answers a command.
    pub fn reply(&self, record: &Record, status: Status, payload: &[u8]) {
        let slot = self.0.slot(record.reply_slot).expect("a slot that the channel has");
        if slot.complete(record.seq, status, payload) {
            self.wake(self.0.geometry().slot_offset(record.reply_slot.into()));
        }
    }

    /// Releases the data of every command up to `seq`.
    pub fn release(&self, seq: u64) {
        self.0.progress().set_released(seq);
        if self.0.header().progress_sleep.take() {
            self.wake(Header::PROGRESS_SLEEP_OFFSET as usize);
        }
    }

    /// Ends the session as a host does.
    pub fn lose(&self, reason: &str) {
        let header = self.0.header();
        header.set_lost(reason);
        for index in 0..self.0.geometry().slot_count {
            let slot = self.0.slot(index as u16).expect("a slot that the channel has");
            if slot.abandon(Status::DEVICE_UNAVAILABLE) {
                self.wake(self.0.geometry().slot_offset(index));
            }
        }
        for (flag, offset) in [
            (&header.ring_sleep, Header::RING_SLEEP_OFFSET),
            (&header.progress_sleep, Header::PROGRESS_SLEEP_OFFSET),
        ] {
            if flag.take() {
                self.wake(offset as usize);
            }
        }
    }
}

/// What a host does after a record.
#[derive(PartialEq, Eq)]
pub enum Next {
    /// Serves the next record.
    GoOn,
    /// Sends nothing more and closes the connection, as a killed daemon would.
    Die,
}

/// The memory that a client has registered.
pub struct Regions {
    /// Bytes of each region, by its number.
    pub registered: BTreeMap<u32, u64>,
    /// Bytes of all regions at most; more are refused. No limit at first.
    pub most: u64,
}

impl Regions {
    /// Does what a request asks for.
    fn take(&mut self, request: &Request) -> Answer {
        match request.kind {
            request::REGISTER_MEMORY => {
                if self.registered.values().sum::<u64>() + request.size > self.most {
                    return Answer::NoResources;
                }
                assert!(
                    self.registered.insert(request.region, request.size).is_none(),
                    "a region of this number"
                );
            }
            request::UNREGISTER_MEMORY => {
                assert!(self.registered.remove(&request.region).is_some(), "no region of this number");
            }
            _ => {}
        }
        Answer::Ok
    }
}

/// A host at a socket of its own.
pub struct NativeHost {
    /// The socket.
    pub socket: PathBuf,
    /// What the client has registered now. While it is locked, requests are not answered.
    pub regions: Arc<Mutex<Regions>>,
    requests: Arc<AtomicU64>,
    _folder: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl NativeHost {
    /// A host that answers the request for a channel with `answer` and gives each record and its body to
    /// `each` until the client disconnects.
    pub fn start(
        answer: Response,
        each: impl FnMut(&Host, Record, &[u8]) -> Next + Send + 'static,
    ) -> NativeHost {
        NativeHost::speaking(OURS, answer, each)
    }

    /// The same, for a host of this version.
    pub fn speaking(
        speaks: Speaks<'static>,
        answer: Response,
        each: impl FnMut(&Host, Record, &[u8]) -> Next + Send + 'static,
    ) -> NativeHost {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("native.sock");
        let listener =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(4).unwrap()).unwrap();
        let regions = Arc::new(Mutex::new(Regions { registered: BTreeMap::new(), most: u64::MAX }));
        let requests = Arc::<AtomicU64>::default();
        let of_thread = (regions.clone(), requests.clone());
        let thread = std::thread::spawn(move || {
            let connection = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).unwrap();
            // SAFETY: `accept4` has just made this descriptor; nothing else owns it.
            serve(&unsafe { OwnedFd::from_raw_fd(connection) }, speaks, &answer, &of_thread, each);
        });
        NativeHost { socket: path, regions, requests, _folder: folder, thread: Some(thread) }
    }
}

impl NativeHost {
    /// How many requests have come, besides the one for a channel.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }
}

impl Drop for NativeHost {
    fn drop(&mut self) {
        // The client library keeps a session until its process ends, so the thread may still be serving. If
        // it has panicked, the test fails.
        if let Some(thread) = self.thread.take().filter(JoinHandle::is_finished) {
            thread.join().expect("the host's thread");
        }
    }
}

/// The next request and its descriptor; `None` when the client has disconnected.
fn receive(connection: &OwnedFd) -> Option<(Request, Option<OwnedFd>)> {
    let (mut packet, mut fds) = ([0; size_of::<Request>()], Vec::new());
    match recv_some(connection.as_fd(), &mut packet, &mut fds) {
        Ok(0) | Err(_) => None,
        Ok(length) => {
            assert_eq!(length, packet.len());
            Some((Request::read_from_bytes(&packet).unwrap(), fds.pop()))
        }
    }
}

fn serve(
    connection: &OwnedFd,
    speaks: Speaks<'static>,
    answer: &Response,
    (regions, requests): &(Arc<Mutex<Regions>>, Arc<AtomicU64>),
    mut each: impl FnMut(&Host, Record, &[u8]) -> Next,
) {
    let (request, file) = receive(connection).expect("a request");
    assert_eq!(
        (request.magic, request.version, request.kind),
        (MAGIC, protocol::VERSION, request::CREATE_CHANNEL)
    );
    let file = file.expect("a channel comes with its memory");
    let seals = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_GET_SEALS).unwrap();
    assert!(seals & libc::F_SEAL_SHRINK != 0);
    let memory = Memory { addr: 0, size: request.size, file_offset: 0 };
    let memories = Memories::map(vec![(memory, file)]).unwrap();
    let extent = Extent { addr: 0, len: request.size };
    let host = Host(memories.view(&[extent], request.size).expect("the header that the client wrote"));
    let doorbell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap();
    let doorbell_fd = doorbell.as_fd().try_clone_to_owned().unwrap();
    if answer.status == Answer::Ok as u32 {
        host.0.header().set_session_version(speaks.version(), speaks.fingerprint());
        host.0.header().set_ready();
        send_packet(connection, answer.as_bytes(), &[&doorbell_fd]).unwrap();
    } else {
        send_packet(connection, answer.as_bytes(), &[]).unwrap();
    }
    let mut consumer = host.0.consumer(Position::default());
    let mut body = Vec::new();
    loop {
        while let Some(record) = consumer.pop(&mut body).expect("records that a correct client writes") {
            if host.0.header().ring_sleep.take() {
                host.wake(Header::RING_SLEEP_OFFSET as usize);
            }
            if each(&host, record, &body) == Next::Die {
                return;
            }
        }
        host.0.header().host_sleep.announce();
        if consumer.has_work() {
            continue;
        }
        let mut watched = [doorbell.as_fd(), connection.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        poll(&mut watched, PollTimeout::from(5000u16)).unwrap();
        let closed_or_asked = watched[1].any() == Some(true);
        // Nothing to read: the connection woke this thread.
        let _ = doorbell.read();
        if closed_or_asked {
            let Some((request, _)) = receive(connection) else { return };
            requests.fetch_add(1, Ordering::SeqCst);
            let answer = regions.lock().unwrap().take(&request);
            send_packet(connection, Response::new(answer, "").as_bytes(), &[]).unwrap();
        }
    }
}
