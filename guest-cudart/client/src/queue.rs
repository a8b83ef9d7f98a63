//! Waiting for a session while the server serves other programs first, and saying so.

use std::time::{Duration, Instant};

use crate::port::{Port, PortError};
use crate::session::LOOK;
use log;
use protocol::channel::{Header, State};

/// A program that waits says so after this long; then again when it has waited four times as long, and so on.
const PATIENCE: Duration = Duration::from_secs(2);

/// Waits until the session that `port` has asked for begins. The host tells of every change in the channel's header.
pub(crate) fn wait(header: &Header, port: &dyn Port) -> Result<(), PortError> {
    let begun = Instant::now();
    let mut report = Report::default();
    loop {
        match header.state() {
            // A host that knows no queue answers only when the session stands.
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
        if let Some(line) = report.line(begun.elapsed(), &header.reason(), header.ahead()) {
            log::warn(format_args!("{line}"));
        }
        port.wait(Header::STATE_OFFSET, State::Waiting as u32, LOOK);
        if !port.alive() && header.state() == State::Waiting {
            let (path, reason) = (port.path().to_owned(), port.why_dead());
            return Err(PortError::Refused { path, what: "no GPU session", reason });
        }
    }
}

/// What is said of a wait.
#[derive(Default)]
struct Report {
    /// When the last line was written, counted from the beginning of the wait, and of which server.
    said: Option<(Duration, String)>,
}

impl Report {
    /// The line to write now, if there is one.
    fn line(&mut self, waited: Duration, server: &str, ahead: u32) -> Option<String> {
        let next = self.said.as_ref().map_or(PATIENCE, |(said, _)| *said * 4);
        if waited < next {
            return None;
        }
        self.said = Some((waited, server.to_owned()));
        Some(format!("waiting for a GPU session on {server}: {ahead} ahead of this program"))
    }

    /// The line that ends the wait, if one has begun it.
    fn end(self, waited: Duration) -> Option<String> {
        let (_, server) = self.said?;
        Some(format!("the GPU session on {server} begins after {:.1} s", waited.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_of_seldom_and_ends_with_a_line() {
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
    fn a_short_wait_is_not_told_of() {
        let mut report = Report::default();
        assert_eq!(report.line(Duration::from_millis(1999), "gpu7", 0), None);
        assert_eq!(report.end(Duration::from_secs(3)), None);
    }
}
