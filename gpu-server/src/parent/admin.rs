//! [`rgpuctl`'s requests](handover::admin) to the daemon. Only `drain` is answered with several objects,
//! until the daemon has ended ([`drain`]).
//!
//! ```text
//!   {"enroll": {"name": "host1", "valid_seconds": 3600}}     {"token": …, "replaces": null}; the token
//!   contains addresses and this server's key
//!   {"clients": {}}                                          {"clients": [{"name", "key", "since"}], "tokens": [{"name", "expires"}]}
//!   {"revoke": {"name": "host1"}}                            {"ended_sessions": 2}
//!   {"leases": {}}                                           {"leases": [{"id", "principal", "devices", …}]}
//!   {"release": {"lease": "3f2a77c0"}}                       {"ended_sessions": 1}
//!   {"drain": {"seconds": 60}}                               one line for each session
//!   {"upgrade": {}}                                          {"upgrading": {"sessions": 3, "version": …}},
//!   then another program takes over
//!   {"version": {}}                                          {"version": …, "pid": 7, "sessions": 3, "starting": false,
//!   "failed": null}
//! ```
//!
//! `replaces`: the client that has this name already, with `key` and `since`; its key is not accepted any
//! more once another machine has used the token. `starting`: the first worker is still to become ready.
//! `failed`: why the last worker could not be started, if none has become ready since.
//!
//! A failed request is answered with `{"error": "why"}`.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handover::{Inherited, admin};
use host_bridge::framing::{Address, with_causes};
use identity::Token;
use identity::principals::now;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use serde::Deserialize;
use serde_json::{Value, json};

use super::listen::{Files, own_addresses, serve_unix};
use super::state::Server;
use super::trust::Trust;
use super::{drain, ends, leases, pool, takeover};

/// A request.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Enroll {
        name: String,
        valid_seconds: u64,
        /// Where the client reaches this server. If empty, the server uses its own addresses.
        #[serde(default)]
        addresses: Vec<String>,
    },
    Clients {},
    Revoke {
        name: String,
    },
    Leases {},
    Release {
        lease: String,
    },
    Upgrade {},
    Version {},
    Drain {
        /// How long sessions have to end by themselves, in seconds.
        seconds: u64,
    },
}

/// Starts serving requests at `path`.
pub(super) fn start(
    server: &Arc<Server>,
    path: &Path,
    inherited: &mut Inherited,
    files: &mut Files,
) -> anyhow::Result<()> {
    serve_unix(server, (path, 0o600), "rgpu-admin", (inherited, files), |server, stream| {
        if let Err(e) = serve(server, stream) {
            tracing::debug!("a request at the admin socket: {e}");
        }
    })
}

fn serve(server: &Arc<Server>, stream: UnixStream) -> std::io::Result<()> {
    let uid = getsockopt(&stream, PeerCredentials)?.uid();
    if uid != 0 && uid != geteuid().as_raw() {
        tracing::warn!(uid, "refused a request at the admin socket: this user may not make any");
        return Ok(());
    }
    let answer = match admin::request(&stream) {
        Ok(Request::Drain { seconds }) => return drain::order(server, seconds, stream),
        Ok(Request::Upgrade {}) => return upgrade(server, stream),
        Ok(Request::Version {}) => Ok(version(server)),
        Ok(Request::Leases {}) => Ok(all_leases(server)),
        Ok(Request::Release { lease }) => release(server, &lease),
        Ok(Request::Enroll { name, valid_seconds, addresses }) => {
            trust(server).and_then(|trust| enroll(server, trust, &name, valid_seconds, addresses))
        }
        Ok(Request::Clients {}) => trust(server).map(clients),
        Ok(Request::Revoke { name }) => trust(server).and_then(|trust| revoke(server, trust, &name)),
        Err(why) => Err(why),
    };
    admin::conclude(&stream, answer);
    Ok(())
}

/// Executes the installed program, and reports that right before.
fn upgrade(server: &Arc<Server>, stream: UnixStream) -> std::io::Result<()> {
    takeover::start(server, move |server| admin::upgrade(&stream, |say| takeover::upgrade(server, say)))
}

fn version(server: &Server) -> Value {
    let state = server.lock();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "sessions": state.sessions.len(),
        "starting": pool::first_is_awaited(&state, &server.options, Instant::now()),
        "failed": (state.gpu.failures > 0).then_some(&state.gpu.last_failure),
    })
}

fn all_leases(server: &Server) -> Value {
    let state = server.lock();
    let rows: Vec<_> = state.leases.all().map(|lease| state.row(lease, Instant::now())).collect();
    json!({ "leases": rows })
}

