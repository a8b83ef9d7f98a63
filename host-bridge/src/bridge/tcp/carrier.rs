//! The sockets of a session, as its relay uses them.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{ACKNOWLEDGE_CONTROL, Received, frame};
use zerocopy::IntoBytes;

use super::connection::{Budget, DataConnection};
use super::io_thread::{Alarm, IoThread};
use super::links::{Links, MAX_DATA_CONNECTIONS};
use super::memory::{SocketMemory, hash};
use super::redial::Redial;
use crate::bridge::config::SessionConfig;
use crate::bridge::connect::{Daemon, Opening, Unwelcomed};
use crate::bridge::relay::{
    CacheUse, Carrier, EndReason, Flows, Mailbox, RestoredLane, Room, ToHash, Wakeups,
};
use crate::bridge::resume::{self, Interruption, Numbers, Ticket};
use crate::bridge::socket::{Gather, Socket, not_now};
use crate::bridge::state::{SessionState, thread_name};
use crate::compression::CompressUse;
use crate::framing::{SendBuffer, with_causes};
use crate::stream::Stream;

/// The control connection's number among the descriptors that are watched; the data connections come behind
/// it, and behind them what tells that they stand.
const CONTROL: usize = 0;
const FIRST_DATA: usize = 1;
const OPENED: usize = FIRST_DATA + MAX_DATA_CONNECTIONS as usize;

type Machine<'c> = crate::bridge::relay::Machine<'c, Flows<SocketMemory>>;

/// A session's connections.
pub(super) struct TcpCarrier {
    session: Arc<SessionState>,
    config: SessionConfig,
    ticket: Ticket,
    numbers: Numbers,
    control: Arc<Socket>,
    /// The worker's welcome on it has not come.
    unwelcomed: Option<Unwelcomed>,
    /// Under TLS, where the daemon may say more than the control connection did.
    daemon: Option<Daemon>,
    out: SendBuffer,
    /// Bytes of the control stream that the server was told of.
    told: u64,
    /// The session has begun, and its data connections do not stand yet: those in `data` are closed until
    /// then.
    opening: Option<Opening>,
    data: Vec<DataConnection>,
    /// The data connection that has its turn, as long as nothing is known of the link.
    next: usize,
    /// Where compressed bytes lie, for each data connection. Empty: nothing is compressed.
    rooms: Vec<Arc<Room>>,
    /// Computes hashes of blocks that the server may have in its cache.
    hasher: Option<IoThread<ToHash<SocketMemory>>>,
    /// Raised by threads that work for this one.
    alarm: Arc<Alarm>,
    wakeups: Wakeups,
    /// What the control connection is watched for: input, room.
    watched: (bool, bool),
    gather: Gather,
}

impl TcpCarrier {
    /// The carrier of a session that begins with these connections.
    pub(super) fn new(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<SocketMemory>,
        mut links: Links,
        config: &SessionConfig,
    ) -> Result<TcpCarrier, EndReason> {
        let unbegun = links.unbegun.take();
        let (lanes, takes) = (links.lanes, links.ticket.takes_compressed());
        let mut carrier = TcpCarrier::over(session, mailbox, links, config)?;
        session.link.stands(&carrier.control);
        let connection = |index| Ok(DataConnection::new(Socket::new(Stream::closed()?)?, index, takes));
        let data = (0..lanes).map(connection).collect::<io::Result<_>>();
        carrier.data = data.map_err(|e| EndReason::Here(e.to_string()))?;
        if let Some(opening) = &carrier.opening {
            carrier.wakeups.add(opening.done(), OPENED)?;
        }
        // From now on the carrier ends the session.
        if let Some(unbegun) = unbegun {
            unbegun.begun();
        }
        Ok(carrier)
    }

