//! Which certificates of an authority are accepted, and whom they name.

#![allow(clippy::unwrap_used)]

use rgpu_identity::Authority;
use rgpu_identity::key::KeyError;
use rgpu_identity::{ClientFiles, Identity, Source};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use test_kit::authority::{Authority as Issuer, Issued, Use};

/// An identity folder that trusts an authority, and that judges certificates.
struct Server(tempfile::TempDir);

impl Server {
    fn of(authority: &Issuer) -> Server {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("authority.pem"), authority.pem()).unwrap();
        Server(folder)
    }

    fn revoked(&self, list: &str) {
        std::fs::write(self.0.path().join("revoked.pem"), list).unwrap();
    }

    fn says(&self, issued: &Issued) -> Result<String, String> {
        let chain = CertificateDer::pem_slice_iter(issued.certificate.as_bytes());
        let chain: Vec<_> = chain.collect::<Result<_, _>>().unwrap();
        Authority::load(self.0.path()).unwrap().unwrap().principal(&chain, UnixTime::now())
    }
}

#[test]
fn a_certificate_names_a_principal_if_the_authority_signed_it_for_a_client_and_it_is_valid() {
    let (ours, theirs) = (Issuer::new("ours"), Issuer::new("theirs"));
    let server = Server::of(&ours);
    assert_eq!(server.says(&ours.issue("host1.example", Use::Client)).unwrap(), "cert:host1.example");
    for (issued, words) in [
        (theirs.issue("host1.example", Use::Client), "no authority in the server's authority.pem"),
        (ours.issue_until("host1.example", Use::Client, 2010), "expired"),
        (ours.issue("host1.example", Use::Server), "not allow extended key usage for client"),
    ] {
        let why = server.says(&issued).unwrap_err();
        assert!(why.to_lowercase().contains(words), "{why}");
    }
}

#[test]
fn a_revoked_certificate_proves_nothing_and_without_a_list_of_its_authority_none_does() {
    let (ours, theirs) = (Issuer::new("ours"), Issuer::new("theirs"));
    let server = Server::of(&ours);
    let (kept, lost) = (ours.issue("kept", Use::Client), ours.issue("lost", Use::Client));
    server.revoked(&ours.revoked(&[&lost]));
    assert_eq!(server.says(&kept).unwrap(), "cert:kept");
    assert_eq!(server.says(&lost).unwrap_err(), "it was revoked");
    server.revoked(&theirs.revoked(&[]));
    let why = server.says(&kept).unwrap_err();
    assert!(why.contains("revoked.pem has no list"), "{why}");
}

#[test]
fn files_that_are_wrong_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, path) = (Issuer::new("ours"), |name: &str| folder.path().join(name));
    assert!(Authority::load(folder.path()).unwrap().is_none());
    std::fs::write(path("revoked.pem"), ours.revoked(&[])).unwrap();
    let error = Authority::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("revoked.pem: is of no use without"), "{error}");
    std::fs::write(path("authority.pem"), "nothing").unwrap();
    let error = Authority::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("authority.pem: contains no"), "{error}");

    // A certificate of another key, and a certificate without its key.
    let (one, other) = (ours.issue("a", Use::Client), ours.issue("b", Use::Client));
    one.put(folder.path());
    assert!(Identity::load(folder.path()).unwrap().is_some());
    std::fs::write(path("certificate.pem"), &other.certificate).unwrap();
    let error = Identity::load(folder.path()).unwrap_err();
    assert!(
        matches!(error, KeyError::File(_)) && error.to_string().contains("certificate.pem: cannot be used")
    );
    std::fs::remove_file(path("key.pem")).unwrap();
    let error = Identity::load_or_create(folder.path()).unwrap_err().to_string();
    assert!(error.contains("key.pem: does not exist"), "{error}");
}

#[test]
fn a_client_with_an_authority_needs_no_pin_but_an_address_that_a_certificate_can_name() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, files) = (Issuer::new("ours"), ClientFiles { folder: folder.path().to_owned() });
    ours.issue("host1", Use::Client).put(folder.path());
    let error = files.credentials("tcp:gpu7:9700").unwrap_err().to_string();
    assert!(error.contains("authority.pem"), "{error}");
    std::fs::write(folder.path().join("authority.pem"), ours.pem()).unwrap();
    for address in ["tcp:gpu7:9700", "tcp:gpu7.example.org:9700", "tcp:10.0.0.7:9700", "tcp:[fd00::7]:9700"] {
        assert!(files.credentials(address).is_ok(), "{address}");
    }
    let error = files.credentials("tcp:not a name:9700").unwrap_err().to_string();
    assert!(error.contains("DNS name"), "{error}");
}
