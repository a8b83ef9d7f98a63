//! Builds the CUDA test programs with NVIDIA's compiler.
//!
//! A program can be linked in two ways: into `target/programs/` with the CUDA runtime as a shared library,
//! and into `target/programs-static/` with the runtime inside the program, as nvcc does by default. Both use
//! the same object files from `target/programs/.objects/`. Objects and programs are rebuilt only if sources,
//! headers, flags or the compiler's version have changed; a file next to each contains a hash of these.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use clap::Args;
use rgpu_tests::programs::{Program, manifest};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{process, toolchain};

/// Build CUDA test programs with NVIDIA's compiler.
///
/// target/programs has them with the CUDA runtime as a shared library, and target/programs-static with the
/// runtime inside the program, as nvcc makes them by default.
#[derive(Args)]
pub struct Arguments {
    /// The programs, by their names in tests/programs/programs.toml. By default all, which takes minutes
    names: Vec<String>,
}

/// Builds the programs that a command line names, or all.
pub fn programs(arguments: &Arguments) -> Result<()> {
    if arguments.names.is_empty() {
        return build().map(drop);
    }
    build_these(&named(manifest()?, &arguments.names)?, &[Runtime::Shared, Runtime::Static])
}

/// The programs with these names.
fn named(all: Vec<Program>, names: &[String]) -> Result<Vec<Program>> {
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|program| program.name != **name)) {
        bail!("tests/programs/programs.toml has no program {unknown}");
    }
    Ok(all.into_iter().filter(|program| names.contains(&program.name)).collect())
}

/// Generates PTX for every GPU that CUDA 13 supports (and for the software GPU, which runs nothing else), and
/// machine code for the GPU on which the project is measured. The C++ standard library is linked statically,
/// so that a small guest only needs libc.
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

/// How a program is linked with the CUDA runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// As a shared library that the program loads.
    Shared,
    /// Inside the program.
    Static,
}

impl Runtime {
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

    /// The file with the hash of the program's inputs.
    fn hash_file(self, program: &Program) -> PathBuf {
        self.folder().join(".hash").join(&program.name)
    }

    fn is_current(self, program: &Program, hash: &str) -> bool {
        self.folder().join(&program.name).is_file() && holds(&self.hash_file(program), hash)
    }
}

/// Whether a file contains this hash.
fn holds(file: &Path, hash: &str) -> bool {
    std::fs::read_to_string(file).is_ok_and(|found| found == hash)
}

fn record(file: &Path, hash: &str) -> Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    std::fs::write(file, hash).with_context(|| format!("cannot write {}", file.display()))
}

/// A program to build.
struct Job<'a> {
    program: &'a Program,
    hash: String,
    runtimes: Vec<Runtime>,
}

/// Builds every test program in both ways, once in this process, and returns the list.
pub fn build() -> Result<Vec<Program>> {
    static MADE: Mutex<bool> = Mutex::new(false);
    let mut made = lock(&MADE);
    let programs = manifest()?;
    if !*made {
        build_these(&programs, &[Runtime::Shared, Runtime::Static])?;
        *made = true;
    }
    Ok(programs)
}

/// Builds these programs with these runtimes.
pub fn build_these(programs: &[Program], runtimes: &[Runtime]) -> Result<()> {
    let toolkit = toolchain::cuda()?;
    let headers = headers()?;
    let mut jobs = Vec::new();
    for program in programs {
        let hash = content_hash(program, &headers)?;
        let old = runtimes.iter().copied().filter(|runtime| !runtime.is_current(program, &hash));
        let runtimes: Vec<Runtime> = old.collect();
        if !runtimes.is_empty() {
            jobs.push(Job { program, hash, runtimes });
        }
    }
    if jobs.is_empty() {
        return Ok(());
    }

    let step = Step::bar("compiling CUDA programs", jobs.len());
    let count = jobs.len();
    let jobs = Mutex::new(jobs.into_iter());
    let first_error = Mutex::new(None);
    let workers = std::thread::available_parallelism().map_or(2, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    // A separate statement, so that the lock is not held during compilation.
                    let job = lock(&jobs).next();
                    let Some(job) = job else { return };
                    step.note(&job.program.name);
                    match compile(&job, &toolkit) {
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
    Ok(())
}

/// Locks a mutex. A panic cannot leave the data inconsistent.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn source_folder() -> PathBuf {
    tree::root().join("tests/programs")
}

/// The contents of all headers, since any program may include any of them.
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

fn compile(job: &Job, toolkit: &Path) -> Result<()> {
    let Job { program, hash, runtimes } = job;
    let log = process::log(&format!("nvcc-{}", program.name))?;
    let scratch = tree::programs().join(".objects").join(&program.name);
    std::fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let nvcc = || {
        let mut command = Command::new(toolkit.join("bin/nvcc"));
        command.args(FLAGS).args(&program.flags).current_dir(source_folder());
        command
    };

    let objects: Vec<PathBuf> =
        program.sources.iter().map(|source| scratch.join(source).with_extension("o")).collect();
    let compiled = scratch.join("hash");
    if !holds(&compiled, hash) {
        for (source, object) in program.sources.iter().zip(&objects) {
            process::run(nvcc().arg("-c").arg(source).arg("-o").arg(object), &log)?;
        }
        record(&compiled, hash)?;
    }
    if program.driver {
        driver_stub(&objects, &scratch, &log)?;
    }
    for runtime in runtimes {
        let folder = runtime.folder();
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut link = nvcc();
        link.args(["-cudart", runtime.flag()]).args(&objects).arg("-L").arg(toolkit.join("lib"));
        if program.driver {
            link.arg("-L").arg(&scratch).arg("-lcuda");
        }
        process::run(link.arg("-o").arg(folder.join(&program.name)), &log)?;
        record(&runtime.hash_file(program), hash)?;
    }
    Ok(())
}

/// Builds a `libcuda.so` to link against, with just the functions that the objects call. The wheels contain
/// none; the real one belongs to the machine where the program runs.
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
        bail!("programs.toml says that a program uses the driver API, but it calls none of its functions");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_chosen_by_their_names() {
        let chosen = named(manifest().unwrap(), &["vectorAdd".into(), "device_list".into()]).unwrap();
        let names: Vec<&str> = chosen.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["device_list", "vectorAdd"]);
        let error = named(manifest().unwrap(), &["vectorAd".into()]).unwrap_err().to_string();
        assert!(error.contains("no program vectorAd"), "{error}");
    }
}
