//! The operations on streams: copies, fills, launches, host functions, memory operations.

pub(crate) mod activity;
pub(crate) mod array_copy;
pub(crate) mod copy;
pub(crate) mod copy_boxes;
pub(crate) mod direct_copy;
pub(crate) mod fill;
pub(crate) mod host_function;
pub(crate) mod launch;
pub(crate) mod memory_operation;
pub(crate) mod nccl_net;
pub(crate) mod server_copy;
