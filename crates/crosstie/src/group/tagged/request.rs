//! Sends and receives in flight: futures that give the buffer back.

use core::pin::Pin;
use core::task::{Context, Poll};
use std::time::Duration;

use super::state::{RecvEnd, SendEnd, TaggedState};
use super::{MessageInfo, Tagged, TaggedFailed};
use crate::endpoint::Buffer;
use crate::group::error::GroupError;

#[derive(Debug)]
pub(super) enum SendState {
    /// The buffer, until it is taken.
    Ended(Option<Buffer>),
    Running(u64),
}

/// A send in flight: a future, or [wait](SendRequest::wait) for it. Dropping it lets the send go on; its buffer is then freed at its end.
#[derive(Debug)]
#[must_use = "the buffer comes back with the end of the send"]
pub struct SendRequest {
    pub(super) tagged: Tagged,
    pub(super) state: SendState,
}

fn send_result((result, buffer): SendEnd) -> Result<Buffer, TaggedFailed> {
    match (result, buffer) {
        (Ok(()), Some(buffer)) => Ok(buffer),
        (Ok(()), None) => Err(TaggedFailed { error: GroupError::Busy, buffer: None }),
        (Err(error), buffer) => Err(TaggedFailed { error, buffer }),
    }
}

impl SendRequest {
    /// Waits until the send has ended. Returns the buffer.
    pub fn wait(mut self) -> Result<Buffer, TaggedFailed> {
        match &mut self.state {
            SendState::Ended(buffer) => send_result((Ok(()), buffer.take())),
            SendState::Running(key) => {
                let key = *key;
                match self.tagged.wait_for(None, |tagged| tagged.take_send(key)) {
                    Ok(end) => {
                        self.state = SendState::Ended(None);
                        send_result(end)
                    }
                    Err(error) => Err(TaggedFailed { error, buffer: None }),
                }
            }
        }
    }

    /// Takes the buffer if the send has ended. `None`: it has not.
    pub fn try_take(&mut self) -> Option<Result<Buffer, TaggedFailed>> {
        match &mut self.state {
            SendState::Ended(buffer) => buffer.take().map(Ok),
            SendState::Running(key) => {
                let key = *key;
                let end = self.tagged.with_state(|tagged| tagged.take_send(key)).flatten()?;
                self.state = SendState::Ended(None);
                Some(send_result(end))
            }
        }
    }
}

impl Future for SendRequest {
    type Output = Result<Buffer, TaggedFailed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(result) = self.try_take() {
            return Poll::Ready(result);
        }
        let SendState::Running(key) = self.state else {
            return Poll::Ready(Err(TaggedFailed { error: GroupError::Busy, buffer: None }));
        };
        poll_end(&self.tagged.clone(), |tagged| {
            tagged.set_send_waker(key, context.waker());
            tagged.take_send(key)
        })
        .map(|end| {
            let end = end.map_err(|error| TaggedFailed { error, buffer: None })?;
            self.state = SendState::Ended(None);
            send_result(end)
        })
    }
}

impl Drop for SendRequest {
    fn drop(&mut self) {
        if let SendState::Running(key) = self.state {
            self.tagged.with_state(|tagged| tagged.detach_send(key));
        }
    }
}

/// A receive in flight: a future, or [wait](RecvRequest::wait) for it. Dropping it stops the receive, unless a message has matched it.
#[derive(Debug)]
#[must_use = "the message is in the buffer that the end of the receive gives back"]
pub struct RecvRequest {
    pub(super) tagged: Tagged,
    pub(super) key: Option<u64>,
}

/// A received message and the buffer that it is in.
pub type Received = (MessageInfo, Buffer);

fn recv_result((result, buffer): RecvEnd) -> Result<Received, TaggedFailed> {
    match (result, buffer) {
        (Ok(info), Some(buffer)) => Ok((info, buffer)),
        (Ok(_), None) => Err(TaggedFailed { error: GroupError::Busy, buffer: None }),
        (Err(error), buffer) => Err(TaggedFailed { error, buffer }),
    }
}

impl RecvRequest {
    /// Waits for the message. Returns what it is, and the buffer with its bytes.
    pub fn wait(self) -> Result<Received, TaggedFailed> {
        self.wait_until(None)
    }

    /// As [`RecvRequest::wait`], for at most `timeout`. Afterwards the receive is stopped. If a message has matched it by then, the
    /// message is gone, and the error has no buffer: [`RecvRequest::cancel`] does not lose it.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Received, TaggedFailed> {
        self.wait_until(Some(timeout))
    }

    fn wait_until(mut self, timeout: Option<Duration>) -> Result<Received, TaggedFailed> {
        let Some(key) = self.key.take() else {
            return Err(TaggedFailed { error: GroupError::Busy, buffer: None });
        };
        let waited = self.tagged.wait_for(timeout, |tagged| tagged.take_recv(key));
        waited.map_or_else(
            |error| {
                // It may have ended since.
                let ended = self
                    .tagged
                    .with_state(|tagged| tagged.take_recv(key).ok_or_else(|| tagged.detach_recv(key)));
                match ended.unwrap_or(Err(None)) {
                    Ok(end) => recv_result(end),
                    Err(buffer) => Err(TaggedFailed { error, buffer }),
                }
            },
            recv_result,
        )
    }

    /// Takes the message if it is there. `None`: it is not.
    pub fn try_take(&mut self) -> Option<Result<Received, TaggedFailed>> {
        let key = self.key?;
        let end = self.tagged.with_state(|tagged| tagged.take_recv(key)).flatten()?;
        self.key = None;
        Some(recv_result(end))
    }

    /// Stops the receive and returns its buffer. If a message has matched it, or it has failed, hands it back instead: it ends soon.
    pub fn cancel(mut self) -> Result<Buffer, RecvRequest> {
        let cancel = |key| self.tagged.with_state(|tagged| tagged.cancel_recv(key)).flatten();
        match self.key.and_then(cancel) {
            Some(buffer) => {
                self.key = None;
                Ok(buffer)
            }
            None => Err(self),
        }
    }
}

impl Future for RecvRequest {
    type Output = Result<Received, TaggedFailed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(key) = self.key else {
            return Poll::Ready(Err(TaggedFailed { error: GroupError::Busy, buffer: None }));
        };
        poll_end(&self.tagged.clone(), |tagged| {
            tagged.set_recv_waker(key, context.waker());
            tagged.take_recv(key)
        })
        .map(|end| {
            let end = end.map_err(|error| TaggedFailed { error, buffer: None })?;
            self.key = None;
            recv_result(end)
        })
    }
}

impl Drop for RecvRequest {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.tagged.with_state(|tagged| tagged.detach_recv(key));
        }
    }
}

/// One poll of a future: runs the engine once. `take` returns how the request has ended; if it has not, it registers the waker. Then the
/// group's thread runs the engine from now on.
fn poll_end<T>(
    tagged: &Tagged,
    take: impl FnOnce(&mut TaggedState) -> Option<T>,
) -> Poll<Result<T, GroupError>> {
    let mut engine = tagged.shared.engine();
    engine.progress();
    engine.serve_tagged(tagged.id);
    let failed = engine.failed.clone();
    let end = engine.tagged(tagged.id).and_then(take);
    tagged.shared.release(engine);
    match (end, failed) {
        (Some(end), _) => Poll::Ready(Ok(end)),
        (None, Some(error)) => Poll::Ready(Err(error)),
        (None, None) => {
            tagged.shared.hand_over();
            Poll::Pending
        }
    }
}
