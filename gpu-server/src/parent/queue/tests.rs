use super::super::bells::Bell;
use super::super::ends::end_sessions;
use super::super::trust::Principal;
use super::super::workers::Managed;
use super::*;
use handover::Inherited;
use host_bridge::framing::recv_struct;
use std::os::unix::net::UnixStream;

/// A server with these options that does nothing by itself.
pub(in crate::parent) fn server(flags: &[&str]) -> Arc<Server> {
    Arc::new(Server::new(crate::config::Serve::from_flags(flags), &mut Inherited::default()).unwrap())
}

/// A session with these limits, without a client.
pub(in crate::parent) fn session_of_limits(limits: Limits) -> Session {
    let (account, _pages) = Account::open(&Bell::new().unwrap()).unwrap();
    let parked = Parked { limits, ..Parked::fake() };
    let key = metrics::Ledger::<()>::default().enter(names(&parked), Instant::now());
    session_of(&parked, Kind::Gpu, Vec::new(), account, key)
}

fn client(server: &Server, number: u32) -> Result<UnixStream, String> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = Arc::new(Control::Local(theirs));
    let parked = Parked { connection, pid: number, token: [number as u8; 16], ..Parked::fake() };
    join(server, Kind::Gpu, parked).map(|()| ours).map_err(|Refused(_, reason)| reason)
}

fn heard(client: &UnixStream) -> (Answer, u32, String) {
    let welcome: Welcome = recv_struct(client.as_fd(), &mut Vec::new()).unwrap().unwrap();
    (Answer::from_number(welcome.status), welcome.ahead, protocol::device::untext(&welcome.reason))
}

fn ready(server: &Server, pid: u32) {
    server.lock().gpu.idle.push_back(Worker::fake(pid));
    serve(server, Kind::Gpu);
}

#[test]
fn clients_are_served_in_order_and_learn_their_position() {
    let server = server(&["--max-sessions", "9"]);
    let clients: Vec<UnixStream> = (0..8).map(|number| client(&server, number).unwrap()).collect();
    update(&server, &Gone::default(), Instant::now());
    for (place, client) in (0..).zip(&clients) {
        assert_eq!(heard(client), (Answer::Waiting, place, String::new()));
    }
    for (number, client) in (0..8).zip(&clients) {
        ready(&server, 100 + number);
        assert_eq!(heard(client).0, Answer::Ok);
        let session = &server.lock().sessions[&(100 + number)];
        assert_eq!((session.pid, session.unwelcomed), (number, false));
    }
    assert!(server.lock().gpu.queue.is_empty() && server.lock().gpu.idle.is_empty());
}

#[test]
fn who_is_ended_before_its_session_has_begun_is_refused() {
    let server = server(&[]);
    let client = client(&server, 1).unwrap();
    server.lock().gpu.idle.push_back(Worker::fake(100));
    let assigned = assign(&server, Kind::Gpu).unwrap();
    assert_eq!(end_sessions(&server, true, |_, _| Some("by a test".to_owned())), 1);
    hand_over(&server, Kind::Gpu, assigned);
    assert_eq!(heard(&client), (Reason::NotAllowed.answer(), 0, "by a test".to_owned()));
    assert!(server.lock().sessions.is_empty() && server.lock().gpu.queue.is_empty());
}

#[test]
fn who_has_fewer_sessions_comes_first() {
    let server = server(&["--max-sessions", "20"]);
    let mut clients = Vec::new();
    let mut join = |number: u32, principal: &str| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        clients.push(ours);
        let limits = Limits::test(principal);
        let connection = Arc::new(Control::Local(theirs));
        let parked = Parked { connection, pid: number, limits, ..Parked::fake() };
        super::join(&server, Kind::Gpu, parked).map_err(|Refused(_, reason)| reason)
    };
    let order = || server.lock().gpu.queue.iter().map(|parked| parked.pid).collect::<Vec<_>>();
    for number in 0..5 {
        join(number, "many").unwrap();
    }
    // Behind the first of the others, which would be the first of its principal, too.
    join(10, "few").unwrap();
    join(11, "few").unwrap();
    join(20, "one").unwrap();
    assert_eq!(order(), [0, 10, 20, 1, 11, 2, 3, 4]);
    // Running ones count.
    for pid in 100..103 {
        ready(&server, pid);
    }
    assert_eq!(order(), [1, 11, 2, 3, 4]);
    join(30, "new").unwrap();
    join(12, "few").unwrap();
    assert_eq!(order(), [30, 1, 11, 2, 12, 3, 4]);
}

