//! What a transport does for a relay, and the relay's loop.

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::end::EndReason;
use super::machine::Machine;
use super::mailbox::Mailbox;
use super::schedule::Schedule;
use crate::bridge::state::SessionState;
use crate::framing::SendBuffer;
use crate::stream::QUIET;
use protocol::polling::PollTime;

/// Moves a session's bytes between its [`Machine`] and the server. It knows connections, and no rules.
///
/// Only the relay's thread calls it. Nothing but [`wait`](Self::wait) blocks. An error ends the session;
/// after it the loop calls [`last_words`](Self::last_words) and [`close`](Self::close) and nothing else.
/// Dropping the carrier ends the server's access to the client's memory; it is dropped before the machine is.
pub(in crate::bridge) trait Carrier<S: Schedule> {
    /// How long a lost connection's reason may take to arrive.
    const LAST_WORDS: Duration;
    /// Looks at the ring between two looks at the connections, while the relay polls.
    const RING_LOOKS: u32;

    /// The frames that go to the server, in this order.
    fn out(&mut self) -> &mut SendBuffer;

    /// Called before records are put into [`out`](Self::out), and only when one can be: says what the server
    /// should know before it has them.
    fn before_commands(&mut self, _machine: &mut Machine<'_, S>) {}

    /// Called when the server is asked whether it is there, with the last frame of [`out`](Self::out).
    fn asks(&mut self) {}

    /// Sends frames, and data that the schedule lets go, as far as the connections take them now. Calls
    /// [`Machine::sent`] for data whose source is free again. True: something moved.
    fn send(&mut self, machine: &mut Machine<'_, S>) -> Result<bool, EndReason>;

    /// Takes what has come: frames through [`Machine::read`] and [`Machine::take_frames`], data through
    /// [`Machine::target`] and [`Machine::received`]. True: there was something.
    fn receive(&mut self, machine: &mut Machine<'_, S>, now: Instant) -> Result<bool, EndReason>;

    /// Called when the relay is about to sleep: what comes from now on ends the next [`wait`](Self::wait).
    /// True: something came meanwhile, so there is no need to sleep.
    fn arm(&mut self, machine: &mut Machine<'_, S>) -> Result<bool, EndReason>;

    /// Sleeps until something comes, another thread calls, or `timeout` is over, and takes what has come as
    /// [`receive`](Self::receive) does. With a timeout of zero it only looks. Always called after
    /// [`arm`](Self::arm).
    fn wait(&mut self, machine: &mut Machine<'_, S>, timeout: Option<Duration>) -> Result<(), EndReason>;

    /// Called when nothing has moved for [`QUIET`] and nothing is awaited: memory that only data takes may
    /// go.
    fn rest(&mut self) {}

    /// Called when the connections are lost because of `why`, and no farewell was found, or when the session
    /// is to pause: closes them, [rests](Mailbox::rest), and waits until there are new ones over which the
    /// session goes on behind what both sides have. Meanwhile it serves the mailbox. The error is the end of
    /// the session, or [`EndReason::Paused`]: it is to be called again.
    fn reconnect(
        &mut self,
        _machine: &mut Machine<'_, S>,
        _mailbox: &Mailbox<S::Memory>,
        why: String,
    ) -> Result<(), EndReason> {
        Err(EndReason::Gone(why))
    }

    /// The message that the server has been silent for so many seconds.
    fn silent(&self, seconds: u64) -> String;

    /// Called again and again once a connection broke: looks for the server's farewell, which may still be on
    /// its way. [`EndReason::Bye`] has it; any other error says that none will come.
    fn last_words(&mut self, machine: &mut Machine<'_, S>) -> Result<(), EndReason>;

    /// Says farewell, if there is one to say, as far as the connection takes it now, and closes everything.
    fn close(&mut self, machine: &mut Machine<'_, S>, farewell: Option<&str>);
}

/// Why a session has no link that was paused.
const PAUSED: &str = "the connections were closed while the guest was stopped";

/// Runs a session until it ends, and says why it did. Nothing of the transport reaches the client's memory
/// any more when this returns.
///
/// In each turn the relay does what can be done now, and nothing blocks. With nothing to do it polls for a
/// while ([`PollTime`]) and then sleeps on everything together. Because it always receives while it cannot
/// send, two sides that both have much to send cannot wait for each other. `lost`: the session begins without
/// a link, because of that.
pub(in crate::bridge) fn run<S: Schedule, C: Carrier<S>>(
    session: &SessionState,
    mailbox: &Mailbox<S::Memory>,
    mut machine: Machine<'_, S>,
    mut carrier: C,
    poll: PollTime,
    lost: Option<String>,
) -> EndReason {
    let mut before = lost.map(EndReason::Gone);
    let end = loop {
        let end = match before.take() {
            Some(end) => end,
            None => match work(session, mailbox, &mut machine, &mut carrier, poll) {
                Ok(never) => match never {},
                Err(end) => end,
            },
        };
        let why = match end {
            EndReason::Gone(why) => {
                // A connection may break before a farewell on another one was read, whose words are the
                // better ones.
                if let Some(bye) = farewell(&mut machine, &mut carrier) {
                    break bye;
                }
                why
            }
            EndReason::Paused => PAUSED.to_owned(),
            end => break end,
        };
        match carrier.reconnect(&mut machine, mailbox, why) {
            Ok(()) => machine.heard(Instant::now()),
            Err(EndReason::Paused) => before = Some(EndReason::Paused),
            Err(end) => break end,
        }
    };
    let text = match &end {
        EndReason::Asked(_) => Some(String::new()),
        EndReason::Bye(_) => None,
        _ => Some(end.text(&session.server)),
    };
    carrier.close(&mut machine, text.as_deref());
    drop(carrier);
    end
}

/// The server's farewell, if it is still on its way.
fn farewell<S: Schedule, C: Carrier<S>>(machine: &mut Machine<'_, S>, carrier: &mut C) -> Option<EndReason> {
    let deadline = Instant::now() + C::LAST_WORDS;
    while Instant::now() < deadline {
        match carrier.last_words(machine) {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(bye @ EndReason::Bye(_)) => return Some(bye),
            Err(_) => return None,
        }
    }
    None
}

fn work<S: Schedule, C: Carrier<S>>(
    session: &SessionState,
    mailbox: &Mailbox<S::Memory>,
    machine: &mut Machine<'_, S>,
    carrier: &mut C,
    mut poll: PollTime,
) -> Result<Infallible, EndReason> {
    let mut idle_since: Option<Instant> = None;
    // Bytes that data connections had moved when the carrier last gave memory back.
    let mut settled = 0;
    loop {
        let now = Instant::now();
        let mut worked = false;
        if mailbox.has_messages() {
            machine.serve(mailbox)?;
            worked = true;
        }
        if machine.has_records() && machine.can_take(carrier.out()) {
            carrier.before_commands(machine);
        }
        worked |= machine.take_records(carrier.out())?;
        worked |= carrier.send(machine)?;
        machine.publish_sent();
        worked |= carrier.receive(machine, now)?;
        // Behind what has come: this thread may not have run for a while.
        worked |= keep_alive(machine, carrier, now)?;
        machine.finish_turn();
        if worked {
            if idle_since.take().is_some() {
                poll.paid();
            }
            continue;
        }
        let since = *idle_since.get_or_insert(now);
        let patience = if machine.is_bulk() { poll.during_bulk() } else { poll.get() };
        if now.saturating_duration_since(since) < patience {
            for _ in 0..C::RING_LOOKS {
                if machine.has_records() || mailbox.has_messages() {
                    break;
                }
                poll.pause();
            }
            continue;
        }
        let asleep = Instant::now();
        sleep(session, mailbox, machine, carrier, asleep, &mut settled)?;
        poll.slept(asleep.elapsed());
        idle_since = Some(Instant::now());
    }
}

fn keep_alive<S: Schedule, C: Carrier<S>>(
    machine: &mut Machine<'_, S>,
    carrier: &mut C,
    now: Instant,
) -> Result<bool, EndReason> {
    let asked = machine.keep_alive(carrier.out(), now);
    let asked = asked.map_err(|seconds| EndReason::Gone(carrier.silent(seconds)))?;
    if asked {
        carrier.asks();
    }
    Ok(asked)
}

/// Sleeps until something happens or it is time to ask whether the server is there.
fn sleep<S: Schedule, C: Carrier<S>>(
    session: &SessionState,
    mailbox: &Mailbox<S::Memory>,
    machine: &mut Machine<'_, S>,
    carrier: &mut C,
    now: Instant,
    settled: &mut u64,
) -> Result<(), EndReason> {
    let asked = keep_alive(machine, carrier, now)?;
    if asked {
        carrier.send(machine)?;
        machine.publish_sent();
    }
    let timeout = machine.rest(carrier.out(), now);
    // While the connection is behind, records must wait anyway: only its progress wakes us.
    let listen = machine.can_take(carrier.out());
    let flag = &session.header().host_sleep;
    if listen {
        flag.announce();
    }
    // What has been sent since the carrier last received may have hidden from it what threads have done.
    let late = carrier.arm(machine)? || asked || (listen && machine.has_records()) || mailbox.has_messages();
    if !late {
        session.counters.sleeps.add(1);
    }
    // While nothing is awaited, it wakes once after data, to give memory back.
    let moved = session.counters.data_bytes_sent.get() + session.counters.data_bytes_received.get();
    let settles = timeout.is_none() && moved != *settled;
    let limit = if settles { Some(QUIET) } else { timeout };
    carrier.wait(machine, if late { Some(Duration::ZERO) } else { limit })?;
    if settles && now.elapsed() >= QUIET {
        carrier.rest();
        *settled = moved;
    }
    if listen {
        flag.cancel();
    }
    machine.rested(timeout.is_some(), Instant::now());
    Ok(())
}

/// The descriptors on which a relay's thread sleeps, its doorbell and its mailbox among them.
#[derive(Debug)]
pub(in crate::bridge) struct Wakeups {
    epoll: Epoll,
    events: [EpollEvent; EVENTS],
}

const DOORBELL: u64 = u64::MAX;
const MAILBOX: u64 = u64::MAX - 1;
/// Descriptors looked at in one call.
const EVENTS: usize = 40;

fn broken(e: nix::Error) -> EndReason {
    EndReason::Here(format!("epoll: {e}"))
}

impl Wakeups {
    /// Watches the session's doorbell and the mailbox.
    pub(in crate::bridge) fn new<M>(
        session: &SessionState,
        mailbox: &Mailbox<M>,
    ) -> Result<Wakeups, EndReason> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(broken)?;
        // Edge-triggered, since neither is ever read: the client holds the doorbell too and may do with it
        // what it likes.
        let edge = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(&session.doorbell, EpollEvent::new(edge, DOORBELL)).map_err(broken)?;
        epoll.add(&**mailbox.wake(), EpollEvent::new(edge, MAILBOX)).map_err(broken)?;
        Ok(Wakeups { epoll, events: [EpollEvent::empty(); EVENTS] })
    }

    /// Watches a descriptor of the carrier's for input. Its events come with `number`.
    pub(in crate::bridge) fn add(&self, fd: impl AsFd, number: usize) -> Result<(), EndReason> {
        self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, number as u64)).map_err(broken)
    }

    /// Watches it no more, if it was watched. A connection that was shut down would report its end again and
    /// again.
    pub(in crate::bridge) fn remove(&self, fd: impl AsFd) -> Result<(), EndReason> {
        match self.epoll.delete(fd) {
            Ok(()) | Err(nix::Error::ENOENT) => Ok(()),
            Err(e) => Err(broken(e)),
        }
    }

    /// Watches it for input and for room from now on, for one of them, or for its end alone.
    pub(in crate::bridge) fn change(
        &self,
        fd: impl AsFd,
        number: usize,
        (input, room): (bool, bool),
    ) -> Result<(), EndReason> {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, input);
        flags.set(EpollFlags::EPOLLOUT, room);
        self.epoll.modify(fd, &mut EpollEvent::new(flags, number as u64)).map_err(broken)
    }

    /// Waits for events and calls `act` with each descriptor's number and whether it is broken. True: the
    /// doorbell rang or a message came.
    pub(in crate::bridge) fn wait(
        &mut self,
        session: &SessionState,
        timeout: Option<Duration>,
        mut act: impl FnMut(usize, bool) -> Result<(), EndReason>,
    ) -> Result<bool, EndReason> {
        let timeout = timeout.map_or(EpollTimeout::NONE, |time| {
            // Rounded up, so that it is not over just before the time.
            let millis = if time.is_zero() { 0 } else { time.as_millis() + 1 };
            EpollTimeout::from(millis.min(u128::from(u16::MAX)) as u16)
        });
        let count = match self.epoll.wait(&mut self.events, timeout) {
            Ok(count) => count,
            Err(nix::Error::EINTR) => 0,
            Err(e) => return Err(broken(e)),
        };
        let mut called = false;
        for event in &self.events[..count] {
            match event.data() {
                DOORBELL => {
                    session.counters.doorbells.add(1);
                    called = true;
                }
                MAILBOX => called = true,
                number => {
                    let broken = event.events().intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
                    act(number as usize, broken)?;
                }
            }
        }
        Ok(called)
    }
}
