//! Sessions from end to end: what holds for every transport, and (with `RGPU_TEST_BACKEND=cuda`) for every
//! backend.

#![allow(clippy::unwrap_used)]

mod support;

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_DEVICES};
use protocol::data::{HostIn, HostOut};
use protocol::handle::*;
use protocol::ops::Op;
use protocol::ops::context::*;
use protocol::ops::copy::*;
use protocol::ops::device::*;
use protocol::ops::event::*;
use protocol::ops::graph::*;
use protocol::ops::launch::*;
use protocol::ops::memory::*;
use protocol::ops::module::*;
use protocol::ops::stream::*;
use protocol::wire::{Bytes, Wire, Writer};
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession};
use test_kit::*;

const BASE: u64 = window(0);
const MADE: u32 = MAX_CONTEXTS;

/// `out[i] = in[i] * factor`, and a kernel that spins until a flag is set.
const PTX: &str = concat!(
    r#"
.version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .u32 flag;
.visible .entry scale(.param .u64 p, .param .u32 factor, .param .u32 n)
{
    .reg .pred %q;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [p];
    ld.param.u32 %r0, [factor];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %q, %r5, %r1;
    @%q bra DONE;
    cvta.to.global.u64 %rd1, %rd0;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r6, [%rd1];
    mul.lo.s32 %r6, %r6, %r0;
    st.global.u32 [%rd1], %r6;
DONE:
    ret;
}
.visible .entry crash(.param .u64 p)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [p];
    mov.u32 %r0, 7;
    st.global.u32 [%rd0], %r0;
    ret;
}
"#,
    "\0"
);

/// Runs a test body on a session of each transport.
macro_rules! on_each_transport {
    ($server:expr, $body:expr) => {{
        let server = $server;
        $body(&mut LocalBridge::connect(&server.socket()));
        $body(&mut TcpSession::connect(server.port));
    }};
}

fn grow<S: Session>(s: &mut S, bytes: u64) {
    s.call(&MemGrow { device: 0, address: BASE, size: 2 << 20 }).unwrap();
    s.push(&MemAlloc { address: BASE, size: bytes });
}

fn load<S: Session>(s: &mut S) -> Vec<String> {
    let room = s.arena(4 << 20, &[0; 4096]);
    let image = s.arena(0, PTX.as_bytes());
    let op = ModuleLoad {
        context: ContextId(0),
        module: ModuleId(1),
        options: vec![],
        image: HostIn::Range(image),
        info: HostOut(room),
    };
    let reply = s.call(&op).unwrap();
    let table = s.read_arena(4 << 20, reply.info_size as usize);
    let table: FunctionTable = protocol::ops::decode_reply(&table).unwrap();
    table.functions.into_iter().map(|f| f.name).collect()
}

fn launch<S: Session>(s: &mut S, stream: u32, function: u32, params: &[u8]) {
    s.push(&Launch {
        function: FunctionId::new(ModuleId(1), function),
        stream: StreamId(stream),
        grid: [64, 1, 1],
        block: [256, 1, 1],
        dynamic_shared: 0,
        attributes: vec![],
        params,
    });
}

fn params(address: u64, factor: u32, n: u32) -> Vec<u8> {
    [&address.to_le_bytes()[..], &factor.to_le_bytes(), &n.to_le_bytes()].concat()
}

