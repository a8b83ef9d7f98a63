//! The machine for all measurements, and the measurements.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rgpu_tests::machine::{Accelerator, Machine, rdma};
use rgpu_tests::tree;

const LIMIT: Duration = Duration::from_secs(300);
/// Bytes of one measurement of bandwidth.
pub const VOLUME: u64 = 32 << 20;
/// Calls of one measurement of latency.
pub const CALLS: u32 = 500;
/// Ticks of `/proc/stat` in a second.
const TICKS: f64 = 100.0;

/// The sockets of rgpu's daemons for each transport; both lead to the same server.
pub const WAYS: [&str; 2] = ["local", "verbs"];

/// One measurement of bandwidth.
#[derive(Debug, Clone, Copy)]
pub struct Bulk {
    /// Megabytes (10⁶) per second.
    pub rate: f64,
    /// Milliseconds that all processors together spent in the kernel per MiB.
    pub kernel: f64,
    /// How many processors were in the kernel at a time, averaged over the transfer.
    pub busy: f64,
}

/// What one synchronous call costs a process, on average.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// System calls that read or write, including doorbells of queue pairs.
    pub calls: f64,
    /// How often a thread fell asleep.
    pub sleeps: f64,
}

/// A machine with a listener of each kind.
pub struct Bed {
    machine: Machine,
    /// Both ends' GID index for perftest, which does not find it by itself.
    gid: [String; 2],
}

impl Bed {
    /// Boots it, and starts `host-bridge`'s example and rgpu's daemons in it.
    pub fn new() -> Result<Bed> {
        let binaries = tree::binaries();
        let mut builder = rdma::builder()?.memory_mib(3072).program(binaries.join("verbs"), "/bin/verbs");
        builder = builder.program(binaries.join("pieces"), "/bin/pieces");
        for name in ["rgpu-server", "vhost-rgpu", "rgpuctl"] {
            builder = builder.program(binaries.join(name), Path::new("/opt/rgpu").join(name));
        }
        let bench = tree::programs().join("bench");
        ensure!(bench.exists(), "{} is missing: run `cargo xtask bench --verbs`", bench.display());
        let builder = builder.dir(tree::guest_libraries(), "/opt/rgpu/lib").file(bench, "/opt/rgpu/bench");
        let machine = rdma::boot(builder)?;
        let gid = |device: &str| {
            machine.check(
                &format!("cd /sys/class/infiniband/{device}/ports/1; for i in 0 1 2 3 4 5; do grep -q ffff:0a00 gids/$i && grep -q v2 gid_attrs/types/$i && echo $i && exit 0; done; exit 1"),
                LIMIT,
            )
        };
        let gid = [gid(rdma::SERVER.1)?, gid(rdma::CLIENT.1)?];
        machine
            .spawn(&format!("exec verbs listen 127.0.0.1:9800 --device {}", rdma::SERVER.1))?
            .wait_for("listening", LIMIT)?;
        machine.spawn(&format!(
            "exec /opt/rgpu/rgpu-server --insecure --listen tcp:127.0.0.1:9700 --listen unix:/run/server.sock --backend software --software-memory 256M --rdma-device {} --direct-to tcp:127.0.0.1:9701 --direct-verbs 2>/run/server.log",
            rdma::SERVER.1
        ))?;
        machine.check("for i in $(seq 600); do [ -S /run/server.sock ] && exit 0; sleep 0.1; done; cat /run/server.log; exit 1", LIMIT)?;
        for (way, server) in WAYS.into_iter().zip(["unix:/run/server.sock", "tcp:127.0.0.1:9700"]) {
            machine.spawn(&format!(
                "exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/{way}.sock --server {server} --transport {way} --rdma-device {} --status-socket /run/{way}.status 2>/run/{way}.log",
                rdma::CLIENT.1
            ))?;
            machine.check(&format!("for i in $(seq 600); do [ -S /run/{way}.sock ] && exit 0; sleep 0.1; done; cat /run/{way}.log; exit 1"), LIMIT)?;
        }
        Ok(Bed { machine, gid })
    }

    /// Whether the machine is virtualised rather than emulated.
    pub fn is_fast(&self) -> bool {
        self.machine.accelerator() == Accelerator::Kvm
    }

