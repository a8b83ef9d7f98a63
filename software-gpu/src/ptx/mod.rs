//! PTX text to a syntax tree that keeps each instruction as its name, its modifiers and its operands.
//!
//! The parser knows the grammar of PTX, not its instructions: what an instruction means, and whether it is
//! one at all, is decided where it is lowered, in one place.

pub(crate) mod ast;
mod lexer;
mod parser;

pub(crate) use parser::parse;
