//! The crate's public interface: the GPU, its memory, streams, events and modules.

pub(crate) mod child_launch;
pub(crate) mod copy;
pub(crate) mod event;
pub(crate) mod gpu;
pub(crate) mod launch;
pub(crate) mod module;
pub(crate) mod stream;
pub(crate) mod texture;
