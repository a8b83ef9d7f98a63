//! Graphs: work described once and launched often.
//!
//! A client captures and builds graphs by itself, without a word to the server, which learns of one when it is instantiated: as a list of operations of
//! this table, those that go on a stream, with what each depends on.

use crate::data::HostIn;
use crate::handle::{ContextId, GraphId, StreamId};
use crate::ops::ops;
use crate::wire::Bytes;

crate::wire_struct! {
    /// A node of a graph.
    pub struct GraphNode {
        /// Opcode of its operation: `launch`, `memset`, `memcpy_dtod`, `memcpy_dtod_3d` or `stream_batch_mem_op`; `graph_conditional`, whose body here is
        /// the name of the conditional node's first graph alone; 0: an empty node.
        opcode: u16,
        /// Nodes that it depends on: indices of earlier ones.
        dependencies: Vec<u32>,
        /// The operation's body. The stream in it says nothing.
        body: Bytes,
    }
}

crate::wire_struct! {
    /// A graph, every node behind those that it depends on.
    pub struct GraphNodes {
        /// The nodes.
        nodes: Vec<GraphNode>,
    }
}

crate::wire_struct! {
    /// What goes into a draft.
    pub struct GraphPart {
        /// The draft's name.
        graph: GraphId,
        /// Its nodes, the conditional ones among them.
        nodes: Vec<GraphNode>,
    }
}

crate::wire_struct! {
    /// A graph with conditional nodes: the draft itself, and all that belong to its conditional nodes and to theirs.
    pub struct GraphParts {
        /// The parts.
        parts: Vec<GraphPart>,
    }
}

/// `CUgraphConditionalNodeType`.
pub mod conditional {
    /// One graph or the other.
    pub const IF: u32 = 0;
    /// A graph again and again.
    pub const WHILE: u32 = 1;
    /// The graph of that number.
    pub const SWITCH: u32 = 2;
    /// `CU_GRAPH_COND_ASSIGN_DEFAULT`: a condition has its default value at each launch.
    pub const ASSIGN_DEFAULT: u32 = 1;
}

ops! {
    /// Graphs.
    ///
    /// A graph with conditional nodes is known to the server before it is instantiated, as a *draft*: kernels are given the names of its conditions, which the server's
    /// driver chooses.
    trait GraphOps;

    /// `cuGraphInstantiateWithFlags`. A node's operation that could not be enqueued on a stream either is answered with its own error.
    sync 0x0a01 graph_instantiate: GraphInstantiate<'a>
        [order Session, may_block Context, lane Main]
    {
        /// Context of all its nodes.
        context: ContextId,
        /// Its name.
        graph: GraphId,
        /// `CUgraphInstantiate_flags`, as far as they mean anything here.
        flags: u64,
        /// The wire form of [`GraphNodes`].
        nodes: HostIn<'a>,
    } -> GraphInstantiateReply {}

    /// `cuGraphLaunch`.
    async 0x0a02 graph_launch: GraphLaunch
        [order Streams, may_block Never, lane Main]
    {
        /// The graph.
        graph: GraphId,
        /// Stream.
        stream: StreamId,
    }

    /// `cuGraphUpload`.
    async 0x0a03 graph_upload: GraphUpload
        [order Streams, may_block Never, lane Main]
    {
        /// The graph.
        graph: GraphId,
        /// Stream.
        stream: StreamId,
    }

    /// `cuGraphExecUpdate`: the graph does something else from the next launch on. Launches that were enqueued before do what it did.
    sync 0x0a05 graph_update: GraphUpdate<'a>
        [order Session, may_block Context, lane Main]
    {
        /// The graph.
        graph: GraphId,
        /// The wire form of [`GraphNodes`]. It need not have the nodes and dependencies that it had.
        nodes: HostIn<'a>,
    } -> GraphUpdateReply {}

    /// `cuGraphExecDestroy`. Launches that are under way complete.
    async 0x0a04 graph_destroy: GraphDestroy
        [order Session, may_block Never, lane Main]
    {
        /// The graph.
        graph: GraphId,
    }

    /// `cuGraphConditionalHandleCreate`. It makes the draft, if there is none of that name.
    sync 0x0a06 graph_condition: GraphCondition
        [order Session, may_block Never, lane Main]
    {
        /// Context of all nodes of the graph.
        context: ContextId,
        /// The draft's name: a name of its own kind, apart from instantiated graphs'.
        graph: GraphId,
        /// Default value.
        default: u32,
        /// `CU_GRAPH_COND_ASSIGN_DEFAULT`, or 0.
        flags: u32,
    } -> GraphConditionReply {
        /// What kernels know it by.
        handle: u64,
    }

    /// Adds a conditional node to a draft: `cuGraphAddNode`. What it depends on is said when the graph is instantiated.
    sync 0x0a07 graph_conditional: GraphConditional
        [order Session, may_block Never, lane Main]
    {
        /// The draft.
        graph: GraphId,
        /// Its condition, of this draft or of one that it belongs to.
        handle: u64,
        /// `CUgraphConditionalNodeType`.
        kind: u32,
        /// Names of the node's graphs, which are drafts as well; none in use.
        bodies: Vec<GraphId>,
    } -> GraphConditionalReply {}

    /// `cuGraphInstantiateWithFlags` of a draft. A server may refuse one that has other parts than when it was instantiated before.
    sync 0x0a08 graph_instantiate_draft: GraphInstantiateDraft<'a>
        [order Session, may_block Context, lane Main]
    {
        /// Name of the instance.
        graph: GraphId,
        /// The draft, which belongs to no other.
        draft: GraphId,
        /// As in `graph_instantiate`.
        flags: u64,
        /// The wire form of [`GraphParts`].
        parts: HostIn<'a>,
    } -> GraphInstantiateDraftReply {}

    /// `cuGraphDestroy` of a draft that belongs to no other, with those that belong to it. Its instances stay.
    async 0x0a09 graph_forget: GraphForget
        [order Session, may_block Never, lane Main]
    {
        /// The draft.
        graph: GraphId,
    }

    /// Takes a conditional node out of its draft, with its graphs: `cuGraphDestroyNode`. A server may refuse it when the draft was instantiated before.
    sync 0x0a0a graph_conditional_remove: GraphConditionalRemove
        [order Session, may_block Never, lane Main]
    {
        /// The first of the node's graphs.
        first: GraphId,
    } -> GraphConditionalRemoveReply {}
}
