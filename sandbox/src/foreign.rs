//! Looks at descriptors that somebody has sent before this process has them.
//!
//! A file of a file system in user space (FUSE) makes whoever closes it wait for that file system's server,
//! as long as it likes, and no signal helps. That is true of each process that has it, also when it ends or
//! executes a program. So a **copy** of this process, with nothing else, receives the next message of a
//! socket, leaves it there, and says what it has found. Nobody needs a copy that never ends.
//!
//! What a descriptor is, the kernel alone must know: these file systems are asked nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::{pipe2, read};

use crate::Handle;
use crate::start::{copy, reap};

/// Most descriptors of a message (`SCM_MAX_FD` of the kernel).
const MOST: usize = 253;
/// File systems without a server in user space or on a network, whose files are on no block device.
const LOCAL: [&str; 4] = ["bcachefs", "btrfs", "ramfs", "zfs"];
/// What a copy says of a descriptor that makes nobody wait, and of one of which it knows nothing. No mount
/// has these numbers.
const HARMLESS: u64 = u64::MAX;
const UNKNOWN: u64 = u64::MAX - 1;

/// What a look has found.
#[derive(Debug)]
pub enum Found {
    /// The descriptors of the message make nobody wait.
    Harmless,
    /// At least one may. The copy that has looked may not end before the file system's server wants it to.
    Foreign(Copy),
}

/// A copy of this process that has looked.
#[derive(Debug)]
pub struct Copy {
    pid: libc::pid_t,
    handle: Handle,
}

impl Copy {
    /// Waits until it has ended.
    pub fn wait(self) {
        // It is a child of this process, which nobody else waits for.
        let _ = reap(self.pid, &self.handle);
    }
}

/// Looks at the descriptors in the next `bytes` of a socket. The message stays. Waits for at most `patience`.
///
/// # Errors
/// If this process cannot be copied, or the message cannot be received.
pub fn look(socket: BorrowedFd<'_>, bytes: usize, patience: Duration) -> io::Result<Found> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let mut room = vec![0_u8; bytes];
    let mut text = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: bytes };
    let numbers = (socket.as_raw_fd(), writer.as_raw_fd());
    // SAFETY: the copy runs `look_in_copy`, which only makes system calls, with memory that it has as well.
    let Some((pid, handle)) = (unsafe { copy(0, None) })? else {
        // SAFETY: this is the copy.
        unsafe { look_in_copy(numbers.0, numbers.1, &raw mut text) }
    };
    drop(writer);
    let copy = Copy { pid, handle };
    let mounts = match told(&reader, Instant::now() + patience) {
        Ok(Some(mounts)) => mounts,
        Ok(None) => return Ok(Found::Foreign(copy)),
        Err(e) => {
            copy.wait();
            return Err(e);
        }
    };
    let others: Vec<u64> = mounts.into_iter().filter(|mount| *mount != HARMLESS).collect();
    if !others.is_empty() {
        let sender = getsockopt(&socket, sockopt::PeerCredentials).map_or(0, |peer| peer.pid());
        let local = ["self".to_owned(), sender.to_string()].map(|process| local_mounts(&process)).concat();
        if !others.iter().all(|mount| local.contains(mount)) {
            return Ok(Found::Foreign(copy));
        }
    }
    copy.wait();
    Ok(Found::Harmless)
}

/// What the copy says of each descriptor. `None`: it says nothing in time.
fn told(reader: &OwnedFd, deadline: Instant) -> io::Result<Option<Vec<u64>>> {
    let mut bytes = [0_u8; (1 + MOST) * size_of::<u64>()];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)], limit) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    // So little is written at once.
    let length = read(reader, &mut bytes)?;
    let mut words = bytes[..length].as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    match words.next() {
        Some(0) => Ok(Some(words.collect())),
        error => Err(error.map_or(Errno::ECHILD, |number| Errno::from_raw(number as i32)).into()),
    }
}

/// The numbers of mounts of [`LOCAL`] file systems, as a process has them.
fn local_mounts(process: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/mountinfo")).unwrap_or_default();
    let local = |line: &str| {
        let (_, rest) = line.split_once(" - ")?;
        let number = line.split(' ').next()?.parse().ok()?;
        LOCAL.contains(&rest.split(' ').next()?).then_some(number)
    };
    text.lines().filter_map(local).collect()
}

