//! Combines a section of the file with the command line.

use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseIntError};
use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command};

use crate::file::{File, Section, Value};
use crate::{Common, Error};

/// A whole command line, as the daemon's own [`Command`] parsed it.
pub struct Given {
    command: Command,
    matches: ArgMatches,
}

impl Given {
    /// Parses a command line. An invalid one ends the process with clap's message.
    pub fn parse(command: Command, words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Given {
        let matches = command.clone().get_matches_from(words);
        Given { command, matches }
    }

    /// No command line, for a file whose keys no flag overrides.
    pub fn nothing() -> Given {
        Given::parse(Command::new("nothing").no_binary_name(true), std::iter::empty::<OsString>())
    }

    /// What was parsed.
    pub fn matches(&self) -> &ArgMatches {
        &self.matches
    }

    /// The daemon's argument with this id. In a release build, `ArgMatches` does not say which ids there are.
    fn argument(&self, id: &str) -> Option<&Arg> {
        self.command.get_arguments().find(|arg| arg.get_id() == id)
    }
}

/// Where the values of one structure of options come from.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// The whole command line.
    pub given: &'a Given,
    /// The section, with its file.
    pub section: Option<(&'a File, &'a Section)>,
}

impl Layer<'_> {
    /// The values of `T`: its defaults, overridden by the section, overridden by the command line. A key of
    /// the section that `T` does not have is an error.
    pub fn read<T: Args>(&self) -> Result<T, Error> {
        let command = T::augment_args(Command::new("options").no_binary_name(true).disable_help_flag(true));
        let mut words = Vec::new();
        if let Some((file, section)) = self.section {
            for value in &section.values {
                let Some(arg) = command.get_arguments().find(|arg| is_key(arg, &section.name, &value.key))
                else {
                    let text =
                        format!("there is no such option{}", self.elsewhere(&command, section, &value.key));
                    return Err(in_file(file, section, &value.key, text));
                };
                let from_file = from_file(&command, arg, value)
                    .map_err(|text| in_file(file, section, &value.key, text))?;
                if !self.has_flag(arg.get_id().as_str()) {
                    words.extend(from_file);
                }
            }
        }
        for arg in command.get_arguments().filter(|arg| self.has_flag(arg.get_id().as_str())) {
            words.extend(
                self.given.matches.get_raw(arg.get_id().as_str()).into_iter().flatten().map(|w| flag(arg, w)),
            );
        }
        let failed = |e: clap::Error| Error::Flag { flag: String::new(), text: e.to_string() };
        let matches = command.try_get_matches_from(words).map_err(failed)?;
        T::from_arg_matches(&matches).map_err(failed)
    }

    /// Whether the command line gives the option with this id.
    pub fn has_flag(&self, id: &str) -> bool {
        // If the daemon's command does not have the id, the option exists only in the file.
        self.given.argument(id).is_some()
            && self.given.matches.value_source(id) == Some(ValueSource::CommandLine)
    }

    /// Where the file may have an option of this name, in words that follow an error: a line at the end of a
    /// file belongs to the last section there.
    fn elsewhere(&self, command: &Command, section: &Section, key: &str) -> String {
        let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
        let name = last(key);
        let own = command.get_arguments().filter(|arg| !arg.is_hide_set());
        let own = own.map(|arg| key_of(arg, &section.name)).filter(|own| last(own) == name);
        let mut places: Vec<String> = own.map(|own| section.full_key(own)).collect();
        // The daemon's command line has those outside any section, besides those that no file has.
        let flags = Common::augment_args(Command::new(""));
        if places.is_empty()
            && !section.name.is_empty()
            && self.given.argument(&name).is_some_and(|arg| !arg.is_hide_set())
            && !flags.get_arguments().any(|arg| arg.get_id() == name.as_str())
        {
            places.push(name);
        }
        match &places[..] {
            [] => String::new(),
            [place] if !place.contains('.') => {
                format!("; there is {place} outside any section: its line has to be above the first section")
            }
            places => format!("; there is {}", places.join(" and ")),
        }
    }

    /// Checks that a path is absolute if it comes from the file, where a relative one would depend on the
    /// folder in which the daemon was started. `id`: the option's.
    pub fn check_absolute(&self, id: &str, path: &Path) -> Result<(), Error> {
        match self.section {
            Some((file, section)) if path.is_relative() && !self.has_flag(id) => {
                let text = format!("{} is not an absolute path", path.display());
                Err(in_file(file, section, without_section(id, &section.name), text))
            }
            _ => Ok(()),
        }
    }

    /// An error about an option's value. It names the line if the value comes from the file, and the flag if
    /// not. A missing option is reported at the section's line.
    pub fn wrong(&self, key: &str, text: impl Into<String>) -> Error {
        match self.section {
            Some((file, section)) if !self.has_flag(key) => in_file(file, section, key, text),
            _ => Error::Flag { flag: key.replace(['.', '_'], "-"), text: text.into() },
        }
    }
}

fn in_file(file: &File, section: &Section, key: &str, text: impl Into<String>) -> Error {
    Error::Key {
        path: file.path.clone(),
        line: section.line_of(key),
        key: section.full_key(key),
        text: text.into(),
    }
}

/// A value of the file as words of a command line, checked separately. The error says what is wrong with it.
fn from_file(command: &Command, arg: &Arg, value: &Value) -> Result<Vec<OsString>, String> {
    if !matches!(arg.get_action(), ArgAction::Append) && value.words.len() != 1 {
        return Err("must be a single value".into());
    }
    let words: Vec<OsString> = value.words.iter().map(|word| flag(arg, word.as_ref())).collect();
    command.clone().try_get_matches_from(&words).map_err(|e| explain(&e))?;
    Ok(words)
}

/// Whether an argument is the option for a section's key: its id is the key, with or without the section's
/// name before it.
fn is_key(arg: &Arg, section: &str, key: &str) -> bool {
    arg.get_id() == key || key_of(arg, section) == key
}

/// The key of an argument in a section.
fn key_of<'a>(arg: &'a Arg, section: &str) -> &'a str {
    without_section(arg.get_id().as_str(), section)
}

fn without_section<'a>(id: &'a str, section: &str) -> &'a str {
    id.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')).unwrap_or(id)
}

fn flag(arg: &Arg, value: &std::ffi::OsStr) -> OsString {
    let mut word = OsString::from(format!("--{}=", arg.get_long().unwrap_or_default()));
    word.push(value);
    word
}

/// What is wrong with a value, without the flag's name.
fn explain(error: &clap::Error) -> String {
    if let Some(source) = error.source() {
        return match source.downcast_ref::<ParseIntError>().map(ParseIntError::kind) {
            Some(IntErrorKind::PosOverflow) => "the number is too large".to_owned(),
            Some(_) => "must be a whole number of 0 or more".to_owned(),
            None => source.to_string(),
        };
    }
    let strings = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(list)) => list.clone(),
        _ => Vec::new(),
    };
    let valid = strings(ContextKind::ValidValue);
    match (strings(ContextKind::InvalidValue).first(), valid.is_empty()) {
        (Some(value), false) => format!("{value:?} is not one of {}", valid.join(", ")),
        _ => error.to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned(),
    }
}
