//! File descriptors that identify something for other processes: small files in memory. They pass through
//! sockets and `fork` like any descriptor.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::abi::result::Result;
use client::Status;

/// The first bytes of the file: the kind of thing that it identifies.
pub(crate) type Magic = [u8; 8];

/// Makes a descriptor that contains a name, for the program.
pub(crate) fn make(magic: &Magic, name: &[u8]) -> Result<RawFd> {
    written(magic, name).map(IntoRawFd::into_raw_fd).map_err(|_| Status::OPERATING_SYSTEM)
}

fn written(magic: &Magic, name: &[u8]) -> std::io::Result<File> {
    // SAFETY: a name with its NUL; gives a new descriptor or −1.
    let fd = unsafe { libc::memfd_create(c"rgpu memory".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all(magic)?;
    file.write_all(name)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// The name in a descriptor that [`make`] has made in any process. `None` for other descriptors. The
/// descriptor stays open.
pub(crate) fn read<const N: usize>(magic: &Magic, handle: usize) -> Option<[u8; N]> {
    let fd = RawFd::try_from(handle).ok()?;
    // SAFETY: not owned: it is never dropped. A number that is no descriptor gives an error when read.
    let file = std::mem::ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let mut found = Magic::default();
    let mut name = [0; N];
    file.read_exact_at(&mut found, 0).ok()?;
    file.read_exact_at(&mut name, found.len() as u64).ok()?;
    (found == *magic).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_returns_its_name_only_for_its_magic() {
        let fd = make(b"rgpu:one", &[7; 16]).unwrap() as usize;
        assert_eq!(read(b"rgpu:one", fd), Some([7; 16]));
        assert_eq!(read::<16>(b"rgpu:two", fd), None, "another kind of name");
        assert_eq!(read::<17>(b"rgpu:one", fd), None, "shorter than is wanted");
        // SAFETY: made above, and not used after.
        unsafe { libc::close(fd as i32) };
        for other in [fd, 1 << 31, usize::MAX] {
            assert_eq!(read::<16>(b"rgpu:one", other), None, "{other:#x} is no descriptor");
        }
    }
}
