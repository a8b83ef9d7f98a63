//! CUDA IPC: memory and events shared between processes of the same client, by handles of 64 bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::abi::arguments::Out;
use crate::abi::result::{Result, code};
use crate::abi::types::IpcHandle;
use crate::memory::pool::READ_WRITE;
use crate::memory::{address, stream_ordered, virtual_memory};
use crate::process::context::{self, Context};
use crate::process::driver::{self, Driver, Server};
use crate::streams::event;
use client::ops::memory::PieceExport;
use client::{Status, lock};

const MAGIC: [u8; 8] = *b"rgpu:ipc";
const EVENT_MAGIC: [u8; 8] = *b"rgpu:evt";

/// The contents of a memory handle: the token of the piece that holds the allocation, the allocation's offset
/// in it, and its size in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    pub token: [u8; 16],
    pub offset: u64,
    pub size: u64,
}

impl Name {
    fn handle(&self) -> IpcHandle {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.token);
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.size.to_le_bytes());
        IpcHandle(bytes)
    }

    fn of(handle: &IpcHandle) -> Option<Name> {
        let rest = handle.0.strip_prefix(&MAGIC)?;
        let (token, rest) = rest.split_first_chunk::<16>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (size, _) = rest.split_first_chunk::<8>()?;
        Some(Name { token: *token, offset: u64::from_le_bytes(*offset), size: u64::from_le_bytes(*size) })
    }
}

/// The memory behind a handle, which is locked while its server is asked about it.
#[derive(Default)]
struct Opened {
    /// Where it is, and the contexts that have it open, each as often as it has opened it. There is one.
    at: Mutex<Option<(u64, Vec<&'static Context>)>>,
}

/// What was opened.
struct All {
    by_name: BTreeMap<Name, Arc<Opened>>,
    by_address: BTreeMap<u64, (Name, &'static Server)>,
}

/// Not locked while a server is asked, or while anything is waited for: other threads open and close
/// memory of other servers.
static OPENED: Mutex<All> = Mutex::new(All { by_name: BTreeMap::new(), by_address: BTreeMap::new() });

impl All {
    fn of(&mut self, name: Name) -> Arc<Opened> {
        Arc::clone(self.by_name.entry(name).or_default())
    }

