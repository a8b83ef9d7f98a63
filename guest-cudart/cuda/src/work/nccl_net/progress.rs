//! How far the pieces of a direct connection are.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::handle::StreamId;
use client::ops::Op;
use client::seq::Seq;
use client::{Status, lock};

/// Streams of connections that have ended. They are used again: neither making nor destroying one could
/// disturb kernels that are running.
static UNUSED: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// Whether a stream has passed a mark.
///
/// # Errors
/// Its context's, if something before has failed.
fn has_passed(stream: &Stream, mark: Seq) -> Result<bool> {
    if !stream.has_passed(mark) {
        stream.session().check()?;
        return Ok(false);
    }
    if stream.is_finished() {
        return Err(Status::CONTEXT_IS_DESTROYED);
    }
    if stream.context.has_error() { Err(Status::UNKNOWN) } else { Ok(true) }
}

/// A stream of which only the progress word is used, and the pieces whose commands raise it.
pub(super) struct Progress {
    stream: Arc<Stream>,
    /// Commands of pieces that are not known to be done.
    under_way: VecDeque<Seq>,
    begun: u64,
}

impl Progress {
    /// For pieces in a context's memory.
    pub fn new(context: &'static Context) -> Result<Progress> {
        let mut unused = lock(&UNUSED);
        unused.retain(|stream| !stream.is_finished());
        let found = unused.iter().position(|stream| std::ptr::eq(stream.context, context));
        let stream = match found {
            Some(found) => unused.swap_remove(found),
            None => stream_table::unnamed(context)?,
        };
        Ok(Progress { stream, under_way: VecDeque::new(), begun: 0 })
    }

    /// The stream.
    pub fn stream(&self) -> StreamId {
        self.stream.id
    }

    /// Begins the next piece: gives the server its command.
    pub fn begin<'a>(&mut self, command: &impl Op<'a>) -> Result {
        self.under_way.push_back(self.stream.session().append(command)?);
        self.begun += 1;
        Ok(())
    }

    /// Looks which pieces are done.
    ///
    /// # Errors
    /// The context's, if something has failed.
    pub fn look(&mut self) -> Result {
        while let Some(seq) = self.under_way.front()
            && has_passed(&self.stream, *seq)?
        {
            self.under_way.pop_front();
        }
        Ok(())
    }

    /// Pieces so far.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Those of them that were done when somebody [looked](Self::look) last.
    pub fn done(&self) -> u64 {
        self.begun - self.under_way.len() as u64
    }

    /// Whether all were.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        lock(&UNUSED).push(Arc::clone(&self.stream));
    }
}
