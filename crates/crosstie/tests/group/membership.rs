use crosstie::bootstrap::{Bootstrap, Limits, Secret, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, GroupError, JoinError, LockError, MemberId, ProgressMode};

/// Runs `body` for each rank of a job of threads.
fn ranks(size: u32, body: impl Fn(&mut dyn Bootstrap, &Device) + Sync) {
    std::thread::scope(|scope| {
        for mut job in local::in_process(size, Limits::default()).unwrap() {
            let body = &body;
            scope.spawn(move || {
                let device = Device::open(&"software".parse().unwrap()).unwrap();
                body(&mut job, &device);
                job.barrier().unwrap();
            });
        }
    });
}

#[test]
fn wrong_secret_or_configuration_is_refused_by_name() {
    let secret = |text: &str| Secret::new(text).unwrap();
    ranks(3, |job, device| {
        let text = if job.rank() == 1 { "another secret of a group" } else { "the secret of this group" };
        let config = GroupConfig::new(7).secret(secret(text));
        match Group::join(job, device, &config) {
            Err(JoinError::WrongSecret(rank)) => assert_eq!(rank == 1, job.rank() != 1),
            other => panic!("{other:?}"),
        }
    });
    ranks(2, |job, device| {
        let config = GroupConfig::new(7).locks(10 + job.rank() as usize);
        assert!(matches!(Group::join(job, device, &config), Err(JoinError::OtherConfig(_))));
    });
    ranks(2, |job, device| {
        let config = GroupConfig::new(u64::from(job.rank()));
        assert!(matches!(Group::join(job, device, &config), Err(JoinError::OtherGroup { .. })));
    });
}

#[test]
fn two_groups_over_parts_of_a_job_do_not_meet() {
    ranks(4, |job, device| {
        let even = job.rank() % 2 == 0;
        let mut groups = Vec::new();
        for (id, mine) in [(10, even), (11, !even)] {
            let config = GroupConfig::new(id).ranks([0, 1].map(|rank| 2 * rank + (id as u32 - 10)));
            if mine {
                groups.push(Group::join(job, device, &config).unwrap());
            } else {
                Group::skip(job).unwrap();
            }
        }
        let group = &groups[0];
        assert_eq!((group.members(), group.member()), (2, MemberId::new(job.rank() as usize / 2)));
        for _ in 0..20 {
            group.barrier(0).wait().unwrap();
        }
        job.barrier().unwrap();
    });
}

#[test]
fn dropped_group_is_left_although_handles_live() {
    ranks(2, |job, device| {
        let group = Group::join(job, device, &GroupConfig::new(7)).unwrap();
        let (lock, barrier) = (group.lock(0), group.barrier(0));
        barrier.wait().unwrap();
        if job.rank() == 0 {
            drop(group);
            assert!(matches!(lock.acquire(), Err(GroupError::Left | GroupError::Lock(LockError::Left))));
            assert!(barrier.wait().is_err());
        } else {
            // Member 0 managed this lock, and had it last.
            drop(lock.acquire().unwrap());
            assert!(matches!(barrier.wait(), Err(GroupError::MembersDied { .. })));
            assert_eq!(group.dead(), [MemberId::new(0)].into_iter().collect());
        }
        // The handle lives until the other one has seen it.
        job.barrier().unwrap();
        drop(lock);
    });
}

#[test]
fn try_of_a_lock_whose_holder_does_not_answer_times_out() {
    ranks(2, |job, device| {
        let config = GroupConfig::new(7).progress(ProgressMode::Manual);
        let group = Group::join(job, device, &config).unwrap();
        let lock = group.lock(1);
        if job.rank() == 1 {
            let _guard = lock.acquire().unwrap();
            job.barrier().unwrap();
            // Makes no progress.
            job.barrier().unwrap();
        } else {
            job.barrier().unwrap();
            let tried = lock.try_acquire_timeout(std::time::Duration::from_millis(20));
            assert!(matches!(tried, Err(GroupError::TimedOut)), "{tried:?}");
            job.barrier().unwrap();
        }
    });
}

#[test]
fn tokens_rise_from_group_to_group() {
    ranks(2, |job, device| {
        let mut former = None;
        for first_view in [None, None, Some(1 << 62)] {
            let config = GroupConfig::new(7);
            let config = first_view.map_or(config.clone(), |number| config.first_view(number));
            let group = Group::join(job, device, &config).unwrap();
            let fence = group.lock(3).acquire().unwrap().fence();
            assert_eq!(fence.view, group.view().number);
            assert!(former < Some(fence));
            former = Some(fence);
            group.barrier(0).wait().unwrap();
        }
    });
}
