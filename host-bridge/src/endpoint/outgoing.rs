//! Data that a command writes, on its way to the client: what the driver sends it with.
//!
//! Over `tcp` it goes through the [outbox](super::outbox), over `verbs` by writes into the client's memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use protocol::data::HostRange;
use protocol::link::{DataHeader, MAX_DATA};

use super::end::Lost;
use super::outbox::{At, Body, Held, Outbox, Route, Unacknowledged, begin, behind};
use super::tcp::client::TcpClient;
use super::verbs::client::{Target, VerbsClient};
use super::verbs::send::Registered;

/// Shorter data is always copied instead of held: many short copies would wait for the places of one another.
pub(super) const HELD_FROM: usize = 64 << 10;

/// Data that a command writes, to be sent in chunks. When it is dropped the client is told that all has been
/// sent, whatever that was.
pub struct Outgoing {
    way: Way,
    seq: u64,
    piece: u32,
    len: u64,
    sent: AtomicU64,
}

/// How the data goes.
enum Way {
    Tcp(Tcp),
    /// By writes to this place of the client's memory.
    Verbs {
        client: Weak<VerbsClient>,
        at: Target,
    },
}

/// By data connections.
struct Tcp {
    client: Weak<TcpClient>,
    outbox: Arc<Outbox>,
    /// Where it begins in the client's memory.
    at: At,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing(command {}, piece {}, {} bytes)", self.seq, self.piece, self.len)
    }
}

impl Outgoing {
    pub(super) fn new(
        client: Weak<TcpClient>,
        outbox: Arc<Outbox>,
        seq: u64,
        piece: u32,
        range: HostRange,
    ) -> Outgoing {
        let way = Way::Tcp(Tcp { client, outbox, at: begin(range) });
        Outgoing { way, seq, piece, len: range.len, sent: AtomicU64::new(0) }
    }

    pub(super) fn over_verbs(client: Weak<VerbsClient>, seq: u64, at: Target, len: u64) -> Outgoing {
        Outgoing { way: Way::Verbs { client, at }, seq, piece: 0, len, sent: AtomicU64::new(0) }
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of lanes: of connections over which chunks travel side by side.
    pub fn lanes(&self) -> usize {
        match &self.way {
            Way::Tcp(tcp) => tcp.outbox.lanes(),
            Way::Verbs { .. } => 1,
        }
    }

    /// The lane whose data connection carries the least that has not arrived. For a thread that sends over
    /// all of them in turn: the slowest one must not hold up the others.
    pub fn idlest_lane(&self) -> usize {
        match &self.way {
            Way::Tcp(tcp) => tcp.outbox.idlest_lane(),
            Way::Verbs { .. } => 0,
        }
    }

    /// A buffer of `len` bytes at most (fewer where the transport's are shorter) that goes out without being
    /// copied, for [`send_lent`](Self::send_lent) with the same `lane`. Its contents are anything. May wait
    /// until one is free.
    pub fn lend(&self, lane: usize, len: usize) -> Result<Lent, Lost> {
        match &self.way {
            Way::Tcp(tcp) => {
                let len = len.min(MAX_DATA as usize);
                let buffer = tcp.outbox.buffer(lane, len);
                Ok(Lent(Lending::Own { buffer, len }))
            }
            Way::Verbs { client, .. } => {
                let client = client.upgrade().ok_or_else(|| Lost::new("the session is over"))?;
                Ok(Lent(Lending::Registered(client.lend(len)?)))
            }
        }
    }

    /// Sends a buffer's bytes, which belong at `offset`, over the data connection that `lane` picks, where
    /// there are several: chunks of several lanes travel side by side. Returns when they have been handed to
    /// the network, or will be once the session has a link again. Bytes beyond the data's end are not sent.
    pub fn send_lent(&self, lane: usize, offset: u64, lent: Lent) -> Result<(), Lost> {
        let room = self.len.saturating_sub(offset).min(lent.len() as u64) as usize;
        if room == 0 {
            return Ok(());
        }
        match (&self.way, lent.0) {
            (Way::Verbs { at, .. }, Lending::Registered(lent)) => {
                lent.send(self.seq, at.behind(offset), room)?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                Ok(())
            }
            (Way::Tcp(tcp), Lending::Own { buffer, .. }) => {
                self.queue(tcp, lane, offset, room, Body::Own(buffer)).map(drop)
            }
            // A buffer of another session's.
            _ => Ok(()),
        }
    }

    /// Sends all of the data, which a CPU has made: a table, say. Nothing of it counts as copied.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Lost> {
        let mut at = 0;
        while at < bytes.len() {
            let mut lent = self.lend(0, bytes.len() - at)?;
            let room = lent.bytes();
            let end = at + room.len();
            room.copy_from_slice(&bytes[at..end]);
            self.send_lent(0, at as u64, lent)?;
            at = end;
        }
        Ok(())
    }

    /// Sends bytes of the driver's, which belong at `offset`, from where they are. Otherwise as
    /// [`send_lent`](Self::send_lent). They may have to be sent again, so they are held for longer than this
    /// takes, unless they are short or the link is long. Some of them may leave only when what this returns
    /// is dropped.
    pub fn send_held(&self, lane: usize, offset: u64, held: Box<dyn Held>) -> Result<Leaving, Lost> {
        let bytes = held.bytes();
        let room = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        match &self.way {
            _ if room == 0 => Ok(Leaving(None)),
            Way::Verbs { client, at } => {
                let Some(client) = client.upgrade() else { return Err(Lost::new("the session is over")) };
                client.send(self.seq, at.behind(offset), &bytes[..room])?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                Ok(Leaving(None))
            }
            Way::Tcp(tcp) => self.queue(tcp, lane, offset, room, Body::Held(held)),
        }
    }

