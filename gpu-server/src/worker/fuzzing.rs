//! A client that does whatever it likes with its session, as a fuzzer says: operations of the table, in any
//! order, with values and handles of which some are valid.
//!
//! [`session_any`] runs the dispatcher ([`session::run`](super::session::run)) and all below it on a software
//! GPU. It checks that each command is answered at most once, in its own slot; that progress only grows; that
//! the quota holds; and that a session which is lost has a reason.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use host_bridge::endpoint::{Client, Commands, Lost, Mapped, Region, Sink, Source};
use identity::Identity;
use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_DEVICES, MAX_PAYLOAD, MAX_RECORD, NO_SLOT, Record};
use protocol::data::{HostIn, HostRange, Place};
use protocol::fuzzing::Steps;
use protocol::handle::{ContextId, EventId, FunctionId, GraphId, ModuleId, StreamId};
use protocol::link::{ProgressUpdate, progress};
use protocol::ops::copy::{MemcpyDtoHInline, MemcpyHtoD, Memset};
use protocol::ops::event::EventCreate;
use protocol::ops::graph::{
    ChangedNode, GraphChangeNodes, GraphInstantiate, GraphLaunch, GraphNode, GraphNodes,
};
use protocol::ops::launch::Launch;
use protocol::ops::memory::{DEVICE_PART, MemAlloc, MemGrow, SPACE, window};
use protocol::ops::module::{FunctionBind, ModuleLoadByName, Param};
use protocol::ops::stream::{StreamCreate, StreamSynchronize};
use protocol::ops::{self, Class, Op};
use protocol::wire::{Bytes, Wire, Writer};

use super::residence::{Orders, Residence};
use super::turns::{Link, Turns};
use super::{Shared, session};
use crate::config::Backing;
use crate::cuda_ipc::Broker;
use crate::direct::Directs;
use crate::driver;
use crate::driver::quota::Quota;
use crate::limits::{Amounts, Limits};
use crate::pages::Page;
use crate::room::Room;
use crate::worker_protocol::Kind;

/// Commands of one session.
const COMMANDS: u64 = 100;
/// Device memory of the GPU, and what a session may have of it and of page-locked memory.
const MEMORY: u64 = 64 << 20;
const LIMIT: u64 = 16 << 20;
const PINNED: u64 = 4 << 20;
/// Client memory.
const ARENA: usize = 256 << 10;
const SLOTS: u16 = 8;
/// The first context, and stream, that a program makes.
const MADE_CONTEXT: u32 = MAX_DEVICES;
const MADE_STREAM: u32 = MAX_CONTEXTS;

/// Kernels whose time is bounded, whatever their arguments: `scale`, `store` and `share`.
const IMAGE: &str = include_str!("fuzzing.ptx");
const KERNELS: [(&str, &[(u32, u32)]); 3] =
    [("scale", &[(0, 8), (8, 4), (12, 4)]), ("store", &[(0, 8)]), ("share", &[(0, 8)])];

/// A key that is not worth making anew for each session.
static IDENTITY: LazyLock<Arc<Identity>> = LazyLock::new(|| Arc::new(Identity::generate().expect("a key")));
/// Sessions have windows at the same addresses, and so run one after the other.
static ONE: Mutex<()> = Mutex::new(());

/// What the client has seen of its session.
#[derive(Default)]
struct Seen {
    /// Commands that await an answer, with their slots.
    asked: HashMap<u64, u16>,
    answers: u64,
    lost: Option<String>,
}

struct AnyClient {
    arena: Arc<Region>,
    image: Arc<Region>,
    seen: Mutex<Seen>,
    sent: AtomicU64,
    executed: AtomicU64,
    before_news: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl AnyClient {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self, range: HostRange, write: bool) -> Result<Mapped, Status> {
        let region = match range.place {
            Place::Arena => &self.arena,
            Place::Region(1) if !write => &self.image,
            Place::Region(_) => return Err(Status::INVALID_VALUE),
        };
        Mapped::of(region, range.len).ok_or(Status::INVALID_VALUE)
    }
}

