//! Graphs: work that is described once and launched often. They are plain data in this process. The server
//! learns of a graph when it is instantiated (docs/decisions/0006-graphs-live-in-the-client.md).
//!
//! - this file: a graph, its nodes and their dependencies, and the handles of all of them;
//! - [`node_work`]: what a node does, and how it is sent to the server;
//! - [`node_description`]: nodes from the structures in which a program describes them;
//! - [`recording`]: nodes from work that is enqueued on a captured stream;
//! - [`conditional`]: conditional nodes, which the server knows before the graph is instantiated;
//! - [`instance`], [`launch_steps`]: launching and updating instantiated graphs;
//! - [`told`]: what a profiler hears of graphs;
//! - [`user_object`]: objects of the program that a graph keeps alive. The memory of allocation nodes is in
//!   `memory::graph_memory`.

pub(crate) mod conditional;
pub(crate) mod instance;
pub(crate) mod launch_steps;
pub(crate) mod node_description;
pub(crate) mod node_work;
pub(crate) mod recording;
pub(crate) mod told;
pub(crate) mod user_object;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::abi::arguments::{Array, Count};
use crate::abi::result::Result;
pub(crate) use crate::abi::types::EdgeData;
use crate::abi::types::MemAccessDesc;
use crate::graph::conditional::Draft;
use crate::graph::node_work::Work;
use crate::graph::user_object::Held;
use crate::memory::graph_memory::{Allocations, GraphMemory};
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use crate::process::ids::unique_id;
use client::handles::Slab;
use client::{Status, lock};

/// The data of a dependency on a kernel that is met when all its blocks allow later kernels to begin, or have
/// ended: from port `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`, of type
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
pub(crate) const PROGRAMMATIC: EdgeData = [1, 0, 1, 0, 0, 0, 0, 0];

/// A dependency on an earlier node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Edge {
    pub from: u64,
    pub data: EdgeData,
}

/// A node. Its number in its graph is never used for another node.
pub(crate) struct Node {
    pub work: Work,
    pub before: Vec<Edge>,
    handle: OnceLock<usize>,
}

/// A graph.
pub(crate) struct Graph {
    pub context: &'static Context,
    pub unique: u64,
    /// The handle of the graph that it was cloned from.
    pub origin: Option<u64>,
    /// Whether it was made for a node of another graph, so that the program cannot destroy it.
    pub part: bool,
    /// Whether it was moved into a node of another graph.
    moved: AtomicBool,
    inner: Mutex<Inner>,
    handle: OnceLock<usize>,
    pub held: Mutex<Vec<Held>>,
    pub allocations: Allocations,
    pub draft: Draft,
    /// Whether it has an instance. A graph with memory nodes can have only one at a time.
    pub instantiated: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Inner {
    nodes: BTreeMap<u64, Node>,
    next: u64,
}

impl Inner {
    /// Checks that nodes and dependencies can be removed. CUDA's manual forbids that for graphs with memory
    /// nodes.
    fn may_lose(&self) -> Result {
        let is_memory = |node: &Node| matches!(node.work, Work::Alloc(_) | Work::Free(_));
        if self.nodes.values().any(is_memory) { Err(Status::NOT_SUPPORTED) } else { Ok(()) }
    }
}

/// What a node's handle stands for.
struct NodeName {
    graph: Weak<Graph>,
    id: u64,
}

pub(crate) static GRAPHS: Slab<Graph> = Slab::new(9);

static NODES: Slab<NodeName> = Slab::new(11);

impl Graph {
    pub fn new(context: &'static Context) -> Graph {
        Graph::with_parts(context, None, false, Inner::default(), Vec::new())
    }

    fn with_parts(
        context: &'static Context,
        origin: Option<u64>,
        part: bool,
        inner: Inner,
        held: Vec<Held>,
    ) -> Graph {
        Graph {
            context,
            unique: unique_id(),
            origin,
            part,
            moved: AtomicBool::new(false),
            inner: Mutex::new(inner),
            handle: OnceLock::new(),
            held: Mutex::new(held),
            allocations: Allocations::default(),
            draft: Draft::default(),
            instantiated: AtomicBool::new(false),
        }
    }

