//! NCCL's messages between devices of two servers, by rgpu's own network plugin.

use super::*;

const NCCL: &str = "nccl_net";

/// The numbers that the program tells: bytes between kernels' memory, and the others.
fn told(said: &str) -> Result<[u64; 2]> {
    let mut numbers = said.split(' ').filter_map(|word| word.parse().ok());
    Ok([(); 2].map(|()| numbers.next().unwrap_or(0)))
}

/// Which of the messages between kernels go from server to server over this transport. Over `local`, they are
/// in memory that the processes share with the servers.
fn direct_of(transport: Transport, kernels: u64) -> u64 {
    if matches!(transport, Transport::Local) { 0 } else { kernels }
}

/// What went from server to server, and what through the processes.
fn ways(stderr: &str) -> Result<[u64; 2]> {
    Ok([stats(stderr, "nccl_direct_bytes")?, stats(stderr, "nccl_staged_bytes")?])
}

#[test]
fn nccls_messages_between_kernels_go_from_server_to_server() -> Result<()> {
    for transport in support::TRANSPORTS {
        let rigs = connected("nccl-direct", &[transport])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), NCCL)?;
        let outcome = programs::run(command.env("RGPU_STATS", "1"), programs::LIMIT)?;
        let [kernels, others] = told(outcome.verdict(NCCL).with_context(|| format!("over {transport:?}"))?)?;
        let [direct, staged] = ways(&outcome.stderr)?;
        let expected = direct_of(transport, kernels);
        // Some of what is interrupted counts as well, and all of it goes from kernel to kernel.
        let as_expected = if expected > 0 {
            direct >= expected && staged == others
        } else {
            direct == 0 && staged >= kernels
        };
        ensure!(as_expected, "{transport:?}: {direct} and {staged} of {kernels} and {others} bytes");
        for rig in &rigs {
            eventually(|| {
                let bytes = counter(rig, "bytes_direct")?;
                ensure!(bytes >= expected, "{bytes} bytes where the program sent {expected}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn nccls_messages_arrive_while_calls_of_the_driver_wait_for_kernels_that_wait_for_them() -> Result<()> {
    for transport in support::TRANSPORTS {
        let rigs = connected_with("nccl-waiting", &[transport], &["--software-imitate", "waiting-calls"])?;
        let mut command = with_servers(&servers(&rigs, [transport, transport]), NCCL)?;
        let outcome = programs::run(command.arg("waiting").env("RGPU_STATS", "1"), programs::LIMIT)?;
        let [kernels, _] = told(outcome.verdict(NCCL).with_context(|| format!("over {transport:?}"))?)?;
        let direct = direct_of(transport, kernels);
        let counted = ways(&outcome.stderr)?;
        ensure!(counted == [direct, kernels - direct], "{transport:?}: {counted:?} of {kernels} bytes");
    }
    Ok(())
}

#[test]
fn where_servers_have_no_connection_nccls_messages_pass_through_the_processes() -> Result<()> {
    let rigs = two("nccl-staged")?;
    for transports in [[Transport::Tcp, Transport::Tcp], [Transport::Local, Transport::Tcp]] {
        let mut command = with_servers(&servers(&rigs, transports), NCCL)?;
        command.env("RGPU_STATS", "1").env("RGPU_LOG", "info");
        let outcome = programs::run(&mut command, programs::LIMIT)?;
        let [kernels, others] = told(outcome.verdict(NCCL).with_context(|| format!("over {transports:?}"))?)?;
        let [direct, staged] = ways(&outcome.stderr)?;
        ensure!(direct == 0 && staged >= kernels + others, "{direct} and {staged} bytes");
        ensure!(outcome.stderr.contains("NCCL's messages to"), "it is not said why: {}", outcome.stderr);
    }
    Ok(())
}

/// A process that receives and one that sends, each with the device of its own server.
fn two_processes(rigs: &[Rig; 2], transport: Transport, modes: [&str; 2]) -> Result<[Child; 2]> {
    let start = |rig: &Rig, arguments: &[&str]| -> Result<Child> {
        let mut command = with_servers(&[address(rig, transport)], NCCL)?;
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.env("RGPU_STATS", "1").spawn()?)
    };
    let mut receiver = start(&rigs[0], &modes[..1])?;
    let handle = line(&mut receiver)?;
    let sender = start(&rigs[1], &[modes[1], handle.trim()])?;
    Ok([receiver, sender])
}

/// The program that `rgpuctl run` has started.
fn program_of(run: &Child) -> Result<i32> {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id()))?;
    let mut children = children.split(' ').filter_map(|pid| pid.parse().ok());
    let is_it = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == NCCL)
    };
    children.find(is_it).context("there is no such program")
}

#[test]
fn nccls_messages_go_from_server_to_server_for_two_processes_as_well() -> Result<()> {
    for (transport, direct) in [(Transport::Tcp, true), (Transport::Local, true), (Transport::Tcp, false)] {
        let rigs = if direct { connected("nccl-two", &[transport])? } else { two("nccl-two")? };
        let [receiver, sender] = two_processes(&rigs, transport, ["receive", "send"])?;
        let ends = [ended(receiver)?, ended(sender)?];
        ensure!(ends.iter().all(|(_, last)| last.starts_with("PASS")), "over {transport:?}: {ends:?}");
        let [_, (text, last)] = ends;
        let [kernels, others] = told(&last)?;
        let direct = if direct { direct_of(transport, kernels) } else { 0 };
        let (expected, counted) = ([direct, kernels + others - direct], ways(&text)?);
        ensure!(counted == expected, "{counted:?} bytes instead of {expected:?}");
    }
    Ok(())
}

#[test]
fn if_one_end_of_nccls_messages_dies_the_other_one_has_an_error() -> Result<()> {
    for round in 0..5 {
        let mut rigs = connected("nccl-killed", &[Transport::Tcp])?;
        let before: Vec<_> = rigs.iter().map(Rig::idle_holdings).collect::<Result<_>>()?;
        let mut both = two_processes(&rigs, Transport::Tcp, ["endless", "flood"])?;
        for program in &mut both {
            ensure!(line(program)? == "under way\n", "round {round}: nothing is sent");
        }
        let [receiver, sender] = both;
        let kill = |pid| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
        // A process, a server's worker, or the connection between the workers.
        match round {
            0 => kill(program_of(&receiver)?)?,
            1 => kill(program_of(&sender)?)?,
            2 => kill(worker(&rigs[0])?)?,
            3 => kill(worker(&rigs[1])?)?,
            _ => cut(worker(&rigs[1])?, rigs[0].port)?,
        }
        let ends = [ended(receiver)?, ended(sender)?];
        for (end, (text, last)) in ends.iter().enumerate() {
            let killed = round == end;
            let own = round == end + 2;
            // Where the server is lost, CUDA has an error before the network has.
            let fine = last.contains("error 6") || own && (last.contains("error 2") || last.contains("FAIL"));
            ensure!(killed || fine, "round {round}, end {end}: {text}");
            ensure!(!text.contains("instead of"), "bytes that were not sent: {text}");
        }
        for (rig, before) in rigs.iter_mut().zip(&before) {
            rig.check_left_nothing(before).with_context(|| format!("round {round}"))?;
            rig.check_healthy()?;
        }
    }
    Ok(())
}
