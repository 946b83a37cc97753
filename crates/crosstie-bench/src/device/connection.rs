//! One side of the measured connection: its queue pair, completion queues and memory.

use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Device, Mr, Pd, QpAddress, QpConfig, RcQp, RecvWr, RemoteAddr,
    RemoteMemory, SendOp,
};
use crosstie::telemetry::Counters;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::sender::{Sender, SignalPolicy};
use super::{Op, Shape};
use crate::error::Error;
use crate::slots::stride;
use crate::spin_wait::SpinWait;

/// The value of every byte in the memory that READs read.
pub(super) const PATTERN: u8 = 0x5A;

/// What one side must know about the other to connect and to address its memory.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct PeerInfo {
    address: QpAddress,
    slots: RemoteMemory,
    control: RemoteMemory,
}

impl PeerInfo {
    /// The address of a slot of that side.
    #[inline]
    pub(super) fn slot(&self, payload: usize, slot: usize) -> RemoteAddr {
        self.slots.at((slot * stride(payload)) as u64)
    }

    /// The WRITE that tells that side how many messages were consumed.
    #[inline]
    pub(super) fn consumed(&self) -> SendOp {
        SendOp::Write(self.control.at(0))
    }
}

/// One side.
///
/// ```text
/// slots    target of the other side's operations: one per message in flight, or per receive for SEND; each at a cache line
/// source   (in `sender`) bytes of outgoing requests, or destination of READs and atomics; same layout as slots
/// control  the number of messages that the other side has consumed
/// ```
pub(super) struct Connection {
    pub(super) payload: usize,
    pub(super) depth: usize,
    pub(super) op: Op,
    pub(super) qp: RcQp,
    pub(super) sender: Sender,
    pub(super) recv_cq: Cq,
    /// Number of posted receives; each has its own slot.
    pub(super) receives: usize,
    pub(super) slots: Mr,
    control: Mr,
    /// The memory that was registered in place. Field order: dropped after `slots`.
    _in_place: Option<Vec<u64>>,
    peer: Option<PeerInfo>,
    pub(super) spin: SpinWait,
    /// Number of messages with wrong data.
    pub(super) errors: u64,
    _pd: Pd,
}

/// Requests up to this length are inline, if the device can.
pub(super) const INLINE: u32 = 220;
/// Receives that a side keeps posted, if its messages are small.
const POSTED_RECEIVES: usize = 256;

impl Connection {
    pub(super) fn new(
        shape: Shape,
        in_place: bool,
        device: &Device,
        spin: SpinWait,
    ) -> Result<Connection, Error> {
        let max_inline = INLINE.min(device.attr().max_inline);
        shape.check(device)?;
        let Shape { op, payload, depth } = shape;
        let pd = device.alloc_pd()?;
        // Small messages: many posted receives, as a usual program has. Large ones: only as many as can be in flight.
        let receives = if payload <= 4096 { POSTED_RECEIVES.max(depth + 1) } else { depth + 1 };
        let slot_count = if op == Op::Send { receives } else { depth + 1 };
        let signals = SignalPolicy::new(depth);
        let config = QpConfig {
            max_send_wr: signals.queue_len(),
            max_recv_wr: receives as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline,
        };
        let cq = device.create_cq(&CqConfig { depth: config.max_send_wr + 1 })?;
        let recv_cq = device.create_cq(&CqConfig { depth: config.max_recv_wr + 1 })?;
        let mut qp = pd.create_rc(&config, &cq, &recv_cq, None)?;
        qp.init(Access::ALL)?;
        let memory = slot_count * stride(payload);
        let mut in_place = in_place.then(|| vec![0u64; memory / 8]);
        #[allow(unsafe_code, reason = "registers memory in place")]
        let slots = match &mut in_place {
            // SAFETY: the vector is a field of the same struct and is dropped after the region (field order). Its memory never moves, and
            // only the region is used to read or write it.
            Some(words) => unsafe { pd.register(words.as_mut_ptr().cast(), memory, Access::ALL)? },
            None => pd.allocate(memory, Access::ALL)?,
        };
        let source = pd.allocate(memory, Access::ALL)?;
        // Touches every page before the first slice, and fills the memory that READs read.
        source.write(0, &vec![1; memory])?;
        slots.write(0, &vec![if op == Op::Read { PATTERN } else { 0 }; memory])?;
        let is_inline = matches!(op, Op::Write | Op::WriteImm | Op::Send) && payload <= max_inline as usize;
        let inline = is_inline.then_some([1; INLINE as usize]);
        let sender = Sender { op, payload, source, inline, cq, counters: Counters::default(), signals };
        let control = pd.allocate(64, Access::ALL)?;
        let mut connection = Connection {
            payload,
            depth,
            op,
            qp,
            sender,
            recv_cq,
            receives,
            slots,
            control,
            _in_place: in_place,
            peer: None,
            spin,
            errors: 0,
            _pd: pd,
        };
        if op.is_received() {
            for slot in 0..receives {
                connection.post_receive(slot)?;
            }
        }
        Ok(connection)
    }

    /// What the other side must know about this one.
    pub(super) fn peer_info(&self) -> PeerInfo {
        PeerInfo { address: self.qp.address(), slots: self.slots.remote(), control: self.control.remote() }
    }

    /// Connects to the side that sent this info.
    pub(super) fn connect(&mut self, info: &[u8]) -> Result<(), Error> {
        let info = PeerInfo::read_from_bytes(info).map_err(|_| Error::Protocol)?;
        self.qp.connect(&info.address, &ConnectConfig::default())?;
        self.peer = Some(info);
        Ok(())
    }

    #[inline]
    pub(super) fn peer(&self) -> Result<PeerInfo, Error> {
        self.peer.ok_or(Error::Protocol)
    }

    /// Posts a receive; for SEND it receives into the slot.
    #[inline]
    pub(super) fn post_receive(&mut self, slot: usize) -> Result<(), Error> {
        self.sender.counters.receives += 1;
        let wr_id = slot as u64;
        if self.op == Op::Send {
            let at = slot * stride(self.payload);
            let sges = [self.slots.sge(at..at + self.payload)?];
            self.qp.post_recv(&RecvWr { wr_id, sges: &sges })?;
        } else {
            self.qp.post_recv(&RecvWr { wr_id, sges: &[] })?;
        }
        Ok(())
    }

    /// The number of messages that the other side has consumed, as it last wrote it.
    #[inline]
    pub(super) fn consumed(&self) -> Result<u64, Error> {
        let mut word = 0u64;
        self.control.read(0, word.as_mut_bytes())?;
        Ok(word)
    }
}

/// Whether a slot begins with the number `seq`. Always reads the first cache line of the slot.
#[inline]
pub(super) fn slot_holds(memory: &Mr, payload: usize, slot: usize, seq: u64) -> Result<bool, Error> {
    let mut line = [0u64; 8];
    let seen = payload.min(64);
    memory.read(slot * stride(payload), &mut line.as_mut_bytes()[..seen])?;
    Ok(holds(&line.as_bytes()[..seen], seq))
}

/// Whether a message begins with the number `seq`. Messages of less than 8 bytes have none.
#[inline]
pub(super) fn holds(message: &[u8], seq: u64) -> bool {
    message.first_chunk().is_none_or(|first| u64::from_ne_bytes(*first) == seq)
}
