//! Messages on bare queue pairs of the software device: what both ends do for one, from the post to the completion.

use crosstie::device::{
    Access, Cq, CqConfig, Data, Device, Mr, QpConfig, RcQp, RecvWr, SendOp, SendWr, Srq, SrqConfig, software,
};

use crosstie_testkit::{callgrind, child};

use super::ends::connect;

const ROUNDS: u32 = 1000;
const PAYLOAD: usize = 32;

/// Two connected queue pairs of one process.
struct Pair {
    near: RcQp,
    near_cq: Cq,
    far: RcQp,
    far_cq: Cq,
    srq: Option<Srq>,
    memory: Mr,
}

impl Pair {
    fn new(is_shared: bool) -> Pair {
        // Under valgrind there is little address space.
        let device = Device::open_software(&software::Config { space: 256 << 20 }).unwrap();
        let pd = device.alloc_pd().unwrap();
        let [near_cq, far_cq] = [(); 2].map(|()| device.create_cq(&CqConfig::default()).unwrap());
        let srq = is_shared.then(|| pd.create_srq(&SrqConfig::default()).unwrap());
        let mut near = pd.create_rc(&QpConfig::default(), &near_cq, &near_cq, None).unwrap();
        let mut far = pd.create_rc(&QpConfig::default(), &far_cq, &far_cq, srq.as_ref()).unwrap();
        connect(&mut near, &mut far);
        let memory = pd.allocate(4096, Access::ALL).unwrap();
        let mut pair = Pair { near, near_cq, far, far_cq, srq, memory };
        (0..32).for_each(|wr_id| pair.post_recv(wr_id));
        pair
    }

    fn post_recv(&mut self, wr_id: u64) {
        let sges = [self.memory.sge(2048..2048 + PAYLOAD).unwrap()];
        let wr = RecvWr { wr_id, sges: &sges };
        match &mut self.srq {
            Some(srq) => srq.post_recv(&wr).unwrap(),
            None => self.far.post_recv(&wr).unwrap(),
        }
    }

    /// Exchanges messages. Every 32nd is signaled, so that the send queue does not fill up.
    fn exchange(&mut self, rounds: u32, op: impl Fn(&Mr, u32) -> SendOp) {
        for round in 0..rounds {
            let mut message = [u64::from(round); PAYLOAD / 8];
            message[3] = std::hint::black_box(7);
            let bytes: [u8; PAYLOAD] = zerocopy::transmute!(message);
            let wr = SendWr::new(round.into(), op(&self.memory, round), Data::Inline(&bytes));
            let is_signaled = round % 32 == 31;
            self.near.post(&if is_signaled { wr.signaled() } else { wr }).unwrap();
            let mut seen = 0;
            let polled = self.far_cq.poll(16, |completion| {
                seen = completion.inline_data().map_or(0, |bytes| bytes[24]);
            });
            assert!(polled == Ok(1) && seen == 7);
            self.post_recv(round.into());
            if is_signaled {
                assert_eq!(self.near_cq.poll(16, |_| {}), Ok(1));
            }
        }
    }
}

#[test]
fn short_messages_stay_within_their_instruction_limits() {
    let Some(task) = child::task() else {
        return callgrind::assert_limits(
            short_messages_stay_within_their_instruction_limits,
            &[
                // Its bytes are taken from the completion.
                ("write with immediate", ROUNDS, 573),
                ("write with immediate, shared receives", ROUNDS, 668),
                // Into the memory of its receive.
                ("send", ROUNDS, 937),
            ],
        );
    };
    let mut pair = Pair::new(task.contains("shared"));
    let mut work = |rounds| match task.as_str() {
        "send" => pair.exchange(rounds, |_, _| SendOp::Send),
        _ => pair.exchange(rounds, |memory, round| {
            SendOp::WriteImm(memory.remote().at(u64::from(round % 16) * 64), round)
        }),
    };
    work(64);
    callgrind::measure(&mut || work(ROUNDS));
}
