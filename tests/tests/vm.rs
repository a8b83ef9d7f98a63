//! The whole path: CUDA programs in a booted guest, `vhost-rgpu` and `rgpu-server` on this machine, and what
//! happens when one of them is killed.
//!
//! Without KVM, guests are emulated, so each test does many things in one boot.

#[path = "vm/killed.rs"]
mod killed;
#[path = "vm/stop.rs"]
mod stop;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::link::{Hello, Welcome};
use rgpu_tests::daemons::Daemon;
use rgpu_tests::driver_bed::{LONG, check_unpinned};
use rgpu_tests::guest::{self, Holdings, Host, Options};
use rgpu_tests::machine::{Builder, Machine, Output};
use rgpu_tests::programs::{self, Device, Program};
use rgpu_tests::tree;
use tempfile::TempDir;

/// The daemons and a guest that they serve.
struct Bed {
    host: Host,
    machine: Machine,
}

impl Bed {
    fn start(name: &str, transport: &'static str) -> Result<Bed> {
        Bed::with(Host::start(&format!("vm/{name}-{transport}"), Options::software(transport))?)
    }

    fn with(host: Host) -> Result<Bed> {
        let machine = boot(&host)?;
        Ok(Bed { host, machine })
    }

    /// Runs a program of the manifest, which must pass.
    fn passes(&self, name: &str) -> Result<Output> {
        let output = self.machine.run(name, LONG)?;
        passed(name, &output)
            .with_context(|| format!("the daemons' logs are in {}", self.host.logs().display()))?;
        Ok(output)
    }

    /// The daemons' idle state after a program has used them: the baseline for everything that follows.
    fn base_line(&self) -> Result<Holdings> {
        self.passes("vectorAdd")?;
        self.host.at_rest()
    }

    /// Checks that nothing is left of earlier programs on the host and in the guest, and that the next
    /// program passes.
    fn check_after(&self, what: &str, before: &Holdings) -> Result<()> {
        let check = || -> Result<()> {
            self.host.check_settled(before)?;
            self.check_guest()?;
            self.passes("vectorAdd")?;
            self.host.check_settled(before)
        };
        check().with_context(|| format!("after: {what}"))
    }

    /// Checks that no page is pinned in the guest and that its kernel has logged no complaint.
    fn check_guest(&self) -> Result<()> {
        check_unpinned(&self.machine)?;
        self.machine.check_console()
    }
}

/// The programs that these tests run by name.
const SOME: [&str; 10] = [
    "vectorAdd",
    "reduction",
    "atomics",
    "templates",
    "globals",
    "multi",
    "driver_ptx",
    "kill_me",
    "launch_storm",
    "device_list",
];

/// A guest with [`SOME`] programs, without a device yet. It boots sooner than one with all of them.
fn guest_with_some() -> Result<Builder> {
    let mut programs = programs::portable()?;
    programs.retain(|program| SOME.contains(&program.name.as_str()));
    Ok(guest::builder(&programs))
}

fn boot(host: &Host) -> Result<Machine> {
    guest_with_some()?.rgpu_socket(host.socket()).boot()
}

fn passed(name: &str, output: &Output) -> Result<()> {
    let text = output.text();
    let last = text.lines().last().unwrap_or_default();
    let rest = last.strip_prefix("PASS ").and_then(|rest| rest.strip_prefix(name));
    ensure!(
        output.success() && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')),
        "{name} did not pass in the guest: {output}"
    );
    Ok(())
}

/// The only line of rgpu's libraries on standard error, apart from lines about waiting for the server or a
/// worker.
fn said(output: &Output) -> Result<String> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines = programs::told_beside_waits(&stderr);
    let lines: Vec<&str> = lines.into_iter().filter(|line| line.starts_with("rgpu: ")).collect();
    match lines.as_slice() {
        [line] => Ok((*line).to_owned()),
        _ => bail!("expected one line from rgpu: {output}"),
    }
}

/// Checks that a program failed and that rgpu said why in one line that contains all of `words`.
fn failed_saying(output: &Output, words: &[&str]) -> Result<()> {
    ensure!(!output.success(), "it should have failed: {output}");
    let line = said(output)?;
    for word in words {
        ensure!(line.contains(word), "{word:?} is not in: {line}");
    }
    Ok(())
}

