//! Mutual proof of the secret, before anything else is read.
//!
//! All messages have fixed lengths, so a coordinator parses nothing from someone who has not proved the secret:
//!
//! ```text
//! both at once    nonce (32)                                   fresh random bytes
//! member          rank u32, size u32, proof (32)               proof = HMAC(secret, "member", nonces, rank, size)
//! coordinator     status u8, size u32, proof (32)              proof = HMAC(secret, "coordinator", nonces, rank, size,
//!                                                                           status, size)
//! ```
//!
//! Integers are little-endian. A coordinator answers a wrong proof with zeros: a stranger gets nothing computed from
//! the secret. A member that cannot verify the verdict reports a wrong secret, whatever the verdict says. The labels
//! keep one side's proof from being reflected as the other's. Keys for the frames that follow are derived from the
//! secret and both nonces, one per direction.

use super::frame::{Opener, Sealer};
use super::secret::{Keyed, Secret, TAG};

pub(super) const NONCE: usize = 32;
pub(super) const CLAIM: usize = 8 + TAG;
pub(super) const VERDICT: usize = 5 + TAG;

const MEMBER: &str = "crosstie bootstrap 1 member";
const COORDINATOR: &str = "crosstie bootstrap 1 coordinator";
const TO_COORDINATOR: &str = "crosstie bootstrap 1 frames to coordinator";
const TO_MEMBER: &str = "crosstie bootstrap 1 frames to member";

/// What the two sides of one connection have said.
#[derive(Clone, Copy)]
pub(super) struct Transcript {
    pub(super) coordinator_nonce: [u8; NONCE],
    pub(super) member_nonce: [u8; NONCE],
    pub(super) rank: u32,
    pub(super) size: u32,
}

/// The coordinator's answer to a member that knows the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Accepted,
    DuplicateRank,
    /// The coordinator counts this many ranks.
    SizeMismatch(u32),
}

impl Transcript {
    /// The member's rank, size and proof.
    pub(super) fn claim(&self, secret: &Secret) -> [u8; CLAIM] {
        let mut claim = [0; CLAIM];
        claim[..4].copy_from_slice(&self.rank.to_le_bytes());
        claim[4..8].copy_from_slice(&self.size.to_le_bytes());
        claim[8..].copy_from_slice(&self.keyed(secret, MEMBER).finish());
        claim
    }

    /// What a member claims, provided that its proof holds.
    pub(super) fn verify_claim(
        secret: &Secret,
        coordinator_nonce: [u8; NONCE],
        member_nonce: [u8; NONCE],
        claim: &[u8; CLAIM],
    ) -> Option<Self> {
        let (rank, rest) = claim.split_first_chunk::<4>()?;
        let (size, proof) = rest.split_first_chunk::<4>()?;
        let transcript = Transcript {
            coordinator_nonce,
            member_nonce,
            rank: u32::from_le_bytes(*rank),
            size: u32::from_le_bytes(*size),
        };
        let proof: &[u8; TAG] = proof.try_into().ok()?;
        transcript.keyed(secret, MEMBER).matches(proof).then_some(transcript)
    }

    pub(super) fn verdict(&self, secret: &Secret, verdict: Verdict) -> [u8; VERDICT] {
        let (status, size) = match verdict {
            Verdict::Accepted => (1, self.size),
            Verdict::DuplicateRank => (2, self.size),
            Verdict::SizeMismatch(size) => (3, size),
        };
        let mut out = [0; VERDICT];
        out[0] = status;
        out[1..5].copy_from_slice(&size.to_le_bytes());
        let mut keyed = self.keyed(secret, COORDINATOR);
        keyed.update(&out[..5]);
        out[5..].copy_from_slice(&keyed.finish());
        out
    }

