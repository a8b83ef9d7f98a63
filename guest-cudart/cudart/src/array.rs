//! Arrays and mipmapped arrays, and how the element formats of the two APIs correspond.

use std::ffi::{c_int, c_uint};

use crate::arguments::{In, Out};
use crate::call_counts::{Call, Inside};
use crate::context;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::types::{
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY_SPARSE_PROPERTIES, CUDA_ARRAY3D_DESCRIPTOR, CUarray,
    CUmipmappedArray, ChannelFormatDesc, Extent,
};

const SIGNED: c_uint = 0;
const UNSIGNED: c_uint = 1;
const FLOAT: c_uint = 2;
const NV12: c_uint = 4;

/// Formats that fix everything by themselves: the runtime's kind, the bits of each channel, the driver's
/// format, the number of channels.
const NAMED: &[(c_uint, [c_int; 4], c_uint, c_uint)] = &[
    (NV12, [8, 8, 8, 0], 0xb0, 3),
    (5, [8, 0, 0, 0], 0xc0, 1),
    (6, [8, 8, 0, 0], 0xc1, 2),
    (7, [8, 8, 8, 8], 0xc2, 4),
    (8, [16, 0, 0, 0], 0xc3, 1),
    (9, [16, 16, 0, 0], 0xc4, 2),
    (10, [16, 16, 16, 16], 0xc5, 4),
    (11, [8, 0, 0, 0], 0xc6, 1),
    (12, [8, 8, 0, 0], 0xc7, 2),
    (13, [8, 8, 8, 8], 0xc8, 4),
    (14, [16, 0, 0, 0], 0xc9, 1),
    (15, [16, 16, 0, 0], 0xca, 2),
    (16, [16, 16, 16, 16], 0xcb, 4),
    (17, [8, 8, 8, 8], 0x91, 4),
    (18, [8, 8, 8, 8], 0x92, 4),
    (19, [8, 8, 8, 8], 0x93, 4),
    (20, [8, 8, 8, 8], 0x94, 4),
    (21, [8, 8, 8, 8], 0x95, 4),
    (22, [8, 8, 8, 8], 0x96, 4),
    (23, [8, 0, 0, 0], 0x97, 1),
    (24, [8, 0, 0, 0], 0x98, 1),
    (25, [8, 8, 0, 0], 0x99, 2),
    (26, [8, 8, 0, 0], 0x9a, 2),
    (27, [16, 16, 16, 0], 0x9b, 3),
    (28, [16, 16, 16, 0], 0x9c, 3),
    (29, [8, 8, 8, 8], 0x9d, 4),
    (30, [8, 8, 8, 8], 0x9e, 4),
    (31, [10, 10, 10, 2], 0x50, 4),
];

/// Formats of one to four equal channels: the runtime's kind, the bits of a channel, the driver's format.
const PLAIN: &[(c_uint, c_int, c_uint)] = &[
    (UNSIGNED, 8, 0x01),
    (UNSIGNED, 16, 0x02),
    (UNSIGNED, 32, 0x03),
    (SIGNED, 8, 0x08),
    (SIGNED, 16, 0x09),
    (SIGNED, 32, 0x0a),
    (FLOAT, 16, 0x10),
    (FLOAT, 32, 0x20),
];

/// The driver's format and number of channels.
///
/// # Errors
///
/// `cudaErrorInvalidChannelDescriptor` if the channels differ in size, have gaps, or have a size that no
/// format has.
pub(crate) fn driver_format(desc: &ChannelFormatDesc) -> Result<(c_uint, c_uint)> {
    if let Some(named) = NAMED.iter().find(|named| named.0 == desc.f) {
        return Ok((named.2, named.3));
    }
    let bits = [desc.x, desc.y, desc.z, desc.w];
    let channels = bits.iter().take_while(|&&bits| bits != 0).count();
    let even =
        bits[..channels].iter().all(|&bits| bits == desc.x) && bits[channels..].iter().all(|&bits| bits == 0);
    let plain = PLAIN.iter().find(|plain| plain.0 == desc.f && plain.1 == desc.x);
    match (plain, channels) {
        (Some(plain), 1 | 2 | 4) if even => Ok((plain.2, channels as c_uint)),
        _ => Err(Error::INVALID_CHANNEL_DESCRIPTOR),
    }
}

