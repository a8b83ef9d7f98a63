//! A hostile guest replays an audit's attacks while a neighbor in another device process verifies its data.
//! Each process of the daemon stays within its limits.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use daemon::Daemon;
use guest::{CHANNEL, Guest, create, message, plain};
use protocol::channel::{Geometry, NO_SLOT, State};
use protocol::device::{Answer, CONTROL_QUEUE, DOORBELL_QUEUE, Extent, Request, request};
use test_kit::channel::{Channel, write_header};
use test_kit::native_client::NativeClient;
use test_kit::resources::{Resources, resources};
use test_kit::server::FakeServer;
use test_kit::tcp_server::TcpServer;
use test_kit::*;

/// Pieces of memory that a guest may have registered.
const PIECES: u64 = 1 << 20;
/// Guest memory for the hostile guest's large requests, after its channels.
const LARGE: u64 = 48 << 20;
/// How long a neighbor's speed is measured at a time.
const MEASURED: Duration = Duration::from_secs(4);

/// The processes that the attacks must not affect (the keeper's and the neighbor's), and the hostile guest's
/// own.
struct Watched<'a> {
    daemon: &'a Daemon,
    before: Resources,
}

impl Watched<'_> {
    fn processes(daemon: &Daemon, guests: bool) -> Vec<u32> {
        let status = daemon.status();
        let rows = status["device_processes"].as_array().unwrap();
        let chosen = rows.iter().filter(|row| row["serves"].as_str().unwrap().starts_with("vm") == guests);
        chosen.map(|row| row["process"].as_u64().unwrap() as u32).collect()
    }

    fn others(daemon: &Daemon) -> Resources {
        resources(&[vec![daemon.pid()], Self::processes(daemon, false)].concat())
    }

    /// Checks that the others hold the same as before. The keeper has a few descriptors and buffers for each
    /// of the guest's channels.
    fn check(&self, attack: &str) {
        let own = resources(&Self::processes(self.daemon, true));
        let mut more = Resources::default();
        // The keeper's threads that connect for channels end a moment after these are open.
        until(&format!("the others hold little more, after {attack}"), || {
            more = Self::others(self.daemon) - self.before;
            more.threads <= 8 && more.descriptors <= 128 && more.mappings <= 128
        });
        eprintln!("{attack}: the guest's process {own:?}; the others, beyond before: {more:?}");
        assert!(more.memory_kib <= 24 << 10, "{attack}: {more:?}");
        // Its memory includes the guest's, which it has mapped.
        assert!(own.threads <= 300 && own.descriptors <= 1024, "{attack}: {own:?}");
        assert!(own.mappings <= 65_000, "{attack}: {own:?}");
        assert!(own.memory_kib <= (64 + 96) << 10, "{attack}: {own:?}");
    }
}

