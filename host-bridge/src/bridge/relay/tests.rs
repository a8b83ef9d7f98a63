//! The rules of a relayed session, by a carrier in memory.

use std::sync::Arc;

use super::regions::{ClientMemory, Span};

/// Memory of a client that is only counted.
#[derive(Debug)]
pub(super) struct TestMemory {
    size: u64,
}

impl TestMemory {
    pub(super) fn span(len: u64) -> Span<TestMemory> {
        Span::of(Arc::new(TestMemory { size: len }), 0, len)
    }
}

impl ClientMemory for TestMemory {
    fn size(&self) -> u64 {
        self.size
    }
    fn is_read_only(&self) -> bool {
        false
    }
}
