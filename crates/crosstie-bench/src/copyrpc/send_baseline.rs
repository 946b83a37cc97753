//! The baseline for the gain of batching: the same exchange with one SEND per request and one per response.
//!
//! This is good code without batches of messages: receives are posted in advance, small payloads are inline if the device supports it,
//! only one SEND in many is signaled, and all pending SENDs are posted with one doorbell. Larger payloads are in registered memory from
//! the start, so sending copies nothing.

use std::collections::VecDeque;
use std::time::Duration;

use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, Device, Mr, Pd, PostError, Posted, QpAddress, QpConfig, RcQp,
    RecvWr, SendOp, SendWr, Status,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Arguments;
use super::side::{END, RpcPeer};
use crate::error::Error;
use crate::limits::LARGE;
use crate::local_rpc::rpc_loop::{RpcClient, RpcServer, response_number};
use crate::runner::Connect;
use crate::slots::stride;

/// SENDs up to this length are inline, if the device supports it.
const MAX_INLINE: usize = 220;
/// For small messages: at least this many posted receives, and at least this many entries in the send queue.
const MIN_ENTRIES: usize = 256;
/// At most this many SENDs per signaled SEND.
const SIGNAL_EVERY: usize = 64;
/// Bytes of a message that its receiver reads: the first cache line.
const BYTES_READ: usize = 64;

/// One side of the connection, client or server.
pub(super) struct SendBaseline {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    outgoing: Outgoing,
    /// A slot for each receive.
    receive_slots: Mr,
    /// The length of the messages from the other side.
    received_len: usize,
    /// Numbers of messages that are not posted yet, and of requests without a response. Responses arrive in the order of requests.
    to_send: Vec<u64>,
    unanswered: VecDeque<u64>,
    /// Messages of the last poll: slot and number.
    received: Vec<(u64, u64)>,
    /// Whether the request that ends the slice has arrived.
    over: bool,
    _pd: Pd,
}

/// The messages that this side sends.
struct Outgoing {
    /// The message, if SENDs carry it inline.
    inline: Option<Vec<u8>>,
    /// Otherwise: one slot for each entry of the send queue.
    source: Mr,
    len: usize,
    queue_depth: u64,
    signal_every: u64,
    /// Number of posted SENDs, and of those known to be complete.
    posted: u64,
    completed: u64,
}

impl SendBaseline {
    pub(super) fn open(plan: &Arguments, device: &Device, leads: bool) -> Result<SendBaseline, Error> {
        let (payload, response, depth) = (plan.payload, plan.response(), plan.queue_depth);
        let (len, received_len) = if leads { (payload, response) } else { (response, payload) };
        let min_entries = if len.max(received_len) < LARGE { MIN_ENTRIES } else { 2 };
        // One more than the depth: the request that ends a slice.
        let receives = min_entries.max(depth + 1);
        let queue_depth = min_entries.max(2 * depth);
        let attr = device.attr();
        let inline = len <= MAX_INLINE.min(attr.max_inline as usize);
        let pd = device.alloc_pd()?;
        let config = QpConfig {
            max_send_wr: queue_depth as u32,
            max_recv_wr: receives as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: if inline { len as u32 } else { 0 },
        };
        let send_cq = device.create_cq(&CqConfig { depth: config.max_send_wr + 1 })?;
        let recv_cq = device.create_cq(&CqConfig { depth: config.max_recv_wr + 1 })?;
        let mut qp = pd.create_rc(&config, &send_cq, &recv_cq, None)?;
        qp.init(Access::LOCAL_WRITE)?;
        let receive_slots = filled(&pd, receives * stride(received_len))?;
        let source = filled(&pd, if inline { stride(len) } else { queue_depth * stride(len) })?;
        let outgoing = Outgoing {
            inline: inline.then(|| vec![1; len]),
            source,
            len,
            queue_depth: queue_depth as u64,
            signal_every: SIGNAL_EVERY.min(queue_depth / 4).max(1) as u64,
            posted: 0,
            completed: 0,
        };
        for slot in 0..receives {
            post_receive(&mut qp, &receive_slots, received_len, slot as u64)?;
        }
        Ok(SendBaseline {
            qp,
            send_cq,
            recv_cq,
            outgoing,
            receive_slots,
            received_len,
            to_send: Vec::with_capacity(queue_depth),
            unanswered: VecDeque::with_capacity(queue_depth),
            received: Vec::with_capacity(receives),
            over: false,
            _pd: pd,
        })
    }

    /// How many more messages may be queued.
    #[inline]
    fn room(&self) -> usize {
        self.outgoing.room() - self.to_send.len()
    }

    /// Posts the queued messages as one batch.
    #[inline]
    fn post(&mut self) -> Result<(), Error> {
        let SendBaseline { qp, outgoing, to_send, .. } = self;
        if to_send.is_empty() {
            return Ok(());
        }
        qp.post_batch(|batch| {
            to_send.drain(..).try_for_each(|number| outgoing.send(number, |wr| batch.post(wr)))
        })
    }

