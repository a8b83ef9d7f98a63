//! A pool of servers: queries them, and chooses GPUs among them.
//!
//! No process keeps a pool's state. Each server reports its GPUs and how busy they are, this module chooses,
//! and a lease secures the choice at the server. If another client was faster, this module asks again. What
//! the servers would not have even if nobody used them is not waited for.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use host_bridge::ask::{Answer, Gpu, Lease, MAX_GPUS, Question, Wish};
use host_bridge::bridge::{ConnectError, Security, ask};
use host_bridge::framing::{with_causes, without_control};
use host_bridge::server::Server;
use identity::{ClientFiles, Secret};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use options::{File, Given, Layer, parse_size};
use protocol::device::Answer as Refusal;

use crate::run::end_by;

/// The pool's file if none is named.
const POOL: &str = "/etc/rgpu/pool.toml";
/// How long to wait before asking again when GPUs are taken: the first time, and at most. A hundred jobs may
/// wait for the one thread of a server that answers all of them.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// How many seconds to wait at most: a year.
const LONGEST_WAIT: u64 = 365 * 24 * 3600;
/// How often to choose again at once if another client was faster, before other servers are asked.
const TRIES: u32 = 5;

/// Which servers to ask, and how.
#[derive(Args, Clone)]
pub struct Place {
    /// GPU server to use: HOST, HOST:PORT or unix:PATH, followed by /0,2 for only its devices 0 and 2, or a
    /// lease as rgpuctl lease prints it. May be given several times: a program has the devices of all of
    /// them, in this order. By default none is named
    #[arg(long = "server", value_name = "ADDRESS")]
    pub servers: Vec<Server>,
    /// File that lists the servers among which --gpus chooses, as servers = ["gpu1", "gpu2"]. By default
    /// /etc/rgpu/pool.toml
    #[arg(long, value_name = "FILE", conflicts_with = "servers")]
    pub pool: Option<PathBuf>,
    /// Connect over TCP without TLS. Everybody on the network can read and change what is sent, and the
    /// server must be insecure, too
    #[arg(long)]
    pub insecure: bool,
    /// Folder of this machine's key and of the servers that it trusts, both made by rgpuctl join. By default
    /// /var/lib/rgpu/client for root, and ~/.config/rgpu for other users
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
}

/// Which GPUs to choose.
#[derive(Args, Clone)]
pub struct Wanted {
    /// Number of GPUs to choose among the servers, the least used ones, and to lease. By default rgpuctl
    /// lease takes 1, and other commands choose none
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub gpus: Option<u32>,
    /// Let nobody else use them meanwhile. The servers' rules must allow that (exclusive_leases in
    /// clients.toml)
    #[arg(long)]
    pub exclusive: bool,
    /// Choose only GPUs whose name contains this text, such as H100, in upper or lower case
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Memory on each GPU, in bytes or with a unit (K, M, G, T): the program gets no more, and no other lease
    /// gets it. By default what the server's rules give
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", hide_default_value = true)]
    pub memory: u64,
    /// Weight of the lease, a number from 1 to 10000: its share of the GPUs' time while others compete for
    /// it. By default what the server's rules give
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub weight: u32,
    /// Seconds to wait if not enough GPUs are free. What the servers would not have even if all were is not
    /// waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=LONGEST_WAIT))]
    pub wait: u64,
}

impl Wanted {
    /// That a program which runs under no lease describes no GPUs.
    ///
    /// # Errors
    /// If it does.
    pub fn only_with_gpus(&self) -> Result<()> {
        let Wanted { gpus, exclusive, model, memory, weight, wait } = self;
        let described = *exclusive || !model.is_empty() || [*memory, (*weight).into(), *wait] != [0; 3];
        ensure!(
            gpus.is_some() || !described,
            "--exclusive, --model, --memory, --weight and --wait describe the GPUs of --gpus, which is missing"
        );
        Ok(())
    }
}

/// The pool's file.
#[derive(Debug, Args)]
struct PoolFile {
    /// The servers, in the form of --server.
    #[arg(long, value_name = "ADDRESS", num_args = 1)]
    servers: Vec<Server>,
}

/// The servers that a pool's file lists.
fn read(path: &Path) -> Result<Vec<Server>> {
    let file = File::read(path, &[])?;
    let given = Given::nothing();
    let mut servers = Vec::new();
    for section in file.sections("") {
        let layer = Layer { given: &given, section: Some((&file, section)) };
        servers.extend(layer.read::<PoolFile>()?.servers);
    }
    ensure!(!servers.is_empty(), "{} lists no servers", path.display());
    Ok(servers)
}

/// How to query servers.
#[derive(Clone)]
pub struct Asker(Security);

impl Place {
    /// Whether the command line names servers.
    pub fn is_given(&self) -> bool {
        !self.servers.is_empty() || self.pool.is_some()
    }

    /// The folder with this machine's key.
    pub fn identity(&self) -> PathBuf {
        self.identity.clone().unwrap_or_else(crate::enrollment::client_folder)
    }

    /// How to query these servers.
    pub fn asker(&self) -> Asker {
        Asker(if self.insecure {
            Security::Insecure
        } else {
            Security::Tls(Arc::new(ClientFiles { folder: self.identity() }))
        })
    }

