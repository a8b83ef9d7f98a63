//! More device memory than the devices have: idle sessions' memory leaves and comes back to the same
//! addresses.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::Status;
use protocol::data::{HostIn, HostOut};
use protocol::handle::{ContextId, FunctionId, MemoryId, ModuleId, StreamId};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD, Memset};
use protocol::ops::launch::Launch;
use protocol::ops::memory::*;
use protocol::ops::module::{ModuleLoad, ModuleUnload};
use protocol::ops::stream::{StreamCreate, StreamSynchronize};
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession};
use test_kit::*;

const MIB: u64 = 1 << 20;
const STREAM: StreamId = StreamId(0);
/// Each session's part of a device of 256 MiB: 60 %.
const SIZE: u64 = 152 * MIB;
/// It is backed by pieces of at most this size.
const PIECE: u64 = 48 * MIB;

const SWAP: [&str; 2] = ["--swap-memory=2G", "--swap-residency-ms=0"];

/// Takes memory on device 0.
fn take<S: Session>(s: &mut S, size: u64) -> Result<(), Status> {
    take_in_pieces(s, size, PIECE)
}

fn take_in_pieces<S: Session>(s: &mut S, size: u64, piece: u64) -> Result<(), Status> {
    let mut at = 0;
    while at < size {
        let piece = piece.min(size - at);
        s.call(&MemGrow { device: 0, address: window(0) + at, size: piece })?;
        at += piece;
    }
    s.push(&MemAlloc { address: window(0), size });
    s.call(&StreamSynchronize { stream: STREAM }).map(|_| ())
}

/// The word that a session writes to one of its mebibytes.
fn word(session: u64, round: u64, at: u64) -> u32 {
    (session << 24 | round << 16 | at) as u32
}

/// Fills the memory, each mebibyte with its own word.
fn fill<S: Session>(s: &mut S, session: u64, round: u64, size: u64) {
    fill_at(s, window(0), session, round, size);
}

fn fill_at<S: Session>(s: &mut S, base: u64, session: u64, round: u64, size: u64) {
    for at in 0..size / MIB {
        let value = word(session, round, at);
        let dst = base + at * MIB;
        s.push(&Memset { stream: STREAM, dst, pitch: 0, value, element: 4, width: MIB / 4, height: 1 });
    }
    s.call(&StreamSynchronize { stream: STREAM }).unwrap();
}

/// Checks all of it.
fn check<S: Session>(s: &mut S, session: u64, round: u64, size: u64) {
    check_at(s, window(0), session, round, size);
}

fn check_at<S: Session>(s: &mut S, base: u64, session: u64, round: u64, size: u64) {
    check_part(s, base, session, round, 0, size);
}

/// Checks memory that shows what was filled, from its byte `offset` on.
fn check_part<S: Session>(s: &mut S, base: u64, session: u64, round: u64, offset: u64, size: u64) {
    const AT_ONCE: u64 = 2 * MIB;
    for at in (0..size).step_by(AT_ONCE as usize) {
        let room = s.arena(0, &[]);
        let room = protocol::data::HostRange { len: AT_ONCE, ..room };
        s.push(&MemcpyDtoH { stream: STREAM, dst: HostOut(room), src: base + at });
        s.call(&StreamSynchronize { stream: STREAM }).unwrap();
        let bytes = s.read_arena(0, AT_ONCE as usize);
        for (index, mebibyte) in ((offset + at) / MIB..).zip(bytes.chunks(MIB as usize)) {
            let expected = word(session, round, index).to_le_bytes();
            // A mebibyte at once: word by word, this unoptimized loop would take most of the test's time.
            if mebibyte != expected.repeat(MIB as usize / 4) {
                let wrong = mebibyte.chunks(4).position(|word| word != expected);
                panic!("session {session}, round {round}, mebibyte {index}: word {wrong:?} is wrong");
            }
        }
    }
}

fn swap(server: &Server, field: &str) -> u64 {
    server.status()["swap"][field].as_u64().unwrap()
}

/// Waits until so many bytes are away: a session comes back as soon as there is room for it, while the rest
/// of another one's memory is still leaving.
fn is_away(server: &Server, bytes: u64) {
    until("what has to leave has left", || swap(server, "away") == bytes);
}

fn four_sessions_in_turn<S: Session>(server: &Server, connect: impl Fn() -> S) {
    four_sessions_with(server, window(0), || {
        let mut s = connect();
        take(&mut s, SIZE).unwrap();
        s
    });
}

