//! NVIDIA's Multi-Process Service (`--mps`): kernels of several sessions run on a device at the same time.
//!
//! Workers find the service by [two variables](variables) and one folder of sockets. It takes clients of
//! several users (`-multiuser-server`), because each worker has its own. Its control daemon runs apart from
//! this one, as workers survive a daemon that crashes or is upgraded; the next daemon finds it in the folder.
//! It ends when the daemon ends in an orderly way.
//!
//! Reference: NVIDIA Multi-Process Service, <https://docs.nvidia.com/deploy/mps/>.

use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, bail};

/// The command that starts the service and talks to it. It is part of NVIDIA's driver.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// Ends the service. It waits for its clients, which are gone, for so many seconds.
const QUIT: &str = "quit -t 5\n";

/// Where the service has its sockets: the folder that workers have to see.
pub(super) fn sockets(folder: &Path) -> PathBuf {
    folder.join("pipe")
}

/// The variables by which CUDA finds the service.
pub(super) fn variables(folder: &Path) -> [(&'static str, PathBuf); 2] {
    [("CUDA_MPS_PIPE_DIRECTORY", sockets(folder)), ("CUDA_MPS_LOG_DIRECTORY", folder.join("log"))]
}

/// The running service. It ends with this value.
#[derive(Debug)]
pub(super) struct Service {
    control: PathBuf,
    folder: PathBuf,
}

impl Service {
    /// Starts the service in `folder`, which is created if needed, unless it runs there already.
    pub(super) fn start(folder: &Path) -> anyhow::Result<Service> {
        Service::start_by(Path::new(CONTROL), folder).context("NVIDIA's Multi-Process Service (--mps)")
    }

    fn start_by(control: &Path, folder: &Path) -> anyhow::Result<Service> {
        // Workers, which have other users, pass through it and only connect.
        for (_, path) in variables(folder) {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&path);
            made.with_context(|| format!("creating {}", path.display()))?;
        }
        let service = || Service { control: control.to_owned(), folder: folder.to_owned() };
        let runs = run(control, folder, &[], "get_server_list\n").with_context(|| {
            format!("{}, which is part of NVIDIA's driver, cannot be started", control.display())
        })?;
        if runs.status.success() {
            tracing::info!("NVIDIA's Multi-Process Service runs in {} already", folder.display());
            return Ok(service());
        }
        let started = run(control, folder, &["-d", "-multiuser-server"], "").context("starting it")?;
        if !started.status.success() {
            let said = [started.stdout, started.stderr].concat();
            bail!(
                "{} -d -multiuser-server: {}: {} (its log is in {}; older drivers have no -multiuser-server)",
                control.display(),
                started.status,
                String::from_utf8_lossy(&said).trim(),
                folder.join("log").display()
            );
        }
        tracing::info!("NVIDIA's Multi-Process Service runs in {}", folder.display());
        Ok(service())
    }
}

/// Runs the control command, which starts the service or gives the running one what is in `input`.
fn run(control: &Path, folder: &Path, arguments: &[&str], input: &str) -> io::Result<Output> {
    let mut child = Command::new(control)
        .args(arguments)
        .envs(variables(folder))
        // The service has all devices, and each worker chooses from these as it does without.
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read has ended, and its status says so.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait_with_output()
}

impl Drop for Service {
    fn drop(&mut self) {
        match run(&self.control, &self.folder, &[], QUIT) {
            Ok(said) if said.status.success() => {}
            Ok(said) => tracing::warn!("NVIDIA's Multi-Process Service does not end: {}", said.status),
            Err(e) => tracing::warn!("NVIDIA's Multi-Process Service cannot be told to end: {e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control command that notes what it is asked in `asked`, and of which a service runs while `up`
    /// exists.
    fn control(folder: &Path, starts: bool) -> PathBuf {
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
        path
    }

    fn asked(folder: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(folder.join("asked")).unwrap_or_default();
        let _ = std::fs::remove_file(folder.join("asked"));
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_service_is_started_once_and_ends_with_the_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let (control, at) = (control(folder.path(), true), folder.path().join("mps"));
        let first = Service::start_by(&control, &at).unwrap();
        let start = format!("-d -multiuser-server {} none", sockets(&at).display());
        assert_eq!(asked(folder.path()), ["get_server_list".to_owned(), start]);
        assert!(sockets(&at).is_dir());
        // A daemon that was killed.
        std::mem::forget(first);
        let next = Service::start_by(&control, &at).unwrap();
        assert_eq!(asked(folder.path()), ["get_server_list"]);
        drop(next);
        assert_eq!(asked(folder.path()), ["quit -t 5"]);
        assert!(!folder.path().join("up").exists());
    }

    #[test]
    fn a_service_that_cannot_be_started_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("mps");
        let error = Service::start_by(&control(folder.path(), false), &at).unwrap_err();
        assert!(format!("{error:#}").contains("exit status: 1: unknown option"), "{error:#}");
        let error = Service::start_by(&folder.path().join("missing"), &at).unwrap_err();
        assert!(format!("{error:#}").contains("part of NVIDIA's driver"), "{error:#}");
        assert_eq!(asked(folder.path()).len(), 2, "nothing is told to end that was not started");
    }
}
