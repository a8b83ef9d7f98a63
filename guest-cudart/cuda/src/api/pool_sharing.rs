//! Memory pools shared between processes.

use std::ffi::c_void;
use std::os::fd::RawFd;

use crate::abi::arguments::{non_null, put};
use crate::abi::types::PointerData;
use crate::memory::pool::Pool;
use crate::memory::pool_export::{IMPORTED, Imported, Name, POOL_MAGIC, POOLS, POSIX_FD};
use crate::memory::{address, pool, pool_export, shared_descriptor, virtual_memory};
use crate::process::driver::driver;
use client::ops::memory::PieceExport;
use client::{Status, lock};

api! {
    fn cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: usize, kind: u32, flags: u64) {
        non_null(shareable)?;
        let (driver, pool) = pool::own(pool)?;
        if flags != 0 || kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let name = pool.name.ok_or(Status::INVALID_VALUE)?;
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        let fd = shared_descriptor::make(&POOL_MAGIC, &[name, device.info.uuid].concat())?;
        put(shareable.cast::<RawFd>(), fd)
    }

    fn cuMemPoolImportFromShareableHandle(pool: *mut usize, shareable: usize, kind: u32, flags: u64) {
        non_null(pool)?;
        let driver = driver()?;
        if flags != 0 || kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let said = shared_descriptor::read::<32>(&POOL_MAGIC, shareable).ok_or(Status::INVALID_VALUE)?;
        let (name, uuid) = said.split_first_chunk().ok_or(Status::INVALID_VALUE)?;
        // The same device may have another number in this process.
        let device = driver.devices.iter().find(|device| device.info.uuid == uuid);
        let device = device.ok_or(Status::INVALID_DEVICE)?.ordinal;
        let mut pools = lock(&POOLS);
        let handle = match pools.get(name) {
            Some(handle) => *handle,
            None => pool::insert(Pool::imported(device, *name))?,
        };
        pools.insert(*name, handle);
        put(pool, handle)
    }

    fn cuMemPoolExportPointer(data: *mut PointerData, address: u64) {
        non_null(data)?;
        let driver = driver()?;
        let found = address::find(driver, address).filter(|found| found.base == address && found.pool != 0);
        let found = found.ok_or(Status::INVALID_VALUE)?;
        let pool = pool::of(found.pool)?.1.name.ok_or(Status::INVALID_VALUE)?;
        virtual_memory::share(driver)?;
        let reply = driver.session.call(&PieceExport { address })?;
        let offset = address.checked_sub(reply.base).ok_or(Status::UNKNOWN)?;
        put(data, Name { pool, token: reply.token, offset, size: found.size }.data())
    }

    fn cuMemPoolImportPointer(address: *mut u64, pool: usize, data: *const PointerData) {
        non_null(address)?;
        non_null(data)?;
        let driver = driver()?;
        let (_, pool) = pool::of(pool)?;
        let name = Name::of(&*data).filter(|name| pool.imported && pool.name == Some(name.pool));
        let name = name.ok_or(Status::INVALID_VALUE)?;
        pool_export::collect(driver);
        virtual_memory::share(driver)?;
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        let mut imported = lock(&IMPORTED);
        // What is imported twice is at one address, and gone when it is freed once.
        let known = imported.iter().find(|(_, known)| known.name == name && known.leaving.is_none());
        if let Some((known, _)) = known {
            return put(address, *known);
        }
        let opened = virtual_memory::open(driver, name.token, name.offset, name.size, true)?;
        imported.insert(opened, Imported { name, context: device.primary, leaving: None });
        put(address, opened)
    }
}