    /// The carrier of a session that another process had. `links` are closed: it has to
    /// [reconnect](Carrier::reconnect) first, as after any lost link.
    pub(super) fn restored(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<SocketMemory>,
        links: Links,
        config: &SessionConfig,
        Left { out, lanes, generation }: Left,
    ) -> Result<TcpCarrier, EndReason> {
        let numbers = Numbers::of_process(generation)?;
        let takes = links.ticket.takes_compressed();
        let mut carrier = TcpCarrier::over(session, mailbox, links, config)?;
        let restored = |(index, lane)| {
            let here = |e: io::Error| EndReason::Here(e.to_string());
            Ok(DataConnection::restored(
                Socket::new(Stream::closed().map_err(here)?).map_err(here)?,
                index,
                takes,
                lane,
            ))
        };
        carrier.data = lanes.into_iter().enumerate().map(restored).collect::<Result<_, EndReason>>()?;
        (carrier.out, carrier.numbers) = (out, numbers);
        Ok(carrier)
    }

    fn over(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<SocketMemory>,
        links: Links,
        config: &SessionConfig,
    ) -> Result<TcpCarrier, EndReason> {
        let here = |e: io::Error| EndReason::Here(e.to_string());
        let wakeups = Wakeups::new(session, mailbox)?;
        let control = Arc::new(Socket::new(links.control).map_err(here)?);
        wakeups.add(&*control, CONTROL)?;
        let alarm = Alarm::new(mailbox.wake());
        let hasher = match links.ticket.cache(config) {
            CacheUse::Never => None,
            CacheUse::Slow | CacheUse::Always => {
                let work = |task: &mut ToHash<SocketMemory>| {
                    hash(task);
                    Ok(())
                };
                let raised = Arc::clone(&alarm);
                Some(IoThread::start(thread_name("hash"), work, move || raised.raise()).map_err(here)?)
            }
        };
        Ok(TcpCarrier {
            session: Arc::clone(session),
            config: config.clone(),
            ticket: links.ticket,
            numbers: Numbers::default(),
            control,
            unwelcomed: links.daemon.as_ref().map(|_| Unwelcomed::default()),
            daemon: links.daemon,
            out: SendBuffer::keeping(),
            told: 0,
            opening: links.opening,
            data: Vec::new(),
            next: 0,
            rooms: links.rooms,
            hasher,
            alarm,
            wakeups,
            watched: (true, false),
            gather: Gather::new(),
        })
    }

    /// Begins to use new data connections, of whose streams the server has `upto`.
    fn connect(
        &mut self,
        machine: &mut Machine<'_>,
        streams: Vec<Stream>,
        upto: &[u64],
    ) -> Result<(), EndReason> {
        let here = |e: io::Error| EndReason::Here(e.to_string());
        let streams = streams.into_iter().zip(upto).enumerate();
        for (connection, (index, (stream, upto))) in self.data.iter_mut().zip(streams) {
            connection.reconnect(machine, Socket::new(stream).map_err(here)?, *upto)?;
            if self.config.io_threads {
                connection.start_threads(&self.session, &self.alarm).map_err(here)?;
            }
            if let (Some(room), true) = (self.rooms.get(index), self.ticket.compress != CompressUse::Never) {
                connection.compress(self.ticket.compress, room, &self.alarm);
            }
            self.wakeups.add(connection.socket(), FIRST_DATA + index)?;
        }
        Ok(())
    }

    /// Begins to use the data connections once they stand. That one does not come about is as if it were
    /// lost. True: they stand now.
    fn opened(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        let Some(opening) = &self.opening else { return Ok(false) };
        let Some(outcome) = opening.outcome() else { return Ok(false) };
        let unwelcomed = opening.unwelcomed;
        self.opening = None;
        let streams =
            outcome.map_err(|e| EndReason::Gone(format!("data connections: {}", with_causes(&e))))?;
        let none = vec![0; streams.len()];
        self.connect(machine, streams, &none)?;
        if unwelcomed {
            self.data.iter_mut().for_each(DataConnection::await_welcome);
        }
        Ok(true)
    }

