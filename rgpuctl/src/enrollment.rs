//! `rgpuctl enroll`, `join`, `clients` and `revoke`: which machines may use a server.
//!
//! `enroll`, `clients` and `revoke` send requests to this machine's daemon, over its admin socket. `join`
//! runs on the other machine, and talks to the server over TLS.

use std::io::{BufRead, ErrorKind, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use host_bridge::bridge::{ConnectError, join as join_server};
use host_bridge::framing::Address;
use identity::servers::{self, CLIENT_FOLDER};
use identity::{Credentials, Identity, Token};
use protocol::device::Answer;
use serde_json::{Value, json};

/// The default path of the daemon's admin socket.
const ADMIN_SOCKET: &str = "/run/rgpu/server.admin";

/// How long to wait for a daemon that does not take requests yet.
const STARTED_WITHIN: Duration = Duration::from_secs(3);

/// Which daemon to send requests to.
#[derive(Args)]
pub struct Admin {
    /// Admin socket of the rgpu-server on this machine (its option --admin-socket)
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub socket: PathBuf,
}

/// Let another machine use this server: prints a token for `rgpuctl join` there.
///
/// The token works once, until it expires. Anyone who gets it before that can join in the other machine's
/// place, so send it only over a channel that you trust. A name belongs to one machine or one user: when it
/// joins again, the new key replaces the old one.
#[derive(Args)]
#[command(after_long_help = "Example:
  gpu7# rgpuctl enroll host1          prints a token
  host1# rgpuctl join                 asks for the token, and makes a key on host1, which gpu7 knows as \"host1\" from then on")]
pub struct Enroll {
    /// Name of the other machine: letters, digits, "-", "_" and "."
    name: String,
    /// Where the other machine reaches this server: HOST or HOST:PORT. May be given more than once. By
    /// default the addresses of this machine
    #[arg(long, value_name = "ADDRESS")]
    address: Vec<String>,
    /// Minutes until the token expires
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=60 * 24 * 30))]
    valid_minutes: u64,
    #[command(flatten)]
    admin: Admin,
}

/// Join a server with a token of `rgpuctl enroll`: makes a key for this machine and pins the server's.
///
/// The key stays in this machine, in a folder that only its user can read: /var/lib/rgpu/client for root,
/// where vhost-rgpu looks, or ~/.config/rgpu for another user's `rgpuctl run`.
#[derive(Args)]
pub struct Join {
    /// The token. "-" reads it from standard input: other users of this machine can see the command line of a
    /// process
    #[arg(default_value = "-")]
    token: String,
    /// Folder of this machine's key and of the servers that it trusts. By default /var/lib/rgpu/client for
    /// root, and ~/.config/rgpu for other users
    #[arg(long, value_name = "FOLDER")]
    identity: Option<PathBuf>,
}

