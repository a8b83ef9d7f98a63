//! Follows the set-up in `docs/slurm.md`, block by block: a controller, two GPU servers and two nodes without
//! GPUs, each a new Debian 12 whose daemons run under the units of their packages. Slurm is Debian's, and
//! runs before the page begins. The packages of rgpu are those in `target/packages`.
//!
//! The machines have a network of their own, so that their ports are not this machine's. What apt installs
//! has been fetched before.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::tree;

use super::{Running, blocks, commands, debian, nspawn, page, run, section, write};

const CONTROLLER: &[&str] = &["head"];
const SERVERS: &[&str] = &["gpu1", "gpu2"];
const NODES: &[&str] = &["n1", "n2"];
/// Where Slurm is configured.
const SLURM: &[&str] = &["head", "n1", "n2"];

/// The last byte of each machine's address.
const ADDRESSES: [(&str, u8); 5] = [("head", 2), ("gpu1", 11), ("gpu2", 12), ("n1", 21), ("n2", 22)];

/// The first lines are Debian's example, `slurm.conf.simple`.
pub(super) const SLURM_CONF: &str = "ClusterName=cluster
SlurmctldHost=head
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/lib/slurm/slurmd
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmUser=slurm
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
";

/// How long a machine may take to start or to end, and a job to run, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// What the page's `…` stands for.
const NODE: &str = "CPUs=2 RealMemory=500";

/// The files that a block shows: the name in a comment, and the lines below it.
fn files<'a>(lines: &[&'a str]) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut found: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in lines {
        let name = line.strip_prefix("# ").map(|rest| rest.split([' ', ',']).next().unwrap_or(rest));
        match name.filter(|name| name.ends_with(".conf") || name.ends_with(".toml")) {
            Some(name) => found.push((name, Vec::new())),
            None => found.last_mut().into_iter().for_each(|file| file.1.push(line)),
        }
    }
    found
}

/// A configuration file of a package with these lines in place of its own, or of its examples, in the same
/// sections.
pub(super) fn changed(text: &str, lines: &[&str]) -> Result<String> {
    let mut all: Vec<String> = text.lines().map(str::to_owned).collect();
    let mut section = "";
    for line in lines {
        if line.starts_with('[') {
            section = line;
            continue;
        }
        let key = line.split('=').next().unwrap_or(line);
        let mut within = section.is_empty();
        let found = all.iter().position(|own| {
            if own.starts_with('[') {
                within = own == section;
            }
            within && own.strip_prefix("#: ").unwrap_or(own).starts_with(key)
        });
        let at =
            found.with_context(|| format!("the file has no line with {key}in the section {section:?}"))?;
        all[at] = (*line).to_owned();
    }
    Ok(all.join("\n") + "\n")
}

/// The network of the machines: a bridge in a namespace, which goes with its process.
struct Network(Running);

impl Network {
    fn new() -> Result<Network> {
        let set_up = "ip link set lo up && ip link add br0 type bridge && ip addr add 10.99.0.1/24 dev br0 && \
                      ip link set br0 up && echo ready && exec sleep infinity";
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", set_up]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot run unshare")?;
        let said = child.stdout.take();
        let network = Network(Running(child));
        let mut ready = [0; 6];
        said.context("a pipe")?.read_exact(&mut ready).context("cannot make a network with a bridge")?;
        Ok(network)
    }
}

/// Control groups for a machine, in each hierarchy that systemd uses: in those of another machine, they would
/// take each other's services for their own.
struct Groups(Vec<PathBuf>);

impl Groups {
    fn new(name: &str) -> Result<Groups> {
        let mut groups = Groups(Vec::new());
        for line in fs::read_to_string("/proc/self/cgroup")?.lines() {
            let (place, path) = match line.splitn(3, ':').collect::<Vec<_>>()[..] {
                ["0", "", path] if Path::new("/sys/fs/cgroup/unified").exists() => ("unified", path),
                ["0", "", path] => ("", path),
                [_, "name=systemd", path] => ("systemd", path),
                _ => continue,
            };
            let parent = Path::new("/sys/fs/cgroup").join(place).join(path.trim_start_matches('/'));
            groups.0.push(parent.join(format!("newcomer-{name}")));
        }
        for group in &groups.0 {
            fs::create_dir_all(group).with_context(|| format!("cannot create {}", group.display()))?;
        }
        Ok(groups)
    }

