//! Links that are lost and replaced: the control connection and the queue pairs together, whichever of them
//! broke.
//!
//! ```text
//!   queue pairs break, or the control connection does ─▶ given_up: both are ─▶ parked, the bridge sees its control connection close
//!   a control connection comes with the session's secret ─▶ relink: the old queue pairs are destroyed, what has come through them counts,
//!                                                           both sides say how much that is, new queue pairs go on behind it
//! ```
//!
//! It may be another process of the bridge that comes. It says which addresses and keys the client's memory
//! has now, and is told of writes that its predecessor had and of which it does not know.
//!
//! While there is no link, threads that have something to send wait for room, as they do for a bridge that
//! takes nothing.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, shutdown};
use protocol::link::{Queues, REGION_KEYS, RegionKey, Written, frame};
use zerocopy::IntoBytes;

use super::client::{Engine, SLOT_SIZE, VerbsClient, lock, place};
use super::keys::Keys;
use super::pump::End;
use crate::endpoint::contract::{Client, Survivor};
use crate::endpoint::link::resumed;
use crate::framing::{FrameReader, resumed_body, split_struct, watch_peer};
use crate::stream::Stream;
use crate::verbs::{Before, Link, Put, Unconnected, VerbsError};

/// How long what the bridge says on the connection, and the first message through the new queue pairs, may
/// take to come.
const WITHIN: Duration = Duration::from_secs(10);

/// Entries of a frame about writes.
const MANY: usize = 512;

/// Why an attempt failed.
enum Failed {
    /// The session goes on without it.
    Attempt(String),
    /// The session has to end.
    Session(End),
}

impl<T: Into<End>> From<T> for Failed {
    fn from(end: T) -> Failed {
        Failed::Session(end.into())
    }
}

fn attempt(e: impl std::fmt::Display) -> Failed {
    Failed::Attempt(e.to_string())
}

/// The client's memory has other keys and addresses. Writes that will be sent again are meant for it, too.
/// They know their memory by its number: addresses of two processes of the bridge may be the same.
fn replace_keys(link: &mut Link, known: &mut Keys, keys: &[RegionKey]) -> Result<(), End> {
    let mut told = BTreeMap::new();
    for key in keys {
        let old = known.learn(*key).map_err(End::Lost)?;
        if old.is_some_and(|old| old.size != key.size) {
            return Err(End::Lost(
                "the bridge gave a key that cannot be: its memory has another size".into(),
            ));
        }
        told.insert(key.region, key);
    }
    link.each_again(|put| {
        let (region, offset) = put.place;
        if let Some(key) = told.get(&region) {
            (put.address, put.key) = place(key, offset);
        }
    });
    Ok(())
}

impl VerbsClient {
    /// The link of a session has failed this thread: the error is the end of the session, if it does not
    /// survive that.
    pub(super) fn given_up(&self, mut engine: MutexGuard<'_, Engine>, end: End) -> Result<(), End> {
        let End::Gone(what) = end else { return Err(end) };
        if !self.links.survives() {
            return Err(End::Gone(what));
        }
        engine.link.stop();
        // A bridge sends nothing before it can come back.
        if engine.came > 0 {
            self.links.introduce();
        }
        let attempt = engine.attempt;
        // The bridge is to notice, and may still say farewell.
        if let Some(control) = lock(&self.control).as_ref() {
            let _ = shutdown(control.as_fd().as_raw_fd(), Shutdown::Write);
        }
        drop(engine);
        let watch = self.links.lose(attempt);
        self.park(watch, what);
        // The pump watches what there is.
        let _ = self.changed.write(1);
        Ok(())
    }

    /// The link is down. `watch`: the grace period is not counted yet.
    fn park(&self, watch: bool, why: String) {
        let (true, Some(client)) = (watch, self.this.upgrade()) else { return };
        let watching = std::thread::Builder::new().name("rgpu-parked".into()).spawn(move || {
            client.links.count_down(&why, || client.announce_link(), |reason| client.lose(reason))
        });
        if let Err(e) = watching {
            self.lose(&format!("its connections were lost and nobody can wait for others: {e}"));
        }
    }

