//! Arrays, their levels, and their textures: what a session may name and do.

#![allow(clippy::unwrap_used)]

mod support;

use protocol::Status;
use protocol::data::HostIn;
use protocol::handle::*;
use protocol::ops::array::*;
use protocol::ops::context::ContextSynchronize;
use protocol::ops::copy::{MemcpyDtoHInline, MemcpyHtoD, Pitched};
use protocol::ops::memory::{MemAlloc, MemGrow, window};
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession};
use test_kit::until;

const BASE: u64 = window(0);
const FLOAT: u32 = 0x20;

/// Runs a test body on a session of each transport.
macro_rules! on_each_transport {
    ($server:expr, $body:expr) => {{
        let server = $server;
        $body(&mut LocalBridge::connect(&server.socket()));
        $body(&mut TcpSession::connect(server.port));
    }};
}

fn shape(width: u64, height: u64, depth: u64, flags: u32) -> ArrayShape {
    ArrayShape { width, height, depth, format: FLOAT, channels: 1, flags }
}

fn create<S: Session>(s: &mut S, id: u32, shape: ArrayShape, levels: u32) -> Result<(), Status> {
    s.call(&ArrayCreate { context: ContextId(0), array: ArrayId(id), shape, levels }).map(|_| ())
}

fn level<S: Session>(s: &mut S, of: u32, level: u32, id: u32) -> Result<(), Status> {
    s.call(&ArrayLevel { mipmapped: ArrayId(of), level, array: ArrayId(id) }).map(|_| ())
}

fn texture<S: Session>(s: &mut S, array: u32, kind: u32, view: Option<View>) -> Result<u64, Status> {
    texture_in(s, 0, array, kind, view)
}

fn texture_in<S: Session>(
    s: &mut S,
    context: u32,
    array: u32,
    kind: u32,
    view: Option<View>,
) -> Result<u64, Status> {
    let resource = Resource {
        kind,
        array: ArrayId(array),
        address: 0,
        format: 0,
        channels: 0,
        width: 0,
        height: 0,
        pitch: 0,
    };
    let sampling = Sampling {
        address: [1; 3],
        filter: 0,
        flags: 2,
        anisotropy: 0,
        level_filter: 0,
        level_bias: 0,
        level_clamp: [0, f32::MAX.to_bits()],
        border: [0; 4],
    };
    s.call(&TextureCreate { context: ContextId(context), resource, sampling, view }).map(|made| made.texture)
}

/// Copies `bytes` between an array's row and the beginning of the device's memory.
fn copy<S: Session>(s: &mut S, array: u32, at: [u64; 3], bytes: u64, to_array: bool) {
    let pitched = |address| Pitched { address, pitch: bytes, slice: bytes };
    let place = ArrayPlace { array: Some(ArrayId(array)), at, memory: pitched(0) };
    let memory = ArrayPlace { array: None, at: [0; 3], memory: pitched(BASE) };
    let (dst, src) = if to_array { (place, memory) } else { (memory, place) };
    s.push(&MemcpyArray { stream: StreamId(0), dst, src, extent: [bytes, 1, 1] });
}

/// The contents of an array's row; `None`: nothing was copied.
fn row<S: Session>(s: &mut S, array: u32, at: [u64; 3], bytes: u64) -> Option<Vec<u8>> {
    let marked = vec![0xee; bytes as usize];
    s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&marked) });
    copy(s, array, at, bytes, false);
    let found = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: bytes as u32 }).unwrap();
    let found = found.bytes.0.to_vec();
    (found != marked).then_some(found)
}

#[test]
fn arrays_count_in_the_status_figure_at_once() {
    let server = Server::start(&["--workers=1", "--memory-limit=1M"]);
    let mut session = LocalBridge::connect(&server.socket());
    let held = || server.status()["sessions"][0]["device_memory"].as_u64();
    // No operation of the memory chapter is ever executed.
    create(&mut session, 1, shape(64, 64, 0, 0), 0).unwrap();
    until("the array counts", || held() == Some(64 * 64 * 4));
    create(&mut session, 2, shape(256, 256, 0, 0), 0).unwrap();
    until("both arrays count", || held() == Some(64 * 64 * 4 + 256 * 256 * 4));
    assert_eq!(create(&mut session, 3, shape(512, 512, 0, 0), 0), Err(Status::OUT_OF_MEMORY));
    session.push(&ArrayDestroy { array: ArrayId(2) });
    until("one array is gone", || held() == Some(64 * 64 * 4));
    create(&mut session, 3, shape(448, 512, 0, 0), 0).unwrap();
    session.push(&ArrayDestroy { array: ArrayId(1) });
    session.push(&ArrayDestroy { array: ArrayId(3) });
    until("all arrays are gone", || held() == Some(0));
}

