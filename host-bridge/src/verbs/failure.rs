//! Why a request failed, and with it the connection: from its completion.

use super::error::VerbsError;
use super::sys::{Library, Wc, number};

/// Says why a request failed. `on`: the queue or the port.
pub(super) fn describe(on: &str, wc: &Wc) -> VerbsError {
    match wc.status {
        number::WC_RETRY_EXC_ERR => VerbsError::Broken(format!(
            "{on}: the peer does not answer any more (retry limit exceeded: it is gone, the link is down, or UDP port 4791 is blocked)"
        )),
        number::WC_RNR_RETRY_EXC_ERR => VerbsError::Wrong(format!("{on}: the peer had no receive ready")),
        number::WC_REM_INV_REQ_ERR => VerbsError::Wrong(format!(
            "{on}: the peer's device refused a request as invalid (status 9): one that does not fit its receive, or packets in another order than a message has"
        )),
        // When a process ends, its memory may be gone some moments before its queue pairs are.
        number::WC_REM_ACCESS_ERR => VerbsError::Broken(format!(
            "{on}: the peer's device refused a write to memory that is not there, or no more (remote access error, status 10)"
        )),
        number::WC_WR_FLUSH_ERR => VerbsError::Broken(format!(
            "{on} was stopped: the peer ended the connection or asked for what it may not"
        )),
        other => {
            let text = Library::get().map_or_else(|_| String::new(), |l| l.status_text(other));
            VerbsError::Wrong(format!("{on}: {text} (status {other}, vendor's {:#x})", wc.vendor_err))
        }
    }
}

/// The completion that says best why a link broke: a flushed request is only a consequence.
pub(super) fn failure(done: &[Wc]) -> Option<Wc> {
    let mut failed = done.iter().filter(|wc| wc.status != number::WC_SUCCESS);
    let first = failed.next()?;
    let cause = std::iter::once(first).chain(failed).find(|wc| wc.status != number::WC_WR_FLUSH_ERR);
    Some(*cause.unwrap_or(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flushed_request_is_not_the_reason() {
        let wc = |status, qp_num| Wc { status, qp_num, ..Wc::default() };
        let flushed = wc(number::WC_WR_FLUSH_ERR, 1);
        let cause = wc(number::WC_RETRY_EXC_ERR, 2);
        assert!(failure(&[wc(0, 0)]).is_none());
        assert_eq!(failure(&[wc(0, 0), flushed, cause]).map(|wc| wc.qp_num), Some(2));
        assert_eq!(failure(&[flushed]).map(|wc| wc.qp_num), Some(1));
    }
}
