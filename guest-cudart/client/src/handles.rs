//! Handles for C programs: opaque words that name an object, or an object that no longer exists.
//!
//! A handle is not an address. It contains the kind of its object, the object's slot in a table, and the
//! slot's generation. A handle that was destroyed, is of another kind or never existed is recognized and
//! refused with CUDA's own error.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use crate::lock;

/// Slots are allocated in segments of this many, so that they never move.
const SEGMENT: usize = 1024;
const SEGMENTS: usize = 1024;
const PLACE_BITS: u32 = 20;
const GENERATION_BITS: u32 = 17;

/// A table of objects of one kind. It never shrinks.
pub struct Slab<T> {
    /// Distinguishes the tables of a process: 1 to 31.
    kind: u64,
    segments: [OnceLock<Box<[Place<T>]>>; SEGMENTS],
    free: Mutex<Free>,
}

struct Place<T> {
    state: RwLock<State<T>>,
}

struct State<T> {
    generation: u32,
    object: Option<Arc<T>>,
}

struct Free {
    /// Slots that were freed.
    places: Vec<u32>,
    /// Slots from here on were never used.
    fresh: u32,
}

impl<T> Slab<T> {
    /// Creates an empty table. `kind` must be unique among the tables of a process, below 32 and not 0.
    pub const fn new(kind: u8) -> Self {
        assert!(kind != 0 && kind < 32);
        Slab {
            kind: kind as u64,
            segments: [const { OnceLock::new() }; SEGMENTS],
            free: Mutex::new(Free { places: Vec::new(), fresh: 0 }),
        }
    }

    fn handle(&self, place: u32, generation: u32) -> usize {
        // A multiple of 16. It may equal an address in the program, but nothing looks for a handle among
        // addresses, or for an address here.
        ((self.kind << (PLACE_BITS + GENERATION_BITS + 4))
            | (u64::from(generation) << (PLACE_BITS + 4))
            | (u64::from(place) << 4)) as usize
    }

    fn place(&self, handle: usize) -> Option<(&Place<T>, u32, u32)> {
        let handle = handle as u64;
        if handle & 15 != 0 || handle >> (PLACE_BITS + GENERATION_BITS + 4) != self.kind {
            return None;
        }
        let place = (handle >> 4) as u32 & ((1 << PLACE_BITS) - 1);
        let generation = (handle >> (PLACE_BITS + 4)) as u32 & ((1 << GENERATION_BITS) - 1);
        let segment = self.segments[place as usize / SEGMENT].get()?;
        Some((&segment[place as usize % SEGMENT], place, generation))
    }

    /// Adds an object and returns its handle; `None` if the table is full.
    pub fn insert(&self, object: Arc<T>) -> Option<usize> {
        self.insert_with(|_| object)
    }

    /// Like [`insert`](Self::insert), for an object that needs to know its handle.
    pub fn insert_with(&self, object: impl FnOnce(usize) -> Arc<T>) -> Option<usize> {
        let place = {
            let mut free = lock(&self.free);
            match free.places.pop() {
                Some(place) => place,
                None if free.fresh < (1 << PLACE_BITS) => {
                    free.fresh += 1;
                    free.fresh - 1
                }
                None => return None,
            }
        };
        let segment = self.segments[place as usize / SEGMENT].get_or_init(|| {
            (0..SEGMENT)
                .map(|_| Place { state: RwLock::new(State { generation: 1, object: None }) })
                .collect()
        });
        let mut state =
            segment[place as usize % SEGMENT].state.write().unwrap_or_else(PoisonError::into_inner);
        let handle = self.handle(place, state.generation);
        state.object = Some(object(handle));
        Some(handle)
    }

    /// The handle of an object that remembers it in `handle`. The first call adds the object; `None` if the
    /// table is full.
    #[inline]
    pub fn insert_once(&self, handle: &OnceLock<usize>, object: &Arc<T>) -> Option<usize> {
        if let Some(handle) = handle.get() {
            return Some(*handle);
        }
        let made = self.insert(Arc::clone(object))?;
        let kept = *handle.get_or_init(|| made);
        if kept != made {
            // Another thread was faster.
            self.remove(made);
        }
        Some(kept)
    }

