//! The sources as a whole: how many lines they have, and which modules use each other in a cycle.
//!
//! A module's dependencies are read from its paths: `use` trees, and paths that begin with `crate`, `super`,
//! `self` or the name of a child. Method calls show no path, so a method must be in the module of its type or
//! above all its callers.
//!
//! [`check`] holds the cycles of each crate to a few modules, and the tests hold libcuda's chapters to one
//! direction.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rgpu_tests::tree;

/// Folders in which all is for tests, and others that hold no sources.
const LEFT_OUT: &[&str] = &["tests", "fuzz", "benches", "examples", "target", "build"];
/// Files in which all is for tests, by the end of their names.
const FOR_TESTS: &[&str] = &["tests", "fuzzing", "doubles", "fake_driver"];

/// Maximum number of modules in a cycle.
const MOST_IN_A_CYCLE: usize = 5;

/// What to look at.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder with the sources of some version. By default this one
    folder: Option<PathBuf>,
}

/// A module's path from the crate's root.
type Module = Vec<String>;
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Prints what the sources look like.
pub fn structure(arguments: &Arguments) -> Result<()> {
    let folder = arguments.folder.clone().unwrap_or_else(tree::root);
    let (mut crates, mut lines, mut code_lines, mut longest) = (0, 0, 0, (0, String::new()));
    let (mut files, mut cycles) = (0, Vec::new());
    for source in sources(&folder)? {
        crates += 1;
        let known = modules(&source)?;
        for (module, text) in &known {
            let code = code(text);
            let all = without_tests(text).count();
            files += 1;
            lines += all;
            code_lines += code.lines().filter(|line| !line.trim().is_empty()).count();
            let name = format!("{}: {}", source.strip_prefix(&folder)?.display(), module.join("::"));
            longest = longest.max((all, name));
        }
        let graph = graph(&known);
        let large = cycles_of(&graph).into_iter().map(|cycle| (cycle.len(), source.display().to_string()));
        cycles.extend(large);
    }
    cycles.sort();
    let (largest, place) = cycles.last().cloned().unwrap_or_default();
    let many = cycles.iter().filter(|(size, _)| *size > MOST_IN_A_CYCLE).count();
    println!("crates: {crates}, files: {files}");
    println!("lines: {lines}, without blank lines and comments: {code_lines}");
    println!("longest file: {} lines, {}", longest.0, longest.1);
    println!("largest cycle: {largest} modules, in {place}; cycles of more than {MOST_IN_A_CYCLE}: {many}");
    Ok(())
}

/// Fails if a cycle has more than a few modules.
pub fn check() -> Result<()> {
    let root = tree::root();
    for source in sources(&root)? {
        let name = source.parent().unwrap_or(&source).strip_prefix(&root)?.display().to_string();
        let graph = graph(&modules(&source)?);
        judge(&name, cycles_of(&graph).into_iter().max_by_key(Vec::len).unwrap_or_default())?;
    }
    Ok(())
}

/// Judges the largest cycle of a crate.
fn judge(name: &str, cycle: Vec<&Module>) -> Result<()> {
    let size = cycle.len();
    if size > MOST_IN_A_CYCLE {
        let modules = cycle.into_iter().map(|module| module.join("::")).collect::<Vec<_>>().join(", ");
        bail!("{name}: {size} modules use each other in a cycle, at most {MOST_IN_A_CYCLE} may: {modules}");
    }
    Ok(())
}

/// The folders of all crates' sources.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !path.is_dir() || path.is_symlink() || name.starts_with('.') {
                continue;
            }
            if name == "src" && folder.join("Cargo.toml").is_file() {
                found.push(path);
            } else if !LEFT_OUT.contains(&name.as_str()) {
                open.push(path);
            }
        }
    }
    Ok(found)
}

