//! Graphs with conditional nodes, before and while they are instantiated: what of them both backends have in common.
//!
//! A *draft* is a graph that has conditions; the graphs of its conditional nodes, and of theirs, are drafts that belong to it. Everything that a client names is checked here
//! before a backend does anything; the methods that change something are called when the backend has succeeded.

use std::collections::{HashMap, HashSet};

use protocol::Status;
use protocol::handle::{ContextId, GraphId};
use protocol::ops::graph::{GraphConditional, GraphParts, condition_flag, conditional};

use super::graph::{Work, work};

/// Drafts, and conditions, of a session at most.
const MOST: usize = 1 << 16;
/// Conditional nodes inside conditional nodes at most.
const DEEPEST: u32 = 64;

/// A draft. `G`: what the backend has for it.
pub struct Draft<G> {
    /// Its context.
    pub context: u32,
    /// The draft that it belongs to: itself, if to no other.
    pub root: u32,
    /// The backend's.
    pub graph: G,
    /// First graphs of its conditional nodes.
    nodes: Vec<u32>,
    depth: u32,
}

/// A conditional node. `N`: what the backend has for it.
pub struct Node<N> {
    /// Its condition.
    pub handle: u64,
    /// `CUgraphConditionalNodeType`.
    pub kind: u32,
    /// Names of its graphs.
    pub bodies: Vec<u32>,
    /// The backend's.
    pub native: N,
}

/// A condition. `C`: what the backend has for it.
struct Condition<C> {
    root: u32,
    used: bool,
    native: C,
}

/// A session's.
pub struct Drafts<G, N, C> {
    drafts: HashMap<u32, Draft<G>>,
    nodes: HashMap<u32, Node<N>>,
    conditions: HashMap<u64, Condition<C>>,
}

impl<G, N, C> Default for Drafts<G, N, C> {
    fn default() -> Drafts<G, N, C> {
        Drafts { drafts: HashMap::new(), nodes: HashMap::new(), conditions: HashMap::new() }
    }
}

impl<G, N, C> Drafts<G, N, C> {
    /// The draft of a name.
    pub fn get(&self, graph: GraphId) -> Result<&Draft<G>, Status> {
        self.drafts.get(&graph.0).ok_or(Status::INVALID_HANDLE)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, graph: GraphId) -> Result<&mut Draft<G>, Status> {
        self.drafts.get_mut(&graph.0).ok_or(Status::INVALID_HANDLE)
    }

    /// The conditional node whose first graph this is.
    pub fn node(&self, first: GraphId) -> Result<&Node<N>, Status> {
        self.nodes.get(&first.0).ok_or(Status::INVALID_HANDLE)
    }

    /// The backend's part of a condition.
    pub fn condition(&self, handle: u64) -> Result<&C, Status> {
        self.conditions.get(&handle).map(|found| &found.native).ok_or(Status::INVALID_HANDLE)
    }

    /// Every condition of a draft that belongs to no other, and of those that belong to it.
    pub fn conditions_of(&self, root: u32) -> impl Iterator<Item = &C> {
        self.conditions.values().filter(move |c| c.root == root).map(|c| &c.native)
    }

    /// Whether a draft, or one that is yet to be made, may have another condition. True: it is yet to be made.
    pub fn may_have_condition(&self, context: ContextId, graph: GraphId, flags: u32) -> Result<bool, Status> {
        if flags & !condition_flag::ASSIGN_DEFAULT != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if self.conditions.len() >= MOST || self.drafts.len() >= MOST {
            return Err(Status::OUT_OF_MEMORY);
        }
        match self.drafts.get(&graph.0) {
            Some(draft) if draft.context != context.0 => Err(Status::INVALID_CONTEXT),
            found => Ok(found.is_none()),
        }
    }

    /// A draft that belongs to no other is made.
    pub fn add(&mut self, context: ContextId, graph: GraphId, native: G) {
        let draft = Draft { context: context.0, root: graph.0, graph: native, nodes: Vec::new(), depth: 0 };
        self.drafts.insert(graph.0, draft);
    }

    /// A draft has a condition.
    pub fn add_condition(&mut self, graph: GraphId, handle: u64, native: C) {
        if let Some(draft) = self.drafts.get(&graph.0) {
            self.conditions.insert(handle, Condition { root: draft.root, used: false, native });
        }
    }

