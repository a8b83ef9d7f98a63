//! Boxes that servers send and land by themselves.

use super::*;

/// A box, and the numbers and sizes of its pieces.
#[derive(Clone, Copy)]
struct Whole {
    place: (u64, u64, u64),
    extent: [u64; 3],
    first: u64,
    piece: u64,
}

impl Whole {
    fn line(at: u64, len: u64, first: u64, piece: u64) -> Whole {
        Whole { place: (at, len, len), extent: [len, 1, 1], first, piece }
    }

    fn pitched(&self) -> Pitched {
        let (address, pitch, slice) = self.place;
        Pitched { address, pitch, slice }
    }

    fn sent(&self, direct: u32) -> DirectSendAll {
        let Whole { extent, first, piece, .. } = *self;
        DirectSendAll { stream: STREAM, direct, first, piece, src: self.pitched(), extent }
    }

    fn received(&self, direct: u32) -> DirectReceiveAll {
        let Whole { extent, first, piece, .. } = *self;
        DirectReceiveAll { stream: STREAM, direct, first, piece, dst: self.pitched(), extent }
    }
}

#[test]
fn boxes_are_sent_and_landed_by_the_servers_whoever_comes_first() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut from, 1, &ticket).unwrap();
    let bytes: Vec<u8> = (0..2 << 20).map(|at: u32| ((at * 31) >> 3) as u8).collect();
    let source_bytes = from.arena(0, &bytes);
    from.push(&MemcpyHtoD { stream: STREAM, dst: BASE, src: HostIn::Range(source_bytes) });
    from.call(&StreamSynchronize { stream: STREAM }).unwrap();
    let mut first = 1;
    // More pieces than there are buffers, the last one shorter; one piece; one byte.
    for (len, piece) in [((2 << 20) - 5, 4096), (1 << 20, 1 << 20), (1, 7)] {
        for late in [false, true] {
            put(&mut to, BASE, &[0; 64]);
            to.call(&StreamSynchronize { stream: STREAM }).unwrap();
            let whole = Whole::line(BASE, len, first, piece);
            let pieces = len.div_ceil(piece);
            let answer = (!late).then(|| to.send(1, &whole.received(1)));
            from.push(&whole.sent(1));
            let answer = answer.unwrap_or_else(|| {
                // Something has come by then, or waits until there is room.
                to.call(&DirectArrival { direct: 1, number: first }).unwrap();
                to.send(1, &whole.received(1))
            });
            assert_eq!(to.wait(1, answer).0, Status::SUCCESS, "{len} {piece} {late}");
            let len = len as usize;
            let ends = [get(&mut to, BASE, len.min(64) as u32), get(&mut to, BASE + len as u64 - 1, 1)];
            assert_eq!(ends, [bytes[..len.min(64)].to_vec(), bytes[len - 1..len].to_vec()]);
            first += pieces;
        }
    }
    // A box of other rows and slices at each end, in pieces that cut rows.
    let from_box = Whole { place: (BASE + 3, 10, 100), extent: [7, 3, 2], first, piece: 5 };
    let to_box = Whole { place: (BASE + 1000, 20, 70), ..from_box };
    put(&mut to, BASE + 1000, &[0xee; 256]);
    to.call(&StreamSynchronize { stream: STREAM }).unwrap();
    from.push(&from_box.sent(1));
    to.call(&to_box.received(1)).unwrap();
    let mut expected = vec![0xee; 256];
    for (z, y, x) in (0..2).flat_map(|z| (0..3).flat_map(move |y| (0..7).map(move |x| (z, y, x)))) {
        expected[z * 70 + y * 20 + x] = bytes[3 + z * 100 + y * 10 + x];
    }
    assert_eq!(get(&mut to, BASE + 1000, 256), expected);
    first += 9;
    // Many at once, and pieces that the client lands before them and behind them. Those are sent by other
    // streams, so the client waits between them.
    send(&mut from, 1, first, BASE, 8);
    to.call(&DirectArrival { direct: 1, number: first }).unwrap();
    let answers: Vec<u64> = (0..MAX_COPIES as u64)
        .map(|n| {
            let whole = Whole::line(BASE + n * 100, 100, first + 1 + n * 4, 30);
            from.push(&whole.sent(1));
            to.send(1 + n as u16, &whole.received(1))
        })
        .collect();
    for (n, answer) in answers.into_iter().enumerate() {
        assert_eq!(to.wait(1 + n as u16, answer).0, Status::SUCCESS);
    }
    land(&mut to, 1, first, BASE + 4096, 8);
    copies(&mut from, &mut to, 1, first + 1 + MAX_COPIES as u64 * 4);
    assert_eq!((from.error(0), to.error(0)), (None, None));
}

