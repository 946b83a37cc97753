//! A fixed number of seeds of every scenario, with and without faults. `CROSSTIE_SIM_SEEDS` sets another number, `CROSSTIE_SEED` the
//! first seed.

use crosstie_sim::{Jitter, Outcome, Plan, Scenario, run};

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Runs a plan with several seeds. All checks must pass.
fn check(name: &str, plan: Plan, seeds: u64) -> Vec<Outcome> {
    let first = number("CROSSTIE_SEED", 1);
    let outcomes: Vec<Outcome> = (first..first + number("CROSSTIE_SIM_SEEDS", seeds))
        .map(|seed| {
            let outcome = run(&Plan { seed, ..plan }).unwrap();
            assert!(outcome.failures.is_empty(), "{name}, CROSSTIE_SEED={seed}: {:#?}", outcome.failures);
            outcome
        })
        .collect();
    let total: u64 = outcomes.iter().map(|outcome| outcome.operations).sum();
    assert!(total > 0, "{name}: nothing was done");
    println!("{name}: {total} operations, first seed {first}");
    outcomes
}

#[test]
fn locks_are_exclusive_and_fair_for_all_seeds() {
    let lock = Plan::new(Scenario::Lock);
    check("lock", Plan { members: 16, locks: 3, ..lock }, 10);
    check("lock, uniform", Plan { members: 5, jitter: Jitter::Uniform, ..lock }, 10);
    check("lock, restless", Plan { members: 12, locks: 2, restless: true, ..lock }, 20);
    check("lock, deaths", Plan { members: 12, locks: 4, deaths: 4, restless: true, ..lock }, 40);
    check(
        "lock, loss",
        Plan { members: 8, locks: 2, loss: 0.05, duplicates: 0.05, restless: true, ..lock },
        10,
    );
    check(
        "lock, loss and deaths",
        Plan { members: 8, locks: 2, loss: 0.02, deaths: 3, restless: true, ..lock },
        20,
    );
    check("lock, partition", Plan { members: 7, locks: 3, partition: true, ..lock }, 20);
    check("lock, 1024 members", Plan { members: 1024, locks: 16, operations: 3, ..lock }, 1);
}

#[test]
fn barrier_rounds_are_never_overtaken_for_all_seeds() {
    let barrier = Plan::new(Scenario::Barrier);
    check("barrier", Plan { members: 16, ..barrier }, 5);
    check("barrier, wide", Plan { members: 40, fanout: 8, ..barrier }, 5);
    check("barrier, restless", Plan { members: 16, restless: true, ..barrier }, 20);
    check("barrier, deaths", Plan { members: 12, deaths: 4, ..barrier }, 40);
    check("barrier, restless with deaths", Plan { members: 12, deaths: 3, restless: true, ..barrier }, 1000);
    // Of few members all may want to leave.
    for members in [2, 3, 4, 5] {
        check("barrier, few and restless", Plan { members, restless: true, ..barrier }, 300);
    }
    check(
        "barrier, few and restless, with a death",
        Plan { members: 5, deaths: 1, restless: true, ..barrier },
        300,
    );
    check("barrier, loss", Plan { members: 8, loss: 0.05, duplicates: 0.05, ..barrier }, 10);
    check("barrier, loss and deaths", Plan { members: 8, loss: 0.02, deaths: 2, ..barrier }, 20);
    check("barrier, partition", Plan { members: 7, partition: true, ..barrier }, 20);
    check("barrier, 1024 members", Plan { members: 1024, operations: 3, ..barrier }, 1);
}

/// Deaths are told to one survivor only and follow each other, members pause for longer than every limit, and some are expelled meanwhile.
#[test]
fn members_agree_on_one_view_for_all_unkind_seeds() {
    for scenario in [Scenario::Lock, Scenario::Barrier] {
        let plan = Plan { members: 8, unkind: true, operations: 20, ..Plan::new(scenario) };
        let lossy = Plan { loss: 0.05, duplicates: 0.05, ..plan };
        let name = scenario.name();
        check(&format!("{name}, deaths in a row"), Plan { deaths: 5, ..plan }, 300);
        check(
            &format!("{name}, few members and deaths"),
            Plan { members: 4, deaths: 3, restless: true, ..plan },
            300,
        );
        check(&format!("{name}, pauses"), Plan { deaths: 2, pauses: 2, restless: true, ..plan }, 100);
        check(&format!("{name}, expulsions"), Plan { deaths: 2, expulsions: 2, restless: true, ..plan }, 200);
        check(&format!("{name}, loss"), Plan { deaths: 4, restless: true, ..lossy }, 60);
        check(
            &format!("{name}, loss and pauses"),
            Plan { deaths: 1, pauses: 2, restless: true, ..lossy },
            60,
        );
        check(&format!("{name}, loss and expulsions"), Plan { deaths: 1, expulsions: 2, ..lossy }, 60);
        check(
            &format!("{name}, partition and deaths"),
            Plan { members: 9, deaths: 2, partition: true, restless: true, ..plan },
            40,
        );
    }
    let lock = Plan { unkind: true, ..Plan::new(Scenario::Lock) };
    check(
        "lock, 64 members",
        Plan { members: 64, locks: 4, operations: 10, deaths: 20, expulsions: 3, ..lock },
        3,
    );
}

