//! Documents generated from the definition: a commented example file, and a table of options.

use std::fmt::Write;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, Command};

/// A section of the example file.
pub struct Part {
    /// Name of the section; empty for keys outside any section.
    pub name: &'static str,
    /// Whether the section may appear more than once.
    pub repeated: bool,
    /// Whether the example shows the section only as a comment.
    pub commented: bool,
    /// What the section is for.
    pub text: &'static str,
    /// The structure of its options, as arguments of a command.
    pub options: Command,
    /// Values of the options that the example sets, as they are written in the file. Every other option is
    /// shown as a comment, with its default or an example value.
    pub set: &'static [(&'static str, &'static str)],
    /// Example values of options that have no default.
    pub examples: &'static [(&'static str, &'static str)],
}

const COLUMNS: usize = 100;

impl Part {
    fn options(&self) -> Vec<(String, &Arg)> {
        let key = |arg: &Arg| {
            let id = arg.get_id().as_str();
            let prefix = format!("{}.", self.name);
            id.strip_prefix(&prefix).unwrap_or(id).to_owned()
        };
        let shown = self.options.get_arguments().filter(|arg| !arg.is_hide_set());
        let mut options: Vec<_> = shown.map(|arg| (key(arg), arg)).collect();
        // The keys of tables come after the section's own keys.
        options.sort_by_key(|(key, _)| key.contains('.'));
        options
    }

    fn full(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }
}

/// Writes the example file: each section with each of its options, its documentation and its default.
pub fn example(introduction: &str, parts: &[Part]) -> String {
    let mut out = String::new();
    comment(&mut out, introduction);
    for part in parts {
        out.push('\n');
        comment(&mut out, part.text);
        let sign = if part.commented { "#: " } else { "" };
        match (part.name, part.repeated) {
            ("", _) => {}
            (name, true) => writeln!(out, "{sign}[[{name}]]").unwrap_or_default(),
            (name, false) => writeln!(out, "{sign}[{name}]").unwrap_or_default(),
        }
        let mut table = String::new();
        for (key, arg) in part.options() {
            let (prefix, name) = key.rsplit_once('.').unwrap_or(("", &key));
            if prefix != table {
                table = prefix.to_owned();
                writeln!(out, "\n{sign}[{}]", part.full(prefix)).unwrap_or_default();
            }
            comment(&mut out, &meaning(arg, '"'));
            let find =
                |list: &[(&str, &str)]| list.iter().find(|(k, _)| *k == key).map(|(_, v)| (*v).to_owned());
            match find(part.set) {
                Some(value) => writeln!(out, "{sign}{name} = {value}"),
                None => {
                    let value = find(part.examples).or_else(|| default(arg)).unwrap_or_else(|| "\"\"".into());
                    writeln!(out, "#: {name} = {value}")
                }
            }
            .unwrap_or_default();
        }
    }
    out
}

/// Writes a Markdown table of the options of all sections.
pub fn table(parts: &[Part]) -> String {
    let mut out = String::from("| key | command line | default | meaning |\n|---|---|---|---|\n");
    for part in parts {
        for (key, arg) in part.options() {
            let flag = arg.get_long().unwrap_or_default();
            let default = default(arg).map_or_else(|| "–".to_owned(), |value| format!("`{value}`"));
            let key = part.full(&key);
            let help = meaning(arg, '`').replace('|', "\\|");
            writeln!(out, "| `{key}` | `--{flag}` | {default} | {help} |").unwrap_or_default();
        }
    }
    out
}

/// Writes a Markdown table of the keys of a file that no flag overrides.
pub fn keys(parts: &[Part]) -> String {
    let mut out = String::from("| key | meaning |\n|---|---|\n");
    for part in parts {
        for (key, arg) in part.options() {
            let help = meaning(arg, '`').replace('|', "\\|");
            writeln!(out, "| `{}` | {help} |", part.full(&key)).unwrap_or_default();
        }
    }
    out
}

/// An option's help, and what each of its values means if it has only some. Values are between `quotes`.
pub(crate) fn meaning(arg: &Arg, quotes: char) -> String {
    let mut text = help(arg);
    let is_bool = arg.get_value_parser().type_id() == ValueParser::bool().type_id();
    if arg.get_action().takes_values() && !is_bool {
        for value in arg.get_possible_values().iter().filter(|value| !value.is_hide_set()) {
            write!(text, " {quotes}{}{quotes}", value.get_name()).unwrap_or_default();
            if let Some(help) = value.get_help() {
                write!(text, ": {help}").unwrap_or_default();
            }
            text.push('.');
        }
    }
    text
}

fn help(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    help.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned() + "."
}

/// The default, as the file would have it.
fn default(arg: &Arg) -> Option<String> {
    let written = |text: &str| match toml::from_str::<toml::Table>(&format!("x = {text}")) {
        Ok(_) => text.to_owned(),
        Err(_) => format!("{text:?}"),
    };
    let values: Vec<String> =
        arg.get_default_values().iter().map(|value| written(&value.to_string_lossy())).collect();
    match (arg.get_action(), values.as_slice()) {
        (_, []) => None,
        (ArgAction::Append, values) => Some(format!("[{}]", values.join(", "))),
        (_, values) => Some(values.join(", ")),
    }
}

fn comment(out: &mut String, text: &str) {
    for paragraph in text.lines() {
        let mut line = String::from("#");
        for word in paragraph.split_whitespace() {
            if line.len() + 1 + word.len() > COLUMNS && line != "#" {
                out.push_str(&line);
                out.push('\n');
                line = String::from("#");
            }
            line.push(' ');
            line.push_str(word);
        }
        out.push_str(&line);
        out.push('\n');
    }
}
