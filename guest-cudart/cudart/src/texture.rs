//! Texture and surface objects: conversion between the runtime's descriptions and the driver's.

use std::ffi::c_uint;
use std::mem::transmute_copy;
use std::ptr;

use crate::arguments::{In, Out};
use crate::array::{channel_desc, driver_format};
use crate::error::{Error, Result};
use crate::types::{
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, ChannelFormatDesc, ResourceDesc,
    ResourceViewDesc, TextureDesc,
};

/// `cudaResourceType`, the same in both APIs.
mod resource {
    pub(super) const ARRAY: u32 = 0;
    pub(super) const MIPMAPPED_ARRAY: u32 = 1;
    pub(super) const LINEAR: u32 = 2;
    pub(super) const PITCH_2D: u32 = 3;
}

/// The driver's texture flags.
mod flag {
    pub(super) const READ_AS_INTEGER: u32 = 0x01;
    pub(super) const NORMALIZED_COORDINATES: u32 = 0x02;
    pub(super) const SRGB: u32 = 0x10;
    pub(super) const DISABLE_TRILINEAR_OPTIMIZATION: u32 = 0x20;
    pub(super) const SEAMLESS_CUBEMAP: u32 = 0x40;
}

/// For linear memory, the runtime's words hold: address; format, x and y; z and w; kind; then sizes. The
/// driver's hold: address; format and channels; then sizes.
fn to_driver(desc: &ResourceDesc) -> Result<CUDA_RESOURCE_DESC> {
    let mut out = CUDA_RESOURCE_DESC { kind: desc.kind, ..CUDA_RESOURCE_DESC::default() };
    #[cfg(not(feature = "v12"))]
    {
        out.flags = desc.flags;
    }
    out.res[0] = desc.res[0];
    let sizes = match desc.kind {
        resource::ARRAY | resource::MIPMAPPED_ARRAY => return Ok(out),
        resource::LINEAR => 1,
        resource::PITCH_2D => 3,
        _ => return Err(Error::INVALID_VALUE),
    };
    // SAFETY: the 20 bytes after the address are a channel description: five integers, for which any bits are
    // valid.
    let format: ChannelFormatDesc = unsafe { transmute_copy(&[desc.res[1], desc.res[2], desc.res[3]]) };
    let (format, channels) = driver_format(&format)?;
    out.res[1] = u64::from(format) | u64::from(channels) << 32;
    out.res[2..2 + sizes].copy_from_slice(&desc.res[4..4 + sizes]);
    Ok(out)
}

fn to_runtime(desc: &CUDA_RESOURCE_DESC) -> ResourceDesc {
    let mut out = ResourceDesc {
        kind: desc.kind,
        res: [0; _],
        #[cfg(not(feature = "v12"))]
        flags: desc.flags,
    };
    out.res[0] = desc.res[0];
    let sizes = match desc.kind {
        resource::LINEAR => 1,
        resource::PITCH_2D => 3,
        _ => return out,
    };
    let format = channel_desc(desc.res[1] as u32, (desc.res[1] >> 32) as u32);
    let pair = |low: i32, high: i32| u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32;
    out.res[1..4].copy_from_slice(&[pair(format.x, format.y), pair(format.z, format.w), u64::from(format.f)]);
    out.res[4..4 + sizes].copy_from_slice(&desc.res[2..2 + sizes]);
    out
}

fn texture_to_driver(t: &TextureDesc) -> CUDA_TEXTURE_DESC {
    const ELEMENT_TYPE: c_uint = 0;
    let set = |on: bool, flag: u32| if on { flag } else { 0 };
    CUDA_TEXTURE_DESC {
        address_mode: t.address_mode,
        filter_mode: t.filter_mode,
        flags: set(t.read_mode == ELEMENT_TYPE, flag::READ_AS_INTEGER)
            | set(t.normalized_coords != 0, flag::NORMALIZED_COORDINATES)
            | set(t.srgb != 0, flag::SRGB)
            | set(t.disable_trilinear_optimization != 0, flag::DISABLE_TRILINEAR_OPTIMIZATION)
            | set(t.seamless_cubemap != 0, flag::SEAMLESS_CUBEMAP),
        max_anisotropy: t.max_anisotropy,
        mipmap_filter_mode: t.mipmap_filter_mode,
        mipmap_level_bias: t.mipmap_level_bias,
        min_mipmap_level_clamp: t.min_mipmap_level_clamp,
        max_mipmap_level_clamp: t.max_mipmap_level_clamp,
        border_color: t.border_color,
        reserved: [0; 12],
    }
}

