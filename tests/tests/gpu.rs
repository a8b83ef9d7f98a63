//! Every CUDA test program on this machine's GPU: natively, and as a native client over both transports and in both
//! builds, with the same output.
//!
//! `cargo xtask test gpu` builds what this needs and runs it. What passes natively but not through rgpu is rgpu's fault;
//! what fails natively is the program's.

use rgpu_tests::program_tests;
use rgpu_tests::programs::{Way, same_as_native};

/// All ways but the native one.
const WAYS: [Way; 3] =
    [Way::Client("cuda", "local"), Way::Client("cuda", "tcp"), Way::Inside("cuda", "local")];

fn same(name: &str) -> anyhow::Result<()> {
    same_as_native(name, &WAYS)
}

program_tests!(all, super::same, and gpu);