/// `connect`: makes a session with memory at `base`.
fn four_sessions_with<S: Session>(server: &Server, base: u64, connect: impl Fn() -> S) {
    let mut sessions: Vec<S> = Vec::new();
    for round in 0..3 {
        for number in 0..4 {
            if round == 0 {
                sessions.push(connect());
            }
            let s = &mut sessions[number as usize];
            if round > 0 {
                check_at(s, base, number, round - 1, SIZE);
            }
            fill_at(s, base, number, round, SIZE);
        }
    }
    // Three of them are away at any time, however often they took turns.
    is_away(server, 3 * SIZE);
    until("all that has moved is counted", || {
        swap(server, "bytes_left") >= 11 * SIZE && swap(server, "bytes_returned") >= 8 * SIZE
    });
}

#[test]
fn four_sessions_of_more_than_half_a_device_work_in_turn() {
    let server = Server::start(&SWAP);
    four_sessions_in_turn(&server, || LocalBridge::connect(&server.socket()));
    until("all of them have ended", || server.sessions() == 0);
    until("nothing is kept", || (swap(&server, "away"), swap(&server, "memory_kept")) == (0, 0));
    assert!(swap(&server, "bytes_left") >= 11 * SIZE, "counters do not fall");
}

/// Works until both sessions have returned several times, and then checks its memory.
fn work_in_turns<S: Session>(server: &Server, s: &mut S, number: u64, alone: &Mutex<()>) {
    const TURNS: u64 = 3;
    let mut at = 0;
    until("both have returned several times", || {
        check_part(s, window(0) + at, number, 0, at, 2 * MIB);
        at = (at + 2 * MIB) % SIZE;
        swap(server, "bytes_returned") >= 2 * TURNS * SIZE
    });
    // Otherwise there would be a turn for every few mebibytes.
    let _alone = alone.lock().unwrap();
    check(s, number, 0, SIZE);
}

/// As on a machine with many processors, where a session waits for the next command without sleeping.
#[test]
fn two_sessions_that_never_rest_take_turns() {
    let server = Server::start(&[SWAP[0], "--swap-residency-ms=100", "--poll-us=1000000"]);
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    fill(&mut first, 1, 0, SIZE);
    until("it has rested once", || first.channel().header().host_sleep.is_asleep());
    let alone = Mutex::new(());
    std::thread::scope(|scope| {
        let (server, alone) = (&server, &alone);
        scope.spawn(move || work_in_turns(server, &mut first, 1, alone));
        let mut second = LocalBridge::connect(&server.socket());
        take(&mut second, SIZE).unwrap();
        fill(&mut second, 2, 0, SIZE);
        work_in_turns(server, &mut second, 2, alone);
    });
    assert!(swap(&server, "held_back") > 0, "each keeps its memory for a moment");
}

/// Loads a kernel that takes so many steps, as module 2, and runs it: its work is on a device while the
/// session has no command.
fn run_for<S: Session>(s: &mut S, steps: u64) {
    let ptx = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry steps() {{ .reg .u64 %n; .reg .pred %p; \
         mov.u64 %n, {steps}; AGAIN: sub.u64 %n, %n, 1; setp.ne.u64 %p, %n, 0; @%p bra AGAIN; ret; }}\n\0"
    );
    let (module, context) = (ModuleId(2), ContextId(0));
    let (room, image) = (s.arena(4 << 20, &[0; 4096]), s.arena(0, ptx.as_bytes()));
    let (image, info) = (HostIn::Range(image), HostOut(room));
    s.call(&ModuleLoad { context, module, options: vec![], image, info }).unwrap();
    let function = FunctionId::new(module, 0);
    let (grid, block, attributes) = ([1; 3], [1; 3], vec![]);
    s.push(&Launch { function, stream: STREAM, grid, block, dynamic_shared: 0, attributes, params: &[] });
    s.call(&StreamSynchronize { stream: STREAM }).unwrap();
    s.push(&ModuleUnload { module });
}

/// Also on a legacy default stream beside others, whose work does not show while the session sleeps.
#[test]
fn a_session_that_waits_for_one_long_kernel_after_the_other_leaves_in_its_turn() {
    let server = Server::start(&[SWAP[0], "--swap-residency-ms=1"]);
    let mut first = LocalBridge::connect(&server.socket());
    let (context, stream) = (ContextId(0), StreamId(protocol::channel::MAX_CONTEXTS));
    first.push(&StreamCreate { context, stream, flags: 0, priority: 0 });
    take(&mut first, SIZE).unwrap();
    fill(&mut first, 1, 0, SIZE);
    // About half a second.
    let some = 1 << 17;
    let began = Instant::now();
    run_for(&mut first, some);
    let steps = some * 500 / u64::try_from(began.elapsed().as_millis()).unwrap().max(1);
    let over = AtomicBool::new(false);
    let mut second = LocalBridge::connect(&server.socket());
    let taken = std::thread::scope(|scope| {
        let (first, over) = (&mut first, &over);
        scope.spawn(move || {
            until("the second session has its memory", || {
                run_for(first, steps);
                over.load(Ordering::Relaxed)
            });
        });
        let taken = take(&mut second, SIZE);
        over.store(true, Ordering::Relaxed);
        taken
    });
    assert_eq!(taken, Ok(()));
    fill(&mut second, 2, 0, SIZE);
    check(&mut first, 1, 0, SIZE);
    check(&mut second, 2, 0, SIZE);
}