    /// Forgets memory that is not open and that no other thread is about to open or close.
    fn forget_closed(&mut self, name: &Name) {
        let is_unused = |opened: &Arc<Opened>| Arc::strong_count(opened) == 1 && lock(&opened.at).is_none();
        if self.by_name.get(name).is_some_and(is_unused) {
            self.by_name.remove(name);
        }
    }
}

fn open(driver: &'static Driver, context: &'static Context, name: Name) -> Result<u64> {
    let opened = lock(&OPENED).of(name);
    let mut at = lock(&opened.at);
    if let Some((address, users)) = &mut *at {
        let_use(driver, context, *address)?;
        users.push(context);
        return Ok(*address);
    }
    virtual_memory::share(driver)?;
    let address = virtual_memory::open(driver, context.server, name.token, name.offset, name.size, false)?;
    if let Err(status) = let_use(driver, context, address) {
        // The first error is the one to report.
        let _ = virtual_memory::close(driver, address);
        return Err(status);
    }
    *at = Some((address, vec![context]));
    lock(&OPENED).by_address.insert(address, (name, context.server));
    Ok(address)
}

/// Closes memory. Waits for all work that may use it, and returns that work's error.
fn close(driver: &Driver, context: &'static Context, address: u64) -> Result<Result> {
    let (name, opened) = {
        let all = lock(&OPENED);
        let (name, _) = *all.by_address.get(&address).ok_or(Status::INVALID_VALUE)?;
        (name, all.by_name.get(&name).cloned().ok_or(Status::INVALID_VALUE)?)
    };
    let closed = close_opened(driver, context, &opened, address);
    drop(opened);
    // Also if another thread was faster: it left the entry, which this one was about to use.
    lock(&OPENED).forget_closed(&name);
    closed
}

fn close_opened(driver: &Driver, context: &'static Context, opened: &Opened, address: u64) -> Result<Result> {
    let mut at = lock(&opened.at);
    // Another thread may have closed it meanwhile.
    let Some((_, users)) = at.as_mut().filter(|(found, _)| *found == address) else {
        return Err(Status::INVALID_VALUE);
    };
    if users.len() > 1 {
        let own = users.iter().position(|user| std::ptr::eq(*user, context));
        users.remove(own.unwrap_or(0));
        return Ok(Ok(()));
    }
    let waited = stream_ordered::settle(virtual_memory::users_of_opened(driver, address)?, context)?;
    // Before its address may be another's.
    let known = lock(&OPENED).by_address.remove(&address);
    if let Err(status) = virtual_memory::close(driver, address) {
        lock(&OPENED).by_address.extend(known.map(|known| (address, known)));
        return Err(status);
    }
    *at = None;
    Ok(waited)
}

/// Closes what only this context has open. It is being emptied or destroyed, and its work is done.
pub(crate) fn forget(driver: &Driver, context: &'static Context) {
    let of_server: Vec<(u64, Name)> = lock(&OPENED)
        .by_address
        .iter()
        .filter(|(_, (_, server))| std::ptr::eq(*server, context.server))
        .map(|(address, (name, _))| (*address, *name))
        .collect();
    for (address, name) in of_server {
        let Some(opened) = lock(&OPENED).by_name.get(&name).cloned() else { continue };
        let mut at = lock(&opened.at);
        if let Some((_, users)) = at.as_mut().filter(|(found, _)| *found == address) {
            users.retain(|user| !std::ptr::eq(*user, context));
            if users.is_empty() {
                lock(&OPENED).by_address.remove(&address);
                // After the session is lost nothing is open.
                let _ = virtual_memory::close(driver, address);
                *at = None;
            }
        }
        drop(at);
        drop(opened);
        lock(&OPENED).forget_closed(&name);
    }
}

/// Lets kernels of a context use opened memory that another device has, as if the context had enabled peer
/// access to that device.
fn let_use(driver: &Driver, context: &'static Context, address: u64) -> Result {
    let own = driver::device(context.device as i32)?;
    let reaches = match virtual_memory::home_of_opened(address)? {
        Some(home) if home == own.ordinal => return Ok(()),
        Some(home) => own.as_peer_of(driver::device(home as i32)?)?.is_some_and(|peer| peer.can_access),
        // The server knows whether its device reaches one that the program does not see.
        None => true,
    };
    let unsupported = Err(code::PEER_ACCESS_UNSUPPORTED);
    if !reaches {
        return unsupported;
    }
    match virtual_memory::set_access_to(driver, address, &[(own.ordinal, READ_WRITE)]) {
        Err(Status::INVALID_DEVICE) => unsupported,
        set => set,
    }
}

api! {
    fn cuIpcGetEventHandle(handle: Out<IpcHandle>, event: usize) {
        handle.required()?;
        let token = event::export(event)?;
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&EVENT_MAGIC);
        bytes[8..24].copy_from_slice(&token);
        handle.put(IpcHandle(bytes))
    }

    fn cuIpcOpenEventHandle(event: Out<usize>, handle: IpcHandle) {
        event.required()?;
        let (_, context) = context::ready()?;
        let token = handle.0.strip_prefix(&EVENT_MAGIC).and_then(|rest| rest.first_chunk::<16>());
        event.put(event::import(context, *token.ok_or(Status::INVALID_VALUE)?)?)
    }

    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, dptr: u64) {
        handle.required()?;
        let (driver, _) = context::ready()?;
        let found = address::find(driver, dptr).ok_or(Status::INVALID_VALUE)?;
        if !found.is_exportable(driver) {
            return Err(Status::INVALID_VALUE);
        }
        virtual_memory::share(driver)?;
        let reply = found.context.session().call(&PieceExport { address: found.base })?;
        let offset = found.base.checked_sub(reply.base).ok_or(Status::UNKNOWN)?;
        handle.put(Name { token: reply.token, offset, size: found.size }.handle())
    }

