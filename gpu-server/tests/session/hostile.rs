//! Commands that no correct client sends, and limits.

use super::*;

#[test]
fn malformed_commands_end_only_their_session() {
    let server = Server::start(&[]);
    let mut other = LocalBridge::connect(&server.socket());
    type Deed = fn(&mut dyn FnMut(u16, u16, &[u8]));
    let deeds: [(Deed, &str); 4] = [
        (|push| push(0x0fff, 0xffff, &[]), "unknown opcode"),
        (|push| push(0x0704, 0xffff, &[1; 40]), "does not decode"),
        (|push| push(0x0704, 3, &[0; 4]), "reply slot"),
        (|push| push(0x0703, 1000, &[0; 4]), "reply slot 1000"),
    ];
    for (deed, words) in deeds {
        let mut local = LocalBridge::connect(&server.socket());
        deed(&mut |opcode, slot, body| {
            local.push_raw(opcode, slot, body);
        });
        until("the session is lost", || local.lost().is_some());
        assert!(local.lost().unwrap().contains(words), "{:?}", local.lost());
        let mut tcp = TcpSession::connect(server.port);
        deed(&mut |opcode, slot, body| {
            tcp.push_raw(opcode, slot, body);
        });
        until("the session is lost", || tcp.lost().is_some());
        assert!(tcp.lost().unwrap().contains(words), "{:?}", tcp.lost());
    }
    let mut local = LocalBridge::connect(&server.socket());
    let waiting = local.send(5, &StreamSynchronize { stream: StreamId(0) });
    local.wait(5, waiting);
    local.channel().tail().store(0xdead_beef, std::sync::atomic::Ordering::Release);
    local.channel().ring_doorbell();
    until("the session is lost", || local.lost().is_some());
    assert!(local.lost().unwrap().contains("cursor"), "{:?}", local.lost());
    other.call(&SessionInfo {}).unwrap();
}

