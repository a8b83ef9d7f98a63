//! The operator's command, used as an operator would.

mod support;

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{LIMIT, Outcome, built, run};
use rgpu_tests::tree;
use serde_json::Value;
use support::eventually;

/// The output of `rgpuctl bench --json` with these arguments.
fn bench(arguments: &[&str]) -> Result<Value> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["bench", "--json"]).args(arguments).env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.status == Some(0), "bench {arguments:?}: {outcome:?}");
    serde_json::from_str(&outcome.stdout).with_context(|| format!("no JSON: {:?}", outcome.stdout))
}

#[test]
fn bench_measures_calls_and_copies_over_both_transports() -> Result<()> {
    for transport in ["local", "tcp"] {
        let figures = bench(&["--largest", "1", "--backend", "software", "--transport", transport])?;
        let link = &figures["link"];
        ensure!(link["transport"] == transport, "{figures}");
        // The kernel knows the round trip of a connection, and shared memory has none.
        let round_trip = link["tcp_round_trip_us"].as_f64();
        ensure!(round_trip.is_some_and(|time| time > 0.0) == (transport == "tcp"), "{figures}");
        for name in [
            "round trip",
            "in a row to device",
            "in a row to host",
            "launch",
            "launch and synchronize",
            "64 B to host",
            "pinned to device, 1 MiB",
            "pageable to host, 4 KiB",
        ] {
            let median = figures["rgpu"][name]["median"].as_f64();
            assert!(median.is_some_and(|figure| figure > 0.0), "{name} over {transport}: {figures}");
        }
    }
    Ok(())
}

/// Of a link that is slower than everything else, `rgpuctl bench` shows the link's own figures, even if the
/// server could do without the bytes.
#[test]
fn bench_shows_how_long_and_how_wide_the_link_is() -> Result<()> {
    const MBIT: f64 = 200.0;
    const ROUND_TRIP_US: f64 = 20_000.0;
    let folder = tempfile::tempdir()?;
    let (port, near) = (free_port()?, free_port()?);
    let cache = folder.path().join("cache").display().to_string();
    let listen = format!("tcp:127.0.0.1:{port}");
    let arguments = ["--insecure", "--backend", "software", "--listen", &listen, "--cache", &cache];
    let log = tree::logs().join("rgpuctl-bench").join("rgpu-server.log");
    let server = Daemon::start("rgpu-server", arguments, &log, &folder.path().join("status"))?;
    let relay = Command::new(env!("CARGO_BIN_EXE_delay-relay"))
        .args(["--listen", &format!("127.0.0.1:{near}"), "--to", &format!("127.0.0.1:{port}")])
        .args(["--rtt-us", &ROUND_TRIP_US.to_string(), "--mbit", &MBIT.to_string()])
        .spawn()
        .context("cannot start delay-relay")?;
    let relay = support::Ended(relay);
    eventually(|| TcpStream::connect(("127.0.0.1", near)).map(drop).map_err(Into::into))?;
    let figures = bench(&["--largest", "8", "--insecure", "--server", &format!("127.0.0.1:{near}")])?;
    drop((relay, server));
    let figure = |name: &str, which: &str| {
        figures["rgpu"][name][which].as_f64().with_context(|| format!("no {name}: {figures}"))
    };
    // A busy machine makes waits longer and copies slower, and never the other way round.
    let wait = figure("round trip", "p10")?;
    ensure!(wait >= ROUND_TRIP_US, "a round trip takes {wait} µs: {figures}");
    for name in
        ["in a row to device", "in a row to host", "pinned to device, 8 MiB", "pageable to device, 8 MiB"]
    {
        // Twice as much, because after a pause the data that has waited comes at once. From the cache, it
        // would be five times as much.
        let rate = figure(name, "median")?;
        ensure!(rate > 0.0 && rate <= 2.0 * MBIT / 8e3, "{name} at {rate} GB/s: {figures}");
    }
    Ok(())
}

#[test]
fn bench_reports_a_missing_libcuda() -> Result<()> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    let outcome = run(command.args(["bench", "--installed"]).env("LD_LIBRARY_PATH", "/nonexistent"), LIMIT)?;
    // A machine with its own driver has one.
    if outcome.status != Some(0) {
        assert!(outcome.stderr.contains("cannot load libcuda.so.1"), "{outcome:?}");
    }
    Ok(())
}

