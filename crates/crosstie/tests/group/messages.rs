use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crosstie::group::{
    ChannelOptions, Counters, GroupConfig, GroupError, MemberId, OnRefusal, PacketKind, ProgressMode, Token,
    Transport,
};

use super::{run, total};

/// The bytes of message `number` of a sender: its length depends on the number, its contents on both.
fn message(sender: usize, number: usize, max: usize) -> Vec<u8> {
    let len = ((number * 2654435761) >> 7) % max;
    let mut bytes = format!("{sender} {number} ").into_bytes();
    bytes.resize(bytes.len() + len, (sender * 31 + number) as u8);
    bytes
}

/// Every member sends to every other one and receives from all: each message once, in order for each sender, unchanged.
fn all_to_all(
    config: &GroupConfig,
    change: impl Fn(&mut ChannelOptions) + Sync,
    count: usize,
    max: usize,
) -> Vec<Counters> {
    const MEMBERS: usize = 3;
    let counters = run(MEMBERS as u32, config, |group| {
        let mut options = group.channel_options();
        change(&mut options);
        let channel = group.open_channel(5, &options).unwrap();
        group.barrier(0).wait().unwrap();
        let me = group.member().index();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..count {
                    for to in (0..MEMBERS).filter(|to| *to != me) {
                        channel.send(MemberId::new(to), &message(me, number, max)).unwrap();
                    }
                }
            });
            let (mut next, mut bytes) = ([0; MEMBERS], Vec::new());
            for _ in 0..count * (MEMBERS - 1) {
                let from = channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap().index();
                assert_eq!(bytes, message(from, next[from], max), "message {} of {from}", next[from]);
                next[from] += 1;
            }
        });
        channel.flush().unwrap();
        group.barrier(0).wait().unwrap();
        group.counters()
    });
    let delivered: u64 = counters.iter().map(|counters| counters.delivered).sum();
    assert_eq!(delivered, (count * MEMBERS * (MEMBERS - 1)) as u64);
    if config_has_no_loss(config) {
        assert_eq!(counters.iter().map(|counters| counters.dropped.invalid).sum::<u64>(), 0);
    }
    let combined: u64 = counters.iter().map(|counters| counters.combined).sum();
    assert!(total(&counters, PacketKind::Data) + combined >= delivered);
    counters
}

fn config_has_no_loss(config: &GroupConfig) -> bool {
    !format!("{config:?}").contains("receive_loss: Some")
}

#[test]
fn messages_arrive_once_and_in_order_over_rc_and_ud() {
    for transport in [Transport::Rc, Transport::Ud] {
        let config = GroupConfig::new(1).transport(transport);
        all_to_all(&config, |_| {}, 300, 100);
        all_to_all(&config, |_| {}, 60, 30_000);
    }
}

#[test]
fn small_messages_travel_together_and_arrive_once_and_in_order() {
    for transport in [Transport::Rc, Transport::Ud] {
        for (combine_from, max) in [(1, 60), (1, 600), (4, 60), (u32::MAX, 60)] {
            let config = GroupConfig::new(1).transport(transport);
            let change = |options: &mut ChannelOptions| options.combine_from = combine_from;
            let counters = all_to_all(&config, change, 2000, max);
            let combined: u64 = counters.iter().map(|counters| counters.combined).sum();
            // The receiver of a burst of 2000 messages is behind at least once.
            assert_eq!(combined > 0, combine_from < u32::MAX, "{transport:?}, {combine_from}");
        }
        let config = GroupConfig::new(1).transport(transport).receive_loss(0.05, 17);
        let change = |options: &mut ChannelOptions| {
            (options.combine_from, options.resend_after) = (1, 2_000_000);
            (options.receive_buffer, options.receive_table) = (16 << 10, 16);
        };
        all_to_all(&config, change, 1000, 300);
    }
}

