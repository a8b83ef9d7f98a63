//! The daemon as a child process, in a folder of its own.

#![allow(dead_code)]

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::support::eventually;

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    folder: Arc<tempfile::TempDir>,
}

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-rgpu");

fn spawn(folder: &Arc<tempfile::TempDir>, arguments: &[&str]) -> Daemon {
    spawn_as(Command::new(BINARY), folder, arguments)
}

fn spawn_as(mut command: Command, folder: &Arc<tempfile::TempDir>, arguments: &[&str]) -> Daemon {
    let at = |name: &str| folder.path().join(name);
    let log = std::fs::File::create(at("log")).unwrap();
    let child = command
        .arg("--native-socket")
        .arg(at("native.sock"))
        .arg("--socket")
        .arg(at("vm.sock"))
        .arg("--status-socket")
        .arg(at("status.sock"))
        .args(arguments)
        .env("RUST_LOG", "debug")
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    Daemon { child, folder: folder.clone() }
}

impl Daemon {
    /// Starts one that serves native clients, one virtual machine, and status, and waits until it does.
    pub fn start(arguments: &[&str]) -> Daemon {
        let mut daemon = spawn(&Arc::new(tempfile::tempdir().unwrap()), arguments);
        daemon.ready();
        daemon
    }

    /// Starts one as systemd does, with a listening socket handed over under a name.
    pub fn activated(arguments: &[&str], listening: &OwnedFd, name: &str) -> Daemon {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let mut command = Command::new("sh");
        // The process id must be that of the daemon: the shell's, which it becomes.
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", BINARY])
            .env("LISTEN_FDS", "1")
            .env("LISTEN_FDNAMES", name);
        let number = listening.as_raw_fd();
        // SAFETY: dup2 is safe between fork and exec; it also clears close-on-exec for the new number.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(number, 3) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let mut daemon = spawn_as(command, &folder, arguments);
        daemon.ready();
        daemon
    }

    /// Starts another one on the same sockets.
    pub fn again(&self, arguments: &[&str]) -> Daemon {
        spawn(&self.folder, arguments)
    }

    /// Waits until it serves.
    pub fn ready(&mut self) {
        let path = self.status_path();
        eventually(|| std::os::unix::net::UnixStream::connect(&path).is_ok());
        assert!(self.child.try_wait().unwrap().is_none(), "{}", self.log());
    }

    pub fn native(&self) -> PathBuf {
        self.folder.path().join("native.sock")
    }

    pub fn vm(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    pub fn status_path(&self) -> PathBuf {
        self.folder.path().join("status.sock")
    }

    pub fn status(&self) -> serde_json::Value {
        let stream = std::os::unix::net::UnixStream::connect(self.status_path()).unwrap();
        serde_json::from_reader(stream).unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Descriptors that it has open, and threads.
    pub fn resources(&self) -> (usize, usize) {
        let count =
            |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", self.child.id())).unwrap().count();
        (count("fd"), count("task"))
    }

    /// Sends it a signal and waits for its end.
    pub fn end(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        self.child.wait().unwrap()
    }

    /// Waits for its end; its log too.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, self.log())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
    }
}