#[test]
fn a_program_runs_from_its_first_call_to_its_result() {
    fn body<S: Session>(s: &mut S) {
        let info = s.call(&SessionInfo {}).unwrap();
        assert_eq!(info.backend, backend());
        let device = s.call(&DeviceInfo { device: 0 }).unwrap();
        assert_eq!(device.granule, 2 << 20);
        assert_eq!(s.call(&DeviceInfo { device: info.device_count }).unwrap_err(), Status::INVALID_DEVICE);
        grow(s, 64 << 10);
        assert_eq!(load(s), ["scale", "crash"]);
        let input: Vec<u8> = (0..16384u32).flat_map(|i| i.to_le_bytes()).collect();
        let src = s.arena(0, &input);
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 0, priority: 0 });
        s.push(&MemcpyHtoD { stream: StreamId(MADE), dst: BASE, src: HostIn::Range(src) });
        for _ in 0..3 {
            launch(s, MADE, 0, &params(BASE, 3, 16384));
        }
        let dst = s.arena(1 << 20, &[0xaa; 64 << 10]);
        s.push(&MemcpyDtoH { stream: StreamId(MADE), src: BASE, dst: HostOut(dst) });
        s.call(&StreamSynchronize { stream: StreamId(MADE) }).unwrap();
        let output = s.read_arena(1 << 20, 64 << 10);
        for (i, value) in output.chunks_exact(4).enumerate() {
            assert_eq!(u32::from_le_bytes(value.try_into().unwrap()), i as u32 * 27);
        }
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE + 4, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, [27, 0, 0, 0, 54, 0, 0, 0]);
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

/// Loads the image whose functions the client binds itself.
fn load_by_name<S: Session>(s: &mut S, image: &str) -> u32 {
    let image = HostIn::Inline(image.as_bytes());
    s.call(&ModuleLoadByName { context: ContextId(0), module: ModuleId(1), image }).unwrap().result
}

fn bind<S: Session>(s: &mut S, index: u32, name: &str, params: &[(u32, u32)]) {
    let params = params.iter().map(|&(offset, size)| Param { offset, size }).collect();
    s.push(&FunctionBind { function: FunctionId::new(ModuleId(1), index), name, params });
}

const SCALE: [(u32, u32); 3] = [(0, 8), (8, 4), (12, 4)];

