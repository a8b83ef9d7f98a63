//! The first message of a connection, and where the connection goes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_bridge::framing::send_frame;
use protocol::VERSION;
use protocol::device::{Answer, text, untext};
use protocol::link::{Hello, MAGIC, Welcome, frame, purpose};
use zerocopy::{FromZeros, IntoBytes};

use super::pool::Worker;
use super::{Server, Session, Token};
use crate::ipc::{Counters, ToWorker, Transport};
use crate::share::random_token;

/// A client has this long to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// A session waits this long for a worker.
const WORKER_WITHIN: Duration = Duration::from_secs(60);
/// Data connections of a session, if the client has no wish; and at most.
const DATA_CONNECTIONS: (u32, u32) = (4, 16);

/// A connection.
pub(super) enum Control {
    /// From a Unix socket.
    Local(UnixStream),
    /// From another machine.
    Tcp(TcpStream),
}

impl Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Control::Local(stream) => stream.as_fd(),
            Control::Tcp(stream) => stream.as_fd(),
        }
    }

    fn limit(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        match self {
            Control::Local(s) => s.set_read_timeout(read).and_then(|()| s.set_write_timeout(write)),
            Control::Tcp(s) => s.set_read_timeout(read).and_then(|()| s.set_write_timeout(write)),
        }
    }

    fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Control::Local(s) => Read::read(&mut &*s, buf),
            Control::Tcp(s) => Read::read(&mut &*s, buf),
        }
    }

    fn write_all(&self, buf: &[u8]) -> io::Result<()> {
        match self {
            Control::Local(s) => Write::write_all(&mut &*s, buf),
            Control::Tcp(s) => Write::write_all(&mut &*s, buf),
        }
    }

    /// The name of the transport, for people.
    pub(super) fn transport(&self) -> &'static str {
        match self {
            Control::Local(_) => "local",
            Control::Tcp(_) => "tcp",
        }
    }

    /// Tells the client that its session is over, in place of a worker that cannot.
    pub(super) fn bye(&self, reason: &str) {
        // The client may be gone too, or take nothing any more: then it learns by the closed connection.
        let _ = self.limit(None, Some(Duration::from_secs(1)));
        let _ = send_frame(self.as_fd(), frame::BYE, &[reason.as_bytes()], &[]);
    }
}

/// A refusal: what, and why.
struct Refused(Answer, String);

/// Serves one new connection as far as its handshake goes.
pub(super) fn serve(server: &Arc<Server>, connection: Control, peer: &str) {
    let hello = match hello(&connection) {
        Ok(hello) => hello,
        Err(e) => {
            tracing::info!(peer, "connection closed in its handshake: {e}");
            return;
        }
    };
    let (client, program) = (untext(&hello.client), untext(&hello.program));
    let result = check(&connection, &hello).and_then(|()| match hello.purpose {
        purpose::DATA => route_data(server, &connection, &hello),
        _ => open_session(server, &connection, &hello, peer),
    });
    if let Err(Refused(answer, reason)) = result {
        tracing::info!(peer, client, program, "refused: {reason}");
        let welcome = welcome(answer, [0; 16], 0, &reason);
        // The client may be gone already.
        let _ = connection.write_all(welcome.as_bytes());
    }
}

fn hello(connection: &Control) -> io::Result<Hello> {
    let deadline = Instant::now() + HELLO_WITHIN;
    let mut hello = Hello::new_zeroed();
    let mut at = 0;
    while at < size_of::<Hello>() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no hello within {} s", HELLO_WITHIN.as_secs()),
            ));
        }
        connection.limit(Some(left), Some(HELLO_WITHIN))?;
        match connection.read(&mut hello.as_mut_bytes()[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) => {}
            Err(e) => return Err(e),
        }
        if at >= 8 && hello.magic != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak rgpu"));
        }
        // Another version's hello may be shorter: it is answered as soon as its version is known.
        if at >= 12 && hello.version != VERSION {
            break;
        }
    }
    Ok(hello)
}

fn check(connection: &Control, hello: &Hello) -> Result<(), Refused> {
    if hello.version != VERSION {
        let reason = format!(
            "the client speaks version {} of rgpu, this server speaks version {VERSION}: install the same release on both",
            hello.version
        );
        return Err(Refused(Answer::Version, reason));
    }
    match (connection, hello.purpose) {
        (Control::Tcp(_), purpose::CONTROL | purpose::DATA | purpose::VERBS)
        | (Control::Local(_), purpose::LOCAL) => Ok(()),
        (_, other) => Err(Refused(
            Answer::Invalid,
            format!("purpose {other} is not served over {}", connection.transport()),
        )),
    }
}

