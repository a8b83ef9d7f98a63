//! Copies from and to arrays.
//!
//! A copy between an array and device memory, or between two arrays, is one operation. A copy between an
//! array and the host goes through temporary device memory, which is freed in stream order; the host's side
//! is copied by [`copy_boxes`](crate::work::copy_boxes).

use crate::abi::result::Result;
use crate::memory::address::{self, is_device};
use crate::memory::array::{self, End};
use crate::memory::stream_ordered;
use crate::streams::capture_rules;
use crate::work::copy::{Copier, is_pinned};
use crate::work::server_copy;
use client::Status;
use client::ops::array::MemcpyArray;
use client::ops::copy::Pitched;

impl Copier {
    /// Copies with an array at one or both ends and none on the host.
    pub fn with_array(&self, dst: &End, src: &End, extent: [u64; 3]) -> Result {
        dst.check(extent)?;
        src.check(extent)?;
        capture_rules::refuse(&self.stream)?;
        let op = MemcpyArray { stream: self.stream.id, dst: dst.place(), src: src.place(), extent };
        match dst {
            End::Device(to) => {
                let [width, height, depth] = extent.map(|n| n.saturating_sub(1));
                self.put(&op, to.address, depth * to.slice + height * to.pitch + width + 1)?;
            }
            End::Array(..) => drop(self.work(&op)?),
        }
        self.finish_shared(&[dst, src].map(|end| if let End::Device(at) = end { at.address } else { 0 }))
    }

    /// Provides packed device memory to `work`, until the stream has used it.
    pub fn by_way_of(&self, extent: [u64; 3], work: impl FnOnce(&Pitched) -> Result) -> Result {
        capture_rules::refuse(&self.stream)?;
        let [width, height, depth] = extent;
        let bytes =
            width.checked_mul(height).and_then(|n| n.checked_mul(depth)).ok_or(Status::INVALID_VALUE)?;
        let context = self.stream.context;
        let address = stream_ordered::alloc(self.driver, context, context.device, bytes, 0)?;
        let done = work(&Pitched { address, pitch: width, slice: width * height });
        stream_ordered::free_in_order(self.driver, address, self.stream.clone())?;
        done
    }

    /// Copies bytes in a row of an array from or to memory of either kind.
    pub unsafe fn row(
        &self,
        array: usize,
        offset: usize,
        memory: u64,
        bytes: usize,
        to_array: bool,
    ) -> Result {
        let handle = array;
        let array = array::of(handle)?;
        if bytes == 0 {
            return Ok(());
        }
        let near = self.server();
        let home = match is_device(self.driver, memory) {
            true => Some(address::check_near(self.driver, near, memory, bytes as u64)?.context),
            false => None,
        };
        let mut ends = [Some(array.context), home].into_iter().flatten();
        if let Some(other) = ends.find(|context| !self.is_own(context)) {
            if home.is_some_and(|home| !std::ptr::eq(home.server, array.context.server)) {
                return refuse_form!("copying bytes in a row between an array and another server's memory");
            }
            let stays = home.is_some() || is_pinned(memory, bytes);
            // SAFETY: the call waits unless the memory is pinned or a device's, as the caller requires.
            let work = move |copier: &Copier| unsafe { copier.row(handle, offset, memory, bytes, to_array) };
            return self.with_other(other, stays, work);
        }
        let (extent, array_home) = ([bytes as u64, 1, 1], array.context);
        let end = End::Array(array, [offset as u64, 0, 0]);
        end.check(extent)?;
        let copy = |memory: &Pitched| {
            let memory = End::Device(memory.clone());
            if to_array {
                self.with_array(&end, &memory, extent)
            } else {
                self.with_array(&memory, &end, extent)
            }
        };
        if let Some(home) = home {
            let memory = Pitched { address: memory, pitch: bytes as u64, slice: bytes as u64 };
            return server_copy::by_default_streams(&self.stream, &[array_home, home], || copy(&memory));
        }
        self.by_way_of(extent, |between| {
            // SAFETY: the program promises that these bytes of the host's memory may be read or written.
            unsafe {
                if to_array {
                    self.to_device(between.address, memory as *const u8, bytes)?;
                    copy(between)?;
                    self.copied(between.address)
                } else {
                    copy(between)?;
                    self.to_host(memory as *mut u8, between.address, bytes)
                }
            }
        })
    }
}
