//! Waiting for a session while the server serves other programs first, and reporting it.

use std::time::{Duration, Instant};

use crate::port::{Port, PortError};
use crate::session::LIVENESS_CHECK;
use protocol::channel::{Header, State};

/// A waiting program reports it after this long, then whenever its wait has become four times as long.
const PATIENCE: Duration = Duration::from_secs(2);

/// Waits until the requested session begins. The host reports every change in the channel's header. While the
/// session waits, `waits` is called now and then, with the server's name and how long it has waited.
pub(crate) fn wait(
    header: &Header,
    port: &dyn Port,
    waits: &dyn Fn(&str, Duration),
) -> Result<(), PortError> {
    let begun = Instant::now();
    let mut report = Report::default();
    loop {
        match header.state() {
            // A host without a queue replies only when the session is established.
            State::New | State::Ready => {
                if let Some(line) = report.end(begun.elapsed()) {
                    log::warn(format_args!("{line}"));
                }
                return Ok(());
            }
            State::Lost => {
                let (path, reason) = (port.path().to_owned(), header.reason());
                return Err(PortError::Refused { path, what: "no GPU session", reason });
            }
            State::Waiting => {}
        }
        let (server, waited) = (header.reason(), begun.elapsed());
        if let Some(line) = report.line(waited, &server, header.ahead()) {
            log::warn(format_args!("{line}"));
        }
        waits(&server, waited);
        port.wait(Header::STATE_OFFSET, State::Waiting as u32, LIVENESS_CHECK);
        if !port.alive() && header.state() == State::Waiting {
            let (path, reason) = (port.path().to_owned(), port.why_dead());
            return Err(PortError::Refused { path, what: "no GPU session", reason });
        }
    }
}

/// Decides when to report a wait.
#[derive(Default)]
struct Report {
    /// When the last line was written, relative to the start of the wait, and the server it named.
    reported: Option<(Duration, String)>,
}

impl Report {
    /// The line to write now, if any.
    fn line(&mut self, waited: Duration, server: &str, ahead: u32) -> Option<String> {
        let next = self.reported.as_ref().map_or(PATIENCE, |(reported, _)| *reported * 4);
        if waited < next {
            return None;
        }
        self.reported = Some((waited, server.to_owned()));
        Some(format!("waiting for a GPU session on {server}: {ahead} ahead of this program"))
    }

    /// The line that ends the wait, if it was reported.
    fn end(self, waited: Duration) -> Option<String> {
        let (_, server) = self.reported?;
        Some(format!("the GPU session on {server} begins after {:.1} s", waited.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_reported_rarely_and_its_end_once() {
        let mut report = Report::default();
        let lines: Vec<u64> = (0..400)
            .filter(|quarter| report.line(Duration::from_millis(quarter * 250), "gpu7", 5).is_some())
            .map(|quarter| quarter / 4)
            .collect();
        assert_eq!(lines, [2, 8, 32]);
        let line = report.line(Duration::from_secs(200), "gpu7", 5).unwrap();
        assert_eq!(line, "waiting for a GPU session on gpu7: 5 ahead of this program");
        assert_eq!(
            report.end(Duration::from_millis(201_500)).unwrap(),
            "the GPU session on gpu7 begins after 201.5 s"
        );
    }

    #[test]
    fn a_short_wait_is_not_reported() {
        let mut report = Report::default();
        assert_eq!(report.line(Duration::from_millis(1999), "gpu7", 0), None);
        assert_eq!(report.end(Duration::from_secs(3)), None);
    }
}
