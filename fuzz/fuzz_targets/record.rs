//! A record as a guest may write it: opcode and body. Decoding ends in an operation or in `Malformed`.
#![cfg_attr(not(standalone), no_main)]

use protocol::ops;

struct Nothing;
impl ops::device::DeviceOps<()> for Nothing {}
impl ops::context::ContextOps<()> for Nothing {}
impl ops::memory::MemoryOps<()> for Nothing {}
impl ops::copy::CopyOps<()> for Nothing {}
impl ops::module::ModuleOps<()> for Nothing {}
impl ops::launch::LaunchOps<()> for Nothing {}
impl ops::stream::StreamOps<()> for Nothing {}
impl ops::event::EventOps<()> for Nothing {}
impl ops::nvml::NvmlOps<()> for Nothing {}
impl ops::graph::GraphOps<()> for Nothing {}
impl ops::texture::TextureOps<()> for Nothing {}
impl ops::array::ArrayOps<()> for Nothing {}
impl ops::green::GreenOps<()> for Nothing {}
impl ops::direct::DirectOps<()> for Nothing {}
impl ops::activity::ActivityOps<()> for Nothing {}

rgpu_fuzz::target!(|input: (u16, &[u8])| {
    let (opcode, body) = input;
    let mut reply = Vec::new();
    let _ = ops::dispatch(&mut Nothing, &mut (), opcode, body, &mut reply);
    assert!(reply.is_empty());
    if let Some(info) = ops::info(opcode) {
        let _ = (info.visit_data)(body, &mut |_| {});
    }
});
