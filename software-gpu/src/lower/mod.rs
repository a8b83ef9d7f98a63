//! Lowers the syntax tree to the register machine.
//!
//! In reading order; each uses only those before it:
//! - `info`: what is known of a module's kernels and variables
//! - `types`, `builtin`: the sizes of types, and the functions without a body
//! - `function`: one function's statements, registers and symbols
//! - `inst`: an instruction's modifiers and the choice of the module that lowers it; the modules after it
//!   lower instructions by family
//! - `link`: links the files of a module, places its variables and lowers its functions

mod access;
mod asynchronous;
mod builtin;
mod control;
mod function;
pub(crate) mod info;
mod inst;
pub(crate) mod link;
mod matrix;
mod select;
mod texture;
mod types;
mod video;
