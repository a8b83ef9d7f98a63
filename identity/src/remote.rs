//! A client's key in another process: the process that runs [`serve`] has it, and a process with a [`Remote`]
//! uses it.
//!
//! `vhost-rgpu` separates its guests and users from one another with device processes, none of which may have
//! the host's key. So the keeper has the key: a device process asks it for a signature during a TLS
//! handshake, and gets signatures only for that purpose. An attacker in a device process can act for the host
//! while the process runs, but not afterwards.
//!
//! Both processes talk over a connected pair of stream sockets, with a line of JSON for each question and
//! each answer.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{Error, SignatureAlgorithm, SignatureScheme};
use serde::{Deserialize, Serialize};

use crate::authority::Authority;
use crate::fingerprint::Fingerprint;
use crate::key::Identity;
use crate::servers::{Credentials, CredentialsError, Source, Trust};

/// Maximum bytes of a question. The message to sign has about 150 bytes.
const MAX_QUESTION: u64 = 4096;
/// Maximum bytes of an answer. Certificates have a few kilobytes, and lists of revoked certificates at most
/// some megabytes.
const MAX_ANSWER: u64 = 64 << 20;

/// The only purpose for which the key signs: a TLS 1.3 client's proof that it has the key (RFC 8446, section
/// 4.4.3). A hash follows.
const PURPOSE: &[u8] = b"TLS 1.3, client CertificateVerify\0";
/// Number of spaces before it.
const SPACES: usize = 64;
/// Maximum bytes of the hash.
const MAX_HASH: usize = 64;

/// Signature schemes of TLS 1.3, the preferred ones first.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Question {
    /// Asks for the public part of the credentials.
    Credentials,
    /// Asks for a signature with the key of credentials that were asked for before.
    Sign { key: Fingerprint, scheme: u16, message: String },
}

/// The public part of a client's credentials.
#[derive(Serialize, Deserialize)]
struct Public {
    /// Certificates, the client's own first.
    chain: Vec<String>,
    algorithm: u8,
    schemes: Vec<u16>,
    server: PublicTrust,
}

/// How the client recognizes the server.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PublicTrust {
    Pinned(Fingerprint),
    Certified { roots: Vec<String>, revoked: Vec<String>, name: String },
}

type Answer<T> = Result<T, String>;

/// Reads a line of at most `most` bytes. `None`: the other end is closed.
fn read_line(from: &mut impl BufRead, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    from.take(most).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a line that is cut or too long")),
    }
}

fn write_line(to: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    (&mut &*to).write_all(&line)
}

/// Whether a message is a TLS client's proof, and nothing for which the key could be misused.
fn is_clients_proof(message: &[u8]) -> bool {
    let Some((spaces, rest)) = message.split_at_checked(SPACES) else { return false };
    let Some(hash) = rest.strip_prefix(PURPOSE) else { return false };
    spaces.iter().all(|byte| *byte == b' ') && (32..=MAX_HASH).contains(&hash.len())
}

