//! The keeper's part of the native socket: it accepts processes of this host and passes each connection to
//! the device process of the client's user.
//!
//! One user's programs share a device process: a program can crash or exhaust that one, but no other user's.
//! It ends after it has had no client for a while ([`LINGER`]). The keeper also holds each client's
//! connection, and what the device process has stored of its session. If a device process ends unexpectedly,
//! another one continues with its clients, which don't notice.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use handover::{Inherited, Store, start_thread};
use host_bridge::log_limit::LogLimit;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{MsgFlags, Shutdown, UnixCredentials, getsockopt, recv, shutdown, sockopt};
use protocol::device::Answer;
use serde::{Deserialize, Serialize};

use super::failures::{Failures, HEALTHY};
use super::kept::{Found, Kept, Renamed, Words};
use super::process::{Owner, Process, Processes, Reply};
use super::status::{Own, Why};
use super::takeover::Succession;
use super::ties::{self, StoredByChannel, Tied, Ties};
use crate::config::Native;
use crate::link::{Stored, ToDevice};
use crate::memory_file::memory_file;
use crate::native::{Answering, MAX_STORED, answer, client_of, is_region_of};
use crate::role::Role;
use crate::sockets::Listening;

/// How long a user's device process waits for another client, so that a program started soon after the last
/// one need not wait for a process.
const LINGER: Duration = Duration::from_secs(10);
/// How long a device process without clients has to end.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

/// The prefix of names kept for users.
const USER: &str = "user-";

/// A user's programs as saved for the next keeper.
#[derive(Default, Serialize, Deserialize)]
struct Programs {
    /// By number: its name in the log, its connection, and the file that tells whether a request was being
    /// answered.
    clients: BTreeMap<u64, (String, u64, u64)>,
    ties: Ties,
}

/// What often changes of it.
#[derive(Serialize, Deserialize)]
enum Step {
    /// A client has come: its number, and what is known of it.
    Came(u64, (String, u64, u64)),
    /// A client's connection is closed.
    Left(u64),
    /// A client's session is over, too.
    Gone(u64),
    Tie(ties::Step),
}

impl Words for Programs {
    type Step = Step;

    fn numbers(&self) -> Vec<u64> {
        let clients = self.clients.values().flat_map(|(_, socket, answering)| [*socket, *answering]);
        clients.chain(self.ties.numbers()).collect()
    }

    fn step(&mut self, step: Step) -> Renamed {
        let descriptors = |(_, socket, answering): &(String, u64, u64)| vec![*socket, *answering];
        match step {
            Step::Came(number, client) => {
                let now = descriptors(&client);
                let before = self.clients.insert(number, client);
                Renamed { now, before: before.iter().flat_map(descriptors).collect() }
            }
            Step::Left(number) => {
                let before = self.ties.retain(|place| !is_region_of(place, number));
                Renamed { now: Vec::new(), before }
            }
            Step::Gone(number) => {
                let mut before = self.ties.retain(|place| client_of(place) != number);
                before.extend(self.clients.remove(&number).iter().flat_map(descriptors));
                Renamed { now: Vec::new(), before }
            }
            Step::Tie(step) => self.ties.step(step),
        }
    }
}

impl Tied for Programs {
    fn ties(&self) -> &Ties {
        &self.ties
    }

    fn ties_mut(&mut self) -> &mut Ties {
        &mut self.ties
    }

    fn tie(step: ties::Step) -> Step {
        Step::Tie(step)
    }
}

/// A connected program.
#[derive(Debug)]
struct Client {
    who: String,
    socket: OwnedFd,
    /// Tells whether one of its requests was being answered.
    answering: OwnedFd,
    /// Whether a device process has it.
    told: bool,
}

