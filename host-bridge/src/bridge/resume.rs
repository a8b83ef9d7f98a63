//! New connections for a session that has lost its own. What they are is the transport's matter.
//!
//! ```text
//!   relay ── Ticket::resume ──▶ a thread: dials, greets and tells what has come ([`Attempt`]), again and again
//!     │  ◀── Resumption::outcome ── new connections, or the server's refusal
//!     └── Interruption: how long it has lasted; tells the client
//! ```
//!
//! A server keeps a session whose connections are merely closed, so [`end`] makes sure that it learns of the
//! end.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use identity::{Fingerprint, Secret};
use nix::sys::eventfd::EventFd;
use protocol::device::Answer;
use protocol::link::{COMPRESSED_SINCE, Hello, frame, purpose, wish};
use rustls::ClientConfig;
use zerocopy::{FromBytes, IntoBytes};

use super::config::SessionConfig;
use super::connect::{Daemon, Greeted, is_protected, protect_session, session_trust};
use super::error::ConnectError;
use super::relay::{CacheUse, EndReason, Mailbox, Wakeups};
use super::socket::{Socket, not_now};
use super::state::{SessionState, thread_name};
use super::welcome::{Handshake, welcome_at_once};
use crate::compression::CompressUse;
use crate::framing::{FrameReader, resumed_body, resumed_counts, with_causes};
use crate::stream::Stream;

/// An interruption that lasts longer is told to the client.
const TELL_AFTER: Duration = Duration::from_secs(5);
/// Pauses between two attempts: the first one, and the longest, to which they double.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(300));
/// The least time that a connection may take to come about. One that takes longer may hang on a packet that
/// is repeated only after seconds, so it is tried again instead.
const DIAL_WITHIN: Duration = Duration::from_millis(500);
/// How long the server's answers may take: the first time, and at most. Doubled each time that they did not
/// come.
const ANSWER_WITHIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));

/// How often the daemon is listened to while a session is interrupted: its last words come without an event.
const LISTEN_EVERY: Duration = Duration::from_millis(200);

/// How long a server may take to answer the farewell before it is told in another way.
const FAREWELL_WITHIN: Duration = Duration::from_secs(2);
/// The longest pause between two attempts to tell it.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// What it takes to resume a session.
#[derive(Debug, Clone)]
pub(super) struct Ticket {
    /// A hello of the session's client.
    hello: Hello,
    token: [u8; 16],
    secret: Secret,
    grace: Duration,
    /// How long it took to connect the first time.
    pub(super) dialed_in: Duration,
    /// The key of the session's connections under TLS, and what trusts it, once that is known.
    key: Fingerprint,
    tls: Arc<OnceLock<Option<Arc<ClientConfig>>>>,
    /// Bytes of data that the server takes without a grant.
    pub(super) eager: u64,
    /// The server keeps what it is sent.
    pub(super) has_cache: bool,
    /// When data to the server is compressed, as far as it understands that.
    pub(super) compress: CompressUse,
}

/// An attempt to resume, repeated until it succeeds. It is given up when this is dropped.
pub(super) struct Resumption<T> {
    outcome: Receiver<Result<T, String>>,
    given_up: Arc<AtomicBool>,
    last_failure: Arc<Mutex<String>>,
}

impl<T> Drop for Resumption<T> {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Release);
    }
}

