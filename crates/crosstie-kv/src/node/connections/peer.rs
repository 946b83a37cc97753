//! The connection with one other node, and the requests that wait for space in it.

use std::collections::VecDeque;

use crosstie::copyrpc::{self, Connection};
use crosstie::ipc;
use zerocopy::IntoBytes;

use super::super::buffer_pool::BufferPool;
use super::super::counters::DaemonActivity;
use super::super::origin::CallOrigin;
use crate::wire::{Status, WordRequest, WordResponse};

/// The connection with one other node.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) connection: Option<Connection<CallOrigin>>,
    /// Requests may be sent.
    pub(super) is_up: bool,
    pub(super) epoch: u64,
    /// Requests that found no space. A client or a daemon waits for each of them, so the backlog is never longer than the number
    /// of requests that these may have in flight.
    backlog: VecDeque<(WordRequest, CallOrigin)>,
    /// Byte-string requests that found no space: the encoded request, the limit of the response, the client.
    bytes_backlog: VecDeque<(Vec<u8>, usize, ipc::Ticket)>,
}

impl Peer {
    /// Sends a request, now or as soon as there is space. Returns the origin if the node is not connected.
    #[inline]
    pub(super) fn send(
        &mut self,
        request: &WordRequest,
        origin: CallOrigin,
        backlogged: &mut usize,
        activity: &mut DaemonActivity,
    ) -> Result<(), CallOrigin> {
        activity.sent += 1;
        let Some(connection) = self.connection.as_ref().filter(|_| self.is_up) else { return Err(origin) };
        let origin = if self.backlog.is_empty() {
            match connection.call(request.as_bytes(), size_of::<WordResponse>(), origin) {
                Ok(()) => return Ok(()),
                Err(error) if error.cause.is_back_pressure() => error.user,
                Err(error) => return Err(error.user),
            }
        } else {
            origin
        };
        self.backlog.push_back((*request, origin));
        *backlogged += 1;
        activity.backlogged += 1;
        Ok(())
    }

    /// Sends an encoded byte-string request, now or as soon as there is space. Returns the ticket and the status if the request
    /// ends at once.
    pub(super) fn send_bytes(
        &mut self,
        bytes: &[u8],
        response_limit: usize,
        ticket: ipc::Ticket,
        backlogged: &mut usize,
        buffers: &mut BufferPool,
    ) -> Result<(), (ipc::Ticket, Status)> {
        let up = self.connection.as_ref().filter(|_| self.is_up);
        let Some((connection, (_, longest))) = up.and_then(|up| Some((up, up.max_lengths()?))) else {
            return Err((ticket, Status::NodeGone));
        };
        let response_limit = response_limit.min(longest);
        let ticket = if self.bytes_backlog.is_empty() {
            let Err(error) = connection.call(bytes, response_limit, CallOrigin::BytesClient(ticket)) else {
                return Ok(());
            };
            let CallOrigin::BytesClient(ticket) = error.user else { return Ok(()) };
            match error.cause {
                cause if cause.is_back_pressure() => ticket,
                copyrpc::NotCalled::Failed(_) | copyrpc::NotCalled::NotConnected => {
                    return Err((ticket, Status::NodeGone));
                }
                cause => return Err((ticket, refusal_status(cause))),
            }
        } else {
            // Earlier requests are waiting: this one waits behind them.
            ticket
        };
        self.bytes_backlog.push_back((buffers.copy_of(bytes), response_limit, ticket));
        *backlogged += 1;
        Ok(())
    }

    /// Sends what there is space for now. Passes byte-string requests that cannot be sent to `refused`: they must not keep those
    /// behind them from being sent.
    pub(super) fn retry_backlog(
        &mut self,
        backlogged: &mut usize,
        buffers: &mut BufferPool,
        mut refused: impl FnMut(ipc::Ticket, Status),
    ) {
        let Some(connection) = &self.connection else { return };
        while let Some((request, origin)) = self.backlog.pop_front() {
            *backlogged -= 1;
            if let Err(error) = connection.call(request.as_bytes(), size_of::<WordResponse>(), origin) {
                // Also if the connection has failed: the next check of the connections ends all requests that wait.
                self.backlog.push_front((request, error.user));
                *backlogged += 1;
                break;
            }
        }
        while let Some((bytes, response_limit, ticket)) = self.bytes_backlog.pop_front() {
            *backlogged -= 1;
            if let Err(error) = connection.call(&bytes, response_limit, CallOrigin::BytesClient(ticket)) {
                let CallOrigin::BytesClient(ticket) = error.user else { break };
                // Also if the connection has failed: the next check of the connections ends all requests that wait.
                if error.cause.is_back_pressure() || matches!(error.cause, copyrpc::NotCalled::Failed(_)) {
                    self.bytes_backlog.push_front((bytes, response_limit, ticket));
                    *backlogged += 1;
                    break;
                }
                refused(ticket, refusal_status(error.cause));
            }
            buffers.release(bytes);
        }
    }

    /// Closes the connection. Returns the origins of all requests that were in flight or waiting.
    pub(super) fn close(&mut self, backlogged: &mut usize) -> Vec<CallOrigin> {
        self.is_up = false;
        let mut ended = self.connection.take().map_or(Vec::new(), Connection::close);
        *backlogged -= self.backlog.len() + self.bytes_backlog.len();
        ended.extend(self.backlog.drain(..).map(|(_, origin)| origin));
        ended.extend(self.bytes_backlog.drain(..).map(|(_, _, ticket)| CallOrigin::BytesClient(ticket)));
        ended
    }
}

/// The status of a byte-string request that cannot be sent.
fn refusal_status(cause: copyrpc::NotCalled) -> Status {
    match cause {
        copyrpc::NotCalled::NoMemory => Status::NoRegisteredMemory,
        copyrpc::NotCalled::NotConnected => Status::NodeGone,
        // The request is longer than this connection carries.
        _ => Status::Malformed,
    }
}
