//! `bench flux`: [`crosstie::flux`] as a [`Transport`].

use core::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crosstie::flux::{CallError, Config, ConfigError, Node, network};

use super::payload::Payload;
use super::rpc_loop::{Client, ClientLoop, Idle, RpcClient, RpcServer, Server, ServerLoop, response_number};
use super::{Plan, SERVER, Summary, Transport, measure};
use crate::error::Error;

pub(super) fn run(plan: &Plan) -> Result<Option<Summary>, Error> {
    // One type for each of `plan::FLUX_PAYLOADS`.
    match plan.payload {
        8 => run_sized::<8>(plan),
        16 => run_sized::<16>(plan),
        32 => run_sized::<32>(plan),
        48 => run_sized::<48>(plan),
        64 => run_sized::<64>(plan),
        256 => run_sized::<256>(plan),
        1024 => run_sized::<1024>(plan),
        _ => run_sized::<4096>(plan),
    }
}

fn run_sized<const N: usize>(plan: &Plan) -> Result<Option<Summary>, Error> {
    let config = Config { capacity: plan.depth, max_in_flight: plan.depth, wait_strategy: plan.wait.into() };
    let nodes = network::<Message<N>, Message<N>, u64>(plan.ranks(), &config);
    let nodes = nodes.map_err(|error| match error {
        ConfigError::Parking(_) => Error::rpc("creating the network")(error),
        _ => Error::Usage(error.to_string()),
    })?;
    measure(plan, &Flux { nodes: Mutex::new(nodes.into_iter().map(Some).collect()) })
}

type Message<const N: usize> = [u8; N];

/// The nodes of the network. Each rank takes its own node once; a node that was taken is `None`.
struct Flux<const N: usize> {
    nodes: Mutex<Vec<Option<Node<Message<N>, Message<N>, u64>>>>,
}

impl<const N: usize> Flux<N> {
    fn take(&self, rank: usize) -> Result<FluxPeer<N>, Error> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let node = nodes.get_mut(rank).and_then(Option::take).ok_or(Error::Protocol)?;
        Ok(FluxPeer { node, message: [1; N] })
    }
}

impl<const N: usize> Transport for Flux<N> {
    fn serve(&self, _plan: &Plan, _name: &str, idle: Idle) -> Result<Box<dyn ServerLoop>, Error> {
        Ok(Box::new(Server::new(self.take(SERVER)?, idle)))
    }

    fn connect(
        &self,
        plan: &Plan,
        _name: &str,
        rank: usize,
        idle: Idle,
    ) -> Result<Box<dyn ClientLoop>, Error> {
        Ok(Box::new(Client::new(self.take(rank)?, rank, plan.payload, plan.depth, idle)))
    }
}

struct FluxPeer<const N: usize> {
    node: Node<Message<N>, Message<N>, u64>,
    message: Message<N>,
}

impl<const N: usize> RpcClient for FluxPeer<N> {
    #[inline(always)]
    fn call(&mut self, number: u64) -> Result<bool, Error> {
        self.message.set_number(number);
        match self.node.call(SERVER, self.message, number) {
            Ok(()) => Ok(true),
            Err(error) if error.is_back_pressure() => Ok(false),
            Err(error) => Err(call_failed(&error)),
        }
    }

    #[inline(always)]
    fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
        Ok(self.node.poll(|token, response| seen(token, black_box(&response).number())))
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.node.wait(Some(timeout));
        if self.node.is_gone(SERVER) { Err(Error::Peer("the server has exited".into())) } else { Ok(()) }
    }
}

impl<const N: usize> RpcServer for FluxPeer<N> {
    #[inline(always)]
    fn serve(&mut self) -> Result<usize, Error> {
        let mut count = 0;
        while let Some((_, request, token)) = self.node.try_recv() {
            self.message.set_number(response_number(black_box(&request).number()));
            self.node
                .reply(token, self.message)
                .map_err(|error| Error::Rpc { what: "replying", source: error.to_string().into() })?;
            count += 1;
        }
        Ok(count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.node.wait(Some(timeout));
        Ok(())
    }
}

#[cold]
fn call_failed<const N: usize>(error: &CallError<Message<N>, u64>) -> Error {
    Error::Rpc { what: "calling", source: error.to_string().into() }
}
