//! The first message of a connection, which decides where the connection goes. For connections that have not
//! sent it yet, and their limits, see [`super::listen`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use identity::Secret;
use protocol::device::{Answer, text, untext};
use protocol::link::{COMPRESSED_OUT_SINCE, Hello, VERBS_RESUME_SINCE, Welcome, purpose, wish};

use super::asks::waiting::Ask;
use super::control::{Control, Refused, welcome};
use super::grants;
use super::leases::table::{LeaseId, UNKNOWN};
use super::queue::join;
use super::queue::parked::Parked;
use super::refusals::Reason;
use super::state::{Server, State};
use super::text::printable;
use super::trust::Principal;
use super::workers::Worker;
use crate::cuda_ipc::random_token;
use crate::limits::Limits;
use crate::policy::Rules;
use crate::worker_protocol::{Kind, ToWorker, Token, Transport};

/// Data connections of a session: default and maximum.
const DATA_CONNECTIONS: (u32, u32) = (4, 16);

/// Handles a client's first message. `who`: the verified client, or why there is none.
pub(super) fn serve(
    server: &Server,
    connection: Arc<Control>,
    peer: &str,
    hello: &Hello,
    question: Vec<u8>,
    who: Result<Principal, String>,
) {
    let [client, program] = [untext(&hello.client), untext(&hello.program)].map(|name| printable(&name));
    let principal = who.as_ref().ok().cloned();
    let result = check(&connection, hello).and_then(|()| {
        let who = who.map_err(|why| Refused(Reason::UnknownClient, why))?;
        match hello.purpose {
            purpose::JOIN => joined(server, &connection, peer, &who),
            purpose::ASK => {
                let (connection, peer) = (Arc::clone(&connection), peer.to_owned());
                let since = Instant::now();
                server.asks.take(Ask { connection, peer, who, question, since })
            }
            // A session's TLS connections name it before their first message, and go to its worker while that
            // lives.
            _ if connection.is_encrypted() && hello.token != [0; 16] => Err(over(&server.lock(), hello)),
            purpose::DATA | purpose::RESUME | purpose::END => route(server, &connection, hello, peer),
            purpose::DIRECT => connect_directly(server, &connection, hello),
            _ => open_session(server, &connection, hello, peer, who),
        }
    });
    if let Err(refused) = result {
        server.refuse(&connection, principal.as_ref(), peer, &client, &program, &refused);
    }
}

/// Tells a client that the server now knows its key.
fn joined(server: &Server, connection: &Control, peer: &str, who: &Principal) -> Result<(), Refused> {
    server.audit.joined(who, peer);
    let key = who.key.map(|key| key.to_string()).unwrap_or_default();
    tracing::info!(peer, principal = who.name, key, "a client has joined");
    let welcome = Welcome { principal: text(&who.name), ..welcome(Answer::Ok, [0; 16], 0, "") };
    if let Err(e) = connection.send_welcome(&welcome) {
        tracing::info!(peer, principal = who.name, "cannot tell a client that it has joined: {e}");
    }
    Ok(())
}

/// Whether a session, or a ticket for a direct connection to one, has this name.
pub(super) fn is_known(server: &Server, session: &Token) -> bool {
    let state = server.lock();
    state.tokens.contains_key(session) || state.tickets.find(session, Instant::now()).is_some()
}

/// Passes a TLS connection from which nothing was read to the worker of the session that it names.
pub(super) fn hand_over(server: &Server, session: &Token, connection: BorrowedFd<'_>) -> Result<(), String> {
    let state = server.lock();
    let (worker, message) = match state.tickets.find(session, Instant::now()) {
        Some(worker) => (worker, ToWorker::Direct { token: *session, welcomed: false }),
        None => {
            let worker = state.tokens.get(session).ok_or("it names a session that does not exist")?;
            (worker, ToWorker::Connection)
        }
    };
    let worker = Arc::clone(worker);
    drop(state);
    worker.offer(&message, connection).map_err(|e| format!("the worker of its session does not take it: {e}"))
}

