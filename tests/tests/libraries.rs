//! The libraries that programs load, as `cargo xtask build` makes them: they export what NVIDIA's do, and a
//! program runs with them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;

/// The output of a command, which must succeed.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Requires that a library has its name as its soname, and exports exactly what a list in
/// `guest-cudart/LIST` names: with `versions`, under symbol versions of the library's name.
fn exports(name: &str, list: &str, versions: bool) -> Result<()> {
    let library = tree::guest_libraries().join(name);
    let symbols = run(Command::new("nm")
        .args(["--dynamic", "--defined-only", "--with-symbol-versions"])
        .arg(&library))?;
    // The versions are symbols themselves.
    let exported = symbols.lines().filter_map(|line| line.split_once(' ')?.1.split_once(' '));
    let exported: BTreeSet<&str> =
        exported.filter(|(kind, _)| *kind != "A").map(|(_, symbol)| symbol).collect();
    let list = tree::root().join("guest-cudart").join(list);
    let list = std::fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let version = if versions { format!("@@{name}") } else { String::new() };
    let listed: Vec<String> = list.lines().map(|symbol| format!("{symbol}{version}")).collect();
    let listed: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    let [more, missing] = [(&exported, &listed), (&listed, &exported)].map(|(a, b)| a - b);
    ensure!(more.is_empty() && missing.is_empty(), "{name} exports {more:?} as well, and not {missing:?}");
    let dynamic = run(Command::new("readelf").arg("--dynamic").arg(&library))?;
    ensure!(dynamic.contains(&format!("soname: [{name}]")), "{dynamic}");
    Ok(())
}

#[test]
fn libcuda_exports_exactly_the_names_of_cuda_h() -> Result<()> {
    exports("libcuda.so.1", "cuda/exports/libcuda.txt", false)
}

#[test]
fn libcudart_13_exports_exactly_the_names_of_cuda_13_0() -> Result<()> {
    exports("libcudart.so.13", "cudart/exports/13.txt", true)
}

#[test]
fn libcudart_12_exports_exactly_the_names_of_cuda_12_8() -> Result<()> {
    exports("libcudart.so.12", "cudart/exports/12.txt", true)
}

/// Beside libcudart is a libcuda that prints what it is asked for.
#[test]
fn a_program_finds_the_driver_beside_the_library_and_exits_cleanly() -> Result<()> {
    let out = tempfile::tempdir()?;
    let library = out.path().join("libcudart.so.13");
    std::fs::copy(tree::guest_libraries().join("libcudart.so.13"), &library)?;
    let source =
        |name: &str| -> PathBuf { Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(name) };
    run(Command::new("gcc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(out.path().join("libcuda.so.1"))
        .arg(source("libcuda.c")))?;
    let program = out.path().join("program");
    run(Command::new("gcc").args(["-pthread", "-o"]).arg(&program).arg(source("program.c")).arg(&library))?;
    let printed = run(Command::new(&program).env("LD_LIBRARY_PATH", out.path()))?;
    let expected = "\
retain 0
load 0x466243b1, option 1
kernel kernel
launch 1,2,3 x 4,5,6 shared 7: 42
launch 2,1,1 x 32,1,1 shared 0: 8
malloc 0
too much 2
last error 2, then 0
copies 0 0: hello
free 0
set device 3: 101
child 0
unload
";
    ensure!(printed == expected, "it printed:\n{printed}");
    Ok(())
}
