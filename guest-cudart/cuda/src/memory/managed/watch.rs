//! A server's watch of pages that the program has while the device works ([`HostWatch`]), and the thread that
//! waits for its answers. See [`watched_pages`](super::watched_pages).
//!
//! Before the server tells of the end of work, it compares these pages, answers the watch if they have
//! changed, and says by a word whether the program then has everything ([`Watch::news`]).

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::abi::result::Result;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use client::ops::memory::{HostWatch, HostWatchReply};
use client::session::Ahead;
use client::{Status, lock, log};

/// Answers that are due, the latest only.
type Mailbox = (Mutex<Option<Asked>>, Condvar);

/// Called with the number of a watch and its answer.
type Answered = fn(&'static Driver, &'static Context, u64, Result<HostWatchReply>);

struct Asked {
    number: u64,
    answer: Ahead<'static, HostWatchReply>,
}

/// What a server says of what the program has ([`progress::WATCHED`](protocol::link::progress::WATCHED)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// It is as new as all work that the program knows to be done.
    Current,
    /// It is so once the answer to the watch has been taken over, which is there.
    Answered,
    /// It may be older.
    Unknown,
}

/// What a server watches.
pub(crate) struct Watch {
    /// A context of the server.
    pub context: &'static Context,
    /// The number of the watch that the server has now; otherwise 0.
    pub number: u64,
    /// The number of the watch whose answer is being taken over, otherwise 0.
    pub after: u64,
    /// The number of the last watch whose answer was taken over.
    pub taken_over: u64,
    /// The runs, with their numbers. `None` once it was answered.
    pub what: Option<Vec<(u64, u64)>>,
    mailbox: Arc<Mailbox>,
}

/// Notified when an answer has been taken over.
pub(super) static TAKEN_OVER: Condvar = Condvar::new();

/// Whether a context's server can watch.
pub(crate) fn is_possible(context: &Context) -> bool {
    context.session().knows::<HostWatch>()
}

/// The thread that waits for the answers of one server.
fn serve(driver: &'static Driver, context: &'static Context, mailbox: &Mailbox, answered: Answered) {
    loop {
        let asked = mailbox.1.wait_while(lock(&mailbox.0), |asked| asked.is_none());
        let Some(asked) = asked.unwrap_or_else(PoisonError::into_inner).take() else { continue };
        answered(driver, context, asked.number, asked.answer.take());
    }
}

impl Watch {
    /// A watch of nothing yet, and its thread.
    pub fn new(context: &'static Context, answered: Answered) -> Result<Watch> {
        let mailbox = Arc::<Mailbox>::default();
        let (driver, its) = (driver()?, Arc::clone(&mailbox));
        let thread = std::thread::Builder::new().name("rgpu-pages-watch".into());
        thread.spawn(move || serve(driver, context, &its, answered)).map_err(|error| {
            log::error(format_args!(
                "cannot start a thread for pinned memory that kernels use: {error}; `ulimit -u` limits threads"
            ));
            Status::OUT_OF_MEMORY
        })?;
        Ok(Watch { context, number: 0, after: 0, taken_over: 0, what: None, mailbox })
    }

    /// One whose answers nobody takes over.
    #[cfg(test)]
    pub fn for_tests(context: &'static Context) -> Watch {
        Watch { context, number: 0, after: 0, taken_over: 0, what: None, mailbox: Arc::default() }
    }

    /// What the server says of what the program has, now that the program knows that work is done.
    pub fn news(&self) -> News {
        match self.context.session().progress().watched() {
            0 => News::Unknown,
            word if word.is_multiple_of(2) || word / 2 == self.taken_over => News::Current,
            word if word / 2 == self.number => News::Answered,
            _ => News::Unknown,
        }
    }

    /// The program has nothing any more. The answer is not needed then.
    pub fn forget(&mut self) {
        (self.number, self.what) = (0, None);
    }

    /// Waits for the answer to this watch from now on, and no longer for those to earlier ones.
    pub fn expect(&self, answer: Ahead<'static, HostWatchReply>) {
        drop(lock(&self.mailbox.0).replace(Asked { number: self.number, answer }));
        self.mailbox.1.notify_one();
    }
}