#[test]
fn hostile_values_in_well_formed_commands_are_errors() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let wild =
            protocol::data::HostRange { place: protocol::data::Place::Region(77), offset: 1 << 60, len: 16 };
        s.push(&StreamMark { stream: StreamId(u32::MAX) });
        s.push(&MemAlloc { address: u64::MAX - 100, size: u64::MAX });
        s.push(&MemFree { address: 3 });
        s.push(&Memset {
            stream: StreamId(0),
            dst: BASE,
            pitch: u64::MAX,
            value: 0,
            element: 4,
            width: u64::MAX,
            height: u64::MAX,
        });
        s.push(&MemcpyDtoD { stream: StreamId(0), dst: BASE, src: u64::MAX, len: u64::MAX });
        let place = Pitched { address: BASE, pitch: 1, slice: u64::MAX };
        s.push(&MemcpyDtoH3D {
            stream: StreamId(0),
            src: place,
            extent: [u64::MAX, 2, 2],
            dst: HostOut(wild),
        });
        launch(s, 0, 9, &[]);
        s.push(&ModuleUnload { module: ModuleId(99) });
        s.push(&EventRecord { event: EventId(5), stream: StreamId(0), flags: 0 });
        assert_eq!(
            s.call(&MemShrink { device: 0, address: BASE + 1, size: 5 }).unwrap_err(),
            Status::INVALID_VALUE
        );
        assert_eq!(s.call(&ContextDestroy { context: ContextId(0) }).unwrap_err(), Status::INVALID_CONTEXT);
        assert_eq!(s.call(&PeerInfo { device: 9, peer: 0 }).unwrap_err(), Status::INVALID_DEVICE);
        let condition = |context, graph, flags| GraphCondition {
            context: ContextId(context),
            graph: GraphId(graph),
            default: 0,
            flags,
        };
        let handle = s.call(&condition(0, 1, 1)).unwrap().handle;
        assert_eq!(s.call(&condition(9, 2, 1)).unwrap_err(), Status::INVALID_CONTEXT);
        assert_eq!(s.call(&condition(0, 1, 2)).unwrap_err(), Status::INVALID_VALUE);
        for (graph, handle, bodies) in [(1, handle + 1, 1), (1, handle, 0), (1, handle, 9), (2, handle, 1)] {
            let bodies = (100..100 + bodies).map(GraphId).collect();
            let node = GraphConditional { graph: GraphId(graph), handle, kind: 1, bodies };
            assert!(s.call(&node).is_err());
        }
        let draft = |parts| GraphInstantiateDraft {
            graph: GraphId(5),
            draft: GraphId(1),
            flags: 0,
            parts: HostIn::Inline(parts),
        };
        assert_eq!(s.call(&draft(&[0xff; 40])).unwrap_err(), Status::INVALID_VALUE);
        s.push(&GraphForget { graph: GraphId(77) });
        assert!(s.call(&LinkComplete { link: LinkId(3), image: HostOut(wild) }).is_err());
        s.call(&LinkCreate { context: ContextId(0), link: LinkId(3), options: vec![] }).unwrap();
        let add = |kind, data| LinkAdd {
            link: LinkId(3),
            kind,
            name: "x",
            options: vec![],
            data: HostIn::Inline(data),
        };
        assert_eq!(s.call(&add(jit_input::LAST + 1, b"x")).unwrap_err(), Status::INVALID_VALUE);
        let refused = s.call(&add(jit_input::PTX, b"no PTX")).unwrap();
        assert!(refused.result != 0 && !refused.error_log.is_empty());
        s.push(&LinkDestroy { link: LinkId(77) });
        let long = vec![memory_op(memory_op::WRITE_32, BASE, 1); memory_op::MOST + 1];
        let far = vec![memory_op(memory_op::WRITE_32, u64::MAX - 3, 1)];
        let odd = vec![memory_op(memory_op::WAIT_64, BASE + 4, 1)];
        let none = vec![memory_op(77, BASE, 1)];
        let beyond = vec![memory_op(memory_op::WRITE_32, BASE + 4096, 1)];
        for operations in [long, far, odd, none, beyond, vec![]] {
            s.push(&StreamBatchMemOp { stream: StreamId(0), operations });
        }
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert!(s.lost().is_none());
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn flags_and_limits_that_concern_more_than_the_session_are_refused() {
    fn body<S: Session>(s: &mut S) {
        let make = |flags| ContextCreate { context: ContextId(MAX_DEVICES), device: 0, flags };
        // Core dumps would be files on the server.
        for flags in [0x20, 0x40, 0x28, 0x61] {
            assert_eq!(s.call(&make(flags)).err(), Some(Status::NOT_SUPPORTED), "{flags:#x}");
            let primary = PrimarySetFlags { device: 0, flags };
            assert_eq!(s.call(&primary).err(), Some(Status::NOT_SUPPORTED), "{flags:#x}");
        }
        assert_eq!(s.call(&make(0x100)).err(), Some(Status::INVALID_VALUE));
        s.call(&PrimarySetFlags { device: 0, flags: 0x1c }).unwrap();
        s.call(&make(0x99)).unwrap();
        let limit = |limit| ContextSetLimit { context: ContextId(0), limit, value: 4096 };
        s.call(&limit(1)).unwrap();
        for beyond in [7, 8, 9, 1000, u32::MAX] {
            assert_eq!(s.call(&limit(beyond)).err(), Some(Status::NOT_SUPPORTED), "{beyond}");
        }
        let reset = |context| ContextResetCache { context: ContextId(context) };
        s.call(&reset(0)).unwrap();
        assert_eq!(s.call(&reset(MAX_DEVICES + 1)).err(), Some(Status::INVALID_CONTEXT));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn inputs_of_linkers_are_bounded_in_all_linkers_together() {
    fn body<S: Session>(s: &mut S) {
        let input = vec![1; 512 << 10];
        let range = s.arena(0, &input);
        let add = |link| LinkAdd {
            link: LinkId(link),
            kind: jit_input::LIBRARY,
            name: "x",
            options: vec![],
            data: HostIn::Range(range),
        };
        for link in 1..=2 {
            s.call(&LinkCreate { context: ContextId(0), link: LinkId(link), options: vec![] }).unwrap();
        }
        // Drivers keep what they are given, so it counts whether they can use it or not.
        for i in 0..512 {
            assert_ne!(s.call(&add(1 + i % 2)).unwrap().result, 0);
        }
        assert_eq!(s.call(&add(1)).unwrap_err(), Status::OUT_OF_MEMORY);
        s.push(&LinkDestroy { link: LinkId(2) });
        s.call(&add(1)).unwrap();
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn events_beyond_the_maximum_are_refused_and_the_session_goes_on() {
    fn body<S: Session>(s: &mut S) {
        let event = |number| EventCreate { context: ContextId(0), event: EventId(number), flags: 2 };
        for number in 1..=1 << 18 {
            s.push(&event(number));
        }
        s.call(&ContextSynchronize { context: ContextId(0) }).unwrap();
        s.push(&event((1 << 18) + 1));
        s.call(&ContextSynchronize { context: ContextId(0) }).unwrap();
        assert_eq!(s.error(0), Some((Status::OUT_OF_MEMORY, false)));
        s.push(&EventDestroy { event: EventId(1) });
        s.push(&event((1 << 18) + 1));
        s.call(&EventSynchronize { event: EventId((1 << 18) + 1) }).unwrap();
    }
    on_each_transport!(Server::start(&[]), body);
}