impl<T> Resumption<T> {
    /// New connections, or why the session cannot be resumed. `None`: neither is there yet. The thread rings
    /// the mailbox when it is.
    fn outcome(&mut self) -> Option<Result<T, String>> {
        match self.outcome.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("the thread that resumes it panicked".into())),
        }
    }

    /// Why the last attempt failed. Empty: none has.
    fn last_failure(&self) -> String {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for new connections, doing `turn` each time that something happens. The error: the session is
    /// over.
    pub(super) fn wait(
        mut self,
        lost: &Interruption,
        wakeups: &mut Wakeups,
        mut daemon: Option<&mut Daemon>,
        mut turn: impl FnMut() -> Result<(), EndReason>,
    ) -> Result<T, EndReason> {
        loop {
            turn()?;
            match self.outcome() {
                Some(Ok(resumed)) => return Ok(resumed),
                Some(Err(refusal)) => return Err(EndReason::Gone(lost.ended(&refusal))),
                None => {}
            }
            if let Some(words) = daemon.as_mut().and_then(|daemon| daemon.last_words()) {
                return Err(EndReason::Bye(words));
            }
            let left = lost.look();
            let left =
                left.map_err(|seconds| EndReason::Gone(lost.too_long(seconds, &self.last_failure())))?;
            let timeout = if daemon.is_some() { left.min(LISTEN_EVERY) } else { left };
            lost.session.counters.sleeps.add(1);
            wakeups.wait(&lost.session, Some(timeout), |_, _| Ok(()))?;
        }
    }
}

/// Why an attempt failed.
pub(super) enum Failure {
    /// The server does not know the session, or does not want it.
    Refused(String),
    /// It may succeed later.
    Later { why: String, answered_late: bool },
}

impl From<ConnectError> for Failure {
    fn from(e: ConnectError) -> Failure {
        match e {
            ConnectError::Refused { answer: Answer::NoResources, reason, .. } => {
                Failure::Later { why: reason, answered_late: false }
            }
            ConnectError::Refused { reason, .. } => Failure::Refused(reason),
            ConnectError::Version { .. } | ConnectError::Protocol { .. } => Failure::Refused(e.to_string()),
            e => Failure::Later { why: with_causes(&e), answered_late: true },
        }
    }
}

impl Failure {
    /// The server's answer has not come, or is broken.
    pub(super) fn later(e: &dyn std::error::Error) -> Failure {
        Failure::Later { why: with_causes(e), answered_late: true }
    }

    /// A frame of the server's that is not the one that was expected.
    pub(super) fn unexpected(kind: Option<u32>, body: &[u8]) -> Failure {
        match kind {
            None => Failure::Later { why: "it closed the connection".into(), answered_late: false },
            Some(frame::BYE) => Failure::Refused(String::from_utf8_lossy(body).into_owned()),
            Some(kind) => {
                let bytes = body.len();
                Failure::Refused(format!("it answered with a frame of kind {kind}, {bytes} bytes"))
            }
        }
    }
}

/// What a transport does to resume a session. Dropped when it has succeeded or was given up.
pub(super) trait Attempt: Send + 'static {
    /// The session's new connections.
    type Resumed: Send + 'static;

    /// Tries once. A server takes an attempt only if its number is higher than those of all before. Its
    /// answers may take `patience`.
    fn once(&self, attempt: u32, patience: Duration) -> Result<Self::Resumed, Failure>;
}

impl Ticket {
    /// For a session whose server was greeted with `hello`.
    pub(super) fn new(
        hello: Hello,
        greeted: &Greeted,
        handshake: &Handshake,
        config: &SessionConfig,
    ) -> Ticket {
        let Handshake { version, token, secret, grace, eager, has_cache, session_key: key, .. } = *handshake;
        let dialed_in = greeted.dialed_in;
        let compress = config.compress.over(version >= COMPRESSED_SINCE, greeted.session.is_some());
        let tls = Arc::new(OnceLock::from(greeted.session.clone()));
        Ticket { hello, token, secret, grace, eager, has_cache, compress, dialed_in, key, tls }
    }

    /// For a session of which another process has left this. `compresses`: the server understands compressed
    /// data. The client's credentials are read when it dials: they may be unreadable for a moment.
    pub(super) fn restored(
        Farewell { hello, key, grace }: Farewell,
        config: &SessionConfig,
        eager: u64,
        dialed_in: Duration,
        (has_cache, compresses): (bool, bool),
    ) -> Ticket {
        let (token, secret, tls) = (hello.token, Secret(hello.secret), Arc::default());
        let compress = config.compress.over(compresses, is_protected(config, key));
        Ticket { hello, token, secret, grace, eager, has_cache, compress, dialed_in, key, tls }
    }

