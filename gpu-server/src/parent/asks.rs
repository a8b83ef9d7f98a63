//! Client requests that need no session: the inventory, and [leases](super::leases). One thread answers them,
//! so that a slow reading of the devices' figures delays no session.

pub(super) mod waiting;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use host_bridge::ask::{self, Question};
use identity::Secret;

use self::waiting::Ask;
use super::control::{Control, Refused};
use super::leases;
use super::leases::Known;
use super::refusals::Reason;
use super::state::{Server, State};
use super::trust::Principal;
use crate::driver::cuda::nvml::readings::Reading;

/// How long a question waits for fresh figures from NVML. If there are none, all that have come meanwhile
/// have waited, too.
const FIGURES_WITHIN: Duration = Duration::from_secs(1);
/// An answer of so many bytes fits into any socket's buffer.
const SHORT: usize = 8 << 10;
/// How many longer ones are sent at the same time, and how long a client may take to read one.
const MOST_LONG: usize = 16;
const READ_WITHIN: Duration = Duration::from_secs(2);

/// Starts the thread.
pub(super) fn start(server: &Arc<Server>) -> anyhow::Result<()> {
    let server = Arc::clone(server);
    let work = move || {
        loop {
            let ask = server.asks.next();
            serve(&server, &ask);
        }
    };
    std::thread::Builder::new()
        .name("rgpu-asks".into())
        .spawn(work)
        .context("starting to answer questions")?;
    Ok(())
}

/// Sends an answer. A client that does not read a long one must not keep others waiting.
fn send(server: &Arc<Server>, ask: &Ask, text: Vec<u8>) {
    let (connection, peer, name) = (Arc::clone(&ask.connection), ask.peer.clone(), ask.who.name.clone());
    let note = move |server: &Server, sent: io::Result<()>| {
        // The client may be gone just now. What it was granted ends when its time runs out.
        if let Err(e) = sent
            && let Some(not_shown) = server.log_limits.allow(Some(&name), Instant::now())
        {
            tracing::info!(peer, principal = name, "a question's answer was not sent: {e}{not_shown}");
        }
    };
    if text.len() <= SHORT {
        return note(server, connection.send_answer(&text, Duration::ZERO));
    }
    let long = Arc::clone(&server.asks.long);
    // The queue has one, and each of the threads: with this one, that is one too many.
    if Arc::strong_count(&long) > 1 + MOST_LONG {
        return note(server, Err(io::Error::other("too many clients are reading long answers")));
    }
    let sender = Arc::clone(server);
    let work = move || {
        note(&sender, connection.send_answer(&text, READ_WITHIN));
        drop(long);
    };
    if let Err(e) = std::thread::Builder::new().name("rgpu-answer".into()).spawn(work) {
        tracing::warn!("cannot start a thread for a long answer: {e}");
    }
}

fn serve(server: &Arc<Server>, ask: &Ask) {
    let Ask { connection, peer, who, question, since } = ask;
    let answered = answer(server, connection, who, question, *since).and_then(|answer| {
        let text = serde_json::to_vec(&answer)
            .map_err(|e| Refused(Reason::Failed, format!("the answer cannot be written: {e}")))?;
        send(server, ask, text);
        Ok(())
    });
    if let Err(refused) = answered {
        server.refuse(connection, Some(who), peer, "", "", &refused);
    }
}

/// How long a question that has come at that time may still wait for figures.
fn left(since: Instant) -> Duration {
    FIGURES_WITHIN.saturating_sub(since.elapsed())
}

fn answer(
    server: &Server,
    connection: &Control,
    who: &Principal,
    question: &[u8],
    since: Instant,
) -> Result<ask::Answer, Refused> {
    let malformed = |why: String| Refused(Reason::Malformed, why);
    let question = Question::parse(question).map_err(|e| malformed(e.to_string()))?;
    // Its access may have been revoked since it connected.
    let grant = server.granted(who)?;
    let key =
        |text: &str| Secret::from_text(text).ok_or_else(|| malformed("this is not a lease's key".into()));
    match question {
        Question::Inventory {} => {
            let readings = server.gpus.fresh(left(since));
            let state = server.lock();
            let allowed = &grant.limits.devices;
            let mine = |gpu: &Known| allowed.is_empty() || allowed.contains(&gpu.number);
            let known = known(server, &state, &readings).into_iter().filter(mine);
            Ok(ask::Answer::Inventory(
                known.map(|gpu| with_reading(state.describe(gpu), &readings)).collect(),
            ))
        }
        Question::Leases {} => {
            let state = server.lock();
            let own = state.leases.all().filter(|lease| lease.principal == who.name);
            Ok(ask::Answer::Leases(own.map(|lease| state.row(lease, Instant::now())).collect()))
        }
        Question::Lease(wish) => {
            let readings = server.gpus.fresh(left(since));
            let gpus = known(server, &server.lock(), &readings);
            // Nobody else would know the lease's key, and its devices would be taken until its time runs out.
            if connection.is_closed() {
                return Err(Refused(
                    Reason::Failed,
                    "the client has gone before its lease was granted".into(),
                ));
            }
            leases::take(server, &gpus, who, &wish)
        }
        Question::Renew { key: text } => leases::renew(server, who, &key(&text)?),
        Question::Release { key: text } => leases::release(server, &who.name, &key(&text)?),
    }
}

