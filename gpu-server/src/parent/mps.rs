//! NVIDIA's Multi-Process Service (`--mps`): kernels of several sessions run on a device at the same time.
//!
//! Workers find the service by [two variables](variables) and one folder of sockets. It takes clients of
//! several users (`-multiuser-server`), because each worker has its own. Its control daemon runs apart from
//! this one, as workers survive a daemon that crashes or is upgraded; the next daemon finds it in the folder.
//! It ends when the daemon ends in an orderly way. One that cannot start leaves it to the sessions of the
//! daemon before.
//!
//! CUDA says nothing if it does not find the service: its programs then run without. So the daemon looks from
//! time to time whether the service runs, and starts it again. While that fails, clients take turns.
//!
//! Reference: NVIDIA Multi-Process Service, <https://docs.nvidia.com/deploy/mps/>.

use std::fs::DirBuilder;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::SigSet;

use super::state::Server;
use crate::lock::lock;

/// The command that starts the service and talks to it. It is part of NVIDIA's driver.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// Ends the service. It waits for its clients, which are gone, for so many seconds.
const QUIT: &str = "quit -t 5\n";
/// How long the command may take.
const WITHIN: Duration = Duration::from_secs(20);
/// How often the service is looked for.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Where the service has its sockets: the folder that workers have to see.
pub(super) fn sockets(folder: &Path) -> PathBuf {
    folder.join("pipe")
}

/// The variables by which CUDA finds the service.
pub(super) fn variables(folder: &Path) -> [(&'static str, PathBuf); 2] {
    [("CUDA_MPS_PIPE_DIRECTORY", sockets(folder)), ("CUDA_MPS_LOG_DIRECTORY", folder.join("log"))]
}

/// The running service.
#[derive(Debug)]
pub(super) struct Service {
    control: Control,
    /// Whether it was told to end. Held while it is started or ended.
    ended: Arc<Mutex<bool>>,
}

impl Service {
    /// Starts the service in `folder`, which is created if needed, unless it runs there already.
    pub(super) fn start(folder: &Path) -> anyhow::Result<Service> {
        let control = Control { command: CONTROL.into(), folder: folder.to_owned(), within: WITHIN };
        Service::start_by(control).context("NVIDIA's Multi-Process Service (--mps)")
    }

    fn start_by(control: Control) -> anyhow::Result<Service> {
        // Workers, which have other users, pass through it and only connect.
        for (_, path) in variables(&control.folder) {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&path);
            made.with_context(|| format!("creating {}", path.display()))?;
        }
        let already = if control.ensure()? { "" } else { " already" };
        tracing::info!("NVIDIA's Multi-Process Service runs in {}{already}", control.folder.display());
        Ok(Service { control, ended: Arc::default() })
    }

    /// Starts the thread that looks whether the service still runs.
    pub(super) fn watch(&self, server: &Arc<Server>) -> anyhow::Result<()> {
        let (server, control, ended) = (Arc::clone(server), self.control.clone(), Arc::clone(&self.ended));
        let watch = move || {
            loop {
                std::thread::sleep(CHECK_EVERY);
                let ended = lock(&ended);
                if *ended || server.lock().draining() {
                    return;
                }
                note(&server, control.ensure());
            }
        };
        std::thread::Builder::new()
            .name("rgpu-mps".into())
            .spawn(watch)
            .context("starting to watch NVIDIA's Multi-Process Service")?;
        Ok(())
    }

    /// Ends the service. No session may use it any more.
    pub(super) fn end(self) {
        let mut ended = lock(&self.ended);
        *ended = true;
        match self.control.run(&[], QUIT) {
            Ok(said) if said.status.success() => {}
            Ok(said) => tracing::warn!("NVIDIA's Multi-Process Service does not end: {}", said.status),
            Err(e) => tracing::warn!("NVIDIA's Multi-Process Service cannot be told to end: {e}"),
        }
    }
}

/// Notes what was found: whether the service had to be started again, or why it does not run.
fn note(server: &Server, found: anyhow::Result<bool>) {
    let runs = found.is_ok();
    let changed = server.mps_runs.swap(runs, Ordering::Relaxed) != runs;
    match found {
        Ok(false) if changed => tracing::info!("NVIDIA's Multi-Process Service runs again"),
        Ok(false) => return,
        Ok(true) => tracing::error!("NVIDIA's Multi-Process Service had ended; it was started again"),
        Err(_) if !changed => return,
        Err(e) => tracing::error!(
            "NVIDIA's Multi-Process Service has ended and cannot be started again; until it runs, clients take turns: {e:#}"
        ),
    }
    // Workers without a session may have the one that ended, or none.
    server.lock().replace_workers();
    server.changed.notify_all();
    server.nudge.nudge();
    server.bell.ring();
}

/// The control command of the service in a folder.
#[derive(Debug, Clone)]
struct Control {
    command: PathBuf,
    folder: PathBuf,
    /// How long it may take.
    within: Duration,
}

