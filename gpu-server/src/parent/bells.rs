//! What wakes the daemon's threads.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context;
use handover::{Inherited, Store};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Wakes the thread that gives [turns](super::turns). It is a pipe whose write end workers have, so none can
/// take away what another has rung.
pub(super) struct Bell {
    read: OwnedFd,
    write: OwnedFd,
}

impl Bell {
    /// The previous daemon's bell, which its workers have, or a new one.
    pub(super) fn take_or_new(inherited: &mut Inherited, store: &Store) -> anyhow::Result<Bell> {
        let (read, write) = ("bell-read", "bell-write");
        let bell = match (inherited.remove(read), inherited.remove(write)) {
            (Some(read), Some(write)) => Bell { read, write },
            _ => {
                [read, write].iter().for_each(|name| store.forget(name));
                Bell::new()?
            }
        };
        store
            .keep(read, &bell.read)
            .and_then(|()| store.keep(write, &bell.write))
            .context("keeping the bell")?;
        Ok(bell)
    }

    pub(super) fn new() -> anyhow::Result<Bell> {
        let (read, write) =
            nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).context("a pipe for turns")?;
        Ok(Bell { read, write })
    }

    pub(super) fn ring(&self) {
        // Writing fails only if the pipe is full. The thread is then awake.
        let _ = nix::unistd::write(&self.write, &[1]);
    }

    /// The end for a worker.
    pub(super) fn share(&self) -> std::io::Result<OwnedFd> {
        self.write.as_fd().try_clone_to_owned()
    }

    /// Waits until it rings, or for `limit`, and clears it.
    pub(super) fn wait(&self, limit: PollTimeout) {
        let mut bell = [PollFd::new(self.read.as_fd(), PollFlags::POLLIN)];
        if poll(&mut bell, limit).is_ok_and(|ready| ready > 0) {
            // As much as a pipe holds. Whatever arrives meanwhile rings again.
            let _ = nix::unistd::read(&self.read, &mut [0; 64 << 10]);
        }
    }
}

/// Wakes the queue's thread.
pub(super) struct Nudge(pub(super) EventFd);

impl Nudge {
    pub(super) fn new() -> anyhow::Result<Nudge> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Nudge(EventFd::from_value_and_flags(0, flags).context("an eventfd for the queue")?))
    }

    pub(super) fn nudge(&self) {
        // Writing fails only when the counter is at its maximum. Then the thread is awake.
        let _ = self.0.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_can_ring_the_bell_but_not_clear_it() {
        let bell = Bell::new().unwrap();
        let worker = bell.share().unwrap();
        bell.ring();
        assert!(nix::unistd::read(&worker, &mut [0; 8]).is_err());
        // However often it rings, the others' rings are not delayed, and the daemon clears all of them at
        // once.
        while nix::unistd::write(&worker, &[1; 4096]).is_ok() {}
        bell.ring();
        bell.wait(PollTimeout::NONE);
        assert!(nix::unistd::read(&bell.read, &mut [0; 8]).is_err(), "nothing is left");
    }
}
