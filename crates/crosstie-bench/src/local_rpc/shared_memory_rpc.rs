//! The code that the transports [`crosstie::ipc`] and [`crosstie::delegation`] share. They differ only in their types, their
//! configuration and their counters.

/// Defines `transport(plan)`, the [`Transport`](super::Transport) of a module of the library. The module that invokes this macro
/// defines `config(&Arguments, Wait) -> Config` and `counters(Counters) -> Vec<(&'static str, u64)>`.
macro_rules! shared_memory_rpc {
    ($module:ident) => {
        use core::hint::black_box;
        use core::marker::PhantomData;
        use std::time::Duration;

        use crosstie::$module::{Client, Server};

        use super::payload::Payload;
        use super::rpc_loop::{RpcClient, RpcServer, response_number};
        use super::{Member, Transport};
        use crate::error::Error;
        use crate::runner::Exchange;

        /// Common payload sizes use fixed-size types, as an application would; other sizes use byte slices.
        pub(super) fn transport(plan: &Arguments) -> Box<dyn Transport> {
            match plan.payload {
                8 => Box::new(RpcTransport::<[u8; 8]>(PhantomData)),
                32 => Box::new(RpcTransport::<[u8; 32]>(PhantomData)),
                64 => Box::new(RpcTransport::<[u8; 64]>(PhantomData)),
                _ => Box::new(RpcTransport::<[u8]>(PhantomData)),
            }
        }

        struct RpcTransport<M: ?Sized>(PhantomData<fn(&M)>);

        impl<M: Payload + ?Sized> Transport for RpcTransport<M> {
            fn serve<'a>(&self, member: Member<'a>, name: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
                let server = Server::create(name, &config(member.plan, member.wait));
                let server = server.map_err(Error::rpc("bench server"))?;
                let response = M::filled(member.plan.payload);
                Ok(member.server(Responder { server, response }))
            }

            fn connect<'a>(&self, member: Member<'a>, name: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
                let client = Client::connect(name).map_err(Error::rpc("connecting"))?;
                let client = client.with_wait_strategy(member.wait.into());
                let request = M::filled(member.plan.payload);
                Ok(member.client(Caller { client, request }))
            }
        }

        struct Caller<M: Payload + ?Sized> {
            client: Client<M, M, u64>,
            request: Box<M>,
        }

        impl<M: Payload + ?Sized> RpcClient for Caller<M> {
            #[inline(always)]
            fn call(&mut self, number: u64) -> Result<bool, Error> {
                self.request.set_number(number);
                match self.client.call(&self.request, number) {
                    Ok(()) => Ok(true),
                    Err(error) if error.cause.is_back_pressure() => Ok(false),
                    Err(error) => Err(Error::rpc("calling")(error.cause)),
                }
            }

            #[inline(always)]
            fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
                let polled = self.client.poll(|token, response| seen(token, black_box(response).number()));
                polled.map_err(Error::rpc("polling"))
            }

            fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
                self.client.wait(Some(timeout)).map(drop).map_err(Error::rpc("waiting"))
            }
        }

        struct Responder<M: Payload + ?Sized> {
            server: Server<M, M>,
            response: Box<M>,
        }

        impl<M: Payload + ?Sized> RpcServer for Responder<M> {
            #[inline(always)]
            fn serve(&mut self) -> Result<usize, Error> {
                let Responder { server, response } = self;
                let mut replied = Ok(());
                let count = server.serve(|request| {
                    response.set_number(response_number(black_box(request.message()).number()));
                    if let Err(error) = request.reply(response) {
                        replied = Err(Error::rpc("replying")(error));
                    }
                });
                replied.map(|()| count)
            }

            fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
                self.server.wait(Some(timeout));
                Ok(())
            }

            fn counters(&self) -> Vec<(&'static str, u64)> {
                counters(self.server.counters())
            }
        }
    };
}

pub(super) use shared_memory_rpc;