/// Another server on this machine, and a `vhost-rgpu` that gives a guest the devices of a host's server and
/// of this one.
struct Pool {
    folder: TempDir,
    _daemons: [Daemon; 2],
}

impl Pool {
    fn start(host: &Host) -> Result<Pool> {
        let folder = tempfile::Builder::new().prefix("rgpu-vm-").tempdir()?;
        let daemon = |name: &str, arguments: &[&str]| {
            let status = folder.path().join(format!("{name}.status"));
            Daemon::start(name, arguments, &host.logs().join(format!("{name}-pool.log")), &status)
        };
        let listen = format!("unix:{}", folder.path().join("server.sock").display());
        // A device that is not its server's first has another UUID than the other server's.
        let devices = ["--backend", "software", "--software-devices", "2", "--workers", "2"];
        let server = daemon("rgpu-server", &[&["--listen", &listen], &devices[..]].concat())?;
        let (socket, second) = (folder.path().join("vm.sock").display().to_string(), format!("{listen}/1"));
        let both = ["--insecure", "--socket", &socket, "--server", host.address(), "--server", &second];
        let bridge = daemon("vhost-rgpu", &both)?;
        Ok(Pool { folder, _daemons: [server, bridge] })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }
}

/// A guest does the same whatever is behind its host, and the part `programs` runs each program over each
/// transport. So each runs once here: every second one over this one, or all with `RGPU_VM_PROGRAMS=all`.
fn programs_pass(transport: &'static str, remainder: usize) -> Result<()> {
    let host = Host::start(&format!("vm/programs-{transport}"), Options::software(transport))?;
    let pool = Pool::start(&host)?;
    let mut programs = programs::manifest()?;
    programs.retain(|program| program.device != Device::Cuda);
    let machine = guest::builder(&programs).rgpu_socket(host.socket()).rgpu_socket(pool.socket()).boot()?;
    let bed = Bed { host, machine };
    let before = bed.base_line()?;
    let mut failures = Vec::new();
    let mut run = |name: &str, command: &str| {
        let begin = Instant::now();
        let output = bed.machine.run(command, LONG);
        let result = output.and_then(|output| passed(name, &output)).with_context(|| format!("{command:?}"));
        let verdict = if result.is_ok() { "passed" } else { "FAILED" };
        println!("{transport}: {command}: {verdict}, {:.1} s", begin.elapsed().as_secs_f64());
        failures.extend(result.err().map(|error| format!("{error:#}")));
    };
    let all = std::env::var("RGPU_VM_PROGRAMS").is_ok_and(|which| which == "all");
    for (number, Program { name, args, .. }) in programs::portable()?.into_iter().enumerate() {
        if all || number % 2 == remainder {
            run(&name, format!("{name} {}", args.join(" ")).trim_end());
        }
    }
    // With the devices of two servers.
    for name in ["two_servers", "nvidia_smi"] {
        run(name, &format!("RGPU_DEVICE=/dev/rgpu1 {name}"));
    }
    ensure!(failures.is_empty(), "{} programs failed\n{}", failures.len(), failures.join("\n"));
    bed.check_after("all programs", &before)
}

#[test]
fn programs_pass_in_a_guest_over_local() -> Result<()> {
    programs_pass("local", 0)
}

#[test]
fn programs_pass_in_a_guest_over_tcp() -> Result<()> {
    programs_pass("tcp", 1)
}

/// A counter from the output of `RGPU_STATS=1`.
fn counted(output: &Output, name: &str) -> Result<u64> {
    programs::counted(&String::from_utf8_lossy(&output.stderr), name)
}

/// A launch loop in a guest, with both sides looking for work for `poll_us` before they sleep. Fewer than
/// `percent` of a hundred commands may ring a doorbell or raise an interrupt.
///
/// A side that finds no work for that long sleeps, and a busy machine may take the other side's processor
/// away for longer. So the loop runs up to [`ATTEMPTS`] times until one run rings that seldom. If each launch
/// rang, every run would show it.
fn launches_need_no_exit(transport: &'static str, poll_us: Option<u32>, percent: u64) -> Result<()> {
    let options = Options { poll_us, ..Options::software(transport) };
    let bed = Bed::with(Host::start(&format!("vm/launches-{transport}"), options)?)?;
    bed.passes("vectorAdd")?;
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS {
        let (commands, rings) = run_launch_loop(&bed, transport, poll_us)?;
        if rings.iter().all(|count| count * 100 < commands * percent) {
            return Ok(());
        }
        seen.push(format!("{commands} commands: {} doorbells, {} interrupts", rings[0], rings[1]));
    }
    bail!("in none of {ATTEMPTS} runs fewer than {percent} of a hundred commands rang:\n{}", seen.join("\n"))
}