impl Client for AnyClient {
    fn reply(&self, seq: u64, slot: u16, _status: Status, payload: &[u8]) {
        assert!(payload.len() <= MAX_PAYLOAD, "an answer of {} bytes to command {seq}", payload.len());
        let mut seen = self.seen();
        assert_eq!(seen.asked.remove(&seq), Some(slot), "an answer to command {seq} in slot {slot}");
        seen.answers += 1;
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        for update in updates {
            assert!(update.seq <= self.sent.load(Ordering::SeqCst), "{update:?}");
            // A wrong index is left out.
            assert!(
                [progress::STREAM, progress::ERROR, progress::OUTPUT, progress::WATCHED]
                    .contains(&update.kind),
                "{update:?}"
            );
        }
    }

    fn before_news(&self) {
        self.before_news.get().inspect(|news| news());
    }

    fn set_before_news(&self, news: Box<dyn Fn() + Send + Sync>) {
        assert!(self.before_news.set(news).is_ok(), "twice");
    }

    fn executed(&self, seq: u64) {
        assert!(seq <= self.sent.load(Ordering::SeqCst));
        assert!(self.executed.swap(seq, Ordering::SeqCst) <= seq, "what was executed is not any more");
    }

    fn source(&self, _seq: u64, _piece: u32, range: HostRange) -> Result<Source, Status> {
        self.memory(range, false).map(Source::Mapped)
    }

    fn sink(&self, _seq: u64, _piece: u32, range: HostRange) -> Result<Sink, Status> {
        self.memory(range, true).map(Sink::Mapped)
    }

    fn nothing_sent(&self, _seq: u64) {}

    fn lose(&self, reason: &str) {
        assert!(!reason.is_empty());
        self.seen().lost.get_or_insert_with(|| reason.to_owned());
    }

    fn close(&self) {}

    fn streams_data(&self) -> bool {
        false
    }

    fn traffic(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// The session's commands, one after the other.
struct Program<'p> {
    steps: Steps<'p>,
    client: Arc<AnyClient>,
    quota: Quota,
    seq: u64,
    slot: u16,
    /// Commands that come before the next step: a sequence that a correct client sends.
    ahead: Vec<(u16, Vec<u8>)>,
}

impl Program<'_> {
    fn say<'a, T: Op<'a>>(&mut self, op: &T) {
        let mut body = Vec::new();
        ops::encode(op, &mut body);
        self.ahead.push((T::INFO.opcode, body));
    }

    fn step(&mut self) {
        let stream = StreamId(self.steps.pick(&[0, MADE_STREAM, MADE_STREAM + 1]));
        match self.steps.below(24) {
            0 => {
                let (device, address) = (0, window(0));
                self.say(&MemGrow { device, address, size: 4 << 20 });
                self.say(&MemAlloc { address, size: 1 << 20 });
            }
            1 => {
                let module = ModuleId(u32::from(self.steps.byte() & 1) + 1);
                let image = HostIn::Inline(IMAGE.as_bytes());
                self.say(&ModuleLoadByName { context: ContextId(0), module, image });
                for (index, (name, params)) in (0..).zip(KERNELS) {
                    let params =
                        params.iter().map(|(offset, size)| Param { offset: *offset, size: *size }).collect();
                    self.say(&FunctionBind { function: FunctionId::new(module, index), name, params });
                }
            }
            2 => {
                let flags = u32::from(self.steps.byte() & 1);
                self.say(&StreamCreate { context: ContextId(0), stream, flags, priority: 0 });
            }
            3 => {
                let event = EventId(u32::from(self.steps.byte() % 4));
                self.say(&EventCreate { context: ContextId(0), event, flags: 0 });
            }
            4 => {
                let index = self.steps.below(KERNELS.len()) as u32;
                let address = window(0) + u64::from(self.steps.u16()) * 4;
                let params = [&address.to_le_bytes()[..], &3u32.to_le_bytes(), &64u32.to_le_bytes()].concat();
                let size = KERNELS[index as usize].1.iter().map(|(_, size)| *size as usize).sum();
                self.say(&Launch {
                    function: FunctionId::new(ModuleId(1), index),
                    stream,
                    grid: [2, 1, 1],
                    block: [32, 1, 1],
                    dynamic_shared: 0,
                    attributes: vec![],
                    params: &params[..size],
                });
            }
            5 => {
                let bytes = self.steps.bytes();
                let dst = window(0) + u64::from(self.steps.u16());
                self.say(&MemcpyHtoD { stream, dst, src: HostIn::Inline(bytes) });
            }
            6 => {
                let len = self.steps.u16().into();
                self.say(&MemcpyDtoHInline { stream, src: window(0), len });
            }
            7 => self.say(&StreamSynchronize { stream }),
            8 => self.graph(stream),
            _ => self.any(),
        }
        self.ahead.reverse();
    }

