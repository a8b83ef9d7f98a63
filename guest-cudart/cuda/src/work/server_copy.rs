//! Copies between servers, and work on memory of another server than the stream's.
//!
//! Such work holds its stream, like a host function, when the stream reaches it. A thread of this process
//! then does the work on streams of the servers that have the memory, and the stream continues. So the
//! program's threads don't wait, and events and streams order the work at both ends as on one machine.
//!
//! ```text
//!  server A ── MemcpyDtoH ──▶ slot (pinned memory that both servers know) ── MemcpyHtoD ──▶ server B
//! ```
//!
//! If the servers' workers have a direct connection ([`direct_copy`]), the bytes take it. Otherwise they pass
//! through this process's memory, [`SLOTS`] pieces at a time, without being touched by its CPU.
//!
//! The thread's own streams wait for nothing, and it begins only work whose stream has reached it, or which
//! comes right behind a copy that is under way. What such work must come behind, its stream waits for, from
//! the moment of the call. So every wait is for something earlier, and no two can be for each other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::memory::managed;
use crate::memory::pinned_regions::{HostTag, REGIONS};
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::process::fences;
use crate::process::ids::unique_id;
use crate::process::server_waits;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use crate::work::direct_copy::{self, UnderWay};
use crate::work::host_function::{self, Across, Function, Others};
use client::data::{HostIn, HostOut};
use client::ops::copy::{MemcpyDtoH, MemcpyDtoH3D, MemcpyHtoD, MemcpyHtoD3D, Pitched};
use client::seq::Seq;
use client::{Status, lock};

/// Slot size in bytes.
pub(crate) const SLOT: usize = 1 << 20;
/// Slots per copy.
pub(crate) const SLOTS: usize = 4;

/// The streams for this work, one per context.
static STREAMS: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// Addresses of unused slots. They stay registered.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A context's stream for such work. It waits for nothing.
pub(crate) fn stream_of(context: &'static Context) -> Result<Arc<Stream>> {
    let found = |streams: &mut Vec<Arc<Stream>>| {
        streams.retain(|stream| !stream.is_finished());
        streams.iter().find(|stream| std::ptr::eq(stream.context, context)).cloned()
    };
    if let Some(stream) = found(&mut lock(&STREAMS)) {
        return Ok(stream);
    }
    // Without the lock: the server may have no room for these records.
    fences::before_stream(context.server)?;
    let made = stream_table::unnamed(context)?;
    let mut streams = lock(&STREAMS);
    if let Some(other) = found(&mut streams) {
        drop(streams);
        stream_table::end(made);
        return Ok(other);
    }
    streams.push(made.clone());
    Ok(made)
}

/// The copies to a server's memory that the program was told are done, or natively would be: the streams of
/// those that may not be, and the records behind them. Such work in this context has to come behind them.
fn told(home: &'static Context) -> Result<Vec<(Arc<Stream>, Seq)>> {
    // Nothing waits for a lost server.
    home.session().check()?;
    // From the first such work on, copies leave fences.
    stream_of(home)?;
    Ok(fences::before_others(home.server))
}

/// A live context on the memory's server: the one it was made in, or else its device's primary context.
pub(crate) fn alive(driver: &'static Driver, context: &'static Context) -> &'static Context {
    if context.is_alive() {
        return context;
    }
    driver.devices.get(context.device as usize).map_or(context, |device| device.primary)
}

/// Runs `work` on a stream of another server's context when `stream`, which must not be in a capture, reaches
/// it. `now`: waits for the stream and for the work.
pub(crate) fn on_other(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    home: &'static Context,
    now: bool,
    work: impl FnOnce(&Arc<Stream>) -> Result + Send + 'static,
) -> Result {
    let home = alive(driver, home);
    let all = move || {
        let other = stream_of(home)?;
        work(&other)?;
        other.synchronize()
    };
    if now {
        let told = told(home)?;
        stream.synchronize_as_operation()?;
        if stream.is_legacy() {
            home.legacy().synchronize()?;
        }
        home.session().wait_progress(|| told.iter().all(|(other, record)| other.has_passed(*record)))?;
        return all();
    }
    across(driver, stream, &[home], all)
}

/// Linear device memory, as rows and slices.
#[derive(Clone)]
pub(crate) struct Linear {
    pub context: &'static Context,
    pub place: Pitched,
}

/// A piece of a copy: its place at both ends, and its bytes, rows and slices. It has at most [`SLOT`] bytes.
pub(crate) struct Part {
    pub dst: u64,
    pub src: u64,
    pub extent: [u64; 3],
}

