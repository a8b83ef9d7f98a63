//! A service manager for one daemon, as systemd is one: keeps what the daemon gives it, and starts another
//! one with that when the daemon was killed.
//!
//! ```text
//! supervisor /run/notify /opt/rgpu/vhost-rgpu --server …
//! ```
//!
//! It prints `serves PROCESS` when a daemon says that it is ready, and ends with the daemon when that ends
//! otherwise than by a signal.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::Duration;

use test_kit::manager::Manager;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "supervisor SOCKET PROGRAM ARGUMENT…";
    let (socket, program) = (arguments.next().ok_or(usage)?, arguments.next().ok_or(usage)?);
    let arguments: Vec<String> = arguments.collect();
    let manager = Manager::at(PathBuf::from(socket));
    let ready = || manager.said().iter().filter(|said| *said == "READY=1").count();
    loop {
        let before = ready();
        let mut daemon = manager.command(&program).args(&arguments).spawn()?;
        let mut told = false;
        let status = loop {
            if !told && ready() > before {
                println!("serves {}", daemon.id());
                told = true;
            }
            if let Some(status) = daemon.try_wait()? {
                break status;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if status.signal().is_none() {
            return Err(format!("the daemon has ended by itself: {status}").into());
        }
    }
}
