//! Arrays and mipmapped arrays.

use std::sync::{Arc, Mutex, Weak};

use crate::abi::arguments::{In, Out};
use crate::abi::result::Result;
use crate::abi::types::{Array3DDescriptor, ArrayDescriptor, Requirements};
use crate::memory::array::{self, ARRAYS, Array, End, MIPMAPPED, Mipmapped};
use crate::memory::{device_memory, stream_ordered};
use crate::process::capture;
use crate::process::context::{self, Context};
use crate::process::driver::{self, driver};
use crate::work::copy::{Copier, Mode};
use client::handle::ArrayId;
use client::ops::array::{ArrayCreate, ArrayDestroy, ArrayLevel, ArrayRequirements, ArrayShape, flag};
use client::{Status, lock};

fn create(to: Out<usize>, desc: &Array3DDescriptor) -> Result {
    to.required()?;
    let (_, context) = context::ready()?;
    let shape = array::shape(context, desc, false)?;
    capture::unsafe_call()?;
    let id = array::new_id();
    make(context, &ArrayCreate { context: context.id, array: id, shape: shape.clone(), levels: 0 })?;
    let made = ARRAYS.insert(Arc::new(Array { id, context, shape, level_of: None }));
    to.put(made.ok_or(Status::OUT_OF_MEMORY)?)
}

fn make(context: &Context, array: &ArrayCreate) -> Result {
    let device = driver::device(context.device as i32)?;
    device_memory::or_returned(device, || context.session().call(array).map(drop))
}

pub(crate) fn requirements(
    context: &Context,
    id: ArrayId,
    shape: &ArrayShape,
    device: i32,
    to: Out<Requirements>,
) -> Result {
    to.required()?;
    driver::device(device)?;
    // An array that already has memory needs none.
    if shape.flags & flag::DEFERRED_MAPPING == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let found = context.session().call(&ArrayRequirements { array: id })?;
    to.put(Requirements { size: found.size as usize, alignment: found.alignment as usize, reserved: [0; 4] })
}

pub(crate) fn described(shape: &ArrayShape) -> Array3DDescriptor {
    let [width, height, depth] = [shape.width, shape.height, shape.depth].map(|n| n as usize);
    Array3DDescriptor {
        width,
        height,
        depth,
        format: shape.format,
        channels: shape.channels,
        flags: shape.flags,
    }
}

