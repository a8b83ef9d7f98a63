//! The crate's public interface: the GPU, its memory, streams, events and modules.

mod address_pool;
pub(crate) mod child_launch;
pub(crate) mod copy;
pub(crate) mod error_text;
pub(crate) mod event;
pub(crate) mod gpu;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod stream;
pub(crate) mod tensor_map;
pub(crate) mod texture;
