//! Instantiated graphs.
//!
//! An instance is a list of nodes, with those of child graphs among the others, and the plan of a launch:
//! steps that are enqueued on the launch's stream one after the other. Work that the server can do is
//! collected into as few graphs on the server as possible, so a graph of kernels, fills and copies inside the
//! device is one step and one command. Between them are the steps that only this process can do: host
//! functions, copies from and to host memory, events, and kernels of another context than the first kernel's.
//!
//! A change of parameters marks nodes, and the next launch sends them to the server.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::result::Result;
use crate::abi::types::{MemsetNodeParams, launch_attr};
use crate::graph::launch_steps::{self, Bounce};
use crate::graph::node_work::{Kernel, Way, Work};
use crate::graph::user_object::Held;
use crate::graph::{Graph, PROGRAMMATIC, conditional};
use crate::memory::graph_chunks::{self, Segment};
use crate::memory::graph_memory::GraphMemory;
use crate::memory::staging::Staging;
use crate::memory::{pinned_regions, transfer};
use crate::process::context::Context;
use crate::process::driver::{Driver, Server, driver};
use crate::process::fences::{self, OwnEvent};
use crate::process::holds;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use crate::work::{copy_boxes, fill};
use client::data::HostIn;
use client::handle::{GraphId, StreamId};
use client::handles::Slab;
use client::ops::graph::{
    ChangedNode, GraphChange, GraphChangeNodes, GraphDestroy, GraphInstantiate, GraphInstantiateDraft,
    GraphLaunch, GraphNode, GraphNodes, GraphPart, GraphParts, GraphUpdate, GraphUpload,
};
use client::session::Session;
use client::wire::{Bytes, Wire, Writer};
use client::{Status, lock};

/// Maximum size of a description that is sent inside the record, in bytes.
const INLINE: usize = 24 << 10;

/// `CUgraphExecUpdateResult`.
pub(crate) mod update {
    pub const SUCCESS: u32 = 0;
    pub const ERROR: u32 = 1;
    pub const TOPOLOGY: u32 = 2;
    pub const NODE_TYPE: u32 = 3;
    pub const PARAMETERS: u32 = 5;
    pub const NOT_SUPPORTED: u32 = 6;
    pub const ATTRIBUTES: u32 = 8;
}

/// `CUgraphInstantiate_flags`.
pub(crate) mod flag {
    pub const AUTO_FREE_ON_LAUNCH: u64 = 1;
    pub const UPLOAD: u64 = 2;
    pub const DEVICE_LAUNCH: u64 = 4;
    pub const USE_NODE_PRIORITY: u64 = 8;
    pub const ALL: u64 = 15;
}

/// A node of an instance.
pub(crate) struct Flat {
    /// The graph that it was made from, and its number there. Graph 0: the start of the child graph of the
    /// node with this number.
    graph: u64,
    id: u64,
    pub owner: Weak<Graph>,
    pub work: Work,
    /// Places of the earlier nodes that it depends on.
    before: Vec<usize>,
    /// For a node that stands for the end of a child graph: the place of its beginning.
    begins: Option<usize>,
    enabled: bool,
    bounce: Option<Arc<Bounce>>,
    /// The context of the instance's graphs on the server. `None` in the graph of a conditional node.
    home: Option<&'static Context>,
    /// Its [`share`](Self::share) when the steps were made. `None`: it is in no step.
    planned: Option<(bool, bool)>,
}

/// A step of a launch.
enum Step {
    /// A graph on the server, and the places of its nodes.
    Server(GraphId, Vec<usize>),
    /// A node that this process enqueues.
    Alone(usize),
}

/// An instantiated graph.
pub(crate) struct Exec {
    pub context: &'static Context,
    pub unique: u64,
    pub flags: u64,
    state: Mutex<State>,
    /// The graph, if it has memory nodes: then this is its only instance.
    claimed: Weak<Graph>,
}

struct State {
    nodes: Vec<Flat>,
    places: HashMap<(u64, u64), usize>,
    steps: Vec<Step>,
    changed: BTreeSet<usize>,
    /// References to user objects of its graphs: each with the place of the child graph's node, or behind all
    /// places for those of the graph itself.
    held: Vec<(usize, Held)>,
    /// Memory of its allocation nodes, and whether the program keeps it after a launch.
    memory: Vec<(Arc<GraphMemory>, bool)>,
    /// Memory of other graphs that it frees.
    frees: Vec<u64>,
    /// The next launch makes the server's graphs, because they copy or fill memory of graphs that does not
    /// exist yet or has been replaced.
    waits: bool,
    /// The stream of the last launch. Launches of one instance run one after the other.
    last: Option<Arc<Stream>>,
    /// Recorded behind launches, for launches on other streams.
    event: Option<OwnEvent>,
    /// Whether it was recorded behind the last launch.
    is_recorded: bool,
    /// Whether it was launched on several streams.
    moves: bool,
    /// Its streams: for kernels of other contexts, and for launches on another context's stream.
    beside: Vec<Arc<Stream>>,
}

pub(crate) static EXECS: Slab<Exec> = Slab::new(10);

