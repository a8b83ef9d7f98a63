//! Contexts: each thread's stack of current contexts, how far a context's work is known to be done, and its
//! deferred error.
//!
//! A context is never freed: it takes a few hundred bytes, and at most
//! [`MAX_CONTEXTS`](client::channel::MAX_CONTEXTS) exist at a time. A stale reference therefore finds a
//! destroyed context, never freed memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::abi::result::Result;
use crate::process::copies_ahead::{CopiesAhead, Piece, Wait};
use crate::process::driver::{Device, Driver, Server, device, driver};
use crate::process::fences;
use crate::process::green::{self, Green};
use crate::process::host_calls;
use crate::process::ids::{self, unique_id};
use crate::process::limits::Limits;
use crate::process::stream::Stream;
use client::handle::{ContextId, StreamId};
use client::handles::Slab;
use client::ops::context::{ContextCreate, ContextSynchronize, PrimarySetFlags};
use client::seq::{LastSeq, Seq};
use client::session::{Pending, Session, Slot};
use client::thread::Lasting;
use client::wire::Wire;
use client::{Status, lock};

/// A context.
pub(crate) struct Context {
    pub id: ContextId,
    /// The server of its device. Everything in the context belongs to that server's session.
    pub server: &'static Server,
    /// Its device's ordinal.
    pub device: u32,
    pub handle: usize,
    pub unique: u64,
    pub flags: AtomicU32,
    primary: bool,
    alive: AtomicBool,
    users: Mutex<Users>,
    /// Notified when a thread no longer changes whether it is alive.
    changed: Condvar,
    /// Calls to `cuCtxAttach` minus calls to `cuCtxDetach`.
    pub attached: Mutex<u32>,
    legacy: std::sync::OnceLock<Arc<Stream>>,
    /// The legacy default stream, and so every stream it waits for, is known to be done up to this `seq`.
    legacy_synced: LastSeq,
    /// `seq` of the last record of work in this context.
    last_work: LastSeq,
    /// As the streams' own, for all that wait for the legacy default stream.
    pub last_holding: LastSeq,
    pub last_unheld: LastSeq,
    /// The same as `last_work`, for streams that don't wait for the legacy default stream.
    last_free_work: LastSeq,
    /// The records that are appended to such streams.
    announced_free: Announced,
    /// Those that are appended to the others, if the process has several servers.
    announced: Announced,
    /// All work up to this `seq` is known to be done.
    synced: LastSeq,
    /// What is fetched together with waits for the legacy default stream.
    copies_ahead: CopiesAhead,
    /// Of the threads that wait for the context while few reply slots are free.
    turn: Mutex<()>,
    pub cache_config: AtomicU32,
    pub limits: Limits,
    /// Why its kernels cannot use some memory that a launch's parameters seem to name. It is logged when one
    /// of them has failed: parameters may only look like addresses.
    unreachable: Mutex<Option<String>>,
    /// The storage that `cuGetExportTable` offers other libraries: key → value and destructor.
    pub storage: Mutex<HashMap<usize, Stored>>,
}

/// The users of a primary context.
#[derive(Default)]
struct Users {
    /// Calls to `cuDevicePrimaryCtxRetain` minus calls to `cuDevicePrimaryCtxRelease`, and green contexts.
    count: u32,
    /// The green contexts among them, which keep the program from releasing and resetting the context.
    green: u32,
    /// The thread that empties the context. Others wait until that is done. This thread itself may retain and
    /// release it meanwhile, in functions of the program that are called then.
    changing: Option<libc::pthread_t>,
}

/// The time in which this thread empties a primary context. Afterwards the context is alive if it has users.
pub(crate) struct Change<'c>(&'c Context);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut users = lock(&self.0.users);
        users.changing = None;
        self.0.set_alive(users.count != 0);
        drop(users);
        self.0.changed.notify_all();
    }
}

/// Announces a record that is about to be appended. See [`Context::appending`].
pub(crate) struct Appending<'c>(Option<&'c Announced>);

