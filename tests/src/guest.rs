//! A guest that has rgpu's libraries and the test programs, and the daemons on this machine that serve it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::daemons::Daemon;
use crate::machine::{Builder, Machine};
use crate::programs::Program;
use crate::tree::{self, Build};

/// The folder of the libraries in the guest, which its loader searches by default.
pub const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
/// The folder of the programs in the guest, which is in its PATH.
pub const PROGRAMS: &str = "/usr/local/bin";

/// The libraries that a program loads instead of NVIDIA's, if they have been built.
const LIBRARY_NAMES: [&str; 5] =
    ["libcuda.so.1", "libcudart.so.13", "libcudart.so.12", "libnvidia-ml.so.1", "libcupti.so.13"];

/// A guest with the driver, the libraries, `rgpuctl` and the given programs, without a device yet.
pub fn builder(programs: &[Program]) -> Builder {
    builder_of(Build::Release, programs, &tree::programs())
}

/// The same with another build of rgpu and the programs of another folder.
pub fn builder_of(build: Build, programs: &[Program], folder: &Path) -> Builder {
    let mut builder = Machine::builder().memory_mib(1024).driver(true).host_libraries();
    for name in LIBRARY_NAMES {
        let file = build.guest_libraries().join(name);
        if file.is_file() {
            builder = builder.file(file, format!("{LIBRARIES}/{name}"));
        }
    }
    builder = builder.link(format!("{LIBRARIES}/libnccl-net.so"), "libcuda.so.1");
    builder = builder.file(build.binaries().join("rgpuctl"), format!("{PROGRAMS}/rgpuctl"));
    for program in programs {
        builder = builder.file(folder.join(&program.name), format!("{PROGRAMS}/{}", program.name));
    }
    builder
}

/// How a [`Host`] is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// `local` or `tcp`.
    pub transport: &'static str,
    /// `auto`, `cuda` or `software`.
    pub backend: &'static str,
    /// Microseconds that both daemons poll before they sleep, in place of the default.
    pub poll_us: Option<u32>,
    /// Seconds for which the server keeps a session whose bridge is gone or whose guest is stopped. Sessions
    /// of a killed bridge are not kept for long, but a busy machine may take some seconds to bring back a
    /// link.
    pub grace: u32,
    /// The daemons' build.
    pub build: Build,
}

impl Options {
    /// The software GPU over a transport.
    pub fn software(transport: &'static str) -> Options {
        Options { transport, backend: "software", poll_us: None, grace: 30, build: Build::Release }
    }
}

/// `rgpu-server`, and `vhost-rgpu` for one guest and for processes of this machine.
#[derive(Debug)]
pub struct Host {
    folder: TempDir,
    logs: PathBuf,
    options: Options,
    address: String,
    /// `rgpu-server`; none between [`Host::kill_server`] and [`Host::start_server`].
    server: Option<Daemon>,
    /// `vhost-rgpu`; none between [`Host::kill_bridge`] and [`Host::start_bridge`].
    bridge: Option<Daemon>,
}

/// Workers that the server keeps ready.
pub const WORKERS: usize = 2;

/// How long a test waits for the daemons before it fails. A busy machine may need most of it.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long the daemons' resources must stay the same before they count as at rest.
const REST: Duration = Duration::from_secs(1);

/// The daemons' resources while no session runs. Descriptors are counted by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    bridge_descriptors: BTreeMap<String, usize>,
    server_descriptors: BTreeMap<String, usize>,
    bridge_threads: usize,
    server_threads: usize,
    workers: usize,
}

impl Holdings {
    fn counts(&self) -> [usize; 5] {
        let sum = |descriptors: &BTreeMap<String, usize>| descriptors.values().sum();
        [
            sum(&self.bridge_descriptors),
            sum(&self.server_descriptors),
            self.bridge_threads,
            self.server_threads,
            self.workers,
        ]
    }

    /// Whether no resource is more than in `before`.
    fn within(&self, before: &Self) -> bool {
        self.counts().into_iter().zip(before.counts()).all(|(now, before)| now <= before)
    }

