//! A session's memory limits. Nothing else enforces them.
//!
//! Whatever takes device memory, or page-locked memory of this machine, first gets a [`Charge`] of that size
//! from the session's [`Quota`] and keeps it with what it makes. Dropping the charge returns the bytes, so no
//! code path can forget to. Every figure that a client or operator sees comes from here: `cuMemGetInfo`,
//! `cuDeviceTotalMem`, NVML's memory figures, `rgpuctl status`.
//!
//! Each [`Resource`] has two limits: the session's own, which is checked here, and that of all the
//! principal's sessions together, which the daemon checks. If the principal has one, the daemon is asked for
//! each charge.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use protocol::Status;

use super::store::Way;
use crate::cuda_ipc::Broker;
use crate::limits::{Amounts, Limits, MOST_DEVICES, Resource};
use crate::pages::{Meter, Page, Terms};
use crate::room::{AGAIN, Room, WITHIN};
use crate::worker_protocol::{Process, Token};

/// What a session may hold, and what it holds. Clones share this state.
#[derive(Clone, Default)]
pub struct Quota(Arc<State>);

#[derive(Default)]
struct State {
    /// What is held before the session begins.
    own: Meter,
    session: OnceLock<Session>,
}

/// What a quota has once its session has begun.
struct Session {
    limits: Limits,
    terms: Option<Arc<Page<Terms>>>,
    meter: Option<Arc<Page<Meter>>>,
    broker: Option<Arc<Broker>>,
    /// Set if others can make room. The daemon is then asked for each charge of device memory.
    room: Option<Arc<Room>>,
}

impl Amounts {
    /// Limit of a resource in bytes; `u64::MAX`: unlimited.
    pub fn of(&self, resource: Resource) -> u64 {
        let limit = match resource {
            Resource::Device(_) => self.device_memory,
            Resource::Pinned => self.pinned_memory,
        };
        if limit == 0 { u64::MAX } else { limit }
    }
}

impl Meter {
    /// Where the held bytes of a resource are counted.
    fn of(&self, resource: Resource) -> &AtomicU64 {
        match resource {
            Resource::Device(number) => figure(&self.held, number),
            Resource::Pinned => &self.pinned,
        }
    }
}

/// A device's figure. Devices beyond the highest counted number share one.
fn figure(figures: &[AtomicU64; MOST_DEVICES], number: u32) -> &AtomicU64 {
    &figures[(number as usize).min(MOST_DEVICES - 1)]
}

impl Quota {
    /// The session begins, with these limits; until then there are none. `terms` and `meter` are shared with
    /// the daemon, and `broker` connects to it. `room`: set if others can make room on a device.
    pub fn begin(
        &self,
        limits: Limits,
        terms: Arc<Page<Terms>>,
        meter: Arc<Page<Meter>>,
        broker: Arc<Broker>,
        room: Option<Arc<Room>>,
    ) {
        self.set(Session { limits, terms: Some(terms), meter: Some(meter), broker: Some(broker), room });
    }

