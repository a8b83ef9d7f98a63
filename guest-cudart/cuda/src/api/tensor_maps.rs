//! Tensor maps. The server's driver encodes them, because their format is private to it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex};

use crate::abi::arguments::{Array, InOut, Out};
use crate::abi::result::Result;
use crate::process::context::{self, Context};
use client::ops::texture::{
    Tensor, TensorMapIm2col, TensorMapIm2colWide, TensorMapReplaceAddress, TensorMapTiled,
};
use client::ops::{SyncOp, encode};
use client::{Status, lock};

/// Maximum number of dimensions of a tensor.
const MAX_RANK: u32 = 5;

/// A program's description of a tensor.
struct TensorArguments<'a> {
    data_type: u32,
    rank: u32,
    address: *mut c_void,
    sizes: Array<'a, u64>,
    strides: Array<'a, u64>,
    steps: Array<'a, u32>,
    interleave: u32,
    swizzle: u32,
    l2_promotion: u32,
    fill: u32,
}

impl TensorArguments<'_> {
    /// # Safety
    /// The lists have one entry per dimension, the strides one fewer.
    unsafe fn read(&self) -> Result<Tensor> {
        if !(1..=MAX_RANK).contains(&self.rank) {
            return Err(Status::INVALID_VALUE);
        }
        let rank = self.rank as usize;
        // SAFETY: guaranteed by the caller.
        unsafe {
            Ok(Tensor {
                data_type: self.data_type,
                address: self.address as u64,
                sizes: self.sizes.first(rank)?.to_vec(),
                strides: self.strides.first(rank - 1)?.to_vec(),
                steps: self.steps.first(rank)?.to_vec(),
                interleave: self.interleave,
                swizzle: self.swizzle,
                l2_promotion: self.l2_promotion,
                fill: self.fill,
            })
        }
    }
}

/// A map.
type Map = [u8; 128];

/// What a map is made from: a device's ordinal, an opcode, and the operation.
type Request = (u32, u16, Vec<u8>);

/// The maps that servers have made. Each follows from its request alone, and programs make the same ones
/// before every launch.
static MADE: LazyLock<Mutex<HashMap<Request, Map>>> = LazyLock::new(Mutex::default);

/// How many maps are kept, of less than half a KiB each with their requests.
const MOST: usize = 8192;

/// Makes a map.
fn make<'a, T: SyncOp<'a>>(
    context: &Context,
    operation: &T,
    map: impl FnOnce(T::Reply) -> Map,
) -> Result<Map> {
    let mut bytes = Vec::new();
    encode(operation, &mut bytes);
    let request = (context.device, T::INFO.opcode, bytes);
    if let Some(map) = lock(&MADE).get(&request) {
        return Ok(*map);
    }
    let map = map(context.session().call(operation)?);
    let mut made = lock(&MADE);
    if made.len() >= MOST {
        made.clear();
    }
    made.insert(request, map);
    Ok(map)
}

api! {
    unsafe fn cuTensorMapEncodeTiled(
        map: Out<[u8; 128]>, data_type: u32, rank: u32, address: *mut c_void, sizes: Array<u64>, strides: Array<u64>, box_sizes: Array<u32>,
        steps: Array<u32>, interleave: u32, swizzle: u32, l2_promotion: u32, fill: u32
    ) {
        map.required()?;
        let (_, context) = context::ready()?;
        let said = TensorArguments { data_type, rank, address, sizes, strides, steps, interleave, swizzle, l2_promotion, fill };
        // SAFETY: the lists have one entry per dimension, by CUDA's manual.
        let tensor = unsafe { said.read() }?;
        // SAFETY: the lists have one entry per dimension, by CUDA's manual.
        let box_sizes = unsafe { box_sizes.first(rank as usize) }?.to_vec();
        let request = TensorMapTiled { context: context.id, tensor, box_sizes };
        map.put(make(context, &request, |reply| reply.map)?)
    }

    unsafe fn cuTensorMapEncodeIm2col(
        map: Out<[u8; 128]>, data_type: u32, rank: u32, address: *mut c_void, sizes: Array<u64>, strides: Array<u64>, lower: Array<i32>,
        upper: Array<i32>, channels: u32, pixels: u32, steps: Array<u32>, interleave: u32, swizzle: u32, l2_promotion: u32, fill: u32
    ) {
        map.required()?;
        let (_, context) = context::ready()?;
        let said = TensorArguments { data_type, rank, address, sizes, strides, steps, interleave, swizzle, l2_promotion, fill };
        // SAFETY: the lists have one entry per dimension, by CUDA's manual.
        let tensor = unsafe { said.read() }?;
        let corners = (rank as usize).checked_sub(2).ok_or(Status::INVALID_VALUE)?;
        // SAFETY: the lists have one entry per dimension, by CUDA's manual.
        let (lower, upper) = unsafe { (lower.first(corners)?.to_vec(), upper.first(corners)?.to_vec()) };
        let request = TensorMapIm2col { context: context.id, tensor, lower, upper, channels, pixels };
        map.put(make(context, &request, |reply| reply.map)?)
    }

    unsafe fn cuTensorMapEncodeIm2colWide(
        map: Out<[u8; 128]>, data_type: u32, rank: u32, address: *mut c_void, sizes: Array<u64>, strides: Array<u64>, lower: i32,
        upper: i32, channels: u32, pixels: u32, steps: Array<u32>, interleave: u32, mode: u32, swizzle: u32, l2_promotion: u32, fill: u32
    ) {
        map.required()?;
        let (_, context) = context::ready()?;
        let said = TensorArguments { data_type, rank, address, sizes, strides, steps, interleave, swizzle, l2_promotion, fill };
        // SAFETY: the lists have one entry per dimension, by CUDA's manual.
        let tensor = unsafe { said.read() }?;
        let corners = [lower, upper];
        let request = TensorMapIm2colWide { context: context.id, tensor, corners, channels, pixels, mode };
        map.put(make(context, &request, |reply| reply.map)?)
    }

    fn cuTensorMapReplaceAddress(map: InOut<[u8; 128]>, address: *mut c_void) {
        let old = map.get()?;
        let (_, context) = context::ready()?;
        let request = TensorMapReplaceAddress { context: context.id, map: old, address: address as u64 };
        map.put(make(context, &request, |reply| reply.map)?)
    }
}
