//! From one keeper to the next: how a keeper hands over to another program, and what it leaves besides its
//! connections.
//!
//! ```text
//!  serve ──▶ Kept: a VMM's connection, what it negotiated, what its device process stored ──▶ handover::Store
//!                                                                      │ crash: the service manager restarts the keeper
//!  upgrade ── SIGUSR2, rgpuctl upgrade ── device processes end, exec ──┤
//!                                                                      ▼
//!                                               take_over: another device process for each VMM
//! ```
//!
//! Device processes don't outlive their keeper. A VMM notices this as little as when only its device process
//! is replaced: the next one needs the same information, which only has to outlive the keeper, too. So an
//! upgrade replaces the keeper and device processes at once.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use handover::{Inherited, Store, Text};
use serde::{Deserialize, Serialize};

use super::process::Processes;
use super::status::Own;

/// The format of what keepers save for their successors, and device processes for theirs
/// ([`vm::recovery`](crate::vm), the ledgers of their sessions). It changes whenever a successor would not
/// understand a change of any of that. Since 2, a keeper's records may be followed by steps, and what is
/// stored of a channel may name its server.
pub const FORMAT: u32 = 2;
/// The oldest format that this program understands.
const OLDEST: u32 = 1;

/// How long an upgrade waits until no VMM's message is being answered and no device process is being started
/// or ended.
const QUIET_WITHIN: Duration = Duration::from_secs(20);
/// Interval between checks for that.
const CHECK_EVERY: Duration = Duration::from_millis(5);
/// The name of the keeper's own record, and its maximum size in bytes.
const KEEPER: &str = "keeper";
const ROOM: u64 = 4096;

/// The keeper's own record.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Saved {
    format: u32,
    /// How many keepers there were before this one.
    before: u64,
    /// Device processes that replaced others.
    restarts: u64,
}

/// What becomes of this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Course {
    /// It serves.
    Serves,
    /// An upgrade has begun, and has ended nothing yet.
    Upgrades,
    /// An upgrade ends the device processes, and executes the next program. Signals stay pending for that
    /// one: it has device processes again, which tell servers that their sessions are over.
    Replaced,
    /// The daemon is shutting down.
    Ends,
}

/// The transition from this keeper to the next one.
#[derive(Debug)]
pub struct Succession {
    /// What is kept for the next keeper.
    pub store: Arc<Store>,
    record: Text,
    before: u64,
    /// The file that this program was started from. It may have been replaced since.
    program: PathBuf,
    /// Held for reading while the keeper does something during which it must not be replaced.
    quiet: RwLock<()>,
    course: Mutex<Course>,
    /// Also held for each VMM and user of the previous keeper that no device process serves yet.
    unserved: Arc<()>,
}

/// Whether this program takes over what a keeper with this [`FORMAT`] leaves.
pub fn takes_over(format: u32) -> anyhow::Result<()> {
    anyhow::ensure!(
        (OLDEST..=FORMAT).contains(&format),
        "this version cannot go on with the running daemon's sessions (they are of format {format}, and this version understands {OLDEST} to {FORMAT}): end the programs that use a GPU, and restart the daemon"
    );
    Ok(())
}

impl Succession {
    /// Continues from the previous keeper, if there was one, including its counters.
    pub fn new(inherited: &mut Inherited, own: &Own) -> io::Result<Succession> {
        let store = Arc::new(Store::new());
        let read = |text: &Text| serde_json::from_slice::<Saved>(&text.read().ok()?).ok();
        let kept = inherited.remove(KEEPER).map(|file| Text::open(file, ROOM));
        let found = kept.and_then(|text| Some((read(&text)?, text)));
        let (before, record) = match found {
            Some((saved, text)) => {
                own.restarts.store(saved.restarts, Ordering::Relaxed);
                (saved.before + 1, text)
            }
            None => {
                store.forget(KEEPER);
                (0, Text::new(ROOM)?)
            }
        };
        let program = std::env::current_exe()?;
        let succession = Succession {
            store,
            record,
            before,
            program,
            quiet: RwLock::new(()),
            course: Mutex::new(Course::Serves),
            unserved: Arc::default(),
        };
        succession.save(own);
        succession.store.keep(KEEPER, &succession.record)?;
        Ok(succession)
    }

