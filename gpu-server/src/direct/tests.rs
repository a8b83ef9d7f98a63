mod waking;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::sync::mpsc::channel;

use super::awake::*;
use super::buffers::*;
use super::outgoing::*;
use super::*;
use crate::doubles::{Listener, Told};
use crate::driver::call::{Call, End};
use crate::driver::gpu::Carrier;
use host_bridge::endpoint::Mapped;
use host_bridge::verbs::software::{self, Outside};
use host_bridge::verbs::{Device, Domain, PieceBuffer};
use proptest::prelude::*;
use protocol::device::text;
use protocol::link::{DIRECT_VERBS_SINCE, DirectHeader, DirectQueue};
use protocol::ops::direct::{MAX_PIECE, PIECES};

/// How long anything may take before a test fails.
const LONG: Duration = Duration::from_secs(240);

/// Copies nothing, and says that it is done.
pub(super) struct Nothing;

impl Carrier for Nothing {
    fn carry(&self, _rows: &Rows, _offset: u64, _bytes: Mapped, _seq: u64, end: End) {
        end(Status::SUCCESS);
    }
}

impl Directs {
    /// A session's connections, of a daemon that refuses everything.
    pub(crate) fn double() -> Arc<Directs> {
        static IDENTITY: LazyLock<Arc<Identity>> =
            LazyLock::new(|| Arc::new(Identity::generate().expect("a key")));
        let bell = std::fs::File::options().write(true).open("/dev/null").expect("a bell");
        let broker = Broker::new(Arc::new(bell.into()));
        broker.close();
        Directs::new(Arc::clone(&IDENTITY), broker, None, true)
    }

    /// The same, with prepared connections of this number in both directions, for pieces at any address.
    /// Nothing is copied. Returns the other ends, too.
    pub(crate) fn prepared_double(direct: u32) -> (Arc<Directs>, [UnixStream; 2]) {
        let directs = Directs::double();
        let ((ours, theirs), (from, to)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let outgoing = Outgoing::start(Stream::from(OwnedFd::from(ours)), None, Arc::default()).unwrap();
        let incoming = Arc::new(Incoming::new(Arc::default(), Some((direct, Arc::clone(&directs.failures)))));
        incoming.over(&Arc::new(Stream::from(OwnedFd::from(to))));
        for named in [&outgoing.named, &incoming.named] {
            named.prepare(Near { context: ContextId(0), stream: StreamId(0), mirrors: Arc::new(Nothing) });
            named.name((0, u64::MAX), PieceMemory::Mirror).unwrap();
        }
        directs.prepared.store(true, Ordering::Release);
        lock(&directs.table).outgoing.insert(direct, Some(outgoing));
        lock(&directs.table).incoming.insert(direct, incoming);
        (directs, [theirs, from])
    }
}

#[test]
fn all_connections_of_a_session_may_be_opened_at_the_same_moment() {
    let directs = Directs::double();
    let peers: Vec<UnixStream> = (0..MAX_DIRECTS as u32)
        .map(|direct| {
            let (token, (ours, theirs)) = ([direct as u8; 16], UnixStream::pair().unwrap());
            let offer = Offer { direct, key: Fingerprint([0; 32]), secret: [0; 32] };
            lock(&directs.table).offers.insert(token, offer);
            directs.knock(token, ours.into(), false);
            theirs
        })
        .collect();
    // Each waits for its client's part of TLS's handshake.
    assert_eq!(directs.strangers.load(Ordering::Acquire), MAX_DIRECTS);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    directs.knock([0; 16], ours.into(), false);
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "more than a session may have");
    drop(peers);
    test_kit::until("they are gone", || directs.strangers.load(Ordering::Acquire) == 0);
}

#[test]
fn memory_does_not_leave_while_pieces_are_expected_and_no_piece_is_sent_while_it_is_away() {
    let (directs, [mut theirs, _from]) = Directs::prepared_double(1);
    let send = |number| directs.send_now(&DirectSendNow { direct: 1, number, src: 0, len: 1 }, 1);
    let receive = |number| directs.receive(&DirectReceive { direct: 1, number, dst: 0, len: 1 }, 1);
    let still = directs.hold_still().expect("nothing moves");
    assert_eq!((send(1), receive(1)), (Err(Status::NOT_READY), Err(Status::NOT_READY)));
    drop(still);
    // Sent at last, and nothing of it is under way.
    assert_eq!(send(1), Ok(()));
    let mut header = DirectHeader::new_zeroed();
    theirs.read_exact(header.as_mut_bytes()).unwrap();
    assert_eq!((header.number, header.len), (1, 1));
    drop(directs.hold_still().expect("nothing moves"));
    assert_eq!(receive(1), Ok(()));
    assert!(directs.hold_still().is_none());
    // Refused, and nothing is still.
    assert_eq!(send(2), Ok(()));
}

/// Collects copies, and makes them only when the test asks for it.
#[derive(Default)]
struct Patient(Mutex<Vec<End>>);

impl Carrier for Patient {
    fn carry(&self, _rows: &Rows, _offset: u64, _bytes: Mapped, _seq: u64, end: End) {
        lock(&self.0).push(end);
    }
}

impl Patient {
    fn copies(&self) -> usize {
        let ends = std::mem::take(&mut *lock(&self.0));
        ends.into_iter().map(|end| end(Status::SUCCESS)).count()
    }
}

