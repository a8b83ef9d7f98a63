//! Sessions from end to end: what holds for every transport, and (with `RGPU_TEST_BACKEND=cuda`) for every
//! backend.
//!
//! - [`kernels`]: modules and their kernels;
//! - [`memory`]: copies, the memory limit, and memory that sessions share;
//! - [`streams`]: streams, events, and their waits;
//! - [`graphs`]: graphs and drafts;
//! - [`errors`]: how a client learns of failures;
//! - [`hostile`]: commands that no correct client sends, and limits.

#![allow(clippy::unwrap_used)]

/// Runs a test body on a session of each transport.
macro_rules! on_each_transport {
    ($server:expr, $body:expr) => {{
        let server = $server;
        $body(&mut LocalBridge::connect(&server.socket()));
        $body(&mut TcpSession::connect(server.port));
    }};
}

mod errors;
mod graphs;
mod hostile;
mod kernels;
mod memory;
mod streams;
#[path = "../support/mod.rs"]
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

fn memory_op(operation: u32, address: u64, value: u64) -> MemoryOp {
    MemoryOp { operation, flags: 0, address, value }
}

/// Reads 4 bytes of device memory when the stream reaches that point.
fn word_at<S: Session>(s: &mut S, address: u64) -> u32 {
    let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: address, len: 4 }).unwrap().bytes.0;
    u32::from_le_bytes(bytes.try_into().unwrap())
}
