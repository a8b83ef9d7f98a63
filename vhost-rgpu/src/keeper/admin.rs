//! [`rgpuctl`'s requests](handover::admin) to the keeper. rgpu-server has the same ones.
//!
//! ```text
//!   {"upgrade": {}}     {"upgrading": {"sessions": 3, "version": …}}, then another program takes over
//!   {"version": {}}     {"version": …, "pid": 7, "sessions": 3}
//! ```
//!
//! A failed request is answered with `{"error": "why"}`.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use handover::admin;
use serde::Deserialize;
use serde_json::json;

use super::process::Processes;
use super::status::Own;
use super::takeover::Succession;
use crate::sockets::Listening;

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
    while let Some((connection, stays)) = listening.accept_patiently("admin", || succession.stays()) {
        let stream = UnixStream::from(connection);
        match admin::request(&stream) {
            Ok(Request::Version {}) => {
                let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
                let sessions = processes.sessions();
                admin::answer(
                    &stream,
                    &json!({ "daemon": "vhost-rgpu", "version": version, "pid": pid, "sessions": sessions }),
                );
            }
            Ok(Request::Upgrade {}) => {
                drop(stays);
                admin::upgrade(&stream, |say| succession.upgrade(processes, own, say));
            }
            Err(why) => admin::conclude(&stream, Err(why)),
        }
    }
}