    /// Has the server told what has come of the control stream, once that is much, and a little sooner when
    /// it is told something anyway.
    fn acknowledge(&mut self, machine: &mut Machine<'_>) {
        let received = machine.control_taken();
        let untold = received - self.told;
        let enough = if self.out.is_empty() { ACKNOWLEDGE_CONTROL } else { ACKNOWLEDGE_CONTROL / 8 };
        if untold >= enough {
            let frame = Received { stream: 0, reserved: 0, bytes: received };
            if machine.frame(&mut self.out, frame::RECEIVED, frame.as_bytes()) {
                self.told = received;
            }
        }
    }

    /// Forgets what the server has received.
    fn forget(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        for Received { stream, bytes, .. } in machine.take_acknowledged() {
            match (stream as usize).checked_sub(FIRST_DATA) {
                None => machine.frames_arrived(&mut self.out, bytes)?,
                Some(index) => match self.data.get_mut(index) {
                    Some(connection) => connection.arrived(machine, bytes)?,
                    None => {
                        return Err(EndReason::Server(format!(
                            "it acknowledges stream {stream}, which the session does not have"
                        )));
                    }
                },
            }
        }
        Ok(())
    }

    fn send_frames(&mut self) -> Result<bool, EndReason> {
        let mut worked = false;
        if self.control.has_output() {
            self.control.flush().map_err(|e| EndReason::Gone(e.to_string()))?;
        }
        while !self.out.is_empty() {
            match not_now(self.control.send_bytes(self.out.unsent())) {
                Ok(Some(n)) => {
                    self.out.advance(n);
                    self.session.counters.control_bytes_sent.add(n as u64);
                    worked = true;
                }
                Ok(None) => break,
                Err(e) => return Err(EndReason::Gone(e.to_string())),
            }
        }
        Ok(worked)
    }

    /// Reads the control connection once. True: there was something.
    fn read_frames(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        read_control(&self.control, &mut self.unwelcomed, machine)
    }

    /// Has each connection watched for what it needs now.
    fn watch(&mut self, machine: &Machine<'_>) -> Result<(), EndReason> {
        let wanted = (machine.takes_frames(), !self.out.is_empty() || self.control.has_output());
        if wanted != self.watched {
            self.wakeups.change(&*self.control, CONTROL, wanted)?;
            self.watched = wanted;
        }
        for (index, connection) in standing(&self.opening, &mut self.data).iter_mut().enumerate() {
            let wanted = (connection.wants_input(), connection.wants_room());
            if wanted != connection.watched {
                self.wakeups.change(connection.socket(), FIRST_DATA + index, wanted)?;
                connection.watched = wanted;
            }
        }
        Ok(())
    }

    /// Waits for events and receives on the connections that have something. True: there was something.
    fn take(&mut self, machine: &mut Machine<'_>, timeout: Option<Duration>) -> Result<bool, EndReason> {
        self.watch(machine)?;
        let TcpCarrier { session, control, unwelcomed, opening, data, wakeups, gather, .. } = self;
        let data = standing(opening, data);
        let mut heard = false;
        // No event tells of what was received with something else and could not be taken then.
        for connection in data.iter_mut() {
            if connection.has_input() {
                heard |= connection.receive(machine, session, gather)?;
            }
        }
        if machine.takes_frames() && control.has_input() {
            heard |= read_control(control, unwelcomed, machine)?;
        }
        let timeout = if heard { Some(Duration::ZERO) } else { timeout };
        let called = wakeups.wait(session, timeout, |number, broken| {
            match number.checked_sub(FIRST_DATA) {
                Some(index) => {
                    if let Some(connection) = data.get_mut(index) {
                        heard |= connection.receive(machine, session, gather)?;
                    }
                }
                None if machine.takes_frames() => heard |= read_control(control, unwelcomed, machine)?,
                None if broken => {
                    return Err(EndReason::Gone("the server closed the connection".into()));
                }
                None => {}
            }
            Ok(())
        })?;
        for connection in data {
            heard |= connection.collect(machine)?;
        }
        if heard {
            machine.heard(Instant::now());
            machine.take_frames()?;
            self.forget(machine)?;
        }
        Ok(heard || called)
    }
}

