use crosstie::bootstrap::{Bootstrap, Limits, Secret, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, JoinError, MemberId};

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
