//! The table of operations: the CUDA driver API as it goes over the wire, one file for each chapter.
//!
//! An entry reads
//!
//! ```text
//! /// What it does, and the driver API function that it stands for.
//! async 0x0401 memcpy_htod: MemcpyHtoD<'a>
//!     [order Streams, may_block Never, lane Main]
//! { stream: StreamId, dst: u64, src: HostIn<'a> }
//!
//! /// The same for an operation that is answered.
//! sync 0x0305 mem_get_info: MemGetInfo
//!     [order None, may_block Never, lane Main]
//! { device: u32 } -> MemGetInfoReply { free: u64, total: u64 }
//! ```
//!
//! The macro generates from it: the request type (an [`Op`]), the reply type, a method of the chapter's trait
//! (all chapters together are [`Driver`]), an arm of [`dispatch`], and a row of the table ([`info`],
//! [`all`]).
//!
//! - **Opcodes** are stable and never reused. The upper byte is the chapter. Opcode 0 is the ring's padding.
//! - **Classes** ([`Class`]). An `async` operation is never answered: a failure becomes the deferred error of
//!   its context. A `sync` operation is answered in a reply slot, and only `sync` operations have a reply. A
//!   call that the client library answers by itself has no entry.
//! - **Scheduling facts.** [`Order`] says which earlier commands come first, [`MayBlock`] what the driver's
//!   call may wait for, [`Lane`] how the command travels, and [`Hold`] whether it stops its stream until the
//!   program acts. Server and bridge schedule by these facts and keep no lists of opcodes.
//!
//! "Executing" an operation that is work on a stream means enqueuing it: it completes later, in its stream's
//! order.

use crate::data::DataUse;
use crate::handle::Handle;
use crate::schema::{Field, Hash, Shape};
use crate::status::Status;
use crate::wire::{Reader, Wire, WireError, Writer};

pub mod activity;
pub mod array;
pub mod context;
pub mod copy;
pub mod device;
pub mod direct;
pub mod event;
pub mod graph;
pub mod green;
pub mod launch;
pub mod memory;
pub mod module;
pub mod nvml;
pub mod stream;
pub mod texture;

/// Whether an operation is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Never answered.
    Async,
    /// Answered in a reply slot.
    Sync,
}

/// Relative to which other commands of the session an operation keeps its order.
///
/// Commands arrive in the order of their `seq`. A server may execute a command before an earlier one if this
/// allows it, and does so while a stream waits for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Keeps its order relative to other commands of every stream and event that it names, and of the legacy
    /// default stream that orders them. Comes after earlier [`Order::Object`] commands that change a function
    /// or graph that it names, and after an earlier [`PrimaryReset`](context::PrimaryReset).
    Streams,
    /// Changes a function or an instantiated graph that it names. Comes after earlier commands that use or
    /// change that object and before later ones, and after an earlier
    /// [`PrimaryReset`](context::PrimaryReset).
    Object,
    /// Creates, changes or destroys something that other commands name. Comes after every earlier command, or
    /// after those of its device if it is [`PrimaryReset`](context::PrimaryReset). A server lets every later
    /// one wait for `PrimaryReset`, and none for the others: until a client has their answer, it uses nothing
    /// that they destroy, and reuses none of its numbers.
    Session,
    /// Comes after every earlier command (of a context or device, if it is about the work of one). Later
    /// commands need not wait for it, since it changes nothing that they name: it waits, or it destroys
    /// something whose number is not used again.
    Earlier,
    /// Is not ordered with work on streams: it is a query or creates something new. Comes after an earlier
    /// [`PrimaryReset`](context::PrimaryReset), except in [`Lane::Express`], which has no order.
    None,
}

/// What the driver's call for an operation may wait for.
///
/// This is about calls that are known to wait for work on the device. No work there waits for a
/// [`Hold::UntilSignal`], but a kernel may wait for memory that the client writes, so a server must be able
/// to receive that write during such a call. [`MayBlock::Never`] includes calls that wait only in rare cases
/// (destroying a context with pending work).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MayBlock {
    /// Nothing.
    Never,
    /// The stream that it names: NVIDIA's driver may block in a copy's call until the stream has reached the
    /// copy.
    Stream,
    /// All work of its context, as when code is loaded or unloaded or a limit is changed.
    Context,
    /// All work of its context, the first time that the function is launched: the driver loads its code then.
    FirstLaunch,
}

