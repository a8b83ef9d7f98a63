//! Memory operations of streams: waiting for a word of memory, and writing one, in stream order.
//!
//! The device handles words that it can access. For words of pinned memory that it can't access (the GPU is
//! in another machine, or is the software GPU), this process does the work: a write is one of this library's
//! functions in stream order; a wait holds the stream, like a host function, until a thread here sees the
//! condition met.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use crate::abi::arguments::non_null;
use crate::abi::result::Result;
use crate::abi::types::BatchMemOp;
use crate::memory::managed::{self, mirror};
use crate::memory::{address, pinned_regions};
use crate::process::context;
use crate::process::device_attributes::attr;
use crate::process::driver::{Device, Driver};
use crate::process::fences;
use crate::process::holds;
use crate::process::host_calls::{self, WAITING};
use crate::process::stream::Stream;
use crate::streams::stream_table;
use crate::work::host_function::{self, Function};
use client::channel::MAX_SERVERS;
use client::handle::{StreamId, TicketId};
use client::ops::stream::{MemoryOp, StreamBatchMemOp, StreamHostSignal, StreamMark, memory_op};
use client::seq::Seq;
use client::session::Session;
use client::{Status, lock, log};

/// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`, which only the first form of the functions accepts. There is
/// always a barrier.
const NO_MEMORY_BARRIER: u32 = 1;
/// Pauses between checks of a word in this process: the first, and the longest.
const FIRST_NAP: Duration = Duration::from_micros(20);
const LAST_NAP: Duration = Duration::from_millis(1);

/// Operations as the program passed them, after checking.
pub(crate) struct Operations {
    /// What the program may read back.
    pub given: Box<[BatchMemOp]>,
    ops: Vec<Checked>,
}

/// An operation, and where its word is.
struct Checked {
    op: MemoryOp,
    place: Where,
}

/// Which side has a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    /// The device, or memory that the device can access.
    Device,
    /// The device and this process in turn.
    InTurn,
    /// This process.
    Here,
}

/// A stream's wait for a word of this process.
struct HostWait {
    stream: Arc<Stream>,
    mark: Seq,
    ticket: TicketId,
    op: MemoryOp,
}

/// The waits of a server's streams, and the thread that ends them.
struct Waits {
    all: Mutex<VecDeque<HostWait>>,
    came: Condvar,
    start: Once,
}

impl Waits {
    const fn new() -> Waits {
        Waits { all: Mutex::new(VecDeque::new()), came: Condvar::new(), start: Once::new() }
    }
}

/// Indexed by session.
static WAITS: [Waits; MAX_SERVERS] = [const { Waits::new() }; MAX_SERVERS];

/// Whether an operation's word is in pinned memory.
fn is_pinned(op: &MemoryOp) -> bool {
    let found = pinned_regions::REGIONS.find(op.address as usize);
    found.is_some_and(|(base, size, _)| op.width() <= (size - (op.address as usize - base)) as u64)
}

/// Reads a word of this process. Pinned memory stays until the streams that use it are done.
fn load(op: &MemoryOp) -> u64 {
    // SAFETY: checked to be aligned and inside pinned memory. The program and the device may write it at any
    // time, so the access is atomic.
    unsafe {
        if op.width() == 8 {
            AtomicU64::from_ptr(op.address as *mut u64).load(Ordering::Acquire)
        } else {
            AtomicU32::from_ptr(op.address as *mut u32).load(Ordering::Acquire).into()
        }
    }
}

fn store(op: &MemoryOp) {
    // SAFETY: checked to be aligned and inside pinned memory. The program and the device may access it at any
    // time, so the access is atomic.
    unsafe {
        if op.width() == 8 {
            AtomicU64::from_ptr(op.address as *mut u64).store(op.value, Ordering::Release);
        } else {
            AtomicU32::from_ptr(op.address as *mut u32).store(op.value as u32, Ordering::Release);
        }
    }
}

impl Operations {
    /// Checks operations against the device and the process's memory. `first`: by the rules of the functions'
    /// first form.
    pub fn new(driver: &Driver, device: &Device, given: &[BatchMemOp], first: bool) -> Result<Operations> {
        if given.is_empty() || given.len() > memory_op::MOST {
            return Err(Status::INVALID_VALUE);
        }
        let ops: Result<Vec<Checked>> = given.iter().map(|op| check(driver, device, op, first)).collect();
        let made = Operations { given: given.into(), ops: ops? };
        if made.wait() {
            // A copy behind the wait must not return early: the work that another thread then puts on another
            // stream, to end the wait, would come behind the copy.
            fences::host_sees();
        }
        Ok(made)
    }