/// Each of them has a part of its memory while it waits for the rest.
#[test]
fn sessions_that_take_memory_at_the_same_time_all_get_it() {
    // All of them are busy: with each turn, one gets on for a moment.
    let server = Server::start(&[SWAP[0], "--swap-residency-ms=100"]);
    let begin = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (server, begin) = (&server, &begin);
            scope.spawn(move || {
                let mut s = LocalBridge::connect(&server.socket());
                take(&mut s, PIECE).unwrap();
                begin.wait();
                for at in (PIECE..SIZE).step_by(4 << 20) {
                    s.call(&MemGrow { device: 0, address: window(0) + at, size: 4 << 20 }).unwrap();
                }
                s.push(&MemAlloc { address: window(0) + PIECE, size: SIZE - PIECE });
                fill(&mut s, number, 0, SIZE);
                begin.wait();
                check(&mut s, number, 0, SIZE);
            });
        }
    });
    assert!(swap(&server, "bytes_left") >= 3 * SIZE);
}

#[test]
fn the_same_over_tcp_with_files() {
    let folder = tempfile::tempdir().unwrap();
    let option = format!("--swap-folder={}", folder.path().display());
    // The test's end of the link acknowledges nothing.
    let server = Server::start(&["--swap-memory=64M", "--replay-memory=2G", SWAP[1], &option]);
    four_sessions_in_turn(&server, || TcpSession::connect(server.port));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "files have no names");
}

#[test]
fn nothing_moves_while_everything_fits() {
    let server = Server::start(&SWAP);
    let mut sessions = [(); 3].map(|()| LocalBridge::connect(&server.socket()));
    for (number, s) in (0..).zip(&mut sessions) {
        take(s, 80 * MIB).unwrap();
        fill(s, number, 0, 80 * MIB);
    }
    for (number, s) in (0..).zip(&mut sessions) {
        check(s, number, 0, 80 * MIB);
    }
    assert_eq!((swap(&server, "bytes_left"), swap(&server, "away")), (0, 0));
}

#[test]
fn what_can_never_fit_is_refused_at_once_and_without_the_option_each_session_has_a_device() {
    let server = Server::start(&SWAP);
    let mut s = LocalBridge::connect(&server.socket());
    take(&mut s, SIZE).unwrap();
    let more = MemGrow { device: 0, address: window(0) + SIZE, size: SIZE };
    assert_eq!(s.call(&more), Err(Status::OUT_OF_MEMORY));
    check_works(&mut s);
    let server = Server::start(&[]);
    assert!(server.status()["swap"].is_null());
    let mut sessions = [(); 2].map(|()| LocalBridge::connect(&server.socket()));
    sessions.iter_mut().for_each(|s| take(s, SIZE).unwrap());
}

fn check_works<S: Session>(s: &mut S) {
    fill(s, 7, 7, SIZE);
    check(s, 7, 7, SIZE);
}

#[test]
fn a_session_with_a_kernel_that_never_ends_keeps_its_memory_and_the_newcomer_is_refused() {
    let server = Server::start(&SWAP);
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    run_endlessly(&mut first);
    let mut second = LocalBridge::connect(&server.socket());
    assert_eq!(take(&mut second, SIZE), Err(Status::OUT_OF_MEMORY));
    assert_eq!(swap(&server, "bytes_left"), 0);
    drop(first);
    until("its memory is free", || server.sessions() == 1);
    take_again(&mut second);
}

/// After a refusal, which may have come after part was granted.
fn take_again<S: Session>(s: &mut S) {
    for at in (0..SIZE).step_by(PIECE as usize) {
        let size = PIECE.min(SIZE - at);
        // Memory that is there already is refused as invalid.
        let _ = s.call(&MemGrow { device: 0, address: window(0) + at, size });
    }
    s.push(&MemAlloc { address: window(0), size: SIZE });
    check_works(s);
}

/// Host memory for the device memory of one session, and no folder. It is taken in chunks of 64 MiB.
const ONE: [&str; 2] = ["--swap-memory=192M", SWAP[1]];

/// Two sessions of [`SIZE`]: the first one's memory is away and fills the host memory, the second one's is on
/// the device.
fn two_sessions_that_fill_the_host_memory(server: &Server) -> [LocalBridge; 2] {
    let mut sessions = [(); 2].map(|()| LocalBridge::connect(&server.socket()));
    for (number, s) in (0..).zip(&mut sessions) {
        take(s, SIZE).unwrap();
        fill(s, number, 0, SIZE);
    }
    is_away(server, SIZE);
    sessions
}

