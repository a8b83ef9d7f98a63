//! The transport `verbs` between real ends, over queue pairs that are in this process only: links that break,
//! clients that are stopped, processes of the bridge that end (`RGPU_SURVIVAL_CUTS` of each), links that are
//! silent ([`silence`]), ends that lie to each other when they resume ([`lies`]), and what a server can write
//! when ([`keys`]).

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "verbs/keys.rs"]
mod keys;
#[path = "verbs/lies.rs"]
mod lies;
#[path = "verbs/silence.rs"]
mod silence;

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use identity::{ClientFiles, Fingerprint, Identity, servers, tls};
use nix::poll::PollFd;
use nix::sys::eventfd::EventFd;
use protocol::device::{Answer, Extent};
use protocol::fuzzing::Random;
use protocol::link::{Hello, Welcome, frame, purpose};
use rgpu_host_bridge::bridge::saved::{MAX_BYTES, MAX_DESCRIPTORS, Saved};
use rgpu_host_bridge::bridge::{
    ChannelMemory, Closed, Prepared, RegionMemory, Security, Session, SessionConfig, TransportKind, Turn,
    Wakeup,
};
use rgpu_host_bridge::framing::Address;
use rgpu_host_bridge::memory::Memories;
use rgpu_host_bridge::stream::Stream;
use rgpu_host_bridge::verbs::{Access, Device, Domain, Settings, Slab, VerbsError, Windows, software};
use test_kit::channel::Channel;
use test_kit::session::{channel, read, write};
use test_kit::tcp_server::TcpServer;
use test_kit::*;
use zerocopy::{FromZeros, IntoBytes};

/// What ends when belongs to the whole process, so tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    software::install();
    one
}

struct Patient;

impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}

/// A server that welcomes a session under TLS, and on the session's own connection says nothing. Gives what
/// the bridge says there: its hello's purpose, and the kind of its first frame.
fn greets_and_listens(listener: &TcpListener, daemon: &Identity, client: Fingerprint) -> (u32, Option<u32>) {
    let worker = Identity::generate().unwrap();
    let next = |identity: &Identity| {
        let (socket, _) = listener.accept().unwrap();
        let config = tls::server_pinning(identity, client).unwrap();
        let stream = Stream::tls_server(socket.into(), &config, Instant::now() + PATIENCE).unwrap();
        let mut hello = Hello::new_zeroed();
        stream.read_exact(hello.as_mut_bytes()).unwrap();
        (stream, hello)
    };
    let (greeted, _) = next(daemon);
    let welcome = Welcome { session_key: worker.fingerprint().0, ..link::welcome(Answer::Ok, "") };
    greeted.write_all(welcome.as_bytes()).unwrap();
    let (control, hello) = next(&worker);
    (hello.purpose, control.recv_frame(&mut Vec::new()).unwrap())
}

