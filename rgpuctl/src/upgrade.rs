//! `rgpuctl upgrade`: replaces a running `rgpu-server` or `vhost-rgpu` with the program that is installed
//! now.

use std::io::{ErrorKind, Read};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::daemon::cause;
use crate::enrollment::{Admin, request};

/// How long the daemon may take until it is replaced, and its successor until it answers and serves.
const WITHIN: Duration = Duration::from_secs(120);
/// How long to wait before asking a successor that has not answered again.
const AGAIN: Duration = Duration::from_millis(50);

/// Replace the running rgpu-server, or vhost-rgpu, on this machine with the version that is installed now.
///
/// Sessions continue, and programs do not notice. The daemon first checks whether the installed program can
/// continue these sessions and accepts the configuration; if not, nothing happens.
///
/// rgpu-server's workers keep running, and keep their version until their sessions end. Clients that wait for
/// a worker connect again. vhost-rgpu (--socket /run/rgpu/vhost-rgpu.admin) replaces its device processes,
/// too. That ends sessions with a server without a grace period, and over verbs with one older than 2.5.
///
/// Exit status: 0 when the installed version serves, 125 when the old one continues, none answers, or the
/// installed one cannot start workers for new sessions.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    admin: Admin,
}

/// Tells the daemon to be replaced, and waits for its successor.
pub fn upgrade(arguments: &Arguments) -> Result<ExitCode> {
    let path = arguments.admin.socket.display();
    let mut server = request(&arguments.admin.socket, &json!({ "upgrade": {} }))?;
    server.set_read_timeout(Some(WITHIN))?;
    let mut text = String::new();
    // To the end: executing the installed program closes the connection, and if that fails, another line says
    // why.
    server.read_to_string(&mut text).with_context(|| format!("listening to the daemon at {path}"))?;
    let (before, sessions) = agreed(&text)?;
    let text = successor(|| ask(arguments), Instant::now() + WITHIN).with_context(|| {
        format!("the daemon at {path} was replaced, and its successor does not answer: see its log")
    })?;
    println!("{}", outcome(&before, sessions, &text)?);
    Ok(ExitCode::SUCCESS)
}

/// Asks the daemon that serves now for its version. The listening socket stays the same, so this waits until
/// the daemon takes requests.
fn ask(arguments: &Arguments) -> Result<String> {
    let mut server = request(&arguments.admin.socket, &json!({ "version": {} }))?;
    server.set_read_timeout(Some(WITHIN))?;
    let mut text = String::new();
    server.read_to_string(&mut text)?;
    Ok(text)
}

/// The successor's answer, once it knows whether it can serve new sessions. A request that comes right before
/// the daemon is replaced is accepted and never answered.
fn successor(mut ask: impl FnMut() -> Result<String>, deadline: Instant) -> Result<String> {
    loop {
        match ask() {
            Ok(text) if !text.is_empty() && !is_starting(&text) => return Ok(text),
            // The listening socket is gone only if the successor is.
            Err(e) if [ErrorKind::NotFound, ErrorKind::ConnectionRefused].contains(&cause(&e)) => {
                return Err(e);
            }
            last if Instant::now() >= deadline => return last,
            _ => std::thread::sleep(AGAIN),
        }
    }
}

/// Whether the first worker of the rgpu-server that answers this is still to become ready.
fn is_starting(text: &str) -> bool {
    serde_json::from_str(text).is_ok_and(|said: Value| said["starting"] == true)
}

/// What the daemon reports right before it is replaced: its name and version, and the number of its sessions.
/// The error is why it was not replaced, which may come on a line behind that.
fn agreed(text: &str) -> Result<(String, u64)> {
    if text.is_empty() {
        bail!("the daemon ended without an answer: see its log");
    }
    let mut agreed = None;
    for line in text.lines() {
        let said: Value = serde_json::from_str(line).with_context(|| format!("the daemon said {line:?}"))?;
        match (&said["error"], &said["upgrading"]) {
            (Value::String(why), _) => bail!("not upgraded: {why}"),
            (_, Value::Object(upgrading)) => {
                let sessions = upgrading.get("sessions").and_then(Value::as_u64).unwrap_or(0);
                agreed = Some((name(&said["upgrading"]), sessions));
            }
            _ => bail!("the daemon said {line:?}"),
        }
    }
    agreed.with_context(|| format!("the daemon said {text:?}"))
}

