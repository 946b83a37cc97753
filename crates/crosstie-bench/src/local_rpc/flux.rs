//! `bench flux`: [`crosstie::flux`] as a [`Transport`].

use core::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crosstie::flux::{Config, CreateError, Node, network};

use super::payload::Payload;
use super::rpc_loop::{RpcClient, RpcServer, response_number};
use super::{Arguments, Member, SERVER, Transport};
use crate::error::Error;
use crate::runner::Exchange;
use crate::wait::Wait;

/// Payloads of flux. Its messages are values of a type, so each size is a type in this program.
pub(super) const PAYLOADS: [usize; 8] = [8, 16, 32, 48, 64, 256, 1024, 4096];

pub(super) fn transport(plan: &Arguments, wait: Wait) -> Result<Box<dyn Transport>, Error> {
    // One type for each of `PAYLOADS`.
    match plan.payload {
        8 => sized::<8>(plan, wait),
        16 => sized::<16>(plan, wait),
        32 => sized::<32>(plan, wait),
        48 => sized::<48>(plan, wait),
        64 => sized::<64>(plan, wait),
        256 => sized::<256>(plan, wait),
        1024 => sized::<1024>(plan, wait),
        _ => sized::<4096>(plan, wait),
    }
}

fn sized<const N: usize>(plan: &Arguments, wait: Wait) -> Result<Box<dyn Transport>, Error> {
    let queue_depth = plan.queue_depth;
    let config = Config { queue_depth, max_in_flight: queue_depth, wait_strategy: wait.into() };
    let nodes = network::<Message<N>, Message<N>, u64>(plan.clients + 1, &config);
    let nodes = nodes.map_err(|error| match error {
        CreateError::Parking(_) => Error::rpc("creating the network")(error),
        _ => Error::Usage(error.to_string()),
    })?;
    Ok(Box::new(Flux { nodes: Mutex::new(nodes.into_iter().map(Some).collect()) }))
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
    fn serve<'a>(&self, member: Member<'a>, _: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
        Ok(member.server(self.take(SERVER)?))
    }

    fn connect<'a>(&self, member: Member<'a>, _: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
        let peer = self.take(member.number)?;
        Ok(member.client(peer))
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
            Err(error) if error.cause.is_back_pressure() => Ok(false),
            Err(error) => Err(Error::rpc("calling")(error.cause)),
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
        let FluxPeer { node, message } = self;
        let mut replied = Ok(());
        let count = node.serve(|request| {
            message.set_number(response_number(black_box(request.message()).number()));
            if let Err(error) = request.reply(*message) {
                replied = Err(Error::rpc("replying")(error.cause));
            }
        });
        replied.map(|()| count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.node.wait(Some(timeout));
        Ok(())
    }
}