/// How the command has ended, and if it failed, what it has said.
struct Ended {
    status: ExitStatus,
    said: String,
}

impl Control {
    /// Starts the service unless it runs. Returns whether it did not.
    fn ensure(&self) -> anyhow::Result<bool> {
        let runs = self.run(&[], "get_server_list\n").with_context(|| {
            format!("{}, which is part of NVIDIA's driver, cannot be run", self.command.display())
        })?;
        if runs.status.success() {
            return Ok(false);
        }
        let started = self.run(&["-d", "-multiuser-server"], "").context("starting it")?;
        if !started.status.success() {
            bail!(
                "{} -d -multiuser-server: {}: {} (its log is in {}; older drivers have no -multiuser-server)",
                self.command.display(),
                started.status,
                started.said.trim(),
                self.folder.join("log").display()
            );
        }
        Ok(true)
    }

    /// Runs the command, which starts the service or gives the running one what is in `input`.
    fn run(&self, arguments: &[&str], input: &str) -> io::Result<Ended> {
        let mut command = Command::new(&self.command);
        command
            .args(arguments)
            .envs(variables(&self.folder))
            // The service has all devices, and each worker chooses from these as it does without.
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // The daemon's threads block signals, which the service would inherit.
        let unblock = || SigSet::empty().thread_set_mask().map_err(io::Error::from);
        // SAFETY: the closure only makes one system call, which is allowed between fork and exec.
        let mut child = unsafe { command.pre_exec(unblock) }.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that does not read has ended, and its status says so.
            let _ = stdin.write_all(input.as_bytes());
        }
        let status = handover::wait_within(&mut child, self.within)?;
        let mut said = String::new();
        // One that has succeeded may have started the service, which keeps these open.
        if !status.success() {
            child.stdout.take().map(|mut out| out.read_to_string(&mut said)).transpose()?;
            child.stderr.take().map(|mut out| out.read_to_string(&mut said)).transpose()?;
        }
        Ok(Ended { status, said })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control command that notes what it is asked in `asked`, and of which a service runs while `up`
    /// exists.
    fn control(folder: &Path, starts: bool) -> Control {
        let path = folder.join("control");
        let start = if starts { "touch $d/up" } else { "echo unknown option; exit 1" };
        let script = format!(
            "#!/bin/sh\nd={}\nif [ \"$1\" = -d ]; then echo \"$* $CUDA_MPS_PIPE_DIRECTORY ${{CUDA_VISIBLE_DEVICES-none}}\" >> $d/asked; {start}; exit 0; fi\n\
             read word; echo \"$word\" >> $d/asked\n[ -e $d/up ] || exit 1\ncase $word in quit*) rm $d/up;; esac\n",
            folder.display()
        );
        // By another process: a file that this one has open for writing while another test starts something
        // cannot be executed.
        let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&path).arg(script).status().unwrap().success());
        Control { command: path, folder: folder.join("mps"), within: Duration::from_secs(600) }
    }

    fn asked(folder: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(folder.join("asked")).unwrap_or_default();
        let _ = std::fs::remove_file(folder.join("asked"));
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_service_is_started_once_and_ends_with_the_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let control = control(folder.path(), true);
        let first = Service::start_by(control.clone()).unwrap();
        let start = format!("-d -multiuser-server {} none", sockets(&control.folder).display());
        assert_eq!(asked(folder.path()), ["get_server_list".to_owned(), start]);
        assert!(sockets(&control.folder).is_dir());
        // A daemon that was killed, or could not start.
        drop(first);
        assert_eq!(asked(folder.path()), [] as [&str; 0]);
        let next = Service::start_by(control).unwrap();
        assert_eq!(asked(folder.path()), ["get_server_list"]);
        next.end();
        assert_eq!(asked(folder.path()), ["quit -t 5"]);
        assert!(!folder.path().join("up").exists());
    }

    #[test]
    fn a_service_that_cannot_be_started_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let control = control(folder.path(), false);
        let error = Service::start_by(control.clone()).unwrap_err();
        assert!(format!("{error:#}").contains("exit status: 1: unknown option"), "{error:#}");
        let missing = Control { command: folder.path().join("missing"), ..control };
        let error = Service::start_by(missing).unwrap_err();
        assert!(format!("{error:#}").contains("part of NVIDIA's driver"), "{error:#}");
        assert_eq!(asked(folder.path()).len(), 2, "nothing is told to end that was not started");
    }

    #[test]
    fn a_service_that_has_ended_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let service = Service::start_by(control(folder.path(), true)).unwrap();
        assert!(!service.control.ensure().unwrap());
        std::fs::remove_file(folder.path().join("up")).unwrap();
        assert!(service.control.ensure().unwrap() && folder.path().join("up").exists());
        control(folder.path(), false);
        std::fs::remove_file(folder.path().join("up")).unwrap();
        assert!(service.control.ensure().is_err());
    }

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let control = Control {
            command: "sleep".into(),
            within: Duration::from_millis(50),
            ..control(folder.path(), true)
        };
        let error = control.run(&["1000000"], "").err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