/// The device process of one user.
#[derive(Debug)]
struct User {
    /// `None` before this keeper's first one.
    process: Option<Arc<Process>>,
    kept: Arc<Kept<Programs>>,
    /// By number. A later client has a higher one.
    clients: BTreeMap<u64, Client>,
    /// Whether a thread starts another process for the clients, or introduces them to it. It does that for
    /// those that come meanwhile, too.
    introducing: bool,
    /// Number of processes that have failed in a row.
    failures: Failures,
    /// When the last client left, if there are none.
    idle: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    users: HashMap<u32, User>,
    /// Clients of device processes that have ended or are about to are no longer in `users`.
    next: u64,
    ending: bool,
    /// Number of device processes that are being ended.
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

/// The process at the other end. The kernel provides the numbers, not the client.
fn credentials(socket: &OwnedFd) -> io::Result<UnixCredentials> {
    Ok(getsockopt(socket, sockopt::PeerCredentials)?)
}

/// Answers a client that no device process gets.
fn refuse(socket: &OwnedFd, status: Answer, why: &str) {
    let _ = answer(socket, status, why, None);
    // A connection closed with an unread request is reset, and the client would not see the answer.
    let _ = recv(socket.as_raw_fd(), &mut [0; 256], MsgFlags::MSG_DONTWAIT);
}

/// Refuses programs that come to systemd's socket, until it is stopped, because the configuration has no
/// section for them. Nobody else would ever answer them: systemd accepts no connections while this process
/// runs.
pub fn refuse_all(listening: &Listening, succession: &Succession) {
    while let Some((socket, _stays)) = listening.accept_patiently("native socket", || succession.stays()) {
        refuse(&socket, Answer::Invalid, "the configuration of vhost-rgpu has no section [native]");
    }
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
            limit: LogLimit::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts clients until the socket is stopped.
    pub fn serve(&self, listening: &Listening) {
        while let Some((socket, _stays)) =
            listening.accept_patiently("native socket", || self.succession.stays())
        {
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
                    refuse(&socket, Answer::NoResources, &why);
                }
            }
        }
    }

    /// Passes a client to its user's device process. On failure, returns why, and the connection if there
    /// still is one.
    fn pass_on(&self, socket: OwnedFd, uid: u32, who: &str) -> Result<(), (Why, String, Option<OwnedFd>)> {
        let mut state = self.lock();
        if let Err((cause, why)) = self.admit(&state, uid) {
            return Err((cause, why, Some(socket)));
        }
        if !state.users.contains_key(&uid) {
            drop(state);
            // Without the lock: a process takes long to start on a busy machine, and the main thread, which
            // listens to all device processes, must not wait for that. Nobody else adds users.
            let user = match self.first_process(uid) {
                Ok(user) => user,
                Err(why) => return Err((Why::Failed, why, Some(socket))),
            };
            state = self.lock();
            if state.ending {
                self.dismiss(&mut state, user, Duration::ZERO);
                return Err((Why::Draining, "the daemon is ending".to_owned(), Some(socket)));
            }
            self.add(&mut state, uid, user);
        }
        let number = state.next;
        state.next += 1;
        let Some(user) = state.users.get_mut(&uid) else {
            return Err((Why::Failed, "this host cannot start a process".to_owned(), Some(socket)));
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
        // If the process has ended, the client is passed to the next one.
        user.keep(number, &client);
        let introduced = match user.process.clone().filter(|_| !user.introducing) {
            // Clients come faster than it reads.
            Some(process) if !process.has_room() => self.introduce_later(uid, user, process, number),
            Some(process) => client.introduce(&process, number).or_else(|e| match e.kind() {
                io::ErrorKind::WouldBlock => self.introduce_later(uid, user, process, number),
                _ if is_gone(&e) => Ok(()),
                _ => Err(e),
            }),
            None => Ok(()),
        };
        if let Err(e) = introduced {
            user.forget(number);
            let (cause, why) = failed("the user's device process does not answer", e);
            return Err((cause, why, Some(socket)));
        }
        user.clients.insert(number, client);
        user.idle = None;
        Ok(())
    }

    /// Whether another client of this user may connect. Otherwise, why not.
    fn admit(&self, state: &State, uid: u32) -> Result<(), (Why, String)> {
        if state.ending {
            return Err((Why::Draining, "the daemon is ending".to_owned()));
        }
        let limit = self.config.limits.max_channels as usize;
        if state.clients() >= limit {
            let why = format!(
                "{limit} native clients are connected, which is the limit (native.limits.max_channels)"
            );
            return Err((Why::HostFull, why));
        }
        let share = self.config.max_channels_per_user as usize;
        if state.users.get(&uid).is_some_and(|user| user.clients.len() >= share) {
            let why = format!(
                "{share} clients of user {uid} are connected, which is the limit (native.max_channels_per_user)"
            );
            return Err((Why::UserFull, why));
        }
        Ok(())
    }

    /// A user without clients, with a device process. Not to be called under the lock.
    fn first_process(&self, uid: u32) -> Result<User, String> {
        let me = self.me.upgrade().ok_or("the daemon is ending")?;
        let kept = Kept::new(self.succession.store.clone(), &format!("{USER}{uid}"));
        let kept = Arc::new(kept.map_err(|e| format!("this host is short of memory or descriptors: {e}"))?);
        let (role, mut none) = (Role::Native(uid), BTreeMap::new());
        match self.processes.start(&role, &self.config.servers, me, &mut none, MAX_STORED) {
            Ok(process) => {
                tracing::debug!("user {uid}: device process {}", process.pid);
                kept.served_by(&process);
                Ok(User { process: Some(process), ..User::new(kept) })
            }
            Err(e) => {
                kept.end();
                Err(format!("this host cannot start a process: {e}"))
            }
        }
    }

    /// Adds a user. If its device process is over already, another one takes its place.
    fn add(&self, state: &mut State, uid: u32, user: User) {
        let over = user.process.clone().filter(|process| process.is_over());
        state.users.insert(uid, User { idle: Some(Instant::now()), ..user });
        if let Some(process) = over {
            self.replace_later(state, uid, process);
        }
    }

    /// Ends device processes that have had no client for a while. Returns when the next one has to end, if
    /// any.
    pub fn expire(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        let over = |user: &User| user.idle.is_some_and(|since| now.duration_since(since) >= LINGER);
        let expired: Vec<u32> =
            state.users.iter().filter(|(_, user)| over(user)).map(|(uid, _)| *uid).collect();
        for uid in expired {
            if let Some(user) = state.users.remove(&uid) {
                tracing::debug!("user {uid}: its device process is not needed any more");
                self.dismiss(&mut state, user, ENDS_WITHIN);
            }
        }
        state.users.values().filter_map(|user| user.idle).min().map(|since| since + LINGER)
    }

    /// Ends a device process without waiting for it here. Nothing of it is left for another keeper: the
    /// process would go with this one. And the user's next process may be started before this one has ended;
    /// what is kept of that one has the same names.
    fn dismiss(&self, state: &mut State, user: User, patience: Duration) {
        user.kept.end();
        let (Some(me), Some(process)) = (self.me.upgrade(), user.process) else { return };
        state.leaving += 1;
        let end = move |process: &Process, server: &Server| {
            let _stays = server.succession.stays();
            process.end(patience);
            server.lock().leaving -= 1;
            server.changed.notify_all();
        };
        let (for_thread, server) = (process.clone(), me.clone());
        if let Err(e) = start_thread("dismiss", move || end(&for_thread, &server)) {
            tracing::error!("{}: killing its device process: no thread to wait for it: {e}", process.name);
            let _ = process.reap();
            state.leaving -= 1;
        }
    }

    /// Ends every device process, and waits up to `patience` for their sessions to end.
    pub fn drain(&self, patience: Duration) {
        let mut state = self.lock();
        state.ending = true;
        let users = std::mem::take(&mut state.users);
        for user in users.into_values() {
            self.dismiss(&mut state, user, patience);
        }
        // Each is killed when its time is over, which takes a moment more.
        let limit = patience + Duration::from_secs(1);
        let wait = self.changed.wait_timeout_while(state, limit, |state| state.leaving > 0);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }
}

