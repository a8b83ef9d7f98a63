//! Scattered memory for one vectored call.

use std::ptr::NonNull;

use crate::shared::SharedBytes;

/// The most runs in one system call.
const MAX_RUNS: usize = 64;

/// Memory for one vectored call: some of our own, some of the client's. Where the kernel copies, an address
/// that has become invalid gives an error and harms nobody.
pub(crate) struct Gather {
    runs: [libc::iovec; MAX_RUNS],
    count: usize,
    bytes: usize,
}

impl Gather {
    pub(crate) fn new() -> Gather {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Gather { runs: [none; MAX_RUNS], count: 0, bytes: 0 }
    }

    pub(crate) fn clear(&mut self) {
        (self.count, self.bytes) = (0, 0);
    }

    /// Appends a run. False: there is no room for another.
    pub(crate) fn push(&mut self, at: NonNull<u8>, len: usize) -> bool {
        if self.count == MAX_RUNS {
            return false;
        }
        if len > 0 {
            self.runs[self.count] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: len };
            self.count += 1;
            self.bytes += len;
        }
        true
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// For `sendmsg` and `recvmsg`. Valid as long as the gather is not changed.
    pub(super) fn message(&mut self) -> libc::msghdr {
        // SAFETY: an all-zero msghdr is valid: no name, no control data, no runs.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.runs.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }

    /// Calls `act` with parts of the runs that together are the bytes from `offset` on, at most `len` of
    /// them.
    ///
    /// # Safety
    /// Every run lies in memory that stays mapped during the call. If `act` writes, it is writable and no
    /// Rust reference covers it.
    unsafe fn parts(&self, offset: usize, len: usize, mut act: impl FnMut(SharedBytes<'_>)) {
        let (mut skip, mut left) = (offset, len);
        for run in &self.runs[..self.count] {
            let cut = skip.min(run.iov_len);
            skip -= cut;
            let now = (run.iov_len - cut).min(left);
            left -= now;
            if let Some(at) = NonNull::new(run.iov_base.cast::<u8>()).filter(|_| now > 0) {
                // SAFETY: `push` was given this run; `cut` lies inside it. The caller's promise is that of
                // `SharedBytes::new`.
                act(unsafe { SharedBytes::new(at, run.iov_len).part(cut, now) });
            }
        }
    }

    /// Copies the bytes from `offset` on, as many as there are, to the front of `to`. Gives their number.
    ///
    /// # Safety
    /// Every run lies in memory that stays mapped during the call.
    pub(super) unsafe fn copy_out(&self, offset: usize, to: &mut [u8]) -> usize {
        let len = self.bytes.saturating_sub(offset).min(to.len());
        let mut at = 0;
        // SAFETY: the caller's promise; nothing is written.
        unsafe {
            self.parts(offset, len, |part| {
                part.read(&mut to[at..at + part.len()]);
                at += part.len();
            });
        }
        len
    }

    /// Copies `from` over the bytes from `offset` on, as far as there are some. Gives their number.
    ///
    /// # Safety
    /// Every run lies in writable memory that stays mapped during the call and that no Rust reference covers.
    pub(super) unsafe fn copy_in(&self, offset: usize, from: &[u8]) -> usize {
        let len = self.bytes.saturating_sub(offset).min(from.len());
        let mut at = 0;
        // SAFETY: the caller's promise.
        unsafe {
            self.parts(offset, len, |part| {
                part.write(&from[at..at + part.len()]);
                at += part.len();
            });
        }
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_across_the_boundaries_of_runs() {
        let mut memory = [b"abc".to_vec(), b"".to_vec(), b"defgh".to_vec()];
        let mut gather = Gather::new();
        for run in &mut memory {
            assert!(gather.push(NonNull::from(&mut run[..]).cast(), run.len()));
        }
        let mut out = [0; 4];
        // SAFETY: the runs are parts of `memory`, which no reference covers now.
        assert_eq!(unsafe { gather.copy_out(2, &mut out) }, 4);
        assert_eq!(&out, b"cdef");
        // SAFETY: as above.
        assert_eq!(unsafe { gather.copy_out(6, &mut out) }, 2);
        assert_eq!(&out[..2], b"gh");
        // SAFETY: as above.
        assert_eq!(unsafe { gather.copy_in(1, b"123456789") }, 7);
        assert_eq!(memory.concat(), b"a1234567");
    }
}
