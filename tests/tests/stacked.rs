//! NVIDIA's backend without an NVIDIA GPU: test programs on a server whose driver is rgpu's own
//! `libcuda.so.1`, on the software GPU of another server. Every layer is real:
//!
//! ```text
//!  program ─ libcuda ─ vhost-rgpu ─┬─ local ─┬─ rgpu-server --backend cuda
//!                                  └─ tcp ───┘     │
//!                                                  └─ libcuda ─ vhost-rgpu ─ local ─ rgpu-server
//! ```
//!
//! So CI runs the code that calls the driver. What that driver does otherwise than NVIDIA's is no finding:
//! `tests/tests/gpu.rs` runs the same programs on a GPU. Those in [`LONG`] run with `RGPU_STACKED=all`, and
//! those in [`UNFIT`] with `RGPU_STACKED=unfit`, to see whether they still cannot.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{self, Program, portable, told};
use rgpu_tests::tree;

/// The libraries that the server takes for NVIDIA's, the symbol by which it recognizes rgpu's own and refuses
/// them, and another of the same length. Nothing else uses these symbols.
const LIBRARIES: [(&str, &str, &str); 2] =
    [("libcuda.so.1", "rgpu_libcuda", "rgpu_stacked"), ("libnvidia-ml.so.1", "rgpu_libnvml", "rgpu_stacked")];

/// The devices of the server below. The library's only one is the last of them, so that its addresses are
/// others than those of the server above, whose windows are the first ([decision 156]).
///
/// [decision 156]: ../../docs/decisions/0156-programs-may-reserve-windows-that-no-device-has.md
const DEVICES: &str = "2";
const LAST: &str = "1";

const TRANSPORTS: [&str; 2] = ["local", "tcp"];

/// Programs that take longest. Others show the same parts of the backend. A server learns of a kernel's fault
/// only after ten seconds here, because the library answers queries of its idle streams without asking.
const LONG: &[&str] = &[
    "errors",
    "graph_random",
    "managed_memory",
    "managed_neighbors",
    "many_small_copies",
    "mapped_across",
    "mapped_copies",
    "mapped_fifo",
    "mapped_waits",
    "shared_streams",
    "sticky_errors",
    "watched_copies",
];

/// Programs that cannot run here, by the reason; with a transport in front if only that is meant.
const UNFIT: &[(&str, &[&str])] = &[
    (
        "the server takes their machine code, and the software GPU runs only PTX",
        &["dynamic_parallelism", "graph_conditional", "multi_rdc"],
    ),
    (
        "the library cannot share the server's staging memory, so it waits where NVIDIA's driver would not: the \
         server's dispatcher stands behind a stream that the program holds",
        &[
            "held_by_value",
            "held_streams",
            "late_sources",
            "stream_memory",
            "tcp::model_upload",
            "tcp::pinned_relay",
        ],
    ),
    (
        "`cuPointerGetAttribute` does not know a kernel's string literals",
        &["pointer_attributes", "symbol_copies"],
    ),
    ("the library reports a refused launch later", &["refused_launches"]),
    ("there is no CUPTI below the server", &["activity", "xla_profiler"]),
    (
        "the server has the program's host memory where the library has its own reservations, so the library \
         takes it for a device's",
        &["vmm_host"],
    ),
    (
        "of memory that other processes may have, too, the library lets kernels use 1 MiB; when the server then \
         gives it up, the library waits for a kernel that waits for the program",
        &["local::mapped_zeroes"],
    ),
    (
        "the library writes what kernels have written to such memory word after word, and the program, which is \
         another process, sees that in no order",
        &["local::mapped_words", "local::pinned_answers"],
    ),
];

/// Whether a program cannot run here over a transport.
fn is_unfit(transport: &str, program: &Program) -> bool {
    let is_it = |name: &&str| match name.split_once("::") {
        Some((only, name)) => only == transport && name == program.name,
        None => *name == program.name,
    };
    UNFIT.iter().any(|(_, names)| names.iter().any(is_it))
}

