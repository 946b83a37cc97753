//! Any interleaving of what clients and a server can do, driven from one thread, against an oracle that knows of every call
//! what was asked, whether it was answered, and with what.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crosstie::Message;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::{PATIENCE, fresh_name, until};
use crate::service::*;

/// Polls of a client that find an answer, wherever it is.
const POLLS: usize = 66;
/// A client's first request, by which the oracle learns who it is. No other one is that long.
const GREETING: usize = 201;

/// A kind of message, made of bytes.
trait Content {
    type Message: Message + ?Sized;
    /// How long a message is that should have this length.
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

/// `N` words: up to a line they travel through registers, beyond it not.
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
    Look,
    Reply { len: usize },
    Defer,
    ReplyLater { which: prop::sample::Index, len: usize },
    Leave { client: usize, noticed: bool },
    Connect { client: usize },
    Reconnect { client: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..CLIENTS;
    let len = || prop_oneof![0..=200usize, Just(0), Just(8), Just(56), Just(57)];
    prop_oneof![
        12 => (client.clone(), len()).prop_map(|(client, len)| Step::Call { client, len }),
        8 => client.clone().prop_map(|client| Step::Poll { client }),
        6 => Just(Step::Look),
        6 => len().prop_map(|len| Step::Reply { len }),
        6 => Just(Step::Defer),
        5 => (any::<prop::sample::Index>(), len()).prop_map(|(which, len)| Step::ReplyLater { which, len }),
        1 => (client.clone(), any::<bool>()).prop_map(|(client, noticed)| Step::Leave { client, noticed }),
        2 => client.clone().prop_map(|client| Step::Connect { client }),
        1 => client.prop_map(|client| Step::Reconnect { client }),
    ]
}

const CLIENTS: usize = 3;

/// A call as the oracle knows it.
#[derive(Debug)]
struct Call {
    token: u64,
    request: Vec<u8>,
    received: bool,
    answer: Option<Vec<u8>>,
}

struct Side<Req: Content, Resp: Content> {
    client: Client<Req::Message, Resp::Message, u64>,
    /// What the server calls it.
    key: u32,
    calls: Vec<Call>,
}

struct Deferred {
    ticket: Ticket,
    token: u64,
}

struct World<Req: Content, Resp: Content> {
    name: String,
    server: Server<Req::Message, Resp::Message>,
    sides: [Option<Side<Req, Resp>>; CLIENTS],
    /// Whom the server calls what, those that left included.
    names: HashMap<u32, usize>,
    /// Who came last, if the server has not heard of it yet.
    newcomer: Option<usize>,
    deferred: Vec<Deferred>,
    depth: usize,
    next: u64,
}

fn content(id: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (id.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (8 * (i % 8))) as u8 ^ i as u8).collect()
}

