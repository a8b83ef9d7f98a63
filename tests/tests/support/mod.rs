//! Support for the tests with hostile peers and with faults: both daemons with all their sockets, programs
//! that run at the same time, and the daemons' resources.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod client;
pub mod network;

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
pub use rgpu_tests::programs::told_beside_waits;
use rgpu_tests::programs::{self, Outcome};
use rgpu_tests::tree;
pub use test_kit::PATIENCE;
use test_kit::manager::Manager;

/// How a native client's session travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Local,
    Tcp,
}

pub const TRANSPORTS: [Transport; 2] = [Transport::Local, Transport::Tcp];

/// Waits until `condition` succeeds.
pub fn eventually(mut condition: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match condition() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context("the condition did not come true"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A process that ends when this is dropped.
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One `rgpu-server` that listens on a Unix socket and on TCP, and a `vhost-rgpu` for each transport.
pub struct Rig {
    pub server: Daemon,
    pub local: Daemon,
    pub tcp: Daemon,
    /// The server's TCP port, on 127.0.0.1.
    pub port: u16,
    folder: tempfile::TempDir,
    logs: PathBuf,
    server_arguments: Vec<String>,
    /// Keeps descriptors for the server, as systemd does.
    manager: Option<Manager>,
}

impl Rig {
    /// Starts everything, with a server whose descriptors survive it.
    pub fn kept(name: &str, link: impl FnOnce(u16) -> Result<String>) -> Result<Self> {
        let mut rig = Self::through(name, &[], &[], link)?;
        rig.server.signal(Signal::SIGTERM)?;
        rig.server.wait(PATIENCE)?;
        rig.manager = Some(Manager::new());
        rig.restart_server()?;
        Ok(rig)
    }

    /// Starts everything; the logs are in `target/logs/NAME/`.
    pub fn start(name: &str) -> Result<Self> {
        Self::with(name, &[], &[])
    }

    /// The same, with more arguments for the server and for both bridges.
    pub fn with(name: &str, server: &[&str], bridge: &[&str]) -> Result<Self> {
        Self::through(name, server, bridge, |port| Ok(on_this_host(port)))
    }

    /// The same. `link` maps the server's port to the address that the bridge over TCP connects to. This
    /// thread calls it right before it starts that bridge.
    pub fn through(
        name: &str,
        server: &[&str],
        bridge: &[&str],
        link: impl FnOnce(u16) -> Result<String>,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let logs = tree::logs().join(name);
        let port = free_port()?;
        let unix = format!("unix:{}", folder.path().join("server.sock").display());
        let mut server_arguments: Vec<String> = [
            "--backend",
            "software",
            "--insecure",
            "--listen",
            &unix,
            "--listen",
            &format!("tcp:127.0.0.1:{port}"),
        ]
        .map(str::to_owned)
        .into();
        let admin = folder.path().join("server.admin").display().to_string();
        server_arguments.extend(["--admin-socket".to_owned(), admin]);
        server_arguments.extend(server.iter().map(|&argument| argument.to_owned()));
        if !server.contains(&"--workers") {
            server_arguments.extend(["--workers", "2"].map(str::to_owned));
        }
        let server = start_server(folder.path(), &logs, &server_arguments)?;
        let local = start_bridge(folder.path(), &logs, Transport::Local, &unix, bridge)?;
        let tcp = start_bridge(folder.path(), &logs, Transport::Tcp, &link(port)?, bridge)?;
        Ok(Self { server, local, tcp, port, folder, logs, server_arguments, manager: None })
    }

    /// The native socket of a transport's bridge.
    pub fn socket(&self, transport: Transport) -> PathBuf {
        native_socket(self.folder.path(), transport)
    }

    /// The server's Unix socket.
    pub fn server_socket(&self) -> PathBuf {
        self.folder.path().join("server.sock")
    }

    /// The server's admin socket.
    pub fn server_admin(&self) -> PathBuf {
        self.folder.path().join("server.admin")
    }

    /// A transport's bridge.
    pub fn bridge(&self, transport: Transport) -> &Daemon {
        match transport {
            Transport::Local => &self.local,
            Transport::Tcp => &self.tcp,
        }
    }

    /// All three daemons.
    pub fn daemons(&self) -> [&Daemon; 3] {
        [&self.server, &self.local, &self.tcp]
    }

    /// Starts the server again after it has ended.
    pub fn restart_server(&mut self) -> Result<()> {
        let (folder, logs, arguments) = (self.folder.path(), &self.logs, &self.server_arguments);
        self.server = match &self.manager {
            Some(manager) => {
                let command = manager.command(tree::binaries().join("rgpu-server"));
                let (log, status) = (logs.join("rgpu-server.log"), folder.join("server.status"));
                Daemon::start_by(command, arguments, &log, &status)?
            }
            None => start_server(folder, logs, arguments)?,
        };
        Ok(())
    }

    /// Ends the server and starts it again with more arguments.
    pub fn restart_server_with(&mut self, more: &[String]) -> Result<()> {
        self.server.signal(Signal::SIGTERM)?;
        self.server.wait(PATIENCE)?;
        self.server_arguments.extend_from_slice(more);
        self.restart_server()
    }

    /// Kills the server's daemon and starts it again. Its workers stay.
    pub fn crash_server(&mut self) -> Result<()> {
        self.server.signal(Signal::SIGKILL)?;
        self.server.wait(PATIENCE)?;
        self.restart_server()
    }

    /// Kills a transport's bridge and starts it again.
    pub fn restart_bridge(&mut self, transport: Transport) -> Result<()> {
        let server = match transport {
            Transport::Local => format!("unix:{}", self.server_socket().display()),
            Transport::Tcp => on_this_host(self.port),
        };
        let (folder, logs) = (self.folder.path(), &self.logs);
        let bridge = match transport {
            Transport::Local => &mut self.local,
            Transport::Tcp => &mut self.tcp,
        };
        bridge.signal(Signal::SIGKILL)?;
        bridge.wait(PATIENCE)?;
        *bridge = start_bridge(folder, logs, transport, &server, &[])?;
        Ok(())
    }

    /// A program of the manifest, as a client of a transport's bridge.
    pub fn program(&self, transport: Transport, name: &str) -> Result<Command> {
        program(&self.socket(transport), name)
    }

    /// Runs a program to its end and requires that it passes.
    pub fn passes(&self, transport: Transport, name: &str, arguments: &[&str]) -> Result<()> {
        let outcome = programs::run(self.program(transport, name)?.args(arguments), programs::LIMIT)?;
        outcome.verdict(name).map(drop).with_context(|| format!("over {transport:?}"))
    }

    /// The resources of all daemons once no session is left, the pool of workers is full again, and nothing
    /// changes any more.
    pub fn idle_holdings(&self) -> Result<Vec<Holdings>> {
        let mut last: Vec<Holdings> = Vec::new();
        let mut same = 0;
        eventually(|| {
            self.check_idle()?;
            let now = self.holdings()?;
            let unchanged =
                now.len() == last.len() && now.iter().zip(&last).all(|(a, b)| a.counts() == b.counts());
            same = if unchanged { same + 1 } else { 0 };
            last = now;
            ensure!(same > 40, "the daemons do not settle: {last:?}");
            Ok(())
        })?;
        Ok(last)
    }

    fn holdings(&self) -> Result<Vec<Holdings>> {
        self.daemons().into_iter().map(Holdings::of).collect()
    }

    /// Waits until no daemon has a session. A server learns of a worker's end a moment after the program.
    pub fn has_no_sessions(&self) -> Result<()> {
        eventually(|| self.check_sessions())
    }

    fn check_sessions(&self) -> Result<()> {
        for daemon in self.daemons() {
            let status = daemon.status()?;
            let sessions = status["sessions"].as_array().map_or(0, Vec::len);
            ensure!(sessions == 0, "{} has {sessions} sessions", status["daemon"]);
        }
        Ok(())
    }

    fn check_idle(&self) -> Result<()> {
        self.check_sessions()?;
        let ready = self.server.status()?["workers_ready"].clone();
        ensure!(ready == 2, "{ready} workers are ready");
        let Holdings { children, guards, .. } = Holdings::of(&self.server)?;
        let workers = children - guards;
        ensure!(workers == 2, "{workers} worker processes where 2 are ready");
        Ok(())
    }

    /// Waits until nothing of a session is left: no session, no more descriptors, threads, mappings and
    /// processes than in `before`, the workers ready, and memory within a bound.
    pub fn check_left_nothing(&self, before: &[Holdings]) -> Result<()> {
        eventually(|| {
            self.check_idle()?;
            for (before, now) in before.iter().zip(self.holdings()?) {
                now.check_against(before)?;
            }
            Ok(())
        })
    }

    /// Requires that every daemon runs and that none has panicked.
    pub fn check_healthy(&mut self) -> Result<()> {
        for daemon in [&mut self.server, &mut self.local, &mut self.tcp] {
            let ended = daemon.ended()?;
            let log = daemon.log_text();
            ensure!(ended.is_none(), "a daemon ended ({ended:?}):\n{log}");
            ensure!(!log.contains("panicked"), "a daemon panicked:\n{log}");
        }
        Ok(())
    }
}

/// The address of a port of this host.
pub fn on_this_host(port: u16) -> String {
    format!("tcp:127.0.0.1:{port}")
}

fn native_socket(folder: &Path, transport: Transport) -> PathBuf {
    folder.join(match transport {
        Transport::Local => "native-local.sock",
        Transport::Tcp => "native-tcp.sock",
    })
}

fn start_server(folder: &Path, logs: &Path, arguments: &[String]) -> Result<Daemon> {
    let server = Daemon::start(
        "rgpu-server",
        arguments,
        &logs.join("rgpu-server.log"),
        &folder.join("server.status"),
    )?;
    let workers = arguments.iter().skip_while(|argument| *argument != "--workers").nth(1);
    let workers: usize = workers.context("a server with --workers")?.parse()?;
    eventually(|| {
        let ready = server.status()?["workers_ready"].clone();
        ensure!(ready == workers, "{ready} workers are ready");
        Ok(())
    })?;
    Ok(server)
}

fn start_bridge(
    folder: &Path,
    logs: &Path,
    transport: Transport,
    server: &str,
    more: &[&str],
) -> Result<Daemon> {
    let name = match transport {
        Transport::Local => "local",
        Transport::Tcp => "tcp",
    };
    let socket = native_socket(folder, transport);
    let mut arguments: Vec<String> =
        ["--insecure", "--transport", name, "--server", server, "--native-socket"].map(str::to_owned).into();
    arguments.push(socket.display().to_string());
    arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    let status = folder.join(format!("vhost-rgpu-{name}.status"));
    Daemon::start("vhost-rgpu", arguments, &logs.join(format!("vhost-rgpu-{name}.log")), &status)
}

/// A program of the manifest, as a client of the bridge at `socket`.
pub fn program(socket: &Path, name: &str) -> Result<Command> {
    let mut command = Command::new(programs::built(name)?);
    command.env("RGPU_SOCKET", socket).env("LD_LIBRARY_PATH", tree::guest_libraries()).env_remove("RGPU_LOG");
    Ok(command)
}

/// A running program, killed when dropped.
pub struct Running {
    pub child: Child,
    /// Kept open: a program that writes to a closed pipe is killed.
    _output: Option<BufReader<ChildStdout>>,
    errors: Option<ChildStderr>,
    /// What was read of its standard error.
    told: String,
}

impl Running {
    /// Starts a program and waits until it prints a line that begins with `word`.
    pub fn start(command: &mut Command, word: &str) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: the closure only makes one system call, prctl, which is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let mut child = command.spawn().context("cannot start a program")?;
        let errors = child.stderr.take();
        let output = child.stdout.take().context("no standard output")?;
        let mut output = BufReader::new(output);
        let mut seen = String::new();
        let mut at = 0;
        while output.read_line(&mut seen)? > 0 {
            if seen[at..].starts_with(word) {
                return Ok(Self { child, _output: Some(output), errors, told: String::new() });
            }
            at = seen.len();
        }
        let mut running = Self { child, _output: None, errors, told: String::new() };
        running.child.wait()?;
        anyhow::bail!("the program ended without {word:?}: {seen}\n{}", running.errors()?)
    }

    /// Kills it and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The same; returns what it has written to its standard error.
    pub fn killed(mut self) -> Result<String> {
        self.child.kill()?;
        self.child.wait()?;
        self.errors()
    }

    /// Waits until it ends by itself. Returns its exit status and its standard error.
    pub fn ended(mut self) -> Result<(Option<i32>, String)> {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.child.wait()?.code();
        Ok((status, self.errors()?))
    }

    /// Waits until it has written these words to its standard error.
    pub fn until_told(&mut self, words: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let errors = self.errors.as_mut().context("no standard error")?;
        while !self.told.contains(words) {
            ensure!(Instant::now() < deadline, "the program was not told {words:?}: {}", self.told);
            let mut ready = [PollFd::new(errors.as_fd(), PollFlags::POLLIN)];
            if poll(&mut ready, 100u8)? > 0 {
                let mut part = [0; 4096];
                let read = std::io::Read::read(errors, &mut part)?;
                ensure!(read > 0, "the program ended, and was not told {words:?}: {}", self.told);
                self.told.push_str(&String::from_utf8_lossy(&part[..read]));
            }
        }
        Ok(())
    }

    fn errors(&mut self) -> Result<String> {
        let mut text = std::mem::take(&mut self.told);
        if let Some(mut errors) = self.errors.take() {
            std::io::Read::read_to_string(&mut errors, &mut text)?;
        }
        Ok(text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that has done some work and now waits until its standard input is closed.
pub struct Idle(Child);

impl Idle {
    /// Starts it, and returns when it waits.
    pub fn start(rig: &Rig, transport: Transport) -> Result<Self> {
        let mut command: Command = rig.program(transport, "idle")?;
        command.arg("wait").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a program")?;
        let output = child.stdout.as_mut().context("no standard output")?;
        let mut line = [0; 5];
        std::io::Read::read_exact(output, &mut line).context("the program ended too soon")?;
        ensure!(&line == b"IDLE\n", "the program said {:?}", String::from_utf8_lossy(&line));
        Ok(Self(child))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Lets it continue and requires that it passes.
    pub fn passes(mut self) -> Result<()> {
        drop(self.0.stdin.take());
        let mut text = String::new();
        let mut output = self.0.stdout.take().context("no standard output")?;
        std::io::Read::read_to_string(&mut output, &mut text)?;
        ensure!(self.0.wait()?.success() && text.contains("PASS idle"), "after its rest: {text}");
        Ok(())
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon's resources.
#[derive(Debug)]
pub struct Holdings {
    pub descriptors: usize,
    pub threads: usize,
    /// Mappings of client memory.
    pub memfds: usize,
    /// Processes that it has started.
    pub children: usize,
    /// Those of them that only hold a worker's sandbox.
    pub guards: usize,
    /// Its own resident memory, in KiB.
    pub resident: u64,
}

/// By how much a daemon's resident memory may grow, in KiB: its allocator keeps some freed memory.
const GROWTH: u64 = 24 << 10;

impl Holdings {
    fn of(daemon: &Daemon) -> Result<Self> {
        let process = PathBuf::from(format!("/proc/{}", daemon.pid()));
        let count = |folder: &str| -> Result<usize> { Ok(std::fs::read_dir(process.join(folder))?.count()) };
        let status = std::fs::read_to_string(process.join("status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let resident = resident.trim().trim_end_matches(" kB").parse()?;
        let maps = std::fs::read_to_string(process.join("maps"))?;
        let (mut children, mut guards) = (0, 0);
        for task in std::fs::read_dir(process.join("task"))? {
            // A thread may end between the listing and the reading.
            let list = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            for child in list.split_whitespace() {
                children += 1;
                // So may a child.
                let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
                guards += usize::from(name.trim_end() == "rgpu-guard");
            }
        }
        Ok(Self {
            descriptors: count("fd")?,
            threads: count("task")?,
            memfds: maps.lines().filter(|line| line.contains("memfd:")).count(),
            children,
            guards,
            resident,
        })
    }

    /// Everything counted, except the size of memory.
    fn counts(&self) -> [usize; 4] {
        [self.descriptors, self.threads, self.memfds, self.children]
    }

    fn check_against(&self, before: &Self) -> Result<()> {
        let more = self.counts().into_iter().zip(before.counts()).any(|(now, before)| now > before);
        ensure!(!more, "{self:?} where there were {before:?}");
        ensure!(self.resident <= before.resident + GROWTH, "memory grew: {self:?} from {before:?}");
        Ok(())
    }
}

/// Well-behaved programs that run in a loop over both transports while a test does something else.
pub struct Bystanders {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<usize>>>,
}

impl Bystanders {
    /// Starts them.
    pub fn start(rig: &Rig) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let all =
            [(Transport::Local, "copies"), (Transport::Tcp, "launch_storm"), (Transport::Tcp, "reduction")];
        for (transport, name) in all {
            let socket = rig.socket(transport);
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                let mut runs = 0;
                // At least one whole run, and the last one is always whole.
                while runs == 0 || !stop.load(Ordering::Relaxed) {
                    let outcome: Outcome = programs::run(&mut program(&socket, name)?, programs::LIMIT)?;
                    outcome.verdict(name).with_context(|| format!("a bystander over {transport:?}"))?;
                    ensure!(
                        told_beside_waits(&outcome.stderr).is_empty(),
                        "a bystander printed on standard error: {}",
                        outcome.stderr
                    );
                    runs += 1;
                }
                Ok(runs)
            }));
        }
        Ok(Self { stop, threads })
    }

    /// Stops them, and requires that every run has passed.
    pub fn check(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().map_err(|_| anyhow::anyhow!("a bystander's thread panicked"))??;
        }
        Ok(())
    }
}
