//! One daemon after another: workers continue their sessions when the daemon is killed or replaced, and the
//! next daemon knows them.

#![allow(clippy::unwrap_used)]

mod support;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::Status;
use protocol::device::{Answer, untext};
use protocol::link::{Hello, purpose};
use protocol::ops::device::*;
use protocol::ops::memory::*;
use serde_json::{Value, json};
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession, connect_tcp, greet};
use test_kit::*;

const MIB: u64 = 1 << 20;

fn row(server: &Server, transport: &str) -> Value {
    // While another program takes over, a connection may be closed without an answer.
    let status = server.try_status().unwrap_or_default();
    let rows = status["sessions"].as_array().into_iter().flatten();
    rows.clone().find(|row| row["transport"] == transport).cloned().unwrap_or_default()
}

fn is_there(process: &Value) -> bool {
    kill(Pid::from_raw(process.as_i64().unwrap() as i32), None).is_ok()
}

fn grow<S: Session>(s: &mut S, at: u64, bytes: u64) -> Result<(), Status> {
    s.call(&MemGrow { device: 0, address: window(0) + at, size: bytes }).map(|_| ())
}

fn guest(server: &Server) -> Value {
    json!([row(server, "local")["worker"], row(server, "tcp")["worker"]])
}

#[test]
fn sessions_go_on_while_the_daemon_is_dead_and_under_the_next_one() {
    let service = Service::new(&["--grace-seconds=0"]);
    let mut server = service.start();
    let mut local = LocalBridge::connect(&server.socket());
    let mut tcp = TcpSession::connect(server.port);
    let workers = guest(&server);
    server.end(Signal::SIGKILL);
    // Nobody is there to serve others, and the sessions do not notice.
    local.call(&SessionInfo {}).unwrap();
    tcp.call(&SessionInfo {}).unwrap();
    // A connection made meanwhile waits for the next daemon.
    let early = UnixStream::connect(service.folder.path().join("server.sock")).unwrap();
    let mut server = service.start();
    assert_eq!((server.sessions(), guest(&server)), (2, workers.clone()));
    assert_eq!(
        (&row(&server, "tcp")["daemons_before"], &row(&server, "tcp")["program"]),
        (&json!(1), &json!("a test"))
    );
    local.call(&SessionInfo {}).unwrap();
    tcp.call(&SessionInfo {}).unwrap();
    drop(early);
    // Again, with sessions that this one began.
    let mut third = LocalBridge::connect(&server.socket());
    server = service.crash(server);
    third.call(&SessionInfo {}).unwrap();
    assert_eq!((server.sessions(), row(&server, "tcp")["daemons_before"].clone()), (3, json!(2)));
    assert_eq!(server.number("sessions_begun"), 3, "the counters go on, too");
    // Their ends are noticed and leave nothing behind.
    drop((local, tcp, third));
    until("all have ended", || server.sessions() == 0);
    until("their processes are gone", || !is_there(&workers[0]) && !is_there(&workers[1]));
    assert_eq!(server.number("sessions_lost"), 0);
    until("nothing is kept", || !service.manager.names().iter().any(|name| name.starts_with("worker-")));
    server.end(Signal::SIGTERM);
    assert_eq!(service.manager.names(), Vec::<String>::new());
}

#[test]
fn without_anybody_who_keeps_them_sessions_end_with_the_daemon() {
    let mut server = Server::start(&[]);
    let mut tcp = TcpSession::connect(server.port);
    let worker = row(&server, "tcp")["worker"].clone();
    server.end(Signal::SIGKILL);
    until("the session is lost", || tcp.lost().is_some());
    until("its worker is gone", || !is_there(&worker));
}

