//! Peer access between devices.

use crate::abi::arguments::{Array, Count, Out, OutArray};
use crate::abi::result::{Result, code};
use crate::process::context::{self, Context};
use crate::process::driver::device;
use client::Status;
use client::ops::context::{PeerDisable, PeerEnable};
use client::ops::device::{ATOMIC_OPERATIONS, PEER_ATTRIBUTES};

/// The current context and its peer, for enabling or disabling peer access between them.
fn pair(peer: usize) -> Result<(&'static Context, &'static Context)> {
    let (_, context) = context::ready()?;
    if peer == 0 {
        return Err(Status::INVALID_CONTEXT);
    }
    let other = context::of(peer)?;
    if !other.is_alive() {
        return Err(Status::INVALID_CONTEXT);
    }
    Ok((context, other))
}

/// Writes the capabilities of the requested operations, from all that are `known`.
fn put_capabilities(to: OutArray<u32>, operations: Array<u32>, count: Count<u32>, known: &[u32]) -> Result {
    to.required()?;
    operations.required()?;
    if count.get() == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let of = |operation: &u32| known.get(*operation as usize).copied().ok_or(Status::INVALID_VALUE);
    let found = operations.entries(count)?.iter().map(of).collect::<Result<Vec<u32>>>()?;
    // SAFETY: there is room for one answer per operation, by CUDA's manual.
    unsafe { to.put(found) }
}

api! {
    // Host memory used by a remote device exists on both sides, so nothing is atomic across them (and neither
    // attribute claims it).
    fn cuDeviceGetHostAtomicCapabilities(capabilities: OutArray<u32>, operations: Array<u32>, count: Count<u32>, dev: i32) {
        device(dev)?;
        put_capabilities(capabilities, operations, count, &[0; ATOMIC_OPERATIONS])
    }

    fn cuDeviceGetP2PAtomicCapabilities(capabilities: OutArray<u32>, operations: Array<u32>, count: Count<u32>, src: i32, dst: i32) {
        let known = match device(src)?.as_peer_of(device(dst)?)? {
            Some(info) => info.atomics,
            None => vec![0; ATOMIC_OPERATIONS],
        };
        if known.is_empty() {
            // The server's driver is older than this query.
            return Err(Status::NOT_SUPPORTED);
        }
        put_capabilities(capabilities, operations, count, &known)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, dev: i32, peer: i32) {
        can.required()?;
        let (a, b) = (device(dev)?, device(peer)?);
        if a.ordinal == b.ordinal {
            return can.put(0);
        }
        can.put(a.as_peer_of(b)?.is_some_and(|info| info.can_access).into())
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, src: i32, dst: i32) {
        value.required()?;
        let info = device(src)?.as_peer_of(device(dst)?)?;
        let at = (attribute as usize).checked_sub(1).filter(|at| *at < PEER_ATTRIBUTES).ok_or(Status::INVALID_VALUE)?;
        let Some(info) = info else { return value.put(0) };
        value.put(*info.attributes.get(at).ok_or(Status::INVALID_VALUE)?)
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (context, other) = pair(peer)?;
        if other.device == context.device || !std::ptr::eq(other.server, context.server) {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        context.session().call(&PeerEnable { context: context.id, peer: other.id }).map(|_| ())
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let (context, other) = pair(peer)?;
        if other.device == context.device || !std::ptr::eq(other.server, context.server) {
            return Err(code::PEER_ACCESS_NOT_ENABLED);
        }
        context.session().call(&PeerDisable { context: context.id, peer: other.id }).map(|_| ())
    }
}