    /// A graph with the same nodes under the same numbers. `part`: whether it becomes part of another graph's
    /// node.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a graph with memory or conditional nodes, as in CUDA.
    pub fn copy(&self, part: bool) -> Result<Graph> {
        let inner = lock(&self.inner);
        let mut nodes = BTreeMap::new();
        for (id, node) in &inner.nodes {
            let work = match &node.work {
                Work::Alloc(_) | Work::Free(_) | Work::Conditional(_) => return Err(Status::NOT_SUPPORTED),
                Work::Child(child) => Work::Child(Arc::new(child.copy(true)?)),
                work => work.clone(),
            };
            nodes.insert(*id, Node { work, before: node.before.clone(), handle: OnceLock::new() });
        }
        let held = self.share_held();
        let inner = Inner { nodes, next: inner.next };
        Ok(Graph::with_parts(self.context, Some(self.unique), part, inner, held))
    }

    /// Takes references to its user objects, without those of graphs in its nodes, for another owner.
    fn share_held(&self) -> Vec<Held> {
        user_object::share(&lock(&self.held))
    }

    /// The same with those of all graphs in it.
    fn share_all_held(&self) -> Vec<Held> {
        let mut all = self.share_held();
        self.each(|_, node| match &node.work {
            Work::Child(child) => all.extend(child.share_all_held()),
            Work::Conditional(node) => all.extend(node.bodies.iter().flat_map(|body| body.share_all_held())),
            _ => {}
        });
        all
    }

    /// Checks that it can be moved into a node of another graph: [`add`](Self::add) moves it.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it was made for a node, or if the other graph is it or inside of it;
    /// `NOT_SUPPORTED` if it was moved already or has a conditional node, as in CUDA, or an instance.
    pub fn may_move_into(self: &Arc<Self>, other: &Arc<Graph>) -> Result {
        self.not_moved()?;
        if self.part || self.has(other) {
            return Err(Status::INVALID_VALUE);
        }
        let is_conditional = |work: &Work| matches!(work, Work::Conditional(_));
        if self.any(&is_conditional) || self.instantiated.load(Ordering::Acquire) {
            return Err(Status::NOT_SUPPORTED);
        }
        Ok(())
    }

    /// Fails with NVIDIA's error for what cannot be done with a graph that was moved.
    pub fn not_moved(&self) -> Result {
        if self.is_moved() { Err(Status::NOT_SUPPORTED) } else { Ok(()) }
    }

    /// Whether it was moved into a node of another graph, which owns it then. The program keeps its handles.
    pub fn is_moved(&self) -> bool {
        self.moved.load(Ordering::Acquire)
    }

    /// Whether another graph is this one or inside of it.
    fn has(self: &Arc<Self>, other: &Arc<Graph>) -> bool {
        Arc::ptr_eq(self, other)
            || lock(&self.inner)
                .nodes
                .values()
                .any(|node| matches!(&node.work, Work::Child(child) if child.has(other)))
    }

    /// Finds memory for an allocation that will depend on other nodes, and that other devices have `access`
    /// to.
    pub fn allocate(
        &self,
        driver: &'static Driver,
        before: &[Edge],
        device: u32,
        access: &[MemAccessDesc],
        size: u64,
    ) -> Result<Arc<GraphMemory>> {
        let before: Vec<u64> = before.iter().map(|edge| edge.from).collect();
        let earlier = self.ancestors(&before);
        GraphMemory::new(driver, &self.allocations, self.context, &earlier, device, access, size)
    }

    /// Adds a node that depends on others of the graph. Returns its number.
    ///
    /// # Errors
    /// `INVALID_VALUE` if a dependency is no node of the graph or is there twice, if another node of the
    /// graph frees the same memory; `NOT_SUPPORTED` for a memory node in a moved graph, or if a child graph
    /// was moved meanwhile.
    pub fn add(&self, work: Work, before: Vec<Edge>) -> Result<u64> {
        let mut inner = lock(&self.inner);
        let mut seen = HashSet::new();
        if before.iter().any(|edge| !inner.nodes.contains_key(&edge.from) || !seen.insert(edge.from)) {
            return Err(Status::INVALID_VALUE);
        }
        if matches!(work, Work::Alloc(_) | Work::Free(_)) {
            self.not_moved()?;
        }
        let id = inner.next;
        if let Work::Free(address) = &work {
            let of_another =
                inner.nodes.values().any(|node| matches!(node.work, Work::Free(other) if other == *address));
            if !self.allocations.is_freed_by(*address, id).unwrap_or(!of_another) {
                return Err(Status::INVALID_VALUE);
            }
        }
        if let Work::Child(child) = &work
            && !child.part
            && child.moved.swap(true, Ordering::AcqRel)
        {
            return Err(Status::NOT_SUPPORTED);
        }
        inner.next += 1;
        inner.nodes.insert(id, Node { work, before, handle: OnceLock::new() });
        Ok(id)
    }

