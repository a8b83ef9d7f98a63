//! One queue pair that carries the pieces of copies between servers, one way.
//!
//! ```text
//!   send(header, buffer) ─SEND─▶ queue pair ═══▶ queue pair ─▶ the oldest buffer given to receive() ─▶ poll()
//! ```
//!
//! A piece is a message, not a write: its bytes go into the oldest receive that the receiving end has posted,
//! and nowhere else. So that end gives out no address and no key, the peer can fill a buffer only once and
//! only while it is posted, and the device refuses what does not fit.
//!
//! One thread at a time uses an end. Nothing blocks, and nothing is allocated once the queues have their
//! final size. The receiving end says over another connection how many receives it has posted
//! ([`Pieces::grant`]).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use protocol::link::{DirectHeader, DirectQueue};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::device::{Port, mtu_number};
use super::error::VerbsError;
use super::failure::{describe, failure};
use super::queue::{Completions, Depth, POLL_BATCH, QueuePair, Target, first_packet_number};
use super::registration::{Access, Domain, Registration, Slab};
use super::settings::Settings;
use super::sys::{SendWr, Sge, Wc, number};

/// Maximum number of pieces one behind the other whose completions are not reported: their buffers are free
/// only when the next one's is.
const MOST_QUIET: usize = 3;

/// Size of a piece's header, in bytes.
const HEADER: usize = size_of::<DirectHeader>();

/// Memory for the bytes of one piece.
///
/// # Safety
/// As long as the value exists, the registration and its memory stay, and nobody but the owner of the value
/// and the device touches that memory.
pub unsafe trait PieceBuffer {
    /// Its registration, if it has one: for a receiving end one that the device may write.
    fn registration(&self) -> Option<&Registration>;

    /// Where the bytes begin in it.
    fn offset(&self) -> u64 {
        0
    }
}

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It sends pieces.
    Sending,
    /// It receives them.
    Receiving,
}

/// A piece that has been sent or received.
#[derive(Debug)]
pub struct Done<B> {
    /// Receiving end: its header, as the peer wrote it. Sending end: zeros.
    pub header: DirectHeader,
    /// Bytes behind the header.
    pub len: usize,
    /// Their buffer.
    pub buffer: Option<B>,
}

#[derive(Debug)]
struct Posted<B> {
    len: usize,
    buffer: Option<B>,
    /// Its completion is not reported.
    is_quiet: bool,
}

/// One end of such a connection. See the module.
#[derive(Debug)]
pub struct Pieces<B> {
    /// Dropped first: after that the device touches none of the memory below.
    pair: QueuePair,
    completions: Arc<Completions>,
    headers: Slab,
    posted: VecDeque<Posted<B>>,
    domain: Arc<Domain>,
    /// What the peer is told of it.
    port: Port,
    end: End,
    /// Number of the next request; the front of `posted` is `next - posted.len()`.
    next: u64,
    depth: usize,
    /// Sending end: receives that the peer has posted for it.
    credits: Credits,
    psn: u32,
    loss: Duration,
}

impl<B: PieceBuffer> Pieces<B> {
    /// Makes a queue pair for at most `depth` pieces under way. It is not connected, but takes receives.
    pub fn new(
        domain: &Arc<Domain>,
        end: End,
        depth: usize,
        settings: &Settings,
    ) -> Result<Pieces<B>, VerbsError> {
        let (sends, receives) = match end {
            End::Sending => (depth as u32, 1),
            End::Receiving => (1, depth as u32),
        };
        let port = domain.device().port()?;
        let completions = Completions::new(domain.device(), sends + receives)?;
        let headers = Slab::new(domain, depth * HEADER, Access::Write)?;
        let depth_of = Depth { sends, receives, receive_segments: 2, inline: 0 };
        let pair = QueuePair::new(domain, &completions, &port, depth_of)?;
        Ok(Pieces {
            pair,
            completions,
            headers,
            posted: VecDeque::with_capacity(depth),
            domain: Arc::clone(domain),
            port,
            end,
            next: 0,
            depth,
            credits: Credits { have: 0, most: depth },
            psn: first_packet_number()?,
            loss: settings.loss,
        })
    }

