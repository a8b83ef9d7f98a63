//! A session with little work waits for a bounded part of the other sessions' work, not for all of it.
//! Counted in copies and bytes, not in time.

mod support;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{Way, passes};
use support::{Rig, Running, TRANSPORTS, eventually};

#[test]
fn a_small_copy_does_not_wait_for_a_large_one_on_another_stream() -> Result<()> {
    for transport in ["local", "tcp"] {
        passes("fair_streams", Way::Client("software", transport), &["strict"])?;
    }
    Ok(())
}

/// Bytes that a program's sessions have sent to the server, which the server reports every second.
fn bytes_in(rig: &Rig, program: &str) -> Result<u64> {
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    let of = |session: &&serde_json::Value| session["program"] == program;
    Ok(sessions.iter().filter(of).filter_map(|session| session["bytes_in"].as_u64()).sum())
}

/// Maximum amount that an endlessly copying session may move while another session runs a short program: far
/// more than a busy machine moves in that time, and less than it moves before the short program counts as
/// hanging.
const MOST: u64 = 64 << 30;

#[test]
fn an_endlessly_copying_session_does_not_starve_others() -> Result<()> {
    let rig = Rig::start("fairness")?;
    for transport in TRANSPORTS {
        let busy = Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING")?;
        let before = bytes_in(&rig, "kill_me")?;
        // Launches, copies and synchronizations. It waits for a few dozen answers.
        rig.passes(transport, "streams_events", &[])?;
        let moved = bytes_in(&rig, "kill_me")? - before;
        ensure!(moved < MOST, "{moved} bytes were copied over {transport:?} meanwhile");
        busy.kill()?;
        // The next program must not count the bytes of this one.
        eventually(|| {
            let left = bytes_in(&rig, "kill_me")?;
            ensure!(left == 0, "a killed program's session, with {left} bytes, still stands");
            Ok(())
        })?;
    }
    Ok(())
}
