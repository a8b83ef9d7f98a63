//! Leases: what clients ask for over their connections, what their sessions get for it, and how leases end.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::sync::Arc;

use host_bridge::ask::{Answer, Gpu, Lease, Question, Wish};
use host_bridge::bridge::{Security, SessionConfig, ask};
use host_bridge::framing::{Address, with_causes};
use identity::Secret;
use nix::sys::signal::Signal;
use protocol::device::untext;
use protocol::link::{Hello, MAX_QUESTION, purpose, wish};
use protocol::ops::device::SessionInfo;
use serde_json::{Value, json};
use support::machine::*;
use support::*;
use test_kit::link::{LocalBridge, Session as _, Waiting, connect_tcp, hear_welcome, hello};
use test_kit::manager::Manager;
use test_kit::session::Client;
use test_kit::{free_port, until};
use zerocopy::IntoBytes;

/// How a client asks: over TLS, or as a user of this machine.
struct Asks(Address, Security);

impl Asks {
    fn over_tls(machine: &Machine, server: &Server) -> Asks {
        Asks(address(server.port), machine.config(server.port).security)
    }

    fn here(server: &Server) -> Asks {
        Asks(Address::Unix(server.socket()), Security::Insecure)
    }

    fn ask(&self, question: &Question) -> Result<Answer, String> {
        ask(&self.0, self.1.clone(), question).map_err(|e| with_causes(&e))
    }

    fn lease(&self, wish: Wish) -> Result<(Lease, Secret), String> {
        match self.ask(&Question::Lease(wish))? {
            Answer::Lease { lease, key } => Ok((lease, Secret::from_text(&key).unwrap())),
            other => panic!("{other:?}"),
        }
    }

    fn gpus(&self) -> Vec<Gpu> {
        match self.ask(&Question::Inventory {}).unwrap() {
            Answer::Inventory(gpus) => gpus,
            other => panic!("{other:?}"),
        }
    }
}

fn one(exclusive: bool, seconds: u64) -> Wish {
    Wish { gpus: 1, exclusive, seconds, name: "a test".into(), ..Wish::default() }
}

/// A server with two devices, a ready worker, and these rules.
fn with_rules(rules: &str, start: impl FnOnce(&[&str]) -> Server) -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clients.toml");
    std::fs::write(&path, rules).unwrap();
    let flags = [&format!("--clients={}", path.display()), "--software-devices=2", "--workers=1"];
    let server = start(&flags);
    until("a worker is ready", || server.number("workers_ready") > 0);
    (folder, server)
}

fn devices(server: &Server) -> Vec<Value> {
    let status = server.status();
    status["sessions"].as_array().unwrap().iter().map(|row| row["devices"].clone()).collect()
}

#[test]
fn a_lease_gives_its_owners_sessions_its_devices_and_nobody_else() {
    let (_rules, server) = with_rules("exclusive_leases = true\n", Server::start_protected);
    let (owner, other) = (joined(&server, "host1"), joined(&server, "host2"));
    let asks = Asks::over_tls(&owner, &server);
    let (lease, key) = asks.lease(one(true, 600)).unwrap();
    assert_eq!((lease.principal.as_str(), lease.devices.len(), lease.exclusive), ("host1", 1, true));
    let (device, free) = (lease.devices[0], 1 - lease.devices[0]);
    let seen = Asks::over_tls(&other, &server).gpus();
    let seen: Vec<_> = seen.iter().map(|gpu| (gpu.gpu, gpu.exclusive, gpu.leases)).collect();
    assert_eq!(seen, [(0, device == 0, u32::from(device == 0)), (1, device == 1, u32::from(device == 1))]);
    // Sessions without the lease, of any user.
    for machine in [&owner, &other] {
        let mut client = machine.try_connect(server.port).unwrap();
        works(&mut client);
        assert_eq!(devices(&server), [json!(free.to_string())]);
        drop(client);
        until("it is over", || server.sessions() == 0);
    }
    let under = |machine: &Machine| {
        let config = SessionConfig { lease: Some(key), ..machine.config(server.port) };
        Client::try_connect(&config).map_err(|e| with_causes(&e))
    };
    let mut client = under(&owner).unwrap();
    works(&mut client);
    let row = server.status()["sessions"][0].clone();
    let shown = (&row["devices"], &row["lease"], &row["principal"]);
    assert_eq!(shown, (&json!(device.to_string()), &json!(lease.id), &json!(format!("host1 {}", lease.id))));
    // Somebody else who has found out the key gets nothing.
    let refusal = under(&other).err().unwrap();
    assert!(refusal.contains("has no such lease"), "{refusal}");
    let others = Asks::over_tls(&other, &server);
    for question in [Question::Release { key: key.to_text() }, Question::Renew { key: key.to_text() }] {
        assert!(others.ask(&question).unwrap_err().contains("has no such lease"));
    }
    assert_eq!(others.ask(&Question::Leases {}).unwrap(), Answer::Leases(vec![]));
    let Answer::Leases(own) = asks.ask(&Question::Leases {}).unwrap() else { panic!() };
    assert_eq!((own.len(), own[0].sessions, own[0].name.as_str()), (1, 1, "a test"));
    // When the lease ends, so do its sessions, and they are told why.
    let released = asks.ask(&Question::Release { key: key.to_text() }).unwrap();
    assert_eq!(released, Answer::Released { sessions: 1 });
    let why = format!("the lease {} of this session was released", lease.id);
    until("the session is over", || client.session.over().is_some_and(|end| end.contains(&why)));
    until("it is over", || server.sessions() == 0);
    assert_eq!(server.number("sessions_lost"), 0, "its owner wanted that");
    assert!(under(&owner).err().unwrap().contains("has no such lease"));
    assert!(!server.log().contains(&key.to_text()));
}

