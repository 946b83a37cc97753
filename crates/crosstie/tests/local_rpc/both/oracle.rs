//! Random interleavings of all operations of clients and a server, driven from one thread, against an oracle that knows the
//! request and the response of every call.

use std::collections::HashMap;

use crosstie::Message;
use crosstie_testkit::wait::find;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::service::*;
use super::{fresh_name, until};

/// Number of polls within which a client finds a response in any slot.
const POLLS_TO_FIND: usize = 66;
/// The length of a client's first request, by which the oracle identifies the client. No other request is that long.
const FIRST_REQUEST_LEN: usize = 201;

/// A message type, for given bytes.
trait Content {
    type Message: Message + ?Sized;
    /// The length of a message for which `wanted` bytes are asked.
    fn len(wanted: usize) -> usize;
    fn with<R>(bytes: &[u8], what: impl FnOnce(&Self::Message) -> R) -> R;
    fn bytes(message: &Self::Message) -> &[u8];
}

struct Raw;

impl Content for Raw {
    type Message = [u8];
    fn len(wanted: usize) -> usize {
        wanted
    }
    fn with<R>(bytes: &[u8], what: impl FnOnce(&[u8]) -> R) -> R {
        what(bytes)
    }
    fn bytes(message: &[u8]) -> &[u8] {
        message
    }
}

/// `N` words. Messages up to a cache line are copied through registers, larger ones are not.
struct Words<const N: usize>;

impl<const N: usize> Content for Words<N> {
    type Message = [u64; N];
    fn len(_: usize) -> usize {
        N * 8
    }
    fn with<R>(bytes: &[u8], what: impl FnOnce(&[u64; N]) -> R) -> R {
        what(&FromBytes::read_from_bytes(bytes).unwrap())
    }
    fn bytes(message: &[u64; N]) -> &[u8] {
        message.as_bytes()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Call { client: usize, len: usize },
    Poll { client: usize },
    ServerPoll,
    Reply { len: usize },
    Defer,
    ReplyLater { which: prop::sample::Index, len: usize },
    Disconnect { client: usize, wait_for_removal: bool },
    Connect { client: usize },
    Reconnect { client: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..CLIENTS;
    let len = || prop_oneof![0..=200usize, Just(0), Just(8), Just(56), Just(57)];
    prop_oneof![
        12 => (client.clone(), len()).prop_map(|(client, len)| Step::Call { client, len }),
        8 => client.clone().prop_map(|client| Step::Poll { client }),
        6 => Just(Step::ServerPoll),
        6 => len().prop_map(|len| Step::Reply { len }),
        6 => Just(Step::Defer),
        5 => (any::<prop::sample::Index>(), len()).prop_map(|(which, len)| Step::ReplyLater { which, len }),
        1 => (client.clone(), any::<bool>()).prop_map(|(client, wait_for_removal)| Step::Disconnect { client, wait_for_removal }),
        2 => client.clone().prop_map(|client| Step::Connect { client }),
        1 => client.prop_map(|client| Step::Reconnect { client }),
    ]
}

const CLIENTS: usize = 3;

/// A call, as the oracle knows it.
#[derive(Debug)]
struct Call {
    token: u64,
    request: Vec<u8>,
    received: bool,
    response: Option<Vec<u8>>,
}

struct ModelClient<Req: Content, Resp: Content> {
    client: Client<Req::Message, Resp::Message, u64>,
    /// The server's key for this client.
    key: u32,
    calls: Vec<Call>,
}

struct Deferred {
    ticket: Ticket,
    token: u64,
}

struct Model<Req: Content, Resp: Content> {
    name: String,
    server: Server<Req::Message, Resp::Message>,
    clients: [Option<ModelClient<Req, Resp>>; CLIENTS],
    /// The client of each key, including disconnected clients.
    names: HashMap<u32, usize>,
    /// The client that connected last, if the server has not received a request of it yet.
    newcomer: Option<usize>,
    deferred: Vec<Deferred>,
    depth: usize,
    next: u64,
}

fn content(id: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (id.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (8 * (i % 8))) as u8 ^ i as u8).collect()
}

impl<Req: Content, Resp: Content> Model<Req, Resp> {
    fn new(depth: usize) -> Model<Req, Resp> {
        let name = fresh_name("local-test");
        // Limits for byte strings, and room for disconnected clients that the server has not removed yet.
        let config = Config {
            queue_depth: depth,
            request_limit: FIRST_REQUEST_LEN,
            response_limit: 200,
            max_clients: 2 * CLIENTS + 2,
            ..Config::default()
        };
        let server = Server::create(&name, &config).unwrap();
        let (clients, names) = ([const { None }; CLIENTS], HashMap::new());
        Model { name, server, clients, names, newcomer: None, deferred: Vec::new(), depth, next: 1 }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Call { client, len } => self.call(client, len),
            Step::Poll { client } => {
                self.poll(client);
            }
            Step::ServerPoll => {
                self.server.poll();
            }
            Step::Reply { len } => self.receive(|model, ticket, token| model.reply(ticket, token, len)),
            Step::Defer => {
                self.receive(|model, ticket, token| model.deferred.push(Deferred { ticket, token }))
            }
            Step::ReplyLater { which, len } if !self.deferred.is_empty() => {
                let Deferred { ticket, token } = self.deferred.swap_remove(which.index(self.deferred.len()));
                self.reply(ticket, token, len);
            }
            Step::Disconnect { client, wait_for_removal } => self.disconnect(client, wait_for_removal),
            Step::Connect { client } if self.clients[client].is_none() => self.connect(client),
            Step::Reconnect { client } if self.clients[client].is_some() => self.reconnect(client),
            _ => {}
        }
    }