fn check(connection: &Control, hello: &Hello) -> Result<(), Refused> {
    match (connection, hello.purpose) {
        (
            Control::Tcp(_),
            purpose::CONTROL
            | purpose::DATA
            | purpose::VERBS
            | purpose::RESUME
            | purpose::END
            | purpose::DIRECT
            | purpose::ASK,
        )
        | (
            Control::Tls(..),
            purpose::CONTROL
            | purpose::VERBS
            | purpose::JOIN
            | purpose::DATA
            | purpose::RESUME
            | purpose::END
            | purpose::ASK,
        )
        | (Control::Local(_), purpose::LOCAL | purpose::DIRECT | purpose::ASK) => Ok(()),
        (_, other) => Err(Refused(
            Reason::Malformed,
            format!("purpose {other} is not served over {}", connection.transport()),
        )),
    }
}

/// Passes a connection without TLS to the worker of its session. Without the session's secret, a client
/// learns nothing about it.
fn route(server: &Server, connection: &Arc<Control>, hello: &Hello, peer: &str) -> Result<(), Refused> {
    let mut state = server.lock();
    let worker = known(&mut state, hello)?;
    // Before the client takes the session for ended, and before another daemon can take over, which would not
    // know that it is to end.
    if hello.purpose == purpose::END {
        // A worker that is gone has ended it.
        let _ = worker.send(&ToWorker::End, &[]);
    }
    drop(state);
    let failed = |e: io::Error| Refused(Reason::Failed, format!("the session's worker is gone: {e}"));
    // The answer is sent first: once the worker has the connection, it may send data on it.
    connection.send_welcome(&welcome(Answer::Ok, hello.token, 0, "")).map_err(failed)?;
    let Hello { attempt, index, .. } = *hello;
    let sent = match hello.purpose {
        purpose::END => return Ok(()),
        purpose::RESUME => {
            // The worker closes connections of an outdated attempt.
            let mut state = server.lock();
            let session = state.sessions.get_mut(&worker.pid());
            if let Some(session) = session.filter(|session| attempt > session.attempt) {
                let before = session.origin();
                session.attempt = attempt;
                session.control = Some(Arc::clone(connection));
                peer.clone_into(&mut session.peer);
                let (client, program) = (&session.client, &session.program);
                tracing::info!(
                    peer,
                    client,
                    program,
                    worker = worker.pid(),
                    attempt,
                    "a session's bridge opens new connections"
                );
                if session.origin() == before {
                    state.save_link(worker.pid());
                } else {
                    state.save(worker.pid());
                }
            }
            drop(state);
            worker.send(&ToWorker::Resume { attempt }, &[connection.as_fd()])
        }
        _ => worker.send(&ToWorker::Data { attempt, index }, &[connection.as_fd()]),
    };
    if let Err(e) = sent {
        tracing::debug!(purpose = hello.purpose, "cannot pass a connection to its worker: {e}");
    }
    Ok(())
}

/// Passes a direct connection without TLS to the worker of its ticket.
fn connect_directly(server: &Server, connection: &Arc<Control>, hello: &Hello) -> Result<(), Refused> {
    let worker = server.lock().tickets.take(&hello.token, &hello.secret, Instant::now());
    let unknown = || {
        Refused(Reason::SessionOver, "this ticket does not exist, was used already, or has expired".into())
    };
    let worker = worker.ok_or_else(unknown)?;
    let failed = |e: io::Error| Refused(Reason::Failed, format!("the ticket's worker is gone: {e}"));
    connection.send_welcome(&welcome(Answer::Ok, hello.token, 0, "")).map_err(failed)?;
    let message = ToWorker::Direct { token: hello.token, welcomed: true };
    if let Err(e) = worker.send(&message, &[connection.as_fd()]) {
        tracing::debug!("cannot pass a direct connection to its worker: {e}");
    }
    Ok(())
}

