//! The guest driver, in booted machines, against a device that checks what the driver does (`mock_device`).
//!
//! `guest-driver/tests/rgpu_selftest*.c` run in the guest and judge the user API; the tests here check what
//! reaches the device, what is pinned, and that the kernel logs no complaint.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rgpu_tests::driver_bed::{Bed, LONG, fuzz, with_program};
use rgpu_tests::machine::{Builder, Kernel, Machine, Process};
use rgpu_tests::mock_device::{ACCESS_PLATFORM, Config, Kind, MockDevice};

fn passes(test: &str) -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest(test)?;
    bed.check_idle()
}

#[test]
fn limits_are_those_of_the_configuration_space() -> Result<()> {
    let config =
        Config { max_channels: 7, max_channel_size: 1 << 20, max_registered: 12345678, ..Config::default() };
    let bed = Bed::with(Kernel::V6_1, config, 512)?;
    let text = bed.selftest("info")?;
    assert!(text.contains("version 1 channels 7 size 1048576 registered 12345678"), "{text}");
    // Every user in the guest may use the device.
    assert_eq!(bed.machine.check("stat -c %a /dev/rgpu0", LONG)?, "666");
    bed.check_idle()
}

#[test]
fn a_channel_is_the_same_bytes_on_both_sides() -> Result<()> {
    let bed = Bed::new()?;
    for kib in [4, 8, 12, 1024, 2052, 34 * 1024, 128 * 1024] {
        bed.selftest(&format!("channel {kib}"))?;
        let requests = bed.device.requests();
        let create = requests.iter().rfind(|r| r.kind == Kind::Create).expect("a channel was created");
        assert_eq!(create.size, kib << 10);
    }
    // In large blocks: 128 MiB are 32,768 pages.
    let largest = bed.device.requests().iter().map(|r| r.extents.len()).max();
    assert!(largest < Some(1000), "{largest:?} extents in a channel");
    bed.check_idle()
}

#[test]
fn registered_memory_is_the_same_bytes_on_both_sides() -> Result<()> {
    passes("register")
}

#[test]
fn registered_memory_stays_the_programs_own_after_a_fork() -> Result<()> {
    passes("register-then-fork")
}

#[test]
fn memory_registered_for_reading_follows_later_writes() -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest("register-read-only")?;
    assert!(bed.device.requests().iter().filter(|r| r.kind == Kind::Register).all(|r| r.flags == 1));
    bed.check_idle()
}

#[test]
fn scattered_memory_takes_many_extents_in_one_request() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config::default(), 1536)?;
    bed.selftest("register-scattered 256")?;
    let largest = bed.device.requests().iter().map(|r| r.extents.len()).max().unwrap_or(0);
    assert!(largest > 20_000, "{largest} extents");
    bed.check_idle()
}

#[test]
fn more_extents_than_the_device_accepts_are_refused() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { max_extents: 100, ..Config::default() }, 512)?;
    let output = bed.machine.run("rgpu_selftest register-scattered 16", LONG)?;
    assert!(!output.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Argument list too long"), "{output}");
    bed.check_idle()
}

#[test]
fn pinned_memory_is_limited_by_memlock() -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest("memlock")?;
    bed.selftest("memlock-after-close")?;
    bed.check_idle()
}

#[test]
fn memory_is_let_go_if_its_registration_took_too_long() -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest("late-registration")?;
    assert_eq!(bed.device.count(Kind::Unregister), 1);
    bed.check_idle()
}

/// Locks of a program's memory can be held for as long as the program likes, by a file system of its own.
fn with_fuse() -> Result<Bed> {
    let bed = Bed::boot(Machine::builder().module("fuse"), Config::default())?;
    // They are held on purpose.
    bed.machine.check("echo 0 > /proc/sys/kernel/hung_task_timeout_secs", LONG)?;
    Ok(bed)
}

#[test]
fn memory_is_let_go_without_the_programs_mmap_lock() -> Result<()> {
    let bed = with_fuse()?;
    bed.selftest("unregister-while-mmap-waits")?;
    bed.check_idle()
}

#[test]
fn registrations_beyond_the_devices_limit_are_refused() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { max_registered: 1 << 20, ..Config::default() }, 512)?;
    let output = bed.machine.run("rgpu_selftest register-scattered 2", LONG)?;
    assert!(String::from_utf8_lossy(&output.stderr).contains("No space left"), "{output}");
    bed.selftest("register-scattered 1")?;
    bed.check_idle()
}

