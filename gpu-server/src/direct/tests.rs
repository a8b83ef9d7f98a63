use std::io::Write;
use std::os::unix::net::UnixStream;

use super::*;
use proptest::prelude::*;

/// A receiving end that reads from the other end of a socket.
fn receiving(patience: Duration) -> (UnixStream, Arc<Incoming>, std::thread::JoinHandle<String>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let incoming = Arc::new(Incoming::new(Arc::default()));
    let reading = Arc::clone(&incoming);
    let stream = Stream::from(OwnedFd::from(theirs));
    let thread = std::thread::spawn(move || reading.read(&stream, patience));
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
fn a_buffer_whose_device_may_still_use_it_is_not_used_again() {
    let pool = Pool::new();
    let buffers: Vec<Buffer> = std::iter::from_fn(|| pool.try_take()).collect();
    assert_eq!(buffers.len(), PIECES);
    let at = |buffer: &Buffer| buffer.region.runs(0, 1).unwrap()[0].0;
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
        let (mut ours, incoming, thread) = receiving(PATIENCE);
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
