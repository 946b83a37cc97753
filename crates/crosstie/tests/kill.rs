//! SIGKILL at any instant: when a process that uses the software device dies, other connections are not affected.
//!
//! A survivor has one completion queue and one shared receive queue for many queue pairs. Victim processes connect, send, and
//! are killed: at random instants, and after every n-th instruction of a post (`PTRACE_SINGLESTEP`), so that every window
//! between reserving and publishing is hit. After each kill the survivor must see the connection in ERR, get every receive
//! back exactly once, and still exchange messages with a steady peer over the same queues. At the end no descriptor,
//! mapping, thread or file may be left.
//!
//! [`Setup`] says what differs: a completion queue for the victim alone, memory in place, long payloads, and
//! queue pairs that were connected to an earlier victim.
//!
//! With `CROSSTIE_REFUSE_PROCESS_VM` the kernel refuses access to the memory of another process, and all victims write to memory in place, which
//! then goes through the survivor's service thread.
//!
//! This program does not use libtest: it starts itself as the victims. It prints the seed; `CROSSTIE_SEED` sets it.

use std::collections::HashSet;
use std::io::{BufRead, Read, Write};
use std::time::{Duration, Instant};

use crosstie::device::*;
use crosstie::region::OwnedRegion;
use crosstie_testkit::actor::{Actor, Fallible};
use crosstie_testkit::footprint::Footprint;
use crosstie_testkit::rng;
use crosstie_testkit::seccomp;
use crosstie_testkit::trace;
use rng::Random;
use zerocopy::{FromBytes, IntoBytes};

const OWN_RECEIVES: u64 = 8;
const SRQ_RECEIVES: u64 = 32;
const RANDOM_KILLS: u32 = 200;
const KILLS_PER_SWEEP: u64 = 60;
/// The same, for each further setup.
const KILLS_PER_SETUP: u64 = 30;
/// Bytes of a long payload: it does not fit into a completion.
const LONG: usize = 1024;
/// Bytes of each receive.
const RECEIVE: usize = 2048;
/// Where victims write.
const TARGET: usize = 32 << 10;
const POISON: u8 = 0xC7;
const QKEY: u32 = 7;
/// What victims send inline.
const MESSAGE: &[u8] = b"from the victim";
/// Limit on anything that should happen.
const TIMEOUT: Duration = Duration::from_secs(20);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("victim") {
        run_victim(&args[2], args[3] == "long").expect("victim");
        return;
    }
    if seccomp::is_process_vm_refused() {
        seccomp::refuse_process_vm();
    }
    let seed = rng::seed();
    let before = Footprint::take();
    let outcome = survive(seed);
    let after = Footprint::wait_until_equal(&before);
    match outcome {
        Ok(kills) if after == before => {
            println!("{kills} kills, nothing left: {after:?}\n1 passed, 0 failed")
        }
        Ok(_) => fail(&format!("left behind: {before:?} became {after:?}")),
        Err(e) => fail(&e.to_string()),
    }
}

fn fail(why: &str) -> ! {
    println!("FAILED: {why}\n0 passed, 1 failed");
    std::process::exit(1)
}

/// What a victim needs to connect to the survivor.
#[derive(FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C)]
struct ConnectInfo {
    qp: QpAddress,
    memory: RemoteMemory,
    datagrams: u32,
    reserved: u32,
}

// ---------------------------------------------------------------------------------------------------- the survivor

/// The queues that all connections share, with a record of every outstanding receive.
struct Survivor {
    device: Device,
    pd: Pd,
    cq: Cq,
    srq: Srq,
    memory: Mr,
    in_place: OwnedRegion<Vec<u8>>,
    /// The queue pair of a victim that was killed, with its completion queue; reset, to be connected again.
    former: Option<(RcQp, Option<Cq>, Setup)>,
    /// Receives of the shared queue that have not completed.
    srq_out: HashSet<u64>,
    next_wr: u64,
    /// The steady peer: both ends are in this process and use the same queues.
    steady_near: RcQp,
    steady_far: RcQp,
    slowest: Duration,
    /// Messages of victims that came with their completions.
    inline_messages: u64,
}