/// List the machines that may use this server, and the tokens that are not used yet.
#[derive(Args)]
pub struct Clients {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Revoke a machine's access to this server. Its sessions end at once.
#[derive(Args)]
pub struct Revoke {
    /// Name of the machine, as `rgpuctl clients` lists it
    name: String,
    #[command(flatten)]
    admin: Admin,
}

/// The folder of this user's key and servers: root's folder if this user is root, or if neither HOME nor
/// XDG_CONFIG_HOME is set.
pub fn client_folder() -> PathBuf {
    // An empty one would be the current folder.
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = folder("XDG_CONFIG_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .map(|folder| folder.join("rgpu"));
    match own {
        Some(own) if !nix::unistd::geteuid().is_root() => own,
        _ => CLIENT_FOLDER.into(),
    }
}

/// Connects to the daemon, which may just have been started.
fn reach(socket: &Path) -> std::io::Result<UnixStream> {
    let deadline = Instant::now() + STARTED_WITHIN;
    loop {
        match UnixStream::connect(socket) {
            Err(e)
                if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// Why no daemon takes requests at a socket, and what to do.
fn unreached(socket: &Path, error: ErrorKind) -> String {
    let shown = socket.display();
    if error == ErrorKind::PermissionDenied {
        return format!("run this as root: this user may not make requests at {shown}");
    }
    let step = "start rgpu-server (systemctl start rgpu-server), which has it with --admin-socket";
    let other = socket.with_file_name("vhost-rgpu.admin");
    let other = match other != socket && other.exists() {
        true => format!(". This machine's vhost-rgpu takes upgrade: --socket {}", other.display()),
        false => String::new(),
    };
    format!("no daemon takes requests at {shown}: {step}{other}")
}

/// Sends the daemon a request. Returns the connection, on which the answer comes.
pub fn request(socket: &Path, request: &Value) -> Result<UnixStream> {
    let mut stream = reach(socket).map_err(|e| {
        let told = unreached(socket, e.kind());
        anyhow::Error::new(e).context(told)
    })?;
    stream.write_all(request.to_string().as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    Ok(stream)
}

/// Sends the daemon a request and returns its answer.
pub fn request_answer(socket: &Path, what: &Value) -> Result<Value> {
    let mut stream = request(socket, what)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("reading the answer of rgpu-server")?;
    let answer: Value =
        serde_json::from_str(&text).context("rgpu-server gave no answer; its log may say why")?;
    match answer["error"].as_str() {
        Some(error) => bail!("{error}"),
        None => Ok(answer),
    }
}

fn minutes(count: u64) -> String {
    if count == 1 { "1 minute".to_owned() } else { format!("{count} minutes") }
}

/// How long ago a client joined. `since`: in seconds since 1970.
fn joined_ago(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now.saturating_sub(since) / 86400 {
        1 => "joined 1 day ago".to_owned(),
        days => format!("joined {days} days ago"),
    }
}

/// Prints a token.
pub fn enroll(arguments: &Enroll) -> Result<ExitCode> {
    let request = json!({ "enroll": {
        "name": arguments.name, "valid_seconds": arguments.valid_minutes * 60, "addresses": arguments.address,
    } });
    let answer = request_answer(&arguments.admin.socket, &request)?;
    let token = answer["token"].as_str().context("rgpu-server gave no token")?;
    let name = &arguments.name;
    if let Some(since) = answer["replaces"]["since"].as_u64() {
        say!(
            "{name} is known already ({}): once this token is used, the key that it has now is not accepted any more, so \
             its new sessions fail and its leases are not renewed. For another machine or user, take another name.\n",
            joined_ago(since)
        );
    }
    let within = minutes(arguments.valid_minutes);
    say!("Run this on {name}, as root, or as the user who is to use this server, within {within}:\n");
    println!("rgpuctl join {token}");
    Ok(ExitCode::SUCCESS)
}

/// Reads a token, or the whole line that [`enroll`] prints, from standard input.
fn token_from_input() -> Result<Token> {
    let input = std::io::stdin();
    if input.is_terminal() {
        say!("The token of rgpuctl enroll:");
    }
    let mut line = String::new();
    // Longer than any token.
    input.lock().take(1 << 16).read_line(&mut line).context("reading the token from standard input")?;
    let line = line.trim();
    Ok(line.strip_prefix("rgpuctl join ").unwrap_or(line).parse()?)
}

/// Joins a server.
pub fn join(arguments: &Join) -> Result<ExitCode> {
    let token: Token = match arguments.token.as_str() {
        "-" => token_from_input()?,
        token => token.parse()?,
    };
    let folder = arguments.identity.clone().unwrap_or_else(client_folder);
    let identity = Identity::load_or_create(&folder)?;
    let credentials = Credentials::pinning(identity, token.server)?;
    let mut unreachable = Vec::new();
    let mut own = token.addresses.clone();
    for text in &token.addresses {
        let address: Address = text.parse().with_context(|| format!("the token names {text:?}"))?;
        match join_server(&address, &credentials, &token.secret) {
            Ok(principal) => {
                // All other addresses of a token belong to the same server, which has the key in the token.
                servers::add(&folder, &own, token.server, &principal)?;
                println!(
                    "This machine is known to the server as {principal:?}. Its key is in {}.",
                    folder.display()
                );
                println!(
                    "Use the server with rgpuctl run --server {address}, or with server = \"{address}\" in /etc/rgpu/vhost-rgpu.toml and systemctl reload-or-restart vhost-rgpu"
                );
                return Ok(ExitCode::SUCCESS);
            }
            Err(error) if error.answer() == Answer::NoServer => {
                // Another machine has the same address, such as that of a bridge.
                if matches!(error, ConnectError::Unsafe { .. }) {
                    own.retain(|address| address != text);
                }
                unreachable.push(with_causes(&error));
            }
            Err(error) => return Err(error.into()),
        }
    }
    bail!(
        "the server cannot be reached at any of its addresses ({}): if it has others, enroll again with --address HOST:PORT; \
         where a connection is refused it does not listen (listen in rgpu-server.toml)\n  {}",
        token.addresses.join(", "),
        unreachable.join("\n  ")
    )
}

fn with_causes(error: &ConnectError) -> String {
    host_bridge::framing::with_causes(error)
}

/// Lists clients and tokens.
pub fn clients(arguments: &Clients) -> Result<ExitCode> {
    let answer = request_answer(&arguments.admin.socket, &json!({ "clients": {} }))?;
    if arguments.json {
        println!("{answer:#}");
        return Ok(ExitCode::SUCCESS);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    println!("this server's key  {}", text(&answer["server_key"]));
    for client in answer["clients"].as_array().into_iter().flatten() {
        let joined = joined_ago(client["since"].as_u64().unwrap_or(now));
        println!("{}  key {}  {joined}", text(&client["name"]), text(&client["key"]));
    }
    for token in answer["tokens"].as_array().into_iter().flatten() {
        let left = minutes(token["expires"].as_u64().unwrap_or(now).saturating_sub(now).div_ceil(60));
        println!("{}  has not joined; its token expires in {left}", text(&token["name"]));
    }
    Ok(ExitCode::SUCCESS)
}

/// Revokes a client.
pub fn revoke(arguments: &Revoke) -> Result<ExitCode> {
    let answer = request_answer(&arguments.admin.socket, &json!({ "revoke": { "name": arguments.name } }))?;
    println!(
        "{} may not use this server any more; {} of its sessions ended",
        arguments.name, answer["ended_sessions"]
    );
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reaches_no_daemon_is_told_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let told = |error| unreached(&path("server.admin"), error);
        assert!(told(ErrorKind::PermissionDenied).starts_with("run this as root: "));
        assert!(told(ErrorKind::NotFound).contains("systemctl start rgpu-server"));
        assert!(!told(ErrorKind::NotFound).contains("vhost-rgpu"));
        std::fs::write(path("vhost-rgpu.admin"), "").unwrap();
        let other = format!("--socket {}", path("vhost-rgpu.admin").display());
        assert!(told(ErrorKind::ConnectionRefused).ends_with(&other));
        assert!(!unreached(&path("vhost-rgpu.admin"), ErrorKind::NotFound).contains(&other));
    }
}
