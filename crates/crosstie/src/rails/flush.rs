//! Makes received bytes visible in memory of a GPU.

use crosstie_protocol::rails::Mask;

use super::context::Rails;
use super::error::{RequestError, SetupError};
use super::memory::Memory;
use crate::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, DeviceError, Mr, OutOfRegion, PostError, QpConfig, RcQp,
    RemoteAddr, SendOp, SendWr,
};

/// Makes received bytes visible in memory of a GPU: a receive that is done says that the NIC has sent them on their way over PCIe. (For
/// memory of the host that is enough.)
///
/// It reads a byte through each NIC. PCIe lets no read overtake the writes before it, so the writes of that NIC have reached the GPU when
/// the read is done. A NIC that has failed is left out: its read is tried once more on a new queue pair, which takes far longer
/// than a write stays on the bus.
///
/// The memory must be registered with [`Access::REMOTE_READ`] in addition to what [`Rails::adopt`] requires.
#[derive(Debug)]
pub struct Flusher {
    context: Rails,
    /// `None`: the rail has failed.
    loops: Vec<Option<Loop>>,
    /// The number of the last flush.
    newest: u64,
}

/// A flush that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flush(u64);

/// A queue pair of a rail that is connected with itself. It has one read under way at most, which serves all flushes that were started
/// before it was posted.
#[derive(Debug)]
struct Loop {
    qp: RcQp,
    cq: Cq,
    target: Mr,
    /// What the next read reads.
    from: RemoteAddr,
    /// The last flush that the read under way serves, and the last one that is done. Equal if no read is under way.
    posted: u64,
    done: u64,
    /// It replaces one that failed, and has done nothing yet.
    is_second: bool,
}

impl Flusher {
    /// For connections of this context.
    pub fn new(context: &Rails) -> Result<Flusher, SetupError> {
        let new = |rail| Loop::new(context, rail).map_err(|source| SetupError::Device { rail, source });
        let loops = (0..context.rails()).map(|rail| new(rail).map(Some)).collect::<Result<_, _>>()?;
        Ok(Flusher { context: context.clone(), loops, newest: 0 })
    }

    /// Starts to make visible what was received into the memory, at `offset` and everywhere else. `up` are the rails that the connection
    /// uses now ([`RecvConnection::rails_up`](super::RecvConnection::rails_up)): one that had failed is tried again.
    pub fn start(&mut self, memory: &Memory, offset: usize, up: Mask) -> Result<Flush, RequestError> {
        if memory.context != self.context.context.id {
            return Err(RequestError::WrongMemory);
        }
        if offset >= memory.len() {
            return Err(OutOfRegion { offset, len: 1, region: memory.len() }.into());
        }
        self.newest += 1;
        for rail in 0..self.loops.len() {
            let state = &mut self.loops[rail];
            if state.is_none() && up & (1 << rail) != 0 {
                *state = Loop::new(&self.context, rail).ok();
            }
            let Some(working) = state else { continue };
            working.from = memory.remote(rail).at(offset as u64);
            if working.posted == working.done && working.post(self.newest).is_err() {
                self.replace(rail);
            }
        }
        Ok(Flush(self.newest))
    }

    /// Whether everything is visible that was received before the flush was started. Never fails: what a NIC that has failed has sent
    /// on its way has arrived since.
    pub fn test(&mut self, flush: Flush) -> bool {
        let mut is_done = true;
        for rail in 0..self.loops.len() {
            let Some(state) = &mut self.loops[rail] else { continue };
            if state.done < flush.0 && state.progress(self.newest).is_err() {
                self.replace(rail);
            }
            is_done &= self.loops[rail].as_ref().is_none_or(|state| state.done >= flush.0);
        }
        is_done
    }

    /// The rails that have not failed.
    pub fn rails(&self) -> Mask {
        self.loops.iter().enumerate().fold(0, |mask, (rail, state)| mask | u8::from(state.is_some()) << rail)
    }

    /// The loop of a rail has failed: the read under way is done by a new one, or, if that failed as well, by none.
    #[cold]
    fn replace(&mut self, rail: usize) {
        let Some(failed) = self.loops[rail].take().filter(|failed| !failed.is_second) else { return };
        let Ok(new) = Loop::new(&self.context, rail) else { return };
        let mut new =
            Loop { from: failed.from, posted: failed.done, done: failed.done, is_second: true, ..new };
        if new.post(self.newest).is_ok() {
            self.loops[rail] = Some(new);
        }
    }
}

impl Loop {
    fn new(context: &Rails, rail: usize) -> Result<Loop, DeviceError> {
        let (device, domain) = (&context.devices()[rail], &context.domains()[rail]);
        let cq = device.create_cq(&CqConfig { depth: 16 })?;
        let config = QpConfig { max_send_wr: 4, max_recv_wr: 1, max_inline: 0, ..QpConfig::default() };
        let mut qp = domain.create_rc(&config, &cq, &cq, None)?;
        let address = qp.address();
        qp.connect(&address, &ConnectConfig { access: Access::REMOTE_READ, ..ConnectConfig::default() })?;
        let target = domain.allocate(64, Access::LOCAL_WRITE)?;
        let from = RemoteAddr { addr: 0, rkey: 0 };
        Ok(Loop { qp, cq, target, from, posted: 0, done: 0, is_second: false })
    }

    /// Posts a read that serves all flushes up to `newest`.
    fn post(&mut self, newest: u64) -> Result<(), PostError> {
        let sges = [self.target.sge(0..1).map_err(|_| PostError::Invalid("the target is empty"))?];
        self.qp.post(&SendWr::new(newest, SendOp::Read(self.from), Data::Regions(&sges)).signaled())?;
        self.posted = newest;
        Ok(())
    }

    /// Looks whether the read is done, and posts the next one for flushes that it does not serve. An error means that the loop
    /// does not work any more.
    fn progress(&mut self, newest: u64) -> Result<(), PostError> {
        let (mut failed, mut done) = (false, self.done);
        let polled = self.cq.poll(16, |completion| {
            failed |= !completion.status.is_success();
            done = done.max(completion.wr_id);
        });
        if failed || polled.is_err() {
            return Err(PostError::Invalid("the read has failed"));
        }
        if done > self.done {
            (self.done, self.is_second) = (done, false);
        }
        if self.posted == self.done && self.done < newest { self.post(newest) } else { Ok(()) }
    }
}