    /// What differs from `before`: its name, then both numbers.
    fn differences(&self, before: &Self) -> Vec<String> {
        let named = |holdings: &Self| -> BTreeMap<String, usize> {
            let descriptors = |daemon: &str, kinds: &BTreeMap<String, usize>| {
                let name = |(kind, count): (&String, &usize)| (format!("{daemon}'s {kind}"), *count);
                kinds.iter().map(name).collect::<Vec<_>>()
            };
            let [.., bridge_threads, server_threads, workers] = holdings.counts();
            let mut all = descriptors("vhost-rgpu", &holdings.bridge_descriptors);
            all.extend(descriptors("rgpu-server", &holdings.server_descriptors));
            all.push(("vhost-rgpu's threads".into(), bridge_threads));
            all.push(("rgpu-server's threads".into(), server_threads));
            all.push(("workers".into(), workers));
            all.into_iter().collect()
        };
        let (before, now) = (named(before), named(self));
        let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
        let count = |of: &BTreeMap<String, usize>, name| of.get(name).copied().unwrap_or(0);
        let both = names.into_iter().map(|name| (name, count(&before, name), count(&now, name)));
        both.filter(|(_, before, now)| before != now)
            .map(|(name, before, now)| format!("{name}: {before}, then {now}"))
            .collect()
    }
}

impl Host {
    /// Starts both. `name` names their logs.
    pub fn start(name: &str, options: Options) -> Result<Host> {
        let folder =
            tempfile::Builder::new().prefix("rgpu-vm-").tempdir().context("cannot create a folder")?;
        let address = match options.transport {
            "tcp" => format!("tcp:127.0.0.1:{}", free_port()?),
            _ => format!("unix:{}", folder.path().join("server.sock").display()),
        };
        let mut host =
            Host { folder, logs: tree::logs().join(name), options, address, server: None, bridge: None };
        host.start_server()?;
        host.start_bridge()?;
        Ok(host)
    }

    /// Starts `rgpu-server` again.
    pub fn start_server(&mut self) -> Result<()> {
        let workers = WORKERS.to_string();
        let mut arguments = vec![
            "--insecure",
            "--listen",
            &self.address,
            "--backend",
            self.options.backend,
            "--workers",
            &workers,
        ];
        let grace = self.options.grace.to_string();
        arguments.extend(["--grace-seconds", &grace]);
        let poll = self.options.poll_us.map(|poll| poll.to_string());
        arguments.extend(poll.iter().flat_map(|poll| ["--poll-us", poll]));
        let (log, status) = (self.logs.join("rgpu-server.log"), self.folder.path().join("server.status"));
        self.server = Some(Daemon::start_of(self.options.build, "rgpu-server", arguments, &log, &status)?);
        Ok(())
    }

    /// Starts `vhost-rgpu` again.
    pub fn start_bridge(&mut self) -> Result<()> {
        let arguments = self.bridge_arguments();
        let (log, status) = self.bridge_files();
        self.bridge = Some(Daemon::start_of(self.options.build, "vhost-rgpu", arguments, &log, &status)?);
        Ok(())
    }

    /// Starts `vhost-rgpu` again by a service manager's command, which this adds the options to. Its log goes
    /// on.
    pub fn start_bridge_by(&mut self, command: Command) -> Result<()> {
        let arguments = self.bridge_arguments();
        let (log, status) = self.bridge_files();
        self.bridge = Some(Daemon::start_by(command, arguments, &log, &status)?);
        Ok(())
    }

    fn bridge_arguments(&self) -> Vec<String> {
        let (socket, native) = (self.socket(), self.native_socket());
        let (socket, native) = (socket.display().to_string(), native.display().to_string());
        let mut arguments = vec!["--socket", &socket, "--native-socket", &native, "--server", &self.address];
        arguments.extend(["--insecure", "--transport", self.options.transport]);
        let poll = self.options.poll_us.map(|poll| poll.to_string());
        arguments.extend(poll.iter().flat_map(|poll| ["--poll-us", poll]));
        arguments.into_iter().map(str::to_owned).collect()
    }

    /// The daemon's log and its status socket.
    fn bridge_files(&self) -> (PathBuf, PathBuf) {
        (self.logs.join("vhost-rgpu.log"), self.folder.path().join("vhost-rgpu.status"))
    }

    /// The socket for a guest's VMM.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    /// The socket for processes of this machine.
    pub fn native_socket(&self) -> PathBuf {
        self.folder.path().join("native.sock")
    }

    /// The address of `rgpu-server`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Where the daemons' logs are.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// `rgpu-server`.
    pub fn server(&self) -> Result<&Daemon> {
        self.server.as_ref().context("rgpu-server has been killed")
    }

    /// `vhost-rgpu`.
    pub fn bridge(&self) -> Result<&Daemon> {
        self.bridge.as_ref().context("vhost-rgpu has been killed")
    }

    /// Kills `rgpu-server` with SIGKILL.
    pub fn kill_server(&mut self) -> Result<()> {
        kill(self.server.take())
    }

