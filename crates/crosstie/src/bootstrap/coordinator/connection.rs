//! The coordinator's two kinds of connections: one that has not proved the secret, and one to a rank that has joined.
//! Neither waits: both read and write as much as the socket allows.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use super::super::frame::{FrameDecoder, FrameEncoder};
use super::super::handshake::{NONCE_BYTES, REQUEST_BYTES};
use super::super::stream::{Stream, is_transient};

/// A connection whose peer has not proved the secret yet.
pub(super) struct UnauthenticatedConnection {
    pub(super) stream: Stream,
    /// The rank at the other end, when this process created the connection itself. Such a connection is not closed for
    /// being slow.
    pub(super) expected_rank: Option<u32>,
    pub(super) deadline: Instant,
    /// The nonce that the coordinator sent.
    pub(super) nonce: [u8; NONCE_BYTES],
    pub(super) received: Vec<u8>,
}

/// What a member sends in the handshake.
pub(super) struct JoinMessage {
    pub(super) nonce: [u8; NONCE_BYTES],
    pub(super) request: [u8; REQUEST_BYTES],
}

impl UnauthenticatedConnection {
    /// Reads what has arrived; returns the member's nonce and join request once they are complete. Reads no byte beyond
    /// them.
    pub(super) fn read(&mut self) -> io::Result<Option<JoinMessage>> {
        let mut buffer = [0; NONCE_BYTES + REQUEST_BYTES];
        let missing = buffer.len() - self.received.len();
        match self.stream.read(&mut buffer[..missing]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.received.extend_from_slice(&buffer[..count]),
            Err(error) if is_transient(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let Some((nonce, request)) = self.received.split_first_chunk::<NONCE_BYTES>() else {
            return Ok(None);
        };
        let request = request.first_chunk::<REQUEST_BYTES>();
        Ok(request.map(|request| JoinMessage { nonce: *nonce, request: *request }))
    }
}

/// The connection to a rank that has joined.
pub(super) struct RankConnection {
    pub(super) stream: Stream,
    pub(super) encoder: FrameEncoder,
    pub(super) decoder: FrameDecoder,
    /// Bytes that the socket has not taken yet.
    pub(super) outgoing: VecDeque<Outgoing>,
}

pub(super) struct Outgoing {
    bytes: Arc<[u8]>,
    written: usize,
}

impl RankConnection {
    /// Queues raw bytes.
    pub(super) fn queue_bytes(&mut self, bytes: impl Into<Arc<[u8]>>) {
        self.outgoing.push_back(Outgoing { bytes: bytes.into(), written: 0 });
    }

    /// Queues a frame.
    pub(super) fn queue_frame(&mut self, kind: u8, payload: Arc<[u8]>) {
        let encoded = self.encoder.encode(kind, payload);
        self.queue_bytes(encoded.header);
        self.queue_bytes(encoded.payload);
        self.queue_bytes(encoded.tag);
    }

    /// Writes queued bytes until none are left or the socket takes no more.
    pub(super) fn write_queued(&mut self) -> io::Result<()> {
        while let Some(front) = self.outgoing.front_mut() {
            let rest = &front.bytes[front.written..];
            if rest.is_empty() {
                self.outgoing.pop_front();
                continue;
            }
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => front.written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