impl User {
    fn new(kept: Arc<Kept<Programs>>) -> User {
        User {
            process: None,
            kept,
            clients: BTreeMap::new(),
            introducing: false,
            failures: Failures::default(),
            idle: None,
        }
    }

    fn is_served_by(&self, process: &Arc<Process>) -> bool {
        self.process.as_ref().is_some_and(|own| Arc::ptr_eq(own, process))
    }

    /// Keeps a client for the next keeper.
    fn keep(&self, number: u64, client: &Client) {
        let (socket, answering) = (self.kept.hold(&client.socket), self.kept.hold(&client.answering));
        let who = client.who.clone();
        self.kept.step(Step::Came(number, (who, socket, answering)));
    }

    /// A client has left.
    fn forget(&self, number: u64) {
        self.kept.step(Step::Gone(number));
    }
}

/// The users for whom the previous keeper has left something.
fn users(inherited: &Inherited) -> Vec<u32> {
    let names = inherited.names(USER);
    names.iter().filter_map(|rest| rest.strip_suffix("-record")?.parse().ok()).collect()
}

/// Takes over what was kept of a user's programs.
fn find(store: &Arc<Store>, uid: u32, inherited: &mut Inherited) -> Option<(Kept<Programs>, Found)> {
    let found = Kept::take_over(store.clone(), &format!("{USER}{uid}"), inherited);
    found.unwrap_or_else(|e| {
        tracing::error!(
            "user {uid}: the previous keeper's record cannot be read, so its programs are disconnected: {e}"
        );
        None
    })
}

