//! What of a session outlives the bridge's process: enough for another one to go on with it, or to end it.
//!
//! It is made before the session begins ([`Prepared::save`](super::Prepared::save)) and never changes. What
//! changes while the session runs is with its worker, which tells a successor, or over `tcp` and `verbs` in
//! the files that belong to it (`remote`): the relay's ledger and the list of `regions`.
//!
//! A successor gets it from whoever keeps it, and does not trust it more than the client that it belongs to:
//! the process that made it may have been taken over by that client.

mod about;
mod regions;
mod remote;

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use protocol::link::{FrameHeader, frame};
use zerocopy::{FromBytes, IntoBytes};

pub(super) use self::about::About;
pub use self::regions::InheritedRegion;
pub(super) use self::regions::{RegionsFile, StoredRegion};
pub(super) use self::remote::{SavedQueues, SavedRemote, Succession, TakenOver, Terms};
use super::config::SessionConfig;
use super::transport::Closed;
use crate::framing::recv_some;

/// The most descriptors of a saved session.
pub const MAX_DESCRIPTORS: usize = 4;
/// The most bytes of a saved session.
pub const MAX_BYTES: usize = 1024;

/// A saved session.
#[derive(Debug)]
pub struct Saved(pub(super) Kind);

#[derive(Debug)]
pub(super) enum Kind {
    /// The server is elsewhere. The next process takes the relay's place.
    Remote(Box<SavedRemote>),
    /// The worker is on this host and goes on by itself.
    Local(SavedLocal),
}

/// A session with a worker of this host.
#[derive(Debug)]
pub(super) struct SavedLocal {
    /// Where the worker waits for another process. Closed when nothing of the worker is left.
    pub(super) worker: OwnedFd,
    /// The session's doorbell.
    pub(super) doorbell: EventFd,
    /// What the worker writes to wake the client's threads.
    pub(super) wake: EventFd,
    /// What tells the server that somebody may go on with the session. Earlier versions had none.
    pub(super) presence: Option<Presence>,
    pub(super) about: About,
}

/// The writing end of a pipe whose other end the server's daemon has: the client of a worker that shares its
/// memory is there as long as somebody holds this, and nobody has said that it is gone.
#[derive(Debug)]
pub(super) struct Presence(OwnedFd);

impl Presence {
    /// What the daemon, or whoever has kept it, gives for one. Whatever it is, writing to it never blocks.
    pub(super) fn of(given: OwnedFd) -> io::Result<Presence> {
        nonblocking(given).map(Presence)
    }

    pub(super) fn try_clone(&self) -> io::Result<Presence> {
        Ok(Presence(self.0.try_clone()?))
    }

    /// The client is gone, and nobody comes in its place. A daemon that does not look any more is no matter.
    pub(super) fn end(&self) {
        let _ = nix::unistd::write(&self.0, &[1]);
    }
}

const REMOTE: u64 = 1;
const LOCAL: u64 = 2;
const VERBS: u64 = 3;

/// A descriptor that can be anything, as an eventfd that never blocks. If it is something else, what is done
/// with it fails or has no meaning.
pub fn event(fd: OwnedFd) -> io::Result<EventFd> {
    let fd = nonblocking(fd)?;
    // SAFETY: the type only reads and writes the descriptor that it owns, 8 bytes of its own at a time, which
    // harms no memory whatever is behind it.
    Ok(unsafe { EventFd::from_owned_fd(fd) })
}

fn nonblocking(fd: OwnedFd) -> io::Result<OwnedFd> {
    fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(fd)
}

/// The same eventfd once more.
pub(super) fn duplicate(of: &EventFd) -> io::Result<EventFd> {
    event(of.as_fd().try_clone_to_owned()?)
}

