//! A private session: a `vhost-rgpu` for native clients and, if no server is given, a private `rgpu-server`.
//!
//! Their sockets are in a folder that only this user can enter. Both end with the [`Session`], whether it is
//! dropped or this process is killed.

use std::ffi::OsString;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use host_bridge::server::Server;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::UnixAddr;
use nix::unistd::{AccessFlags, eaccess};
use serde_json::Value;

use crate::daemon::{Daemon, option, read_status};
use crate::installation::{find, libraries};
use crate::lease::{Renewed, SERVERS, in_environment};
use crate::pool::{Place, Wanted};

/// NCCL's settings for GPUs of several servers if it uses another network than libcuda's, which makes its
/// own. NCCL assumes that a process's GPUs are in one machine, and has their kernels synchronize through a
/// file in /dev/shm. Buffers of 4 MiB, its default, are more than a server remembers of mirrored memory.
const NCCL: [(&str, &str); 2] = [("NCCL_SHM_DISABLE", "1"), ("NCCL_BUFFSIZE", "524288")];

/// Whether NCCL is told to use another network.
fn nccl_uses_another() -> bool {
    std::env::var("NCCL_NET").is_ok_and(|net| !net.is_empty() && !net.eq_ignore_ascii_case("rgpu"))
}

/// Which server to use, and how.
#[derive(Args)]
pub struct Target {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    wanted: Wanted,
    /// What the private server uses, which is started if there is no --server, no --gpus and no RGPU_SERVERS,
    /// or with this option. By default auto
    #[arg(long, value_enum, conflicts_with_all = ["servers", "gpus"])]
    backend: Option<Backend>,
    /// Transport to the server: shared memory (needs a server on this machine) or TCP.
    /// By default local for a private server or unix:PATH, otherwise tcp
    #[arg(long, value_enum)]
    transport: Option<Transport>,
    /// Keep the daemons' logs in this folder, which is created if needed. By default they are not kept
    #[arg(long, value_name = "FOLDER")]
    log_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    /// The GPU of this machine if there is one, otherwise software
    Auto,
    /// The GPU of this machine
    Cuda,
    /// A GPU in software that runs PTX on the CPU
    Software,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Transport {
    /// Shared memory with a server on this machine
    Local,
    /// TCP
    Tcp,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            Self::Software => "software",
        }
    }
}

impl Transport {
    fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Tcp => "tcp",
        }
    }
}

/// Daemons for the clients that get [`Session::environment`].
pub struct Session {
    libraries: PathBuf,
    socket: PathBuf,
    /// The bridge comes first and ends before the server, so that it never reports the server as lost.
    daemons: Vec<Daemon>,
    /// Whether the program has devices of several servers.
    several: bool,
    /// The programs' RGPU_SERVERS. `None`: those of the private `vhost-rgpu`, all of them.
    named: Option<String>,
    /// Released after the daemons' end.
    _leases: Option<Renewed>,
    folder: RuntimeFolder,
}

