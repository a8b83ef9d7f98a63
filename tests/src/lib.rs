//! End-to-end tests, from outside, and the machines they boot.

pub mod calls;
pub mod daemons;
pub mod guest;
pub mod programs;
pub mod tree;

pub mod machine;
pub mod mock_device;
