//! Copies between servers over a direct connection of their workers. This process coordinates; the bytes
//! don't pass through it.
//!
//! ```text
//!  server A ── DirectSendAll ──▶ buffers ══ connection ══▶ buffers ── DirectReceiveAll ──▶ server B
//! ```
//!
//! A copy is split into numbered pieces. Each server gets one command for all of them, and the receiving
//! server answers when the last piece is landed. The servers don't order this with their streams: this
//! process sends the commands only when everything before the copy is over.
//!
//! Where a server is older than version 2.6, and for managed memory, this process asks for each piece
//! (`DirectSend`, `DirectLand`), and at most [`WINDOW`] are in transit: a piece is landed once the receiving
//! server reports its arrival.
//!
//! Copies of a stream that follow each other are asked for before the ones before them are answered, so that
//! the connection does not become idle between them: see [`begin`].
//!
//! One connection does not fill a fast link. So a large copy is cut into boxes, and each takes a connection
//! of its own, a [`Single`]. A pair of servers gets more than the first one when the first large copy comes.
//!
//! If there is no connection, or one fails, the copy goes through this process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::abi::result::Result;
use crate::memory::managed;
use crate::process::context;
use crate::process::driver::Server;
use crate::process::holds;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use crate::work::server_copy::{Linear, Part, Split};
use client::handle::ContextId;
use client::ops::copy::Pitched;
use client::ops::direct::{
    DirectArrival, DirectClose, DirectKey, DirectLand, DirectOffer, DirectOpen, DirectReceiveAll,
    DirectReceiveAllReply, DirectSend, DirectSendAll, MAX_COPIES, MAX_PIECE,
};
use client::session::Pending;
use client::{Status, lock, log};

/// Pieces of a copy that were sent and not yet reported as arrived. The servers have room for twice as many.
const WINDOW: usize = 8;

/// Maximum number of connections from one server to another.
const MOST: usize = 4;
/// Bytes of a copy for each of them, at least.
const BYTES_EACH: usize = 512 << 10;
/// Maximum number of connections of this process besides the first ones of all pairs. Sessions have a limit,
/// and NCCL's messages need connections, too.
const MOST_MORE: usize = 24;

/// Their number now.
static MORE: AtomicUsize = AtomicUsize::new(0);

/// The minor version since which servers send pieces of several contexts in the order of their numbers,
/// whichever device is done first. With an older one, copies of such contexts are not under way at once.
const ORDERED_SINCE: u16 = 8;

/// How long a connection that has failed, or was refused, is not opened again: the first time, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// A connection. Copies over it are begun one after the other.
type Shared = Arc<Mutex<Connection>>;

/// The connections, by the sending and the receiving session.
static CONNECTIONS: Mutex<BTreeMap<(usize, usize), Shared>> = Mutex::new(BTreeMap::new());

/// The number of the next connection.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// A connection, or what stands for one.
#[derive(Default)]
enum Connection {
    /// Not requested yet.
    #[default]
    New,
    Open(Open),
    /// It has failed or was refused, and is not opened again before this time. If that fails, too, the pause
    /// is twice this.
    Failed(Instant, Duration),
    /// A thread opens it again.
    Opening,
    /// It doesn't exist, and is not opened again: a server keeps what it cannot close.
    None,
}

impl Connection {
    /// What stands for one that could not be opened, or has failed. It is opened again after this pause, if
    /// the servers can close what they have of it.
    fn failed(can_close: bool, now: Instant, pause: Duration) -> Connection {
        if can_close { Connection::Failed(now + pause, pause) } else { Connection::None }
    }

    /// Whether it is to be opened again now, and the pause if that fails. If so, the caller does that.
    fn begin_again(&mut self, now: Instant) -> Option<Duration> {
        match *self {
            Connection::Failed(again, pause) if now >= again => {
                *self = Connection::Opening;
                Some((pause * 2).min(LAST_PAUSE))
            }
            _ => None,
        }
    }
}

struct Open {
    /// At least one.
    all: Vec<Single>,
    /// Whether others can be opened.
    more: More,
    /// How long it is not opened again if it fails soon, and since when it is open.
    pause: Duration,
    since: Instant,
}

/// Whether a pair of servers gets more connections.
enum More {
    /// The next large copy opens them. If that fails, none is opened for this time.
    Wanted(Duration),
    /// A thread opens them. The same.
    Opening(Duration),
    /// One was refused, and none is opened before this time. If that fails, too, the pause is twice this.
    Refused(Instant, Duration),
}

