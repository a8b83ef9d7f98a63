//! How a client learns of failures.

use super::*;

#[test]
fn a_failed_asynchronous_operation_sets_the_contexts_error_and_stops_nothing() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        let inline = HostIn::Inline(&[1, 2, 3, 4]);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE + 4094, src: inline });
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: inline });
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert_eq!(s.error(0), Some((Status::INVALID_VALUE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_kernel_fault_is_sticky_until_the_context_is_reset() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        load(s);
        launch(s, 0, 1, &0x1234_0000u64.to_le_bytes());
        assert_eq!(s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap_err(), Status::ILLEGAL_ADDRESS);
        assert_eq!(s.error(0), Some((Status::ILLEGAL_ADDRESS, true)));
        assert_eq!(
            s.call(&ContextSynchronize { context: ContextId(0) }).unwrap_err(),
            Status::ILLEGAL_ADDRESS
        );
        let reset = s.call(&PrimaryReset { device: 0 });
        if backend() == "cuda" {
            // After a fault, NVIDIA's driver does nothing more for a process.
            assert_eq!(reset.unwrap_err(), Status::ILLEGAL_ADDRESS);
            return;
        }
        reset.unwrap();
        grow(s, 4096);
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

/// Clients wait for streams' progress words, so a mark or a record that a failed context refuses raises the
/// word, too.
#[test]
fn progress_goes_on_in_a_failed_context() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        load(s);
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 });
        s.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: 2 });
        launch(s, MADE, 1, &0x1234_0000u64.to_le_bytes());
        assert_eq!(
            s.call(&StreamSynchronize { stream: StreamId(MADE) }).unwrap_err(),
            Status::ILLEGAL_ADDRESS
        );
        let marked = s.push(&StreamMark { stream: StreamId(MADE) });
        until("the mark is passed", || s.word(MADE) >= marked);
        let recorded = s.push(&EventRecord { event: EventId(1), stream: StreamId(MADE), flags: 0 });
        until("the record is passed", || s.word(MADE) >= recorded);
        assert_eq!(s.error(0), Some((Status::ILLEGAL_ADDRESS, true)));
    }
    on_each_transport!(Server::start(&[]), body);
}

/// A client takes a record for a mark, and so waits for it also if it is refused.
#[test]
fn a_record_that_is_refused_raises_its_streams_word_once_the_stream_gets_there() {
    fn body<S: Session>(s: &mut S) {
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 });
        s.push(&StreamHostWait { stream: StreamId(MADE), ticket: TicketId(1) });
        let recorded = s.push(&EventRecord { event: EventId(7), stream: StreamId(MADE), flags: 0 });
        s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert!(s.word(MADE) < recorded);
        s.push(&StreamHostSignal { ticket: TicketId(1) });
        until("the refused record is passed", || s.word(MADE) >= recorded);
        assert_eq!(s.error(0), Some((Status::INVALID_HANDLE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

/// As long as no mark, record or synchronization stands behind the fault, only the answers themselves can
/// tell the client.
#[test]
fn a_client_that_is_answered_with_a_fault_finds_the_context_failed() {
    fn body<S: Session>(s: &mut S, ask: impl Fn(&mut S) -> Option<Status>) {
        grow(s, 4096);
        load(s);
        let create = StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 1, priority: 0 };
        s.push(&create);
        s.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: 2 });
        launch(s, MADE, 1, &0x1234_0000u64.to_le_bytes());
        let mut answer = None;
        until("the kernel fails", || {
            answer = ask(s);
            answer.is_some()
        });
        assert_eq!(answer, Some(Status::ILLEGAL_ADDRESS));
        assert_eq!(s.error(0), Some((Status::ILLEGAL_ADDRESS, true)));
    }
    if backend() == "cuda" {
        // NVIDIA's driver is asked for faults by the thread that waits for streams, and nothing here waits.
        return;
    }
    fn of_an_event<S: Session>(s: &mut S) {
        body(s, |s| s.call(&EventSynchronize { event: EventId(1) }).err());
    }
    fn for_memory<S: Session>(s: &mut S) {
        let (device, address, size) = (0, BASE + (2 << 20), 2 << 20);
        body(s, |s| {
            let answer = s.call(&MemGrow { device, address, size }).err();
            if answer.is_none() {
                s.call(&MemShrink { device, address, size }).unwrap();
            }
            answer
        });
    }
    fn for_a_module<S: Session>(s: &mut S) {
        let (context, module) = (ContextId(0), ModuleId(2));
        body(s, |s| {
            let image = HostIn::Range(s.arena(0, PTX.as_bytes()));
            let answer = s.call(&ModuleLoadByName { context, module, image });
            s.push(&ModuleUnload { module });
            answer.map(|reply| assert_eq!(reply.result, 0)).err()
        });
    }
    on_each_transport!(Server::start(&[]), of_an_event);
    on_each_transport!(Server::start(&[]), for_memory);
    on_each_transport!(Server::start(&[]), for_a_module);
}