/// The daemon and its version. rgpu-server does not send its name.
fn name(said: &Value) -> String {
    let (daemon, version) = (said["daemon"].as_str(), said["version"].as_str());
    format!("{} {}", daemon.unwrap_or("rgpu-server"), version.unwrap_or("?"))
}

/// The message about the successor.
fn outcome(before: &str, sessions: u64, text: &str) -> Result<String> {
    let said: Value = serde_json::from_str(text)
        .with_context(|| format!("{before} was replaced, and its successor said {text:?}: see its log"))?;
    if let Some(why) = said["error"].as_str() {
        bail!("the successor of {before} does not understand this command: {why}");
    }
    let after = name(&said);
    let told = match said["failed"].as_str() {
        Some(why) => format!("cannot start workers: {why}"),
        None if said["starting"] == true => {
            format!("has no worker after {} s: see its log", WITHIN.as_secs())
        }
        None => String::new(),
    };
    if !told.is_empty() {
        bail!(
            "{after} has replaced {before} and {told}. Sessions go on, but no new one begins. Correct the configuration, and repeat rgpuctl upgrade"
        );
    }
    let sessions = if sessions == 1 { "1 session".to_owned() } else { format!("{sessions} sessions") };
    Ok(format!("{after} serves in place of {before} and takes over {sessions}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_daemon_that_announces_its_successor_and_then_fails_was_not_upgraded() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("admin");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            let failed = "{\"upgrading\": {\"sessions\": 2}}\n{\"error\": \"cannot execute it\"}\n";
            // It continues, and would say which version it is.
            for (stream, answer) in listener.incoming().zip([failed, "{\"version\": \"0.1.0\"}\n"]) {
                let mut stream = stream.unwrap();
                stream.read_to_string(&mut String::new()).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let result = upgrade(&Arguments { admin: Admin { socket } });
        assert_eq!(result.unwrap_err().to_string(), "not upgraded: cannot execute it");
    }

    #[test]
    fn a_request_that_nobody_answers_is_repeated() {
        let mut answers = vec![Ok("{}".to_owned()), Err(anyhow::anyhow!("reset")), Ok(String::new())];
        let far = Instant::now() + WITHIN;
        assert_eq!(successor(|| answers.pop().unwrap(), far).unwrap(), "{}");
        let mut answers = vec![r#"{"starting": false}"#.to_owned(), r#"{"starting": true}"#.to_owned()];
        assert_eq!(successor(|| Ok(answers.pop().unwrap()), far).unwrap(), r#"{"starting": false}"#);
        assert!(successor(|| bail!("reset"), Instant::now()).is_err());
        let mut asked = 0;
        let gone = successor(
            || {
                asked += 1;
                Err(std::io::Error::from(ErrorKind::ConnectionRefused).into())
            },
            far,
        );
        assert!(gone.is_err() && asked == 1);
    }

    #[test]
    fn the_result_is_reported_in_one_line() {
        let (before, sessions) = agreed(r#"{"upgrading": {"sessions": 1, "version": "0.1.0"}}"#).unwrap();
        let text = outcome(&before, sessions, r#"{"version": "0.2.0", "pid": 7, "sessions": 1}"#).unwrap();
        assert_eq!(text, "rgpu-server 0.2.0 serves in place of rgpu-server 0.1.0 and takes over 1 session");
        let (before, sessions) =
            agreed(r#"{"upgrading": {"daemon": "vhost-rgpu", "sessions": 2, "version": "0.1.0"}}"#).unwrap();
        let text = outcome(&before, sessions, r#"{"daemon": "vhost-rgpu", "version": "0.2.0"}"#).unwrap();
        assert_eq!(text, "vhost-rgpu 0.2.0 serves in place of vhost-rgpu 0.1.0 and takes over 2 sessions");
        for (said, told) in [
            (
                r#"{"version": "0.2.0", "starting": false, "failed": "no driver"}"#,
                "cannot start workers: no driver.",
            ),
            (r#"{"version": "0.2.0", "starting": true, "failed": null}"#, "has no worker after 120 s"),
        ] {
            let text = outcome(&before, sessions, said).unwrap_err().to_string();
            assert!(text.starts_with("rgpu-server 0.2.0 has replaced") && text.contains(told), "{text}");
        }
        let refused = agreed(r#"{"error": "the server is shutting down"}"#).unwrap_err().to_string();
        assert_eq!(refused, "not upgraded: the server is shutting down");
        assert!(agreed("").is_err() && agreed("what?").is_err() && outcome("0.1.0", 0, "").is_err());
    }
}
