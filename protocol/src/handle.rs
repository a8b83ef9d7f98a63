//! Ids of a client's objects. The client chooses them, so that creating an object needs no answer. The server
//! maps them to the driver's handles, separately for each session, and refuses an id that is unknown or in
//! use.

use crate::schema::Shape;
use crate::wire::{Reader, Wire, WireError, Writer};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($inner:ty) $(=> $order:ident)?;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl Wire<'_> for $name {
            const SHAPE: Shape = Shape::Scalar { name: stringify!($name), bytes: size_of::<$inner>() };
            #[inline]
            fn put(&self, w: &mut Writer<'_>) {
                self.0.put(w);
            }
            #[inline]
            fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
                <$inner>::get(r).map($name)
            }
            $(
                #[inline]
                fn visit_handles(&self, visit: &mut dyn FnMut(Handle)) {
                    visit(Handle::$order(*self));
                }
            )?
        }
    )*};
}

handles! {
    /// A context. Below [`crate::channel::MAX_CONTEXTS`]: it is also the index of the context's error word.
    /// The primary context of device *n* is *n*; created contexts follow from
    /// [`crate::channel::MAX_DEVICES`].
    ContextId(u32);
    /// A stream. Below [`crate::channel::MAX_STREAMS`]: it is also the index of the stream's progress word.
    /// The legacy default stream of context *c* is *c*; created streams follow from
    /// [`crate::channel::MAX_CONTEXTS`].
    StreamId(u32) => Stream;
    /// An event.
    EventId(u32) => Event;
    /// A loaded module or library.
    ModuleId(u32);
    /// A linker: `CUlinkState`.
    LinkId(u32);
    /// A kernel: the module in the upper half, the function's index in that module's function table in the
    /// lower half.
    FunctionId(u64) => Function;
    /// An instantiated graph.
    GraphId(u32) => Graph;
    /// An array, a mipmapped array, or a level of one.
    ArrayId(u32);
    /// A wait of a stream for the client ([`crate::ops::stream::StreamHostWait`]).
    TicketId(u64);
    /// Device memory without an address: created with `cuMemCreate`, or imported from another process.
    MemoryId(u32);
    /// A green context: a context with a part of a device.
    GreenId(u32);
    /// A descriptor of a green context's parts: `CUdevResourceDesc`.
    DescriptorId(u32);
}

/// An object that determines the order of commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Handle {
    /// The command is work on this stream, or changes it.
    Stream(StreamId),
    /// The command records, waits for or changes this event.
    Event(EventId),
    /// The command uses this function, or changes it.
    Function(FunctionId),
    /// The command uses this instantiated graph, or changes it.
    Graph(GraphId),
}

impl FunctionId {
    /// Function `index` of `module`.
    pub fn new(module: ModuleId, index: u32) -> Self {
        FunctionId(u64::from(module.0) << 32 | u64::from(index))
    }

    /// The module that holds the function.
    pub fn module(self) -> ModuleId {
        ModuleId((self.0 >> 32) as u32)
    }

    /// Index in the module's function table.
    pub fn index(self) -> u32 {
        self.0 as u32
    }
}
