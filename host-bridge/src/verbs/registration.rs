//! Protection domains, and the memory registered in them.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use nix::sys::resource::{Resource, getrlimit};

use super::device::Device;
use super::error::VerbsError;
use super::sys::{self, Library, Sge, number};

/// A protection domain. Queue pairs reach only memory of their own domain, and each session has its own.
#[derive(Debug)]
pub struct Domain {
    pd: NonNull<sys::Pd>,
    library: &'static Library,
    device: Arc<Device>,
}

// SAFETY: libibverbs allows every call on a domain from any thread.
unsafe impl Send for Domain {}
// SAFETY: it allows them at the same time, too.
unsafe impl Sync for Domain {}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("libibverbs")
    }
}

/// Who may access registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The local device reads it, as the source of a send or write.
    Read,
    /// The local device also writes it, as a receive buffer.
    Write,
    /// The peer may also write it, with its key.
    RemoteWrite,
    /// The peer may also write what a [window](super::Window) shows of it, and nothing else.
    Windows,
}

impl Domain {
    /// A new domain on the device.
    pub fn new(device: Arc<Device>) -> Result<Arc<Domain>, VerbsError> {
        let library = Library::get()?;
        // SAFETY: an open context.
        let pd = unsafe { (library.alloc_pd)(device.context().as_ptr()) };
        let pd =
            NonNull::new(pd).ok_or_else(|| VerbsError::call("ibv_alloc_pd", io::Error::last_os_error()))?;
        Ok(Arc::new(Domain { pd, library, device }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn pd(&self) -> NonNull<sys::Pd> {
        self.pd
    }

    /// Registers memory. The device may use it, and with [`Access::RemoteWrite`] the peer, until the
    /// registration is dropped. With [`Access::Windows`] every window to it is dropped first.
    ///
    /// # Safety
    /// The `len` bytes at `at` are mapped, writable unless `access` is [`Access::Read`], and stay so until
    /// the registration is dropped. The device may change their content at any time, so no Rust reference
    /// covers them while the peer may write.
    pub unsafe fn register(
        self: &Arc<Self>,
        at: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        // SAFETY: the caller's promise.
        let mr = unsafe {
            (self.library.reg_mr)(self.pd.as_ptr(), at.as_ptr().cast::<c_void>(), len, access.flags())
        };
        let error = io::Error::last_os_error();
        let Some(mr) = NonNull::new(mr) else {
            let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(u64::MAX, |(soft, _)| soft);
            return Err(match error.raw_os_error() {
                Some(libc::ENOMEM) if limit != libc::RLIM_INFINITY => {
                    VerbsError::Memlock { bytes: len, limit }
                }
                _ => VerbsError::call(&format!("registering {len} bytes"), error),
            });
        };
        Ok(Registration { mr, base: at.as_ptr() as u64, len, domain: Arc::clone(self) })
    }
}

impl Domain {
    /// Registers the first `len` bytes of a DMA-buf, which the device may read. Their addresses begin at 0.
    /// The kernel keeps the buffer's memory until the registration is dropped, whatever becomes of the
    /// descriptor.
    pub fn register_dma_buf(
        self: &Arc<Self>,
        file: BorrowedFd<'_>,
        len: usize,
    ) -> Result<Registration, VerbsError> {
        let Some(register) = self.library.reg_dmabuf_mr else {
            return Err(VerbsError::Broken(
                "libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 or newer has)".into(),
            ));
        };
        // SAFETY: a domain that lives; no memory of this process is named.
        let mr = unsafe { register(self.pd.as_ptr(), 0, len, 0, file.as_raw_fd(), Access::Read.flags()) };
        let error = io::Error::last_os_error();
        let mr = NonNull::new(mr)
            .ok_or_else(|| VerbsError::call(&format!("registering a DMA-buf of {len} bytes"), error))?;
        Ok(Registration { mr, base: 0, len, domain: Arc::clone(self) })
    }
}

impl Access {
    fn flags(self) -> i32 {
        match self {
            Access::Read => 0,
            Access::Write => number::ACCESS_LOCAL_WRITE,
            Access::RemoteWrite => number::ACCESS_LOCAL_WRITE | number::ACCESS_REMOTE_WRITE,
            Access::Windows => number::ACCESS_LOCAL_WRITE | number::ACCESS_MW_BIND,
        }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds an `Arc` of it.
        if unsafe { (self.library.dealloc_pd)(self.pd.as_ptr()) } != 0 {
            tracing::warn!("ibv_dealloc_pd: {}", io::Error::last_os_error());
        }
    }
}

/// Registered bytes for a work request. If the registration is dropped before the request completes, the
/// request fails and touches nothing.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    pub(super) sge: Sge,
}

impl Segment {
    /// Its size in bytes.
    pub fn len(&self) -> u32 {
        self.sge.length
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.sge.length == 0
    }
}

/// Registered memory. Dropping it invalidates its keys. The memory belongs to its owner.
#[derive(Debug)]
pub struct Registration {
    mr: NonNull<sys::Mr>,
    /// The address that work requests use for the first byte.
    base: u64,
    len: usize,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs allows a registration to be dropped by any thread.
unsafe impl Send for Registration {}
// SAFETY: nothing changes it while it is shared: its keys are only read.
unsafe impl Sync for Registration {}

impl Registration {
    /// The address of the first byte, as this side's and the peer's requests name it.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The key for the peer.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: a registration that lives.
        unsafe { self.mr.as_ref().rkey }
    }

    /// The domain that it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(super) fn mr(&self) -> NonNull<sys::Mr> {
        self.mr
    }

    /// `len` bytes at `offset`, for a work request. `None` if they are not all inside.
    pub fn slice(&self, offset: u64, len: u32) -> Option<Segment> {
        let inside = offset.checked_add(len.into()).is_some_and(|end| end <= self.len as u64);
        // SAFETY: a registration that lives.
        let lkey = unsafe { self.mr.as_ref().lkey };
        inside.then(|| Segment { sge: Sge { addr: self.base + offset, length: len, lkey } })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: made by `registration`, dropped once.
        if unsafe { (self.domain.library.dereg_mr)(self.mr.as_ptr()) } != 0 {
            tracing::warn!("ibv_dereg_mr of {} bytes: {}", self.len, io::Error::last_os_error());
        }
    }
}

/// Page-aligned memory of this process, registered.
#[derive(Debug)]
pub struct Slab {
    /// Dropped before the memory.
    registration: Registration,
    _memory: Pages,
    at: NonNull<u8>,
}

// SAFETY: plain memory without an owner thread.
unsafe impl Send for Slab {}
// SAFETY: shared access goes through raw pointers that the users answer for.
unsafe impl Sync for Slab {}

#[derive(Debug)]
struct Pages {
    at: NonNull<c_void>,
    len: usize,
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made by `Slab::new`; the registration over it is gone.
        let _ = unsafe { munmap(self.at, self.len) };
    }
}

