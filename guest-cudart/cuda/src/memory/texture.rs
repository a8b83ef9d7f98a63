//! Textures and surfaces. Their handles are the numbers that the server's driver made: kernels are given them as they are.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::memory::{address, array};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::{context, driver};
use client::handle::ArrayId;
use client::ops::array::{
    ArrayShape, Resource, Sampling, SurfaceCreate, SurfaceDestroy, TextureCreate, TextureDestroy,
    TextureLinearWidth, View,
};
use client::{Status, lock};

/// `CUDA_RESOURCE_DESC`, whose union is words: an array's handle in the first; or address, format and channels, and sizes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ResourceDesc {
    kind: u32,
    words: [u64; 16],
    flags: u32,
}

/// `CUDA_TEXTURE_DESC`, floating-point numbers as their bits.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TextureDesc {
    address: [u32; 3],
    filter: u32,
    flags: u32,
    anisotropy: u32,
    level_filter: u32,
    level_bias: u32,
    level_clamp: [u32; 2],
    border: [u32; 4],
    reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ViewDesc {
    format: u32,
    extent: [usize; 3],
    levels: [u32; 2],
    layers: [u32; 2],
    reserved: [u32; 16],
}

/// `CUresourcetype`.
const OF_ARRAY: u32 = 0;

const OF_MIPMAPPED: u32 = 1;

const OF_LINEAR: u32 = 2;

const OF_ROWS: u32 = 3;

/// What a texture or a surface was made of.
#[derive(Clone, Copy)]
struct Made {
    context: &'static Context,
    resource: ResourceDesc,
    texture: Option<TextureDesc>,
    view: Option<ViewDesc>,
}

/// Those of the process, by handle: textures and surfaces number apart.
#[derive(Default)]
struct Objects {
    textures: HashMap<u64, Made>,
    surfaces: HashMap<u64, Made>,
}

fn objects() -> &'static Mutex<Objects> {
    static OBJECTS: OnceLock<Mutex<Objects>> = OnceLock::new();
    OBJECTS.get_or_init(Mutex::default)
}

/// The server's objects of a context are destroyed with it, or now.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    let gone = |_: &u64, made: &mut Made| std::ptr::eq(made.context, context);
    let mut objects = lock(objects());
    let textures: Vec<u64> = objects.textures.extract_if(gone).map(|(texture, _)| texture).collect();
    let surfaces: Vec<u64> = objects.surfaces.extract_if(gone).map(|(surface, _)| surface).collect();
    if !with_server {
        // A lost session has none.
        for texture in textures {
            let _ = driver.session.append(&TextureDestroy { texture });
        }
        for surface in surfaces {
            let _ = driver.session.append(&SurfaceDestroy { surface });
        }
    }
}

/// What a program describes, checked as far as this side knows.
fn resource(driver: &Driver, context: &'static Context, desc: &ResourceDesc) -> Result<Resource> {
    if desc.flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let mut resource = Resource {
        kind: desc.kind,
        array: ArrayId(0),
        address: 0,
        format: 0,
        channels: 0,
        width: 0,
        height: 0,
        pitch: 0,
    };
    match desc.kind {
        OF_ARRAY => {
            let array = array::of(desc.words[0] as usize)?;
            if !std::ptr::eq(array.context, context) {
                return Err(Status::INVALID_CONTEXT);
            }
            resource.array = array.id;
        }
        OF_MIPMAPPED => {
            let array = array::mipmapped(desc.words[0] as usize)?;
            if !std::ptr::eq(array.context, context) {
                return Err(Status::INVALID_CONTEXT);
            }
            resource.array = array.id;
        }
        OF_LINEAR | OF_ROWS => {
            resource.address = desc.words[0];
            (resource.format, resource.channels) = (desc.words[1] as u32, (desc.words[1] >> 32) as u32);
            let shape = ArrayShape {
                width: 1,
                height: 0,
                depth: 0,
                format: resource.format,
                channels: resource.channels,
                flags: 0,
            };
            let element = shape.element_bytes().ok_or(Status::INVALID_VALUE)?;
            let span = if desc.kind == OF_LINEAR {
                (resource.width, resource.height) = (desc.words[2] / element, 1);
                desc.words[2]
            } else {
                [resource.width, resource.height, resource.pitch] =
                    [desc.words[2], desc.words[3], desc.words[4]];
                let row = resource.width.checked_mul(element).ok_or(Status::INVALID_VALUE)?;
                if resource.width == 0 || resource.height == 0 || resource.pitch < row {
                    return Err(Status::INVALID_VALUE);
                }
                let rows = resource.pitch.checked_mul(resource.height - 1).ok_or(Status::INVALID_VALUE)?;
                rows.checked_add(row).ok_or(Status::INVALID_VALUE)?
            };
            if resource.width == 0 {
                return Err(Status::INVALID_VALUE);
            }
            address::check(driver, resource.address, span)?;
        }
        _ => return Err(Status::INVALID_VALUE),
    }
    Ok(resource)
}

