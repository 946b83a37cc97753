//! What batches are compared with: the same exchange, one SEND for each request and one for each response.
//!
//! This is what one writes who has queue pairs and no batches, and knows how to use them: receives in stock, bytes inline
//! where the device can, one completion unanswered for in many, and all SENDs that are to_send posted with one doorbell. Longer
//! payloads lie in registered memory from the start, so that sending copies nothing.

use std::collections::VecDeque;
use std::time::Duration;

use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, Device, Mr, Pd, QpAddress, QpConfig, RcQp, RecvWr, SendOp,
    SendWr, Status,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Plan;
use super::role::{END, RpcPeer};
use crate::error::Error;
use crate::node::rpc_loop::{RpcClient, RpcServer, response_number};
use crate::summary::LARGE;

/// SENDs up to this long carry their bytes inline where the device can.
const MAX_INLINE: usize = 220;
/// Receives and queue_depth for SENDs that are kept in any case, if messages are small.
const IN_STOCK: usize = 256;
/// SENDs that ask for no completion between two that do, at most.
const SIGNAL_EVERY: usize = 64;
/// What is looked at of a message: its first line.
const BYTES_READ: usize = 64;

/// Either side.
pub(super) struct SendBaseline {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    outgoing: Outgoing,
    /// A slot for each receive.
    receive_slots: Mr,
    /// How long a message of the other side is.
    expected: usize,
    /// Numbers of messages to be sent, and of requests sent that are not answered: in order, as answers come.
    to_send: Vec<u64>,
    unanswered: VecDeque<u64>,
    /// What received with the last poll: slots and numbers.
    received: Vec<(u64, u64)>,
    /// Whether the request received that ends the slice.
    over: bool,
    _pd: Pd,
}

/// The messages that this side sends.
struct Outgoing {
    /// The message, if SENDs carry it inline.
    inline: Option<Vec<u8>>,
    /// Otherwise: a slot for each place of the send queue.
    source: Mr,
    len: usize,
    queue_depth: u64,
    signal_every: u64,
    /// How many were posted, and of how many it is known that they are done.
    posted: u64,
    done: u64,
}

impl SendBaseline {
    pub(super) fn open(plan: &Plan, device: &Device, leads: bool) -> Result<SendBaseline, Error> {
        let Plan { payload, response, depth, .. } = *plan;
        let (len, expected) = if leads { (payload, response) } else { (response, payload) };
        let stock = if len.max(expected) < LARGE { IN_STOCK } else { 2 };
        // One more than there can be: the request that ends a slice.
        let receives = stock.max(depth + 1);
        let queue_depth = stock.max(2 * depth);
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
        let receive_slots = filled(&pd, receives * stride(expected))?;
        let source = filled(&pd, if inline { stride(len) } else { queue_depth * stride(len) })?;
        let outgoing = Outgoing {
            inline: inline.then(|| vec![1; len]),
            source,
            len,
            queue_depth: queue_depth as u64,
            signal_every: SIGNAL_EVERY.min(queue_depth / 4).max(1) as u64,
            posted: 0,
            done: 0,
        };
        for slot in 0..receives {
            post_receive(&mut qp, &receive_slots, expected, slot as u64)?;
        }
        Ok(SendBaseline {
            qp,
            send_cq,
            recv_cq,
            outgoing,
            receive_slots,
            expected,
            to_send: Vec::with_capacity(queue_depth),
            unanswered: VecDeque::with_capacity(queue_depth),
            received: Vec::with_capacity(receives),
            over: false,
            _pd: pd,
        })
    }

    /// What the other side must know.
    pub(super) fn address_bytes(&self) -> Vec<u8> {
        self.qp.address().as_bytes().to_vec()
    }

    pub(super) fn connect(&mut self, address: &[u8]) -> Result<(), Error> {
        let address = QpAddress::read_from_bytes(address).map_err(|_| Error::Protocol)?;
        let config = ConnectConfig { access: Access::LOCAL_WRITE, ..ConnectConfig::default() };
        Ok(self.qp.connect(&address, &config)?)
    }

