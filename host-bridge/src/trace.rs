//! Timelines of commands ([`protocol::trace`]) into files.

use std::path::PathBuf;

use protocol::trace::{Recorder, VARIABLE};

/// The folder that timelines go to, if somebody asks for them.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Writes what was recorded into a file of its own.
pub fn save(recorder: &Recorder, name: &str) {
    let (Some(folder), Some(text)) = (folder(), recorder.take()) else { return };
    let path = folder.join(name);
    if let Err(e) = std::fs::write(&path, text) {
        tracing::warn!("cannot write a timeline to {}: {e}", path.display());
    }
}
