//! Devices and contexts.
//!
//! The ID of a device's primary context is the device's ordinal. Primary contexts always exist here; the
//! backend creates them when they are first entered. All other contexts were made by the program.

use std::collections::hash_map::Entry;

use protocol::Status;
use protocol::channel::{MAX_CONTEXTS, MAX_DEVICES};
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::context::*;
use protocol::ops::device::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result, check_selection, check_windows};
use crate::driver::gpu::Gpu;
use crate::driver::quota::Charge;

/// `CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT`.
const KERNEL_EXEC_TIMEOUT: u32 = 17;
/// `CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY`: here, whether the device shares memory with the client.
const CAN_MAP_HOST_MEMORY: u32 = 19;

impl<G: Gpu> Session<G> {
    /// The device of a context.
    pub(super) fn device_of(&self, context: ContextId) -> Result<u32> {
        if self.check_device(context.0).is_ok() {
            return Ok(context.0);
        }
        self.made_contexts.get(&context.0).copied().ok_or(Status::INVALID_CONTEXT)
    }

    /// Drops everything that belongs to a context that is being destroyed.
    fn forget_context(&mut self, context: ContextId) {
        self.streams.retain(|_, stream| stream.context != context);
        let gone: Vec<_> = self.events.extract_if(|_, event| event.context == context).collect();
        gone.into_iter().for_each(|(_, event)| self.unshare(event.token));
        self.modules.forget_context(context);
        self.graphs.forget_context(context);
        self.gpu.forget_context(context);
        self.forget_arrays(context);
        self.forget_host_views(context.0);
        self.limits.retain(|(of, _), _| *of != context.0);
    }
}

impl<G: Gpu> DeviceOps<Call> for Session<G> {
    fn session_info(&mut self, cx: &mut Call, _op: SessionInfo) -> Reply<SessionInfoReply> {
        now(SessionInfoReply {
            device_count: self.windows.len() as u32,
            driver_version: self.gpu.driver_version()?,
            backend: G::NAME.into(),
            server: crate::parent::server_name(),
            reads_late: G::reads_late(&*cx.client),
            runs_machine_code: G::RUNS_MACHINE_CODE,
        })
    }

    fn device_info(&mut self, cx: &mut Call, op: DeviceInfo) -> Reply<DeviceInfoReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        let mut description = self.gpu.describe(op.device)?;
        if cx.client.streams_data() {
            let shared = description.attributes.iter_mut().find(|a| a.attribute == CAN_MAP_HOST_MEMORY);
            shared.into_iter().for_each(|a| a.value = 0);
        }
        let (number, whole) = (self.gpu.number(op.device), description.total_memory);
        (_, description.total_memory) = self.quota.visible(number, whole, whole);
        if self.watchdog.is_some() {
            description.attributes.retain(|a| a.attribute != KERNEL_EXEC_TIMEOUT);
            description.attributes.push(Attribute { attribute: KERNEL_EXEC_TIMEOUT, value: 1 });
        }
        now(description)
    }

    fn peer_info(&mut self, cx: &mut Call, op: PeerInfo) -> Reply<PeerInfoReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        self.check_device(op.peer)?;
        self.gpu.describe_peer(op.device, op.peer).map(Answer::Now)
    }

    fn select_devices(&mut self, _cx: &mut Call, op: SelectDevices) -> Reply<SelectDevicesReply> {
        let untouched = self.streams.is_empty()
            && self.events.is_empty()
            && self.modules.is_empty()
            && self.graphs.is_empty()
            && self.made_contexts.is_empty()
            && self.has_no_memory()
            && self.arrays.is_empty()
            && self.greens.is_empty()
            && self.limits.is_empty();
        if !untouched {
            return Err(Status::NOT_PERMITTED);
        }
        check_selection(&op.devices, self.windows.len() as u32)?;
        let windows = check_windows(op.windows, op.devices.len())?;
        let all = 0..self.windows.len() as u32;
        let left = all.filter(|device| !op.devices.contains(device)).map(|device| self.gpu.number(device));
        self.hidden = left.chain(std::mem::take(&mut self.hidden)).collect();
        self.clear_windows(&windows);
        self.gpu.select(&op.devices, &windows)?;
        now(SelectDevicesReply {})
    }

    fn process_namespace(&mut self, _cx: &mut Call, op: ProcessNamespace) -> Result {
        self.quota.set_namespace(op.namespace);
        Ok(())
    }
}

/// The context flags (`CUctx_flags`) that are passed to the driver.
fn context_flags(flags: u32) -> Result<u32> {
    // CU_CTX_MAP_HOST, CU_CTX_LMEM_RESIZE_TO_MAX and CU_CTX_SYNC_MEMOPS.
    const PASSED: u32 = 0x08 | 0x10 | 0x80;
    // CU_CTX_SCHED_*: how the calling thread waits, which the client handles itself.
    const SCHEDULING: u32 = 0x07;
    // CU_CTX_COREDUMP_ENABLE and CU_CTX_USER_COREDUMP_ENABLE would write files on the server.
    const CORE_DUMPS: u32 = 0x20 | 0x40;
    if flags & !(PASSED | SCHEDULING | CORE_DUMPS) != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if flags & CORE_DUMPS != 0 {
        tracing::warn!(flags, "context flags refused: they ask for core dumps");
        return Err(Status::NOT_SUPPORTED);
    }
    Ok(flags & PASSED)
}

