//! Serves the reports of device processes as metrics.
//!
//! A device process is trusted no more than elsewhere. Its figures count for the virtual machine or user that
//! it serves, which the keeper knows. Programs' names go through a [ledger](metrics::Ledger), which bounds
//! their number, and servers' names come from the configuration.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use host_bridge::framing::Address;
use metrics::serve::Listener;
use metrics::{Key, Ledger, Options, Samples};
use nix::sys::socket::SockType;
use serde_json::{Map, Value};

use super::families as f;
use super::process::{Processes, reports};
use super::status::{Counted, Own, PATIENCE};
use crate::registry::REFUSALS;
use crate::sockets::{Listening, Sockets};

/// A listening socket that is not served yet.
pub struct Unserved {
    listener: Listener,
    options: Options,
    file: Option<Listening>,
}

/// Listens where the options say.
pub fn listen(options: &Options, sockets: &mut Sockets<'_>) -> Result<Option<Unserved>> {
    let Some(place) = &options.listen else { return Ok(None) };
    let (listener, file) = match place {
        metrics::Place::Unix(path) => {
            let listening = sockets.take_or_bind("metrics", path, SockType::Stream, &0o660.into())?;
            let socket = listening.as_fd().try_clone_to_owned().context("duplicating a descriptor")?;
            (Listener::Unix(UnixListener::from(socket)), Some(listening))
        }
        metrics::Place::Tcp(host, port) => {
            let listener = Listener::tcp(host, *port);
            (listener.with_context(|| format!("cannot serve metrics at {place}"))?, None)
        }
    };
    Ok(Some(Unserved { listener, options: options.clone(), file }))
}

impl Unserved {
    /// Starts serving. Dropping the returned value removes the socket's file.
    pub fn serve(self, processes: &Arc<Processes>, own: &Arc<Own>) -> Result<Option<Listening>> {
        let Unserved { listener, options, file } = self;
        let token = if matches!(listener, Listener::Tcp(_)) { options.token_file } else { None };
        let scraper = Scraper {
            processes: Arc::clone(processes),
            own: Arc::clone(own),
            started: SystemTime::now(),
            programs: Mutex::default(),
        };
        metrics::serve::start(listener, token, move || scraper.collect().text())
            .context("starting to serve metrics")?;
        if let Some(place) = options.listen {
            tracing::info!("serving metrics at {place}");
        }
        Ok(file)
    }
}

struct Scraper {
    processes: Arc<Processes>,
    own: Arc<Own>,
    started: SystemTime,
    /// Programs' names, by what their device processes serve.
    programs: Mutex<Ledger<()>>,
}

/// The labels `vm` and `uid` of what a device process serves.
fn owner(serves: &str) -> [&str; 2] {
    match serves.split_once(' ') {
        Some(("vm", name)) => [name, ""],
        Some(("user", uid)) => ["", uid],
        _ => [serves, serves],
    }
}

impl Scraper {
    fn collect(&self) -> Samples {
        let mut samples = Samples::default();
        let started = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        samples.add(&f::INFO, &[env!("CARGO_PKG_VERSION"), &protocol::VERSION.to_string()], 1u64);
        samples.add(&f::STARTED, &[], started.as_secs_f64());
        samples.add(&f::RESTARTS, &[], self.own.restarts.load(Ordering::Relaxed));
        for (why, count) in self.own.refused() {
            samples.add(&f::CLIENTS_REFUSED, &[why.name()], count);
        }
        let (running, ended) = self.processes.all();
        for (serves, done) in &ended {
            count(&mut samples, owner(serves), done);
        }
        let deadline = Instant::now() + PATIENCE;
        for (process, (counted, _)) in running.iter().zip(reports(&running, deadline)) {
            let owner = owner(&process.name);
            let servers: Vec<String> = process.servers().iter().map(Address::to_string).collect();
            samples.add(&f::PROCESSES, &owner, 1u64);
            count(&mut samples, owner, &counted);
            let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
            let mut enter = |program: &str| programs.enter([&process.name, program, ""], Instant::now());
            sessions(&mut samples, owner, &servers, counted.sessions(), &mut enter);
        }
        samples
    }
}

/// Adds what a device process's sessions have done, ended ones included.
fn count(samples: &mut Samples, owner: [&str; 2], done: &Counted) {
    for (family, name) in [
        (&f::OPENED, "sessions_opened"),
        (&f::CLOSED, "sessions_closed"),
        (&f::LOST, "sessions_lost"),
        (&f::MALFORMED, "malformed_requests"),
    ] {
        samples.add(family, &owner, done.number(name));
    }
    for (_, name) in REFUSALS {
        let reason = name.trim_start_matches("sessions_refused_");
        samples.add(&f::REFUSED, &[owner[0], owner[1], reason], done.number(name));
    }
    for (family, name) in [
        (&f::COMMANDS, "commands"),
        (&f::ROUND_TRIPS, "replies"),
        (&f::DATA_SENT, "data_bytes_sent"),
        (&f::DATA_COMPRESSED, "data_bytes_compressed"),
        (&f::DATA_COMPRESSED_TO, "data_bytes_compressed_to"),
        (&f::DATA_KNOWN, "data_bytes_known"),
        (&f::DATA_DECOMPRESSED, "data_bytes_decompressed"),
        (&f::DATA_DECOMPRESSED_FROM, "data_bytes_decompressed_from"),
        (&f::DATA_RECEIVED, "data_bytes_received"),
        (&f::CONTROL_SENT, "control_bytes_sent"),
        (&f::CONTROL_RECEIVED, "control_bytes_received"),
        (&f::COPIED, "copied_bytes"),
        (&f::DOORBELLS, "doorbells"),
        (&f::WAKES, "wakes"),
        (&f::RESUMES, "resumed"),
    ] {
        samples.add(family, &owner, done.total(name));
    }
}

