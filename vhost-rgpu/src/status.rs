//! The status socket: it sends one JSON object to each connection and closes it.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;
use crate::sockets::Listening;

/// Serves the status until the socket is stopped.
pub fn serve(listening: &Listening, registry: &Arc<Registry>) {
    while let Some(connection) = listening.accept_patiently("status") {
        let mut stream = UnixStream::from(connection);
        // A client that does not read delays other clients of this socket by at most this long.
        let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
        let mut text = registry.status().to_string();
        text.push('\n');
        if let Err(e) = stream.write_all(text.as_bytes()) {
            tracing::debug!("status: a client disconnected: {e}");
        }
    }
}
