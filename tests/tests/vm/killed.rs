//! `vhost-rgpu` itself is killed while programs of a guest work. A service manager has kept its descriptors
//! and starts another; QEMU and the guest notice nothing.

use test_kit::manager::Manager;

use super::stop::{patient_host, work_through, working};
use super::*;

/// The least number of kills: `RGPU_KILLS`.
fn kills() -> u64 {
    std::env::var("RGPU_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(12)
}

/// Kills the daemon, and has the service manager start the next.
fn replace(host: &mut Host, manager: &Manager) -> Result<()> {
    host.kill_bridge()?;
    host.start_bridge_by(manager.command(tree::binaries().join("vhost-rgpu")))
}

fn programs_go_on_after_the_daemon_was_killed(transport: &'static str) -> Result<()> {
    let manager = Manager::new();
    // A server is not told of the end of a program whose process is killed on the way, and keeps its session
    // so long.
    let mut host = patient_host("killed", transport, 60)?;
    replace(&mut host, &manager)?;
    let mut bed = working(host)?;
    let before = bed.base_line()?;
    let count = work_through(&mut bed, kills(), |bed| {
        ensure!(bed.host.bridge()?.status()?["sessions_lost"] == 0, "sessions were lost");
        replace(&mut bed.host, &manager)
    })?;
    println!("{transport}: killed {count} times");
    let status = bed.host.bridge()?.status()?;
    ensure!(
        (&status["keepers_before"], &status["sessions_lost"]) == (&count.into(), &0.into()),
        "{status:#}"
    );
    bed.check_after("kill -9 of vhost-rgpu", &before)
}

#[test]
fn programs_continue_after_the_hosts_daemon_was_killed_over_local() -> Result<()> {
    programs_go_on_after_the_daemon_was_killed("local")
}

#[test]
fn programs_continue_after_the_hosts_daemon_was_killed_over_tcp() -> Result<()> {
    programs_go_on_after_the_daemon_was_killed("tcp")
}
