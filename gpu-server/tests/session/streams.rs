//! Streams, events, and their waits.

use super::*;

#[test]
fn marks_raise_a_streams_word_in_order_and_a_host_wait_blocks_only_its_stream() {
    fn body<S: Session>(s: &mut S) {
        for i in 0..2 {
            s.push(&StreamCreate {
                context: ContextId(0),
                stream: StreamId(MADE + i),
                flags: 1,
                priority: 0,
            });
        }
        s.push(&StreamHostWait { stream: StreamId(MADE), ticket: TicketId(9) });
        let held = s.push(&StreamMark { stream: StreamId(MADE) });
        let free = s.push(&StreamMark { stream: StreamId(MADE + 1) });
        until("the other stream goes on", || s.word(MADE + 1) == free);
        let waiting = s.send(1, &StreamSynchronize { stream: StreamId(MADE) });
        s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
        assert!(s.word(MADE) < held);
        s.push(&StreamHostSignal { ticket: TicketId(9) });
        assert_eq!(s.wait(1, waiting).0, Status::SUCCESS);
        until("the mark is seen", || s.word(MADE) >= held);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_host_wait_is_released_however_much_is_enqueued_behind_it() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        s.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
        for i in 0..3000u32 {
            s.push(&Memset {
                stream: StreamId(0),
                dst: BASE,
                pitch: 0,
                value: i,
                element: 4,
                width: 1,
                height: 1,
            });
        }
        let src = s.arena(0, &7u32.to_le_bytes());
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE + 4, src: HostIn::Range(src) });
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, [2999u32.to_le_bytes(), 7u32.to_le_bytes()].concat());
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_question_for_room_is_answered_beside_a_wait_and_after_it() {
    fn body<S: Session>(s: &mut S) {
        let (held, free) = (StreamId(MADE), StreamId(MADE + 1));
        for stream in [held, free] {
            s.push(&StreamCreate { context: ContextId(0), stream, flags: 1, priority: 0 });
        }
        s.push(&StreamHostWait { stream: held, ticket: TicketId(1) });
        s.push(&StreamMark { stream: held });
        let waiting = [None, Some(held)].map(|stream| StreamRoom { stream, bytes: 0 });
        let asked = [s.send(1, &waiting[0]), s.send(2, &waiting[1])];
        s.call(&StreamRoom { stream: None, bytes: 1 << 20 }).unwrap();
        s.call(&StreamRoom { stream: Some(free), bytes: 0 }).unwrap();
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        assert_eq!(s.wait(1, asked[0]), (Status::SUCCESS, vec![]));
        assert_eq!(s.wait(2, asked[1]), (Status::SUCCESS, vec![]));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let (blocking, free) = (StreamId(MADE), StreamId(MADE + 1));
        s.push(&StreamCreate { context: ContextId(0), stream: blocking, flags: 0, priority: 0 });
        s.push(&StreamCreate { context: ContextId(0), stream: free, flags: 1, priority: 0 });
        let set =
            |stream, value| Memset { stream, dst: BASE, pitch: 0, value, element: 1, width: 1, height: 1 };
        s.push(&set(StreamId(0), 0));
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        s.push(&StreamHostWait { stream: blocking, ticket: TicketId(1) });
        s.push(&set(blocking, 1));
        s.push(&set(StreamId(0), 2));
        let bytes = s.call(&MemcpyDtoHInline { stream: free, src: BASE, len: 1 }).unwrap().bytes.0;
        assert_eq!(bytes, [0], "the legacy stream must not have run yet, and a non-blocking stream must");
        s.push(&set(blocking, 3));
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        s.call(&StreamSynchronize { stream: blocking }).unwrap();
        let bytes = s.call(&MemcpyDtoHInline { stream: blocking, src: BASE, len: 1 }).unwrap().bytes.0;
        assert_eq!(bytes, [3]);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_blocking_stream_is_synchronized_while_the_legacy_stream_waits_for_the_client() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let (blocking, legacy) = (StreamId(MADE), StreamId(0));
        s.push(&StreamCreate { context: ContextId(0), stream: blocking, flags: 0, priority: 0 });
        let set =
            |stream, value| Memset { stream, dst: BASE, pitch: 0, value, element: 1, width: 1, height: 1 };
        s.push(&set(blocking, 1));
        s.push(&StreamHostWait { stream: legacy, ticket: TicketId(1) });
        s.push(&set(legacy, 2));
        // If this waited for the signal, so would the test.
        s.call(&StreamSynchronize { stream: blocking }).unwrap();
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        let bytes = s.call(&MemcpyDtoHInline { stream: blocking, src: BASE, len: 1 }).unwrap().bytes.0;
        assert_eq!(bytes, [2]);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn events_order_streams_and_measure_time() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let streams = [StreamId(MADE), StreamId(MADE + 1)];
        for stream in streams {
            s.push(&StreamCreate { context: ContextId(0), stream, flags: 1, priority: 0 });
        }
        let events = [EventId(1), EventId(2)];
        for event in events {
            s.push(&EventCreate { context: ContextId(0), event, flags: 0 });
        }
        s.push(&StreamHostWait { stream: streams[0], ticket: TicketId(1) });
        s.push(&Memset {
            stream: streams[0],
            dst: BASE,
            pitch: 0,
            value: 5,
            element: 1,
            width: 1,
            height: 1,
        });
        let recorded = s.push(&EventRecord { event: events[0], stream: streams[0], flags: 0 });
        s.push(&StreamWaitEvent { stream: streams[1], event: events[0], flags: 0 });
        let reading = s.send(1, &MemcpyDtoHInline { stream: streams[1], src: BASE, len: 1 });
        let waiting = s.send(2, &EventSynchronize { event: events[0] });
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        assert_eq!(s.wait(1, reading), (Status::SUCCESS, vec![1, 0, 0, 0, 5]));
        assert_eq!(s.wait(2, waiting).0, Status::SUCCESS);
        until("the record is published", || s.word(MADE) == recorded);
        s.push(&EventRecord { event: events[1], stream: streams[1], flags: 0 });
        s.call(&EventSynchronize { event: events[1] }).unwrap();
        assert!(s.call(&EventElapsed { start: events[0], end: events[1] }).unwrap().milliseconds >= 0.0);
        assert_eq!(s.call(&EventSynchronize { event: EventId(77) }).unwrap_err(), Status::INVALID_HANDLE);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_wait_for_a_word_blocks_only_its_own_stream() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        for stream in [MADE, MADE + 1] {
            s.push(&StreamCreate { context: ContextId(0), stream: StreamId(stream), flags: 1, priority: 0 });
        }
        let fill = |value| Memset {
            stream: StreamId(MADE + 1),
            dst: BASE,
            pitch: 0,
            value,
            element: 4,
            width: 16,
            height: 1,
        };
        s.push(&fill(0));
        s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
        let waits =
            vec![memory_op(memory_op::WAIT_32, BASE, 5), memory_op(memory_op::WRITE_64, BASE + 8, 1 << 40)];
        s.push(&StreamBatchMemOp { stream: StreamId(MADE), operations: waits });
        let mark = s.push(&StreamMark { stream: StreamId(MADE) });
        for value in 1..5 {
            let write = vec![memory_op(memory_op::WRITE_32, BASE, value)];
            s.push(&StreamBatchMemOp { stream: StreamId(MADE + 1), operations: write });
            s.call(&StreamSynchronize { stream: StreamId(MADE + 1) }).unwrap();
            assert!(s.word(MADE) < mark, "the stream went on at {value}");
        }
        // A fill does as well as any operation.
        s.push(&fill(5));
        s.call(&StreamSynchronize { stream: StreamId(MADE) }).unwrap();
        let bytes =
            s.call(&MemcpyDtoHInline { stream: StreamId(MADE), src: BASE + 8, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, (1u64 << 40).to_le_bytes());
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_session_ends_while_a_stream_waits_for_a_word() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let waits = vec![memory_op(memory_op::WAIT_64, BASE, 1 << 50)];
        s.push(&StreamBatchMemOp { stream: StreamId(0), operations: waits });
        s.push(&Memset {
            stream: StreamId(0),
            dst: BASE,
            pitch: 0,
            value: 0,
            element: 4,
            width: 4,
            height: 1,
        });
        s.call(&MemGetInfo { device: 0 }).unwrap();
    }
    let server = Server::start(&[]);
    let over = || server.status()["sessions"].as_array().is_some_and(Vec::is_empty);
    body(&mut LocalBridge::connect(&server.socket()));
    until("the session over a socket is over", over);
    body(&mut TcpSession::connect(server.port));
    until("the session over TCP is over", over);
}

#[test]
fn no_answer_overtakes_the_progress_that_it_implies() {
    fn body<S: Session>(s: &mut S) {
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 });
        s.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: 2 });
        for round in 0..300 {
            let record = s.push(&EventRecord { event: EventId(1), stream: StreamId(MADE), flags: 0 });
            s.push(&StreamWaitEvent { stream: StreamId(0), event: EventId(1), flags: 0 });
            let mark = s.push(&StreamMark { stream: StreamId(0) });
            // Each of these implies the event's record; the second and third also imply the mark after it.
            match round % 3 {
                0 => drop(s.call(&EventSynchronize { event: EventId(1) }).unwrap()),
                1 => drop(s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap()),
                _ => drop(s.call(&ContextSynchronize { context: ContextId(0) }).unwrap()),
            }
            assert!(s.word(MADE) >= record, "round {round}: the event's stream is behind");
            assert!(round % 3 == 0 || s.word(0) >= mark, "round {round}: the other stream is behind");
        }
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn an_interprocess_event_has_one_token_which_only_its_maker_gives() {
    /// `CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS`.
    const FLAGS: u32 = 6;
    fn body<S: Session>(maker: &mut S, other: &mut S) {
        let (made, opened) = (EventId(1), EventId(2));
        maker.push(&EventCreate { context: ContextId(0), event: made, flags: FLAGS });
        let token = maker.call(&EventExport { event: made }).unwrap().token;
        // Two tokens would have two tables of slots, so that two openers would get the same one.
        assert_eq!(maker.call(&EventExport { event: made }).unwrap().token, token);
        other.call(&EventImport { context: ContextId(0), event: opened, token }).unwrap();
        assert_eq!(other.call(&EventExport { event: opened }).unwrap_err(), Status::INVALID_VALUE);
        assert!(other.call(&EventQuery { event: opened }).unwrap().done);
        maker.push(&EventDestroy { event: made });
        maker.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        let mut more = 3..;
        until("its token is gone", || {
            let event = EventId(more.next().unwrap());
            other.call(&EventImport { context: ContextId(0), event, token }) == Err(Status::INVALID_VALUE)
        });
    }
    let server = Server::start(&[]);
    body(&mut LocalBridge::connect(&server.socket()), &mut LocalBridge::connect(&server.socket()));
    body(&mut TcpSession::connect(server.port), &mut TcpSession::connect(server.port));
}
