//! Replies in any order, the end of either side, reused client slots, and fairness.

use super::*;

#[test]
fn replies_may_come_in_any_order() {
    let (mut server, mut client) = pair(&Config { queue_depth: 8, ..Config::default() });
    for token in 0..8 {
        client.call(&token, token).unwrap();
    }
    let mut deferred: Vec<_> = defer(&mut server, 8).into_iter().map(Some).collect();
    for i in [7, 3, 0, 5, 1, 6, 2, 4] {
        let (request, ticket) = deferred[i].take().unwrap();
        assert_eq!(request, i as u64, "requests arrive in order");
        server.reply(ticket, &expected_response(request)).unwrap();
        assert_eq!(client.wait(Some(TIMEOUT)), Ok(true));
        assert_eq!(collect(&mut client, 1), [(request, expected_response(request))]);
    }
}

#[test]
fn missing_response_does_not_block_other_calls() {
    for depth in [2, 3, 8] {
        let (mut server, mut client) = pair(&Config { queue_depth: depth, ..Config::default() });
        client.call(&0, 0).unwrap();
        let unanswered = defer(&mut server, 1);
        let mut token = 0;
        for _ in 0..500 {
            for _ in 1..depth {
                token += 1;
                client.call(&token, token).unwrap();
            }
            assert!(matches!(client.call(&0, 0), Err(CallError { cause: NotCalled::Full, token: 0 })));
            assert_eq!(serve(&mut server), depth - 1);
            let received = collect(&mut client, depth - 1);
            assert!(received.iter().all(|(token, response)| *response == expected_response(*token)));
        }
        for (request, ticket) in unanswered {
            server.reply(ticket, &expected_response(request)).unwrap();
        }
        assert_eq!(collect(&mut client, 1), [(0, expected_response(0))]);
    }
}

/// After a wait has found a response, one poll returns it.
#[test]
fn poll_returns_the_response_that_wait_found() {
    let (mut server, mut client) = pair(&Config { queue_depth: 4, ..Config::default() });
    for token in 0..4 {
        client.call(&token, token).unwrap();
    }
    let mut deferred = defer(&mut server, 4);
    while let Some((request, ticket)) = deferred.pop() {
        server.reply(ticket, &expected_response(request)).unwrap();
        assert_eq!(client.wait(Some(TIMEOUT)), Ok(true));
        let polled = client
            .poll(|token, response| assert_eq!((token, *response), (request, expected_response(request))));
        assert_eq!(polled, Ok(1), "the response to {request}");
    }
}

#[test]
fn responses_of_an_ended_server_still_arrive() {
    let (mut server, mut client) = pair(&Config::default());
    for token in 0..10 {
        client.call(&token, token).unwrap();
    }
    for (request, ticket) in defer(&mut server, 10).into_iter().rev() {
        if request % 3 == 0 {
            server.reply(ticket, &expected_response(request)).unwrap();
        }
    }
    drop(server);
    let (mut received, mut end) = (Vec::new(), Ok(0));
    until("the end of the server is noticed", || {
        end = client.poll(|token, response| received.push((token, *response)));
        end.is_err()
    });
    assert_eq!(end, Err(Disconnected::ServerGone));
    let refused = client.call(&0, 99);
    assert!(matches!(
        refused,
        Err(CallError { cause: NotCalled::Disconnected(Disconnected::ServerGone), token: 99 })
    ));
    received.sort();
    assert_eq!(received, [0, 3, 6, 9].map(|token| (token, expected_response(token))));
    assert_eq!(client.in_flight(), 6);
    assert_eq!(client.wait(None), Err(Disconnected::ServerGone));
    let error = client.exchange(&5, |_| panic!("no response")).unwrap_err();
    assert!(matches!(error, ExchangeError::Disconnected(Disconnected::ServerGone)), "{error}");
    let mut lost = Vec::new();
    client.disconnect(|token| lost.push(token));
    lost.sort();
    assert_eq!(lost, [1, 2, 4, 5, 7, 8]);
}

