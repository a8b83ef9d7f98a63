//! Every CUDA test program on this machine's GPU: natively, and as a native client over both transports.
//!
//! `cargo xtask test gpu` builds what this needs and runs it. What passes natively but not through rgpu is rgpu's fault;
//! what fails natively is the program's.

use rgpu_tests::program_tests;

program_tests!(native, rgpu_tests::programs::Way::Native);
program_tests!(local, rgpu_tests::programs::Way::Client("cuda", "local"));
program_tests!(tcp, rgpu_tests::programs::Way::Client("cuda", "tcp"));
