//! What a server can write of a client's memory, and when: what commands wait for, while they do.

use super::*;

/// `IBV_WC_REM_ACCESS_ERR`.
const REFUSED: u32 = 10;
/// The region that copies go to, and its size.
const INTO: u32 = 2;
const SIZE: u64 = REGIONS[INTO as usize].0;

/// A session that has copied bytes to the device, and the bytes.
fn copied(server: &TcpServer) -> (Bridge, Channel, Vec<u8>) {
    let (bridge, mut client) = Bridge::begin(&server.config, true);
    let bytes = pattern(700_001, 5);
    write(&bridge.memories, &extents(1)[..], &[&bytes[..], &vec![0; 3_000_000 - bytes.len()]].concat());
    client.htod(0, region(1, 0, bytes.len() as u64));
    client.synchronize();
    (bridge, client, bytes)
}

/// Where a window is that shows so many bytes, and its key, once there are `count` windows.
fn window(count: usize, len: u64) -> (u64, u32) {
    until(&format!("{count} windows"), || software::windows().len() == count);
    let windows = software::windows();
    let shown = windows.iter().find(|(_, shown, _)| *shown == len);
    let (at, _, key) = shown.unwrap_or_else(|| panic!("no window shows {len} bytes: {windows:?}"));
    (*at, *key)
}

/// Whether the peer of any queue pair may write there.
fn writable(place: (u64, u32), len: u64) -> bool {
    software::pairs().into_iter().any(|pair| software::writable(pair, place, len))
}

#[test]
fn a_server_can_write_only_what_is_awaited() {
    let _one = alone();
    let server = TcpServer::start();
    let (bridge, mut client, bytes) = copied(&server);
    assert_eq!(software::windows(), [], "nothing is awaited");
    // Into nothing, of a memory without a key.
    client.dtoh(0, region(INTO, 0, 0));
    client.synchronize();
    server.hold_commands(true);
    client.dtoh(0, region(INTO, 4096, 3000));
    let (at, key) = window(1, 3000);
    assert!(writable((at, key), 3000));
    assert!(!writable((at - 1, key), 1) && !writable((at, key), 3001) && !writable((at + 3000, key), 1));
    // The next key is for both. The first one stays, since the server may be writing with it.
    client.dtoh(0, region(INTO, 9000, 100));
    let (both, second) = window(2, 9100 - 4096);
    assert!(both == at && writable((at, key), 3000) && !writable((at - 1, second), 1));
    // One that lies between them needs no other key. One before them, and then all that the memory has.
    client.dtoh(0, region(INTO, 8000, 10));
    client.dtoh(0, region(INTO, 100, 10));
    let (_, third) = window(3, 9000);
    client.dtoh(0, region(INTO, 1_000_000, 700_001));
    let (first_byte, fourth) = window(4, SIZE);
    client.dtoh(0, region(INTO, SIZE - 1, 1));
    // Into nothing.
    client.dtoh(0, region(INTO, SIZE, 0));
    server.hold_commands(false);
    client.synchronize();
    assert_eq!(software::windows(), [], "nothing is awaited any more");
    let filled = read(&bridge.memories, &extents(INTO));
    assert!(filled[1_000_000..1_700_001] == bytes && filled[4096..7096] == bytes[..3000]);
    assert!(filled[..100] == [0; 100] && filled[100..110] == bytes[..10]);
    // Its keys are good for nothing now.
    for key in [key, second, third, fourth] {
        assert!(!writable((first_byte, key), 1) && !writable((at, key), 1));
    }
    let resumed = bridge.session().counters().resumed.get();
    let refused = software::pairs().into_iter().map(|pair| software::write(pair, (at, key), 3, &[9; 3000]));
    assert!(refused.collect::<Vec<_>>().contains(&Err(REFUSED)));
    // The refusal broke the link, and the session continues over a new one.
    until("it goes on", || bridge.session().counters().resumed.get() > resumed);
    assert!(read(&bridge.memories, &extents(INTO)) == filled, "the server has written with an old key");
    client.dtoh(0, region(INTO, 0, 5000));
    client.synchronize();
    assert!(read(&bridge.memories, &extents(INTO))[..5000] == bytes[..5000]);
    assert_eq!((software::windows(), bridge.lost()), (Vec::new(), None));
    leaves_nothing(bridge);
}

