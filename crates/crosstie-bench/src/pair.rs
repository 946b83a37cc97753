//! Runs the two sides of a benchmark: on two threads, in two processes, or as two ranks of a launcher.

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

/// A benchmark between two sides.
pub(crate) struct Pair<'a> {
    /// Its name on the command line.
    pub(crate) bench: &'static str,
    pub(crate) devices: &'a Devices,
    /// Whether each side is a separate process, and the command line of the second one.
    pub(crate) processes: bool,
    pub(crate) command_line: Vec<OsString>,
    /// Bytes of the memory that both sides share if they are on one machine.
    pub(crate) region: usize,
}

/// One side.
pub(crate) struct PairMember<'a> {
    pub(crate) collective: Collective<'a>,
    /// Rank 0 leads.
    pub(crate) rank: usize,
    /// `None` if a launcher has started the sides: they may be on two machines.
    pub(crate) region: Option<&'a SharedRegion>,
    device: Option<Result<Device, Error>>,
    pub(crate) processes: bool,
    /// One core for each side, if both are on one machine with at least two cores.
    pub(crate) cores: Option<[usize; 2]>,
    pub(crate) spin: SpinWait,
}

impl Pair<'_> {
    /// Runs both sides. Returns the summary in the process that leads.
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
                if region.is_none() {
                    self.check_same_options(job.as_mut())?;
                }
                let summary = run_member(self.member(job.as_mut(), region.as_ref(), None, true)?)?;
                job.finish()?;
                Ok(summary)
            }
            size => Err(Error::Usage(format!(
                "bench {} needs 2 ranks, but this job has {size}: start 2",
                self.bench
            ))),
        }
    }

    /// Two sides that a launcher has started must measure the same. Their devices may have different names.
    fn check_same_options(&self, job: &mut dyn Bootstrap) -> Result<(), Error> {
        let devices = self.devices.to_args();
        let options =
            self.command_line.iter().filter(|word| !devices.contains(word) && *word != "--processes");
        let own = options.map(|word| word.as_encoded_bytes()).collect::<Vec<_>>().join(&b' ');
        let all = Collective::new(job).gather(Ok(own.clone()))?;
        if all.iter().all(|options| *options == own) {
            return Ok(());
        }
        Err(Error::Usage("the two ranks have different options: give all ranks the same options".to_owned()))
    }

    /// Runs both sides in this process. They share one device if both name the same.
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
            let follower = cores::spawn(scope, move || {
                run_member(self.member(&mut follower, Some(region), Some(second), false)?)
            })?;
            // The closure owns its member: if it cannot run, the follower sees that the leader is gone.
            let summary = cores::on_own_thread(move || {
                run_member(self.member(&mut leader, Some(region), Some(first), false)?)
            });
            let followed = follower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // The leader has already received the error of the follower.
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
        // If the sides share no memory, a launcher has started them and has chosen their cores.
        let cores = if region.is_some() { cores::pair()? } else { None };
        let spin = SpinWait::new(cores.is_some() || region.is_none());
        // Opens the device before pinning, so that the device's own threads are not pinned.
        let device = device.map_or_else(|| Device::open(&self.devices.both()[rank]), Ok).map_err(Error::from);
        Ok(PairMember { collective, rank, region, device: Some(device), processes, cores, spin })
    }
}

impl PairMember<'_> {
    /// The device of this side. It can be taken once.
    pub(crate) fn device(&mut self) -> Result<Device, Error> {
        self.device.take().unwrap_or(Err(Error::Protocol))
    }

    /// Pins this side to its core, then waits until the other side is pinned too.
    pub(crate) fn pin(&mut self) -> Result<(), Error> {
        let pinned = self.cores.map_or(Ok(()), |cores| cores::pin_thread(cores[self.rank]));
        self.collective.barrier(pinned)
    }
}