    /// Calls `look` with every node, in the order in which they were added.
    pub fn each(&self, mut look: impl FnMut(u64, &Node)) {
        for (id, node) in &lock(&self.inner).nodes {
            look(*id, node);
        }
    }

    /// Its nodes. Each comes after those that it depends on.
    fn ordered(&self) -> Vec<(u64, Work, Vec<Edge>)> {
        let inner = lock(&self.inner);
        let describe = |id: u64| {
            let node = inner.nodes.get(&id)?;
            Some((id, node.work.clone(), node.before.clone()))
        };
        // There is an order: a dependency that would close a cycle is refused.
        order(&inner.nodes).unwrap_or_default().into_iter().filter_map(describe).collect()
    }

    /// Whether the graph or one of its child graphs has a node of a kind.
    fn any(&self, which: &dyn Fn(&Work) -> bool) -> bool {
        lock(&self.inner).nodes.values().any(|node| match &node.work {
            Work::Child(child) => child.any(which),
            work => which(work),
        })
    }

    /// Calls `change` with a node.
    pub fn with<T>(&self, id: u64, change: impl FnOnce(&mut Node) -> Result<T>) -> Result<T> {
        lock(&self.inner).nodes.get_mut(&id).ok_or(Status::INVALID_VALUE).and_then(change)
    }

    /// Some nodes and everything that they depend on.
    pub fn ancestors(&self, of: &[u64]) -> HashSet<u64> {
        let inner = lock(&self.inner);
        let (mut found, mut left): (HashSet<u64>, Vec<u64>) = (HashSet::new(), of.to_vec());
        while let Some(id) = left.pop() {
            if found.insert(id) {
                left.extend(
                    inner.nodes.get(&id).into_iter().flat_map(|node| &node.before).map(|edge| edge.from),
                );
            }
        }
        found
    }

    /// Adds all of these dependencies, or none.
    pub fn connect(&self, edges: &[(u64, u64, EdgeData)]) -> Result {
        let mut inner = lock(&self.inner);
        for (n, (from, to, _)) in edges.iter().enumerate() {
            let known = inner.nodes.contains_key(from) && inner.nodes.contains_key(to) && from != to;
            let twice = |node: &Node| node.before.iter().any(|edge| edge.from == *from);
            if !known
                || inner.nodes.get(to).is_some_and(twice)
                || edges[..n].iter().any(|(f, t, _)| (f, t) == (from, to))
            {
                return Err(Status::INVALID_VALUE);
            }
        }
        for (from, to, data) in edges {
            if let Some(node) = inner.nodes.get_mut(to) {
                node.before.push(Edge { from: *from, data: *data });
            }
        }
        if order(&inner.nodes).is_some() {
            return Ok(());
        }
        for (from, to, _) in edges {
            if let Some(node) = inner.nodes.get_mut(to) {
                node.before.retain(|edge| edge.from != *from);
            }
        }
        Err(Status::INVALID_VALUE)
    }

    /// Removes all of these dependencies, or none.
    ///
    /// # Errors
    /// `INVALID_VALUE` if one of them does not exist, `NOT_SUPPORTED` if the graph has memory nodes.
    pub fn disconnect(&self, edges: &[(u64, u64)]) -> Result {
        let mut inner = lock(&self.inner);
        let there = |(from, to): &(u64, u64)| {
            inner.nodes.get(to).is_some_and(|node| node.before.iter().any(|edge| edge.from == *from))
        };
        if !edges.iter().all(there) {
            return Err(Status::INVALID_VALUE);
        }
        inner.may_lose()?;
        for (from, to) in edges {
            if let Some(node) = inner.nodes.get_mut(to) {
                node.before.retain(|edge| edge.from != *from);
            }
        }
        Ok(())
    }

    /// Removes a node, and the dependencies on it.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the graph has memory nodes; the server's error for a conditional node.
    pub fn remove(&self, id: u64) -> Result {
        let mut inner = lock(&self.inner);
        inner.may_lose()?;
        if let Some(Work::Conditional(node)) = inner.nodes.get(&id).map(|node| &node.work) {
            node.remove()?;
        }
        let node = inner.nodes.remove(&id).ok_or(Status::INVALID_VALUE)?;
        for other in inner.nodes.values_mut() {
            other.before.retain(|edge| edge.from != id);
        }
        drop(inner);
        node.forget();
        Ok(())
    }