/// The data connections among `data` that stand.
fn standing<'d>(opening: &Option<Opening>, data: &'d mut [DataConnection]) -> &'d mut [DataConnection] {
    if opening.is_some() { &mut [] } else { data }
}

/// What of a session's streams another process has left.
pub(super) struct Left {
    /// The control stream to the server.
    pub(super) out: SendBuffer,
    pub(super) lanes: Vec<RestoredLane<SocketMemory>>,
    /// How many processes have had the session before.
    pub(super) generation: u64,
}

fn read_control(
    control: &Socket,
    unwelcomed: &mut Option<Unwelcomed>,
    machine: &mut Machine<'_>,
) -> Result<bool, EndReason> {
    let read = match unwelcomed {
        Some(unwelcomed) => unwelcomed.read(control),
        None => machine.read(&mut &*control),
    };
    match not_now(read) {
        Ok(Some(0)) => Err(EndReason::Gone("the server closed the connection".into())),
        Ok(n) => {
            if let Some(welcome) = unwelcomed
                && welcome.is_over("control connection")?
            {
                *unwelcomed = None;
            }
            Ok(n.is_some())
        }
        Err(e) => Err(EndReason::Gone(e.to_string())),
    }
}

impl Carrier<Flows<SocketMemory>> for TcpCarrier {
    /// Short, because the server says why a session ended when it is asked to resume it.
    const LAST_WORDS: Duration = Duration::from_millis(50);
    /// A look at the connections is a system call.
    const RING_LOOKS: u32 = 64;

    fn out(&mut self) -> &mut SendBuffer {
        &mut self.out
    }

    /// What has come of data: a program that waited for its copies sends its next commands now, and the
    /// places of those copies are free for them. The connections say it again by themselves, because the
    /// server may read these frames late.
    fn before_commands(&mut self, machine: &mut Machine<'_>) {
        for (stream, connection) in (1..).zip(&mut self.data) {
            if let Some(bytes) = connection.untold() {
                let received = Received { stream, reserved: 0, bytes };
                if machine.frame(&mut self.out, frame::RECEIVED, received.as_bytes()) {
                    connection.told_along(bytes);
                }
            }
        }
    }

    fn send(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        // What is done by now is seen below or by the next `receive`; before that nothing sleeps.
        self.alarm.looks();
        if let Some(hasher) = &self.hasher {
            while let Some((done, _)) = hasher.take() {
                machine.schedule().hashed(done);
            }
            while let Some(task) = machine.schedule().next_to_hash() {
                hasher.give(task);
            }
        }
        self.acknowledge(machine);
        machine.commit();
        let mut worked = self.send_frames()?;
        worked |= self.opened(machine)?;
        // Every connection has something to send before one has something ahead, and a chunk before one has
        // two of a link of which nothing is known.
        for ahead in 1..=super::connection::AHEAD {
            let most = if machine.schedule().is_unknown() { 1 } else { usize::MAX };
            let data = standing(&self.opening, &mut self.data);
            let count = data.len();
            for at in (self.next..count).chain(0..self.next.min(count)) {
                let connection = &mut data[at];
                if connection.may_send() || machine.schedule().has_chunks() {
                    let budget = Budget { ahead, chunks: most };
                    let moved = connection.send(machine, &self.session, &mut self.gather, budget)?;
                    if moved && most == 1 {
                        self.next = at + 1;
                    }
                    worked |= moved;
                }
            }
        }
        Ok(worked)
    }

    fn receive(&mut self, machine: &mut Machine<'_>, now: Instant) -> Result<bool, EndReason> {
        let taken = self.take(machine, Some(Duration::ZERO))?;
        Ok(machine.schedule().look(now) || taken)
    }

    /// Epoll needs no arming, but threads wake only a relay that sleeps.
    fn arm(&mut self, _machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        Ok(self.alarm.sleeps())
    }

