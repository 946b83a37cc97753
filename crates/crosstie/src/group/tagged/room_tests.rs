//! Long messages for whose PULL, or for the answer to it, there is no room yet.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::bootstrap::{self, Bootstrap, local};
use crate::device::Device;
use crate::endpoint::OperationFuture;
use crate::group::{GroupConfig, ProgressMode};

const EAGER_MAX: u32 = 64;
const LONG: usize = 1000;

/// Members of one group, all in this thread: nothing moves unless the test calls it.
struct Members {
    groups: Vec<Group>,
    tagged: Vec<Tagged>,
}

impl Members {
    fn new(members: u32, change: impl Fn(&mut TaggedOptions)) -> Members {
        let jobs = local::in_process(members, bootstrap::Limits::default()).unwrap();
        let join = |job: &mut dyn Bootstrap| {
            let device = Device::open(&"software".parse().unwrap()).unwrap();
            let config = GroupConfig::new(1).one_sided(true).progress(ProgressMode::Manual);
            let group = Group::join(job, &device, &config).unwrap();
            job.barrier().unwrap();
            group
        };
        let groups: Vec<Group> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                jobs.into_iter().map(|mut job| scope.spawn(move || join(&mut job))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let open = |group: &Group| {
            let mut options = TaggedOptions { eager_max: EAGER_MAX, ..group.tagged_options() };
            change(&mut options);
            group.open_tagged(9, &options).unwrap()
        };
        let tagged = groups.iter().map(open).collect();
        Members { groups, tagged }
    }

    fn progress(&self) {
        for _ in 0..8 {
            for group in &self.groups {
                group.progress();
            }
        }
    }

    /// Runs all members until `take` returns something.
    fn run<T>(&self, mut take: impl FnMut() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(taken) = take() {
                return taken;
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "nothing moves any more");
            self.progress();
        }
    }

    fn isend(&self, from: usize, to: usize, bytes: &[u8]) -> SendRequest {
        let buffer = self.groups[from].allocate(bytes.len()).unwrap();
        buffer.write(0, bytes).unwrap();
        self.tagged[from].isend(MemberId::new(to), 1, buffer, ..).unwrap()
    }

    fn irecv(&self, at: usize, from: Option<usize>) -> RecvRequest {
        let buffer = self.groups[at].allocate(LONG).unwrap();
        self.tagged[at].irecv(from.map(MemberId::new), None, buffer).unwrap()
    }

    fn end_send(&self, mut send: SendRequest) {
        self.run(|| send.try_take()).unwrap();
    }

    fn end_recv(&self, mut recv: RecvRequest) -> Vec<u8> {
        let (info, buffer) = self.run(|| recv.try_take()).unwrap();
        buffer.to_vec()[..info.len as usize].to_vec()
    }

    /// Takes all room for operations of member `at` with member `with`, until the futures are dropped.
    fn fill(&self, at: usize, with: usize) -> Vec<OperationFuture<()>> {
        let endpoint = self.groups[at].one_sided.as_ref().unwrap().endpoint(MemberId::new(with)).unwrap();
        core::iter::from_fn(|| endpoint.imm_recv().ok()).collect()
    }

    fn pulls(&self, at: usize) -> u64 {
        self.groups[at].counters().pulls
    }
}

#[test]
fn long_message_waits_for_room_for_its_pull_and_others_do_not_wait_for_it() {
    let members = Members::new(3, |_| {});
    let mut filled = members.fill(1, 0);
    let mut send = members.isend(0, 1, &[3; LONG]);
    let mut recv = members.irecv(1, Some(0));
    members.progress();
    assert!(recv.try_take().is_none() && send.try_take().is_none());
    assert_eq!(members.pulls(1), 0);

    // Short messages in both directions, long ones in the other direction and of another member.
    for (from, to, len) in [(0, 1, 5), (1, 0, 5), (1, 0, LONG), (2, 1, LONG)] {
        let other = members.isend(from, to, &vec![len as u8; len]);
        let received = members.end_recv(members.irecv(to, Some(from)));
        assert_eq!(received, vec![len as u8; len]);
        members.end_send(other);
    }
    assert!(recv.try_take().is_none() && send.try_take().is_none());

    filled.pop();
    assert_eq!(members.end_recv(recv), [3; LONG]);
    members.end_send(send);
    assert_eq!(members.pulls(1), 2);
}

