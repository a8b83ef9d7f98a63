//! Memory pools shared between processes: a pool's name travels in a descriptor, an allocation's in 64 bytes.
//!
//! The server has no notion of pools. A process opens the piece of memory that holds the allocation with the
//! token that the server issued for it, as `cuIpcOpenMemHandle` does ([`virtual_memory::open`]). The pool's
//! name, 128 random bits, ties an allocation to the pool that it was exported from.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::result::Result;
use crate::abi::types::PointerData;
use crate::memory::pool::{Pool, PoolName};
use crate::memory::{shared_descriptor, virtual_memory};
use crate::process::context::{self, Context};
use crate::process::driver::{Driver, Server};
use crate::process::stream::Stream;
use client::seq::Seq;
use client::{Status, lock};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `…_FABRIC`.
pub(crate) const POSIX_FD: u32 = 1;
pub(crate) const FABRIC: u32 = 8;
pub(crate) const POOL_MAGIC: shared_descriptor::Magic = *b"rgpu:pol";
const POINTER_MAGIC: [u8; 8] = *b"rgpu:ptr";

/// The contents of such data: the pool, the token of the piece of memory that contains the allocation, the
/// allocation's offset in it, and its size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub pool: PoolName,
    pub token: [u8; 16],
    pub offset: u64,
    pub size: u64,
}

impl Name {
    pub fn data(&self) -> PointerData {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&POINTER_MAGIC);
        bytes[8..24].copy_from_slice(&self.pool);
        bytes[24..40].copy_from_slice(&self.token);
        bytes[40..48].copy_from_slice(&self.offset.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.size.to_le_bytes());
        PointerData(bytes)
    }

    pub fn of(data: &PointerData) -> Option<Name> {
        let rest = data.0.strip_prefix(&POINTER_MAGIC)?;
        let (pool, rest) = rest.split_first_chunk::<16>()?;
        let (token, rest) = rest.split_first_chunk::<16>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (size, _) = rest.split_first_chunk::<8>()?;
        let (offset, size) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*size));
        (size > 0).then_some(Name { pool: *pool, token: *token, offset, size })
    }
}

/// An allocation of another process.
pub(crate) struct Imported {
    pub name: Name,
    /// A context of its device, or if the program does not see that one, of a device that may use it.
    pub context: &'static Context,
    /// Freed in stream order; the stream has not passed the mark yet.
    pub leaving: Option<(Arc<Stream>, Seq)>,
}

/// Handles of imported pools: one that is imported again has the same.
pub(crate) static POOLS: Mutex<BTreeMap<PoolName, usize>> = Mutex::new(BTreeMap::new());

/// The process's imported allocations, by address.
pub(crate) static IMPORTED: Mutex<BTreeMap<u64, Imported>> = Mutex::new(BTreeMap::new());

/// Number of imported allocations whose free a stream has not reached yet.
static LEAVING: AtomicUsize = AtomicUsize::new(0);

/// A name for a new pool.
pub(crate) fn new_name() -> Result<PoolName> {
    let mut name = PoolName::default();
    // SAFETY: as many bytes as are asked for can be written.
    let got = unsafe { libc::getrandom(name.as_mut_ptr().cast(), name.len(), 0) };
    if got == name.len() as isize { Ok(name) } else { Err(Status::OPERATING_SYSTEM) }
}

/// Destroys an imported pool.
///
/// # Errors
/// `INVALID_VALUE` while it has allocations.
pub(crate) fn forget_pool(driver: &Driver, server: &Server, name: &PoolName) -> Result {
    collect(driver, server);
    let used = lock(&IMPORTED).values().any(|found| found.leaving.is_none() && found.name.pool == *name);
    if used {
        return Err(Status::INVALID_VALUE);
    }
    lock(&POOLS).remove(name);
    Ok(())
}

