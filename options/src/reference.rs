//! The command line of a program as a page in Markdown, from its definition.

use std::fmt::Write;

use clap::{Arg, ArgAction, Command};

use crate::document::meaning;
use crate::manual::sections;

/// Writes a program's commands: what each does, how it is called, its options, and what follows its help,
/// such as exit status and examples. Hidden parts are omitted.
///
/// Options that `elsewhere` has too are omitted, because another page lists them.
pub fn markdown(command: Command, elsewhere: &Command) -> String {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut out = String::new();
    write_command(&mut out, &command, elsewhere, 2);
    out
}

fn write_command(out: &mut String, command: &Command, elsewhere: &Command, level: usize) {
    let mut named = command.clone();
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string);
    let usage = named.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").lines().map(str::trim).collect::<Vec<_>>().join("\n");
    // clap removes the full stop of a text with one paragraph.
    let about = cell(about.unwrap_or_default().trim_end_matches('.'), "\n\n");
    let _ = writeln!(out, "\n{} {name}\n\n{about}.\n", "#".repeat(level));
    let _ = writeln!(out, "```text\n{}\n```", usage.trim());
    let listed = |arg: &&Arg| {
        let automatic = matches!(arg.get_id().as_str(), "help" | "version");
        let known = elsewhere.get_arguments().any(|other| other.get_id() == arg.get_id());
        !arg.is_hide_set() && !automatic && !known
    };
    let options: Vec<&Arg> = command.get_arguments().filter(listed).collect();
    if !options.is_empty() {
        out.push_str("\n| option | default | meaning |\n|---|---|---|\n");
        for arg in options {
            let meaning = cell(&meaning(arg, '`'), " ").replace('|', "\\|");
            let _ = writeln!(out, "| `{}` | {} | {meaning} |", form(arg), default(arg));
        }
    }
    let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    for (heading, lines) in sections(&text) {
        let _ = writeln!(out, "\n**{heading}**\n\n```text\n{}\n```", lines.join("\n"));
    }
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_command(out, sub, elsewhere, level + 1);
    }
}

/// How an option is written: its flag with the name of its value, or only the name.
fn form(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let value = values.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    match arg.get_long() {
        Some(long) if arg.get_action().takes_values() => format!("--{long} {value}"),
        Some(long) => format!("--{long}"),
        None => value,
    }
}

fn default(arg: &Arg) -> String {
    let values: Vec<_> =
        arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    match arg.get_action() {
        ArgAction::Set | ArgAction::Append if !values.is_empty() => values.join(", "),
        _ => "–".to_owned(),
    }
}

/// Text for Markdown, with paragraphs joined by `between`. Angle brackets are escaped, because placeholders
/// in them would become tags.
fn cell(text: &str, between: &str) -> String {
    let paragraphs = text.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.collect::<Vec<_>>().join(between).replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::builder::PossibleValue;

    #[test]
    fn a_page_omits_hidden_options_and_those_listed_elsewhere() {
        let kind = Arg::new("kind").long("kind").value_name("KIND").default_value("a").help("What | kind");
        let kind = kind.value_parser([PossibleValue::new("a").help("The first"), PossibleValue::new("b")]);
        let port = Arg::new("port").long("port").value_name("N").help("In the file, too");
        let command = Command::new("tool")
            .about("Does things.")
            .after_long_help("Exit status:\n  0  done\n")
            .arg(port.clone())
            .arg(Arg::new("own").long("own").hide(true))
            .subcommand(Command::new("part").about("Does <one> part.").arg(kind))
            .subcommand(Command::new("inner").hide(true));
        let page = markdown(command, &Command::new("").arg(port));
        for text in [
            "\n## tool\n\nDoes things.\n",
            "\n**Exit status**\n\n```text\n0  done\n```\n",
            "\n### tool part\n\nDoes &lt;one> part.\n",
            "```text\ntool part [OPTIONS]\n```\n",
            "| `--kind KIND` | `a` | What \\| kind. `a`: The first. `b`. |\n",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        for text in ["--port", "--own", "inner", "--help"] {
            assert!(!page.contains(text), "{text}: {page}");
        }
    }
}
