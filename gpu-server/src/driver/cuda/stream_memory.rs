//! Memory operations of streams: their words are in memory of the session's, on a device or where one reaches the client's.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::stream::{MemoryOp, memory_op};

use super::Cuda;
use super::api::{BatchMemOp, BatchMemOpNode, CUgraph, CUgraphNode, CUstream};
use crate::driver::session::Session;

impl Session<Cuda> {
    /// The operations as the driver takes them, each checked.
    fn memory_ops(&self, operations: &[MemoryOp]) -> Result<Vec<BatchMemOp>, Status> {
        if operations.is_empty() || operations.len() > memory_op::MOST {
            return Err(Status::INVALID_VALUE);
        }
        operations.iter().map(|op| self.memory_op(op)).collect()
    }

    fn memory_op(&self, op: &MemoryOp) -> Result<BatchMemOp, Status> {
        let (address, width) = (op.address, op.width());
        if !op.is_valid() {
            return Err(Status::INVALID_VALUE);
        }
        if width == 0 {
            return Ok(BatchMemOp {
                operation: op.operation,
                short_flags: op.flags,
                ..BatchMemOp::default()
            });
        }
        self.check_range(address, width, 0)?;
        Ok(BatchMemOp {
            operation: op.operation,
            address,
            value: op.value,
            flags: op.flags,
            ..BatchMemOp::default()
        })
    }

    /// Enqueues operations on a stream of a context, which is current.
    pub(super) fn memory_ops_at(
        &self,
        context: ContextId,
        stream: CUstream,
        operations: &[MemoryOp],
    ) -> Result<(), Status> {
        let mut all = self.memory_ops(operations)?;
        // SAFETY: a live stream; as many operations as the length says, on words of the session.
        let enqueued = unsafe { self.api.stream_memory_ops(stream, all.len() as u32, all.as_mut_ptr(), 0) };
        self.note(context, enqueued)
    }

    /// Adds operations to a graph as one node, behind others of it.
    pub(super) fn memory_ops_node(
        &self,
        context: ContextId,
        graph: CUgraph,
        before: &[CUgraphNode],
        operations: &[MemoryOp],
    ) -> Result<CUgraphNode, Status> {
        let mut all = self.memory_ops(operations)?;
        let params = BatchMemOpNode {
            context: self.context(context)?.handle,
            count: all.len() as u32,
            operations: all.as_mut_ptr(),
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
