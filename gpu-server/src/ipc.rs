//! Between the daemon and a worker: JSON messages, one a packet, descriptors alongside, on a socket pair that preserves packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cli::WorkerOptions;
use crate::share::{Reply, Shared, Token};

/// Bytes of a message at most.
const MAX_MESSAGE: usize = 64 * 1024;

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A session that uses devices. Its worker has a context of the first device when the session comes.
    Gpu,
    /// A session that asks NVML's questions only. Its worker makes no context and refuses everything else.
    Nvml,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 2] = [Kind::Gpu, Kind::Nvml];

    /// Its name in the status.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gpu => "gpu",
            Kind::Nvml => "nvml",
        }
    }
}

/// From the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// First message: what to make ready.
    Prepare {
        /// What for.
        kind: Kind,
        /// The daemon's options.
        options: WorkerOptions,
    },
    /// The session to serve, with its connection.
    Session {
        /// What the connection is.
        transport: Transport,
        /// The client's program, for the log.
        program: String,
        /// The client, for the log.
        client: String,
    },
    /// A data connection of the session.
    Data,
    /// The answer to a request about what sessions share, perhaps with a descriptor.
    Reply {
        /// The request's number.
        request: u64,
        /// The answer.
        reply: Reply,
    },
}

/// A session's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A control connection over TCP.
    Tcp {
        /// The channel's reply slots.
        slot_count: u32,
        /// Data connections that will come.
        data_connections: u32,
    },
    /// The control connection of a session over verbs.
    Verbs {
        /// The channel's reply slots.
        slot_count: u32,
    },
    /// A Unix socket.
    Local,
}

/// From a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// Everything is made; a session may come.
    Ready {
        /// `cuda` or `software`.
        backend: String,
        /// Names of the devices.
        devices: Vec<String>,
        /// Bytes free on the device where it has made a context, if it has and knows.
        free: Option<u64>,
    },
    /// It cannot serve.
    Failed {
        /// Why.
        reason: String,
        /// The device has no memory left for its context.
        full: bool,
    },
    /// Shares something with the client's other sessions; answered.
    Share {
        /// Number of the request.
        request: u64,
        /// What; a descriptor may come along.
        what: Shared,
    },
    /// Opens what another session has shared; answered.
    Open {
        /// Number of the request.
        request: u64,
        /// Its token.
        token: Token,
    },
    /// Takes a token back.
    Unshare {
        /// The token.
        token: Token,
    },
    /// Of the running session.
    Counters(Counters),
    /// The session is over; the worker exits.
    Ended {
        /// Why it was lost, if it was.
        lost: Option<String>,
        /// In the end.
        counters: Counters,
    },
}

/// What a session has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Commands executed.
    pub commands: u64,
    /// Bytes of bulk data read from the client.
    pub bytes_in: u64,
    /// Bytes of bulk data written to the client.
    pub bytes_out: u64,
    /// Bytes of bulk data that the worker's CPU copied between the transport's memory and the driver's.
    #[serde(default)]
    pub bytes_copied: u64,
    /// Bytes of device memory held.
    pub device_memory: u64,
}

/// Sends a message.
pub fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    loop {
        match sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        ) {
            Ok(_) => return Ok(()),
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives a message. `Ok(None)`: the other end is closed.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let mut reset = false;
    let (count, fds) = loop {
        let mut slices = [IoSliceMut::new(&mut bytes)];
        match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) => {
                let mut fds = Vec::new();
                for control in message.cmsgs().map_err(io::Error::from)? {
                    if let ControlMessageOwned::ScmRights(received) = control {
                        // SAFETY: the kernel has just installed these descriptors for us; nobody else knows them.
                        fds.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                break (message.bytes, fds);
            }
            Err(nix::Error::EINTR) => {}
            // The peer left something unread. The kernel says so once, before it gives out what the peer had sent.
            Err(nix::Error::ECONNRESET) if !reset => reset = true,
            Err(nix::Error::ECONNRESET) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    };
    if count == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..count])?, fds)))
}

/// A connected pair of sockets for [`send`] and [`receive`].
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_message_arrives_whole_with_its_descriptor() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &ToWorker::Data, &[a.as_fd()]).unwrap();
        send(a.as_fd(), &FromWorker::Failed { reason: "ä".repeat(1000), full: false }, &[]).unwrap();
        let (first, fds) = receive::<ToWorker>(b.as_fd()).unwrap().unwrap();
        assert!(matches!(first, ToWorker::Data) && fds.len() == 1);
        let (second, _) = receive::<FromWorker>(b.as_fd()).unwrap().unwrap();
        assert!(matches!(second, FromWorker::Failed { reason, .. } if reason.chars().count() == 1000));
        drop((a, fds));
        assert!(receive::<ToWorker>(b.as_fd()).unwrap().is_none());
    }

    #[test]
    fn what_was_said_before_leaving_something_unread_arrives() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &ToWorker::Data, &[a.as_fd()]).unwrap();
        send(b.as_fd(), &FromWorker::Failed { reason: "last words".into(), full: false }, &[]).unwrap();
        // Its end is closed with the first message still in it.
        drop(b);
        let (message, _) = receive::<FromWorker>(a.as_fd()).unwrap().unwrap();
        assert!(matches!(message, FromWorker::Failed { reason, .. } if reason == "last words"));
        assert!(receive::<FromWorker>(a.as_fd()).unwrap().is_none());
    }
}
