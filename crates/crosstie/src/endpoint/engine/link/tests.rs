use super::super::super::endpoint::Endpoint;
use super::super::super::test_pair::{config, connect, connected, connected_queueing};
use super::*;

/// The control messages in the peer's memory, in pieces from `first` on.
fn unread(endpoint: &Endpoint, first: u16, count: u16) -> Vec<Control> {
    endpoint.shared.with_engine(|engine, _| {
        let link = engine.link();
        let pieces = link.queues.channels[link.queues.made].receives as u16;
        let load = |number| link.load_control((first + number) % pieces).unwrap();
        (0..count).map(|number| Control::decode(&load(number), CONTROL_SIZE as u32).unwrap()).collect()
    })
}

/// One side does not poll, while the other one sends as many control messages as it can: none of them is overwritten. They are looked at in
/// memory, because the software device also carries them in its completions.
#[test]
fn control_messages_that_were_not_read_are_not_overwritten() {
    for (mine, theirs, imm_window) in [(1, 1, 1), (1, 1, 3), (4, 1, 3), (1, 4, 2), (3, 3, 5), (8, 8, 3)] {
        let side = |messages| EndpointConfig { messages, imm_window, ..config() };
        let (here, there) = connect(&side(mine), &side(theirs));
        let (messages, target) = (mine.min(theirs), here.allocate(8).unwrap());
        // There is credit for each half of the window.
        let each_credit = (imm_window / 2).max(1);
        let credits = imm_window / each_credit;
        let next_piece = || here.shared.with_engine(|engine, _| engine.link().next_piece);
        let mut sequence = 0;
        for round in 0..40 {
            // The first request of a queue pair may poll, so it comes before the control messages.
            let write = |imm| there.write_imm(there.allocate(8).unwrap(), .., &target.remote(), 0, imm);
            let writes: Vec<_> = (0..credits * each_credit).map(|imm| write(imm).unwrap()).collect();
            let first = next_piece();
            let recvs: Vec<_> =
                (0..messages).map(|_| here.recv(here.allocate(8).unwrap(), ..).unwrap()).collect();
            for imm in 0..credits * each_credit {
                assert_eq!(here.imm_recv().unwrap().wait().unwrap().imm, Some(imm));
            }
            let found = unread(&there, first, messages + credits as u16);
            let mut credit = 0;
            for (number, control) in found.iter().enumerate() {
                match control {
                    Control::Buffer(buffer) => {
                        assert_eq!((number < messages.into(), buffer.sequence), (true, sequence));
                        sequence += 1;
                    }
                    Control::ImmCredit(granted) => {
                        assert!(number >= messages.into() && *granted > credit, "{round}: {found:?}");
                        credit = *granted;
                    }
                    _ => panic!("round {round}: {found:?}"),
                }
            }
            for write in writes {
                write.wait().unwrap();
            }
            for _ in 0..messages {
                there.send(there.allocate(8).unwrap(), ..).unwrap().wait().unwrap();
            }
            for recv in recvs {
                assert_eq!(recv.wait().unwrap().bytes, 8);
            }
        }
        assert_eq!(sequence, 40 * u32::from(messages));
        let first = next_piece();
        here.close();
        assert_eq!(unread(&there, first, 1), [Control::Close]);
    }
}

/// The same for buffers, withdrawals and answers.
#[test]
fn withdrawals_that_were_not_read_are_not_overwritten() {
    for messages in [1, 3, 12] {
        let (here, there) = connected(&EndpointConfig { messages, ..config() });
        for round in 0..20 {
            let first = here.shared.with_engine(|engine, _| engine.link().next_piece);
            let recvs: Vec<_> =
                (0..messages).map(|_| here.recv(here.allocate(8).unwrap(), ..).unwrap()).collect();
            assert_eq!(here.cancel_all(), messages.into());
            let withdrawn = messages.min(MAX_WITHDRAWALS);
            let found = unread(&there, first, messages + withdrawn);
            let (buffers, withdrawals) = found.split_at(messages.into());
            assert!(
                buffers.iter().all(|control| matches!(control, Control::Buffer(_))),
                "{round}: {found:?}"
            );
            for (buffer, withdrawal) in buffers.iter().zip(withdrawals) {
                let Control::Buffer(buffer) = buffer else { unreachable!() };
                assert_eq!(*withdrawal, Control::Withdraw(buffer.slot));
            }
            let begin = Instant::now();
            while here.counters().leased_slots > 0 {
                assert!(begin.elapsed() < 20 * FLUSH_LIMIT, "hangs");
                there.progress();
                here.progress();
            }
            drop(recvs);
        }
    }
}

/// Most requests of a batch are not signaled. If it is interrupted, completions tell nevertheless when they are over.
#[test]
fn requests_that_were_not_signaled_end_with_the_connection() {
    let (here, there) = connected_queueing(&config());
    let target = there.allocate(64).unwrap();
    here.shared.with_engine(|engine, table| {
        let super::super::Engine { link, counters, status, .. } = engine;
        let mut shared = Shared { table, counters, status };
        let op = SendOp::Write(target.remote().at(0));
        link.queues.channels[0].post(0, SendWr::new(0, op, Data::Inline(&[])), CONTROL).unwrap();
        link.end(&mut shared, Cause::Closed);
        let begin = Instant::now();
        while !link.queues.channels.iter().all(|channel| channel.sends.is_empty()) {
            assert!(begin.elapsed() < 20 * FLUSH_LIMIT, "nothing tells that the request is over");
            link.poll(&mut shared);
        }
    });
}

/// A request is posted, and its completion never comes. When the connection is drained, the operation ends as flushed: not as a
/// success.
#[test]
fn request_without_a_completion_is_not_a_success() {
    let (here, there) = connected_queueing(&config());
    let target = there.allocate(4096).unwrap();
    let write = here.shared.with_engine(|engine, table| {
        let write = here.write(here.allocate(64).unwrap(), .., &target.remote(), 0).unwrap();
        let super::super::Engine { link, counters, status, .. } = engine;
        let mut shared = Shared { table, counters, status };
        table.take_submitted(|mut op| {
            shared.counters.held_operations += 1;
            let begun = op.with_value(table, |operation| link.begin(shared.counters, operation));
            link.track(&mut shared, op, begun);
        });
        let mut lost = 0;
        link.cq.poll(64, |_| lost += 1).unwrap();
        assert_eq!((lost, link.leased_slots()), (1, 1));
        link.end(&mut shared, Cause::PeerClosed);
        assert!(!write.is_ended() && link.is_draining());
        link.state = State::Ended(Cause::PeerClosed, Instant::now() - 2 * FLUSH_LIMIT);
        link.try_drain(&mut shared);
        assert!(link.is_drained() && link.leased_slots() == 0);
        write
    });
    let failed = write.wait().unwrap_err();
    assert_eq!(failed.cause, Cause::Flushed);
    assert_eq!(failed.buffer.wait_for(FLUSH_LIMIT).unwrap().len(), 64);
}