/// Appends a graph's nodes, which depend on `entry`. Returns the places of those that no other node depends
/// on.
pub(crate) fn flatten(graph: &Arc<Graph>, entry: &[usize], out: &mut Vec<Flat>) -> Vec<usize> {
    let mut places: HashMap<u64, usize> = HashMap::new();
    let mut waited: BTreeSet<usize> = BTreeSet::new();
    for (id, work, before) in graph.ordered() {
        // The server captures the launch behind the kernels that it depends on. It may overlap with them if
        // all its dependencies are on their programmatic ports, also if the program has made these.
        let overlaps = !before.is_empty() && before.iter().all(|edge| edge.data == PROGRAMMATIC);
        let work = match work {
            Work::Kernel(kernel) => Work::Kernel(kernel.overlapping(overlaps)),
            work => work,
        };
        let mut before: Vec<usize> =
            before.iter().filter_map(|edge| places.get(&edge.from).copied()).collect();
        waited.extend(&before);
        if before.is_empty() {
            before = entry.to_vec();
        }
        let flat = |work, before, begins, id, graph_id| Flat {
            graph: graph_id,
            id,
            owner: Arc::downgrade(graph),
            work,
            before,
            begins,
            enabled: true,
            bounce: None,
            home: None,
            planned: None,
        };
        if let Work::Child(child) = &work {
            let begins = out.len();
            out.push(flat(Work::Empty, before, None, id, 0));
            let leaves = flatten(child, &[begins], out);
            let ends = if leaves.is_empty() { vec![begins] } else { leaves };
            out.push(flat(work, ends, Some(begins), id, graph.unique));
        } else {
            out.push(flat(work, before, None, id, graph.unique));
        }
        places.insert(id, out.len() - 1);
    }
    let mut leaves: Vec<usize> = places.into_values().filter(|place| !waited.contains(place)).collect();
    leaves.sort_unstable();
    leaves
}

impl Flat {
    /// Whether the server does the node's work, or the node has none.
    pub fn is_servers(&self) -> bool {
        match &self.work {
            _ if !self.enabled => true,
            Work::Host(..) | Work::Wait(_) | Work::Record(_) => false,
            Work::Kernel(kernel) => self.home.is_none_or(|home| kernel.is_of(home)),
            Work::Copy(copy) => match self.server() {
                Some(server) => copy_boxes::is_on_server(server, copy),
                None => copy_boxes::is_on_device(copy),
            },
            Work::Fill(fill) => !driver().is_ok_and(|driver| fill::is_elsewhere(driver, self.server(), fill)),
            Work::Words(words) => words.is_on_device(),
            _ => true,
        }
    }

    /// The server that has the node's graph, also once the program has destroyed the graph that the node was
    /// made from.
    fn server(&self) -> Option<&'static Server> {
        let context = self.home.or_else(|| self.owner.upgrade().map(|graph| graph.context));
        context.map(|context| context.server)
    }

    /// Whether it waits for words that an independent node may write.
    fn waits(&self) -> bool {
        self.enabled && matches!(&self.work, Work::Words(words) if words.wait())
    }

    /// What the steps depend on besides the nodes' dependencies: whether the server does its work, and
    /// whether it waits for words.
    fn share(&self) -> (bool, bool) {
        (self.is_servers(), self.waits())
    }

    /// The node's handle in the program.
    fn name(&self) -> usize {
        self.owner.upgrade().and_then(|graph| Graph::node(&graph, self.id).ok()).unwrap_or(0)
    }
}

/// Nodes that may come next: those of the server, those of this process, and those that wait for words of
/// memory. The last kind comes after all others, which may write these words, because steps, and nodes on the
/// software GPU, run one after the other.
#[derive(Default)]
struct Next {
    ready: VecDeque<usize>,
    alone: VecDeque<usize>,
    waiting: VecDeque<usize>,
}

impl Next {
    fn add(&mut self, place: usize, node: &Flat) {
        let queue = match node {
            node if node.waits() => &mut self.waiting,
            node if node.is_servers() => &mut self.ready,
            _ => &mut self.alone,
        };
        queue.push_back(place);
    }
}

/// The steps of a launch: each has the places of nodes that the server does together, or of one node that it
/// does not do.
pub(crate) fn plan(nodes: &[Flat]) -> Vec<(bool, Vec<usize>)> {
    let mut missing: Vec<usize> = nodes.iter().map(|node| node.before.len()).collect();
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (place, node) in nodes.iter().enumerate() {
        for from in &node.before {
            after[*from].push(place);
        }
    }
    let mut next = Next::default();
    for place in (0..nodes.len()).filter(|place| nodes[*place].before.is_empty()) {
        next.add(place, &nodes[place]);
    }
    let mut steps = Vec::new();
    loop {
        let mut together = Vec::new();
        let mut done = |place: usize, next: &mut Next| {
            for follower in &after[place] {
                missing[*follower] -= 1;
                if missing[*follower] == 0 {
                    next.add(*follower, &nodes[*follower]);
                }
            }
        };
        loop {
            let place = next.ready.pop_front();
            let place = place
                .or_else(|| next.waiting.pop_front_if(|p| next.alone.is_empty() && nodes[*p].is_servers()));
            let Some(place) = place else { break };
            done(place, &mut next);
            together.push(place);
        }
        if !together.is_empty() {
            steps.push((true, together));
        }
        let Some(place) = next.alone.pop_front().or_else(|| next.waiting.pop_front()) else { return steps };
        done(place, &mut next);
        steps.push((false, vec![place]));
    }
}

