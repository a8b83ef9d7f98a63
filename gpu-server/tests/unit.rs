//! What the systemd unit does before the server starts, with a stand-in for NVIDIA's program.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const UNIT: &str = include_str!("../systemd/rgpu-server.service");

#[test]
fn the_unit_makes_the_device_nodes_of_all_gpus() {
    let line = UNIT.lines().find_map(|line| line.strip_prefix("ExecStartPre=+-/bin/sh -c '")).unwrap();
    let script = line.strip_suffix('\'').unwrap().replace("$$", "$");
    let folder = tempfile::tempdir().unwrap();
    let (gpus, calls) = (folder.path().join("gpus"), folder.path().join("calls"));
    let script = script.replace("/proc/driver/nvidia/gpus", gpus.to_str().unwrap());
    let run = || {
        let path = format!("{}:/usr/bin:/bin", folder.path().display());
        let output = Command::new("/bin/sh").args(["-c", &script]).env("PATH", path).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        fs::read_to_string(&calls).unwrap_or_default()
    };
    assert_eq!(run(), "", "a machine without the program");

    let program = folder.path().join("nvidia-modprobe");
    fs::write(&program, format!("#!/bin/sh\necho \"$*\" >>{}\n", calls.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run(), "-c 255\n-u -c 0\n", "no GPU");

    fs::remove_file(&calls).unwrap();
    for (gpu, minor) in [("0000:01:00.0", 3), ("0000:0a:00.0", 0)] {
        fs::create_dir_all(gpus.join(gpu)).unwrap();
        // As the driver writes it.
        let text = format!("Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n");
        fs::write(gpus.join(gpu).join("information"), text).unwrap();
    }
    assert_eq!(run(), "-c 255\n-c 3\n-c 0\n-u -c 0\n");
}
