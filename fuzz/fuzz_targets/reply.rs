//! Replies and tables as a server may send them.
#![cfg_attr(not(standalone), no_main)]

use protocol::ops::{self, activity, copy, device, module, nvml};

rgpu_fuzz::target!(|body: &[u8]| {
    let _ = ops::decode_reply::<device::SessionInfoReply>(body);
    let _ = ops::decode_reply::<device::DeviceInfoReply>(body);
    let _ = ops::decode_reply::<device::PeerInfoReply>(body);
    let _ = ops::decode_reply::<module::FunctionTable>(body);
    let _ = ops::decode_reply::<module::ModuleLoadReply>(body);
    let _ = ops::decode_reply::<activity::ActivityRecords>(body);
    let _ = ops::decode_reply::<copy::MemcpyDtoHInlineReply>(body);
    let _ = ops::decode_reply::<nvml::NvmlSystemReply>(body);
    let _ = ops::decode_reply::<nvml::NvmlQueryReply>(body);
    let _ = ops::decode_reply::<nvml::NvmlPairReply>(body);
});
