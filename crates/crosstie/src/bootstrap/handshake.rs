//! The handshake: both ends of a connection prove that they know the job's secret before they read anything else.
//!
//! The member is the side that connects; the coordinator is the side that accepts. All messages have fixed lengths, so a
//! coordinator parses nothing from a peer that has not proved the secret:
//!
//! ```text
//! both at once                     nonce (32)                          fresh random bytes
//! member: join request             rank u32, size u32, proof (32)      proof = HMAC(secret, "member", nonces, rank, size)
//! coordinator: join response       status u8, size u32, proof (32)     proof = HMAC(secret, "coordinator", nonces, rank, size,
//!                                                                                   status, size)
//! ```
//!
//! Integers are little-endian. The coordinator replies to a wrong proof with zeros, so a peer without the secret receives
//! nothing that was computed from it. A member that cannot verify the response reports a wrong secret, whatever the
//! response says. A coordinator sends its nonce to every peer, so a peer that closes the connection before its first byte is another
//! program, or about to end; it is not said to have a wrong secret. The labels prevent that one side's proof is sent back as the other side's (reflection). The keys of
//! the frames that follow are derived from the secret and both nonces, one key per direction.

use super::frame::{FrameDecoder, FrameEncoder};
use super::secret::{HmacSha256, Secret, TAG_BYTES};

pub(super) const NONCE_BYTES: usize = 32;
pub(super) const REQUEST_BYTES: usize = 8 + TAG_BYTES;
pub(super) const RESPONSE_BYTES: usize = 5 + TAG_BYTES;

const MEMBER_LABEL: &str = "crosstie bootstrap 1 member";
const COORDINATOR_LABEL: &str = "crosstie bootstrap 1 coordinator";
const TO_COORDINATOR_LABEL: &str = "crosstie bootstrap 1 frames to coordinator";
const TO_MEMBER_LABEL: &str = "crosstie bootstrap 1 frames to member";

/// The values that both ends of one connection have exchanged.
#[derive(Clone, Copy)]
pub(super) struct Transcript {
    pub(super) coordinator_nonce: [u8; NONCE_BYTES],
    pub(super) member_nonce: [u8; NONCE_BYTES],
    pub(super) rank: u32,
    pub(super) size: u32,
}

/// The coordinator's response to a member that knows the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JoinResponse {
    Accepted,
    DuplicateRank,
    /// The member has another job size; this is the coordinator's.
    SizeMismatch(u32),
}

impl Transcript {
    /// Encodes the member's join request: rank, size and proof.
    pub(super) fn join_request(&self, secret: &Secret) -> [u8; REQUEST_BYTES] {
        let mut request = [0; REQUEST_BYTES];
        request[..4].copy_from_slice(&self.rank.to_le_bytes());
        request[4..8].copy_from_slice(&self.size.to_le_bytes());
        request[8..].copy_from_slice(&self.hmac(secret, MEMBER_LABEL).finish());
        request
    }

    /// Returns the rank and size in a join request when its proof is correct.
    pub(super) fn verify_join_request(
        secret: &Secret,
        coordinator_nonce: [u8; NONCE_BYTES],
        member_nonce: [u8; NONCE_BYTES],
        request: &[u8; REQUEST_BYTES],
    ) -> Option<Self> {
        let (rank, rest) = request.split_first_chunk::<4>()?;
        let (size, proof) = rest.split_first_chunk::<4>()?;
        let transcript = Transcript {
            coordinator_nonce,
            member_nonce,
            rank: u32::from_le_bytes(*rank),
            size: u32::from_le_bytes(*size),
        };
        let proof: &[u8; TAG_BYTES] = proof.try_into().ok()?;
        transcript.hmac(secret, MEMBER_LABEL).verify(proof).then_some(transcript)
    }

    /// Encodes the coordinator's join response.
    pub(super) fn join_response(&self, secret: &Secret, response: JoinResponse) -> [u8; RESPONSE_BYTES] {
        let (status, size) = match response {
            JoinResponse::Accepted => (1, self.size),
            JoinResponse::DuplicateRank => (2, self.size),
            JoinResponse::SizeMismatch(size) => (3, size),
        };
        let mut message = [0; RESPONSE_BYTES];
        message[0] = status;
        message[1..5].copy_from_slice(&size.to_le_bytes());
        let mut hmac = self.hmac(secret, COORDINATOR_LABEL);
        hmac.update(&message[..5]);
        message[5..].copy_from_slice(&hmac.finish());
        message
    }

