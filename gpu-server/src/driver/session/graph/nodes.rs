//! Reads the nodes of a graph that a client describes.

use protocol::Status;
use protocol::handle::GraphId;
use protocol::ops::copy::{MemcpyDtoD, MemcpyDtoD3D, Memset};
use protocol::ops::graph::{GraphConditional, GraphNode, GraphNodes, GraphParts};
use protocol::ops::launch::Launch;
use protocol::ops::stream::StreamBatchMemOp;
use protocol::ops::{Op, decode_reply};
use protocol::wire::{Reader, Wire};

/// Maximum size of a graph's description, in bytes.
pub(super) const MAX_GRAPH: u64 = 64 << 20;

/// What a node does. The stream in it is ignored.
pub(super) enum Operation<'a> {
    Empty,
    Launch(Launch<'a>),
    Memset(Memset),
    Copy(MemcpyDtoD),
    Copy3D(MemcpyDtoD3D),
    MemoryOps(StreamBatchMemOp),
    /// The conditional node whose first graph this is.
    Conditional(GraphId),
}

/// Reads a list of nodes. Each must come after those it depends on, and none may be conditional.
///
/// # Errors
/// `INVALID_VALUE` if the bytes are no such list, `NOT_SUPPORTED` for an operation that cannot be a node.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<GraphNode>, Status> {
    let list: GraphNodes = decode_reply(bytes).map_err(|_| Status::INVALID_VALUE)?;
    check(&list.nodes, false)?;
    Ok(list.nodes)
}

/// Reads the parts of a draft. In each part, every node must come after those it depends on.
///
/// # Errors
/// As for [`read`].
pub(super) fn read_parts(bytes: &[u8]) -> Result<GraphParts, Status> {
    let all: GraphParts = decode_reply(bytes).map_err(|_| Status::INVALID_VALUE)?;
    all.parts.iter().try_for_each(|part| check(&part.nodes, true))?;
    Ok(all)
}

fn check(nodes: &[GraphNode], draft: bool) -> Result<(), Status> {
    for (place, node) in nodes.iter().enumerate() {
        if node.dependencies.iter().any(|from| *from as usize >= place) {
            return Err(Status::INVALID_VALUE);
        }
        if matches!(operation(node)?, Operation::Conditional(_)) && !draft {
            return Err(Status::NOT_SUPPORTED);
        }
    }
    Ok(())
}

fn decode<'a, T: Op<'a>>(body: &'a [u8]) -> Result<T, Status> {
    let mut reader = Reader::new(body);
    let decoded = <T as Wire<'a>>::get(&mut reader).and_then(|op| reader.finish().map(|()| op));
    decoded.map_err(|_| Status::INVALID_VALUE)
}

/// What a node does.
///
/// # Errors
/// As for [`read`].
pub(super) fn operation(node: &GraphNode) -> Result<Operation<'_>, Status> {
    let body = &node.body.0;
    match node.opcode {
        0 if body.is_empty() => Ok(Operation::Empty),
        0 => Err(Status::INVALID_VALUE),
        opcode if opcode == <Launch as Op>::INFO.opcode => decode(body).map(Operation::Launch),
        opcode if opcode == <Memset as Op>::INFO.opcode => decode(body).map(Operation::Memset),
        opcode if opcode == <MemcpyDtoD as Op>::INFO.opcode => decode(body).map(Operation::Copy),
        opcode if opcode == <MemcpyDtoD3D as Op>::INFO.opcode => decode(body).map(Operation::Copy3D),
        opcode if opcode == <StreamBatchMemOp as Op>::INFO.opcode => decode(body).map(Operation::MemoryOps),
        opcode if opcode == <GraphConditional as Op>::INFO.opcode => {
            decode_reply(body).map(Operation::Conditional).map_err(|_| Status::INVALID_VALUE)
        }
        _ => Err(Status::NOT_SUPPORTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::wire::{Bytes, Writer};

    fn bytes(nodes: Vec<GraphNode>) -> Vec<u8> {
        let mut bytes = Vec::new();
        GraphNodes { nodes }.put(&mut Writer(&mut bytes));
        bytes
    }

    fn empty(dependencies: Vec<u32>) -> GraphNode {
        GraphNode { opcode: 0, dependencies, body: Bytes(Vec::new()) }
    }

    #[test]
    fn a_node_that_waits_for_itself_or_a_later_one_is_refused() {
        assert!(read(&bytes(vec![empty(vec![]), empty(vec![0])])).is_ok());
        for from in [1, 2, u32::MAX] {
            let list = bytes(vec![empty(vec![]), empty(vec![from]), empty(vec![])]);
            assert_eq!(read(&list).err(), Some(Status::INVALID_VALUE), "{from}");
        }
    }

    #[test]
    fn an_operation_that_cannot_be_a_node_is_refused() {
        for opcode in [1, 0x0a01, u16::MAX] {
            let node = GraphNode { opcode, dependencies: vec![], body: Bytes(vec![]) };
            assert_eq!(read(&bytes(vec![node])).err(), Some(Status::NOT_SUPPORTED), "{opcode:#x}");
        }
    }

    #[test]
    fn a_body_that_is_no_operation_is_refused() {
        let opcode = <Memset as Op>::INFO.opcode;
        let node = GraphNode { opcode, dependencies: vec![], body: Bytes(vec![1, 2, 3]) };
        assert_eq!(read(&bytes(vec![node])).err(), Some(Status::INVALID_VALUE));
    }

    #[test]
    fn only_a_draft_has_conditional_nodes() {
        let opcode = <GraphConditional as Op>::INFO.opcode;
        let node = GraphNode { opcode, dependencies: vec![], body: Bytes(vec![7, 0, 0, 0]) };
        assert!(matches!(operation(&node), Ok(Operation::Conditional(GraphId(7)))));
        assert_eq!(read(&bytes(vec![node])).err(), Some(Status::NOT_SUPPORTED));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = read(&bytes);
            let _ = read_parts(&bytes);
        }
    }
}
