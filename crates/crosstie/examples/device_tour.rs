//! A tour of the device contract, on any device: `device_tour [DEVICE [DEVICE]]`.
//!
//! Queue pairs of this process, on one device or on two, perform every operation. Between two processes the code would be
//! the same, except that they exchange their addresses over some channel.

use std::error::Error;
use std::time::Duration;

use crosstie::device::*;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let mut specs = std::env::args().skip(1);
    let here = Device::open(&specs.next().unwrap_or_else(|| "software".into()).parse()?)?;
    let there = match specs.next() {
        Some(spec) => Device::open(&spec.parse()?)?,
        None => here.clone(),
    };
    println!("device       {:?}", here.attr());
    reliable(&here, &there)?;
    shared_receives(&here, &there)?;
    datagrams(&here, &there)?;
    failures(&here, &there)
}

/// One end of a connection.
struct ConnectionEnd {
    qp: RcQp,
    cq: Cq,
    memory: Mr,
    pd: Pd,
}

fn create_end(device: &Device) -> Outcome<ConnectionEnd> {
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(&CqConfig::default())?;
    let qp = pd.create_rc(&QpConfig { max_inline: 64, ..QpConfig::default() }, &cq, &cq, None)?;
    let memory = pd.allocate(1 << 16, Access::ALL)?;
    Ok(ConnectionEnd { qp, cq, memory, pd })
}

fn connect(here: &Device, there: &Device, config: &ConnectConfig) -> Outcome<(ConnectionEnd, ConnectionEnd)> {
    let (mut a, mut b) = (create_end(here)?, create_end(there)?);
    a.qp.connect(&b.qp.address(), config)?;
    b.qp.connect(&a.qp.address(), config)?;
    Ok((a, b))
}

/// Waits for the next completion.
fn next(cq: &mut Cq) -> Outcome<Completion> {
    let mut next = None;
    cq.wait(Duration::from_secs(20))?;
    cq.poll(1, |c| next = Some(*c))?;
    Ok(next.ok_or("no completion in 20 s")?)
}

fn success(cq: &mut Cq, wr_id: u64, opcode: Opcode) -> Outcome<Completion> {
    let c = next(cq)?;
    assert_eq!((c.wr_id, c.status, c.opcode), (wr_id, Status::Success, opcode), "{c:?}");
    Ok(c)
}

fn bytes<const N: usize>(mr: &Mr, at: usize) -> Outcome<[u8; N]> {
    let mut bytes = [0; N];
    mr.read(at, &mut bytes)?;
    Ok(bytes)
}

fn reliable(here: &Device, there: &Device) -> Outcome {
    let (mut a, mut b) = connect(here, there, &ConnectConfig::default())?;
    let remote = b.memory.remote();

    b.qp.post_recv(&RecvWr { wr_id: 1, sges: &[] })?;
    a.qp.post(&SendWr::new(2, SendOp::WriteImm(remote.at(0), 0xfeed_0001), Data::Inline(b"write")))?;
    let c = success(&mut b.cq, 1, Opcode::RecvWriteImm)?;
    assert_eq!((c.imm, c.byte_len, c.qp_num), (Some(0xfeed_0001), 5, b.qp.qp_num()));
    assert_eq!(&bytes(&b.memory, 0)?, b"write");
    println!("write+imm    5 bytes inline; the immediate is the same at both ends");

    b.qp.post_recv(&RecvWr { wr_id: 3, sges: &[b.memory.sge(100..103)?, b.memory.sge(200..260)?] })?;
    a.memory.write(0, b"scatter and gather")?;
    let pieces = [a.memory.sge(0..7)?, a.memory.sge(7..18)?];
    a.qp.post(&SendWr::new(4, SendOp::SendImm(9), Data::Regions(&pieces)).signaled())?;
    let c = success(&mut b.cq, 3, Opcode::Recv)?;
    assert_eq!((c.byte_len, c.imm), (18, Some(9)));
    assert_eq!((&bytes(&b.memory, 100)?, &bytes(&b.memory, 200)?), (b"sca", b"tter and gather"));
    success(&mut a.cq, 4, Opcode::Send)?;
    println!("send+imm     2 pieces into 2 pieces");

    b.memory.write(512, &40u64.to_ne_bytes())?;
    let add = SendOp::FetchAdd { remote: remote.at(512), add: 2 };
    let swap = SendOp::CompareSwap { remote: remote.at(512), compare: 42, swap: 7 };
    for (wr_id, op, opcode, brought) in [
        (5, SendOp::Read(remote.at(512)), Opcode::Read, 40u64),
        (6, add, Opcode::FetchAdd, 40),
        (7, swap, Opcode::CompareSwap, 42),
        (8, swap, Opcode::CompareSwap, 7),
    ] {
        a.qp.post(&SendWr::new(wr_id, op, Data::Regions(&[a.memory.sge(512..520)?])).signaled())?;
        success(&mut a.cq, wr_id, opcode)?;
        assert_eq!(bytes(&a.memory, 512)?, brought.to_ne_bytes());
    }
    println!("read, faa, cas each brought the former value");

    a.qp.post_batch(|batch| {
        (0..8u64).try_for_each(|i| {
            let wr = SendWr::new(10 + i, SendOp::Write(remote.at(1024 + i)), Data::Inline(b"x"));
            batch.post(&if i == 7 { wr.signaled() } else { wr }).map(drop)
        })
    })?;
    success(&mut a.cq, 17, Opcode::Write)?;
    assert_eq!(&bytes(&b.memory, 1024)?, b"xxxxxxxx");
    println!("batch        8 requests, 1 completion");

    let unsignaled = SendWr::new(20, SendOp::Write(remote.at(0)), Data::Inline(b"y"));
    let posted = (0..100_000).take_while(|_| a.qp.post(&unsignaled).is_ok()).count();
    assert_eq!(a.qp.post(&unsignaled), Err(PostError::Full));
    println!("full         {posted} unsignaled requests fill the queue");
    assert!(!b.cq.wait(Duration::from_millis(20))?);
    println!("wait         times out where nothing comes");
    Ok(())
}

