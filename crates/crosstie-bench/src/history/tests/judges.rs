//! The judges are judged: this checker, and two that others wrote, give the same verdict on histories of a running store, and on the same
//! histories after they were corrupted.

use std::collections::HashMap;

use crosstie_kv::client::Client;
use crosstie_kv::node::{Node, NodeConfig};
use crosstie_kv::wire::WordRequest;
use crosstie_testkit::rng::{Random, seed};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};
use todc_utils::linearizability::WGLChecker;
use todc_utils::linearizability::history::{Action, History as Actions};
use todc_utils::specifications::Specification;

use super::*;

/// Operations of a history. The other checkers try all orders, so there are few.
const OPERATIONS: usize = 10;
const HISTORIES: usize = 60;
const CORRUPTED: usize = 1000;

/// The register, as `stateright` needs it.
#[derive(Clone, Debug)]
struct Register(Option<u64>);

impl SequentialSpec for Register {
    type Op = Event;
    type Ret = (Outcome, u64);

    fn invoke(&mut self, event: &Event) -> (Outcome, u64) {
        let (outcome, returned_value, after) = register(event, self.0);
        self.0 = after;
        (outcome, returned_value)
    }
}

/// The register, as `todc-utils` needs it.
struct RegisterSpec;

impl Specification for RegisterSpec {
    type State = Option<u64>;
    type Operation = Event;

    fn init() -> Option<u64> {
        None
    }

    fn apply(event: &Event, value: &Option<u64>) -> (bool, Option<u64>) {
        let (outcome, returned_value, after) = register(event, *value);
        let is_valid = (outcome, returned_value) == (event.outcome, event.returned_value);
        (is_valid || event.outcome == Outcome::Unknown, after)
    }
}

/// Calls and returns in the order of time, with the numbers of their events. At the same time, calls come before returns.
fn steps(events: &[Event]) -> Vec<(u64, bool, usize)> {
    let both = events.iter().enumerate();
    let mut steps: Vec<_> =
        both.flat_map(|(n, event)| [(event.called, false, n), (event.returned, true, n)]).collect();
    steps.sort_unstable();
    steps
}

/// The verdicts of all three: is it linearizable?
fn verdicts(events: &[Event]) -> [bool; 3] {
    let ours = match check_events(events) {
        Ok(_) => true,
        Err(Failure::Violation { .. }) => false,
        Err(undecided) => panic!("{undecided}"),
    };
    // Every operation is a client of its own, so that any may overlap.
    let mut tester = LinearizabilityTester::new(Register(None));
    let mut actions = Vec::new();
    for (_, returns, number) in steps(events) {
        let event = events[number];
        if !returns {
            tester.on_invoke(number, event).unwrap();
            actions.push((number, Action::Call(event)));
            continue;
        }
        // An operation of unknown outcome may be in flight for ever. For `todc-utils` it ends last, with any response.
        if event.outcome != Outcome::Unknown {
            tester.on_return(number, (event.outcome, event.returned_value)).unwrap();
        }
        actions.push((number, Action::Response(event)));
    }
    [
        ours,
        tester.is_consistent(),
        WGLChecker::<RegisterSpec>::is_linearizable(Actions::from_actions(actions)),
    ]
}

/// Operations of two clients of a store on one key, of which several are in flight. `unique`: only gets, and puts of values that differ.
fn record(clients: &mut [Client<usize>; 2], key: u64, unique: bool, random: &mut Random) -> Vec<Event> {
    let mut recorders = [0, 1].map(|client| Recorder::new(client, OPERATIONS));
    let mut pending: HashMap<usize, Pending> = HashMap::new();
    let (mut begun, mut ended) = (0, 0);
    while ended < OPERATIONS {
        let at = random.index(2);
        if begun < OPERATIONS && pending.len() < 4 && random.below(3) > 0 {
            let op = match random.below(if unique { 2 } else { 6 }) {
                0 => Op::Put,
                1 => Op::Get,
                2 => Op::Insert,
                3 => Op::Delete,
                _ => Op::CompareAndSwap,
            };
            let value = if unique { begun as u64 + 1 } else { 1 + random.below(3) };
            let request =
                WordRequest { value, expected: 1 + random.below(3), ..WordRequest::new(op, 0, key) };
            pending.insert(begun, recorders[at].begin(&request).unwrap());
            clients[at].begin(request, begun).unwrap_or_else(|_| panic!("there is room"));
            begun += 1;
            continue;
        }
        ended += clients[at].poll(|token, response| {
            recorders[at].end(pending.remove(&token).unwrap(), &response);
        });
    }
    let mut events: Vec<Event> =
        recorders.into_iter().flat_map(|recorder| recorder.finish().events).collect();
    for event in &mut events {
        let has_value =
            matches!((event.op, event.outcome), (Op::Get, Outcome::Done) | (_, Outcome::Mismatch));
        event.returned_value *= u64::from(has_value);
    }
    events
}

/// Changes a value, swaps the times of two operations, or drops a response.
fn corrupt(events: &mut [Event], random: &mut Random) {
    let [one, other] = [random.index(events.len()), random.index(events.len())];
    match random.below(3) {
        0 => {
            let value = 1 + random.below(4);
            let event = &mut events[one];
            match (event.op, event.outcome) {
                (Op::Get, Outcome::NotFound) => {
                    (event.outcome, event.returned_value) = (Outcome::Done, value)
                }
                (Op::Get, Outcome::Done) | (_, Outcome::Mismatch) => event.returned_value = value,
                _ => event.value = value,
            }
        }
        1 if [one, other].iter().all(|at| events[*at].outcome != Outcome::Unknown) => {
            let times = [one, other].map(|at| (events[at].called, events[at].returned));
            (events[one].called, events[one].returned) = times[1];
            (events[other].called, events[other].returned) = times[0];
        }
        _ => events[one] = Event { returned_value: 0, ..unknown(events[one]) },
    }
}

#[test]
fn three_checkers_give_the_same_verdict() {
    let mut random = Random(seed());
    let name = format!("judges-{}", std::process::id());
    let _node = Node::start(&NodeConfig::single(&name)).unwrap();
    let mut clients = [0, 1].map(|_| Client::attach_pipelined(&name).unwrap());
    let histories: Vec<Vec<Event>> = (0..HISTORIES)
        .map(|number| record(&mut clients, 1000 + number as u64, number % 3 == 0, &mut random))
        .collect();
    for events in &histories {
        assert_eq!(verdicts(events), [true; 3], "{events:#?}");
    }
    let mut linearizable = 0;
    for _ in 0..CORRUPTED {
        let mut events = histories[random.index(HISTORIES)].clone();
        (0..=random.below(2)).for_each(|_| corrupt(&mut events, &mut random));
        let verdicts = verdicts(&events);
        assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}: {events:#?}");
        linearizable += usize::from(verdicts[0]);
    }
    println!("{linearizable} of {CORRUPTED} corrupted histories are linearizable");
    // Both verdicts are common.
    assert!((CORRUPTED / 10..CORRUPTED * 9 / 10).contains(&linearizable));
}
