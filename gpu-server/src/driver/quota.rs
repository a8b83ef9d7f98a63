//! The owner of a session's memory limit.
//!
//! Whatever takes device memory first asks the session's [`Quota`] for a [`Charge`] of as many bytes and keeps the charge together with what it
//! makes. Dropping the charge gives the bytes back, so no code path has to remember to. Every figure that a client or an operator sees comes
//! from here: `cuMemGetInfo`, NVML's memory figures, `rgpuctl status`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use protocol::Status;

/// A limit in bytes, and how many bytes are held against it. Clones share both.
#[derive(Debug, Clone)]
pub struct Quota(Arc<State>);

#[derive(Debug)]
struct State {
    /// What is limited, for the log.
    what: &'static str,
    /// `u64::MAX`: no limit.
    limit: u64,
    held: AtomicU64,
}

impl Quota {
    /// A quota of `limit` bytes of `what`; 0 means no limit.
    pub fn new(what: &'static str, limit: u64) -> Quota {
        let limit = if limit == 0 { u64::MAX } else { limit };
        Quota(Arc::new(State { what, limit, held: AtomicU64::new(0) }))
    }

    /// Charges `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` when the limit leaves less than that. The refusal is logged.
    pub fn charge(&self, bytes: u64) -> Result<Charge, Status> {
        let State { what, limit, held } = &*self.0;
        let more = |held: u64| held.checked_add(bytes).filter(|sum| sum <= limit);
        // The count guards no other memory, so its order with other accesses does not matter.
        match held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Charge { quota: self.clone(), bytes }),
            Err(held) => {
                tracing::info!(bytes, held, limit, "refused: beyond the session's limit of {what}");
                Err(Status::OUT_OF_MEMORY)
            }
        }
    }

    /// Bytes that are charged now.
    pub fn held(&self) -> u64 {
        self.0.held.load(Ordering::Relaxed)
    }

    /// A device's free and total bytes as the session may see them.
    pub fn visible(&self, free: u64, total: u64) -> (u64, u64) {
        (free.min(self.0.limit.saturating_sub(self.held())), total.min(self.0.limit))
    }
}

/// Bytes that are held against a [`Quota`] until this is dropped.
#[derive(Debug)]
pub struct Charge {
    quota: Quota,
    bytes: u64,
}

impl Charge {
    /// Takes `bytes` of this charge, at most all of them, as a charge of its own.
    pub fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Charge { quota: self.quota.clone(), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.0.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Charge(u64),
        Split(usize, u64),
        Drop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            prop_oneof![0u64..600, Just(u64::MAX)].prop_map(Step::Charge),
            (any::<usize>(), 0u64..600).prop_map(|(which, bytes)| Step::Split(which, bytes)),
            any::<usize>().prop_map(Step::Drop),
        ]
    }

    proptest! {
        /// The quota holds what its live charges hold, never more than its limit, and refuses nothing that fits.
        #[test]
        fn a_quota_holds_what_its_charges_hold(limit in 0u64..2000, steps in prop::collection::vec(step(), 1..200)) {
            let quota = Quota::new("test memory", limit);
            let most = if limit == 0 { u64::MAX } else { limit };
            let mut live: Vec<Charge> = Vec::new();
            for step in steps {
                let held: u64 = live.iter().map(|charge| charge.bytes).sum();
                match step {
                    Step::Charge(bytes) => {
                        let charged = quota.charge(bytes);
                        prop_assert_eq!(charged.is_ok(), bytes <= most - held);
                        live.extend(charged);
                    }
                    Step::Split(which, bytes) if !live.is_empty() => {
                        let which = which % live.len();
                        let part = live[which].split(bytes);
                        live.push(part);
                    }
                    Step::Drop(which) if !live.is_empty() => drop(live.swap_remove(which % live.len())),
                    Step::Split(..) | Step::Drop(_) => {}
                }
                let held: u64 = live.iter().map(|charge| charge.bytes).sum();
                prop_assert_eq!(quota.held(), held);
                prop_assert!(held <= most);
                prop_assert_eq!(quota.visible(u64::MAX, u64::MAX), (most - held, most));
            }
            live.clear();
            prop_assert_eq!(quota.held(), 0);
        }
    }

    #[test]
    fn charges_made_at_the_same_time_stay_within_the_limit() {
        let quota = Quota::new("test memory", 100);
        let live: Vec<Vec<Charge>> = std::thread::scope(|scope| {
            let charge_some = || (0..50).filter_map(|_| quota.charge(1).ok()).collect();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(charge_some)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((live.iter().map(Vec::len).sum::<usize>(), quota.held()), (100, 100));
        drop(live);
        assert_eq!(quota.held(), 0);
    }
}
