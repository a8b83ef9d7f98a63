//! Certificates of an operator's own certification authority, which prove the names of servers and clients.
//!
//! An identity folder may contain, besides `key.pem`:
//!
//! - `certificate.pem`: the certificate of that key, followed by its intermediate certificates;
//! - `authority.pem`: the certificates of the trusted authorities;
//! - `revoked.pem`: their lists of revoked certificates.
//!
//! All are in PEM. A client reads them whenever it needs them, a server at its start and on SIGHUP.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, Error, RootCertStore};

use crate::files::{self, FileError};
use crate::tls::provider;

/// The file of a key's certificate, in the identity folder.
pub const CERTIFICATE_FILE: &str = "certificate.pem";
/// The file of the authorities' certificates.
pub const AUTHORITY_FILE: &str = "authority.pem";
/// The file of the authorities' lists of revoked certificates.
pub const REVOKED_FILE: &str = "revoked.pem";

/// Prefix of a principal whose name comes from a certificate. No name of an enrolled client contains a `:`.
const PREFIX: &str = "cert:";
/// Maximum characters of such a name.
const MAX_NAME: usize = 200;

/// The trusted authorities.
#[derive(Debug)]
pub struct Authority {
    pub(crate) roots: Vec<CertificateDer<'static>>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
    clients: Arc<dyn ClientCertVerifier>,
    pub(crate) servers: Arc<WebPkiServerVerifier>,
}

fn read<T: PemObject>(path: &Path, what: &str) -> Result<Option<Vec<T>>, FileError> {
    let Some(pem) = files::read(path)? else { return Ok(None) };
    let all = T::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let all = all.map_err(|e| FileError::content(path, format!("is no {what} in PEM: {e}")))?;
    if all.is_empty() {
        return Err(FileError::content(path, format!("contains no {what} in PEM")));
    }
    Ok(Some(all))
}

impl Authority {
    /// Reads the authorities in `folder`. `None`: no authority is trusted.
    pub fn load(folder: &Path) -> Result<Option<Authority>, FileError> {
        let (path, list) = (folder.join(AUTHORITY_FILE), folder.join(REVOKED_FILE));
        let revoked = read(&list, "list of revoked certificates")?;
        let Some(roots) = read(&path, "certificate")? else {
            return match revoked {
                Some(_) => Err(FileError::content(&list, format!("is of no use without {}", path.display()))),
                None => Ok(None),
            };
        };
        let wrong = |e| FileError::content(&path, format!("cannot be used: {e}"));
        Authority::new(roots, revoked.unwrap_or_default()).map(Some).map_err(wrong)
    }

    /// Trusts certificates that the authorities in `roots` signed, except revoked ones. If there are lists,
    /// each certificate's authority must have one.
    pub(crate) fn new(
        roots: Vec<CertificateDer<'static>>,
        revoked: Vec<CertificateRevocationListDer<'static>>,
    ) -> Result<Authority, Error> {
        let mut store = RootCertStore::empty();
        roots.iter().try_for_each(|root| store.add(root.clone()))?;
        let store = Arc::new(store);
        let unusable = |e| Error::General(format!("{e}"));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&store), Arc::clone(provider()))
            .with_crls(revoked.iter().cloned())
            .build()
            .map_err(unusable)?;
        let servers = WebPkiServerVerifier::builder_with_provider(store, Arc::clone(provider()))
            .with_crls(revoked.iter().cloned())
            .build()
            .map_err(unusable)?;
        Ok(Authority { roots, revoked, clients, servers })
    }

    /// The principal to whom these certificates belong. The client must have proved that it has the first
    /// certificate's key. The error says why the certificates are not accepted.
    pub fn principal(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<String, String> {
        let (own, between) = chain.split_first().ok_or("there is no certificate")?;
        self.clients.verify_client_cert(own, between, now).map_err(|e| describe(&e))?;
        name_of(own)
    }
}

/// Why a certificate is not accepted.
fn describe(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::Revoked) => "it was revoked".into(),
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            format!("no authority in the server's {AUTHORITY_FILE} has signed it")
        }
        Error::InvalidCertificate(CertificateError::UnknownRevocationStatus) => {
            format!("the server's {REVOKED_FILE} has no list of its authority")
        }
        other => other.to_string(),
    }
}

/// The name in a certificate: its first DNS name, or its first URI if it has no DNS name.
fn name_of(certificate: &CertificateDer<'_>) -> Result<String, String> {
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|e| e.to_string())?;
    let name = parsed.valid_dns_names().next().or_else(|| parsed.valid_uri_names().next());
    let name = name.ok_or("it contains no DNS name and no URI (subjectAltName)")?;
    if name.len() > MAX_NAME || !name.chars().all(|c| c.is_ascii_graphic()) {
        return Err(format!("its name is longer than {MAX_NAME} characters, or contains others than ASCII"));
    }
    Ok(format!("{PREFIX}{name}"))
}

/// Checks a principal's name that comes from a certificate.
pub fn is_certified_name(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|name| {
        !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(|c| c.is_ascii_graphic())
    })
}
