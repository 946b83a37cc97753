//! Rails that fail and return: no byte is lost, every message arrives once.

use std::time::Duration;

use crosstie::device::fault::Plan;
use crosstie::device::{Device, Status};
use crosstie::rails::*;

use super::pair::*;

fn config() -> Config {
    Config {
        split: Split::Fixed([1, 1, 0, 0]),
        stall_timeout: Duration::from_millis(5),
        probe_timeout: Duration::from_millis(10),
        rebuild_pause: (Duration::from_millis(1), Duration::from_millis(20)),
        ..Config::default()
    }
}

/// Two rails; the devices of rail `rail` at end `end` (0 sends) have the faults of `plan`.
fn pair_with(end: usize, rail: usize, plan: &Plan) -> Pair {
    let opened = std::cell::Cell::new(0);
    let open = || {
        let this = opened.replace(opened.get() + 1);
        let device = |at| {
            let plan = if (this, at) == (end, rail) { plan.clone() } else { Plan::none() };
            software().with_faults(plan)
        };
        vec![device(0), device(1)]
    };
    Pair::over(open, config())
}

/// Lets some messages pass, checks every byte, and waits until all rails are in use again.
fn exercise(pair: &mut Pair) {
    let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
    for (n, len) in [200_000, 0, 300_000, 77, 100_000].into_iter().enumerate() {
        pair.transfer(&from, &to, len, n as u64);
    }
    pair.progress_until(|pair| (pair.sender.rails_up(), pair.receiver.rails_up()) == (3, 3));
    pair.transfer(&from, &to, 250_000, 99);
    assert_eq!(pair.sender.counters().messages, 6);
    assert_eq!(pair.receiver.counters().messages, 6);
    assert_eq!(pair.receiver.counters().violations, [0; Violation::KINDS]);
}

/// Fails each post, or each completion, of one device in turn.
fn fail_each(
    end: usize,
    plan: impl Fn(u64) -> Plan,
    count: impl Fn(&crosstie::device::fault::Control) -> u64,
) {
    for rail in 0..2 {
        let mut clean = pair_with(end, rail, &Plan::none());
        let before = count(&clean.faults[end][rail]);
        exercise(&mut clean);
        let after = count(&clean.faults[end][rail]);
        assert!(after > before);
        let mut failed = 0;
        for k in before..after {
            let mut pair = pair_with(end, rail, &plan(k));
            exercise(&mut pair);
            let ends = [pair.sender.counters(), pair.receiver.counters()];
            failed += ends[end].rails[rail].failures;
            assert_eq!(ends[0].rails[1 - rail].failures, 0, "the other rail failed, too");
        }
        assert!(failed > 0, "no fault hit the rail");
    }
}

#[test]
fn no_byte_is_lost_when_any_request_of_the_sender_is_lost() {
    fail_each(0, |k| Plan::none().lose_post(k, Status::RetryExceeded), |control| control.posts());
}

#[test]
fn no_byte_is_lost_or_delivered_twice_when_any_acknowledgement_is_lost() {
    fail_each(0, |k| Plan::none().fail_completion(k, Status::RetryExceeded), |control| control.completions());
}

#[test]
fn no_byte_is_lost_when_any_clear_to_send_is_lost() {
    fail_each(1, |k| Plan::none().lose_post(k, Status::RetryExceeded), |control| control.posts());
}