    /// The servers that were named, or those of the pool.
    pub fn members(&self) -> Result<Vec<Server>> {
        if !self.servers.is_empty() {
            return Ok(self.servers.clone());
        }
        let path = self.pool.as_deref().unwrap_or(Path::new(POOL));
        read(path).context(
            "no --server was given, and the pool's file, which has servers = [\"gpu1\", …], cannot be used",
        )
    }
}

/// The key of a server's lease, as text.
fn key(server: &Server) -> String {
    server.lease.map(|key| key.to_text()).unwrap_or_default()
}

impl Asker {
    /// Asks one server.
    pub fn ask(&self, server: &Server, question: &Question) -> Result<Answer, ConnectError> {
        ask(&server.address, self.0.clone(), question)
    }

    /// Asks all servers at the same time.
    pub fn ask_all(&self, servers: &[Server], question: &Question) -> Vec<Result<Answer, ConnectError>> {
        self.ask_each(servers, |_| question.clone())
    }

    /// Renews leases, all at the same time: others must not end because one server does not answer. The
    /// servers have the leases' keys.
    pub fn renew_all(&self, servers: &[Server]) -> Vec<Result<Answer, ConnectError>> {
        self.ask_each(servers, |server| Question::Renew { key: key(server) })
    }

    /// Releases leases, all at the same time: somebody waits for that, and a server that does not answer
    /// takes long.
    pub fn release_all(&self, servers: &[Server]) -> Vec<Result<Answer, ConnectError>> {
        self.ask_each(servers, |server| Question::Release { key: key(server) })
    }

    fn ask_each(
        &self,
        servers: &[Server],
        question: impl Fn(&Server) -> Question,
    ) -> Vec<Result<Answer, ConnectError>> {
        std::thread::scope(|scope| {
            let ask = |server| {
                let question = question(server);
                scope.spawn(move || self.ask(server, &question))
            };
            let asking: Vec<_> = servers.iter().map(ask).collect();
            let broken = || ConnectError::Here { source: std::io::Error::other("a thread has panicked") };
            asking.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(broken()))).collect()
        })
    }
}

/// The GPUs of a server that match the request, the best ones first. `listed`: the GPUs that may be chosen;
/// empty: all.
fn fitting<'g>(gpus: &'g [Gpu], listed: &[u8], wanted: &Wanted) -> Vec<&'g Gpu> {
    let unpromised = |gpu: &Gpu| gpu.memory.map(|bytes| bytes.saturating_sub(gpu.memory_leased));
    let fits = |gpu: &&Gpu| {
        let free = !gpu.exclusive && (!wanted.exclusive || gpu.sessions == 0 && gpu.leases == 0);
        free && gpu.unhealthy.is_none()
            && would_do(gpu, listed, wanted)
            && unpromised(gpu).is_none_or(|bytes| bytes >= wanted.memory)
            && gpu.memory_free.is_none_or(|bytes| bytes >= wanted.memory)
    };
    let mut fitting: Vec<&Gpu> = gpus.iter().filter(fits).collect();
    fitting.sort_by_key(|gpu| load(gpu));
    fitting
}

/// Whether a GPU would match the request if it were healthy and nobody used it.
fn would_do(gpu: &Gpu, listed: &[u8], wanted: &Wanted) -> bool {
    (listed.is_empty() || listed.iter().any(|number| u32::from(*number) == gpu.gpu))
        && gpu.model.to_lowercase().contains(&wanted.model.to_lowercase())
        && gpu.memory.is_none_or(|bytes| bytes >= wanted.memory)
}

/// How busy a GPU is: by the number of its users, then by its utilization, then by its free memory.
fn load(gpu: &Gpu) -> (u32, u32, Reverse<u64>) {
    (gpu.sessions + gpu.leases, gpu.utilization.unwrap_or(0), Reverse(gpu.memory_free.unwrap_or(0)))
}

/// Chooses `count` GPUs. Returns for each server its index in `all` and the numbers of its GPUs. If one
/// server has enough GPUs, all are chosen there, because its GPUs reach each other without the network.
/// `Err`: the number of available GPUs.
fn choose(all: &[Vec<&Gpu>], count: usize) -> Result<Vec<(usize, Vec<u32>)>, usize> {
    let numbers = |gpus: &[&Gpu]| gpus.iter().map(|gpu| gpu.gpu).collect::<Vec<u32>>();
    let enough = all.iter().enumerate().filter(|(_, gpus)| gpus.len() >= count);
    // The busiest GPU counts first, because the others wait for it.
    let busyness = |gpus: &[&Gpu]| gpus.iter().rev().map(|gpu| load(gpu)).collect::<Vec<_>>();
    if let Some((place, gpus)) = enough.min_by_key(|(_, gpus)| busyness(&gpus[..count])) {
        return Ok(vec![(place, numbers(&gpus[..count]))]);
    }
    // As few servers as possible, and among those with as many GPUs the least busy one.
    let mut places: Vec<usize> = (0..all.len()).filter(|place| !all[*place].is_empty()).collect();
    let (mut left, mut chosen) = (count, Vec::new());
    while let Some(next) = (0..places.len()).min_by_key(|next| {
        let gpus = &all[places[*next]];
        let take = left.min(gpus.len());
        (Reverse(take), busyness(&gpus[..take]))
    }) {
        let place = places.remove(next);
        let take = left.min(all[place].len());
        chosen.push((place, numbers(&all[place][..take])));
        left -= take;
        if left == 0 {
            return Ok(chosen);
        }
    }
    Err(count - left)
}

