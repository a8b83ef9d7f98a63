//! The metrics of `rgpu-server`. [docs/metrics.md](../../../docs/metrics.md) has them as a table.
//!
//! `principal` is whom the server has found a client to be. `client` and `program` are what the client says of itself: the name of its virtual machine or host, and its program's. `gpu` is the
//! device's number on the server.

metrics::families! {
    /// Always 1. Its labels say what runs.
    INFO: Gauge "rgpu_server_info" { "version", "backend" };
    /// Unix time at which the daemon started.
    STARTED: Gauge "rgpu_server_start_time" ["seconds"] {};
    /// 1 while the daemon takes no new sessions because it was told to end.
    DRAINING: Gauge "rgpu_server_draining" {};

    /// Sessions that run now. kind is gpu, or nvml for those that only query NVML.
    SESSIONS: Gauge "rgpu_server_sessions" { "principal", "client", "program", "kind", "transport" };
    /// Maximum number of sessions of each kind (--max-sessions).
    SESSIONS_LIMIT: Gauge "rgpu_server_sessions_limit" {};
    /// Sessions that run but have lost their connections and may be resumed.
    SESSIONS_PARKED: Gauge "rgpu_server_sessions_parked" { "principal", "client", "program" };
    /// Sessions that have begun.
    SESSIONS_BEGUN: Counter "rgpu_server_sessions_begun" { "principal", "client", "program" };
    /// Sessions that ended otherwise than by their client's will.
    SESSIONS_LOST: Counter "rgpu_server_sessions_lost" { "principal", "client", "program" };
    /// Times that sessions went on over new connections.
    RESUMES: Counter "rgpu_server_resumes" { "principal", "client", "program" };
    /// Seconds for which sessions have run.
    SESSION_TIME: Counter "rgpu_server_session_time" ["seconds"] { "principal", "client", "program" };
    /// Clients that were refused, by reason.
    REFUSALS: Counter "rgpu_server_refusals" { "reason" };

    /// Commands that were executed. These figures of running sessions are up to a second old.
    COMMANDS: Counter "rgpu_server_commands" { "principal", "client", "program" };
    /// Commands for whose answer the client waited.
    ROUND_TRIPS: Counter "rgpu_server_round_trips" { "principal", "client", "program" };
    /// Kernels and graphs that were launched.
    LAUNCHES: Counter "rgpu_server_launches" { "principal", "client", "program" };
    /// Copies from, to and between devices.
    COPIES: Counter "rgpu_server_copies" { "principal", "client", "program" };
    /// Bulk data that sessions read from their clients.
    RECEIVED: Counter "rgpu_server_received" ["bytes"] { "principal", "client", "program" };
    /// Bulk data that sessions wrote to their clients.
    SENT: Counter "rgpu_server_sent" ["bytes"] { "principal", "client", "program" };
    /// Bulk data that workers copied by CPU between the transport's memory and the driver's.
    COPIED: Counter "rgpu_server_copied" ["bytes"] { "principal", "client", "program" };
    /// Bytes of copies that went to and came from GPUs of other servers without passing through the client.
    DIRECT: Counter "rgpu_server_direct" ["bytes"] { "principal", "client", "program" };

    /// Leases that a principal has.
    LEASES: Gauge "rgpu_server_leases" { "principal" };
    /// Leases that were granted.
    LEASES_GRANTED: Counter "rgpu_server_leases_granted" {};
    /// Device memory that sessions hold, with what their processes take besides.
    MEMORY: Gauge "rgpu_server_device_memory" ["bytes"] { "principal", "client", "program", "gpu" };
    /// Of these, what was moved off the device because others needed room. It comes back before the session's next command.
    MEMORY_AWAY: Gauge "rgpu_server_device_memory_away" ["bytes"] { "principal", "client", "program", "gpu" };
    /// Device memory that all sessions of a principal may hold together on each device. Absent without a limit.
    MEMORY_LIMIT: Gauge "rgpu_server_device_memory_limit" ["bytes"] { "principal" };
    /// Part of the multiprocessors' time that sessions had a moment ago, as NVML says.
    SM_UTILIZATION: Gauge "rgpu_server_sm_utilization" ["ratio"] { "principal", "client", "program", "gpu" };
    /// GPU time that was charged to a principal while others wanted the same devices, too. Alone, nobody is charged.
    SHARED_TIME: Counter "rgpu_server_shared_gpu_time" ["seconds"] { "principal" };

    /// Sessions that wait for a worker.
    WAITING: Gauge "rgpu_server_sessions_waiting" { "kind" };
    /// How long the session that came first has waited. 0 if none waits.
    WAITING_LONGEST: Gauge "rgpu_server_longest_wait" ["seconds"] { "kind" };
    /// How long sessions waited for their worker before they began.
    WAITED: Histogram "rgpu_server_wait" ["seconds"] { "kind" };
    /// Worker processes by kind and stage: starting, ready or serving.
    WORKERS: Gauge "rgpu_server_workers" { "kind", "stage" };
    /// Workers that ended unexpectedly once they were ready.
    WORKERS_CRASHED: Counter "rgpu_server_workers_crashed" {};
    /// Workers that did not become ready.
    WORKERS_FAILED: Counter "rgpu_server_workers_failed" { "kind" };
    /// Sessions that ended because a kernel ran for too long (--kernel-seconds).
    KERNELS_OVERRUN: Counter "rgpu_server_kernels_overrun" {};

    /// Maximum memory of this machine for device memory (--swap-memory). Without --swap-memory and --swap-folder there are no such figures.
    SWAP_LIMIT: Gauge "rgpu_server_swap_limit" ["bytes"] {};
    /// Memory of this machine that sessions keep for device memory.
    SWAP_KEPT: Gauge "rgpu_server_swap_kept" ["bytes"] {};
    /// Bytes that were moved off devices because others needed room.
    SWAPPED_OUT: Counter "rgpu_server_swapped_out" ["bytes"] {};
    /// Bytes that were moved back.
    SWAPPED_IN: Counter "rgpu_server_swapped_in" ["bytes"] {};
    /// Times that a session had to wait for room because others had only just got their memory back (--swap-residency-ms): the sessions that work at the same time need more than the devices have.
    SWAP_HELD_BACK: Counter "rgpu_server_swap_held_back" {};

    /// Bytes that the cache keeps of what clients have sent. Without --cache there are no such figures.
    CACHE_SIZE: Gauge "rgpu_server_cache_size" ["bytes"] {};
    /// Maximum of that (--cache-limit).
    CACHE_LIMIT: Gauge "rgpu_server_cache_limit" ["bytes"] {};
    /// Blocks of their data that clients asked for, and that the cache had.
    CACHE_HITS: Counter "rgpu_server_cache_hits" {};
    /// Blocks that clients asked for, and that the cache had not.
    CACHE_MISSES: Counter "rgpu_server_cache_misses" {};
    /// Bytes of the blocks that the cache had, which clients need not send.
    CACHE_SAVED: Counter "rgpu_server_cache_saved" ["bytes"] {};
    /// Blocks that were not what they had been when they were read, and were removed.
    CACHE_DAMAGED: Counter "rgpu_server_cache_blocks_damaged" {};
    /// Blocks that could not be written.
    CACHE_FAILED: Counter "rgpu_server_cache_blocks_failed" {};

    /// 1 if the device takes new sessions, 0 if it is not well.
    GPU_HEALTHY: Gauge "rgpu_server_gpu_healthy" { "gpu" };
    /// Sessions that use the device.
    GPU_SESSIONS: Gauge "rgpu_server_gpu_sessions" { "gpu" };
    /// Leases that have the device.
    GPU_LEASES: Gauge "rgpu_server_gpu_leases" { "gpu" };
    /// Percent of the time in which a kernel ran on the GPU, as dcgm-exporter has it.
    GPU_UTIL: Gauge "DCGM_FI_DEV_GPU_UTIL" { "gpu", "UUID", "modelName", "Hostname" };
    /// Percent of the time in which the GPU's memory was read or written, as dcgm-exporter has it.
    MEM_COPY_UTIL: Gauge "DCGM_FI_DEV_MEM_COPY_UTIL" { "gpu", "UUID", "modelName", "Hostname" };
    /// Free memory of the GPU in MiB, as dcgm-exporter has it.
    FB_FREE: Gauge "DCGM_FI_DEV_FB_FREE" { "gpu", "UUID", "modelName", "Hostname" };
    /// Used memory of the GPU in MiB, as dcgm-exporter has it.
    FB_USED: Gauge "DCGM_FI_DEV_FB_USED" { "gpu", "UUID", "modelName", "Hostname" };
    /// Temperature of the GPU in °C, as dcgm-exporter has it.
    GPU_TEMP: Gauge "DCGM_FI_DEV_GPU_TEMP" { "gpu", "UUID", "modelName", "Hostname" };
    /// Power that the GPU takes in W, as dcgm-exporter has it.
    POWER_USAGE: Gauge "DCGM_FI_DEV_POWER_USAGE" { "gpu", "UUID", "modelName", "Hostname" };
    /// Clock of the multiprocessors in MHz, as dcgm-exporter has it.
    SM_CLOCK: Gauge "DCGM_FI_DEV_SM_CLOCK" { "gpu", "UUID", "modelName", "Hostname" };
    /// Clock of the memory in MHz, as dcgm-exporter has it.
    MEM_CLOCK: Gauge "DCGM_FI_DEV_MEM_CLOCK" { "gpu", "UUID", "modelName", "Hostname" };
}

#[cfg(test)]
mod tests {
    use super::ALL;

    #[test]
    fn the_definitions_follow_prometheus_conventions() {
        let faults: Vec<String> = ALL.iter().filter_map(|family| family.fault()).collect();
        assert!(faults.is_empty(), "{faults:?}");
    }

    #[test]
    fn the_documentation_follows_from_the_definitions() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
        test_kit::check_generated(page, Some("rgpu-server"), &metrics::family::table(ALL));
    }
}
