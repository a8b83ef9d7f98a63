//! Tensor maps.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::texture::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::Gpu;

/// Maximum number of dimensions of a tensor.
const MAX_RANK: usize = 5;

/// The tensor's rank, if its lists have the lengths that a driver reads.
fn rank(tensor: &Tensor) -> Result<usize> {
    let rank = tensor.sizes.len();
    let whole =
        (1..=MAX_RANK).contains(&rank) && tensor.strides.len() == rank - 1 && tensor.steps.len() == rank;
    if whole { Ok(rank) } else { Err(Status::INVALID_VALUE) }
}

impl<G: Gpu> Session<G> {
    fn enter_map(&mut self, cx: &mut Call, context: ContextId) -> Result {
        cx.context = context;
        self.gpu.enter(context)
    }
}

impl<G: Gpu> TextureOps<Call> for Session<G> {
    fn tensor_map_tiled(&mut self, cx: &mut Call, op: TensorMapTiled) -> Reply<TensorMapTiledReply> {
        self.enter_map(cx, op.context)?;
        if op.box_sizes.len() != rank(&op.tensor)? {
            return Err(Status::INVALID_VALUE);
        }
        now(TensorMapTiledReply { map: self.gpu.tensor_map_tiled(&op)? })
    }

    fn tensor_map_im2col(&mut self, cx: &mut Call, op: TensorMapIm2col) -> Reply<TensorMapIm2colReply> {
        self.enter_map(cx, op.context)?;
        let corners = rank(&op.tensor)?.checked_sub(2).ok_or(Status::INVALID_VALUE)?;
        if op.lower.len() != corners || op.upper.len() != corners {
            return Err(Status::INVALID_VALUE);
        }
        now(TensorMapIm2colReply { map: self.gpu.tensor_map_im2col(&op)? })
    }

    fn tensor_map_im2col_wide(
        &mut self,
        cx: &mut Call,
        op: TensorMapIm2colWide,
    ) -> Reply<TensorMapIm2colWideReply> {
        self.enter_map(cx, op.context)?;
        if rank(&op.tensor)? < 3 {
            return Err(Status::INVALID_VALUE);
        }
        now(TensorMapIm2colWideReply { map: self.gpu.tensor_map_im2col_wide(&op)? })
    }

    fn tensor_map_replace_address(
        &mut self,
        cx: &mut Call,
        op: TensorMapReplaceAddress,
    ) -> Reply<TensorMapReplaceAddressReply> {
        self.enter_map(cx, op.context)?;
        now(TensorMapReplaceAddressReply { map: self.gpu.tensor_map_replace_address(&op)? })
    }
}
