//! Text of clients and workers, which operators see in terminals, the log and the status.

/// The text without control characters.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
