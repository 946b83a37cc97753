//! How long a sender waits for an acknowledgement: an estimate from measured round trips, as in RFC 6298.

/// Smoothed round-trip time and its variation. In the unit of the driver's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RoundTrip {
    /// `u64::MAX`: not measured yet.
    smoothed: u64,
    variation: u64,
    /// The packet that is being timed, and when it was sent. `u64::MAX`: none.
    timed: u32,
    sent_at: u64,
}

impl RoundTrip {
    pub(super) const UNKNOWN: RoundTrip =
        RoundTrip { smoothed: u64::MAX, variation: 0, timed: 0, sent_at: u64::MAX };

    /// A packet is sent for the first time.
    #[inline]
    pub(super) fn on_send(&mut self, seq: u32, now: u64) {
        if self.sent_at == u64::MAX {
            (self.timed, self.sent_at) = (seq, now);
        }
    }

    /// Packets are sent again: an acknowledgement would not tell for which transmission it is.
    pub(super) fn stop(&mut self) {
        self.sent_at = u64::MAX;
    }

    /// All packets below `ack` have arrived.
    #[inline]
    pub(super) fn on_ack(&mut self, ack: u32, now: u64) {
        if self.sent_at != u64::MAX && ack.wrapping_sub(self.timed).wrapping_sub(1) <= u32::MAX / 2 {
            self.add(now.saturating_sub(self.sent_at));
            self.sent_at = u64::MAX;
        }
    }

    fn add(&mut self, sample: u64) {
        if self.smoothed == u64::MAX {
            (self.smoothed, self.variation) = (sample, sample / 2);
            return;
        }
        self.variation = (self.variation * 3 + self.smoothed.abs_diff(sample)) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
    }

    /// Whether a round trip was measured.
    #[inline]
    pub(super) fn is_known(&self) -> bool {
        self.smoothed != u64::MAX
    }

    /// The time without an acknowledgement after which a packet counts as lost, from `min` to `max`.
    #[inline]
    pub(super) fn timeout(&self, min: u64, max: u64) -> u64 {
        if self.is_known() { (self.smoothed + 4 * self.variation).clamp(min.min(max), max) } else { max }
    }

    #[cfg(test)]
    pub(super) fn rebase(&mut self, now: u64) {
        if self.sent_at != u64::MAX {
            self.sent_at = self.sent_at.saturating_sub(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_follows_the_round_trip_between_its_limits() {
        let mut time = RoundTrip::UNKNOWN;
        assert_eq!(time.timeout(10, 1000), 1000, "nothing is known");
        for seq in 0..50 {
            time.on_send(seq, 100 * u64::from(seq));
            time.on_ack(seq + 1, 100 * u64::from(seq) + 40);
        }
        assert!((40..60).contains(&time.timeout(10, 1000)), "{time:?}");
        assert_eq!(time.timeout(200, 1000), 200);
        assert_eq!(time.timeout(1, 20), 20);
        assert_eq!(time.timeout(500, 20), 20, "the longer limit wins");
    }

    #[test]
    fn packets_that_were_sent_again_are_not_timed() {
        let mut time = RoundTrip::UNKNOWN;
        time.on_send(u32::MAX, 0);
        time.on_ack(u32::MAX, 5);
        assert!(!time.is_known(), "the timed packet itself was not acknowledged");
        time.stop();
        time.on_ack(0, 900);
        assert!(!time.is_known());
        time.on_send(0, 1000);
        time.on_ack(1, 1007);
        assert!(time.is_known());
    }
}