fn texture_of(handle: u64) -> Result<Made> {
    driver()?;
    lock(objects()).textures.get(&handle).copied().ok_or(Status::INVALID_VALUE)
}

api! {
    fn cuTexObjectCreate(object: *mut u64, desc: *const ResourceDesc, texture: *const TextureDesc, view: *const ViewDesc) {
        non_null(object)?;
        non_null(desc)?;
        non_null(texture)?;
        let (driver, context) = context::ready()?;
        let (desc, texture) = (*desc, *texture);
        let view = if view.is_null() { None } else { Some(*view) };
        let resource = resource(driver, context, &desc)?;
        if view.is_some() && matches!(desc.kind, OF_LINEAR | OF_ROWS) {
            return Err(Status::INVALID_VALUE);
        }
        let sampling = Sampling {
            address: texture.address,
            filter: texture.filter,
            flags: texture.flags,
            anisotropy: texture.anisotropy,
            level_filter: texture.level_filter,
            level_bias: texture.level_bias,
            level_clamp: texture.level_clamp,
            border: texture.border,
        };
        let seen = view.map(|view| View {
            format: view.format,
            extent: view.extent.map(|size| size as u64),
            levels: view.levels,
            layers: view.layers,
        });
        let made = driver.session.call(&TextureCreate { context: context.id, resource, sampling, view: seen })?;
        lock(objects()).textures.insert(made.texture, Made { context, resource: desc, texture: Some(texture), view });
        put(object, made.texture)
    }

    fn cuTexObjectDestroy(object: u64) {
        let driver = driver()?;
        let made = texture_of(object)?;
        made.context.synchronize()?;
        lock(objects()).textures.remove(&object).ok_or(Status::INVALID_VALUE)?;
        driver.session.append(&TextureDestroy { texture: object }).map(|_| ())
    }

    fn cuTexObjectGetResourceDesc(desc: *mut ResourceDesc, object: u64) {
        non_null(desc)?;
        put(desc, texture_of(object)?.resource)
    }

    fn cuTexObjectGetTextureDesc(desc: *mut TextureDesc, object: u64) {
        non_null(desc)?;
        put(desc, texture_of(object)?.texture.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuTexObjectGetResourceViewDesc(desc: *mut ViewDesc, object: u64) {
        non_null(desc)?;
        put(desc, texture_of(object)?.view.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuSurfObjectCreate(object: *mut u64, desc: *const ResourceDesc) {
        non_null(object)?;
        non_null(desc)?;
        let (driver, context) = context::ready()?;
        let desc = *desc;
        if desc.kind != OF_ARRAY {
            return Err(Status::INVALID_VALUE);
        }
        let array = resource(driver, context, &desc)?.array;
        let made = driver.session.call(&SurfaceCreate { context: context.id, array })?;
        lock(objects()).surfaces.insert(made.surface, Made { context, resource: desc, texture: None, view: None });
        put(object, made.surface)
    }

    fn cuSurfObjectDestroy(object: u64) {
        let driver = driver()?;
        let made = lock(objects()).surfaces.get(&object).copied().ok_or(Status::INVALID_VALUE)?;
        made.context.synchronize()?;
        lock(objects()).surfaces.remove(&object).ok_or(Status::INVALID_VALUE)?;
        driver.session.append(&SurfaceDestroy { surface: object }).map(|_| ())
    }

    fn cuSurfObjectGetResourceDesc(desc: *mut ResourceDesc, object: u64) {
        non_null(desc)?;
        driver()?;
        let made = lock(objects()).surfaces.get(&object).copied().ok_or(Status::INVALID_VALUE)?;
        put(desc, made.resource)
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(width: *mut usize, format: u32, channels: u32, device: i32) {
        non_null(width)?;
        let device = driver::device(device)?.ordinal;
        let found = driver()?.session.call(&TextureLinearWidth { device, format, channels })?;
        put(width, found.width as usize)
    }
}
