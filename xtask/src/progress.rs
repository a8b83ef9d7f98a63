//! Progress of long steps: a moving line for each at a terminal, a plain line now and then anywhere else.
//!
//! Steps may run at the same time, each in a thread of its own. A step shows what it does at the moment and, where that is
//! known, how much of it is done; [`Step::line`] learns both from the output of a command.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// How often a step that is under way prints a line where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);
/// The most characters of a command's output that a step shows.
const WIDTH: usize = 70;

/// A step under way. If it is dropped without [`Step::done`], it says that it failed.
pub struct Step {
    face: Face,
    start: Instant,
    /// Prints lines where output is not a terminal; ends when the sender is dropped.
    printer: Option<(Sender<()>, JoinHandle<()>)>,
    finished: bool,
}

/// What is seen of a step.
#[derive(Clone)]
struct Face {
    now: Arc<Mutex<Now>>,
    /// None where output is not a terminal.
    bar: Option<ProgressBar>,
}

/// What a step is doing.
struct Now {
    name: String,
    note: String,
    /// Parts done, and parts in all; none where that is not known.
    position: Option<(u64, u64)>,
}

impl Now {
    /// A line for a log: `building the daemons: 57 of 120, software-gpu`.
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

impl Step {
    /// Begins a step whose length is not known in advance.
    pub fn spinner(name: impl Into<String>) -> Self {
        Self::begin(name.into(), None)
    }

    /// Begins a step of `length` parts; each [`Step::advance`] completes one.
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

    /// Says what the step is doing at the moment.
    pub fn note(&self, text: impl Into<String>) {
        self.face.now().note = text.into();
        self.face.draw();
    }

    /// One part is done.
    pub fn advance(&self) {
        if let Some((done, _)) = &mut self.face.now().position {
            *done += 1;
        }
        self.face.draw();
    }

    /// Takes a line of a command's output: Cargo's progress bar gives the position, and any other line says what is being
    /// done. Returns whether the line is worth keeping in a log, which a progress bar is not.
    pub fn line(&self, line: &str) -> bool {
        self.face.line(line)
    }

    /// Does what [`Step::line`] does, for those who cannot borrow the step.
    pub fn listener(&self) -> impl Fn(&str) + use<> {
        let face = self.face.clone();
        move |line| {
            face.line(line);
        }
    }

    /// Ends the step; `summary` says in a few words what came of it.
    pub fn done(mut self, summary: &str) {
        self.finished = true;
        let separator = if summary.is_empty() { "" } else { ": " };
        let name = self.face.now().name.clone();
        self.close(&format!("✓ {name}{separator}{summary} ({:.1} s)", self.start.elapsed().as_secs_f64()));
    }

    fn close(&mut self, line: &str) {
        if let Some((stop, thread)) = self.printer.take() {
            drop(stop);
            // It only prints; a panic in it has been reported by itself.
            let _ = thread.join();
        }
        match &self.face.bar {
            Some(bar) => {
                bar.finish_and_clear();
                screen().suspend(|| eprintln!("{line}"));
            }
            None => eprintln!("{line}"),
        }
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

    /// Shows the state at a terminal; elsewhere the printer does, in its own time.
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
        // The templates are constants of this file; a wrong one would only cost the style.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(now.name.clone());
        bar.set_message(now.note.clone());
    }
}

/// A thread that prints the state every [`EVERY`], until the sender is dropped.
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

/// What Cargo's progress bar says: `Building [===>   ] 57/120: foo, bar` gives 57, 120 and `foo, bar`.
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
    fn cargos_progress_bar_gives_position_and_crates() {
        assert_eq!(
            cargo_progress("    Building [=====>           ]  57/120: software-gpu, clap"),
            Some((57, 120, "software-gpu, clap"))
        );
        assert_eq!(cargo_progress("   Compiling libc v0.2.191"), None);
        assert_eq!(cargo_progress("    Building [=====>"), None);
    }

    #[test]
    fn a_line_for_a_log_says_how_far_and_what() {
        let mut now = Now { name: "building".to_owned(), note: String::new(), position: None };
        assert_eq!(now.line(), "building");
        now.position = Some((2, 10));
        assert_eq!(now.line(), "building: 2 of 10");
        now.note = "vectorAdd".to_owned();
        assert_eq!(now.line(), "building: 2 of 10, vectorAdd");
    }
}
