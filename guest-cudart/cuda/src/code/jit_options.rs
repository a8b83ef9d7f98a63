//! Options of the compiler and linker.

use std::ffi::c_void;

use crate::abi::arguments::non_null;
use crate::abi::result::Result;
use client::Status;
use client::ops::module::JitOption;

/// JIT options of a load, and the program's buffers for the compiler's messages.
#[derive(Default, Clone)]
pub(crate) struct Jit {
    pub options: Vec<JitOption>,
    info: Option<(usize, usize)>,
    error: Option<(usize, usize)>,
    /// The words that hold the buffer sizes and are overwritten with the number of bytes written.
    sizes: [Option<usize>; 2],
    wall_time: Option<usize>,
}

/// `CUjit_option` numbers.
pub(crate) mod jit {
    pub const WALL_TIME: u32 = 2;
    pub const INFO_LOG_BUFFER: u32 = 3;
    pub const INFO_LOG_SIZE: u32 = 4;
    pub const ERROR_LOG_BUFFER: u32 = 5;
    pub const ERROR_LOG_SIZE: u32 = 6;
    /// Options whose values are pointers or counts of what they point to: 17 to 19, 25 to 28.
    pub fn is_pointer(option: u32) -> bool {
        matches!(option, 17..=19 | 25..=28)
    }
}

impl Jit {
    /// Reads a program's options.
    ///
    /// # Safety
    /// Both arrays have `count` entries.
    pub unsafe fn parse(count: u32, options: *const u32, values: *const *mut c_void) -> Result<Jit> {
        let mut parsed = Jit::default();
        if count == 0 {
            return Ok(parsed);
        }
        non_null(options)?;
        non_null(values)?;
        let (mut info, mut error) = ((0, 0), (0, 0));
        for i in 0..count as usize {
            // SAFETY: guaranteed by the caller.
            let (option, place) = unsafe { (*options.add(i), values.add(i)) };
            // SAFETY: an entry of the array; the word itself holds the value.
            let value = unsafe { *place } as usize;
            match option {
                jit::WALL_TIME => parsed.wall_time = Some(place as usize),
                jit::INFO_LOG_BUFFER => info.0 = value,
                jit::INFO_LOG_SIZE => {
                    info.1 = value as u32 as usize;
                    parsed.sizes[0] = Some(place as usize);
                }
                jit::ERROR_LOG_BUFFER => error.0 = value,
                jit::ERROR_LOG_SIZE => {
                    error.1 = value as u32 as usize;
                    parsed.sizes[1] = Some(place as usize);
                }
                option if jit::is_pointer(option) => return Err(Status::NOT_SUPPORTED),
                option if option > 34 => return Err(Status::INVALID_VALUE),
                option => parsed.options.push(JitOption { option, value: u64::from(value as u32) }),
            }
        }
        parsed.info = (info.0 != 0 && info.1 != 0).then_some(info);
        parsed.error = (error.0 != 0 && error.1 != 0).then_some(error);
        Ok(parsed)
    }

    /// Whether the program passed no option and requested no messages.
    pub fn is_plain(&self) -> bool {
        self.options.is_empty()
            && self.info.is_none()
            && self.error.is_none()
            && self.sizes == [None; 2]
            && self.wall_time.is_none()
    }

    /// The options alone, for a later load when the program's buffers may be gone.
    pub fn without_buffers(&self) -> Jit {
        Jit { options: self.options.clone(), ..Jit::default() }
    }

    /// Fills the program's buffers.
    ///
    /// # Safety
    /// The arrays that the options were read from still exist, and the buffers named in them are writable.
    pub unsafe fn report(&self, info: &str, error: &str) {
        for (buffer, size, text) in [(self.info, self.sizes[0], info), (self.error, self.sizes[1], error)] {
            let mut filled = 0;
            if let Some((at, room)) = buffer {
                filled = text.len().min(room - 1);
                // SAFETY: the program provided `room` bytes at `at`.
                unsafe {
                    std::ptr::copy_nonoverlapping(text.as_ptr(), at as *mut u8, filled);
                    (at as *mut u8).add(filled).write(0);
                }
            }
            if let Some(place) = size {
                // SAFETY: the word of the program's array that the size was read from.
                unsafe { (place as *mut usize).write(filled) };
            }
        }
        if let Some(place) = self.wall_time {
            // SAFETY: the word of the program's array that requested the time, a float. The server does not
            // report it.
            unsafe { (place as *mut f32).write(0.0) };
        }
    }
}