/// A device that fails after it has acknowledged a message and before it reports it: if the sender still has the message it is
/// sent again, otherwise both ends learn the cause.
#[test]
fn a_receive_that_fails_after_its_acknowledgement_is_sent_again_or_ends_the_connection() {
    for rail in 0..2 {
        let (mut again, mut ended) = (0, 0);
        for k in 0..12 {
            let plan = Plan::none().fail_completion(k, Status::LocalQpOperation);
            let mut pair = pair_with(1, rail, &plan);
            let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
            let bytes = pattern(300_000, k);
            from.write(0, &bytes).unwrap();
            let started = std::time::Instant::now();
            let outcome = (0..6).try_for_each(|_| -> Result<(), RequestError> {
                let buffer = RecvBuffer { memory: &to, range: 0..300_000, tag: 0 };
                let receive = pair.receiver.irecv(&[buffer])?.unwrap();
                let mut send = None;
                loop {
                    check_hang(started);
                    if send.is_none() {
                        send = pair.sender.isend(&from, 0..300_000, 0)?;
                    }
                    if pair.receiver.test(receive)?.is_some() {
                        break;
                    }
                    // With an even `k` the sender does not poll before the receiver has reported the failure.
                    if k % 2 == 1 || pair.receiver.rails_up() != 3 {
                        if k % 2 == 0 {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        pair.sender.progress();
                    }
                }
                check(&to, 0, &bytes);
                while let Some(done) = send {
                    check_hang(started);
                    pair.receiver.progress();
                    if pair.sender.test(done)?.is_some() {
                        send = None;
                    }
                }
                Ok(())
            });
            again += pair.sender.counters().rails[rail].replays;
            match outcome {
                Ok(()) => {}
                Err(RequestError::Ended(Cause::LostCompletion)) => ended += 1,
                other => panic!("{other:?}"),
            }
        }
        // Which of the two happens depends on whether the sender polls its completion before it learns of the failure.
        assert!(again + ended > 0, "no fault hit a message");
    }
}

/// Polls after which a late completion is handed out. They take far less time than a late completion may, see `until`.
const LATE: u32 = 100;

/// The receiver's completion is late, and the rail fails before it comes: the message is delivered all the same.
#[test]
fn a_completion_that_is_late_when_its_rail_fails_is_waited_for() {
    for rail in 0..2 {
        let mut hit = 0;
        for k in 0..8 {
            let mut pair = pair_with(1, rail, &Plan::none().delay_completion(k, LATE));
            let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
            let bytes = pattern(300_000, k);
            from.write(0, &bytes).unwrap();
            let receive = pair.receive(&to, 0..300_000);
            let send = until(|| pair.sender.isend(&from, 0..300_000, 0).unwrap());
            until(|| pair.sender.test(send).unwrap());
            pair.faults[0][rail].port_down();
            let mut received = pair.receiver.test(receive).unwrap();
            hit += usize::from(received.is_none());
            // The sender notices the port, and fences the rail.
            until(|| {
                pair.sender.progress();
                (pair.sender.rails_up() != 3).then_some(())
            });
            pair.faults[0][rail].port_up();
            if received.is_none() {
                received = Some(until(|| {
                    pair.sender.progress();
                    pair.receiver.test(receive).unwrap()
                }));
            }
            assert_eq!(received.unwrap().sizes(), [300_000]);
            check(&to, 0, &bytes);
            exercise_rest(&mut pair);
        }
        assert!(hit > 0, "no completion was late");
    }
}

/// The sender closes the connection as soon as its message is acknowledged; the receiver's completion is late.
#[test]
fn a_completion_that_is_late_when_the_sender_closes_is_waited_for() {
    for k in 0..6 {
        let mut pair = pair_with(1, (k % 2) as usize, &Plan::none().delay_completion(k / 2, LATE));
        let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
        let receives = [0..200_000, 200_000..300_000].map(|range| pair.receive(&to, range));
        let send = until(|| pair.sender.isend(&from, 0..200_000, 0).unwrap());
        until(|| pair.sender.test(send).unwrap());
        drop(pair.sender);
        let received = until(|| pair.receiver.test(receives[0]).unwrap());
        assert_eq!(received.sizes(), [200_000]);
        // The other message will not come.
        let error = until(|| match pair.receiver.test(receives[1]) {
            Ok(received) => received.map(|received| panic!("{received:?}")),
            Err(error) => Some(error),
        });
        assert_eq!(error, RequestError::Ended(Cause::PeerClosed));
    }
}

/// The receiver has got the message and closes the connection; the acknowledgement never reaches the sender.
#[test]
fn a_message_that_the_receiver_got_is_done_when_the_receiver_closes_whatever_the_sender_knows() {
    for k in 0..6 {
        let plan = Plan::none().fail_completion(k / 2, Status::RetryExceeded);
        let mut pair = pair_with(0, (k % 2) as usize, &plan);
        let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
        let receives = [0..200_000, 200_000..300_000].map(|range| pair.receive(&to, range));
        let send = until(|| pair.sender.isend(&from, 0..200_000, 0).unwrap());
        assert_eq!(until(|| pair.receiver.test(receives[0]).unwrap()).sizes(), [200_000]);
        drop(pair.receiver);
        assert_eq!(until(|| pair.sender.test(send).unwrap()), 200_000);
        let error = until(|| pair.sender.isend(&from, 0..100_000, 0).err());
        assert_eq!(error, RequestError::Ended(Cause::PeerClosed));
    }
}

/// A link passes nothing any more, and no event says so: the probe of a silent rail is not acknowledged, at either end.
#[test]
fn a_link_that_stalls_without_an_event_is_taken_out() {
    for end in 0..2 {
        for rail in 0..2 {
            let clean = pair_with(end, rail, &Plan::none());
            let posts = clean.faults[end][rail].posts();
            let mut pair = pair_with(end, rail, &Plan::none().stall(posts, u64::MAX / 2));
            let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
            for n in 0..6 {
                pair.transfer(&from, &to, 300_000 - n, n as u64);
            }
            let ends = [pair.sender.counters(), pair.receiver.counters()];
            assert!(ends[end].rails[rail].probes > 0 && ends[end].rails[rail].failures > 0, "{ends:?}");
            assert_eq!(ends[end].rails[1 - rail].failures, 0, "{ends:?}");
        }
    }
}

/// Starts a transfer, calls `disturb` at step `at` of it, and checks every byte.
fn disturb_at(pair: &mut Pair, at: usize, mut disturb: impl FnMut(&mut Pair, usize)) {
    const LEN: usize = 400_000;
    let (from, to) = (pair.here.allocate(4 * LEN).unwrap(), pair.there.allocate(4 * LEN).unwrap());
    let bytes = pattern(4 * LEN, at as u64);
    from.write(0, &bytes).unwrap();
    let mut step = 0;
    let mut tick = |pair: &mut Pair| {
        step += 1;
        disturb(pair, step);
    };
    let receives: Vec<_> = (0..4)
        .map(|i| {
            tick(pair);
            pair.receive(&to, i * LEN..(i + 1) * LEN)
        })
        .collect();
    let (mut sends, mut sent, mut received) = (Vec::new(), 0, 0);
    let started = std::time::Instant::now();
    while sent < 4 || received < 4 {
        tick(pair);
        if sends.len() < 4 {
            let i = sends.len();
            sends.extend(pair.sender.isend(&from, i * LEN..(i + 1) * LEN, 0).unwrap());
        }
        if sent < sends.len() {
            sent += usize::from(pair.sender.test(sends[sent]).unwrap().is_some());
        }
        if received < 4 {
            received += usize::from(pair.receiver.test(receives[received]).unwrap().is_some());
        }
        check_hang(started);
    }
    check(&to, 0, &bytes);
}

#[test]
fn a_port_that_goes_down_at_any_point_loses_nothing_and_its_rail_returns() {
    for end in 0..2 {
        for at in 1..16 {
            let mut pair = Pair::faulty(2, config());
            let faults = pair.faults[end][1].clone();
            disturb_at(&mut pair, at, |_, step| {
                if step == at {
                    faults.port_down();
                }
            });
            faults.port_up();
            exercise_rest(&mut pair);
        }
    }
}

/// After the faults are over all rails return, and transfers work.
fn exercise_rest(pair: &mut Pair) {
    pair.progress_until(|pair| (pair.sender.rails_up(), pair.receiver.rails_up()) == (3, 3));
    let (from, to) = (pair.here.allocate(300_000).unwrap(), pair.there.allocate(300_000).unwrap());
    for n in 0..4 {
        pair.transfer(&from, &to, 299_999, n);
    }
    assert_eq!(pair.receiver.counters().violations, [0; Violation::KINDS]);
}

#[test]
fn the_second_rail_may_fail_while_the_first_recovers() {
    for end in 0..2 {
        for gap in [1, 2, 3, 5, 8, 13, 50] {
            let mut pair = Pair::faulty(2, config());
            let faults = [pair.faults[end][0].clone(), pair.faults[1 - end][1].clone()];
            let mut up = false;
            disturb_at(&mut pair, 0, |pair, step| {
                if step == 6 {
                    faults[0].port_down();
                }
                if step == 6 + gap {
                    faults[1].port_down();
                }
                // Both are down: nothing moves. Then the first comes back.
                if !up && step > 6 + gap && (pair.sender.rails_up() == 0 || step > 20_000) {
                    faults[0].port_up();
                    up = true;
                }
            });
            faults.iter().for_each(|faults| faults.port_up());
            exercise_rest(&mut pair);
        }
    }
}

#[test]
fn all_rails_may_be_down_for_a_while() {
    let mut pair = Pair::faulty(2, config());
    let faults: Vec<_> = pair.faults.iter().flatten().cloned().collect();
    let mut down_for = 0;
    disturb_at(&mut pair, 0, |pair, step| {
        if step == 7 {
            faults.iter().for_each(|faults| faults.port_down());
        }
        if step > 7 && pair.sender.rails_up() == 0 && pair.receiver.rails_up() == 0 {
            down_for += 1;
            if down_for == 100 {
                faults.iter().for_each(|faults| faults.port_up());
            }
        }
    });
    faults.iter().for_each(|faults| faults.port_up());
    exercise_rest(&mut pair);
}

#[test]
fn a_connection_whose_rails_stay_down_ends_with_a_cause() {
    let mut pair = Pair::faulty(2, Config { give_up: Duration::from_millis(50), ..config() });
    let to = pair.there.allocate(4096).unwrap();
    let from = pair.here.allocate(4096).unwrap();
    pair.transfer(&from, &to, 4096, 1);
    let receive = pair.receive(&to, 0..4096);
    pair.faults.iter().flatten().for_each(|faults| faults.port_down());
    let cause = until(|| {
        pair.sender.progress();
        pair.receiver.test(receive).transpose()
    })
    .unwrap_err();
    let RequestError::Ended(cause) = cause else { panic!("{cause:?}") };
    // The end that notices it first tells the other.
    assert!(matches!(cause, Cause::AllRailsDown | Cause::PeerError(_)), "{cause:?}");
    assert!(pair.receiver.irecv(&[RecvBuffer { memory: &to, range: 0..1, tag: 0 }]).is_err());
}

#[test]
fn one_rail_alone_is_built_again() {
    let open = || vec![software().with_faults(Plan::none())];
    let mut pair = Pair::over(open, Config { split: Split::Adaptive, ..config() });
    for at in [2, 5, 6, 7, 9] {
        let faults: Vec<_> = pair.faults.iter().flatten().cloned().collect();
        let mut is_down = false;
        disturb_at(&mut pair, at, |pair, step| {
            if step == at {
                faults[at % 2].port_down();
                is_down = true;
            }
            if is_down && pair.sender.rails_up() == 0 {
                faults[at % 2].port_up();
                is_down = false;
            }
        });
        faults.iter().for_each(|faults| faults.port_up());
        pair.progress_until(|pair| (pair.sender.rails_up(), pair.receiver.rails_up()) == (1, 1));
    }
}

#[test]
fn faults_drawn_from_a_seed_lose_nothing() {
    let seed = crosstie_testkit::rng::seed();
    let mut whole = 0;
    for round in 0..6u64 {
        let opened = std::cell::Cell::new(0);
        let open = || -> Vec<Device> {
            (0..2)
                .map(|_| {
                    let nth = opened.replace(opened.get() + 1);
                    software().with_faults(Plan::from_seed(seed.wrapping_add(100 * round + nth)))
                })
                .collect()
        };
        let mut pair = Pair::over(open, config());
        let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
        let mut random = crosstie_testkit::rng::Random(seed ^ round);
        let outcome =
            (0..150).try_for_each(|n| pair.try_transfer(&from, &to, random.below(1 << 18) as usize, n));
        match outcome {
            Ok(()) => {
                assert_eq!(pair.receiver.counters().messages, 150);
                whole += 1;
            }
            // A device that fails between acknowledgement and completion: the one fault that nobody can repair.
            Err(error) => {
                let found = [pair.sender.cause(), pair.receiver.cause()];
                assert!(found.contains(&Some(Cause::LostCompletion)), "{error:?} {found:?}");
            }
        }
    }
    assert!(whole > 0, "no connection survived");
}
