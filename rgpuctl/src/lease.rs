//! `rgpuctl lease`, `renew`, `release`, `leases` and `inventory`: GPUs of servers for a time.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use host_bridge::ask::{Answer, Lease as Row, Question};
use host_bridge::bridge::ConnectError;
use host_bridge::framing::{with_causes, without_control};
use host_bridge::server::Server;
use nix::sys::signal::{SigSet, SigmaskHow};
use protocol::device::Answer as Refusal;
use serde_json::{Value, json};

use crate::enrollment::{Admin, request_answer};
use crate::pool::{self, Asker, Held, Never, Place, Wanted};
use crate::status::table;

/// The environment variable with a program's servers and leases.
pub const SERVERS: &str = "RGPU_SERVERS";
/// Seconds of a lease that this process renews.
const HELD_SECONDS: u64 = 120;
/// How often this process renews its leases.
const RENEW_EVERY: Duration = Duration::from_secs(20);
/// The exit status when no wait would help. The script of rgpu-slurm knows it.
const NEVER: u8 = 4;

/// Lease GPUs of one or several servers for a limited time.
///
/// Prints the leases in the form of RGPU_SERVERS. Programs that are started with this variable use these
/// GPUs, if vhost-rgpu on this machine is configured with these servers (server or named_servers) and has the
/// key with which they were leased. Anyone who sees the text can use the GPUs from this machine until the
/// lease ends.
///
/// A lease ends when its time is over and it was not renewed, and when it is released. Its sessions end with
/// it.
///
/// Exit status: 0 when the GPUs were leased, 125 when they are not free or a server cannot be asked, 4 when
/// waiting will not help: the servers do not have such GPUs, or not so many, or their rules do not allow it.
#[derive(Args)]
#[command(after_long_help = "Examples:
  export RGPU_SERVERS=\"$(rgpuctl lease --gpus 3 --exclusive --model H100)\"    three H100 of the pool in /etc/rgpu/pool.toml
  rgpuctl lease --server gpu7 --gpus 1 --memory 8G --minutes 480              8 GiB of one GPU of gpu7, for a working day
  rgpuctl release                                                             gives back those in RGPU_SERVERS")]
pub struct Lease {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    wanted: Wanted,
    /// Minutes until the lease ends unless it is renewed
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=525_600))]
    minutes: u64,
    /// Name of the lease in lists
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Renew leases: their time begins again.
#[derive(Args)]
pub struct Renew {
    /// Leases, as rgpuctl lease prints them. By default those in RGPU_SERVERS
    #[arg(value_name = "LEASE")]
    leases: Vec<String>,
    #[command(flatten)]
    how: How,
}

/// Release leases. Their sessions end at once.
///
/// An operator of a server can also end leases of others there, by their numbers.
#[derive(Args)]
pub struct Release {
    /// Leases, as rgpuctl lease prints them, or on the server the numbers from rgpuctl leases. By default
    /// those in RGPU_SERVERS
    #[arg(value_name = "LEASE")]
    leases: Vec<String>,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    admin: Admin,
}

/// How to reach servers.
#[derive(Args)]
pub struct How {
    /// Connect over TCP without TLS
    #[arg(long)]
    insecure: bool,
    /// Folder of this machine's key and of the servers that it trusts. By default /var/lib/rgpu/client for
    /// root, and ~/.config/rgpu for other users
    #[arg(long, value_name = "FOLDER")]
    identity: Option<PathBuf>,
}

