use proptest::prelude::*;

use super::*;

mod judges;

/// The response of a register to an operation, and its value afterwards. Shares no code with the checker.
fn register(event: &Event, value: Option<u64>) -> (Outcome, u64, Option<u64>) {
    match (event.op, value) {
        (Op::Get, Some(value)) => (Outcome::Done, value, Some(value)),
        (Op::Put, _) | (Op::Insert, None) => (Outcome::Done, 0, Some(event.value)),
        (Op::Delete, Some(_)) => (Outcome::Done, 0, None),
        (Op::Insert, Some(value)) => (Outcome::Mismatch, value, Some(value)),
        (Op::CompareAndSwap, Some(value)) if value == event.expected => (Outcome::Done, 0, Some(event.value)),
        (Op::CompareAndSwap, Some(value)) => (Outcome::Mismatch, value, Some(value)),
        (Op::Get | Op::Delete | Op::CompareAndSwap, None) => (Outcome::NotFound, 0, None),
    }
}

/// Tries all orders, with and without each operation of unknown outcome.
fn is_linearizable(left: &[Event], value: Option<u64>) -> bool {
    if left.iter().all(|event| event.outcome == Outcome::Unknown) {
        return true;
    }
    let first_return = left.iter().map(|event| event.returned).min().unwrap();
    (0..left.len()).filter(|next| left[*next].called <= first_return).any(|next| {
        let mut rest = left.to_vec();
        let event = rest.remove(next);
        let (outcome, returned_value, after) = register(&event, value);
        match event.outcome {
            Outcome::Unknown => is_linearizable(&rest, after) || is_linearizable(&rest, value),
            Outcome::Refused => is_linearizable(&rest, value),
            _ => {
                (outcome, returned_value) == (event.outcome, event.returned_value)
                    && is_linearizable(&rest, after)
            }
        }
    })
}

fn event(client: u32, op: Op, value: u64, [called, returned]: [u64; 2]) -> Event {
    let (key, expected, returned_value, outcome) = (1, 0, 0, Outcome::Done);
    Event { called, returned, key, value, expected, returned_value, client, op, outcome, reserved: [0; 2] }
}

fn get(returned_value: Option<u64>, times: [u64; 2]) -> Event {
    let outcome = if returned_value.is_some() { Outcome::Done } else { Outcome::NotFound };
    Event { outcome, returned_value: returned_value.unwrap_or(0), ..event(0, Op::Get, 0, times) }
}

fn put(value: u64, times: [u64; 2]) -> Event {
    event(1, Op::Put, value, times)
}

fn unknown(event: Event) -> Event {
    Event { returned: Event::NEVER, outcome: Outcome::Unknown, ..event }
}

fn check_events(events: &[Event]) -> Result<Summary, Failure> {
    check(&[History { events: events.to_vec() }])
}

fn violation(events: &[Event]) -> Vec<Event> {
    assert!(events.len() > 10 || !is_linearizable(events, None));
    match check_events(events) {
        Err(failure @ Failure::Violation { .. }) => {
            println!("{failure}");
            let Failure::Violation { operations, .. } = failure else { unreachable!() };
            operations
        }
        other => panic!("{other:?}"),
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Get), 3 => Just(Op::Put), 1 => Just(Op::Delete), 1 => Just(Op::Insert), 1 => Just(Op::CompareAndSwap)
    ]
}

/// Any operation with any response, possible or not.
fn any_event() -> impl Strategy<Value = Event> {
    let outcome =
        prop_oneof![5 => Just(None), 3 => Just(Some(Outcome::Unknown)), 1 => Just(Some(Outcome::Refused))];
    (any_op(), 0u64..3, 0u64..3, prop::option::of(0u64..3), outcome, 0u64..12, 0u64..6).prop_map(
        |(op, value, expected, before, outcome, called, time)| {
            let request = Event { expected, ..event(0, op, value, [called, called + time]) };
            let (right, returned_value, _) = register(&request, before);
            let outcome = outcome.unwrap_or(right);
            let event = Event { outcome, returned_value, ..request };
            if outcome == Outcome::Unknown { unknown(event) } else { event }
        },
    )
}

