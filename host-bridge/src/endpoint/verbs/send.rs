//! Data on its way out: writes into the client's memory, out of the driver's own or out of lent buffers.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use protocol::link::chunk_len;

use super::client::{BUFFERS, CHUNK, SEND, SIGNALLED, Target, VerbsClient};
use crate::endpoint::end::Lost;
use crate::verbs::{Put, Registration, VerbsError};

/// A buffer that is registered with the RDMA device.
pub(in crate::endpoint) struct Registered {
    client: Arc<VerbsClient>,
    number: usize,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is its owner's alone until it is sent or dropped.
unsafe impl Send for Registered {}

impl Registered {
    /// # Safety
    /// `len` bytes at `at` are initialized, belong to buffer `number` of `client`, and are nobody else's
    /// until that buffer is given back.
    unsafe fn new(client: Arc<VerbsClient>, number: usize, at: NonNull<u8>, len: usize) -> Registered {
        Registered { client, number, at, len }
    }

    /// How many bytes it has.
    pub(in crate::endpoint) fn len(&self) -> usize {
        self.len
    }

    /// Its bytes.
    pub(in crate::endpoint) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the promise of `new`.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Writes the first `len` bytes to a place of the client's memory.
    pub(in crate::endpoint) fn send(self, seq: u64, at: Target, len: usize) -> Result<(), Lost> {
        let lent = std::mem::ManuallyDrop::new(self);
        // SAFETY: taken out once, of a value that is not dropped.
        let client = unsafe { std::ptr::read(&lent.client) };
        client.send_buffer(seq, at, lent.number, len)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.client.give_back(self.number);
    }
}

impl VerbsClient {
    /// Writes `bytes` to a place of the client's memory. Returns when they may be changed: at once when they
    /// had to be copied into registered memory, else when the device is done with them.
    pub(in crate::endpoint) fn send(&self, seq: u64, at: Target, bytes: &[u8]) -> Result<(), Lost> {
        if bytes.is_empty() {
            return Ok(());
        }
        let offset = self.adopted.get().and_then(|adopted| {
            let offset = (bytes.as_ptr() as u64).checked_sub(adopted.address())?;
            adopted.slice(offset, u32::try_from(bytes.len()).ok()?).map(|_| (adopted, offset))
        });
        if let Some((adopted, offset)) = offset {
            return self.send_adopted(seq, at, adopted, offset, bytes.len());
        }
        for (number, chunk) in bytes.chunks(CHUNK).enumerate() {
            let mut lent = self.this.upgrade().ok_or_else(|| self.over())?.lend(chunk.len())?;
            lent.bytes().copy_from_slice(chunk);
            self.copied.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            lent.send(seq, at.behind((number * CHUNK) as u64), chunk.len())?;
        }
        Ok(())
    }

    /// Posts writes out of adopted memory, spread over the queues, all that there is room for under one lock,
    /// and waits until they have left. Those for bytes for which a lent buffer is on its way wait for that.
    fn send_adopted(
        &self,
        seq: u64,
        to: Target,
        adopted: &Registration,
        offset: u64,
        len: usize,
    ) -> Result<(), Lost> {
        let place = self.wait_for(|engine| engine.free_sends.pop()).ok_or_else(|| self.over())?;
        let (mut at, mut failed) = (0, None);
        let done = self.wait_for(|engine| {
            let queues = engine.link.data_queues() as u64;
            let chunk = chunk_len(len as u64, queues, CHUNK as u64) as usize;
            while at < len && failed.is_none() {
                let queue = engine.link.next_queue()?;
                let bytes = chunk.min(len - at);
                if engine.lent_buffers.may_overtake(queue, to.behind(at as u64), bytes as u64) {
                    return None;
                }
                let posted = adopted.slice(offset + at as u64, bytes as u32).map(|source| {
                    let to = to.behind(at as u64);
                    let (address, key) = engine.address(to);
                    engine.link.put(&Put {
                        queue,
                        source,
                        header: None,
                        address,
                        key,
                        place: (to.region, to.offset),
                        immediate: seq as u32,
                        token: SEND | place as u64,
                        signal: bytes > SIGNALLED || at + bytes == len,
                    })
                });
                match posted {
                    Some(Ok(())) => engine.sends[place] += 1,
                    Some(Err(e)) => failed = Some(e),
                    None => failed = Some(VerbsError::Peer("data outside adopted memory".into())),
                }
                at += bytes;
            }
            (engine.sends[place] == 0 || failed.is_some()).then(|| engine.free_sends.push(place))
        });
        if let Some(e) = failed {
            // Nothing of the session is used any more, the place above included.
            self.failed(e);
        }
        self.sent.fetch_add(len as u64, Ordering::Relaxed);
        done.filter(|()| self.end.get().is_none()).ok_or_else(|| self.over())
    }

    /// Lends a buffer of `len` bytes, or of as many as it has. Waits for one.
    pub(in crate::endpoint) fn lend(self: &Arc<Self>, len: usize) -> Result<Registered, Lost> {
        let number = self.wait_for(|engine| engine.lent_buffers.take()).ok_or_else(|| self.over())?;
        let len = len.min(CHUNK);
        let at = self.buffers.pointer(number * CHUNK, len).ok_or_else(|| self.over())?;
        // SAFETY: a buffer of the slab, zeroed when it was made, taken off the list of the free ones.
        Ok(unsafe { Registered::new(Arc::clone(self), number, at, len) })
    }

