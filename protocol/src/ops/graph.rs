//! Graphs: work that is described once and launched often.
//!
//! A client captures and builds graphs without the server. When a graph is instantiated, the client sends it
//! as a list of stream operations of this table, with the dependencies of each.

use crate::data::HostIn;
use crate::handle::{ContextId, GraphId, StreamId};
use crate::ops::ops;
use crate::wire::Bytes;

crate::wire_struct! {
    /// A node of a graph.
    pub struct GraphNode {
        /// Opcode of its operation: `launch`, `memset`, `memcpy_dtod`, `memcpy_dtod_3d` or
        /// `stream_batch_mem_op`; `graph_conditional`, whose body here is only the id of the conditional
        /// node's first graph; 0: an empty node.
        opcode: u16,
        /// Indices of the earlier nodes that it depends on.
        dependencies: Vec<u32>,
        /// The operation's body. Its stream is ignored.
        body: Bytes,
    }
}

crate::wire_struct! {
    /// A graph. Every node comes after the nodes that it depends on.
    pub struct GraphNodes {
        /// The nodes.
        nodes: Vec<GraphNode>,
    }
}

crate::wire_struct! {
    /// What a node of an instance does from now on. It depends on the same nodes as before.
    pub struct ChangedNode {
        /// Its place in the list of nodes.
        place: u32,
        /// As in [`GraphNode`]. It may be another operation than before.
        opcode: u16,
        /// As in [`GraphNode`].
        body: Bytes,
    }
}

crate::wire_struct! {
    /// The contents of a draft.
    pub struct GraphPart {
        /// The draft's id.
        graph: GraphId,
        /// Its nodes, conditional ones included.
        nodes: Vec<GraphNode>,
    }
}

crate::wire_struct! {
    /// A graph with conditional nodes: the draft itself, and the drafts of all conditional nodes in it,
    /// nested ones included.
    pub struct GraphParts {
        /// The parts.
        parts: Vec<GraphPart>,
    }
}

/// `CUgraphConditionalNodeType`.
pub mod conditional {
    /// Runs one of two graphs.
    pub const IF: u32 = 0;
    /// Runs a graph repeatedly.
    pub const WHILE: u32 = 1;
    /// Runs the graph whose number is the condition's value.
    pub const SWITCH: u32 = 2;
}

/// Flags of a [`GraphCondition`].
pub mod condition_flag {
    /// `CU_GRAPH_COND_ASSIGN_DEFAULT`: each launch gives the condition its default value.
    pub const ASSIGN_DEFAULT: u32 = 1;
}

ops! {
    /// Graphs.
    ///
    /// The server knows a graph with conditional nodes before it is instantiated, as a *draft*, because
    /// kernels take the handles of its conditions and the server's driver chooses these handles.
    trait GraphOps;

    /// `cuGraphInstantiateWithFlags`. If a node's operation could not be enqueued on a stream either, the
    /// status is the error of the first such operation.
    sync 0x0a01 graph_instantiate: GraphInstantiate<'a>
        [order None, may_block Context, lane Main]
    {
        /// Context of all its nodes.
        context: ContextId,
        /// Its id.
        graph: GraphId,
        /// Those of `CUgraphInstantiate_flags` that concern the server.
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

    /// `cuGraphExecUpdate`: changes what later launches do. Launches that are already enqueued are
    /// unaffected.
    sync 0x0a05 graph_update: GraphUpdate<'a>
        [order Object, may_block Context, lane Main]
    {
        /// The graph.
        graph: GraphId,
        /// The wire form of [`GraphNodes`]. Nodes and dependencies may differ from before.
        nodes: HostIn<'a>,
    } -> GraphUpdateReply {}

    /// The same as [`GraphUpdate`] without an answer. If it fails, later launches of the graph fail with its
    /// status until it has been changed successfully.
    async 0x0a0b graph_change: GraphChange<'a>
        [order Object, may_block Context, lane Main, since 3]
    {
        /// The graph.
        graph: GraphId,
        /// The wire form of [`GraphNodes`].
        nodes: &'a [u8],
    }

    /// Changes some nodes of an instance, whose list the last [`GraphInstantiate`], [`GraphUpdate`] or
    /// [`GraphChange`] gave. A change of many nodes comes in several of these, of which the last one applies
    /// all. If it fails, later launches of the graph fail with its status until nodes have been changed
    /// successfully; the list has the refused nodes, too. If a node has no such place, or a body is
    /// malformed, there is no list any more until the next [`GraphUpdate`] or [`GraphChange`].
    async 0x0a0c graph_change_nodes: GraphChangeNodes
        [order Object, may_block Context, lane Main, since 8]
    {
        /// The graph.
        graph: GraphId,
        /// Whether no more nodes follow that belong to this change.
        last: bool,
        /// The nodes.
        nodes: Vec<ChangedNode>,
    }

    /// `cuGraphExecDestroy`. Launches in progress complete.
    async 0x0a04 graph_destroy: GraphDestroy
        [order Earlier, may_block Never, lane Main]
    {
        /// The graph.
        graph: GraphId,
    }

    /// `cuGraphConditionalHandleCreate`. Creates the draft if there is none with that id.
    sync 0x0a06 graph_condition: GraphCondition
        [order None, may_block Never, lane Main]
    {
        /// Context of all nodes of the graph.
        context: ContextId,
        /// The draft's id. Drafts and instantiated graphs have separate ids.
        graph: GraphId,
        /// Default value.
        default: u32,
        /// `CU_GRAPH_COND_ASSIGN_DEFAULT`, or 0.
        flags: u32,
    } -> GraphConditionReply {
        /// The handle that kernels use.
        handle: u64,
    }

    /// Adds a conditional node to a draft: `cuGraphAddNode`. Its dependencies follow when the graph is
    /// instantiated. Refused with `NOT_SUPPORTED` if the draft was instantiated before.
    sync 0x0a07 graph_conditional: GraphConditional
        [order None, may_block Never, lane Main]
    {
        /// The draft.
        graph: GraphId,
        /// Its condition, of this draft or of one that contains it.
        handle: u64,
        /// `CUgraphConditionalNodeType`.
        kind: u32,
        /// Ids of the node's graphs, which are drafts as well; none in use.
        bodies: Vec<GraphId>,
    } -> GraphConditionalReply {}

    /// `cuGraphInstantiateWithFlags` of a draft. Refused with `NOT_SUPPORTED` if its parts have changed since
    /// it was first instantiated.
    sync 0x0a08 graph_instantiate_draft: GraphInstantiateDraft<'a>
        [order None, may_block Context, lane Main]
    {
        /// Id of the instance.
        graph: GraphId,
        /// The draft, which is part of no other.
        draft: GraphId,
        /// As in `graph_instantiate`.
        flags: u64,
        /// The wire form of [`GraphParts`].
        parts: HostIn<'a>,
    } -> GraphInstantiateDraftReply {}

    /// `cuGraphDestroy` of a draft that is part of no other, with the drafts that are part of it. Its
    /// instances stay.
    async 0x0a09 graph_forget: GraphForget
        [order None, may_block Never, lane Main]
    {
        /// The draft.
        graph: GraphId,
    }

    /// Removes a conditional node and its graphs from a draft: `cuGraphDestroyNode`. Refused with
    /// `NOT_SUPPORTED` if the draft was instantiated before.
    sync 0x0a0a graph_conditional_remove: GraphConditionalRemove
        [order None, may_block Never, lane Main]
    {
        /// The first of the node's graphs.
        first: GraphId,
    } -> GraphConditionalRemoveReply {}
}
