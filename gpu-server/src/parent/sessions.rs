//! All sessions, and which of them are one client's.
//!
//! A worker may ask for memory thousands of times in a second, and everybody waits for each answer, which
//! depends on what the session's client holds: so a client's sessions are found without looking at all.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;

use super::session::Session;

/// The daemon's sessions, by their workers' process ids. Whose a session is ([`Limits::owner`]) does not
/// change while it is here.
///
/// [`Limits::owner`]: crate::limits::Limits::owner
#[derive(Default)]
pub(super) struct Sessions {
    by_worker: HashMap<u32, Session>,
    by_owner: HashMap<String, BTreeSet<u32>>,
}

impl Sessions {
    pub(super) fn insert(&mut self, worker: u32, session: Session) {
        self.remove(&worker);
        self.by_owner.entry(session.limits.owner().to_owned()).or_default().insert(worker);
        self.by_worker.insert(worker, session);
    }

    pub(super) fn remove(&mut self, worker: &u32) -> Option<Session> {
        let session = self.by_worker.remove(worker)?;
        if let Some(workers) = self.by_owner.get_mut(session.limits.owner()) {
            workers.remove(worker);
            if workers.is_empty() {
                self.by_owner.remove(session.limits.owner());
            }
        }
        Some(session)
    }

    pub(super) fn get_mut(&mut self, worker: &u32) -> Option<&mut Session> {
        self.by_worker.get_mut(worker)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&u32, &mut Session)> {
        self.by_worker.iter_mut()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.by_worker.values_mut()
    }

    pub(super) fn into_values(self) -> impl Iterator<Item = Session> {
        self.by_worker.into_values()
    }

    /// The sessions of a client, with those under its leases.
    pub(super) fn of(&self, owner: &str) -> impl Iterator<Item = &Session> {
        self.by_owner.get(owner).into_iter().flatten().filter_map(|worker| self.by_worker.get(worker))
    }
}

/// Nobody changes which there are without the index.
impl Deref for Sessions {
    type Target = HashMap<u32, Session>;

    fn deref(&self) -> &HashMap<u32, Session> {
        &self.by_worker
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::parent::queue::tests::session_of_limits;

    #[test]
    fn a_clients_sessions_are_found_as_they_come_and_go() {
        let mut sessions = Sessions::default();
        let of = |sessions: &Sessions, owner: &str| {
            let mut names: Vec<_> = sessions.of(owner).map(|s| s.limits.principal.clone()).collect();
            names.sort();
            names
        };
        let lease = Limits { owner: Some("a".into()), ..Limits::test("a 00000001") };
        for (worker, limits) in [(1, Limits::test("a")), (2, Limits::test("b")), (3, lease)] {
            sessions.insert(worker, session_of_limits(limits));
        }
        assert_eq!(of(&sessions, "a"), ["a", "a 00000001"]);
        // Its worker has ended, and another one has its process id.
        sessions.insert(1, session_of_limits(Limits::test("b")));
        assert_eq!(
            (of(&sessions, "a"), of(&sessions, "b")),
            (vec!["a 00000001".into()], vec!["b".into(); 2])
        );
        assert!(sessions.remove(&7).is_none() && sessions.remove(&3).is_some());
        assert_eq!((of(&sessions, "a"), sessions.len()), (Vec::new(), 2));
        assert_eq!(sessions.by_owner.len(), 1, "nothing is left of a client without sessions");
    }
}
