//! Contexts: which one a thread uses, what is in one, and its deferred error.
//!
//! Contexts are never freed: a few hundred bytes each, at most [`MAX_CONTEXTS`] of them at a time. So whoever still holds one finds it destroyed, not gone.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::abi::types::CtxCreateParams;
use crate::api::devices::attr;
use crate::api::green_contexts;
use crate::api::green_contexts::Green;
use crate::code::{library, module};
use crate::graph::instance;
use crate::memory::managed::shared_blocks;
use crate::memory::{address, array, pinned, texture};
use crate::process::copy_fences::Fences;
use crate::process::driver::{Driver, driver, unique_id};
use crate::process::limits::Limits;
use crate::process::stream::Stream;
use crate::process::{capture, driver, stream};
use crate::streams::event;
use crate::work::host_function;
use client::channel::{MAX_CONTEXTS, MAX_DEVICES};
use client::handle::ContextId;
use client::handles::Slab;
use client::ops::context::{
    ContextCreate, ContextDestroy, ContextSynchronize, PrimaryReset, PrimarySetFlags,
};
use client::thread::Lasting;
use client::{Status, lock, session};

/// A context.
pub(crate) struct Context {
    pub id: ContextId,
    pub device: u32,
    pub handle: usize,
    pub unique: u64,
    pub flags: AtomicU32,
    primary: bool,
    alive: AtomicBool,
    retained: Mutex<u32>,
    /// `cuCtxAttach`, less `cuCtxDetach`.
    attached: Mutex<u32>,
    legacy: std::sync::OnceLock<Arc<Stream>>,
    /// The legacy default stream, and so every stream that it waits for, is known to be done up to this `seq`.
    legacy_synced: AtomicU64,
    /// `seq` of the last record of work in this context.
    last_work: AtomicU64,
    /// The same, of work on streams that do not wait for the legacy default stream.
    last_free_work: AtomicU64,
    /// Records on such streams that are being appended: they may be in the ring and not yet be counted in `last_free_work`.
    appending_free: AtomicU64,
    /// All work up to this `seq` is known to be done.
    synced: AtomicU64,
    /// The copies that streams beside theirs come behind.
    pub fences: Fences,
    cache_config: AtomicU32,
    pub limits: Limits,
    /// `cuGetExportTable`'s storage for other libraries: key → value and destructor.
    pub storage: Mutex<HashMap<usize, Stored>>,
}

/// An announcement of [`Context::appending`].
pub(crate) struct Appending<'c> {
    context: &'c Context,
    free: bool,
}

