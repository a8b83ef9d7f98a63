//! Compares exported functions with the prototypes of `cuda.h` 13.0 and 12.8: the number of arguments, and
//! how each is passed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cuda::abi::types;

#[path = "../../c_signatures.rs"]
mod c_signatures;
mod headers;

use c_signatures::{Class, bracketed, classes, prototypes, split};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Every function of a version's header in every form: as programs see it, with a default stream per thread,
/// and in the older forms.
fn declared(includes: &[PathBuf]) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for define in ["RGPU_NOTHING", "CUDA_API_PER_THREAD_DEFAULT_STREAM", "__CUDA_API_VERSION_INTERNAL"] {
        for (name, arguments) in prototypes(includes, "cuda.h", &[define], "CUresult") {
            let before = all.insert(name.clone(), arguments.clone());
            assert!(before.is_none_or(|before| before == arguments), "{name} has two prototypes");
        }
    }
    all
}

/// The functions that `api!` blocks define, with their arguments' types.
fn defined() -> BTreeMap<String, Vec<String>> {
    fn sources(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("a folder of the crate") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                sources(&path, found);
            } else if !path.ends_with("macros.rs") {
                found.push(fs::read_to_string(&path).expect("a source file"));
            }
        }
    }
    let mut texts = Vec::new();
    sources(&Path::new(HERE).join("src"), &mut texts);
    let mut all = BTreeMap::new();
    for text in &texts {
        for (at, _) in text.match_indices("\napi! {") {
            let block = text[at..].split("\n}").next().unwrap_or_default();
            let openings = ["\n    fn ", "\n    unsafe fn ", "\n    alias "];
            let items = openings.into_iter().flat_map(|opening| block.match_indices(opening));
            for (at, opening) in items {
                let item = &block[at + opening.len()..];
                let open = item.find('(').expect("arguments");
                let arguments = split(bracketed(&item[open..])).into_iter().map(|argument| {
                    let (_, kind) = argument.split_once(':').expect("a name and a type");
                    kind.trim().to_owned()
                });
                let arguments: Vec<String> = arguments.collect();
                // `fn a / b(…)`, `alias a = b(…)`: the second name of an alias belongs to another item.
                let names = item[..open].split('=').next().unwrap_or_default();
                for name in names.split('/').map(str::trim) {
                    assert!(all.insert(name.to_owned(), arguments.clone()).is_none(), "{name} twice");
                }
            }
        }
    }
    all
}

/// Beginnings of the Rust types that are pointers in C.
const POINTERS: [&str; 7] = ["*", "Option<", "Out<", "In<", "InOut<", "Array<", "OutArray<"];

/// Which C types a Rust type may stand for. A handle is a word here, and so is a size.
fn fits(rust: &str, c: Class) -> bool {
    match rust {
        "usize" => matches!(c, Class::Pointer | Class::Integer(8)),
        "u64" | "i64" | "Count" => c == Class::Integer(8),
        "u32" | "i32" | "Count<u32>" => c == Class::Integer(4),
        "u16" => c == Class::Integer(2),
        "u8" => c == Class::Integer(1),
        "f32" => c == Class::Float(4),
        "MemLocation" => c == Class::Record(size_of::<types::MemLocation>()),
        "IpcHandle" => c == Class::Record(size_of::<types::IpcHandle>()),
        "Text" => c == Class::Pointer,
        _ if POINTERS.iter().any(|kind| rust.starts_with(kind)) => c == Class::Pointer,
        _ => panic!("an argument of type {rust}"),
    }
}

fn compare(includes: &[PathBuf], least: usize) {
    let declared = declared(includes);
    let types: BTreeSet<String> = declared.values().flatten().cloned().collect();
    let scratch = tempfile::tempdir().expect("a temporary folder");
    // Only with this define does the header have the types of the older forms.
    let classes = classes(includes, "cuda.h", &["__CUDA_API_VERSION_INTERNAL"], types, scratch.path());
    let mut compared = 0;
    let mut wrong = Vec::new();
    for (name, ours) in defined() {
        let Some(theirs) = declared.get(&name) else { continue };
        let same =
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(rust, c)| fits(rust, classes[c]));
        if !same {
            wrong.push(format!("{name}: {ours:?} here, {theirs:?} there"));
        }
        compared += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared >= least, "{compared} functions were compared");
}

#[test]
fn functions_have_the_arguments_of_the_header_of_13() {
    let places = ["cuda13/nvidia/cu13/include", "cuda13-headers/nvidia/cu13/include"];
    let packages = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"];
    compare(&[headers::folder(&places, "cuda13-headers", &packages)], 440);
}

#[test]
fn functions_have_the_arguments_of_the_header_of_12() {
    let places =
        ["cuda-runtime/12.8/nvidia/cuda_runtime/include", "cuda12-headers/nvidia/cuda_runtime/include"];
    let packages = ["nvidia-cuda-runtime-cu12==12.8.90"];
    compare(&[headers::folder(&places, "cuda12-headers", &packages)], 430);
}

/// Tests the comparison itself: differences are found.
#[test]
fn a_difference_is_seen() {
    for (rust, c) in [
        ("u32", Class::Pointer),
        ("u64", Class::Pointer),
        ("u32", Class::Integer(8)),
        ("*mut u32", Class::Integer(8)),
        ("Out<u32>", Class::Integer(8)),
        ("Text", Class::Record(8)),
        ("Count<u32>", Class::Integer(8)),
        ("usize", Class::Record(8)),
        ("MemLocation", Class::Integer(8)),
        ("f32", Class::Integer(4)),
    ] {
        assert!(!fits(rust, c), "{rust} is not {c:?}");
    }
}