fn texture_to_runtime(t: &CUDA_TEXTURE_DESC) -> TextureDesc {
    let is = |flag: u32| i32::from(t.flags & flag != 0);
    TextureDesc {
        address_mode: t.address_mode,
        filter_mode: t.filter_mode,
        read_mode: u32::from(t.flags & flag::READ_AS_INTEGER == 0),
        srgb: is(flag::SRGB),
        border_color: t.border_color,
        normalized_coords: is(flag::NORMALIZED_COORDINATES),
        max_anisotropy: t.max_anisotropy,
        mipmap_filter_mode: t.mipmap_filter_mode,
        mipmap_level_bias: t.mipmap_level_bias,
        min_mipmap_level_clamp: t.min_mipmap_level_clamp,
        max_mipmap_level_clamp: t.max_mipmap_level_clamp,
        disable_trilinear_optimization: is(flag::DISABLE_TRILINEAR_OPTIMIZATION),
        seamless_cubemap: is(flag::SEAMLESS_CUBEMAP),
    }
}

api! {
    ctx unsafe fn cudaCreateTextureObject(object: *mut u64, resource: In<ResourceDesc>, texture: In<TextureDesc>,
        view: In<ResourceViewDesc>) |d| {
        let resource = to_driver(&resource.get()?)?;
        let texture = texture_to_driver(&texture.get()?);
        let view = view.optional().map(|view| CUDA_RESOURCE_VIEW_DESC { view, reserved: [0; 16] });
        d.cuTexObjectCreate(object, &resource, &texture, view.as_ref().map_or(ptr::null(), ptr::from_ref))
    };
    ctx unsafe fn cudaDestroyTextureObject(object: u64) |d| {
        if object == 0 { return Ok(()) }
        d.cuTexObjectDestroy(object)
    };
    ctx unsafe fn cudaGetTextureObjectResourceDesc(out: Out<ResourceDesc>, object: u64) |d| {
        out.required()?;
        let mut desc = CUDA_RESOURCE_DESC::default();
        d.cuTexObjectGetResourceDesc(&mut desc, object)?;
        out.put(to_runtime(&desc))
    };
    ctx unsafe fn cudaGetTextureObjectTextureDesc(out: Out<TextureDesc>, object: u64) |d| {
        out.required()?;
        let mut desc = CUDA_TEXTURE_DESC::default();
        d.cuTexObjectGetTextureDesc(&mut desc, object)?;
        out.put(texture_to_runtime(&desc))
    };
    ctx unsafe fn cudaGetTextureObjectResourceViewDesc(out: Out<ResourceViewDesc>, object: u64) |d| {
        out.required()?;
        let mut desc = CUDA_RESOURCE_VIEW_DESC::default();
        d.cuTexObjectGetResourceViewDesc(&mut desc, object)?;
        out.put(desc.view)
    };
    ctx unsafe fn cudaCreateSurfaceObject(object: *mut u64, resource: In<ResourceDesc>) |d| {
        let resource = to_driver(&resource.get()?)?;
        d.cuSurfObjectCreate(object, &resource)
    };
    ctx unsafe fn cudaDestroySurfaceObject(object: u64) |d| {
        if object == 0 { return Ok(()) }
        d.cuSurfObjectDestroy(object)
    };
    ctx unsafe fn cudaGetSurfaceObjectResourceDesc(out: Out<ResourceDesc>, object: u64) |d| {
        out.required()?;
        let mut desc = CUDA_RESOURCE_DESC::default();
        d.cuSurfObjectGetResourceDesc(&mut desc, object)?;
        out.put(to_runtime(&desc))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pitched_resource_converts_to_the_driver_and_back() {
        let mut desc =
            ResourceDesc { kind: resource::PITCH_2D, ..to_runtime(&CUDA_RESOURCE_DESC::default()) };
        desc.res[..7].copy_from_slice(&[0x7000, 32 | 32 << 32, 0, 2, 64, 48, 512]);
        let driver = to_driver(&desc).unwrap();
        assert_eq!(driver.res[..5], [0x7000, 0x20 | 2 << 32, 64, 48, 512]);
        assert_eq!(to_runtime(&driver).res[..7], desc.res[..7]);
    }

    #[test]
    fn texture_flags_convert_to_the_driver_and_back() {
        let mut texture = texture_to_runtime(&CUDA_TEXTURE_DESC::default());
        (texture.read_mode, texture.srgb, texture.normalized_coords, texture.seamless_cubemap) = (0, 1, 1, 0);
        let back = texture_to_runtime(&texture_to_driver(&texture));
        assert_eq!((back.read_mode, back.srgb, back.normalized_coords, back.seamless_cubemap), (0, 1, 1, 0));
    }
}
