//! A host side for tests: a socket like `vhost-rgpu`'s, whose one thread does with each record what a test says.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use protocol::device::{Answer, Response, request};
use protocol::native::Request;
use protocol::version::{OURS, Speaks};
use rgpu_client::Status;
use rgpu_client::channel::{Consumer, Geometry, Header, Progress, Record, ReplySlot, RingMemory};
use rgpu_client::port;
use rgpu_client::session::{Purpose, Session};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The host's view of a channel.
pub struct Host {
    base: *mut u8,
    geometry: Geometry,
}

// SAFETY: what is reached through it is atomics in a mapping that is never unmapped.
unsafe impl Send for Host {}

impl Host {
    pub fn header(&self) -> &'static Header {
        // SAFETY: the mapping is page-aligned, as long as the geometry says and never unmapped; a header is atomics.
        unsafe { &*self.base.cast() }
    }

    pub fn progress(&self) -> &'static Progress {
        // SAFETY: as above.
        unsafe { &*self.base.add(self.geometry.progress_offset).cast() }
    }

    pub fn slot(&self, index: u16) -> &'static ReplySlot {
        assert!(usize::from(index) < self.geometry.slot_count);
        // SAFETY: as above.
        unsafe { &*self.base.add(self.geometry.slot_offset(index.into())).cast() }
    }

    pub fn consumer(&self) -> Consumer<'static> {
        // SAFETY: as above.
        let words = unsafe {
            std::slice::from_raw_parts(
                self.base.add(self.geometry.ring_offset).cast::<AtomicU64>(),
                self.geometry.ring_size / 8,
            )
        };
        Consumer::new(self.header(), RingMemory::new(words))
    }

    /// Wakes whoever sleeps on the word at `offset`.
    pub fn wake(&self, offset: usize) {
        // SAFETY: an address inside the mapping.
        unsafe { libc::syscall(libc::SYS_futex, self.base.add(offset), libc::FUTEX_WAKE, i32::MAX) };
    }

    pub fn reply(&self, record: &Record, status: Status, payload: &[u8]) {
        if self.slot(record.reply_slot).complete(record.seq, status, payload) {
            self.wake(self.geometry.slot_offset(record.reply_slot.into()));
        }
    }

    pub fn release(&self, seq: u64) {
        self.progress().set_released(seq);
        if self.header().progress_sleep.take() {
            self.wake(Header::PROGRESS_SLEEP_OFFSET as usize);
        }
    }

    /// Ends the session as a host does.
    pub fn lose(&self, reason: &str) {
        self.header().set_lost(reason);
        for index in 0..self.geometry.slot_count as u16 {
            if self.slot(index).abandon(Status::DEVICE_UNAVAILABLE) {
                self.wake(self.geometry.slot_offset(index.into()));
            }
        }
        for (flag, offset) in [
            (&self.header().ring_sleep, Header::RING_SLEEP_OFFSET),
            (&self.header().progress_sleep, Header::PROGRESS_SLEEP_OFFSET),
        ] {
            if flag.take() {
                self.wake(offset as usize);
            }
        }
    }
}

/// What a test's host does after a record.
#[derive(PartialEq, Eq)]
pub enum Next {
    GoOn,
    /// Says nothing more, and closes the connection as a killed daemon would.
    Die,
}

fn check(result: i32) -> i32 {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

fn listen(path: &Path) -> OwnedFd {
    // SAFETY: plain system calls on a whole address and a descriptor of this test's own.
    unsafe {
        let socket = OwnedFd::from_raw_fd(check(libc::socket(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
        )));
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as _;
        for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_encoded_bytes()) {
            *to = *from as _;
        }
        check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32));
        check(libc::listen(socket.as_raw_fd(), 4));
        socket
    }
}

/// A request and the descriptor that came with it; `None` when the client is gone.
fn receive(socket: &OwnedFd) -> Option<(Request, Option<OwnedFd>)> {
    let mut request = Request::new_zeroed();
    let mut control = [0u64; 4];
    // SAFETY: the message names live buffers with their sizes.
    unsafe {
        let mut iov = libc::iovec {
            iov_base: request.as_mut_bytes().as_mut_ptr().cast(),
            iov_len: size_of::<Request>(),
        };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let n = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        if n <= 0 {
            return None;
        }
        assert_eq!(n as usize, size_of::<Request>());
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let fd = (!header.is_null())
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<i32>().read_unaligned()));
        Some((request, fd))
    }
}

fn respond(socket: &OwnedFd, response: &Response, fd: Option<&OwnedFd>) {
    let mut control = [0u64; 4];
    // SAFETY: as above.
    unsafe {
        let mut iov = libc::iovec {
            iov_base: response.as_bytes().as_ptr().cast_mut().cast(),
            iov_len: size_of::<Response>(),
        };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        if let Some(fd) = fd {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(4) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd.as_raw_fd());
        }
        check(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) as i32);
    }
}

