//! What each client may use: memory quotas, exclusive devices, shares of a device's time.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use protocol::Status;
use protocol::data::{HostIn, HostOut};
use protocol::device::Answer;
use protocol::handle::*;
use protocol::ops::Op;
use protocol::ops::array::{ArrayCreate, ArrayPlace, ArrayShape, MemcpyArray};
use protocol::ops::context::*;
use protocol::ops::copy::Pitched;
use protocol::ops::device::*;
use protocol::ops::launch::Launch;
use protocol::ops::memory::*;
use protocol::ops::module::*;
use protocol::ops::nvml::{self, NvmlProcess, NvmlProcesses, NvmlQuery};
use protocol::ops::stream::StreamSynchronize;
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession, Waiting};
use test_kit::*;

const MIB: u64 = 1 << 20;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const HEAP: u32 = 2;

fn grow<S: Session>(s: &mut S, device: u32, at: u64, bytes: u64) -> Result<(), Status> {
    s.call(&MemGrow { device, address: window(device) + at, size: bytes }).map(|_| ())
}

/// Free and total bytes of a device, in MiB.
fn info<S: Session>(s: &mut S, device: u32) -> (u64, u64) {
    let reply = s.call(&MemGetInfo { device }).unwrap();
    (reply.free / MIB, reply.total / MIB)
}

/// Free and total bytes of a device according to NVML, in MiB.
fn nvml_info<S: Session>(s: &mut S, device: u32) -> (u64, u64) {
    let query = NvmlQuery { device, query: nvml::MEMORY.number, arguments: [0; 3], input: &[] };
    let output = s.call(&query).unwrap().output.0;
    let word = |at: usize| u64::from_le_bytes(output[at * 8..at * 8 + 8].try_into().unwrap()) / MIB;
    (word(1), word(0))
}

#[test]
fn two_sessions_of_a_client_share_its_quota_and_see_what_the_other_holds() {
    let server = Server::start(&["--client-memory-limit=64M"]);
    let mut first = LocalBridge::connect(&server.socket());
    let mut second = LocalBridge::connect(&server.socket());
    let mut nvml = Waiting::ask(&server.socket(), protocol::link::wish::NVML_ONLY).served().0.unwrap();
    let mut other = TcpSession::connect(server.port);
    assert_eq!(second.call(&DeviceInfo { device: 0 }).unwrap().total_memory, 64 * MIB);
    grow(&mut first, 0, 0, 40 * MIB).unwrap();
    for free in [info(&mut first, 0), info(&mut second, 0), nvml_info(&mut nvml, 0)] {
        assert_eq!(free, (24, 64));
    }
    assert_eq!(grow(&mut second, 0, 0, 26 * MIB), Err(Status::OUT_OF_MEMORY));
    grow(&mut second, 0, 0, 24 * MIB).unwrap();
    assert_eq!(grow(&mut first, 0, 40 * MIB, 2 * MIB), Err(Status::OUT_OF_MEMORY));
    // Another client has its own quota.
    grow(&mut other, 0, 0, 64 * MIB).unwrap();
    assert_eq!(info(&mut other, 0), (0, 64));
    drop(first);
    until("its memory is free", || info(&mut second, 0) == (40, 64));
    grow(&mut second, 0, 24 * MIB, 40 * MIB).unwrap();
}

/// What NVML lists on a device for processes of a namespace: process ids, and MiB.
fn processes<S: Session>(s: &mut S, device: u32, namespace: u64) -> Vec<(u32, u64)> {
    let reply = s.call(&NvmlProcesses { device, namespace }).unwrap();
    assert_eq!(reply.status, nvml::status::SUCCESS);
    reply.processes.iter().map(|NvmlProcess { pid, memory }| (*pid, memory / MIB)).collect()
}