impl More {
    /// Whether others are to be opened now. If so, the caller does that.
    fn begin(&mut self, now: Instant) -> bool {
        let pause = match *self {
            More::Wanted(pause) => pause,
            More::Refused(again, pause) if now >= again => (pause * 2).min(LAST_PAUSE),
            _ => return false,
        };
        *self = More::Opening(pause);
        true
    }

    /// That is over. `refused`: there are fewer than were wanted.
    fn end(&mut self, refused: bool, now: Instant) {
        if let More::Opening(pause) = *self {
            *self = if refused { More::Refused(now + pause, pause) } else { More::Wanted(FIRST_PAUSE) };
        }
    }
}

/// A connection of the two workers.
struct Single {
    direct: u32,
    /// The number of the last piece.
    last: u64,
}

impl Open {
    fn new(direct: u32, pause: Duration) -> Open {
        let (all, more) = (vec![Single { direct, last: 0 }], More::Wanted(FIRST_PAUSE));
        Open { all, more, pause, since: Instant::now() }
    }

    /// How long it is not opened again if it fails now. One that has lasted was worth opening.
    fn pause(&self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.since) >= LAST_PAUSE { FIRST_PAUSE } else { self.pause }
    }

    /// Closes all, because a copy has failed. Returns what stands for them.
    fn fail(&self, status: Status, to: &'static Server, from: &'static Server) -> Connection {
        let (from_number, to_number) = (from.session.index(), to.session.index());
        log::warn(format_args!(
            "a direct connection between servers has failed ({status}): copies from server {from_number} to server {to_number} pass through this machine until there is another one"
        ));
        self.close(from, to);
        let now = Instant::now();
        Connection::failed(can_close(from, to), now, self.pause(now))
    }

    /// Closes all.
    fn close(&self, from: &'static Server, to: &'static Server) {
        self.all.iter().for_each(|single| close(single.direct, from, to));
        MORE.fetch_sub(self.all.len() - 1, Ordering::Relaxed);
    }
}

/// The servers on which the program has had a context, or makes its first one.
static USED: Mutex<Vec<&'static Server>> = Mutex::new(Vec::new());

/// Notes that the program has a context on a server. If it is not the program's first server, a thread opens
/// the connections between them before the first copy, and copies come behind what the others are doing now.
pub(crate) fn used(server: &'static Server) {
    // A mark may wait for room in a ring. Other threads wait for that before they use this server, but not
    // before they use others.
    server.used.call_once(|| first_use(server));
}

fn first_use(server: &'static Server) {
    let others = {
        let mut used = lock(&USED);
        used.push(server);
        used[..used.len() - 1].to_vec()
    };
    if others.is_empty() {
        return;
    }
    let busy = context::busy().filter(|context| !std::ptr::eq(context.server, server));
    // A lost server does nothing.
    let marked: Vec<_> =
        busy.filter_map(|context| Some((context.server, stream_table::marks(context).ok()?))).collect();
    // What waits for the program may do so until the copy is over. Asked after the marks, so that nothing
    // that holds one of them is missed.
    let waiting = holds::all();
    for (busy, mut marks) in marked {
        marks.retain(|(stream, _)| !waiting.iter().any(|(other, seq)| stream.may_be_behind(other, *seq)));
        busy.fences.come_behind(marks);
    }
    let open_all = move || {
        for other in others {
            for (from, to) in [(server, other), (other, server)] {
                let shared = connection(from, to);
                ensure(&shared, &mut lock(&shared), from, to);
            }
        }
    };
    // Without the thread, the first copy opens them.
    let _ = std::thread::Builder::new().name("rgpu-direct".into()).spawn(open_all);
}

fn connection(from: &Server, to: &Server) -> Shared {
    let key = (from.session.index(), to.session.index());
    Arc::clone(lock(&CONNECTIONS).entry(key).or_default())
}

/// Opens a connection unless that was done or tried before. Waits until it is open or not possible. One that
/// has failed or was refused is opened again by a thread, some time later.
fn ensure(shared: &Shared, connection: &mut Connection, from: &'static Server, to: &'static Server) {
    let numbers = (from.session.index(), to.session.index());
    if let Connection::New = connection {
        *connection = match open(from, to) {
            Ok(direct) => Connection::Open(Open::new(direct, FIRST_PAUSE)),
            Err(why) => {
                let (from_number, to_number) = numbers;
                log::info(format_args!(
                    "copies from server {from_number} to server {to_number} pass through this machine: {why}"
                ));
                Connection::failed(can_close(from, to), Instant::now(), FIRST_PAUSE)
            }
        };
        return;
    }
    let Some(pause) = connection.begin_again(Instant::now()) else { return };
    let own = Arc::clone(shared);
    let reopen = move || {
        let opened = open(from, to);
        *lock(&own) = match opened {
            Ok(direct) => {
                let (from_number, to_number) = numbers;
                log::info(format_args!(
                    "copies from server {from_number} to server {to_number} pass through this machine no longer"
                ));
                Connection::Open(Open::new(direct, pause))
            }
            Err(_) => Connection::failed(true, Instant::now(), pause),
        };
    };
    if std::thread::Builder::new().name("rgpu-direct".into()).spawn(reopen).is_err() {
        *connection = Connection::failed(true, Instant::now(), pause);
    }
}

