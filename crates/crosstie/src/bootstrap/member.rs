//! A rank's side of a job: its connection to the coordinator, and [`Bootstrap`] on top of it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::abort::{self, ABORT};
use super::children::Children;
use super::coordinator::CoordinatorThread;
use super::error::{Error, Operation, Result, Violation};
use super::frame::{Frame, FrameDecoder, FrameEncoder};
use super::handshake::{JoinResponse, NONCE_BYTES, RESPONSE_BYTES, Transcript};
use super::job::Bootstrap;
use super::limits::{GRACE_PERIOD, Limits, check_blob_count};
use super::payload::{pack_blobs, pack_words, unpack_blobs, unpack_words};
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::{Stream, is_closed_by_peer};

/// When a peer that is no coordinator closes the connection, and what to check.
const BEFORE_HANDSHAKE: &str = "before the handshake: is it a crosstie rendezvous?";

/// One rank of a job whose ranks are connected through rank 0. [`local`](super::local) and [`tcp`](super::tcp) return it.
///
/// Dropping it leaves the job: the pending calls of other ranks fail with [`Error::RankDisconnected`]. Dropping rank 0
/// ends the job, and kills the ranks that it spawned unless [`finish`](Bootstrap::finish) was called.
pub struct Member {
    rank: u32,
    size: u32,
    limits: Limits,
    /// `None` only while dropping.
    connection: Option<CoordinatorConnection>,
    /// The error that ended the job.
    failure: Option<Error>,
    /// The coordinator's thread, in rank 0.
    coordinator: Option<CoordinatorThread>,
    /// The ranks that this process spawned.
    children: Children,
}

/// A connection to the coordinator on which both ends have proved the secret.
pub(super) struct CoordinatorConnection {
    stream: Stream,
    encoder: FrameEncoder,
    decoder: FrameDecoder,
}

/// Why [`CoordinatorConnection::open`] failed.
pub(super) enum ConnectError {
    /// The coordinator rejected this rank, or this process cannot continue: trying again is useless.
    Final(Error),
    /// The stream broke, or the peer sent nothing in time: trying again may help.
    Retryable(io::Error),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        ConnectError::Retryable(error)
    }
}

impl CoordinatorConnection {
    /// Does the handshake with the coordinator at the other end of `stream`. `peer` is what errors call that end.
    pub(super) fn open(
        mut stream: Stream,
        rank: u32,
        size: u32,
        secret: &Secret,
        limits: &Limits,
        peer: &str,
        deadline: Instant,
    ) -> std::result::Result<Self, ConnectError> {
        let member_nonce = random_bytes().map_err(ConnectError::Final)?;
        let (before, during) = (name_close(BEFORE_HANDSHAKE), name_close("during the handshake"));
        stream.write_full(&member_nonce, deadline).map_err(&before)?;
        // A coordinator sends its nonce at once, also to a peer without the secret.
        let mut coordinator_nonce = [0; NONCE_BYTES];
        stream.read_full(&mut coordinator_nonce[..1], deadline).map_err(before)?;
        stream.read_full(&mut coordinator_nonce[1..], deadline).map_err(&during)?;
        let transcript = Transcript { coordinator_nonce, member_nonce, rank, size };
        stream.write_full(&transcript.join_request(secret), deadline).map_err(&during)?;
        let mut response = [0; RESPONSE_BYTES];
        stream.read_full(&mut response, deadline).map_err(during)?;
        match transcript.verify_join_response(secret, &response) {
            Some(JoinResponse::Accepted) => {
                let (encoder, decoder) = transcript.member_codec(secret, limits.max_message);
                Ok(CoordinatorConnection { stream, encoder, decoder })
            }
            Some(JoinResponse::DuplicateRank) => Err(ConnectError::Final(Error::DuplicateRank { rank })),
            Some(JoinResponse::SizeMismatch(theirs)) => {
                Err(ConnectError::Final(Error::SizeMismatch { ours: size, theirs }))
            }
            None => Err(ConnectError::Final(Error::WrongSecret { peer: peer.to_owned() })),
        }
    }

    /// Like [`open`](CoordinatorConnection::open), over a socket pair of this machine. There is nothing to try again.
    pub(super) fn open_local(
        stream: Stream,
        rank: u32,
        size: u32,
        secret: &Secret,
        limits: &Limits,
    ) -> Result<Self> {
        let deadline = Instant::now() + limits.join_timeout + GRACE_PERIOD;
        let opened = CoordinatorConnection::open(stream, rank, size, secret, limits, "rank 0", deadline);
        opened.map_err(|error| match error {
            ConnectError::Final(error) => error,
            ConnectError::Retryable(error) => connection_error(&error, Operation::Join, limits),
        })
    }

    fn send(&mut self, kind: u8, payload: Vec<u8>, deadline: Instant) -> io::Result<()> {
        let encoded = self.encoder.encode(kind, Arc::from(payload));
        self.stream.write_full(&encoded.header, deadline)?;
        self.stream.write_full(&encoded.payload, deadline)?;
        self.stream.write_full(&encoded.tag, deadline)
    }

