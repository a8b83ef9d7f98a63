//! Memory operations of streams. A waiting stream sleeps. Other streams' memory operations wake it, and it
//! polls for what kernels, copies and other processes write.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use protocol::ops::stream::{MemoryOp, memory_op};
use software_gpu::{Gpu, Result};

/// Pauses between a waiting stream's first polls, and between its later ones.
const FIRST_NAP: Duration = Duration::from_micros(20);
const LAST_NAP: Duration = Duration::from_millis(1);

/// Rung when a stream has written a word.
#[derive(Default)]
pub(super) struct Bell {
    rung: Mutex<u64>,
    heard: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap_or_else(|e| e.into_inner()) += 1;
        self.heard.notify_all();
    }

    /// Executes operations, each on the device that has its word. `gone` tells whether the stream was
    /// destroyed.
    pub(super) fn run(&self, all: &[(MemoryOp, Gpu)], gone: &dyn Fn() -> bool) -> Result<()> {
        all.iter().try_for_each(|(op, gpu)| run(op, gpu, self, gone))
    }

    /// Waits until `done`.
    fn wait_until(&self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut nap = FIRST_NAP;
        loop {
            let before = *self.rung.lock().unwrap_or_else(|e| e.into_inner());
            if done()? {
                return Ok(());
            }
            let rung = self.rung.lock().unwrap_or_else(|e| e.into_inner());
            if *rung == before {
                drop(self.heard.wait_timeout(rung, nap));
            }
            nap = (nap * 2).min(LAST_NAP);
        }
    }
}

fn run(op: &MemoryOp, gpu: &Gpu, bell: &Bell, gone: &dyn Fn() -> bool) -> Result<()> {
    let wide = op.width() == 8;
    match op.operation {
        _ if op.is_wait() => {
            bell.wait_until(|| Ok(gone() || gpu.is_cancelled() || op.holds(gpu.load(op.address, wide)?)))
        }
        memory_op::WRITE_32 | memory_op::WRITE_64 => {
            gpu.store(op.address, wide, op.value)?;
            bell.ring();
            Ok(())
        }
        // A stream's operations are ordered anyway.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use software_gpu::{FIRST_ADDRESS, GRANULE, GpuConfig};

    fn gpu() -> Gpu {
        let gpu = Gpu::new(GpuConfig { workers: 1, ..GpuConfig::default() }).unwrap();
        gpu.map(FIRST_ADDRESS, GRANULE).unwrap();
        gpu.place(FIRST_ADDRESS, 64).unwrap();
        gpu
    }

    fn op(operation: u32, value: u64) -> MemoryOp {
        MemoryOp { operation, flags: 0, address: FIRST_ADDRESS, value }
    }

    #[test]
    fn a_wait_ends_when_its_word_is_written_by_an_operation_or_otherwise() {
        let (gpu, bell) = (gpu(), Bell::default());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| run(&op(memory_op::WAIT_32, 1), &gpu, &bell, &|| false));
            run(&op(memory_op::WRITE_32, 1), &gpu, &bell, &|| false).unwrap();
            waits.join().unwrap().unwrap();
            let waits = scope.spawn(|| run(&op(memory_op::WAIT_64, 9), &gpu, &bell, &|| false));
            gpu.write(FIRST_ADDRESS, &9u64.to_le_bytes()).unwrap();
            waits.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_wait_ends_with_its_stream_its_device_or_its_memory() {
        let (gpu, bell) = (gpu(), Bell::default());
        let wait = op(memory_op::WAIT_32, 1);
        run(&wait, &gpu, &bell, &|| true).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| run(&wait, &gpu, &bell, &|| false));
            gpu.release(FIRST_ADDRESS).unwrap();
            waits.join().unwrap().unwrap_err();
            gpu.place(FIRST_ADDRESS, 64).unwrap();
            let waits = scope.spawn(|| run(&wait, &gpu, &bell, &|| false));
            gpu.cancel();
            waits.join().unwrap().unwrap();
        });
    }
}