impl Drop for Appending<'_> {
    fn drop(&mut self) {
        if let Some(announced) = self.0 {
            announced.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// How many records were announced, and how many of them are open: they may be in the ring, but not yet
/// counted as work.
#[derive(Default)]
pub(crate) struct Announced(AtomicU64);

impl Announced {
    /// Bits for the open ones, of which a thread has two at most.
    const OPEN: u32 = 20;

    fn begin(&self) -> Appending<'_> {
        self.0.fetch_add((1 << Self::OPEN) + 1, Ordering::AcqRel);
        Appending(Some(self))
    }

    /// How many there have been, if none is open: then all of them are counted as work.
    pub fn settled(&self) -> Option<u64> {
        let all = self.0.load(Ordering::Acquire);
        all.is_multiple_of(1 << Self::OPEN).then_some(all >> Self::OPEN)
    }

    /// How many there have been.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire) >> Self::OPEN
    }
}

/// A value in a context's storage for other libraries.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    pub value: usize,
    pub destructor: Option<unsafe extern "C" fn(usize, *mut c_void, *mut c_void)>,
}

static CONTEXTS: Slab<&'static Context> = Slab::new(1);

thread_local! {
    static STACK: Lasting<RefCell<Vec<Named>>> = const { Lasting::new(RefCell::new(Vec::new())) };
}

/// What a context handle names: a context, or a green context in it.
#[derive(Clone)]
struct Named {
    pub context: &'static Context,
    pub green: Option<Arc<Green>>,
}

impl Named {
    pub fn of(handle: usize) -> Option<Named> {
        if let Some(context) = CONTEXTS.get(handle) {
            return Some(Named { context: *context, green: None });
        }
        let green = green::as_context(handle)?;
        Some(Named { context: green.context, green: Some(green) })
    }

    fn is_alive(&self) -> bool {
        self.context.is_alive() && self.green.as_ref().is_none_or(|green| green.is_alive())
    }

    pub fn handle(&self) -> usize {
        self.green.as_ref().map_or(self.context.handle, |green| green.handle())
    }
}

/// The flags that `cuCtxCreate` accepts: scheduling, map host, local memory, coredump, user coredump, sync
/// memops.
const KNOWN_FLAGS: u32 = 0xff;

