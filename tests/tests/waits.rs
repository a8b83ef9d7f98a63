//! Sessions whose driver blocks its caller as NVIDIA's does: when a device's queue is full, and when code is
//! loaded or memory allocated while work is running. The software GPU imitates that (`--software-imitate`).
//! Everything that a stream waits for must reach the server even though the thread that executes commands is
//! blocked in such a call.

mod support;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use protocol::fuzzing::Random;
use rgpu_tests::programs;
use support::{Rig, TRANSPORTS, Transport, on_this_host};

fn passes(
    rig: &Rig,
    transport: Transport,
    name: &str,
    arguments: &[&str],
    bridge: Option<u32>,
) -> Result<()> {
    let mut command = rig.program(transport, name)?;
    command.args(arguments);
    if let Some(pid) = bridge {
        command.env("BRIDGE_PID", pid.to_string());
    }
    let outcome = programs::run(&mut command, programs::LIMIT)?;
    outcome.verdict(name).map(drop).with_context(|| format!("{name} {arguments:?} over {transport:?}"))
}

#[test]
fn a_blocked_call_does_not_keep_the_data_it_needs_from_arriving() -> Result<()> {
    let mut rig = Rig::with("waits-batched", &["--software-imitate", "queue=64,waiting-calls"], &[])?;
    for mode in ["load", "symbol", "free", "malloc", "unload", "instantiate", "reset"] {
        for bytes in ["65536", "800000", "4194304"] {
            let argument = format!("{mode}-{bytes}");
            passes(&rig, Transport::Local, "batched_asks", &[&argument], None)?;
            // The bridge is stopped while the copy and the call are written to the ring.
            passes(&rig, Transport::Tcp, "batched_asks", &[&argument], Some(rig.tcp.pid()))?;
        }
    }
    rig.check_healthy()
}

#[test]
fn many_short_copies_pass_through_a_full_queue() -> Result<()> {
    let mut rig = Rig::with("waits-queue", &["--software-imitate", "queue=64"], &[])?;
    for transport in TRANSPORTS {
        passes(&rig, transport, "many_small_copies", &[], None)?;
        passes(&rig, transport, "many_small_copies", &["--full"], None)?;
    }
    rig.check_healthy()
}

/// Kernels find a texture and a surface that were destroyed after their launch. (NVIDIA's driver does not
/// promise that.)
#[test]
fn textures_are_destroyed_behind_the_kernels_that_use_them() -> Result<()> {
    let mut rig = Rig::with("waits-textures", &[], &[])?;
    for transport in TRANSPORTS {
        passes(&rig, transport, "beside_kernel", &["late"], None)?;
    }
    rig.check_healthy()
}

/// Over a network; over `local` there is no such order (decision 11).
#[test]
fn data_beside_other_memory_comes_before_a_word_in_a_page_of_its_own() -> Result<()> {
    let mut rig = Rig::with("waits-shared-page", &[], &[])?;
    passes(&rig, Transport::Tcp, "mapped_waits", &["shared_page"], None)?;
    rig.check_healthy()
}

/// Streams that wait for host functions take no hardware queue, so neither other streams' copies nor those
/// that bring managed memory to a host function wait for them.
#[test]
fn more_streams_wait_for_the_program_than_there_are_hardware_queues() -> Result<()> {
    for queues in [1, 2] {
        let imitate = format!("hardware-queues={queues},waiting-calls");
        let mut rig = Rig::with("waits-hardware-queues", &["--software-imitate", &imitate], &[])?;
        for name in [
            "held_streams",
            "held_calls",
            "callback_load",
            "graph_host",
            "managed_neighbors",
            "stream_memory",
        ] {
            // Its streams wait for words that other streams write: in a single queue, the writes would be
            // stuck behind the waits.
            if name == "stream_memory" && queues == 1 {
                continue;
            }
            for transport in TRANSPORTS {
                passes(&rig, transport, name, &[], None).with_context(|| format!("with {queues} queues"))?;
            }
        }
        rig.check_healthy()?;
    }
    Ok(())
}

/// A graph whose copies need this process is launched behind a host function that waits for the launching
/// thread.
#[test]
fn a_launch_does_not_wait_for_a_host_function_before_its_copy() -> Result<()> {
    let mut rig = Rig::with("waits-graph", &["--software-imitate", "waiting-calls"], &[])?;
    for transport in TRANSPORTS {
        passes(&rig, transport, "graph_host", &["held"], None)?;
    }
    rig.check_healthy()
}

