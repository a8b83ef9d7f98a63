//! The relay of a session whose server is on another host: it takes records off the ring, sends them and the
//! data that they name, and writes what the server answers into the channel.
//!
//! ```text
//!   ring, slots, progress ◀──▶ Machine ◀── run: one thread ──▶ Carrier ◀──▶ the server
//!                              rules          the loop          sockets, or queue pairs
//! ```
//!
//! The rules of a session are in one state machine without I/O ([`machine`]). It touches the channel's
//! memory, and beyond that sees bytes and tells bytes: records become frames in a
//! [`SendBuffer`](crate::framing::SendBuffer), frames become replies, progress, grants and settled data. A
//! transport is a [`Carrier`]: it moves the bytes and nothing else. What differs between transports in *what
//! goes when* is a [`Schedule`](schedule::Schedule), without I/O as well: [`flows`] for `tcp`, [`slots`] for
//! `verbs`. So each rule is tested without a socket, in `tests`, by a carrier in memory that delays, reorders
//! and lies.
//!
//! In reading order:
//! - [`machine`]: records, frames, replies, progress, whether the server is there;
//! - [`regions`]: the memory that records may name; [`unsent`] and [`downloads`]: data under way to the
//!   server and from it; [`sent`]: what goes on a data connection;
//! - [`schedule`], [`flows`], [`slots`]: what goes when, and the two ways to decide that; [`pace`]: how much
//!   should be on its way; [`knowledge`]: what the server has already;
//! - [`compressed`]: where compressed bytes lie until the server has them
//!   ([`compression`](crate::compression) says when there are some);
//! - [`carrier`]: what a transport must do, and the loop that has it do so;
//! - [`handle`], [`mailbox`]: the relay as other threads see it; [`end`]: why it ended;
//! - [`ledger`], [`succession`]: how another process goes on where this one ended.
//!
//! `fuzzing` has a client and a server that keep to nothing.

mod carrier;
mod compressed;
mod downloads;
mod end;
mod flows;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod handle;
mod knowledge;
mod ledger;
mod machine;
mod mailbox;
mod pace;
mod regions;
mod schedule;
mod sent;
mod slots;
mod succession;
#[cfg(test)]
mod survival_tests;
#[cfg(test)]
mod tests;
mod unsent;

pub(super) use self::carrier::{Carrier, Wakeups, run};
pub(super) use self::compressed::{Compressed, Room, file as compressed_file, rooms};
pub(super) use self::end::EndReason;
pub(super) use self::flows::{Carries, Chunk, Flows, ToHash};
#[cfg(fuzzing)]
pub use self::fuzzing::relay_any;
pub(super) use self::handle::RelayHandle;
pub use self::knowledge::CacheUse;
#[doc(hidden)]
pub use self::ledger::take_over_any;
pub(super) use self::ledger::{Ledger, file as ledger_file};
pub(super) use self::machine::{Machine, untrue};
pub(super) use self::mailbox::Mailbox;
pub(super) use self::regions::{ClientMemory, MemoryKey, Span};
pub(super) use self::sent::{Head, Sent};
pub(super) use self::slots::{Slots, Write};
pub(super) use self::succession::{AllMemory, Restored, RestoredLane, RestoredSlots, RestoredWrites};
