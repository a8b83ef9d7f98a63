//! `protocol/wire.txt` holds every entry of the wire as it was committed. No entry may change in place.

#![allow(clippy::unwrap_used)] // Clippy does not see that a helper of tests is a test.

use std::collections::BTreeMap;
use std::fmt::Write;

use protocol::device;
use protocol::ops::nvml::QUERIES;
use protocol::ops::{self, Class, Hold};
use protocol::schema::{Field, Layout, Numbers};
use protocol::version::{FROZEN, LAYOUTS, NUMBERS, OURS, VERSION, Version};

mod common;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/wire.txt");

/// What to do about a difference.
const HOW: &str = "\
If you only added entries (each with `since` set to the next minor version once the current one is frozen), write them to the snapshot:

    WIRE_SNAPSHOT=append cargo test -p rgpu-protocol --test snapshot

An entry that is frozen never changes and is never removed: give what has to change a new opcode, kind or name. Before version 2.0 is frozen
(`FROZEN` in protocol/src/version.rs) you may replace the snapshot deliberately. Builds with another snapshot then refuse each other:

    WIRE_SNAPSHOT=replace cargo test -p rgpu-protocol --test snapshot
";

fn field_lines(out: &mut String, fields: &[Field], mark: &str) {
    for Field { name, shape } in fields {
        let (bytes, fixed) = shape.size();
        let more = if fixed { "" } else { " or more" };
        writeln!(out, "  {mark}{name}: {shape}, {bytes} bytes{more}").unwrap();
    }
}

fn layout_entry(kind: &str, layout: &Layout) -> String {
    let mut entry = format!("{kind} {}: {} bytes, since .{}\n", layout.name, layout.size, layout.since);
    for field in layout.fields {
        let (offset, size) = (field.offset, field.size);
        writeln!(entry, "  {offset:#06x} {}: {}, {size} bytes", field.name, field.type_name).unwrap();
    }
    entry
}

fn number_entries(numbers: &Numbers) -> impl Iterator<Item = String> {
    numbers
        .values
        .iter()
        .map(|n| format!("number {} {}: {:#x}, since .{}\n", numbers.name, n.name, n.value, n.since))
}

/// All entries, in the order in which the source declares them. The first line of an entry names it, up to
/// the colon.
fn entries() -> Vec<String> {
    let mut all = Vec::new();
    for row in ops::all() {
        let class = match row.class {
            Class::Async => "async",
            Class::Sync => "sync",
        };
        let hold = if row.hold == Hold::None { String::new() } else { format!(", hold {:?}", row.hold) };
        let mut entry = format!(
            "operation {:#06x}: {} {class}, order {:?}, may_block {:?}, lane {:?}{hold}, since .{}\n",
            row.opcode, row.name, row.order, row.may_block, row.lane, row.since
        );
        field_lines(&mut entry, row.request, "");
        field_lines(&mut entry, row.reply, "→ ");
        all.push(entry);
    }
    for (name, fields) in common::structures() {
        let mut entry = format!("structure {name}:\n");
        field_lines(&mut entry, fields, "");
        all.push(entry);
    }
    all.extend(QUERIES.iter().map(|q| {
        format!(
            "nvml {}: {}, {} arguments, {:?}, since .{}\n",
            q.number, q.function, q.arguments, q.output, q.since
        )
    }));
    all.extend(LAYOUTS.iter().copied().flatten().map(|layout| layout_entry("layout", layout)));
    all.extend(NUMBERS.iter().copied().flatten().flat_map(number_entries));
    all.extend(device::DEVICE_LAYOUTS.iter().map(|layout| layout_entry("virtio device layout", layout)));
    all
}

/// The fingerprints of all minor versions, each with its version: an implementation that does not have this
/// source can compute none of them.
fn fingerprints() -> String {
    (0..=VERSION.minor)
        .map(|minor| {
            let version = Version { minor, ..VERSION };
            format!("  {version}: {:016x}\n", OURS.at_most(version).fingerprint())
        })
        .collect()
}

fn snapshot() -> String {
    format!(
        "# The wire, entry by entry: see protocol/src/version.rs. Written by protocol/tests/snapshot.rs.\n\n\
         version: {VERSION}, with the fingerprints of all minor versions\n{}{}",
        fingerprints(),
        // A blank line before each entry that has several lines.
        entries()
            .iter()
            .map(|e| if e.lines().count() > 1 { format!("\n{e}") } else { e.clone() })
            .collect::<String>()
    )
}

/// An entry's name: its first line up to the colon.
fn name(entry: &str) -> &str {
    let line = entry.lines().next().unwrap_or_default();
    line.split_once(": ").map_or(line.trim_end_matches(':'), |(name, _)| name)
}

/// How a new snapshot differs from the committed one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    added: Vec<String>,
    /// Changed in place, or removed.
    changed: Vec<String>,
}

impl Difference {
    fn between(committed: &str, new: &str) -> Difference {
        let by_name = |text: &str| -> BTreeMap<String, String> {
            let mut entries: Vec<String> = Vec::new();
            for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
                match entries.last_mut() {
                    Some(entry) if line.starts_with(' ') => *entry += &format!("\n{line}"),
                    _ => entries.push(line.to_owned()),
                }
            }
            entries.into_iter().map(|entry| (name(&entry).to_owned(), entry)).collect()
        };
        let (old, mut new) = (by_name(committed), by_name(new));
        let mut difference = Difference::default();
        for (name, entry) in old {
            // The fingerprints follow from the other entries.
            if new.remove(&name).is_none_or(|now| now != entry) && name != "version" {
                difference.changed.push(name);
            }
        }
        new.remove("version");
        difference.added = new.into_keys().collect();
        difference
    }
}

#[test]
fn no_entry_of_the_wire_changes_in_place() {
    let new = snapshot();
    // A missing file is an empty one.
    let committed = std::fs::read_to_string(PATH).unwrap_or_default();
    let difference = Difference::between(&committed, &new);
    let mode = std::env::var("WIRE_SNAPSHOT").unwrap_or_default();
    let allowed = match &*mode {
        "append" => difference.changed.is_empty(),
        "replace" => !FROZEN,
        _ => false,
    };
    if allowed {
        std::fs::write(PATH, &new).unwrap();
        return;
    }
    assert!(
        committed == new,
        "the wire differs from protocol/wire.txt\nchanged in place or removed: {:?}\nadded: {:?}\n\n{HOW}",
        difference.changed,
        difference.added
    );
}

#[test]
fn every_entry_has_a_name_of_its_own() {
    let mut names: Vec<_> = entries().iter().map(|entry| name(entry).to_owned()).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn an_appended_entry_is_told_from_a_changed_one() {
    let committed = "# text\n\nversion: 2.0, fingerprint 1\n\na 1: x, since .0\n  f: u32\n\nb: y\n";
    let appended = "# text\n\nversion: 2.1, fingerprint 2\n\na 1: x, since .0\n  f: u32\n\nnew: z\n\nb: y\n";
    let only_added = Difference { added: vec!["new".into()], changed: vec![] };
    assert_eq!(Difference::between(committed, appended), only_added);
    let field = committed.replace("f: u32", "f: u64");
    assert_eq!(Difference::between(committed, &field).changed, ["a 1"]);
    let removed = committed.replace("\n\nb: y", "");
    assert_eq!(Difference::between(committed, &removed).changed, ["b"]);
    assert_eq!(Difference::between(committed, committed), Difference::default());
}
