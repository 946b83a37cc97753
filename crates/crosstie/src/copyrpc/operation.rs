//! READs and WRITEs with a completion of their own: those of bulk payloads, and those that users ask for.
//!
//! Each has a key in its `wr_id`: an index with a generation, so that a completion that comes late or twice opens nothing.

use std::ops::Range;

use crosstie_protocol::key::Key;

use super::connection::{SEND_DEPTH, Sent, wr_id};
use super::endpoint::{Endpoint, EndpointId};
use super::error::{Failure, NotPosted, RawError};
use super::{Context, Counters};
use crate::device::{Access, Data, DeviceError, Mr, PostError, RcQp, RemoteAddr, SendOp, SendWr, Sge};

/// Operations of users that one endpoint has under way at most; the rest of the send queue is for calls.
pub const RAW_DEPTH: usize = SEND_DEPTH as usize / 2;

type OperationKey = Key<10, 30>;

/// What a completion is for.
pub(super) enum Operation {
    /// A piece of the request with this number.
    Read(u64),
    /// A piece of the answer with this number.
    Write(u64),
    /// One that a user asked for. The region is the operation's until it ends.
    Raw { token: u64, region: Mr },
}

/// Operations under way on one connection.
#[derive(Default)]
pub(super) struct Operations {
    slots: Vec<(OperationKey, Option<Operation>)>,
    free: Vec<u32>,
    pub(super) raw: usize,
}

impl Operations {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The key of the next operation.
    fn vacant(&mut self) -> u32 {
        if self.free.is_empty() {
            let index = self.slots.len() as u32;
            self.slots.push((OperationKey::first(index), None));
            self.free.push(index);
        }
        self.free.last().map_or(0, |index| self.slots[*index as usize].0.bits())
    }

    /// The operation with the key that is [vacant](Operations::vacant) was posted.
    fn fill(&mut self, operation: Operation) {
        let Some(index) = self.free.pop() else { return };
        self.raw += usize::from(matches!(operation, Operation::Raw { .. }));
        self.slots[index as usize].1 = Some(operation);
    }

    /// Takes an operation that has ended; `None` if there is none with this key.
    pub(super) fn remove(&mut self, key: u32) -> Option<Operation> {
        let key = OperationKey::from_bits(key);
        let (known, slot) = self.slots.get_mut(key.index() as usize)?;
        let operation = slot.take_if(|_| *known == key)?;
        self.raw -= usize::from(matches!(operation, Operation::Raw { .. }));
        *known = key.next();
        self.free.push(key.index());
        Some(operation)
    }

    /// All that have not ended.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Operation> + '_ {
        self.slots.iter_mut().filter_map(|(_, slot)| slot.take())
    }
}

/// What it takes to post an operation.
pub(super) struct Poster<'c> {
    pub(super) qp: &'c mut RcQp,
    pub(super) outstanding: &'c mut u32,
    pub(super) operations: &'c mut Operations,
    pub(super) counters: &'c mut Counters,
    /// The connection's.
    pub(super) key: u32,
}

impl Poster<'_> {
    pub(super) fn has_room(&self) -> bool {
        *self.outstanding < SEND_DEPTH
    }

    /// Posts a piece of a bulk payload. `false`: there is no room.
    pub(super) fn post(
        &mut self,
        operation: Operation,
        op: SendOp,
        piece: Sge<'_>,
    ) -> Result<bool, PostError> {
        if !self.has_room() {
            return Ok(false);
        }
        match self.request(op, piece) {
            Ok(()) => self.operations.fill(operation),
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Posts what a user asked for; hands the region back if that is refused.
    #[allow(
        clippy::result_large_err,
        reason = "the region comes back, and is large where there are several providers"
    )]
    pub(super) fn post_raw(
        &mut self,
        op: SendOp,
        range: Range<usize>,
        region: Mr,
        token: u64,
    ) -> Result<(), (NotPosted, Mr)> {
        if !self.has_room() || self.operations.raw >= RAW_DEPTH {
            return Err((NotPosted::Full, region));
        }
        let posted = match region.sge(range) {
            Ok(piece) => self.request(op, piece).map_err(NotPosted::from),
            Err(error) => Err(NotPosted::Range(error)),
        };
        match posted {
            Ok(()) => self.operations.fill(Operation::Raw { token, region }),
            Err(cause) => return Err((cause, region)),
        }
        match op {
            SendOp::Read(_) => self.counters.raw_reads += 1,
            _ => self.counters.raw_writes += 1,
        }
        Ok(())
    }

    /// Posts under the key that is vacant.
    fn request(&mut self, op: SendOp, piece: Sge<'_>) -> Result<(), PostError> {
        let (pieces, key) = ([piece], self.operations.vacant());
        let wr = SendWr::new(wr_id(self.key, Sent::Operation(key)), op, Data::Regions(&pieces));
        self.qp.post(&wr.signaled())?;
        *self.outstanding += 1;
        self.counters.work_requests += 1;
        self.counters.signaled += 1;
        Ok(())
    }
}

