//! A worker that has been taken over: a hostile program in a worker's place, in a worker's sandbox.
//!
//! The daemon starts this program as its worker (`--worker-program`). The client's name says what the program
//! tries once it has the session; it reports to the daemon's log.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use protocol::device::text;
use protocol::link::{Hello, purpose};
use rgpu_server::confinement;
use rgpu_server::worker_protocol::{self, Counters, FromWorker, Reply, Shared, ToWorker};
use support::{Server, binary};
use test_kit::link::{greet, hello};
use test_kit::manager::Manager;
use test_kit::until;

/// Reports what was tried and how it ended.
fn report(text: &str) {
    eprintln!("HOSTILE {text}");
}

/// The hostile program.
fn worker(fd: RawFd) {
    // SAFETY: the daemon started this process with this descriptor open, and nothing else uses it.
    let daemon = unsafe { OwnedFd::from_raw_fd(fd) };
    let receive = || worker_protocol::receive::<ToWorker>(daemon.as_fd()).ok().flatten();
    let send = |message: &FromWorker, fds: &[std::os::fd::BorrowedFd<'_>]| {
        worker_protocol::send(daemon.as_fd(), message, fds).is_ok()
    };
    // Up to here, a worker runs rgpu's own code. Whoever takes it over is already inside the sandbox.
    match receive() {
        Some((ToWorker::Probe(orders), _)) => {
            send(&FromWorker::Sandbox(confinement::enter(&orders)), &[]);
            return;
        }
        Some((ToWorker::Prepare { orders, .. }, _)) => drop(confinement::enter(&orders).unwrap()),
        _ => return,
    }
    let ready = || FromWorker::Ready {
        backend: "hostile".into(),
        devices: vec!["none".into()],
        all: Vec::new(),
        free: None,
        key: identity::Fingerprint([0; 32]),
    };
    assert!(send(&ready(), &[]));
    let Some((ToWorker::Session { client, .. }, connection)) = receive() else { return };
    let (what, argument) = client.split_once(' ').unwrap_or((&client, ""));
    let token = || u128::from_str_radix(argument, 16).unwrap().to_be_bytes();
    let counters = |commands| FromWorker::Counters(Counters { commands, ..Counters::default() });
    let gone = || {
        // The daemon kills a worker that breaks the protocol.
        std::thread::sleep(Duration::from_secs(60));
        report("was not killed");
    };
    match what {
        // An honest one: it ends with its client.
        "wait" => {
            let client = UnixStream::from(connection.into_iter().next().unwrap());
            let _ = (&client).read(&mut [0]);
            let counters = Counters::default();
            send(&FromWorker::Ended { lost: None, counters }, &[]);
        }
        "reach" => reach(argument),
        "cache" => {
            let mut fds = connection.into_iter();
            let (client, cache) = (fds.next().unwrap(), fds.nth(3).map(UnixStream::from));
            let came = cache.map_or("there is none", |cache| attack_cache(&cache, argument));
            report(&format!("cache {argument}: {came}"));
            let _ = UnixStream::from(client).read(&mut [0]);
        }
        "call" => {
            report(&format!("tries call {argument}"));
            // SAFETY: the sandbox does not let these calls through.
            let result = unsafe { libc::syscall(argument.parse().unwrap(), 0, 0, 0, 0, 0, 0) };
            report(&format!("REACHED call {argument}: {result}"));
        }
        "ready" => {
            send(&ready(), &[]);
            gone();
        }
        "backwards" => {
            send(&counters(7), &[]);
            send(&counters(6), &[]);
            gone();
        }
        "failed" => {
            send(&FromWorker::Failed { reason: "it\nERROR forged".into(), full: true }, &[]);
            gone();
        }
        "probe" => {
            send(&FromWorker::Sandbox(Err("nobody asked".into())), &[]);
            gone();
        }
        // It behaves until another daemon has taken it over.
        "successor" => {
            loop {
                match receive() {
                    Some((ToWorker::TakenOver, _)) => break,
                    Some(_) => {}
                    None => return,
                }
            }
            report(&format!("was taken over and tries {argument}"));
            match argument {
                "ready" => drop(send(&ready(), &[])),
                "failed" => drop(send(&FromWorker::Failed { reason: "no".into(), full: true }, &[])),
                "backwards" => {
                    send(&counters(7), &[]);
                    send(&counters(6), &[]);
                }
                _ => drop(send(&FromWorker::Sandbox(Err("nobody asked".into())), &[])),
            }
            gone();
        }
        "flood" => {
            for count in 0..30_000 {
                send(&counters(count), &[]);
            }
            send(&counters(1), &[]);
            gone();
        }
        "garbage" => {
            let bytes = b"\xff".repeat(100_000);
            let _ =
                nix::sys::socket::send(daemon.as_raw_fd(), &bytes, nix::sys::socket::MsgFlags::MSG_NOSIGNAL);
            gone();
        }
        "share" => {
            let memory = memfd_create(c"shared", MFdFlags::empty()).unwrap();
            let what = Shared::Memory { device: 0, size: 4096 };
            send(&FromWorker::Share { request: 1, what }, &[memory.as_fd()]);
            let Some((ToWorker::Reply { reply, .. }, _)) = receive() else { return };
            report(&format!("{reply:?}"));
            drop(receive());
        }
        "steal" => {
            send(&FromWorker::Unshare { token: token() }, &[]);
            send(&FromWorker::Open { request: 2, token: token() }, &[]);
            let Some((ToWorker::Reply { reply, .. }, fds)) = receive() else { return };
            report(&format!("steals {reply:?} with {} descriptors", fds.len()));
            drop(receive());
        }
        // Connections to forbidden places, and as many tickets as it can get.
        "connect" => {
            for (request, encrypted) in [(0, true), (1, false)] {
                let address = argument.to_owned();
                send(&FromWorker::Connect { request, address, encrypted }, &[]);
                let Some((ToWorker::Reply { reply, .. }, fds)) = receive() else { return };
                report(&format!("connects: {reply:?} with {} descriptors", fds.len()));
            }
            let mut tickets = 0;
            loop {
                send(&FromWorker::Ticket { request: 2 }, &[]);
                match receive() {
                    Some((ToWorker::Reply { reply: Reply::Ticket { .. }, .. }, _)) => tickets += 1,
                    Some(_) => break,
                    None => return,
                }
            }
            report(&format!("has {tickets} tickets"));
            drop(receive());
        }
        _ => report("does not know what to do"),
    }
}

