//! The server side: a state, and a handler for each method.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use zerocopy::IntoBytes;

use super::error::Refused;
use super::method::{Frame, Method, PREFIX_SIZE, Prefix, Status, response_size};
use crate::copyrpc::{CallFailed, Context, NotReplied, Payload, RecvHandle, Request};
use sealed::{Handle, Outcome};

/// A state, and handlers that work on it.
///
/// A request's method is found by comparing numbers, the method added last first. Handlers are called directly, without a
/// virtual call: the compiler can inline them into the loop that receives requests.
///
/// ```
/// # use crosstie::copyrpc::service::{Method, Refused, Service};
/// # struct Add; impl Method for Add { const ID: u32 = 1; type Request = u64; type Response = u64; }
/// # struct Get; impl Method for Get { const ID: u32 = 2; type Request = (); type Response = u64; }
/// let service = Service::<u64, ()>::new(0)
///     .on::<Get>(|counter, ()| *counter)
///     .try_on::<Add>(|counter, more| {
///         *counter = counter.checked_add(more).ok_or(Refused(1))?;
///         Ok(*counter)
///     });
/// ```
///
/// A handler must return the response type of its method:
///
/// ```compile_fail,E0308
/// # use crosstie::copyrpc::service::{Method, Service};
/// # struct Get; impl Method for Get { const ID: u32 = 2; type Request = (); type Response = u64; }
/// let service = Service::<u64, ()>::new(0).on::<Get>(|counter, ()| "one");
/// ```
pub struct Service<S, U, H = NoMethods> {
    state: S,
    handlers: H,
    /// Long requests are copied here from the ring.
    request: Box<[u8]>,
    counters: ServiceCounters,
    of: PhantomData<fn(U)>,
}

/// What a service has done so far. Every request is counted once, unless its handler panicked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceCounters {
    /// Requests that their handlers answered.
    pub answered: u64,
    /// Requests that their handlers refused.
    pub refused: u64,
    /// Requests whose handlers answer later.
    pub deferred: u64,
    /// Requests for methods that the service does not have.
    pub unknown: u64,
    /// Requests that were malformed.
    pub malformed: u64,
    /// Requests whose response could not be sent: the connection had ended, or there was no memory for a long response. In the
    /// second case the caller got [`Unanswered`](super::Error::Unanswered).
    pub undelivered: u64,
}

impl<S, U> Service<S, U> {
    /// Creates a service without methods.
    pub fn new(state: S) -> Service<S, U> {
        Service::with(state, NoMethods)
    }
}

impl<S, U, H: Handlers<S, U>> Service<S, U, H> {
    /// Adds a handler that answers at once.
    ///
    /// # Panics
    ///
    /// If the service already has a handler for that number. `try_on` and `defer` do so too.
    pub fn on<M: Method>(
        self,
        handler: impl FnMut(&mut S, M::Request) -> M::Response,
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M, _>(Answer(handler))
    }

    /// Adds a handler that answers or refuses at once.
    pub fn try_on<M: Method>(
        self,
        handler: impl FnMut(&mut S, M::Request) -> Result<M::Response, Refused>,
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M, _>(AnswerOrRefuse(handler))
    }

    /// Adds a handler that may answer later, in any order, or pass the [`Deferred`] on to other code that does.
    pub fn defer<M: Method>(
        self,
        handler: impl FnMut(&mut S, M::Request, Deferred<M, U>),
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M, _>(AnswerLater(handler))
    }

    fn add<M: Method, F: Run<M, S, U>>(self, handler: F) -> Service<S, U, impl Handlers<S, U>> {
        assert!(!self.handlers.has(M::ID), "two handlers for method {}", M::ID);
        Service::with(self.state, On { handler, rest: self.handlers, of: PhantomData::<fn(M)> })
    }
}

impl<S, U, H> Service<S, U, H> {
    fn with(state: S, handlers: H) -> Self
    where
        H: Handlers<S, U>,
    {
        let request = vec![0; H::MAX_REQUEST].into();
        Service { state, handlers, request, counters: ServiceCounters::default(), of: PhantomData }
    }

