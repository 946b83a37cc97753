//! Operations on byte strings, and statistics.
//!
//! 8-byte keys and byte-string keys live in separate keyspaces: `put(1, …)` and `put_bytes(&1u64.to_le_bytes(), …)` store two
//! different keys.

use crosstie::group::Token;
use crosstie::ipc;
use zerocopy::FromBytes;

use super::{
    AttachError, BeginBytesError, BeginError, Client, Error, FencedOutcome, SwapOutcome, TimeLimit, bits,
    connect, no_response_error, status_error,
};
use crate::service_names;
use crate::sharding::ShardId;
use crate::store::ShardStats;
use crate::wire::{self, BytesOp, BytesRequest, BytesResponse, Status};

/// The connection to a daemon for byte strings.
pub(super) type Lane<T> = ipc::Client<[u8], [u8], T>;

/// Byte strings, many operations at a time.
impl<T> Client<T> {
    /// Begins an operation on a byte string. Does not wait for the response. The first operation at each daemon connects, which may
    /// take as long as the [timeout](Client::set_timeout). The key and the values may be reused as soon as the call returns.
    ///
    /// [`poll_bytes`](Client::poll_bytes) returns the response. If as many operations as the node allows are in flight, which is up to
    /// 16 at each daemon, the token comes back as [`BeginBytesError::Full`]. Operations without a key go to daemon 0 of the node
    /// that this client is attached to.
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
    pub fn begin_bytes(&mut self, op: BytesOp<'_>, token: T) -> Result<(), BeginBytesError<T>> {
        let shard = match op.key() {
            Some(key) => self.shard_map.shard_of_bytes(key),
            None => ShardId { rank: self.info.rank, daemon: 0 },
        };
        let request = BytesRequest { rank: shard.rank, daemon: shard.daemon, op };
        let (header, [key, expected, value]) = match request.encode_header() {
            Ok(parts) => parts,
            Err(cause) => return Err(BeginBytesError::Refused { token, cause: cause.into() }),
        };
        let lane = match self.lane_to(shard) {
            Ok(lane) => lane,
            Err(Error::ServerGone) => return Err(BeginBytesError::ServerGone(token)),
            Err(cause) => return Err(BeginBytesError::Refused { token, cause }),
        };
        lane.call_parts(&[&header, key, expected, value], token).map_err(BeginError::from)?;
        self.busy_bytes |= 1 << shard.daemon;
        Ok(())
    }

    /// Passes each response to an operation on a byte string that has arrived to `each`. Returns how many. Never waits. The value is
    /// borrowed from the buffer it arrived in: copy what is to be kept. If the node is gone, all operations in flight end as
    /// [`Status::NodeGone`]. An invalid response, which a node of the same release never sends, is [`Status::Malformed`].
    ///
    /// As with [`poll`](Client::poll), one call ends only a part of the operations in flight at one daemon.
    pub fn poll_bytes(&mut self, mut each: impl FnMut(T, BytesResponse<'_>)) -> usize {
        let mut count = 0;
        for daemon in bits(self.busy_bytes) {
            let Some(lane) = &mut self.bytes[daemon] else { continue };
            let polled = lane.poll(|token, response| {
                each(token, BytesResponse::decode(response).unwrap_or(BytesResponse::new(Status::Malformed)));
            });
            match polled {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += lane.in_flight();
                    lane.disconnect(|token| each(token, BytesResponse::new(Status::NodeGone)));
                }
            }
            if lane.in_flight() == 0 {
                self.busy_bytes &= !(1 << daemon);
            }
        }
        if self.is_yield_due(count) {
            self.yield_core();
        }
        count
    }

