//! Questions that wait for their answers.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::parent::control::{Control, Refused};
use crate::parent::refusals::Reason;
use crate::parent::trust::Principal;

/// Maximum number of waiting questions, of all clients and of one: a client may start a hundred programs at
/// the same moment, and each asks for a lease.
const MOST: (usize, usize) = (512, 128);

/// A client's question.
pub(in crate::parent) struct Ask {
    pub(in crate::parent) connection: Arc<Control>,
    pub(in crate::parent) peer: String,
    pub(in crate::parent) who: Principal,
    /// The question as received, not parsed yet.
    pub(in crate::parent) question: Vec<u8>,
    /// When it came.
    pub(in crate::parent) since: Instant,
}

/// Questions waiting for their answers.
#[derive(Default)]
pub(in crate::parent) struct Asks {
    waiting: Mutex<VecDeque<Ask>>,
    came: Condvar,
    /// Held once more by each thread that sends a long answer.
    pub(in crate::parent) long: Arc<()>,
}

impl Asks {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Ask>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a question at the end of the queue.
    pub(in crate::parent) fn take(&self, ask: Ask) -> Result<(), Refused> {
        let mut waiting = self.lock();
        let of_client = waiting.iter().filter(|other| other.who.name == ask.who.name).count();
        if waiting.len() >= MOST.0 || of_client >= MOST.1 {
            return Err(Refused(Reason::ServerFull, "too many questions are waiting for an answer".into()));
        }
        waiting.push_back(ask);
        self.came.notify_all();
        Ok(())
    }

    /// Waits for the first one.
    pub(in crate::parent) fn next(&self) -> Ask {
        let mut waiting = self.lock();
        loop {
            match waiting.pop_front() {
                Some(ask) => return ask,
                None => waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn one_client_cannot_fill_the_queue_for_others() {
        let asks = Asks::default();
        let ask = |name: &str| {
            let (connection, _) = UnixStream::pair().unwrap();
            let who = Principal::named(name);
            Ask {
                connection: Arc::new(Control::Local(connection)),
                peer: String::new(),
                who,
                question: vec![],
                since: Instant::now(),
            }
        };
        let fits = |asks: &Asks| asks.take(ask("a")).is_ok();
        assert!((0..64).all(|_| fits(&asks)), "programs that start at the same moment");
        assert_eq!((64..10 * MOST.1).take_while(|_| fits(&asks)).count(), MOST.1 - 64);
        assert!(asks.take(ask("a")).is_err() && asks.take(ask("b")).is_ok());
        assert_eq!(asks.next().who.name, "a");
        assert!(asks.take(ask("a")).is_ok());
    }
}