#[test]
fn sessions_under_all_leases_of_a_client_count_for_its_pace() {
    let server = server(&[]);
    let begin = |principal: &str| {
        let limits = Limits::test(principal);
        let mut rules = Parked::fake().rules;
        rules.sessions_per_minute = Some((1, "sessions_per_minute".into()));
        join(&server, Kind::Gpu, Parked { limits, rules, ..Parked::fake() }).map_err(|r| r.0)
    };
    assert_eq!(begin("a 1"), Ok(()));
    for lease in ["a 2", "a"] {
        assert_eq!(begin(lease), Err(Reason::Pace), "{lease}");
    }
    for other in ["b", "cert:spiffe://x/a", "cert:spiffe://x/b"] {
        assert_eq!(begin(other), Ok(()), "{other}");
    }
}

#[test]
fn one_client_leaves_room_for_others() {
    let server = server(&["--max-sessions", "16"]);
    let _clients: Vec<UnixStream> = (0..14).map(|number| client(&server, number).unwrap()).collect();
    let refused = client(&server, 14).unwrap_err();
    assert!(refused.contains("its maximum of 14 sessions (--client-sessions)"), "{refused}");
    let limits = Limits::test("another");
    join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|r| r.1).unwrap();
}

#[test]
fn leases_give_a_client_no_more_sessions_and_no_better_place_in_the_queue() {
    let server = server(&["--max-sessions", "8"]);
    let begin = |principal: &str, sessions| {
        let limits = Limits { sessions, ..Limits::test(principal) };
        join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
    };
    for _ in 0..6 {
        begin("a", None).unwrap();
    }
    begin("a 1", None).unwrap();
    assert_eq!(begin("a 2", None), Err(Reason::ClientFull));
    begin("b", None).unwrap();
    let order = |server: &Server| {
        let state = server.lock();
        state.gpu.queue.iter().map(|parked| parked.limits.principal.clone()).collect::<Vec<_>>()
    };
    assert_eq!(order(&server), ["a", "b", "a", "a", "a", "a", "a", "a 1"]);
    // The same goes for the limit of a rule.
    let server = self::server(&["--max-sessions", "8"]);
    let begin = |principal: &str, sessions| {
        let limits = Limits { sessions, ..Limits::test(principal) };
        join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
    };
    assert_eq!((begin("a", Some(2)), begin("a 1", Some(2))), (Ok(()), Ok(())));
    for principal in ["a", "a 1", "a 2"] {
        assert_eq!(begin(principal, Some(2)), Err(Reason::ClientFull));
    }
}

/// A server of two devices, of which another client has the first for itself, and clients that ask for
/// that one.
fn clients_without_a_device(server: &Server, count: u32) -> Vec<(Arc<Control>, UnixStream)> {
    let exclusive = Limits { exclusive: true, devices: vec![0], ..Limits::test("e") };
    let mut session = session_of_limits(exclusive);
    session.devices = vec![0];
    let mut state = server.lock();
    state.serving = Some(("software".into(), vec!["a".into(), "b".into()]));
    state.sessions.insert(50, session);
    drop(state);
    let join = |_| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Arc::new(Control::Local(theirs));
        let parked = Parked { connection: Arc::clone(&connection), devices: vec![0], ..Parked::fake() };
        join(server, Kind::Gpu, parked).map_err(|refused| refused.1).unwrap();
        (connection, ours)
    };
    (0..count).map(join).collect()
}

#[test]
fn no_workers_are_kept_for_clients_that_wait_for_devices() {
    let server = server(&["--workers=2"]);
    let clients = clients_without_a_device(&server, 3);
    let fill = || server.lock().gpu.idle.extend((100..105).map(Worker::fake));
    let idle = || server.lock().gpu.idle.len();
    fill();
    update(&server, &Gone::default(), Instant::now());
    assert_eq!((idle(), server.lock().gpu.queue.len()), (2, 3));
    // The devices become free, and the clients hang up before they are served.
    server.lock().sessions.remove(&50);
    server.lock().gpu.idle.clear();
    fill();
    let enough = |ready| has_enough(&server.lock(), &server.options, Kind::Gpu, ready);
    assert!(enough(5) && !enough(4));
    let waiting = clients.into_iter().map(|(connection, _)| connection).collect();
    update(&server, &Gone { waiting, ..Gone::default() }, Instant::now());
    assert_eq!((idle(), server.lock().gpu.queue.len()), (2, 0));
}

#[test]
fn a_client_without_a_device_is_told_why_even_if_no_worker_was_ever_ready() {
    let server = server(&["--workers=0", "--wait-seconds=60"]);
    let clients = clients_without_a_device(&server, 1);
    update(&server, &Gone::default(), Instant::now() + Duration::from_secs(61));
    let (answer, _, why) = heard(&clients[0].1);
    assert!(answer == Reason::DevicesTaken.answer() && why.contains("others have devices 0"), "{why}");
}