    /// A shell's command that puts itself into them and then runs its further arguments.
    fn enter(&self) -> Command {
        let mut command = Command::new("sh");
        let script =
            "while [ \"$1\" != -- ]; do echo $$ >\"$1/cgroup.procs\"; shift; done; shift; exec \"$@\"";
        command.args(["-c", script, "sh"]).args(&self.0).arg("--");
        command
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        fn remove(group: &Path) -> std::io::Result<()> {
            for entry in fs::read_dir(group)?.flatten() {
                if entry.path().is_dir() {
                    remove(&entry.path())?;
                }
            }
            fs::remove_dir(group)
        }
        // The kernel may still be ending the machine's processes.
        for group in &self.0 {
            for _ in 0..100 {
                if remove(group).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// A machine of this name.
struct Machine {
    name: &'static str,
    root: PathBuf,
    running: Running,
    /// Removed when it has ended.
    groups: Groups,
}

impl Machine {
    fn boot(name: &'static str, root: PathBuf, network: &Network) -> Result<Machine> {
        // slurmd ends where it finds both kinds of control groups: the machine has what this kernel uses.
        let used = fs::read_to_string("/proc/self/cgroup")?;
        let unified = used.lines().all(|line| line.starts_with('0'));
        let nspawn = nspawn(&root);
        let groups = Groups::new(name)?;
        let mut command = groups.enter();
        command.arg("nsenter").arg(format!("--net=/proc/{}/ns/net", network.0.0.id()));
        command.arg(nspawn.get_program()).args(nspawn.get_args());
        command.arg("--network-bridge=br0").arg(format!("--machine=newcomer-{name}"));
        command.env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", if unified { "1" } else { "0" });
        command.env("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "yes");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let running = Running(command.spawn().with_context(|| format!("cannot start {command:?}"))?);
        let mut machine = Machine { name, root, running, groups };
        machine.wait_up()?;
        Ok(machine)
    }

    /// Waits until its services have started.
    fn wait_up(&mut self) -> Result<()> {
        let begin = Instant::now();
        loop {
            ensure!(self.running.0.try_wait()?.is_none(), "systemd-nspawn of {} has ended", self.name);
            let state = self.output("systemctl is-system-running --wait");
            match state.as_deref().map(str::trim) {
                Ok("running") => return Ok(()),
                Ok("degraded") => bail!("{}: {}", self.name, self.run("systemctl --failed --no-legend")?),
                _ => ensure!(begin.elapsed() < PATIENCE, "{} does not start: {state:?}", self.name),
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What a command prints, whether or not it fails.
    fn output(&self, command: &str) -> Result<String> {
        let output = self.shell(command)?.output().context("cannot run nsenter")?;
        Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    /// Runs a command as root, and returns what it prints.
    fn run(&self, command: &str) -> Result<String> {
        println!("{:>4} # {command}", self.name);
        run(&mut self.shell(command)?).with_context(|| format!("{}: {command}", self.name))
    }

    fn shell(&self, command: &str) -> Result<Command> {
        let first = self.running.first().context("the machine has no process yet")?;
        let mut inside = Command::new("nsenter");
        inside.args(["--target", &first.to_string(), "--all", "env", "-i", "HOME=/root", "LC_ALL=C.UTF-8"]);
        inside.args([
            "DEBIAN_FRONTEND=noninteractive",
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "bash",
            "-c",
        ]);
        inside.arg(format!("cd /root && {command}")).stdin(Stdio::null());
        Ok(inside)
    }

    fn write(&self, place: &str, text: &str) -> Result<()> {
        write(&self.root, place.trim_start_matches('/'), text)
    }

    fn read(&self, place: &str) -> Result<String> {
        let path = self.root.join(place.trim_start_matches('/'));
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }
}

struct Cluster {
    machines: Vec<Machine>,
    /// For each node, what `rgpuctl enroll` has told it to run.
    joins: Vec<(&'static str, String)>,
    jobs: u32,
    network: Network,
}

impl Cluster {
    /// Debian with Slurm, and the packages of rgpu in /root.
    fn new(folder: &Path) -> Result<Cluster> {
        let base = folder.join("base");
        debian(&base)?;
        let inside = |words: &[&str]| run(Command::new("chroot").arg(&base).args(words)).map(drop);
        inside(&["apt-get", "update"])?;
        inside(&["apt-get", "install", "-y", "--download-only", "slurmctld", "slurmd", "slurm-client"])?;
        inside(&["systemctl", "enable", "systemd-networkd"])?;
        let from = tree::target().join("packages");
        let packages = fs::read_dir(&from)
            .with_context(|| format!("there are no packages in {}: cargo xtask package", from.display()))?;
        for package in packages {
            let package = package?;
            fs::copy(package.path(), base.join("root").join(package.file_name()))?;
        }
        let program = tree::programs_static().join("device_list");
        let place = base.join("usr/local/bin/train");
        fs::copy(&program, &place).context("cargo xtask programs makes the program")?;
        fs::set_permissions(&place, PermissionsExt::from_mode(0o755))?;
        let hosts = ADDRESSES.map(|(name, byte)| format!("10.99.0.{byte} {name}\n")).concat();
        fs::write(base.join("etc/hosts"), format!("127.0.0.1 localhost\n{hosts}"))?;
        // Each machine makes its own.
        fs::write(base.join("etc/machine-id"), "")?;

        let network = Network::new()?;
        let mut machines = Vec::new();
        for (name, byte) in ADDRESSES {
            let root = folder.join(name);
            run(Command::new("cp").arg("-a").arg(&base).arg(&root))?;
            fs::write(root.join("etc/hostname"), format!("{name}\n"))?;
            fs::write(
                root.join("etc/systemd/network/10-host0.network"),
                format!(
                    "[Match]\nName=host0\n\n[Network]\nAddress=10.99.0.{byte}/24\nLinkLocalAddressing=no\n"
                ),
            )?;
            machines.push(Machine::boot(name, root, &network)?);
        }
        let cluster = Cluster { machines, joins: Vec::new(), jobs: 0, network };
        cluster.slurm()?;
        Ok(cluster)
    }

    /// Slurm as an administrator has it before the page begins.
    fn slurm(&self) -> Result<()> {
        self.on(CONTROLLER, |machine| machine.run("apt-get install -y slurmctld slurm-client"))?;
        self.on(NODES, |machine| machine.run("apt-get install -y slurmd slurm-client"))?;
        let key = self.machine("head")?.root.join("etc/munge/munge.key");
        self.on(NODES, |machine| {
            // Written in place, so that it keeps its owner.
            fs::write(machine.root.join("etc/munge/munge.key"), fs::read(&key)?)?;
            machine.run("systemctl restart munge")
        })?;
        let conf = format!("{SLURM_CONF}NodeName=n[1-2] {NODE}\n");
        self.on(SLURM, |machine| {
            machine.write("/etc/slurm/slurm.conf", &conf)?;
            machine.run("useradd -m -s /bin/bash ada")
        })?;
        self.on(CONTROLLER, |machine| machine.run("systemctl restart slurmctld"))?;
        self.on(NODES, |machine| machine.run("systemctl restart slurmd"))?;
        self.until_idle()
    }

    fn machine(&self, name: &str) -> Result<&Machine> {
        self.machines.iter().find(|machine| machine.name == name).context("there is such a machine")
    }

    /// Does something on each of these machines, one after another.
    fn on<T>(&self, names: &[&str], each: impl Fn(&Machine) -> Result<T>) -> Result<Vec<T>> {
        names.iter().map(|name| each(self.machine(name)?)).collect()
    }

    fn until_idle(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            let states = self.machine("head")?.output("sinfo -h -N -o %T")?;
            if states.lines().collect::<Vec<_>>() == ["idle"; 2] {
                return Ok(());
            }
            ensure!(begin.elapsed() < PATIENCE, "the nodes do not become idle: {states}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Puts a file of the page in its place.
    fn put(&self, name: &str, lines: &[&str]) -> Result<()> {
        let text = lines.join("\n") + "\n";
        match name {
            "/etc/rgpu/clients.toml" => self.on(SERVERS, |machine| machine.write(name, &text))?,
            "/etc/rgpu/pool.toml" => self.on(NODES, |machine| machine.write(name, &text))?,
            "/etc/rgpu/rgpu-server.toml" => self.change(SERVERS, name, lines)?,
            "/etc/rgpu/vhost-rgpu.toml" => self.change(NODES, name, lines)?,
            "slurm.conf" => {
                let text = format!("{SLURM_CONF}{}", text.replace('…', NODE));
                self.on(SLURM, |machine| machine.write("/etc/slurm/slurm.conf", &text))?
            }
            "gres.conf" => self.on(SLURM, |machine| machine.write("/etc/slurm/gres.conf", &text))?,
            _ => bail!("the test does not know whose file {name} is"),
        };
        Ok(())
    }

    fn change(&self, machines: &[&str], name: &str, lines: &[&str]) -> Result<Vec<()>> {
        self.on(machines, |machine| {
            let text = changed(&machine.read(name)?, lines).with_context(|| name.to_owned())?;
            machine.write(name, &text)
        })
    }

    /// Runs a command of the page where the page says.
    fn follow(&mut self, command: &str) -> Result<()> {
        let command = command.split("  #").next().unwrap_or(command).trim_end();
        let words: Vec<&str> = command.split(' ').collect();
        match words[..] {
            ["apt", "install", packages] if packages.contains("rgpu-server") => {
                self.on(SERVERS, |machine| machine.run(&format!("apt install -y {packages}")))?;
                // A machine with four GPUs. The page's upgrade takes it over with the rules.
                self.change(SERVERS, "/etc/rgpu/rgpu-server.toml", &["[software]", "devices = 4"])?;
            }
            ["apt", "install", packages] => {
                self.on(NODES, |machine| machine.run(&format!("apt install -y {packages}")))?;
            }
            ["rgpuctl", "upgrade"] => drop(self.on(SERVERS, |machine| machine.run(command))?),
            ["rgpuctl", "enroll", "n1"] => {
                for node in NODES {
                    let told = self.on(SERVERS, |machine| machine.run(&format!("rgpuctl enroll {node}")))?;
                    self.joins.extend(told.into_iter().map(|told| (*node, told)));
                }
            }
            ["rgpuctl", "join", _] => {
                for (node, told) in &self.joins {
                    self.machine(node)?.run(told.trim())?;
                }
            }
            // It takes a terminal.
            ["systemctl", "edit", unit] => {
                let place = format!("/etc/systemd/system/{unit}.d/override.conf");
                self.on(NODES, |machine| {
                    machine.write(&place, "[Socket]\nSocketMode=0666\n")?;
                    machine.run("systemctl daemon-reload")
                })?;
            }
            ["systemctl", "restart", "slurmctld"] => {
                self.on(CONTROLLER, |machine| machine.run(command))?;
            }
            ["vhost-rgpu" | "systemctl" | "rgpuctl", ..] => {
                let said = self.on(NODES, |machine| machine.run(command))?;
                if command == "rgpuctl inventory" {
                    let gpus = said.iter().map(|said| said.matches("rgpu software GPU").count());
                    ensure!(gpus.eq([8, 8]), "the page says that there are eight GPUs: {said:?}");
                }
            }
            ["sbatch", ..] => self.tasks_see(2, 4, &command.replace("./train", "train"))?,
            _ => bail!("the test does not know where to run {command}"),
        }
        Ok(())
    }

    /// Submits a job, whose program says in so many tasks that it sees so many GPUs.
    fn tasks_see(&mut self, tasks: usize, gpus: u32, command: &str) -> Result<()> {
        self.until_idle()?;
        let said = self.job(command)?;
        let right = said.matches(&format!("PASS device_list {gpus} device(s)")).count();
        ensure!(right == tasks, "{command}: {said}");
        self.jobs += 1;
        Ok(())
    }

    /// Submits a job as a user, and returns what it has printed when it has ended. No lease is left then.
    fn job(&self, command: &str) -> Result<String> {
        let controller = self.machine("head")?;
        let submitted = controller.run(&format!("su ada -c \"cd && {command}\""))?;
        let job = submitted.split_whitespace().last().context("sbatch prints the job's number")?;
        let begin = Instant::now();
        let state = loop {
            let shown = controller.output(&format!("scontrol show job {job} -o"))?;
            let state = shown.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
            let state = state.with_context(|| shown.clone())?.to_owned();
            let waits = ["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"].contains(&&*state);
            // A job that is held waits forever.
            if !waits || shown.contains("held") {
                break state;
            }
            ensure!(begin.elapsed() < PATIENCE, "the job does not end: {shown}");
            std::thread::sleep(Duration::from_millis(200));
        };
        let written = self.on(NODES, |machine| Ok(machine.read(&format!("/home/ada/slurm-{job}.out"))))?;
        let said: String = written.into_iter().flatten().collect();
        let logs = "journalctl -t rgpu-slurm -n 5 --no-pager; tail -n 5 /var/log/slurm/slurmd.log";
        if state != "COMPLETED" {
            let logs = self.on(NODES, |machine| machine.output(logs))?.concat();
            bail!("the job is {state}: {said}{logs}");
        }
        // Until the Epilogs have ended, too.
        self.until_idle()?;
        for leases in self.on(SERVERS, |machine| machine.run("rgpuctl leases"))? {
            ensure!(leases.trim() == "none", "{leases}");
        }
        Ok(said)
    }

    /// Lets the user use the socket by its group, instead of everybody.
    fn use_group(&self) -> Result<()> {
        let numbers = self.on(NODES, |machine| {
            machine.run("rm -r /etc/systemd/system/vhost-rgpu.socket.d && systemctl daemon-reload")?;
            machine.run("systemctl restart vhost-rgpu.socket && usermod -aG rgpu ada")?;
            machine.run("getent group rgpu | cut -d: -f3")
        })?;
        let number = numbers[0].trim();
        self.on(CONTROLLER, |machine| {
            machine.run(&format!("groupadd -g {number} rgpu && usermod -aG rgpu ada"))?;
            // It remembers groups for a while.
            machine.run("systemctl restart slurmctld").map(drop)
        })?;
        Ok(())
    }

    /// Restarts a machine.
    fn restart(&mut self, name: &str) -> Result<()> {
        let at = self.machines.iter().position(|machine| machine.name == name).context("there is one")?;
        let machine = self.machines.remove(at);
        println!("{name:>4} # poweroff");
        machine.output("systemctl poweroff")?;
        let Machine { name, root, mut running, groups } = machine;
        let begin = Instant::now();
        while running.0.try_wait()?.is_none() {
            ensure!(
                begin.elapsed() < PATIENCE,
                "{name} does not power off: systemd-nspawn has not ended within {} s",
                PATIENCE.as_secs()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        drop(groups);
        self.machines.insert(at, Machine::boot(name, root, &self.network)?);
        Ok(())
    }
}

#[test]
fn the_set_up_of_slurm_works_on_fresh_machines() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "this test takes root: it boots machines");
    let page = page("docs/slurm.md")?;
    let set_up = section(&page, "Set-up").context("the page has a set-up")?;
    let folder = tree::target().join("newcomer-slurm");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let mut cluster = Cluster::new(&folder)?;
    for (language, lines) in blocks(set_up) {
        if language == "sh" {
            for command in commands(&lines) {
                cluster.follow(&command)?;
            }
            continue;
        }
        for (name, lines) in files(&lines) {
            println!("     {name}");
            cluster.put(name, &lines)?;
        }
    }
    ensure!(cluster.jobs == 1, "the page shows a job");

    cluster.tasks_see(1, 1, "sbatch --gres=rgpu:1 --wrap 'srun train'")?;
    cluster.tasks_see(1, 2, "sbatch --gres=rgpu:2 --wrap 'srun train'")?;
    cluster.tasks_see(1, 2, "sbatch --gres=rgpu:2,rgpumem:512M --wrap 'srun train'")?;
    // The units start in an order in which the next job finds everything.
    for name in ["n1", "gpu1", "head"] {
        cluster.restart(name)?;
    }
    cluster.tasks_see(2, 4, "sbatch -N 2 --gres=rgpu:4 --wrap 'srun train'")?;
    cluster.use_group()?;
    cluster.tasks_see(2, 4, "sbatch -N 2 --gres=rgpu:4 --wrap 'srun train'")?;
    drop(cluster);
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
}

#[test]
fn files_of_a_block_and_changes_to_a_packages_file_are_told_apart() {
    let text = "```\n# a.conf\nx\n# y\n\n# b.conf, there\nz\n```\n```sh\nc\n```\n";
    let blocks = blocks(text);
    assert_eq!(blocks, [("", vec!["# a.conf", "x", "# y", "", "# b.conf, there", "z"]), ("sh", vec!["c"])]);
    assert_eq!(files(&blocks[0].1), [("a.conf", vec!["x", "# y", ""]), ("b.conf", vec!["z"])]);
    let own = "#: a = 1\n[b]\na = 2\n#: c = 3\n";
    assert_eq!(changed(own, &["a = 9", "[b]", "a = 8", "c = 7"]).unwrap(), "a = 9\n[b]\na = 8\nc = 7\n");
    assert!(changed(own, &["[b]", "d = 1"]).is_err());
}