    /// Returns the coordinator's response when its proof is correct.
    pub(super) fn verify_join_response(
        &self,
        secret: &Secret,
        response: &[u8; RESPONSE_BYTES],
    ) -> Option<JoinResponse> {
        let (head, proof) = response.split_first_chunk::<5>()?;
        let mut hmac = self.hmac(secret, COORDINATOR_LABEL);
        hmac.update(head);
        if !hmac.verify(proof.try_into().ok()?) {
            return None;
        }
        let size = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        match head[0] {
            1 => Some(JoinResponse::Accepted),
            2 => Some(JoinResponse::DuplicateRank),
            3 => Some(JoinResponse::SizeMismatch(size)),
            _ => None,
        }
    }

    /// The frame encoder and decoder of the member's end. `limit` is the longest payload that it accepts.
    pub(super) fn member_codec(&self, secret: &Secret, limit: usize) -> (FrameEncoder, FrameDecoder) {
        (
            FrameEncoder::new(self.key(secret, TO_COORDINATOR_LABEL)),
            FrameDecoder::new(self.key(secret, TO_MEMBER_LABEL), limit),
        )
    }

    /// The frame encoder and decoder of the coordinator's end. `limit` is the longest payload that it accepts.
    pub(super) fn coordinator_codec(&self, secret: &Secret, limit: usize) -> (FrameEncoder, FrameDecoder) {
        (
            FrameEncoder::new(self.key(secret, TO_MEMBER_LABEL)),
            FrameDecoder::new(self.key(secret, TO_COORDINATOR_LABEL), limit),
        )
    }

    fn key(&self, secret: &Secret, label: &str) -> HmacSha256 {
        HmacSha256::new(&self.hmac(secret, label).finish())
    }

    fn hmac(&self, secret: &Secret, label: &str) -> HmacSha256 {
        let mut hmac = secret.hmac(label);
        hmac.update(&self.coordinator_nonce);
        hmac.update(&self.member_nonce);
        hmac.update(&self.rank.to_le_bytes());
        hmac.update(&self.size.to_le_bytes());
        hmac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text).expect("long enough")
    }

    fn transcript() -> Transcript {
        Transcript { coordinator_nonce: [1; NONCE_BYTES], member_nonce: [2; NONCE_BYTES], rank: 3, size: 4 }
    }

    #[test]
    fn both_ends_with_the_same_secret_accept_each_other() {
        let (a, t) = (secret("a secret of the job"), transcript());
        let seen =
            Transcript::verify_join_request(&a, [1; NONCE_BYTES], [2; NONCE_BYTES], &t.join_request(&a))
                .expect("accepted");
        assert_eq!((seen.rank, seen.size), (3, 4));
        for response in [JoinResponse::Accepted, JoinResponse::DuplicateRank, JoinResponse::SizeMismatch(9)] {
            assert_eq!(t.verify_join_response(&a, &seen.join_response(&a, response)), Some(response));
        }
    }

    #[test]
    fn different_secret_or_any_flipped_bit_is_rejected() {
        let (a, b, t) = (secret("a secret of the job"), secret("another such secret"), transcript());
        assert!(
            Transcript::verify_join_request(&b, [1; NONCE_BYTES], [2; NONCE_BYTES], &t.join_request(&a))
                .is_none()
        );
        assert!(t.verify_join_response(&b, &t.join_response(&a, JoinResponse::Accepted)).is_none());
        assert!(t.verify_join_response(&a, &[0; RESPONSE_BYTES]).is_none());
        for bit in 0..REQUEST_BYTES * 8 {
            let mut request = t.join_request(&a);
            request[bit / 8] ^= 1 << (bit % 8);
            assert!(
                Transcript::verify_join_request(&a, [1; NONCE_BYTES], [2; NONCE_BYTES], &request).is_none(),
                "bit {bit}"
            );
        }
        for bit in 0..RESPONSE_BYTES * 8 {
            let mut response = t.join_response(&a, JoinResponse::Accepted);
            response[bit / 8] ^= 1 << (bit % 8);
            assert!(t.verify_join_response(&a, &response).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn proof_of_another_connection_or_of_the_other_role_is_rejected() {
        let (a, t) = (secret("a secret of the job"), transcript());
        assert!(
            Transcript::verify_join_request(&a, [9; NONCE_BYTES], [2; NONCE_BYTES], &t.join_request(&a))
                .is_none()
        );
        let mut reflected = [0; RESPONSE_BYTES];
        reflected[0] = 1;
        reflected[1..5].copy_from_slice(&t.size.to_le_bytes());
        reflected[5..].copy_from_slice(&t.join_request(&a)[8..]);
        assert!(t.verify_join_response(&a, &reflected).is_none());
    }
}