/// One line of `rgpuctl trace`'s table: an operation's count and its times; none where the stage does not
/// exist.
fn traced(transport: &str, operation: &str) -> Result<(u64, Vec<Option<f64>>)> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["trace", "--backend", "software", "--transport", transport, "--"])
        .arg(built("bench")?)
        .args(["loop", "launches", "100"])
        .env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict("bench").is_ok(), "{outcome:?}");
    let line = outcome.stderr.lines().find(|line| line.split_whitespace().next() == Some(operation));
    let line = line.with_context(|| format!("no {operation} over {transport}:\n{}", outcome.stderr))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    Ok((words[1].parse()?, words[2..].iter().map(|word| word.parse().ok()).collect()))
}

#[test]
fn trace_shows_the_stages_of_commands_in_every_process() -> Result<()> {
    // Total; taken, received, begun, executed, answered, delivered, woken.
    let local = [true, false, false, true, true, true, false, true];
    for (transport, stages) in [("local", local), ("tcp", [true; 8])] {
        let (count, times) = traced(transport, "stream_synchronize")?;
        let there: Vec<bool> = times.iter().map(Option::is_some).collect();
        assert_eq!((count, there.as_slice()), (1, &stages[..]), "over {transport}: {times:?}");
        // The stages of a command add up to its whole time.
        let parts: f64 = times[1..].iter().flatten().sum();
        assert!((parts - times[0].unwrap_or(0.0)).abs() < 1.0, "over {transport}: {times:?}");
        let (count, times) = traced(transport, "launch")?;
        assert!(count == 101 && times[4].is_some() && times[5].is_none(), "over {transport}: {times:?}");
    }
    Ok(())
}

/// Functions that waited, by `rgpuctl trace`'s second table: for each its calls, the answers that it waited
/// for, and the milliseconds.
fn waits(transport: &str, program: &str, arguments: &[&str]) -> Result<Vec<(String, [f64; 3])>> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["trace", "--backend", "software", "--transport", transport, "--"])
        .arg(built(program)?)
        .args(arguments)
        .env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.verdict(program).is_ok(), "{outcome:?}");
    let lines =
        outcome.stderr.lines().skip_while(|line| !line.contains("functions that waited for the server"));
    let mut rows = lines.skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let heads = rows.next().with_context(|| format!("no table over {transport}:\n{}", outcome.stderr))?;
    ensure!(heads[..3] == ["function", "calls", "answers"], "{heads:?}");
    rows.take_while(|words| words.len() == 4)
        .map(|words| {
            let numbers = [words[1].parse()?, words[2].parse()?, words[3].parse()?];
            Ok((words[0].to_owned(), numbers))
        })
        .collect()
}

#[test]
fn trace_lists_the_functions_that_waited_for_the_server() -> Result<()> {
    for transport in ["local", "tcp"] {
        // Each step has 64 launches and waits once.
        let rows = waits(transport, "framework_steps", &["training", "7"])?;
        let of = |name: &str| rows.iter().find(|(function, _)| function == name).map(|(_, numbers)| *numbers);
        let [calls, answers, _] =
            of("cuStreamSynchronize").with_context(|| format!("over {transport}: {rows:?}"))?;
        ensure!((calls, answers) == (7.0, 7.0), "over {transport}: {rows:?}");
        ensure!(
            of("cuMemAlloc_v2").is_some_and(|[calls, answers, _]| calls >= 1.0 && answers >= 1.0),
            "{rows:?}"
        );
        ensure!(
            rows.iter().all(|(function, [.., waited])| function.starts_with("cu") && *waited >= 0.0),
            "{rows:?}"
        );
        // The runtime's functions call these and are not counted again, nor is what only sends.
        ensure!(of("cudaMalloc").is_none() && of("cuGetProcAddress_v2").is_none(), "{rows:?}");
        let times: Vec<f64> = rows.iter().map(|(_, [.., waited])| *waited).collect();
        ensure!(times.is_sorted_by(|one, next| one >= next), "the longest wait is not first: {rows:?}");
    }
    Ok(())
}

