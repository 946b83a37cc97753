//! Byte strings, and figures. Keys of 8 bytes and byte strings are two spaces of keys: `get(1)` and `get_bytes(&[1])`, of whatever
//! length, have nothing to do with each other.

use crosstie::ipc;
use zerocopy::FromBytes;

use super::{
    AttachError, BeginBytesError, BeginError, Client, Deadline, Error, SwapOutcome, bits, connect, failed,
    unexpected,
};
use crate::service_names;
use crate::sharding::ShardId;
use crate::store::ShardStats;
use crate::wire::{BytesOp, BytesRequest, BytesResponse, Status};

/// To a daemon.
pub(super) type Lane<T> = ipc::Client<[u8], [u8], T>;

/// Byte strings, many at a time.
impl<T> Client<T> {
    /// Begins an operation on a byte string. Never waits, but for the first one at each daemon: that one connects, and may take as long
    /// as the [timeout](Client::set_timeout). The key, and values, may be used again at once.
    ///
    /// The answer comes by [`poll_bytes`](Client::poll_bytes). If as many operations as the node allows are under way, the token comes
    /// back as [`BeginBytesError::Full`]; that is up to 16 at each daemon. Calls without a key are for daemon 0 of the node that
    /// this client is attached to.
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// use crosstie_kv::client::Client;
    /// use crosstie_kv::wire::BytesOp;
    /// use crosstie_kv::wire::Status;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::single("doc-begin-bytes"))?;
    /// let mut client = Client::<u32>::attach_pipelined("doc-begin-bytes")?;
    /// client.begin_bytes(BytesOp::Put { key: b"name", value: b"crosstie" }, 1)?;
    /// client.begin_bytes(BytesOp::Get { key: b"name" }, 2)?;
    /// while client.in_flight() > 0 {
    ///     client.wait(None);
    ///     client.poll_bytes(|token, response| {
    ///         assert_eq!(response.status, Status::Done);
    ///         assert_eq!(response.value, if token == 1 { &b""[..] } else { b"crosstie" });
    ///     });
    /// }
    /// # Ok(()) }
    /// ```
    pub fn begin_bytes(&mut self, call: BytesOp<'_>, token: T) -> Result<(), BeginBytesError<T>> {
        let place = match call.key() {
            Some(key) => self.shard_map.shard_of_bytes(key),
            None => ShardId { rank: self.info.rank, daemon: 0 },
        };
        let request = BytesRequest { rank: place.rank, daemon: place.daemon, op: call };
        let (header, [key, expected, value]) = match request.encode_header() {
            Ok(parts) => parts,
            Err(cause) => return Err(BeginBytesError::Refused { token, cause: cause.into() }),
        };
        let (daemon, lane) = match self.lane(place) {
            Ok(lane) => lane,
            Err(Error::ServerGone) => return Err(BeginBytesError::ServerGone(token)),
            Err(cause) => return Err(BeginBytesError::Refused { token, cause }),
        };
        lane.call_parts(&[&header, key, expected, value], token).map_err(BeginError::from)?;
        self.busy_long |= 1 << daemon;
        Ok(())
    }

    /// Hands the answers to operations on byte strings that are there to `each`; says how many. Never waits. The value is borrowed
    /// from where it arrived: copy what is to be kept. If the node is gone, all operations under way end as
    /// [`Status::NodeGone`]; an answer that is none, which a node of the same release never gives, is [`Status::Malformed`].
    ///
    /// As with [`poll`](Client::poll), of one daemon at most half of the operations under way end at a time.
    pub fn poll_bytes(&mut self, mut each: impl FnMut(T, BytesResponse<'_>)) -> usize {
        let mut count = 0;
        for daemon in bits(self.busy_long) {
            let Some(lane) = &mut self.long[daemon] else { continue };
            let polled = lane.poll(|token, answer| {
                each(token, BytesResponse::decode(answer).unwrap_or(BytesResponse::new(Status::Malformed)));
            });
            match polled {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += lane.in_flight();
                    lane.disconnect(|token| each(token, BytesResponse::new(Status::NodeGone)));
                }
            }
            if lane.in_flight() == 0 {
                self.busy_long &= !(1 << daemon);
            }
        }
        count
    }

