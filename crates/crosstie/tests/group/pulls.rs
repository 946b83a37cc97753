//! PULLs for which there is no room, at the caller or at the target.

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::device::fault::Plan;
use crosstie::endpoint::{NotStarted, PoolBuffer};
use crosstie::group::{Group, GroupConfig, MemberId, MemberMemory, TaggedOptions};

use super::run;

const LONG: usize = 1000;

#[test]
fn pull_outside_of_either_memory_is_refused_and_the_next_succeeds() {
    run(2, &GroupConfig::new(1).one_sided(true), |group| {
        let channel = group.open_channel(3, &group.channel_options()).unwrap();
        group.barrier(0).wait().unwrap();
        if group.member() == MemberId::new(0) {
            let window = group.allocate(64).unwrap();
            window.write(0, &[7; 64]).unwrap();
            channel.send(MemberId::new(1), &group.describe(&window).unwrap().encode()).unwrap();
            group.barrier(0).wait().unwrap();
            return;
        }
        let memory = group.import(&channel.recv().unwrap().bytes).unwrap();
        let mut buffer = group.allocate(65).unwrap();
        for (range, offset) in [(0..65, 0), (0..1, 64), (0..2, u64::MAX)] {
            let refused = group.pull(buffer, range, &memory, offset).unwrap_err();
            assert!(matches!(refused.cause, NotStarted::Remote { .. }), "{}", refused.cause);
            buffer = refused.buffer;
        }
        let refused = group.pull(buffer, 60..66, &memory, 0).unwrap_err();
        assert!(matches!(refused.cause, NotStarted::Local(_)), "{}", refused.cause);
        let pulled = group.pull(refused.buffer, 1.., &memory, 0).unwrap().wait().unwrap().buffer;
        assert_eq!(pulled.to_vec(), [&[0][..], &[7; 64]].concat());
        group.barrier(0).wait().unwrap();
    });
}

/// The port of member 1 is down while it PULLs as much as it can. The next PULL is refused; a long message waits for its own PULL, and
/// the other members go on. When the port is up again, everything arrives.
#[test]
fn pulls_beyond_the_limit_are_refused_and_long_messages_wait_for_room() {
    let jobs = local::in_process(3, Limits::default()).unwrap();
    std::thread::scope(|scope| {
        for mut job in jobs {
            scope.spawn(move || {
                let plan = Plan::none().give_up_after(u64::MAX);
                let device = Device::open(&"software".parse().unwrap()).unwrap().with_faults(plan);
                let group = Group::join(&mut job, &device, &GroupConfig::new(1).one_sided(true)).unwrap();
                let options = TaggedOptions { eager_max: 64, ..group.tagged_options() };
                let tagged = group.open_tagged(9, &options).unwrap();
                let window = group.allocate(64).unwrap();
                let described = job.all_gather(&group.describe(&window).unwrap().encode()).unwrap();
                let [zero, one, two] = [0, 1, 2].map(MemberId::new);
                let long = || group.allocate(LONG).unwrap();

                if group.member() == one {
                    let faults = device.faults().unwrap();
                    faults.port_down();
                    let memory = group.import(&described[0]).unwrap();
                    let pool = group.allocate(64).unwrap().into_pool();
                    let pulls = pull_until_refused(&group, &pool, &memory);
                    let mut recv = tagged.irecv(Some(zero), None, long()).unwrap();
                    job.barrier().unwrap();
                    // The others have met: member 0 has sent.
                    job.barrier().unwrap();
                    assert!(recv.try_take().is_none());
                    faults.port_up();
                    for pull in pulls {
                        assert_eq!(pull.wait().unwrap().bytes, 64);
                    }
                    let (info, buffer) = recv.wait().unwrap();
                    assert_eq!((info.from, info.len, buffer.to_vec()), (zero, LONG as u64, vec![3; LONG]));
                } else {
                    job.barrier().unwrap();
                    let send = (group.member() == zero).then(|| {
                        let buffer = long();
                        buffer.write(0, &[3; LONG]).unwrap();
                        tagged.isend(one, 1, buffer, ..).unwrap()
                    });
                    let other = if group.member() == zero { two } else { zero };
                    let sent = tagged.isend(other, 2, long(), ..).unwrap();
                    let (info, _) = tagged.irecv(Some(other), Some(2), long()).unwrap().wait().unwrap();
                    assert_eq!((info.from, info.len), (other, LONG as u64));
                    sent.wait().unwrap();
                    job.barrier().unwrap();
                    send.into_iter().for_each(|send| drop(send.wait().unwrap()));
                }
                job.barrier().unwrap();
            });
        }
    });
}

fn pull_until_refused(
    group: &Group,
    pool: &PoolBuffer,
    memory: &MemberMemory,
) -> Vec<crosstie::endpoint::OperationFuture<PoolBuffer>> {
    let mut pulls = Vec::new();
    loop {
        match group.pull(pool.clone(), .., memory, 0) {
            Ok(pull) => pulls.push(pull),
            Err(refused) => {
                assert!(matches!(refused.cause, NotStarted::TooManyOperations(_)), "{}", refused.cause);
                assert_eq!(refused.buffer.len(), 64, "the buffer comes back");
                return pulls;
            }
        }
        assert!(pulls.len() < 1 << 20);
    }
}
