//! The C interface: structures of `cuda.h`, arguments, status codes, and the macro that exports functions.

pub(crate) mod arguments;
#[macro_use]
pub(crate) mod macros;
pub(crate) mod result;
pub mod types;
