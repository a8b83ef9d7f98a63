//! Module loads that nobody waits for. Their results arrive here later, and functions of such a module get
//! their IDs when they are first used.
//!
//! Errors that CUDA reports immediately are still reported immediately: a load is waited for unless its image
//! was read in this process. What remains is what the server's driver may refuse, such as for lack of memory.
//! NVIDIA's driver also reports that late, since it loads code when one of its functions is first used
//! (`CUDA_MODULE_LOADING=LAZY`, its default): the first launch fails, or, if the result has not arrived by
//! then, the context's next call that waits.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::result::Result;
use crate::memory::staging::Staging;
use client::handle::{FunctionId, ModuleId};
use client::ops::module::{FunctionBind, ModuleLoadByName, ModuleLoadByNameReply, Param};
use client::session::{Ahead, Session};
use client::{Status, lock, log};

/// A load.
pub(crate) struct Loading {
    session: &'static Session,
    module: ModuleId,
    answer: Mutex<Option<Answer>>,
    /// Its result, once known.
    result: OnceLock<Result>,
    /// Number of functions that have an ID.
    bound: Mutex<u32>,
}

/// The outstanding reply, and memory that the host reads until it arrives.
struct Answer {
    ahead: Ahead<'static, ModuleLoadByNameReply>,
    image: Option<Staging<'static>>,
}

/// Loads whose replies are outstanding. They occupy reply slots, so they are checked often.
static DUE: Mutex<Vec<Arc<Loading>>> = Mutex::new(Vec::new());

impl Loading {
    /// Sends a load. `None` if too many replies are outstanding.
    pub fn send(
        session: &'static Session,
        load: &ModuleLoadByName<'_>,
        image: Option<Staging<'static>>,
    ) -> Result<Option<Arc<Loading>>> {
        collect();
        let Some(ahead) = session.submit_ahead(load)? else { return Ok(None) };
        let image = image.and_then(|image| image.read_by(ahead.seq()));
        let loading = Arc::new(Loading {
            session,
            module: load.module,
            answer: Mutex::new(Some(Answer { ahead, image })),
            result: OnceLock::new(),
            bound: Mutex::new(0),
        });
        lock(&DUE).push(loading.clone());
        Ok(Some(loading))
    }

    /// The result as far as it is known. An error is final.
    #[inline]
    pub fn check(&self) -> Result {
        self.result.get().copied().unwrap_or(Ok(()))
    }

    /// Whether the result is known.
    pub fn is_known(&self) -> bool {
        collect();
        self.result.get().is_some()
    }

    /// Takes the reply if it has arrived. Returns whether it has been taken.
    fn take(&self) -> bool {
        let mut answer = lock(&self.answer);
        if answer.as_ref().is_some_and(|answer| !answer.ahead.is_done()) {
            return false;
        }
        let Some(Answer { ahead, image }) = answer.take() else { return true };
        let reply = ahead.take();
        drop(image);
        let (result, log) = match reply {
            Ok(reply) => (Status(reply.result).ok(), reply.error_log),
            Err(status) => (Err(status), String::new()),
        };
        // A lost session is reported elsewhere.
        if let Err(status) = result
            && status != Status::DEVICE_UNAVAILABLE
        {
            log::warn(format_args!(
                "a module that was loaded earlier was refused: {status} {}",
                log.trim_end()
            ));
        }
        let _ = self.result.set(result);
        true
    }

    /// Gives a function its ID, unless another thread has just done so.
    pub fn bind(&self, id: &OnceLock<FunctionId>, name: &CStr, params: &[Param]) -> Result<FunctionId> {
        collect();
        self.check()?;
        let name = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        // The server expects them to be numbered in this order.
        let mut bound = lock(&self.bound);
        if let Some(id) = id.get() {
            return Ok(*id);
        }
        let function = FunctionId::new(self.module, *bound);
        self.session.append(&FunctionBind { function, name, params: params.to_vec() })?;
        *bound += 1;
        Ok(*id.get_or_init(|| function))
    }
}

/// Takes the replies that have arrived.
fn collect() {
    let mut due = lock(&DUE);
    due.retain(|loading| !loading.take());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::driver::Server;
    use crate::process::driver::unused::REGISTERED;
    use client::data::HostIn;
    use client::handle::ContextId;

    #[test]
    fn an_image_that_is_not_sent_is_unregistered() {
        let session = Server::unused().session;
        let load =
            ModuleLoadByName { context: ContextId(0), module: ModuleId(1), image: HostIn::Inline(&[]) };
        // Nobody answers these.
        while Loading::send(session, &load, None).unwrap().is_some() {}
        let image = Staging::new(session, session.arena().largest() + 1).unwrap();
        assert_eq!(REGISTERED.get(), 1);
        assert!(Loading::send(session, &load, Some(image)).unwrap().is_none());
        assert_eq!(REGISTERED.get(), 0);
    }
}
