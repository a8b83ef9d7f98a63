//! Copies and fills. They are checked when they are enqueued, and the stream's thread executes them.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cupti_records::{copy, memory};
use host_bridge::endpoint::{Mapped, Sink};
use protocol::Status;
use protocol::ops::copy::MemcpyDtoHInlineReply;
use protocol::wire::Bytes;
use software_gpu::{Gpu, Plane, Result, Stream};

use super::activity::{Timer, What};
use super::streams::{Place, SoftwareStream, Word, step};
use super::{Software, code};
use crate::driver::call::{Call, End, Input};
use crate::driver::gpu::{BoxCopy, Carrier, Fill, GpuCopies, LineCopy, Preparer, Progress};
use crate::driver::rows::Rows;
use crate::driver::store::Way;
use crate::driver::streams::Streams;

/// Size of a copy's buffer on the heap, in bytes.
const CHUNK: usize = 1 << 20;
/// Number of bytes of a transfer over the network that may wait for their stream.
const QUEUED: usize = 8 << 20;

fn write(rows: &Rows, gpu: &Gpu, offset: u64, bytes: &[u8]) -> Result<()> {
    rows.parts(offset, bytes.len() as u64, |part| {
        part.planes(rows).try_for_each(|(at, offset)| {
            let plane = Plane { addr: at, pitch: rows.pitch.max(part.width) };
            gpu.write_2d(plane, &bytes[offset as usize..], part.width, part.width, part.rows)
        })
    })
}

fn read(rows: &Rows, gpu: &Gpu, offset: u64, bytes: &mut [u8]) -> Result<()> {
    rows.parts(offset, bytes.len() as u64, |part| {
        part.planes(rows).try_for_each(|(at, offset)| {
            let plane = Plane { addr: at, pitch: rows.pitch.max(part.width) };
            gpu.read_2d(plane, &mut bytes[offset as usize..], part.width, part.width, part.rows)
        })
    })
}

thread_local! {
    /// A stream's thread copies through this: the peer may change the other memory at any time. New memory
    /// for each copy would cost a page fault for each of its pages.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Calls `copy` with so many bytes of this thread's buffer, which may be any.
fn with_buffer<T>(len: usize, copy: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        copy(&mut buffer[..len])
    })
}

/// Copies rows, from an offset on, to memory: as many bytes as that has.
fn download(gpu: &Gpu, from: &Rows, offset: u64, to: &Mapped) -> Result<()> {
    let mut at = 0;
    while at < to.len() {
        let n = CHUNK.min(to.len() - at);
        with_buffer(n, |buffer| {
            read(from, gpu, offset + at as u64, buffer)?;
            to.write(at, buffer);
            Result::Ok(())
        })?;
        at += n;
    }
    Ok(())
}

/// Copies memory to rows, from an offset on.
fn upload(gpu: &Gpu, to: &Rows, offset: u64, from: &Mapped) -> Result<()> {
    let mut at = 0;
    while at < from.len() {
        let n = CHUNK.min(from.len() - at);
        with_buffer(n, |buffer| {
            from.read(at, buffer);
            write(to, gpu, offset + at as u64, buffer)
        })?;
        at += n;
    }
    Ok(())
}

/// Copies a piece between rows, from an offset on, and memory of this process that nobody else uses
/// meanwhile.
fn copy_piece(way: Way, gpu: &Gpu, rows: &Rows, mut offset: u64, piece: &Mapped) -> Result<()> {
    for (run, len) in piece.runs() {
        // SAFETY: mapped memory, of which the caller says that nobody else uses it (`Carrier::carry`).
        let bytes = unsafe { std::slice::from_raw_parts_mut(run.as_ptr(), *len) };
        match way {
            Way::In => write(rows, gpu, offset, bytes)?,
            Way::Out => read(rows, gpu, offset, bytes)?,
        }
        offset += *len as u64;
    }
    Ok(())
}

enum Upload {
    Here(Vec<u8>),
    Mapped(Mapped),
    Coming(host_bridge::endpoint::ChunkQueue),
    Placed(host_bridge::endpoint::Placed),
}