#[test]
fn nvml_lists_the_programs_that_hold_memory_on_a_device_to_their_own_kind() {
    let server = Server::start(&["--software-devices=2"]);
    let mut nvml = Waiting::ask(&server.socket(), protocol::link::wish::NVML_ONLY).served().0.unwrap();
    let mut first = LocalBridge::connect(&server.socket());
    let mut second = LocalBridge::connect(&server.socket());
    // Of another host, in a namespace that has the same number there.
    let mut other = TcpSession::connect(server.port);
    first.push(&ProcessNamespace { namespace: 7 });
    second.push(&ProcessNamespace { namespace: 8 });
    other.push(&ProcessNamespace { namespace: 7 });
    grow(&mut first, 1, 0, 40 * MIB).unwrap();
    grow(&mut second, 0, 0, 20 * MIB).unwrap();
    grow(&mut other, 1, 0, 60 * MIB).unwrap();
    // All are sessions of this process.
    let pid = std::process::id();
    assert_eq!(processes(&mut nvml, 1, 7), [(pid, 40)]);
    assert_eq!(processes(&mut nvml, 0, 8), [(pid, 20)]);
    assert_eq!(processes(&mut first, 1, 7), [(pid, 40)]);
    for (device, namespace) in [(0, 7), (1, 8), (1, 0), (1, 9)] {
        assert_eq!(processes(&mut nvml, device, namespace), []);
    }
    let unknown = nvml.call(&NvmlProcesses { device: 2, namespace: 7 }).unwrap();
    assert_eq!(unknown.status, nvml::status::INVALID_ARGUMENT);
    // A process with several sessions is listed once, and one that has ended not at all.
    let mut third = LocalBridge::connect(&server.socket());
    third.push(&ProcessNamespace { namespace: 7 });
    grow(&mut third, 1, 0, 2 * MIB).unwrap();
    assert_eq!(processes(&mut nvml, 1, 7), [(pid, 42)]);
    drop((first, third));
    until("they are gone", || processes(&mut nvml, 1, 7).is_empty());
}

#[test]
fn a_limit_holds_on_each_device() {
    let server = Server::start(&["--memory-limit=32M", "--software-devices=2"]);
    let mut s = LocalBridge::connect(&server.socket());
    for device in [0, 1] {
        grow(&mut s, device, 0, 20 * MIB).unwrap();
        assert_eq!(grow(&mut s, device, 20 * MIB, 14 * MIB), Err(Status::OUT_OF_MEMORY));
        assert_eq!((info(&mut s, device), nvml_info(&mut s, device)), ((12, 32), (12, 32)));
    }
}

#[test]
fn an_allocator_with_expandable_segments_runs_within_the_quota_and_ends_at_it() {
    let server = Server::start(&["--client-memory-limit=32M"]);
    let mut s = TcpSession::connect(server.port);
    s.call(&AddressReserve { address: SPACE, size: 256 * MIB }).unwrap();
    // As PyTorch does: segments of 2 MiB grow until there is no memory; then all are freed and come again.
    for _ in 0..3 {
        let mut made = 0;
        let end = loop {
            let memory = MemoryId(made + 1);
            let created = s.call(&MemoryCreate { device: 0, memory, size: 2 * MIB, exportable: false });
            if let Err(status) = created {
                break status;
            }
            let (address, size) = (SPACE + u64::from(made) * 2 * MIB, 2 * MIB);
            s.call(&MemoryMap { memory, offset: 0, address, size }).unwrap();
            s.call(&MemoryAccess { device: 0, address, size, flags: 3 }).unwrap();
            made += 1;
        };
        assert_eq!((end, made, info(&mut s, 0)), (Status::OUT_OF_MEMORY, 16, (0, 32)));
        for n in 0..made {
            s.call(&MemoryUnmap { address: SPACE + u64::from(n) * 2 * MIB, size: 2 * MIB }).unwrap();
            s.call(&MemoryRelease { memory: MemoryId(n + 1) }).unwrap();
        }
        until("all is free again", || info(&mut s, 0) == (32, 32));
    }
    assert_eq!(s.error(0), None, "an ordinary error, which leaves the context as it was");
}

