//! One-line messages of the guest libraries on stderr. `RGPU_LOG` sets the least important level that is
//! written: `off`, `error`, `warn`, `info` or `debug`; the default is `warn`. Errors and warnings are also
//! [kept](recent) for the program.

pub mod recent;
pub mod setting;

use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;

/// How important a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No messages at all; no message has this level.
    Off,
    /// The program cannot continue as intended.
    Error,
    /// Something was refused, or differs from what the program may assume.
    Warn,
    /// Facts worth knowing once, such as which server is in use.
    Info,
    /// Details for developers.
    Debug,
}

/// The values of `RGPU_LOG`.
const WORDS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

impl Level {
    /// The level that a value of `RGPU_LOG` names.
    fn parse(text: &str) -> Option<Self> {
        match setting::find(text, &WORDS)? {
            "off" => Some(Level::Off),
            "error" => Some(Level::Error),
            "info" => Some(Level::Info),
            "debug" => Some(Level::Debug),
            _ => Some(Level::Warn),
        }
    }
}

/// Whether messages of this level are written.
pub fn enabled(level: Level) -> bool {
    static THRESHOLD: OnceLock<Level> = OnceLock::new();
    if let Some(threshold) = THRESHOLD.get() {
        return level <= *threshold;
    }
    let asked = setting::text("RGPU_LOG");
    let known = asked.as_deref().and_then(Level::parse);
    let threshold = known.unwrap_or(Level::Warn);
    if THRESHOLD.set(threshold).is_ok()
        && known.is_none()
        && let Some(text) = asked
    {
        setting::complain("RGPU_LOG", &text, &setting::one_of(&WORDS), None);
    }
    level <= threshold
}

/// Writes `message` as one line if messages of its level are written.
pub fn write(level: Level, message: Arguments<'_>) {
    if enabled(level) {
        // A single write, so that lines of several threads do not mix. Errors are ignored: the program may
        // have closed stderr.
        let line = format!("rgpu: {message}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    if level <= Level::Warn {
        recent::keep(level, message);
    }
}

/// Only keeps a message of [`Level::Warn`]: one like it was written before.
pub fn unwritten(message: Arguments<'_>) {
    recent::keep(Level::Warn, message);
}

/// Writes a message of [`Level::Error`].
pub fn error(message: Arguments<'_>) {
    write(Level::Error, message);
}

/// Writes a message of [`Level::Warn`].
pub fn warn(message: Arguments<'_>) {
    write(Level::Warn, message);
}

/// Writes a message of [`Level::Info`].
pub fn info(message: Arguments<'_>) {
    write(Level::Info, message);
}

/// Writes a message of [`Level::Debug`].
pub fn debug(message: Arguments<'_>) {
    write(Level::Debug, message);
}

/// A full stop if this text needs one at its end. A reason may end with another mark, such as a question
/// mark.
pub fn full_stop(text: &str) -> &'static str {
    if text.ends_with(['.', '?', '!', '…']) { "" } else { "." }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_its_word() {
        assert_eq!(Level::parse("OFF"), Some(Level::Off));
        assert_eq!(Level::parse("loud"), None);
        let levels = WORDS.map(|word| Level::parse(word).unwrap());
        assert_eq!(levels, [Level::Off, Level::Error, Level::Warn, Level::Info, Level::Debug]);
    }

    #[test]
    fn a_question_ends_its_own_sentence() {
        for (reason, end) in
            [("is the link down?", ""), ("it ended.", ""), ("the worker is gone", "."), ("", ".")]
        {
            assert_eq!(full_stop(reason), end, "{reason:?}");
        }
    }
}