/// How a victim is connected, and what it sends.
#[derive(Clone, Copy, Debug, Default)]
struct Setup {
    /// Its receives come from the shared receive queue, those for datagrams, too.
    shared: bool,
    /// Its receives complete in a completion queue that no other queue pair uses.
    exclusive: bool,
    /// It writes to memory in place.
    in_place: bool,
    /// It sends [`LONG`] bytes.
    long: bool,
    /// Our queue pair was connected to an earlier victim, which was killed.
    reconnected: bool,
}

/// A victim process and our ends of its connections.
struct Victim {
    actor: Actor,
    shared: bool,
    /// The completion queue that no other queue pair uses.
    cq: Option<Cq>,
    qp: RcQp,
    /// Receives of `qp` that have not completed.
    out: HashSet<u64>,
    ud: UdQp,
    /// Receives of `ud` that have not completed.
    ud_out: HashSet<u64>,
}

fn survive(seed: u64) -> Fallible<u64> {
    let mut random = Random(seed);
    let mut survivor = Survivor::new()?;
    let mut kills = 0;
    let is_refused = seccomp::is_process_vm_refused();
    for op in ["write-imm", "send", "datagram"].into_iter().filter(|_| !is_refused) {
        for shared in [false, true] {
            let setup = Setup { shared, ..Setup::default() };
            kills += survivor.sweep(op, setup, KILLS_PER_SWEEP, &mut random)?;
        }
    }
    let (plain, exclusive) = (Setup::default(), Setup { exclusive: true, ..Setup::default() });
    for (op, setup) in [
        ("write-imm", exclusive),
        ("send", Setup { shared: true, ..exclusive }),
        ("write-imm", Setup { long: true, ..exclusive }),
        ("send", Setup { long: true, shared: true, ..plain }),
        ("write-imm", Setup { in_place: true, ..plain }),
        ("write-imm", Setup { in_place: true, long: true, ..exclusive }),
        ("write-imm", Setup { reconnected: true, ..plain }),
        ("send", Setup { reconnected: true, shared: true, ..exclusive }),
    ] {
        if setup.in_place || !is_refused {
            kills += survivor.sweep(op, setup, KILLS_PER_SETUP, &mut random)?;
        }
    }
    let random_kills = if is_refused { RANDOM_KILLS / 4 } else { RANDOM_KILLS };
    for i in 0..random_kills {
        let op = ["write-imm", "send", "mixed", "datagram"][random.below(4) as usize];
        let mut chance = || random.below(2) == 0;
        let [shared, exclusive, in_place, long, reconnected] = [(); 5].map(|()| chance());
        let in_place = in_place || is_refused;
        let setup = Setup { shared, exclusive, in_place, long, reconnected };
        let delay = Duration::from_micros(random.below(3000));
        survivor.kill_after(op, setup, delay, &format!("random kill {i}, {op}, {setup:?}, {delay:?}"))?;
    }
    kills += u64::from(random_kills);
    if survivor.inline_messages < kills / 4 && !is_refused {
        return Err(format!("only {} messages came with completions", survivor.inline_messages).into());
    }
    println!("{random_kills} kills at random instants; slowest from SIGKILL to ERR: {:?}", survivor.slowest);
    Ok(kills)
}

impl Survivor {
    fn new() -> Fallible<Survivor> {
        let device = Device::open(&DeviceSpec::Software)?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(&CqConfig { depth: 256 })?;
        let srq = pd.create_srq(&SrqConfig { max_wr: SRQ_RECEIVES as u32, max_sge: 1 })?;
        let memory = pd.allocate(1 << 16, Access::ALL)?;
        memory.write(0, &[POISON; 1 << 16])?;
        let in_place = OwnedRegion::register(&pd, vec![POISON; 1 << 16], Access::ALL)?;
        let config = QpConfig::default();
        let mut steady_near = pd.create_rc(&config, &cq, &cq, Some(&srq))?;
        let mut steady_far = pd.create_rc(&config, &cq, &cq, None)?;
        steady_near.connect(&steady_far.address(), &ConnectConfig::default())?;
        steady_far.connect(&steady_near.address(), &ConnectConfig::default())?;
        let mut survivor = Survivor {
            device,
            pd,
            cq,
            srq,
            memory,
            in_place,
            former: None,
            srq_out: HashSet::new(),
            next_wr: 0,
            steady_near,
            steady_far,
            slowest: Duration::ZERO,
            inline_messages: 0,
        };
        survivor.refill()?;
        Ok(survivor)
    }