/// A timeline's spans with this name: the process's name, start and end in microseconds.
fn spans(events: &[Value], name: &str) -> Result<Vec<(String, [f64; 2])>> {
    let process = |pid: &Value| {
        let named = |event: &&Value| event["name"] == "process_name" && event["pid"] == *pid;
        events.iter().find(named).and_then(|event| event["args"]["name"].as_str()).context("a process's name")
    };
    let found = events.iter().filter(|event| event["ph"] == "X" && event["name"] == name);
    found
        .map(|event| {
            let (begin, took) = (event["ts"].as_f64(), event["dur"].as_f64());
            let begin = begin.with_context(|| format!("no time: {event}"))?;
            Ok((process(&event["pid"])?.to_owned(), [begin, begin + took.context("no duration")?]))
        })
        .collect()
}

#[test]
fn a_timeline_has_calls_commands_and_kernels_on_one_clock() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for transport in ["local", "tcp"] {
        let file = folder.path().join(transport);
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command
            .args(["trace", "--devices", "--backend", "software", "--transport", transport, "--output"])
            .arg(&file)
            .arg("--")
            .arg(built("vectorAdd")?)
            .env("RGPU_LIB_DIR", tree::guest_libraries());
        run(&mut command, LIMIT)?.verdict("vectorAdd")?;
        let timeline: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
        let events = timeline["traceEvents"].as_array().context("no events")?;
        let one = |name: &str, process: &str| -> Result<[f64; 2]> {
            let found = spans(events, name)?;
            let first = found.into_iter().find(|(of, _)| of.starts_with(process));
            Ok(first.with_context(|| format!("no {name} of a {process} over {transport}"))?.1)
        };
        let (called, inner) = (one("cudaMalloc", "program ")?, one("cuMemAlloc_v2", "program ")?);
        ensure!(called[0] <= inner[0] && inner[1] <= called[1], "{called:?} {inner:?}");
        let launched = one("cuLaunchKernel", "program ")?;
        let executed = one("launch", "worker ")?;
        let kernel = one("vector_add(float const*, float const*, float*, int)", "GPU ")?;
        let ordered = launched[0] <= executed[0] && executed[0] <= kernel[0] && kernel[0] <= kernel[1];
        ensure!(ordered, "over {transport}: {launched:?} {executed:?} {kernel:?}");
        // The program waits for the copy after its kernel.
        let last = spans(events, "cudaMemcpy")?.last().context("no cudaMemcpy")?.1;
        ensure!(kernel[1] <= last[1], "over {transport}: {kernel:?} {last:?}");
        let link =
            |event: &Value| event["ph"] == "b" && event["cat"] == "command" && event["name"] == "launch";
        ensure!(events.iter().any(link) == (transport == "tcp"), "the link over {transport}");
    }
    Ok(())
}

#[test]
fn a_private_server_starts_no_unused_worker() -> Result<()> {
    let logs = tree::logs().join("rgpuctl-private");
    for transport in ["local", "tcp"] {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command
            .args(["run", "--backend", "software", "--transport", transport, "--log-dir"])
            .arg(&logs)
            .arg("--")
            .arg(built("vectorAdd")?)
            .env("RGPU_LIB_DIR", tree::guest_libraries());
        run(&mut command, LIMIT)?.verdict("vectorAdd")?;
        let log = std::fs::read_to_string(logs.join("rgpu-server.log"))?;
        ensure!(log.contains("session begins") && log.contains("session ends"), "over {transport}:\n{log}");
        // It had no worker left to end when it was told to end.
        ensure!(!log.contains("workers that had no session"), "over {transport}:\n{log}");
    }
    Ok(())
}

/// `rgpuctl` with these words.
fn rgpuctl(words: &[&str]) -> Result<Outcome> {
    run(
        Command::new(tree::binaries().join("rgpuctl"))
            .args(words)
            .env("RGPU_LIB_DIR", tree::guest_libraries()),
        LIMIT,
    )
}

/// `rgpuctl run` with a private server in software.
fn private(program: &[&str]) -> Command {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["run", "--backend", "software", "--"]).args(program);
    command.env("RGPU_LIB_DIR", tree::guest_libraries());
    command
}

#[test]
fn servers_in_the_environment_do_not_matter_where_others_are_named() -> Result<()> {
    let program = built("vectorAdd")?.display().to_string();
    run(private(&[&program]).env("RGPU_SERVERS", "gpu9"), LIMIT)?.verdict("vectorAdd").map(drop)
}

