//! `ipc` from outside: what it has in common with `delegation`, and what is its own.

use crosstie::ipc as service;

mod node;

use std::time::Duration;

use service::*;

/// An idle client is looked at every 32 rounds, a busy one in every round.
#[test]
fn skipping_finds_a_request_within_its_rounds() {
    let name = format!("ipc-skip-{}", std::process::id());
    let mut server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    let mut idle = Client::<u64, u64, u64>::connect(&name).unwrap();
    let mut busy = Client::<u64, u64, u64>::connect(&name).unwrap();
    for wait in [0, 1, 5, 31, 32, 100, 1000] {
        // The busy one is found in every round but the first, however long the other has been idle.
        let mut missed = 0;
        for round in 0..=wait {
            busy.call(&round, round).unwrap();
            while server.poll_with_skip() == 0 {
                missed += u64::from(round > 0);
            }
            while let Some(request) = server.recv() {
                request.reply(&0).unwrap();
            }
            busy.poll(|_, _| ()).unwrap();
        }
        assert_eq!(missed, 0, "{wait} rounds");
        idle.call(&7, 7).unwrap();
        let rounds = (1..).find(|_| server.poll_with_skip() > 0).unwrap();
        assert!(rounds <= 32, "found after {rounds} rounds");
        let request = server.recv().unwrap();
        assert_eq!(*request.message(), 7);
        request.reply(&8).unwrap();
        assert_eq!(idle.poll(|token, answer| assert_eq!((token, *answer), (7, 8))), Ok(1));
        assert!(!server.wait(Some(Duration::ZERO)));
    }
}
