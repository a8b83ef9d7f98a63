//! One line for each long step: a moving spinner or bar at a terminal, plain lines anywhere else.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// A step under way. Dropped without [`Step::done`], it says that it failed.
pub struct Step {
    name: String,
    start: Instant,
    /// None where output is not a terminal.
    bar: Option<ProgressBar>,
    finished: bool,
}

impl Step {
    /// Begins a step of unknown length.
    pub fn spinner(name: impl Into<String>) -> Self {
        Self::begin(name.into(), None)
    }

    /// Begins a step of `length` parts; each [`Step::advance`] is one.
    pub fn bar(name: impl Into<String>, length: usize) -> Self {
        Self::begin(name.into(), Some(length))
    }

    fn begin(name: String, length: Option<usize>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let (bar, template) = match length {
                Some(length) => (
                    ProgressBar::new(length as u64),
                    "{spinner} {prefix} [{bar:30}] {pos}/{len} {wide_msg} {elapsed}",
                ),
                None => (ProgressBar::new_spinner(), "{spinner} {prefix} {wide_msg} {elapsed}"),
            };
            // The templates are constants of this file; a wrong one would only cost the style.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("· {name} …");
        }
        Self { name, start: Instant::now(), bar, finished: false }
    }

    /// Says what the step is doing just now; seen only at a terminal.
    pub fn note(&self, text: impl Into<String>) {
        if let Some(bar) = &self.bar {
            bar.set_message(text.into());
        }
    }

    /// One part is done.
    pub fn advance(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Ends the step; `summary` says what came of it, in a few words.
    pub fn done(mut self, summary: &str) {
        self.finished = true;
        let separator = if summary.is_empty() { "" } else { ": " };
        self.close(&format!(
            "✓ {}{separator}{summary} ({:.1} s)",
            self.name,
            self.start.elapsed().as_secs_f64()
        ));
    }

    fn close(&self, line: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("{line}");
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.finished {
            self.close(&format!("✗ {} failed after {:.1} s", self.name, self.start.elapsed().as_secs_f64()));
        }
    }
}
