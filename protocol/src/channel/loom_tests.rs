//! Tests of the channel's shared words under loom, which tries every interleaving and every reordering that
//! the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p rgpu-protocol --release loom`

use super::geometry::Cursors;
use super::ring::{Consumer, Producer, RingMemory};
use super::slots::ReplySlot;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use super::{NO_SLOT, SleepFlag};
use crate::Status;
use loom::sync::Arc;
use loom::thread;

#[test]
fn a_wake_up_is_never_lost() {
    loom::model(|| {
        let flag = Arc::new(SleepFlag::default());
        let change = Arc::new(AtomicU32::new(0));
        let waker = {
            let (flag, change) = (flag.clone(), change.clone());
            thread::spawn(move || {
                change.store(1, Ordering::Release);
                flag.take()
            })
        };
        flag.announce();
        let saw = change.load(Ordering::Acquire) == 1;
        let woken = waker.join().unwrap();
        assert!(saw || woken, "asleep forever");
    });
}

#[test]
fn a_record_is_whole_when_it_is_seen() {
    loom::model(|| {
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..8).map(|_| AtomicU64::new(0)).collect());
        let cursors = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let producer = {
            let (words, cursors) = (words.clone(), cursors.clone());
            thread::spawn(move || {
                let memory = RingMemory::new(&words);
                let mut producer = Producer::over(Cursors { tail: &cursors.0, head: &cursors.1 }, memory);
                producer.push(5, NO_SLOT, &[7; 16]).unwrap();
                producer.push(6, 2, &[8; 16]).unwrap();
            })
        };
        let mut consumer =
            Consumer::over(Cursors { tail: &cursors.0, head: &cursors.1 }, RingMemory::new(&words));
        let mut body = Vec::new();
        let mut taken = 0;
        for _ in 0..2 {
            if let Some(record) = consumer.pop(&mut body).unwrap() {
                taken += 1;
                assert_eq!((record.seq, record.opcode), (taken, 4 + taken as u16));
                assert_eq!(body, [6 + taken as u8; 16]);
            }
        }
        producer.join().unwrap();
        while let Some(record) = consumer.pop(&mut body).unwrap() {
            taken += 1;
            assert_eq!(record.seq, taken);
        }
        assert_eq!(taken, 2);
    });
}

#[test]
fn room_is_reused_only_after_it_was_read() {
    loom::model(|| {
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
        let cursors = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let producer = {
            let (words, cursors) = (words.clone(), cursors.clone());
            thread::spawn(move || {
                let mut producer =
                    Producer::over(Cursors { tail: &cursors.0, head: &cursors.1 }, RingMemory::new(&words));
                producer.push(5, NO_SLOT, &[1; 16]).unwrap();
                producer.push(6, NO_SLOT, &[2; 16]).is_ok()
            })
        };
        let mut consumer =
            Consumer::over(Cursors { tail: &cursors.0, head: &cursors.1 }, RingMemory::new(&words));
        let mut body = Vec::new();
        let mut next = 1;
        if consumer.pop(&mut body).unwrap().is_some() {
            assert_eq!(body, [1; 16]);
            next = 2;
        }
        let second = producer.join().unwrap();
        if second {
            assert_eq!(next, 2, "the second record overwrote the first");
            assert!(consumer.pop(&mut body).unwrap().is_some());
            assert_eq!(body, [2; 16]);
        }
    });
}

#[test]
fn an_answer_reaches_a_thread_that_falls_asleep() {
    loom::model(|| {
        let slot = Arc::new(ReplySlot::new());
        slot.prepare();
        let host = {
            let slot = slot.clone();
            thread::spawn(move || slot.complete(9, Status::INVALID_VALUE, &[42]))
        };
        let sleeps = slot.announce_sleep();
        let mut payload = Vec::new();
        let early = slot.poll(&mut payload);
        let wake = host.join().unwrap();
        if !sleeps {
            assert!(early.is_some() && !wake);
        } else {
            assert!(wake, "asleep forever");
        }
        let completion = early.or_else(|| slot.poll(&mut payload)).unwrap();
        assert_eq!((completion.status, payload.as_slice()), (Status::INVALID_VALUE, &[42][..]));
    });
}