    /// Says whether there is a link now.
    fn announce_link(&self) {
        if let Some(told) = self.link_changes.get() {
            // In turn, so that the last one says what is true.
            let _turn = lock(&self.announcing);
            told(!self.links.is_down());
        }
    }

    /// False: a later attempt has taken its place, or nothing came through the new queue pairs.
    fn relink(&self, number: u32, control: &Arc<Stream>) -> Result<bool, Failed> {
        let Some(watch) = self.links.begin(number, control) else { return Ok(false) };
        self.park(watch, "the bridge brings new connections".into());
        let Some(taken) = self.leave(number)? else { return Ok(false) };
        // Nobody writes our memory any more through what was there before, and these numbers stand.
        let mut body = Vec::new();
        let kind = control.recv_frame(&mut body).map_err(attempt)?;
        let theirs = resumed(kind, &body, taken.len()).map_err(attempt)?;
        let mut keys = Vec::new();
        let peer = loop {
            match control.recv_frame(&mut body).map_err(attempt)? {
                Some(frame::QUEUES) => break split_struct::<Queues>(&body).map_err(attempt)?.0,
                Some(frame::REGION_KEY) if keys.len() < REGION_KEYS => {
                    keys.push(split_struct::<RegionKey>(&body).map_err(attempt)?.0);
                }
                kind => {
                    return Err(attempt(format_args!("frame of kind {kind:?} where QUEUES was expected")));
                }
            }
        };
        let domain = Arc::clone(self.lock().link.domain());
        let fresh = Unconnected::answering(&domain, &self.settings, &peer).map_err(attempt)?;
        let offer = fresh.offer(Some((&self.slots, SLOT_SIZE)));
        let unknown = {
            let mut engine = self.lock();
            if engine.attempt != number {
                return Ok(false);
            }
            let Engine { link, sends, lent_buffers, keys: known, .. } = &mut *engine;
            let (stream, writes) = theirs.split_first().ok_or_else(|| attempt("it resumes nothing"))?;
            let settled = link.send_buffer().resume(*stream);
            settled.map_err(|e| End::Lost(format!("the bridge resumes what cannot be: {e}")))?;
            let unknown = link.settle::<End>(writes, &mut |event| {
                VerbsClient::written(&event, sends, lent_buffers);
                Ok(())
            })?;
            replace_keys(link, known, &keys)?;
            // The bridge is connected when it has this side's offer.
            link.go_on(fresh, &peer, Before::Nothing).map_err(|e| match e {
                e @ VerbsError::Peer(_) => e.into(),
                // The way to the bridge may be down.
                e => attempt(e),
            })?;
            *lock(&self.control) = Some(Arc::clone(control));
            unknown
        };
        control.send_frame(frame::RESUMED, &[&resumed_body(&taken)]).map_err(attempt)?;
        for some in unknown.chunks(MANY) {
            let entry = |put: &Put| Written {
                queue: put.queue as u32,
                immediate: put.immediate,
                len: put.source.len(),
                reserved: 0,
            };
            let entries: Vec<Written> = some.iter().map(entry).collect();
            control.send_frame(frame::WRITTEN, &[entries.as_bytes()]).map_err(attempt)?;
        }
        control.send_frame(frame::QUEUES, &[offer.as_bytes()]).map_err(attempt)?;
        control.set_nonblocking(true).map_err(attempt)?;
        watch_peer(control);
        let _ = self.changed.write(1);
        let Some(engine) = self.hears(number) else { return Ok(false) };
        // Under the lock, so that queue pairs that break count as those of a link that is up.
        let up = self.links.finish(number, || Ok::<(), ()>(())).is_some();
        drop(engine);
        if up {
            self.announce_link();
        }
        Ok(up)
    }