impl State {
    fn new(graph: &Arc<Graph>) -> State {
        let mut nodes = Vec::new();
        flatten(graph, &[], &mut nodes);
        let places = nodes.iter().enumerate().map(|(place, node)| ((node.graph, node.id), place)).collect();
        let mut frees: Vec<u64> = nodes
            .iter()
            .filter_map(|node| if let Work::Free(address) = &node.work { Some(*address) } else { None })
            .collect();
        let mut memory = Vec::new();
        for node in &nodes {
            if let Work::Alloc(made) = &node.work {
                frees.retain(|address| *address != made.address);
                // Memory of a child graph may also be freed in a graph around it.
                let frees_it = |other: &Flat| {
                    other.graph != node.graph
                        && matches!(other.work, Work::Free(address) if address == made.address)
                };
                let is_freed = made.is_freed_in_graph() || nodes.iter().any(frees_it);
                memory.push((made.clone(), !is_freed));
            }
        }
        State {
            nodes,
            places,
            steps: Vec::new(),
            changed: BTreeSet::new(),
            held: Vec::new(),
            memory,
            frees,
            waits: false,
            last: None,
            event: None,
            is_recorded: false,
            moves: false,
            beside: Vec::new(),
        }
    }

    /// Whether it copies or fills memory of certain graphs.
    fn describes(&self, kind: impl Fn(&GraphMemory) -> bool) -> bool {
        self.nodes.iter().flat_map(|node| node.work.graph_memory()).any(|memory| kind(&memory))
    }

    /// A graph for the server in its wire form. `None` if it would be empty.
    fn describe(
        &self,
        driver: &Driver,
        context: &'static Context,
        places: &[usize],
    ) -> Result<Option<Vec<u8>>> {
        let nodes = describe(&self.nodes, driver, context, places)?;
        let some = nodes.iter().any(|node| node.opcode != 0);
        let mut bytes = Vec::new();
        if some {
            GraphNodes { nodes }.put(&mut Writer(&mut bytes));
        }
        Ok(some.then_some(bytes))
    }

    /// The wire form of the changed nodes of a graph on the server, which has the nodes at `places`.
    fn describe_changed(
        &self,
        driver: &Driver,
        context: &'static Context,
        places: &[usize],
    ) -> Result<Vec<ChangedNode>> {
        let changed = (0..).zip(places).filter(|(_, at)| self.changed.contains(at));
        let described = changed.map(|(place, at)| {
            let (opcode, body) = operation(&self.nodes[*at], driver, context)?;
            Ok(ChangedNode { place, opcode, body: Bytes(body) })
        });
        described.collect()
    }

    /// Whether all kernels are in one graph on the server, or there is no conditional node. A condition
    /// belongs to one graph, and so must the kernels that set it.
    fn is_together(&self, plan: &[(bool, Vec<usize>)]) -> bool {
        let sets = |place: &usize| matches!(self.nodes[*place].work, Work::Kernel(_) | Work::Conditional(_));
        !conditional::any(&self.nodes)
            || plan.iter().filter(|(_, places)| places.iter().any(sets)).count() < 2
    }

    /// Makes the plan and the graphs on the server.
    fn instantiate(&mut self, driver: &'static Driver, context: &'static Context, flags: u64) -> Result {
        let mut steps = Vec::new();
        let plan = plan(&self.nodes);
        if !self.is_together(&plan) {
            return conditional::refuse_apart();
        }
        for (together, places) in plan {
            if !together {
                self.nodes[places[0]].work.way(driver, context)?;
                steps.push(Step::Alone(places[0]));
            } else if places.iter().any(|place| matches!(self.nodes[*place].work, Work::Conditional(_))) {
                let nodes = describe(&self.nodes, driver, context, &places)?;
                let made = conditional::parts(driver, &self.nodes, &places, nodes)
                    .and_then(|(draft, parts)| make_draft(context.session(), flags, draft, parts));
                match made {
                    Ok(id) => steps.push(Step::Server(id, places)),
                    Err(status) => {
                        destroy(context, &steps);
                        return Err(status);
                    }
                }
            } else if let Some(bytes) = self.describe(driver, context, &places)? {
                let made = make(context, flags, &bytes);
                match made {
                    Ok(id) => steps.push(Step::Server(id, places)),
                    Err(status) => {
                        destroy(context, &steps);
                        return Err(status);
                    }
                }
            }
        }
        destroy(context, &self.steps);
        self.steps = steps;
        self.note_planned();
        Ok(())
    }

