//! The software device: opens one and makes a WRITE with immediate.

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie::device::{
    Access, ConnectConfig, CqConfig, Data, Device, DeviceSpec, QpConfig, RecvWr, SendOp, SendWr,
};

use super::Finding;

const NAME: &str = "software device";

pub(super) fn device() -> Finding {
    match write_to_itself() {
        Ok(()) => Finding::ok(NAME, "works: opened one and made a WRITE with immediate (memfd, membarrier)"),
        Err(error) => Finding::missing(NAME, error.to_string())
            .needed_for("everything without an RDMA NIC")
            .fix("use Linux 4.16 or later, and let memfd_create, membarrier and Unix sockets through seccomp filters"),
    }
}

fn write_to_itself() -> Result<(), Box<dyn Error>> {
    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let mut cq = device.create_cq(&CqConfig::default())?;
    let mut left = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
    let mut right = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
    left.connect(&right.address(), &ConnectConfig::default())?;
    right.connect(&left.address(), &ConnectConfig::default())?;
    let target = pd.allocate(4096, Access::ALL)?;
    right.post_recv(&RecvWr { wr_id: 1, sges: &[] })?;
    left.post(&SendWr::new(2, SendOp::WriteImm(target.remote().at(0), 99), Data::Inline(b"crosstie")))?;
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() {
        cq.poll(1, |completion| ended = Some(completion.status))?;
        if begin.elapsed() > Duration::from_secs(5) {
            return Err("the WRITE did not complete within 5 s".into());
        }
    }
    let mut bytes = [0; 8];
    target.read(0, &mut bytes)?;
    match ended {
        Some(status) if !status.is_success() => Err(format!("the WRITE failed: {status}").into()),
        _ if &bytes != b"crosstie" => Err("the WRITE delivered wrong bytes: report this as a bug".into()),
        _ => Ok(()),
    }
}
