//! A native client without manners: it writes the channel's memory by itself, byte by byte, as no library would.

use std::io::IoSlice;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::cmsg_space;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect,
    recvmsg, sendmsg, setsockopt, socket, sockopt,
};
use protocol::Status;
use protocol::channel::{Geometry, Header, HeaderFields, NO_SLOT, ReplySlot, SLOT_SIZE, State};
use protocol::device::{Answer, Response, request};
use protocol::native::{MAGIC, Request};
use protocol::ops::{Class, Op, SyncOp, decode_reply, encode};
use zerocopy::{FromBytes, IntoBytes};

use super::PATIENCE;

/// A memfd, sealed against shrinking or not.
pub fn memfd(size: u64, sealed: bool) -> Result<OwnedFd> {
    let fd = memfd_create(c"hostile", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&fd, i64::try_from(size)?)?;
    if sealed {
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
    }
    Ok(fd)
}

/// A connection to a bridge's native socket.
pub struct Connection(pub OwnedFd);

/// A request that makes a channel of `size` bytes.
pub fn create(size: u64) -> Request {
    Request {
        magic: MAGIC,
        version: protocol::VERSION,
        kind: request::CREATE_CHANNEL,
        region: 0,
        flags: 0,
        offset: 0,
        size,
    }
}

impl Connection {
    pub fn open(path: &Path) -> Result<Self> {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        setsockopt(
            &fd,
            sockopt::ReceiveTimeout,
            &nix::sys::time::TimeVal::new(PATIENCE.as_secs().cast_signed(), 0),
        )?;
        Ok(Self(fd))
    }

