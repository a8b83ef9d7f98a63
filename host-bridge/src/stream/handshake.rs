//! TLS handshakes by rustls on a socket, and the keys that come of them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use ring::aead::{AES_128_GCM, AES_256_GCM, CHACHA20_POLY1305};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::crypto::cipher::MessageDecrypter;
use rustls::kernel::KernelConnection;
use rustls::pki_types::ServerName;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{ClientConfig, ConnectionTrafficSecrets, ExtractedSecrets, ServerConfig, SupportedCipherSuite};

use super::records::{HEADER, MAX_BODY, Sealer};

/// Most bytes that a peer may send before its handshake is over.
const MAX_HANDSHAKE: usize = 64 << 10;

/// The keys' source after the handshake, for new keys.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// What a handshake gives: the first record's number and the keys, for each direction.
pub(super) struct Outcome {
    pub(super) keys: Keys,
    pub(super) receive: (u64, Box<dyn MessageDecrypter>),
    pub(super) send: (u64, Sealer),
    /// Records after which new keys are due.
    pub(super) limit: u64,
}

fn failed(e: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

fn suite(suite: SupportedCipherSuite) -> io::Result<&'static rustls::Tls13CipherSuite> {
    suite.tls13().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "TLS 1.3 is required"))
}

fn decrypter(
    of: SupportedCipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> io::Result<Box<dyn MessageDecrypter>> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            Ok(suite(of)?.aead_alg.decrypter(key, iv))
        }
        _ => Err(unknown()),
    }
}

fn sealer(secrets: ConnectionTrafficSecrets) -> io::Result<Sealer> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => Sealer::new(&AES_128_GCM, &key, iv),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => Sealer::new(&AES_256_GCM, &key, iv),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Sealer::new(&CHACHA20_POLY1305, &key, iv),
        _ => Err(unknown()),
    }
}

fn unknown() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "an unknown cipher")
}

impl Keys {
    fn suite(&self) -> SupportedCipherSuite {
        match self {
            Keys::Client(keys) => keys.negotiated_cipher_suite(),
            Keys::Server(keys) => keys.negotiated_cipher_suite(),
        }
    }

    /// The next keys for sending.
    pub(super) fn next_to_send(&mut self) -> io::Result<Sealer> {
        let secrets = match self {
            Keys::Client(keys) => keys.update_tx_secret(),
            Keys::Server(keys) => keys.update_tx_secret(),
        };
        sealer(secrets.map_err(failed)?.1)
    }

    /// The next keys for receiving.
    pub(super) fn next_to_receive(&mut self) -> io::Result<Box<dyn MessageDecrypter>> {
        let secrets = match self {
            Keys::Client(keys) => keys.update_rx_secret(),
            Keys::Server(keys) => keys.update_rx_secret(),
        };
        decrypter(self.suite(), secrets.map_err(failed)?.1)
    }
}

/// The two sides of a handshake, which rustls has as two types.
trait Side: Sized {
    type Data;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
    fn is_handshaking(&self) -> bool;
    /// Whether the next [`process`](Self::process) has something to encode, and looks at nothing that has
    /// come.
    fn wants_write(&self) -> bool;
    fn finish(self) -> Result<(ExtractedSecrets, Keys), rustls::Error>;
}

macro_rules! side {
    ($connection:ident, $data:ident, $keys:ident) => {
        impl Side for $connection {
            type Data = $data;

            fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
                self.process_tls_records(incoming)
            }

            fn is_handshaking(&self) -> bool {
                (**self).is_handshaking()
            }

            fn wants_write(&self) -> bool {
                (**self).wants_write()
            }

            fn finish(self) -> Result<(ExtractedSecrets, Keys), rustls::Error> {
                self.dangerous_into_kernel_connection().map(|(secrets, keys)| (secrets, Keys::$keys(keys)))
            }
        }
    };
}

side!(UnbufferedClientConnection, ClientConnectionData, Client);
side!(UnbufferedServerConnection, ServerConnectionData, Server);

/// Shakes hands as the client. `name` is what the client calls the server, in the clear.
pub(super) fn client(
    socket: BorrowedFd<'_>,
    config: &Arc<ClientConfig>,
    name: ServerName<'static>,
    deadline: Instant,
) -> io::Result<Outcome> {
    let connection = UnbufferedClientConnection::new(Arc::clone(config), name).map_err(failed)?;
    shake(socket, connection, deadline)
}

