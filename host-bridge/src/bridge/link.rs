//! The connection that carries a session, as an operator wants to know it: whether it stands, and how long
//! the way to the server is.
//!
//! Nothing is measured here: the kernel knows the round-trip time of every TCP connection, and is asked when
//! somebody wants to know.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::framing::round_trip;

/// A connection, as the carrier has it.
type Connection = dyn AsFd + Send + Sync;

/// What is known of a session's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// It stands. `None`: the transport does not tell how long the way is.
    Up(Option<Duration>),
    /// It was lost, and the session waits for another.
    Lost,
}

enum Held {
    Unmeasured,
    /// Not kept open from here: the carrier closes it.
    Measured(Weak<Connection>),
    Lost,
}

/// A session's connection.
pub(super) struct Link(Mutex<Held>);

impl Default for Link {
    fn default() -> Link {
        Link(Mutex::new(Held::Unmeasured))
    }
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A TCP connection carries the session from now on.
    pub(super) fn stands<T: AsFd + Send + Sync + 'static>(&self, connection: &Arc<T>) {
        let connection: Weak<T> = Arc::downgrade(connection);
        *self.lock() = Held::Measured(connection);
    }

    /// It stands again, and nobody knows how long the way is.
    pub(super) fn stands_unmeasured(&self) {
        *self.lock() = Held::Unmeasured;
    }

    /// It was lost.
    pub(super) fn lost(&self) {
        *self.lock() = Held::Lost;
    }

    /// What is known of it now.
    pub(super) fn state(&self) -> LinkState {
        match &*self.lock() {
            Held::Unmeasured => LinkState::Up(None),
            Held::Measured(connection) => {
                LinkState::Up(connection.upgrade().and_then(|connection| round_trip(connection.as_fd())))
            }
            Held::Lost => LinkState::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_kernel_tells_a_tcp_connections_round_trip_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        let link = Link::default();
        assert_eq!(link.state(), LinkState::Up(None));
        let near = Arc::new(near);
        link.stands(&near);
        assert!(matches!(link.state(), LinkState::Up(Some(time)) if time < Duration::from_secs(60)));
        link.lost();
        assert_eq!(link.state(), LinkState::Lost);
        link.stands_unmeasured();
        assert_eq!(link.state(), LinkState::Up(None));
        link.stands(&near);
        drop(near);
        assert_eq!(link.state(), LinkState::Up(None), "the carrier has closed it");
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "nothing kept it open");
    }

    #[test]
    fn a_socket_of_this_host_has_no_such_time() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(round_trip(one.as_fd()), None);
    }
}
