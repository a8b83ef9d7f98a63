//! Starts daemons, waits until they are ready, and ends them.
//!
//! A daemon started here does not outlive this process: it gets SIGTERM when the [`Daemon`] is dropped, or
//! from the kernel if this process dies first (`PR_SET_PDEATHSIG`).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

/// How long a daemon may take to become ready. Creating a CUDA context takes most of a second for each GPU.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How long a daemon may be silent while it tells its status.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// How long a daemon may take to end after SIGTERM, before SIGKILL: longer than `vhost-rgpu` gives sessions
/// that a busy machine or a slow server holds up.
const END_WITHIN: Duration = Duration::from_secs(18);

/// A daemon that this process started.
pub struct Daemon {
    name: &'static str,
    child: Child,
    log: PathBuf,
    status_socket: PathBuf,
}

impl Daemon {
    /// Starts `binary` with `arguments`, its output in `log`, and waits until `status_socket` answers.
    ///
    /// Fails, with the last lines of the log, when the binary cannot be started, ends, or is not ready in
    /// time.
    pub fn start(
        name: &'static str,
        binary: &Path,
        arguments: &[OsString],
        log: &Path,
        status_socket: &Path,
    ) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("cannot write the log {}", log.display()))?;
        let mut command = command(binary, arguments);
        command.stdout(output.try_clone().context("cannot duplicate a file descriptor")?).stderr(output);
        end_with_parent(&mut command, Signal::SIGTERM);
        let child = command.spawn().with_context(|| format!("cannot start {}", binary.display()))?;
        let mut daemon = Self { name, child, log: log.to_owned(), status_socket: status_socket.to_owned() };
        daemon.wait_until_ready()?;
        Ok(daemon)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if read_status(&self.status_socket).is_ok() {
                return Ok(());
            }
            if let Some(status) = self.ended() {
                bail!("{} ended immediately ({}){}", self.name, describe(status), self.last_lines());
            }
            if Instant::now() > deadline {
                bail!(
                    "{} did not answer at {} within {} s{}",
                    self.name,
                    self.status_socket.display(),
                    READY_WITHIN.as_secs(),
                    self.last_lines()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The exit status, if the daemon has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The same. Waits for a daemon that is about to end: nobody listens at its socket any more.
    pub fn ended_or_ending(&mut self) -> Option<ExitStatus> {
        match UnixStream::connect(&self.status_socket) {
            Ok(_) => self.ended(),
            Err(_) => self.ends_within(ANSWERS_WITHIN),
        }
    }

    fn ends_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.ended() {
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                ended => return ended,
            }
        }
    }

    /// A message for a daemon that ended by itself: its name, exit status, and last log lines.
    pub fn describe_end(&self, status: ExitStatus) -> String {
        format!("{} ended by itself ({}){}", self.name, describe(status), self.last_lines())
    }

    fn last_lines(&self) -> String {
        last_lines(&self.log)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended().is_some() {
            return;
        }
        // The child has not been waited for, so its process id is still its own.
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        if self.ends_within(END_WITHIN).is_some() {
            return;
        }
        say!(
            "rgpuctl: {} did not end within {} s of SIGTERM and was killed",
            self.name,
            END_WITHIN.as_secs()
        );
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(binary: &Path, arguments: &[OsString]) -> Command {
    let mut command = Command::new(binary);
    command
        .args(arguments)
        .env("NO_COLOR", "1")
        // The program chooses among the server's devices. If the server did so, too, ordinals would count
        // twice.
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdin(Stdio::null())
        // Ctrl-C at the terminal goes to the program. The daemons end after it.
        .process_group(0);
    command
}

/// Makes the kernel send `signal` to the command's process when the thread that starts it dies, and unblocks
/// the signals that this process has blocked.
pub fn end_with_parent(command: &mut Command, signal: Signal) {
    let parent = nix::unistd::getpid();
    let before_exec = move || {
        nix::sys::prctl::set_pdeathsig(signal)?;
        SigSet::empty().thread_set_mask()?;
        // The parent may have died before the request above.
        if nix::unistd::getppid() != parent {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec. It only makes the system calls prctl, sigprocmask and
    // getppid, which are async-signal-safe, and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
}

/// Reads the JSON object that the status socket at `path` sends.
pub fn read_status(path: &Path) -> Result<serde_json::Value> {
    let mut stream = UnixStream::connect(path).map_err(|error| {
        let what = match error.kind() {
            ErrorKind::PermissionDenied => "run this as root: this user may not ask the daemon at",
            _ => "no daemon answers at",
        };
        anyhow::Error::new(error).context(format!("{what} {}", path.display()))
    })?;
    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(|error| {
        let what = match error.kind() {
            ErrorKind::WouldBlock => format!("does not answer within {} s", ANSWERS_WITHIN.as_secs()),
            _ => "closed the connection before the end of its answer".to_owned(),
        };
        anyhow::Error::new(error).context(format!("the daemon at {} {what}", path.display()))
    })?;
    serde_json::from_str(&text)
        .with_context(|| format!("the answer of the daemon at {} is not JSON", path.display()))
}

/// The kind of the system's error that is at the bottom of another one.
pub fn cause(error: &anyhow::Error) -> ErrorKind {
    error.root_cause().downcast_ref::<std::io::Error>().map_or(ErrorKind::Other, std::io::Error::kind)
}

/// Describes an exit status.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => signal.to_string(),
            Err(_) => format!("signal {signal}"),
        },
        (None, None) => "unknown status".to_owned(),
    }
}

fn last_lines(log: &Path) -> String {
    const LINES: usize = 8;
    let text =
        std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.is_empty() {
        return "; it logged nothing".to_owned();
    }
    let mut result = "; its last lines:".to_owned();
    for line in &lines[lines.len().saturating_sub(LINES)..] {
        result.push_str("\n    ");
        result.push_str(line);
    }
    result
}

/// An option and its value, as two arguments.
pub fn option(name: &str, value: impl AsRef<OsStr>) -> [OsString; 2] {
    [name.into(), value.as_ref().to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_alone_chooses_its_devices() {
        let command = command(Path::new("rgpu-server"), &[]);
        assert!(command.get_envs().any(|variable| variable == (OsStr::new("CUDA_VISIBLE_DEVICES"), None)));
    }

    #[test]
    fn the_last_lines_of_a_log_are_quoted() {
        let folder = std::env::temp_dir().join(format!("rgpuctl-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let log = folder.join("log");
        std::fs::write(&log, (0..20).map(|n| format!("line {n}\n")).collect::<String>()).unwrap();
        let text = last_lines(&log);
        assert!(text.ends_with("line 19") && text.contains("line 12") && !text.contains("line 11"), "{text}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_log_of_a_daemon_that_ends_at_once_is_quoted() {
        let folder = std::env::temp_dir().join(format!("rgpuctl-start-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let arguments = ["-c".into(), "echo no such GPU >&2; exit 3".into()];
        let result = Daemon::start(
            "sh",
            Path::new("/bin/sh"),
            &arguments,
            &folder.join("log"),
            &folder.join("status"),
        );
        let text = format!("{:#}", result.err().unwrap());
        assert!(text.contains("exit status 3") && text.contains("no such GPU"), "{text}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
