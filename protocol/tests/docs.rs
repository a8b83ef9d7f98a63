//! `docs/wire.md` lists exactly the operations of the table, and the structures of which they consist.

#![allow(clippy::unwrap_used)] // Clippy does not see that a helper of tests is a test.

use std::fmt::Write;
use std::sync::Mutex;

use protocol::ops::{self, Class, Hold};
use protocol::schema::Field;
use protocol::version::{VERSION, Version};

mod common;

/// One test at a time rewrites the page.
static PAGE: Mutex<()> = Mutex::new(());

/// Checks the table between the marks `<!-- name -->`, or writes it if asked to.
fn check_table(name: &str, table: &str) {
    let _alone = PAGE.lock();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/wire.md");
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(&begin).unwrap();
    let (_, after) = rest.split_once(&end).unwrap();
    let expected = format!("{before}{begin}{table}{end}{after}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap() == expected,
        "docs/wire.md is out of date; to rewrite its tables: UPDATE_DOCS=1 cargo test -p rgpu-protocol --test docs"
    );
}

/// The fields of a structure, a request or a reply.
fn list(fields: &[Field]) -> String {
    let list: Vec<_> = fields.iter().map(|field| format!("`{}: {}`", field.name, field.shape)).collect();
    if list.is_empty() { "–".to_owned() } else { list.join(", ") }
}

#[test]
fn the_wire_document_names_the_version() {
    let page = include_str!("../../docs/wire.md");
    let Version { major, minor } = VERSION;
    assert!(
        page.contains(&format!("\nVersion: **{major}.{minor}**.")),
        "docs/wire.md names another version than {major}.{minor}"
    );
}

#[test]
fn the_wire_document_lists_every_operation() {
    let mut table = String::from(
        "| opcode | operation | since | class | order | may block | lane | request | reply |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for row in ops::all() {
        let (class, reply) = match row.class {
            Class::Async => ("async", String::new()),
            Class::Sync => ("sync", list(row.reply)),
        };
        let since = match row.since {
            0 => String::new(),
            minor => Version { minor, ..VERSION }.to_string(),
        };
        let hold = match row.hold {
            Hold::None => String::new(),
            hold => format!(", hold {hold:?}"),
        };
        writeln!(
            table,
            "| {:#06x} | `{}` | {since} | {class} | {:?} | {:?} | {:?}{hold} | {} | {reply} |",
            row.opcode,
            row.name,
            row.order,
            row.may_block,
            row.lane,
            list(row.request)
        )
        .unwrap();
    }
    check_table("operations", &table);
}

#[test]
fn the_wire_document_lists_every_structure() {
    let mut table = String::from("| structure | fields |\n|---|---|\n");
    for (name, fields) in common::structures() {
        writeln!(table, "| `{name}` | {} |", list(fields)).unwrap();
    }
    check_table("structures", &table);
}
