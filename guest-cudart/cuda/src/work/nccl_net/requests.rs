//! The requests of a connection.

/// See the module.
pub(crate) struct Requests([State; Requests::MOST]);

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    UnderWay,
    /// With so many bytes.
    Done(u64),
}

impl Requests {
    /// Maximum number at the same time. NCCL has at most 32.
    pub const MOST: usize = 64;

    pub fn new() -> Requests {
        Requests([State::Free; Requests::MOST])
    }

    /// Begins one. `None`: there are too many.
    pub fn begin(&mut self) -> Option<usize> {
        let free = self.0.iter().position(|state| *state == State::Free)?;
        self.0[free] = State::UnderWay;
        Some(free)
    }

    /// It did not begin after all.
    pub fn cancel(&mut self, request: usize) {
        self.0[request] = State::Free;
    }

    /// It is done, with so many bytes.
    pub fn done(&mut self, request: usize, bytes: u64) {
        self.0[request] = State::Done(bytes);
    }

    /// Whether it is done, and with how many bytes. A request that is done ends.
    pub fn test(&mut self, request: usize) -> Option<u64> {
        let State::Done(bytes) = self.0[request] else { return None };
        self.0[request] = State::Free;
        Some(bytes)
    }
}