#[test]
fn malformed_arguments_are_refused() -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest("arguments")?;
    // The region whose number could not be returned has been removed again.
    assert_eq!(bed.device.count(Kind::Unregister), 1);
    bed.check_idle()
}

#[test]
fn a_wait_ends_by_a_changed_word_a_wake_a_timeout_or_a_signal() -> Result<()> {
    passes("wait")
}

#[test]
fn one_wake_wakes_every_waiter() -> Result<()> {
    passes("waiters")
}

#[test]
fn refusals_of_the_device_reach_the_program() -> Result<()> {
    passes("refused")
}

#[test]
fn channels_are_limited_and_their_ids_are_reused() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { max_channels: 5, ..Config::default() }, 512)?;
    bed.selftest("max-channels 5")?;
    assert!(bed.device.requests().iter().all(|r| r.channel < 5));
    bed.check_idle()
}

#[test]
fn one_user_leaves_channels_for_others() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { max_channels: 8, ..Config::default() }, 512)?;
    // Half of the device's by default.
    for (limit, channels) in [(0, 4), (3, 3)] {
        bed.machine
            .check(&format!("echo {limit} > /sys/module/virtio_rgpu/parameters/user_channels"), LONG)?;
        let process = bed.machine.spawn(&format!("rgpu_selftest user-channels {channels}"))?;
        process.wait_for("full", LONG)?;
        bed.selftest("connects-as 1001")?;
        // A privileged program is not limited.
        bed.selftest(&format!("max-channels {}", 8 - channels))?;
        bed.machine.check("touch /tmp/go-on", LONG)?;
        let output = process.wait(LONG)?;
        ensure!(output.success(), "{output}");
        bed.check_idle()?;
        bed.machine.check("rm /tmp/go-on", LONG)?;
    }
    Ok(())
}

#[test]
fn one_user_leaves_room_for_requests_of_others() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.hold(Kind::Register);
    // More than the queue has room for.
    let process = bed.machine.spawn("exec rgpu_selftest registers-at-once 300")?;
    process.wait_for("ready", LONG)?;
    // A part of the queue.
    bed.device.wait_until("its requests arrive", LONG, |d| d.count(Kind::Register) >= 64)?;
    bed.selftest("connects-as 1001")?;
    bed.device.wait_until("another user's channels are destroyed", LONG, |d| d.count(Kind::Destroy) == 2)?;
    assert_eq!(bed.device.count(Kind::Register), 64);
    // To end a channel needs no room.
    process.kill()?;
    bed.device.wait_until("the first one's as well", LONG, |d| d.count(Kind::Destroy) == 3)?;
    bed.device.release();
    bed.check_idle()
}

#[test]
fn users_who_keep_page_locks_hinder_no_others() -> Result<()> {
    let bed = with_fuse()?;
    bed.device.hold(Kind::Unregister);
    let processes = keep_page_locks(&bed, 9)?;
    // As many as the queue has room for.
    let arrived = bed.device.wait_until("requests arrive", LONG, |d| d.count(Kind::Unregister) == 256);
    arrived.with_context(|| {
        let came = bed.device.count(Kind::Unregister);
        let guest = bed.machine.check("ps; cat /proc/[0-9]*/stack; dmesg | tail -n 40", LONG);
        format!("{came} have; in the guest: {guest:?}")
    })?;
    bed.device.release();
    // More than a workqueue of the driver runs at a time.
    bed.device.wait_until("all requests arrive", LONG, |d| d.count(Kind::Unregister) == 9 * 64)?;
    bed.selftest("connects-as 1010")?;
    // Waits until its memory is unpinned.
    bed.selftest("register")?;
    bed.machine.check("touch /tmp/go-on", LONG)?;
    for process in processes {
        let output = process.wait(LONG)?;
        ensure!(output.success(), "{output}");
    }
    bed.check_idle()
}

