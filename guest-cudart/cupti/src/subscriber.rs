//! Callbacks for calls and for what the program makes: at most one subscriber, for the driver API, the
//! runtime API, and new contexts, graphs, nodes and instances of graphs.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::calls::Call;
use crate::driver::{Called, Made, table};
use crate::names::{DRIVER, RUNTIME};
use crate::result::{
    CUptiResult, INVALID_PARAMETER, MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, NOT_SUPPORTED, Result, finish, put,
};
use crate::{calls, lock, names};

type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);

/// One more than the last `CUpti_CallbackDomain`.
const DOMAINS: u32 = 7;
/// `CUPTI_CB_DOMAIN_RESOURCE`, and those of its numbers that are ever told: `CONTEXT_CREATED`,
/// `GRAPH_CREATED`, `GRAPH_CLONED`, `GRAPHNODE_CREATED`, `GRAPHEXEC_CREATED` and `GRAPHNODE_CLONED`.
const RESOURCE: u32 = 3;
const CONTEXT_CREATED: u32 = 1;
const TOLD: [u32; 6] = [CONTEXT_CREATED, 9, 11, 13, 18, 20];
/// One more than the last `CUpti_CallbackIdResource`.
const RESOURCES: u32 = 24;
/// The address that stands for the only subscriber.
static HANDLE: u8 = 0;

/// `CUpti_CallbackData`.
#[repr(C)]
struct CallbackData {
    site: u32,
    function_name: *const c_char,
    function_params: *const c_void,
    function_return_value: *mut c_void,
    symbol_name: *const c_char,
    context: *mut c_void,
    context_uid: u32,
    correlation_data: *mut u64,
    correlation_id: u32,
}

#[derive(Clone, Copy)]
struct User(*mut c_void);

// SAFETY: the program's own pointer, which is only passed back to it.
unsafe impl Send for User {}

struct Subscriber {
    callback: Callback,
    user: User,
    /// Domains whose functions are all enabled.
    domains: HashSet<u32>,
    /// Enabled functions of other domains, and disabled functions of these domains.
    exceptions: HashSet<(u32, u32)>,
}

thread_local! {
    /// The words that a subscriber may leave at a call's beginning and finds at its end, `correlationData`:
    /// for a call of the driver and one of the runtime, which it may be within.
    static WORDS: [Cell<u64>; 2] = const { [const { Cell::new(0) }; 2] };
}

static SUBSCRIBER: Mutex<Option<Subscriber>> = Mutex::new(None);
static WANTS: AtomicBool = AtomicBool::new(false);

/// Whether a subscriber gets calls.
pub fn wants_calls() -> bool {
    WANTS.load(Ordering::Relaxed)
}

fn update(subscriber: Option<&Subscriber>) {
    let calls = |s: &Subscriber| {
        s.domains
            .iter()
            .chain(s.exceptions.iter().map(|(domain, _)| domain))
            .any(|domain| *domain != RESOURCE)
    };
    WANTS.store(subscriber.is_some_and(calls), Ordering::Relaxed);
}

/// `CUpti_ResourceData`.
#[repr(C)]
struct ResourceData {
    context: usize,
    stream: *mut c_void,
    descriptor: *const c_void,
}

/// Calls the subscriber for what the program has made.
unsafe extern "C" fn was_made(made: *const Made) {
    // SAFETY: libcuda passes a structure that lives until this returns.
    let Made { what, context, graph } = unsafe { &*made };
    let found = lock(&SUBSCRIBER)
        .as_ref()
        .and_then(|s| s.exceptions.contains(&(RESOURCE, *what)).then_some((s.callback, s.user)));
    if let Some((callback, user)) = found {
        let descriptor = if *what == CONTEXT_CREATED { std::ptr::null() } else { std::ptr::from_ref(graph) };
        let (stream, descriptor) = (std::ptr::null_mut(), descriptor.cast());
        let told = ResourceData { context: *context, stream, descriptor };
        // SAFETY: the program's function and word, as it has given them; the structures live until it
        // returns.
        unsafe { callback(user.0, RESOURCE, *what, (&raw const told).cast()) };
    }
}

/// Makes libcuda report what is made if the subscriber wants to know.
fn observe_resources() -> Result {
    let wants = |s: &Subscriber| TOLD.iter().any(|what| s.exceptions.contains(&(RESOURCE, *what)));
    let wanted = lock(&SUBSCRIBER).as_ref().is_some_and(wants);
    table()?.observe_resources(wanted.then_some(was_made));
    Ok(())
}