#[test]
fn a_client_that_waits_begins_by_the_rules_of_then() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clients.toml");
    std::fs::write(&path, "devices = [0, 1]\n").unwrap();
    let server =
        server(&["--backend=software", "--software-devices=2", &format!("--clients={}", path.display())]);
    let read = |rules: &str| {
        std::fs::write(&path, rules).unwrap();
        server.set_policy(crate::parent::state::read_policy(&server.options).unwrap());
    };
    server.lock().serving = Some(("software".into(), vec!["a".into(), "b".into()]));
    let wait = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let principal = Principal::test();
        let grant = grants::of(&server, &server.lock(), Kind::Gpu, &principal, None).map_err(|r| r.1);
        let rules_read = server.lock().rules_read;
        let connection = Arc::new(Control::Local(theirs));
        let mut parked = Parked { connection, principal, rules_read, ..Parked::fake() };
        parked.take(grant.unwrap());
        join(&server, Kind::Gpu, parked).map_err(|r| r.1).unwrap();
        ours
    };
    let client = wait();
    read("devices = [1]\nweight = 7\n");
    ready(&server, 100);
    assert_eq!(heard(&client).0, Answer::Ok);
    {
        let state = server.lock();
        let session = &state.sessions[&100];
        assert_eq!((&session.devices, session.limits.weight), (&vec![1], 7));
    }
    let client = wait();
    read("lease_required = true\n");
    update(&server, &Gone::default(), Instant::now());
    let (answer, _, why) = heard(&client);
    assert!(answer == Reason::NoLease.answer() && why.contains("lease_required"), "{why}");
    assert!(server.lock().gpu.queue.is_empty());
}

#[test]
fn a_client_that_hangs_up_leaves_the_queue() {
    let server = server(&[]);
    let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
    let mut clients = clients.into_iter();
    drop(clients.next());
    let gone = wait(&server);
    assert_eq!((gone.waiting.len(), gone.sharing.len()), (1, 0));
    update(&server, &gone, Instant::now());
    for (place, client) in (0..).zip(clients) {
        assert_eq!(heard(&client), (Answer::Waiting, place, String::new()));
    }
}

#[test]
fn a_session_that_began_while_its_first_connection_was_closed_may_go_on() {
    let server = server(&[]);
    drop(client(&server, 0).unwrap());
    let gone = wait(&server);
    // Meanwhile it is served.
    ready(&server, 100);
    update(&server, &gone, Instant::now());
    update(&server, &Gone::default(), Instant::now() + 2 * LEAVES_WITHIN);
    assert_eq!(server.lock().sessions[&100].leaving, Leaving::No);
}

/// A client that waits for both devices for itself, another one behind it that needs one, a ready worker,
/// and a session with one of the devices.
fn one_waits_for_devices_that_are_kept_for_another(server: &Server) -> [(Arc<Control>, UnixStream); 2] {
    let mut session = session_of_limits(Limits::test("b"));
    session.devices = vec![0];
    {
        let mut state = server.lock();
        state.serving = Some(("software".into(), vec!["a".into(), "b".into()]));
        state.sessions.insert(50, session);
        state.gpu.idle.push_back(Worker::fake(100));
    }
    let exclusive = Limits { exclusive: true, devices: vec![0, 1], ..Limits::test("e") };
    let clients = [exclusive, Limits::test("s")].map(|limits| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Arc::new(Control::Local(theirs));
        let principal = Principal::named(&limits.principal);
        let parked = Parked { connection: Arc::clone(&connection), limits, principal, ..Parked::fake() };
        join(server, Kind::Gpu, parked).map_err(|refused| refused.1).unwrap();
        (connection, ours)
    });
    assert_eq!(server.lock().gpu.queue.len(), 2);
    clients
}

#[test]
fn devices_that_are_kept_for_a_client_are_free_when_it_gives_up() {
    let server = server(&[]);
    let [(gone, _), (_, served)] = one_waits_for_devices_that_are_kept_for_another(&server);
    update(&server, &Gone { waiting: vec![gone], ..Gone::default() }, Instant::now());
    assert!(server.lock().gpu.queue.is_empty());
    assert_eq!(heard(&served).0, Answer::Waiting);
    assert_eq!(heard(&served).0, Answer::Ok);
}

#[test]
fn devices_that_are_kept_for_a_client_are_free_when_it_may_no_longer_wait() {
    let server = server(&[]);
    let [(_, refused), (_, served)] = one_waits_for_devices_that_are_kept_for_another(&server);
    let is_revoked = |who: &Principal, _| (who.name == "e").then(|| "by a test".to_owned());
    assert_eq!(end_sessions(&server, true, is_revoked), 1);
    assert!(server.lock().gpu.queue.is_empty());
    assert_eq!(heard(&refused).0, Reason::NotAllowed.answer());
    assert_eq!(heard(&served).0, Answer::Ok);
}