/// A lease that this process has taken.
#[derive(Debug, Clone)]
pub struct Held {
    /// The server, with the lease's key.
    pub server: Server,
    /// The server's description of it.
    pub lease: Lease,
}

/// The servers of leases, with their keys.
pub fn servers_of(held: &[Held]) -> Vec<Server> {
    held.iter().map(|held| held.server.clone()).collect()
}

/// A server that is not asked, and why.
struct LeftOut {
    why: String,
    until: Until,
}

/// How long a server is not asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// In this round: it could not be reached, or has nothing left, and may have something later.
    NextRound,
    /// By this process: it cannot be asked from here, or does not answer as it should.
    Ever,
    /// The same, because its rules do not give this client a lease of so many GPUs, however long it waits.
    RulesChange(usize),
}

impl LeftOut {
    /// For a server that did not tell its GPUs. It would not do so later either if it does not let this
    /// client in.
    fn by_inventory(error: &ConnectError) -> LeftOut {
        let until = match error {
            ConnectError::Credentials { .. } | ConnectError::Unsafe { .. } => Until::Ever,
            ConnectError::Refused { answer: Refusal::Denied, .. } => Until::Ever,
            _ => Until::NextRound,
        };
        LeftOut { why: with_causes(error), until }
    }

    /// For a server that did not grant a lease of `asked` GPUs. `busy`: it may grant one later.
    fn new(error: &ConnectError, asked: usize, busy: bool) -> LeftOut {
        let until = match error {
            _ if busy => Until::NextRound,
            ConnectError::NoServer { .. } => Until::NextRound,
            ConnectError::Refused { answer: Refusal::Denied, .. } => Until::RulesChange(asked),
            _ => Until::Ever,
        };
        LeftOut { why: with_causes(error), until }
    }
}

/// There are no such GPUs, and waiting will not help: the servers have too few that would do even if nobody
/// used them, or their rules do not give them to this client.
#[derive(Debug)]
pub struct Never(String);

