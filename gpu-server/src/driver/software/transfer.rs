//! Copies and fills: checked when they are enqueued, done by the stream's thread.

use host_bridge::endpoint::Sink;
use protocol::Status;
use protocol::data::{HostIn, HostOut};
use protocol::handle::StreamId;
use protocol::ops::Answer;
use protocol::ops::copy::*;
use protocol::wire::Bytes;
use software_gpu::{Gpu, Plane, Result};

use super::streams::step;
use super::{Software, code};
use crate::driver::call::{Call, Input};
use crate::driver::rows::Rows;
use crate::driver::session::Session;

/// Bytes that a copy holds on the heap at a time.
const CHUNK: usize = 1 << 20;
/// Bytes of a transfer over the network that may wait for their stream.
const QUEUED: usize = 8 << 20;

fn write(rows: &Rows, gpu: &Gpu, offset: u64, bytes: &[u8]) -> Result<()> {
    rows.parts(offset, bytes.len() as u64, |part| {
        let from = &bytes[part.offset as usize..];
        gpu.write_2d(
            Plane { addr: part.at, pitch: rows.pitch.max(part.width) },
            from,
            part.width,
            part.width,
            part.rows,
        )
    })
}

fn read(rows: &Rows, gpu: &Gpu, offset: u64, bytes: &mut [u8]) -> Result<()> {
    rows.parts(offset, bytes.len() as u64, |part| {
        let to = &mut bytes[part.offset as usize..];
        gpu.read_2d(
            Plane { addr: part.at, pitch: rows.pitch.max(part.width) },
            to,
            part.width,
            part.width,
            part.rows,
        )
    })
}

impl Session<Software> {
    fn upload(
        &mut self,
        cx: &mut Call,
        stream: StreamId,
        to: Rows,
        src: HostIn<'_>,
    ) -> std::result::Result<(), Status> {
        let place = self.enter(cx, stream)?;
        let (packed, span) = to.sizes()?;
        if src.len() != packed {
            return Err(Status::INVALID_VALUE);
        }
        let gpu = self.checked(to.at, span, place.device)?;
        let owned = match cx.input(src)? {
            Input::Inline(bytes) => Upload::Here(bytes.to_vec()),
            Input::Mapped(mapped) => Upload::Mapped(mapped),
            Input::Incoming(incoming) => Upload::Coming(incoming.into_queue(QUEUED)),
            Input::Placed(placed) => Upload::Placed(placed),
        };
        enqueue_checked(&place, cx.seq, move |_| owned.run(&gpu, &to))
    }

    fn download(
        &mut self,
        cx: &mut Call,
        stream: StreamId,
        from: Rows,
        dst: HostOut,
    ) -> std::result::Result<(), Status> {
        let place = self.enter(cx, stream)?;
        let (packed, span) = from.sizes()?;
        if dst.0.len != packed {
            return Err(Status::INVALID_VALUE);
        }
        let gpu = self.checked(from.at, span, place.device)?;
        let sink = cx.output(dst)?;
        enqueue_checked(&place, cx.seq, move |_| {
            let mut at = 0;
            if let Sink::Outgoing(outgoing) = &sink {
                // Straight into buffers of the transport's, where it has some.
                while at < packed
                    && let Ok(Some(mut lent)) = outgoing.lend((packed - at).min(CHUNK as u64) as usize)
                {
                    let bytes = lent.bytes();
                    let n = bytes.len() as u64;
                    read(&from, &gpu, at, bytes)?;
                    if outgoing.send_lent(at, lent).is_err() {
                        return Ok(());
                    }
                    at += n;
                }
            }
            let mut buffer = vec![0; CHUNK.min((packed - at) as usize)];
            while at < packed {
                let n = buffer.len().min((packed - at) as usize);
                read(&from, &gpu, at, &mut buffer[..n])?;
                match &sink {
                    Sink::Mapped(mapped) => mapped.write(at as usize, &buffer[..n]),
                    Sink::Outgoing(outgoing) => {
                        if outgoing.send(at as usize / CHUNK, at, &buffer[..n]).is_err() {
                            // The session is over; nobody wants the rest.
                            return Ok(());
                        }
                    }
                }
                at += n as u64;
            }
            Ok(())
        })
    }
}

enum Upload {
    Here(Vec<u8>),
    Mapped(host_bridge::endpoint::Mapped),
    Coming(host_bridge::endpoint::ChunkQueue),
    Placed(host_bridge::endpoint::Placed),
}

