//! Contexts.

use crate::handle::ContextId;
use crate::ops::ops;
use crate::wire::Bytes;

ops! {
    /// Contexts. The primary context of device *n* is [`ContextId`] *n* and exists for the whole session. A
    /// server creates it when it is first needed.
    trait ContextOps;

    /// Creates a context: `cuCtxCreate`.
    sync 0x0201 context_create: ContextCreate
        [order None, may_block Never, lane Main]
    {
        /// Its id; not below [`crate::channel::MAX_DEVICES`].
        context: ContextId,
        /// Ordinal of its device.
        device: u32,
        /// `CUctx_flags`.
        flags: u32,
    } -> ContextCreateReply {}

    /// Destroys a created context and everything in it: `cuCtxDestroy`.
    sync 0x0202 context_destroy: ContextDestroy
        [order Session, may_block Never, lane Main]
    {
        /// The context.
        context: ContextId,
    } -> ContextDestroyReply {}

    /// Destroys everything in a primary context and clears its error: `cuDevicePrimaryCtxReset`.
    sync 0x0203 primary_reset: PrimaryReset
        [order Session, may_block Never, lane Main]
    {
        /// Ordinal of the device.
        device: u32,
    } -> PrimaryResetReply {}

    /// `cuDevicePrimaryCtxSetFlags`.
    sync 0x0204 primary_set_flags: PrimarySetFlags
        [order None, may_block Never, lane Main]
    {
        /// Ordinal of the device.
        device: u32,
        /// `CUctx_flags`.
        flags: u32,
    } -> PrimarySetFlagsReply {}

    /// `cuCtxSynchronize`. Answered when all work of the context is done. The status is the context's
    /// deferred error, if it has one.
    sync 0x0205 context_synchronize: ContextSynchronize
        [order Earlier, may_block Never, lane Main]
    {
        /// The context.
        context: ContextId,
    } -> ContextSynchronizeReply {}

    /// `cuCtxGetLimit`.
    sync 0x0206 context_get_limit: ContextGetLimit
        [order None, may_block Never, lane Main]
    {
        /// The context.
        context: ContextId,
        /// `CUlimit`.
        limit: u32,
    } -> ContextGetLimitReply {
        /// Its value.
        value: u64,
    }

    /// `cuCtxSetLimit`.
    sync 0x0207 context_set_limit: ContextSetLimit
        [order Session, may_block Context, lane Main]
    {
        /// The context.
        context: ContextId,
        /// `CUlimit`.
        limit: u32,
        /// Its value.
        value: u64,
    } -> ContextSetLimitReply {}

    /// The next part of what kernels have printed (`printf`, the text of a failed `assert`). When the
    /// progress area's `output` has increased, a client sends this until it has that many bytes.
    sync 0x0210 device_output: DeviceOutput
        [order None, may_block Never, lane Main]
    {} -> DeviceOutputReply {
        /// Whether it goes to stderr.
        error: bool,
        /// The text; empty when there is no more.
        text: Bytes,
        /// Bytes before it that were dropped because they were not fetched in time.
        dropped: u64,
    }

    /// `cuCtxEnablePeerAccess`: kernels of the context may now access variables of the peer's modules. They
    /// may always access the peer's window.
    sync 0x0208 peer_enable: PeerEnable
        [order None, may_block Never, lane Main]
    {
        /// The context that will access.
        context: ContextId,
        /// The context whose memory it is.
        peer: ContextId,
    } -> PeerEnableReply {}

    /// `cuCtxDisablePeerAccess`.
    sync 0x0209 peer_disable: PeerDisable
        [order Session, may_block Never, lane Main]
    {
        /// The context that could access.
        context: ContextId,
        /// The context whose memory it is.
        peer: ContextId,
    } -> PeerDisableReply {}

    /// `cuCtxResetPersistingL2Cache`.
    sync 0x020a context_reset_cache: ContextResetCache
        [order Earlier, may_block Context, lane Main, since 8]
    {
        /// The context.
        context: ContextId,
    } -> ContextResetCacheReply {}
}
