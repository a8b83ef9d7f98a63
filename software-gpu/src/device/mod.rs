//! The device as its user sees it: the GPU, its memory, streams, events and modules.

pub(crate) mod children;
pub(crate) mod event;
pub(crate) mod gpu;
pub(crate) mod launch;
pub(crate) mod memory;
pub(crate) mod module;
mod region;
pub(crate) mod stream;
pub(crate) mod tensor;
pub(crate) mod texts;
pub(crate) mod texture;
pub(crate) mod transfer;
