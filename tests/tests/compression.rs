//! Over a slow link, data that compresses is sent compressed, and other data costs nothing. Decided by bytes that cross the link.
//!
//! `cargo test -p rgpu-tests --test compression -- --ignored --nocapture` measures how long uploads take with the daemons in `target/release`.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use protocol::channel::NO_SLOT;
use protocol::data::{HostIn, HostOut, HostRange, Place};
use protocol::handle::StreamId;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use protocol::ops::stream::StreamSynchronize;
use rgpu_tests::guest::free_port;
use support::client::Client;
use support::{Rig, Transport, eventually, on_this_host};

/// `delay-relay`, ended when this is dropped.
struct Relay(Child);

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a relay that carries so many Mb/s to `port`. Gives its port.
fn slow_link(port: u16, mbit: u32) -> Result<(Relay, u16)> {
    let listen = free_port()?;
    let relay = Command::new(env!("CARGO_BIN_EXE_delay-relay"))
        .args(["--listen", &format!("127.0.0.1:{listen}"), "--to", &format!("127.0.0.1:{port}")])
        .args(["--rtt-us", "1000", "--mbit", &mbit.to_string()])
        .spawn()
        .context("cannot start delay-relay")?;
    let relay = Relay(relay);
    eventually(|| TcpStream::connect(("127.0.0.1", listen)).map(drop).map_err(Into::into))?;
    Ok((relay, listen))
}

/// Carries connections to `port`, and counts the bytes there. Gives where it listens.
fn count(port: u16, carried: &Arc<AtomicU64>) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (here, carried) = (listener.local_addr()?.port(), Arc::clone(carried));
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let Ok((near, far)) = near.and_then(|near| Ok((near, TcpStream::connect(("127.0.0.1", port))?)))
            else {
                continue;
            };
            let carried = Arc::clone(&carried);
            std::thread::spawn(move || carry(&near, &far, &carried));
        }
    });
    Ok(here)
}

fn carry(near: &TcpStream, far: &TcpStream, carried: &AtomicU64) {
    let (mut from_near, mut to_near, mut from_far, mut to_far) = (near, near, far, far);
    let nodelay = near.set_nodelay(true).and(far.set_nodelay(true));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = std::io::copy(&mut from_far, &mut to_near);
            let _ = near.shutdown(Shutdown::Both);
        });
        let mut buffer = vec![0; 256 << 10];
        while let (Ok(()), Ok(n @ 1..)) = (&nodelay, from_near.read(&mut buffer)) {
            carried.fetch_add(n as u64, Ordering::SeqCst);
            if to_far.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Write);
    });
}

/// Bytes of one copy: the client's arena.
const COPY: usize = 4 << 20;

/// Bytes of which every run of `repeat` words is the same word, and the words are random.
fn words(repeat: usize) -> Vec<u8> {
    let mut x = 1u64;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x as u32).to_le_bytes()
    };
    (0..COPY / 4 / repeat).map(next).flat_map(|word| std::iter::repeat_n(word, repeat)).flatten().collect()
}

/// What an upload came to.
#[derive(Debug)]
struct Sent {
    /// Bytes of its data that were compressed.
    compressed: u64,
    /// Bytes that went over the link to the server, commands and all.
    link: u64,
    seconds: f64,
}

