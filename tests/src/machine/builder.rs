//! A machine: described by [`Builder`], booted as [`Machine`].

use super::agent::{Agent, Output, Process};
use super::image::{self, Image};
use super::{Accelerator, Kernel, Qemu};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Where QEMU learns about the guest's memory and its rgpu device.
enum Hardware {
    /// On the command line that this file builds.
    Own,
    /// In a `-readconfig` file.
    Config(PathBuf),
    /// From a script that starts `qemu-system-x86_64` and adds more options at the end; its environment.
    Script(PathBuf, Vec<(String, String)>),
}

/// A change to the image, applied when it is made.
type Step = Box<dyn FnOnce(&mut Image) -> Result<()> + Send>;

/// A machine to boot.
pub struct Builder {
    kernel: Kernel,
    accelerator: Option<Accelerator>,
    memory_mib: u32,
    cpus: u32,
    driver: bool,
    modules: Vec<String>,
    rgpu_sockets: Vec<PathBuf>,
    rgpu_options: String,
    disk: Option<PathBuf>,
    hardware: Hardware,
    qemu_args: Vec<String>,
    kernel_args: Vec<String>,
    boot_timeout: Duration,
    steps: Vec<Step>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            kernel: Kernel::default(),
            accelerator: None,
            memory_mib: 512,
            cpus: 2,
            driver: false,
            modules: vec!["virtio_pci".into(), "virtio_console".into()],
            rgpu_sockets: Vec::new(),
            rgpu_options: String::new(),
            disk: None,
            hardware: Hardware::Own,
            qemu_args: Vec::new(),
            kernel_args: Vec::new(),
            boot_timeout: Duration::from_secs(300),
            steps: Vec::new(),
        }
    }

    /// The kernel to boot; [`Kernel::V6_1`] unless said otherwise.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// How to run guest code; the best that works here unless said otherwise.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// Memory in MiB (512). It also holds the root file system.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Processors (2).
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Whether `virtio_rgpu.ko` is built for the kernel and loaded (no).
    pub fn driver(mut self, load: bool) -> Self {
        self.driver = load;
        self
    }

    /// Adds a kernel module and the modules it needs, to load at boot.
    pub fn module(mut self, name: &str) -> Self {
        self.modules.push(name.to_owned());
        self
    }

    /// Adds an rgpu device whose vhost-user back end listens on this socket. May be called several times.
    pub fn rgpu_socket(mut self, socket: impl Into<PathBuf>) -> Self {
        self.rgpu_sockets.push(socket.into());
        self
    }

    /// Adds an option of QEMU's rgpu devices.
    pub fn rgpu_option(mut self, option: &str) -> Self {
        self.rgpu_options.push(',');
        self.rgpu_options.push_str(option);
        self
    }

    /// Boots from this disk: an ext4 file system whose first process starts `/mnt/agent` as a service. What
    /// the machine writes there is lost when it ends. Files put into the guest's `/host` are in `/mnt` of the
    /// booted system; it does not see others.
    pub fn disk(mut self, disk: impl Into<PathBuf>) -> Self {
        self.disk = Some(disk.into());
        self.module("virtio_blk").module("crc32c_generic").module("ext4")
    }

    /// Takes the machine type, the guest's memory and the rgpu device from a `-readconfig` file instead of
    /// [`Builder::rgpu_socket`]. The memory size there must equal [`Builder::memory_mib`].
    pub fn hardware_from_config(mut self, file: impl Into<PathBuf>) -> Self {
        self.hardware = Hardware::Config(file.into());
        self
    }

    /// Takes accelerator, processor type, machine type, memory and the rgpu device from a script that starts
    /// `qemu-system-x86_64` and passes its arguments on to it. `environment` is the script's;
    /// [`Builder::memory_mib`] has no effect then.
    pub fn hardware_from_script<'a>(
        mut self,
        script: impl Into<PathBuf>,
        environment: impl IntoIterator<Item = (&'a str, String)>,
    ) -> Self {
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.hardware = Hardware::Script(script.into(), environment);
        self
    }

    /// Adds an argument of QEMU.
    pub fn qemu_arg(mut self, arg: impl Into<String>) -> Self {
        self.qemu_args.push(arg.into());
        self
    }

    /// Adds a word to the kernel's command line.
    pub fn kernel_arg(mut self, arg: impl Into<String>) -> Self {
        self.kernel_args.push(arg.into());
        self
    }

    /// How long booting may take (300 s: an emulated machine on a busy host).
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.boot_timeout = timeout;
        self
    }

    fn step(mut self, step: impl FnOnce(&mut Image) -> Result<()> + Send + 'static) -> Self {
        self.steps.push(Box::new(step));
        self
    }

    /// Puts a host's file into the guest, with its permissions.
    pub fn file(self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        let (host, guest) = (host.into(), guest.into());
        self.step(move |image| image.file(&host, guest))
    }

    /// Puts a host's directory into the guest, with everything in it.
    pub fn dir(self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        let (host, guest) = (host.into(), guest.into());
        self.step(move |image| image.tree(&host, guest))
    }

    /// Puts a host's program into the guest, with the shared libraries it is linked to.
    pub fn program(self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        let (host, guest) = (host.into(), guest.into());
        self.step(move |image| image.program(&host, guest))
    }

    /// Puts a file with these contents and permissions into the guest.
    pub fn contents(self, guest: impl Into<PathBuf>, mode: u32, data: impl Into<Vec<u8>>) -> Self {
        let (guest, data) = (guest.into(), data.into());
        self.step(move |image| {
            image.contents(guest, mode, data);
            Ok(())
        })
    }

    /// Puts a symbolic link into the guest.
    pub fn link(self, guest: impl Into<PathBuf>, target: impl Into<PathBuf>) -> Self {
        let (guest, target) = (guest.into(), target.into());
        self.step(move |image| {
            image.link(guest, target);
            Ok(())
        })
    }

    /// Puts this host's C and C++ run-time libraries into the guest, for programs that were linked here.
    pub fn host_libraries(self) -> Self {
        self.step(Image::host_libraries)
    }

    /// Boots, and returns when the machine accepts commands.
    pub fn boot(self) -> Result<Machine> {
        let qemu = Qemu::find()?;
        let accelerator = match self.accelerator {
            Some(accelerator) => accelerator,
            None => qemu.accelerator()?,
        };
        let kernel = self.kernel.files()?;
        let driver = if self.driver { vec![self.kernel.driver()?] } else { Vec::new() };
        let mut image = Image::new();
        image.base(&kernel, &self.modules, &driver)?;
        if self.disk.is_some() {
            image.file(&image::agent()?, "/host/agent")?;
        }
        for step in self.steps {
            step(&mut image)?;
        }
        let dir = tempfile::Builder::new().prefix("rgpu-machine-").tempdir()?;
        let initrd = dir.path().join("initramfs");
        fs::write(&initrd, image.to_cpio()).with_context(|| format!("cannot write {}", initrd.display()))?;
        let port = dir.path().join("agent.sock");
        let listener =
            UnixListener::bind(&port).with_context(|| format!("cannot listen on {}", port.display()))?;

        let (accel, cpu) = (accelerator.name(), accelerator.cpu());
        let memory = format!("{}M", self.memory_mib);
        let mut command = match &self.hardware {
            Hardware::Own => {
                let mut command = qemu.command();
                command.args(["-accel", accel, "-cpu", cpu, "-machine", "q35,memory-backend=ram,vmport=off"]);
                // A vhost-user device works in the guest's memory, so it must be shared.
                let backend = format!("memory-backend-memfd,id=ram,size={memory},share=on");
                command.args(["-object", &backend, "-m", &memory]);
                command
            }
            Hardware::Config(file) => {
                let mut command = qemu.command();
                command.args(["-accel", accel, "-cpu", cpu, "-m", &memory]).arg("-readconfig").arg(file);
                command
            }
            Hardware::Script(script, environment) => {
                let mut command = Command::new("sh");
                let bin = qemu.in_path(dir.path())?;
                let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
                command.arg(script).env("PATH", path).env("ACCEL", accel);
                command.envs(environment.iter().map(|(name, value)| (name, value)));
                command
            }
        };
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none"]);
        command.arg("-smp").arg(self.cpus.to_string());
        command.arg("-serial").arg(format!("file:{}", dir.path().join("console").display()));
        command.args(["-device", "virtio-serial-pci"]);
        command.arg("-chardev").arg(format!("socket,id=agent,path={}", port.display()));
        command.args(["-device", "virtserialport,chardev=agent,name=rgpu.agent"]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", dir.path().join("qmp").display()));
        for (i, socket) in self.rgpu_sockets.iter().enumerate() {
            command.arg("-chardev").arg(format!("socket,id=rgpu{i},path={}", socket.display()));
            command.arg("-device").arg(format!(
                "vhost-user-test-device-pci,chardev=rgpu{i},virtio-id=38,num_vqs=3,vq_size=256,config_size=64{}",
                self.rgpu_options
            ));
        }
        if let Some(disk) = &self.disk {
            let drive = format!("file={},format=raw,if=none,id=disk,snapshot=on", disk.display());
            command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
        }
        command.arg("-kernel").arg(kernel.image()).arg("-initrd").arg(&initrd);
        // An oops must not go unnoticed, and a panic shows at once as an unexpected boot.
        let mut line = vec!["console=ttyS0", "loglevel=5", "oops=panic", "panic=-1"];
        // A busy host may take the processors away for a while, which the kernel must not treat as its own
        // fault. Without the last option it counts timer ticks for a moment at its start, and panics if there
        // are too few.
        line.extend(["rcupdate.rcu_cpu_stall_timeout=300", "watchdog_thresh=60", "no_timer_check"]);
        line.extend(accelerator.kernel_arguments());
        line.extend(self.kernel_args.iter().map(String::as_str));
        command.arg("-append").arg(line.join(" ")).args(&self.qemu_args);

        let log = File::create(dir.path().join("qemu"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut running = Running { child, dir };
        let agent = running.accept(&listener)?;
        let machine =
            Machine { agent, running: Mutex::new(running), boot_timeout: self.boot_timeout, accelerator };
        machine.with_logs(machine.agent.wait_boot(0, self.boot_timeout))?;
        Ok(machine)
    }
}

/// QEMU's process and its directory.
struct Running {
    child: Child,
    dir: TempDir,
}

impl Running {
    /// Takes QEMU's connection to the agent's port, unless QEMU ends first.
    fn accept(&mut self, listener: &UnixListener) -> Result<Agent> {
        listener.set_nonblocking(true)?;
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Agent::new(stream);
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e).context("cannot accept QEMU's connection"),
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("QEMU ended at its start ({status}): {}", tail(&self.dir.path().join("qemu")));
            }
            ensure!(Instant::now() < deadline, "QEMU does not connect to the agent's port");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for QEMU to end; `None` if it does not within `timeout`.
    fn wait(&mut self, timeout: Duration) -> Result<Option<()>> {
        let deadline = Instant::now() + timeout;
        while self.child.try_wait()?.is_none() {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Some(()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The last lines of a text file.
fn tail(path: &Path) -> String {
    let text = String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// A running machine. Dropping it kills it. Its methods may be called from several threads.
pub struct Machine {
    agent: Agent,
    running: Mutex<Running>,
    boot_timeout: Duration,
    accelerator: Accelerator,
}

impl Machine {
    /// A machine to describe and boot.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// How it runs guest code.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    fn running(&self) -> std::sync::MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the end of the logs to an error.
    fn with_logs<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|e| {
            let running = self.running();
            let (console, qemu) = (running.dir.path().join("console"), running.dir.path().join("qemu"));
            e.context(format!("--- the machine's console\n{}\n--- QEMU\n{}", tail(&console), tail(&qemu)))
        })
    }

    /// Runs a command line in the guest's shell, as root in `/root`, and waits for it to end. After `timeout`
    /// it is killed, which is an error; a status other than 0 is not. Whatever the command leaves running in
    /// the background must not write to its standard output or error.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Output> {
        let result = self.spawn(command).and_then(|process| process.wait(timeout));
        self.with_logs(result).with_context(|| format!("in the machine: {command}"))
    }

    /// As [`Machine::run`], but a status other than 0 is an error, too. Returns standard output, trimmed at
    /// its end.
    pub fn check(&self, command: &str, timeout: Duration) -> Result<String> {
        let output = self.run(command, timeout)?;
        if !output.success() {
            return self.with_logs(Err(anyhow::anyhow!("in the machine: {command}: {output}")));
        }
        Ok(output.text())
    }

    /// Starts a command line in the guest's shell.
    pub fn spawn(&self, command: &str) -> Result<Process> {
        self.agent.spawn(command)
    }

    /// Writes a file in the guest.
    pub fn write_file(&self, guest: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.with_logs(self.agent.put(guest, mode, data))
    }

    /// Makes the guest reboot itself, and waits until it accepts commands again. The root file system starts
    /// afresh.
    pub fn reboot(&self) -> Result<()> {
        self.booted_after(|| self.agent.reboot())
    }

    /// Kills QEMU with SIGKILL, as if the host failed, and waits for its end.
    pub fn kill9(&self) -> Result<()> {
        let mut running = self.running();
        running.child.kill()?;
        running.child.wait()?;
        Ok(())
    }

    /// Makes the guest power itself off, and waits for QEMU to end.
    pub fn shutdown(&self) -> Result<()> {
        self.agent.power_off()?;
        let ended = self.running().wait(Duration::from_secs(180))?;
        self.with_logs(ended.context("the machine did not power off within 180 s"))
    }

    /// Suspends the guest to memory, and wakes it once it sleeps.
    pub fn suspend_and_wake(&self, timeout: Duration) -> Result<()> {
        let asleep = self.spawn("echo mem > /sys/power/state")?;
        let deadline = Instant::now() + timeout;
        while self.qmp("query-status")?["status"] != "suspended" {
            if asleep.has_ended() || Instant::now() >= deadline {
                return self.with_logs(Err(anyhow::anyhow!("the machine does not sleep")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.qmp("system_wakeup")?;
        let output = self.with_logs(asleep.wait(timeout))?;
        ensure!(output.success(), "the machine did not sleep: {output}");
        Ok(())
    }

    /// Sends QEMU a command of its machine protocol (QMP), without arguments, and returns what that returns.
    pub fn qmp(&self, command: &str) -> Result<serde_json::Value> {
        let path = self.running().dir.path().join("qmp");
        let stream =
            UnixStream::connect(&path).with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(180)))?;
        let mut answers = BufReader::new(stream.try_clone()?).lines();
        let mut returned = serde_json::Value::Null;
        // It greets first, and reports events as they occur.
        for command in ["qmp_capabilities", command] {
            (&stream).write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes())?;
            loop {
                let line = answers.next().context("QEMU closed its connection")??;
                let mut answer: serde_json::Value = serde_json::from_str(&line)?;
                if let Some(value) = answer.get_mut("return") {
                    returned = value.take();
                    break;
                }
                ensure!(answer.get("error").is_none(), "QEMU refuses {command}: {line}");
            }
        }
        Ok(returned)
    }

    /// Stops the guest's processors, as `virsh suspend` does.
    pub fn stop(&self) -> Result<()> {
        self.qmp("stop").map(drop)
    }

    /// Resumes them, as `virsh resume` does.
    pub fn cont(&self) -> Result<()> {
        self.qmp("cont").map(drop)
    }

    /// Does something that makes the guest boot, and waits until it accepts commands again. The root file
    /// system starts afresh.
    pub fn booted_after(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = self.agent.boots();
        act()?;
        self.with_logs(self.agent.wait_boot(before, self.boot_timeout))
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.running().child.id()
    }

    /// Everything that the kernel, and anyone else who writes to the console, has printed so far, in all
    /// boots.
    pub fn console_log(&self) -> String {
        let path = self.running().dir.path().join("console");
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }

    /// An error if the kernel has complained about itself: a warning, a lock, a leak, a stall.
    pub fn check_console(&self) -> Result<()> {
        // KCSAN's complaints begin with "BUG:", those of lockdep and of the DMA API's checks with "WARNING:".
        const COMPLAINTS: [&str; 10] = [
            "WARNING:",
            "BUG:",
            "Oops",
            "Call Trace",
            "Bad page",
            "blocked for more than",
            "possible circular locking",
            "rcu: INFO:",
            "KASAN:",
            "UBSAN:",
        ];
        let log = self.console_log();
        match log.lines().find(|line| COMPLAINTS.iter().any(|c| line.contains(c))) {
            Some(line) => bail!("the guest's kernel complains: {line}\n--- the machine's console\n{log}"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("accelerator", &self.accelerator).finish_non_exhaustive()
    }
}
