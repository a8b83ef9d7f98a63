//! A text that a process keeps for the next one and rewrites often. A process that is killed at any time
//! leaves a complete text.
//!
//! ```text
//!  at        which of the two places is current, and the length of its text: 8 bytes
//!  places    the first place, followed by the second
//! ```
//!
//! A text is written to the place that is not current. Then the eight bytes make it the current one. What is
//! added to a text is written behind it. Then the eight bytes make it longer.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A text in a file in memory. The rest of the file belongs to the file's owner.
#[derive(Debug)]
pub struct Text {
    file: File,
    at: u64,
    places: u64,
    room: u64,
    /// Held while a text is written.
    writing: Mutex<()>,
}

impl AsFd for Text {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Text {
    /// The text in `file`, with the eight bytes at `at` and the places at `places`. A text has at most `room`
    /// bytes.
    pub fn within(file: OwnedFd, at: u64, places: u64, room: u64) -> Text {
        Text { file: file.into(), at, places, room, writing: Mutex::new(()) }
    }

    /// A text of at most `room` bytes, in a new file.
    ///
    /// # Errors
    /// If this process can have no more descriptors.
    pub fn new(room: u64) -> io::Result<Text> {
        let file = memfd_create(c"record", MFdFlags::MFD_CLOEXEC)?;
        Ok(Text::open(file, room))
    }

    /// The text of the previous process, in that process's file.
    pub fn open(file: OwnedFd, room: u64) -> Text {
        Text::within(file, 0, 8, room)
    }

    /// Replaces the text.
    ///
    /// # Errors
    /// If the text is too long, or there is no memory for it. The previous text stays.
    pub fn write(&self, text: &[u8]) -> io::Result<()> {
        if text.len() as u64 > self.room {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let place = 1 - self.counts()?.0;
        self.file.write_all_at(text, self.places + place * self.room)?;
        self.set_counts(place, text.len() as u64)
    }

    /// Adds something to the end of the text.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn add(&self, more: &[u8]) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, length) = self.counts()?;
        let whole = length.saturating_add(more.len() as u64);
        if whole > self.room {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.file.write_all_at(more, self.places + place * self.room + length)?;
        self.set_counts(place, whole)
    }

    fn set_counts(&self, place: u64, length: u64) -> io::Result<()> {
        // The kernel writes the eight bytes at once, even if the process is killed.
        self.file.write_all_at(&(place << 32 | length).to_ne_bytes(), self.at)
    }

    /// Reads the text. It is empty until it is first written.
    ///
    /// # Errors
    /// If this is not a file in memory.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let (place, length) = self.counts()?;
        let mut text = vec![0; length.min(self.room) as usize];
        self.file.read_exact_at(&mut text, self.places + place * self.room)?;
        Ok(text)
    }

    /// Which place is current, and the length of its text.
    fn counts(&self) -> io::Result<(u64, u64)> {
        let mut bytes = [0; 8];
        match self.file.read_at(&mut bytes, self.at)? {
            // Nothing was written yet.
            0 => Ok((0, 0)),
            8 => {
                let word = u64::from_ne_bytes(bytes);
                Ok(((word >> 32).min(1), word & u64::from(u32::MAX)))
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(text: &Text) -> Text {
        Text::open(text.as_fd().try_clone_to_owned().unwrap(), text.room)
    }

    #[test]
    fn the_last_complete_text_is_read() {
        let text = Text::new(100).unwrap();
        assert!(text.read().unwrap().is_empty(), "nothing was written yet");
        for what in ["first", "a longer second", "3"] {
            text.write(what.as_bytes()).unwrap();
            assert_eq!(copy(&text).read().unwrap(), what.as_bytes());
        }
        assert!(text.write(&[b'x'; 101]).is_err());
        text.add(b", and more").unwrap();
        assert_eq!(copy(&text).read().unwrap(), b"3, and more");
        assert!(text.add(&[b'x'; 90]).is_err());
        text.write(b"3").unwrap();
        // As if killed while writing the next text.
        let place = 1 - text.counts().unwrap().0;
        text.file.write_all_at(b"half", text.places + place * text.room).unwrap();
        assert_eq!(copy(&text).read().unwrap(), b"3");
    }

    #[test]
    fn another_file_gives_an_error_and_no_text() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(Text::open(reader.into(), 100).read().is_err());
        let short = Text::new(100).unwrap();
        short.file.write_all_at(&[1, 2, 3], 0).unwrap();
        assert!(short.read().is_err());
        // Claims a length beyond the file's end.
        short.file.write_all_at(&u64::MAX.to_ne_bytes(), 0).unwrap();
        assert!(short.read().is_err());
    }
}