    /// Whether a draft may have such a node.
    pub fn may_have_node(&self, op: &GraphConditional) -> Result<&Draft<G>, Status> {
        let draft = self.get(op.graph)?;
        let condition = self.conditions.get(&op.handle).ok_or(Status::INVALID_VALUE)?;
        let size = op.bodies.len();
        let sized = match op.kind {
            conditional::IF => size == 1 || size == 2,
            conditional::WHILE => size == 1,
            conditional::SWITCH => size >= 1,
            _ => false,
        };
        if condition.root != draft.root || condition.used || !sized {
            return Err(Status::INVALID_VALUE);
        }
        if draft.depth >= DEEPEST {
            return Err(Status::NOT_SUPPORTED);
        }
        if size > MOST - self.drafts.len().min(MOST) {
            return Err(Status::OUT_OF_MEMORY);
        }
        let mut seen = HashSet::new();
        if op.bodies.iter().any(|body| self.drafts.contains_key(&body.0) || !seen.insert(body.0)) {
            return Err(Status::INVALID_HANDLE);
        }
        Ok(draft)
    }

    /// It has it; `graphs`: what the backend has for the node's graphs.
    pub fn add_node(&mut self, op: &GraphConditional, native: N, graphs: Vec<G>) {
        let Some(draft) = self.drafts.get_mut(&op.graph.0) else { return };
        let (context, root, depth) = (draft.context, draft.root, draft.depth + 1);
        let Some(first) = op.bodies.first() else { return };
        draft.nodes.push(first.0);
        for (body, graph) in op.bodies.iter().zip(graphs) {
            self.drafts.insert(body.0, Draft { context, root, graph, nodes: Vec::new(), depth });
        }
        if let Some(condition) = self.conditions.get_mut(&op.handle) {
            condition.used = true;
        }
        let bodies = op.bodies.iter().map(|body| body.0).collect();
        self.nodes.insert(first.0, Node { handle: op.handle, kind: op.kind, bodies, native });
    }

    /// The draft that has the conditional node whose first graph this is.
    pub fn owner(&self, first: GraphId) -> Result<&Draft<G>, Status> {
        self.drafts.values().find(|draft| draft.nodes.contains(&first.0)).ok_or(Status::INVALID_HANDLE)
    }

    /// A conditional node goes, with its graphs and the nodes in them. Its condition is not for another.
    pub fn remove_node(&mut self, first: GraphId) {
        for draft in self.drafts.values_mut() {
            draft.nodes.retain(|node| *node != first.0);
        }
        let mut open = vec![first.0];
        while let Some(node) = open.pop().and_then(|first| self.nodes.remove(&first)) {
            let bodies = node.bodies.iter().filter_map(|body| self.drafts.remove(body));
            open.extend(bodies.flat_map(|body| body.nodes));
        }
    }

