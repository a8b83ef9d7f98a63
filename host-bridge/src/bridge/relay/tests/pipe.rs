//! The relay's loop between two threads: its carrier is a pair of queues.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::channel::NO_SLOT;
use protocol::data::{HostIn, HostOut, HostRange, Place};
use protocol::fuzzing::Random;
use protocol::handle::StreamId;
use protocol::link::{GRANTED_SLOTS, frame};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::polling::PollTime;

use super::server::Server;
use super::{PATIENCE, SLOTS, Sent, TestMemory, TestSchedule, producer, push, session};
use crate::bridge::relay::carrier::{Carrier, Wakeups, run};
use crate::bridge::relay::mailbox::{Mailbox, Message};
use crate::bridge::relay::{EndReason, Machine, Slots};
use crate::bridge::state::SessionState;
use crate::framing::SendBuffer;

/// A carrier whose server is a thread of the test.
struct Pipe<S: TestSchedule> {
    session: Arc<SessionState>,
    out: SendBuffer,
    to: Sender<ToServer>,
    from: Receiver<FromServer>,
    wakeups: Wakeups,
    /// The server writes it.
    wake: OwnedFd,
    schedule: std::marker::PhantomData<S>,
}

enum ToServer {
    Frames(Vec<u8>),
    Data(Sent),
    Closed,
}

enum FromServer {
    Frames(Vec<u8>),
    Data(u64, u32),
    Gone,
}

impl<S: TestSchedule> Pipe<S> {
    fn gone<E>(_: E) -> EndReason {
        EndReason::Gone("the pipe broke".into())
    }

    fn take(&mut self, machine: &mut Machine<'_, S>) -> Result<bool, EndReason> {
        let mut heard = false;
        while let Ok(message) = self.from.try_recv() {
            heard = true;
            match message {
                FromServer::Frames(bytes) => {
                    let mut rest = bytes.as_slice();
                    while !rest.is_empty() {
                        machine.read(&mut rest).map_err(Self::gone)?;
                    }
                }
                FromServer::Data(seq, len) => machine.written_by_server(0, 0, (seq as u32, len))?,
                FromServer::Gone => return Err(Self::gone(())),
            }
            machine.heard(Instant::now());
            machine.take_frames()?;
        }
        Ok(heard)
    }
}

impl<S: TestSchedule> Carrier<S> for Pipe<S> {
    const LAST_WORDS: Duration = Duration::from_millis(50);
    const RING_LOOKS: u32 = 1;

    fn out(&mut self) -> &mut SendBuffer {
        &mut self.out
    }

    fn send(&mut self, machine: &mut Machine<'_, S>) -> Result<bool, EndReason> {
        let mut worked = !self.out.is_empty();
        if worked {
            self.to.send(ToServer::Frames(self.out.unsent().to_vec())).map_err(Self::gone)?;
            self.out.advance(self.out.unsent().len());
        }
        while let Some(sent) = machine.schedule().next() {
            machine.schedule().done(&sent);
            machine.sent(sent.seq, sent.len);
            self.to.send(ToServer::Data(sent)).map_err(Self::gone)?;
            worked = true;
        }
        Ok(worked)
    }

    fn receive(&mut self, machine: &mut Machine<'_, S>, _now: Instant) -> Result<bool, EndReason> {
        self.take(machine)
    }

    fn arm(&mut self, machine: &mut Machine<'_, S>) -> Result<bool, EndReason> {
        self.take(machine)
    }

    fn wait(&mut self, machine: &mut Machine<'_, S>, timeout: Option<Duration>) -> Result<(), EndReason> {
        self.wakeups.wait(&self.session, timeout, |_, _| Ok(()))?;
        // What it says is looked at below.
        let _ = nix::unistd::read(&self.wake, &mut [0; 8]);
        self.take(machine).map(drop)
    }

    fn silent(&self, seconds: u64) -> String {
        format!("nothing came for {seconds} s")
    }

    fn last_words(&mut self, machine: &mut Machine<'_, S>) -> Result<(), EndReason> {
        self.take(machine).map(drop)
    }

    fn close(&mut self, _machine: &mut Machine<'_, S>, farewell: Option<&str>) {
        if let Some(text) = farewell {
            self.out.frame(frame::BYE, text.as_bytes());
            let _ = self.to.send(ToServer::Frames(self.out.unsent().to_vec()));
        }
        let _ = self.to.send(ToServer::Closed);
    }
}