/// Calls the subscriber for a call, if it is enabled: at the call's beginning, or at its end with its status.
pub fn call(call: &Call<'_>, status: Option<u32>) {
    if !wants_calls() {
        return;
    }
    let (domain, number) = (call.domain, call.number());
    let (callback, user) = {
        let subscriber = lock(&SUBSCRIBER);
        let Some(s) = &*subscriber else { return };
        if s.domains.contains(&domain) == s.exceptions.contains(&(domain, number)) {
            return;
        }
        (s.callback, s.user)
    };
    let Called { name, arguments, kernel, .. } = *call.told;
    // SAFETY: libcuda passes what belongs together.
    let symbol = kernel.map_or(std::ptr::null(), |kernel| unsafe { kernel(name, arguments) });
    let (context, context_uid) = table().map_or((0, 0), |table| table.current_context());
    let mut result = status.unwrap_or(0);
    // A thread that is being destroyed has no words any more.
    let kept = WORDS.try_with(|words| words[call.place()].take()).unwrap_or(0);
    let mut word = if status.is_some() { kept } else { 0 };
    let told = CallbackData {
        site: u32::from(status.is_some()),
        function_name: name,
        function_params: arguments,
        function_return_value: if status.is_some() { (&raw mut result).cast() } else { std::ptr::null_mut() },
        symbol_name: symbol,
        context: std::ptr::without_provenance_mut(context),
        context_uid,
        correlation_data: &raw mut word,
        correlation_id: call.correlation,
    };
    // SAFETY: the program's function and word, as it has given them; the structure lives until it returns.
    unsafe { callback(user.0, domain, number, (&raw const told).cast()) };
    if status.is_none() {
        let _ = WORDS.try_with(|words| words[call.place()].set(word));
    }
}

fn with_subscriber(handle: *mut c_void, f: impl FnOnce(&mut Subscriber) -> Result) -> CUptiResult {
    let done = {
        let mut subscriber = lock(&SUBSCRIBER);
        let ours = std::ptr::eq(handle.cast_const().cast(), &HANDLE);
        match subscriber.as_mut().filter(|_| ours) {
            Some(found) => {
                let done = f(found);
                update(Some(found));
                done
            }
            None => Err(INVALID_PARAMETER),
        }
    };
    finish(done.and_then(|()| calls::observe()).and_then(|()| observe_resources()))
}

