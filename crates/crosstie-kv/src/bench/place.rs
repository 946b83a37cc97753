//! Where the ranks are: on one machine or on several, and on which cores.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};

use crosstie::bootstrap::Bootstrap;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use super::{Cores, Error, Plan, meeting};

/// Turns without an answer before a client lets others run, where it has a core to itself.
const SPINS: u32 = 20_000;

/// What a rank knows about itself.
#[derive(Serialize, Deserialize)]
struct Card {
    /// Differs from one machine to the next, and from one boot to the next.
    boot: String,
    cores: Vec<usize>,
    /// Where others reach it, if they are elsewhere.
    address: Option<IpAddr>,
}

/// Where this rank is.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Whether all ranks are on one machine, so that their clocks can be compared.
    pub(super) one_machine: bool,
    /// Where this rank's node listens.
    pub(super) address: IpAddr,
    /// A core for each daemon and each client, where there are enough.
    pub(super) daemons: Option<Vec<usize>>,
    pub(super) clients: Option<Vec<usize>>,
    /// Of all ranks, in words.
    pub(super) cores: String,
    pub(super) spins: u32,
}

/// Asks everybody where they are.
pub(super) fn find(job: &mut dyn Bootstrap, plan: &Plan) -> Result<Place, Error> {
    let card = card(plan).and_then(|card| Ok(serde_json::to_vec(&card)?));
    let cards = meeting::gather(job, card)?;
    let cards: Vec<Card> = cards.iter().map(|card| serde_json::from_slice(card)).collect::<Result<_, _>>()?;
    let mine = cards.get(job.rank() as usize).ok_or(Error::Protocol)?;
    let one_machine = cards.iter().all(|card| card.boot == mine.boot);
    let address = match one_machine {
        true => IpAddr::V4(Ipv4Addr::LOCALHOST),
        false => mine.address.ok_or(Error::NoAddress)?,
    };
    let shares: Vec<Option<Vec<usize>>> = (0..cards.len()).map(|rank| share(&cards, rank, plan)).collect();
    // All or nobody: ranks that wait in different ways cannot be compared.
    let pinned = plan.cores != Cores::None && shares.iter().all(Option::is_some);
    let share = shares[job.rank() as usize].clone().filter(|_| pinned);
    let split = |share: &[usize]| {
        let (daemons, clients) = share.split_at(plan.daemons as usize);
        (daemons.to_vec(), clients.to_vec())
    };
    let (daemons, clients) = share.as_deref().map(split).unzip();
    let mut cores = String::new();
    if pinned {
        let told = shares.iter().flatten().enumerate().map(|(rank, share)| {
            let (daemons, clients) = split(share);
            format!("rank {rank}: daemons {}, clients {}", list(&daemons), list(&clients))
        });
        cores = told.collect::<Vec<_>>().join("; ");
        if cores.len() > 1000 {
            cores = format!("every daemon and client of {} ranks has a core", shares.len());
        }
    }
    Ok(Place { one_machine, address, daemons, clients, cores, spins: if pinned { SPINS } else { 0 } })
}

fn card(plan: &Plan) -> Result<Card, Error> {
    let failed = |what| move |source| Error::Os { what, source };
    let boot =
        fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(failed("reading the boot id"))?;
    let cores = match &plan.cores {
        Cores::List(cores) => cores.clone(),
        _ => allowed()?,
    };
    Ok(Card { boot: boot.trim().to_owned(), cores, address: address() })
}

/// The cores that this thread may run on.
fn allowed() -> Result<Vec<usize>, Error> {
    let set = sched_getaffinity(None)
        .map_err(|errno| Error::Os { what: "sched_getaffinity", source: errno.into() })?;
    let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    // Second hyperthreads come last: they are half a core.
    cores.sort_by_key(|cpu| is_second(*cpu));
    Ok(cores)
}

/// Whether a hyperthread of a lower number shares the core.
fn is_second(cpu: usize) -> bool {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    // Such as "3,19" or "6-7".
    let siblings = fs::read_to_string(path).unwrap_or_default();
    let first = siblings.split([',', '-']).next().and_then(|first| first.trim().parse::<usize>().ok());
    first.is_some_and(|first| first < cpu)
}

/// The cores of `rank`, one for each of its threads; `None` if there are not enough. Ranks that may run on the same cores of
/// a machine share them out.
fn share(cards: &[Card], rank: usize, plan: &Plan) -> Option<Vec<usize>> {
    let card = &cards[rank];
    let alike = |other: &&Card| (&other.boot, &other.cores) == (&card.boot, &card.cores);
    let turn = cards[..rank].iter().filter(alike).count();
    let threads = (plan.daemons + plan.clients) as usize;
    card.cores.chunks_exact(threads).nth(turn).map(<[usize]>::to_vec)
}

/// Keeps the calling thread on one core.
pub(super) fn pin(core: usize) -> Result<(), Error> {
    let failed = |source| Error::Os { what: "binding a client to its core", source };
    if core >= CpuSet::MAX_CPU {
        return Err(failed(std::io::ErrorKind::InvalidInput.into()));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|errno| failed(errno.into()))
}

/// The address of this machine that others reach it by: the one that talks to the rendezvous, or that its name stands for.
fn address() -> Option<IpAddr> {
    if let Ok(rendezvous) = std::env::var("CROSSTIE_RENDEZVOUS") {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        // Sends nothing.
        socket.connect(rendezvous).ok()?;
        return socket.local_addr().ok().map(|address| address.ip());
    }
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let mut addresses = (name.trim(), 0).to_socket_addrs().ok()?.map(|address| address.ip());
    addresses.find(|address| !address.is_loopback())
}

/// The processor and its number of cores, in words.
pub(super) fn machine() -> String {
    let model = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        line.split_once(':').map(|(_, name)| name.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = model.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{}, {cores} cores", model.chars().take(200).collect::<String>())
}

/// Bytes of memory that this process uses.
pub(super) fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(boot: &str, cores: std::ops::Range<usize>) -> Card {
        Card { boot: boot.into(), cores: cores.collect(), address: None }
    }

    #[test]
    fn ranks_share_the_cores_of_their_machine() {
        let plan = Plan { daemons: 1, clients: 2, ..Plan::default() };
        let cards = [card("a", 0..6), card("b", 0..6), card("a", 0..6), card("a", 0..6)];
        let shares: Vec<_> = (0..4).map(|rank| share(&cards, rank, &plan)).collect();
        let [first, second] = [Some(vec![0, 1, 2]), Some(vec![3, 4, 5])];
        // The third rank of a machine has none left.
        assert_eq!(shares, [first.clone(), first, second, None]);
        // A launcher has given each its own.
        let cards = [card("a", 0..3), card("a", 3..6)];
        assert_eq!([0, 1].map(|rank| share(&cards, rank, &plan)), [Some(vec![0, 1, 2]), Some(vec![3, 4, 5])]);
    }
}