impl Part {
    pub(crate) fn bytes(&self) -> usize {
        self.extent.iter().product::<u64>() as usize
    }

    fn is_a_row(&self) -> bool {
        self.extent[1] == 1 && self.extent[2] == 1
    }

    /// Splits it into parts of at most `most` bytes if it is a single row.
    pub(crate) fn cut(&self, most: usize) -> impl Iterator<Item = Part> + use<> {
        let Part { dst, src, extent } = *self;
        let step = if self.is_a_row() { most as u64 } else { extent[0].max(1) };
        (0..extent[0]).step_by(step as usize).map(move |at| {
            let width = step.min(extent[0] - at);
            Part { dst: dst + at, src: src + at, extent: [width, extent[1], extent[2]] }
        })
    }
}

/// A copy's extent (width in bytes, height in rows, depth in slices) and its parts, which are all of it.
pub(crate) struct Split {
    pub extent: [u64; 3],
    pub parts: Vec<Part>,
}

impl Split {
    pub(crate) fn bytes(&self) -> usize {
        self.extent.iter().product::<u64>() as usize
    }
}

/// Makes a copy from one server's memory to another's when a stream reaches it. `spans`: all bytes written
/// and read.
pub(crate) fn between(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    dst: Linear,
    src: Linear,
    spans: [(u64, u64); 2],
    split: Split,
) -> Result {
    let ends = [alive(driver, dst.context), alive(driver, src.context)];
    let (dst, src) = (Linear { context: ends[0], ..dst }, Linear { context: ends[1], ..src });
    across(driver, stream, &ends, Between { dst, src, spans, split, under_way: None })
}

/// A copy from one server's memory to another's.
struct Between {
    dst: Linear,
    src: Linear,
    spans: [(u64, u64); 2],
    split: Split,
    under_way: Option<UnderWay>,
}

impl Between {
    fn streams(&self) -> Result<[Arc<Stream>; 2]> {
        Ok([stream_of(self.dst.context)?, stream_of(self.src.context)?])
    }
}

impl Across for Between {
    fn begin(&mut self, ahead: bool) -> bool {
        if self.under_way.is_none()
            && let Ok([to, from]) = self.streams()
        {
            let begun =
                direct_copy::begin((&to, &self.dst), (&from, &self.src), self.spans, &self.split, ahead);
            // Whoever finishes it begins it again, and then has the error.
            self.under_way = begun.ok().flatten();
        }
        self.under_way.is_some()
    }

    fn finish(self: Box<Between>) -> Result {
        let [to, from] = self.streams()?;
        let Between { dst, src, spans, split, under_way } = *self;
        let carried = match under_way {
            Some(under_way) => under_way.finish(),
            None => direct_copy::carry((&to, &dst), (&from, &src), spans, &split)?,
        };
        if carried {
            return Ok(());
        }
        let parts = split.parts;
        let slots = Slots::take(src.context, parts.len())?;
        let carried = carry_through(&slots, (&to, &dst), (&from, &src), spans, parts);
        if carried.is_err() {
            // Neither server may use the slots any more. A lost server doesn't.
            let _ = from.synchronize();
            let _ = to.synchronize();
        }
        carried
    }
}