#[test]
fn code_and_heaps_count_as_well() {
    const PTX: &str = concat!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .global .align 4 .b8 big[16777216];\n",
        ".visible .entry nothing() { ret; }\n\0"
    );
    let server = Server::start(&["--memory-limit=40M"]);
    let mut s = LocalBridge::connect(&server.socket());
    let load = |s: &mut LocalBridge, number: u32| {
        let (room, image) = (s.arena(4 << 20, &[0; 4096]), s.arena(0, PTX.as_bytes()));
        let module = ModuleId(number);
        let (image, info) = (HostIn::Range(image), HostOut(room));
        s.call(&ModuleLoad { context: ContextId(0), module, options: vec![], image, info }).map(|_| ())
    };
    load(&mut s, 1).unwrap();
    let (free, total) = info(&mut s, 0);
    assert!(free <= 24 && total == 40, "{free} {total}");
    load(&mut s, 2).unwrap();
    assert_eq!(load(&mut s, 3), Err(Status::OUT_OF_MEMORY));
    let heap = |value| ContextSetLimit { context: ContextId(0), limit: HEAP, value };
    assert_eq!(s.call(&heap(9 * MIB)).err(), Some(Status::OUT_OF_MEMORY));
    s.call(&heap(6 * MIB)).unwrap();
    s.call(&heap(5 * MIB)).unwrap();
    assert_eq!(info(&mut s, 0).0, free - 16 - 5);
    s.push(&ModuleUnload { module: ModuleId(1) });
    load(&mut s, 3).unwrap();
    s.call(&PrimaryReset { device: 0 }).unwrap();
    assert_eq!(info(&mut s, 0), (40, 40));
}

#[test]
fn mirrors_of_page_locked_memory_have_a_limit_of_their_own() {
    let server = Server::start(&["--client-pinned-limit=4M"]);
    let mut first = TcpSession::connect(server.port);
    let mut second = TcpSession::connect(server.port);
    let address = |n: u64| 0x7000_0000_0000 + n * 4 * MIB;
    let at = |n: u64| HostMirror { context: ContextId(0), address: address(n), size: 2 * MIB };
    first.call(&at(0)).unwrap();
    second.call(&at(0)).unwrap();
    assert_eq!(second.call(&at(1)).err(), Some(Status::OUT_OF_MEMORY));
    first.push(&HostUnmap { context: ContextId(0), address: address(0) });
    until("it is given back", || second.call(&at(1)).is_ok());
}

#[test]
fn a_client_has_no_more_sessions_than_its_limit() {
    let server = Server::start(&["--client-sessions=1"]);
    let first = LocalBridge::connect(&server.socket());
    let refusal = LocalBridge::try_connect(&server.socket()).err().unwrap();
    assert!(refusal.contains("maximum of 1 session"), "{refusal}");
    let _other_client = TcpSession::connect(server.port);
    drop(first);
    until("the first has ended", || server.sessions() == 1);
    LocalBridge::connect(&server.socket());
}

#[test]
fn exclusive_devices_serve_one_client_at_a_time_and_others_wait_or_are_told_why() {
    let server = Server::start(&["--sharing=exclusive", "--software-devices=2"]);
    let device = |server: &Server, n: usize| server.status()["sessions"][n]["devices"].clone();
    let mut local = LocalBridge::connect(&server.socket());
    assert_eq!(local.call(&SessionInfo {}).unwrap().device_count, 1);
    assert_eq!(device(&server, 0), "0");
    // The same client's next session has the same device; another client's has the other one.
    let second = LocalBridge::connect(&server.socket());
    let tcp = TcpSession::connect(server.port);
    let devices = |server: &Server| {
        let mut all: Vec<String> = (0..3).map(|n| device(server, n).as_str().unwrap().to_owned()).collect();
        all.sort();
        all
    };
    assert_eq!(devices(&server), ["0", "0", "1"]);
    assert_eq!(server.sessions(), 3);
    drop((second, tcp, local));
    until("all have ended", || server.sessions() == 0);

    let server = Server::start(&["--sharing=exclusive", "--wait-seconds=5"]);
    // Without one, the refusal would say that there was none.
    let is_ready = || until("a worker is ready", || server.number("workers_ready") > 0);
    is_ready();
    let local = LocalBridge::connect(&server.socket());
    is_ready();
    let refusal = TcpSession::try_connect(server.port).err().unwrap();
    assert!(refusal.contains("for itself"), "{refusal}");
    drop(local);
    until("its device is free", || server.sessions() == 0 && server.number("workers_ready") > 0);
    TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_session_that_only_queries_begins_when_nobody_has_the_devices_for_himself_any_more() {
    let server = Server::start(&["--sharing=exclusive", "--wait-seconds=120"]);
    let tcp = TcpSession::connect(server.port);
    let nvml = Waiting::ask(&server.socket(), protocol::link::wish::NVML_ONLY);
    assert_eq!(Answer::from_number(nvml.heard().status), Answer::Waiting);
    drop(tcp);
    let (served, _) = nvml.served();
    assert_eq!(nvml_info(&mut served.unwrap(), 0), (256, 256));
}

/// The client over the Unix socket, and the one over TCP.
fn clients() -> [String; 2] {
    [format!("uid:{}", nix::unistd::geteuid()), "insecure:127.0.0.1".into()]
}

/// A file with a rule for each of [`clients`], and the flag that names it.
fn rules(of_clients: [&str; 2]) -> (tempfile::NamedTempFile, String) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for (name, rule) in clients().iter().zip(of_clients) {
        writeln!(file, "[[client]]\nname = \"{name}\"\n{rule}").unwrap();
    }
    let flag = format!("--clients={}", file.path().display());
    (file, flag)
}

