//! Monitoring: a real Prometheus that scrapes both daemons, its alert rules and queries, `rgpuctl status
//! --json`, and `rgpuctl top`.

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use rgpu_tests::daemons::Daemon;
use rgpu_tests::guest::free_port;
use rgpu_tests::programs::{LIMIT, run};
use rgpu_tests::terminal::Terminal;
use rgpu_tests::tree;
use serde_json::Value;
use support::client::Client;
use support::eventually;

const TOKEN: &str = "a-token-of-these-tests-only";
/// The folder with the rules and the dashboard.
fn monitoring() -> PathBuf {
    tree::root().join("monitoring")
}

/// A server with a software GPU and a host over TCP, which both serve metrics.
struct Site {
    server: Daemon,
    host: Daemon,
    folder: tempfile::TempDir,
    /// Ports of the metrics: the server's, then the host's.
    ports: [u16; 2],
}

impl Site {
    fn start(name: &str) -> Result<Site> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        let logs = tree::logs().join(name);
        let token = path("token");
        fs::write(&token, TOKEN)?;
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
        let (port, ports) = (free_port()?, [free_port()?, free_port()?]);
        let scraped = |port: u16| {
            let token = token.display().to_string();
            ["--metrics-listen".into(), format!("tcp:127.0.0.1:{port}"), "--metrics-token-file".into(), token]
        };
        let listen = format!("tcp:127.0.0.1:{port}");
        let cache = path("cache").display().to_string();
        let words = [
            "--cache",
            &cache,
            "--backend",
            "software",
            "--insecure",
            "--workers",
            "2",
            "--client-memory-limit",
            "1G",
            "--listen",
            &listen,
        ];
        let server = words.map(str::to_owned).into_iter().chain(scraped(ports[0]));
        let server =
            Daemon::start("rgpu-server", server, &logs.join("rgpu-server.log"), &path("server.status"))?;
        let native = path("native.sock").display().to_string();
        let words = ["--insecure", "--name", "host7", "--server", &listen, "--native-socket", &native];
        let host = words.map(str::to_owned).into_iter().chain(scraped(ports[1]));
        let host = Daemon::start("vhost-rgpu", host, &logs.join("vhost-rgpu.log"), &path("host.status"))?;
        Ok(Site { server, host, folder, ports })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `rgpuctl` with a subcommand and both status sockets.
    fn rgpuctl(&self, subcommand: &str) -> Command {
        let mut command = Command::new(tree::binaries().join("rgpuctl"));
        command.arg(subcommand);
        for socket in ["server.status", "host.status"] {
            command.arg("--socket").arg(self.path(socket));
        }
        command
    }
}

/// A program that has done some work and waits until it is dropped.
struct Idle(Child);

impl Idle {
    fn start(site: &Site) -> Result<Idle> {
        let mut command = support::program(&site.path("native.sock"), "idle")?;
        command.arg("wait").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a program")?;
        let mut line = [0; 5];
        child
            .stdout
            .as_mut()
            .context("no output")?
            .read_exact(&mut line)
            .context("the program ended too soon")?;
        Ok(Idle(child))
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The status line and the body of an HTTP answer.
fn get(port: u16, path: &str, token: Option<&str>) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    // An answer of HTTP 1.0 is not chunked.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n{token}\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok((head.lines().next().unwrap_or_default().to_owned(), body.to_owned()))
}

/// A Prometheus with its own folder. Dropping it ends it.
struct Prometheus {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Prometheus {
    fn start(site: &Site) -> Result<Prometheus> {
        let port = free_port()?;
        let config = site.path("prometheus.yml");
        let (token, rules) = (site.path("token"), monitoring().join("rgpu-alerts.yml"));
        let job = |name: &str, port: u16| {
            format!(
                "  - job_name: {name}\n    authorization: {{ credentials_file: {} }}\n    static_configs: [{{ targets: [\"127.0.0.1:{port}\"] }}]\n",
                token.display()
            )
        };
        let jobs = [job("rgpu-server", site.ports[0]), job("vhost-rgpu", site.ports[1])].concat();
        // A scrape fails that takes as long as the interval, and a busy machine may need seconds.
        fs::write(
            &config,
            format!(
                "global: {{ scrape_interval: 5s, evaluation_interval: 1s }}\nrule_files: [\"{}\"]\nscrape_configs:\n{jobs}",
                rules.display()
            ),
        )?;
        let log = tree::logs().join("metrics/prometheus.log");
        let output = File::create(&log)?;
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", site.path("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        // SAFETY: the closure only makes one system call, prctl, which is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let child = command.spawn().context("cannot start prometheus: Debian's package has it")?;
        let mut prometheus = Prometheus { child, port, log };
        eventually(|| {
            if prometheus.child.try_wait()?.is_none() {
                let (status, _) = get(port, "/-/ready", None)?;
                ensure!(status.contains(" 200 "), "{status}");
            }
            Ok(())
        })?;
        ensure!(prometheus.child.try_wait()?.is_none(), "{}", fs::read_to_string(&prometheus.log)?);
        Ok(prometheus)
    }

