//! Futures: the user's handle of an operation.

use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

use super::cause::{Cause, Peer, SUCCESS};
use super::lend::{Lend, sealed};
use super::operation::{Kind, Operation};
use super::returned::{Item, Message};
use super::shared::Shared;
use crate::ring::operation_table::FutureSide;

/// An operation that has succeeded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completed<B> {
    /// What was lent to the operation.
    pub buffer: B,
    /// Bytes that were moved. For `recv` the length of the message; for `imm_recv` the bytes that the WRITE+IMM wrote.
    pub bytes: u64,
    /// The immediate, for `imm_recv`.
    pub imm: Option<u32>,
}

/// An operation that has ended without success.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failed<B: Lend> {
    /// Why.
    pub cause: Cause,
    /// The peer of the connection that the operation was on.
    pub peer: Option<Peer>,
    /// What was lent to the operation. It comes back when the device does not touch it any more.
    pub buffer: BufferReturn<B>,
}

impl<B: Lend> fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)?;
        if let Some(peer) = &self.peer {
            write!(f, " ({peer})")?;
        }
        f.write_str(if self.cause.is_retryable() { "; it can be tried again" } else { "" })
    }
}

impl<B: Lend + fmt::Debug> std::error::Error for Failed<B> {}

/// The result of an operation.
pub type OperationResult<B> = Result<Completed<B>, Failed<B>>;

/// An operation in flight. It is a future for any executor; without one, [`wait`](OperationFuture::wait) for it, or
/// [look](OperationFuture::try_take) now and then.
///
/// Dropping it cancels the operation, as [`cancel`](OperationFuture::cancel) does; its buffer is freed when the device does not touch
/// it any more. [`detach`](OperationFuture::detach) lets the operation go on.
#[must_use = "a future that is dropped cancels its operation"]
pub struct OperationFuture<B: Lend>(Inner<B>);

enum Inner<B: Lend> {
    /// It had completed before it got a future. `None` after the result was taken.
    Completed(Option<Completed<B>>),
    InFlight(Handle),
}

/// The future's side, and the endpoint that it belongs to.
struct Handle {
    shared: Arc<Shared>,
    /// `None` after the result was taken.
    side: Option<FutureSide>,
}

impl<B: Lend> OperationFuture<B> {
    #[inline]
    pub(super) fn in_flight(shared: &Arc<Shared>, side: FutureSide) -> OperationFuture<B> {
        OperationFuture(Inner::InFlight(Handle { shared: shared.clone(), side: Some(side) }))
    }

    #[inline]
    pub(super) fn completed(completed: Completed<B>) -> OperationFuture<B> {
        OperationFuture(Inner::Completed(Some(completed)))
    }

    /// Whether the operation has ended.
    #[inline]
    pub fn is_ended(&self) -> bool {
        match &self.0 {
            Inner::Completed(result) => result.is_some(),
            Inner::InFlight(handle) => handle.is_ended(),
        }
    }

    /// Takes the result if the operation has ended. `None`: it has not, or the result was taken before.
    #[inline]
    pub fn try_take(&mut self) -> Option<OperationResult<B>> {
        match &mut self.0 {
            Inner::Completed(result) => result.take().map(Ok),
            Inner::InFlight(handle) => handle.take_result(),
        }
    }

    /// Waits until the operation has ended. Polls the device meanwhile. Any [deadline](super::EndpointConfig::deadline) of the
    /// operation ends the wait as well.
    #[inline]
    pub fn wait(mut self) -> OperationResult<B> {
        loop {
            if let Some(result) = self.try_take() {
                return result;
            }
            self.wait_until(None);
        }
    }

    /// As [`wait`](OperationFuture::wait), for at most `timeout`. Hands the future back if the operation has not ended then; the
    /// operation goes on.
    pub fn wait_for(mut self, timeout: Duration) -> Result<OperationResult<B>, Self> {
        self.wait_until(Instant::now().checked_add(timeout));
        match self.try_take() {
            Some(result) => Ok(result),
            None => Err(self),
        }
    }

    fn wait_until(&self, deadline: Option<Instant>) {
        if let Inner::InFlight(handle) = &self.0 {
            handle.wait_until(deadline, false);
        }
    }

    /// Ends the operation with [`Cause::Cancelled`], unless it has ended. The device may still carry it out. Its buffer comes back
    /// when the device does not touch it any more.
    pub fn cancel(&self) {
        if let Inner::InFlight(handle) = &self.0 {
            handle.cancel();
        }
    }

