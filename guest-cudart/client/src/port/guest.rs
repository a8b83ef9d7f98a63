//! The port over the guest driver's device file: `docs/device.md`, "User API".

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::descriptor::own;
use super::mapping::Mapping;
use super::{Pinned, Port, PortError};
use crate::counters::{COUNTERS, add};
use crate::{lock, log};
use protocol::channel::Header;
use protocol::device::{Answer, untext};

const ABI_VERSION: u32 = 1;

/// The size of a page, in bytes.
const PAGE: usize = 4096;

const fn ioctl(direction: u32, number: u32, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u32) << 16 | 0x47 << 8 | number) as libc::c_ulong
}
const WRITE: u32 = 1;
const READ: u32 = 2;
const GET_INFO: libc::c_ulong = ioctl(READ, 0xA0, size_of::<Info>());
const CREATE_CHANNEL: libc::c_ulong = ioctl(WRITE, 0xA1, size_of::<CreateChannel>());
const CONNECT: libc::c_ulong = ioctl(READ, 0xA2, size_of::<Connect>());
const KICK: libc::c_ulong = ioctl(0, 0xA3, 0);
const WAIT: libc::c_ulong = ioctl(WRITE, 0xA4, size_of::<Wait>());
const REGISTER_MEMORY: libc::c_ulong = ioctl(READ | WRITE, 0xA5, size_of::<RegisterMemory>());
const UNREGISTER_MEMORY: libc::c_ulong = ioctl(WRITE, 0xA6, size_of::<UnregisterMemory>());

#[repr(C)]
#[derive(Default)]
struct Info {
    abi_version: u32,
    device_version: u32,
    max_channels: u32,
    flags: u32,
    max_channel_size: u64,
    max_registered: u64,
    reserved: [u64; 4],
}

#[repr(C)]
struct CreateChannel {
    size: u64,
    flags: u64,
}

#[repr(C)]
struct Connect {
    status: u32,
    channel: u32,
    reason: [u8; 256],
}

#[repr(C)]
struct Wait {
    offset: u64,
    expected: u32,
    flags: u32,
    timeout_ns: i64,
}

#[repr(C)]
struct RegisterMemory {
    addr: u64,
    size: u64,
    flags: u32,
    region: u32,
}

#[repr(C)]
struct UnregisterMemory {
    region: u32,
    reserved: u32,
}

/// An open device file with its channel.
pub struct Guest {
    path: PathBuf,
    file: File,
    channel: Mapping,
    gone: AtomicBool,
    silence: Mutex<Silence>,
}

/// After this long without a reply, the host is asked for a sign of life.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// Waiting threads check more often than this. A longer pause means that nobody was waiting or that the
/// machine was suspended.
const PAUSE: Duration = Duration::from_secs(1);

/// How long the host has been silent while a thread waited (`docs/wire.md`, "Losing a session").
struct Silence {
    /// A host that gives no sign of life for this long after being asked is considered lost.
    limit: Duration,
    last_sign: u32,
    since: Instant,
    looked: Instant,
    asked: Option<Instant>,
}

/// The outcome of checking the host's sign of life.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Wait,
    Ask,
    Lost,
}

impl Silence {
    fn new(now: Instant) -> Silence {
        let limit = Duration::from_secs(super::asked_lost_after().unwrap_or(10));
        Silence { limit, last_sign: 0, since: now, looked: now, asked: None }
    }

    fn look(&mut self, alive: u32, now: Instant) -> Verdict {
        let paused = now.duration_since(self.looked) > PAUSE;
        self.looked = now;
        if paused || alive != self.last_sign {
            self.last_sign = alive;
            self.since = now;
            self.asked = None;
        }
        match self.asked {
            Some(asked) if now.duration_since(asked) >= self.limit => Verdict::Lost,
            None if now.duration_since(self.since) >= ASK_AFTER => {
                self.asked = Some(now);
                Verdict::Ask
            }
            _ => Verdict::Wait,
        }
    }
}

impl Guest {
    pub fn open(path: &Path, size: usize) -> Result<Guest, PortError> {
        let error = |what| move |source| PortError::io(path, what, source);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .and_then(|file| own(file.into_raw_fd()))
            .map_err(error("open"))?;
        let file = File::from(file);
        let mut info = Info::default();
        call(&file, GET_INFO, &mut info)
            .map_err(error("RGPU_IOC_GET_INFO: is this the device of virtio_rgpu?"))?;
        if info.abi_version != ABI_VERSION {
            return Err(PortError::Refused {
                path: path.to_owned(),
                what: "another version of rgpu",
                reason: format!(
                    "the module has interface version {} and these libraries have version {ABI_VERSION}: install the same release of both",
                    info.abi_version
                ),
            });
        }
        if size as u64 > info.max_channel_size {
            return Err(PortError::Refused {
                path: path.to_owned(),
                what: "the channel is too large",
                reason: format!(
                    "{size} bytes, and max_channel_mib of vhost-rgpu allows {}. Lower RGPU_ARENA_MIB",
                    info.max_channel_size
                ),
            });
        }
        let mut create = CreateChannel { size: size as u64, flags: 0 };
        call(&file, CREATE_CHANNEL, &mut create)
            .map_err(|source| error(over_limit(&source).unwrap_or("RGPU_IOC_CREATE_CHANNEL"))(source))?;
        let channel = Mapping::shared(file.as_fd(), size).map_err(error("mapping the channel"))?;
        channel.dont_fork();
        Ok(Guest {
            path: path.to_owned(),
            file,
            channel,
            gone: AtomicBool::new(false),
            silence: Mutex::new(Silence::new(Instant::now())),
        })
    }