/// A program of this host that sends data to the server, gets it back and compares it, until it is told to
/// stop.
fn verify(mut channel: Channel, stop: &AtomicBool, rounds: &AtomicU64) {
    const LEN: u64 = 200_000;
    while !stop.load(Ordering::Relaxed) {
        let round = rounds.load(Ordering::Relaxed);
        let bytes = pattern(LEN as usize, round + 1);
        channel.write_arena(0, &bytes);
        channel.htod(9, arena(0, LEN));
        channel.synchronize();
        channel.write_arena(0, &vec![0; LEN as usize]);
        channel.dtoh(9, arena(0, LEN));
        channel.synchronize();
        assert!(channel.read_arena(0, LEN) == bytes, "round {round}: other bytes came back");
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn register(channel: u32, region: u32, extents: &[Extent]) -> Request {
    Request { kind: request::REGISTER_MEMORY, region, ..create(channel, extents) }
}

/// Sends a request that is too large for the usual buffers.
fn ask_large(guest: &mut Guest, request: Request, extents: &[Extent]) -> (Answer, String) {
    let bytes = message(request, extents);
    let answer = guest.buffer(264);
    guest.write(LARGE, &bytes);
    let head = guest.offer(CONTROL_QUEUE, &[(LARGE, bytes.len() as u32, false), (answer, 264, true)]);
    guest.kick(CONTROL_QUEUE);
    assert_eq!(guest.wait_used(CONTROL_QUEUE), (head, 264));
    guest.reuse_buffers();
    guest.answer_at(answer)
}

/// H1: extents of one byte, each of which a host has to remember.
fn tiny_extents(guest: &mut Guest) {
    guest.create(0).synchronize();
    let extents: Vec<Extent> = (0..PIECES / 4).map(|i| Extent { addr: (40 << 20) + 2 * i, len: 1 }).collect();
    let answers: Vec<_> = (0..24).map(|n| ask_large(guest, register(0, n, &extents), &extents)).collect();
    assert_eq!(answers.iter().filter(|answer| answer.0 == Answer::Ok).count(), 4);
    for (answer, reason) in &answers[4..] {
        assert_eq!(*answer, Answer::NoResources);
        assert!(reason.contains("the limit is 1048576"), "{reason}");
    }
}

/// H2: channels of non-adjacent pages, each of which needs a mapping.
fn scattered_channels(guest: &mut Guest) {
    let geometry = Geometry::with_arena(46 << 20);
    let header = CHANNEL + (8 << 20);
    let page = |addr| Extent { addr, len: 4096 };
    let extents: Vec<Extent> = (0..geometry.size as u64 / 4096)
        .map(|i| page(header + if i == 0 { 0 } else { 0x2000 + i % 2 * 0x2000 }))
        .collect();
    guest.fill(header, 0x6000);
    write_header(&guest.memories, header, &geometry.fields(3, "scattered"));
    let mut answers = (1..30).map(|id| ask_large(guest, create(id, &extents), &extents));
    let Some((answer, reason)) = answers.find(|answer| answer.0 != Answer::Ok) else {
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let needed = 29 * extents.len();
        return assert!(
            needed < most.trim().parse().unwrap(),
            "{needed} pieces, although {most} can be mapped"
        );
    };
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("this host maps at most"), "{reason}");
}

/// Meaningless requests, chains and records.
fn rubbish(guest: &mut Guest) {
    let wild = [Extent { addr: u64::MAX - 4095, len: 8192 }];
    for round in 0..100 {
        guest.reuse_buffers();
        assert_ne!(guest.raw(&message(plain(99 + round, round), &[])).0, Answer::Ok);
        assert_eq!(guest.ask(register(0, 1000 + round, &wild), &wild).0, Answer::Invalid);
        let lie = Request { extent_count: u32::MAX, ..plain(request::REGISTER_MEMORY, 0) };
        assert_ne!(guest.raw(&message(lie, &[])).0, Answer::Ok);
    }
    guest.reuse_buffers();
    // A guest that has attacked before has it, and perhaps no room for another.
    assert_ne!(guest.ask(plain(request::DESTROY_CHANNEL, 4), &[]).0, Answer::NoResources);
    let mut bad = guest.create(4);
    bad.push_raw(0x7fff, NO_SLOT, &[]);
    guest.kick(DOORBELL_QUEUE);
    eventually(|| bad.view().header().state() == State::Lost);
}

/// M2: resets in the middle of everything.
fn resets(guest: &mut Guest) {
    for _ in 0..5 {
        guest.reset();
        guest.reuse_buffers();
        (0..3).for_each(|index| guest.start(index));
        guest.create(0).synchronize();
    }
}

/// H4: silent connections, more of them than allowed.
fn silent_connections(daemon: &Daemon) {
    let open: Vec<NativeClient> =
        (0..400).filter_map(|_| NativeClient::connect(&daemon.native()).ok()).collect();
    eventually(|| daemon.number("clients_refused") > 0);
    drop(open);
}

/// H3: memory that has disappeared when the device process touches it.
fn shrinking_memory(daemon: &Daemon, guest: Guest) {
    let file = guest.memories.files().next().unwrap().1.try_clone().unwrap();
    let process = Watched::processes(daemon, true)[0];
    nix::unistd::ftruncate(&file, 0).unwrap();
    guest.kick(DOORBELL_QUEUE);
    guest.kick(CONTROL_QUEUE);
    eventually(|| daemon.log().contains(&format!("its device process {process} was killed by SIGBUS")));
    // This process's mappings of the guest's memory, which the file no longer backs, are not touched again.
    std::mem::forget(guest);
}

type Attack = fn(&mut Guest);
const ATTACKS: [(&str, Attack); 4] = [
    ("H1, tiny extents", tiny_extents),
    ("H2, scattered channels", scattered_channels),
    ("rubbish", rubbish),
    ("M2, resets", resets),
];

/// Does something to a daemon, which gets the number of rounds that a neighbor has verified so far.
fn beside_a_neighbor(deed: fn(&Daemon, &AtomicU64)) {
    let server = FakeServer::good();
    let address = server.address.to_string();
    let arguments =
        ["--server", &address, "--name", "testvm", "--max-registered-extents", &PIECES.to_string()];
    let daemon = Daemon::start(&arguments);
    let (_client, channel) = NativeClient::with_channel(&daemon.native(), "neighbor");
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let neighbor = scope.spawn(|| verify(channel, &stop, &rounds));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| deed(&daemon, &rounds)));
        stop.store(true, Ordering::Relaxed);
        neighbor.join().unwrap();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// KiB of the files, held by the keeper, in which regions are noted for the successors of device processes.