/// List leases: with --server or --pool this machine's leases there, otherwise all leases of the server on
/// this machine.
#[derive(Args)]
pub struct Leases {
    #[command(flatten)]
    place: Place,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Show the GPUs that this machine may use on servers: their names, memory, sessions, leases and health.
#[derive(Args)]
pub struct Inventory {
    #[command(flatten)]
    place: Place,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl How {
    fn asker(&self) -> Asker {
        let (insecure, identity) = (self.insecure, self.identity.clone());
        Place { servers: Vec::new(), pool: None, insecure, identity }.asker()
    }
}

/// The leases in the form of RGPU_SERVERS.
fn as_servers(held: &[Held]) -> String {
    held.iter().map(|held| held.server.with_key()).collect::<Vec<_>>().join(" ")
}

/// Takes leases.
pub fn lease(arguments: &Lease) -> Result<ExitCode> {
    let Lease { place, wanted, minutes, name, json, .. } = arguments;
    let asker = place.asker();
    let held = match pool::lease(&asker, &place.members()?, wanted, name, minutes * 60) {
        Err(error) if error.is::<Never>() => {
            say!("rgpuctl: {error}");
            return Ok(ExitCode::from(NEVER));
        }
        held => held?,
    };
    // Nobody else would know the leases' keys.
    if let Err(error) = print_leases(&held, *json) {
        pool::release(&asker, &pool::servers_of(&held));
        return Err(error).context("cannot print the leases, so they were released");
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints leases: what they are on standard error, and on standard output what programs need.
fn print_leases(held: &[Held], json: bool) -> std::io::Result<()> {
    let (mut out, mut log) = (std::io::stdout(), std::io::stderr());
    if json {
        let rows: Vec<Value> = held.iter().map(|held| row(&held.server.to_string(), &held.lease)).collect();
        writeln!(out, "{}", json!({ "servers": as_servers(held), "leases": rows }))?;
        return out.flush();
    }
    for Held { server, lease } in held {
        let devices: Vec<String> = lease.devices.iter().map(u32::to_string).collect();
        let how = if lease.exclusive { "exclusively" } else { "shared" };
        let minutes = lease.seconds_left.div_ceil(60);
        // Only for people.
        let _ = writeln!(
            log,
            "lease {} of {server}: devices {}, {how}, for {minutes} min",
            without_control(&lease.id.to_string()),
            devices.join(", "),
        );
    }
    writeln!(out, "{}", as_servers(held))?;
    out.flush()
}

/// A lease with its server, for lists.
fn row(server: &str, lease: &Row) -> Value {
    let devices: Vec<String> = lease.devices.iter().map(u32::to_string).collect();
    json!({
        "server": server, "lease": lease.id, "principal": lease.principal, "name": lease.name, "devices": devices.join(","),
        "exclusive": lease.exclusive, "memory": lease.memory, "weight": lease.weight, "seconds": lease.seconds,
        "seconds_left": lease.seconds_left, "sessions": lease.sessions,
    })
}

/// The given leases, or those in the environment.
fn given(leases: &[String]) -> Result<Vec<String>> {
    if !leases.is_empty() {
        return Ok(leases.iter().flat_map(|text| text.split_whitespace()).map(str::to_owned).collect());
    }
    let found = in_environment()?;
    ensure!(!found.is_empty(), "no lease was given, and RGPU_SERVERS has none");
    Ok(found)
}

/// The servers and leases in the environment; none if the variable is not set.
pub fn in_environment() -> Result<Vec<String>> {
    let text = std::env::var_os(SERVERS).unwrap_or_default();
    let text = text.to_str().with_context(|| format!("{SERVERS} is not UTF-8"))?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

/// The lease that a text names: its server, with its key.
fn parse(text: &str) -> Result<Server> {
    let server: Server = text.parse()?;
    let named = server.lease.is_some();
    ensure!(named, "{text:?} names no lease: ADDRESS#KEY, as rgpuctl lease prints it");
    Ok(server)
}

/// Renews leases.
pub fn renew(arguments: &Renew) -> Result<ExitCode> {
    let mut failed = false;
    let mut wrong = |error: &(dyn std::error::Error + 'static)| {
        say!("rgpuctl: {}", with_causes(error));
        failed = true;
    };
    let mut servers = Vec::new();
    for text in given(&arguments.leases)? {
        match parse(&text) {
            Ok(server) => servers.push(server),
            Err(error) => wrong(error.as_ref()),
        }
    }
    let renewed = arguments.how.asker().renew_all(&servers);
    renewed.iter().filter_map(|renewed| renewed.as_ref().err()).for_each(|error| wrong(error));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Releases leases.
pub fn release(arguments: &Release) -> Result<ExitCode> {
    let mut failed = false;
    let mut wrong = |error: &(dyn std::error::Error + 'static)| {
        say!("rgpuctl: {}", with_causes(error));
        failed = true;
    };
    let ended = |sessions: u64| {
        if sessions > 0 {
            let s = if sessions == 1 { "" } else { "s" };
            say!("{sessions} session{s} ended with the lease");
        }
    };
    let number = |text: &str| text.len() == 8 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let mut servers = Vec::new();
    for text in given(&arguments.leases)? {
        if number(&text) {
            let question = json!({ "release": { "lease": text } });
            match request_answer(&arguments.admin.socket, &question) {
                Ok(answer) => ended(answer["ended_sessions"].as_u64().unwrap_or(0)),
                Err(error) => wrong(error.as_ref()),
            }
            continue;
        }
        match parse(&text) {
            Ok(server) => servers.push(server),
            Err(error) => wrong(error.as_ref()),
        }
    }
    for answer in arguments.how.asker().release_all(&servers) {
        match answer {
            Ok(Answer::Released { sessions }) => ended(sessions as u64),
            Ok(_) => {}
            Err(error) => wrong(&error),
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Prints rows as JSON or as a table, and the reasons why rows of some servers are missing.
fn print(rows: &[Value], json: bool, missing: &[String]) -> ExitCode {
    if json {
        println!("{}", Value::from(rows));
    } else if rows.is_empty() {
        // Where a server does not answer, nobody knows.
        if missing.is_empty() {
            println!("none");
        }
    } else {
        print!("{}", table(rows, 0));
    }
    for why in missing {
        say!("rgpuctl: {why}");
    }
    if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Lists leases.
pub fn leases(arguments: &Leases) -> Result<ExitCode> {
    let Leases { place, json, admin } = arguments;
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    if place.is_given() {
        let members = place.members()?;
        for (server, answer) in members.iter().zip(place.asker().ask_all(&members, &Question::Leases {})) {
            match answer {
                Ok(Answer::Leases(leases)) => {
                    rows.extend(leases.iter().map(|lease| row(&server.to_string(), lease)));
                }
                Ok(_) => missing.push(format!("{server} does not answer with its leases")),
                Err(error) => missing.push(with_causes(&error)),
            }
        }
    } else {
        let mut answer = request_answer(&admin.socket, &json!({ "leases": {} }))?;
        let all: Vec<Row> = serde_json::from_value(answer["leases"].take()).context("the server's leases")?;
        rows.extend(all.iter().map(|lease| row("this machine", lease)));
    }
    Ok(print(&rows, *json, &missing))
}

/// Shows the GPUs of servers.
pub fn inventory(arguments: &Inventory) -> Result<ExitCode> {
    let Inventory { place, json } = arguments;
    let members = place.members()?;
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    for (server, answer) in members.iter().zip(place.asker().ask_all(&members, &Question::Inventory {})) {
        match answer {
            Ok(Answer::Inventory(gpus)) => rows.extend(gpus.iter().map(|gpu| {
                json!({
                    "server": server.to_string(), "gpu": gpu.gpu, "model": gpu.model,
                    "healthy": gpu.unhealthy.is_none(), "reason": gpu.unhealthy, "memory": gpu.memory,
                    "memory_free": gpu.memory_free, "memory_leased": gpu.memory_leased, "sessions": gpu.sessions,
                    "leases": gpu.leases, "exclusive": gpu.exclusive, "utilization_percent": gpu.utilization,
                })
            })),
            Ok(_) => missing.push(format!("{server} does not answer with its inventory")),
            Err(error) => missing.push(with_causes(&error)),
        }
    }
    Ok(print(&rows, *json, &missing))
}

/// A lease that this process renews.
struct Own {
    server: Server,
    /// When it ends unless it is renewed.
    until: Instant,
    /// Why it was not renewed last, as long as it is not.
    why: Option<String>,
}

impl Own {
    /// A lease of which the server says this now.
    fn new(Held { server, lease }: &Held, now: Instant) -> Own {
        Own { server: server.clone(), until: until(lease, now), why: None }
    }

    /// Notes how a renewal went. Returns whether to try again: a refusal may pass as long as the lease has
    /// time, but one that has ended does not come back.
    fn note(&mut self, renewed: Result<Answer, ConnectError>, now: Instant) -> bool {
        let error = match renewed {
            Ok(Answer::Lease { lease, .. }) => {
                (self.until, self.why) = (until(&lease, now), None);
                return true;
            }
            Ok(_) => return true,
            Err(error) => error,
        };
        let why = with_causes(&error);
        if self.why.as_ref() != Some(&why) {
            say!("rgpuctl: a lease was not renewed: {why}");
            self.why = Some(why);
        }
        now < self.until || !matches!(error, ConnectError::Refused { answer: Refusal::Denied, .. })
    }
}

/// When a lease ends unless it is renewed.
fn until(lease: &Row, now: Instant) -> Instant {
    // A server says that, so the sum must not overflow. No lease lasts longer than a year.
    now + Duration::from_secs(lease.seconds_left.min(31_536_000))
}

/// Leases that are renewed as long as this value lives, and then released. If this process is killed, they
/// end when their time is over.
pub struct Renewed {
    asker: Asker,
    servers: Vec<Server>,
    /// Ends the thread when it is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Renewed {
    /// Leases the wanted GPUs.
    pub fn take(place: &Place, wanted: &Wanted, name: &str) -> Result<Renewed> {
        let asker = place.asker();
        let held = pool::lease(&asker, &place.members()?, wanted, name, HELD_SECONDS)?;
        let servers = pool::servers_of(&held);
        let (stop, stopped) = channel::<()>();
        let own_asker = asker.clone();
        let mut own: Vec<Own> = held.iter().map(|held| Own::new(held, Instant::now())).collect();
        let work = move || {
            while stopped.recv_timeout(RENEW_EVERY) == Err(RecvTimeoutError::Timeout) {
                let servers: Vec<Server> = own.iter().map(|own| own.server.clone()).collect();
                let mut renewed = own_asker.renew_all(&servers).into_iter();
                own.retain_mut(|own| renewed.next().is_none_or(|renewed| own.note(renewed, Instant::now())));
            }
        };
        let mut renewed = Renewed { asker, servers, stop: Some(stop), thread: None };
        // The thread blocks all signals, because the main thread reads them from a descriptor while a program
        // runs.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).context("cannot block signals")?;
        let thread = std::thread::Builder::new().name("renew".into()).spawn(work);
        before.thread_set_mask().context("cannot unblock signals")?;
        renewed.thread = Some(thread.context("cannot start a thread")?);
        Ok(renewed)
    }

    /// The servers with their leases.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }
}

impl Drop for Renewed {
    fn drop(&mut self) {
        drop(self.stop.take());
        // If the thread has panicked, the leases are released all the same.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        pool::release(&self.asker, &self.servers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(seconds_left: u64) -> Row {
        Row {
            id: "it".into(),
            principal: "me".into(),
            name: String::new(),
            devices: vec![0],
            exclusive: false,
            memory: 0,
            weight: 100,
            seconds: 0,
            seconds_left,
            sessions: 0,
        }
    }

    #[test]
    fn a_lease_whose_renewal_was_refused_is_renewed_again_until_its_time_is_over() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let denied = |reason: &str| {
            let (server, reason) = ("gpu7".to_owned(), reason.to_owned());
            Err(ConnectError::Refused { server, answer: Refusal::Denied, reason })
        };
        let granted = || Ok(Answer::Lease { lease: row(120), key: "key".into() });
        let held = Held { server: "gpu7".parse().unwrap(), lease: row(120) };
        let mut own = Own::new(&held, now);
        assert!(own.note(denied("the certificate has expired"), at(20)));
        let why = own.why.clone().unwrap();
        assert!(why.contains("has expired"), "{why}");
        assert!(own.note(granted(), at(40)) && own.why.is_none());
        // Its time began again.
        assert!(own.note(denied("the rules"), at(150)));
        assert!(!own.note(denied("no such lease"), at(160)));
        // What is no refusal may pass at any time.
        let unreachable = Err(ConnectError::Here { source: std::io::ErrorKind::TimedOut.into() });
        assert!(own.note(unreachable, at(1000)));
    }
}
