//! `rgpuctl`'s requests to the keeper, over a Unix socket that only the daemon's user and root can open: one
//! JSON object each way, then the connection closes. rgpu-server has the same requests.
//!
//! ```text
//!   {"upgrade": {}}     {"upgrading": {"sessions": 3, "version": …}}, then another program takes over
//!   {"version": {}}     {"version": …, "pid": 7, "sessions": 3}
//! ```
//!
//! A failed request is answered with `{"error": "why"}`.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::process::Processes;
use super::status::Own;
use super::takeover::Succession;
use crate::sockets::Listening;

/// Maximum size of a request in bytes.
const MAX_REQUEST: u64 = 4096;
/// How long a client may take to send its request, and to receive the answer.
const WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Upgrade {},
    Version {},
}

/// Serves requests until the socket is stopped.
pub fn serve(
    listening: &Listening,
    processes: &Arc<Processes>,
    own: &Arc<Own>,
    succession: &Arc<Succession>,
) {
    while let Some((connection, stays)) = listening.accept_patiently("admin", succession) {
        let mut stream = UnixStream::from(connection);
        let answer = match request(&stream) {
            Ok(Request::Version {}) => {
                let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
                let sessions = processes.sessions();
                json!({ "daemon": "vhost-rgpu", "version": version, "pid": pid, "sessions": sessions })
            }
            Ok(Request::Upgrade {}) => {
                drop(stays);
                let mut say = |what: &Value| drop(stream.write_all(format!("{what}\n").as_bytes()));
                let Err(why) = succession.upgrade(processes, own, &mut say);
                tracing::error!("rgpuctl upgrade: not upgraded: {why}");
                json!({ "error": why })
            }
            Err(e) => json!({ "error": format!("the request cannot be parsed: {e}") }),
        };
        // The operator may be gone.
        drop(stream.write_all(format!("{answer}\n").as_bytes()));
    }
}

fn request(stream: &UnixStream) -> io::Result<Request> {
    stream.set_read_timeout(Some(WITHIN))?;
    stream.set_write_timeout(Some(WITHIN))?;
    let mut text = String::new();
    stream.take(MAX_REQUEST).read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}
