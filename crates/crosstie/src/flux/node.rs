//! A node: one thread's part of a network.

use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use std::time::{Duration, Instant};

use super::error::{CallError, Lost, NotCalled, ReplyError};
use super::lane::{IncomingLanes, NodeLanes, OutgoingLane, Request, Ticket};
use crate::wait::{self, WaitStrategy};

/// Checks of the expected responses before [`Node::wait`] checks all calls. A check takes the cache line away from the node
/// that is about to write it.
const EXPECTED_ONLY_CHECKS: u32 = 64;

/// Most requests that one [`serve`](Node::serve) hands out.
const MAX_SERVED: usize = 256;

/// One node of a [network](super::network): it calls the other nodes and is called by them.
///
/// It may move between threads, if `Token` may. Dropping it tells the other nodes that it is gone.
pub struct Node<Req, Resp, Token> {
    /// The lanes on which this node calls, by target.
    outgoing: Box<[OutgoingLane<Req, Resp, Token>]>,
    /// The lanes on which other nodes call this one.
    incoming: IncomingLanes<Req, Resp>,
    /// A bit for each target with calls in flight. It may also be set without any, but is never clear with one.
    busy: Box<[u64]>,
    id: usize,
    in_flight: usize,
    max_in_flight: usize,
    wait_strategy: WaitStrategy,
    /// Whether the system allows what parking at a node needs.
    can_park: bool,
    /// Makes a node not `Sync`: one thread uses it at a time.
    one_thread: PhantomData<Cell<()>>,
}

impl<Req, Resp, Token> Node<Req, Resp, Token> {
    pub(super) fn new(
        id: usize,
        (outgoing, incoming): NodeLanes<Req, Resp, Token>,
        max_in_flight: usize,
        wait_strategy: WaitStrategy,
        can_park: bool,
    ) -> Self {
        let busy = vec![0; outgoing.len().div_ceil(64)].into();
        Node {
            outgoing,
            incoming,
            busy,
            id,
            in_flight: 0,
            max_in_flight,
            wait_strategy,
            can_park,
            one_thread: PhantomData,
        }
    }

    /// The number of this node, from 0.
    #[inline]
    pub fn id(&self) -> usize {
        self.id
    }

    /// The number of nodes that the network was created with.
    #[inline]
    pub fn nodes(&self) -> usize {
        self.outgoing.len()
    }

    /// Calls of this node in flight: their responses were not polled, and they were not taken as lost.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether a node was dropped. False for numbers that are no node's.
    pub fn is_gone(&self, node: usize) -> bool {
        node < self.nodes() && self.incoming.is_gone(node)
    }

    /// Sends a request. [`poll`](Self::poll) returns its response with the token.
    ///
    /// The target may be this node itself: its own [`serve`](Self::serve) or [`recv`](Self::recv) then finds the request.
    ///
    /// # Errors
    /// All errors hand the request and the token back, and change nothing. After [back-pressure](NotCalled::is_back_pressure) the same call
    /// can succeed once responses have been polled.
    #[inline]
    pub fn call(&mut self, target: usize, request: Req, token: Token) -> Result<(), CallError<Req, Token>> {
        let nodes = self.outgoing.len();
        let Some(lane) = self.outgoing.get_mut(target) else {
            return Err(CallError { cause: NotCalled::NoSuchNode { target, nodes }, request, token });
        };
        if self.in_flight >= self.max_in_flight {
            return Err(CallError { cause: NotCalled::TooManyInFlight, request, token });
        }
        lane.call(request, token)?;
        self.in_flight += 1;
        if lane.in_flight() == 1 {
            self.busy[target / 64] |= 1 << (target % 64);
        }
        Ok(())
    }