#[test]
fn a_newcomer_is_refused_if_the_host_memory_is_full_as_well_and_nothing_is_lost() {
    let server = Server::start(&ONE);
    let [mut first, mut second] = two_sessions_that_fill_the_host_memory(&server);
    let mut newcomer = LocalBridge::connect(&server.socket());
    assert_eq!(take(&mut newcomer, SIZE), Err(Status::OUT_OF_MEMORY));
    // An ordinary error: it continues with the memory that it has.
    assert_eq!((newcomer.error(0), newcomer.lost()), (None, None));
    newcomer.push(&MemAlloc { address: window(0), size: PIECE });
    fill(&mut newcomer, 2, 0, PIECE);
    assert_eq!(
        (swap(&server, "bytes_left"), swap(&server, "bytes_returned")),
        (SIZE, 0),
        "nobody moved for it"
    );
    // The first waits, because the second cannot leave either. That one is as fast as ever.
    let slot = 1;
    let seq = first.send(slot, &StreamSynchronize { stream: STREAM });
    check(&mut second, 1, 0, SIZE);
    check(&mut newcomer, 2, 0, PIECE);
    assert_eq!((swap(&server, "away"), swap(&server, "bytes_returned")), (SIZE, 0));
    until("the log says why both wait", || server.log().matches("--swap-memory has no room").count() == 2);
    drop(second);
    assert_eq!(first.wait(slot, seq).0, Status::SUCCESS);
    check(&mut first, 0, 0, SIZE);
    check(&mut newcomer, 2, 0, PIECE);
}

#[test]
fn a_newcomer_waits_while_the_host_memory_is_full_and_is_served_when_a_session_ends() {
    let server = Server::start(&ONE);
    let [mut first, mut second] = two_sessions_that_fill_the_host_memory(&server);
    let mut newcomer = LocalBridge::connect(&server.socket());
    take(&mut newcomer, 2 * PIECE).unwrap();
    let slot = 1;
    let rest = MemGrow { device: 0, address: window(0) + 2 * PIECE, size: SIZE - 2 * PIECE };
    let seq = newcomer.send(slot, &rest);
    until("it waits, and the log says why", || server.log().contains("--swap-memory has no room"));
    check(&mut second, 1, 0, SIZE);
    assert_eq!(swap(&server, "bytes_left"), SIZE);
    drop(second);
    assert_eq!(newcomer.wait(slot, seq).0, Status::SUCCESS);
    newcomer.push(&MemAlloc { address: window(0) + 2 * PIECE, size: SIZE - 2 * PIECE });
    fill(&mut newcomer, 2, 0, SIZE);
    check(&mut newcomer, 2, 0, SIZE);
    assert_eq!(swap(&server, "away"), SIZE);
    drop(newcomer);
    check(&mut first, 0, 0, SIZE);
}

#[test]
fn a_policy_keeps_a_clients_memory_on_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("clients.toml");
    std::fs::write(&rules, "swappable = false\n").unwrap();
    let option = format!("--clients={}", rules.display());
    let server = Server::start(&[SWAP[0], SWAP[1], &option]);
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    let mut second = LocalBridge::connect(&server.socket());
    assert_eq!(take(&mut second, SIZE), Err(Status::OUT_OF_MEMORY));
    assert_eq!(swap(&server, "bytes_left"), 0);
}

#[test]
fn memory_that_another_session_has_opened_stays() {
    let server = Server::start(&SWAP);
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    fill(&mut first, 1, 0, SIZE);
    let exported = first.call(&PieceExport { address: window(0) }).unwrap();
    let mut reader = LocalBridge::connect(&server.socket());
    let memory = MemoryId(1);
    let mut second = LocalBridge::connect(&server.socket());
    take(&mut second, SIZE).unwrap();
    fill(&mut second, 2, 0, SIZE);
    // All but the piece that is shared.
    is_away(&server, SIZE - PIECE);
    // Another session reads it where it is.
    reader.call(&MemoryImport { memory, token: exported.token }).unwrap();
    check(&mut first, 1, 0, SIZE);
    check(&mut second, 2, 0, SIZE);
}

/// A session with [`SIZE`] bytes, and another one that has imported all of them.
fn two_sessions_with_the_same_memory(server: &Server) -> [LocalBridge; 2] {
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    fill(&mut first, 1, 0, SIZE);
    let mut second = LocalBridge::connect(&server.socket());
    for (number, (address, _)) in (1..).zip(pieces()) {
        let token = first.call(&PieceExport { address }).unwrap().token;
        second.call(&MemoryImport { memory: MemoryId(number), token }).unwrap();
    }
    [first, second]
}

