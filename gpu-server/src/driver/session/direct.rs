//! Copies over direct connections.

use std::sync::Arc;

use host_bridge::endpoint::Sink;
use protocol::Status;
use protocol::ops::Answer;
use protocol::ops::direct::*;

use super::{Session, now};
use crate::direct::{Directs, MirrorCarrier, Near, PieceMemory, Series};
use crate::driver::beside::Beside;
use crate::driver::call::{Call, Input, Reply, Result};
use crate::driver::gpu::Gpu;
use crate::driver::rows::Rows;
use crate::driver::store::Way;
use protocol::handle::StreamId;
use protocol::ops::copy::Pitched;

impl<G: Gpu> Session<G> {
    fn directs(&self) -> Result<&Arc<Directs>> {
        self.directs.as_ref().ok_or(Status::NOT_SUPPORTED)
    }

    /// A box that goes this way in pieces.
    fn series(
        &mut self,
        cx: &mut Call,
        stream: StreamId,
        way: Way,
        (place, extent): (&Pitched, [u64; 3]),
        (first, piece): (u64, u64),
    ) -> Result<Series> {
        let entered = self.enter(cx, stream)?;
        let rows = Rows::of(place, extent);
        let (_, span) = rows.sizes()?;
        let device = self.check_range(rows.at, span, G::device_at(&entered))?;
        Series::new(rows, piece, first, self.gpu.carrier(&entered, device, way)?)
    }
}

fn way(outgoing: bool) -> Way {
    if outgoing { Way::Out } else { Way::In }
}

impl<G: Gpu> DirectOps<Call> for Session<G> {
    fn direct_key(&mut self, _cx: &mut Call, _op: DirectKey) -> Reply<DirectKeyReply> {
        now(DirectKeyReply { key: self.directs()?.key() })
    }

