//! The CUDA test programs, compiled by NVIDIA's own compiler.
//!
//! Every program is compiled once and linked twice: in `target/programs/` with the CUDA runtime as a shared library, and
//! in `target/programs-static/` with the runtime inside the program, as nvcc does unless told otherwise. A program is
//! built again only when its sources, the headers, its flags or the compiler's version have changed.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use rgpu_tests::programs::{Program, manifest};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{process, toolchain};

/// PTX for any GPU that CUDA 13 supports (and for the software GPU, which reads nothing else), and machine code for
/// the one that the project is measured on. C++'s own library is inside, so that a small guest needs only libc.
pub const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-gencode",
    "arch=compute_75,code=compute_75",
    "-gencode",
    "arch=compute_90,code=[sm_90,compute_90]",
    "-Xcompiler",
    "-Wall,-Wextra,-static-libgcc,-static-libstdc++",
];

/// Where the CUDA runtime of a program is.
#[derive(Clone, Copy)]
enum Runtime {
    Shared,
    Static,
}

impl Runtime {
    const BOTH: [Runtime; 2] = [Self::Shared, Self::Static];

    fn flag(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Static => "static",
        }
    }

    fn folder(self) -> PathBuf {
        match self {
            Self::Shared => tree::programs(),
            Self::Static => tree::programs_static(),
        }
    }
}

/// Builds every test program; gives the list of them.
pub fn build() -> Result<Vec<Program>> {
    let programs = manifest()?;
    let toolkit = toolchain::cuda()?;
    let headers = headers()?;
    for folder in [tree::programs().join(".hash"), tree::programs_static()] {
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let mut jobs = Vec::new();
    for program in &programs {
        let hash = content_hash(program, &headers)?;
        if !is_current(program, &hash) {
            jobs.push((program, hash));
        }
    }
    if jobs.is_empty() {
        return Ok(programs);
    }

    let step = Step::bar("compiling the CUDA test programs", jobs.len());
    let count = jobs.len();
    let jobs = Mutex::new(jobs.into_iter());
    let first_error = Mutex::new(None);
    let workers = std::thread::available_parallelism().map_or(2, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    // A statement of its own, so that the lock is not held while the program is compiled.
                    let job = lock(&jobs).next();
                    let Some((program, hash)) = job else { return };
                    step.note(&program.name);
                    match compile(program, &toolkit, &hash) {
                        Ok(()) => step.advance(),
                        Err(error) => {
                            lock(&first_error).get_or_insert(error);
                            return;
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = lock(&first_error).take() {
        return Err(error);
    }
    step.done(&format!("{count} built"));
    Ok(programs)
}

/// No holder of these locks can panic half-way through a change.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn source_folder() -> PathBuf {
    tree::root().join("tests/programs")
}

/// The contents of all headers: any program may include any of them.
fn headers() -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let folder = source_folder();
    let mut headers = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "h") {
            let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            headers.push((path, text));
        }
    }
    headers.sort();
    Ok(headers)
}

fn content_hash(program: &Program, headers: &[(PathBuf, Vec<u8>)]) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    (toolchain::CUDA, FLAGS, &program.flags, program.driver).hash(&mut hasher);
    for (_, text) in headers {
        text.hash(&mut hasher);
    }
    for source in &program.sources {
        let path = source_folder().join(source);
        source.hash(&mut hasher);
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn hash_file(program: &Program) -> PathBuf {
    tree::programs().join(".hash").join(&program.name)
}

fn is_current(program: &Program, hash: &str) -> bool {
    Runtime::BOTH.iter().all(|runtime| runtime.folder().join(&program.name).is_file())
        && std::fs::read_to_string(hash_file(program)).is_ok_and(|found| found == hash)
}

fn compile(program: &Program, toolkit: &Path, hash: &str) -> Result<()> {
    let log = process::log(&format!("nvcc-{}", program.name))?;
    let scratch = tree::programs().join(".objects").join(&program.name);
    std::fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let nvcc = || {
        let mut command = Command::new(toolkit.join("bin/nvcc"));
        command.args(FLAGS).args(&program.flags).current_dir(source_folder());
        command
    };

    let mut objects = Vec::new();
    for source in &program.sources {
        let object = scratch.join(source).with_extension("o");
        process::run(nvcc().arg("-c").arg(source).arg("-o").arg(&object), &log)?;
        objects.push(object);
    }
    if program.driver {
        driver_stub(&objects, &scratch, &log)?;
    }
    for runtime in Runtime::BOTH {
        let mut link = nvcc();
        link.args(["-cudart", runtime.flag()]).args(&objects).arg("-L").arg(toolkit.join("lib"));
        if program.driver {
            link.arg("-L").arg(&scratch).arg("-lcuda");
        }
        process::run(link.arg("-o").arg(runtime.folder().join(&program.name)), &log)?;
    }
    std::fs::write(hash_file(program), hash).context("cannot record what was built")
}

/// A `libcuda.so` to link against, with just the functions that the objects call. The wheels hold none, and the real
/// one belongs to the machine where the program runs.
fn driver_stub(objects: &[PathBuf], scratch: &Path, log: &Path) -> Result<()> {
    let symbols = process::output(Command::new("nm").arg("-u").args(objects))?;
    let functions: String = symbols
        .lines()
        .filter_map(|line| line.trim().strip_prefix("U "))
        .filter(|name| {
            name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
        })
        .map(|name| format!("void {name}(void) {{}}\n"))
        .collect();
    if functions.is_empty() {
        bail!("a program is marked as one of the driver API in programs.toml, but calls nothing of it");
    }
    let source = scratch.join("libcuda.c");
    std::fs::write(&source, functions).with_context(|| format!("cannot write {}", source.display()))?;
    let mut command = Command::new("gcc");
    command
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(scratch.join("libcuda.so"))
        .arg(&source);
    process::run(&mut command, log)
}
