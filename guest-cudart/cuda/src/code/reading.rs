//! Reads images in this process, so that loading them and asking about their functions needs no round trip.
//!
//! Only machine code of the architectures that `device-code` reads is handled. The driver is asked about
//! everything else: PTX, which only the server's compiler can judge, images with several candidates for the
//! device, and unknown or damaged ones. A device that runs an image's PTX (the software GPU) is asked, too,
//! because the machine code doesn't tell whether and how it runs a kernel. If the server is near, asking
//! takes less time than unpacking an image and is preferred ([`Policy::IfFar`]).

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::Duration;

use crate::code::jit_options::Jit;
use crate::process::context::Context;
use crate::process::device_attributes::attr;
use crate::process::driver;
use client::log;
use client::ops::module::MOST_FUNCTIONS;
use device_code::cubin::{self, Cubin};
use device_code::fatbin::{self, Entry, Kind};

/// Code longer than this, in bytes, is not read.
const MOST: u64 = 256 << 20;
/// With round trips shorter than this, nothing is read.
const NEAR: Duration = Duration::from_micros(150);
/// Bytes of code that can be unpacked per microsecond of round trip saved. Counts only the time by which
/// unpacking here takes longer than on the server, which works meanwhile.
const BYTES_A_MICROSECOND: u64 = 670;
/// Round trips that reading an image saves, cautiously estimated: one for its load, and some for its kernels.
/// If no image is read, PyTorch's start waits for 886 answers about 81 images.
const ANSWERS: u64 = 4;
/// Bytes that a record has for a function's name and the layout of its parameters.
const MOST_DESCRIBED: usize = 32 << 10;

/// Which images are read: `RGPU_READ_IMAGES`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    /// Those for which asking would take longer, on devices that run machine code.
    IfFar,
    /// All. On a device that runs PTX, kernels that it cannot run then fail after their launch.
    Always,
    /// None.
    Never,
    /// All, but the server is asked as well. Differences are logged, and the server's answers win.
    Check,
}

fn policy() -> Policy {
    static POLICY: OnceLock<Policy> = OnceLock::new();
    *POLICY.get_or_init(|| {
        match log::setting::word("RGPU_READ_IMAGES", &["auto", "always", "never", "check"]) {
            Some("always") => Policy::Always,
            Some("check") => Policy::Check,
            Some("never") => Policy::Never,
            _ => Policy::IfFar,
        }
    })
}

/// Whether values read here are compared with the server's answers.
pub(crate) fn is_checked() -> bool {
    policy() == Policy::Check
}

/// Whether to ask for things before the program does, because round trips are long.
pub(crate) fn asks_ahead() -> bool {
    match policy() {
        Policy::Always | Policy::Check => true,
        Policy::Never => false,
        Policy::IfFar => driver::driver()
            .is_ok_and(|driver| driver.servers.iter().any(|server| server.session.round_trip() >= NEAR)),
    }
}

/// A device's architecture: 90 for compute capability 9.0.
fn architecture(device: u32) -> Option<u32> {
    let device = driver::device(device as i32).ok()?;
    let [major, minor] = [attr::COMPUTE_CAPABILITY_MAJOR, attr::COMPUTE_CAPABILITY_MINOR];
    u32::try_from(device.attribute(major) * 10 + device.attribute(minor)).ok()
}

/// The only entry of a fat binary with machine code that a device of this architecture runs.
///
/// # Errors
/// Why no entry is read here.
fn candidate(image: &[u8], arch: u32) -> Result<Entry<'_>, &'static str> {
    let mut containers = fatbin::containers(image);
    let entries = containers.next().and_then(Result::ok).ok_or("it is PTX, or damaged")?;
    // What follows was linked into the first, for devices that it has no machine code for.
    let (same_generation, newest) = (arch / 10, arch);
    let mut fitting = entries.into_iter().filter(|entry| {
        entry.kind == Kind::Elf && entry.arch / 10 == same_generation && entry.arch <= newest
    });
    let first = fitting.next().ok_or("it has no machine code for the device")?;
    if fitting.next().is_some() {
        Err("it has more than one piece of machine code for the device")
    } else if first.arch != arch {
        Err("its machine code is of an earlier architecture")
    } else {
        Ok(first)
    }
}

