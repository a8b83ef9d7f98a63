//! A TCP relay that adds delay, so that one machine can simulate two that are far apart.
//!
//! ```text
//!  client ──▶ reader ──▶ queue of (time due, bytes) ──▶ writer ──▶ server      and the same back
//! ```
//!
//! Each direction of each connection delays every byte by half the round-trip time. A round-trip time of 0
//! shows the relay's own cost. The rate is unlimited unless one is given: then all connections of one
//! direction share a line of that rate, and bytes wait for their turn.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;

/// Maximum bytes of one read.
const CHUNK: usize = 256 << 10;
/// Maximum number of chunks in flight in one direction of a connection: up to 1 GiB, more than any window.
const IN_FLIGHT: usize = 4096;
/// The writer sleeps until this long before a chunk is due and spins for the rest, because a sleep ends late.
const SPIN: Duration = Duration::from_micros(100);

/// Relay TCP connections and add delay to them.
#[derive(Parser)]
struct Arguments {
    /// Address to accept connections on
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Address to connect them to
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: SocketAddr,
    /// Round-trip time to add [µs]
    #[arg(long, value_name = "MICROSECONDS")]
    rtt_us: u64,
    /// Megabits that each direction carries in a second, all connections together. 0 does not limit them
    #[arg(long, value_name = "MEGABITS", default_value_t = 0)]
    mbit: u64,
}

/// One direction of the line that all connections share.
struct Line {
    /// Half the round-trip time.
    delay: Duration,
    /// Bytes per second; 0 means unlimited.
    rate: u64,
    /// When the line will have carried everything that has arrived so far.
    free: Mutex<Instant>,
}

impl Line {
    fn new(arguments: &Arguments) -> Arc<Line> {
        let delay = Duration::from_micros(arguments.rtt_us) / 2;
        Arc::new(Line { delay, rate: arguments.mbit * 125_000, free: Mutex::new(Instant::now()) })
    }

    /// When bytes that arrive now reach the other end.
    fn due(&self, bytes: usize) -> Instant {
        let now = Instant::now();
        if self.rate == 0 {
            return now + self.delay;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = now.max(*free) + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        *free + self.delay
    }
}

/// Bytes, and when to deliver them.
type Parcel = (Instant, Vec<u8>);

fn main() -> ExitCode {
    match relay(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn relay(arguments: &Arguments) -> Result<()> {
    let (there, back) = (Line::new(arguments), Line::new(arguments));
    let listener = TcpListener::bind(arguments.listen)
        .with_context(|| format!("cannot listen at {}", arguments.listen))?;
    for client in listener.incoming() {
        let client = client.context("cannot accept a connection")?;
        // If the server is not running yet, only this client is affected.
        match TcpStream::connect(arguments.to) {
            Ok(server) => {
                one_way(&client, &server, &there)?;
                one_way(&server, &client, &back)?;
            }
            Err(error) => eprintln!("cannot connect to {}: {error}", arguments.to),
        }
    }
    Ok(())
}

/// Starts the two threads of one direction.
fn one_way(from: &TcpStream, to: &TcpStream, line: &Arc<Line>) -> Result<()> {
    to.set_nodelay(true)?;
    let (from, to) = (from.try_clone()?, to.try_clone()?);
    let (sender, receiver) = sync_channel(IN_FLIGHT);
    let line = Arc::clone(line);
    std::thread::spawn(move || read(from, &sender, &line));
    std::thread::spawn(move || write(to, &receiver));
    Ok(())
}

/// Stamps what arrives. An end or an error of the connection ends the queue.
fn read(mut from: TcpStream, queue: &SyncSender<Parcel>, line: &Line) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if queue.send((line.due(count), buffer[..count].to_vec())).is_err() {
            return;
        }
    }
}

/// Passes each parcel on at its time, then the end of the stream.
fn write(mut to: TcpStream, queue: &Receiver<Parcel>) {
    for (due, bytes) in queue {
        let left = due.saturating_duration_since(Instant::now());
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    // Fails only if the other direction has already ended the connection.
    let _ = to.shutdown(Shutdown::Write);
}
