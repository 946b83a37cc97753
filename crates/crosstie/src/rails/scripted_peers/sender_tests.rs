//! A sender whose receiver is played by the test.

use crosstie_protocol::rails::{FenceEntry, Immediate, RECORD_LEN, Record};

use rustix::event::{PollFd, PollFlags};

use super::*;
use crate::device::Status;
use crate::device::fault::Plan;
use crate::rails::control::Control;
use crate::rails::mailbox::{Mail, Mailbox, Order};
use crate::rails::parts::Parts;
use crate::rails::receiver::RecvCore;
use crate::rails::sender::SendCore;
use crate::rails::{Cause, RecvBuffer, RequestError, SendRequest};

const LEN: usize = 10_000;

#[test]
fn a_rail_error_of_another_epoch_changes_nothing() {
    let here = rails();
    let (mut sender, mut peer) = Peer::receiver(&here);
    for epoch in [1, u32::MAX] {
        peer.send(&Frame::RailError { rail: 1, epoch });
    }
    peer.send(&Frame::RailError { rail: 0, epoch: 0 });
    assert_eq!(peer.read(), Some(Frame::Fence { rail: 0, epoch: 0, next: 0, entries: Vec::new() }));
    assert_eq!(sender.rails_up(), 0b10);
}

/// The sender has sent message 0 over rail 0, and the acknowledgement is lost.
struct Unacknowledged {
    sender: SendConnection,
    peer: Peer,
    from: Option<Memory>,
    #[expect(dead_code, reason = "keeps the memory registered")]
    to: Memory,
    send: SendRequest,
    /// What the sender asks.
    entry: FenceEntry,
}

impl Unacknowledged {
    fn new() -> Unacknowledged {
        let plan = Plan::none().fail_completion(0, Status::RetryExceeded);
        let here = Rails::new(vec![software().with_faults(plan), software()], config()).unwrap();
        let (mut sender, mut peer) = Peer::receiver(&here);
        let (from, to) = (here.allocate(LEN).unwrap(), peer.allocate(LEN));
        peer.clear_to_send(0, &to, std::slice::from_ref(&(0..LEN)));
        let send = until(|| sender.isend(&from, 0..LEN, 0).unwrap());
        until(|| {
            sender.progress();
            (sender.rails_up() == 0b10).then_some(())
        });
        let Some(Frame::Fence { rail: 0, epoch: 0, next: 1, entries }) = peer.read() else {
            panic!("rail 0 is not fenced")
        };
        let [entry] = entries[..] else { panic!("{entries:?}") };
        assert_eq!(entry, FenceEntry { slot: 0, generation: 0, attempts: 1, masks: 1 });
        Unacknowledged { sender, peer, from: Some(from), to, send, entry }
    }

    /// The receiver says that nothing has arrived.
    fn answer_lost(&mut self) {
        let entries = vec![FenceEntry { attempts: 0, ..self.entry }];
        self.peer.send(&Frame::Answer { rail: 0, epoch: 0, entries });
    }
}

#[test]
fn an_answer_of_another_epoch_changes_nothing() {
    let mut pair = Unacknowledged::new();
    // It says that the message has arrived.
    pair.peer.send(&Frame::Answer { rail: 0, epoch: 5, entries: vec![pair.entry] });
    pair.answer_lost();
    assert_eq!(until(|| pair.sender.test(pair.send).unwrap()), LEN);
    assert_eq!(pair.sender.counters().rails[0].replays, 1);
    let arrived = until(|| pair.peer.poll(1));
    let imm = Immediate::from_bits(arrived.imm.unwrap());
    assert_eq!((imm.attempt, imm.mask, arrived.byte_len as usize), (1, 0b10, LEN));
}

/// The program takes its memory back although the send is not done. What is sent again then fails.
#[test]
fn a_lost_part_is_not_sent_again_from_memory_that_was_deregistered() {
    let mut pair = Unacknowledged::new();
    pair.from.take().unwrap().deregister(HANG).unwrap();
    pair.answer_lost();
    until(|| {
        pair.sender.progress();
        let arrived = pair.peer.poll(1).filter(|completion| completion.status.is_success());
        assert_eq!(arrived.map(|completion| completion.byte_len), None, "it was sent");
        (pair.sender.rails_up() == 0).then_some(())
    });
    let fenced = pair.peer.read();
    assert!(matches!(fenced, Some(Frame::Fence { rail: 1, epoch: 0, next: 1, .. })), "{fenced:?}");
}

/// More messages than one poll returns are acknowledged and not polled when their rail fails: the sender asks for none of them.
#[test]
fn all_acknowledgements_of_a_failed_rail_count() {
    const COUNT: u64 = 200;
    let here = rails();
    let (mut sender, mut peer) = Peer::receiver(&here);
    let (from, to) = (here.allocate(LEN).unwrap(), peer.allocate(LEN));
    let sends: Vec<_> = (0..COUNT)
        .map(|number| {
            peer.clear_to_send(number, &to, std::slice::from_ref(&(0..LEN)));
            until(|| sender.isend(&from, 0..LEN, 0).unwrap())
        })
        .collect();
    peer.send(&Frame::RailError { rail: 0, epoch: 0 });
    assert_eq!(peer.read(), Some(Frame::Fence { rail: 0, epoch: 0, next: COUNT, entries: Vec::new() }));
    for send in sends {
        assert_eq!(sender.test(send).unwrap(), Some(LEN));
    }
}

