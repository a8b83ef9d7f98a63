//! What a worker uses of a session, whichever transport carries it: the dispatcher [`Commands`], every other
//! thread [`Client`].

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use protocol::Status;
use protocol::channel::Record;
use protocol::data::HostRange;
use protocol::link::ProgressUpdate;

use super::end::Lost;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::planned_slots::{Arrivals, Placed, StagingArea};
use super::region::Mapped;
use crate::stream::Stream;

/// Where a dispatcher gets its commands. One thread uses it.
pub trait Commands: Send {
    /// The next record, its body (padding included) in `body`. Waits for one: polls for the configured time,
    /// calls `rest`, and sleeps.
    ///
    /// `Ok(None)`: the client ended the session. `Err`: it is lost: the peer is gone, or sent what no correct
    /// peer sends. Either is final.
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost>;

    /// As [`next`](Self::next), but `Ok(None)` also when there is no record now. Never waits.
    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost>;
}

/// A session's client. Every thread of a worker may use it. No call fails because of the client: once it is
/// gone, calls do nothing.
pub trait Client: Send + Sync {
    /// Answers the `sync` command `seq` in its reply slot. A payload longer than
    /// [`protocol::channel::MAX_PAYLOAD`] is the caller's error and becomes `CUDA_ERROR_UNKNOWN`. A slot that
    /// does not exist ends the session.
    ///
    /// Everything published before by the same thread is visible to the client before the answer is.
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]);

    /// Writes words of the progress area, in order, and wakes the threads that wait for them. Words with a
    /// wrong index are left out.
    fn publish(&self, updates: &[ProgressUpdate]);

    /// To be called before [`reply`](Self::reply) or [`publish`](Self::publish) tells the client that work is
    /// done: does what [`set_before_news`](Self::set_before_news) was given.
    fn before_news(&self) {}

    /// Sets what comes before each news of work. Where client and worker share their memory, nothing does.
    /// To be called once.
    fn set_before_news(&self, _news: Box<dyn Fn() + Send + Sync>) {}

    /// The dispatcher has executed the command `seq`. May reach the client later than this, but before the
    /// dispatcher sleeps in [`Commands::next`].
    fn executed(&self, seq: u64);

    /// The bytes of the `piece`-th data range of command `seq`, to be read by the worker. To be called while
    /// `seq` is being executed: data of a command that did not ask for it is thrown away once
    /// [`executed`](Self::executed) has passed it. `Err`: the range is not the client's to name.
    fn source(&self, seq: u64, piece: u32, range: HostRange) -> Result<Source, Status>;

    /// The place of the `piece`-th data range of command `seq`, to be written by the worker. As
    /// [`source`](Self::source).
    fn sink(&self, seq: u64, piece: u32, range: HostRange) -> Result<Sink, Status>;

    /// Command `seq` names data to be written, and none will be. To be called instead of
    /// [`sink`](Self::sink).
    fn nothing_sent(&self, seq: u64);

    /// Command `seq` does not want its `piece`-th data range, which it names to be read. To be called instead
    /// of [`source`](Self::source), while `seq` is being executed.
    fn nothing_read(&self, _seq: u64, _piece: u32) {}

    /// Keeps client memory from being taken away until the result is dropped, for a command that names it and
    /// is executed later. `None`: nothing can take it away here.
    fn keep(&self, _range: HostRange) -> Option<Mapped> {
        None
    }

    /// Whether data that is to be read when a command's stream has come to it
    /// ([`protocol::data::HostIn::Late`]) is not read before.
    fn reads_late(&self) -> bool {
        false
    }

    /// Ends the session with a reason, which the client sees. [`Commands::next`] returns it too.
    fn lose(&self, reason: &str);

    /// Ends the session's traffic: all threads that wait in here return.
    fn close(&self);

    /// Calls `then` once the session is over, also while the dispatcher is not in [`Commands::next`]; at once
    /// if it is over already. The thread that ends the session makes the call, so `then` must not block. To
    /// be called once.
    fn when_over(&self, _then: Box<dyn FnOnce() + Send>) {}

    /// Why the session was lost, once it is over. `None`: it was not.
    fn lost(&self) -> Option<Lost> {
        None
    }

    /// If the dispatcher sleeps in [`Commands::next`], or is about to, it calls `rest` again before it sleeps
    /// on.
    fn rouse(&self) {}

    /// Whether data comes and goes in chunks rather than through mapped memory.
    fn streams_data(&self) -> bool;

    /// Bytes of bulk data read from and written to the client so far.
    fn traffic(&self) -> (u64, u64);

    /// Bytes of bulk data that a CPU of this side copied between the transport's memory and the driver's,
    /// either way; what a CPU itself was to read (a module, say) is not counted.
    fn copied(&self) -> u64 {
        0
    }

    /// The memory in which incoming data lies where the driver's device can read it ([`Source::Placed`]), for
    /// a driver that registers it with its device. `None`: there is no such memory. It stays as long as the
    /// client does.
    fn staging(&self) -> Option<StagingArea> {
        None
    }

    /// Has `arrivals` be told of what comes into [`staging`](Self::staging), and asked for what of it is not
    /// needed any more. Called once, before the first command is executed.
    fn watch(&self, _arrivals: Arc<dyn Arrivals>) {}

    /// Lets the transport send straight out of the `len` bytes at `at` when [`Outgoing::send_held`] is given
    /// some of them. Without this they are copied first. Called at most once.
    ///
    /// # Safety
    /// The memory stays mapped as long as the client lives.
    unsafe fn adopt(&self, _at: NonNull<u8>, _len: usize) -> Result<(), Lost> {
        Ok(())
    }
}

/// A session whose connections may be lost and replaced.
pub trait Survivor: Send + Sync {
    /// Has `told` called after the session has lost its link (false), or has one again (true). To be called
    /// once.
    fn when_link_changes(&self, told: Box<dyn Fn(bool) + Send + Sync>);

    /// Goes on over new connections, of which this is the control connection: `attempt` is higher than that
    /// of all before. The caller has made sure that it comes from the session's bridge. Does not wait for it;
    /// what cannot be used is closed.
    fn resume(&self, attempt: u32, control: Stream) -> io::Result<()>;
}

/// Bytes that a worker reads.
#[derive(Debug)]
pub enum Source {
    /// They lie in mapped memory. The command counts as having read its source when this is dropped.
    Mapped(Mapped),
    /// They come over the network.
    Incoming(Incoming),
    /// They come over the network, into memory where the device can read them.
    Placed(Placed),
}

/// A place that a worker writes.
#[derive(Debug)]
pub enum Sink {
    /// Mapped memory.
    Mapped(Mapped),
    /// The other end of the network.
    Outgoing(Outgoing),
}