/// A host at a socket of its own.
pub struct Daemon {
    pub socket: PathBuf,
    _folder: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    /// A host that answers every request with `answer`, and then, until the client goes, gives each record and its body to `each`.
    pub fn start(
        answer: Response,
        each: impl FnMut(&Host, Record, &[u8]) -> Next + Send + 'static,
    ) -> Daemon {
        Daemon::speaking(OURS, answer, each)
    }

    /// The same for a host that says this of its version.
    pub fn speaking(
        speaks: Speaks<'static>,
        answer: Response,
        mut each: impl FnMut(&Host, Record, &[u8]) -> Next + Send + 'static,
    ) -> Daemon {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("native.sock");
        let listener = listen(&socket);
        let thread = std::thread::spawn(move || {
            // SAFETY: a plain system call on this thread's own listener.
            let connection = unsafe {
                OwnedFd::from_raw_fd(check(libc::accept4(
                    listener.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC,
                )))
            };
            let (request, memory) = receive(&connection).expect("a request");
            assert_eq!(
                (request.magic, request.version, request.kind),
                (protocol::native::MAGIC, protocol::VERSION, request::CREATE_CHANNEL)
            );
            let memory = memory.expect("a channel comes with its memory");
            // SAFETY: plain system calls; the mapping is of the size that the client says, which the seal keeps.
            let (base, doorbell) = unsafe {
                let seals = check(libc::fcntl(memory.as_raw_fd(), libc::F_GET_SEALS));
                assert!(seals & libc::F_SEAL_SHRINK != 0);
                let base = libc::mmap(
                    std::ptr::null_mut(),
                    request.size as usize,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    memory.as_raw_fd(),
                    0,
                );
                assert_ne!(base, libc::MAP_FAILED);
                (
                    base.cast::<u8>(),
                    OwnedFd::from_raw_fd(check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))),
                )
            };
            // SAFETY: a header page, all atomics.
            let fields = unsafe { &*base.cast::<Header>() }.read_fields();
            let geometry = Geometry::check(&fields, request.size).expect("the header that the client wrote");
            let host = Host { base, geometry };
            if response_is_ok(&answer) {
                host.header().set_session_version(speaks.version(), speaks.fingerprint());
                host.header().set_ready();
            }
            respond(&connection, &answer, response_is_ok(&answer).then_some(&doorbell));
            let mut consumer = host.consumer();
            let mut body = Vec::new();
            loop {
                while let Some(record) =
                    consumer.pop(&mut body).expect("records that a correct client writes")
                {
                    if host.header().ring_sleep.take() {
                        host.wake(Header::RING_SLEEP_OFFSET as usize);
                    }
                    if each(&host, record, &body) == Next::Die {
                        return;
                    }
                }
                host.header().host_sleep.announce();
                if consumer.has_work() {
                    continue;
                }
                let mut polls =
                    [(doorbell.as_raw_fd(), libc::POLLIN), (connection.as_raw_fd(), libc::POLLIN)]
                        .map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
                // SAFETY: two live `pollfd`s and a buffer of eight bytes.
                unsafe {
                    check(libc::poll(polls.as_mut_ptr(), 2, 5000));
                    let mut count = [0u8; 8];
                    libc::read(doorbell.as_raw_fd(), count.as_mut_ptr().cast(), 8);
                }
                if polls[1].revents != 0 {
                    match receive(&connection) {
                        None => return,
                        Some(_) => respond(&connection, &Response::new(Answer::Ok, ""), None),
                    }
                }
            }
        });
        Daemon { socket, _folder: folder, thread: Some(thread) }
    }

    /// A session with this host, with an arena of `arena` bytes.
    pub fn session(&self, arena: usize) -> &'static Session {
        let geometry = Geometry::with_arena(arena);
        let port = port::at_socket(&self.socket, geometry.size).expect("a connection");
        Session::over(port, geometry, Purpose::Compute).expect("a session")
    }
}

fn response_is_ok(response: &Response) -> bool {
    response.status == Answer::Ok as u32
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A session lives as long as its process, and so does its host's thread; only what it found wrong is of interest.
        if let Some(thread) = self.thread.take().filter(|thread| thread.is_finished()) {
            thread.join().expect("the host's thread");
        }
    }
}

/// The bytes of an integer at a place in a body.
pub fn word(body: &[u8], at: usize) -> u64 {
    u64::read_from_bytes(&body[at..at + 8]).expect("eight bytes")
}

/// Counts what a host has seen.
pub fn count(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::SeqCst)
}
