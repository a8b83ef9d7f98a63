//! The server under test.

#![allow(dead_code, reason = "each test file uses its part")]

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use test_kit::daemon::Daemon;

/// The backend under test: software, unless `RGPU_TEST_BACKEND` names another.
pub fn backend() -> String {
    std::env::var("RGPU_TEST_BACKEND").unwrap_or_else(|_| "software".into())
}

/// The server under test: the one that was built with the tests, unless `RGPU_TEST_SERVER` names another.
pub fn binary() -> PathBuf {
    std::env::var_os("RGPU_TEST_SERVER")
        .map_or_else(|| env!("CARGO_BIN_EXE_rgpu-server").into(), PathBuf::from)
}

/// A running server.
pub struct Server {
    daemon: Daemon,
    /// Its TCP port on this host.
    pub port: u16,
}

impl Deref for Server {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

impl Server {
    /// Starts one with software devices of 256 MiB that listens on a Unix socket and on TCP.
    pub fn start(more: &[&str]) -> Server {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(binary());
        command
            .arg(format!("--listen=unix:{}", folder.path().join("server.sock").display()))
            .arg(format!("--listen=tcp:127.0.0.1:{port}"))
            .args([&format!("--backend={}", backend()), "--software-memory=256M"])
            .args(more);
        Server { daemon: Daemon::spawn(&mut command, &folder).ready(), port }
    }

    /// Its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.path("server.sock")
    }
}