    /// A buffer that was lent is not needed.
    fn give_back(&self, number: usize) {
        let mut engine = self.lock();
        engine.lent_buffers.give_back(number);
        if engine.waiters > 0 {
            self.room.notify_all();
        }
    }

    /// Writes a lent buffer's first `len` bytes to a place of the client's memory. The buffer is free again
    /// when they have left. Waits for what is on its way to some of the same bytes, unless it goes over the
    /// same queue: the client must end with these.
    fn send_buffer(&self, seq: u64, at: Target, number: usize, len: usize) -> Result<(), Lost> {
        let source = self.buffers.registration().slice((number * CHUNK) as u64, len as u32);
        let source = source.ok_or_else(|| Lost::new("data outside a buffer"))?;
        let posted = self.wait_for(|engine| {
            let queue = engine.link.next_queue()?;
            if engine.lent_buffers.may_overtake(queue, at, len as u64) {
                return None;
            }
            engine.lent_buffers.goes(number, queue, at, len as u64);
            let (address, key) = engine.address(at);
            Some(engine.link.put(&Put {
                queue,
                source,
                header: None,
                address,
                key,
                place: (at.region, at.offset),
                immediate: seq as u32,
                token: number as u64,
                // Buffers whose writes are not signalled come back with a later one: only as long as enough
                // are left.
                signal: len > SIGNALLED || engine.lent_buffers.free() < BUFFERS / 2,
            }))
        });
        match posted {
            Some(Ok(())) => {
                self.sent.fetch_add(len as u64, Ordering::Relaxed);
                Ok(())
            }
            Some(Err(e)) => {
                self.failed(e);
                Err(self.over())
            }
            None => Err(self.over()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use protocol::data::{HostRange, Place};
    use protocol::link::{Queues, RegionKey, frame};
    use zerocopy::IntoBytes;

    use super::*;
    use crate::endpoint::contract::{Client, Sink};
    use crate::endpoint::dispatcher_poll::Polling;
    use crate::endpoint::verbs::VerbsCommands;
    use crate::stream::Stream;
    use crate::verbs::{Device, Domain, Settings, Unconnected, software};

    /// Queue pairs that no device of this process has, so that a test says when a write has arrived.
    const FAR: u32 = 0x00a5_0000;

    #[test]
    fn later_data_for_the_same_bytes_waits_for_what_is_on_its_way_over_another_queue() {
        software::install();
        let settings = Settings::default();
        let domain = Domain::new(Device::open(&settings).unwrap()).unwrap();
        let mut queues: Queues = Unconnected::new(&domain, &settings).unwrap().offer(None);
        (FAR..).zip(&mut queues.queue_pairs).for_each(|(far, number)| *number = far);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let bridge = Stream::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        bridge.send_frame(frame::QUEUES, &[queues.as_bytes()]).unwrap();
        let control = listener.accept().unwrap().0.into();
        let started = VerbsCommands::start(control, 1, &settings, Polling::default(), Duration::ZERO);
        let (_commands, client) = started.map_err(|lost| lost.reason).unwrap();
        assert!(client.lock().link.data_queues() > 1);
        client.lock().keys.learn(RegionKey { address: 4096, size: 1 << 20, region: 1, key: 1 }).unwrap();
        let pair = |queue: u32| {
            let reaches = |pair: &u32| software::peer(*pair) == Some(FAR + queue);
            software::pairs().into_iter().find(reaches).unwrap()
        };
        let under_way = || (1..queues.count).map(|queue| software::sends(pair(queue))).sum::<usize>();
        let write = |seq, offset, bytes: &[u8]| {
            let range = HostRange { place: Place::Region(1), offset, len: bytes.len() as u64 };
            let Ok(Sink::Outgoing(outgoing)) = client.sink(seq, 0, range) else { panic!("no data") };
            outgoing.write(bytes).unwrap();
        };
        let long = vec![1; 2 * SIGNALLED];
        write(1, 0, &long);
        assert_eq!(under_way(), 1);
        // Other bytes, on the next queue.
        write(2, long.len() as u64, &[2; 8]);
        assert_eq!(under_way(), 2);
        let first = (1..queues.count)
            .map(pair)
            .find(|pair| software::sent(*pair, 0).is_some_and(|sent| sent.bytes.len() == long.len()));
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(3, long.len() as u64 - 8, &[3; 8]));
            while client.lock().waiters == 0 {
                assert!(!writing.is_finished(), "it may overtake the first");
                std::thread::yield_now();
            }
            assert_eq!(under_way(), 2);
            assert!(software::complete(first.unwrap(), 0));
            writing.join().unwrap();
        });
        assert_eq!(under_way(), 2);
        // Nor does adopted memory overtake it, for which the call waits, too.
        let adopted: &'static [u8] = vec![4; 8].leak();
        // SAFETY: it is never freed, and nobody writes it.
        unsafe { client.adopt(NonNull::from(adopted).cast(), adopted.len()) }.unwrap();
        write(4, 0, &long);
        assert_eq!(under_way(), 3);
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(5, long.len() as u64 - 8, adopted));
            while client.lock().waiters == 0 {
                std::thread::yield_now();
            }
            assert_eq!(under_way(), 3);
            while !writing.is_finished() {
                (1..queues.count).map(pair).for_each(|pair| while software::complete(pair, 0) {});
            }
        });
        client.close();
    }
}
