//! When the device was busy with which command, if a timeline is recorded ([`protocol::trace`]).
//!
//! The driver says when a stream has come to the end of a command. It began when the stream had done what came before, or when the dispatcher took it, whichever was later: so what the stream waited
//! for in between, such as an event of another stream, is part of the time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use protocol::Status;
use protocol::channel::Record;
use protocol::handle::{Handle, StreamId};
use protocol::ops::array::MemcpyArray;
use protocol::ops::copy::{
    MemcpyDtoD, MemcpyDtoD3D, MemcpyDtoH, MemcpyDtoH3D, MemcpyHtoD, MemcpyHtoD3D, Memset,
};
use protocol::ops::graph::GraphLaunch;
use protocol::ops::launch::Launch;
use protocol::ops::{self, Op};
use protocol::trace::{RECORDER, Span};

use crate::driver::{Backend, Call};

/// For each stream, when it came to the end of the last command.
#[derive(Default)]
pub(super) struct Timeline {
    ends: Arc<Mutex<HashMap<u32, u64>>>,
}

/// The stream of a command that keeps a device busy.
fn stream_of(opcode: u16, body: &[u8]) -> Option<StreamId> {
    let work = [
        Launch::INFO.opcode,
        GraphLaunch::INFO.opcode,
        Memset::INFO.opcode,
        MemcpyHtoD::INFO.opcode,
        MemcpyHtoD3D::INFO.opcode,
        MemcpyDtoH::INFO.opcode,
        MemcpyDtoH3D::INFO.opcode,
        MemcpyDtoD::INFO.opcode,
        MemcpyDtoD3D::INFO.opcode,
        MemcpyArray::INFO.opcode,
    ];
    let info = ops::info(opcode).filter(|_| work.contains(&opcode))?;
    let mut stream = None;
    let _ = (info.visit_handles)(body, &mut |handle| {
        if let Handle::Stream(found) = handle {
            stream = Some(found);
        }
    });
    stream
}

impl Timeline {
    /// A command was given to the device; the dispatcher took it at `taken`.
    pub(super) fn executed(
        &self,
        backend: &mut dyn Backend,
        call: &mut Call,
        record: &Record,
        body: &[u8],
        taken: u64,
    ) {
        let Some(stream) = stream_of(record.opcode, body) else { return };
        let (ends, seq) = (Arc::clone(&self.ends), record.seq);
        let end = move |_: Status| {
            let now = RECORDER.clock();
            let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
            let before = ends.insert(stream.0, now).unwrap_or(0);
            RECORDER.span(|| Span::Work(seq, stream.0, [before.max(taken), now]));
        };
        backend.after_work(call, stream, Box::new(end));
    }
}
