//! The queue pairs of a [`Link`](super::link::Link): made and offered to the peer, then connected to its own.

use std::sync::Arc;
use std::time::Duration;

use protocol::link::{MAX_QUEUES, Queues};

use super::credits::{Credits, LEAST_RECEIVES};
use super::device::{Port, mtu_number};
use super::error::VerbsError;
use super::link::Before;
use super::queue::{Completions, Depth, QueuePair, Target, first_packet_number};
use super::registration::{Access, Domain, Slab};
use super::settings::{DEEPEST, Settings};

/// Maximum size of a message with its header, in bytes. A reply with the largest payload fits.
pub(super) const MESSAGE: usize = 8192;
/// Inline size to request for work requests, in bytes.
const INLINE: u32 = 220;
/// Room for one piece's header.
pub(super) const PIECE: usize = 32;
/// A bit of a work request's id: it is a receive.
pub(super) const RECEIVE: u64 = 1 << 63;

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) pair: QueuePair,
    /// Maximum number of outstanding requests.
    pub(super) depth: usize,
    pub(super) unsignalled: usize,
    /// Signalled requests that have not completed.
    pub(super) signalled: usize,
}

impl Queue {
    /// Whether the next request is to be signalled.
    pub(super) fn signals(&mut self, ask: bool) -> bool {
        self.unsignalled += 1;
        let signal = ask || self.unsignalled >= (self.depth / 4).max(1);
        if signal {
            self.unsignalled = 0;
            self.signalled += 1;
        }
        signal
    }
}

/// Queue pairs that accept receives but are not connected to the peer's.
#[derive(Debug)]
pub struct Unconnected {
    queues: Vec<Queue>,
    completions: Arc<Completions>,
    inbox: Slab,
    outbox: Slab,
    headers: Slab,
    pub(super) domain: Arc<Domain>,
    /// What the peer is told of it.
    port: Port,
    receives: u32,
    depth: u32,
    psn: u32,
    loss: Duration,
}

/// Connected queue pairs.
#[derive(Debug)]
pub(super) struct Up {
    /// Dropped first: after that the device touches none of the memory below.
    pub(super) queues: Vec<Queue>,
    pub(super) completions: Arc<Completions>,
    pub(super) inbox: Slab,
    pub(super) outbox: Slab,
    pub(super) headers: Slab,
    pub(super) credits: Credits,
    /// Free buffers of `outbox`.
    pub(super) free: Vec<u16>,
    /// Queue of the last write.
    pub(super) turn: usize,
    /// The most bytes of a message to the peer.
    pub(super) message: usize,
    /// Messages sent and received.
    pub(super) messages: (u32, u32),
    /// Receives that the device has.
    pub(super) receives: usize,
    /// What is sent before the peer has sent something.
    pub(super) before: Before,
    /// The peer has sent something.
    pub(super) heard: bool,
    /// They are to be taken down: nothing is sent or received any more.
    pub(super) stopped: bool,
    /// The queue whose pair has refused a request, and what it said. Nothing is sent any more.
    pub(super) refusal: Option<(usize, VerbsError)>,
}

impl Unconnected {
    /// Makes queue pairs as configured (one more, for messages) and posts their receives.
    pub fn new(domain: &Arc<Domain>, settings: &Settings) -> Result<Unconnected, VerbsError> {
        settings.check()?;
        Self::with_queues(domain, settings, settings.wish())
    }

    /// As [`new`](Self::new), with as many queues and requests as the peer wishes and the settings grant.
    pub fn answering(
        domain: &Arc<Domain>,
        settings: &Settings,
        peer: &Queues,
    ) -> Result<Unconnected, VerbsError> {
        settings.check()?;
        check_peer(peer)?;
        Self::with_queues(domain, settings, settings.grant((peer.count - 1, peer.depth)))
    }

