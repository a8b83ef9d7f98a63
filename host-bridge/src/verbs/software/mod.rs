//! libibverbs without a device: queue pairs that are in this process only, for tests and for fuzzing.
//!
//! ```text
//!   Device, Domain, QueuePair, … ─▶ Library ─▶ functions of this module ─▶ Fabric
//!                                                                            ▲
//!                                              a test: send, write, complete ┘   the peer of a queue pair
//! ```
//!
//! After [`install`], [`Library::get`](super::sys::Library::get) gives these functions, so everything above
//! the C library runs as it does with a device, `unsafe` code included. Two queue pairs of this process that
//! are connected to each other exchange messages and writes at once. What a queue pair sends to any other
//! number is kept: a test sees it ([`sent`]), decides what becomes of it ([`complete`]), and sends whatever
//! it likes ([`send`], [`write`]).
//!
//! It checks its callers like a strict device: requests outside registered memory, full queues, and objects
//! that are destroyed while others need them are bugs of rgpu, and end the process. It does not delay or
//! reorder anything, it loses what is sent while it is [silent](silence), and it has one port, of InfiniBand.

mod fabric;
mod functions;

#[cfg(feature = "software-verbs")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};

use self::fabric::fabric;
pub use self::fabric::{Outside, Sent};
use self::functions::LIBRARY;
use super::sys::{self, Library};

static INSTALLED: AtomicBool = AtomicBool::new(false);
#[cfg(feature = "software-verbs")]
static WORDS: AtomicU64 = AtomicU64::new(u64::MAX);
#[cfg(feature = "software-verbs")]
static ENDED: AtomicU64 = AtomicU64::new(0);

/// Puts this module in the place of libibverbs, for the rest of the process.
pub fn install() {
    INSTALLED.store(true, Ordering::Release);
}

pub(super) fn installed() -> Option<&'static Library> {
    INSTALLED.load(Ordering::Acquire).then_some(&LIBRARY)
}

/// A relay's thread ends when it has written so many more words into its ledger, as if its process did:
/// nothing is said to anybody, and its queue pairs and registrations are gone.
#[cfg(feature = "software-verbs")]
pub fn end_process_after(words: u64) {
    WORDS.store(words, Ordering::SeqCst);
}

/// How many have ended so.
#[cfg(feature = "software-verbs")]
pub fn processes_ended() -> u64 {
    ENDED.load(Ordering::SeqCst)
}

/// What a thread ends with.
#[cfg(feature = "software-verbs")]
pub(crate) struct Ended;

/// Counts a word of a ledger.
#[cfg(feature = "software-verbs")]
pub(crate) fn writes_word() {
    let left = |words: u64| words.checked_sub(1).filter(|_| words < u64::MAX);
    if WORDS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left) == Err(0) {
        WORDS.store(u64::MAX, Ordering::SeqCst);
        std::panic::resume_unwind(Box::new(Ended));
    }
}

/// Whether a thread ended in this way.
#[cfg(feature = "software-verbs")]
pub(crate) fn has_ended(why: &(dyn std::any::Any + Send)) -> bool {
    let ended = why.is::<Ended>();
    if ended {
        ENDED.fetch_add(1, Ordering::SeqCst);
    }
    ended
}

/// Sets what becomes of what is sent to peers outside from now on.
pub fn outside(what: Outside) {
    fabric().outside = what;
}

/// Lets the `n`-th call from now on fail for lack of memory, of those that may fail. `None`: none fails.
pub fn fail(n: Option<u32>) {
    fabric().failing = n;
}

/// Whether nothing gets through between two queue pairs of this process. What was sent meanwhile gets through
/// only with what is sent on the same queue pair afterwards, as if the peer's device had asked for it then:
/// these devices repeat nothing by themselves.
pub fn silence(silent: bool) {
    fabric().silent = silent;
}

/// Whether the port is down: nothing gets through, as while it is [silent](silence).
pub fn port_down(down: bool) {
    fabric().is_down = down;
}

/// The port has another local identifier from now on. What is sent to its former one gets lost.
pub fn readdress() {
    let mut fabric = fabric();
    fabric.moved = fabric.moved.wrapping_add(1);
}

/// Whether the port has no address, as when its interface has lost its IP address: nothing gets through.
pub fn unaddress(without: bool) {
    fabric().unaddressed = without;
}

/// How often somebody has looked for its address while it had none.
pub fn looked_for_address() -> u64 {
    fabric().looked
}

/// An event of a queue pair's device (`enum ibv_event_type`), which its owner's context tells of. `QP_FATAL`
/// is 1, `DEVICE_FATAL` is 8.
pub fn event(pair: u32, kind: u32) {
    fabric().happened(pair, kind);
}

/// A queue pair's device sends what is under way once more.
pub fn repeat(pair: u32) {
    fabric().carry(pair);
}

