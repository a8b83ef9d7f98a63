//! Shows the progress of long steps: as an updating line at a terminal, otherwise as occasional lines.
//!
//! Steps can run concurrently, each in its own thread. A step shows its current activity and, if known, how
//! much is done. [`Step::line`] gets both from a command's output.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// How often a running step prints a line without a terminal.
const EVERY: Duration = Duration::from_secs(10);
/// The maximum number of characters of a command's output to show.
const WIDTH: usize = 70;

/// A running step. If it is dropped without [`Step::done`], it reports a failure.
pub struct Step {
    face: Face,
    start: Instant,
    /// Prints lines if output is not a terminal. It ends when the sender is dropped.
    printer: Option<(Sender<()>, JoinHandle<()>)>,
    finished: bool,
}

/// What a step displays.
#[derive(Clone)]
struct Face {
    now: Arc<Mutex<Now>>,
    /// `None` if output is not a terminal.
    bar: Option<ProgressBar>,
}

/// A step's current activity.
struct Now {
    name: String,
    note: String,
    /// Number of finished parts and of all parts, if known.
    position: Option<(u64, u64)>,
}

impl Now {
    /// A line for a log, for example `building the daemons: 57 of 120, software-gpu`.
    fn line(&self) -> String {
        let count = self.position.map(|(done, all)| format!("{done} of {all}"));
        let parts: Vec<String> =
            count.into_iter().chain(Some(self.note.clone()).filter(|note| !note.is_empty())).collect();
        match parts.as_slice() {
            [] => self.name.clone(),
            parts => format!("{}: {}", self.name, parts.join(", ")),
        }
    }
}

/// All steps draw through this, so that their lines do not overwrite each other.
fn screen() -> &'static MultiProgress {
    static SCREEN: OnceLock<MultiProgress> = OnceLock::new();
    SCREEN.get_or_init(MultiProgress::new)
}

/// Prints a line on standard error while steps are running.
pub fn print(line: &str) {
    if std::io::stderr().is_terminal() {
        screen().suspend(|| eprintln!("{line}"));
    } else {
        eprintln!("{line}");
    }
}

impl Step {
    /// Starts a step of unknown length.
    pub fn spinner(name: impl Into<String>) -> Self {
        Self::begin(name.into(), None)
    }

    /// Starts a step with `length` parts; each [`Step::advance`] completes one.
    pub fn bar(name: impl Into<String>, length: usize) -> Self {
        Self::begin(name.into(), Some((0, length as u64)))
    }

    fn begin(name: String, position: Option<(u64, u64)>) -> Self {
        let start = Instant::now();
        let now = Arc::new(Mutex::new(Now { name, note: String::new(), position }));
        let mut step = Self { face: Face { now, bar: None }, start, printer: None, finished: false };
        if std::io::stderr().is_terminal() {
            let bar = screen().add(ProgressBar::new_spinner());
            bar.enable_steady_tick(Duration::from_millis(120));
            step.face.bar = Some(bar);
            step.face.draw();
        } else {
            eprintln!("· {} …", step.face.now().name);
            step.printer = Some(printer(step.face.clone(), start));
        }
        step
    }

    /// Shows the step's current activity.
    pub fn note(&self, text: impl Into<String>) {
        self.face.now().note = text.into();
        self.face.draw();
    }

    /// Completes a part.
    pub fn advance(&self) {
        if let Some((done, _)) = &mut self.face.now().position {
            *done += 1;
        }
        self.face.draw();
    }

    /// Processes a line of a command's output. Cargo's progress bar sets the position; any other line is the
    /// current activity. Returns whether the line belongs in a log, which a progress bar does not.
    pub fn line(&self, line: &str) -> bool {
        self.face.line(line)
    }

    /// Like [`Step::line`], for callers that cannot borrow the step.
    pub fn listener(&self) -> impl Fn(&str) + use<> {
        let face = self.face.clone();
        move |line| {
            face.line(line);
        }
    }

    /// Ends the step with a short summary of the result.
    pub fn done(mut self, summary: &str) {
        self.finished = true;
        let separator = if summary.is_empty() { "" } else { ": " };
        let name = self.face.now().name.clone();
        self.close(&format!("✓ {name}{separator}{summary} ({:.1} s)", self.start.elapsed().as_secs_f64()));
    }

    fn close(&mut self, line: &str) {
        if let Some((stop, thread)) = self.printer.take() {
            drop(stop);
            // The thread only prints; if it panicked, the panic has been reported.
            let _ = thread.join();
        }
        if let Some(bar) = &self.face.bar {
            bar.finish_and_clear();
        }
        print(line);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.finished {
            let name = self.face.now().name.clone();
            self.close(&format!("✗ {name}: failed after {:.1} s", self.start.elapsed().as_secs_f64()));
        }
    }
}

impl Face {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, line: &str) -> bool {
        let progress = cargo_progress(line);
        if let Some((done, all, what)) = progress {
            let mut now = self.now();
            now.position = Some((done, all));
            now.note = what.to_owned();
        } else if !line.trim().is_empty() {
            self.now().note = line.trim().chars().take(WIDTH).collect();
        }
        self.draw();
        progress.is_none()
    }

    /// Updates the display at a terminal. Otherwise the printer thread prints periodically.
    fn draw(&self) {
        let Some(bar) = &self.bar else { return };
        let now = self.now();
        let template = match now.position {
            Some((done, all)) => {
                bar.set_length(all);
                bar.set_position(done);
                "{spinner} {prefix} [{bar:20}] {pos}/{len} {wide_msg} {elapsed}"
            }
            None => "{spinner} {prefix} {wide_msg} {elapsed}",
        };
        // The templates are constants in this file; an invalid one would only lose the style.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(now.name.clone());
        bar.set_message(now.note.clone());
    }
}

/// A thread that prints the state every [`EVERY`] until the sender is dropped.
fn printer(face: Face, start: Instant) -> (Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            let line = face.now().line();
            eprintln!("  … {line} ({:.0} s)", start.elapsed().as_secs_f64());
        }
    });
    (stop, thread)
}

/// Parses Cargo's progress bar: `Building [===>   ] 57/120: foo, bar` gives 57, 120 and `foo, bar`.
fn cargo_progress(line: &str) -> Option<(u64, u64, &str)> {
    let rest = line.trim().strip_prefix("Building [")?;
    let (count, what) = rest.split_once("] ")?.1.split_once(": ")?;
    let (done, all) = count.split_once('/')?;
    Some((done.trim().parse().ok()?, all.trim().parse().ok()?, what.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_s_progress_bar_is_parsed() {
        assert_eq!(
            cargo_progress("    Building [=====>           ]  57/120: software-gpu, clap"),
            Some((57, 120, "software-gpu, clap"))
        );
        assert_eq!(cargo_progress("   Compiling libc v0.2.191"), None);
        assert_eq!(cargo_progress("    Building [=====>"), None);
    }

    #[test]
    fn a_log_line_contains_position_and_activity() {
        let mut now = Now { name: "building".to_owned(), note: String::new(), position: None };
        assert_eq!(now.line(), "building");
        now.position = Some((2, 10));
        assert_eq!(now.line(), "building: 2 of 10");
        now.note = "vectorAdd".to_owned();
        assert_eq!(now.line(), "building: 2 of 10, vectorAdd");
    }
}
