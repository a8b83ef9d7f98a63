//! Data that a server has in its cache is not sent again; everything else is sent as without a cache.

mod support;

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use protocol::channel::NO_SLOT;
use protocol::data::{HostIn, HostRange, Place};
use protocol::device::text;
use protocol::handle::StreamId;
use protocol::link::{
    DataHeader, DataKnown, EAGER_FLAG, FrameHeader, HASH_FLAG, Hello, KEEP_FLAG, KNOWN_FLAG, frame, purpose,
};
use protocol::ops::copy::MemcpyHtoD;
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use protocol::ops::{Op, encode};
use rgpu_tests::programs;
use support::{PATIENCE, Rig, Transport, eventually};
use test_kit::link::{TcpBridge, hello};
use zerocopy::{FromZeros, IntoBytes};

/// Bytes of bulk data that the bridge over TCP has sent, and bytes it saved because the server had them.
fn sent_and_known(rig: &Rig) -> Result<[u64; 2]> {
    let status = rig.bridge(Transport::Tcp).status()?;
    // The counters do not exist before the first session.
    let total = |name: &str| status["totals"][name].as_u64().unwrap_or(0);
    Ok([total("data_bytes_sent"), total("data_bytes_known")])
}

/// Those numbers for one run of the program.
fn of_run(rig: &Rig, arguments: &[&str]) -> Result<[u64; 2]> {
    let before = sent_and_known(rig)?;
    rig.passes(Transport::Tcp, "model_upload", arguments)?;
    // At its end, the session adds its counters to the totals.
    eventually(|| {
        let status = rig.bridge(Transport::Tcp).status()?;
        ensure!(status["sessions"].as_array().is_some_and(Vec::is_empty), "a session is left: {status}");
        Ok(())
    })?;
    let after = sent_and_known(rig)?;
    Ok([after[0] - before[0], after[1] - before[1]])
}

fn cache_status(rig: &Rig, name: &str) -> Result<u64> {
    let status = rig.server.status()?;
    status["cache"][name].as_u64().with_context(|| format!("the server's cache has no {name}: {status}"))
}

/// Waits until at least this many bytes are kept and no more will be (blocks are stored in the background),
/// and returns how many.
fn eventually_kept(rig: &Rig, least: u64) -> Result<u64> {
    eventually(|| {
        let bytes = cache_status(rig, "bytes")?;
        ensure!(bytes >= least, "{bytes} of {least} bytes are kept");
        Ok(())
    })?;
    nothing_more_is_kept(rig)?;
    cache_status(rig, "bytes")
}

/// Waits until no block is being written: each session has a thread in the daemon that writes its blocks, and
/// ends when the last one of a session that is over is written.
fn nothing_more_is_kept(rig: &Rig) -> Result<()> {
    eventually(|| {
        for thread in std::fs::read_dir(format!("/proc/{}/task", rig.server.pid()))? {
            // A thread that has just ended has no name.
            let name = std::fs::read_to_string(thread?.path().join("comm")).unwrap_or_default();
            ensure!(name.trim() != "rgpu-cache", "a session's blocks are still being written");
        }
        Ok(())
    })
}

fn rig(name: &str, folder: &Path, more: &[&str]) -> Result<Rig> {
    let folder = folder.to_str().context("a folder's name")?;
    Rig::with(name, &[&["--cache", folder], more].concat(), &["--cache", "always"])
}

#[test]
fn the_second_start_of_a_program_sends_almost_nothing() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut rig = rig("cache", &folder.path().join("cache"), &[])?;
    let first = of_run(&rig, &[])?;
    ensure!(first[0] > 20 << 20 && first[1] == 0, "the first run sent and knew {first:?} bytes");
    eventually_kept(&rig, first[0] / 100 * 99)?;
    let second = of_run(&rig, &[])?;
    ensure!(second[0] * 100 <= first[0], "the second run sent {} of {} bytes", second[0], first[0]);
    ensure!(second[0] + second[1] == first[0], "{second:?} bytes where {} were sent before", first[0]);
    eventually(|| {
        let (saved, hits) = (cache_status(&rig, "bytes_saved")?, cache_status(&rig, "hits")?);
        ensure!(saved >= second[1] && hits > 0, "{saved} of {} bytes saved, by {hits} hits", second[1]);
        Ok(())
    })?;
    // New data is sent.
    let other = of_run(&rig, &["--seed", "2"])?;
    ensure!(other[0] * 100 >= first[0] * 95, "new data: {other:?} bytes");
    // The cache outlives the daemon.
    rig.server.signal(Signal::SIGTERM)?;
    rig.server.wait(PATIENCE)?;
    rig.restart_server()?;
    let again = of_run(&rig, &[])?;
    ensure!(again[0] * 100 <= first[0], "after a restart: {again:?} bytes");
    Ok(())
}

