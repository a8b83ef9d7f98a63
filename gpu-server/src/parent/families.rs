//! The metrics of `rgpu-server`. [docs/metrics.md](../../../docs/metrics.md) has them as a table.
//!
//! `principal` is the client as verified by the server. `client` and `program` are the client's own claims:
//! the name of its virtual machine or host, and of its program. `gpu` is the device's number on the server.

metrics::families! {
    /// Always 1. Its labels describe what is running.
    INFO: Gauge "rgpu_server_info" { "version", "backend" };
    /// Unix time at which the daemon started.
    STARTED: Gauge "rgpu_server_start_time" ["seconds"] {};
    /// 1 while the daemon is shutting down and takes no new sessions.
    DRAINING: Gauge "rgpu_server_draining" {};

    /// Running sessions. kind is gpu, or nvml for those that only query NVML.
    SESSIONS: Gauge "rgpu_server_sessions" { "principal", "client", "program", "kind", "transport" };
    /// Maximum number of sessions of each kind (--max-sessions).
    SESSIONS_LIMIT: Gauge "rgpu_server_sessions_limit" {};
    /// Running sessions that have lost their connections and may be resumed.
    SESSIONS_PARKED: Gauge "rgpu_server_sessions_parked" { "principal", "client", "program" };
    /// Sessions that have begun.
    SESSIONS_BEGUN: Counter "rgpu_server_sessions_begun" { "principal", "client", "program" };
    /// Sessions that ended without their client closing them.
    SESSIONS_LOST: Counter "rgpu_server_sessions_lost" { "principal", "client", "program" };
    /// Times that sessions resumed over new connections.
    RESUMES: Counter "rgpu_server_resumes" { "principal", "client", "program" };
    /// Seconds that sessions have run.
    SESSION_TIME: Counter "rgpu_server_session_time" ["seconds"] { "principal", "client", "program" };
    /// Clients that were refused, by reason.
    REFUSALS: Counter "rgpu_server_refusals" { "reason" };

    /// Executed commands. Figures of running sessions are up to a second old.
    COMMANDS: Counter "rgpu_server_commands" { "principal", "client", "program" };
    /// Commands whose reply the client waited for.
    ROUND_TRIPS: Counter "rgpu_server_round_trips" { "principal", "client", "program" };
    /// Launched kernels and graphs.
    LAUNCHES: Counter "rgpu_server_launches" { "principal", "client", "program" };
    /// Copies from, to and between devices.
    COPIES: Counter "rgpu_server_copies" { "principal", "client", "program" };
    /// Bulk data that sessions read from their clients.
    RECEIVED: Counter "rgpu_server_received" ["bytes"] { "principal", "client", "program" };
    /// Bulk data that sessions wrote to their clients.
    SENT: Counter "rgpu_server_sent" ["bytes"] { "principal", "client", "program" };
    /// Bulk data that workers copied by CPU between the transport's memory and the driver's.
    COPIED: Counter "rgpu_server_copied" ["bytes"] { "principal", "client", "program" };
    /// Bytes of copies to and from GPUs of other servers that did not pass through the client.
    DIRECT: Counter "rgpu_server_direct" ["bytes"] { "principal", "client", "program" };
    /// Of these, bytes that went over verbs.
    DIRECT_VERBS: Counter "rgpu_server_direct_verbs" ["bytes"] { "principal", "client", "program" };

    /// Leases that a principal has.
    LEASES: Gauge "rgpu_server_leases" { "principal" };
    /// Maximum number of leases of all clients together (--max-leases).
    LEASES_LIMIT: Gauge "rgpu_server_leases_limit" {};
    /// Granted leases.
    LEASES_GRANTED: Counter "rgpu_server_leases_granted" {};
    /// Device memory that sessions hold, including what their processes use beyond it.
    MEMORY: Gauge "rgpu_server_device_memory" ["bytes"] { "principal", "client", "program", "gpu" };
    /// The part of it that was moved off the device because others needed room. It returns before the
    /// session's next command.
    MEMORY_AWAY: Gauge "rgpu_server_device_memory_away" ["bytes"] { "principal", "client", "program", "gpu" };
    /// Device memory that all sessions of a principal may hold together on each device. A lease is a
    /// principal of its own. Absent without a limit.
    MEMORY_LIMIT: Gauge "rgpu_server_device_memory_limit" ["bytes"] { "principal" };
    /// Device memory that sessions of a client with a limit hold, under all of its leases and outside.
    CLIENT_MEMORY: Gauge "rgpu_server_client_memory" ["bytes"] { "principal", "gpu" };
    /// The limit of that on each device.
    CLIENT_MEMORY_LIMIT: Gauge "rgpu_server_client_memory_limit" ["bytes"] { "principal" };
    /// Recent share of the multiprocessors' time used by sessions, according to NVML.
    SM_UTILIZATION: Gauge "rgpu_server_sm_utilization" ["ratio"] { "principal", "client", "program", "gpu" };
    /// GPU time charged to a principal while others also wanted the same devices. A principal alone is not
    /// charged.
    SHARED_TIME: Counter "rgpu_server_shared_gpu_time" ["seconds"] { "principal" };

    /// Sessions waiting for a worker.
    WAITING: Gauge "rgpu_server_sessions_waiting" { "kind" };
    /// How long the first session in the queue has waited. 0 if none waits.
    WAITING_LONGEST: Gauge "rgpu_server_longest_wait" ["seconds"] { "kind" };
    /// How long sessions waited for their worker before they began.
    WAITED: Histogram "rgpu_server_wait" ["seconds"] { "kind" };
    /// Worker processes by kind and stage: starting, ready, serving, or failed and not yet gone.
    WORKERS: Gauge "rgpu_server_workers" { "kind", "stage" };
    /// Workers that ended unexpectedly once they were ready.
    WORKERS_CRASHED: Counter "rgpu_server_workers_crashed" {};
    /// Workers that did not become ready.
    WORKERS_FAILED: Counter "rgpu_server_workers_failed" { "kind" };
    /// Sessions that ended because a kernel ran too long (--kernel-seconds).
    KERNELS_OVERRUN: Counter "rgpu_server_kernels_overrun" {};

    /// Events that are not in the audit log, because its disk is full or too slow. Exists only with
    /// --audit-log.
    AUDIT_LOST: Counter "rgpu_server_audit_lost" {};

    /// Maximum memory of this machine for device memory (--swap-memory). These figures exist only with
    /// --swap-memory or --swap-folder.
    SWAP_LIMIT: Gauge "rgpu_server_swap_limit" ["bytes"] {};
    /// Memory of this machine that sessions keep for device memory.
    SWAP_KEPT: Gauge "rgpu_server_swap_kept" ["bytes"] {};
    /// Bytes moved off devices because others needed room.
    SWAPPED_OUT: Counter "rgpu_server_swapped_out" ["bytes"] {};
    /// Bytes moved back.
    SWAPPED_IN: Counter "rgpu_server_swapped_in" ["bytes"] {};
    /// Times that a session had to wait for room because others had only just got their memory back
    /// (--swap-residency-ms): concurrently working sessions need more than the devices have.
    SWAP_HELD_BACK: Counter "rgpu_server_swap_held_back" {};

    /// Bytes of client data in the cache. These figures exist only with --cache.
    CACHE_SIZE: Gauge "rgpu_server_cache_size" ["bytes"] {};
    /// Maximum size of the cache (--cache-limit).
    CACHE_LIMIT: Gauge "rgpu_server_cache_limit" ["bytes"] {};
    /// Blocks that clients asked for and the cache had.
    CACHE_HITS: Counter "rgpu_server_cache_hits" {};
    /// Blocks that clients asked for and the cache did not have.
    CACHE_MISSES: Counter "rgpu_server_cache_misses" {};
    /// Bytes of blocks in the cache that clients did not have to send.
    CACHE_SAVED: Counter "rgpu_server_cache_saved" ["bytes"] {};
    /// Blocks that were damaged when they were read, and were removed.
    CACHE_DAMAGED: Counter "rgpu_server_cache_blocks_damaged" {};
    /// Blocks that could not be written.
    CACHE_FAILED: Counter "rgpu_server_cache_blocks_failed" {};

    /// 1 if the device takes new sessions, 0 if it is unhealthy.
    GPU_HEALTHY: Gauge "rgpu_server_gpu_healthy" { "gpu" };
    /// Sessions that use the device.
    GPU_SESSIONS: Gauge "rgpu_server_gpu_sessions" { "gpu" };
    /// Leases that include the device.
    GPU_LEASES: Gauge "rgpu_server_gpu_leases" { "gpu" };
    /// Percentage of time in which a kernel ran on the GPU, as in dcgm-exporter.
    GPU_UTIL: Gauge "DCGM_FI_DEV_GPU_UTIL" { "gpu", "UUID", "modelName", "Hostname" };
    /// Percentage of time in which the GPU's memory was accessed, as in dcgm-exporter.
    MEM_COPY_UTIL: Gauge "DCGM_FI_DEV_MEM_COPY_UTIL" { "gpu", "UUID", "modelName", "Hostname" };
    /// Free memory of the GPU in MiB, as in dcgm-exporter.
    FB_FREE: Gauge "DCGM_FI_DEV_FB_FREE" { "gpu", "UUID", "modelName", "Hostname" };
    /// Used memory of the GPU in MiB, as in dcgm-exporter.
    FB_USED: Gauge "DCGM_FI_DEV_FB_USED" { "gpu", "UUID", "modelName", "Hostname" };
    /// Temperature of the GPU in °C, as in dcgm-exporter.
    GPU_TEMP: Gauge "DCGM_FI_DEV_GPU_TEMP" { "gpu", "UUID", "modelName", "Hostname" };
    /// Power draw of the GPU in W, as in dcgm-exporter.
    POWER_USAGE: Gauge "DCGM_FI_DEV_POWER_USAGE" { "gpu", "UUID", "modelName", "Hostname" };
    /// Clock of the multiprocessors in MHz, as in dcgm-exporter.
    SM_CLOCK: Gauge "DCGM_FI_DEV_SM_CLOCK" { "gpu", "UUID", "modelName", "Hostname" };
    /// Clock of the memory in MHz, as in dcgm-exporter.
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