#[test]
fn an_upgrade_keeps_the_process_and_every_session() {
    // Without a service manager.
    let mut server = Server::start(&[]);
    let mut local = LocalBridge::connect(&server.socket());
    let mut tcp = TcpSession::connect(server.port);
    let workers = guest(&server);
    for (round, order) in [(1, "signal"), (2, "rgpuctl"), (3, "signal")] {
        if order == "signal" {
            server.signal(Signal::SIGUSR2);
        } else {
            let answer = server.ask(json!({ "upgrade": {} }));
            assert_eq!(answer["upgrading"]["sessions"], 2, "{answer}");
        }
        until("the next program serves", || row(&server, "tcp")["daemons_before"] == round);
        let version = server.ask(json!({ "version": {} }));
        assert_eq!((&version["pid"], &version["sessions"]), (&json!(server.pid()), &json!(2)));
        assert_eq!(guest(&server), workers);
        local.call(&SessionInfo {}).unwrap();
        tcp.call(&SessionInfo {}).unwrap();
        LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
        until("the pool is filled", || server.number("workers_ready") == 2 && server.sessions() == 2);
    }
    until("two serve, and two are ready", || server.children().len() == 4);
    // How a worker ends is still known: they are this process's children.
    kill(Pid::from_raw(workers[0].as_i64().unwrap() as i32), Signal::SIGKILL).unwrap();
    until("the loss is noticed", || server.sessions() == 1);
    until("the log says why", || server.log().contains("its worker was killed by signal 9"));
    drop((local, tcp));
    assert!(server.end(Signal::SIGTERM).success());
}

/// Runs another process: a file that this one has open for writing while a thread starts something cannot be
/// executed.
fn by_another(words: &[&OsStr]) {
    assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success());
}

/// Starts a copy of the program, which can be [replaced](replace).
fn start_copy(service: &Service) -> Server {
    let program = service.folder.path().join("rgpu-server");
    by_another(&["cp".as_ref(), binary().as_os_str(), program.as_os_str()]);
    service.spawn(program).ready()
}

/// Puts a script in the program's place as a package manager does it: another file with the same name.
fn replace(service: &Service, text: &str) {
    let other = service.folder.path().join("other");
    let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    by_another(&["sh".as_ref(), "-c".as_ref(), write.as_ref(), other.as_os_str(), text.as_ref()]);
    std::fs::rename(other, service.folder.path().join("rgpu-server")).unwrap();
}

#[test]
fn a_daemon_whose_successor_does_not_answer_still_ends_when_it_is_told_to() {
    let service = Service::new(&[]);
    let mut server = start_copy(&service);
    let mark = service.folder.path().join("asked");
    replace(&service, &format!("#!/bin/sh\ntouch {}\nexec sleep 1000000\n", mark.display()));
    server.signal(Signal::SIGUSR2);
    until("the program is asked", || mark.exists());
    let answer = server.ask(json!({ "upgrade": {} }));
    assert!(answer["error"].as_str().unwrap().contains("upgraded already"), "{answer}");
    assert!(server.end(Signal::SIGTERM).success());
}

#[test]
fn a_daemon_that_is_told_to_end_while_it_executes_the_next_program_ends() {
    for _ in 0..5 {
        let mut server = Server::start(&[]);
        let mut admin = UnixStream::connect(server.path("admin")).unwrap();
        admin.write_all(json!({ "upgrade": {} }).to_string().as_bytes()).unwrap();
        admin.shutdown(Shutdown::Write).unwrap();
        // It says so right before.
        let mut said = String::new();
        BufReader::new(&admin).read_line(&mut said).unwrap();
        assert!(said.contains("upgrading"), "{said}");
        assert!(server.end(Signal::SIGTERM).success());
    }
}

