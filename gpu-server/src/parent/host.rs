//! What this server calls itself.

/// The version and host of this `rgpu-server`, for display.
pub fn server_name() -> String {
    protocol::ops::device::describe_server(env!("CARGO_PKG_VERSION"), &host_name())
}

/// The name of this machine.
pub(super) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".into(), |name| name.trim().to_owned())
}