    fn register(&self, addr: usize, size: usize) -> io::Result<u32> {
        let mut request = RegisterMemory { addr: addr as u64, size: size as u64, flags: 0, region: 0 };
        call(&self.file, REGISTER_MEMORY, &mut request)?;
        Ok(request.region)
    }

    fn not_registered(&self, source: io::Error) -> PortError {
        let what = over_limit(&source).unwrap_or("RGPU_IOC_REGISTER_MEMORY (see also ulimit -l)");
        PortError::io(&self.path, what, source)
    }
}

/// Whether the kernel does not pin this memory for a device that writes it, although the program has it: it
/// is mapped only for reading, or to a file. NVIDIA's driver registers such memory.
fn is_only_pageable(error: &io::Error, addr: usize, size: usize) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EOPNOTSUPP)) && can_be_read(addr, size)
}

/// Whether all pages of a range are mapped, and the first and the last of its bytes can be read.
fn can_be_read(addr: usize, size: usize) -> bool {
    /// Bytes that one call looks at, which gets one byte for each page.
    const STEP: usize = 1 << 30;
    let Some(last) = size.checked_sub(1).and_then(|size| addr.checked_add(size)) else { return false };
    let mut first = addr & !(PAGE - 1);
    let mut resident = Vec::new();
    while first <= last {
        let len = (last - first + 1).min(STEP);
        resident.resize(len.div_ceil(PAGE), 0_u8);
        // SAFETY: the call reads no memory at these addresses, and writes a byte for each page.
        if unsafe { libc::mincore(first as *mut libc::c_void, len, resident.as_mut_ptr()) } < 0 {
            return false;
        }
        let Some(next) = first.checked_add(STEP) else { break };
        first = next;
    }
    // The system checks what it writes to a pipe, and no profile of a container forbids that.
    let Ok((_reader, writer)) = io::pipe() else { return false };
    [addr, last].into_iter().all(|at| {
        // SAFETY: reads one byte, or fails if it cannot be read.
        unsafe { libc::write(writer.as_raw_fd(), at as *const libc::c_void, 1) == 1 }
    })
}

/// What to say of an error that stands for the driver's limit of memory for one user.
fn over_limit(error: &io::Error) -> Option<&'static str> {
    (error.raw_os_error() == Some(libc::EDQUOT)).then_some(
        "this user's channels and pinned memory would exceed what one user of this machine may have (parameter user_memory_mib of the module virtio_rgpu)",
    )
}

/// An ioctl, repeated if a signal interrupts it.
fn call<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: each request above has the structure that the driver's header defines for it, which lives
        // through the call.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
        if result >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

impl Port for Guest {
    fn channel(&self) -> &Mapping {
        &self.channel
    }

    fn connect(&self) -> Result<(), PortError> {
        let mut answer = Connect { status: 0, channel: 0, reason: [0; 256] };
        call(&self.file, CONNECT, &mut answer).map_err(|source| {
            PortError::io(
                &self.path,
                "the device does not respond: check on the host that vhost-rgpu is running, and its log",
                source,
            )
        })?;
        match Answer::from_number(answer.status) {
            Answer::Ok => Ok(()),
            refused => Err(PortError::Refused {
                path: self.path.clone(),
                what: super::refusal(refused),
                reason: untext(&answer.reason),
            }),
        }
    }

    fn kick(&self) {
        add(&COUNTERS.system_calls, 1);
        // SAFETY: the request takes no argument.
        unsafe { libc::ioctl(self.file.as_raw_fd(), KICK as _) };
    }

