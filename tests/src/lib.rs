//! Support for the end-to-end tests: daemons, programs, and the machines that the tests boot. Fake peers are
//! in `tests/kit/`.

pub mod calls;
pub mod daemons;
pub mod driver_bed;
pub mod guest;
pub mod programs;
pub mod terminal;
pub mod tree;

pub mod machine;
pub mod mock_device;
