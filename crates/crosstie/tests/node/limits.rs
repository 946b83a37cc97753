//! Limits and refusals: each is an error that says what is wrong, and hands back what it did not take.

use super::*;

#[test]
fn configurations_end_at_their_limits() {
    let (good, name) = (Config::default(), fresh_name());
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
    // Types bring their own sizes.
    let ignored = Config { request_limit: 0, response_limit: 0, ..good };
    Server::<u64, u64>::create(&name, &ignored).unwrap();
}

#[test]
fn names_are_checked_and_belong_to_one_server() {
    for bad in ["", "a b", "ä", "x\0", "new\nline", &"x".repeat(65)] {
        let created = Server::<u64, u64>::create(bad, &Config::default());
        assert!(
            matches!(&created, Err(CreateError::BadName { name }) if name == bad),
            "{bad:?}: {created:?}"
        );
        let connected = Client::<u64, u64>::connect(bad);
        assert!(matches!(&connected, Err(ConnectError::BadName { name }) if name == bad), "{bad:?}");
    }
    let name = fresh_name();
    let nobody = Client::<u64, u64>::connect(&name).unwrap_err();
    assert!(matches!(&nobody, ConnectError::NoServer { name: n } if *n == name), "{nobody}");
    let server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    // The same, and one of other messages: a name is a name.
    let second = Server::<u64, u64>::create(&name, &Config::default()).unwrap_err();
    assert!(matches!(&second, CreateError::NameTaken { name: n } if *n == name), "{second}");
    let other = Server::<[u8], u32>::create(&name, &Config::default()).unwrap_err();
    assert!(matches!(other, CreateError::NameTaken { .. }), "{other}");
    Client::<u64, u64>::connect(&name).unwrap();
    drop(server);
    // Free at once.
    Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    Server::<u64, u64>::create(&"x".repeat(64), &Config::default()).unwrap();
}

