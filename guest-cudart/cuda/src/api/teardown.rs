//! The end of a context, and of everything in it.

use std::ffi::c_void;

use crate::abi::result::Result;
use crate::api::ipc;
use crate::code::{library, module};
use crate::graph::instance;
use crate::memory::managed::shared_blocks;
use crate::memory::{array, pinned, pool, stream_ordered, texture};
use crate::process::context::{self, Change, Context, Stored};
use crate::process::driver::{self, Driver, driver};
use crate::process::ids::{self, WithContext};
use crate::streams::{event, green_gates, stream_table};
use client::lock;
use client::ops::context::{ContextDestroy, PrimaryReset};

/// Releases a primary context. The last release empties it.
pub(crate) fn release(context: &'static Context) -> Result {
    context.release_one()?.map_or(Ok(()), |change| empty(context, change, false))
}

/// Releases a primary context that a green context used.
pub(crate) fn release_green(context: &'static Context) -> Result {
    context.release_green().map_or(Ok(()), |change| empty(context, change, false))
}

/// `cuDevicePrimaryCtxReset`.
pub(crate) fn reset(context: &'static Context) -> Result {
    context.reset()?.map_or(Ok(()), |(change, stays)| empty(context, change, stays))
}

/// Empties a primary context. `stays`: it still has users. Other threads that retain it wait until `change`
/// is dropped.
fn empty(context: &'static Context, change: Change<'_>, stays: bool) -> Result {
    let _change = change;
    let driver = driver()?;
    let device = driver::device(context.device as i32)?;
    // Nobody knows of the work of a context that is not alive.
    context.quiesce();
    context.set_alive(stays);
    // A reset removes everything on the device. While contexts made by the program exist there, this
    // context's objects are destroyed one by one instead.
    let alone = !context::of_device(context.device).any(|other| !other.is_primary() && other.is_alive());
    let mut ended = WithContext::default();
    forget_contents(driver, context, alone.then_some(&mut ended));
    ipc::forget(driver, context);
    if !alone {
        stream_ordered::forget(driver, context);
        return Ok(());
    }
    stream_ordered::reset(driver, device);
    let result = context.session().call(&PrimaryReset { device: device.number }).map(|_| ());
    if result.is_ok() {
        ended.give_back();
    }
    context::of_device(context.device).for_each(|context| context.limits.forget());
    // The server has cleared the error; a word that was in transit meanwhile must not bring it back.
    if let Some(word) = context.session().progress().error(context.id) {
        word.clear();
    }
    result
}

/// Destroys a context made by `cuCtxCreate`, even if it is current to other threads.
pub(crate) fn destroy(handle: usize) -> Result {
    let driver = driver()?;
    let context = context::take(handle)?;
    let mut ended = WithContext::default();
    forget_contents(driver, context, Some(&mut ended));
    ipc::forget(driver, context);
    stream_ordered::forget(driver, context);
    context::leave(context);
    let result = context.session().call(&ContextDestroy { context: context.id }).map(|_| ());
    if let Some(word) = context.session().progress().error(context.id) {
        word.clear();
    }
    if result.is_ok() {
        ended.give_back();
        ids::CONTEXTS.give_back(context.id.0);
    }
    result
}

/// Drops everything in a context except its memory; all handles become invalid. `with_context`: the server
/// destroys the objects with the context.
fn forget_contents(
    driver: &'static Driver,
    context: &'static Context,
    mut with_context: Option<&mut WithContext>,
) {
    let with_server = with_context.is_some();
    // The result no longer matters, but the work must be done.
    context.quiesce();
    shared_blocks::after_wait(driver);
    let stored: Vec<(usize, Stored)> = lock(&context.storage).drain().collect();
    for (key, Stored { value, destructor }) in stored {
        if let Some(destructor) = destructor {
            // SAFETY: the library that stored the value passed the function to be called with these
            // arguments.
            unsafe { destructor(context.handle, key as *mut c_void, value as *mut c_void) };
        }
    }
    green_gates::forget(context);
    stream_table::forget(context, with_context.as_deref_mut());
    event::forget(context, with_context);
    module::forget(context, with_server);
    library::forget(context, with_server);
    instance::forget(context);
    texture::forget(context, with_server);
    array::forget(context, with_server);
    pinned::forget(driver, context);
    // After the mirrors of what is then unpinned in another thread have ended.
    pool::forget();
    if let Some(last) = context.last_work() {
        context.is_synced(last);
    }
}
