//! Listening sockets.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use host_bridge::framing::Address;

use super::Server;
use super::handshake::{self, Control};

/// Connections whose handshake is under way, at most. More are closed as they come.
const MAX_HANDSHAKES: usize = 512;

static HANDSHAKES: AtomicUsize = AtomicUsize::new(0);

/// Socket files of this daemon, removed when it ends.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<PathBuf>);

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            // Removed by somebody else: as good.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The addresses, for people.
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

/// Binds a Unix socket, in place of one that nobody listens at any more.
pub(super) fn bind_unix(path: &Path, files: &mut Files) -> anyhow::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            anyhow::bail!("cannot listen at {}: another process does", path.display());
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
            tracing::warn!("accepting a connection: {e}");
            // Out of descriptors, most likely: time for some to be closed.
            std::thread::sleep(Duration::from_millis(100));
            return;
        }
    };
    let peer = peer();
    if HANDSHAKES.fetch_add(1, Ordering::AcqRel) >= MAX_HANDSHAKES {
        HANDSHAKES.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(peer, "closed: {MAX_HANDSHAKES} handshakes are under way");
        return;
    }
    let server = Arc::clone(server);
    let shaken = std::thread::Builder::new().name("rgpu-handshake".into()).spawn(move || {
        handshake::serve(&server, connection, &peer);
        HANDSHAKES.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(e) = shaken {
        HANDSHAKES.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!("no thread for a handshake: {e}");
    }
}
