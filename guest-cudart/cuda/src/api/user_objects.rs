//! User objects.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::arguments::Out;
use crate::abi::result::Result;
use crate::abi::types::{HostFn, UserData};
use crate::graph::of;
use crate::graph::user_object::{Held, OBJECTS, Object};
use crate::process::driver::driver;
use client::{Status, lock};

pub(crate) fn object(handle: usize) -> Result<Arc<Object>> {
    driver()?;
    OBJECTS.get(handle).ok_or(Status::INVALID_VALUE)
}

pub(crate) fn some(count: u32) -> Result {
    if count == 0 || count > i32::MAX as u32 { Err(Status::INVALID_VALUE) } else { Ok(()) }
}

api! {
    fn cuUserObjectCreate(to: Out<usize>, value: *mut c_void, destroy: Option<HostFn>, count: u32, flags: u32) {
        driver()?;
        to.required()?;
        some(count)?;
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is mandatory.
        if flags != 1 {
            return Err(Status::INVALID_VALUE);
        }
        let made = Arc::new(Object {
            value: UserData(value),
            destroy: destroy.ok_or(Status::INVALID_VALUE)?,
            count: Mutex::new(count),
            handle: OnceLock::new(),
        });
        let handle = OBJECTS.insert(made.clone()).ok_or(Status::OUT_OF_MEMORY)?;
        to.put(*made.handle.get_or_init(|| handle))
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
        // CU_GRAPH_USER_OBJECT_MOVE: the program transfers its own references.
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
