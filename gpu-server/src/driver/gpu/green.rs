//! Green contexts, and the parts of devices that they use.

use crate::driver::call::Result;
use protocol::handle::StreamId;

use super::stream::GpuStreams;

/// The result of a split.
pub struct Split<P> {
    /// How many groups there are, or would be.
    pub count: u32,
    /// The groups.
    pub groups: Vec<P>,
    /// What remains.
    pub rest: P,
}

/// Green contexts, and the parts of devices that they use.
pub trait GpuGreenContexts: GpuStreams {
    /// A part of a device. It is a plain value.
    type Part: Clone + PartialEq + Send;
    /// A descriptor of parts.
    type PartDescriptor: Send;
    /// A green context.
    type Green: Send;

    /// A part as the client sees it: its type (0: none) and the values for that type.
    fn tell_part(part: &Self::Part) -> (u32, [u32; 3]);

    /// All of a device's resources of a type.
    fn device_part(&mut self, device: u32, kind: u32) -> Result<Self::Part>;

    /// All of a green context's resources of a type.
    fn green_part(&mut self, green: &Self::Green, kind: u32) -> Result<Self::Part>;

    /// Splits a part into at most `groups` groups of at least `least`. `None` only counts the possible
    /// groups.
    fn split_part(
        &mut self,
        part: &Self::Part,
        groups: Option<u32>,
        flags: u32,
        least: u32,
    ) -> Result<Split<Self::Part>>;

    /// Makes a descriptor of several parts.
    fn describe_parts(&mut self, parts: Vec<Self::Part>) -> Result<Self::PartDescriptor>;

    /// Makes a green context.
    fn make_green(
        &mut self,
        device: u32,
        descriptor: &Self::PartDescriptor,
        flags: u32,
    ) -> Result<Self::Green>;

    /// Destroys a green context that the session has removed from its table. It has no streams.
    fn destroy_green(&mut self, device: u32, green: Self::Green) -> Result;

    /// The device of a green context is about to be reset. Its streams no longer exist.
    fn forget_green(&mut self, green: Self::Green);

    /// Makes a stream in a green context.
    fn green_stream(
        &mut self,
        id: StreamId,
        device: u32,
        green: &Self::Green,
        priority: i32,
    ) -> Result<Self::Stream>;
}
