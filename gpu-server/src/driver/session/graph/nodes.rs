//! Reads the nodes of a graph that a client describes.

use protocol::Status;
use protocol::handle::GraphId;
use protocol::ops::copy::{MemcpyDtoD, MemcpyDtoD3D, Memset};
use protocol::ops::graph::{ChangedNode, GraphConditional, GraphNode, GraphNodes, GraphParts};
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

/// Changes nodes of a list. After an error the list is not used any more.
///
/// # Errors
/// As for [`read`], and `INVALID_VALUE` if the list has no such places or would be larger than a client may
/// send it.
pub(super) fn change(nodes: &mut [GraphNode], changed: Vec<ChangedNode>) -> Result<(), Status> {
    for ChangedNode { place, opcode, body } in changed {
        let node = nodes.get_mut(place as usize).ok_or(Status::INVALID_VALUE)?;
        (node.opcode, node.body) = (opcode, body);
        check_operation(node, false)?;
    }
    let size: u64 = nodes.iter().map(|node| node.body.0.len() as u64).sum();
    if size > MAX_GRAPH { Err(Status::INVALID_VALUE) } else { Ok(()) }
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
        check_operation(node, draft)?;
    }
    Ok(())
}

fn check_operation(node: &GraphNode, draft: bool) -> Result<(), Status> {
    match operation(node)? {
        Operation::Conditional(_) if !draft => Err(Status::NOT_SUPPORTED),
        _ => Ok(()),
    }
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
    use protocol::handle::{FunctionId, StreamId};
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

    #[test]
    fn a_changed_node_has_a_place_and_an_operation_that_can_be_a_node() {
        let mut nodes = vec![empty(vec![]), empty(vec![0])];
        let changed =
            |place, opcode, body: &[u8]| vec![ChangedNode { place, opcode, body: Bytes(body.to_vec()) }];
        let conditional = <GraphConditional as Op>::INFO.opcode;
        assert_eq!(change(&mut nodes.clone(), changed(1, 0, &[])), Ok(()));
        for (bad, status) in [
            (changed(2, 0, &[]), Status::INVALID_VALUE),
            (changed(u32::MAX, 0, &[]), Status::INVALID_VALUE),
            (changed(0, 0, &[1]), Status::INVALID_VALUE),
            (changed(0, <Memset as Op>::INFO.opcode, &[1, 2, 3]), Status::INVALID_VALUE),
            (changed(0, conditional, &[7, 0, 0, 0]), Status::NOT_SUPPORTED),
            (changed(0, 0x0a01, &[]), Status::NOT_SUPPORTED),
        ] {
            assert_eq!(change(&mut nodes.clone(), bad.clone()), Err(status), "{bad:?}");
        }
        // Two halves are too much, because an operation has more than its parameters.
        let params = vec![0; MAX_GRAPH as usize / 2];
        let launch = Launch {
            function: FunctionId(0),
            stream: StreamId(0),
            grid: [1; 3],
            block: [1; 3],
            dynamic_shared: 0,
            attributes: vec![],
            params: &params,
        };
        let mut body = Vec::new();
        launch.put(&mut Writer(&mut body));
        let opcode = <Launch as Op>::INFO.opcode;
        assert_eq!(change(&mut nodes, changed(0, opcode, &body)), Ok(()));
        assert_eq!(change(&mut nodes, changed(1, opcode, &body)), Err(Status::INVALID_VALUE));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = read(&bytes);
            let _ = read_parts(&bytes);
        }
    }
}