#[test]
fn a_level_is_an_array_until_its_mipmapped_array_is_destroyed() {
    fn body<S: Session>(s: &mut S) {
        s.call(&MemGrow { device: 0, address: BASE, size: 2 << 20 }).unwrap();
        s.push(&MemAlloc { address: BASE, size: 4096 });
        create(s, 1, shape(16, 8, 0, flag::SURFACE_LDST), 5).unwrap();
        level(s, 1, 1, 2).unwrap();
        assert_eq!(level(s, 1, 2, 2), Err(Status::INVALID_VALUE), "a name in use");
        assert_eq!(level(s, 1, 1, 3), Err(Status::INVALID_VALUE), "a level that has a name");
        assert_eq!(level(s, 1, 5, 3), Err(Status::INVALID_VALUE), "a level that is not there");
        assert_eq!(level(s, 2, 0, 3), Err(Status::INVALID_HANDLE), "a level of a level");
        assert_eq!(level(s, 9, 0, 3), Err(Status::INVALID_HANDLE), "a level of nothing");
        let bytes: Vec<u8> = (0..32).collect();
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&bytes) });
        copy(s, 2, [0, 3, 0], 32, true);
        assert_eq!(row(s, 2, [0, 3, 0], 32), Some(bytes.clone()));
        assert_eq!(row(s, 2, [4, 3, 0], 32), None, "beyond a row of the level");
        assert_eq!(row(s, 2, [0, 4, 0], 32), None, "beyond the level's rows");
        assert_eq!(row(s, 1, [0, 0, 0], 32), None, "all levels at once");
        let surface = |s: &mut S, id| {
            s.call(&SurfaceCreate { context: ContextId(0), array: ArrayId(id) }).map(|made| made.surface)
        };
        assert_eq!(surface(s, 1), Err(Status::INVALID_HANDLE), "a surface of all levels");
        let surface = surface(s, 2).unwrap();
        s.push(&SurfaceDestroy { context: ContextId(0), surface });
        assert_eq!(texture(s, 1, 0, None), Err(Status::INVALID_VALUE), "as a plain array");
        assert_eq!(texture(s, 2, 1, None), Err(Status::INVALID_VALUE), "a level as a mipmapped array");
        let (whole, part) = (texture(s, 1, 1, None).unwrap(), texture(s, 2, 0, None).unwrap());
        level(s, 1, 2, 4).unwrap();
        s.push(&ArrayDestroy { array: ArrayId(4) });
        level(s, 1, 2, 4).unwrap();
        s.push(&ArrayDestroy { array: ArrayId(1) });
        assert_eq!(row(s, 2, [0, 3, 0], 32), None, "a level that has gone");
        assert_eq!(texture(s, 2, 0, None), Err(Status::INVALID_HANDLE));
        s.push(&TextureDestroy { context: ContextId(0), texture: whole });
        s.push(&TextureDestroy { context: ContextId(0), texture: part });
        create(s, 2, shape(4, 0, 0, 0), 0).unwrap();
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&bytes) });
        copy(s, 2, [0, 0, 0], 16, true);
        assert_eq!(row(s, 2, [0, 0, 0], 16), Some(bytes[..16].to_vec()), "the level's name is free again");
        assert!(s.lost().is_none());
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn textures_of_two_contexts_with_equal_handles_are_destroyed_each_by_its_own() {
    fn body<S: Session>(s: &mut S) {
        let mut textures = Vec::new();
        for n in 0..2 {
            let (context, array) = (ContextId(n), ArrayId(n));
            s.call(&ArrayCreate { context, array, shape: shape(4, 4, 0, 0), levels: 0 }).unwrap();
            textures.push(texture_in(s, n, n, 0, None).unwrap());
        }
        let texture = textures[0];
        assert_eq!(textures[1], texture, "each device in software counts from 1");
        for (context, error) in [(0, None), (0, Some((Status::INVALID_HANDLE, false))), (1, None)] {
            s.push(&TextureDestroy { context: ContextId(context), texture });
            let _ = s.call(&ContextSynchronize { context: ContextId(context) });
            assert_eq!(s.error(context), error);
        }
        assert!(s.lost().is_none());
    }
    on_each_transport!(Server::start(&["--software-devices=2"]), body);
}

