//! `rgpuctl status`: shows the status of the daemons on this machine.
//!
//! A daemon's status socket sends one JSON object to each connection. This command does not know its fields:
//! it shows numbers and strings as lines, and lists of objects as tables.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use crate::daemon::read_status;

/// The default status sockets.
const DEFAULT_SOCKETS: [&str; 2] = ["/run/rgpu/vhost-rgpu.status", "/run/rgpu/server.status"];

/// Show the status of vhost-rgpu and rgpu-server on this machine.
///
/// Fails if neither of them answers.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    sockets: Sockets,
    /// Print one JSON object that has each daemon's status under the path of its socket
    #[arg(long)]
    json: bool,
}

/// Whose status to read.
#[derive(Args)]
pub struct Sockets {
    /// Status socket to read. May be given more than once. By default /run/rgpu/vhost-rgpu.status and
    /// /run/rgpu/server.status
    #[arg(long = "socket", value_name = "PATH")]
    given: Vec<PathBuf>,
}

impl Sockets {
    /// The given status sockets, or the default ones.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self.given.is_empty() {
            true => DEFAULT_SOCKETS.iter().map(PathBuf::from).collect(),
            false => self.given.clone(),
        }
    }
}

/// Prints every daemon's status.
pub fn status(arguments: &Arguments) -> Result<ExitCode> {
    let sockets = arguments.sockets.paths();
    let mut answers = serde_json::Map::new();
    for socket in &sockets {
        match read_status(socket) {
            Ok(answer) => {
                answers.insert(socket.display().to_string(), answer);
            }
            Err(error) => say!("rgpuctl: {error:#}"),
        }
    }
    let none = answers.is_empty();
    if arguments.json {
        println!("{}", Value::Object(answers));
    } else {
        for (socket, answer) in &answers {
            println!("{socket}");
            print!("{}", render(answer, 1));
        }
    }
    Ok(if none { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A JSON value as indented text for display.
fn render(value: &Value, depth: usize) -> String {
    let Value::Object(fields) = value else { return format!("{}{}\n", indent(depth), scalar(value)) };
    let width = fields.iter().filter(|(_, v)| is_scalar(v)).map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, field) in fields.iter().filter(|(_, field)| is_scalar(field)) {
        text += &format!("{}{name:width$}  {}\n", indent(depth), scalar(field));
    }
    for (name, field) in fields.iter().filter(|(_, field)| !is_scalar(field)) {
        match field {
            Value::Array(rows) if rows.is_empty() => text += &format!("{}{name}: none\n", indent(depth)),
            Value::Array(rows) => {
                text += &format!("{}{name}:\n", indent(depth));
                text += &table(rows, depth + 1);
            }
            Value::Object(none) if none.is_empty() => text += &format!("{}{name}: none\n", indent(depth)),
            other => {
                text += &format!("{}{name}:\n", indent(depth));
                text += &render(other, depth + 1);
            }
        }
    }
    text
}

/// A list of objects as a table with a column for each field of any object.
pub fn table(rows: &[Value], depth: usize) -> String {
    let mut columns: Vec<&str> = Vec::new();
    for name in rows.iter().filter_map(Value::as_object).flat_map(|row| row.keys()) {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    if columns.is_empty() {
        return rows.iter().map(|row| render(row, depth)).collect();
    }
    let mut lines = vec![columns.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()];
    lines.extend(
        rows.iter().map(|row| {
            columns.iter().map(|name| row.get(*name).map_or_else(|| "-".to_owned(), cell)).collect()
        }),
    );
    let widths: Vec<usize> = (0..columns.len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += &format!("{}{}\n", indent(depth), cells.join("  ").trim_end());
    }
    text
}

fn is_scalar(value: &Value) -> bool {
    !matches!(value, Value::Array(_) | Value::Object(_))
}

/// A field of a table's row on one line.
fn cell(value: &Value) -> String {
    match value {
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(" "),
        Value::Object(fields) if fields.is_empty() => "none".to_owned(),
        Value::Object(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(name, field)| format!("{name}: {}", cell(field))).collect();
            fields.join(", ")
        }
        other => scalar(other),
    }
}

/// A value that is no list and no object, on one line.
pub fn scalar(value: &Value) -> String {
    match value {
        // Programs choose their names, so control characters are replaced.
        Value::String(text) => text.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn indent(depth: usize) -> String {
    "  ".repeat(depth)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_of_objects_become_tables() {
        let answer = json!({
            "version": "0.1.0",
            "sessions": [{"id": 1, "client": "vm7\u{1b}[2J"}, {"id": 22, "client": "native", "lost": true}],
        });
        let text = render(&answer, 0);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert!(lines.contains(&"version  0.1.0"), "{text}");
        let table = &lines[lines.iter().position(|line| *line == "sessions:").unwrap() + 1..];
        assert_eq!(table.len(), 3, "{text}");
        assert_eq!(table[0].split_whitespace().count(), 3, "{text}");
        assert!(table[1].contains("vm7?[2J") && table[1].contains('-'), "{text}");
    }

    #[test]
    fn what_a_row_contains_is_shown_without_json() {
        let sandbox = json!({"user": 7, "namespaces": ["mnt", "net"], "memory_limit": null, "devices": []});
        let text = render(&json!({"workers": [{"pid": 8, "sandbox": sandbox}]}), 0);
        assert!(text.contains("devices: none") && text.contains("namespaces: mnt net"), "{text}");
        assert!(text.contains("memory_limit: -") && !text.contains(['{', '[', '"']), "{text}");
    }

    #[test]
    fn an_empty_list_is_shown_as_none() {
        assert_eq!(render(&json!({"sessions": []}), 0), "sessions: none\n");
    }
}
