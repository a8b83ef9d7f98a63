//! The virtio device from outside: a VMM that speaks vhost-user, and a driver that speaks `docs/device.md`
//! over the virtqueues.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use daemon::Daemon;
use guest::{CHANNEL, Guest, create, message, plain};
use protocol::channel::{Geometry, NO_SLOT, State};
use protocol::data::{HostIn, HostOut, HostRange};
use protocol::device::{
    Answer, CONFIG_MAGIC, CONTROL_QUEUE, Config, DEVICE_VERSION, DOORBELL_QUEUE, EVENT_QUEUE, EVENT_WAKE,
    Event, Extent, Request, request,
};
use protocol::handle::StreamId;
use protocol::link::wish;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamSynchronize;
use protocol::ops::{Op, encode};
use test_kit::channel::write_header;
use test_kit::server::{Behavior, FakeServer};
use test_kit::session::{RAM, read, write};
use test_kit::*;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use zerocopy::FromBytes;

#[test]
fn the_configuration_space_describes_the_device() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let (_, bytes) = guest.frontend.get_config(0, 64, VhostUserConfigFlags::empty(), &[0; 64]).unwrap();
    let config = Config::read_from_bytes(&bytes).unwrap();
    let expected = Config {
        magic: CONFIG_MAGIC,
        version: DEVICE_VERSION,
        max_channels: 256,
        max_extents: 1 << 20,
        max_channel_size: 256 << 20,
        max_registered: 0,
        reserved: [0; 32],
    };
    assert_eq!(config, expected);
    let (_, part) = guest.frontend.get_config(4, 4, VhostUserConfigFlags::empty(), &[0; 4]).unwrap();
    assert_eq!(part, DEVICE_VERSION.to_le_bytes());
}

#[test]
fn a_guests_channel_is_for_one_of_the_servers_that_its_host_offers() {
    let servers = [FakeServer::good(), FakeServer::good()];
    let addresses = servers.each_ref().map(|server| server.address.to_string());
    let daemon = Daemon::start(&["--server", &addresses[0], "--server", &addresses[1], "--name", "testvm"]);
    let mut guest = Guest::connect(&daemon);
    let mut open = |channel: u32, number: u32, name: &str| {
        let (extents, geometry) = guest.prepare(channel);
        let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
        view.header().ask_for_server(number, name);
        (guest.ask(create(channel, &extents), &extents), view.header().servers())
    };
    assert_eq!(open(0, 1, ""), ((Answer::Ok, String::new()), 2));
    assert_eq!(servers.each_ref().map(|server| server.programs().len()), [0, 1]);
    for (number, name) in [(2, ""), (0, addresses[1].as_str())] {
        let ((answer, reason), _) = open(1, number, name);
        assert_eq!(answer, Answer::Invalid, "{number} {name}: {reason}");
    }
    assert_eq!(servers.each_ref().map(|server| server.programs().len()), [0, 1]);
}

#[test]
fn a_guest_sends_commands_and_data_through_its_channel() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let extents = scattered(1_000_003, 4);
    let bytes = pattern(1_000_003, 4);
    write(&guest.memories, &extents, &bytes);
    let register = Request { kind: request::REGISTER_MEMORY, region: 7, ..create(0, &extents) };
    assert_eq!(guest.ask(register, &extents), (Answer::Ok, String::new()));
    let src = HostIn::Range(region(7, 0, 1_000_003));
    channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 9, src }, NO_SLOT);
    channel.synchronize();
    write(&guest.memories, &extents, &vec![0; bytes.len()]);
    let dst = HostOut(region(7, 0, 1_000_003));
    channel.push(&MemcpyDtoH { stream: StreamId(0), src: 9, dst }, NO_SLOT);
    channel.synchronize();
    assert!(read(&guest.memories, &extents) == bytes);
    let unregister = Request { region: 7, ..plain(request::UNREGISTER_MEMORY, 0) };
    assert_eq!(guest.ask(unregister, &[]).0, Answer::Ok);
    assert_eq!(daemon.status()["sessions"][0]["owner"], "vm testvm");
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
    assert_eq!(daemon.sessions(), 0);
    // The ID is free again.
    let mut channel = guest.create(0);
    channel.synchronize();
}

