//! Devices: choosing them, their attributes and limits, peer access, and `cudaDevice*` calls on the current
//! one.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::arguments::{Array, Count, In, Out};
use crate::context;
use crate::error::Error;
use crate::types::{CUasyncCallback, CUasyncCallbackHandle, CUmemoryPool, ChannelFormatDesc};

/// `cudaDeviceMapHost`. It is always set, and the driver does not accept it for a primary context.
const MAP_HOST: c_uint = 8;
/// The flags that `cudaSetDeviceFlags` accepts: scheduling, mapped host memory, keeping local memory,
/// synchronous memory operations.
const DEVICE_FLAGS: c_uint = 0xff;

api! {
    init fn cudaGetDeviceCount(count: Out<c_int>) |d| {
        count.required()?;
        count.put(context::device_count(d)?)
    };
    init fn cudaGetDevice(device: Out<c_int>) |d| {
        device.required()?;
        device.put(context::device(d)?)
    };
    init fn cudaSetDevice(device: c_int) |d| context::set_device(d, device);
    init unsafe fn cudaInitDevice(device: c_int, device_flags: c_uint, flags: c_uint) |d| {
        const FLAGS_ARE_VALID: c_uint = 1;
        if flags & !FLAGS_ARE_VALID != 0 { return Err(Error::INVALID_VALUE) }
        if flags & FLAGS_ARE_VALID != 0 {
            d.cuDevicePrimaryCtxSetFlags_v2(context::handle(d, device)?, device_flags & !MAP_HOST)?;
        }
        context::primary(d, device).map(|_| ())
    };
    init fn cudaSetValidDevices(devices: Array<c_int>, len: Count<c_int>) |d| {
        context::set_valid_devices(d, devices.entries(len)?)
    };
    init unsafe fn cudaSetDeviceFlags(flags: c_uint) |d| {
        if flags & !DEVICE_FLAGS != 0 { return Err(Error::INVALID_VALUE) }
        d.cuDevicePrimaryCtxSetFlags_v2(context::handle(d, context::device(d)?)?, flags & !MAP_HOST)
    };
    init fn cudaGetDeviceFlags(flags: Out<c_uint>) |d| {
        flags.required()?;
        let found = if context::current_context(d)?.is_null() {
            context::flags(d, context::device(d)?)?
        } else {
            context::current_flags(d)?
        };
        flags.put(found | MAP_HOST)
    };
    init unsafe fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) |d| {
        d.cuDeviceGetAttribute(value, attribute, context::handle(d, device)?)
    };
    init unsafe fn cudaDeviceGetByPCIBusId(device: *mut c_int, bus_id: *const c_char) |d| {
        d.cuDeviceGetByPCIBusId(device, bus_id)
    };
    init unsafe fn cudaDeviceGetPCIBusId(bus_id: *mut c_char, len: c_int, device: c_int) |d| {
        d.cuDeviceGetPCIBusId(bus_id, len, context::handle(d, device)?)
    };
    init cudaDeviceGetP2PAttribute => cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, source: c_int,
        target: c_int);
    init cudaDeviceCanAccessPeer => cuDeviceCanAccessPeer(can_access: *mut c_int, device: c_int, peer: c_int);
    ctx unsafe fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) |d| {
        if flags != 0 { return Err(Error::INVALID_VALUE) }
        d.cuCtxEnablePeerAccess(context::primary(d, peer)?, flags)
    };
    ctx unsafe fn cudaDeviceDisablePeerAccess(peer: c_int) |d| d.cuCtxDisablePeerAccess(context::primary(d, peer)?);

    init cudaDeviceGetDefaultMemPool => cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: c_int);
    init cudaDeviceSetMemPool => cuDeviceSetMemPool(device: c_int, pool: CUmemoryPool);
    init cudaDeviceGetMemPool => cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: c_int);
    init cudaDeviceGetNvSciSyncAttributes => cuDeviceGetNvSciSyncAttributes(list: *mut c_void, device: c_int,
        flags: c_int);
    init cudaDeviceRegisterAsyncNotification => cuDeviceRegisterAsyncNotification(
        device: c_int, callback: CUasyncCallback, user_data: *mut c_void, handle: *mut CUasyncCallbackHandle);
    init cudaDeviceUnregisterAsyncNotification => cuDeviceUnregisterAsyncNotification(
        device: c_int, handle: CUasyncCallbackHandle);
    init unsafe fn cudaDeviceGetTexture1DLinearMaxWidth(width: *mut usize, format: In<ChannelFormatDesc>,
        device: c_int) |d| {
        let (kind, channels) = crate::array::driver_format(&format.get()?)?;
        d.cuDeviceGetTexture1DLinearMaxWidth(width, kind, channels, context::handle(d, device)?)
    };

    init fn cudaDeviceReset() |d| context::reset(d);
    ctx cudaDeviceSynchronize => cuCtxSynchronize();
    ctx cudaDeviceSetLimit => cuCtxSetLimit(limit: c_uint, value: usize);
    ctx cudaDeviceGetLimit => cuCtxGetLimit(value: *mut usize, limit: c_uint);
    ctx cudaDeviceGetCacheConfig => cuCtxGetCacheConfig(config: *mut c_uint);
    ctx cudaDeviceSetCacheConfig => cuCtxSetCacheConfig(config: c_uint);
    ctx cudaDeviceGetSharedMemConfig => cuCtxGetSharedMemConfig(config: *mut c_uint);
    ctx cudaDeviceSetSharedMemConfig => cuCtxSetSharedMemConfig(config: c_uint);
    ctx cudaDeviceGetStreamPriorityRange => cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    ctx cudaCtxResetPersistingL2Cache => cuCtxResetPersistingL2Cache();
    ctx cudaDeviceFlushGPUDirectRDMAWrites => cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint);
    init cudaDeviceGraphMemTrim => cuDeviceGraphMemTrim(device: c_int);
    init cudaDeviceGetGraphMemAttribute => cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_uint,
        value: *mut c_void);
    init cudaDeviceSetGraphMemAttribute => cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_uint,
        value: *mut c_void);
}

#[cfg(not(feature = "v12"))]
api! {
    init cudaDeviceGetHostAtomicCapabilities => cuDeviceGetHostAtomicCapabilities(
        capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, device: c_int);
    init cudaDeviceGetP2PAtomicCapabilities => cuDeviceGetP2PAtomicCapabilities(
        capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, source: c_int, target: c_int);
    init cudaMemGetDefaultMemPool => cuMemGetDefaultMemPool(pool: *mut CUmemoryPool,
        location: *mut crate::types::CUmemLocation, kind: c_uint);
    init cudaMemGetMemPool => cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut crate::types::CUmemLocation,
        kind: c_uint);
    init cudaMemSetMemPool => cuMemSetMemPool(location: *mut crate::types::CUmemLocation, kind: c_uint,
        pool: CUmemoryPool);
}