    /// What the peer must know. A receiving end says this when it has posted its first receives.
    pub fn offer(&self) -> DirectQueue {
        let port = &self.port;
        let receives = self.posted.len() as u32;
        DirectQueue {
            queue_pair: self.pair.number(),
            psn: self.psn,
            mtu: port.mtu,
            receives,
            lid: port.lid,
            global: port.global.into(),
            gid: port.gid,
            reason: [0; _],
        }
    }

    /// Connects to the peer's queue pair.
    pub fn connect(&mut self, peer: &DirectQueue) -> Result<(), VerbsError> {
        let port = &self.port;
        check_peer(peer)?;
        port.check_route(peer.global)?;
        self.credits.grant(peer.receives as usize)?;
        let mtu = peer.mtu.min(port.mtu);
        let target = Target { qpn: peer.queue_pair, psn: peer.psn, lid: peer.lid, gid: peer.gid, mtu };
        self.pair.connect(port, &target, self.psn, self.loss)
    }

    /// The domain in which buffers must be registered.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Number of pieces, or of receives, that are posted.
    pub fn under_way(&self) -> usize {
        self.posted.len()
    }

    /// The peer has posted so many more receives.
    ///
    /// # Errors
    /// There cannot be so many.
    pub fn grant(&mut self, receives: usize) -> Result<(), VerbsError> {
        self.credits.grant(receives)
    }

    /// Whether a piece can be sent now.
    pub fn may_send(&self) -> bool {
        self.credits.have > 0 && self.posted.len() < self.depth
    }

    /// Sends a header and the first `len` bytes of a buffer, if [`may_send`](Self::may_send). `more`: the
    /// caller sends another one right behind it if that may be sent, whose completion can stand for this
    /// one's, too. So not every piece wakes a thread.
    ///
    /// # Errors
    /// The buffer has fewer bytes, or the device refuses. The connection must be given up then.
    pub fn send(
        &mut self,
        header: &DirectHeader,
        piece: Option<(B, usize)>,
        more: bool,
    ) -> Result<(), VerbsError> {
        if !self.may_send() {
            return Err(VerbsError::Broken("the peer has no receive for a piece".into()));
        }
        let place = self.place();
        self.headers.store(place, header.as_bytes());
        let segments = self.segments(place, piece.as_ref().map(|(buffer, len)| (buffer, *len)))?;
        let is_last = !more || self.credits.have == 1 || self.posted.len() + 1 == self.depth;
        let quiet = self.posted.iter().rev().take_while(|before| before.is_quiet).count();
        let is_quiet = !is_last && quiet < MOST_QUIET;
        let mut wr = SendWr {
            wr_id: self.next,
            sg_list: segments.as_ptr(),
            num_sge: if piece.is_some() { 2 } else { 1 },
            opcode: number::WR_SEND,
            send_flags: if is_quiet { 0 } else { number::SEND_SIGNALED },
            ..SendWr::default()
        };
        // SAFETY: the header's place is used by no other request under way, and the buffer is kept in
        // `posted` until this one completes or the queue pair is destroyed.
        unsafe { self.pair.send(&mut wr) }?;
        self.credits.have -= 1;
        let (buffer, len) = piece.map_or((None, 0), |(buffer, len)| (Some(buffer), len));
        self.posted(Posted { len, buffer, is_quiet });
        Ok(())
    }