impl Saved {
    /// Bytes, which contain the session's secret, and descriptors.
    pub fn parts(&self) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        match &self.0 {
            Kind::Remote(remote) => {
                let (bytes, descriptors) = remote.parts();
                let begin = match &remote.queues {
                    Some(queues) => [&VERBS.to_le_bytes(), queues.as_bytes()].concat(),
                    None => REMOTE.to_le_bytes().to_vec(),
                };
                ([begin, bytes].concat(), descriptors)
            }
            Kind::Local(local) => {
                let bytes = [&LOCAL.to_le_bytes(), local.about.as_bytes()].concat();
                let mut descriptors = vec![local.worker.as_fd(), local.doorbell.as_fd(), local.wake.as_fd()];
                descriptors.extend(local.presence.as_ref().map(|presence| presence.0.as_fd()));
                (bytes, descriptors)
            }
        }
    }

    /// What [`parts`](Self::parts) gave.
    pub fn from_parts(bytes: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<Saved> {
        let malformed = || io::Error::new(ErrorKind::InvalidData, "what was saved of a session is malformed");
        let (kind, rest) = bytes.split_first_chunk().ok_or_else(malformed)?;
        let kind = match u64::from_le_bytes(*kind) {
            kind @ (REMOTE | VERBS) => {
                let (queues, rest) = match kind {
                    VERBS => SavedQueues::read_from_prefix(rest)
                        .map(|(queues, rest)| (Some(queues), rest))
                        .map_err(|_| malformed())?,
                    _ => (None, rest),
                };
                let mut saved = SavedRemote::from_parts(rest, descriptors).ok_or_else(malformed)?;
                saved.queues = queues;
                Kind::Remote(Box::new(saved))
            }
            LOCAL => {
                let mut descriptors = descriptors.into_iter();
                let mut next = || descriptors.next().ok_or_else(malformed);
                let (worker, doorbell, wake) = (next()?, event(next()?)?, event(next()?)?);
                let presence = descriptors.next().map(Presence::of).transpose()?;
                if descriptors.next().is_some() {
                    return Err(malformed());
                }
                let about = About::read_from_bytes(rest).map_err(|_| malformed())?;
                Kind::Local(SavedLocal { worker, doorbell, wake, presence, about })
            }
            _ => return Err(malformed()),
        };
        Ok(Saved(kind))
    }

    /// Ends the session: tells its server or worker, as far as they can be told. Does not block. Without the
    /// server's configuration only a worker of this host can be told.
    pub fn end(&self, config: Option<&SessionConfig>) {
        match &self.0 {
            // A server keeps a session whose connections are merely closed.
            Kind::Remote(remote) => config.into_iter().for_each(|config| remote.end(config)),
            // The worker finds that nobody can come, as if nobody held the socket.
            Kind::Local(local) => {
                let _ = shutdown(local.worker.as_raw_fd(), Shutdown::Write);
                local.presence.iter().for_each(Presence::end);
            }
        }
    }

    /// Has a worker that lost its bridge leave the client's memory alone, until another process goes on with
    /// the session. Waits up to `patience` for that; false: it does not.
    pub fn pause(&self, patience: Duration) -> bool {
        match &self.0 {
            // Who touched the memory has ended.
            Kind::Remote(_) => true,
            Kind::Local(local) => {
                say_pause(local.worker.as_fd());
                hears_paused(local.worker.as_fd(), patience)
            }
        }
    }

    /// Waits up to `patience` until no worker has the client's memory mapped. Call it after
    /// [`end`](Self::end).
    pub fn released(&self, patience: Duration) -> Closed {
        let Kind::Local(SavedLocal { worker, .. }) = &self.0 else { return Closed::Released };
        let deadline = Instant::now() + patience;
        let (mut bytes, mut fds) = ([0; 4096], Vec::new());
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(worker.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(0) => return Closed::StillHeld,
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(_) => return Closed::Released,
            }
            match recv_some(worker.as_fd(), &mut bytes, &mut fds) {
                Ok(0) => return Closed::Released,
                Ok(_) => fds.clear(),
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(_) => return Closed::Released,
            }
        }
    }
}

/// Says something to a worker beside its connection with the bridge. One that is gone, or does not listen, is
/// no matter: it touches no memory, or gives no answer.
pub(super) fn say(worker: BorrowedFd<'_>, kind: u32) {
    let packet = FrameHeader { kind, len: 0 };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let _ = send(worker.as_raw_fd(), packet.as_bytes(), flags);
}

