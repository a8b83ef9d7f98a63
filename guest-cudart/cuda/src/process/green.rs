//! Green contexts: contexts that have a part of their device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::stream::Stream;
use client::handle::GreenId;
use client::handles::Slab;
use client::{Status, lock};

/// A green context.
pub(crate) struct Green {
    pub id: GreenId,
    /// The primary context that it is in.
    pub context: &'static Context,
    pub unique: u64,
    pub handle: OnceLock<usize>,
    /// Whether the program has asked for it as a context.
    pub converted: AtomicBool,
    pub alive: AtomicBool,
    pub default: Mutex<Option<Arc<Stream>>>,
}

pub(crate) static GREENS: Slab<Green> = Slab::new(18);

/// Whether the process has ever made one. Until then, no call looks for one.
pub(crate) static ANY: AtomicBool = AtomicBool::new(false);

/// Whether there ever was a green context.
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

impl Green {
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub fn handle(&self) -> usize {
        self.handle.get().copied().unwrap_or(0)
    }

    /// Its handle, for use as a context's from now on.
    pub fn convert(&self) -> usize {
        self.converted.store(true, Ordering::Release);
        self.handle()
    }

    /// Whether a stream is its default stream.
    pub fn is_default(&self, stream: &Stream) -> bool {
        lock(&self.default).as_ref().is_some_and(|default| std::ptr::eq(&**default, stream))
    }

    /// Its default stream, which waits for no other.
    pub fn default_stream(&self) -> Result<Arc<Stream>> {
        lock(&self.default).clone().ok_or(Status::CONTEXT_IS_DESTROYED)
    }
}

/// The green context that a handle names as a context.
pub(crate) fn as_context(handle: usize) -> Option<Arc<Green>> {
    if !any() {
        return None;
    }
    GREENS.get(handle).filter(|green| green.converted.load(Ordering::Acquire))
}
