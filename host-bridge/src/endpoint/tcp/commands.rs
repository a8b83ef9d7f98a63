//! The dispatcher's side of a `tcp` session: takes records off the control connection.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use protocol::channel::{NO_SLOT, Record};
use protocol::link::{ACKNOWLEDGE_CONTROL, DataAsk, Received, frame};
use protocol::polling::DISPATCHER_REPLY_DUE_TCP;
use protocol::trace::{RECORDER, Stage};
use zerocopy::FromBytes;

use super::client::{Owner, Say, Sending, TcpClient, lock, prepared};
use super::keep_alive::KeepAlive;
use crate::compression::CompressUse;
use crate::endpoint::contract::Commands;
use crate::endpoint::dispatcher_poll::{DispatcherPoll, Polling, Replies};
use crate::endpoint::end::{Farewell, Lost};
use crate::endpoint::incoming::{Bridge, Inbox};
use crate::endpoint::link::{Connection, Counted, DataIn, Link};
use crate::endpoint::outbox::Outbox;
use crate::endpoint::stream::Records;
use crate::endpoint::wake::{self, StopEvent};
use crate::framing::{FrameReader, SendBuffer, split_struct, watch_peer};
use crate::stream::{Now, Stream};

/// What a session may have of its server.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    /// How long it waits for others when its connections are lost. Zero: it ends with them.
    pub grace: Duration,
    /// About how many bytes of data that were sent it keeps until the bridge has said that it has them.
    pub replay: u64,
    /// How many bytes of data that came ahead of their turn it keeps, as the welcome said.
    pub eager: u64,
    /// When data to its client is compressed.
    pub compress: CompressUse,
}

/// The dispatcher's side.
pub struct TcpCommands {
    client: Arc<TcpClient>,
    reader: FrameReader,
    /// Those of the COMMANDS frame at hand.
    records: Records,
    poll: DispatcherPoll,
}

impl TcpCommands {
    /// Begins a session on a control connection whose handshake is over. `slot_count`: the channel's reply
    /// slots, as the hello said. `data_connections`: as many as the welcome asked for; each comes by
    /// [`TcpClient::add_data_connection`].
    pub fn start(
        control: Stream,
        slot_count: u32,
        data_connections: u32,
        polling: Polling,
        allowance: Allowance,
    ) -> io::Result<(TcpCommands, Arc<TcpClient>)> {
        let control = prepared(control)?;
        watch_peer(&*control);
        let first = Connection { attempt: 0, stream: Arc::clone(&control) };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changed = EventFd::from_value_and_flags(0, flags)?;
        let stop = StopEvent::new()?;
        let now = Instant::now();
        let client = Arc::new_cyclic(|this| TcpClient {
            this: this.clone(),
            link: Link::new(control, allowance.grace),
            control: Mutex::new(Some(first.clone())),
            changed,
            control_counted: Counted::default(),
            data: (0..data_connections)
                .map(|_| Arc::new(DataIn::new(Box::new(Owner(this.clone())))))
                .collect(),
            link_changes: OnceLock::new(),
            before_news: OnceLock::new(),
            announcing: Mutex::default(),
            relinking: Mutex::default(),
            sending: Mutex::new(Sending {
                buffer: SendBuffer::keeping(),
                connection: Some(first),
                last: now,
                told: 0,
            }),
            slot_count,
            inbox: Inbox::new(allowance.eager),
            outbox: Outbox::new(data_connections as usize, allowance.replay, allowance.compress),
            executed: AtomicU64::new(0),
            end: OnceLock::new(),
            stop,
            keep_alive: KeepAlive::new(),
            replies: Replies::default(),
            farewell: Farewell::default(),
        });
        let bridge: Weak<dyn Bridge> = Weak::<TcpClient>::clone(&client.this);
        client.inbox.tell(bridge);
        let kept = Arc::clone(&client);
        std::thread::Builder::new().name("rgpu-alive".into()).spawn(move || kept.keep_alive())?;
        for index in 0..client.data.len() {
            let client = Arc::clone(&client);
            std::thread::Builder::new().name("rgpu-data".into()).spawn(move || client.read_data(index))?;
        }
        let commands = TcpCommands {
            client: Arc::clone(&client),
            reader: FrameReader::new(),
            records: Records::default(),
            poll: DispatcherPoll::new(Polling {
                while_due: polling.while_due.min(DISPATCHER_REPLY_DUE_TCP.here()),
                ..polling
            }),
        };
        Ok((commands, client))
    }