/// Has a client copy `bytes` to the device, `count` times, and one of the copies back.
fn upload(rig: &Rig, carried: &AtomicU64, bytes: &[u8], count: u64) -> Result<Sent> {
    let (data, stream) = (count * COPY as u64, StreamId(0));
    let totals = || -> Result<[u64; 3]> {
        let status = rig.bridge(Transport::Tcp).status()?;
        // There are none before the first session.
        let total = |name: &str| status["totals"][name].as_u64().unwrap_or(0);
        Ok([total("data_bytes_sent"), total("data_bytes_compressed"), total("data_bytes_compressed_to")])
    };
    let (before, on_link) = (totals()?, carried.load(Ordering::SeqCst));
    let mut client = Client::connect(&rig.socket(Transport::Tcp), "upload")?;
    client.call(&MemGrow { device: 0, address: window(0), size: data })?.map_err(refused)?;
    client.tell(&MemAlloc { address: window(0), size: data })?;
    client.write_arena(bytes);
    client.call(&StreamSynchronize { stream })?.map_err(refused)?;
    let begun = Instant::now();
    let range = HostRange { place: Place::Arena, offset: 0, len: COPY as u64 };
    for copy in 0..count {
        let dst = window(0) + copy * COPY as u64;
        client.push(&MemcpyHtoD { stream, dst, src: HostIn::Range(range) }, NO_SLOT)?;
        // Otherwise all of it is in the relay before the link is known: that holds more than the buffers of a real one.
        client.call(&StreamSynchronize { stream })?.map_err(refused)?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let link = carried.load(Ordering::SeqCst) - on_link;
    client.write_arena(&vec![0; COPY]);
    let src = window(0) + (count - 1) * COPY as u64;
    client.push(&MemcpyDtoH { stream, src, dst: HostOut(range) }, NO_SLOT)?;
    client.call(&StreamSynchronize { stream })?.map_err(refused)?;
    ensure!(client.read_arena(COPY) == bytes, "other bytes come back");
    drop(client);
    // The session's end adds its counters to the totals.
    eventually(|| {
        let status = rig.bridge(Transport::Tcp).status()?;
        ensure!(status["sessions"].as_array().is_some_and(Vec::is_empty), "a session is left: {status}");
        Ok(())
    })?;
    let after = totals()?;
    let [sent, compressed, compressed_to] = [0, 1, 2].map(|index| after[index] - before[index]);
    ensure!(sent - compressed_to + compressed == data, "{data} bytes of data: {before:?}, {after:?}");
    ensure!(sent <= link, "{sent} bytes were sent, and {link} are on the link");
    Ok(Sent { compressed, link, seconds })
}

fn refused(status: protocol::Status) -> anyhow::Error {
    anyhow::anyhow!("the server answers {status:?}")
}

/// A server behind a counted link of so many Mb/s; 0 is any number.
fn rig(name: &str, mbit: u32, compress: &str) -> Result<(Rig, Option<Relay>, Arc<AtomicU64>)> {
    let (carried, mut relay) = (Arc::new(AtomicU64::new(0)), None);
    let rig = Rig::through(name, &[], &["--compress", compress], |mut port| {
        if mbit > 0 {
            let (started, slow) = slow_link(port, mbit)?;
            (relay, port) = (Some(started), slow);
        }
        Ok(on_this_host(count(port, &carried)?))
    })?;
    Ok((rig, relay, carried))
}

#[test]
fn over_a_slow_link_what_compresses_takes_less_than_half_and_other_data_no_more() -> Result<()> {
    let (rig, _relay, carried) = rig("compression", 200, "auto")?;
    let data = 40 * COPY as u64;
    let sent = upload(&rig, &carried, &words(16), 40)?;
    ensure!(sent.link * 2 < data, "data that compresses: {sent:?}");
    let sent = upload(&rig, &carried, &words(1), 40)?;
    ensure!(sent.link * 100 <= data * 101 && sent.compressed == 0, "data that does not: {sent:?}");
    Ok(())
}

#[test]
fn what_is_not_to_be_compressed_is_sent_as_it_is() -> Result<()> {
    let (rig, _relay, carried) = rig("compression-never", 200, "never")?;
    let sent = upload(&rig, &carried, &words(16), 4)?;
    ensure!(sent.compressed == 0 && sent.link >= 4 * COPY as u64, "{sent:?}");
    Ok(())
}

/// Medians of three uploads of 128 MiB each, in turn with and without compression.
#[test]
#[ignore = "it measures"]
fn how_long_uploads_take() -> Result<()> {
    println!("| Mb/s | data | compress | seconds | MiB on the link | MiB compressed |");
    for mbit in [200, 1000, 0] {
        let rigs = ["auto", "never"].map(|compress| rig(&format!("measure-{compress}"), mbit, compress));
        let [auto, never] = rigs;
        let rigs = [("auto", auto?), ("never", never?)];
        for (data, repeat) in [("compressible", 16), ("random", 1)] {
            let bytes = words(repeat);
            let mut runs = [Vec::new(), Vec::new()];
            for _ in 0..3 {
                for ((_, (rig, _, carried)), runs) in rigs.iter().zip(&mut runs) {
                    runs.push(upload(rig, carried, &bytes, 32)?);
                }
            }
            for ((compress, _), runs) in rigs.iter().zip(&mut runs) {
                runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
                let Sent { seconds, link, compressed } = runs[1];
                let (link, compressed) = (link as f64 / 1048576.0, compressed as f64 / 1048576.0);
                let (least, most) = (runs[0].seconds, runs[2].seconds);
                println!(
                    "| {mbit} | {data} | {compress} | {seconds:.2} ({least:.2} to {most:.2}) | {link:.1} | {compressed:.1} |"
                );
            }
        }
    }
    Ok(())
}
