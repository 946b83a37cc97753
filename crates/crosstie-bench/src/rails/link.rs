//! A connection between two threads of this process.

use std::time::{Duration, Instant};

use crosstie::device::fault::{Control, Plan as FaultPlan};
use crosstie::device::{Device, DeviceSpec};
use crosstie::rails::{Config, Rails, RecvConnection, SendConnection};

use crate::error::Error;

/// How long setting up may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A sender and a receiver with the same kind of devices.
pub(super) struct Link {
    pub(super) here: Rails,
    pub(super) there: Rails,
    pub(super) sender: SendConnection,
    pub(super) receiver: RecvConnection,
    /// The faults of the sender's devices.
    pub(super) faults: Vec<Control>,
}

pub(super) fn failed(what: &'static str) -> impl Fn(&dyn std::error::Error) -> Error {
    move |error| Error::Os { what, source: std::io::Error::other(error.to_string()) }
}

impl Link {
    /// Opens the devices of both ends and connects them. With `faults`, the sender's ports can be taken down.
    pub(super) fn open(devices: &[DeviceSpec], faults: bool, config: &Config) -> Result<Link, Error> {
        let setup = failed("setting up rails");
        let open = || -> Result<Vec<Device>, Error> {
            devices.iter().map(|spec| Device::open(spec).map_err(|error| setup(&error))).collect()
        };
        let mut senders = open()?;
        if faults {
            senders = senders.into_iter().map(|device| device.with_faults(FaultPlan::none())).collect();
        }
        let faults = senders.iter().filter_map(Device::faults).collect();
        let here = Rails::new(senders, config.clone()).map_err(|error| setup(&error))?;
        let there = Rails::new(open()?, config.clone()).map_err(|error| setup(&error))?;
        let (sender, receiver) = connect(&here, &there)?;
        Ok(Link { here, there, sender, receiver, faults })
    }
}

/// Connects two contexts.
pub(super) fn connect(here: &Rails, there: &Rails) -> Result<(SendConnection, RecvConnection), Error> {
    let setup = failed("connecting rails");
    let mut listener = there.listen().map_err(|error| setup(&error))?;
    let mut connecting = here.connect(&listener.handle()).map_err(|error| setup(&error))?;
    let (mut sender, mut receiver) = (None, None);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if sender.is_none() {
            sender = connecting.poll().map_err(|error| setup(&error))?;
        }
        if receiver.is_none() {
            receiver = listener.accept().map_err(|error| setup(&error))?;
        }
        if Instant::now() > deadline {
            return Err(setup(&std::io::Error::from(std::io::ErrorKind::TimedOut)));
        }
        if sender.is_some() && receiver.is_some() {
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    match (sender, receiver) {
        (Some(sender), Some(receiver)) => Ok((sender, receiver)),
        _ => Err(Error::Protocol),
    }
}