#[test]
fn functions_are_bound_in_the_order_of_their_first_use() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        assert_eq!(load_by_name(s, PTX), 0);
        bind(s, 0, "crash", &[(0, 8)]);
        bind(s, 1, "scale", &SCALE);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&[5, 0, 0, 0]) });
        launch(s, 0, 1, &params(BASE, 3, 1));
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!((bytes, s.error(0)), (vec![15, 0, 0, 0], None));
        // The next one would be the third.
        for index in [0, 1, 3, u32::MAX] {
            bind(s, index, "scale", &SCALE);
        }
        s.call(&MemGetInfo { device: 0 }).unwrap();
        assert_eq!(s.error(0), Some((Status::INVALID_HANDLE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_kernel_is_not_launched_with_parameters_in_other_places() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        assert_eq!(load_by_name(s, PTX), 0);
        bind(s, 0, "scale", &[(0, 8), (8, 8), (16, 4)]);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&[5, 0, 0, 0]) });
        launch(s, 0, 0, &params(BASE, 3, 1));
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!(bytes, [5, 0, 0, 0]);
        assert_eq!(s.error(0), Some((Status::INVALID_IMAGE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn what_follows_a_load_that_failed_fails_with_its_status() {
    fn body<S: Session>(s: &mut S) {
        let refused = load_by_name(s, ".version 8.0\n.target sm_90\n.address_size 64\nthis is no PTX\n");
        assert_ne!(refused, 0);
        bind(s, 0, "scale", &SCALE);
        launch(s, 0, 0, &params(BASE, 3, 1));
        let function = FunctionId::new(ModuleId(1), 0);
        assert_eq!(s.call(&FunctionAttributes { function }).unwrap_err(), Status(refused));
        assert_eq!(s.error(0), Some((Status(refused), false)));
        s.push(&ModuleUnload { module: ModuleId(1) });
        assert_eq!(s.call(&FunctionAttributes { function }).unwrap_err(), Status::INVALID_HANDLE);
    }
    on_each_transport!(Server::start(&[]), body);
}

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
fn a_failed_asynchronous_operation_sets_the_contexts_error_and_stops_nothing() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let inline = HostIn::Inline(&[1, 2, 3, 4]);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE + 4094, src: inline });
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: inline });
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert_eq!(s.error(0), Some((Status::INVALID_VALUE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_kernel_fault_is_sticky_until_the_context_is_reset() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        load(s);
        launch(s, 0, 1, &0x1234_0000u64.to_le_bytes());
        assert_eq!(s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap_err(), Status::ILLEGAL_ADDRESS);
        assert_eq!(s.error(0), Some((Status::ILLEGAL_ADDRESS, true)));
        assert_eq!(
            s.call(&ContextSynchronize { context: ContextId(0) }).unwrap_err(),
            Status::ILLEGAL_ADDRESS
        );
        let reset = s.call(&PrimaryReset { device: 0 });
        if backend() == "cuda" {
            // After a fault, NVIDIA's driver does nothing more for a process.
            assert_eq!(reset.unwrap_err(), Status::ILLEGAL_ADDRESS);
            return;
        }
        reset.unwrap();
        grow(s, 4096);
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

/// As long as no mark, record or synchronization stands behind the fault, only the answers themselves can tell the client.
#[test]
fn a_client_that_is_answered_with_a_fault_finds_the_context_failed() {
    fn body<S: Session>(s: &mut S, ask: impl Fn(&mut S) -> Option<Status>) {
        grow(s, 4096);
        load(s);
        let create = StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 };
        s.push(&create);
        s.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: 2 });
        launch(s, MADE, 1, &0x1234_0000u64.to_le_bytes());
        let mut answer = None;
        until("the kernel fails", || {
            answer = ask(s);
            answer.is_some()
        });
        assert_eq!(answer, Some(Status::ILLEGAL_ADDRESS));
        assert_eq!(s.error(0), Some((Status::ILLEGAL_ADDRESS, true)));
    }
    if backend() == "cuda" {
        // NVIDIA's driver is asked for faults by the thread that waits for streams, and nothing here waits.
        return;
    }
    fn of_an_event<S: Session>(s: &mut S) {
        body(s, |s| s.call(&EventSynchronize { event: EventId(1) }).err());
    }
    fn for_memory<S: Session>(s: &mut S) {
        let (device, address, size) = (0, BASE + (2 << 20), 2 << 20);
        body(s, |s| {
            let answer = s.call(&MemGrow { device, address, size }).err();
            if answer.is_none() {
                s.call(&MemShrink { device, address, size }).unwrap();
            }
            answer
        });
    }
    fn for_a_module<S: Session>(s: &mut S) {
        let (context, module) = (ContextId(0), ModuleId(2));
        body(s, |s| {
            let image = HostIn::Range(s.arena(0, PTX.as_bytes()));
            let answer = s.call(&ModuleLoadByName { context, module, image });
            s.push(&ModuleUnload { module });
            answer.map(|reply| assert_eq!(reply.result, 0)).err()
        });
    }
    on_each_transport!(Server::start(&[]), of_an_event);
    on_each_transport!(Server::start(&[]), for_memory);
    on_each_transport!(Server::start(&[]), for_a_module);
}

