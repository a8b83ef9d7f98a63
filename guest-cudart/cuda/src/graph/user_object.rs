//! User objects: objects of a program that live as long as graphs that use them.

use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::Result;
use crate::abi::types::HostFn;
use client::handles::Slab;
use client::{Status, lock};

/// An object of the program, and its destructor.
pub(crate) struct Object {
    pub value: crate::abi::types::UserData,
    pub destroy: HostFn,
    /// Number of references of the program and of graphs.
    pub count: Mutex<u32>,
    pub handle: OnceLock<usize>,
}

pub(crate) static OBJECTS: Slab<Object> = Slab::new(16);

impl Object {
    pub fn retain(&self, more: u32) -> Result {
        let mut count = lock(&self.count);
        *count = count.checked_add(more).ok_or(Status::INVALID_VALUE)?;
        Ok(())
    }

    pub fn release(&self, less: u32) -> Result {
        let mut count = lock(&self.count);
        *count = count.checked_sub(less).ok_or(Status::INVALID_VALUE)?;
        let last = *count == 0;
        drop(count);
        if last {
            if let Some(handle) = self.handle.get() {
                OBJECTS.remove(*handle);
            }
            // SAFETY: the program gave the function to be called once, with this argument, when nobody needs
            // the object any more.
            unsafe { (self.destroy)(self.value.0) };
        }
        Ok(())
    }
}

/// References that a graph, or an instance of one, has.
pub(crate) struct Held {
    pub object: Arc<Object>,
    pub count: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        // These references were counted when they were taken.
        let _ = self.object.release(self.count);
    }
}

/// Takes references to the same objects for another owner.
pub(crate) fn share(held: &[Held]) -> Vec<Held> {
    let again = |held: &Held| {
        held.object.retain(1).ok()?;
        Some(Held { object: held.object.clone(), count: 1 })
    };
    held.iter().filter_map(again).collect()
}