    /// Runs a command and measures how long the processors are in the kernel meanwhile. Returns its output
    /// and that time in milliseconds.
    fn watched(&self, command: &str) -> Result<(String, f64)> {
        let look = "grep -E '^cpu ' /proc/stat";
        let said =
            self.machine.check(&format!("{look}; {command}; status=$?; {look}; exit $status"), LIMIT)?;
        let in_kernel = |line: &str| -> Option<f64> {
            let fields: Vec<f64> = line.split_whitespace().skip(1).map_while(|f| f.parse().ok()).collect();
            // User, nice, system, idle, iowait, irq, softirq.
            Some(fields.get(2)? + fields.get(5)? + fields.get(6)?)
        };
        let looks: Vec<f64> =
            said.lines().filter(|line| line.starts_with("cpu ")).filter_map(in_kernel).collect();
        ensure!(looks.len() == 2, "not two readings of the processors' times in {said:?}");
        Ok((said, (looks[1] - looks[0]) / TICKS * 1e3))
    }

    /// `volume`: bytes transferred; `kernel`: milliseconds in the kernel meanwhile.
    fn bulk(rate: f64, volume: u64, kernel: f64) -> Bulk {
        let seconds = volume as f64 / (rate * 1e6);
        Bulk { rate, kernel: kernel / (volume as f64 / f64::from(1 << 20)), busy: kernel / 1e3 / seconds }
    }

    /// Measures only the verbs layer, with `host-bridge`'s example. `what`: `h2d` or `d2h`. Also returns the
    /// line that it prints, with its counts.
    pub fn layer(&self, what: &str, size: u64, pairs: u32, depth: u32) -> Result<(Bulk, String)> {
        let count = (VOLUME / size).clamp(1, 4000);
        let command = format!(
            "verbs connect 127.0.0.1:9800 --device {} --do {what} --size {size} --count {count} --queue-pairs {pairs} --queue-depth {depth} --fast --sleep",
            rdma::CLIENT.1
        );
        let said = self.machine.check(&command, LIMIT)?;
        Ok((Self::bulk(field(&said, "mb_per_s")?, count * size, field(&said, "kernel_ms")?), said))
    }

    /// A round trip of 64 bytes and its answer over the layer, in microseconds: the median of many, polled as
    /// perftest does.
    pub fn round_trip(&self) -> Result<f64> {
        let command = format!(
            "verbs connect 127.0.0.1:9800 --device {} --do ping --size 64 --count 2000",
            rdma::CLIENT.1
        );
        field(&self.machine.check(&command, LIMIT)?, "us_median")
    }

    /// A CUDA program that does one thing many times, over the daemons.
    fn program(way: &str, what: &str, size: u64, count: u64) -> String {
        format!(
            "LD_LIBRARY_PATH=/opt/rgpu/lib RGPU_SOCKET=/run/{way}.sock /opt/rgpu/bench time {what} {size} {count}"
        )
    }

    /// Page-locked asynchronous copies of a CUDA program over verbs. `what`: `h2d` or `d2h`.
    pub fn copies(&self, what: &str, size: u64) -> Result<Bulk> {
        let (name, count) = (if what == "h2d" { "htod_async" } else { "dtoh_async" }, VOLUME / size);
        let said = self.machine.check(&Self::program("verbs", name, size, count), LIMIT)?;
        Ok(Self::bulk(field(&said, "mb_per_s")?, count * size, field(&said, "kernel_ms")?))
    }

    /// Starts a second server at the other end of the link, and a daemon whose programs have the GPUs of
    /// both.
    pub fn start_pair(&self) -> Result<()> {
        let device = rdma::CLIENT.1;
        self.machine
            .spawn(&format!("exec pieces listen 127.0.0.1:9820 --device {}", rdma::SERVER.1))?
            .wait_for("listening", LIMIT)?;
        self.machine.spawn(&format!(
            "exec /opt/rgpu/rgpu-server --insecure --listen tcp:127.0.0.1:9701 --listen unix:/run/second.sock --backend software --software-memory 256M --rdma-device {device} --direct-to tcp:127.0.0.1:9700 --direct-verbs 2>/run/second.log"
        ))?;
        self.machine.spawn(
            "exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/pair.sock --server tcp:127.0.0.1:9700 --server tcp:127.0.0.1:9701 2>/run/pair.log",
        )?;
        self.machine.check("for i in $(seq 600); do [ -S /run/second.sock ] && [ -S /run/pair.sock ] && exit 0; sleep 0.1; done; cat /run/second.log /run/pair.log; exit 1", LIMIT)?;
        Ok(())
    }

