//! Tensor maps: only tiled ones without interleaving that fill the outside with zeros. CUDA's other kinds are
//! refused.

use crate::driver::call::Result;
use protocol::Status;
use protocol::ops::texture::*;
use software_gpu::TensorMap;

use super::Software;
use crate::driver::gpu::GpuTensorMaps;

/// Of `CUtensorMapDataType`: the first type that is flushed or rounded when copied, and the last type.
const FIRST_ROUNDED: u32 = 10;
const LAST_TYPE: u32 = 15;
/// `CU_TENSOR_MAP_SWIZZLE_128B`, and the last swizzle mode.
const SWIZZLE_128: u32 = 3;
const LAST_SWIZZLE: u32 = 6;

impl GpuTensorMaps for Software {
    fn tensor_map_tiled(&self, op: &TensorMapTiled) -> Result<[u8; 128]> {
        let t = &op.tensor;
        let rank = t.sizes.len();
        let mut map = TensorMap {
            data_type: t.data_type,
            rank: rank as u32,
            address: t.address,
            sizes: [0; 5],
            strides: [0; 4],
            tile: [1; 5],
            steps: [1; 5],
            swizzle: t.swizzle,
        };
        if t.data_type > LAST_TYPE || t.interleave > 2 || t.swizzle > LAST_SWIZZLE || t.fill > 1 {
            return Err(Status::INVALID_VALUE);
        }
        if t.data_type >= FIRST_ROUNDED || t.interleave != 0 || t.swizzle > SWIZZLE_128 || t.fill != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        map.sizes[..rank].copy_from_slice(&t.sizes);
        map.strides[..rank - 1].copy_from_slice(&t.strides);
        map.tile[..rank].copy_from_slice(&op.box_sizes);
        map.steps[..rank].copy_from_slice(&t.steps);
        map.encode().map_err(|_| Status::INVALID_VALUE)
    }

    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128]> {
        let map = TensorMap::decode(&op.map).ok_or(Status::INVALID_VALUE)?;
        TensorMap { address: op.address, ..map }.encode().map_err(|_| Status::INVALID_VALUE)
    }
}