/// The modules of a crate, with their texts.
fn modules(source: &Path) -> Result<BTreeMap<Module, String>> {
    let mut found = BTreeMap::new();
    let mut open = vec![(source.to_owned(), Module::new())];
    while let Some((folder, at)) = open.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let child: Module = at.iter().cloned().chain([name.clone()]).collect();
            let for_tests = FOR_TESTS.iter().any(|end| name.ends_with(end));
            if path.is_dir() && !for_tests && !LEFT_OUT.contains(&name.as_str()) {
                open.push((path, child));
            } else if path.extension().is_some_and(|end| end == "rs") && !for_tests {
                let is_root = matches!(name.as_str(), "mod" | "lib" | "main");
                let text = fs::read_to_string(&path);
                let text = text.with_context(|| format!("cannot read {}", path.display()))?;
                // A program beside a library is one file in front of it.
                let module = if is_root { at.clone() } else { child };
                found.entry(module).or_insert_with(String::new).push_str(&text);
            }
        }
    }
    Ok(found)
}

/// The lines of a file up to its module of tests.
fn without_tests(text: &str) -> impl Iterator<Item = &str> {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| {
        let line = pair[1].trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
        let opens = line.starts_with("mod ") && line.ends_with('{');
        pair[0].starts_with("#[cfg(") && pair[0].contains("test") && opens
    });
    let end = tests.unwrap_or(lines.len());
    lines.into_iter().take(end)
}

/// The code without comments and without the module of tests at its end.
fn code(text: &str) -> String {
    let line = |line: &str| format!("\n{}", line.split("//").next().unwrap_or_default().trim_start());
    let text: String = without_tests(text).map(line).collect();
    // A path that says who may see an item is no dependency.
    let mut parts = text.split("pub(in ");
    let first = parts.next().unwrap_or_default().to_owned();
    let text = parts
        .fold(first, |text, part| text + "pub" + part.split_once(')').map_or(part, |(_, behind)| behind));
    text.replace("\npub(crate) use ", "\nuse ")
        .replace("\npub(super) use ", "\nuse ")
        .replace("\npub use ", "\nuse ")
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
fn cycles_of(graph: &Graph) -> BTreeSet<Vec<&Module>> {
    let all: BTreeMap<&Module, BTreeSet<&Module>> =
        graph.keys().map(|module| (module, reached(graph, module))).collect();
    let cycle = |module: &&Module| {
        let others = all[*module].iter().copied();
        others.filter(|other| all.get(other).is_some_and(|back| back.contains(*module))).collect::<Vec<_>>()
    };
    graph.keys().map(|module| cycle(&module)).filter(|cycle| !cycle.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// libcuda's chapters from bottom to top: a chapter may use those before it.
    const CHAPTERS: &[&str] = &["abi", "process", "streams", "memory", "code", "work", "graph", "api"];

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

    fn libcuda() -> Graph {
        let graph = graph(&modules(&tree::root().join("guest-cudart/cuda/src")).unwrap());
        assert!(graph.len() > 80, "{} modules were found", graph.len());
        graph
    }

    #[test]
    fn chapters_of_libcuda_use_only_those_below_them() {
        let upward = upward(&libcuda());
        assert!(upward.is_empty(), "upward:\n{}", upward.join("\n"));
    }

    #[test]
    fn a_cycle_that_is_too_large_is_named() {
        let path = |n: usize| vec![format!("m{n}")];
        let modules: Vec<Module> = (0..=MOST_IN_A_CYCLE).map(path).collect();
        let cycle = |size: usize| modules.iter().take(size).collect::<Vec<_>>();
        assert!(judge("options", cycle(MOST_IN_A_CYCLE)).is_ok() && judge("options", Vec::new()).is_ok());
        let why = judge("options", cycle(MOST_IN_A_CYCLE + 1)).unwrap_err().to_string();
        assert!(why.contains("m0, m1") && why.contains("m5"), "{why}");
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
            "pub(in crate::abi) use crate::api::copies;\npub(in crate::abi) fn f() {}",
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
            let cycles: Vec<usize> = cycles_of(&graph).iter().map(Vec::len).collect();
            assert_eq!(cycles, [3], "{graph:?}");
        }
    }
}