/// A worker's request to the cache: its kind (1: find, 2: keep), a length, and a hash.
fn ask_cache(mut cache: &UnixStream, kind: u32, len: u32, hash: &[u8; 32], bytes: &[u8]) {
    let request = [&kind.to_ne_bytes()[..], &len.to_ne_bytes(), hash, bytes].concat();
    cache.write_all(&request).unwrap();
}

/// Whether the cache has a block. `None`: the daemon has closed it.
fn cache_has(mut cache: &UnixStream, hash: &[u8; 32]) -> Option<bool> {
    ask_cache(cache, 1, 0, hash, &[]);
    let mut len = [0; 4];
    cache.read_exact(&mut len).ok()?;
    cache.read_exact(&mut vec![0; u32::from_ne_bytes(len) as usize]).ok()?;
    Some(u32::from_ne_bytes(len) > 0)
}

/// Tries to give the cache something that its client's next session, or another client's, would mistake for
/// other data.
fn attack_cache(cache: &UnixStream, what: &str) -> &'static str {
    let (victim, evil) = ([1; 64], [2; 64]);
    let (of_victim, of_evil) = (blake3::hash(&victim), blake3::hash(&evil));
    match what {
        "poison" => {
            ask_cache(cache, 2, 64, of_victim.as_bytes(), &evil);
            match [of_victim, of_evil].map(|hash| cache_has(cache, hash.as_bytes())) {
                [Some(false), Some(true)] => "in vain",
                _ => "REACHED",
            }
        }
        "spy" => match cache_has(cache, of_evil.as_bytes()) {
            Some(false) => "in vain",
            _ => "REACHED",
        },
        _ => {
            ask_cache(cache, 2, u32::MAX, &[0; 32], &[]);
            let mut cache = cache;
            if cache.read(&mut [0]).is_ok_and(|n| n == 0) { "in vain" } else { "REACHED" }
        }
    }
}

