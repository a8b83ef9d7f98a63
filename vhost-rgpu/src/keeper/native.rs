//! The keeper's part of the native socket: it accepts processes of this host and passes each connection to the device process of the client's user.
//!
//! One user's programs share a device process: a program can crash or exhaust that one, and no other user's. It ends when it has had no client for a while ([`LINGER`]).
//! Nobody but the device process has a client's connection, so a client whose device process ends sees its connection closed.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::sys::socket::{MsgFlags, UnixCredentials, getsockopt, recv, sockopt};
use protocol::device::Answer;

use super::process::{Owner, Process, Processes};
use super::status::{Own, Why};
use super::takeover::Succession;
use crate::config::Native;
use crate::device_process::Role;
use crate::limit::LogLimit;
use crate::link::{Stored, ToDevice};
use crate::native::answer;
use crate::sockets::Listening;

/// How long a user's device process waits for another client. A program that starts soon after the last one need not wait for a process.
const LINGER: Duration = Duration::from_secs(10);
/// How long a device process that has no client has to end.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

/// The device process of one user.
#[derive(Debug)]
struct User {
    process: Arc<Process>,
    clients: HashSet<u64>,
    /// When the last client left, if there is none.
    idle: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    users: HashMap<u32, User>,
    /// Clients of device processes that have ended, or are about to, are not in `users` any more.
    next: u64,
    ending: bool,
    /// Device processes that are being ended.
    leaving: usize,
}

impl State {
    fn clients(&self) -> usize {
        self.users.values().map(|user| user.clients.len()).sum()
    }
}

/// The native socket's server.
#[derive(Debug)]
pub struct Server {
    me: Weak<Server>,
    config: Native,
    processes: Arc<Processes>,
    own: Arc<Own>,
    succession: Arc<Succession>,
    state: Mutex<State>,
    changed: Condvar,
    limit: LogLimit,
}

/// The process at the other end. The numbers come from the kernel, not from the client.
fn credentials(socket: &OwnedFd) -> io::Result<UnixCredentials> {
    Ok(getsockopt(socket, sockopt::PeerCredentials)?)
}

