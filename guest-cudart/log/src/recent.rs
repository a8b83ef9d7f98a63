//! The latest errors and warnings of this library, for the program itself. They are kept whether they are
//! written or not.

use std::collections::VecDeque;
use std::fmt::{Arguments, Write};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::Level;

/// Maximum bytes of the kept messages. With a line about lost ones, they fit in the 25600 bytes that CUDA's
/// manual names as the most that a program can get.
const MOST: usize = 25_000;
/// Maximum bytes of one message.
const LONGEST: usize = 2048;

/// The kept messages.
struct Kept {
    /// How many messages there were so far: the number of the next one.
    next: u64,
    /// The last of them, each a line.
    lines: VecDeque<String>,
    /// Their bytes.
    bytes: usize,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept { next: 0, lines: VecDeque::new(), bytes: 0 });
static LISTENER: OnceLock<fn(Level, String)> = OnceLock::new();

/// What was kept from some message on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// How many messages are lost.
    pub lost: u64,
    /// The others, each a line without its end.
    pub lines: Vec<String>,
    /// The number of the message that comes next.
    pub next: u64,
}

impl Kept {
    fn add(&mut self, line: String) {
        self.next += 1;
        self.bytes += line.len() + 1;
        self.lines.push_back(line);
        while self.bytes > MOST {
            let Some(oldest) = self.lines.pop_front() else { break };
            self.bytes -= oldest.len() + 1;
        }
    }

    fn from(&self, first: u64) -> Recent {
        let oldest = self.next - self.lines.len() as u64;
        let skipped = first.saturating_sub(oldest).min(self.lines.len() as u64);
        Recent {
            lost: oldest.saturating_sub(first),
            lines: self.lines.iter().skip(skipped as usize).cloned().collect(),
            next: self.next,
        }
    }
}

/// Keeps a message and tells the listener.
pub(crate) fn keep(level: Level, message: Arguments<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // SAFETY: the function takes nothing and only returns the number.
    let thread = unsafe { libc::gettid() };
    let line = line(now.as_millis() as u64, thread, level, message);
    let add = |line| KEPT.lock().unwrap_or_else(PoisonError::into_inner).add(line);
    if let Some(listener) = LISTENER.get() {
        add(line.clone());
        listener(level, line);
    } else {
        add(line);
    }
}

/// A message as a line, in the form of the chapter "Error Log Management" of the CUDA Programming Guide: time
/// of day (UTC), thread, source, severity, text.
fn line(milliseconds: u64, thread: i32, level: Level, message: Arguments<'_>) -> String {
    let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
    let [hours, minutes, seconds] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    let severity = if level == Level::Error { 'E' } else { 'W' };
    let mut line = format!("[{hours:02}:{minutes:02}:{seconds:02}.{rest:03}][{thread}][rgpu][{severity}] ");
    let head = line.len();
    // Writing to a string cannot fail, and a message's own formatting does not.
    let _ = line.write_fmt(message);
    line.truncate(line.floor_char_boundary(head + LONGEST));
    if line.contains(['\n', '\0']) { line.replace(['\n', '\0'], " ") } else { line }
}

/// Calls this function with each message from now on: its level, and its line. It is called in any thread and
/// with locks of this library held, so it may only note the message: it must call nothing of this library
/// and no code of the program. Only the first listener counts.
pub fn listen(listener: fn(Level, String)) {
    let _ = LISTENER.set(listener);
}

/// The number of the next message.
pub fn next() -> u64 {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).next
}

/// The messages from this number on.
pub fn from(first: u64) -> Recent {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).from(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_messages_are_kept_and_lost_ones_counted() {
        let mut kept = Kept { next: 0, lines: VecDeque::new(), bytes: 0 };
        assert_eq!(kept.from(0), Recent::default());
        for n in 0..100 {
            kept.add(format!("{n:0>999}"));
        }
        // Each takes a thousand bytes.
        let all = kept.from(0);
        assert_eq!((all.lost, all.lines.len(), all.next), (75, 25, 100));
        assert!(all.lines[0].ends_with("75") && all.lines[24].ends_with("99"));
        assert_eq!((kept.from(98).lost, kept.from(98).lines.len()), (0, 2));
        for first in [100, 101, u64::MAX] {
            assert_eq!(kept.from(first), Recent { lost: 0, lines: vec![], next: 100 });
        }
    }

    #[test]
    fn a_message_is_one_line_of_limited_length() {
        let at = ((22 * 60 + 21) * 60 + 32) * 1000 + 99;
        let text = |at, level, text: &str| line(at, 25642, level, format_args!("{text}"));
        assert_eq!(text(at, Level::Error, "a\nb"), "[22:21:32.099][25642][rgpu][E] a b");
        assert_eq!(text(86_400_000, Level::Warn, "c"), "[00:00:00.000][25642][rgpu][W] c");
        assert!(text(0, Level::Warn, &"ä".repeat(3000)).len() <= LONGEST + 31);
    }

    #[test]
    fn errors_and_warnings_are_kept_and_told() {
        static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
        listen(|_, line| TOLD.lock().unwrap().push(line));
        let first = next();
        crate::info(format_args!("not this"));
        crate::warn(format_args!("this of {first}"));
        crate::unwritten(format_args!("and that of {first}"));
        let kept = from(first).lines;
        for text in [format!("this of {first}"), format!("and that of {first}")] {
            let has = |lines: &[String]| lines.iter().any(|line| line.ends_with(&text));
            assert!(has(&kept) && has(&TOLD.lock().unwrap()), "{text}: {kept:?}");
        }
        assert!(!kept.iter().any(|line| line.contains("not this")));
    }
}
