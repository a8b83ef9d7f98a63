//! Slurm's control groups of version 2, which Debian 12 has, beside those of rgpu: one machine with a kernel
//! of its own is controller, server and node, set up as `docs/slurm.md` says. This machine's kernel may have
//! both versions, which slurmd refuses in a container. The packages of rgpu are those in `target/packages`.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rgpu_tests::machine::{Machine, systemd};
use rgpu_tests::tree;
use serde_json::Value;

use super::slurm::{SLURM_CONF, changed};

/// How long a command may take in an emulated machine on a busy host.
const LONG: Duration = Duration::from_secs(900);

const PACKAGES: [&str; 5] = ["rgpu-server", "vhost-rgpu", "rgpuctl", "rgpu-libs", "rgpu-slurm"];
const PROGRAMS: [&str; 3] = ["device_list", "idle", "vectorAdd"];

/// Lines in place of those of [`SLURM_CONF`]: control groups for everything that can have them.
const CHANGED: &[&str] = &[
    "SlurmctldHost=host",
    "ProctrackType=proctrack/cgroup",
    "TaskPlugin=task/cgroup,task/affinity",
    "SelectTypeParameters=CR_Core_Memory",
    "JobAcctGatherType=jobacct_gather/cgroup",
];
/// What the page adds to them, for this machine.
const ADDED: &str = "GresTypes=rgpu,rgpumem
Prolog=/usr/lib/rgpu/rgpu-slurm
Epilog=/usr/lib/rgpu/rgpu-slurm
TaskProlog=/usr/lib/rgpu/rgpu-slurm
PrologFlags=Alloc
NodeName=host CPUs=2 RealMemory=1500 Gres=rgpu:4,rgpumem:4G
";
const GRES_CONF: &str = "NodeName=host Name=rgpu Count=4\nNodeName=host Name=rgpumem Count=4G\n";
const CGROUP_CONF: &str =
    "ConstrainCores=yes\nConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n";

/// Memory of a worker, of a device process, and of the job that waits, in MiB.
const WORKER: u64 = 100;
const DEVICE_PROCESS: u64 = 200;
const JOB: u64 = 300;

struct Node(Machine);

impl Node {
    /// Boots the machine with the packages' files and the programs.
    fn boot() -> Result<Node> {
        let mut builder = systemd::builder_with_slurm()?;
        let from = tree::target().join("packages");
        let files = fs::read_dir(&from)
            .with_context(|| format!("there are no packages in {}: cargo xtask package", from.display()))?;
        let mut found = 0;
        for file in files {
            let path = file?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if PACKAGES.iter().any(|package| name.starts_with(&format!("{package}_"))) {
                builder = builder.file(&path, format!("/host/packages/{name}"));
                found += 1;
            }
        }
        ensure!(found == PACKAGES.len(), "cargo xtask package makes {PACKAGES:?}: {found} are there");
        for program in PROGRAMS {
            let path = tree::programs_static().join(program);
            ensure!(path.exists(), "cargo xtask programs {} makes the programs", PROGRAMS.join(" "));
            builder = builder.file(path, format!("/host/programs/{program}"));
        }
        Ok(Node(systemd::boot(builder)?))
    }

    fn run(&self, command: &str) -> Result<String> {
        println!("     # {command}");
        self.0.check(command, LONG)
    }

    fn write(&self, place: &str, text: &str) -> Result<()> {
        self.0.write_file(place, 0o644, text.as_bytes())
    }

    /// Slurm, and what `docs/slurm.md` says, in its order.
    fn set_up(&self) -> Result<()> {
        let version = self.run("stat -f -c %T /sys/fs/cgroup")?;
        ensure!(version == "cgroup2fs", "the control groups are {version}");
        // slurmd needs an address that is not the loopback's.
        self.run("ip link add d0 type dummy && ip addr add 10.99.0.1/24 dev d0 && ip link set d0 up")?;
        self.run("useradd -m -s /bin/bash ada")?;

        self.run("apt-get install -y --no-install-recommends /mnt/packages/*.deb")?;
        self.write(
            "/etc/rgpu/clients.toml",
            "lease_required = true\n[[client]]\nname = \"host\"\nexclusive_leases = true\nleases = 64\n",
        )?;
        let server = "/etc/rgpu/rgpu-server.toml";
        self.run(&format!(
            "sed -i -e 's|^#: clients = .*|clients = \"/etc/rgpu/clients.toml\"|' \
             -e '/^\\[software\\]/a devices = 4' -e '/^\\[sandbox\\]/a memory = \"{WORKER}M\"' {server}"
        ))?;
        self.run("rgpuctl upgrade")?;
        self.run("sh -c \"$(rgpuctl enroll host)\"")?;
        self.run(&format!(
            "sed -i -e 's|^server = .*|server = \"host\"|' \
             -e '/^\\[sandbox\\]/a memory_mib = {DEVICE_PROCESS}' /etc/rgpu/vhost-rgpu.toml"
        ))?;
        self.write("/etc/rgpu/pool.toml", "servers = [\"host\"]\n")?;
        self.run("vhost-rgpu --config /etc/rgpu/vhost-rgpu.toml --check-config")?;
        self.run("mkdir /etc/systemd/system/vhost-rgpu.socket.d")?;
        self.write("/etc/systemd/system/vhost-rgpu.socket.d/override.conf", "[Socket]\nSocketMode=0666\n")?;
        self.run("systemctl daemon-reload && systemctl restart vhost-rgpu.socket")?;
        self.run("rgpuctl inventory")?;

        let slurm_conf = changed(SLURM_CONF, CHANGED)? + ADDED;
        for (name, text) in
            [("slurm.conf", &*slurm_conf), ("gres.conf", GRES_CONF), ("cgroup.conf", CGROUP_CONF)]
        {
            self.write(&format!("/etc/slurm/{name}"), text)?;
        }
        self.run("systemctl restart slurmctld && systemctl restart slurmd")?;
        self.until_idle()?;
        println!("{}", self.run("rgpuctl doctor")?);
        Ok(())
    }