    /// What the session's connections trust, under TLS.
    fn trust(&self, config: &SessionConfig) -> Result<Option<&Arc<ClientConfig>>, ConnectError> {
        if let Some(tls) = self.tls.get() {
            return Ok(tls.as_ref());
        }
        let tls = session_trust(config, self.key)?;
        Ok(self.tls.get_or_init(|| tls).as_ref())
    }

    /// Whether the server keeps the session when its connections are lost.
    pub(super) fn survives(&self) -> bool {
        !self.grace.is_zero()
    }

    /// Whether the server may compress data of the session on its way here.
    pub(super) fn takes_compressed(&self) -> bool {
        self.hello.wishes & wish::COMPRESSED != 0
    }

    /// Whether the session asks what the server has.
    pub(super) fn cache(&self, config: &SessionConfig) -> CacheUse {
        if self.has_cache { config.cache } else { CacheUse::Never }
    }

    pub(super) fn hello(&self, purpose: u32, attempt: u32, index: u32) -> Hello {
        let Ticket { token, secret: Secret(secret), .. } = *self;
        Hello { purpose, token, secret, attempt, index, ..self.hello }
    }

    /// Opens a connection of the session, protected as its first ones were, and says `hello` on it.
    pub(super) fn dial(
        &self,
        config: &SessionConfig,
        hello: &Hello,
        patience: Duration,
    ) -> Result<(Stream, Instant), Failure> {
        let later = |e: io::Error| Failure::later(&e);
        let tls = self.trust(config);
        let tls = tls.map_err(|e| Failure::Later { why: with_causes(&e), answered_late: false })?;
        let limit = DIAL_WITHIN.max(4 * self.dialed_in).min(config.connect_timeout);
        let socket = config.dial(limit);
        let socket = socket.map_err(|e| Failure::Later { why: e.to_string(), answered_late: false })?;
        let deadline = Instant::now() + patience;
        let connection = protect_session(config, socket, tls, &self.token, deadline);
        let connection = connection.map_err(later)?;
        connection.write_all(hello.as_bytes()).map_err(later)?;
        Ok((connection, deadline))
    }

    /// Begins attempt number `attempt`: its control connection, on which the server was told and has told how
    /// much has come of each stream. It is welcome, and its time limit stands.
    pub(super) fn greet(
        &self,
        config: &SessionConfig,
        attempt: u32,
        received: &[u64],
        along: impl FnOnce(&Stream) -> io::Result<()>,
        patience: Duration,
    ) -> Result<(Stream, Vec<u64>), Failure> {
        let later = |e: io::Error| Failure::later(&e);
        let (control, deadline) = self.dial(config, &self.hello(purpose::RESUME, attempt, 0), patience)?;
        control.send_frame(frame::RESUMED, &[&resumed_body(received)]).map_err(later)?;
        along(&control).map_err(later)?;
        welcome_at_once(config, &control, deadline)?;
        let mut body = Vec::new();
        let kind = control.recv_frame_until(&mut body, deadline).map_err(later)?;
        let counts = resumed_counts(&body, received.len()).filter(|_| kind == Some(frame::RESUMED));
        counts.map(|counts| (control, counts)).ok_or_else(|| Failure::unexpected(kind, &body))
    }

    /// For telling the server that the session has ended.
    pub(super) fn farewell(&self) -> Farewell {
        Farewell { hello: self.hello(purpose::END, 0, 0), key: self.key, grace: self.grace }
    }

    /// How long the session may be interrupted: as long as the server keeps it and its client waits.
    pub(super) fn limit(&self, session: &SessionState) -> Duration {
        match session.channel.lost_after {
            0 => self.grace,
            seconds => self.grace.min(Duration::from_secs(seconds.into())),
        }
    }
}

