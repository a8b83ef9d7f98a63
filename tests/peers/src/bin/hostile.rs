//! A peer over verbs that does not keep to the protocol: what the tests set on a running `rgpu-server` and a
//! running `vhost-rgpu`.
//!
//! ```text
//! hostile bridge 10.0.1.1:9700 --device rxe1 --do outside       as a bridge, against rgpu-server
//! hostile server 10.0.1.1:9701 --device rxe0 --do immediate     as a server, against vhost-rgpu
//! hostile relay 127.0.0.1:9702 --do 127.0.0.1:9700 --life 300   as the way between both: breaks the first control
//!                                     connection after so many milliseconds, and each further one after a sixteenth more
//! ```
//!
//! It shakes hands properly, does one forbidden thing, and prints in one line how that ended: `ended: REASON`
//! when the other side ended the session and said why, `refused: REASON` when the device refused the request.
//! It fails when nothing of that happened.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use host_bridge::framing::{FrameReader, recv_frame, recv_struct, send_frame, send_message, split_struct};
use host_bridge::verbs::{
    Access, Before, Device, Domain, Event, Link, Put, Settings, Slab, Unconnected, VerbsError,
};
use protocol::device::{Answer, untext};
use protocol::link::{
    DataHeader, DataSent, FrameHeader, Hello, ProgressUpdate, Queues, Received, RegionKey, ReplyHeader,
    SLOT_DATA, Welcome, frame, purpose,
};
use test_kit::link::{greet, hello, welcome};
use zerocopy::IntoBytes;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long the other side may take to end the session.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long its farewell may take once the queue pairs are broken.
const FAREWELL: Duration = Duration::from_secs(30);
const SOURCE: usize = 1 << 20;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (role, address) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let (mut settings, mut what, mut life) = (Settings::default(), String::new(), Duration::ZERO);
    while let Some(option) = args.next() {
        let value = args.next().ok_or(format!("{option} wants a value"))?;
        match option.as_str() {
            "--device" => settings.device = Some(value),
            "--do" => what = value,
            "--life" => life = Duration::from_millis(value.parse()?),
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    match role.as_str() {
        "bridge" => bridge(&address, &settings, &what),
        "server" => server(&address, &settings, &what),
        "relay" => relay(&address, &what, life),
        _ => Err("hostile bridge|server ADDRESS --device NAME --do WHAT, hostile relay ADDRESS --do ADDRESS --life MILLISECONDS"
            .into()),
    }
}

/// A session after a proper handshake.
struct Session {
    link: Link,
    source: Slab,
    peer: Queues,
    control: TcpStream,
    /// For the bridge: what its session is resumed with.
    hello: Hello,
    /// Bytes that have come of the peer's stream.
    heard: u64,
}

/// What a server gives a bridge that comes back: the connection, what it has acted on, and its queue pairs;
/// and the bridge's own.
type CameBack = (TcpStream, Vec<u64>, Queues, Unconnected);

/// Changes what this side believes, or tells the peer, of the queue pairs.
#[derive(Clone, Copy, PartialEq)]
enum Twist {
    None,
    /// Messages go where writes belong, and the other way round.
    Swapped,
    /// The peer is believed to have posted far more receives than it has.
    Greedy,
}

impl Session {
    fn connect(address: &str, settings: &Settings, twist: Twist) -> Result<Session> {
        let control = TcpStream::connect(address)?;
        let welcome = greet(&control, &hello(purpose::VERBS, [0; 16], 2))?;
        if welcome.status != Answer::Ok as u32 {
            return Err(format!("refused: {}", untext(&welcome.reason)).into());
        }
        let Welcome { token, secret, .. } = welcome;
        let hello = Hello { token, secret, ..hello(purpose::RESUME, token, 0) };
        Session::queues(control, settings, twist, true, hello)
    }

    fn accept(control: TcpStream, settings: &Settings) -> Result<Session> {
        recv_struct::<Hello>(control.as_fd(), &mut Vec::new())?.ok_or("no hello")?;
        let welcome = Welcome { token: [1; 16], ..welcome(Answer::Ok, "") };
        send_message(control.as_fd(), &[welcome.as_bytes()], &[])?;
        Session::queues(control, settings, Twist::None, false, hello(purpose::VERBS, [1; 16], 0))
    }

    fn queues(
        control: TcpStream,
        settings: &Settings,
        twist: Twist,
        first: bool,
        hello: Hello,
    ) -> Result<Session> {
        let domain: Arc<Domain> = Domain::new(Device::open(settings)?)?;
        let source = Slab::new(&domain, SOURCE, Access::RemoteWrite)?;
        let unconnected = Unconnected::new(&domain, settings)?;
        let slot = (SOURCE / 16) as u32;
        let mut offer = unconnected.offer(if first { None } else { Some((&source, slot)) });
        if twist == Twist::Swapped {
            offer.queue_pairs.swap(0, 1);
        }
        let say = || send_frame(control.as_fd(), frame::QUEUES, &[offer.as_bytes()], &[]);
        if first {
            say()?;
        }
        let mut body = Vec::new();
        let kind = recv_frame(control.as_fd(), &mut body, &mut Vec::new())?;
        if kind != Some(frame::QUEUES) {
            return Err(format!("frame {kind:?} where QUEUES was due").into());
        }
        let mut peer = split_struct::<Queues>(&body)?.0;
        match twist {
            Twist::None => {}
            Twist::Swapped => peer.queue_pairs.swap(0, 1),
            Twist::Greedy => peer.receives = 1 << 15,
        }
        let mut link = unconnected.connect(&peer)?;
        if first {
            link.keep();
        }
        if !first {
            say()?;
        }
        control.set_nonblocking(true)?;
        Ok(Session { link, source, peer, control, hello, heard: 0 })
    }

    /// Knocks as the session's bridge that comes back for the `attempt`-th time. The error is the server's
    /// refusal.
    fn knock(&self, address: &str, hello: &Hello) -> Result<std::result::Result<TcpStream, String>> {
        let control = TcpStream::connect(address)?;
        control.set_read_timeout(Some(PATIENCE))?;
        let welcome = greet(&control, hello)?;
        let welcomed = welcome.status == Answer::Ok as u32;
        Ok(if welcomed { Ok(control) } else { Err(untext(&welcome.reason)) })
    }

    /// Comes back, says that it has acted on so many bytes of frames and so many writes, and offers queue
    /// pairs as `settings` have it. `None`: the server closed the connection.
    fn come_back(
        &mut self,
        address: &str,
        settings: &Settings,
        attempt: u32,
        taken: &[u64],
        key: Option<RegionKey>,
    ) -> Result<Option<CameBack>> {
        let control = self.knock(address, &Hello { attempt, ..self.hello })??;
        let fresh = Unconnected::new(self.link.domain(), settings)?;
        let entry = |(stream, bytes): (u32, &u64)| Received { stream, reserved: 0, bytes: *bytes };
        let entries: Vec<Received> = (0..).zip(taken).map(entry).collect();
        let offer = fresh.offer(None);
        let key = key.as_ref().map(|key| (frame::REGION_KEY, key.as_bytes()));
        let begin = [(frame::RESUMED, entries.as_bytes())].into_iter().chain(key);
        for (kind, body) in begin.chain([(frame::QUEUES, offer.as_bytes())]) {
            if send_frame(control.as_fd(), kind, &[body], &[]).is_err() {
                return Ok(None);
            }
        }
        let (mut counts, mut peer) = (Vec::new(), Vec::new());
        let kinds = [
            recv_frame(control.as_fd(), &mut counts, &mut Vec::new()),
            recv_frame(control.as_fd(), &mut peer, &mut Vec::new()),
        ];
        let [Ok(Some(frame::RESUMED)), Ok(Some(frame::QUEUES))] = kinds else { return Ok(None) };
        let number = |entry: &[u8]| Ok(split_struct::<Received>(entry)?.0.bytes);
        let counts = counts.chunks(size_of::<Received>()).map(number).collect::<Result<_>>()?;
        Ok(Some((control, counts, split_struct::<Queues>(&peer)?.0, fresh)))
    }

    /// Exchanges messages, one after the other.
    fn chat(&mut self, count: usize) -> Result<()> {
        let (mut reader, mut came, begin) = (FrameReader::new(), 0, Instant::now());
        for number in 1..=count {
            self.frame(frame::ALIVE, &[]);
            while came < number * size_of::<FrameHeader>() {
                if let Some(how) = self.turn(&mut reader, &mut came) {
                    return Err(format!("a session that did nothing wrong {how}").into());
                }
                if begin.elapsed() > PATIENCE {
                    return Err("no answer".into());
                }
            }
        }
        Ok(())
    }

    /// Does what a bridge may do in the wrong way when it comes back. Some: how the session ended.
    fn resume(&mut self, address: &str, settings: &Settings, what: &str) -> Result<Option<String>> {
        self.chat(100)?;
        if what == "resume-stranger" {
            let mut wrong = Hello { attempt: 1, ..self.hello };
            wrong.secret[31] ^= 1;
            let refused = self.knock(address, &wrong)?.err().ok_or("a stranger was let in")?;
            self.chat(10)?;
            return Ok(Some(format!("refused: {refused}")));
        }
        if what == "resume-less" {
            let received = Received { stream: 0, reserved: 0, bytes: self.heard };
            self.frame(frame::RECEIVED, received.as_bytes());
            self.chat(1)?;
        }
        self.link.take_down::<VerbsError>(&mut |_| Ok(()))?;
        let taken: Vec<u64> = std::iter::once(self.heard).chain(self.link.taken()).collect();
        let came_back = match what {
            "resume-more" => self.come_back(address, settings, 1, &vec![u64::MAX; taken.len()], None)?,
            "resume-less" => self.come_back(address, settings, 1, &vec![0; taken.len()], None)?,
            "resume-key" => {
                let key = RegionKey { address: u64::MAX, size: 2, region: 0, key: 1 };
                self.come_back(address, settings, 1, &taken, Some(key))?
            }
            "resume-queues" => {
                let settings = Settings { queue_pairs: Some(1), ..settings.clone() };
                self.come_back(address, &settings, 1, &taken, None)?
            }
            _ => {
                let back = self.come_back(address, settings, 5, &taken, None)?.ok_or("it was not let in")?;
                let (control, theirs, peer, fresh) = back;
                let (stream, writes) = theirs.split_first().ok_or("no stream")?;
                self.link.send_buffer().resume(*stream)?;
                self.link.settle::<VerbsError>(writes, &mut |_| Ok(()))?;
                self.link.go_on(fresh, &peer, Before::Everything)?;
                control.set_nonblocking(true)?;
                self.control = control;
                self.chat(10)?;
                for attempt in [5, 3] {
                    if self.come_back(address, settings, attempt, &taken, None)?.is_some() {
                        return Err(format!("attempt {attempt} was let in behind attempt 5").into());
                    }
                }
                self.chat(10)?;
                return Ok(Some("refused: attempts that were not the latest".into()));
            }
        };
        if came_back.is_some() {
            return Err("it was let in".into());
        }
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if let Err(reason) = self.knock(address, &Hello { attempt: 100, ..self.hello })? {
                return Ok(Some(format!("ended: {reason}")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(None)
    }

    fn frame(&mut self, kind: u32, body: &[u8]) {
        self.frame_of(kind, body.len() as u32, body);
    }

    fn frame_of(&mut self, kind: u32, len: u32, body: &[u8]) {
        self.link.out().extend_from_slice(FrameHeader { kind, len }.as_bytes());
        self.link.out().extend_from_slice(body);
    }

    /// A write like a piece of data: a header and `len` bytes behind it, all at `address`.
    fn write(
        &mut self,
        header: Option<DataHeader>,
        len: u32,
        address: u64,
        key: u32,
        immediate: u32,
    ) -> Result<()> {
        let source = self.source.registration().slice(0, len).ok_or("source")?;
        let queue = self.link.next_queue().ok_or("no queue")?;
        let place = (0, 0);
        let put = Put { queue, source, header, address, key, place, immediate, token: 0, signal: true };
        Ok(self.link.put(&put)?)
    }

    /// Where a piece in this slot of the server's begins.
    fn slot(&self, slot: u32) -> u64 {
        let begin = u64::from(slot) * u64::from(self.peer.slot_size) + u64::from(SLOT_DATA);
        self.peer.slots_address + begin - size_of::<DataHeader>() as u64
    }

    /// One turn. Some: how the session ended.
    fn turn(&mut self, reader: &mut FrameReader, came: &mut usize) -> Option<String> {
        let heard = &mut self.heard;
        let turned = self.link.poll::<VerbsError>(&mut |event| {
            if let Event::Bytes(bytes) = event {
                *came += bytes.len();
                *heard += bytes.len() as u64;
            }
            Ok(())
        });
        let broken = turned.err().or_else(|| self.link.flush().err());
        // A farewell says more than queue pairs that broke.
        let until = Instant::now() + if broken.is_some() { FAREWELL } else { Duration::ZERO };
        loop {
            match reader.fill(&mut self.control) {
                Ok(0) if broken.is_none() => return Some("ended: (without a word)".into()),
                Ok(0) => break,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(_) => break,
            }
            while let Ok(Some((kind, body))) = reader.next_frame() {
                if kind == frame::BYE {
                    return Some(format!("ended: {}", String::from_utf8_lossy(body)));
                }
            }
        }
        broken.map(|e| format!("refused: {e}"))
    }

    /// Goes on until the session has ended, and says how.
    fn ending(&mut self) -> Result<String> {
        let (mut reader, mut came, begin) = (FrameReader::new(), 0, Instant::now());
        let mut said = begin;
        while begin.elapsed() < PATIENCE {
            if let Some(how) = self.turn(&mut reader, &mut came) {
                return Ok(how);
            }
            // That it falls silent shall not be what ends it.
            if said.elapsed() > Duration::from_secs(1) {
                said = Instant::now();
                self.frame(frame::ALIVE, &[]);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("nobody minded".into())
    }

    /// How it ends, if it does within `time`.
    fn ends_within(&mut self, time: Duration) -> Option<String> {
        let (mut reader, mut came, begin) = (FrameReader::new(), 0, Instant::now());
        while begin.elapsed() < time {
            if let Some(how) = self.turn(&mut reader, &mut came) {
                return Some(how);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

fn header(len: u32) -> Option<DataHeader> {
    Some(DataHeader { seq: 1, offset: 0, piece: 0, len })
}

fn bridge(address: &str, settings: &Settings, what: &str) -> Result<()> {
    let twist = match what {
        "swapped-queues" => Twist::Swapped,
        "beyond-credit" => Twist::Greedy,
        _ => Twist::None,
    };
    let mut other = None;
    if matches!(what, "foreign-key" | "replayed-key") {
        other = Some(Session::connect(address, settings, Twist::None)?);
    }
    let mut session = Session::connect(address, settings, twist)?;
    if what == "vanish" {
        // Like a process that is killed: nothing is said.
        return Ok(());
    }
    let key = session.peer.slots_key;
    let all = u64::from(session.peer.slots) * u64::from(session.peer.slot_size);
    if what.starts_with("resume-") {
        println!("{}", session.resume(address, settings, what)?.ok_or("nobody minded")?);
        return Ok(());
    }
    match what {
        "longer-header" => session.write(header(4000), 100, session.slot(0), key, 0)?,
        "no-header" => session.write(None, 8, session.slot(0), key, 0)?,
        "across-slots" => {
            let len = session.peer.slot_size;
            session.write(header(len), len, session.slot(0), key, 0)?;
        }
        "immediate" => session.write(header(100), 100, session.slot(0), key, 60_000)?,
        "slot-in-use" => {
            session.write(header(100), 100, session.slot(0), key, 0)?;
            session.write(header(100), 100, session.slot(0), key, 0)?;
        }
        "outside" => session.write(header(100), 100, session.peer.slots_address + all - 64, key, 0)?,
        "before" => session.write(header(100), 100, session.peer.slots_address - 4096, key, 0)?,
        "wild-key" => session.write(header(100), 100, session.slot(0), key ^ 0x00ff_ff00, 0)?,
        "foreign-key" | "replayed-key" => {
            let victim = other.as_ref().ok_or("no other session")?;
            let (address, key) = (victim.slot(0), victim.peer.slots_key);
            if what == "replayed-key" {
                other = None;
                std::thread::sleep(Duration::from_secs(3));
            }
            session.write(header(100), 100, address, key, 0)?;
        }
        "swapped-queues" => session.write(header(100), 100, session.slot(0), key, 0)?,
        "beyond-credit" => {
            // Each flush is one message. The peer answers some; nothing of what it grants is needed.
            for _ in 0..20_000 {
                session.frame(frame::ALIVE, &[]);
                if let Err(e) = session.link.flush() {
                    println!("refused: {e}");
                    return Ok(());
                }
                let polled = session.link.poll::<VerbsError>(&mut |_| Ok(()));
                if let Err(e) = polled {
                    println!("refused: {e}");
                    return Ok(());
                }
            }
            // Either the worker's refusal was on its way, or it kept up with it all, and the session stands.
            match session.ends_within(Duration::from_secs(1)) {
                Some(how) if how.contains("than it was told to have room for") => println!("refused: {how}"),
                Some(how) => return Err(format!("for another reason, the session {how}").into()),
                None => println!("refused: nothing, it kept up"),
            }
            return Ok(());
        }
        "unknown-frame" => session.frame(99, b"?"),
        "huge-frame" => session.frame_of(frame::COMMANDS, u32::MAX, b"?"),
        "wild-record" => session.frame(frame::COMMANDS, &[0xff; 64]),
        "impossible-key" => {
            let key = RegionKey { address: u64::MAX - 5, size: 4096, region: 1, key: 1 };
            session.frame(frame::REGION_KEY, key.as_bytes());
        }
        other => return Err(format!("no way to be hostile is called {other}").into()),
    }
    let how = session.ending()?;
    if let Some(mut victim) = other
        && let Some(how) = victim.ends_within(Duration::from_secs(3))
    {
        return Err(format!("a session that did nothing wrong {how}").into());
    }
    println!("{how}");
    Ok(())
}

fn server(address: &str, settings: &Settings, what: &str) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("listening");
    let (control, _) = listener.accept()?;
    let mut session = Session::accept(control, settings)?;
    // Not before the program has begun to wait for an answer.
    let (mut reader, mut came, begin) = (FrameReader::new(), 0, Instant::now());
    while came == 0 {
        if let Some(how) = session.turn(&mut reader, &mut came) {
            return Err(format!("too early {how}").into());
        }
        if begin.elapsed() > PATIENCE {
            return Err("the program asks nothing".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    match what {
        // Nothing is written, so no key is looked at: it is the immediate data alone that comes.
        "immediate" => session.write(None, 0, 0, 0, 77)?,
        "wild-write" => session.write(None, 4096, 0x10_0000, 0x1234, 1)?,
        "free-slot" => session.frame(frame::SLOTS_FREE, 0u32.as_bytes()),
        "free-wild-slot" => session.frame(frame::SLOTS_FREE, 70_000u32.as_bytes()),
        "unasked-data" => session.frame(frame::DATA_SENT, DataSent { seq: 900, bytes: 5 }.as_bytes()),
        "unasked-reply" => {
            session.frame(frame::REPLY, ReplyHeader { seq: 900, slot: 60_000, status: 0 }.as_bytes());
        }
        "unknown-progress" => {
            let update = ProgressUpdate { kind: 99, index: u32::MAX, seq: 1, value: 0 };
            session.frame(frame::PROGRESS, update.as_bytes());
        }
        "unknown-frame" => session.frame(99, b"?"),
        "huge-frame" => session.frame_of(frame::REPLY, u32::MAX, b"?"),
        other => return Err(format!("no way to be hostile is called {other}").into()),
    }
    println!("{}", session.ending()?);
    Ok(())
}

/// Passes connections on to `to`. Of each, the server's welcome and its queue pairs get through.
fn relay(address: &str, to: &str, life: Duration) -> Result<()> {
    let handshake = size_of::<Welcome>() + size_of::<FrameHeader>() + size_of::<Queues>();
    let listener = TcpListener::bind(address)?;
    println!("listening");
    for (number, client) in (0..).zip(listener.incoming()) {
        let (client, server) = (client?, TcpStream::connect(to)?);
        // Where a machine is so busy that nothing gets done in one connection's life, a later one's suffices.
        let life = life + life / 16 * number;
        let came = Arc::new(AtomicUsize::new(0));
        for (mut from, mut into, count) in [
            (client.try_clone()?, server.try_clone()?, None),
            (server.try_clone()?, client.try_clone()?, Some(Arc::clone(&came))),
        ] {
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(n @ 1..) = from.read(&mut bytes) {
                    if into.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                    if let Some(count) = &count {
                        count.fetch_add(n, Ordering::Relaxed);
                    }
                }
                // Either end may have something to say that the other has not read.
                let _ = into.shutdown(Shutdown::Write);
            });
        }
        std::thread::spawn(move || {
            while came.load(Ordering::Relaxed) < handshake {
                std::thread::sleep(Duration::from_millis(50));
            }
            std::thread::sleep(life);
            for end in [client, server] {
                let _ = end.shutdown(Shutdown::Both);
            }
        });
    }
    Ok(())
}