#[test]
fn damaged_blocks_are_sent_again() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cache = folder.path().join("cache");
    let rig = rig("cache-damaged", &cache, &[])?;
    let first = of_run(&rig, &[])?;
    eventually_kept(&rig, first[0] / 100 * 99)?;
    for client in std::fs::read_dir(&cache)? {
        let client = client?.path();
        for block in std::fs::read_dir(&client).into_iter().flatten() {
            let path = block?.path();
            let mut bytes = std::fs::read(&path)?;
            bytes[0] ^= 1;
            std::fs::write(&path, bytes)?;
        }
    }
    let second = of_run(&rig, &[])?;
    ensure!(second == first, "with every block damaged: {second:?} bytes");
    eventually(|| {
        ensure!(cache_status(&rig, "blocks_damaged")? > 0, "no damaged block was counted");
        Ok(())
    })
}

#[test]
fn a_small_cache_keeps_to_its_limit() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let rig = rig("cache-small", &folder.path().join("cache"), &["--cache-client-limit", "3M"])?;
    for _ in 0..2 {
        of_run(&rig, &[])?;
        ensure!(cache_status(&rig, "bytes")? <= 3 << 20);
    }
    Ok(())
}

#[test]
fn without_a_cache_everything_is_sent_every_time() -> Result<()> {
    let rig = Rig::with("cache-off", &[], &["--cache", "always"])?;
    let [first, second] = [of_run(&rig, &[])?, of_run(&rig, &[])?];
    ensure!(first == second && first[1] == 0, "{first:?}, {second:?}");
    ensure!(rig.server.status()?["cache"].is_null());
    Ok(())
}

/// Bytes of all clients' files.
fn on_disk(cache: &Path) -> Result<u64> {
    let mut bytes = 0;
    for client in std::fs::read_dir(cache)? {
        let client = client?.path();
        if client.is_dir() {
            for block in std::fs::read_dir(client)? {
                bytes += block?.metadata()?.len();
            }
        }
    }
    Ok(bytes)
}

#[test]
fn the_cache_survives_a_killed_server_and_two_programs_that_send_the_same_at_once() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cache = folder.path().join("cache");
    let mut rig = rig("cache-killed", &cache, &["--grace-seconds", "0"])?;
    // The server is killed while it writes blocks.
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            rig.program(Transport::Tcp, "model_upload")
                .and_then(|mut program| programs::run(&mut program, programs::LIMIT))
        });
        eventually(|| {
            ensure!(on_disk(&cache)? > 0, "nothing is kept yet");
            Ok(())
        })?;
        rig.server.signal(Signal::SIGKILL)?;
        // The program fails, unless it had already sent everything.
        let _ = running.join();
        anyhow::Ok(())
    })?;
    rig.server.wait(PATIENCE)?;
    rig.restart_server()?;
    let run = || rig.passes(Transport::Tcp, "model_upload", &[]);
    std::thread::scope(|scope| {
        let (one, other) = (scope.spawn(run), scope.spawn(run));
        one.join().map_err(|_| anyhow::anyhow!("a program's thread panicked"))??;
        other.join().map_err(|_| anyhow::anyhow!("a program's thread panicked"))?
    })?;
    // Each block is there once and complete.
    let size = eventually_kept(&rig, 28_800_000)?;
    eventually(|| {
        ensure!(on_disk(&cache)? == cache_status(&rig, "bytes")?, "the disk has something else");
        Ok(())
    })?;
    ensure!(size < 29_200_000, "{size} bytes are kept of 29,147,364");
    ensure!([cache_status(&rig, "blocks_damaged")?, cache_status(&rig, "blocks_failed")?] == [0, 0]);
    Ok(())
}

/// A bridge whose every byte the test chooses.
struct Hostile(TcpBridge);

impl Hostile {
    /// A session with room on the device.
    fn open(rig: &Rig, program: &str) -> Result<Hostile> {
        let hello = Hello { program: text(program), ..hello(purpose::CONTROL, [0; 16], 1) };
        let bridge = Hostile(TcpBridge::connect(rig.port, &hello).map_err(anyhow::Error::msg)?);
        bridge.command(1, 0, &MemGrow { device: 0, address: window(0), size: 2 << 20 })?;
        bridge.command(2, NO_SLOT, &MemAlloc { address: window(0), size: 4096 })?;
        Ok(bridge)
    }

    fn command<'a, T: Op<'a>>(&self, seq: u64, slot: u16, op: &T) -> Result<()> {
        let mut body = Vec::new();
        encode(op, &mut body);
        Ok(self.0.record(seq, T::INFO.opcode, slot, &body)?)
    }

