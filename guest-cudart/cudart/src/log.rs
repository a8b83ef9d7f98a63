//! One-line messages on stderr, as far as `RGPU_LOG` (`off`, `error`, `warn`, `info` or `debug`; default `warn`) lets
//! them through.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
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

fn threshold() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| std::env::var("RGPU_LOG").map_or(Level::Warn, |word| Level::parse(&word)))
}

fn write(level: Level, message: Arguments<'_>) {
    if level <= threshold() {
        // The program may have closed stderr; a message that cannot be written is not worth its life.
        let _ = writeln!(std::io::stderr(), "rgpu: libcudart: {message}");
    }
}

pub(crate) fn error(message: Arguments<'_>) {
    write(Level::Error, message);
}

pub(crate) fn warn(message: Arguments<'_>) {
    write(Level::Warn, message);
}

pub(crate) fn debug(message: Arguments<'_>) {
    write(Level::Debug, message);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_word_means_warn() {
        assert_eq!(Level::parse("loud"), Level::Warn);
        assert_eq!(Level::parse(" Debug"), Level::Debug);
        assert_eq!(Level::parse("off"), Level::Off);
    }
}