#[test]
fn a_wake_waits_for_a_buffer_and_is_delivered_once() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channels = [guest.create(3), guest.create(5)];
    for channel in &mut channels {
        // A waiter that sleeps before the reply arrives, so that the completion must wake it.
        channel.view().slot(0).unwrap().prepare();
        assert!(channel.view().slot(0).unwrap().announce_sleep());
        let mut body = Vec::new();
        encode(&StreamSynchronize { stream: StreamId(0) }, &mut body);
        channel.push_raw(StreamSynchronize::INFO.opcode, 0, &body);
    }
    guest.kick(DOORBELL_QUEUE);
    for channel in &channels {
        eventually(|| channel.view().slot(0).unwrap().poll(&mut Vec::new()).is_some());
    }
    // Nobody had posted a buffer; both wakes are remembered.
    let mut woken = Vec::new();
    for _ in 0..2 {
        let at = guest.post_event();
        assert_eq!(guest.wait_used(EVENT_QUEUE).1, 8);
        let event = Event::read_from_bytes(&guest.read::<8>(at)).unwrap();
        assert_eq!(event.kind, EVENT_WAKE);
        woken.push(event.channel);
    }
    woken.sort_unstable();
    assert_eq!(woken, [3, 5]);
    guest.post_event();
    channels[0].synchronize();
    assert_eq!(guest.used(EVENT_QUEUE), None, "nobody slept");
}

#[test]
fn malformed_requests_are_answered_and_the_device_continues() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(1);
    let (extents, _) = guest.prepare(2);
    let good = create(2, &extents);
    let outside = [Extent { addr: RAM - 4096, len: 8192 }];
    let wild = [Extent { addr: u64::MAX - 4095, len: 8192 }];
    let unaligned = [Extent { addr: CHANNEL + 1, len: 8192 }];
    let empty_header = [Extent { addr: 32 << 20, len: 8192 }];
    let register =
        |extents: &[Extent], channel| Request { kind: request::REGISTER_MEMORY, ..create(channel, extents) };
    let unregister = |channel| plain(request::UNREGISTER_MEMORY, channel);
    let cases: Vec<(Vec<u8>, Answer, &str)> = vec![
        (vec![], Answer::Invalid, ""),
        (vec![1; 31], Answer::Invalid, "too early"),
        (message(good, &extents[..1]), Answer::Invalid, "announced"),
        (message(Request { extent_count: u32::MAX, ..good }, &extents), Answer::NoResources, "extents"),
        (message(plain(99, 0), &[]), Answer::Unsupported, "99"),
        (message(Request { channel: 1, ..good }, &extents), Answer::Invalid, "exists already"),
        (message(create(2, &outside), &outside), Answer::Invalid, "outside"),
        (message(create(2, &wild), &wild), Answer::Invalid, "outside"),
        (message(create(2, &unaligned), &unaligned), Answer::Invalid, "whole pages"),
        (message(create(2, &empty_header), &empty_header), Answer::Invalid, "rGPUchan"),
        (message(register(&outside, 1), &outside), Answer::Invalid, "outside"),
        (message(register(&extents, 9), &extents), Answer::Invalid, "does not exist"),
        (message(unregister(1), &[]), Answer::Invalid, "not registered"),
        (message(unregister(9), &[]), Answer::Invalid, "does not exist"),
        (message(plain(request::DESTROY_CHANNEL, 9), &[]), Answer::Invalid, "does not exist"),
    ];
    for (bytes, answer, word) in cases.into_iter().skip(1) {
        let (got, reason) = guest.raw(&bytes);
        assert_eq!(got, answer, "{reason}");
        assert!(reason.contains(word), "{word}: {reason}");
    }
    // Chains that cannot be answered, or are outside memory, are returned anyway.
    let at = guest.buffer(64);
    for chain in [
        vec![(at, 32, false)],
        vec![(RAM + 4096, 32, false), (at, 8, true)],
        vec![(at, 32, false), (RAM + 4096, 264, true)],
        vec![(at, 8, true)],
        vec![(at, 0, false)],
        vec![(at, u32::MAX, false), (at, u32::MAX, true)],
    ] {
        let head = guest.offer(CONTROL_QUEUE, &chain);
        guest.kick(CONTROL_QUEUE);
        assert_eq!(guest.wait_used(CONTROL_QUEUE).0, head, "{chain:x?}");
    }
    for chain in [vec![(at, 8, false)], vec![(at, 7, true)], vec![(RAM + 4096, 8, true)]] {
        guest.offer(EVENT_QUEUE, &chain);
    }
    guest.kick(EVENT_QUEUE);
    channel.synchronize();
    assert_eq!(guest.raw(&message(good, &extents)).0, Answer::Ok);
    assert!(daemon.status()["malformed_requests"].as_u64().unwrap() >= 11);
}

