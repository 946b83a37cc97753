//! Starts the ranks of a benchmark: as threads of this process, as processes, or as a launcher has started them.

use crosstie::bootstrap::{self, Bootstrap, Limits, Member, local};
use crosstie::device::Device;

use super::{Benchmark, Collective, Job, run_rank};
use crate::cores;
use crate::error::Error;
use crate::options::usage;
use crate::shared_region::{self, SharedRegion};
use crate::spin_wait::SpinWait;
use crate::summary::Summary;

/// One rank.
pub(crate) struct Rank<'a> {
    pub(crate) collective: Collective<'a>,
    /// Rank 0 leads.
    pub(crate) number: usize,
    /// `None` if a launcher has started the ranks: they may be on several machines.
    pub(crate) region: Option<&'a SharedRegion>,
    device: Option<Device>,
    pub(crate) processes: bool,
    /// The core of each rank, if all are on one machine with at least two cores.
    pub(crate) cores: Option<Vec<usize>>,
    /// How this rank spins while all ranks run, and while only two of them do.
    pub(crate) spin: SpinWait,
    pub(crate) spin_of_two: SpinWait,
}

/// What a rank does in an exchange between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Lead,
    Follow,
    /// It waits until the two are done.
    Wait,
}

impl Rank<'_> {
    /// What this rank does in an exchange that rank `leader` leads with rank `follower`.
    pub(crate) fn part(&self, leader: usize, follower: usize) -> Part {
        match self.number {
            number if number == leader => Part::Lead,
            number if number == follower => Part::Follow,
            _ => Part::Wait,
        }
    }

    /// The device of this rank. It can be taken once.
    pub(crate) fn device(&mut self) -> Result<Device, Error> {
        self.device.take().ok_or(Error::Protocol)
    }

    /// Pins this rank to its core, then waits until the others are pinned too.
    pub(super) fn pin(&mut self) -> Result<(), Error> {
        let pinned = self.cores.as_ref().map_or(Ok(()), |cores| cores::pin_thread(cores[self.number]));
        self.collective.agree(pinned)
    }
}

/// Runs a benchmark. Returns the summary in the process that leads.
pub(crate) fn run(benchmark: &dyn Benchmark) -> Result<Option<Summary>, Error> {
    let job = benchmark.job();
    let mut launched = bootstrap::from_env()?;
    match launched.size() as usize {
        1 if job.processes => {
            let region = SharedRegion::create(job.region)?;
            // They measure the same, so they get the same command line.
            let mut processes = local::JobBuilder::new(job.ranks as u32)
                .arguments(std::env::args_os().skip(1))
                .variable(shared_region::VARIABLE, region.descriptor())
                .start()?;
            let summary = cores::on_own_thread(|| {
                run_rank(benchmark, rank(&job, &mut processes, Some(&region), None, true)?)
            })?;
            processes.finish()?;
            Ok(summary)
        }
        1 => run_threads(benchmark, &job, &SharedRegion::create(job.region)?),
        size => {
            let region = SharedRegion::inherited(job.region)?;
            if region.is_none() {
                check_launcher(&job, size, launched.as_mut())?;
            }
            let summary = run_rank(benchmark, rank(&job, launched.as_mut(), region.as_ref(), None, true)?)?;
            launched.finish()?;
            Ok(summary)
        }
    }
}

/// Checks that a launcher has started the right number of ranks, and that all of them measure the same. Their devices may have
/// different names.
fn check_launcher(job: &Job<'_>, size: usize, launched: &mut dyn Bootstrap) -> Result<(), Error> {
    let Job { bench, ranks, .. } = *job;
    if !job.across_machines {
        return usage(format!(
            "bench {bench} runs on one machine and starts its own processes: start it once, without a launcher"
        ));
    }
    if size != ranks {
        return usage(format!("bench {bench} needs {ranks} ranks, but this job has {size}: start {ranks}"));
    }
    let own = format!("{} {:?} {:?}", job.what, job.options, job.common.duration);
    let all = Collective { job: launched }.gather_values(Ok(own.clone()))?;
    if all.iter().all(|options| *options == own) {
        return Ok(());
    }
    usage("the ranks have different options: give all ranks the same options".to_owned())
}

/// Runs all ranks as threads of this process. They share one device if their devices have the same name.
fn run_threads(
    benchmark: &dyn Benchmark,
    job: &Job<'_>,
    region: &SharedRegion,
) -> Result<Option<Summary>, Error> {
    let mut devices: Vec<Device> = Vec::new();
    for (at, spec) in job.devices.iter().enumerate() {
        let same = job.devices.iter().position(|other| other == spec).filter(|same| *same < at);
        let device = match same {
            Some(same) => devices[same].clone(),
            None => Device::open(spec)?,
        };
        devices.push(device);
    }
    let run_thread = |number: usize, mut member: Member| {
        let device = devices.get(number).or(devices.last()).cloned();
        run_rank(benchmark, rank(job, &mut member, Some(region), device, false)?)
    };
    let mut members = local::in_process(job.ranks as u32, Limits::default())?.into_iter().enumerate();
    let (_, leader) = members.next().ok_or(Error::Protocol)?;
    std::thread::scope(|scope| {
        let run_thread = &run_thread;
        // If a thread cannot start, the members that are left are dropped, and the other ranks see that they are gone.
        let others = members
            .map(|(number, member)| cores::spawn(scope, move || run_thread(number, member)))
            .collect::<Result<Vec<_>, _>>()?;
        let summary = cores::on_own_thread(move || run_thread(0, leader));
        let others = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let others: Result<Vec<_>, Error> = others.collect();
        // The leader has already received the errors of the other ranks.
        summary.and_then(|summary| others.map(|_| summary))
    })
}

/// A rank of this process. Opens its device, unless it has one, before the thread is pinned: the device's own threads are not pinned.
fn rank<'a>(
    job: &Job<'_>,
    member: &'a mut dyn Bootstrap,
    region: Option<&'a SharedRegion>,
    device: Option<Device>,
    processes: bool,
) -> Result<Rank<'a>, Error> {
    let mut collective = Collective { job: member };
    let number = collective.rank();
    let spec = job.devices.get(number).or(job.devices.last());
    let opened = match (device, spec) {
        (None, Some(spec)) => Device::open(spec).map(Some).map_err(Error::from),
        (device, _) => Ok(device),
    };
    let device = collective.agree(opened)?;
    // If the ranks share no memory, a launcher has started them and has chosen their cores.
    let cores = if region.is_some() { cores::assign(job.ranks)? } else { None };
    // A rank that shares its core must yield it soon.
    let is_alone = |cores: &Vec<usize>| cores.iter().filter(|core| **core == cores[number]).count() == 1;
    let spin = SpinWait::new(cores.as_ref().map_or(region.is_none(), is_alone));
    let spin_of_two = SpinWait::new(cores.is_some() || region.is_none());
    Ok(Rank { collective, number, region, device, processes, cores, spin, spin_of_two })
}
