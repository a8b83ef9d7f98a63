//! Two processes that talk by verbs: how the layer is used, what the tests run in a machine, and what the
//! benchmarks compare with `perftest`.
//!
//! ```text
//! verbs listen 10.0.1.1:9800 --device rxe0
//! verbs connect 10.0.1.1:9800 --device rxe1 --do h2d --size 65536 --count 200
//! ```
//!
//! `h2d` writes from a scattered region into the listener's slots, `d2h` has the listener write into that
//! region, `ping` sends messages to and fro. `stale` has it write once more when the window to the region is
//! closed: the device must refuse that; before, it opens and closes `--count` windows. Data is verified
//! unless `--fast` is given. With `--break N` the connecting side stops its queue pairs, wherever they are,
//! when something has come up to N times, again and again, and both sides go on through new ones. The result
//! is one line of `key=value`, `kernel_ms` among them: for how long the machine's processors, all together,
//! were in the kernel meanwhile.

use std::collections::VecDeque;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_bridge::framing::{FrameReader, recv_frame, send_frame, split_struct};
use host_bridge::memory::{Memories, Runs};
use host_bridge::verbs::{
    Access, Before, Device, Domain, Event, Link, Put, RegisteredRegion, Settings, Slab, Unconnected,
    VerbsError, Window, Windows,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{MsgFlags, recv};
use protocol::device::Extent;
use protocol::link::{ARENA_KEY, DataHeader, DataSent, Memory, Queues, RegionKey, SLOT_DATA, frame};
use zerocopy::{FromBytes, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// As the server has them.
const SLOT_SIZE: u32 = (512 << 10) + 4096;
const SLOTS: u32 = 48;
const PAGE: u64 = 4096;
/// How long `--sleep` polls before it sleeps.
const POLL: Duration = Duration::from_micros(50);
/// Frames of this program's own.
const PING: u32 = 100;
const SUM: u32 = 101;
const GO: u32 = 102;
/// On the control connection: the queue pairs are gone. What was taken of the peer's requests on each queue,
/// and the new queue pairs.
const RENEW: u32 = 103;

/// How long a peer may say nothing, in seconds, before it counts as lost.
const SILENT: u32 = 120;

#[derive(Debug, Clone)]
struct Job {
    what: String,
    size: u64,
    count: u64,
    fast: bool,
    sleep: bool,
    /// How often something comes before the queue pairs are replaced, at most; 0: they never are.
    breaks: u64,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (role, address) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let mut settings = Settings::default();
    let mut job = Job { what: "h2d".into(), size: 1 << 20, count: 16, fast: false, sleep: false, breaks: 0 };
    while let Some(option) = args.next() {
        let mut value = || args.next().ok_or(format!("{option} wants a value"));
        match option.as_str() {
            "--device" => settings.device = Some(value()?),
            "--port" => settings.port = value()?.parse()?,
            "--gid-index" => settings.gid_index = Some(value()?.parse()?),
            "--mtu" => settings.mtu = Some(value()?.parse()?),
            "--queue-pairs" => settings.queue_pairs = Some(value()?.parse()?),
            "--queue-depth" => settings.queue_depth = Some(value()?.parse()?),
            "--loss-ms" => settings.loss = Duration::from_millis(value()?.parse()?),
            "--do" => job.what = value()?,
            "--size" => job.size = value()?.parse()?,
            "--count" => job.count = value()?.parse()?,
            "--fast" => job.fast = true,
            "--sleep" => job.sleep = true,
            "--break" => job.breaks = value()?.parse()?,
            _ => return Err(format!("unknown option {option}").into()),
        }
    }
    match role.as_str() {
        "listen" => listen(&address, &settings),
        "connect" => connect(&address, &settings, &job),
        _ => Err("verbs listen|connect ADDRESS [options]".into()),
    }
}

/// The nth byte of what is sent.
fn pattern(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn exchange(control: &TcpStream) -> Result<(Queues, Vec<u8>)> {
    let mut body = Vec::new();
    match recv_frame(control.as_fd(), &mut body, &mut Vec::new())? {
        Some(frame::QUEUES) => {
            let (queues, rest) = split_struct::<Queues>(&body)?;
            Ok((queues, rest.to_vec()))
        }
        other => Err(format!("frame {other:?} where QUEUES was due").into()),
    }
}

/// A link with its stream of frames, and what came that was not asked for yet.
struct Talk {
    link: Link,
    reader: FrameReader,
    /// Bytes that have come of the peer's stream.
    came: u64,
    placed: VecDeque<(u32, u32)>,
    written: u64,
    sleep: bool,
    control: TcpStream,
    /// How often in a row it slept for a second and nothing came.
    silent: u32,
    /// If queue pairs are replaced.
    renewal: Option<Renewal>,
}

/// When queue pairs are replaced, and how often they were.
struct Renewal {
    settings: Settings,
    /// For the side that begins it: how often something comes in between, at most, and how often until the
    /// next time.
    turns: Option<(u64, u64)>,
    count: u64,
}

type Came<'t> = (&'t mut FrameReader, &'t mut u64, &'t mut VecDeque<(u32, u32)>, &'t mut u64);

fn act(
    (reader, came, placed, written): &mut Came<'_>,
    event: Event<'_>,
) -> std::result::Result<(), VerbsError> {
    match event {
        Event::Bytes(mut bytes) => {
            **came += bytes.len() as u64;
            while !bytes.is_empty() && reader.fill(&mut bytes).is_ok() {}
        }
        Event::Placed { immediate, len, .. } => placed.push_back((immediate, len)),
        Event::Written { .. } => **written += 1,
    }
    Ok(())
}

impl Talk {
    fn new(link: Link, control: TcpStream, sleep: bool) -> Talk {
        Talk {
            control,
            silent: 0,
            link,
            reader: FrameReader::new(),
            came: 0,
            placed: VecDeque::new(),
            written: 0,
            sleep,
            renewal: None,
        }
    }

    fn frame(&mut self, kind: u32, body: &[u8]) {
        let header = protocol::link::FrameHeader { kind, len: body.len() as u32 };
        self.link.out().extend_from_slice(header.as_bytes());
        self.link.out().extend_from_slice(body);
    }

    fn turn(&mut self) -> Result<bool> {
        let renewed = self.renew_if_due()?;
        let mut came = (&mut self.reader, &mut self.came, &mut self.placed, &mut self.written);
        let mut worked = renewed | self.link.poll::<VerbsError>(&mut |event| act(&mut came, event))?;
        if let (true, Some(Renewal { turns: Some((_, left)), .. })) = (worked, &mut self.renewal) {
            *left = left.saturating_sub(1);
        }
        if worked && self.sleep {
            self.silent = 0;
        }
        worked |= self.link.flush()?;
        Ok(worked)
    }

    /// Replaces the queue pairs if it is time to, or if the peer has begun to. True: it did.
    fn renew_if_due(&mut self) -> Result<bool> {
        let Some(renewal) = &mut self.renewal else { return Ok(false) };
        match &mut renewal.turns {
            Some((most, left)) => {
                if *left > 0 {
                    return Ok(false);
                }
                renewal.count += 1;
                *left = 1 + u64::from(pattern(renewal.count)) * *most / 256;
                self.renew(true)?;
            }
            None => {
                let mut peeked = [0; 4];
                let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
                if recv(self.control.as_raw_fd(), &mut peeked, peek) != Ok(4)
                    || u32::from_le_bytes(peeked) != RENEW
                {
                    return Ok(false);
                }
                self.renew(false)?;
            }
        }
        Ok(true)
    }

    fn renew(&mut self, first: bool) -> Result<()> {
        let settings = self.renewal.as_ref().ok_or("no renewal")?.settings.clone();
        let mut came = (&mut self.reader, &mut self.came, &mut self.placed, &mut self.written);
        self.link.take_down::<VerbsError>(&mut |event| act(&mut came, event))?;
        // Frames that were not asked for yet come again.
        self.came -= self.reader.buffered() as u64;
        self.reader = FrameReader::new();
        let mut came = (&mut self.reader, &mut self.came, &mut self.placed, &mut self.written);
        let domain = self.link.domain().clone();
        let taken: Vec<u64> = std::iter::once(*came.1).chain(self.link.taken()).collect();
        let say = |offer: &Queues| {
            send_frame(self.control.as_fd(), RENEW, &[offer.as_bytes(), taken.as_bytes()], &[])
        };
        let hear = || -> Result<(Queues, Vec<u64>)> {
            let mut body = Vec::new();
            if recv_frame(self.control.as_fd(), &mut body, &mut Vec::new())? != Some(RENEW) {
                return Err("the peer does not go on".into());
            }
            let (peer, taken) = split_struct::<Queues>(&body)?;
            let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
            Ok((peer, taken.chunks(8).map(number).collect()))
        };
        let (fresh, peer, theirs) = if first {
            let fresh = Unconnected::new(&domain, &settings)?;
            say(&fresh.offer(None))?;
            let (peer, theirs) = hear()?;
            (fresh, peer, theirs)
        } else {
            let (peer, theirs) = hear()?;
            let fresh = Unconnected::answering(&domain, &settings, &peer)?;
            (fresh, peer, theirs)
        };
        let (stream, writes) = theirs.split_first().ok_or("the peer has no stream")?;
        self.link.send_buffer().resume(*stream)?;
        if !self.link.settle::<VerbsError>(writes, &mut |event| act(&mut came, event))?.is_empty() {
            return Err("a device has acknowledged writes and lost them".into());
        }
        let offer = fresh.offer(None);
        let before = if first { Before::Everything } else { Before::Nothing };
        self.link.go_on(fresh, &peer, before)?;
        if first {
            self.frame(frame::ALIVE, &[]);
        } else {
            say(&offer)?;
        }
        Ok(())
    }

    /// Turns until there was something; sleeps between if that is wanted.
    fn wait(&mut self) -> Result<()> {
        if self.turn()? {
            return Ok(());
        }
        if self.sleep {
            let until = Instant::now() + POLL;
            while Instant::now() < until {
                if self.turn()? {
                    return Ok(());
                }
            }
            self.link.arm()?;
            if self.turn()? {
                return Ok(());
            }
            let device = self.link.domain().device().clone();
            let mut fds = [
                PollFd::new(self.link.fd().ok_or("no queue pairs")?, PollFlags::POLLIN),
                PollFd::new(device.event_fd(), PollFlags::POLLIN),
            ];
            // Counted and not measured: a machine that stood still says nothing about the peer.
            if poll(&mut fds, PollTimeout::from(1000u16))? == 0 {
                self.silent += 1;
            }
            self.link.disarm();
            if self.silent > SILENT {
                return Err(format!("the peer does not answer any more: nothing came for {SILENT} s").into());
            }
            let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            if recv(self.control.as_raw_fd(), &mut [0], peek) == Ok(0) {
                // Once more: what it sent before it closed counts.
                if !self.turn()? {
                    return Err("the peer closed the control connection".into());
                }
            }
            while let Some(event) = device.next_event() {
                eprintln!("{event:?}");
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Result<(u32, Vec<u8>)> {
        loop {
            match self.reader.next_frame()? {
                Some((frame::ALIVE, _)) => continue,
                Some((kind, body)) => return Ok((kind, body.to_vec())),
                None => {}
            }
            self.wait()?;
        }
    }
}

fn listen(address: &str, settings: &Settings) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("listening");
    for control in listener.incoming() {
        match serve(control?, settings) {
            Ok(()) => println!("served"),
            Err(e) => println!("lost: {e}"),
        }
    }
    Ok(())
}

fn serve(control: TcpStream, settings: &Settings) -> Result<()> {
    let (peer, job) = exchange(&control)?;
    let job = String::from_utf8(job)?;
    let mut job = job.split(' ');
    let mut word = || job.next().ok_or("a job is cut off");
    let (what, size, count, fast) =
        (word()?.to_owned(), word()?.parse::<u64>()?, word()?.parse::<u64>()?, word()? == "true");
    let (sleep, breaks) = (word()? == "true", word()?.parse::<u64>()?);
    let domain = Domain::new(Device::open(settings)?)?;
    let slots = Slab::new(&domain, (SLOT_SIZE * SLOTS) as usize, Access::RemoteWrite)?;
    let link = Unconnected::answering(&domain, settings, &peer)?;
    send_frame(control.as_fd(), frame::QUEUES, &[link.offer(Some((&slots, SLOT_SIZE))).as_bytes()], &[])?;
    let mut talk = Talk::new(link.connect(&peer)?, control.try_clone()?, sleep);
    if breaks > 0 {
        talk.link.keep();
        talk.renewal = Some(Renewal { settings: settings.clone(), turns: None, count: 0 });
    }
    match what.as_str() {
        "ping" => {
            for _ in 0..count {
                let (kind, body) = talk.next()?;
                talk.frame(kind, &body);
                talk.turn()?;
            }
        }
        "h2d" => take(&mut talk, &slots, size * count, fast)?,
        "d2h" => give(&mut talk, &slots, size, count, fast)?,
        "stale" => give(&mut talk, &slots, size, 2, fast)?,
        other => return Err(format!("no job {other}").into()),
    }
    // The peer closes when it has seen everything.
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    while matches!(recv(control.as_raw_fd(), &mut [0], peek), Ok(1..) | Err(nix::Error::EAGAIN)) {
        if !talk.turn()? {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

fn take(talk: &mut Talk, slots: &Slab, total: u64, fast: bool) -> Result<()> {
    let (mut done, mut sum) = (0u64, 0u64);
    while done < total {
        let Some((slot, len)) = talk.placed.pop_front() else {
            talk.wait()?;
            continue;
        };
        let base = (slot * SLOT_SIZE + SLOT_DATA) as usize;
        let head = size_of::<DataHeader>();
        let data = len as usize - head;
        let at = slots.pointer(base - head, len as usize).ok_or(format!("slot {slot} of {len} bytes"))?;
        // SAFETY: the peer does not write a slot before it is told that it is free.
        let bytes = unsafe { std::slice::from_raw_parts(at.as_ptr(), len as usize) };
        let (header, bytes) = DataHeader::read_from_prefix(bytes).map_err(|_| "no header")?;
        if header.len as usize != data {
            return Err(format!("{header:?} with {data} bytes").into());
        }
        if !fast {
            for (i, byte) in bytes.iter().enumerate() {
                if *byte != pattern(header.offset + i as u64) {
                    return Err(format!("byte {} of {} is wrong", i, header.offset).into());
                }
            }
            sum += bytes.len() as u64;
        }
        done += data as u64;
        talk.frame(frame::SLOTS_FREE, slot.as_bytes());
    }
    talk.frame(SUM, sum.as_bytes());
    Ok(())
}

fn give(talk: &mut Talk, slots: &Slab, size: u64, count: u64, fast: bool) -> Result<()> {
    let (kind, body) = talk.next()?;
    let (key, _) = split_struct::<RegionKey>(&body)?;
    if kind != frame::REGION_KEY || key.size < size {
        return Err("no key".into());
    }
    let room = u64::from(SLOT_SIZE * SLOTS).min(size);
    if let Some(at) = slots.pointer(0, room as usize).filter(|_| !fast) {
        for i in 0..room {
            // SAFETY: inside the slab, of which the peer uses nothing in this job.
            unsafe { at.as_ptr().add(i as usize).write(pattern(i)) };
        }
    }
    for seq in 1..=count {
        if talk.next()?.0 != GO {
            return Err("no GO".into());
        }
        let mut at = 0;
        while at < size {
            let len = (size - at).min(512 << 10);
            let source = slots.registration().slice(at % room, len as u32).ok_or("source")?;
            let Some(queue) = talk.link.next_queue() else {
                talk.wait()?;
                continue;
            };
            talk.link.put(&Put {
                queue,
                source,
                header: None,
                address: key.address + at,
                key: key.key,
                place: (0, 0),
                immediate: seq as u32,
                token: seq,
                signal: true,
            })?;
            at += len;
        }
        talk.frame(frame::DATA_SENT, DataSent { seq, bytes: size }.as_bytes());
        talk.turn()?;
    }
    Ok(())
}

/// Client memory as a guest's would be: one file, its pages in no order (in reverse, so that no two are
/// neighbours).
fn scattered(size: u64) -> Result<(Memories, Vec<Extent>, Runs)> {
    let pages = size.div_ceil(PAGE);
    let file: OwnedFd = memfd_create(c"region", MFdFlags::MFD_CLOEXEC)?;
    nix::unistd::ftruncate(&file, (pages * PAGE) as i64)?;
    let memories = Memories::map(vec![(Memory { addr: 0, size: pages * PAGE, file_offset: 0 }, file)])?;
    let extents: Vec<Extent> = (0..pages)
        .map(|i| Extent { addr: (pages - 1 - i) * PAGE, len: (size - i * PAGE).min(PAGE) })
        .collect();
    let runs = memories.resolve(&extents, size)?;
    Ok((memories, extents, runs))
}

fn connect(address: &str, settings: &Settings, job: &Job) -> Result<()> {
    let control = TcpStream::connect(address)?;
    let domain = Domain::new(Device::open(settings)?)?;
    let (memories, extents, runs) = scattered(job.size)?;
    let region = RegisteredRegion::new(&domain, &memories, &extents, job.size, job.what == "h2d")?;
    let link = Unconnected::new(&domain, settings)?;
    let text = format!("{} {} {} {} {} {}", job.what, job.size, job.count, job.fast, job.sleep, job.breaks);
    send_frame(control.as_fd(), frame::QUEUES, &[link.offer(None).as_bytes(), text.as_bytes()], &[])?;
    let (peer, _) = exchange(&control)?;
    let mut talk = Talk::new(link.connect(&peer)?, control.try_clone()?, job.sleep);
    if job.breaks > 0 {
        let turns = Some((job.breaks, job.breaks));
        talk.link.keep();
        talk.renewal = Some(Renewal { settings: settings.clone(), turns, count: 0 });
    }
    if job.what == "h2d" {
        fill(&runs);
    }
    println!("begun");
    let (kernel, begin) = (in_kernel()?, Instant::now());
    // Of each exchange of a `ping`, in microseconds.
    let mut each = Vec::with_capacity(job.count as usize);
    match job.what.as_str() {
        "ping" => {
            let body = vec![7u8; job.size as usize];
            let mut last = begin;
            for _ in 0..job.count {
                talk.frame(PING, &body);
                talk.turn()?;
                let (kind, answer) = talk.next()?;
                if kind != PING || answer != body {
                    return Err("another answer than the question".into());
                }
                let now = Instant::now();
                each.push(now.duration_since(last).as_secs_f64() * 1e6);
                last = now;
            }
        }
        "h2d" => {
            put_all(&mut talk, &region, &peer, job)?;
            let (kind, body) = loop {
                match talk.next()? {
                    (frame::SLOTS_FREE, _) => {}
                    other => break other,
                }
            };
            let sum = split_struct::<u64>(&body)?.0;
            if kind != SUM || !job.fast && sum != job.size * job.count {
                return Err(format!("the peer verified {sum} bytes").into());
            }
        }
        "d2h" => {
            let _shown = show(&mut talk, &windows(&region)?, &region)?;
            if job.fast { take_all(&mut talk, job)? } else { take_each(&mut talk, &runs, 1..=job.count)? }
        }
        "stale" => {
            let windows = windows(&region)?;
            for _ in 0..job.count {
                open(&windows, &region)?;
            }
            println!("us_each_window={:.2}", begin.elapsed().as_secs_f64() * 1e6 / job.count as f64);
            let shown = show(&mut talk, &windows, &region)?;
            take_each(&mut talk, &runs, 1..=1)?;
            drop(shown);
            clear(&runs);
            match take_each(&mut talk, &runs, 2..=2) {
                Ok(()) => return Err("the peer has written with a key that was taken back".into()),
                Err(e) => println!("refused: {e}"),
            }
            drop(talk);
            if !is_clear(&runs) {
                return Err("the peer has written something with a key that was taken back".into());
            }
            println!("ok do=stale");
            return Ok(());
        }
        other => return Err(format!("no job {other}").into()),
    }
    let time = begin.elapsed().as_secs_f64();
    let kernel = in_kernel()? - kernel;
    let counts = talk.link.counts();
    println!(
        "ok do={} size={} count={} seconds={time:.6} mb_per_s={:.2} us_each={:.2} us_median={:.2} kernel_ms={kernel:.0} sent={} received={} writes={} placed={} completions={} renewed={}",
        job.what,
        job.size,
        job.count,
        (job.size * job.count) as f64 / time / 1e6,
        time / job.count as f64 * 1e6,
        median(&mut each),
        counts.sent,
        counts.received,
        counts.writes,
        counts.placed,
        counts.completions,
        talk.renewal.map_or(0, |renewal| renewal.count),
    );
    Ok(())
}

/// Milliseconds that the processors, all together, have been in the kernel so far.
fn in_kernel() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    // "cpu", then user, nice, system, idle, iowait, irq, softirq, in ticks.
    let ticks: Vec<f64> =
        text.split_whitespace().skip(1).take(7).map_while(|word| word.parse().ok()).collect();
    let [_, _, system, _, _, irq, softirq] = ticks[..] else { return Err("/proc/stat".into()) };
    let each = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.ok_or("no ticks")?;
    Ok((system + irq + softirq) * 1e3 / each as f64)
}

fn median(all: &mut [f64]) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

fn windows(region: &RegisteredRegion) -> Result<Arc<Windows>> {
    Ok(Windows::new(region.registration().domain()).ok_or("the device has no windows")?)
}

/// A window to the whole region.
fn open(windows: &Arc<Windows>, region: &RegisteredRegion) -> Result<Window> {
    let registration = region.registration();
    // SAFETY: all callers drop it before the region.
    Ok(unsafe { windows.open(registration, 0, registration.len() as u64) }?)
}

/// Lets the peer write the region until the window is dropped, and gives it the key.
fn show(talk: &mut Talk, windows: &Arc<Windows>, region: &RegisteredRegion) -> Result<Window> {
    let (window, registration) = (open(windows, region)?, region.registration());
    let (address, size) = (registration.address(), registration.len() as u64);
    let key = RegionKey { address, size, region: ARENA_KEY, key: window.key() };
    talk.frame(frame::REGION_KEY, key.as_bytes());
    Ok(window)
}

/// Asks for one transfer after the other, and verifies each.
fn take_each(talk: &mut Talk, runs: &Runs, which: std::ops::RangeInclusive<u64>) -> Result<()> {
    for seq in which {
        talk.frame(GO, &[]);
        talk.turn()?;
        let (_, body) = talk.next()?;
        let sent = split_struct::<DataSent>(&body)?.0;
        let mut got = 0;
        while got < sent.bytes {
            match talk.placed.pop_front() {
                Some((imm, len)) if imm == seq as u32 => got += u64::from(len),
                Some(other) => return Err(format!("{other:?} for {seq}").into()),
                None => talk.wait()?,
            }
        }
        verify(runs)?;
    }
    Ok(())
}

/// Asks ahead, as a program with asynchronous copies does, so that the queues stay full; only counts what
/// comes.
fn take_all(talk: &mut Talk, job: &Job) -> Result<()> {
    let ahead = (16 << 20) / job.size * 2 + 2;
    let (mut asked, mut got) = (0, 0);
    while got < job.size * job.count {
        while asked < job.count && asked * job.size < got + ahead * job.size {
            asked += 1;
            talk.frame(GO, &[]);
        }
        talk.wait()?;
        while talk.reader.next_frame()?.is_some() {}
        got += talk.placed.drain(..).map(|(_, len)| u64::from(len)).sum::<u64>();
    }
    Ok(())
}

fn put_all(talk: &mut Talk, region: &RegisteredRegion, peer: &Queues, job: &Job) -> Result<()> {
    let mut free: Vec<u32> = (0..peer.slots).collect();
    let most = u64::from(peer.slot_size - SLOT_DATA).min(512 << 10);
    let mut posted = 0u64;
    let header_len = size_of::<DataHeader>() as u64;
    for seq in 1..=job.count {
        let mut at = 0;
        while at < job.size {
            let (Some(queue), false) = (talk.link.next_queue(), free.is_empty()) else {
                talk.wait()?;
                while let Some((kind, body)) = talk.reader.next_frame()? {
                    if kind == frame::SLOTS_FREE {
                        free.extend(
                            body.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                        );
                    }
                }
                continue;
            };
            let Some(slot) = free.pop() else { continue };
            let len = (job.size - at).min(most);
            let source = region.registration().slice(at, len as u32).ok_or("source")?;
            let address =
                peer.slots_address + u64::from(slot) * u64::from(peer.slot_size) + u64::from(SLOT_DATA)
                    - header_len;
            let header = DataHeader { seq, offset: at, piece: 0, len: len as u32 };
            // As the bridge does it.
            let signal = len > 32 << 10 || (seq == job.count && at + len == job.size);
            talk.link.put(&Put {
                queue,
                source,
                header: Some(header),
                address,
                key: peer.slots_key,
                place: (0, 0),
                immediate: slot,
                token: seq,
                signal,
            })?;
            at += len;
            posted += 1;
        }
    }
    while talk.written < posted {
        talk.wait()?;
    }
    Ok(())
}

fn clear(runs: &Runs) {
    for piece in runs.all() {
        // SAFETY: as in `fill`: the peer is not to write anything now.
        unsafe { piece.at.as_ptr().write_bytes(0xee, piece.len) };
    }
}

fn is_clear(runs: &Runs) -> bool {
    let clear = |at: *const u8, len| {
        // SAFETY: inside a piece, which is mapped; there is no link any more through which anybody writes it.
        unsafe { std::slice::from_raw_parts(at, len) }.iter().all(|byte| *byte == 0xee)
    };
    runs.all().iter().all(|piece| clear(piece.at.as_ptr(), piece.len))
}

fn fill(runs: &Runs) {
    for piece in runs.all() {
        for i in 0..piece.len {
            // SAFETY: inside the piece, which is mapped; the peer does not write it in this job.
            unsafe { piece.at.as_ptr().add(i).write(pattern((piece.offset + i) as u64)) };
        }
    }
}

fn verify(runs: &Runs) -> Result<()> {
    let room = u64::from(SLOT_SIZE * SLOTS).min(runs.size() as u64);
    for piece in runs.all() {
        for i in 0..piece.len {
            // SAFETY: inside the piece, which is mapped; all writes to it have been announced.
            let byte = unsafe { piece.at.as_ptr().add(i).read() };
            let at = (piece.offset + i) as u64;
            if byte != pattern(at % room) {
                return Err(format!("byte {at} is wrong").into());
            }
            // SAFETY: as above. So that the next round cannot be taken for this one.
            unsafe { piece.at.as_ptr().add(i).write(!byte) };
        }
    }
    Ok(())
}
