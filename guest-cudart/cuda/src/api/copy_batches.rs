//! Batches of copies.
//!
//! CUDA defines no order between a batch's copies, so they are put on the stream one after another. All are
//! checked before the first is enqueued.

use crate::abi::arguments::{Array, Count, Out};
use crate::abi::result::Result;
use crate::abi::types::{Memcpy3D, Memcpy3DBatchOp, Memcpy3DOperand, MemcpyAttributes, memory_type};
use crate::memory::{array, pending_writes};
use crate::streams::capture_rules;
use crate::work::copy::{Copier, Mode};
use crate::work::copy_boxes;
use client::Status;

/// `CUmemcpySrcAccessOrder`.
mod order {
    pub const STREAM: u32 = 1;
    pub const DURING_API_CALL: u32 = 2;
    pub const ANY: u32 = 3;
}

/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`, a hint.
const PREFER_OVERLAP: u32 = 1;
/// `CUmemcpy3DOperandType`.
const POINTER: u32 = 1;
const ARRAY: u32 = 2;

/// A checked copy, and when its source may be read.
struct Copy {
    copy: Memcpy3D,
    order: u32,
}

fn check_hints(order: u32, flags: u32) -> Result {
    let known =
        matches!(order, order::STREAM | order::DURING_API_CALL | order::ANY) && flags & !PREFER_OVERLAP == 0;
    if known { Ok(()) } else { Err(Status::INVALID_VALUE) }
}

/// The stream of a batch: neither the legacy default stream nor one that is being captured.
fn copier(handle: usize, per_thread: bool) -> Result<Copier> {
    let copier = Copier::new(handle, per_thread, Mode::Async)?;
    if copier.stream.is_legacy() {
        return Err(Status::INVALID_VALUE);
    }
    capture_rules::forbid(&copier.stream)?;
    Ok(copier)
}

/// A contiguous copy.
fn line(dst: u64, src: u64, len: usize) -> Memcpy3D {
    Memcpy3D {
        srcMemoryType: memory_type::UNIFIED,
        srcDevice: src,
        srcPitch: len,
        dstMemoryType: memory_type::UNIFIED,
        dstDevice: dst,
        dstPitch: len,
        WidthInBytes: len,
        Height: 1,
        Depth: 1,
        ..Memcpy3D::default()
    }
}

impl Copy {
    /// # Errors
    /// The error that the copy would get by itself.
    fn new(copier: &Copier, copy: Memcpy3D, order: u32) -> Result<Copy> {
        copy_boxes::route(copier.driver, copier.server(), &copy)?;
        Ok(Copy { copy, order })
    }

    /// Puts it on the stream. Returns true if its source is read only when the stream reaches it, so that the
    /// call must not return earlier.
    ///
    /// # Safety
    /// Host memory is readable and writable as described, for as long as the access order requires.
    unsafe fn run(&self, copier: &Copier) -> Result<bool> {
        let resolved = copy_boxes::resolve(copier.driver, &self.copy)?;
        let from_host = resolved.srcMemoryType == memory_type::HOST;
        let pageable = copy_boxes::pageable(copier.driver, &copier.stream, &resolved)?
            .filter(|pageable| !pageable.to_host);
        if let Some(pageable) = pageable.as_ref().filter(|_| self.order == order::STREAM) {
            // Read during this call, so earlier work on the stream must have written it.
            let (at, len) = pageable.span();
            pending_writes::settle(copier.driver, &copier.stream, at, len)?;
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            copy_boxes::run(copier, &self.copy)?;
        }
        let read = from_host && pageable.is_some();
        Ok(self.order == order::DURING_API_CALL && !read)
    }
}

/// Puts checked copies on the stream.
///
/// # Safety
/// As [`Copy::run`].
unsafe fn run(copier: &Copier, copies: &[Copy]) -> Result {
    let mut wait = false;
    for copy in copies {
        // SAFETY: guaranteed by the caller.
        wait |= unsafe { copy.run(copier) }?;
    }
    if wait {
        copier.stream.synchronize()?;
        copier.has_waited();
    }
    Ok(())
}

/// The attributes of copy `i`: those of the last entry that begins at or before it.
fn attributes_of(attributes: &[MemcpyAttributes], first: &[usize], i: usize) -> Option<MemcpyAttributes> {
    let entry = first.partition_point(|begin| *begin <= i).checked_sub(1)?;
    attributes.get(entry).copied()
}

/// Whether entries begin at 0, increase, and each apply to something.
pub(crate) fn are_beginnings(first: &[usize], count: usize) -> bool {
    first.first() == Some(&0)
        && first.windows(2).all(|pair| pair[0] < pair[1])
        && first.last().is_some_and(|last| *last < count)
}

/// Enqueues a batch of linear copies on a stream. If one of them is invalid, `fault` gets its index.
///
/// # Safety
/// `attributes` and `first` have `attribute_count` entries. As [`Copy::run`].
unsafe fn lines(
    copies: [Array<u64>; 2],
    sizes: Array<usize>,
    count: Count,
    attributes: Array<MemcpyAttributes>,
    first: Array<usize>,
    attribute_count: usize,
    fault: Option<Out<usize>>,
    copier: impl FnOnce() -> Result<Copier>,
) -> Result {
    let tell = |index| fault.iter().for_each(|fault| fault.put_if_wanted(index));
    tell(usize::MAX);
    let copier = copier()?;
    if count.get() == 0 || attribute_count == 0 || attribute_count > count.get() {
        return Err(Status::INVALID_VALUE);
    }
    let [dsts, srcs] = copies;
    let (dsts, srcs, sizes) = (dsts.entries(count)?, srcs.entries(count)?, sizes.entries(count)?);
    // SAFETY: guaranteed by the caller.
    let (attributes, first) = unsafe { (attributes.first(attribute_count)?, first.first(attribute_count)?) };
    if !are_beginnings(first, count.get()) {
        return Err(Status::INVALID_VALUE);
    }
    let mut copies = Vec::new();
    for (i, ((dst, src), len)) in dsts.iter().zip(srcs).zip(sizes).enumerate() {
        let of = attributes_of(attributes, first, i).ok_or(Status::INVALID_VALUE)?;
        let copy = check_hints(of.srcAccessOrder, of.flags)
            .and_then(|()| Copy::new(&copier, line(*dst, *src, *len), of.srcAccessOrder));
        copies.push(copy.inspect_err(|_| tell(i))?);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { run(&copier, &copies) }
}

/// One side of a box copy.
struct Side {
    kind: u32,
    pointer: u64,
    array: usize,
    at: [usize; 3],
    pitch: usize,
    height: usize,
}

impl Side {
    fn new(operand: &Memcpy3DOperand, element: usize, extent: [usize; 3]) -> Result<Side> {
        let [first, second, third, fourth] = operand.words;
        match operand.kind {
            POINTER => {
                // 0: rows or layers follow each other without gaps.
                let length = if second == 0 { extent[0] } else { second as usize };
                let height = if third == 0 { extent[1] } else { third as usize };
                if length < extent[0] || height < extent[1] {
                    return Err(Status::INVALID_VALUE);
                }
                let pitch = length.checked_mul(element).ok_or(Status::INVALID_VALUE)?;
                Ok(Side { kind: memory_type::UNIFIED, pointer: first, array: 0, at: [0; 3], pitch, height })
            }
            ARRAY => {
                let x = (second as usize).checked_mul(element).ok_or(Status::INVALID_VALUE)?;
                let at = [x, third as usize, fourth as usize];
                Ok(Side {
                    kind: memory_type::ARRAY,
                    pointer: 0,
                    array: first as usize,
                    at,
                    pitch: 0,
                    height: 0,
                })
            }
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

/// Element size in bytes, if an operand has one.
fn element(operand: &Memcpy3DOperand) -> Result<Option<usize>> {
    if operand.kind != ARRAY {
        return Ok(None);
    }
    let array = array::of(operand.words[0] as usize)?;
    Ok(Some(array.shape.element_bytes().ok_or(Status::INVALID_VALUE)? as usize))
}

/// One of a batch's box copies as an ordinary description.
fn cuboid(op: &Memcpy3DBatchOp) -> Result<Memcpy3D> {
    check_hints(op.srcAccessOrder, op.flags)?;
    let size = match (element(&op.src)?, element(&op.dst)?) {
        (Some(src), Some(dst)) if src != dst => return Err(Status::INVALID_VALUE),
        (src, dst) => src.or(dst).unwrap_or(1),
    };
    if op.extent.contains(&0) {
        return Err(Status::INVALID_VALUE);
    }
    let (src, dst) = (Side::new(&op.src, size, op.extent)?, Side::new(&op.dst, size, op.extent)?);
    Ok(Memcpy3D {
        srcXInBytes: src.at[0],
        srcY: src.at[1],
        srcZ: src.at[2],
        srcMemoryType: src.kind,
        srcDevice: src.pointer,
        srcArray: src.array,
        srcPitch: src.pitch,
        srcHeight: src.height,
        dstXInBytes: dst.at[0],
        dstY: dst.at[1],
        dstZ: dst.at[2],
        dstMemoryType: dst.kind,
        dstDevice: dst.pointer,
        dstArray: dst.array,
        dstPitch: dst.pitch,
        dstHeight: dst.height,
        WidthInBytes: op.extent[0].checked_mul(size).ok_or(Status::INVALID_VALUE)?,
        Height: op.extent[1],
        Depth: op.extent[2],
        ..Memcpy3D::default()
    })
}

/// The same for copies of boxes.
///
/// # Safety
/// As [`Copy::run`].
unsafe fn boxes(
    count: Count,
    ops: Array<Memcpy3DBatchOp>,
    fault: Option<Out<usize>>,
    flags: u64,
    copier: impl FnOnce() -> Result<Copier>,
) -> Result {
    let tell = |index| fault.iter().for_each(|fault| fault.put_if_wanted(index));
    tell(usize::MAX);
    let copier = copier()?;
    if count.get() == 0 || flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let mut copies = Vec::new();
    for (i, op) in ops.entries(count)?.iter().enumerate() {
        let copy = cuboid(op).and_then(|copy| Copy::new(&copier, copy, op.srcAccessOrder));
        copies.push(copy.inspect_err(|_| tell(i))?);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { run(&copier, &copies) }
}

api! {
    unsafe fn cuMemcpyBatchAsync_v2 / cuMemcpyBatchAsync_v2_ptsz(
        dsts: Array<u64>, srcs: Array<u64>, sizes: Array<usize>, count: Count, attributes: Array<MemcpyAttributes>,
        first: Array<usize>, attribute_count: usize, stream: usize
    ) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { lines([dsts, srcs], sizes, count, attributes, first, attribute_count, None, || copier(stream, pt)) }
    }

    unsafe fn cuMemcpyBatchAsync / cuMemcpyBatchAsync_ptsz(
        dsts: Array<u64>, srcs: Array<u64>, sizes: Array<usize>, count: Count, attributes: Array<MemcpyAttributes>,
        first: Array<usize>, attribute_count: usize, fault: Out<usize>, stream: usize
    ) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { lines([dsts, srcs], sizes, count, attributes, first, attribute_count, Some(fault), || copier(stream, pt)) }
    }

    unsafe fn cuMemcpy3DBatchAsync_v2 / cuMemcpy3DBatchAsync_v2_ptsz(count: Count, ops: Array<Memcpy3DBatchOp>, flags: u64, stream: usize) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { boxes(count, ops, None, flags, || copier(stream, pt)) }
    }

    unsafe fn cuMemcpy3DBatchAsync / cuMemcpy3DBatchAsync_ptsz(
        count: Count, ops: Array<Memcpy3DBatchOp>, fault: Out<usize>, flags: u64, stream: usize
    ) |pt| {
        // SAFETY: the program passes what CUDA's manual requires.
        unsafe { boxes(count, ops, Some(fault), flags, || copier(stream, pt)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn attributes_begin_with_the_first_copy_and_rise() {
        for (first, count, good) in [
            (&[0][..], 1, true),
            (&[0, 6], 10, true),
            (&[], 1, false),
            (&[1], 4, false),
            (&[0, 2, 2], 4, false),
            (&[0, 4], 4, false),
        ] {
            assert_eq!(are_beginnings(first, count), good, "{first:?} of {count}");
        }
    }

    proptest! {
        #[test]
        fn a_copy_has_the_attributes_of_the_last_entry_before_it(steps in proptest::collection::vec(1usize..5, 0..6), i in 0usize..30) {
            let mut first = vec![0];
            for step in steps {
                first.push(first[first.len() - 1] + step);
            }
            let location = crate::abi::types::MemLocation { kind: 0, id: 0 };
            let all: Vec<MemcpyAttributes> = (0..first.len() as u32)
                .map(|flags| MemcpyAttributes { srcAccessOrder: 1, srcLocHint: location, dstLocHint: location, flags })
                .collect();
            let expected = (0..first.len()).rev().find(|entry| first[*entry] <= i).unwrap();
            prop_assert_eq!(attributes_of(&all, &first, i).unwrap().flags as usize, expected);
        }
    }

    #[test]
    fn rows_and_layers_are_packed_or_hold_the_copy() {
        let pointer = |length, height| Memcpy3DOperand { kind: POINTER, words: [4096, length, height, 0] };
        let side = Side::new(&pointer(0, 0), 4, [10, 5, 2]).unwrap();
        assert_eq!((side.pitch, side.height), (40, 5));
        let side = Side::new(&pointer(12, 6), 4, [10, 5, 2]).unwrap();
        assert_eq!((side.pitch, side.height), (48, 6));
        for (length, height) in [(9, 0), (0, 4), (u64::MAX, 0)] {
            assert!(Side::new(&pointer(length, height), 4, [10, 5, 2]).is_err(), "{length} {height}");
        }
    }
}