/// So many users unregister 64 pages each of a process that keeps their locks. None of them keeps locks
/// before all have registered their pages, however slow the machine is.
fn keep_page_locks(bed: &Bed, users: usize) -> Result<Vec<Process>> {
    let begin =
        |uid| bed.machine.spawn(&format!("exec rgpu_selftest unregister-locked-pages {}", 1001 + uid));
    let processes = (0..users).map(begin).collect::<Result<_>>()?;
    let ready = "$(find /tmp -name 'ready-*' -size +0 | wc -l)";
    bed.machine.check(&format!("until [ {ready} = {users} ]; do sleep 1; done; touch /tmp/keep"), LONG)?;
    Ok(processes)
}

#[test]
fn a_user_who_keeps_page_locks_hinders_neither_removal_nor_reboot() -> Result<()> {
    let bed = with_fuse()?;
    let driver = "/sys/bus/virtio/drivers/virtio_rgpu";
    let name = bed.machine.check(&format!("cd {driver} && echo virtio*"), LONG)?;
    let _processes = keep_page_locks(&bed, 1)?;
    bed.device.wait_until("its requests arrive", LONG, |d| d.count(Kind::Unregister) == 64)?;
    bed.machine.check(&format!("echo {name} > {driver}/unbind && echo {name} > {driver}/bind"), LONG)?;
    bed.selftest("register")?;
    ensure!(bed.pinned()? > 0, "the locks are not kept");
    // Without sync(2), which may wait for the locks.
    bed.machine.booted_after(|| bed.machine.spawn("reboot -nf").map(drop))?;
    bed.selftest("channel 64")?;
    bed.check_idle()
}

#[test]
fn memory_of_one_user_is_limited() -> Result<()> {
    let bed = Bed::new()?;
    bed.machine.check("echo 8 > /sys/module/virtio_rgpu/parameters/user_memory_mib", LONG)?;
    bed.selftest("user-memory 8")?;
    // The limit does not apply to a privileged program.
    bed.selftest("register-scattered 16")?;
    bed.check_idle()
}

#[test]
fn fifty_processes_at_once_do_not_disturb_each_other() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config::default(), 768)?;
    bed.selftest("many 50")?;
    assert_eq!(bed.device.count(Kind::Create), 50);
    assert_eq!(bed.device.count(Kind::Register), 250);
    bed.check_idle()
}

#[test]
fn a_forked_child_does_not_share_the_channel() -> Result<()> {
    passes("fork")
}

#[test]
fn a_channel_ends_with_its_process_even_if_a_child_has_the_file_open() -> Result<()> {
    let bed = Bed::new()?;
    bed.selftest("orphan")?;
    bed.device.wait_until("the channel is destroyed", LONG, |d| d.count(Kind::Destroy) == 1)?;
    assert_eq!(bed.machine.check("pidof rgpu_selftest | wc -w", LONG)?, "1");
    bed.machine.check("killall -9 rgpu_selftest", LONG)?;
    bed.check_idle()
}

#[test]
fn doorbells_reach_the_device() -> Result<()> {
    let bed = Bed::new()?;
    let text = bed.selftest("doorbells 20")?;
    let count: u64 = text.split_whitespace().next().unwrap_or("").parse()?;
    // The device may see several doorbells as one, even all of them if it gets no processor time meanwhile.
    assert!((1..=21).contains(&count), "{text}");
    bed.check_idle()
}

#[test]
fn the_kernel_can_read_a_channel_for_a_debugger() -> Result<()> {
    passes("kernel-access")
}

#[test]
fn random_calls_do_no_harm() -> Result<()> {
    let config = Config { channels_in_regions: true, ..Config::default() };
    let bed = Bed::with(Kernel::V6_1, config, 1024)?;
    fuzz(&bed.machine, 10_000, "")?;
    bed.check_idle()?;
    bed.selftest("register")?;
    bed.check_idle()
}

#[test]
fn a_killed_program_leaves_nothing_behind() -> Result<()> {
    let bed = Bed::new()?;
    let processes: Vec<_> =
        (0..5).map(|_| bed.machine.spawn("exec rgpu_selftest hold")).collect::<Result<_>>()?;
    for process in &processes {
        process.wait_for("ready", LONG)?;
    }
    assert_eq!((bed.device.channels().len(), bed.device.regions()), (5, 5));
    assert!(bed.pinned()? >= 5 * 1024);
    for process in processes {
        process.kill()?;
        assert_eq!(process.wait(LONG)?.status, 128 + 9);
    }
    bed.check_idle()?;
    assert_eq!(bed.device.count(Kind::Destroy), 5);
    Ok(())
}

