//! The tickets for direct connections that nobody has used yet.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use identity::Secret;
use protocol::ops::direct::MAX_DIRECTS;

use crate::cuda_ipc::random_token;
use crate::parent::workers::Worker;
use crate::worker_protocol::Token;

/// How long a ticket is valid.
const VALID: Duration = Duration::from_secs(30);
/// Unused tickets.
#[derive(Default)]
pub(in crate::parent) struct Tickets(HashMap<Token, Ticket>);

struct Ticket {
    worker: Arc<Worker>,
    secret: Secret,
    until: Instant,
}

impl Tickets {
    /// Makes one for a connection to a worker. `None`: the worker has its maximum.
    pub(in crate::parent) fn add(
        &mut self,
        worker: &Arc<Worker>,
        now: Instant,
    ) -> io::Result<Option<(Token, [u8; 32])>> {
        self.0.retain(|_, ticket| ticket.until > now);
        let own = self.0.values().filter(|ticket| ticket.worker.pid() == worker.pid());
        if own.count() >= MAX_DIRECTS {
            return Ok(None);
        }
        let (token, secret) = (random_token()?, Secret::random()?);
        let bytes = secret.0;
        self.0.insert(token, Ticket { worker: Arc::clone(worker), secret, until: now + VALID });
        Ok(Some((token, bytes)))
    }

    /// The worker of a ticket.
    pub(in crate::parent) fn find(&self, token: &Token, now: Instant) -> Option<&Arc<Worker>> {
        self.0.get(token).filter(|ticket| ticket.until > now).map(|ticket| &ticket.worker)
    }

    /// Consumes a ticket. Without its secret, it is neither consumed nor revealed.
    pub(in crate::parent) fn take(
        &mut self,
        token: &Token,
        secret: &[u8; 32],
        now: Instant,
    ) -> Option<Arc<Worker>> {
        self.0.get(token).filter(|ticket| ticket.until > now && ticket.secret.matches(secret))?;
        self.0.remove(token).map(|ticket| ticket.worker)
    }

    /// Removes the tickets of a worker that has ended.
    pub(in crate::parent) fn remove_all_of(&mut self, pid: u32) {
        self.0.retain(|_, ticket| ticket.worker.pid() != pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_valid_once_for_a_while_and_with_its_secret() {
        let (worker, now) = (Worker::fake(7), Instant::now());
        let mut tickets = Tickets::default();
        let (token, secret) = tickets.add(&worker, now).unwrap().unwrap();
        let mut wrong = secret;
        wrong[31] ^= 1;
        assert!(
            tickets.take(&token, &wrong, now).is_none() && tickets.take(&[0; 16], &secret, now).is_none()
        );
        assert!(tickets.find(&token, now).is_some() && tickets.find(&token, now + VALID).is_none());
        assert!(tickets.take(&token, &secret, now + VALID).is_none(), "it has expired");
        assert!(tickets.take(&token, &secret, now).is_some_and(|found| found.pid() == 7));
        assert!(tickets.take(&token, &secret, now).is_none() && tickets.find(&token, now).is_none());
    }

    #[test]
    fn a_worker_has_limited_tickets_and_none_after_its_end() {
        let (worker, other, now) = (Worker::fake(7), Worker::fake(8), Instant::now());
        let mut tickets = Tickets::default();
        let mut all: Vec<Token> = Vec::new();
        while let Some((token, _)) = tickets.add(&worker, now).unwrap() {
            all.push(token);
        }
        assert_eq!(all.len(), MAX_DIRECTS);
        let (others, _) = tickets.add(&other, now).unwrap().unwrap();
        // Expired tickets make room.
        assert!(tickets.add(&worker, now + VALID).unwrap().is_some());
        assert!(tickets.find(&others, now).is_none());
        tickets.remove_all_of(7);
        assert!(tickets.0.is_empty());
    }
}