/// How a command travels from the client to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// In the session's ring. It is executed in the order that [`Order`] requires.
    Main,
    /// For commands that end a wait or answer a page fault. They use the session's ring, too, but a server
    /// may execute them ahead of earlier commands, and without calling the driver.
    Express,
}

/// Whether an operation stops its stream until the program acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// No.
    None,
    /// Until a command with [`Hold::Ends`] comes for it.
    UntilSignal,
    /// Until a word in memory changes, which the program may write at any time.
    UntilWord,
    /// It ends a [`Hold::UntilSignal`] of another command.
    Ends,
}

/// A row of the table.
#[derive(Debug)]
pub struct OpInfo {
    /// The opcode.
    pub opcode: u16,
    /// The method's name, for logs and traces.
    pub name: &'static str,
    /// The minor version in which it appeared. A peer of an older version does not know it.
    pub since: u16,
    /// Whether it is answered.
    pub class: Class,
    /// Relative to which commands it keeps its order.
    pub order: Order,
    /// What the driver's call may wait for.
    pub may_block: MayBlock,
    /// How it travels.
    pub lane: Lane,
    /// Whether it stops its stream.
    pub hold: Hold,
    /// Whether its records can name bulk data outside themselves. A relay decodes only such records.
    pub carries_data: bool,
    /// The request's fields in wire order.
    pub request: &'static [Field],
    /// The reply's fields in wire order; empty for an `async` operation.
    pub reply: &'static [Field],
    /// Decodes a record's body and calls `visit` for each piece of bulk data that it names.
    pub visit_data: VisitData,
    /// Decodes a record's body and calls `visit` for each stream and event that it names.
    pub visit_handles: VisitHandles,
}

impl OpInfo {
    /// Adds all that peers must agree on to a fingerprint.
    pub(crate) const fn hash(&self, hash: Hash) -> Hash {
        let facts =
            [self.class as u64, self.order as u64, self.may_block as u64, self.lane as u64, self.hold as u64];
        let mut hash = hash.number(self.opcode as u64).text(self.name);
        let mut at = 0;
        while at < facts.len() {
            hash = hash.number(facts[at]);
            at += 1;
        }
        hash.fields(self.request).fields(self.reply)
    }
}

