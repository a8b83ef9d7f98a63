//! The exported functions, one module for each chapter of NVIDIA's "CUDA Driver API" manual.

pub(crate) mod copy_batches;
pub(crate) mod devices;
pub(crate) mod errors;
pub(crate) mod export_table;
pub(crate) mod get_proc_address;
pub(crate) mod graph_build;
pub(crate) mod graph_inspect;
pub(crate) mod graph_instances;
pub(crate) mod graph_params;
pub(crate) mod green_contexts;
pub(crate) mod ipc;
pub(crate) mod launch_deprecated;
pub(crate) mod occupancy;
pub(crate) mod peers;
pub(crate) mod pointers;
pub(crate) mod profiler;
pub(crate) mod stream_attributes;
pub(crate) mod tensor_maps;
pub(crate) mod unsupported;