/// Whether a limit (`CUlimit`) may be set. Limits after `CU_LIMIT_PERSISTING_L2_CACHE_SIZE` would affect
/// other processes on the device.
fn check_limit(limit: u32) -> Result {
    const LAST: u32 = 6;
    if limit <= LAST { Ok(()) } else { Err(Status::NOT_SUPPORTED) }
}

impl<G: Gpu> ContextOps<Call> for Session<G> {
    fn device_output(&mut self, _cx: &mut Call, _op: DeviceOutput) -> Reply<DeviceOutputReply> {
        now(self.gpu.output().fetch())
    }

    fn context_create(&mut self, cx: &mut Call, op: ContextCreate) -> Reply<ContextCreateReply> {
        cx.context = op.context;
        self.check_device(op.device)?;
        let free = (MAX_DEVICES..MAX_CONTEXTS).contains(&op.context.0)
            && !self.made_contexts.contains_key(&op.context.0);
        if !free {
            return Err(Status::INVALID_CONTEXT);
        }
        self.gpu.make_context(op.context, op.device, context_flags(op.flags)?)?;
        self.made_contexts.insert(op.context.0, op.device);
        now(ContextCreateReply {})
    }

    fn context_destroy(&mut self, cx: &mut Call, op: ContextDestroy) -> Reply<ContextDestroyReply> {
        cx.context = op.context;
        let device = *self.made_contexts.get(&op.context.0).ok_or(Status::INVALID_CONTEXT)?;
        self.gpu.before_waiting_call(&self.streams, device)?;
        self.made_contexts.remove(&op.context.0);
        self.gpu.retire_context(op.context);
        self.forget_context(op.context);
        self.gpu.destroy_context(op.context)?;
        now(ContextDestroyReply {})
    }

    fn primary_reset(&mut self, cx: &mut Call, op: PrimaryReset) -> Reply<PrimaryResetReply> {
        let primary = ContextId(op.device);
        cx.context = primary;
        self.check_device(op.device)?;
        self.gpu.begin_reset(op.device, &mut self.streams, &self.space)?;
        let made = self.made_contexts.extract_if(|_, device| *device == op.device);
        let gone: Vec<ContextId> = made.map(|(id, _)| ContextId(id)).chain([primary]).collect();
        for context in &gone {
            self.gpu.retire_context(*context);
            self.forget_context(*context);
            if *context != primary {
                // A failed context may refuse; it then ends with the process.
                let _ = self.gpu.destroy_context(*context);
            }
        }
        self.forget_greens(op.device);
        self.gpu.reset(op.device)?;
        // After the reset: a kernel that was still running would have lost its memory.
        self.unback_all(op.device);
        self.gpu.finish_reset()?;
        gone.iter().for_each(|context| cx.errors().clear(*context));
        now(PrimaryResetReply {})
    }

    fn primary_set_flags(&mut self, cx: &mut Call, op: PrimarySetFlags) -> Reply<PrimarySetFlagsReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        self.gpu.set_primary_flags(op.device, context_flags(op.flags)?)?;
        now(PrimarySetFlagsReply {})
    }

    fn context_synchronize(
        &mut self,
        cx: &mut Call,
        op: ContextSynchronize,
    ) -> Reply<ContextSynchronizeReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        self.gpu.synchronize_context(cx, &mut self.streams, op.context)?;
        Ok(Answer::Later)
    }

    fn context_get_limit(&mut self, cx: &mut Call, op: ContextGetLimit) -> Reply<ContextGetLimitReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        now(ContextGetLimitReply { value: self.gpu.limit(op.context, op.limit)? })
    }

    fn context_set_limit(&mut self, cx: &mut Call, op: ContextSetLimit) -> Reply<ContextSetLimitReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        let device = self.device_of(op.context)?;
        let key = (op.context.0, op.limit);
        let held = self.limits.get(&key).map_or(0, Charge::bytes);
        let bytes = self.gpu.limit_bytes(device, op.limit, op.value);
        let more = self.quota.charge(self.memory_of(device), bytes.saturating_sub(held))?;
        check_limit(op.limit)?;
        self.gpu.set_limit(op.context, op.limit, op.value)?;
        match self.limits.entry(key) {
            Entry::Occupied(mut charge) => {
                charge.get_mut().join(more);
                drop(charge.get_mut().split(held.saturating_sub(bytes)));
            }
            Entry::Vacant(place) => {
                place.insert(more);
            }
        }
        now(ContextSetLimitReply {})
    }

    fn context_reset_cache(&mut self, cx: &mut Call, op: ContextResetCache) -> Reply<ContextResetCacheReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        self.gpu.reset_persisting_cache(op.context)?;
        now(ContextResetCacheReply {})
    }

    fn peer_enable(&mut self, cx: &mut Call, op: PeerEnable) -> Reply<PeerEnableReply> {
        cx.context = op.context;
        self.gpu.enable_peer(op.context, op.peer)?;
        now(PeerEnableReply {})
    }

    fn peer_disable(&mut self, cx: &mut Call, op: PeerDisable) -> Reply<PeerDisableReply> {
        cx.context = op.context;
        self.gpu.disable_peer(op.context, op.peer)?;
        now(PeerDisableReply {})
    }
}
