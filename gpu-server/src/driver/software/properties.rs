//! What a software device reports about itself, in CUDA's terms.

use protocol::ops::device::{Attribute, DeviceInfoReply};
use software_gpu::{GRANULE, Properties};

/// Maximum size of an access policy's window, in bytes.
pub(super) const MAX_WINDOW: u32 = 128 << 20;
/// Domains in which fences order memory. Here each fence orders all memory.
pub(super) const MEM_SYNC_DOMAINS: u32 = 4;

/// Describes the server's device `number` to a client. The description does not depend on the device's
/// ordinal in a session.
pub(super) fn describe(number: u32, p: &Properties) -> DeviceInfoReply {
    let mut uuid = *b"rgpu-software-\0\0";
    uuid[14..].copy_from_slice(&(number as u16).to_be_bytes());
    let (major, minor) = p.compute_capability;
    let optin = p.shared_per_block_optin;
    // Number in `CUdevice_attribute`, value.
    let known: &[(u32, u32)] = &[
        (1, p.max_threads_per_block),
        (2, p.max_block[0]),
        (3, p.max_block[1]),
        (4, p.max_block[2]),
        (5, p.max_grid[0]),
        (6, p.max_grid[1]),
        (7, p.max_grid[2]),
        (8, p.shared_per_block),
        (9, p.constant_memory),
        (10, p.warp_size),
        (11, i32::MAX as u32),
        (12, p.registers_per_block),
        (13, p.clock_khz),
        (14, 512),
        (15, 1),
        (16, p.multiprocessors),
        (17, 0),
        (18, 0),
        (19, 1),
        (20, 0),
        // Textures: 1D; 2D; 3D; layered 2D.
        (21, 131_072),
        (22, 131_072),
        (23, 65_536),
        (24, 16_384),
        (25, 16_384),
        (26, 16_384),
        (27, 32_768),
        (28, 32_768),
        (29, 2048),
        (30, 512),
        (31, 1),
        (32, 0),
        (33, 0),
        (34, number),
        (35, 0),
        (36, 1_000_000),
        (37, 64),
        (38, 1 << 20),
        (39, p.max_threads_per_multiprocessor),
        (40, 2),
        (41, 1),
        // Layered 1D textures.
        (42, 32_768),
        (43, 2048),
        (50, 0xffff),
        (51, 32),
        // Cube maps; layers of them.
        (52, 32_768),
        (53, 32_768),
        (54, 2046),
        // Surfaces: 1D; 2D; 3D; layered 1D and 2D; cube maps; layers of them.
        (55, 32_768),
        (56, 131_072),
        (57, 65_536),
        (58, 16_384),
        (59, 16_384),
        (60, 16_384),
        (61, 32_768),
        (62, 2048),
        (63, 32_768),
        (64, 32_768),
        (65, 2048),
        (66, 32_768),
        (67, 32_768),
        (68, 2046),
        // Textures over linear memory: 1D; width, height and pitch of 2D.
        (69, 1 << 28),
        (70, 131_072),
        (71, 65_000),
        (72, 2_097_120),
        // Mipmapped: 2D, 1D.
        (73, 32_768),
        (74, 32_768),
        (75, major),
        (76, minor),
        (77, 32_768),
        (78, 1),
        (79, 1),
        (80, 1),
        (81, p.shared_per_multiprocessor),
        (82, p.registers_per_block),
        (83, 1),
        (84, 0),
        (85, number),
        (86, 0),
        (87, 2),
        (88, 0),
        (89, 0),
        (90, 0),
        (91, 0),
        // Memory operations of streams: the first form, with 64 bits, with NOR.
        (92, 1),
        (93, 1),
        (94, 1),
        (95, 1),
        (97, optin),
        (98, 0),
        (99, 1),
        (100, 0),
        (101, 0),
        (102, 1),
        (103, 1),
        (106, p.max_blocks_per_multiprocessor),
        // Persisting cache lines and access policy windows: hints that are accepted without effect.
        (108, 32 << 20),
        (109, MAX_WINDOW),
        (111, p.shared_reserved_per_block),
        (115, 0),
        (120, 1),
        (122, 1),
        (123, 1),
        // Events for other processes.
        (125, 1),
        (126, MEM_SYNC_DOMAINS),
        (127, 1),
    ];
    DeviceInfoReply {
        name: p.name.clone(),
        uuid,
        // Not a PCI device: a domain that no machine has.
        pci: [0xffff, 0, number],
        total_memory: p.total_memory,
        granule: GRANULE,
        stream_priorities: [0, 0],
        attributes: known
            .iter()
            .map(|(attribute, value)| Attribute { attribute: *attribute, value: *value as i32 })
            .collect(),
    }
}

/// `CU_LIMIT_STACK_SIZE`.
pub(super) const STACK_SIZE: u32 = 0;
/// `CU_LIMIT_PRINTF_FIFO_SIZE`.
pub(super) const PRINTF_FIFO_SIZE: u32 = 1;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
pub(super) const MALLOC_HEAP_SIZE: u32 = 2;

/// The default value of a `CUlimit`.
pub(super) fn usual_limit(limit: u32) -> Option<u64> {
    Some(match limit {
        // CU_LIMIT_STACK_SIZE, PRINTF_FIFO_SIZE, MALLOC_HEAP_SIZE, DEV_RUNTIME_SYNC_DEPTH,
        // DEV_RUNTIME_PENDING_LAUNCH_COUNT, MAX_L2_FETCH_GRANULARITY, PERSISTING_L2_CACHE_SIZE
        STACK_SIZE => 1024,
        PRINTF_FIFO_SIZE => 1 << 20,
        MALLOC_HEAP_SIZE => 8 << 20,
        3 => 2,
        4 => 2048,
        5 => 64,
        6 => 0,
        _ => return None,
    })
}