impl Session {
    /// Starts the daemons that `target` needs and waits until they are ready.
    pub fn start(target: &Target) -> Result<Self> {
        target.wanted.only_with_gpus()?;
        let libraries = libraries()?;
        let folder = RuntimeFolder::create()?;
        let logs = match &target.log_dir {
            Some(folder) => {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("cannot create {}", folder.display()))?;
                folder.clone()
            }
            None => folder.path.clone(),
        };
        let leases = (target.wanted.gpus.is_some())
            .then(|| Renewed::take(&target.place, &target.wanted, "rgpuctl run"))
            .transpose()?;
        ensure!(leases.is_some() || target.place.pool.is_none(), "--pool needs --gpus");
        let servers = match &leases {
            Some(leases) => leases.servers().to_vec(),
            None if target.place.servers.is_empty() && target.backend.is_none() => {
                let parsed =
                    in_environment()?.iter().map(|text| text.parse()).collect::<Result<Vec<Server>, _>>();
                parsed.context(SERVERS)?
            }
            None => target.place.servers.clone(),
        };
        // The leases' keys must not be on a command line, which all users of this machine can see.
        let leased = servers.iter().any(|server| server.lease.is_some());
        let named = leased.then(|| servers.iter().map(Server::with_key).collect::<Vec<_>>().join(" "));
        let several = servers.len() > 1;
        let private = servers.is_empty();
        let (server, addresses, transport) = if private {
            let transport = target.transport.unwrap_or(Transport::Local);
            let (server, address) =
                start_server(target.backend.unwrap_or(Backend::Auto), transport, &folder.path, &logs)?;
            (Some(server), vec![address], Some(transport))
        } else {
            (None, servers.iter().map(ToString::to_string).collect(), target.transport)
        };
        let socket = folder.path.join("native.sock");
        // A private server listens only on the loopback interface, where the sessions of this user are as
        // safe as over a Unix socket.
        let insecure = target.place.insecure || private;
        let identity = target.place.identity();
        let protection =
            if insecure { vec!["--insecure".into()] } else { option("--identity", identity).to_vec() };
        let bridge = start_bridge(&addresses, transport, protection, &socket, &folder.path, &logs)?;
        let daemons = [Some(bridge), server].into_iter().flatten().collect();
        Ok(Self { libraries, socket, daemons, several, named, _leases: leases, folder })
    }

    /// Sets the environment that makes the command a client of this session.
    pub fn environment(&self, command: &mut Command) -> Result<()> {
        command
            .env("RGPU_SOCKET", &self.socket)
            .env("LD_LIBRARY_PATH", with_libraries(&self.libraries, std::env::var_os("LD_LIBRARY_PATH"))?);
        // Without leases the private vhost-rgpu has just the program's servers. Those that rgpuctl's own
        // environment names may be others, which it would refuse.
        match &self.named {
            Some(named) => command.env(SERVERS, named),
            None => command.env_remove(SERVERS),
        };
        // A library's own path to NVIDIA's libcupti (PyTorch has one) comes before LD_LIBRARY_PATH, but a
        // library that is already loaded comes before both.
        let profiler = self.libraries.join("libcupti.so.13");
        if profiler.exists() {
            command.env("LD_PRELOAD", preloaded(profiler, std::env::var_os("LD_PRELOAD")));
        }
        if self.several && nccl_uses_another() {
            command.envs(NCCL.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()));
        }
        Ok(())
    }

    /// The status of `vhost-rgpu`, as `rgpuctl status --json` shows it.
    pub fn status(&self) -> Result<Value> {
        read_status(&bridge_status(&self.folder.path))
    }

    /// Reports each daemon that has ended by itself, once. `failed`: the program has failed, perhaps because
    /// of a daemon that is about to end.
    pub fn report_ended(&mut self, failed: bool) {
        let ended = if failed { Daemon::ended_or_ending } else { Daemon::ended };
        self.daemons.retain_mut(|daemon| match ended(daemon) {
            Some(status) => {
                say!("rgpuctl: {}", daemon.describe_end(status));
                false
            }
            None => true,
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.daemons.drain(..).for_each(drop);
    }
}

/// Starts a private server. Returns it with its address.
fn start_server(
    backend: Backend,
    transport: Transport,
    folder: &Path,
    logs: &Path,
) -> Result<(Daemon, String)> {
    let binary = find("rgpu-server")?;
    let status = folder.join("server.status");
    let address = match transport {
        Transport::Local => format!("unix:{}", folder.join("server.sock").display()),
        Transport::Tcp => format!("tcp:127.0.0.1:{}", free_port()?),
    };
    let arguments: Vec<OsString> = [
        vec!["--insecure".into()],
        option("--listen", &address).to_vec(),
        option("--backend", backend.name()).to_vec(),
        // One worker is ready for the program. Only a program with several processes needs more workers,
        // which then start on demand.
        option("--workers", "0").to_vec(),
        option("--first-workers", "1").to_vec(),
        option("--status-socket", &status).to_vec(),
        // The program has ended before the server is told to end, so there are no sessions to wait for.
        option("--drain-seconds", "1").to_vec(),
    ]
    .concat();
    Ok((Daemon::start("rgpu-server", &binary, &arguments, &logs.join("rgpu-server.log"), &status)?, address))
}

/// Starts a private `vhost-rgpu` that serves `socket` and reaches the servers at `addresses`.
fn start_bridge(
    addresses: &[String],
    transport: Option<Transport>,
    protection: Vec<OsString>,
    socket: &Path,
    folder: &Path,
    logs: &Path,
) -> Result<Daemon> {
    let binary = find("vhost-rgpu")?;
    let status = bridge_status(folder);
    let mut arguments: Vec<OsString> =
        [option("--native-socket", socket), option("--status-socket", &status)].concat();
    arguments.extend(addresses.iter().flat_map(|address| option("--server", address)));
    arguments.extend(protection);
    arguments
        .extend(transport.map(|transport| option("--transport", transport.name())).into_iter().flatten());
    Daemon::start("vhost-rgpu", &binary, &arguments, &logs.join("vhost-rgpu.log"), &status)
}

/// The status socket of the private `vhost-rgpu` in this folder.
fn bridge_status(folder: &Path) -> PathBuf {
    folder.join("vhost-rgpu.status")
}

/// A port that was free a moment ago. If another process takes it first, the server cannot listen there and
/// the run fails. To make that unlikely, the port is random, and outside the range that the kernel uses for
/// outgoing connections.
fn free_port() -> Result<u16> {
    const FIRST: u64 = 12_000;
    const COUNT: u64 = 20_000;
    // The standard library's hash keys are random.
    let random = || (FIRST + RandomState::new().build_hasher().finish() % COUNT) as u16;
    let mut ports = std::iter::repeat_with(random).take(1000);
    ports
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .context("cannot find a free TCP port on 127.0.0.1")
}

/// `LD_PRELOAD` with a library appended.
fn preloaded(library: PathBuf, others: Option<OsString>) -> OsString {
    match others.filter(|others| !others.is_empty()) {
        Some(mut all) => {
            all.push(":");
            all.push(library);
            all
        }
        None => library.into(),
    }
}

/// `LD_LIBRARY_PATH` with rgpu's libraries first.
fn with_libraries(libraries: &Path, before: Option<OsString>) -> Result<OsString> {
    let before = before.unwrap_or_default();
    let old = std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty());
    std::env::join_paths(std::iter::once(libraries.to_owned()).chain(old))
        .with_context(|| format!("{} cannot be used in LD_LIBRARY_PATH", libraries.display()))
}