    fn refill(&mut self) -> Fallible {
        while (self.srq_out.len() as u64) < SRQ_RECEIVES {
            self.next_wr += 1;
            self.srq.post_recv(&RecvWr { wr_id: self.next_wr, sges: &[self.memory.sge(0..RECEIVE)?] })?;
            self.srq_out.insert(self.next_wr);
        }
        Ok(())
    }

    /// Kills victims at instructions all over a post. Returns how many.
    fn sweep(&mut self, op: &str, setup: Setup, kills: u64, random: &mut Random) -> Fallible<u64> {
        let name = format!("{op}, {setup:?}");
        let total = self.kill_stepping(op, setup, u64::MAX, &name)?;
        let stride = total.div_ceil(kills).max(1);
        let (mut at, mut count) = (1 + random.below(stride), 0);
        while at <= total {
            self.kill_stepping(op, setup, at, &format!("{name}, step {at} of {total}"))?;
            at += stride;
            count += 1;
        }
        println!("{name}: {count} kills over the {total} instructions of a post");
        Ok(count)
    }

    /// Our end of a new connection: a new queue pair, or that of the victim before.
    fn queue_pair(&mut self, setup: Setup) -> Fallible<(RcQp, Option<Cq>)> {
        if let Some((qp, cq, former)) = self.former.take()
            && (former.shared, former.exclusive) == (setup.shared, setup.exclusive)
        {
            return Ok((qp, cq));
        }
        let config = QpConfig { max_recv_wr: OWN_RECEIVES as u32, ..QpConfig::default() };
        let cq = setup.exclusive.then(|| self.device.create_cq(&CqConfig { depth: 256 })).transpose()?;
        let srq = setup.shared.then_some(&self.srq);
        Ok((self.pd.create_rc(&config, &self.cq, cq.as_ref().unwrap_or(&self.cq), srq)?, cq))
    }

    fn start_victim(&mut self, op: &str, setup: Setup) -> Fallible<Victim> {
        let actor = Actor::start(&["victim", op, if setup.long { "long" } else { "short" }])?;
        let config = QpConfig { max_recv_wr: OWN_RECEIVES as u32, ..QpConfig::default() };
        let shared = setup.shared;
        let (qp, cq) = self.queue_pair(setup)?;
        let ud = self.pd.create_ud(&config, &self.cq, &self.cq, shared.then_some(&self.srq))?;
        let (out, ud_out) = (HashSet::new(), HashSet::new());
        let mut victim = Victim { actor, shared, cq, qp, out, ud, ud_out };
        victim.qp.init(Access::ALL)?;
        victim.ud.activate(QKEY)?;
        self.refill_own(&mut victim)?;
        let info = ConnectInfo {
            qp: victim.qp.address(),
            memory: if setup.in_place { self.in_place.mr().remote() } else { self.memory.remote() },
            datagrams: victim.ud.qp_num(),
            reserved: 0,
        };
        victim.actor.input.write_all(info.as_bytes())?;
        let mut theirs = [0; size_of::<QpAddress>()];
        victim.actor.output.read_exact(&mut theirs)?;
        let theirs = QpAddress::read_from_bytes(&theirs).map_err(|e| e.to_string())?;
        victim.qp.ready_to_receive(&theirs, &ConnectConfig::default())?;
        victim.qp.ready_to_send(&ConnectConfig::default())?;
        Ok(victim)
    }

    fn refill_own(&mut self, victim: &mut Victim) -> Fallible {
        while !victim.shared && (victim.out.len() as u64) < OWN_RECEIVES {
            self.next_wr += 1;
            victim.qp.post_recv(&RecvWr {
                wr_id: self.next_wr,
                sges: &[self.memory.sge(RECEIVE..2 * RECEIVE)?],
            })?;
            victim.out.insert(self.next_wr);
        }
        while !victim.shared && (victim.ud_out.len() as u64) < OWN_RECEIVES {
            self.next_wr += 1;
            victim.ud.post_recv(&RecvWr {
                wr_id: self.next_wr,
                sges: &[self.memory.sge(2 * RECEIVE..3 * RECEIVE)?],
            })?;
            victim.ud_out.insert(self.next_wr);
        }
        Ok(())
    }

