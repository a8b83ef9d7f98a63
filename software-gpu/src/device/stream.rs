//! Streams: queues whose operations run in order, concurrently with other streams.
//!
//! Each stream has a thread, which starts with the first operation and exits when the last handle is dropped
//! and the queue is empty. Kernels run on the GPU's workers; the stream's thread only waits for them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::device::event::Event;
use crate::device::gpu::Gpu;
use crate::device::launch::KernelRun;
use crate::device::module::Function;
use crate::error::{Error, Result};
use crate::machine::launcher::LaunchConfig;

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

/// An in-order queue of operations. Clones refer to the same stream. When the last one is dropped, enqueued
/// operations still run.
#[derive(Clone)]
pub struct Stream {
    handle: Arc<Handle>,
}

impl Gpu {
    /// Creates a stream.
    pub fn stream(&self) -> Stream {
        Stream { handle: Arc::new(Handle { gpu: self.clone(), shared: Arc::new(Shared::default()) }) }
    }
}

impl Stream {
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

    /// Enqueues a kernel; never blocks. `params` is the parameter block, with each parameter at its offset
    /// (see [`crate::FunctionInfo::params`]). Invalid launches fail immediately. A fault in the kernel
    /// becomes the GPU's sticky error.
    pub fn launch(&self, function: &Function, config: LaunchConfig, params: &[u8]) -> Result<()> {
        self.handle.gpu.status()?;
        let run = KernelRun::new(&self.handle.gpu.inner.hardware, function, config, params)?;
        self.push(Operation::Launch(Arc::new(run)))
    }

    /// Enqueues a closure, such as a copy, a fill or a host callback. It runs in the stream's order on the
    /// stream's thread and delays only this stream. If it fails, its error becomes the GPU's sticky error.
    /// Once the GPU has a sticky error, closures are dropped without being run.
    pub fn enqueue(&self, call: impl FnOnce(&Gpu) -> Result<()> + Send + 'static) -> Result<()> {
        self.handle.gpu.status()?;
        self.push(Operation::Call(Box::new(call)))
    }

    /// Enqueues the recording of an event. It is reached when everything before it in this stream has
    /// finished, successfully or not.
    pub fn record(&self, event: &Event) -> Result<()> {
        let number = event.begin();
        self.push(Operation::Record(event.clone(), number))
    }

    /// Makes later operations in this stream wait for the latest recording of `event` before this call.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let number = event.latest();
        self.push(Operation::Wait(event.clone(), number))
    }

    /// Waits until everything enqueued before this call has finished. Returns the GPU's sticky error, if any.
    pub fn synchronize(&self) -> Result<()> {
        let mut queue = self.handle.shared.lock();
        let target = queue.submitted;
        while queue.completed < target {
            queue = self.handle.shared.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        drop(queue);
        self.handle.gpu.status()
    }

    /// Whether everything enqueued has finished. Returns the GPU's sticky error, if any.
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