    /// Pieces of this size as between two servers, by `host-bridge`'s example: `volume` bytes in all.
    pub fn pieces(&self, size: u64, volume: u64) -> Result<f64> {
        let said = self.machine.check(
            &format!(
                "pieces connect 127.0.0.1:9820 --device {} --size {size} --count {}",
                rdma::CLIENT.1,
                volume / size
            ),
            LIMIT,
        )?;
        field(&said, "mb_per_s")
    }

    /// Copies of a CUDA program from the first server's GPU to the second one's, one after the other:
    /// `volume` bytes in all. Returns how many connections the servers had for them, too.
    pub fn peer_copies(&self, size: u64, volume: u64) -> Result<(Bulk, usize)> {
        let count = volume / size;
        let opened = || -> Result<usize> {
            let log = self.machine.check("cat /run/server.log", LIMIT)?;
            Ok(log.matches("a direct connection to another server is open").count())
        };
        let before = opened()?;
        let said = self.machine.check(&Self::program("pair", "peer", size, count), LIMIT)?;
        let sent = self.machine.check(
            "sleep 1; grep 'session ended' /run/server.log | tail -n 1 | grep -o 'bytes_direct_verbs=[0-9]*'",
            LIMIT,
        )?;
        // Also those of a copy before the time began.
        ensure!(field(&sent, "bytes_direct_verbs")? >= (count * size) as f64, "not over verbs: {sent}");
        let bulk = Self::bulk(field(&said, "mb_per_s")?, count * size, field(&said, "kernel_ms")?);
        Ok((bulk, opened()? - before))
    }

    /// The median of a synchronous call of 64 bytes, in microseconds. `what`: `memory_info` or `dtoh`.
    pub fn call(&self, way: &str, what: &str) -> Result<f64> {
        field(&self.machine.check(&Self::program(way, what, 64, CALLS.into()), LIMIT)?, "us_median")
    }

