//! All operations between threads of one process: over socket pairs and over TCP; and their failures.

use std::io::Write;
use std::net::TcpListener;
use std::thread;

use crosstie::bootstrap::{Bootstrap, Error, Limits, Operation, Secret, SingleRank, local, tcp};

use super::suite::run_all_operations;

const SIZES: [u32; 4] = [1, 2, 3, 8];

#[test]
fn all_operations_with_a_single_rank() {
    run_all_operations(&mut SingleRank::default());
}

#[test]
fn all_operations_between_threads() {
    for size in SIZES {
        let members = local::in_process(size, Limits::default()).expect("job");
        assert!(members.iter().map(Bootstrap::rank).eq(0..size));
        thread::scope(|scope| {
            for mut member in members {
                scope.spawn(move || {
                    run_all_operations(&mut member);
                    member.finish().expect("finish");
                });
            }
        });
    }
}

#[test]
fn all_operations_over_tcp_ipv4() {
    run_all_operations_over_tcp("127.0.0.1:0");
}

#[test]
fn all_operations_over_tcp_ipv6() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        let notice =
            format!("NOT RUN: all_operations_over_tcp_ipv6: this machine has no address ::1 ({error})\n");
        // Not with eprintln: the test harness hides what passing tests print.
        std::io::stderr().write_all(notice.as_bytes()).expect("standard error");
        return;
    }
    run_all_operations_over_tcp("[::1]:0");
}

fn run_all_operations_over_tcp(address: &str) {
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
                    run_all_operations(&mut member);
                    member.finish().expect("finish");
                });
            }
            let mut first =
                tcp::join_as_rank_zero(listener, size, &secret, Limits::default()).expect("rank 0 joins");
            run_all_operations(&mut first);
            first.finish().expect("finish");
        });
    }
}

#[test]
fn blobs_of_the_maximum_size_arrive() {
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

/// Runs `act` on every member of a job of threads and returns the results in rank order.
fn run_on_each_rank<T: Send>(
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
fn sum_that_overflows_fails_on_every_rank() {
    let results = run_on_each_rank(3, Limits::default(), |job| job.sum(&[0, u64::MAX / 2]));
    assert_eq!(results, vec![Err(Error::Overflow { index: 1 }); 3]);
}

#[test]
fn different_operations_fail_on_every_rank_and_end_the_job() {
    let results = run_on_each_rank(3, Limits::default(), |job| {
        let first = if job.rank() == 1 { job.sum(&[1]).map(drop) } else { job.barrier() };
        assert_eq!(job.barrier(), first);
        first
    });
    for result in results {
        assert!(matches!(result, Err(Error::OperationMismatch { .. })), "{result:?}");
    }
}

#[test]
fn operation_beyond_the_message_limit_fails_on_every_rank() {
    let limits = Limits { max_message: 1000, ..Limits::default() };
    for result in run_on_each_rank(3, limits, |job| job.all_gather(&[0; 400])) {
        assert!(matches!(result, Err(Error::TooLarge { limit: 1000, .. })), "{result:?}");
    }
    // Each rank sends little, but rank 2 would receive too much.
    let to_rank_two = |job: &mut dyn Bootstrap| job.exchange(&[Vec::new(), Vec::new(), vec![0; 400]]);
    for result in run_on_each_rank(3, limits, to_rank_two) {
        assert!(matches!(result, Err(Error::TooLarge { limit: 1000, .. })), "{result:?}");
    }
}

#[test]
fn rank_that_leaves_is_named_to_all_others() {
    let results =
        run_on_each_rank(4, Limits::default(), |job| if job.rank() == 2 { Ok(()) } else { job.barrier() });
    for (rank, result) in results.into_iter().enumerate() {
        let expected = if rank == 2 { Ok(()) } else { Err(Error::RankDisconnected { rank: 2 }) };
        assert_eq!(result, expected, "rank {rank}");
    }
}

#[test]
fn rank_zero_that_leaves_is_named_to_all_others() {
    let results =
        run_on_each_rank(3, Limits::default(), |job| if job.rank() == 0 { Ok(()) } else { job.barrier() });
    assert_eq!(
        results[1..],
        [Err(Error::RankDisconnected { rank: 0 }), Err(Error::RankDisconnected { rank: 0 })]
    );
}

#[test]
fn connected_rank_that_does_not_call_the_operation_is_named_to_all() {
    let limits = Limits { operation_timeout: std::time::Duration::from_millis(300), ..Limits::default() };
    let release_rank_one = std::sync::Barrier::new(3);
    let results = run_on_each_rank(3, limits, |job| {
        if job.rank() == 1 {
            release_rank_one.wait();
            job.barrier()
        } else {
            let result = job.barrier();
            release_rank_one.wait();
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
fn invalid_sizes_are_rejected() {
    assert!(matches!(local::in_process(0, Limits::default()), Err(Error::Configuration(_))));
    assert!(matches!(local::in_process(1 << 20, Limits::default()), Err(Error::Configuration(_))));
    let excessive = Limits { max_message: usize::MAX, ..Limits::default() };
    assert!(matches!(local::in_process(1, excessive), Err(Error::TooLarge { .. })));
}