#[test]
fn a_client_that_reads_nothing_is_dropped_from_the_queue() {
    let server = server(&["--wait-seconds", "1000000"]);
    let _client = client(&server, 0).unwrap();
    let mut now = Instant::now();
    while !server.lock().gpu.queue.is_empty() {
        now += TELL_EVERY;
        update(&server, &Gone::default(), now);
    }
    assert!(server.lock().sessions.is_empty());
}

#[test]
fn clients_are_refused_only_when_no_session_begins_for_too_long() {
    let server = server(&["--wait-seconds", "60"]);
    let begun = Instant::now();
    let clients: Vec<UnixStream> = (0..3).map(|number| client(&server, number).unwrap()).collect();
    server.lock().gpu.moved = Some(begun + Duration::from_secs(50));
    update(&server, &Gone::default(), begun + Duration::from_secs(100));
    assert_eq!(server.lock().gpu.queue.len(), 3);
    update(&server, &Gone::default(), begun + Duration::from_secs(111));
    assert!(server.lock().gpu.queue.is_empty());
    heard(&clients[0]);
    let (answer, _, reason) = heard(&clients[0]);
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("within 60 s (--wait-seconds)"), "{reason}");
}

#[test]
fn clients_are_refused_with_the_reason_when_workers_keep_failing() {
    let server = server(&[]);
    let waits = client(&server, 0).unwrap();
    {
        let mut state = server.lock();
        state.gpu.failures = GIVE_UP;
        state.gpu.failed = GIVE_UP.into();
        state.gpu.last_failure = "it was killed by signal 11".into();
    }
    let late = client(&server, 1).unwrap();
    update(&server, &Gone::default(), Instant::now());
    let (answer, _, reason) = heard(&waits);
    assert!(answer == Answer::NoResources && reason.contains("killed by signal 11"), "{reason}");
    // A later client waits until another worker has failed.
    assert_eq!(heard(&late).0, Answer::Waiting);
    server.lock().gpu.failed += 1;
    update(&server, &Gone::default(), Instant::now());
    assert_eq!(heard(&late).0, Answer::NoResources);
}

#[test]
fn sessions_that_have_ended_count_only_if_there_are_as_many_again() {
    let server = server(&["--max-sessions", "2"]);
    let mut clients = Vec::new();
    for number in 0..4 {
        clients.push(client(&server, number).unwrap());
        ready(&server, 100 + number);
        server.lock().sessions.get_mut(&(100 + number)).unwrap().ended = number < 2;
    }
    assert!(client(&server, 4).unwrap_err().contains("--max-sessions"));
    server.lock().sessions.get_mut(&102).unwrap().ended = true;
    assert!(client(&server, 4).unwrap_err().contains("--max-sessions"));
    server.lock().sessions.remove(&100);
    client(&server, 4).unwrap();
}

#[test]
fn one_client_does_not_fill_the_server_with_sessions_that_have_ended() {
    let server = server(&["--max-sessions", "8"]);
    let begin = |principal: &str| {
        let limits = Limits::test(principal);
        join(&server, Kind::Gpu, Parked { limits, ..Parked::fake() }).map_err(|refused| refused.0)
    };
    // Their workers stay.
    for pid in 100..114 {
        begin("a").unwrap();
        ready(&server, pid);
        server.lock().sessions.get_mut(&pid).unwrap().ended = true;
    }
    assert_eq!(begin("a"), Err(Reason::ClientFull));
    assert_eq!(begin("b"), Ok(()));
}

#[test]
fn a_worker_that_stays_after_the_end_of_its_session_is_killed() {
    let server = server(&[]);
    let client = client(&server, 0).unwrap();
    ready(&server, 100);
    server.lock().workers.insert(100, Managed::fake(100, Stage::Serving));
    let leaving = || server.lock().sessions[&100].leaving;
    let now = Instant::now();
    update(&server, &Gone::default(), now);
    assert_eq!(leaving(), Leaving::No);
    server.lock().sessions.get_mut(&100).unwrap().ended = true;
    update(&server, &Gone::default(), now);
    assert_eq!(leaving(), Leaving::Until(now + LEAVES_WITHIN));
    // No client whose memory it could touch waits for any other.
    {
        let mut state = server.lock();
        let session = state.sessions.get_mut(&100).unwrap();
        (session.presence, session.leaving) = (None, Leaving::No);
    }
    update(&server, &Gone::default(), now);
    assert_eq!(leaving(), Leaving::Until(now + EXITS_WITHIN));
    update(&server, &Gone::default(), now + EXITS_WITHIN);
    assert_eq!(leaving(), Leaving::Killed);
    drop(client);
}

#[test]
fn waiting_clients_count_against_the_session_limit() {
    let server = server(&["--max-sessions", "1"]);
    let _first = client(&server, 0).unwrap();
    assert!(client(&server, 1).unwrap_err().contains("--max-sessions"));
}