#[test]
fn run_ends_with_its_program_although_it_was_started_with_sigchld_ignored() -> Result<()> {
    let mut command = private(&["sh", "-c", "exit 7"]);
    let ignore = || {
        // SAFETY: between fork and exec, one system call, which is async-signal-safe.
        let before = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        if before == libc::SIG_ERR { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(ignore) };
    let outcome = run(&mut command, LIMIT)?;
    ensure!(outcome.status == Some(7), "{outcome:?}");
    Ok(())
}

/// A shell that runs several programs ends on Ctrl-C only if the program was ended by the signal.
#[test]
fn run_ends_by_the_signal_from_outside_that_ended_its_program() -> Result<()> {
    for (signal, ends) in [("INT", Some(libc::SIGINT)), ("TERM", Some(libc::SIGTERM)), ("SEGV", None)] {
        let mut command = private(&["sh", "-c", &format!("kill -{signal} $$")]);
        let heed = || {
            // SAFETY: a plain system call. Whoever runs tests in the background may have SIGINT ignored.
            unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
            Ok(())
        };
        // SAFETY: as above.
        let status = unsafe { command.pre_exec(heed) }.status()?;
        ensure!(status.signal() == ends, "{signal}: {status}");
        ensure!(ends.is_some() || status.code() == Some(128 + libc::SIGSEGV), "{signal}: {status}");
    }
    Ok(())
}

/// Starts `rgpuctl run` as a terminal starts a program: it leads the terminal's session. Gives the terminal's
/// own end, too.
fn in_terminal(program: &[&str]) -> Result<(OwnedFd, Child)> {
    // SAFETY: plain system calls with numbers, and the name's buffer is as long as said.
    let (terminal, name) = unsafe {
        let terminal = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
        let mut name = [0u8; 64];
        let opened = terminal >= 0
            && libc::unlockpt(terminal) == 0
            && libc::ptsname_r(terminal, name.as_mut_ptr().cast(), name.len()) == 0;
        ensure!(opened, "no terminal: {}", std::io::Error::last_os_error());
        (OwnedFd::from_raw_fd(terminal), name)
    };
    let name = CStr::from_bytes_until_nul(&name)?.to_str()?;
    let other = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name)?;
    let mut command = private(program);
    command.stdin(other.try_clone()?).stdout(other.try_clone()?).stderr(other);
    let lead = || {
        // SAFETY: plain system calls, async-signal-safe. Whoever runs tests may have signals ignored.
        let leads = unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0
        };
        if leads { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(lead) };
    Ok((terminal, command.spawn()?))
}

/// Waits until a program has ended.
fn end_of(mut child: Child) -> Result<ExitStatus> {
    let mut status = None;
    let ended = eventually(|| {
        status = child.try_wait()?;
        ensure!(status.is_some(), "rgpuctl is still running");
        Ok(())
    });
    if ended.is_err() {
        child.kill()?;
        child.wait()?;
    }
    ended?;
    status.context("no status")
}

#[test]
fn a_program_hears_that_its_terminal_was_closed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (ready, hung_up) = (folder.path().join("ready"), folder.path().join("hung up"));
    let script = format!(
        "trap 'echo > \"{}\"; exit 7' HUP; echo > \"{}\"; while :; do sleep 0.1; done",
        hung_up.display(),
        ready.display()
    );
    let (terminal, child) = in_terminal(&["sh", "-c", &script])?;
    eventually(|| Ok(std::fs::metadata(&ready).map(drop)?))?;
    drop(terminal);
    let status = end_of(child)?;
    ensure!(hung_up.exists() && status.code() == Some(7), "{status}");
    Ok(())
}

#[test]
fn ctrl_c_ends_a_program_that_has_left_the_terminals_foreground() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ready = folder.path().join("ready");
    let script = format!("echo > \"{}\"; sleep 10000", ready.display());
    // `timeout` makes a group of its own, which the terminal does not know.
    let (terminal, child) = in_terminal(&["timeout", "10000", "sh", "-c", &script])?;
    eventually(|| Ok(std::fs::metadata(&ready).map(drop)?))?;
    File::from(terminal.try_clone()?).write_all(b"\x03")?;
    end_of(child)?;
    Ok(())
}

#[test]
fn messages_that_nobody_reads_change_no_programs_status() -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let status = private(&["sh", "-c", "kill -TERM $$"]).stderr(writer).status()?;
    ensure!(status.signal() == Some(libc::SIGTERM), "{status}");
    Ok(())
}

