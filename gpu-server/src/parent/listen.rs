//! Listening sockets.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use host_bridge::framing::Address;

use super::Server;
use super::handshake::{self, Control};

/// Maximum number of connections that have not sent their first message. When more come, the oldest of them is closed.
const MAX_HANDSHAKES: usize = 512;

/// Connections that have not sent their first message, by number, in order of arrival.
static SILENT: Mutex<BTreeMap<u64, Arc<Control>>> = Mutex::new(BTreeMap::new());

/// Socket files of this daemon, removed when it ends.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<PathBuf>);

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            // Another process may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The addresses, for display.
pub(super) fn addresses(all: &[Address]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Opens every listening socket and accepts from it.
pub(super) fn start(server: &Arc<Server>, files: &mut Files) -> anyhow::Result<()> {
    for address in &server.options.listen {
        let server = Arc::clone(server);
        let thread = std::thread::Builder::new().name("rgpu-accept".into());
        match address {
            Address::Unix(path) => {
                let listener = bind_unix(path, files)?;
                thread.spawn(move || {
                    for stream in listener.incoming() {
                        admit(&server, stream.map(Control::Local), || "this host".into());
                    }
                })?;
            }
            Address::Tcp(host, port) => {
                let host = if host == "*" { "::" } else { host.as_str() };
                let listener = TcpListener::bind((host, *port))
                    .with_context(|| format!("cannot listen at {address}"))?;
                thread.spawn(move || {
                    loop {
                        match listener.accept() {
                            Ok((stream, peer)) => {
                                admit(&server, Ok(Control::Tcp(stream)), || peer.to_string())
                            }
                            Err(e) => admit(&server, Err(e), String::new),
                        }
                    }
                })?;
            }
        }
    }
    Ok(())
}

/// Binds a Unix socket, replacing a stale one.
pub(super) fn bind_unix(path: &Path, files: &mut Files) -> anyhow::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            anyhow::bail!("cannot listen at {}: another process does already", path.display());
        }
        std::fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    files.0.push(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("cannot set the mode of {}", path.display()))?;
    Ok(listener)
}

fn admit(server: &Arc<Server>, accepted: std::io::Result<Control>, peer: impl FnOnce() -> String) {
    let connection = match accepted {
        Ok(connection) => connection,
        Err(e) => {
            tracing::warn!("cannot accept a connection: {e}");
            // Most likely the process is out of descriptors. Some may be closed meanwhile.
            std::thread::sleep(Duration::from_millis(100));
            return;
        }
    };
    let peer = peer();
    let (server, connection) = (Arc::clone(server), Arc::new(connection));
    let number = await_hello(&connection);
    let shaken = std::thread::Builder::new().name("rgpu-handshake".into()).spawn(move || {
        handshake::serve(&server, &connection, &peer, || heard(number));
    });
    if let Err(e) = shaken {
        heard(number);
        tracing::warn!("cannot start a thread for a handshake: {e}");
    }
}

fn silent() -> MutexGuard<'static, BTreeMap<u64, Arc<Control>>> {
    SILENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a connection to [`SILENT`] and returns its number.
fn await_hello(connection: &Arc<Control>) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut silent = silent();
    silent.insert(number, Arc::clone(connection));
    // A client of rgpu sends its hello at once, so the oldest connection is not one. Its thread ends with its connection.
    if silent.len() > MAX_HANDSHAKES
        && let Some((_, oldest)) = silent.pop_first()
    {
        oldest.shut_down();
    }
    number
}

fn heard(number: u64) {
    silent().remove(&number);
}
