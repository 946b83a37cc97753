//! A common interface of `ipc` and `delegation`, for tests that run both in one program.

#![allow(dead_code, unused_imports, reason = "no test program uses all of it")]

use std::time::Duration;

use crosstie::WaitStrategy;
pub(crate) use crosstie::ipc::Disconnected;
use crosstie::ipc::{CallError, ConnectError, CreateError, ExchangeError, NotCalled};

/// The type of requests and responses.
pub(crate) type Words = [u64; 4];

pub(crate) fn request(token: u64, salt: u64) -> Words {
    [token, !token, token ^ salt, salt]
}

pub(crate) fn is_request(words: &Words) -> bool {
    *words == request(words[0], words[3])
}

pub(crate) fn expected_response(request: &Words) -> Words {
    request.map(|word| word.rotate_left(17) ^ 0x5555)
}

/// A connection has ended.
#[derive(Debug)]
pub(crate) struct Ended(pub(crate) Disconnected);

impl Ended {
    pub(crate) fn is_server_gone(&self) -> bool {
        self.0 == Disconnected::ServerGone
    }
}

/// A service with [`Words`] as messages and numbers as tokens.
pub(crate) trait Service: 'static {
    const NAME: &'static str;
    type Server: Send + 'static;
    type Client: Send + 'static;
    type Ticket;

    fn create(name: &str, max_clients: usize, depth: usize) -> Result<Self::Server, CreateError>;
    fn wait_for_request(server: &mut Self::Server, timeout: Duration) -> bool;
    /// Polls for requests. Returns a lower bound of their number.
    fn server_poll(server: &mut Self::Server) -> usize;
    /// Polls, and returns the number of clients.
    fn clients(server: &mut Self::Server) -> usize;
    fn receive(server: &mut Self::Server) -> Option<(Words, Self::Ticket)>;
    /// Returns false if the client is gone.
    fn reply(server: &mut Self::Server, ticket: Self::Ticket, response: &Words) -> bool;
    fn violations(server: &Self::Server) -> u64;

    fn connect(name: &str) -> Result<Self::Client, ConnectError>;
    fn with_wait_strategy(client: Self::Client, strategy: WaitStrategy) -> Self::Client;
    /// Returns false if there is no room.
    fn call(client: &mut Self::Client, request: &Words, token: u64) -> Result<bool, Ended>;
    fn wait_for_response(client: &mut Self::Client, timeout: Duration) -> Result<bool, Ended>;
    fn poll(client: &mut Self::Client, each: &mut dyn FnMut(u64, &Words)) -> Result<(), Ended>;
    fn exchange(client: &mut Self::Client, request: &Words) -> Result<Words, ExchangeError>;
    fn disconnect(client: &mut Self::Client) -> Vec<u64>;
    fn reconnect(client: &mut Self::Client) -> Result<(), ConnectError>;
}

macro_rules! service {
    ($type:ident, $module:ident) => {
        pub(crate) struct $type;

        impl Service for $type {
            const NAME: &'static str = stringify!($module);
            type Server = crosstie::$module::Server<Words, Words>;
            type Client = crosstie::$module::Client<Words, Words, u64>;
            type Ticket = crosstie::$module::Ticket;

            fn create(name: &str, max_clients: usize, depth: usize) -> Result<Self::Server, CreateError> {
                let config =
                    crosstie::$module::Config { max_clients, queue_depth: depth, ..Default::default() };
                Self::Server::create(name, &config)
            }
            fn wait_for_request(server: &mut Self::Server, timeout: Duration) -> bool {
                server.wait(Some(timeout))
            }
            fn server_poll(server: &mut Self::Server) -> usize {
                server.poll()
            }
            fn clients(server: &mut Self::Server) -> usize {
                server.poll();
                server.clients()
            }
            #[inline(always)]
            fn receive(server: &mut Self::Server) -> Option<(Words, Self::Ticket)> {
                server.recv().map(|request| (*request.message(), request.defer()))
            }
            #[inline(always)]
            fn reply(server: &mut Self::Server, ticket: Self::Ticket, response: &Words) -> bool {
                server.reply(ticket, response).is_ok()
            }
            fn violations(server: &Self::Server) -> u64 {
                server.counters().violations
            }
            fn connect(name: &str) -> Result<Self::Client, ConnectError> {
                Self::Client::connect(name)
            }
            fn with_wait_strategy(client: Self::Client, strategy: WaitStrategy) -> Self::Client {
                client.with_wait_strategy(strategy)
            }
            #[inline(always)]
            fn call(client: &mut Self::Client, request: &Words, token: u64) -> Result<bool, Ended> {
                match client.call(request, token) {
                    Ok(()) => Ok(true),
                    Err(CallError { cause: NotCalled::Disconnected(cause), .. }) => Err(Ended(cause)),
                    Err(_) => Ok(false),
                }
            }
            fn wait_for_response(client: &mut Self::Client, timeout: Duration) -> Result<bool, Ended> {
                client.wait(Some(timeout)).map_err(Ended)
            }
            #[inline(always)]
            fn poll(client: &mut Self::Client, each: &mut dyn FnMut(u64, &Words)) -> Result<(), Ended> {
                client.poll(each).map(drop).map_err(Ended)
            }
            fn exchange(client: &mut Self::Client, request: &Words) -> Result<Words, ExchangeError> {
                client.exchange(request, |response| *response)
            }
            fn disconnect(client: &mut Self::Client) -> Vec<u64> {
                let mut tokens = Vec::new();
                client.disconnect(|token| tokens.push(token));
                tokens
            }
            fn reconnect(client: &mut Self::Client) -> Result<(), ConnectError> {
                client.reconnect()
            }
        }
    };
}

service!(Ipc, ipc);
service!(Delegation, delegation);

/// Evaluates an expression for each service, which `$service` names.
macro_rules! each {
    ($service:ident, $what:expr) => {
        $crate::local_service::type_of!($service, Ipc, $what);
        $crate::local_service::type_of!($service, Delegation, $what);
    };
}
macro_rules! type_of {
    ($service:ident, $type:ident, $what:expr) => {{
        type $service = local_service::$type;
        $what
    }};
}
pub(crate) use {each, type_of};