/// The structures that are sent as bulk data of an operation, each with the minor version in which it
/// appeared.
pub const DATA_SHAPES: &[(u16, Shape)] = &[
    (0, <module::FunctionTable as Wire<'_>>::SHAPE),
    (0, <graph::GraphNodes as Wire<'_>>::SHAPE),
    (0, <graph::GraphParts as Wire<'_>>::SHAPE),
    (0, <activity::ActivityRecords as Wire<'_>>::SHAPE),
];

/// See [`OpInfo::visit_data`].
pub type VisitData = fn(body: &[u8], visit: &mut dyn FnMut(DataUse)) -> Result<(), WireError>;

/// See [`OpInfo::visit_handles`].
pub type VisitHandles = fn(body: &[u8], visit: &mut dyn FnMut(Handle)) -> Result<(), WireError>;

/// An operation's request.
pub trait Op<'a>: Wire<'a> {
    /// Its row in the table.
    const INFO: OpInfo;
}

/// An operation of class [`Class::Sync`].
pub trait SyncOp<'a>: Op<'a> {
    /// Its reply.
    type Reply: for<'r> Wire<'r>;
}

/// A driver's answer to a `sync` operation.
#[derive(Debug)]
pub enum Answer<R> {
    /// The reply.
    Now(R),
    /// The driver took the reply slot from the call's context and completes it when the work is done.
    Later,
}

/// How a dispatched operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// An `async` operation was executed.
    Done,
    /// A `sync` operation was executed; its reply was appended to the reply buffer.
    Replied,
    /// The driver answers a `sync` operation later.
    Later,
    /// The operation failed: for `async` a deferred error, for `sync` the reply's status.
    Failed(Status),
}

/// Why a record is one that no correct client sends. It ends the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The opcode is not in the table.
    #[error("unknown opcode {0:#06x}")]
    Opcode(u16),
    /// The body does not decode.
    #[error("operation {op} does not decode")]
    Body {
        /// The operation.
        op: &'static str,
        /// What is wrong.
        #[source]
        source: WireError,
    },
    /// A `sync` operation without a reply slot, or an `async` operation with one.
    #[error("operation {0} has a reply slot where its class has none, or the reverse")]
    Slot(&'static str),
}

/// Decodes a record's whole body.
///
/// # Errors
/// [`Malformed::Body`] if it does not decode, or if bytes are left over.
pub fn decode<'a, T: Op<'a>>(body: &'a [u8]) -> Result<T, Malformed> {
    let mut reader = Reader::new(body);
    T::get(&mut reader)
        .and_then(|op| reader.finish().map(|()| op))
        .map_err(|source| Malformed::Body { op: T::INFO.name, source })
}

/// Appends the operation's body (without the record header) to `buf`.
#[inline]
pub fn encode<'a, T: Op<'a>>(op: &T, buf: &mut Vec<u8>) {
    op.put(&mut Writer(buf));
}

/// Decodes a reply's payload. Fails for anything that a correct server does not send.
pub fn decode_reply<R: for<'r> Wire<'r>>(payload: &[u8]) -> Result<R, WireError> {
    let mut reader = Reader::new(payload);
    let reply = R::get(&mut reader)?;
    reader.finish()?;
    Ok(reply)
}

macro_rules! ops {
    (
        $(#[$tmeta:meta])* trait $chapter:ident;
        $(
            $(#[$meta:meta])*
            $class:ident $opcode:literal $method:ident: $name:ident $(<$lt:lifetime>)?
                [order $order:ident, may_block $may_block:ident, lane $lane:ident $(, hold $hold:ident)? $(, since $since:literal)?]
            {
                $($(#[$fmeta:meta])* $field:ident: $ty:ty),* $(,)?
            } $(-> $reply:ident { $($(#[$rmeta:meta])* $rfield:ident: $rty:ty),* $(,)? })?
        )*
    ) => {
        $(
            $crate::wire_struct! {
                $(#[$meta])*
                pub struct $name $(<$lt>)? { $($(#[$fmeta])* $field: $ty),* }
            }

            ops!(@op $class $opcode $method $name ($($lt)?)
                [$order $may_block $lane [$($hold)?] [$($since)?]] [$($($rfield: $rty),*)?]);
            ops!(@reply $name ($($lt)?) $($reply { $($(#[$rmeta])* $rfield: $rty),* })?);
        )*

        $(#[$tmeta])*
        ///
        /// Each method is one operation. The request is decoded but its values are unchecked: handles may be
        /// unknown, and ranges may be anything. `cx` is the call's context, which the server defines. A
        /// method that an implementation omits returns `CUDA_ERROR_NOT_SUPPORTED`.
        pub trait $chapter<C> {
            $(ops!{@method $class [$(#[$meta])*] $method $name ($($lt)?) $($reply)?})*
        }

        /// The chapter's rows of the table.
        pub(super) const ROWS: &[$crate::ops::OpInfo] = &[$(<$name as $crate::ops::Op>::INFO),*];

        /// Executes the record if its opcode belongs to this chapter.
        pub(super) fn dispatch<C, D: $chapter<C> + ?Sized>(
            driver: &mut D,
            cx: &mut C,
            opcode: u16,
            body: &[u8],
            _reply: &mut Vec<u8>,
        ) -> Result<$crate::ops::Outcome, $crate::ops::Malformed> {
            match opcode {
                $($opcode => {
                    let op = $crate::ops::decode::<$name>(body)?;
                    Ok(ops!(@outcome $class driver.$method(cx, op), _reply))
                })*
                _ => Err($crate::ops::Malformed::Opcode(opcode)),
            }
        }
    };

    (@op $class:ident $opcode:literal $method:ident $name:ident () $($fields:tt)*) => {
        impl<'w> $crate::ops::Op<'w> for $name {
            const INFO: $crate::ops::OpInfo = ops!(@info $class $opcode $method $name $($fields)*);
        }
    };
    (@op $class:ident $opcode:literal $method:ident $name:ident ($lt:lifetime) $($fields:tt)*) => {
        impl<$lt> $crate::ops::Op<$lt> for $name<$lt> {
            const INFO: $crate::ops::OpInfo = ops!(@info $class $opcode $method $name $($fields)*);
        }
    };
    (
        @info $class:ident $opcode:literal $method:ident $name:ident
        [$order:ident $may_block:ident $lane:ident [$($hold:ident)?] [$($since:literal)?]]
        [$($rfield:ident: $rty:ty),*]
    ) => {
        $crate::ops::OpInfo {
            opcode: $opcode,
            name: stringify!($method),
            since: 0 $(+ $since)?,
            class: ops!(@class $class),
            order: $crate::ops::Order::$order,
            may_block: $crate::ops::MayBlock::$may_block,
            lane: $crate::ops::Lane::$lane,
            hold: ops!(@hold $($hold)?),
            carries_data: <$name as $crate::wire::Wire>::CARRIES_DATA,
            request: <$name as $crate::wire::Wire>::SHAPE.fields(),
            reply: &[$($crate::schema::Field {
                name: stringify!($rfield),
                shape: <$rty as $crate::wire::Wire>::SHAPE,
            }),*],
            visit_data: |body, visit| {
                let mut reader = $crate::wire::Reader::new(body);
                let op = <$name as $crate::wire::Wire>::get(&mut reader)?;
                reader.finish()?;
                $crate::wire::Wire::visit_data(&op, visit);
                Ok(())
            },
            visit_handles: |body, visit| {
                let mut reader = $crate::wire::Reader::new(body);
                let op = <$name as $crate::wire::Wire>::get(&mut reader)?;
                reader.finish()?;
                $crate::wire::Wire::visit_handles(&op, visit);
                Ok(())
            },
        }
    };
    (@class async) => { $crate::ops::Class::Async };
    (@class sync) => { $crate::ops::Class::Sync };
    (@hold) => { $crate::ops::Hold::None };
    (@hold $hold:ident) => { $crate::ops::Hold::$hold };
    (@reply $name:ident ($($lt:lifetime)?)) => {};
    (@reply $name:ident ($($lt:lifetime)?) $reply:ident { $($fields:tt)* }) => {
        $crate::wire_struct! {
            #[doc = concat!("The reply to [`", stringify!($name), "`].")]
            pub struct $reply { $($fields)* }
        }
        ops!(@sync $name $reply ($($lt)?));
    };
    (@sync $name:ident $reply:ident ()) => {
        impl<'w> $crate::ops::SyncOp<'w> for $name { type Reply = $reply; }
    };
    (@sync $name:ident $reply:ident ($lt:lifetime)) => {
        impl<$lt> $crate::ops::SyncOp<$lt> for $name<$lt> { type Reply = $reply; }
    };
    (@method async [$(#[$meta:meta])*] $method:ident $name:ident ($($lt:lifetime)?)) => {
        $(#[$meta])*
        fn $method $(<$lt>)? (&mut self, _cx: &mut C, _op: $name $(<$lt>)?) -> Result<(), $crate::Status> {
            Err($crate::Status::NOT_SUPPORTED)
        }
    };
    (@method sync [$(#[$meta:meta])*] $method:ident $name:ident ($($lt:lifetime)?) $reply:ident) => {
        $(#[$meta])*
        fn $method $(<$lt>)? (&mut self, _cx: &mut C, _op: $name $(<$lt>)?) -> Result<$crate::ops::Answer<$reply>, $crate::Status> {
            Err($crate::Status::NOT_SUPPORTED)
        }
    };
    (@outcome async $call:expr, $reply:ident) => {
        match $call {
            Ok(()) => $crate::ops::Outcome::Done,
            Err(status) => $crate::ops::Outcome::Failed(status),
        }
    };
    (@outcome sync $call:expr, $reply:ident) => {
        match $call {
            Ok($crate::ops::Answer::Now(value)) => {
                $crate::wire::Wire::put(&value, &mut $crate::wire::Writer($reply));
                $crate::ops::Outcome::Replied
            }
            Ok($crate::ops::Answer::Later) => $crate::ops::Outcome::Later,
            Err(status) => $crate::ops::Outcome::Failed(status),
        }
    };
}
pub(crate) use ops;

macro_rules! chapters {
    ($($upper:literal $module:ident $chapter:ident;)*) => {
        /// All operations: one trait for each chapter.
        pub trait Driver<C>: $($module::$chapter<C> +)* {}
        impl<C, D: $($module::$chapter<C> +)* ?Sized> Driver<C> for D {}

        /// The table's row for an opcode.
        pub fn info(opcode: u16) -> Option<&'static OpInfo> {
            let rows = match opcode >> 8 {
                $($upper => $module::ROWS,)*
                _ => return None,
            };
            rows.iter().find(|row| row.opcode == opcode)
        }

        /// The table, by chapter.
        pub const CHAPTERS: &[&[OpInfo]] = &[$($module::ROWS),*];

        /// Decodes and executes one record. The bytes of a reply are appended to `reply`.
        pub fn dispatch<C, D: Driver<C> + ?Sized>(
            driver: &mut D,
            cx: &mut C,
            opcode: u16,
            body: &[u8],
            reply: &mut Vec<u8>,
        ) -> Result<Outcome, Malformed> {
            match opcode >> 8 {
                $($upper => $module::dispatch(driver, cx, opcode, body, reply),)*
                _ => Err(Malformed::Opcode(opcode)),
            }
        }
    };
}

chapters! {
    0x01 device DeviceOps;
    0x02 context ContextOps;
    0x03 memory MemoryOps;
    0x04 copy CopyOps;
    0x05 module ModuleOps;
    0x06 launch LaunchOps;
    0x07 stream StreamOps;
    0x08 event EventOps;
    0x09 nvml NvmlOps;
    0x0a graph GraphOps;
    0x0b texture TextureOps;
    0x0c array ArrayOps;
    0x0d green GreenOps;
    0x0e direct DirectOps;
    0x0f activity ActivityOps;
}

/// Every row of the table, chapter by chapter.
pub fn all() -> impl Iterator<Item = &'static OpInfo> {
    CHAPTERS.iter().copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_unique_and_found() {
        let mut seen = std::collections::HashSet::new();
        for row in all() {
            assert!(seen.insert(row.opcode), "{:#06x} twice", row.opcode);
            assert_eq!(info(row.opcode).map(|r| r.name), Some(row.name));
        }
        assert!(seen.len() > 30);
    }

    #[test]
    fn every_operation_names_the_objects_of_its_order() {
        let names = |row: &OpInfo, of: &[&str]| {
            row.request.iter().any(|field| of.contains(&field.shape.to_string().as_str()))
        };
        for row in all() {
            let named = match row.order {
                Order::Streams => names(row, &["StreamId", "EventId", "FunctionId"]),
                Order::Object => {
                    names(row, &["FunctionId", "GraphId"]) && !names(row, &["StreamId", "EventId"])
                }
                _ => true,
            };
            assert!(named, "{} names no object of its order", row.name);
        }
    }

    #[test]
    fn the_express_lane_is_ordered_with_nothing_and_never_blocks() {
        for row in all().filter(|row| row.lane == Lane::Express) {
            assert_eq!((row.order, row.may_block), (Order::None, MayBlock::Never), "{}", row.name);
        }
    }

    #[test]
    fn an_unknown_opcode_is_malformed() {
        struct Nothing;
        impl device::DeviceOps<()> for Nothing {}
        impl context::ContextOps<()> for Nothing {}
        impl memory::MemoryOps<()> for Nothing {}
        impl copy::CopyOps<()> for Nothing {}
        impl module::ModuleOps<()> for Nothing {}
        impl launch::LaunchOps<()> for Nothing {}
        impl stream::StreamOps<()> for Nothing {}
        impl event::EventOps<()> for Nothing {}
        impl nvml::NvmlOps<()> for Nothing {}
        impl graph::GraphOps<()> for Nothing {}
        impl texture::TextureOps<()> for Nothing {}
        impl array::ArrayOps<()> for Nothing {}
        impl green::GreenOps<()> for Nothing {}
        impl direct::DirectOps<()> for Nothing {}
        impl activity::ActivityOps<()> for Nothing {}
        let mut reply = Vec::new();
        for opcode in [0, 0x00ff, 0x01ff, 0xffff] {
            assert_eq!(
                dispatch(&mut Nothing, &mut (), opcode, &[], &mut reply),
                Err(Malformed::Opcode(opcode))
            );
        }
        // A method that the implementation omits is "not supported", not success.
        let body = 7u32.to_le_bytes();
        assert_eq!(
            dispatch(
                &mut Nothing,
                &mut (),
                <stream::StreamSynchronize as Op>::INFO.opcode,
                &body,
                &mut reply
            ),
            Ok(Outcome::Failed(Status::NOT_SUPPORTED))
        );
    }
}