/// The sender makes no call after its burst: the group's thread posts what waited for more messages.
#[test]
fn burst_arrives_although_its_sender_makes_no_further_call() {
    let (done, is_done) = std::sync::mpsc::channel();
    let is_done = std::sync::Mutex::new(is_done);
    let counters = run(2, &GroupConfig::new(1), |group| {
        let hour = 3_600_000_000_000;
        let options = ChannelOptions {
            combine_from: 1,
            resend_after: hour,
            give_up_after: hour,
            ..group.channel_options()
        };
        let channel = group.open_channel(5, &options).unwrap();
        group.barrier(0).wait().unwrap();
        for count in [2u32, 3, 10, 100, 333] {
            if group.member().index() == 0 {
                for number in 0..count {
                    channel.send(MemberId::new(1), &number.to_le_bytes()).unwrap();
                }
                is_done.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
            } else {
                let mut bytes = Vec::new();
                for number in 0..count {
                    channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                    assert_eq!(bytes, number.to_le_bytes());
                }
                done.send(()).unwrap();
            }
        }
        group.barrier(0).wait().unwrap();
        group.counters()
    });
    assert!(counters[0].combined > 0 && counters[0].resent == 0);
}

/// Without a thread of the group nobody would post them.
#[test]
fn no_message_waits_for_others_without_the_groups_thread() {
    let config = GroupConfig::new(1).progress(ProgressMode::Manual);
    let (done, is_done) = std::sync::mpsc::channel();
    let is_done = std::sync::Mutex::new(is_done);
    let counters = run(2, &config, |group| {
        let options = ChannelOptions { combine_from: 1, ..group.channel_options() };
        let channel = group.open_channel(5, &options).unwrap();
        group.barrier(0).wait().unwrap();
        if group.member().index() == 0 {
            for number in 0..50u32 {
                channel.send(MemberId::new(1), &number.to_le_bytes()).unwrap();
            }
            is_done.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        } else {
            for number in 0..50u32 {
                assert_eq!(channel.recv().unwrap().bytes, number.to_le_bytes());
            }
            done.send(()).unwrap();
        }
        group.barrier(0).wait().unwrap();
        group.counters()
    });
    assert_eq!(counters[0].combined, 0);
}

#[test]
fn fenced_messages_travel_together_and_stale_ones_are_dropped() {
    run(2, &GroupConfig::new(1).locks(4), |group| {
        let options = ChannelOptions { combine_from: 1, ..group.channel_options() };
        let channel = group.open_channel(5, &options).unwrap();
        group.barrier(0).wait().unwrap();
        let to = MemberId::new(1);
        let token = |count: u64| Token { view: group.view().number, count };
        if group.member().index() == 0 {
            for number in 0..500u64 {
                let bytes = number.to_le_bytes();
                match number % 5 {
                    0 => channel.send(to, &bytes).unwrap(),
                    // The receiver has seen a newer token of this lock.
                    1 if number > 5 => channel.send_with_token(to, 1, token(number - 5), &bytes).unwrap(),
                    1 => channel.send_with_token(to, 1, token(1), &bytes).unwrap(),
                    _ => channel.send_with_token(to, 1, token(number), &bytes).unwrap(),
                }
            }
            channel.flush().unwrap();
        } else {
            for number in (0..500u64).filter(|number| number % 5 != 1 || *number < 5) {
                assert_eq!(channel.recv().unwrap().bytes, number.to_le_bytes());
            }
            assert_eq!(group.counters().stale_tokens, 99);
        }
        group.barrier(0).wait().unwrap();
        assert!(group.member().index() == 1 || group.counters().combined > 0);
    });
}

#[test]
fn full_receiver_refuses_and_asks_again() {
    for transport in [Transport::Rc, Transport::Ud] {
        for on_refusal in [OnRefusal::WaitForRequest, OnRefusal::Retry] {
            let small = |options: &mut ChannelOptions| {
                (options.receive_buffer, options.receive_table) = (4096, 4);
                options.on_refusal = on_refusal;
            };
            all_to_all(&GroupConfig::new(1).transport(transport), small, 200, 1500);
        }
    }
}

