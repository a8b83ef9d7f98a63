//! Texture and surface objects.

use crate::abi::arguments::{In, Out};
use crate::abi::result::Result;
use crate::abi::types::{ResourceDesc, TextureDesc, ViewDesc};
use crate::memory::texture::{self, Made, OF_ARRAY, OF_LINEAR, OF_ROWS, Object};
use crate::process::context;
use crate::process::driver::{self, driver};
use client::ops::array::{Sampling, SurfaceCreate, TextureCreate, TextureLinearWidth, View};
use client::{Status, lock};

pub(crate) fn texture_of(handle: u64) -> Result<Made> {
    driver()?;
    texture::texture(handle)
}

api! {
    fn cuTexObjectCreate(object: Out<u64>, desc: In<ResourceDesc>, texture: In<TextureDesc>, view: In<ViewDesc>) {
        object.required()?;
        desc.required()?;
        texture.required()?;
        let (driver, context) = context::ready()?;
        let (desc, texture) = (desc.get()?, texture.get()?);
        let view = view.optional();
        let resource = texture::resource(driver, context, &desc)?;
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
        texture::reap(context.server);
        let operation = TextureCreate { context: context.id, resource, sampling, view: seen };
        let request = texture::request(driver, &operation);
        let handle = match request.as_ref().and_then(|request| texture::again(context, request)) {
            Some(handle) => handle,
            None => context.session().call(&operation)?.texture,
        };
        let made = Made { context, resource: desc, texture: Some(texture), view, request };
        lock(texture::objects()).textures.insert((context.unique, handle), made);
        object.put(handle)
    }

    fn cuTexObjectDestroy(object: u64) {
        driver()?;
        let context = texture_of(object)?.context;
        context.session().check()?;
        let deferred = context.deferred();
        let made = lock(texture::objects()).textures.remove(&(context.unique, object));
        let request = made.ok_or(Status::INVALID_VALUE)?.request;
        texture::end(context, Object::Texture(object), request).and(deferred)
    }

    fn cuTexObjectGetResourceDesc(desc: Out<ResourceDesc>, object: u64) {
        desc.required()?;
        desc.put(texture_of(object)?.resource)
    }

    fn cuTexObjectGetTextureDesc(desc: Out<TextureDesc>, object: u64) {
        desc.required()?;
        desc.put(texture_of(object)?.texture.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuTexObjectGetResourceViewDesc(desc: Out<ViewDesc>, object: u64) {
        desc.required()?;
        desc.put(texture_of(object)?.view.ok_or(Status::INVALID_VALUE)?)
    }

    fn cuSurfObjectCreate(object: Out<u64>, desc: In<ResourceDesc>) {
        object.required()?;
        desc.required()?;
        let (driver, context) = context::ready()?;
        let desc = desc.get()?;
        if desc.kind != OF_ARRAY {
            return Err(Status::INVALID_VALUE);
        }
        let array = texture::resource(driver, context, &desc)?.array;
        texture::reap(context.server);
        let made = context.session().call(&SurfaceCreate { context: context.id, array })?;
        lock(texture::objects()).surfaces.insert((context.unique, made.surface), Made { context, resource: desc, texture: None, view: None, request: None });
        object.put(made.surface)
    }

    fn cuSurfObjectDestroy(object: u64) {
        driver()?;
        let context = texture::surface(object)?.context;
        context.session().check()?;
        let deferred = context.deferred();
        lock(texture::objects()).surfaces.remove(&(context.unique, object)).ok_or(Status::INVALID_VALUE)?;
        texture::end(context, Object::Surface(object), None).and(deferred)
    }

    fn cuSurfObjectGetResourceDesc(desc: Out<ResourceDesc>, object: u64) {
        desc.required()?;
        driver()?;
        let made = texture::surface(object)?;
        desc.put(made.resource)
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(width: Out<usize>, format: u32, channels: u32, device: i32) {
        width.required()?;
        let device = driver::device(device)?;
        let question = TextureLinearWidth { device: device.number, format, channels };
        let found = device.server.session.call(&question)?;
        width.put(found.width as usize)
    }
}