/// The numbers of a session's attempts to resume. Each is higher than all before, also while one that was
/// given up is still under way: what it has said may reach the server late.
#[derive(Debug, Clone)]
pub(super) struct Numbers(Arc<AtomicU32>);

impl Numbers {
    /// For the process that comes after so many others: higher than any that they have used.
    pub(super) fn of_process(generation: u64) -> Result<Numbers, EndReason> {
        const OF_A_PROCESS: u32 = 1 << 20;
        let first = u32::try_from(generation)
            .ok()
            .and_then(|number| number.checked_mul(OF_A_PROCESS)?.checked_add(1))
            .ok_or_else(|| EndReason::Here(format!("{generation} processes have served the program before")));
        Ok(Numbers(Arc::new(AtomicU32::new(first?))))
    }

    fn next(&self) -> u32 {
        self.0.fetch_add(1, Ordering::AcqRel)
    }
}

impl Default for Numbers {
    /// For a session's first process.
    fn default() -> Numbers {
        Numbers(Arc::new(AtomicU32::new(1)))
    }
}

/// Why a session begins without a link that another process had.
pub(super) const PROCESS_ENDED: &str = "the process of this host that carried the session has ended";

/// Why a session that is to pause ends instead.
pub(super) const CANNOT_PAUSE: &str =
    "the guest was stopped, and the server keeps no session without connections (--grace-seconds 0)";

/// Starts a thread that resumes a session, with attempts of the next `numbers`. `failed`: connections of an
/// earlier one were of no use, for this reason.
pub(super) fn resume<M, A: Attempt>(
    session: &SessionState,
    mailbox: &Mailbox<M>,
    numbers: &Numbers,
    failed: Option<String>,
    attempt: A,
) -> Result<Resumption<A::Resumed>, EndReason> {
    let pause = if failed.is_some() { PAUSES.1 } else { Duration::ZERO };
    let given_up = Arc::new(AtomicBool::new(false));
    let last_failure = Arc::new(Mutex::new(failed.unwrap_or_default()));
    let (sender, outcome) = channel();
    let attempts = Attempts {
        attempt,
        numbers: numbers.clone(),
        server: session.server.clone(),
        given_up: Arc::clone(&given_up),
        last_failure: Arc::clone(&last_failure),
        wake: Arc::clone(mailbox.wake()),
    };
    let run = move || {
        std::thread::sleep(pause);
        attempts.run(&sender);
    };
    let thread = std::thread::Builder::new().name(thread_name("resume")).spawn(run);
    thread.map_err(|e| EndReason::Here(e.to_string()))?;
    Ok(Resumption { outcome, given_up, last_failure })
}

/// Makes sure that the server knows that the session has ended: it keeps one whose connections are merely
/// closed. `control`: the connection on which the farewell went, if it went completely, and what was read of
/// it. Does not block.
pub(super) fn end(ticket: &Ticket, config: &SessionConfig, control: Option<(Arc<Socket>, FrameReader)>) {
    let farewell = ticket.farewell();
    farewell.say_unless(config, move || {
        control
            .is_some_and(|(control, mut reader)| is_answered_within(&control, &mut reader, FAREWELL_WITHIN))
    });
}

/// A session that the server has and that may not begin. Dropped, it has the server told that it has ended.
#[derive(Debug)]
pub(super) struct Unbegun {
    farewell: Option<Farewell>,
    config: SessionConfig,
}

impl Unbegun {
    pub(super) fn new(ticket: &Ticket, config: &SessionConfig) -> Unbegun {
        Unbegun { farewell: Some(ticket.farewell()), config: config.clone() }
    }

    /// The session has begun.
    pub(super) fn begun(mut self) {
        self.farewell = None;
    }
}

impl Drop for Unbegun {
    fn drop(&mut self) {
        if let Some(farewell) = self.farewell.take() {
            farewell.say(&self.config);
        }
    }
}

