//! The status socket: it sends one JSON object to each connection and closes it.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::listen::{Files, bind_unix};
use super::{Server, Session};

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
        "sessions": sessions,
    })
}

fn row(worker: u32, session: &Session) -> serde_json::Value {
    json!({
        "worker": worker,
        "kind": session.kind.name(),
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