    /// Waits until a condition, whose error says what is there instead, is met.
    fn eventually(&self, condition: impl Fn() -> Result<()>) -> Result<()> {
        let begin = Instant::now();
        while let Err(error) = condition() {
            let logs = || {
                self.0.check(
                    "tail -n 20 /var/log/slurm/*.log; journalctl -b -n 40 --no-pager; rgpuctl leases",
                    LONG,
                )
            };
            ensure!(begin.elapsed() < LONG, "{error:#}\n{}", logs().unwrap_or_default());
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    /// Waits until no job is on the node, and its Epilog has ended.
    fn until_idle(&self) -> Result<()> {
        self.eventually(|| {
            let state = self.0.check("sinfo -h -N -o %T", LONG)?;
            ensure!(state == "idle", "the node is {state}");
            Ok(())
        })
    }

    /// Submits this script as a user, and returns the job's number.
    fn submit(&self, options: &str, script: &str) -> Result<String> {
        self.write("/tmp/job", &format!("#!/bin/bash\ncd /home/ada\n{script}\n"))?;
        self.run(&format!("su ada -c 'cd && sbatch --parsable -o out.%j {options} /tmp/job'"))
    }

    /// What a job has printed.
    fn output(&self, job: &str) -> Result<String> {
        self.0.check(&format!("cat /home/ada/out.{job}"), LONG)
    }

    fn state(&self, job: &str) -> Result<String> {
        let shown = self.0.check(&format!("scontrol show job {job} -o"), LONG)?;
        let state = shown.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
        // A job that is held waits forever.
        ensure!(!shown.contains("held"), "{shown}");
        Ok(state.with_context(|| shown.clone())?.to_owned())
    }

    /// Waits until a job has ended, and requires that it ended so.
    fn until_ended(&self, job: &str, wanted: &str) -> Result<String> {
        let ended = |state: &str| !["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"].contains(&state);
        self.eventually(|| {
            let state = self.state(job)?;
            ensure!(ended(&state), "job {job} is {state}");
            Ok(())
        })?;
        let (state, said) = (self.state(job)?, self.output(job)?);
        ensure!(state == wanted, "job {job} is {state}: {said}");
        Ok(said)
    }

    /// Waits until the server has leases of these jobs only.
    fn until_leases_are_of(&self, jobs: &[&str]) -> Result<()> {
        self.eventually(|| {
            let status = self.status("server")?;
            let leases = status["leases"].as_array().context("there is a list of leases")?;
            let names: Vec<&str> = leases.iter().filter_map(|lease| lease["name"].as_str()).collect();
            let wanted: Vec<String> = jobs.iter().map(|job| format!("slurm-{job}")).collect();
            ensure!(names == wanted, "the leases are {leases:?}");
            Ok(())
        })
    }

    fn status(&self, daemon: &str) -> Result<Value> {
        let path = format!("/run/rgpu/{daemon}.status");
        let text = self.0.check(&format!("rgpuctl status --json --socket {path}"), LONG)?;
        Ok(serde_json::from_str::<Value>(&text)?[path.as_str()].take())
    }

    /// The processes that serve this machine's programs: their numbers, and their units.
    fn serving(&self) -> Result<Vec<(u64, &'static str)>> {
        let (server, host) = (self.status("server")?, self.status("vhost-rgpu")?);
        let numbers = |list: &Value, name: &str| -> Vec<u64> {
            list.as_array().into_iter().flatten().filter_map(|one| one[name].as_u64()).collect()
        };
        let workers = numbers(&server["sessions"], "worker").into_iter().map(|pid| (pid, "rgpu-server"));
        let others = numbers(&host["device_processes"], "process").into_iter();
        Ok(workers.chain(others.map(|pid| (pid, "vhost-rgpu"))).collect())
    }

    /// Waits until a worker and a device process are all that serves this machine's programs.
    fn until_one_job_is_served(&self) -> Result<()> {
        self.eventually(|| {
            let serving = self.serving()?;
            ensure!(serving.len() == 2, "these serve one job: {serving:?}");
            Ok(())
        })
    }

    /// The control group of a process.
    fn group(&self, pid: u64) -> Result<String> {
        self.0.check(&format!("sed -n 's/^0:://p' /proc/{pid}/cgroup"), LONG)
    }

    /// The memory that a control group may use, in MiB; `None` if there is no limit.
    fn memory(&self, group: &str) -> Result<Option<u64>> {
        let bytes = self.0.check(&format!("cat /sys/fs/cgroup{group}/memory.max"), LONG)?;
        if bytes == "max" {
            return Ok(None);
        }
        Ok(Some(bytes.parse::<u64>().with_context(|| format!("{group}: {bytes}"))? >> 20))
    }

    /// The processes of the daemons.
    fn daemons(&self) -> Result<String> {
        self.0.check("systemctl show --value -p MainPID rgpu-server vhost-rgpu slurmd slurmctld", LONG)
    }
}

/// A command that holds a session until there is this file.
fn held(until: &str) -> String {
    format!("(until [ -e {until} ]; do sleep 0.5; done) | /mnt/programs/idle wait")
}

#[test]
fn jobs_and_their_sessions_have_limits_by_control_groups_of_version_2() -> Result<()> {
    let begin = Instant::now();
    let done = |what: &str| println!("{what}: done after {:.0} s", begin.elapsed().as_secs_f64());
    let node = Node::boot()?;
    done("boot");
    node.set_up().context("set-up")?;
    done("set-up");

    let shared = node.submit("--mem=200 --gres=rgpu:2,rgpumem:512M", "srun /mnt/programs/device_list")?;
    let said = node.until_ended(&shared, "COMPLETED")?;
    ensure!(said.contains("PASS device_list 2 device(s)"), "{said}");
    node.until_leases_are_of(&[])?;
    done("a job that shares GPUs");

    // This one stays while others fail.
    let waits = format!("srun sh -c 'cat /proc/self/cgroup; {}'", held("go"));
    let first = node.submit(&format!("--mem={JOB} --gres=rgpu:1"), &waits)?;
    node.eventually(|| {
        let said = node.output(&first)?;
        ensure!(said.contains("IDLE"), "job {first}, {}: {said}", node.state(&first)?);
        Ok(())
    })?;
    node.until_leases_are_of(&[&first])?;
    let said = node.output(&first)?;
    let group = said.lines().find_map(|line| line.strip_prefix("0::")).with_context(|| said.clone())?;
    // Debian's slurmd may run more than once on a machine, so its scope begins with the node's name.
    let job = format!("/system.slice/host_slurmstepd.scope/job_{first}");
    ensure!(group.starts_with(&format!("{job}/step_0/")), "a task is in {group}");
    ensure!(node.memory(&job)? == Some(JOB), "{job} may use {:?} MiB", node.memory(&job)?);
    node.until_one_job_is_served()?;
    let serving = node.serving()?;
    for (pid, unit) in serving {
        let group = node.group(pid)?;
        let parent = format!("/system.slice/{unit}.service/");
        ensure!(group.starts_with(&parent) && group != format!("{parent}daemon"), "{pid} is in {group}");
        let limit = if unit == "rgpu-server" { WORKER } else { DEVICE_PROCESS };
        let memory = node.memory(&group)?;
        ensure!(memory == Some(limit), "{group} may use {memory:?} MiB");
    }
    // From here on the kernel tells of what it kills, in the words that it has for its own faults.
    node.0.check_console()?;
    done("a job that waits");

    let daemons = node.daemons()?;
    // It copies 128 MiB to its device, which uses its worker's memory.
    let greedy = node.submit("--mem=500 --gres=rgpu:1", "srun /mnt/programs/vectorAdd --full")?;
    let said = node.until_ended(&greedy, "FAILED")?;
    ensure!(said.contains("--worker-memory"), "the program is not told why: {said}");
    node.until_leases_are_of(&[&first])?;
    done("a job whose worker uses too much memory");

    let hungry = format!(
        "srun sh -c '{} >waits & until grep -q IDLE waits; do sleep 0.5; done; tail /dev/zero'",
        held("never")
    );
    let hungry = node.submit("--mem=200 --gres=rgpu:1", &hungry)?;
    let said = node.until_ended(&hungry, "FAILED")?;
    ensure!(said.contains("oom-kill"), "the job has failed for another reason: {said}");
    node.until_leases_are_of(&[&first])?;
    node.until_one_job_is_served()?;
    done("a job that uses too much memory");

    node.run("systemctl start rgpu-slurm.service")?;
    node.until_leases_are_of(&[&first])?;
    node.run("touch /home/ada/go")?;
    let said = node.until_ended(&first, "COMPLETED")?;
    ensure!(said.contains("PASS idle"), "{said}");
    node.until_idle()?;
    node.until_leases_are_of(&[])?;
    ensure!(node.daemons()? == daemons, "a daemon has ended: {daemons}, now {}", node.daemons()?);
    done("the job that waited");
    Ok(())
}