/// Drops what was kept of users' programs that nobody serves any more.
pub fn drop_others(store: &Arc<Store>, inherited: &mut Inherited) {
    for uid in users(inherited) {
        if let Some((kept, found)) = find(store, uid, inherited) {
            tracing::warn!("programs of user {uid}: not served any more, and disconnected");
            kept.kill_device_process(&found);
            kept.end();
        }
    }
    forget_others(store, inherited);
}

/// Forgets what is left of users whose record is gone: a keeper that ends forgets the record first.
fn forget_others(store: &Store, inherited: &mut Inherited) {
    for rest in inherited.names(USER) {
        let name = format!("{USER}{rest}");
        drop(inherited.remove(&name));
        store.forget(&name);
    }
}

/// Says what takes the place of what clients had stored, if descriptors of it are missing. A device process
/// cannot read that, so it disconnects that client, and no other. The client's memory is its own, so nobody
/// has to wait until a worker has released it.
fn incomplete() -> impl FnMut(u64, io::Error) -> io::Result<Stored> {
    let mut told = None;
    move |place, why| {
        let client = client_of(place);
        if told.replace(client) != Some(client) {
            tracing::error!("native client {client} cannot go on: {why}");
        }
        Ok(Stored { known: memory_file(c"missing", &[])?, descriptors: Vec::new() })
    }
}

/// An empty file.
fn answering_file() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"answering", MFdFlags::MFD_CLOEXEC)?)
}

/// Whether an error means that a process has ended.
fn is_gone(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

impl Client {
    /// Whether there is a request that nobody has consumed.
    fn asks(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.socket.as_raw_fd(), &mut [0], flags).is_ok_and(|length| length > 0)
    }

    /// Consumes the client's request and answers it. Never blocks: a client that cannot be answered, because
    /// it has not read many answers, is disconnected. Otherwise it would wait for this one for ever.
    fn answer(&self, reply: &Reply) {
        let Reply { status, reason, fd, .. } = reply;
        // The device process notices if the client is gone.
        let _ = Answering::note(&self.answering, true);
        let _ = recv(self.socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT);
        if answer(&self.socket, *status, reason, fd.as_ref().map(AsFd::as_fd)).is_err() {
            let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        }
        let _ = Answering::note(&self.answering, false);
    }

    /// Passes the client to a device process.
    fn introduce(&mut self, process: &Process, number: u64) -> io::Result<()> {
        let (socket, answering) = (self.socket.try_clone()?, self.answering.try_clone()?);
        let who = self.who.clone();
        process.tell(&ToDevice::Client { number, who, socket, answering, again: self.told })?;
        self.told = true;
        Ok(())
    }
}

impl Owner for Server {
    fn answer(&self, process: &Arc<Process>, answer: Reply) {
        let state = self.lock();
        let user = state.users.values().find(|user| user.is_served_by(process));
        let client = user.and_then(|user| user.clients.get(&answer.number));
        client.into_iter().for_each(|client| client.answer(&answer));
        if let Err(e) = process.tell(&ToDevice::Answered { number: answer.number })
            && !is_gone(&e)
        {
            // A thread of the process would wait for this for ever. Its successor finds the client answered.
            tracing::error!("{}: device process {} cannot be told: {e}", process.name, process.pid);
            process.kill();
        }
    }

    fn stored(&self, process: &Arc<Process>, channel: u64, stored: Option<&Stored>) {
        let kept = self.lock().users.values().find(|user| user.is_served_by(process)).map(|u| u.kept.clone());
        kept.iter().for_each(|kept| kept.stored(channel, stored));
    }

    fn left(&self, process: &Arc<Process>, number: u64) {
        let kept = self.lock().users.values().find(|user| user.is_served_by(process)).map(|u| u.kept.clone());
        kept.iter().for_each(|kept| kept.step(Step::Left(number)));
    }

    fn gone(&self, process: &Arc<Process>, number: u64) {
        let mut state = self.lock();
        let user = state.users.values_mut().find(|user| user.is_served_by(process));
        if let Some(user) = user
            && user.clients.remove(&number).is_some()
        {
            user.forget(number);
            user.idle = user.clients.is_empty().then(Instant::now);
        }
    }

