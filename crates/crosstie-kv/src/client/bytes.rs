//! Byte strings, and figures. Keys of 8 bytes and byte strings are two spaces of keys: `get(1)` and `get_bytes(&[1])`, of whatever
//! length, have nothing to do with each other.

use crosstie::ipc;
use zerocopy::FromBytes;

use super::{AttachError, Client, Error, Swap, connect, not_begun, unexpected};
use crate::long::{Call, Request, Response};
use crate::message::Status;
use crate::node::long_name;
use crate::placement::Place;
use crate::store::ShardStats;

impl<T> Client<T> {
    /// The value of a byte string, of at most [`MAX_KEY`](crate::long::MAX_KEY) bytes.
    pub fn get_bytes(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.keyed(Call::Get { key })? {
            (_, Status::Done, value) => Ok(Some(value)),
            (_, Status::NotFound, _) => Ok(None),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Gives a byte string a value, of at most [`MAX_VALUE`](crate::long::MAX_VALUE) bytes.
    pub fn put_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        match self.keyed(Call::Put { key, value })? {
            (_, Status::Done, _) => Ok(()),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Removes a byte string; says whether it was there.
    pub fn delete_bytes(&mut self, key: &[u8]) -> Result<bool, Error> {
        match self.keyed(Call::Delete { key })? {
            (_, Status::Done, _) => Ok(true),
            (_, Status::NotFound, _) => Ok(false),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Gives a byte string a value if it has none; else says which it has.
    pub fn insert_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.keyed(Call::Insert { key, value })? {
            (_, Status::Done, _) => Ok(None),
            (_, Status::Mismatch, value) => Ok(Some(value)),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Gives a byte string a value if it has the expected one.
    pub fn compare_and_swap_bytes(
        &mut self,
        key: &[u8],
        expected: &[u8],
        value: &[u8],
    ) -> Result<Swap<Vec<u8>>, Error> {
        match self.keyed(Call::CompareAndSwap { key, expected, value })? {
            (_, Status::Done, _) => Ok(Swap::Done),
            (_, Status::Mismatch, value) => Ok(Swap::Mismatch(value)),
            (_, Status::NotFound, _) => Ok(Swap::NotFound),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Figures of the shard of a daemon of a node.
    pub fn stats(&mut self, rank: u32, daemon: u32) -> Result<ShardStats, Error> {
        let (rank, status, value) = self.exchange_long(Place { rank, daemon }, Call::Stats)?;
        match ShardStats::read_from_bytes(&value) {
            Ok(stats) if status == Status::Done => Ok(stats),
            _ => Err(unexpected(rank, status)),
        }
    }

    fn keyed(&mut self, call: Call<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let place = self.placement.of_bytes(call.key().unwrap_or_default());
        self.exchange_long(place, call)
    }

    fn exchange_long(&mut self, place: Place, call: Call<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let Place { rank, daemon } = place;
        Request { rank, daemon, call }.encode(&mut self.scratch)?;
        let local = rank == self.info.rank;
        let daemon = if local { daemon } else { self.info.backend.holder(rank, self.info.daemons) };
        let Some(lane) = self.long.get_mut(daemon as usize) else {
            // There is no such daemon, or there is no node.
            return Err(if self.long.is_empty() {
                Error::ServerGone
            } else {
                unexpected(rank, Status::Misrouted)
            });
        };
        let lane = match lane {
            Some(lane) => lane,
            None => {
                let connected = connect(&self.name, long_name(&self.name, daemon), ipc::Client::connect);
                let connected = connected.map_err(|error| match error {
                    AttachError::Connect { cause: ipc::ConnectError::Full { .. }, .. } => Error::Full,
                    _ => Error::ServerGone,
                });
                lane.insert(connected?.with_waiting(self.waiting))
            }
        };
        let answer = lane.exchange(&self.scratch, |answer| {
            Response::decode(answer).map(|response| (rank, response.status, response.value.to_vec()))
        });
        match answer {
            Ok(answer) => Ok(answer.unwrap_or((rank, Status::Malformed, Vec::new()))),
            Err(error) => Err(not_begun(error)),
        }
    }
}