    /// As described by a graph node.
    ///
    /// # Safety
    /// `given` is readable for `count` entries.
    pub unsafe fn described(
        driver: &Driver,
        ctx: usize,
        given: *const BatchMemOp,
        count: u32,
    ) -> Result<Operations> {
        let context = if ctx == 0 { context::current()? } else { context::of(ctx)? };
        let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
        // SAFETY: guaranteed by the caller.
        Operations::new(driver, device, unsafe { slice(given, count) }?, false)
    }

    /// A wait on the device, for tests of plans that contain one.
    #[cfg(test)]
    pub fn waiting() -> Arc<Operations> {
        let op = MemoryOp { operation: memory_op::WAIT_32, flags: 0, address: 0, value: 1 };
        Arc::new(Operations { given: Box::new([]), ops: vec![Checked { op, place: Where::Device }] })
    }

    /// Whether any of them waits.
    pub fn wait(&self) -> bool {
        self.ops.iter().any(|Checked { op, .. }| op.is_wait())
    }

    /// Whether the device does all of them.
    pub fn is_on_device(&self) -> bool {
        self.ops.iter().all(|op| op.place != Where::Here)
    }

    /// All of them as one operation of the server. `None` if some are for this process.
    pub fn op(&self) -> Option<StreamBatchMemOp> {
        self.is_on_device().then(|| on_server(StreamId(0), &self.ops))
    }

    /// Puts them on a stream that is not being captured.
    pub fn run(&self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        for ops in self.ops.chunk_by(|a, b| a.place != Where::Here && b.place != Where::Here) {
            let Checked { op, place } = &ops[0];
            if *place != Where::Here {
                let order = ops
                    .iter()
                    .filter(|op| op.place == Where::InTurn)
                    .map(|Checked { op, .. }| managed::before_work_on(op.address, op.width()))
                    .collect::<Result<Vec<_>>>()?;
                managed::before_telling()?;
                let waits = ops.iter().any(|Checked { op, .. }| op.is_wait());
                if waits {
                    stream_table::before_program(stream)?;
                }
                let seq = stream.work(&on_server(stream.id, ops))?;
                drop(order);
                if waits {
                    holds::waits(stream, seq);
                }
            } else if !is_pinned(op) {
                return Err(Status::INVALID_VALUE);
            } else if op.is_wait() {
                wait_here(driver, stream, op)?;
            } else {
                let op = op.clone();
                let write = Function::Own(Box::new(move || store(&op)));
                host_function::on(driver, stream.clone(), write, std::ptr::null_mut())?;
            }
        }
        Ok(())
    }
}

fn on_server(stream: StreamId, ops: &[Checked]) -> StreamBatchMemOp {
    StreamBatchMemOp { stream, operations: ops.iter().map(|Checked { op, .. }| op.clone()).collect() }
}

/// One operation, checked.
fn check(driver: &Driver, device: &Device, given: &BatchMemOp, first: bool) -> Result<Checked> {
    let operation = given.operation;
    let mut op = MemoryOp { operation, flags: given.flags, address: given.address, value: given.value };
    match operation {
        memory_op::WRITE_32 | memory_op::WRITE_64 if first => op.flags &= !NO_MEMORY_BARRIER,
        memory_op::BARRIER if first => return Err(Status::INVALID_VALUE),
        memory_op::FLUSH_REMOTE_WRITES | memory_op::BARRIER => {
            op = MemoryOp { operation, flags: given.short_flags, address: 0, value: 0 };
        }
        _ => {}
    }
    if !op.is_valid() {
        return Err(Status::INVALID_VALUE);
    }
    let has = |number: usize| device.attribute(number) == 1;
    let nor =
        if first { attr::CAN_USE_STREAM_WAIT_VALUE_NOR_V1 } else { attr::CAN_USE_STREAM_WAIT_VALUE_NOR };
    let wide =
        if first { attr::CAN_USE_64_BIT_STREAM_MEM_OPS_V1 } else { attr::CAN_USE_64_BIT_STREAM_MEM_OPS };
    let flushes = op.is_wait() && op.flags & memory_op::WAIT_FLUSH != 0;
    if first && !has(attr::CAN_USE_STREAM_MEM_OPS_V1)
        || op.width() == 8 && !has(wide)
        || op.is_wait() && op.flags & !memory_op::WAIT_FLUSH == memory_op::WAIT_NOR && !has(nor)
        || (flushes || operation == memory_op::FLUSH_REMOTE_WRITES) && !has(attr::CAN_FLUSH_REMOTE_WRITES)
    {
        return refuse_form!("a memory operation of streams that the device has not (see its attributes)");
    }
    place(driver, device, &op).map(|place| Checked { op, place })
}