#[test]
fn the_bridges_queue_pairs_come_with_the_hello() {
    let _one = alone();
    let (folder, listener) = (tempfile::tempdir().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let (daemon, own) = (Identity::generate().unwrap(), Identity::load_or_create(folder.path()).unwrap());
    let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
    servers::add(folder.path(), &[address.to_string()], daemon.fingerprint(), "").unwrap();
    let security = Security::Tls(Arc::new(ClientFiles { folder: folder.path().to_owned() }));
    let config = SessionConfig {
        security,
        transport: TransportKind::Verbs,
        ..SessionConfig::new(address, "test-host")
    };
    let connecting = std::thread::spawn(move || {
        let (_memories, channel) = channel(4 << 20);
        Prepared::connect(&config, &channel, &mut Patient).map(drop)
    });
    let said = greets_and_listens(&listener, &daemon, own.fingerprint());
    assert_eq!(said, (purpose::VERBS, Some(frame::QUEUES)));
    assert!(connecting.join().unwrap().is_err());
}

/// A session's processes, one after the other.
struct Bridge {
    config: SessionConfig,
    memories: Memories,
    /// The channel's extents, and its size.
    extents: Vec<Extent>,
    size: u64,
    /// What its next process needs to continue the session. `None`: the session ends with its process.
    saved: Option<Saved>,
    session: Option<Session>,
    doorbell: Arc<Mutex<Arc<EventFd>>>,
    lost: Arc<Mutex<Option<String>>>,
}

/// The regions that are registered: bytes, and whether the server may only read them.
const REGIONS: [(u64, bool); 3] = [(700_001, false), (3_000_000, true), (2_500_000, false)];

fn extents(id: u32) -> Vec<Extent> {
    vec![Extent { addr: (16 << 20) + u64::from(id) * (8 << 20) + 24, len: REGIONS[id as usize].0 }]
}

impl Bridge {
    fn begin(config: &SessionConfig, is_saved: bool) -> (Bridge, Channel) {
        // So long a new link of no use may seem to be one.
        let silence = Duration::from_secs(10);
        let config = SessionConfig { transport: TransportKind::Verbs, silence, ..config.clone() };
        let (memories, channel) = channel(4 << 20);
        let (extents, size) = (channel.extents.clone(), channel.size);
        let view = memories.view(&extents, size).unwrap();
        let lost = Arc::new(Mutex::new(None));
        let mut prepared = Prepared::connect(&config, &channel, &mut Patient).unwrap();
        let saved = is_saved.then(|| prepared.save(&channel).unwrap().unwrap());
        let opened = prepared.open().unwrap();
        let session = opened.start(channel, Wakeup::Call(Arc::new(|| {})), on_lost(&lost)).unwrap();
        let doorbell = Arc::new(Mutex::new(session.doorbell_fd().clone()));
        let rung = Arc::clone(&doorbell);
        let client = Channel::new(view, move || {
            rung.lock().unwrap().write(1).unwrap();
        });
        let session = Some(session);
        let bridge = Bridge { config, memories, extents, size, saved, session, doorbell, lost };
        for (id, (size, read_only)) in (0..).zip(REGIONS) {
            let (memories, extents) = (bridge.memories.clone(), self::extents(id));
            let region = RegionMemory { memories, extents, size, own_memory: false, read_only };
            bridge.session().register_region(id, region).unwrap();
        }
        (bridge, client)
    }

    fn session(&self) -> &Session {
        self.session.as_ref().unwrap()
    }

    /// Another process goes on, with what the one before had saved.
    fn succeed(&mut self) {
        self.session = None;
        let (bytes, descriptors) = self.saved.as_ref().unwrap().parts();
        let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        assert!(bytes.len() <= MAX_BYTES && descriptors.len() <= MAX_DESCRIPTORS);
        let saved = Saved::from_parts(&bytes, descriptors).unwrap();
        let channel = ChannelMemory::new(self.memories.clone(), self.extents.clone(), self.size).unwrap();
        let wakeup = Wakeup::Call(Arc::new(|| {}));
        let resumed =
            Session::resume(&self.config, &saved, channel, None, wakeup, on_lost(&self.lost)).unwrap();
        *self.doorbell.lock().unwrap() = resumed.doorbell_fd().clone();
        let inherited = resumed.take_inherited();
        assert_eq!(inherited.len(), REGIONS.len(), "{inherited:?}");
        resumed.doorbell_fd().write(1).unwrap();
        self.session = Some(resumed);
    }

    fn lost(&self) -> Option<String> {
        self.lost.lock().unwrap().clone()
    }
}

fn on_lost(lost: &Arc<Mutex<Option<String>>>) -> Box<dyn FnOnce(&str) + Send> {
    let lost = Arc::clone(lost);
    Box::new(move |reason| *lost.lock().unwrap() = Some(reason.to_owned()))
}

/// Copies data to the device and back, and checks every byte, until `stop` is set. Returns the number of
/// rounds, which is at least one.
fn program(client: &mut Channel, memories: &Memories, seed: u64, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while rounds == 0 || !stop.load(Ordering::SeqCst) {
        let lengths = [1, 4000, 70_000, 300_000, 700_001, 2_500_000];
        let len = lengths[rounds as usize % lengths.len()];
        let bytes = pattern(len as usize, seed + rounds);
        let from = if rounds % 2 == 0 { 1 } else { 2 };
        write(memories, &[Extent { len, ..extents(from)[0] }], &bytes);
        client.htod(rounds % 4, region(from, 0, len));
        for _ in 0..rounds % 50 {
            client.mark();
        }
        let few = len.min(5000);
        client.write_arena(0, &bytes[..few as usize]);
        client.htod(10 + rounds % 4, arena(0, few));
        client.synchronize();
        // What comes goes where something else was.
        let (to, back) = if len <= REGIONS[0].0 && rounds % 3 == 0 { (0, len) } else { (2, len) };
        let place = [Extent { len, ..extents(to)[0] }];
        write(memories, &place, &vec![0; len as usize]);
        client.dtoh(rounds % 4, region(to, 0, back));
        client.dtoh(10 + rounds % 4, arena(1 << 20, few));
        client.synchronize();
        assert!(read(memories, &place) == bytes, "round {rounds}: {len} bytes came back wrong");
        assert!(client.read_arena(1 << 20, few) == bytes[..few as usize], "round {rounds}: the arena");
        rounds += 1;
    }
    rounds
}

/// Stops a program when it is dropped.
struct Stops<'s>(&'s AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs a program while `disturb` does something, again and again.
fn disturbed(seed: u64, times: u64, disturb: impl FnMut(&mut Bridge, &mut Random)) {
    disturbed_with(seed, times, |config| config, disturb);
}

/// As [`disturbed`], with a bridge that is configured otherwise.
fn disturbed_with(
    seed: u64,
    times: u64,
    configure: impl FnOnce(SessionConfig) -> SessionConfig,
    mut disturb: impl FnMut(&mut Bridge, &mut Random),
) {
    let _one = alone();
    let server = TcpServer::start();
    let (mut bridge, mut client) = Bridge::begin(&configure(server.config.clone()), true);
    let (memories, stop, mut random) = (bridge.memories.clone(), AtomicBool::new(false), Random(seed));
    let rounds = std::thread::scope(|scope| {
        let program = scope.spawn(|| program(&mut client, &memories, seed, &stop));
        // If something fails here, the program must end, too.
        let _stops = Stops(&stop);
        for _ in 0..times {
            disturb(&mut bridge, &mut random);
            if program.is_finished() || bridge.lost().is_some() {
                break;
            }
        }
        software::end_process_after(u64::MAX);
        stop.store(true, Ordering::SeqCst);
        until("the program has ended", || program.is_finished() || bridge.lost().is_some());
        assert_eq!(bridge.lost(), None, "{:?}", server.trouble());
        program.join().unwrap()
    });
    println!("{rounds} rounds; resumed {} times", server.resumed());
    assert!(rounds > 0 && server.trouble().is_empty(), "{:?}", server.trouble());
    leaves_nothing(bridge);
    until("the server's session has ended", || server.ended() == 1);
}

/// Ends a session, of which nothing is left then at either end.
fn leaves_nothing(bridge: Bridge) {
    assert_eq!(bridge.session().close("done", PATIENCE), Closed::Released);
    drop(bridge);
    until("nothing is left", || software::objects() == 0);
}

/// A number out of the environment.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn a_session_outlives_the_processes_that_carry_it() {
    let (seed, ends) = (number("RGPU_SURVIVAL_SEED", 7), number("RGPU_SURVIVAL_CUTS", 200));
    disturbed(seed, ends, |bridge, random| {
        let ended = software::processes_ended();
        let most = [3, 30, 300, 3000][random.below(4)];
        software::end_process_after(random.below(most) as u64);
        until("its process has ended", || software::processes_ended() > ended || bridge.lost().is_some());
        bridge.succeed();
    });
}