/// The worker of the session whose token and secret a hello contains. Refuses more data connections than a
/// link may have.
fn known(state: &mut State, hello: &Hello) -> Result<Arc<Worker>, Refused> {
    let worker = state.tokens.get(&hello.token).cloned();
    let session = worker.as_ref().and_then(|worker| state.sessions.get_mut(&worker.pid()));
    if let (Some(worker), Some(session)) = (worker, session)
        && session.secret.matches(&hello.secret)
        && !session.encrypted
    {
        if hello.purpose == purpose::DATA && hello.attempt == 0 {
            let (most, came) = &mut session.data_connections;
            if came >= most {
                let reason = format!("the session has all of its {most} data connections");
                return Err(Refused(Reason::Connections, reason));
            }
            *came += 1;
            state.save(worker.pid());
        }
        return Ok(worker);
    }
    Err(over(state, hello))
}

/// The refusal of a connection whose session doesn't exist.
fn over(state: &State, hello: &Hello) -> Refused {
    let why = state
        .end_of(&hello.token)
        .unwrap_or("no session has this token and this secret: it has ended, or the server was restarted");
    Refused(Reason::SessionOver, why.to_owned())
}

/// Whether the bridge takes compressed data. In an older version the bit means nothing.
fn takes_compressed(hello: &Hello) -> bool {
    hello.version >= COMPRESSED_OUT_SINCE && hello.wishes & wish::COMPRESSED != 0
}

/// The devices that a client requests, by the server's numbers. Placement checks whether they exist.
fn devices_asked_for(hello: &Hello) -> Vec<u32> {
    let mut devices = Vec::new();
    for number in hello.devices.iter().take_while(|number| **number != 0).map(|number| u32::from(*number) - 1)
    {
        if !devices.contains(&number) {
            devices.push(number);
        }
    }
    devices
}

/// The lease under which a client wants a new session.
fn lease_of(state: &State, hello: &Hello, principal: &Principal) -> Result<Option<LeaseId>, Refused> {
    if hello.secret == [0; 32] {
        return Ok(None);
    }
    let lease = state.leases.find(&hello.secret, &principal.name);
    let lease = lease.ok_or_else(|| Refused(Reason::NoLease, UNKNOWN.into()))?;
    Ok(Some(lease.id))
}

