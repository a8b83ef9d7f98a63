//! When `In` data goes over `verbs`, and to which of the server's slots it is written.
//!
//! Planned data goes to its slots in turn, in the order of the commands, so that the server knows where it
//! will lie before it comes. What may lie in a slot for long, because its stream may not come to it soon,
//! waits for grants instead and goes to slots of its own (`docs/decisions/0013-nothing-behind-a-command.md`).

use std::collections::{HashMap, VecDeque};

use protocol::link::{COMMANDS_AHEAD, DataGrant, DataHeader, GRANTED_SLOTS, SLOT_DATA, chunk_len, frame};
use protocol::ops::{Hold, OpInfo};
use protocol::wire::WireError;

use super::end::EndReason;
use super::ledger::{self, Ledger, MOST_CHANGED, Progress, Turns};
use super::regions::{ClientMemory, Span};
use super::schedule::{Schedule, Upload};

/// Writes longer than this are signalled each: their completion is nothing beside their transfer.
const SIGNALLED: u64 = 32 << 10;
/// Most parts of pieces that may wait for slots once they are granted.
const MAX_GRANTED: usize = 1 << 18;

/// Part of a piece that may be written, as far as it was not.
#[derive(Debug)]
struct Job<M> {
    seq: u64,
    piece: u32,
    span: Span<M>,
    at: u64,
    end: u64,
    chunk: u64,
}

/// A write to be posted: a header, and behind it bytes of the client's memory.
#[derive(Debug)]
pub(in crate::bridge) struct Write<M> {
    pub(in crate::bridge) slot: u32,
    pub(in crate::bridge) header: DataHeader,
    pub(in crate::bridge) source: Span<M>,
    /// To be given to [`Slots::written`] when the write is done.
    pub(in crate::bridge) token: u64,
    /// It is to be said at once when the write is done. Otherwise a later write's completion may say so.
    pub(in crate::bridge) signal: bool,
}

/// A write that was given out. It keeps the memory registered.
#[derive(Debug)]
struct Posted<M> {
    seq: u64,
    source: Span<M>,
}

/// Whether the program may hold up the session's streams for as long as it likes: by host functions, or by
/// words of memory.
#[derive(Debug, Default)]
struct Holds {
    /// Points at which streams wait for the client, less those that it has signalled.
    host: u64,
    /// Some stream has waited for a word.
    word: bool,
}

impl Holds {
    fn note(&mut self, hold: Hold) {
        match hold {
            Hold::None => {}
            Hold::UntilSignal => self.host += 1,
            Hold::Ends => self.host = self.host.saturating_sub(1),
            Hold::UntilWord => self.word = true,
        }
    }

    fn any(&self) -> bool {
        self.word || self.host > 0
    }
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) struct Slots<M> {
    /// In the commands' order.
    planned: VecDeque<Job<M>>,
    /// In the grants' order.
    granted: VecDeque<Job<M>>,
    /// By command and piece: what waits for grants, and how much of it was granted.
    asked: HashMap<(u64, u32), (Span<M>, u64)>,
    /// Free slots for planned data, in the order in which they are to be written, and those for granted data.
    free: VecDeque<u32>,
    free_granted: VecDeque<u32>,
    /// Behind the one that was given out last.
    next_slot: u32,
    /// For each slot whether it is free.
    is_free: Vec<bool>,
    posted: Vec<Option<Posted<M>>>,
    tokens: Vec<usize>,
    /// Most bytes of a write.
    most: u64,
    queues: u64,
    holds: Holds,
    /// The server acknowledges what it has received.
    acknowledged: bool,
    /// What is to be noted, if it is.
    changed: Option<Vec<Change>>,
}

/// A change that a ledger has to know of.
#[derive(Debug)]
enum Change {
    /// Of a command's piece.
    Piece(u64, u32, Progress),
    /// A slot is in use, or free again.
    Slot(u32, bool),
}