#[test]
fn pieces_of_registered_memory_are_counted_for_the_whole_guest() {
    let server = FakeServer::good();
    let limit = ["--server", &server.address.to_string(), "--max-registered-extents", "100"];
    let daemon = Daemon::start(&limit);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    guest.create(1);
    // One byte each, none adjacent: so few bytes that a host would never notice.
    let bytes = |count: u64| -> Vec<Extent> {
        (0..count).map(|i| Extent { addr: (40 << 20) + 2 * i, len: 1 }).collect()
    };
    let register = |channel, region, extents: &[Extent]| Request {
        kind: request::REGISTER_MEMORY,
        region,
        ..create(channel, extents)
    };
    let (sixty, forty_one) = (bytes(60), bytes(41));
    assert_eq!(guest.ask(register(0, 1, &sixty), &sixty), (Answer::Ok, String::new()));
    let (answer, reason) = guest.ask(register(1, 1, &forty_one), &forty_one);
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("registered 60 pieces, the limit is 100"), "{reason}");
    // Adjacent pages are one piece, however many extents describe them.
    let pages: Vec<Extent> = (0..300).map(|i| Extent { addr: (50 << 20) + 4096 * i, len: 4096 }).collect();
    assert_eq!(guest.ask(register(1, 2, &pages), &pages), (Answer::Ok, String::new()));
    // What a program releases or leaves behind is free for others.
    let unregister = Request { region: 1, ..plain(request::UNREGISTER_MEMORY, 0) };
    assert_eq!(guest.ask(unregister, &[]).0, Answer::Ok);
    assert_eq!(guest.ask(register(1, 1, &forty_one), &forty_one).0, Answer::Ok);
    assert_eq!(guest.ask(register(0, 1, &sixty), &sixty).0, Answer::NoResources);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]).0, Answer::Ok);
    assert_eq!(guest.ask(register(0, 1, &sixty), &sixty).0, Answer::Ok);
    channel.synchronize();
}

#[test]
fn a_guest_with_scattered_channels_is_refused_before_the_host_runs_out_of_mappings() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    // A channel of 46 MiB without adjacent pages; the same page may appear in it more than once.
    let geometry = Geometry::with_arena(46 << 20);
    let header = CHANNEL + (8 << 20);
    let page = |addr| Extent { addr, len: 4096 };
    let count = geometry.size as u64 / 4096;
    let extents: Vec<Extent> =
        (0..count).map(|i| page(header + if i == 0 { 0 } else { 0x2000 + i % 2 * 0x2000 })).collect();
    guest.fill(header, 0x6000);
    write_header(&guest.memories, header, &geometry.fields(3, "scattered"));
    let open = |guest: &mut Guest, id| {
        guest.reuse_buffers();
        guest.ask(create(id, &extents), &extents)
    };
    let refusal = (1..20).map(|id| open(&mut guest, id)).find(|answer| answer.0 != Answer::Ok);
    let (answer, reason) = refusal.unwrap();
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("this host maps at most") && reason.contains("vm.max_map_count"), "{reason}");
    // Existing channels and small new ones still work, and released mappings can be used again.
    channel.synchronize();
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]).0, Answer::Ok);
    assert_eq!(open(&mut guest, 1), (Answer::Ok, String::new()));
}

#[test]
fn a_malformed_command_ends_its_channel_and_no_other() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let (mut bad, mut good) = (guest.create(0), guest.create(1));
    let at = guest.post_event();
    bad.push_raw(0x7fff, NO_SLOT, &[]);
    guest.kick(DOORBELL_QUEUE);
    eventually(|| bad.view().header().state() == State::Lost);
    assert!(bad.view().header().reason().contains("0x7fff"));
    guest.wait_used(EVENT_QUEUE);
    let event = Event::read_from_bytes(&guest.read::<8>(at)).unwrap();
    assert_eq!((event.kind, event.channel), (EVENT_WAKE, 0));
    good.synchronize();
    // A loss is counted a moment after the guest was told.
    eventually(|| daemon.number("sessions_lost") == 1);
    // The guest still has to destroy it, which releases its memory.
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
}

