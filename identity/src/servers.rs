//! The servers that a client knows: `servers.json` in the client's identity folder, written by `rgpuctl
//! join`.

use std::fmt::Debug;
use std::fs::File;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::authority::{AUTHORITY_FILE, Authority};
use crate::files::{self, FileError};
use crate::fingerprint::Fingerprint;
use crate::key::{Identity, KeyError};
use crate::tls;

/// The file, in the identity folder.
const FILE: &str = "servers.json";
/// The identity folder of a machine's clients.
pub const CLIENT_FOLDER: &str = "/var/lib/rgpu/client";
/// The identity folder of a machine's server.
pub const SERVER_FOLDER: &str = "/var/lib/rgpu/server";

/// A server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownServer {
    /// `tcp:HOST:PORT`.
    pub address: String,
    /// Its key.
    pub key: Fingerprint,
    /// The name of this client on that server.
    pub principal: String,
}

/// Why a client cannot connect under TLS.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// There is no key.
    #[error("this client has no key in {}: join the server with rgpuctl join and a token of rgpuctl enroll for a name of its own, or allow a connection without TLS (--insecure)", folder.display())]
    NoKey {
        /// The identity folder.
        folder: PathBuf,
    },
    /// The server was not joined.
    #[error("no key is pinned for {address} in {}: run rgpuctl join with a token of rgpuctl enroll, or put its authority's certificate there as {AUTHORITY_FILE}{known}", folder.display())]
    Unknown {
        /// The server's address.
        address: String,
        /// The identity folder.
        folder: PathBuf,
        /// The servers that it has pins for, as a part of the sentence.
        known: String,
    },
    /// No certificate can name the server.
    #[error("{0} is not an address that a certificate can name: use the server's DNS name or IP address")]
    Name(String),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The process with the key refuses, or does not answer.
    #[error("{0}")]
    Remote(String),
    /// rustls refuses.
    #[error("cannot prepare TLS")]
    Tls(#[from] rustls::Error),
}

/// A source of credentials. Each session asks for them once, so a change needs no restart.
pub trait Source: Debug + Send + Sync {
    /// The credentials for a session with the server at `address` (`tcp:HOST:PORT`). May block briefly.
    fn credentials(&self, address: &str) -> Result<Credentials, CredentialsError>;
}

/// Reads the list in `folder`.
pub fn known(folder: &Path) -> Result<Vec<KnownServer>, FileError> {
    let path = folder.join(FILE);
    match files::read(&path)? {
        Some(text) => serde_json::from_slice(&text).map_err(|e| FileError::content(&path, e.to_string())),
        None => Ok(Vec::new()),
    }
}

/// Adds a server under each of its addresses, and replaces earlier entries for these addresses.
pub fn add(folder: &Path, addresses: &[String], key: Fingerprint, principal: &str) -> Result<(), FileError> {
    // Another process may add one at the same time.
    let lock = || File::open(folder).and_then(|folder| folder.lock().map(|()| folder));
    let _lock = lock().map_err(|source| FileError::Read { path: folder.to_owned(), source })?;
    let mut all = known(folder)?;
    all.retain(|server| !addresses.iter().any(|address| is_same(address, &server.address)));
    all.extend(addresses.iter().map(|address| KnownServer {
        address: address.clone(),
        key,
        principal: principal.to_owned(),
    }));
    let path = folder.join(FILE);
    let text = serde_json::to_vec_pretty(&all).map_err(|e| FileError::content(&path, e.to_string()))?;
    files::replace(&path, &text)
}

/// Whether two texts are the same address: names in DNS have no case and may end with a dot, and an IPv6
/// address can be written in several ways.
fn is_same(one: &str, other: &str) -> bool {
    let parts = |address: &str| {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let host = host.strip_prefix("tcp:").unwrap_or(host);
        let host = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.').to_lowercase();
        let host = host.parse::<Ipv6Addr>().map_or(host, |address| address.to_string());
        (host, port.to_owned())
    };
    parts(one) == parts(other)
}

/// The files with a client's key and its servers' fingerprints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFiles {
    /// The identity folder.
    pub folder: PathBuf,
}

/// A client's key and the way it recognizes the server. A session keeps its credentials, so that all of its
/// connections use the same ones.
#[derive(Debug, Clone)]
pub struct Credentials {
    identity: Identity,
    pub(crate) trust: Trust,
    greeting: Arc<ClientConfig>,
}

/// How a client recognizes its server.
#[derive(Debug, Clone)]
pub(crate) enum Trust {
    /// By its key.
    Pinned(Fingerprint),
    /// By a certificate of an authority for this name.
    Certified(Arc<Authority>, ServerName<'static>),
}

impl Trust {
    fn config(
        &self,
        identity: &Identity,
        also: Option<Fingerprint>,
    ) -> Result<Arc<ClientConfig>, rustls::Error> {
        let (pinned, named) = match self {
            Trust::Pinned(key) => (Some(*key), None),
            Trust::Certified(authority, name) => {
                let verifier = Arc::clone(&authority.servers);
                (None, Some(tls::Named { verifier, name: name.clone() }))
            }
        };
        let keys: Vec<Fingerprint> = also.into_iter().chain(pinned).collect();
        tls::client(identity, &keys, named)
    }
}

/// The host in `tcp:HOST:PORT`, in the form in which a certificate names it.
fn host_of(address: &str) -> Result<ServerName<'static>, CredentialsError> {
    let unnamed = || CredentialsError::Name(address.to_owned());
    let rest = address.strip_prefix("tcp:").unwrap_or(address);
    let (host, _port) = rest.rsplit_once(':').ok_or_else(unnamed)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(host.to_owned()).map_err(|_| unnamed())
}