    /// How many keepers preceded this one without a shutdown in between.
    pub fn keepers_before(&self) -> u64 {
        self.before
    }

    /// Saves the counters.
    pub fn save(&self, own: &Own) {
        let restarts = own.restarts.load(Ordering::Relaxed);
        let saved = Saved { format: FORMAT, before: self.before, restarts };
        let written = serde_json::to_vec(&saved).map_err(io::Error::from);
        if let Err(e) = written.and_then(|text| self.record.write(&text)) {
            tracing::warn!("cannot save the counters for another keeper: {e}");
        }
    }

    /// While the guard exists, this keeper is not replaced. If it is being replaced, this waits until that
    /// has failed.
    pub fn stays(&self) -> RwLockReadGuard<'_, ()> {
        self.quiet.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// What becomes of this program, which is decided under this lock.
    pub fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for a VMM or user of the previous keeper until a device process serves it, or none will.
    pub fn unserved(&self) -> Arc<()> {
        self.unserved.clone()
    }

    /// Whether the previous keeper's VMMs and users are served again.
    pub fn has_taken_over(&self) -> bool {
        Arc::strong_count(&self.unserved) == 1
    }

    /// Goes on with an upgrade, unless there is another one, or the daemon is shutting down.
    fn turn(&self, from: Course, to: Course) -> Result<(), String> {
        let mut course = self.course();
        if *course != from {
            let ends = *course == Course::Ends;
            let why =
                if ends { "the daemon is shutting down" } else { "the daemon is being upgraded already" };
            return Err(why.into());
        }
        *course = to;
        Ok(())
    }

    fn is_quiet(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        let deadline = Instant::now() + QUIET_WITHIN;
        loop {
            if let Ok(guard) = self.quiet.try_write() {
                return Some(guard);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(CHECK_EVERY);
        }
    }

    /// Executes the installed program, which takes over everything. Calls `say` right before, with the number
    /// of sessions. Returns only if that is impossible; this keeper then continues. The main thread must
    /// listen to the device processes meanwhile.
    pub fn upgrade(
        &self,
        processes: &Processes,
        own: &Own,
        say: impl FnOnce(&serde_json::Value),
    ) -> Result<Infallible, String> {
        self.turn(Course::Serves, Course::Upgrades)?;
        self.store.reloading();
        let Err(why) = self.make_way(processes, own, say);
        let mut course = self.course();
        if *course != Course::Ends {
            self.store.ready();
            *course = Course::Serves;
        }
        Err(why)
    }

    fn make_way(
        &self,
        processes: &Processes,
        own: &Own,
        say: impl FnOnce(&serde_json::Value),
    ) -> Result<Infallible, String> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        handover::can_take_over(&self.program, &arguments, FORMAT)?;
        let Some(_quiet) = self.is_quiet() else {
            return Err(format!(
                "for {} s, device processes were being started or ended or VMMs' requests handled; try again",
                QUIET_WITHIN.as_secs()
            ));
        };
        let sessions = processes.sessions();
        self.turn(Course::Upgrades, Course::Replaced)?;
        tracing::info!("{} takes over {sessions} sessions", self.program.display());
        say(
            &serde_json::json!({ "upgrading": { "daemon": "vhost-rgpu", "sessions": sessions, "version": env!("CARGO_PKG_VERSION") } }),
        );
        processes.end_for_others();
        self.save(own);
        self.store.wait_until_sent();
        let failed = self.store.exec(&self.program, &arguments);
        Err(format!("cannot execute {}: {failed}", self.program.display()))
    }
}