#[test]
fn a_slow_request_delays_no_other() {
    let server = FakeServer::start(Behavior { hold_data: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let extents = scattered(100_000, 4);
    let register = Request { kind: request::REGISTER_MEMORY, region: 1, ..create(0, &extents) };
    assert_eq!(guest.ask(register, &extents).0, Answer::Ok);
    let dst = HostOut(HostRange { len: 5, ..region(1, 0, 0) });
    channel.push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    eventually(|| server.commands().len() == 1);
    // The server is held in the copy, so the region cannot be released.
    let (slow, slow_at) =
        guest.send(&message(Request { region: 1, ..plain(request::UNREGISTER_MEMORY, 0) }, &[]));
    let (quick, quick_at) = guest.send(&message(plain(request::DESTROY_CHANNEL, 77), &[]));
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, quick);
    assert_eq!(guest.answer_at(quick_at).0, Answer::Invalid);
    server.release();
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, slow);
    assert_eq!(guest.answer_at(slow_at).0, Answer::Ok);
}

#[test]
fn a_channel_in_a_servers_queue_is_answered_immediately_and_can_be_destroyed() {
    let server = FakeServer::start(Behavior { queue: &[7], never_serves: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let waiting = |guest: &mut Guest, channel: u32| {
        let (extents, geometry) = guest.prepare(channel);
        let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
        view.header().set_wishes(wish::MAY_WAIT);
        assert_eq!(guest.ask(create(channel, &extents), &extents), (Answer::Ok, String::new()));
        assert_eq!((view.header().state(), view.header().ahead()), (State::Waiting, 7));
        view
    };
    let first = waiting(&mut guest, 1);
    // A sign of life comes while it waits.
    let alive = first.header().alive();
    eventually(|| first.header().alive() != alive);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]), (Answer::Ok, String::new()));
    eventually(|| server.left() == 1);
    // A reset takes a channel out of the queue as well.
    waiting(&mut guest, 2);
    guest.reset();
    eventually(|| server.left() == 2);
    eventually(|| daemon.sessions() == 0);
}

#[test]
fn a_reset_takes_a_channel_out_of_a_servers_queue_that_was_not_told_to_wait_yet() {
    let server = FakeServer::start(Behavior {
        queue: &[7],
        never_serves: true,
        hold_queue: true,
        ..Behavior::default()
    });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(1);
    guest.memories.view(&extents, geometry.size as u64).unwrap().header().set_wishes(wish::MAY_WAIT);
    guest.send(&message(create(1, &extents), &extents));
    eventually(|| server.programs().len() == 1);
    guest.reset();
    // Only now the server says that the channel has to wait.
    server.release();
    eventually(|| server.left() == 1);
}

#[test]
fn a_channel_that_waited_learns_how_it_ended() {
    let server = FakeServer::start(Behavior { queue: &[2, 1], ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(1);
    let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
    view.header().set_wishes(wish::MAY_WAIT);
    assert_eq!(guest.ask(create(1, &extents), &extents), (Answer::Ok, String::new()));
    eventually(|| view.header().state() == State::Ready);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]), (Answer::Ok, String::new()));

    let refusal = Some((Answer::NoResources, "nobody is served here"));
    let server = FakeServer::start(Behavior { queue: &[1], answer: refusal, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(1);
    let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
    view.header().set_wishes(wish::MAY_WAIT);
    assert_eq!(guest.ask(create(1, &extents), &extents), (Answer::Ok, String::new()));
    eventually(|| view.header().state() == State::Lost);
    assert!(view.header().reason().contains("nobody is served here"), "{}", view.header().reason());
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]), (Answer::Ok, String::new()));
}

#[test]
fn a_reset_ends_every_channel_and_the_device_can_be_used_again() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let (old, _other) = (guest.create(0), guest.create(1));
    guest.reset();
    assert_eq!(daemon.sessions(), 0);
    assert_eq!(old.view().header().state(), State::Lost);
    // The guest may now do anything with its memory: nothing writes there any more.
    for index in 0..3 {
        guest.start(index);
    }
    let mut channel = guest.create(0);
    channel.synchronize();
}