    /// Takes whole frames that have been read, until one holds records. False: there is none.
    fn frames(&mut self) -> Result<bool, End> {
        let broken = |e: io::Error| End::Lost(Lost::new(format!("the bridge sent {e}")));
        while let Some((kind, bytes)) = self.reader.next_frame().map_err(broken)? {
            match kind {
                frame::COMMANDS => {
                    self.records.refill().extend_from_slice(bytes);
                    if !self.records.is_empty() {
                        return Ok(true);
                    }
                }
                frame::ALIVE => self.client.alive(),
                frame::DATA_ASK => {
                    let wrong = |what: String| {
                        End::Lost(Lost::new(format!("the bridge is no bridge of ours: {what}")))
                    };
                    let (ask, _) = split_struct::<DataAsk>(bytes).map_err(|e| wrong(e.to_string()))?;
                    self.client.inbox.ask((ask.seq, ask.piece)).map_err(wrong)?;
                }
                frame::RECEIVED => {
                    for entry in bytes.chunks(size_of::<Received>()) {
                        let entry = Received::read_from_bytes(entry)
                            .map_err(|_| End::Lost(Lost::new("the bridge sent a broken acknowledgement")))?;
                        self.client.control_arrived(entry).map_err(|wrong| {
                            End::Lost(Lost::new(format!("the bridge is no bridge of ours: {wrong}")))
                        })?;
                    }
                }
                frame::BYE => return Err(End::Asked),
                _ => return Err(End::Lost(Lost::new(format!("the bridge sent a frame of kind {kind}")))),
            }
        }
        Ok(false)
    }

    /// Reads what there is. `Ok(false)`: nothing.
    fn fill(&mut self) -> Result<bool, End> {
        let mut control = lock(&self.client.control);
        let Some(Connection { attempt, stream }) = &*control else { return Ok(false) };
        let (attempt, result) = (*attempt, self.reader.fill(&mut Now(stream)));
        let broken = match result {
            Ok(0) => io::ErrorKind::UnexpectedEof.into(),
            Ok(n) => {
                let untold = self.client.control_counted.add(n as u64);
                drop(control);
                if untold >= ACKNOWLEDGE_CONTROL {
                    self.client.say(Say::Received, |_| {});
                }
                return Ok(true);
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(e) => e,
        };
        *control = None;
        drop(control);
        if self.client.link.survives() {
            self.client.broken(attempt, Some(&broken));
            return Ok(false);
        }
        match broken.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Err(End::Asked),
            _ => Err(End::Lost(Lost::new(format!("the bridge's connection: {broken}")))),
        }
    }

    fn poll(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, End> {
        loop {
            if let Some(end) = self.client.end.get() {
                return Err(end.clone().map_or(End::Asked, End::Lost));
            }
            if let Some(record) = self.records.take(body).map_err(End::Lost)? {
                RECORDER.note(Stage::Received, record.seq, record.opcode);
                if record.reply_slot != NO_SLOT {
                    self.client.replies.asked();
                }
                return Ok(Some(record));
            }
            if !self.frames()? && !self.fill()? {
                return Ok(None);
            }
        }
    }

    fn wait(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Record, End> {
        loop {
            if let Some(record) = self.poll(body)? {
                return Ok(record);
            }
            let client = Arc::clone(&self.client);
            let mut round = self.poll.begin(&client.replies);
            while self.poll.lasts(&mut round, &client.replies) {
                if let Some(record) = self.poll(body)? {
                    self.poll.end(&round, true);
                    return Ok(record);
                }
                std::hint::spin_loop();
            }
            self.poll.end(&round, false);
            // Lowered before `rest` and the look at the connection, so that no change is missed.
            let _ = client.changed.read();
            rest();
            self.client.flush_executed();
            let connection = lock(&client.control).clone();
            let mut fds = vec![client.stop.as_fd(), client.changed.as_fd()];
            fds.extend(connection.as_ref().map(|connection| connection.stream.as_fd()));
            self.client.keep_alive.rest();
            let woken = wake::readable(&fds, None);
            self.client.keep_alive.wake();
            woken.map_err(|e| End::Lost(Lost::new(format!("waiting for commands: {e}"))))?;
        }
    }

    fn ended(&self, end: End) -> Result<Option<Record>, Lost> {
        match end {
            End::Asked => {
                self.client.finish(None);
                Ok(None)
            }
            End::Lost(lost) => {
                self.client.fail(&lost.reason);
                Err(lost)
            }
        }
    }
}

enum End {
    Asked,
    Lost(Lost),
}

impl Commands for TcpCommands {
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
        self.wait(body, rest).map(Some).or_else(|end| self.ended(end))
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        self.poll(body).or_else(|end| self.ended(end))
    }
}