/// The runtime's description of a driver format. The kind is "none" for formats that the runtime has no name
/// for.
pub(crate) fn channel_desc(format: c_uint, channels: c_uint) -> ChannelFormatDesc {
    const NONE: c_uint = 3;
    if let Some(named) = NAMED.iter().find(|named| named.2 == format) {
        let [x, y, z, w] = named.1;
        return ChannelFormatDesc { x, y, z, w, f: named.0 };
    }
    let Some(plain) = PLAIN.iter().find(|plain| plain.2 == format) else {
        return ChannelFormatDesc { x: 0, y: 0, z: 0, w: 0, f: NONE };
    };
    let bits = |channel| if channels > channel { plain.1 } else { 0 };
    ChannelFormatDesc { x: bits(0), y: bits(1), z: bits(2), w: bits(3), f: plain.0 }
}

/// Bytes per element, for the formats whose copies are counted in elements.
fn element_size(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<usize> {
    let channel = match descriptor.format {
        0x01 | 0x08 | 0xc0 | 0xc1 | 0xc2 | 0xc6 | 0xc7 | 0xc8 | 0xb0 => 1,
        0x02 | 0x09 | 0x10 | 0xc3 | 0xc4 | 0xc5 | 0xc9 | 0xca | 0xcb => 2,
        0x03 | 0x0a | 0x20 => 4,
        // Block-compressed formats: one element is a block of 4 × 4 texels.
        0x91 | 0x92 | 0x97 | 0x98 => return Ok(8),
        0x93..=0x96 | 0x99..=0x9e => return Ok(16),
        0x50 => return Ok(4),
        _ => return Err(Error::INVALID_CHANNEL_DESCRIPTOR),
    };
    Ok(channel * descriptor.num_channels as usize)
}

/// An array's description, in the driver's terms.
pub(crate) fn descriptor(d: &Driver, array: CUarray) -> Result<CUDA_ARRAY3D_DESCRIPTOR> {
    let mut descriptor = CUDA_ARRAY3D_DESCRIPTOR::default();
    // SAFETY: the output is a live local variable; the driver checks the array.
    unsafe { d.cuArray3DGetDescriptor_v2(&mut descriptor, array)? };
    Ok(descriptor)
}

/// Bytes per element of an array.
pub(crate) fn element_bytes(d: &Driver, array: CUarray) -> Result<usize> {
    element_size(&descriptor(d, array)?)
}

pub(crate) fn describe(
    desc: &ChannelFormatDesc,
    extent: Extent,
    flags: c_uint,
) -> Result<CUDA_ARRAY3D_DESCRIPTOR> {
    let (format, num_channels) = driver_format(desc)?;
    let Extent { width, height, depth } = extent;
    Ok(CUDA_ARRAY3D_DESCRIPTOR { width, height, depth, format, num_channels, flags })
}

api! {
    ctx unsafe fn cudaMallocArray(array: *mut CUarray, desc: In<ChannelFormatDesc>, width: usize, height: usize,
        flags: c_uint) |d| {
        d.cuArray3DCreate_v2(array, &describe(&desc.get()?, Extent { width, height, depth: 0 }, flags)?)
    };
    ctx unsafe fn cudaMalloc3DArray(array: *mut CUarray, desc: In<ChannelFormatDesc>, extent: Extent, flags: c_uint) |d| {
        d.cuArray3DCreate_v2(array, &describe(&desc.get()?, extent, flags)?)
    };
    ctx unsafe fn cudaMallocMipmappedArray(
        array: *mut CUmipmappedArray, desc: In<ChannelFormatDesc>, extent: Extent, levels: c_uint,
            flags: c_uint) |d| {
        d.cuMipmappedArrayCreate(array, &describe(&desc.get()?, extent, flags)?, levels)
    };
    ctx unsafe fn cudaFreeArray(array: CUarray) |d| {
        if array.is_null() { return Ok(()) }
        d.cuArrayDestroy(array)
    };
    ctx unsafe fn cudaFreeMipmappedArray(array: CUmipmappedArray) |d| {
        if array.is_null() { return Ok(()) }
        d.cuMipmappedArrayDestroy(array)
    };
    ctx cudaGetMipmappedArrayLevel => cuMipmappedArrayGetLevel(level: *mut CUarray, array: CUmipmappedArray,
        index: c_uint);
    ctx cudaArrayGetPlane => cuArrayGetPlane(plane: *mut CUarray, array: CUarray, index: c_uint);
    ctx fn cudaArrayGetInfo(desc: Out<ChannelFormatDesc>, extent: Out<Extent>, flags: Out<c_uint>,
        array: CUarray) |d| {
        let found = descriptor(d, array)?;
        desc.put_if_wanted(channel_desc(found.format, found.num_channels));
        extent.put_if_wanted(Extent { width: found.width, height: found.height, depth: found.depth });
        flags.put_if_wanted(found.flags);
        Ok(())
    };
    ctx fn cudaGetChannelDesc(desc: Out<ChannelFormatDesc>, array: CUarray) |d| {
        desc.required()?;
        let found = descriptor(d, array)?;
        desc.put(channel_desc(found.format, found.num_channels))
    };
    init unsafe fn cudaArrayGetMemoryRequirements(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray,
        device: c_int) |d| {
        d.cuArrayGetMemoryRequirements(out, array, context::handle(d, device)?)
    };
    init unsafe fn cudaMipmappedArrayGetMemoryRequirements(
        out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUmipmappedArray, device: c_int) |d| {
        d.cuMipmappedArrayGetMemoryRequirements(out, array, context::handle(d, device)?)
    };
    ctx cudaArrayGetSparseProperties => cuArrayGetSparseProperties(out: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
        array: CUarray);
    ctx cudaMipmappedArrayGetSparseProperties => cuMipmappedArrayGetSparseProperties(
        out: *mut CUDA_ARRAY_SPARSE_PROPERTIES, array: CUmipmappedArray);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaCreateChannelDesc(
    x: c_int,
    y: c_int,
    z: c_int,
    w: c_int,
    f: c_uint,
) -> ChannelFormatDesc {
    static CALL: Call = Call::new(c"cudaCreateChannelDesc", None);
    let made = ChannelFormatDesc { x, y, z, w, f };
    let inside = Inside::new(&CALL);
    // The arguments are the structure's fields.
    inside.enter(|| made);
    inside.leave(0);
    made
}

/// The length of an array's row in bytes, and the number of rows.
pub(crate) fn rows(d: &Driver, array: CUarray) -> Result<(usize, usize)> {
    if array.is_null() {
        return Err(Error::INVALID_RESOURCE_HANDLE);
    }
    let found = descriptor(d, array)?;
    Ok((found.width * element_size(&found)?, found.height.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_convert_to_the_driver_and_back() {
        for &(f, bits, _) in PLAIN {
            for channels in [1, 2, 4] {
                let of = |channel| if channel < channels { bits } else { 0 };
                let desc = ChannelFormatDesc { x: of(0), y: of(1), z: of(2), w: of(3), f };
                let (format, count) = driver_format(&desc).unwrap();
                let back = channel_desc(format, count);
                assert_eq!(
                    (back.x, back.y, back.z, back.w, back.f),
                    (desc.x, desc.y, desc.z, desc.w, desc.f)
                );
            }
        }
        for &(f, _, format, channels) in NAMED {
            assert_eq!(channel_desc(format, channels).f, f);
        }
    }

    #[test]
    fn uneven_channels_are_refused() {
        let desc = |x, y, z, w| ChannelFormatDesc { x, y, z, w, f: FLOAT };
        for bad in
            [desc(32, 16, 0, 0), desc(32, 0, 32, 0), desc(32, 32, 32, 0), desc(64, 0, 0, 0), desc(0, 0, 0, 0)]
        {
            assert_eq!(driver_format(&bad), Err(Error::INVALID_CHANNEL_DESCRIPTOR));
        }
    }
}
