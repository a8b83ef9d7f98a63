//! A limit for how long a device process may take to answer.
//!
//! `vhost` reads and writes on when a socket's own timeout has passed, without end. So a thread watches the
//! connection, and shuts it down when an answer takes too long: then both fail.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use handover::start_thread;

#[derive(Default)]
struct State {
    /// When the answer that is awaited is due.
    due: Option<Instant>,
    /// Nobody asks any more.
    over: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until an answer is overdue. False: nobody asks any more.
    fn is_overdue(&self) -> bool {
        let mut state = self.lock();
        while !state.over {
            let left = state.due.map(|due| due.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return true,
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        false
    }
}

/// See the module's documentation.
pub struct Answers {
    shared: Arc<Shared>,
    within: Duration,
}

impl Answers {
    /// Shuts `stream` down, and logs that `who` does not answer, once an answer takes longer than `within`.
    pub fn new(stream: UnixStream, within: Duration, who: String) -> io::Result<Answers> {
        let shared = Arc::<Shared>::default();
        let watched = Arc::clone(&shared);
        start_thread("answers", move || {
            if watched.is_overdue() {
                tracing::error!("{who} has not answered within {} s", within.as_secs());
                // It fails only if the connection is over anyway.
                let _ = stream.shutdown(Shutdown::Both);
            }
        })?;
        Ok(Answers { shared, within })
    }

    /// Calls `ask`, which asks and waits for the answers. They are late together.
    pub fn to<T>(&self, ask: impl FnOnce() -> T) -> T {
        self.shared.lock().due = Some(Instant::now() + self.within);
        self.shared.changed.notify_one();
        let answer = ask();
        self.shared.lock().due = None;
        answer
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use vhost::VhostBackend;
    use vhost::vhost_user::Frontend;

    use super::*;

    #[test]
    fn asking_a_process_that_does_not_answer_fails() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let answers = Answers::new(ours.try_clone().unwrap(), Duration::from_millis(1), "it".into()).unwrap();
        let (asked, failed) = mpsc::channel();
        std::thread::spawn(move || {
            let frontend = Frontend::from_stream(ours, 1);
            asked.send(answers.to(|| frontend.get_features()).is_err())
        });
        assert_eq!(failed.recv_timeout(Duration::from_secs(60)), Ok(true));
    }

    #[test]
    fn a_connection_stays_when_nothing_is_asked() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answers =
            Answers::new(ours.try_clone().unwrap(), Duration::from_secs(3600), "it".into()).unwrap();
        answers.to(|| ());
        assert_eq!(answers.shared.lock().due, None);
        let shared = Arc::clone(&answers.shared);
        drop(answers);
        assert!(!shared.is_overdue());
        assert!(nix::unistd::write(&theirs, b"a").is_ok() && nix::unistd::write(&ours, b"a").is_ok());
    }
}
