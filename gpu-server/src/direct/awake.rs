//! How the threads of connections wait for what comes next.
//!
//! Before they sleep, they poll for a short time ([`DIRECT_CONNECTION`]). They are woken ahead if it is known
//! that a piece is about to come: while a device still copies it, or while it is still on its way. With few
//! processors they do neither, because a thread that polls would take another one's.

use std::io;
use std::os::fd::AsFd;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
#[cfg(test)]
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use host_bridge::stream::{QUIET, Stream};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use protocol::polling::{DIRECT_CONNECTION, PollTime};

use super::buffers::Bell;

/// How long a thread polls before it sleeps.
pub(super) struct Polls {
    /// For the next piece, and for one that was announced.
    next: PollTime,
    announced: PollTime,
    is_announced: bool,
    /// How often it has slept.
    #[cfg(test)]
    pub(super) sleeps: u64,
}

impl Polls {
    /// Polls for `bound` at most.
    pub(super) fn new(bound: Duration) -> Polls {
        let time = PollTime::new(bound);
        Polls {
            next: time,
            announced: time,
            is_announced: false,
            #[cfg(test)]
            sleeps: 0,
        }
    }

    /// A piece is about to come.
    pub(super) fn announce(&mut self) {
        self.is_announced = true;
    }

    fn time(&mut self) -> &mut PollTime {
        if self.is_announced { &mut self.announced } else { &mut self.next }
    }

    /// Looks until there is something, or the time is over.
    pub(super) fn look<T>(&mut self, look: impl Fn() -> Option<T>) -> Option<T> {
        let limit = self.time().get();
        let begun = Instant::now();
        while !limit.is_zero() {
            if let Some(found) = look() {
                self.time().paid();
                self.is_announced = false;
                return Some(found);
            }
            if begun.elapsed() >= limit {
                break;
            }
            std::hint::spin_loop();
        }
        None
    }

    /// The thread has slept because nothing came: it has waited for this long.
    pub(super) fn slept(&mut self, waited: Duration) {
        self.time().slept(waited);
        self.is_announced = false;
        #[cfg(test)]
        {
            self.sleeps += 1;
        }
    }
}

/// Wakes the thread of a receiving end when a piece is about to come.
pub(super) struct Alarm {
    bell: Bell,
    bound: Duration,
    /// How often it has woken the thread.
    #[cfg(test)]
    woken: AtomicU64,
}

impl Alarm {
    /// That of a thread of this process. `None`: it does not poll.
    pub(super) fn here() -> Option<Alarm> {
        Alarm::new(DIRECT_CONNECTION.here())
    }

    /// That of a thread that polls for `bound` at most.
    pub(super) fn new(bound: Duration) -> Option<Alarm> {
        if bound.is_zero() {
            return None;
        }
        // Without a descriptor for it, the thread wakes when a piece is here.
        let bell = Bell::new().ok()?;
        Some(Alarm {
            bell,
            bound,
            #[cfg(test)]
            woken: AtomicU64::new(0),
        })
    }

    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.bell.is_awaited()
    }

    #[cfg(test)]
    pub(super) fn woken(&self) -> u64 {
        self.woken.load(Ordering::Acquire)
    }

    pub(super) fn polls(&self) -> Polls {
        Polls::new(self.bound)
    }

    /// A piece is about to come. If the thread is just falling asleep, it may miss this, and then wakes when
    /// the piece is here.
    pub(super) fn announce(&self) {
        self.bell.ring();
    }

    /// Waits until something has come over the connection, or it is over.
    pub(super) fn wait(&self, stream: &Stream, polls: &mut Polls) -> io::Result<()> {
        loop {
            let begun = Instant::now();
            if polls.look(|| stream.is_readable().then_some(())).is_some() {
                return Ok(());
            }
            self.bell.listen();
            let rang = self.sleep(stream);
            self.bell.ignore();
            let rang = rang?;
            polls.slept(begun.elapsed());
            if !rang {
                return Ok(());
            }
            self.bell.silence();
            polls.announce();
            #[cfg(test)]
            self.woken.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Sleeps until something comes, or until it is to come soon, which returns true.
    fn sleep(&self, stream: &Stream) -> io::Result<bool> {
        // Nobody else gives memory back meanwhile.
        let mut limit = match PollTimeout::try_from(QUIET) {
            Ok(quiet) if stream.is_encrypted() => quiet,
            _ => PollTimeout::NONE,
        };
        loop {
            // It may have come with what was received before.
            if stream.has_input() {
                return Ok(false);
            }
            let mut both = [stream.as_fd(), self.bell.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut both, limit) {
                Ok(0) => {
                    stream.rest();
                    limit = PollTimeout::NONE;
                }
                Ok(_) => return Ok(!both[0].any().unwrap_or(true)),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}