    /// The verdict, provided that the coordinator knows the secret.
    pub(super) fn verify_verdict(&self, secret: &Secret, verdict: &[u8; VERDICT]) -> Option<Verdict> {
        let (head, proof) = verdict.split_first_chunk::<5>()?;
        let mut keyed = self.keyed(secret, COORDINATOR);
        keyed.update(head);
        if !keyed.matches(proof.try_into().ok()?) {
            return None;
        }
        let size = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        match head[0] {
            1 => Some(Verdict::Accepted),
            2 => Some(Verdict::DuplicateRank),
            3 => Some(Verdict::SizeMismatch(size)),
            _ => None,
        }
    }

    pub(super) fn member_side(&self, secret: &Secret, limit: usize) -> (Sealer, Opener) {
        (Sealer::new(self.key(secret, TO_COORDINATOR)), Opener::new(self.key(secret, TO_MEMBER), limit))
    }

    pub(super) fn coordinator_side(&self, secret: &Secret, limit: usize) -> (Sealer, Opener) {
        (Sealer::new(self.key(secret, TO_MEMBER)), Opener::new(self.key(secret, TO_COORDINATOR), limit))
    }

    fn key(&self, secret: &Secret, label: &str) -> Keyed {
        Keyed::new(&self.keyed(secret, label).finish())
    }

    fn keyed(&self, secret: &Secret, label: &str) -> Keyed {
        let mut keyed = secret.keyed(label);
        keyed.update(&self.coordinator_nonce);
        keyed.update(&self.member_nonce);
        keyed.update(&self.rank.to_le_bytes());
        keyed.update(&self.size.to_le_bytes());
        keyed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text).expect("long enough")
    }

    fn transcript() -> Transcript {
        Transcript { coordinator_nonce: [1; NONCE], member_nonce: [2; NONCE], rank: 3, size: 4 }
    }

    #[test]
    fn the_same_secret_agrees_both_ways() {
        let (a, t) = (secret("a secret of the job"), transcript());
        let seen = Transcript::verify_claim(&a, [1; NONCE], [2; NONCE], &t.claim(&a)).expect("accepted");
        assert_eq!((seen.rank, seen.size), (3, 4));
        for verdict in [Verdict::Accepted, Verdict::DuplicateRank, Verdict::SizeMismatch(9)] {
            assert_eq!(t.verify_verdict(&a, &seen.verdict(&a, verdict)), Some(verdict));
        }
    }

    #[test]
    fn a_different_secret_or_any_flipped_bit_is_refused() {
        let (a, b, t) = (secret("a secret of the job"), secret("another such secret"), transcript());
        assert!(Transcript::verify_claim(&b, [1; NONCE], [2; NONCE], &t.claim(&a)).is_none());
        assert!(t.verify_verdict(&b, &t.verdict(&a, Verdict::Accepted)).is_none());
        assert!(t.verify_verdict(&a, &[0; VERDICT]).is_none());
        for bit in 0..CLAIM * 8 {
            let mut claim = t.claim(&a);
            claim[bit / 8] ^= 1 << (bit % 8);
            assert!(Transcript::verify_claim(&a, [1; NONCE], [2; NONCE], &claim).is_none(), "bit {bit}");
        }
        for bit in 0..VERDICT * 8 {
            let mut verdict = t.verdict(&a, Verdict::Accepted);
            verdict[bit / 8] ^= 1 << (bit % 8);
            assert!(t.verify_verdict(&a, &verdict).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn proofs_of_an_earlier_connection_or_of_the_other_role_are_refused() {
        let (a, t) = (secret("a secret of the job"), transcript());
        assert!(Transcript::verify_claim(&a, [9; NONCE], [2; NONCE], &t.claim(&a)).is_none());
        let mut reflected = [0; VERDICT];
        reflected[0] = 1;
        reflected[1..5].copy_from_slice(&t.size.to_le_bytes());
        reflected[5..].copy_from_slice(&t.claim(&a)[8..]);
        assert!(t.verify_verdict(&a, &reflected).is_none());
    }
}
