//! Waits at the beginning of every stream of a context: `cuCtxWaitEvent` and `cuGreenCtxWaitEvent`.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::fences;
use crate::process::green::{GREENS, Green};
use crate::process::stream::Stream;
use client::lock;

/// A context, or a green one in it.
pub(crate) type Whole = (&'static Context, Option<Arc<Green>>);

/// Streams that gather the events all work of a context, or of a green context in it, must wait for. Streams
/// created later wait for these.
pub(crate) static GATES: Mutex<Vec<(Whole, Arc<Stream>)>> = Mutex::new(Vec::new());

/// Called when a primary context is reset, and its green contexts with it.
pub(crate) fn forget(context: &'static Context) {
    for green in GREENS.remove_where(|green| std::ptr::eq(green.context, context)) {
        green.alive.store(false, Ordering::Release);
        *lock(&green.default) = None;
    }
    lock(&GATES).retain(|((of, _), _)| !std::ptr::eq(*of, context));
}

/// Makes a new stream wait for everything that all work of its context must wait for.
pub(crate) fn inherit(stream: &Stream) -> Result {
    let gates = lock(&GATES);
    for ((context, green), gate) in &*gates {
        let same = match (green, stream.green()) {
            (None, _) => true,
            (Some(green), Some(other)) => Arc::ptr_eq(green, other),
            (Some(_), None) => false,
        };
        if same && std::ptr::eq(*context, stream.context) {
            fences::join(gate, stream)?;
        }
    }
    Ok(())
}