#[test]
fn a_timeline_is_written_although_nobody_reads_the_tables() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("timeline");
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command
        .args(["trace", "--backend", "software", "--output"])
        .arg(&file)
        .arg("--")
        .arg(built("vectorAdd")?);
    command.env("RGPU_LIB_DIR", tree::guest_libraries()).stdout(Stdio::null()).stderr(writer);
    let status = command.status()?;
    ensure!(status.code() == Some(0), "{status}");
    let timeline: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    ensure!(timeline["traceEvents"].as_array().is_some_and(|events| !events.is_empty()), "{timeline}");
    Ok(())
}

#[test]
fn a_timeline_that_cannot_be_written_is_noticed_before_the_program_runs() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mark = folder.path().join("mark").display().to_string();
    let output = folder.path().join("missing/timeline").display().to_string();
    let outcome = rgpuctl(&["trace", "--backend", "software", "--output", &output, "--", "touch", &mark])?;
    ensure!(outcome.status == Some(125) && outcome.stderr.contains(&output), "{outcome:?}");
    ensure!(!folder.path().join("mark").exists(), "the program has run");
    // Without recordings, the program's status is the result all the same.
    let outcome = rgpuctl(&["trace", "--backend", "software", "--", "sh", "-c", "exit 7"])?;
    ensure!(outcome.status == Some(7) && outcome.stderr.contains("there is no recording"), "{outcome:?}");
    Ok(())
}

#[test]
fn bench_shows_its_figures_although_there_are_none_to_compare_them_with() -> Result<()> {
    let outcome = rgpuctl(&["bench", "--backend", "software", "--largest", "1", "--native"])?;
    ensure!(outcome.stdout.contains("launch and synchronize"), "{outcome:?}");
    // A machine with NVIDIA's driver has both.
    ensure!(outcome.status == Some(0) || outcome.stderr.contains("native: "), "{outcome:?}");
    Ok(())
}

#[test]
fn leases_that_cannot_be_printed_are_released() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (listen, admin) = (format!("unix:{}", path("server.sock")), path("admin"));
    let arguments = ["--backend", "software", "--listen", &listen, "--admin-socket", &admin];
    let log = tree::logs().join("rgpuctl-lease").join("rgpu-server.log");
    let _server = Daemon::start("rgpu-server", arguments, &log, &folder.path().join("status"))?;
    let leases = || rgpuctl(&["leases", "--socket", &admin]);
    eventually(|| {
        let inventory = rgpuctl(&["inventory", "--server", &listen])?;
        ensure!(inventory.stdout.contains(&listen), "{inventory:?}");
        Ok(())
    })?;
    for full in [false, true] {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command.args(["lease", "--insecure", "--server", &listen]).stderr(std::process::Stdio::piped());
        if full {
            command.stdout(std::fs::OpenOptions::new().write(true).open("/dev/full")?);
        } else {
            let (reader, writer) = std::io::pipe()?;
            drop(reader);
            command.stdout(writer);
        }
        let output = command.spawn()?.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(125) && said.contains("they were released"), "{said}");
        ensure!(leases()?.stdout == "none\n", "{:?}", leases()?);
    }
    Ok(())
}

/// Rootless engines read it as another user than root.
#[test]
fn everybody_can_read_a_specification_of_root_with_a_strict_umask() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("etc/cdi/rgpu.json");
    let mut command = Command::new("sh");
    command.args(["-c", "umask 077; exec \"$@\"", "sh"]).arg(tree::binaries().join("rgpuctl"));
    command.args(["cdi", "generate", "--socket", "/x", "--output"]).arg(&file);
    let outcome = run(command.arg("--libraries").arg(tree::guest_libraries()), LIMIT)?;
    ensure!(outcome.status == Some(0), "{outcome:?}");
    for (place, mode) in [("etc", 0o755), ("etc/cdi", 0o755), ("etc/cdi/rgpu.json", 0o644)] {
        let is = std::fs::metadata(folder.path().join(place))?.mode() & 0o777;
        ensure!(is == mode, "{place}: {is:o}");
    }
    Ok(())
}

#[test]
fn output_that_nobody_reads_is_no_panic() -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    let output = command.arg("doctor").stdout(writer).stderr(std::process::Stdio::piped()).spawn()?;
    let output = output.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.is_empty() && output.status.signal() == Some(libc::SIGPIPE), "{}: {said}", output.status);
    Ok(())
}

