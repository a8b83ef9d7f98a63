//! The first message of a connection, and where the connection goes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use host_bridge::framing::send_frame;
use protocol::VERSION;
use protocol::device::{Answer, text, untext};
use protocol::link::{Hello, MAGIC, Welcome, frame, purpose};
use zerocopy::{FromZeros, IntoBytes};

use super::pool::Worker;
use super::{Server, Session, State, Token};
use crate::ipc::{Counters, ToWorker, Transport};
use crate::share::random_token;

/// A client has this long to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
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

/// A ready worker, out of the pool. Waits for one, behind those that came before.
fn take_worker(server: &Server) -> Result<Arc<Worker>, Refused> {
    let mut state = server.lock();
    let most = server.options.max_sessions;
    // Those that wait will be sessions; so no more wait than may begin.
    let taken = state.sessions.len() + state.line.waiting.len();
    if taken >= most {
        let reason = format!("the server already has its {most} sessions (--max-sessions)");
        return Err(Refused(Answer::NoResources, reason));
    }
    let place = state.line.join();
    let (mut state, taken) = wait_for_worker(server, state, place);
    state.line.leave(place);
    // The next in the line may have its turn now.
    server.changed.notify_all();
    taken
}

fn wait_for_worker<'s>(
    server: &'s Server,
    mut state: MutexGuard<'s, State>,
    place: u64,
) -> (MutexGuard<'s, State>, Result<Arc<Worker>, Refused>) {
    let begun = Instant::now();
    let patience = Duration::from_secs(server.options.wait_seconds);
    let mut said = false;
    loop {
        if state.draining {
            return (state, Err(Refused(Answer::Denied, "the server is shutting down".into())));
        }
        let before = state.line.before(place);
        if before == 0
            && let Some(worker) = state.idle.pop_front()
        {
            return (state, Ok(worker));
        }
        if !std::mem::replace(&mut said, true) {
            tracing::info!(before, starting = state.starting, "a session waits for a worker");
        }
        let left = patience.saturating_sub(begun.elapsed());
        if left.is_zero() {
            let reason = format!(
                "no worker became ready within {} s (--wait-seconds), and {before} sessions that came before wait too; more workers can be kept ready (--workers)",
                patience.as_secs()
            );
            return (state, Err(Refused(Answer::NoResources, reason)));
        }
        state = server.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::sync::{Condvar, Mutex};

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        serve: crate::cli::Serve,
    }

    fn server(arguments: &[&str]) -> Arc<Server> {
        let command = Command::parse_from(std::iter::once("rgpu-server").chain(arguments.iter().copied()));
        Arc::new(Server { options: command.serve, state: Mutex::default(), changed: Condvar::new() })
    }

    fn refusal(result: Result<Arc<Worker>, Refused>) -> String {
        result.err().map(|Refused(_, reason)| reason).unwrap_or_default()
    }

    #[test]
    fn sessions_that_wait_for_workers_are_served_in_the_order_in_which_they_came() {
        let server = server(&["--wait-seconds", "600", "--max-sessions", "9"]);
        let (served, order) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let (waits, served) = (Arc::clone(&server), served.clone());
                scope.spawn(move || {
                    served.send((number, take_worker(&waits).ok().unwrap().pid())).unwrap();
                });
                while server.lock().line.waiting.len() <= number as usize {
                    std::thread::yield_now();
                }
            }
            // They count as sessions to come: there is room for one more.
            for number in 0..8u32 {
                server.lock().idle.push_back(Worker::made_up(number));
                server.changed.notify_all();
                assert_eq!(order.recv().unwrap(), (number, number));
            }
        });
        assert!(server.lock().line.waiting.is_empty() && server.lock().idle.is_empty());
    }

    #[test]
    fn who_waits_in_vain_and_who_comes_too_many_is_told_why() {
        let server = server(&["--wait-seconds", "0", "--max-sessions", "1"]);
        let text = refusal(take_worker(&server));
        assert!(text.contains("within 0 s (--wait-seconds), and 0 sessions"), "{text}");
        server.lock().line.join();
        assert!(refusal(take_worker(&server)).contains("--max-sessions"));
    }
}
