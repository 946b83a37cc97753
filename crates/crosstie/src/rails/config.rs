//! Options of a context, and the limits of a connection.

use core::time::Duration;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use crosstie_protocol::rails::{MAX_GROUP, MAX_RAILS, MAX_SLOTS};

use super::error::SetupError;

/// The most data queue pairs per rail.
pub const MAX_DATA_QPS: usize = 8;
/// Handshakes of peers that a listener has under way at once. Further peers wait.
pub const MAX_HANDSHAKES: usize = 64;
/// Connections of a listener that have not proved yet that they know the secret of its handle. When another one arrives, the oldest is
/// closed; if it is a sender's, the sender connects again.
pub const MAX_UNAUTHENTICATED: usize = 64;
/// How long a connection may take to prove that it knows the secret.
pub const UNAUTHENTICATED_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a sender connects again when its connection was closed before it could prove that it knows the secret.
pub const MAX_ATTEMPTS: u32 = 100;
/// How long the TCP connection may take to be made, and how long the handshake may take after the listener's program has accepted it.
/// Between the two the sender waits as long as the listener's machine and process live.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// How a message is split over the rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// By what is known about the rails when the message is sent: bytes under way and average rate, both of all connections of the process
    /// over the rail's port, and the hint from outside if there is one. Parts shorter than [`Config::min_part`] are avoided.
    Adaptive,
    /// In proportion to these weights, one per rail; 0 means that the rail gets no bytes. A rail that is down counts as 0.
    Fixed([u32; MAX_RAILS]),
}

/// Options of a [`Rails`](super::Rails) context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Requests outstanding on a connection: a power of two, at most 256.
    pub slots: usize,
    /// Buffers in one request, at most 8.
    pub max_group: usize,
    /// Queue pairs per rail, at most 8. A message uses one of them per rail, in turn. The first one also carries the
    /// clear-to-sends.
    pub data_qps: usize,
    /// The receiver posts receives when fewer than this many are left on a rail.
    pub low_water: u32,
    /// The receiver posts receives up to this many.
    pub high_water: u32,
    /// How messages are split at first; [`SendConnection::set_split`](super::SendConnection::set_split) changes it.
    pub split: Split,
    /// With [`Split::Adaptive`], a rail that would get fewer bytes than this gets none.
    pub min_part: u32,
    /// The link speed of each rail in bytes per microsecond, which is what is assumed before the first measurement. `None`: what
    /// the devices say.
    pub link_rates: Option<[u32; MAX_RAILS]>,
    /// A rail with requests under way and no completion for so long is probed: with a zero-length WRITE.
    pub stall_timeout: Duration,
    /// A rail whose probe is not acknowledged in this time has failed.
    pub probe_timeout: Duration,
    /// The first and the longest pause between attempts to rebuild a rail.
    pub rebuild_pause: (Duration, Duration),
    /// If all rails of a connection are down for so long, its requests end with an error.
    pub give_up: Duration,
    /// The address at which listeners accept. It must be reachable for the peers; with software devices only, the loopback
    /// address is right.
    pub listen_address: IpAddr,
    /// Messages of at most so many bytes go through staging memory at the receiver and are copied by the receiver's thread.
    /// That is faster than writing into memory of another process on a software device (1 KiB: 1.2 µs instead of 1.5 to 1.9 on 16
    /// cores; 4 KiB is about even there and faster on two; 8 KiB is slower: 2.4 instead of 1.6); a NIC writes directly at no cost.
    /// `None` chooses: 4 KiB if all rails are devices on which this pays
    /// ([`DeviceAttr::in_place_is_slower`](crate::device::DeviceAttr::in_place_is_slower)), otherwise 0.
    pub staging: Option<u32>,
    /// The memory with the hints of a program outside, see [`HintPublisher`](super::HintPublisher).
    pub hint: Option<PathBuf>,
    /// The traffic class and service level of the connections, see
    /// [`ConnectConfig`](crate::device::ConnectConfig).
    pub traffic_class: u8,
    /// The service level.
    pub service_level: u8,
}

/// Polls of a connection that take longer than this, all together, since the clock was read last are slow, see
/// [`PollClock`](crate::wait::PollClock). A program that sends a message every 50 µs polls a few times for each: it must
/// not pay for a look at the clock with every message. What the clock is read for takes at least [`Config::stall_timeout`].
pub(super) const SLOW_POLLS: Duration = Duration::from_millis(2);

impl Default for Config {
    fn default() -> Self {
        Config {
            slots: MAX_SLOTS,
            max_group: MAX_GROUP,
            data_qps: 2,
            low_water: 64,
            high_water: 512,
            split: Split::Adaptive,
            min_part: 32 << 10,
            link_rates: None,
            stall_timeout: Duration::from_millis(20),
            probe_timeout: Duration::from_millis(30),
            rebuild_pause: (Duration::from_millis(10), Duration::from_millis(500)),
            give_up: Duration::from_secs(60),
            listen_address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            staging: None,
            hint: None,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

impl Config {
    pub(super) fn check(&self, rails: usize) -> Result<(), SetupError> {
        let bad = |what| Err(SetupError::Config(what));
        if !(1..=MAX_RAILS).contains(&rails) {
            return bad("give one to four devices");
        }
        if !self.slots.is_power_of_two() || self.slots > MAX_SLOTS {
            return bad("`slots` must be a power of two of at most 256");
        }
        if !(1..=MAX_GROUP).contains(&self.max_group) {
            return bad("`max_group` must be 1 to 8");
        }
        if !(1..=MAX_DATA_QPS).contains(&self.data_qps) {
            return bad("`data_qps` must be 1 to 8");
        }
        if self.low_water == 0 || self.low_water > self.high_water || self.high_water > 1 << 14 {
            return bad("`low_water` must be 1 to `high_water`, and `high_water` at most 16384");
        }
        if matches!(self.split, Split::Fixed(weights) if weights[..rails].iter().all(|weight| *weight == 0)) {
            return bad("`split` gives no rail any bytes");
        }
        if self.link_rates.is_some_and(|rates| rates[..rails].contains(&0)) {
            return bad("`link_rates` must not be 0");
        }
        if self.staging.is_some_and(|bytes| bytes > 64 << 10) {
            return bad("`staging` must be at most 64 KiB");
        }
        Ok(())
    }
}
