//! Opens sessions with several servers, so that two programs never wait for each other.
//!
//! A server may let a session wait until other programs have left its devices. Two programs that each had the
//! devices of one server, and waited for those of another, would wait for ever. So all programs keep to one
//! order: the one of the names that the servers have for themselves. While a session waits, its process lets
//! go of its sessions with servers that come later in this order, and opens them again when the wait is over.
//! It does so only after a while, because most waits are short and are not for devices.
//!
//! Servers on one machine have the same name, and so no order. With them, each program lets go of the other
//! session after a random time, so that sooner or later one of two programs gets both.

use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::Duration;

use crate::lock;
use crate::port::PortError;

/// A session keeps the process's others for at least this long while it waits, and for less than twice as
/// long.
const PATIENCE: Duration = Duration::from_secs(2);

/// How sessions are opened, and what they are called.
pub(super) trait Opener: Sync {
    type Session: Send;

    /// Opens the session with a server, by its number. While it waits, calls `waits` now and then, with the
    /// name that the server has for itself and how long the session has waited.
    fn open(&self, number: usize, waits: &dyn Fn(&str, Duration)) -> Result<Self::Session, PortError>;

    /// The name that a session's server has for itself, if the server answers.
    fn name(&self, session: &Self::Session) -> Option<String>;

