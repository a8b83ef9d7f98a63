//! Limits of contexts.

use crate::abi::arguments::Out;
use crate::abi::result::Result;
use crate::process::capture;
use crate::process::context::{self, Context};
use crate::process::limits::LAST;
use client::Status;
use client::ops::context::{ContextGetLimit, ContextSetLimit};

/// `cuCtxSetLimit` for a context. The driver may round the value, and some limits apply to the whole device,
/// so all cached limits of the device are dropped.
pub(crate) fn set(context: &'static Context, limit: u32, value: u64) -> Result {
    if limit > LAST {
        return Err(Status::INVALID_VALUE);
    }
    crate::process::driver::driver()?;
    let result = context.session().call(&ContextSetLimit { context: context.id, limit, value });
    context::of_device(context.device).for_each(|context| context.limits.forget());
    result.map(|_| ())
}

api! {
    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        value.required()?;
        let (_, context) = context::ready()?;
        let ask = || context.session().call(&ContextGetLimit { context: context.id, limit }).map(|reply| reply.value);
        value.put(context.limits.get(limit, ask)? as usize)
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        let (_, context) = context::ready()?;
        capture::unsafe_call()?;
        set(context, limit, value as u64)
    }
}