    fn set(&self, session: Session) {
        if let Some(meter) = &session.meter {
            for (to, from) in meter.held.iter().zip(&self.0.own.held) {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            meter.pinned.store(self.0.own.pinned.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        // A worker has one session.
        let _ = self.0.session.set(session);
    }

    /// A quota for a session without a daemon, for tests.
    #[cfg(test)]
    pub fn of_session(device_memory: u64) -> Quota {
        let quota = Quota::default();
        let session = Amounts { device_memory, pinned_memory: device_memory };
        let limits = Limits { session, ..Limits::default() };
        quota.set(Session { limits, terms: None, meter: None, broker: None, room: None });
        quota
    }

    fn meter(&self) -> &Meter {
        let shared = self.0.session.get().and_then(|session| session.meter.as_deref()).map(|page| &**page);
        shared.unwrap_or(&self.0.own)
    }

    /// One of a device's figures in the page shared with the daemon.
    fn told(&self, resource: Resource, of: impl Fn(&Terms) -> &[AtomicU64; MOST_DEVICES]) -> u64 {
        let terms = self.0.session.get().and_then(|session| session.terms.as_deref()).map(|page| &**page);
        match (terms, resource) {
            (Some(terms), Resource::Device(number)) => {
                of(terms).get(number as usize).map_or(0, |figure| figure.load(Ordering::Relaxed))
            }
            _ => 0,
        }
    }

    /// The limits of the session and of its principal.
    fn limits(&self, resource: Resource) -> [u64; 2] {
        let limits = self.0.session.get().map(|session| &session.limits);
        limits.map_or([u64::MAX; 2], |limits| [limits.session.of(resource), limits.total.of(resource)])
    }

    /// Charges `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if it would exceed a limit. The refusal is logged.
    pub fn charge(&self, resource: Resource, bytes: u64) -> Result<Charge, Status> {
        self.charge_by(resource, bytes, None, |take| self.when_there_is_room(resource, bytes, take))
    }

    /// The same for memory of another session, which shares it under this token. As long as it counts for
    /// that session, it takes nothing of what the principal's sessions may have together.
    ///
    /// # Errors
    /// As for [`charge`](Quota::charge).
    pub fn charge_import(&self, resource: Resource, bytes: u64, token: Token) -> Result<Charge, Status> {
        self.charge_by(resource, bytes, Some(token), |take| self.when_there_is_room(resource, bytes, take))
    }

    /// The same without waiting for room on a device.
    ///
    /// # Errors
    /// As for [`charge`](Quota::charge), and `NOT_READY` while others make room: the dispatcher then waits
    /// and executes the command again.
    pub fn charge_now(&self, resource: Resource, bytes: u64) -> Result<Charge, Status> {
        self.charge_by(resource, bytes, None, |take| self.if_there_is_room(resource, bytes, take))
    }

    fn charge_by(
        &self,
        resource: Resource,
        bytes: u64,
        shared: Option<Token>,
        wait: impl FnOnce(&mut dyn FnMut() -> Result<(), Status>) -> Result<(), Status>,
    ) -> Result<Charge, Status> {
        let [session, total] = self.limits(resource);
        let most = session.saturating_sub(self.told(resource, |terms| &terms.implicit));
        let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= most);
        // No other memory depends on this count, so relaxed ordering suffices.
        let counted = self.meter().of(resource).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        if let Err(held) = counted {
            tracing::info!(bytes, held, limit = session, "refused: beyond the session's limit of {resource}");
            return Err(Status::OUT_OF_MEMORY);
        }
        let mut charge = Charge { quota: self.clone(), resource, bytes, shared, asked: None };
        let broker = self.0.session.get().and_then(|session| session.broker.as_ref());
        let asks = total != u64::MAX || self.room().is_some() && matches!(resource, Resource::Device(_));
        if let Some(broker) = broker.filter(|_| asks && bytes > 0) {
            wait(&mut || broker.charge(resource, bytes, shared)).inspect_err(|status| {
                if *status != Status::NOT_READY {
                    let limit = (total != u64::MAX).then_some(total);
                    tracing::info!(
                        bytes,
                        limit,
                        "refused: no room, or beyond the principal's limit of {resource}"
                    );
                }
            })?;
            charge.asked = Some(Arc::clone(broker));
        }
        Ok(charge)
    }

    fn room(&self) -> Option<&Room> {
        self.0.session.get().and_then(|session| session.room.as_deref())
    }

    /// Calls `take`. If it returns `NOT_READY` and others can make room on the device, notes that `bytes` are
    /// needed there.
    ///
    /// # Errors
    /// Those of `take`; `OUT_OF_MEMORY` instead of `NOT_READY` if nobody can make room.
    pub fn if_there_is_room<T>(
        &self,
        resource: Resource,
        bytes: u64,
        take: impl FnOnce() -> Result<T, Status>,
    ) -> Result<T, Status> {
        take().map_err(|status| match (status, self.room(), resource) {
            (Status::NOT_READY, Some(room), Resource::Device(number)) => {
                room.need(number, bytes);
                status
            }
            (Status::NOT_READY, ..) => Status::OUT_OF_MEMORY,
            _ => status,
        })
    }

    /// Calls `take` until it returns something other than `NOT_READY`, while others make room for `bytes`.
    ///
    /// # Errors
    /// Those of `take`, and `OUT_OF_MEMORY` if there was no room for too long.
    pub fn when_there_is_room<T>(
        &self,
        resource: Resource,
        bytes: u64,
        mut take: impl FnMut() -> Result<T, Status>,
    ) -> Result<T, Status> {
        let mut taken = self.if_there_is_room(resource, bytes, &mut take);
        let (Err(Status::NOT_READY), Some(room)) = (&taken, self.room()) else { return taken };
        let until = Instant::now() + WITHIN;
        while matches!(taken, Err(Status::NOT_READY)) {
            if Instant::now() >= until {
                taken = Err(Status::OUT_OF_MEMORY);
                break;
            }
            std::thread::sleep(AGAIN);
            taken = self.if_there_is_room(resource, bytes, &mut take);
        }
        room.end();
        taken
    }

    /// Whether others can make room on a device.
    pub fn is_shared(&self) -> bool {
        self.room().is_some()
    }

    /// Charges a mirror of `bytes` of a client's page-locked memory, for kernels on the device with this
    /// number: once as device memory, which it stands in for, and once as page-locked memory of this machine,
    /// which it uses.
    pub fn charge_mirror(&self, number: u32, bytes: u64) -> Result<MirrorCharge, Status> {
        let [device, pinned] = [Resource::Device(number), Resource::Pinned];
        Ok(MirrorCharge([self.charge(device, bytes)?, self.charge(pinned, bytes)?]))
    }

    /// A piece of a device's memory can now be moved to this machine's memory.
    pub fn more_movable(&self, number: u32, bytes: u64) {
        figure(&self.meter().memory.movable, number).fetch_add(bytes, Ordering::Relaxed);
    }

    /// Such a piece was freed, or can no longer be moved.
    pub fn less_movable(&self, number: u32, bytes: u64) {
        figure(&self.meter().memory.movable, number).fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A piece of a device's memory was moved off it, or back.
    pub fn moved(&self, way: Way, number: u32, bytes: u64) {
        let away = figure(&self.meter().memory.away, number);
        match way {
            Way::Out => away.fetch_add(bytes, Ordering::Release),
            Way::In => away.fetch_sub(bytes, Ordering::Release),
        };
    }

    /// The PID namespace of the client's program.
    pub fn set_namespace(&self, namespace: u64) {
        self.meter().namespace.store(namespace, Ordering::Relaxed);
    }

    /// The client's programs that use the device with this number, as processes in this PID namespace see
    /// them.
    ///
    /// # Errors
    /// `DEVICE_UNAVAILABLE` if the daemon is gone.
    pub fn processes(&self, number: u32, namespace: u64) -> Result<Vec<Process>, Status> {
        let broker = self.0.session.get().and_then(|session| session.broker.as_ref());
        broker.map_or(Ok(Vec::new()), |broker| broker.processes(number, namespace))
    }

    /// Bytes currently charged.
    pub fn held(&self, resource: Resource) -> u64 {
        self.meter().of(resource).load(Ordering::Relaxed)
    }

    /// Bytes currently charged on all devices.
    pub fn held_on_devices(&self) -> u64 {
        self.meter().held.iter().map(|held| held.load(Ordering::Relaxed)).sum()
    }

    /// Free and total bytes of the device with this number, as the session may see them.
    pub fn visible(&self, number: u32, free: u64, total: u64) -> (u64, u64) {
        let device = Resource::Device(number);
        let [session, principal] = self.limits(device);
        let held = self.held(device).saturating_add(self.told(device, |terms| &terms.implicit));
        let left = session.saturating_sub(held);
        let left_for_all = principal.saturating_sub(self.told(device, |terms| &terms.total_held));
        (free.min(left).min(left_for_all), total.min(session).min(principal))
    }
}

/// Bytes that are held against a [`Quota`] until this is dropped.
pub struct Charge {
    quota: Quota,
    resource: Resource,
    bytes: u64,
    /// The token of imported memory.
    shared: Option<Token>,
    /// Set if the daemon counts it, too.
    asked: Option<Arc<Broker>>,
}

impl Charge {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds the bytes of another charge of the same quota and resource.
    pub fn join(&mut self, mut other: Charge) {
        self.bytes += std::mem::take(&mut other.bytes);
        self.asked = self.asked.take().or(other.asked.take());
    }

    /// Splits off a charge of `bytes`, or of everything if it has less.
    pub fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        let (quota, asked) = (self.quota.clone(), self.asked.clone());
        Charge { quota, resource: self.resource, bytes, shared: self.shared, asked }
    }
}

/// The charges of a mirror, or of several.
pub struct MirrorCharge([Charge; 2]);

impl MirrorCharge {
    /// Splits off `bytes` of them, like [`Charge::split`].
    pub fn split(&mut self, bytes: u64) -> MirrorCharge {
        MirrorCharge(self.0.each_mut().map(|charge| charge.split(bytes)))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.meter().of(self.resource).fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some(broker) = self.asked.as_ref().filter(|_| self.bytes > 0) {
            broker.discharge(self.resource, self.bytes, self.shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEVICE: Resource = Resource::Device(2);

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
        /// The quota holds what its live charges hold, never more than its limit, and refuses nothing that
        /// fits.
        #[test]
        fn a_quota_holds_what_its_charges_hold(limit in 0u64..2000, steps in prop::collection::vec(step(), 1..200)) {
            let quota = Quota::of_session(limit);
            let most = if limit == 0 { u64::MAX } else { limit };
            let mut live: Vec<Charge> = Vec::new();
            for step in steps {
                let held: u64 = live.iter().map(|charge| charge.bytes).sum();
                match step {
                    Step::Charge(bytes) => {
                        let charged = quota.charge(DEVICE, bytes);
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
                prop_assert_eq!(quota.held(DEVICE), held);
                prop_assert!(held <= most);
                prop_assert_eq!(quota.visible(2, u64::MAX, u64::MAX), (most - held, most));
            }
            live.clear();
            prop_assert_eq!(quota.held(DEVICE), 0);
        }
    }

    #[test]
    fn charges_made_at_the_same_time_stay_within_the_limit() {
        let quota = Quota::of_session(100);
        let live: Vec<Vec<Charge>> = std::thread::scope(|scope| {
            let charge_some = || (0..50).filter_map(|_| quota.charge(DEVICE, 1).ok()).collect();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(charge_some)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((live.iter().map(Vec::len).sum::<usize>(), quota.held(DEVICE)), (100, 100));
        drop(live);
        assert_eq!(quota.held(DEVICE), 0);
    }

    #[test]
    fn each_device_and_page_locked_memory_have_a_limit_of_their_own() {
        let quota = Quota::of_session(100);
        let _live = [Resource::Device(0), Resource::Device(1), Resource::Pinned]
            .map(|resource| quota.charge(resource, 80).unwrap());
        assert!(quota.charge(Resource::Device(1), 30).is_err());
        assert_eq!((quota.held_on_devices(), quota.held(Resource::Pinned)), (160, 80));
        assert_eq!(quota.visible(1, 1000, 2000), (20, 100));
    }

    #[test]
    fn memory_that_the_daemon_reports_as_used_is_not_free() {
        let (terms, terms_fd) = Page::<Terms>::new().unwrap();
        let (meter, meter_fd) = Page::<Meter>::new().unwrap();
        let quota = Quota::default();
        let before = quota.charge(DEVICE, 5).unwrap();
        let limits = Limits {
            session: Amounts { device_memory: 100, pinned_memory: 0 },
            total: Amounts { device_memory: 150, pinned_memory: 0 },
            ..Limits::default()
        };
        let (terms_there, meter_there) =
            (Arc::new(Page::open(&terms_fd).unwrap()), Arc::new(Page::open(&meter_fd).unwrap()));
        quota.set(Session {
            limits,
            terms: Some(terms_there),
            meter: Some(meter_there),
            broker: None,
            room: None,
        });
        let _charge = quota.charge(DEVICE, 20).unwrap();
        assert_eq!(meter.held[2].load(Ordering::Relaxed), 25);
        terms.implicit[2].store(30, Ordering::Relaxed);
        terms.total_held[2].store(55, Ordering::Relaxed);
        assert_eq!(quota.visible(2, 1000, 1000), (45, 100));
        assert!(quota.charge(DEVICE, 46).is_err() && quota.charge(DEVICE, 45).is_ok());
        terms.total_held[2].store(140, Ordering::Relaxed);
        assert_eq!(quota.visible(2, 1000, 1000), (10, 100));
        drop(before);
        assert_eq!(meter.held[2].load(Ordering::Relaxed), 20);
    }
}
