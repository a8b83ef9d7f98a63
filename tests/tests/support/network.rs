//! Network namespaces: a host, a server, and a router between them that can silently drop every packet.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns, unshare};

/// The server's address.
pub const SERVER: &str = "10.97.2.2";

/// See the module's documentation. Needs root.
pub struct Network {
    host: Namespace,
    router: Namespace,
    server: Namespace,
    /// Where the thread that made this was before.
    before: File,
}

impl Network {
    /// `None` if not root.
    pub fn new() -> Result<Option<Self>> {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: network namespaces need root");
            return Ok(None);
        }
        let before = File::open("/proc/thread-self/ns/net").context("no network namespaces")?;
        let (host, router, server) = (Namespace::new()?, Namespace::new()?, Namespace::new()?);
        for (number, (end, name)) in [(&host, "host"), (&server, "server")].into_iter().enumerate() {
            let (net, pid) = (format!("10.97.{}", 1 + number), end.0.id());
            router.run(&format!("ip link add {name} type veth peer name eth0 netns {pid}"))?;
            router.run(&format!("ip addr add {net}.1/24 dev {name} && ip link set {name} up"))?;
            end.run("ip link set lo up && ip link set eth0 up")?;
            end.run(&format!("ip addr add {net}.2/24 dev eth0 && ip route add default via {net}.1"))?;
        }
        let network = Self { host, router, server, before };
        network.lose(false)?;
        Ok(Some(network))
    }

    /// Drops every packet from now on, or none.
    pub fn lose(&self, all: bool) -> Result<()> {
        self.router.run(&format!("echo {} > /proc/sys/net/ipv4/ip_forward", u8::from(!all)))
    }

    /// Gives the host another address in place of its present one.
    pub fn move_host(&self) -> Result<()> {
        // Without an address there are no routes.
        self.host.run("ip addr flush dev eth0 && ip addr add 10.97.1.77/24 dev eth0")?;
        self.host.run("ip route add default via 10.97.1.1")
    }

    /// Moves this thread to the host: what it opens and starts from now on is there.
    pub fn enter_host(&self) -> Result<()> {
        self.host.enter()
    }

    /// Moves this thread to the server.
    pub fn enter_server(&self) -> Result<()> {
        self.server.enter()
    }

    /// Returns this thread to where it was when it made the network.
    pub fn leave(&self) -> Result<()> {
        setns(&self.before, CloneFlags::CLONE_NEWNET).context("cannot leave a network namespace")
    }
}

/// A namespace, held by a process that ends when its input closes, at the latest when this process ends.
struct Namespace(Child);

impl Namespace {
    fn new() -> Result<Self> {
        let hold = || -> Result<Child> {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
            Command::new("cat")
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .context("cannot start cat")
        };
        // In its own thread, which ends with it.
        let held = std::thread::spawn(hold).join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        Ok(Self(held?))
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn enter(&self) -> Result<()> {
        setns(File::open(self.path())?, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")
    }

    fn run(&self, script: &str) -> Result<()> {
        let net = format!("--net={}", self.path());
        let output = Command::new("nsenter").args([&net, "sh", "-c", script]).output();
        let output = output.context("cannot start nsenter")?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
