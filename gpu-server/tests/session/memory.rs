//! Copies, the memory limit, and memory that sessions share.

use super::*;

#[test]
fn a_large_copy_comes_back_whole() {
    fn body<S: Session>(s: &mut S) {
        s.call(&MemGrow { device: 0, address: BASE, size: 4 << 20 }).unwrap();
        s.push(&MemAlloc { address: BASE, size: 4 << 20 });
        let input: Vec<u8> = (0..(4u32 << 20) - 1).map(|i| (i * 7 + (i >> 11)) as u8).collect();
        let src = s.arena(0, &input);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Range(src) });
        let dst = s.arena(4 << 20, &vec![0; input.len()]);
        s.push(&MemcpyDtoH { stream: StreamId(0), src: BASE, dst: HostOut(dst) });
        s.call(&ContextSynchronize { context: ContextId(0) }).unwrap();
        assert!(s.read_arena(4 << 20, input.len()) == input);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn packed_rows_go_into_pitched_memory_and_back() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 1 << 20);
        s.push(&Memset {
            stream: StreamId(0),
            dst: BASE,
            pitch: 0,
            value: 0xee,
            element: 1,
            width: 1 << 20,
            height: 1,
        });
        let input: Vec<u8> = (0..7 * 5 * 3).collect();
        let src = s.arena(0, &input);
        let place = Pitched { address: BASE, pitch: 32, slice: 512 };
        s.push(&MemcpyHtoD3D {
            stream: StreamId(0),
            dst: place.clone(),
            extent: [7, 5, 3],
            src: HostIn::Range(src),
        });
        let dst = s.arena(1 << 20, &[0; 7 * 5 * 3]);
        s.push(&MemcpyDtoH3D { stream: StreamId(0), src: place, extent: [7, 5, 3], dst: HostOut(dst) });
        let row =
            s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE + 512 + 32, len: 8 }).unwrap().bytes.0;
        assert_eq!(row, [42, 43, 44, 45, 46, 47, 48, 0xee]);
        assert_eq!(s.read_arena(1 << 20, 105), input);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn memory_is_limited_and_returned() {
    fn body<S: Session>(s: &mut S) {
        let grow = |device, address, size| MemGrow { device, address, size };
        assert_eq!(s.call(&grow(0, BASE, 64 << 20)).unwrap_err(), Status::OUT_OF_MEMORY);
        assert_eq!(s.call(&grow(0, BASE + 1, 2 << 20)).unwrap_err(), Status::INVALID_VALUE);
        assert_eq!(s.call(&grow(0, BASE + WINDOW_SIZE, 2 << 20)).unwrap_err(), Status::INVALID_VALUE);
        s.call(&grow(0, BASE, 32 << 20)).unwrap();
        assert_eq!(s.call(&grow(0, BASE + (32 << 20), 2 << 20)).unwrap_err(), Status::OUT_OF_MEMORY);
        assert_eq!(s.call(&MemGetInfo { device: 0 }).unwrap().free, 0);
        s.call(&MemShrink { device: 0, address: BASE, size: 32 << 20 }).unwrap();
        assert_eq!(s.call(&MemGetInfo { device: 0 }).unwrap().free, 32 << 20);
    }
    on_each_transport!(Server::start(&["--memory-limit=32M"]), body);
}

