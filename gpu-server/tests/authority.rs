//! Clients and servers with certificates from an operator's own authority.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use host_bridge::ask::{Answer, Question, Wish};
use host_bridge::bridge::ask;
use host_bridge::framing::with_causes;
use nix::sys::signal::Signal;
use serde_json::Value;
use support::machine::*;
use support::*;
use test_kit::authority::{Authority, Issued, Use};
use test_kit::until;

/// A server with a certificate for 127.0.0.1, and the authority of both sides.
struct Site {
    authority: Authority,
    server: Server,
    identity: PathBuf,
}

impl Site {
    fn new() -> Site {
        Site::named("127.0.0.1")
    }

    /// A server whose certificate has this name.
    fn named(name: &str) -> Site {
        let authority = Authority::new("ours");
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let identity = folder.path().join("identity");
        authority.issue(name, Use::Server).put(&identity);
        std::fs::write(identity.join("authority.pem"), authority.pem()).unwrap();
        let server = Server::start_protected_in(&folder, &[]);
        Site { authority, server, identity }
    }

    /// A machine with a certificate for this name, and the certificate.
    fn machine(&self, name: &str) -> (Machine, Issued) {
        let issued = self.authority.issue(name, Use::Client);
        (machine(&issued, &self.authority), issued)
    }

    /// Takes a lease, or renews the one with this key. Returns its key.
    fn lease(&self, machine: &Machine, key: Option<&str>) -> String {
        let wish = Wish { gpus: 1, seconds: 600, ..Wish::default() };
        let question = match key {
            Some(key) => Question::Renew { key: key.to_owned() },
            None => Question::Lease(wish),
        };
        let (address, security) = (address(self.server.port), machine.config(self.server.port).security);
        match ask(&address, security, &question).map_err(|e| with_causes(&e)).unwrap() {
            Answer::Lease { key, .. } => key,
            other => panic!("{other:?}"),
        }
    }

    /// Who has leases.
    fn owners(&self) -> Vec<Value> {
        let status = self.server.status();
        status["leases"].as_array().unwrap().iter().map(|lease| lease["principal"].clone()).collect()
    }

    /// Revokes these certificates, and no others.
    fn revoke(&self, all: &[&Issued]) {
        std::fs::write(self.identity.join("revoked.pem"), self.authority.revoked(all)).unwrap();
        self.reload();
    }

    /// Makes the server read its files again.
    fn reload(&self) {
        let times = |log: &str| log.matches("SIGHUP: read").count();
        let before = times(&self.server.log());
        self.server.signal(Signal::SIGHUP);
        until("the server has read its files again", || times(&self.server.log()) > before);
    }
}

fn machine(issued: &Issued, trusts: &Authority) -> Machine {
    let machine = Machine::new();
    issued.put(machine.folder.path());
    trust(machine.folder.path(), trusts);
    machine
}

fn trust(folder: &Path, authority: &Authority) {
    std::fs::write(folder.join("authority.pem"), authority.pem()).unwrap();
}

#[test]
fn a_certificate_is_enough_for_a_session_under_its_name() {
    let site = Site::new();
    let (machine, _) = site.machine("host1.example");
    let mut client = machine.try_connect(site.server.port).unwrap();
    works(&mut client);
    let session = &site.server.status()["sessions"][0];
    assert_eq!(session["principal"], "cert:host1.example");
    // Clients that joined are still accepted.
    works(&mut joined(&site.server, "host2").try_connect(site.server.port).unwrap());
}

#[test]
fn another_authoritys_certificates_are_worth_nothing_to_either_side() {
    let (site, other) = (Site::new(), Authority::new("other"));
    let stranger = machine(&other.issue("host1.example", Use::Client), &site.authority);
    let why = stranger.try_connect(site.server.port).err().unwrap();
    assert!(why.contains("no authority in the server's authority.pem has signed it"), "{why}");
    let issued = site.authority.issue("host1.example", Use::Client);
    let why = machine(&issued, &other).try_connect(site.server.port).err().unwrap();
    assert!(why.contains("UnknownIssuer"), "{why}");
    // From the same authority, but for another server.
    let elsewhere = Site::named("gpu8.example");
    let (visitor, _) = elsewhere.machine("host1.example");
    let why = visitor.try_connect(elsewhere.server.port).err().unwrap();
    assert!(why.contains("not valid for name"), "{why}");
    assert_eq!((site.server.sessions(), elsewhere.server.sessions()), (0, 0));
}

#[test]
fn certificates_and_keys_are_replaced_without_a_restart() {
    let site = Site::new();
    let (machine, _) = site.machine("host1.example");
    let mut client = machine.try_connect(site.server.port).unwrap();
    site.authority.issue("127.0.0.1", Use::Server).put(&site.identity);
    // The client, too, has another key from now on.
    site.authority.issue("host1.example", Use::Client).put(machine.folder.path());
    site.reload();
    works(&mut client);
    works(&mut machine.try_connect(site.server.port).unwrap());
    // A wrong file changes nothing.
    std::fs::write(site.identity.join("certificate.pem"), "nothing").unwrap();
    site.reload();
    until("the mistake is logged", || site.server.log().contains("key and certificates stay as they were"));
    works(&mut machine.try_connect(site.server.port).unwrap());
}

#[test]
fn a_revoked_certificate_ends_its_sessions_and_no_others() {
    let site = Site::new();
    let ((kept, _), (lost, certificate)) = (site.machine("kept.example"), site.machine("lost.example"));
    let (mut goes_on, ends) =
        (kept.try_connect(site.server.port).unwrap(), lost.try_connect(site.server.port).unwrap());
    until("both have sessions", || site.server.sessions() == 2);
    std::fs::write(site.identity.join("revoked.pem"), site.authority.revoked(&[&certificate])).unwrap();
    site.reload();
    until("its session is over", || site.server.sessions() == 1);
    works(&mut goes_on);
    drop(ends);
    let why = "the certificate of cert:lost.example does not count any more: it was revoked";
    until("the log says why", || site.server.log().contains(why));
    let why = lost.try_connect(site.server.port).err().unwrap();
    assert!(why.contains("it was revoked"), "{why}");
    works(&mut kept.try_connect(site.server.port).unwrap());
}

#[test]
fn a_revoked_certificate_ends_its_leases_unless_they_were_renewed_with_another_one() {
    let site = Site::new();
    let ((kept, first), (lost, certificate)) = (site.machine("kept.example"), site.machine("lost.example"));
    until("a worker is ready", || site.server.number("workers_ready") > 0);
    let key = site.lease(&kept, None);
    site.lease(&lost, None);
    assert_eq!(site.owners().len(), 2);
    site.revoke(&[&certificate]);
    assert_eq!(site.owners(), ["cert:kept.example"]);
    until("the log says why", || site.server.log().contains("does not count any more: it was revoked"));
    // Its owner has a new certificate.
    site.authority.issue("kept.example", Use::Client).put(kept.folder.path());
    site.lease(&kept, Some(&key));
    site.revoke(&[&certificate, &first]);
    assert_eq!(site.owners(), ["cert:kept.example"]);
}