#[test]
fn a_session_outlives_its_queue_pairs() {
    disturbed(8, number("RGPU_SURVIVAL_CUTS", 20), |bridge, random| {
        let resumed = bridge.session().counters().resumed.get();
        let pairs = software::pairs();
        if !pairs.is_empty() {
            software::stop(pairs[random.below(pairs.len())]);
        }
        until("it goes on", || {
            bridge.session().counters().resumed.get() > resumed || bridge.lost().is_some()
        });
    });
}

/// Some devices report a connection that they have given up by an event (irdma does so when its interface
/// loses its address). Here nothing else shows it.
#[test]
fn a_session_outlives_queue_pairs_of_which_the_device_says_that_they_have_failed() {
    // A completion queue, and a queue pair in three ways.
    let kinds = [0, 1, 2, 3];
    disturbed(13, number("RGPU_SURVIVAL_CUTS", 12), |bridge, random| {
        let resumed = bridge.session().counters().resumed.get();
        let pairs = software::pairs();
        if !pairs.is_empty() {
            let pair = pairs[random.below(pairs.len())];
            software::give_up(pair);
            software::event(pair, kinds[random.below(kinds.len())]);
        }
        until("it goes on", || {
            bridge.session().counters().resumed.get() > resumed || bridge.lost().is_some()
        });
    });
}

