//! Tensor maps.

use cudarc::driver::sys;
use protocol::Status;
use protocol::ops::texture::*;

use super::Cuda;
use super::api::TensorMap;
use crate::driver::call::Result;
use crate::driver::gpu::GpuTensorMaps;

/// `cuTensorMapEncodeIm2colWide`.
type EncodeWide = unsafe extern "C" fn(
    *mut TensorMap,
    u32,
    u32,
    u64,
    *const u64,
    *const u64,
    i32,
    i32,
    u32,
    u32,
    *const u32,
    u32,
    u32,
    u32,
    u32,
    u32,
) -> u32;

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

    fn tensor_map_im2col_wide(&self, op: &TensorMapIm2colWide) -> Result<[u8; 128]> {
        // Drivers have it since CUDA 12.8.
        // SAFETY: the library exists, as for every session; the symbol has this type by CUDA's header.
        let found = unsafe { sys::culib().get::<EncodeWide>(b"cuTensorMapEncodeIm2colWide\0") };
        let encode = found.map_err(|_| Status::NOT_SUPPORTED)?;
        let t = &op.tensor;
        let mut map = TensorMap([0; 128]);
        // SAFETY: the lists have the lengths given by the rank, and `map` is aligned; the address is not
        // dereferenced.
        let status = unsafe {
            encode(
                &mut map,
                t.data_type,
                t.sizes.len() as u32,
                t.address,
                t.sizes.as_ptr(),
                t.strides.as_ptr(),
                op.corners[0],
                op.corners[1],
                op.channels,
                op.pixels,
                t.steps.as_ptr(),
                t.interleave,
                op.mode,
                t.swizzle,
                t.l2_promotion,
                t.fill,
            )
        };
        Status(status).ok()?;
        Ok(map.0)
    }

    fn tensor_map_replace_address(&self, op: &TensorMapReplaceAddress) -> Result<[u8; 128]> {
        let mut map = TensorMap(op.map);
        // SAFETY: an aligned map; the address is not dereferenced.
        unsafe { self.api.tensor_map_replace(&mut map, op.address) }?;
        Ok(map.0)
    }
}