    /// Posts a receive into a buffer.
    ///
    /// # Errors
    /// The device refuses, or as many are posted as can be.
    pub fn receive(&mut self, buffer: B) -> Result<(), VerbsError> {
        if self.posted.len() >= self.depth {
            return Err(VerbsError::Broken(format!("{} receives are posted already", self.depth)));
        }
        let len = buffer.registration().map_or(0, Registration::len);
        let segments = self.segments(self.place(), Some((&buffer, len)))?;
        // SAFETY: as in `send`; the receive's memory is read only when it has completed.
        unsafe { self.pair.receive(self.next, &segments) }?;
        self.posted(Posted { len, buffer: Some(buffer), is_quiet: false });
        Ok(())
    }

    /// Where the next request's header is in `headers`. As many places as requests can be under way, so this
    /// one is free.
    fn place(&self) -> usize {
        self.next as usize % self.depth * HEADER
    }

    fn segments(&self, place: usize, piece: Option<(&B, usize)>) -> Result<[Sge; 2], VerbsError> {
        let wrong = || VerbsError::Broken("a piece is larger than its registered buffer".into());
        let header = self.headers.registration().slice(place as u64, HEADER as u32).ok_or_else(wrong)?;
        let bytes = match piece {
            Some((buffer, len)) => {
                let len = u32::try_from(len).map_err(|_| wrong())?;
                let memory = buffer.registration();
                memory.and_then(|memory| memory.slice(buffer.offset(), len)).ok_or_else(wrong)?.sge
            }
            None => Sge::default(),
        };
        Ok([header.sge, bytes])
    }

    fn posted(&mut self, posted: Posted<B>) {
        self.posted.push_back(posted);
        self.next += 1;
    }

    /// Appends what was sent or received. Never waits.
    ///
    /// # Errors
    /// The connection is broken, or its device is.
    pub fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), VerbsError> {
        let mut batch = [Wc::default(); POLL_BATCH];
        loop {
            let completed = self.completions.poll(&mut batch)?;
            let count = completed.len();
            for wc in &batch[..count] {
                if wc.status != number::WC_SUCCESS {
                    let device = self.domain.device();
                    let on = format!("{} port {}", device.name(), device.port_number());
                    let cause = failure(&batch[..count]).unwrap_or(*wc);
                    return Err(describe(&on, &cause));
                }
                self.completed(wc, done)?;
            }
            if count < POLL_BATCH {
                break;
            }
        }
        // A device that has something to do needs no look at its events.
        let failure = if done.is_empty() { self.domain.device().failure() } else { None };
        failure.map_or(Ok(()), |why| Err(VerbsError::Broken(why.to_owned())))
    }

    fn completed(&mut self, wc: &Wc, done: &mut Vec<Done<B>>) -> Result<(), VerbsError> {
        // Those before it have completed as well, and say nothing.
        let quiet = self.posted.iter().take_while(|posted| posted.is_quiet).count();
        let first = self.next - self.posted.len() as u64;
        let at = first + quiet as u64;
        let unknown = || VerbsError::Broken(format!("request {} completed before {at}", wc.wr_id));
        if wc.wr_id != at || quiet == self.posted.len() {
            return Err(unknown());
        }
        if self.end == End::Sending {
            let sent = self.posted.drain(..=quiet);
            let header = DirectHeader::new_zeroed();
            done.extend(sent.map(|Posted { len, buffer, .. }| Done { header, len, buffer }));
            return Ok(());
        }
        let Posted { len, buffer, .. } = self.posted.pop_front().ok_or_else(unknown)?;
        if wc.opcode != number::WC_RECV {
            let opcode = wc.opcode;
            return Err(VerbsError::Peer(format!("it used a receive for something else ({opcode})")));
        }
        let came = (wc.byte_len as usize).checked_sub(HEADER).filter(|came| *came <= len);
        let came = came.ok_or_else(|| {
            VerbsError::Peer(format!("it sent a message of {} bytes, which is no piece", wc.byte_len))
        })?;
        let at = self.headers.pointer(first as usize % self.depth * HEADER, HEADER).ok_or_else(unknown)?;
        // SAFETY: inside the slab. The receive into it has completed and it is not posted again, so nobody
        // writes it.
        let bytes = unsafe { at.cast::<[u8; HEADER]>().as_ptr().read() };
        let header = DirectHeader::read_from_bytes(&bytes).map_err(|_| unknown())?;
        done.push(Done { header, len: came, buffer });
        Ok(())
    }

    /// One of them is readable when something has happened after [`arm`](Self::arm). The last one is while
    /// the device works no more: of its event, the thread that takes it would be the only one to know.
    pub fn fds(&self) -> [BorrowedFd<'_>; 3] {
        let device = self.domain.device();
        [self.completions.as_fd(), device.event_fd(), device.failure_fd()]
    }

    /// To be called before sleeping on [`fds`](Self::fds). What came before it does not wake:
    /// [`poll`](Self::poll) once more after it.
    pub fn arm(&self) -> Result<(), VerbsError> {
        self.completions.arm()
    }

    /// To be called after waking.
    pub fn disarm(&self) {
        self.completions.disarm();
    }
}

