//! Where the two sides of a benchmark are: two threads, two processes, or wherever a launcher put them.

use std::ffi::OsString;

use crosstie::bootstrap::{self, Bootstrap, Limits, local};
use crosstie::device::Device;

use super::arena::{self, Arena};
use super::cores;
use super::meeting::Meeting;
use super::patience::Patience;
use super::plan::Devices;
use super::summary::Report;
use crate::error::Error;

/// A benchmark with two sides.
pub(crate) struct TwoSides<'a> {
    /// As the command line writes it.
    pub(crate) bench: &'static str,
    pub(crate) devices: &'a Devices,
    /// Whether to put the sides into processes of their own, and the command line of the second.
    pub(crate) processes: bool,
    pub(crate) command_line: Vec<OsString>,
    /// Bytes of memory that both share, if they are on one machine.
    pub(crate) arena: usize,
}

/// One of them.
pub(crate) struct Place<'a> {
    pub(crate) meeting: Meeting<'a>,
    /// 0 leads.
    pub(crate) rank: usize,
    /// `None` where the sides were started by others, on two machines perhaps.
    pub(crate) arena: Option<&'a Arena>,
    device: Option<Result<Device, Error>>,
    pub(crate) processes: bool,
    /// A core for each side, where they are on one machine that has two.
    pub(crate) cores: Option<[usize; 2]>,
    pub(crate) patience: Patience,
}

impl TwoSides<'_> {
    /// Has both sides take part, and reports where this process leads.
    pub(crate) fn run(
        &self,
        take_part: impl Fn(Place<'_>) -> Result<Option<Report>, Error> + Sync,
    ) -> Result<Option<Report>, Error> {
        let mut job = bootstrap::from_env()?;
        match job.size() {
            1 if self.processes => {
                let arena = Arena::create(self.arena)?;
                let mut job = local::JobBuilder::new(2)
                    .arguments(self.command_line.clone())
                    .variable(arena::VARIABLE, arena.descriptor())
                    .start()?;
                let report =
                    cores::on_own_thread(|| take_part(self.place(&mut job, Some(&arena), None, true)?))?;
                job.finish()?;
                Ok(report)
            }
            1 => self.in_threads(&Arena::create(self.arena)?, take_part),
            2 => {
                let arena = Arena::inherited(self.arena)?;
                let report = take_part(self.place(job.as_mut(), arena.as_ref(), None, true)?)?;
                job.finish()?;
                Ok(report)
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
        arena: &Arena,
        take_part: impl Fn(Place<'_>) -> Result<Option<Report>, Error> + Sync,
    ) -> Result<Option<Report>, Error> {
        let [left, right] = self.devices.both();
        let first = Device::open(left)?;
        let second = if left == right { first.clone() } else { Device::open(right)? };
        let mut members = local::in_process(2, Limits::default())?.into_iter();
        let (Some(mut leader), Some(mut follower)) = (members.next(), members.next()) else {
            return Err(Error::Protocol);
        };
        let take_part = &take_part;
        std::thread::scope(|scope| {
            let follower = scope
                .spawn(move || take_part(self.place(&mut follower, Some(arena), Some(second), false)?));
            let report = cores::on_own_thread(|| {
                take_part(self.place(&mut leader, Some(arena), Some(first), false)?)
            });
            let followed = follower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What the follower has to complain of, the leader has heard.
            report.and_then(|report| followed.map(|_| report))
        })
    }

    fn place<'a>(
        &self,
        job: &'a mut dyn Bootstrap,
        arena: Option<&'a Arena>,
        device: Option<Device>,
        processes: bool,
    ) -> Result<Place<'a>, Error> {
        let meeting = Meeting::new(job);
        let rank = meeting.rank();
        // Sides that share no memory were started by others, who know where they should run.
        let cores = if arena.is_some() { cores::pair()? } else { None };
        let patience = Patience::new(cores.is_some() || arena.is_none());
        // Before pinning: threads of the device may run anywhere.
        let device = device.map_or_else(|| Device::open(&self.devices.both()[rank]), Ok).map_err(Error::from);
        Ok(Place { meeting, rank, arena, device: Some(device), processes, cores, patience })
    }
}

impl Place<'_> {
    /// The device of this side, once.
    pub(crate) fn device(&mut self) -> Result<Device, Error> {
        self.device.take().unwrap_or(Err(Error::Protocol))
    }

    /// Keeps this side on its core, once the other is ready too.
    pub(crate) fn pin(&mut self) -> Result<(), Error> {
        let pinned = self.cores.map_or(Ok(()), |cores| cores::pin(cores[self.rank]));
        self.meeting.keep_step(pinned)
    }
}