    fn call(&mut self, client: usize, len: usize) {
        let token = self.id();
        let request = content(token, Req::len(len));
        let Some(client_state) = &mut self.clients[client] else { return };
        match Req::with(&request, |request| client_state.client.call(request, token)) {
            Ok(()) => {
                assert!(
                    client_state.calls.len() < self.depth,
                    "{} calls were accepted with a depth of {}",
                    client_state.calls.len() + 1,
                    self.depth
                );
                client_state.calls.push(Call { token, request, received: false, response: None });
            }
            Err(CallError { cause: NotCalled::Full, token: back }) => {
                assert_eq!((back, client_state.calls.len()), (token, self.depth), "full");
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(client_state.client.in_flight(), client_state.calls.len());
    }

    fn poll(&mut self, client: usize) -> usize {
        let Some(client_state) = &mut self.clients[client] else { return 0 };
        let mut received = 0;
        let polled = client_state.client.poll(|token, response| {
            let index = client_state.calls.iter().position(|call| call.token == token);
            let index =
                index.unwrap_or_else(|| panic!("call {token} ended twice, or belongs to another client"));
            let call = client_state.calls.swap_remove(index);
            assert_eq!(call.response.as_deref(), Some(Resp::bytes(response)), "the response to {token}");
            received += 1;
        });
        assert_eq!(polled, Ok(received));
        assert_eq!(client_state.client.in_flight(), client_state.calls.len());
        received
    }

    /// Receives a request, if the server hands one out, and passes it to `handle`.
    fn receive(&mut self, handle: impl FnOnce(&mut Self, Ticket, u64)) {
        let Some(request) = self.server.recv() else { return };
        let key = request.client();
        let bytes = Req::bytes(request.message()).to_vec();
        let ticket = request.defer();
        assert_eq!(ticket.client(), key);
        let client = match self.names.get(&key) {
            Some(client) => *client,
            None => {
                let client = self.newcomer.take().unwrap_or_else(|| panic!("{key:#x} belongs to no client"));
                self.names.insert(key, client);
                self.clients[client].as_mut().expect("the client has just connected").key = key;
                client
            }
        };
        let Some(client_state) = self.clients[client].as_mut().filter(|client_state| client_state.key == key)
        else {
            // The client has disconnected since.
            return handle(self, ticket, 0);
        };
        // Requests of one client arrive in order.
        let call = client_state.calls.iter_mut().filter(|call| !call.received).min_by_key(|call| call.token);
        let call = call.expect("a request that no client sent");
        assert_eq!(call.request, bytes, "request {}", call.token);
        call.received = true;
        let token = call.token;
        handle(self, ticket, token);
    }

    fn reply(&mut self, ticket: Ticket, token: u64, len: usize) {
        let id = self.id();
        let response = content(id, Resp::len(len));
        let key = ticket.client();
        let replied = Resp::with(&response, |response| self.server.reply(ticket, response));
        let client_state = self.clients.iter_mut().flatten().find(|client_state| client_state.key == key);
        let call = client_state
            .and_then(|client_state| client_state.calls.iter_mut().find(|call| call.token == token));
        match (replied, call) {
            (Ok(()), Some(call)) => {
                assert!(call.received && call.response.is_none());
                call.response = Some(response);
            }
            (Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }), None) => {}
            (Err(error), call) => panic!("{error}: {call:?}"),
        }
    }

    fn connect(&mut self, client: usize) {
        let connected = Client::connect(&self.name).unwrap();
        self.clients[client] = Some(ModelClient { client: connected, key: 0, calls: Vec::new() });
        self.identify(client);
    }

    /// Identifies a new client to the oracle by a first call.
    fn identify(&mut self, client: usize) {
        self.newcomer = Some(client);
        self.call(client, FIRST_REQUEST_LEN);
        let first = self.next;
        until("the first request of a client arrives", || {
            self.server.poll();
            for _ in 0..self.depth * CLIENTS {
                self.receive(|model, ticket, token| match token == first {
                    true => model.reply(ticket, token, 0),
                    false => model.deferred.push(Deferred { ticket, token }),
                });
            }
            self.newcomer.is_none()
        });
        assert_eq!(self.poll(client), 1, "the response to the only call is found at once");
    }

