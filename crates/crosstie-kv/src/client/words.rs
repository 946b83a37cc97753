//! Operations on 8-byte keys, one at a time.

use super::{Client, Error, SwapOutcome, no_response_error, status_error};
use crate::wire::{Op, Status, WordRequest, WordResponse};

/// One operation at a time. Each returns within the client's [timeout](Client::set_timeout). Pipelined operations in flight are not
/// affected.
impl<T> Client<T> {
    /// Returns the value of a key, or `None` if the key does not exist.
    pub fn get(&mut self, key: u64) -> Result<Option<u64>, Error> {
        match self.exchange(WordRequest::new(Op::Get, 0, key))? {
            (_, WordResponse { status: Status::Done, value, .. }) => Ok(Some(value)),
            (_, WordResponse { status: Status::NotFound, .. }) => Ok(None),
            (rank, response) => Err(status_error(rank, response.status)),
        }
    }

    /// Stores a value under a key.
    pub fn put(&mut self, key: u64, value: u64) -> Result<(), Error> {
        match self.exchange(WordRequest { value, ..WordRequest::new(Op::Put, 0, key) })? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(()),
            (rank, response) => Err(status_error(rank, response.status)),
        }
    }

    /// Removes a key. Returns whether it existed.
    pub fn delete(&mut self, key: u64) -> Result<bool, Error> {
        match self.exchange(WordRequest::new(Op::Delete, 0, key))? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(true),
            (_, WordResponse { status: Status::NotFound, .. }) => Ok(false),
            (rank, response) => Err(status_error(rank, response.status)),
        }
    }

    /// Stores a value under a key that does not exist. Returns `None`, or the current value of a key that exists.
    pub fn insert(&mut self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        match self.exchange(WordRequest { value, ..WordRequest::new(Op::Insert, 0, key) })? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(None),
            (_, WordResponse { status: Status::Mismatch, value, .. }) => Ok(Some(value)),
            (rank, response) => Err(status_error(rank, response.status)),
        }
    }

    /// Stores a value under a key whose current value is `expected`.
    ///
    /// A counter that several clients share. Each retries until no other client was faster:
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// use crosstie_kv::client::{Client, Error, SwapOutcome};
    ///
    /// fn increment(client: &mut Client, key: u64) -> Result<u64, Error> {
    ///     let mut count = client.insert(key, 0)?.unwrap_or(0);
    ///     loop {
    ///         match client.compare_and_swap(key, count, count + 1)? {
    ///             SwapOutcome::Done => return Ok(count + 1),
    ///             SwapOutcome::Mismatch(other) => count = other,
    ///             SwapOutcome::NotFound => count = client.insert(key, 0)?.unwrap_or(0),
    ///         }
    ///     }
    /// }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::single("doc-swap"))?;
    /// let mut client = Client::attach("doc-swap")?;
    /// assert_eq!((increment(&mut client, 5)?, increment(&mut client, 5)?), (1, 2));
    /// # Ok(()) }
    /// ```
    pub fn compare_and_swap(
        &mut self,
        key: u64,
        expected: u64,
        value: u64,
    ) -> Result<SwapOutcome<u64>, Error> {
        match self.exchange(WordRequest {
            value,
            expected,
            ..WordRequest::new(Op::CompareAndSwap, 0, key)
        })? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(SwapOutcome::Done),
            (_, WordResponse { status: Status::Mismatch, value, .. }) => Ok(SwapOutcome::Mismatch(value)),
            (_, WordResponse { status: Status::NotFound, .. }) => Ok(SwapOutcome::NotFound),
            (rank, response) => Err(status_error(rank, response.status)),
        }
    }

    #[inline]
    fn exchange(&mut self, request: WordRequest) -> Result<(u32, WordResponse), Error> {
        let shard = self.shard_map.shard_of_word(request.key);
        let request = WordRequest { rank: shard.rank, ..request };
        let timeout = Some(self.timeout);
        let is_local = shard.rank == self.info.rank;
        let response = match self.rings.get_mut(shard.daemon as usize) {
            Some(ring) if !is_local => ring.exchange_within(&request, timeout, |response| *response),
            _ => {
                let daemon = if is_local { shard.daemon as usize } else { self.home };
                let lane = self.words.get_mut(daemon).ok_or(Error::ServerGone)?;
                lane.exchange_within(&request, timeout, |response| *response)
            }
        };
        Ok((shard.rank, response.map_err(|error| no_response_error(shard.rank, error))?))
    }
}