    /// Notes what the steps were made for.
    fn note_planned(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.planned = None);
        for step in &self.steps {
            let places = match step {
                Step::Server(_, places) => places.as_slice(),
                Step::Alone(place) => std::slice::from_ref(place),
            };
            for place in places {
                let node = &mut self.nodes[*place];
                node.planned = Some(node.share());
            }
        }
    }

    /// Whether the changed nodes leave the steps as they are.
    fn steps_stay(&mut self) -> bool {
        let stays = |node: &Flat| node.planned == Some(node.share());
        if self.changed.iter().all(|place| stays(&self.nodes[*place])) {
            return true;
        }
        let mut fresh = plan(&self.nodes).into_iter();
        let same = self.steps.iter().all(|step| match (step, fresh.next()) {
            (Step::Server(_, places), Some((true, now))) => *places == now,
            (Step::Alone(place), Some((false, now))) => now == [*place],
            _ => false,
        });
        let same = same && fresh.next().is_none();
        if same {
            self.note_planned();
        }
        same
    }

    /// Sends changes to the server's graphs.
    fn refresh(&mut self, driver: &'static Driver, context: &'static Context, flags: u64) -> Result {
        // Also if the launch makes all graphs: a changed copy may need more room.
        for place in &self.changed {
            self.nodes[*place].bounce = None;
        }
        if self.changed.is_empty() || self.waits {
            return Ok(());
        }
        if !self.steps_stay() {
            self.instantiate(driver, context, flags)?;
        } else {
            for step in &self.steps {
                let Step::Server(id, places) = step else { continue };
                if context.session().knows::<GraphChangeNodes>() {
                    change_nodes(context.session(), *id, self.describe_changed(driver, context, places)?)?;
                    continue;
                }
                if !places.iter().any(|place| self.changed.contains(place)) {
                    continue;
                }
                // If nothing is left to do, the plan changes.
                let Some(bytes) = self.describe(driver, context, places)? else {
                    self.instantiate(driver, context, flags)?;
                    break;
                };
                change(context.session(), *id, &bytes)?;
            }
        }
        self.changed.clear();
        Ok(())
    }

    /// Makes `stream` wait for the previous launch, if that was on another stream.
    fn queue(&mut self, stream: &Arc<Stream>) -> Result {
        let last = self.last.replace(stream.clone());
        let is_recorded = std::mem::take(&mut self.is_recorded);
        let Some(last) = last.filter(|last| !Arc::ptr_eq(last, stream)) else { return Ok(()) };
        self.moves = true;
        match &self.event {
            _ if last.is_finished() => Ok(()),
            Some(event) if is_recorded => event.hold(stream),
            _ => fences::join(&last, stream),
        }
    }

    /// Called after a launch was appended. Records what a launch on another stream waits for, so that it does
    /// not wait for what the program puts on this stream next. That is done for the first launch, and for
    /// every launch of an instance that moves between streams.
    fn record(&mut self, context: &'static Context, stream: &Arc<Stream>) -> Result {
        if !std::ptr::eq(stream.context, context) || self.event.is_some() && !self.moves {
            return Ok(());
        }
        let event = match &mut self.event {
            Some(event) => event,
            none => none.insert(OwnEvent::new(context)?),
        };
        event.record(stream)?;
        self.is_recorded = true;
        Ok(())
    }

    /// Puts all steps on a stream.
    fn enqueue(&mut self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        let State { steps, nodes, beside, .. } = self;
        for step in steps {
            match step {
                Step::Server(graph, places) => {
                    let op = GraphLaunch { graph: *graph, stream: stream.id };
                    let waits = places.iter().any(|place| nodes[*place].waits());
                    if waits {
                        stream_table::before_program(stream)?;
                    }
                    let seq = stream.work(&op)?;
                    if waits {
                        holds::waits(stream, seq);
                    }
                }
                Step::Alone(place) => {
                    let node = &mut nodes[*place];
                    launch_steps::run(driver, stream, &node.work, &mut node.bounce, beside)?;
                }
            }
        }
        Ok(())
    }
}

/// References to the user objects of a graph with these nodes, and to those of the graphs in it. The first
/// node is at the place `first` of an instance.
fn references(nodes: &[Flat], first: usize, graph: &Arc<Graph>) -> Vec<(usize, Held)> {
    let mut all = Vec::new();
    for (place, node) in (first..).zip(nodes) {
        match &node.work {
            Work::Child(child) => all.extend(child.share_held().into_iter().map(|held| (place, held))),
            Work::Conditional(node) => {
                all.extend(
                    node.bodies.iter().flat_map(|body| body.share_all_held()).map(|held| (place, held)),
                );
            }
            _ => {}
        }
    }
    let behind = first + nodes.len();
    all.extend(graph.share_held().into_iter().map(|held| (behind, held)));
    all
}

/// Releases references that an instance had, once its last launch has finished.
fn release(driver: &'static Driver, last: Option<Arc<Stream>>, held: Vec<(usize, Held)>) {
    if let Some(stream) = last.filter(|stream| !held.is_empty() && !stream.is_finished()) {
        launch_steps::after(driver, stream, held.into_iter().map(|(_, held)| held).collect());
    }
}

