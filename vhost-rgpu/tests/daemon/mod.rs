//! The daemon under test.

#![allow(dead_code, reason = "each test file uses its part")]

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::sys::signal::Signal;
use test_kit::manager::Manager;
use test_kit::server::FakeServer;
use test_kit::{PATIENCE, eventually};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-rgpu");

/// A running daemon that serves native clients, one virtual machine, and its status.
pub struct Daemon(test_kit::daemon::Daemon);

impl Deref for Daemon {
    type Target = test_kit::daemon::Daemon;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Daemon {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

fn spawn(mut command: Command, folder: &Arc<tempfile::TempDir>, arguments: &[&str]) -> Daemon {
    let path = |name: &str| folder.path().join(name);
    command.arg("--native-socket").arg(path("native.sock")).arg("--socket").arg(path("vm.sock"));
    if !arguments.contains(&"--identity") {
        command.arg("--insecure");
    }
    if !arguments.contains(&"--lost-after-seconds") {
        command.args(["--lost-after-seconds", &PATIENCE.as_secs().to_string()]);
    }
    command.args(arguments).env("RUST_LOG", "debug");
    Daemon(test_kit::daemon::Daemon::spawn(&mut command, folder))
}

impl Daemon {
    /// Starts a daemon and waits until it serves.
    pub fn start(arguments: &[&str]) -> Daemon {
        spawn(Command::new(BINARY), &Arc::new(tempfile::tempdir().unwrap()), arguments).ready()
    }

    /// Starts a daemon whose service manager listens at this path, and waits until it serves.
    pub fn notifying(notify: &Path, arguments: &[&str]) -> Daemon {
        let mut command = Command::new(BINARY);
        command.env("NOTIFY_SOCKET", notify);
        spawn(command, &Arc::new(tempfile::tempdir().unwrap()), arguments).ready()
    }

    /// Starts a daemon whose sessions go to `server`.
    pub fn serving(server: &FakeServer) -> Daemon {
        Daemon::start(&["--server", &server.address.to_string(), "--name", "testvm"])
    }

    /// Starts a daemon with this configuration file in `folder`, and waits until it serves.
    pub fn configured(folder: &Arc<tempfile::TempDir>, file: &str) -> Daemon {
        Daemon::configured_by(Command::new(BINARY), folder, file)
    }

    /// The same under a service manager.
    pub fn kept_configured(manager: &Manager, folder: &Arc<tempfile::TempDir>, file: &str) -> Daemon {
        Daemon::configured_by(manager.command(BINARY), folder, file)
    }

    fn configured_by(mut command: Command, folder: &Arc<tempfile::TempDir>, file: &str) -> Daemon {
        let path = folder.path().join("vhost-rgpu.toml");
        std::fs::write(&path, file).unwrap();
        command.arg("--insecure").arg("--config").arg(path);
        Daemon(test_kit::daemon::Daemon::spawn(&mut command, folder).ready())
    }

    /// Starts a daemon as systemd does, with a listening socket passed under a name.
    pub fn activated(arguments: &[&str], listening: &OwnedFd, name: &str) -> Daemon {
        let mut command = Command::new("sh");
        // The process ID must be the daemon's; the shell has it, and the daemon replaces the shell.
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", BINARY])
            .env("LISTEN_FDS", "1")
            .env("LISTEN_FDNAMES", name);
        let number = listening.as_raw_fd();
        // SAFETY: between fork and exec the closure makes one system call, dup2, which is async-signal-safe.
        // It also clears close-on-exec for the new number.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(number, 3) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        spawn(command, &Arc::new(tempfile::tempdir().unwrap()), arguments).ready()
    }

    /// Starts a daemon under a service manager, without waiting for it.
    pub fn managed(manager: &Manager, server: &FakeServer) -> Daemon {
        let arguments = ["--server", &server.address.to_string(), "--name", "testvm"];
        spawn(manager.command(BINARY), &Arc::new(tempfile::tempdir().unwrap()), &arguments)
    }

    /// Starts a daemon under a service manager in a new folder, or in an earlier one's, and waits until it
    /// serves.
    pub fn kept(manager: &Manager, folder: &Arc<tempfile::TempDir>, arguments: &[&str]) -> Daemon {
        spawn(manager.command(BINARY), folder, arguments).ready()
    }

    /// Starts a copy of the program, which a test can replace, and waits until it serves.
    pub fn copied(folder: &Arc<tempfile::TempDir>, arguments: &[&str]) -> Daemon {
        let program = folder.path().join("vhost-rgpu");
        // In another process: while this one has the program open for writing, a thread that starts something
        // would inherit that, and the program could not be executed.
        assert!(Command::new("cp").arg(BINARY).arg(&program).status().unwrap().success());
        spawn(Command::new(program), folder, arguments).ready()
    }

    /// Makes it execute the installed program, and waits until that serves.
    pub fn upgrade(&self) {
        let before = self.number("keepers_before");
        self.signal(Signal::SIGUSR2);
        eventually(|| self.try_status().is_some_and(|status| status["keepers_before"] == before + 1));
    }

    /// Gives a [configured](Self::configured) daemon this configuration file, and [upgrades](Self::upgrade)
    /// it.
    pub fn reconfigure(&self, file: &str) {
        std::fs::write(self.path("vhost-rgpu.toml"), file).unwrap();
        self.upgrade();
    }

    /// Starts another daemon on the same sockets, without waiting for it.
    pub fn again(&self, arguments: &[&str]) -> Daemon {
        spawn(Command::new(BINARY), self.folder(), arguments)
    }

    /// Waits until it serves.
    pub fn ready(self) -> Daemon {
        Daemon(self.0.ready())
    }

    /// Its native socket.
    pub fn native(&self) -> PathBuf {
        self.path("native.sock")
    }

    /// The vhost-user socket of its virtual machine.
    pub fn vm(&self) -> PathBuf {
        self.path("vm.sock")
    }
}
