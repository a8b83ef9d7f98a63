//! The guest driver on kernels that check themselves: `guest-driver/tests/debug-kernel.sh` builds them, and
//! `RGPU_TEST_KERNEL` names the folder of one.
//!
//! `cargo xtask test debug_kernels` runs this file and `driver.rs` on both kernels. One has KASAN, lockdep,
//! UBSAN, kmemleak and fault injection, the other KCSAN. Any report of the kernel fails the test; the first
//! test here proves that with broken drivers.

use std::fs;
use std::io::{Read, Seek};

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::driver_bed::{self, Bed, LONG, can_inject_faults, check_unleaked, check_unpinned, fuzz};
use rgpu_tests::guest::{self, Host, Options};
use rgpu_tests::machine::{Kernel, Machine};
use rgpu_tests::mock_device::Config;
use rgpu_tests::programs;

/// What the kernel under test checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watches {
    Memory,
    Races,
}

fn watches() -> Result<Watches> {
    ensure!(
        std::env::var_os("RGPU_TEST_KERNEL").is_some(),
        "RGPU_TEST_KERNEL names no debugging kernel; `cargo xtask test debug_kernels` builds and tests two"
    );
    let version = Kernel::V6_1.files()?.version;
    match () {
        () if version.contains("-kasan-") => Ok(Watches::Memory),
        () if version.contains("-kcsan-") => Ok(Watches::Races),
        () => bail!("{version} is none of the kernels of debug-kernel.sh"),
    }
}

fn roomy() -> Result<Bed> {
    let config = Config { channels_in_regions: true, ..Config::default() };
    Bed::with(Kernel::V6_1, config, 1536)
}

/// A defect: the text in a source file to replace, and what the kernel says about it.
struct Defect {
    on: Watches,
    says: &'static str,
    file: &'static str,
    is: &'static str,
    becomes: &'static str,
}

/// How kmemleak begins to describe memory that nothing refers to.
const LEAK: &str = "unreferenced object";

const DEFECTS: &[Defect] = &[
    Defect {
        on: Watches::Memory,
        says: "KASAN: ",
        file: "channel.c",
        is: "\trgpu_device_put(chan->dev);\n\tkfree(chan);\n",
        becomes: "\trgpu_device_put(chan->dev);\n\tkfree(chan);\n\tif (READ_ONCE(chan->ops) == 12345)\n\t\tpr_debug(\"never\");\n",
    },
    // An interrupt takes the same lock.
    Defect {
        on: Watches::Memory,
        says: "inconsistent lock state",
        file: "channel.c",
        is: "\txa_erase_irq(&dev->channels, chan->id);\n",
        becomes: "\txa_erase(&dev->channels, chan->id);\n",
    },
    Defect {
        on: Watches::Memory,
        says: "UBSAN: shift-out-of-bounds",
        file: "file.c",
        is: "\tif (create.flags)\n",
        becomes: "\tif (create.flags & 1 << (create.size >> PAGE_SHIFT))\n",
    },
    Defect {
        on: Watches::Memory,
        says: LEAK,
        file: "memory.c",
        is: "\trgpu_user_uncharge_pages(chan->user, region->page_count);\n\tkfree(region);\n",
        becomes: "\trgpu_user_uncharge_pages(chan->user, region->page_count);\n",
    },
    Defect {
        on: Watches::Races,
        says: "BUG: KCSAN: data-race",
        file: "file.c",
        is: "\tvoid __user *arg = (void __user *)value;\n\n",
        becomes: "\tvoid __user *arg = (void __user *)value;\n\n\tchan->dev->name[15]++;\n",
    },
];

/// How often a defective driver is exercised. KCSAN samples the accesses.
const ROUNDS: usize = 20;

fn notices(defect: &Defect) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let module = Kernel::V6_1.changed_driver(folder.path(), |sources| {
        let file = sources.join("src").join(defect.file);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        ensure!(text.contains(defect.is), "{} has no {:?} any more", defect.file, defect.is);
        Ok(fs::write(&file, text.replace(defect.is, defect.becomes))?)
    })?;
    let bed = roomy()?;
    bed.machine.check("rmmod virtio_rgpu", LONG)?;
    bed.machine.write_file("/broken.ko", 0o644, &fs::read(module)?)?;
    bed.machine.check("insmod /broken.ko", LONG)?;
    if defect.on == Watches::Races {
        // More accesses, for longer.
        let script = "cd /sys/module/kcsan/parameters && echo 300 > skip_watch && echo 500 > udelay_task";
        bed.machine.check(script, LONG)?;
    }
    for _ in 0..ROUNDS {
        // Calls may fail after the kernel's report.
        for test in ["selftest channel 1024", "selftest register", "selftest many 20", "fuzz 2000"] {
            bed.machine.run(&format!("rgpu_{test}"), LONG)?;
        }
        let leaks = defect.says == LEAK;
        let found = if leaks { check_unleaked(&bed.machine) } else { bed.machine.check_console() };
        if let Err(error) = found {
            let said = format!("{error:#}");
            ensure!(said.contains(defect.says), "another report than {:?}: {said}", defect.says);
            return Ok(());
        }
    }
    bail!("a driver that should have made the kernel say {:?} went unnoticed", defect.says)
}

