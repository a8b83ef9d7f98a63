//! The device's virtqueues and the memory that they lie in.

use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// The guest's current memory, which the VMM can replace as a whole.
pub type GuestMemory = GuestMemoryAtomic<GuestMemoryMmap>;
/// A virtqueue of the device.
pub type Vring = vhost_user_backend::VringMutex<GuestMemory>;

/// Maximum number of descriptors of a queue.
pub const QUEUE_SIZE: usize = 1024;
