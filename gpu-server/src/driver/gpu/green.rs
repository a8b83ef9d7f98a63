//! Green contexts, and the parts of devices that they have.

use crate::driver::call::Result;
use protocol::handle::StreamId;

use super::GpuStreams;

/// What came of a split.
pub struct Split<P> {
    /// How many groups there are, or would be.
    pub count: u32,
    /// The groups.
    pub groups: Vec<P>,
    /// What is left.
    pub rest: P,
}

/// Green contexts, and the parts of devices that they have.
pub trait GpuGreenContexts: GpuStreams {
    /// A part of a device, a value.
    type Part: Clone + PartialEq + Send;
    /// A descriptor of parts.
    type PartDescriptor: Send;
    /// A green context.
    type Green: Send;

    /// A part as the client sees it: its kind (0: none) and the values of that kind.
    fn tell_part(part: &Self::Part) -> (u32, [u32; 3]);

    /// All resources of a kind of a device.
    fn device_part(&mut self, device: u32, kind: u32) -> Result<Self::Part>;

    /// All resources of a kind of a green context.
    fn green_part(&mut self, green: &Self::Green, kind: u32) -> Result<Self::Part>;

    /// Splits a part into at most `groups` groups of at least `least`. `None` only asks how many there would be.
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

    /// A green context is out of the session's table, and has no streams.
    fn destroy_green(&mut self, device: u32, green: Self::Green) -> Result;

    /// The device of a green context is about to be reset. Its streams are gone.
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