/// Sends a box from memory that no other device can use.
fn send_all(directs: &Directs, direct: u32, series: Series) -> Result<(), Status> {
    directs.send_all(direct, series, 4096, |_, _| Err(Status::NOT_FOUND))
}

#[test]
fn memory_does_not_leave_until_a_box_is_sent() {
    let (directs, [mut theirs, _from]) = Directs::prepared_double(1);
    let patient = Arc::<Patient>::default();
    let series = |first| Series::new(Rows::line(0, 3), 2, first, Arc::<Patient>::clone(&patient)).unwrap();
    let still = directs.hold_still().expect("nothing moves");
    assert_eq!(send_all(&directs, 1, series(1)), Err(Status::NOT_READY));
    drop(still);
    send_all(&directs, 1, series(1)).unwrap();
    assert!(directs.hold_still().is_none());
    assert_eq!(patient.copies(), 2);
    drop(directs.hold_still().expect("nothing moves"));
    for (number, len) in [(1, 2), (2, 1)] {
        let mut header = DirectHeader::new_zeroed();
        theirs.read_exact(header.as_mut_bytes()).unwrap();
        assert_eq!((header.number, header.len), (number, len));
        theirs.read_exact(&mut [0; 2][..len as usize]).unwrap();
    }
}

#[test]
fn pieces_of_several_devices_are_sent_in_the_order_of_their_numbers() {
    let (directs, [mut theirs, _from]) = Directs::prepared_double(1);
    let [slow, fast] = [(); 2].map(|()| Arc::<Patient>::default());
    let send = |first, device: &Arc<Patient>| {
        let series = Series::new(Rows::line(0, 3), 2, first, Arc::<Patient>::clone(device)).unwrap();
        send_all(&directs, 1, series).unwrap();
    };
    send(1, &slow);
    send(3, &fast);
    assert_eq!([fast.copies(), slow.copies()], [2, 2]);
    // One device copies none of its pieces, and says nothing more.
    send(5, &slow);
    send(7, &fast);
    assert_eq!(fast.copies(), 2);
    lock(&slow.0).clear();
    for (number, len) in [(1, 2), (2, 1), (3, 2), (4, 1), (5, 0), (6, 0), (7, 2), (8, 1)] {
        let mut header = DirectHeader::new_zeroed();
        theirs.read_exact(header.as_mut_bytes()).unwrap();
        assert_eq!((header.number, header.len), (number, len));
        theirs.read_exact(&mut [0; 2][..len as usize]).unwrap();
    }
}