    fn wait(&mut self, machine: &mut Machine<'_>, timeout: Option<Duration>) -> Result<(), EndReason> {
        self.take(machine, timeout)?;
        self.alarm.is_awake();
        Ok(())
    }

    fn rest(&mut self) {
        self.control.rest();
        self.data.iter().for_each(|connection| connection.socket().rest());
    }

    fn reconnect(
        &mut self,
        machine: &mut Machine<'_>,
        mailbox: &Mailbox<SocketMemory>,
        why: String,
    ) -> Result<(), EndReason> {
        let limit = self.ticket.limit(&self.session);
        if limit.is_zero() {
            let why = if mailbox.is_to_pause() { resume::CANNOT_PAUSE.to_owned() } else { why };
            return Err(EndReason::Gone(why));
        }
        // After this, the numbers of bytes that have come stand.
        self.control.shut_down();
        (self.unwelcomed, self.opening) = (None, None);
        self.session.link.lost();
        self.wakeups.remove(&*self.control)?;
        let mut received = vec![machine.restart_frames()];
        for connection in &mut self.data {
            received.push(connection.disconnect(machine)?);
            self.wakeups.remove(connection.socket())?;
        }
        if mailbox.is_to_pause() {
            // It reads the client's memory, too.
            self.hasher.iter().for_each(IoThread::wait_for_rest);
            self.data.iter().for_each(DataConnection::rest);
            mailbox.rest();
        }
        let lost = Interruption::begin(Arc::clone(&self.session), why, limit);
        let redial = Redial { ticket: self.ticket.clone(), config: self.config.clone(), received };
        let resumption = resume::resume(&self.session, mailbox, &self.numbers, None, redial)?;
        let turn = || machine.serve(mailbox);
        let resumed = resumption.wait(&lost, &mut self.wakeups, self.daemon.as_mut(), turn)?;
        let here = |e: io::Error| EndReason::Here(e.to_string());
        let [control, data @ ..] = resumed.received.as_slice() else {
            return Err(EndReason::Server("it resumes a session without streams".into()));
        };
        self.control = Arc::new(Socket::new(resumed.control).map_err(here)?);
        self.wakeups.add(&*self.control, CONTROL)?;
        self.watched = (true, false);
        self.told = machine.control_taken();
        machine.frames_resume(&mut self.out, *control)?;
        machine.schedule().relinked();
        self.connect(machine, resumed.data, data)?;
        self.session.link.stands(&self.control);
        lost.end();
        Ok(())
    }

    fn silent(&self, seconds: u64) -> String {
        format!("nothing was heard of it for {seconds} s")
    }

    fn last_words(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        // What it said last may stand behind data that does not come any more. Then only a farewell counts.
        let take = |machine: &mut Machine<'_>| {
            machine.take_frames()?;
            if machine.takes_frames() { Ok(()) } else { machine.farewell_behind() }
        };
        take(machine)?;
        // Once for each call: a server that goes on sending must not keep this thread past its deadline.
        match self.read_frames(machine) {
            Ok(true) => take(machine),
            Ok(false) => Ok(()),
            Err(gone) => match &mut self.daemon {
                Some(daemon) => daemon.last_words().map_or(Ok(()), |words| Err(EndReason::Bye(words))),
                None => Err(gone),
            },
        }
    }

    fn close(&mut self, machine: &mut Machine<'_>, farewell: Option<&str>) {
        if let Some(text) = farewell {
            self.out.frame(frame::BYE, text.as_bytes());
            let said = self.send_frames().is_ok() && self.out.is_empty();
            // Before the welcome there is no telling what an answer would be.
            let heard = said && self.unwelcomed.is_none();
            let answered = heard.then(|| (Arc::clone(&self.control), machine.take_reader()));
            resume::end(&self.ticket, &self.config, answered);
            self.control.finish();
        } else {
            self.control.shut_down();
        }
        self.data.iter().for_each(|connection| connection.socket().shut_down());
    }
}
