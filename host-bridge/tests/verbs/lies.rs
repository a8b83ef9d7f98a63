//! Ends of a session that lie when they resume it: what they have acted on, what the server has written, keys
//! and slots.
//!
//! Both are real. What lies is the way between them: it changes frames of the greeting ([`Between`]). Beside
//! the liar's session another one runs, which has to get the right bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;

use protocol::link::{FrameHeader, Hello, Queues, Received, RegionKey, Welcome, Written, frame, purpose};
use rgpu_host_bridge::framing::{Address, recv_frame};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;

type Frames = Vec<(u32, Vec<u8>)>;
type Lie = Arc<dyn Fn(&mut Frames) + Send + Sync>;

/// Whose frames are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liar {
    Bridge,
    Server,
}

#[derive(Default)]
struct Told {
    lie: Mutex<Option<(Liar, Lie)>>,
}

/// The way to a server.
struct Between {
    config: SessionConfig,
    told: Arc<Told>,
}

impl Between {
    fn start(server: &TcpServer) -> Between {
        let Address::Tcp(_, port) = server.config.server else { panic!("a server without a port") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let told = Arc::<Told>::default();
        let for_thread = Arc::clone(&told);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let (told, far) = (Arc::clone(&for_thread), TcpStream::connect(("127.0.0.1", port)).unwrap());
                // A connection may close at any time.
                std::thread::spawn(move || drop(pass(&told, near, far)));
            }
        });
        Between { config: SessionConfig { server: address, ..server.config.clone() }, told }
    }

    /// The next time that the session is resumed, this end says something else. It does so once.
    fn lie(&self, who: Liar, lie: impl Fn(&mut Frames) + Send + Sync + 'static) {
        *self.told.lie.lock().unwrap() = Some((who, Arc::new(lie)));
    }

    /// Whether the lie was told.
    fn has_lied(&self) -> bool {
        self.told.lie.lock().unwrap().is_none()
    }
}

fn pass(told: &Told, near: TcpStream, far: TcpStream) -> std::io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let mut hello = Hello::new_zeroed();
    (&near).read_exact(hello.as_mut_bytes())?;
    (&far).write_all(hello.as_bytes())?;
    let resumes = hello.purpose == purpose::RESUME;
    let lie = if resumes { told.lie.lock().unwrap().take() } else { None };
    let of = |liar| lie.as_ref().filter(|(who, _)| *who == liar).map(|(_, lie)| Arc::clone(lie));
    let (of_bridge, of_server) = (of(Liar::Bridge), of(Liar::Server));
    let (from, to) = (far.try_clone()?, near.try_clone()?);
    let back = std::thread::spawn(move || -> std::io::Result<()> {
        if let Some(lie) = of_server {
            let mut welcome = Welcome::new_zeroed();
            (&from).read_exact(welcome.as_mut_bytes())?;
            (&to).write_all(welcome.as_bytes())?;
            greeting(&from, &to, &lie)?;
        }
        copy(from, to)
    });
    if let Some(lie) = of_bridge {
        greeting(&near, &far, &lie)?;
    }
    copy(near, far)?;
    back.join().unwrap()
}

/// Passes on the frames up to `QUEUES`, as the lie has them.
fn greeting(from: &TcpStream, mut to: &TcpStream, lie: &Lie) -> std::io::Result<()> {
    let mut frames = Frames::new();
    while frames.last().is_none_or(|(kind, _)| *kind != frame::QUEUES) {
        let mut body = Vec::new();
        let Some(kind) = recv_frame(from.as_fd(), &mut body, &mut Vec::new())? else { break };
        frames.push((kind, body));
    }
    lie(&mut frames);
    for (kind, body) in frames {
        let header = FrameHeader { kind, len: body.len() as u32 };
        to.write_all(&[header.as_bytes(), &body].concat())?;
    }
    Ok(())
}

fn copy(mut from: TcpStream, mut to: TcpStream) -> std::io::Result<()> {
    let copied = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    copied.map(drop)
}

