//! The script of the package rgpu-slurm, with stand-ins for Slurm's commands and for rgpuctl. The part
//! `slurm` of `cargo xtask test` runs it with a real Slurm.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/rgpu-slurm/files/usr/lib/rgpu/rgpu-slurm");

/// What `scontrol show job -d` prints of a job with a GPU on the node n1.
const SHOWN: &str = "echo '   NodeList=n1
   NumNodes=1 NumCPUs=1
     Nodes=n1 CPU_IDs=0 Mem=0 GRES=rgpu:h200(CNT:1)
   MinCPUsNode=1'";

/// A node, on which the script finds these stand-ins. Each call of one is a line in the file `calls`.
struct Node(tempfile::TempDir);

impl Node {
    fn new(commands: &[(&str, &str)]) -> Node {
        let node = Node(tempfile::tempdir().unwrap());
        // Its own folder for leases, and no settings of this machine.
        let script = fs::read_to_string(SCRIPT).unwrap();
        let script = script.replace("STATE=/run/rgpu-slurm", &format!("STATE={}", node.state().display()));
        let script = script.replace("/etc/rgpu/slurm.conf", "/nonexistent");
        fs::write(node.0.path().join("script"), script).unwrap();
        fs::create_dir(node.state()).unwrap();
        for name in ["logger", "rgpuctl", "scontrol", "squeue"] {
            let does = commands.iter().find(|(command, _)| *command == name).map_or("", |(_, does)| does);
            let text = format!("#!/bin/sh\necho {name} \"$*\" >>{}\n{does}\n", node.calls_file().display());
            fs::write(node.0.path().join(name), text).unwrap();
            fs::set_permissions(node.0.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        node
    }

    fn state(&self) -> PathBuf {
        self.0.path().join("state")
    }

    fn calls_file(&self) -> PathBuf {
        self.0.path().join("calls")
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.calls_file()).unwrap_or_default()
    }

    /// Runs the script, as slurmd does for a job's Prolog, or as the timer does.
    fn run(&self, context: Option<&str>) {
        let mut command = Command::new("sh");
        command.arg(self.0.path().join("script"));
        match context {
            Some(context) => command.env("SLURM_SCRIPT_CONTEXT", context),
            None => command.arg("renew").env_remove("SLURM_SCRIPT_CONTEXT"),
        };
        command.env("PATH", format!("{}:/usr/bin:/bin", self.0.path().display()));
        let user = nix::unistd::geteuid().to_string();
        let job = [("SLURM_JOB_ID", "57"), ("SLURMD_NODENAME", "n1"), ("SLURM_JOB_UID", &user)];
        let output = command.envs(job).output().unwrap();
        assert!(output.status.success(), "{output:?}\n{}", self.calls());
    }
}

/// rgpuctl that grants no lease.
fn refuses(status: u8) -> String {
    format!(
        "[ \"$1\" != lease ] || {{ echo a warning >&2; echo 'rgpuctl: 1 GPU (h200): no' >&2; exit {status}; }}"
    )
}

#[test]
fn a_job_that_can_never_have_its_gpus_is_held_with_the_reason() {
    let scontrol = format!("[ \"$1\" != show ] || {{ {SHOWN}; }}");
    let squeue = ("squeue", "echo 57 56_1 56_1");
    let node = Node::new(&[("rgpuctl", &refuses(4)), ("scontrol", &scontrol), squeue]);
    node.run(Some("prolog_slurmd"));
    let calls = node.calls();
    assert!(calls.contains("scontrol requeuehold 56_1\n"), "{calls}");
    let comment = "JobId=56_1 AdminComment=rgpu-slurm has held this job: 1 GPU (h200): no\n";
    assert!(calls.contains(comment), "{calls}");
    assert!(calls.contains("job 57 is held: 1 GPU (h200): no; once"), "{calls}");
    assert!(!calls.contains("scontrol requeue 56_1"), "{calls}");
    let why = fs::read_to_string(node.state().join("57.n1.why")).unwrap();
    assert_eq!(why, "never\n1 GPU (h200): no\n");
}

#[test]
fn a_job_whose_gpus_are_not_free_goes_back_into_the_queue() {
    let scontrol = format!("[ \"$1\" != show ] || {{ {SHOWN}; }}");
    let squeue = ("squeue", "echo 57 57 57");
    for status in [1, 125] {
        let node = Node::new(&[("rgpuctl", &refuses(status)), ("scontrol", &scontrol), squeue]);
        node.run(Some("prolog_slurmd"));
        let calls = node.calls();
        assert!(calls.contains("scontrol requeue 57\n") && calls.contains("back into the queue"), "{calls}");
        assert!(!calls.contains("requeuehold") && !calls.contains("AdminComment"), "{calls}");
        let why = fs::read_to_string(node.state().join("57.n1.why")).unwrap();
        assert_eq!(why, "1 GPU (h200): no\n");
    }
}

#[test]
fn a_job_that_slurm_does_not_put_back_is_said_to_have_started() {
    // As Slurm refuses for jobs that are not batch jobs.
    let scontrol = format!("case $1 in show) {SHOWN} ;; requeue*) exit 1 ;; esac");
    let squeue = ("squeue", "echo 57 57 57");
    for (status, log, words) in
        [(4, "cannot be held", "never started"), (125, "cannot go back into the queue", "started")]
    {
        let node = Node::new(&[("rgpuctl", &refuses(status)), ("scontrol", &scontrol), squeue]);
        node.run(Some("prolog_slurmd"));
        let calls = node.calls();
        assert!(calls.contains(log) && !calls.contains("AdminComment"), "{calls}");
        let why = fs::read_to_string(node.state().join("57.n1.why")).unwrap();
        assert_eq!(why, format!("{words}\n1 GPU (h200): no\n"));
    }
}

#[test]
fn leases_are_renewed_before_slurmctld_is_asked() {
    let lease = "tcp:gpu1:9700#0";
    let (unknown, silent) = ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "exit 1");
    for (squeue, ends) in [("echo 57 57 57", false), (silent, false), ("", true), (unknown, true)] {
        let node = Node::new(&[("squeue", squeue)]);
        fs::write(node.state().join("57.n1"), lease).unwrap();
        fs::write(node.state().join("57.n1.tasks"), lease).unwrap();
        node.run(None);
        let calls = node.calls();
        let commands: Vec<&str> = calls.lines().map(|line| line.split(" -").next().unwrap().trim()).collect();
        let released = if ends { vec!["rgpuctl release"] } else { Vec::new() };
        assert_eq!(commands, [vec!["rgpuctl renew", "squeue"], released].concat(), "{squeue}");
        assert_eq!(Path::exists(&node.state().join("57.n1.tasks")), !ends, "{squeue}");
    }
}
