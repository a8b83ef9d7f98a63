//! Identifies clients: by their keys over TLS, by their user over a Unix socket.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use handover::Places;
use host_bridge::framing::Address;
use identity::files::FileError;
use identity::principals::{EnrollError, JoinError, now};
use identity::{Authority, Fingerprint, Identity, Principals, Secret, tls};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize};

use crate::config::Serve;
use crate::lock::lock;
use crate::policy::{current_name, insecure_name};

/// A verified client. None of this comes from the client's own claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SavedPrincipal", into = "SavedPrincipal")]
pub(super) struct Principal {
    /// The name: that of a client that joined; `uid:N` for a user of this machine; `insecure:ADDRESS` without
    /// TLS.
    pub(super) name: String,
    /// The client's key, over TLS.
    pub(super) key: Option<Fingerprint>,
    /// The certificates that prove the name, if an authority issued them.
    certificates: Option<Arc<[CertificateDer<'static>]>>,
}

/// A principal in serialized form.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedPrincipal {
    name: String,
    key: Option<Fingerprint>,
    certificates: Option<Vec<Vec<u8>>>,
}

impl SavedPrincipal {
    pub(super) fn restore(self) -> Principal {
        let certificates = self.certificates.map(|all| all.into_iter().map(CertificateDer::from).collect());
        Principal { name: current_name(&self.name), key: self.key, certificates }
    }
}

impl From<SavedPrincipal> for Principal {
    fn from(saved: SavedPrincipal) -> Principal {
        saved.restore()
    }
}

impl From<Principal> for SavedPrincipal {
    fn from(principal: Principal) -> SavedPrincipal {
        principal.save()
    }
}

impl Principal {
    pub(super) fn save(&self) -> SavedPrincipal {
        let bytes = |all: &Arc<[CertificateDer<'static>]>| all.iter().map(|one| one.to_vec()).collect();
        SavedPrincipal {
            name: self.name.clone(),
            key: self.key,
            certificates: self.certificates.as_ref().map(bytes),
        }
    }

    /// A user of this machine.
    pub(super) fn of_socket(socket: &impl AsFd) -> Principal {
        let name = match getsockopt(&socket.as_fd(), PeerCredentials) {
            Ok(peer) => format!("uid:{}", peer.uid()),
            Err(_) => "uid:unknown".to_owned(),
        };
        Principal { name, key: None, certificates: None }
    }

    /// Anybody at `peer`, over tcp without TLS.
    pub(super) fn of_address(peer: &str) -> Principal {
        let name = match peer.parse::<SocketAddr>() {
            Ok(peer) => insecure_name(peer.ip()),
            Err(_) => format!("insecure:{peer}"),
        };
        Principal { name, key: None, certificates: None }
    }

    #[cfg(test)]
    pub(super) fn test() -> Principal {
        Principal::named("uid:0")
    }

    #[cfg(test)]
    pub(super) fn named(name: &str) -> Principal {
        Principal { name: name.to_owned(), key: None, certificates: None }
    }
}

/// The server's key, and its known clients.
pub(super) struct Trust {
    folder: PathBuf,
    files: Mutex<Arc<Files>>,
    /// The clients as everybody knows them. Whoever reads them waits for nobody.
    principals: Mutex<Arc<Principals>>,
    /// Held while the list of clients is changed, and so while a disk writes it.
    changing: Mutex<()>,
}

/// What the operator may replace while the server runs.
struct Files {
    identity: Identity,
    config: Arc<ServerConfig>,
    authority: Option<Authority>,
}

impl Files {
    fn with(identity: Identity, folder: &Path) -> anyhow::Result<Files> {
        let config = tls::server_for_anyone(&identity).context("preparing TLS")?;
        let authority = Authority::load(folder).context("the authorities of clients (--identity)")?;
        Ok(Files { identity, config, authority })
    }
}

impl Trust {
    /// Loads the server's key and clients. Creates the key if there is none.
    pub(super) fn open(options: &Serve) -> anyhow::Result<Trust> {
        let folder = options.identity.clone();
        let identity = Identity::load_or_create(&folder).context("this server's key (--identity)")?;
        let files = Mutex::new(Arc::new(Files::with(identity, &folder)?));
        let principals = Mutex::new(Arc::new(Principals::open(&folder)?));
        Ok(Trust { folder, files, principals, changing: Mutex::default() })
    }

