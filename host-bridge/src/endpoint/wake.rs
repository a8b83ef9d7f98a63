//! Ways to wake a sleeping thread: an eventfd, or a futex on a shared word.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::channel::Header;

use crate::memory::ChannelView;

/// Signals that something has ended. It wakes the threads that poll it and stays raised.
#[derive(Debug)]
pub(super) struct StopEvent(EventFd);

impl StopEvent {
    pub(super) fn new() -> io::Result<StopEvent> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(StopEvent(EventFd::from_value_and_flags(0, flags)?))
    }

    pub(super) fn raise(&self) {
        // A full counter means that it is already raised.
        let _ = self.0.write(1);
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes a thread in [`Watch::wait`] look around. Nobody reads it: each write is an edge.
#[derive(Debug)]
pub(super) struct Rouse(EventFd);

impl Rouse {
    pub(super) fn new() -> io::Result<Rouse> {
        Ok(Rouse(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    pub(super) fn rouse(&self) {
        // It fails when it has been written to 2^64 times.
        let _ = self.0.write(1);
    }
}

/// Adds 1 to an eventfd that another process made.
pub(super) fn signal(fd: &OwnedFd) {
    // If the counter is full or the peer is gone, there is no thread to wake.
    let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
}

/// How the client's threads are reached.
pub(super) enum Waker {
    Futex,
    Event(OwnedFd),
}

impl Waker {
    /// Wakes the threads that sleep on the word at `offset` of the channel: a word of the header, or of a
    /// slot that exists.
    pub(super) fn word(&self, view: &ChannelView, offset: usize) {
        match self {
            // SAFETY: the offset is that of a word of the channel, which is mapped.
            Waker::Futex => unsafe { futex_wake_all(view.base().add(offset).as_ptr().cast()) },
            Waker::Event(event) => signal(event),
        }
    }

    /// Wakes the threads that sleep until the progress area changes, if there are any.
    pub(super) fn progress(&self, view: &ChannelView) {
        if view.header().progress_sleep.take() {
            self.word(view, Header::PROGRESS_SLEEP_OFFSET as usize);
        }
    }
}

/// Waits for a doorbell that another process shares, for a [`StopEvent`], or for a [`Rouse`].
///
/// A native client can do anything with the doorbell: read it, so that its count is gone before this side
/// looks, or make it blocking, so that a read here would hang. So the doorbell is never read. Epoll reports,
/// edge-triggered, when it is written.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: Epoll,
    _doorbell: OwnedFd,
}

impl Watch {
    pub(super) fn new(doorbell: OwnedFd, stop: &StopEvent, rouse: &Rouse) -> io::Result<Watch> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&doorbell, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0))?;
        epoll.add(stop.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 1))?;
        epoll.add(&rouse.0, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 2))?;
        Ok(Watch { epoll, _doorbell: doorbell })
    }

    /// Waits until the doorbell rings, the event is raised, or somebody rouses. May return early.
    pub(super) fn wait(&self) -> io::Result<()> {
        match self.epoll.wait(&mut [EpollEvent::empty(); 3], EpollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// Whether the peer of a stream socket has closed it, or its sending side, even if there is unread data.
pub(super) fn hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::from_bits_retain(libc::POLLRDHUP))];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|n| n > 0)
}

/// Waits until one of `fds` is readable (or broken). Returns `Ok(false)` after the time limit.
pub(super) fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    let timeout = match timeout {
        None => PollTimeout::NONE,
        Some(t) => PollTimeout::try_from(t.as_millis().min(60_000) as u32).unwrap_or(PollTimeout::MAX),
    };
    match poll(&mut polled, timeout) {
        Ok(n) => Ok(n > 0),
        Err(nix::Error::EINTR) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Wakes every thread of every process that sleeps on the futex at `word`.
///
/// # Safety
/// `word` is 4-aligned and mapped.
pub(super) unsafe fn futex_wake_all(word: *const u32) {
    // SAFETY: FUTEX_WAKE only uses the address as a key; the caller answers for it. Not PRIVATE: the sleepers
    // are other processes.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, std::ptr::null::<u8>(), 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_doorbell_that_its_client_empties_and_makes_blocking_still_wakes() {
        let doorbell: OwnedFd = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap().into();
        let stop = StopEvent::new().unwrap();
        let watch = Watch::new(doorbell.try_clone().unwrap(), &stop, &Rouse::new().unwrap()).unwrap();
        nix::fcntl::fcntl(&doorbell, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..100 {
                let waiting = scope.spawn(|| watch.wait().unwrap());
                signal(&doorbell);
                nix::unistd::read(&doorbell, &mut [0; 8]).unwrap();
                // A write before the wait began is not reported. It need not be: a thread checks for work
                // before it sleeps.
                while !waiting.is_finished() {
                    signal(&doorbell);
                }
            }
            stop.raise();
            watch.wait().unwrap();
        });
    }

    #[test]
    fn a_thread_is_roused_whether_it_sleeps_already_or_not() {
        let doorbell: OwnedFd = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap().into();
        let (stop, rouse) = (StopEvent::new().unwrap(), Rouse::new().unwrap());
        let watch = Watch::new(doorbell, &stop, &rouse).unwrap();
        for _ in 0..100 {
            rouse.rouse();
            watch.wait().unwrap();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| watch.wait().unwrap());
                rouse.rouse();
                waiting.join().unwrap();
            });
        }
    }

    #[test]
    fn a_peer_that_is_gone_shows_through_unread_frames() {
        use std::io::Write;
        let (a, mut b) = UnixStream::pair().unwrap();
        b.write_all(b"unread").unwrap();
        assert!(!hung_up(a.as_fd()));
        b.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(hung_up(a.as_fd()));
    }
}