/// Answers a process's questions about the credentials of `source` for the server at `address`, until the
/// other end closes or sends something else. A session continues with the key with which it began, even if
/// the source has another one by then.
pub fn serve(socket: &UnixStream, source: &dyn Source, address: &str) -> io::Result<()> {
    let mut from = BufReader::new(socket);
    let mut keys = HashMap::new();
    while let Some(line) = read_line(&mut from, MAX_QUESTION)? {
        match serde_json::from_slice(&line)? {
            Question::Credentials => {
                let credentials = source.credentials(address).inspect(|all| {
                    keys.insert(all.identity().fingerprint(), Arc::clone(&all.identity().certified));
                });
                write_line(socket, &credentials.map(|all| public(&all)).map_err(|e| with_causes(&e)))?;
            }
            Question::Sign { key, scheme, message } => {
                let signature = STANDARD
                    .decode(message)
                    .map_err(|e| e.to_string())
                    .and_then(|message| sign(keys.get(&key), SignatureScheme::from(scheme), &message))
                    .map(|signature| STANDARD.encode(signature));
                write_line(socket, &signature)?;
            }
        }
    }
    Ok(())
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn public(credentials: &Credentials) -> Public {
    let key = &credentials.identity().certified;
    let can = |scheme: &SignatureScheme| key.key.choose_scheme(&[*scheme]).is_some();
    Public {
        chain: key.cert.iter().map(|certificate| STANDARD.encode(certificate)).collect(),
        algorithm: key.key.algorithm().into(),
        schemes: SCHEMES.into_iter().filter(can).map(u16::from).collect(),
        server: public_trust(&credentials.trust),
    }
}

fn public_trust(trust: &Trust) -> PublicTrust {
    match trust {
        Trust::Pinned(key) => PublicTrust::Pinned(*key),
        Trust::Certified(authority, name) => PublicTrust::Certified {
            roots: authority.roots.iter().map(|root| STANDARD.encode(root)).collect(),
            revoked: authority.revoked.iter().map(|list| STANDARD.encode(list)).collect(),
            name: name.to_str().into_owned(),
        },
    }
}

/// Binary data of an answer.
fn decode<T: From<Vec<u8>>>(all: &[String]) -> Result<Vec<T>, CredentialsError> {
    let decoded = all.iter().map(|text| STANDARD.decode(text).map(T::from)).collect::<Result<_, _>>();
    decoded.map_err(|e| CredentialsError::Remote(e.to_string()))
}

fn sign(key: Option<&Arc<CertifiedKey>>, scheme: SignatureScheme, message: &[u8]) -> Answer<Vec<u8>> {
    let key = key.ok_or("nobody has asked for credentials with this key")?;
    if !is_clients_proof(message) {
        return Err("this key signs the proofs of a TLS client only".into());
    }
    let signer = key.key.choose_scheme(&[scheme]);
    let signer = signer.ok_or_else(|| format!("this key makes no signatures of the scheme {scheme:?}"))?;
    signer.sign(message).map_err(|e| e.to_string())
}

/// Credentials whose key is in another process.
#[derive(Debug)]
pub struct Remote {
    socket: Mutex<BufReader<UnixStream>>,
    ended: fn(),
}

impl Remote {
    /// Uses the key of the process at the other end of this socket. If that process has ended, `ended` is
    /// called before a question fails for it.
    pub fn new(socket: UnixStream, ended: fn()) -> Arc<Remote> {
        Arc::new(Remote { socket: Mutex::new(BufReader::new(socket)), ended })
    }

    fn ask<T: for<'a> Deserialize<'a>>(&self, question: &Question) -> io::Result<Answer<T>> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = write_line(socket.get_ref(), question).and_then(|()| read_line(&mut *socket, MAX_ANSWER));
        let answer = asked.and_then(|line| line.ok_or_else(|| UnexpectedEof.into()));
        let line = answer.inspect_err(|e| {
            if matches!(e.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
                (self.ended)();
            }
        })?;
        Ok(serde_json::from_slice(&line)?)
    }

    fn sign(&self, key: Fingerprint, scheme: SignatureScheme, message: &[u8]) -> io::Result<Vec<u8>> {
        let question = Question::Sign { key, scheme: scheme.into(), message: STANDARD.encode(message) };
        let signature: String = self.ask(&question)?.map_err(io::Error::other)?;
        STANDARD.decode(signature).map_err(io::Error::other)
    }
}

/// A [`Remote`] as the source of credentials. The keys that it returns share it.
impl Source for Arc<Remote> {
    fn credentials(&self, _address: &str) -> Result<Credentials, CredentialsError> {
        let failed = |e: io::Error| CredentialsError::Remote(e.to_string());
        let public: Public =
            self.ask(&Question::Credentials).map_err(failed)?.map_err(CredentialsError::Remote)?;
        let chain: Vec<CertificateDer<'static>> = decode(&public.chain)?;
        let own = chain.first().ok_or_else(|| failed(io::Error::other("no certificate")))?;
        let key = RemoteKey {
            remote: Arc::clone(self),
            fingerprint: Fingerprint::of(own)?,
            algorithm: public.algorithm.into(),
            schemes: public.schemes.into_iter().map(SignatureScheme::from).collect(),
        };
        let identity = Identity::of_signer(chain, Arc::new(key))?;
        match public.server {
            PublicTrust::Pinned(key) => Credentials::pinning(identity, key),
            PublicTrust::Certified { roots, revoked, name } => {
                let authority = Authority::new(decode(&roots)?, decode(&revoked)?)?;
                let wrong = |_| CredentialsError::Name(name.clone());
                let name = ServerName::try_from(name.clone()).map_err(wrong)?;
                Credentials::certified(identity, authority, name)
            }
        }
    }
}

