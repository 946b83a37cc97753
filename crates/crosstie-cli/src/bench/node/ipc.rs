//! [`crosstie::ipc`] as what carries the messages.

use core::hint::black_box;
use core::marker::PhantomData;
use std::time::Duration;

use crosstie::ipc::{CallError, Client, Config, Server};

use super::exchange::{Answering, Asking, answer};
use super::payload::Payload;
use super::{Plan, Report, Transport, measure};
use crate::error::Error;

pub(super) fn run(plan: &Plan) -> Result<Option<Report>, Error> {
    match plan.payload {
        8 => measure(plan, &Ipc::<[u8; 8]>(PhantomData)),
        16 => measure(plan, &Ipc::<[u8; 16]>(PhantomData)),
        32 => measure(plan, &Ipc::<[u8; 32]>(PhantomData)),
        48 => measure(plan, &Ipc::<[u8; 48]>(PhantomData)),
        64 => measure(plan, &Ipc::<[u8; 64]>(PhantomData)),
        _ => measure(plan, &Ipc::<[u8]>(PhantomData)),
    }
}

struct Ipc<M: ?Sized>(PhantomData<fn(&M)>);

impl<M: Payload + ?Sized> Transport for Ipc<M> {
    type Client = Asks<M>;
    type Server = Answers<M>;

    fn serve(&self, plan: &Plan, name: &str) -> Result<Answers<M>, Error> {
        let config = Config {
            max_clients: plan.clients,
            queue_depth: plan.depth,
            request_limit: plan.payload,
            response_limit: plan.payload,
            waiting: plan.waiting.into(),
        };
        let server = Server::create(name, &config).map_err(Error::exchange("creating the server"))?;
        Ok(Answers { server, response: M::filled(plan.payload) })
    }

    fn connect(&self, plan: &Plan, name: &str, _rank: usize) -> Result<Asks<M>, Error> {
        let client = Client::connect(name).map_err(Error::exchange("connecting"))?;
        Ok(Asks { client: client.with_waiting(plan.waiting.into()), request: M::filled(plan.payload) })
    }
}

struct Asks<M: Payload + ?Sized> {
    client: Client<M, M, u64>,
    request: Box<M>,
}

impl<M: Payload + ?Sized> Asking for Asks<M> {
    #[inline(always)]
    fn call(&mut self, number: u64) -> Result<bool, Error> {
        self.request.set_number(number);
        match self.client.call(&self.request, number) {
            Ok(()) => Ok(true),
            Err(CallError::Full(_)) => Ok(false),
            Err(error) => Err(Error::exchange("calling")(error)),
        }
    }

    #[inline(always)]
    fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
        let polled = self.client.poll(|token, response| seen(token, black_box(response).number()));
        polled.map_err(Error::exchange("polling"))
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.client.wait(Some(timeout)).map(drop).map_err(Error::exchange("waiting"))
    }
}

struct Answers<M: Payload + ?Sized> {
    server: Server<M, M>,
    response: Box<M>,
}

impl<M: Payload + ?Sized> Answering for Answers<M> {
    #[inline(always)]
    fn serve(&mut self) -> Result<usize, Error> {
        if self.server.poll() == 0 {
            return Ok(0);
        }
        let mut count = 0;
        while let Some(request) = self.server.recv() {
            self.response.set_number(answer(black_box(request.message()).number()));
            request.reply(&self.response).map_err(Error::exchange("replying"))?;
            count += 1;
        }
        Ok(count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.server.wait(Some(timeout));
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counters = self.server.counters();
        vec![
            ("clients_arrived", counters.arrived),
            ("clients_left", counters.left),
            ("clients_cut_off", counters.cut_off),
        ]
    }
}