    fn receive(&mut self, deadline: Instant) -> io::Result<std::result::Result<Frame, Violation>> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.decoder.next() {
                Ok(Some(frame)) => return Ok(Ok(frame)),
                Ok(None) => {}
                Err(violation) => return Ok(Err(violation)),
            }
            match self.stream.read_some(&mut buffer, deadline)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.decoder.extend(&buffer[..count]),
            }
        }
    }
}

/// Says in the text of an I/O error that the peer has closed the connection, and when. Other errors stay as they are.
fn name_close(when: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| match error.kind() {
        kind if is_closed_by_peer(&error) => {
            io::Error::new(kind, format!("the program there closed the connection {when}"))
        }
        _ => error,
    }
}

/// Translates the I/O error of a connection to the coordinator: a timeout, or rank 0 has disconnected.
fn connection_error(error: &io::Error, during: Operation, limits: &Limits) -> Error {
    match error.kind() {
        io::ErrorKind::TimedOut => {
            let waited =
                if during == Operation::Join { limits.join_timeout } else { limits.operation_timeout };
            Error::Timeout { during, waited: waited + GRACE_PERIOD }
        }
        _ => Error::RankDisconnected { rank: 0 },
    }
}

impl Member {
    pub(super) fn new(rank: u32, size: u32, limits: Limits, connection: CoordinatorConnection) -> Self {
        let children = Children::default();
        let connection = Some(connection);
        Member { rank, size, limits, connection, failure: None, coordinator: None, children }
    }

    /// Makes this member rank 0: it owns the coordinator's thread and the spawned processes.
    pub(super) fn with_coordinator(mut self, coordinator: CoordinatorThread, children: Children) -> Self {
        self.coordinator = Some(coordinator);
        self.children = children;
        self
    }

    /// Waits until all ranks have joined.
    pub(super) fn wait_for_all(mut self) -> Result<Self> {
        let deadline = Instant::now() + self.limits.join_timeout + GRACE_PERIOD;
        self.receive(Operation::Join, deadline)?;
        Ok(self)
    }

    /// Sends this rank's contribution to an operation and waits for the result.
    fn call(&mut self, operation: Operation, payload: Vec<u8>) -> Result<Vec<u8>> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        self.limits.check_message(payload.len())?;
        let deadline = Instant::now() + self.limits.operation_timeout + GRACE_PERIOD;
        if let Some(connection) = &mut self.connection
            && let Err(error) = connection.send(operation as u8, payload, deadline)
            && error.kind() == io::ErrorKind::TimedOut
        {
            return Err(self.fail(connection_error(&error, operation, &self.limits)));
        }
        // When sending failed because the connection closed, an abort frame with the cause may have arrived before.
        self.receive(operation, deadline)
    }

    fn receive(&mut self, operation: Operation, deadline: Instant) -> Result<Vec<u8>> {
        let Some(connection) = &mut self.connection else {
            return Err(self.fail(Error::RankDisconnected { rank: 0 }));
        };
        let rank = self.rank;
        let error = match connection.receive(deadline) {
            Ok(Ok(frame)) if frame.kind == operation as u8 => return Ok(frame.payload),
            Ok(Ok(frame)) if frame.kind == ABORT => abort::decode(&frame.payload)
                .unwrap_or(Error::Protocol { rank, violation: Violation::Layout }),
            Ok(Ok(_)) => Error::Protocol { rank, violation: Violation::Kind },
            Ok(Err(violation)) => Error::Protocol { rank, violation },
            Err(error) => connection_error(&error, operation, &self.limits),
        };
        Err(self.fail(error))
    }

    /// Records the error that ends the job.
    fn fail(&mut self, error: Error) -> Error {
        self.failure = Some(error.clone());
        error
    }

    fn fail_with_violation(&mut self, violation: Violation) -> Error {
        let rank = self.rank;
        self.fail(Error::Protocol { rank, violation })
    }

    fn decode_blobs(&mut self, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        match unpack_blobs(payload, self.size) {
            Ok(blobs) => Ok(blobs.into_iter().map(<[u8]>::to_vec).collect()),
            Err(violation) => Err(self.fail_with_violation(violation)),
        }
    }
}

impl Bootstrap for Member {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.limits.check_blob(blob.len())?;
        let payload = self.call(Operation::AllGather, blob.to_vec())?;
        self.decode_blobs(&payload)
    }

    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        check_blob_count(blobs, self.size)?;
        blobs.iter().try_for_each(|blob| self.limits.check_blob(blob.len()))?;
        let payload = self.call(Operation::Exchange, pack_blobs(blobs))?;
        self.decode_blobs(&payload)
    }

    fn barrier(&mut self) -> Result<()> {
        self.call(Operation::Barrier, Vec::new()).map(drop)
    }

    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>> {
        let payload = self.call(Operation::Sum, pack_words(words))?;
        match unpack_words(&payload) {
            Ok(total) if total.len() == words.len() => Ok(total),
            _ => Err(self.fail_with_violation(Violation::Layout)),
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.barrier()?;
        self.children.wait(Instant::now() + self.limits.operation_timeout)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.children.kill_all();
        // In this order: the coordinator's thread ends only when this connection is closed.
        self.connection = None;
        self.coordinator = None;
    }
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
