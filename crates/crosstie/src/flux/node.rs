//! A node: what one thread holds of a network.

use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use std::time::{Duration, Instant};

use super::error::{CallError, Lost, ReplyError};
use super::slots::{Callees, Caller, Halves, Refusal, Ticket, Undeliverable};
use crate::wait::WaitStrategy;

/// Looks at what is due before [`Node::wait`] looks at everything. Looking takes lines from who is about to write them.
const EAGER_LOOKS: u32 = 64;

/// One node of a [network](super::network): calls the others, and is called by them.
///
/// It may move between threads, if `Token` may. Dropping it tells the others that it is gone.
pub struct Node<Req, Resp, Token> {
    /// By target.
    callers: Box<[Caller<Req, Resp, Token>]>,
    callees: Callees<Req, Resp>,
    /// A bit for each target: calls are under way. May be set without, never the other way.
    busy: Box<[u64]>,
    id: usize,
    in_flight: usize,
    max_in_flight: usize,
    wait_strategy: WaitStrategy,
    /// Not `Sync`: a node is one thread's at a time.
    one_thread: PhantomData<Cell<()>>,
}

impl<Req, Resp, Token> Node<Req, Resp, Token> {
    pub(super) fn new(
        id: usize,
        (callers, callees): Halves<Req, Resp, Token>,
        max_in_flight: usize,
        wait_strategy: WaitStrategy,
    ) -> Self {
        let busy = vec![0; callers.len().div_ceil(64)].into();
        Node {
            callers,
            callees,
            busy,
            id,
            in_flight: 0,
            max_in_flight,
            wait_strategy,
            one_thread: PhantomData,
        }
    }

    /// This node's number, from 0.
    #[inline]
    pub fn id(&self) -> usize {
        self.id
    }

    /// How many nodes the network was made of.
    #[inline]
    pub fn nodes(&self) -> usize {
        self.callers.len()
    }

    /// Calls of this node that are under way: whose response was not polled, and that were not given up as lost.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether a node was dropped. False for numbers that no node has.
    pub fn is_gone(&self, node: usize) -> bool {
        node < self.nodes() && self.callees.is_gone(node)
    }

    /// Sends a request. Its response comes with the token, from [`poll`](Self::poll).
    ///
    /// The target may be this node itself: the request then comes out of its own [`try_recv`](Self::try_recv).
    ///
    /// # Errors
    /// All of them hand the request and the token back, and change nothing. `Full` and `TooManyInFlight` pass when
    /// responses are polled.
    #[inline]
    pub fn call(&mut self, target: usize, request: Req, token: Token) -> Result<(), CallError<Req, Token>> {
        let nodes = self.callers.len();
        let Some(caller) = self.callers.get_mut(target) else {
            return Err(CallError::NoSuchNode { target, nodes, request, token });
        };
        if self.in_flight >= self.max_in_flight {
            return Err(CallError::TooManyInFlight { target, request, token });
        }
        match caller.call(request, token) {
            Ok(()) => {
                self.in_flight += 1;
                if caller.in_flight() == 1 {
                    self.busy[target / 64] |= 1 << (target % 64);
                }
                Ok(())
            }
            Err((Refusal::Full, request, token)) => Err(CallError::Full { target, request, token }),
            Err((Refusal::Gone, request, token)) => Err(CallError::Gone { target, request, token }),
        }
    }

    /// Takes the responses that have come, each with its call's token, and says how many there were.
    ///
    /// Responses of one target come in the order of the calls, if the target replies in that order. Others may be seen a
    /// few polls later. At most half of the calls to one target end at a time: who calls anew for each of them keeps the
    /// target busy with the other half, instead of each waiting for the other's whole queue in turn.
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
                let caller = &mut self.callers[index * 64 + bit as usize];
                let in_flight = &mut self.in_flight;
                let most = caller.in_flight().div_ceil(2);
                for taken in 1..=most {
                    let Some((token, response)) = caller.take_due() else {
                        if caller.suspects_disorder() {
                            caller.take_any(|token, response| {
                                *in_flight -= 1;
                                each(token, response);
                            });
                        }
                        break;
                    };
                    if taken == 1 {
                        caller.fetch(most - 1);
                    }
                    *in_flight -= 1;
                    each(token, response);
                }
                if caller.in_flight() == 0 {
                    *busy &= !(1 << bit);
                }
            }
        }
        before - self.in_flight
    }

    /// The next request, with the number of the node that called, and the ticket for the reply.
    ///
    /// Requests of one caller come in the order of its calls. A caller with many does not keep others waiting for long.
    #[inline]
    pub fn try_recv(&mut self) -> Option<(usize, Req, Ticket)> {
        self.callees.receive()
    }

    /// Answers a request, in any order, now or later. There is always room.
    ///
    /// # Errors
    /// `Gone` if the caller is gone, `WrongNode` if this node did not receive the request.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, response: Resp) -> Result<(), ReplyError<Resp>> {
        let target = ticket.from();
        match self.callees.reply(ticket, response) {
            Ok(()) => Ok(()),
            Err((Undeliverable::Gone, response)) => Err(ReplyError::Gone { target, response }),
            Err((Undeliverable::Stranger(ticket), response)) => {
                Err(ReplyError::WrongNode { ticket, response })
            }
        }
    }

    /// Ends the calls whose target is gone before it answered, and says how many there were.
    ///
    /// Costs a load if no node has gone since the last time.
    pub fn take_lost(&mut self, mut each: impl FnMut(Lost<Req, Token>)) -> usize {
        let Some(departures) = self.callees.departures() else { return 0 };
        let before = self.in_flight;
        let in_flight = &mut self.in_flight;
        for caller in &mut self.callers {
            caller.take_lost(|lost| {
                *in_flight -= 1;
                each(lost);
            });
        }
        self.callees.dealt_with(departures);
        before - self.in_flight
    }

    /// Waits until there is something to [`poll`](Self::poll), [receive](Self::try_recv) or
    /// [give up](Self::take_lost), or until the time is over; without one, for ever. Says whether there is.
    ///
    /// A node that goes away is such a thing, until [`take_lost`](Self::take_lost) is called, even if no call is lost.
    /// How it waits, [`Config::wait_strategy`](super::Config::wait_strategy) says.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        for _ in 0..EAGER_LOOKS {
            if self.callees.sees_request() || self.busy_callers().any(Caller::sees_due) {
                return true;
            }
            core::hint::spin_loop();
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.callees.wait(self.wait_strategy, deadline, || {
            self.callees.sees_request()
                || self.busy_callers().any(Caller::sees_any)
                || self.callees.departures().is_some()
        })
    }

    fn busy_callers(&self) -> impl Iterator<Item = &Caller<Req, Resp, Token>> {
        let none = self.in_flight == 0;
        self.callers.iter().filter(move |caller| !none && caller.in_flight() > 0)
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