#[test]
fn marks_raise_a_streams_word_in_order_and_a_host_wait_blocks_only_its_stream() {
    fn body<S: Session>(s: &mut S) {
        for i in 0..2 {
            s.push(&StreamCreate {
                context: ContextId(0),
                stream: StreamId(MADE + i),
                flags: 1,
                priority: 0,
            });
        }
        s.push(&StreamHostWait { stream: StreamId(MADE), ticket: TicketId(9) });
        let held = s.push(&StreamMark { stream: StreamId(MADE) });
        let free = s.push(&StreamMark { stream: StreamId(MADE + 1) });
        until("the other stream goes on", || s.word(MADE + 1) == free);
        let waiting = s.send(1, &StreamSynchronize { stream: StreamId(MADE) });
        s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
        assert!(s.word(MADE) < held);
        s.push(&StreamHostSignal { ticket: TicketId(9) });
        assert_eq!(s.wait(1, waiting).0, Status::SUCCESS);
        until("the mark is seen", || s.word(MADE) >= held);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_host_wait_is_released_however_much_is_enqueued_behind_it() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        s.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
        for i in 0..3000u32 {
            s.push(&Memset {
                stream: StreamId(0),
                dst: BASE,
                pitch: 0,
                value: i,
                element: 4,
                width: 1,
                height: 1,
            });
        }
        let src = s.arena(0, &7u32.to_le_bytes());
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE + 4, src: HostIn::Range(src) });
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, [2999u32.to_le_bytes(), 7u32.to_le_bytes()].concat());
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let (blocking, free) = (StreamId(MADE), StreamId(MADE + 1));
        s.push(&StreamCreate { context: ContextId(0), stream: blocking, flags: 0, priority: 0 });
        s.push(&StreamCreate { context: ContextId(0), stream: free, flags: 1, priority: 0 });
        let set =
            |stream, value| Memset { stream, dst: BASE, pitch: 0, value, element: 1, width: 1, height: 1 };
        s.push(&set(StreamId(0), 0));
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        s.push(&StreamHostWait { stream: blocking, ticket: TicketId(1) });
        s.push(&set(blocking, 1));
        s.push(&set(StreamId(0), 2));
        let bytes = s.call(&MemcpyDtoHInline { stream: free, src: BASE, len: 1 }).unwrap().bytes.0;
        assert_eq!(bytes, [0], "the legacy stream must not have run yet, and a non-blocking stream must");
        s.push(&set(blocking, 3));
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        s.call(&StreamSynchronize { stream: blocking }).unwrap();
        let bytes = s.call(&MemcpyDtoHInline { stream: blocking, src: BASE, len: 1 }).unwrap().bytes.0;
        assert_eq!(bytes, [3]);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn events_order_streams_and_measure_time() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let streams = [StreamId(MADE), StreamId(MADE + 1)];
        for stream in streams {
            s.push(&StreamCreate { context: ContextId(0), stream, flags: 1, priority: 0 });
        }
        let events = [EventId(1), EventId(2)];
        for event in events {
            s.push(&EventCreate { context: ContextId(0), event, flags: 0 });
        }
        s.push(&StreamHostWait { stream: streams[0], ticket: TicketId(1) });
        s.push(&Memset {
            stream: streams[0],
            dst: BASE,
            pitch: 0,
            value: 5,
            element: 1,
            width: 1,
            height: 1,
        });
        let recorded = s.push(&EventRecord { event: events[0], stream: streams[0], flags: 0 });
        s.push(&StreamWaitEvent { stream: streams[1], event: events[0], flags: 0 });
        let reading = s.send(1, &MemcpyDtoHInline { stream: streams[1], src: BASE, len: 1 });
        let waiting = s.send(2, &EventSynchronize { event: events[0] });
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        assert_eq!(s.wait(1, reading), (Status::SUCCESS, vec![1, 0, 0, 0, 5]));
        assert_eq!(s.wait(2, waiting).0, Status::SUCCESS);
        until("the record is published", || s.word(MADE) == recorded);
        s.push(&EventRecord { event: events[1], stream: streams[1], flags: 0 });
        s.call(&EventSynchronize { event: events[1] }).unwrap();
        assert!(s.call(&EventElapsed { start: events[0], end: events[1] }).unwrap().milliseconds >= 0.0);
        assert_eq!(s.call(&EventSynchronize { event: EventId(77) }).unwrap_err(), Status::INVALID_HANDLE);
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

fn memory_op(operation: u32, address: u64, value: u64) -> MemoryOp {
    MemoryOp { operation, flags: 0, address, value }
}