    fn with_queues(
        domain: &Arc<Domain>,
        settings: &Settings,
        (pairs, depth): (u32, u32),
    ) -> Result<Unconnected, VerbsError> {
        let count = pairs + 1;
        let receives = depth.max(LEAST_RECEIVES);
        let (limits, port) = (domain.device().limits(), domain.device().port()?);
        let most = limits.queue.min(limits.completions / (2 * count));
        if receives > most {
            return Err(VerbsError::Range {
                name: "queue_depth",
                value: depth.into(),
                least: 1,
                most: most.into(),
            });
        }
        let depths = depths(count, depth);
        let completions = Completions::new(domain.device(), count * 2 * receives)?;
        let inbox = Slab::new(domain, receives as usize * MESSAGE, Access::Write)?;
        let outbox = Slab::new(domain, depths[0] * MESSAGE, Access::Read)?;
        let headers = Slab::new(domain, MAX_QUEUES * depth as usize * PIECE, Access::Read)?;
        let mut queues = Vec::with_capacity(count as usize);
        for depth in depths {
            let sends = depth as u32;
            let pair = QueuePair::new(
                domain,
                &completions,
                &port,
                Depth { sends, receives, receive_segments: 1, inline: INLINE },
            )?;
            queues.push(Queue { pair, depth, unsignalled: 0, signalled: 0 });
        }
        let psn = first_packet_number()?;
        let (domain, loss) = (Arc::clone(domain), settings.loss);
        let link = Unconnected {
            queues,
            completions,
            inbox,
            outbox,
            headers,
            domain,
            port,
            receives,
            depth,
            psn,
            loss,
        };
        for index in 0..receives {
            for queue in 0..link.queues.len() {
                post_receive(&link.queues[queue].pair, &link.inbox, queue, index as usize)?;
            }
        }
        Ok(link)
    }

    /// What the peer must know. `slots`: the server's, with the size of each.
    pub fn offer(&self, slots: Option<(&Slab, u32)>) -> Queues {
        let port = &self.port;
        let mut queue_pairs = [0; MAX_QUEUES];
        for (number, queue) in queue_pairs.iter_mut().zip(&self.queues) {
            *number = queue.pair.number();
        }
        let (address, key, count, size) = slots.map_or((0, 0, 0, 0), |(slab, size)| {
            let r = slab.registration();
            (r.address(), r.remote_key(), r.len() as u32 / size.max(1), size)
        });
        Queues {
            count: self.queues.len() as u32,
            receives: self.receives,
            message: MESSAGE as u32,
            mtu: port.mtu,
            psn: self.psn,
            lid: port.lid,
            global: port.global.into(),
            gid: port.gid,
            queue_pairs,
            slots_address: address,
            slots_key: key,
            slots: count,
            slot_size: size,
            depth: self.depth,
        }
    }

    /// Connects them to the peer's. Those that the peer does not have are dropped.
    pub(super) fn up(mut self, peer: &Queues) -> Result<Up, VerbsError> {
        check_peer(peer)?;
        let port = self.port;
        port.check_route(peer.global)?;
        self.queues.truncate(peer.count as usize);
        for (queue, qpn) in self.queues.iter().zip(peer.queue_pairs) {
            let mtu = peer.mtu.min(port.mtu);
            queue.pair.connect(
                &port,
                &Target { qpn, psn: peer.psn, lid: peer.lid, gid: peer.gid, mtu },
                self.psn,
                self.loss,
            )?;
        }
        let buffers = self.queues[0].depth as u16;
        let Unconnected { queues, completions, inbox, outbox, headers, receives, .. } = self;
        Ok(Up {
            receives: queues.len() * receives as usize,
            queues,
            completions,
            inbox,
            outbox,
            headers,
            credits: Credits::new(receives, peer.receives),
            free: (0..buffers).collect(),
            turn: 1,
            message: MESSAGE.min(peer.message as usize),
            messages: (0, 0),
            before: Before::Everything,
            heard: false,
            stopped: false,
            refusal: None,
        })
    }
}

impl Up {
    fn works(&self) -> bool {
        !self.stopped && self.refusal.is_none()
    }

    /// A request was posted to this queue. If the device has refused it, the link is broken as if it had
    /// taken the request and given it back. The queue's receives come back, which rouses whoever polls.
    pub(super) fn posted(&mut self, queue: usize, posted: Result<(), VerbsError>) {
        if let Err(refusal) = posted {
            self.queues[queue].pair.stop();
            self.refusal.get_or_insert((queue, refusal));
        }
    }

