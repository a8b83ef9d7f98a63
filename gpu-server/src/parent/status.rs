//! The status socket. It sends one JSON object to each connection and closes it.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handover::Inherited;
use sandbox::Inspected;
use serde_json::json;

use super::control::Control;
use super::listen::{Files, serve_unix};
use super::session::Session;
use super::state::{Illness, Server, State};
use super::workers::Managed;
use crate::cache::store::Figures;
use crate::driver::cuda::nvml::readings::Reading;

/// Starts serving the status at `path`.
pub(super) fn start(
    server: &Arc<Server>,
    path: &Path,
    inherited: &mut Inherited,
    files: &mut Files,
) -> anyhow::Result<()> {
    serve_unix(server, (path, 0o660), "rgpu-status", (inherited, files), |server, stream| {
        send(stream, &format!("{:#}\n", describe(server)), READ_WITHIN);
    })
}

/// How long a client may take to read the status, while others wait.
const READ_WITHIN: Duration = Duration::from_secs(5);

fn send(stream: UnixStream, text: &str, within: Duration) {
    // The client may be gone, or may not read.
    let _ = Control::Local(stream).send(text.as_bytes(), within);
}

fn describe(server: &Server) -> serde_json::Value {
    let readings = server.gpus.watched();
    // Without the lock: that reads a dozen files of the kernel's for each worker, and anybody who may read
    // the status may do so all the time.
    let pids: Vec<u32> = server.lock().workers.keys().copied().collect();
    let inspected: HashMap<u32, Inspected> =
        pids.into_iter().map(|pid| (pid, sandbox::inspect(pid))).collect();
    let state = server.lock();
    let (backend, devices) = match &state.serving {
        Some((backend, devices)) => (Some(backend.as_str()), devices.as_slice()),
        None => (None, &[][..]),
    };
    let row_of = |(pid, managed): (&u32, &Managed)| {
        // One that has been started since is read now.
        let inspected = inspected.get(pid).cloned().unwrap_or_else(|| sandbox::inspect(*pid));
        worker_row(*pid, managed, &inspected)
    };
    let mut workers: Vec<_> = state.workers.iter().map(row_of).collect();
    workers.sort_by_key(|row| row["pid"].as_u64());
    let principals = principals(server, &state);
    let leases: Vec<_> = state.leases.all().map(|lease| state.row(lease, Instant::now())).collect();
    let sessions: Vec<_> =
        state.sessions.iter().map(|(worker, session)| row(*worker, session, &readings)).collect();
    json!({
        "daemon": "rgpu-server",
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "listen": super::listen::addresses(&server.options.listen),
        "backend": backend,
        "devices": devices.join(", "),
        "workers_ready": state.gpu.idle.len(),
        "workers_starting": state.gpu.starting,
        "sessions_waiting": state.gpu.queue.len(),
        "draining": state.draining(),
        "drain_seconds_left": state.drain_seconds_left(),
        "devices_unhealthy": unhealthy(&state),
        "max_sessions": server.options.max_sessions,
        "max_leases": server.options.max_leases,
        "sessions_begun": state.sessions_begun,
        "sessions_lost": state.sessions_lost,
        "workers_crashed": state.workers_crashed,
        "kernels_overrun": state.kernels_overrun,
        "cache": server.cache.as_ref().map(|cache| cache_of(cache.figures())),
        "swap": swap_of(server, &state),
        "gpus": gpus(server, &state, &readings),
        "workers": workers,
        "principals": principals,
        "leases": leases,
        "leases_granted": state.leases_granted,
        "sessions": sessions,
    })
}

/// The sum of figures for which workers are not trusted: it may be any number.
fn sum(figures: impl Iterator<Item = u64>) -> u64 {
    figures.fold(0, u64::saturating_add)
}

/// Device memory that was moved. Null if none ever is.
fn swap_of(server: &Server, state: &State) -> Option<serde_json::Value> {
    let swapping = state.swapping.as_ref()?;
    let [left, returned] = state.moved();
    let devices = state.devices(&server.options);
    Some(json!({
        "memory_limit": server.options.worker.swap.memory,
        "memory_kept": state.kept_for_swap(),
        "away": sum(devices.iter().map(|number| state.away(*number))),
        "bytes_left": left,
        "bytes_returned": returned,
        "held_back": swapping.held_back,
    }))
}

fn cache_of(figures: Figures) -> serde_json::Value {
    let Figures { folder, bytes, limits, hits, misses, saved, damaged, failed } = figures;
    json!({
        "folder": folder,
        "bytes": bytes,
        "limit": limits.all,
        "client_limit": limits.client,
        "hits": hits,
        "misses": misses,
        "bytes_saved": saved,
        "blocks_damaged": damaged,
        "blocks_failed": failed,
    })
}