/// Does work in this process when a stream reaches it, for contexts of other servers and possibly also of the
/// stream's.
pub(crate) fn across(
    driver: &'static Driver,
    stream: &Arc<Stream>,
    ends: &[&'static Context],
    work: impl Across + 'static,
) -> Result {
    by_default_streams(stream, ends, || {
        // Whoever gave the stream has ordered it behind those of its own server.
        for home in ends.iter().filter(|home| !std::ptr::eq(home.server, stream.context.server)) {
            for (other, record) in told(home)? {
                server_waits::hold(stream, &other, record)?;
            }
        }
        let others =
            Others::of(stream.session().index(), ends.iter().map(|home| home.server.session.index()));
        let copy = Function::Copy(others, Box::new(work));
        host_function::on(driver, stream.clone(), copy, std::ptr::null_mut())
    })
}

/// Puts a copy between memory of these contexts on a stream. That of a default stream comes after what the
/// default streams of the contexts' devices have now, and before what they get later: a copy in the NULL
/// stream "does not start until all commands previously issued to either device have completed, and runs to
/// completion before any commands issued after the copy to either device can start" (CUDA C++ Programming
/// Guide, "Peer-to-Peer Memory Copy").
pub(crate) fn by_default_streams<T>(
    stream: &Arc<Stream>,
    homes: &[&'static Context],
    put: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let is_other = |(at, context): &(usize, &&'static Context)| {
        let again = homes[..*at].iter().any(|before| std::ptr::eq(*before, **context));
        !again && context.device != stream.context.device && context.is_alive()
    };
    let others = || homes.iter().enumerate().filter(is_other).map(|(_, context)| context.legacy());
    if !stream.is_legacy() || others().next().is_none() {
        return put();
    }
    for legacy in others() {
        // Nothing is put on the stream for a lost server.
        legacy.session().check()?;
        server_waits::join(legacy, stream)?;
    }
    let done = put()?;
    for legacy in others() {
        stream_table::before_work(legacy)?;
        server_waits::join(stream, legacy)?;
    }
    Ok(done)
}

/// The slots of one copy, returned when dropped.
pub(crate) struct Slots(pub Vec<usize>);

impl Slots {
    /// Takes as many as a copy of this many parts uses.
    pub(crate) fn take(context: &'static Context, parts: usize) -> Result<Slots> {
        let mut slots = Slots(Vec::new());
        while slots.0.len() < parts.min(SLOTS) {
            let free = lock(&FREE).pop();
            let slot = match free {
                Some(slot) => slot,
                None => {
                    let tag = HostTag { context, flags: 0, buffer: unique_id() };
                    let session = context.session();
                    let made = REGIONS.alloc(session, SLOT, None, tag).map_err(|error| {
                        session.no_memory(format_args!("no memory for a copy between servers"), &error)
                    });
                    match made {
                        Ok(slot) => slot,
                        // Fewer are enough.
                        Err(_) if !slots.0.is_empty() => break,
                        Err(status) => return Err(status),
                    }
                }
            };
            slots.0.push(slot);
        }
        Ok(slots)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        lock(&FREE).append(&mut self.0);
    }
}

/// Makes a copy, from worker to worker or else through slots. All bytes have arrived when this returns.
pub(crate) fn carry(dst: Linear, src: Linear, spans: [(u64, u64); 2], split: Split) -> Result {
    Box::new(Between { dst, src, spans, split, under_way: None }).finish()
}

fn carry_through(
    slots: &Slots,
    (to, dst): (&Arc<Stream>, &Linear),
    (from, src): (&Arc<Stream>, &Linear),
    spans: [(u64, u64); 2],
    parts: Vec<Part>,
) -> Result {
    let [(written, write_len), (read, read_len)] = spans;
    managed::lend(read, read_len)?;
    let known = |session, slot: usize, len| REGIONS.range(session, slot, len).ok_or(Status::OUT_OF_MEMORY);
    // Slots, and the marks after their last use at the destination.
    let mut free: VecDeque<(usize, Option<Seq>)> = slots.0.iter().map(|slot| (*slot, None)).collect();
    let mut coming: VecDeque<(usize, Part, Seq)> = VecDeque::new();
    let mut parts = parts.into_iter();
    loop {
        while let Some((slot, used)) = free.front().copied()
            && let Some(part) = parts.next()
        {
            free.pop_front();
            if let Some(mark) = used {
                to.session().wait_progress(|| to.has_passed(mark))?;
            }
            let range = HostOut(known(from.session(), slot, part.bytes())?);
            if part.is_a_row() {
                from.work(&MemcpyDtoH { stream: from.id, src: part.src, dst: range })?;
            } else {
                let place = Pitched { address: part.src, ..src.place.clone() };
                from.work(&MemcpyDtoH3D { stream: from.id, src: place, extent: part.extent, dst: range })?;
            }
            coming.push_back((slot, part, from.mark()?));
        }
        let Some((slot, part, mark)) = coming.pop_front() else { break };
        from.session().wait_progress(|| from.has_passed(mark))?;
        from.context.deferred()?;
        let range = HostIn::Range(known(to.session(), slot, part.bytes())?);
        let _order = managed::before_work_on(written, write_len)?;
        if part.is_a_row() {
            to.work(&MemcpyHtoD { stream: to.id, dst: part.dst, src: range })?;
        } else {
            let place = Pitched { address: part.dst, ..dst.place.clone() };
            to.work(&MemcpyHtoD3D { stream: to.id, dst: place, extent: part.extent, src: range })?;
        }
        free.push_back((slot, Some(to.mark()?)));
    }
    to.synchronize()
}