/// Gets and puts; each value is put at most once.
fn any_unique() -> impl Strategy<Value = Vec<Event>> {
    let one = (any::<bool>(), prop::option::weighted(0.8, 0u64..7), any::<u8>(), 0u64..12, 0u64..8);
    prop::collection::vec(one, 0..8).prop_map(|events| {
        events
            .iter()
            .enumerate()
            .map(|(n, &(is_get, value, odds, called, time))| {
                let times = [called, called + time];
                match (is_get, odds < 100) {
                    (true, _) => get(value, times),
                    (false, true) => unknown(put(n as u64, times)),
                    (false, false) => put(n as u64, times),
                }
            })
            .collect()
    })
}

/// Operation, value, expected value, pause before it takes effect, times from its call to its effect and from its effect to its return,
/// and what decides about its outcome.
type Simulated = (Op, u64, u64, u64, [u64; 2], u8);

/// A history of a register that works.
fn simulate(steps: &[Simulated], unique: bool) -> Vec<Event> {
    let (mut now, mut value) = (1000, None);
    let mut events = Vec::new();
    for (n, &(op, small, expected, pause, [before, after], odds)) in steps.iter().enumerate() {
        now += pause;
        let new = if unique { n as u64 + 10 } else { small };
        let expected = if unique && small > 0 { value.unwrap_or(0) } else { expected };
        let request = Event { expected, ..event(n as u32, op, new, [now - before, now + after]) };
        let (outcome, returned_value, next) = register(&request, value);
        events.push(match odds {
            0..10 => unknown(request), // it did not take effect
            10..20 => {
                value = next;
                unknown(request)
            }
            20..30 => Event { outcome: Outcome::Refused, ..request },
            _ => {
                value = next;
                Event { outcome, returned_value, ..request }
            }
        });
    }
    events
}

fn any_steps() -> impl Strategy<Value = Vec<Simulated>> {
    prop::collection::vec((any_op(), 0u64..3, 0u64..3, 0u64..20, [0u64..60, 0u64..60], any::<u8>()), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8 * ProptestConfig::default().cases))]

    #[test]
    fn check_agrees_with_exhaustive_search(events in prop::collection::vec(any_event(), 0..9)) {
        let right = is_linearizable(&events, None);
        match check_events(&events) {
            Ok(_) => prop_assert!(right),
            Err(Failure::Violation { operations, .. }) => {
                prop_assert!(!right);
                prop_assert!(!operations.is_empty() && operations.iter().all(|one| events.contains(one)));
                // The reported operations contradict each other without the rest of the history.
                prop_assert!(!is_linearizable(&operations, None));
            }
            Err(undecided) => prop_assert!(false, "{undecided}"),
        }
    }

    #[test]
    fn unique_puts_and_search_agree_with_exhaustive_search(mut events in any_unique()) {
        let right = is_linearizable(&events, None);
        events.sort_by_key(|event| event.called);
        let found = unique_puts::check(&events, None);
        prop_assert_eq!(found.as_ref().map(Result::is_ok), Some(right));
        if let Some(Err(operations)) = found {
            prop_assert!(!is_linearizable(&operations, None), "{operations:?}");
        }
        prop_assert_eq!(search::check(&events, None, BUDGET, &mut 0).is_ok(), right);
    }

    #[test]
    fn history_of_a_register_passes(steps in any_steps(), unique in any::<bool>()) {
        let events = simulate(&steps, unique);
        match check_events(&events) {
            Ok(summary) => prop_assert_eq!(summary.operations, events.len() as u64),
            Err(failure) => prop_assert!(false, "{failure}"),
        }
    }

    #[test]
    fn decoding_returns_a_valid_history_or_an_error(
        events in prop::collection::vec(any_event(), 0..5), at in any::<usize>(), byte in any::<u8>(), cut in any::<usize>(),
    ) {
        let history = History { events };
        let mut bytes = Vec::new();
        history.write_to(&mut bytes);
        history.write_to(&mut bytes);
        let (read, rest) = History::read_from(&bytes).unwrap();
        prop_assert_eq!(&read, &history);
        prop_assert_eq!(History::read_from(rest).unwrap(), (history, &[][..]));

        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(cut % (bytes.len() + 1));
        if let Ok((read, _)) = History::read_from(&bytes) {
            prop_assert!(read.events.iter().all(Event::is_valid));
            // The check must not panic, whatever the times are.
            check(&[read]).ok();
        }
    }
}

