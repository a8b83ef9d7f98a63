//! Further attempts to begin a session with a server whose daemon has ended meanwhile: it was upgraded, or
//! has crashed and is started again. Its sessions are then taken over, but not its waiting clients, which
//! connect again and wait at the end of the queue.

use std::io;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollTimeout, poll};

use super::config::SessionConfig;
use super::error::ConnectError;
use super::welcome::Turn;

/// How long attempts go on after a server has closed a connection without a word.
const SILENT_WITHIN: Duration = Duration::from_secs(3);
/// The same for a server that had this session wait in its queue.
const WAITING_WITHIN: Duration = Duration::from_secs(30);
/// The pause before the second attempt, which doubles with each, and the longest one.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// One client's attempts, and the turn that it waits for in each of them.
pub(super) struct Attempts<'t> {
    turn: &'t mut dyn Turn,
    /// Whether the server has had it wait.
    waited: bool,
    /// When the server has ended, if nothing was heard of it since.
    ended: Option<Instant>,
    pause: Duration,
}

impl Turn for Attempts<'_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        (self.waited, self.ended, self.pause) = (true, None, PAUSE);
        self.turn.wait(server, ahead);
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        self.turn.given_up()
    }
}

impl<'t> Attempts<'t> {
    pub fn new(turn: &'t mut dyn Turn) -> Attempts<'t> {
        Attempts { turn, waited: false, ended: None, pause: PAUSE }
    }

    /// Whether there should be another attempt after this error. If so, this has waited a moment.
    ///
    /// # Errors
    /// [`ConnectError::GivenUp`], if nobody wants the session any more.
    pub fn again(&mut self, config: &SessionConfig, error: &ConnectError) -> Result<bool, ConnectError> {
        let ConnectError::NoServer { source, .. } = error else { return Ok(false) };
        let ended = match source.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => *self.ended.get_or_insert_with(Instant::now),
            // Nobody listens at its port, or socket.
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => match self.ended {
                Some(ended) => ended,
                None => return Ok(false),
            },
            _ => return Ok(false),
        };
        if ended.elapsed() >= if self.waited { WAITING_WITHIN } else { SILENT_WITHIN } {
            return Ok(false);
        }
        tracing::debug!("the server at {} has ended without an answer; trying again", config.server);
        let mut watched = Vec::from_iter(self.turn.given_up());
        let time = PollTimeout::from(u16::try_from(self.pause.as_millis()).unwrap_or(u16::MAX));
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        match poll(&mut watched, time) {
            Ok(0) | Err(nix::Error::EINTR) => Ok(true),
            Ok(_) => Err(ConnectError::GivenUp { server: config.server.to_string() }),
            Err(e) => Err(ConnectError::Here { source: e.into() }),
        }
    }
}
