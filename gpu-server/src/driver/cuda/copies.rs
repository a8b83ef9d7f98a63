//! Copies and fills.
//!
//! A device copies client memory that it can access in place, and data that RDMA brings
//! ([`super::arrivals`]), without the CPU. Other data from the network, and memory that no device can access,
//! goes through [`super::staging`].

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::channel;

use host_bridge::endpoint::{Incoming, Landing, Mapped, Placed, Region, Sink};
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::copy::MemcpyDtoHInlineReply;
use protocol::wire::Bytes;

use super::Cuda;
use super::api::{CUstream, WAIT_AT_LEAST};
use super::registration;
use super::row_copies::{blank, copy_rows, slices_at_once};
use super::staging::{ANSWER, ChunkPlace, Transfer};
use super::streams::{CudaStream, Place};
use crate::driver::call::{Call, Input, Result};
use crate::driver::gpu::{BoxCopy, Carrier, Fill, GpuCopies, LineCopy, Preparer, Progress};
use crate::driver::rows::Rows;
use crate::driver::store::Way;
use crate::driver::streams::Streams;

/// Before the call returns, the driver has read pageable memory of up to this many bytes.
const TAKEN_AT_ONCE: usize = 64 << 10;

/// Where a staged transfer's bytes come from.
enum Feed {
    /// Client memory that no device can access.
    Mapped(Mapped),
    /// The network.
    Incoming(Incoming),
}

/// Where a device writes an answer: page-locked memory that is never freed.
#[derive(Clone, Copy)]
struct Answered(NonNull<u8>);

// SAFETY: plain memory, which one command uses at a time.
unsafe impl Send for Answered {}

/// Chunk size in bytes for a slot of `slot` bytes: whole rows if possible; smaller for a short transfer, so
/// that its first chunk can leave earlier.
fn chunk_of(rows: &Rows, packed: u64, slot: usize) -> usize {
    let most = match packed {
        0..=0x10_0000 => slot.min(256 << 10),
        0x10_0001..=0x100_0000 => slot.min(512 << 10),
        _ => slot,
    } as u64;
    let whole = most / rows.width.max(1) * rows.width;
    if whole == 0 || rows.height * rows.depth == 1 { most as usize } else { whole as usize }
}

impl Cuda {
    /// Whether work in `context`, which is current, can access a region of client memory in place.
    fn in_place(&self, context: ContextId, region: &Arc<Region>) -> Result<bool> {
        let home = self.home.and_then(|home| self.contexts.get(&home));
        let home = home.map_or_else(|| self.context(context), Ok)?;
        // SAFETY: a context in the table is live.
        unsafe { registration::in_place(self.api, home.handle, &home.health, region) }
    }

    /// Holds what enqueued copies use until they are done. Then publishes whether they failed.
    fn hold(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        used: impl Send + 'static,
    ) -> Result {
        let progress = Arc::clone(&place.progress);
        self.fence(streams, place, cx.seq, move |status| {
            progress.complain(status);
            drop(used);
        })
    }

    /// Copies between rows and client memory that the device accesses [in place](Self::in_place).
    fn copy_in_place(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        way: Way,
        rows: &Rows,
        mapped: Mapped,
    ) -> Result {
        let mut offset = 0;
        let copied = mapped.runs().iter().try_for_each(|(at, len)| {
            // SAFETY: the rows were checked; the run is registered and held until it is copied.
            let copied = unsafe { copy_rows(self.api, place.stream, way, rows, offset, *at, *len) };
            offset += *len as u64;
            self.note(place.context, copied)
        });
        // Until the stream has passed what was enqueued, even if that is not all.
        let held = self.hold(cx, streams, place, mapped);
        copied.and(held)
    }

    /// Enqueues copies from the slots where the data arrives.
    fn upload_placed(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        to: &Rows,
        placed: Placed,
    ) -> Result {
        let arrived = self.arrived.clone().ok_or(Status::DEVICE_UNAVAILABLE)?;
        let enqueued = placed.chunks().try_for_each(|chunk| {
            let (host, gpu) = arrived.words(chunk.slot).ok_or(Status::UNKNOWN)?;
            // SAFETY: registered words, a registered slot whose bytes stay until the stream has written its
            // word, and checked rows.
            let enqueued = unsafe {
                self.api
                    .stream_wait(place.stream, host, chunk.round, WAIT_AT_LEAST)
                    .and_then(|()| {
                        let (at, len) = (chunk.at, chunk.len);
                        copy_rows(self.api, place.stream, Way::In, to, chunk.offset, at, len)
                    })
                    .and_then(|()| self.api.stream_write(place.stream, gpu, chunk.round, 0))
            };
            self.note(place.context, enqueued)
        });
        // This also frees the room of what the driver has refused, and of what a failed context has not read.
        let held = self.hold(cx, streams, place, placed);
        enqueued.and(held)
    }