#[test]
fn sessions_need_a_lease_where_the_rules_say_so() {
    let (_rules, server) = with_rules("lease_required = true\nleases = 1\n", Server::start);
    let refused = Waiting::ask(&server.socket(), 0).served().0.err().unwrap();
    assert!(refused.contains("need a lease (clients.toml, line 1: lease_required)"), "{refused}");
    assert!(Waiting::ask(&server.socket(), wish::NVML_ONLY).served().0.is_ok());
    let asks = Asks::here(&server);
    let refused = asks.lease(one(true, 600)).unwrap_err();
    assert!(refused.contains("no exclusive leases"), "{refused}");
    let memory = 64 << 20;
    let (lease, key) = asks.lease(Wish { memory, ..one(false, 600) }).unwrap();
    assert_eq!(lease.memory, memory);
    let refused = asks.lease(one(false, 600)).unwrap_err();
    assert!(refused.contains("maximum of 1 leases (clients.toml, line 2: leases)"), "{refused}");
    let _session = local_under(&server, &key);
    let principals = &server.status()["principals"];
    let of_lease = principals.as_array().unwrap().iter().find(|row| row["device_memory_limit"] == memory);
    assert!(of_lease.is_some(), "{principals}");
    let gpu = &asks.gpus()[lease.devices[0] as usize];
    assert_eq!((gpu.memory, gpu.memory_leased, gpu.leases), (Some(256 << 20), memory, 1));
}

#[test]
fn a_server_without_spare_workers_leases_its_devices_before_any_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clients.toml");
    std::fs::write(&path, "lease_required = true\n").unwrap();
    let rules = format!("--clients={}", path.display());
    let server = Server::start(&[&rules, "--software-devices=2", "--workers=0"]);
    let asks = Asks::here(&server);
    until("it knows its devices", || asks.gpus().len() == 2);
    until("the worker that told them is gone", || server.children().is_empty());
    let (_, key) = asks.lease(one(false, 600)).unwrap();
    local_under(&server, &key).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_lease_that_is_not_renewed_ends() {
    let (folder, server) = with_rules("exclusive_leases = true\n", Server::start);
    let asks = Asks::here(&server);
    // In this order: the short one may be over before anything else is asked.
    let (long, kept) = asks.lease(one(true, 600)).unwrap();
    let (short, key) = asks.lease(one(true, 1)).unwrap();
    let Answer::Lease { lease, .. } = asks.ask(&Question::Renew { key: kept.to_text() }).unwrap() else {
        panic!()
    };
    assert!(lease.id == long.id && lease.seconds_left >= 300);
    // It may already be over.
    until("its time is over", || server.status()["leases"].as_array().unwrap().len() == 1);
    assert_eq!(server.status()["leases"][0]["id"], long.id);
    until("the log says why", || server.log().contains("was not renewed in time"));
    assert!(asks.ask(&Question::Renew { key: key.to_text() }).unwrap_err().contains("has no such lease"));
    assert_eq!(asks.lease(one(true, 600)).unwrap().0.devices, short.devices);
    // All are taken. The operator sees them and takes one back.
    assert!(asks.lease(one(false, 600)).unwrap_err().contains("others have devices 0, 1 for themselves"));
    let all = server.ask(json!({ "leases": {} }));
    assert_eq!(all["leases"].as_array().unwrap().len(), 2);
    assert_eq!(server.ask(json!({ "release": { "lease": long.id } })), json!({ "ended_sessions": 0 }));
    assert!(server.ask(json!({ "release": { "lease": long.id } }))["error"].is_string());
    // A client that may not use the server any more has no leases.
    std::fs::write(folder.path().join("clients.toml"), "allow = false\n").unwrap();
    server.signal(Signal::SIGHUP);
    until("there are no leases", || server.status()["leases"] == json!([]));
}