    /// Whether these parts make up a draft that belongs to no other: it is the first; it and all that belong to it are there, each with all of its conditional nodes.
    pub fn check_parts(&self, draft: GraphId, parts: &GraphParts) -> Result<(), Status> {
        if self.get(draft)?.root != draft.0 || parts.parts.first().is_none_or(|part| part.graph != draft) {
            return Err(Status::INVALID_VALUE);
        }
        let mut seen = HashSet::new();
        for part in &parts.parts {
            let found = self.get(part.graph)?;
            if found.root != draft.0 || !seen.insert(part.graph.0) {
                return Err(Status::INVALID_VALUE);
            }
            let mut nodes: HashSet<u32> = found.nodes.iter().copied().collect();
            for node in &part.nodes {
                if let Work::Conditional(first) = work(node)?
                    && !nodes.remove(&first.0)
                {
                    return Err(Status::INVALID_VALUE);
                }
            }
            if !nodes.is_empty() {
                return Err(Status::INVALID_VALUE);
            }
        }
        let all = self.drafts.values().filter(|other| other.root == draft.0).count();
        if all == seen.len() { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }

    /// A draft that belongs to no other goes, with all that belong to it; the backend's part of it.
    pub fn forget(&mut self, graph: GraphId) -> Result<Draft<G>, Status> {
        if self.get(graph)?.root != graph.0 {
            return Err(Status::INVALID_HANDLE);
        }
        let draft = self.drafts.remove(&graph.0).ok_or(Status::INVALID_HANDLE)?;
        self.drafts.retain(|_, other| other.root != graph.0);
        self.nodes.retain(|first, _| self.drafts.contains_key(first));
        self.conditions.retain(|_, condition| condition.root != graph.0);
        Ok(draft)
    }

    /// All of a context's are gone with it.
    pub fn forget_context(&mut self, context: u32) {
        self.drafts.retain(|_, draft| draft.context != context);
        self.nodes.retain(|first, _| self.drafts.contains_key(first));
        self.conditions.retain(|_, condition| self.drafts.contains_key(&condition.root));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::ops::Op;
    use protocol::ops::graph::{GraphNode, GraphPart};
    use protocol::wire::Bytes;

    fn op(graph: u32, handle: u64, kind: u32, bodies: &[u32]) -> GraphConditional {
        let bodies = bodies.iter().map(|body| GraphId(*body)).collect();
        GraphConditional { graph: GraphId(graph), handle, kind, bodies }
    }

    fn part(graph: u32, conditionals: &[u32]) -> GraphPart {
        let opcode = <GraphConditional as Op>::INFO.opcode;
        let node = |first: &u32| GraphNode {
            opcode,
            dependencies: vec![],
            body: Bytes(first.to_le_bytes().to_vec()),
        };
        GraphPart { graph: GraphId(graph), nodes: conditionals.iter().map(node).collect() }
    }

    /// Draft 1 with a loop whose graph, 2, has a choice between 3 and 4.
    fn drafts() -> Drafts<(), (), ()> {
        let mut drafts = Drafts::default();
        drafts.add(ContextId(0), GraphId(1), ());
        for handle in [100, 101, 102] {
            drafts.add_condition(GraphId(1), handle, ());
        }
        for op in [op(1, 100, conditional::WHILE, &[2]), op(2, 101, conditional::IF, &[3, 4])] {
            drafts.may_have_node(&op).unwrap();
            let graphs = vec![(); op.bodies.len()];
            drafts.add_node(&op, (), graphs);
        }
        drafts
    }

    #[test]
    fn a_condition_is_of_its_draft_and_for_one_node() {
        let mut drafts = drafts();
        drafts.add(ContextId(0), GraphId(9), ());
        for bad in [
            op(1, 100, conditional::WHILE, &[5]),
            op(9, 102, conditional::WHILE, &[5]),
            op(1, 77, conditional::WHILE, &[5]),
            op(1, 102, conditional::WHILE, &[5, 6]),
            op(1, 102, conditional::IF, &[5, 6, 7]),
            op(1, 102, conditional::SWITCH, &[]),
            op(1, 102, 3, &[5]),
        ] {
            assert_eq!(drafts.may_have_node(&bad).err(), Some(Status::INVALID_VALUE), "{bad:?}");
        }
        for bad in
            [op(1, 102, conditional::SWITCH, &[5, 5]), op(1, 102, conditional::IF, &[3]), op(8, 102, 0, &[5])]
        {
            assert_eq!(drafts.may_have_node(&bad).err(), Some(Status::INVALID_HANDLE), "{bad:?}");
        }
        assert!(drafts.may_have_node(&op(4, 102, conditional::SWITCH, &[5, 6, 7])).is_ok());
    }

    #[test]
    fn parts_are_the_whole_of_a_draft_or_refused() {
        let drafts = drafts();
        let check = |parts| drafts.check_parts(GraphId(1), &GraphParts { parts });
        assert_eq!(check(vec![part(1, &[2]), part(2, &[3]), part(3, &[]), part(4, &[])]), Ok(()));
        for bad in [
            vec![],
            vec![part(2, &[3]), part(1, &[2]), part(3, &[]), part(4, &[])],
            vec![part(1, &[2]), part(2, &[3]), part(3, &[])],
            vec![part(1, &[2]), part(2, &[3]), part(3, &[]), part(3, &[])],
            vec![part(1, &[]), part(2, &[3]), part(3, &[]), part(4, &[])],
            vec![part(1, &[2, 2]), part(2, &[3]), part(3, &[]), part(4, &[])],
            vec![part(1, &[2]), part(2, &[]), part(3, &[3]), part(4, &[])],
        ] {
            assert_eq!(check(bad.clone()), Err(Status::INVALID_VALUE), "{bad:?}");
        }
        assert_eq!(drafts.check_parts(GraphId(2), &GraphParts { parts: vec![] }), Err(Status::INVALID_VALUE));
    }

    #[test]
    fn a_node_goes_with_its_graphs_and_all_nodes_in_them() {
        let mut drafts = drafts();
        assert!(drafts.owner(GraphId(3)).is_ok_and(|draft| draft.depth == 1));
        drafts.remove_node(GraphId(2));
        assert!(drafts.nodes.is_empty() && drafts.drafts.len() == 1);
        assert_eq!(drafts.owner(GraphId(2)).err(), Some(Status::INVALID_HANDLE));
        assert_eq!(drafts.check_parts(GraphId(1), &GraphParts { parts: vec![part(1, &[])] }), Ok(()));
        let again = op(1, 100, conditional::WHILE, &[2]);
        assert_eq!(drafts.may_have_node(&again).err(), Some(Status::INVALID_VALUE));
    }

    #[test]
    fn a_draft_goes_with_all_that_belong_to_it() {
        let mut drafts = drafts();
        assert_eq!(drafts.forget(GraphId(2)).err(), Some(Status::INVALID_HANDLE));
        assert!(drafts.forget(GraphId(1)).is_ok());
        assert!(drafts.drafts.is_empty() && drafts.nodes.is_empty() && drafts.conditions.is_empty());
    }
}
