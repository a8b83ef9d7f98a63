//! Where the bulk data of an operation is in the client's memory.
//!
//! | kind | what | lifetime |
//! |---|---|---|
//! | inline | inside the record | that of the record |
//! | arena | at an offset of the channel's arena | source: until [`released`](crate::channel::Progress) passes the command; target: until the client has read it |
//! | region | at an offset of registered (pinned) program memory | as CUDA says of pinned memory |

use crate::schema::{Shape, numbers};
use crate::wire::{Reader, Wire, WireError, Writer};

/// A range of the client's memory outside the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostRange {
    /// The memory that the offset refers to.
    pub place: Place,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A memory that contains a [`HostRange`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The channel's arena.
    Arena,
    /// A registered region, by its id.
    Region(u32),
}

/// Bytes that the server reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostIn<'a> {
    /// Inside the record.
    Inline(&'a [u8]),
    /// In the client's memory. The server may read it from now on.
    Range(HostRange),
    /// In the client's memory. The server may read it only once the stream has reached the command, because
    /// earlier work on the stream may still write it. Only for servers that can wait
    /// ([`SessionInfoReply::reads_late`](crate::ops::device::SessionInfoReply)).
    Late(HostRange),
}

/// A place in the client's memory that the server writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostOut(pub HostRange);

/// One piece of bulk data outside a record, as a relay treats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataUse {
    /// The server reads it, so the relay sends it.
    In(HostRange),
    /// The server reads it, and the relay sends it once the server has granted it.
    Late(HostRange),
    /// The server writes it, so the relay expects it.
    Out(HostRange),
}

numbers! {
    /// The kind of a data reference, its first word on the wire.
    pub mod kind: u32 {
        /// The bytes follow.
        INLINE = 0;
        /// A range of the arena.
        ARENA = 1;
        /// A range of a region.
        REGION = 2;
        /// Added to the kind of a [`HostIn::Late`](super::HostIn::Late).
        LATE = 16;
    }
}

impl HostIn<'_> {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            HostIn::Inline(bytes) => bytes.len() as u64,
            HostIn::Range(range) | HostIn::Late(range) => range.len,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn put_range(range: &HostRange, more: u32, w: &mut Writer<'_>) {
    let (base, region) = match range.place {
        Place::Arena => (kind::ARENA, 0),
        Place::Region(id) => (kind::REGION, id),
    };
    (base + more).put(w);
    region.put(w);
    range.offset.put(w);
    range.len.put(w);
}

fn get_range(number: u32, r: &mut Reader<'_>) -> Result<HostRange, WireError> {
    let region = u32::get(r)?;
    let place = match number {
        kind::ARENA => Place::Arena,
        kind::REGION => Place::Region(region),
        _ => return Err(WireError::Invalid { what: "kind of data reference", value: number.into() }),
    };
    let (offset, len) = (u64::get(r)?, u64::get(r)?);
    if offset.checked_add(len).is_none() {
        return Err(WireError::Invalid { what: "offset of data reference", value: offset });
    }
    Ok(HostRange { place, offset, len })
}

/// `u32` kind (plus [`kind::LATE`] for late data); inline: `u32` length and the bytes; otherwise `u32`
/// region, `u64` offset, `u64` length.
impl<'a> Wire<'a> for HostIn<'a> {
    const SHAPE: Shape = Shape::Data { name: "HostIn", at_least: 8 };
    const CARRIES_DATA: bool = true;
    fn put(&self, w: &mut Writer<'_>) {
        match self {
            HostIn::Inline(bytes) => {
                kind::INLINE.put(w);
                bytes.put(w);
            }
            HostIn::Range(range) => put_range(range, 0, w),
            HostIn::Late(range) => put_range(range, kind::LATE, w),
        }
    }
    fn get(r: &mut Reader<'a>) -> Result<Self, WireError> {
        match u32::get(r)? {
            kind::INLINE => Ok(HostIn::Inline(Wire::get(r)?)),
            late if late >= kind::LATE => get_range(late - kind::LATE, r).map(HostIn::Late),
            number => get_range(number, r).map(HostIn::Range),
        }
    }
    fn visit_data(&self, visit: &mut dyn FnMut(DataUse)) {
        match self {
            HostIn::Inline(_) => {}
            HostIn::Range(range) => visit(DataUse::In(*range)),
            HostIn::Late(range) => visit(DataUse::Late(*range)),
        }
    }
}

impl Wire<'_> for HostOut {
    const SHAPE: Shape = Shape::Data { name: "HostOut", at_least: 24 };
    const CARRIES_DATA: bool = true;
    fn put(&self, w: &mut Writer<'_>) {
        put_range(&self.0, 0, w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let number = u32::get(r)?;
        get_range(number, r).map(HostOut)
    }
    fn visit_data(&self, visit: &mut dyn FnMut(DataUse)) {
        visit(DataUse::Out(self.0));
    }
}
