//! Streams and events as the program names them.

pub(crate) mod event;