    /// A graph of fills, changes of its nodes, and a launch.
    fn graph(&mut self, stream: StreamId) {
        let graph = GraphId(u32::from(self.steps.byte() % 4));
        let mut fill = || {
            let dst = window(0) + u64::from(self.steps.u16());
            let mut body = Vec::new();
            let fill = Memset { stream, dst, pitch: 0, value: 5, element: 4, width: 1, height: 1 };
            ops::encode(&fill, &mut body);
            Bytes(body)
        };
        let opcode = Memset::INFO.opcode;
        let nodes = (0..3).map(|_| GraphNode { opcode, dependencies: vec![], body: fill() }).collect();
        let changed = ChangedNode { place: 0, opcode, body: fill() };
        let mut bytes = Vec::new();
        GraphNodes { nodes }.put(&mut Writer(&mut bytes));
        let nodes = HostIn::Inline(&bytes);
        self.say(&GraphInstantiate { context: ContextId(0), graph, flags: 0, nodes });
        let last = self.steps.byte() & 1 != 0;
        let place = u32::from(self.steps.byte() % 5);
        let other = self.steps.u16();
        let opcode = self.steps.pick(&[opcode, 0, Launch::INFO.opcode, other]);
        let any = ChangedNode { place, opcode, body: Bytes(self.steps.bytes().to_vec()) };
        self.say(&GraphChangeNodes { graph, last, nodes: vec![changed, any] });
        self.say(&GraphLaunch { graph, stream });
    }

    /// Any operation, with any values.
    fn any(&mut self) {
        let all = ops::all().count();
        let at = usize::from(self.steps.byte()) % all;
        let Some(info) = ops::all().nth(at) else { return };
        let mut body = Vec::new();
        self.steps.request(info, &mut value, &mut body);
        match self.steps.byte() {
            // Not what the table says.
            255 => body.truncate(usize::from(self.steps.byte())),
            254 => body.extend(self.steps.bytes()),
            _ => {}
        }
        body.truncate(MAX_RECORD - 16);
        self.ahead.push((info.opcode, body));
    }
}

/// A value for a field: of something that there may be, or any.
fn value(name: &str, kind: &str, steps: &mut Steps<'_>) -> u64 {
    let any = steps.byte();
    if any > 235 {
        return steps.number();
    }
    let small = u64::from(any % 4);
    match (name, kind) {
        // How long a kernel takes is the client's choice, and here it is a short time.
        ("grid" | "block" | "cluster", _) => [1, 1, 2, 0][small as usize],
        (_, "ContextId") => [0, 0, u64::from(MADE_CONTEXT), u64::from(MADE_CONTEXT) + 1][small as usize],
        (_, "StreamId") => {
            [0, u64::from(MADE_STREAM), u64::from(MADE_STREAM) + 1, u64::from(MADE_STREAM) + 2]
                [small as usize]
        }
        (_, "FunctionId") => FunctionId::new(ModuleId(1 + u32::from(any >> 2 & 1)), small as u32).0,
        (_, kind) if kind.ends_with("Id") => small,
        ("address" | "dst" | "src" | "begin" | "handle" | "argument", "u64") => {
            let base = [window(0), window(0), window(0) + DEVICE_PART, SPACE][small as usize];
            base + (u64::from(steps.u16()) << [0, 4, 12, 21][usize::from(any >> 2 & 3)])
        }
        ("region", _) => small & 1,
        ("offset", "HostRange") => 0,
        ("size" | "len" | "bytes" | "width", _) => u64::from(steps.u16()) << [0, 0, 8, 12][small as usize],
        ("device" | "peer", "u32") => small / 3,
        _ => u64::from(any),
    }
}