    /// Polls for up to `max` messages, stores their slots and numbers in `received`, and reposts their receives.
    #[inline]
    fn receive(&mut self, max: usize) -> Result<usize, Error> {
        let SendBaseline { qp, recv_cq, receive_slots, received_len, received, .. } = self;
        received.clear();
        let mut failed = None;
        recv_cq.poll(max, |completion| {
            let fits = completion.byte_len as usize == *received_len;
            match number(receive_slots, *received_len, completion.wr_id) {
                _ if !completion.status.is_success() => {
                    failed = Some(request_failed("receive", completion.status))
                }
                Ok(number) if fits => received.push((completion.wr_id, number)),
                Ok(_) => failed = Some(Error::Peer("it sent a message of the wrong length".into())),
                Err(error) => failed = Some(error),
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        // Before any response is sent: a client that has its response may send its next request at once.
        for (slot, _) in received.iter() {
            post_receive(qp, receive_slots, *received_len, *slot)?;
        }
        Ok(received.len())
    }

    /// Polls for completed SENDs, once more than half of the send queue is in use.
    #[inline]
    fn poll_send_cq(&mut self) -> Result<(), Error> {
        let Outgoing { queue_depth, posted, completed, .. } = &mut self.outgoing;
        if *posted - *completed <= *queue_depth / 2 {
            return Ok(());
        }
        let mut failed = None;
        self.send_cq.poll(*queue_depth as usize, |completion| match completion.status {
            status if status.is_success() => *completed = completion.wr_id,
            status => failed = Some(request_failed("send", status)),
        })?;
        failed.map_or(Ok(()), Err)
    }
}

impl Outgoing {
    #[inline]
    fn room(&self) -> usize {
        (self.queue_depth - (self.posted - self.completed)) as usize
    }

    #[inline]
    fn send(
        &mut self,
        number: u64,
        post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<(), Error> {
        // A completion means that this SEND and all before it are complete.
        let id = self.posted + 1;
        let signaled = id.is_multiple_of(self.signal_every);
        let wr = SendWr { signal: signaled.into(), ..SendWr::new(id, SendOp::Send, Data::Regions(&[])) };
        if let Some(message) = &mut self.inline {
            message[..8].copy_from_slice(&number.to_ne_bytes());
            post(&SendWr { data: Data::Inline(message), ..wr })?;
        } else {
            let at = (self.posted % self.queue_depth) as usize * stride(self.len);
            self.source.write(at, &number.to_ne_bytes())?;
            post(&SendWr { data: Data::Regions(&[self.source.sge(at..at + self.len)?]), ..wr })?;
        }
        self.posted = id;
        Ok(())
    }
}

impl Connect for SendBaseline {
    fn address(&self) -> Vec<u8> {
        self.qp.address().as_bytes().to_vec()
    }

    fn connect(&mut self, address: &[u8]) -> Result<(), Error> {
        let address = QpAddress::read_from_bytes(address).map_err(|_| Error::Protocol)?;
        let config = ConnectConfig { access: Access::LOCAL_WRITE, ..ConnectConfig::default() };
        Ok(self.qp.connect(&address, &config)?)
    }
}

impl RpcPeer for SendBaseline {
    fn begin_slice(&mut self) {
        self.over = false;
    }

    fn end_slice(&mut self) -> Result<(), Error> {
        if !self.call(END)? {
            return Err(Error::Rpc {
                what: "sending",
                source: "there is no room for the last request of a slice".into(),
            });
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.over
    }
}

impl RpcClient for SendBaseline {
    #[inline(always)]
    fn call(&mut self, number: u64) -> Result<bool, Error> {
        let fits = self.room() > 0;
        if fits {
            self.to_send.push(number);
            self.unanswered.push_back(number);
        }
        Ok(fits)
    }

    #[inline(always)]
    fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
        self.post()?;
        self.poll_send_cq()?;
        let count = self.receive(MIN_ENTRIES)?;
        for (_, number) in &self.received {
            let Some(token) = self.unanswered.pop_front() else {
                return Err(Error::Peer("it sent a response without a request".into()));
            };
            seen(token, *number);
        }
        Ok(count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.recv_cq.wait(timeout)?;
        Ok(())
    }
}

impl RpcServer for SendBaseline {
    #[inline(always)]
    fn serve(&mut self) -> Result<usize, Error> {
        self.poll_send_cq()?;
        let room = self.room().min(MIN_ENTRIES);
        if room == 0 {
            return Ok(0);
        }
        let mut count = self.receive(room)?;
        for (_, number) in &self.received {
            if *number == END {
                self.over = true;
                count -= 1;
            }
            self.to_send.push(response_number(*number));
        }
        self.post()?;
        Ok(count)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.recv_cq.wait(timeout)?;
        Ok(())
    }
}

#[inline]
fn post_receive(qp: &mut RcQp, receive_slots: &Mr, len: usize, slot: u64) -> Result<(), Error> {
    let at = slot as usize * stride(len);
    Ok(qp.post_recv(&RecvWr { wr_id: slot, sges: &[receive_slots.sge(at..at + len)?] })?)
}

/// The number at the start of a message. Always reads the first cache line of the message.
#[inline]
fn number(receive_slots: &Mr, len: usize, slot: u64) -> Result<u64, Error> {
    let mut line = [0u64; BYTES_READ / 8];
    receive_slots.read(slot as usize * stride(len), &mut line.as_mut_bytes()[..len.min(BYTES_READ)])?;
    Ok(line[0])
}

/// Registered memory whose pages have all been touched, so that no slice pays for page faults.
fn filled(pd: &Pd, len: usize) -> Result<Mr, Error> {
    let memory = pd.allocate(len, Access::LOCAL_WRITE)?;
    memory.write(0, &vec![1; len])?;
    Ok(memory)
}

fn request_failed(what: &'static str, status: Status) -> Error {
    Error::Request { what, status }
}
