//! Memory operations as nodes of graphs.

use protocol::Status;
use protocol::handle::ContextId;

use super::Cuda;
use super::api::{BatchMemOp, BatchMemOpNode, CUgraph, CUgraphNode};

impl Cuda {
    /// Adds operations to a graph as one node, behind others of it.
    pub(super) fn memory_ops_node(
        &self,
        context: ContextId,
        graph: CUgraph,
        before: &[CUgraphNode],
        mut operations: Vec<BatchMemOp>,
    ) -> Result<CUgraphNode, Status> {
        let params = BatchMemOpNode {
            context: self.context(context)?.handle,
            count: operations.len() as u32,
            operations: operations.as_mut_ptr(),
            flags: 0,
        };
        let mut node: CUgraphNode = std::ptr::null_mut();
        // SAFETY: nodes of this graph, as many as the length says; a description that lives through the call; writes a handle.
        let added = unsafe {
            self.api.graph_add_memory_ops(&mut node, graph, before.as_ptr(), before.len(), &params)
        };
        self.note(context, added)?;
        Ok(node)
    }
}
