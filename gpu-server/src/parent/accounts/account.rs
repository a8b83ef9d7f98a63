//! The account of one session.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::limits::{MOST_DEVICES, Resource};
use crate::pages::{Meter, Page, Terms, gate};
use crate::parent::accounts::imports::Imports;
use crate::parent::arbiter::Gate;
use crate::parent::bells::Bell;
use crate::parent::record::Record;

/// How long a session is believed to want what it has asked for. One that waits for room asks a hundred times
/// a second ([`crate::room::AGAIN`]).
const WANTS_FOR: Duration = Duration::from_secs(1);

/// A session's charges, and the pages that it shares with the daemon.
pub(in crate::parent) struct Account {
    pub(in crate::parent) terms: Page<Terms>,
    meter: Page<Meter>,
    /// Granted bytes, and everything else that a successor of this daemon needs.
    pub(in crate::parent) record: Record,
    /// What of that is other sessions' memory.
    pub(in crate::parent) imports: Imports,
    /// Whether its worker asks for each charge of device memory, and so has charged no more than it was
    /// granted.
    pub(in crate::parent) asks: bool,
    /// Whether the next request may be one that the previous daemon has already carried out.
    pub(in crate::parent) may_repeat: bool,
    /// The gate, and how often the session was asked to report its work.
    gate: Gate,
    tells: u32,
    /// Whether there is an order for its memory.
    asked: bool,
    /// Bytes of each device that it has asked for, within its limits, and when.
    wants: BTreeMap<u32, (u64, Instant)>,
    /// Bytes that its process uses on each device, according to NVML.
    used: [AtomicU64; MOST_DEVICES],
}

impl Account {
    /// An empty account, and the descriptors of its pages and of the bell for the worker.
    pub(in crate::parent) fn open(bell: &Bell) -> io::Result<(Account, [OwnedFd; 3])> {
        let ((terms, terms_fd), (meter, meter_fd)) = (Page::new()?, Page::new()?);
        let account = Account::new(terms, meter, Record::new()?, false);
        Ok((account, [terms_fd, meter_fd, bell.share()?]))
    }

    /// The account of a session of the previous daemon, the last of `daemons`. Also the descriptor of the
    /// worker's new terms.
    pub(in crate::parent) fn take_over(
        meter: &OwnedFd,
        record: Record,
        daemons: u32,
    ) -> io::Result<(Account, OwnedFd)> {
        let ((terms, terms_fd), meter) = (Page::<Terms>::new()?, Page::adopt(meter)?);
        terms.daemons.store(daemons, Ordering::Relaxed);
        Ok((Account::new(terms, meter, record, true), terms_fd))
    }

    fn new(terms: Page<Terms>, meter: Page<Meter>, record: Record, may_repeat: bool) -> Account {
        let (imports, wants, gate) = (Imports::default(), BTreeMap::new(), Gate::Open);
        Account {
            terms,
            meter,
            record,
            imports,
            asks: false,
            may_repeat,
            gate,
            tells: 0,
            asked: false,
            wants,
            used: [const { AtomicU64::new(0) }; MOST_DEVICES],
        }
    }

    /// What a successor of this daemon needs.
    pub(in crate::parent) fn record(&self) -> &Record {
        &self.record
    }

    /// Granted bytes of a device, without memory that counts for another session.
    pub(in crate::parent) fn counted(&self, number: u32) -> u64 {
        self.record.granted(Resource::Device(number)).saturating_sub(self.imports.elsewhere(number))
    }

    /// Bytes of a device that count for the session, with what its process uses besides.
    pub(in crate::parent) fn counts(&self, number: u32) -> u64 {
        self.counted(number).saturating_add(self.implicit(number as usize))
    }

    /// Called when a worker's message has been handled: the next one cannot be a repetition.
    pub(in crate::parent) fn heard(&mut self) {
        self.may_repeat = false;
    }

