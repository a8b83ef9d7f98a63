//! The driver's log: what this library says when it refuses something or something fails. It is kept in the
//! process ([`log::recent`]), and the program's callbacks get each message ([`log_callbacks`]).
//!
//! Flags are reserved for later versions of CUDA. NVIDIA's driver (580) takes any, and so does this one.

use std::ffi::{OsStr, c_char, c_void};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use crate::abi::arguments::{InOut, Out, Text};
use crate::abi::log_callbacks::{self, Callback};
use client::Status;
use client::log::recent::{self, Recent};

/// The messages from an iterator on, which is the number of a message; NULL: all.
fn messages(iterator: &InOut<u32>) -> Recent {
    let Ok(from) = iterator.get() else { return recent::from(0) };
    let next = recent::next();
    // Iterators are numbers of 32 bits. One of the future counts as one of the far past.
    recent::from(next.saturating_sub(u64::from((next as u32).wrapping_sub(from))))
}

/// Says how many messages are not among those that follow.
fn missing(count: u64) -> String {
    format!("[rgpu] {count} earlier messages are not here")
}

/// As many of the last messages as fit in `room` bytes with a NUL: each a line with its end. If some are
/// missing, the first line says so. `None`: not even the last one fits.
fn fitting(all: &Recent, room: usize) -> Option<Vec<u8>> {
    let room = room.checked_sub(1)?;
    for left_out in 0..=all.lines.len() {
        let rest = &all.lines[left_out..];
        let gone = all.lost + left_out as u64;
        let head = (gone > 0).then(|| missing(gone));
        let text: String = head.iter().chain(rest).flat_map(|line| [line.as_str(), "\n"]).collect();
        if text.len() <= room && (!rest.is_empty() || all.lines.is_empty()) {
            return Some(text.into_bytes());
        }
    }
    None
}

/// The iterator that comes after these messages.
fn advance(iterator: &InOut<u32>, all: &Recent) {
    // NULL: the program has none.
    let _ = iterator.put(all.next as u32);
}

