//! The answers of the status sockets at one time.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use crate::daemon::read_status;

/// The answers of all sockets.
pub struct Sample {
    /// When they came.
    pub at: Instant,
    /// Each socket's status, or why there is none.
    answers: Vec<(PathBuf, Result<Value, String>)>,
}

impl Sample {
    /// Reads all sockets.
    pub fn read(sockets: &[PathBuf]) -> Sample {
        let read = |path: &PathBuf| (path.clone(), read_status(path).map_err(|error| format!("{error:#}")));
        let answers = sockets.iter().map(read).collect();
        Sample { at: Instant::now(), answers }
    }

    /// A sample for tests.
    #[cfg(test)]
    pub fn of(at: Instant, answers: Vec<(&str, Result<Value, String>)>) -> Sample {
        Sample { at, answers: answers.into_iter().map(|(path, answer)| (path.into(), answer)).collect() }
    }

    /// Whether a daemon has answered.
    pub fn is_any(&self) -> bool {
        self.answers.iter().any(|(_, answer)| answer.is_ok())
    }

    /// The errors of the sockets that did not answer.
    pub fn failures(&self) -> Vec<&str> {
        self.answers.iter().filter_map(|(_, answer)| answer.as_ref().err()).map(String::as_str).collect()
    }

    /// The daemons with this name that have answered, with their sockets.
    pub fn daemons<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a Path, &'a Value)> {
        let answered =
            self.answers.iter().filter_map(|(path, answer)| Some((path.as_path(), answer.as_ref().ok()?)));
        answered.filter(move |(_, status)| status["daemon"] == name)
    }
}
