//! Calls of copyrpc: both sides of a call with 32 bytes each way, in one thread.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};

use crosstie::copyrpc::service::{Call, Driver, Method, Service};
use crosstie::copyrpc::{Config, Context, Endpoint, EndpointConfig};
use crosstie::device::{ConnectConfig, Device, software};

use super::{assert_limit, callgrind, split_loads};

const ROUNDS: u32 = 300;
const DEPTH: u32 = 64;

/// One call at a time.
const ALONE_LIMIT: u64 = 2141;
/// [`DEPTH`] calls at a time.
const BATCHED_LIMIT: u64 = 540;
/// The same, with requests that go through the queue of [`Context::recv`].
const QUEUED_LIMIT: u64 = 663;
/// [`DEPTH`] typed calls at a time.
const TYPED_LIMIT: u64 = 738;

fn rings() -> EndpointConfig {
    EndpointConfig { ring: 1 << 18, credit: 1 << 16, ..EndpointConfig::default() }
}

fn context<U>() -> Context<U> {
    let device = Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
    Context::new(device, &Config::default()).unwrap()
}

/// Two contexts and a connection between them.
struct Pair {
    client: Context<u32>,
    server: Context<u32>,
    here: Endpoint<u32>,
    #[expect(dead_code, reason = "keeps the connection open")]
    there: Endpoint<u32>,
}

impl Pair {
    fn new() -> Pair {
        let (client, server, config) = (context(), context(), rings());
        let here = client.create_endpoint(&config).unwrap();
        let there = server.create_endpoint(&config).unwrap();
        here.connect(&there.address(), &ConnectConfig::default()).unwrap();
        there.connect(&here.address(), &ConnectConfig::default()).unwrap();
        Pair { client, server, here, there }
    }

    /// `rounds` times: makes `depth` calls and polls both sides in turn until they are answered. The server answers in place, or takes the
    /// requests from its queue.
    fn exchange(&self, rounds: u32, depth: u32, through_queue: bool) {
        let mut buffer = [0; 64];
        for round in 0..rounds {
            for _ in 0..depth {
                assert!(self.here.call(&[7; 32], 32, round).is_ok());
            }
            let mut answered = 0;
            while answered < depth as usize {
                answered += self.client.poll(|attached, answer| {
                    assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == 32));
                });
                if through_queue {
                    self.server.poll(|_, _| ());
                    while let Some(request) = self.server.recv() {
                        let len = request.data().copy_to(&mut buffer);
                        assert!(request.reply(&buffer[..len]).is_ok());
                    }
                } else {
                    self.server.serve(
                        &mut buffer,
                        |buffer, request| {
                            let len = request.data().copy_to(buffer);
                            assert!(request.reply(&buffer[..len]).is_ok());
                        },
                        |_, _, _| (),
                    );
                }
                self.server.flush();
            }
        }
    }
}

struct Echo;

impl Method for Echo {
    const ID: u32 = 1;
    type Request = [u8; 32];
    type Response = [u8; 32];
}

/// A client and a server of a typed service. The closure makes [`ROUNDS`] times [`DEPTH`] calls.
fn typed() -> impl FnMut() {
    let (driver, server, config) = (Driver::new(context()), context::<u32>(), rings());
    let client = driver.create_client(&config).unwrap();
    let endpoint = server.create_endpoint(&config).unwrap();
    client.connect(&endpoint.address(), &ConnectConfig::default()).unwrap();
    endpoint.connect(&client.address(), &ConnectConfig::default()).unwrap();
    let mut service = Service::new(()).on::<Echo>(|(), bytes| bytes);
    let mut calls: Vec<Call<Echo>> = Vec::with_capacity(DEPTH as usize);
    move || {
        let _connected = &endpoint;
        let mut task = TaskContext::from_waker(Waker::noop());
        for _ in 0..ROUNDS {
            for _ in 0..DEPTH {
                let mut call = client.call::<Echo>([7; 32]);
                assert!(Pin::new(&mut call).poll(&mut task).is_pending());
                calls.push(call);
            }
            let mut answered = 0;
            while answered < calls.len() {
                if driver.step() {
                    while let Some(call) = calls.get_mut(answered)
                        && let Poll::Ready(answer) = Pin::new(call).poll(&mut task)
                    {
                        assert!(answer.is_ok());
                        answered += 1;
                    }
                }
                service.poll(&server, |_, _| ());
            }
            calls.clear();
        }
    }
}

#[test]
fn calls_stay_within_their_instruction_budget() {
    const NAME: &str = "copyrpc::calls_stay_within_their_instruction_budget";
    let Some(task) = callgrind::task() else {
        for (task, calls, limit) in [
            ("call, one at a time", ROUNDS, ALONE_LIMIT),
            ("call, 64 at a time", ROUNDS * DEPTH, BATCHED_LIMIT),
            ("call through the queue, 64 at a time", ROUNDS * DEPTH, QUEUED_LIMIT),
            ("typed call, 64 at a time", ROUNDS * DEPTH, TYPED_LIMIT),
        ] {
            assert_limit(NAME, task, calls, limit);
            // A handle from the queue is moved as a whole, right after it was made.
            if !task.contains("queue") {
                split_loads::assert_none(NAME, task, calls);
            }
        }
        return;
    };
    if task.contains("typed") {
        let mut exchange = typed();
        exchange();
        return callgrind::measure(&mut exchange);
    }
    let (depth, through_queue) = (if task.contains("64") { DEPTH } else { 1 }, task.contains("queue"));
    let pair = Pair::new();
    pair.exchange(ROUNDS, depth, through_queue);
    callgrind::measure(&mut || pair.exchange(ROUNDS, depth, through_queue));
}
