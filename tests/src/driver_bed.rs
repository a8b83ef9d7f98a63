//! A machine with the guest driver and a device that checks what the driver does
//! ([`mock_device`](crate::mock_device)).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::machine::{Builder, Kernel, Machine, image};
use crate::mock_device::{Config, MockDevice};

/// Time limit of everything in an emulated guest on a busy machine. No test depends on how long something
/// takes.
pub const LONG: Duration = Duration::from_secs(600);

/// The machine and its device.
pub struct Bed {
    /// The machine.
    pub machine: Machine,
    /// Its device.
    pub device: MockDevice,
    _dir: tempfile::TempDir,
}

/// Puts one of the programs in `guest-driver/tests` into a guest's `/bin`.
pub fn with_program(builder: Builder, name: &str) -> Result<Builder> {
    let program = image::guest_program(name)?;
    Ok(builder.file(program, format!("/bin/{name}")))
}

impl Bed {
    /// A machine with Linux 6.1 and a device with the usual limits.
    pub fn new() -> Result<Self> {
        Self::with(Kernel::V6_1, Config::default(), 512)
    }

    /// A machine with this kernel and this much memory (MiB), and a device with these limits.
    pub fn with(kernel: Kernel, config: Config, memory_mib: u32) -> Result<Self> {
        Self::boot(Machine::builder().kernel(kernel).memory_mib(memory_mib), config)
    }

    /// The machine that `builder` describes, with the driver, its test programs, and a device with these
    /// limits.
    pub fn boot(builder: Builder, config: Config) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("rgpu-mock-").tempdir()?;
        let device = MockDevice::start(dir.path().join("rgpu.sock"), config)?;
        let builder = builder.driver(true).rgpu_socket(device.socket());
        let programs = ["rgpu_selftest", "rgpu_fuzz", "rgpu_faults"];
        let machine = programs.into_iter().try_fold(builder, with_program)?.boot()?;
        Ok(Self { machine, device, _dir: dir })
    }

    /// Runs one test of the selftest to its end.
    pub fn selftest(&self, test: &str) -> Result<String> {
        self.machine.check(&format!("rgpu_selftest {test}"), LONG)
    }

    /// Number of pinned pages in the whole guest.
    pub fn pinned(&self) -> Result<i64> {
        pinned(&self.machine)
    }

    /// What must hold whenever no program uses the device.
    pub fn check_idle(&self) -> Result<()> {
        self.device.wait_until("all channels are destroyed", LONG, |d| d.channels().is_empty())?;
        check_unpinned(&self.machine)?;
        ensure!(self.device.violations().is_empty(), "{:#?}", self.device.violations());
        self.machine.check_console()
    }
}

fn pinned(machine: &Machine) -> Result<i64> {
    let text = machine.check("cat /proc/sys/vm/stat_refresh && grep nr_foll_pin /proc/vmstat", LONG)?;
    let value = |name: &str| -> Result<i64> {
        let line = text.lines().find(|l| l.starts_with(name));
        Ok(line.and_then(|l| l.split_whitespace().nth(1)).unwrap_or("").parse()?)
    };
    Ok(value("nr_foll_pin_acquired")? - value("nr_foll_pin_released")?)
}

/// Waits until none of the guest's pages is pinned. The device may have answered before the driver's work
/// item has run.
pub fn check_unpinned(machine: &Machine) -> Result<()> {
    let deadline = Instant::now() + LONG;
    loop {
        let pinned = pinned(machine)?;
        if pinned == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{pinned} pages stay pinned");
    }
}

/// Makes every allocation and every copy from or to a program fail on request, silently. Returns whether the
/// machine's kernel can do that.
pub fn can_inject_faults(machine: &Machine) -> Result<bool> {
    let script = "cd /sys/kernel/debug 2>/dev/null && { [ -d failslab ] || mount -t debugfs none .; cd /sys/kernel/debug; }
        [ -d failslab ] || exit 0
        for kind in failslab fail_page_alloc fail_usercopy; do echo 0 > $kind/verbose; done
        for kind in failslab fail_page_alloc; do echo N > $kind/ignore-gfp-wait; done
        echo 0 > fail_page_alloc/min-order
        echo yes";
    Ok(machine.check(script, LONG)? == "yes")
}

/// Checks that the driver has leaked no memory, if the machine's kernel can tell (kmemleak). kmemleak only
/// looks at memory older than five seconds and may miss a reference for a moment.
pub fn check_unleaked(machine: &Machine) -> Result<()> {
    if !can_inject_faults(machine)? {
        return Ok(());
    }
    let scan =
        "cd /sys/kernel/debug && sleep 6 && echo scan > kmemleak && echo scan > kmemleak && cat kmemleak";
    let mut text = String::new();
    for _ in 0..4 {
        text = machine.check(scan, LONG)?;
        if !text.contains("rgpu") {
            return Ok(());
        }
    }
    anyhow::bail!("the driver has lost memory:\n{text}")
}

/// Makes about `calls` random calls of the driver in a machine with `rgpu_fuzz`. Returns how many there were,
/// and how many of each kind succeeded. At least one of each kind must.
///
/// `RGPU_FUZZ_CALLS` and `RGPU_FUZZ_SEED` in the environment make the run longer or different.
pub fn fuzz(machine: &Machine, calls: u64, environment: &str) -> Result<BTreeMap<String, u64>> {
    can_inject_faults(machine)?;
    let (calls, seed) = (number("RGPU_FUZZ_CALLS", calls)?, number("RGPU_FUZZ_SEED", 1)?);
    let text = machine.check(&format!("{environment} SEED={seed} rgpu_fuzz {calls}"), LONG * 100)?;
    println!("seed {seed}: {text}");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut counts = BTreeMap::new();
    for pair in words.chunks(2) {
        let [name, count] = pair else { anyhow::bail!("expected counts: {text}") };
        counts.insert((*name).to_owned(), count.parse().with_context(|| format!("in {text}"))?);
    }
    // Only some kernels can inject faults.
    for (name, count) in counts.iter().filter(|(name, _)| *name != "faults") {
        ensure!(*count > 0, "no {name} succeeded: {text}");
    }
    Ok(counts)
}

/// A number from the environment.
fn number(variable: &str, default: u64) -> Result<u64> {
    std::env::var(variable)
        .map_or(Ok(default), |value| value.parse().with_context(|| format!("{variable} is not a number")))
}