    /// Polls the context and handles the requests that it finds, each where it has arrived, and those that wait for
    /// [`recv`](Context::recv). Responses go to `on_response`. Returns the number of requests and of calls that have ended.
    ///
    /// If a handler panics, its caller gets [`Unanswered`](super::Error::Unanswered), and the service can continue: requests behind it wait for
    /// the next poll.
    #[inline]
    pub fn poll(
        &mut self,
        context: &Context<U>,
        mut on_response: impl FnMut(U, Result<Payload<'_>, CallFailed>),
    ) -> usize
    where
        H: Handlers<S, U>,
    {
        // The panic of a handler must not go through the poll, which would end all connections. It continues behind the poll.
        let mut polled = (self, None);
        let count = context.serve_while(
            &mut polled,
            |(service, panic), mut request| {
                let handled = catch_unwind(AssertUnwindSafe(|| service.handle_request(&mut request)));
                if let Err(cause) = handled {
                    *panic = Some(cause);
                    if request.needs_reply() {
                        reply_unanswered(|bytes| request.reply_in_place(bytes));
                    }
                }
                panic.is_none()
            },
            |_, user, response| on_response(user, response),
        );
        if let (_, Some(panic)) = polled {
            resume_unwind(panic);
        }
        count
    }

    #[inline(always)]
    fn handle_request(&mut self, request: &mut Request<'_, U>)
    where
        H: Handlers<S, U>,
    {
        let outcome = match request.data().front() {
            Some(front) => {
                let prefix: Prefix = zerocopy::transmute!(front);
                let (method, response) = (prefix.head.get(), prefix.detail.get());
                let Service { state, handlers, request: buffer, .. } = self;
                handlers.handle(state, method, response, request, buffer)
            }
            None => answer_status(request, Status::Malformed, 0, Outcome::Malformed),
        };
        let counter = match outcome {
            Outcome::Answered => &mut self.counters.answered,
            Outcome::Refused => &mut self.counters.refused,
            Outcome::Deferred => &mut self.counters.deferred,
            Outcome::Unknown => &mut self.counters.unknown,
            Outcome::Malformed => &mut self.counters.malformed,
            Outcome::Undelivered => &mut self.counters.undelivered,
        };
        *counter += 1;
    }

    /// The state.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The state, for a program that changes it between requests.
    pub fn state_mut(&mut self) -> &mut S {
        &mut self.state
    }

    /// What the service has done so far.
    pub fn counters(&self) -> ServiceCounters {
        self.counters
    }
}

/// A request that is answered later. If it is dropped, the caller gets [`Unanswered`](super::Error::Unanswered).
///
/// It can be answered only once:
///
/// ```compile_fail,E0382
/// # use crosstie::copyrpc::service::{Deferred, Method};
/// fn twice<M: Method<Response = u64>, U>(reply: Deferred<M, U>) {
///     reply.send(1).ok();
///     reply.send(2).ok();
/// }
/// ```
///
/// and only with the response type of its method:
///
/// ```compile_fail,E0308
/// # use crosstie::copyrpc::service::{Deferred, Method};
/// fn wrong<M: Method<Response = u64>, U>(reply: Deferred<M, U>) {
///     reply.send(1u32).ok();
/// }
/// ```
#[must_use = "if it is dropped, the caller gets no response"]
pub struct Deferred<M, U> {
    request: RecvHandle<U>,
    of: PhantomData<fn(M)>,
}

impl<M: Method, U> Deferred<M, U> {
    /// Sends the response, with the next poll of the context. An error says why the caller does not get it.
    ///
    /// Responses should fit into the ring. One that does not is sent through bulk memory; if that is in use, the caller gets
    /// [`Unanswered`](super::Error::Unanswered).
    #[inline]
    pub fn send(mut self, response: M::Response) -> Result<(), NotReplied> {
        let frame = Frame { prefix: Prefix::response(Status::Done, 0), body: response };
        send_reply(frame.as_bytes(), |bytes| self.request.reply_in_place(bytes))
    }

    /// Refuses the request. Sent like a [response](Deferred::send).
    pub fn refuse(mut self, refused: Refused) -> Result<(), NotReplied> {
        let bytes = Prefix::response(Status::Refused, refused.0);
        send_reply(bytes.as_bytes(), |bytes| self.request.reply_in_place(bytes))
    }
}

impl<M, U> Drop for Deferred<M, U> {
    fn drop(&mut self) {
        if self.request.needs_reply() {
            reply_unanswered(|bytes| self.request.reply_in_place(bytes));
        }
    }
}

/// Replies. If there is no bulk memory for a response that is too long for the ring, a status is sent instead. If the caller allowed too little
/// even for that, the dropped request is answered with an empty payload.
#[inline]
fn send_reply(
    bytes: &[u8],
    mut reply: impl FnMut(&[u8]) -> Result<(), NotReplied>,
) -> Result<(), NotReplied> {
    let replied = reply(bytes);
    if let Err(NotReplied::NoBulkMemory | NotReplied::NoMemory) = replied {
        reply_unanswered(reply);
    }
    replied
}

/// Tells the caller that its request will not be answered. If the connection has ended, there is nobody to tell.
#[cold]
fn reply_unanswered(mut reply: impl FnMut(&[u8]) -> Result<(), NotReplied>) {
    reply(Prefix::response(Status::Unanswered, 0).as_bytes()).ok();
}

/// The handlers of a service: a chain to which [`Service::on`], [`Service::try_on`] and [`Service::defer`] add.
pub trait Handlers<S, U>: Handle<S, U> {}

impl<S, U, H: Handle<S, U>> Handlers<S, U> for H {}

/// The end of the chain.
#[derive(Debug)]
pub struct NoMethods;

/// How a handler runs and answers.
trait Run<M: Method, S, U> {
    fn run(&mut self, state: &mut S, body: M::Request, request: &mut Request<'_, U>) -> Outcome;
}

struct Answer<F>(F);
struct AnswerOrRefuse<F>(F);
struct AnswerLater<F>(F);

impl<M: Method, S, U, F: FnMut(&mut S, M::Request) -> M::Response> Run<M, S, U> for Answer<F> {
    #[inline]
    fn run(&mut self, state: &mut S, body: M::Request, request: &mut Request<'_, U>) -> Outcome {
        answer::<M, U>(request, (self.0)(state, body))
    }
}

impl<M, S, U, F> Run<M, S, U> for AnswerOrRefuse<F>
where
    M: Method,
    F: FnMut(&mut S, M::Request) -> Result<M::Response, Refused>,
{
    #[inline]
    fn run(&mut self, state: &mut S, body: M::Request, request: &mut Request<'_, U>) -> Outcome {
        match (self.0)(state, body) {
            Ok(response) => answer::<M, U>(request, response),
            Err(refused) => answer_status(request, Status::Refused, refused.0, Outcome::Refused),
        }
    }
}

impl<M: Method, S, U, F: FnMut(&mut S, M::Request, Deferred<M, U>)> Run<M, S, U> for AnswerLater<F> {
    #[inline]
    fn run(&mut self, state: &mut S, body: M::Request, request: &mut Request<'_, U>) -> Outcome {
        let mut request = request.defer_in_place();
        request.detach();
        (self.0)(state, body, Deferred { request, of: PhantomData });
        Outcome::Deferred
    }
}

struct On<M, F, H> {
    handler: F,
    rest: H,
    of: PhantomData<fn(M)>,
}

mod sealed {
    use super::Request;

    pub trait Handle<S, U> {
        /// Bytes of the longest request of these methods.
        const MAX_REQUEST: usize;

        fn has(&self, method: u32) -> bool;

        /// Handles a request. `response` is the size of the response that the caller expects; `buffer` has
        /// [`MAX_REQUEST`](Handle::MAX_REQUEST) bytes.
        fn handle(
            &mut self,
            state: &mut S,
            method: u32,
            response: u32,
            request: &mut Request<'_, U>,
            buffer: &mut [u8],
        ) -> Outcome;
    }

    #[derive(Clone, Copy)]
    pub enum Outcome {
        Answered,
        Refused,
        Deferred,
        Unknown,
        Malformed,
        Undelivered,
    }
}

#[inline]
fn answer<M: Method, U>(request: &mut Request<'_, U>, response: M::Response) -> Outcome {
    let frame = Frame { prefix: Prefix::response(Status::Done, 0), body: response };
    match send_reply(frame.as_bytes(), |bytes| request.reply_in_place(bytes)) {
        Ok(()) => Outcome::Answered,
        Err(_) => Outcome::Undelivered,
    }
}

#[cold]
#[inline(never)]
fn answer_status<U>(request: &mut Request<'_, U>, status: Status, code: u32, outcome: Outcome) -> Outcome {
    match request.reply_in_place(Prefix::response(status, code).as_bytes()) {
        Ok(()) => outcome,
        Err(_) => Outcome::Undelivered,
    }
}

impl<S, U> Handle<S, U> for NoMethods {
    const MAX_REQUEST: usize = 0;

    fn has(&self, _: u32) -> bool {
        false
    }

    fn handle(
        &mut self,
        _: &mut S,
        method: u32,
        _: u32,
        request: &mut Request<'_, U>,
        _: &mut [u8],
    ) -> Outcome {
        answer_status(request, Status::UnknownMethod, method, Outcome::Unknown)
    }
}

impl<S, U, M, F, H> Handle<S, U> for On<M, F, H>
where
    M: Method,
    F: Run<M, S, U>,
    H: Handle<S, U>,
{
    const MAX_REQUEST: usize =
        if size_of::<M::Request>() > H::MAX_REQUEST { size_of::<M::Request>() } else { H::MAX_REQUEST };

    fn has(&self, method: u32) -> bool {
        method == M::ID || self.rest.has(method)
    }

    #[inline(always)]
    fn handle(
        &mut self,
        state: &mut S,
        method: u32,
        response: u32,
        request: &mut Request<'_, U>,
        buffer: &mut [u8],
    ) -> Outcome {
        if method != M::ID {
            return self.rest.handle(state, method, response, request, buffer);
        }
        let fits = response as usize == size_of::<M::Response>()
            && request.response_limit() >= response_size::<M>() as u64;
        match request.data().read_from(PREFIX_SIZE, || buffer) {
            Some(body) if fits => {
                // A long response may need the bulk memory that the request has.
                request.detach_bulk();
                self.handler.run(state, body, request)
            }
            _ => answer_status(request, Status::Malformed, 0, Outcome::Malformed),
        }
    }
}
