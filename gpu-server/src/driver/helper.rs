//! Threads for calls that may take long. Neither the dispatcher nor a thread that ends waits makes those: all
//! other work of the session would wait with it.

use std::sync::mpsc;

use protocol::Status;

use super::call::Result;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that does its jobs one at a time, in the order in which they were given. Clones share it. It ends
/// with the last of them, after all jobs.
#[derive(Clone)]
pub struct Helper(mpsc::Sender<Job>);

impl Helper {
    /// Starts the thread. `name` has at most 15 bytes.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the process may have no more threads.
    pub fn start(name: &str) -> Result<Helper> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name(name.into());
        thread.spawn(move || jobs.into_iter().for_each(|job| job())).map_err(|e| {
            tracing::error!("cannot start the thread {name}: {e}");
            Status::OUT_OF_MEMORY
        })?;
        Ok(Helper(sender))
    }

    /// Gives the thread a job.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The thread ends with its last owner.
        let _ = self.0.send(Box::new(job));
    }
}
