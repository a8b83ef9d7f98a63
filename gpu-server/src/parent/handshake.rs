//! The first message of a connection, which decides where the connection goes.

use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use host_bridge::framing::send_frame;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{MsgFlags, Shutdown, getsockopt, send, shutdown};
use protocol::device::{Answer, text, untext};
use protocol::link::{BadGreeting, Hello, MAGIC, Welcome, frame, greeting, purpose, wish};
use protocol::version::{Mismatch, OURS};
use zerocopy::IntoBytes;

use super::queue::{Parked, join};
use super::{Server, Token};
use crate::cuda_ipc::random_token;
use crate::worker_protocol::{Kind, ToWorker, Transport};

/// How long a client may take to send its hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Data connections of a session: the default, and the maximum.
const DATA_CONNECTIONS: (u32, u32) = (4, 16);

/// A connection.
pub(super) enum Control {
    /// From a Unix socket.
    Local(UnixStream),
    /// From another machine.
    Tcp(TcpStream),
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Control::Local(stream) => stream.as_fd(),
            Control::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Control {
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

    /// Sends a welcome. Never blocks: if the client has left so much unread that there is no room, this is an error.
    pub(super) fn send_welcome(&self, welcome: &Welcome) -> io::Result<()> {
        let bytes = welcome.as_bytes();
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        match send(self.as_fd().as_raw_fd(), bytes, flags)? {
            n if n == bytes.len() => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::WouldBlock, "the client does not read")),
        }
    }

    /// The transport's name, for the log and the status.
    pub(super) fn transport(&self) -> &'static str {
        match self {
            Control::Local(_) => "local",
            Control::Tcp(_) => "tcp",
        }
    }

    /// Tells the client that its session is over, on behalf of a worker that no longer can.
    pub(super) fn bye(&self, reason: &str) {
        // If the client is gone or does not read, it learns of the end by the closed connection.
        let _ = self.limit(None, Some(Duration::from_secs(1)));
        let _ = send_frame(self.as_fd(), frame::BYE, &[reason.as_bytes()], &[]);
    }

    /// Closes the connection for both sides, which also wakes a thread that reads from it.
    pub(super) fn shut_down(&self) {
        // It may be closed already.
        let _ = shutdown(self.as_fd().as_raw_fd(), Shutdown::Both);
    }
}

/// A refusal: the answer and the reason.
pub(super) struct Refused(pub(super) Answer, pub(super) String);

/// Performs the handshake of a new connection. Calls `heard` when the client has sent its hello or failed to.
pub(super) fn serve(server: &Arc<Server>, connection: &Arc<Control>, peer: &str, heard: impl FnOnce()) {
    let hello = hello(connection);
    heard();
    let hello = match hello {
        Ok(Ok(hello)) => hello,
        Ok(Err(mismatch)) => {
            let reason = mismatch.describe("the client speaks", "this server speaks");
            // Who the client is stands in a part of its hello that another version may have elsewhere.
            refuse(connection, peer, "", "", &Refused(Answer::Version, reason));
            return;
        }
        Err(e) => {
            tracing::info!(peer, "connection closed in its handshake: {e}");
            return;
        }
    };
    let (client, program) = (untext(&hello.client), untext(&hello.program));
    let result = check(connection, &hello).and_then(|()| match hello.purpose {
        purpose::DATA => route_data(server, connection, &hello),
        _ => open_session(server, connection, &hello, peer),
    });
    if let Err(refused) = result {
        refuse(connection, peer, &client, &program, &refused);
    }
}

/// Tells a client why it is refused.
pub(super) fn refuse(connection: &Control, peer: &str, client: &str, program: &str, refused: &Refused) {
    let Refused(answer, reason) = refused;
    tracing::info!(peer, client, program, "refused: {reason}");
    // The client may be gone already.
    let _ = connection.send_welcome(&welcome(*answer, [0; 16], 0, reason));
}

/// Reads a client's hello. The inner error is the refusal to send to the client.
fn hello(connection: &Control) -> io::Result<Result<Hello, Mismatch>> {
    let deadline = Instant::now() + HELLO_WITHIN;
    let mut bytes = [0; size_of::<Hello>()];
    let mut at = 0;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no hello within {} s", HELLO_WITHIN.as_secs()),
            ));
        }
        connection.limit(Some(left), Some(HELLO_WITHIN))?;
        match connection.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) => {}
            Err(e) => return Err(e),
        }
        match greeting(&bytes[..at], &OURS) {
            Ok(None) => {}
            Ok(Some((hello, _))) => return Ok(Ok(hello)),
            Err(BadGreeting::Version(mismatch)) => return Ok(Err(mismatch)),
            Err(BadGreeting::Magic(_)) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak rgpu"));
            }
        }
    }
}

fn check(connection: &Control, hello: &Hello) -> Result<(), Refused> {
    match (connection, hello.purpose) {
        (Control::Tcp(_), purpose::CONTROL | purpose::DATA | purpose::VERBS)
        | (Control::Local(_), purpose::LOCAL) => Ok(()),
        (_, other) => Err(Refused(
            Answer::Invalid,
            format!("purpose {other} is not served over {}", connection.transport()),
        )),
    }
}

/// A welcome or a refusal, as a message.
pub(super) fn welcome(answer: Answer, token: Token, data_connections: u32, reason: &str) -> Welcome {
    Welcome {
        magic: MAGIC,
        version: OURS.version(),
        status: answer as u32,
        fingerprint: OURS.fingerprint(),
        token,
        data_connections,
        ahead: 0,
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
    // The answer is sent first: once the worker has the connection, it may send data on it.
    connection.send_welcome(&welcome(Answer::Ok, hello.token, 0, "")).map_err(failed)?;
    if let Err(e) = worker.send(&ToWorker::Data, &[connection.as_fd()]) {
        tracing::debug!("a data connection came for a worker that is gone: {e}");
    }
    Ok(())
}

/// Who opens a session, as far as the connection itself shows: another machine, or a user of this one.
fn principal(connection: &Control, peer: &str) -> String {
    match connection {
        Control::Tcp(_) => peer.rsplit_once(':').map_or(peer, |(host, _)| host).to_owned(),
        Control::Local(socket) => match getsockopt(socket, PeerCredentials) {
            Ok(credentials) => format!("user {}", credentials.uid()),
            Err(_) => "this machine".into(),
        },
    }
}

/// Puts a client into the queue. It is served at once if a worker is ready.
fn open_session(
    server: &Server,
    connection: &Arc<Control>,
    hello: &Hello,
    peer: &str,
) -> Result<(), Refused> {
    let failed = |what: &str, e: io::Error| Refused(Answer::NoResources, format!("{what}: {e}"));
    let token = random_token().map_err(|e| failed("cannot read random numbers", e))?;
    let (transport, data_connections) = match &**connection {
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
    let kind = if hello.wishes & wish::NVML_ONLY != 0 { Kind::Nvml } else { Kind::Gpu };
    let now = Instant::now();
    join(
        server,
        kind,
        Parked {
            connection: Arc::clone(connection),
            peer: peer.to_owned(),
            client: untext(&hello.client),
            program: untext(&hello.program),
            pid: hello.pid,
            transport,
            data_connections,
            token,
            limits: server.options.share.limits(principal(connection, peer)),
            may_wait: hello.wishes & wish::MAY_WAIT != 0,
            since: now,
            told: None,
            failures: 0,
            unplaced: None,
        },
    )
}