    fn direct_offer(&mut self, cx: &mut Call, op: DirectOffer) -> Reply<DirectOfferReply> {
        self.directs()?.offer(op.direct, op.key, || cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_open(&mut self, cx: &mut Call, op: DirectOpen) -> Reply<DirectOpenReply> {
        self.directs()?.open(op.direct, op.ticket, || cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_send(&mut self, cx: &mut Call, op: DirectSend) -> Result {
        // If this returns early, it is dropped, which tells the other end that the piece will not arrive.
        let mut sending = self.directs()?.outgoing(op.direct)?.piece(op.number);
        let place = self.enter(cx, op.stream)?;
        let from = Rows::of(&op.src, op.extent);
        let (packed, span) = from.sizes()?;
        let device = self.check_range(from.at, span, G::device_at(&place))?;
        if packed == 0 || packed > MAX_PIECE {
            return Err(Status::INVALID_VALUE);
        }
        // Not an error of the program: it can take another route.
        let Some(buffer) = sending.fill(packed) else { return Ok(()) };
        self.gpu.download(cx, &mut self.streams, &place, &from, device, Sink::Mapped(buffer))?;
        let finish = Box::new(move |status| sending.finish(status));
        self.gpu.after_stream(cx, &mut self.streams, op.stream, finish)
    }

    fn direct_arrival(&mut self, cx: &mut Call, op: DirectArrival) -> Reply<DirectArrivalReply> {
        self.directs()?.incoming(op.direct)?.arrival(op.number, || cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_land(&mut self, cx: &mut Call, op: DirectLand) -> Result {
        let incoming = self.directs()?.incoming(op.direct)?;
        let place = self.enter(cx, op.stream)?;
        let to = Rows::of(&op.dst, op.extent);
        let (packed, span) = to.sizes()?;
        let device = self.check_range(to.at, span, G::device_at(&place))?;
        let (buffer, bytes) = incoming.land(op.number)?;
        if packed != bytes.len() as u64 {
            buffer.release(Status::SUCCESS);
            return Err(Status::INVALID_VALUE);
        }
        self.gpu.upload(cx, &mut self.streams, &place, &to, device, Input::Mapped(bytes))?;
        let landed = Box::new(move |status| buffer.release(status));
        self.gpu.after_stream(cx, &mut self.streams, op.stream, landed)
    }

    fn direct_receive(&mut self, cx: &mut Call, op: DirectReceive) -> Result {
        (cx.context, _) = self.directs()?.place(op.direct, false)?;
        self.directs()?.receive(&op, cx.seq)
    }

    fn direct_send_now(&mut self, cx: &mut Call, op: DirectSendNow) -> Result {
        (cx.context, _) = self.directs()?.place(op.direct, true)?;
        self.directs()?.send_now(&op, cx.seq)
    }

    fn direct_prepare(&mut self, cx: &mut Call, op: DirectPrepare) -> Reply<DirectPrepareReply> {
        let place = self.enter(cx, op.stream)?;
        let beside: Arc<dyn Beside> = Arc::clone(self.gpu.beside()) as _;
        let mirrors = MirrorCarrier { beside, way: way(op.outgoing), progress: self.gpu.progress(&place) };
        let near = Near { context: cx.context, stream: op.stream, mirrors: Arc::new(mirrors) };
        self.directs()?.prepare(op.direct, op.outgoing, near, || cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_memory(&mut self, cx: &mut Call, op: DirectMemory) -> Reply<DirectMemoryReply> {
        let DirectMemory { direct, outgoing, address, len, allowed } = op;
        let part = (address, len);
        let (context, stream) = self.directs()?.place(direct, outgoing)?;
        cx.context = context;
        if !allowed {
            self.directs()?.unname(direct, outgoing, part)?;
        } else if self.gpu.beside().holds(address, len) {
            self.directs()?.name(direct, outgoing, part, PieceMemory::Mirror)?;
        } else if !self.is_devices_own(address, len) {
            return Err(Status::INVALID_VALUE);
        } else if self.directs()?.has_device(direct, outgoing)? {
            self.directs()?.name(direct, outgoing, part, PieceMemory::Device)?;
        } else {
            let place = self.enter(cx, stream)?;
            let carrier = self.gpu.carrier(&place, G::device_at(&place), way(outgoing))?;
            let ready = self.gpu.preparer(&place)?;
            self.directs()?.prepare_device((direct, outgoing), carrier, ready, part, || cx.later())?;
            return Ok(Answer::Later);
        }
        now(DirectMemoryReply {})
    }

    fn direct_failures(&mut self, cx: &mut Call, _op: DirectFailures) -> Reply<DirectFailuresReply> {
        self.directs()?.failures(|| cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_send_all(&mut self, cx: &mut Call, op: DirectSendAll) -> Result {
        // If this returns early, it is dropped, which tells the other end that the box will not arrive.
        let sending = self.directs()?.outgoing(op.direct)?.piece(op.first);
        let numbers = (op.first, op.piece);
        let series = self.series(cx, op.stream, Way::Out, (&op.src, op.extent), numbers)?;
        // Other memory may be unmapped without its pieces being forgotten.
        let own = series.line().filter(|(at, len)| self.is_devices_own(*at, *len));
        let device = own.and_then(|(at, _)| self.ordinal_of(at));
        let granule = device.map_or(0, |device| self.gpu.granule(device));
        let directs = Arc::clone(self.directs()?);
        let give = |at, size| self.gpu.in_place(device.ok_or(Status::NOT_FOUND)?, at, size);
        directs.send_all(op.direct, series, granule, give)?;
        sending.passed_on();
        Ok(())
    }

    fn direct_receive_all(&mut self, cx: &mut Call, op: DirectReceiveAll) -> Reply<DirectReceiveAllReply> {
        let numbers = (op.first, op.piece);
        let series = self.series(cx, op.stream, Way::In, (&op.dst, op.extent), numbers)?;
        self.directs()?.receive_all(op.direct, series, || cx.later())?;
        Ok(Answer::Later)
    }

    fn direct_close(&mut self, cx: &mut Call, op: DirectClose) -> Reply<DirectCloseReply> {
        let directs = self.directs()?;
        if op.outgoing {
            directs.end_outgoing(op.direct, || cx.later())?;
        } else {
            directs.end_incoming(op.direct, || cx.later())?;
        }
        Ok(Answer::Later)
    }
}
