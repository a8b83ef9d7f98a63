//! The status socket: each connection gets one JSON object and is closed.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;
use crate::sockets::Listening;

/// Serves until the socket is stopped.
pub fn serve(listening: &Listening, registry: &Arc<Registry>) {
    while let Some(connection) = listening.accept_patiently("status") {
        let mut stream = UnixStream::from(connection);
        // A reader that does not read holds up other readers for this long and nobody else.
        let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
        let mut text = registry.status().to_string();
        text.push('\n');
        if let Err(e) = stream.write_all(text.as_bytes()) {
            tracing::debug!("status: a reader went away: {e}");
        }
    }
}