#[test]
fn stale_get_is_found() {
    let events = [put(1, [0, 10]), put(2, [20, 30]), get(Some(2), [40, 50]), get(Some(1), [60, 70])];
    assert!(check_events(&events[..3]).is_ok());
    violation(&events);
    // While the second put is pending, both values are right, but the old one must not follow the new one.
    let events = [put(1, [0, 10]), put(2, [20, 90]), get(Some(2), [40, 50]), get(Some(1), [60, 70])];
    violation(&events);
    let events = [put(1, [0, 10]), put(2, [20, 90]), get(Some(1), [40, 50]), get(Some(2), [60, 70])];
    assert!(check_events(&events).is_ok());
}

#[test]
fn lost_update_is_found() {
    let swap = |expected, value, times| Event { expected, ..event(2, Op::CompareAndSwap, value, times) };
    // Both swaps say that they replaced 1.
    let events = [put(1, [0, 10]), swap(1, 2, [20, 30]), swap(1, 3, [25, 35])];
    assert!(check_events(&events[..2]).is_ok());
    // The swaps contradict each other, whatever the value was before.
    assert_eq!(violation(&events), events[1..]);
    let insert = |value, times| event(3, Op::Insert, value, times);
    violation(&[insert(1, [0, 10]), insert(2, [5, 15])]);
}

#[test]
fn put_that_takes_effect_twice_is_found() {
    let events = [
        put(1, [0, 10]),
        get(Some(1), [20, 30]),
        put(2, [40, 50]),
        get(Some(2), [60, 70]),
        get(Some(1), [80, 90]),
    ];
    violation(&events);
    // The same with other kinds of operations, and with a put of unknown outcome.
    let delete = event(2, Op::Delete, 0, [32, 35]);
    let mut events = [unknown(events[0]), events[1], delete, events[2], events[3], events[4]];
    violation(&events);
    events[5] = get(Some(2), [80, 90]);
    assert!(check_events(&events).is_ok());
}

#[test]
fn deleted_key_that_comes_back_is_found() {
    let events = [put(1, [0, 10]), event(2, Op::Delete, 0, [20, 30]), get(Some(1), [40, 50])];
    assert!(check_events(&events[..2]).is_ok());
    violation(&events);
}

/// Two operations of unknown outcome write 5. Both can explain the first get of 5, but only the put can explain the second one.
#[test]
fn either_of_two_unknown_operations_may_have_taken_effect() {
    let swap = unknown(Event { expected: 1, ..event(2, Op::CompareAndSwap, 5, [20, 20]) });
    let lost = unknown(put(5, [20, 20]));
    let seen = [get(Some(5), [30, 31]), put(2, [40, 41]), get(Some(2), [50, 51]), get(Some(5), [60, 61])];
    for (a, b) in [(swap, lost), (lost, swap)] {
        let mut events = vec![put(1, [0, 1]), a, Event { called: 21, ..b }];
        events.extend(seen);
        assert!(is_linearizable(&events, None) && check_events(&events).is_ok());
        events.extend([put(3, [70, 71]), get(Some(5), [80, 81])]);
        violation(&events);
    }
}

/// In a long history with one fault, only the operations that contradict each other are reported.
#[test]
fn violation_reports_only_contradicting_operations() {
    let mut events = Vec::new();
    for n in 0..20_000 {
        let at = n * 100;
        events.push(match n % 4 {
            0 => put(n, [at, at + 150]),
            1 => event(2, Op::Insert, n, [at + 60, at + 90]),
            _ => get(Some(n / 4 * 4), [at, at + 90]),
        });
        if n % 4 == 1 {
            let last = events.last_mut().unwrap();
            (last.outcome, last.returned_value) = (Outcome::Mismatch, n / 4 * 4);
        }
    }
    assert!(check_events(&events).is_ok());
    events[15_002].returned_value = 14_996;
    let shown = violation(&events);
    assert!(shown.len() <= 4, "{shown:?}");
}