/// The wire form of the nodes at some places.
pub(crate) fn describe(
    nodes: &[Flat],
    driver: &Driver,
    context: &'static Context,
    places: &[usize],
) -> Result<Vec<GraphNode>> {
    let local: HashMap<usize, u32> = places.iter().copied().zip(0..).collect();
    let mut described = Vec::with_capacity(places.len());
    for place in places {
        let node = &nodes[*place];
        let (opcode, body) = operation(node, driver, context)?;
        let dependencies = node.before.iter().filter_map(|from| local.get(from).copied()).collect();
        described.push(GraphNode { opcode, dependencies, body: Bytes(body) });
    }
    Ok(described)
}

/// What a node does in a graph on the server: an operation's opcode and body.
fn operation(node: &Flat, driver: &Driver, context: &'static Context) -> Result<(u16, Vec<u8>)> {
    match if node.enabled { node.work.way(driver, context)? } else { Way::Nothing } {
        Way::Server(opcode, body) => Ok((opcode, body)),
        Way::Alone if matches!(node.work, Work::Kernel(_)) && node.is_servers() => {
            refuse_form!("a graph of a conditional node with kernels of several contexts")
        }
        // Planned for the server, but its memory is on another server than the graph's kernels.
        Way::Alone if node.is_servers() => Err(Status::NOT_SUPPORTED),
        Way::Nothing | Way::Alone => Ok((0, Vec::new())),
    }
}

/// Changes nodes of a graph of the server, without waiting. They were checked here, and if the server refuses
/// one all the same, the launch fails.
fn change_nodes(session: &'static Session, graph: GraphId, nodes: Vec<ChangedNode>) -> Result {
    let mut left = nodes.into_iter().peekable();
    while left.peek().is_some() {
        let (mut nodes, mut size) = (Vec::new(), 0);
        while let Some(node) = left.next_if(|node| nodes.is_empty() || size + node.body.0.len() <= INLINE) {
            size += size_of::<ChangedNode>() + node.body.0.len();
            nodes.push(node);
        }
        session.append(&GraphChangeNodes { graph, last: left.peek().is_none(), nodes })?;
    }
    Ok(())
}

/// The same on a server that takes only descriptions of the whole graph. A short one goes without waiting.
fn change(session: &'static Session, graph: GraphId, bytes: &[u8]) -> Result {
    if bytes.len() <= INLINE && session.knows::<GraphChange<'_>>() {
        return session.append(&GraphChange { graph, nodes: bytes }).map(|_| ());
    }
    with_bytes(session, bytes, |nodes| session.call(&GraphUpdate { graph, nodes }).map(|_| ()))
}

/// Sends a description inside the record or through the arena.
fn with_bytes(session: &'static Session, bytes: &[u8], send: impl FnOnce(HostIn<'_>) -> Result) -> Result {
    if bytes.len() <= INLINE {
        return send(HostIn::Inline(bytes));
    }
    let staging = Staging::new(session, bytes.len())?;
    // SAFETY: the staging memory has this many bytes and belongs only to this call.
    unsafe { transfer::move_bytes(bytes.as_ptr(), staging.ptr(), bytes.len()) };
    send(HostIn::Range(staging.range(bytes.len())))
}

/// A new id for a graph on the server.
pub(crate) fn new_id() -> GraphId {
    static IDS: AtomicU32 = AtomicU32::new(1);
    GraphId(IDS.fetch_add(1, Ordering::Relaxed))
}

fn make_draft(
    session: &'static Session,
    flags: u64,
    draft: GraphId,
    parts: Vec<GraphPart>,
) -> Result<GraphId> {
    let graph = new_id();
    let mut bytes = Vec::new();
    GraphParts { parts }.put(&mut Writer(&mut bytes));
    with_bytes(session, &bytes, |parts| {
        let request = GraphInstantiateDraft { graph, draft, flags: flags & !flag::UPLOAD, parts };
        session.call(&request).map(|_| ())
    })?;
    Ok(graph)
}

fn make(context: &'static Context, flags: u64, bytes: &[u8]) -> Result<GraphId> {
    let graph = new_id();
    with_bytes(context.session(), bytes, |nodes| {
        let request = GraphInstantiate { context: context.id, graph, flags: flags & !flag::UPLOAD, nodes };
        context.session().call(&request).map(|_| ())
    })?;
    Ok(graph)
}

/// Destroys graphs on the server. After the session is lost there are none.
fn destroy(context: &Context, steps: &[Step]) {
    for step in steps {
        if let Step::Server(graph, _) = step {
            let _ = context.session().append(&GraphDestroy { graph: *graph });
        }
    }
}

