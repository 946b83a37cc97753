//! The test that every implementation of a job must pass.

use crosstie::bootstrap::{Bootstrap, Error};

/// Runs every operation and checks every result. All ranks call it.
pub(crate) fn run_all_operations(job: &mut dyn Bootstrap) {
    let (rank, size) = (job.rank(), job.size());
    assert!(rank < size);

    for round in 0..3_u32 {
        // Blobs of different sizes, some of them empty.
        let blob = |rank: u32| vec![rank as u8 ^ round as u8; (rank * 700 * round) as usize];
        let expected: Vec<_> = (0..size).map(blob).collect();
        assert_eq!(job.all_gather(&blob(rank)).expect("all_gather"), expected);

        let blob = |from: u32, to: u32| format!("{from} to {to} in {round}").repeat((from + 2 * to) as usize);
        let outgoing: Vec<_> = (0..size).map(|to| blob(rank, to).into_bytes()).collect();
        let expected: Vec<_> = (0..size).map(|from| blob(from, rank).into_bytes()).collect();
        assert_eq!(job.exchange(&outgoing).expect("exchange"), expected);

        job.barrier().expect("barrier");

        let n = u64::from(size);
        let words = [u64::from(rank), 1, u64::from(rank) << 40];
        let triangle = n * (n - 1) / 2;
        assert_eq!(job.sum(&words).expect("sum"), [triangle, n, triangle << 40]);
        assert_eq!(job.sum(&[]).expect("empty sum"), [0_u64; 0]);
    }

    // Refused before anything is sent; the job continues.
    assert!(matches!(job.all_gather(&vec![0; (1 << 20) + 1]), Err(Error::TooLarge { .. })));
    assert!(matches!(job.exchange(&vec![Vec::new(); size as usize + 1]), Err(Error::BlobCount { .. })));
    job.barrier().expect("barrier after a refused call");
}
