//! Contexts.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::abi::arguments::{In, Out};
use crate::abi::result::{Result, code};
use crate::abi::types::{CtxCreateParams, ExecAffinityParam};
use crate::api::teardown;
use crate::memory::stream_ordered;
use crate::process::context::{self, Context};
use crate::process::device_attributes::attr;
use crate::process::driver::{self, driver};
use crate::process::host_calls;
use crate::streams::capture_rules;
use crate::work::direct_copy;
use client::ops::context::ContextResetCache;
use client::{Status, lock, session};

/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`.
pub(crate) const EXEC_AFFINITY_SM_COUNT: u32 = 0;

pub(crate) fn create(pctx: Out<usize>, flags: u32, dev: i32) -> Result {
    pctx.required()?;
    let context = context::make(driver::device(dev)?, flags)?;
    if let Err(status) = context::push(context) {
        return teardown::destroy(context.handle).and(Err(status));
    }
    client::activity::context_made(context.handle);
    direct_copy::used(context.server);
    pctx.put(context.handle)
}

/// Waits for all work of a context, because the program asked for it.
pub(crate) fn wait_for(context: &'static Context) -> Result {
    host_calls::forbid()?;
    capture_rules::forbid_all(context)?;
    stream_ordered::synchronize(context)
}

api! {
    fn cuCtxCreate_v4(pctx: Out<usize>, params: In<CtxCreateParams>, flags: u32, dev: i32) {
        if let Some(params) = params.optional() {
            if params.numExecAffinityParams != 0 {
                return Err(code::UNSUPPORTED_EXEC_AFFINITY);
            }
            if !params.cigParams.is_null() {
                return Err(Status::NOT_SUPPORTED);
            }
        }
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v3(pctx: Out<usize>, params: *mut c_void, count: i32, flags: u32, dev: i32) {
        if count != 0 && !params.is_null() {
            return Err(code::UNSUPPORTED_EXEC_AFFINITY);
        }
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v2(pctx: Out<usize>, flags: u32, dev: i32) {
        create(pctx, flags, dev)
    }
    alias cuCtxCreate = cuCtxCreate_v2(pctx: Out<usize>, flags: u32, dev: i32);

    fn cuCtxDestroy_v2(ctx: usize) {
        teardown::destroy(ctx)
    }
    alias cuCtxDestroy = cuCtxDestroy_v2(ctx: usize);

    fn cuCtxPushCurrent_v2(ctx: usize) {
        driver()?;
        context::push_handle(ctx)
    }
    alias cuCtxPushCurrent = cuCtxPushCurrent_v2(ctx: usize);

    fn cuCtxPopCurrent_v2(pctx: Out<usize>) {
        driver()?;
        let popped = context::pop().ok_or(Status::INVALID_CONTEXT)?;
        pctx.put_if_wanted(popped);
        Ok(())
    }
    alias cuCtxPopCurrent = cuCtxPopCurrent_v2(pctx: Out<usize>);

    fn cuCtxSetCurrent(ctx: usize) {
        driver()?;
        context::set_current(ctx)
    }

    fn cuCtxGetCurrent(pctx: Out<usize>) {
        driver()?;
        pctx.put(context::current_handle())
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        if session::forked() {
            return Err(Status::NOT_INITIALIZED);
        }
        device.put(context::current_or_inactive()?.device as i32)
    }

    fn cuCtxGetDevice_v2(device: Out<i32>, ctx: usize) {
        device.put(context::of(ctx)?.device as i32)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        /// `CU_CTX_MAP_HOST`, which NVIDIA's driver reports only for primary contexts.
        const MAP_HOST: u32 = 8;
        let context = context::current()?;
        flags.put(context.flags.load(Ordering::Relaxed) | if context.is_primary() { MAP_HOST } else { 0 })
    }

    fn cuCtxGetExecAffinity(param: Out<ExecAffinityParam>, kind: u32) {
        param.required()?;
        if kind != EXEC_AFFINITY_SM_COUNT {
            return Err(Status::INVALID_VALUE);
        }
        // No context is limited to a part of its device here; only MPS does that.
        let processors = driver::device(context::current()?.device as i32)?.attribute(attr::MULTIPROCESSOR_COUNT);
        param.put(ExecAffinityParam { kind, processors: processors as u32 })
    }

    fn cuCtxSetFlags(flags: u32) {
        context::current()?.set_flags(flags)
    }

    fn cuCtxGetId(ctx: usize, id: Out<u64>) {
        let (context, green) = context::and_green_of(ctx)?;
        id.put(green.map_or(context.unique, |green| green.unique))
    }

    fn cuCtxGetApiVersion(ctx: usize, version: Out<u32>) {
        context::of(ctx)?;
        version.put(3020)
    }

    fn cuCtxSynchronize() {
        wait_for(context::current()?)
    }

    fn cuCtxSynchronize_v2(ctx: usize) {
        wait_for(context::of(ctx)?)
    }

    fn cuCtxGetCacheConfig(config: Out<u32>) {
        config.put(context::current()?.cache_config.load(Ordering::Relaxed))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        // A preference, without effect on devices that use one memory for both, as all have since Volta.
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        context::current()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: Out<u32>) {
        // Four bytes, on every device since Maxwell.
        context::current()?;
        config.put(1)
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        // Without effect, as with NVIDIA's driver.
        if config > 2 {
            return Err(Status::INVALID_VALUE);
        }
        context::current().map(|_| ())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        let context = context::current()?;
        let range = driver::device(context.device as i32)?.info.stream_priorities;
        least.put_if_wanted(range[0]);
        greatest.put_if_wanted(range[1]);
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        let (_, context) = context::ready()?;
        let session = context.session();
        if !session.knows::<ContextResetCache>() {
            return refuse_form!("cuCtxResetPersistingL2Cache with a server older than version 2.8 of the protocol");
        }
        session.call(&ContextResetCache { context: context.id }).map(drop)
    }

    fn cuCtxAttach(pctx: Out<usize>, flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let context = context::current()?;
        pctx.put(context::current_handle())?;
        *lock(&context.attached) += 1;
        Ok(())
    }

    fn cuCtxDetach(ctx: usize) {
        let context = context::current()?;
        if ctx != context::current_handle() {
            return Err(Status::INVALID_CONTEXT);
        }
        {
            let mut attached = lock(&context.attached);
            if *attached > 0 {
                *attached -= 1;
                return Ok(());
            }
        }
        // The creator holds the last use.
        teardown::destroy(ctx)
    }
}
