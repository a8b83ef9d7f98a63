//! Copies between servers over a direct connection of their workers. This process coordinates; the bytes
//! don't pass through it.
//!
//! ```text
//!  server A ── DirectSend ──▶ buffer ══ connection ══▶ buffer ── DirectLand ──▶ server B
//! ```
//!
//! A copy is split into numbered pieces, of which at most [`WINDOW`] are in transit. A piece is landed once
//! the receiving server reports its arrival. If there is no connection, or it fails, the copy goes through
//! this process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::memory::managed;
use crate::process::driver::Server;
use crate::process::stream::Stream;
use crate::work::server_copy::{Linear, Part};
use client::ops::copy::Pitched;
use client::ops::direct::{DirectArrival, DirectKey, DirectLand, DirectOffer, DirectOpen, DirectSend};
use client::{Status, lock, log};

/// Pieces of a copy that were sent and not yet reported as arrived. The servers have room for twice as many.
const WINDOW: usize = 8;

/// A connection. Copies over it run one after the other.
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
    /// It doesn't exist, or no longer.
    None,
}

struct Open {
    direct: u32,
    /// The number of the last piece.
    last: u64,
}

/// The servers on which the program has had a context.
static USED: Mutex<Vec<&'static Server>> = Mutex::new(Vec::new());

/// Notes that the program has a context on a server. If it is not the program's first server, a thread opens
/// the connections between them before the first copy.
pub(crate) fn used(server: &'static Server) {
    let mut used = lock(&USED);
    if used.iter().any(|known| std::ptr::eq(*known, server)) {
        return;
    }
    let others = used.clone();
    used.push(server);
    drop(used);
    if others.is_empty() {
        return;
    }
    let open_all = move || {
        for other in others {
            for (from, to) in [(server, other), (other, server)] {
                ensure(&mut lock(&connection(from, to)), from, to);
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

/// Opens a connection unless that was done or tried before. Waits until it is open or has failed.
fn ensure(connection: &mut Connection, from: &Server, to: &Server) {
    if !matches!(connection, Connection::New) {
        return;
    }
    *connection = match open(from, to) {
        Ok(direct) => Connection::Open(Open { direct, last: 0 }),
        Err(why) => {
            let (from, to) = (from.session.index(), to.session.index());
            log::info(format_args!(
                "copies from server {from} to server {to} pass through this machine: {why}"
            ));
            Connection::None
        }
    };
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
    let offer =
        to.session.call(&DirectOffer { direct, key }).map_err(|status| failed("receiving", status))?;
    let opened = from.session.call(&DirectOpen { direct, ticket: offer.ticket }).map_err(sending)?;
    if opened.refusal.is_empty() { Ok(direct) } else { Err(opened.refusal) }
}

/// Copies parts, in order, over a direct connection. Returns true when all bytes have arrived. False: the
/// copy must be repeated from the start in another way; parts of it may have been made.
pub(crate) fn carry(
    (to, dst): (&Arc<Stream>, &Linear),
    (from, src): (&Arc<Stream>, &Linear),
    [(written, write_len), (read, read_len)]: [(u64, u64); 2],
    parts: &[Part],
) -> Result<bool> {
    let connection = connection(src.context.server, dst.context.server);
    let mut connection = lock(&connection);
    ensure(&mut connection, src.context.server, dst.context.server);
    let Connection::Open(open) = &mut *connection else { return Ok(false) };
    managed::lend(read, read_len)?;
    let carried = carry_over(open, (to, dst), (from, src), (written, write_len), parts);
    if let Err(status) = carried {
        log::warn(format_args!(
            "a direct connection between servers has failed ({status}): copies from server {} to server {} pass through this machine from now on",
            src.context.server.session.index(),
            dst.context.server.session.index(),
        ));
        *connection = Connection::None;
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

fn carry_over(
    Open { direct, last }: &mut Open,
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
        while sent.len() < WINDOW
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
    const STEPS: [(usize, usize); 3] = [(600 << 10, 128 << 10), (4 << 20, 256 << 10), (14 << 20, 512 << 10)];
    STEPS.iter().find(|(upto, _)| bytes <= *upto).map_or(1 << 20, |(_, piece)| *piece)
}