/// A READ or WRITE that has ended, see [`Endpoint::read`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Finished {
    /// As given.
    pub token: u64,
    /// The endpoint that it went through.
    pub endpoint: EndpointId,
    /// The region, which is the caller's again.
    pub region: Mr,
    /// `Err`: the connection is over. What was asked for may or may not have happened.
    pub result: Result<(), Failure>,
}

impl<U> Context<U> {
    /// Registered memory, zeroed: for [`Endpoint::read`] and [`Endpoint::write`] of this side, or, with the access for it,
    /// of a peer that knows its [address](Mr::remote).
    pub fn allocate(&self, len: usize, access: Access) -> Result<Mr, DeviceError> {
        self.inner.pd.allocate(len, access)
    }

    /// The next READ or WRITE that has ended. Each comes once. [Poll](Context::poll) to see more.
    pub fn take_finished(&self) -> Option<Finished> {
        self.inner.finished.borrow_mut().pop_front()
    }
}

impl<U> Endpoint<U> {
    /// READs from the peer's memory into `range` of the region.
    ///
    /// The region is lent: it comes back from [`Context::take_finished`] with the token, when nothing touches it any
    /// more, or at once with the error. Posted at once, that is, before calls that were not flushed.
    ///
    /// ```
    /// # use crosstie::copyrpc::{Config, Context, EndpointConfig};
    /// # use crosstie::device::{Access, ConnectConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let here = Context::<()>::open(&"software".parse()?, &Config::default())?;
    /// # let there = Context::<()>::open(&"software".parse()?, &Config::default())?;
    /// # let (near, far) = (here.create_endpoint(&EndpointConfig::default())?,
    /// #                    there.create_endpoint(&EndpointConfig::default())?);
    /// # near.connect(&far.address(), &ConnectConfig::default())?;
    /// # far.connect(&near.address(), &ConnectConfig::default())?;
    /// let board = there.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    /// board.write(100, b"posted")?;
    /// let address = board.remote(); // travels to the reader by a call, for example
    ///
    /// let region = here.allocate(4096, Access::LOCAL_WRITE)?;
    /// near.read(region, 0..6, address.at(100), 7)?;
    /// let finished = loop {
    ///     here.poll(|(), _| ());
    ///     if let Some(finished) = here.take_finished() {
    ///         break finished;
    ///     }
    /// };
    /// assert_eq!((finished.token, finished.result), (7, Ok(())));
    /// let mut bytes = [0; 6];
    /// finished.region.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"posted");
    /// # Ok(()) }
    /// ```
    ///
    /// A region that is lent is out of reach:
    ///
    /// ```compile_fail,E0382
    /// # use crosstie::copyrpc::Endpoint;
    /// # use crosstie::device::{Mr, RemoteAddr};
    /// fn f(endpoint: &Endpoint<()>, region: Mr, from: RemoteAddr) {
    ///     endpoint.read(region, 0..8, from, 1).unwrap();
    ///     region.write(0, b"too soon").unwrap();
    /// }
    /// ```
    #[expect(clippy::result_large_err, reason = "the region is handed back, without an allocation")]
    pub fn read(
        &self,
        region: Mr,
        range: Range<usize>,
        from: RemoteAddr,
        token: u64,
    ) -> Result<(), RawError> {
        self.operate(SendOp::Read(from), region, range, token)
    }

    /// WRITEs `range` of the region into the peer's memory; the region is lent as for [`read`](Endpoint::read). The bytes are
    /// there before any call is that is made after this.
    #[expect(clippy::result_large_err, reason = "the region is handed back, without an allocation")]
    pub fn write(&self, region: Mr, range: Range<usize>, to: RemoteAddr, token: u64) -> Result<(), RawError> {
        self.operate(SendOp::Write(to), region, range, token)
    }

    #[expect(clippy::result_large_err, reason = "the region is handed back, without an allocation")]
    fn operate(&self, op: SendOp, region: Mr, range: Range<usize>, token: u64) -> Result<(), RawError> {
        let posted =
            self.connection.operate(op, range, region, token, &mut self.context.counters.borrow_mut());
        // Also if it is full: so that completions are looked at.
        self.context.mark(&self.connection);
        posted.map_err(|(cause, region)| RawError { cause, region, token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_its_operation_once() {
        let mut operations = Operations::default();
        let keys: Vec<u32> = (0..3)
            .map(|number| {
                let key = operations.vacant();
                operations.fill(Operation::Read(number));
                key
            })
            .collect();
        assert_eq!(operations.len(), 3);
        assert!(matches!(operations.remove(keys[1]), Some(Operation::Read(1))));
        assert!(operations.remove(keys[1]).is_none(), "twice");
        let again = operations.vacant();
        operations.fill(Operation::Write(4));
        assert!(operations.remove(keys[1]).is_none(), "of an earlier generation");
        assert!(operations.remove(0x3fff_ffff).is_none());
        assert!(matches!(operations.remove(again), Some(Operation::Write(4))));
        assert_eq!(operations.drain().count(), 2);
    }
}
