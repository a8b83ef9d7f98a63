//! The types of pointers that programs pass, for this library's errors. See the crate `arguments`.

use crate::error::Error;

pub(crate) use ::arguments::Count;

/// This library.
#[derive(Clone, Copy)]
pub enum Cudart {}

impl ::arguments::Library for Cudart {
    type Error = Error;
    const INVALID_VALUE: Error = Error::INVALID_VALUE;
}

/// A place for a result, or NULL.
pub(crate) type Out<'a, T> = ::arguments::Out<'a, T, Cudart>;
/// A value that a function reads, or NULL.
pub(crate) type In<'a, T> = ::arguments::In<'a, T, Cudart>;
/// An array that a function reads, or NULL.
pub(crate) type Array<'a, T> = ::arguments::Array<'a, T, Cudart>;
