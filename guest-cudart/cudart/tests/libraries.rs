//! Tests of the linked libraries: `link.sh` links them, they export what NVIDIA's do, and a program runs with
//! them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Builds the static library of a version and links it into `out`.
fn link(version: u32, out: &Path) -> PathBuf {
    // One target folder per version: the two builds differ by a feature and would otherwise replace each
    // other.
    let target = Path::new(HERE).join(format!("../../build/cudart-test/{version}"));
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--release", "--package", "rgpu-cudart", "--target-dir"]).arg(&target);
    if version == 12 {
        cargo.args(["--features", "v12"]);
    }
    run(cargo.current_dir(HERE));
    run(Command::new(Path::new(HERE).join("link.sh"))
        .arg(target.join("release/libcudart.a"))
        .arg(out)
        .arg(version.to_string()));
    out.join(format!("libcudart.so.{version}"))
}

fn exports_what_the_list_says(version: u32) {
    let out = tempfile::tempdir().expect("a temporary folder");
    let library = link(version, out.path());
    let symbols =
        run(Command::new("nm").args(["--dynamic", "--defined-only", "--with-symbol-versions"]).arg(&library));
    let mut exported: Vec<&str> =
        symbols.lines().filter_map(|line| line.split_once(" T ")).map(|parts| parts.1).collect();
    exported.sort_unstable();
    let list = fs::read_to_string(Path::new(HERE).join(format!("exports/{version}.txt"))).expect("the list");
    let mut listed: Vec<String> =
        list.lines().map(|name| format!("{name}@@libcudart.so.{version}")).collect();
    listed.sort_unstable();
    assert_eq!(exported, listed);
    let dynamic = run(Command::new("readelf").arg("--dynamic").arg(&library));
    assert!(dynamic.contains(&format!("soname: [libcudart.so.{version}]")), "{dynamic}");
}

#[test]
fn libcudart_13_exports_exactly_the_names_of_cuda_13_0() {
    exports_what_the_list_says(13);
}

#[test]
fn libcudart_12_exports_exactly_the_names_of_cuda_12_8() {
    exports_what_the_list_says(12);
}

#[test]
fn a_program_finds_the_driver_beside_the_library_and_exits_cleanly() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let library = link(13, out.path());
    let fixture = |name: &str| Path::new(HERE).join("tests/fixtures").join(name);
    run(Command::new("gcc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(out.path().join("libcuda.so.1"))
        .arg(fixture("libcuda.c")));
    let program = out.path().join("program");
    run(Command::new("gcc").args(["-pthread", "-o"]).arg(&program).arg(fixture("program.c")).arg(&library));
    let printed = run(Command::new(&program).env("LD_LIBRARY_PATH", out.path()));
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
    assert_eq!(printed, expected);
}
