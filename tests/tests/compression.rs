//! Over a slow link, data that compresses is sent compressed, both ways, and other data costs nothing.
//! Decided by bytes that cross the link.
//!
//! `cargo test -p rgpu-tests --test compression -- --ignored --nocapture` measures how long copies take with
//! the daemons in `target/release`.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
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
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{LIMIT, run};
use rgpu_tests::tree;
use support::client::Client;
use support::{Ended, Rig, Transport, eventually, on_this_host};

/// Starts a relay that carries so many Mb/s to `port`. Gives its port.
fn slow_link(port: u16, mbit: u32) -> Result<(Ended, u16)> {
    let listen = free_port()?;
    let relay = Command::new(env!("CARGO_BIN_EXE_delay-relay"))
        .args(["--listen", &format!("127.0.0.1:{listen}"), "--to", &format!("127.0.0.1:{port}")])
        .args(["--rtt-us", "1000", "--mbit", &mbit.to_string()])
        .spawn()
        .context("cannot start delay-relay")?;
    let relay = Ended(relay);
    eventually(|| TcpStream::connect(("127.0.0.1", listen)).map(drop).map_err(Into::into))?;
    Ok((relay, listen))
}

/// Bytes that a link has carried to the server, and from it.
#[derive(Default)]
struct Carried([AtomicU64; 2]);

/// Where data goes: to the server, or from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

impl Carried {
    fn get(&self, way: Way) -> u64 {
        self.0[way as usize].load(Ordering::SeqCst)
    }
}

/// Carries connections to `port`, and counts the bytes. Gives where it listens.
fn count(port: u16, carried: &Arc<Carried>) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (here, carried) = (listener.local_addr()?.port(), Arc::clone(carried));
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let Ok((near, far)) = near.and_then(|near| Ok((near, TcpStream::connect(("127.0.0.1", port))?)))
            else {
                continue;
            };
            let carried = Arc::clone(&carried);
            std::thread::spawn(move || {
                let _ = near.set_nodelay(true).and(far.set_nodelay(true));
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        carry(&far, &near, &carried.0[Way::Down as usize]);
                        let _ = near.shutdown(Shutdown::Both);
                    });
                    carry(&near, &far, &carried.0[Way::Up as usize]);
                    let _ = far.shutdown(Shutdown::Write);
                });
            });
        }
    });
    Ok(here)
}

fn carry(mut from: &TcpStream, mut to: &TcpStream, carried: &AtomicU64) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        carried.fetch_add(n as u64, Ordering::SeqCst);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
}

/// A server and its client's bridge.
enum Daemons {
    Plain(Rig),
    Tls { _server: Daemon, bridge: Daemon, folder: tempfile::TempDir },
}

impl Daemons {
    fn bridge(&self) -> &Daemon {
        match self {
            Daemons::Plain(rig) => rig.bridge(Transport::Tcp),
            Daemons::Tls { bridge, .. } => bridge,
        }
    }

    fn socket(&self) -> PathBuf {
        match self {
            Daemons::Plain(rig) => rig.socket(Transport::Tcp),
            Daemons::Tls { folder, .. } => folder.path().join("native.sock"),
        }
    }
}