    /// Whether the options ask for TLS.
    pub(super) fn wanted(options: &Serve) -> bool {
        !options.insecure && options.listen.iter().any(|address| matches!(address, Address::Tcp(..)))
    }

    /// Whether the key and the certificates in this folder can be used, or a key can be created there.
    pub(super) fn check(folder: &Path, places: &Places) -> anyhow::Result<()> {
        match Identity::load(folder).context("this server's key (--identity)")? {
            Some(identity) => Files::with(identity, folder).map(drop),
            None => {
                places.folder(folder).map_err(anyhow::Error::msg).context("this server's key (--identity)")
            }
        }
    }

    /// Reloads the key, the certificates and the lists of revoked ones, all or none of them. Returns whether
    /// the key changed.
    pub(super) fn reload(&self) -> anyhow::Result<bool> {
        let before = self.fingerprint();
        let identity = Identity::load(&self.folder)?.context("there is no key any more")?;
        let files = Arc::new(Files::with(identity, &self.folder)?);
        let changed = files.identity.fingerprint() != before;
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = files;
        Ok(changed)
    }

    fn files(&self) -> Arc<Files> {
        Arc::clone(&self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The clients as they are now.
    pub(super) fn principals(&self) -> Arc<Principals> {
        Arc::clone(&lock(&self.principals))
    }

    /// Changes the clients. They are as before until the change is written, which may take a disk long.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Principals) -> T) -> T {
        let _one = lock(&self.changing);
        let mut changed = Principals::clone(&self.principals());
        let done = change(&mut changed);
        *lock(&self.principals) = Arc::new(changed);
        done
    }

    /// For connections of clients to the daemon.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.files().config)
    }

    /// The fingerprint of the server's key.
    pub(super) fn fingerprint(&self) -> Fingerprint {
        self.files().identity.fingerprint()
    }