/// What it takes to tell a server that a session has ended, also from another process than the one that had
/// it.
#[derive(Clone, Copy)]
pub(super) struct Farewell {
    hello: Hello,
    /// The key of the session's connections under TLS; otherwise zero.
    key: Fingerprint,
    grace: Duration,
}

impl std::fmt::Debug for Farewell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Farewell")
    }
}

impl Farewell {
    /// For another process: it holds the session's secret.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.grace.as_secs().to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.key.0);
        bytes.extend_from_slice(self.hello.as_bytes());
        bytes
    }

    /// What [`to_bytes`](Self::to_bytes) has given.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Farewell> {
        let (seconds, hello) = bytes.split_first_chunk()?;
        let (key, hello) = hello.split_first_chunk()?;
        let hello = Hello::read_from_bytes(hello).ok()?;
        Some(Farewell {
            hello,
            key: Fingerprint(*key),
            grace: Duration::from_secs(u64::from_le_bytes(*seconds)),
        })
    }

    /// Tells the server, for as long as it would keep the session. Does not block.
    pub(super) fn say(self, config: &SessionConfig) {
        self.say_unless(config, || false);
    }

    /// Does the same unless the server knows already, which `knows` may find out in the thread that would
    /// tell it.
    fn say_unless(self, config: &SessionConfig, knows: impl FnOnce() -> bool + Send + 'static) {
        let Farewell { hello, key, grace } = self;
        if grace.is_zero() {
            return;
        }
        let config = config.clone();
        let server = config.server.to_string();
        let saying = Saying::begin();
        let ending = std::thread::Builder::new().name(thread_name("farewell")).spawn(move || {
            let _saying = saying;
            if knows() {
                return;
            }
            let begun = Instant::now();
            let mut pause = PAUSES.0;
            while begun.elapsed() < grace {
                let ended = config.dial(config.connect_timeout).and_then(|fd| {
                    let tls = session_trust(&config, key).map_err(io::Error::other)?;
                    let deadline = Instant::now() + ANSWER_WITHIN.1;
                    let connection = protect_session(&config, fd, tls.as_ref(), &hello.token, deadline)?;
                    connection.write_all(hello.as_bytes())?;
                    match welcome_at_once(&config, &connection, deadline) {
                        Err(ConnectError::NoServer { source, .. }) => Err(source),
                        Err(ConnectError::Refused { answer: Answer::NoResources, reason, .. }) => {
                            Err(io::Error::other(reason))
                        }
                        // It has ended, or is not known any more.
                        _ => Ok(()),
                    }
                });
                if ended.is_ok() {
                    return;
                }
                std::thread::sleep(pause);
                pause = (2 * pause).min(LAST_PAUSE);
            }
        });
        if let Err(e) = ending {
            tracing::warn!(
                server,
                "the server may keep a session that has ended for {} s: {e}",
                grace.as_secs()
            );
        }
    }
}

/// A farewell that is being said, by a thread that this process must not end before.
struct Saying;

/// How many there are.
static SAYING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl Saying {
    fn begin() -> Saying {
        *SAYING.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Saying
    }
}

impl Drop for Saying {
    fn drop(&mut self) {
        *SAYING.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        SAYING.1.notify_all();
    }
}

/// Waits up to `patience` until all servers know which sessions have ended. For a process that ends: a server
/// that was not told keeps a session for its grace period.
pub fn finish_farewells(patience: Duration) {
    let saying = SAYING.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(SAYING.1.wait_timeout_while(saying, patience, |saying| *saying > 0));
}

/// Whether the server answers the farewell in time. What else it says is thrown away. (That the connection
/// closes says nothing: others than the server can do that.)
fn is_answered_within(control: &Socket, reader: &mut FrameReader, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        match reader.next_frame() {
            Ok(Some((frame::BYE, _))) => return true,
            Ok(Some(_)) => continue,
            Ok(None) => {}
            Err(_) => return false,
        }
        match not_now(reader.fill(&mut &*control)) {
            Ok(Some(1..)) => {}
            Ok(None) if control.wait(true).is_ok() => {}
            _ => return false,
        }
    }
    false
}