    fn cuIpcOpenMemHandle_v2(dptr: Out<u64>, handle: IpcHandle, flags: u32) {
        dptr.required()?;
        let (driver, context) = context::ready()?;
        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is the only flag, and is required.
        if flags != 1 {
            return Err(Status::INVALID_VALUE);
        }
        let name = Name::of(&handle).filter(|name| name.size > 0).ok_or(Status::INVALID_VALUE)?;
        let opened = open(driver, context, name);
        lock(&OPENED).forget_closed(&name);
        dptr.put(opened?)
    }

    alias cuIpcOpenMemHandle = cuIpcOpenMemHandle_v2(dptr: Out<u64>, handle: IpcHandle, flags: u32);

    fn cuIpcCloseMemHandle(dptr: u64) {
        let (driver, context, deferred) = context::ready_to_end()?;
        let closed = close(driver, context, dptr);
        deferred?;
        closed?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::driver::Server;
    use client::handle::ContextId;

    #[test]
    fn memory_that_two_threads_close_at_once_leaves_no_entry() {
        let server = Server::unused();
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let (name, address) = (Name { token: [7; 16], offset: 0, size: 4096 }, 0x5eed_0000);
        // Where one thread has closed it, and this one has found it before.
        lock(&OPENED).of(name);
        lock(&OPENED).by_address.insert(address, (name, server));
        assert_eq!(close(Driver::for_tests(&[server]), context, address), Err(Status::INVALID_VALUE));
        let mut all = lock(&OPENED);
        all.by_address.remove(&address);
        assert!(!all.by_name.contains_key(&name));
    }

    /// The contexts that have the memory behind a name open.
    fn users(name: Name) -> Option<Vec<ContextId>> {
        let opened = lock(&OPENED).by_name.get(&name).cloned()?;
        let at = lock(&opened.at);
        at.as_ref().map(|(_, users)| users.iter().map(|user| user.id).collect())
    }

    /// Pretends that these contexts have opened memory.
    fn opened(name: Name, address: u64, users: &[&'static Context]) {
        *lock(&lock(&OPENED).of(name).at) = Some((address, users.to_vec()));
        lock(&OPENED).by_address.insert(address, (name, users[0].server));
    }

    #[test]
    fn memory_is_closed_with_the_last_context_that_has_it_open() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        // Nothing answers, and nothing needs to.
        server.lose();
        let [first, second] = [0, 1].map(|n| Context::new(ContextId(n), server, 0, 0, false));
        let (name, address) = (Name { token: [8; 16], offset: 0, size: 4096 }, 0x5eed_1000);
        opened(name, address, &[first, second, first]);
        forget(driver, first);
        assert_eq!(users(name), Some(vec![second.id]));
        forget(driver, second);
        assert!(!lock(&OPENED).by_name.contains_key(&name));
        assert!(!lock(&OPENED).by_address.contains_key(&address));
    }

    #[test]
    fn a_close_gives_up_one_opening_of_its_own_context() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let [first, second] = [0, 1].map(|n| Context::new(ContextId(n), server, 0, 0, false));
        let (name, address) = (Name { token: [9; 16], offset: 0, size: 4096 }, 0x5eed_2000);
        opened(name, address, &[first, second, second]);
        for left in [vec![first.id, second.id], vec![first.id]] {
            assert_eq!(close(driver, second, address), Ok(Ok(())));
            assert_eq!(users(name), Some(left));
        }
        let mut all = lock(&OPENED);
        all.by_address.remove(&address);
        all.by_name.remove(&name);
    }

    #[test]
    fn a_handle_round_trips() {
        let name = Name { token: [7; 16], offset: 512, size: 1 << 40 };
        assert!(Name::of(&name.handle()) == Some(name));
        assert!(Name::of(&IpcHandle([0; 64])).is_none());
    }
}