impl Context {
    /// Creates the client's side of a context.
    pub fn new(
        id: ContextId,
        server: &'static Server,
        device: u32,
        flags: u32,
        primary: bool,
    ) -> &'static Context {
        let mut made = None;
        let handle = CONTEXTS.insert_with(|handle| {
            let context: &'static Context = Box::leak(Box::new(Context {
                id,
                server,
                device,
                handle,
                unique: unique_id(),
                flags: flags.into(),
                primary,
                alive: (!primary).into(),
                users: Mutex::default(),
                changed: Condvar::new(),
                attached: Mutex::new(0),
                legacy: std::sync::OnceLock::new(),
                legacy_synced: LastSeq::new(),
                last_work: LastSeq::new(),
                last_holding: LastSeq::new(),
                last_unheld: LastSeq::new(),
                last_free_work: LastSeq::new(),
                announced_free: Announced::default(),
                announced: Announced::default(),
                synced: LastSeq::new(),
                copies_ahead: CopiesAhead::default(),
                turn: Mutex::new(()),
                cache_config: AtomicU32::new(0),
                limits: Limits::default(),
                unreachable: Mutex::default(),
                storage: Mutex::default(),
            }));
            made = Some(context);
            Arc::new(context)
        });
        let context = made.filter(|_| handle.is_some());
        // The table has room for a million contexts; the server allows 64 at a time.
        let context = context.unwrap_or_else(|| std::process::abort());
        context.legacy.get_or_init(|| Stream::legacy(context));
        context
    }

    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// The session that it belongs to.
    #[inline]
    pub fn session(&self) -> &'static Session {
        self.server.session
    }

    /// The legacy default stream.
    pub fn legacy(&'static self) -> &'static Arc<Stream> {
        self.legacy.get_or_init(|| Stream::legacy(self))
    }

    /// Announces a record of work in this context before it is appended. Drop the announcement after calling
    /// [`worked`](Self::worked).
    #[inline]
    pub fn appending(&self, free: bool) -> Appending<'_> {
        // A program with one server never asks for the others.
        if free || self.server.several { self.announced(free).begin() } else { Appending(None) }
    }

    /// Announces a copy to the host that is not counted as work, until its bytes are here: nothing may begin
    /// meanwhile that comes behind it. `free` as above.
    pub fn reading(&self, free: bool) -> Appending<'_> {
        if self.server.several { self.announced(free).begin() } else { Appending(None) }
    }

    /// The announced records of streams that don't wait for the legacy default stream, or of the others.
    pub fn announced(&self, free: bool) -> &Announced {
        if free { &self.announced_free } else { &self.announced }
    }

    /// Notes that record `seq` is work in this context. `free`: on a stream that doesn't wait for the legacy
    /// default stream.
    #[inline]
    pub fn worked(&self, seq: Seq, free: bool) {
        self.last_work.raise(seq);
        if free {
            self.last_free_work.raise(seq);
        }
    }

    /// `seq` of the last record of work that the legacy default stream waits for.
    pub fn last_work(&self) -> Option<Seq> {
        self.last_work.get()
    }

    /// Notes that all work up to `seq` is done.
    pub fn is_synced(&self, seq: Seq) {
        self.synced.raise(seq);
    }

    /// Notes that the legacy default stream, and so everything it waits for, is done up to `seq`.
    ///
    /// All work of the context is then done up to `seq` if the work on the other streams is. Every record
    /// before `seq` was announced before `seq` was appended. So if no announcement is open now,
    /// `last_free_work`, read after that check, covers all of them.
    pub fn legacy_is_synced(&self, seq: Seq) {
        self.legacy_synced.raise(seq);
        if self.announced_free.settled().is_some() && self.synced.has_reached_all_of(&self.last_free_work) {
            self.is_synced(seq);
        }
    }

    /// Whether record `seq` of one of its streams is known to be done. `free`: the legacy default stream
    /// doesn't wait for that stream.
    #[inline]
    pub fn has_synced(&self, seq: Seq, free: bool) -> bool {
        self.synced.has_reached(seq) || !free && self.legacy_synced.has_reached(seq)
    }

    /// Whether the program was told that record `seq`, of a stream that the legacy default stream waits for,
    /// is done.
    pub fn legacy_has_promised(&self, seq: Seq) -> bool {
        self.legacy.get().is_some_and(|legacy| legacy.promise.covers(seq))
    }

    /// The last work on streams that don't wait for the legacy default stream, if all of it is known to be
    /// done, and if nothing outside the context changes its memory.
    fn finished_beside(&self) -> Option<Option<Seq>> {
        let none_open = self.announced_free.settled().is_some();
        let last = self.last_free_work.get();
        let done = none_open && last.is_none_or(|last| self.synced.has_reached(last));
        (done && !fences::shares() && is_only(self)).then_some(last)
    }

    /// Submits a wait for everything that the legacy default stream waits for, together with the small copies
    /// that are likely to follow it.
    pub fn submit_wait<R: for<'r> Wire<'r>>(
        &'static self,
        wait: Wait,
        submit: impl FnOnce() -> Result<Pending<'static, R>>,
    ) -> Result<Pending<'static, R>> {
        let stream = StreamId(self.id.0);
        self.copies_ahead.submit(self.session(), stream, wait, || self.finished_beside(), submit)
    }

    /// The bytes of such a copy.
    pub fn take_copy(&self, piece: Piece) -> Option<Vec<u8>> {
        self.copies_ahead.take(self.session(), piece)
    }

    /// Whether work may be under way.
    pub fn is_busy(&self) -> bool {
        !self.synced.has_reached_all_of(&self.last_work)
    }

    /// Whether its server is lost while the process still has others. Nothing waits for such a context's
    /// work.
    pub fn is_given_up(&self) -> bool {
        driver().is_ok_and(|driver| driver.servers.len() > 1) && self.session().check().is_err()
    }

    /// A reply slot for a wait for all work of the context. If so many threads wait already that other calls
    /// would find none, they take turns. `None` if another thread's wait has done for this one, too.
    fn slot_to_wait(&'static self) -> Result<Option<(Slot<'static>, Option<MutexGuard<'static, ()>>)>> {
        let due = self.last_work.get();
        if let Some(slot) = self.session().slot_to_wait()? {
            return Ok(Some((slot, None)));
        }
        let turn = lock(&self.turn);
        if due.is_none_or(|due| self.synced.has_reached(due)) {
            return Ok(None);
        }
        Ok(Some((self.session().slot()?, Some(turn))))
    }

    /// Waits for all work of the context, without a round trip if none can be pending.
    /// `memory::stream_ordered::synchronize` releases what was freed in stream order.
    pub fn synchronize(&'static self) -> Result {
        driver()?;
        self.deferred()?;
        if !self.is_busy() {
            self.session().show_output();
            self.session().check()?;
            return self.deferred();
        }
        let Some((slot, _turn)) = self.slot_to_wait()? else {
            self.session().show_output();
            return self.deferred();
        };
        let wait = || slot.submit(&ContextSynchronize { context: self.id });
        let pending = self.submit_wait(Wait::Work, wait)?;
        let seq = pending.seq();
        let result = pending.wait().map(|_| ());
        if result.is_ok() {
            self.is_synced(seq);
        }
        self.settle(result)
    }

    /// Waits for all work of the context, and leaves its errors to the calls that report them. Returns false
    /// if the work cannot be known to be done.
    pub fn quiesce(&'static self) -> bool {
        if !self.is_busy() {
            return true;
        }
        let (slot, _turn) = match self.slot_to_wait() {
            Ok(Some(slot)) => slot,
            Ok(None) => return true,
            Err(_) => return false,
        };
        let Ok(pending) = slot.submit(&ContextSynchronize { context: self.id }) else { return false };
        let seq = pending.seq();
        let done = pending.wait().is_ok();
        if done {
            self.is_synced(seq);
        }
        done
    }

    /// Returns the deferred error of earlier work, if there is one, and clears it unless it is sticky.
    #[inline]
    pub fn deferred(&self) -> Result {
        match self.session().progress().error(self.id).and_then(|word| word.get()) {
            None => Ok(()),
            Some(_) => self.take_deferred(),
        }
    }

    /// The same for a call that frees or destroys something, which nobody does twice. An error that does not
    /// last does not keep it from that: the call returns it in the end.
    ///
    /// # Errors
    /// The error of earlier work, if it lasts.
    pub fn deferred_to_end(&self) -> Result<Result> {
        let deferred = self.deferred();
        if self.has_failed() { Err(deferred.err().unwrap_or(Status::UNKNOWN)) } else { Ok(deferred) }
    }

    /// Whether earlier work has left an error that lasts.
    pub fn has_failed(&self) -> bool {
        let error = self.session().progress().error(self.id).and_then(|word| word.get());
        error.is_some_and(|(_, sticky, _)| sticky)
    }

    /// Notes that work of this context has failed in this process, such as a copy from another server. The
    /// next call that reports errors returns it, once.
    pub fn fail(&self, status: Status) {
        if let Some(word) = self.session().progress().error(self.id) {
            word.set(status, false, 0);
        }
    }

    /// Notes why its kernels cannot use some memory.
    pub fn cannot_reach(&self, why: String) {
        *lock(&self.unreachable) = Some(why);
    }

    /// Logs why its kernels could not use some memory, once, if that may be the cause of an error.
    fn explain(&self, status: Status) {
        if status == Status::ILLEGAL_ADDRESS
            && let Some(why) = lock(&self.unreachable).take()
        {
            client::log::warn(format_args!("{why}"));
        }
    }

    /// Whether earlier work has failed, as far as is known.
    pub fn has_error(&self) -> bool {
        self.session().progress().error(self.id).is_some_and(|word| word.get().is_some())
    }

    #[cold]
    fn take_deferred(&self) -> Result {
        static TAKING: Mutex<()> = Mutex::new(());
        let _taking = lock(&TAKING);
        let Some(word) = self.session().progress().error(self.id) else { return Ok(()) };
        let Some((status, sticky, seq)) = word.get() else { return Ok(()) };
        if !sticky {
            word.clear();
        }
        self.explain(status);
        client::log::debug(format_args!("context {}: deferred {status} of record {seq}", self.id.0));
        Err(status)
    }

    /// The result of a synchronizing call. If the server returned the deferred error itself, it is not
    /// reported again.
    pub fn settle(&self, result: Result) -> Result {
        let Err(status) = result else { return self.deferred() };
        self.explain(status);
        let word = self.session().progress().error(self.id);
        if let Some(word) = word
            && let Some((found, false, _)) = word.get()
            && found == status
        {
            word.clear();
        }
        Err(status)
    }

    /// Adds a user of a primary context.
    pub fn retain(&self) {
        let mut users = self.users();
        users.count += 1;
        let first = !self.alive.swap(true, Ordering::AcqRel);
        drop(users);
        if first {
            client::activity::context_made(self.handle);
            come_behind_others(self);
        }
    }

    /// Adds a green context as a user of a primary context.
    pub fn retain_for_green(&self) {
        self.retain();
        self.users().green += 1;
    }

    /// Removes a user of a primary context. If it was the last, the caller empties the context.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` without users, `NOT_PERMITTED` if only green contexts are left.
    pub fn release_one(&self) -> Result<Option<Change<'_>>> {
        let users = self.users();
        match users.count {
            0 => Err(Status::INVALID_CONTEXT),
            left if left == users.green => Err(Status::NOT_PERMITTED),
            _ => Ok(self.without_one(users)),
        }
    }

    /// The same for a green context that is destroyed.
    pub fn release_green(&self) -> Option<Change<'_>> {
        let mut users = self.users();
        users.green = users.green.saturating_sub(1);
        self.without_one(users)
    }

    fn without_one(&self, mut users: MutexGuard<'_, Users>) -> Option<Change<'_>> {
        users.count = users.count.saturating_sub(1);
        if users.count == 0 { self.change(users) } else { None }
    }

    /// Begins to empty a primary context that is alive, and tells whether it has users.
    ///
    /// # Errors
    /// `NOT_PERMITTED` while there are green contexts.
    pub fn reset(&self) -> Result<Option<(Change<'_>, bool)>> {
        let users = self.users();
        if users.green != 0 {
            return Err(Status::NOT_PERMITTED);
        }
        let stays = users.count != 0;
        let change = if self.is_alive() { self.change(users) } else { None };
        Ok(change.map(|change| (change, stays)))
    }

    /// The users of a primary context that no other thread is changing.
    fn users(&self) -> MutexGuard<'_, Users> {
        // SAFETY: a call that only returns the thread's number.
        let this = unsafe { libc::pthread_self() };
        let changing = |users: &mut Users| users.changing.is_some_and(|thread| thread != this);
        let users = self.changed.wait_while(lock(&self.users), changing);
        users.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Begins a change, unless this thread is in one.
    fn change(&self, mut users: MutexGuard<'_, Users>) -> Option<Change<'_>> {
        if users.changing.is_some() {
            return None;
        }
        // SAFETY: a call that only returns the thread's number.
        users.changing = Some(unsafe { libc::pthread_self() });
        Some(Change(self))
    }

    /// Whether it is its device's primary context.
    pub fn is_primary(&self) -> bool {
        self.primary
    }

    /// Marks the context as usable or destroyed.
    pub fn set_alive(&self, alive: bool) {
        self.alive.store(alive, Ordering::Release);
    }

    pub fn set_flags(&self, flags: u32) -> Result {
        if !are_flags(flags) {
            return Err(Status::INVALID_VALUE);
        }
        if self.primary {
            let device = device(self.device as i32)?.number;
            self.session().call(&PrimarySetFlags { device, flags })?;
        }
        self.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
}

/// Waits for all work of all contexts. Returns false if some of it cannot be known to be done.
pub(crate) fn quiesce_all() -> bool {
    busy().fold(true, |all, context| all & context.quiesce())
}

/// The contexts in which work may be under way.
pub(crate) fn busy() -> impl Iterator<Item = &'static Context> {
    let all = CONTEXTS.all().into_iter().map(|context| *context);
    all.filter(|context| context.is_alive() && context.is_busy() && !context.is_given_up())
}

/// Whether memory that was freed in the order of a stream, behind this mark, is used no more: memory of a
/// server, or of the host (`None`). A
/// stream of a lost server never gets there, and does nothing more with the memory. But what it would have
/// waited for may still be under way on the memory's own server.
pub(crate) fn has_freed(stream: &Stream, mark: Seq, home: Option<&Server>) -> bool {
    if stream.session().check().is_ok() {
        return stream.has_passed(mark);
    }
    // A stream that was destroyed since counts as done, and has not got there either.
    stream.word_has_passed(mark) || busy_with(home).next().is_none()
}

/// Waits until a stream has freed memory, as [`has_freed`] says.
pub(crate) fn wait_until_freed(stream: &Stream, mark: Seq, home: Option<&Server>) {
    let session = stream.session();
    if session.check().and_then(|()| session.wait_progress(|| stream.has_passed(mark))).is_err() {
        busy_with(home).for_each(|context| _ = context.quiesce());
    }
}

/// The contexts that may be using memory of a server, or of the host.
fn busy_with(home: Option<&Server>) -> impl Iterator<Item = &'static Context> {
    busy().filter(move |context| home.is_none_or(|home| std::ptr::eq(context.server, home)))
}

