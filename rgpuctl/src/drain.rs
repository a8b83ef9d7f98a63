//! `rgpuctl drain`: ends an `rgpu-server` after its sessions.

use std::io::{BufRead, BufReader, ErrorKind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::enrollment::{Admin, request};
use crate::status::scalar;

/// How often the number of running sessions is printed.
const REMIND: Duration = Duration::from_secs(10);
/// The exit status when not every session has ended by itself.
const NOT_ALL_FINISHED: u8 = 3;

/// End rgpu-server on this machine, after its sessions.
///
/// From now on the server begins no session. Running sessions have some time to end by themselves, including
/// those whose link is interrupted. Then the server ends them, and their programs get an error. Prints how
/// each session ends, and returns when the server has ended. Interrupting this command does not stop the
/// drain; giving it again sets another time. The packaged systemd unit does not restart a server that was
/// drained.
///
/// Exit status: 0 when every session has ended by itself, 3 when the server had to end some or some were
/// lost, 125 when the server refuses or ends without an answer.
#[derive(Args)]
pub struct Arguments {
    /// Seconds that sessions have to end by themselves. 0: end them at once
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    within: u32,
    #[command(flatten)]
    admin: Admin,
}

/// Tells the server to drain, and waits for its end.
pub fn drain(arguments: &Arguments) -> Result<ExitCode> {
    let path = arguments.admin.socket.display();
    let server = request(&arguments.admin.socket, &json!({ "drain": { "seconds": arguments.within } }))?;
    server.set_read_timeout(Some(REMIND))?;
    let mut server = BufReader::new(server);
    let mut line = Vec::new();
    let mut progress = Progress::default();
    loop {
        match server.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => {
                let said = serde_json::from_slice(&line).with_context(|| {
                    format!("the server at {path} said {:?}", String::from_utf8_lossy(&line))
                })?;
                progress.heard(&said)?.into_iter().for_each(|text| println!("{text}"));
                line.clear();
            }
            // The part of a line that has come stays in the buffer.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                progress.reminder().into_iter().for_each(|text| println!("{text}"));
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).with_context(|| format!("listening to the server at {path}")),
        }
    }
    progress.result()
}

/// What the server has reported so far.
#[derive(Default)]
struct Progress {
    running: u64,
    /// When the sessions' time ends.
    until: Option<Instant>,
    /// How many sessions ended by themselves, and how many did not.
    done: Option<(u64, u64)>,
}

impl Progress {
    /// Handles a line of the server. Returns the message to print.
    fn heard(&mut self, said: &Value) -> Result<Option<String>> {
        if let Some(why) = said["error"].as_str() {
            bail!("the server refuses: {why}");
        }
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        if let Some(running) = said["running"].as_u64() {
            self.running = running;
        }
        if let Some(seconds) = said["seconds"].as_u64() {
            self.until = Some(Instant::now() + Duration::from_secs(seconds.min(u32::MAX.into())));
            return Ok(Some(match seconds {
                0 => format!("{}: ended now", sessions(self.running)),
                seconds => format!("{}: {seconds} s to end by themselves", sessions(self.running)),
            }));
        }
        if let Some(outcome) = said["outcome"].as_str() {
            let text = |field: &str| scalar(&said[field]);
            let how = match outcome {
                "finished" => "has finished".to_owned(),
                "ended" => "was ended: its time was over".to_owned(),
                _ => format!("was lost: {}", text("reason")),
            };
            return Ok(Some(format!(
                "{} (process {} of {}) {how}; {} left",
                text("program"),
                number(&said["pid"]),
                text("client"),
                sessions(self.running)
            )));
        }
        if said["done"].is_object() {
            let [finished, lost, ended] = ["finished", "lost", "ended"].map(|how| number(&said["done"][how]));
            self.done = Some((finished, lost + ended));
            return Ok(Some(format!(
                "the server ends: {} finished, {lost} lost, {ended} ended before they had finished",
                sessions(finished)
            )));
        }
        // A newer server may send other lines.
        Ok(None)
    }

    /// The message to print when the server has sent nothing for a while.
    fn reminder(&self) -> Option<String> {
        let left = self.until?.saturating_duration_since(Instant::now()).as_secs();
        self.done.is_none().then(|| format!("{}: {left} s left", sessions(self.running)))
    }

    /// The server has ended.
    fn result(&self) -> Result<ExitCode> {
        match self.done {
            Some((_, 0)) => Ok(ExitCode::SUCCESS),
            Some(_) => Ok(ExitCode::from(NOT_ALL_FINISHED)),
            None => bail!("the server ended without reporting its sessions' ends: see its log"),
        }
    }
}

fn sessions(count: u64) -> String {
    if count == 1 { "1 session".into() } else { format!("{count} sessions") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_session_is_reported_and_the_exit_status_says_whether_all_finished() {
        let mut progress = Progress::default();
        let mut say = |said: Value| progress.heard(&said).unwrap().unwrap();
        assert_eq!(say(json!({"running": 2, "seconds": 60})), "2 sessions: 60 s to end by themselves");
        let ended = json!({"program": "tr\u{1b}[2Jain", "client": "vm\r7", "pid": 4, "outcome": "finished", "running": 1});
        assert_eq!(say(ended), "tr?[2Jain (process 4 of vm?7) has finished; 1 session left");
        assert_eq!(say(json!({"running": 1, "seconds": 0})), "1 session: ended now");
        let ended = json!({"program": "infer", "client": "vm7", "pid": 5, "outcome": "ended", "running": 0});
        assert_eq!(say(ended), "infer (process 5 of vm7) was ended: its time was over; 0 sessions left");
        assert!(progress.result().is_err(), "the server was not done");
        progress.heard(&json!({"done": {"finished": 1, "lost": 0, "ended": 1}})).unwrap();
        assert_eq!(progress.result().unwrap(), ExitCode::from(NOT_ALL_FINISHED));
        progress.heard(&json!({"done": {"finished": 2, "lost": 0, "ended": 0}})).unwrap();
        assert_eq!(progress.result().unwrap(), ExitCode::SUCCESS);
        assert!(progress.heard(&json!({"error": "no"})).is_err());
    }
}