    /// Lets the operation go on without anybody looking at its result. Its buffer is freed at its end.
    pub fn detach(mut self) {
        if let Inner::InFlight(handle) = &mut self.0 {
            handle.let_go();
        }
    }
}

impl<B: Lend> Future for OperationFuture<B> {
    type Output = OperationResult<B>;

    /// # Panics
    ///
    /// If it is polled after it has returned its result.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Inner::InFlight(handle) = &mut self.0
            && !handle.is_ended()
        {
            handle.shared.assist();
            let Some(side) = &handle.side else { panic!("polled after its result was taken") };
            if side.set_waker(&handle.shared.table, context.waker(), false) {
                return Poll::Pending;
            }
        }
        match self.try_take() {
            Some(result) => Poll::Ready(result),
            None => panic!("polled after its result was taken"),
        }
    }
}

// Nothing is pinned inside.
impl<B: Lend> Unpin for OperationFuture<B> {}

impl Drop for Handle {
    /// Of a future: cancels its operation. A [`BufferReturn`] is of an operation that has ended.
    #[inline]
    fn drop(&mut self) {
        if self.side.is_some() {
            self.cancel();
            self.keep_result();
            self.let_go();
        }
    }
}

impl<B: Lend> fmt::Debug for OperationFuture<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationFuture").field("is_ended", &self.is_ended()).finish_non_exhaustive()
    }
}

impl Handle {
    #[inline]
    fn is_ended(&self) -> bool {
        self.side.as_ref().is_some_and(|side| side.word(&self.shared.table).is_ended())
    }

    fn is_back(&self) -> bool {
        self.side.as_ref().is_none_or(|side| side.word(&self.shared.table).is_back())
    }

    fn cancel(&self) {
        if let Some(side) = &self.side
            && self.shared.table.end(side.key(), Cause::Cancelled.encode())
        {
            self.shared.reap_soon();
        }
    }

    /// An immediate or a message that arrived for this future, and that nobody has looked at, goes to the next `imm_recv` or `recv`.
    fn keep_result(&mut self) {
        let Some(side) = self.side.take() else { return };
        if Cause::decode(side.word(&self.shared.table).cause()).is_some() {
            self.side = Some(side);
            return;
        }
        match side.take(&self.shared.table) {
            Ok(operation) => {
                let item = match (operation.kind, operation.imm) {
                    (Kind::ImmRecv, Some(imm)) => {
                        Item::Event(ImmEvent { imm, bytes: operation.bytes as u32 })
                    }
                    (Kind::Recv(sequence), _) => {
                        Item::Message(Message { sequence, bytes: operation.message(operation.bytes) })
                    }
                    _ => return,
                };
                self.shared.put_back(item);
            }
            Err(side) => self.side = Some(side),
        }
    }

    fn let_go(&mut self) {
        if let Some(side) = self.side.take() {
            side.let_go(&self.shared.table);
        }
    }

    /// Takes the result, if the operation has ended.
    #[inline]
    fn take_result<B: Lend>(&mut self) -> Option<OperationResult<B>> {
        let word = self.side.as_ref()?.word(&self.shared.table);
        if !word.is_ended() {
            return None;
        }
        if word.cause() != SUCCESS {
            return self.take_failure(word.cause());
        }
        match self.side.take()?.take(&self.shared.table) {
            Ok(operation) => complete(operation).map(Ok),
            Err(side) => {
                // Success and the return of the memory are one step, so this does not happen.
                self.side = Some(side);
                None
            }
        }
    }

    #[cold]
    fn take_failure<B: Lend>(&mut self, code: u16) -> Option<OperationResult<B>> {
        let cause = Cause::decode(code)?;
        let handle = Handle { shared: self.shared.clone(), side: Some(self.side.take()?) };
        let mut buffer = BufferReturn { handle, ready: None };
        buffer.look();
        Some(Err(Failed { cause, peer: self.shared.peer(), buffer }))
    }

    fn wait_until(&self, deadline: Option<Instant>, for_back: bool) {
        let done = || if for_back { self.is_back() } else { self.side.is_none() || self.is_ended() };
        let wake = |waker: &core::task::Waker| {
            self.side.as_ref().is_some_and(|side| side.set_waker(&self.shared.table, waker, for_back))
        };
        self.shared.wait(deadline, done, wake);
    }
}

