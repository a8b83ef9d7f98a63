//! `docs/wire.md` lists exactly the operations of the table.

use protocol::ops::{self, Class};
use std::fmt::Write;

#[test]
fn the_wire_document_lists_every_operation() {
    let fields = |fields: &[(&str, &str)]| {
        let list: Vec<_> = fields
            .iter()
            .map(|(name, ty)| format!("`{name}: {}`", ty.replace("'a ", "").replace("<'a>", "")))
            .collect();
        if list.is_empty() { "–".to_owned() } else { list.join(", ") }
    };
    let mut table = String::from("| opcode | operation | class | request | reply |\n|---|---|---|---|---|\n");
    for row in ops::all() {
        let (class, reply) = match row.class {
            Class::Async => ("async", String::new()),
            Class::Sync => ("sync", fields(row.reply)),
        };
        writeln!(
            table,
            "| {:#06x} | `{}` | {class} | {} | {reply} |",
            row.opcode,
            row.name,
            fields(row.request)
        )
        .unwrap();
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/wire.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once("<!-- operations -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- /operations -->").unwrap();
    let due = format!("{before}<!-- operations -->\n{table}<!-- /operations -->{after}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &due).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap() == due,
        "docs/wire.md is out of date: UPDATE_DOCS=1 cargo test -p rgpu-protocol --test docs"
    );
}