#[test]
fn pages_of_a_program_killed_while_connecting_stay_until_the_device_answers() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.hold(Kind::Create);
    let process = bed.machine.spawn("exec rgpu_selftest connect-slowly")?;
    bed.device.wait_until("CREATE_CHANNEL arrives", LONG, |d| d.count(Kind::Create) == 1)?;
    process.kill()?;
    assert_eq!(process.wait(LONG)?.status, 128 + 9);
    // The process still has its pages. Otherwise the kernel would give some of them to this one, and the mock
    // would notice.
    let second = bed.machine.spawn("rgpu_selftest register-scattered 64")?;
    bed.device.wait_until("another CREATE_CHANNEL arrives", LONG, |d| d.count(Kind::Create) == 2)?;
    bed.device.release();
    assert!(second.wait(LONG)?.success());
    bed.device.wait_until("both are destroyed", LONG, |d| d.count(Kind::Destroy) == 2)?;
    bed.check_idle()
}

#[test]
fn pages_of_a_program_killed_while_registering_stay_pinned_until_the_device_answers() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.hold(Kind::Register);
    let process = bed.machine.spawn("exec rgpu_selftest register-slowly")?;
    bed.device.wait_until("REGISTER_MEMORY arrives", LONG, |d| d.count(Kind::Register) == 1)?;
    process.kill()?;
    assert_eq!(process.wait(LONG)?.status, 128 + 9);
    bed.device.wait_until("DESTROY_CHANNEL arrives", LONG, |d| d.count(Kind::Destroy) == 1)?;
    bed.device.wait_until("the channel is gone", LONG, |d| d.channels().is_empty())?;
    assert!(bed.pinned()? >= 256, "unpinned before the device has answered");
    bed.device.release();
    bed.check_idle()
}

#[test]
fn a_device_that_does_not_answer_hangs_no_program_that_exits() -> Result<()> {
    let bed = Bed::new()?;
    let process = bed.machine.spawn("exec rgpu_selftest hold")?;
    process.wait_for("ready", LONG)?;
    bed.device.hold(Kind::Destroy);
    process.kill()?;
    assert_eq!(process.wait(LONG)?.status, 128 + 9);
    assert!(bed.pinned()? >= 1024, "unpinned before the device has answered");
    bed.device.release();
    bed.check_idle()
}

#[test]
fn nobody_but_the_owner_of_a_channel_waits_for_a_device_that_does_not_answer() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.hold(Kind::Destroy);
    for (sent, destroyed) in [(0, 30), (1, 60)] {
        // One after the other, they would take five minutes.
        let process = bed.machine.spawn(&format!("exec rgpu_selftest dropped {sent}"))?;
        assert!(process.wait(Duration::from_secs(150))?.success());
        bed.device.wait_until("all are closed", LONG, |d| d.count(Kind::Destroy) == destroyed)?;
    }
    bed.device.release();
    bed.check_idle()
}

#[test]
fn a_channel_that_the_device_does_not_destroy_is_destroyed_later() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.refuse_destroys(2);
    bed.selftest("channel 64")?;
    bed.device.wait_until("DESTROY_CHANNEL is repeated", LONG, |d| d.count(Kind::Destroy) == 3)?;
    bed.check_idle()?;
    // A device that goes away meanwhile has released the memory.
    bed.device.refuse_destroys(usize::MAX);
    bed.selftest("channel 64")?;
    bed.device.wait_until("DESTROY_CHANNEL arrives", LONG, |d| d.count(Kind::Destroy) >= 4)?;
    bed.machine.check("rmmod virtio_rgpu && insmod /lib/modules/virtio_rgpu.ko", LONG)?;
    bed.device.refuse_destroys(0);
    bed.selftest("channel 64")?;
    bed.check_idle()
}

