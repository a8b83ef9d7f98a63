//! Jobs of a real Slurm on nodes without GPUs: they get leases, which end with the jobs, however these end.
//!
//! `tests/src/slurm.sh` starts the cluster in its own namespaces, so it does not see this machine's files and
//! processes and leaves nothing behind.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::programs;
use rgpu_tests::tree;
use serde_json::Value;
use support::eventually;

/// The script in `packaging/rgpu-slurm`.
const SCRIPT: &str = "packaging/rgpu-slurm/files/usr/lib/rgpu/rgpu-slurm";

struct Cluster {
    unshare: Child,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts everything, and waits until all nodes take jobs and all servers have a worker.
    fn start() -> Result<Cluster> {
        let folder = tempfile::Builder::new().prefix("rgpu-slurm-").tempdir()?;
        let log = fs::File::create(folder.path().join("log"))?;
        let script = tree::root().join("tests/src/slurm.sh");
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--ipc",
            "--mount-proc",
            "--fork",
            "--kill-child",
            "sh",
        ]);
        command.arg(script).arg(folder.path()).arg(tree::binaries()).arg(tree::guest_libraries());
        command.arg(tree::programs()).arg(tree::root().join(SCRIPT));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let unshare = command.spawn().context("cannot run unshare")?;
        // Jobs of another user write their output to this folder.
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777))?;
        let mut cluster = Cluster { unshare, folder };
        let mut ended = None;
        let mut is_up = || {
            ended = cluster.unshare.try_wait()?;
            if ended.is_some() {
                return Ok(());
            }
            let states = cluster.run("sinfo -h -N -o %T")?;
            ensure!(states.lines().collect::<Vec<_>>() == ["idle"; 3], "nodes are {states}");
            for number in [1, 2] {
                ensure!(cluster.status(number)?["workers_ready"].as_u64() > Some(0), "no worker is ready");
            }
            Ok(())
        };
        // Several clusters start at once, with a database each: minutes of a busy machine.
        let up =
            eventually(&mut is_up).or_else(|_| eventually(&mut is_up)).or_else(|_| eventually(&mut is_up));
        up.with_context(|| cluster.logs())?;
        if let Some(status) = ended {
            bail!("tests/src/slurm.sh ended ({status})\n{}", cluster.logs());
        }
        Ok(cluster)
    }

    /// Runs a command in the cluster, as root. An error quotes its output.
    fn run(&self, command: &str) -> Result<String> {
        let unshare = self.unshare.id();
        let first = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"))?;
        let mut inside = Command::new("nsenter");
        inside.args(["--target", first.trim(), "--mount", "--pid", "--net", "--uts", "--ipc", "sh", "-c"]);
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{path}:{}", tree::binaries().display());
        let output = inside.arg(format!("cd / && {command}")).env("PATH", path).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command}: {said}{wrong}");
        Ok(said)
    }

    /// Submits a script with these options, and returns the job's number. The job's output is in the file
    /// `out.NUMBER`.
    fn submit(&self, options: &str, script: &str) -> Result<String> {
        let folder = self.folder.path().display();
        let job = self.run(&format!("sbatch --parsable -o {folder}/out.%j {options} --wrap '{script}'"))?;
        Ok(job.trim().to_owned())
    }

    /// What a job has printed so far.
    fn output(&self, job: &str) -> String {
        fs::read_to_string(self.folder.path().join(format!("out.{job}"))).unwrap_or_default()
    }

    /// Waits until a job has printed these words.
    fn prints(&self, job: &str, words: &str) -> Result<()> {
        eventually(|| {
            let output = self.output(job);
            ensure!(output.contains(words), "job {job} has printed {output}");
            Ok(())
        })
        .with_context(|| self.logs())
    }

    fn state(&self, job: &str) -> Result<String> {
        Ok(self.run(&format!("squeue -h -t all -j {job} -o %T"))?.trim().to_owned())
    }

    fn status(&self, server: u32) -> Result<Value> {
        Daemon::status_at(&self.folder.path().join(format!("status{server}")))
    }

    /// Leases of both servers.
    fn leases(&self) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for server in [1, 2] {
            all.extend(self.status(server)?["leases"].as_array().context("no leases")?.iter().cloned());
        }
        Ok(all)
    }

    fn until_there_are_leases(&self, count: usize) -> Result<()> {
        eventually(|| {
            let leases = self.leases()?;
            ensure!(leases.len() == count, "{leases:?}");
            Ok(())
        })
        .with_context(|| self.logs())
    }

    /// Waits until the Epilogs of all jobs have ended: nodes are free again only then.
    fn until_nothing_runs(&self) -> Result<()> {
        eventually(|| {
            let queue = self.run("squeue -a -h")?;
            ensure!(queue.trim().is_empty(), "{queue}");
            Ok(())
        })
        .with_context(|| self.logs())
    }

    /// Lets rgpu-slurm find this script instead of a command.
    fn install(&self, command: &str, script: &str) -> Result<()> {
        let folder = self.folder.path();
        fs::write(folder.join(command), script)?;
        fs::set_permissions(folder.join(command), PermissionsExt::from_mode(0o755))?;
        self.run(&format!("echo 'PATH={}:$PATH' >>/etc/rgpu/slurm.conf", folder.display()))?;
        Ok(())
    }

    fn logs(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        let names = [
            "log",
            "mariadb.log",
            "slurmctld.log",
            "slurmdbd.log",
            "n1.log",
            "n2.log",
            "server1.log",
            "server2.log",
            "vhost.log",
        ];
        let logs = names.map(|name| format!("{name}:\n{}\n", tail(read(name)))).concat();
        let now = ["squeue -a", "sinfo -N -l", "scontrol show node -d"].map(|command| {
            self.run(command)
                .map_or_else(|e| format!("{command}: {e}\n"), |said| format!("{command}:\n{said}\n"))
        });
        logs + &now.concat()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // unshare ends the first process of the PID namespace, and the kernel all others.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// A job's script that waits until this file exists.
fn until_there_is(file: &Path) -> String {
    format!("until [ -e {} ]; do sleep 0.1; done", file.display())
}

#[test]
fn the_script_is_clean() -> Result<()> {
    for script in [SCRIPT, "tests/src/slurm.sh"] {
        let output = Command::new("shellcheck").args(["-s", "sh"]).arg(tree::root().join(script)).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}

/// A program as jobs of all users find it.
fn job_program(name: &str) -> Result<String> {
    programs::built(name)?;
    Ok(format!("/srv/programs/{name}"))
}

#[test]
fn jobs_get_leases_that_end_with_them() -> Result<()> {
    let cluster = Cluster::start()?;
    let program = job_program("device_list")?;
    let go = cluster.folder.path().join("go");
    let waits = until_there_is(&go);
    // A job with two exclusive GPUs on one node, a job with a share of a GPU on each of two nodes, and a job
    // without GPUs.
    let alone = cluster.submit("--gres=rgpu:2", &format!("{program}; {waits}"))?;
    let shared = "--uid nobody -N 2 --gres=rgpu:1,rgpumem:256M";
    let shared = cluster.submit(shared, &format!("srun {program}; {waits}"))?;
    let none = cluster.submit("", "echo \"servers: $RGPU_SERVERS.\"")?;
    cluster.prints(&alone, "PASS device_list 2 device(s)")?;
    eventually(|| {
        let output = cluster.output(&shared);
        let count = |words: &str| output.matches(words).count();
        ensure!(
            count("PASS device_list 1 device(s)") == 2 && count("memory 256 MiB in all") == 2,
            "{output}"
        );
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    cluster.prints(&none, "servers: .")?;
    let leases = cluster.leases()?;
    let of = |job: &str, exclusive: bool, memory: u64| {
        let name = format!("slurm-{job}");
        let matching =
            leases.iter().filter(|lease| lease["name"] == *name && lease["exclusive"] == exclusive);
        matching.filter(|lease| lease["memory"] == memory).count()
    };
    ensure!((of(&alone, true, 0), of(&shared, false, 256 << 20)) == (1, 2), "{leases:?}");
    let queue = cluster.run("squeue -h -o \"%i %b\"")?;
    ensure!(queue.contains(&format!("{alone} gres:rgpu:2")), "{queue}");
    let node = cluster.run(&format!("scontrol show job -d {shared}"))?;
    ensure!(node.contains("GRES=rgpu(CNT:1),rgpumem(CNT:268435456)"), "{node}");
    // The timer does not affect the leases.
    cluster.run("/etc/rgpu/rgpu-slurm renew")?;
    fs::write(&go, "")?;
    cluster.until_there_are_leases(0)?;
    // The Epilog releases the lease and then removes the file.
    eventually(|| {
        let files = cluster.run("ls /run/rgpu-slurm")?;
        ensure!(files.is_empty(), "files of leases are left: {files}");
        Ok(())
    })?;
    eventually(|| {
        let used = cluster.run(&format!("sacct -n -P -X -j {alone} -o AllocTRES,State"))?;
        ensure!(used.contains("gres/rgpu=2") && used.contains("COMPLETED"), "{used}");
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    cluster.until_nothing_runs()?;
    // A step of a job whose Prolog did not run fails and says why.
    let hidden = "lease=/run/rgpu-slurm/$SLURM_JOB_ID.$SLURMD_NODENAME; mkdir /run/lease; mv $lease* /run/lease; \
                  srun echo reached; mv /run/lease/* /run/rgpu-slurm; echo over";
    let forgotten = cluster.submit("--gres=rgpu:1", hidden)?;
    cluster.prints(&forgotten, "over")?;
    let output = cluster.output(&forgotten);
    ensure!(output.contains("slurmd has not run its Prolog") && !output.contains("reached"), "{output}");
    cluster.until_there_are_leases(0)?;
    // Steps of a job that began before the package was upgraded.
    let upgraded = cluster.folder.path().join("upgraded");
    let step = format!("echo begun; {}; srun echo still here", until_there_is(&upgraded));
    let earlier = cluster.submit("--uid nobody -w n1 --gres=rgpu:1", &step)?;
    cluster.prints(&earlier, "begun")?;
    cluster.run(&format!("cd /run/rgpu-slurm && mv {earlier}.n1.tasks {earlier}.n1"))?;
    fs::write(&upgraded, "")?;
    cluster.prints(&earlier, "still here")?;
    cluster.until_there_are_leases(0)?;
    // A job that finds no GPUs goes back into the queue, and its node is not drained.
    let rgpuctl = "rgpuctl lease --insecure --gpus 1 --exclusive";
    let somebody = cluster.run(rgpuctl)?;
    let job = cluster.submit("--gres=rgpu:4", "echo started")?;
    eventually(|| {
        let queue = cluster.run(&format!("scontrol show job {job}"))?;
        ensure!(queue.contains("JobState=PENDING") && queue.contains("Restarts=1"), "{queue}");
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    ensure!(!cluster.run("sinfo -h -N -o %T")?.contains("drain"), "a node was drained");
    ensure!(cluster.leases()?.len() == 1, "{:?}", cluster.leases()?);
    cluster.run(&format!("scancel {job}; rgpuctl release --insecure {somebody}"))?;
    Ok(())
}

#[test]
fn a_type_of_gres_is_a_model() -> Result<()> {
    let cluster = Cluster::start()?;
    let program = job_program("device_list")?;
    let go = cluster.folder.path().join("go");
    let typed = cluster
        .submit("--gres=rgpu:rgpu_software:2,rgpumem:256M", &format!("{program}; {}", until_there_is(&go)))?;
    cluster.prints(&typed, "PASS device_list 2 device(s)")?;
    let node = cluster.run(&format!("scontrol show job -d {typed}"))?;
    ensure!(node.contains("GRES=rgpu:rgpu_software(CNT:2),rgpumem(CNT:268435456)"), "{node}");
    let leases = cluster.leases()?;
    ensure!(leases.len() == 1 && leases[0]["memory"] == 128 << 20, "{leases:?}");
    // The pool has no GPU of another model, so such jobs are held, and a lease that they got for the first
    // model is released.
    for gres in ["rgpu:h100:1", "rgpu:rgpu_software:1,rgpu:h100:1"] {
        let job = cluster.submit(&format!("--uid nobody --gres={gres}"), "echo started")?;
        eventually(|| {
            let queue = cluster.run(&format!("scontrol show job {job}"))?;
            ensure!(queue.contains("JobState=PENDING") && queue.contains("Restarts=1"), "{queue}");
            ensure!(queue.contains("Priority=0") && queue.contains("held"), "{queue}");
            let comment = "AdminComment=rgpu-slurm has held this job: 1 GPU (h100";
            ensure!(queue.contains(comment) && queue.contains("can never be had"), "{queue}");
            Ok(())
        })
        .with_context(|| cluster.logs())?;
        let queue = cluster.run(&format!("squeue -h -j {job} -O Reason:40,admin_comment:60"))?;
        ensure!(queue.contains("held") && queue.contains("1 GPU (h100"), "{queue}");
        ensure!(!cluster.run("sinfo -h -N -o %T")?.contains("drain"), "a node was drained");
        cluster.until_there_are_leases(1)?;
        // For rgpuctl doctor.
        let why = cluster.run(&format!("cat /run/rgpu-slurm/{job}.n3.why"))?;
        ensure!(why.starts_with("never\n") && why.contains("can never be had"), "{why}");
        // Its user may release it.
        cluster.run(&format!("setpriv --reuid nobody --clear-groups scontrol release {job}"))?;
        let queue = cluster.run(&format!("scontrol show job {job}"))?;
        ensure!(!queue.contains("Priority=0"), "{queue}");
        cluster.run(&format!("scancel {job}"))?;
    }
    fs::write(&go, "")?;
    cluster.until_there_are_leases(0)
}

/// What a lease is for.
#[derive(Debug, PartialEq, PartialOrd, Eq, Ord)]
struct Leased {
    /// The lease's name.
    job: String,
    devices: usize,
    exclusive: bool,
    /// The limit in bytes for each device, 0 for none.
    memory: u64,
}

impl Leased {
    fn alone(job: &str, devices: usize) -> Leased {
        Leased { job: format!("slurm-{job}"), devices, exclusive: true, memory: 0 }
    }

    fn shared(job: &str, devices: usize, memory: u64) -> Leased {
        Leased { exclusive: false, memory, ..Leased::alone(job, devices) }
    }
}

/// Submits a job with these options, which begins so many jobs at once, and ends them when all of them have
/// begun. Returns their numbers and the leases that they had.
fn run_once(cluster: &Cluster, options: &str, jobs: usize) -> Result<(Vec<String>, Vec<Leased>)> {
    let waits = format!("echo begun; {}", until_there_is(Path::new("/never")));
    let first = cluster.submit(options, &waits)?;
    let mut begun = Vec::new();
    eventually(|| {
        begun = cluster.run("squeue -h -t running -o %A")?.lines().map(str::to_owned).collect();
        ensure!(begun.len() == jobs, "{begun:?}");
        ensure!(begun.iter().all(|job| cluster.output(job).contains("begun")), "{begun:?}");
        Ok(())
    })
    .with_context(|| format!("{options}: job {first}: {}", cluster.logs()))?;
    let mut leases = Vec::new();
    for lease in cluster.leases()? {
        leases.push(Leased {
            job: lease["name"].as_str().unwrap_or_default().to_owned(),
            devices: lease["devices"].as_array().map_or(0, Vec::len),
            exclusive: lease["exclusive"] == true,
            memory: lease["memory"].as_u64().unwrap_or(0),
        });
    }
    cluster.run("scancel --user=root; scancel --user=nobody")?;
    cluster.until_there_are_leases(0)?;
    cluster.until_nothing_runs()?;
    leases.sort();
    begun.sort();
    Ok((begun, leases))
}

#[test]
fn a_job_has_the_gpus_that_slurm_has_counted_for_it_and_no_others() -> Result<()> {
    let cluster = Cluster::start()?;
    // Lines in a job's name that look like Slurm's own.
    let forged = r#"Nodes=n1 CPU_IDs=0 Mem=0 GRES=rgpu(CNT:3)\n""#;
    for before in ["", r"   NumNodes=1 NumCPUs=1\n"] {
        let name = format!(r#"-J "$(printf "x\n{before}     {forged})""#);
        let (begun, leases) = run_once(&cluster, &format!("-w n1 --uid nobody --gres=rgpu:1 {name}"), 1)?;
        let counted = vec![Leased::alone(&begun[0], 1)];
        // Where it cannot be told which lines are Slurm's own, there are no GPUs.
        ensure!(leases == if before.is_empty() { counted } else { Vec::new() }, "{leases:?}");
    }
    // The last task of an array has the number by which Slurm knows all of them.
    let (begun, leases) = run_once(&cluster, "-w n1 --array=0-1 --gres=rgpu:1", 2)?;
    let counted: Vec<_> = begun.iter().map(|job| Leased::alone(job, 1)).collect();
    ensure!(leases == counted, "{leases:?}");
    // Less memory than a byte for each GPU is not the same as no limit.
    let (begun, leases) = run_once(&cluster, "-w n1 --gres=rgpu:2,rgpumem:1", 1)?;
    ensure!(leases == [Leased::shared(&begun[0], 2, 1)], "{leases:?}");
    Ok(())
}

#[test]
fn a_job_with_whole_nodes_leases_what_it_asked_for() -> Result<()> {
    let cluster = Cluster::start()?;
    let leases_of = |options: &str, expected: &dyn Fn(&str) -> Vec<Leased>| {
        let (begun, leases) = run_once(&cluster, options, 1)?;
        ensure!(leases == expected(&begun[0]), "{options}: {leases:?}");
        Ok(())
    };
    leases_of("--exclusive", &|_| Vec::new())?;
    leases_of("--exclusive --gres=none", &|_| Vec::new())?;
    leases_of("--exclusive -w n1 --gres=rgpu", &|job| vec![Leased::alone(job, 1)])?;
    leases_of("--exclusive -w n1 --gres=rgpu:2,rgpumem:512M", &|job| {
        vec![Leased::shared(job, 2, 256 << 20)]
    })?;
    // Where Slurm counts types, a job that asks for none has GPUs of the first with as many.
    leases_of("--exclusive -w n3 --gres=rgpu:2", &|job| vec![Leased::alone(job, 2)])?;
    leases_of("--exclusive -w n3 --gres=rgpu:rgpu_software:1", &|job| vec![Leased::alone(job, 1)])?;
    // The tasks of an array have one number.
    let (begun, leases) = run_once(&cluster, "--exclusive --array=0-1%1 -w n1 --gres=rgpu:1", 1)?;
    ensure!(leases == [Leased::alone(&begun[0], 1)], "{leases:?}");
    cluster.run("scontrol update PartitionName=all OverSubscribe=EXCLUSIVE")?;
    leases_of("", &|_| Vec::new())?;
    leases_of("-w n1 --gres=rgpu:2", &|job| vec![Leased::alone(job, 2)])
}

#[test]
fn a_job_has_its_gpus_where_slurm_shows_no_gres_of_jobs() -> Result<()> {
    let cluster = Cluster::start()?;
    // slurmctld 22.05 has select/linear by default. It forgets all jobs when that changes.
    cluster.run(
        "pids=$(cat /run/slurmctld.pid /run/slurmd.n?.pid); kill $pids; \
         for pid in $pids; do while kill -0 $pid; do sleep 0.1; done; done 2>/dev/null",
    )?;
    cluster.run("sed -i /^SelectType/d /etc/slurm/slurm.conf && slurmctld -c")?;
    cluster.run("for node in n1 n2 n3; do slurmd -N $node; done")?;
    eventually(|| {
        let states = cluster.run("sinfo -h -N -o %T")?;
        ensure!(states.lines().collect::<Vec<_>>() == ["idle"; 3], "nodes are {states}");
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    ensure!(cluster.run("scontrol show config")?.contains("select/linear"), "another plugin was chosen");
    let (begun, leases) = run_once(&cluster, "--uid nobody -w n1 --gres=rgpu:2", 1)?;
    ensure!(leases == [Leased::alone(&begun[0], 2)], "{leases:?}");
    let (begun, leases) = run_once(&cluster, "-w n3 --gres=rgpu:rgpu_software:2,rgpumem:512M", 1)?;
    ensure!(leases == [Leased::shared(&begun[0], 2, 256 << 20)], "{leases:?}");
    let (_, leases) = run_once(&cluster, "", 1)?;
    ensure!(leases.is_empty(), "{leases:?}");
    // What it has written into its name is not what Slurm says.
    let name = r#"-J "$(printf "x\n   TresPerNode=gres:rgpu:2\n")""#;
    let (_, leases) = run_once(&cluster, name, 1)?;
    ensure!(leases.is_empty(), "{leases:?}");
    Ok(())
}

#[test]
fn a_task_of_an_array_that_finds_no_gpus_is_requeued_alone() -> Result<()> {
    let cluster = Cluster::start()?;
    let somebody = cluster.run("rgpuctl lease --insecure --gpus 2 --exclusive")?;
    let never = until_there_is(Path::new("/never"));
    let array = cluster.submit("-w n1 --array=0-1 --gres=rgpu:2", &never)?;
    eventually(|| {
        let tasks = cluster.run(&format!("scontrol show job {array}"))?;
        for words in ["JobState=RUNNING", "JobState=PENDING", "Restarts=0"] {
            ensure!(tasks.matches(words).count() == 1, "{tasks}");
        }
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    cluster.run(&format!("scancel {array}; rgpuctl release --insecure {somebody}"))?;
    cluster.until_there_are_leases(0)
}

#[test]
fn each_component_of_a_heterogeneous_job_has_its_own_lease() -> Result<()> {
    let cluster = Cluster::start()?;
    let go = cluster.folder.path().join("go");
    let script = format!(
        "srun --het-group=0,1,2 sh -c \"echo task \\$SLURM_PROCID has \\$RGPU_SERVERS.\"; {}",
        until_there_is(&go)
    );
    let job = cluster.submit("-w n1 --gres=rgpu:2 : -w n2 --gres=rgpu:1 : -w n3", &script)?;
    for task in [0, 1] {
        cluster.prints(&job, &format!("task {task} has tcp:127.0.0.1:970"))?;
    }
    cluster.prints(&job, "task 2 has .")?;
    let leases = cluster.leases()?;
    ensure!(leases.len() == 2, "{leases:?}");
    cluster.run("/etc/rgpu/rgpu-slurm renew")?;
    ensure!(cluster.leases()?.len() == 2, "{:?}", cluster.leases()?);
    fs::write(&go, "")?;
    cluster.until_there_are_leases(0)?;
    // All components go back into the queue if one finds no GPUs, and are held if it never can.
    let job = cluster.submit("-w n1 --gres=rgpu:2 : -w n3 --gres=rgpu:h100:1", "echo started")?;
    eventually(|| {
        let queue = cluster.run(&format!("scontrol show job {job}"))?;
        let components = |words: &str| queue.matches(words).count();
        ensure!((components("Restarts="), components("Restarts=0")) == (2, 0), "{queue}");
        ensure!(components("Priority=0") == 2 && queue.contains("AdminComment=rgpu-slurm"), "{queue}");
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    cluster.run(&format!("scancel {job}"))?;
    cluster.until_there_are_leases(0)
}

#[test]
fn a_job_without_gpus_does_not_inherit_those_of_the_job_that_submits_it() -> Result<()> {
    let cluster = Cluster::start()?;
    let folder = cluster.folder.path().display();
    let script = format!("sbatch -w n2 -o {folder}/out.inner --wrap \"echo servers: \\$RGPU_SERVERS.\"");
    let outer = cluster.submit("-w n1 --gres=rgpu:1", &format!("echo $RGPU_SERVERS; {script}"))?;
    cluster.prints("inner", "servers: .")?;
    cluster.prints(&outer, "tcp:127.0.0.1:970")?;
    // What its user has chosen stays.
    let chosen = cluster.submit("--export=ALL,RGPU_SERVERS=gpu1", "echo servers: $RGPU_SERVERS.")?;
    cluster.prints(&chosen, "servers: gpu1.")
}

#[test]
fn a_job_cannot_keep_its_lease_by_writing_into_its_file() -> Result<()> {
    let cluster = Cluster::start()?;
    let empties =
        "file=/run/rgpu-slurm/$SLURM_JOB_ID.$SLURMD_NODENAME; truncate -s 0 $file $file.tasks; echo over";
    let job = cluster.submit("--uid nobody -w n1 --gres=rgpu:1", empties)?;
    cluster.prints(&job, "over")?;
    cluster.until_nothing_runs()?;
    cluster.until_there_are_leases(0)
}

#[test]
fn slurmctld_is_asked_again_by_the_prolog_and_by_tasks_only_if_they_find_nothing() -> Result<()> {
    let cluster = Cluster::start()?;
    let seen = cluster.folder.path().join("seen");
    fs::create_dir(&seen)?;
    fs::set_permissions(&seen, PermissionsExt::from_mode(0o777))?;
    let folder = seen.display();
    for name in ["squeue", "scontrol"] {
        let script = format!(
            "#!/bin/sh\nseen={folder} name={name}\necho $SLURM_SCRIPT_CONTEXT $SLURM_JOB_ID $name $* >>$seen/asked\n\
             [ -e $seen/answers ] || {{ touch $seen/answers; exit 1; }}\nexec /usr/bin/$name \"$@\"\n",
        );
        cluster.install(name, &script)?;
    }
    cluster.run("echo WAIT=600 >>/etc/rgpu/slurm.conf")?;
    begin(&cluster, 1)?;
    let job = cluster.submit("-w n2", "srun true && srun echo over")?;
    cluster.prints(&job, "over")?;
    let asked = fs::read_to_string(seen.join("asked"))?;
    ensure!(asked.contains(&format!("prolog_slurmd {job}")), "{asked}");
    ensure!(!asked.contains("prolog_task"), "tasks have asked: {asked}");
    // One question is enough for a job that shares its number with no other.
    ensure!(!asked.contains("squeue"), "{asked}");
    // Jobs of many nodes have as many lines, and each Prolog looks for its own.
    ensure!(!asked.contains("hostnames"), "one node was taken apart: {asked}");
    // A step that finds nothing of its Prolog, and gets no answer either, fails.
    let unknown = format!(
        "rm /run/rgpu-slurm/$SLURM_JOB_ID.n2.tasks {folder}/answers; srun echo reached; echo not started"
    );
    let job = cluster.submit("-w n2", &unknown)?;
    cluster.prints(&job, "not started")?;
    let output = cluster.output(&job);
    ensure!(output.contains("slurmctld does not say") && !output.contains("reached"), "{output}");
    cluster.run("scancel --user=root")?;
    cluster.until_there_are_leases(0)
}

/// rgpuctl is called through this script, which takes down what all users of a machine can see of it. Two
/// calls that renew leases wait for each other.
const SEEN: &str = r#"
echo "$*" >>"$seen/arguments"
if [ "$1" = renew ]; then
	touch "$seen/renewing.$$"
	left=600
	until [ "$(ls "$seen" | grep -c renewing)" -ge 2 ]; do
		left=$((left - 1))
		[ $left -gt 0 ] || { echo "alone" >>"$seen/arguments"; break; }
		sleep 0.1
	done
fi
exec "$rgpuctl" "$@"
"#;

#[test]
fn leases_are_renewed_at_the_same_time_and_their_keys_are_on_no_command_line() -> Result<()> {
    let cluster = Cluster::start()?;
    let seen = cluster.folder.path().join("seen");
    fs::create_dir(&seen)?;
    let script = format!(
        "#!/bin/sh\nseen={} rgpuctl={}\n{SEEN}",
        seen.display(),
        tree::binaries().join("rgpuctl").display()
    );
    cluster.install("rgpuctl", &script)?;
    let script = format!("echo begun; {}", until_there_is(Path::new("/never")));
    let jobs = [(), ()].map(|()| cluster.submit("-w n1 --gres=rgpu:1", &script));
    for job in jobs {
        cluster.prints(&job?, "begun")?;
    }
    cluster.run("/etc/rgpu/rgpu-slurm renew")?;
    cluster.run("scancel --user=root")?;
    cluster.until_there_are_leases(0)?;
    let arguments = fs::read_to_string(seen.join("arguments"))?;
    for command in ["lease", "renew", "release"] {
        let count = arguments.lines().filter(|line| line.split(' ').next() == Some(command)).count();
        ensure!(count == 2, "rgpuctl {command} was not called for each job: {arguments}");
    }
    ensure!(!arguments.contains('#'), "a lease's key is on a command line: {arguments}");
    ensure!(!arguments.contains("alone"), "a lease was renewed after another one: {arguments}");
    Ok(())
}

/// Starts a job that never ends by itself, on the first node.
fn begin(cluster: &Cluster, gpus: u32) -> Result<String> {
    let never = until_there_is(Path::new("/never"));
    let job = cluster.submit(&format!("-w n1 --gres=rgpu:{gpus}"), &format!("echo begun; {never}"))?;
    cluster.prints(&job, "begun")?;
    cluster.until_there_are_leases(1)?;
    Ok(job)
}

#[test]
fn neither_a_dead_job_nor_a_restarted_slurmctld_leaves_a_lease() -> Result<()> {
    let cluster = Cluster::start()?;
    let job = begin(&cluster, 1)?;
    cluster.run(&format!("scancel {job}"))?;
    cluster.until_there_are_leases(0)?;
    // Jobs continue without slurmctld, and their leases are renewed. slurmctld is ended cleanly: if it were
    // killed, it could forget that the job has started, and would start it again with another lease.
    let job = begin(&cluster, 1)?;
    cluster.run(
        "pid=$(cat /run/slurmctld.pid); kill $pid; while kill -0 $pid; do sleep 0.1; done 2>/dev/null",
    )?;
    cluster.run("/etc/rgpu/rgpu-slurm renew")?;
    ensure!(cluster.leases()?.len() == 1, "without slurmctld: {:?}", cluster.leases()?);
    cluster.run("slurmctld")?;
    eventually(|| {
        ensure!(cluster.state(&job)? == "RUNNING", "the job is not known yet");
        Ok(())
    })
    .with_context(|| cluster.logs())?;
    cluster.run("/etc/rgpu/rgpu-slurm renew")?;
    ensure!(cluster.leases()?.len() == 1, "with another slurmctld: {:?}", cluster.leases()?);
    // As if an Epilog never ran: the job is over, or runs on another node by now, or Slurm has the node no
    // more, and the timer notices.
    for file in ["4711.n2".to_owned(), format!("{job}.n2"), format!("{job}.renamed")] {
        cluster.run(&format!("rgpuctl lease --insecure --gpus 1 >/run/rgpu-slurm/{file}"))?;
        ensure!(cluster.leases()?.len() == 2, "{file}: {:?}", cluster.leases()?);
        cluster.run("/etc/rgpu/rgpu-slurm renew")?;
        ensure!(cluster.leases()?.len() == 1, "{file}: {:?}", cluster.leases()?);
    }
    cluster.run(&format!("scancel {job}"))?;
    cluster.until_there_are_leases(0)
}

#[test]
fn a_killed_slurmctld_leaves_no_lease() -> Result<()> {
    /// A job whose node still runs what is left of it, or of another one that had its number. Slurm drains
    /// that node.
    const HELD: &str = "PENDING launch failed requeued held";
    let cluster = Cluster::start()?;
    let resume = || -> Result<()> {
        if cluster.run("sinfo -h -n n1 -o %T")?.contains("drain") {
            cluster.run("scontrol update NodeName=n1 State=RESUME")?;
        }
        Ok(())
    };
    for moment in ["submitted", "begun", "ended"] {
        let never = until_there_is(Path::new("/never"));
        let words = format!("begun before {moment}");
        let script = format!("echo {words}; {never}");
        let job = loop {
            let job = cluster.submit("-w n1 --gres=rgpu:1", &script)?;
            if moment == "submitted" {
                break job;
            }
            let mut output = String::new();
            let mut state = String::new();
            eventually(|| {
                state = cluster.run(&format!("squeue -h -t all -j {job} -o '%T %r'"))?.trim().to_owned();
                output = cluster.output(&job);
                let failed = ["FAILED ", "COMPLETED "].iter().any(|over| state.starts_with(over));
                ensure!(output.contains(&words) || failed || state == HELD, "{state}: {output}");
                Ok(())
            })
            .with_context(|| cluster.logs())?;
            if output.contains(&words) {
                break job;
            }
            // It got the number of a job that was forgotten, for which slurmd has run the Prolog, or whose
            // credential it has revoked, and has failed; or of one that still runs.
            if state == HELD {
                cluster.run(&format!("scancel {job}"))?;
                resume()?;
            }
        };
        if moment == "ended" {
            cluster.run(&format!("scancel {job}"))?;
        }
        cluster.run(
            "pid=$(cat /run/slurmctld.pid); kill -KILL $pid; while kill -0 $pid; do sleep 0.1; done 2>/dev/null",
        )?;
        cluster.run("slurmctld")?;
        // It may have forgotten the job, which ends then; that the job has begun, which it does again then;
        // or that the job has ended, which then seems to run. If what is left of the job still runs on its
        // node when it begins again, Slurm drains the node and holds the job, without an Epilog: the timer
        // notices. Either way a lease is of a job that runs.
        eventually(|| {
            cluster.run("/etc/rgpu/rgpu-slurm renew")?;
            let leases = cluster.leases()?;
            let jobs = cluster.run("squeue -h -o '%T %r'")?;
            let (run, others): (Vec<_>, Vec<_>) = jobs.lines().partition(|job| job.starts_with("RUNNING "));
            ensure!(others.iter().all(|job| *job == HELD), "jobs: {jobs}");
            ensure!(leases.len() <= run.len(), "jobs: {jobs}; leases: {leases:?}");
            Ok(())
        })
        .with_context(|| format!("{moment}: {}", cluster.logs()))?;
        cluster.run("scancel --user=root")?;
        eventually(|| {
            cluster.run("/etc/rgpu/rgpu-slurm renew")?;
            let (leases, jobs) = (cluster.leases()?, cluster.run("squeue -h -o %T")?);
            ensure!(leases.is_empty() && jobs.is_empty(), "jobs: {jobs}; leases: {leases:?}");
            Ok(())
        })
        .with_context(|| format!("{moment}: {}", cluster.logs()))?;
        resume()?;
    }
    Ok(())
}

#[test]
fn a_dead_node_leaves_no_lease() -> Result<()> {
    let cluster = Cluster::start()?;
    cluster.run("echo MINUTES=1 >>/etc/rgpu/slurm.conf")?;
    begin(&cluster, 2)?;
    cluster.run("kill -KILL $(cat /run/slurmd.n1.pid) $(pgrep slurmstepd)")?;
    cluster.until_there_are_leases(0)?;
    eventually(|| {
        let log = |number| fs::read_to_string(cluster.folder.path().join(format!("server{number}.log")));
        let log = log(1)? + &log(2)?;
        ensure!(log.contains("the lease was not renewed in time"), "{log}");
        Ok(())
    })
}
