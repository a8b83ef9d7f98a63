//! Threads of a daemon that may be about to execute its successor.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait until a thread can begin.
const WITHIN: Duration = Duration::from_secs(2);
const AGAIN_AFTER: Duration = Duration::from_millis(1);

/// Starts a thread, also at the moment when another thread executes the next program.
///
/// Until such an `execve` has succeeded or failed, the kernel lets no thread begin (`EAGAIN`: `copy_fs` in
/// Linux's `kernel/fork.c` looks at `fs->in_exec`). If it succeeds, this thread has ended; if it fails, the
/// daemon continues and needs the new thread. So this tries again for up to two seconds.
///
/// # Errors
/// That of [`std::thread::Builder::spawn`]; then `work` is dropped.
pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let work = Arc::new(Mutex::new(Some(work)));
    let start = || {
        let work = work.clone();
        let body = move || {
            let taken = work.lock().unwrap_or_else(PoisonError::into_inner).take();
            taken.into_iter().for_each(|work| work());
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
    };
    again_while_none_can_begin(start, WITHIN)
}

fn again_while_none_can_begin(start: impl Fn() -> io::Result<()>, within: Duration) -> io::Result<()> {
    let deadline = Instant::now() + within;
    loop {
        match start() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(AGAIN_AFTER);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc::channel;

    #[test]
    fn the_work_is_done_once() {
        let (sender, receiver) = channel();
        start_thread("once", move || sender.send(std::thread::current().name().map(str::to_owned)).unwrap())
            .unwrap();
        assert_eq!(receiver.recv().unwrap().as_deref(), Some("once"));
        assert!(receiver.recv().is_err());
    }

    #[test]
    fn a_thread_that_cannot_begin_now_begins_later_and_other_failures_are_reported() {
        let left = Cell::new(3);
        let start = || {
            left.set(left.get() - 1);
            if left.get() > 0 { Err(io::Error::from_raw_os_error(libc::EAGAIN)) } else { Ok(()) }
        };
        again_while_none_can_begin(start, Duration::from_secs(240)).unwrap();
        assert_eq!(left.get(), 0);
        for (code, within) in [(libc::EAGAIN, Duration::ZERO), (libc::ENOMEM, Duration::from_secs(240))] {
            let failed = again_while_none_can_begin(|| Err(io::Error::from_raw_os_error(code)), within);
            assert_eq!(failed.unwrap_err().raw_os_error(), Some(code));
        }
    }
}