/// Opens as many connections as there may be, in a thread, unless that was refused a short while ago. Copies
/// use those that there are.
fn widen(shared: &Shared, open: &mut Open, from: &'static Server, to: &'static Server) {
    if !open.more.begin(Instant::now()) {
        return;
    }
    let (first, had) = (open.all[0].direct, open.all.len());
    let shared = Arc::clone(shared);
    let add_all = move || {
        let refused = (had..KNOBS.connections).any(|_| !add(&shared, first, from, to));
        if let Connection::Open(open) = &mut *lock(&shared)
            && open.all[0].direct == first
        {
            open.more.end(refused, Instant::now());
        }
    };
    if std::thread::Builder::new().name("rgpu-direct".into()).spawn(add_all).is_err() {
        open.more.end(true, Instant::now());
    }
}

/// Opens another connection beside the `first`. Returns false if that is not possible, or if the others have
/// failed meanwhile.
fn add(shared: &Shared, first: u32, from: &'static Server, to: &'static Server) -> bool {
    if MORE.fetch_add(1, Ordering::Relaxed) < MOST_MORE
        && let Ok(direct) = open(from, to)
    {
        if let Connection::Open(open) = &mut *lock(shared)
            && open.all[0].direct == first
        {
            open.all.push(Single { direct, last: 0 });
            return true;
        }
        close(direct, from, to);
    }
    MORE.fetch_sub(1, Ordering::Relaxed);
    false
}

/// A number for a connection, from or to any server, that no other one of this process has.
pub(crate) fn next_number() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn open(from: &Server, to: &Server) -> std::result::Result<u32, String> {
    let failed = |end: &str, status: Status| format!("the {end} server answers {status}");
    let direct = next_number();
    let sending = |status| failed("sending", status);
    let key = from.session.call(&DirectKey {}).map_err(sending)?.key;
    let offer = to.session.call(&DirectOffer { direct, key }).map_err(|status| failed("receiving", status));
    let opened = offer.and_then(|offer| {
        let opened = from.session.call(&DirectOpen { direct, ticket: offer.ticket }).map_err(sending)?;
        if opened.refusal.is_empty() { Ok(direct) } else { Err(opened.refusal) }
    });
    opened.inspect_err(|_| {
        for (server, op) in closes(direct, from, to) {
            // Waits, because whoever tries again must not find its place taken. A lost session has none.
            let _ = server.session.call(&op);
        }
    })
}

/// Whether both servers can forget a connection.
fn can_close(from: &Server, to: &Server) -> bool {
    [from, to].into_iter().all(|server| server.session.knows::<DirectClose>())
}

/// Makes both servers forget a connection. Nothing waits for that: its number is not used again.
fn close(direct: u32, from: &'static Server, to: &'static Server) {
    for (server, op) in closes(direct, from, to) {
        // A lost session has no connections.
        if let Ok(None) = server.session.submit_ahead(&op) {
            // Other threads have all reply slots: another one waits for one.
            let tell = move || drop(server.session.call(&op));
            let _ = std::thread::Builder::new().name("rgpu-direct".into()).spawn(tell);
        }
    }
}

/// What makes each server forget a connection, if it can.
fn closes<'s>(
    direct: u32,
    from: &'s Server,
    to: &'s Server,
) -> impl Iterator<Item = (&'s Server, DirectClose)> {
    let both = [(from, true), (to, false)].into_iter();
    both.filter(|(server, _)| server.session.knows::<DirectClose>())
        .map(move |(server, outgoing)| (server, DirectClose { direct, outgoing }))
}

/// Copies of which each server has its command, and which are not over. A connection's are begun while that
/// is locked.
static UNDER_WAY: Mutex<Vec<Arc<Moves>>> = Mutex::new(Vec::new());

/// What a copy under way does.
struct Moves {
    /// First bytes and sizes in bytes: what is written, and what is read.
    spans: [(u64, u64); 2],
    /// Its boxes: where they go, their extent, and the connections that they take.
    dst: Pitched,
    extent: [u64; 3],
    first: u32,
    count: usize,
    /// What is read from, and whether its server keeps pieces of several contexts in order.
    source: ContextId,
    keeps_order: bool,
}