/// Called when a context is created. Orders its work behind everything on its server that the program was
/// told is done. (From then on, [fences](crate::process::fences) do that among the contexts of a server.) It
/// waits for nothing on other servers, whose memory only copies between servers reach.
fn come_behind_others(new: &Context) {
    fence(Ordering::SeqCst);
    if alive_of(new.server).any(|other| !std::ptr::eq(other, new)) {
        fences::second_context(new.server);
    }
    for other in busy().filter(|other| std::ptr::eq(other.server, new.server)) {
        other.quiesce();
    }
}

/// Whether no other context is alive. What a context created later does comes behind what this thread has put
/// on its streams before: a context of the same server waits for that, and copies between servers do.
pub(crate) fn is_only(context: &Context) -> bool {
    fence(Ordering::SeqCst);
    CONTEXTS.all().into_iter().all(|other| std::ptr::eq(*other, context) || !other.is_alive())
}

/// The contexts of a server that are alive.
pub(crate) fn alive_of(server: &Server) -> impl Iterator<Item = &'static Context> {
    let all = CONTEXTS.all().into_iter().map(|context| *context);
    all.filter(move |context| std::ptr::eq(context.server, server) && context.is_alive())
}

/// Every context of a device, including its primary one even if unused.
pub(crate) fn of_device(device: u32) -> impl Iterator<Item = &'static Context> {
    CONTEXTS.all().into_iter().map(|context| *context).filter(move |context| context.device == device)
}