    fn over(&self, process: &Arc<Process>) {
        let mut state = self.lock();
        let user = state.users.iter_mut().find(|(_, user)| user.is_served_by(process));
        let Some((uid, user)) = user else { return };
        if user.introducing {
            return;
        }
        let uid = *uid;
        self.replace_later(&mut state, uid, process.clone());
    }
}

/// A user's clients of which everything was kept. A keeper that is killed may not have sent what it has of
/// one that had just come: that one is disconnected.
fn clients_of(uid: u32, kept: &Kept<Programs>, found: &Found) -> BTreeMap<u64, Client> {
    let mut clients = BTreeMap::new();
    for (number, (who, socket, answering)) in kept.read(|words| words.clients.clone()) {
        match found.get(socket).and_then(|socket| Ok((socket, found.get(answering)?))) {
            Ok((socket, answering)) => {
                clients.insert(number, Client { who, socket, answering, told: true });
            }
            Err(e) => {
                tracing::error!("user {uid}: {who} is disconnected: {e}");
                kept.step(Step::Gone(number));
            }
        }
    }
    clients
}

impl Server {
    /// Continues with the previous keeper's clients, without waiting for their device processes.
    pub fn take_over(self: &Arc<Self>, inherited: &mut Inherited) {
        for uid in users(inherited) {
            let Some((kept, found)) = find(&self.succession.store, uid, inherited) else { continue };
            kept.kill_device_process(&found);
            let kept = Arc::new(kept);
            let clients = clients_of(uid, &kept, &found);
            let mut state = self.lock();
            state.next = state.next.max(clients.keys().next_back().map_or(0, |last| last + 1));
            state.users.insert(uid, User { clients, introducing: true, ..User::new(kept.clone()) });
            drop(state);
            let (server, unserved) = (self.clone(), self.succession.unserved());
            let serve = move || {
                let (_unserved, _stays) = (unserved, server.succession.stays());
                match kept.end_device_process(&found, MAX_STORED, incomplete(), |reply| {
                    let state = server.lock();
                    let client = state.users.get(&uid).and_then(|user| user.clients.get(&reply.number));
                    // Without a request there is nothing to answer.
                    client
                        .filter(|client| client.asks())
                        .into_iter()
                        .for_each(|client| client.answer(&reply));
                }) {
                    Ok(stored) => server.serve_again(uid, stored, HEALTHY),
                    Err(e) => {
                        tracing::error!("user {uid}: reading what its device process has stored: {e}");
                        server.give_up(&mut server.lock(), uid);
                    }
                }
            };
            if let Err(e) = start_thread("take-over", serve) {
                tracing::error!("user {uid}: no thread to start its device process: {e}");
                self.give_up(&mut self.lock(), uid);
            }
        }
        forget_others(&self.succession.store, inherited);
    }

    /// Has a thread start another device process for a user's clients: the previous one is over.
    fn replace_later(&self, state: &mut State, uid: u32, old: Arc<Process>) {
        let (Some(user), Some(me)) = (state.users.get_mut(&uid), self.me.upgrade()) else { return };
        user.introducing = true;
        let name = old.name.clone();
        if let Err(e) = start_thread("replace", move || me.replace(uid, old)) {
            tracing::error!("{name}: no thread to replace its device process: {e}");
            self.give_up(state, uid);
        }
    }

    /// Starts another device process for a user's clients after the previous one has ended.
    fn replace(&self, uid: u32, old: Arc<Process>) {
        let _stays = self.succession.stays();
        let (how, stored) = old.take_over();
        tracing::error!("{}: its device process {} {how}; starting another one", old.name, old.pid);
        self.serve_again(uid, stored, old.age());
    }

