//! The process: its session and devices, and in each device the contexts and the state of their streams.

pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod copy_fences;
pub(crate) mod driver;
pub(crate) mod limits;
pub(crate) mod stream;
pub(crate) mod visible_devices;
