//! Every CUDA test program as a native client on the software GPU, over both transports.
//!
//! `cargo xtask test programs` builds what this needs and runs it. Each test starts its own server and daemon.

use rgpu_tests::program_tests;

program_tests!(local, rgpu_tests::programs::Way::Client("software", "local"));
program_tests!(tcp, rgpu_tests::programs::Way::Client("software", "tcp"));
