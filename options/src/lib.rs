//! The options of a daemon: one definition for its command line, its configuration file and their
//! documentation.
//!
//! The definition is a structure that derives [`clap::Args`]. A field's documentation, type and default are
//! those of the option, and its `id` is the key in the file:
//!
//! ```text
//!   #[arg(id = "limits.max_channels", long = "max-channels")]      --max-channels 256
//!   max_channels: u32                                              [limits] max_channels = 256
//! ```
//!
//! A value on the command line overrides one in the file, which overrides the default. All of them pass
//! through the option's value parser, so a value is valid in the file if and only if it is valid on the
//! command line.
//!
//! - [`file`]: reads a file into sections of keys and values with line numbers;
//! - [`layer`]: combines a section with the command line into the structure;
//! - [`log`]: reads what to log;
//! - [`printing`]: ends a program that cannot print;
//! - [`document`]: writes the commented example file and the table of options;
//! - [`manual`]: writes man pages and shell completions, also for a program without a file;
//! - [`reference`]: writes the command line as a page in Markdown.

pub mod document;
pub mod file;
pub mod layer;
pub mod log;
pub mod manual;
pub mod printing;
pub mod reference;

use std::path::PathBuf;

use thiserror::Error;

pub use file::{File, Section};
pub use layer::{Given, Layer};
pub use log::parse_filter;

/// What every daemon can be told on its command line, besides what is in its configuration file.
#[derive(Debug, clap::Args)]
pub struct Common {
    /// Configuration file (TOML). Flags override it. None by default
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration, report errors, and exit
    #[arg(long)]
    pub check_config: bool,
    /// With --check-config: whether this program can take over from a daemon that stores its state in this
    /// format
    #[arg(long, value_name = "FORMAT", hide = true)]
    pub takes_over: Option<u32>,
    /// Print a commented configuration file with every option, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Write the man pages and shell completions into a folder to install as /usr/share, and exit; for
    /// packages
    #[arg(long, hide = true, value_name = "FOLDER")]
    pub write_manual: Option<PathBuf>,
}

/// An error in the options.
#[derive(Debug, Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{}: line {line}: {text}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line of the syntax error.
        line: usize,
        /// What the parser expected.
        text: String,
    },
    /// A key of the file is unknown or missing, or has a wrong value.
    #[error("{}: line {line}: {key}: {text}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The line of the key, or that of its section if the key is missing.
        line: usize,
        /// The key with its section.
        key: String,
        /// What is wrong.
        text: String,
    },
    /// A flag of the command line is missing or has a wrong value.
    #[error("--{flag}: {text}")]
    Flag {
        /// The flag without its dashes.
        flag: String,
        /// What is wrong.
        text: String,
    },
}

/// Parses a number of bytes: digits, and K, M, G or T for powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let no_number = || format!("{text:?} is not a number of bytes, such as 4G");
    if digits.is_empty() {
        return Err(no_number());
    }
    let unit = match &text[digits.len()..] {
        "" => 1u64,
        "K" | "k" | "KiB" => 1 << 10,
        "M" | "m" | "MiB" => 1 << 20,
        "G" | "g" | "GiB" => 1 << 30,
        "T" | "t" | "TiB" => 1 << 40,
        other => return Err(format!("{other:?} is not a unit: K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| no_number())?;
    number.checked_mul(unit).ok_or_else(|| format!("{text} is too large"))
}

#[cfg(test)]
mod tests;