impl Exec {
    pub fn new(graph: &Arc<Graph>, flags: u64) -> Result<Exec> {
        let driver = driver()?;
        graph.context.session().check()?;
        let mut state = State::new(graph);
        let kernel = state.nodes.iter().find_map(|node| match &node.work {
            Work::Kernel(kernel) => Some(kernel.function.context),
            _ => None,
        });
        let context = kernel.unwrap_or(graph.context);
        state.nodes.iter_mut().for_each(|node| node.home = Some(context));
        let mut claimed = Weak::new();
        if graph.any(&|work| matches!(work, Work::Alloc(_) | Work::Free(_))) {
            crate::graph::claim(graph)?;
            claimed = Arc::downgrade(graph);
        }
        // From here on the instance owns the claim.
        state.held = references(&state.nodes, 0, graph);
        state.waits = state.describes(|memory| !memory.segment.is_backed());
        let made = if state.waits {
            state.nodes.iter().try_for_each(|node| node.work.way(driver, context).map(|_| ()))
        } else {
            state.instantiate(driver, context, flags)
        };
        let exec = Exec { context, unique: unique_id(), flags, state: Mutex::new(state), claimed };
        made.map(|()| exec)
    }

    /// Checks that the server which has the graph also has a stream.
    fn check_server(&self, stream: &Stream) -> Result {
        if std::ptr::eq(self.context.server, stream.context.server) {
            return Ok(());
        }
        refuse_form!("launching a graph on a stream of another server than its kernels'")
    }

    /// Does something with the graphs on the server, on a stream of their context: on `stream`, or between
    /// what is before and after it there.
    fn at_home(&self, stream: &Arc<Stream>, work: impl FnOnce(&Arc<Stream>) -> Result) -> Result {
        self.check_server(stream)?;
        if std::ptr::eq(stream.context, self.context) {
            return work(stream);
        }
        let own = launch_steps::stream_in(self.context, &mut lock(&self.state).beside)?;
        launch_steps::within(stream, &own, work)
    }

    /// Enqueues a launch on a stream that is not being captured.
    pub fn launch(&self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        client::activity::launches_graph(self.unique as u32);
        self.at_home(stream, |stream| self.launch_at_home(driver, stream))
    }

    fn launch_at_home(&self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        let mut state = lock(&self.state);
        state.refresh(driver, self.context, self.flags)?;
        let taken = state.memory.iter().any(|(memory, _)| memory.is_live());
        if taken && self.flags & flag::AUTO_FREE_ON_LAUNCH == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let _order = crate::memory::managed::before_work(driver)?;
        state.queue(stream)?;
        let backed = self.back(driver, &mut state, stream)?;
        let enqueued = state.enqueue(driver, stream).and_then(|()| state.record(self.context, stream));
        // Also if a later step has failed.
        for bounce in state.nodes.iter().filter_map(|node| node.bounce.as_ref()) {
            bounce.used(stream.clone(), stream.mark()?);
        }
        enqueued?;
        let Some(pool) = backed else { return Ok(()) };
        let freed: Vec<_> =
            state.frees.iter().filter_map(|address| crate::memory::graph_memory::find(*address)).collect();
        graph_chunks::launched(pool, stream, &state.memory, &freed)
    }

    /// Gives the graph's allocations memory for a launch, and makes the server's graphs if they need that
    /// memory. `None` if the graph neither allocates nor frees.
    fn back(
        &self,
        driver: &'static Driver,
        state: &mut State,
        stream: &Arc<Stream>,
    ) -> Result<Option<graph_chunks::Launching>> {
        let mut pool = None;
        if !state.memory.is_empty() || !state.frees.is_empty() {
            let mut segments: Vec<Arc<Segment>> = Vec::new();
            for (memory, _) in &state.memory {
                if !segments.iter().any(|segment| Arc::ptr_eq(segment, &memory.segment)) {
                    segments.push(memory.segment.clone());
                }
            }
            let (backed, moved) = graph_chunks::back(driver, &segments, stream)?;
            state.waits |= moved && state.describes(|_| true);
            pool = Some(backed);
        }
        if state.waits {
            state.instantiate(driver, self.context, self.flags)?;
            state.changed.clear();
            state.waits = false;
        }
        Ok(pool)
    }

    pub fn upload(&self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        self.at_home(stream, |stream| self.upload_at_home(driver, stream))
    }

    fn upload_at_home(&self, driver: &'static Driver, stream: &Arc<Stream>) -> Result {
        let mut state = lock(&self.state);
        state.refresh(driver, self.context, self.flags)?;
        let backed = self.back(driver, &mut state, stream)?;
        for step in &state.steps {
            if let Step::Server(graph, _) = step {
                let op = GraphUpload { graph: *graph, stream: stream.id };
                stream.work(&op)?;
            }
        }
        drop(backed);
        Ok(())
    }

