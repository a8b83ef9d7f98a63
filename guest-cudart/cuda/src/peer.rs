//! Devices that reach each other's memory.

use crate::state::{device, driver};
use crate::{Result, code, context, non_null, put};
use client::Status;
use client::ops::context::{PeerDisable, PeerEnable};
use client::ops::device::PeerInfo;

/// The other context of a pair that is about to be joined or parted.
fn pair(
    peer: usize,
) -> Result<(&'static crate::state::Driver, &'static context::Context, &'static context::Context)> {
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

api! {
    fn cuDeviceCanAccessPeer(can: *mut i32, dev: i32, peer: i32) {
        non_null(can)?;
        let (a, b) = (device(dev)?.ordinal, device(peer)?.ordinal);
        if a == b {
            return put(can, 0);
        }
        put(can, driver()?.session.call(&PeerInfo { device: a, peer: b })?.can_access.into())
    }

    fn cuDeviceGetP2PAttribute(value: *mut i32, attribute: u32, src: i32, dst: i32) {
        non_null(value)?;
        let (a, b) = (device(src)?.ordinal, device(dst)?.ordinal);
        if a == b {
            return Err(Status::INVALID_DEVICE);
        }
        let at = (attribute as usize).checked_sub(1).ok_or(Status::INVALID_VALUE)?;
        let reply = driver()?.session.call(&PeerInfo { device: a, peer: b })?;
        put(value, *reply.attributes.get(at).ok_or(Status::INVALID_VALUE)?)
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
