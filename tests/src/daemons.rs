//! Starts rgpu's daemons for a test or a demonstration, and ends them with it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::tree::Build;

/// How long a daemon may take to answer before a test fails. Even on a busy machine, only a daemon that hangs
/// takes this long.
const STARTED_WITHIN: Duration = Duration::from_secs(180);
/// How long a daemon may take to end by itself after a test before it is killed.
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// A running `rgpu-server` or `vhost-rgpu` of this tree.
///
/// Dropping it sends SIGTERM, and SIGKILL if it does not end. It also ends when the thread that started it
/// does.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: PathBuf,
    status_socket: PathBuf,
}

impl Daemon {
    /// Starts `name` of the release build with `arguments` and waits until its status socket,
    /// `status_socket`, answers. Its output goes to the new file `log`.
    pub fn start<S: AsRef<OsStr>>(
        name: &str,
        arguments: impl IntoIterator<Item = S>,
        log: &Path,
        status_socket: &Path,
    ) -> Result<Self> {
        Self::start_of(Build::Release, name, arguments, log, status_socket)
    }

    /// The same with another build's daemon.
    pub fn start_of<S: AsRef<OsStr>>(
        build: Build,
        name: &str,
        arguments: impl IntoIterator<Item = S>,
        log: &Path,
        status_socket: &Path,
    ) -> Result<Self> {
        if let Some(folder) = log.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        Self::start_by(Command::new(build.binaries().join(name)), arguments, log, status_socket)
    }

    /// The same with this command. Its output is appended to the file `log`.
    pub fn start_by<S: AsRef<OsStr>>(
        mut command: Command,
        arguments: impl IntoIterator<Item = S>,
        log: &Path,
        status_socket: &Path,
    ) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log);
        let output = output.with_context(|| format!("cannot write {}", log.display()))?;
        let name = command.get_program().display().to_string();
        command
            .args(arguments)
            .arg("--status-socket")
            .arg(status_socket)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("cannot duplicate a file descriptor")?)
            .stderr(output)
            .process_group(0);
        // SAFETY: the closure only makes one system call, prctl, which is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGTERM)?)) };
        let child =
            command.spawn().with_context(|| format!("cannot start {name}: `cargo xtask build` makes it"))?;
        let mut daemon = Self { child, log: log.to_owned(), status_socket: status_socket.to_owned() };

        let deadline = Instant::now() + STARTED_WITHIN;
        while daemon.status().is_err() {
            if let Some(status) = daemon.ended()? {
                bail!("{name} ended at once ({status}):\n{}", daemon.log_text());
            }
            if Instant::now() > deadline {
                bail!("{name} did not answer at {} in time:\n{}", status_socket.display(), daemon.log_text());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    /// The daemon's status: the object that `rgpuctl status --json` prints.
    pub fn status(&self) -> Result<serde_json::Value> {
        Self::status_at(&self.status_socket)
    }

    /// A daemon's answer at this status socket.
    pub fn status_at(path: &Path) -> Result<serde_json::Value> {
        let mut stream =
            UnixStream::connect(path).with_context(|| format!("nothing answers at {}", path.display()))?;
        stream.set_read_timeout(Some(STARTED_WITHIN))?;
        let mut text = String::new();
        stream
            .read_to_string(&mut text)
            .with_context(|| format!("no whole answer from {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} answered no JSON: {text:?}", path.display()))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot wait for a daemon")
    }

    /// Everything it has logged so far.
    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal)
            .with_context(|| format!("cannot send {signal}"))
    }

    /// Waits for it to end. An error if it has not ended within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("a daemon did not end within {limit:?}; its log is {}", self.log.display());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.ended(), Ok(Some(_))) {
            return;
        }
        let _ = self.signal(Signal::SIGTERM);
        if self.wait(ENDED_WITHIN).is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