/// Tries to reach something outside with calls that are on the list.
fn reach(folder: &str) {
    let files = [
        "/etc/passwd",
        "/etc/ld.so.cache",
        "/usr/bin",
        "/bin/sh",
        "/root",
        "/home",
        "/run",
        "/var",
        "/sys",
        "/dev/vda",
        "/dev/mem",
        "/dev/kmsg",
        "/proc/1/mem",
        "/proc/1/environ",
        "/proc/1/root",
        "/proc/1/fd",
        "/proc/kcore",
        "/proc/kmsg",
        folder,
        // The server's key.
        &format!("{folder}/identity/key.pem"),
    ];
    for path in files {
        if std::fs::File::open(path).is_ok() {
            report(&format!("REACHED {path}"));
        }
    }
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/self/oom_score_adj",
        "/made",
        "/dev/made",
    ] {
        if std::fs::OpenOptions::new().write(true).open(path).is_ok() {
            report(&format!("REACHED {path} for writing"));
        }
    }
    // SAFETY: plain system calls; signal 0 only checks.
    unsafe {
        let own = libc::getpid();
        for pid in (1..=70_000).filter(|pid| *pid != own) {
            if libc::kill(pid, 0) == 0 {
                report(&format!("REACHED process {pid}"));
            }
        }
        for resource in [libc::RLIMIT_CORE, libc::RLIMIT_NPROC] {
            let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
            if libc::prlimit(0, resource, &limit, std::ptr::null_mut()) == 0 {
                report(&format!("REACHED limit {resource}"));
            }
        }
    }
    // It has its log, its sockets and its session's two pages, and nothing else from the daemon.
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let Ok(target) = std::fs::read_link(entry.unwrap().path()) else { continue };
        let target = target.display().to_string();
        let own = ["socket:", "/dev/null", "/proc/", "/log", "pipe:", "/memfd:rgpu session"]
            .iter()
            .any(|own| target.contains(own));
        if !own {
            report(&format!("REACHED descriptor {target}"));
        }
    }
    report("has tried everything");
}

fn start() -> Server {
    let program = std::env::current_exe().unwrap();
    Server::start_protected(&["--workers=1", &format!("--worker-program={}", program.display())])
}

/// A client whose worker tries `what`.
fn client(server: &Server, what: &str) -> UnixStream {
    let stream = UnixStream::connect(server.socket()).unwrap();
    let hello = Hello { client: text(what), ..hello(purpose::LOCAL, [0; 16], 0) };
    assert_eq!(greet(&stream, &hello).unwrap().status, 0);
    stream
}

/// The same over TCP, from this address.
fn client_at(server: &Server, address: &str, what: &str) -> TcpStream {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let at = |address: &str, port| SockaddrIn::from(SocketAddrV4::new(address.parse().unwrap(), port));
    bind(socket.as_raw_fd(), &at(address, 0)).unwrap();
    connect(socket.as_raw_fd(), &at("127.0.0.1", server.port)).unwrap();
    let stream = TcpStream::from(socket);
    let hello = Hello { client: text(what), ..hello(purpose::CONTROL, [0; 16], 1) };
    assert_eq!(greet(&stream, &hello).unwrap().status, 0);
    stream
}

fn a_worker_that_was_taken_over_reaches_nothing() {
    let server = start();
    let _neighbor = client(&server, "wait");
    let folder = server.folder().path();
    assert!(folder.join("identity/key.pem").exists());
    let _attacker = client(&server, &format!("reach {}", folder.display()));
    until("it has tried everything", || server.log().contains("HOSTILE has tried everything"));
    assert!(!server.log().contains("REACHED"), "{}", server.log());
}

