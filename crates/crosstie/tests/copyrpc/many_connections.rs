//! Many connections of one context: many that fail at once do not affect the others.

use std::time::Instant;

use crosstie::copyrpc::{CallFailed, Config, Connection, ConnectionConfig, Context};
use crosstie::device::{Device, DeviceError, DeviceSpec};
use crosstie_testkit::wait::{TIMEOUT, until};

use super::connect_pair;

/// Connections whose peer disappears.
const FAILING: usize = 64;
/// Batches that each of them has under way.
const BATCHES: usize = 128;

fn context(config: &Config) -> Context<usize> {
    Context::new(Device::open(&DeviceSpec::Software).unwrap(), config).unwrap()
}

fn pair(left: &Context<usize>, right: &Context<usize>) -> (Connection<usize>, Connection<usize>) {
    let config = ConnectionConfig {
        ring: 1 << 16,
        credit: 1 << 14,
        pending_calls: 256,
        bulk: 0,
        ..ConnectionConfig::default()
    };
    connect_pair(left, right, &config)
}

/// Every batch waits for a receive that its peer never posts, until the peer disappears. Then all of them fail at once, each with a
/// completion of its own, although none of them was signaled.
#[test]
fn many_connections_that_fail_at_once_do_not_affect_others() {
    let client = context(&Config { max_connections: FAILING + 1, ..Config::default() });
    let doomed = context(&Config { max_connections: FAILING, receives: 4 });
    let healthy = context(&Config::default());
    let (failing, failing_peers): (Vec<_>, Vec<_>) = (0..FAILING).map(|_| pair(&client, &doomed)).unzip();
    let (other, _other_peer) = pair(&client, &healthy);
    for (index, connection) in failing.iter().enumerate() {
        for _ in 0..BATCHES {
            connection.call(b"x", 8, index).unwrap();
            client.flush();
        }
    }
    drop(failing_peers);
    drop(doomed);

    let (mut failed, mut answered, end) = (0, 0, Instant::now() + TIMEOUT);
    while failed < FAILING * BATCHES || answered < 100 {
        assert!(Instant::now() < end, "{failed} failed, {answered} answered");
        if other.pending_calls() == 0 {
            other.call(b"are you there", 16, FAILING).unwrap();
        }
        client.poll(|index, result| match result {
            Ok(bytes) => {
                assert_eq!((index, bytes.to_vec()), (FAILING, b"are you there".to_vec()));
                answered += 1;
            }
            Err(CallFailed::Connection(cause)) => {
                assert!(index < FAILING, "the healthy connection is over: {cause}");
                failed += 1;
            }
            Err(cause) => panic!("{cause}"),
        });
        healthy.poll(|_, _| ());
        while let Some(request) = healthy.recv() {
            let bytes = request.data().to_vec();
            request.reply(&bytes).unwrap();
        }
        healthy.flush();
    }
    assert_eq!(failed, FAILING * BATCHES);
    assert!(failing.iter().all(|connection| connection.failure().is_some()));
}

/// The completions that closed connections have left do not fill the queue for new connections.
#[test]
fn closed_connections_make_room_for_new_ones() {
    let client = context(&Config { max_connections: 2, ..Config::default() });
    let server = context(&Config { receives: 4, ..Config::default() });
    for _ in 0..64 {
        let (here, there) = pair(&client, &server);
        for _ in 0..BATCHES {
            here.call(b"x", 8, 0).unwrap();
            client.flush();
        }
        drop(there);
        assert_eq!(here.close().len(), BATCHES);
    }
    let (here, _there) = pair(&client, &server);
    here.call(b"last", 8, 7).unwrap();
    let mut answered = false;
    until("the last call is answered", || {
        client.poll(|_, result| answered = result.is_ok());
        server.poll(|_, _| ());
        while let Some(request) = server.recv() {
            // Some requests are of connections that were closed.
            drop(request.reply(b"here"));
        }
        server.flush();
        answered
    });
}

#[test]
fn number_of_connections_is_limited() {
    let client = context(&Config { max_connections: 2, ..Config::default() });
    let made: Vec<_> =
        (0..2).map(|_| client.create_connection(&ConnectionConfig::default()).unwrap()).collect();
    let refused = client.create_connection(&ConnectionConfig::default());
    assert!(matches!(refused.err(), Some(DeviceError::Exhausted { .. })));
    drop(made);
    assert!(client.create_connection(&ConnectionConfig::default()).is_ok(), "a closed one makes room");
}