/// What the thread works with.
struct Attempts<A> {
    attempt: A,
    numbers: Numbers,
    server: String,
    given_up: Arc<AtomicBool>,
    last_failure: Arc<Mutex<String>>,
    wake: Arc<EventFd>,
}

impl<A: Attempt> Attempts<A> {
    fn run(&self, outcome: &Sender<Result<A::Resumed, String>>) {
        let (mut pause, mut patience) = (PAUSES.0, ANSWER_WITHIN.0);
        loop {
            // In this order: a thread whose number is behind one of another resumption sees that it was given
            // up.
            let attempt = self.numbers.next();
            if self.given_up.load(Ordering::Acquire) {
                break;
            }
            match self.attempt.once(attempt, patience) {
                Ok(resumed) => {
                    // The relay may have ended meanwhile; then the connections close, and the server keeps
                    // the session for its grace period.
                    let _ = outcome.send(Ok(resumed));
                    break;
                }
                Err(Failure::Refused(why)) => {
                    let _ = outcome.send(Err(why));
                    break;
                }
                Err(Failure::Later { why, answered_late }) => {
                    tracing::debug!(server = self.server, attempt, "cannot resume yet: {why}");
                    *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = why;
                    if answered_late {
                        patience = (2 * patience).min(ANSWER_WITHIN.1);
                    }
                }
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES.1);
        }
        // A full counter means that it is raised already.
        let _ = self.wake.write(1);
    }
}

/// A time without a link. The client is told while it lasts.
pub(super) struct Interruption {
    session: Arc<SessionState>,
    why: String,
    begun: Instant,
    limit: Duration,
}

impl Interruption {
    pub(super) fn begin(session: Arc<SessionState>, why: String, limit: Duration) -> Interruption {
        tracing::info!(
            server = %session.server, program = %session.channel.program, pid = session.channel.pid, "link lost: resuming the session"
        );
        Interruption { session, why, begun: Instant::now(), limit }
    }