    /// The data in an answer of its API.
    fn api(&self, path: &str) -> Result<Value> {
        let (status, body) = get(self.port, &format!("/api/v1/{path}"), None)?;
        let answer: Value =
            serde_json::from_str(&body).with_context(|| format!("{path}: {status}: {body}"))?;
        ensure!(answer["status"] == "success", "{path}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The current values of a query.
    fn query(&self, query: &str) -> Result<Vec<f64>> {
        let encoded: String = query
            .bytes()
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
                other => format!("%{other:02x}"),
            })
            .collect();
        let data = self.api(&format!("query?query={encoded}")).with_context(|| query.to_owned())?;
        let values = data["result"].as_array().context("no result")?.iter();
        Ok(values.filter_map(|one| one["value"][1].as_str()?.parse().ok()).collect())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The names in a text that begin like rgpu's metrics.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| {
        ["rgpu_server_", "rgpu_host_", "DCGM_FI_"].iter().any(|start| word.starts_with(start))
    });
    ours.map(str::to_owned).collect()
}

/// All queries of the dashboard, with its variables set to match everything.
fn dashboard_queries() -> Result<Vec<String>> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                let expression = fields.get("expr").and_then(Value::as_str);
                found.extend(expression.map(str::to_owned));
                fields.values().for_each(|field| collect(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
            _ => {}
        }
    }
    let board: Value = serde_json::from_str(&fs::read_to_string(monitoring().join("rgpu-dashboard.json"))?)?;
    let mut found = Vec::new();
    collect(&board, &mut found);
    let replaced = found.iter().map(|query| {
        let all = [("$server", ".*"), ("$host", ".*"), ("$principal", ".*"), ("$__rate_interval", "1m")];
        all.iter().fold(query.clone(), |query, (variable, value)| query.replace(variable, value))
    });
    Ok(replaced.collect())
}

#[test]
fn a_real_prometheus_scrapes_both_daemons_and_loads_the_rules() -> Result<()> {
    let site = Site::start("metrics")?;
    for port in site.ports {
        let (status, body) = get(port, "/metrics", None)?;
        ensure!(status.contains(" 401 ") && !body.contains("rgpu_"), "without a token: {status} {body}");
    }
    let idle = Idle::start(&site)?;
    let prometheus = Prometheus::start(&site)?;
    let above = |query: &str, least: f64| {
        let values = prometheus.query(query)?;
        ensure!(!values.is_empty() && values.iter().all(|value| *value >= least), "{query}: {values:?}");
        Ok(())
    };
    eventually(|| {
        above("up{job=\"rgpu-server\"}", 1.0)?;
        above("up{job=\"vhost-rgpu\"}", 1.0)?;
        let labels = "principal=~\"insecure:.+\", client=\"host7\", program=\"idle\"";
        for (metric, least) in [
            ("sessions", 1.0),
            ("sessions_begun_total", 1.0),
            ("launches_total", 1.0),
            ("copies_total", 5.0),
            ("round_trips_total", 1.0),
            ("commands_total", 7.0),
            ("received_bytes_total", 1.0),
            ("sent_bytes_total", 1.0),
            ("device_memory_bytes", 1.0),
        ] {
            above(&format!("rgpu_server_{metric}{{{labels}}}"), least)?;
        }
        above("rgpu_server_device_memory_limit_bytes", f64::from(1 << 30))?;
        above("rgpu_server_gpu_healthy", 1.0)?;
        above("sum(rgpu_server_wait_seconds_count{kind=\"gpu\"})", 1.0)?;
        above("sum(rgpu_server_workers)", 1.0)?;
        above("rgpu_host_sessions{program=\"idle\", vm=\"\", transport=\"tcp\"}", 1.0)?;
        for metric in
            ["commands_total", "round_trips_total", "data_sent_bytes_total", "data_received_bytes_total"]
        {
            above(&format!("rgpu_host_{metric}"), 1.0)?;
        }
        above("rgpu_host_link_round_trip_seconds", 1e-6)
    })?;

    // The metrics in the queries of the dashboard and the rules exist, and Prometheus can parse the queries.
    let documented = metrics_in(&fs::read_to_string(tree::root().join("docs/metrics.md"))?);
    let queries = dashboard_queries()?;
    ensure!(queries.len() > 20, "the dashboard has {} queries", queries.len());
    for query in &queries {
        prometheus.query(query)?;
    }
    // This server has a cache, so queries about it have results.
    eventually(|| {
        for query in queries.iter().filter(|query| query.contains("_cache_")) {
            ensure!(!prometheus.query(query)?.is_empty(), "{query} has no result");
        }
        Ok(())
    })?;
    let rules = fs::read_to_string(monitoring().join("rgpu-alerts.yml"))?;
    let asked: BTreeSet<String> =
        queries.iter().flat_map(|query| metrics_in(query)).chain(metrics_in(&rules)).collect();
    let unknown: Vec<&String> =
        asked.iter().filter(|name| !documented.contains(name.trim_end_matches("_bucket"))).collect();
    ensure!(unknown.is_empty(), "docs/metrics.md does not have {unknown:?}");

    eventually(|| {
        let groups = prometheus.api("rules")?["groups"].clone();
        let rules: Vec<&Value> = groups
            .as_array()
            .context("no groups")?
            .iter()
            .flat_map(|group| group["rules"].as_array())
            .flatten()
            .collect();
        ensure!(rules.len() == rules_in(&monitoring().join("rgpu-alerts.yml"))?, "{} rules", rules.len());
        for rule in rules {
            ensure!(rule["health"] == "ok", "{rule}");
            ensure!(rule["state"] == "inactive", "an alert although nothing is wrong: {rule}");
        }
        Ok(())
    })?;

    // A session's counts stay when it ends.
    let begun = "rgpu_server_commands_total{program=\"idle\"}";
    // After a scrape that took too long, there is no value for a moment.
    let mut before = Vec::new();
    eventually(|| {
        before = prometheus.query(begun)?;
        ensure!(before.len() == 1, "{begun} has the values {before:?}");
        Ok(())
    })?;
    drop(idle);
    eventually(|| {
        ensure!(
            prometheus.query("rgpu_server_sessions{program=\"idle\"}")?.is_empty(),
            "the session is still there"
        );
        let after = prometheus.query(begun)?;
        ensure!(after.len() == 1 && after[0] >= before[0], "{before:?} commands became {after:?}");
        Ok(())
    })
}

