//! Programs that start together while creating contexts is slow. They wait, say so, and are served. NVML
//! queries do not wait.

mod support;

use anyhow::{Result, ensure};
use rgpu_tests::programs::{self, Outcome};
use support::{Rig, TRANSPORTS, Transport, eventually};

/// Runs this many copies of a program at once.
fn together(rig: &Rig, transport: Transport, name: &str, count: usize) -> Result<Vec<Outcome>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..count)
            .map(|_| scope.spawn(|| programs::run(&mut rig.program(transport, name)?, programs::LIMIT)))
            .collect();
        running
            .into_iter()
            .map(|program| program.join().unwrap_or_else(|_| anyhow::bail!("a thread of the test failed")))
            .collect()
    })
}

#[test]
fn programs_report_that_they_wait_in_the_queue() -> Result<()> {
    // At most as many contexts are created at a time as there are processors, so the last programs wait for
    // several.
    let processors = std::thread::available_parallelism().map_or(1, usize::from).max(2);
    let rig = Rig::with("queue", &["--software-imitate", "context-ms=3000"], &[])?;
    for transport in TRANSPORTS {
        let outcomes = together(&rig, transport, "vectorAdd", 3 * processors)?;
        for outcome in &outcomes {
            outcome.verdict("vectorAdd")?;
        }
        let waited = outcomes.iter().any(|outcome| {
            outcome.stderr.contains("rgpu: waiting for a GPU session on ")
                && outcome.stderr.contains(" ahead of this program")
                && outcome.stderr.contains("rgpu: the GPU session on ")
        });
        ensure!(waited, "over {transport:?}: no program said that it waited: {outcomes:?}");
    }
    Ok(())
}

#[test]
fn nvml_works_without_a_context_while_programs_wait() -> Result<()> {
    let rig = Rig::with("queue-nvml", &["--workers", "0", "--software-imitate", "context-ms=600000"], &[])?;
    for transport in TRANSPORTS {
        let mut waiting = rig.program(transport, "vectorAdd")?.spawn()?;
        eventually(|| {
            let status = rig.server.status()?;
            ensure!(status["sessions_waiting"] == 1, "{status}");
            Ok(())
        })?;
        rig.passes(transport, "nvml_questions", &[])?;
        waiting.kill()?;
        waiting.wait()?;
        eventually(|| {
            let status = rig.server.status()?;
            ensure!(status["sessions_waiting"] == 0, "a killed program waits still: {status}");
            Ok(())
        })?;
    }
    Ok(())
}
