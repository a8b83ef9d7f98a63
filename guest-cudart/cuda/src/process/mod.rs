//! The process: its session and devices, and in each device the contexts and the state of their streams.

pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod copies_ahead;
pub(crate) mod device_attributes;
pub(crate) mod driver;
pub(crate) mod fences;
pub(crate) mod green;
pub(crate) mod holds;
pub(crate) mod host_calls;
pub(crate) mod ids;
pub(crate) mod limits;
pub(crate) mod room;
pub(crate) mod server_waits;
pub(crate) mod stream;
pub(crate) mod visible_devices;
pub(crate) mod work_signal;