fn welcome(answer: Answer, token: Token, data_connections: u32, reason: &str) -> Welcome {
    Welcome {
        magic: MAGIC,
        version: VERSION,
        status: answer as u32,
        token,
        data_connections,
        reserved: 0,
        server: text(&super::host_name()),
        reason: text(reason),
    }
}

fn route_data(server: &Server, connection: &Control, hello: &Hello) -> Result<(), Refused> {
    let worker = server.lock().tokens.get(&hello.token).cloned();
    let unknown = || Refused(Answer::Denied, "no session has this token".into());
    let worker = worker.ok_or_else(unknown)?;
    let failed = |e: io::Error| Refused(Answer::NoResources, format!("the session's worker is gone: {e}"));
    connection.limit(None, None).map_err(failed)?;
    // The answer goes first: once the worker has the connection, it may send data on it.
    connection.write_all(welcome(Answer::Ok, hello.token, 0, "").as_bytes()).map_err(failed)?;
    if let Err(e) = worker.send(&ToWorker::Data, connection.as_fd()) {
        tracing::debug!("a data connection for a worker that is gone: {e}");
    }
    Ok(())
}

fn open_session(server: &Server, connection: &Control, hello: &Hello, peer: &str) -> Result<(), Refused> {
    let failed = |what: &str, e: io::Error| Refused(Answer::NoResources, format!("{what}: {e}"));
    let token = random_token().map_err(|e| failed("no random numbers", e))?;
    let (client, program) = (untext(&hello.client), untext(&hello.program));
    let (transport, connections) = match connection {
        Control::Local(_) => (Transport::Local, 0),
        Control::Tcp(_) if hello.purpose == purpose::VERBS => {
            (Transport::Verbs { slot_count: hello.slot_count }, 0)
        }
        Control::Tcp(_) => {
            let wanted =
                if hello.index == 0 { DATA_CONNECTIONS.0 } else { hello.index.min(DATA_CONNECTIONS.1) };
            (Transport::Tcp { slot_count: hello.slot_count, data_connections: wanted }, wanted)
        }
    };
    connection.limit(None, None).map_err(|e| failed("the connection", e))?;
    loop {
        let worker = take_worker(server)?;
        let again = match connection {
            Control::Local(s) => s.try_clone().map(Control::Local),
            Control::Tcp(s) => s.try_clone().map(Control::Tcp),
        };
        let session = Session {
            client: client.clone(),
            program: program.clone(),
            pid: hello.pid,
            transport: if matches!(transport, Transport::Verbs { .. }) {
                "verbs"
            } else {
                connection.transport()
            },
            peer: peer.to_owned(),
            since: Instant::now(),
            counters: Counters::default(),
            token,
            control: again.map_err(|e| failed("the connection", e))?,
            ended: false,
        };
        {
            let mut state = server.lock();
            state.sessions.insert(worker.pid(), session);
            state.tokens.insert(token, Arc::clone(&worker));
            state.sessions_begun += 1;
        }
        let message = ToWorker::Session { transport, program: program.clone(), client: client.clone() };
        match worker.send(&message, connection.as_fd()) {
            Ok(()) => {
                tracing::info!(
                    peer,
                    client,
                    program,
                    pid = hello.pid,
                    worker = worker.pid(),
                    "session begins"
                );
                let welcome = welcome(Answer::Ok, token, connections, "");
                // A client that is gone is the worker's to notice.
                let _ = connection.write_all(welcome.as_bytes());
                return Ok(());
            }
            Err(e) => {
                tracing::debug!(worker = worker.pid(), "a ready worker was gone: {e}");
                let mut state = server.lock();
                state.sessions.remove(&worker.pid());
                state.tokens.remove(&token);
                state.sessions_begun -= 1;
            }
        }
    }
}

/// A ready worker, out of the pool. Waits for one.
fn take_worker(server: &Server) -> Result<Arc<Worker>, Refused> {
    let deadline = Instant::now() + WORKER_WITHIN;
    let mut state = server.lock();
    loop {
        if state.draining {
            return Err(Refused(Answer::Denied, "the server is shutting down".into()));
        }
        let most = server.options.max_sessions;
        if state.sessions.len() >= most {
            return Err(Refused(
                Answer::NoResources,
                format!("the server already has its {most} sessions (--max-sessions)"),
            ));
        }
        if let Some(worker) = state.idle.pop_front() {
            server.changed.notify_all();
            return Ok(worker);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Refused(
                Answer::NoResources,
                format!("no worker became ready within {} s", WORKER_WITHIN.as_secs()),
            ));
        }
        state = server.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
    }
}