/// The devices of each of [`clients`]'s sessions, in no order.
fn devices(server: &Server) -> [Vec<String>; 2] {
    let status = server.status();
    clients().map(|name| {
        let rows = status["sessions"].as_array().unwrap().iter();
        let own = rows.filter(|row| row["principal"] == name.as_str());
        own.map(|row| row["devices"].as_str().unwrap().to_owned()).collect()
    })
}

#[test]
fn one_client_has_a_device_for_itself_while_others_share_the_rest() {
    let (_file, flag) = rules(["sharing = \"exclusive\"", ""]);
    let server = Server::start(&["--software-devices=3", "--wait-seconds=5", &flag]);
    // A session waits for five seconds at most, so each one finds a worker that is ready.
    let is_ready = || until("a worker is ready", || server.number("workers_ready") > 0);
    let connect_locally = || {
        is_ready();
        LocalBridge::connect(&server.socket())
    };
    let connect_over_tcp = || {
        is_ready();
        TcpSession::connect(server.port)
    };
    // It has the first device; the others' sessions have the rest, and each device has its own memory.
    let mut local = connect_locally();
    let mut tcp = [(); 2].map(|()| connect_over_tcp());
    let mut second = connect_locally();
    assert_eq!(devices(&server), [["0"; 2], ["1,2"; 2]]);
    let exclusive = || {
        let status = server.status();
        let rows = status["principals"].as_array().unwrap().iter();
        rows.map(|row| (row["principal"].clone(), row["exclusive"].clone())).collect::<Vec<_>>()
    };
    let [own, other] = clients();
    assert_eq!(exclusive(), [(other.into(), false.into()), (own.into(), true.into())]);
    for (session, count) in [(&mut local, 1), (&mut second, 1)] {
        assert_eq!(session.call(&SessionInfo {}).unwrap().device_count, count);
    }
    grow(&mut local, 0, 0, 200 * MIB).unwrap();
    for session in &mut tcp {
        assert_eq!(session.call(&SessionInfo {}).unwrap().device_count, 2);
        grow(session, 0, 0, 100 * MIB).unwrap();
        grow(session, 1, 0, 200 * MIB).unwrap();
    }
    // Its device serves others again once its last session has ended, and not before.
    drop(local);
    until("its first session has ended", || server.sessions() == 3);
    let third = connect_over_tcp();
    assert_eq!(devices(&server), [vec!["0"], vec!["1,2"; 3]]);
    drop((second, third));
    until("both have ended", || server.sessions() == 2);
    let all = connect_over_tcp();
    let mut of_others = devices(&server)[1].clone();
    of_others.sort();
    assert_eq!(of_others, ["0,1,2", "1,2", "1,2"]);
    // Others use all devices now, so it has to wait, and the refusal says for what.
    is_ready();
    let refusal = LocalBridge::try_connect(&server.socket()).err().unwrap();
    assert!(
        refusal.contains("it needs 1 of devices 0, 1, 2 for itself, and 0 are free of others"),
        "{refusal}"
    );
    drop(all);
    until("a device is free", || server.sessions() == 2);
    let _local = connect_locally();
    assert_eq!(devices(&server), [vec!["0"], vec!["1,2"; 2]]);
}

