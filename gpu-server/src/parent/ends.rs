//! Sessions that the daemon ends, and why recent sessions ended.

use super::control::Refused;
use super::leases::table::LeaseId;
use super::queue;
use super::refusals::Reason;
use super::state::{Server, State};
use super::trust::Principal;
use crate::worker_protocol::{Kind, Token};

/// Ends all sessions, including those waiting for a worker, for which `reason` returns one, and tells their
/// clients. `lost`: whether their clients did not ask for it. Returns their number.
pub(super) fn end_sessions(
    server: &Server,
    lost: bool,
    reason: impl Fn(&Principal, Option<LeaseId>) -> Option<String>,
) -> usize {
    let mut guard = server.lock();
    let state = &mut *guard;
    let mut count = 0;
    for kind in Kind::ALL {
        let queue = &mut state.pool_mut(kind).queue;
        for parked in std::mem::take(queue) {
            match reason(&parked.principal, parked.lease) {
                Some(why) => {
                    count += 1;
                    server.refuse_parked(&parked, &Refused(Reason::NotAllowed, why));
                }
                None => queue.push_back(parked),
            }
        }
    }
    let left_queue = count > 0;
    let mut running = state.running();
    let mut over = Vec::new();
    for (pid, session) in state.sessions.iter_mut() {
        if session.ended {
            continue;
        }
        let Some(reason) = reason(&session.principal, session.lease) else { continue };
        count += 1;
        (session.ended, session.lost) = (true, lost);
        // One that has not begun is refused.
        state.sessions_lost += u64::from(lost && session.begun);
        running -= usize::from(session.begun);
        state.drain.iter_mut().for_each(|drain| drain.note(session, Some(&reason), running));
        let (client, program) = (&session.client, &session.program);
        let principal = &session.principal.name;
        if lost {
            tracing::warn!(worker = pid, client, program, principal, "session lost: {reason}");
        } else {
            tracing::info!(worker = pid, client, program, principal, "session ends: {reason}");
        }
        // The worker sends nothing more. Its own connection ends with it.
        state.workers.get(pid).inspect(|managed| managed.worker.kill());
        // A client that was not welcomed is refused instead.
        session.control.iter().filter(|_| session.begun).for_each(|control| control.bye(&reason));
        over.push((*pid, session.token, reason));
    }
    for (pid, token, reason) in over {
        state.save(pid);
        state.remember_end(token, reason);
    }
    drop(guard);
    if left_queue {
        // Devices may have been kept for those who left.
        queue::serve_all(server);
    }
    server.changed.notify_all();
    server.nudge.nudge();
    count
}

/// Maximum number of ended sessions whose reasons the daemon remembers.
const MOST_REMEMBERED: usize = 1024;

impl State {
    /// Remembers why a session ended, for a client that wants to resume it.
    pub(super) fn remember_end(&mut self, token: Token, why: String) {
        if self.ended.len() == MOST_REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((token, why));
    }

    /// Why a session ended, if the daemon remembers it.
    pub(super) fn end_of(&self, token: &Token) -> Option<&str> {
        self.ended.iter().rev().find(|(of, _)| of == token).map(|(_, why)| why.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::tests::{server, session_of_limits};
    use super::*;
    use crate::limits::Limits;

    #[test]
    fn a_session_that_the_daemon_ends_is_lost_unless_its_client_asked_for_that() {
        let server = server(&[]);
        for lost in [true, false] {
            for (worker, begun) in [(1, true), (2, false)] {
                let mut session = session_of_limits(Limits::default());
                session.begun = begun;
                server.lock().sessions.insert(worker, session);
            }
            assert_eq!(end_sessions(&server, lost, |_, _| Some("by a test".into())), 2);
            let state = server.lock();
            assert_eq!((state.sessions[&1].lost, state.sessions_lost), (lost, 1), "counted once");
        }
    }
}