impl<M> Slots<M> {
    /// For `count` slots of `slot_size` bytes, written over `queues` queues with `under_way` writes at a
    /// time.
    pub(in crate::bridge) fn new(count: u32, slot_size: u32, queues: usize, under_way: usize) -> Slots<M> {
        let planned = count.saturating_sub(GRANTED_SLOTS);
        Slots {
            planned: VecDeque::with_capacity(1024),
            granted: VecDeque::new(),
            asked: HashMap::new(),
            free: (0..planned).collect(),
            free_granted: (planned..count).collect(),
            next_slot: 0,
            is_free: vec![true; count as usize],
            posted: std::iter::repeat_with(|| None).take(under_way).collect(),
            tokens: (0..under_way).rev().collect(),
            most: u64::from(slot_size.saturating_sub(SLOT_DATA)).max(1),
            queues: queues as u64,
            holds: Holds::default(),
            acknowledged: false,
            changed: None,
        }
    }

    /// The same, of a session whose server acknowledges what it has received.
    pub(in crate::bridge) fn acknowledged(self) -> Slots<M> {
        Slots { acknowledged: true, ..self }
    }

    /// The same, and what is done is [noted](Schedule::note).
    pub(in crate::bridge) fn noted(self) -> Slots<M> {
        Slots { changed: Some(Vec::new()), ..self }
    }

    fn changed(&mut self, change: Change) {
        if let Some(changed) = &mut self.changed {
            changed.push(change);
        }
    }

    /// Goes on with what another process has left: pieces with how far they were given out, in the order of
    /// their commands, and the slots that are in use.
    pub(super) fn restore(&mut self, pieces: Vec<(Upload<M>, ledger::Job)>, in_use: &[bool], turns: Turns) {
        for (Upload { seq, piece, span, .. }, ledger::Job { flow, at, granted, .. }) in pieces {
            let len = span.len();
            if flow != ledger::ASKED {
                // Cut as it was, because the server knows where each part lies.
                let job = self.job(seq, piece, span, 0, len);
                self.planned.extend((at < len).then_some(Job { at, ..job }));
                continue;
            }
            if at < granted {
                let job = self.job(seq, piece, span.clone(), at, granted);
                self.granted.push_back(job);
            }
            if granted < len {
                self.asked.insert((seq, piece), (span, granted));
            }
        }
        let count = self.is_free.len() as u32;
        let planned = count.saturating_sub(GRANTED_SLOTS);
        self.is_free = in_use.iter().map(|used| !used).collect();
        self.is_free.resize(count as usize, true);
        let first = turns.next_slot % planned.max(1);
        self.next_slot = first;
        self.free = (first..planned).chain(0..first).collect();
        self.free.retain(|slot| self.is_free[*slot as usize]);
        self.free_granted.retain(|slot| self.is_free[*slot as usize]);
        self.holds = Holds { host: turns.host_holds, word: turns.word_hold };
    }

    /// Counts a write of another process as under way. Gives its token; `None`: there cannot be such a write.
    pub(super) fn restore_write(&mut self, seq: u64, slot: u32, source: Span<M>) -> Option<u64> {
        let fits = (slot as usize) < self.is_free.len() && source.len() <= self.most;
        let token = self.tokens.pop().filter(|_| fits)?;
        self.posted[token] = Some(Posted { seq, source });
        Some(token as u64)
    }

    fn job(&self, seq: u64, piece: u32, span: Span<M>, at: u64, end: u64) -> Job<M> {
        let chunk = chunk_len(end - at, self.queues, self.most);
        Job { seq, piece, span, at, end, chunk }
    }

    /// Whether [`next_write`](Self::next_write) gives one.
    pub(in crate::bridge) fn has_writes(&self) -> bool {
        let granted = !self.granted.is_empty() && !self.free_granted.is_empty();
        let planned = !self.planned.is_empty() && !self.free.is_empty();
        !self.tokens.is_empty() && (granted || planned)
    }

    /// The next write. It counts as under way from now on.
    pub(in crate::bridge) fn next_write(&mut self) -> Option<Write<M>> {
        let &token = self.tokens.last()?;
        // Granted data first: work that goes on already waits for it.
        let granted = !self.granted.is_empty() && !self.free_granted.is_empty();
        let (jobs, free) = match granted {
            true => (&mut self.granted, &mut self.free_granted),
            false => (&mut self.planned, &mut self.free),
        };
        let (job, &slot) = (jobs.front_mut()?, free.front()?);
        let len = (job.end - job.at).min(job.chunk);
        let source = job.span.part(job.at, len)?;
        let header = DataHeader { seq: job.seq, offset: job.at, piece: job.piece, len: len as u32 };
        job.at += len;
        let (given, over) = (Progress::Given(job.at), job.at == job.end);
        if over {
            jobs.pop_front();
        }
        let signal = len > SIGNALLED || jobs.is_empty();
        free.pop_front();
        if !granted {
            self.next_slot = slot + 1;
        }
        self.is_free[slot as usize] = false;
        self.changed(Change::Piece(header.seq, header.piece, given));
        self.changed(Change::Slot(slot, true));
        self.tokens.pop();
        self.posted[token] = Some(Posted { seq: header.seq, source: source.clone() });
        Some(Write { slot, header, source, token: token as u64, signal })
    }