    /// Kills `vhost-rgpu` with SIGKILL.
    pub fn kill_bridge(&mut self) -> Result<()> {
        kill(self.bridge.take())
    }

    /// Process id of the device process that serves the guest.
    pub fn device_process(&self) -> Result<i32> {
        let status = self.bridge()?.status()?;
        let rows = status["device_processes"].as_array().context("the status has no device processes")?;
        let row =
            rows.iter().find(|row| row["serves"].as_str().is_some_and(|serves| serves.starts_with("vm ")));
        let pid =
            row.and_then(|row| row["process"].as_i64()).context("no device process serves the guest")?;
        Ok(i32::try_from(pid)?)
    }

    /// Process ids of the workers that serve a session.
    pub fn busy_workers(&self) -> Result<Vec<i32>> {
        let status = self.server()?.status()?;
        let sessions = status["sessions"].as_array().context("the server's status has no sessions")?;
        Ok(sessions.iter().filter_map(|s| s["worker"].as_i64()).map(|pid| pid as i32).collect())
    }

    /// A counter of the daemon, summed over all its sessions since its start.
    pub fn bridge_total(&self, name: &str) -> Result<u64> {
        let status = self.bridge()?.status()?;
        status["totals"][name]
            .as_u64()
            .with_context(|| format!("vhost-rgpu's status has no {name}: {status}"))
    }

    /// Waits until no session is left, neither in the daemon nor in the server, and the pool is full again.
    pub fn settled(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (bridge, server) = (self.bridge()?.status()?, self.server()?.status()?);
            let none = |status: &serde_json::Value| status["sessions"].as_array().is_some_and(Vec::is_empty);
            let ready = server["workers_ready"] == WORKERS && server["workers_starting"] == 0;
            if none(&bridge) && none(&server) && ready {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "sessions or workers are left behind\n{bridge:#}\n{server:#}\nthe logs are in {}",
                self.logs.display()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The daemons' resources at rest: no session is left, and nothing has changed for a second. A session's
    /// threads and connections end after it has left the status.
    pub fn at_rest(&self) -> Result<Holdings> {
        let deadline = Instant::now() + PATIENCE;
        self.settled()?;
        let (mut last, mut since) = (self.holdings()?, Instant::now());
        while since.elapsed() < REST {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.holdings()?;
            if now != last {
                let differences = now.differences(&last);
                ensure!(Instant::now() < deadline, "the daemons do not settle: {differences:?}");
                (last, since) = (now, Instant::now());
            }
        }
        Ok(last)
    }

    fn holdings(&self) -> Result<Holdings> {
        let server = self.server()?.pid();
        let bridge = self.bridge_processes()?;
        let threads = |pid| Ok(entries(pid, "task")?.len());
        Ok(Holdings {
            bridge_descriptors: descriptors(&bridge)?,
            server_descriptors: descriptors(&[server])?,
            bridge_threads: bridge.iter().map(|pid| threads(*pid)).sum::<Result<usize>>()?,
            server_threads: threads(server)?,
            workers: children_of(server)?.len(),
        })
    }

    /// The keeper and its device processes.
    fn bridge_processes(&self) -> Result<Vec<u32>> {
        let keeper = self.bridge()?.pid();
        Ok(children_of(keeper)?.into_iter().chain([keeper]).collect())
    }

    /// Waits until no session is left and the daemons hold no more than before. If not, the error shows the
    /// difference.
    pub fn check_settled(&self, before: &Holdings) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.settled()?;
            let now = self.holdings()?;
            if now.within(before) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "the daemons hold more than before: {:?}; the logs are in {}",
                    now.differences(before),
                    self.logs.display()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// CPU time that each of both daemons, all device processes and all workers has used, in clock ticks
    /// (hundredths of a second).
    pub fn cpu_ticks(&self) -> Result<BTreeMap<u32, u64>> {
        let server = self.server()?.pid();
        let all = self.bridge_processes()?.into_iter().chain([server]).chain(children_of(server)?);
        let ticks = all.map(|pid| Ok(cpu_ticks(pid)?.map(|ticks| (pid, ticks))));
        ticks.filter_map(Result::transpose).collect()
    }

    /// Private memory of each daemon, in KiB.
    pub fn memory(&self) -> Result<[u64; 2]> {
        let bridge = self.bridge_processes()?.into_iter().map(anonymous_kib).sum::<Result<u64>>()?;
        Ok([bridge, anonymous_kib(self.server()?.pid())?])
    }
}

/// Interrupts of the guest's rgpu device so far, as its kernel counts them.
pub fn interrupts(machine: &Machine) -> Result<u64> {
    let device = machine.check("ls /sys/bus/virtio/drivers/virtio_rgpu | grep virtio", PATIENCE)?;
    let table = machine.check("cat /proc/interrupts", PATIENCE)?;
    // QEMU gives its generic vhost-user device one line-based interrupt, named after the device; with MSI-X,
    // each queue has its own, named DEVICE-QUEUE.
    let name = |row: &&str| {
        let last = row.split_whitespace().last().unwrap_or_default();
        last == device || last.strip_prefix(&device).is_some_and(|rest| rest.starts_with('-'))
    };
    let rows: Vec<&str> = table.lines().filter(name).collect();
    ensure!(!rows.is_empty(), "no interrupt of {device} in\n{table}");
    let numbers =
        rows.iter().flat_map(|row| row.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()));
    Ok(numbers.sum())
}

fn kill(daemon: Option<Daemon>) -> Result<()> {
    let mut daemon = daemon.context("it has been killed already")?;
    daemon.signal(nix::sys::signal::Signal::SIGKILL)?;
    daemon.wait(PATIENCE).map(drop)
}

/// A port of the loopback interface that nothing listens on.
///
/// It is below the range from which the kernel assigns ports to outgoing connections, and chosen at random,
/// so that it is still free when a daemon starts on it a moment later, or again after its end.
pub fn free_port() -> Result<u16> {
    const FIRST: u64 = 12_000;
    const COUNT: u64 = 20_000;
    for _ in 0..1000 {
        // The standard library's hash keys are random.
        let random = RandomState::new().build_hasher().finish();
        let port = (FIRST + random % COUNT) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of the loopback interface is free")
}

/// Entries of a folder of a process; none if it has ended meanwhile.
fn entries(pid: u32, what: &str) -> Result<Vec<PathBuf>> {
    let folder = format!("/proc/{pid}/{what}");
    match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e).with_context(|| format!("cannot read {folder}")),
        // Those that can be read: the process may end meanwhile.
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
    }
}