/// Shakes hands as the server.
pub(super) fn server(
    socket: BorrowedFd<'_>,
    config: &Arc<ServerConfig>,
    deadline: Instant,
) -> io::Result<Outcome> {
    let connection = UnbufferedServerConnection::new(Arc::clone(config)).map_err(failed)?;
    shake(socket, connection, deadline)
}

/// Reads one record at a time, so that nothing behind the handshake is taken from the socket.
fn shake<S: Side>(socket: BorrowedFd<'_>, mut side: S, deadline: Instant) -> io::Result<Outcome> {
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    loop {
        let UnbufferedStatus { discard, state, .. } = side.process(&mut incoming);
        let mut over = false;
        let mut read = false;
        match state {
            Ok(ConnectionState::EncodeTlsData(mut state)) => {
                encode(&mut outgoing, |room| state.encode(room))?
            }
            Ok(ConnectionState::TransmitTlsData(state)) => {
                send_all(socket, &outgoing, deadline)?;
                outgoing.clear();
                state.done();
            }
            Ok(ConnectionState::BlockedHandshake) => read = true,
            Ok(ConnectionState::WriteTraffic(_)) => over = true,
            Ok(state) => {
                let text = format!("{state:?} before the handshake was over");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            Err(e) => {
                let e = failed(e);
                // The peer learns why from the alert that rustls has prepared.
                while side.wants_write()
                    && let UnbufferedStatus { state: Ok(ConnectionState::EncodeTlsData(mut state)), .. } =
                        side.process(&mut [])
                {
                    encode(&mut outgoing, |room| state.encode(room))?;
                }
                let _ = send_all(socket, &outgoing, deadline);
                return Err(e);
            }
        }
        incoming.drain(..discard);
        if over && !side.is_handshaking() {
            break;
        }
        if read || over {
            read_record(socket, &mut incoming, deadline)?;
        }
    }
    if !incoming.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes behind the handshake's last record"));
    }
    let (secrets, keys) = side.finish().map_err(failed)?;
    let limit = suite(keys.suite())?.common.confidentiality_limit;
    let receive = (secrets.rx.0, decrypter(keys.suite(), secrets.rx.1)?);
    let send = (secrets.tx.0, sealer(secrets.tx.1)?);
    Ok(Outcome { keys, receive, send, limit })
}

fn encode(
    outgoing: &mut Vec<u8>,
    mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
) -> io::Result<()> {
    let at = outgoing.len();
    let mut room = MAX_BODY + HEADER;
    loop {
        outgoing.resize(at + room, 0);
        match encode(&mut outgoing[at..]) {
            Ok(n) => {
                outgoing.truncate(at + n);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(needed)) => room = needed.required_size,
            Err(e) => return Err(io::Error::other(e)),
        }
    }
}

fn wait(socket: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake was not over in time"));
    }
    let limit = left.min(Duration::from_secs(60)).as_millis().max(1);
    match poll(&mut [PollFd::new(socket, events)], PollTimeout::from(limit as u16)) {
        Ok(_) | Err(nix::Error::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn send_all(socket: BorrowedFd<'_>, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match send(socket.as_raw_fd(), &bytes[at..], MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT) {
            Ok(n) => at += n,
            Err(nix::Error::EAGAIN) => wait(socket.as_fd(), PollFlags::POLLOUT, deadline)?,
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn read_exact(socket: BorrowedFd<'_>, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < buffer.len() {
        match recv(socket.as_raw_fd(), &mut buffer[at..], MsgFlags::MSG_DONTWAIT) {
            Ok(0) => {
                let text = "the peer closed the connection during the TLS handshake";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
            Ok(n) => at += n,
            Err(nix::Error::EAGAIN) => wait(socket.as_fd(), PollFlags::POLLIN, deadline)?,
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn read_record(socket: BorrowedFd<'_>, incoming: &mut Vec<u8>, deadline: Instant) -> io::Result<()> {
    let mut header = [0; HEADER];
    read_exact(socket, &mut header, deadline)?;
    let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
    // The first byte of a record of TLS: 20 to 23.
    if !(20..=23).contains(&header[0]) || header[1] != 3 {
        let text = "the peer does not speak TLS: it was started with --insecure, or is something else. Start it without --insecure; \
            or use --insecure on both sides, if nobody else can read or change what is sent";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    if len > MAX_BODY || incoming.len() + HEADER + len > MAX_HANDSHAKE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a handshake that is too long"));
    }
    incoming.extend_from_slice(&header);
    let at = incoming.len();
    incoming.resize(at + len, 0);
    read_exact(socket, &mut incoming[at..], deadline)
}
