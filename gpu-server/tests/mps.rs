//! What workers get of NVIDIA's Multi-Process Service, here of a command in its place.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use nix::sys::signal::Signal;
use support::*;
use test_kit::link::LocalBridge;
use test_kit::*;

/// A folder with a command in the place of NVIDIA's, and the file that is there while its service runs.
fn service() -> (Arc<tempfile::TempDir>, PathBuf) {
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let (control, runs) = (folder.path().join("nvidia-cuda-mps-control"), folder.path().join("runs"));
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = -d ] && exec touch {0}\n[ -e {0} ] || exit 1\nread word\ncase $word in quit*) rm {0};; esac\n",
        runs.display()
    );
    std::fs::write(&control, script).unwrap();
    std::fs::set_permissions(&control, std::fs::Permissions::from_mode(0o755)).unwrap();
    (folder, runs)
}

/// A daemon that uses it.
fn start(folder: &Arc<tempfile::TempDir>, more: &[&str]) -> Server {
    let mut command = Command::new(binary());
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", folder.path().display()));
    let option = format!("--mps={}", folder.path().join("mps").display());
    Server::start_by(command, folder, free_port(), &[&[option.as_str()], more].concat())
}

#[test]
fn a_daemon_that_cannot_start_leaves_the_service_to_the_sessions_that_use_it() {
    let (folder, runs) = service();
    start(&folder, &[]).ready().end(Signal::SIGKILL);
    assert!(runs.exists());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("--listen=tcp:{}", taken.local_addr().unwrap());
    let mut failing = start(&folder, &[&listen]);
    assert!(!failing.wait().success() && failing.log().contains("Address already in use"));
    assert!(runs.exists());
    assert!(start(&folder, &[]).ready().end(Signal::SIGTERM).success());
    assert!(!runs.exists());
}

#[test]
fn workers_find_the_service_which_ends_with_the_daemon() {
    let (folder, runs) = service();
    let mut server = start(&folder, &[]).ready();
    assert!(runs.exists());
    let session = LocalBridge::connect(&server.socket());
    let worker = server.status()["sessions"][0]["worker"].as_u64().unwrap();
    let environment = std::fs::read(format!("/proc/{worker}/environ")).unwrap();
    let expected = format!("CUDA_MPS_PIPE_DIRECTORY={}", folder.path().join("mps/pipe").display());
    assert!(environment.split(|byte| *byte == 0).any(|variable| variable == expected.as_bytes()));
    // It has ended by itself.
    std::fs::remove_file(&runs).unwrap();
    until("the service is started again", || runs.exists());
    drop(session);
    server.end(Signal::SIGTERM);
    assert!(!runs.exists());
}
