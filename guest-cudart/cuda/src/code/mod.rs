//! Code: images, modules, libraries and functions.

pub(crate) mod function;
pub(crate) mod image;
pub(crate) mod jit_options;
pub(crate) mod library;
pub(crate) mod linker;
pub(crate) mod loading;
pub(crate) mod module;
pub(crate) mod names;
pub(crate) mod occupancy;
pub(crate) mod reading;