impl Moves {
    /// Whether another copy's pieces may be among its own, or come over other connections.
    fn may_mix(&self, other: &Moves) -> bool {
        self.first != other.first || self.source == other.source || self.keeps_order
    }

    /// Whether it may be begun while another copy is under way. Either it makes no difference for the bytes
    /// which is done first, or the connections keep them in order: each box of one is written where the same
    /// box of the other is.
    fn may_come_behind(&self, before: &Moves) -> bool {
        let meet = |(one, len): (u64, u64), (other, other_len): (u64, u64)| {
            one < other.saturating_add(other_len) && other < one.saturating_add(len)
        };
        let ([written, read], [written_before, read_before]) = (self.spans, before.spans);
        let is_alike = (self.first, self.count, self.extent, &self.dst)
            == (before.first, before.count, before.extent, &before.dst);
        // A short copy may be a word by which a kernel learns that the one before it is done. So it follows
        // that one over its only connection, and is landed later.
        let follows = self.first == before.first && before.count == 1;
        (self.count > 1 || follows)
            && !meet(read, written_before)
            && !meet(written, read_before)
            && (is_alike || !meet(written, written_before))
            && self.may_mix(before)
    }
}

/// A copy that is under way. If it is dropped, that waits until nothing is written any more.
pub(crate) struct UnderWay {
    connection: Shared,
    moves: Arc<Moves>,
    ends: [&'static Server; 2],
    /// The answers to come, and what others were.
    pending: Vec<Pending<'static, DirectReceiveAllReply>>,
    received: Result,
}

impl UnderWay {
    /// Waits until it is over. False: it must be repeated from the start in another way; parts of it may have
    /// been made.
    pub fn finish(mut self) -> bool {
        self.end();
        let [to, from] = self.ends;
        let mut connection = lock(&self.connection);
        // If another copy has failed meanwhile that came before this one, it has been made again since.
        let open = match &*connection {
            Connection::Open(open) if open.all[0].direct == self.moves.first => open,
            _ => return false,
        };
        let Err(status) = self.received else { return true };
        *connection = open.fail(status, to, from);
        false
    }

    /// Waits for all answers, also after an error, so that nothing is written any more then.
    fn wait(&mut self) {
        for answer in self.pending.drain(..) {
            self.received = self.received.and(answer.wait().map(drop));
        }
    }

