//! Keys and values of 8 bytes, one operation at a time.

use super::{Client, Error, SwapOutcome, failed, unexpected};
use crate::wire::{Op, Status, WordRequest, WordResponse};

/// One at a time. Operations with tokens that are under way stay so. Each ends within the client's
/// [timeout](Client::set_timeout).
impl<T> Client<T> {
    /// The value of a key.
    pub fn get(&mut self, key: u64) -> Result<Option<u64>, Error> {
        match self.exchange(WordRequest::new(Op::Get, 0, key))? {
            (_, WordResponse { status: Status::Done, value, .. }) => Ok(Some(value)),
            (_, WordResponse { status: Status::NotFound, .. }) => Ok(None),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value.
    pub fn put(&mut self, key: u64, value: u64) -> Result<(), Error> {
        match self.exchange(WordRequest { value, ..WordRequest::new(Op::Put, 0, key) })? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(()),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Removes a key; says whether it was there.
    pub fn delete(&mut self, key: u64) -> Result<bool, Error> {
        match self.exchange(WordRequest::new(Op::Delete, 0, key))? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(true),
            (_, WordResponse { status: Status::NotFound, .. }) => Ok(false),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has none; else says which it has.
    pub fn insert(&mut self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        match self.exchange(WordRequest { value, ..WordRequest::new(Op::Insert, 0, key) })? {
            (_, WordResponse { status: Status::Done, .. }) => Ok(None),
            (_, WordResponse { status: Status::Mismatch, value, .. }) => Ok(Some(value)),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has the expected one.
    ///
    /// Several clients that count together, each again and again until nobody was faster:
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
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    #[inline]
    fn exchange(&mut self, request: WordRequest) -> Result<(u32, WordResponse), Error> {
        let place = self.shard_map.shard_of_word(request.key);
        let request = WordRequest { rank: place.rank, ..request };
        let timeout = Some(self.timeout);
        let is_local = place.rank == self.info.rank;
        let answer = match &mut self.ring {
            Some(ring) if !is_local => ring.exchange_within(&request, timeout, |response| *response),
            _ => {
                let daemon = if is_local { place.daemon as usize } else { self.home };
                let lane = self.words.get_mut(daemon).ok_or(Error::ServerGone)?;
                lane.exchange_within(&request, timeout, |response| *response)
            }
        };
        Ok((place.rank, answer.map_err(|error| failed(place.rank, error))?))
    }
}
