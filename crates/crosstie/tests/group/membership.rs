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

#[test]
fn idle_group_uses_almost_no_time_of_the_processor() {
    ranks(2, |job, device| {
        let group = Group::join(job, device, &GroupConfig::new(7)).unwrap();
        group.barrier(0).wait().unwrap();
        job.barrier().unwrap();
        if job.rank() == 0 {
            // Both members' threads: this process.
            let (before, start) = (process_time(), std::time::Instant::now());
            std::thread::sleep(std::time::Duration::from_secs(2));
            let used = (process_time() - before) / start.elapsed().as_secs_f64();
            // Other tests may run in this process at the same time; `group_idle` below runs it alone.
            if std::env::var_os("CROSSTIE_GROUP_IDLE_ALONE").is_some() {
                assert!(used < 0.02, "two idle members use {used:.4} of a core");
            }
        }
        job.barrier().unwrap();
    });
}

fn process_time() -> f64 {
    let time = rustix_time();
    time.0 as f64 + time.1 as f64 * 1e-9
}

fn rustix_time() -> (i64, i64) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0);
    (time.tv_sec, time.tv_nsec)
}
