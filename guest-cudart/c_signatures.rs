//! For the tests of `cuda`, `cudart` and `cupti`: the argument types of functions in NVIDIA's headers. How a
//! type is passed is determined with the C compiler, not from its name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How an argument is passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A pointer: to data, to a function, or a handle.
    Pointer,
    /// An integer or enumeration of this many bytes.
    Integer(usize),
    /// A floating-point number of this many bytes.
    Float(usize),
    /// A structure of this many bytes, by value.
    Record(usize),
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn gcc(includes: &[PathBuf]) -> Command {
    let mut command = Command::new("gcc");
    for include in includes {
        command.arg("-I").arg(include);
    }
    command
}

/// Splits a list at its commas, except those inside brackets.
pub fn split(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '<' => depth += 1,
            ')' | ']' | '>' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(list[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// The text between the opening bracket at the beginning of `text` and its closing bracket.
pub fn bracketed(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => {
                depth -= 1;
                if depth == 0 {
                    return &text[1..at];
                }
            }
            _ => {}
        }
    }
    panic!("a bracket that nothing closes: {}", text.chars().take(80).collect::<String>());
}

/// An argument's type: its declaration without its name and without `const`, which does not affect how it is
/// passed.
pub fn type_of(declaration: &str) -> String {
    if declaration.contains(['*', '[']) {
        return "void *".into();
    }
    let words: Vec<&str> = declaration.split_whitespace().filter(|word| *word != "const").collect();
    // `struct x name`, `unsigned int name`, `name_t name`: the last word is the name unless it is a word of a
    // type.
    let is_type =
        |word: &str| matches!(word, "int" | "char" | "short" | "long" | "unsigned" | "float" | "double");
    let tagged = matches!(words.first(), Some(&"struct" | &"enum" | &"union"));
    let least = if tagged { 2 } else { 1 };
    match words.split_last() {
        Some((last, rest)) if rest.len() >= least && !is_type(last) => rest.join(" "),
        _ => words.join(" "),
    }
}

/// A header's functions with this result type, with their argument types. `defines` is for the preprocessor.
pub fn prototypes(
    includes: &[PathBuf],
    header: &str,
    defines: &[&str],
    result: &str,
) -> BTreeMap<String, Vec<String>> {
    let mut command = gcc(includes);
    command.args(["-E", "-P", "-x", "c", "-include", header]);
    command.args(defines.iter().map(|define| format!("-D{define}"))).arg("/dev/null");
    let text = run(&mut command).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = BTreeMap::new();
    for (at, _) in text.match_indices(&format!("{result} ")) {
        let rest = text[at + result.len()..].trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, rest) = (&rest[..end], rest[end..].trim_start());
        if name.is_empty() || !rest.starts_with('(') {
            continue;
        }
        let arguments = split(bracketed(rest)).into_iter().filter(|argument| *argument != "void");
        found.insert(name.to_owned(), arguments.map(type_of).collect());
    }
    found
}

/// How the compiler passes each of these types.
pub fn classes(
    includes: &[PathBuf],
    header: &str,
    defines: &[&str],
    types: BTreeSet<String>,
    scratch: &Path,
) -> BTreeMap<String, Class> {
    let types: Vec<String> = types.into_iter().collect();
    let mut code = format!("#include <stdio.h>\n#include <{header}>\nint main(void) {{\n");
    for kind in &types {
        // The type class is that of an expression, so an enumeration counts as an integer. The expression is
        // not evaluated.
        writeln!(code, "printf(\"%d %zu\\n\", __builtin_classify_type(*(({kind} *)0)), sizeof({kind}));")
            .expect("a string grows");
    }
    code.push_str("return 0; }\n");
    let (source, program) = (scratch.join("classes.c"), scratch.join("classes"));
    std::fs::write(&source, code).expect("a file");
    let mut compiler = gcc(includes);
    compiler.args(defines.iter().map(|define| format!("-D{define}")));
    run(compiler.args(["-std=gnu11", "-w"]).arg(&source).arg("-o").arg(&program));
    let told = run(&mut Command::new(&program));
    let class = |line: &str| {
        let (class, size) = line.split_once(' ').expect("two numbers");
        let size = size.parse().expect("a size");
        // gcc's `typeclass.h`.
        match class {
            "1" | "2" | "3" | "4" => Class::Integer(size),
            "5" => Class::Pointer,
            "8" => Class::Float(size),
            "12" | "13" => Class::Record(size),
            other => panic!("a type of class {other}"),
        }
    };
    let classes: Vec<Class> = told.lines().map(class).collect();
    assert_eq!(classes.len(), types.len());
    types.into_iter().zip(classes).collect()
}
