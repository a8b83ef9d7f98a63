//! Small results that are fetched together with the wait before them.
//!
//! Programs wait for their work and then copy a few bytes to the host, often several times and again in every
//! step: Thrust's algorithms do, and loops of a kernel and its results. Each copy would be a round trip right
//! after one. So once a program has followed a wait by the same copy twice, that copy is put in front of the
//! wait, and its answer is here when the program calls for it. A copy to the host is a wait as well, so
//! whole rows of copies are fetched at once.
//!
//! The bytes are what the program's own copy would find, because nothing can have changed them in between:
//!
//! - The copy is on the legacy default stream, so it comes behind everything that this one waits for. There
//!   must be no pending work on other streams of the context, and no other context.
//! - Between the copy and the wait, and from the wait to the program's call, no command may have come from
//!   any thread.
//! - The process must not share memory with another.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use crate::abi::result::Result;
use client::handle::StreamId;
use client::ops::copy::{MemcpyDtoHInline, MemcpyDtoHInlineReply};
use client::seq::Seq;
use client::session::{Ahead, Pending, Session};
use client::wire::Wire;
use client::{activity, lock};

/// How often a copy must have followed the same wait. An unused answer counts against several that were used.
const ENOUGH: i32 = 2;
const UNUSED: i32 = 4;
const RANGE: std::ops::RangeInclusive<i32> = -32..=16;
/// Maximum number of copies fetched with one wait.
const MOST: usize = 4;
/// Maximum number of waits whose next copy is remembered.
const MOST_KNOWN: usize = 64;

/// What a copy may directly follow.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// A wait for the stream or the context.
    Work,
    /// A copy to the host from this address.
    Copy(u64),
}

/// Device memory that fits in an answer.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub src: u64,
    pub len: u32,
}

/// The copy that followed a wait the last time, and how likely it is to follow it again.
struct Next {
    /// As long as the longest one, because the first of several results is often the others' length.
    piece: Piece,
    times: i32,
}

struct Asked {
    after: Wait,
    piece: Piece,
    answer: Ahead<'static, MemcpyDtoHInlineReply>,
}

#[derive(Default)]
struct State {
    next: HashMap<Wait, Next>,
    /// The last wait, or the last copy that was answered with it, and the record of the wait.
    last: Option<(Wait, Seq)>,
    asked: VecDeque<Asked>,
}

impl State {
    /// Notes that `piece` was copied right after `after`.
    fn learn(&mut self, after: Wait, piece: Piece) {
        if self.next.len() >= MOST_KNOWN && !self.next.contains_key(&after) {
            self.next.clear();
        }
        let next = self.next.entry(after).or_insert(Next { piece, times: 0 });
        if next.piece.src == piece.src {
            next.piece.len = next.piece.len.max(piece.len);
            next.times = (next.times + 1).min(*RANGE.end());
        } else {
            *next = Next { piece, times: next.times.min(1) };
        }
    }

    /// Drops the answers that the program has not used.
    fn give_up(&mut self) {
        for asked in self.asked.drain(..) {
            if let Some(next) = self.next.get_mut(&asked.after) {
                next.times = (next.times - UNUSED).max(*RANGE.start());
            }
        }
    }

    /// The copy that is likely to follow `wait`.
    fn expects(&self, wait: Wait) -> Option<Piece> {
        self.next.get(&wait).filter(|next| next.times >= ENOUGH).map(|next| next.piece)
    }

    /// Requests what is likely to be copied after `wait`.
    fn ask(&mut self, session: &'static Session, stream: StreamId, wait: Wait) {
        let mut after = wait;
        while let Some(piece) = self.expects(after).filter(|_| self.asked.len() < MOST) {
            let op = MemcpyDtoHInline { stream, src: piece.src, len: piece.len };
            let Ok(Some(answer)) = session.submit_ahead(&op) else { return };
            self.asked.push_back(Asked { after, piece, answer });
            after = Wait::Copy(piece.src);
        }
    }

    /// Whether the requests and the wait directly follow each other.
    fn are_adjacent(&self, wait: Seq) -> bool {
        let mut seqs = self.asked.iter().map(|asked| asked.answer.seq()).chain([wait]);
        let mut last = seqs.next();
        seqs.all(|seq| last.replace(seq).is_none_or(|before| seq.is_next_after(before)))
    }
}

/// A context's small results.
#[derive(Default)]
pub(crate) struct CopiesAhead {
    state: Mutex<State>,
}

impl CopiesAhead {
    /// Submits a wait for everything that the legacy default stream `stream` waits for, and in front of it
    /// the copies that are likely to follow. `beside` returns the last work that may change device memory and
    /// that the wait does not cover, if all such work is known to be done.
    pub fn submit<R: for<'r> Wire<'r>>(
        &self,
        session: &'static Session,
        stream: StreamId,
        wait: Wait,
        beside: impl Fn() -> Option<Option<Seq>>,
        submit: impl FnOnce() -> Result<Pending<'static, R>>,
    ) -> Result<Pending<'static, R>> {
        let mut state = lock(&self.state);
        state.give_up();
        state.last = None;
        let before = state.expects(wait).filter(|_| !activity::is_observed()).and_then(|_| beside());
        if before.is_some() {
            state.ask(session, stream, wait);
        }
        let pending = submit()?;
        if !state.asked.is_empty() && (!state.are_adjacent(pending.seq()) || beside() != before) {
            state.asked.clear();
        }
        state.last = Some((wait, pending.seq()));
        Ok(pending)
    }

    /// The bytes of a copy to the host that the program calls for, if they were fetched with the wait before
    /// it.
    pub fn take(&self, session: &Session, piece: Piece) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        let (after, seq) = state.last?;
        if session.last_seq() != seq {
            return None;
        }
        state.learn(after, piece);
        let holds = |asked: &mut Asked| asked.piece.src == piece.src && asked.piece.len >= piece.len;
        let asked = state.asked.pop_front_if(holds)?;
        state.last = Some((Wait::Copy(piece.src), seq));
        drop(state);
        let Ok(answer) = asked.answer.take() else {
            // Memory of that length may be gone.
            lock(&self.state).next.remove(&after);
            return None;
        };
        let mut bytes = answer.bytes.0;
        bytes.truncate(piece.len as usize);
        Some(bytes)
    }
}
