//! Drafts: graphs with conditional nodes, which the server knows before they are instantiated.
//!
//! A draft has conditions. The graphs of its conditional nodes, and of the conditional nodes in those, are
//! drafts that belong to it: it is their *root*. `check_…` methods check what a client names before the GPU
//! is called; `add_…` and `remove_…` note what the GPU has done.

use std::collections::{HashMap, HashSet};

use protocol::Status;
use protocol::handle::{ContextId, GraphId};
use protocol::ops::graph::{GraphConditional, GraphParts, condition_flag, conditional};

use super::nodes::{Operation, operation};

/// Maximum number of drafts of a session, and of conditions.
const MAX_DRAFTS: usize = 1 << 16;
/// Maximum depth of conditional nodes inside conditional nodes.
const MAX_DEPTH: u32 = 64;

/// A draft. `D` belongs to the GPU.
pub(super) struct Draft<D> {
    pub context: u32,
    /// The root; its own ID if it is a root.
    pub root: u32,
    pub native: D,
    /// Used only in a root, for all drafts that belong to it.
    contents: Contents,
    /// First graphs of its conditional nodes.
    nodes: Vec<u32>,
    depth: u32,
}

/// Whether a root and its drafts have been filled with nodes. That happens once, because NVIDIA's driver
/// takes nodes out of a graph one by one only.
pub(super) enum Contents {
    /// Not yet.
    Open,
    /// With this description.
    Filled(Vec<u8>),
    /// The GPU refused a node. Those before it are there.
    Failed,
}

/// A conditional node. `N` belongs to the GPU.
pub(super) struct Node<N> {
    pub native: N,
    /// Ids of its graphs.
    bodies: Vec<u32>,
}

struct Condition {
    root: u32,
    used: bool,
}

/// A session's drafts, conditional nodes and conditions.
pub(super) struct Drafts<D, N> {
    drafts: HashMap<u32, Draft<D>>,
    /// By the first of a node's graphs.
    nodes: HashMap<u32, Node<N>>,
    /// By context and handle: contexts may use the same handles.
    conditions: HashMap<(u32, u64), Condition>,
}

impl<D, N> Default for Drafts<D, N> {
    fn default() -> Drafts<D, N> {
        Drafts { drafts: HashMap::new(), nodes: HashMap::new(), conditions: HashMap::new() }
    }
}