/// Changes the number of a stream in `RESUMED`.
fn count(stream: usize, change: impl Fn(u64) -> u64 + Send + Sync) -> impl Fn(&mut Frames) + Send + Sync {
    move |frames| {
        let (_, body) = frames.iter_mut().find(|(kind, _)| *kind == frame::RESUMED).unwrap();
        let entry = &mut body[stream * size_of::<Received>()..][..size_of::<Received>()];
        let (received, _) = Received::mut_from_prefix(entry).unwrap();
        received.bytes = change(received.bytes);
    }
}

/// Inserts a frame before `QUEUES`.
fn insert(kind: u32, body: impl IntoBytes + zerocopy::Immutable) -> impl Fn(&mut Frames) + Send + Sync {
    let body = body.as_bytes().to_vec();
    move |frames| frames.insert(frames.len() - 1, (kind, body.clone()))
}

/// Inserts `WRITTEN` with one write.
fn written(queue: u32, immediate: u32, len: u32) -> impl Fn(&mut Frames) + Send + Sync {
    insert(frame::WRITTEN, Written { queue, immediate, len, reserved: 0 })
}

/// Changes `QUEUES`.
fn queues(change: impl Fn(&mut Queues) + Send + Sync) -> impl Fn(&mut Frames) + Send + Sync {
    move |frames| {
        let (_, body) = frames.iter_mut().find(|(kind, _)| *kind == frame::QUEUES).unwrap();
        change(Queues::mut_from_prefix(body).unwrap().0);
    }
}