/// Whether work may be under way in any context.
pub(crate) fn any_busy() -> bool {
    busy().next().is_some()
}

/// The calling thread's current context.
///
/// # Errors
/// `INVALID_CONTEXT` if there is none, `CONTEXT_IS_DESTROYED` if it was destroyed.
#[inline]
pub(crate) fn current() -> Result<&'static Context> {
    let top = Lasting::with(&STACK, |stack| stack.borrow().last().map(|top| (top.context, top.is_alive())));
    match top.flatten() {
        None => driver().and(Err(Status::INVALID_CONTEXT)),
        Some((context, true)) => Ok(context),
        Some(_) => driver().and(Err(Status::CONTEXT_IS_DESTROYED)),
    }
}

/// The calling thread's current context, which may also be a primary context that nobody retains.
///
/// # Errors
/// As [`current`].
pub(crate) fn current_or_inactive() -> Result<&'static Context> {
    let plain = |top: &Named| top.green.is_none().then_some(top.context);
    let top = Lasting::with(&STACK, |stack| stack.borrow().last().and_then(plain)).flatten();
    match top.filter(|context| context.is_primary()) {
        Some(context) => driver().map(|_| context),
        None => current(),
    }
}

/// The handle of the calling thread's current context, or 0.
pub(crate) fn current_handle() -> usize {
    Lasting::with(&STACK, |stack| stack.borrow().last().map_or(0, Named::handle)).unwrap_or(0)
}

