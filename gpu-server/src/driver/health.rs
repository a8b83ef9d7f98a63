//! What can go wrong with a device, and the consequences.
//!
//! NVIDIA's devices are watched through NVML ([`super::cuda::nvml::health`]). Software devices cannot break,
//! so tests write events for them, one per line ([`Event::parse`]).

use std::fmt;

use protocol::Status;

/// Something that happened to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The driver logged an error with this number (<https://docs.nvidia.com/deploy/xid-errors/>).
    Xid(u64),
    /// A memory error that ECC could not correct.
    Ecc,
    /// An active NVLink link became inactive.
    NvLink(u32),
    /// The driver can no longer access the device.
    Lost,
    /// The driver requests this recovery action (`nvmlDeviceGpuRecoveryAction_t`). 0: none.
    Recovery(u32),
    /// The device runs slower because it is too hot.
    Hot,
    /// The device is no longer slowed down by heat.
    Cool,
}

/// The consequence of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Only a line in the log: a program's error, or already handled by the hardware.
    Note,
    /// The device takes no new sessions until it is [`Well`](Verdict::Well) again.
    Pause,
    /// The device permanently takes no new sessions. `error`: what CUDA reports from now on to every program
    /// on it. `None`: the driver tells the affected programs.
    Fail { error: Option<Status> },
    /// The reason for a pause is over.
    Well,
}

/// Xids caused by programs, or that concern only one program. In order: illegal instructions and addresses, a
/// program's end, video, a class error, a contained memory error (CUDA tells the program), a context switch
/// that took too long, an access over NVLink that is not allowed.
const OF_PROGRAMS: [u64; 10] = [13, 31, 32, 43, 45, 68, 69, 94, 109, 137];
/// Xids for memory errors that were corrected or whose memory was retired.
const DEALT_WITH: [u64; 3] = [63, 92, 172];
const FALLEN_OFF_THE_BUS: u64 = 79;
const UNCONTAINED_ECC: u64 = 95;
/// What CUDA reports if it cannot access a device: `cudaErrorUnknown`.
const LOST: Status = Status(999);
/// `CUDA_ERROR_ECC_UNCORRECTABLE`.
pub const ECC_UNCORRECTABLE: Status = Status(214);
/// `CUDA_ERROR_NVLINK_UNCORRECTABLE`.
pub const NVLINK_UNCORRECTABLE: Status = Status(220);

impl Event {
    /// The consequence of this event.
    pub fn verdict(self) -> Verdict {
        match self {
            Event::Xid(number) if OF_PROGRAMS.contains(&number) || DEALT_WITH.contains(&number) => {
                Verdict::Note
            }
            Event::Xid(FALLEN_OFF_THE_BUS) | Event::Lost => Verdict::Fail { error: Some(LOST) },
            Event::Xid(UNCONTAINED_ECC) => Verdict::Fail { error: Some(ECC_UNCORRECTABLE) },
            Event::Xid(_) | Event::Ecc | Event::NvLink(_) => Verdict::Fail { error: None },
            Event::Recovery(0) => Verdict::Note,
            Event::Recovery(_) => Verdict::Fail { error: None },
            Event::Hot => Verdict::Pause,
            Event::Cool => Verdict::Well,
        }
    }

    /// Parses a test's line: the device's number and `xid N`, `ecc`, `nvlink N`, `lost`, `recovery N`, `hot`
    /// or `cool`.
    pub fn parse(line: &str) -> Option<(u32, Event)> {
        let mut words = line.split_whitespace();
        let device = words.next()?.parse().ok()?;
        let name = words.next()?;
        let mut number = || words.next()?.parse::<u32>().ok();
        let event = match name {
            "xid" => Event::Xid(number()?.into()),
            "ecc" => Event::Ecc,
            "nvlink" => Event::NvLink(number()?),
            "lost" => Event::Lost,
            "recovery" => Event::Recovery(number()?),
            "hot" => Event::Hot,
            "cool" => Event::Cool,
            _ => return None,
        };
        words.next().is_none().then_some((device, event))
    }

    /// What NVIDIA's driver tells the programs that use the device, beyond the [`verdict`](Event::verdict).
    /// Software devices do the same.
    pub fn imitated(self) -> Option<Status> {
        match self {
            Event::Ecc => Some(ECC_UNCORRECTABLE),
            Event::NvLink(_) => Some(NVLINK_UNCORRECTABLE),
            _ => None,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_xid = |number| match number {
            48 => ": double-bit ECC error",
            64 => ": a memory row cannot be replaced",
            74 => ": NVLink error",
            79 => ": the GPU has fallen off the bus",
            94 => ": contained memory error",
            95 => ": uncontained memory error",
            119 | 120 => ": the GPU's system processor does not answer",
            _ => "",
        };
        match self {
            Event::Xid(number) => write!(f, "Xid {number}{}", of_xid(*number)),
            Event::Ecc => f.write_str("memory error that ECC could not correct"),
            Event::NvLink(link) => write!(f, "NVLink {link} is no longer active"),
            Event::Lost => f.write_str("the driver no longer reaches the GPU"),
            Event::Recovery(action) => {
                let what = match action {
                    0 => "no recovery",
                    1 => "a reset of the GPU",
                    2 => "a restart of the machine",
                    3 => "the end of work between GPUs",
                    4 => "the end of all work and a reset of the GPU",
                    _ => "a recovery action that rgpu does not know",
                };
                write!(f, "the driver asks for {what}")
            }
            Event::Hot => f.write_str("too hot: the hardware has slowed down"),
            Event::Cool => f.write_str("no longer too hot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_error_does_not_concern_the_device() {
        for number in OF_PROGRAMS.into_iter().chain(DEALT_WITH) {
            assert_eq!(Event::Xid(number).verdict(), Verdict::Note, "{number}");
        }
        assert_eq!(Event::Xid(137).verdict(), Verdict::Note, "an access over NVLink to another GPU's memory");
        // Unknown numbers are taken seriously.
        for number in [48, 64, 74, 119, 140, 999, 12345] {
            assert_eq!(Event::Xid(number).verdict(), Verdict::Fail { error: None }, "{number}");
        }
    }

    #[test]
    fn everything_on_a_lost_device_fails() {
        assert_eq!(Event::Xid(79).verdict(), Verdict::Fail { error: Some(Status(999)) });
        assert_eq!(Event::Lost.verdict(), Verdict::Fail { error: Some(Status(999)) });
        assert_eq!(Event::Xid(95).verdict(), Verdict::Fail { error: Some(Status(214)) });
    }

    #[test]
    fn lines_are_read_whole() {
        assert_eq!(Event::parse("1 xid 79"), Some((1, Event::Xid(79))));
        assert_eq!(Event::parse(" 0  hot "), Some((0, Event::Hot)));
        for wrong in ["", "0", "0 xid", "0 xid x", "0 ecc 1", "-1 ecc", "0 cold"] {
            assert_eq!(Event::parse(wrong), None, "{wrong}");
        }
    }
}