/// The output fits into a pipe, so only /dev/full shows it.
#[test]
fn a_daemon_that_cannot_print_says_so_in_one_line() -> Result<()> {
    for (daemon, words) in [
        ("rgpu-server", &["--print-config"][..]),
        ("rgpu-server", &["check", "--backend", "software"]),
        ("rgpu-server", &["--backend", "software", "--check-config", "--listen", "tcp:127.0.0.1"]),
        ("vhost-rgpu", &["--print-config"]),
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full")?;
        let mut command = Command::new(tree::binaries().join(daemon));
        let output = command.args(words).stdout(full).stderr(Stdio::piped()).spawn()?.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let told = said.starts_with(&format!("{daemon}: cannot print: ")) && said.lines().count() == 1;
        ensure!(told && output.status.code() == Some(1), "{daemon} {words:?}: {}: {said}", output.status);
    }
    Ok(())
}

#[test]
fn run_says_why_its_private_server_ended() -> Result<()> {
    // A machine with NVIDIA's driver has one that serves.
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("proves nothing: this machine has an NVIDIA GPU");
        return Ok(());
    }
    let program = built("vectorAdd")?.display().to_string();
    // A program that was connected waits for its server, for a while.
    for _ in 0..5 {
        let outcome = rgpuctl(&["run", "--backend", "cuda", "--", &program])?;
        ensure!(outcome.status != Some(0) && outcome.stderr.contains("libcuda.so.1"), "{outcome:?}");
    }
    Ok(())
}

#[test]
fn a_folder_without_libraries_is_named() -> Result<()> {
    let run_without = |folder: &Path| {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command.args(["run", "--backend", "software", "--", "true"]).env("RGPU_LIB_DIR", folder);
        run(&mut command, LIMIT)
    };
    let folder = tempfile::tempdir()?;
    let outcome = run_without(folder.path())?;
    let named = format!("RGPU_LIB_DIR={}: there is no libcuda.so.1", folder.path().display());
    ensure!(outcome.status == Some(125) && outcome.stderr.contains(&named), "{outcome:?}");
    Ok(())
}

#[test]
fn servers_that_are_no_text_are_not_ignored() -> Result<()> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["run", "--", "true"]).env("RGPU_LIB_DIR", tree::guest_libraries());
    let outcome = run(command.env("RGPU_SERVERS", OsStr::from_bytes(b"\xff")), LIMIT)?;
    let told = outcome.stderr.contains("RGPU_SERVERS is not UTF-8");
    ensure!(outcome.status == Some(125) && told, "{outcome:?}");
    Ok(())
}

/// Servers that cannot serve with what an operator has changed in their configuration.
#[test]
fn an_upgrade_to_a_server_that_cannot_serve_is_no_success() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let configure = |text: &str| std::fs::write(path("rgpu-server.toml"), text);
    let (listen, admin, config) =
        (format!("unix:{}", path("server.sock")), path("admin"), path("rgpu-server.toml"));
    let arguments = ["--listen", &listen, "--admin-socket", &admin, "--config", &config];
    configure("backend = \"software\"\n")?;
    let log = tree::logs().join("rgpuctl-upgrade").join("rgpu-server.log");
    let _server = Daemon::start("rgpu-server", arguments, &log, &folder.path().join("status"))?;
    let upgrade = || rgpuctl(&["upgrade", "--socket", &admin]);
    let serves = || {
        eventually(|| {
            let inventory = rgpuctl(&["inventory", "--server", &listen])?;
            ensure!(inventory.stdout.contains(&listen), "{inventory:?}");
            Ok(())
        })
    };
    serves()?;
    // Noticed before anything happens.
    configure("backend = \"software\"\ndevices = [7]\n")?;
    let refused = upgrade()?;
    let told = refused.stderr.contains("not upgraded: ") && refused.stderr.contains("there is no device 7");
    ensure!(refused.status == Some(125) && told, "{refused:?}");
    serves()?;
    // Noticed only by the first worker. A machine with NVIDIA's driver has one that serves.
    if !Path::new("/dev/nvidiactl").exists() {
        configure("backend = \"cuda\"\n")?;
        let failed = upgrade()?;
        let told = failed.stderr.contains("cannot start workers: ") && failed.stderr.contains("libcuda.so.1");
        ensure!(failed.status == Some(125) && told && failed.stdout.is_empty(), "{failed:?}");
    }
    // The daemon is still there, so another upgrade corrects it.
    configure("backend = \"software\"\n")?;
    let upgraded = upgrade()?;
    ensure!(upgraded.status == Some(0) && upgraded.stdout.contains(" serves in place of "), "{upgraded:?}");
    serves()
}