    /// Starts a device process for a user's clients. It gets what its predecessor, which ran for `ran`, has
    /// stored.
    fn serve_again(&self, uid: u32, mut stored: StoredByChannel, mut ran: Duration) {
        let name = Role::Native(uid).to_string();
        loop {
            let mut state = self.lock();
            let ending = state.ending;
            let Some(user) = state.users.get_mut(&uid) else { return };
            user.failures.count(ran);
            let pause = match user.failures.pause() {
                Ok(pause) if !user.clients.is_empty() && !ending => pause,
                Ok(_) => return self.give_up(&mut state, uid),
                Err(why) => {
                    tracing::error!("{name}: {why}; its clients are disconnected");
                    return self.give_up(&mut state, uid);
                }
            };
            drop(state);
            std::thread::sleep(pause);
            ran = Duration::ZERO;
            let Some(me) = self.me.upgrade() else { return };
            let role = Role::Native(uid);
            let started = self.processes.start(&role, &self.config.servers, me, &mut stored, MAX_STORED);
            let process = match started {
                Ok(process) => process,
                Err(e) => {
                    tracing::error!("{}: starting a device process: {e}", name);
                    continue;
                }
            };
            let restored = process.restore();
            let mut state = self.lock();
            let Some(user) = state.users.get_mut(&uid) else {
                drop(state);
                // All clients have left, or the daemon is shutting down.
                return process.end(Duration::ZERO);
            };
            user.kept.served_by(&process);
            // What it stores from now on belongs to its user.
            user.process = Some(process.clone());
            drop(state);
            match restored.and_then(|()| self.introduce_all(uid, &process, 0)) {
                Ok(true) => {
                    self.own.restarts.fetch_add(1, Ordering::Relaxed);
                    return self.succession.save(&self.own);
                }
                // Whoever has removed the user ends the process, too.
                Ok(false) => return,
                Err(e) => tracing::debug!("{name}: telling device process {}: {e}", process.pid),
            }
            let (how, left) = process.take_over();
            tracing::error!("{}: its device process {} {how}; starting another one", name, process.pid);
            stored.extend(left);
        }
    }

    /// Has a thread introduce a user's clients, from this one on, as fast as their device process reads.
    fn introduce_later(
        &self,
        uid: u32,
        user: &mut User,
        process: Arc<Process>,
        first: u64,
    ) -> io::Result<()> {
        let me = self.me.upgrade().ok_or(io::ErrorKind::BrokenPipe)?;
        let introduce = move || {
            if let Err(e) = me.introduce_all(uid, &process, first) {
                tracing::debug!("{}: telling device process {}: {e}", process.name, process.pid);
                me.replace(uid, process);
            }
        };
        start_thread("introduce", introduce)?;
        user.introducing = true;
        Ok(())
    }

    /// Introduces a user's clients, from the number `next` on, to a device process, which serves them from
    /// then on. False: it does not serve this user any more.
    fn introduce_all(&self, uid: u32, process: &Arc<Process>, mut next: u64) -> io::Result<bool> {
        loop {
            // Without the lock: others go on meanwhile, and more clients may come.
            process.wait_for_room()?;
            let mut state = self.lock();
            let user = state.users.get_mut(&uid).filter(|user| user.is_served_by(process));
            let Some(user) = user else { return Ok(false) };
            if let Some((number, client)) = user.clients.range_mut(next..).next() {
                client.introduce(process, *number)?;
                next = number + 1;
                continue;
            }
            if process.is_over() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            user.introducing = false;
            let clients = user.clients.len();
            tracing::info!(
                "{}: device process {} serves its {clients} clients now",
                process.name,
                process.pid
            );
            return Ok(true);
        }
    }