/// The daemons, in the order in which they end.
struct Stack {
    /// Transport, daemon and native socket.
    bridges: [(&'static str, Daemon, PathBuf); 2],
    _server: Daemon,
    _below: [Daemon; 2],
    _folder: tempfile::TempDir,
}

impl Stack {
    /// Starts everything; the logs are in `target/logs/stacked/`.
    fn start() -> Result<Stack> {
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name);
        let unix = |name: &str| format!("unix:{}", at(name).display());
        let start = |name: &str, daemon: &str, variables: &[(&str, PathBuf)], arguments: &[&str]| {
            let mut command = Command::new(tree::binaries().join(daemon));
            command.envs(variables.iter().cloned());
            let log = tree::logs().join("stacked").join(format!("{name}.log"));
            std::fs::create_dir_all(tree::logs().join("stacked"))?;
            // It is appended to.
            let _ = std::fs::remove_file(&log);
            Daemon::start_by(command, arguments, &log, &at(&format!("{name}.status")))
        };
        let bridge = |name: &'static str, transport: &str, server: &str| {
            let socket = at(&format!("{name}.sock"));
            let path = socket.display().to_string();
            let to = ["--insecure", "--transport", transport, "--server", server, "--native-socket", &path];
            Ok::<_, anyhow::Error>((name, start(name, "vhost-rgpu", &[], &to)?, socket))
        };

        let (below, above) = (unix("below.sock"), unix("above.sock"));
        let gpu =
            ["--backend", "software", "--software-devices", DEVICES, "--workers", "2", "--listen", &below];
        let gpu = start("below", "rgpu-server", &[], &gpu)?;
        let (_, to_gpu, socket) = bridge("to-below", "local", &below)?;

        let driver = at("driver");
        std::fs::create_dir(&driver)?;
        for (name, own, other) in LIBRARIES {
            hide(&tree::guest_libraries().join(name), &driver.join(name), own, other)?;
        }
        let variables =
            [("LD_LIBRARY_PATH", driver), ("RGPU_SOCKET", socket), ("CUDA_VISIBLE_DEVICES", LAST.into())];
        let port = free_port()?;
        let tcp = format!("tcp:127.0.0.1:{port}");
        // A worker's sandbox has what NVIDIA's driver needs, and no sockets in other folders.
        let arguments = ["--backend", "cuda", "--sandbox", "off", "--insecure", "--workers", "1"];
        let arguments = [&arguments[..], &["--listen", &above, "--listen", &tcp]].concat();
        let server = start("above", "rgpu-server", &variables, &arguments)?;
        let bridges = [bridge("local", "local", &above)?, bridge("tcp", "tcp", &tcp)?];
        Ok(Stack { bridges, _server: server, _below: [to_gpu, gpu], _folder: folder })
    }

    /// Runs a program over a transport, and requires that it passes.
    fn passes(&self, transport: &str, program: &Program) -> Result<()> {
        let (.., socket) =
            self.bridges.iter().find(|(name, ..)| *name == transport).context("a transport")?;
        let mut command = Command::new(programs::built(&program.name)?);
        command.env("RGPU_SOCKET", socket).env("LD_LIBRARY_PATH", tree::guest_libraries());
        // What the library would read in machine code is not so for PTX, which runs in the end: a parameter
        // of 128 bytes may be elsewhere. It would read that only if round trips are long.
        command.env("RGPU_READ_IMAGES", "never");
        let outcome = programs::run(command.args(&program.args), programs::LIMIT)?;
        let logs = tree::logs().join("stacked");
        outcome
            .verdict(&program.name)
            .map(drop)
            .with_context(|| format!("the daemons' logs are in {}", logs.display()))
    }
}

/// Copies one of rgpu's libraries without the symbol by which a server recognizes it.
fn hide(library: &Path, copy: &Path, own: &str, other: &str) -> Result<()> {
    let mut bytes = std::fs::read(library)
        .with_context(|| format!("{}: `cargo xtask build` makes it", library.display()))?;
    let symbol = format!("{own}\0");
    let starts = |at: &usize| bytes[*at..].starts_with(symbol.as_bytes());
    let places: Vec<usize> = (0..bytes.len()).filter(starts).collect();
    ensure!(places.len() == 1, "{} has its own symbol {} times", library.display(), places.len());
    bytes[places[0]..places[0] + own.len()].copy_from_slice(other.as_bytes());
    std::fs::write(copy, bytes).with_context(|| format!("cannot write {}", copy.display()))
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let all = portable()?;
    for name in UNFIT.iter().flat_map(|(_, names)| *names).chain(LONG) {
        let name = name.split_once("::").map_or(*name, |(_, name)| name);
        ensure!(all.iter().any(|program| program.name == name), "{name} is no program");
    }
    let asked = std::env::var("RGPU_STACKED").unwrap_or_default();
    let is_wanted = |transport: &str, program: &Program| match &*asked {
        "" => Ok(!is_unfit(transport, program) && !LONG.contains(&&*program.name)),
        "all" => Ok(!is_unfit(transport, program)),
        "unfit" => Ok(is_unfit(transport, program)),
        other => bail!("RGPU_STACKED is {other:?}; it may be \"all\" or \"unfit\""),
    };
    let stack = if arguments.list { None } else { Some(Arc::new(Stack::start()?)) };
    let mut trials = Vec::new();
    for program in all {
        for transport in TRANSPORTS {
            if !is_wanted(transport, &program)? {
                continue;
            }
            let (stack, program) = (stack.clone(), program.clone());
            trials.push(Trial::test(format!("{transport}::{}", program.name), move || {
                let stack = stack.as_ref().ok_or("nothing runs while tests are listed")?;
                Ok(told(stack.passes(transport, &program))?)
            }));
        }
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}