#[test]
fn a_device_that_is_removed_wakes_everyone_and_leaves_nothing_pinned() -> Result<()> {
    let bed = Bed::new()?;
    let driver = "/sys/bus/virtio/drivers/virtio_rgpu";
    let name = bed.machine.check(&format!("cd {driver} && echo virtio*"), LONG)?;
    for round in 1..=3 {
        let process = bed.machine.spawn("rgpu_selftest gone")?;
        process.wait_for("ready", LONG)?;
        bed.machine.check(&format!("echo {name} > {driver}/unbind"), LONG)?;
        let output = process.wait(LONG)?;
        assert!(output.success(), "round {round}: {output}");
        bed.check_idle()?;
        assert!(!bed.machine.run("test -e /dev/rgpu0", LONG)?.success());
        bed.machine.check(&format!("echo {name} > {driver}/bind"), LONG)?;
        bed.selftest("channel 1024")?;
    }
    bed.check_idle()?;
    // When all files are closed, the module can be unloaded and loaded again.
    bed.machine.check("rmmod virtio_rgpu && insmod /lib/modules/virtio_rgpu.ko", LONG)?;
    bed.selftest("register")?;
    bed.check_idle()
}

#[test]
fn files_that_stay_open_after_removal_do_no_harm() -> Result<()> {
    let bed = Bed::new()?;
    let driver = "/sys/bus/virtio/drivers/virtio_rgpu";
    let name = bed.machine.check(&format!("cd {driver} && echo virtio*"), LONG)?;
    let process = bed.machine.spawn("exec sleep 1000 < /dev/rgpu0")?;
    bed.machine.check("until pidof sleep; do :; done", LONG)?;
    bed.machine.check(&format!("echo {name} > {driver}/unbind && echo {name} > {driver}/bind"), LONG)?;
    bed.selftest("channel 64")?;
    let output = bed.machine.run("rmmod virtio_rgpu", LONG)?;
    assert!(!output.success(), "the module goes while a file of it is open");
    process.kill()?;
    process.wait(LONG)?;
    bed.machine.check("rmmod virtio_rgpu", LONG)?;
    bed.check_idle()
}

#[test]
fn a_suspend_ends_channels_but_not_the_device() -> Result<()> {
    let bed = Bed::new()?;
    bed.device.hold(Kind::Unregister);
    let process = bed.machine.spawn("rgpu_selftest suspend")?;
    process.wait_for("ready", LONG)?;
    // A request that is not answered does not keep the machine from it.
    bed.device.wait_until("it is sent", LONG, |d| d.count(Kind::Unregister) == 1)?;
    bed.machine.suspend_and_wake(LONG)?;
    let output = process.wait(LONG)?;
    assert!(output.success(), "{output}");
    bed.selftest("channel 64")?;
    bed.check_idle()
}

#[test]
fn a_reboot_resets_the_device() -> Result<()> {
    let bed = Bed::new()?;
    let process = bed.machine.spawn("exec rgpu_selftest hold")?;
    process.wait_for("ready", LONG)?;
    bed.machine.reboot()?;
    assert!(process.wait(LONG).is_err());
    assert!(bed.device.channels().is_empty());
    bed.selftest("channel 1024")?;
    bed.check_idle()
}

#[test]
fn two_devices_have_two_device_files() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let devices = [
        MockDevice::start(dir.path().join("a"), Config::default())?,
        MockDevice::start(dir.path().join("b"), Config { max_channels: 3, ..Config::default() })?,
    ];
    let builder = Machine::builder().driver(true);
    let builder = builder.rgpu_socket(devices[0].socket()).rgpu_socket(devices[1].socket());
    let machine = with_program(builder, "rgpu_selftest")?.boot()?;
    machine.check("rgpu_selftest channel 64", LONG)?;
    assert_eq!((devices[0].count(Kind::Create), devices[1].count(Kind::Create)), (1, 0));
    machine.check("RGPU_DEVICE=/dev/rgpu1 rgpu_selftest many 3", LONG)?;
    assert_eq!((devices[0].count(Kind::Create), devices[1].count(Kind::Create)), (1, 3));
    for device in &devices {
        assert!(device.violations().is_empty(), "{:?}", device.violations());
    }
    machine.check_console()
}

#[test]
fn a_device_of_another_type_is_ignored_silently() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { magic: 0x1234_5678, ..Config::default() }, 512)?;
    assert!(!bed.machine.run("test -e /dev/rgpu0", LONG)?.success());
    let log = bed.machine.console_log();
    assert!(!log.contains("virtio_rgpu virtio"), "{log}");
    Ok(())
}