/// Launches kernels of `blocks` blocks until `over`, never running out of work.
fn keep_busy<S: Session>(mut s: S, blocks: u32, over: &AtomicBool) {
    const PTX: &str = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0";
    let (room, image) = (s.arena(4 << 20, &[0; 4096]), s.arena(0, PTX.as_bytes()));
    let (image, info) = (HostIn::Range(image), HostOut(room));
    let load = ModuleLoad { context: ContextId(0), module: ModuleId(1), options: vec![], image, info };
    s.call(&load).unwrap();
    let launch = Launch {
        function: FunctionId::new(ModuleId(1), 0),
        stream: StreamId(0),
        grid: [blocks, 1, 1],
        block: [1; 3],
        dynamic_shared: 0,
        attributes: vec![],
        params: &[],
    };
    repeat(s, &launch, over);
}

/// Copies from one array to another until `over`, never running out of work.
fn keep_copying<S: Session>(mut s: S, over: &AtomicBool) {
    let shape = ArrayShape { width: 8, height: 0, depth: 0, format: 0x20, channels: 1, flags: 0 };
    let [src, dst] = [1, 2].map(|id| {
        let (array, shape) = (ArrayId(id), shape.clone());
        s.call(&ArrayCreate { context: ContextId(0), array, shape, levels: 0 }).unwrap();
        let memory = Pitched { address: 0, pitch: 0, slice: 0 };
        ArrayPlace { array: Some(array), at: [0; 3], memory }
    });
    repeat(s, &MemcpyArray { stream: StreamId(0), dst, src, extent: [32, 1, 1] }, over);
}

/// Gives the default stream one piece of work after the other until `over`.
fn repeat<'a, S: Session>(mut s: S, work: &impl Op<'a>, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        for _ in 0..500 {
            s.push(work);
        }
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    }
    assert_eq!(s.error(0), None);
}

/// Milliseconds of device time charged to each of [`clients`]; 0 without a session.
fn charged(server: &Server) -> [u64; 2] {
    let status = server.status();
    let rows = status["principals"].as_array().unwrap();
    clients().map(|name| {
        let row = rows.iter().find(|row| row["principal"] == name.as_str());
        row.map_or(0, |row| row["gpu_ms_shared"].as_u64().unwrap())
    })
}

/// A block takes a millisecond of imitated time, so that counters decide and not the clock. Unreported time
/// does not pass, so a session that has its turn must continue or end.
const IMITATED: &str = "--software-imitate=block-us=1000";

/// Tells threads of a test to end, also if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The share in percent that the client over the Unix socket has in ten seconds of device time, with two
/// sessions that launch kernels of 1 ms, beside one over TCP with kernels of 10 ms.
fn share_of_the_first(server: &Server) -> f64 {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&over);
        for _ in 0..2 {
            let session = LocalBridge::connect(&server.socket());
            scope.spawn(|| keep_busy(session, 1, &over));
        }
        let session = TcpSession::connect(server.port);
        scope.spawn(|| keep_busy(session, 10, &over));
        until("both have had their turns", || charged(server).iter().all(|ms| *ms > 100));
        let before = charged(server);
        let had =
            || -> Vec<u64> { charged(server).iter().zip(&before).map(|(now, then)| now - then).collect() };
        until("they have had ten seconds together", || had().iter().sum::<u64>() > 10_000);
        let had = had();
        had[0] as f64 * 100.0 / had.iter().sum::<u64>() as f64
    })
}

#[test]
fn clients_share_a_device_by_weight_whatever_their_kernels_and_however_many_sessions_they_have() {
    for (weights, expected) in
        [(["", ""], 50.0), (["weight = 300", "weight = 100"], 75.0), (["weight = 100", "weight = 300"], 25.0)]
    {
        let (_file, rules) = rules(weights);
        let share = share_of_the_first(&Server::start(&[IMITATED, &rules]));
        assert!((share - expected).abs() <= 3.0, "{share} % instead of {expected}");
    }
}