#[test]
fn other_messages_are_told_apart() {
    let name = fresh_name();
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
fn as_many_clients_as_allowed() {
    let name = fresh_name();
    let config = Config { max_clients: 2, ..Config::default() };
    let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
    let mut clients: Vec<Client<u64, u64, u64>> = (0..2).map(|_| Client::connect(&name).unwrap()).collect();
    for round in 0..20 {
        let error = Client::<u64, u64>::connect(&name).unwrap_err();
        assert!(matches!(error, ConnectError::Full { limit: 2 }), "{error}");
        // Whoever leaves makes room, also for somebody who comes at once, and whether the server looks or not.
        drop(clients.swap_remove(round % 2));
        clients.push(Client::connect(&name).unwrap());
        if round % 3 == 0 {
            for (token, client) in (0..).zip(&mut clients) {
                client.call(&token, token).unwrap();
            }
            until("both are served", || {
                serve(&mut server);
                clients.iter_mut().all(|client| {
                    client.poll(|token, response| assert_eq!(*response, answer(token))).unwrap();
                    client.in_flight() == 0
                })
            });
            assert_eq!(server.clients(), 2);
        }
    }
}

#[test]
fn a_client_that_gives_up_can_come_back_to_a_full_server() {
    let config = Config { max_clients: 1, ..Config::default() };
    let (mut server, mut client) = pair(&config);
    client.call(&1, 1).unwrap();
    for round in 0..10 {
        if round % 2 == 0 {
            client.disconnect(|_| {});
        }
        client.reconnect().unwrap();
        client.call(&2, 2).unwrap();
        until("the answer comes", || {
            serve(&mut server);
            client.poll(|token, response| assert_eq!((token, *response), (2, answer(2)))).unwrap() == 1
        });
    }
}

#[test]
fn what_is_too_long_comes_back() {
    let name = fresh_name();
    let config = Config { request_limit: 100, response_limit: 60, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8], &str>::connect(&name).unwrap();
    let error = client.call(&[0; 101], "back").unwrap_err();
    assert!(matches!(error, CallError::TooLong { token: "back", len: 101, limit: 100 }), "{error}");
    assert_eq!(client.in_flight(), 0);
    client.call(&[7; 100], "fits").unwrap();
    server.poll();
    let request = server.recv().unwrap();
    assert_eq!(request.message(), [7; 100]);
    // The ticket is good as often as it takes.
    let Err(ReplyError::TooLong { ticket, len: 61, limit: 60 }) = request.reply(&[0; 61]) else {
        panic!("fits")
    };
    let Err(ReplyError::TooLong { ticket, .. }) = server.reply(ticket, &[0; 1000]) else { panic!("fits") };
    server.reply(ticket, &[9; 60]).unwrap();
    assert_eq!(client.poll(|token, response| assert_eq!((token, response), ("fits", &[9; 60][..]))), Ok(1));
}

#[test]
fn full_is_an_answer_and_not_an_end() {
    for depth in [1, 2, 3, 32, MAX_QUEUE_DEPTH] {
        let (mut server, mut client) = pair(&Config { queue_depth: depth, ..Config::default() });
        let depth = depth as u64;
        for round in 0..3 {
            for token in 0..depth {
                // A ring that all share may be smaller than what one client may ask.
                while let Err(error) = client.call(&token, token) {
                    assert!(!matches!(error, CallError::Full(_)), "call {token} of {depth} in round {round}");
                    serve(&mut server);
                }
            }
            let full = client.call(&99, 77);
            assert!(matches!(full, Err(CallError::Full(77))), "{full:?}");
            serve(&mut server);
            // Answered, but not taken yet.
            assert!(matches!(client.call(&99, 77), Err(CallError::Full(77))));
            let got = collect(&mut client, depth as usize);
            assert!(got.iter().all(|(token, response)| *response == answer(*token)));
        }
    }
}

#[test]
fn messages_without_content_and_long_ones_travel_whole() {
    let name = fresh_name();
    let mut server = Server::<(), ()>::create(&name, &Config::default()).unwrap();
    let mut client = Client::<(), (), u8>::connect(&name).unwrap();
    client.call(&(), 3).unwrap();
    server.poll();
    server.recv().unwrap().reply(&()).unwrap();
    assert_eq!(client.poll(|token, ()| assert_eq!(token, 3)), Ok(1));

    let name = fresh_name();
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
        assert_eq!(client.poll(|(), got| assert!(got == response, "{len} bytes")), Ok(1));
    }
}

#[test]
fn an_enum_with_a_tag_that_is_none_ends_its_client() {
    use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};
    #[derive(Debug, PartialEq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
    #[repr(u8)]
    enum Verb {
        Get = 1,
    }
    let name = fresh_name();
    let mut server = Server::<Verb, Verb>::create(&name, &Config::default()).unwrap();
    let mut good = Client::<Verb, Verb>::connect(&name).unwrap();
    let mut bad = Client::<u8, Verb>::connect(&name).unwrap();
    bad.call(&9, ()).unwrap();
    good.call(&Verb::Get, ()).unwrap();
    server.poll();
    while let Some(request) = server.recv() {
        assert_eq!(*request.message(), Verb::Get);
        request.reply(&Verb::Get).unwrap();
    }
    assert_eq!(good.poll(|(), verb| assert_eq!(*verb, Verb::Get)), Ok(1));
    until("the other one is cut off", || bad.poll(|(), _| panic!("no answer")).is_err());
    assert_eq!(server.counters().violations, 1);
    // The other way round: an answer that is none.
    let name = fresh_name();
    let mut server = Server::<u8, u8>::create(&name, &Config::default()).unwrap();
    let mut client = Client::<u8, Verb, u8>::connect(&name).unwrap();
    client.call(&1, 1).unwrap();
    server.poll();
    server.recv().unwrap().reply(&2).unwrap();
    assert_eq!(client.poll(|_, _| panic!("no answer")), Err(Disconnected::InvalidResponse));
    assert_eq!(client.poll(|_, _| panic!("no answer")), Err(Disconnected::InvalidResponse));
    assert!(matches!(
        client.call(&1, 8),
        Err(CallError::Disconnected { token: 8, cause: Disconnected::InvalidResponse })
    ));
    client.reconnect().unwrap();
    server.poll();
    client.call(&1, 1).unwrap();
}
