//! Textures and surfaces. Their handles are those of the server's driver, because kernels use them directly.
//!
//! Destroying one does not wait for the work that uses it, as natively. The server learns of it when that
//! work is done ([`end`]): until then the object exists, and no other one gets its handle.
//!
//! Video filters make the same textures of a few buffers for every frame, and the handle has to be awaited.
//! So the server keeps the last destroyed textures of linear device memory, and whoever makes an equal one
//! gets it back ([`again`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::Result;
use crate::abi::types::{ResourceDesc, TextureDesc, ViewDesc};
use crate::memory::{address, array, device_memory, managed, pinned, pinned_regions};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server};
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::handle::ArrayId;
use client::ops::array::{ArrayShape, Resource, SurfaceDestroy, TextureCreate, TextureDestroy};
use client::ops::encode;
use client::seq::Seq;
use client::{Status, lock};

/// `CUresourcetype`.
pub(crate) const OF_ARRAY: u32 = 0;
const OF_MIPMAPPED: u32 = 1;
pub(crate) const OF_LINEAR: u32 = 2;
pub(crate) const OF_ROWS: u32 = 3;

/// What equal textures have in common: the memory's number, and the operation that makes them.
pub(crate) type Request = Arc<[u8]>;

/// The maximum number of destroyed textures that a server keeps.
const MOST_KEPT: usize = 64;

/// What a texture or a surface was made of.
#[derive(Clone)]
pub(crate) struct Made {
    pub context: &'static Context,
    pub resource: ResourceDesc,
    pub texture: Option<TextureDesc>,
    pub view: Option<ViewDesc>,
    /// Set if the server keeps it once it is destroyed.
    pub request: Option<Request>,
}

/// The unique number of a context, and a handle of its driver: two contexts may have the same.
type Name = (u64, u64);

/// The process's textures and surfaces. The two have separate handles.
#[derive(Default)]
pub(crate) struct Objects {
    pub textures: HashMap<Name, Made>,
    pub surfaces: HashMap<Name, Made>,
}

/// The object of this name: the current context's, or else that of the only context that has one.
fn named(all: &HashMap<Name, Made>, object: u64) -> Result<Made> {
    let here = context::current().ok().and_then(|context| all.get(&(context.unique, object)));
    let mut anywhere = all.iter().filter(|((_, handle), _)| *handle == object).map(|(_, made)| made);
    let found = here.or_else(|| anywhere.next().filter(|_| anywhere.next().is_none()));
    found.cloned().ok_or(Status::INVALID_VALUE)
}

/// The texture of a handle.
pub(crate) fn texture(object: u64) -> Result<Made> {
    named(&lock(objects()).textures, object)
}

/// The surface of a handle.
pub(crate) fn surface(object: u64) -> Result<Made> {
    named(&lock(objects()).surfaces, object)
}

pub(crate) fn objects() -> &'static Mutex<Objects> {
    static OBJECTS: OnceLock<Mutex<Objects>> = OnceLock::new();
    OBJECTS.get_or_init(Mutex::default)
}

/// One of the two kinds of objects, by its handle.
#[derive(Clone, Copy)]
pub(crate) enum Object {
    Texture(u64),
    Surface(u64),
}

impl Object {
    /// Tells the server that it is destroyed.
    fn destroy(self, context: &Context) -> Result {
        let (session, context) = (context.session(), context.id);
        match self {
            Object::Texture(texture) => session.append(&TextureDestroy { context, texture }),
            Object::Surface(surface) => session.append(&SurfaceDestroy { context, surface }),
        }
        .map(drop)
    }
}

/// An object that the program has destroyed: while work of its context was under way, with the marks behind
/// that work, or one that the server keeps.
struct Ending {
    context: &'static Context,
    object: Object,
    marks: Vec<(Arc<Stream>, Seq)>,
    request: Option<Request>,
}

/// Nothing is waited for while this is locked.
static ENDING: Mutex<Vec<Ending>> = Mutex::new(Vec::new());

/// How equal textures are recognized, if the server keeps such a one: of a device's linear memory, as long as
/// that is not freed.
pub(crate) fn request(driver: &Driver, operation: &TextureCreate) -> Option<Request> {
    let Resource { kind, address, .. } = operation.resource;
    if !matches!(kind, OF_LINEAR | OF_ROWS) || device_memory::device_of(driver, address).is_none() {
        return None;
    }
    let mut bytes = address::find(driver, address)?.buffer.to_le_bytes().to_vec();
    encode(operation, &mut bytes);
    Some(bytes.into())
}

/// A destroyed texture of a context that is made again. Work that was to come before its end may still use
/// it.
pub(crate) fn again(context: &'static Context, request: &Request) -> Option<u64> {
    let mut all = lock(&ENDING);
    let is_it =
        |ending: &Ending| std::ptr::eq(ending.context, context) && ending.request.as_ref() == Some(request);
    let at = all.iter().position(is_it)?;
    match all.remove(at).object {
        Object::Texture(texture) => Some(texture),
        Object::Surface(_) => None,
    }
}

/// Destroys an object that the program can no longer name, as soon as all work so far of its context is done,
/// or later if the server keeps it.
pub(crate) fn end(context: &'static Context, object: Object, request: Option<Request>) -> Result {
    reap(context.server);
    let marks = {
        // A stream that is being destroyed is always in one of the tables.
        let _order = managed::Order::take();
        stream_table::marks(context)?
    };
    if marks.is_empty() && request.is_none() {
        return object.destroy(context);
    }
    lock(&ENDING).push(Ending { context, object, marks, request });
    Ok(())
}

