//! The metrics of `vhost-rgpu`. [docs/metrics.md](../../../docs/metrics.md) has them as a table.
//!
//! `vm` is a virtual machine's name; it is empty for programs of the host itself, which have their user's ID
//! in `uid`. `program` is the program's own claim. `server` is an address from the configuration.

metrics::families! {
    /// Always 1. Its labels describe what is running.
    INFO: Gauge "rgpu_host_info" { "version", "protocol" };
    /// Unix time at which the daemon started.
    STARTED: Gauge "rgpu_host_start_time" ["seconds"] {};
    /// Running device processes.
    PROCESSES: Gauge "rgpu_host_device_processes" { "vm", "uid" };
    /// Device processes that replaced one that had ended unexpectedly.
    RESTARTS: Counter "rgpu_host_device_process_restarts" {};

    /// Current sessions.
    SESSIONS: Gauge "rgpu_host_sessions" { "vm", "uid", "program", "transport", "server" };
    /// Sessions that have lost their link and wait for a new one.
    RESUMING: Gauge "rgpu_host_sessions_resuming" { "vm", "uid", "server" };
    /// Opened sessions.
    OPENED: Counter "rgpu_host_sessions_opened" { "vm", "uid" };
    /// Sessions closed by their programs.
    CLOSED: Counter "rgpu_host_sessions_closed" { "vm", "uid" };
    /// Sessions that ended without their program closing them.
    LOST: Counter "rgpu_host_sessions_lost" { "vm", "uid" };
    /// Sessions that were refused or could not be opened, by reason: invalid, no_resources, no_server,
    /// version, denied or unsupported.
    REFUSED: Counter "rgpu_host_sessions_refused" { "vm", "uid", "reason" };
    /// Malformed requests of guests and programs.
    MALFORMED: Counter "rgpu_host_malformed_requests" { "vm", "uid" };
    /// Programs of this host that were refused before they had a device process, by reason: draining,
    /// host_full, user_full or failed.
    CLIENTS_REFUSED: Counter "rgpu_host_clients_refused" { "reason" };
    /// Times that sessions resumed, over new connections or in another device process.
    RESUMES: Counter "rgpu_host_resumes" { "vm", "uid" };

    /// Round-trip time of the control connection to the server, over tcp: the longest of all sessions.
    ROUND_TRIP: Gauge "rgpu_host_link_round_trip" ["seconds"] { "vm", "uid", "server" };
    /// Forwarded commands. With the transport local, only the server counts commands and bytes.
    COMMANDS: Counter "rgpu_host_commands" { "vm", "uid" };
    /// Commands whose reply was passed on to a program.
    ROUND_TRIPS: Counter "rgpu_host_round_trips" { "vm", "uid" };
    /// Bulk data sent to servers. Compressed data counts with its compressed bytes.
    DATA_SENT: Counter "rgpu_host_data_sent" ["bytes"] { "vm", "uid" };
    /// Bulk data that was compressed before it was sent to servers.
    DATA_COMPRESSED: Counter "rgpu_host_data_compressed" ["bytes"] { "vm", "uid" };
    /// Compressed bytes sent in place of that data.
    DATA_COMPRESSED_TO: Counter "rgpu_host_data_compressed_to" ["bytes"] { "vm", "uid" };
    /// Bulk data not sent because servers had it in their caches.
    DATA_KNOWN: Counter "rgpu_host_data_known" ["bytes"] { "vm", "uid" };
    /// Bulk data received from servers that had compressed it.
    DATA_DECOMPRESSED: Counter "rgpu_host_data_decompressed" ["bytes"] { "vm", "uid" };
    /// Compressed bytes received in place of that data.
    DATA_DECOMPRESSED_FROM: Counter "rgpu_host_data_decompressed_from" ["bytes"] { "vm", "uid" };
    /// Bulk data received from servers. Compressed data counts with its compressed bytes.
    DATA_RECEIVED: Counter "rgpu_host_data_received" ["bytes"] { "vm", "uid" };
    /// Commands and their accompanying data sent on control connections.
    CONTROL_SENT: Counter "rgpu_host_control_sent" ["bytes"] { "vm", "uid" };
    /// Replies and their accompanying data received on control connections.
    CONTROL_RECEIVED: Counter "rgpu_host_control_received" ["bytes"] { "vm", "uid" };
    /// Bytes of records and replies that this host's CPU copied.
    COPIED: Counter "rgpu_host_copied" ["bytes"] { "vm", "uid" };
    /// Times that a program's doorbell woke this host.
    DOORBELLS: Counter "rgpu_host_doorbells" { "vm", "uid" };
    /// Wake-ups sent to programs' threads.
    WAKES: Counter "rgpu_host_wakes" { "vm", "uid" };
    /// Memory of guests and programs currently registered for copies.
    REGISTERED: Gauge "rgpu_host_registered" ["bytes"] { "vm", "uid" };
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
        test_kit::check_generated(page, Some("vhost-rgpu"), &metrics::family::table(ALL));
    }
}