impl Commands for Program<'_> {
    fn next(&mut self, body: &mut Vec<u8>, rest: &mut dyn FnMut()) -> Result<Option<Record>, Lost> {
        rest();
        self.try_next(body)
    }

    fn try_next(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, Lost> {
        assert!(self.quota.held_on_devices() <= LIMIT, "{} bytes are held", self.quota.held_on_devices());
        if let Some(reason) = self.client.seen().lost.clone() {
            return Err(Lost { reason });
        }
        while self.ahead.is_empty() {
            if self.steps.is_over() || self.seq >= COMMANDS {
                return Ok(None);
            }
            self.step();
        }
        let Some((opcode, bytes)) = self.ahead.pop() else { return Ok(None) };
        *body = bytes;
        body.resize(body.len().next_multiple_of(16), 0);
        self.seq += 1;
        self.client.sent.store(self.seq, Ordering::SeqCst);
        let answered = ops::info(opcode).is_some_and(|info| info.class == Class::Sync);
        let mut reply_slot = NO_SLOT;
        if answered {
            self.slot = (self.slot + 1) % SLOTS;
            reply_slot = self.slot;
            self.client.seen().asked.insert(self.seq, reply_slot);
        }
        Ok(Some(Record { opcode, reply_slot, seq: self.seq }))
    }
}

fn memory(len: usize, content: &[u8]) -> Arc<Region> {
    let region = Region::own(NonZeroUsize::new(len).expect("it has bytes")).expect("memory");
    Mapped::of(&region, len as u64).expect("all of it").write(0, content);
    region
}

/// Runs a session, whatever its client does. Gives how many commands were answered.
pub fn session_any(bytes: &[u8]) -> u64 {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let client = Arc::new(AnyClient {
        arena: memory(ARENA, &[]),
        image: memory(IMAGE.len(), IMAGE.as_bytes()),
        seen: Mutex::default(),
        sent: AtomicU64::new(0),
        executed: AtomicU64::new(0),
        before_news: OnceLock::new(),
    });
    let quota = Quota::default();
    let mut backend = driver::make(&Backing::software(MEMORY, 1), quota.clone())
        .map_err(|e| e.reason)
        .expect("a software GPU");
    let (terms, meter) = (Arc::new(Page::new().expect("a page").0), Arc::new(Page::new().expect("a page").0));
    let bell: OwnedFd = std::fs::File::options().write(true).open("/dev/null").expect("a bell").into();
    let link = Link { terms: Arc::clone(&terms), meter: Arc::clone(&meter), bell: Arc::new(bell) };
    // A daemon that refuses everything.
    let broker = Broker::new(Arc::clone(&link.bell));
    broker.close();
    let amounts = Amounts { device_memory: LIMIT, pinned_memory: PINNED };
    let limits = Limits { session: amounts, total: amounts, ..Limits::default() };
    quota.begin(limits, Arc::clone(&terms), Arc::clone(&meter), Arc::clone(&broker), None);
    let directs = Directs::new(Arc::clone(&IDENTITY), Arc::clone(&broker), None, true);
    let shared = Shared::new(quota.clone(), directs);
    let room = Arc::new(Room { meter, bell: Arc::clone(&link.bell) });
    let residence = Residence::new(Arc::new(Orders::default()), room, terms, false);
    let turns = Turns::new(link, 0);
    backend.share(broker);
    let steps = Steps::new(bytes);
    let mut program =
        Program { steps, client: Arc::clone(&client), quota, seq: 0, slot: 0, ahead: Vec::new() };
    let listener: Arc<dyn Client> = Arc::<AnyClient>::clone(&client);
    let lost = session::run(&mut program, &listener, &mut *backend, &shared, Kind::Gpu, turns, residence);
    assert!(lost.is_none_or(|lost| !lost.reason.is_empty()));
    drop(backend);
    client.seen().answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_client_gets_answers_or_loses_its_session_with_a_reason() {
        let programs = protocol::fuzzing::programs("session", 150, 600);
        let answers: u64 = programs.iter().map(|program| session_any(program)).sum();
        assert!(answers > 1000, "{answers} commands were answered");
    }
}
