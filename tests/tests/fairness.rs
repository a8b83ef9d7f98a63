//! Who has little to do waits for a bounded part of what others have to do, not for all of it. Counted in copies and in bytes, not in time.

mod support;

use anyhow::{Context, Result, ensure};
use rgpu_tests::programs::{Way, passes};
use support::{Rig, Running, TRANSPORTS};

#[test]
fn a_small_copy_does_not_wait_for_a_large_one_on_another_stream() -> Result<()> {
    for transport in ["local", "tcp"] {
        passes("fair_streams", Way::Client("software", transport), &["strict"])?;
    }
    Ok(())
}

/// Bytes that the sessions of a program have sent to the server so far, as the server tells once a second.
fn bytes_in(rig: &Rig, program: &str) -> Result<u64> {
    let status = rig.server.status()?;
    let sessions = status["sessions"].as_array().context("no sessions")?;
    let of = |session: &&serde_json::Value| session["program"] == program;
    Ok(sessions.iter().filter(of).filter_map(|session| session["bytes_in"].as_u64()).sum())
}

/// What a session that copies without end may move while another runs a short program from its start to its end: far more than a
/// busy machine moves meanwhile, and less than in the time after which the short program is taken to hang.
const MOST: u64 = 64 << 30;

#[test]
fn an_endlessly_copying_session_does_not_starve_others() -> Result<()> {
    let rig = Rig::start("fairness")?;
    for transport in TRANSPORTS {
        let busy = Running::start(rig.program(transport, "kill_me")?.arg("copy"), "RUNNING")?;
        let before = bytes_in(&rig, "kill_me")?;
        // Launches, copies and synchronizations: some dozen answers that it waits for.
        rig.passes(transport, "streams_events", &[])?;
        let moved = bytes_in(&rig, "kill_me")? - before;
        ensure!(moved < MOST, "{moved} bytes were copied over {transport:?} meanwhile");
        busy.kill()?;
    }
    Ok(())
}
