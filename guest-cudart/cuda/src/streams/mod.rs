//! Streams and events as the program names them.

pub(crate) mod capture_rules;
pub(crate) mod event;
pub(crate) mod green_gates;
pub(crate) mod stream_table;