#[test]
fn client_reconnects_to_a_new_server() {
    let name = fresh_name("local-test");
    let config = Config { queue_depth: 4, ..Config::default() };
    let mut client: Option<Client<u64, u64, u64>> = None;
    for generation in 0..20 {
        let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
        match &mut client {
            None => client = Some(Client::connect(&name).unwrap()),
            Some(client) => {
                until("the end of the server is noticed", || {
                    client.poll(|_, _| panic!("no response")).is_err()
                });
                client.reconnect().unwrap();
                assert_eq!(client.in_flight(), 0);
            }
        }
        let client = client.as_mut().unwrap();
        for token in 0..4 {
            client.call(&(token + generation), token).unwrap();
        }
        until("requests arrive", || serve(&mut server) > 0);
        until("all are served", || {
            serve(&mut server);
            client
                .poll(|token, response| assert_eq!(*response, expected_response(token + generation)))
                .unwrap();
            client.in_flight() == 0
        });
        // A call is always in flight when the server ends.
        client.call(&0, 0).unwrap();
        drop(server);
        if generation % 2 == 0 {
            until("the end of the server is noticed", || client.poll(|_, _| panic!("no response")).is_err());
            let nobody = client.reconnect().unwrap_err();
            assert!(matches!(nobody, ConnectError::NoServer { .. }), "{nobody}");
        }
    }
}

#[test]
fn ticket_is_valid_for_its_own_call_only() {
    let (mut server, mut client) = pair(&Config::default());
    let (mut other, _theirs) = pair(&Config::default());
    client.call(&1, 1).unwrap();
    client.call(&2, 2).unwrap();
    let mut deferred = defer(&mut server, 2);
    let (_, second) = deferred.pop().unwrap();
    let (_, first) = deferred.pop().unwrap();
    let Err(ReplyError { cause: NotReplied::WrongServer, ticket: Some(first) }) = other.reply(first, &0)
    else {
        panic!("another server accepted the ticket")
    };
    server.reply(first, &expected_response(1)).unwrap();
    assert_eq!(collect(&mut client, 1), [(1, expected_response(1))]);
    // The client disconnects before the reply.
    drop(client);
    until("the disconnect is noticed", || {
        server.poll();
        server.counters().disconnects == 1
    });
    let gone = server.reply(second, &0);
    assert!(matches!(gone, Err(ReplyError { cause: NotReplied::ClientGone, ticket: None })), "{gone:?}");
}

#[test]
fn slots_of_disconnected_clients_are_reused() {
    let name = fresh_name("local-test");
    let config = Config { max_clients: 3, queue_depth: 2, ..Config::default() };
    let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
    let mut stale = Vec::new();
    let mut keys = std::collections::HashSet::new();
    for generation in 0..200u64 {
        let mut client = Client::<u64, u64, u64>::connect(&name).unwrap();
        client.call(&generation, 1).unwrap();
        client.call(&generation, 2).unwrap();
        let mut deferred = defer(&mut server, 2);
        let (request, ticket) = deferred.pop().unwrap();
        assert_eq!(request, generation);
        assert!(keys.insert(ticket.client()), "no two clients have the same key");
        server.reply(ticket, &expected_response(request)).unwrap();
        assert_eq!(collect(&mut client, 1), [(2, expected_response(generation))]);
        stale.push(deferred.pop().unwrap().1);
        drop(client);
        // Replies to the disconnected clients fail, although new clients use the same memory.
        if generation % 10 == 9 {
            until("all clients have disconnected", || {
                server.poll();
                server.counters().disconnects == generation + 1
            });
            for ticket in stale.drain(..) {
                assert!(matches!(
                    server.reply(ticket, &0),
                    Err(ReplyError { cause: NotReplied::ClientGone, ticket: None })
                ));
            }
        }
    }
    server.poll();
    assert_eq!((server.clients(), server.counters().connects, server.counters().violations), (0, 200, 0));
}

#[test]
fn flooding_client_does_not_starve_others() {
    let name = fresh_name("local-test");
    let config = Config { queue_depth: 16, ..Config::default() };
    let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
    let mut flood = Client::<u64, u64, u64>::connect(&name).unwrap();
    let mut quiet = Client::<u64, u64, u64>::connect(&name).unwrap();
    const FLOOD: u64 = u64::MAX;
    let pump = |flood: &mut Client<u64, u64, u64>| {
        while flood.call(&FLOOD, FLOOD).is_ok() {}
        flood.poll(|_, response| assert_eq!(*response, expected_response(FLOOD))).unwrap();
    };
    for round in 0..200 {
        pump(&mut flood);
        quiet.call(&round, round).unwrap();
        let (mut before, mut served) = (0, false);
        while !served {
            server.poll();
            // Stop when it is served: with a shared ring, requests never run out.
            while !served && let Some(request) = server.recv() {
                let message = *request.message();
                request.reply(&expected_response(message)).unwrap();
                served |= message == round;
                before += u32::from(!served);
                assert!(
                    before < 100,
                    "{before} other requests were served before the quiet client in round {round}"
                );
                // Refill after every single request.
                pump(&mut flood);
            }
        }
        assert_eq!(collect(&mut quiet, 1), [(round, expected_response(round))]);
    }
}
