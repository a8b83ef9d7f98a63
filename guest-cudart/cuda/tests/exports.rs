//! The list of what the library exports has every name of `cuda.h` 13.0 and of the headers for OpenGL, EGL
//! and VDPAU, and nothing else. `tests/tests/libraries.rs` holds the library against the list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

mod headers;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn listed() -> BTreeSet<String> {
    let list = fs::read_to_string(Path::new(HERE).join("exports/libcuda.txt")).expect("the list");
    list.lines().map(str::to_owned).collect()
}

/// The functions that a preprocessed header declares: identifiers between `CUresult` and an opening
/// parenthesis.
fn declared(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in text.split("CUresult").skip(1) {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        if rest.starts_with("cu") && rest[end..].trim_start().starts_with('(') {
            names.insert(rest[..end].to_owned());
        }
    }
    names
}

#[test]
fn the_list_is_that_of_the_header() {
    let places = ["cuda13/nvidia/cu13/include", "cuda13-headers/nvidia/cu13/include"];
    let packages = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"];
    let include = headers::folder(&places, "cuda13-headers", &packages);
    // What the headers of other interfaces include. None of it is needed here.
    let others = tempfile::tempdir().expect("a temporary folder");
    for header in ["GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h"] {
        let path = others.path().join(header);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, "").expect("an empty header");
    }
    let mut expected = BTreeSet::new();
    // As programs see it; with a default stream per thread; and with the older forms, which the library also
    // has.
    for define in ["RGPU_NOTHING", "CUDA_API_PER_THREAD_DEFAULT_STREAM", "__CUDA_API_VERSION_INTERNAL"] {
        for (header, least) in [("cuda.h", 449), ("cudaGL.h", 461), ("cudaEGL.h", 461), ("cudaVDPAU.h", 453)]
        {
            let text = run(Command::new("cc")
                .args(["-E", "-P"])
                .arg(format!("-D{define}"))
                .arg("-I")
                .arg(&include)
                .arg("-I")
                .arg(others.path())
                .args(["-include", "cuda.h"])
                .arg(include.join(header)));
            let names = declared(&text);
            assert!(names.len() >= least, "{header}, {define}: {} names", names.len());
            expected.extend(names);
        }
    }
    // cudaProfiler.h, which is not in the wheel, the network for NCCL, and rgpu's own symbol.
    expected.extend(
        ["cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop", "ncclNetPlugin_v8", "rgpu_libcuda"]
            .map(str::to_owned),
    );
    assert_eq!(listed(), expected);
}