#[test]
fn memory_leaves_at_last_if_nothing_is_taken_of_a_box_which_is_given_up() {
    let (directs, [_theirs, _from]) = Directs::prepared_double(1);
    let outgoing = lock(&directs.table).outgoing[&1].clone().unwrap();
    // More than there are buffers for.
    let series = Series::new(Rows::line(0, 64 << 20), 1 << 20, 1, Arc::new(Nothing)).unwrap();
    send_all(&directs, 1, series).unwrap();
    outgoing.abort_if_stuck(Instant::now());
    assert!(directs.hold_still().is_none(), "it has some time");
    assert!(lock(&outgoing.jobs).is_some());
    outgoing.abort_if_stuck(Instant::now() + 2 * incoming::IDLE);
    let until = Instant::now() + LONG;
    while directs.hold_still().is_none() {
        assert!(Instant::now() < until, "the box keeps the memory");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn memory_leaves_at_last_if_nothing_comes_of_a_box_which_is_given_up() {
    let (directs, [_theirs, mut from]) = Directs::prepared_double(1);
    let (reading, (told, answers)) = (directs.incoming(1).unwrap(), channel());
    let stream = lock(&reading.state).stream.clone().unwrap();
    std::thread::spawn(move || reading.read(&stream, None, LONG));
    let told = Mutex::new(told);
    let client = Listener::new(move |said: Told<'_>| {
        if let Told::Reply { status, .. } = said {
            lock(&told).send(status).unwrap();
        }
    });
    let call = Call::new(Arc::new(client));
    let series = Series::new(Rows::line(0, 3), 2, 1, Arc::new(Nothing)).unwrap();
    directs.receive_all(1, series, || call.later()).unwrap();
    // Its first piece.
    from.write_all(header(1, 2).as_bytes()).unwrap();
    from.write_all(&[0; 2]).unwrap();
    let until = Instant::now() + LONG;
    while directs.hold_still().is_none() {
        assert!(Instant::now() < until, "the box keeps the memory");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(answers.recv_timeout(LONG), Ok(Status::DEVICE_UNAVAILABLE));
}

#[test]
fn a_box_is_given_up_for_its_own_wait_and_not_for_that_of_a_box_that_is_gone() {
    let (directs, _peers) = Directs::prepared_double(1);
    let incoming = directs.incoming(1).unwrap();
    let call = Call::new(Arc::new(Listener::new(|_: Told<'_>| {})));
    let await_box = |address, first| {
        let series = Series::new(Rows::line(address, 2), 2, first, Arc::new(Nothing)).unwrap();
        directs.receive_all(1, series, || call.later()).unwrap();
        lock(&incoming.state).awaited.back().unwrap().named
    };
    let first = await_box(0, 1);
    test_kit::until("the clock goes on", || first.elapsed() > Duration::ZERO);
    let second = await_box(100, 2);
    let long_enough = |named: Instant| {
        incoming.give_up_idle(named + incoming::IDLE);
        lock(&incoming.state).awaited.is_empty()
    };
    // The memory of the first is freed.
    directs.forget(0, 2);
    assert!(!long_enough(first));
    assert!(long_enough(second));
    // Nothing of the last comes before the one in front of it.
    let (first, _) = (await_box(0, 3), await_box(100, 4));
    assert!(long_enough(first));
}

#[test]
fn memory_is_freed_only_when_no_piece_of_a_box_is_being_copied() {
    let (directs, _peers) = Directs::prepared_double(1);
    let patient = Arc::<Patient>::default();
    let series = Series::new(Rows::line(100, 8), 8, 1, Arc::<Patient>::clone(&patient)).unwrap();
    send_all(&directs, 1, series).unwrap();
    // Other memory does not wait.
    directs.forget(108, 8);
    directs.forget(92, 8);
    assert_eq!(lock(&patient.0).len(), 1);
    let (freed, is_freed) = channel();
    let freeing = Arc::clone(&directs);
    std::thread::spawn(move || {
        freeing.forget(107, 1);
        freed.send(()).unwrap();
    });
    assert!(is_freed.recv_timeout(Duration::from_millis(50)).is_err());
    assert_eq!(patient.copies(), 1);
    is_freed.recv_timeout(LONG).unwrap();
}

/// A receiving end that reads from the other end of a socket.
fn receiving(patience: Duration) -> (UnixStream, Arc<Incoming>, std::thread::JoinHandle<String>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let incoming = Arc::new(Incoming::new(Arc::default(), None));
    let reading = Arc::clone(&incoming);
    let stream = Stream::from(OwnedFd::from(theirs));
    let thread = std::thread::spawn(move || reading.read(&stream, None, patience));
    (ours, incoming, thread)
}

fn header(number: u64, len: u32) -> DirectHeader {
    DirectHeader { number, len, reserved: 0 }
}

#[test]
fn a_peer_that_stops_in_the_middle_of_a_piece_is_given_up() {
    let (mut ours, incoming, thread) = receiving(Duration::from_millis(10));
    ours.write_all(&[header(1, 10).as_bytes(), &[0; 9]].concat()).unwrap();
    // It still has the connection.
    thread.join().unwrap();
    assert_eq!(lock(&incoming.state).look(1), Some(Err(Status::DEVICE_UNAVAILABLE)));
    drop(ours);
}

#[test]
fn between_pieces_a_peer_has_all_the_time() {
    let (mut ours, incoming, thread) = receiving(Duration::from_millis(1));
    for number in 1..5 {
        std::thread::sleep(Duration::from_millis(20));
        ours.write_all(&[header(number, 1).as_bytes(), &[0]].concat()).unwrap();
    }
    drop(ours);
    thread.join().unwrap();
    assert_eq!(lock(&incoming.state).look(1), Some(Ok(4)));
}

#[test]
fn the_last_number_that_there_is_can_arrive() {
    let (mut ours, incoming, thread) = receiving(LONG);
    for number in [1, 2, 4, u64::MAX - 1, u64::MAX] {
        ours.write_all(&[header(number, 1).as_bytes(), &[0]].concat()).unwrap();
    }
    drop(ours);
    thread.join().unwrap();
    let look = |number| lock(&incoming.state).look(number);
    assert_eq!(look(u64::MAX), Some(Ok(u64::MAX)));
    assert_eq!([1, 2, 4, u64::MAX - 1].map(look), [2, 2, 4, u64::MAX].map(|upto| Some(Ok(upto))));
}

/// What a receiving end without verbs answers to an offer.
fn answer_of(mut ours: &UnixStream) -> DirectQueue {
    ours.write_all(&[DirectHeader::offer().as_bytes(), DirectQueue::new_zeroed().as_bytes()].concat())
        .unwrap();
    let mut answer = DirectQueue::new_zeroed();
    ours.read_exact(answer.as_mut_bytes()).unwrap();
    answer
}

#[test]
fn an_end_that_does_not_use_verbs_says_so_and_takes_pieces_from_the_socket() {
    let (mut ours, incoming, thread) = receiving(LONG);
    let answer = answer_of(&ours);
    assert_eq!(answer.queue_pair, 0);
    assert!(untext(&answer.reason).contains("--direct-verbs"), "{}", untext(&answer.reason));
    ours.write_all(&[header(1, 1).as_bytes(), &[1]].concat()).unwrap();
    drop(ours);
    thread.join().unwrap();
    assert_eq!(lock(&incoming.state).look(1), Some(Ok(1)));
    assert_eq!(incoming.bytes.over_verbs.load(Ordering::Relaxed), 0);
}

#[test]
fn an_offer_of_verbs_comes_first_and_whole_or_ends_the_connection() {
    let offer = DirectHeader::offer();
    let whole = [offer.as_bytes(), DirectQueue::new_zeroed().as_bytes()].concat();
    let late = [header(1, 1).as_bytes(), &[1], &whole].concat();
    for bad in [
        DirectHeader { len: offer.len - 1, ..offer }.as_bytes(),
        DirectHeader { len: u32::MAX, ..offer }.as_bytes(),
        DirectHeader { reserved: 2, ..offer }.as_bytes(),
        DirectHeader { number: 1, ..offer }.as_bytes(),
        &whole[..whole.len() - 1],
        &late,
        &[&whole[..], &whole[..]].concat(),
    ] {
        let (mut ours, incoming, thread) = receiving(LONG);
        ours.write_all(bad).unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        assert_ne!(thread.join().unwrap(), "closed", "{bad:?}");
        assert!(lock(&incoming.state).over);
    }
}

/// What the sending end makes of these bytes as the answer to its offer.
fn asked(answer: &[u8]) -> io::Result<Result<DirectQueue, String>> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(answer).unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    let asked = verbs::ask(&Stream::from(OwnedFd::from(theirs)), &DirectQueue::new_zeroed());
    let mut offer = [0; size_of::<DirectHeader>() + size_of::<DirectQueue>()];
    ours.read_exact(&mut offer).unwrap();
    assert!(offer.starts_with(DirectHeader::offer().as_bytes()));
    asked
}

#[test]
fn any_answer_to_an_offer_is_an_end_a_refusal_or_a_lost_connection() {
    let refusal = DirectQueue { reason: text("no device"), ..DirectQueue::new_zeroed() };
    assert_eq!(asked(refusal.as_bytes()).unwrap(), Err("no device".into()));
    let good = DirectQueue { queue_pair: 17, receives: u32::MAX, ..refusal };
    assert_eq!(asked(good.as_bytes()).unwrap(), Ok(good));
    assert!(asked(&good.as_bytes()[1..]).is_err() && asked(&[]).is_err());
    assert_eq!(asked(&[0xff; 256]).unwrap().unwrap().receives, u32::MAX);
}

#[test]
fn receives_are_granted_by_bytes_and_the_end_of_the_socket_is_seen() {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let stream = Stream::from(OwnedFd::from(theirs));
    let mut sum = 0;
    let mut granted = |most: usize| {
        verbs::granted(&stream, |receives| {
            sum += receives;
            if sum > most { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) }
        })
        .map(|worked| (worked, sum))
    };
    assert_eq!(granted(16).unwrap(), (false, 0));
    ours.write_all(&[2, 14]).unwrap();
    assert_eq!(granted(16).unwrap(), (true, 16));
    ours.write_all(&[1; 16]).unwrap();
    assert!(granted(16).is_err());
    // A peer that grants nothing again and again would otherwise never have to take a piece.
    ours.write_all(&[0]).unwrap();
    assert!(granted(usize::MAX).unwrap_err().to_string().contains("0 more receives"));
    drop(ours);
    assert!(granted(usize::MAX).is_err(), "it has read to the end");
}

/// A sending end whose pieces go over verbs to a peer outside, which has this many receives for them.
fn sending_over_verbs(verbs: &Verbs, receives: u32) -> (UnixStream, Stream, Arc<Outgoing>, verbs::Sender) {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let stream = Stream::from(OwnedFd::from(theirs));
    // One more, for the probe.
    let answer =
        DirectQueue { queue_pair: 0xff_fff0, mtu: 4096, receives: receives + 1, ..DirectQueue::new_zeroed() };
    ours.write_all(answer.as_bytes()).unwrap();
    software::outside(Outside::Done(0));
    let queue = verbs::offer(Some(verbs), &stream, DIRECT_VERBS_SINCE).unwrap().unwrap();
    software::outside(Outside::Kept);
    stream.set_nonblocking(true).unwrap();
    let (jobs, due) = channel();
    let domain = Some(Arc::clone(queue.domain()));
    let bell = Some(Arc::new(Bell::new().unwrap()));
    let outgoing = Outgoing::new(jobs, &Arc::default(), bell, domain, false);
    (ours, stream, Arc::new(outgoing), verbs::Sender::new(queue, Jobs::new(due, Duration::ZERO)))
}

#[test]
fn a_piece_that_a_processor_was_to_copy_costs_no_buffer_when_the_connection_is_lost() {
    let (jobs, due) = channel();
    let outgoing = Arc::new(Outgoing::new(jobs, &Arc::default(), None, None, false));
    let copies_later = |number| {
        let mut piece = outgoing.piece(number);
        piece.by_processor = true;
        piece.fill(1).unwrap();
        outgoing.run(move || piece.finish(Status::SUCCESS));
    };
    let free = || lock(&outgoing.pool.state).free.len();
    copies_later(1);
    copies_later(2);
    assert_eq!(free(), 0);
    // Both are still due. The queue ends before the connection knows.
    drop(due);
    assert_eq!(free(), 2);
    copies_later(3);
    assert_eq!(free(), 2);
}

#[test]
fn a_pieces_header_and_its_bytes_are_sent_together() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    // A socket that keeps apart what is sent apart.
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let outgoing = Outgoing::start(Stream::from(ours), None, Arc::default()).unwrap();
    let mut theirs = std::fs::File::from(theirs);
    for number in 1..4 {
        send_one(&outgoing, number);
        let mut message = [0; 64];
        let len = theirs.read(&mut message).unwrap();
        let expected = [header(number, 1).as_bytes(), &[number as u8]].concat();
        assert_eq!(message[..len], expected);
    }
    outgoing.end();
}

#[test]
fn the_sending_thread_is_woken_while_a_device_still_copies_and_then_polls() {
    let (jobs, due) = channel();
    let outgoing = Arc::new(Outgoing::new(jobs, &Arc::default(), None, None, true));
    let directs = Directs::double();
    lock(&directs.table).outgoing.insert(1, Some(Arc::clone(&outgoing)));
    let patient = Arc::<Patient>::default();
    let series = Series::new(Rows::line(0, 3), 4, 1, Arc::<Patient>::clone(&patient)).unwrap();
    send_all(&directs, 1, series).unwrap();
    let mut due = Jobs::new(due, LONG);
    let stream = Stream::closed().unwrap();
    let (woken, mut moved) = (due.next(&stream, &mut false).unwrap(), true);
    assert!(matches!(woken, Job::Soon) && due.judge(woken).is_none());
    // The device is done when the thread looks already.
    let copied = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        patient.copies()
    });
    assert!(matches!(due.next(&stream, &mut moved).unwrap(), Job::Piece(1, _, 3)));
    assert_eq!((copied.join().unwrap(), due.polls.sleeps), (1, 0));
    // One that does not poll sleeps.
    let (jobs, waits) = channel();
    jobs.send(Job::Nothing(1)).unwrap();
    let mut waits = Jobs::new(waits, Duration::ZERO);
    assert!(waits.next(&stream, &mut moved).is_some());
    assert_eq!(waits.polls.sleeps, 1);
    lock(&directs.table).outgoing.clear();
}