/// How many runs of a launch loop may ring too often before that is a failure.
const ATTEMPTS: usize = 12;

/// Runs a launch loop. Returns its commands, and how many doorbells and interrupts there were meanwhile.
fn run_launch_loop(bed: &Bed, transport: &str, poll_us: Option<u32>) -> Result<(u64, [u64; 2])> {
    const LAUNCHES: u64 = 20_000;
    bed.host.settled()?;
    let before = (
        guest::interrupts(&bed.machine)?,
        bed.host.bridge_total("doorbells")?,
        bed.host.bridge_total("wakes")?,
    );
    let output = bed.machine.run(&format!("RGPU_STATS=1 launch_storm {LAUNCHES}"), LONG)?;
    passed("launch_storm", &output)?;
    bed.host.settled()?;
    let interrupts = guest::interrupts(&bed.machine)? - before.0;
    let (commands, kicks) = (counted(&output, "commands")?, counted(&output, "doorbells")?);
    println!(
        "{transport}, polling {}: {commands} commands, {kicks} doorbells, {interrupts} interrupts (vhost-rgpu: {} doorbells, {} wakes; \
         guest: {} sleeps, ring full {} times); {}",
        poll_us.map_or_else(|| "as usual".to_owned(), |poll| format!("{poll} µs")),
        bed.host.bridge_total("doorbells")? - before.1,
        bed.host.bridge_total("wakes")? - before.2,
        counted(&output, "sleeps")?,
        counted(&output, "ring_full")?,
        output.text().lines().last().unwrap_or_default()
    );
    // Twice as many launches as asked for: the counted ones, and empty ones.
    ensure!(commands > 2 * LAUNCHES, "only {commands} commands for {LAUNCHES} launches of each kind");
    Ok((commands, [kicks, interrupts]))
}

/// A launch in an emulated guest may take longer than both sides usually poll, and on a busy machine each
/// side waits for its turn longer than that now and then. So these bounds are generous.
fn launches_need_no_exit_over(transport: &'static str) -> Result<()> {
    launches_need_no_exit(transport, Some(10_000), 10)?;
    launches_need_no_exit(transport, None, 25)
}

#[test]
fn a_launch_loop_rings_no_doorbell_for_each_launch_over_local() -> Result<()> {
    launches_need_no_exit_over("local")
}

#[test]
fn a_launch_loop_rings_no_doorbell_for_each_launch_over_tcp() -> Result<()> {
    launches_need_no_exit_over("tcp")
}

/// Starts `kill_me` and waits until it is in the middle of `part`.
fn start_kill_me(machine: &Machine, part: &str) -> Result<rgpu_tests::machine::Process> {
    let process = machine.spawn(&format!("exec kill_me {part}"))?;
    process.wait_for(&format!("RUNNING {part}"), LONG)?;
    Ok(process)
}

/// How much a daemon's memory may grow, in KiB: its allocator keeps some. Concurrent sessions need more than
/// consecutive ones.
const GROWTH: u64 = 24 << 10;