    /// What a synchronous call costs `vhost-rgpu` and the worker, according to the kernel's counters while a
    /// program makes calls for a second.
    pub fn cost(&self) -> Result<BTreeMap<&'static str, Cost>> {
        let names = ["vhost-rgpu", "worker"];
        let look = "
            with_device() {
                for process in /proc/[0-9]*; do
                    case $(readlink $process/exe) in */$1) ls -l $process/fd | grep -q uverbs && basename $process;; esac
                done
            }
            look() {
                /opt/rgpu/rgpuctl status --json --socket /run/verbs.status | grep -o '\"commands\":[ 0-9]*' | grep -o '[0-9]*' | sort -n | tail -n 1
                for pid in $bridge $worker; do
                    awk '/^sysc[rw]:/ { all += $2 } END { print all + 0 }' /proc/$pid/io
                    cat /proc/$pid/task/*/status | awk '/^voluntary/ { all += $2 } END { print all + 0 }'
                done
            }";
        let command = format!(
            "{look}
            {} & program=$!
            sleep 1
            bridge=$(with_device vhost-rgpu); worker=$(with_device rgpu-server)
            look; sleep 2; look; kill $program",
            Self::program("verbs", "memory_info", 64, 1_000_000)
        );
        let said = self.machine.check(&command, LIMIT)?;
        let numbers: Vec<f64> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
        ensure!(numbers.len() == 10, "counters are missing: {said}");
        let delta = |i: usize| numbers[5 + i] - numbers[i];
        ensure!(delta(0) > 0.0, "no calls were made: {said}");
        let cost =
            |i: usize| Cost { calls: delta(1 + 2 * i) / delta(0), sleeps: delta(2 + 2 * i) / delta(0) };
        Ok(names.into_iter().enumerate().map(|(i, name)| (name, cost(i))).collect())
    }

    /// Runs one of perftest's programs on both ends; `held`: each on its own processor. Returns the columns
    /// of its last row, and the milliseconds in the kernel.
    fn pair(&self, program: &str, options: &str, held: bool) -> Result<(Vec<f64>, f64)> {
        let ends = [rdma::SERVER.1, rdma::CLIENT.1];
        // The same retransmission timeout as rgpu's queue pairs.
        let hold = |end: usize| if held { format!("taskset {} ", 1 << end) } else { String::new() };
        let side = |end: usize| {
            let program = hold(end) + program;
            format!("{program} -d {} -x {} -m 4096 -F -u 16 {options}", ends[end], self.gid[end])
        };
        let server = self.machine.spawn(&format!("exec {} 2>&1", side(0)))?;
        // The program prints that it waits, but only when it ends, because its output is not a terminal. So
        // look for a listening socket at port 18515 (hexadecimal 4853).
        self.machine.check("for i in $(seq 600); do grep -q ':4853 00000000:0000 0A' /proc/net/tcp && exit 0; grep -q ':4853 0*:0000 0A' /proc/net/tcp6 && exit 0; sleep 0.02; done; exit 1", LIMIT).with_context(|| format!("{program} does not listen"))?;
        let said = self.watched(&format!("{} 127.0.0.1 2>&1", side(1)));
        if said.is_err() {
            server.kill()?;
        }
        let ((said, kernel), _) = (said?, server.wait(LIMIT)?);
        let numbers = |line: &str| {
            line.split_whitespace().map(str::parse).collect::<std::result::Result<Vec<f64>, _>>()
        };
        let row = said.lines().rev().find_map(|line| numbers(line).ok().filter(|row| row.len() > 3));
        Ok((row.with_context(|| format!("{program} gives no figures: {said}"))?, kernel))
    }

    /// Bandwidth by perftest. Unlike our own programs, it does not say how long the kernel was busy during
    /// the transfer. So that is measured over its whole run, less `but` milliseconds, the kernel's time for a
    /// run that transfers hardly anything ([`perftest_start`](Self::perftest_start)).
    pub fn perftest(&self, size: u64, pairs: u32, depth: u32, held: bool, but: f64) -> Result<Bulk> {
        let count = (VOLUME / size).clamp(16, 4000);
        let (row, kernel) = self.write_bandwidth(size, pairs, depth, held, count)?;
        // Bytes, iterations on all queue pairs, peak, average in MiB/s, messages.
        let (Some(iterations), Some(mib)) = (row.get(1), row.get(3)) else {
            anyhow::bail!("a row of ib_write_bw is cut off: {row:?}")
        };
        Ok(Self::bulk(mib * 1.048_576, *iterations as u64 * size, (kernel - but).max(0.0)))
    }

    /// Milliseconds in the kernel of a run of `ib_write_bw` with the smallest possible transfer.
    pub fn perftest_start(&self, pairs: u32) -> Result<f64> {
        let (_, kernel) = self.write_bandwidth(4096, pairs, 128, false, 5)?;
        Ok(kernel)
    }

    /// RoCE in software loses a connection now and then when the machine is busy, so try again.
    fn write_bandwidth(
        &self,
        size: u64,
        pairs: u32,
        depth: u32,
        held: bool,
        count: u64,
    ) -> Result<(Vec<f64>, f64)> {
        let options = format!("-s {size} -q {pairs} -t {depth} -n {count}");
        let mut row = self.pair("ib_write_bw", &options, held);
        for _ in 0..3 {
            if let Err(e) = &row {
                eprintln!("trying again: {e:#}");
                row = self.pair("ib_write_bw", &options, held);
            }
        }
        row
    }

    /// One way, in microseconds.
    pub fn perftest_latency(&self) -> Result<f64> {
        let (row, _) = self.pair("ib_write_lat", "-s 64 -n 2000", false)?;
        // Bytes, iterations, least, most, typical.
        row.get(4).copied().context("a row of ib_write_lat is cut off")
    }
}

/// The number after `name=` in a line of `key=value`.
pub fn field(text: &str, name: &str) -> Result<f64> {
    let word = text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(word.with_context(|| format!("no {name} in {text:?}"))?.parse()?)
}