fn rules_in(path: &Path) -> Result<usize> {
    Ok(fs::read_to_string(path)?.matches("- alert:").count())
}

#[test]
fn the_alert_rules_pass_promtool_and_each_has_a_test() -> Result<()> {
    for words in [["check", "rules", "rgpu-alerts.yml"], ["test", "rules", "rgpu-alerts.test.yml"]] {
        let outcome = run(Command::new("promtool").args(words).current_dir(monitoring()), LIMIT)?;
        ensure!(outcome.status == Some(0), "{outcome:?}");
    }
    let rules = fs::read_to_string(monitoring().join("rgpu-alerts.yml"))?;
    let tests = fs::read_to_string(monitoring().join("rgpu-alerts.test.yml"))?;
    for name in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        ensure!(tests.contains(&format!("alertname: {name}\n")), "no test for {name}");
    }
    Ok(())
}

/// Checks a schema, and the status of a daemon with the part of the schema for it: errors of the alternative
/// would only say that no part fits. Needs Debian's python3-jsonschema.
const FITS: &str = r#"
import json, sys
from jsonschema import Draft202012Validator as Validator
schema, status = (json.load(open(path)) for path in sys.argv[1:])
assert schema["$schema"] == Validator.META_SCHEMA["$schema"], schema["$schema"]
Validator.check_schema(schema)
part = schema["$defs"][status["daemon"]] | {"$defs": schema["$defs"]}
errors = [f"{e.message} at {e.json_path}" for e in Validator(part).iter_errors(status)]
print(*(errors or ["fits"]), sep="\n")
"#;

#[test]
fn the_status_fits_its_schema() -> Result<()> {
    let site = Site::start("metrics-status")?;
    let check = |sessions: usize| -> Result<()> {
        let outcome = run(site.rgpuctl("status").arg("--json"), LIMIT)?;
        let all: Value = serde_json::from_str(&outcome.stdout).with_context(|| format!("{outcome:?}"))?;
        let all = all.as_object().context("no object")?;
        ensure!(all.len() == 2, "{outcome:?}");
        let file = site.path("status.json");
        for (socket, status) in all {
            fs::write(&file, status.to_string())?;
            let schema = tree::root().join("docs/status.schema.json");
            let outcome =
                run(Command::new("/usr/bin/python3").args(["-c", FITS]).args([&schema, &file]), LIMIT)?;
            ensure!(
                outcome.status == Some(0) && outcome.stdout == "fits\n",
                "the status at {socket}: {outcome:?}"
            );
            ensure!(status["sessions"].as_array().map(Vec::len) == Some(sessions), "{status:#}");
        }
        Ok(())
    };
    eventually(|| check(0))?;
    let idle = Idle::start(&site)?;
    eventually(|| check(1))?;
    drop(idle);
    eventually(|| check(0))
}