#[test]
fn a_wait_for_a_word_blocks_only_its_own_stream() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        for stream in [MADE, MADE + 1] {
            s.push(&StreamCreate { context: ContextId(0), stream: StreamId(stream), flags: 1, priority: 0 });
        }
        let fill = |value| Memset {
            stream: StreamId(MADE + 1),
            dst: BASE,
            pitch: 0,
            value,
            element: 4,
            width: 16,
            height: 1,
        };
        s.push(&fill(0));
        s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
        let waits =
            vec![memory_op(memory_op::WAIT_32, BASE, 5), memory_op(memory_op::WRITE_64, BASE + 8, 1 << 40)];
        s.push(&StreamBatchMemOp { stream: StreamId(MADE), operations: waits });
        let mark = s.push(&StreamMark { stream: StreamId(MADE) });
        for value in 1..5 {
            let write = vec![memory_op(memory_op::WRITE_32, BASE, value)];
            s.push(&StreamBatchMemOp { stream: StreamId(MADE + 1), operations: write });
            s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
            assert!(s.word(MADE) < mark, "the stream went on at {value}");
        }
        // A fill does as well as any operation.
        s.push(&fill(5));
        s.call(&StreamSynchronize { stream: StreamId(MADE) }).unwrap();
        let bytes =
            s.call(&MemcpyDtoHInline { stream: StreamId(MADE), src: BASE + 8, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, (1u64 << 40).to_le_bytes());
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_session_ends_while_a_stream_waits_for_a_word() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let waits = vec![memory_op(memory_op::WAIT_64, BASE, 1 << 50)];
        s.push(&StreamBatchMemOp { stream: StreamId(0), operations: waits });
        s.push(&Memset {
            stream: StreamId(0),
            dst: BASE,
            pitch: 0,
            value: 0,
            element: 4,
            width: 4,
            height: 1,
        });
        s.call(&MemGetInfo { device: 0 }).unwrap();
    }
    let server = Server::start(&[]);
    let over = || server.status()["sessions"].as_array().is_some_and(Vec::is_empty);
    body(&mut LocalBridge::connect(&server.socket()));
    until("the session over a socket is over", over);
    body(&mut TcpSession::connect(server.port));
    until("the session over TCP is over", over);
}

#[test]
fn no_answer_overtakes_the_progress_that_it_implies() {
    fn body<S: Session>(s: &mut S) {
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 });
        s.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: 2 });
        for round in 0..300 {
            let record = s.push(&EventRecord { event: EventId(1), stream: StreamId(MADE), flags: 0 });
            s.push(&StreamWaitEvent { stream: StreamId(0), event: EventId(1), flags: 0 });
            let mark = s.push(&StreamMark { stream: StreamId(0) });
            // Each of these implies the event's record; the second and third also imply the mark after it.
            match round % 3 {
                0 => drop(s.call(&EventSynchronize { event: EventId(1) }).unwrap()),
                1 => drop(s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap()),
                _ => drop(s.call(&ContextSynchronize { context: ContextId(0) }).unwrap()),
            }
            assert!(s.word(MADE) >= record, "round {round}: the event's stream is behind");
            assert!(round % 3 == 0 || s.word(0) >= mark, "round {round}: the other stream is behind");
        }
    }
    on_each_transport!(Server::start(&[]), body);
}

/// Reads 4 bytes of device memory when the stream reaches that point.
fn word_at<S: Session>(s: &mut S, address: u64) -> u32 {
    let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: address, len: 4 }).unwrap().bytes.0;
    u32::from_le_bytes(bytes.try_into().unwrap())
}

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
        s.push(&GraphDestroy { graph: GraphId(1) });
        assert_eq!((word_at(s, BASE), word_at(s, BASE + 8)), (5, 15));
        assert_eq!(s.error(0), None);
        s.push(&GraphLaunch { graph: GraphId(1), stream: StreamId(0) });
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert_eq!(s.error(0), Some((Status::INVALID_HANDLE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
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