    fn since(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Tells the client when it is time. Gives the time until something is to be done; the error is the
    /// number of seconds after which it is over.
    pub(super) fn look(&self) -> Result<Duration, u64> {
        let since = self.since();
        if since >= self.limit {
            return Err(since.as_secs());
        }
        let left = self.limit - since;
        if since < TELL_AFTER {
            return Ok(left.min(TELL_AFTER - since));
        }
        self.session.header().set_interrupted(true);
        Ok(left)
    }

    /// Tells the client that its session continues. (Whoever ends a session tells the client of a loss.)
    pub(super) fn end(self) {
        self.session.header().set_interrupted(false);
        self.session.counters.resumed.add(1);
        tracing::info!(
            server = %self.session.server, program = %self.session.channel.program, pid = self.session.channel.pid,
            seconds = self.since().as_secs_f32(), "link restored: the session continues"
        );
    }

    /// The words for a session that the server does not resume.
    fn ended(&self, refusal: &str) -> String {
        format!("{}; it cannot be resumed: {refusal}", self.why)
    }

    /// The words for an interruption that lasted too long.
    fn too_long(&self, seconds: u64, last: &str) -> String {
        let last = match last {
            "" => String::new(),
            last => format!(" (last attempt: {last})"),
        };
        format!("{}; it did not come back within {seconds} s{last}", self.why)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use identity::servers::{Credentials, CredentialsError, Source};
    use identity::{Identity, tls};

    use super::*;
    use crate::bridge::config::Security;
    use crate::framing::Address;

    /// Credentials that cannot be read at first.
    #[derive(Debug)]
    struct Late(AtomicBool, Identity);

    impl Source for Late {
        fn credentials(&self, _address: &str) -> Result<Credentials, CredentialsError> {
            if !self.0.swap(true, Ordering::SeqCst) {
                return Err(CredentialsError::Remote("they are being replaced".into()));
            }
            Credentials::pinning(self.1.clone(), Fingerprint([1; 32]))
        }
    }

    #[test]
    fn a_session_whose_credentials_cannot_be_read_now_is_resumed_later() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let (worker, client) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let from = client.fingerprint();
        let security = Security::Tls(Arc::new(Late(AtomicBool::new(false), client)));
        let config = SessionConfig { security, ..SessionConfig::new(address, "") };
        let hello = crate::bridge::connect::without_session(purpose::CONTROL, "test");
        let farewell = Farewell { hello, key: worker.fingerprint(), grace: Duration::from_secs(60) };
        let ticket = Ticket::restored(farewell, &config, 0, Duration::from_secs(60), (false, false));
        let dial = || {
            let hello = ticket.hello(purpose::RESUME, 1, 0);
            ticket.dial(&config, &hello, Duration::from_secs(60)).map(|(connection, _)| connection)
        };
        let Err(Failure::Later { why, .. }) = dial() else { panic!("it is not tried again") };
        assert!(why.contains("they are being replaced"), "{why}");
        let server = std::thread::spawn(move || {
            let config = tls::server_pinning(&worker, from).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            let stream = Stream::tls_server(listener.accept().unwrap().0.into(), &config, deadline).unwrap();
            let mut hello = [0; size_of::<Hello>()];
            stream.read_exact(&mut hello).unwrap();
            Hello::read_from_bytes(&hello).unwrap().purpose
        });
        assert!(dial().is_ok());
        assert_eq!(server.join().unwrap(), purpose::RESUME);
    }

    /// Reports the number of each attempt, which then waits for the test to say whether it succeeds.
    struct Noted(Sender<u32>, Mutex<Receiver<bool>>);

    impl Attempt for Noted {
        type Resumed = u32;

        fn once(&self, attempt: u32, _patience: Duration) -> Result<u32, Failure> {
            self.0.send(attempt).unwrap();
            let later = Failure::Later { why: String::new(), answered_late: false };
            let stands = self.1.lock().unwrap().recv().unwrap();
            if stands { Ok(attempt) } else { Err(later) }
        }
    }

    #[test]
    fn an_attempt_that_was_given_up_has_a_lower_number_than_all_that_follow() {
        let numbers = Numbers::of_process(1).unwrap();
        let begin = || {
            let (noted, all) = mpsc::channel();
            let (end, ends) = mpsc::channel();
            let given_up = Arc::new(AtomicBool::new(false));
            let attempts = Attempts {
                attempt: Noted(noted, Mutex::new(ends)),
                numbers: numbers.clone(),
                server: String::new(),
                given_up: Arc::clone(&given_up),
                last_failure: Arc::default(),
                wake: Arc::new(EventFd::new().unwrap()),
            };
            let (sender, outcome) = mpsc::channel();
            let thread = std::thread::spawn(move || attempts.run(&sender));
            (all, end, given_up, outcome, thread)
        };
        let (first, end_first, given_up, _outcome, thread) = begin();
        assert_eq!(first.recv(), Ok((1 << 20) + 1));
        end_first.send(false).unwrap();
        assert_eq!(first.recv(), Ok((1 << 20) + 2));
        // The guest is stopped, and runs again, while that one is under way.
        given_up.store(true, Ordering::Release);
        let (second, end_second, _, outcome, other) = begin();
        assert_eq!(second.recv(), Ok((1 << 20) + 3));
        end_first.send(false).unwrap();
        thread.join().unwrap();
        assert!(first.recv().is_err(), "it goes on");
        end_second.send(true).unwrap();
        assert_eq!(outcome.recv().unwrap(), Ok((1 << 20) + 3));
        other.join().unwrap();
    }
}
