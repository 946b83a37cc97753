//! A receiver whose sender is played by the test.

use crosstie_protocol::rails::{Immediate, MAX_GROUP, Record};

use super::*;
use crate::rails::{Cause, RecvBuffer, RequestError, Violation};

/// The sender writes the sizes of a group into memory of the receiver: the receiver reports none that is longer than the buffer.
#[test]
fn a_record_with_a_size_beyond_its_buffer_is_a_violation() {
    let forged = [[1001, 2000], [1000, 2001], [0, u64::MAX], [1 << 32, 0]];
    for sizes in [[1000, 2000], [0, 0]].into_iter().chain(forged) {
        let there = rails();
        let (mut receiver, mut peer) = Peer::sender(&there);
        let memory = there.allocate(8192).unwrap();
        let buffers =
            [(0..1000, 1), (1000..3000, 2)].map(|(range, tag)| RecvBuffer { memory: &memory, range, tag });
        let receive = receiver.irecv(&buffers).unwrap().unwrap();
        let mut record = Record { sizes: [0; MAX_GROUP] };
        record.sizes[..2].copy_from_slice(&sizes);
        let imm = Immediate { slot: 0, mask: 1, attempt: 0, staged: false, generation: 0 };
        peer.write(0, 0, &record.encode(0)[..Record::len_of(2)], Some(imm.bits()));
        let result = until(|| receiver.test(receive).transpose());
        if forged.contains(&sizes) {
            let violation = Violation::BadRecord { slot: 0 };
            assert_eq!(result, Err(RequestError::Ended(Cause::Violation(violation))), "{sizes:?}");
            assert_eq!(receiver.counters().violations[violation.kind()], 1);
            assert!(matches!(peer.read(), Some(Frame::Error(_))), "the sender learns it");
        } else {
            assert_eq!(result.unwrap().sizes(), sizes.map(|size| size as usize));
        }
    }
}

fn fence(rail: usize, epoch: u32) -> Frame {
    Frame::Fence { rail, epoch, next: 0, entries: Vec::new() }
}

fn answer(rail: usize, epoch: u32) -> Frame {
    Frame::Answer { rail, epoch, entries: Vec::new() }
}

#[test]
fn a_fence_of_another_epoch_changes_nothing() {
    let there = rails();
    let (mut receiver, mut peer) = Peer::sender(&there);
    for epoch in [1, u32::MAX] {
        peer.send(&fence(1, epoch));
    }
    peer.send(&fence(0, 0));
    assert_eq!(peer.read(), Some(answer(0, 0)));
    assert_eq!(receiver.rails_up(), 0b10);
    // A rail that was closed once is not closed by the same fence again.
    peer.send(&fence(1, 0));
    assert_eq!(peer.read(), Some(answer(1, 0)));
    assert_eq!(receiver.rails_up(), 0);
}

#[test]
fn an_endpoint_is_used_when_its_own_epoch_returns() {
    let there = rails();
    let (mut receiver, mut peer) = Peer::sender(&there);
    peer.send(&fence(0, 0));
    assert_eq!(peer.read(), Some(answer(0, 0)));
    let offered = Endpoint::create(&peer.context, 0, Role::Sender, &peer.agreed, 1).unwrap();
    peer.send(&Frame::Offer { rail: 0, epoch: 1, endpoint: offered.address() });
    let accepted = peer.read();
    assert!(matches!(accepted, Some(Frame::Accept { rail: 0, epoch: 1, endpoint: Some(_) })), "{accepted:?}");
    for epoch in [0, 2] {
        peer.send(&Frame::Return { rail: 0, epoch });
    }
    // Frames are handled in order: when the receiver answers this one, it has handled the others.
    peer.send(&fence(1, 0));
    assert_eq!(peer.read(), Some(answer(1, 0)));
    assert_eq!(receiver.rails_up(), 0);
    peer.send(&Frame::Return { rail: 0, epoch: 1 });
    until(|| (receiver.rails_up() == 1).then_some(()));
}

/// The sender is inside an operation on rail 0, which may still write into a buffer. Only when it has left is the rail closed, and
/// the sender may send the same bytes over another rail.
#[test]
fn a_fence_is_answered_after_the_sender_has_left_its_operation() {
    let there = rails();
    let (mut receiver, mut peer) = Peer::sender(&there);
    let memory = there.allocate(4096).unwrap();
    let receive = receiver.irecv(&[RecvBuffer { memory: &memory, range: 0..4096, tag: 0 }]).unwrap().unwrap();
    peer.endpoints[0].post_probe(0).unwrap();
    peer.endpoints[0].qps[0].pretend_operation(true);
    for rail in 0..RAILS {
        peer.send(&fence(rail, 0));
    }
    assert_eq!(peer.read(), Some(answer(1, 0)), "the other rail does not wait");
    assert_eq!(receiver.rails_up(), 0);
    // A thousand calls would take a quarter of an hour if each waited for the peer for a second.
    for _ in 0..1000 {
        assert_eq!(receiver.test(receive), Ok(None));
    }
    peer.endpoints[0].qps[0].pretend_operation(false);
    assert_eq!(peer.read(), Some(answer(0, 0)));
}

/// The program takes out the rail, cannot close it while the sender is inside an operation, and does not call any more.
#[test]
fn a_fence_that_the_program_began_to_handle_is_answered_without_it() {
    let there = rails();
    // In some rounds the program reads the fence before the control thread does.
    for _ in 0..20 {
        let (mut receiver, mut peer) = Peer::sender(&there);
        peer.endpoints[0].post_probe(0).unwrap();
        peer.endpoints[0].qps[0].pretend_operation(true);
        peer.send(&fence(0, 0));
        while receiver.rails_up() == 0b11 {
            receiver.progress();
        }
        peer.endpoints[0].qps[0].pretend_operation(false);
        assert_eq!(peer.read(), Some(answer(0, 0)));
    }
}

/// The sender closes the connection, and a completion that it says is under way never comes. The program does not call.
#[test]
fn a_receiver_that_nobody_calls_ends_after_its_sender_has_closed() {
    let there = rails();
    let (mut receiver, mut peer) = Peer::sender(&there);
    let memory = there.allocate(4096).unwrap();
    let receive = receiver.irecv(&[RecvBuffer { memory: &memory, range: 0..4096, tag: 0 }]).unwrap().unwrap();
    peer.send(&Frame::Close { next: 1, open: Vec::new() });
    // `cause` makes no progress.
    assert_eq!(until(|| receiver.cause()), Cause::LostCompletion);
    assert_eq!(receiver.test(receive), Err(RequestError::Ended(Cause::LostCompletion)));
}