impl<Req: Content, Resp: Content> World<Req, Resp> {
    fn new(depth: usize) -> World<Req, Resp> {
        let name = fresh_name();
        // Limits of raw bytes; room for clients that left and that the server has not heard of.
        let config = Config {
            queue_depth: depth,
            request_limit: GREETING,
            response_limit: 200,
            max_clients: 2 * CLIENTS + 2,
            ..Config::default()
        };
        let server = Server::create(&name, &config).unwrap();
        let (sides, names) = ([const { None }; CLIENTS], HashMap::new());
        World { name, server, sides, names, newcomer: None, deferred: Vec::new(), depth, next: 1 }
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
            Step::Look => {
                self.server.poll();
            }
            Step::Reply { len } => self.receive(|world, ticket, token| world.reply(ticket, token, len)),
            Step::Defer => {
                self.receive(|world, ticket, token| world.deferred.push(Deferred { ticket, token }))
            }
            Step::ReplyLater { which, len } if !self.deferred.is_empty() => {
                let Deferred { ticket, token } = self.deferred.swap_remove(which.index(self.deferred.len()));
                self.reply(ticket, token, len);
            }
            Step::Leave { client, noticed } => self.leave(client, noticed),
            Step::Connect { client } if self.sides[client].is_none() => self.connect(client),
            Step::Reconnect { client } if self.sides[client].is_some() => self.reconnect(client),
            _ => {}
        }
    }

    fn call(&mut self, client: usize, len: usize) {
        let token = self.id();
        let request = content(token, Req::len(len));
        let Some(side) = &mut self.sides[client] else { return };
        match Req::with(&request, |request| side.client.call(request, token)) {
            Ok(()) => {
                assert!(
                    side.calls.len() < self.depth,
                    "{} calls of {} were taken",
                    side.calls.len() + 1,
                    self.depth
                );
                side.calls.push(Call { token, request, received: false, answer: None });
            }
            Err(CallError::Full(back)) => {
                assert_eq!((back, side.calls.len()), (token, self.depth), "full");
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(side.client.in_flight(), side.calls.len());
    }

    fn poll(&mut self, client: usize) -> usize {
        let Some(side) = &mut self.sides[client] else { return 0 };
        let mut got = 0;
        let polled = side.client.poll(|token, answer| {
            let index = side.calls.iter().position(|call| call.token == token);
            let index = index.unwrap_or_else(|| panic!("call {token} ended twice, or is another client's"));
            let call = side.calls.swap_remove(index);
            assert_eq!(call.answer.as_deref(), Some(Resp::bytes(answer)), "the answer to {token}");
            got += 1;
        });
        assert_eq!(polled, Ok(got));
        assert_eq!(side.client.in_flight(), side.calls.len());
        got
    }

    /// Receives a request, if the server hands one out, and has it treated.
    fn receive(&mut self, treat: impl FnOnce(&mut Self, Ticket, u64)) {
        let Some(request) = self.server.recv() else { return };
        let key = request.client();
        let bytes = Req::bytes(request.message()).to_vec();
        let ticket = request.defer();
        assert_eq!(ticket.client(), key);
        let client = match self.names.get(&key) {
            Some(client) => *client,
            None => {
                let client = self.newcomer.take().unwrap_or_else(|| panic!("{key:#x} is nobody"));
                self.names.insert(key, client);
                self.sides[client].as_mut().expect("it just came").key = key;
                client
            }
        };
        let Some(side) = self.sides[client].as_mut().filter(|side| side.key == key) else {
            // Of somebody who has left since.
            return treat(self, ticket, 0);
        };
        // Requests of one client arrive in order.
        let call = side.calls.iter_mut().filter(|call| !call.received).min_by_key(|call| call.token);
        let call = call.expect("a request that nobody made");
        assert_eq!(call.request, bytes, "request {}", call.token);
        call.received = true;
        let token = call.token;
        treat(self, ticket, token);
    }

    fn reply(&mut self, ticket: Ticket, token: u64, len: usize) {
        let id = self.id();
        let answer = content(id, Resp::len(len));
        let key = ticket.client();
        let replied = Resp::with(&answer, |answer| self.server.reply(ticket, answer));
        let side = self.sides.iter_mut().flatten().find(|side| side.key == key);
        let call = side.and_then(|side| side.calls.iter_mut().find(|call| call.token == token));
        match (replied, call) {
            (Ok(()), Some(call)) => {
                assert!(call.received && call.answer.is_none());
                call.answer = Some(answer);
            }
            (Ok(()) | Err(ReplyError::ClientGone), None) => {}
            (Err(error), call) => panic!("{error}: {call:?}"),
        }
    }

    fn connect(&mut self, client: usize) {
        let connected = Client::connect(&self.name).unwrap();
        self.sides[client] = Some(Side { client: connected, key: 0, calls: Vec::new() });
        self.greet(client);
    }

    /// Makes a new client known by a call of its own.
    fn greet(&mut self, client: usize) {
        self.newcomer = Some(client);
        self.call(client, GREETING);
        let greeting = self.next;
        let begun = Instant::now();
        while self.newcomer.is_some() {
            assert!(begun.elapsed() < PATIENCE, "the first request of a client does not arrive");
            self.server.poll();
            for _ in 0..self.depth * CLIENTS {
                self.receive(|world, ticket, token| match token == greeting {
                    true => world.reply(ticket, token, 0),
                    false => world.deferred.push(Deferred { ticket, token }),
                });
            }
        }
        assert_eq!(self.poll(client), 1, "the only call is looked at first");
    }

    fn leave(&mut self, client: usize, noticed: bool) {
        let Some(side) = self.sides[client].take() else { return };
        let before = self.server.counters().disconnects;
        drop(side);
        if noticed {
            self.notice(before);
        }
    }

    fn notice(&mut self, before: u64) {
        until("a client's leaving is noticed", || {
            self.server.poll();
            self.server.counters().disconnects > before
        });
    }

    fn reconnect(&mut self, client: usize) {
        let Some(side) = &mut self.sides[client] else { return };
        let mut lost = Vec::new();
        side.client.disconnect(|token| lost.push(token));
        lost.sort();
        let mut expected: Vec<u64> = side.calls.iter().map(|call| call.token).collect();
        expected.sort();
        assert_eq!(lost, expected, "tokens that come back");
        let over = Req::with(&content(0, Req::len(0)), |request| side.client.call(request, 5));
        assert!(matches!(over, Err(CallError::Disconnected { token: 5, .. })), "{over:?}");
        side.calls.clear();
        side.key = 0;
        side.client.reconnect().unwrap();
        self.greet(client);
    }

    /// Every answer that was given is delivered within so many polls.
    fn deliver_all(&mut self) {
        for client in 0..CLIENTS {
            let answered =
                |side: &Side<Req, Resp>| side.calls.iter().filter(|call| call.answer.is_some()).count();
            let Some(side) = &self.sides[client] else { continue };
            let limit = POLLS * (answered(side) + 1);
            let mut polls = 0;
            while self.sides[client].as_ref().map_or(0, answered) > 0 {
                polls += 1;
                assert!(polls <= limit, "an answer is not found in {limit} polls");
                self.poll(client);
            }
        }
    }

    /// Receives and answers everything; nothing may be left.
    fn finish(&mut self) {
        let begun = Instant::now();
        while self.sides.iter().flatten().any(|side| !side.calls.is_empty()) {
            assert!(begun.elapsed() < PATIENCE, "calls are left");
            self.server.poll();
            for _ in 0..self.depth * CLIENTS {
                self.receive(|world, ticket, token| world.reply(ticket, token, 9));
            }
            while let Some(Deferred { ticket, token }) = self.deferred.pop() {
                self.reply(ticket, token, 17);
            }
            self.deliver_all();
        }
    }

    /// The server ends in the middle of it: what it answered arrives, and then an error.
    fn end(mut self, depth: usize) {
        drop(self.server);
        for side in self.sides.iter_mut().flatten() {
            let answered = side.calls.iter().filter(|call| call.answer.is_some()).count();
            let mut got = 0;
            let begun = Instant::now();
            let end = loop {
                assert!(begun.elapsed() < PATIENCE, "the server's end is not noticed");
                let polled = side.client.poll(|token, answer| {
                    let call = side.calls.iter().position(|call| call.token == token).expect("ended twice");
                    let call = side.calls.swap_remove(call);
                    assert_eq!(call.answer.as_deref(), Some(Resp::bytes(answer)));
                    got += 1;
                });
                match polled {
                    Ok(0) => std::thread::sleep(Duration::from_micros(20)),
                    Ok(_) => {}
                    Err(end) => break end,
                }
            };
            assert_eq!((end, got), (Disconnected::ServerGone, answered));
            let (mut back, mut expected) = (Vec::new(), Vec::new());
            side.client.disconnect(|token| back.push(token));
            back.sort();
            expected.extend(side.calls.drain(..).map(|call| call.token));
            expected.sort();
            assert_eq!(back, expected);
        }
        // A new one takes the name over.
        let config =
            Config { queue_depth: depth, request_limit: GREETING, response_limit: 200, ..Config::default() };
        let mut world: World<Req, Resp> = World {
            server: Server::create(&self.name, &config).unwrap(),
            name: self.name,
            sides: self.sides,
            names: HashMap::new(),
            newcomer: None,
            deferred: Vec::new(),
            depth,
            next: self.next,
        };
        for client in 0..CLIENTS {
            if world.sides[client].is_some() {
                world.reconnect(client);
            }
        }
        for Deferred { ticket, .. } in self.deferred {
            let foreign = Resp::with(&content(0, Resp::len(0)), |answer| world.server.reply(ticket, answer));
            assert!(matches!(foreign, Err(ReplyError::WrongServer(_))), "{foreign:?}");
        }
        world.finish();
    }
}

fn play<Req: Content, Resp: Content>(depth: usize, steps: Vec<Step>, end: bool) {
    let mut world = World::<Req, Resp>::new(depth);
    for client in 0..CLIENTS {
        world.connect(client);
    }
    for step in steps {
        world.step(step);
    }
    world.deliver_all();
    if end {
        world.end(depth);
    } else {
        world.finish();
    }
}

proptest! {
    #[test]
    fn raw_bytes_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        play::<Raw, Raw>(depth, steps, end);
    }

    #[test]
    fn small_types_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        play::<Words<4>, Words<7>>(depth, steps, end);
    }

    #[test]
    fn large_types_and_bytes_any_interleaving(
        depth in 1usize..10, steps in prop::collection::vec(step(), 0..200), end: bool,
    ) {
        play::<Words<25>, Raw>(depth, steps, end);
    }
}
