//! Graphs and drafts.

use super::*;

fn node<'a, T: Op<'a>>(op: &T, dependencies: &[u32]) -> GraphNode {
    GraphNode { opcode: T::INFO.opcode, dependencies: dependencies.to_vec(), body: Bytes(encoded(op)) }
}

fn encoded<'a>(value: &impl Wire<'a>) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.put(&mut Writer(&mut bytes));
    bytes
}

fn fill_node(address: u64, value: u32, dependencies: &[u32]) -> GraphNode {
    let stream = StreamId(0);
    let fill = Memset { stream, dst: address, pitch: 0, value, element: 4, width: 1, height: 1 };
    node(&fill, dependencies)
}

fn launch_node(function: u32, block: u32, params: &[u8], dependencies: &[u32]) -> GraphNode {
    let launch = Launch {
        function: FunctionId::new(ModuleId(1), function),
        stream: StreamId(0),
        grid: [1, 1, 1],
        block: [block, 1, 1],
        dynamic_shared: 0,
        attributes: vec![],
        params,
    };
    node(&launch, dependencies)
}

#[test]
fn a_graphs_nodes_are_checked_when_it_is_instantiated() {
    fn instantiate<S: Session>(s: &mut S, graph: u32, nodes: &[GraphNode]) -> Result<(), Status> {
        let nodes = encoded(&GraphNodes { nodes: nodes.to_vec() });
        let (context, graph) = (ContextId(0), GraphId(graph));
        s.call(&GraphInstantiate { context, graph, flags: 0, nodes: HostIn::Inline(&nodes) }).map(|_| ())
    }
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        load(s);
        let fill = fill_node(BASE, 5, &[]);
        let copy = MemcpyDtoD { stream: StreamId(0), dst: BASE + 8, src: BASE, len: 4 };
        let nodes = [fill.clone(), launch_node(0, 1, &params(BASE, 3, 1), &[0]), node(&copy, &[1])];
        instantiate(s, 1, &nodes).unwrap();
        for bad in [
            fill_node(BASE + 4094, 5, &[]),
            fill_node(BASE + 4096, 5, &[]),
            launch_node(9, 1, &[], &[]),
            launch_node(0, 4096, &params(BASE, 3, 1), &[]),
            launch_node(0, 1, &[], &[]),
            node(&MemcpyDtoD { stream: StreamId(0), dst: BASE, src: 4, len: 4 }, &[]),
            node(&StreamBatchMemOp { stream: StreamId(0), operations: vec![] }, &[]),
        ] {
            assert!(instantiate(s, 2, &[fill.clone(), bad.clone()]).is_err(), "{bad:?}");
        }
        assert_eq!(instantiate(s, 1, &nodes), Err(Status::INVALID_HANDLE));
        s.push(&GraphUpload { graph: GraphId(1), stream: StreamId(0) });
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (15, 15));
        let nodes = encoded(&GraphNodes { nodes: vec![fill] });
        s.call(&GraphUpdate { graph: GraphId(1), nodes: HostIn::Inline(&nodes) }).unwrap();
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (5, 15));
        // A change without an answer. A wrong one is reported by launches, which do nothing.
        let change = |fill: GraphNode| encoded(&GraphNodes { nodes: vec![fill] });
        s.push(&GraphChange { graph: GraphId(1), nodes: &change(fill_node(BASE + 8, 7, &[])) });
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (5, 7));
        s.push(&GraphChange { graph: GraphId(1), nodes: &change(launch_node(9, 1, &[], &[])) });
        assert_eq!(s.error(0), None);
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert!(s.error(0).is_some_and(|(_, sticky)| !sticky));
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (5, 7));
        s.push(&GraphChange { graph: GraphId(1), nodes: &change(fill_node(BASE + 8, 8, &[])) });
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        s.push(&GraphDestroy { graph: GraphId(1) });
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (5, 8));
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert_eq!(s.error(0), Some((Status::INVALID_HANDLE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn nodes_of_a_graph_are_changed_one_by_one() {
    fn body<S: Session>(s: &mut S) {
        fn change<S: Session>(s: &mut S, last: bool, nodes: &[(u32, GraphNode)]) {
            let changed = |(place, node): &(u32, GraphNode)| ChangedNode {
                place: *place,
                opcode: node.opcode,
                body: node.body.clone(),
            };
            s.push(&GraphChangeNodes { graph: GraphId(1), last, nodes: nodes.iter().map(changed).collect() });
        }
        /// Fills memory with zeros, launches the graph, and returns the words that its nodes fill.
        fn launched<S: Session>(s: &mut S) -> [u32; 3] {
            let stream = StreamId(0);
            s.push(&Memset { stream, dst: BASE, pitch: 0, value: 0, element: 4, width: 3, height: 1 });
            s.push(&GraphLaunch { graph: GraphId(1), stream });
            [0, 4, 8].map(|at| word_at(s, BASE + at))
        }
        grow(s, 4096);
        load(s);
        let fill = |word: u64, value| fill_node(BASE + word * 4, value, &[]);
        let context = ContextId(0);
        let chain = |node: GraphNode, from: &[u32]| GraphNode { dependencies: from.to_vec(), ..node };
        let nodes = vec![fill(0, 1), chain(fill(1, 2), &[0]), chain(fill(2, 3), &[1])];
        let nodes = encoded(&GraphNodes { nodes });
        s.call(&GraphInstantiate { context, graph: GraphId(1), flags: 0, nodes: HostIn::Inline(&nodes) })
            .unwrap();
        assert_eq!(launched(s), [1, 2, 3]);
        change(s, true, &[(1, fill(1, 20))]);
        assert_eq!(launched(s), [1, 20, 3]);
        // A change in two parts. A launch between them does nothing of it.
        change(s, false, &[(0, fill(0, 10))]);
        assert_eq!(launched(s), [1, 20, 3]);
        change(s, true, &[(2, fill(2, 30))]);
        assert_eq!(launched(s), [10, 20, 30]);
        // Another operation, which comes after the fill of its word; and none.
        change(s, true, &[(1, launch_node(0, 1, &params(BASE, 3, 1), &[])), (2, node_of_nothing())]);
        assert_eq!(launched(s), [30, 0, 0]);
        // Nodes that the server refuses. Launches report that until the nodes are other ones.
        for bad in [fill(4096, 5), launch_node(9, 1, &[], &[]), launch_node(0, 1, &[], &[])] {
            change(s, true, &[(0, fill(0, 3)), (1, bad.clone())]);
            assert_eq!(launched(s), [0, 0, 0], "{bad:?}");
            assert!(s.error(0).is_some_and(|(_, sticky)| !sticky), "{bad:?}");
            change(s, true, &[(2, fill(2, 7))]);
            assert_eq!(launched(s), [0, 0, 0], "{bad:?}");
            change(s, true, &[(1, fill(1, 6))]);
            assert_eq!(launched(s), [3, 6, 7], "{bad:?}");
        }
        // After a change that no client of ours would send, only a whole list helps.
        for bad in [
            (3, fill(0, 1)),
            (u32::MAX, fill(0, 1)),
            (0, GraphNode { opcode: 0x0a01, ..fill(0, 1) }),
            (0, GraphNode { opcode: 0, ..fill(0, 1) }),
            (0, GraphNode { body: Bytes(vec![1, 2, 3]), ..fill(0, 1) }),
        ] {
            change(s, false, std::slice::from_ref(&bad));
            change(s, true, &[(0, fill(0, 1))]);
            assert_eq!(launched(s), [0, 0, 0], "{bad:?}");
            s.push(&GraphChange { graph: GraphId(1), nodes: &nodes });
            assert_eq!(launched(s), [1, 2, 3], "{bad:?}");
        }
    }
    fn node_of_nothing() -> GraphNode {
        GraphNode { opcode: 0, dependencies: vec![], body: Bytes(vec![]) }
    }
    on_each_transport!(Server::start(&[]), body);
}

/// Otherwise it would belong to a context that is reset, and its ID to another one.
#[test]
fn devices_are_not_selected_once_there_is_a_graph() {
    fn body<S: Session>(s: &mut S) {
        let select = || SelectDevices { devices: vec![1], windows: vec![] };
        let nodes = encoded(&GraphNodes { nodes: vec![] });
        let (context, graph) = (ContextId(0), GraphId(1));
        s.call(&GraphInstantiate { context, graph, flags: 0, nodes: HostIn::Inline(&nodes) }).unwrap();
        assert_eq!(s.call(&select()).unwrap_err(), Status::NOT_PERMITTED);
        s.push(&GraphDestroy { graph });
        s.call(&GraphCondition { context, graph, default: 1, flags: 1 }).unwrap();
        assert_eq!(s.call(&select()).unwrap_err(), Status::NOT_PERMITTED);
    }
    on_each_transport!(Server::start(&["--software-devices=2"]), body);
}

#[test]
fn a_draft_is_filled_once_and_may_be_instantiated_again() {
    fn part(graph: u32, nodes: Vec<GraphNode>) -> GraphPart {
        GraphPart { graph: GraphId(graph), nodes }
    }
    fn instantiate<S: Session>(s: &mut S, graph: u32, parts: Vec<GraphPart>) -> Result<(), Status> {
        let parts = encoded(&GraphParts { parts });
        let (graph, draft) = (GraphId(graph), GraphId(1));
        s.call(&GraphInstantiateDraft { graph, draft, flags: 0, parts: HostIn::Inline(&parts) }).map(|_| ())
    }
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let condition =
            |default| GraphCondition { context: ContextId(0), graph: GraphId(1), default, flags: 1 };
        let handles = [1, 0, 1].map(|default| s.call(&condition(default)).unwrap().handle);
        // If the first condition holds, graph 2; inside it, if the second holds, graph 3, otherwise graph 4.
        let conditional = |graph, handle: u64, bodies: &[u32]| GraphConditional {
            graph: GraphId(graph),
            handle,
            kind: conditional::IF,
            bodies: bodies.iter().map(|body| GraphId(*body)).collect(),
        };
        s.call(&conditional(1, handles[0], &[2])).unwrap();
        s.call(&conditional(2, handles[1], &[3, 4])).unwrap();
        s.call(&conditional(1, handles[2], &[5])).unwrap();
        s.call(&GraphConditionalRemove { first: GraphId(5) }).unwrap();
        let choice = |first: u32, dependencies: &[u32]| GraphNode {
            opcode: <GraphConditional as Op>::INFO.opcode,
            dependencies: dependencies.to_vec(),
            body: Bytes(first.to_le_bytes().to_vec()),
        };
        let parts = |value| {
            vec![
                part(1, vec![fill_node(BASE, 1, &[]), choice(2, &[0])]),
                part(2, vec![fill_node(BASE + 4, 2, &[]), choice(3, &[])]),
                part(3, vec![fill_node(BASE + 8, 3, &[])]),
                part(4, vec![fill_node(BASE + 12, value, &[])]),
            ]
        };
        instantiate(s, 7, parts(4)).unwrap();
        instantiate(s, 8, parts(4)).unwrap();
        assert_eq!(instantiate(s, 9, parts(5)), Err(Status::NOT_SUPPORTED));
        let late = s.call(&condition(1)).unwrap().handle;
        assert_eq!(s.call(&conditional(3, late, &[6])).unwrap_err(), Status::NOT_SUPPORTED);
        let remove = GraphConditionalRemove { first: GraphId(2) };
        assert_eq!(s.call(&remove).unwrap_err(), Status::NOT_SUPPORTED);
        s.push(&GraphForget { graph: GraphId(1) });
        for graph in [7, 8] {
            s.push(&Memset {
                stream: StreamId(0),
                dst: BASE,
                pitch: 0,
                value: 0,
                element: 4,
                width: 4,
                height: 1,
            });
            s.push(&GraphLaunch { graph: GraphId(graph), stream: StreamId(0) });
            assert_eq!([0, 4, 8, 12].map(|at| word_at(s, BASE + at)), [1, 2, 0, 4], "graph {graph}");
        }
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}
