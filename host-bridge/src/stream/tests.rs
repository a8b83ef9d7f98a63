//! Tests of streams over real sockets, with and without somebody in the middle.

use std::net::TcpListener;
use std::ptr::NonNull;
use std::sync::mpsc::channel;

use identity::tls::{client_pinning, server_pinning, session_name};
use identity::{Fingerprint, Identity};

use super::records::MOST_EMPTY;
use super::*;

fn sockets() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours.into(), listener.accept().unwrap().0.into())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Shakes hands over two sockets, which may be the ends of something in between.
fn shake(
    ours: OwnedFd,
    theirs: OwnedFd,
    pins: Option<(Fingerprint, Fingerprint)>,
) -> (io::Result<Stream>, io::Result<Stream>) {
    let (client, server) = (Identity::generate().unwrap(), Identity::generate().unwrap());
    let (server_pin, client_pin) = pins.unwrap_or((server.fingerprint(), client.fingerprint()));
    let accepting = std::thread::spawn(move || {
        Stream::tls_server(theirs, &server_pinning(&server, client_pin).unwrap(), soon())
    });
    let config = client_pinning(&client, &[server_pin]).unwrap();
    let ours = Stream::tls_client(ours, &config, session_name(&[7; 16]), soon());
    (ours, accepting.join().unwrap())
}

fn pair() -> (Stream, Stream) {
    let (ours, theirs) = sockets();
    let (ours, theirs) = shake(ours, theirs, None);
    (ours.unwrap(), theirs.unwrap())
}