fn calls_outside_the_list_end_the_worker_and_are_named() {
    let server = start();
    let calls = [
        (libc::SYS_socket, "socket"),
        (libc::SYS_connect, "connect"),
        (libc::SYS_bind, "bind"),
        (libc::SYS_ptrace, "ptrace"),
        (libc::SYS_process_vm_readv, "process_vm_readv"),
        (libc::SYS_process_vm_writev, "process_vm_writev"),
        (libc::SYS_pidfd_getfd, "pidfd_getfd"),
        (libc::SYS_pidfd_open, "pidfd_open"),
        (libc::SYS_execve, "execve"),
        (libc::SYS_execveat, "execveat"),
        (libc::SYS_fork, "fork"),
        (libc::SYS_vfork, "vfork"),
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_setns, "setns"),
        (libc::SYS_mount, "mount"),
        (libc::SYS_pivot_root, "pivot_root"),
        (libc::SYS_chroot, "chroot"),
        (libc::SYS_bpf, "bpf"),
        (libc::SYS_io_uring_setup, "io_uring_setup"),
        (libc::SYS_userfaultfd, "userfaultfd"),
        (libc::SYS_perf_event_open, "perf_event_open"),
        (libc::SYS_keyctl, "keyctl"),
        (libc::SYS_shmget, "shmget"),
        (libc::SYS_mq_open, "mq_open"),
        (libc::SYS_open_by_handle_at, "open_by_handle_at"),
        (libc::SYS_setuid, "setuid"),
        (libc::SYS_init_module, "init_module"),
        (libc::SYS_reboot, "reboot"),
        (libc::SYS_personality, "personality"),
        (libc::SYS_kcmp, "kcmp"),
    ];
    for (call, name) in calls {
        let attacker = client(&server, &format!("call {call}"));
        let named = format!("system call {name} ({call})");
        until(&format!("{name} is named"), || server.log().contains(&named));
        drop(attacker);
        until("its session is over", || server.sessions() == 0);
    }
    assert!(!server.log().contains("REACHED"), "{}", server.log());
}

fn a_worker_that_breaks_the_protocol_is_killed_and_its_neighbor_goes_on() {
    let server = start();
    let neighbor = client(&server, "wait");
    let worker = server.status()["sessions"][0]["worker"].clone();
    let attacks = [
        ("ready", "reported twice that it is ready"),
        ("backwards", "counters that run backwards"),
        ("failed", "cannot start after it had started"),
        ("probe", "nobody asked"),
        ("garbage", "invalid message"),
        ("flood", "counters that run backwards"),
    ];
    for (attack, message) in attacks {
        let before = server.log().matches(message).count();
        let _attacker = client(&server, attack);
        until(attack, || server.log().matches(message).count() > before && server.sessions() == 1);
        assert_eq!(server.status()["sessions"][0]["worker"], worker);
    }
    // The pool is in order: one worker is ready for the next client, and none counts as starting.
    until("the pool is filled", || {
        (server.number("workers_ready"), server.number("workers_starting")) == (1, 0)
    });
    assert!(!server.log().contains("was not killed"));
    assert!(!server.log().lines().any(|line| line.starts_with("ERROR forged")), "{}", server.log());
    drop(neighbor);
    until("the neighbor ends by itself", || server.sessions() == 0);
}

fn a_worker_that_lies_to_the_next_daemon_is_killed_and_its_neighbor_goes_on() {
    let (manager, folder) = (Manager::new(), Arc::new(tempfile::tempdir().unwrap()));
    let port = test_kit::free_port();
    let program = format!("--worker-program={}", std::env::current_exe().unwrap().display());
    let start =
        || Server::start_by(manager.command(binary()), &folder, port, &["--workers=1", &program]).ready();
    let mut server = start();
    let neighbor = client(&server, "wait");
    let worker = server.status()["sessions"][0]["worker"].clone();
    let attacks = [
        ("ready", "reported twice that it is ready"),
        ("failed", "cannot start after it had started"),
        ("backwards", "counters that run backwards"),
        ("probe", "nobody asked"),
    ];
    for (attack, message) in attacks {
        let _attacker = client(&server, &format!("successor {attack}"));
        assert_eq!(server.sessions(), 2);
        server.end(Signal::SIGKILL);
        server = start();
        until(attack, || server.log().contains(message) && server.sessions() == 1);
        assert_eq!(server.status()["sessions"][0]["worker"], worker);
    }
    assert!(!server.log().contains("was not killed"));
    drop(neighbor);
    until("the neighbor ends by itself", || server.sessions() == 0);
}