    /// The lane for requests for `shard`: to the daemon that owns it, or to the one that is connected with it. Connects the lane when it is
    /// first used.
    fn lane_to(&mut self, shard: ShardId) -> Result<&mut Lane<T>, Error> {
        let ShardId { rank, daemon } = shard;
        if self.bytes.is_empty() {
            return Err(Error::ServerGone);
        }
        let no_such_daemon = || status_error(rank, Status::Misrouted);
        let lane = self.bytes.get_mut(daemon as usize).ok_or_else(no_such_daemon)?;
        let lane = match lane {
            Some(lane) => lane,
            None => {
                let service = service_names::bytes(&self.name, daemon);
                let connected =
                    connect(&self.name, service, TimeLimit::new(self.timeout), Lane::connect_within);
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
        Ok(lane)
    }
}

/// Byte strings, one operation at a time. Each returns within the client's [timeout](Client::set_timeout). Pipelined operations in
/// flight are not affected.
impl<T> Client<T> {
    /// Returns the value of a key, or `None` if the key does not exist. The key has at most [`MAX_KEY`](crate::wire::MAX_KEY) bytes.
    pub fn get_bytes(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.exchange_keyed(BytesOp::Get { key })? {
            (_, Status::Done, value) => Ok(Some(value)),
            (_, Status::NotFound, _) => Ok(None),
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Stores a value under a key. The value has at most [`MAX_VALUE`](crate::wire::MAX_VALUE) bytes.
    pub fn put_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        match self.exchange_keyed(BytesOp::Put { key, value })? {
            (_, Status::Done, _) => Ok(()),
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Removes a key. Returns whether it existed.
    pub fn delete_bytes(&mut self, key: &[u8]) -> Result<bool, Error> {
        match self.exchange_keyed(BytesOp::Delete { key })? {
            (_, Status::Done, _) => Ok(true),
            (_, Status::NotFound, _) => Ok(false),
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Stores a value under a key that does not exist. Returns `None`, or the current value of a key that exists.
    pub fn insert_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self.exchange_keyed(BytesOp::Insert { key, value })? {
            (_, Status::Done, _) => Ok(None),
            (_, Status::Mismatch, value) => Ok(Some(value)),
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Stores a value under a key whose current value is `expected`.
    pub fn compare_and_swap_bytes(
        &mut self,
        key: &[u8],
        expected: &[u8],
        value: &[u8],
    ) -> Result<SwapOutcome<Vec<u8>>, Error> {
        match self.exchange_keyed(BytesOp::CompareAndSwap { key, expected, value })? {
            (_, Status::Done, _) => Ok(SwapOutcome::Done),
            (_, Status::Mismatch, value) => Ok(SwapOutcome::Mismatch(value)),
            (_, Status::NotFound, _) => Ok(SwapOutcome::NotFound),
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Stores a value under a key, with the fencing token of the lock that protects the key. If the key has seen a newer token, the
    /// lock has passed on and nothing changes.
    ///
    /// A key remembers the newest token that it was given, also when it is deleted. Operations without a token are not concerned.
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// use crosstie::group::Token;
    /// use crosstie_kv::client::{Client, FencedOutcome};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::single("doc-fenced"))?;
    /// let mut client = Client::attach("doc-fenced")?;
    /// let (old, new) = (Token { view: 1, count: 7 }, Token { view: 2, count: 1 });
    /// assert_eq!(client.put_bytes_fenced(b"plan", b"first", old)?, FencedOutcome::Done);
    /// assert_eq!(client.put_bytes_fenced(b"plan", b"second", new)?, FencedOutcome::Done);
    /// assert_eq!(client.put_bytes_fenced(b"plan", b"late", old)?, FencedOutcome::Stale { newest: new });
    /// assert_eq!(client.get_bytes(b"plan")?.as_deref(), Some(&b"second"[..]));
    /// # Ok(()) }
    /// ```
    pub fn put_bytes_fenced(
        &mut self,
        key: &[u8],
        value: &[u8],
        token: Token,
    ) -> Result<FencedOutcome, Error> {
        let bytes = token.to_bytes();
        self.exchange_fenced(BytesOp::FencedPut { key, token: wire::Token::new(&bytes), value })
    }

    /// Removes a key, if it exists, with a fencing token. See [`put_bytes_fenced`](Client::put_bytes_fenced).
    pub fn delete_bytes_fenced(&mut self, key: &[u8], token: Token) -> Result<FencedOutcome, Error> {
        let bytes = token.to_bytes();
        self.exchange_fenced(BytesOp::FencedDelete { key, token: wire::Token::new(&bytes) })
    }

    /// Lets a key refuse older tokens from now on, without changing its value. A new holder of a lock that protects several keys calls
    /// this for each key that it relies on, before it reads them.
    pub fn raise_fence(&mut self, key: &[u8], token: Token) -> Result<FencedOutcome, Error> {
        let bytes = token.to_bytes();
        self.exchange_fenced(BytesOp::Fence { key, token: wire::Token::new(&bytes) })
    }

    fn exchange_fenced(&mut self, op: BytesOp<'_>) -> Result<FencedOutcome, Error> {
        match self.exchange_keyed(op)? {
            (_, Status::Done | Status::NotFound, _) => Ok(FencedOutcome::Done),
            (rank, Status::Fenced, value) => match value.as_slice().try_into() {
                Ok(newest) => Ok(FencedOutcome::Stale { newest: Token::from_bytes(&newest) }),
                Err(_) => Err(status_error(rank, Status::Malformed)),
            },
            (rank, status, _) => Err(status_error(rank, status)),
        }
    }

    /// Returns the statistics of the shard of a daemon of a node.
    pub fn stats(&mut self, rank: u32, daemon: u32) -> Result<ShardStats, Error> {
        let (rank, status, value) = self.exchange_bytes(ShardId { rank, daemon }, BytesOp::Stats)?;
        match ShardStats::read_from_bytes(&value) {
            Ok(stats) if status == Status::Done => Ok(stats),
            _ => Err(status_error(rank, status)),
        }
    }

    fn exchange_keyed(&mut self, op: BytesOp<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let shard = self.shard_map.shard_of_bytes(op.key().unwrap_or_default());
        self.exchange_bytes(shard, op)
    }

    fn exchange_bytes(&mut self, shard: ShardId, op: BytesOp<'_>) -> Result<(u32, Status, Vec<u8>), Error> {
        let (rank, timeout) = (shard.rank, self.timeout);
        // The buffer is kept, so that only the first calls allocate.
        let mut request = std::mem::take(&mut self.scratch);
        BytesRequest { rank, daemon: shard.daemon, op }.encode(&mut request)?;
        let lane = self.lane_to(shard)?;
        let response = lane.exchange_within(&request, Some(timeout), |response| {
            BytesResponse::decode(response).map(|response| (rank, response.status, response.value.to_vec()))
        });
        self.scratch = request;
        match response {
            Ok(response) => Ok(response.unwrap_or((rank, Status::Malformed, Vec::new()))),
            Err(error) => Err(no_response_error(rank, error)),
        }
    }
}