fn check(domain: u32) -> Result {
    match domain {
        DRIVER | RUNTIME => Ok(()),
        1..DOMAINS => Err(NOT_SUPPORTED),
        _ => Err(INVALID_PARAMETER),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiSubscribe(
    subscriber: *mut *mut c_void,
    callback: Option<Callback>,
    user: *mut c_void,
) -> CUptiResult {
    let Some(callback) = callback else { return INVALID_PARAMETER };
    let mut current = lock(&SUBSCRIBER);
    if current.is_some() {
        return MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    }
    // SAFETY: the caller gives a place for a handle.
    let done = unsafe { put(subscriber, (&raw const HANDLE).cast_mut().cast()) };
    if done.is_ok() {
        let (domains, exceptions) = (HashSet::new(), HashSet::new());
        *current = Some(Subscriber { callback, user: User(user), domains, exceptions });
    }
    finish(done)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiUnsubscribe(subscriber: *mut c_void) -> CUptiResult {
    {
        let mut current = lock(&SUBSCRIBER);
        if current.is_none() || !std::ptr::eq(subscriber.cast_const().cast(), &HANDLE) {
            return INVALID_PARAMETER;
        }
        *current = None;
        update(None);
    }
    finish(calls::observe().and_then(|()| observe_resources()))
}

/// Drops the subscriber, if there is one.
pub fn end() -> Result {
    *lock(&SUBSCRIBER) = None;
    update(None);
    observe_resources()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableCallback(
    enable: u32,
    subscriber: *mut c_void,
    domain: u32,
    cbid: u32,
) -> CUptiResult {
    with_subscriber(subscriber, |s| {
        match (domain, cbid) {
            (RESOURCE, what) if TOLD.contains(&what) => {}
            // Kineto passes a number of its own instead of CUPTI's, and records no device activity if that is
            // refused.
            (RESOURCE, 1..RESOURCES) => log::info(format_args!(
                "libcupti: a subscriber is called for new contexts and graphs, but never for resource {cbid}"
            )),
            _ => check(domain)?,
        }
        if (enable != 0) == s.domains.contains(&domain) {
            s.exceptions.remove(&(domain, cbid));
        } else {
            s.exceptions.insert((domain, cbid));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableDomain(enable: u32, subscriber: *mut c_void, domain: u32) -> CUptiResult {
    with_subscriber(subscriber, |s| {
        check(domain)?;
        s.exceptions.retain(|(other, _)| *other != domain);
        if enable != 0 {
            s.domains.insert(domain);
        } else {
            s.domains.remove(&domain);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetCallbackState(
    enable: *mut u32,
    subscriber: *mut c_void,
    domain: u32,
    cbid: u32,
) -> CUptiResult {
    let current = lock(&SUBSCRIBER);
    let state = current.as_ref().filter(|_| std::ptr::eq(subscriber.cast_const().cast(), &HANDLE));
    let state = state.map(|s| s.domains.contains(&domain) != s.exceptions.contains(&(domain, cbid)));
    // SAFETY: the caller gives a place for a number.
    finish(state.ok_or(INVALID_PARAMETER).and_then(|state| unsafe { put(enable, state.into()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetCallbackName(
    domain: u32,
    cbid: u32,
    name: *mut *const c_char,
) -> CUptiResult {
    let found = names::of(domain).and_then(|names| names.name(cbid)).ok_or(INVALID_PARAMETER);
    // SAFETY: the caller gives a place for an address.
    finish(found.and_then(|found| unsafe { put(name, found.as_ptr()) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake::CURRENT;

    static ARGUMENTS: u64 = 77;

    unsafe extern "C" fn kernel(name: *const c_char, arguments: *const c_void) -> *const c_char {
        assert!(!name.is_null() && std::ptr::eq(arguments.cast(), &ARGUMENTS));
        c"a kernel".as_ptr()
    }

    /// Leaves a word at a call's beginning, and checks it at its end.
    unsafe extern "C" fn callback(_: *mut c_void, domain: u32, _: u32, told: *const c_void) {
        // SAFETY: the structure that `call` has made, with a place for the word.
        let (told, word) = unsafe {
            let told = &*told.cast::<CallbackData>();
            (told, &mut *told.correlation_data)
        };
        assert!(std::ptr::eq(told.function_params.cast(), &ARGUMENTS));
        assert_eq!((told.context.addr(), told.context_uid), CURRENT);
        assert_eq!(told.function_name, c"cuInit".as_ptr());
        assert_eq!(told.symbol_name, c"a kernel".as_ptr());
        let left = u64::from(told.correlation_id) << 32 | u64::from(domain);
        match told.site {
            0 => assert_eq!(std::mem::replace(word, left), 0),
            _ => assert_eq!(*word, if told.correlation_id == 7 { 0 } else { left }),
        }
    }

    #[test]
    fn a_subscriber_hears_of_a_call_and_finds_the_word_that_it_left_at_its_beginning() {
        let (domains, exceptions) = (HashSet::from([DRIVER, RUNTIME]), HashSet::new());
        let user = User(std::ptr::null_mut());
        *lock(&SUBSCRIBER) = Some(Subscriber { callback, user, domains, exceptions });
        update(lock(&SUBSCRIBER).as_ref());
        let tell = |domain, correlation, status| {
            let arguments = (&raw const ARGUMENTS).cast();
            let runtime = if domain == DRIVER { 0 } else { 13 };
            let name = c"cuInit".as_ptr();
            let told = &Called { name, arguments, kernel: Some(kernel), runtime, within: 0, number: 0 };
            call(&Call { told, domain, number: 1.into(), correlation }, status);
        };
        std::thread::scope(|scope| {
            for thread in 1..3 {
                scope.spawn(move || {
                    for number in [thread, thread + 2] {
                        tell(RUNTIME, number, None);
                        for _ in 0..2 {
                            tell(DRIVER, number, None);
                            tell(DRIVER, number, Some(0));
                        }
                        tell(RUNTIME, number, Some(0));
                    }
                    // Its beginning was not reported.
                    tell(DRIVER, 7, Some(0));
                });
            }
        });
        *lock(&SUBSCRIBER) = None;
        update(None);
    }
}