#[test]
fn messages_arrive_once_and_in_order_for_all_seeds() {
    let message = Plan { operations: 100, ..Plan::new(Scenario::Message) };
    check("message", Plan { members: 6, jitter: Jitter::None, ..message }, 5);
    check("message, reordered", Plan { members: 6, ..message }, 10);
    let rc = Plan { jitter: Jitter::None, ..message };
    for outcome in check("message, members stop", Plan { members: 8, restless: true, ..rc }, 40) {
        assert_eq!(outcome.resent, 0, "no packet is lost, and no sender is refused");
    }
    check("message, members stop and die", Plan { members: 8, restless: true, deaths: 2, ..rc }, 20);
    check("message, loss, members stop", Plan { members: 8, restless: true, loss: 0.02, ..message }, 20);
    check("message, loss", Plan { members: 6, loss: 0.05, duplicates: 0.05, ..message }, 20);
    check(
        "message, going back",
        Plan { members: 6, go_back: true, loss: 0.02, duplicates: 0.02, ..message },
        10,
    );
    check("message, blind retries", Plan { members: 6, blind_retry: true, loss: 0.02, ..message }, 10);
    for combine_from in [1, 16] {
        let plan = Plan { members: 3, combine_from, loss: 0.05, duplicates: 0.05, ..message };
        let outcomes = check("message, combined early or never", plan, 20);
        assert!(outcomes.iter().all(|outcome| (outcome.combined > 0) == (combine_from == 1)));
    }
    check(
        "message, deaths and combined messages",
        Plan { members: 4, combine_from: 1, deaths: 1, ..message },
        20,
    );
    check("message, deaths", Plan { members: 8, loss: 0.01, deaths: 3, ..message }, 20);
    check("message, partition", Plan { members: 6, partition: true, ..message }, 10);
    check("message, 100 members", Plan { members: 100, operations: 20, loss: 0.01, ..message }, 1);
}

#[test]
fn copyrpc_credits_never_run_dry_for_all_seeds() {
    let credits = Plan { operations: 200, ..Plan::new(Scenario::Credits) };
    check("credits", Plan { members: 8, ..credits }, 10);
    // So few calls that nothing else happens after the last one was refused.
    check("credits, few calls", Plan { members: 2, operations: 5, ..credits }, 2000);
    check("credits, 300 endpoints", Plan { members: 300, operations: 40, ..credits }, 1);
}

#[test]
fn messages_survive_rails_that_fail_and_return_for_all_seeds() {
    let rails = Plan { operations: 300, ..Plan::new(Scenario::Rails) };
    let outcomes = check("rails", Plan { members: 8, ..rails }, 20);
    assert!(outcomes.iter().all(|outcome| outcome.packets["fence"] > 0));
    assert!(outcomes.iter().map(|outcome| outcome.packets["part_again"]).sum::<u64>() > 100);
    let hours = check("rails, away for hours", Plan { members: 8, restless: true, ..rails }, 20);
    assert!(hours.iter().any(|outcome| outcome.virtual_ns > 3_600_000_000_000));
    check("rails, 300 connections", Plan { members: 300, operations: 60, restless: true, ..rails }, 2);
}

#[test]
fn same_seed_repeats_the_same_run() {
    for scenario in Scenario::ALL {
        let plan = Plan { members: 8, seed: 42, restless: true, ..Plan::new(scenario) };
        assert_eq!(run(&plan), run(&plan));
        let other = run(&Plan { seed: 43, ..plan }).unwrap();
        assert_ne!(run(&plan).unwrap().virtual_ns, other.virtual_ns, "the seed has no effect");
    }
}