    /// What was sent and is kept. `None`: the transport keeps nothing.
    pub fn unacknowledged(&self) -> Option<Unacknowledged> {
        match &self.way {
            Way::Tcp(tcp) => Some(Unacknowledged(Arc::clone(&tcp.outbox))),
            Way::Verbs { .. } => None,
        }
    }

    /// Queues the first `len` bytes of `body`, which belong at `offset`, in as many chunks as it takes. The
    /// last one leaves when what this returns is dropped.
    fn queue(&self, tcp: &Tcp, lane: usize, offset: u64, len: usize, body: Body) -> Result<Leaving, Lost> {
        let outbox = &tcp.outbox;
        let (mut body, mut done, mut leaving) = (Some(body), 0, Leaving(None));
        while let Some(all) = body.take() {
            // What was queued has to leave first: the next part may wait until some has arrived.
            drop(leaving);
            let at = offset + done as u64;
            let bytes = &all.bytes()[done..len.min(done + MAX_DATA as usize)];
            let compressed = outbox.compressed(lane, bytes);
            let queued = if compressed.is_none() && self.spread(tcp, lane, at, bytes)? {
                done += bytes.len();
                None
            } else {
                let route = outbox.route(lane, behind(tcp.at, at), bytes.len());
                let (whole, alone) = (route.len == bytes.len(), route.len == len);
                let chunk = match (compressed, &all) {
                    (Some(compressed), _) if whole => Body::Compressed(compressed),
                    (None, Body::Held(_)) if alone && len >= HELD_FROM && outbox.may_hold(lane, &route) => {
                        return self.append(tcp, route, at, all);
                    }
                    (None, Body::Own(_)) if alone => return self.append(tcp, route, at, all),
                    _ => outbox.copy(&route, bytes),
                };
                done += route.len;
                Some((route, chunk))
            };
            // The driver need not wait until the last bytes are sent.
            if done < len {
                body = Some(all);
            } else {
                outbox.give_back(lane, all);
            }
            leaving = match queued {
                Some((route, chunk)) => self.append(tcp, route, at, chunk)?,
                None => Leaving(None),
            };
        }
        Ok(leaving)
    }

    /// Sends bytes that belong at `offset` over several connections, as long as those have carried little and
    /// the way is long. False: nothing was sent.
    fn spread(&self, tcp: &Tcp, lane: usize, offset: u64, bytes: &[u8]) -> Result<bool, Lost> {
        let Some(len) = tcp.outbox.part(lane, bytes.len()) else { return Ok(false) };
        for (number, part) in bytes.chunks(len).enumerate() {
            let (begin, mut done) = (offset + (number * len) as u64, 0);
            while done < part.len() {
                let at = begin + done as u64;
                let route = tcp.outbox.route(lane + number, behind(tcp.at, at), part.len() - done);
                let copy = tcp.outbox.copy(&route, &part[done..]);
                done += route.len;
                drop(self.append(tcp, route, at, copy)?);
            }
        }
        Ok(true)
    }

    /// Queues a chunk, which belongs at `offset`.
    fn append(&self, tcp: &Tcp, route: Route, offset: u64, body: Body) -> Result<Leaving, Lost> {
        let len = route.len as u32;
        let header = DataHeader { seq: self.seq, offset, piece: self.piece, len };
        let stream = tcp.outbox.append(route, header, body)?;
        self.sent.fetch_add(len.into(), Ordering::Relaxed);
        Ok(Leaving(Some((tcp.client.clone(), Arc::clone(&tcp.outbox), stream))))
    }

    /// Ends it, as dropping it does, but the client need not be told before what this returns is dropped. It
    /// is told before whatever it is told after this call, so a driver may go on at once with what depends on
    /// that.
    pub fn end(mut self) -> Telling {
        let (seq, sent) = (self.seq, self.sent.load(Ordering::Acquire));
        match &mut self.way {
            Way::Tcp(tcp) => {
                let client = std::mem::take(&mut tcp.client);
                if let Some(client) = client.upgrade() {
                    client.queue_data_sent(seq, sent);
                }
                Telling(client)
            }
            // Dropping this tells the client.
            Way::Verbs { .. } => Telling(Weak::new()),
        }
    }
}

/// Data that a session keeps for its client, and that leaves when this is dropped: its client, its data
/// connections, and the number of the one.
pub struct Leaving(Option<(Weak<TcpClient>, Arc<Outbox>, usize)>);

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some((client, outbox, stream)) = &self.0 else { return };
        if let (Err((attempt, e)), Some(client)) = (outbox.send(*stream), client.upgrade()) {
            client.broken(attempt, Some(&e));
        }
    }
}

/// Something that a client is told when this is dropped, if it has not been told by then.
pub struct Telling(Weak<TcpClient>);

impl Drop for Telling {
    fn drop(&mut self) {
        self.0.upgrade().inspect(|client| client.send_unsent());
    }
}

/// A buffer of the transport's, to be filled and sent. Dropped, it is free again.
pub struct Lent(Lending);

enum Lending {
    /// The first `len` bytes of this one.
    Own {
        buffer: Vec<u8>,
        len: usize,
    },
    Registered(Registered),
}

impl Lent {
    fn len(&self) -> usize {
        match &self.0 {
            Lending::Own { len, .. } => *len,
            Lending::Registered(lent) => lent.len(),
        }
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Lending::Own { buffer, len } => &mut buffer[..*len],
            Lending::Registered(lent) => lent.bytes(),
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let sent = self.sent.load(Ordering::Acquire);
        match &self.way {
            Way::Tcp(tcp) => {
                if let Some(client) = tcp.client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
            Way::Verbs { client, .. } => {
                if let Some(client) = client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
        }
    }
}
