//! Keys and values of 8 bytes, one operation at a time.

use super::{Client, Error, Swap, failed, unexpected};
use crate::message::{Op, Request, Response, Status};

/// One at a time. Operations with tokens that are under way stay so. Each ends within the client's
/// [timeout](Client::set_timeout).
impl<T> Client<T> {
    /// The value of a key.
    pub fn get(&mut self, key: u64) -> Result<Option<u64>, Error> {
        match self.exchange(Request::new(Op::Get, 0, key))? {
            (_, Response { status: Status::Done, value, .. }) => Ok(Some(value)),
            (_, Response { status: Status::NotFound, .. }) => Ok(None),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value.
    pub fn put(&mut self, key: u64, value: u64) -> Result<(), Error> {
        match self.exchange(Request { value, ..Request::new(Op::Put, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(()),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Removes a key; says whether it was there.
    pub fn delete(&mut self, key: u64) -> Result<bool, Error> {
        match self.exchange(Request::new(Op::Delete, 0, key))? {
            (_, Response { status: Status::Done, .. }) => Ok(true),
            (_, Response { status: Status::NotFound, .. }) => Ok(false),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has none; else says which it has.
    pub fn insert(&mut self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        match self.exchange(Request { value, ..Request::new(Op::Insert, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(None),
            (_, Response { status: Status::Mismatch, value, .. }) => Ok(Some(value)),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has the expected one.
    ///
    /// Several clients that count together, each again and again until nobody was faster:
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// use crosstie_kv::client::{Client, Error, Swap};
    ///
    /// fn increment(client: &mut Client, key: u64) -> Result<u64, Error> {
    ///     let mut count = client.insert(key, 0)?.unwrap_or(0);
    ///     loop {
    ///         match client.compare_and_swap(key, count, count + 1)? {
    ///             Swap::Done => return Ok(count + 1),
    ///             Swap::Mismatch(other) => count = other,
    ///             Swap::NotFound => count = client.insert(key, 0)?.unwrap_or(0),
    ///         }
    ///     }
    /// }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::alone("doc-swap"))?;
    /// let mut client = Client::attach("doc-swap")?;
    /// assert_eq!((increment(&mut client, 5)?, increment(&mut client, 5)?), (1, 2));
    /// # Ok(()) }
    /// ```
    pub fn compare_and_swap(&mut self, key: u64, expected: u64, value: u64) -> Result<Swap<u64>, Error> {
        match self.exchange(Request { value, expected, ..Request::new(Op::CompareAndSwap, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(Swap::Done),
            (_, Response { status: Status::Mismatch, value, .. }) => Ok(Swap::Mismatch(value)),
            (_, Response { status: Status::NotFound, .. }) => Ok(Swap::NotFound),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    #[inline]
    fn exchange(&mut self, request: Request) -> Result<(u32, Response), Error> {
        let place = self.placement.of_word(request.key);
        let request = Request { rank: place.rank, ..request };
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
