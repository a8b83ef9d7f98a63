//! `docs/wire.md` lists exactly the operations of the table.

use protocol::ops::{self, Class, Hold};
use protocol::schema::Field;
use protocol::version::{VERSION, Version};
use std::fmt::Write;

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
    let fields = |fields: &[Field]| {
        let list: Vec<_> = fields.iter().map(|field| format!("`{}: {}`", field.name, field.shape)).collect();
        if list.is_empty() { "–".to_owned() } else { list.join(", ") }
    };
    let mut table = String::from(
        "| opcode | operation | class | order | may block | lane | request | reply |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in ops::all() {
        let (class, reply) = match row.class {
            Class::Async => ("async", String::new()),
            Class::Sync => ("sync", fields(row.reply)),
        };
        let hold = match row.hold {
            Hold::None => String::new(),
            hold => format!(", hold {hold:?}"),
        };
        writeln!(
            table,
            "| {:#06x} | `{}` | {class} | {:?} | {:?} | {:?}{hold} | {} | {reply} |",
            row.opcode,
            row.name,
            row.order,
            row.may_block,
            row.lane,
            fields(row.request)
        )
        .unwrap();
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/wire.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once("<!-- operations -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- /operations -->").unwrap();
    let expected = format!("{before}<!-- operations -->\n{table}<!-- /operations -->{after}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap() == expected,
        "docs/wire.md is out of date; to rewrite its table: UPDATE_DOCS=1 cargo test -p rgpu-protocol --test docs"
    );
}
