//! Copies and fills by the host. Each is checked against the allocations.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::device::gpu::Gpu;
use crate::error::{Error, Result};
use crate::machine::launcher::{Source, Transfer};
use crate::machine::memory::Plane;

fn check_rows(width: u64, pitch: u64, height: u64) -> Result<u64> {
    if width > pitch && height > 1 {
        return Err(Error::InvalidArgument(format!("rows of {width} bytes every {pitch} bytes overlap")));
    }
    if height == 0 || width == 0 {
        return Ok(0);
    }
    (height - 1)
        .checked_mul(pitch)
        .and_then(|n| n.checked_add(width))
        .ok_or_else(|| Error::InvalidArgument(format!("{height} rows of {pitch} bytes overflow")))
}

/// All of these run immediately in the caller's thread; use [`crate::Stream::enqueue`] to run them in a
/// stream's order. Like a GPU's copy engines, they can run while kernels do.
impl Gpu {
    /// Copies from the device.
    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<()> {
        self.status()?;
        self.memory().read(addr, out)
    }

    /// Copies to the device.
    pub fn write(&self, addr: u64, data: &[u8]) -> Result<()> {
        self.status()?;
        self.memory().write(addr, data)
    }

    /// Reads a word of 4 or (with `wide`) 8 bytes atomically, before anything that this thread does next.
    /// `addr` must be a multiple of its size.
    pub fn load(&self, addr: u64, wide: bool) -> Result<u64> {
        self.status()?;
        let word = self.word(addr, wide)?;
        // SAFETY: `word` has checked an aligned word inside a window that lives as long as the GPU. Kernels
        // access it only by raw accesses and atomics.
        Ok(unsafe {
            if wide {
                AtomicU64::from_ptr(word.cast()).load(Ordering::Acquire)
            } else {
                AtomicU32::from_ptr(word.cast()).load(Ordering::Acquire).into()
            }
        })
    }