    /// The worker's figures.
    pub(in crate::parent) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Sets the session's gate, and wakes the session if it waits there.
    pub(in crate::parent) fn set_gate(&mut self, gate: Gate) {
        if gate == self.gate {
            return;
        }
        self.tells = self.tells.wrapping_add(u32::from(gate == Gate::Tell));
        self.gate = gate;
        if let Gate::Metered { allowance, .. } = gate {
            self.terms.allowance.store(allowance, Ordering::Relaxed);
        }
        self.show_gate();
    }

    /// Tells the worker whether to look for an order before its next command.
    pub(in crate::parent) fn set_asked(&mut self, asked: bool) {
        if std::mem::replace(&mut self.asked, asked) != asked {
            self.show_gate();
        }
    }

    /// Notes that the session has asked for bytes that its limits allow.
    pub(in crate::parent) fn note_wanted(&mut self, resource: Resource, bytes: u64, now: Instant) {
        let Resource::Device(number) = resource else { return };
        let noted = self.wants.entry(number).or_insert((bytes, now));
        // A smaller piece that it takes meanwhile is not all that it wants.
        if bytes >= noted.0 || now.saturating_duration_since(noted.1) > WANTS_FOR {
            *noted = (bytes, now);
        }
    }

    /// Bytes of a device that the session has asked for just now. `away`: its memory is. Then, or while it
    /// has an order, it cannot ask again.
    pub(in crate::parent) fn wanted(&self, number: u32, away: bool, now: Instant) -> u64 {
        let cannot_ask = self.asked || away;
        let noted = self.wants.get(&number);
        let noted = noted.filter(|(_, at)| cannot_ask || now.saturating_duration_since(*at) <= WANTS_FOR);
        noted.map_or(0, |(bytes, _)| *bytes)
    }

    /// Publishes how often sessions have moved device memory.
    pub(in crate::parent) fn set_moves(&self, moves: u64) {
        self.terms.moves.store(moves, Ordering::Relaxed);
    }

    fn show_gate(&self) {
        let asked = if self.asked { gate::ASKED } else { 0 };
        self.terms.gate.store(word(self.gate, self.tells) | asked, Ordering::Release);
        let at = std::ptr::from_ref(&self.terms.gate);
        // SAFETY: a futex word in a page that stays mapped; the call only wakes its waiters.
        unsafe { libc::syscall(libc::SYS_futex, at, libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Memory that the process uses on a device beyond what the session has charged.
    pub(in crate::parent) fn implicit(&self, number: usize) -> u64 {
        self.terms.implicit.get(number).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Bytes that the session has charged on a device, as far as its worker is believed.
    fn charged(&self, number: usize) -> u64 {
        let said = self.meter.held.get(number).map_or(0, |bytes| bytes.load(Ordering::Relaxed));
        if self.asks { said.min(self.record.granted(Resource::Device(number as u32))) } else { said }
    }

    /// Bytes that the session holds on a device, according to its worker and NVML.
    pub(in crate::parent) fn held(&self, number: usize) -> u64 {
        self.charged(number).saturating_add(self.implicit(number))
    }

    /// Notes how many bytes the session's process uses on a device, according to NVML.
    pub(in crate::parent) fn measured(&self, number: usize, bytes: u64) {
        if let Some(implicit) = self.terms.implicit.get(number) {
            // What it has imported is measured where it counts.
            let other = self.away(number as u32).saturating_add(self.imports.elsewhere(number as u32));
            let charged = self.charged(number).saturating_sub(other);
            implicit.store(bytes.saturating_sub(charged), Ordering::Relaxed);
            self.used[number].store(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes that the session's process uses on a device, as NVML last said.
    pub(in crate::parent) fn used(&self, number: usize) -> u64 {
        self.used.get(number).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }
}

/// The gate as the word that the worker reads. `tells` counts how often the session was asked to report its
/// work.
fn word(decided: Gate, tells: u32) -> u32 {
    let (mode, steps) = match decided {
        Gate::Open => (gate::OPEN, 0),
        Gate::Tell => (gate::TELL, tells),
        Gate::Metered { steps, .. } => (gate::METERED, steps),
        Gate::Closed { steps } => (gate::CLOSED, steps),
    };
    gate::word(mode, steps)
}