    /// Changes a node, which the program names by the graph's node.
    pub fn change(&self, handle: usize, change: impl FnOnce(&Work) -> Result<Work>) -> Result {
        let (graph, id) = crate::graph::node(handle)?;
        let mut state = lock(&self.state);
        let place = *state.places.get(&(graph.unique, id)).ok_or(Status::INVALID_VALUE)?;
        if conditional::any(&state.nodes) {
            return conditional::refuse_change();
        }
        let work = change(&state.nodes[place].work)?;
        if work.kind() != state.nodes[place].work.kind() {
            return Err(Status::INVALID_VALUE);
        }
        if fill_differs(&state.nodes[place].work, &work) {
            return Err(Status::INVALID_VALUE);
        }
        if let (Work::Child(child), Some(begins)) = (&work, state.nodes[place].begins) {
            let mut nodes = Vec::new();
            flatten(child, &[], &mut nodes);
            for node in &mut nodes {
                for from in &mut node.before {
                    *from += begins + 1;
                }
                if node.before.is_empty() {
                    node.before.push(begins);
                }
            }
            let there = begins + 1..place;
            if there.len() != nodes.len() {
                return Err(Status::INVALID_VALUE);
            }
            let by_priority = self.flags & flag::USE_NODE_PRIORITY != 0;
            if there
                .clone()
                .zip(&nodes)
                .any(|(at, node)| differs(&state.nodes[at], node, by_priority).is_some())
            {
                return Err(Status::INVALID_VALUE);
            }
            // Those of the child graph itself are then at the place of its node.
            let fresh = references(&nodes, there.start, child);
            let old = |of: &(usize, Held)| (begins + 1..=place).contains(&of.0);
            let replaced: Vec<_> = state.held.extract_if(.., |held| old(held)).collect();
            state.held.extend(fresh);
            for (at, node) in there.zip(nodes) {
                state.nodes[at].work = node.work;
                state.changed.insert(at);
            }
            let last = state.last.clone();
            drop(state);
            release(driver()?, last, replaced);
            return Ok(());
        }
        work.way(driver()?, self.context)?;
        state.nodes[place].work = work;
        state.changed.insert(place);
        Ok(())
    }

    /// Whether a node is enabled. `set` enables or disables it.
    pub fn enabled(&self, handle: usize, set: Option<bool>) -> Result<bool> {
        let (graph, id) = crate::graph::node(handle)?;
        let mut state = lock(&self.state);
        let place = *state.places.get(&(graph.unique, id)).ok_or(Status::INVALID_VALUE)?;
        let node = &state.nodes[place];
        if !matches!(node.work, Work::Kernel(_) | Work::Copy(_) | Work::Fill(_)) {
            return Err(Status::INVALID_VALUE);
        }
        let was = node.enabled;
        let Some(set) = set.filter(|set| *set != was) else { return Ok(was) };
        if conditional::any(&state.nodes) {
            return conditional::refuse_change();
        }
        state.nodes[place].enabled = set;
        state.changed.insert(place);
        Ok(was)
    }

    /// Takes over the work of a graph's nodes. On failure, returns the reason and up to two nodes of that
    /// graph for the program: the node that does not match, and, if the mismatch is an edge, the node that
    /// the edge comes from.
    pub fn update(
        &self,
        driver: &'static Driver,
        graph: &Arc<Graph>,
    ) -> std::result::Result<(), (u32, usize, usize)> {
        let mut fresh = Vec::new();
        flatten(graph, &[], &mut fresh);
        let mut state = lock(&self.state);
        if state.nodes.len() != fresh.len() {
            // No node is to blame: "resultInfo->errorNode is set to NULL" (`cuGraphExecUpdate`).
            return Err((update::TOPOLOGY, 0, 0));
        }
        for (now, node) in state.nodes.iter().zip(&fresh) {
            let from = strange_dependency(now, node).map_or(0, |from| fresh[from].name());
            let fail = |why| Err((why, node.name(), if why == update::TOPOLOGY { from } else { 0 }));
            if let Some(why) = differs(now, node, self.flags & flag::USE_NODE_PRIORITY != 0) {
                return fail(why);
            }
            if node.work.way(driver, self.context).is_err() {
                return fail(update::ERROR);
            }
        }
        let held = references(&fresh, 0, graph);
        let replaced = std::mem::replace(&mut state.held, held);
        for (place, node) in fresh.into_iter().enumerate() {
            if !is_same_launch(&state.nodes[place].work, &node.work) {
                state.changed.insert(place);
            }
            state.nodes[place].work = node.work;
        }
        let last = state.last.clone();
        drop(state);
        release(driver, last, replaced);
        Ok(())
    }
}

/// Whether both are the same launch of the same kernel, so that the server need not hear of it. What a copy
/// or fill does also depends on which memory its addresses name now.
fn is_same_launch(now: &Work, new: &Work) -> bool {
    let (Work::Kernel(now), Work::Kernel(new)) = (now, new) else { return false };
    Arc::ptr_eq(&now.function, &new.function) && now.op(StreamId(0)) == new.op(StreamId(0))
}

/// The place of a node's first dependency that another node, which it is to replace, does not have at the
/// same position. `None` also if the numbers of their dependencies differ.
fn strange_dependency(now: &Flat, node: &Flat) -> Option<usize> {
    let mut pairs = now.before.iter().zip(&node.before).filter(|_| now.before.len() == node.before.len());
    pairs.find(|(now, from)| now != from).map(|(_, from)| *from)
}

