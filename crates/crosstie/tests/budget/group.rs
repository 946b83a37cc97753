//! Messages, tagged messages, barrier rounds and the hand-over of locks: none allocates in the steady state. Members have no threads.

use std::pin::Pin;
use std::task::{Context, Poll};

use crosstie::bootstrap::{Limits, local};
use crosstie::device::Device;
use crosstie::endpoint::Buffer;
use crosstie::group::{Group, GroupConfig, MemberId, ProgressMode, Tagged, TaggedOptions, Transport};
use crosstie_testkit::allocations;

const WARM_UP: u64 = 3000;
const COUNTED: u64 = 10_000;

/// Two members of a group, for one thread.
fn pair(transport: Transport) -> [Group; 2] {
    let jobs = local::in_process(2, Limits::default()).unwrap();
    let mut groups: Vec<Group> = std::thread::scope(|scope| {
        let joining: Vec<_> = jobs
            .into_iter()
            .map(|mut job| {
                scope.spawn(move || {
                    let device = Device::open(&"software".parse().unwrap()).unwrap();
                    let config = GroupConfig::new(1)
                        .transport(transport)
                        .one_sided(true)
                        .progress(ProgressMode::Manual);
                    Group::join(&mut job, &device, &config).unwrap()
                })
            })
            .collect();
        joining.into_iter().map(|member| member.join().unwrap()).collect()
    });
    groups.sort_by_key(Group::member);
    groups.try_into().unwrap()
}

/// Runs `operation` until everything has its final size, and then many more times, in which it must not allocate.
fn assert_no_allocations(what: &str, mut operation: impl FnMut(u64)) {
    (0..WARM_UP).for_each(&mut operation);
    allocations::assert_none(format_args!("{what}"), || {
        (WARM_UP..WARM_UP + COUNTED).for_each(&mut operation);
    });
}

/// Polls both futures in turn until both have ended.
fn join<A: Future + Unpin, B: Future + Unpin>(mut a: A, mut b: B) -> (A::Output, B::Output) {
    let mut context = Context::from_waker(std::task::Waker::noop());
    let (mut first, mut second) = (None, None);
    loop {
        if first.is_none()
            && let Poll::Ready(output) = Pin::new(&mut a).poll(&mut context)
        {
            first = Some(output);
        }
        if second.is_none()
            && let Poll::Ready(output) = Pin::new(&mut b).poll(&mut context)
        {
            second = Some(output);
        }
        if first.is_some()
            && let Some(second) = second.take()
        {
            return (first.unwrap(), second);
        }
    }
}

#[test]
fn messages_allocate_nothing() {
    for transport in [Transport::Rc, Transport::Ud] {
        let groups = pair(transport);
        let channels =
            groups.each_ref().map(|group| group.open_channel(1, &group.channel_options()).unwrap());
        let mut bytes = Vec::with_capacity(2048);
        let payload = [7; 2048];
        assert_no_allocations(&format!("{transport:?}"), |number| {
            let (from, to) = ((number % 2) as usize, 1 - (number % 2) as usize);
            let len = if number % 3 == 0 { 2048 } else { 64 };
            while !channels[from].try_send(MemberId::new(to), &payload[..len]).unwrap() {
                groups[to].progress();
            }
            while channels[to].try_recv(&mut bytes).unwrap().is_none() {}
            assert_eq!(bytes.len(), len);
        });
    }
}

fn send_tagged(tagged: &[Tagged; 2], number: u64, len: usize, buffers: &mut [Option<Buffer>; 2]) {
    let (from, to) = ((number % 2) as usize, 1 - (number % 2) as usize);
    let recv = tagged[to].irecv(None, Some(number), buffers[to].take().unwrap()).unwrap();
    let send = tagged[from].isend(MemberId::new(to), number, buffers[from].take().unwrap(), ..len).unwrap();
    let (sent, received) = join(send, recv);
    buffers[from] = Some(sent.unwrap());
    let (info, buffer) = received.unwrap();
    assert_eq!((info.tag, info.len), (number, len as u64));
    buffers[to] = Some(buffer);
}

#[test]
fn tagged_messages_allocate_nothing_when_their_receive_is_posted() {
    let groups = pair(Transport::Rc);
    let tagged = groups.each_ref().map(|group| {
        let options = TaggedOptions { eager_max: 1024, ..group.tagged_options() };
        group.open_tagged(1, &options).unwrap()
    });
    let mut buffers = groups.each_ref().map(|group| Some(group.allocate(10_000).unwrap()));
    assert_no_allocations("eager", |number| send_tagged(&tagged, number, 64, &mut buffers));
    assert_no_allocations("pulled", |number| send_tagged(&tagged, number, 10_000, &mut buffers));
    assert_eq!(groups[0].counters().pulls + groups[1].counters().pulls, WARM_UP + COUNTED);
}

#[test]
fn barrier_rounds_and_locks_allocate_nothing() {
    let groups = pair(Transport::Rc);
    let barriers = groups.each_ref().map(|group| group.barrier(0));
    assert_no_allocations("barrier", |_| {
        let (first, second) = join(barriers[0].enter().unwrap(), barriers[1].enter().unwrap());
        assert_eq!(first.unwrap(), second.unwrap());
    });
    let locks = groups.each_ref().map(|group| group.lock(0));
    let handed_over = groups[0].counters().locks.handed_over;
    assert_no_allocations("lock", |number| {
        // The other member has it from the time before.
        let (mine, other) = ((number % 2) as usize, 1 - (number % 2) as usize);
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut acquire = locks[mine].acquire_async();
        let guard = loop {
            match Pin::new(&mut acquire).poll(&mut context) {
                Poll::Ready(guard) => break guard.unwrap(),
                Poll::Pending => _ = groups[other].progress(),
            }
        };
        drop(guard);
    });
    assert!(groups[0].counters().locks.handed_over >= handed_over + COUNTED / 2);
}