/// The devices that the server shares.
fn known(server: &Server, state: &State, readings: &[Reading]) -> Vec<Known> {
    let (backend, names) = state.serving.as_ref().map_or(("", &[][..]), |(backend, names)| (backend, names));
    let memory = |number: u32| match backend {
        "software" => Some(server.options.worker.backing.software_memory),
        _ => {
            let reading = readings.iter().find(|reading| reading.device == number)?;
            reading.memory.map(|(free, used)| free.saturating_add(used))
        }
    };
    let devices = state.devices(&server.options).into_iter().zip(names);
    devices.map(|(number, name)| Known { number, name: name.clone(), memory: memory(number) }).collect()
}

/// Uses NVML's figures for a device instead of what sessions are known to hold.
fn with_reading(gpu: ask::Gpu, readings: &[Reading]) -> ask::Gpu {
    let reading = readings.iter().find(|reading| reading.device == gpu.gpu);
    let memory = reading.and_then(|reading| reading.memory).map(|(free, _)| free);
    let utilization = reading.and_then(|reading| reading.utilization).map(|(gpu, _)| gpu);
    ask::Gpu { memory_free: memory.or(gpu.memory_free), utilization, ..gpu }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::config::Serve;
    use crate::parent::queue::tests::server;
    use handover::Inherited;
    use identity::Fingerprint;
    use test_kit::eventually;

    #[test]
    fn a_client_that_has_gone_gets_no_lease() {
        let server = Server::new(Serve::from_flags(&["--software-devices=1"]), &mut Inherited::default());
        let server = Arc::new(server.unwrap());
        server.lock().serving = Some(("software".into(), vec!["a GPU".into()]));
        let ask = |client: Option<UnixStream>, connection: UnixStream| {
            let question = br#"{"lease":{"gpus":1,"seconds":60}}"#.to_vec();
            let (connection, peer) = (Arc::new(Control::Local(connection)), "this host".to_owned());
            let who = Principal::test();
            serve(&server, &Ask { connection, peer, who, question, since: Instant::now() });
            drop(client);
            server.lock().leases.all().count()
        };
        let (client, connection) = UnixStream::pair().unwrap();
        drop(client);
        assert_eq!(ask(None, connection), 0);
        let (client, connection) = UnixStream::pair().unwrap();
        assert_eq!(ask(Some(client), connection), 1);
    }

    #[test]
    fn a_client_that_is_revoked_while_it_waits_for_figures_gets_no_lease() {
        let folder = tempfile::tempdir().unwrap();
        let identity = format!("--identity={}", folder.path().display());
        let server = server(&["--software-devices=1", "--listen=tcp:127.0.0.1:0", &identity]);
        let trust = server.trust.as_ref().unwrap();
        let key = Fingerprint([7; 32]);
        let token = trust.enroll("host", Duration::from_secs(3600)).unwrap();
        trust.change(|all| all.join(&token, key, 0)).unwrap();
        let mut who = Principal::named("host");
        who.key = Some(key);
        let (_client, connection) = UnixStream::pair().unwrap();
        let (connection, peer) = (Arc::new(Control::Local(connection)), "another host".to_owned());
        let question = br#"{"lease":{"gpus":1,"seconds":60}}"#.to_vec();
        let mut state = server.lock();
        state.serving = Some(("software".into(), vec!["a GPU".into()]));
        std::thread::scope(|threads| {
            let ask = Ask { connection, peer, who, question, since: Instant::now() };
            threads.spawn(|| serve(&server, &{ ask }));
            // It has been found to be a client, and then waits for the state.
            eventually(|| server.gpus.wanted());
            assert!(trust.revoke("host").unwrap());
            drop(state);
        });
        assert_eq!(server.lock().leases.all().count(), 0);
        assert_eq!(server.refusals.all().find(|(reason, _)| *reason == Reason::NotAllowed).unwrap().1, 1);
    }

    #[test]
    fn long_answers_are_sent_by_threads_of_their_own_and_not_by_ever_more() {
        let server = Server::new(Serve::from_flags(&[]), &mut Inherited::default());
        let server = Arc::new(server.unwrap());
        let heard = || {
            let (mut client, connection) = UnixStream::pair().unwrap();
            let (connection, peer) = (Arc::new(Control::Local(connection)), "this host".to_owned());
            let (who, question, since) = (Principal::test(), Vec::new(), Instant::now());
            send(&server, &Ask { connection, peer, who, question, since }, vec![7; 1 << 20]);
            let mut heard = Vec::new();
            client.read_to_end(&mut heard).unwrap();
            heard.len()
        };
        assert!(heard() > 1 << 20);
        let _others = vec![Arc::clone(&server.asks.long); MOST_LONG];
        assert_eq!(heard(), 0);
    }

    #[test]
    fn a_question_that_has_waited_for_others_figures_does_not_wait_again() {
        assert!(left(Instant::now() + Duration::from_secs(3600)) == FIGURES_WITHIN);
        assert!(Instant::now().checked_sub(FIGURES_WITHIN).is_none_or(|since| left(since).is_zero()));
    }
}
