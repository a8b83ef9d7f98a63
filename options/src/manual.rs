//! A program's man pages and shell completions, from the definition of its command line.
//!
//! A command's `after_long_help` becomes sections of its page: a line that is not indented and ends with a
//! colon is a heading, and the indented lines below it are the section's text, unchanged. So `--help` has the
//! same text.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// All programs with pages, each with its section of the manual.
const PROGRAMS: [(&str, &str); 3] = [("rgpuctl", "1"), ("rgpu-server", "8"), ("vhost-rgpu", "8")];

/// For each shell, the folder of its completions below `share`, and what comes before and after the program's
/// name in a file's name.
const COMPLETIONS: [(Shell, &str, &str, &str); 3] = [
    (Shell::Bash, "bash-completion/completions", "", ""),
    (Shell::Zsh, "zsh/vendor-completions", "_", ""),
    (Shell::Fish, "fish/vendor_completions.d", "", ".fish"),
];

/// Writes the pages and completions of a program into the folder `share`, at the paths that they have below
/// `/usr/share`.
pub fn write(command: Command, share: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let program = command.get_name().to_owned();
    let section = PROGRAMS.iter().find(|(name, _)| *name == program).map_or("1", |(_, section)| section);
    let pages = share.join(format!("man/man{section}"));
    fs::create_dir_all(&pages)?;
    write_pages(&command, section, &pages, &[])?;
    for (shell, folder, before, after) in COMPLETIONS {
        let folder = share.join(folder);
        fs::create_dir_all(&folder)?;
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut shown(&command), &program, &mut text);
        fs::write(folder.join(format!("{before}{program}{after}")), text)?;
    }
    Ok(())
}

/// The command without its hidden parts, which completions would otherwise offer.
fn shown(command: &Command) -> Command {
    let mut copy = Command::new(command.get_name().to_owned()).disable_help_subcommand(true);
    if let Some(about) = command.get_about() {
        copy = copy.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        copy = copy.version(version.to_owned());
    }
    // Help and version are added again when the copy is built.
    let own = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    copy = copy.args(command.get_arguments().filter(own).cloned());
    copy.subcommands(command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(shown))
}

/// Writes the pages of a command and its subcommands. `above` are the pages of the commands that contain it.
fn write_pages(command: &Command, section: &str, folder: &Path, above: &[String]) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut related = above.to_vec();
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        related.push(format!("{}({section})", sub.get_display_name().unwrap_or_else(|| sub.get_name())));
    }
    for (program, section) in PROGRAMS {
        let page = format!("{program}({section})");
        if program != name && !related.contains(&page) {
            related.push(page);
        }
    }
    let mut page = Vec::new();
    render(command, section, &related, &mut page)?;
    fs::write(folder.join(format!("{name}.{section}")), page)?;
    let mut above = above.to_vec();
    above.push(format!("{name}({section})"));
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(sub, section, folder, &above)?;
    }
    Ok(())
}