impl Upload {
    fn run(self, gpu: &Gpu, to: &Rows) -> Result<()> {
        match self {
            Upload::Here(bytes) => write(to, gpu, 0, &bytes),
            Upload::Mapped(mapped) => upload(gpu, to, 0, &mapped),
            // This device's copy engine is the CPU. The peer may still write the bytes, so they are copied
            // exactly once.
            Upload::Placed(placed) => {
                let read = placed.read(|at, bytes| {
                    with_buffer(bytes.len(), |buffer| {
                        bytes.read(buffer);
                        Ok(write(to, gpu, at, buffer)?)
                    })
                });
                match read {
                    // The session is over; the rest is not needed.
                    Ok(()) | Err(Ended::Lost) => Ok(()),
                    Err(Ended::Failed(e)) => Err(e),
                }
            }
            Upload::Coming(mut queue) => {
                while let Ok(Some(chunk)) = queue.next_chunk() {
                    write(to, gpu, chunk.offset, &chunk.bytes)?;
                }
                Ok(())
            }
        }
    }
}

/// Why an upload ended early.
enum Ended {
    Lost,
    Failed(software_gpu::Error),
}

impl From<host_bridge::endpoint::Lost> for Ended {
    fn from(_: host_bridge::endpoint::Lost) -> Ended {
        Ended::Lost
    }
}

impl From<software_gpu::Error> for Ended {
    fn from(e: software_gpu::Error) -> Ended {
        Ended::Failed(e)
    }
}

/// See [`Carrier`].
struct SoftwareCarrier {
    /// The device's own, for pieces that go this way.
    stream: Stream,
    /// The device that accesses the memory.
    memory: Gpu,
    way: Way,
    word: Arc<Word>,
    /// Held by calls of the dispatcher that wait.
    driver: Arc<Mutex<()>>,
}

impl Carrier for SoftwareCarrier {
    fn carry(&self, rows: &Rows, offset: u64, bytes: Mapped, seq: u64, end: End) {
        let _held = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, way, memory, word) = (*rows, self.way, self.memory.clone(), Arc::clone(&self.word));
        // Pieces must not be sent if the copy has failed, for example because the memory was freed.
        let failed = Arc::<OnceLock<Status>>::default();
        let fails = Arc::clone(&failed);
        let copy = move |_: &Gpu| {
            if let Err(e) = copy_piece(way, &memory, &rows, offset, &bytes) {
                word.complain(code(&e), seq);
                fails.get_or_init(|| code(&e));
            }
            Ok(())
        };
        // If the device has failed, this is refused, and so is the step.
        let _ = self.stream.enqueue(copy);
        let word = Arc::clone(&self.word);
        step(&self.stream, &self.memory, move |status| {
            if !word.is_gone() {
                word.publish(seq, status);
            }
            end(failed.get().copied().unwrap_or(status));
        });
    }
}

impl GpuCopies for Software {
    fn upload(
        &mut self,
        cx: &mut Call,
        _streams: &mut Streams<SoftwareStream>,
        place: &Place,
        to: &Rows,
        device: u32,
        data: Input<'_>,
    ) -> std::result::Result<(), Status> {
        let (gpu, to) = (self.device(device)?.gpu.clone(), *to);
        let owned = match data {
            Input::Inline(bytes) => Upload::Here(bytes.to_vec()),
            Input::Mapped(mapped) => Upload::Mapped(mapped),
            Input::Incoming(incoming) => Upload::Coming(incoming.into_queue(QUEUED)),
            Input::Placed(placed) => Upload::Placed(placed),
        };
        let host = if matches!(owned, Upload::Here(_)) { memory::PAGEABLE } else { memory::PINNED };
        let what = || What::copy(copy::HTOD, [host, memory::DEVICE], What::bytes(&to));
        let timer = self.timer(place, what);
        place.enqueue_checked(cx.seq, move |_| {
            timer.begin();
            owned.run(&gpu, &to)?;
            timer.end();
            Ok(())
        })
    }