/// More long messages than the receiver keeps for its application. One is given up half-way.
#[test]
fn unread_long_messages_stop_their_sender_until_they_are_taken() {
    const LEN: usize = 40_000;
    const COUNT: u8 = 60;
    let (full, is_full) = std::sync::mpsc::channel();
    let is_full = std::sync::Mutex::new(is_full);
    let counters = run(2, &GroupConfig::new(1), |group| {
        let options = ChannelOptions { max_message: 64 << 10, ..group.channel_options() };
        let channel = group.open_channel(5, &options).unwrap();
        group.barrier(0).wait().unwrap();
        if group.member().index() == 0 {
            let mut number = 0;
            while channel.send_timeout(MemberId::new(1), &[number; LEN], Duration::from_millis(200)).is_ok() {
                number += 1;
                assert!(number < COUNT, "nothing stops the sender");
            }
            assert!(number > 0);
            full.send(()).unwrap();
            for number in number..COUNT {
                channel.send(MemberId::new(1), &[number; LEN]).unwrap();
            }
            channel.flush_timeout(Duration::from_secs(60)).unwrap();
        } else {
            is_full.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
            let mut bytes = Vec::new();
            for number in 0..COUNT {
                channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                assert!(bytes.len() == LEN && bytes.iter().all(|byte| *byte == number), "message {number}");
            }
        }
        group.barrier(0).wait().unwrap();
        group.counters()
    });
    assert_eq!((counters[0].resent, counters[1].refused), (0, 0));
}

/// Nobody sends again by time: the member asks for what it has missed.
#[test]
fn packets_for_a_channel_that_is_opened_late_arrive() {
    run(2, &GroupConfig::new(1), |group| {
        let barrier = group.barrier(0);
        if group.member().index() == 0 {
            let channel = group.open_channel(5, &group.channel_options()).unwrap();
            for number in 0..20u32 {
                channel.send(MemberId::new(1), &number.to_le_bytes()).unwrap();
            }
            barrier.wait().unwrap();
            channel.flush_timeout(Duration::from_secs(60)).unwrap();
        } else {
            barrier.wait().unwrap();
            let channel = group.open_channel(5, &group.channel_options()).unwrap();
            let mut bytes = Vec::new();
            for number in 0..20u32 {
                channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                assert_eq!(bytes, number.to_le_bytes());
            }
        }
        barrier.wait().unwrap();
    });
}

/// Member 2 does not run: without a thread of the group it does nothing outside of its own calls.
#[test]
fn member_that_does_not_run_stops_no_messages_between_others() {
    const COUNT: u32 = 5_000;
    let (done, is_done) = std::sync::mpsc::channel();
    let is_done = std::sync::Mutex::new(is_done);
    for transport in [Transport::Rc, Transport::Ud] {
        let config = GroupConfig::new(1).transport(transport).progress(ProgressMode::Manual);
        run(3, &config, |group| {
            let channel = group.open_channel(5, &group.channel_options()).unwrap();
            let (me, stopped) = (group.member().index(), MemberId::new(2));
            group.barrier(0).wait().unwrap();
            let mut bytes = Vec::new();
            if me == 2 {
                let sent: u32 = is_done.lock().unwrap().recv_timeout(Duration::from_secs(120)).unwrap();
                for number in 0..sent {
                    channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                    assert_eq!(bytes, number.to_le_bytes());
                }
            } else {
                let (mut to_stopped, mut received) = (0u32, 0);
                for number in 0..COUNT {
                    // Up to its limit, and again and again.
                    if me == 0 && channel.try_send(stopped, &to_stopped.to_le_bytes()).unwrap() {
                        to_stopped += 1;
                    }
                    let mut sent = false;
                    while !sent || received <= number.saturating_sub(8) {
                        sent =
                            sent || channel.try_send(MemberId::new(1 - me), &number.to_le_bytes()).unwrap();
                        while channel.try_recv(&mut bytes).unwrap().is_some() {
                            assert_eq!(bytes, u32::to_le_bytes(received));
                            received += 1;
                        }
                    }
                }
                while received < COUNT {
                    channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                    received += 1;
                }
                assert!(group.dead().is_empty());
                if me == 0 {
                    assert!((1..COUNT / 2).contains(&to_stopped), "{to_stopped}");
                    let late = channel.flush_timeout(Duration::from_millis(5));
                    assert_eq!(late, Err(GroupError::TimedOut), "it has not acknowledged");
                    done.send(to_stopped).unwrap();
                }
            }
            group.barrier(0).wait().unwrap();
        });
    }
}