    /// The object that a handle names, if it exists.
    #[inline]
    pub fn get(&self, handle: usize) -> Option<Arc<T>> {
        let (place, _, generation) = self.place(handle)?;
        let state = place.state.read().unwrap_or_else(PoisonError::into_inner);
        (state.generation == generation).then(|| state.object.clone()).flatten()
    }

    /// Removes an object, which makes its handle invalid.
    pub fn remove(&self, handle: usize) -> Option<Arc<T>> {
        let (place, index, generation) = self.place(handle)?;
        let mut state = place.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.generation != generation {
            return None;
        }
        let object = state.object.take()?;
        state.generation = (state.generation + 1) & ((1 << GENERATION_BITS) - 1);
        drop(state);
        lock(&self.free).places.push(index);
        Some(object)
    }

    /// All current objects.
    pub fn all(&self) -> Vec<Arc<T>> {
        let fresh = lock(&self.free).fresh;
        let object = |place: u32| {
            let segment = self.segments[place as usize / SEGMENT].get()?;
            segment[place as usize % SEGMENT]
                .state
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .object
                .clone()
        };
        (0..fresh).filter_map(object).collect()
    }

    /// Removes all objects for which `gone` returns true.
    pub fn remove_where(&self, gone: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let fresh = lock(&self.free).fresh;
        let mut out = Vec::new();
        for place in 0..fresh {
            let Some(segment) = self.segments[place as usize / SEGMENT].get() else { continue };
            let handle = {
                let state =
                    segment[place as usize % SEGMENT].state.read().unwrap_or_else(PoisonError::into_inner);
                match &state.object {
                    Some(object) if gone(object) => self.handle(place, state.generation),
                    _ => continue,
                }
            };
            out.extend(self.remove(handle));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn a_destroyed_handle_stays_invalid_when_its_slot_is_reused() {
        let slab: Slab<u32> = Slab::new(3);
        let first = slab.insert(Arc::new(1)).unwrap();
        assert_eq!(slab.remove(first).as_deref(), Some(&1));
        let second = slab.insert(Arc::new(2)).unwrap();
        assert_ne!(first, second);
        assert!(slab.get(first).is_none() && slab.remove(first).is_none());
        assert_eq!(slab.get(second).as_deref(), Some(&2));
    }

    #[test]
    fn a_handle_of_another_kind_is_invalid() {
        let (streams, events): (Slab<u32>, Slab<u32>) = (Slab::new(1), Slab::new(2));
        let stream = streams.insert(Arc::new(1)).unwrap();
        events.insert(Arc::new(2)).unwrap();
        assert!(events.get(stream).is_none());
        for wild in [0, 1, 2, 0x10, usize::MAX, stream + 1, stream + 16 * SEGMENT] {
            assert!(streams.get(wild).is_none(), "{wild:#x}");
        }
    }

    proptest! {
        #[test]
        fn a_slab_behaves_like_a_map(steps in proptest::collection::vec((any::<bool>(), any::<usize>()), 1..400)) {
            let slab: Slab<usize> = Slab::new(7);
            let mut model: HashMap<usize, usize> = HashMap::new();
            let mut gone = Vec::new();
            for (add, value) in steps {
                if add || model.is_empty() {
                    let handle = slab.insert(Arc::new(value)).unwrap();
                    prop_assert!(model.insert(handle, value).is_none());
                } else {
                    let handle = *model.keys().nth(value % model.len()).unwrap();
                    prop_assert_eq!(slab.remove(handle).map(|v| *v), model.remove(&handle));
                    gone.push(handle);
                }
            }
            for (handle, value) in &model {
                prop_assert_eq!(slab.get(*handle).map(|v| *v), Some(*value));
            }
            prop_assert!(gone.iter().all(|handle| slab.get(*handle).is_none()));
        }
    }
}
