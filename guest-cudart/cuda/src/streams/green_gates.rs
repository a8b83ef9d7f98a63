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

/// Called when a primary context is reset, and its green contexts with it. They use it no more.
pub(crate) fn forget(context: &'static Context) {
    let gone = GREENS.remove_where(|green| std::ptr::eq(green.context, context));
    for green in &gone {
        green.alive.store(false, Ordering::Release);
        *lock(&green.default) = None;
    }
    context.lose_users(gone.len() as u32);
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

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::process::driver::Server;
    use crate::process::ids::unique_id;
    use client::handle::{ContextId, GreenId};

    #[test]
    fn a_green_context_that_a_reset_takes_away_uses_its_primary_context_no_more() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, true);
        // The program, and the green context.
        context.retain();
        context.retain();
        let green = Green {
            id: GreenId(1),
            context,
            unique: unique_id(),
            handle: OnceLock::new(),
            converted: false.into(),
            alive: true.into(),
            default: Mutex::new(None),
        };
        let handle = GREENS.insert(Arc::new(green)).unwrap();
        let (change, _) = context.reset().unwrap();
        forget(context);
        drop(change);
        assert!(GREENS.get(handle).is_none());
        assert!(context.is_alive(), "the program uses it");
        assert!(context.release_one().unwrap().is_some(), "and nobody else does");
        assert!(!context.is_alive());
    }
}
