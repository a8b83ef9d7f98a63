//! NVML queries.

use protocol::ops::nvml::*;

use super::Session;
use crate::driver::call::{Call, Reply};
use crate::driver::gpu::Gpu;

impl<G: Gpu> NvmlOps<Call> for Session<G> {
    fn nvml_system(&mut self, cx: &mut Call, op: NvmlSystem) -> Reply<NvmlSystemReply> {
        self.nvml.nvml_system(cx, op)
    }

    fn nvml_query(&mut self, cx: &mut Call, op: NvmlQuery<'_>) -> Reply<NvmlQueryReply> {
        self.nvml.nvml_query(cx, op)
    }

    fn nvml_pair(&mut self, cx: &mut Call, op: NvmlPair) -> Reply<NvmlPairReply> {
        self.nvml.nvml_pair(cx, op)
    }

    fn nvml_processes(&mut self, cx: &mut Call, op: NvmlProcesses) -> Reply<NvmlProcessesReply> {
        self.nvml.nvml_processes(cx, op)
    }
}
