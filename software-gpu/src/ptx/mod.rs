//! Parses PTX text to a syntax tree that keeps each instruction as a name, modifiers and operands.
//!
//! The parser knows PTX's grammar but not its instructions. Their meaning, and whether an instruction exists
//! at all, is decided where it is lowered.

pub(crate) mod ast;
mod lexer;
mod parser;

pub(crate) use parser::parse;
