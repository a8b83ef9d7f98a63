//! User objects: what a program wants to live as long as its graphs.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::abi::types::HostFn;
use crate::graph::of;
use crate::process::driver::driver;
use client::handles::Slab;
use client::{Status, lock};

/// An object of the program's, and what ends it.
struct Object {
    value: crate::graph::node_work::Data,
    destroy: HostFn,
    /// References, of the program and of graphs.
    count: Mutex<u32>,
    handle: OnceLock<usize>,
}

static OBJECTS: Slab<Object> = Slab::new(16);

impl Object {
    fn retain(&self, more: u32) -> Result {
        let mut count = lock(&self.count);
        *count = count.checked_add(more).ok_or(Status::INVALID_VALUE)?;
        Ok(())
    }

    fn release(&self, less: u32) -> Result {
        let mut count = lock(&self.count);
        *count = count.checked_sub(less).ok_or(Status::INVALID_VALUE)?;
        let last = *count == 0;
        drop(count);
        if last {
            if let Some(handle) = self.handle.get() {
                OBJECTS.remove(*handle);
            }
            // SAFETY: the program gave the function to be called once, with this argument, when nobody needs the object any more.
            unsafe { (self.destroy)(self.value.0) };
        }
        Ok(())
    }
}

/// References that a graph, or an instance of one, has.
pub(crate) struct Held {
    object: Arc<Object>,
    count: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        // They were counted when they were taken.
        let _ = self.object.release(self.count);
    }
}

/// The same objects, held by another as well.
pub(crate) fn share(held: &[Held]) -> Vec<Held> {
    let again = |held: &Held| {
        held.object.retain(1).ok()?;
        Some(Held { object: held.object.clone(), count: 1 })
    };
    held.iter().filter_map(again).collect()
}

fn object(handle: usize) -> Result<Arc<Object>> {
    driver()?;
    OBJECTS.get(handle).ok_or(Status::INVALID_VALUE)
}

fn some(count: u32) -> Result {
    if count == 0 || count > i32::MAX as u32 { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

api! {
    fn cuUserObjectCreate(to: *mut usize, value: *mut c_void, destroy: Option<HostFn>, count: u32, flags: u32) {
        driver()?;
        non_null(to)?;
        some(count)?;
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is not optional.
        if flags != 1 {
            return Err(Status::INVALID_VALUE);
        }
        let made = Arc::new(Object {
            value: crate::graph::node_work::Data(value),
            destroy: destroy.ok_or(Status::INVALID_VALUE)?,
            count: Mutex::new(count),
            handle: OnceLock::new(),
        });
        let handle = OBJECTS.insert(made.clone()).ok_or(Status::OUT_OF_MEMORY)?;
        put(to, *made.handle.get_or_init(|| handle))
    }

    fn cuUserObjectRetain(handle: usize, count: u32) {
        some(count)?;
        object(handle)?.retain(count)
    }

    fn cuUserObjectRelease(handle: usize, count: u32) {
        some(count)?;
        object(handle)?.release(count)
    }

    fn cuGraphRetainUserObject(graph: usize, handle: usize, count: u32, flags: u32) {
        some(count)?;
        // CU_GRAPH_USER_OBJECT_MOVE: the references are the program's own.
        if flags > 1 {
            return Err(Status::INVALID_VALUE);
        }
        let (graph, object) = (of(graph)?, object(handle)?);
        if flags == 0 {
            object.retain(count)?;
        }
        lock(&graph.held).push(Held { object, count });
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: usize, handle: usize, count: u32) {
        some(count)?;
        let (graph, object) = (of(graph)?, object(handle)?);
        let mut held = lock(&graph.held);
        let theirs: u32 = held.iter().filter(|held| Arc::ptr_eq(&held.object, &object)).map(|held| held.count).sum();
        if theirs < count {
            return Err(Status::INVALID_VALUE);
        }
        let gone: Vec<Held> = held.extract_if(.., |held| Arc::ptr_eq(&held.object, &object)).collect();
        if theirs > count {
            object.retain(theirs - count)?;
            held.push(Held { object, count: theirs - count });
        }
        drop(held);
        drop(gone);
        Ok(())
    }
}