#[test]
fn lost_packets_are_sent_again() {
    for transport in [Transport::Rc, Transport::Ud] {
        let config = GroupConfig::new(1).transport(transport).receive_loss(0.05, 17);
        let fast = |options: &mut ChannelOptions| options.resend_after = 2_000_000;
        all_to_all(&config, fast, 300, 3000);
    }
}

/// Nobody sends again for an hour: a packet or an acknowledgement that is lost inside the library would stop the sender.
#[test]
fn nothing_waits_for_the_resend_timer_when_nothing_is_lost() {
    for (ack_every, window) in [(1, 1024), (16, 64)] {
        let counters = run(2, &GroupConfig::new(1), |group| {
            let hour = 3_600_000_000_000;
            let options = ChannelOptions {
                ack_every,
                window,
                resend_after: hour,
                give_up_after: hour,
                ..group.channel_options()
            };
            let channel = group.open_channel(5, &options).unwrap();
            let me = group.member().index();
            let mut bytes = Vec::new();
            let mut receive = |number: u32| {
                channel.recv_timeout(Duration::from_secs(60), &mut bytes).unwrap();
                assert_eq!(bytes, number.to_le_bytes());
            };
            for _ in 0..20 {
                group.barrier(0).wait().unwrap();
                for number in 0..2000u32 {
                    match me {
                        0 => channel.send(MemberId::new(1), &number.to_le_bytes()).unwrap(),
                        _ => receive(number),
                    }
                }
                channel.flush().unwrap();
                group.barrier(0).wait().unwrap();
                // Round trips: messages carry the acknowledgements.
                for number in 0..200u32 {
                    for step in 0..2 {
                        match step == me {
                            true => channel.send(MemberId::new(1 - me), &number.to_le_bytes()).unwrap(),
                            false => receive(number),
                        }
                    }
                }
                channel.flush().unwrap();
            }
            group.barrier(0).wait().unwrap();
            group.counters()
        });
        assert_eq!(counters[0].resent + counters[1].resent, 0);
    }
}

#[test]
fn many_threads_of_one_member_send_long_messages_to_the_same_member() {
    run(2, &GroupConfig::new(1), |group| {
        let channel = group.open_channel(0, &group.channel_options()).unwrap();
        group.barrier(0).wait().unwrap();
        if group.member().index() == 0 {
            std::thread::scope(|scope| {
                for thread in 0..3u8 {
                    let channel = &channel;
                    scope.spawn(move || {
                        for _ in 0..20 {
                            channel.send(MemberId::new(1), &vec![thread; 50_000]).unwrap();
                        }
                    });
                }
            });
        } else {
            let mut counts = [0; 3];
            for _ in 0..60 {
                let message = channel.recv().unwrap();
                assert_eq!(message.bytes.len(), 50_000);
                assert!(
                    message.bytes.iter().all(|byte| *byte == message.bytes[0]),
                    "two messages were mixed"
                );
                counts[usize::from(message.bytes[0])] += 1;
            }
            assert_eq!(counts, [20; 3]);
        }
        group.barrier(0).wait().unwrap();
    });
}

