//! The keeper's part of the native socket: it accepts processes of this host and passes each connection to the device process of the client's user.
//!
//! One user's programs share a device process: a program can crash or exhaust that one, and no other user's. It ends when it has had no client for a while ([`LINGER`]).
//! The keeper has each client's connection, too, and what the device process stores of its session. When a device process ends unexpectedly, another one goes on with its clients, which do not notice.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{MsgFlags, Shutdown, UnixCredentials, getsockopt, recv, shutdown, sockopt};
use protocol::device::Answer;

use super::process::{Owner, Process, Processes};
use super::status::{Own, Why};
use super::takeover::Succession;
use crate::config::Native;
use crate::device_process::Role;
use crate::limit::LogLimit;
use crate::link::{Stored, ToDevice};
use crate::native::{MAX_STORED, answer};
use crate::sockets::Listening;

/// How long a user's device process waits for another client. A program that starts soon after the last one need not wait for a process.
const LINGER: Duration = Duration::from_secs(10);
/// How long a device process that has no client has to end.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

/// A device process that has run for longer is not counted as failing at its start.
const HEALTHY: Duration = Duration::from_secs(60);
/// A user's clients are disconnected after so many device processes in a row that fail soon after their start.
const MAX_FAILURES: u32 = 8;
/// How long to wait before another attempt after the second failure. Doubled with each one.
const PAUSE: Duration = Duration::from_millis(100);

/// A program that is connected.
#[derive(Debug)]
struct Client {
    who: String,
    socket: OwnedFd,
    /// Whether a request of it was being answered.
    answering: OwnedFd,
    /// A device process has it.
    told: bool,
}

/// The device process of one user.
#[derive(Debug)]
struct User {
    process: Arc<Process>,
    clients: HashMap<u64, Client>,
    /// The process has ended, and another one is being started.
    replacing: bool,
    /// How many processes have failed one after the other.
    failures: u32,
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
                match self.processes.start(
                    &Role::Native(uid),
                    &self.config.servers,
                    me,
                    &mut none,
                    MAX_STORED,
                ) {
                    Ok(process) => {
                        tracing::debug!("user {uid}: device process {}", process.pid);
                        let clients = HashMap::new();
                        free.insert(User { process, clients, replacing: false, failures: 0, idle: None })
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
        let failed = |what: &str, e: io::Error| (Why::Failed, format!("{what}: {e}"));
        let made = answering_file().and_then(|answering| {
            Ok(Client { who: who.to_owned(), socket: socket.try_clone()?, answering, told: false })
        });
        let mut client = match made {
            Ok(client) => client,
            Err(e) => {
                let (cause, why) = failed("this host is short of memory or descriptors", e);
                return Err((cause, why, Some(socket)));
            }
        };
        // One that has ended, and the client with it, is replaced: the next one gets the client.
        if !user.replacing
            && let Err(e) = client.introduce(&user.process, number)
            && !is_gone(&e)
        {
            let (cause, why) = failed("the user's device process does not answer", e);
            return Err((cause, why, Some(socket)));
        }
        user.clients.insert(number, client);
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

/// A file that says nothing yet.
fn answering_file() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"answering", MFdFlags::MFD_CLOEXEC)?)
}

/// Whether a process cannot be told anything because it has ended.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

impl Client {
    /// Gives the client to a device process.
    fn introduce(&mut self, process: &Process, number: u64) -> io::Result<()> {
        let (socket, answering) = (self.socket.try_clone()?, self.answering.try_clone()?);
        let who = self.who.clone();
        process.tell(&ToDevice::Client { number, who, socket, answering, again: self.told })?;
        self.told = true;
        Ok(())
    }
}

impl Owner for Server {
    fn stored(&self, _channel: u64, _stored: Option<&Stored>) {}

    fn gone(&self, process: &Arc<Process>, number: u64) {
        let mut state = self.lock();
        let user = state.users.values_mut().find(|user| Arc::ptr_eq(&user.process, process));
        if let Some(user) = user
            && user.clients.remove(&number).is_some()
            && user.clients.is_empty()
        {
            user.idle = Some(Instant::now());
        }
    }

    fn over(&self, process: &Arc<Process>) {
        let mut state = self.lock();
        let user = state.users.iter_mut().find(|(_, user)| Arc::ptr_eq(&user.process, process));
        let Some((uid, user)) = user else { return };
        if user.replacing {
            return;
        }
        let uid = *uid;
        user.replacing = true;
        let Some(me) = self.me.upgrade() else { return };
        let old = process.clone();
        let replace = move || me.replace(uid, old);
        if let Err(e) = std::thread::Builder::new().name("replace".to_owned()).spawn(replace) {
            tracing::error!("{}: no thread to replace its device process: {e}", process.name);
            self.give_up(&mut state, uid);
        }
    }
}

impl Server {
    /// Starts another device process for a user's clients in place of one that has ended.
    fn replace(&self, uid: u32, old: Arc<Process>) {
        let _stays = self.succession.stays();
        let (how, mut stored) = old.take_over();
        tracing::error!("{}: its device process {} {how}; starting another one", old.name, old.pid);
        let mut ran = old.age();
        loop {
            let mut state = self.lock();
            let ending = state.ending;
            let Some(user) = state.users.get_mut(&uid) else { return };
            user.failures = if ran > HEALTHY { 1 } else { user.failures + 1 };
            let failures = user.failures;
            if failures > MAX_FAILURES || user.clients.is_empty() || ending {
                if failures > MAX_FAILURES {
                    tracing::error!(
                        "{}: {MAX_FAILURES} device processes have failed one after the other; its clients are disconnected",
                        old.name
                    );
                }
                return self.give_up(&mut state, uid);
            }
            drop(state);
            if failures > 1 {
                std::thread::sleep(PAUSE * (1 << (failures - 2)));
            }
            ran = Duration::ZERO;
            let Some(me) = self.me.upgrade() else { return };
            let role = Role::Native(uid);
            let started = self.processes.start(&role, &self.config.servers, me, &mut stored, MAX_STORED);
            let process = match started {
                Ok(process) => process,
                Err(e) => {
                    tracing::error!("{}: starting a device process: {e}", old.name);
                    continue;
                }
            };
            let restored = process.restore();
            let mut state = self.lock();
            let Some(user) = state.users.get_mut(&uid) else {
                drop(state);
                // All clients have left, or the daemon ends.
                return process.end(Duration::ZERO);
            };
            let introduced = restored.and_then(|()| {
                user.clients.iter_mut().try_for_each(|(number, client)| client.introduce(&process, *number))
            });
            if introduced.is_ok() && !process.is_over() {
                self.own.restarts.fetch_add(1, Ordering::Relaxed);
                self.succession.save(&self.own);
                let clients = user.clients.len();
                tracing::info!(
                    "{}: device process {} serves its {clients} clients now",
                    old.name,
                    process.pid
                );
                (user.process, user.replacing) = (process, false);
                return;
            }
            drop(state);
            let (how, left) = process.take_over();
            tracing::error!("{}: its device process {} {how}; starting another one", old.name, process.pid);
            stored.extend(left);
        }
    }

    /// Disconnects a user's clients, whose device process is gone.
    fn give_up(&self, state: &mut State, uid: u32) {
        let Some(user) = state.users.remove(&uid) else { return };
        for client in user.clients.values() {
            let _ = shutdown(client.socket.as_raw_fd(), Shutdown::Both);
        }
        self.dismiss(state, user.process, Duration::ZERO);
    }
}
