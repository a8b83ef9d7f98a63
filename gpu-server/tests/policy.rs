//! What clients may use: rules that are read again, and what is logged about it.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use protocol::device::{Answer, untext};
use protocol::link::{Welcome, purpose};
use protocol::ops::device::SessionInfo;
use serde_json::Value;
use support::*;
use test_kit::link::{LocalBridge, Session as _, TcpSession, greet, hello};
use test_kit::{free_port, until};

fn uid() -> nix::unistd::Uid {
    nix::unistd::geteuid()
}

/// A file of rules, and the flag that names it.
fn rules(text: &str) -> (tempfile::TempDir, PathBuf, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clients.toml");
    std::fs::write(&path, text).unwrap();
    let flag = format!("--clients={}", path.display());
    (folder, path, flag)
}

/// The server's answer to a client of this machine. Its session, if it gets one, lives as long as the
/// connection.
fn ask(server: &Server) -> (UnixStream, Welcome) {
    let stream = UnixStream::connect(server.socket()).unwrap();
    let welcome = greet(&stream, &hello(purpose::LOCAL, [0; 16], 0)).unwrap();
    (stream, welcome)
}

fn refusal(server: &Server) -> String {
    let (_, welcome) = ask(server);
    assert_ne!(welcome.status, Answer::Ok as u32);
    untext(&welcome.reason)
}

fn audited(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn of<'a>(events: &'a [Value], event: &str) -> Vec<&'a Value> {
    events.iter().filter(|line| line["event"] == event).collect()
}

#[test]
fn a_refusal_names_the_rule_and_what_happened_is_in_the_audit_log() {
    let text = format!("[[client]]\nname = \"uid:{}\"\nclient_sessions = 1\n", uid());
    let (folder, _, flag) = rules(&text);
    let audit = folder.path().join("audit");
    let mut server = Server::start(&[&flag, &format!("--audit-log={}", audit.display())]);
    let (first, welcome) = ask(&server);
    assert_eq!(welcome.status, 0);
    let why = refusal(&server);
    assert!(why.contains("its maximum of 1 sessions (clients.toml, line 3: client_sessions)"), "{why}");
    drop(first);
    until("the session is over", || server.sessions() == 0);
    until("its end is written", || of(&audited(&audit), "ended").len() == 1);
    let (_running, _) = ask(&server);
    server.end(Signal::SIGTERM);
    let events = audited(&audit);
    let (started, refused, ended) = (of(&events, "started"), of(&events, "refused"), of(&events, "ended"));
    // The log also has the session that ended with the server.
    assert_eq!((started.len(), refused.len(), ended.len()), (2, 1, 2), "{events:?}");
    let principal = Value::from(format!("uid:{}", uid()));
    assert!(events.iter().all(|event| event["principal"] == principal), "{events:?}");
    assert_eq!(
        (&started[0]["session"], &started[0]["transport"]),
        (&ended[0]["session"], &Value::from("local"))
    );
    assert_eq!(refused[0]["reason"], why);
}

#[test]
fn rules_are_read_again_and_who_may_not_stay_is_told_why() {
    let (_folder, path, flag) = rules("weight = 5\n");
    let server = Server::start(&[&flag]);
    let mut client = LocalBridge::connect(&server.socket());
    client.call(&SessionInfo {}).unwrap();
    // A wrong file changes nothing.
    std::fs::write(&path, "weight = 0\n").unwrap();
    server.signal(Signal::SIGHUP);
    until("the mistake is logged", || server.log().contains("stay as they were"));
    client.call(&SessionInfo {}).unwrap();
    std::fs::write(&path, format!("\n[[client]]\nname = \"uid:{}\"\nallow = false\n", uid())).unwrap();
    server.signal(Signal::SIGHUP);
    until("the session is over", || server.sessions() == 0);
    let rule = format!("uid:{} may not use this server (clients.toml, line 4: allow = false)", uid());
    until("the log says why", || server.log().contains(&rule));
    assert_eq!(refusal(&server), rule);
    std::fs::write(&path, "").unwrap();
    server.signal(Signal::SIGHUP);
    until("it is allowed again", || ask(&server).1.status == 0);
}

#[test]
fn a_client_begins_no_more_sessions_within_a_minute_than_it_may() {
    let (_folder, _, flag) = rules("sessions_per_minute = 2\n");
    let server = Server::start(&[&flag]);
    for _ in 0..2 {
        assert_eq!(ask(&server).1.status, 0);
    }
    let why = refusal(&server);
    assert!(
        why.contains("2 sessions within a minute") && why.contains("line 1: sessions_per_minute"),
        "{why}"
    );
}