#[test]
fn copies_between_arrays_take_turns_with_kernels() {
    let server = Server::start(&[IMITATED]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&over);
        let session = LocalBridge::connect(&server.socket());
        scope.spawn(|| keep_copying(session, &over));
        let session = TcpSession::connect(server.port);
        scope.spawn(|| keep_busy(session, 1, &over));
        until("both have had their turns", || charged(&server).iter().all(|ms| *ms > 1000));
    });
}

#[test]
fn memory_of_a_client_that_waits_for_its_turn_leaves_for_one_with_a_higher_priority() {
    // More than half of a device.
    let most = || MemGrow { device: 0, address: window(0), size: 152 << 20 };
    let (_file, rules) = rules(["", "priority = 1"]);
    let server = Server::start(&[IMITATED, &rules, "--swap-memory=1G", "--swap-residency-ms=1"]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&over);
        let mut low = LocalBridge::connect(&server.socket());
        low.call(&most()).unwrap();
        scope.spawn(|| keep_busy(low, 1, &over));
        let high = TcpSession::connect(server.port);
        scope.spawn(|| keep_busy(high, 1, &over));
        until("the first waits for the second", || charged(&server)[1] > 100);
        let mut other = TcpSession::connect(server.port);
        assert_eq!(other.call(&most()).map(drop), Ok(()));
        let away = server.status()["swap"]["away"].as_u64().unwrap();
        assert_eq!(away, 152 << 20, "it does not return before its turn");
    });
}