/// The devices that the server shares, with NVML's figures; null if there are none.
fn gpus(server: &Server, state: &State, readings: &[Reading]) -> Vec<serde_json::Value> {
    let names = state.serving.as_ref().map_or(&[][..], |(_, names)| names.as_slice());
    let row = |(number, name): (u32, &String)| {
        let reading = readings.iter().find(|reading| reading.device == number);
        let users = || state.sessions.values().filter(|session| session.devices.contains(&number));
        let held = sum(users().map(|session| session.account.held(number as usize)));
        let memory = reading.and_then(|reading| reading.memory);
        json!({
            "gpu": number,
            "name": name,
            "uuid": reading.map(|reading| &reading.uuid),
            "healthy": !state.ill.contains_key(&number),
            "sessions": users().count(),
            "session_memory": held,
            "memory_away": state.away(number),
            "memory_used": memory.map(|(_, used)| used),
            "memory_free": memory.map(|(free, _)| free),
            "utilization_percent": reading.and_then(|reading| reading.utilization).map(|(gpu, _)| gpu),
            "memory_utilization_percent": reading.and_then(|reading| reading.utilization).map(|(_, memory)| memory),
            "temperature_celsius": reading.and_then(|reading| reading.temperature),
            "power_watts": reading.and_then(|reading| reading.power),
            "sm_clock_mhz": reading.and_then(|reading| reading.clocks).map(|(sm, _)| sm),
            "memory_clock_mhz": reading.and_then(|reading| reading.clocks).map(|(_, memory)| memory),
        })
    };
    state.devices(&server.options).into_iter().zip(names).map(row).collect()
}

/// Devices that take no new sessions.
fn unhealthy(state: &State) -> Vec<serde_json::Value> {
    let row = |(device, illness): (&u32, &Illness)| {
        json!({
            "device": device,
            "reason": illness.why,
            "seconds": illness.since.elapsed().as_secs(),
            "lasting": illness.lasting,
            "sessions": state.sessions.values().filter(|session| session.devices.contains(device)).count(),
        })
    };
    state.ill.iter().map(row).collect()
}

/// A worker, with what the kernel says about its sandbox.
fn worker_row(pid: u32, managed: &Managed, inspected: &Inspected) -> serde_json::Value {
    json!({
        "pid": pid,
        "stage": managed.stage.name(),
        "sandbox": inspected,
    })
}

/// Principals with sessions, and what they hold.
fn principals(server: &Server, state: &State) -> Vec<serde_json::Value> {
    let mut all: BTreeMap<&str, Vec<&Session>> = BTreeMap::new();
    for session in state.sessions.values() {
        all.entry(&session.limits.principal).or_default().push(session);
    }
    let devices = state.devices(&server.options);
    let row = |(principal, sessions): (&str, Vec<&Session>)| {
        let limits = &sessions.first()?.limits;
        let memory =
            |number: &u32| sum(sessions.iter().map(|session| session.account.held(*number as usize)));
        Some(json!({
            "principal": principal,
            "sessions": sessions.len(),
            "weight": limits.weight,
            "priority": limits.priority,
            "exclusive": limits.exclusive,
            "kernel_seconds": limits.kernel_seconds,
            "gpu_ms_shared": state.charged.get(principal).map_or(0, |ns| ns / 1_000_000),
            "device_memory": sum(devices.iter().map(memory)),
            "device_memory_limit": limits.total.device_memory,
        }))
    };
    all.into_iter().filter_map(row).collect()
}

fn row(worker: u32, session: &Session, readings: &[Reading]) -> serde_json::Value {
    let own = readings.iter().filter(|reading| session.devices.contains(&reading.device));
    let percents: Vec<u32> = own.filter_map(|reading| reading.processes.get(&worker).copied()).collect();
    json!({
        "worker": worker,
        "kind": session.kind.name(),
        "principal": session.limits.principal,
        "lease": session.lease.map(|lease| lease.to_string()),
        "devices": session.devices.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        "client": session.client,
        "program": session.program,
        "pid": session.pid,
        "daemons_before": session.daemons,
        "transport": session.transport,
        "peer": session.peer,
        "seconds": session.since.elapsed().as_secs(),
        "parked_seconds": session.parked.map(|since| since.elapsed().as_secs()),
        "resumed": session.resumed,
        "commands": session.counters.commands,
        "round_trips": session.counters.round_trips,
        "launches": session.counters.launches,
        "copies": session.counters.copies,
        "bytes_in": session.counters.bytes_in,
        "bytes_out": session.counters.bytes_out,
        "bytes_copied": session.counters.bytes_copied,
        "bytes_direct": session.counters.bytes_direct,
        "bytes_direct_verbs": session.counters.bytes_direct_verbs,
        "device_memory": session.counters.device_memory,
        "memory_away": sum(session.devices.iter().map(|number| session.account.away(*number))),
        "sm_percent": (!percents.is_empty()).then(|| percents.iter().sum::<u32>()),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_client_that_reads_slowly_does_not_keep_others_waiting_until_it_has_read_all() {
        let text = "x".repeat(1 << 20);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reads = std::thread::spawn(move || {
            let mut count = 0;
            while matches!(theirs.read(&mut [0]), Ok(1)) {
                count += 1;
            }
            count
        });
        send(ours, &text, Duration::ZERO);
        let count = reads.join().unwrap();
        assert!(count < text.len(), "{count}");
    }
}
