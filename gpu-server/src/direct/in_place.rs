//! Device memory that the RDMA device reads in place, for short copies over verbs. Others are copied to a
//! buffer first.
//!
//! ```text
//!  a copy ─▶ Blocks::find ─┬─▶ its block is registered ────────────────▶ the piece is sent from there
//!                          └─▶ GpuMemory::in_place ─▶ registered, kept ─▶
//! ```
//!
//! A GPU's memory is a DMA-buf (`cuMemGetHandleForAddressRange`, `ibv_reg_dmabuf_mr`), that of a GPU in
//! software is memory of this process. Registering takes longer than a short copy, so it is done by blocks,
//! which are kept until their memory is freed or leaves the device.
//!
//! What keeps a block's memory where it is, is what keeps that of any piece: [`Directs::forget`] before it is
//! freed, and [`Directs::hold_still`] before it leaves.
//!
//! [`Directs::forget`]: super::Directs::forget
//! [`Directs::hold_still`]: super::Directs::hold_still

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use host_bridge::verbs::{Access, Domain, Registration, VerbsError};
use protocol::Status;

use crate::driver::gpu::Block;
use crate::lock::lock;

/// The longest copy that is sent from where it is, in bytes. Below this, rCUDA found a copy to a buffer not
/// worth its time.
pub(super) const LONGEST: u64 = 200_000;
/// Maximum number of blocks that are kept.
const KEPT: usize = 64;
/// How often the driver or the RDMA device may refuse a block before no other is tried.
const REFUSALS: u32 = 8;

/// Bytes of a registered block.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) registration: Arc<Registration>,
    /// Where they begin in it.
    pub(super) offset: u64,
}

struct Kept {
    at: u64,
    size: u64,
    registration: Arc<Registration>,
}

#[derive(Default)]
struct State {
    kept: VecDeque<Kept>,
    /// Why no further block is registered.
    off: Option<String>,
    refusals: u32,
    /// Whether the log says that blocks are used.
    told: bool,
}

/// The blocks of a session.
pub(super) struct Blocks(Mutex<State>);

impl Blocks {
    /// `on`: the operator wants it.
    pub(super) fn new(on: bool) -> Blocks {
        let off = (!on).then(|| "--direct-device-memory is not set".to_owned());
        Blocks(Mutex::new(State { off, ..State::default() }))
    }

    /// Whether the operator wants it, and nothing is known that prevents it.
    pub(super) fn are_used(&self) -> bool {
        lock(&self.0).off.is_none()
    }

    /// A connection over verbs is open: says in the log if all pieces are copied to buffers, and why.
    pub(super) fn log_why_off(&self) {
        let state = &mut *lock(&self.0);
        if let Some(why) = state.off.as_ref().filter(|_| !state.told) {
            log_off(why);
            state.told = true;
        }
    }

    /// Where `len` bytes at `at` are registered in a domain. If they are not yet, `give` is asked for the
    /// block of whole granules with these bytes. `None`: they must be copied to a buffer.
    pub(super) fn find(
        &self,
        domain: &Arc<Domain>,
        (at, len): (u64, u64),
        granule: u64,
        give: impl FnOnce(u64, u64) -> Result<Block, Status>,
    ) -> Option<Found> {
        if len == 0 || len > LONGEST || granule == 0 {
            return None;
        }
        let end = at.checked_add(len)?;
        let state = &mut *lock(&self.0);
        let is_it = |block: &Kept| {
            block.at <= at && end <= block.at + block.size && Arc::ptr_eq(block.registration.domain(), domain)
        };
        if let Some(block) = state.kept.iter().find(|block| is_it(block)) {
            return Some(Found { registration: Arc::clone(&block.registration), offset: at - block.at });
        }
        if state.off.is_some() {
            return None;
        }
        // Those of a device that has failed since.
        state.kept.retain(|block| block.registration.domain().device().failure().is_none());
        let first = at - at % granule;
        let size = end.checked_next_multiple_of(granule)? - first;
        match registered(domain, give(first, size), size) {
            Ok(registration) => {
                if !std::mem::replace(&mut state.told, true) {
                    tracing::info!(
                        "copies of up to {LONGEST} bytes to other servers are sent from device memory"
                    );
                }
                if state.kept.len() >= KEPT {
                    state.kept.pop_front();
                }
                let registration = Arc::new(registration);
                state.kept.push_back(Kept { at: first, size, registration: Arc::clone(&registration) });
                Some(Found { registration, offset: at - first })
            }
            Err((for_good, why)) => {
                state.refusals += 1;
                if for_good || state.refusals >= REFUSALS {
                    log_off(&why);
                    state.off = Some(why);
                }
                None
            }
        }
    }

    /// Memory is about to be freed.
    pub(super) fn forget(&self, address: u64, size: u64) {
        let end = address.saturating_add(size);
        lock(&self.0).kept.retain(|block| end <= block.at || block.at + block.size <= address);
    }

    /// All memory may leave the device.
    pub(super) fn forget_all(&self) {
        lock(&self.0).kept.clear();
    }
}

fn log_off(why: &str) {
    tracing::info!("device memory is copied to buffers before it is sent to other servers, because {why}");
}

