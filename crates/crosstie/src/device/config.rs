//! Limits that a device reports, sizes that the caller chooses, and the states of a queue pair.

use super::{Access, DeviceError};

/// What a device keeps for peers at this moment, see [`Device::counters`](super::Device::counters).
///
/// A removed object stays here while a peer may still access it: the peer is inside an operation, for a long copy or because
/// it is stopped. It is freed when the peer has left or is dead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// Regions that were dropped and are not freed yet.
    pub deferred_regions: u64,
    /// The memory of these regions.
    pub deferred_bytes: u64,
    /// Queue pairs that were dropped and are not freed yet.
    pub deferred_queue_pairs: u64,
}

/// The limits of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Requests in one send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries per request.
    pub max_sge: u32,
    /// Entries in a completion queue.
    pub max_cqe: u32,
    /// Entries in a shared receive queue.
    pub max_srq_wr: u32,
    /// Inline bytes per request.
    pub max_inline: u32,
    /// Bytes in one RC message.
    pub max_message: u64,
    /// Bytes in one datagram.
    pub max_datagram: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Regions.
    pub max_mr: u32,
    /// Whether WRITE, READ and atomics complete without the target's CPU.
    pub one_sided: bool,
    /// Whether the device has compare-and-swap and fetch-and-add. Without them a post returns
    /// [`PostError::Unsupported`](super::PostError::Unsupported), and [`Access::REMOTE_ATOMIC`](super::Access) allows nothing.
    pub atomics: bool,
    /// Bytes per microsecond of the link, as the port says when it is opened; about what one thread copies for a software device.
    pub link_rate: u32,
    /// Whether all peers are processes of this machine. Then the end of a peer is known for certain: a peer that does not answer
    /// is stopped or dead, and never only unreachable.
    pub same_machine: bool,
    /// Whether a peer's WRITE into memory of the program ([`Pd::register`](super::Pd::register)) costs the peer more than one into
    /// memory of the device ([`Pd::allocate`](super::Pd::allocate)). Then a short message is faster through memory of the
    /// device, from which the receiver copies it.
    pub in_place_is_slower: bool,
    /// Whether [`Device::wait_event`](super::Device::wait_event) reports a port that goes down or comes up. A device without
    /// such events has no port that can fail alone; its queue pairs fail when the peer ends.
    pub port_events: bool,
    /// A message of at most this many bytes always comes with its completion
    /// ([`Completion::inline_data`](super::Completion::inline_data)). 0 if the device does not promise that.
    pub completion_data: u32,
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Requests in the send queue. A signaled request, and one that fails, leaves it at the latest when its completion is polled; the unsignaled
    /// requests before it leave with it. **So signal at least one of half as many**, on each queue pair: a queue that is full of
    /// unsignaled requests stays full for ever, even though all of them have been executed.
    pub max_send_wr: u32,
    /// Receives outstanding; without effect when a shared receive queue is used.
    pub max_recv_wr: u32,
    /// Scatter/gather entries per send request.
    pub max_send_sge: u32,
    /// Scatter/gather entries per receive.
    pub max_recv_sge: u32,
    /// Inline bytes per send request.
    pub max_inline: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        QpConfig { max_send_wr: 256, max_recv_wr: 256, max_send_sge: 4, max_recv_sge: 4, max_inline: 220 }
    }
}

/// Sizes of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqConfig {
    /// Receives outstanding.
    pub max_wr: u32,
    /// Scatter/gather entries per receive.
    pub max_sge: u32,
}

impl Default for SrqConfig {
    fn default() -> Self {
        SrqConfig { max_wr: 1024, max_sge: 1 }
    }
}

/// Sizes of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqConfig {
    /// Completions that it can hold. The caller must not have more requests outstanding than that, or it overruns.
    pub depth: u32,
}

impl Default for CqConfig {
    fn default() -> Self {
        CqConfig { depth: 1024 }
    }
}

/// Parameters of an RC connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectConfig {
    /// The operations that the peer may perform through this queue pair.
    pub access: Access,
    /// How long the peer waits before it retries when this queue pair has no receive, as the verbs code
    /// (1 = 10 us, 12 = 640 us, 14 = 1.28 ms, ... 0 = 655 ms).
    pub min_rnr_timer: u8,
    /// How often to retry when the peer has no receive; 7 means without limit.
    pub rnr_retry: u8,
    /// How long to wait for an acknowledgement: 4.096 us times two to this power; 0 means without limit.
    pub timeout: u8,
    /// How often to retransmit without an acknowledgement, 0 to 7.
    pub retry_count: u8,
    /// READs and atomics outstanding in each direction. 16 by default, what common NICs allow; a device that allows fewer uses its own limit.
    pub max_rd_atomic: u8,
    /// The service level of the connection's packets, 0 to 15. InfiniBand: it selects the virtual lane. RoCE: the priority,
    /// where packets carry a VLAN tag; a fabric with priority flow control (PFC) needs the lossless one. Without effect on
    /// the software device.
    pub service_level: u8,
    /// The traffic class of the connection's packets, where they have a global header; on RoCE v2 it is the TOS byte of the IP
    /// header: DSCP in the upper six bits, ECN in the lower two. Without effect on the software device.
    pub traffic_class: u8,
}

impl Default for ConnectConfig {
    /// All access; RNR is retried without limit every 640 us; 67 ms per acknowledgement, with 7 retries; service level and
    /// traffic class 0.
    fn default() -> Self {
        ConnectConfig {
            access: Access::ALL,
            min_rnr_timer: 12,
            rnr_retry: 7,
            timeout: 14,
            retry_count: 7,
            max_rd_atomic: 16,
            service_level: 0,
            traffic_class: 0,
        }
    }
}

impl ConnectConfig {
    /// Checks the ranges that all devices have.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        for (what, asked, limit) in [
            ("code of the RNR timer", self.min_rnr_timer, 31),
            ("RNR retries", self.rnr_retry, 7),
            ("code of the acknowledgement timeout", self.timeout, 31),
            ("retries", self.retry_count, 7),
            ("service level", self.service_level, 15),
        ] {
            if asked > limit {
                return Err(DeviceError::Limit { what, asked: asked.into(), limit: limit.into() });
            }
        }
        Ok(())
    }
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum QpState {
    /// RESET: new, or reset.
    Reset = 0,
    /// INIT: receives can be posted.
    Init = 1,
    /// RTR: messages of the peer are received.
    ReadyToReceive = 2,
    /// RTS: send requests can be posted too.
    ReadyToSend = 3,
    /// ERR: every request that is outstanding, or posted from now on, is flushed.
    Error = 6,
}

/// The RNR delay of a verbs timer code (0 to 31).
pub fn rnr_delay(code: u8) -> core::time::Duration {
    const HUNDREDTHS_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    core::time::Duration::from_micros(10 * u64::from(HUNDREDTHS_MS[usize::from(code & 31)]))
}
