//! Where the two sides of a benchmark are: two threads, two processes, or wherever a launcher put them.

use std::ffi::OsString;

use crosstie::bootstrap::{self, Bootstrap, Limits, local};
use crosstie::device::Device;

use super::collective::Collective;
use super::cores;
use super::plan::Devices;
use super::shared_region::{self, SharedRegion};
use super::spin_wait::SpinWait;
use super::summary::Summary;
use crate::error::Error;

/// A benchmark with two sides.
pub(crate) struct Pair<'a> {
    /// As the command line writes it.
    pub(crate) bench: &'static str,
    pub(crate) devices: &'a Devices,
    /// Whether to put the sides into processes of their own, and the command line of the second.
    pub(crate) processes: bool,
    pub(crate) command_line: Vec<OsString>,
    /// Bytes of memory that both share, if they are on one machine.
    pub(crate) region: usize,
}

/// One of them.
pub(crate) struct PairMember<'a> {
    pub(crate) collective: Collective<'a>,
    /// 0 leads.
    pub(crate) rank: usize,
    /// `None` where the sides were started by others, on two machines perhaps.
    pub(crate) region: Option<&'a SharedRegion>,
    device: Option<Result<Device, Error>>,
    pub(crate) processes: bool,
    /// A core for each side, where they are on one machine that has two.
    pub(crate) cores: Option<[usize; 2]>,
    pub(crate) spin: SpinWait,
}

impl Pair<'_> {
    /// Has both sides take part, and reports where this process leads.
    pub(crate) fn run(
        &self,
        run_member: impl Fn(PairMember<'_>) -> Result<Option<Summary>, Error> + Sync,
    ) -> Result<Option<Summary>, Error> {
        let mut job = bootstrap::from_env()?;
        match job.size() {
            1 if self.processes => {
                let region = SharedRegion::create(self.region)?;
                let mut job = local::JobBuilder::new(2)
                    .arguments(self.command_line.clone())
                    .variable(shared_region::VARIABLE, region.descriptor())
                    .start()?;
                let summary =
                    cores::on_own_thread(|| run_member(self.member(&mut job, Some(&region), None, true)?))?;
                job.finish()?;
                Ok(summary)
            }
            1 => self.in_threads(&SharedRegion::create(self.region)?, run_member),
            2 => {
                let region = SharedRegion::inherited(self.region)?;
                let summary = run_member(self.member(job.as_mut(), region.as_ref(), None, true)?)?;
                job.finish()?;
                Ok(summary)
            }
            size => Err(Error::Usage(format!(
                "bench {} has two sides, but this job has {size} ranks: start 2",
                self.bench
            ))),
        }
    }

    /// Both sides in this process, on one device if they name the same.
    fn in_threads(
        &self,
        region: &SharedRegion,
        run_member: impl Fn(PairMember<'_>) -> Result<Option<Summary>, Error> + Sync,
    ) -> Result<Option<Summary>, Error> {
        let [left, right] = self.devices.both();
        let first = Device::open(left)?;
        let second = if left == right { first.clone() } else { Device::open(right)? };
        let mut members = local::in_process(2, Limits::default())?.into_iter();
        let (Some(mut leader), Some(mut follower)) = (members.next(), members.next()) else {
            return Err(Error::Protocol);
        };
        let run_member = &run_member;
        std::thread::scope(|scope| {
            let follower = scope
                .spawn(move || run_member(self.member(&mut follower, Some(region), Some(second), false)?));
            let summary = cores::on_own_thread(|| {
                run_member(self.member(&mut leader, Some(region), Some(first), false)?)
            });
            let followed = follower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What the follower has to complain of, the leader has heard.
            summary.and_then(|summary| followed.map(|_| summary))
        })
    }

    fn member<'a>(
        &self,
        job: &'a mut dyn Bootstrap,
        region: Option<&'a SharedRegion>,
        device: Option<Device>,
        processes: bool,
    ) -> Result<PairMember<'a>, Error> {
        let collective = Collective::new(job);
        let rank = collective.rank();
        // Sides that share no memory were started by others, who know where they should run.
        let cores = if region.is_some() { cores::pair()? } else { None };
        let spin = SpinWait::new(cores.is_some() || region.is_none());
        // Before pinning: threads of the device may run anywhere.
        let device = device.map_or_else(|| Device::open(&self.devices.both()[rank]), Ok).map_err(Error::from);
        Ok(PairMember { collective, rank, region, device: Some(device), processes, cores, spin })
    }
}

impl PairMember<'_> {
    /// The device of this side, once.
    pub(crate) fn device(&mut self) -> Result<Device, Error> {
        self.device.take().unwrap_or(Err(Error::Protocol))
    }

    /// Keeps this side on its core, once the other is ready too.
    pub(crate) fn pin(&mut self) -> Result<(), Error> {
        let pinned = self.cores.map_or(Ok(()), |cores| cores::pin(cores[self.rank]));
        self.collective.barrier(pinned)
    }
}
