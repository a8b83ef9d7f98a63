//! Memory of devices and of the host: who owns which address, and how bytes travel.

pub(crate) mod address;
pub(crate) mod array;
pub(crate) mod claims;
pub(crate) mod device_memory;
pub(crate) mod graph_chunks;
pub(crate) mod graph_memory;
pub(crate) mod host_mappings;
pub(crate) mod host_memory;
pub(crate) mod host_pool;
pub(crate) mod managed;
pub(crate) mod managed_advice;
pub(crate) mod pending_writes;
pub(crate) mod pinned;
pub(crate) mod pinned_regions;
pub(crate) mod pool;
pub(crate) mod pool_export;
pub(crate) mod shared_descriptor;
pub(crate) mod staging;
pub(crate) mod stream_ordered;
pub(crate) mod texture;
pub(crate) mod transfer;
pub(crate) mod virtual_memory;