fn nothing_is_left_of_a_program_or_a_guest(transport: &'static str) -> Result<()> {
    let bed = Bed::start("leftovers", transport)?;
    let before = bed.base_line()?;
    let memory = bed.host.memory()?;

    for part in ["copy", "kernel"] {
        for _ in 0..3 {
            let process = start_kill_me(&bed.machine, part)?;
            process.kill()?;
            ensure!(process.wait(LONG)?.status == 128 + 9, "kill_me did not die of SIGKILL");
        }
        bed.check_after(&format!("kill -9 in the middle of a {part}"), &before)?;
    }

    // A session whose program does nothing costs nothing.
    let process = start_kill_me(&bed.machine, "copy")?;
    bed.machine.check("killall -STOP kill_me", LONG)?;
    // Unfinished work ends first.
    let deadline = Instant::now() + LONG;
    loop {
        let before = bed.host.cpu_ticks()?;
        std::thread::sleep(Duration::from_secs(3));
        let after = bed.host.cpu_ticks()?;
        let ticks: u64 = after.iter().map(|(pid, ticks)| ticks - before.get(pid).unwrap_or(&0)).sum();
        if ticks < 15 {
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "an idle session takes {ticks} hundredths of a second of CPU in three seconds"
        );
    }
    process.kill()?;
    ensure!(process.wait(LONG)?.status == 128 + 9, "kill_me did not die of SIGKILL");
    bed.check_after("kill -9 of a stopped program", &before)?;

    // With an unknown word it calls _Exit while it has device memory, pinned memory and a module.
    ensure!(bed.machine.run("kill_me nonsense", LONG)?.status == 1, "kill_me knows the word nonsense");
    bed.check_after("a program that cleans nothing up", &before)?;

    let several =
        ["vectorAdd", "reduction", "atomics", "templates", "globals", "multi", "driver_ptx", "kill_me"];
    for (count, what) in [(2, "two programs at once"), (8, "eight programs at once")] {
        let processes: Vec<_> = several[..count]
            .iter()
            .map(|name| Ok((name, bed.machine.spawn(name)?)))
            .collect::<Result<_>>()?;
        for (name, process) in processes {
            passed(name, &process.wait(LONG)?)?;
        }
        bed.check_after(what, &before)?;
    }

    // The daemons keep something of these sessions only in their logs, not in memory.
    for (now, then) in bed.host.memory()?.into_iter().zip(memory) {
        ensure!(now < then + GROWTH, "a daemon has grown from {then} KiB to {now} KiB");
    }

    let in_copy = start_kill_me(&bed.machine, "copy")?;
    let in_kernel = start_kill_me(&bed.machine, "kernel")?;
    bed.machine.reboot()?;
    drop((in_copy, in_kernel));
    bed.check_after("a reboot of the guest", &before)?;

    let in_copy = start_kill_me(&bed.machine, "copy")?;
    let in_kernel = start_kill_me(&bed.machine, "kernel")?;
    bed.machine.kill9()?;
    drop((in_copy, in_kernel));
    bed.host.settled()?;
    let Bed { host, machine } = bed;
    drop(machine);
    let bed = Bed { machine: boot(&host)?, host };
    bed.check_after("kill -9 of QEMU", &before)
}

#[test]
fn nothing_is_left_of_a_program_or_a_guest_over_local() -> Result<()> {
    nothing_is_left_of_a_program_or_a_guest("local")
}

#[test]
fn nothing_is_left_of_a_program_or_a_guest_over_tcp() -> Result<()> {
    nothing_is_left_of_a_program_or_a_guest("tcp")
}