    pub fn send(&self, packet: &[u8], fds: &[&OwnedFd]) -> Result<()> {
        let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(packet)], control, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// The next response, with the descriptors that came along; none when the daemon has closed the connection.
    pub fn response(&self) -> Result<Option<(Answer, String, Vec<OwnedFd>)>> {
        let mut packet = [0u8; size_of::<Response>()];
        let mut space = cmsg_space!([i32; 8]);
        let mut slices = [std::io::IoSliceMut::new(&mut packet)];
        let message = match recvmsg::<()>(
            self.0.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(nix::Error::ECONNRESET) => return Ok(None),
            other => other?,
        };
        let mut fds = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(received) = control {
                // SAFETY: the kernel has just installed these descriptors; nobody else knows them.
                fds.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if message.bytes == 0 {
            return Ok(None);
        }
        ensure!(message.bytes == size_of::<Response>(), "a response of {} bytes", message.bytes);
        let response = Response::read_from_bytes(&packet).map_err(|_| anyhow::anyhow!("no response"))?;
        Ok(Some((Answer::from_number(response.status), response.reason(), fds)))
    }

    pub fn ask(&self, request: &Request, fds: &[&OwnedFd]) -> Result<(Answer, String)> {
        self.send(request.as_bytes(), fds)?;
        let (answer, reason, _) = self.response()?.context("the daemon closed the connection")?;
        Ok((answer, reason))
    }
}

/// Shared memory, mapped.
struct Mapping {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain shared memory, reached through atomics alone.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, len: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        ensure!(at != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Ok(Self { at: at.cast(), len })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        // SAFETY: aligned and inside the mapping, as just checked.
        unsafe { AtomicU64::from_ptr(self.at.add(offset).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`; every borrow of it has ended.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// A client with a channel.
pub struct Client {
    pub connection: Connection,
    pub doorbell: OwnedFd,
    pub geometry: Geometry,
    memory: Mapping,
    tail: u64,
    seq: u64,
}

/// Offset of the ring's tail in the header.
const TAIL: usize = 0x100;

impl Client {
    /// Connects with a channel of the usual shape and 4 MiB of arena.
    pub fn connect(socket: &Path, program: &str) -> Result<Self> {
        let geometry = Geometry::with_arena(4 << 20);
        let (client, answer, reason) = Self::try_connect(socket, geometry, geometry.fields(7, program))?;
        client.with_context(|| format!("{answer:?}: {reason}"))
    }

    /// Connects with any header; gives the answer as well.
    pub fn try_connect(
        socket: &Path,
        geometry: Geometry,
        fields: HeaderFields,
    ) -> Result<(Option<Self>, Answer, String)> {
        let file = memfd(geometry.size as u64, true)?;
        let memory = Mapping::new(&file, geometry.size)?;
        // SAFETY: the first page of the mapping; the header is made of atomics alone.
        unsafe { &*memory.at.cast::<Header>() }.write_fields(&fields);
        let connection = Connection::open(socket)?;
        connection.send(create(geometry.size as u64).as_bytes(), &[&file])?;
        let (answer, reason, mut fds) = connection.response()?.context("the daemon closed the connection")?;
        let client =
            fds.pop().map(|doorbell| Self { connection, doorbell, geometry, memory, tail: 0, seq: 0 });
        Ok((client, answer, reason))
    }

    fn header(&self) -> &Header {
        // SAFETY: as in `try_connect`.
        unsafe { &*self.memory.at.cast() }
    }

    fn slot(&self, index: u16) -> &ReplySlot {
        assert!(usize::from(index) < self.geometry.slot_count);
        // SAFETY: inside the mapping, 64-byte-aligned, all atomics.
        unsafe { &*self.memory.at.add(self.geometry.slots_offset + usize::from(index) * SLOT_SIZE).cast() }
    }

    /// A word of the channel, at a multiple of 8.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        self.memory.word(offset)
    }

    /// Sets the ring's tail, and rings the doorbell.
    pub fn set_tail(&mut self, tail: u64) -> Result<()> {
        self.tail = tail;
        self.word(TAIL).store(tail, Ordering::Release);
        self.ring()
    }

    /// Rings the doorbell, whether anyone sleeps or not.
    pub fn ring(&self) -> Result<()> {
        nix::unistd::write(&self.doorbell, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Writes a record as it is told, publishes `advance` bytes, and rings.
    pub fn raw(
        &mut self,
        size: u32,
        opcode: u16,
        slot: u16,
        seq: u64,
        body: &[u8],
        advance: u64,
    ) -> Result<()> {
        let mut bytes = [
            size.to_le_bytes().as_slice(),
            &opcode.to_le_bytes(),
            &slot.to_le_bytes(),
            &seq.to_le_bytes(),
            body,
        ]
        .concat();
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        // A record is never split at the ring's end: padding comes before one that would be.
        let place = self.tail as usize % self.geometry.ring_size;
        let to_end = self.geometry.ring_size - place;
        if bytes.len() > to_end {
            self.word(self.geometry.ring_offset + place).store(to_end as u64, Ordering::Relaxed);
            self.tail += to_end as u64;
        }
        let place = self.geometry.ring_offset + self.tail as usize % self.geometry.ring_size;
        for (at, word) in bytes.chunks_exact(8).enumerate() {
            let mut le = [0; 8];
            le.copy_from_slice(word);
            self.word(place + at * 8).store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
        self.set_tail(self.tail + advance)
    }

    /// Appends a whole record with the right seq.
    pub fn record(&mut self, opcode: u16, slot: u16, body: &[u8]) -> Result<()> {
        self.seq += 1;
        let size = (16 + body.len()).next_multiple_of(16) as u32;
        self.raw(size, opcode, slot, self.seq, body, size.into())
    }

    /// Appends an operation.
    pub fn push<'a, T: Op<'a>>(&mut self, op: &T, slot: u16) -> Result<()> {
        let mut body = Vec::new();
        encode(op, &mut body);
        if T::INFO.class == Class::Sync && usize::from(slot) < self.geometry.slot_count {
            self.slot(slot).prepare();
        }
        self.record(T::INFO.opcode, slot, &body)
    }

    /// Appends an operation that is not answered.
    pub fn tell<'a, T: Op<'a>>(&mut self, op: &T) -> Result<()> {
        self.push(op, NO_SLOT)
    }

    /// Appends an operation and waits for its answer in slot 0.
    pub fn call<'a, T: SyncOp<'a>>(&mut self, op: &T) -> Result<std::result::Result<T::Reply, Status>> {
        self.push(op, 0)?;
        let deadline = Instant::now() + PATIENCE;
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = self.slot(0).poll(&mut payload) {
                if !completion.status.is_success() {
                    return Ok(Err(completion.status));
                }
                return Ok(Ok(decode_reply::<T::Reply>(&payload)?));
            }
            ensure!(Instant::now() < deadline, "no answer; the session: {:?}", self.reason());
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// The context's error word, taken away: status, and whether it is sticky.
    pub fn take_error(&self, context: usize) -> Option<Status> {
        let word = self.word(self.geometry.progress_offset + 0x40 + 16 * context);
        let status = word.load(Ordering::Acquire) as u32;
        // Only the status is cleared, as a library does.
        // SAFETY: the lower half of the word just read.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }.store(0, Ordering::Release);
        (status != 0).then_some(Status(status))
    }

    /// Writes the arena.
    pub fn write_arena(&self, bytes: &[u8]) {
        for (at, word) in bytes.chunks(8).enumerate() {
            let mut le = [0; 8];
            le[..word.len()].copy_from_slice(word);
            self.word(self.geometry.arena_offset + at * 8).store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
    }

    /// Why the session was lost, if it was.
    pub fn reason(&self) -> Option<String> {
        (self.header().state() == State::Lost).then(|| self.header().reason())
    }

    /// Waits until the session is lost and gives the reason.
    pub fn lost(&self) -> Result<String> {
        let mut reason = String::new();
        super::eventually(|| {
            reason = self.reason().context("the session still stands")?;
            Ok(())
        })?;
        Ok(reason)
    }
}
