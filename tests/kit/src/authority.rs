//! A certification authority of an operator.

use std::cell::Cell;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
    date_time_ymd,
};

/// What a certificate may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The proof of a client.
    Client,
    /// The proof of a server.
    Server,
}

/// An authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    serial: Cell<u64>,
}

/// A certificate with its key, both in PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
    serial: u64,
}

impl Authority {
    /// One of this name.
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Authority { issuer, serial: Cell::new(1) }
    }

    /// Its certificate in PEM.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues a certificate for a new key.
    pub fn issue(&self, name: &str, usage: Use) -> Issued {
        self.issue_until(name, usage, 2100)
    }

    /// Issues one that is valid until a year begins.
    pub fn issue_until(&self, name: &str, usage: Use, year: i32) -> Issued {
        let serial = self.serial.replace(self.serial.get() + 1);
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(year, 1, 1));
        params.extended_key_usages = vec![match usage {
            Use::Client => ExtendedKeyUsagePurpose::ClientAuth,
            Use::Server => ExtendedKeyUsagePurpose::ServerAuth,
        }];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Issued { certificate, key: key.serialize_pem(), serial }
    }

    /// A list with these certificates, in PEM.
    pub fn revoked(&self, all: &[&Issued]) -> String {
        let revoked = |issued: &&Issued| RevokedCertParams {
            serial_number: SerialNumber::from(issued.serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: all.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

impl Issued {
    /// Puts both into an identity folder, in place of those that are there.
    pub fn put(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        for (name, text) in [("certificate.pem", &self.certificate), ("key.pem", &self.key)] {
            // A file that was there may have another mode.
            let _ = std::fs::remove_file(folder.join(name));
            let mut file = std::fs::OpenOptions::new();
            let mut file = file.write(true).create_new(true).mode(0o600).open(folder.join(name)).unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        }
    }
}
