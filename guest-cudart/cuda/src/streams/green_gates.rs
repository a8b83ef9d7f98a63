//! Waits at the beginning of every stream of a context: `cuCtxWaitEvent` and `cuGreenCtxWaitEvent`.

use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::fences;
use crate::process::green::Green;
use crate::process::stream::Stream;
use client::lock;

/// A context, or a green one in it.
pub(crate) type Whole = (&'static Context, Option<Arc<Green>>);

/// Streams that gather the events all work of a context, or of a green context in it, must wait for. Streams
/// created later wait for these.
pub(crate) static GATES: Mutex<Vec<(Whole, Arc<Stream>)>> = Mutex::new(Vec::new());

/// Called when a context ends or is reset, which has no green contexts then.
pub(crate) fn forget(context: &'static Context) {
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
