//! Further attempts to begin a session with a server whose daemon has ended meanwhile: it was upgraded, or
//! has crashed and is started again. Its sessions are then taken over, but not its waiting clients, which
//! connect again and wait at the end of the queue.

use std::io;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollTimeout, poll};

use super::config::SessionConfig;
use super::error::ConnectError;
use super::welcome::Turn;

/// The pause before the second attempt, which doubles with each, and the longest one.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// One client's attempts, and the turn that it waits for in each of them.
pub(super) struct Attempts<'t> {
    turn: &'t mut dyn Turn,
    /// Whether a server has had it wait.
    waited: bool,
    /// What it was told last, which holds until there is something new.
    place: Option<(String, u32)>,
    /// When the server has ended, if nothing was heard of it since.
    ended: Option<Instant>,
    pause: Duration,
}

impl Turn for Attempts<'_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        (self.waited, self.ended) = (true, None);
        self.place = Some((server.to_owned(), ahead));
        self.turn.wait(server, ahead);
    }

    fn still_waits(&mut self) {
        if let Some((server, ahead)) = &self.place {
            self.turn.wait(server, *ahead);
        }
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        self.turn.given_up()
    }
}

impl<'t> Attempts<'t> {
    pub fn new(turn: &'t mut dyn Turn) -> Attempts<'t> {
        let waited = turn.has_waited();
        // A client that waited before may find that the server has ended since.
        let ended = waited.then(Instant::now);
        Attempts { turn, waited, place: None, ended, pause: PAUSE }
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
            | io::ErrorKind::UnexpectedEof => Some(*self.ended.get_or_insert_with(Instant::now)),
            // Nobody listens at its port or socket, or nobody accepts connections there.
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound | io::ErrorKind::TimedOut => {
                self.ended
            }
            _ => None,
        };
        let within = config.again_within[usize::from(self.waited)];
        if ended.is_none_or(|ended| ended.elapsed() >= within) {
            return Ok(false);
        }
        tracing::debug!("the server at {} has ended without an answer; trying again", config.server);
        self.still_waits();
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A client, and how often it was told its place.
    #[derive(Default)]
    struct Client {
        has_waited: bool,
        told: Vec<u32>,
    }

    impl Turn for Client {
        fn wait(&mut self, _server: &str, ahead: u32) {
            self.told.push(ahead);
        }

        fn has_waited(&self) -> bool {
            self.has_waited
        }

        fn given_up(&self) -> Option<PollFd<'_>> {
            None
        }
    }

    fn config() -> SessionConfig {
        let again_within = [Duration::from_secs(600); 2];
        SessionConfig { again_within, ..SessionConfig::new("tcp:127.0.0.1:1".parse().unwrap(), "test") }
    }

    fn again(attempts: &mut Attempts<'_>, config: &SessionConfig, kind: io::ErrorKind) -> bool {
        let error = ConnectError::NoServer { server: "it".into(), source: kind.into() };
        attempts.again(config, &error).unwrap()
    }

    #[test]
    fn a_server_that_ends_is_tried_again_and_one_that_is_not_there_is_not() {
        let (mut client, config) = (Client::default(), config());
        let mut attempts = Attempts::new(&mut client);
        assert!(!again(&mut attempts, &config, io::ErrorKind::ConnectionRefused));
        assert!(!again(&mut attempts, &config, io::ErrorKind::TimedOut));
        assert!(again(&mut attempts, &config, io::ErrorKind::ConnectionReset));
        // It may take a while until it is there again.
        assert!(again(&mut attempts, &config, io::ErrorKind::ConnectionRefused));
        assert!(again(&mut attempts, &config, io::ErrorKind::TimedOut));
        assert!(!again(&mut attempts, &config, io::ErrorKind::PermissionDenied));
        let refused = ConnectError::GivenUp { server: "it".into() };
        assert!(!attempts.again(&config, &refused).unwrap());
        let never = SessionConfig { again_within: [Duration::ZERO; 2], ..config };
        assert!(!again(&mut attempts, &never, io::ErrorKind::ConnectionReset));
    }

    #[test]
    fn who_waited_keeps_its_place_in_view() {
        let (mut client, config) = (Client::default(), config());
        let mut attempts = Attempts::new(&mut client);
        attempts.still_waits();
        attempts.wait("it", 3);
        // Its server answers, so nobody is missing.
        assert!(!again(&mut attempts, &config, io::ErrorKind::ConnectionRefused));
        assert!(again(&mut attempts, &config, io::ErrorKind::UnexpectedEof));
        attempts.still_waits();
        assert_eq!(client.told, [3, 3, 3]);
    }

    #[test]
    fn who_waited_in_another_process_looks_for_the_server() {
        let (mut client, config) = (Client { has_waited: true, ..Client::default() }, config());
        let mut attempts = Attempts::new(&mut client);
        assert!(again(&mut attempts, &config, io::ErrorKind::ConnectionRefused));
        assert!(client.told.is_empty());
    }
}