/// The calling thread's current green context.
pub(crate) fn current_green() -> Option<Arc<Green>> {
    Lasting::with(&STACK, |stack| stack.borrow().last().and_then(|top| top.green.clone())).flatten()
}

/// The driver and the current context, after checking that the session is alive and earlier work left no
/// error: what nearly every call needs.
#[inline]
pub(crate) fn ready() -> Result<(&'static Driver, &'static Context)> {
    let (driver, context) = usable()?;
    context.deferred()?;
    Ok((driver, context))
}

/// The same for a call that frees or destroys something, with the error that it
/// [returns in the end](Context::deferred_to_end).
pub(crate) fn ready_to_end() -> Result<(&'static Driver, &'static Context, Result)> {
    let (driver, context) = usable()?;
    Ok((driver, context, context.deferred_to_end()?))
}

/// The driver and the current context, after checking that the session is alive.
#[inline]
fn usable() -> Result<(&'static Driver, &'static Context)> {
    let driver = driver()?;
    host_calls::forbid()?;
    let context = current()?;
    context.session().check()?;
    Ok((driver, context))
}

/// The context that a handle names. NULL names the current one.
pub(crate) fn of(handle: usize) -> Result<&'static Context> {
    driver()?;
    if handle == 0 {
        return current();
    }
    Named::of(handle).map(|named| named.context).ok_or(Status::INVALID_CONTEXT)
}