    /// The daemon that a request goes to, and the lane to it. Connects the lane if it is used for the first time.
    fn lane(&mut self, place: ShardId) -> Result<(u32, &mut Lane<T>), Error> {
        let ShardId { rank, daemon } = place;
        let is_local = rank == self.info.rank;
        let daemon =
            if is_local { daemon } else { self.info.backend.connection_owner(rank, self.info.daemons) };
        if self.long.is_empty() {
            return Err(Error::ServerGone);
        }
        let no_such_daemon = || unexpected(rank, Status::Misrouted);
        let lane = self.long.get_mut(daemon as usize).ok_or_else(no_such_daemon)?;
        let lane = match lane {
            Some(lane) => lane,
            None => {
                let service = service_names::bytes(&self.name, daemon);
                let connected =
                    connect(&self.name, service, Deadline::new(self.timeout), Lane::connect_within);
                let connected = connected.map_err(|error| match error {
                    AttachError::Connect { cause: ipc::ConnectError::Full { .. }, .. } => {
                        Error::TooManyClients
                    }
                    AttachError::TimedOut { after, .. } => Error::TimedOut { rank: self.info.rank, after },
                    _ => Error::ServerGone,
                });
                lane.insert(connected?.with_wait_strategy(self.waiting))
            }
        };
        Ok((daemon, lane))
    }
}

/// Byte strings, one at a time. Operations with tokens that are under way stay so. Each ends within the client's
/// [timeout](Client::set_timeout).
impl<T> Client<T> {
    /// The value of a byte string, of at most [`MAX_KEY`](crate::wire::MAX_KEY) bytes.
    pub fn get_bytes(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.keyed(BytesOp::Get { key })? {
            (_, Status::Done, value) => Ok(Some(value)),
            (_, Status::NotFound, _) => Ok(None),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Gives a byte string a value, of at most [`MAX_VALUE`](crate::wire::MAX_VALUE) bytes.
    pub fn put_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        match self.keyed(BytesOp::Put { key, value })? {
            (_, Status::Done, _) => Ok(()),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Removes a byte string; says whether it was there.
    pub fn delete_bytes(&mut self, key: &[u8]) -> Result<bool, Error> {
        match self.keyed(BytesOp::Delete { key })? {
            (_, Status::Done, _) => Ok(true),
            (_, Status::NotFound, _) => Ok(false),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Gives a byte string a value if it has none; else says which it has.
    pub fn insert_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.keyed(BytesOp::Insert { key, value })? {
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
    ) -> Result<SwapOutcome<Vec<u8>>, Error> {
        match self.keyed(BytesOp::CompareAndSwap { key, expected, value })? {
            (_, Status::Done, _) => Ok(SwapOutcome::Done),
            (_, Status::Mismatch, value) => Ok(SwapOutcome::Mismatch(value)),
            (_, Status::NotFound, _) => Ok(SwapOutcome::NotFound),
            (rank, status, _) => Err(unexpected(rank, status)),
        }
    }

    /// Figures of the shard of a daemon of a node.
    pub fn stats(&mut self, rank: u32, daemon: u32) -> Result<ShardStats, Error> {
        let (rank, status, value) = self.exchange_long(ShardId { rank, daemon }, BytesOp::Stats)?;
        match ShardStats::read_from_bytes(&value) {
            Ok(stats) if status == Status::Done => Ok(stats),
            _ => Err(unexpected(rank, status)),
        }
    }

    fn keyed(&mut self, call: BytesOp<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let place = self.shard_map.shard_of_bytes(call.key().unwrap_or_default());
        self.exchange_long(place, call)
    }

    fn exchange_long(&mut self, place: ShardId, call: BytesOp<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let (rank, timeout) = (place.rank, self.timeout);
        // Kept, so that only the first ones allocate.
        let mut request = std::mem::take(&mut self.scratch);
        BytesRequest { rank, daemon: place.daemon, op: call }.encode(&mut request)?;
        let (_, lane) = self.lane(place)?;
        let answer = lane.exchange_within(&request, Some(timeout), |answer| {
            BytesResponse::decode(answer).map(|response| (rank, response.status, response.value.to_vec()))
        });
        self.scratch = request;
        match answer {
            Ok(answer) => Ok(answer.unwrap_or((rank, Status::Malformed, Vec::new()))),
            Err(error) => Err(failed(rank, error)),
        }
    }
}