#[test]
fn the_receiving_thread_is_woken_when_a_piece_is_expected_and_then_polls() {
    let call = Call::new(Arc::new(Listener::new(|_: Told<'_>| {})));
    let patient = Arc::<Patient>::default();
    let boxes = |incoming: &Incoming, first| {
        let series = Series::new(Rows::line(0, 4), 4, first, Arc::<Patient>::clone(&patient)).unwrap();
        incoming.receive_all(series, || call.later()).unwrap();
    };
    let single = |incoming: &Incoming, number| {
        let (to, memory) = (Rows::line(0, 4), PieceMemory::Device);
        let carrier = Arc::<Patient>::clone(&patient);
        incoming.expect(number, Expected { to, memory, seq: 1, carrier }).unwrap();
    };
    for expects in [&boxes as &dyn Fn(&Incoming, u64), &single] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut incoming = Incoming::new(Arc::default(), None);
        incoming.alarm = Alarm::new(Duration::from_millis(1));
        let alarm = incoming.alarm.as_ref().unwrap();
        let stream = Stream::from(OwnedFd::from(theirs));
        let mut polls = Polls::new(Duration::from_millis(1));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                alarm.wait(&stream, &mut polls).unwrap();
                polls.sleeps
            });
            test_kit::until("it sleeps", || alarm.is_asleep());
            expects(&incoming, 1);
            test_kit::until("it has been woken", || alarm.woken() == 1);
            ours.write_all(header(1, 4).as_bytes()).unwrap();
            assert!(waits.join().unwrap() >= 1);
        });
        // Nobody rings for a thread that is awake.
        expects(&incoming, 2);
        assert_eq!(alarm.woken(), 1);
    }
}