/// Gives devices access to all allocations of an imported pool.
pub(crate) fn set_access(driver: &Driver, pool: &Pool, given: &[(u32, u32)]) -> Result {
    // The table is not locked while the server is asked: others need it for memory of other servers.
    let is_its = |(_, found): &(&u64, &Imported)| pool.name == Some(found.name.pool);
    let addresses: Vec<u64> = lock(&IMPORTED).iter().filter(is_its).map(|(address, _)| *address).collect();
    for address in addresses {
        match virtual_memory::set_access_to(driver, address, given) {
            // Another thread has freed it meanwhile.
            Err(_) if !lock(&IMPORTED).contains_key(&address) => {}
            set => set?,
        }
    }
    Ok(())
}

/// The contexts whose work may use an allocation of another process: those of all devices with access.
pub(crate) fn users(driver: &Driver, address: u64) -> Result<Vec<&'static Context>> {
    if lock(&IMPORTED).get(&address).is_none_or(|found| found.leaving.is_some()) {
        return Err(Status::INVALID_VALUE);
    }
    virtual_memory::users_of_opened(driver, address)
}

/// Frees an allocation of another process. No work may use it.
pub(crate) fn free(driver: &Driver, address: u64) -> Result {
    // If two threads free it, or one in stream order, one finds it.
    let is_its = |_: &u64, found: &mut Imported| found.leaving.is_none();
    let taken = lock(&IMPORTED).extract_if(address..=address, is_its).next();
    taken.ok_or(Status::INVALID_VALUE)?;
    virtual_memory::close(driver, address)
}

/// The same, when a stream reaches it.
pub(crate) fn free_in_order(driver: &Driver, address: u64, stream: Arc<Stream>) -> Result {
    // If the stream's server is lost, nothing is freed.
    let mark = stream.mark_as_operation()?;
    let server = {
        let mut imported = lock(&IMPORTED);
        let found = imported.get_mut(&address).filter(|found| found.leaving.is_none());
        let found = found.ok_or(Status::INVALID_VALUE)?;
        found.leaving = Some((stream, mark));
        LEAVING.fetch_add(1, Ordering::Relaxed);
        found.context.server
    };
    collect(driver, server);
    Ok(())
}

/// Closes imported allocations of a server whose streams have passed the free.
pub(crate) fn collect(driver: &Driver, server: &Server) {
    if LEAVING.load(Ordering::Relaxed) != 0 {
        close_where(driver, |imported| {
            std::ptr::eq(imported.context.server, server)
                && imported
                    .leaving
                    .as_ref()
                    .is_some_and(|(stream, mark)| context::has_freed(stream, *mark, Some(server)))
        });
    }
}

/// Closes the imported allocations of a context that is being destroyed, and those that its streams, which
/// are done, were to free.
pub(crate) fn forget(driver: &Driver, context: &'static Context) {
    let is_lost = context.session().check().is_err();
    close_where(driver, |imported| {
        let home = Some(imported.context.server);
        let streams = imported.leaving.as_ref().is_some_and(|(stream, mark)| {
            let is_its = std::ptr::eq(stream.context, context);
            is_its && (!is_lost || context::has_freed(stream, *mark, home))
        });
        streams || std::ptr::eq(imported.context, context)
    });
}

fn close_where(driver: &Driver, gone: impl Fn(&Imported) -> bool) {
    let closed: Vec<(u64, Imported)> = lock(&IMPORTED).extract_if(.., |_, imported| gone(imported)).collect();
    for (address, imported) in closed {
        if imported.leaving.is_some() {
            LEAVING.fetch_sub(1, Ordering::Relaxed);
        }
        // After the session is lost nothing is open.
        let _ = virtual_memory::close(driver, address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointer_data_round_trips() {
        let name = Name { pool: [3; 16], token: [7; 16], offset: 512, size: 1 << 40 };
        assert_eq!(Name::of(&name.data()), Some(name));
        assert_eq!(Name::of(&PointerData([0; 64])), None);
        assert_eq!(Name::of(&Name { size: 0, ..name }.data()), None, "no bytes");
    }

    #[test]
    fn no_two_pools_have_the_same_name() {
        assert_ne!(new_name().unwrap(), new_name().unwrap());
    }
}