    /// Disconnects a user's clients after their device process has ended.
    fn give_up(&self, state: &mut State, uid: u32) {
        let Some(user) = state.users.remove(&uid) else { return };
        for client in user.clients.values() {
            let _ = shutdown(client.socket.as_raw_fd(), Shutdown::Both);
        }
        self.dismiss(state, user, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::super::kept::ROOM;
    use super::super::takeover::FORMAT;
    use super::*;
    use handover::Text;

    /// Where something of client 1 or 2 is stored: its channel, or a region.
    const PLACES: [u64; 4] = [1 << 33, 1 << 33 | 1, 1 << 33 | 2, 2 << 33];

    #[test]
    fn storing_something_costs_the_same_however_much_is_stored() {
        let kept = Kept::<Programs>::new(Arc::default(), "user-1").unwrap();
        let stored = Stored { known: answering_file().unwrap(), descriptors: Vec::new() };
        // Bytes that this thread has written.
        let written = || {
            let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap();
            line.parse::<u64>().unwrap()
        };
        let before = written();
        const COUNT: u64 = 4000;
        (0..COUNT).for_each(|channel| kept.stored(channel, Some(&stored)));
        let each = (written() - before) / COUNT;
        assert!(each < 200, "{each} bytes");
        kept.read(|words| assert_eq!(words.numbers(), vec![0; COUNT as usize]));
    }

    #[test]
    fn what_a_killed_keeper_has_left_without_a_record_is_forgotten() {
        let store = Arc::<Store>::default();
        let file = answering_file().unwrap();
        store.keep("user-1-3", &file).unwrap();
        let mut inherited = Inherited::from_pairs([("user-1-3".to_owned(), file.try_clone().unwrap())]);
        drop_others(&store, &mut inherited);
        assert!(inherited.names("").is_empty(), "it is nobody's socket");
        assert_eq!(store.name_of("user-1-3", &file), None);
    }

    #[test]
    fn a_client_that_came_too_late_for_the_service_manager_takes_no_other_with_it() {
        let mut programs = Programs::default();
        for number in 0..3u64 {
            let client = (number.to_string(), 2 * number, 2 * number + 1);
            programs.step(Step::Came(number, client));
        }
        let record = serde_json::json!({ "format": FORMAT, "next": 6, "words": programs });
        let text = Text::new(ROOM).unwrap();
        text.write(record.to_string().as_bytes()).unwrap();
        let record = ("user-1-record".to_owned(), text.as_fd().try_clone_to_owned().unwrap());
        // The previous keeper was killed before it had sent the last one's second descriptor.
        let given = (0..5).map(|number| (format!("user-1-{number}"), answering_file().unwrap()));
        let mut inherited = Inherited::from_pairs(given.chain(std::iter::once(record)));
        let (kept, found) = find(&Arc::default(), 1, &mut inherited).unwrap();
        let clients = clients_of(1, &kept, &found);
        assert_eq!(clients.into_keys().collect::<Vec<_>>(), [0, 1]);
        assert_eq!(kept.read(|words| words.numbers()), [0, 1, 2, 3]);
    }

    #[test]
    fn a_client_whose_descriptors_are_missing_takes_no_other_with_it() {
        let mut programs = Programs::default();
        for (place, number) in PLACES.into_iter().zip((0..).step_by(2)) {
            programs.ties.step((place, Some(vec![number, number + 1])));
        }
        let record = serde_json::json!({ "format": FORMAT, "next": 8, "words": programs });
        let text = Text::new(ROOM).unwrap();
        text.write(record.to_string().as_bytes()).unwrap();
        let record = ("user-1-record".to_owned(), text.as_fd().try_clone_to_owned().unwrap());
        // The service manager had no room for what is known of a region of the first client's, nor for a
        // descriptor of another.
        let there = (0..8).filter(|number| ![2, 5].contains(number));
        let given = there.map(|number| (format!("user-1-{number}"), answering_file().unwrap()));
        let mut inherited = Inherited::from_pairs(given.chain(std::iter::once(record)));
        let (kept, found) = find(&Arc::default(), 1, &mut inherited).unwrap();
        let stored = kept.end_device_process(&found, MAX_STORED, incomplete(), drop).unwrap();
        let descriptors: Vec<_> =
            stored.iter().map(|(place, stored)| (*place, stored.descriptors.len())).collect();
        assert_eq!(descriptors, PLACES.into_iter().zip([1, 0, 0, 1]).collect::<Vec<_>>());
    }

    #[test]
    fn each_step_tells_what_it_renames() {
        let mut words = Programs::default();
        let client = |first| ("a client".to_owned(), first, first + 1);
        let steps = [
            Step::Came(1, client(10)),
            Step::Came(2, client(12)),
            Step::Tie((PLACES[0], Some(vec![0, 1]))),
            Step::Tie((PLACES[1], Some(vec![2, 3]))),
            Step::Tie((PLACES[2], Some(vec![4, 3]))),
            Step::Tie((PLACES[3], Some(vec![5, 3]))),
            Step::Tie((PLACES[0], Some(vec![0, 6]))),
            Step::Tie((PLACES[1], None)),
            Step::Tie((PLACES[1], None)),
            Step::Left(1),
            Step::Gone(1),
            Step::Gone(1),
        ];
        for step in steps {
            let mut named = words.numbers();
            let Renamed { now, before } = words.step(step);
            for number in before {
                let at = named.iter().position(|other| *other == number).unwrap();
                named.swap_remove(at);
            }
            named.extend(now);
            named.sort_unstable();
            let mut all = words.numbers();
            all.sort_unstable();
            assert_eq!(named, all);
        }
        assert_eq!(words.numbers(), [12, 13, 5, 3]);
    }
}
