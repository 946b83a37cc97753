//! Limits and refusals: each is an error that says what is wrong, and hands back what was not accepted.

use super::*;

#[test]
fn configurations_outside_of_limits_are_rejected() {
    let (good, name) = (Config::default(), fresh_name("local-test"));
    for (what, config) in [
        ("max_clients", Config { max_clients: 0, ..good.clone() }),
        ("max_clients", Config { max_clients: MAX_CLIENTS + 1, ..good.clone() }),
        ("queue_depth", Config { queue_depth: 0, ..good.clone() }),
        ("queue_depth", Config { queue_depth: MAX_QUEUE_DEPTH + 1, ..good.clone() }),
        ("request_limit", Config { request_limit: 0, ..good.clone() }),
        ("request_limit", Config { request_limit: MAX_MESSAGE + 1, ..good.clone() }),
        ("response_limit", Config { response_limit: MAX_MESSAGE + 1, ..good.clone() }),
    ] {
        let error = Server::<[u8], [u8]>::create(&name, &config).unwrap_err();
        assert!(matches!(error, CreateError::Limit { what: w, .. } if w == what), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    // Types of fixed size do not use the limits.
    let ignored = Config { request_limit: 0, response_limit: 0, ..good };
    Server::<u64, u64>::create(&name, &ignored).unwrap();
}

#[test]
fn name_is_validated_and_belongs_to_one_server() {
    for bad in ["", "a b", "ä", "x\0", "new\nline", &"x".repeat(65)] {
        let created = Server::<u64, u64>::create(bad, &Config::default());
        assert!(
            matches!(&created, Err(CreateError::BadName { name }) if name == bad),
            "{bad:?}: {created:?}"
        );
        let connected = Client::<u64, u64>::connect(bad);
        assert!(matches!(&connected, Err(ConnectError::BadName { name }) if name == bad), "{bad:?}");
    }
    let name = fresh_name("local-test");
    let nobody = Client::<u64, u64>::connect(&name).unwrap_err();
    assert!(matches!(&nobody, ConnectError::NoServer { name: n } if *n == name), "{nobody}");
    let server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    // Also for a server with other message types.
    let second = Server::<u64, u64>::create(&name, &Config::default()).unwrap_err();
    assert!(matches!(&second, CreateError::NameTaken { name: n } if *n == name), "{second}");
    let other = Server::<[u8], u32>::create(&name, &Config::default()).unwrap_err();
    assert!(matches!(other, CreateError::NameTaken { .. }), "{other}");
    Client::<u64, u64>::connect(&name).unwrap();
    drop(server);
    // The name is free at once.
    Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    Server::<u64, u64>::create(&"x".repeat(64), &Config::default()).unwrap();
}

#[test]
fn mismatched_message_types_are_refused() {
    let name = fresh_name("local-test");
    let server = Server::<u64, [u8]>::create(&name, &Config::default()).unwrap();
    let error = Client::<u32, [u8]>::connect(&name).unwrap_err();
    let expected = |what: &str, theirs, ours| match &error {
        ConnectError::Mismatch { what: w, theirs: t, ours: o } => *w == what && (t.0, o.0) == (theirs, ours),
        _ => false,
    };
    assert!(expected("the request", Some(8), Some(4)), "{error}");
    let text = error.to_string();
    assert!(text.contains("the request") && text.contains('8') && text.contains('4'), "{text}");
    let error = Client::<u64, u64>::connect(&name).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::Mismatch {
                what: "the response",
                theirs: MessageSize(None),
                ours: MessageSize(Some(8))
            }
        ),
        "{error}"
    );
    let error = Client::<[u8], [u8]>::connect(&name).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::Mismatch {
                what: "the request",
                theirs: MessageSize(Some(8)),
                ours: MessageSize(None)
            }
        ),
        "{error}"
    );
    drop(server);
}

