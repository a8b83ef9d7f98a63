//! The program `vhost-rgpu`. Everything is in the library, where a fuzz target reaches it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_rgpu::main()
}