/// A session that copies both ways all the time, and checks what comes.
fn beside<T>(server: &TcpServer, work: impl FnOnce() -> T) -> T {
    let (bystander, mut client) = Bridge::begin(&server.config, false);
    let (memories, stop) = (bystander.memories.clone(), AtomicBool::new(false));
    let done = std::thread::scope(|scope| {
        let program = scope.spawn(|| program(&mut client, &memories, 77, &stop));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::SeqCst);
        assert!(program.join().unwrap() > 0, "the other session did nothing");
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert_eq!((bystander.lost(), bystander.session().counters().resumed.get()), (None, 0));
    assert_eq!(bystander.session().close("done", PATIENCE), Closed::Released);
    done
}

/// The liar's session: it has copied both ways, and nothing is under way. Commands 1 to 4.
fn settled(between: &Between) -> (Bridge, Channel, Vec<u32>) {
    let before = software::pairs();
    let (bridge, mut client) = Bridge::begin(&between.config, true);
    // Of the bridge and of the server.
    let pairs = software::pairs().into_iter().filter(|pair| !before.contains(pair)).collect();
    let len = 3000;
    assert_eq!(client.htod(0, region(1, 0, len)), 1);
    client.synchronize();
    assert_eq!(client.dtoh(0, region(2, 0, len)), 3);
    client.synchronize();
    (bridge, client, pairs)
}

/// One end lies once; the session ends with these words: the client's, if it is the bridge that notices,
/// otherwise the server's.
fn ends(
    server: &TcpServer,
    between: &Between,
    who: Liar,
    lie: impl Fn(&mut Frames) + Send + Sync + 'static,
    words: &str,
) {
    let (bridge, client, pairs) = settled(between);
    let (ended, trouble) = (server.ended(), server.trouble().len());
    between.lie(who, lie);
    software::stop(pairs[0]);
    until(&format!("the session ends: {words}"), || server.ended() > ended && bridge.lost().is_some());
    let why = match who {
        Liar::Server => bridge.lost().unwrap(),
        Liar::Bridge => server.trouble()[trouble..].join(" "),
    };
    println!("{who:?}: {why}");
    assert!(why.contains(words) && !why.contains("panic"), "{words:?}: {why}");
    assert!(between.has_lied() && client.lost().is_some());
}

#[test]
fn a_server_that_lies_when_it_resumes_loses_the_session() {
    let _one = alone();
    let server = TcpServer::start();
    let between = Between::start(&server);
    beside(&server, || {
        let ends = |words: &str, lie: Box<dyn Fn(&mut Frames) + Send + Sync>| {
            ends(&server, &between, Liar::Server, lie, words);
        };
        // Writes that there were not.
        ends("through queue 0, which there is not", Box::new(written(0, 3, 10)));
        ends("through queue 99, which there is not", Box::new(written(99, 3, 10)));
        ends("which there is not", Box::new(written(u32::MAX, 3, 10)));
        ends("which was not sent", Box::new(written(1, 5, 10)));
        ends("which was not sent", Box::new(written(1, u32::MAX, 10)));
        ends("which is no data", Box::new(written(1, 3, 0)));
        // For a command that has no data, for one whose data goes the other way, and once more what has come.
        ends("command 2, which expects none", Box::new(written(1, 2, 10)));
        ends("command 1, which expects none", Box::new(written(1, 1, 3000)));
        ends("command 3, which expects none", Box::new(written(1, 3, 3000)));
        // No such frame.
        ends("frame of kind 27, 7 bytes", Box::new(insert(frame::WRITTEN, [1u8; 7])));
        ends("frame of kind 27, 24 bytes", Box::new(insert(frame::WRITTEN, [1u8; 24])));
        ends(
            "frame of kind 27",
            Box::new(|frames: &mut Frames| {
                let (full, queues) = (vec![0; 1 << 20], frames.pop().unwrap());
                frames.extend((0..6).map(|_| (frame::WRITTEN, full.clone())));
                frames.push(queues);
            }),
        );
        ends(
            "frame of kind 27",
            Box::new(|frames: &mut Frames| frames.insert(0, (frame::WRITTEN, vec![0; 16]))),
        );
        ends("frame of kind 99", Box::new(insert(99, 0u32)));
        // Numbers.
        ends("of which", Box::new(count(1, |writes| writes + 1)));
        ends("of which", Box::new(count(2, |_| u64::MAX)));
        ends(
            "acknowledged 1 writes and lost them",
            Box::new(|frames: &mut Frames| {
                let queues = frames[0].1.len() / size_of::<Received>();
                (1..queues).for_each(|queue| count(queue, |_| 0)(frames));
            }),
        );
        ends("of a stream are acknowledged", Box::new(count(0, |bytes| bytes + 1)));
        ends("frame of kind 19", Box::new(|frames: &mut Frames| frames[0].1.truncate(16)));
        // Other slots, and other queues.
        ends("other slots than it began with", Box::new(queues(|queues| queues.slots_address += 4096)));
        ends("other slots than it began with", Box::new(queues(|queues| queues.slots_key ^= 1)));
        ends("other queues than it began with", Box::new(queues(|queues| queues.count = 2)));
    });
    until("nothing is left", || software::objects() == 0);
}

#[test]
fn a_bridge_that_lies_when_it_resumes_loses_the_session() {
    let _one = alone();
    let server = TcpServer::start();
    let between = Between::start(&server);
    beside(&server, || {
        let ends = |words: &str, lie: Box<dyn Fn(&mut Frames) + Send + Sync>| {
            ends(&server, &between, Liar::Bridge, lie, words);
        };
        ends("of which", Box::new(count(1, |writes| writes + 1)));
        ends("of which", Box::new(count(2, |_| u64::MAX)));
        ends("of a stream are acknowledged", Box::new(count(0, |bytes| bytes + 1)));
        ends("other queues than it began with", Box::new(queues(|queues| queues.count = 2)));
        let key = |size| RegionKey { address: 1 << 20, size, region: 2, key: 1 };
        ends("a key that cannot be", Box::new(insert(frame::REGION_KEY, key(1))));
        ends("a key that cannot be", Box::new(insert(frame::REGION_KEY, key(u64::MAX))));
    });
    until("nothing is left", || software::objects() == 0);
}

/// Says keys of so many memories from number `first` on, before `QUEUES`.
fn keys(first: u32, count: u32) -> impl Fn(&mut Frames) + Send + Sync {
    move |frames| {
        let queues = frames.pop();
        let key = |region| RegionKey { address: 1 << 20, size: 4096, region, key: 1 };
        frames.extend((first..first + count).map(|n| (frame::REGION_KEY, key(n).as_bytes().to_vec())));
        frames.extend(queues);
    }
}

/// A program may register new memory for each of its copies as long as it runs.
fn keys_are_forgotten(windows: bool) {
    const KEYS: u32 = 60_000;
    let _one = alone();
    software::have_windows(windows);
    let server = TcpServer::start();
    let between = Between::start(&server);
    let (mut bridge, mut client, _) = settled(&between);
    if !windows {
        // Another process does not know how many keys were said. (This one did not say those of the lies.)
        let ended = software::processes_ended();
        software::end_process_after(0);
        client.mark();
        until("its process has ended", || software::processes_ended() > ended);
        bridge.succeed();
        client.synchronize();
    }
    software::have_windows(true);
    let bytes = pattern(3000, 9);
    write(&bridge.memories, &[Extent { len: 3000, ..extents(1)[0] }], &bytes);
    client.htod(0, region(1, 0, 3000));
    for round in 0..4u32 {
        let resumed = bridge.session().counters().resumed.get();
        between.lie(Liar::Bridge, keys(1000 + round * KEYS, KEYS));
        software::stop(software::pairs()[0]);
        until("it goes on", || {
            bridge.lost().is_some() || bridge.session().counters().resumed.get() > resumed
        });
        assert_eq!((bridge.lost(), between.has_lied()), (None, true), "round {round}");
        for id in [0, 2] {
            write(&bridge.memories, &[Extent { len: 3000, ..extents(id)[0] }], &[0; 3000]);
        }
        client.write_arena(0, &[0; 3000]);
        for to in [region(2, 0, 3000), region(0, 0, 3000), arena(0, 3000)] {
            client.dtoh(0, to);
        }
        client.synchronize();
        let came = [0, 2].map(|id| read(&bridge.memories, &[Extent { len: 3000, ..extents(id)[0] }]));
        assert!(
            came == [bytes.clone(), bytes.clone()] && client.read_arena(0, 3000) == bytes,
            "round {round}"
        );
        // More than a bridge sends before it knows what the server has said.
        for _ in 0..40_000 {
            client.mark();
        }
        client.synchronize();
    }
    assert_eq!((bridge.lost(), server.trouble()), (None, Vec::new()));
    leaves_nothing(bridge);
}

#[test]
fn a_server_forgets_the_keys_of_memories_for_which_nothing_waits() {
    keys_are_forgotten(true);
}

#[test]
fn a_device_without_windows_says_a_key_again_that_the_server_may_have_forgotten() {
    keys_are_forgotten(false);
}

/// Changes something at random.
fn distort(frames: &mut Frames, random: &mut Random) {
    let number = |random: &mut Random| match random.below(4) {
        0 => random.below(8) as u64,
        1 => 1 << random.below(64),
        2 => u64::MAX - random.below(3) as u64,
        _ => random.number(),
    };
    match random.below(6) {
        // Writes that there were not.
        0 | 1 => {
            for _ in 0..1 + random.below(3) {
                let queue = random.below(5) as u32;
                // The last commands, mostly.
                let immediate =
                    if random.below(4) == 0 { number(random) as u32 } else { random.below(400) as u32 };
                let len = [1, 5000, 4096, 300_000, number(random) as u32][random.below(5)];
                written(queue, immediate, len)(frames);
            }
        }
        // Those that there were: once more, not at all, or otherwise.
        2 if frames.iter().any(|(kind, _)| *kind == frame::WRITTEN) => {
            let at = frames.iter().position(|(kind, _)| *kind == frame::WRITTEN).unwrap();
            match random.below(3) {
                0 => frames.insert(at, frames[at].clone()),
                1 => drop(frames.remove(at)),
                _ => {
                    let body = &mut frames[at].1;
                    let place = random.below(body.len());
                    body[place] ^= 1 << random.below(8);
                }
            }
        }
        // How much was acted on.
        2 | 3 => {
            let (_, body) = frames.iter_mut().find(|(kind, _)| *kind == frame::RESUMED).unwrap();
            let entries = body.len() / size_of::<Received>();
            let (stream, change) = (random.below(entries), number(random));
            let less = random.below(2) == 0;
            count(stream, |bytes| if less { bytes.wrapping_sub(change) } else { bytes.wrapping_add(change) })(
                frames,
            );
        }
        // Any bit of any frame but the queue pairs' own, which say where it goes.
        4 => {
            let at = random.below(frames.len() - 1);
            let body = &mut frames[at].1;
            if !body.is_empty() {
                let place = random.below(body.len());
                body[place] ^= 1 << random.below(8);
            }
        }
        _ => {
            let at = random.below(frames.len());
            let frame = frames[at].clone();
            frames.insert(random.below(frames.len()), frame);
        }
    }
}

/// Random lies of either end, also with many requests under way and after the bridge's process has ended: the
/// session continues, or it ends with a reason. No other session is harmed.
#[test]
fn lies_harm_no_other_session() {
    let _one = alone();
    let server = TcpServer::start();
    let between = Between::start(&server);
    let (rounds, mut random) = (number("RGPU_SURVIVAL_CUTS", 25), Random(number("RGPU_SURVIVAL_SEED", 12)));
    let (mut lost, mut outlived) = (0, 0);
    beside(&server, || {
        for round in 0..rounds {
            let before = software::pairs();
            let (mut bridge, mut client) = Bridge::begin(&between.config, true);
            // Who claims to have had frames that it has not does not get them again, and its own program
            // waits.
            client.wait_at_most(Duration::from_secs(3));
            let pairs: Vec<u32> =
                software::pairs().into_iter().filter(|pair| !before.contains(pair)).collect();
            let (memories, stop, dies) =
                (bridge.memories.clone(), AtomicBool::new(false), random.below(2) == 0);
            let (ended, seed) = (software::processes_ended(), random.number());
            let who = if random.below(3) == 0 { Liar::Bridge } else { Liar::Server };
            between.lie(who, move |frames| distort(frames, &mut Random(seed)));
            std::thread::scope(|scope| {
                // A lie that is no more than what a command expects may give this one wrong bytes. It ends
                // then, as it does with its session.
                let program = scope.spawn(|| {
                    let ran = std::panic::AssertUnwindSafe(|| program(&mut client, &memories, round, &stop));
                    std::panic::catch_unwind(ran).is_ok()
                });
                if dies {
                    software::end_process_after(random.below(3000) as u64);
                    until("its process has ended", || {
                        software::processes_ended() > ended || program.is_finished()
                    });
                    bridge.succeed();
                } else {
                    std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
                    software::stop(pairs[random.below(pairs.len())]);
                }
                let resumed = bridge.session().counters().resumed.get();
                until("it goes on or ends", || {
                    between.has_lied()
                        && (bridge.lost().is_some()
                            || bridge.session().counters().resumed.get() > resumed
                            || program.is_finished())
                });
                software::end_process_after(u64::MAX);
                stop.store(true, Ordering::SeqCst);
                until("the program ends", || program.is_finished());
                program.join().unwrap();
            });
            match bridge.lost() {
                Some(why) => {
                    assert!(!why.contains("panic"), "{why}");
                    lost += 1;
                }
                None => outlived += 1,
            }
            bridge.session().close("done", PATIENCE);
            drop(bridge);
            until("its session has ended", || server.ended() as u64 > round);
        }
    });
    println!("{rounds} lies: {lost} sessions ended, {outlived} went on; {:?}", server.trouble());
    assert!(lost > 0 && !server.trouble().iter().any(|why| why.contains("panic")), "{:?}", server.trouble());
    until("nothing is left", || software::objects() == 0);
}