    fn wait(&self, offset: u64, expected: u32, timeout: Duration) -> bool {
        add(&COUNTERS.system_calls, 1);
        let mut wait =
            Wait { offset, expected, flags: 0, timeout_ns: timeout.as_nanos().min(i64::MAX as u128) as i64 };
        // SAFETY: the request has the structure that the driver's header defines for it. If it is
        // interrupted, the caller checks again.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), WAIT as _, &raw mut wait) };
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV) {
            self.gone.store(true, Ordering::Relaxed);
        }
        result == 0
    }

    fn alive(&self) -> bool {
        if self.gone.load(Ordering::Relaxed) {
            return false;
        }
        // SAFETY: the channel begins with its header, is never shorter, and stays mapped as long as `self`
        // lives.
        let header = unsafe { &*self.channel.base().cast::<Header>() };
        match lock(&self.silence).look(header.alive(), Instant::now()) {
            Verdict::Wait => {}
            Verdict::Ask => self.kick(),
            Verdict::Lost => {
                self.gone.store(true, Ordering::Relaxed);
                return false;
            }
        }
        true
    }

    fn why_dead(&self) -> String {
        format!(
            "{}: the device does not respond: check on the host that vhost-rgpu is running, and its log",
            self.path.display()
        )
    }

    fn pin_new(&self, size: usize, at: Option<usize>) -> Result<Pinned, PortError> {
        let mapping = Mapping::pinned(None, size, at)
            .map_err(|source| PortError::io(&self.path, "mapping pinned memory", source))?;
        let region = self.register(mapping.base() as usize, size).map_err(|e| self.not_registered(e))?;
        Ok(Pinned { mapping, region, file: None })
    }

    fn pin(&self, addr: usize, size: usize) -> Option<Result<u32, PortError>> {
        match self.register(addr, size) {
            Err(error) if is_only_pageable(&error, addr, size) => {
                log::info(format_args!(
                    "the {size} bytes of host memory at {addr:#x} cannot be pinned ({error}) and are copied like pageable memory"
                ));
                None
            }
            registered => Some(registered.map_err(|error| self.not_registered(error))),
        }
    }

    fn pin_shared(&self, pinned: &Pinned) -> Result<u32, PortError> {
        let registered = self.register(pinned.mapping.base() as usize, pinned.mapping.len());
        registered.map_err(|error| self.not_registered(error))
    }

    fn unpin(&self, region: u32) {
        let mut request = UnregisterMemory { region, reserved: 0 };
        if let Err(error) = call(&self.file, UNREGISTER_MEMORY, &mut request) {
            log::warn(format_args!(
                "{}: RGPU_IOC_UNREGISTER_MEMORY of region {region}: {error}",
                self.path.display()
            ));
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.file.as_raw_fd()]
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_are_those_of_the_header() {
        // As gcc computes them from guest-driver/include/uapi/linux/virtio_rgpu.h.
        assert_eq!(GET_INFO, 0x8040_47a0);
        assert_eq!(CREATE_CHANNEL, 0x4010_47a1);
        assert_eq!(CONNECT, 0x8108_47a2);
        assert_eq!(KICK, 0x47a3);
        assert_eq!(WAIT, 0x4018_47a4);
        assert_eq!(REGISTER_MEMORY, 0xc018_47a5);
        assert_eq!(UNREGISTER_MEMORY, 0x4008_47a6);
    }

    #[test]
    fn a_silent_host_is_asked_and_then_lost() {
        let begin = Instant::now();
        let mut silence = Silence { limit: Duration::from_secs(3), ..Silence::new(begin) };
        let mut at = |millis: u64, alive: u32| silence.look(alive, begin + Duration::from_millis(millis));
        for millis in (250..2000).step_by(250) {
            assert_eq!(at(millis, 0), Verdict::Wait);
        }
        assert_eq!(at(2000, 0), Verdict::Ask);
        // A sign of life starts over.
        assert_eq!(at(2250, 1), Verdict::Wait);
        for millis in (2500..4250).step_by(250) {
            assert_eq!(at(millis, 1), Verdict::Wait);
        }
        assert_eq!(at(4250, 1), Verdict::Ask);
        for millis in (4500..7250).step_by(250) {
            assert_eq!(at(millis, 1), Verdict::Wait);
        }
        assert_eq!(at(7250, 1), Verdict::Lost);
    }

    #[test]
    fn time_without_waiting_threads_does_not_count_as_silence() {
        let begin = Instant::now();
        let mut silence = Silence::new(begin);
        for second in [5, 10, 60] {
            assert_eq!(silence.look(0, begin + Duration::from_secs(second)), Verdict::Wait);
        }
    }

    #[test]
    fn memory_that_cannot_be_pinned_is_pageable_if_the_program_has_it() {
        let refused = io::Error::from_raw_os_error(libc::EFAULT);
        let map = |len: usize, protection| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping, where the system likes.
            let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
            assert_ne!(mapped, libc::MAP_FAILED);
            mapped as usize
        };
        let is = |addr, size| is_only_pageable(&refused, addr, size);
        let [readable, hidden] = [libc::PROT_READ, libc::PROT_NONE].map(|with| map(4 * PAGE, with));
        assert!(is(readable, 4 * PAGE) && is(readable + 100, PAGE));
        assert!(!is_only_pageable(&io::Error::from_raw_os_error(libc::ENOMEM), readable, PAGE));
        assert!(
            !is(hidden, PAGE) && !is(0, PAGE) && !is(usize::MAX - PAGE, PAGE) && !is(readable, usize::MAX)
        );
        // SAFETY: a page of the mapping above, which nobody uses.
        assert_eq!(unsafe { libc::munmap((readable + PAGE) as *mut libc::c_void, PAGE) }, 0);
        assert!(!is(readable, 4 * PAGE) && is(readable + 2 * PAGE, 2 * PAGE));
    }

    #[test]
    fn a_missing_device_is_named() {
        let error = Guest::open(Path::new("/nonexistent/rgpu9"), 1 << 20).err().unwrap();
        assert!(error.line().contains("/nonexistent/rgpu9"), "{}", error.line());
    }
}