impl Drop for Appending<'_> {
    fn drop(&mut self) {
        if self.free {
            self.context.appending_free.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// A value in a context's storage for other libraries.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    pub value: usize,
    pub destructor: Option<unsafe extern "C" fn(usize, *mut c_void, *mut c_void)>,
}

static CONTEXTS: Slab<&'static Context> = Slab::new(1);

/// Ids of made contexts that are free.
static IDS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

static IDS_FRESH: AtomicU32 = AtomicU32::new(MAX_DEVICES);

thread_local! {
    static STACK: Lasting<RefCell<Vec<Named>>> = const { Lasting::new(RefCell::new(Vec::new())) };
}

/// What the handle of a context names: a context, or a green one in it.
#[derive(Clone)]
struct Named {
    context: &'static Context,
    green: Option<Arc<Green>>,
}

impl Named {
    fn of(handle: usize) -> Option<Named> {
        if let Some(context) = CONTEXTS.get(handle) {
            return Some(Named { context: *context, green: None });
        }
        let green = green_contexts::as_context(handle)?;
        Some(Named { context: green.context, green: Some(green) })
    }

    fn is_alive(&self) -> bool {
        self.context.is_alive() && self.green.as_ref().is_none_or(|green| green.is_alive())
    }

    fn handle(&self) -> usize {
        self.green.as_ref().map_or(self.context.handle, |green| green.handle())
    }
}

/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`.
const EXEC_AFFINITY_SM_COUNT: u32 = 0;

/// `CUexecAffinityParam`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExecAffinityParam {
    kind: u32,
    processors: u32,
}

/// Flags that `cuCtxCreate` knows: scheduling, map host, local memory, coredump, user coredump, sync memops.
const KNOWN_FLAGS: u32 = 0xff;

impl Context {
    /// A context that the server knows, or is about to know.
    pub fn new(id: ContextId, device: u32, flags: u32, primary: bool) -> &'static Context {
        let mut made = None;
        let handle = CONTEXTS.insert_with(|handle| {
            let context: &'static Context = Box::leak(Box::new(Context {
                id,
                device,
                handle,
                unique: unique_id(),
                flags: flags.into(),
                primary,
                alive: (!primary).into(),
                retained: Mutex::new(0),
                attached: Mutex::new(0),
                legacy: std::sync::OnceLock::new(),
                legacy_synced: AtomicU64::new(0),
                last_work: AtomicU64::new(0),
                last_free_work: AtomicU64::new(0),
                appending_free: AtomicU64::new(0),
                synced: AtomicU64::new(0),
                fences: Fences::new(),
                cache_config: AtomicU32::new(0),
                limits: Limits::default(),
                storage: Mutex::default(),
            }));
            made = Some(context);
            Arc::new(context)
        });
        let context = made.filter(|_| handle.is_some());
        // A million contexts are not to be had: the server's limit is 64 at a time, and places are used again.
        let context = context.unwrap_or_else(|| std::process::abort());
        context.legacy.get_or_init(|| Stream::legacy(context));
        context
    }

    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// The legacy default stream.
    pub fn legacy(&'static self) -> &'static Arc<Stream> {
        self.legacy.get_or_init(|| Stream::legacy(self))
    }

    /// Announces a record of work in this context, before it is appended. The announcement is dropped after [`worked`](Self::worked).
    #[inline]
    pub fn appending(&self, free: bool) -> Appending<'_> {
        if free {
            self.appending_free.fetch_add(1, Ordering::AcqRel);
        }
        Appending { context: self, free }
    }

    /// Notes that record `seq` is work in this context.
    #[inline]
    pub fn worked(&self, seq: u64, free: bool) {
        self.last_work.fetch_max(seq, Ordering::AcqRel);
        if free {
            self.last_free_work.fetch_max(seq, Ordering::AcqRel);
        }
    }

    /// `seq` of the last record of work that the legacy default stream waits for.
    pub fn last_work(&self) -> u64 {
        self.last_work.load(Ordering::Acquire)
    }

    /// Notes that all work up to `seq` is done.
    pub fn is_synced(&self, seq: u64) {
        self.synced.fetch_max(seq, Ordering::AcqRel);
    }

    /// Notes that the legacy default stream, and so everything that it waits for, is done up to `seq`.
    ///
    /// All work of the context is done up to `seq` if the work on other streams is. A record before `seq` was announced before `seq` was appended. So if no announcement
    /// is open now, `last_free_work`, which is read after that, covers every such record.
    pub fn legacy_is_synced(&self, seq: u64) {
        self.legacy_synced.fetch_max(seq, Ordering::AcqRel);
        if self.appending_free.load(Ordering::Acquire) == 0
            && self.last_free_work.load(Ordering::Acquire) <= self.synced.load(Ordering::Acquire)
        {
            self.is_synced(seq);
        }
    }

    /// Whether record `seq` of one of its streams is known to be done; `free`: of a stream that the legacy default stream does not wait for.
    #[inline]
    pub fn has_synced(&self, seq: u64, free: bool) -> bool {
        self.synced.load(Ordering::Acquire) >= seq
            || !free && self.legacy_synced.load(Ordering::Acquire) >= seq
    }

    /// Whether the legacy default stream has promised that record `seq` of a stream that it waits for is done.
    pub fn legacy_has_promised(&self, seq: u64) -> bool {
        self.legacy.get().is_some_and(|legacy| legacy.promise.covers(seq))
    }

    /// Whether work may be under way.
    pub fn is_busy(&self) -> bool {
        self.last_work.load(Ordering::Acquire) > self.synced.load(Ordering::Acquire)
    }

    /// Waits for all work of the context. No round trip when none may be under way.
    pub fn synchronize(&'static self) -> Result {
        let driver = driver()?;
        self.deferred(driver)?;
        if !self.is_busy() {
            driver.session.show_output();
            driver.session.check()?;
            return self.deferred(driver);
        }
        let pending = driver.session.submit(&ContextSynchronize { context: self.id })?;
        let seq = pending.seq();
        let result = pending.wait().map(|_| ());
        if result.is_ok() {
            self.is_synced(seq);
        }
        let result = self.settle(driver, result);
        stream::reap(driver);
        address::collect(driver);
        result
    }

    /// Waits for all work of the context; what it comes to is left for the calls that ask. False: it cannot be known to be done.
    pub fn quiesce(&self, driver: &Driver) -> bool {
        if !self.is_busy() {
            return true;
        }
        let Ok(pending) = driver.session.submit(&ContextSynchronize { context: self.id }) else {
            return false;
        };
        let seq = pending.seq();
        let done = pending.wait().is_ok();
        if done {
            self.is_synced(seq);
        }
        done
    }

    /// The deferred error of earlier work, if there is one: taken away unless it is sticky.
    #[inline]
    pub fn deferred(&self, driver: &Driver) -> Result {
        match driver.session.progress().error(self.id).and_then(|word| word.get()) {
            None => Ok(()),
            Some(_) => self.take_deferred(driver),
        }
    }

    #[cold]
    fn take_deferred(&self, driver: &Driver) -> Result {
        static TAKING: Mutex<()> = Mutex::new(());
        let _taking = lock(&TAKING);
        let Some(word) = driver.session.progress().error(self.id) else { return Ok(()) };
        let Some((status, sticky, seq)) = word.get() else { return Ok(()) };
        if !sticky {
            word.clear();
        }
        client::log::debug(format_args!("context {}: deferred {status} of record {seq}", self.id.0));
        Err(status)
    }

    /// A synchronizing call's result. What the server answered with is the deferred error itself, which is then not returned again.
    pub fn settle(&self, driver: &Driver, result: Result) -> Result {
        let Err(status) = result else { return self.deferred(driver) };
        let word = driver.session.progress().error(self.id);
        if let Some(word) = word
            && let Some((found, false, _)) = word.get()
            && found == status
        {
            word.clear();
        }
        Err(status)
    }

    /// One more user of a primary context.
    pub fn retain(&self) {
        let mut retained = lock(&self.retained);
        *retained += 1;
        self.alive.store(true, Ordering::Release);
    }

    /// One user less; with the last one everything in the context goes.
    pub fn release(&'static self) -> Result {
        {
            let mut retained = lock(&self.retained);
            match *retained {
                0 => return Err(Status::INVALID_CONTEXT),
                1 => {}
                _ => {
                    *retained -= 1;
                    return Ok(());
                }
            }
            *retained = 0;
        }
        self.reset_now(false)
    }

    /// `cuDevicePrimaryCtxReset`.
    pub fn reset(&'static self) -> Result {
        if !self.is_alive() {
            return Ok(());
        }
        self.reset_now(*lock(&self.retained) != 0)
    }

    fn reset_now(&'static self, stays: bool) -> Result {
        let driver = driver()?;
        let device = driver::device(self.device as i32)?;
        self.alive.store(stays, Ordering::Release);
        // A reset takes everything on the device with it. While made contexts live there, what is in this one is taken apart piece by piece.
        let alone = !CONTEXTS.all().iter().any(|c| c.device == self.device && !c.primary && c.is_alive());
        self.forget_contents(driver, alone);
        if !alone {
            address::forget(driver, self);
            return Ok(());
        }
        address::reset(driver, device);
        let result = driver.session.call(&PrimaryReset { device: self.device }).map(|_| ());
        of_device(self.device).for_each(|context| context.limits.forget());
        // The server has cleared the error; a word that was on its way meanwhile must not survive.
        if let Some(word) = driver.session.progress().error(self.id) {
            word.clear();
        }
        result
    }

    /// Everything in the context but its memory is gone: handles of it name nothing from here on. `with_server`: the server is about to
    /// destroy the objects by itself.
    fn forget_contents(&'static self, driver: &'static Driver, with_server: bool) {
        // What the work comes to is nobody's concern any more; that it is over is.
        self.quiesce(driver);
        let stored: Vec<(usize, Stored)> = lock(&self.storage).drain().collect();
        for (key, Stored { value, destructor }) in stored {
            if let Some(destructor) = destructor {
                // SAFETY: the library that stored the value gave the function for this call with these arguments.
                unsafe { destructor(self.handle, key as *mut c_void, value as *mut c_void) };
            }
        }
        green_contexts::forget(self);
        stream::forget(driver, self, with_server);
        event::forget(driver, self, with_server);
        module::forget(driver, self, with_server);
        library::forget(driver, self, with_server);
        instance::forget(self);
        texture::forget(driver, self, with_server);
        array::forget(driver, self, with_server);
        pinned::forget(driver, self);
        let now = self.last_work.load(Ordering::Acquire);
        self.is_synced(now);
    }

    pub fn set_flags(&self, flags: u32) -> Result {
        if flags & !KNOWN_FLAGS != 0 || flags & 7 == 3 || flags & 7 > 4 {
            return Err(Status::INVALID_VALUE);
        }
        if self.primary {
            driver()?.session.call(&PrimarySetFlags { device: self.device, flags })?;
        }
        self.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
}

/// Waits for all work of all contexts. False: some of it cannot be known to be done.
pub(crate) fn quiesce_all(driver: &Driver) -> bool {
    let mut all = true;
    for context in CONTEXTS.all().iter().filter(|context| context.is_alive()) {
        all &= context.quiesce(driver);
    }
    all
}

/// Whether all work of all contexts is known to be over, but for work that stands behind a function that is being called.
pub(crate) fn all_stopped(driver: &Driver) -> bool {
    CONTEXTS
        .all()
        .iter()
        .all(|context| !context.is_alive() || !context.is_busy() || stream::is_stopped(driver, context))
}

/// Every context of a device, its primary one whether it is in use or not.
pub(crate) fn of_device(device: u32) -> impl Iterator<Item = &'static Context> {
    CONTEXTS.all().into_iter().map(|context| *context).filter(move |context| context.device == device)
}

/// Whether work may be under way in any context.
pub(crate) fn any_busy() -> bool {
    CONTEXTS.all().iter().any(|context| context.is_alive() && context.is_busy())
}

/// The calling thread's current context.
///
/// # Errors
/// `INVALID_CONTEXT` when there is none, `CONTEXT_IS_DESTROYED` when it was destroyed.
#[inline]
pub(crate) fn current() -> Result<&'static Context> {
    let top = Lasting::with(&STACK, |stack| stack.borrow().last().map(|top| (top.context, top.is_alive())));
    match top.flatten() {
        None => driver().and(Err(Status::INVALID_CONTEXT)),
        Some((context, true)) => Ok(context),
        Some(_) => driver().and(Err(Status::CONTEXT_IS_DESTROYED)),
    }
}

/// The handle of the calling thread's current context; 0: it has none.
pub(crate) fn current_handle() -> usize {
    Lasting::with(&STACK, |stack| stack.borrow().last().map_or(0, Named::handle)).unwrap_or(0)
}

/// The green context that is current to the calling thread.
pub(crate) fn current_green() -> Option<Arc<Green>> {
    Lasting::with(&STACK, |stack| stack.borrow().last().and_then(|top| top.green.clone())).flatten()
}

/// The driver and the current context, with a session that stands and no error left over from earlier work: what nearly every call needs.
#[inline]
pub(crate) fn ready() -> Result<(&'static Driver, &'static Context)> {
    let driver = driver()?;
    host_function::forbid()?;
    let context = current()?;
    driver.session.check()?;
    context.deferred(driver)?;
    Ok((driver, context))
}

/// As [`ready`], for a call that names a stream: in a thread without a current context the stream's is current until the guard goes. NVIDIA's driver takes launches, copies and fills so, as long as
/// the stream is no default stream.
#[inline]
pub(crate) fn ready_on(stream: usize) -> Result<(&'static Driver, &'static Context, Option<Lent>)> {
    match ready() {
        Ok((driver, context)) => Ok((driver, context, None)),
        Err(Status::INVALID_CONTEXT) => lent_by(stream),
        Err(status) => Err(status),
    }
}

/// A stream's context, current to a thread that has none until this goes.
pub(crate) struct Lent(());

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = Lasting::with(&STACK, |stack| stack.borrow_mut().pop());
    }
}

#[cold]
fn lent_by(stream: usize) -> Result<(&'static Driver, &'static Context, Option<Lent>)> {
    if current_handle() != 0 || stream <= stream::PER_THREAD {
        return Err(Status::INVALID_CONTEXT);
    }
    let (_, stream) = stream::ask(stream, false)?;
    push(Named { context: stream.context, green: None });
    let lent = Lent(());
    let (driver, context) = ready()?;
    Ok((driver, context, Some(lent)))
}

/// The context that a handle names; NULL is the current one.
pub(crate) fn of(handle: usize) -> Result<&'static Context> {
    driver()?;
    if handle == 0 {
        return current();
    }
    Named::of(handle).map(|named| named.context).ok_or(Status::INVALID_CONTEXT)
}

/// The context that a handle names, and the green one in it; NULL is the current one.
pub(crate) fn and_green_of(handle: usize) -> Result<(&'static Context, Option<Arc<Green>>)> {
    if handle == 0 {
        return Ok((current()?, current_green()));
    }
    Named::of(handle).map(|named| (named.context, named.green)).ok_or(Status::INVALID_CONTEXT)
}

fn create(pctx: *mut usize, flags: u32, dev: i32) -> Result {
    non_null(pctx)?;
    let device = driver::device(dev)?;
    if flags & !KNOWN_FLAGS != 0 || flags & 7 == 3 || flags & 7 > 4 {
        return Err(Status::INVALID_VALUE);
    }
    let id = lock(&IDS).pop().unwrap_or_else(|| IDS_FRESH.fetch_add(1, Ordering::Relaxed));
    if id >= MAX_CONTEXTS {
        IDS_FRESH.store(MAX_CONTEXTS, Ordering::Relaxed);
        return Err(Status::OUT_OF_MEMORY);
    }
    let request = ContextCreate { context: ContextId(id), device: device.ordinal, flags };
    if let Err(status) = driver()?.session.call(&request) {
        lock(&IDS).push(id);
        return Err(status);
    }
    let context = Context::new(ContextId(id), device.ordinal, flags, false);
    push(Named { context, green: None });
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(pctx, context.handle) }
}

/// Makes a context the calling thread's only one: that of a host function that it calls.
pub(crate) fn enter(context: &'static Context) {
    let _ = Lasting::with(&STACK, |stack| {
        let mut stack = stack.borrow_mut();
        stack.clear();
        stack.push(Named { context, green: None });
    });
}

fn push(context: Named) {
    // A thread that is being torn down has no current context any more.
    let _ = Lasting::with(&STACK, |stack| stack.borrow_mut().push(context));
}

/// Waits for all work of a context, on the program's behalf.
fn wait_for(context: &'static Context) -> Result {
    host_function::forbid()?;
    capture::forbid_all(context)?;
    let result = context.synchronize();
    shared_blocks::after_wait(driver()?);
    result
}

/// Destroys a context that was made, whoever uses it.
fn destroy(ctx: usize) -> Result {
    let driver = driver()?;
    let context =
        CONTEXTS.get(ctx).ok_or(if ctx == 0 { Status::INVALID_VALUE } else { Status::INVALID_CONTEXT })?;
    if context.primary {
        return Err(Status::INVALID_CONTEXT);
    }
    if CONTEXTS.remove(ctx).is_none() {
        return Err(Status::INVALID_CONTEXT);
    }
    let context: &'static Context = *context;
    context.alive.store(false, Ordering::Release);
    context.forget_contents(driver, true);
    address::forget(driver, context);
    // Where it is current to this thread it stops being so; elsewhere it is found to be destroyed.
    let _ = Lasting::with(&STACK, |stack| {
        let mut stack = stack.borrow_mut();
        if stack.last().is_some_and(|top| std::ptr::eq(top.context, context)) {
            stack.pop();
        }
    });
    let result = driver.session.call(&ContextDestroy { context: context.id }).map(|_| ());
    if let Some(word) = driver.session.progress().error(context.id) {
        word.clear();
    }
    if result.is_ok() {
        lock(&IDS).push(context.id.0);
    }
    result
}

api! {
    fn cuCtxCreate_v4(pctx: *mut usize, params: *const CtxCreateParams, flags: u32, dev: i32) {
        if let Some(params) = params.as_ref()
            && (params.numExecAffinityParams != 0 || !params.cigParams.is_null())
        {
            return Err(Status::NOT_SUPPORTED);
        }
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v3(pctx: *mut usize, params: *mut c_void, count: i32, flags: u32, dev: i32) {
        if count != 0 && !params.is_null() {
            return Err(Status::NOT_SUPPORTED);
        }
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v2(pctx: *mut usize, flags: u32, dev: i32) {
        create(pctx, flags, dev)
    }
    alias cuCtxCreate = cuCtxCreate_v2(pctx: *mut usize, flags: u32, dev: i32);

    fn cuCtxDestroy_v2(ctx: usize) {
        destroy(ctx)
    }
    alias cuCtxDestroy = cuCtxDestroy_v2(ctx: usize);

    fn cuCtxPushCurrent_v2(ctx: usize) {
        driver()?;
        push(Named::of(ctx).ok_or(Status::INVALID_CONTEXT)?);
        Ok(())
    }
    alias cuCtxPushCurrent = cuCtxPushCurrent_v2(ctx: usize);

    fn cuCtxPopCurrent_v2(pctx: *mut usize) {
        driver()?;
        let popped = Lasting::with(&STACK, |stack| stack.borrow_mut().pop()).flatten().ok_or(Status::INVALID_CONTEXT)?;
        if !pctx.is_null() {
            put(pctx, popped.handle())?;
        }
        Ok(())
    }
    alias cuCtxPopCurrent = cuCtxPopCurrent_v2(pctx: *mut usize);

    fn cuCtxSetCurrent(ctx: usize) {
        driver()?;
        let context = if ctx == 0 { None } else { Some(Named::of(ctx).ok_or(Status::INVALID_CONTEXT)?) };
        let _ = Lasting::with(&STACK, |stack| {
            let mut stack = stack.borrow_mut();
            stack.pop();
            stack.extend(context);
        });
        Ok(())
    }

    fn cuCtxGetCurrent(pctx: *mut usize) {
        driver()?;
        put(pctx, current_handle())
    }

    fn cuCtxGetDevice(device: *mut i32) {
        if session::forked() {
            return Err(Status::NOT_INITIALIZED);
        }
        put(device, current()?.device as i32)
    }

    fn cuCtxGetDevice_v2(device: *mut i32, ctx: usize) {
        put(device, of(ctx)?.device as i32)
    }

    fn cuCtxGetFlags(flags: *mut u32) {
        /// `CU_CTX_MAP_HOST`, which NVIDIA's driver tells of primary contexts alone.
        const MAP_HOST: u32 = 8;
        let context = current()?;
        put(flags, context.flags.load(Ordering::Relaxed) | if context.primary { MAP_HOST } else { 0 })
    }

    fn cuCtxGetExecAffinity(param: *mut ExecAffinityParam, kind: u32) {
        non_null(param)?;
        if kind != EXEC_AFFINITY_SM_COUNT {
            return Err(Status::INVALID_VALUE);
        }
        // No context is limited to a part of its device: such are MPS's.
        let processors = driver::device(current()?.device as i32)?.attribute(attr::MULTIPROCESSOR_COUNT);
        put(param, ExecAffinityParam { kind, processors: processors as u32 })
    }

    fn cuCtxSetFlags(flags: u32) {
        current()?.set_flags(flags)
    }

    fn cuCtxGetId(ctx: usize, id: *mut u64) {
        let (context, green) = and_green_of(ctx)?;
        put(id, green.map_or(context.unique, |green| green.unique))
    }

    fn cuCtxGetApiVersion(ctx: usize, version: *mut u32) {
        of(ctx)?;
        put(version, 3020)
    }

    fn cuCtxSynchronize() {
        wait_for(current()?)
    }

    fn cuCtxSynchronize_v2(ctx: usize) {
        wait_for(of(ctx)?)
    }

    fn cuCtxGetCacheConfig(config: *mut u32) {
        put(config, current()?.cache_config.load(Ordering::Relaxed))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        // A preference: a device with one kind of memory for both, as all are since Volta, does nothing with it.
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        current()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: *mut u32) {
        // Four bytes, on every device since Maxwell.
        current()?;
        put(config, 1)
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        // Without effect, as NVIDIA's driver has it.
        if config > 2 {
            return Err(Status::INVALID_VALUE);
        }
        current().map(|_| ())
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        let context = current()?;
        let range = driver::device(context.device as i32)?.info.stream_priorities;
        if !least.is_null() {
            put(least, range[0])?;
        }
        if !greatest.is_null() {
            put(greatest, range[1])?;
        }
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        // Persisting accesses are a launch attribute; there is nothing of this process's own to reset.
        current().map(|_| ())
    }

    fn cuCtxAttach(pctx: *mut usize, flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let context = current()?;
        put(pctx, current_handle())?;
        *lock(&context.attached) += 1;
        Ok(())
    }

    fn cuCtxDetach(ctx: usize) {
        let context = current()?;
        if ctx != current_handle() {
            return Err(Status::INVALID_CONTEXT);
        }
        {
            let mut attached = lock(&context.attached);
            if *attached > 0 {
                *attached -= 1;
                return Ok(());
            }
        }
        // The last usage is its maker's.
        destroy(ctx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synchronized_legacy_stream_does_not_hide_work_that_another_thread_is_appending() {
        let context = Context::new(ContextId(0), 0, 0, true);
        // A thread appends record 10 on a non-blocking stream. Before it notes that, another synchronizes the legacy default stream with record 11.
        let appending = context.appending(true);
        context.legacy_is_synced(11);
        context.worked(10, true);
        drop(appending);
        assert!(context.is_busy(), "record 10 may still run");
        context.is_synced(12);
        assert!(!context.is_busy());
    }

    #[test]
    fn a_synchronized_legacy_stream_covers_all_work_when_no_other_is_open() {
        let context = Context::new(ContextId(0), 0, 0, true);
        let appending = context.appending(false);
        context.worked(10, false);
        drop(appending);
        context.legacy_is_synced(11);
        assert!(!context.is_busy());
    }
}