#[test]
fn memory_that_is_awaited_can_be_unregistered_and_its_session_can_end() {
    let _one = alone();
    let server = TcpServer::start();
    let (bridge, mut client, _) = copied(&server);
    server.hold_commands(true);
    client.dtoh(0, region(INTO, 0, 1000));
    client.dtoh(0, region(0, 0, 1000));
    window(2, 1000);
    std::thread::scope(|scope| {
        let unregistered = scope.spawn(|| bridge.session().unregister_region(INTO));
        server.hold_commands(false);
        unregistered.join().unwrap().unwrap();
    });
    client.synchronize();
    assert_eq!(software::windows(), []);
    server.hold_commands(true);
    client.dtoh(0, region(0, 0, 1000));
    window(1, 1000);
    drop(bridge);
    server.hold_commands(false);
    until("nothing is left", || software::objects() == 0);
}

#[test]
fn a_process_that_goes_on_gives_new_keys_for_what_is_awaited() {
    let _one = alone();
    let server = TcpServer::start();
    let (mut bridge, mut client, bytes) = copied(&server);
    server.hold_commands(true);
    client.dtoh(0, region(INTO, 50, 700_001));
    client.dtoh(0, arena(8192, 4000));
    let (_, old) = window(2, 700_001);
    let ended = software::processes_ended();
    software::end_process_after(0);
    client.mark();
    until("its process has ended", || software::processes_ended() > ended);
    until("its keys are gone", || software::windows().is_empty());
    bridge.succeed();
    // What the server can do is not known, so these are for the whole memory.
    let (_, new) = window(2, SIZE);
    assert_ne!(old, new);
    server.hold_commands(false);
    client.synchronize();
    assert!(read(&bridge.memories, &extents(INTO))[50..700_051] == bytes);
    assert!(client.read_arena(8192, 4000) == bytes[..4000]);
    assert_eq!((software::windows(), bridge.lost()), (Vec::new(), None));
    leaves_nothing(bridge);
}

#[test]
fn a_device_without_windows_gives_one_key_for_a_memory() {
    let _one = alone();
    software::have_windows(false);
    let server = TcpServer::start();
    let (bridge, mut client, bytes) = copied(&server);
    software::have_windows(true);
    for at in [0, 1000, 1_500_000] {
        client.dtoh(0, region(INTO, at, 700_001));
        client.synchronize();
        assert!(read(&bridge.memories, &extents(INTO))[at as usize..][..700_001] == bytes);
    }
    assert_eq!((software::windows(), bridge.lost()), (Vec::new(), None));
    leaves_nothing(bridge);
}

/// When a process ends, its memory may be gone before its queue pairs are: a write of the server's is refused
/// then.
#[test]
fn a_write_that_is_refused_because_a_process_ends_is_repeated_to_the_next_one() {
    let _one = alone();
    let server = TcpServer::start();
    let (mut bridge, mut client, bytes) = copied(&server);
    server.hold_commands(true);
    client.dtoh(0, region(INTO, 50, 700_001));
    window(1, 700_001);
    let ended = software::processes_ended();
    software::close_windows();
    software::end_process_after(0);
    server.hold_commands(false);
    until("its process has ended", || software::processes_ended() > ended || bridge.lost().is_some());
    bridge.succeed();
    client.synchronize();
    assert!(read(&bridge.memories, &extents(INTO))[50..700_051] == bytes);
    assert_eq!((bridge.lost(), server.trouble()), (None, Vec::new()));
    leaves_nothing(bridge);
}

#[test]
fn a_bridge_whose_keys_are_never_good_for_anything_loses_its_session() {
    let _one = alone();
    let server = TcpServer::start();
    let (bridge, mut client, _) = copied(&server);
    server.hold_commands(true);
    client.dtoh(0, region(INTO, 0, 3000));
    window(1, 3000);
    software::close_windows();
    server.hold_commands(false);
    until("the session has ended", || server.ended() == 1 && bridge.lost().is_some());
    let trouble = server.trouble().concat();
    assert!(trouble.contains("refused a write") && trouble.contains("again and again"), "{trouble}");
    assert!(client.lost().is_some());
    drop(bridge);
    until("nothing is left", || software::objects() == 0);
}
