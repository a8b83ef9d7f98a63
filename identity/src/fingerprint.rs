//! Fingerprints, which are the names of keys.

use std::fmt;
use std::str::FromStr;

use ring::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use rustls::server::ParsedCertificate;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// The SHA-256 of a public key (its SubjectPublicKeyInfo, RFC 5280), written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint(pub [u8; 32]);

/// A text is not a fingerprint.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not the fingerprint of a key, which has 64 hexadecimal digits")]
pub struct FingerprintError(String);

impl Fingerprint {
    /// The fingerprint of the key in a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Fingerprint, rustls::Error> {
        let key = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
        Ok(Fingerprint::hash(&key))
    }

    /// The SHA-256 of some bytes.
    pub(crate) fn hash(bytes: &[u8]) -> Fingerprint {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Fingerprint(hash)
    }

    /// Compares both, in a time that does not depend on where they differ.
    pub fn matches(&self, other: &Fingerprint) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Fingerprint, FingerprintError> {
        let wrong = || FingerprintError(text.chars().take(80).collect());
        let mut hash = [0; 32];
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Fingerprint(hash))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = FingerprintError;

    fn try_from(text: String) -> Result<Fingerprint, FingerprintError> {
        text.parse()
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> String {
        fingerprint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_fingerprint_reads_back_as_written(hash in any::<[u8; 32]>()) {
            let text = Fingerprint(hash).to_string();
            prop_assert_eq!(text.parse::<Fingerprint>().unwrap(), Fingerprint(hash));
        }

        #[test]
        fn any_other_text_is_refused(text in ".{0,80}") {
            prop_assume!(text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()));
            prop_assert!(text.parse::<Fingerprint>().is_err());
        }
    }
}