impl Slab {
    /// Allocates `len` zeroed bytes and registers them.
    pub fn new(domain: &Arc<Domain>, len: usize, access: Access) -> Result<Slab, VerbsError> {
        let failed = |e: io::Error| VerbsError::call(&format!("allocating {len} bytes"), e);
        let length = NonZeroUsize::new(len).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE | MapFlags::MAP_POPULATE)
        }
        .map_err(|e| failed(e.into()))?;
        let memory = Pages { at, len };
        // SAFETY: the mapping made above is unmapped only after the registration is dropped (field order).
        let registration = unsafe { domain.register(at.cast(), len, access) }?;
        Ok(Slab { registration, _memory: memory, at: at.cast() })
    }

    /// Its registration.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }

    /// A pointer to `len` bytes at `offset`. `None` if they are not all inside.
    pub fn pointer(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.registration.len);
        // SAFETY: inside the mapping.
        inside.then(|| unsafe { self.at.add(offset) })
    }

    /// Writes bytes that are to be sent, at a place that no request under way names. Nothing if they do not
    /// fit.
    pub(super) fn store(&self, offset: usize, bytes: &[u8]) {
        if let Some(at) = self.pointer(offset, bytes.len()) {
            // SAFETY: `pointer` checked the range; the device does not use it now, since the caller takes a
            // place that no request under way names.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.as_ptr(), bytes.len()) };
        }
    }
}