    /// Leaves the link that there was, for attempt `number`. Gives what has come through all of them: bytes
    /// of frames, and writes of each queue; `None`: there was a later attempt.
    fn leave(&self, number: u32) -> Result<Option<Vec<u64>>, End> {
        let mut engine = self.lock();
        if number <= engine.attempt {
            return Ok(None);
        }
        engine.attempt = number;
        engine.control_reader = FrameReader::new();
        *lock(&self.control) = None;
        let Engine { link, reader, came, sends, lent_buffers, emptied, .. } = &mut *engine;
        link.take_down::<End>(&mut |event| self.act(event, (reader, came), sends, lent_buffers, emptied))?;
        self.frames(&mut engine)?;
        // What has come of the next frame comes again.
        engine.came = engine.processed();
        (engine.told_came, engine.reader) = (engine.came, FrameReader::new());
        if engine.waiters > 0 {
            self.room.notify_all();
        }
        let writes = engine.link.taken();
        Ok(Some(std::iter::once(engine.came).chain(writes).collect()))
    }

    /// Waits until something has come through the queue pairs of attempt `number`. `None`: nothing has.
    fn hears(&self, number: u32) -> Option<MutexGuard<'_, Engine>> {
        let deadline = Instant::now() + WITHIN;
        let mut engine = self.lock();
        while self.end.get().is_none() && engine.attempt == number && Instant::now() < deadline {
            if engine.link.is_heard() {
                return Some(engine);
            }
            engine = self.wait_for_room(engine);
        }
        None
    }
}

impl Survivor for VerbsClient {
    fn when_link_changes(&self, told: Box<dyn Fn(bool) + Send + Sync>) {
        // A second one would be the same.
        let _ = self.link_changes.set(told);
    }

    fn resume(&self, number: u32, control: Stream) -> io::Result<()> {
        let Some(client) = self.this.upgrade() else { return Ok(()) };
        if !self.links.survives() {
            return Ok(());
        }
        self.links.introduce();
        control.set_nonblocking(false)?;
        control.set_nodelay()?;
        control.set_read_timeout(Some(WITHIN))?;
        control.set_write_timeout(WITHIN)?;
        let control = Arc::new(control);
        std::thread::Builder::new().name("rgpu-resume".into()).spawn(move || {
            let resumed = client.relink(number, &control);
            if !matches!(resumed, Ok(true)) {
                // The bridge must notice, and the daemon has the connection too.
                control.shut_down();
            }
            match resumed {
                Ok(true) => tracing::info!(attempt = number, "link restored; the session goes on"),
                Ok(false) => tracing::debug!(attempt = number, "the session was not resumed"),
                Err(Failed::Attempt(why)) => {
                    tracing::info!(attempt = number, "the session was not resumed: {why}");
                }
                Err(Failed::Session(end)) => client.ended(end),
            }
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Access, Device, Domain, EarlierWrites, Settings, Slab, software};

    #[test]
    fn a_write_that_is_sent_again_goes_to_its_own_memory_wherever_another_one_once_was() {
        software::install();
        let settings = Settings::default();
        let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
        let buffer = Slab::new(&domain, 4096, Access::Read).unwrap();
        // Memory 2 lies where an earlier process of the bridge had memory 1.
        let key = |region, address, key| RegionKey { address, size: 4096, region, key };
        let before = [key(1, 0x10_0400, 1), key(2, 0x10_0000, 2)];
        let mut known = Keys::default();
        before.iter().for_each(|key| assert_eq!(known.learn(*key), Ok(None)));
        let (address, old) = place(&before[1], 0x800);
        let put = Put {
            queue: 1,
            source: buffer.registration().slice(0, 64).unwrap(),
            header: None,
            address,
            key: old,
            place: (2, 0x800),
            immediate: 7,
            token: 0,
            signal: true,
        };
        let earlier = EarlierWrites { under_way: vec![put], ..EarlierWrites::default() };
        let mut link = Link::restored(&domain, &settings, vec![earlier]);
        let unknown = link.settle::<VerbsError>(&[0], &mut |_| Ok(())).unwrap();
        assert!(unknown.is_empty());
        let now = [key(1, 0x50_0000, 3), key(2, 0x90_0000, 4)];
        assert!(replace_keys(&mut link, &mut known, &now).is_ok());
        let mut again = Vec::new();
        link.each_again(|put| again.push((put.address, put.key)));
        assert_eq!(again, [(0x90_0800, 4)]);
    }
}
