//! What happens when a device has no registered memory left.

use std::time::{Duration, Instant};

use crosstie::copyrpc::ConnectionConfig;
use crosstie::device::{Access, Device, Mr, Pd, software};

use super::super::ring::NoRing;
use super::*;
use crate::wire::BytesResponse;

/// After this long without progress a test fails: something hangs.
const TIMEOUT: Duration = Duration::from_secs(60);
const LONG: usize = 512 << 10;
const SHORT: usize = 16;

type Bytes = crosstie::ipc::Server<[u8], [u8]>;
type BytesClient = crosstie::ipc::Client<[u8], [u8], u32>;

/// A context on a device of its own, and a protection domain of that device.
fn context() -> (Context<CallOrigin>, Pd) {
    let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let pd = device.alloc_pd().unwrap();
    (Context::new(device, &config(2)).unwrap(), pd)
}

/// Takes all memory of the device.
fn exhaust(pd: &Pd) -> Vec<Mr> {
    let mut taken = Vec::new();
    for len in [1 << 20, 1 << 16, 1 << 12] {
        while let Ok(mr) = pd.allocate(len, Access::LOCAL_WRITE) {
            taken.push(mr);
        }
    }
    taken
}

/// A caller with a peer, and a callee, with one call at a time.
struct Pair {
    caller: (Context<CallOrigin>, Pd),
    peer: Peer,
    callee: Connections<NoRing>,
    callee_pd: Pd,
    callee_connection: Connection<CallOrigin>,
    clients: (Bytes, BytesClient),
    backlogged: usize,
    buffers: BufferPool,
}

impl Pair {
    fn new(name: &str) -> Pair {
        let (caller, (callee, callee_pd)) = (context(), context());
        let connection_config = ConnectionConfig {
            ring: 1 << 16,
            credit: 1 << 14,
            pending_calls: 1,
            bulk: 4 << 20,
            ..ConnectionConfig::default()
        };
        let connection = caller.0.create_connection(&connection_config).unwrap();
        let callee_connection = callee.create_connection(&connection_config).unwrap();
        let connect = ConnectConfig::default();
        connection.connect(&callee_connection.address(), &connect).unwrap();
        callee_connection.connect(&connection.address(), &connect).unwrap();
        let mut peer = Peer::default();
        (peer.connection, peer.is_up) = (Some(connection), true);
        let callee = Connections {
            context: callee,
            ring: NoRing,
            connection_config,
            peers: Box::default(),
            deferred: VecDeque::new(),
            unsent_responses: VecDeque::new(),
            backlogged: 0,
            scratch: Vec::new(),
            buffers: BufferPool::default(),
        };
        let name = format!("{name}-{}", std::process::id());
        let limits = ipc::Config { request_limit: 64, response_limit: 64, ..ipc::Config::default() };
        let clients = (Bytes::create(&name, &limits).unwrap(), BytesClient::connect(&name).unwrap());
        let buffers = BufferPool::default();
        Pair { caller, peer, callee, callee_pd, callee_connection, clients, backlogged: 0, buffers }
    }

    /// The ticket of a client that waits for a response.
    fn ticket(&mut self) -> ipc::Ticket {
        let (server, client) = &mut self.clients;
        client.call(b"request", 0).unwrap();
        while server.poll() == 0 {}
        server.recv().unwrap().defer()
    }

    fn send(&mut self, len: usize, response_limit: usize) -> Result<(), Status> {
        let ticket = self.ticket();
        let request = vec![7; len];
        let sent =
            self.peer.send_bytes(&request, response_limit, ticket, &mut self.backlogged, &mut self.buffers);
        sent.map_err(|(_, status)| status)
    }

    fn retry_backlog(&mut self) -> Vec<Status> {
        let mut refused = Vec::new();
        self.peer.retry_backlog(&mut self.backlogged, &mut self.buffers, |_, status| refused.push(status));
        refused
    }

    /// Receives the next request at the callee.
    fn receive(&mut self) -> RecvHandle<CallOrigin> {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < TIMEOUT, "no request arrives");
            self.caller.0.poll(|_, _| panic!("no response is expected"));
            self.callee.context.poll(|_, _| ());
            if let Some(received) = self.callee.context.recv() {
                return received;
            }
        }
    }

    /// Polls until a response has come, and returns it.
    fn response(&mut self) -> Vec<u8> {
        let (mut response, start) = (None, Instant::now());
        while response.is_none() {
            assert!(start.elapsed() < TIMEOUT, "no response arrives");
            self.callee.context.poll(|_, _| ());
            self.caller.0.poll(|_, result| {
                let payload = result.unwrap();
                let mut bytes = vec![0; payload.len()];
                payload.copy_to(&mut bytes);
                response = Some(bytes);
            });
        }
        assert!(self.callee_connection.failure().is_none());
        response.unwrap()
    }
}

#[test]
fn request_without_registered_memory_is_refused_until_there_is_memory() {
    let mut pair = Pair::new("kv-memory-request");
    let taken = exhaust(&pair.caller.1);
    assert_eq!(pair.send(LONG, SHORT), Err(Status::NoRegisteredMemory));
    // Short requests need none.
    assert_eq!(pair.send(SHORT, SHORT), Ok(()));
    assert!(pair.receive().reply(&[1]).is_ok());
    assert_eq!(pair.response(), [1]);
    drop(taken);
    assert_eq!(pair.send(LONG, SHORT), Ok(()));
    let received = pair.receive();
    assert_eq!(received.data().len(), LONG);
    assert!(received.reply(&[2]).is_ok());
    assert_eq!(pair.response(), [2]);
}

/// A long request that waits in a backlog while the memory runs out ends, and those behind it are sent.
#[test]
fn request_without_registered_memory_does_not_block_those_behind_it() {
    let mut pair = Pair::new("kv-memory-backlog");
    for len in [SHORT, SHORT + 1, LONG, SHORT + 2] {
        assert_eq!(pair.send(len, SHORT), Ok(()));
    }
    assert_eq!(pair.backlogged, 3, "one call at a time");
    let _taken = exhaust(&pair.caller.1);
    let mut refused = Vec::new();
    for len in [SHORT, SHORT + 1, SHORT + 2] {
        let received = pair.receive();
        assert_eq!(received.data().len(), len);
        assert!(received.reply(&[1]).is_ok());
        pair.response();
        refused.extend(pair.retry_backlog());
    }
    assert_eq!(refused, [Status::NoRegisteredMemory]);
    assert_eq!(pair.backlogged, 0);
}

#[test]
fn response_without_registered_memory_becomes_a_status() {
    let mut pair = Pair::new("kv-memory-response");
    assert_eq!(pair.send(SHORT, LONG), Ok(()));
    let received = pair.receive();
    let taken = exhaust(&pair.callee_pd);
    pair.callee.send_response(received, &vec![3; LONG]);
    let response = pair.response();
    assert_eq!(BytesResponse::decode(&response).unwrap().status, Status::NoRegisteredMemory);
    drop(taken);
    assert_eq!(pair.send(SHORT, LONG), Ok(()));
    let received = pair.receive();
    pair.callee.send_response(received, &vec![3; LONG]);
    assert_eq!(pair.response().len(), LONG);
}
