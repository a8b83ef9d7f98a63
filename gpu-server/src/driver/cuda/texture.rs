//! Tensor maps.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::texture::*;

use super::Cuda;
use super::api::TensorMap;
use crate::driver::call::Call;
use crate::driver::session::Session;

/// Dimensions of a tensor at most.
const MAX_RANK: usize = 5;

/// The tensor's dimensions, if its lists have the lengths that the driver reads.
fn rank(tensor: &Tensor) -> Result<u32, Status> {
    let rank = tensor.sizes.len();
    let whole =
        (1..=MAX_RANK).contains(&rank) && tensor.strides.len() == rank - 1 && tensor.steps.len() == rank;
    if whole { Ok(rank as u32) } else { Err(Status::INVALID_VALUE) }
}

impl TextureOps<Call> for Session<Cuda> {
    fn tensor_map_tiled(
        &mut self,
        cx: &mut Call,
        op: TensorMapTiled,
    ) -> Result<Answer<TensorMapTiledReply>, Status> {
        self.enter_map(cx, op.context)?;
        let (t, rank) = (&op.tensor, rank(&op.tensor)?);
        if op.box_sizes.len() != rank as usize {
            return Err(Status::INVALID_VALUE);
        }
        let mut map = TensorMap([0; 128]);
        // SAFETY: the lists have the lengths that the rank says, and `map` is aligned; the address is not followed.
        unsafe {
            self.api.tensor_map_tiled(
                &mut map,
                t.data_type,
                rank,
                t.address,
                t.sizes.as_ptr(),
                t.strides.as_ptr(),
                op.box_sizes.as_ptr(),
                t.steps.as_ptr(),
                t.interleave,
                t.swizzle,
                t.l2_promotion,
                t.fill,
            )
        }?;
        Ok(Answer::Now(TensorMapTiledReply { map: map.0 }))
    }

    fn tensor_map_im2col(
        &mut self,
        cx: &mut Call,
        op: TensorMapIm2col,
    ) -> Result<Answer<TensorMapIm2colReply>, Status> {
        self.enter_map(cx, op.context)?;
        let (t, rank) = (&op.tensor, rank(&op.tensor)?);
        let corners = (rank as usize).checked_sub(2).ok_or(Status::INVALID_VALUE)?;
        if op.lower.len() != corners || op.upper.len() != corners {
            return Err(Status::INVALID_VALUE);
        }
        let mut map = TensorMap([0; 128]);
        // SAFETY: as above.
        unsafe {
            self.api.tensor_map_im2col(
                &mut map,
                t.data_type,
                rank,
                t.address,
                t.sizes.as_ptr(),
                t.strides.as_ptr(),
                op.lower.as_ptr(),
                op.upper.as_ptr(),
                op.channels,
                op.pixels,
                t.steps.as_ptr(),
                t.interleave,
                t.swizzle,
                t.l2_promotion,
                t.fill,
            )
        }?;
        Ok(Answer::Now(TensorMapIm2colReply { map: map.0 }))
    }

    fn tensor_map_replace_address(
        &mut self,
        cx: &mut Call,
        op: TensorMapReplaceAddress,
    ) -> Result<Answer<TensorMapReplaceAddressReply>, Status> {
        self.enter_map(cx, op.context)?;
        let mut map = TensorMap(op.map);
        // SAFETY: an aligned map; the address is not followed.
        unsafe { self.api.tensor_map_replace(&mut map, op.address) }?;
        Ok(Answer::Now(TensorMapReplaceAddressReply { map: map.0 }))
    }
}

impl Cuda {
    fn enter_map(&mut self, cx: &mut Call, context: ContextId) -> Result<(), Status> {
        cx.context = context;
        self.enter_context(context).map(|_| ())
    }
}