    /// The principal with these certificates, which has proven to own their key. The error says why there is
    /// none.
    pub(super) fn principal(&self, certificates: &[CertificateDer<'_>]) -> Result<Principal, String> {
        let key = key(certificates)?;
        if let Some(name) = self.principals().find(&key) {
            return Ok(Principal { name: name.to_owned(), key: Some(key), certificates: None });
        }
        let files = self.files();
        let Some(authority) = &files.authority else {
            return Err(format!(
                "the server does not know this client's key {key}: run rgpuctl enroll on the server and rgpuctl join on the client, under a name that nobody else has"
            ));
        };
        match authority.principal(certificates, UnixTime::now()) {
            Ok(name) => {
                let certificates = certificates.iter().map(|certificate| certificate.clone().into_owned());
                Ok(Principal { name, key: Some(key), certificates: Some(certificates.collect()) })
            }
            Err(why) => Err(format!(
                "the server does not know this client: its certificate does not count ({why}), and its key was not enrolled (rgpuctl enroll)"
            )),
        }
    }

    /// Why a principal may begin nothing any more, if so: it is revoked, or another key has joined under its
    /// name.
    pub(super) fn doubt(&self, principal: &Principal) -> Option<String> {
        self.revoked(principal).or_else(|| {
            let (Principal { name, certificates: None, .. }, key) = (principal, principal.key?) else {
                return None;
            };
            let replaced = self.principals().find(&key) != Some(name);
            replaced.then(|| format!("{name} has joined this server again, with another key"))
        })
    }

    /// Why what a principal has may not go on, if so: its access or its certificate was revoked. Sessions and
    /// leases that began with an earlier key of a name that is still known go on.
    pub(super) fn revoked(&self, principal: &Principal) -> Option<String> {
        let Principal { name, key: Some(_), certificates } = principal else { return None };
        let Some(certificates) = certificates else {
            let known = self.principals().clients().iter().any(|client| client.name == *name);
            return (!known).then(|| format!("the access of {name} to this server was revoked"));
        };
        let files = self.files();
        let Some(authority) = &files.authority else {
            return Some(format!("this server trusts no authority any more, and so not {name}"));
        };
        let why = authority.principal(certificates, UnixTime::now()).err()?;
        Some(format!("the certificate of {name} does not count any more: {why}"))
    }

    /// Redeems a token for the key in these certificates. Returns the client, and the key that it replaces if
    /// its name had another one.
    pub(super) fn join(
        &self,
        certificates: &[CertificateDer<'_>],
        secret: &[u8; 32],
    ) -> Result<(Principal, Option<Fingerprint>), String> {
        let key = key(certificates)?;
        let (joined, before) = self.change(|all| {
            let before = all.clients().to_vec();
            (all.join(&Secret(*secret), key, now()), before)
        });
        let name = joined.map_err(|e| match e {
            JoinError::File(e) => {
                tracing::error!("cannot store a client's key: {}", host_bridge::framing::with_causes(&e));
                "the server cannot store this client's key; its log says why".to_owned()
            }
            e => e.to_string(),
        })?;
        let replaced = before.into_iter().find(|client| client.name == name && client.key != key);
        let who = Principal { name, key: Some(key), certificates: None };
        Ok((who, replaced.map(|client| client.key)))
    }

    /// Issues a token.
    pub(super) fn enroll(&self, name: &str, valid: Duration) -> Result<Secret, EnrollError> {
        self.change(|all| all.enroll(name, now(), valid))
    }

    /// Removes a client. Returns false if there is none with this name.
    pub(super) fn revoke(&self, name: &str) -> Result<bool, FileError> {
        self.change(|all| all.revoke(name))
    }
}

fn key(certificates: &[CertificateDer<'_>]) -> Result<Fingerprint, String> {
    let certificate = certificates.first().ok_or("the client has shown no certificate")?;
    Fingerprint::of(certificate).map_err(|e| format!("the client's certificate cannot be read: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_about_clients_does_not_wait_for_the_disk_that_writes_their_list() {
        let folder = tempfile::tempdir().unwrap();
        let flag = format!("--identity={}", folder.path().display());
        let trust = Trust::open(&Serve::from_flags(&[&flag])).unwrap();
        let known = |name: &str| trust.principals().clients().iter().any(|client| client.name == name);
        let secret = trust.enroll("host", Duration::from_secs(60)).unwrap();
        let key = Fingerprint([7; 32]);
        trust.change(|all| all.join(&secret, key, now())).unwrap();
        let host = Principal { key: Some(key), ..Principal::named("host") };
        trust.change(|all| {
            all.revoke("host").unwrap();
            // It is not written yet, as far as others can tell.
            assert!(known("host") && trust.doubt(&host).is_none());
        });
        assert!(!known("host") && trust.doubt(&host).is_some());
    }

    #[test]
    fn an_address_has_one_name_whatever_kind_of_socket_reports_it() {
        for (peer, name) in [
            ("10.0.0.9:4711", "insecure:10.0.0.9"),
            ("[::ffff:10.0.0.9]:4711", "insecure:10.0.0.9"),
            ("[fd00::7]:4711", "insecure:fd00::7"),
            ("[fe80::1%3]:4711", "insecure:fe80::1"),
        ] {
            assert_eq!(Principal::of_address(peer).name, name);
            // As earlier versions called it.
            let (host, _) = peer.rsplit_once(':').unwrap();
            let saved = SavedPrincipal { name: format!("insecure:{host}"), key: None, certificates: None };
            assert!(host.contains('%') || saved.restore().name == name, "{host}");
        }
    }
}