/// How many descriptors of each kind some processes have. A kind is what the descriptor refers to, without
/// the numbers in it.
fn descriptors(processes: &[u32]) -> Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for pid in processes {
        for descriptor in entries(*pid, "fd")? {
            // It may have been closed meanwhile.
            let target = std::fs::read_link(descriptor).unwrap_or_default();
            let kind = target.to_string_lossy().replace(|c: char| c.is_ascii_digit(), "");
            *kinds.entry(kind).or_default() += 1;
        }
    }
    Ok(kinds)
}

/// A file of a process. `None`: it has ended meanwhile.
fn read(pid: u32, what: &str) -> Result<Option<String>> {
    let path = format!("/proc/{pid}/{what}");
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        // The latter if it ends between opening and reading.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => {
            Ok(None)
        }
        Err(e) => Err(e).with_context(|| format!("cannot read {path}")),
    }
}

fn children_of(parent: u32) -> Result<Vec<u32>> {
    let line = format!("PPid:\t{parent}");
    let mut children = Vec::new();
    for process in std::fs::read_dir("/proc").context("cannot list the processes")? {
        let process = process?;
        // An entry that is not a process, or a process that has ended, has no status.
        let status = std::fs::read_to_string(process.path().join("status")).unwrap_or_default();
        if status.lines().any(|l| l == line) {
            children.extend(process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        }
    }
    Ok(children)
}

fn cpu_ticks(pid: u32) -> Result<Option<u64>> {
    let Some(text) = read(pid, "stat")? else { return Ok(None) };
    // The name, in parentheses, may contain anything. After it, utime and stime are the 12th and 13th words.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: Option<u64> =
        rest.split_whitespace().skip(11).take(2).map(|word| word.parse::<u64>().ok()).sum();
    ticks.with_context(|| format!("/proc/{pid}/stat has an unknown form")).map(Some)
}

fn anonymous_kib(pid: u32) -> Result<u64> {
    // A process that has ended has no memory, and no line about it while nobody has waited for it.
    let Some(text) = read(pid, "status")? else { return Ok(0) };
    let Some(line) = text.lines().find_map(|line| line.strip_prefix("RssAnon:")) else { return Ok(0) };
    let number = line.split_whitespace().next().and_then(|number| number.parse().ok());
    number.with_context(|| format!("/proc/{pid}/status has the line RssAnon:{line}"))
}
