//! Timelines of commands ([`protocol::trace`]) into files.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use protocol::trace::{Recorder, VARIABLE};

/// The folder that timelines go to, if somebody asks for them.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// A file for what was recorded.
#[derive(Debug)]
pub struct Timeline {
    path: PathBuf,
    file: File,
}

impl Timeline {
    /// Creates the file, if timelines are wanted.
    pub fn create(name: &str) -> Option<Timeline> {
        let path = folder()?.join(name);
        match File::create(&path) {
            Ok(file) => Some(Timeline { path, file }),
            Err(e) => {
                tracing::warn!("cannot write a timeline to {}: {e}", path.display());
                None
            }
        }
    }

    /// Writes what was recorded.
    pub fn save(&self, recorder: &Recorder) {
        let Some(text) = recorder.take() else { return };
        if let Err(e) = (&self.file).write_all(text.as_bytes()) {
            tracing::warn!("cannot write a timeline to {}: {e}", self.path.display());
        }
    }
}