impl Upload {
    fn run(self, gpu: &Gpu, to: &Rows) -> Result<()> {
        match self {
            Upload::Here(bytes) => write(to, gpu, 0, &bytes),
            Upload::Mapped(mapped) => {
                let mut buffer = vec![0; CHUNK.min(mapped.len())];
                let mut at = 0;
                while at < mapped.len() {
                    let n = buffer.len().min(mapped.len() - at);
                    mapped.read(at, &mut buffer[..n]);
                    write(to, gpu, at as u64, &buffer[..n])?;
                    at += n;
                }
                Ok(())
            }
            // This device's copy engine is the CPU. It copies what the peer may still write before it looks at it.
            Upload::Placed(placed) => {
                let mut buffer = Vec::new();
                let read = placed.read(|at, bytes| {
                    buffer.resize(bytes.len(), 0);
                    bytes.read(&mut buffer);
                    Ok(write(to, gpu, at, &buffer)?)
                });
                match read {
                    // The session is over; nobody wants the rest.
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

/// Enqueues work whose failure is the context's deferred error, but not the device's end: memory that was freed under the copy, say.
pub(super) fn enqueue_checked(
    place: &super::streams::Place,
    seq: u64,
    work: impl FnOnce(&Gpu) -> Result<()> + Send + 'static,
) -> std::result::Result<(), Status> {
    let (errors, context) = place.errors();
    let step = move |gpu: &Gpu| {
        match work(gpu) {
            Ok(()) => Ok(()),
            // A kernel's failure that shows here is sticky already.
            Err(e) if gpu.status().is_err() => Err(e),
            Err(e) => {
                errors.publish(context, code(&e), seq);
                Ok(())
            }
        }
    };
    place.stream.enqueue(step).map_err(|e| code(&e))
}

impl CopyOps<Call> for Session<Software> {
    fn memcpy_htod<'a>(&mut self, cx: &mut Call, op: MemcpyHtoD<'a>) -> std::result::Result<(), Status> {
        let to = Rows::line(op.dst, op.src.len());
        self.upload(cx, op.stream, to, op.src)
    }

    fn memcpy_dtoh(&mut self, cx: &mut Call, op: MemcpyDtoH) -> std::result::Result<(), Status> {
        let from = Rows::line(op.src, op.dst.0.len);
        self.download(cx, op.stream, from, op.dst)
    }

    fn memcpy_dtoh_inline(
        &mut self,
        cx: &mut Call,
        op: MemcpyDtoHInline,
    ) -> std::result::Result<Answer<MemcpyDtoHInlineReply>, Status> {
        let place = self.enter(cx, op.stream)?;
        if op.len as usize > protocol::channel::MAX_PAYLOAD - 4 {
            return Err(Status::INVALID_VALUE);
        }
        let gpu = self.checked(op.src, op.len.into(), place.device)?;
        let pending = cx.later();
        let (errors, context) = place.errors();
        step(&place.stream, &place.gpu, move |status| {
            if !status.is_success() {
                // Before the answer: who has that finds the context failed.
                errors.publish(context, status, 0);
            }
            let mut bytes = vec![0; op.len as usize];
            let read = status.ok().and_then(|()| gpu.read(op.src, &mut bytes).map_err(|e| code(&e)));
            pending.answer(read.map(|()| MemcpyDtoHInlineReply { bytes: Bytes(bytes) }));
        });
        Ok(Answer::Later)
    }

    fn memcpy_dtod(&mut self, cx: &mut Call, op: MemcpyDtoD) -> std::result::Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let work = self.line_work(place.device, &op)?;
        enqueue_checked(&place, cx.seq, move |_| work())
    }

    fn memcpy_htod_3d<'a>(&mut self, cx: &mut Call, op: MemcpyHtoD3D<'a>) -> std::result::Result<(), Status> {
        self.upload(cx, op.stream, Rows::of(&op.dst, op.extent), op.src)
    }

    fn memcpy_dtoh_3d(&mut self, cx: &mut Call, op: MemcpyDtoH3D) -> std::result::Result<(), Status> {
        self.download(cx, op.stream, Rows::of(&op.src, op.extent), op.dst)
    }

    fn memcpy_dtod_3d(&mut self, cx: &mut Call, op: MemcpyDtoD3D) -> std::result::Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let work = self.box_work(place.device, &op)?;
        enqueue_checked(&place, cx.seq, move |_| work())
    }

    fn memset(&mut self, cx: &mut Call, op: Memset) -> std::result::Result<(), Status> {
        let place = self.enter(cx, op.stream)?;
        let work = self.fill_work(place.device, &op)?;
        enqueue_checked(&place, cx.seq, move |_| work())
    }
}

/// What a stream's thread does, as often as it is called.
pub(super) type Again = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// Work inside device memory, checked: of a device's stream, or of a graph that it runs.
impl Session<Software> {
    pub(super) fn line_work(&self, device: u32, op: &MemcpyDtoD) -> std::result::Result<Again, Status> {
        let to = self.checked(op.dst, op.len, device)?;
        let from = self.checked(op.src, op.len, device)?;
        let (dst, src, len) = (op.dst, op.src, op.len);
        Ok(Box::new(move || from.copy_to(src, &to, dst, len)))
    }

    pub(super) fn box_work(&self, device: u32, op: &MemcpyDtoD3D) -> std::result::Result<Again, Status> {
        let (source, target) = (Rows::of(&op.src, op.extent), Rows::of(&op.dst, op.extent));
        let ((_, from_span), (_, to_span)) = (source.sizes()?, target.sizes()?);
        let from = self.checked(source.at, from_span, device)?;
        let to = self.checked(target.at, to_span, device)?;
        box_copy(from, source, to, target)
    }

    pub(super) fn fill_work(&self, device: u32, op: &Memset) -> std::result::Result<Again, Status> {
        if !matches!(op.element, 1 | 2 | 4) || !op.dst.is_multiple_of(op.element.into()) {
            return Err(Status::INVALID_VALUE);
        }
        let width = op.width.checked_mul(op.element.into()).ok_or(Status::INVALID_VALUE)?;
        let pitch = if op.height > 1 { op.pitch } else { width };
        let rows = Rows { at: op.dst, pitch, slice: 0, width, height: op.height, depth: 1 };
        let (_, span) = rows.sizes()?;
        let gpu = self.checked(op.dst, span, device)?;
        let (plane, value, element, width, height) =
            (Plane { addr: op.dst, pitch }, op.value, op.element, op.width, op.height);
        Ok(Box::new(move || gpu.fill_2d(plane, value, element, width, height)))
    }
}

/// The copy of a box between two devices' memory, row by row. Both boxes have the same rows.
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