/// They and the link between them.
struct Setup {
    daemons: Daemons,
    carried: Arc<Carried>,
    _relay: Option<Ended>,
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

/// What copies came to.
#[derive(Debug)]
struct Copies {
    /// Bytes of their data that were compressed.
    compressed: u64,
    /// Bytes that went over the link, commands and all, the way of the data.
    link: u64,
    seconds: f64,
}

/// Has a client copy `bytes` to the device or back, `count` times.
fn copy(setup: &Setup, way: Way, bytes: &[u8], count: u64) -> Result<Copies> {
    let (data, stream) = (count * COPY as u64, StreamId(0));
    let names = match way {
        Way::Up => ["data_bytes_sent", "data_bytes_compressed", "data_bytes_compressed_to"],
        Way::Down => ["data_bytes_received", "data_bytes_decompressed", "data_bytes_decompressed_from"],
    };
    let totals = || -> Result<[u64; 3]> {
        let status = setup.daemons.bridge().status()?;
        // There are none before the first session.
        Ok(names.map(|name| status["totals"][name].as_u64().unwrap_or(0)))
    };
    let before = totals()?;
    let mut client = Client::connect(&setup.daemons.socket(), "copies")?;
    client.call(&MemGrow { device: 0, address: window(0), size: data })?.map_err(refused)?;
    client.tell(&MemAlloc { address: window(0), size: data })?;
    client.write_arena(bytes);
    let range = HostRange { place: Place::Arena, offset: 0, len: COPY as u64 };
    let place = |copy: u64| window(0) + copy * COPY as u64;
    let htod = |copy| MemcpyHtoD { stream, dst: place(copy), src: HostIn::Range(range) };
    let dtoh = |copy| MemcpyDtoH { stream, src: place(copy), dst: HostOut(range) };
    // What goes the other way is one copy.
    if way == Way::Down {
        client.push(&htod(0), NO_SLOT)?;
    }
    client.call(&StreamSynchronize { stream })?.map_err(refused)?;
    let (begun, on_link) = (Instant::now(), setup.carried.get(way));
    for number in 0..count {
        match way {
            Way::Up => client.push(&htod(number), NO_SLOT)?,
            Way::Down => client.push(&dtoh(0), NO_SLOT)?,
        };
        // Otherwise all of it is in the relay before the link is known: that holds more than the buffers of a
        // real one.
        client.call(&StreamSynchronize { stream })?.map_err(refused)?;
        if way == Way::Down && number + 2 == count {
            client.write_arena(&vec![0; COPY]);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let link = setup.carried.get(way) - on_link;
    if way == Way::Up {
        client.write_arena(&vec![0; COPY]);
        client.push(&dtoh(count - 1), NO_SLOT)?;
        client.call(&StreamSynchronize { stream })?.map_err(refused)?;
    }
    ensure!(client.read_arena(COPY) == bytes, "other bytes come back");
    drop(client);
    // The session's end adds its counters to the totals.
    eventually(|| {
        let status = setup.daemons.bridge().status()?;
        ensure!(status["sessions"].as_array().is_some_and(Vec::is_empty), "a session is left: {status}");
        Ok(())
    })?;
    let after = totals()?;
    let [moved, compressed, compressed_to] = [0, 1, 2].map(|index| after[index] - before[index]);
    ensure!(moved - compressed_to + compressed == data, "{data} bytes of data: {before:?}, {after:?}");
    ensure!(moved <= link, "{moved} bytes were moved, and {link} are on the link");
    Ok(Copies { compressed, link, seconds })
}

fn refused(status: protocol::Status) -> anyhow::Error {
    anyhow::anyhow!("the server answers {status:?}")
}

/// A link of so many Mb/s to a server at `port`, which is counted; 0 is any number.
fn link(port: u16, mbit: u32) -> Result<(Arc<Carried>, Option<Ended>, u16)> {
    let carried = Arc::<Carried>::default();
    if mbit == 0 {
        let here = count(port, &carried)?;
        return Ok((carried, None, here));
    }
    let (relay, slow) = slow_link(port, mbit)?;
    let here = count(slow, &carried)?;
    Ok((carried, Some(relay), here))
}

/// Daemons with these settings of `compress`, the server's and the bridge's, and a link of so many Mb/s.
fn setup(name: &str, mbit: u32, [server, bridge]: [&str; 2]) -> Result<Setup> {
    let mut between = None;
    let rig = Rig::through(name, &["--compress", server], &["--compress", bridge], |port| {
        let (carried, relay, here) = link(port, mbit)?;
        between = Some((carried, relay));
        Ok(on_this_host(here))
    })?;
    let (carried, relay) = between.context("no link")?;
    Ok(Setup { daemons: Daemons::Plain(rig), carried, _relay: relay })
}

/// The same with TLS.
fn setup_with_tls(name: &str, mbit: u32, [server, bridge]: [&str; 2]) -> Result<Setup> {
    let (folder, logs) = (tempfile::tempdir()?, tree::logs().join(name));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let port = free_port()?;
    let (carried, relay, here) = link(port, mbit)?;
    let (listen, admin, identity) = (format!("tcp:127.0.0.1:{port}"), path("admin"), path("server"));
    let words = ["--backend", "software", "--listen", &listen, "--compress", server];
    let words = [&words[..], &["--identity", &identity, "--admin-socket", &admin]].concat();
    let server =
        Daemon::start("rgpu-server", words, &logs.join("rgpu-server.log"), &folder.path().join("status"))?;
    let rgpuctl = |words: &[&str]| -> Result<String> {
        let done = run(Command::new(tree::binaries().join("rgpuctl")).args(words), LIMIT)?;
        ensure!(done.status == Some(0), "rgpuctl {words:?}: {done:?}");
        Ok(done.stdout)
    };
    let enrolled =
        rgpuctl(&["enroll", "host1", "--socket", &admin, "--address", &format!("127.0.0.1:{here}")])?;
    let client = path("client");
    let mut words: Vec<&str> = enrolled.split_whitespace().skip(1).collect();
    words.extend(["--identity", &client]);
    rgpuctl(&words)?;
    let (address, socket) = (on_this_host(here), path("native.sock"));
    let words = ["--server", &address, "--identity", &client, "--native-socket", &socket];
    let words = [&words[..], &["--compress", bridge]].concat();
    let status = folder.path().join("vhost-rgpu.status");
    let bridge = Daemon::start("vhost-rgpu", words, &logs.join("vhost-rgpu.log"), &status)?;
    Ok(Setup { daemons: Daemons::Tls { _server: server, bridge, folder }, carried, _relay: relay })
}

/// How often a machine may be so busy while it compresses that this seems to take longer than to send the
/// data as it is.
const BUSY: usize = 10;

fn over_a_slow_link(way: Way) -> Result<()> {
    let setup = setup(&format!("compression-{way:?}"), 200, ["auto"; 2])?;
    let data = 40 * COPY as u64;
    let mut seen = Vec::new();
    while seen.last().is_none_or(|copies: &Copies| copies.link * 2 >= data) {
        ensure!(seen.len() < BUSY, "data that compresses: {seen:?}");
        seen.push(copy(&setup, way, &words(16), 40)?);
    }
    let copies = copy(&setup, way, &words(1), 40)?;
    ensure!(copies.link * 100 <= data * 101 && copies.compressed == 0, "data that does not: {copies:?}");
    Ok(())
}

#[test]
fn uploads_over_a_slow_link_that_compress_take_less_than_half_and_others_no_more() -> Result<()> {
    over_a_slow_link(Way::Up)
}

#[test]
fn downloads_over_a_slow_link_that_compress_take_less_than_half_and_others_no_more() -> Result<()> {
    over_a_slow_link(Way::Down)
}

#[test]
fn what_is_not_to_be_compressed_is_sent_as_it_is() -> Result<()> {
    let plain = |setup: &Setup, way| -> Result<()> {
        let copies = copy(setup, way, &words(16), 4)?;
        ensure!(copies.compressed == 0 && copies.link >= 4 * COPY as u64, "{way:?}: {copies:?}");
        Ok(())
    };
    // What a client does not want compressed it does not get compressed either, whatever its server would
    // like.
    let of_client = setup("compression-never", 200, ["always", "never"])?;
    plain(&of_client, Way::Up)?;
    plain(&of_client, Way::Down)?;
    let of_server = setup("compression-server-never", 200, ["never", "always"])?;
    plain(&of_server, Way::Down)?;
    let copies = copy(&of_server, Way::Up, &words(16), 4)?;
    ensure!(copies.compressed == 4 * COPY as u64, "{copies:?}");
    Ok(())
}

#[test]
fn with_tls_data_is_compressed_only_where_both_ends_are_told_to() -> Result<()> {
    for (settings, expected) in [
        (["even-tls", "even-tls"], [true, true]),
        (["auto", "even-tls"], [true, false]),
        (["even-tls", "auto"], [false, false]),
    ] {
        let setup = setup_with_tls(&format!("compression-tls-{}", settings.join("-")), 200, settings)?;
        for (way, expected) in [Way::Up, Way::Down].into_iter().zip(expected) {
            let mut copies = copy(&setup, way, &words(16), 16)?;
            for _ in 1..BUSY {
                if copies.compressed > 0 || !expected {
                    break;
                }
                copies = copy(&setup, way, &words(16), 16)?;
            }
            ensure!((copies.compressed > 0) == expected, "{settings:?}, {way:?}: {copies:?}");
        }
    }
    Ok(())
}

/// Medians of three times 128 MiB each way, in turn with and without compression.
#[test]
#[ignore = "it measures"]
fn how_long_copies_take() -> Result<()> {
    println!("| Mb/s | way | data | compress | seconds | MiB on the link | MiB compressed |");
    for mbit in [200, 1000, 0] {
        let setups = ["auto", "never"].map(|compress| {
            Ok::<_, anyhow::Error>((compress, setup(&format!("measure-{compress}"), mbit, [compress; 2])?))
        });
        let [auto, never] = setups;
        let setups = [auto?, never?];
        for way in [Way::Up, Way::Down] {
            for (data, repeat) in [("compressible", 16), ("random", 1)] {
                let bytes = words(repeat);
                let mut runs = [Vec::new(), Vec::new()];
                for _ in 0..3 {
                    for ((_, setup), runs) in setups.iter().zip(&mut runs) {
                        runs.push(copy(setup, way, &bytes, 32)?);
                    }
                }
                for ((compress, _), runs) in setups.iter().zip(&mut runs) {
                    runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
                    let Copies { seconds, link, compressed } = runs[1];
                    let (link, compressed) = (link as f64 / 1048576.0, compressed as f64 / 1048576.0);
                    let (least, most) = (runs[0].seconds, runs[2].seconds);
                    println!(
                        "| {mbit} | {way:?} | {data} | {compress} | {seconds:.2} ({least:.2} to {most:.2}) | {link:.1} | {compressed:.1} |"
                    );
                }
            }
        }
    }
    Ok(())
}