/// What [`take`] has taken: addresses and sizes.
fn pieces() -> impl Iterator<Item = (u64, u64)> {
    (0..SIZE).step_by(PIECE as usize).map(|at| (window(0) + at, PIECE.min(SIZE - at)))
}

#[test]
fn memory_of_another_session_takes_no_more_room_on_the_device() {
    let server = Server::start(&SWAP);
    let [mut first, _second] = two_sessions_with_the_same_memory(&server);
    check(&mut first, 1, 0, SIZE);
    // It would not fit twice.
    let mut third = LocalBridge::connect(&server.socket());
    take(&mut third, PIECE).unwrap();
    assert_eq!(swap(&server, "bytes_left"), 0);
}

#[test]
fn memory_of_another_session_counts_once_and_also_when_that_has_freed_it() {
    let server = Server::start(&["--client-memory-limit=200M"]);
    let [mut first, mut second] = two_sessions_with_the_same_memory(&server);
    first.push(&MemFree { address: window(0) });
    for (address, size) in pieces() {
        first.call(&MemShrink { device: 0, address, size }).unwrap();
    }
    let more = MemGrow { device: 0, address: window(0), size: 2 * PIECE };
    assert_eq!(first.call(&more).err(), Some(Status::OUT_OF_MEMORY), "the second session still has it");
    for (number, _) in (1..).zip(pieces()) {
        second.call(&MemoryRelease { memory: MemoryId(number) }).unwrap();
    }
    until("the daemon knows that it is free", || first.call(&more).is_ok());
}

/// Reserves addresses.
fn reserve(s: &mut LocalBridge) {
    s.call(&AddressReserve { address: SPACE, size: SPACE_ALIGN }).unwrap();
}

/// Memory without an address.
fn create(s: &mut LocalBridge, number: u32, size: u64) -> Result<MemoryId, Status> {
    let memory = MemoryId(number);
    s.call(&MemoryCreate { memory, device: 0, size, exportable: true }).map(|_| memory)
}

/// Maps a part of it, from `offset` on.
fn map(s: &mut LocalBridge, memory: MemoryId, offset: u64, address: u64, size: u64) {
    s.call(&MemoryMap { memory, offset, address, size }).unwrap();
    s.call(&MemoryAccess { address, size, device: 0, flags: 3 }).unwrap();
}

/// Takes memory without an address, in pieces, and maps it from [`SPACE`] on.
fn take_without_address(s: &mut LocalBridge, size: u64, piece: u64) {
    reserve(s);
    for (number, at) in (1..).zip((0..size).step_by(piece as usize)) {
        let piece = piece.min(size - at);
        let memory = create(s, number, piece).unwrap();
        map(s, memory, 0, SPACE + at, piece);
    }
}

#[test]
fn memory_without_an_address_leaves_and_comes_back_to_where_it_is_mapped() {
    let server = Server::start(&SWAP);
    four_sessions_with(&server, SPACE, || {
        let mut s = LocalBridge::connect(&server.socket());
        take_without_address(&mut s, SIZE, PIECE);
        s
    });
}