/// Tells a server of its destroyed objects that no work uses any more and that it does not keep.
pub(crate) fn reap(server: &Server) {
    let _telling = lock(&server.telling);
    let mut all = lock(&ENDING);
    let is_its = |ending: &Ending| std::ptr::eq(ending.context.server, server);
    let mut kept = all.iter().filter(|ending| is_its(ending) && ending.request.is_some()).count();
    // The oldest first.
    let is_over = |ending: &mut Ending| {
        ending.marks.retain(|(stream, mark)| !stream.has_passed(*mark));
        let stays = ending.request.is_some() && kept <= MOST_KEPT;
        let is_over = is_its(ending) && ending.marks.is_empty() && !stays;
        if is_over && ending.request.is_some() {
            kept -= 1;
        }
        is_over
    };
    let over: Vec<_> = all.extract_if(.., is_over).collect();
    drop(all);
    for Ending { context, object, .. } in over {
        // After the session is lost there is nothing to destroy.
        let _ = object.destroy(context);
    }
}

/// Drops a context's objects. `with_server`: the server destroys its own with the context; otherwise this
/// destroys them. The context's work is done.
pub(crate) fn forget(context: &'static Context, with_server: bool) {
    let gone = |_: &Name, made: &mut Made| std::ptr::eq(made.context, context);
    let mut objects = lock(objects());
    let textures = objects.textures.extract_if(gone).map(|((_, texture), _)| Object::Texture(texture));
    let mut all: Vec<Object> = textures.collect();
    all.extend(objects.surfaces.extract_if(gone).map(|((_, surface), _)| Object::Surface(surface)));
    drop(objects);
    let of_it = |ending: &mut Ending| std::ptr::eq(ending.context, context);
    {
        // The server has been told of those that are not there any more.
        let _telling = lock(&context.server.telling);
        all.extend(lock(&ENDING).extract_if(.., of_it).map(|ending| ending.object));
    }
    if !with_server {
        // After the session is lost there are none.
        for object in all {
            let _ = object.destroy(context);
        }
    }
}

/// Checks that a texture of a context can be made of `span` bytes (not 0) of linear memory.
///
/// As with NVIDIA's driver, a texture may be longer than the memory that it begins in. A kernel that reads
/// what is not there fails.
fn check_memory(driver: &'static Driver, context: &'static Context, first: u64, span: u64) -> Result {
    // With unified addressing, pinned memory also has a device address.
    pinned::reach_at(driver, context, first);
    if pinned_regions::is_mapped(context.server, first) {
        return Ok(());
    }
    let found = address::check(driver, first, 1)?;
    let rest = found.base + found.size - first;
    address::check(driver, first, span.min(rest)).map(drop)
}

/// Checks a program's description as far as this process can. Kernels can reach pinned memory that it names.
pub(crate) fn resource(
    driver: &'static Driver,
    context: &'static Context,
    desc: &ResourceDesc,
) -> Result<Resource> {
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
            check_memory(driver, context, resource.address, span)?;
        }
        _ => return Err(Status::INVALID_VALUE),
    }
    Ok(resource)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use client::handle::ContextId;

    #[test]
    fn the_last_destroyed_textures_can_be_made_again() {
        let server = Server::unused();
        let [context, other] = [0, 1].map(|n| Context::new(ContextId(n), server, 0, 0, false));
        let request = |number: u64| Request::from(number.to_le_bytes());
        let count = MOST_KEPT as u64 + 10;
        for number in 0..count {
            end(context, Object::Texture(number), Some(request(number))).unwrap();
        }
        let before = server.session.last_seq();
        reap(server);
        assert_ne!(server.session.last_seq(), before, "it is told of those that it does not keep");
        let last = request(count - 1);
        assert_eq!((again(other, &last), again(context, &request(9))), (None, None));
        assert_eq!((again(context, &last), again(context, &last)), (Some(count - 1), None));
        assert_eq!(again(context, &request(10)), Some(10));
        let of_it = |ending: &&Ending| std::ptr::eq(ending.context, context);
        assert_eq!(lock(&ENDING).iter().filter(of_it).count(), MOST_KEPT - 2);
        forget(context, false);
        assert!(again(context, &request(20)).is_none());
    }

    #[test]
    fn a_server_without_room_for_the_end_of_a_texture_stops_no_other() {
        let [full, other] = [(); 2].map(|()| Server::unused());
        let [context, beside] =
            [0, 1].map(|n| Context::new(ContextId(n), [full, other][n as usize], n, 0, false));
        let ended = Ending { context, object: Object::Texture(1), marks: Vec::new(), request: None };
        lock(&ENDING).push(ended);
        let fills = full.fill();
        let tells = std::thread::spawn(|| reap(full));
        let (says, said) = mpsc::channel();
        std::thread::spawn(move || {
            // Until that server is being told.
            while lock(&ENDING).iter().any(|ending| std::ptr::eq(ending.context, context)) {
                std::thread::yield_now();
            }
            says.send(end(beside, Object::Texture(1), None)).unwrap();
        });
        // If this waited for room, so would the test: there never is any.
        let said = said.recv_timeout(Duration::from_secs(60)).expect("the destroyed textures are locked");
        assert_eq!(said, Ok(()));
        full.lose();
        for thread in [fills, tells] {
            thread.join().unwrap();
        }
    }
}
