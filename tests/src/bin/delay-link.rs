//! A link between two network namespaces, with a delay and a rate, for kernels without `netem`.
//!
//! ```text
//!  namespace                                                                      namespace
//!  device `link-a` ──▶ reader ──▶ queue of (time due, packet) ──▶ writer ──▶ device `link-b`      and the same back
//! ```
//!
//! Unlike `delay-relay`, which ends connections and opens others, it passes packets on: connections go from
//! end to end, so establishing one, growing its window and closing it takes as long as over a real link. The
//! devices are TUN devices. The kernel leaves segmentation to them, so a packet may have up to 64 KiB. It
//! counts as one in the queue, and takes as long as its bytes at the link's rate.
//!
//! A packet that would wait longer than [`LONGEST`] behind others is dropped, as a router drops it.
//!
//! The devices exist as long as the program runs. Once it has said `ready`, `ip link set link-a netns NAME`
//! moves an end to its place. Needs root.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;

/// Bytes that a device reads or writes at most: a header that says what is left to be done, and a packet.
const MOST: usize = 66 << 10;
/// Packets in flight in one direction at most.
const IN_FLIGHT: usize = 1 << 16;
/// The writer sleeps until this long before a packet is due and spins for the rest, because a sleep ends
/// late.
const SPIN: Duration = Duration::from_micros(60);
/// How long the bytes may wait that the link has not begun to carry.
const LONGEST: Duration = Duration::from_millis(50);

/// Join two network devices by a link with a delay and a rate.
#[derive(Parser)]
struct Arguments {
    /// Round-trip time [µs]
    #[arg(long, value_name = "MICROSECONDS")]
    rtt_us: u64,
    /// Megabits that each direction carries in a second
    #[arg(long, value_name = "MEGABITS")]
    mbit: u64,
}

/// A packet, and when to deliver it.
type Parcel = (Instant, Vec<u8>);

fn main() -> ExitCode {
    match link(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn link(arguments: &Arguments) -> Result<()> {
    let [a, b] = [device("link-a")?, device("link-b")?];
    let ways = [(&a, &b), (&b, &a)].map(|(from, to)| one_way(from, to, arguments));
    println!("ready");
    for way in ways {
        match way.join() {
            Ok(result) => result?,
            Err(_) => bail!("a thread panicked"),
        }
    }
    Ok(())
}

/// A new TUN device that gives and takes packets as long as the kernel makes them.
fn device(name: &str) -> Result<Arc<File>> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    let file = file.context("cannot open /dev/net/tun")?;
    // SAFETY: a structure of integers and bytes, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the request is a valid one for this call, which keeps no pointer to it.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if made < 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("cannot make the device {name}"));
    }
    let left = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: the call takes a number.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(left)) } < 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("cannot leave segmentation to {name}"));
    }
    Ok(Arc::new(file))
}

/// Starts the two threads of one direction. The returned one ends when the link does.
fn one_way(from: &Arc<File>, to: &Arc<File>, arguments: &Arguments) -> std::thread::JoinHandle<Result<()>> {
    let (from, to) = (Arc::clone(from), Arc::clone(to));
    let (sender, receiver) = sync_channel(IN_FLIGHT);
    let (used, unused) = sync_channel(IN_FLIGHT);
    let (delay, rate) = (Duration::from_micros(arguments.rtt_us) / 2, arguments.mbit as f64 * 125_000.0);
    std::thread::spawn(move || write(&to, &receiver, &used));
    std::thread::spawn(move || read(&from, &sender, &unused, delay, rate))
}

/// Stamps packets.
fn read(
    mut from: &File,
    queue: &SyncSender<Parcel>,
    unused: &Receiver<Vec<u8>>,
    delay: Duration,
    rate: f64,
) -> Result<()> {
    let mut free = Instant::now();
    let mut packet = vec![0; MOST];
    loop {
        packet.resize(MOST, 0);
        let count = match from.read(&mut packet) {
            Ok(count) => count,
            // It is not up yet.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot take a packet"),
        };
        let now = Instant::now();
        if free.saturating_duration_since(now) > LONGEST {
            continue;
        }
        free = now.max(free) + Duration::from_secs_f64(count as f64 / rate);
        packet.truncate(count);
        if queue.send((free + delay, packet)).is_err() {
            bail!("packets are not delivered any more");
        }
        packet = unused.try_recv().unwrap_or_default();
    }
}

/// Delivers each packet at its time. One that the other end does not take is lost.
fn write(mut to: &File, queue: &Receiver<Parcel>, used: &SyncSender<Vec<u8>>) {
    for (due, packet) in queue {
        let left = due.saturating_duration_since(Instant::now());
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        let _ = to.write(&packet);
        // A full queue: there are enough.
        let _ = used.try_send(packet);
    }
}