/// Waits until the screen of `rgpuctl top` meets the condition.
fn shows(top: &Terminal, what: &str, right: impl Fn(&[String]) -> bool) -> Result<()> {
    eventually(|| {
        let lines = top.lines();
        ensure!(right(&lines), "{what}:\n{}", lines.join("\n"));
        Ok(())
    })
}

const RIGHT: &str = "\x1b[C";
const LEFT: &str = "\x1b[D";

#[test]
fn top_shows_twenty_sessions_in_a_small_terminal() -> Result<()> {
    let site = Site::start("metrics-top")?;
    // Control characters in a name must not reach the terminal.
    let names: Vec<String> =
        (0..20).map(|n| if n == 19 { "evil\x1b[2J".into() } else { format!("train{n:02}") }).collect();
    let socket = site.path("native.sock");
    let clients: Vec<Client> =
        names.iter().map(|name| Client::connect(&socket, name)).collect::<Result<_>>()?;
    eventually(|| {
        let sessions = site.server.status()?["sessions"].as_array().map_or(0, Vec::len);
        ensure!(sessions == 20, "{sessions} sessions");
        Ok(())
    })?;
    let mut command = site.rgpuctl("top");
    command.args(["--interval", "0.2"]);
    let mut top = Terminal::start(command)?;
    let rows = |lines: &[String]| {
        lines.iter().filter(|line| line.contains("train") || line.contains("evil")).count()
    };
    // Two lines are for the daemons, two for the view and its columns, and one for the keys.
    shows(&top, "20 sessions, of which 19 fit", |lines| {
        lines[0].contains("20 sessions of 256")
            && lines[2].contains("20 rows")
            && lines[3].contains("PROGRAM")
            && rows(lines) == 19
    })?;
    ensure!(top.lines().iter().all(|line| line.chars().count() <= 80), "{:#?}", top.lines());
    // Sort by program, in both directions. Its column is four to the left of CMD/s.
    let first = |lines: &[String]| lines[4].clone();
    top.press(&LEFT.repeat(4))?;
    shows(&top, "the last program first", |lines| first(lines).contains("train18"))?;
    top.press("r")?;
    shows(&top, "the first program first", |lines| first(lines).contains("evil?[2J"))?;
    top.press("\x1b[F")?;
    shows(&top, "the end", |lines| lines[22].contains("train18") && lines[4].contains("train00"))?;
    top.press("2")?;
    shows(&top, "programs", |lines| lines[3].contains("SESSIONS") && lines[2].contains("20 rows"))?;
    top.press("3")?;
    shows(&top, "the GPU", |lines| {
        lines[3].contains("HEALTH") && lines[4].contains(" 20 ") && lines[4].ends_with("ok")
    })?;
    top.press("4")?;
    shows(&top, "links", |lines| {
        // In milliseconds on a busy machine.
        let time = ["µs", "ms"].iter().any(|unit| first(lines).contains(unit));
        lines[3].contains("RTT") && rows(lines) == 19 && time
    })?;
    top.press(&format!("{RIGHT}p"))?;
    shows(&top, "a pause", |lines| lines[23].contains("PAUSED"))?;
    top.press("p1")?;
    drop(clients);
    shows(&top, "no sessions", |lines| lines[2].contains(" 0 rows"))?;
    top.press("q")?;
    let mut status = None;
    eventually(|| {
        status = top.ended()?;
        ensure!(status.is_some(), "top does not end");
        Ok(())
    })?;
    ensure!(status.is_some_and(|status| status.success()), "{status:?}");
    ensure!(site.host.status().is_ok(), "the host's daemon is gone");
    Ok(())
}

#[test]
fn top_reports_a_missing_terminal_and_missing_daemons() -> Result<()> {
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    let outcome = run(command.args(["top", "--socket", "/nonexistent"]), LIMIT)?;
    ensure!(outcome.stderr.contains("needs a terminal"), "{outcome:?}");
    let mut command = Command::new(tree::binaries().join("rgpuctl"));
    command.args(["top", "--socket", "/nonexistent"]);
    let top = Terminal::start(command)?;
    shows(&top, "why", |lines| lines.iter().any(|line| line.contains("no daemon answers at /nonexistent")))
}