    fn upload_at_once(&self, place: &Place, to: &Rows, bytes: &[u8]) -> Result {
        let mut offset = 0;
        for piece in bytes.chunks(TAKEN_AT_ONCE) {
            let host = NonNull::from(piece).cast::<u8>();
            // SAFETY: the rows were checked; the driver has read pageable memory of this size when the call
            // returns.
            let copied = unsafe { copy_rows(self.api, place.stream, Way::In, to, offset, host, piece.len()) };
            self.note(place.context, copied)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    fn upload_staged(
        &mut self,
        cx: &Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        to: &Rows,
        feed: Feed,
    ) -> Result {
        let packed = to.width * to.height * to.depth;
        let chunk_in = |slot| chunk_of(to, packed, slot);
        let transfer = self.staging.begin(place.flows.inbound, packed, chunk_in, &place.health)?;
        let grants = match feed {
            Feed::Mapped(mapped) => {
                // Earlier work on this stream may write the program's page-locked memory: over `local`, a
                // program relies on the stream's order.
                if !mapped.region().is_arena() {
                    let (come, when) = channel();
                    transfer.feed(mapped, Some(when))?;
                    let begin = move |status: Status| {
                        // If the thread has ended, nothing waits for this.
                        let _ = come.send(status);
                    };
                    self.fence(streams, place, cx.seq, begin)?;
                    Cuda::stream_is_dirty(streams, place.id)?;
                } else {
                    transfer.feed(mapped, None)?;
                }
                None
            }
            Feed::Incoming(incoming) => {
                let landing: Arc<dyn Landing> = Arc::<Transfer>::clone(&transfer);
                let late = incoming.is_late();
                let window = if late { transfer.window() } else { transfer.room_now() };
                let grants = incoming.land(landing, window);
                if late {
                    // The bytes may be read once earlier work on the stream is done.
                    let (granted, held) = (grants.clone(), Arc::clone(&transfer));
                    let come = move |status: Status| {
                        if status.is_success() { granted.upto(window) } else { held.abandon(&granted) }
                    };
                    self.fence(streams, place, cx.seq, come)?;
                    Cuda::stream_is_dirty(streams, place.id)?;
                }
                Some((grants, window))
            }
        };
        let enqueued = self.enqueue_chunks(place, Way::In, to, transfer.inbound());
        if enqueued.is_err() {
            transfer.abandon_arrivals(&self.completer);
        }
        if let Some((grants, window)) = grants {
            match enqueued {
                Ok(()) => transfer.grant_as_taken(&self.completer, grants, window),
                Err(_) => grants.all(),
            }
        }
        // Until the stream has passed what was enqueued, even if that is not all.
        let held = self.hold(cx, streams, place, transfer);
        enqueued.and(held)
    }

    /// Enqueues, for each chunk, the wait for its slot, the copy, and the write of the word that marks the
    /// copy as done.
    fn enqueue_chunks(
        &self,
        place: &Place,
        way: Way,
        rows: &Rows,
        chunks: impl Iterator<Item = ChunkPlace>,
    ) -> Result {
        let (api, stream) = (self.api, place.stream);
        for ChunkPlace { offset, len, at, host, gpu } in chunks {
            // SAFETY: registered words and slots that the transfer holds until its fence; the session has
            // checked the rows.
            let enqueued = unsafe {
                api.stream_wait(stream, host.0, host.1, WAIT_AT_LEAST)
                    .and_then(|()| copy_rows(api, stream, way, rows, offset, at, len))
                    .and_then(|()| api.stream_write(stream, gpu.0, gpu.1, 0))
            };
            self.note(place.context, enqueued)?;
        }
        Ok(())
    }
}

impl GpuCopies for Cuda {
    fn upload(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        to: &Rows,
        _device: u32,
        data: Input<'_>,
    ) -> Result {
        match data {
            Input::Inline(bytes) => self.upload_at_once(place, to, bytes),
            Input::Mapped(mapped) => {
                if self.in_place(place.context, mapped.region())? {
                    return self.copy_in_place(cx, streams, place, Way::In, to, mapped);
                }
                if mapped.len() <= TAKEN_AT_ONCE && mapped.region().is_arena() {
                    let mut bytes = vec![0; mapped.len()];
                    mapped.read(0, &mut bytes);
                    drop(mapped);
                    return self.upload_at_once(place, to, &bytes);
                }
                self.upload_staged(cx, streams, place, to, Feed::Mapped(mapped))
            }
            Input::Incoming(incoming) => self.upload_staged(cx, streams, place, to, Feed::Incoming(incoming)),
            Input::Placed(placed) => self.upload_placed(cx, streams, place, to, placed),
        }
    }

    fn download(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        from: &Rows,
        _device: u32,
        sink: Sink,
    ) -> Result {
        let packed = from.width * from.height * from.depth;
        let sink = match sink {
            Sink::Mapped(mapped) if self.in_place(place.context, mapped.region())? => {
                return self.copy_in_place(cx, streams, place, Way::Out, from, mapped);
            }
            sink => sink,
        };
        let chunk_in = |slot| chunk_of(from, packed, slot);
        let transfer = self.staging.begin(place.flows.outbound, packed, chunk_in, &place.health)?;
        self.staging.send(Arc::clone(&transfer), sink);
        let enqueued = self.enqueue_chunks(place, Way::Out, from, transfer.outbound()).and_then(|()| {
            // What follows on the stream may tell the client that it was done, so the data is queued first.
            transfer.all_sent().try_for_each(|(word, value)| {
                // SAFETY: registered words that the transfer holds until its fence.
                let waits = unsafe { self.api.stream_wait(place.stream, word, value, WAIT_AT_LEAST) };
                self.note(place.context, waits)
            })
        });
        if enqueued.is_err() {
            transfer.abandon_departure();
        }
        // Until the stream has passed what was enqueued, even if that is not all.
        let held = self.hold(cx, streams, place, transfer);
        enqueued.and(held)
    }

    fn progress(&mut self, place: &Place) -> Progress {
        let progress = Arc::clone(&place.progress);
        Box::new(move |seq, status| progress.publish(seq, status))
    }

    fn preparer(&mut self, place: &Place) -> Result<Preparer> {
        Ok(self.make_preparer(place))
    }

    fn carrier(&mut self, place: &Place, _device: u32, way: Way) -> Result<Arc<dyn Carrier>> {
        self.make_carrier(place, way)
    }

    fn download_inline(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        place: &Place,
        from: u64,
        len: usize,
        _device: u32,
    ) -> Result {
        // Other transfers of the flow may still occupy a slot; only the answers' own buffers are known to be
        // free.
        let staged = match self.staging.answer(cx.slot) {
            Some(_) => None,
            None => Some(self.staging.begin(place.flows.outbound, len as u64, |_| ANSWER, &place.health)?),
        };
        let at = match &staged {
            None => Ok(self.staging.answer(cx.slot)),
            Some(transfer) => transfer
                .outbound()
                .next()
                .map(|chunk| {
                    // SAFETY: registered words that the transfer holds until its fence.
                    let waits = unsafe {
                        self.api.stream_wait(place.stream, chunk.host.0, chunk.host.1, WAIT_AT_LEAST)
                    };
                    self.note(place.context, waits).map(|()| chunk.at)
                })
                .transpose(),
        };
        let copied = at.and_then(|at| {
            let at = Answered(at.ok_or(Status::UNKNOWN)?);
            // SAFETY: the range was checked; the buffer belongs to the command until the fence below.
            let copied = unsafe { self.api.copy_dtoh(at.0.as_ptr().cast(), from, len, place.stream) };
            self.note(place.context, copied).map(|()| at)
        });
        let at = match copied {
            Ok(at) => at,
            Err(status) => {
                // What an earlier transfer left in the slot is sent when the stream has passed it.
                let held = self.hold(cx, streams, place, staged);
                return held.and(Err(status));
            }
        };
        let (pending, progress) = (cx.later(), Arc::clone(&place.progress));
        self.fence(streams, place, cx.seq, move |status| {
            progress.complain(status);
            let at = at;
            pending.answer(status.ok().map(|()| {
                let mut bytes = vec![0; len];
                // SAFETY: the stream has written the buffer's first `len` bytes, and it still belongs to the
                // command.
                unsafe { std::ptr::copy_nonoverlapping(at.0.as_ptr(), bytes.as_mut_ptr(), len) };
                MemcpyDtoHInlineReply { bytes: Bytes(bytes) }
            }));
            drop(staged);
        })
    }

    fn copy_line(&mut self, _cx: &Call, place: &Place, copy: &LineCopy) -> Result {
        self.copy_at(place.context, place.stream, copy)
    }

    fn copy_box(&mut self, _cx: &Call, place: &Place, copy: &BoxCopy) -> Result {
        self.copy_3d_at(place.context, place.stream, copy)
    }

    fn fill(&mut self, _cx: &Call, place: &Place, fill: &Fill) -> Result {
        self.fill_at(place.context, place.stream, fill)
    }
}

/// Copies that need only a stream of the current context: a client's stream, or one that captures.
impl Cuda {
    pub(super) fn copy_at(&self, context: ContextId, stream: CUstream, op: &LineCopy) -> Result {
        // SAFETY: ranges of this session; they may lie on two devices.
        let copied = unsafe { self.api.copy_any(op.dst, op.src, op.len as usize, stream) };
        self.note(context, copied)
    }

    pub(super) fn copy_3d_at(
        &self,
        context: ContextId,
        stream: CUstream,
        BoxCopy { source, target, .. }: &BoxCopy,
    ) -> Result {
        // Unlike in a three-dimensional copy, the slice pitch need not be a multiple of the row pitch.
        let (slices, from, to) = slices_at_once(source, target);
        for z in (0..source.depth).step_by(slices) {
            let mut copy = blank();
            (copy.srcDevice, copy.srcPitch, copy.srcHeight) =
                (source.at + z * source.slice, source.pitch.max(source.width) as usize, from);
            (copy.dstDevice, copy.dstPitch, copy.dstHeight) =
                (target.at + z * target.slice, target.pitch.max(target.width) as usize, to);
            (copy.WidthInBytes, copy.Height, copy.Depth) =
                (source.width as usize, source.height as usize, slices);
            // SAFETY: ranges of this session.
            let copied = unsafe { self.api.copy_3d(&copy, stream) };
            self.note(context, copied)?;
        }
        Ok(())
    }

    pub(super) fn fill_at(&self, context: ContextId, stream: CUstream, op: &Fill) -> Result {
        let (api, dst, value) = (self.api, op.address, op.value);
        let (pitch, width, height) = (op.pitch as usize, op.width as usize, op.height as usize);
        // SAFETY: a range of this session, aligned to its elements.
        let set = unsafe {
            match (op.element, height) {
                (1, 1) => api.set_8(dst, value as u8, width, stream),
                (2, 1) => api.set_16(dst, value as u16, width, stream),
                (4, 1) => api.set_32(dst, value, width, stream),
                (1, _) => api.set_2d_8(dst, pitch, value as u8, width, height, stream),
                (2, _) => api.set_2d_16(dst, pitch, value as u16, width, height, stream),
                _ => api.set_2d_32(dst, pitch, value, width, height, stream),
            }
        };
        self.note(context, set)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::{Duration, Instant};

    use protocol::handle::StreamId;
    use protocol::ops::array::ArrayShape;
    use protocol::ops::copy::Pitched;

    use super::super::api::Api;
    use super::super::array::CudaArray;
    use super::*;
    use crate::doubles::Listener;
    use crate::driver::gpu::{CopyEnd, GpuArrays, GpuStreams};
    use crate::driver::streams::Stream;

    /// A session's default stream, and a place in it.
    fn default_stream(cuda: &mut Cuda) -> (Call, Streams<CudaStream>, Place) {
        let (context, id) = (ContextId(0), StreamId(0));
        let mut streams = Streams::default();
        let native = cuda.default_stream(context, 0).unwrap();
        streams.insert(id.0, Stream { context, green: None, is_blocking: true, native });
        let mut call = Call::new(Arc::new(Listener::new(|_| {})));
        let place = cuda.enter_stream(&mut call, &mut streams, id).unwrap();
        (call, streams, place)
    }

    /// Two slices, of which the driver refuses to copy the second, and the memory to copy them from.
    fn two_slices() -> (Rows, Arc<Region>, Mapped) {
        let rows = Rows { at: Api::REFUSED - 4095, pitch: 64, slice: 4095, width: 32, height: 2, depth: 2 };
        let region = Region::own(NonZeroUsize::new(4096).unwrap()).unwrap();
        let mapped = Mapped::of(&region, 128).unwrap();
        (rows, region, mapped)
    }

    /// Checks that something holds the region until its work is over: here, because the context has failed.
    fn is_held_until_the_stream_has_passed(region: &Arc<Region>, place: &Place) {
        assert!(Arc::strong_count(region) > 1, "the stream may still use it");
        place.health.fail(Status::ILLEGAL_ADDRESS);
        is_given_back(|| Arc::strong_count(region) == 1);
    }

    fn is_given_back(yet: impl Fn() -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        while !yet() {
            assert!(Instant::now() < limit, "it is never given back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn regular_boxes_are_copied_by_one_call() {
        let mut cuda = Cuda::fake(Api::noting());
        let (call, _, place) = default_stream(&mut cuda);
        let regular = Rows { at: 1 << 30, pitch: 64, slice: 640, width: 32, height: 8, depth: 8 };
        let odd = Rows { slice: 650, ..regular };
        let mut copied = |source, target| {
            Api::calls();
            cuda.copy_box(&call, &place, &BoxCopy { source, from: 0, target, to: 0 }).unwrap();
            Api::calls()
        };
        assert_eq!(copied(regular, regular), [("copy_3d", 8)]);
        assert_eq!(copied(regular, Rows { slice: 512, ..regular }), [("copy_3d", 8)]);
        for (source, target) in [(odd, regular), (regular, odd)] {
            assert_eq!(copied(source, target), [("copy_3d", 1); 8]);
        }
        let array = CudaArray::fake();
        let shape = ArrayShape { width: 32, height: 8, depth: 8, format: 1, channels: 1, flags: 0 };
        for (slice, calls) in [(640, vec![("copy_3d", 8)]), (650, vec![("copy_3d", 1); 8])] {
            let memory = Pitched { address: 1 << 30, pitch: 64, slice };
            let source = CopyEnd::Memory { memory: &memory, device: 0 };
            let target = CopyEnd::Array { array: &array, shape: &shape, at: [0; 3] };
            cuda.copy_array(&call, &place, &source, &target, [32, 8, 8]).unwrap();
            assert_eq!(Api::calls(), calls);
        }
    }

    #[test]
    fn memory_is_held_while_the_part_of_a_copy_is_done_that_the_driver_has_not_refused() {
        let mut cuda = Cuda::fake(Api::refusing());
        let (call, mut streams, place) = default_stream(&mut cuda);
        let (rows, region, mapped) = two_slices();
        let copied = cuda.copy_in_place(&call, &mut streams, &place, Way::In, &rows, mapped);
        assert_eq!(copied, Err(Status::INVALID_VALUE));
        is_held_until_the_stream_has_passed(&region, &place);
    }

    #[test]
    fn an_answers_slot_is_held_until_the_stream_has_passed_also_if_the_driver_refuses_the_copy() {
        let mut cuda = Cuda::fake(Api::refusing());
        let (mut call, mut streams, place) = default_stream(&mut cuda);
        // A reply slot without a buffer of its own.
        call.begin(1, u16::MAX);
        let users = || Arc::strong_count(&place.health);
        let before = users();
        let refused = cuda.download_inline(&mut call, &mut streams, &place, Api::REFUSED, 4, 0);
        assert_eq!(refused, Err(Status::INVALID_VALUE));
        assert_eq!(users(), before + 2, "the transfer, and who waits for its end");
        place.health.fail(Status::ILLEGAL_ADDRESS);
        is_given_back(|| users() <= before);
    }

    #[test]
    fn memory_is_held_while_the_part_of_a_piece_is_copied_that_the_driver_has_not_refused() {
        let mut cuda = Cuda::fake(Api::refusing());
        let (_, _, place) = default_stream(&mut cuda);
        let (rows, region, mapped) = two_slices();
        let carrier = cuda.make_carrier(&place, Way::In).unwrap();
        let (end, ended) = channel();
        carrier.carry(&rows, 0, mapped, 1, Box::new(move |status| end.send(status).unwrap()));
        is_held_until_the_stream_has_passed(&region, &place);
        assert_eq!(ended.recv(), Ok(Status::INVALID_VALUE));
    }
}