/// Waits until the kernel has printed these words. A busy console prints later.
fn logged(machine: &Machine, words: &str) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while !machine.console_log().contains(words) {
        ensure!(Instant::now() < deadline, "no {words:?} in\n{}", machine.console_log());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn a_device_of_another_version_is_refused_with_both_versions() -> Result<()> {
    let bed = Bed::with(Kernel::V6_1, Config { version: 9, ..Config::default() }, 512)?;
    assert!(!bed.machine.run("test -e /dev/rgpu0", LONG)?.success());
    logged(&bed.machine, "device has version 9, but the driver supports version 1")
}

#[test]
fn a_device_behind_an_iommu_is_refused() -> Result<()> {
    let config = Config { features: ACCESS_PLATFORM, ..Config::default() };
    let bed = Bed::boot(Machine::builder().rgpu_option("iommu_platform=on"), config)?;
    assert!(!bed.machine.run("test -e /dev/rgpu0", LONG)?.success());
    logged(&bed.machine, "requires VIRTIO_F_ACCESS_PLATFORM (iommu_platform=on), which is not supported")?;
    bed.check_idle()?;

    // rgpu's own device does not offer the feature. QEMU says so before a guest boots.
    let started = Bed::boot(Machine::builder().rgpu_option("iommu_platform=on"), Config::default());
    let said = started.err().map(|error| format!("{error:#}")).unwrap_or_default();
    assert!(said.contains("iommu_platform=true is not supported by the device"), "{said}");
    Ok(())
}

/// The device gets guest-physical addresses, even if the guest's other devices use an IOMMU or bounce
/// buffers.
fn works_next_to(builder: Builder, there: &str) -> Result<()> {
    let bed = Bed::boot(builder, Config::default())?;
    bed.machine.check(there, LONG)?;
    for test in ["channel 4096", "register", "register-scattered 16", "many 10"] {
        bed.selftest(test)?;
        bed.check_idle()?;
    }
    Ok(())
}

#[test]
fn the_driver_works_in_a_guest_with_an_iommu() -> Result<()> {
    let builder = ["-device", "intel-iommu"].into_iter().fold(Machine::builder(), Builder::qemu_arg);
    works_next_to(builder.kernel_arg("intel_iommu=on"), "test -e /sys/class/iommu/dmar0")
}

#[test]
fn the_driver_works_in_a_guest_with_bounce_buffers() -> Result<()> {
    let builder = Machine::builder().kernel_arg("swiotlb=force");
    works_next_to(builder, "dmesg | grep -q 'software IO TLB: area num'")
}

/// A short form of the tests above, which run on Linux 6.1, for another kernel.
fn works_on(kernel: Kernel) -> Result<()> {
    let bed = Bed::with(kernel, Config::default(), 768)?;
    for test in [
        "info",
        "channel 1024",
        "register",
        "register-then-fork",
        "register-read-only",
        "register-scattered 32",
        "memlock",
        "memlock-after-close",
        "arguments",
        "wait",
        "waiters",
        "refused",
        "many 20",
        "fork",
        "kernel-access",
    ] {
        bed.selftest(test)?;
        bed.check_idle()?;
    }
    bed.machine.check("echo 8 > /sys/module/virtio_rgpu/parameters/user_memory_mib", LONG)?;
    bed.selftest("user-memory 8")?;
    bed.check_idle()?;
    let process = bed.machine.spawn("exec rgpu_selftest hold")?;
    process.wait_for("ready", LONG)?;
    process.kill()?;
    process.wait(LONG)?;
    bed.check_idle()?;

    let driver = "/sys/bus/virtio/drivers/virtio_rgpu";
    let name = bed.machine.check(&format!("cd {driver} && echo virtio*"), LONG)?;
    let process = bed.machine.spawn("rgpu_selftest gone")?;
    process.wait_for("ready", LONG)?;
    bed.machine.check(&format!("echo {name} > {driver}/unbind"), LONG)?;
    let output = process.wait(LONG)?;
    ensure!(output.success(), "{output}");
    bed.machine.check(&format!("echo {name} > {driver}/bind"), LONG)?;
    bed.selftest("channel 64")?;
    bed.check_idle()
}

#[test]
fn the_driver_works_on_linux_6_12() -> Result<()> {
    works_on(Kernel::V6_12)
}

#[test]
fn the_driver_works_on_linux_7() -> Result<()> {
    works_on(Kernel::V7)
}
