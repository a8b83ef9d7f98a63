//! The HTTP listener for scrapers.
//!
//! A scraper must not be able to disturb others. Each connection has its own thread, for one request and a
//! few seconds. The number of connections is limited, in all and for one source. A new connection of a source
//! at its limit replaces the source's oldest one without a request, so silent connections keep nobody out.
//! The values are read at most twice a second, however many scrapers there are.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

use crate::options;

/// Maximum connections.
const CONNECTIONS: usize = 16;
/// Maximum connections of one source: an address, or all of this machine's users together.
const CONNECTIONS_OF_ONE: usize = 6;
/// How long a scraper may take to send its request, and again to receive the answer. Longer in tests, whose
/// machine may be busy.
const WITHIN: Duration = Duration::from_secs(if cfg!(test) { 240 } else { 5 });
/// Maximum bytes of a request.
const MAX_REQUEST: usize = 8 << 10;
/// Minimum age of the values before they are read again.
const FRESH: Duration = Duration::from_millis(500);
/// The content type for Prometheus.
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// On TCP.
    Tcp(TcpListener),
    /// On a Unix socket.
    Unix(UnixListener),
}

impl Listener {
    /// Listens on TCP. Warns if other machines can reach the address.
    ///
    /// # Errors
    /// If the address cannot be used.
    pub fn tcp(host: &str, port: u16) -> io::Result<Listener> {
        let listener = TcpListener::bind((host, port))?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                "metrics are served at {address} without TLS: everyone on the network can read them and their token; to prevent that, serve them at 127.0.0.1 behind a proxy with TLS"
            );
        }
        Ok(Listener::Tcp(listener))
    }
}

