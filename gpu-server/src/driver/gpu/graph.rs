//! Graphs.

use protocol::handle::ContextId;
use protocol::ops::launch::Launch;

use super::copy::{BoxCopy, Fill, GpuCopies, LineCopy};
use super::module::GpuModules;
use crate::driver::call::{Call, Result};

/// A node of a graph.
pub struct Node<'a, G: GpuGraphs> {
    /// What it does.
    pub work: NodeWork<'a, G>,
    /// Indices of the earlier nodes of the same graph that it waits for.
    pub dependencies: &'a [u32],
}

/// What a node does. It was checked like work on a stream of the graph's context.
pub enum NodeWork<'a, G: GpuGraphs> {
    /// Nothing. Other nodes depend on it.
    Empty,
    /// Launches a function of the graph's context. The stream in `launch` is ignored.
    Launch {
        /// The function.
        function: &'a G::Function,
        /// Dimensions, parameters and attributes.
        launch: Launch<'a>,
    },
    /// Fills memory.
    Fill(Fill),
    /// Copies contiguous bytes.
    CopyLine(LineCopy),
    /// Copies a box.
    CopyBox(BoxCopy),
    /// Reads, writes or waits for words of memory.
    MemoryOps(Vec<G::MemoryOp>),
    /// Runs one of the node's own graphs, depending on a condition.
    Conditional(&'a G::Conditional),
}

/// Graphs. Their contexts have been entered.
///
/// The session makes a draft, perhaps with conditions and conditional nodes, whose graphs are drafts as well.
/// It fills each of them once and then instantiates the outermost one, perhaps several times.
pub trait GpuGraphs: GpuCopies + GpuModules + Sized {
    /// A graph that is not instantiated yet, or a graph of a conditional node. It may be dropped before its
    /// instances.
    type Draft: Send;
    /// A conditional node. It lives as long as its draft.
    type Conditional: Send;
    /// An instantiated graph.
    type Graph: Send;

    /// The device from which the addresses in a graph's nodes are checked, for a graph in a context of
    /// `device`. See [`GpuStreams::device_at`](super::GpuStreams::device_at).
    fn home_of_graph(device: u32) -> u32;

    /// Makes an empty draft.
    fn make_draft(&mut self, context: ContextId) -> Result<Self::Draft>;

    /// Makes a condition of a draft. Returns the handle that kernels use, which is unique in the session.
    /// `flags` contains at most [`ASSIGN_DEFAULT`](protocol::ops::graph::condition_flag::ASSIGN_DEFAULT).
    fn make_condition(
        &mut self,
        context: ContextId,
        draft: &Self::Draft,
        default: u32,
        flags: u32,
    ) -> Result<u64>;

    /// Adds a conditional node with `count` graphs to a draft that was not filled yet. The condition belongs
    /// to this draft or to one that contains it; `kind` is a
    /// [`conditional`](protocol::ops::graph::conditional) type that allows `count` graphs. Returns the node
    /// and its graphs.
    fn add_conditional(
        &mut self,
        context: ContextId,
        draft: &Self::Draft,
        condition: u64,
        kind: u32,
        count: usize,
    ) -> Result<(Self::Conditional, Vec<Self::Draft>)>;

    /// Removes a conditional node with its graphs and their contents from a draft that was not filled yet.
    fn remove_conditional(&mut self, context: ContextId, node: &Self::Conditional) -> Result;

    /// Puts the nodes into a draft, which already has its conditional ones. After a failure, the draft is not
    /// used again.
    fn fill_draft(&self, context: ContextId, draft: &Self::Draft, nodes: Vec<Node<'_, Self>>) -> Result;

    /// Instantiates a filled draft, with the graphs of all its conditional nodes. `flags` are the client's.
    fn instantiate(&mut self, context: ContextId, draft: &Self::Draft, flags: u64) -> Result<Self::Graph>;

    /// Changes an instance to match a filled draft. Pending launches complete as they were.
    fn update_graph(
        &mut self,
        context: ContextId,
        graph: &mut Self::Graph,
        draft: &Self::Draft,
        flags: u64,
    ) -> Result;

    /// Gives some nodes of an instance other work, by their places in the list that it was made from. What
    /// they depend on stays, and pending launches complete as they were. Returns false if that is impossible:
    /// then any of the nodes may have been changed, and the session makes the graph again with
    /// [`replace_graph`](Self::replace_graph).
    fn change_nodes(
        &self,
        _context: ContextId,
        _graph: &mut Self::Graph,
        _changed: Vec<(u32, NodeWork<'_, Self>)>,
    ) -> bool {
        false
    }

    /// The same as [`update_graph`](Self::update_graph) for an instance of which nodes are changed, so more
    /// changes may follow.
    fn replace_graph(
        &mut self,
        context: ContextId,
        graph: &mut Self::Graph,
        draft: Self::Draft,
        flags: u64,
    ) -> Result {
        self.update_graph(context, graph, &draft, flags)
    }

    /// Enqueues a launch of a graph of the place's context.
    fn launch_graph(&mut self, cx: &Call, place: &Self::Place, graph: &Self::Graph) -> Result;

    /// Prepares a graph of the place's context for its first launch there.
    fn upload_graph(&mut self, place: &Self::Place, graph: &Self::Graph) -> Result;

    /// Destroys an instance that the session has removed from its table. Pending launches complete.
    fn destroy_graph(&mut self, context: ContextId, graph: Self::Graph) -> Result;
}