/// The context that a handle names, and the green context if it names one. NULL names the current one.
pub(crate) fn and_green_of(handle: usize) -> Result<(&'static Context, Option<Arc<Green>>)> {
    if handle == 0 {
        return Ok((current()?, current_green()));
    }
    Named::of(handle).map(|named| (named.context, named.green)).ok_or(Status::INVALID_CONTEXT)
}

/// Makes a context the calling thread's only one, for the host function that it is about to call.
pub(crate) fn enter(context: &'static Context) {
    let _ = Lasting::with(&STACK, |stack| {
        let mut stack = stack.borrow_mut();
        stack.clear();
        stack.push(Named { context, green: None });
    });
}

/// Pushes a context on the calling thread's stack.
///
/// # Errors
/// `DEINITIALIZED` in a thread whose locals are gone, which can have no current context.
pub(crate) fn push(context: &'static Context) -> Result {
    push_named(Named { context, green: None })
}

/// The same by handle.
pub(crate) fn push_handle(handle: usize) -> Result {
    push_named(Named::of(handle).ok_or(Status::INVALID_CONTEXT)?)
}

fn push_named(context: Named) -> Result {
    Lasting::with(&STACK, |stack| stack.borrow_mut().push(context)).ok_or(Status::DEINITIALIZED)
}

/// Replaces the calling thread's current context. NULL removes it.
///
/// # Errors
/// As [`push`].
pub(crate) fn set_current(handle: usize) -> Result {
    let context = match handle {
        0 => None,
        handle => Some(Named::of(handle).ok_or(Status::INVALID_CONTEXT)?),
    };
    let is_none = context.is_none();
    let done = Lasting::with(&STACK, |stack| {
        let mut stack = stack.borrow_mut();
        stack.pop();
        stack.extend(context);
    });
    if is_none { Ok(()) } else { done.ok_or(Status::DEINITIALIZED) }
}

/// Pops the calling thread's current context and returns its handle.
pub(crate) fn pop() -> Option<usize> {
    Lasting::with(&STACK, |stack| stack.borrow_mut().pop()).flatten().map(|top| top.handle())
}

