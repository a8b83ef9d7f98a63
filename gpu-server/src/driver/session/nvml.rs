//! NVML's questions.

use protocol::Status;
use protocol::ops::Answer;
use protocol::ops::nvml::*;

use super::Session;
use crate::driver::call::Call;
use crate::driver::gpu::Gpu;

impl<G: Gpu> NvmlOps<Call> for Session<G> {
    fn nvml_system(&mut self, cx: &mut Call, op: NvmlSystem) -> Result<Answer<NvmlSystemReply>, Status> {
        self.nvml.nvml_system(cx, op)
    }

    fn nvml_query(&mut self, cx: &mut Call, op: NvmlQuery<'_>) -> Result<Answer<NvmlQueryReply>, Status> {
        self.nvml.nvml_query(cx, op)
    }

    fn nvml_pair(&mut self, cx: &mut Call, op: NvmlPair) -> Result<Answer<NvmlPairReply>, Status> {
        self.nvml.nvml_pair(cx, op)
    }
}