/// The machine code in an image for a device of this architecture, if unpacking pays. `round_trip`: how long
/// an answer takes; `None`: unpack in any case.
///
/// # Errors
/// Why none is read here.
fn machine_code(
    image: &[u8],
    arch: u32,
    round_trip: Option<Duration>,
) -> Result<Cow<'_, [u8]>, &'static str> {
    if cubin::is_elf(image) {
        return if image.len() as u64 <= MOST { Ok(Cow::Borrowed(image)) } else { Err("it is too long") };
    }
    let entry = candidate(image, arch)?;
    let limit = round_trip.filter(|_| entry.is_packed());
    entry.code(limit.map_or(MOST, worth_unpacking)).map_err(|error| match error {
        fatbin::Error::TooLong(_) => "unpacking it would take longer than asking",
        _ => "it is damaged",
    })
}

/// Maximum size in bytes of an image that is worth unpacking to save round trips this long.
fn worth_unpacking(round_trip: Duration) -> u64 {
    let microseconds = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    microseconds.saturating_mul(BYTES_A_MICROSECOND * ANSWERS).min(MOST)
}

/// The contents of an image, if it is read here: see the module's documentation.
pub(crate) fn read(context: &Context, image: &[u8], jit: &Jit) -> Option<Cubin> {
    let server = context.server;
    let round_trip = match policy() {
        Policy::Never => return None,
        Policy::Always | Policy::Check => None,
        Policy::IfFar if !server.runs_machine_code => return None,
        Policy::IfFar => Some(server.session.round_trip()),
    };
    if round_trip.is_some_and(|time| time < NEAR) {
        return None;
    }
    let asked = |why: &dyn std::fmt::Display| {
        log::debug(format_args!("the load of an image of {} bytes is waited for: {why}", image.len()));
    };
    // Options change what the driver makes of an image, and only the driver can report messages.
    if !jit.is_plain() {
        asked(&"it is loaded with options");
        return None;
    }
    let arch = architecture(context.device).filter(|arch| cubin::ARCHITECTURES.contains(arch))?;
    let code = machine_code(image, arch, round_trip).inspect_err(|why| asked(why)).ok()?;
    let cubin = cubin::read(&code).inspect_err(|why| asked(why)).ok()?;
    let describable = |kernel: &cubin::Kernel| kernel.name.len() + 8 * kernel.params.len() <= MOST_DESCRIBED;
    let known = cubin.arch == arch
        && cubin.kernels.len() < MOST_FUNCTIONS as usize
        && cubin.kernels.iter().all(describable);
    if !known {
        asked(&"its kernels are too many, or one has too many parameters");
    }
    known.then_some(cubin)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fat binary of entries: kind, architecture, code.
    fn fat(entries: &[(u16, u32, &[u8])]) -> Vec<u8> {
        let mut all = Vec::new();
        for (kind, arch, code) in entries {
            let mut head = [0; 64];
            head[..2].copy_from_slice(&kind.to_le_bytes());
            head[4..8].copy_from_slice(&64u32.to_le_bytes());
            head[8..16].copy_from_slice(&(code.len() as u64).to_le_bytes());
            head[0x1c..0x20].copy_from_slice(&arch.to_le_bytes());
            all.extend(head);
            all.extend_from_slice(code);
        }
        let mut image = fatbin::MAGIC.to_le_bytes().to_vec();
        image.extend(1u16.to_le_bytes());
        image.extend(16u16.to_le_bytes());
        image.extend((all.len() as u64).to_le_bytes());
        image.extend(all);
        image
    }

    #[test]
    fn the_only_machine_code_for_the_device_is_read() {
        let image = fat(&[(2, 80, b"eighty"), (2, 90, b"ninety"), (1, 90, b"ptx"), (2, 100, b"hundred")]);
        assert_eq!(machine_code(&image, 90, None).as_deref(), Ok(&b"ninety"[..]));
        assert!(machine_code(&image, 120, None).is_err());
    }

    #[test]
    fn longer_round_trips_allow_larger_images() {
        assert_eq!(worth_unpacking(Duration::from_micros(200)), 536_000);
        assert_eq!(worth_unpacking(Duration::from_millis(10)), 26_800_000);
        assert_eq!(worth_unpacking(Duration::MAX), MOST);
    }

    #[test]
    fn a_choice_is_left_to_the_driver() {
        let two = fat(&[(2, 90, b"one"), (2, 90, b"two")]);
        assert!(machine_code(&two, 90, None).is_err());
        // Machine code for an earlier minor version also runs.
        let other = fat(&[(2, 80, b"eighty")]);
        assert!(machine_code(&other, 86, None).is_err());
        assert!(machine_code(&fat(&[(1, 90, b"ptx")]), 90, None).is_err());
    }
}