/// Waits until another device process than `before` has taken over the guest's only session.
fn goes_on(host: &Host, before: i32) -> Result<()> {
    let deadline = Instant::now() + LONG;
    loop {
        let status = host.bridge()?.status()?;
        let rows = status["sessions"].as_array().context("the status has no sessions")?;
        let other = rows.first().is_some_and(|row| row["process"] != before);
        // More than once if the machine is so busy that a link was given up as well.
        let resumed = other && rows[0]["resumed"].as_u64() >= Some(1);
        if resumed && rows[0]["state"] == "ready" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the session does not go on: {status:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills the guest's device process once the program has a session; it must pass nevertheless.
fn passes_without_its_device_process(host: &Host, machine: &Machine, program: &str) -> Result<()> {
    host.settled()?;
    let process = machine.spawn(&format!("{program}; echo STATUS $?"))?;
    let deadline = Instant::now() + LONG;
    while host.busy_workers()?.is_empty() && !String::from_utf8_lossy(&process.stdout()).contains("STATUS") {
        ensure!(Instant::now() < deadline, "{program} gets no session");
    }
    kill(Pid::from_raw(host.device_process()?), Signal::SIGKILL)?;
    let output = process.wait(LONG)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(said.contains("STATUS 0") && said.contains("PASS"), "{program}: {output}");
    Ok(())
}

/// What happens to a program and to the next one when a part of the host side is killed. Returns host and
/// guest after the loss of `vhost-rgpu`, which QEMU does not handle.
fn a_lost_host_side_is_told(transport: &'static str) -> Result<Bed> {
    let mut host = Host::start(&format!("vm/lost-{transport}"), Options::software(transport))?;
    let machine = boot(&host)?;
    passed("vectorAdd", &machine.run("vectorAdd", LONG)?)?;
    let again = |host: &Host, what: &str| -> Result<()> {
        let output = machine.run("vectorAdd", LONG)?;
        passed("vectorAdd", &output).with_context(|| format!("after: {what}"))?;
        host.settled()?;
        machine.check_console()
    };

    host.settled()?;
    let process = start_kill_me(&machine, "kernel")?;
    let workers = host.busy_workers()?;
    ensure!(workers.len() == 1, "{workers:?} serve one program");
    kill(Pid::from_raw(workers[0]), Signal::SIGKILL)?;
    failed_saying(&process.wait(LONG)?, &["is lost", "server"])?;
    again(&host, "kill -9 of a worker")?;

    let process = start_kill_me(&machine, "kernel")?;
    host.kill_server()?;
    failed_saying(&machine.run("device_list", LONG)?, &["no GPU server could be reached", "rgpu-server"])?;
    // Over tcp the program may wait for the server to return; the new server does not know its session.
    host.start_server()?;
    failed_saying(&process.wait(LONG)?, &["is lost", "server"])?;
    again(&host, "kill -9 of rgpu-server")?;

    for part in ["kernel", "copy"] {
        host.settled()?;
        let process = start_kill_me(&machine, part)?;
        let before = host.device_process()?;
        kill(Pid::from_raw(before), Signal::SIGKILL)?;
        goes_on(&host, before)?;
        process.kill()?;
        ensure!(process.wait(LONG)?.status == 128 + 9, "kill_me did not die of SIGKILL");
        again(&host, "kill -9 of the guest's device process")?;
        ensure!(host.device_process()? != before, "another device process serves the guest");
    }
    for program in ["launch_storm 5000", "reduction", "templates", "multi"] {
        passes_without_its_device_process(&host, &machine, program)?;
    }
    host.settled()?;
    machine.check_console()?;

    let process = start_kill_me(&machine, "kernel")?;
    let begin = Instant::now();
    host.kill_bridge()?;
    failed_saying(&process.wait(LONG)?, &["is lost", "/dev/rgpu0", "vhost-rgpu"])?;
    println!(
        "{transport}: a program in the guest knew of vhost-rgpu's end after {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(Bed { host, machine })
}

#[test]
fn a_guest_program_reports_a_lost_host_over_local() -> Result<()> {
    a_lost_host_side_is_told("local").map(drop)
}

#[test]
fn a_guest_program_reports_a_lost_host_over_tcp() -> Result<()> {
    let Bed { mut host, machine } = a_lost_host_side_is_told("tcp")?;
    // The next program gets no answer either, until the guest is restarted.
    let output = machine.run("device_list", LONG)?;
    failed_saying(&output, &["/dev/rgpu0", "does not respond", "vhost-rgpu"])?;
    machine.check_console()?;
    drop(machine);
    host.start_bridge()?;
    let machine = boot(&host)?;
    passed("vectorAdd", &machine.run("vectorAdd", LONG)?)?;
    host.settled().map(drop)
}

#[test]
fn a_native_program_reports_a_lost_daemon() -> Result<()> {
    for transport in ["local", "tcp"] {
        let mut host = Host::start(&format!("vm/native-{transport}"), Options::software(transport))?;
        let mut child = Command::new(programs::built("kill_me")?)
            .arg("kernel")
            .env("LD_LIBRARY_PATH", tree::guest_libraries())
            .env("RGPU_SOCKET", host.native_socket())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let deadline = Instant::now() + LONG;
        while host.busy_workers()?.is_empty() {
            ensure!(Instant::now() < deadline, "kill_me begins no session");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut begun = [0; 14];
        child.stdout.as_mut().context("no pipe")?.read_exact(&mut begun)?;
        ensure!(begun == *b"RUNNING kernel", "{:?}", String::from_utf8_lossy(&begun));
        host.kill_bridge()?;
        let ended = Instant::now() + LONG;
        while child.try_wait()?.is_none() {
            if Instant::now() > ended {
                child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = child.wait_with_output()?;
        let output = Output {
            status: output.status.code().unwrap_or(128 + 9),
            stdout: output.stdout,
            stderr: output.stderr,
        };
        ensure!(output.status == 1, "over {transport}: {output}");
        failed_saying(&output, &["is lost", "vhost-rgpu"])?;
    }
    Ok(())
}

/// A listener that answers each connection like an rgpu-server of version 99.
fn server_of_another_version() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut hello = [0; size_of::<Hello>()];
            if stream.read_exact(&mut hello).is_err() {
                continue;
            }
            let mut welcome = [0; size_of::<Welcome>()];
            welcome[..8].copy_from_slice(&hello[..8]);
            welcome[8] = 99;
            // The other end may not read more.
            let _ = stream.write_all(&welcome);
        }
    });
    Ok(port)
}

#[test]
fn a_missing_part_is_reported_in_one_line() -> Result<()> {
    let host = Host::start("vm/missing", Options::software("local"))?;
    let folder = tempfile::tempdir()?;
    let daemon = |name: &str, server: String| -> Result<Daemon> {
        let socket = folder.path().join(name);
        let arguments = [
            "--insecure".as_ref(),
            "--socket".as_ref(),
            socket.as_os_str(),
            "--server".as_ref(),
            server.as_ref(),
        ];
        let log = tree::logs().join(format!("vm/missing/{name}.log"));
        Daemon::start("vhost-rgpu", arguments, &log, &folder.path().join(format!("{name}.status")))
    };
    let nobody = guest::free_port()?;
    let _down = daemon("down", format!("tcp:127.0.0.1:{nobody}"))?;
    let _other = daemon("other", format!("tcp:127.0.0.1:{}", server_of_another_version()?))?;
    let machine = guest_with_some()?
        .rgpu_socket(host.socket())
        .rgpu_socket(folder.path().join("down"))
        .rgpu_socket(folder.path().join("other"))
        .boot()?;

    passed("device_list", &machine.run("device_list", LONG)?)?;
    let output = machine.run("RGPU_DEVICE=/dev/rgpu1 device_list", LONG)?;
    failed_saying(
        &output,
        &["/dev/rgpu1", "no GPU server could be reached", "rgpu-server", &format!("127.0.0.1:{nobody}")],
    )?;
    let output = machine.run("RGPU_DEVICE=/dev/rgpu2 device_list", LONG)?;
    failed_saying(
        &output,
        &["/dev/rgpu2", "version 99", &format!("version {}", protocol::VERSION), "install the same release"],
    )?;

    machine.check("chmod 600 /dev/rgpu0", LONG)?;
    let output = machine.run("su -s /bin/sh user -c device_list", LONG)?;
    failed_saying(&output, &["/dev/rgpu0", "permission denied", "group"])?;
    passed("device_list", &machine.run("chmod 666 /dev/rgpu0; su -s /bin/sh user -c device_list", LONG)?)?;

    machine.check("rmmod virtio_rgpu", LONG)?;
    failed_saying(&machine.run("device_list", LONG)?, &["modprobe virtio_rgpu", "/dev/rgpu0"])?;
    let output = machine.run("RGPU_SOCKET=/run/nobody.sock device_list", LONG)?;
    failed_saying(&output, &["/run/nobody.sock", "vhost-rgpu"])?;
    machine.check_console()
}

/// Where `qemu-configs` are.
fn configs() -> PathBuf {
    tree::root().join("qemu-configs")
}

#[test]
fn the_readconfig_file_gives_a_guest_its_device() -> Result<()> {
    let host = Host::start("vm/readconfig", Options::software("local"))?;
    let text = std::fs::read_to_string(configs().join("rgpu.cfg"))?;
    let socket = host.socket().display().to_string();
    for value in ["\"/run/rgpu/vm-guest1.sock\"", "\"4294967296\""] {
        ensure!(text.contains(value), "rgpu.cfg has no {value}");
    }
    let text =
        text.replace("/run/rgpu/vm-guest1.sock", &socket).replace("4294967296", &(1024u64 << 20).to_string());
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("rgpu.cfg");
    std::fs::write(&file, text)?;
    let machine = guest_with_some()?.hardware_from_config(file).boot()?;
    passed("vectorAdd", &machine.run("vectorAdd", LONG)?)
}

#[test]
fn the_script_gives_a_guest_its_device() -> Result<()> {
    let host = Host::start("vm/script", Options::software("local"))?;
    let socket = host.socket().display().to_string();
    let environment = [("RGPU_SOCKET_PATH", socket), ("MEMORY", "1G".to_owned())];
    let machine = guest_with_some()?.hardware_from_script(configs().join("qemu.sh"), environment).boot()?;
    passed("vectorAdd", &machine.run("vectorAdd", LONG)?)
}
