//! Codecs: encoded values decode to themselves, and no input makes decoding panic or allocate without bound.

#![allow(clippy::unwrap_used)] // Clippy does not see that a helper of tests is a test.

use proptest::prelude::*;
use protocol::data::{DataUse, HostIn, HostOut, HostRange, Place};
use protocol::handle::{FunctionId, ModuleId, StreamId};
use protocol::ops::{self, Op, copy, launch, module};
use protocol::wire::Reader;

fn round_trip<'a, T: Op<'a> + PartialEq + std::fmt::Debug>(op: &T, buf: &'a mut Vec<u8>) {
    ops::encode(op, buf);
    buf.resize(buf.len().next_multiple_of(16), 0);
    let mut reader = Reader::new(buf);
    assert_eq!(T::get(&mut reader).as_ref(), Ok(op));
    reader.finish().unwrap();
}

fn range() -> impl Strategy<Value = HostRange> {
    let place = prop_oneof![Just(Place::Arena), any::<u32>().prop_map(Place::Region)];
    (place, 0..u64::MAX / 2, 0..u64::MAX / 2).prop_map(|(place, offset, len)| HostRange {
        place,
        offset,
        len,
    })
}

proptest! {
    #[test]
    fn a_launch_round_trips(grid in any::<[u32; 3]>(), block in any::<[u32; 3]>(), params in proptest::collection::vec(any::<u8>(), 0..4096), ids in proptest::collection::vec(any::<u32>(), 0..4)) {
        let attributes = ids.into_iter().map(|id| launch::LaunchAttribute { id, value: [id as u8; 64] }).collect();
        let function = FunctionId::new(ModuleId(block[0]), grid[0]);
        let op = launch::Launch { function, stream: StreamId(9), grid, block, dynamic_shared: 48, attributes, params: &params };
        round_trip(&op, &mut Vec::new());
        prop_assert_eq!((function.module(), function.index()), (ModuleId(block[0]), grid[0]));
    }

    #[test]
    fn copies_round_trip_and_name_their_data(range in range(), bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let inline = copy::MemcpyHtoD { stream: StreamId(1), dst: 5, src: HostIn::Inline(&bytes) };
        round_trip(&inline, &mut Vec::new());
        let from = copy::MemcpyHtoD { stream: StreamId(1), dst: 5, src: HostIn::Range(range) };
        let to = copy::MemcpyDtoH { stream: StreamId(1), src: 5, dst: HostOut(range) };
        let (mut a, mut b) = (Vec::new(), Vec::new());
        round_trip(&from, &mut a);
        round_trip(&to, &mut b);
        for (info, body, want) in [(copy::MemcpyHtoD::INFO, a, DataUse::In(range)), (copy::MemcpyDtoH::INFO, b, DataUse::Out(range))] {
            let mut seen = Vec::new();
            (ops::info(info.opcode).unwrap().visit_data)(&body, &mut |data| seen.push(data)).unwrap();
            prop_assert_eq!(seen, [want]);
            prop_assert!(info.carries_data);
        }
    }

    #[test]
    fn no_body_makes_decoding_panic(body in proptest::collection::vec(any::<u8>(), 0..512)) {
        for row in ops::all() {
            let _ = (row.visit_data)(&body, &mut |_| {});
        }
        let _ = ops::decode_reply::<module::FunctionTable>(&body);
    }
}

#[test]
fn a_false_length_allocates_little() {
    // A function table that claims four billion functions in eight bytes.
    let body = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    assert!(ops::decode_reply::<module::FunctionTable>(&body).is_err());
}

#[test]
fn only_operations_with_data_are_marked() {
    let marked: Vec<_> = ops::all().filter(|row| row.carries_data).map(|row| row.name).collect();
    assert_eq!(
        marked,
        [
            "host_map",
            "host_fetch",
            "memcpy_htod",
            "memcpy_dtoh",
            "memcpy_htod_3d",
            "memcpy_dtoh_3d",
            "module_load",
            "module_info",
            "module_load_by_name",
            "link_add",
            "link_complete",
            "graph_instantiate",
            "graph_update",
            "graph_instantiate_draft",
            "activity_read"
        ],
        "the relay decodes only these"
    );
}
