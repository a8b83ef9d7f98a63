//! One-line messages on stderr, as far as `RGPU_LOG` (`off`, `error`, `warn`, `info` or `debug`; default `warn`) lets them through.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;

/// How much a message matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing at all; no message has this level.
    Off,
    /// The program cannot go on as it should.
    Error,
    /// Something was refused, or is not as the program may think.
    Warn,
    /// What a person would like to know once.
    Info,
    /// What only a developer would like to know.
    Debug,
}

impl Level {
    /// The level that a value of `RGPU_LOG` names; an unknown word means the default.
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

/// Writes one line if `RGPU_LOG` lets it through.
pub fn write(level: Level, message: Arguments<'_>) {
    if enabled(level) {
        // One write, so that lines of several threads do not mix. The program may have closed stderr: a message that
        // cannot be written is not worth its life.
        let line = format!("rgpu: {message}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// See [`Level::Error`].
pub fn error(message: Arguments<'_>) {
    write(Level::Error, message);
}

/// See [`Level::Warn`].
pub fn warn(message: Arguments<'_>) {
    write(Level::Warn, message);
}

/// See [`Level::Info`].
pub fn info(message: Arguments<'_>) {
    write(Level::Info, message);
}

/// See [`Level::Debug`].
pub fn debug(message: Arguments<'_>) {
    write(Level::Debug, message);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_word_means_the_default() {
        assert_eq!(Level::parse("OFF"), Level::Off);
        assert_eq!(Level::parse(" debug "), Level::Debug);
        assert_eq!(Level::parse("loud"), Level::Warn);
    }
}
