//! One-line messages of the guest libraries on stderr. `RGPU_LOG` sets the least important level that is
//! written: `off`, `error`, `warn`, `info` or `debug`; the default is `warn`.

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

impl Level {
    /// The level that a value of `RGPU_LOG` names. An unknown word means the default.
    fn parse(word: &str) -> Self {
        match word.trim().to_ascii_lowercase().as_str() {
            "off" => Level::Off,
            "error" => Level::Error,
            "info" => Level::Info,
            "debug" => Level::Debug,
            _ => Level::Warn,
        }
    }
}

/// Whether messages of this level are written.
pub fn enabled(level: Level) -> bool {
    static THRESHOLD: OnceLock<Level> = OnceLock::new();
    level
        <= *THRESHOLD
            .get_or_init(|| std::env::var("RGPU_LOG").map_or(Level::Warn, |word| Level::parse(&word)))
}

/// Writes `message` as one line if messages of its level are written.
pub fn write(level: Level, message: Arguments<'_>) {
    if enabled(level) {
        // A single write, so that lines of several threads do not mix. Errors are ignored: the program may
        // have closed stderr.
        let line = format!("rgpu: {message}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
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
    fn an_unknown_level_means_the_default() {
        assert_eq!(Level::parse("OFF"), Level::Off);
        assert_eq!(Level::parse(" debug "), Level::Debug);
        assert_eq!(Level::parse("loud"), Level::Warn);
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