    fn disconnect(&mut self, client: usize, wait_for_removal: bool) {
        let Some(client_state) = self.clients[client].take() else { return };
        let before = self.server.counters().disconnects;
        drop(client_state);
        if wait_for_removal {
            self.wait_for_removal(before);
        }
    }

    fn wait_for_removal(&mut self, before: u64) {
        until("the client is removed", || {
            self.server.poll();
            self.server.counters().disconnects > before
        });
    }

    fn reconnect(&mut self, client: usize) {
        let Some(client_state) = &mut self.clients[client] else { return };
        let mut lost = Vec::new();
        client_state.client.disconnect(|token| lost.push(token));
        lost.sort();
        let mut expected: Vec<u64> = client_state.calls.iter().map(|call| call.token).collect();
        expected.sort();
        assert_eq!(lost, expected, "tokens that are handed back");
        let refused = Req::with(&content(0, Req::len(0)), |request| client_state.client.call(request, 5));
        assert!(
            matches!(refused, Err(CallError { cause: NotCalled::Disconnected(_), token: 5 })),
            "{refused:?}"
        );
        client_state.calls.clear();
        client_state.key = 0;
        client_state.client.reconnect().unwrap();
        self.identify(client);
    }

    /// Checks that every reply is delivered within a bounded number of polls.
    fn deliver_all(&mut self) {
        for client in 0..CLIENTS {
            let replied = |client_state: &ModelClient<Req, Resp>| {
                client_state.calls.iter().filter(|call| call.response.is_some()).count()
            };
            let Some(client_state) = &self.clients[client] else { continue };
            let limit = POLLS_TO_FIND * (replied(client_state) + 1);
            let mut polls = 0;
            while self.clients[client].as_ref().map_or(0, replied) > 0 {
                polls += 1;
                assert!(polls <= limit, "a response was not found in {limit} polls");
                self.poll(client);
            }
        }
    }

    /// Receives all requests and replies to them. No call may be left.
    fn finish(&mut self) {
        until("all calls end", || {
            self.server.poll();
            for _ in 0..self.depth * CLIENTS {
                self.receive(|model, ticket, token| model.reply(ticket, token, 9));
            }
            while let Some(Deferred { ticket, token }) = self.deferred.pop() {
                self.reply(ticket, token, 17);
            }
            self.deliver_all();
            self.clients.iter().flatten().all(|client_state| client_state.calls.is_empty())
        });
    }

    /// Drops the server: its responses must arrive, and then an error.
    fn end_server(mut self, depth: usize) {
        drop(self.server);
        for client_state in self.clients.iter_mut().flatten() {
            let replied = client_state.calls.iter().filter(|call| call.response.is_some()).count();
            let mut received = 0;
            let end = find("the end of the server", || {
                let polled = client_state.client.poll(|token, response| {
                    let call =
                        client_state.calls.iter().position(|call| call.token == token).expect("ended twice");
                    let call = client_state.calls.swap_remove(call);
                    assert_eq!(call.response.as_deref(), Some(Resp::bytes(response)));
                    received += 1;
                });
                polled.err()
            });
            assert_eq!((end, received), (Disconnected::ServerGone, replied));
            let (mut back, mut expected) = (Vec::new(), Vec::new());
            client_state.client.disconnect(|token| back.push(token));
            back.sort();
            expected.extend(client_state.calls.drain(..).map(|call| call.token));
            expected.sort();
            assert_eq!(back, expected);
        }
        // A new server takes the name.
        let config = Config {
            queue_depth: depth,
            request_limit: FIRST_REQUEST_LEN,
            response_limit: 200,
            ..Config::default()
        };
        let mut model: Model<Req, Resp> = Model {
            server: Server::create(&self.name, &config).unwrap(),
            name: self.name,
            clients: self.clients,
            names: HashMap::new(),
            newcomer: None,
            deferred: Vec::new(),
            depth,
            next: self.next,
        };
        for client in 0..CLIENTS {
            if model.clients[client].is_some() {
                model.reconnect(client);
            }
        }
        for Deferred { ticket, .. } in self.deferred {
            let refused =
                Resp::with(&content(0, Resp::len(0)), |response| model.server.reply(ticket, response));
            assert!(
                matches!(refused, Err(ReplyError { cause: NotReplied::WrongServer, ticket: Some(_) })),
                "{refused:?}"
            );
        }
        model.finish();
    }
}

fn run<Req: Content, Resp: Content>(depth: usize, steps: Vec<Step>, end: bool) {
    let mut model = Model::<Req, Resp>::new(depth);
    for client in 0..CLIENTS {
        model.connect(client);
    }
    for step in steps {
        model.step(step);
    }
    model.deliver_all();
    if end {
        model.end_server(depth);
    } else {
        model.finish();
    }
}

proptest! {
    #[test]
    fn byte_strings_survive_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        run::<Raw, Raw>(depth, steps, end);
    }

    #[test]
    fn small_types_survive_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        run::<Words<4>, Words<7>>(depth, steps, end);
    }

    #[test]
    fn large_types_and_byte_strings_survive_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        run::<Words<25>, Raw>(depth, steps, end);
    }
}