impl<D, N> Drafts<D, N> {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.drafts.is_empty()
    }

    /// A draft.
    pub fn get(&self, graph: GraphId) -> Result<&Draft<D>, Status> {
        self.drafts.get(&graph.0).ok_or(Status::INVALID_HANDLE)
    }

    /// What a root was filled with.
    pub fn contents_mut(&mut self, root: GraphId) -> Result<&mut Contents, Status> {
        self.drafts.get_mut(&root.0).map(|draft| &mut draft.contents).ok_or(Status::INVALID_HANDLE)
    }

    /// The conditional node whose first graph this is.
    pub fn node(&self, first: GraphId) -> Result<&Node<N>, Status> {
        self.nodes.get(&first.0).ok_or(Status::INVALID_HANDLE)
    }

    /// Checks that a draft may get another condition. Returns true if the draft itself has to be made first.
    pub fn check_new_condition(
        &self,
        context: ContextId,
        graph: GraphId,
        flags: u32,
    ) -> Result<bool, Status> {
        if flags & !condition_flag::ASSIGN_DEFAULT != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if self.conditions.len() >= MAX_DRAFTS || self.drafts.len() >= MAX_DRAFTS {
            return Err(Status::OUT_OF_MEMORY);
        }
        match self.drafts.get(&graph.0) {
            Some(draft) if draft.context != context.0 => Err(Status::INVALID_CONTEXT),
            found => Ok(found.is_none()),
        }
    }

    fn insert(&mut self, id: GraphId, context: u32, root: u32, depth: u32, native: D) {
        let draft = Draft { context, root, native, contents: Contents::Open, nodes: Vec::new(), depth };
        self.drafts.insert(id.0, draft);
    }

    /// A root was made.
    pub fn add(&mut self, context: ContextId, graph: GraphId, native: D) {
        self.insert(graph, context.0, graph.0, 0, native);
    }

    /// A condition of a draft was made.
    pub fn add_condition(&mut self, graph: GraphId, handle: u64) {
        if let Some(draft) = self.drafts.get(&graph.0) {
            self.conditions.insert((draft.context, handle), Condition { root: draft.root, used: false });
        }
    }

    /// Checks that a draft may get such a conditional node.
    pub fn check_new_node(&self, op: &GraphConditional) -> Result<(), Status> {
        let draft = self.get(op.graph)?;
        let condition = self.conditions.get(&(draft.context, op.handle)).ok_or(Status::INVALID_VALUE)?;
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
        if draft.depth >= MAX_DEPTH {
            return Err(Status::NOT_SUPPORTED);
        }
        if size > MAX_DRAFTS - self.drafts.len().min(MAX_DRAFTS) {
            return Err(Status::OUT_OF_MEMORY);
        }
        let mut seen = HashSet::new();
        if op.bodies.iter().any(|body| self.drafts.contains_key(&body.0) || !seen.insert(body.0)) {
            return Err(Status::INVALID_HANDLE);
        }
        Ok(())
    }

    /// A conditional node was made. `graphs` are the GPU's for the node's graphs.
    pub fn add_node(&mut self, op: &GraphConditional, native: N, graphs: Vec<D>) {
        let Some(draft) = self.drafts.get_mut(&op.graph.0) else { return };
        let (context, root, depth) = (draft.context, draft.root, draft.depth + 1);
        let Some(first) = op.bodies.first() else { return };
        draft.nodes.push(first.0);
        for (body, graph) in op.bodies.iter().zip(graphs) {
            self.insert(*body, context, root, depth, graph);
        }
        if let Some(condition) = self.conditions.get_mut(&(context, op.handle)) {
            condition.used = true;
        }
        let bodies = op.bodies.iter().map(|body| body.0).collect();
        self.nodes.insert(first.0, Node { native, bodies });
    }

    /// The draft that contains the conditional node whose first graph this is.
    pub fn owner(&self, first: GraphId) -> Result<GraphId, Status> {
        let owner = self.drafts.iter().find(|(_, draft)| draft.nodes.contains(&first.0));
        owner.map(|(id, _)| GraphId(*id)).ok_or(Status::INVALID_HANDLE)
    }

    /// A conditional node was removed, with its graphs and the nodes in them. Its condition stays used.
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

    /// Checks that these are all parts of a root: first the root, then all drafts that belong to it, each
    /// with all its conditional nodes.
    pub fn check_parts(&self, root: GraphId, parts: &GraphParts) -> Result<(), Status> {
        if self.get(root)?.root != root.0 || parts.parts.first().is_none_or(|part| part.graph != root) {
            return Err(Status::INVALID_VALUE);
        }
        let mut seen = HashSet::new();
        for part in &parts.parts {
            let found = self.get(part.graph)?;
            if found.root != root.0 || !seen.insert(part.graph.0) {
                return Err(Status::INVALID_VALUE);
            }
            let mut nodes: HashSet<u32> = found.nodes.iter().copied().collect();
            for node in &part.nodes {
                if let Operation::Conditional(first) = operation(node)?
                    && !nodes.remove(&first.0)
                {
                    return Err(Status::INVALID_VALUE);
                }
            }
            if !nodes.is_empty() {
                return Err(Status::INVALID_VALUE);
            }
        }
        let all = self.drafts.values().filter(|other| other.root == root.0).count();
        if all == seen.len() { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }

    /// Drops a root, with all drafts that belong to it.
    pub fn forget(&mut self, root: GraphId) -> Result<(), Status> {
        if self.get(root)?.root != root.0 {
            return Err(Status::INVALID_HANDLE);
        }
        self.retain(|draft| draft.root != root.0);
        Ok(())
    }

    /// Drops the drafts of a destroyed context.
    pub fn forget_context(&mut self, context: ContextId) {
        self.retain(|draft| draft.context != context.0);
    }

    fn retain(&mut self, keep: impl Fn(&Draft<D>) -> bool) {
        self.drafts.retain(|_, draft| keep(draft));
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
    fn drafts() -> Drafts<(), ()> {
        let mut drafts = Drafts::default();
        drafts.add(ContextId(0), GraphId(1), ());
        for handle in [100, 101, 102] {
            drafts.add_condition(GraphId(1), handle);
        }
        for op in [op(1, 100, conditional::WHILE, &[2]), op(2, 101, conditional::IF, &[3, 4])] {
            drafts.check_new_node(&op).unwrap();
            let graphs = vec![(); op.bodies.len()];
            drafts.add_node(&op, (), graphs);
        }
        drafts
    }

    #[test]
    fn a_condition_belongs_to_one_draft_and_serves_one_node() {
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
            assert_eq!(drafts.check_new_node(&bad).err(), Some(Status::INVALID_VALUE), "{bad:?}");
        }
        for bad in
            [op(1, 102, conditional::SWITCH, &[5, 5]), op(1, 102, conditional::IF, &[3]), op(8, 102, 0, &[5])]
        {
            assert_eq!(drafts.check_new_node(&bad).err(), Some(Status::INVALID_HANDLE), "{bad:?}");
        }
        assert!(drafts.check_new_node(&op(4, 102, conditional::SWITCH, &[5, 6, 7])).is_ok());
    }

    #[test]
    fn contexts_may_use_the_same_handles_for_their_conditions() {
        let mut drafts = Drafts::<(), ()>::default();
        for context in 0..2 {
            let graph = GraphId(10 + context);
            drafts.add(ContextId(context), graph, ());
            drafts.add_condition(graph, 100);
        }
        for graph in [10, 11] {
            let node = op(graph, 100, conditional::IF, &[graph + 10]);
            assert_eq!(drafts.check_new_node(&node), Ok(()), "{graph}");
            drafts.add_node(&node, (), vec![()]);
        }
    }

    #[test]
    fn parts_must_be_the_whole_draft() {
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
    fn removing_a_node_removes_its_graphs_and_their_nodes() {
        let mut drafts = drafts();
        assert_eq!(drafts.owner(GraphId(3)), Ok(GraphId(2)));
        drafts.remove_node(GraphId(2));
        assert!(drafts.nodes.is_empty() && drafts.drafts.len() == 1);
        assert_eq!(drafts.owner(GraphId(2)).err(), Some(Status::INVALID_HANDLE));
        assert_eq!(drafts.check_parts(GraphId(1), &GraphParts { parts: vec![part(1, &[])] }), Ok(()));
        let again = op(1, 100, conditional::WHILE, &[2]);
        assert_eq!(drafts.check_new_node(&again).err(), Some(Status::INVALID_VALUE));
    }

    #[test]
    fn dropping_a_draft_drops_all_that_belong_to_it() {
        let mut drafts = drafts();
        assert_eq!(drafts.forget(GraphId(2)).err(), Some(Status::INVALID_HANDLE));
        assert!(drafts.forget(GraphId(1)).is_ok());
        assert!(drafts.drafts.is_empty() && drafts.nodes.is_empty() && drafts.conditions.is_empty());
    }
}