impl Server {
    /// A server with this configuration.
    pub fn new(
        config: Native,
        processes: Arc<Processes>,
        own: Arc<Own>,
        succession: Arc<Succession>,
    ) -> Arc<Server> {
        Arc::new_cyclic(|me| Server {
            me: me.clone(),
            config,
            processes,
            own,
            succession,
            state: Mutex::default(),
            changed: Condvar::new(),
            limit: LogLimit::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts clients until the socket is stopped.
    pub fn serve(&self, listening: &Listening) {
        while let Some((socket, _stays)) = listening.accept_patiently("native socket", &self.succession) {
            let peer = match credentials(&socket) {
                Ok(peer) => peer,
                Err(e) => {
                    self.limit.warn("native socket", &format!("a client without credentials: {e}"));
                    continue;
                }
            };
            let who = format!("native client (pid {}, uid {}, gid {})", peer.pid(), peer.uid(), peer.gid());
            if let Err((cause, why, socket)) = self.pass_on(socket, peer.uid(), &who) {
                self.own.refuse(cause);
                self.limit.warn(&who, &format!("refused: {why}"));
                if let Some(socket) = socket {
                    let _ = answer(&socket, Answer::NoResources, &why, None);
                    // A connection that is closed with an unread request is reset, and the client would not see the answer.
                    let _ = recv(socket.as_raw_fd(), &mut [0; 256], MsgFlags::MSG_DONTWAIT);
                }
            }
        }
    }

    /// Gives a client to its user's device process. On failure the client has to be told why, if there still is a connection.
    fn pass_on(&self, socket: OwnedFd, uid: u32, who: &str) -> Result<(), (Why, String, Option<OwnedFd>)> {
        let mut state = self.lock();
        if state.ending {
            return Err((Why::Draining, "the daemon is ending".to_owned(), Some(socket)));
        }
        let limit = self.config.limits.max_channels as usize;
        if state.clients() >= limit {
            let why = format!(
                "{limit} native clients are connected, which is the limit (native.limits.max_channels)"
            );
            return Err((Why::HostFull, why, Some(socket)));
        }
        let share = self.config.max_channels_per_user as usize;
        if state.users.get(&uid).is_some_and(|user| user.clients.len() >= share) {
            let why = format!(
                "{share} clients of user {uid} are connected, which is the limit (native.max_channels_per_user)"
            );
            return Err((Why::UserFull, why, Some(socket)));
        }
        let number = state.next;
        state.next += 1;
        let user = match state.users.entry(uid) {
            Entry::Occupied(user) => user.into_mut(),
            Entry::Vacant(free) => {
                let Some(me) = self.me.upgrade() else {
                    return Err((Why::Draining, "the daemon is ending".to_owned(), None));
                };
                let mut none = BTreeMap::new();
                match self.processes.start(&Role::Native(uid), &self.config.servers, me, &mut none, 0) {
                    Ok(process) => {
                        tracing::debug!("user {uid}: device process {}", process.pid);
                        free.insert(User { process, clients: HashSet::new(), idle: None })
                    }
                    Err(e) => {
                        return Err((
                            Why::Failed,
                            format!("this host cannot start a process: {e}"),
                            Some(socket),
                        ));
                    }
                }
            }
        };
        let client = ToDevice::Client { number, who: who.to_owned(), socket };
        if let Err(e) = user.process.tell(&client) {
            let ToDevice::Client { socket, .. } = client else {
                return Err((Why::Failed, e.to_string(), None));
            };
            return Err((
                Why::Failed,
                format!("the user's device process does not answer: {e}"),
                Some(socket),
            ));
        }
        user.clients.insert(number);
        user.idle = None;
        Ok(())
    }

    /// Ends device processes that have had no client for a while. When the next one has to end, if any.
    pub fn expire(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        let over = |user: &User| user.idle.is_some_and(|since| now.duration_since(since) >= LINGER);
        let expired: Vec<u32> =
            state.users.iter().filter(|(_, user)| over(user)).map(|(uid, _)| *uid).collect();
        for uid in expired {
            if let Some(user) = state.users.remove(&uid) {
                self.dismiss(&mut state, user.process, ENDS_WITHIN);
            }
        }
        state.users.values().filter_map(|user| user.idle).min().map(|since| since + LINGER)
    }

    /// Ends a device process, without waiting for it here.
    fn dismiss(&self, state: &mut State, process: Arc<Process>, patience: Duration) {
        let Some(me) = self.me.upgrade() else { return };
        state.leaving += 1;
        let end = move |process: &Process, server: &Server| {
            let _stays = server.succession.stays();
            process.end(patience);
            server.lock().leaving -= 1;
            server.changed.notify_all();
        };
        let (for_thread, server) = (process.clone(), me.clone());
        let spawned =
            std::thread::Builder::new().name("dismiss".to_owned()).spawn(move || end(&for_thread, &server));
        if let Err(e) = spawned {
            tracing::error!("{}: killing its device process: no thread to wait for it: {e}", process.name);
            let _ = process.reap();
            state.leaving -= 1;
        }
    }

    /// Ends every device process and waits up to `patience` for their sessions to end.
    pub fn drain(&self, patience: Duration) {
        let mut state = self.lock();
        state.ending = true;
        let users = std::mem::take(&mut state.users);
        for user in users.into_values() {
            self.dismiss(&mut state, user.process, patience);
        }
        // Each is killed when its time is over, which takes a moment more.
        let limit = patience + Duration::from_secs(1);
        let wait = self.changed.wait_timeout_while(state, limit, |state| state.leaving > 0);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Owner for Server {
    fn stored(&self, _channel: u32, _stored: Option<&Stored>) {}

    fn gone(&self, process: &Arc<Process>, number: u64) {
        let mut state = self.lock();
        let user = state.users.values_mut().find(|user| Arc::ptr_eq(&user.process, process));
        if let Some(user) = user
            && user.clients.remove(&number)
            && user.clients.is_empty()
        {
            user.idle = Some(Instant::now());
        }
    }

    fn over(&self, process: &Arc<Process>) {
        let mut state = self.lock();
        let uid =
            state.users.iter().find(|(_, user)| Arc::ptr_eq(&user.process, process)).map(|(uid, _)| *uid);
        let Some(user) = uid.and_then(|uid| state.users.remove(&uid)) else { return };
        tracing::error!(
            "{}: its device process {} has ended unexpectedly, and the sessions of {} clients with it",
            process.name,
            process.pid,
            user.clients.len()
        );
        self.dismiss(&mut state, user.process, Duration::ZERO);
    }
}
