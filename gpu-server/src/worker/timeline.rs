//! When the device was busy with which command, if a timeline is recorded ([`protocol::trace`]) that includes
//! this ([`DEVICES`]).
//!
//! This comes from the backend's activity records. Without them, the driver reports when a stream has reached
//! the end of a command. The command is assumed to begin when the stream had finished what came before, or
//! when the dispatcher took it, whichever was later. So anything the stream waited for in between, such as
//! another stream's event, is included.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use protocol::Status;
use protocol::channel::Record;
use protocol::handle::{Handle, StreamId};
use protocol::ops::array::MemcpyArray;
use protocol::ops::copy::MemcpyHtoD;
use protocol::ops::direct;
use protocol::ops::graph::GraphLaunch;
use protocol::ops::launch::Launch;
use protocol::ops::{self, Op, OpInfo};
use protocol::trace::{DEVICES, RECORDER, Work};

use crate::driver::activity::Activity;
use crate::driver::{Backend, Call};

/// When devices worked.
#[derive(Default)]
pub(super) struct Timeline {
    /// The backend's records.
    activity: Option<Arc<Activity>>,
    /// Whether it is enabled.
    on: bool,
    /// Without records: for each stream, when it reached the end of the last command.
    ends: Arc<Mutex<HashMap<u32, u64>>>,
}

/// The stream of a command that may give a device work: a launch, a copy or a fill.
pub(super) fn work_stream(info: &OpInfo, body: &[u8]) -> Option<StreamId> {
    let chapters = [
        Launch::INFO.opcode >> 8,
        MemcpyHtoD::INFO.opcode >> 8,
        MemcpyArray::INFO.opcode >> 8,
        direct::DirectSend::INFO.opcode >> 8,
    ];
    if !chapters.contains(&(info.opcode >> 8)) && info.opcode != GraphLaunch::INFO.opcode {
        return None;
    }
    let mut stream = None;
    let _ = (info.visit_handles)(body, &mut |handle| {
        if let Handle::Stream(found) = handle {
            stream = Some(found);
        }
    });
    stream
}

impl Timeline {
    /// Called when the session begins.
    pub(super) fn begin(&mut self, backend: &mut dyn Backend, call: &mut Call) {
        self.on = RECORDER.is_on() && std::env::var_os(DEVICES).is_some();
        if self.on {
            self.activity = backend.record(call);
        }
    }

    /// Called when the session has ended: writes its records as lines.
    pub(super) fn end(&mut self, backend: &mut dyn Backend) {
        let Some(activity) = self.activity.take() else { return };
        backend.flush_activity();
        let (records, dropped) = activity.drain();
        for (record, name) in records {
            let (seq, stream, times) = (record.seq, record.stream, [record.begin, record.end]);
            RECORDER.work(Work { seq, stream, times, name: name.to_string() });
        }
        RECORDER.lose(dropped);
    }

    /// A command was given to the device; the dispatcher took it at `taken`.
    pub(super) fn executed(
        &self,
        backend: &mut dyn Backend,
        call: &mut Call,
        record: &Record,
        body: &[u8],
        taken: u64,
    ) {
        if !self.on || self.activity.is_some() {
            return;
        }
        let info = ops::info(record.opcode);
        let Some(stream) = info.and_then(|info| work_stream(info, body)) else { return };
        let (ends, seq) = (Arc::clone(&self.ends), record.seq);
        let end = move |_: Status| {
            let now = RECORDER.clock();
            let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
            let before = ends.insert(stream.0, now).unwrap_or(0);
            RECORDER.work(Work {
                seq,
                stream: stream.0,
                times: [before.max(taken), now],
                name: String::new(),
            });
        };
        backend.after_work(call, stream, Box::new(end));
    }
}