/// The result of an operation that has completed. There is one: the operation has what `B` was stored as.
#[inline]
fn complete<B: Lend>(operation: Operation) -> Option<Completed<B>> {
    let Operation { stored, bytes, imm, .. } = operation;
    Some(Completed { buffer: <B as sealed::Lend>::restore(stored)?, bytes, imm })
}

/// The buffer of an operation that has ended without success. It comes back when the device does not touch it any more: when its work
/// requests have completed, or when the queue pairs are in ERR and drained, see [`Endpoint::close`](super::Endpoint::close).
///
/// Dropping this is safe: the endpoint keeps the buffer until then, and frees it.
pub struct BufferReturn<B: Lend> {
    handle: Handle,
    ready: Option<B>,
}

impl<B: Lend> BufferReturn<B> {
    fn look(&mut self) {
        if let Some(side) = self.handle.side.take() {
            match side.take(&self.handle.shared.table) {
                Ok(operation) => self.ready = <B as sealed::Lend>::restore(operation.stored),
                Err(side) => self.handle.side = Some(side),
            }
        }
    }

    /// Takes the buffer, if it has come back.
    pub fn try_take(&mut self) -> Option<B> {
        if self.ready.is_none() {
            self.handle.shared.assist();
            self.look();
        }
        self.ready.take()
    }

    /// Waits until the buffer has come back, for at most `timeout`.
    pub fn wait_for(mut self, timeout: Duration) -> Result<B, Self> {
        if self.ready.is_none() {
            self.handle.wait_until(Instant::now().checked_add(timeout), true);
        }
        self.try_take().ok_or(self)
    }
}

impl<B: Lend> Future for BufferReturn<B> {
    type Output = B;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<B> {
        let this = &mut *self;
        match this.try_take() {
            Some(buffer) => return Poll::Ready(buffer),
            None => {
                let Some(side) = &this.handle.side else { panic!("polled after the buffer was taken") };
                if side.set_waker(&this.handle.shared.table, context.waker(), true) {
                    return Poll::Pending;
                }
            }
        }
        match this.try_take() {
            Some(buffer) => Poll::Ready(buffer),
            None => panic!("polled after the buffer was taken"),
        }
    }
}

// Nothing is pinned inside.
impl<B: Lend> Unpin for BufferReturn<B> {}

impl<B: Lend> fmt::Debug for BufferReturn<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferReturn").field("is_back", &self.handle.is_back()).finish_non_exhaustive()
    }
}

/// Waits for several operations: a future of all their results, in the order of the operations.
///
/// ```
/// # use crosstie::endpoint::{Endpoint, EndpointConfig, join_all};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
/// # let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
/// # here.connect(&there.address())?;
/// # there.connect(&here.address())?;
/// let target = there.allocate(4096)?;
/// let mut writes = Vec::new();
/// for part in 0..4 {
///     writes.push(here.write(here.allocate(1024)?, .., &target.remote(), part * 1024)?);
/// }
/// assert!(join_all(writes).wait().iter().all(|result| result.is_ok()));
/// # Ok(()) }
/// ```
pub fn join_all<B: Lend>(futures: impl IntoIterator<Item = OperationFuture<B>>) -> JoinAll<B> {
    let futures: Vec<_> = futures.into_iter().map(Ok).collect();
    JoinAll { futures }
}

/// See [`join_all`].
#[derive(Debug)]
#[must_use = "futures that are dropped cancel their operations"]
pub struct JoinAll<B: Lend> {
    futures: Vec<Result<OperationFuture<B>, OperationResult<B>>>,
}

impl<B: Lend> JoinAll<B> {
    /// Waits until all operations have ended.
    pub fn wait(self) -> Vec<OperationResult<B>> {
        let ended = self.futures.into_iter().map(|future| match future {
            Ok(future) => future.wait(),
            Err(result) => result,
        });
        ended.collect()
    }
}

impl<B: Lend> Future for JoinAll<B> {
    type Output = Vec<OperationResult<B>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut all_ended = true;
        for entry in &mut self.futures {
            if let Ok(future) = entry {
                match Pin::new(future).poll(context) {
                    Poll::Ready(result) => *entry = Err(result),
                    Poll::Pending => all_ended = false,
                }
            }
        }
        if !all_ended {
            return Poll::Pending;
        }
        let ended = core::mem::take(&mut self.futures);
        Poll::Ready(ended.into_iter().filter_map(Result::err).collect())
    }
}

impl<B: Lend> Unpin for JoinAll<B> {}