/// A key in another process.
#[derive(Debug)]
struct RemoteKey {
    remote: Arc<Remote>,
    fingerprint: Fingerprint,
    algorithm: SignatureAlgorithm,
    schemes: Vec<SignatureScheme>,
}

impl SigningKey for RemoteKey {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let scheme = *self.schemes.iter().find(|scheme| offered.contains(scheme))?;
        Some(Box::new(RemoteSigner { remote: Arc::clone(&self.remote), key: self.fingerprint, scheme }))
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        self.algorithm
    }
}

#[derive(Debug)]
struct RemoteSigner {
    remote: Arc<Remote>,
    key: Fingerprint,
    scheme: SignatureScheme,
}

impl Signer for RemoteSigner {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        self.remote
            .sign(self.key, self.scheme, message)
            .map_err(|e| Error::General(format!("no signature: {e}")))
    }

    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::{self, ClientFiles};

    const ADDRESS: &str = "tcp:gpu:9700";

    /// A folder with a key that has joined a server, and a process that uses the key.
    fn joined() -> (tempfile::TempDir, Arc<Remote>, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        Identity::load_or_create(folder.path()).unwrap();
        servers::add(folder.path(), &[ADDRESS.into()], Fingerprint([9; 32]), "me").unwrap();
        let (remote, raw) = keeping(folder.path());
        (folder, remote, raw)
    }

    fn keeping(folder: &std::path::Path) -> (Arc<Remote>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let files = ClientFiles { folder: folder.to_owned() };
        std::thread::spawn(move || serve(&theirs, &files, ADDRESS));
        let raw = ours.try_clone().unwrap();
        (Remote::new(ours, || ()), raw)
    }

    #[test]
    fn the_end_of_the_process_with_the_key_is_told_before_a_question_fails() {
        use std::sync::atomic::{AtomicU32, Ordering};
        static ENDED: AtomicU32 = AtomicU32::new(0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let remote = Remote::new(ours, || {
            ENDED.fetch_add(1, Ordering::SeqCst);
        });
        let end = std::thread::spawn(move || {
            // In the middle of a question.
            read_line(&mut BufReader::new(&theirs), MAX_QUESTION).unwrap().unwrap();
        });
        assert!(remote.credentials(ADDRESS).is_err());
        assert_eq!(ENDED.load(Ordering::SeqCst), 1);
        end.join().unwrap();
        assert!(remote.credentials(ADDRESS).is_err());
        assert_eq!(ENDED.load(Ordering::SeqCst), 2);
    }

    fn proof() -> Vec<u8> {
        [&[b' '; SPACES][..], PURPOSE, &[7; 32]].concat()
    }

    #[test]
    fn the_asking_process_trusts_the_same_authority_as_the_one_with_the_key() {
        use test_kit::authority::{Authority, Use};
        let (folder, ours) = (tempfile::tempdir().unwrap(), Authority::new("ours"));
        ours.issue("host1", Use::Client).put(folder.path());
        std::fs::write(folder.path().join("authority.pem"), ours.pem()).unwrap();
        std::fs::write(folder.path().join("revoked.pem"), ours.revoked(&[])).unwrap();
        let own = ClientFiles { folder: folder.path().to_owned() }.credentials(ADDRESS).unwrap();
        let (remote, _raw) = keeping(folder.path());
        let asked = remote.credentials(ADDRESS).unwrap();
        let (Trust::Certified(one, name), Trust::Certified(other, other_name)) = (&own.trust, &asked.trust)
        else {
            panic!("a key is pinned");
        };
        assert_eq!((&one.roots, &one.revoked, name), (&other.roots, &other.revoked, other_name));
        assert_eq!(asked.identity().certified.cert, own.identity().certified.cert);
    }

    #[test]
    fn another_process_gets_signatures_but_never_the_key() {
        let (folder, remote, _) = joined();
        let own = ClientFiles { folder: folder.path().to_owned() }.identity().unwrap();
        let credentials = remote.credentials(ADDRESS).unwrap();
        assert_eq!(credentials.identity().fingerprint(), own.fingerprint());
        assert!(matches!(credentials.trust, Trust::Pinned(key) if key == Fingerprint([9; 32])));
        let key = &credentials.identity().certified.key;
        let signer = key.choose_scheme(&SCHEMES).unwrap();
        assert!(signer.sign(&proof()).unwrap().len() > 32);
        assert!(key.choose_scheme(&[SignatureScheme::RSA_PKCS1_SHA1]).is_none());
    }

    #[test]
    fn a_key_signs_nothing_but_a_clients_proof() {
        let (_folder, remote, _) = joined();
        let key = remote.credentials(ADDRESS).unwrap().identity().fingerprint();
        let server = String::from_utf8(proof()).unwrap().replace("client", "server").into_bytes();
        let long = [proof(), vec![7; 100]].concat();
        for message in [b"a certificate".to_vec(), Vec::new(), server, long, proof()[1..].to_vec()] {
            let refusal = remote.sign(key, SignatureScheme::ECDSA_NISTP256_SHA256, &message).unwrap_err();
            assert!(refusal.to_string().contains("proofs of a TLS client only"), "{refusal}");
        }
        let refusal = remote.sign(key, SignatureScheme::RSA_PSS_SHA256, &proof()).unwrap_err().to_string();
        assert!(refusal.contains("makes no signatures"), "{refusal}");
        let other = Fingerprint([1; 32]);
        assert!(remote.sign(other, SignatureScheme::ECDSA_NISTP256_SHA256, &proof()).is_err());
        assert!(remote.sign(key, SignatureScheme::ECDSA_NISTP256_SHA256, &proof()).is_ok());
    }

    #[test]
    fn a_session_keeps_its_first_key() {
        let (folder, remote, _) = joined();
        let before = remote.credentials(ADDRESS).unwrap();
        std::fs::remove_file(folder.path().join(crate::key::KEY_FILE)).unwrap();
        let new = Identity::load_or_create(folder.path()).unwrap();
        let after = remote.credentials(ADDRESS).unwrap();
        assert_eq!(after.identity().fingerprint(), new.fingerprint());
        assert_ne!(before.identity().fingerprint(), new.fingerprint());
        for credentials in [before, after] {
            let signer = credentials.identity().certified.key.choose_scheme(&SCHEMES).unwrap();
            assert!(signer.sign(&proof()).is_ok());
        }
    }

    #[test]
    fn missing_files_are_named_and_found_once_they_exist() {
        let folder = tempfile::tempdir().unwrap();
        let (remote, _) = keeping(folder.path());
        let error = remote.credentials(ADDRESS).unwrap_err().to_string();
        assert!(error.contains("has no key") && error.contains("rgpuctl join"), "{error}");
        Identity::load_or_create(folder.path()).unwrap();
        let error = remote.credentials(ADDRESS).unwrap_err().to_string();
        assert!(error.contains("no key is pinned for tcp:gpu:9700"), "{error}");
        servers::add(folder.path(), &[ADDRESS.into()], Fingerprint([9; 32]), "me").unwrap();
        assert!(remote.credentials(ADDRESS).is_ok());
    }

    #[test]
    fn an_invalid_question_ends_the_connection() {
        for nonsense in
            [&b"{}\n"[..], b"\xff\n", &[b'x'; 10_000], b"{\"sign\": {\"scheme\": 1, \"message\": 2}}\n"]
        {
            let (_folder, remote, raw) = joined();
            (&raw).write_all(nonsense).unwrap();
            assert!(remote.credentials(ADDRESS).is_err());
        }
    }
}
