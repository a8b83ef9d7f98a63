//! One program with the devices of two servers, natively: over shared memory, over TCP, and with one of each.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rgpu_tests::programs;
use rgpu_tests::tree;
use support::{Rig, Transport, eventually};

const PROGRAM: &str = "two_servers";

/// A server's address by a transport.
fn address(rig: &Rig, transport: Transport) -> String {
    match transport {
        Transport::Local => format!("unix:{}", rig.server_socket().display()),
        Transport::Tcp => format!("127.0.0.1:{}", rig.port),
    }
}

/// `rgpuctl run` of a program with these servers.
fn with_servers(servers: &[String], program: &str) -> Result<Command> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["run", "--insecure"]).env("RGPU_LIB_DIR", tree::guest_libraries());
    for server in servers {
        command.args(["--server", server]);
    }
    command.arg("--").arg(programs::built(program)?);
    Ok(command)
}

fn two(name: &str) -> Result<[Rig; 2]> {
    let second = Rig::with(&format!("{name}-2"), &["--software-devices", "3"], &[])?;
    Ok([Rig::start(&format!("{name}-1"))?, second])
}

/// The servers by these transports: the first one's only device, and the third of the second one's, which has a number and a UUID of its own.
fn servers(rigs: &[Rig; 2], transports: [Transport; 2]) -> [String; 2] {
    let [first, second] = [0, 1].map(|place| address(&rigs[place], transports[place]));
    [first, format!("{second}/2")]
}

#[test]
fn a_program_uses_the_devices_of_two_servers() -> Result<()> {
    let rigs = two("pool")?;
    let ways = [
        [Transport::Local, Transport::Local],
        [Transport::Tcp, Transport::Local],
        [Transport::Tcp, Transport::Tcp],
    ];
    for transports in ways {
        let outcome =
            programs::run(&mut with_servers(&servers(&rigs, transports), PROGRAM)?, programs::LIMIT)?;
        outcome.verdict(PROGRAM).with_context(|| format!("over {transports:?}"))?;
    }
    // The program's own choice and order, by number and by UUID. A window of addresses is then of another device.
    let servers = servers(&rigs, [Transport::Tcp, Transport::Local]);
    let uuid = |number: u8| format!("GPU-72677075-2d73-6f66-7477-6172652d00{number:02x}");
    for visible in ["1,0".to_owned(), format!("{},{}", uuid(2), uuid(0))] {
        let mut program = with_servers(&servers, PROGRAM)?;
        let outcome = programs::run(program.env("CUDA_VISIBLE_DEVICES", &visible), programs::LIMIT)?;
        outcome.verdict(PROGRAM).with_context(|| format!("with CUDA_VISIBLE_DEVICES={visible}"))?;
    }
    // Management programs.
    for program in ["nvidia_smi", "nvml"] {
        programs::run(&mut with_servers(&servers, program)?, programs::LIMIT)?.verdict(program)?;
    }
    Ok(())
}

#[test]
fn if_a_kernel_cannot_reach_memory_of_the_other_server_only_its_device_has_the_error() -> Result<()> {
    let rigs = two("pool-unreachable")?;
    for transport in support::TRANSPORTS {
        let servers = servers(&rigs, [transport, transport]);
        let mut command = with_servers(&servers, PROGRAM)?;
        programs::run(command.arg("unreachable"), programs::LIMIT)?
            .verdict(PROGRAM)
            .with_context(|| format!("over {transport:?}"))?;
        let mut command = with_servers(&servers, PROGRAM)?;
        let outcome = programs::run(command.arg("pinned"), programs::LIMIT)?;
        let reached = outcome.verdict(PROGRAM).with_context(|| format!("over {transport:?}"))?;
        println!("pinned memory over {transport:?}: kernels of {reached}");
    }
    Ok(())
}

/// A pair of servers each of which may connect to the other.
fn connected(name: &str) -> Result<[Rig; 2]> {
    let mut first = Rig::start(&format!("{name}-1"))?;
    let mut allowed = Vec::new();
    for transport in support::TRANSPORTS {
        allowed.extend(["--direct-to".to_owned(), address(&first, transport)]);
    }
    let allowed: Vec<&str> = allowed.iter().map(String::as_str).collect();
    let second =
        Rig::with(&format!("{name}-2"), &[["--software-devices", "3"].as_slice(), &allowed].concat(), &[])?;
    let allowed = support::TRANSPORTS.map(|transport| address(&second, transport));
    first.restart_server_with(&allowed.each_ref().map(|address| ["--direct-to", address]).concat())?;
    Ok([first, second])
}

/// A counter of the one session that a server has had.
fn counter(rig: &Rig, name: &str) -> Result<u64> {
    let log = rig.server.log_text();
    let last = log.lines().rev().find_map(|line| line.split_once(&format!(" {name}="))?.1.split(' ').next());
    let last = last.with_context(|| format!("the log has no {name}:\n{log}"))?;
    last.trim().parse().with_context(|| format!("{name}={last:?}"))
}