/// Which side has an operation's word.
fn place(driver: &Driver, device: &Device, op: &MemoryOp) -> Result<Where> {
    if op.width() == 0 {
        return Ok(Where::Device);
    }
    match address::check_near(driver, device.server, op.address, op.width()) {
        // Devices cannot access another server's memory.
        Ok(found) if !std::ptr::eq(found.context.server, device.server) => Err(Status::INVALID_VALUE),
        Ok(found) if !found.managed => Ok(Where::Device),
        Ok(_) if mirror::is_here(op.address) => Ok(Where::InTurn),
        // CUDA has no memory operations on managed memory.
        Ok(_) => Err(Status::INVALID_VALUE),
        Err(_) if pinned_regions::is_mapped(device.server, op.address) => Ok(Where::Device),
        Err(_) if is_pinned(op) => Ok(Where::Here),
        Err(status) => Err(status),
    }
}

/// Holds a stream until a word of this process meets the condition.
fn wait_here(driver: &'static Driver, stream: &Arc<Stream>, op: &MemoryOp) -> Result {
    let session = stream.session();
    let waits = &WAITS[session.index()];
    waits.start.call_once(|| {
        let started = std::thread::Builder::new()
            .name("rgpu-waits".into())
            .spawn(move || serve(driver, session, waits));
        if let Err(error) = started {
            log::error(format_args!("cannot start the thread for streams that wait for memory: {error}"));
        }
    });
    stream_table::before_program(stream)?;
    let ticket = host_calls::ticket();
    let mut all = lock(&waits.all);
    let mark = stream.publishing_work(&StreamMark { stream: stream.id })?;
    let seq = stream.wait_for_ticket(ticket)?;
    holds::waits(stream, seq);
    WAITING.fetch_add(1, Ordering::AcqRel);
    all.push_back(HostWait { stream: stream.clone(), mark, ticket, op: op.clone() });
    waits.came.notify_one();
    Ok(())
}

/// Releases the streams whose conditions hold. Returns `None` if any was released, `Some(true)` if streams
/// only wait, `Some(false)` if none waits.
fn look(driver: &'static Driver, waits: &Waits) -> Option<bool> {
    let (mut some, mut went) = (false, false);
    lock(&waits.all).retain(|wait| {
        if !wait.stream.has_passed(wait.mark) {
            return true;
        }
        some = true;
        if !wait.op.holds(load(&wait.op)) {
            return true;
        }
        went = true;
        managed::before_going_on(driver);
        // If the session is lost, nothing continues.
        let _ = wait.stream.session().append(&StreamHostSignal { ticket: wait.ticket });
        WAITING.fetch_sub(1, Ordering::AcqRel);
        false
    });
    (!went).then_some(some)
}

fn serve(driver: &'static Driver, session: &Session, waits: &Waits) {
    let mut nap = FIRST_NAP;
    loop {
        {
            let mut all = lock(&waits.all);
            while all.is_empty() {
                all = waits.came.wait(all).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let lost = match look(driver, waits) {
            None => {
                nap = FIRST_NAP;
                false
            }
            Some(true) => {
                std::thread::sleep(nap);
                nap = (nap * 2).min(LAST_NAP);
                session.check().is_err()
            }
            Some(false) => {
                let come = || lock(&waits.all).iter().any(|wait| wait.stream.has_passed(wait.mark));
                session.wait_progress(come).is_err()
            }
        };
        if lost {
            let mut all = lock(&waits.all);
            WAITING.fetch_sub(all.len(), Ordering::AcqRel);
            all.clear();
        }
    }
}

/// A program's array of operations.
///
/// # Safety
/// NULL, or readable for `count` entries.
pub(crate) unsafe fn slice<'a>(given: *const BatchMemOp, count: u32) -> Result<&'a [BatchMemOp]> {
    non_null(given)?;
    if count as usize > memory_op::MOST {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: not NULL, and as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(given, count as usize) })
}
