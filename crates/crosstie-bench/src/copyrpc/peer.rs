//! copyrpc on one side of the benchmark: a context and its connections.

use core::hint::black_box;
use std::time::Duration;

use crosstie::copyrpc::{self, CallFailed, Config, Connection, ConnectionAddress, Context, Counters};
use crosstie::device::{ConnectConfig, Device};
use zerocopy::{FromBytes, IntoBytes};

use super::Arguments;
use super::side::{END, RpcPeer};
use crate::error::Error;
use crate::local_rpc::payload::Payload;
use crate::local_rpc::rpc_loop::{RpcClient, RpcServer, response_number};
use crate::runner::Connect;

/// The payload of a request or response, and how its receiver reads it.
pub(super) trait Message: Payload + AsRef<[u8]> {
    /// The number in a message of `len` bytes; `None` if the message has another length.
    fn number_of(message: copyrpc::Payload<'_>, len: usize) -> Option<u64>;
}

/// Payloads of a fixed size are read as values, as an application would.
impl<const N: usize> Message for [u8; N] {
    #[inline(always)]
    fn number_of(message: copyrpc::Payload<'_>, _: usize) -> Option<u64> {
        let value = message.read::<[u8; N]>()?;
        Some(black_box(&value).number())
    }
}

/// Other payloads are not copied out of the ring; only the number is read.
impl Message for [u8] {
    #[inline(always)]
    fn number_of(message: copyrpc::Payload<'_>, len: usize) -> Option<u64> {
        let mut number = [0; 8];
        message.copy_to(&mut number);
        (message.len() == len).then_some(u64::from_ne_bytes(number))
    }
}

/// A counter of a context: its name, and how to read it.
pub(crate) type Counter = (&'static str, fn(&Counters) -> u64);

pub(crate) const COUNTERS: [Counter; 15] = [
    ("calls", |counters| counters.calls),
    ("replies", |counters| counters.replies),
    ("unanswered", |counters| counters.unanswered),
    ("batches", |counters| counters.batches),
    ("batched", |counters| counters.batched),
    ("credit_batches", |counters| counters.credit_batches),
    ("wraps", |counters| counters.wraps),
    ("direct", |counters| counters.direct),
    ("reads", |counters| counters.reads),
    ("work_requests", |counters| counters.work_requests),
    ("signaled", |counters| counters.signaled),
    ("bytes", |counters| counters.bytes),
    ("completions", |counters| counters.completions),
    ("violations", |counters| counters.violations),
    ("failures", |counters| counters.failures),
];

/// Sums of the counters over all slices, without the request that ends a slice, in the order of [`COUNTERS`].
type CounterSums = [u64; COUNTERS.len()];

/// The context and the connections of one side, client or server.
pub(super) struct CopyrpcPeer<M: Message + ?Sized> {
    // Field order: dropped before the context.
    connections: Vec<Connection<u64>>,
    context: Context<u64>,
    /// The message that this side sends, and the length of the messages that it receives.
    message: Box<M>,
    len: usize,
    /// The connection of the next call.
    next_connection: usize,
    /// Whether the request that ends the slice has arrived.
    over: bool,
    counters_at_start: Counters,
    counter_sums: CounterSums,
}

impl<M: Message + ?Sized> CopyrpcPeer<M> {
    pub(super) fn open(plan: &Arguments, device: Device, leads: bool) -> Result<CopyrpcPeer<M>, Error> {
        let (payload, response) = (plan.payload, plan.response());
        let (sent_len, received_len) = if leads { (payload, response) } else { (response, payload) };
        let (context, connections) = open_context(plan, device)?;
        Ok(CopyrpcPeer {
            connections,
            counters_at_start: context.counters(),
            context,
            message: M::filled(sent_len),
            len: received_len,
            next_connection: 0,
            over: false,
            counter_sums: [0; _],
        })
    }

    /// Adds the counters of the slice to the sums.
    fn add_counters(&mut self, now: &Counters) {
        for (sum, (_, count)) in self.counter_sums.iter_mut().zip(COUNTERS) {
            *sum += count(now) - count(&self.counters_at_start);
        }
    }
}

impl<M: Message + ?Sized> Connect for CopyrpcPeer<M> {
    /// The addresses of all connections.
    fn address(&self) -> Vec<u8> {
        let addresses: Vec<_> = self.connections.iter().map(Connection::address).collect();
        addresses.as_bytes().to_vec()
    }

    fn connect(&mut self, address: &[u8]) -> Result<(), Error> {
        connect(&self.connections, address)
    }
}

impl<M: Message + ?Sized> RpcPeer for CopyrpcPeer<M> {
    fn begin_slice(&mut self) {
        self.counters_at_start = self.context.counters();
        self.over = false;
    }

    fn end_slice(&mut self) -> Result<(), Error> {
        let now = self.context.counters();
        self.add_counters(&now);
        self.message.set_number(END);
        let connection = &self.connections[self.next_connection];
        call_last(&self.context, connection, (*self.message).as_ref(), self.len)
    }

    fn discard(&mut self) -> Result<usize, Error> {
        discard(&self.context)
    }

    fn is_over(&self) -> bool {
        self.over
    }

    fn reset_counters(&mut self) {
        self.counter_sums = CounterSums::default();
    }
}

impl<M: Message + ?Sized> RpcClient for CopyrpcPeer<M> {
    #[inline(always)]
    fn call(&mut self, number: u64) -> Result<bool, Error> {
        self.message.set_number(number);
        let connection = &self.connections[self.next_connection];
        match connection.call((*self.message).as_ref(), self.len, number) {
            Ok(()) => {
                self.next_connection = if self.next_connection + 1 == self.connections.len() {
                    0
                } else {
                    self.next_connection + 1
                };
                Ok(true)
            }
            Err(error) if error.cause.is_back_pressure() => Ok(false),
            Err(error) => Err(Error::rpc("calling")(error)),
        }
    }

    #[inline(always)]
    fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
        let (len, mut failed) = (self.len, None);
        let count = self.context.poll(|token, response| match response {
            // A response of the wrong length is reported with a number that is wrong for every token.
            Ok(response) => seen(token, M::number_of(response, len).unwrap_or(!response_number(token))),
            Err(cause) => failed = Some(cause),
        });
        failed.map_or(Ok(count), |cause: CallFailed| Err(Error::rpc("calling")(cause)))
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.context.wait(timeout);
        Ok(())
    }
}

impl<M: Message + ?Sized> RpcServer for CopyrpcPeer<M> {
    #[inline(always)]
    fn serve(&mut self) -> Result<usize, Error> {
        let CopyrpcPeer { context, message, len, over, .. } = self;
        let (mut count, mut at_end, mut failed) = (0, None, None);
        context.serve(
            message,
            |message, request| {
                let Some(number) = M::number_of(request.data(), *len) else {
                    failed = Some(Error::Peer("it sent a request of the wrong length".into()));
                    return;
                };
                if number == END {
                    // Before the reply to it is counted.
                    at_end = Some(context.counters());
                } else {
                    count += 1;
                }
                message.set_number(response_number(number));
                if let Err(error) = request.reply((**message).as_ref()) {
                    failed = Some(Error::rpc("replying")(error.cause));
                }
            },
            |_, _, _| (),
        );
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some(counters) = at_end {
            *over = true;
            self.add_counters(&counters);
        }
        if self.over {
            self.context.flush();
        }
        Ok(count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.context.wait(timeout);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        COUNTERS.iter().zip(self.counter_sums).map(|((name, _), sum)| (*name, sum)).collect()
    }
}

// What follows is not measured. It is compiled once, not for each type of messages.

fn open_context(plan: &Arguments, device: Device) -> Result<(Context<u64>, Vec<Connection<u64>>), Error> {
    let config = Config { max_connections: plan.connections, ..Config::default() };
    let context = Context::new(device, &config)?;
    let connection = plan.connection();
    let connections: Result<Vec<_>, _> =
        (0..plan.connections).map(|_| context.create_connection(&connection)).collect();
    Ok((context, connections?))
}

/// Connects to the other side, each connection to that with the same number.
fn connect(connections: &[Connection<u64>], address: &[u8]) -> Result<(), Error> {
    let addresses = <[ConnectionAddress]>::ref_from_bytes(address).map_err(|_| Error::Protocol)?;
    if addresses.len() != connections.len() {
        return Err(Error::Protocol);
    }
    let connect =
        |(connection, address): (&Connection<u64>, _)| connection.connect(address, &ConnectConfig::default());
    connections.iter().zip(addresses).try_for_each(connect).map_err(Error::rpc("connecting to the peer"))
}

/// Sends the request that ends a slice.
fn call_last(
    context: &Context<u64>,
    connection: &Connection<u64>,
    message: &[u8],
    len: usize,
) -> Result<(), Error> {
    connection.call(message, len, END).map_err(|error| match error.cause.is_back_pressure() {
        true => {
            Error::Rpc { what: "calling", source: "there is no room for the last request of a slice".into() }
        }
        false => Error::rpc("calling")(error),
    })?;
    context.flush();
    Ok(())
}

/// Takes the responses that have arrived, and returns how many there were.
fn discard(context: &Context<u64>) -> Result<usize, Error> {
    let mut failed = None;
    let count = context.poll(|_, response| {
        if let Err(cause) = response {
            failed = Some(cause);
        }
    });
    failed.map_or(Ok(count), |cause: CallFailed| Err(Error::rpc("calling")(cause)))
}