/// On a small stack: what has waited is not pulled by functions that call each other once for each message.
#[test]
fn all_long_messages_that_waited_for_room_arrive() {
    let body = || {
        let members = Members::new(2, |_| {});
        let filled = members.fill(1, 0);
        let number = |number: usize| [number as u8; LONG];
        let start = |index| {
            let pair = (members.isend(0, 1, &number(index)), members.irecv(1, None));
            members.progress();
            pair
        };
        let pairs: Vec<(SendRequest, RecvRequest)> = (0..1000).map(start).collect();
        assert_eq!(members.pulls(1), 0);
        drop(filled);
        for (index, (send, recv)) in pairs.into_iter().enumerate() {
            assert_eq!(members.end_recv(recv), number(index));
            members.end_send(send);
        }
        assert_eq!(members.pulls(1), 1000);
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(body).unwrap().join().unwrap();
}

#[test]
fn receive_that_is_dropped_while_its_pull_waits_takes_its_message_and_ends_the_send() {
    let members = Members::new(2, |_| {});
    let filled = members.fill(1, 0);
    let sends = [1, 2, 3, 4].map(|number| members.isend(0, 1, &[number; LONG]));
    let [dropped, late, cancelled, last] = [(); 4].map(|()| members.irecv(1, Some(0)));
    members.progress();
    drop(dropped);
    let late = late.wait_timeout(Duration::from_millis(1)).unwrap_err();
    assert!(late.error == GroupError::TimedOut && late.buffer.is_none());
    let cancelled = cancelled.cancel().unwrap_err();
    drop(filled);
    assert_eq!(members.end_recv(cancelled), [3; LONG], "a message had matched it");
    assert_eq!(members.end_recv(last), [4; LONG]);
    sends.into_iter().for_each(|send| members.end_send(send));
}

#[test]
fn receive_that_has_ended_is_not_cancelled() {
    let members = Members::new(2, |_| {});
    for len in [5, LONG] {
        let recv = members.irecv(1, None);
        let send = members.isend(0, 1, &vec![7; len]);
        members.progress();
        let mut recv = recv.cancel().unwrap_err();
        assert_eq!(recv.try_take().unwrap().unwrap().0.len, len as u64);
        assert!(recv.cancel().is_err(), "its message was taken");
        members.end_send(send);
    }
    assert_eq!(members.irecv(1, None).cancel().unwrap().len(), LONG);
}

#[test]
fn death_of_a_sender_ends_receives_whose_pull_waits() {
    let members = Members::new(3, |_| {});
    let filled = members.fill(1, 0);
    let _sends = [1, 2].map(|number| members.isend(0, 1, &[number; LONG]));
    let recvs = [(); 2].map(|()| members.irecv(1, Some(0)));
    members.progress();
    members.groups[1].expel(MemberId::new(0)).unwrap();
    for mut recv in recvs {
        let failed = members.run(|| recv.try_take()).unwrap_err();
        assert_eq!(
            (failed.error, failed.buffer.unwrap().len()),
            (GroupError::PeerDead(MemberId::new(0)), LONG)
        );
    }
    drop(filled);
    let send = members.isend(2, 1, &[5; LONG]);
    assert_eq!(members.end_recv(members.irecv(1, None)), [5; LONG]);
    members.end_send(send);
}

/// Member 0 takes nothing, so that the answer to it has no room. The answer to member 2 does not wait for that.
#[test]
fn answer_that_has_no_room_delays_only_its_own_send() {
    let members = Members::new(3, |options| {
        options.unexpected = 4;
        (options.channel.window, options.channel.receive_table, options.channel.ack_every) = (4, 4, 1);
    });
    let mut send = members.isend(0, 1, &[1; LONG]);
    members.progress();
    let mut shorts = 0;
    loop {
        let short = members.isend(1, 0, b"short");
        shorts += 1;
        members.progress();
        if !matches!(short.state, SendState::Ended(_)) {
            break;
        }
    }
    assert_eq!(members.end_recv(members.irecv(1, Some(0))), [1; LONG]);
    let other = members.isend(2, 1, &[2; LONG]);
    assert_eq!(members.end_recv(members.irecv(1, Some(2))), [2; LONG]);
    members.end_send(other);
    assert!(send.try_take().is_none());
    for _ in 0..shorts {
        assert_eq!(members.end_recv(members.irecv(0, Some(1))), b"short");
    }
    members.end_send(send);
}

/// A member that sends without end and takes no answers cannot make the table of answers grow without end.
#[test]
fn answers_to_a_member_are_limited() {
    let members = Members::new(2, |_| {});
    members.tagged[1].with_state(|tagged| {
        (0..Limits::MAX_TABLE as u64).for_each(|key| tagged.answer(MemberId::new(0), key, true));
        // No room, until the test makes some.
        tagged.unanswered = 0;
    });
    let mut recv = members.irecv(1, None);
    drop(members.isend(0, 1, &[1; LONG]));
    members.progress();
    assert!(recv.try_take().is_none());
    assert_eq!(members.groups[1].counters().dropped.invalid, 1);
    members.tagged[1].with_state(|tagged| tagged.answers[0].clear());
    let send = members.isend(0, 1, &[2; LONG]);
    assert_eq!(members.end_recv(recv), [2; LONG]);
    members.end_send(send);
}

/// What a member does in [`messages_arrive_in_order_whatever_room_there_is`].
#[derive(Clone, Debug)]
enum Step {
    Send {
        len: usize,
    },
    Recv,
    /// Stops the receive with this index.
    Stop(usize),
    Fill,
    /// Makes room for so many.
    Free(usize),
    Progress,
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let step = prop_oneof![
        4 => prop_oneof![1..EAGER_MAX as usize, EAGER_MAX as usize + 1..LONG].prop_map(|len| Step::Send { len }),
        4 => Just(Step::Recv),
        1 => (0..64usize).prop_map(Step::Stop),
        1 => Just(Step::Fill),
        2 => (1..4usize).prop_map(Step::Free),
        4 => Just(Step::Progress),
    ];
    (0..2usize, step)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 5))]

    /// Two members send to each other. Receives get the messages in order; one that is cancelled takes none. In the end, everything has ended.
    #[test]
    fn messages_arrive_in_order_whatever_room_there_is(steps in prop::collection::vec(step(), 1..120)) {
        let members = Members::new(2, |options| options.receives = 128);
        let bytes = |from: usize, number: usize, len: usize| {
            (0..len).map(|at| (at * 3 + number * 7 + from) as u8).collect::<Vec<u8>>()
        };
        // By member: lengths and requests of its sends; its receives, `None` for one that was dropped after it had taken a message.
        let mut lens = [Vec::new(), Vec::new()];
        let mut sends = [Vec::new(), Vec::new()];
        let mut recvs: [Vec<Option<RecvRequest>>; 2] = [Vec::new(), Vec::new()];
        let mut filled = [Vec::new(), Vec::new()];
        for (me, step) in steps {
            match step {
                Step::Send { len } => {
                    sends[me].push(members.isend(me, 1 - me, &bytes(me, lens[me].len(), len)));
                    lens[me].push(len);
                }
                Step::Recv => recvs[me].push(Some(members.irecv(me, None))),
                Step::Stop(index) if index < recvs[me].len() => {
                    // Those that cannot be cancelled are dropped.
                    if recvs[me][index].take().is_some_and(|recv| recv.cancel().is_ok()) {
                        recvs[me].remove(index);
                    }
                }
                Step::Stop(_) => {}
                Step::Fill => filled[me].extend(members.fill(me, 1 - me)),
                Step::Free(count) => {
                    let left = filled[me].len().saturating_sub(count);
                    filled[me].truncate(left);
                }
                Step::Progress => members.progress(),
            }
        }
        drop(filled);
        for (me, mut recvs) in recvs.into_iter().enumerate() {
            let from = 1 - me;
            while recvs.len() < lens[from].len() {
                recvs.push(Some(members.irecv(me, None)));
            }
            for (number, (recv, len)) in recvs.into_iter().zip(&lens[from]).enumerate() {
                if let Some(recv) = recv {
                    prop_assert_eq!(members.end_recv(recv), bytes(from, number, *len));
                }
            }
        }
        sends.into_iter().flatten().for_each(|send| members.end_send(send));
        for tagged in &members.tagged {
            prop_assert_eq!(tagged.unexpected(), 0);
        }
    }
}