#[test]
fn a_client_that_is_refused_again_and_again_cannot_flood_the_logs() {
    let (folder, _, flag) = rules("sessions_per_minute = 1\n");
    let audit = folder.path().join("audit");
    let server = Server::start(&[&flag, &format!("--audit-log={}", audit.display())]);
    let mut count = 0;
    // A line is written for each second, so a slow machine needs more attempts until some are left out.
    until("lines are left out, and that is said", || {
        (0..100).for_each(|_| drop(ask(&server)));
        count += 100;
        server.log().contains("earlier messages not shown")
    });
    let written = server.log().matches("refused: ").count();
    assert!(written < count - 1, "{written} lines of {count} attempts");
    until("they are in the audit log", || {
        of(&audited(&audit), "refused").len() == server.log().matches("refused: ").count()
    });
}

#[test]
fn a_client_that_gets_no_device_is_told_by_which_rule() {
    let (_folder, _, flag) = rules("client_sessions = 9\ndevices = [7]\n");
    let why = refusal(&Server::start(&[&flag]));
    let rule = "gives this client devices 7, but the server shares devices 0 (clients.toml, line 2: devices)";
    assert!(why.contains(rule), "{why}");
}

#[test]
fn a_reload_names_the_options_that_it_does_not_take_over() {
    let (folder, rules, _) = rules("allow = false\n");
    let file = folder.path().join("rgpu-server.toml");
    std::fs::write(&file, "workers = 1\nmax_sessions = 9\n").unwrap();
    let server = Server::start(&["--config", &file.display().to_string()]);
    let reload = |times: usize| {
        server.signal(Signal::SIGHUP);
        until("it has read everything again", || server.log().matches("SIGHUP: read").count() == times);
    };
    reload(1);
    assert!(!server.log().contains("has changed"), "{}", server.log());
    // The operator switches the rules on, and reloads, but this daemon has no file of rules.
    let text = format!("workers = 1\nclients = \"{}\"\n", rules.display());
    std::fs::write(&file, text).unwrap();
    reload(2);
    let said = server.log();
    assert!(
        said.contains("rgpu-server.toml has changed") && said.contains("(clients, max_sessions)"),
        "{said}"
    );
    assert!(said.contains("rgpuctl upgrade does"), "{said}");
    LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
    // What it says is right.
    assert_eq!(server.ask(serde_json::json!({ "upgrade": {} }))["error"], Value::Null);
    until("the next daemon refuses everybody", || {
        server.try_status().is_some() && refusal(&server).contains("clients.toml")
    });
}

#[test]
fn rules_are_checked_before_a_server_starts() {
    let (folder, path, flag) = rules("[[client]]\nname = \"a\"\ngroup = \"nobody\"\n");
    let listen = format!("--listen=unix:{}", folder.path().join("server.sock").display());
    let check = || Command::new(binary()).args([&flag, &listen, "--check-config"]).output().unwrap();
    let wrong = check();
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(
        !wrong.status.success() && said.contains("line 3: client.group: there is no group nobody"),
        "{said}"
    );
    std::fs::write(&path, "[[group]]\nname = \"g\"\n[[client]]\nname = \"a\"\ngroup = \"g\"\n").unwrap();
    let right = check();
    let said = String::from_utf8_lossy(&right.stdout).into_owned();
    assert!(right.status.success() && said.contains("rules for 1 groups and 1 clients"), "{said}");
}

#[test]
fn rules_for_an_address_hold_at_a_socket_for_all_addresses() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("proves nothing: this machine has no IPv6");
        return;
    }
    let (_folder, _, flag) = rules("[[client]]\nname = \"insecure:127.0.0.1\"\nallow = false\n");
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let port = free_port();
    let more = [flag.as_str(), &format!("--listen=tcp:*:{port}")];
    let server = Server::start_by(Command::new(binary()), &folder, free_port(), &more).ready();
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let welcome = greet(&stream, &hello(purpose::CONTROL, [0; 16], 1)).unwrap();
    let why = untext(&welcome.reason);
    assert!(why.contains("insecure:127.0.0.1 may not use this server"), "{why}\n{}", server.log());
}

#[test]
fn a_client_may_have_a_grace_period_of_its_own() {
    let text = "[[client]]\nname = \"insecure:127.0.0.1\"\ngrace_seconds = 1\n";
    let (_folder, _, flag) = rules(text);
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let server = Command::new(binary());
    let server = Server::start_by(server, &folder, free_port(), &[&flag, "--grace-seconds=100000"]).ready();
    let mut session = TcpSession::connect(server.port);
    session.call(&SessionInfo {}).unwrap();
    // It does not say that it ends: as if the network were gone.
    drop(session);
    until("the session is over", || server.sessions() == 0);
}