/// Adds a client to the queue. It is served immediately if a worker is ready.
fn open_session(
    server: &Server,
    connection: &Arc<Control>,
    hello: &Hello,
    peer: &str,
    principal: Principal,
) -> Result<(), Refused> {
    let failed = |what: &str, e: io::Error| Refused(Reason::Failed, format!("{what}: {e}"));
    let kind = if hello.wishes & wish::NVML_ONLY != 0 { Kind::Nvml } else { Kind::Gpu };
    let (lease, grant, rules_read) = {
        let state = server.lock();
        // Before the rules are: if they are read again meanwhile, they count once it waits.
        let rules_read = state.rules_read;
        let lease = lease_of(&state, hello, &principal)?;
        (lease, grants::of(server, &state, kind, &principal, lease)?, rules_read)
    };
    let token = random_token().map_err(|e| failed("cannot read random numbers", e))?;
    let secret = Secret::random().map_err(|e| failed("cannot read random numbers", e))?;
    let (transport, data_connections) = match &**connection {
        Control::Local(_) => (Transport::Local, 0),
        Control::Tcp(_) | Control::Tls(..) if hello.purpose == purpose::VERBS => {
            let resumes = hello.version >= VERBS_RESUME_SINCE;
            (Transport::Verbs { slot_count: hello.slot_count, resumes }, 0)
        }
        Control::Tcp(_) | Control::Tls(..) => {
            let wanted =
                if hello.index == 0 { DATA_CONNECTIONS.0 } else { hello.index.min(DATA_CONNECTIONS.1) };
            let (slot_count, takes_compressed) = (hello.slot_count, takes_compressed(hello));
            (Transport::Tcp { slot_count, data_connections: wanted, takes_compressed }, wanted)
        }
    };
    let is_tcp = matches!(transport, Transport::Tcp { .. });
    let resumes = is_tcp || matches!(transport, Transport::Verbs { resumes: true, .. });
    let mut parked = Parked {
        connection: Arc::clone(connection),
        peer: peer.to_owned(),
        client: printable(&untext(&hello.client)),
        program: printable(&untext(&hello.program)),
        pid: hello.pid,
        transport,
        data_connections,
        token,
        limits: Limits::default(),
        rules_read,
        lease,
        devices: devices_asked_for(hello),
        rules: Rules::default(),
        secret,
        principal,
        resumes,
        eager: if is_tcp { server.options.worker.eager_mib() } else { 0 },
        may_wait: hello.wishes & wish::MAY_WAIT != 0,
        takes_presence: transport == Transport::Local && hello.wishes & wish::PRESENCE != 0,
        since: Instant::now(),
        told: None,
        failures: 0,
    };
    parked.take(grant);
    join(server, kind, parked)
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use protocol::Version;
    use protocol::version::VERSION;
    use zerocopy::FromZeros;

    use super::super::queue::tests::session_of_limits;
    use super::*;
    use crate::config::Serve;
    use crate::worker_protocol;
    use handover::Inherited;
    use std::os::unix::net::UnixStream;

    #[test]
    fn strangers_who_name_a_session_cannot_fill_its_workers_socket() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        // It never reads.
        let worker = Worker::fake(7);
        server.lock().tokens.insert([1; 16], Arc::clone(&worker));
        let (connection, _peer) = UnixStream::pair().unwrap();
        let taken = (0..1000).filter(|_| hand_over(&server, &[1; 16], connection.as_fd()).is_ok()).count();
        assert!((64..1000).contains(&taken), "{taken}");
        worker.send(&ToWorker::End, &[]).unwrap();
    }

    #[test]
    fn a_session_ends_even_if_its_client_does_not_wait_for_the_answer() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let (worker, its_end) = Worker::fake_pair(7);
        server.lock().tokens.insert([1; 16], worker);
        server.lock().sessions.insert(7, session_of_limits(Limits::default()));
        let (connection, client) = UnixStream::pair().unwrap();
        drop(client);
        let hello = Hello { purpose: purpose::END, token: [1; 16], ..Hello::new_zeroed() };
        let connection = Arc::new(Control::Local(connection));
        assert!(route(&server, &connection, &hello, "this host").is_err(), "it hears nothing");
        let mut unread = [PollFd::new(its_end.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut unread, PollTimeout::ZERO), Ok(1), "the worker is told nothing");
        let told = worker_protocol::receive::<ToWorker>(its_end.as_fd()).unwrap().unwrap().0;
        assert!(matches!(told, ToWorker::End));
    }

    #[test]
    fn names_that_clients_give_themselves_have_no_control_characters() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default()).unwrap();
        let (connection, _client) = UnixStream::pair().unwrap();
        let mut hello = Hello::new_zeroed();
        hello.purpose = purpose::LOCAL;
        (hello.client, hello.program) = (text("vm\r7"), text("tr\u{1b}[2Jain"));
        let connection = Arc::new(Control::Local(connection));
        serve(&server, connection, "this host", &hello, Vec::new(), Ok(Principal::test()));
        let state = server.lock();
        let parked = &state.gpu.queue[0];
        assert_eq!((parked.client.as_str(), parked.program.as_str()), ("vm?7", "tr?[2Jain"));
    }

    #[test]
    fn compressed_data_goes_only_to_a_bridge_that_says_it_takes_it_in_a_version_that_has_it() {
        let older = Version { minor: COMPRESSED_OUT_SINCE.minor - 1, ..COMPRESSED_OUT_SINCE };
        for (version, wishes, takes) in [
            (VERSION, wish::COMPRESSED, true),
            (VERSION, !0, true),
            (VERSION, !wish::COMPRESSED, false),
            (older, !0, false),
        ] {
            let hello = Hello { version, wishes, ..Hello::new_zeroed() };
            assert_eq!(takes_compressed(&hello), takes, "{version}, {wishes:#x}");
        }
    }
}
