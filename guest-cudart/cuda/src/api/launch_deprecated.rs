//! Launches as before CUDA 4: the block, the shared memory and each parameter are first set on the function.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex};

use crate::abi::arguments::{Array, Count};
use crate::abi::result::Result;
use crate::api::execution;
use crate::code::library;
use crate::work::launch::Shape;
use client::{Status, lock};

/// Maximum bytes of parameters for these functions.
const MOST: usize = 4096;

/// What is set for the next launches of a function.
#[derive(Clone)]
struct Set {
    block: [u32; 3],
    shared: u32,
    parameters: Vec<u8>,
}

/// By function. Entries of unloaded functions do no harm.
static SETS: LazyLock<Mutex<HashMap<usize, Set>>> = LazyLock::new(Mutex::default);

fn set(handle: usize, change: impl FnOnce(&mut Set) -> Result) -> Result {
    library::of(handle)?;
    let mut sets = lock(&SETS);
    change(sets.entry(handle).or_insert(Set { block: [1; 3], shared: 0, parameters: Vec::new() }))
}

/// Sets some bytes of the parameters.
fn put(handle: usize, offset: i32, bytes: &[u8]) -> Result {
    let offset = usize::try_from(offset).map_err(|_| Status::INVALID_VALUE)?;
    let end = offset.checked_add(bytes.len()).filter(|end| *end <= MOST).ok_or(Status::INVALID_VALUE)?;
    set(handle, |set| {
        let size = set.parameters.len().max(end);
        set.parameters.resize(size, 0);
        set.parameters[offset..end].copy_from_slice(bytes);
        Ok(())
    })
}

fn run(handle: usize, width: i32, height: i32, stream: usize) -> Result {
    let size = |n: i32| u32::try_from(n).map_err(|_| Status::INVALID_VALUE);
    let grid = [size(width)?, size(height)?, 1];
    set(handle, |_| Ok(()))?;
    let known = lock(&SETS).get(&handle).cloned();
    let Set { block, shared, parameters } = known.ok_or(Status::INVALID_HANDLE)?;
    let mut len = parameters.len();
    // Keys 1 and 2: a buffer, and its size.
    let extra: [*mut c_void; 5] = [
        std::ptr::without_provenance_mut(1),
        parameters.as_ptr().cast_mut().cast(),
        std::ptr::without_provenance_mut(2),
        std::ptr::from_mut(&mut len).cast(),
        std::ptr::null_mut(),
    ];
    let shape = Shape { grid, block, shared };
    // SAFETY: a list of that form, which lives through the call.
    unsafe { execution::launch(handle, shape, stream, false, Vec::new(), std::ptr::null(), extra.as_ptr()) }
}

api! {
    fn cuFuncSetBlockShape(function: usize, x: i32, y: i32, z: i32) {
        let size = |n: i32| u32::try_from(n).ok().filter(|n| *n > 0).ok_or(Status::INVALID_VALUE);
        let block = [size(x)?, size(y)?, size(z)?];
        set(function, |set| {
            set.block = block;
            Ok(())
        })
    }

    fn cuFuncSetSharedSize(function: usize, bytes: u32) {
        set(function, |set| {
            set.shared = bytes;
            Ok(())
        })
    }

    fn cuParamSetSize(function: usize, bytes: u32) {
        if bytes as usize > MOST {
            return Err(Status::INVALID_VALUE);
        }
        set(function, |set| {
            set.parameters.resize(bytes as usize, 0);
            Ok(())
        })
    }

    fn cuParamSeti(function: usize, offset: i32, value: u32) {
        put(function, offset, &value.to_ne_bytes())
    }

    fn cuParamSetf(function: usize, offset: i32, value: f32) {
        put(function, offset, &value.to_ne_bytes())
    }

    fn cuParamSetv(function: usize, offset: i32, value: Array<u8>, bytes: Count<u32>) {
        put(function, offset, value.entries(bytes)?)
    }

    fn cuLaunch(function: usize) {
        run(function, 1, 1, 0)
    }

    fn cuLaunchGrid(function: usize, width: i32, height: i32) {
        run(function, width, height, 0)
    }

    fn cuLaunchGridAsync(function: usize, width: i32, height: i32, stream: usize) {
        run(function, width, height, stream)
    }
}