#[test]
fn a_piece_that_comes_together_with_the_end_of_the_connection_has_come() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let (mut ours, stream) = UnixStream::pair().unwrap();
    let stream = Stream::from(OwnedFd::from(stream));
    let offer = DirectQueue { queue_pair: 17, mtu: 4096, ..DirectQueue::new_zeroed() };
    ours.write_all(&[offer.as_bytes(), &[1]].concat()).unwrap();
    let (verbs, incoming) = (Verbs::new(Settings::default()), Incoming::new(Arc::default(), None));
    let mut queue = verbs::answer(Some(&verbs), &stream, &incoming.pool).unwrap().unwrap();
    let pair = software::every_pair()[0];
    let mut come = |messages: [&[u8]; 2]| {
        messages.iter().for_each(|message| software::send(pair, message).unwrap());
        queue.turn(&incoming, &stream).is_ok()
    };
    let piece = |number| [header(number, 1).as_bytes(), &[7]].concat();
    assert!(come([DirectHeader::new_zeroed().as_bytes(), &piece(1)]));
    assert!(!come([&piece(2), &[0; 3]]), "a message without a header is taken");
    let (buffer, mapped) = incoming.land(2).expect("it came before what ended the connection");
    assert_eq!(mapped.len(), 1);
    buffer.release(Status::SUCCESS);
}

/// Sends a piece of one byte.
fn send_one(outgoing: &Arc<Outgoing>, number: u64) {
    let mut piece = outgoing.piece(number);
    piece.fill(1).unwrap().write(0, &[number as u8]);
    piece.finish(Status::SUCCESS);
}

#[test]
fn a_connection_over_verbs_that_was_idle_takes_the_next_piece() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let verbs = Verbs::new(Settings::default());
    let (_ours, stream, outgoing, mut sender) = sending_over_verbs(&verbs, 2);
    let (pair, bytes) = (software::pairs()[0], Common::default());
    let mut now = Instant::now();
    for number in 1..=2 {
        send_one(&outgoing, number);
        sender.turn(&stream, &bytes, now).unwrap();
        assert!(software::complete(pair, 0));
        sender.turn(&stream, &bytes, now).unwrap();
        sender.turn(&stream, &bytes, now).unwrap();
        now += 10 * PATIENCE;
    }
    assert_eq!(bytes.over_verbs.load(Ordering::Relaxed), 2);
    // But one that takes nothing is given up.
    send_one(&outgoing, 3);
    sender.turn(&stream, &bytes, now).unwrap();
    sender.turn(&stream, &bytes, now + PATIENCE).unwrap();
    let late = sender.turn(&stream, &bytes, now + 2 * PATIENCE);
    assert_eq!(late.err().unwrap().kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_connection_over_a_device_that_fails_ends_and_the_next_one_opens_a_device_again() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let verbs = Verbs::new(Settings::default());
    let (_first, stream, _outgoing, mut sender) = sending_over_verbs(&verbs, 2);
    let (bytes, now) = (Common::default(), Instant::now());
    sender.turn(&stream, &bytes, now).unwrap();
    // Of `IBV_EVENT_DEVICE_FATAL`. Another connection's thread may be the first to see it.
    software::event(software::pairs()[0], 8);
    let (_second, other, _outgoing, mut next) = sending_over_verbs(&verbs, 2);
    let failed = sender.turn(&stream, &bytes, now).err().unwrap().to_string();
    assert!(failed.contains("RDMA device software0 has failed"), "{failed}");
    next.turn(&other, &bytes, now).unwrap();
}