#[test]
fn check_uses_initial_values() {
    let history = History { events: vec![get(Some(5), [0, 1])] };
    assert!(check_from(std::slice::from_ref(&history), |key| (key == 1).then_some(5), BUDGET).is_ok());
    assert!(check(&[history]).is_err());
    // With operations that need the search, too.
    let history = History { events: vec![event(0, Op::Delete, 0, [0, 1])] };
    assert!(check_from(std::slice::from_ref(&history), |_| Some(5), BUDGET).is_ok());
    assert!(check(&[history]).is_err());
}

/// A million operations of all kinds on ten keys.
#[test]
fn long_history_is_checked_completely() {
    let seed = std::env::var("CROSSTIE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7u64);
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    let mut state = seed;
    let mut random = move |below: u64| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        crosstie_kv::sharding::hash_word(state) % below
    };
    let mut values = [None; 10];
    let mut now = 1_000;
    let mut events: Vec<Event> = (0..1_000_000)
        .map(|n| {
            now += 50;
            let key = random(10);
            let value = &mut values[key as usize];
            let op = [Op::Get, Op::Get, Op::Put, Op::Put, Op::Insert, Op::Delete, Op::CompareAndSwap]
                [random(7) as usize];
            let expected = value.unwrap_or(3);
            let mut request =
                Event { key, expected, ..event(0, op, n + 4, [now - random(500), now + random(500)]) };
            let (outcome, returned_value, next) = register(&request, *value);
            *value = next;
            (request.outcome, request.returned_value) = (outcome, returned_value);
            if random(10_000) == 0 { unknown(request) } else { request }
        })
        .collect();
    let summary = check_events(&events).unwrap();
    println!("{summary:?}");
    assert_eq!((summary.operations, summary.keys), (1_000_000, 10));

    let late_get = events.iter().rposition(|e| e.op == Op::Get && e.outcome == Outcome::Done).unwrap();
    events[late_get].returned_value = 3;
    assert!(violation(&events).contains(&events[late_get]));
}

/// Hundreds of overlapping puts and gets can be checked. For overlapping swaps the budget does not suffice, and the check says so.
#[test]
fn check_beyond_its_budget_is_undecided() {
    let many: Vec<Event> = (0..200).flat_map(|n| [put(n, [0, 1000]), get(Some(n), [0, 1000])]).collect();
    assert!(check_events(&many).is_ok());
    let swap = |n: u64| Event { expected: n % 5, ..event(2, Op::CompareAndSwap, (n + 1) % 5, [10, 100]) };
    let many: Vec<Event> = [put(0, [0, 5])].into_iter().chain((0..40).map(swap)).collect();
    let result = check_from(&[History { events: many }], |_| None, 1000);
    assert!(matches!(result, Err(Failure::Undecided { key: 1, operations: 41, .. })), "{result:?}");
}

#[test]
fn full_recorder_refuses_further_operations() {
    let mut recorder = Recorder::new(3, 3);
    let request = WordRequest { value: 9, ..WordRequest::new(Op::Put, 0, 5) };
    let (a, b) = (recorder.begin(&request).unwrap(), recorder.begin(&request).unwrap());
    let _left_open = recorder.begin(&request).unwrap();
    assert_eq!((recorder.begin(&request), recorder.room()), (None, 0));
    recorder.end(b, &WordResponse::new(Status::NodeGone, 0));
    recorder.end(a, &WordResponse::new(Status::Done, 0));
    let events = recorder.finish().events;
    assert_eq!(
        events.iter().map(|e| e.outcome).collect::<Vec<_>>(),
        [Outcome::Done, Outcome::Unknown, Outcome::Unknown]
    );
    assert!(events[0].called <= events[0].returned && events[0].returned <= now());
    assert!(events.iter().all(|event| event.is_valid() && event.client == 3 && event.value == 9));
}