/// Serves a [`Pipe`] until it is closed, or until `vanish` commands were executed. Gives the server as it was
/// then.
fn serve(
    mut server: Server,
    to: &Receiver<ToServer>,
    from: &Sender<FromServer>,
    wake: &OwnedFd,
    vanish: u64,
) -> Server {
    let mut random = Random(5);
    let mut freed = 0;
    loop {
        match to.recv_timeout(PATIENCE).expect("the relay does something") {
            ToServer::Frames(bytes) => server.hear(&bytes),
            ToServer::Data(sent) => server.land(&sent),
            ToServer::Closed => return server,
        }
        let (mut frames, mut data) = (SendBuffer::new(), Vec::new());
        while !server.records.is_empty() {
            server.execute(&mut random, &mut frames, &mut data);
        }
        server.grant(&mut random, &mut frames, true);
        let mut free = Vec::new();
        server.tell(&mut random, &mut frames, &mut free, freed);
        freed += free.iter().filter(|slot| **slot < SLOTS - GRANTED_SLOTS).count() as u64;
        // The frames first: what depends on the data has to wait for it.
        let _ = from.send(FromServer::Frames(frames.unsent().to_vec()));
        data.into_iter().for_each(|(seq, _, _, len)| drop(from.send(FromServer::Data(seq, len as u32))));
        if server.executed >= vanish {
            let _ = from.send(FromServer::Gone);
        }
        let _ = nix::unistd::write(wake, &1u64.to_ne_bytes());
    }
}

/// Runs `client` against a relay in a thread of its own, and gives how the session ended and the server.
fn with_relay<S: TestSchedule>(
    vanish: u64,
    client: impl FnOnce(&SessionState, &Mailbox<TestMemory>),
) -> (EndReason, Server) {
    let (session, _) = session();
    let mailbox = Mailbox::new().unwrap();
    let (to, for_server) = mpsc::channel();
    let (server_sends, from) = mpsc::channel();
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let wake: OwnedFd = EventFd::from_value_and_flags(0, flags).unwrap().into();
    let wakeups = Wakeups::new(&session, &mailbox).unwrap();
    wakeups.add(&wake, 0).unwrap();
    let carrier = Pipe::<S> {
        session: Arc::clone(&session),
        out: SendBuffer::new(),
        to,
        from,
        wakeups,
        wake: wake.try_clone().unwrap(),
        schedule: std::marker::PhantomData,
    };
    let ended = Mutex::new(None);
    let server = std::thread::scope(|scope| {
        let server = Server::new(S::COMMANDS_AHEAD.is_some());
        let served = scope.spawn(move || serve(server, &for_server, &server_sends, &wake, vanish));
        let (session, mailbox, ended) = (&session, &mailbox, &ended);
        scope.spawn(move || {
            let arena = Some(TestMemory::new(64 << 20, false));
            let machine = Machine::new(session, arena, S::begin(), PATIENCE);
            let poll = PollTime::new(Duration::from_micros(5));
            *ended.lock().unwrap() = Some(run(session, mailbox, machine, carrier, poll, None));
        });
        client(session, mailbox);
        served.join().unwrap()
    });
    (ended.into_inner().unwrap().unwrap(), server)
}

fn wait_for_answer(session: &SessionState, slot: u16) {
    let begin = Instant::now();
    while session.channel.view.slot(slot).unwrap().poll(&mut Vec::new()).is_none() {
        assert!(begin.elapsed() < PATIENCE, "no answer");
        std::thread::yield_now();
    }
}

fn copies_and_close<S: TestSchedule>() {
    let (end, server) = with_relay::<S>(u64::MAX, |session, mailbox| {
        let mut producer = producer(session);
        let range = HostRange { place: Place::Arena, offset: 0, len: 3 << 20 };
        for round in 0..200 {
            let (stream, src) = (StreamId(0), HostIn::Range(range));
            push(&mut producer, &MemcpyHtoD { stream, dst: 0, src }, NO_SLOT);
            push(&mut producer, &MemcpyDtoH { stream, src: 0, dst: HostOut(range) }, NO_SLOT);
            session.channel.view.slot(0).unwrap().prepare();
            push(&mut producer, &StreamSynchronize { stream }, 0);
            if session.header().host_sleep.take() {
                session.ring();
            }
            wait_for_answer(session, 0);
            assert_eq!(session.channel.view.progress().executed(), 3 * (round + 1));
        }
        // This server replies before it has all the data: what was sent is with it when the session ends.
        let begin = Instant::now();
        while session.channel.view.progress().released() < producer.last_seq() {
            assert!(begin.elapsed() < PATIENCE, "the data is not sent");
            std::thread::yield_now();
        }
        assert!(mailbox.post(Message::Close("enough".into())).is_ok());
    });
    assert!(matches!(end, EndReason::Asked(reason) if reason == "enough"));
    assert_eq!(server.farewell.as_deref(), Some(""), "an empty farewell says: as asked");
    assert!(server.lengths.iter().all(|(key, len)| server.received[key] == *len));
    assert_eq!(server.lengths.len(), 200);
}

#[test]
fn a_relay_over_pipes_copies_both_ways_and_says_farewell() {
    copies_and_close::<Slots<TestMemory>>();
}

#[test]
fn a_server_that_vanishes_ends_the_relay() {
    let (end, _) = with_relay::<Slots<TestMemory>>(3, |session, _| {
        let mut producer = producer(session);
        for _ in 0..3 {
            push(&mut producer, &StreamMark { stream: StreamId(0) }, NO_SLOT);
        }
        session.ring();
    });
    assert!(matches!(end, EndReason::Gone(_)));
}