/// Forgets what a worker has said so far, and nobody has read.
fn forget_said(worker: BorrowedFd<'_>) {
    let (mut header, mut fds) = (FrameHeader { kind: 0, len: 0 }, Vec::new());
    // As much as it says for a few processes that did not listen. One that says more harms only its own
    // client.
    for _ in 0..64 {
        let said = poll(&mut [PollFd::new(worker, PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(1);
        if !said || !recv_some(worker, header.as_mut_bytes(), &mut fds).is_ok_and(|bytes| bytes > 0) {
            return;
        }
        fds.clear();
    }
}

/// Has a worker pause. It may have paused for a process before this one, which did not read that.
pub(super) fn say_pause(worker: BorrowedFd<'_>) {
    forget_said(worker);
    say(worker, frame::PAUSE);
}

/// Waits up to `patience` until a worker says that it is paused, or nothing of it is left.
pub(super) fn hears_paused(worker: BorrowedFd<'_>, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    let (mut header, mut fds) = (FrameHeader { kind: 0, len: 0 }, Vec::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(worker, PollFlags::POLLIN)], limit) {
            Ok(0) => return false,
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(_) => return false,
        }
        match recv_some(worker, header.as_mut_bytes(), &mut fds) {
            // Its end, or its process, is gone, and its mappings with it.
            Ok(0) => return true,
            Ok(_) if header.kind == frame::PAUSED => return true,
            Ok(_) => fds.clear(),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::eventfd::EfdFlags;
    use proptest::prelude::*;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
    }

    #[test]
    fn a_worker_that_paused_before_has_to_say_so_again() {
        let event = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).unwrap();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // What it said to a process that has ended without reading it.
        say(theirs.as_fd(), frame::PAUSED);
        let about = About::now("gpu-1");
        let local =
            SavedLocal { worker: ours.into(), doorbell: event(), wake: event(), presence: None, about };
        let saved = Saved(Kind::Local(local));
        assert!(!saved.pause(Duration::from_millis(1)));
        say(theirs.as_fd(), frame::PAUSED);
        let Kind::Local(local) = &saved.0 else { panic!("another kind") };
        assert!(hears_paused(local.worker.as_fd(), Duration::from_secs(60)));
    }

    #[test]
    fn a_saved_session_has_its_parts_again() {
        let event = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).unwrap();
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let about = About::now("gpu-1");
        let (_daemons, given) = nix::unistd::pipe().unwrap();
        let presence = Some(Presence::of(given).unwrap());
        let local = SavedLocal { worker: ours.into(), doorbell: event(), wake: event(), presence, about };
        let saved = Saved(Kind::Local(local));
        let (bytes, descriptors) = saved.parts();
        assert!(bytes.len() <= MAX_BYTES && descriptors.len() <= MAX_DESCRIPTORS);
        let descriptors = descriptors.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let Saved(Kind::Local(again)) = Saved::from_parts(&bytes, descriptors).unwrap() else {
            panic!("another kind")
        };
        assert_eq!(again.about.as_bytes(), about.as_bytes());
        // None blocks the successor, whatever its predecessor had made of it.
        assert!(again.doorbell.read().is_err() && again.wake.read().is_err());
        assert!(again.presence.is_some());
        // An earlier version has saved fewer.
        let fewer = saved.parts().1[..3].iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let Saved(Kind::Local(again)) = Saved::from_parts(&bytes, fewer).unwrap() else {
            panic!("another kind")
        };
        assert!(again.presence.is_none());
    }

    proptest! {
        #[test]
        fn anything_that_was_saved_is_refused_or_understood(bytes in proptest::collection::vec(any::<u8>(), 0..600), kind in 0u64..5, descriptors in 0usize..5) {
            let bytes = [&kind.to_le_bytes(), &bytes[..]].concat();
            if let Ok(saved) = Saved::from_parts(&bytes, files(descriptors)) {
                prop_assert_eq!(saved.parts().0, bytes);
                prop_assert_eq!(saved.released(Duration::ZERO), Closed::Released);
            }
        }
    }
}
