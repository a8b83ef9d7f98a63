//! The log on standard error. What a client causes in its worker is bounded there: no program's failing calls
//! fill the log that all clients share.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use host_bridge::log_limit::LogLimit;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// How many lines of a level a worker may write at once. It may write one more each second.
const LINES: u32 = 200;
/// The levels with a limit, one for each. Lines of other levels, which an operator has to ask for, have none.
const BOUNDED: [Level; 3] = [Level::ERROR, Level::WARN, Level::INFO];
/// The target of lines without a limit: each session has one, with what it has done.
pub(crate) const OF_SESSION: &str = "rgpu_server::session";

/// Starts the log of the daemon.
pub(crate) fn start(filter: &str) {
    begin(filter, Vec::new());
}

/// Starts the log of a worker.
pub(crate) fn start_bounded(filter: &str) {
    begin(filter, limits());
}

fn limits() -> Vec<LogLimit> {
    BOUNDED.map(|_| LogLimit::new(LINES)).into()
}

fn begin(filter: &str, limits: Vec<LogLimit>) {
    // The log gets a descriptor of its own, because a worker's standard error becomes its client's.
    let to = match io::stderr().as_fd().try_clone_to_owned() {
        Ok(own) => BoxMakeWriter::new(Arc::new(File::from(own))),
        Err(_) => BoxMakeWriter::new(io::stderr),
    };
    let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(filter)).with_target(false);
    let log = log.with_ansi(io::stderr().is_terminal()).with_writer(Output { to, limits });
    // In tests, which start several logs, the first one stays.
    let _ = log.try_init();
}

/// Where lines go, and the limits of those levels that have one.
struct Output {
    to: BoxMakeWriter,
    limits: Vec<LogLimit>,
}

impl<'a> MakeWriter<'a> for Output {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { to: self.to.make_writer(), limit: None }
    }

    fn make_writer_for(&'a self, line: &Metadata<'_>) -> Line<'a> {
        let level = BOUNDED.iter().position(|level| level == line.level() && line.target() != OF_SESSION);
        Line { to: self.to.make_writer_for(line), limit: level.and_then(|level| self.limits.get(level)) }
    }
}

/// Writes one line, which comes in one call, if it may be written.
struct Line<'a> {
    to: Box<dyn Write + 'a>,
    limit: Option<&'a LogLimit>,
}

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let allowed = match self.limit {
            Some(limit) => limit.allow().map(|not_shown| not_shown.to_string()),
            None => Some(String::new()),
        };
        match allowed.as_deref() {
            Some("") => self.to.write_all(line)?,
            Some(not_shown) => {
                let line = [line.trim_ascii_end(), not_shown.as_bytes(), b"\n"].concat();
                self.to.write_all(&line)?;
            }
            None => {}
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clients_failing_calls_do_not_fill_the_log() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let to = BoxMakeWriter::new(Arc::new(file.reopen().unwrap()));
        let output = Output { to, limits: limits() };
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(output).finish();
        let lines = || std::fs::read_to_string(file.path()).unwrap();
        tracing::subscriber::with_default(log, || {
            (0..100_000).for_each(|_| tracing::warn!("a call fails"));
            tracing::info!("a line of another level");
            tracing::warn!(target: OF_SESSION, "the session is lost");
            // What was left out is counted in the next line that may be written.
            while !lines().contains(" earlier messages not shown)\n") {
                tracing::warn!("another one fails");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let shown = lines().matches("a call fails").count();
        assert!((LINES as usize..50_000).contains(&shown), "{shown} lines were shown");
        assert!(lines().contains("a line of another level"));
        assert!(lines().contains("the session is lost"));
    }
}
