//! The status socket: it sends one JSON object to each connection and closes it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::listen::{Files, bind_unix};
use super::{Server, Session, State};

/// Starts serving the status at `path`.
pub(super) fn start(server: &Arc<Server>, path: &Path, files: &mut Files) -> anyhow::Result<()> {
    let listener = bind_unix(path, files)?;
    let server = Arc::clone(server);
    std::thread::Builder::new().name("rgpu-status".into()).spawn(move || {
        for stream in listener.incoming() {
            match stream {
                Ok(mut stream) => {
                    let text = format!("{:#}\n", describe(&server));
                    // The client may be gone, or may not read.
                    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
                    let _ = stream.write_all(text.as_bytes());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    })?;
    Ok(())
}

fn describe(server: &Server) -> serde_json::Value {
    let state = server.lock();
    let (backend, devices) = match &state.serving {
        Some((backend, devices)) => (Some(backend.as_str()), devices.as_slice()),
        None => (None, &[][..]),
    };
    let principals = principals(server, &state);
    let sessions: Vec<_> = state.sessions.iter().map(|(worker, session)| row(*worker, session)).collect();
    json!({
        "daemon": "rgpu-server",
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "listen": super::listen::addresses(&server.options.listen),
        "backend": backend,
        "devices": devices.join(", "),
        "workers_ready": state.gpu.idle.len(),
        "workers_starting": state.gpu.starting,
        "sessions_waiting": state.gpu.queue.len(),
        "draining": state.draining,
        "max_sessions": server.options.max_sessions,
        "sessions_begun": state.sessions_begun,
        "sessions_lost": state.sessions_lost,
        "workers_crashed": state.workers_crashed,
        "principals": principals,
        "sessions": sessions,
    })
}

/// Who has sessions, and what they hold.
fn principals(server: &Server, state: &State) -> Vec<serde_json::Value> {
    let mut all: BTreeMap<&str, Vec<&Session>> = BTreeMap::new();
    for session in state.sessions.values() {
        all.entry(&session.limits.principal).or_default().push(session);
    }
    let devices = server.devices(state);
    let row = |(principal, sessions): (&str, Vec<&Session>)| {
        let limits = &sessions.first()?.limits;
        let memory = |number: &u32| -> u64 {
            sessions.iter().map(|session| session.account.held(*number as usize)).sum()
        };
        Some(json!({
            "principal": principal,
            "sessions": sessions.len(),
            "weight": limits.weight,
            "priority": limits.priority,
            "exclusive": limits.exclusive,
            "device_memory": devices.iter().map(memory).sum::<u64>(),
            "device_memory_limit": limits.total.device_memory,
        }))
    };
    all.into_iter().filter_map(row).collect()
}

fn row(worker: u32, session: &Session) -> serde_json::Value {
    json!({
        "worker": worker,
        "kind": session.kind.name(),
        "principal": session.limits.principal,
        "devices": session.devices.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        "client": session.client,
        "program": session.program,
        "pid": session.pid,
        "transport": session.transport,
        "peer": session.peer,
        "seconds": session.since.elapsed().as_secs(),
        "commands": session.counters.commands,
        "bytes_in": session.counters.bytes_in,
        "bytes_out": session.counters.bytes_out,
        "bytes_copied": session.counters.bytes_copied,
        "device_memory": session.counters.device_memory,
    })
}
