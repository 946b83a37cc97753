//! Callers that give up: their late answers are nobody's, and others' go where they belong. The same for both kinds of service.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crosstie::{WaitStrategy, Waitable, delegation, ipc, wait_any};

const SHORT: Duration = Duration::from_millis(20);
/// After this long without an answer something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("deadlines-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

macro_rules! for_both {
    ($($test:ident $service:ident $config:expr;)*) => {$(
        /// A server that does not answer at first, with room for three calls. It answers with twice the request.
        #[test]
        fn $test() {
            let name = fresh_name();
            let mut server = $service::Server::<u64, u64>::create(&name, &$config).unwrap();
            let mut client = $service::Client::<u64, u64, u64>::connect(&name).unwrap();
            let mut held = Vec::new();
            client.call(&1, 1).unwrap();
            for request in [2, 3] {
                let gave_up = client.exchange_within(&request, Some(SHORT), |_| unreachable!("nobody answers"));
                assert!(matches!(gave_up, Err(ipc::CallError::TimedOut { after: SHORT, .. })), "{gave_up:?}");
            }
            assert_eq!(client.in_flight(), 1, "what was given up is not to be polled for");
            // All room is taken, by one call and two that were given up: there may be some later.
            let gave_up = client.exchange_within(&4, Some(SHORT), |_| unreachable!("nobody answers"));
            assert!(matches!(gave_up, Err(ipc::CallError::TimedOut { .. })), "{gave_up:?}");
            assert!(matches!(client.call(&5, 5), Err(ipc::CallError::Full(5))));
            assert!(!client.wait(Some(SHORT)).unwrap());

            // It wakes up, and answers the newest first.
            while held.len() < 3 {
                server.poll();
                while let Some(request) = server.recv() {
                    held.push((*request.message(), request.defer()));
                }
            }
            let (first, given_up) = (held.remove(0), held);
            for (request, ticket) in given_up.into_iter().rev() {
                server.reply(ticket, &(2 * request)).unwrap();
            }
            assert_eq!(client.poll(|_, _| panic!("they are nobody's")).unwrap(), 0);
            assert!(!client.wait(Some(SHORT)).unwrap());
            let lanes = std::iter::once(&client as &dyn Waitable);
            assert!(!wait_any(lanes, WaitStrategy::Park, Some(SHORT)), "there is nothing to poll");
            // Their room is free again, and their slots are used by others.
            client.call(&6, 6).unwrap();
            let answering = std::thread::spawn(move || {
                let mut answered = 0;
                while answered < 4 {
                    server.wait(Some(SHORT));
                    server.poll();
                    while let Some(request) = server.recv() {
                        let answer = 2 * request.message();
                        request.reply(&answer).unwrap();
                        answered += 1;
                    }
                }
                server.reply(first.1, &(2 * first.0)).unwrap();
                server
            });
            for request in 7..10 {
                assert_eq!(client.exchange_within(&request, Some(PATIENCE), |answer| *answer).unwrap(), 2 * request);
            }
            let mut seen = Vec::new();
            while seen.len() < 2 {
                assert!(client.wait(Some(PATIENCE)).unwrap(), "{seen:?}");
                client.poll(|token, answer| seen.push((token, *answer))).unwrap();
            }
            seen.sort_unstable();
            assert_eq!(seen, [(1, 2), (6, 12)]);
            drop(answering.join().unwrap());
            // A server that ends is gone, and not merely late.
            while client.exchange_within(&1, Some(SHORT), |_| ()).is_err_and(|error| {
                matches!(error, ipc::CallError::TimedOut { .. })
            }) {}
            let gone = client.exchange_within(&1, Some(SHORT), |_| ());
            assert!(matches!(gone, Err(ipc::CallError::Disconnected { .. })), "{gone:?}");
        }
    )*};
}

for_both! {
    late_answers_of_a_lane_are_nobodys ipc ipc::Config { queue_depth: 3, ..Default::default() };
    late_answers_of_a_ring_are_nobodys delegation delegation::Config { queue_depth: 3, ..Default::default() };
}