#[test]
fn copies_between_servers_pass_from_worker_to_worker() -> Result<()> {
    for transport in support::TRANSPORTS {
        let rigs = connected("pool-direct")?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?;
        let outcome = programs::run(command.arg("direct"), programs::LIMIT)?;
        let said = outcome.verdict(PROGRAM).with_context(|| format!("over {transport:?}"))?;
        let bytes: u64 = said.split(' ').next().context("no number")?.parse()?;
        for rig in &rigs {
            eventually(|| {
                let direct = counter(rig, "bytes_direct")?;
                ensure!(direct == 2 * bytes, "{direct} bytes where {bytes} were copied each way");
                let client = counter(rig, "bytes_in")? + counter(rig, "bytes_out")?;
                ensure!(client < 1 << 20, "{client} bytes were exchanged with the client");
                Ok(())
            })?;
        }
        // Everything else works as well, and copies of all kinds take this way.
        programs::run(&mut with_servers(&servers(&rigs, [transport, transport]), PROGRAM)?, programs::LIMIT)?
            .verdict(PROGRAM)
            .with_context(|| format!("over {transport:?}"))?;
    }
    Ok(())
}

/// The program's next line.
fn line(program: &mut Child) -> Result<String> {
    let stdout = program.stdout.as_mut().context("the program's output is not read")?;
    let mut line = String::new();
    BufReader::with_capacity(1, stdout).read_line(&mut line)?;
    Ok(line)
}

#[test]
fn if_a_server_is_lost_the_other_ones_devices_go_on() -> Result<()> {
    // The program loses its second device: once the second server's, and once the first one's.
    for (transport, lost, visible) in [(Transport::Local, 1, "0,1"), (Transport::Tcp, 0, "1,0")] {
        let rigs = two("pool-lost")?;
        let servers = servers(&rigs, [transport, transport]);
        let mut command = with_servers(&servers, PROGRAM)?;
        command.arg("lost").env("RGPU_LOST_AFTER", "2").env("CUDA_VISIBLE_DEVICES", visible);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = command.spawn()?;
        let first = line(&mut program)?;
        ensure!(first == "READY\n", "{first:?}");
        rigs[lost].server.signal(Signal::SIGKILL)?;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        program.stdout.take().context("stdout")?.read_to_string(&mut stdout)?;
        program.stderr.take().context("stderr")?.read_to_string(&mut stderr)?;
        let status = program.wait()?;
        ensure!(
            status.success() && stdout.contains("PASS two_servers the other server's devices go on"),
            "over {transport:?}: {status}: {stdout}{stderr}"
        );
    }
    Ok(())
}

#[test]
fn the_server_gives_the_devices_that_are_asked_for_and_says_which_it_has_not() -> Result<()> {
    let rig = Rig::with("pool-devices", &["--software-devices", "3"], &[])?;
    let server = address(&rig, Transport::Tcp);
    let devices = |server: String| -> Result<String> {
        let outcome = programs::run(&mut with_servers(&[server], "device_list")?, programs::LIMIT)?;
        Ok(outcome.verdict("device_list")?.to_owned())
    };
    let all = devices(server.clone())?;
    let some = devices(format!("{server}/2,0"))?;
    ensure!((all.as_str(), some.as_str()) == ("3 device(s)", "2 device(s)"), "{all:?}, {some:?}");
    let refused =
        programs::run(&mut with_servers(&[format!("{server}/7")], "device_list")?, programs::LIMIT)?;
    ensure!(refused.stderr.contains("asks for device 7"), "{}", refused.stderr);
    Ok(())
}

#[test]
fn programs_name_only_the_servers_that_the_host_allows() -> Result<()> {
    let other = Rig::with("pool-named-other", &["--software-devices", "3"], &[])?;
    let named = address(&other, Transport::Tcp);
    let rig = Rig::with("pool-named", &[], &["--named-servers", &named])?;
    let run = |servers: &str| -> Result<programs::Outcome> {
        let mut program = rig.program(Transport::Tcp, PROGRAM)?;
        programs::run(program.env("RGPU_SERVERS", servers), programs::LIMIT)
    };
    let both = format!("{} {named}/2", address(&rig, Transport::Tcp));
    run(&both)?.verdict(PROGRAM)?;
    let refused = run("127.0.0.1:1")?;
    ensure!(refused.stderr.contains("RGPU_SERVERS names tcp:127.0.0.1:1"), "{}", refused.stderr);
    eventually(|| {
        let status = other.server.status()?;
        ensure!(status["sessions"].as_array().is_none_or(Vec::is_empty), "{status}");
        Ok(())
    })
}
