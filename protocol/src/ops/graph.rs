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
        /// Opcode of its operation: `launch`, `memset`, `memcpy_dtod`, `memcpy_dtod_3d` or `stream_batch_mem_op`; 0: an empty node.
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

ops! {
    /// Graphs.
    trait GraphOps;

    /// `cuGraphInstantiateWithFlags`. A node's operation that could not be enqueued on a stream either is answered with its own error.
    sync 0x0a01 graph_instantiate: GraphInstantiate<'a> {
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
    async 0x0a02 graph_launch: GraphLaunch {
        /// The graph.
        graph: GraphId,
        /// Stream.
        stream: StreamId,
    }

    /// `cuGraphUpload`.
    async 0x0a03 graph_upload: GraphUpload {
        /// The graph.
        graph: GraphId,
        /// Stream.
        stream: StreamId,
    }

    /// `cuGraphExecUpdate`: the graph does something else from the next launch on. Launches that were enqueued before do what it did.
    sync 0x0a05 graph_update: GraphUpdate<'a> {
        /// The graph.
        graph: GraphId,
        /// The wire form of [`GraphNodes`]. It need not have the nodes and dependencies that it had.
        nodes: HostIn<'a>,
    } -> GraphUpdateReply {}

    /// `cuGraphExecDestroy`. Launches that are under way complete.
    async 0x0a04 graph_destroy: GraphDestroy {
        /// The graph.
        graph: GraphId,
    }
}