    /// Passes the responses that have arrived to `each`, with the tokens of their calls. Returns their number.
    ///
    /// Responses of one target arrive in the order of the calls, if the target replies in that order. Responses out of order
    /// may be found a few polls later. One poll ends at most half of the calls to one target, and of many fewer, where that is faster. A caller that
    /// makes a new call for each response so keeps the target busy with the others; otherwise both would soon alternate, each
    /// waiting for the other to work off a whole queue.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Token, Resp)) -> usize {
        if self.in_flight == 0 {
            return 0;
        }
        let before = self.in_flight;
        for (index, busy) in self.busy.iter_mut().enumerate() {
            let mut left = *busy;
            while left != 0 {
                let bit = left.trailing_zeros();
                left &= left - 1;
                let lane = &mut self.outgoing[index * 64 + bit as usize];
                let in_flight = &mut self.in_flight;
                let most = lane.most_per_poll();
                if most > 1 {
                    lane.prefetch(most);
                }
                let mut taken = 0;
                while taken < most
                    && let Some((token, response)) = lane.take_expected()
                {
                    taken += 1;
                    *in_flight -= 1;
                    each(token, response);
                }
                if lane.note_end(taken > 0, taken < most) {
                    lane.take_out_of_order(|token, response| {
                        *in_flight -= 1;
                        each(token, response);
                    });
                }
                if lane.in_flight() == 0 {
                    *busy &= !(1 << bit);
                }
            }
        }
        before - self.in_flight
    }

    /// Hands the requests that are there to `handle`. Returns their number. Never waits.
    ///
    /// It takes requests as [`recv`](Self::recv) does, and returns when there is none, or after 256 requests; the next call continues.
    ///
    /// The handler replies at once, or [defers](Request::defer) the request and replies with [`reply`](Self::reply) after this call. A
    /// request that is dropped, as by a panic of the handler, gets no response; the others wait for the next call.
    ///
    /// A program that needs the node between two requests, for example to call, or wants to stop earlier, calls [`recv`](Self::recv).
    #[inline]
    pub fn serve(&mut self, mut handle: impl FnMut(Request<'_, Req, Resp>)) -> usize {
        let mut count = 0;
        while count < MAX_SERVED
            && let Some(request) = self.recv()
        {
            handle(request);
            count += 1;
        }
        count
    }

    /// Returns the next request, or None if no request is waiting.
    ///
    /// Requests of one caller arrive in the order of its calls. After at most 32 requests of one caller in a row the others
    /// are checked.
    #[inline]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        self.incoming.receive()
    }

    /// Replies to a request that was deferred, in any order. There is always room for a response.
    ///
    /// # Errors
    /// `ClientGone` if the caller was dropped, `WrongNode` if this node did not receive the request. The response is handed back.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, response: Resp) -> Result<(), ReplyError<Resp>> {
        self.incoming.reply(ticket, response)
    }

    /// Ends the calls whose target was dropped before it replied, and passes them to `each`. Returns their number.
    ///
    /// Costs one load if no node was dropped since the last time.
    pub fn take_lost(&mut self, mut each: impl FnMut(Lost<Req, Token>)) -> usize {
        let Some(departures) = self.incoming.unhandled_departures() else { return 0 };
        let before = self.in_flight;
        let in_flight = &mut self.in_flight;
        for lane in &mut self.outgoing {
            lane.take_lost(|lost| {
                *in_flight -= 1;
                each(lost);
            });
        }
        self.incoming.set_handled_departures(departures);
        before - self.in_flight
    }

    /// Waits until there is something to [`poll`](Self::poll), to [serve](Self::serve) or to
    /// [take as lost](Self::take_lost), for at most `timeout`, or without limit if `timeout` is `None`. Returns whether there is.
    ///
    /// The drop of another node also ends the wait, until [`take_lost`](Self::take_lost) is called, even if no call is lost.
    /// [`Config::wait_strategy`](super::Config::wait_strategy) says how to wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        for _ in 0..EXPECTED_ONLY_CHECKS {
            if self.incoming.has_request() || self.busy_lanes().any(OutgoingLane::has_expected_response) {
                return true;
            }
            core::hint::spin_loop();
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.incoming.wait(self.wait_strategy, deadline, || self.has_something())
    }

    /// Whether there is something to poll, to receive or to take as lost.
    fn has_something(&self) -> bool {
        self.incoming.has_request()
            || self.busy_lanes().any(OutgoingLane::has_any_response)
            || self.incoming.unhandled_departures().is_some()
    }

    fn busy_lanes(&self) -> impl Iterator<Item = &OutgoingLane<Req, Resp, Token>> {
        let none = self.in_flight == 0;
        self.outgoing.iter().filter(move |lane| !none && lane.in_flight() > 0)
    }
}

impl<Req, Resp, Token> wait::any::sealed::Waitable for Node<Req, Resp, Token> {
    fn parker(&self) -> Option<&wait::Parker> {
        self.can_park.then(|| self.incoming.parker())
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        self.has_something()
    }
}

impl<Req, Resp, Token> fmt::Debug for Node<Req, Resp, Token> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.id)
            .field("nodes", &self.nodes())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}
