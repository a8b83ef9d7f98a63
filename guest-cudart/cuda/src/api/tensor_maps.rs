//! Tensor maps: encoded by the server's driver, since what it writes into one is its own affair.

use std::ffi::c_void;

use crate::abi::arguments::non_null;
use crate::abi::result::Result;
use crate::process::context;
use client::Status;
use client::ops::texture::{Tensor, TensorMapIm2col, TensorMapReplaceAddress, TensorMapTiled};

/// Dimensions of a tensor at most.
const MAX_RANK: u32 = 5;

/// What a program says of a tensor.
struct Said {
    data_type: u32,
    rank: u32,
    address: *mut c_void,
    sizes: *const u64,
    strides: *const u64,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    l2_promotion: u32,
    fill: u32,
}

unsafe fn list<T: Copy>(from: *const T, len: usize) -> Result<Vec<T>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    non_null(from)?;
    // SAFETY: the program gives `len` entries.
    Ok(unsafe { std::slice::from_raw_parts(from, len) }.to_vec())
}

impl Said {
    unsafe fn read(&self) -> Result<Tensor> {
        if !(1..=MAX_RANK).contains(&self.rank) {
            return Err(Status::INVALID_VALUE);
        }
        let rank = self.rank as usize;
        // SAFETY: the program gives lists as long as the tensor has dimensions, strides for all but the first.
        unsafe {
            Ok(Tensor {
                data_type: self.data_type,
                address: self.address as u64,
                sizes: list(self.sizes, rank)?,
                strides: list(self.strides, rank - 1)?,
                steps: list(self.steps, rank)?,
                interleave: self.interleave,
                swizzle: self.swizzle,
                l2_promotion: self.l2_promotion,
                fill: self.fill,
            })
        }
    }
}

api! {
    fn cuTensorMapEncodeTiled(
        map: *mut [u8; 128], data_type: u32, rank: u32, address: *mut c_void, sizes: *const u64, strides: *const u64, box_sizes: *const u32,
        steps: *const u32, interleave: u32, swizzle: u32, l2_promotion: u32, fill: u32
    ) {
        non_null(map)?;
        let (driver, context) = context::ready()?;
        let tensor =
            Said { data_type, rank, address, sizes, strides, steps, interleave, swizzle, l2_promotion, fill }.read()?;
        let box_sizes = list(box_sizes, rank as usize)?;
        map.write(driver.session.call(&TensorMapTiled { context: context.id, tensor, box_sizes })?.map);
        Ok(())
    }

    fn cuTensorMapEncodeIm2col(
        map: *mut [u8; 128], data_type: u32, rank: u32, address: *mut c_void, sizes: *const u64, strides: *const u64, lower: *const i32,
        upper: *const i32, channels: u32, pixels: u32, steps: *const u32, interleave: u32, swizzle: u32, l2_promotion: u32, fill: u32
    ) {
        non_null(map)?;
        let (driver, context) = context::ready()?;
        let tensor =
            Said { data_type, rank, address, sizes, strides, steps, interleave, swizzle, l2_promotion, fill }.read()?;
        let corners = (rank as usize).checked_sub(2).ok_or(Status::INVALID_VALUE)?;
        let (lower, upper) = (list(lower, corners)?, list(upper, corners)?);
        let request = TensorMapIm2col { context: context.id, tensor, lower, upper, channels, pixels };
        map.write(driver.session.call(&request)?.map);
        Ok(())
    }

    fn cuTensorMapReplaceAddress(map: *mut [u8; 128], address: *mut c_void) {
        non_null(map)?;
        let (driver, context) = context::ready()?;
        let request = TensorMapReplaceAddress { context: context.id, map: map.read(), address: address as u64 };
        map.write(driver.session.call(&request)?.map);
        Ok(())
    }
}