    /// Kills a victim after `steps` instructions of a post, or after all of them. Returns how many it executed.
    fn kill_stepping(&mut self, op: &str, setup: Setup, steps: u64, name: &str) -> Fallible<u64> {
        let mut victim = self.start_victim(op, setup)?;
        victim.actor.input.write_all(b"step\n")?;
        let executed = trace::step(victim.actor.child.id(), steps).map_err(|e| format!("ptrace: {e}"))?;
        self.kill_and_check(victim, setup, name)?;
        Ok(executed)
    }

    /// Kills a victim, which posts as fast as it can, after `delay`.
    fn kill_after(&mut self, op: &str, setup: Setup, delay: Duration, name: &str) -> Fallible {
        let mut victim = self.start_victim(op, setup)?;
        victim.actor.input.write_all(b"run\n")?;
        victim.actor.output.read_line(&mut String::new())?;
        let begun = Instant::now();
        while begun.elapsed() < delay {
            self.collect(&mut victim, name, true)?;
            self.refill()?;
            self.refill_own(&mut victim)?;
        }
        self.kill_and_check(victim, setup, name)
    }

    /// Kills the victim and checks that nothing was lost.
    fn kill_and_check(&mut self, mut victim: Victim, setup: Setup, name: &str) -> Fallible {
        let killed = Instant::now();
        victim.actor.kill()?;
        while victim.qp.state() != QpState::Error {
            if killed.elapsed() > TIMEOUT {
                return Err(format!("{name}: the queue pair did not go to ERR").into());
            }
            std::thread::yield_now();
        }
        self.slowest = self.slowest.max(killed.elapsed());

        // Every receive of the queue pair's own queue comes back.
        while !victim.out.is_empty() {
            if killed.elapsed() > TIMEOUT {
                return Err(format!("{name}: receives {:?} were never flushed", victim.out).into());
            }
            self.collect(&mut victim, name, false)?;
        }

        // The shared queue lost nothing: as many messages as it has receives arrive without a refill. A receive that the
        // victim had taken comes back flushed. If the last message already waits for that receive, it arrives after the
        // refill.
        let begun = Instant::now();
        let mut under_way = 0;
        while !self.srq_out.is_empty() || under_way > 0 {
            if under_way == 0 {
                self.steady_far
                    .post(&SendWr::new(0, SendOp::SendImm(77), Data::Inline(b"steady")).signaled())?;
                under_way = 1;
            }
            if begun.elapsed() > TIMEOUT {
                let left = &self.srq_out;
                return Err(
                    format!("{name}: the steady peer hangs; shared receives {left:?} are left").into()
                );
            }
            if self.collect(&mut victim, name, false)? {
                under_way = 0;
            } else if self.srq_out.is_empty() {
                break;
            }
        }
        self.refill()?;
        while under_way > 0 {
            if begun.elapsed() > TIMEOUT {
                return Err(format!("{name}: the steady peer hangs after the refill").into());
            }
            under_way -= i32::from(self.collect(&mut victim, name, false)?);
        }
        self.refill()?;

        // The datagram queue pair still works after its sender died, and lost no receive either.
        victim.ud.fail()?;
        let begun = Instant::now();
        while !victim.ud_out.is_empty() {
            if begun.elapsed() > TIMEOUT {
                return Err(
                    format!("{name}: datagram receives {:?} were never returned", victim.ud_out).into()
                );
            }
            self.collect(&mut victim, name, false)?;
        }
        while self.device.wait_event(Duration::ZERO)?.is_some() {}
        self.check_memory(name)?;
        if setup.reconnected {
            let Victim { mut qp, cq, .. } = victim;
            qp.reset()?;
            self.former = Some((qp, cq, setup));
        }
        Ok(())
    }

    /// Victims write at [`TARGET`] and into receives, and nowhere else.
    fn check_memory(&self, name: &str) -> Fallible {
        let mut bytes = vec![0; 1 << 16];
        for region in [&self.memory, self.in_place.mr()] {
            region.read(0, &mut bytes)?;
            let untouched = bytes[3 * RECEIVE..TARGET].iter().chain(&bytes[TARGET + LONG..]);
            if let Some(at) = untouched.clone().position(|byte| *byte != POISON) {
                return Err(format!("{name}: byte {at} beside the target was written").into());
            }
        }
        Ok(())
    }