#[test]
fn only_the_leader_rail_writes_the_record_of_a_group() {
    let here = rails();
    let (mut sender, mut peer) = Peer::receiver(&here);
    sender.set_split(Split::Fixed([1, 1, 0, 0]));
    let (from, to) = (here.allocate(2 * LEN).unwrap(), peer.allocate(2 * LEN));
    peer.clear_to_send(0, &to, &[0..LEN, LEN..2 * LEN]);
    for (tag, range) in [(1, LEN..2 * LEN), (0, 0..LEN - 1)] {
        until(|| sender.isend(&from, range.clone(), tag).unwrap());
    }
    let arrived = [0, 1].map(|rail| until(|| peer.poll(rail)));
    for completion in &arrived {
        assert_eq!(Immediate::from_bits(completion.imm.unwrap()).mask, 0b11);
    }
    assert_eq!(arrived.map(|completion| completion.byte_len as usize), [Record::len_of(2), 0]);
    let [leader, other] = [0, 1].map(|rail| peer.endpoints[rail].memory.load::<RECORD_LEN>(0).unwrap());
    assert_eq!(Record::decode(&leader, 0).unwrap().sizes[..2], [LEN as u64 - 1, LEN as u64]);
    assert_eq!(other, [0; RECORD_LEN]);
}

/// The sender closes the connection while its receiver sends frames: a socket that is closed with unread bytes is reset, and the
/// receiver would not get the last frame.
#[test]
fn the_last_frame_arrives_while_the_peer_sends() {
    let here = rails();
    let (sender, mut peer) = Peer::receiver(&here);
    let closing = thread::spawn(move || drop(sender));
    let last = until(|| {
        // It changes nothing.
        while !peer.channel.wants_write() {
            let sent = Frame::RailError { rail: 1, epoch: 77 }.send(&mut peer.channel);
            if sent.is_err() {
                break;
            }
        }
        peer.channel.poll_event().unwrap()
    });
    let (kind, payload) = Frame::Close { next: 0, open: Vec::new() }.encode();
    assert_eq!(last, ChannelEvent::Frame { kind, payload });
    assert_eq!(peer.read(), None);
    closing.join().unwrap();
}

/// The receiver closes the connection and exits while frames of the sender are under way: the next frame cannot be sent, and the
/// receiver's last frame was not read yet.
#[test]
fn a_close_that_was_not_read_counts_when_a_frame_cannot_be_sent() {
    let context = rails().context;
    let agreed = Agreement { rails: RAILS, slots: 4, max_group: 1, data_qps: 1, staging: 0 };
    let (mut channel, mut exited) = channels();
    Frame::Close { next: 0, open: Vec::new() }.send(&mut exited).unwrap();
    drop(exited);
    let fence = Frame::Fence { rail: 0, epoch: 0, next: 0, entries: Vec::new() };
    fence.send(&mut channel).unwrap();
    until(|| {
        let mut fds = [PollFd::new(&channel, PollFlags::empty())];
        rustix::event::poll(&mut fds, None).unwrap();
        fds[0].revents().contains(PollFlags::ERR).then_some(())
    });
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let endpoints = create_endpoints(&context, Role::Sender, &agreed);
    let control = Control::new(context.clone(), mailbox.clone(), channel, Role::Sender, agreed);
    mailbox.put_order(Order::Send(fence));
    let parts = Parts { context, mailbox, agreed, endpoints, first_mask: 1 };
    let (mut sender, core) = SendConnection::new(SendCore::new(parts));
    control.run(&core);
    assert_eq!(sender.cause(), Some(Cause::PeerClosed));
}

/// The connection ends while its control thread has built a rail again.
#[test]
fn a_rail_that_returns_after_the_end_changes_nothing() {
    let rails = rails();
    let agreed = Agreement { rails: RAILS, slots: 4, max_group: 1, data_qps: 1, staging: 0 };
    for role in [Role::Sender, Role::Receiver] {
        let context = rails.context.clone();
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let endpoints = create_endpoints(&context, role, &agreed);
        let memory = rails.allocate(LEN).unwrap();
        let endpoint = Box::new(Endpoint::create(&context, 0, role, &agreed, 1).unwrap());
        let parts = Parts { context, mailbox: mailbox.clone(), agreed, endpoints, first_mask: 1 };
        let returned = Mail::Returned { rail: 0, endpoint };
        let aborted = Err(RequestError::Ended(Cause::Aborted));
        match role {
            Role::Sender => {
                let mut core = SendCore::new(parts);
                core.abort();
                mailbox.put_mail(returned);
                for _ in 0..2 {
                    assert_eq!(core.isend(&memory, 0..LEN, 0), aborted.clone().map(|()| None));
                }
                assert_eq!(core.rails_up(), 0);
            }
            Role::Receiver => {
                let mut core = RecvCore::new(parts);
                core.abort();
                mailbox.put_mail(returned);
                for _ in 0..2 {
                    let buffer = RecvBuffer { memory: &memory, range: 0..LEN, tag: 0 };
                    assert_eq!(core.irecv(&[buffer]), aborted.clone().map(|()| None));
                }
                assert_eq!(core.rails_up(), 0);
            }
        }
    }
}
