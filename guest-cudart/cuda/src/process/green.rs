//! Green contexts: contexts with a part of a device.

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
    /// Its primary context.
    pub context: &'static Context,
    pub unique: u64,
    pub handle: OnceLock<usize>,
    /// Whether the program has converted it to a context.
    pub converted: AtomicBool,
    pub alive: AtomicBool,
    pub default: Mutex<Option<Arc<Stream>>>,
}

pub(crate) static GREENS: Slab<Green> = Slab::new(18);

/// Whether the process has ever made one. Until then, calls don't look for one.
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

    /// Converts it: its handle works as a context's from now on.
    pub fn convert(&self) -> usize {
        self.converted.store(true, Ordering::Release);
        self.handle()
    }

    /// Whether a stream is its default stream.
    pub fn is_default(&self, stream: &Stream) -> bool {
        lock(&self.default).as_ref().is_some_and(|default| std::ptr::eq(&**default, stream))
    }

    /// Its default stream, which waits for no other stream.
    pub fn default_stream(&self) -> Result<Arc<Stream>> {
        lock(&self.default).clone().ok_or(Status::CONTEXT_IS_DESTROYED)
    }
}

/// The green context that a context handle names, if it names one.
pub(crate) fn as_context(handle: usize) -> Option<Arc<Green>> {
    if !any() {
        return None;
    }
    GREENS.get(handle).filter(|green| green.converted.load(Ordering::Acquire))
}