/// Behind a host function, a program queues more commands than a server holds: it has to wait, and keeps its
/// session. So does one that queues them behind a kernel that waits for the program, while the thread that
/// executes commands is blocked in the driver's full queue.
#[test]
fn a_program_waits_when_much_is_queued_behind_it() -> Result<()> {
    let mut rig = Rig::with("waits-held-queue", &["--software-imitate", "queue=64,waiting-calls"], &[])?;
    for transport in TRANSPORTS {
        for mode in ["function", "beside", "word"] {
            passes(&rig, transport, "held_queue", &[mode], None)?;
        }
    }
    rig.check_healthy()
}

/// Copies of all kinds, loading, graphs, host functions, mirrored and managed memory, threads.
const PROGRAMS: [&str; 32] = [
    "alloc_churn",
    "batched_asks",
    "callback_load",
    "context_threads",
    "copies",
    "copies_3d",
    "copy_promises",
    "default_stream",
    "graph_host",
    "graph_update",
    "held_by_value",
    "held_calls",
    "held_streams",
    "host_registration",
    "managed_memory",
    "many_small_copies",
    "mapped_across",
    "mapped_copies",
    "mapped_fifo",
    "mapped_memory",
    "mapped_order",
    "mapped_zeroes",
    "memcpy_batch",
    "pinned_answers",
    "pinned_bulk",
    "pinned_kernels",
    "stream_callbacks",
    "stream_lifetimes",
    "stream_memory",
    "streams_events",
    "symbol_copies",
    "threads",
];

/// The seeds of the delays: `RGPU_SEEDS` (numbers separated by commas), otherwise one.
fn seeds() -> Result<Vec<u32>> {
    let text = std::env::var("RGPU_SEEDS").unwrap_or_else(|_| "1".to_owned());
    text.split(',').map(|seed| seed.trim().parse().with_context(|| format!("no seed: {seed:?}"))).collect()
}

#[test]
fn programs_pass_with_any_call_delayed() -> Result<()> {
    for seed in seeds()? {
        let imitate = format!("queue=600,waiting-calls,call-us=300,seed={seed}");
        let server = ["--software-imitate", imitate.as_str()];
        let mut rig =
            Rig::through("waits-delays", &server, &[], |port| Ok(on_this_host(slow_link(port, seed)?)))?;
        for name in PROGRAMS {
            for transport in TRANSPORTS {
                passes(&rig, transport, name, &[], None).with_context(|| format!("with seed {seed}"))?;
            }
        }
        rig.check_healthy()?;
    }
    Ok(())
}

/// Opens a port that forwards every connection to `port`, with random delays in each direction, until the
/// test's process ends. Returns its number.
fn slow_link(port: u16, seed: u32) -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = listener.local_addr()?.port();
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let pair = near.and_then(|near| {
                let far = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
                near.set_nodelay(true)?;
                far.set_nodelay(true)?;
                Ok([(near.try_clone()?, far.try_clone()?), (far, near)])
            });
            for (way, (from, to)) in pair.into_iter().flatten().enumerate() {
                let seed = u64::from(seed) << 32 | (number as u64) << 1 | way as u64;
                thread::spawn(move || pass_on(from, to, Random(seed)));
            }
        }
    });
    Ok(own)
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, mut random: Random) {
    let mut buffer = vec![0; 256 << 10];
    loop {
        // Sometimes only a part, so that frames are split anywhere.
        let most = if random.below(8) == 0 { 1 + random.below(100) } else { buffer.len() };
        let Ok(got @ 1..) = from.read(&mut buffer[..most]) else { break };
        let delay = if random.below(40) == 0 { 5000 } else { 300 };
        thread::sleep(Duration::from_micros(random.number() % delay));
        if to.write_all(&buffer[..got]).is_err() {
            break;
        }
    }
    // It may already be closed.
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

#[test]
fn killing_a_program_ends_driver_calls_that_wait_for_it() -> Result<()> {
    let mut rig = Rig::with("waits-killed", &["--software-imitate", "queue=8,waiting-calls"], &[])?;
    for transport in TRANSPORTS {
        passes(&rig, transport, "vectorAdd", &[], None)?;
    }
    let before = rig.idle_holdings()?;
    for transport in TRANSPORTS {
        for state in ["copy", "kernel", "call", "callback", "queue"] {
            let running = support::Running::start(rig.program(transport, "kill_me")?.arg(state), "RUNNING")?;
            // It may be in the call by then. In any case, nothing may be left.
            thread::sleep(Duration::from_millis(200));
            running.kill()?;
        }
    }
    rig.check_left_nothing(&before)?;
    rig.check_healthy()
}
