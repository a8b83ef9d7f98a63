//! The program `rgpu-server`. Everything is in the library, so that tests can take a worker's place.

use std::process::ExitCode;

fn main() -> ExitCode {
    rgpu_server::main()
}