fn noted_kib(daemon: &Daemon) -> u64 {
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    let noted = open.filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = std::fs::read_link(&path).ok()?;
        name.to_string_lossy().starts_with("/memfd:regions").then(|| std::fs::metadata(path).ok())?
    });
    noted.map(|file| (file.ino(), file.blocks() / 2)).collect::<BTreeMap<_, _>>().into_values().sum()
}

#[test]
fn extents_that_adjoin_are_remembered_as_one() {
    let server = TcpServer::start();
    let daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    let mut guest = Guest::connect(&daemon);
    guest.create(0);
    let extents: Vec<Extent> = (0..PIECES / 4).map(|i| Extent { addr: (40 << 20) + i, len: 1 }).collect();
    for region in 0..8 {
        assert_eq!(ask_large(&mut guest, register(0, region, &extents), &extents).0, Answer::Ok);
    }
    let noted = noted_kib(&daemon);
    assert!((1..=64).contains(&noted), "{noted} KiB");
}

#[test]
fn a_guest_that_replays_the_audits_attacks_harms_no_neighbor() {
    beside_a_neighbor(replay);
}

/// Prints what a neighbor verifies in a second while guests attack without a pause, beside what it does alone
/// before and after.
#[test]
#[ignore = "a measurement, for an idle machine with many processors"]
fn what_a_neighbor_loses() {
    beside_a_neighbor(|daemon, rounds| {
        let rate = |deed: &dyn Fn()| {
            let (began, before) = (Instant::now(), rounds.load(Ordering::Relaxed));
            while began.elapsed() < MEASURED {
                deed();
            }
            (rounds.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
        };
        let alone = || rate(&|| std::thread::sleep(Duration::from_millis(10)));
        let during = |name: &str, deed: &dyn Fn()| {
            let (before, meanwhile, after) = (alone(), rate(deed), alone());
            let share = 2.0 * meanwhile / (before + after);
            println!("{name}: {meanwhile:.0} rounds a second; alone {before:.0} and {after:.0}; {share:.3}");
        };
        alone();
        for (name, attack) in ATTACKS {
            during(name, &|| attack(&mut Guest::connect(daemon)));
        }
        during("H4, silent connections", &|| silent_connections(daemon));
        during("nothing", &|| std::thread::sleep(Duration::from_millis(10)));
    });
}

fn replay(daemon: &Daemon, rounds: &AtomicU64) {
    let verified = || rounds.load(Ordering::Relaxed);
    eventually(|| verified() > 20);
    let watched = Watched { daemon, before: Watched::others(daemon) };

    let mut guest = Guest::connect(daemon);
    for (name, attack) in ATTACKS {
        let before = verified();
        attack(&mut guest);
        watched.check(name);
        until("the neighbor continues", || verified() > before + 3);
    }
    silent_connections(daemon);
    watched.check("H4, silent connections");

    shrinking_memory(daemon, guest);
    let before = verified();
    until("the neighbor continues", || verified() > before + 3);

    eventually(|| daemon.log().contains("the VMM's connection ended"));
    until("the others hold what they held before", || {
        let more = Watched::others(daemon) - watched.before;
        // The allocator keeps the memory of threads that have ended.
        more.threads == 0 && more.descriptors == 0 && more.mappings <= 128
    });
    Guest::connect(daemon).create(0).synchronize();
}