/// Its queue pairs carry nothing of the session, but they may fail like any other.
#[test]
fn keys_are_given_when_the_queue_pair_that_makes_them_has_failed() {
    disturbed(14, number("RGPU_SURVIVAL_CUTS", 20), |bridge, _| {
        let received = || bridge.session().counters().data_bytes_received.get();
        let before = received();
        let own = |pair: &u32| software::peer(*pair) == Some(*pair);
        software::every_pair().into_iter().filter(own).for_each(software::stop);
        until("it goes on", || received() > before || bridge.lost().is_some());
    });
}

#[test]
fn without_an_address_a_window_is_refused_as_the_link_is() {
    let _one = alone();
    let domain = Domain::new(Device::open(&Settings::default()).unwrap()).unwrap();
    let windows = Windows::new(&domain).unwrap();
    let memory = Slab::new(&domain, 4096, Access::Windows).unwrap();
    // SAFETY: the window is dropped before the memory.
    let open = || unsafe { windows.open(memory.registration(), 0, 64) };
    drop(open().unwrap());
    software::every_pair().into_iter().for_each(software::stop);
    software::unaddress(true);
    let refused = open();
    software::unaddress(false);
    assert!(matches!(&refused, Err(VerbsError::Broken(why)) if why.contains("no LID")), "{refused:?}");
    assert!(open().is_ok());
}

/// Neither it nor those of the link can be replaced before the port has an address again.
#[test]
fn keys_wait_for_the_ports_address() {
    disturbed(15, number("RGPU_SURVIVAL_CUTS", 5), |bridge, _| {
        let (resumed, link) = (bridge.session().counters().resumed.get(), software::pairs());
        software::unaddress(true);
        let own = |pair: &u32| software::peer(*pair) == Some(*pair);
        // It has given its link up, or the server has. A new one's queue pair that makes keys may just be
        // coming.
        until("the link is lost", || {
            software::every_pair().into_iter().filter(own).for_each(software::stop);
            software::pairs() != link || bridge.lost().is_some()
        });
        software::unaddress(false);
        until("it goes on", || {
            bridge.session().counters().resumed.get() > resumed || bridge.lost().is_some()
        });
    });
}

#[test]
fn a_device_that_fails_ends_its_sessions_and_is_named() {
    let _one = alone();
    let server = TcpServer::start();
    let (bridge, mut client) = Bridge::begin(&server.config, true);
    client.synchronize();
    software::event(software::pairs()[0], 8);
    until("the session is lost", || bridge.lost().is_some());
    let reasons = [bridge.lost().into_iter().collect(), server.trouble()].concat();
    assert!(reasons.iter().any(|why| why.contains("RDMA device software0 has failed")), "{reasons:?}");
    drop(bridge);
    until("nothing is left", || software::objects() == 0);
    // Its driver has reset it meanwhile. Each session opens it for itself.
    let (bridge, mut client) = Bridge::begin(&server.config, true);
    client.synchronize();
    assert_eq!(bridge.lost(), None);
    leaves_nothing(bridge);
}

/// As when a subnet manager gives the port another LID, or its interface gets another IP address.
#[test]
fn a_session_outlives_the_address_of_its_port() {
    disturbed(11, number("RGPU_SURVIVAL_CUTS", 3), |bridge, _| {
        let resumed = bridge.session().counters().resumed.get();
        software::readdress();
        until("it goes on", || {
            bridge.session().counters().resumed.get() > resumed || bridge.lost().is_some()
        });
    });
}