fn gather(memory: &mut [u8], runs: usize) -> Gather {
    let mut gather = Gather::new();
    for run in memory.chunks_mut(memory.len().div_ceil(runs)) {
        assert!(gather.push(NonNull::from(&mut *run).cast(), run.len()));
    }
    gather
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn bytes_arrive_in_both_directions_at_once() {
    let (a, b) = pair();
    assert!(a.is_encrypted() && b.is_encrypted());
    const LEN: usize = 3 << 20;
    std::thread::scope(|scope| {
        for (from, to, head) in [(&a, &b, 40usize), (&b, &a, 0)] {
            scope.spawn(move || {
                let bytes = pattern(LEN);
                from.write_both(&bytes[..head], &bytes[head..]).unwrap();
            });
            scope.spawn(move || {
                let mut got = vec![0; LEN];
                to.read_exact(&mut got).unwrap();
                assert!(got == pattern(LEN));
            });
        }
    });
}

#[test]
fn a_stream_that_does_not_block_takes_what_fits_and_keeps_no_record_back() {
    let (a, b) = pair();
    a.set_nonblocking(true).unwrap();
    b.set_nonblocking(true).unwrap();
    const LEN: usize = 5 << 20;
    let (mut out, mut back) = (pattern(LEN), vec![0; LEN]);
    let (mut sent, mut got) = (0, 0);
    let would_block = |e: &io::Error| e.kind() == io::ErrorKind::WouldBlock;
    let mut waited = 0;
    while got < LEN {
        if sent < LEN {
            // SAFETY: the run lies in `out`, which nothing else uses.
            match unsafe { a.send(&mut gather(&mut out[sent..], 7)) } {
                Ok(n) => sent += n,
                Err(e) if would_block(&e) => waited += 1,
                Err(e) => panic!("{e}"),
            }
        } else if a.has_output() {
            assert!(a.flush_output().is_ok_and(|()| true) || a.has_output());
        }
        if waited > 0 || sent == LEN {
            // SAFETY: the run lies in `back`, which nothing else uses.
            match unsafe { b.receive(&mut gather(&mut back[got..], 3)) } {
                Ok(n) => got += n,
                Err(e) if would_block(&e) => assert!(!b.has_input()),
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert!(waited > 0, "the socket was never full");
    assert!(back == pattern(LEN) && !a.has_output() && !b.has_input());
}

#[test]
fn data_of_records_in_a_row_begins_where_cache_lines_do_and_each_byte_of_it_arrives() {
    let (a, b) = pair();
    let tls = a.tls.as_ref().unwrap();
    let bytes = pattern(5 * MAX_SEALED + 100);
    for begin in [0, 1, MAX_SEALED - 1, MAX_SEALED] {
        let mut places = Vec::new();
        let mut sending = lock(&tls.sending);
        // With all of its memory, so that it does not move meanwhile.
        sending.reserve(BATCH);
        for part in bytes[begin..].chunks(MAX_SEALED) {
            let sealed = sending.seal(|room| {
                places.push(room.as_ptr() as usize);
                copy(part, room)
            });
            assert_eq!(sealed.unwrap(), part.len());
        }
        a.flush(&mut sending, MsgFlags::empty()).unwrap();
        drop(sending);
        assert!(places.iter().all(|place| place.is_multiple_of(64)), "{places:?}");
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == 1 << 14), "{places:?}");
        let mut got = vec![0; bytes.len() - begin];
        b.read_exact(&mut got).unwrap();
        assert!(got == bytes[begin..]);
    }
}

#[test]
fn memory_for_records_is_given_back_once_a_connection_is_quiet() {
    let (a, b) = pair();
    let memory = |stream: &Stream| {
        let tls = stream.tls.as_ref().unwrap();
        (lock(&tls.sending).memory(), lock(&tls.receiving).memory())
    };
    let bytes = pattern(30 << 20);
    for _ in 0..2 {
        // As much as the sockets take, so that there is enough to fill the first memory.
        let mut sent = 0;
        a.set_nonblocking(true).unwrap();
        while let Ok(n) = a.send_bytes(&bytes[sent..]) {
            assert!(n > 0, "the sockets take everything");
            sent += n;
        }
        assert!(a.has_output());
        a.rest();
        let full = memory(&a).0;
        assert!(full >= BATCH * MAX_SEALED, "what waits is kept");
        a.set_nonblocking(false).unwrap();
        let mut got = vec![0; sent];
        std::thread::scope(|scope| {
            scope.spawn(|| a.flush_output().unwrap());
            b.read_exact(&mut got).unwrap();
        });
        assert!(got == bytes[..sent]);
        assert_eq!(memory(&a).0, full, "more may follow at once");
        a.rest();
        assert_eq!(memory(&a).0, 0);
        // Who waits for input gives back by itself what is more than little.
        let grown = memory(&b).1;
        b.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let waited = b.read_whole(&mut [0]).unwrap_err();
        assert_eq!(waited.kind(), io::ErrorKind::WouldBlock);
        assert!((1..grown).contains(&memory(&b).1), "{grown}");
        b.set_read_timeout(None).unwrap();
        // And others do.
        b.rest();
        assert_eq!(memory(&b).1, 0);
    }
}

#[test]
fn what_was_received_and_not_taken_is_told() {
    let (a, b) = pair();
    a.write_all(b"one").unwrap();
    a.write_all(b"two").unwrap();
    let mut first = [0; 2];
    b.read_exact(&mut first).unwrap();
    assert!(b.has_input() && b.is_readable());
    let mut rest = [0; 4];
    b.read_exact(&mut rest).unwrap();
    assert_eq!((&first, &rest), (b"on", b"etwo"));
    assert!(!b.has_input());
    b.set_nonblocking(true).unwrap();
    assert_eq!(b.read_now(&mut rest).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_farewell_ends_a_stream_and_a_cut_is_an_error() {
    let (a, b) = pair();
    a.write_all(b"last").unwrap();
    a.shut_down();
    let mut bytes = [0; 9];
    assert_eq!(b.read_whole(&mut bytes).unwrap(), 4);
    assert_eq!(b.read_whole(&mut bytes).unwrap(), 0);
    let (a, b) = pair();
    nix::sys::socket::shutdown(a.as_fd().as_raw_fd(), nix::sys::socket::Shutdown::Write).unwrap();
    assert!(b.read_whole(&mut bytes).unwrap_err().to_string().contains("was cut"));
}

#[test]
fn keys_are_renewed_when_they_are_worn_or_the_peer_asks() {
    let (a, b) = pair();
    let worn = a.tls.as_ref().unwrap();
    lock(&worn.sending).wear_after(3);
    worn.renew.store(true, Ordering::Release);
    let sending = std::thread::spawn(move || {
        for n in 0..50u8 {
            a.write_all(&[n; 100]).unwrap();
        }
        a
    });
    let mut got = [0; 5000];
    b.read_exact(&mut got).unwrap();
    assert!(got.chunks(100).enumerate().all(|(n, part)| part == [n as u8; 100]));
    let a = sending.join().unwrap();
    assert!(lock(&a.tls.as_ref().unwrap().sending).number() < 4);
    // The other direction has its own keys.
    b.write_all(b"back").unwrap();
    let mut back = [0; 4];
    a.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"back");
}

/// Whoever receives would be at it for as long as there are some, also where nothing may wait.
#[test]
fn a_peer_that_sends_record_after_record_without_data_is_refused() {
    let empty = |stream: &Stream, times: u32, new_keys: bool| {
        let tls = stream.tls.as_ref().unwrap();
        let mut sending = lock(&tls.sending);
        for _ in 0..times {
            if new_keys {
                sending.seal_key_update().unwrap();
                sending.renew(lock(&tls.keys).next_to_send().unwrap());
            } else {
                sending.seal_nothing().unwrap();
            }
            stream.flush(&mut sending, MsgFlags::empty()).unwrap();
        }
    };
    for new_keys in [false, true] {
        let (a, b) = pair();
        let mut got = [0; 4];
        for _ in 0..3 {
            empty(&a, MOST_EMPTY, new_keys);
            a.write_all(b"data").unwrap();
            b.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"data");
        }
        empty(&a, MOST_EMPTY + 1, new_keys);
        a.write_all(b"data").unwrap();
        assert_eq!(b.read_exact(&mut got).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn a_peer_with_another_key_is_refused_by_either_side() {
    let other = Identity::generate().unwrap().fingerprint();
    let (server, client) = (Identity::generate().unwrap(), Identity::generate().unwrap());
    for (server_pin, client_pin, words) in
        [(other, client.fingerprint(), "and {} is pinned"), (server.fingerprint(), other, "and {} is pinned")]
    {
        let (ours, theirs) = sockets();
        let (ours, theirs) = {
            let (server, client) = (server.clone(), client.clone());
            let accepting = std::thread::spawn(move || {
                Stream::tls_server(theirs, &server_pinning(&server, client_pin).unwrap(), soon())
            });
            let config = client_pinning(&client, &[server_pin]).unwrap();
            let ours = Stream::tls_client(ours, &config, session_name(&[7; 16]), soon());
            (ours, accepting.join().unwrap())
        };
        let words = words.replace("{}", &other.to_string());
        match server_pin == other {
            true => assert!(ours.unwrap_err().to_string().contains(&words)),
            // The client learns of it with its first read.
            false => {
                assert!(theirs.unwrap_err().to_string().contains(&words));
                assert!(ours.unwrap().read_whole(&mut [0; 1]).is_err());
            }
        }
    }
}

/// What somebody in the middle does to the records of one direction. `None`: leaves out.
type Meddle = fn(usize, Vec<u8>, &mut Vec<Vec<u8>>);

/// Relays whole records between two connections, and has `meddle` see those to the server (`upwards`) or to
/// the client. It is given a record's number and puts what goes on into the list.
fn middle(upwards: bool, meddle: Meddle) -> (OwnedFd, OwnedFd) {
    let (ours, near) = sockets();
    let (far, theirs) = sockets();
    let pass = move |from: TcpStream, to: TcpStream, meddle: Option<Meddle>| {
        let mut number = 0;
        loop {
            let mut header = [0; 5];
            if (&from).read_exact(&mut header).is_err() {
                break;
            }
            let mut record = header.to_vec();
            record.resize(5 + usize::from(u16::from_be_bytes([header[3], header[4]])), 0);
            if (&from).read_exact(&mut record[5..]).is_err() {
                break;
            }
            let mut out = Vec::new();
            match meddle {
                Some(meddle) => meddle(number, record, &mut out),
                None => out.push(record),
            }
            number += 1;
            if out.iter().any(|record| (&to).write_all(record).is_err()) {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    };
    let (near, far) = (TcpStream::from(near), TcpStream::from(far));
    let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    std::thread::spawn(move || pass(near, far, upwards.then_some(meddle)));
    std::thread::spawn(move || pass(far_too, near_too, (!upwards).then_some(meddle)));
    (ours, theirs)
}

/// Sends a hundred numbered messages each way through somebody who meddles. What arrives is a prefix of what
/// was sent, and whoever misses something gets an error.
#[test]
fn somebody_in_the_middle_changes_nothing_that_is_accepted() {
    let meddles: [Meddle; 6] = [
        |n, mut record, out| {
            // Forges: one bit, at another place in every record.
            let at = 5 + n * 7 % (record.len() - 5);
            record[at] ^= 1;
            out.push(record);
        },
        |n, record, out| {
            // Replays.
            if n % 3 == 2 {
                out.push(record.clone());
            }
            out.push(record);
        },
        |n, record, out| {
            // Leaves out.
            if n % 4 != 3 {
                out.push(record);
            }
        },
        |n, mut record, out| {
            // Truncates records, with a header that fits.
            if n % 4 == 3 {
                record.truncate(record.len() - 3);
                let len = (record.len() - 5) as u16;
                record[3..5].copy_from_slice(&len.to_be_bytes());
            }
            out.push(record);
        },
        |n, record, out| {
            // Inserts a record of its own: data, or an alert in the clear.
            if n % 5 == 4 {
                out.push(vec![23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]);
                out.push(vec![21, 3, 3, 0, 2, 1, 0]);
            }
            out.push(record);
        },
        |n, record, out| {
            // Speaks the server's or the client's alert for it.
            if n == 0 {
                out.push(vec![21, 3, 3, 0, 2, 2, 40]);
            }
            out.push(record);
        },
    ];
    for upwards in [true, false] {
        for (number, meddle) in meddles.into_iter().enumerate() {
            let (ours, theirs) = middle(upwards, meddle);
            let (tell, told) = channel();
            let (ours, theirs) = shake(ours, theirs, None);
            let (Ok(ours), Ok(theirs)) = (ours, theirs) else { continue };
            let (from, to) = if upwards { (ours, theirs) } else { (theirs, ours) };
            let receiving = std::thread::spawn(move || {
                let mut got = 0u32;
                let error = loop {
                    let mut bytes = [0; 4];
                    match to.read_exact(&mut bytes) {
                        Ok(()) => {
                            assert_eq!(u32::from_le_bytes(bytes), got, "meddle {number}");
                            got += 1;
                        }
                        Err(e) => break e,
                    }
                };
                tell.send((got, error)).unwrap();
            });
            for n in 0..100u32 {
                if from.write_all(&n.to_le_bytes()).is_err() {
                    break;
                }
            }
            from.shut_down();
            let (got, error) = told.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(got < 100, "meddle {number}, upwards {upwards}: all was accepted: {error}");
            receiving.join().unwrap();
        }
    }
}

/// Passes the bytes of one direction on, and inverts a bit of the byte at `place`. What passed.
fn flip(mut from: TcpStream, mut to: TcpStream, place: Option<usize>) -> Vec<u8> {
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        let at = all.len();
        all.extend_from_slice(&bytes[..n]);
        if let Some(place) = place.and_then(|place| place.checked_sub(at)).filter(|place| *place < n) {
            bytes[place] ^= 1;
        }
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
    all
}

/// A whole connection through somebody who changes one byte of one direction: handshake, a question, an
/// answer, a farewell. Whether both sides took it for unchanged, and what passed.
fn changed(
    client: &Arc<ClientConfig>,
    server: &Arc<ServerConfig>,
    upwards: bool,
    place: Option<usize>,
    within: Duration,
) -> (bool, Vec<u8>) {
    let ((ours, near), (far, theirs)) = (sockets(), sockets());
    let (near, far) = (TcpStream::from(near), TcpStream::from(far));
    let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    std::thread::scope(|scope| {
        let up = scope.spawn(move || flip(near, far, place.filter(|_| upwards)));
        let down = scope.spawn(move || flip(far_too, near_too, place.filter(|_| !upwards)));
        let deadline = Instant::now() + within;
        let serving = scope.spawn(move || -> io::Result<()> {
            let stream = Stream::tls_server(theirs, server, deadline)?;
            stream.set_read_timeout(Some(within))?;
            let mut question = [0; 8];
            stream.read_exact(&mut question)?;
            assert_eq!(&question, b"question");
            stream.write_all(b"answer")?;
            let end = stream.read_whole(&mut [0; 1])?;
            assert_eq!(end, 0);
            Ok(())
        });
        let asking = || -> io::Result<()> {
            let stream = Stream::tls_client(ours, client, session_name(&[7; 16]), deadline)?;
            stream.set_read_timeout(Some(within))?;
            stream.write_all(b"question")?;
            let mut answer = [0; 6];
            stream.read_exact(&mut answer)?;
            assert_eq!(&answer, b"answer");
            stream.shut_down();
            Ok(())
        };
        let (asked, served) = (asking().is_ok(), serving.join().unwrap().is_ok());
        let (up, down) = (up.join().unwrap(), down.join().unwrap());
        (asked && served, if upwards { up } else { down })
    })
}

#[test]
fn a_change_of_any_byte_of_a_connection_is_noticed() {
    let (client, server) = (Identity::generate().unwrap(), Identity::generate().unwrap());
    let to_server = client_pinning(&client, &[server.fingerprint()]).unwrap();
    let to_client = server_pinning(&server, client.fingerprint()).unwrap();
    for upwards in [true, false] {
        let (unchanged, passed) = changed(&to_server, &to_client, upwards, None, Duration::from_secs(60));
        assert!(unchanged && passed.len() > 500, "{} bytes", passed.len());
        for place in (0..passed.len()).filter(|place| differs(&passed, *place)) {
            // A longer record than there is would be waited for. Whoever waits too long accepts nothing.
            let (accepted, passed) =
                changed(&to_server, &to_client, upwards, Some(place), Duration::from_millis(500));
            assert!(!accepted || means_nothing(&passed, place), "byte {place}, upwards {upwards}");
        }
    }
}

/// Whether a change of this byte may do something else than a change of its neighbors: all of it in the
/// clear, and the ends and samples of what is sealed as a whole.
fn differs(passed: &[u8], place: usize) -> bool {
    let mut at = 0;
    loop {
        let end = at + 5 + usize::from(u16::from_be_bytes([passed[at + 3], passed[at + 4]]));
        if place < end {
            return passed[at] != 23 || place < at + 13 || place + 18 > end || place.is_multiple_of(16);
        }
        at = end;
    }
}

/// Whether a byte is the type or the version in a record's header. What these must be is authenticated, and
/// what came is not looked at (RFC 8446, sections 5.1 and 5.2). A signature's length differs from time to
/// time, so there may also be no such byte.
fn means_nothing(passed: &[u8], place: usize) -> bool {
    let mut at = 0;
    while at + 5 <= passed.len() && at + 3 <= place {
        at += 5 + usize::from(u16::from_be_bytes([passed[at + 3], passed[at + 4]]));
    }
    at >= passed.len() || (at..at + 3).contains(&place)
}

#[test]
fn a_handshake_with_a_silent_peer_ends_in_time() {
    let (ours, _theirs) = sockets();
    let identity = Identity::generate().unwrap();
    let config = client_pinning(&identity, &[identity.fingerprint()]).unwrap();
    let deadline = Instant::now() + Duration::from_millis(50);
    let error = Stream::tls_client(ours, &config, session_name(&[0; 16]), deadline).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_peer_that_does_not_speak_tls_is_refused() {
    let (ours, theirs) = sockets();
    TcpStream::from(theirs).write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
    let identity = Identity::generate().unwrap();
    let config = client_pinning(&identity, &[identity.fingerprint()]).unwrap();
    let error = Stream::tls_client(ours, &config, session_name(&[0; 16]), soon()).unwrap_err();
    assert!(error.to_string().contains("does not speak TLS"), "{error}");
}

#[test]
fn a_frame_that_comes_a_byte_at_a_time_has_to_come_before_the_deadline() {
    let (ours, theirs) = sockets();
    let (ours, theirs) = (Stream::from(ours), Stream::from(theirs));
    theirs.write_all(FrameHeader { kind: 1, len: 1 << 20 }.as_bytes()).unwrap();
    let slow = std::thread::spawn(move || {
        while theirs.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let deadline = Instant::now() + Duration::from_millis(100);
    assert!(ours.recv_frame_until(&mut Vec::new(), deadline).is_err());
    drop(ours);
    slow.join().unwrap();
}