/// Receives that the peer has posted and that are not used.
#[derive(Debug)]
struct Credits {
    have: usize,
    most: usize,
}

impl Credits {
    fn grant(&mut self, receives: usize) -> Result<(), VerbsError> {
        let sum = self.have.saturating_add(receives);
        if sum > self.most {
            let most = self.most;
            return Err(VerbsError::Peer(format!(
                "it says that it has posted {receives} more receives, which makes {sum} of {most}"
            )));
        }
        self.have = sum;
        Ok(())
    }
}

fn check_peer(peer: &DirectQueue) -> Result<(), VerbsError> {
    if !(1..=0xff_ffff).contains(&peer.queue_pair) {
        return Err(VerbsError::Peer(format!("it offers queue pair {}", peer.queue_pair)));
    }
    if mtu_number(peer.mtu).is_none() {
        return Err(VerbsError::Peer(format!("it offers an MTU of {}", peer.mtu)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::verbs::{Device, software};

    struct Nothing;

    // SAFETY: it has no registration.
    unsafe impl PieceBuffer for Nothing {
        fn registration(&self) -> Option<&Registration> {
            None
        }
    }

    #[test]
    fn whoever_takes_the_event_that_a_device_has_failed_all_its_connections_wake() {
        software::install();
        let settings = Settings::default();
        let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
        let queues = [End::Receiving, End::Receiving, End::Sending]
            .map(|end| Pieces::<Nothing>::new(&domain, end, 4, &settings).unwrap());
        let wakes = |queue: &Pieces<Nothing>| {
            let mut fds = queue.fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            poll(&mut fds, PollTimeout::ZERO).unwrap() > 0
        };
        assert!(!queues.iter().any(wakes));
        software::event(queues[0].pair.number(), number::EVENT_DEVICE_FATAL);
        assert!(domain.device().failure().is_some());
        assert!(queues.iter().all(wakes));
    }

    #[test]
    fn a_peer_cannot_grant_more_than_there_can_be() {
        let mut credits = Credits { have: 0, most: 16 };
        credits.grant(16).unwrap();
        assert!(credits.grant(1).is_err());
        credits.have -= 3;
        assert!(credits.grant(4).is_err() && credits.grant(usize::MAX).is_err());
        credits.grant(3).unwrap();
        assert_eq!(credits.have, 16);
    }

    #[test]
    fn queue_pairs_that_cannot_be_are_refused() {
        let good = DirectQueue { queue_pair: 17, mtu: 4096, ..DirectQueue::new_zeroed() };
        assert!(check_peer(&good).is_ok());
        for bad in [
            DirectQueue { queue_pair: 0, ..good },
            DirectQueue { queue_pair: 1 << 24, ..good },
            DirectQueue { mtu: 0, ..good },
            DirectQueue { mtu: 9000, ..good },
        ] {
            assert!(matches!(check_peer(&bad), Err(VerbsError::Peer(_))), "{bad:?}");
        }
    }
}