api! {
    fn cuLogsRegisterCallback(function: Option<Callback>, data: *mut c_void, handle: Out<usize>) {
        let function = function.ok_or(Status::INVALID_VALUE)?;
        handle.put_if_wanted(log_callbacks::register(function, data));
        Ok(())
    }

    fn cuLogsUnregisterCallback(handle: usize) {
        if log_callbacks::unregister(handle) { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }

    fn cuLogsCurrent(iterator: Out<u32>, _flags: u32) {
        iterator.put(recent::next() as u32)
    }

    fn cuLogsDumpToFile(iterator: InOut<u32>, path: Text, _flags: u32) {
        let path = OsStr::from_bytes(path.get()?.to_bytes());
        let all = messages(&iterator);
        let text = fitting(&all, usize::MAX).unwrap_or_default();
        // A program that does this after each failed call gets all of them.
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(&text)).map_err(|_| Status::INVALID_VALUE)?;
        advance(&iterator, &all);
        Ok(())
    }

    unsafe fn cuLogsDumpToMemory(iterator: InOut<u32>, buffer: *mut c_char, size: InOut<usize>, _flags: u32) {
        let room = size.get()?;
        if buffer.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let all = messages(&iterator);
        let text = fitting(&all, room);
        let written = text.as_deref().unwrap_or_default();
        size.put(written.len())?;
        if room > 0 {
            // SAFETY: there is room for `room` bytes, by CUDA's manual, and so for the text and its NUL.
            unsafe {
                std::ptr::copy_nonoverlapping(written.as_ptr(), buffer.cast(), written.len());
                buffer.add(written.len()).write(0);
            }
        }
        if text.is_none() && !all.lines.is_empty() {
            return Err(Status::INVALID_VALUE);
        }
        advance(&iterator, &all);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, CString};
    use std::sync::Mutex;

    use client::lock;

    use super::*;

    fn text(all: &Recent, room: usize) -> Option<String> {
        fitting(all, room).map(|text| String::from_utf8(text).expect("the messages are text"))
    }

    /// The levels and lines that a callback got, with the lengths that it was told.
    type Told = Mutex<Vec<(u32, String, usize)>>;

    unsafe extern "C" fn note(data: *mut c_void, level: u32, text: *mut c_char, length: usize) {
        // SAFETY: the test registers the function with such data, and a message ends with NUL.
        let (told, text) = unsafe { (&*data.cast::<Told>(), CStr::from_ptr(text)) };
        lock(told).push((level, text.to_string_lossy().into_owned(), length));
    }

    /// Says something that no other test says, as a function that refuses what it refused before.
    fn say(what: &str) {
        let _call = log_callbacks::enter();
        client::log::unwritten(format_args!("{what}, says the test of dumps"));
    }

    /// What was said by [`say`] among some messages.
    fn said(lines: &[String]) -> Vec<&str> {
        let of_test = lines.iter().filter_map(|line| line.strip_suffix(", says the test of dumps"));
        of_test.filter_map(|line| Some(line.split_once("[rgpu][W] ")?.1)).collect()
    }

    /// What a callback was told by [`say`].
    fn told_by_test(told: &Told) -> Vec<String> {
        // Other tests say something, too.
        let all = lock(told);
        let of_test = all.iter().filter_map(|(level, line, length)| {
            let text = *said(std::slice::from_ref(line)).first()?;
            assert_eq!((*level, *length), (1, line.len()), "{line}");
            Some(text.to_owned())
        });
        of_test.collect()
    }

    #[test]
    fn callbacks_and_dumps_get_each_message_once() {
        const INVALID: u32 = Status::INVALID_VALUE.0;
        let told = Told::default();
        let data = (&raw const told).cast_mut().cast();
        let (mut handle, mut iterator) = (0, 0);
        // SAFETY: live local variables, functions of this module, and buffers of the sizes that are named.
        unsafe {
            assert_eq!(cuLogsRegisterCallback(None, data, Out::NULL), INVALID);
            assert_eq!(cuLogsRegisterCallback(Some(note), data, Out::from(&mut handle)), 0);
            // Flags are "reserved", and NVIDIA's driver does not look at them.
            assert_eq!(cuLogsCurrent(Out::from(&mut iterator), 1), 0);
            say("one");
            say("two");
            assert_eq!(told_by_test(&told), ["one", "two"]);
            assert_eq!(cuLogsUnregisterCallback(handle), 0);
            assert_eq!(cuLogsUnregisterCallback(handle), INVALID);
            say("three");
            assert_eq!(told_by_test(&told), ["one", "two"]);

            let mut buffer = vec![1u8; 25600];
            let mut dump = |iterator: &mut u32, room: usize| {
                let mut size = room;
                let answer = cuLogsDumpToMemory(
                    InOut::from(iterator),
                    buffer.as_mut_ptr().cast(),
                    InOut::from(&mut size),
                    0,
                );
                assert_eq!(buffer[size], 0);
                let text = String::from_utf8_lossy(&buffer[..size]);
                (answer, text.lines().map(str::to_owned).collect::<Vec<_>>())
            };
            let start = iterator;
            let (answer, lines) = dump(&mut iterator, 25600);
            assert_eq!((answer, said(&lines)), (0, vec!["one", "two", "three"]));
            let (answer, lines) = dump(&mut iterator, 25600);
            assert_eq!((answer, said(&lines)), (0, vec![]));
            // The iterator stays where nothing fits.
            iterator = start;
            assert_eq!((dump(&mut iterator, 5), iterator), ((INVALID, vec![]), start));
            let file = tempfile::NamedTempFile::new().expect("a file");
            let path = CString::new(file.path().as_os_str().as_bytes()).expect("a path");
            for _ in 0..2 {
                assert_eq!(cuLogsDumpToFile(InOut::from(&mut iterator), Text::from(path.as_c_str()), 0), 0);
            }
            let written = std::fs::read_to_string(file.path()).expect("what was written");
            let lines: Vec<String> = written.lines().map(str::to_owned).collect();
            assert_eq!(said(&lines), ["one", "two", "three"]);
        }
    }

    #[test]
    fn the_last_messages_that_fit_are_given() {
        // Each takes 61 bytes with its end, more than the note about missing ones.
        let lines = ["first", "second", "third"].map(|name| format!("{name:.<60}"));
        let [first, second, third] = &lines;
        let all = Recent { lost: 0, lines: lines.to_vec(), next: 3 };
        let three = format!("{first}\n{second}\n{third}\n");
        let two = format!("{}\n{second}\n{third}\n", missing(1));
        let one = format!("{}\n{third}\n", missing(2));
        for (most, least, given) in [
            (usize::MAX, three.len() + 1, &three),
            (three.len(), two.len() + 1, &two),
            (two.len(), one.len() + 1, &one),
        ] {
            for room in [most, least] {
                assert_eq!(text(&all, room).as_ref(), Some(given), "{room} bytes");
            }
        }
        for room in [one.len(), 1, 0] {
            assert_eq!(text(&all, room), None, "{room} bytes");
        }
        let none = Recent { lost: 0, lines: vec![], next: 3 };
        assert_eq!((text(&none, 1).as_deref(), text(&none, 0)), (Some(""), None));
        let lost = Recent { lost: 5, ..all };
        assert!(
            text(&lost, 1000).is_some_and(|text| text.starts_with(&missing(5)) && text.ends_with(&three))
        );
    }
}
