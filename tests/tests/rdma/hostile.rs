//! Peers that break the protocol, by `tests/peers/src/bin/hostile.rs`, against both daemons.

use super::*;

/// A hostile bridge's attacks, each with a word of the expected answer from the server or from the refusing
/// device.
const HOSTILE_BRIDGES: [(&str, &str); 16] = [
    ("longer-header", "no piece of data"),
    ("no-header", "no piece of data"),
    ("across-slots", "no piece of data"),
    ("immediate", "no piece of data"),
    ("slot-in-use", "which is in use"),
    ("outside", "access error"),
    ("before", "access error"),
    ("wild-key", "access error"),
    ("foreign-key", "access error"),
    ("replayed-key", "access error"),
    ("swapped-queues", "ended"),
    ("beyond-credit", "refused"),
    ("unknown-frame", "frame of kind 99"),
    ("huge-frame", "more than 33554432"),
    ("wild-record", "record"),
    ("impossible-key", "key that cannot be"),
];

/// Has a bridge do all of this beside a session that survives it and gets the right data. Passes what the
/// bridge says, and the expected words, to `answered`, which returns whether they fit.
fn attacks(rgpu: &Rgpu, attacks: &[(&str, &str)], answered: impl Fn(&str, &str) -> bool) -> Result<()> {
    let bystander = rgpu.spawn("copies")?;
    for (what, words) in attacks {
        let output = rgpu
            .machine
            .run(&format!("hostile bridge 127.0.0.1:9700 --device {} --do {what}", rdma::CLIENT.1), LONG)?;
        let said = output.text();
        ensure!(output.success() && answered(&said, words), "{what}: {output}\n{}", rgpu.logs());
        eprintln!("      {what}: {said}");
    }
    let output = bystander.wait(LONG)?;
    ensure!(output.success(), "the bystander: {output}\n{}", rgpu.logs());
    Ok(())
}

pub(super) fn a_hostile_bridge_is_shown_out(rgpu: &Rgpu) -> Result<()> {
    attacks(rgpu, &HOSTILE_BRIDGES, |said, words| {
        // The device refuses an access and stops the queue. The server may learn of either first.
        let refused = words == "access error" && said.contains("asked for what it may not");
        let over = said.starts_with("ended: ") || said.starts_with("refused: ");
        over && (said.contains(words) || refused)
    })?;
    rgpu.nothing_left()?;
    rgpu.passes("vectorAdd")
}

/// The same when it comes back to its session. The server keeps sessions.
const HOSTILE_RETURNS: [(&str, &str); 6] = [
    ("resume-more", "of which"),
    ("resume-less", "resumes what cannot be"),
    ("resume-key", "key that cannot be"),
    ("resume-queues", "other queues than it began with"),
    ("resume-stranger", "no session has this token"),
    ("resume-twice", "not the latest"),
];

pub(super) fn a_bridge_that_comes_back_and_lies_harms_itself_alone(rgpu: &Rgpu) -> Result<()> {
    // One whose process ends before anybody could come back.
    let vanish = format!("hostile bridge 127.0.0.1:9700 --device {} --do vanish", rdma::CLIENT.1);
    rgpu.machine.check(&vanish, LONG)?;
    attacks(rgpu, &HOSTILE_RETURNS, |said, words| said.contains(words))?;
    // Its session is not kept for the grace period.
    let ended = "for i in $(seq 3000); do grep -q 'bridge has not come back within 10 s' /run/server.log && exit 0; sleep 0.1; done; exit 1";
    rgpu.machine.check(ended, LONG).with_context(|| rgpu.logs())?;
    Ok(())
}

/// A hostile server's attacks, each with a word of its peer's answer.
const HOSTILE_SERVERS: [(&str, &str); 9] = [
    ("immediate", "for command"),
    ("wild-write", "access error"),
    ("free-slot", "which is not in use"),
    ("free-wild-slot", "which is not in use"),
    ("unasked-data", "which expects none"),
    ("unasked-reply", "60000"),
    ("unknown-progress", "kind 99"),
    ("unknown-frame", "unknown kind 99"),
    ("huge-frame", "more than 33554432"),
];

pub(super) fn a_hostile_server_loses_its_client(rgpu: &Rgpu) -> Result<()> {
    let machine = &rgpu.machine;
    let daemon = machine.spawn(&format!(
        "export NO_COLOR=1; exec /opt/rgpu/vhost-rgpu --insecure --native-socket /run/victim.sock --server tcp:127.0.0.1:9701 --transport verbs --rdma-device {} 2>/run/vhost.log",
        rdma::CLIENT.1
    ))?;
    machine.check("for i in $(seq 3000); do [ -S /run/victim.sock ] && exit 0; sleep 0.1; done; cat /run/vhost.log; exit 1", LONG)?;
    for (what, words) in HOSTILE_SERVERS {
        let hostile = machine
            .spawn(&format!("exec hostile server 127.0.0.1:9701 --device {} --do {what}", rdma::SERVER.1))?;
        hostile.wait_for("listening", LONG)?;
        let program = machine.spawn(&format!(
            "{ENVIRONMENT} RGPU_SOCKET=/run/victim.sock exec /opt/rgpu/programs/vectorAdd"
        ))?;
        let output = hostile.wait(LONG)?;
        ensure!(output.success() && output.text().contains(words), "{what}: {output}\n{}", rgpu.logs());
        let ended = program.wait(LONG)?;
        ensure!(!ended.success(), "{what}: the program succeeded: {ended}");
        eprintln!("      {what}: {}", output.text().lines().last().unwrap_or_default());
    }
    // It still works with other servers.
    daemon.kill()?;
    let output = daemon.wait(LONG)?;
    ensure!(output.status == 128 + 9, "the daemon had ended before: {output}\n{}", rgpu.logs());
    rgpu.nothing_left()
}