#[test]
fn memory_without_an_address_leaves_however_it_is_mapped_unless_it_is_shared() {
    const PART: u64 = 16 * MIB;
    let at = |part: u64| SPACE + part * PART;
    let server = Server::start(&SWAP);
    let mut s = LocalBridge::connect(&server.socket());
    reserve(&mut s);
    let all: Vec<MemoryId> = (0..7).map(|number| create(&mut s, number, PART).unwrap()).collect();
    for (part, memory) in (0..).zip(&all) {
        map(&mut s, *memory, 0, at(part), PART);
        fill_at(&mut s, at(part), part, 0, PART);
    }
    // As a whole; its second half; in two parts, side by side in the other order; twice; exported; no longer
    // accessible; no longer mapped.
    for part in [1, 2, 6] {
        s.call(&MemoryUnmap { address: at(part), size: PART }).unwrap();
    }
    map(&mut s, all[1], PART / 2, at(1) + PART / 2, PART / 2);
    map(&mut s, all[2], PART / 2, at(2), PART / 2);
    map(&mut s, all[2], 0, at(2) + PART / 2, PART / 2);
    map(&mut s, all[3], 0, at(8), PART);
    s.call(&MemoryExport { memory: all[4] }).unwrap();
    s.call(&MemoryAccess { address: at(5), size: PART, device: 0, flags: 0 }).unwrap();
    let mut other = LocalBridge::connect(&server.socket());
    take(&mut other, SIZE).unwrap();
    for round in 1..3 {
        fill(&mut other, 9, round, SIZE);
        is_away(&server, 6 * PART);
        // All of it is as it was, where it was.
        check_at(&mut s, at(0), 0, 0, PART);
        check_part(&mut s, at(1) + PART / 2, 1, 0, PART / 2, PART / 2);
        check_part(&mut s, at(2), 2, 0, PART / 2, PART / 2);
        check_part(&mut s, at(2) + PART / 2, 2, 0, 0, PART / 2);
        check_at(&mut s, at(3), 3, round - 1, PART);
        check_at(&mut s, at(8), 3, round - 1, PART);
        check_at(&mut s, at(4), 4, 0, PART);
        is_away(&server, SIZE);
        // Both addresses still show the same memory.
        fill_at(&mut s, at(8), 3, round, PART);
        check_at(&mut s, at(3), 3, round, PART);
        check(&mut other, 9, round, SIZE);
    }
    is_away(&server, 6 * PART);
    // Also what could not be seen. No mapping is in the way of others, and none is missing.
    s.call(&MemoryAccess { address: at(5), size: PART, device: 0, flags: 3 }).unwrap();
    check_at(&mut s, at(5), 5, 0, PART);
    s.call(&MemoryUnmap { address: at(1) + PART / 2, size: PART / 2 }).unwrap();
    for part in [1, 6] {
        map(&mut s, all[part as usize], 0, at(part), PART);
        check_at(&mut s, at(part), part, 0, PART);
    }
    for (address, size) in [(at(2), PART / 2), (at(2) + PART / 2, PART / 2), (at(3), PART), (at(8), PART)] {
        s.call(&MemoryUnmap { address, size }).unwrap();
    }
    for part in [0, 1, 4, 5, 6] {
        s.call(&MemoryUnmap { address: at(part), size: PART }).unwrap();
    }
    s.call(&AddressFree { address: SPACE, size: SPACE_ALIGN }).unwrap();
    // It can be exported and released as before.
    let token = s.call(&MemoryExport { memory: all[2] }).unwrap().token;
    let mut reader = LocalBridge::connect(&server.socket());
    reserve(&mut reader);
    reader.call(&MemoryImport { memory: all[0], token }).unwrap();
    map(&mut reader, all[0], 0, at(0), PART);
    check_at(&mut reader, at(0), 2, 0, PART);
    for memory in all {
        s.call(&MemoryRelease { memory }).unwrap();
    }
    check(&mut other, 9, 2, SIZE);
}

/// Steps of moving a session of [`SIZE`] off a device: preparing the store twice, six copies of at most 64
/// MiB, and for each of four pieces waiting for its copies and releasing its memory. Then it returns.
const STEPS: u32 = 16;

fn failing(from: u32, steps: u32) -> String {
    format!("--software-imitate=fail-move={from},fail-moves={steps}")
}

/// Each of both sessions fails at that step, once: at a copy, when memory is released, when it is to return.
#[test]
fn sessions_take_turns_although_moving_their_memory_fails_halfway() {
    let folder = tempfile::tempdir().unwrap();
    let files = format!("--swap-folder={}", folder.path().display());
    for (step, to_file) in
        [(1, false), (5, false), (11, true), (12, false), (15, false), (18, true), (22, false), (27, true)]
    {
        let imitate = failing(step, 1);
        let memory = if to_file { "--swap-memory=64M" } else { SWAP[0] };
        let server = Server::start(&[memory, SWAP[1], &files, &imitate]);
        let mut sessions = [(); 2].map(|()| LocalBridge::connect(&server.socket()));
        for round in 0..3 {
            for (number, s) in (0..).zip(&mut sessions) {
                if round == 0 {
                    take(s, SIZE).unwrap();
                } else {
                    check(s, number, round - 1, SIZE);
                }
                fill(s, number, round, SIZE);
            }
        }
        is_away(&server, SIZE);
        until("all that has moved is counted", || {
            swap(&server, "bytes_left") == swap(&server, "bytes_returned") + SIZE
        });
        drop(sessions);
        until("both have ended", || server.sessions() == 0);
        until("nothing is kept", || (swap(&server, "away"), swap(&server, "memory_kept")) == (0, 0));
    }
}

/// Two sessions, filled with 1 and 2, of which the first one's memory has left for the second one's.
fn first_is_away(server: &Server) -> [LocalBridge; 2] {
    let mut sessions = [1, 2].map(|number| (number, LocalBridge::connect(&server.socket())));
    for (number, session) in &mut sessions {
        take(session, SIZE).unwrap();
        fill(session, *number, 0, SIZE);
    }
    is_away(server, SIZE);
    sessions.map(|(_, session)| session)
}

