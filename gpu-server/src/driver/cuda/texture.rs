//! Tensor maps.

use crate::driver::call::Result;
use protocol::ops::texture::*;

use super::Cuda;
use super::api::TensorMap;
use crate::driver::gpu::GpuTensorMaps;

impl GpuTensorMaps for Cuda {
    fn tensor_map_tiled(&self, op: &TensorMapTiled) -> Result<[u8; 128]> {
        let t = &op.tensor;
        let mut map = TensorMap([0; 128]);
        // SAFETY: the lists have the lengths given by the rank, and `map` is aligned; the address is not
        // dereferenced.
        unsafe {
            self.api.tensor_map_tiled(
                &mut map,
                t.data_type,
                t.sizes.len() as u32,
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
        Ok(map.0)
    }

    fn tensor_map_im2col(&self, op: &TensorMapIm2col) -> Result<[u8; 128]> {
        let t = &op.tensor;
        let mut map = TensorMap([0; 128]);
        // SAFETY: the lists have the lengths given by the rank, and `map` is aligned; the address is not
        // dereferenced.
        unsafe {
            self.api.tensor_map_im2col(
                &mut map,
                t.data_type,
                t.sizes.len() as u32,
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
        Ok(map.0)
    }

    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128]> {
        let mut map = TensorMap(op.map);
        // SAFETY: an aligned map; the address is not dereferenced.
        unsafe { self.api.tensor_map_replace(&mut map, op.address) }?;
        Ok(map.0)
    }
}