    fn end(&mut self) {
        self.wait();
        lock(&UNDER_WAY).retain(|moves| !Arc::ptr_eq(moves, &self.moves));
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.end();
    }
}

/// Begins a copy over direct connections, without this process in between. `None`: it cannot be made so.
/// `ahead`: it is not, either, if copies that are under way may have to be over first.
pub(crate) fn begin(
    (to, dst): (&Arc<Stream>, &Linear),
    (from, src): (&Arc<Stream>, &Linear),
    spans: [(u64, u64); 2],
    split: &Split,
    ahead: bool,
) -> Result<Option<UnderWay>> {
    // Managed memory that the host has is given to the device in the order of a stream.
    let by_themselves = split.bytes() >= KNOBS.least
        && KNOBS.depth.is_none()
        && from.session().knows::<DirectSendAll>()
        && to.session().knows::<DirectReceiveAll>()
        && !spans.into_iter().any(|(address, _)| managed::is_here(address))
        && [dst, src].into_iter().all(|end| are_apart(&end.place, split.extent));
    if !by_themselves || ahead && !to.session().has_free_slot() {
        return Ok(None);
    }
    let ends = [dst.context.server, src.context.server];
    let shared = connection(ends[1], ends[0]);
    let mut connection = if ahead {
        // Whoever has it may wait long.
        let Ok(connection) = shared.try_lock() else { return Ok(None) };
        connection
    } else {
        let mut connection = lock(&shared);
        ensure(&shared, &mut connection, ends[1], ends[0]);
        connection
    };
    let Connection::Open(open) = &mut *connection else { return Ok(None) };
    let count = connections_for(split.bytes()).min(KNOBS.connections);
    if count > open.all.len() {
        widen(&shared, open, ends[1], ends[0]);
    }
    let count = count.min(open.all.len());
    let (dst_place, first) = (dst.place.clone(), open.all[0].direct);
    let (source, keeps_order) = (src.context.id, from.session().minor() >= ORDERED_SINCE);
    let moves = Moves { spans, dst: dst_place, extent: split.extent, first, count, source, keeps_order };
    let moves = Arc::new(moves);
    {
        let mut under_way = lock(&UNDER_WAY);
        let full = under_way.iter().filter(|other| other.first == first).count() >= MAX_COPIES;
        let may_begin =
            |other: &Arc<Moves>| if ahead { moves.may_come_behind(other) } else { moves.may_mix(other) };
        if full || !under_way.iter().all(may_begin) {
            return Ok(None);
        }
        under_way.push(Arc::clone(&moves));
    }
    let (own, pending) = (Arc::clone(&shared), Vec::new());
    let mut copy = UnderWay { connection: own, moves, ends, pending, received: Ok(()) };
    copy.received = copy.send((to, dst), (from, src), &mut open.all[..count], split);
    Ok(Some(copy))
}

impl UnderWay {
    /// Gives both servers their commands.
    fn send(
        &mut self,
        (to, dst): (&Stream, &Linear),
        (from, src): (&Stream, &Linear),
        connections: &mut [Single],
        split: &Split,
    ) -> Result {
        let least = piece_of(split.bytes()) as u64;
        let boxes = boxes(split.extent, connections.len() as u64, least);
        let mut receives = Vec::new();
        for (single, ([x, y, z], extent)) in connections.iter_mut().zip(boxes) {
            let (direct, first) = (single.direct, single.last + 1);
            let bytes = extent.iter().product::<u64>();
            let piece = whole_rows(piece_of(bytes as usize) as u64, extent[0]);
            single.last += bytes.div_ceil(piece);
            let at = |place: &Pitched| {
                let address = place.address + x + y * place.pitch + z * place.slice;
                Pitched { address, ..place.clone() }
            };
            let send = DirectSendAll { stream: from.id, direct, first, piece, src: at(&src.place), extent };
            from.session().append(&send)?;
            receives.push(DirectReceiveAll {
                stream: to.id,
                direct,
                first,
                piece,
                dst: at(&dst.place),
                extent,
            });
        }
        for receive in &receives {
            if !self.pending.is_empty() && !to.session().has_free_slot() {
                self.wait();
            }
            self.pending.push(to.session().submit(receive)?);
        }
        Ok(())
    }
}

/// Makes a copy over a direct connection. Returns true when all bytes have arrived. False: the copy must be
/// repeated from the start in another way; parts of it may have been made.
pub(crate) fn carry(
    (to, dst): (&Arc<Stream>, &Linear),
    (from, src): (&Arc<Stream>, &Linear),
    spans: [(u64, u64); 2],
    split: &Split,
) -> Result<bool> {
    if let Some(copy) = begin((to, dst), (from, src), spans, split, false)? {
        return Ok(copy.finish());
    }
    if split.bytes() < KNOBS.least {
        return Ok(false);
    }
    let ends = [dst.context.server, src.context.server];
    let shared = connection(ends[1], ends[0]);
    let mut connection = lock(&shared);
    ensure(&shared, &mut connection, ends[1], ends[0]);
    let Connection::Open(open) = &mut *connection else { return Ok(false) };
    let [(written, write_len), (read, read_len)] = spans;
    managed::lend(read, read_len)?;
    // The servers send these pieces in the order of a stream, and the numbers of all pieces ascend.
    let first = open.all[0].direct;
    if lock(&UNDER_WAY).iter().any(|moves| moves.first == first) {
        return Ok(false);
    }
    if let Err(status) =
        carry_over(&mut open.all[0], (to, dst), (from, src), (written, write_len), &split.parts)
    {
        *connection = open.fail(status, ends[0], ends[1]);
        return Ok(false);
    }
    drop(connection);
    // By now the sending stream's errors are known.
    let mark = from.mark()?;
    from.session().wait_progress(|| from.has_passed(mark))?;
    from.context.deferred()?;
    to.synchronize()?;
    Ok(true)
}

/// How many connections a copy of this size takes, if there are so many.
fn connections_for(bytes: usize) -> usize {
    (bytes / BYTES_EACH).clamp(1, MOST)
}

/// Cuts a box into at most `most`, whose places in it and extents these are: whole slices, or rows of a
/// single slice, or parts of a single row at multiples of `least` bytes.
fn boxes(
    [width, height, depth]: [u64; 3],
    most: u64,
    least: u64,
) -> impl Iterator<Item = ([u64; 3], [u64; 3])> {
    let (dimension, least) = match (height, depth) {
        (1, 1) => (0, least),
        (_, 1) => (1, 1),
        _ => (2, 1),
    };
    let extent = [width, height, depth];
    let all = extent[dimension];
    let step = all.div_ceil(most).next_multiple_of(least);
    (0..all.div_ceil(step)).map(move |number| {
        let (mut place, mut extent) = ([0; 3], extent);
        place[dimension] = number * step;
        extent[dimension] = step.min(all - number * step);
        (place, extent)
    })
}

/// Whether the rows of a box are one behind the other, as servers want those of a whole copy. Single rows may
/// also overlap.
fn are_apart(place: &Pitched, [width, height, depth]: [u64; 3]) -> bool {
    let rows = || place.pitch.checked_mul(height.checked_sub(1)?)?.checked_add(width);
    (height == 1 || place.pitch >= width) && (depth == 1 || rows().is_some_and(|rows| place.slice >= rows))
}

/// A piece size of at most `piece` bytes that cuts no row, if rows are not longer than that.
fn whole_rows(piece: u64, row: u64) -> u64 {
    piece - if row <= piece { piece % row } else { 0 }
}

/// Copies piece by piece, as this process says.
fn carry_over(
    Single { direct, last }: &mut Single,
    (to, dst): (&Arc<Stream>, &Linear),
    (from, src): (&Arc<Stream>, &Linear),
    (written, write_len): (u64, u64),
    parts: &[Part],
) -> Result {
    let direct = *direct;
    let most = piece_of(parts.iter().map(Part::bytes).sum());
    let mut pieces = parts.iter().flat_map(|part| part.cut(most));
    let mut sent = VecDeque::new();
    let mut come = *last;
    loop {
        while sent.len() < KNOBS.depth.unwrap_or(WINDOW)
            && let Some(piece) = pieces.next()
        {
            *last += 1;
            let (number, extent) = (*last, piece.extent);
            let place = Pitched { address: piece.src, ..src.place.clone() };
            from.work(&DirectSend { stream: from.id, direct, number, src: place, extent })?;
            sent.push_back((number, piece));
        }
        let Some((number, piece)) = sent.pop_front() else { return Ok(()) };
        if number > come {
            come = to.session().call(&DirectArrival { direct, number })?.upto;
        }
        let _order = managed::before_work_on(written, write_len)?;
        let place = Pitched { address: piece.dst, ..dst.place.clone() };
        to.work(&DirectLand { stream: to.id, direct, number, dst: place, extent: piece.extent })?;
    }
}

/// Piece size in bytes for a copy of this size. Short copies have short pieces, so that the first arrives
/// earlier.
fn piece_of(bytes: usize) -> usize {
    if let Some(piece) = KNOBS.piece {
        return piece;
    }
    const STEPS: [(usize, usize); 3] = [(600 << 10, 128 << 10), (4 << 20, 256 << 10), (14 << 20, 512 << 10)];
    STEPS.iter().find(|(upto, _)| bytes <= *upto).map_or(1 << 20, |(_, piece)| *piece)
}

/// What measurements choose, by environment variables.
#[derive(Debug, Default, PartialEq, Eq)]
struct Knobs {
    /// `RGPU_DIRECT_PIECE`: size of all pieces in bytes.
    piece: Option<usize>,
    /// `RGPU_DIRECT_DEPTH`: this process asks for each piece, and at most so many are in transit.
    depth: Option<usize>,
    /// `RGPU_DIRECT_LEAST`: shorter copies pass through this process.
    least: usize,
    /// `RGPU_DIRECT_CONNECTIONS`: at most so many connections from one server to another.
    connections: usize,
}

static KNOBS: LazyLock<Knobs> = LazyLock::new(|| Knobs::of(|name| std::env::var(name).ok()));

impl Knobs {
    fn of(variable: impl Fn(&str) -> Option<String>) -> Knobs {
        let number = |name: &str, least: usize, most: usize| {
            let text = variable(name).filter(|text| !text.is_empty())?;
            let number = text.parse().ok().filter(|number| (least..=most).contains(number));
            if number.is_none() {
                log::warn(format_args!("{name}={text} is ignored: it is no number from {least} to {most}"));
            }
            number
        };
        Knobs {
            piece: number("RGPU_DIRECT_PIECE", 4 << 10, MAX_PIECE as usize),
            depth: number("RGPU_DIRECT_DEPTH", 1, WINDOW),
            least: number("RGPU_DIRECT_LEAST", 0, usize::MAX).unwrap_or(0),
            connections: number("RGPU_DIRECT_CONNECTIONS", 1, MOST).unwrap_or(MOST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_begun_ahead_only_if_the_order_makes_no_difference_or_is_kept() {
        let moves = |written, read, first, count| {
            let dst = Pitched { address: written, pitch: 100, slice: 100 };
            let (spans, extent) = ([(written, 100), (read, 100)], [100, 1, 1]);
            let source = ContextId(0);
            Moves { spans, dst, extent, first, count, source, keeps_order: true }
        };
        let before = moves(1000, 5000, 1, 2);
        let rows = Moves { extent: [50, 2, 1], ..moves(1000, 6000, 1, 2) };
        for (copy, may, why) in [
            (moves(2000, 6000, 1, 2), true, "other memory"),
            (moves(1100, 5000, 1, 2), true, "the same source, and the memory behind the target"),
            (moves(2000, 6000, 3, 2), true, "other memory over other connections"),
            (moves(2000, 6000, 3, 1), false, "one connection, which is another"),
            (moves(2000, 6000, 1, 1), false, "one connection, where the other copy has others, too"),
            (moves(1000, 6000, 1, 2), true, "the same target, in the same boxes"),
            (moves(1000, 6000, 1, 1), false, "the same target in other boxes"),
            (moves(1000, 6000, 3, 2), false, "the same target over other connections"),
            (rows, false, "the same target in rows"),
            (moves(1001, 6000, 1, 2), false, "a part of the target"),
            (moves(2000, 1099, 1, 2), false, "it reads what is written"),
            (moves(4901, 6000, 1, 2), false, "it writes what is read"),
            (moves(u64::MAX - 50, u64::MAX - 200, 1, 2), true, "the end of all addresses"),
        ] {
            assert_eq!(copy.may_come_behind(&before), may, "{why}");
        }
        assert!(moves(2000, 6000, 1, 1).may_come_behind(&moves(1000, 5000, 1, 1)), "the same connection");
        // From another device of the same server.
        let other = |first| Moves { source: ContextId(1), ..moves(2000, 6000, first, 2) };
        assert!(other(1).may_come_behind(&before) && other(1).may_mix(&before));
        let older = |first| Moves { keeps_order: false, ..other(first) };
        assert!(
            !older(1).may_come_behind(&before) && !older(1).may_mix(&before),
            "an older server mixes them up"
        );
        assert!(older(3).may_come_behind(&before), "other connections");
        let same = Moves { keeps_order: false, ..moves(2000, 6000, 1, 2) };
        assert!(same.may_come_behind(&before), "one device");
    }

    #[test]
    fn the_first_connection_is_opened_again_ever_later_by_one_thread_at_a_time() {
        let mut now = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut connection = Connection::failed(true, now, pause);
        for _ in 0..10 {
            assert_eq!(connection.begin_again(now + pause - Duration::from_nanos(1)), None);
            now += pause;
            pause = (pause * 2).min(LAST_PAUSE);
            assert_eq!(connection.begin_again(now), Some(pause));
            assert_eq!(connection.begin_again(now + LAST_PAUSE), None, "a thread opens it");
            connection = Connection::failed(true, now, pause);
        }
        assert_eq!(pause, LAST_PAUSE);
        let mut open = Open::new(1, LAST_PAUSE);
        assert_eq!(open.pause(open.since + Duration::from_secs(1)), LAST_PAUSE);
        assert_eq!(open.pause(open.since + LAST_PAUSE), FIRST_PAUSE, "it has lasted");
        open.pause = FIRST_PAUSE;
        assert_eq!(open.pause(open.since), FIRST_PAUSE);
        // Each attempt would take a place at a server that cannot close it.
        let mut connection = Connection::failed(false, now, FIRST_PAUSE);
        assert_eq!(connection.begin_again(now + LAST_PAUSE), None);
    }

    #[test]
    fn both_servers_forget_a_connection_also_while_reply_slots_are_scarce() {
        let both = [(); 2].map(|()| Server::unused());
        let mut waits = Vec::new();
        for server in both {
            while server.session.has_free_slot() {
                waits.push(server.session.slot().unwrap());
            }
        }
        let before = both.map(|server| server.session.last_seq());
        close(7, both[0], both[1]);
        let deadline = Instant::now() + Duration::from_secs(60);
        for (server, before) in both.iter().zip(before) {
            while server.session.last_seq() == before {
                assert!(Instant::now() < deadline, "a server was not told");
                std::thread::yield_now();
            }
        }
        both.iter().for_each(|server| server.lose());
    }

    #[test]
    fn connections_that_were_refused_are_opened_after_a_pause() {
        let mut now = Instant::now();
        let mut more = More::Wanted(FIRST_PAUSE);
        assert!(more.begin(now) && !more.begin(now), "one thread does it");
        let mut pause = FIRST_PAUSE;
        for _ in 0..10 {
            more.end(true, now);
            assert!(!more.begin(now + pause - Duration::from_nanos(1)));
            now += pause;
            assert!(more.begin(now));
            pause = (pause * 2).min(LAST_PAUSE);
        }
        assert_eq!(pause, LAST_PAUSE);
        more.end(false, now);
        assert!(more.begin(now), "one that is lost is opened at once");
    }

    #[test]
    fn pieces_are_whole_rows_unless_rows_are_longer() {
        for (piece, row, expected) in
            [(100, 7, 98), (100, 100, 100), (100, 101, 100), (100, 1, 100), (100, 60, 60)]
        {
            assert_eq!(whole_rows(piece, row), expected, "{piece} {row}");
        }
    }

    #[test]
    fn boxes_are_cut_completely_into_no_more_than_asked_for() {
        let all = |extent, most| boxes(extent, most, MAX_PIECE).collect::<Vec<_>>();
        let row = 5 * MAX_PIECE + 20;
        assert_eq!(
            all([row, 1, 1], 4),
            [
                ([0, 0, 0], [2 * MAX_PIECE, 1, 1]),
                ([2 * MAX_PIECE, 0, 0], [2 * MAX_PIECE, 1, 1]),
                ([4 * MAX_PIECE, 0, 0], [MAX_PIECE + 20, 1, 1]),
            ]
        );
        assert_eq!(
            all([9, 7, 1], 3),
            [([0, 0, 0], [9, 3, 1]), ([0, 3, 0], [9, 3, 1]), ([0, 6, 0], [9, 1, 1])]
        );
        assert_eq!(all([9, 7, 2], 3), [([0, 0, 0], [9, 7, 1]), ([0, 0, 1], [9, 7, 1])]);
        for extent in [[row, 1, 1], [4, 1, 1], [9, 7, 1], [9, 7, 2], [1, 1, 9]] {
            assert_eq!(all(extent, 1), [([0; 3], extent)]);
        }
    }

    #[test]
    fn a_row_takes_a_connection_for_each_half_mib_of_it() {
        for (bytes, expected) in [
            (4, vec![4]),
            ((1 << 20) - 4, vec![(1 << 20) - 4]),
            (1 << 20, vec![512 << 10; 2]),
            (3 << 19, vec![512 << 10; 3]),
            (2 << 20, vec![512 << 10; 4]),
            (3 << 20, vec![768 << 10; 4]),
            ((4 << 20) + 4, vec![1536 << 10, 1536 << 10, (1 << 20) + 4]),
            (64 << 20, vec![16 << 20; 4]),
        ] {
            let least = piece_of(bytes) as u64;
            let boxes = boxes([bytes as u64, 1, 1], connections_for(bytes) as u64, least);
            let lengths: Vec<_> = boxes.map(|(_, [width, ..])| width as usize).collect();
            assert_eq!(lengths, expected, "{bytes}");
        }
    }

    #[test]
    fn boxes_with_overlapping_rows_are_copied_in_parts() {
        let place = |pitch, slice| Pitched { address: 0, pitch, slice };
        for (pitch, slice, extent, apart) in [
            (0, 0, [8, 1, 1], true),
            (8, 0, [8, 9, 1], true),
            (7, 0, [8, 2, 1], false),
            (8, 16, [8, 2, 2], true),
            (8, 15, [8, 2, 2], false),
            (u64::MAX, u64::MAX, [8, 3, 2], false),
        ] {
            assert_eq!(are_apart(&place(pitch, slice), extent), apart, "{pitch} {slice} {extent:?}");
        }
    }

    #[test]
    fn knobs_beyond_what_the_buffers_allow_are_ignored() {
        let of = |piece: &str, depth: &str, least: &str| {
            let all =
                [("RGPU_DIRECT_PIECE", piece), ("RGPU_DIRECT_DEPTH", depth), ("RGPU_DIRECT_LEAST", least)];
            let all: BTreeMap<&str, String> = all.map(|(name, value)| (name, value.to_owned())).into();
            let Knobs { piece, depth, least, .. } = Knobs::of(|name| all.get(name).cloned());
            (piece, depth, least)
        };
        assert_eq!(of("", "", ""), (None, None, 0));
        assert_eq!(of("4096", "1", "70000"), (Some(4096), Some(1), 70000));
        assert_eq!(of("1048576", "8", "0"), (Some(1 << 20), Some(8), 0));
        for wrong in ["4095", "1048577", "-1", "many"] {
            assert_eq!(of(wrong, "9", wrong).0, None);
        }
        assert_eq!((of("", "0", "").1, of("", "9", "").1), (None, None));
    }
}