fn release(server: &Server, id: &str) -> Result<Value, String> {
    if !server.lock().leases.all().any(|lease| lease.id.to_string() == id) {
        return Err(format!("there is no lease {id:?}"));
    }
    let ended = leases::end(server, true, |lease| {
        (lease.id.to_string() == id).then(|| "was released by the operator".to_owned())
    });
    Ok(json!({ "ended_sessions": ended }))
}

fn trust(server: &Server) -> Result<&Trust, String> {
    server.trust.as_ref().ok_or_else(|| {
        "this server has no clients on other machines: start it with --listen tcp:ADDRESS and without --insecure".into()
    })
}

fn enroll(
    server: &Server,
    trust: &Trust,
    name: &str,
    valid_seconds: u64,
    addresses: Vec<String>,
) -> Result<Value, String> {
    let addresses = in_token(addresses, || own_addresses(server))?;
    let secret = trust.enroll(name, Duration::from_secs(valid_seconds)).map_err(|e| with_causes(&e))?;
    let principals = trust.principals();
    let known = principals.clients().iter().find(|client| client.name == name);
    let replaces = known.map(|client| json!({ "key": client.key, "since": client.since }));
    tracing::info!(principal = name, valid_seconds, "issued a token");
    let token = Token { server: trust.fingerprint(), secret, addresses };
    Ok(json!({ "token": token.to_string(), "replaces": replaces }))
}

/// The addresses for a token: those that were given, or as many of this machine's as there is room for.
fn in_token(given: Vec<String>, own: impl FnOnce() -> Vec<String>) -> Result<Vec<String>, String> {
    if given.is_empty() {
        let mut own = own();
        own.truncate(Token::room_for(&own));
        return Ok(own);
    }
    let given = check(given)?;
    match Token::room_for(&given) {
        room if room < given.len() => {
            Err(format!("a token has room for {room} of these {} addresses: name fewer", given.len()))
        }
        _ => Ok(given),
    }
}

fn revoke(server: &Server, trust: &Trust, name: &str) -> Result<Value, String> {
    if !trust.revoke(name).map_err(|e| with_causes(&e))? {
        return Err(format!("no client is called {name:?}"));
    }
    let reason = format!("the access of {name} to this server was revoked");
    server.audit.revoked(name);
    let ended = ends::end_sessions(server, true, |principal, _| {
        (principal.name == name && principal.key.is_some()).then(|| reason.clone())
    });
    leases::end(server, true, |lease| (lease.principal == name).then(|| format!("ended: {reason}")));
    tracing::info!(principal = name, ended, "revoked a client");
    Ok(json!({ "ended_sessions": ended }))
}

fn clients(trust: &Trust) -> Value {
    let principals = trust.principals();
    let tokens: Vec<Value> = principals
        .tokens(now())
        .map(|offer| json!({ "name": offer.name, "expires": offer.expires }))
        .collect();
    let clients: Vec<Value> = principals
        .clients()
        .iter()
        .map(|client| json!({ "name": client.name, "key": client.key, "since": client.since }))
        .collect();
    json!({ "server_key": trust.fingerprint(), "clients": clients, "tokens": tokens })
}

fn check(addresses: Vec<String>) -> Result<Vec<String>, String> {
    let tcp = |text: String| match text.parse::<Address>() {
        Ok(address @ Address::Tcp(..)) => Ok(address.to_string()),
        Ok(Address::Unix(_)) => Err(format!("{text} cannot be reached from another machine")),
        Err(e) => Err(e.to_string()),
    };
    addresses.into_iter().map(tcp).collect()
}

#[cfg(test)]
mod tests {
    use identity::{Fingerprint, Secret};

    use super::*;

    #[test]
    fn a_token_of_a_machine_with_many_addresses_can_be_used() {
        let many = || (0..250).map(|n| format!("tcp:10.0.0.{n}:9700")).collect::<Vec<_>>();
        let addresses = in_token(Vec::new(), many).unwrap();
        assert_eq!(addresses[0], "tcp:10.0.0.0:9700");
        let token = Token { server: Fingerprint([3; 32]), secret: Secret([5; 32]), addresses };
        token.to_string().parse::<Token>().unwrap();
        // Nobody would miss some of them until they are needed.
        let refused = in_token(many(), Vec::new).unwrap_err();
        assert!(refused.contains("of these 250 addresses"), "{refused}");
        assert_eq!(in_token(vec!["gpu7".into()], many).unwrap(), ["tcp:gpu7:9700"]);
    }
}