/// Adds a device process's current sessions. `servers` are those it may use: a session that names another one
/// has an empty label.
fn sessions(
    samples: &mut Samples,
    owner: [&str; 2],
    servers: &[String],
    rows: &[Map<String, Value>],
    enter: &mut dyn FnMut(&str) -> Key,
) {
    let [vm, uid] = owner;
    let mut longest: BTreeMap<&str, u64> = BTreeMap::new();
    let mut by_program: BTreeMap<(Key, &str, &str), u64> = BTreeMap::new();
    for row in rows {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let number = |name: &str| row.get(name).and_then(Value::as_u64);
        let transport = ["local", "tcp", "verbs"].into_iter().find(|known| *known == text("transport"));
        let server = servers.iter().find(|known| *known == text("server")).map_or("", String::as_str);
        *by_program.entry((enter(text("program")), transport.unwrap_or_default(), server)).or_default() += 1;
        samples.add(&f::RESUMING, &[vm, uid, server], text("state") == "resuming");
        samples.add(&f::REGISTERED, &owner, number("registered_bytes").unwrap_or(0));
        if let Some(time) = number("round_trip_us") {
            let longest = longest.entry(server).or_default();
            *longest = time.max(*longest);
        }
    }
    for ((key, transport, server), count) in by_program {
        samples.add(&f::SESSIONS, &[vm, uid, key.labels()[1], transport, server], count);
    }
    for (server, longest) in longest {
        samples.add(&f::ROUND_TRIP, &[vm, uid, server], longest as f64 / 1e6);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(program: &str, more: Value) -> Map<String, Value> {
        let mut row = json!({"program": program, "server": "tcp:gpu:9700", "transport": "tcp", "state": "ready", "registered_bytes": 10});
        for (name, value) in more.as_object().unwrap() {
            row[name] = value.clone();
        }
        row.as_object().unwrap().clone()
    }

    fn text(rows: &[Map<String, Value>]) -> String {
        let (mut samples, mut programs) = (Samples::default(), Ledger::<()>::default());
        let mut enter = |program: &str| programs.enter(["vm guest1", program, ""], Instant::now());
        let servers = ["tcp:gpu:9700", "unix:/run/rgpu/server.sock"].map(str::to_owned);
        sessions(&mut samples, owner("vm guest1"), &servers, rows, &mut enter);
        samples.text()
    }

    #[test]
    fn sessions_are_counted_by_program_and_the_longest_way_is_shown() {
        let rows = [
            row("train", json!({"round_trip_us": 250})),
            row("train", json!({"round_trip_us": 1500})),
            row("infer", json!({"state": "resuming", "transport": "pigeon"})),
        ];
        let text = text(&rows);
        let labels = "vm=\"guest1\",uid=\"\"";
        for line in [
            format!(
                "rgpu_host_sessions{{{labels},program=\"train\",transport=\"tcp\",server=\"tcp:gpu:9700\"}} 2"
            ),
            format!(
                "rgpu_host_sessions{{{labels},program=\"infer\",transport=\"\",server=\"tcp:gpu:9700\"}} 1"
            ),
            format!("rgpu_host_sessions_resuming{{{labels},server=\"tcp:gpu:9700\"}} 1"),
            format!("rgpu_host_registered_bytes{{{labels}}} 30"),
            format!("rgpu_host_link_round_trip_seconds{{{labels},server=\"tcp:gpu:9700\"}} 0.0015"),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn each_session_counts_for_its_own_server() {
        let socket = "unix:/run/rgpu/server.sock";
        let rows = [
            row("train", json!({"round_trip_us": 900})),
            row("train", json!({"server": socket, "transport": "local", "state": "resuming"})),
            row("train", json!({"server": "tcp:elsewhere:1", "round_trip_us": 10})),
        ];
        let text = text(&rows);
        let labels = "vm=\"guest1\",uid=\"\"";
        for line in [
            format!(
                "rgpu_host_sessions{{{labels},program=\"train\",transport=\"tcp\",server=\"tcp:gpu:9700\"}} 1"
            ),
            format!(
                "rgpu_host_sessions{{{labels},program=\"train\",transport=\"local\",server=\"{socket}\"}} 1"
            ),
            format!("rgpu_host_sessions{{{labels},program=\"train\",transport=\"tcp\",server=\"\"}} 1"),
            format!("rgpu_host_sessions_resuming{{{labels},server=\"tcp:gpu:9700\"}} 0"),
            format!("rgpu_host_sessions_resuming{{{labels},server=\"{socket}\"}} 1"),
            format!("rgpu_host_link_round_trip_seconds{{{labels},server=\"tcp:gpu:9700\"}} 0.0009"),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("elsewhere"), "{text}");
    }

    #[test]
    fn a_device_process_cannot_make_endless_labels() {
        let rows: Vec<_> = (0..5000)
            .map(|n| row(&format!("p{n}"), json!({"transport": format!("t{n}"), "server": format!("s{n}")})))
            .collect();
        let series = text(&rows).lines().filter(|line| line.starts_with("rgpu_host_sessions{")).count();
        assert!(series < 100, "{series}");
    }

    #[test]
    fn roles_become_labels() {
        assert_eq!(
            [owner("vm a b"), owner("user 1000"), owner("other")],
            [["a b", ""], ["", "1000"], ["other"; 2]]
        );
    }
}