#[test]
fn invalid_arrays_are_refused() {
    fn body<S: Session>(s: &mut S) {
        let cube = flag::CUBEMAP;
        for (wrong, levels) in [
            (shape(0, 0, 0, 0), 0),
            (shape(u64::MAX, 0, 0, 0), 0),
            (shape(1 << 40, 1 << 40, 0, 0), 0),
            (shape(u64::MAX, u64::MAX, u64::MAX, flag::LAYERED), u32::MAX),
            (shape(16, 16, 0, 0), 6),
            (shape(16, 16, 0, 0), u32::MAX),
            (shape(16, 16, 5, cube), 0),
            (shape(16, 8, 6, cube), 0),
            (shape(16, 16, 12, cube), 1),
            (shape(16, 16, 7, cube | flag::LAYERED), 0),
            (shape(16, 16, 0, 1 << 31), 0),
        ] {
            let made = create(s, 1, wrong.clone(), levels);
            assert!(made.is_err(), "{wrong:?} of {levels} levels");
        }
        for (n, right) in [shape(16, 16, 6, cube), shape(16, 16, 12, cube | flag::LAYERED)].iter().enumerate()
        {
            create(s, 1 + n as u32, right.clone(), 0).unwrap();
            create(s, 11 + n as u32, right.clone(), 5).unwrap();
        }
        assert!(s.lost().is_none());
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn all_levels_count_against_the_limit() {
    fn body<S: Session>(s: &mut S) {
        // One row of 1 MiB: the levels below take as much again.
        let row = shape(1 << 18, 0, 0, 0);
        assert_eq!(create(s, 1, row.clone(), 19), Err(Status::OUT_OF_MEMORY));
        create(s, 1, row.clone(), 1).unwrap();
        assert_eq!(create(s, 2, row.clone(), 0), Err(Status::OUT_OF_MEMORY));
        s.push(&ArrayDestroy { array: ArrayId(1) });
        create(s, 2, row, 0).unwrap();
    }
    on_each_transport!(Server::start(&["--memory-limit=1900K"]), body);
}

#[test]
fn an_array_that_waits_for_memory_has_nothing_to_copy() {
    fn body<S: Session>(s: &mut S) {
        s.call(&MemGrow { device: 0, address: BASE, size: 2 << 20 }).unwrap();
        s.push(&MemAlloc { address: BASE, size: 4096 });
        create(s, 1, shape(16, 8, 0, flag::DEFERRED_MAPPING), 0).unwrap();
        create(s, 2, shape(16, 8, 0, 0), 0).unwrap();
        let needs = s.call(&ArrayRequirements { array: ArrayId(1) }).unwrap();
        assert_eq!((needs.size, needs.alignment), (64 << 10, 64 << 10));
        assert_eq!(s.call(&ArrayRequirements { array: ArrayId(2) }).unwrap_err(), Status::INVALID_VALUE);
        assert_eq!(row(s, 1, [0, 0, 0], 16), None);
        if backend() == "software" {
            assert_eq!(texture(s, 1, 0, None), Err(Status::INVALID_VALUE));
        }
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_view_cannot_exceed_its_array() {
    fn body<S: Session>(s: &mut S) {
        create(s, 1, shape(16, 16, 0, 0), 5).unwrap();
        create(s, 2, shape(16, 16, 4, flag::LAYERED), 0).unwrap();
        let view = |levels, layers| {
            Some(View {
                format: 0x16,
                extent: [16, 16, if layers == [0, 0] { 0 } else { 4 }],
                levels,
                layers,
            })
        };
        texture(s, 1, 1, view([1, 3], [0, 0])).unwrap();
        texture(s, 2, 0, view([0, 0], [1, 3])).unwrap();
        assert!(texture(s, 1, 1, view([3, 1], [0, 0])).is_err(), "backwards");
        assert!(texture(s, 1, 1, view([4, u32::MAX], [0, 0])).is_ok(), "up to the last level");
        let half = View { extent: [8, 16, 0], ..view([0, 1], [0, 0]).unwrap() };
        assert!(texture(s, 1, 1, Some(half)).is_err(), "another width");
        let wide = View { format: 0x17, ..view([0, 1], [0, 0]).unwrap() };
        assert!(texture(s, 1, 1, Some(wide)).is_err(), "larger elements than there are");
        assert!(texture(s, 2, 0, view([0, 0], [3, 4])).is_err(), "layers that are not there");
        assert!(s.lost().is_none());
    }
    on_each_transport!(Server::start(&[]), body);
}