fn shared_receives(here: &Device, there: &Device) -> Outcome {
    let ConnectionEnd { mut cq, memory, pd, .. } = create_end(there)?;
    let mut srq = pd.create_srq(&SrqConfig::default())?;
    let mut pairs = Vec::new();
    for _ in 0..2 {
        let mut sender = create_end(here)?;
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, Some(&srq))?;
        qp.connect(&sender.qp.address(), &ConnectConfig::default())?;
        sender.qp.connect(&qp.address(), &ConnectConfig::default())?;
        pairs.push((sender, qp));
    }
    for (sender, qp) in &mut pairs {
        srq.post_recv(&RecvWr { wr_id: 30, sges: &[memory.sge(0..64)?] })?;
        sender.qp.post(&SendWr::new(31, SendOp::Send, Data::Inline(b"shared")))?;
        assert_eq!(success(&mut cq, 30, Opcode::Recv)?.qp_num, qp.qp_num());
    }
    println!("srq          2 queue pairs, told apart by their numbers");
    Ok(())
}

fn datagrams(here: &Device, there: &Device) -> Outcome {
    const KEY: u32 = 0x1357;
    let (mut a, mut b) = (create_end(here)?, create_end(there)?);
    let mut from = a.pd.create_ud(&QpConfig::default(), &a.cq, &a.cq, None)?;
    let mut to = b.pd.create_ud(&QpConfig::default(), &b.cq, &b.cq, None)?;
    from.activate(KEY)?;
    to.activate(KEY)?;
    to.post_recv(&RecvWr { wr_id: 40, sges: &[b.memory.sge(0..256)?] })?;
    let ah = a.pd.create_ah(&there.address())?;
    let wr = SendWr::new(41, SendOp::SendImm(5), Data::Inline(b"datagram")).signaled();
    from.post(&ah, to.qp_num(), KEY, &wr)?;
    let c = success(&mut b.cq, 40, Opcode::Recv)?;
    assert_eq!((c.byte_len, c.imm, c.src_qp), (UdQp::GRH as u32 + 8, Some(5), from.qp_num()));
    assert_eq!(&bytes(&b.memory, UdQp::GRH)?, b"datagram");
    success(&mut a.cq, 41, Opcode::Send)?;
    println!("datagram     behind {} bytes of header", UdQp::GRH);
    Ok(())
}

fn failures(here: &Device, there: &Device) -> Outcome {
    let (mut a, b) = connect(here, there, &ConnectConfig::default())?;
    let closed = RemoteAddr { rkey: b.memory.remote().rkey ^ 0x5a5a, ..b.memory.remote().at(0) };
    let write = |wr_id| SendWr::new(wr_id, SendOp::Write(closed), Data::Inline(b"?"));
    a.qp.post_recv(&RecvWr { wr_id: 50, sges: &[] })?;
    a.qp.post(&write(51))?;
    a.qp.post(&write(52))?;
    let mut ends = [next(&mut a.cq)?, next(&mut a.cq)?, next(&mut a.cq)?].map(|c| (c.wr_id, c.status));
    ends.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(ends, [(50, Status::Flushed), (51, Status::RemoteAccess), (52, Status::Flushed)]);
    assert_eq!(a.qp.state(), QpState::Error);
    println!("bad rkey     {}; then {}", ends[1].1, ends[2].1);
    a.qp.post(&write(53))?;
    assert_eq!(next(&mut a.cq).map(|c| (c.wr_id, c.status))?, (53, Status::Flushed));
    a.qp.post_recv(&RecvWr { wr_id: 54, sges: &[] })?;
    assert_eq!(next(&mut a.cq).map(|c| (c.wr_id, c.status))?, (54, Status::Flushed));
    println!("after error  what is posted is flushed");

    let (mut a, _b) = connect(here, there, &ConnectConfig { rnr_retry: 1, ..ConnectConfig::default() })?;
    a.qp.post(&SendWr::new(60, SendOp::Send, Data::Inline(b"?")))?;
    assert_eq!(next(&mut a.cq)?.status, Status::RnrRetryExceeded);
    println!("rnr          {}", Status::RnrRetryExceeded);
    Ok(())
}