/// Registers a block that was given. The error: whether no other will do better, and why.
fn registered(
    domain: &Arc<Domain>,
    block: Result<Block, Status>,
    size: u64,
) -> Result<Registration, (bool, String)> {
    let len = size as usize;
    let registered = match block {
        Ok(Block::DmaBuf(file)) => domain.register_dma_buf(file.as_fd(), len),
        // SAFETY: the memory is mapped until it is freed or leaves, and the registration is dropped before
        // (see the module). Nobody has references to memory of a GPU in software.
        Ok(Block::Here(at)) => unsafe { domain.register(at, len, Access::Read) },
        Err(Status::NOT_SUPPORTED) => return Err((true, "the GPU's driver does not give it to other devices as a DMA-buf (it takes the driver's open kernel modules, and Linux 5.12 or newer)".into())),
        Err(status) => return Err((false, format!("the GPU's driver does not give it to other devices: {status}"))),
    };
    registered.map_err(|e| {
        let is_unknown = match &e {
            VerbsError::Call { source, .. } => source.raw_os_error() == Some(libc::EOPNOTSUPP),
            VerbsError::Broken(_) => true,
            _ => false,
        };
        (is_unknown, format!("it cannot be registered: {e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::fuzzing;
    use host_bridge::verbs::{Device, Settings, software};
    use std::ptr::NonNull;

    fn domain() -> Arc<Domain> {
        software::install();
        Domain::new(Device::open(&Settings::default()).unwrap()).unwrap()
    }

    fn why(blocks: &Blocks) -> String {
        lock(&blocks.0).off.clone().unwrap_or_default()
    }

    #[test]
    fn memory_is_used_in_place_only_where_all_agree() {
        let _one = lock(&fuzzing::ONE);
        let domain = domain();
        let asked = std::cell::Cell::new(0);
        let memory: &'static [u8] = vec![0; 8192].leak();
        let here = || Ok(Block::Here(NonNull::from(memory).cast()));
        let find = |blocks: &Blocks, given: Result<Block, Status>| {
            asked.set(0);
            let give = |at, size| {
                assert_eq!((at, size), (4096, 8192));
                asked.set(1);
                given
            };
            let found = blocks.find(&domain, (5000, 4096), 4096, give);
            (found.map(|found| found.offset), asked.get())
        };
        let off = Blocks::new(false);
        assert_eq!(find(&off, here()), (None, 0));
        assert!(why(&off).contains("--direct-device-memory"));
        // Not these bytes, but perhaps others. Not for ever, though.
        let on = Blocks::new(true);
        (1..REFUSALS).for_each(|_| assert_eq!(find(&on, Err(Status::INVALID_VALUE)), (None, 1)));
        assert_eq!(find(&on, here()), (Some(904), 1));
        assert_eq!(find(&on, here()), (Some(904), 0));
        assert_eq!(why(&on), "");
        on.forget_all();
        assert_eq!(find(&on, Err(Status::INVALID_VALUE)), (None, 1));
        assert_eq!(find(&on, here()), (None, 0));
        assert!(why(&on).contains("does not give it"), "{}", why(&on));
        // No GPU of this server can.
        let without = Blocks::new(true);
        assert_eq!(find(&without, Err(Status::NOT_SUPPORTED)), (None, 1));
        assert_eq!(find(&without, here()), (None, 0));
        assert!(why(&without).contains("open kernel modules"), "{}", why(&without));
        // Nor can this library.
        let old = Blocks::new(true);
        let file = std::fs::File::open("/dev/null").unwrap().into();
        assert_eq!(find(&old, Ok(Block::DmaBuf(file))), (None, 1));
        assert_eq!(find(&old, here()), (None, 0));
        assert!(why(&old).contains("ibv_reg_dmabuf_mr"), "{}", why(&old));
    }

    #[test]
    fn a_block_is_kept_for_its_domain_and_not_endlessly_many_are() {
        let _one = lock(&fuzzing::ONE);
        let (domain, other) = (domain(), domain());
        let blocks = Blocks::new(true);
        let memory: &'static [u8] = vec![0; 4096].leak();
        let find = |domain: &Arc<Domain>, number: u64| {
            let mut asked = false;
            let give = |_, _| {
                asked = true;
                Ok(Block::Here(NonNull::from(memory).cast()))
            };
            assert!(blocks.find(domain, (4096 * number + 1, 8), 4096, give).is_some());
            asked
        };
        assert!(find(&domain, 0) && !find(&domain, 0) && find(&other, 0) && !find(&other, 0));
        assert!((1..2 * KEPT as u64).all(|number| find(&domain, number)));
        assert_eq!(lock(&blocks.0).kept.len(), KEPT);
        assert!(find(&domain, 0));
        for (at, len) in [(0, LONGEST + 1), (0, 0), (u64::MAX, 8), (u64::MAX - 8, 8)] {
            assert!(blocks.find(&domain, (at, len), 4096, |_, _| Err(Status::NOT_FOUND)).is_none());
        }
        assert!(blocks.find(&domain, (0, 8), 0, |_, _| unreachable!("no granule")).is_none());
        blocks.forget_all();
        drop((blocks, domain, other));
        assert_eq!(software::objects(), 0);
    }
}
