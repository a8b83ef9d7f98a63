//! The server under test.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod machine;

use std::io::{Read, Write};
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use nix::sys::signal::Signal;
use protocol::data::{HostIn, HostOut};
use protocol::handle::*;
use protocol::ops::launch::Launch;
use protocol::ops::module::ModuleLoad;
use test_kit::daemon::Daemon;
use test_kit::free_port;
use test_kit::link::Session;
use test_kit::manager::Manager;

/// The backend under test: software, unless `RGPU_TEST_BACKEND` names another one.
pub fn backend() -> String {
    std::env::var("RGPU_TEST_BACKEND").unwrap_or_else(|_| "software".into())
}

/// The server under test: the one built with the tests, unless `RGPU_TEST_SERVER` names another one.
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
    /// Starts one with software devices of 256 MiB that listens on a Unix socket and on TCP. Sessions end
    /// with their connections, because that is how tests end them.
    pub fn start(more: &[&str]) -> Server {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let port = free_port();
        Server::start_by(Command::new(binary()), &folder, port, &[&["--grace-seconds=0"], more].concat())
            .ready()
    }

    /// Starts one with this command, in this folder and at this port. It also has an admin socket.
    pub fn start_by(
        mut command: Command,
        folder: &Arc<tempfile::TempDir>,
        port: u16,
        more: &[&str],
    ) -> Server {
        let path = |name: &str| folder.path().join(name).display().to_string();
        command
            .arg(format!("--listen=unix:{}", path("server.sock")))
            .arg(format!("--listen=tcp:127.0.0.1:{port}"))
            .arg(format!("--admin-socket={}", path("admin")))
            .args([&format!("--backend={}", backend()), "--software-memory=256M", "--insecure"])
            .args(more);
        Server { daemon: Daemon::spawn(&mut command, folder), port }
    }

    /// Waits until it serves.
    pub fn ready(self) -> Server {
        Server { daemon: self.daemon.ready(), port: self.port }
    }

    /// Starts one that serves TLS over TCP, with its identity in its own folder.
    pub fn start_protected(more: &[&str]) -> Server {
        Server::start_protected_in(&Arc::new(tempfile::tempdir().unwrap()), more)
    }

    /// Starts one that serves TLS over TCP, in a folder left by another one.
    pub fn start_protected_in(folder: &Arc<tempfile::TempDir>, more: &[&str]) -> Server {
        let port = free_port();
        Server::start_protected_at(folder, port, more)
    }

    /// The same at this port.
    pub fn start_protected_at(folder: &Arc<tempfile::TempDir>, port: u16, more: &[&str]) -> Server {
        let path = |name: &str| folder.path().join(name).display().to_string();
        let mut command = Command::new(binary());
        command
            .args([
                format!("--listen=unix:{}", path("server.sock")),
                format!("--listen=tcp:127.0.0.1:{port}"),
            ])
            .args([format!("--identity={}", path("identity")), format!("--admin-socket={}", path("admin"))])
            .args([&format!("--backend={}", backend()), "--software-memory=256M"])
            .args(more);
        Server { daemon: Daemon::spawn(&mut command, folder).ready(), port }
    }

    /// Sends the admin socket a request and returns the answer.
    pub fn ask(&self, request: serde_json::Value) -> serde_json::Value {
        let mut socket = std::os::unix::net::UnixStream::connect(self.path("admin")).unwrap();
        socket.write_all(request.to_string().as_bytes()).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    /// Its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.path("server.sock")
    }
}

/// A server that is started again and again, as by a service manager.
pub struct Service {
    /// What starts it.
    pub manager: Manager,
    /// Its folder.
    pub folder: Arc<tempfile::TempDir>,
    /// Its port.
    pub port: u16,
    /// The options of those that it starts from now on.
    pub flags: Vec<String>,
}

impl Service {
    /// One that has not been started yet.
    pub fn new(flags: &[&str]) -> Service {
        let port = free_port();
        let folder = Arc::new(tempfile::tempdir().unwrap());
        Service {
            manager: Manager::new(),
            folder,
            port,
            flags: flags.iter().map(|&f| f.to_owned()).collect(),
        }
    }

    /// Starts this program.
    pub fn spawn(&self, program: PathBuf) -> Server {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        Server::start_by(self.manager.command(program), &self.folder, self.port, &flags)
    }

    /// Starts it, and waits until it serves.
    pub fn start(&self) -> Server {
        self.spawn(binary()).ready()
    }

    /// Kills the daemon and starts another one.
    pub fn crash(&self, mut server: Server) -> Server {
        server.end(Signal::SIGKILL);
        self.start()
    }
}

/// Loads a kernel that never ends, and launches it.
pub fn run_endlessly<S: Session>(s: &mut S) {
    const PTX: &str =
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry endless() { AGAIN: bra AGAIN; }\n\0";
    let (room, image) = (s.arena(4 << 20, &[0; 4096]), s.arena(0, PTX.as_bytes()));
    let (image, info) = (HostIn::Range(image), HostOut(room));
    s.call(&ModuleLoad { context: ContextId(0), module: ModuleId(1), options: vec![], image, info }).unwrap();
    s.push(&Launch {
        function: FunctionId::new(ModuleId(1), 0),
        stream: StreamId(0),
        grid: [1; 3],
        block: [1; 3],
        dynamic_shared: 0,
        attributes: vec![],
        params: &[],
    });
}