/// Numbers of the queue pairs that there are, in ascending order, but for those that are connected to
/// themselves.
pub fn pairs() -> Vec<u32> {
    let mut pairs = every_pair();
    pairs.retain(|pair| peer(*pair) != Some(*pair));
    pairs
}

/// Numbers of all queue pairs, in ascending order.
pub fn every_pair() -> Vec<u32> {
    let mut pairs: Vec<u32> = fabric().pairs.keys().copied().collect();
    pairs.sort_unstable();
    pairs
}

/// Number of objects of all kinds that were made and not destroyed.
pub fn objects() -> usize {
    let fabric = fabric();
    let contents = fabric.regions.len() + fabric.windows.len();
    let queues = fabric.channels.len() + fabric.queues.len() + fabric.pairs.len();
    fabric.contexts.len() + fabric.domains.len() + contents + queues
}

/// What the windows that are open show: address, length and key, in no order.
pub fn windows() -> Vec<(u64, u64, u32)> {
    let shown = |(key, window): (&u32, &fabric::Shown)| window.shown.map(|(_, at, len)| (at, len, *key));
    fabric().windows.iter().filter_map(shown).collect()
}

/// Closes all windows, as when their owner's process ends and its queue pairs are still there.
pub fn close_windows() {
    fabric().windows.values_mut().for_each(|window| window.shown = None);
}

/// Whether devices that are opened from now on have windows. They do unless told otherwise.
pub fn have_windows(have: bool) {
    fabric().lacks_windows = !have;
}

/// Number of registrations with these rights (`IBV_ACCESS_REMOTE_WRITE` is 2).
pub fn registered_for(access: i32) -> usize {
    fabric().regions.values().filter(|region| region.access & access != 0).count()
}

/// The peer that a queue pair is connected to.
pub fn peer(pair: u32) -> Option<u32> {
    fabric().pairs.get(&pair)?.peer
}

/// The index of a queue pair's partition. The port is in 0xffff and 0x8001.
pub fn partition(pair: u32) -> Option<u16> {
    Some(fabric().pairs.get(&pair)?.partition)
}

/// Number of receives that a queue pair has posted.
pub fn receives(pair: u32) -> usize {
    fabric().pairs.get(&pair).map_or(0, |pair| pair.receives.len())
}

/// Number of requests of a queue pair that have not completed.
pub fn sends(pair: u32) -> usize {
    fabric().pairs.get(&pair).map_or(0, |pair| pair.sends.len())
}

/// Sends a message to a queue pair, as its peer.
///
/// # Errors
/// The status with which the peer's request completes.
pub fn send(to: u32, bytes: &[u8]) -> Result<(), u32> {
    fabric().arrive(to, &Sent { bytes: bytes.to_vec(), write: None })
}

/// Writes with immediate data, as a queue pair's peer.
///
/// # Errors
/// The status with which the peer's request completes.
pub fn write(to: u32, (address, key): (u64, u32), immediate: u32, bytes: &[u8]) -> Result<(), u32> {
    fabric().arrive(to, &Sent { bytes: bytes.to_vec(), write: Some((address, key, immediate)) })
}

/// Whether the peer of a queue pair may write `len` bytes at an address with a key.
pub fn writable(to: u32, place: (u64, u32), len: u64) -> bool {
    let fabric = fabric();
    fabric.pairs.get(&to).is_some_and(|pair| fabric.writable(pair.domain, place, len))
}

/// The `n`-th request of a queue pair that has not completed; 0 is the oldest.
pub fn sent(from: u32, n: usize) -> Option<Sent> {
    let fabric = fabric();
    let pair = fabric.pairs.get(&from)?;
    pair.sends.get(n).map(|request| fabric.gather(pair.domain, request))
}

/// Whether the oldest request of a queue pair does not say when it has completed.
pub fn is_quiet(from: u32) -> bool {
    let fabric = fabric();
    fabric.pairs.get(&from).and_then(|pair| pair.sends.front()).is_some_and(|request| !request.signalled)
}

/// Completes the oldest request of a queue pair. Another status than 0 stops the pair. False: there is none.
pub fn complete(from: u32, status: u32) -> bool {
    fabric().complete(from, status)
}

/// The device gives a queue pair's connection up, and reports nothing before something is posted to the pair
/// or its owner stops it.
pub fn give_up(pair: u32) {
    if let Some(pair) = fabric().pairs.get_mut(&pair) {
        pair.state = sys::number::QPS_ERR;
    }
}

/// Whether queue pairs whose connection was given up refuse what is posted to them. Otherwise they take it,
/// and it completes as flushed.
pub fn refuse_posts(refuse: bool) {
    fabric().refuses = refuse;
}

/// The device gives a queue pair's connection up: everything that is posted completes as flushed.
pub fn stop(pair: u32) {
    fabric().stop(pair);
}
