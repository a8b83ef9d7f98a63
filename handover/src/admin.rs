//! Requests of `rgpuctl` to a daemon, over a Unix socket that only the daemon's user and root can open. Each
//! connection carries one request, a JSON object, and its answer, one JSON object a line.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// Maximum size of a request in bytes.
const MAX_REQUEST: u64 = 64 << 10;
/// How long the operator may take to send the request, and to receive each part of the answer.
const WITHIN: Duration = Duration::from_secs(5);

/// Reads the request of a connection: everything until the operator closes its sending direction.
///
/// # Errors
/// The answer to something that is not a `Request`.
pub fn request<Request: DeserializeOwned>(stream: &UnixStream) -> Result<Request, String> {
    let read = || -> io::Result<String> {
        stream.set_read_timeout(Some(WITHIN))?;
        stream.set_write_timeout(Some(WITHIN))?;
        let mut text = String::new();
        stream.take(MAX_REQUEST).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|e| format!("the request cannot be read: {e}"))?;
    serde_json::from_str(&text).map_err(|e| match serde_json::from_str::<Map<String, Value>>(&text) {
        Ok(request) if e.to_string().starts_with("unknown variant") => {
            let name = request.keys().next().map_or("", String::as_str);
            format!("{name:?} is no request to this daemon: it is the other one, or of another version")
        }
        _ => format!("the request cannot be parsed: {e}"),
    })
}

/// Sends one line of the answer. The operator may be gone by now, which is no error.
pub fn answer(mut stream: &UnixStream, line: &Value) {
    drop(stream.write_all(format!("{line}\n").as_bytes()));
}

/// Sends the answer to a request: what it returned, or `{"error": "why"}`.
pub fn conclude(stream: &UnixStream, result: Result<Value, String>) {
    answer(stream, &result.unwrap_or_else(|why| json!({ "error": why })));
}

/// Serves `{"upgrade": {}}`. `upgrade` executes the installed program and returns only if that fails. Right
/// before, it calls the function that it gets with the last line of the answer.
pub fn upgrade(stream: &UnixStream, upgrade: impl FnOnce(&dyn Fn(&Value)) -> Result<Infallible, String>) {
    let Err(why) = upgrade(&|line| answer(stream, line));
    tracing::error!("rgpuctl upgrade: not upgraded: {why}");
    conclude(stream, Err(why));
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn a_request_that_cannot_be_parsed_is_answered_with_the_reason() {
        let (operator, daemon) = UnixStream::pair().unwrap();
        (&operator).write_all(b"{\"version\": ").unwrap();
        operator.shutdown(Shutdown::Write).unwrap();
        conclude(&daemon, request::<Value>(&daemon));
        drop(daemon);
        let answer: Value = serde_json::from_reader(&operator).unwrap();
        assert!(answer["error"].as_str().unwrap().starts_with("the request cannot be parsed: "), "{answer}");
    }

    #[test]
    fn a_request_that_the_other_daemon_would_take_is_told_apart() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(rename_all = "lowercase")]
        enum Own {
            Version {},
        }
        let (operator, daemon) = UnixStream::pair().unwrap();
        (&operator).write_all(b"{\"clients\": {}}").unwrap();
        operator.shutdown(Shutdown::Write).unwrap();
        let refused = request::<Own>(&daemon).unwrap_err();
        assert_eq!(
            refused,
            "\"clients\" is no request to this daemon: it is the other one, or of another version"
        );
    }

    #[test]
    fn a_request_beyond_the_limit_is_refused() {
        let (operator, daemon) = UnixStream::pair().unwrap();
        let text = format!("\"{}\"", "x".repeat(MAX_REQUEST as usize));
        let sender = std::thread::spawn(move || drop((&operator).write_all(text.as_bytes())));
        assert!(request::<Value>(&daemon).is_err());
        drop(daemon);
        sender.join().unwrap();
    }

    #[test]
    fn the_operator_learns_of_an_upgrade_and_of_its_failure() {
        let (operator, daemon) = UnixStream::pair().unwrap();
        upgrade(&daemon, |say| {
            say(&json!({ "upgrading": {} }));
            Err("no such program".into())
        });
        drop(daemon);
        let mut text = String::new();
        (&operator).read_to_string(&mut text).unwrap();
        assert_eq!(text, "{\"upgrading\":{}}\n{\"error\":\"no such program\"}\n");
    }
}