/// Makes a context on a device.
pub(crate) fn make(device: &Device, flags: u32) -> Result<&'static Context> {
    if !are_flags(flags) {
        return Err(Status::INVALID_VALUE);
    }
    let id = ContextId(ids::CONTEXTS.take().ok_or(Status::OUT_OF_MEMORY)?);
    let create = ContextCreate { context: id, device: device.number, flags };
    if let Err(status) = device.server.session.call(&create) {
        ids::CONTEXTS.give_back(id.0);
        return Err(status);
    }
    let context = Context::new(id, device.server, device.ordinal, flags, false);
    come_behind_others(context);
    Ok(context)
}

/// Invalidates the handle of a context made by the program, and marks the context as destroyed.
///
/// # Errors
/// `INVALID_CONTEXT` for a primary context, and for an invalid handle.
pub(crate) fn take(handle: usize) -> Result<&'static Context> {
    let unknown = if handle == 0 { Status::INVALID_VALUE } else { Status::INVALID_CONTEXT };
    let found = *CONTEXTS.get(handle).ok_or(unknown)?;
    if found.primary {
        return Err(Status::INVALID_CONTEXT);
    }
    // Nobody knows of the work of a context that is not alive.
    found.quiesce();
    // If two threads destroy it, only one finds it.
    let context = *CONTEXTS.remove(handle).ok_or(Status::INVALID_CONTEXT)?;
    context.set_alive(false);
    Ok(context)
}

/// Pops a destroyed context off the calling thread's stack if it is current.
pub(crate) fn leave(context: &'static Context) {
    let _ = Lasting::with(&STACK, |stack| {
        let mut stack = stack.borrow_mut();
        if stack.last().is_some_and(|top| std::ptr::eq(top.context, context)) {
            stack.pop();
        }
    });
}

fn are_flags(flags: u32) -> bool {
    flags & !KNOWN_FLAGS == 0 && flags & 7 != 3 && flags & 7 <= 4
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "context {}", self.id.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seq(number: u64) -> Seq {
        Seq::for_tests(0, number)
    }

    #[test]
    fn a_synchronized_legacy_stream_does_not_hide_work_that_another_thread_is_appending() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        // A thread appends record 10 on a non-blocking stream. Before it notes that, another synchronizes the
        // legacy default stream with record 11.
        let appending = context.appending(true);
        context.legacy_is_synced(seq(11));
        context.worked(seq(10), true);
        drop(appending);
        assert!(context.is_busy(), "record 10 may still run");
        context.is_synced(seq(12));
        assert!(!context.is_busy());
    }

    #[test]
    fn green_contexts_keep_the_program_from_ending_their_primary_context() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        assert_eq!(context.release_one().err(), Some(Status::INVALID_CONTEXT));
        context.retain();
        context.retain_for_green();
        assert_eq!(context.reset().err(), Some(Status::NOT_PERMITTED));
        assert!(context.release_one().unwrap().is_none());
        assert_eq!(context.release_one().err(), Some(Status::NOT_PERMITTED));
        assert!(context.is_alive());
        context.retain();
        assert!(context.release_green().is_none(), "the program uses it");
        assert!(context.reset().unwrap().is_some_and(|(_, stays)| stays));
        context.retain_for_green();
        assert!(context.release_one().unwrap().is_none());
        assert!(context.release_green().is_some(), "the last one ends it, although it is a green one");
    }

    #[test]
    fn what_a_lost_servers_stream_has_freed_is_used_until_its_own_server_is_idle() {
        let [home, lost] = [0, 1].map(|n| Context::new(ContextId(n), Server::unused(), n, 0, false));
        let is_freed = || has_freed(lost.legacy(), seq(20), Some(home.server));
        home.worked(seq(10), false);
        assert!(!is_freed());
        lost.server.lose();
        assert!(!is_freed(), "record 10 may still run");
        lost.legacy().finished.store(true, Ordering::Release);
        assert!(!is_freed(), "the stream's end changes nothing");
        home.is_synced(seq(10));
        assert!(is_freed());
    }

    #[test]
    fn a_synchronized_legacy_stream_covers_all_work_when_no_other_is_open() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        let appending = context.appending(false);
        context.worked(seq(10), false);
        drop(appending);
        context.legacy_is_synced(seq(11));
        assert!(!context.is_busy());
    }
}
