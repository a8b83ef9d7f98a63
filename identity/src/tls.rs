//! rustls configurations: only TLS 1.3, with a certificate on both sides, without resumption and without
//! early data. So nothing can be replayed.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::fingerprint::Fingerprint;
use crate::key::Identity;

/// The suffix of a session's name, after its id, in the clear part of a TLS hello.
const SESSION_DOMAIN: &str = ".session.rgpu";

/// AES-128 comes first: here it is as safe as the others, and faster.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            TLS13_AES_128_GCM_SHA256,
            TLS13_AES_256_GCM_SHA384,
            TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..rustls::crypto::ring::default_provider()
    })
});

/// The cryptography of every connection.
pub(crate) fn provider() -> &'static Arc<CryptoProvider> {
    &PROVIDER
}

/// The server name with which a client opens a session's connections. Everyone on the network can see it, but
/// it is useless without the session's secret and the client's key.
pub fn session_name(session: &[u8; 16]) -> ServerName<'static> {
    let digits: String = session.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("{digits}{SESSION_DOMAIN}");
    match ServerName::try_from(name) {
        Ok(name) => name,
        Err(_) => unreachable!("hexadecimal digits and letters are a name"),
    }
}

/// The session to which a server name in a TLS hello refers, if any.
pub fn session_of(name: &str) -> Option<[u8; 16]> {
    let digits = name.strip_suffix(SESSION_DOMAIN)?;
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut session = [0; 16];
    for (at, byte) in session.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(session)
}

/// For a client that trusts only servers with one of these keys.
pub fn client_pinning(identity: &Identity, servers: &[Fingerprint]) -> Result<Arc<ClientConfig>, Error> {
    client(identity, servers, None)
}

/// For a client that trusts servers with one of these keys, and the server that an authority's certificate
/// names.
pub(crate) fn client(
    identity: &Identity,
    servers: &[Fingerprint],
    named: Option<Named>,
) -> Result<Arc<ClientConfig>, Error> {
    let verifier = Arc::new(Trusted { pinned: Pinned(servers.to_vec()), named });
    let certified = SingleCertAndKey::from(Arc::clone(&identity.certified));
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider()))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(certified));
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

/// For a server that accepts only the client with this key.
pub fn server_pinning(identity: &Identity, client: Fingerprint) -> Result<Arc<ServerConfig>, Error> {
    server(identity, Arc::new(Pinned(vec![client])))
}

/// For a server that accepts every client that has the key of its certificate. Who the client is, and whether
/// it may do anything, is decided after the handshake, so that a refused client can be told why.
pub fn server_for_anyone(identity: &Identity) -> Result<Arc<ServerConfig>, Error> {
    server(identity, Arc::new(AnyKey))
}

fn server(identity: &Identity, verifier: Arc<dyn ClientCertVerifier>) -> Result<Arc<ServerConfig>, Error> {
    let certified = SingleCertAndKey::from(Arc::clone(&identity.certified));
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(certified));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

/// The methods of a verifier that check whether the peer has its certificate's key. Only TLS 1.3 is used.
macro_rules! tls13_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(CertificateError::BadSignature.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(
                message,
                certificate,
                signed,
                &provider().signature_verification_algorithms,
            )
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            provider().signature_verification_algorithms.supported_schemes()
        }
    };
}

/// Trusts these keys and ignores the rest of the certificate. The peer's signature proves that it has the
/// key.
#[derive(Debug)]
struct Pinned(Vec<Fingerprint>);

impl Pinned {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let key = Fingerprint::of(certificate)?;
        if self.0.iter().any(|pinned| key.matches(pinned)) {
            return Ok(());
        }
        let pinned: Vec<_> = self.0.iter().map(Fingerprint::to_string).collect();
        Err(Error::General(format!("the peer has the key {key}, and {} is pinned", pinned.join(" or "))))
    }
}

/// A server named by an authority's certificate, whatever server name a connection uses.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    pub(crate) verifier: Arc<WebPkiServerVerifier>,
    pub(crate) name: ServerName<'static>,
}

/// What a client trusts.
#[derive(Debug)]
struct Trusted {
    pinned: Pinned,
    named: Option<Named>,
}

/// Trusts every key that the peer proves to have.
#[derive(Debug)]
struct AnyKey;

impl ServerCertVerifier for Trusted {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match (self.pinned.check(certificate), &self.named) {
            (Ok(()), _) => Ok(ServerCertVerified::assertion()),
            (Err(_), Some(Named { verifier, name })) => {
                verifier.verify_server_cert(certificate, intermediates, name, ocsp, now)
            }
            (Err(e), None) => Err(e),
        }
    }

    tls13_signatures!();
}

macro_rules! client_verifier {
    ($type:ty, |$self:ident, $certificate:ident| $check:expr) => {
        impl ClientCertVerifier for $type {
            fn root_hint_subjects(&self) -> &[DistinguishedName] {
                &[]
            }

            fn verify_client_cert(
                &$self,
                $certificate: &CertificateDer<'_>,
                _intermediates: &[CertificateDer<'_>],
                _now: UnixTime,
            ) -> Result<ClientCertVerified, Error> {
                $check.map(|_| ClientCertVerified::assertion())
            }

            tls13_signatures!();
        }
    };
}

client_verifier!(Pinned, |self, certificate| self.check(certificate));
client_verifier!(AnyKey, |self, certificate| Fingerprint::of(certificate));

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sessions_name_reads_back(session in any::<[u8; 16]>()) {
            let name = session_name(&session);
            prop_assert_eq!(session_of(&name.to_str()), Some(session));
        }

        #[test]
        fn other_names_mean_no_session(name in "\\PC{0,60}") {
            prop_assert_eq!(session_of(&name), None);
            let is_id = name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
            prop_assert_eq!(session_of(&(name + SESSION_DOMAIN)).is_some(), is_id);
        }
    }
}
