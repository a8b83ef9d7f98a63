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

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{self, Program, portable, told};
use rgpu_tests::tree;
use test_kit::eventually;

/// The libraries that the server takes for NVIDIA's, the symbol by which it recognizes rgpu's own and refuses
/// them, and another of the same length. Nothing else uses these symbols.
const LIBRARIES: [(&str, &str, &str); 2] =
    [("libcuda.so.1", "rgpu_libcuda", "rgpu_stacked"), ("libnvidia-ml.so.1", "rgpu_libnvml", "rgpu_stacked")];

/// The devices of the server below. The library's only one is the last of them, so that its addresses are
/// others than those of the server above, whose windows are the first ([decision 156]).
///
/// [decision 156]: ../../docs/decisions/0156-programs-may-reserve-windows-that-no-device-has.md
const DEVICES: &str = "4";
const LAST: &str = "3";
/// The two that the library has for a server of which one is lost.
const LAST_TWO: &str = "2,3";

const TRANSPORTS: [&str; 2] = ["local", "tcp"];

/// Options of a server on the library. A worker's sandbox has what NVIDIA's driver needs, and no sockets in
/// other folders.
const ABOVE: [&str; 7] = ["--backend", "cuda", "--sandbox", "off", "--insecure", "--workers", "1"];

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
    bridges: Vec<(&'static str, Daemon, PathBuf)>,
    _server: Daemon,
    _below: [Daemon; 2],
    /// What makes the library the driver of a server.
    driver: [(&'static str, PathBuf); 2],
    folder: tempfile::TempDir,
}

/// Starts a daemon in this folder.
fn start(
    folder: &Path,
    name: &str,
    daemon: &str,
    variables: &[(&str, PathBuf)],
    arguments: &[&str],
) -> Result<Daemon> {
    let mut command = Command::new(tree::binaries().join(daemon));
    command.envs(variables.iter().cloned());
    let log = tree::logs().join("stacked").join(format!("{name}.log"));
    std::fs::create_dir_all(tree::logs().join("stacked"))?;
    // It is appended to.
    let _ = std::fs::remove_file(&log);
    Daemon::start_by(command, arguments, &log, &folder.join(format!("{name}.status")))
}

/// Starts a bridge to a server, and returns it with its native socket.
fn bridge(folder: &Path, name: &str, transport: &str, server: &str) -> Result<(Daemon, PathBuf)> {
    let socket = folder.join(format!("{name}.sock"));
    let path = socket.display().to_string();
    let to = ["--insecure", "--transport", transport, "--server", server, "--native-socket", &path];
    Ok((start(folder, name, "vhost-rgpu", &[], &to)?, socket))
}

impl Stack {
    /// Starts everything; the logs are in `target/logs/stacked/`.
    fn start() -> Result<Stack> {
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name);
        let unix = |name: &str| format!("unix:{}", at(name).display());
        let (below, above) = (unix("below.sock"), unix("above.sock"));
        // Most programs have one of the devices. Those that have two also do without access between them.
        let devices = ["--software-devices", DEVICES, "--software-imitate", "no-peers"];
        let gpu = [&["--backend", "software", "--workers", "2", "--listen", &below][..], &devices].concat();
        let gpu = start(folder.path(), "below", "rgpu-server", &[], &gpu)?;
        let (to_gpu, socket) = bridge(folder.path(), "to-below", "local", &below)?;

        let libraries = at("driver");
        std::fs::create_dir(&libraries)?;
        for (name, own, other) in LIBRARIES {
            hide(&tree::guest_libraries().join(name), &libraries.join(name), own, other)?;
        }
        let driver = [("LD_LIBRARY_PATH", libraries), ("RGPU_SOCKET", socket)];
        let variables = [&driver[..], &[("CUDA_VISIBLE_DEVICES", LAST.into())]].concat();
        let port = free_port()?;
        let tcp = format!("tcp:127.0.0.1:{port}");
        let arguments = [&ABOVE[..], &["--listen", &above, "--listen", &tcp]].concat();
        let server = start(folder.path(), "above", "rgpu-server", &variables, &arguments)?;
        let mut bridges = Vec::new();
        for (transport, server) in TRANSPORTS.into_iter().zip([&above, &tcp]) {
            let (bridge, socket) = bridge(folder.path(), transport, transport, server)?;
            bridges.push((transport, bridge, socket));
        }
        Ok(Stack { bridges, _server: server, _below: [to_gpu, gpu], driver, folder })
    }

    /// A program uses two devices that do not reach each other's memory.
    fn two_apart(&self) -> Result<()> {
        let folder = self.folder.path().join("apart");
        std::fs::create_dir(&folder)?;
        let address = format!("unix:{}", folder.join("server.sock").display());
        let variables = [&self.driver[..], &[("CUDA_VISIBLE_DEVICES", LAST_TWO.into())]].concat();
        let arguments = [&ABOVE[..], &["--listen", &address]].concat();
        let _server = start(&folder, "apart", "rgpu-server", &variables, &arguments)?;
        let (_bridge, socket) = bridge(&folder, "to-apart", "local", &address)?;
        let mut command = Command::new(programs::built("two_gpus")?);
        command.env("RGPU_SOCKET", &socket).env("LD_LIBRARY_PATH", tree::guest_libraries());
        programs::run(&mut command, programs::LIMIT)?.verdict("two_gpus")?;
        Ok(())
    }

    /// A server with two devices keeps their numbers when the first one is lost, so that its driver counts
    /// the second one as the first; the server's next daemon keeps them, too.
    fn numbers_stay(&self) -> Result<()> {
        let folder = self.folder.path().join("numbers");
        std::fs::create_dir(&folder)?;
        let at = |name: &str| folder.join(name).display().to_string();
        let (worker, lost, events) = (at("worker"), at("lost"), at("events"));
        let server = tree::binaries().join("rgpu-server");
        let script = format!(
            "#!/bin/sh\n[ ! -e {lost} ] || export CUDA_VISIBLE_DEVICES={LAST}\nexec {} \"$@\"\n",
            server.display()
        );
        std::fs::write(&worker, script)?;
        std::fs::set_permissions(&worker, std::fs::Permissions::from_mode(0o755))?;
        mkfifo(&*events, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let address = format!("unix:{}", at("server.sock"));
        let own = ["--listen", &address, "--worker-program", &worker, "--software-events", &events];
        let variables = [&self.driver[..], &[("CUDA_VISIBLE_DEVICES", LAST_TWO.into())]].concat();
        let arguments = [&ABOVE[..], &own].concat();
        let server = start(&folder, "numbers", "rgpu-server", &variables, &arguments)?;
        let (_bridge, socket) = bridge(&folder, "to-numbers", "local", &address)?;
        // By NVML, which the daemon asks.
        let known = || -> Result<Vec<serde_json::Value>> {
            let status = server.status()?;
            let gpus = status["gpus"].as_array().context("GPUs")?.iter();
            Ok(gpus.map(|gpu| gpu["uuid"].clone()).collect())
        };
        eventually(|| known().is_ok_and(|uuids| uuids.len() == 2 && !uuids[1].is_null()));
        let [first, second] = <[_; 2]>::try_from(known()?).map_err(|_| anyhow!("not two GPUs"))?;
        ensure!(first != second, "both are {first}");
        // By the driver, which the worker asks.
        let uuids = || -> Result<Vec<serde_json::Value>> {
            let mut command = Command::new(programs::built("device_list")?);
            command.env("RGPU_SOCKET", &socket).env("LD_LIBRARY_PATH", tree::guest_libraries());
            let outcome = programs::run(&mut command, programs::LIMIT)?;
            outcome.verdict("device_list")?;
            let uuids = outcome.stdout.lines().filter_map(|line| line.trim().split(',').next());
            Ok(uuids.filter(|uuid| uuid.starts_with("GPU-")).map(Into::into).collect())
        };
        ensure!(uuids()? == [first.clone(), second.clone()], "{:?}", uuids()?);

        std::fs::write(&lost, "")?;
        std::fs::write(&events, "0 lost\n")?;
        let ill = || server.status().is_ok_and(|status| status["gpus"][0]["healthy"] == false);
        eventually(ill);
        ensure!(uuids()? == [second.clone()], "{:?}", uuids()?);
        server.signal(Signal::SIGUSR2)?;
        eventually(|| server.log_text().contains("takes over") && ill());
        ensure!(uuids()? == [second.clone()], "{:?}", uuids()?);
        // The daemon's library still has both, as NVML may have a handle of a lost GPU.
        eventually(|| known().is_ok_and(|uuids| uuids == [first.clone(), second.clone()]));
        Ok(())
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
    if asked.is_empty() {
        type Case = fn(&Stack) -> Result<()>;
        let cases: [(&str, Case); 2] = [
            ("numbers_stay_with_their_devices_when_one_is_lost", Stack::numbers_stay),
            ("two_devices_do_not_reach_each_other", Stack::two_apart),
        ];
        for (name, case) in cases {
            let stack = stack.clone();
            trials.push(Trial::test(name, move || {
                let stack = stack.as_ref().ok_or("nothing runs while tests are listed")?;
                Ok(told(case(stack))?)
            }));
        }
    }
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
