//! Compares this library with NVIDIA's header of NVML 13: every function that it declares is exported, and
//! every reply has the size of the type that its function writes. The header is installed from PyPI into
//! `build/nvml/`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use client::ops::nvml::{FIELD_SIZE, Output, QUERIES, struct_size};

const PACKAGE: &str = "nvidia-nvml-dev==13.0.*";

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The folder with `nvml.h`, installed on first use.
fn include() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| {
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build");
        let root = build.join("nvml");
        if !root.exists() {
            fs::create_dir_all(&build).expect("build/ can be written");
            // Install into a temporary folder and rename it, so that a concurrent test run never sees half an
            // installation.
            let fresh = tempfile::tempdir_in(&build).expect("build/ can be written");
            let target = fresh.path().join("packages");
            run(Command::new("python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps", "--root-user-action", "ignore"])
                .args([PACKAGE, "--target"])
                .arg(&target));
            // If another test run renamed its copy first, use that one.
            let _ = fs::rename(&target, &root);
        }
        root.join("nvidia/cu13/include")
    })
}

fn header() -> String {
    fs::read_to_string(include().join("nvml.h")).expect("nvml.h of the package")
}

/// The names of all functions that the header declares.
fn declared(header: &str) -> BTreeSet<String> {
    header
        .split("DECLDIR")
        .skip(1)
        .filter_map(|rest| rest.split_once('(').map(|(name, _)| name))
        .filter_map(|name| name.split(|c: char| c.is_whitespace() || c == '*').next_back())
        .filter(|name| name.starts_with("nvml"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_function_of_the_header_is_exported() {
    let exports =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/exports/libnvidia-ml.txt")).unwrap();
    let exports: BTreeSet<String> = exports.lines().map(str::to_owned).collect();
    let declared = declared(&header());
    assert!(declared.len() > 350, "{} functions in the header", declared.len());
    let missing: Vec<_> = declared.difference(&exports).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The types of a function's parameters.
fn parameters<'h>(header: &'h str, function: &str) -> Option<Vec<&'h str>> {
    let (_, rest) = header.split_once(&format!("DECLDIR {function}("))?;
    let (list, _) = rest.split_once(')')?;
    Some(
        list.split(',')
            .map(|parameter| {
                let parameter = parameter.trim();
                let name = parameter
                    .rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                    .map_or(0, |at| at + 1);
                parameter[..name].trim()
            })
            .collect(),
    )
}

#[test]
fn every_query_matches_its_function_s_signature() {
    let header = header();
    let mut code = String::from("#include <nvml.h>\n");
    let mut checked = 0;
    for query in QUERIES {
        let Some(types) = parameters(&header, query.function) else { continue };
        checked += 1;
        let outputs = &types[1 + query.arguments..];
        let mut size = |ty: &str, size: usize| {
            let target =
                ty.strip_suffix('*').unwrap_or_else(|| panic!("{}: {ty} is not a pointer", query.function));
            writeln!(code, "_Static_assert(sizeof({}) == {size}, {:?});", target.trim(), query.function)
                .unwrap();
        };
        match (query.output, outputs) {
            (Output::Text, [text, "unsigned int"]) => size(text, 1),
            // A buffer whose size is given in the manual.
            (Output::Block(64), ["char *"]) => {}
            (Output::Block(bytes), [to]) => size(to, bytes),
            (Output::Words(count), words) if words.len() == count => words.iter().for_each(|to| size(to, 4)),
            (Output::List(bytes), [count, list]) => {
                size(count, 4);
                size(list, bytes);
            }
            // The type is that of the newest version, so only that version can be compared.
            (Output::Struct(version), [to]) => {
                let newest = QUERIES.iter().rfind(|other| other.function == query.function);
                if newest == Some(query) {
                    size(to, struct_size(version));
                }
            }
            (Output::Fields, ["int", values]) => size(values, FIELD_SIZE),
            (shape, outputs) => panic!("{}: {shape:?} and {outputs:?}", query.function),
        }
    }
    assert!(checked > 100, "{checked} queries in the header");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("sizes.c");
    fs::write(&source, code).expect("a file");
    run(Command::new("gcc").args(["-fsyntax-only", "-std=c11", "-I"]).arg(include()).arg(&source));
}
