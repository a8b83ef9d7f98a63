//! A private key with its certificate.

use std::path::Path;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::{CertifiedKey, SigningKey};
use thiserror::Error;

use crate::authority::CERTIFICATE_FILE;
use crate::files::{self, FileError};
use crate::fingerprint::Fingerprint;

/// The file of a key, in the identity folder.
pub const KEY_FILE: &str = "key.pem";

/// Why there is no identity.
#[derive(Debug, Error)]
pub enum KeyError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// A key could not be generated.
    #[error("cannot generate a key")]
    Make(#[source] rcgen::Error),
    /// A key cannot be used.
    #[error("cannot use a key")]
    Use(#[source] rustls::Error),
}

/// A private key and its certificate: a self-signed one, which a peer can only trust by a pin, or one of a
/// certification authority.
#[derive(Debug, Clone)]
pub struct Identity {
    pub(crate) certified: Arc<CertifiedKey>,
    fingerprint: Fingerprint,
}

impl Identity {
    /// Generates a key that exists only in memory.
    pub fn generate() -> Result<Identity, KeyError> {
        Identity::from_pair(&KeyPair::generate().map_err(KeyError::Make)?)
    }

    /// Reads the key in `folder`, and its certificate if there is one. `None`: there is no key.
    pub fn load(folder: &Path) -> Result<Option<Identity>, KeyError> {
        let (path, certificate) = (folder.join(KEY_FILE), folder.join(CERTIFICATE_FILE));
        if certificate.exists() {
            return Identity::from_files(&certificate, &path).map(Some);
        }
        let Some(pem) = files::read_secret(&path)? else { return Ok(None) };
        let wrong = |text: String| FileError::content(&path, text);
        let text = String::from_utf8(pem).map_err(|_| wrong("is not a private key in PEM".into()))?;
        let pair = KeyPair::from_pem(&text).map_err(|e| wrong(format!("is not a private key: {e}")))?;
        Identity::from_pair(&pair).map(Some)
    }

    /// Reads the key in `folder`, or generates one (mode 0600) if there is none.
    pub fn load_or_create(folder: &Path) -> Result<Identity, KeyError> {
        if let Some(identity) = Identity::load(folder)? {
            return Ok(identity);
        }
        files::create_folder(folder)?;
        let pair = KeyPair::generate().map_err(KeyError::Make)?;
        if files::create(&folder.join(KEY_FILE), pair.serialize_pem().as_bytes())? {
            return Identity::from_pair(&pair);
        }
        let gone = || FileError::content(&folder.join(KEY_FILE), "was removed while it was read");
        Identity::load(folder)?.ok_or_else(|| gone().into())
    }

    /// Reads a certificate with its intermediate certificates, and its private key, both in PEM.
    pub fn from_files(certificate: &Path, key: &Path) -> Result<Identity, KeyError> {
        let missing = |path: &Path| FileError::content(path, "does not exist");
        let pem = files::read(certificate)?.ok_or_else(|| missing(certificate))?;
        let chain = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| FileError::content(certificate, format!("is not a certificate in PEM: {e}")))?;
        if chain.is_empty() {
            return Err(FileError::content(certificate, "contains no certificate in PEM").into());
        }
        let pem = files::read_secret(key)?.ok_or_else(|| missing(key))?;
        let private = PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|e| FileError::content(key, format!("is not a private key in PEM: {e}")))?;
        Identity::new(chain, &private).map_err(|e| match e {
            KeyError::Use(e) => {
                let text = format!("cannot be used with the key {}: {e}", key.display());
                FileError::content(certificate, text).into()
            }
            e => e,
        })
    }

    fn from_pair(pair: &KeyPair) -> Result<Identity, KeyError> {
        // A peer that trusts this certificate trusts its key; the other fields are not used.
        let certificate = CertificateParams::new(vec!["rgpu".to_owned()])
            .and_then(|params| params.self_signed(pair))
            .map_err(KeyError::Make)?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialize_der()));
        Identity::new(vec![certificate.der().clone()], &private)
    }

    fn new(chain: Vec<CertificateDer<'static>>, key: &PrivateKeyDer<'_>) -> Result<Identity, KeyError> {
        let fingerprint = Fingerprint::of(&chain[0]).map_err(KeyError::Use)?;
        let signing = any_supported_type(key).map_err(KeyError::Use)?;
        let certified = CertifiedKey::new(chain, signing);
        certified.keys_match().map_err(KeyError::Use)?;
        Ok(Identity { certified: Arc::new(certified), fingerprint })
    }

    /// A key whose signatures another process makes.
    pub(crate) fn of_signer(
        chain: Vec<CertificateDer<'static>>,
        signer: Arc<dyn SigningKey>,
    ) -> Result<Identity, KeyError> {
        let own = chain.first().ok_or(KeyError::Use(rustls::Error::NoCertificatesPresented))?;
        let fingerprint = Fingerprint::of(own).map_err(KeyError::Use)?;
        Ok(Identity { certified: Arc::new(CertifiedKey::new(chain, signer)), fingerprint })
    }

    /// The fingerprint of its public key.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_read_after_that() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("identity");
        assert!(Identity::load(&folder).unwrap().is_none());
        let made = Identity::load_or_create(&folder).unwrap();
        let mode = std::fs::metadata(folder.join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(Identity::load_or_create(&folder).unwrap().fingerprint(), made.fingerprint());
        assert_ne!(Identity::generate().unwrap().fingerprint(), made.fingerprint());
    }

    #[test]
    fn a_damaged_key_is_an_error_and_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KEY_FILE);
        files::create(&path, b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n").unwrap();
        let error = Identity::load_or_create(folder.path()).unwrap_err().to_string();
        assert!(error.contains("key.pem: is not a private key"), "{error}");
    }
}