api! {
    fn cuArrayCreate_v2(array: Out<usize>, desc: In<ArrayDescriptor>) {
        desc.required()?;
        let d = desc.get()?;
        create(array, &Array3DDescriptor { width: d.width, height: d.height, depth: 0, format: d.format, channels: d.channels, flags: 0 })
    }

    fn cuArray3DCreate_v2(array: Out<usize>, desc: In<Array3DDescriptor>) {
        desc.required()?;
        create(array, &desc.get()?)
    }

    fn cuArrayDestroy(handle: usize) {
        driver()?;
        let array = array::of(handle)?;
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_work(array.context)?;
        // For a level, only this handle is dropped: the program may request the level again.
        if let Some(whole) = array.level_of.as_ref().and_then(Weak::upgrade) {
            lock(&whole.told).retain(|(_, told)| *told != handle);
        }
        ARRAYS.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        array.context.session().append(&ArrayDestroy { array: array.id })?;
        waited
    }

    fn cuArrayGetDescriptor_v2(desc: Out<ArrayDescriptor>, array: usize) {
        desc.required()?;
        let d = described(&array::of(array)?.shape);
        desc.put(ArrayDescriptor { width: d.width, height: d.height, format: d.format, channels: d.channels })
    }

    fn cuArray3DGetDescriptor_v2(desc: Out<Array3DDescriptor>, array: usize) {
        desc.required()?;
        desc.put(described(&array::of(array)?.shape))
    }

    fn cuArrayGetMemoryRequirements(to: Out<Requirements>, array: usize, device: i32) {
        let array = array::of(array)?;
        requirements(array.context, array.id, &array.shape, device, to)
    }

    fn cuMipmappedArrayCreate(array: Out<usize>, desc: In<Array3DDescriptor>, levels: u32) {
        array.required()?;
        desc.required()?;
        let (_, context) = context::ready()?;
        let shape = array::shape(context, &desc.get()?, true)?;
        capture::unsafe_call()?;
        // The number of levels is limited by how often the size can be halved.
        let levels = levels.clamp(1, shape.most_levels());
        let id = array::new_id();
        make(context, &ArrayCreate { context: context.id, array: id, shape: shape.clone(), levels })?;
        let made = MIPMAPPED.insert(Arc::new(Mipmapped { id, context, shape, levels, told: Mutex::default() }));
        array.put(made.ok_or(Status::OUT_OF_MEMORY)?)
    }

    fn cuMipmappedArrayGetLevel(level: Out<usize>, array: usize, index: u32) {
        level.required()?;
        driver()?;
        let whole = array::mipmapped(array)?;
        if index >= whole.levels {
            return Err(Status::INVALID_VALUE);
        }
        let mut told = lock(&whole.told);
        if let Some((_, handle)) = told.iter().find(|(of, _)| *of == index) {
            return level.put(*handle);
        }
        let id = array::new_id();
        whole.context.session().call(&ArrayLevel { mipmapped: whole.id, level: index, array: id })?;
        let array = Array { id, context: whole.context, shape: whole.shape.level(index), level_of: Some(Arc::downgrade(&whole)) };
        let handle = ARRAYS.insert(Arc::new(array)).ok_or(Status::OUT_OF_MEMORY)?;
        told.push((index, handle));
        level.put(handle)
    }

    fn cuMipmappedArrayDestroy(handle: usize) {
        driver()?;
        let array = array::mipmapped(handle)?;
        capture::unsafe_call()?;
        let waited = stream_ordered::settle_work(array.context)?;
        MIPMAPPED.remove(handle).ok_or(Status::INVALID_HANDLE)?;
        for (_, level) in lock(&array.told).drain(..) {
            ARRAYS.remove(level);
        }
        array.context.session().append(&ArrayDestroy { array: array.id })?;
        waited
    }

    fn cuMipmappedArrayGetMemoryRequirements(to: Out<Requirements>, array: usize, device: i32) {
        let array = array::mipmapped(array)?;
        requirements(array.context, array.id, &array.shape, device, to)
    }

    unsafe fn cuMemcpyHtoA_v2 / cuMemcpyHtoA_v2_ptds(array: usize, offset: usize, host: usize, bytes: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(0, pt, Mode::Sync)?.row(array, offset, host as u64, bytes, true) }
    }

    unsafe fn cuMemcpyHtoAAsync_v2 / cuMemcpyHtoAAsync_v2_ptsz(array: usize, offset: usize, host: usize, bytes: usize, stream: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(stream, pt, Mode::Async)?.row(array, offset, host as u64, bytes, true) }
    }

    unsafe fn cuMemcpyAtoH_v2 / cuMemcpyAtoH_v2_ptds(host: usize, array: usize, offset: usize, bytes: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(0, pt, Mode::Sync)?.row(array, offset, host as u64, bytes, false) }
    }

    unsafe fn cuMemcpyAtoHAsync_v2 / cuMemcpyAtoHAsync_v2_ptsz(host: usize, array: usize, offset: usize, bytes: usize, stream: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(stream, pt, Mode::Async)?.row(array, offset, host as u64, bytes, false) }
    }

    unsafe fn cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds(array: usize, offset: usize, device: u64, bytes: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(0, pt, Mode::Sync)?.row(array, offset, device, bytes, true) }
    }

    unsafe fn cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds(device: u64, array: usize, offset: usize, bytes: usize) |pt| {
        // SAFETY: the program passes host memory of this length.
        unsafe { Copier::new(0, pt, Mode::Sync)?.row(array, offset, device, bytes, false) }
    }

    fn cuMemcpyAtoA_v2 / cuMemcpyAtoA_v2_ptds(dst: usize, dst_offset: usize, src: usize, src_offset: usize, bytes: usize) |pt| {
        let end = |array, offset: usize| Ok::<_, Status>(End::Array(array::of(array)?, [offset as u64, 0, 0]));
        let (dst, src) = (end(dst, dst_offset)?, end(src, src_offset)?);
        if bytes == 0 {
            return Ok(());
        }
        Copier::new(0, pt, Mode::Sync)?.with_array(&dst, &src, [bytes as u64, 1, 1])
    }
}