/// A folder for sockets that only this user can enter. It is removed with this value.
///
/// Its file `lock` stays locked while its rgpuctl runs. The next rgpuctl recognizes the folder of a killed
/// one by the missing lock and removes it.
struct RuntimeFolder {
    path: PathBuf,
    _lock: Flock<File>,
}

impl RuntimeFolder {
    const PREFIX: &str = "rgpu-run-";

    /// The path of a folder in `parent`, in which `mkdtemp` replaces the last six letters.
    fn template(parent: &Path) -> PathBuf {
        parent.join(format!("{}XXXXXX", Self::PREFIX))
    }

    fn create() -> Result<Self> {
        Self::create_in(&Self::parent(std::env::var_os("XDG_RUNTIME_DIR")))
    }

    /// The folder that the environment names, unless it is another user's, as after `su`, or so long that a
    /// socket in it would have no address.
    fn parent(named: Option<OsString>) -> PathBuf {
        Self::first_usable([named.map(PathBuf::from), Some(std::env::temp_dir())])
    }

    fn first_usable(folders: [Option<PathBuf>; 2]) -> PathBuf {
        let usable = |path: &PathBuf| {
            let socket = bridge_status(&Self::template(path));
            path.is_dir()
                && eaccess(path.as_path(), AccessFlags::W_OK | AccessFlags::X_OK).is_ok()
                && UnixAddr::new(&socket).is_ok()
        };
        folders.into_iter().flatten().find(usable).unwrap_or_else(|| "/tmp".into())
    }