    fn download(
        &mut self,
        cx: &mut Call,
        _streams: &mut Streams<SoftwareStream>,
        place: &Place,
        from: &Rows,
        device: u32,
        sink: Sink,
    ) -> std::result::Result<(), Status> {
        let (gpu, from) = (self.device(device)?.gpu.clone(), *from);
        let (packed, _) = from.sizes()?;
        let timer = self.timer(place, || What::copy(copy::DTOH, [memory::DEVICE, memory::PINNED], packed));
        place.enqueue_checked(cx.seq, move |_| {
            timer.begin();
            match &sink {
                Sink::Mapped(mapped) => download(&gpu, &from, 0, mapped)?,
                // Directly into the transport's buffers.
                Sink::Outgoing(outgoing) => {
                    let mut at = 0;
                    while at < packed {
                        let n = (packed - at).min(CHUNK as u64) as usize;
                        let lane = outgoing.idlest_lane();
                        // On an error, the session is over and the rest is not needed.
                        let Ok(mut lent) = outgoing.lend(lane, n) else { return Ok(()) };
                        let bytes = lent.bytes();
                        let n = bytes.len() as u64;
                        read(&from, &gpu, at, bytes)?;
                        if outgoing.send_lent(lane, at, lent).is_err() {
                            return Ok(());
                        }
                        at += n;
                    }
                }
            }
            timer.end();
            Ok(())
        })
    }

    fn progress(&mut self, place: &Place) -> Progress {
        let word = place.word();
        Box::new(move |seq, status| {
            if !word.is_gone() {
                word.publish(seq, status);
            }
        })
    }

    fn preparer(&mut self, _place: &Place) -> std::result::Result<Preparer, Status> {
        // The CPU copies any memory.
        Ok(Box::new(|_| {}))
    }

    fn carrier(
        &mut self,
        place: &Place,
        device: u32,
        way: Way,
    ) -> std::result::Result<Arc<dyn Carrier>, Status> {
        let driver = Arc::clone(&self.driver);
        let device = self.device_mut(device)?;
        let memory = device.gpu.clone();
        let stream = match way {
            Way::In => &mut device.landing,
            Way::Out => &mut device.sending,
        };
        let stream = stream.get_or_insert_with(|| memory.stream()).clone();
        Ok(Arc::new(SoftwareCarrier { stream, memory, way, word: place.word(), driver }))
    }

    fn download_inline(
        &mut self,
        cx: &mut Call,
        _streams: &mut Streams<SoftwareStream>,
        place: &Place,
        from: u64,
        len: usize,
        device: u32,
    ) -> std::result::Result<(), Status> {
        let gpu = self.device(device)?.gpu.clone();
        let pending = cx.later();
        let (errors, context) = place.errors();
        let ends = [memory::DEVICE, memory::PAGEABLE];
        let timer = self.timer(place, || What::copy(copy::DTOH, ends, len as u64));
        step(&place.stream, &place.gpu, move |status| {
            if !status.is_success() {
                // Before the answer: a client that has the answer must find the context failed.
                errors.publish(context, status, 0);
            }
            let mut bytes = vec![0; len];
            timer.begin();
            let read = status.ok().and_then(|()| gpu.read(from, &mut bytes).map_err(|e| code(&e)));
            if read.is_ok() {
                timer.end();
            }
            pending.answer(read.map(|()| MemcpyDtoHInlineReply { bytes: Bytes(bytes) }));
        });
        Ok(())
    }

    fn copy_line(&mut self, cx: &Call, place: &Place, copy: &LineCopy) -> std::result::Result<(), Status> {
        let work = self.line_work(copy)?;
        let timer = self.timer(place, || What::between(copy.from, copy.to, copy.len));
        self.enqueue_timed(cx, place, timer, work)
    }

    fn copy_box(&mut self, cx: &Call, place: &Place, copy: &BoxCopy) -> std::result::Result<(), Status> {
        let work = self.box_work(copy)?;
        let timer = self.timer(place, || What::between(copy.from, copy.to, What::bytes(&copy.source)));
        self.enqueue_timed(cx, place, timer, work)
    }