impl fmt::Display for Never {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Never {}

/// What a server could lease if nobody used its GPUs, and the words for that. `None`: it is not known,
/// because the server cannot be asked now, or does not know its GPUs yet.
fn could_lease(
    server: &Server,
    gpus: &[Gpu],
    left_out: Option<&LeftOut>,
    wanted: &Wanted,
) -> Option<(usize, String)> {
    match left_out {
        // It may give fewer, as it would have been asked for if it had fewer that are free.
        Some(LeftOut { why, until: Until::RulesChange(asked) }) => {
            return Some((asked.saturating_sub(1), why.clone()));
        }
        Some(_) => return None,
        // One that has just been started names its GPUs once a worker has seen them.
        None if gpus.is_empty() => return None,
        None => {}
    }
    let count = gpus.iter().filter(|gpu| would_do(gpu, &server.devices, wanted)).count();
    let all = gpus.len();
    // A list of names, such as "NVIDIA H100 80GB HBM3 with 81559 MiB".
    let kinds: BTreeSet<String> = gpus
        .iter()
        .map(|gpu| match gpu.memory {
            Some(bytes) => format!("{} with {} MiB", without_control(&gpu.model), bytes >> 20),
            None => without_control(&gpu.model),
        })
        .collect();
    let kinds: Vec<String> = kinds.into_iter().collect();
    Some((count, format!("{server} has {count} among its {all} ({})", kinds.join(", "))))
}

/// This many GPUs as the request describes them.
fn such(count: usize, wanted: &Wanted) -> String {
    let mut parts = Vec::new();
    if !wanted.model.is_empty() {
        parts.push(wanted.model.clone());
    }
    if wanted.memory > 0 {
        parts.push(format!("with {} MiB", wanted.memory.div_ceil(1 << 20)));
    }
    if wanted.exclusive {
        parts.push("exclusively".to_owned());
    }
    let what = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    format!("{count} GPU{}{what}", if count == 1 { "" } else { "s" })
}

/// How long to wait each time before asking again. Prologs of many nodes begin at the same moment, and must
/// not ask at the same moments ever after: so each pause is shorter by a random part, by half of it at most.
fn pauses() -> impl Iterator<Item = Duration> {
    let whole = std::iter::successors(Some(AGAIN.0), |pause| Some((2 * *pause).min(AGAIN.1)));
    whole.map(|pause| {
        // Each of these is keyed at random.
        let random = RandomState::new().build_hasher().finish();
        pause.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
    })
}

/// The same servers, each of them once, with all GPUs that it is named with.
fn merged(members: &[Server]) -> Vec<Server> {
    let mut all: Vec<Server> = Vec::new();
    for member in members {
        match all.iter_mut().find(|server| server.address == member.address) {
            // An empty list stands for all.
            Some(server) if server.devices.is_empty() || member.devices.is_empty() => server.devices.clear(),
            Some(server) => {
                let new = |device: &&u8| !server.devices.contains(device);
                let more: Vec<u8> = member.devices.iter().filter(new).copied().collect();
                server.devices.extend(more);
            }
            None => all.push(member.clone()),
        }
    }
    all
}

/// Leases the wanted number of GPUs, for this many seconds. The order of the servers and of their GPUs has no
/// meaning.
///
/// # Errors
/// [`Never`] if waiting will not help. Otherwise the GPUs are not free in time, or nobody knows whether there
/// are such GPUs, because a server cannot be asked.
pub fn lease(
    asker: &Asker,
    members: &[Server],
    wanted: &Wanted,
    name: &str,
    seconds: u64,
) -> Result<Vec<Held>> {
    let count = wanted.gpus.unwrap_or(1) as usize;
    if count > MAX_GPUS {
        let such = such(count, wanted);
        bail!(Never(format!("{such} can never be had: a program can use {MAX_GPUS} at most")));
    }
    let members = merged(members);
    let members = members.as_slice();
    let deadline = Instant::now() + Duration::from_secs(wanted.wait);
    let mut waits = false;
    let mut left_out: Vec<Option<LeftOut>> = members.iter().map(|_| None).collect();
    let (mut tries, mut pauses) = (0, pauses());
    loop {
        let inventories = asker.ask_all(members, &Question::Inventory {});
        let mut said = Vec::new();
        let mut gpus: Vec<Vec<Gpu>> = Vec::with_capacity(members.len());
        for ((server, inventory), left_out) in members.iter().zip(inventories).zip(&mut left_out) {
            let (known, why) = match (inventory, &*left_out) {
                (_, Some(LeftOut { why, .. })) => (Vec::new(), Some(why.clone())),
                (Ok(Answer::Inventory(gpus)), None) if gpus.is_empty() => {
                    let why = format!(
                        "{server} names no GPUs for this client: it may have just been started, or its rules give none"
                    );
                    (Vec::new(), Some(why))
                }
                (Ok(Answer::Inventory(gpus)), None) => (gpus, None),
                (Ok(_), None) => (Vec::new(), Some(format!("{server} does not answer with its inventory"))),
                (Err(error), None) => {
                    let out = LeftOut::by_inventory(&error);
                    let why = out.why.clone();
                    *left_out = Some(out);
                    (Vec::new(), Some(why))
                }
            };
            gpus.push(known);
            said.extend(why);
        }
        let fitting: Vec<Vec<&Gpu>> =
            gpus.iter().zip(members).map(|(gpus, server)| fitting(gpus, &server.devices, wanted)).collect();
        match choose(&fitting, count) {
            Ok(chosen) => match take_whole(asker, || take(asker, members, &chosen, wanted, name, seconds))? {
                Ok(held) => return Ok(held),
                Err((place, error)) => {
                    let busy = matches!(error, ConnectError::Refused { answer: Refusal::NoResources, .. });
                    tries += 1;
                    if !busy || tries >= TRIES {
                        let asked = chosen.iter().find(|(server, _)| *server == place);
                        let asked = asked.map_or(0, |(_, gpus)| gpus.len());
                        left_out[place] = Some(LeftOut::new(&error, asked, busy));
                        tries = 0;
                    }
                    continue;
                }
            },
            Err(there) => {
                let all = gpus.iter().map(Vec::len).sum::<usize>();
                if all > 0 {
                    said.insert(0, format!("{there} of the {all} GPUs there are free and as wanted"));
                }
            }
        }
        let could: Option<Vec<(usize, String)>> = members
            .iter()
            .zip(&gpus)
            .zip(&left_out)
            .map(|((server, gpus), left_out)| could_lease(server, gpus, left_out.as_ref(), wanted))
            .collect();
        if let Some(could) = could.filter(|could| could.iter().map(|(gpus, _)| gpus).sum::<usize>() < count) {
            let said: Vec<String> = could.into_iter().map(|(_, words)| words).collect();
            let such = such(count, wanted);
            bail!(Never(format!("{such} can never be had from these servers: {}", said.join("; "))));
        }
        let refused =
            |left_out: &Option<LeftOut>| left_out.as_ref().is_some_and(|out| out.until != Until::NextRound);
        if left_out.iter().all(refused) || Instant::now() >= deadline {
            bail!("{} cannot be had now: {}", such(count, wanted), said.join("; "));
        }
        if !waits {
            waits = true;
            say!(
                "rgpuctl: waiting for {s}, up to {} s: {}",
                wanted.wait,
                said.join("; "),
                s = such(count, wanted)
            );
        }
        tries = 0;
        left_out.iter_mut().for_each(|left_out| drop(left_out.take_if(|out| out.until == Until::NextRound)));
        let pause = pauses.next().unwrap_or(AGAIN.1);
        std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
    }
}

/// What [`take`] gives.
type Taken = Result<Vec<Held>, (usize, ConnectError)>;

/// Calls [`take`] to its end before a signal ends this process. Nobody else would know the keys of the leases
/// that it has by then, so they are released first.
fn take_whole(asker: &Asker, take: impl FnOnce() -> Taken) -> Result<Taken> {
    let (taken, signal) = uninterrupted(take)?;
    if let Some(signal) = signal {
        release(asker, &taken.map(|held| servers_of(&held)).unwrap_or_default());
        end_by(signal);
        bail!("{signal}");
    }
    Ok(taken)
}

/// Does something to its end. Returns the signal that would have ended this process meanwhile, if there was
/// one.
fn uninterrupted<T>(work: impl FnOnce() -> T) -> Result<(T, Option<Signal>)> {
    let set = SigSet::from_iter([Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP]);
    let signals = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
    let signals = signals.context("cannot create a signal descriptor")?;
    let before = set.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("cannot block signals")?;
    let done = work();
    let signal = signals.read_signal().ok().flatten();
    before.thread_set_mask().context("cannot unblock signals")?;
    Ok((done, signal.and_then(|signal| Signal::try_from(signal.ssi_signo.cast_signed()).ok())))
}

/// Leases all chosen GPUs or none. The error is the index of the server that refused, and the reason.
fn take(
    asker: &Asker,
    members: &[Server],
    chosen: &[(usize, Vec<u32>)],
    wanted: &Wanted,
    name: &str,
    seconds: u64,
) -> Taken {
    let mut held = Vec::new();
    for (place, devices) in chosen {
        let server = &members[*place];
        let wish = Wish {
            gpus: u32::try_from(devices.len()).unwrap_or(u32::MAX),
            devices: devices.clone(),
            model: wanted.model.clone(),
            exclusive: wanted.exclusive,
            memory: wanted.memory,
            weight: wanted.weight,
            seconds,
            name: name.to_owned(),
        };
        let answer = asker.ask(server, &Question::Lease(wish));
        let granted = answer.and_then(|answer| {
            granted(answer).ok_or_else(|| {
                let (server, what) = (server.to_string(), "its answer is not a lease".to_owned());
                ConnectError::Protocol { server, what }
            })
        });
        match granted {
            Ok((lease, key)) => {
                let server =
                    Server { address: server.address.clone(), devices: Vec::new(), lease: Some(key) };
                held.push(Held { server, lease });
            }
            Err(error) => {
                release(asker, &servers_of(&held));
                return Err((*place, error));
            }
        }
    }
    Ok(held)
}

fn granted(answer: Answer) -> Option<(Lease, Secret)> {
    let Answer::Lease { lease, key } = answer else { return None };
    Some((lease, Secret::from_text(&key)?))
}

/// Releases leases. Prints an error for each lease that cannot be released now, which ends when its time is
/// over.
pub fn release(asker: &Asker, leases: &[Server]) {
    for error in asker.release_all(leases).into_iter().filter_map(Result::err) {
        say!("rgpuctl: a lease was not released: {}", with_causes(&error));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use protocol::link::{FrameHeader, Hello, frame};
    use test_kit::link::welcome;
    use zerocopy::{FromZeros, IntoBytes};

    use super::*;

    fn gpu(number: u32, sessions: u32, free_gib: u64) -> Gpu {
        let (memory, memory_free) = (Some(80 << 30), Some(free_gib << 30));
        Gpu { gpu: number, model: "NVIDIA H100".into(), memory, memory_free, sessions, ..Gpu::default() }
    }

    fn wanted(exclusive: bool, memory_gib: u64, model: &str) -> Wanted {
        let (model, memory) = (model.to_owned(), memory_gib << 30);
        Wanted { gpus: None, exclusive, model, memory, weight: 0, wait: 0 }
    }

    /// Chooses among the GPUs of servers.
    fn chosen(servers: &[Vec<Gpu>], wanted: &Wanted, count: usize) -> Result<Vec<(usize, Vec<u32>)>, usize> {
        let fitting: Vec<_> = servers.iter().map(|gpus| fitting(gpus, &[], wanted)).collect();
        choose(&fitting, count)
    }

    #[test]
    fn the_least_used_gpus_are_chosen_and_those_of_one_server_if_it_has_enough() {
        let servers = [
            vec![gpu(0, 0, 80), gpu(1, 3, 20)],
            vec![gpu(0, 1, 60), gpu(1, 0, 40), gpu(2, 0, 70)],
            vec![gpu(0, 0, 10)],
        ];
        let any = wanted(false, 0, "");
        assert_eq!(chosen(&servers, &any, 1), Ok(vec![(0, vec![0])]), "most free memory of the idle ones");
        assert_eq!(chosen(&servers, &any, 2), Ok(vec![(1, vec![2, 1])]));
        assert_eq!(chosen(&servers, &any, 3), Ok(vec![(1, vec![2, 1, 0])]));
        assert_eq!(chosen(&servers, &any, 4), Ok(vec![(1, vec![2, 1, 0]), (0, vec![0])]));
        assert_eq!(chosen(&servers, &any, 7), Err(6));
        assert_eq!(
            chosen(&servers, &wanted(true, 0, ""), 4),
            Ok(vec![(1, vec![2, 1]), (0, vec![0]), (2, vec![0])])
        );
        assert_eq!(chosen(&servers, &wanted(false, 50, ""), 4), Err(3));
        // Several servers are needed.
        let busy = vec![gpu(0, 5, 80), gpu(1, 5, 80)];
        let idle = vec![gpu(0, 0, 80), gpu(1, 0, 80)];
        let servers = [busy.clone(), idle.clone(), idle, vec![gpu(0, 1, 80)]];
        assert_eq!(chosen(&servers, &any, 3), Ok(vec![(1, vec![0, 1]), (2, vec![0])]));
        assert_eq!(chosen(&servers, &any, 5), Ok(vec![(1, vec![0, 1]), (2, vec![0, 1]), (3, vec![0])]));
    }

    #[test]
    fn a_server_that_is_named_twice_has_its_gpus_once() {
        let shown = |members: &[&str]| -> Vec<String> {
            let members: Vec<Server> = members.iter().map(|text| text.parse().unwrap()).collect();
            merged(&members).iter().map(ToString::to_string).collect()
        };
        assert_eq!(shown(&["a", "b", "a:9700", "a:9701"]), ["tcp:a:9700", "tcp:b:9700", "tcp:a:9701"]);
        assert_eq!(shown(&["a/0", "a/1,0", "b/2", "b"]), ["tcp:a:9700/0,1", "tcp:b:9700"]);
        let wanted = Wanted { gpus: Some(2), ..wanted(false, 0, "") };
        let server = server(gpu(0, 0, 80), || Does::Grants);
        let twice = [server.clone(), server];
        let error = lease(&Asker(Security::Insecure), &twice, &wanted, "", 60).unwrap_err();
        assert!(error.is::<Never>(), "{error}");
    }

    #[test]
    fn a_description_of_gpus_needs_their_number_only_where_there_may_be_none() {
        use clap::Parser;
        let parsed = |words: &[&str]| crate::Cli::try_parse_from(["rgpuctl"].iter().chain(words));
        assert!(parsed(&["lease", "--model", "H100", "--wait", "60"]).is_ok());
        assert!(parsed(&["lease", "--wait", "18446744073709551615"]).is_err());
        let any = wanted(false, 0, "");
        assert!(any.only_with_gpus().is_ok());
        assert!(wanted(false, 0, "h100").only_with_gpus().is_err());
        assert!(Wanted { wait: 1, ..any }.only_with_gpus().is_err());
        assert!(Wanted { gpus: Some(1), ..wanted(true, 1, "h100") }.only_with_gpus().is_ok());
    }

    /// What a server does when it is asked for a lease.
    enum Does {
        Grants,
        Refuses,
        Forbids,
        Closes,
    }

    /// A server with this GPU.
    fn server(gpu: Gpu, does: impl FnMut() -> Does + Send + 'static) -> Server {
        server_of(vec![gpu], does)
    }

    /// A server with these GPUs.
    fn server_of(gpus: Vec<Gpu>, mut does: impl FnMut() -> Does + Send + 'static) -> Server {
        server_that(move |question| match question {
            Question::Inventory {} => Some(Ok(Answer::Inventory(gpus.clone()))),
            _ => match does() {
                Does::Grants => {
                    let lease = Lease { id: "it".into(), ..Lease::default() };
                    Some(Ok(Answer::Lease { lease, key: "0".repeat(64) }))
                }
                Does::Refuses => Some(Err((Refusal::NoResources, "too many leases"))),
                Does::Forbids => Some(Err((Refusal::Denied, "no exclusive leases"))),
                Does::Closes => None,
            },
        })
    }

    /// What a server says to a question. `None`: it closes the connection.
    type Says = Option<Result<Answer, (Refusal, &'static str)>>;

    /// A server that answers so.
    fn server_that(mut answer: impl FnMut(Question) -> Says + Send + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut hello) = (stream.unwrap(), Hello::new_zeroed());
                stream.read_exact(hello.as_mut_bytes()).unwrap();
                let mut question = vec![0; hello.index as usize];
                stream.read_exact(&mut question).unwrap();
                let Some(answer) = answer(Question::parse(&question).unwrap()) else { continue };
                let answer = match answer {
                    Ok(answer) => answer,
                    Err((refusal, why)) => {
                        stream.write_all(welcome(refusal, why).as_bytes()).unwrap();
                        continue;
                    }
                };
                let text = serde_json::to_vec(&answer).unwrap();
                let header = FrameHeader { kind: frame::ANSWER, len: text.len() as u32 };
                let welcome = welcome(Refusal::Ok, "");
                stream.write_all(&[welcome.as_bytes(), header.as_bytes(), &text].concat()).unwrap();
            }
        });
        Server { address, devices: Vec::new(), lease: None }
    }

    #[test]
    fn servers_are_asked_less_and_less_often_and_still_each_few_seconds() {
        for (pause, seconds) in pauses().zip([1, 2, 4, 5, 5, 5]) {
            let whole = Duration::from_secs(seconds);
            assert!(whole / 2 <= pause && pause <= whole, "{pause:?} of {whole:?}");
        }
    }

    #[test]
    fn those_who_begin_at_the_same_moment_do_not_go_on_to_ask_at_the_same_moments() {
        for times in 1..4 {
            let asked: BTreeSet<Duration> = (0..100).map(|_| pauses().take(times).sum()).collect();
            assert!(asked.len() > 90, "100 ask at {} moments after {times} pauses", asked.len());
        }
    }

    #[test]
    fn a_server_that_cannot_be_reached_for_a_moment_is_asked_again() {
        let wanted = Wanted { gpus: Some(1), wait: 3600, ..wanted(false, 0, "") };
        let mut asked = 0;
        let server = server(gpu(0, 0, 80), move || {
            asked += 1;
            if asked == 1 { Does::Closes } else { Does::Grants }
        });
        let held = lease(&Asker(Security::Insecure), &[server], &wanted, "", 60).unwrap();
        assert_eq!(held[0].lease.id, "it");
    }

    #[test]
    fn a_server_that_grants_no_more_leases_does_not_keep_others_from_being_asked() {
        let wanted = Wanted { gpus: Some(1), ..wanted(false, 0, "") };
        // Its GPU has fewer users, so it is asked first.
        let full = server(gpu(0, 0, 80), || Does::Refuses);
        let busier = server(gpu(0, 1, 80), || Does::Grants);
        let asker = Asker(Security::Insecure);
        let held = lease(&asker, &[full.clone(), busier.clone()], &wanted, "", 60).unwrap();
        assert_eq!(held[0].server.address, busier.address);
        let refused = lease(&asker, &[full], &wanted, "", 60).unwrap_err().to_string();
        assert!(refused.contains("too many leases"), "{refused}");
    }

    /// Two servers. The first one answers once the second one was asked.
    fn two_that_have_to_be_asked_together() -> [Server; 2] {
        let (asked, others) = std::sync::mpsc::channel();
        let first = server(gpu(0, 0, 80), move || {
            others.recv().unwrap();
            Does::Grants
        });
        let second = server(gpu(0, 0, 80), move || {
            asked.send(()).unwrap();
            Does::Grants
        });
        [first, second]
    }

    #[test]
    fn a_server_that_does_not_answer_does_not_keep_other_leases_from_being_renewed_or_released() {
        let asker = Asker(Security::Insecure);
        let renewed = asker.renew_all(&two_that_have_to_be_asked_together());
        assert!(renewed.iter().all(Result::is_ok), "{renewed:?}");
        let released = asker.release_all(&two_that_have_to_be_asked_together());
        assert!(released.iter().all(Result::is_ok), "{released:?}");
    }

    #[test]
    fn a_signal_waits_until_all_leases_are_known() {
        for signal in [Signal::SIGTERM, Signal::SIGQUIT] {
            let raised = || nix::sys::signal::raise(signal).is_ok();
            assert_eq!(uninterrupted(raised).unwrap(), (true, Some(signal)));
        }
        assert_eq!(uninterrupted(|| 7).unwrap(), (7, None));
    }

    /// How a request for leases fails that may wait for an hour.
    fn failure(servers: &[Server], wanted: &Wanted, gpus: u32) -> anyhow::Error {
        let wanted = Wanted { gpus: Some(gpus), wait: 3600, ..wanted.clone() };
        lease(&Asker(Security::Insecure), servers, &wanted, "", 60).unwrap_err()
    }

    #[test]
    fn what_the_servers_can_never_give_is_not_waited_for() {
        let a100 = Gpu { model: "NVIDIA A100".into(), ..gpu(0, 0, 80) };
        let servers = [
            server_of(vec![gpu(0, 9, 0), Gpu { exclusive: true, ..gpu(1, 0, 80) }], || Does::Refuses),
            server_of(vec![a100], || Does::Refuses),
        ];
        for (wanted, gpus, words) in [
            (wanted(false, 0, "h200"), 1, "1 GPU (h200) can never"),
            (wanted(true, 0, ""), 4, "4 GPUs (exclusively) can never"),
            (wanted(false, 81, ""), 1, "1 GPU (with 82944 MiB) can never"),
            (wanted(false, 1, "h100"), 3, "has 2 among its 2 (NVIDIA H100 with 81920 MiB); "),
            (wanted(false, 1, "h100"), 3, "has 0 among its 1 (NVIDIA A100 with 81920 MiB)"),
        ] {
            let error = failure(&servers, &wanted, gpus);
            assert!(error.is::<Never>() && error.to_string().contains(words), "{error}");
        }
        let steers = Gpu { model: "A\u{1b}[2J\n".into(), ..gpu(0, 0, 80) };
        let (_, words) = could_lease(&servers[0], &[steers], None, &wanted(false, 0, "")).unwrap();
        assert!(words.contains("(A?[2J? with 81920 MiB)"), "{words:?}");
        assert!(failure(&servers, &wanted(false, 0, ""), 33).to_string().contains("32 at most"));
        let one_of_two = Server { devices: vec![1], ..servers[0].clone() };
        assert!(failure(&[one_of_two], &wanted(false, 0, ""), 2).is::<Never>());
        // The rules of one server, and what there is on the other.
        let forbids = server(gpu(0, 0, 80), || Does::Forbids);
        let error = failure(&[forbids.clone(), servers[1].clone()], &wanted(true, 0, ""), 2);
        assert!(error.is::<Never>() && error.to_string().contains("no exclusive leases"), "{error}");
        assert!(failure(&[forbids], &wanted(true, 0, ""), 1).is::<Never>());
    }

    #[test]
    fn what_a_server_may_give_later_is_not_said_to_be_impossible() {
        let no_wait = |servers: &[Server], wanted: &Wanted, gpus: u32| {
            let wanted = Wanted { gpus: Some(gpus), ..wanted.clone() };
            lease(&Asker(Security::Insecure), servers, &wanted, "", 60).unwrap_err()
        };
        let ill = Gpu { unhealthy: Some("Xid 79".into()), ..gpu(1, 0, 80) };
        let used = Gpu { leases: 1, memory_leased: 80 << 30, exclusive: true, ..gpu(0, 3, 0) };
        let busy = server_of(vec![used, ill], || Does::Refuses);
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let away: Server = format!("tcp:{unused}").parse().unwrap();
        let starting = server_of(Vec::new(), || Does::Refuses);
        let full = server(gpu(0, 0, 80), || Does::Refuses);
        // Its rules do not give so many at once: fewer, perhaps.
        let four = server_of((0..4).map(|number| gpu(number, 0, 80)).collect(), || Does::Forbids);
        let two = server_of((0..2).map(|number| gpu(number, 0, 80)).collect(), || Does::Refuses);
        for (servers, wanted, gpus) in [
            (vec![four, two], wanted(false, 0, ""), 4),
            (vec![busy.clone()], wanted(true, 80, "h100"), 2),
            (vec![busy.clone(), away.clone()], wanted(false, 0, "h200"), 1),
            (vec![away], wanted(false, 0, ""), 1),
            (vec![busy, starting], wanted(false, 0, ""), 3),
            (vec![full], wanted(false, 0, ""), 1),
        ] {
            let error = no_wait(&servers, &wanted, gpus);
            assert!(!error.is::<Never>() && error.to_string().contains("cannot be had now"), "{error}");
        }
    }

    #[test]
    fn a_server_that_does_not_let_this_client_in_is_not_waited_for() {
        let stranger =
            server_that(|_| Some(Err((Refusal::Denied, "the server does not know this client's key"))));
        let error = failure(std::slice::from_ref(&stranger), &wanted(false, 0, ""), 1);
        assert!(!error.is::<Never>() && error.to_string().contains("does not know this client"), "{error}");
        // Others are waited for.
        let mut asked = 0;
        let free_later = server(gpu(0, 0, 80), move || {
            asked += 1;
            if asked == 1 { Does::Closes } else { Does::Grants }
        });
        let wanted = Wanted { gpus: Some(1), wait: 3600, ..wanted(false, 0, "") };
        let members = [stranger, free_later.clone()];
        let held = lease(&Asker(Security::Insecure), &members, &wanted, "", 60).unwrap();
        assert_eq!(held[0].server.address, free_later.address);
    }

    #[test]
    fn a_server_that_names_no_gpus_is_named_itself() {
        let starting = server_of(Vec::new(), || Does::Refuses);
        let wanted = Wanted { gpus: Some(1), ..wanted(false, 0, "") };
        let asker = Asker(Security::Insecure);
        let error = lease(&asker, std::slice::from_ref(&starting), &wanted, "", 60).unwrap_err().to_string();
        assert!(error.contains(&format!("{starting} names no GPUs")), "{error}");
    }

    #[test]
    fn gpus_that_do_not_match_are_not_chosen() {
        let leased = Gpu { leases: 1, memory_leased: 60 << 30, ..gpu(3, 0, 80) };
        let ill = Gpu { unhealthy: Some("Xid 79".into()), ..gpu(1, 0, 80) };
        let servers = [vec![
            Gpu { model: "NVIDIA A100".into(), ..gpu(0, 0, 80) },
            ill,
            Gpu { exclusive: true, ..gpu(2, 0, 80) },
            leased,
        ]];
        assert_eq!(chosen(&servers, &wanted(false, 0, "h100"), 1), Ok(vec![(0, vec![3])]));
        assert_eq!(chosen(&servers, &wanted(false, 20, "h100"), 1), Ok(vec![(0, vec![3])]));
        assert_eq!(chosen(&servers, &wanted(false, 30, "h100"), 1), Err(0), "promised to others");
        assert_eq!(chosen(&servers, &wanted(true, 0, "h100"), 1), Err(0));
        assert_eq!(fitting(&servers[0], &[1, 2], &wanted(false, 0, "")).len(), 0);
    }

    #[test]
    fn a_pool_is_a_file_of_servers_and_errors_name_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool.toml");
        let read_text = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let servers = read(&path).map_err(|e| format!("{e:#}"))?;
            Ok::<_, String>(servers.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let two = read_text("# ours\nservers = [\"gpu1\", \"gpu2:9701/0,2\"]\n");
        assert_eq!(two, Ok(vec!["tcp:gpu1:9700".to_owned(), "tcp:gpu2:9701/0,2".to_owned()]));
        for (text, words) in [
            ("", "lists no servers"),
            ("\nserver = [\"a\"]\n", "line 2: server"),
            ("servers = [\"a/x\"]\n", "line 1: servers"),
        ] {
            let error = read_text(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