#[test]
fn a_buffer_of_a_closed_connection_is_registered_for_the_next_ones_device() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let domains = [(); 2].map(|()| Domain::new(Device::open(&Settings::default()).unwrap()).unwrap());
    let common = Arc::<Common>::default();
    let mut memories = Vec::new();
    for domain in [&domains[0], &domains[0], &domains[1]] {
        let pool = Pool::new(&common);
        let mut buffer = pool.try_take().unwrap();
        buffer.register(domain).unwrap();
        assert!(Arc::ptr_eq(buffer.registration().unwrap().domain(), domain));
        memories.push(Arc::as_ptr(&buffer.memory));
        pool.close();
        drop(buffer);
        assert_eq!(lock(&common.spare).len(), 1);
    }
    assert!(memories.iter().all(|memory| *memory == memories[0]), "it is one buffer");
    drop((common, domains));
    assert_eq!(software::objects(), 0);
}

/// A box in one piece from memory of which the RDMA device reads short copies.
fn box_in_place(at: u64, len: u64, first: u64, carrier: &Arc<Patient>) -> (Series, Block) {
    let series = Series::new(Rows::line(at, len), 4096, first, Arc::<Patient>::clone(carrier)).unwrap();
    let memory: &'static [u8] = vec![0; 65_536].leak();
    (series, Block::Here(std::ptr::NonNull::from(memory).cast()))
}

#[test]
fn what_comes_behind_pieces_that_are_copied_to_buffers_does_not_overtake_them() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let (directs, verbs) = (Directs::double(), Verbs::new(Settings::default()));
    let (_peer, stream, outgoing, mut sender) = sending_over_verbs(&verbs, 8);
    lock(&directs.table).outgoing.insert(1, Some(Arc::clone(&outgoing)));
    let (patient, bytes) = (Arc::<Patient>::default(), Common::default());
    let send = |first, len| {
        let (series, block) = box_in_place(65_536, len, first, &patient);
        directs.send_all(1, series, 65_536, |_, _| Ok(block)).unwrap();
    };
    // The first has more pieces than are sent in place. The second comes while it is copied.
    send(1, 3 * 4096);
    send(4, 10);
    assert_eq!(lock(&patient.0).len(), 4, "both are copied to buffers");
    assert_eq!(patient.copies(), 4);
    sender.turn(&stream, &bytes, Instant::now()).unwrap();
    let pair = software::pairs()[0];
    assert_eq!(software::sends(pair), 4, "none came too late");
    while software::complete(pair, 0) {}
    sender.turn(&stream, &bytes, Instant::now()).unwrap();
    // Now nothing is under way.
    send(5, 10);
    assert!(lock(&patient.0).is_empty());
    lock(&directs.table).outgoing.clear();
}