    /// The graph's handle.
    pub fn handle(this: &Arc<Graph>) -> Result<usize> {
        GRAPHS.insert_once(&this.handle, this).ok_or(Status::OUT_OF_MEMORY)
    }

    /// A node's handle.
    pub fn node(this: &Arc<Graph>, id: u64) -> Result<usize> {
        let inner = lock(&this.inner);
        let node = inner.nodes.get(&id).ok_or(Status::INVALID_VALUE)?;
        if let Some(handle) = node.handle.get() {
            return Ok(*handle);
        }
        let name = NodeName { graph: Arc::downgrade(this), id };
        let made = NODES.insert(Arc::new(name)).ok_or(Status::OUT_OF_MEMORY)?;
        Ok(*node.handle.get_or_init(|| made))
    }

    /// Empties the graph: destroys its nodes and their handles, and releases the user objects.
    pub fn clear(&self) {
        let nodes = std::mem::take(&mut lock(&self.inner).nodes);
        for node in nodes.into_values() {
            node.forget();
        }
        self.allocations.clear();
        let held = std::mem::take(&mut *lock(&self.held));
        drop(held);
    }

    /// Empties the graph and invalidates its handle.
    pub fn destroy(&self) {
        self.clear();
        if let Some(handle) = self.handle.get() {
            GRAPHS.remove(*handle);
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Node {
    /// Invalidates the node's handle and that of its child graph.
    fn forget(self) {
        if let Some(handle) = self.handle.get() {
            NODES.remove(*handle);
        }
        match &self.work {
            Work::Child(child) => child.destroy(),
            Work::Conditional(node) => node.forget(),
            _ => {}
        }
    }
}

/// The nodes in an order in which each comes after those that it depends on. `None` if the dependencies form
/// a cycle.
fn order(nodes: &BTreeMap<u64, Node>) -> Option<Vec<u64>> {
    let mut missing: BTreeMap<u64, usize> = nodes.iter().map(|(id, node)| (*id, node.before.len())).collect();
    let mut after: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (id, node) in nodes {
        for edge in &node.before {
            after.entry(edge.from).or_default().push(*id);
        }
    }
    let mut order: Vec<u64> = missing.iter().filter(|(_, n)| **n == 0).map(|(id, _)| *id).collect();
    let mut at = 0;
    while let Some(id) = order.get(at).copied() {
        at += 1;
        for next in after.get(&id).into_iter().flatten() {
            if let Some(n) = missing.get_mut(next) {
                *n -= 1;
                if *n == 0 {
                    order.push(*next);
                }
            }
        }
    }
    (order.len() == nodes.len()).then_some(order)
}

/// The graph of a handle.
pub(crate) fn of(handle: usize) -> Result<Arc<Graph>> {
    driver()?;
    GRAPHS.get(handle).ok_or(Status::INVALID_VALUE)
}

/// The graph and the number of a node's handle.
pub(crate) fn node(handle: usize) -> Result<(Arc<Graph>, u64)> {
    driver()?;
    let name = NODES.get(handle).ok_or(Status::INVALID_VALUE)?;
    Ok((name.graph.upgrade().ok_or(Status::INVALID_VALUE)?, name.id))
}

/// The numbers of some nodes of a graph.
pub(crate) fn nodes(graph: &Arc<Graph>, handles: Array<usize>, count: Count) -> Result<Vec<u64>> {
    let number = |handle: &usize| match node(*handle)? {
        (of, id) if Arc::ptr_eq(&of, graph) => Ok(id),
        _ => Err(Status::INVALID_VALUE),
    };
    handles.entries(count)?.iter().map(number).collect()
}

/// Dependencies on some nodes of a graph.
pub(crate) fn edges(
    graph: &Arc<Graph>,
    handles: Array<usize>,
    data: Array<EdgeData>,
    count: Count,
) -> Result<Vec<Edge>> {
    let from = nodes(graph, handles, count)?;
    let data = edge_data(data, count, from.len())?;
    Ok(from.into_iter().zip(data).map(|(from, data)| Edge { from, data }).collect())
}

/// The data of `len` dependencies; zeros without an array.
pub(crate) fn edge_data(data: Array<EdgeData>, count: Count, len: usize) -> Result<Vec<EdgeData>> {
    if data.is_null() {
        return Ok(vec![[0; 8]; len]);
    }
    let data = data.entries(count)?;
    // CU_GRAPH_DEPENDENCY_TYPE_DEFAULT and …_PROGRAMMATIC; the rest is reserved.
    let known = data.iter().all(|data| data[2] <= 1 && data[3..] == [0; 5]);
    if known { Ok(data.to_vec()) } else { Err(Status::INVALID_VALUE) }
}

/// The work of a node's handle.
pub(crate) fn work_of(handle: usize) -> Result<Work> {
    let (graph, id) = node(handle)?;
    graph.with(id, |node| Ok(node.work.clone()))
}

/// Changes what a node does.
pub(crate) fn set_work(handle: usize, change: impl FnOnce(&Work) -> Result<Work>) -> Result {
    let (graph, id) = node(handle)?;
    graph.with(id, |node| {
        node.work = change(&node.work)?;
        Ok(())
    })
}

/// Claims the only instance of a graph with memory nodes.
///
/// # Errors
/// `NOT_SUPPORTED` if it has one.
pub(crate) fn claim(graph: &Graph) -> Result {
    if graph.instantiated.swap(true, Ordering::AcqRel) { Err(Status::NOT_SUPPORTED) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::handle::ContextId;
    use proptest::prelude::*;

    fn graph() -> Arc<Graph> {
        Arc::new(Graph::new(Context::new(ContextId(0), crate::process::driver::Server::unused(), 0, 0, true)))
    }

    fn edge(from: u64) -> Edge {
        Edge { from, data: [0; 8] }
    }

    #[test]
    fn a_dependency_that_closes_a_cycle_is_refused() {
        let graph = graph();
        let a = graph.add(Work::Empty, vec![]).unwrap();
        let b = graph.add(Work::Empty, vec![edge(a)]).unwrap();
        let c = graph.add(Work::Empty, vec![edge(b)]).unwrap();
        assert_eq!(graph.connect(&[(a, c, [0; 8]), (c, a, [0; 8])]), Err(Status::INVALID_VALUE));
        assert_eq!(graph.disconnect(&[(a, c)]), Err(Status::INVALID_VALUE));
        graph.connect(&[(a, c, [0; 8])]).unwrap();
        assert_eq!(graph.ancestors(&[c]), HashSet::from([a, b, c]));
    }

    #[test]
    fn a_clone_keeps_node_numbers_but_not_later_changes() {
        let graph = graph();
        let a = graph.add(Work::Empty, vec![]).unwrap();
        let clone = graph.copy(false).unwrap();
        graph.remove(a).unwrap();
        assert_eq!(clone.ordered().len(), 1);
        assert!(graph.ordered().is_empty());
        assert!(clone.with(a, |_| Ok(())).is_ok());
    }

    #[test]
    fn the_handle_of_a_removed_node_names_nothing() {
        let graph = graph();
        let a = graph.add(Work::Empty, vec![]).unwrap();
        let handle = Graph::node(&graph, a).unwrap();
        assert!(NODES.get(handle).is_some());
        graph.remove(a).unwrap();
        assert!(NODES.get(handle).is_none());
    }

    proptest! {
        #[test]
        fn an_order_is_found_exactly_where_edges_point_forward_in_some_order(
            edges in proptest::collection::vec((0u64..9, 0u64..9), 0..24)
        ) {
            let mut nodes: BTreeMap<u64, Node> = (0..9)
                .map(|id| (id, Node { work: Work::Empty, before: Vec::new(), handle: OnceLock::new() }))
                .collect();
            for (from, to) in &edges {
                nodes.get_mut(to).unwrap().before.push(edge(*from));
            }
            // Remove nodes without unresolved dependencies until there are none.
            let mut left: Vec<u64> = (0..9).collect();
            loop {
                let free = |to: &u64| !edges.iter().any(|(from, t)| t == to && left.contains(from));
                let after: Vec<u64> = left.iter().copied().filter(|to| !free(to)).collect();
                if after.len() == left.len() {
                    break;
                }
                left = after;
            }
            match order(&nodes) {
                None => prop_assert!(!left.is_empty()),
                Some(order) => {
                    prop_assert!(left.is_empty());
                    let at = |id: u64| order.iter().position(|o| *o == id).unwrap();
                    prop_assert!(edges.iter().all(|(from, to)| at(*from) < at(*to)));
                }
            }
        }
    }
}