#[test]
fn memory_that_shrinks_counts_until_it_is_released() {
    const HALF: u64 = 32 << 20;
    fn body<S: Session>(s: &mut S) {
        let grow = |address, size| MemGrow { device: 0, address, size };
        let (word, shrinks, next) = (BASE, BASE + (2 << 20), BASE + 2 * HALF);
        super::grow(s, 4096);
        let (waits, writes) = (StreamId(MADE), StreamId(MADE + 1));
        for stream in [waits, writes] {
            s.push(&StreamCreate { context: ContextId(0), stream, flags: 1, priority: 0 });
        }
        s.push(&StreamBatchMemOp { stream: waits, operations: vec![memory_op(memory_op::WAIT_32, word, 1)] });
        s.call(&grow(shrinks, HALF)).unwrap();
        // Its pages stay until the work of all streams before this is done.
        let seq = s.send(1, &MemShrink { device: 0, address: shrinks, size: HALF });
        assert_eq!(s.call(&grow(next, HALF)).unwrap_err(), Status::OUT_OF_MEMORY);
        s.push(&StreamBatchMemOp {
            stream: writes,
            operations: vec![memory_op(memory_op::WRITE_32, word, 1)],
        });
        assert_eq!(s.wait(1, seq).0, Status::SUCCESS);
        s.call(&grow(next, HALF)).unwrap();
    }
    on_each_transport!(Server::start(&["--memory-limit=64M"]), body);
}

/// Makes exportable memory and returns its token.
fn export<S: Session>(s: &mut S, id: u32, size: u64) -> [u8; 16] {
    let memory = MemoryId(id);
    s.call(&MemoryCreate { memory, device: 0, size, exportable: true }).unwrap();
    s.call(&MemoryExport { memory }).unwrap().token
}

#[test]
fn memory_that_outlives_its_session_counts_for_the_session_that_holds_it() {
    const HALF: u64 = 16 << 20;
    // A session that exports to itself.
    fn alone<S: Session>(s: &mut S) {
        let token = export(s, 1, HALF);
        assert!(s.call(&MemoryImport { memory: MemoryId(2), token }).unwrap().own);
        s.call(&MemoryRelease { memory: MemoryId(1) }).unwrap();
        let next = export(s, 3, HALF);
        assert_eq!(s.call(&MemGetInfo { device: 0 }).unwrap().free, 0);
        assert!(s.call(&MemoryImport { memory: MemoryId(4), token: next }).unwrap().own);
        s.call(&MemoryRelease { memory: MemoryId(3) }).unwrap();
        let third = MemoryCreate { memory: MemoryId(5), device: 0, size: HALF, exportable: true };
        assert_eq!(s.call(&third).unwrap_err(), Status::OUT_OF_MEMORY);
        for memory in [2, 4] {
            s.call(&MemoryRelease { memory: MemoryId(memory) }).unwrap();
        }
        assert_eq!(s.call(&MemGetInfo { device: 0 }).unwrap().free, 2 * HALF);
    }
    // Two sessions: one makes it, the other keeps it.
    fn together<S: Session>(maker: &mut S, keeper: &mut S) {
        for round in 0..3 {
            let token = export(maker, 1, HALF);
            let kept =
                keeper.call(&MemoryImport { memory: MemoryId(10 + round), token }).map(|reply| reply.own);
            assert_eq!(kept, if round < 2 { Ok(false) } else { Err(Status::OUT_OF_MEMORY) }, "round {round}");
            maker.call(&MemoryRelease { memory: MemoryId(1) }).unwrap();
        }
    }
    let server = Server::start(&["--memory-limit=32M"]);
    alone(&mut LocalBridge::connect(&server.socket()));
    alone(&mut TcpSession::connect(server.port));
    together(&mut LocalBridge::connect(&server.socket()), &mut LocalBridge::connect(&server.socket()));
    together(&mut TcpSession::connect(server.port), &mut TcpSession::connect(server.port));
}

#[test]
fn devices_are_not_selected_once_one_has_a_limit_that_counts() {
    /// `CU_LIMIT_MALLOC_HEAP_SIZE`.
    const HEAP: u32 = 2;
    fn body<S: Session>(s: &mut S) {
        let select = |devices| SelectDevices { devices, windows: vec![] };
        s.call(&select(vec![1, 0])).unwrap();
        s.call(&ContextSetLimit { context: ContextId(0), limit: HEAP, value: 9 << 20 }).unwrap();
        assert_eq!(s.call(&select(vec![1])).unwrap_err(), Status::NOT_PERMITTED);
    }
    on_each_transport!(Server::start(&["--software-devices=2"]), body);
}