impl ClientFiles {
    /// The files of a machine's daemons.
    pub fn of_machine() -> ClientFiles {
        ClientFiles { folder: CLIENT_FOLDER.into() }
    }

    /// Reads the client's key.
    pub fn identity(&self) -> Result<Identity, CredentialsError> {
        Identity::load(&self.folder)?.ok_or_else(|| CredentialsError::NoKey { folder: self.folder.clone() })
    }
}

impl Source for ClientFiles {
    fn credentials(&self, address: &str) -> Result<Credentials, CredentialsError> {
        let identity = self.identity()?;
        let (folder, all) = (self.folder.clone(), known(&self.folder)?);
        let pinned = all.iter().find(|server| is_same(&server.address, address));
        match (pinned, Authority::load(&self.folder)?) {
            (Some(server), _) => Credentials::pinning(identity, server.key),
            (None, Some(authority)) => Credentials::certified(identity, authority, host_of(address)?),
            (None, None) => {
                let names: Vec<_> = all.iter().map(|server| server.address.as_str()).collect();
                let known = if names.is_empty() {
                    String::new()
                } else {
                    format!("; pinned are only {}", names.join(", "))
                };
                Err(CredentialsError::Unknown { address: address.to_owned(), folder, known })
            }
        }
    }
}

impl Credentials {
    /// Trusts the server with this key.
    pub fn pinning(identity: Identity, server: Fingerprint) -> Result<Credentials, CredentialsError> {
        Credentials::new(identity, Trust::Pinned(server))
    }

    /// Trusts the server with an authority's certificate for `name`.
    pub(crate) fn certified(
        identity: Identity,
        authority: Authority,
        name: ServerName<'static>,
    ) -> Result<Credentials, CredentialsError> {
        Credentials::new(identity, Trust::Certified(Arc::new(authority), name))
    }

    fn new(identity: Identity, trust: Trust) -> Result<Credentials, CredentialsError> {
        let greeting = trust.config(&identity, None)?;
        Ok(Credentials { identity, trust, greeting })
    }

    /// The client's key.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The TLS configuration for the connection to the daemon.
    pub fn greeting(&self) -> &Arc<ClientConfig> {
        &self.greeting
    }

    /// The TLS configuration for the connections of a session whose worker has this key. When the session is
    /// over, the daemon tells the client, with the daemon's own key.
    pub fn session(&self, key: Fingerprint) -> Result<Arc<ClientConfig>, rustls::Error> {
        self.trust.config(&self.identity, Some(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_are_added_at_the_same_time_are_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for number in 0..16 {
                let folder = folder.path();
                scope.spawn(move || {
                    add(folder, &[format!("tcp:host{number}:1")], Fingerprint([number; 32]), "me").unwrap()
                });
            }
        });
        assert_eq!(known(folder.path()).unwrap().len(), 16);
    }

    #[test]
    fn an_address_is_the_same_however_it_is_written() {
        for (one, other) in [
            ("tcp:GPU7:9700", "tcp:gpu7:9700"),
            ("tcp:gpu7.example.:9700", "tcp:gpu7.Example:9700"),
            ("tcp:[2001:DB8::1]:9700", "tcp:[2001:db8:0:0::1]:9700"),
        ] {
            assert!(is_same(one, other), "{one} and {other}");
        }
        for (one, other) in [
            ("tcp:gpu7:9700", "tcp:gpu7:9701"),
            ("tcp:gpu7:9700", "tcp:gpu70:9700"),
            ("unix:/run/A", "unix:/run/a"),
            ("tcp:[2001:db8::1]:9700", "tcp:[2001:db8::2]:9700"),
        ] {
            assert!(!is_same(one, other), "{one} and {other}");
        }
    }

    #[test]
    fn a_server_is_found_by_its_address_and_missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let files = ClientFiles { folder: folder.path().to_owned() };
        let error = files.credentials("tcp:a:1").unwrap_err().to_string();
        assert!(error.contains("has no key") && error.contains("rgpuctl join"), "{error}");
        let identity = Identity::load_or_create(folder.path()).unwrap();
        add(folder.path(), &["tcp:a:1".into(), "tcp:b:1".into()], identity.fingerprint(), "me").unwrap();
        add(folder.path(), &["tcp:b:1".into()], Fingerprint([9; 32]), "other").unwrap();
        assert!(files.credentials("tcp:a:1").is_ok());
        let error = files.credentials("tcp:c:1").unwrap_err().to_string();
        assert!(error.contains("tcp:c:1") && error.ends_with("pinned are only tcp:a:1, tcp:b:1"), "{error}");
        let all = known(folder.path()).unwrap();
        assert_eq!((all.len(), all[1].principal.as_str(), all[1].key), (2, "other", Fingerprint([9; 32])));
    }
}