#[test]
fn a_program_that_cannot_take_over_is_not_executed() {
    let service = Service::new(&[]);
    let server = start_copy(&service);
    let mut local = LocalBridge::connect(&server.socket());
    replace(&service, "#!/bin/sh\necho it is broken >&2; exit 1\n");
    let answer = server.ask(json!({ "upgrade": {} }));
    assert!(answer["error"].as_str().unwrap().contains("cannot take over: it is broken"), "{answer}");
    // Asking whether it would take over uses an option that older versions do not know.
    let output = Command::new(binary()).args(["--check-config", "--takes-over=999"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("of format 999"), "{said}");
    // It continues as if nothing had happened.
    local.call(&SessionInfo {}).unwrap();
    LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
    assert_eq!(row(&server, "local")["daemons_before"], 0);
    assert_eq!(service.manager.said(), ["READY=1", "RELOADING=1", "READY=1"]);
}

#[test]
fn a_daemon_that_could_not_start_is_not_executed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let configure = |text: &str| std::fs::write(path("rgpu-server.toml"), text).unwrap();
    configure("");
    std::fs::write(path("data"), "data").unwrap();
    std::fs::write(path("token"), "0123456789abcdef").unwrap();
    std::fs::set_permissions(path("token"), PermissionsExt::from_mode(0o600)).unwrap();
    let metrics = |port: u16| {
        format!("[metrics]\nlisten = \"tcp:127.0.0.1:{port}\"\ntoken_file = \"{}\"\n", path("token"))
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let service = Service::new(&["--config", &path("rgpu-server.toml")]);
    let server = service.start();
    let mut local = LocalBridge::connect(&server.socket());
    let upgrade = || server.ask(json!({ "upgrade": {} }));
    for (text, why) in [
        (format!("[swap]\nfolder = \"{}\"\n", path("data")), "in --swap-folder="),
        (format!("[cache]\nfolder = \"{}\"\n", path("data/cache")), "the cache (--cache)"),
        (format!("audit_log = \"{}\"\n", path("data/log")), "cannot write the audit log"),
        (format!("[metrics]\nlisten = \"unix:{}\"\n", path("data")), "exists and is not a socket"),
        (metrics(taken.local_addr().unwrap().port()), "Address already in use"),
    ] {
        configure(&text);
        let answer = upgrade();
        assert!(answer["error"].as_str().is_some_and(|error| error.contains(why)), "{why}: {answer}");
        local.call(&SessionInfo {}).unwrap();
        assert_eq!(row(&server, "local")["daemons_before"], 0);
    }
    assert_eq!(std::fs::read_to_string(path("data")).unwrap(), "data");
    // Sockets of its own are no obstacle, also those that it does not hand over.
    drop(taken);
    configure(&metrics(free_port()));
    for daemons in 1..3 {
        let answer = upgrade();
        assert_eq!(answer["upgrading"]["sessions"], 1, "{answer}");
        until("the next program serves", || row(&server, "local")["daemons_before"] == daemons);
        local.call(&SessionInfo {}).unwrap();
    }
}

#[test]
fn what_a_principal_holds_is_counted_across_daemons_and_a_request_waits_for_the_next_one() {
    let service = Service::new(&["--client-memory-limit=64M"]);
    let mut server = service.start();
    let mut first = LocalBridge::connect(&server.socket());
    let mut second = LocalBridge::connect(&server.socket());
    grow(&mut first, 0, 40 * MIB).unwrap();
    server = service.crash(server);
    assert_eq!(grow(&mut second, 0, 26 * MIB), Err(Status::OUT_OF_MEMORY));
    grow(&mut second, 0, 20 * MIB).unwrap();
    server.end(Signal::SIGKILL);
    // Sent while there is no daemon, and answered by the next one.
    let seq = second.send(1, &MemGrow { device: 0, address: window(0) + 20 * MIB, size: 4 * MIB });
    server = service.start();
    assert_eq!(second.wait(1, seq).0, Status::SUCCESS);
    assert_eq!(grow(&mut second, 24 * MIB, 2 * MIB), Err(Status::OUT_OF_MEMORY));
    drop(first);
    until("its memory is free", || grow(&mut second, 24 * MIB, 40 * MIB).is_ok());
    server.signal(Signal::SIGUSR2);
    until("the next program serves", || row(&server, "local")["daemons_before"] == 3);
    assert_eq!(grow(&mut second, 64 * MIB, 2 * MIB), Err(Status::OUT_OF_MEMORY));
}

#[test]
fn a_session_whose_worker_died_meanwhile_is_lost_and_its_client_hears_why() {
    let service = Service::new(&[]);
    let mut server = service.start();
    let tcp = TcpSession::connect(server.port);
    let mut neighbor = LocalBridge::connect(&server.socket());
    let worker = row(&server, "tcp")["worker"].clone();
    server.end(Signal::SIGKILL);
    kill(Pid::from_raw(worker.as_i64().unwrap() as i32), Signal::SIGKILL).unwrap();
    until("it is gone or nobody's", || {
        let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    });
    let server = service.start();
    let resume = tcp.hello(purpose::RESUME, 1, 0);
    until("the loss is noticed", || server.sessions() == 1);
    let welcome = greet(connect_tcp(server.port).unwrap(), &resume).unwrap();
    let reason = untext(&welcome.reason);
    assert_eq!(Answer::from_number(welcome.status), Answer::Denied);
    assert!(reason.contains("worker") && !reason.contains("no session has this token"), "{reason}");
    assert_eq!(server.number("sessions_lost"), 1);
    neighbor.call(&SessionInfo {}).unwrap();
}

#[test]
fn secrets_count_under_the_next_daemon_and_lies_about_sessions_reach_nobody() {
    let service = Service::new(&[]);
    let server = service.start();
    let mut tcp = TcpSession::connect(server.port);
    let mut local = LocalBridge::connect(&server.socket());
    let server = service.crash(server);
    let right = tcp.hello(purpose::RESUME, 1, 0);
    let mut wrong = right;
    wrong.secret[0] ^= 1;
    let mut other = right;
    other.token[3] ^= 1;
    let none = Hello { secret: [0; 32], ..right };
    for purpose in [purpose::RESUME, purpose::DATA, purpose::END] {
        for lie in [wrong, other, none] {
            let welcome = greet(connect_tcp(server.port).unwrap(), &Hello { purpose, ..lie }).unwrap();
            let reason = untext(&welcome.reason);
            assert!(reason.contains("no session has this token"), "{reason}");
        }
    }
    // Data connections beyond those agreed on are refused, as before.
    let more = Hello { purpose: purpose::DATA, attempt: 0, ..right };
    let welcome = greet(connect_tcp(server.port).unwrap(), &more).unwrap();
    assert!(untext(&welcome.reason).contains("has all of its"), "{}", untext(&welcome.reason));
    tcp.call(&SessionInfo {}).unwrap();
    local.call(&SessionInfo {}).unwrap();
    // And a client with the secret is trusted.
    let end = Hello { purpose: purpose::END, ..right };
    assert_eq!(greet(connect_tcp(server.port).unwrap(), &end).unwrap().status, 0);
    until("it has ended", || server.sessions() == 1);
}

#[test]
fn a_second_daemon_does_not_begin_and_nonsense_among_what_is_kept_harms_nobody() {
    let service = Service::new(&[]);
    let server = service.start();
    let mut local = LocalBridge::connect(&server.socket());
    let second = Command::new(binary())
        .arg(format!("--listen=unix:{}", server.socket().display()))
        .args(["--backend=software"])
        .output()
        .unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(!second.status.success() && said.contains("another process does already"), "{said}");
    for (name, fd) in [
        ("worker-1-record", memfd(4096)),
        ("worker-1-socket", memfd(1)),
        ("worker-x-record", memfd(0)),
        ("worker-7-meter", memfd(0)),
        ("share-zz", memfd(0)),
        ("share-00000000000000000000000000000000-1-event", memfd(4096)),
        ("listen-tcp_elsewhere_1", memfd(0)),
        ("daemon-not", memfd(0)),
    ] {
        service.manager.put(name, fd);
    }
    let server = service.crash(server);
    assert_eq!(server.sessions(), 1);
    local.call(&SessionInfo {}).unwrap();
    let left = service.manager.names();
    let own = format!("worker-{}-", row(&server, "local")["worker"]);
    assert!(
        left.iter().filter(|name| name.starts_with("worker-")).all(|name| name.starts_with(&own)),
        "{left:?}"
    );
    assert!(!left.iter().any(|name| name.starts_with("share-") || name.contains("elsewhere")), "{left:?}");
}

#[test]
fn a_service_manager_hears_when_the_server_serves_and_when_it_ends() {
    let service = Service::new(&["--drain-seconds=100", "--grace-seconds=0"]);
    let mut expected = vec!["READY=1"];
    let hears = |expected: &[&str]| until("the state is heard", || service.manager.said() == expected);
    let mut server = service.spawn(binary());
    hears(&expected);
    // Every socket is there, without waiting for anything else.
    assert_eq!(server.sessions(), 0);
    assert_eq!(server.ask(json!({ "version": {} }))["sessions"], 0);
    let local = LocalBridge::connect(&server.socket());
    let tcp = TcpSession::connect(server.port);
    for signal in [Signal::SIGHUP, Signal::SIGUSR2] {
        server.signal(signal);
        expected.extend(["RELOADING=1", "READY=1"]);
        hears(&expected);
        assert_eq!(server.sessions(), 2);
    }
    // systemd would kill it after TimeoutStopSec.
    server.signal(Signal::SIGTERM);
    expected.push("EXTEND_TIMEOUT_USEC=127000000");
    hears(&expected);
    drop((local, tcp));
    assert!(server.wait().success());
    expected.push("STOPPING=1");
    assert_eq!(service.manager.said(), expected);
}

#[test]
fn a_drained_server_is_not_upgraded() {
    let server = Server::start(&["--drain-seconds=60"]);
    let local = LocalBridge::connect(&server.socket());
    server.signal(Signal::SIGTERM);
    until("it drains", || server.status()["draining"] == true);
    let answer = server.ask(json!({ "upgrade": {} }));
    assert!(answer["error"].as_str().unwrap().contains("shutting down"), "{answer}");
    drop(local);
}
