//! Memory pools shared between processes.

use std::ffi::c_void;
use std::os::fd::RawFd;

use crate::abi::arguments::{In, Out, non_null, put};
use crate::abi::types::PointerData;
use crate::memory::pool::{self, Pool};
use crate::memory::pool_export::{self, IMPORTED, Imported, Name, POOL_MAGIC, POOLS, POSIX_FD};
use crate::memory::{address, shared_descriptor, virtual_memory};
use crate::process::driver::driver;
use client::ops::memory::PieceExport;
use client::{Status, lock};

api! {
    unsafe fn cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: usize, kind: u32, flags: u64) {
        non_null(shareable)?;
        let (driver, pool) = pool::own(pool)?;
        if flags != 0 || kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let name = pool.name.ok_or(Status::INVALID_VALUE)?;
        let device = driver.devices.get(pool.device as usize).ok_or(Status::INVALID_DEVICE)?;
        let fd = shared_descriptor::make(&POOL_MAGIC, &[name, device.info.uuid].concat())?;
        // SAFETY: not NULL, and has room for a descriptor, as CUDA's manual requires for this kind of handle.
        unsafe { put(shareable.cast::<RawFd>(), fd) }
    }

    fn cuMemPoolImportFromShareableHandle(pool: Out<usize>, shareable: usize, kind: u32, flags: u64) {
        pool.required()?;
        let driver = driver()?;
        if flags != 0 || kind != POSIX_FD {
            return Err(Status::INVALID_VALUE);
        }
        let said = shared_descriptor::read::<32>(&POOL_MAGIC, shareable).ok_or(Status::INVALID_VALUE)?;
        let (name, uuid) = said.split_first_chunk().ok_or(Status::INVALID_VALUE)?;
        // The device may have another number in this process.
        let seen = driver.devices.iter().map(|device| (device.ordinal, device.info.uuid, device.server));
        let hidden = driver.hidden.iter().map(|(uuid, server)| (pool::HIDDEN, *uuid, *server));
        let Some((device, _, server)) = seen.chain(hidden).find(|(_, found, _)| found == uuid) else {
            return Err(virtual_memory::of_no_session());
        };
        let mut pools = lock(&POOLS);
        let handle = match pools.get(name) {
            Some(handle) => *handle,
            None => pool::insert(Pool::imported(device, server, *name))?,
        };
        pools.insert(*name, handle);
        pool.put(handle)
    }

    fn cuMemPoolExportPointer(data: Out<PointerData>, address: u64) {
        data.required()?;
        let driver = driver()?;
        let found = address::find(driver, address).filter(|found| found.base == address && found.pool != 0);
        let found = found.ok_or(Status::INVALID_VALUE)?;
        let pool = pool::of(found.pool)?.1.name.ok_or(Status::INVALID_VALUE)?;
        virtual_memory::share(driver)?;
        let reply = found.context.session().call(&PieceExport { address })?;
        let offset = address.checked_sub(reply.base).ok_or(Status::UNKNOWN)?;
        data.put(Name { pool, token: reply.token, offset, size: found.size }.data())
    }

    fn cuMemPoolImportPointer(address: Out<u64>, pool: usize, data: In<PointerData>) {
        address.required()?;
        data.required()?;
        let driver = driver()?;
        let (_, pool) = pool::of(pool)?;
        let server = pool.imported.ok_or(Status::INVALID_VALUE)?;
        let name = Name::of(&data.get()?).filter(|name| pool.name == Some(name.pool));
        let name = name.ok_or(Status::INVALID_VALUE)?;
        pool_export::collect(driver, server);
        virtual_memory::share(driver)?;
        // One thread at a time. The table of all pools' memory is not locked while the pool's server is
        // asked.
        let access = lock(&pool.access);
        // Memory that is imported twice has one address, and freeing it once removes it.
        let is_it = |(_, known): &(&u64, &Imported)| known.name == name && known.leaving.is_none();
        let known = lock(&IMPORTED).iter().find(is_it).map(|(known, _)| *known);
        if let Some(known) = known {
            return address.put(known);
        }
        let opened = virtual_memory::open(driver, server, name.token, name.offset, name.size, true)?;
        let given: Vec<_> = access.iter().map(|(device, flags)| (*device, *flags)).collect();
        let usable = virtual_memory::set_access_to(driver, opened, &given);
        let found = usable.and_then(|()| virtual_memory::find(driver, opened).ok_or(Status::INVALID_DEVICE));
        match found {
            Ok(found) => {
                let imported = Imported { name, context: found.context, leaving: None };
                lock(&IMPORTED).insert(opened, imported);
            }
            Err(status) => {
                let _ = virtual_memory::close(driver, opened);
                return Err(status);
            }
        };
        address.put(opened)
    }
}
