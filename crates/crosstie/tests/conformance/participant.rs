//! What a case works with: this participant's device, a channel to the other participant, and helpers for common objects.

use std::alloc::Layout;
use std::time::{Duration, Instant};

use crosstie::device::{
    Access, Completion, ConnectConfig, Cq, CqConfig, Data, Device, DeviceSpec, Mr, Opcode, Pd, QpAddress,
    QpConfig, RcQp, RecvWr, SendOp, SendWr, Srq, Status,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::harness::channel::Channel;
use crate::harness::{self, TestSetup};
use crate::seccomp;

/// Limit on anything that should happen. It is generous: it only ends a case that hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// How long to watch that nothing happens.
pub(crate) const QUIET_PERIOD: Duration = Duration::from_millis(30);

/// The provider, without wrappers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    Software,
    Verbs,
}

/// The provider that a setup runs on, without wrappers.
pub(crate) fn provider(setup: &TestSetup) -> Provider {
    fn bottom(spec: &DeviceSpec) -> Provider {
        match spec {
            DeviceSpec::Software => Provider::Software,
            DeviceSpec::Verbs { .. } => Provider::Verbs,
            DeviceSpec::Fault { inner, .. } => bottom(inner),
        }
    }
    bottom(&setup.specs[0])
}

/// One of the two participants of a case.
pub(crate) struct Participant {
    index: usize,
    setup: TestSetup,
    /// This participant's device: the first of the run or, with `--across`, the second for the right participant.
    pub(crate) device: Device,
    channel: Channel,
}

impl harness::Participant for Participant {
    fn new(index: usize, setup: TestSetup, channel: Channel) -> Participant {
        Participant { index, device: setup.open_for(index), setup, channel }
    }

    fn wait_for_other(&mut self) {
        self.wait_for_other();
    }
}

impl Participant {
    /// By convention the left participant sends requests and the right one is their target.
    pub(crate) fn is_left(&self) -> bool {
        self.index == 0
    }

    pub(crate) fn provider(&self) -> Provider {
        provider(&self.setup)
    }

    /// Opens this participant's device again.
    pub(crate) fn open_again(&self) -> Device {
        self.setup.open_for(self.index)
    }

    /// Opens a device of the run by its number; the last one if there are fewer.
    pub(crate) fn open(&self, which: usize) -> Device {
        self.setup.open(which)
    }

    /// The statuses with which a request may end: the one of the contract and, with verbs, those that devices are known to
    /// report instead.
    pub(crate) fn allowed_statuses(&self, exact: Status, verbs: &[Status]) -> Vec<Status> {
        let also = if self.provider() == Provider::Verbs { verbs } else { &[] };
        [&[exact], also].concat()
    }

    /// How often to repeat something cheap: fewer times on verbs, where a system call of an emulated guest is expensive.
    pub(crate) fn repetitions(&self, times: usize) -> usize {
        match self.provider() {
            Provider::Software => times,
            Provider::Verbs => (times / 20).max(8),
        }
    }

    /// Sends a value to the other participant.
    pub(crate) fn send<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.channel.send(value.as_bytes()).expect("the other side listens");
    }

    /// Waits for a value of the other participant.
    pub(crate) fn receive<T: FromBytes>(&mut self) -> T {
        let bytes = self.channel.recv().expect("the other side tells (see its own failure)");
        T::read_from_bytes(&bytes).unwrap_or_else(|_| panic!("{} bytes of another type", bytes.len()))
    }

    /// Sends a value and waits for the other participant's.
    pub(crate) fn exchange<T: IntoBytes + FromBytes + Immutable>(&mut self, mine: &T) -> T {
        self.send(mine);
        self.receive()
    }

    /// Returns when both participants have called this.
    pub(crate) fn wait_for_other(&mut self) {
        const HERE: u64 = 0x6865_7265;
        assert_eq!(self.exchange(&HERE), HERE, "the sides are out of step");
    }

    /// A queue pair that is connected to the other participant's, with default sizes.
    pub(crate) fn connected_qp(&mut self) -> TestQp {
        self.connected_qp_with(&TestConfig::default())
    }

    pub(crate) fn connected_qp_with(&mut self, shape: &TestConfig) -> TestQp {
        let mut end = TestQp::unconnected(&self.device, shape);
        self.connect(&mut end.qp, &shape.connect);
        end
    }

    /// Connects a queue pair to the one that the other participant connects at the same point of the case.
    pub(crate) fn connect(&mut self, qp: &mut RcQp, config: &ConnectConfig) {
        let mut config = *config;
        if self.provider() == Provider::Verbs {
            // Half a second: emulated machines lose packets and are slow.
            config.timeout = config.timeout.max(17);
        }
        let peer: QpAddress = self.exchange(&qp.address());
        qp.connect(&peer, &config).expect("connect");
        self.wait_for_other();
    }
}

/// Sizes that a case may change.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TestConfig {
    pub(crate) qp: QpConfig,
    pub(crate) cq: CqConfig,
    pub(crate) connect: ConnectConfig,
}

/// A queue pair with its own protection domain and one completion queue for sends and receives.
pub(crate) struct TestQp {
    pub(crate) qp: RcQp,
    pub(crate) cq: Cq,
    pub(crate) pd: Pd,
}

impl TestQp {
    pub(crate) fn unconnected(device: &Device, shape: &TestConfig) -> TestQp {
        let pd = device.alloc_pd().expect("alloc_pd");
        let cq = device.create_cq(&shape.cq).expect("create_cq");
        let qp = pd.create_rc(&shape.qp, &cq, &cq, None).expect("create_rc");
        TestQp { qp, cq, pd }
    }