#[test]
fn server_accepts_up_to_max_clients() {
    let name = fresh_name("local-test");
    let config = Config { max_clients: 2, ..Config::default() };
    let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
    let mut clients: Vec<Client<u64, u64, u64>> = (0..2).map(|_| Client::connect(&name).unwrap()).collect();
    for round in 0..20 {
        let error = Client::<u64, u64>::connect(&name).unwrap_err();
        assert!(matches!(error, ConnectError::Full { limit: 2 }), "{error}");
        // A disconnected client makes room at once, whether the server polls or not.
        drop(clients.swap_remove(round % 2));
        clients.push(Client::connect(&name).unwrap());
        if round % 3 == 0 {
            for (token, client) in (0..).zip(&mut clients) {
                client.call(&token, token).unwrap();
            }
            until("both are served", || {
                serve(&mut server);
                clients.iter_mut().all(|client| {
                    client.poll(|token, response| assert_eq!(*response, expected_response(token))).unwrap();
                    client.in_flight() == 0
                })
            });
            assert_eq!(server.clients(), 2);
        }
    }
}

#[test]
fn client_can_reconnect_to_a_full_server() {
    let config = Config { max_clients: 1, ..Config::default() };
    let (mut server, mut client) = pair(&config);
    client.call(&1, 1).unwrap();
    for round in 0..10 {
        if round % 2 == 0 {
            client.disconnect(|_| {});
        }
        client.reconnect().unwrap();
        client.call(&2, 2).unwrap();
        until("the response arrives", || {
            serve(&mut server);
            client.poll(|token, response| assert_eq!((token, *response), (2, expected_response(2)))).unwrap()
                == 1
        });
    }
}

#[test]
fn messages_above_the_limit_are_handed_back() {
    let name = fresh_name("local-test");
    let config = Config { request_limit: 100, response_limit: 60, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8], &str>::connect(&name).unwrap();
    let error = client.call(&[0; 101], "back").unwrap_err();
    assert!(
        matches!(error, CallError { cause: NotCalled::TooLong { len: 101, limit: 100 }, token: "back" }),
        "{error}"
    );
    assert_eq!(client.in_flight(), 0);
    client.call(&[7; 100], "fits").unwrap();
    server.poll();
    let request = server.recv().unwrap();
    assert_eq!(request.message(), [7; 100]);
    // The ticket stays valid after each refused reply.
    let Err(ReplyError { cause: NotReplied::TooLong { len: 61, limit: 60 }, ticket: Some(ticket) }) =
        request.reply(&[0; 61])
    else {
        panic!("fits")
    };
    let Err(ReplyError { cause: NotReplied::TooLong { .. }, ticket: Some(ticket) }) =
        server.reply(ticket, &[0; 1000])
    else {
        panic!("fits")
    };
    server.reply(ticket, &[9; 60]).unwrap();
    assert_eq!(client.poll(|token, response| assert_eq!((token, response), ("fits", &[9; 60][..]))), Ok(1));
}

#[test]
fn full_client_can_call_again_after_polling() {
    for depth in [1, 2, 3, 32, MAX_QUEUE_DEPTH] {
        let (mut server, mut client) = pair(&Config { queue_depth: depth, ..Config::default() });
        let depth = depth as u64;
        for round in 0..3 {
            for token in 0..depth {
                // A shared ring may be smaller than the queue depth of one client.
                while let Err(error) = client.call(&token, token) {
                    assert!(
                        !matches!(error.cause, NotCalled::Full),
                        "call {token} of {depth} in round {round}"
                    );
                    serve(&mut server);
                }
            }
            let full = client.call(&99, 77);
            assert!(matches!(full, Err(CallError { cause: NotCalled::Full, token: 77 })), "{full:?}");
            serve(&mut server);
            // The responses are there, but were not polled yet.
            assert!(matches!(client.call(&99, 77), Err(CallError { cause: NotCalled::Full, token: 77 })));
            let received = collect(&mut client, depth as usize);
            assert!(received.iter().all(|(token, response)| *response == expected_response(*token)));
        }
    }
}