#[test]
fn memory_that_another_server_does_not_take_is_freed_without_its_connection() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = Stream::from(OwnedFd::from(ours));
    // It has a receive for the probe only.
    let answer = DirectQueue { queue_pair: 0xff_fff0, mtu: 4096, receives: 1, ..DirectQueue::new_zeroed() };
    theirs.write_all(answer.as_bytes()).unwrap();
    software::outside(Outside::Done(0));
    let verbs = Verbs::new(Settings::default());
    let queue = verbs::offer(Some(&verbs), &stream, DIRECT_VERBS_SINCE).unwrap().unwrap();
    software::outside(Outside::Kept);
    let directs = Directs::double();
    let outgoing = Outgoing::start(stream, Some(queue), Arc::default()).unwrap();
    lock(&directs.table).outgoing.insert(1, Some(Arc::clone(&outgoing)));
    let (series, block) = box_in_place(65_536, 10, 1, &Arc::default());
    directs.send_all(1, series, 65_536, |_, _| Ok(block)).unwrap();
    // Memory that is to leave does not wait for ever, either.
    assert!(directs.hold_still().is_none());
    outgoing.abort_if_stuck(Instant::now());
    assert!(outgoing.copies.are_under_way(), "it has some time");
    outgoing.abort_if_stuck(Instant::now() + 2 * incoming::IDLE);
    directs.forget(65_536, 10);
    assert!(!outgoing.copies.are_under_way());
    // The thread drops what belongs to a piece part by part.
    let until = Instant::now() + LONG;
    while directs.hold_still().is_none() {
        assert!(Instant::now() < until, "nothing is read any more");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn pieces_go_over_verbs_from_one_end_to_the_other() {
    const BATCH: u64 = 8;
    let _one = lock(&fuzzing::ONE);
    software::install();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|socket| Stream::from(OwnedFd::from(socket)));
    let incoming = Arc::new(Incoming::new(Arc::default(), None));
    let reading = Arc::clone(&incoming);
    let receiving = std::thread::spawn(move || {
        let verbs = Verbs::new(Settings::default());
        reading.read(&theirs, Some(&verbs), LONG)
    });
    let verbs = Verbs::new(Settings::default());
    let queue = verbs::offer(Some(&verbs), &ours, DIRECT_VERBS_SINCE).unwrap().unwrap();
    let bytes = Arc::<Common>::default();
    let outgoing = Outgoing::start(ours, Some(queue), Arc::clone(&bytes)).unwrap();
    let content = |number: u64| vec![number as u8; (number * 104_729 % MAX_PIECE + 1) as usize];
    let until = Instant::now() + LONG;
    // Polls until there is something.
    fn soon<T>(until: Instant, mut look: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until, "nothing comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let mut all = 0;
    for first in (1..100).step_by(BATCH as usize) {
        for number in first..first + BATCH {
            let content = content(number);
            let mut piece = outgoing.piece(number);
            soon(until, || piece.fill(content.len() as u64)).write(0, &content);
            piece.finish(Status::SUCCESS);
            all += content.len() as u64;
        }
        for number in first..first + BATCH {
            let (buffer, mapped) = soon(until, || incoming.land(number).ok());
            let mut came = vec![0; mapped.len()];
            mapped.read(0, &mut came);
            assert!(came == content(number), "piece {number}");
            buffer.release(Status::SUCCESS);
        }
    }
    soon(until, || (bytes.over_verbs.load(Ordering::Relaxed) == all).then_some(()));
    assert_eq!(incoming.bytes.over_verbs.load(Ordering::Relaxed), all);
    // The session ends.
    drop(lock(&outgoing.jobs).take());
    outgoing.bell.iter().for_each(|bell| bell.ring());
    let why = receiving.join().unwrap();
    // A socket that is closed before its end has read the last grants is reset.
    assert!(why == "closed" || why.contains("Connection reset"), "{why}");
    drop((outgoing, incoming, verbs, bytes));
    // The sending end's thread ends by itself.
    soon(until, || (software::objects() == 0).then_some(()));
}

/// Device memory of which the test knows the bytes, and its address on the device: whole granules of this
/// size.
fn device_memory(granule: u64) -> (&'static [u8], u64) {
    let memory: Vec<u8> = (0..4 * granule).map(|at| (at * 7 / 3) as u8).collect();
    (memory.leak(), 64 * granule)
}

#[test]
fn short_copies_over_verbs_are_sent_from_device_memory() {
    const GRANULE: u64 = 65_536;
    let _one = lock(&fuzzing::ONE);
    software::install();
    let (directs, verbs) = (Directs::double(), Verbs::new(Settings::default()));
    let (_peer, stream, outgoing, mut sender) = sending_over_verbs(&verbs, 8);
    lock(&directs.table).outgoing.insert(1, Some(Arc::clone(&outgoing)));
    let (pair, bytes) = (software::pairs()[0], Common::default());
    let (memory, address) = device_memory(GRANULE);
    let (mut asked, mut number) = (Vec::new(), 1);
    // Copied to buffers, one at a time: nothing but the test says when.
    let patient = Arc::<Patient>::default();
    let mut send = |rows: Rows| {
        let series = Series::new(rows, 131_072, number, Arc::<Patient>::clone(&patient)).unwrap();
        number = series.end();
        let (before, mut now_asked) = (asked.len(), Vec::new());
        let give = |at: u64, size: u64| {
            now_asked.push((at, size));
            let bytes = &memory[(at - address) as usize..][..size as usize];
            Ok(Block::Here(std::ptr::NonNull::from(bytes).cast()))
        };
        directs.send_all(1, series, GRANULE, give).unwrap();
        asked.append(&mut now_asked);
        asked[before..].to_vec()
    };
    // Two pieces, in three granules.
    let line = Rows::line(address + 10, 150_000);
    assert_eq!(send(line), [(address, 3 * GRANULE)]);
    assert!(directs.hold_still().is_none(), "memory stays until the device has read it");
    sender.turn(&stream, &bytes, Instant::now()).unwrap();
    let sent: Vec<_> = (0..).map_while(|n| software::sent(pair, n)).collect();
    let content = sent.iter().flat_map(|message| &message.bytes[size_of::<DirectHeader>()..]);
    assert!(content.eq(&memory[10..][..150_000]), "the bytes of {} pieces", sent.len());
    while software::complete(pair, 0) {}
    sender.turn(&stream, &bytes, Instant::now()).unwrap();
    assert_eq!(bytes.in_place.load(Ordering::Relaxed), 150_000);
    assert_eq!(lock(&outgoing.pool.state).made, 0, "a buffer was made");
    let mut over = || {
        while {
            sender.turn(&stream, &bytes, Instant::now()).unwrap();
            software::complete(pair, 0)
        } {}
        sender.turn(&stream, &bytes, Instant::now()).unwrap();
    };
    // The block is known until memory in it is freed, or all memory may have left.
    assert_eq!(send(Rows::line(address + GRANULE, 4)), []);
    over();
    directs.forget(address + 3 * GRANULE, 100);
    assert_eq!(send(Rows::line(address + GRANULE, 4)), []);
    over();
    directs.forget(address + 2 * GRANULE, 1);
    assert_eq!(send(Rows::line(address + GRANULE, 4)), [(address + GRANULE, GRANULE)]);
    over();
    drop(directs.hold_still().expect("nothing moves"));
    assert_eq!(send(Rows::line(address + GRANULE, 4)), [(address + GRANULE, GRANULE)]);
    over();
    // Long copies, and those of several rows, are copied to buffers.
    assert_eq!(send(Rows::line(address, 200_001)), []);
    let rows = Rows { width: 8, height: 2, pitch: 100, ..Rows::line(address, 8) };
    assert_eq!(send(rows), []);
    assert_eq!(patient.copies(), 3);
    lock(&directs.table).outgoing.clear();
}

/// Both ends of a connection under TLS: the connecting one first.
fn under_tls() -> (Stream, Stream) {
    let [one, other] = [(); 2].map(|()| Arc::new(Identity::generate().unwrap()));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = tls::server_pinning(&other, one.fingerprint()).unwrap();
    let deadline = Instant::now() + LONG;
    let accepted =
        std::thread::spawn(move || Stream::tls_server(OwnedFd::from(theirs), &server, deadline).unwrap());
    let client = tls::client_pinning(&one, &[other.fingerprint()]).unwrap();
    let name = tls::session_name(&[7; 16]);
    let stream = Stream::tls_client(OwnedFd::from(ours), &client, name, deadline).unwrap();
    (stream, accepted.join().unwrap())
}

#[test]
fn grants_and_the_end_of_the_socket_are_seen_under_tls() {
    let (sending, receiving) = under_tls();
    for stream in [&sending, &receiving] {
        stream.set_nonblocking(false).unwrap();
    }
    assert!(!verbs::has_ended(&receiving).unwrap());
    for count in [2, 14] {
        receiving.write_all(&[count]).unwrap();
    }
    sending.set_nonblocking(true).unwrap();
    let mut sum = 0;
    while sum < 16 {
        verbs::granted(&sending, |receives| {
            sum += receives;
            Ok(())
        })
        .unwrap();
    }
    sending.shut_down();
    // A farewell, or a cut without one, which is an error.
    assert!(verbs::has_ended(&receiving).unwrap_or(true));
    receiving.shut_down();
    assert!(verbs::granted(&sending, |_| Ok(())).is_err());
}

#[test]
fn a_buffer_whose_device_may_still_use_it_is_not_used_again() {
    let pool = Pool::new(&Arc::default());
    let buffers: Vec<Buffer> = std::iter::from_fn(|| pool.try_take()).collect();
    assert_eq!(buffers.len(), PIECES);
    let at = |buffer: &Buffer| buffer.memory.region().runs(0, 1).unwrap()[0].0;
    let mut buffers = buffers.into_iter();
    let (lost, released) = (buffers.next().unwrap(), buffers.next().unwrap());
    let (of_lost, of_released) = (at(&lost), at(&released));
    InUse(Some(released)).release(Status::SUCCESS);
    assert_eq!(at(&pool.try_take().unwrap()), of_released);
    drop(pool.try_take());
    InUse(Some(lost)).release(Status::UNKNOWN);
    let again: Vec<Buffer> = std::iter::from_fn(|| pool.try_take()).collect();
    assert!(again.len() == 2 && again.iter().all(|buffer| at(buffer) != of_lost));
    pool.close();
    drop((again, buffers));
    assert!(pool.try_take().is_none() && pool.take().is_none());
}

proptest! {
    /// Whatever a peer sends, the receiving end neither panics nor waits for more than was sent, and has
    /// exactly the pieces that a straightforward parser finds in the bytes.
    #[test]
    fn what_comes_is_what_was_sent(
        pieces in prop::collection::vec((0u64..4, prop_oneof![Just(0u32), 1..50u32, Just(u32::MAX)], 0u32..20), 0..12),
        cut in 0usize..400,
    ) {
        let mut bytes = Vec::new();
        let (mut expected, mut last, mut good) = (Vec::new(), 0, true);
        let mut number = 0;
        for (step, len, wrong) in pieces {
            number += step;
            let reserved = u32::from(wrong == 0);
            let begin = bytes.len();
            bytes.extend_from_slice(DirectHeader { number, len, reserved }.as_bytes());
            let is_good = number > last && reserved == 0 && len <= MAX_PIECE as u32;
            prop_assert_eq!(DirectHeader { number, len, reserved }.check(last).is_ok(), is_good);
            good &= is_good;
            if !good {
                break;
            }
            last = number;
            bytes.extend(std::iter::repeat_n(number as u8, len as usize));
            if len > 0 && bytes.len() <= cut {
                expected.push((number, len as usize));
            }
            if begin > cut || expected.len() == PIECES {
                break;
            }
        }
        bytes.truncate(cut);
        let (mut ours, incoming, thread) = receiving(LONG);
        // It may have been closed meanwhile.
        let _ = ours.write_all(&bytes);
        drop(ours);
        thread.join().unwrap();
        let mut state = lock(&incoming.state);
        let got: Vec<(u64, usize)> = state.pieces.iter().map(|(number, (_, len))| (*number, *len)).collect();
        prop_assert_eq!(got, expected);
        for (number, (buffer, len)) in &mut state.pieces {
            prop_assert!(buffer.bytes(*len).iter().all(|byte| *byte == *number as u8));
        }
    }
}