#[test]
fn leases_and_their_sessions_outlive_the_daemon() {
    let manager = Manager::new();
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let rules = folder.path().join("clients.toml");
    std::fs::write(&rules, "exclusive_leases = true\n").unwrap();
    let clients = format!("--clients={}", rules.display());
    let port = free_port();
    let start = || {
        let server =
            Server::start_by(manager.command(binary()), &folder, port, &["--workers=1", &clients]).ready();
        until("a worker is ready", || server.number("workers_ready") > 0);
        server
    };
    let mut server = start();
    let (lease, key) = Asks::here(&server).lease(one(true, 600)).unwrap();
    let mut session = local_under(&server, &key);
    session.call(&SessionInfo {}).unwrap();
    server.end(Signal::SIGKILL);
    let mut server = start();
    session.call(&SessionInfo {}).unwrap();
    let status = server.status();
    assert_eq!((&status["leases"][0]["id"], &status["leases"][0]["sessions"]), (&json!(lease.id), &json!(1)));
    assert_eq!(status["leases_granted"], 1);
    // Another program of the same daemon.
    assert!(server.ask(json!({ "upgrade": {} }))["error"].is_null());
    until("it has taken over", || {
        server.try_status().is_some_and(|status| status["sessions"][0]["daemons_before"] == 2)
    });
    session.call(&SessionInfo {}).unwrap();
    let another = local_under(&server, &key);
    let released = Asks::here(&server).ask(&Question::Release { key: key.to_text() }).unwrap();
    assert_eq!(released, Answer::Released { sessions: 2 });
    until("both are over", || server.sessions() == 0);
    drop((session, another));
    server.end(Signal::SIGTERM);
    assert_eq!(manager.names(), Vec::<String>::new());
}

/// A session of this user under a lease.
fn local_under(server: &Server, key: &Secret) -> LocalBridge {
    let hello = Hello { secret: key.0, wishes: wish::MAY_WAIT, ..hello(purpose::LOCAL, [0; 16], 0) };
    Waiting::say(&server.socket(), &hello).served().0.unwrap()
}

#[test]
fn whatever_is_no_question_is_refused_and_disturbs_nobody() {
    let server = Server::start(&[]);
    let mut session = LocalBridge::connect(&server.socket());
    let asked = |index: u32, text: &[u8]| {
        let mut stream = connect_tcp(server.port).unwrap();
        let hello = Hello { index, ..hello(purpose::ASK, [0; 16], 0) };
        stream.write_all(&[hello.as_bytes(), text].concat()).unwrap();
        stream
    };
    let deep = "[".repeat(4000);
    let long = [b' '; MAX_QUESTION as usize];
    for text in [&b""[..], b"{}", b"\xff\0", b"{\"lease\":{\"gpus\":4294967296}}", deep.as_bytes(), &long] {
        let stream = asked(text.len() as u32, text);
        let reason = untext(&hear_welcome(&stream).unwrap().reason);
        assert!(reason.contains("the question is not one"), "{reason}");
    }
    // Anything too long is cut off without waiting for the rest.
    let stream = asked(u32::MAX, &long);
    assert!(untext(&hear_welcome(&stream).unwrap().reason).contains("the question is not one"));
    // A request that never arrives is not waited for forever.
    let mut silent = asked(100, b"{");
    let mut rest = Vec::new();
    let _ = silent.read_to_end(&mut rest);
    assert!(rest.is_empty());
    session.call(&SessionInfo {}).unwrap();
}
