//! A service: a state, and a handler for each method.

use std::marker::PhantomData;

use zerocopy::{FromBytes, IntoBytes, TryFromBytes};

use super::error::Refused;
use super::method::{Frame, Method, PREFIX, Prefix, Status, answer_size};
use crate::copyrpc::{Context, Failure, NotReplied, RecvHandle};
use sealed::{Handle, Incoming, Outcome};

/// Handlers over a state.
///
/// Methods are found by comparing numbers, the one added last first; handlers are called directly, and compiled into the
/// loop that takes requests.
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
/// A handler answers with what its method says:
///
/// ```compile_fail,E0308
/// # use crosstie::copyrpc::service::{Method, Service};
/// # struct Get; impl Method for Get { const ID: u32 = 2; type Request = (); type Response = u64; }
/// let service = Service::<u64, ()>::new(0).on::<Get>(|counter, ()| "one");
/// ```
pub struct Service<S, U, H = NoMethods> {
    state: S,
    handlers: H,
    /// Where requests are copied out of the ring.
    request: Box<[u8]>,
    counters: ServiceCounters,
    of: PhantomData<fn(U)>,
}

/// What a service has done so far. Every request is counted once, unless its handler panicked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceCounters {
    /// Requests answered by their handlers.
    pub answered: u64,
    /// Requests that their handlers refused.
    pub refused: u64,
    /// Requests that went to handlers that answer later.
    pub deferred: u64,
    /// Requests for methods that the service does not have.
    pub unknown: u64,
    /// Requests that made no sense.
    pub malformed: u64,
    /// Requests whose answers nobody waited for any more: the connection was over.
    pub undelivered: u64,
}

impl<S, U> Service<S, U> {
    /// A service without methods.
    pub fn new(state: S) -> Service<S, U> {
        Service::with(state, NoMethods)
    }
}

impl<S, U, H: Handlers<S, U>> Service<S, U, H> {
    /// Answers a method at once.
    ///
    /// # Panics
    ///
    /// If there is a handler of that number already. So do the other two.
    pub fn on<M: Method>(
        self,
        mut handler: impl FnMut(&mut S, M::Request) -> M::Response,
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M>(move |state, request, reply| match reply.send(handler(state, request)) {
            Ok(()) => Outcome::Answered,
            Err(_) => Outcome::Undelivered,
        })
    }

    /// Answers a method at once, or refuses.
    pub fn try_on<M: Method>(
        self,
        mut handler: impl FnMut(&mut S, M::Request) -> Result<M::Response, Refused>,
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M>(move |state, request, reply| match handler(state, request) {
            Ok(response) => reply.send(response).map_or(Outcome::Undelivered, |()| Outcome::Answered),
            Err(refused) => reply.refuse(refused).map_or(Outcome::Undelivered, |()| Outcome::Refused),
        })
    }

    /// Answers a method whenever, and in whatever order, the handler or whoever it hands the [`Deferred`] to likes.
    pub fn defer<M: Method>(
        self,
        mut handler: impl FnMut(&mut S, M::Request, Deferred<M, U>),
    ) -> Service<S, U, impl Handlers<S, U>> {
        self.add::<M>(move |state, request, reply| {
            handler(state, request, reply);
            Outcome::Deferred
        })
    }

    fn add<M: Method>(
        self,
        handler: impl FnMut(&mut S, M::Request, Deferred<M, U>) -> Outcome,
    ) -> Service<S, U, impl Handlers<S, U>> {
        assert!(!self.handlers.has(M::ID), "two handlers for method {}", M::ID);
        Service::with(self.state, On { handler, rest: self.handlers, of: PhantomData::<fn(M)> })
    }
}

impl<S, U, H> Service<S, U, H> {
    fn with(state: S, handlers: H) -> Self
    where
        H: Handlers<S, U>,
    {
        let request = vec![0; PREFIX + H::LONGEST].into();
        Service { state, handlers, request, counters: ServiceCounters::default(), of: PhantomData }
    }

    /// Answers all requests that have come; says how many there were. Something must
    /// [poll](Context::poll) the context for requests to come and for answers to go.
    ///
    /// If a handler panics, its caller gets [`Unanswered`](super::Error::Unanswered), and the service can go on.
    #[inline]
    pub fn serve(&mut self, context: &Context<U>) -> usize
    where
        H: Handlers<S, U>,
    {
        let mut requests = 0;
        while let Some(request) = context.recv() {
            self.take(request);
            requests += 1;
        }
        requests
    }

