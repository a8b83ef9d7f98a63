//! Peer access between devices.

use crate::abi::arguments::{Array, Count, Out, OutArray};
use crate::abi::result::{Result, code};
use crate::process::context;
use crate::process::driver::{device, driver};
use client::Status;
use client::ops::context::{PeerDisable, PeerEnable};
use client::ops::device::{ATOMIC_OPERATIONS, PeerInfo};

/// The other context of a pair that is about to be joined or parted.
fn pair(
    peer: usize,
) -> Result<(&'static crate::process::driver::Driver, &'static context::Context, &'static context::Context)> {
    let (driver, context) = context::ready()?;
    if peer == 0 {
        return Err(Status::INVALID_CONTEXT);
    }
    let other = context::of(peer)?;
    if !other.is_alive() {
        return Err(Status::INVALID_CONTEXT);
    }
    Ok((driver, context, other))
}

/// Writes what some operations can do, of all that `known` tells.
fn put_capabilities(to: OutArray<u32>, operations: Array<u32>, count: Count<u32>, known: &[u32]) -> Result {
    to.required()?;
    operations.required()?;
    if count.get() == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let of = |operation: &u32| known.get(*operation as usize).copied().ok_or(Status::INVALID_VALUE);
    let found = operations.entries(count)?.iter().map(of).collect::<Result<Vec<u32>>>()?;
    // SAFETY: room for as many answers as there are operations, by CUDA's manual.
    unsafe { to.put(found) }
}

api! {
    // Memory of this machine's that a device of another uses is at both sides: nothing is atomic across (and neither attribute says so).
    fn cuDeviceGetHostAtomicCapabilities(capabilities: OutArray<u32>, operations: Array<u32>, count: Count<u32>, dev: i32) {
        device(dev)?;
        put_capabilities(capabilities, operations, count, &[0; ATOMIC_OPERATIONS])
    }

    fn cuDeviceGetP2PAtomicCapabilities(capabilities: OutArray<u32>, operations: Array<u32>, count: Count<u32>, src: i32, dst: i32) {
        let (a, b) = (device(src)?.ordinal, device(dst)?.ordinal);
        if a == b {
            return Err(Status::INVALID_DEVICE);
        }
        let known = driver()?.session.call(&PeerInfo { device: a, peer: b })?.atomics;
        if known.is_empty() {
            // Its driver is older than the question.
            return Err(Status::NOT_SUPPORTED);
        }
        put_capabilities(capabilities, operations, count, &known)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, dev: i32, peer: i32) {
        can.required()?;
        let (a, b) = (device(dev)?.ordinal, device(peer)?.ordinal);
        if a == b {
            return can.put(0);
        }
        can.put(driver()?.session.call(&PeerInfo { device: a, peer: b })?.can_access.into())
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, src: i32, dst: i32) {
        value.required()?;
        let (a, b) = (device(src)?.ordinal, device(dst)?.ordinal);
        if a == b {
            return Err(Status::INVALID_DEVICE);
        }
        let at = (attribute as usize).checked_sub(1).ok_or(Status::INVALID_VALUE)?;
        let reply = driver()?.session.call(&PeerInfo { device: a, peer: b })?;
        value.put(*reply.attributes.get(at).ok_or(Status::INVALID_VALUE)?)
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (driver, context, other) = pair(peer)?;
        if other.device == context.device {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        driver.session.call(&PeerEnable { context: context.id, peer: other.id }).map(|_| ())
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let (driver, context, other) = pair(peer)?;
        if other.device == context.device {
            return Err(code::PEER_ACCESS_NOT_ENABLED);
        }
        driver.session.call(&PeerDisable { context: context.id, peer: other.id }).map(|_| ())
    }
}