#[test]
fn a_new_memory_table_does_not_disturb_running_sessions() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    // The same memory again, as a VMM sends it when something is plugged in.
    let file = guest.memories.files().next().unwrap().1.try_clone().unwrap();
    guest.share(&file);
    channel.synchronize();
    let mut other = guest.create(1);
    other.synchronize();
    channel.synchronize();
}

#[test]
fn sessions_end_with_their_vmm_and_the_next_vmm_is_served() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let once = |daemon: &Daemon| {
        let mut guest = Guest::connect(daemon);
        let mut channel = guest.create(0);
        channel.synchronize();
    };
    once(&daemon);
    eventually(|| daemon.sessions() == 0);
    // Main, and one for each of three sockets.
    eventually(|| daemon.resources().1 <= 4);
    let before = daemon.resources();
    for _ in 0..20 {
        once(&daemon);
    }
    eventually(|| {
        let now = daemon.resources();
        now.0 <= before.0 && now.1 <= before.1
    });
}

/// Header of vhost-user's message GET_FEATURES.
fn get_features() -> Vec<u8> {
    [1u32, 1, 0].map(u32::to_ne_bytes).concat()
}

/// Connects to the daemon's virtual machine and says this, as far as it is taken. Gives how much that was.
fn says(daemon: &Daemon, said: &[u8]) -> (UnixStream, usize) {
    let vmm = UnixStream::connect(daemon.vm()).unwrap();
    eventually(|| daemon.log().contains("a VMM has connected"));
    vmm.set_nonblocking(true).unwrap();
    let mut taken = 0;
    while let Ok(n) = (&vmm).write(&said[taken..])
        && n > 0
    {
        taken += n;
    }
    (vmm, taken)
}

#[test]
fn an_upgrade_does_not_wait_for_the_rest_of_a_message() {
    let daemon = Daemon::serving(&FakeServer::good());
    let message = get_features();
    let (_vmm, said) = says(&daemon, &message[..3]);
    assert_eq!(said, 3);
    daemon.upgrade();
}

#[test]
fn an_upgrade_does_not_wait_for_a_vmm_that_does_not_read_the_answers() {
    let daemon = Daemon::serving(&FakeServer::good());
    let message = get_features();
    let (_vmm, asked) = says(&daemon, &message.repeat(100_000));
    assert!(asked < 100_000 * message.len(), "everything was answered");
    daemon.upgrade();
}

#[test]
fn a_guest_that_writes_to_the_configuration_space_keeps_its_device() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    for _ in 0..20 {
        guest.frontend.set_config(0, VhostUserConfigFlags::WRITABLE, &[1; 64]).unwrap();
    }
    guest.settle();
    channel.synchronize();
    let (_, bytes) = guest.frontend.get_config(0, 64, VhostUserConfigFlags::empty(), &[0; 64]).unwrap();
    assert_eq!(Config::read_from_bytes(&bytes).unwrap().magic, CONFIG_MAGIC);
}

#[test]
fn a_guest_that_resets_its_device_again_and_again_does_not_fill_the_log() {
    const RESETS: usize = 60;
    let daemon = Daemon::serving(&FakeServer::good());
    let (mut guest, begin) = (Guest::connect(&daemon), Instant::now());
    for _ in 0..RESETS {
        guest.reset();
        (0..3).for_each(|index| guest.start(index));
    }
    guest.settle();
    let lines = |what: &str| daemon.log().matches(what).count();
    eventually(|| lines("the guest was reset") > 0 && lines("the guest does not run") > 0);
    // Ten at once, or twenty for two kinds of lines together, and one more each second.
    let most = |burst: u64| (burst + begin.elapsed().as_secs() + 1) as usize;
    assert!(lines("the guest was reset") <= most(10), "{} lines", lines("the guest was reset"));
    let stops = lines("the guest does not run") + lines("the guest runs again");
    assert!(stops <= most(20), "{stops} lines");
}

#[test]
fn the_log_says_why_a_guests_memory_is_refused() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    guest.share(&memfd(0));
    eventually(|| {
        let log = daemon.log();
        log.lines().any(|line| line.contains("WARN") && line.contains("a file of 0x0 bytes"))
    });
}