    /// Writes a word of 4 bytes (the lower half of `value`) or (with `wide`) 8 bytes atomically, after
    /// everything that this thread did before.
    pub fn store(&self, addr: u64, wide: bool, value: u64) -> Result<()> {
        self.status()?;
        let word = self.word(addr, wide)?;
        // SAFETY: `word` has checked an aligned word inside a window that lives as long as the GPU. Kernels
        // access it only by raw accesses and atomics.
        unsafe {
            if wide {
                AtomicU64::from_ptr(word.cast()).store(value, Ordering::Release);
            } else {
                AtomicU32::from_ptr(word.cast()).store(value as u32, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Reads memory that stands for the host's. A failure of the GPU leaves it as it is.
    pub fn host_read(&self, addr: u64, out: &mut [u8]) -> Result<()> {
        self.memory().read(addr, out)
    }

    /// Writes such memory.
    pub fn host_write(&self, addr: u64, data: &[u8]) -> Result<()> {
        self.memory().write(addr, data)
    }

    /// Changes an aligned word of 8 bytes of such memory atomically.
    pub fn host_patch(&self, addr: u64, patch: impl Fn(u64) -> u64) -> Result<()> {
        let word = self.word(addr, true)?;
        // SAFETY: `word` has checked an aligned word inside a window that lives as long as the GPU. Kernels
        // access it only by raw accesses and atomics.
        let word = unsafe { AtomicU64::from_ptr(word.cast()) };
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(patch(now)));
        Ok(())
    }

    /// The host address of an aligned word of 4 or 8 bytes.
    fn word(&self, addr: u64, wide: bool) -> Result<*mut u8> {
        let size = if wide { 8 } else { 4 };
        if !addr.is_multiple_of(size) {
            return Err(Error::InvalidArgument(format!("word of {size} bytes at {addr:#x}")));
        }
        // Windows are page-aligned on the host, so host addresses are aligned like device addresses.
        self.memory().host_range(addr, size)
    }

    /// Copies within the device; the ranges may overlap.
    pub fn copy(&self, dst: u64, src: u64, size: u64) -> Result<()> {
        self.status()?;
        if size == 0 {
            return Ok(());
        }
        let from = self.memory().host_range(src, size)?;
        let to = self.memory().host_range(dst, size)?;
        // SAFETY: `host_range` has checked both ranges, inside windows that live as long as the GPU and that
        // no Rust reference points to; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from, to, size as usize) };
        Ok(())
    }

    /// Copies to another GPU (or the same one).
    pub fn copy_to(&self, src: u64, other: &Gpu, dst: u64, size: u64) -> Result<()> {
        self.status()?;
        other.status()?;
        if size == 0 {
            return Ok(());
        }
        let from = self.memory().host_range(src, size)?;
        let to = other.memory().host_range(dst, size)?;
        // SAFETY: `host_range` has checked both ranges; both GPUs are borrowed, so both windows live.
        unsafe { std::ptr::copy(from, to, size as usize) };
        Ok(())
    }

    /// Sets `count` bytes.
    pub fn fill8(&self, addr: u64, value: u8, count: u64) -> Result<()> {
        self.status()?;
        if count == 0 {
            return Ok(());
        }
        let host = self.memory().host_range(addr, count)?;
        // SAFETY: `host_range` has checked `count` bytes inside a window that lives as long as the GPU.
        unsafe { std::ptr::write_bytes(host, value, count as usize) };
        Ok(())
    }

    /// Sets `count` 16-bit words; `addr` must be a multiple of 2.
    pub fn fill16(&self, addr: u64, value: u16, count: u64) -> Result<()> {
        self.fill(addr, value, count)
    }

    /// Sets `count` 32-bit words; `addr` must be a multiple of 4.
    pub fn fill32(&self, addr: u64, value: u32, count: u64) -> Result<()> {
        self.fill(addr, value, count)
    }

    fn fill<T: Copy>(&self, addr: u64, value: T, count: u64) -> Result<()> {
        self.status()?;
        let width = size_of::<T>() as u64;
        let size = count.checked_mul(width).filter(|_| addr.is_multiple_of(width));
        let size = size.ok_or_else(|| {
            Error::InvalidArgument(format!("fill of {count} words of {width} bytes at {addr:#x}"))
        })?;
        if size == 0 {
            return Ok(());
        }
        let host = self.memory().host_range(addr, size)?.cast::<T>();
        for i in 0..count as usize {
            // SAFETY: `host_range` has checked the bytes. Windows are page-aligned on the host, so `host` is
            // aligned like `addr`.
            unsafe { host.add(i).write(value) };
        }
        Ok(())
    }

    /// Copies `height` rows of `width` bytes from the device to rows `out_pitch` apart in `out`.
    pub fn read_2d(&self, src: Plane, out: &mut [u8], out_pitch: u64, width: u64, height: u64) -> Result<()> {
        if check_rows(width, out_pitch, height)? > out.len() as u64 {
            return Err(Error::InvalidArgument(format!(
                "{height} rows every {out_pitch} bytes exceed the buffer"
            )));
        }
        check_rows(width, src.pitch, height)?;
        for row in 0..height {
            let at = (row * out_pitch) as usize;
            self.read(src.addr + row * src.pitch, &mut out[at..at + width as usize])?;
        }
        Ok(())
    }

    /// Copies `height` rows of `width` bytes, `data_pitch` apart in `data`, to the device.
    pub fn write_2d(&self, dst: Plane, data: &[u8], data_pitch: u64, width: u64, height: u64) -> Result<()> {
        if check_rows(width, data_pitch, height)? > data.len() as u64 {
            return Err(Error::InvalidArgument(format!(
                "{height} rows every {data_pitch} bytes exceed the data"
            )));
        }
        check_rows(width, dst.pitch, height)?;
        for row in 0..height {
            let at = (row * data_pitch) as usize;
            self.write(dst.addr + row * dst.pitch, &data[at..at + width as usize])?;
        }
        Ok(())
    }

    /// Copies `height` rows of `width` bytes within the device.
    pub fn copy_2d(&self, dst: Plane, src: Plane, width: u64, height: u64) -> Result<()> {
        check_rows(width, src.pitch, height)?;
        check_rows(width, dst.pitch, height)?;
        for row in 0..height {
            self.copy(dst.addr + row * dst.pitch, src.addr + row * src.pitch, width)?;
        }
        Ok(())
    }

    /// Sets `height` rows of `width` words of `word` bytes (1, 2 or 4) to the low bytes of `value`.
    pub fn fill_2d(&self, dst: Plane, value: u32, word: u32, width: u64, height: u64) -> Result<()> {
        let bytes = width.saturating_mul(u64::from(word));
        check_rows(bytes, dst.pitch, height)?;
        for row in 0..height {
            let addr = dst.addr + row * dst.pitch;
            match word {
                1 => self.fill8(addr, value as u8, width)?,
                2 => self.fill16(addr, value as u16, width)?,
                4 => self.fill32(addr, value, width)?,
                _ => return Err(Error::InvalidArgument(format!("fill with words of {word} bytes"))),
            }
        }
        Ok(())
    }

    /// Runs a copy or fill that a kernel started.
    pub(crate) fn transfer(&self, transfer: Transfer) -> Result<()> {
        let Transfer { to, from, width, height } = transfer;
        match from {
            Source::Memory(from) => self.copy_2d(to, from, width, height),
            Source::Value(value) => self.fill_2d(to, value.into(), 1, width, height),
        }
    }
}