    fn create_in(parent: &Path) -> Result<Self> {
        Self::remove_abandoned(parent);
        // mkdtemp creates it with mode 0700.
        let path = nix::unistd::mkdtemp(&Self::template(parent))
            .with_context(|| format!("cannot create a folder in {}", parent.display()))?;
        let lock = Self::lock(&path).with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// Locks the file under another name first, because a file `lock` that is not locked means that its owner
    /// is gone.
    fn lock(folder: &Path) -> std::io::Result<Flock<File>> {
        let (fresh, place) = (folder.join("lock.new"), folder.join("lock"));
        let lock = Flock::lock(File::create(&fresh)?, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| error)?;
        std::fs::rename(fresh, place)?;
        Ok(lock)
    }

    /// Removes folders that killed rgpuctl processes of this user left behind. One that cannot be removed
    /// does no harm.
    fn remove_abandoned(parent: &Path) {
        let Ok(entries) = std::fs::read_dir(parent) else { return };
        for entry in entries.flatten() {
            let own = entry
                .metadata()
                .is_ok_and(|data| data.uid() == nix::unistd::geteuid().as_raw() && data.is_dir());
            if !own || !entry.file_name().to_string_lossy().starts_with(Self::PREFIX) {
                continue;
            }
            let Ok(file) = File::open(entry.path().join("lock")) else { continue };
            if Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok() {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for RuntimeFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            say!("rgpuctl: cannot remove {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_libraries_come_before_the_old_path() {
        let path = with_libraries(Path::new("/opt/rgpu"), Some("/a:/b".into())).unwrap();
        assert_eq!(path, "/opt/rgpu:/a:/b");
        assert_eq!(with_libraries(Path::new("/opt/rgpu"), None).unwrap(), "/opt/rgpu");
        assert_eq!(with_libraries(Path::new("/opt/rgpu"), Some("".into())).unwrap(), "/opt/rgpu");
    }

    #[test]
    fn the_profilers_library_comes_after_other_preloaded_ones() {
        assert_eq!(preloaded("/opt/c.so".into(), None), "/opt/c.so");
        assert_eq!(preloaded("/opt/c.so".into(), Some("".into())), "/opt/c.so");
        assert_eq!(preloaded("/opt/c.so".into(), Some("/a.so".into())), "/a.so:/opt/c.so");
    }

    #[test]
    fn programs_do_not_inherit_servers_that_their_session_does_not_have() {
        let mut session = Session {
            libraries: "/opt/rgpu".into(),
            socket: "/run/native.sock".into(),
            daemons: Vec::new(),
            several: false,
            named: None,
            _leases: None,
            folder: RuntimeFolder::create().unwrap(),
        };
        let servers = |session: &Session| {
            let mut command = Command::new("true");
            session.environment(&mut command).unwrap();
            let found = command.get_envs().find(|(name, _)| *name == SERVERS);
            found.map(|(_, value)| value.map(ToOwned::to_owned))
        };
        assert_eq!(servers(&session), Some(None), "removed");
        session.named = Some("tcp:gpu1:9700#key".into());
        assert_eq!(servers(&session), Some(Some("tcp:gpu1:9700#key".into())));
    }

    #[test]
    fn a_runtime_folder_is_private_and_removed_in_the_end() {
        let folder = RuntimeFolder::create().unwrap();
        let path = folder.path.clone();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_that_this_user_may_not_write_to_is_not_used() {
        let own = tempfile::tempdir().unwrap();
        let named = |path: &Path| RuntimeFolder::parent(Some(path.into()));
        assert_eq!(named(own.path()), own.path());
        for other in ["/nonexistent", ""] {
            assert_eq!(named(Path::new(other)), std::env::temp_dir(), "{other}");
        }
        std::fs::set_permissions(own.path(), std::fs::Permissions::from_mode(0o500)).unwrap();
        // Root may write everywhere.
        let root = nix::unistd::geteuid().is_root();
        assert_eq!(named(own.path()) == own.path(), root);
    }

    #[test]
    fn a_folder_in_which_a_socket_would_have_no_address_is_not_used() {
        let own = tempfile::tempdir().unwrap();
        let of_length = |length: usize| {
            let name = "x".repeat(length - own.path().as_os_str().len() - 1);
            let folder = own.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            folder
        };
        let longest = 107 - "/rgpu-run-XXXXXX/vhost-rgpu.status".len();
        let (fits, long) = (of_length(longest), of_length(longest + 1));
        assert_eq!(RuntimeFolder::parent(Some(fits.clone().into())), fits);
        assert_eq!(RuntimeFolder::parent(Some(long.clone().into())), std::env::temp_dir());
        assert_eq!(RuntimeFolder::first_usable([None, Some(long)]), Path::new("/tmp"));
    }

    #[test]
    fn only_abandoned_folders_are_removed() {
        let parent = std::env::temp_dir().join(format!("rgpuctl-abandoned-{}", std::process::id()));
        let abandoned = parent.join("rgpu-run-abandoned");
        std::fs::create_dir_all(&abandoned).unwrap();
        std::fs::write(abandoned.join("lock"), "").unwrap();
        let starting = parent.join("rgpu-run-starting");
        std::fs::create_dir_all(&starting).unwrap();
        let first = RuntimeFolder::create_in(&parent).unwrap();
        let second = RuntimeFolder::create_in(&parent).unwrap();
        assert!(!abandoned.exists() && starting.exists() && first.path.exists() && second.path.exists());
        drop((first, second));
        std::fs::remove_dir_all(&parent).unwrap();
    }
}
