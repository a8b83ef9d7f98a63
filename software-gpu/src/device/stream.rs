//! Streams: queues whose operations run one after the other, each queue at the same time as the others.
//!
//! Each stream has a thread of its own, made at the first operation and ended when the last handle is
//! dropped and the queue is empty. Kernels run on the GPU's workers; the stream's thread only waits for them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::device::event::Event;
use crate::device::gpu::Gpu;
use crate::device::launch::{KernelRun, LaunchConfig};
use crate::device::module::Function;
use crate::error::{Error, Result};

type Call = Box<dyn FnOnce(&Gpu) -> Result<()> + Send>;

enum Operation {
    Launch(Arc<KernelRun>),
    Call(Call),
    Record(Event, u64),
    Wait(Event, u64),
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<Operation>,
    submitted: u64,
    completed: u64,
    has_thread: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }
}

struct Handle {
    gpu: Gpu,
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

/// An in-order queue of operations. Cloning gives another handle to the same stream; when the last one is
/// dropped, what was enqueued still runs.
#[derive(Clone)]
pub struct Stream {
    handle: Arc<Handle>,
}

impl Stream {
    pub(crate) fn new(gpu: Gpu) -> Stream {
        Stream { handle: Arc::new(Handle { gpu, shared: Arc::new(Shared::default()) }) }
    }

    fn push(&self, operation: Operation) -> Result<()> {
        let shared = &self.handle.shared;
        let mut queue = shared.lock();
        if !queue.has_thread {
            let (gpu, shared) = (self.handle.gpu.clone(), Arc::clone(shared));
            std::thread::Builder::new()
                .name("sgpu-stream".into())
                .spawn(move || run(&gpu, &shared))
                .map_err(|e| Error::Host { what: "a thread for a stream".into(), error: e.to_string() })?;
            queue.has_thread = true;
        }
        queue.operations.push_back(operation);
        queue.submitted += 1;
        drop(queue);
        shared.changed.notify_all();
        Ok(())
    }

    /// Enqueues a kernel. `params` is the parameter block: each parameter at its offset (see
    /// [`crate::FunctionInfo::params`]). What can be checked is checked now; what the kernel does wrong later
    /// becomes the GPU's sticky error. Never blocks.
    pub fn launch(&self, function: &Function, config: LaunchConfig, params: &[u8]) -> Result<()> {
        self.handle.gpu.status()?;
        let run = KernelRun::new(&self.handle.gpu, function, config, params)?;
        self.push(Operation::Launch(Arc::new(run)))
    }

    /// Enqueues a closure: a copy, a fill, a host callback. It runs in the stream's order, in the stream's thread,
    /// and holds back this stream only. If it fails, its error becomes the GPU's sticky error;
    /// it is dropped without being run once the GPU has a sticky error.
    pub fn enqueue(&self, call: impl FnOnce(&Gpu) -> Result<()> + Send + 'static) -> Result<()> {
        self.handle.gpu.status()?;
        self.push(Operation::Call(Box::new(call)))
    }

    /// Enqueues the recording of an event: it is reached when all before it in this stream is done, also when
    /// that failed.
    pub fn record(&self, event: &Event) -> Result<()> {
        let number = event.begin();
        self.push(Operation::Record(event.clone(), number))
    }

    /// What follows in this stream waits until the latest recording of `event` before this call is reached.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let number = event.latest();
        self.push(Operation::Wait(event.clone(), number))
    }

    /// Waits until everything enqueued before this call is done; returns the GPU's sticky error, if any.
    pub fn synchronize(&self) -> Result<()> {
        let mut queue = self.handle.shared.lock();
        let target = queue.submitted;
        while queue.completed < target {
            queue = self.handle.shared.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        drop(queue);
        self.handle.gpu.status()
    }

    /// Whether everything enqueued is done; returns the GPU's sticky error, if any.
    pub fn query(&self) -> Result<bool> {
        let queue = self.handle.shared.lock();
        let done = queue.completed == queue.submitted;
        drop(queue);
        self.handle.gpu.status()?;
        Ok(done)
    }
}

fn run(gpu: &Gpu, shared: &Shared) {
    loop {
        let mut queue = shared.lock();
        let operation = loop {
            match queue.operations.pop_front() {
                Some(operation) => break operation,
                None if queue.closed => return,
                None => queue = shared.changed.wait(queue).unwrap_or_else(|e| e.into_inner()),
            }
        };
        drop(queue);
        match operation {
            Operation::Record(event, number) => event.reach(number, gpu.now_ns()),
            Operation::Wait(event, number) => event.wait_for(number),
            Operation::Launch(kernel) if gpu.status().is_ok() => {
                if let Err(error) = gpu.execute(kernel) {
                    gpu.fail(error);
                }
            }
            Operation::Call(call) if gpu.status().is_ok() => match call(gpu) {
                Ok(()) => {}
                Err(error @ Error::Kernel { .. }) => gpu.fail(error),
                Err(error) => gpu.fail(Error::Operation(Arc::new(error))),
            },
            Operation::Launch(_) | Operation::Call(_) => {}
        }
        shared.lock().completed += 1;
        shared.changed.notify_all();
    }
}