    /// How many more may be to_send.
    #[inline]
    fn room(&self) -> usize {
        self.outgoing.room() - self.to_send.len()
    }

    /// Posts what is to_send.
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

    /// Takes what arrived, `max` messages at most, posts their receives anew, and finds their numbers in `received`.
    #[inline]
    fn receive(&mut self, max: usize) -> Result<usize, Error> {
        let SendBaseline { qp, recv_cq, receive_slots, expected, received, .. } = self;
        received.clear();
        let mut failed = None;
        recv_cq.poll(max, |completion| {
            let fits = completion.byte_len as usize == *expected;
            match number(receive_slots, *expected, completion.wr_id) {
                _ if !completion.status.is_success() => failed = Some(request("receive", completion.status)),
                Ok(number) if fits => received.push((completion.wr_id, number)),
                Ok(_) => failed = Some(Error::Peer("a message of the wrong length".into())),
                Err(error) => failed = Some(error),
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        // Before anything is answered: whoever has an answer may ask again.
        for (slot, _) in received.iter() {
            post_receive(qp, receive_slots, *expected, *slot)?;
        }
        Ok(received.len())
    }

    /// Looks which SENDs are done, once half of the queue_depth are taken.
    #[inline]
    fn poll_send_cq(&mut self) -> Result<(), Error> {
        let Outgoing { queue_depth, posted, done, .. } = &mut self.outgoing;
        if *posted - *done <= *queue_depth / 2 {
            return Ok(());
        }
        let mut failed = None;
        self.send_cq.poll(*queue_depth as usize, |completion| match completion.status {
            status if status.is_success() => *done = completion.wr_id,
            status => failed = Some(request("send", status)),
        })?;
        failed.map_or(Ok(()), Err)
    }
}

impl Outgoing {
    #[inline]
    fn room(&self) -> usize {
        (self.queue_depth - (self.posted - self.done)) as usize
    }

    #[inline]
    fn send(
        &mut self,
        number: u64,
        post: impl FnOnce(&SendWr<'_>) -> Result<(), crosstie::device::PostError>,
    ) -> Result<(), Error> {
        // A completion says that all up to this one are done.
        let id = self.posted + 1;
        let signaled = id.is_multiple_of(self.signal_every);
        let wr = SendWr { signaled, ..SendWr::new(id, SendOp::Send, Data::Regions(&[])) };
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

impl RpcPeer for SendBaseline {
    fn begin(&mut self) {
        self.over = false;
    }

    fn end(&mut self) -> Result<(), Error> {
        if !self.call(END)? {
            return Err(Error::Rpc { what: "sending", source: "no room for a single SEND".into() });
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
        let count = self.receive(IN_STOCK)?;
        for (_, number) in &self.received {
            let Some(token) = self.unanswered.pop_front() else {
                return Err(Error::Peer("an answer to nothing".into()));
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
        let room = self.room().min(IN_STOCK);
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

/// The number that a message begins with; its first line is read in any case.
#[inline]
fn number(receive_slots: &Mr, len: usize, slot: u64) -> Result<u64, Error> {
    let mut line = [0u64; BYTES_READ / 8];
    receive_slots.read(slot as usize * stride(len), &mut line.as_mut_bytes()[..len.min(BYTES_READ)])?;
    Ok(line[0])
}

/// Memory whose pages were touched, so that no slice pays for that.
fn filled(pd: &Pd, len: usize) -> Result<Mr, Error> {
    let memory = pd.allocate(len, Access::LOCAL_WRITE)?;
    memory.write(0, &vec![1; len])?;
    Ok(memory)
}

/// From one slot to the next.
fn stride(len: usize) -> usize {
    len.next_multiple_of(64)
}

fn request(what: &'static str, status: Status) -> Error {
    Error::Request { what, status }
}
