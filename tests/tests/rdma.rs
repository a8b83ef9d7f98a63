//! The transport `verbs`, over RoCE in software, in machines that the tests boot.
//!
//! Booting is slow, so each test boots one machine and runs its parts there one after another. If a part
//! fails, its name is printed and the others still run. `RGPU_RDMA_PART=word` runs only parts with that word
//! in their names. Limits are generous, because machines may be emulated on busy hosts.
//!
//! `cargo xtask test rdma` runs three tests at once, in the order of their names: the long ones come first.
//!
//! The tests are here, with whatever may depend on the device once more on a virtual function. Their parts:
//!
//! - [`layer`]: the layer itself, between two processes;
//! - [`sessions`]: programs, with a server that keeps no sessions (`--grace-seconds 0`), as in all tests but
//!   those of [`survival`];
//! - [`hostile`]: peers that break the protocol;
//! - [`survival`]: queue pairs and control connections that break, keepers and device processes that are
//!   killed, and a guest that is stopped. With `RGPU_SURVIVE_CUTS`, so many interruptions of each kind; the
//!   figures are in `target/logs/survive-verbs/`;
//! - [`copies`]: copies between two servers, one at each end of the link.
//!
//! See `rgpu_tests::machine::rdma` for the machine.

#[path = "rdma/copies.rs"]
mod copies;
#[path = "rdma/hostile.rs"]
mod hostile;
#[path = "rdma/layer.rs"]
mod layer;
#[path = "rdma/sessions.rs"]
mod sessions;
#[path = "rdma/survival.rs"]
mod survival;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::machine::nested::{self, Nested};
use rgpu_tests::machine::{Builder, Machine, Process, rdma};
use rgpu_tests::tree;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hostile::*;
use layer::*;
use sessions::*;
use survival::*;

/// Time limit of everything in an emulated machine on a busy host. No test depends on how long something
/// takes.
const LONG: Duration = Duration::from_secs(900);

/// Where the daemons and the examples are; `cargo xtask test rdma` builds them.
fn built() -> Result<PathBuf> {
    let binaries = tree::binaries();
    for name in ["rgpu-server", "vhost-rgpu", "rgpuctl", "verbs", "hostile", "hostile_direct", "supervisor"] {
        ensure!(binaries.join(name).exists(), "{name} is missing: run `cargo xtask test rdma`");
    }
    Ok(binaries)
}

/// The parts of a test, which share a machine.
#[derive(Default)]
struct Parts {
    ran: usize,
    failed: Vec<String>,
}

impl Parts {
    fn run(&mut self, name: &str, part: impl FnOnce() -> Result<()>) {
        if std::env::var("RGPU_RDMA_PART").is_ok_and(|word| !name.contains(&word)) {
            return;
        }
        let begin = Instant::now();
        self.ran += 1;
        let result = part();
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        eprintln!("    {name}: {verdict}, {:.1} s", begin.elapsed().as_secs_f64());
        if let Err(e) = result {
            self.failed.push(format!("{name}: {e:#}"));
        }
    }

    /// Fails if a part failed, or if `RGPU_RDMA_PART` matched none.
    fn end(self) -> Result<()> {
        ensure!(self.ran > 0, "no part of this test ran: RGPU_RDMA_PART fits none");
        match self.failed.as_slice() {
            [] => Ok(()),
            failed => bail!("{} of {} parts failed:\n{}", failed.len(), self.ran, failed.join("\n")),
        }
    }
}

/// Takes the link down for a second. Returns false if it was down for much longer: that happens on a busy
/// host, and a session may then have given the link up after the configured ten seconds.
fn cut_for_a_second(machine: &Machine) -> Result<bool> {
    let seconds = || -> Result<u64> {
        machine.check("cut -d. -f1 /proc/uptime", LONG)?.trim().parse().context("seconds of uptime")
    };
    let before = seconds()?;
    machine.check(&format!("{}; sleep 1; {}", rdma::CUT, rdma::MEND), LONG)?;
    rdma::wait_up(machine)?;
    let after = seconds()?;
    Ok(after - before <= 4)
}

/// How often the link may be down for too long because the host is busy.
const CUTS: usize = 10;

