//! Invalid bytes from the peer, and random sequences of calls.

use super::*;
use crate::connect_pair;

#[test]
fn invalid_requests_are_answered_with_an_error() {
    let mut random = Random(seed());
    let (client, server) = (open::<usize>(), open::<()>());
    let (here, _there) = connect_pair(&client, &server, &ConnectionConfig::default());
    let mut service = service();
    let mut statuses = BTreeMap::<Vec<u8>, u64>::new();
    for round in 0..20_000 {
        let mut bytes: Vec<u8> = (0..random.below(40)).map(|_| random.next() as u8).collect();
        // Mostly a method that exists.
        if bytes.len() >= 8 && random.below(4) > 0 {
            bytes[..4].copy_from_slice(&(random.below(5) as u32).to_le_bytes());
            bytes[4..8].copy_from_slice(&[[0, 1, 8][random.below(3) as usize], 0, 0, 0]);
            // The request that makes its handler panic is valid, and not tested here.
            if bytes.len() == 9 && bytes[8] == 3 {
                continue;
            }
        }
        here.call(&bytes, random.below(64) as usize, round).unwrap();
        let mut answer = None;
        while answer.is_none() {
            client.poll(|_, response| answer = Some(response.unwrap().to_vec()));
            service.poll(&server, |(), _| ());
            for (_, reply) in service.state_mut().deferred.drain(..) {
                reply.send(0).unwrap();
            }
        }
        let answer = answer.unwrap();
        *statuses.entry(answer.into_iter().take(4).collect()).or_default() += 1;
    }
    let counters = service.counters();
    println!("{counters:?} {statuses:?}");
    assert!(counters.answered > 0 && counters.unknown > 0 && counters.malformed > 0);
    let of = |status: u8| statuses.get(&vec![status, 0, 0, 0]).copied().unwrap_or(0);
    // An empty response, for callers that allow less than the 8 bytes of a status.
    let silent = statuses.get(&vec![]).copied().unwrap_or(0);
    let total =
        counters.answered + counters.refused + counters.deferred + counters.unknown + counters.malformed;
    assert_eq!(statuses.values().sum::<u64>(), total);
    assert_eq!(of(0), counters.answered + counters.deferred);
    assert_eq!(of(1) + of(2) + of(3) + silent, counters.unknown + counters.malformed + counters.refused);
}

#[test]
fn invalid_responses_end_only_their_own_call() {
    let mut random = Random(seed());
    let pair = Pair::new(&ConnectionConfig::default());
    for round in 0..5_000 {
        let len = [0, 3, 8, 9, 16][random.below(5) as usize];
        let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        if len >= 8 && random.below(2) == 0 {
            bytes[..4].copy_from_slice(&(random.below(6) as u32).to_le_bytes());
        }
        let answer = pair.finish_with(pair.client.call::<Double>(round), || {
            pair.driver.step();
            pair.server.poll(|(), _| ());
            while let Some(request) = pair.server.recv() {
                assert!(request.reply(&bytes).is_ok());
            }
        });
        let is_answer = bytes.len() == 16 && bytes[..4] == [0; 4];
        assert_eq!(answer.is_ok(), is_answer, "{bytes:?}: {answer:?}");
    }
    assert!(pair.driver.counters().malformed > 0);
    assert_eq!(pair.finish(&mut service(), pair.client.call::<Double>(4)), Ok(8));
}

/// Random calls, drops, replies, refusals and dropped requests, compared with a list of the expected results.
#[test]
fn random_sequences_of_calls_match_the_oracle() {
    let mut random = Random(seed());
    for round in 0..60 {
        let bytes = 512 << random.below(5);
        let pair = Pair::new(&ring(bytes, 1 + random.below(64) as usize));
        let mut service = service();
        let mut open: BTreeMap<u64, Call<Later>> = BTreeMap::new();
        let oracle: Rc<RefCell<BTreeMap<u64, Result<u64, Error>>>> = Rc::default();
        let (mut next, mut ended, mut last_seen) = (0, 0, None);
        let begin = Instant::now();
        while ended < 300 {
            match random.below(10) {
                0..4 => {
                    open.insert(next, pair.client.call::<Later>(next));
                    next += 1;
                }
                4 if random.below(4) == 0 && !open.is_empty() => {
                    let key = *open.keys().nth(random.below(open.len() as u64) as usize).unwrap();
                    drop(open.remove(&key));
                }
                4..8 => {
                    let known = service.state().deferred.len();
                    pair.turn(&mut service);
                    for (number, _) in &service.state().deferred[known..] {
                        assert!(last_seen < Some(*number), "{number} after {last_seen:?}, round {round}");
                        last_seen = Some(*number);
                    }
                }
                _ => {
                    let deferred = &mut service.state_mut().deferred;
                    if deferred.is_empty() {
                        continue;
                    }
                    let (number, reply) = deferred.remove(random.below(deferred.len() as u64) as usize);
                    let fate = match random.below(4) {
                        0 => Err(Error::Refused(Refused(number as u32))),
                        1 => Err(Error::Unanswered),
                        _ => Ok(number ^ 0xABCD),
                    };
                    match fate {
                        Ok(answer) => reply.send(answer).unwrap(),
                        Err(Error::Refused(refused)) => reply.refuse(refused).unwrap(),
                        _ => drop(reply),
                    }
                    assert!(oracle.borrow_mut().insert(number, fate).is_none(), "{number} came twice");
                }
            }
            open.retain(|number, call| match peek(call) {
                Poll::Pending => true,
                Poll::Ready(answer) => {
                    assert_eq!(Some(&answer), oracle.borrow().get(number), "call {number}, round {round}");
                    ended += 1;
                    false
                }
            });
            assert!(begin.elapsed() < TIMEOUT, "no progress in round {round}");
        }
    }
}