    /// Whether messages may be posted now.
    pub(super) fn sends(&self) -> bool {
        self.works() && (self.heard || self.before != Before::Nothing)
    }

    /// Whether writes may be posted now.
    pub(super) fn writes(&self) -> bool {
        self.works() && (self.heard || self.before == Before::Everything)
    }

    /// Nothing is sent or received any more.
    pub(super) fn stop(&mut self) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.queues.iter().for_each(|queue| queue.pair.stop());
        }
    }
}

/// Maximum number of outstanding requests of each queue: of messages, and of writes.
pub(super) fn depths(count: u32, writes: u32) -> Vec<usize> {
    let messages = writes.clamp(LEAST_RECEIVES, 256) as usize;
    std::iter::once(messages).chain((1..count).map(|_| writes as usize)).collect()
}

fn check_peer(peer: &Queues) -> Result<(), VerbsError> {
    let wrong = |what: &str, value: u32| Err(VerbsError::Peer(format!("it offers {what} {value}")));
    match peer {
        Queues { count, .. } if !(2..=MAX_QUEUES as u32).contains(count) => wrong("queue pairs:", *count),
        Queues { receives, .. } if !(LEAST_RECEIVES..=1 << 15).contains(receives) => {
            wrong("receives:", *receives)
        }
        Queues { message, .. } if !(256..=1 << 20).contains(message) => wrong("messages of bytes:", *message),
        Queues { mtu, .. } if mtu_number(*mtu).is_none() => wrong("an MTU of", *mtu),
        Queues { depth, .. } if !(1..=DEEPEST).contains(depth) => wrong("requests under way:", *depth),
        _ => Ok(()),
    }
}

/// Has a queue pair receive into buffer `index` of the inbox, if it is that of messages.
pub(super) fn post_receive(
    pair: &QueuePair,
    inbox: &Slab,
    queue: usize,
    index: usize,
) -> Result<(), VerbsError> {
    let id = RECEIVE | (queue as u64) << 32 | index as u64;
    let segment =
        if queue == 0 { inbox.registration().slice((index * MESSAGE) as u64, MESSAGE as u32) } else { None };
    // SAFETY: a buffer of the inbox, which is registered for the device's writes until after the queue pair
    // is destroyed, and which is only read between this receive's completion and its being posted again.
    unsafe { pair.receive(id, segment.as_ref().map_or(&[], |s| std::slice::from_ref(&s.sge))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Device, software};

    #[test]
    fn queue_pairs_are_in_the_partition_that_is_set() {
        software::install();
        for (partition, index) in [(None, 0), (Some(0x8001), 1), (Some(0x0001), 1), (Some(0x7fff), 0)] {
            let settings = Settings { partition, ..Settings::default() };
            let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
            let made = Unconnected::new(&domain, &settings).unwrap();
            let used = made.queues.iter().map(|queue| software::partition(queue.pair.number()));
            assert!(used.into_iter().all(|used| used == Some(index)), "{partition:?}");
        }
        let other = Settings { partition: Some(0x8002), ..Settings::default() };
        let refusal = Device::open(&other).unwrap_err().to_string();
        assert!(refusal.contains("not in partition 0x8002, only in 0xffff, 0x8001"), "{refusal}");
    }

    #[test]
    fn offers_that_make_no_sense_are_refused() {
        let good = Queues {
            count: 3,
            receives: 128,
            message: MESSAGE as u32,
            mtu: 4096,
            psn: 0,
            lid: 0,
            global: 1,
            gid: [0; 16],
            queue_pairs: [0; MAX_QUEUES],
            slots_address: 0,
            slots_key: 0,
            slots: 0,
            slot_size: 0,
            depth: 128,
        };
        assert!(check_peer(&good).is_ok());
        for bad in [
            Queues { count: 1, ..good },
            Queues { count: 9, ..good },
            Queues { receives: 4, ..good },
            Queues { receives: 1 << 16, ..good },
            Queues { message: 24, ..good },
            Queues { message: u32::MAX, ..good },
            Queues { mtu: 1500, ..good },
            Queues { depth: 0, ..good },
            Queues { depth: u32::MAX, ..good },
        ] {
            assert!(matches!(check_peer(&bad), Err(VerbsError::Peer(_))), "{bad:?}");
        }
    }
}
