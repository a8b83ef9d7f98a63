//! Programs that cannot print.

use std::io::Write;

use nix::sys::signal::{SigHandler, Signal, raise, signal};

/// Ends the process where `print!` cannot write, which would panic: by SIGPIPE if nobody reads the output any
/// more (`PROGRAM | head -1`), and otherwise with a line on standard error and this exit status.
pub fn end_if_it_fails(program: &'static str, status: u8) {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let Some(why) =
            panic.payload_as_str().and_then(|text| text.strip_prefix("failed printing to stdout: "))
        else {
            return others(panic);
        };
        if why == std::io::Error::from(nix::Error::EPIPE).to_string() {
            // SAFETY: the default action runs no code of this process.
            let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
            let _ = raise(Signal::SIGPIPE);
        }
        // Standard error may be gone, too.
        let _ = writeln!(std::io::stderr(), "{program}: cannot print: {why}");
        std::process::exit(status.into());
    }));
}