/// A connection.
#[derive(Debug)]
enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connection {
    fn shut_down(&self) {
        // The scraper may have closed it.
        let _ = match self {
            Connection::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Connection::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    fn try_clone(&self) -> io::Result<Connection> {
        Ok(match self {
            Connection::Tcp(stream) => Connection::Tcp(stream.try_clone()?),
            Connection::Unix(stream) => Connection::Unix(stream.try_clone()?),
        })
    }

    /// Limits the next calls to the time left until `deadline`.
    fn limit(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match self {
            Connection::Tcp(stream) => {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            }
            Connection::Unix(stream) => {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            }
        }
    }

    fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        self.limit(deadline)?;
        match self {
            Connection::Tcp(stream) => stream.read(buffer),
            Connection::Unix(stream) => stream.read(buffer),
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            self.limit(deadline)?;
            let written = match self {
                Connection::Tcp(stream) => stream.write(bytes),
                Connection::Unix(stream) => stream.write(bytes),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// A connection that is being served.
#[derive(Debug)]
struct Served {
    number: u64,
    /// Its source. `None`: this machine, over a Unix socket.
    source: Option<IpAddr>,
    /// Whether it has sent a valid request.
    asked: bool,
    connection: Connection,
}

/// The text of the last scrape.
#[derive(Default)]
struct Last(Option<(Instant, Arc<str>)>);

struct Server {
    token_file: Option<PathBuf>,
    collect: Box<dyn Fn() -> String + Send + Sync>,
    served: Mutex<Vec<Served>>,
    last: Mutex<Last>,
}

/// Serves what `collect` returns, until the process ends. If there is a token's file, only scrapers with the
/// token are served.
///
/// # Errors
/// If no thread can be started.
pub fn start(
    listener: Listener,
    token_file: Option<PathBuf>,
    collect: impl Fn() -> String + Send + Sync + 'static,
) -> io::Result<()> {
    let (served, last) = Default::default();
    let server = Arc::new(Server { token_file, collect: Box::new(collect), served, last });
    std::thread::Builder::new().name("metrics".into()).spawn(move || server.run(&listener))?;
    Ok(())
}

impl Server {
    fn run(self: &Arc<Self>, listener: &Listener) {
        for number in 0.. {
            let accepted = match listener {
                Listener::Tcp(listener) => listener
                    .accept()
                    .map(|(stream, peer)| (Connection::Tcp(stream), Some(peer.ip().to_canonical()))),
                Listener::Unix(listener) => {
                    listener.accept().map(|(stream, _)| (Connection::Unix(stream), None))
                }
            };
            match accepted {
                Ok((connection, source)) => self.admit(number, connection, source),
                // Descriptors or memory have run out: sessions return them when they end.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    fn served(&self) -> MutexGuard<'_, Vec<Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a connection in its own thread, if there is room.
    fn admit(self: &Arc<Self>, number: u64, connection: Connection, source: Option<IpAddr>) {
        let Ok(ours) = connection.try_clone() else { return };
        {
            let mut served = self.served();
            let own = served.iter().filter(|other| other.source == source).count();
            if own >= CONNECTIONS_OF_ONE || served.len() >= CONNECTIONS {
                let full_of_own = own >= CONNECTIONS_OF_ONE;
                let silent = |other: &Served| !other.asked && (!full_of_own || other.source == source);
                // In order of arrival. If all connections are being answered, the new one is closed, and its
                // scraper has to connect again.
                let Some(oldest) = served.iter().position(silent) else { return };
                served.remove(oldest).connection.shut_down();
            }
            served.push(Served { number, source, asked: false, connection: ours });
        }
        let server = Arc::clone(self);
        let serve = move || {
            if let Err(e) = server.serve(number, connection) {
                tracing::debug!("serving metrics: {e}");
            }
            server.served().retain(|other| other.number != number);
        };
        if let Err(e) = std::thread::Builder::new().name("scrape".into()).spawn(serve) {
            tracing::warn!("cannot start a thread to serve metrics: {e}");
            self.served().retain(|other| other.number != number);
        }
    }

    fn serve(&self, number: u64, mut connection: Connection) -> io::Result<()> {
        let deadline = Instant::now() + WITHIN;
        let mut request = Vec::new();
        let answer = loop {
            if let Some(answer) = self.judge(&request) {
                break answer;
            }
            let mut part = [0; 2048];
            match connection.read(&mut part, deadline) {
                Ok(0) => return Ok(()),
                Ok(count) => request.extend_from_slice(&part[..count]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        };
        let (status, kind, body): (&str, &str, Arc<str>) = match answer {
            Answer::Metrics => {
                self.served().iter_mut().filter(|one| one.number == number).for_each(|one| one.asked = true);
                ("200 OK", TYPE, self.text())
            }
            Answer::Refusal(status, text) => (status, "text/plain; charset=utf-8", text.into()),
        };
        let more = if status.starts_with("401") { "WWW-Authenticate: Bearer\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{more}Connection: close\r\n\r\n",
            body.len()
        );
        let deadline = Instant::now() + WITHIN;
        connection.write_all(head.as_bytes(), deadline)?;
        connection.write_all(body.as_bytes(), deadline)
    }

    /// The answer to the part of a request that has come. `None`: more must come first.
    fn judge(&self, request: &[u8]) -> Option<Answer> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(request) {
            Ok(httparse::Status::Partial) if request.len() < MAX_REQUEST => return None,
            Ok(httparse::Status::Partial) => {
                return Some(Answer::Refusal(
                    "431 Request Header Fields Too Large",
                    "The request is too long.\n",
                ));
            }
            Ok(httparse::Status::Complete(_)) => {}
            Err(_) => return Some(Answer::Refusal("400 Bad Request", "This is not an HTTP request.\n")),
        }
        if let Some(file) = &self.token_file {
            let Ok(token) = options::token(file) else {
                tracing::error!("refusing to serve metrics, because there is no token in {}", file.display());
                return Some(Answer::Refusal(
                    "500 Internal Server Error",
                    "This daemon has no token any more.\n",
                ));
            };
            let given =
                parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case("authorization"));
            if !given.is_some_and(|given| is_bearer(given.value, token.as_bytes())) {
                let why = "Metrics need the token of metrics.token_file: Authorization: Bearer TOKEN.\n";
                return Some(Answer::Refusal("401 Unauthorized", why));
            }
        }
        let path = parsed.path.unwrap_or_default().split('?').next().unwrap_or_default();
        Some(match (parsed.method, path) {
            (Some("GET"), "/metrics") => Answer::Metrics,
            (Some("GET"), _) => Answer::Refusal("404 Not Found", "The metrics are at /metrics.\n"),
            _ => Answer::Refusal("405 Method Not Allowed", "Metrics can only be read: GET /metrics.\n"),
        })
    }

    /// The current values, or those that were read a moment ago. Scrapers that ask meanwhile wait for them,
    /// and get the same.
    fn text(&self) -> Arc<str> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, text)) = &last.0
            && at.elapsed() < FRESH
        {
            return Arc::clone(text);
        }
        let text: Arc<str> = (self.collect)().into();
        last.0 = Some((Instant::now(), Arc::clone(&text)));
        text
    }
}

/// The answer to a request.
enum Answer {
    /// The values.
    Metrics,
    /// Status and text.
    Refusal(&'static str, &'static str),
}

/// Whether a header's value is this token.
fn is_bearer(value: &[u8], token: &[u8]) -> bool {
    let scheme = b"bearer ";
    let (given, rest) = value.split_at(scheme.len().min(value.len()));
    given.eq_ignore_ascii_case(scheme) && bool::from(rest.trim_ascii().ct_eq(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU64, Ordering};

    const TOKEN: &str = "0123456789abcdef0123";

    struct Rig {
        port: u16,
        collected: Arc<AtomicU64>,
        _folder: tempfile::TempDir,
    }

    fn start_here() -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, TOKEN).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let collected = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&collected);
        start(Listener::Tcp(listener), Some(file), move || {
            count.fetch_add(1, Ordering::SeqCst);
            format!("x 1\n{}# EOF\n", "# padding\n".repeat(100_000))
        })
        .unwrap();
        Rig { port, collected, _folder: folder }
    }

    impl Rig {
        fn connect(&self) -> TcpStream {
            TcpStream::connect(("127.0.0.1", self.port)).unwrap()
        }

        fn ask(&self, request: &str) -> String {
            let mut stream = self.connect();
            // The listener may close the connection with something unread, or before all is written.
            let _ = stream.write_all(request.as_bytes());
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            answer
        }

        fn scrape(&self) -> String {
            self.ask(&format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"))
        }
    }

    #[test]
    fn only_requests_with_the_token_read_the_metrics() {
        let rig = start_here();
        let answer = rig.scrape();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"), "{answer:.200}");
        assert!(answer.contains(TYPE));
        for request in [
            "GET /metrics HTTP/1.1\r\n\r\n".to_owned(),
            "GET /metrics HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n".to_owned(),
            format!("GET /metrics HTTP/1.1\r\nAuthorization: Bearer {}\r\n\r\n", &TOKEN[..19]),
            format!("GET /metrics HTTP/1.1\r\nAuthorization: {TOKEN}\r\n\r\n"),
        ] {
            assert!(rig.ask(&request).starts_with("HTTP/1.1 401 "), "{request}");
        }
        let known = format!("Authorization: bearer {TOKEN}\r\n\r\n");
        assert!(rig.ask(&format!("GET / HTTP/1.1\r\n{known}")).starts_with("HTTP/1.1 404 "));
        assert!(rig.ask(&format!("POST /metrics HTTP/1.1\r\n{known}")).starts_with("HTTP/1.1 405 "));
        assert!(rig.ask("\0\r\n\r\n").starts_with("HTTP/1.1 400 "));
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(2 * MAX_REQUEST));
        assert!(rig.ask(&long).is_empty() || rig.ask(&long).starts_with("HTTP/1.1 431 "));
        assert_eq!(
            rig.collected.load(Ordering::SeqCst),
            1,
            "other requests do not make the daemon read its counters"
        );
    }

    #[test]
    fn silent_connections_and_those_that_do_not_read_keep_nobody_out() {
        let rig = start_here();
        let silent: Vec<TcpStream> = (0..CONNECTIONS * 4).map(|_| rig.connect()).collect();
        assert!(rig.scrape().starts_with("HTTP/1.1 200 "));
        // These have sent a part of a request.
        let slow: Vec<TcpStream> = (0..CONNECTIONS * 4)
            .map(|_| {
                let mut stream = rig.connect();
                stream.write_all(b"GET /met").unwrap();
                stream
            })
            .collect();
        assert!(rig.scrape().starts_with("HTTP/1.1 200 "));
        drop((silent, slow));
    }

    #[test]
    fn many_scrapes_read_the_values_once() {
        let rig = start_here();
        let begun = Instant::now();
        let scrapes = 50;
        let good = (0..scrapes).filter(|_| rig.scrape().starts_with("HTTP/1.1 200 ")).count();
        assert_eq!(good, scrapes);
        let most = 1 + begun.elapsed().as_millis() / FRESH.as_millis();
        assert!(u128::from(rig.collected.load(Ordering::SeqCst)) <= most);
    }
}