    fn fill(&mut self, cx: &Call, place: &Place, fill: &Fill) -> std::result::Result<(), Status> {
        let work = self.fill_work(fill)?;
        let timer = self.timer(place, || What::fill(fill));
        self.enqueue_timed(cx, place, timer, work)
    }
}

/// A stream thread's work that can be repeated.
pub(super) type Again = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// Work inside device memory, for a stream or a graph.
impl Software {
    /// Enqueues work with its timer.
    pub(super) fn enqueue_timed(
        &self,
        cx: &Call,
        place: &Place,
        timer: Timer,
        work: Again,
    ) -> std::result::Result<(), Status> {
        place.enqueue_checked(cx.seq, move |_| {
            timer.begin();
            work()?;
            timer.end();
            Ok(())
        })
    }

    pub(super) fn line_work(&self, copy: &LineCopy) -> std::result::Result<Again, Status> {
        let (from, to) = (self.device(copy.from)?.gpu.clone(), self.device(copy.to)?.gpu.clone());
        let LineCopy { dst, src, len, .. } = *copy;
        Ok(Box::new(move || from.copy_to(src, &to, dst, len)))
    }

    pub(super) fn box_work(&self, copy: &BoxCopy) -> std::result::Result<Again, Status> {
        let (from, to) = (self.device(copy.from)?.gpu.clone(), self.device(copy.to)?.gpu.clone());
        box_copy(from, copy.source, to, copy.target)
    }

    pub(super) fn fill_work(&self, fill: &Fill) -> std::result::Result<Again, Status> {
        let gpu = self.device(fill.device)?.gpu.clone();
        let Fill { address, pitch, value, element, width, height, .. } = *fill;
        Ok(Box::new(move || gpu.fill_2d(Plane { addr: address, pitch }, value, element, width, height)))
    }
}

/// Copies a box between two devices' memory, row by row. Both boxes have the same rows.
pub(super) fn box_copy(from: Gpu, source: Rows, to: Gpu, target: Rows) -> std::result::Result<Again, Status> {
    let (packed, _) = source.sizes()?;
    Ok(Box::new(move || {
        let width = source.width.max(1);
        let mut at = 0;
        while at < packed {
            let (y, z) = (at / width % source.height, at / width / source.height);
            let (a, b) = (
                source.at + z * source.slice + y * source.pitch,
                target.at + z * target.slice + y * target.pitch,
            );
            from.copy_to(a, &to, b, width)?;
            at += width;
        }
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use host_bridge::endpoint::Region;
    use software_gpu::GpuConfig;

    use super::*;

    #[test]
    fn a_piece_is_copied_between_its_buffer_and_rows_without_a_third_place() {
        const LEN: usize = 3000;
        let gpu = Gpu::new(GpuConfig { workers: 1, ..GpuConfig::default() }).unwrap();
        let at = gpu.allocate(1 << 20).unwrap();
        let rows = Rows { at, pitch: 1000, slice: 20_000, width: 700, height: 5, depth: 2 };
        let [from, to] = [(); 2].map(|()| Arc::new(Region::own(NonZeroUsize::new(LEN).unwrap()).unwrap()));
        let content: Vec<u8> = (0..LEN).map(|at| (at * 7 / 3) as u8).collect();
        let piece = Mapped::of(&from, LEN as u64).unwrap();
        piece.write(0, &content);
        copy_piece(Way::In, &gpu, &rows, 2500, &piece).unwrap();
        let piece = Mapped::of(&to, LEN as u64).unwrap();
        copy_piece(Way::Out, &gpu, &rows, 2500, &piece).unwrap();
        let mut came = vec![0; LEN];
        piece.read(0, &mut came);
        assert!(came == content);
        // The fourth row of the first slice, from its 400th byte on.
        let mut third = [0; 300];
        gpu.read(at + 3400, &mut third).unwrap();
        assert_eq!(third, content[..300]);
        assert!(BUFFER.with_borrow(Vec::is_empty));
        assert!(copy_piece(Way::In, &gpu, &Rows { at: 0, ..rows }, 0, &piece).is_err());
    }
}