/// Starts the client with the lower priority, then the other one. While that has work, it gets all of the
/// time; then the first continues.
fn the_second_comes_first<L: Session + Send, H: Session + Send>(
    server: &Server,
    low: (usize, impl Fn(&Server) -> L),
    high: (usize, impl Fn(&Server) -> H),
) {
    let (over, high_is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let commands = |client: usize| {
        let status = server.status();
        let row = status["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["principal"] == clients()[client].as_str());
        row.map_or(0, |row| row["commands"].as_u64().unwrap())
    };
    std::thread::scope(|scope| {
        let _ends = [Ends(&over), Ends(&high_is_over)];
        let session = low.1(server);
        scope.spawn(|| keep_busy(session, 1, &over));
        until("the first works", || commands(low.0) > 1000);
        let session = high.1(server);
        let second = scope.spawn(|| keep_busy(session, 1, &high_is_over));
        until("the second has the device", || charged(server)[high.0] > 1000);
        let before = charged(server);
        until("it has had ten seconds more", || charged(server)[high.0] > before[high.0] + 10_000);
        let had = charged(server)[low.0] - before[low.0];
        // What it had launched before. Half of the time would be as much as the second had.
        assert!(had < 1000, "the client with the lower priority had {had} ms meanwhile");
        high_is_over.store(true, Ordering::Relaxed);
        second.join().unwrap();
        let before = commands(low.0);
        until("the first goes on", || commands(low.0) > before + 1000);
    });
}

#[test]
fn a_client_with_a_higher_priority_comes_first_and_the_others_go_on_when_it_has_no_work() {
    let local = |server: &Server| LocalBridge::connect(&server.socket());
    let tcp = |server: &Server| TcpSession::connect(server.port);
    let (_file, flag) = rules(["priority = -1", "priority = 1"]);
    the_second_comes_first(&Server::start(&[IMITATED, &flag]), (0, local), (1, tcp));
    let (_file, flag) = rules(["priority = 1", "weight = 1000"]);
    the_second_comes_first(&Server::start(&[IMITATED, &flag]), (1, tcp), (0, local));
}

#[test]
fn a_client_whose_kernel_runs_on_has_work_even_if_it_says_nothing_more() {
    let server = Server::start(&[]);
    let over = AtomicBool::new(false);
    let mut silent = LocalBridge::connect(&server.socket());
    // Nobody else is there yet, so nothing is counted.
    run_endlessly(&mut silent);
    std::thread::scope(|scope| {
        let session = TcpSession::connect(server.port);
        scope.spawn(|| keep_busy(session, 1, &over));
        until("both are charged", || charged(&server).iter().filter(|ms| **ms > 100).count() == 2);
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_client_that_is_alone_is_not_measured() {
    let server = Server::start(&[IMITATED]);
    let over = AtomicBool::new(false);
    let mut idle = TcpSession::connect(server.port);
    idle.call(&SessionInfo {}).unwrap();
    std::thread::scope(|scope| {
        let session = LocalBridge::connect(&server.socket());
        scope.spawn(|| keep_busy(session, 1, &over));
        let commands = || {
            server.status()["sessions"]
                .as_array()
                .unwrap()
                .iter()
                .map(|s| s["commands"].as_u64().unwrap())
                .max()
        };
        until("it has worked", || commands() > Some(5_000));
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(charged(&server).iter().sum::<u64>(), 0);
}

/// A kernel attribute of the first device.
fn attribute<S: Session>(s: &mut S, number: u32) -> Option<i32> {
    let info = s.call(&DeviceInfo { device: 0 }).unwrap();
    info.attributes.iter().find(|a| a.attribute == number).map(|a| a.value)
}

/// `CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT`.
const KERNEL_EXEC_TIMEOUT: u32 = 17;

/// Waits for what the watchdog does to a session whose kernel never ends.
fn overruns<S: Session>(mut s: S) {
    until("the program has CUDA's error", || s.error(0) == Some((Status::LAUNCH_TIMEOUT, true)));
    until("the session is lost", || s.lost().is_some());
    let why = s.lost().unwrap();
    assert!(why.contains("more than 20 s") && why.contains("--kernel-seconds"), "{why}");
}

#[test]
fn a_kernel_that_runs_for_too_long_is_ended_with_its_session_and_its_neighbors_go_on() {
    // Long enough for empty kernels, however busy this machine is.
    let server = Server::start(&["--kernel-seconds=20"]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut neighbor = TcpSession::connect(server.port);
        assert_eq!(attribute(&mut neighbor, KERNEL_EXEC_TIMEOUT), Some(1));
        scope.spawn(|| keep_busy(neighbor, 1, &over));
        let (mut local, mut tcp) = (LocalBridge::connect(&server.socket()), TcpSession::connect(server.port));
        run_endlessly(&mut local);
        run_endlessly(&mut tcp);
        overruns(local);
        overruns(tcp);
        until("their workers have ended", || server.sessions() == 1);
        assert_eq!(server.number("kernels_overrun"), 2);
        let commands = || server.status()["sessions"][0]["commands"].as_u64().unwrap();
        let before = commands();
        until("the neighbor goes on", || commands() > before + 1000);
        over.store(true, Ordering::Relaxed);
    });
    let log = server.log();
    assert!(log.contains("a kernel has run for 20 s") && log.contains("its session ends"), "{log}");
}

#[test]
fn a_session_that_is_lost_during_a_driver_call_is_in_the_audit_log_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit");
    let server = Server::start(&[
        "--kernel-seconds=1",
        "--software-imitate=waiting-calls",
        &format!("--audit-log={}", audit.display()),
    ]);
    let mut s = LocalBridge::connect(&server.socket());
    run_endlessly(&mut s);
    // It waits for the kernel, and the worker's dispatcher with it.
    s.send(1, &MemGrow { device: 0, address: window(0), size: 2 << 20 });
    until("the session is lost", || s.lost().is_some());
    until("its worker has ended", || server.sessions() == 0);
    let ended = || {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        events.filter(|event| event["event"] == "ended").collect::<Vec<_>>()
    };
    until("its end is written", || !ended().is_empty());
    let ended = &ended()[0];
    assert!(
        ended["lost"] == true && ended["reason"].as_str().unwrap().contains("--kernel-seconds"),
        "{ended}"
    );
}

#[test]
fn without_a_limit_a_kernel_runs_as_long_as_it_likes() {
    let server = Server::start(&[]);
    let mut s = LocalBridge::connect(&server.socket());
    assert_eq!(attribute(&mut s, KERNEL_EXEC_TIMEOUT), Some(0));
    run_endlessly(&mut s);
    assert_eq!(s.call(&SessionInfo {}).unwrap().device_count, 1);
    assert_eq!((s.error(0), s.lost()), (None, None));
}