#[test]
fn broken_queue_pairs_and_control_connections_are_survived() -> Result<()> {
    let machine = rdma::boot(Rgpu::builder()?)?;
    let rgpu = Rgpu::with_grace(rdma::SERVER.1, rdma::CLIENT.1, machine, 120)?;
    let mut parts = Parts::default();
    parts.run("broken control connections", || programs_survive_broken_control_connections(&rgpu));
    parts.run("killed device processes", || programs_survive_killed_device_processes(&rgpu));
    parts.run("killed and upgraded keepers", || a_program_survives_killed_and_upgraded_keepers(&rgpu));
    parts.run("a long cut", || a_program_survives_a_long_cut(&rgpu));
    parts.run("a cut that lasts too long", || a_cut_that_lasts_too_long_ends_the_program(&rgpu));
    parts.run("lies", || a_bridge_that_comes_back_and_lies_harms_itself_alone(&rgpu));
    if let Some(least) = interruptions()? {
        for kind in INTERRUPTIONS {
            parts.run(&format!("many: {}", kind.name()), || a_program_survives_many(&rgpu, kind, least));
        }
    }
    parts.run("nothing is left", || rgpu.nothing_left());
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

#[test]
fn the_verbs_layer_delivers_data_intact_and_detects_failures() -> Result<()> {
    let machine = rdma::boot(Bed::builder()?)?;
    let mut bed = Bed::new(machine, rdma::SERVER.1, rdma::CLIENT.1)?;
    let mut parts = Parts::default();
    parts.run("every depth and number of queues", || every_depth_and_number_of_queues(&bed));
    parts.run("a wrong choice is named", || a_wrong_choice_is_named(&bed));
    parts.run("keys that were taken back", || a_key_that_was_taken_back_is_refused(&bed));
    parts.run("loss and reordering", || loss_and_reordering_do_no_harm(&bed));
    parts.run("replaced queue pairs", || queue_pairs_are_replaced_and_nothing_is_lost_or_repeated(&bed));
    parts.run("eight clients at once", || eight_clients_at_once_get_their_own_data(&bed));
    parts.run("a link down for a second", || a_link_down_for_a_second_is_outlived(&bed));
    parts.run("a link down for good", || a_link_down_for_good_ends_both_sides(&bed));
    parts.run("a killed peer", || a_killed_peer_is_noticed_and_leaves_nothing_behind(&mut bed));
    parts.run("the kernel's log", || bed.machine.check_console());
    parts.end()
}

#[test]
fn every_program_runs_over_verbs_and_hostile_peers_harm_no_other_session() -> Result<()> {
    let rgpu = Rgpu::new(rdma::SERVER.1, rdma::CLIENT.1, rdma::boot(Rgpu::builder()?)?)?;
    let mut parts = Parts::default();
    for program in PROGRAMS {
        parts.run(program, || rgpu.passes(program));
    }
    for program in ["pinned_bulk", "copies"] {
        parts.run(&format!("no copy of {program}"), || bulk_data_is_copied_by_no_cpu(&rgpu, program));
    }
    parts.run("an idle session", || an_idle_session_takes_no_processor(&rgpu));
    parts.run("nothing is left", || rgpu.nothing_left());
    parts.run("eight programs at once", || eight_programs_at_once_pass(&rgpu));
    parts.run("a killed program", || a_killed_program_takes_nobody_along(&rgpu));
    parts.run("a hostile bridge", || a_hostile_bridge_is_shown_out(&rgpu));
    parts.run("a hostile server", || a_hostile_server_loses_its_client(&rgpu));
    parts.run("a bad link", || programs_pass_over_a_bad_link(&rgpu));
    parts.run("a cut link", || a_short_cut_is_outlived_and_a_long_one_ends_the_program(&rgpu));
    parts.run("a killed server", || a_killed_server_ends_the_program_with_a_reason(&rgpu));
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

/// The whole chain: programs in a virtual machine, on a host that reaches the server by RDMA. The hosts are
/// in an emulated machine, so the virtual machine is emulated twice.
#[test]
fn guests_reach_the_server_over_verbs_and_no_cpu_copies_their_data() -> Result<()> {
    // A line begins the second program, and another one ends it.
    let nested = Nested::new(
        "export LD_LIBRARY_PATH=/opt/rgpu/lib; RGPU_STATS=1 /opt/rgpu/pinned_bulk; read go; \
         /opt/rgpu/rounds until & read go; kill -TERM $!; wait $!",
    )?
    .dir(&tree::guest_libraries(), "/opt/rgpu/lib")?
    .file(&tree::programs().join("pinned_bulk"), "/opt/rgpu/pinned_bulk")?
    .file(&tree::programs().join("rounds"), "/opt/rgpu/rounds")?;
    let machine = rdma::boot(nested.put_into(Rgpu::builder()?)?)?;
    let rgpu = Rgpu::with_grace(rdma::SERVER.1, rdma::CLIENT.1, machine, 600)?;
    let guest = rgpu.machine.spawn(&Nested::command("/run/vm.sock"))?;
    let mut parts = Parts::default();
    parts.run("no copy of what a guest sends", || {
        no_cpu_copies(&rgpu, "the guest", || {
            // It takes minutes to boot even on an idle host.
            guest.wait_for("PASS pinned_bulk", 3 * LONG).with_context(|| rgpu.logs())
        })
    });
    parts.run("a stopped guest", || a_stopped_guest_goes_on(&rgpu, &guest));
    parts.run("its end", || {
        let output = guest.wait(LONG)?;
        ensure!(output.text().contains(&format!("{}0", nested::STATUS)), "{output}");
        rgpu.nothing_left()
    });
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}

#[test]
fn programs_run_over_virtual_functions() -> Result<()> {
    let machine = rdma::boot(rdma::with_virtual_functions(Rgpu::builder()?))?;
    rdma::virtual_function(&machine)?;
    let bed = Bed::new(machine, "rxepeer", rdma::FUNCTION)?;
    let mut parts = Parts::default();
    for what in ["h2d --size 300001 --count 4", "d2h --size 300001 --count 4", "ping --size 64 --count 50"] {
        parts.run(what, || bed.job(&format!("--do {what} --sleep")).map(drop));
    }
    bed.listener.kill()?;
    let rgpu = Rgpu::new("rxepeer", rdma::FUNCTION, bed.machine)?;
    for program in ["vectorAdd", "copies", "streams_events"] {
        parts.run(program, || rgpu.passes(program));
    }
    parts.run("no copy", || bulk_data_is_copied_by_no_cpu(&rgpu, "pinned_bulk"));
    parts.run("a function taken down", || a_function_taken_down_ends_the_program(&rgpu));
    parts.run("a killed server", || a_killed_server_ends_the_program_with_a_reason(&rgpu));
    parts.run("the kernel's log", || rgpu.machine.check_console());
    parts.end()
}