    /// Copies 64 bytes to the device.
    fn copy(&self, seq: u64) -> Result<()> {
        let src = HostIn::Range(HostRange { place: Place::Arena, offset: 0, len: 64 });
        self.command(seq, NO_SLOT, &MemcpyHtoD { stream: StreamId(0), dst: window(0), src })
    }

    /// Sends a data header with this length and these flags, followed by `behind`.
    fn data(&self, seq: u64, offset: u64, len: u32, behind: &[u8]) -> Result<()> {
        Ok(self.0.send_data(0, DataHeader { seq, offset, piece: 0, len }, behind)?)
    }

    /// Asks whether the server has the 64 bytes of command `seq`, by their hash. Returns the answer.
    fn is_known(&self, seq: u64, bytes: &[u8; 64]) -> Result<bool> {
        self.data(seq, 0, HASH_FLAG | 64, blake3::hash(bytes).as_bytes())?;
        loop {
            let mut header = FrameHeader::new_zeroed();
            (&self.0.control).read_exact(header.as_mut_bytes())?;
            let mut body = vec![0; header.len as usize];
            (&self.0.control).read_exact(&mut body)?;
            if header.kind == frame::DATA_KNOWN {
                let mut known = DataKnown::new_zeroed();
                ensure!(body.len() == size_of::<DataKnown>(), "{} bytes", body.len());
                known.as_mut_bytes().copy_from_slice(&body);
                ensure!((known.seq, known.offset, known.piece) == (seq, 0, 0), "{known:?}");
                return Ok(known.known == 1);
            }
        }
    }

    /// Reads until the server closes the session.
    fn closed(&self) -> Result<()> {
        let mut buffer = [0; 4096];
        loop {
            match (&self.0.control).read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
                Err(e) => return Err(e).context("the server does not close the session"),
            }
        }
    }
}

#[test]
fn a_bridge_finds_only_sent_blocks_and_may_refer_only_to_confirmed_ones() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let rig = rig("cache-hostile", &folder.path().join("cache"), &[])?;
    // Bytes that do not match the claimed hash are kept under their own.
    let (claimed, sent) = ([1; 64], [2; 64]);
    let liar = Hostile::open(&rig, "liar")?;
    liar.copy(3)?;
    ensure!(!liar.is_known(3, &claimed)?, "it knows data that was never sent");
    liar.data(3, 0, KEEP_FLAG | 64, &sent)?;
    eventually(|| {
        ensure!(cache_status(&rig, "bytes")? == 64, "it is not kept yet");
        Ok(())
    })?;
    for seq in 4..6 {
        liar.copy(seq)?;
        let bytes = if seq == 4 { &claimed } else { &sent };
        ensure!(liar.is_known(seq, bytes)? == (seq == 5), "the answer for command {seq}");
        liar.data(seq, 0, 64, &[3; 64])?;
    }
    drop(liar);

    type Act = fn(&Hostile) -> Result<()>;
    let deeds: &[(&str, &str, Act)] = &[
        ("known-unasked", "not known here", |b| b.data(3, 0, KNOWN_FLAG | 64, &[])),
        ("known-untold", "not known here", |b| {
            ensure!(!b.is_known(3, &[1; 64])?);
            b.data(3, 0, KNOWN_FLAG | 64, &[])
        }),
        ("known-beyond", "not known here", |b| {
            ensure!(b.is_known(3, &[2; 64])?);
            b.data(3, 0, KNOWN_FLAG | 65, &[])
        }),
        ("known-twice", "command 3", |b| {
            ensure!(b.is_known(3, &[2; 64])?);
            b.data(3, 0, KNOWN_FLAG | 40, &[])?;
            b.data(3, 0, KNOWN_FLAG | 40, &[])
        }),
        ("hash-twice", "asks twice", |b| {
            ensure!(b.is_known(3, &[2; 64])?);
            b.is_known(3, &[2; 64]).map(drop).or(Ok(()))
        }),
        ("hash-nowhere", "which are no block", |b| b.data(3, 8, HASH_FLAG | 8, &[0; 32])),
        ("hash-eager", "a chunk of 64 bytes", |b| b.data(3, 0, HASH_FLAG | EAGER_FLAG | 64, &[0; 32])),
    ];
    for (name, says, act) in deeds {
        let bridge = Hostile::open(&rig, name)?;
        bridge.copy(3)?;
        act(&bridge).context(*name)?;
        bridge.closed().context(*name)?;
        eventually(|| {
            let log = rig.server.log_text();
            let program = format!("program=\"{name}\"");
            let told =
                |line: &str| line.contains("session lost") && line.contains(&program) && line.contains(says);
            ensure!(log.lines().any(told), "{name}: the log does not say {says:?}");
            Ok(())
        })?;
    }
    // Nobody else is affected.
    rig.passes(Transport::Tcp, "vectorAdd", &[])
}
