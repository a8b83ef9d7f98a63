//! The files behind device memory and mirrors.

use std::os::fd::OwnedFd;

use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::Status;

use crate::driver::call::Result;

/// A memory file that cannot shrink, so that it stays accessible as long as it is mapped.
pub(super) fn file(size: u64) -> Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    let make = || -> std::io::Result<OwnedFd> {
        let fd = memfd_create(c"rgpu device memory", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let file = std::fs::File::from(fd);
        file.set_len(size)?;
        let fd = OwnedFd::from(file);
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(fd)
    };
    make().map_err(|e| {
        tracing::warn!(bytes = size, "no host memory for device memory: {e}");
        Status::OUT_OF_MEMORY
    })
}