/// A part would be one of a device that the session no longer has.
#[test]
fn devices_are_not_selected_once_the_client_has_a_part_of_one() {
    /// `CU_DEV_RESOURCE_TYPE_SM`.
    const SM: u32 = 1;
    fn body<S: Session>(s: &mut S) {
        let select = || SelectDevices { devices: vec![1], windows: vec![] };
        s.call(&protocol::ops::green::PartGet { device: 0, green: None, kind: SM }).unwrap();
        assert_eq!(s.call(&select()).unwrap_err(), Status::NOT_PERMITTED);
    }
    on_each_transport!(Server::start(&["--software-devices=2"]), body);
}

#[test]
fn memory_of_a_device_that_is_not_selected_is_opened_and_counts_there() {
    const SIZE: u64 = 16 << 20;
    fn body<S: Session>(maker: &mut S, other: &mut S) {
        // Device 2 and then device 1 of three, and of those the second.
        for devices in [vec![2, 1], vec![1]] {
            other.call(&SelectDevices { devices, windows: vec![] }).unwrap();
        }
        let mut open = |other: &mut S, id| {
            let token = export(maker, 1, SIZE);
            let opened = other.call(&MemoryImport { memory: MemoryId(id), token });
            maker.call(&MemoryRelease { memory: MemoryId(1) }).unwrap();
            opened
        };
        // Behind the one that is selected and the one that was.
        let opened = open(other, 1).unwrap();
        assert_eq!((opened.device, opened.size, opened.own), (2, SIZE, false));
        let (memory, address) = (MemoryId(1), SPACE);
        other.call(&AddressReserve { address, size: SIZE }).unwrap();
        other.call(&MemoryMap { memory, offset: 0, address, size: SIZE }).unwrap();
        let mut give = |device| other.call(&MemoryAccess { address, size: SIZE, device, flags: 3 });
        assert_eq!(give(2).unwrap_err(), Status::INVALID_DEVICE, "of which nothing else is the session's");
        give(0).unwrap();
        open(other, 2).unwrap();
        assert_eq!(other.call(&MemGetInfo { device: 0 }).unwrap().free, 2 * SIZE);
        assert_eq!(open(other, 3).unwrap_err(), Status::OUT_OF_MEMORY);
    }
    let server = Server::start(&["--memory-limit=32M", "--software-devices=3"]);
    let local = || LocalBridge::connect(&server.socket());
    body(&mut local(), &mut local());
    body(&mut TcpSession::connect(server.port), &mut TcpSession::connect(server.port));
}

#[test]
fn a_token_is_valid_only_for_its_client_and_during_its_session() {
    fn open<S: Session>(s: &mut S, id: u32, token: [u8; 16]) -> Result<bool, Status> {
        s.call(&MemoryImport { memory: MemoryId(id), token }).map(|reply| reply.own)
    }
    let server = Server::start(&[]);
    let mut owner = LocalBridge::connect(&server.socket());
    let (mut same, mut stranger) = (LocalBridge::connect(&server.socket()), TcpSession::connect(server.port));
    let token = export(&mut owner, 1, 2 << 20);
    let mut guess = token;
    guess[15] ^= 1;
    assert_eq!(open(&mut same, 2, guess), Err(Status::INVALID_VALUE));
    assert_eq!(
        open(&mut stranger, 2, token),
        Err(Status::INVALID_VALUE),
        "another client, over another link"
    );
    assert_eq!(open(&mut same, 2, token), Ok(false));
    drop(owner);
    until("the owner's session is over", || server.sessions() == 2);
    assert_eq!(open(&mut same, 3, token), Err(Status::INVALID_VALUE));
    // Objects opened in time stay.
    assert_eq!(same.call(&MemoryRelease { memory: MemoryId(2) }), Ok(MemoryReleaseReply {}));
}