#[test]
fn a_session_whose_memory_never_returns_is_lost_and_others_go_on() {
    // The first step of returning; the third piece, after two have memory again.
    for step in [STEPS + 1, STEPS + 3] {
        let server = Server::start(&[SWAP[0], SWAP[1], &failing(step, u32::MAX)]);
        let [mut first, mut second] = first_is_away(&server);
        // It can leave, but its return fails, too.
        first.send(1, &StreamSynchronize { stream: STREAM });
        until("the first session is lost", || first.lost().is_some());
        let reason = first.lost().unwrap();
        assert!(reason.contains("device memory cannot be brought back"), "{reason}");
        drop(first);
        until("it has ended", || server.sessions() == 1);
        let mut third = LocalBridge::connect(&server.socket());
        take(&mut third, SIZE).unwrap();
        fill(&mut third, 3, 0, SIZE);
        check(&mut third, 3, 0, SIZE);
        drop(third);
        until("it has ended, too", || server.sessions() == 1);
        second.send(1, &StreamSynchronize { stream: STREAM });
        until("the second session is lost", || second.lost().is_some());
    }
}

#[test]
fn copies_that_wait_for_their_client_keep_memory_where_it_is() {
    let server = Server::start(&SWAP);
    let mut first = LocalBridge::connect(&server.socket());
    take(&mut first, SIZE).unwrap();
    let bytes = pattern(4 << 20, 5);
    let range = first.arena(0, &bytes);
    first.push(&MemcpyHtoD { stream: STREAM, dst: window(0) + MIB, src: HostIn::Range(range) });
    let mut second = LocalBridge::connect(&server.socket());
    take(&mut second, SIZE).unwrap();
    fill(&mut second, 2, 0, SIZE);
    let room = protocol::data::HostRange { len: 4 << 20, ..first.arena(0, &[0; 4096]) };
    first.push(&MemcpyDtoH { stream: STREAM, dst: HostOut(room), src: window(0) + MIB });
    first.call(&StreamSynchronize { stream: STREAM }).unwrap();
    assert!(first.read_arena(0, 4 << 20) == bytes);
}

/// A session whose worker can be killed, with memory of one of both kinds.
struct Tenant {
    session: LocalBridge,
    worker: Pid,
    base: u64,
}

impl Tenant {
    /// Small enough for one session to be on the device at a time, in many pieces.
    const SIZE: u64 = 38 * MIB;
    const PIECE: u64 = 2 * MIB;

    /// `workers`: those of all sessions so far.
    fn new(server: &Server, without_address: bool, workers: &mut Vec<Pid>) -> Tenant {
        let mut session = LocalBridge::connect(&server.socket());
        let rows = server.status()["sessions"].clone();
        let pid = |row: &serde_json::Value| Pid::from_raw(row["worker"].as_i64().unwrap() as i32);
        let worker = rows.as_array().unwrap().iter().map(pid).find(|pid| !workers.contains(pid)).unwrap();
        workers.push(worker);
        if without_address {
            take_without_address(&mut session, Self::SIZE, Self::PIECE);
        } else {
            take_in_pieces(&mut session, Self::SIZE, Self::PIECE).unwrap();
        }
        Tenant { session, worker, base: if without_address { SPACE } else { window(0) } }
    }

    fn fill(&mut self, number: u64, round: u64) {
        fill_at(&mut self.session, self.base, number, round, Self::SIZE);
    }

    fn check(&mut self, number: u64, round: u64) {
        check_at(&mut self.session, self.base, number, round, Self::SIZE);
    }

    /// Its bytes that are off the device.
    fn away(&self, status: &serde_json::Value) -> u64 {
        let rows = status["sessions"].as_array().unwrap();
        let row = rows.iter().find(|row| row["worker"] == self.worker.as_raw()).unwrap();
        row["memory_away"].as_u64().unwrap()
    }
}

/// A process that is stopped until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(process: Pid) -> Stopped {
        kill(process, Signal::SIGSTOP).unwrap();
        let stopped = || {
            let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
            tasks.flatten().all(|task| {
                // The state follows the name, which is in parentheses. A thread that has just ended has none.
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit(") ").next().is_none_or(|rest| rest.is_empty() || rest.starts_with('T'))
            })
        };
        until("all its threads are stopped", stopped);
        Stopped(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have been killed meanwhile.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// Random numbers below `bound`.
fn random(state: &mut u64, bound: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*state >> 33) % bound
}

/// Stops the workers of two sessions at a moment when part of the memory of one of them has moved, as the
/// server's status says while they are stopped. `None`: the first has left and the second is back before such
/// a moment was met.
fn stop_halfway(server: &Server, leaves: &Tenant, returns: &Tenant, state: &mut u64) -> Option<[Stopped; 2]> {
    let begin = std::time::Instant::now();
    loop {
        assert!(begin.elapsed() < PATIENCE, "memory does not move");
        std::thread::sleep(std::time::Duration::from_micros(random(state, 3000)));
        let stopped = [leaves, returns].map(|tenant| Stopped::new(tenant.worker));
        let status = server.status();
        match [leaves, returns].map(|tenant| tenant.away(&status)) {
            away if away.iter().any(|bytes| (1..Tenant::SIZE).contains(bytes)) => return Some(stopped),
            [Tenant::SIZE, 0] => return None,
            _ => {}
        }
    }
}

