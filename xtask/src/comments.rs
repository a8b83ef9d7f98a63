//! Comments that are too wide for the sources.
//!
//! rustfmt wraps code but no comments, so a sentence that was added to one would make it wider and wider.
//! Tables, drawings, code in comments and lists of a comment's own layout are as wide as they have to be.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rgpu_tests::tree;

/// Columns of a comment: as many as rustfmt gives to code.
const MOST_COLUMNS: usize = 110;
/// Folders without sources of ours.
const LEFT_OUT: &[&str] = &["target", "build"];

/// Fails if a comment of the project's sources is too wide.
pub fn check() -> Result<()> {
    let mut wide = Vec::new();
    look_into(&tree::root(), &mut wide)?;
    if !wide.is_empty() {
        bail!("these comments are wider than {MOST_COLUMNS} columns:\n{}", wide.join("\n"));
    }
    Ok(())
}

/// Adds the places of wide comments in a folder.
fn look_into(folder: &Path, wide: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
        let (path, name) = (entry.path(), entry.file_name());
        let left_out = name.to_str().is_none_or(|name| name.starts_with('.') || LEFT_OUT.contains(&name));
        if entry.file_type()?.is_dir() && !left_out {
            look_into(&path, wide)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            wide.extend(wide_lines(&text).map(|line| format!("{}:{line}", path.display())));
        }
    }
    Ok(())
}

/// The numbers of a source's lines with comments that are too wide.
fn wide_lines(text: &str) -> impl Iterator<Item = usize> {
    let mut in_code = false;
    text.lines().zip(1..).filter_map(move |(line, number)| {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            in_code = false;
            return None;
        };
        let comment = comment.trim_start_matches(['/', '!']);
        let comment = comment.strip_prefix(' ').unwrap_or(comment);
        in_code ^= comment.trim_start().starts_with("```");
        let is_prose = !in_code && !comment.starts_with([' ', '|']);
        (is_prose && line.chars().count() > MOST_COLUMNS).then_some(number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_prose_is_found_and_tables_and_drawings_are_not() {
        let long = "word ".repeat(30);
        let text = format!(
            "// short\n/// {long}\nfn f() {{}} // {long}\n//! | {long} |\n//!   {long}\n//! ```text\n//! {long}\n//! ```\n    // {long}\n"
        );
        assert_eq!(wide_lines(&text).collect::<Vec<_>>(), [2, 9]);
        let fits = format!("// {}", "ü".repeat(MOST_COLUMNS - 3));
        assert_eq!(wide_lines(&fits).count(), 0);
        assert_eq!(wide_lines(&format!("{fits}ü")).count(), 1);
    }
}
