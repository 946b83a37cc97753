//! Calls with a timeout: a late response of a call that timed out is dropped, and the responses of other calls reach their
//! callers. The same test runs for ipc and for delegation.

use std::time::Duration;

use crosstie::{WaitStrategy, Waitable, delegation, ipc, wait_any};
use crosstie_testkit::fresh_name;
use crosstie_testkit::wait::TIMEOUT;

const SHORT: Duration = Duration::from_millis(20);

macro_rules! for_both {
    ($($test:ident $service:ident $config:expr;)*) => {$(
        /// A server with room for three calls that does not reply at first. Its response is twice the request.
        #[test]
        fn $test() {
            let name = fresh_name("deadlines");
            let mut server = $service::Server::<u64, u64>::create(&name, &$config).unwrap();
            let mut client = $service::Client::<u64, u64, u64>::connect(&name).unwrap();
            let mut deferred = Vec::new();
            client.call(&1, 1).unwrap();
            for request in [2, 3] {
                let gave_up = client.exchange_within(&request, Some(SHORT), |_| unreachable!("the server does not reply"));
                assert!(matches!(gave_up, Err(ipc::ExchangeError::TimedOut { after: SHORT })), "{gave_up:?}");
            }
            assert_eq!(client.in_flight(), 1, "what was given up is not to be polled for");
            // One open call and two that timed out occupy all slots; slots may become free later.
            let gave_up = client.exchange_within(&4, Some(SHORT), |_| unreachable!("the server does not reply"));
            assert!(matches!(gave_up, Err(ipc::ExchangeError::TimedOut { .. })), "{gave_up:?}");
            assert!(matches!(client.call(&5, 5), Err(ipc::CallError { cause: ipc::NotCalled::Full, token: 5 })));
            assert!(!client.wait(Some(SHORT)).unwrap());

            // The server replies now, to the newest request first.
            while deferred.len() < 3 {
                server.serve(|request| {
                    deferred.push((*request.message(), request.defer()));
                });
            }
            let (first, given_up) = (deferred.remove(0), deferred);
            for (request, ticket) in given_up.into_iter().rev() {
                server.reply(ticket, &(2 * request)).unwrap();
            }
            assert_eq!(client.poll(|_, _| panic!("responses of calls that timed out are dropped")).unwrap(), 0);
            assert!(!client.wait(Some(SHORT)).unwrap());
            let lanes = std::iter::once(&client as &dyn Waitable);
            assert!(!wait_any(lanes, WaitStrategy::Park, Some(SHORT)), "there is nothing to poll");
            // Their slots are free again, and other calls use them.
            client.call(&6, 6).unwrap();
            let replying = std::thread::spawn(move || {
                let mut replied = 0;
                while replied < 4 {
                    server.wait(Some(SHORT));
                    server.serve(|request| {
                        let response = 2 * request.message();
                        request.reply(&response).unwrap();
                        replied += 1;
                    });
                }
                server.reply(first.1, &(2 * first.0)).unwrap();
                server
            });
            for request in 7..10 {
                assert_eq!(client.exchange_within(&request, Some(TIMEOUT), |response| *response).unwrap(), 2 * request);
            }
            let mut seen = Vec::new();
            while seen.len() < 2 {
                assert!(client.wait(Some(TIMEOUT)).unwrap(), "{seen:?}");
                client.poll(|token, response| seen.push((token, *response))).unwrap();
            }
            seen.sort_unstable();
            assert_eq!(seen, [(1, 2), (6, 12)]);
            drop(replying.join().unwrap());
            // After the server is gone, calls return Disconnected instead of TimedOut.
            while client.exchange_within(&1, Some(SHORT), |_| ()).is_err_and(|error| {
                matches!(error, ipc::ExchangeError::TimedOut { .. })
            }) {}
            let gone = client.exchange_within(&1, Some(SHORT), |_| ());
            assert!(matches!(gone, Err(ipc::ExchangeError::Disconnected(_))), "{gone:?}");
        }
    )*};
}

for_both! {
    late_responses_of_an_ipc_server_are_dropped ipc ipc::Config { queue_depth: 3, ..Default::default() };
    late_responses_of_a_delegation_server_are_dropped delegation delegation::Config { queue_depth: 3, ..Default::default() };
}
