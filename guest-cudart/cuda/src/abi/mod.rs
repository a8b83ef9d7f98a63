//! The C interface: structures of `cuda.h`, arguments, status codes, the macro that exports functions, and
//! the program's callbacks for the driver's log, which are called when a function ends.

pub(crate) mod arguments;
pub(crate) mod log_callbacks;
#[macro_use]
pub(crate) mod macros;
pub(crate) mod result;
pub mod types;