    /// A write is done: gives its command and length.
    pub(in crate::bridge) fn written(&mut self, token: u64) -> Option<(u64, u64)> {
        let Posted { seq, source } = self.posted.get_mut(token as usize)?.take()?;
        self.tokens.push(token as usize);
        Some((seq, source.len()))
    }

    fn slots_free(&mut self, body: &[u8]) -> Result<(), EndReason> {
        let planned = (self.is_free.len() as u32).saturating_sub(GRANTED_SLOTS);
        for slot in body.chunks(4) {
            let slot = slot.first_chunk::<4>().map(|b| u32::from_le_bytes(*b));
            match slot.and_then(|slot| Some((slot, self.is_free.get_mut(slot as usize)?))) {
                Some((slot, free)) if !*free => {
                    *free = true;
                    let list = if slot < planned { &mut self.free } else { &mut self.free_granted };
                    list.push_back(slot);
                    if let Some(changed) = &mut self.changed {
                        changed.push(Change::Slot(slot, false));
                    }
                }
                _ => {
                    return Err(EndReason::Server(format!("it frees slot {slot:?}, which is not in use")));
                }
            }
        }
        Ok(())
    }
}

impl<M: ClientMemory> Schedule for Slots<M> {
    type Memory = M;
    const COMMANDS_AHEAD: Option<u64> = Some(COMMANDS_AHEAD);

    fn is_acknowledged(&self) -> bool {
        self.acknowledged
    }

    fn command(&mut self, _seq: u64, info: &OpInfo, _body: &[u8]) -> Result<(), WireError> {
        self.holds.note(info.hold);
        Ok(())
    }

    /// Slots become free in the order in which they were given out: what may lie in one for long takes none
    /// before its stream has come to it.
    fn push(&mut self, Upload { seq, piece, span, late }: Upload<M>) -> bool {
        if late || self.holds.any() {
            self.asked.insert((seq, piece), (span, 0));
            self.changed(Change::Piece(seq, piece, Progress::Asked));
            return true;
        }
        let end = span.len();
        let job = self.job(seq, piece, span, 0, end);
        self.planned.push_back(job);
        false
    }

    fn grant(&mut self, DataGrant { seq, piece, upto, .. }: DataGrant) -> Result<(), EndReason> {
        let Some((span, granted)) = self.asked.get_mut(&(seq, piece)) else { return Ok(()) };
        let (at, end) = (*granted, upto.min(span.len()));
        if end <= at {
            return Ok(());
        }
        if self.granted.len() >= MAX_GRANTED {
            return Err(EndReason::Server("it grants data in more parts than it takes".into()));
        }
        *granted = end;
        let span = span.clone();
        if end == span.len() {
            self.asked.remove(&(seq, piece));
        }
        let job = self.job(seq, piece, span, at, end);
        self.granted.push_back(job);
        self.changed(Change::Piece(seq, piece, Progress::Granted(end)));
        match &self.changed {
            Some(changed) if changed.len() > MOST_CHANGED => {
                Err(EndReason::Server("it sent too many grants in a frame".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn note(&mut self, ledger: &mut Ledger) {
        for change in self.changed.iter_mut().flat_map(|changed| changed.drain(..)) {
            match change {
                Change::Piece(seq, piece, progress) => ledger.progress(seq, piece, progress),
                Change::Slot(slot, used) => ledger.slot(slot, used),
            }
        }
        let Holds { host: host_holds, word: word_hold } = self.holds;
        ledger.turns(Turns { next_slot: self.next_slot, host_holds, word_hold });
    }

    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<bool, EndReason> {
        if kind != frame::SLOTS_FREE {
            return Ok(false);
        }
        self.slots_free(body).map(|()| true)
    }
}