#[test]
fn future_receives_and_sends_to_the_dead_fail() {
    run(3, &GroupConfig::new(1), |group| {
        let channel = group.open_channel(2, &group.channel_options()).unwrap();
        let barrier = group.barrier(0);
        barrier.wait().unwrap();
        let (left, right) = (MemberId::new(0), MemberId::new(1));
        if group.member() == left {
            std::thread::sleep(Duration::from_millis(20));
            channel.send(right, b"to a future").unwrap();
        } else if group.member() == right {
            assert_eq!(futures::executor::block_on(channel.recv_async()).unwrap().bytes, b"to a future");
            let mut bytes = Vec::new();
            let late = channel.recv_timeout(Duration::from_millis(5), &mut bytes);
            assert_eq!(late, Err(GroupError::TimedOut));
        }
        // The one that is expelled may hear of it before its barrier ends.
        assert!(barrier.wait().is_ok() || group.member() == MemberId::new(2));
        if group.member() == left {
            group.expel(MemberId::new(2)).unwrap();
            let gone = MemberId::new(2);
            assert_eq!(channel.send(gone, b"too late"), Err(GroupError::PeerDead(gone)));
        }
        assert!(matches!(channel.send(MemberId::new(9), b""), Err(GroupError::NoSuchPeer(_))));
    });
}

/// Counts how often it was woken.
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// As `select!` in a loop does it: polled again and again, or made, polled and dropped.
#[test]
fn future_that_waits_keeps_one_waker() {
    run(2, &GroupConfig::new(1), |group| {
        let channel = group.open_channel(2, &group.channel_options()).unwrap();
        group.barrier(0).wait().unwrap();
        if group.member().index() == 0 {
            let count = Arc::new(Count(AtomicUsize::new(0)));
            let waker = Waker::from(count.clone());
            let mut context = Context::from_waker(&waker);
            let mut kept = pin!(channel.recv_async());
            for _ in 0..100 {
                assert!(kept.as_mut().poll(&mut context).is_pending());
                assert!(pin!(channel.recv_async()).poll(&mut context).is_pending());
            }
            assert_eq!(Arc::strong_count(&count), 3, "one is registered");
            group.barrier(0).wait().unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            let message = loop {
                match kept.as_mut().poll(&mut context) {
                    Poll::Ready(message) => break message.unwrap(),
                    Poll::Pending => assert!(Instant::now() < end, "no message"),
                }
            };
            assert_eq!(message.bytes, b"wake up");
        } else {
            group.barrier(0).wait().unwrap();
            channel.send(MemberId::new(0), b"wake up").unwrap();
        }
        group.barrier(0).wait().unwrap();
    });
}

/// A task whose waker polls it at once, as executors do that run inline.
struct Task {
    future: Mutex<Pin<Box<dyn Future<Output = ()> + Send>>>,
    ended: AtomicUsize,
}

impl Task {
    fn start(future: impl Future<Output = ()> + Send + 'static) -> Arc<Task> {
        let task = Arc::new(Task { future: Mutex::new(Box::pin(future)), ended: AtomicUsize::new(0) });
        task.clone().wake();
        task
    }

    fn wait(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.ended.load(SeqCst) == 0 {
            assert!(Instant::now() < end, "the waker does not come back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(self.clone());
        // Woken while it is polled: it is polled again.
        let Ok(mut future) = self.future.try_lock() else { return };
        if self.ended.load(SeqCst) == 0 && future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            self.ended.store(1, SeqCst);
        }
    }
}

#[test]
fn waker_may_poll_its_future_at_once() {
    run(2, &GroupConfig::new(1), |group| {
        let channel = group.open_channel(2, &group.channel_options()).unwrap();
        let (lock, barrier) = (group.lock(0), group.barrier(0));
        let guard = (group.member().index() == 0).then(|| lock.acquire().unwrap());
        barrier.wait().unwrap();
        if let Some(guard) = guard {
            std::thread::sleep(Duration::from_millis(20));
            guard.release().unwrap();
            channel.send(MemberId::new(1), b"hello").unwrap();
            channel.flush().unwrap();
        } else {
            let acquire = Task::start(async move { drop(lock.acquire_async().await.unwrap()) });
            let receive = Task::start(async move { drop(channel.recv_async().await.unwrap()) });
            acquire.wait();
            receive.wait();
        }
        barrier.wait().unwrap();
    });
}
