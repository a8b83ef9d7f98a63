//! Where a session's devices have memory: their windows of addresses, and the client's memory that they
//! access.

use protocol::handle::ContextId;
use protocol::ops::memory::MIRROR_PAGE;

use crate::driver::quota::Charge;
use crate::driver::ranges::Ranges;
use crate::driver::store::Place;
use crate::worker_protocol::Token;

/// A device's window of addresses.
pub(super) struct Window<P> {
    /// The window's number.
    pub(super) number: u32,
    /// What is backed, as requested by the client.
    pub(super) pieces: Ranges<Piece<P>>,
    /// The program's allocations.
    pub(super) allocations: Ranges,
}

/// The backing of a part of a window. `P` belongs to the GPU.
pub(super) struct Piece<P> {
    pub(super) place: Place<P>,
    /// The token under which it is shared.
    pub(super) token: Option<Token>,
    pub(super) charge: Charge,
}

impl<P> Piece<P> {
    /// A piece that nobody else uses.
    pub(super) fn new(place: Place<P>, charge: Charge) -> Piece<P> {
        Piece { place, token: None, charge }
    }
}

impl<P> Window<P> {
    /// An empty window with this number.
    pub(super) fn new(number: u32) -> Self {
        Window { number, pieces: Ranges::default(), allocations: Ranges::default() }
    }
}

/// Client memory that devices access, or a mirror of it. `V` belongs to the GPU.
pub(super) struct HostView<V> {
    pub(super) context: u32,
    /// First address of its pages, and their size in bytes.
    pub(super) first: u64,
    pub(super) size: u64,
    pub(super) native: V,
    /// For memory that is accessed in place. A mirror has its own charge.
    _charge: Option<Charge>,
}

impl<V> HostView<V> {
    /// For `size` bytes at `address`, rounded to whole pages.
    pub(super) fn new(
        context: ContextId,
        address: u64,
        size: u64,
        native: V,
        charge: Option<Charge>,
    ) -> HostView<V> {
        let first = address & !(MIRROR_PAGE - 1);
        let end = address.saturating_add(size).next_multiple_of(MIRROR_PAGE);
        HostView { context: context.0, first, size: end - first, native, _charge: charge }
    }
}
