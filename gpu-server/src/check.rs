//! `rgpu-server check`: reports what a server would find on this machine.

use std::process::ExitCode;

use crate::config::{Backend, Backing};
use crate::driver;
use crate::driver::quota::Quota;

/// Prints what it finds. Fails if nothing could be served.
pub fn main(mut backing: Backing) -> ExitCode {
    crate::log::start("error");
    let only_cuda = driver::present::decide_backend(&mut backing);
    let backing = &backing;
    println!("{}", crate::parent::server_name());
    if backing.backend != Backend::Software {
        match driver::cuda::report() {
            Ok(lines) => lines.iter().for_each(|line| println!("  {line}")),
            Err(e) => println!("  CUDA: {e}"),
        }
        let (Ok(line) | Err(line)) = driver::cuda::cupti::report(backing.cupti.as_deref());
        println!("  {line}");
    }
    match driver::nvml::Management::new(backing, Quota::default()).devices() {
        Ok(devices) => println!("  NVML: {} device(s): {}", devices.len(), devices.join(", ")),
        Err(status) => {
            println!("  NVML is not available (nvmlReturn_t {status}): clients' nvidia-smi will not work")
        }
    }
    let made = driver::make(backing, Quota::default()).and_then(|mut backend| {
        // Address ranges are reserved with the first context.
        backend.warm()?;
        Ok(backend)
    });
    match made {
        Ok(backend) => {
            let devices = backend.devices();
            println!(
                "  would serve with {}: {} device(s): {}",
                backend.name(),
                devices.len(),
                devices.join(", ")
            );
            ExitCode::SUCCESS
        }
        Err(e) => {
            println!("  cannot serve: {}", e.reason);
            only_cuda.into_iter().for_each(|why| println!("  {why}"));
            ExitCode::FAILURE
        }
    }
}