    /// Memory with all access rights: zeroed, and aligned to a page.
    pub(crate) fn region(&self, len: usize) -> Mr {
        if !seccomp::is_process_vm_refused() {
            return self.pd.allocate(len, Access::ALL).expect("allocate");
        }
        let layout = Layout::from_size_align(len.max(1), 4096).expect("a layout");
        // SAFETY: the size is not zero. The memory is never freed, so it outlives the region, through which alone it is used.
        unsafe { self.pd.register(std::alloc::alloc_zeroed(layout), len, Access::ALL) }.expect("register")
    }

    /// Posts a receive without memory.
    pub(crate) fn recv(&mut self, wr_id: u64) {
        self.qp.post_recv(&RecvWr { wr_id, sges: &[] }).expect("post_recv");
    }

    /// Posts a receive into a whole region.
    pub(crate) fn recv_into(&mut self, wr_id: u64, mr: &Mr) {
        self.qp.post_recv(&RecvWr { wr_id, sges: &[whole_region(mr)] }).expect("post_recv");
    }

    /// Posts a signaled request with inline data.
    pub(crate) fn inline(&mut self, wr_id: u64, op: SendOp, bytes: &[u8]) {
        self.qp.post(&SendWr::new(wr_id, op, Data::Inline(bytes)).signaled()).expect("post");
    }

    /// Posts a signaled request with a whole region.
    pub(crate) fn post(&mut self, wr_id: u64, op: SendOp, mr: &Mr) {
        self.qp.post(&SendWr::new(wr_id, op, Data::Regions(&[whole_region(mr)])).signaled()).expect("post");
    }

    /// The next completion, which must be a success of this request.
    pub(crate) fn expect_success(&mut self, wr_id: u64) -> Completion {
        expect_success(&mut self.cq, wr_id)
    }

    /// The next completions, which must be successes of these requests in this order.
    pub(crate) fn expect_all_success(&mut self, wr_ids: impl IntoIterator<Item = u64>) {
        for wr_id in wr_ids {
            self.expect_success(wr_id);
        }
    }

    /// The next completions, which must be these requests flushed in this order.
    pub(crate) fn expect_all_flushed(&mut self, wr_ids: impl IntoIterator<Item = u64>) {
        for wr_id in wr_ids {
            self.expect_status(wr_id, &[Status::Flushed]);
        }
    }

    /// The next completion, which must be this request's with one of these statuses.
    pub(crate) fn expect_status(&mut self, wr_id: u64, allowed: &[Status]) -> Completion {
        let completion = next_completion(&mut self.cq);
        assert_eq!(completion.wr_id, wr_id, "out of order: {completion:?}");
        assert!(allowed.contains(&completion.status), "{completion:?}, allowed {allowed:?}");
        assert_eq!(completion.qp_num, self.qp.qp_num(), "{completion:?}");
        completion
    }
}

/// A scatter/gather entry for the whole region.
pub(crate) fn whole_region(mr: &Mr) -> crosstie::device::Sge<'_> {
    mr.sge(0..mr.len()).expect("a region contains itself")
}

/// The next completion of a queue.
pub(crate) fn next_completion(cq: &mut Cq) -> Completion {
    take_completions(cq, 1)[0]
}

/// The next completion, which must be a success of this request.
pub(crate) fn expect_success(cq: &mut Cq, wr_id: u64) -> Completion {
    let completion = next_completion(cq);
    assert_eq!((completion.wr_id, completion.status), (wr_id, Status::Success), "{completion:?}");
    completion
}

/// The next `count` completions of a queue, in the order of arrival.
pub(crate) fn take_completions(cq: &mut Cq, count: usize) -> Vec<Completion> {
    let mut taken = Vec::with_capacity(count);
    wait_until(&format!("{count} completions"), || {
        let max = count - taken.len();
        cq.poll(max, |c| taken.push(*c)).expect("poll");
        assert!(taken.len() <= count, "poll({max}) handed out more");
        taken.len() == count
    });
    taken
}

/// Asserts that nothing completes for a while.
pub(crate) fn assert_no_completion(cq: &mut Cq) {
    let end = Instant::now() + QUIET_PERIOD;
    while Instant::now() < end {
        cq.poll(1, |c| panic!("nothing should complete, yet {c:?}")).expect("poll");
        std::thread::yield_now();
    }
}

/// Waits until `ready` returns true.
pub(crate) fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !ready() {
        assert!(Instant::now() < deadline, "waited {TIMEOUT:?} for {what}");
        std::thread::yield_now();
    }
}

/// Pseudo-random bytes that depend on the seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Writes bytes into a region.
pub(crate) fn write_bytes(mr: &Mr, offset: usize, bytes: &[u8]) {
    mr.write(offset, bytes).expect("inside the region");
}

/// Reads bytes of a region.
pub(crate) fn read_bytes(mr: &Mr, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mr.read(offset, &mut bytes).expect("inside the region");
    bytes
}

/// Reads an aligned word of a region.
pub(crate) fn read_word(mr: &Mr, offset: usize) -> u64 {
    u64::from_ne_bytes(read_bytes(mr, offset, 8).try_into().expect("eight bytes"))
}

/// Asserts that a completion is a success with this opcode.
#[track_caller]
pub(crate) fn assert_opcode(completion: &Completion, opcode: Opcode) {
    assert_eq!((completion.status, completion.opcode), (Status::Success, opcode), "{completion:?}");
}

/// Posts a receive without memory to a shared queue.
pub(crate) fn post_srq_recv(srq: &mut Srq, wr_id: u64) {
    srq.post_recv(&RecvWr { wr_id, sges: &[] }).expect("post_recv");
}
