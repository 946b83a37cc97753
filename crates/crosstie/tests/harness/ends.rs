//! Software devices of this process, and connected queue pairs. The unit tests of the library use this file, too.
#![allow(dead_code, reason = "no program uses all of it")]

use crosstie::device::*;
use crosstie_testkit::wait;

/// A device that takes little address space: valgrind limits it, and some tests have many devices.
pub(crate) fn small_device() -> Device {
    Device::open_software(&software::Config { space: 64 << 20 }).unwrap()
}

/// A device with one queue pair.
pub(crate) struct End {
    pub(crate) qp: RcQp,
    pub(crate) cq: Cq,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

impl End {
    pub(crate) fn new(config: &QpConfig) -> End {
        End::on(small_device(), config)
    }

    pub(crate) fn on(device: Device, config: &QpConfig) -> End {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let qp = pd.create_rc(config, &cq, &cq, None).unwrap();
        End { qp, cq, pd, device }
    }

    /// Two of them, connected.
    pub(crate) fn pair(config: &QpConfig) -> [End; 2] {
        let [mut near, mut far] = [(); 2].map(|()| End::new(config));
        connect(&mut near.qp, &mut far.qp);
        [near, far]
    }

    /// Waits for the next completion.
    pub(crate) fn next(&mut self) -> Completion {
        next_completion(&mut self.cq)
    }
}

/// Connects two queue pairs with each other.
pub(crate) fn connect(near: &mut RcQp, far: &mut RcQp) {
    near.connect(&far.address(), &ConnectConfig::default()).unwrap();
    far.connect(&near.address(), &ConnectConfig::default()).unwrap();
}

/// Waits for the next completion.
#[track_caller]
pub(crate) fn next_completion(cq: &mut Cq) -> Completion {
    wait::find("a completion", || {
        let mut next = Completion::default();
        cq.next(&mut next).unwrap().then_some(next)
    })
}
