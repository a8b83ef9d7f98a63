//! What one keeper leaves to the next about a device process: how to end it, and what it has stored.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::{Deserialize, Serialize};

use super::kept::{Found, Kept, Renamed, Words};
use super::process::{Process, Reply};
use crate::link::{Control, Stored, ToKeeper};

/// What device processes have stored, by channel.
pub type StoredByChannel = BTreeMap<u64, Stored>;

/// A device process and what it has stored, as descriptor numbers.
#[derive(Default, Serialize, Deserialize)]
pub struct Ties {
    /// The process, and the keeper's end of the socket to it.
    device: Option<(u64, u64)>,
    /// By channel: the saved information, and the other descriptors.
    stored: BTreeMap<u64, Vec<u64>>,
}

/// What changes often: what is stored for a channel, or `None` if nothing is any more.
pub type Step = (u64, Option<Vec<u64>>);

impl Ties {
    /// The numbers of all descriptors.
    pub fn numbers(&self) -> impl Iterator<Item = u64> {
        let device = self.device.into_iter().flat_map(|(process, control)| [process, control]);
        device.chain(self.stored.values().flatten().copied())
    }

    /// Makes a change.
    pub fn step(&mut self, (channel, stored): Step) -> Renamed {
        let now = stored.clone().unwrap_or_default();
        let before = match stored {
            Some(numbers) => self.stored.insert(channel, numbers),
            None => self.stored.remove(&channel),
        };
        Renamed { now, before: before.unwrap_or_default() }
    }

    /// Drops what was stored for channels that don't stay. Returns its descriptors' numbers.
    pub fn retain(&mut self, stays: impl Fn(u64) -> bool) -> Vec<u64> {
        let gone = self.stored.extract_if(.., |channel, _| !stays(*channel));
        gone.flat_map(|(_, numbers)| numbers).collect()
    }
}

/// A record that includes a device process.
pub trait Tied: Words {
    /// The device process.
    fn ties(&self) -> &Ties;
    /// The same, mutable.
    fn ties_mut(&mut self) -> &mut Ties;
    /// A change of it.
    fn tie(step: Step) -> Self::Step;
}

impl<W: Tied> Kept<W> {
    /// This device process serves from now on. It knows nobody yet.
    pub fn served_by(&self, process: &Process) {
        let (handle, control) = process.ties();
        let device = (self.hold(&handle), self.hold(&control));
        self.change(|words| words.ties_mut().device = Some(device));
    }

    /// The device process has stored this for a channel, or dropped it.
    pub fn stored(&self, channel: u64, stored: Option<&Stored>) {
        let numbers = stored.map(|Stored { known, descriptors }| {
            std::iter::once(known).chain(descriptors).map(|fd| self.hold_if_room(fd)).collect()
        });
        self.step(W::tie((channel, numbers)));
    }

    /// The previous keeper's device process, and the socket to it.
    fn device(&self, found: &Found) -> io::Result<Option<(sandbox::Handle, Control)>> {
        let Some((process, control)) = self.read(|words| words.ties().device) else { return Ok(None) };
        Ok(Some((found.get(process)?.into(), found.get(control)?.into())))
    }

    /// Kills the previous keeper's device process, if it has outlived the keeper. Doesn't wait.
    pub fn kill_device_process(&self, found: &Found) {
        if let Ok(Some((handle, _))) = self.device(found) {
            handle.kill();
        }
    }

    /// Waits until nothing of that device process is left, and returns what it has stored, including messages
    /// that no keeper has read. Those may store up to `most` channels. If descriptors of a channel are
    /// missing, because the service manager had no room for them, `missing` returns what takes the place of
    /// what was stored, or an error, which ends all of this.
    pub fn end_device_process(
        &self,
        found: &Found,
        most: usize,
        mut missing: impl FnMut(u64, io::Error) -> io::Result<Stored>,
        mut answer: impl FnMut(Reply),
    ) -> io::Result<StoredByChannel> {
        let of = |numbers: &[u64]| {
            let mut fds = numbers.iter().map(|number| found.get(*number));
            let known = fds.next().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))??;
            io::Result::Ok(Stored { known, descriptors: fds.collect::<io::Result<_>>()? })
        };
        let mut stored = self.read(|words| {
            let all = words.ties().stored.iter();
            all.map(|(channel, numbers)| {
                io::Result::Ok((*channel, of(numbers).or_else(|e| missing(*channel, e))?))
            })
            .collect::<io::Result<StoredByChannel>>()
        })?;
        // Without one, it was not even started.
        let Some((handle, control)) = self.device(found)? else { return Ok(stored) };
        handle.kill();
        handle.wait()?;
        fcntl(control.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let mut hear = |message| match message {
            ToKeeper::Store { channel, stored: what }
                if stored.len() < most || stored.contains_key(&channel) =>
            {
                self.stored(channel, Some(&what));
                stored.insert(channel, what);
            }
            ToKeeper::Forget { channel } => {
                self.stored(channel, None);
                stored.remove(&channel);
            }
            ToKeeper::Answer { number, status, reason, fd } => {
                answer(Reply { number, status, reason, fd });
            }
            _ => {}
        };
        while let Ok(Some(())) = control.hear(&mut hear) {}
        Ok(stored)
    }
}