fn a_worker_cannot_change_what_others_get_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let program = format!("--worker-program={}", std::env::current_exe().unwrap().display());
    let cache = format!("--cache={}", folder.path().join("cache").display());
    let server = Server::start(&["--workers=1", &program, &cache]);
    // All clients of an address are one principal.
    for (address, what) in
        [("127.0.0.1", "poison"), ("127.0.0.1", "break"), ("127.0.0.2", "spy"), ("127.0.0.1", "poison")]
    {
        let said = format!("HOSTILE cache {what}: in vain");
        let before = server.log().matches(&said).count();
        let _attacker = client_at(&server, address, &format!("cache {what}"));
        until(what, || server.log().matches(&said).count() > before);
    }
    let log = server.log();
    assert!(!log.contains("REACHED") && !log.contains("there is none"), "{log}");
    let cache = server.status()["cache"].clone();
    assert_eq!((&cache["bytes"], &cache["hits"]), (&64.into(), &2.into()), "{cache}");
}

fn a_worker_cannot_open_or_revoke_what_another_client_has_shared() {
    let server = start();
    let _victim = client(&server, "share");
    let token_of = |log: &str| -> Option<String> {
        let bytes = log.split("HOSTILE Shared([").nth(1)?.split(']').next()?;
        Some(bytes.split(", ").map(|byte| format!("{:02x}", byte.parse::<u8>().unwrap())).collect())
    };
    until("it has shared", || token_of(&server.log()).is_some());
    let token = token_of(&server.log()).unwrap();
    let _attacker = client(&server, &format!("steal {token}"));
    until("it is answered", || server.log().contains("HOSTILE steals"));
    assert!(server.log().contains("steals Refused(Unknown) with 0 descriptors"), "{}", server.log());
}

fn a_worker_gets_no_connection_that_the_operator_does_not_allow() {
    let (server, victim) = (start(), TcpListener::bind("127.0.0.1:0").unwrap());
    victim.set_nonblocking(true).unwrap();
    let _attacker = client(&server, &format!("connect tcp:{}", victim.local_addr().unwrap()));
    until("it has tried everything", || server.log().contains("HOSTILE has"));
    let log = server.log();
    assert_eq!(log.matches("HOSTILE connects: NotConnected").count(), 2, "{log}");
    assert!(
        log.matches("with 0 descriptors").count() == 2 && log.contains("HOSTILE has 64 tickets"),
        "{log}"
    );
    assert!(victim.accept().is_err(), "the daemon has connected");
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if words.get(1).is_some_and(|word| word == "worker") {
        return worker(words[3].parse().unwrap());
    }
    let tests: [(&str, fn()); 7] = [
        (
            "a_worker_that_lies_to_the_next_daemon_is_killed_and_its_neighbor_goes_on",
            a_worker_that_lies_to_the_next_daemon_is_killed_and_its_neighbor_goes_on,
        ),
        ("a_worker_that_was_taken_over_reaches_nothing", a_worker_that_was_taken_over_reaches_nothing),
        (
            "calls_outside_the_list_end_the_worker_and_are_named",
            calls_outside_the_list_end_the_worker_and_are_named,
        ),
        (
            "a_worker_that_breaks_the_protocol_is_killed_and_its_neighbor_goes_on",
            a_worker_that_breaks_the_protocol_is_killed_and_its_neighbor_goes_on,
        ),
        (
            "a_worker_cannot_open_or_revoke_what_another_client_has_shared",
            a_worker_cannot_open_or_revoke_what_another_client_has_shared,
        ),
        (
            "a_worker_cannot_change_what_others_get_from_the_cache",
            a_worker_cannot_change_what_others_get_from_the_cache,
        ),
        (
            "a_worker_gets_no_connection_that_the_operator_does_not_allow",
            a_worker_gets_no_connection_that_the_operator_does_not_allow,
        ),
    ];
    let trials = tests.map(|(name, test)| {
        let test = move || {
            test();
            Ok(())
        };
        Trial::test(name, test)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}
