//! User IDs that no two live processes share.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Default IDs of rgpu-server's workers. systemd documents IDs from 1879048192 (0x70000000) to 2147483647 as
/// unused by any allocation that it knows.
pub const WORKER_USERS: Range = Range { first: 0x7000_0000, last: 0x7000_ffff };
/// Default IDs of vhost-rgpu's device processes.
pub const DEVICE_PROCESS_USERS: Range = Range { first: 0x7001_0000, last: 0x7001_ffff };

/// The folder through which daemons of a machine share IDs: it has a file for each ID, locked while the ID is
/// in use.
const FOLDER: &str = "/run/rgpu/users";

/// A range of user IDs, including both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The first ID. Never 0.
    pub first: u32,
    /// The last ID.
    pub last: u32,
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let wrong = || format!("{text:?} is not a range of user IDs such as {WORKER_USERS}");
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let range = Range { first: number(first)?, last: number(last)? };
        // 0 is root, and u32::MAX means "no change" to the kernel.
        if range.first == 0 || range.last < range.first || range.last == u32::MAX {
            return Err(wrong());
        }
        Ok(range)
    }
}

impl Range {
    fn ids(self) -> RangeInclusive<u32> {
        self.first..=self.last
    }
}

/// Why there is no user ID.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Every ID is in use.
    #[error("every user ID from {0} is in use; widen the range")]
    Full(Range),
    /// The list of processes cannot be read.
    #[error("cannot see which user IDs are in use in /proc")]
    Processes(#[source] io::Error),
}

/// Allocates user IDs.
#[derive(Debug)]
pub struct Users {
    range: Range,
    folder: Option<PathBuf>,
    taken: Mutex<BTreeSet<u32>>,
}

/// A user ID that no other process gets until this is dropped.
#[derive(Debug)]
pub struct User {
    id: u32,
    users: Arc<Users>,
    _lock: Option<Flock<File>>,
}

impl User {
    /// The user ID; the group ID is the same.
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.users.lock().remove(&self.id);
    }
}

impl Users {
    /// An allocator for `range`. Several daemons can share a range: they lock files in `/run/rgpu/users`, if
    /// that folder can be created, and check the IDs of running processes.
    pub fn new(range: Range) -> Arc<Users> {
        Users::with_folder(range, Path::new(FOLDER))
    }

    fn with_folder(range: Range, folder: &Path) -> Arc<Users> {
        let folder = std::fs::create_dir_all(folder).is_ok().then(|| folder.to_owned());
        Arc::new(Users { range, folder, taken: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates an ID that no process of the machine has. A process that outlived its daemon may still have
    /// one.
    pub fn allocate(self: &Arc<Users>) -> Result<User, Error> {
        let running = running(self.range).map_err(Error::Processes)?;
        let mut taken = self.lock();
        for id in self.range.ids() {
            if taken.contains(&id) || running.contains(&id) {
                continue;
            }
            let Ok(lock) = self.claim(id) else { continue };
            taken.insert(id);
            return Ok(User { id, users: Arc::clone(self), _lock: lock });
        }
        Err(Error::Full(self.range))
    }

    /// Takes over the ID of a process that another daemon has started. That daemon no longer locks the ID. If
    /// yet another daemon locks it, this takes the ID without the lock.
    pub(crate) fn adopt(self: &Arc<Users>, id: u32) -> User {
        let lock = self.claim(id).ok().flatten();
        self.lock().insert(id);
        User { id, users: Arc::clone(self), _lock: lock }
    }

    /// Locks the ID's file. An error means that another daemon has locked it.
    fn claim(&self, id: u32) -> Result<Option<Flock<File>>, Errno> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let open = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(folder.join(id.to_string()));
        // The folder belongs to another user, or the disk is full: the check of running processes must
        // suffice.
        let Ok(file) = open else { return Ok(None) };
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map(Some).map_err(|(_, e)| e)
    }
}

/// The IDs of a range that processes have.
fn running(range: Range) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // The process may have ended by now.
        let Ok(status) = std::fs::read_to_string(entry.path().join("status")) else { continue };
        let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        found.extend(
            ids.split_whitespace().filter_map(|id| id.parse().ok()).filter(|id| range.ids().contains(id)),
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked() {
        assert_eq!("5-9".parse(), Ok(Range { first: 5, last: 9 }));
        for wrong in ["", "5", "0-9", "9-5", "5-4294967295", "a-b"] {
            assert!(wrong.parse::<Range>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_two_live_users_share_an_id() {
        let folder = tempfile::tempdir().unwrap();
        let range = Range { first: 0x7100_0000, last: 0x7100_0002 };
        // Two daemons of one machine.
        let daemons = [Users::with_folder(range, folder.path()), Users::with_folder(range, folder.path())];
        let first = daemons[0].allocate().unwrap();
        let second = daemons[1].allocate().unwrap();
        let third = daemons[0].allocate().unwrap();
        let ids = BTreeSet::from([first.id(), second.id(), third.id()]);
        assert_eq!(ids.len(), 3);
        assert!(matches!(daemons[1].allocate(), Err(Error::Full(_))));
        let free = second.id();
        drop(second);
        assert_eq!(daemons[0].allocate().unwrap().id(), free);
    }

    #[test]
    fn an_id_that_a_process_has_is_not_given() {
        let id = nix::unistd::geteuid().as_raw().max(1);
        let users = Users::with_folder(Range { first: id, last: id }, Path::new("/dev/null/folder"));
        // If root runs this test, no process has user ID 1.
        if !nix::unistd::geteuid().is_root() {
            assert!(matches!(users.allocate(), Err(Error::Full(_))));
        }
    }
}
