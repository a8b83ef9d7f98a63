//! A session whose server is elsewhere, as its daemon uses it: a relay, and the list of the session's regions
//! for another process.

use std::io;
use std::time::Duration;

use super::error::RegionError;
use super::relay::{ClientMemory, RelayHandle};
use super::saved::RegionsFile;
use super::transport::{Closed, RegionMemory, Transport};

/// Makes of a region what a transport needs of it.
type Prepare<M> = Box<dyn Fn(&RegionMemory) -> Result<M, RegionError> + Send + Sync>;

/// See the module's text. `M` is the client's memory as the transport uses it.
pub(super) struct Relayed<M> {
    relay: RelayHandle<M>,
    /// For another process.
    regions: Option<RegionsFile>,
    prepare: Prepare<M>,
}

impl<M> Relayed<M> {
    pub(super) fn new(
        relay: RelayHandle<M>,
        regions: Option<RegionsFile>,
        prepare: impl Fn(&RegionMemory) -> Result<M, RegionError> + Send + Sync + 'static,
    ) -> Relayed<M> {
        Relayed { relay, regions, prepare: Box::new(prepare) }
    }
}

impl<M: std::fmt::Debug> std::fmt::Debug for Relayed<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relayed").field("relay", &self.relay).finish_non_exhaustive()
    }
}

impl<M: ClientMemory> Transport for Relayed<M> {
    fn register_region(&self, id: u32, region: RegionMemory) -> Result<(), RegionError> {
        let memory = (self.prepare)(&region)?;
        RegionsFile::note(self.regions.as_ref(), id, &region)?;
        self.relay.register(id, memory)
    }

    fn unregister_region(&self, id: u32) -> Result<(), RegionError> {
        self.relay.unregister(id)?;
        RegionsFile::forget(self.regions.as_ref(), id);
        Ok(())
    }

    fn close(&self, reason: &str, patience: Duration) -> Closed {
        self.relay.close(reason, patience)
    }

    fn pause(&self) {
        self.relay.pause();
    }

    fn is_paused(&self, patience: Duration) -> bool {
        self.relay.is_paused(patience)
    }

    fn go_on(&self) -> io::Result<()> {
        self.relay.go_on();
        Ok(())
    }
}