#[test]
fn memory_that_is_away_returns_under_a_daemon_that_moves_none() {
    let mut service = Service::new(&["--grace-seconds=0", SWAP[0], SWAP[1]]);
    let server = service.start();
    let [mut first, mut second] = first_is_away(&server);
    service.flags.truncate(1);
    let server = service.crash(server);
    // Nothing leaves any more, so it waits for the second one's end.
    let slot = 1;
    let seq = first.send(slot, &StreamSynchronize { stream: STREAM });
    check(&mut second, 2, 0, SIZE);
    drop(second);
    assert_eq!(first.wait(slot, seq).0, Status::SUCCESS);
    check(&mut first, 1, 0, SIZE);
    is_away(&server, 0);
}

/// Sessions without a kill keep their data; killed sessions and daemons leave nothing behind.
/// `RGPU_SWAP_KILLS` is the number of kills.
#[test]
fn whoever_is_killed_in_the_middle_leaves_nothing_and_touches_nobodys_data() {
    let kills = std::env::var("RGPU_SWAP_KILLS").map_or(12, |number| number.parse().unwrap());
    let files = tempfile::tempdir().unwrap();
    let option = format!("--swap-folder={}", files.path().display());
    // There is room for one session's memory; the others' goes to files.
    let flags = ["--grace-seconds=0", "--swap-device-memory=64M", "--swap-memory=64M", SWAP[1], &option];
    let service = Service::new(&flags);
    let mut server = service.start();
    let mut workers = Vec::new();
    let mut survivors = [false, true].map(|kind| Tenant::new(&server, kind, &mut workers));
    for (number, survivor) in (0..).zip(&mut survivors) {
        survivor.fill(number, 0);
    }
    let (mut state, mut halfway) = (1, 0);
    for round in 1..=kills {
        let mut victim = Tenant::new(&server, round % 2 == 0, &mut workers);
        victim.fill(9, round);
        // The victim's memory makes room for a survivor's, which comes back. One in four kills comes at any
        // moment, perhaps before memory moves or after it has; the others come when a part has moved.
        let (slot, at) = (1, round as usize % 2);
        let (seq, stopped) = loop {
            let seq = survivors[at].session.send(slot, &StreamSynchronize { stream: STREAM });
            if round % 4 == 0 {
                std::thread::sleep(std::time::Duration::from_micros(random(&mut state, 60_000)));
                break (seq, None);
            }
            let stopped = stop_halfway(&server, &victim, &survivors[at], &mut state);
            if stopped.is_some() {
                break (seq, stopped);
            }
            assert_eq!(survivors[at].session.wait(slot, seq).0, Status::SUCCESS);
            victim.check(9, round);
        };
        halfway += u64::from(stopped.is_some());
        match round % 3 {
            0 => drop((victim, stopped)),
            1 => {
                kill(victim.worker, Signal::SIGKILL).unwrap();
                drop((victim, stopped));
            }
            _ => {
                server.end(Signal::SIGKILL);
                drop(stopped);
                server = service.start();
                victim.check(9, round);
                drop(victim);
            }
        }
        assert_eq!(survivors[at].session.wait(slot, seq).0, Status::SUCCESS);
        for (number, survivor) in (0..).zip(&mut survivors) {
            survivor.check(number, round - 1);
            survivor.fill(number, round);
        }
        until("the victim has ended", || server.sessions() == 2);
    }
    eprintln!("{halfway} of {kills} kills came when part of a session's memory had moved");
    assert!(halfway >= kills - kills / 4);
    drop(survivors);
    until("all have ended", || server.sessions() == 0);
    until("their processes are gone", || workers.iter().all(|worker| kill(*worker, None).is_err()));
    until("no memory is kept", || (swap(&server, "away"), swap(&server, "memory_kept")) == (0, 0));
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0);
    until("nothing is kept", || !service.manager.names().iter().any(|name| name.starts_with("worker-")));
    // Descriptors and threads of a daemon that has seen none of this.
    let idle = |server: &Server| {
        let mut last = server.resources();
        until("a daemon does nothing", || {
            std::thread::sleep(std::time::Duration::from_millis(300));
            std::mem::replace(&mut last, server.resources()) == last
                && server.number("workers_ready") == 2
                && server.number("workers_starting") == 0
        });
        last
    };
    let fresh = {
        let folder = tempfile::tempdir().unwrap();
        let option = format!("--swap-folder={}", folder.path().display());
        let service = Service::new(&[flags[0], flags[1], flags[2], flags[3], &option]);
        idle(&service.start())
    };
    until("the daemon holds no more than that", || {
        let old = server.resources();
        old.0 <= fresh.0 && old.1 <= fresh.1
    });
}