/// Receives the descriptors of the next message, writes an error's number, or 0, and a word for each
/// descriptor to the pipe, and ends.
///
/// # Safety
///
/// Call this once, in a process that [`copy`] created. `text` is room for a message.
unsafe fn look_in_copy(socket: RawFd, pipe: RawFd, text: *mut libc::iovec) -> ! {
    // SAFETY: plain system calls on descriptors of this copy, with memory of this function or of `text`, and
    // no allocation.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"rgpu-look".as_ptr());
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
        // A daemon has other things under its first three numbers.
        libc::dup2(socket, 0);
        libc::dup2(pipe, 1);
        if libc::syscall(libc::SYS_close_range, 2, libc::c_uint::MAX, 0) != 0 {
            // Kernels before 5.9 lack the call. The daemon does not raise its limit of descriptors above
            // this.
            for fd in 2..1 << 16 {
                libc::close(fd);
            }
        }
        let (mut words, mut control) = ([0_u64; 1 + MOST], [0_u64; 16 + MOST]);
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (text, 1);
        (message.msg_control, message.msg_controllen) =
            (control.as_mut_ptr().cast(), size_of_val(&control) as _);
        let mut count = 0;
        if libc::recvmsg(0, &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT) < 0 {
            words[0] = u64::from((*libc::__errno_location()).cast_unsigned());
        } else {
            // They have got the numbers that are free.
            while count < MOST && libc::fcntl(2 + count as RawFd, libc::F_GETFD) >= 0 {
                words[1 + count] = mount_of(2 + count as RawFd);
                count += 1;
            }
        }
        // If this copy stays, the sender must see its connection closed nevertheless.
        libc::close(0);
        libc::write(1, words.as_ptr().cast(), (1 + count) * size_of::<u64>());
        libc::_exit(0)
    }
}

/// [`HARMLESS`], or the number of the mount of a file whose file system may have a server.
///
/// # Safety
///
/// As for [`look_in_copy`].
unsafe fn mount_of(fd: RawFd) -> u64 {
    // SAFETY: plain system calls on a number, with memory of this function, and no allocation.
    unsafe {
        // Files in memory have seals.
        if libc::fcntl(fd, libc::F_GET_SEALS) >= 0 {
            return HARMLESS;
        }
        let mut stat: libc::statx = std::mem::zeroed();
        let mask = libc::STATX_TYPE | libc::STATX_MNT_ID;
        if libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC, mask, &raw mut stat)
            != 0
        {
            return UNKNOWN;
        }
        match u32::from(stat.stx_mode) & libc::S_IFMT {
            // An eventfd, for example. No file system has such files.
            0 | libc::S_IFSOCK | libc::S_IFCHR => HARMLESS,
            // On a block device.
            libc::S_IFREG if stat.stx_dev_major != 0 => HARMLESS,
            libc::S_IFREG if stat.stx_mask & libc::STATX_MNT_ID != 0 => stat.stx_mnt_id,
            _ => UNKNOWN,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;

    use nix::sys::eventfd::EventFd;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(240);

    fn sent(descriptors: &[RawFd]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let rights = [ControlMessage::ScmRights(descriptors)];
        sendmsg::<()>(theirs.as_raw_fd(), &[IoSlice::new(b"text")], &rights, MsgFlags::empty(), None)
            .unwrap();
        ours
    }

    #[test]
    fn what_makes_nobody_wait_is_harmless_and_stays() {
        let memory = memfd_create(c"memory", MFdFlags::empty()).unwrap();
        let (event, null) = (EventFd::new().unwrap(), File::open("/dev/null").unwrap());
        let all = [memory.as_raw_fd(), event.as_fd().as_raw_fd(), null.as_raw_fd()];
        for socket in [sent(&all), sent(&[memory.as_raw_fd(); 32])] {
            assert!(matches!(look(socket.as_fd(), 4, PATIENCE), Ok(Found::Harmless)));
            let mut text = [0; 9];
            assert_eq!(recv(socket.as_raw_fd(), &mut text, MsgFlags::empty()), Ok(4));
        }
    }

    #[test]
    fn a_file_of_unknown_origin_is_foreign_wherever_it_stands() {
        let memory = memfd_create(c"memory", MFdFlags::empty()).unwrap();
        // Of a file system without a block device.
        let file = File::open("/proc/self/status").unwrap();
        let socket = sent(&[memory.as_raw_fd(), file.as_raw_fd(), memory.as_raw_fd()]);
        let Ok(Found::Foreign(copy)) = look(socket.as_fd(), 4, PATIENCE) else { panic!("harmless") };
        copy.wait();
    }

    #[test]
    fn a_message_that_has_not_come_is_an_error() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let error = look(ours.as_fd(), 4, PATIENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