    #[inline]
    fn take(&mut self, mut handle: RecvHandle<U>)
    where
        H: Handlers<S, U>,
    {
        let len = handle.data().len();
        let copied = handle.data().copy_to(&mut self.request);
        // All that is needed of it is here: the ring can have its place back.
        handle.detach();
        let outcome = match Prefix::read_from_prefix(&self.request[..copied]) {
            Ok((prefix, body)) => {
                let (method, response) = (prefix.head.get(), prefix.detail.get());
                let incoming = Incoming { handle, body, is_whole: copied == len, response };
                self.handlers.handle(&mut self.state, method, incoming)
            }
            Err(_) => answer_without(handle, Status::Malformed, 0)
                .map_or(Outcome::Undelivered, |()| Outcome::Malformed),
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

    /// The state, for a program that does things between requests.
    pub fn state_mut(&mut self) -> &mut S {
        &mut self.state
    }

    /// What happened so far.
    pub fn counters(&self) -> ServiceCounters {
        self.counters
    }
}

/// A request that is to be answered later. Dropping it tells the caller that there is
/// [no answer](super::Error::Unanswered).
///
/// It can be answered once:
///
/// ```compile_fail,E0382
/// # use crosstie::copyrpc::service::{Deferred, Method};
/// fn twice<M: Method<Response = u64>, U>(reply: Deferred<M, U>) {
///     reply.send(1).ok();
///     reply.send(2).ok();
/// }
/// ```
///
/// and with what its method says:
///
/// ```compile_fail,E0308
/// # use crosstie::copyrpc::service::{Deferred, Method};
/// fn wrong<M: Method<Response = u64>, U>(reply: Deferred<M, U>) {
///     reply.send(1u32).ok();
/// }
/// ```
#[must_use = "dropping it tells the caller that there is no answer"]
pub struct Deferred<M, U> {
    handle: Option<RecvHandle<U>>,
    of: PhantomData<fn(M)>,
}

impl<M: Method, U> Deferred<M, U> {
    /// Answers. Goes out with the next poll of the context. An error says that nobody waits any more.
    ///
    /// Values are meant to fit the ring. One that does not goes by bulk memory; while that is in use, the caller is told
    /// that there is no answer.
    #[inline]
    pub fn send(mut self, response: M::Response) -> Result<(), Failure> {
        let frame = Frame { prefix: Prefix::response(Status::Done, 0), body: response };
        self.handle.take().map_or(Err(Failure::Closed), |handle| answer(handle, frame.as_bytes()))
    }

    /// Refuses. As for [`send`](Deferred::send).
    pub fn refuse(mut self, refused: Refused) -> Result<(), Failure> {
        let handle = self.handle.take();
        handle.map_or(Err(Failure::Closed), |handle| answer_without(handle, Status::Refused, refused.0))
    }
}

impl<M, U> Drop for Deferred<M, U> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            // If the connection is over, there is nobody to tell.
            answer_without(handle, Status::Unanswered, 0).ok();
        }
    }
}

fn answer_without<U>(handle: RecvHandle<U>, status: Status, code: u32) -> Result<(), Failure> {
    answer(handle, Prefix::response(status, code).as_bytes())
}

#[inline]
fn answer<U>(handle: RecvHandle<U>, bytes: &[u8]) -> Result<(), Failure> {
    match handle.reply(bytes) {
        Ok(()) => Ok(()),
        Err((NotReplied::Failed(failure), _)) => Err(failure),
        // A value that no ring holds, when there is no bulk memory for it: the caller is told that there is no answer.
        Err((NotReplied::NoBulkMemory | NotReplied::NoMemory, Some(handle))) => {
            answer_without(handle, Status::Unanswered, 0)
        }
        // The caller left no room even to tell it so, and gets nothing: the request, dropped, is answered empty.
        Err((NotReplied::TooLong { .. } | NotReplied::NoBulkMemory | NotReplied::NoMemory, _)) => Ok(()),
    }
}

/// The handlers of a service: a chain of what [`Service::on`] and its kind add.
pub trait Handlers<S, U>: Handle<S, U> {}

impl<S, U, H: Handle<S, U>> Handlers<S, U> for H {}

/// The end of the chain.
#[derive(Debug)]
pub struct NoMethods;

struct On<M, F, H> {
    handler: F,
    rest: H,
    of: PhantomData<fn(M)>,
}

mod sealed {
    use super::RecvHandle;

    pub trait Handle<S, U> {
        /// Bytes of the longest request that is for one of them.
        const LONGEST: usize;

        fn has(&self, method: u32) -> bool;
        fn handle(&mut self, state: &mut S, method: u32, incoming: Incoming<'_, U>) -> Outcome;
    }

    /// A request, copied out.
    pub struct Incoming<'b, U> {
        pub(super) handle: RecvHandle<U>,
        pub(super) body: &'b [u8],
        /// What came is in `body`; otherwise it is longer than any request of this service.
        pub(super) is_whole: bool,
        /// Bytes of the answer that the caller is ready to take.
        pub(super) response: u32,
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

impl<S, U> Handle<S, U> for NoMethods {
    const LONGEST: usize = 0;

    fn has(&self, _: u32) -> bool {
        false
    }

    fn handle(&mut self, _: &mut S, method: u32, incoming: Incoming<'_, U>) -> Outcome {
        let answered = answer_without(incoming.handle, Status::UnknownMethod, method);
        answered.map_or(Outcome::Undelivered, |()| Outcome::Unknown)
    }
}

impl<S, U, M, F, H> Handle<S, U> for On<M, F, H>
where
    M: Method,
    F: FnMut(&mut S, M::Request, Deferred<M, U>) -> Outcome,
    H: Handle<S, U>,
{
    const LONGEST: usize =
        if size_of::<M::Request>() > H::LONGEST { size_of::<M::Request>() } else { H::LONGEST };

    fn has(&self, method: u32) -> bool {
        method == M::ID || self.rest.has(method)
    }

    #[inline]
    fn handle(&mut self, state: &mut S, method: u32, incoming: Incoming<'_, U>) -> Outcome {
        if method != M::ID {
            return self.rest.handle(state, method, incoming);
        }
        let Incoming { handle, body, is_whole, response } = incoming;
        let fits = is_whole
            && response as usize == size_of::<M::Response>()
            && handle.response_limit() >= answer_size::<M>() as u64;
        match M::Request::try_read_from_bytes(body) {
            Ok(request) if fits => {
                (self.handler)(state, request, Deferred { handle: Some(handle), of: PhantomData })
            }
            _ => answer_without(handle, Status::Malformed, 0)
                .map_or(Outcome::Undelivered, |()| Outcome::Malformed),
        }
    }
}
