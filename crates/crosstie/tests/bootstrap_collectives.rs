//! All operations, over every connection that one process can make with itself.

mod bootstrap_suite;

use std::io::Write;
use std::net::TcpListener;
use std::thread;

use bootstrap_suite::exercise;
use crosstie::bootstrap::{SingleRank, Bootstrap, Error, Limits, Secret, Operation, local, tcp};

const SIZES: [u32; 4] = [1, 2, 3, 8];

#[test]
fn alone() {
    exercise(&mut SingleRank::default());
}

#[test]
fn threads() {
    for size in SIZES {
        let members = local::in_process(size, Limits::default()).expect("job");
        assert!(members.iter().map(Bootstrap::rank).eq(0..size));
        thread::scope(|scope| {
            for mut member in members {
                scope.spawn(move || {
                    exercise(&mut member);
                    member.finish().expect("finish");
                });
            }
        });
    }
}

#[test]
fn tcp_over_ipv4() {
    over_tcp("127.0.0.1:0");
}

#[test]
fn tcp_over_ipv6() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        let notice = format!("NOT RUN: tcp_over_ipv6: this machine has no address ::1 ({error})\n");
        // Past the test harness, which hides what passing tests print.
        std::io::stderr().write_all(notice.as_bytes()).expect("standard error");
        return;
    }
    over_tcp("[::1]:0");
}

fn over_tcp(address: &str) {
    for size in SIZES {
        let secret = Secret::random().expect("secret");
        let listener = TcpListener::bind(address).expect("listener");
        let rendezvous = listener.local_addr().expect("address").to_string();
        thread::scope(|scope| {
            for rank in 1..size {
                let (secret, rendezvous) = (secret.clone(), rendezvous.clone());
                scope.spawn(move || {
                    let limits = Limits::default();
                    let config = tcp::Config { rank, size, rendezvous, listen: None, secret, limits };
                    let mut member = tcp::join(&config).expect("join");
                    exercise(&mut member);
                    member.finish().expect("finish");
                });
            }
            let mut first = tcp::join_as_rank_zero(listener, size, &secret, Limits::default()).expect("lead");
            exercise(&mut first);
            first.finish().expect("finish");
        });
    }
}

#[test]
fn large_blobs_pass() {
    let limits = Limits::default();
    let members = local::in_process(4, limits).expect("job");
    thread::scope(|scope| {
        for mut member in members {
            scope.spawn(move || {
                let blob = vec![member.rank() as u8; limits.max_blob];
                let all = member.all_gather(&blob).expect("all_gather");
                assert!(all.iter().zip(0..).all(|(blob, rank)| *blob == vec![rank; limits.max_blob]));
            });
        }
    });
}

/// Runs `act` on every member of a job of threads and returns what each got.
fn each<T: Send>(
    size: u32,
    limits: Limits,
    act: impl Fn(&mut dyn Bootstrap) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    let members = local::in_process(size, limits).expect("job");
    thread::scope(|scope| {
        let act = &act;
        let run = |mut member| scope.spawn(move || act(&mut member));
        let running: Vec<_> = members.into_iter().map(run).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn a_sum_that_overflows_fails_everywhere() {
    let results = each(3, Limits::default(), |job| job.sum(&[0, u64::MAX / 2]));
    assert_eq!(results, vec![Err(Error::Overflow { index: 1 }); 3]);
}

#[test]
fn different_operations_fail_everywhere_and_for_good() {
    let results = each(3, Limits::default(), |job| {
        let first = if job.rank() == 1 { job.sum(&[1]).map(drop) } else { job.barrier() };
        assert_eq!(job.barrier(), first);
        first
    });
    for result in results {
        assert!(matches!(result, Err(Error::OperationMismatch { .. })), "{result:?}");
    }
}

#[test]
fn more_than_a_message_fails_everywhere() {
    let limits = Limits { max_message: 1000, ..Limits::default() };
    for result in each(3, limits, |job| job.all_gather(&[0; 400])) {
        assert!(matches!(result, Err(Error::TooLarge { limit: 1000, .. })), "{result:?}");
    }
    // Each sends little, but rank 2 would receive too much.
    let lopsided = |job: &mut dyn Bootstrap| job.exchange(&[Vec::new(), Vec::new(), vec![0; 400]]);
    for result in each(3, limits, lopsided) {
        assert!(matches!(result, Err(Error::TooLarge { limit: 1000, .. })), "{result:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_to_the_others() {
    let results = each(4, Limits::default(), |job| if job.rank() == 2 { Ok(()) } else { job.barrier() });
    for (rank, result) in results.into_iter().enumerate() {
        let expected = if rank == 2 { Ok(()) } else { Err(Error::RankDisconnected { rank: 2 }) };
        assert_eq!(result, expected, "rank {rank}");
    }
}

#[test]
fn rank_zero_that_leaves_is_named_to_the_others() {
    let results = each(3, Limits::default(), |job| if job.rank() == 0 { Ok(()) } else { job.barrier() });
    assert_eq!(results[1..], [Err(Error::RankDisconnected { rank: 0 }), Err(Error::RankDisconnected { rank: 0 })]);
}

#[test]
fn a_rank_that_stays_but_does_not_come_is_named_to_all() {
    let limits = Limits { operation_timeout: std::time::Duration::from_millis(300), ..Limits::default() };
    let meet = std::sync::Barrier::new(3);
    let results = each(3, limits, |job| {
        if job.rank() == 1 {
            meet.wait();
            job.barrier()
        } else {
            let result = job.barrier();
            meet.wait();
            result
        }
    });
    for result in results {
        match result {
            Err(Error::RankMissing { ranks, during: Operation::Barrier, .. }) => assert_eq!(ranks, [1]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn impossible_sizes_are_refused() {
    assert!(matches!(local::in_process(0, Limits::default()), Err(Error::Configuration(_))));
    assert!(matches!(local::in_process(1 << 20, Limits::default()), Err(Error::Configuration(_))));
    let greedy = Limits { max_message: usize::MAX, ..Limits::default() };
    assert!(matches!(local::in_process(1, greedy), Err(Error::TooLarge { .. })));
}