#[test]
fn a_machine_joins_a_server_and_runs_programs_there_until_it_is_revoked() -> Result<()> {
    let (folder, logs) = (tempfile::tempdir()?, tree::logs().join("rgpuctl-join"));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let address = format!("127.0.0.1:{}", free_port()?);
    let (listen, admin, client) = (format!("tcp:{address}"), path("admin"), path("client"));
    let arguments = [
        "--backend",
        "software",
        "--listen",
        &listen,
        "--identity",
        &path("server"),
        "--admin-socket",
        &admin,
    ];
    let log = logs.join("rgpu-server.log");
    let _server = Daemon::start("rgpu-server", arguments, &log, &folder.path().join("status"))?;
    let program = built("vectorAdd")?.display().to_string();
    let vector_add = |protection: &[&str]| {
        let words = [&["run", "--server", &address][..], protection, &["--", &program]].concat();
        rgpuctl(&words)
    };
    let protected = ["--identity", client.as_str()];
    let refusal = vector_add(&protected)?;
    ensure!(refusal.stderr.contains("has no key") && refusal.stderr.contains("rgpuctl join"), "{refusal:?}");

    // Another server may have an address of this one, such as that of a bridge.
    let another = format!("127.0.0.1:{}", free_port()?);
    let other_identity = path("other");
    let listens = format!("tcp:{another}");
    let other = ["--backend", "software", "--listen", &listens, "--identity", &other_identity];
    let _other =
        Daemon::start("rgpu-server", other, &logs.join("other.log"), &folder.path().join("status2"))?;
    let both = ["--address", &another, "--address", &address];
    let enrolled = rgpuctl(&[&["enroll", "host1", "--socket", &admin][..], &both].concat())?;
    let mut words: Vec<&str> = enrolled.stdout.split_whitespace().collect();
    ensure!(words.len() == 3 && words[..2] == ["rgpuctl", "join"], "{enrolled:?}");
    ensure!(!enrolled.stderr.contains("is known already"), "{enrolled:?}");
    words.extend(protected);
    let joined = rgpuctl(&words[1..])?;
    ensure!(joined.status == Some(0) && joined.stdout.contains("\"host1\""), "{joined:?}");
    vector_add(&protected)?.verdict("vectorAdd")?;
    let text = std::fs::read_to_string(&log)?;
    ensure!(text.contains("session begins") && text.contains("principal=\"host1\""), "{text}");
    // Whoever is about to give its name to another machine is told what that does.
    let again = rgpuctl(&["enroll", "host1", "--socket", &admin])?;
    ensure!(again.stderr.contains("host1 is known already (joined 0 days ago)"), "{again:?}");

    let refusal = vector_add(&["--insecure"])?;
    ensure!(refusal.stderr.contains("leave --insecure out"), "{refusal:?}");
    // The machine may not have heard that it joined, and show its token again. Nobody else may. On standard
    // input, no other user of the machine sees it.
    for place in [&["-"][..], &[]] {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command.arg("join").args(place).args(protected).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut joins = command.spawn()?;
        joins.stdin.take().context("its input")?.write_all(format!("{}\n", words[2]).as_bytes())?;
        let again = joins.wait_with_output()?;
        let said = String::from_utf8_lossy(&again.stdout).into_owned();
        ensure!(again.status.success() && said.contains("\"host1\""), "{place:?}: {}: {said}", again.status);
    }
    let stranger = path("stranger");
    let again = rgpuctl(&[&words[1..3], &["--identity", &stranger]].concat())?;
    ensure!(again.status != Some(0) && again.stderr.contains("was used already"), "{again:?}");
    let listed = rgpuctl(&["clients", "--socket", &admin])?;
    ensure!(listed.stdout.contains("host1"), "{listed:?}");
    let revoked = rgpuctl(&["revoke", "host1", "--socket", &admin])?;
    ensure!(revoked.status == Some(0), "{revoked:?}");
    let refusal = vector_add(&protected)?;
    ensure!(refusal.stderr.contains("does not know this client's key"), "{refusal:?}");
    Ok(())
}