#[test]
fn a_process_that_begins_while_the_port_is_down_goes_on_when_it_is_up() {
    disturbed(12, number("RGPU_SURVIVAL_CUTS", 3), |bridge, random| {
        let ended = software::processes_ended();
        software::end_process_after(random.below(300) as u64);
        until("its process has ended", || software::processes_ended() > ended || bridge.lost().is_some());
        software::port_down(true);
        bridge.succeed();
        software::port_down(false);
        let resumed = || bridge.session().counters().resumed.get();
        until("it goes on", || resumed() > 0 || bridge.lost().is_some());
    });
}

#[test]
fn a_process_that_begins_while_the_port_has_no_address_goes_on_when_it_has_one() {
    disturbed(16, number("RGPU_SURVIVAL_CUTS", 3), |bridge, random| {
        let ended = software::processes_ended();
        software::end_process_after(random.below(300) as u64);
        until("its process has ended", || software::processes_ended() > ended || bridge.lost().is_some());
        software::unaddress(true);
        let looked = software::looked_for_address();
        bridge.succeed();
        // More often than for the device to be opened.
        until("it looks for one", || software::looked_for_address() > looked + 3 || bridge.lost().is_some());
        software::unaddress(false);
        let resumed = || bridge.session().counters().resumed.get();
        until("it goes on", || resumed() > 0 || bridge.lost().is_some());
    });
}

/// Some devices take requests to a queue pair that has broken and give them back, others refuse them.
#[test]
fn a_session_outlives_queue_pairs_that_refuse_what_is_posted_to_them() {
    let _one = alone();
    let server = TcpServer::start();
    let (bridge, mut client) = Bridge::begin(&server.config, true);
    let (memories, stop) = (bridge.memories.clone(), AtomicBool::new(true));
    software::refuse_posts(true);
    // Each of both ends, before anybody knows of it.
    for (number, _) in software::pairs().into_iter().enumerate() {
        let resumed = bridge.session().counters().resumed.get();
        let Some(pair) = software::pairs().get(number).copied() else { break };
        software::give_up(pair);
        let resumes = (0..1000).any(|seed| {
            program(&mut client, &memories, seed, &stop);
            bridge.session().counters().resumed.get() > resumed
        });
        assert!(resumes, "queue pair {pair} refuses what is posted, and nobody notices");
    }
    software::refuse_posts(false);
    assert_eq!((bridge.lost(), server.trouble()), (None, Vec::new()));
    leaves_nothing(bridge);
}

#[test]
fn a_stopped_client_keeps_its_session_and_nobody_touches_its_memory() {
    disturbed(9, number("RGPU_SURVIVAL_CUTS", 50), |bridge, random| {
        // It goes on in between.
        let sent = bridge.session().counters().data_bytes_sent.get();
        until("it goes on", || bridge.session().counters().data_bytes_sent.get() > sent);
        std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        bridge.session().pause();
        assert!(bridge.session().is_paused(PATIENCE));
        let connected = |pair: &u32| software::peer(*pair).and_then(software::peer) == Some(*pair);
        assert!(!software::pairs().iter().any(connected), "queue pairs still reach the client's memory");
        bridge.session().go_on();
    });
}

#[test]
fn a_session_that_nobody_can_come_back_to_is_not_kept() {
    let _one = alone();
    let server = TcpServer::start();
    // The process of the one ends when it has the session saved, before it has said anything through the
    // queue pairs.
    let (mut known, mut client) = Bridge::begin(&server.config, true);
    software::end_process_after(0);
    client.mark();
    until("its process has ended", || software::processes_ended() > 0);
    // That of the other ends before. Its link is lost later.
    let config = SessionConfig { transport: TransportKind::Verbs, ..server.config.clone() };
    let before = software::pairs();
    let (_memories, channel) = channel(4 << 20);
    let unknown = Prepared::connect(&config, &channel, &mut Patient).unwrap();
    for pair in software::pairs().into_iter().filter(|pair| !before.contains(pair)) {
        software::stop(pair);
    }
    until("the one that nobody knows of has ended", || server.ended() > 0);
    let trouble = server.trouble();
    assert!(matches!(&trouble[..], [why] if why.contains("has not come back within 10 s")), "{trouble:?}");
    known.succeed();
    client.synchronize();
    assert_eq!((known.lost(), server.ended()), (None, 1));
    assert_eq!(known.session().close("done", PATIENCE), Closed::Released);
    drop((unknown, known));
    until("nothing is left", || software::objects() == 0);
}