    /// How long a session keeps the process's others while it waits: a random time, chosen anew each time.
    fn patience(&self) -> Duration {
        // Its keys are random.
        PATIENCE + PATIENCE.mul_f64((RandomState::new().hash_one(()) >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// The sessions with `count` servers, by number, of which the first is open already. All others are opened at
/// the same time. If one cannot be opened, the others are closed.
pub(super) fn all<O: Opener>(
    opener: &O,
    first: O::Session,
    count: usize,
) -> Result<Vec<O::Session>, PortError> {
    let mut sessions: Vec<Option<O::Session>> = std::iter::once(Some(first)).collect();
    sessions.resize_with(count, || None);
    // The session whose server has the first name stays in each round, so there are few rounds.
    while sessions.iter().any(Option::is_none) {
        let missing: Vec<usize> = (0..count).filter(|number| sessions[*number].is_none()).collect();
        let held = Mutex::new(sessions);
        let patience = opener.patience();
        let open = |number: usize| -> Result<(), PortError> {
            let session = opener.open(number, &|server, waited| {
                if waited >= patience {
                    let_go(opener, &held, server);
                }
            })?;
            lock(&held)[number] = Some(session);
            Ok(())
        };
        std::thread::scope(|scope| {
            let open = &open;
            let opening: Vec<_> =
                missing.into_iter().map(|number| scope.spawn(move || open(number))).collect();
            let opened = opening
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            opened.collect::<Result<(), PortError>>()
        })?;
        sessions = held.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    Ok(sessions.into_iter().flatten().collect())
}

/// Closes the sessions with servers that do not come before the one that another session waits for.
fn let_go<O: Opener>(opener: &O, held: &Mutex<Vec<Option<O::Session>>>, waited_for: &str) {
    // A server without a name has no place in the order.
    if waited_for.is_empty() {
        return;
    }
    // Servers may take long to answer, and other threads store sessions meanwhile.
    let taken: Vec<_> = lock(held).iter_mut().map(Option::take).collect();
    for (number, session) in (0..).zip(taken) {
        let Some(session) = session else { continue };
        let name = opener.name(&session);
        if name.as_deref().is_some_and(|name| name < waited_for) {
            lock(held)[number] = Some(session);
        } else {
            log::info(format_args!(
                "lets go of the session with {} while it waits for {waited_for}",
                name.as_deref().unwrap_or("a server that does not answer")
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier, Condvar};

    /// A server that has one session at a time.
    struct Server {
        name: &'static str,
        taken: Mutex<bool>,
        left: Condvar,
    }

    struct Session(Arc<Server>);

    impl Drop for Session {
        fn drop(&mut self) {
            *lock(&self.0.taken) = false;
            self.0.left.notify_all();
        }
    }

    struct Program {
        servers: Vec<Arc<Server>>,
        /// How often it has opened a session with each of them.
        opened: [AtomicUsize; 3],
        patience: Duration,
    }

    impl Opener for Program {
        type Session = Session;

        fn open(&self, number: usize, waits: &dyn Fn(&str, Duration)) -> Result<Session, PortError> {
            let server = &self.servers[number];
            let mut taken = lock(&server.taken);
            while *taken {
                drop(taken);
                waits(server.name, PATIENCE);
                taken = lock(&server.taken);
                if *taken {
                    taken = server.left.wait_timeout(taken, Duration::from_millis(1)).unwrap().0;
                }
            }
            *taken = true;
            self.opened[number].fetch_add(1, Ordering::Relaxed);
            Ok(Session(server.clone()))
        }

        fn name(&self, session: &Session) -> Option<String> {
            Some(session.0.name.to_owned())
        }

        fn patience(&self) -> Duration {
            self.patience
        }
    }

    /// Two programs, each of which has the first one of its servers when they open the others. They name the
    /// servers in the same order, but begin with different ones. Returns how often each program opened a
    /// session with each server.
    fn both_open(names: [&'static str; 3], patience: [Duration; 2]) -> [[usize; 3]; 2] {
        let orders = [[0, 1, 2], [1, 2, 0]];
        let servers =
            names.map(|name| Arc::new(Server { name, taken: Mutex::new(false), left: Condvar::new() }));
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let started = [0, 1].map(|program| {
                let (order, patience) = (orders[program], patience[program]);
                let servers = order.map(|at| servers[at].clone()).into();
                let program = Program { servers, opened: Default::default(), patience };
                let barrier = &barrier;
                scope.spawn(move || {
                    let first = program.open(0, &|_, _| ()).unwrap();
                    barrier.wait();
                    let sessions = all(&program, first, order.len()).unwrap();
                    let found = sessions.iter().map(|session| Arc::as_ptr(&session.0));
                    assert!(found.eq(program.servers.iter().map(Arc::as_ptr)), "in the order asked for");
                    let opened = program.opened.map(AtomicUsize::into_inner);
                    [0, 1, 2].map(|server| opened[order.iter().position(|at| *at == server).unwrap()])
                })
            });
            started.map(|program| program.join().unwrap())
        })
    }

    #[test]
    fn programs_with_sessions_that_the_other_one_needs_both_get_all() {
        for _ in 0..20 {
            for opened in both_open(["a", "b", "c"], [Duration::ZERO; 2]) {
                // Nobody lets go of the first one, so there are as many rounds at most as there are servers.
                assert!(opened[0] == 1 && opened.iter().all(|times| *times <= 3), "{opened:?}");
            }
        }
    }

    #[test]
    fn of_programs_with_sessions_on_one_machine_the_one_with_more_patience_gets_all() {
        for _ in 0..20 {
            let [_, patient] = both_open(["a"; 3], [Duration::ZERO, Duration::MAX]);
            assert_eq!(patient, [1; 3]);
        }
    }

    #[test]
    fn sessions_are_kept_that_come_before_the_one_that_is_waited_for() {
        let servers =
            ["a", "b"].map(|name| Arc::new(Server { name, taken: Mutex::new(true), left: Condvar::new() }));
        let sessions: Vec<_> = servers.iter().map(|server| Some(Session(server.clone()))).collect();
        let held = Mutex::new(sessions);
        let (opened, patience) = (Default::default(), Duration::ZERO);
        let program = Program { servers: servers.to_vec(), opened, patience };
        let kept = || lock(&held).iter().map(Option::is_some).collect::<Vec<_>>();
        let_go(&program, &held, "");
        assert_eq!(kept(), [true, true]);
        let_go(&program, &held, "c");
        assert_eq!(kept(), [true, true]);
        let_go(&program, &held, "b");
        assert_eq!(kept(), [true, false]);
        assert!(!*lock(&servers[1].taken));
        let_go(&program, &held, "Z");
        assert_eq!(kept(), [false, false]);
    }
}
