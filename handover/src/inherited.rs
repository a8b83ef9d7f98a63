//! The descriptors that a process gets at its start.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::{KEPT, LIST};

/// Maximum descriptors that a process takes.
const MOST: i32 = 1 << 16;
/// The first descriptor of `sd_listen_fds(3)`.
const FIRST: RawFd = 3;

/// Descriptors by name. Dropping this closes those that were not taken.
#[derive(Debug, Default)]
pub struct Inherited {
    all: BTreeMap<String, OwnedFd>,
    executed: bool,
}

impl Inherited {
    /// The descriptors from [`Store::exec`](crate::Store::exec) or from the service manager. Call this once,
    /// before anything else opens descriptors: it takes ownership of those that the environment names.
    pub fn take() -> Inherited {
        let read = |name: &str| std::env::var(name).unwrap_or_default();
        let kept = read(KEPT);
        if !kept.is_empty() {
            let mut inherited = Inherited::from_kept(&kept);
            let list = inherited.remove(LIST).map(|list| read_all(list.into()));
            return match list {
                None => inherited,
                Some(Ok(kept)) => Inherited::from_kept(&kept),
                Some(Err(e)) => {
                    tracing::error!("cannot read which descriptors this process inherited: {e}");
                    Inherited::default()
                }
            };
        }
        Inherited::from_manager(&read("LISTEN_PID"), &read("LISTEN_FDS"), &read("LISTEN_FDNAMES"), FIRST)
    }

    fn from_kept(kept: &str) -> Inherited {
        let mut parts = kept.split(':');
        if parts.next().and_then(|pid| pid.parse().ok()) != Some(std::process::id()) {
            return Inherited::default();
        }
        let pairs = parts.filter_map(|part| part.rsplit_once('='));
        let pairs = pairs.filter_map(|(name, number)| Some((name.to_owned(), number.parse().ok()?)));
        Inherited { executed: true, ..Inherited::of(pairs) }
    }

    fn from_manager(pid: &str, count: &str, names: &str, first: RawFd) -> Inherited {
        if pid.parse() != Ok(std::process::id()) {
            return Inherited::default();
        }
        let count: i32 = count.parse().unwrap_or(0).clamp(0, MOST);
        let mut names = names.split(':');
        let pairs =
            (first..first + count).map(|number| (names.next().unwrap_or_default().to_owned(), number));
        Inherited::of(pairs.collect::<Vec<_>>())
    }

    /// An `Inherited` with these descriptors.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, OwnedFd)>) -> Inherited {
        Inherited { all: pairs.into_iter().collect(), executed: false }
    }

    /// Whether a daemon has executed this program in its place. Otherwise the process was started, perhaps
    /// after a daemon that had ended.
    pub fn executed(&self) -> bool {
        self.executed
    }

    fn of(pairs: impl IntoIterator<Item = (String, RawFd)>) -> Inherited {
        let mut all = BTreeMap::new();
        for (name, number) in pairs {
            if number < FIRST {
                continue;
            }
            // SAFETY: the environment says that this process owns the descriptor, and this runs before
            // anything else opens descriptors. The next lines check that it is open.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            if let Err(e) = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
                tracing::error!("cannot use the inherited descriptor {number} ({name:?}): {e}");
                // The descriptor is not open, so there is nothing to close.
                std::mem::forget(fd);
                continue;
            }
            match all.entry(name) {
                Entry::Vacant(free) => {
                    free.insert(fd);
                }
                Entry::Occupied(taken) => {
                    let name = taken.key();
                    tracing::warn!(
                        "this process inherited two descriptors named {name:?}; closing the second"
                    );
                }
            }
        }
        Inherited::from_pairs(all)
    }

    /// Takes the descriptor with this name.
    pub fn remove(&mut self, name: &str) -> Option<OwnedFd> {
        self.all.remove(name)
    }

    /// Names that begin with `prefix`, returned without it.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        self.all.keys().filter_map(|name| name.strip_prefix(prefix)).map(str::to_owned).collect()
    }
}

fn read_all(mut file: File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    /// The end of a pipe, with a high number that parallel tests do not use.
    fn open(least: RawFd) -> RawFd {
        let (reader, _writer) = std::io::pipe().unwrap();
        fcntl(OwnedFd::from(reader), FcntlArg::F_DUPFD_CLOEXEC(least)).unwrap()
    }

    #[test]
    fn descriptors_come_under_their_names_and_those_of_another_process_do_not() {
        let (own, number) = (std::process::id(), open(700));
        assert!(Inherited::from_kept(&format!("{}:a={number}", own + 1)).all.is_empty());
        assert!(Inherited::from_manager("1", "1", "a", number).all.is_empty());
        let mut kept = Inherited::from_kept(&format!("{own}:worker-1-socket={number}:closed=999:0=0:=:x"));
        assert_eq!((kept.names("worker-"), kept.executed()), (vec!["1-socket".to_owned()], true));
        assert!(kept.remove("worker-1-socket").is_some() && kept.names("").is_empty());
        let number = open(800);
        let mut given = Inherited::from_manager(&own.to_string(), "1", "a:b", number);
        assert_eq!((given.names(""), given.executed()), (vec!["a".to_owned()], false));
        assert_eq!(given.remove("a").unwrap().into_raw_fd(), number);
    }

    #[test]
    fn nonsense_in_the_environment_gives_nothing() {
        let own = std::process::id();
        for kept in ["", ":", "x", "-1", &format!("{own}"), &format!("{own}:a=-4:b=99999999999:=7777777:c")] {
            assert!(Inherited::from_kept(kept).all.is_empty(), "{kept:?}");
        }
        for (count, names) in [("-5", ""), ("", ""), ("many", "a:b")] {
            assert!(Inherited::from_manager(&own.to_string(), count, names, 5000).all.is_empty());
        }
    }
}