/// The reason why one node cannot replace another. `None` if it can. `by_priority`: the nodes have their
/// priorities.
fn differs(now: &Flat, node: &Flat, by_priority: bool) -> Option<u32> {
    if now.work.kind() != node.work.kind() {
        return Some(update::NODE_TYPE);
    }
    if now.before != node.before {
        return Some(update::TOPOLOGY);
    }
    match (&now.work, &node.work) {
        (Work::Alloc(_) | Work::Free(_) | Work::Conditional(_), _) => Some(update::NOT_SUPPORTED),
        (Work::Copy(a), Work::Copy(b)) if copy_boxes::kinds(a) != copy_boxes::kinds(b) => {
            Some(update::PARAMETERS)
        }
        (Work::Kernel(a), Work::Kernel(b)) if attributes_differ(a, b, by_priority) => {
            Some(update::ATTRIBUTES)
        }
        (a, b) if fill_differs(a, b) => Some(update::PARAMETERS),
        _ => None,
    }
}

/// Whether a kernel cannot replace another: "a cooperative node cannot be updated to a non-cooperative node,
/// and vice-versa; if the graph was instantiated with CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY, the
/// priority attribute cannot change" (`cuGraphExecUpdate`).
fn attributes_differ(now: &Kernel, new: &Kernel, by_priority: bool) -> bool {
    let value = |kernel: &Kernel, id| {
        let given = kernel.attributes.iter().find(|attribute| attribute.id == id);
        given.map_or(0, |attribute| i32::from_le_bytes(attribute.value[..4].try_into().unwrap_or_default()))
    };
    let differs = |id| value(now, id) != value(new, id);
    differs(launch_attr::COOPERATIVE) || by_priority && differs(launch_attr::PRIORITY)
}

/// Whether a fill cannot replace another: "for 2d memsets, all dimension changes are rejected; for 1d
/// memsets, changes in height" (`cuGraphExecMemsetNodeSetParams`), or memory of another kind.
fn fill_differs(now: &Work, new: &Work) -> bool {
    let (Work::Fill(a), Work::Fill(b)) = (now, new) else { return false };
    let rows = |fill: &MemsetNodeParams| (fill.width, fill.elementSize, fill.pitch);
    let is_pinned = |fill: &MemsetNodeParams| pinned_regions::find(fill.dst).is_some();
    a.height != b.height || (a.height > 1 && rows(a) != rows(b)) || is_pinned(a) != is_pinned(b)
}

impl Drop for Exec {
    fn drop(&mut self) {
        if let Some(graph) = self.claimed.upgrade() {
            graph.instantiated.store(false, Ordering::Release);
        }
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Ok(driver) = driver() else { return };
        destroy(self.context, &state.steps);
        if let Some(event) = &state.event {
            event.end(None);
        }
        std::mem::take(&mut state.beside).into_iter().for_each(stream_table::end);
        let held = std::mem::take(&mut state.held);
        release(driver, state.last.take(), held);
    }
}

/// Destroys a context's instantiated graphs.
pub(crate) fn forget(context: &'static Context) {
    drop(EXECS.remove_where(|exec| std::ptr::eq(exec.context, context)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::types::UserData;
    use crate::work::memory_operation::Operations;
    use proptest::prelude::*;

    unsafe extern "C-unwind" fn nothing(_: *mut std::ffi::c_void) {}

    fn flat(alone: bool, before: Vec<usize>) -> Flat {
        let work = if alone { Work::Host(nothing, UserData(std::ptr::null_mut())) } else { Work::Empty };
        Flat {
            graph: 0,
            id: 0,
            owner: Weak::new(),
            work,
            before,
            begins: None,
            enabled: true,
            bounce: None,
            home: None,
            planned: None,
        }
    }

    #[test]
    fn work_for_the_server_alone_is_one_step() {
        let nodes = [flat(false, vec![]), flat(false, vec![0]), flat(false, vec![]), flat(false, vec![1, 2])];
        let steps = plan(&nodes);
        assert_eq!(steps.len(), 1);
        assert!(steps[0].0);
    }

    #[test]
    fn a_node_that_waits_for_a_word_runs_after_those_that_may_write_it() {
        let mut waits = flat(false, vec![]);
        waits.work = Work::Words(Operations::waiting());
        let nodes = [waits, flat(false, vec![0]), flat(true, vec![]), flat(false, vec![2])];
        let steps = plan(&nodes);
        assert_eq!(steps, [(false, vec![2]), (true, vec![3, 0, 1])]);
    }

    proptest! {
        #[test]
        fn every_node_is_in_one_step_behind_all_that_it_waits_for(
            nodes in proptest::collection::vec((any::<bool>(), any::<u64>()), 0..40)
        ) {
            let nodes: Vec<Flat> = nodes
                .iter()
                .enumerate()
                .map(|(place, (alone, before))| {
                    flat(*alone, (0..place.min(64)).filter(|bit| before >> bit & 1 != 0).collect())
                })
                .collect();
            let steps = plan(&nodes);
            let order: Vec<usize> = steps.iter().flat_map(|(_, places)| places.clone()).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..nodes.len()).collect::<Vec<_>>());
            let at = |place: usize| order.iter().position(|other| *other == place).unwrap();
            for (place, node) in nodes.iter().enumerate() {
                prop_assert!(node.before.iter().all(|from| at(*from) < at(place)));
            }
            for (together, places) in &steps {
                prop_assert!(places.iter().all(|place| nodes[*place].is_servers() == *together));
            }
        }
    }
}