#[test]
fn empty_and_long_messages_arrive_unchanged() {
    let name = fresh_name("local-test");
    let mut server = Server::<(), ()>::create(&name, &Config::default()).unwrap();
    let mut client = Client::<(), (), u8>::connect(&name).unwrap();
    client.call(&(), 3).unwrap();
    server.poll();
    server.recv().unwrap().reply(&()).unwrap();
    assert_eq!(client.poll(|token, ()| assert_eq!(token, 3)), Ok(1));

    let name = fresh_name("local-test");
    let limit = MAX_MESSAGE;
    let config = Config {
        request_limit: limit,
        response_limit: limit,
        queue_depth: 1,
        max_clients: 1,
        ..Config::default()
    };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8]>::connect(&name).unwrap();
    for len in [0, 1, 7, 8, 9, 47, 48, 55, 56, 57, 63, 64, 65, 4095, 70_000, limit] {
        let request: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8).collect();
        client.call(&request, ()).unwrap();
        server.poll();
        let received = server.recv().unwrap();
        assert!(received.message() == request, "{len} bytes");
        let response: Vec<u8> = request.iter().map(|byte| !byte).collect();
        received.reply(&response).unwrap();
        assert_eq!(client.poll(|(), received| assert!(received == response, "{len} bytes")), Ok(1));
    }
}

/// One `serve` ends, however fast requests come. Requests are handed out once and in order, and some are answered after it.
#[test]
fn serve_ends_while_requests_keep_coming() {
    let (mut server, mut client) = pair(&Config { queue_depth: 64, ..Config::default() });
    let (mut made, mut served, mut ended) = (0, 0, 0);
    let mut deferred = Vec::new();
    until("all calls have their responses", || {
        let count = server.serve(|request| {
            assert_eq!(*request.message(), served);
            let response = expected_response(served);
            served += 1;
            match served % 50 {
                0 => deferred.push((request.defer(), response)),
                _ => request.reply(&response).unwrap(),
            }
            while made < 2000 && client.call(&made, made).is_ok() {
                made += 1;
            }
            ended += client.poll(|token, response| assert_eq!(*response, expected_response(token))).unwrap();
        });
        assert!(count <= 256, "{count} requests");
        for (ticket, response) in deferred.drain(..) {
            server.reply(ticket, &response).unwrap();
        }
        ended += client.poll(|token, response| assert_eq!(*response, expected_response(token))).unwrap();
        while made < 2000 && client.call(&made, made).is_ok() {
            made += 1;
        }
        ended == 2000
    });
    assert_eq!((served, server.serve(|_| unreachable!())), (2000, 0));
}

#[test]
fn invalid_enum_tag_ends_the_connection() {
    use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};
    #[derive(Debug, PartialEq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
    #[repr(u8)]
    enum Verb {
        Get = 1,
    }
    let name = fresh_name("local-test");
    let mut server = Server::<Verb, Verb>::create(&name, &Config::default()).unwrap();
    let mut good = Client::<Verb, Verb>::connect(&name).unwrap();
    let mut bad = Client::<u8, Verb>::connect(&name).unwrap();
    bad.call(&9, ()).unwrap();
    good.call(&Verb::Get, ()).unwrap();
    server.serve(|request| {
        assert_eq!(*request.message(), Verb::Get);
        request.reply(&Verb::Get).unwrap();
    });
    assert_eq!(good.poll(|(), verb| assert_eq!(*verb, Verb::Get)), Ok(1));
    until("the other client is disconnected", || bad.poll(|(), _| panic!("no response")).is_err());
    assert_eq!(server.counters().violations, 1);
    // The other direction: an invalid response.
    let name = fresh_name("local-test");
    let mut server = Server::<u8, u8>::create(&name, &Config::default()).unwrap();
    let mut client = Client::<u8, Verb, u8>::connect(&name).unwrap();
    client.call(&1, 1).unwrap();
    server.poll();
    server.recv().unwrap().reply(&2).unwrap();
    assert_eq!(client.poll(|_, _| panic!("no response")), Err(Disconnected::InvalidResponse));
    assert_eq!(client.poll(|_, _| panic!("no response")), Err(Disconnected::InvalidResponse));
    assert!(matches!(
        client.call(&1, 8),
        Err(CallError { cause: NotCalled::Disconnected(Disconnected::InvalidResponse), token: 8 })
    ));
    client.reconnect().unwrap();
    server.poll();
    client.call(&1, 1).unwrap();
}

#[test]
fn servers_clients_and_requests_can_move_to_another_thread() {
    fn assert_send<T: Send>() {}
    assert_send::<Server<u64, [u8]>>();
    assert_send::<Client<u64, [u8], u32>>();
    assert_send::<Request<'static, u64, [u8]>>();
    assert_send::<Ticket>();
}
