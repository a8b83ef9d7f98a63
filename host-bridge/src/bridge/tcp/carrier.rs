//! The sockets of a session, as its relay uses them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::frame;

use super::Links;
use super::connection::DataConnection;
use super::memory::SocketMemory;
use super::socket::{Gather, Socket, not_now};
use crate::bridge::SessionConfig;
use crate::bridge::relay::{Carrier, EndReason, Flows, Mailbox, Wakeups};
use crate::bridge::state::SessionState;
use crate::framing::SendBuffer;

/// The control connection's number among the descriptors that are watched; the data connections come behind it.
const CONTROL: usize = 0;
const FIRST_DATA: usize = 1;

type Machine<'c> = crate::bridge::relay::Machine<'c, Flows<SocketMemory>>;

/// A session's connections.
pub(super) struct TcpCarrier {
    session: Arc<SessionState>,
    control: Socket,
    out: SendBuffer,
    data: Vec<DataConnection>,
    wakeups: Wakeups,
    /// What the control connection is watched for: input, room.
    watched: (bool, bool),
    gather: Gather,
}

impl TcpCarrier {
    pub(super) fn new(
        session: &Arc<SessionState>,
        mailbox: &Mailbox<SocketMemory>,
        links: Links,
        config: &SessionConfig,
    ) -> Result<TcpCarrier, EndReason> {
        let here = |e: std::io::Error| EndReason::Here(e.to_string());
        let wakeups = Wakeups::new(session, mailbox)?;
        let control = Socket::new(links.control).map_err(here)?;
        wakeups.add(&control, CONTROL)?;
        let mut data = Vec::with_capacity(links.data.len());
        for (index, stream) in links.data.into_iter().enumerate() {
            let mut connection = DataConnection::new(Socket::new(stream).map_err(here)?, index);
            if config.io_threads {
                let wake = mailbox.wake().as_fd().try_clone_to_owned().map_err(here)?;
                connection.start_threads(session, &wake).map_err(here)?;
            }
            wakeups.add(connection.socket(), FIRST_DATA + index)?;
            data.push(connection);
        }
        Ok(TcpCarrier {
            session: Arc::clone(session),
            control,
            out: SendBuffer::new(),
            data,
            wakeups,
            watched: (true, false),
            gather: Gather::new(),
        })
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
    fn read_frames(&self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        read_control(&self.control, machine)
    }

    /// Has each connection watched for what it needs now.
    fn watch(&mut self, machine: &Machine<'_>) -> Result<(), EndReason> {
        let wanted = (machine.takes_frames(), !self.out.is_empty() || self.control.has_output());
        if wanted != self.watched {
            self.wakeups.change(&self.control, CONTROL, wanted)?;
            self.watched = wanted;
        }
        for (index, connection) in self.data.iter_mut().enumerate() {
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
        let TcpCarrier { session, control, data, wakeups, gather, .. } = self;
        let mut heard = false;
        // No event tells of what was received with something else and could not be taken then.
        for connection in &mut *data {
            if connection.has_input() {
                heard |= connection.receive(machine, session, gather)?;
            }
        }
        if machine.takes_frames() && control.has_input() {
            heard |= read_control(control, machine)?;
        }
        let timeout = if heard { Some(Duration::ZERO) } else { timeout };
        let called = wakeups.wait(session, timeout, |number, broken| {
            match number.checked_sub(FIRST_DATA) {
                Some(index) => {
                    if let Some(connection) = data.get_mut(index) {
                        heard |= connection.receive(machine, session, gather)?;
                    }
                }
                None if machine.takes_frames() => heard |= read_control(control, machine)?,
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
        }
        Ok(heard || called)
    }
}

fn read_control(control: &Socket, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
    match not_now(machine.read(&mut &*control)) {
        Ok(Some(0)) => Err(EndReason::Gone("the server closed the connection".into())),
        Ok(n) => Ok(n.is_some()),
        Err(e) => Err(EndReason::Gone(e.to_string())),
    }
}

impl Carrier<Flows<SocketMemory>> for TcpCarrier {
    const LAST_WORDS: Duration = Duration::from_secs(1);
    /// A look at the connections is a system call.
    const RING_LOOKS: u32 = 64;

    fn out(&mut self) -> &mut SendBuffer {
        &mut self.out
    }

    fn send(&mut self, machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        let mut worked = self.send_frames()?;
        // Every connection has something to send before one has something ahead.
        for ahead in 1..=super::connection::AHEAD {
            for connection in &mut self.data {
                if connection.may_send() || machine.schedule().has_chunks() {
                    worked |= connection.send(machine, &self.session, &mut self.gather, ahead)?;
                }
            }
        }
        Ok(worked)
    }

    fn receive(&mut self, machine: &mut Machine<'_>, _now: Instant) -> Result<bool, EndReason> {
        self.take(machine, Some(Duration::ZERO))
    }

    /// Epoll needs no arming.
    fn arm(&mut self, _machine: &mut Machine<'_>) -> Result<bool, EndReason> {
        Ok(false)
    }

    fn wait(&mut self, machine: &mut Machine<'_>, timeout: Option<Duration>) -> Result<(), EndReason> {
        self.take(machine, timeout).map(drop)
    }

    fn silent(&self, seconds: u64) -> String {
        format!("nothing was heard of it for {seconds} s")
    }

    fn last_words(&mut self, machine: &mut Machine<'_>) -> Result<(), EndReason> {
        machine.take_frames()?;
        if !machine.takes_frames() {
            let why = "what it said last stands behind data that will not come";
            return Err(EndReason::Gone(why.to_owned()));
        }
        // Once for each call: a server that goes on sending must not keep this thread past its deadline.
        if self.read_frames(machine)? {
            machine.take_frames()?;
        }
        Ok(())
    }

    fn close(&mut self, farewell: Option<&str>) {
        if let Some(text) = farewell {
            // A server that misses it sees the connection close.
            self.out.frame(frame::BYE, text.as_bytes());
            let _ = self.send_frames();
        }
        self.control.shut_down();
        self.data.iter().for_each(|connection| connection.socket().shut_down());
    }
}
