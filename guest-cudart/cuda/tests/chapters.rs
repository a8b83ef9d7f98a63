//! The chapters of this library depend on each other in one direction only, and cycles have at most a few
//! modules.
//!
//! A module's dependencies are read from its paths: `use` trees, and paths that begin with `crate`, `super`,
//! `self` or the name of a child. Method calls show no path, so a method must be in the chapter of its type
//! or above all its callers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// From bottom to top: a chapter may use those before it.
const CHAPTERS: &[&str] = &["abi", "process", "streams", "memory", "code", "work", "graph", "api"];
/// Maximum number of modules in a cycle.
const MOST_IN_A_CIRCLE: usize = 5;

/// A module's path from the crate's root.
type Module = Vec<String>;
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// The modules of a source folder, with their texts.
fn modules(folder: &Path, at: &[String], found: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).expect("a folder of the crate") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let child: Module = at.iter().cloned().chain([name.clone()]).collect();
        if path.is_dir() {
            modules(&path, &child, found);
        } else {
            let module = if matches!(name.as_str(), "mod" | "lib") { at.to_vec() } else { child };
            found.insert(module, fs::read_to_string(&path).expect("a source file"));
        }
    }
}

/// The code without comments and without the module of tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let line = |line: &str| format!("\n{}", line.split("//").next().unwrap_or_default().trim_start());
    text.lines().map(line).collect::<String>().replace("\npub(crate) use ", "\nuse ")
}

/// The paths of a `use` tree.
fn leaves(prefix: &[String], tree: &str, found: &mut Vec<Module>) {
    let mut depth = 0;
    let parts = tree.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
        let (path, rest) = part.split_once('{').map_or((part, None), |(path, rest)| (path, Some(rest)));
        let path = path.split(" as ").next().unwrap_or_default();
        let names = path.split("::").map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned);
        let path: Module = prefix.iter().cloned().chain(names).collect();
        match rest {
            Some(rest) => leaves(&path, rest.strip_suffix('}').unwrap_or(rest), found),
            None => found.push(path),
        }
    }
}

/// Every path in some code, also those of other crates.
fn paths(code: &str) -> Vec<Module> {
    let mut found = Vec::new();
    let mut rest = String::new();
    for (n, part) in code.split("\nuse ").enumerate() {
        match part.split_once(';') {
            Some((tree, behind)) if n > 0 => {
                leaves(&[], tree, &mut found);
                rest.push_str(behind);
            }
            _ => rest.push_str(part),
        }
    }
    let words = rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    found.extend(
        words
            .filter(|word| word.contains("::"))
            .map(|word| word.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()),
    );
    found
}

/// The crate's module that a path in module `at` refers to, if any.
fn resolve(at: &Module, path: &[String], known: &BTreeMap<Module, String>) -> Option<Module> {
    let mut names = path.iter().peekable();
    let mut module = match names.peek().map(|name| name.as_str())? {
        "crate" => Module::new(),
        "self" | "super" => at.clone(),
        child => known.contains_key(&[at.as_slice(), &[child.to_owned()]].concat()).then(|| at.clone())?,
    };
    while let Some(name) = names.next_if(|name| matches!(name.as_str(), "crate" | "self" | "super")) {
        if name == "super" {
            module.pop();
        }
    }
    for name in names {
        module.push(name.clone());
        if !known.contains_key(&module) {
            module.pop();
            break;
        }
    }
    Some(module)
}

fn graph(known: &BTreeMap<Module, String>) -> Graph {
    let mut graph = Graph::new();
    for (module, text) in known.iter().filter(|(module, _)| !module.is_empty()) {
        let targets = paths(&code(text)).into_iter().filter_map(|path| resolve(module, &path, known));
        let targets = targets.filter(|target| !target.is_empty() && target != module).collect();
        graph.insert(module.clone(), targets);
    }
    graph
}

fn chapter(module: &Module) -> usize {
    let known = CHAPTERS.iter().position(|chapter| *chapter == module[0]);
    known.unwrap_or_else(|| panic!("{} is in no chapter", module.join("::")))
}

/// The dependencies that point upwards.
fn upward(graph: &Graph) -> Vec<String> {
    let arrows = graph.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    let upward = arrows.filter(|(from, to)| chapter(to) > chapter(from));
    upward.map(|(from, to)| format!("{} -> {}", from.join("::"), to.join("::"))).collect()
}

/// What can be reached from a module.
fn reached<'g>(graph: &'g Graph, from: &'g Module) -> BTreeSet<&'g Module> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        for next in graph.get(module).into_iter().flatten() {
            if found.insert(next) {
                open.push(next);
            }
        }
    }
    found
}

/// The cycles: modules that all reach each other.
fn circles(graph: &Graph) -> BTreeSet<Vec<&Module>> {
    let all: BTreeMap<&Module, BTreeSet<&Module>> =
        graph.keys().map(|module| (module, reached(graph, module))).collect();
    let circle = |module: &&Module| {
        let others = all[*module].iter().copied();
        others.filter(|other| all.get(other).is_some_and(|back| back.contains(*module))).collect::<Vec<_>>()
    };
    graph.keys().map(|module| circle(&module)).filter(|circle| !circle.is_empty()).collect()
}

fn this_crate() -> BTreeMap<Module, String> {
    let mut known = BTreeMap::new();
    modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut known);
    known
}

#[test]
fn chapters_use_only_those_below_them() {
    let upward = upward(&graph(&this_crate()));
    assert!(upward.is_empty(), "upward:\n{}", upward.join("\n"));
}

#[test]
fn no_circle_is_larger_than_a_few_modules() {
    let graph = graph(&this_crate());
    assert!(graph.len() > 80, "{} modules were found", graph.len());
    for circle in circles(&graph) {
        assert!(circle.len() <= MOST_IN_A_CIRCLE, "a circle of {}: {circle:?}", circle.len());
    }
}

/// Tests this test: every way of naming a module is found.
#[test]
fn an_arrow_is_seen_however_it_is_written() {
    for text in [
        "use crate::api::copies;",
        "use crate::{abi::types, api::{copies, fills as other}};",
        "fn f() { crate::api::copies::copy() }",
        "fn f() { super::super::api::copies::copy() }",
        "use super::super::api;\nfn f() {}",
        "fn f(x: &mut crate::api::copies::Copy) {}",
    ] {
        let path = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Module>();
        let known: BTreeMap<Module, String> = [
            (path(&["abi"]), ""),
            (path(&["abi", "types"]), ""),
            (path(&["api"]), "fn f() { copies::copy() }"),
            (path(&["api", "copies"]), "use super::fills;"),
            (path(&["api", "fills"]), "// crate::api::copies\nuse crate::api::{self};"),
            (path(&["process"]), "mod stream;"),
            (path(&["process", "stream"]), text),
        ]
        .map(|(module, text)| (module, text.to_owned()))
        .into();
        let graph = graph(&known);
        assert!(upward(&graph)[0].starts_with("process::stream -> api"), "{text}: {graph:?}");
        let circles: Vec<usize> = circles(&graph).iter().map(Vec::len).collect();
        assert_eq!(circles, [3], "{graph:?}");
    }
}