#[test]
fn a_box_that_does_not_come_whole_is_an_error_and_nothing_later_is_written() {
    let server = Server::start(&[]);
    let mut to = session(&server);
    put(&mut to, BASE, &[7; 24]);
    let sent = |number, len, bytes: &[u8]| [header(number, len).as_bytes(), bytes].concat();
    // Its first piece has come, or not.
    let wrong = [
        // Another size, announced as missing, left out.
        sent(1, 7, &[1; 7]),
        [sent(1, 8, &[1; 8]), sent(2, 0, &[])].concat(),
        [sent(1, 8, &[1; 8]), sent(3, 8, &[1; 8])].concat(),
        // Closed at once, in a piece, and with something that is no piece.
        Vec::new(),
        [sent(1, 8, &[1; 8]), sent(2, 8, &[1; 7])].concat(),
        [sent(1, 8, &[1; 8]), sent(2, u32::MAX, &[])].concat(),
    ];
    for (direct, bytes) in (1..).zip(&wrong) {
        for late in [false, true] {
            let direct = 2 * direct + u32::from(late);
            let mut stream = pretend(&server, &mut to, direct);
            let whole = Whole::line(BASE, 24, 1, 8).received(direct);
            let answer = (!late).then(|| to.send(1, &whole));
            let _ = stream.write_all(bytes);
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            if late {
                assert!(rejects(&mut to, direct, 9));
            }
            let answer = answer.unwrap_or_else(|| to.send(1, &whole));
            assert_eq!(to.wait(1, answer).0, Status::DEVICE_UNAVAILABLE);
            assert_eq!(get(&mut to, BASE + 8, 16), [7; 16]);
        }
    }
    assert_eq!(to.error(0), None);
    drop(to);
    until("its session has ended", || server.sessions() == 0);
}

#[test]
fn a_box_that_cannot_be_sent_is_announced_to_the_other_end() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut from, 1, &ticket).unwrap();
    let outside = BASE + (2 << 20);
    let wrong = [
        Whole::line(outside - 4, 8, 1, 8),
        Whole::line(BASE, 8, 2, 0),
        Whole::line(BASE, 8, 3, MAX_PIECE + 1),
        Whole::line(BASE, 0, 4, 8),
        Whole { place: (BASE, 7, 7), extent: [8, 2, 1], first: 5, piece: 8 },
    ];
    for whole in wrong {
        let answer = to.send(1, &Whole::line(BASE, 8, whole.first, 8).received(1));
        from.push(&whole.sent(1));
        assert_eq!(to.wait(1, answer).0, Status::DEVICE_UNAVAILABLE);
    }
    assert_eq!(from.error(0), Some((Status::INVALID_VALUE, false)));
    // What the receiving end may not do is refused, and uses no number.
    for whole in wrong {
        let refused = to.call(&Whole { first: 10, ..whole }.received(1));
        assert_eq!(refused.unwrap_err(), Status::INVALID_VALUE);
    }
    let good = Whole::line(BASE, 8, 10, 8);
    assert_eq!(to.call(&good.received(2)).unwrap_err(), Status::INVALID_HANDLE);
    assert_eq!(to.call(&Whole { first: 5, ..good }.received(1)).unwrap_err(), Status::INVALID_VALUE);
    let waiting: Vec<u64> = (0..MAX_COPIES as u64)
        .map(|n| to.send(1 + n as u16, &Whole { first: 10 + n, ..good }.received(1)))
        .collect();
    assert_eq!(to.call(&Whole { first: 99, ..good }.received(1)).unwrap_err(), Status::OUT_OF_MEMORY);
    (0..MAX_COPIES as u64).for_each(|n| _ = from.push(&Whole { first: 10 + n, ..good }.sent(1)));
    for (n, answer) in waiting.into_iter().enumerate() {
        assert_eq!(to.wait(1 + n as u16, answer).0, Status::SUCCESS);
    }
    copies(&mut from, &mut to, 1, 99);
    assert_eq!(to.error(0), None);
}

#[test]
fn no_box_uses_memory_that_was_freed() {
    let target = Server::start(&[]);
    let source = Server::start(&[&format!("--direct-to={}", unix(&target))]);
    let (mut from, mut to) = (session(&source), session(&target));
    let ticket = offer(&mut from, &mut to, 1);
    open(&mut from, 1, &ticket).unwrap();
    let again = |session: &mut LocalBridge| {
        session.push(&MemFree { address: BASE });
        session.push(&MemAlloc { address: BASE, size: 2 << 20 });
    };
    // Awaited when it is freed.
    let whole = Whole::line(BASE, 2 << 20, 1, 1 << 20);
    let answer = to.send(1, &whole.received(1));
    again(&mut to);
    assert_eq!(to.wait(1, answer).0, Status::DEVICE_UNAVAILABLE);
    // Waiting for buffers, which the other end does not free: it lands nothing.
    let stuck = Whole::line(BASE, 2 << 20, 100, 4096);
    from.push(&stuck.sent(1));
    to.call(&DirectArrival { direct: 1, number: 100 + PIECES as u64 - 1 }).unwrap();
    again(&mut from);
    from.call(&StreamSynchronize { stream: STREAM }).unwrap();
    let answer = to.send(1, &stuck.received(1));
    assert_eq!(to.wait(1, answer).0, Status::DEVICE_UNAVAILABLE);
    assert_eq!((from.error(0), to.error(0)), (None, None));
}