fn render(command: &Command, section: &str, related: &[String], out: &mut dyn Write) -> io::Result<()> {
    let mut command = command.clone();
    let has_subcommands = command.get_subcommands().any(|sub| !sub.is_hide_set());
    // A usage line with 40 options would not help anyone.
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let man = Man::new(command.override_usage(usage))
        .section(section)
        .source(format!("rgpu {}", env!("CARGO_PKG_VERSION")))
        .manual("rgpu");
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    if has_subcommands {
        man.render_subcommands_section(out)?;
    }
    for (heading, lines) in sections(&text) {
        let mut roff = Roff::new();
        roff.control("SH", [heading.to_uppercase().as_str()]);
        // No filling: the lines are laid out by hand.
        roff.control("nf", []);
        for line in lines {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
        roff.to_writer(out)?;
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    let mut words = Vec::new();
    for (i, page) in related.iter().enumerate() {
        let (name, rest) = page.split_at(page.find('(').unwrap_or(page.len()));
        let comma = if i + 1 < related.len() { ", " } else { "" };
        words.extend([bold(name), roman(format!("{rest}{comma}"))]);
    }
    roff.text(words);
    roff.to_writer(out)
}

/// The headings of a text with the lines below them, without their common indentation.
pub(crate) fn sections(text: &str) -> Vec<(String, Vec<String>)> {
    let mut sections: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines() {
        match line.strip_suffix(':') {
            Some(heading) if !heading.starts_with(' ') => sections.push((heading.to_owned(), Vec::new())),
            _ => {
                if let Some((_, lines)) = sections.last_mut() {
                    lines.push(line.strip_prefix("  ").unwrap_or(line).to_owned());
                }
            }
        }
    }
    for (_, lines) in &mut sections {
        while lines.last().is_some_and(|line| line.trim().is_empty()) {
            lines.pop();
        }
    }
    sections
}

/// What is missing in a command's documentation: descriptions, units and defaults of options, and exit
/// statuses.
///
/// For tests.
pub fn gaps(command: &Command) -> Vec<String> {
    let mut command = command.clone().disable_help_subcommand(true);
    command.build();
    let mut gaps = Vec::new();
    let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    if !sections(&text).iter().any(|(heading, _)| heading == "Exit status") {
        gaps.push(format!("{}: no exit status", command.get_name()));
    }
    find_gaps(&command, &mut gaps);
    gaps
}

/// Words that name a number's unit.
const UNITS: [&str; 12] = [
    "seconds",
    "minutes",
    "microseconds",
    "percent",
    "mib",
    "bytes",
    "number",
    "maximum",
    "workers",
    "index",
    "port",
    "connections",
];
/// Words that introduce the default of an option.
const DEFAULTS: [&str; 3] = ["by default", "default is", "must be given"];

fn find_gaps(command: &Command, gaps: &mut Vec<String>) {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    if command.get_about().is_none() {
        gaps.push(format!("{name}: no description"));
    }
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let option = arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
        let help =
            arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
        if help.contains('\\') {
            gaps.push(format!("{name} {option}: a backslash"));
        }
        let help = help.to_lowercase();
        let says = |words: &[&str]| words.iter().any(|word| help.contains(word));
        let values = arg.get_value_names().unwrap_or_default();
        let number = values.iter().any(|value| matches!(value.as_str(), "N" | "SIZE" | "SECONDS" | "MIB"));
        if help.is_empty() {
            gaps.push(format!("{name} {option}: no text"));
        } else if number && !says(&UNITS) {
            gaps.push(format!("{name} {option}: no unit"));
        }
        let takes = arg.get_action().takes_values();
        if takes && arg.get_default_values().is_empty() && !arg.is_required_set() && !says(&DEFAULTS) {
            gaps.push(format!("{name} {option}: no default"));
        }
    }
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        find_gaps(sub, gaps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        let most = Arg::new("most").long("most").value_name("N").default_value("4").help("Maximum number");
        Command::new("rgpuctl")
            .about("Does things.")
            .after_long_help("Exit status:\n  0  done\n  1  not done\n\nExamples:\n  .dotted --most 5\n")
            .arg(most)
            .arg(Arg::new("secret").long("secret").hide(true))
            .subcommand(Command::new("part").about("Does a part."))
            .subcommand(Command::new("own").hide(true))
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    #[test]
    fn pages_and_completions_omit_only_hidden_parts() {
        let folder = tempfile::tempdir().unwrap();
        write(command(), folder.path()).unwrap();
        let page = read(&folder.path().join("man/man1/rgpuctl.1"));
        for text in [
            "Does things.",
            "\\-\\-most",
            "[default: 4]",
            ".SH \"EXIT STATUS\"\n.nf\n0  done\n",
            ".SH EXAMPLES",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert!(page.contains("\n\\&.dotted"), "{page}");
        assert!(page.contains("\\fBrgpuctl\\-part\\fR(1), \\fBrgpu\\-server\\fR(8)"), "{page}");
        assert!(read(&folder.path().join("man/man1/rgpuctl-part.1")).contains("\\fBrgpuctl\\fR(1)"));
        let completions = [
            "bash-completion/completions/rgpuctl",
            "zsh/vendor-completions/_rgpuctl",
            "fish/vendor_completions.d/rgpuctl.fish",
        ];
        let completions = completions.map(|file| read(&folder.path().join(file)));
        for text in completions.iter().chain([&page]) {
            assert!(text.contains("most") && text.contains("part"), "{text}");
            assert!(!text.contains("secret") && !text.contains("own "), "{text}");
        }
    }

    #[test]
    fn gaps_in_the_documentation_are_found() {
        assert_eq!(gaps(&command()), Vec::<String>::new());
        let silent = command()
            .after_long_help("")
            .arg(Arg::new("size").long("size").value_name("SIZE").help(r#"A \"size\""#))
            .subcommand(
                Command::new("more").arg(Arg::new("flag").long("flag").action(clap::ArgAction::SetTrue)),
            );
        let expected = [
            "rgpuctl: no exit status",
            "rgpuctl --size: a backslash",
            "rgpuctl --size: no unit",
            "rgpuctl --size: no default",
            "rgpuctl-more: no description",
            "rgpuctl-more --flag: no text",
        ];
        assert_eq!(gaps(&silent), expected);
    }
}
