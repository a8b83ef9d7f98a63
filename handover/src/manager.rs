//! The connection to the service manager, as in `sd_notify(3)`.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socket,
};

use crate::start_thread;

/// Most messages that wait until the service manager reads. Beyond that, it gets no more descriptors. Other
/// messages always wait: for each descriptor there is only one that takes it back.
const MOST: usize = 4096;

/// A message, and the descriptor that goes with it.
#[derive(Debug)]
struct Message {
    text: String,
    fd: Option<OwnedFd>,
}

/// Messages that the service manager had no room for.
#[derive(Debug, Default)]
struct Outbox {
    waiting: VecDeque<Message>,
    /// Whether a thread sends them.
    sending: bool,
    /// Whether the log already says that the service manager does not take messages.
    complained: bool,
}

impl Outbox {
    fn complain(&mut self, e: &io::Error) {
        if !std::mem::replace(&mut self.complained, true) {
            tracing::warn!(
                "the service manager takes neither this daemon's state nor what a successor would need after a crash: {e}"
            );
        }
    }
}

/// See the module. It gets the messages in the order in which they are sent, and nobody waits for it: it may
/// read nothing for seconds while it is busy, and its socket has room for few messages.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: OwnedFd,
    address: UnixAddr,
    outbox: Mutex<Outbox>,
    /// Everything was sent.
    sent: Condvar,
}

impl Manager {
    pub(crate) fn new(address: &OsStr) -> io::Result<Arc<Manager>> {
        let address = match address.as_bytes().strip_prefix(b"@") {
            Some(name) => UnixAddr::new_abstract(name),
            None => UnixAddr::new(Path::new(address)),
        }?;
        let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        Ok(Arc::new(Manager { socket, address, outbox: Mutex::default(), sent: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, at the latest when the service manager has read those before it. False: it will never
    /// be sent, which is logged once.
    pub(crate) fn tell(self: &Arc<Self>, text: &str, fd: Option<BorrowedFd<'_>>) -> bool {
        let mut outbox = self.lock();
        let told = if outbox.sending {
            self.wait_in(&mut outbox, text, fd)
        } else {
            match self.send(text, fd, MsgFlags::MSG_DONTWAIT) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait_in(&mut outbox, text, fd),
                sent => sent,
            }
        };
        told.inspect_err(|e| outbox.complain(e)).is_ok()
    }

    fn wait_in(
        self: &Arc<Self>,
        outbox: &mut Outbox,
        text: &str,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        if fd.is_some() && outbox.waiting.len() >= MOST {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let fd = fd.map(|fd| fd.try_clone_to_owned()).transpose()?;
        if !outbox.sending {
            let manager = Arc::clone(self);
            start_thread("notify", move || manager.send_waiting())?;
            outbox.sending = true;
        }
        outbox.waiting.push_back(Message { text: text.to_owned(), fd });
        Ok(())
    }

    fn send_waiting(&self) {
        loop {
            let mut outbox = self.lock();
            let Some(Message { text, fd }) = outbox.waiting.pop_front() else {
                outbox.sending = false;
                self.sent.notify_all();
                return;
            };
            drop(outbox);
            if let Err(e) = self.send(&text, fd.as_ref().map(AsFd::as_fd), MsgFlags::empty()) {
                self.lock().complain(&e);
            }
        }
    }

    fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>, flags: MsgFlags) -> io::Result<()> {
        let raw: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        let parts = [IoSlice::new(text.as_bytes())];
        let (socket, flags) = (self.socket.as_raw_fd(), MsgFlags::MSG_NOSIGNAL | flags);
        loop {
            match sendmsg(socket, &parts, control, flags, Some(&self.address)) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits until everything was sent, for at most so long.
    pub(crate) fn wait_until_sent(&self, within: Duration) {
        let wait = self.sent.wait_timeout_while(self.lock(), within, |outbox| outbox.sending);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }
}