#[test]
fn broken_drivers_are_noticed() -> Result<()> {
    let watches = watches()?;
    for defect in DEFECTS.iter().filter(|defect| defect.on == watches) {
        notices(defect)?;
        println!("noticed: {}", defect.says);
    }
    Ok(())
}

#[test]
fn a_call_that_runs_out_of_memory_fails_and_can_be_repeated() -> Result<()> {
    let watches = watches()?;
    let bed = roomy()?;
    if !can_inject_faults(&bed.machine)? {
        ensure!(watches == Watches::Races, "the kernel cannot inject faults");
        return Ok(());
    }
    let text = bed.machine.check("rgpu_faults calls", LONG * 10)?;
    println!("faults in calls: {text}");
    for (call, least) in [("create ", 3), ("connect ", 3), ("register ", 3), ("unregister ", 1)] {
        let rest = text.split(call).nth(1).with_context(|| format!("no {call} in {text}"))?;
        let count: u64 = rest.split_whitespace().next().unwrap_or_default().parse()?;
        ensure!(count >= least, "only {count} faults in {call}: {text}");
    }
    bed.check_idle()?;

    let name = bed.machine.check("cd /sys/bus/virtio/drivers/virtio_rgpu && echo virtio*", LONG)?;
    let text = bed.machine.check(&format!("rgpu_faults probe virtio_rgpu {name}"), LONG * 10)?;
    println!("faults in {text}");
    bed.selftest("register")?;
    bed.check_idle()?;
    check_unleaked(&bed.machine)
}

#[test]
fn many_random_calls_do_no_harm() -> Result<()> {
    watches()?;
    let bed = roomy()?;
    fuzz(&bed.machine, 60_000, "")?;
    bed.check_idle()?;
    bed.selftest("register")?;
    bed.check_idle()?;
    check_unleaked(&bed.machine)
}

#[test]
fn a_driver_that_comes_and_goes_leaves_nothing() -> Result<()> {
    watches()?;
    let bed = roomy()?;
    for _ in 0..10 {
        bed.selftest("many 10")?;
        bed.machine.check("rmmod virtio_rgpu && insmod /lib/modules/virtio_rgpu.ko", LONG)?;
    }
    bed.check_idle()?;
    check_unleaked(&bed.machine)
}

/// The first page of a channel that the real device accepts.
fn channel_header() -> Result<Vec<u8>> {
    let (file, _view) = test_kit::channel::in_a_file(1 << 20, "fuzz");
    let mut file = fs::File::from(file);
    let mut page = vec![0; protocol::channel::HEADER_SIZE];
    file.rewind()?;
    file.read_exact(&mut page)?;
    Ok(page)
}

/// Programs and random calls with the real device, over a transport.
fn real_device(transport: &'static str) -> Result<()> {
    const SOME: [&str; 4] = ["vectorAdd", "reduction", "multi", "kill_me"];
    watches()?;
    let host = Host::start(&format!("debug_kernels/{transport}"), Options::software(transport))?;
    let mut some = programs::portable()?;
    some.retain(|program| SOME.contains(&program.name.as_str()));
    ensure!(some.len() == SOME.len(), "some of {SOME:?} are not in the manifest");
    let builder = guest::builder(&some).memory_mib(2048).rgpu_socket(host.socket());
    let machine = driver_bed::with_program(builder, "rgpu_fuzz")?
        .contents("/channel", 0o644, channel_header()?)
        .boot()?;
    let all_pass = || -> Result<()> {
        for name in SOME.iter().filter(|name| **name != "kill_me") {
            let text = machine.check(name, LONG)?;
            ensure!(text.contains(&format!("PASS {name}")), "{name}: {text}");
        }
        idle(&machine)
    };
    all_pass()?;
    let before = host.at_rest()?;
    for part in ["copy", "kernel"] {
        let process = machine.spawn(&format!("exec kill_me {part}"))?;
        process.wait_for(&format!("RUNNING {part}"), LONG)?;
        process.kill()?;
        process.wait(LONG)?;
    }
    fuzz(&machine, 4000, "RGPU_CHANNEL=/channel")?;
    all_pass()?;
    host.check_settled(&before)?;
    check_unleaked(&machine)
}

fn idle(machine: &Machine) -> Result<()> {
    check_unpinned(machine)?;
    machine.check_console()
}

#[test]
fn the_driver_works_with_the_real_device_over_local() -> Result<()> {
    real_device("local")
}

#[test]
fn the_driver_works_with_the_real_device_over_tcp() -> Result<()> {
    real_device("tcp")
}