    /// Polls once and updates the records. Returns whether a send of the steady peer completed.
    fn collect(&mut self, victim: &mut Victim, name: &str, alive: bool) -> Fallible<bool> {
        let mut done = Vec::new();
        self.cq.poll(16, |c| done.push(*c))?;
        if let Some(cq) = &mut victim.cq {
            cq.poll(16, |c| done.push(*c))?;
        }
        let mut sent = false;
        for c in done {
            let known = if c.qp_num == self.steady_far.qp_num() {
                sent = true;
                c.status == Status::Success
            } else if c.qp_num == self.steady_near.qp_num() {
                c.status == Status::Success && c.imm == Some(77) && self.srq_out.remove(&c.wr_id)
            } else if c.qp_num == victim.ud.qp_num() && !victim.shared {
                victim.ud_out.remove(&c.wr_id)
            } else if [victim.qp.qp_num(), victim.ud.qp_num()].contains(&c.qp_num) && victim.shared {
                self.srq_out.remove(&c.wr_id)
            } else {
                c.qp_num == victim.qp.qp_num() && victim.out.remove(&c.wr_id)
            };
            // Whatever instruction the sender died at: what came with a completion is the whole message.
            let expected: &[u8] = if c.qp_num == victim.qp.qp_num() { MESSAGE } else { b"steady" };
            let known = known && c.inline_data().is_none_or(|data| data == expected);
            self.inline_messages += u64::from(c.qp_num == victim.qp.qp_num() && c.inline_data().is_some());
            if !known || (alive && c.status != Status::Success) {
                return Err(format!("{name}: unexpected, or ended twice: {c:?}").into());
            }
        }
        Ok(sent)
    }
}

// ------------------------------------------------------------------------------------------------------ the victim

fn run_victim(op: &str, long: bool) -> Fallible {
    let mut input = std::io::stdin().lock();
    let mut bytes = [0; size_of::<ConnectInfo>()];
    input.read_exact(&mut bytes)?;
    let to = ConnectInfo::read_from_bytes(&bytes).map_err(|e| e.to_string())?;

    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let mut cq = device.create_cq(&CqConfig::default())?;
    let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
    let mut ud = pd.create_ud(&QpConfig::default(), &cq, &cq, None)?;
    ud.activate(QKEY)?;
    let ah = pd.create_ah(&to.qp.device)?;
    let memory = pd.allocate(4096, Access::ALL)?;
    std::io::stdout().write_all(qp.address().as_bytes())?;
    std::io::stdout().flush()?;
    qp.connect(&to.qp, &ConnectConfig::default())?;
    let mut order = String::new();
    input.read_line(&mut order)?;

    let remote = to.memory.at(TARGET as u64);
    let len = if long { LONG } else { 64 };
    let mut post = |i: u64| -> Fallible {
        let (local, eight) = ([memory.sge(0..len)?], [memory.sge(0..8)?]);
        let inline = i.is_multiple_of(2) && !long;
        let data = if inline { Data::Inline(MESSAGE) } else { Data::Regions(&local) };
        let posted = match (op, i % 5) {
            ("datagram", _) => {
                ud.post(&ah, to.datagrams, QKEY, &SendWr::new(i, SendOp::Send, data).signaled())
            }
            ("send", _) | ("mixed", 0) => qp.post(&SendWr::new(i, SendOp::SendImm(1), data).signaled()),
            ("mixed", 1) => {
                let add = SendOp::FetchAdd { remote, add: 1 };
                qp.post(&SendWr::new(i, add, Data::Regions(&eight)).signaled())
            }
            ("mixed", 2) => qp.post(&SendWr::new(i, SendOp::Read(remote), Data::Regions(&local)).signaled()),
            _ => qp.post(&SendWr::new(i, SendOp::WriteImm(remote, 1), data).signaled()),
        };
        match posted {
            Ok(()) | Err(PostError::Full) => Ok(()),
            Err(e) => Err(e.into()),
        }
    };
    if order == "step\n" {
        // The first post maps pages and attaches to the peer; the second one is single-stepped.
        post(0)?;
        trace::stop_here();
        post(2)?;
        trace::stop_here();
    } else {
        std::io::stdout().write_all(b"running\n")?;
        std::io::stdout().flush()?;
        for i in 0.. {
            post(i)?;
            cq.poll(64, |_| {})?;
        }
    }
    std::thread::sleep(TIMEOUT);
    Ok(())
}
