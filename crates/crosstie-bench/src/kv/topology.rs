//! The topology of a job: which ranks share a machine, and which cores their threads are pinned to.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use crosstie::bootstrap::Bootstrap;
use serde::{Deserialize, Serialize};

use super::{Cores, Plan};
use crate::cores;
use crate::error::Error;
use crate::options::usage;
use crate::runner::Collective;

/// Rounds without a response before a client thread with its own core yields.
const SPINS: u32 = 20_000;

/// What each rank tells the others about itself.
#[derive(Serialize, Deserialize)]
struct RankInfo {
    /// Identifies the machine and its boot.
    boot: String,
    /// The parameters that all ranks must share, as text.
    plan: String,
    cores: Vec<usize>,
    /// The address by which other machines reach it.
    address: Option<IpAddr>,
}

/// The topology as this rank sees it.
#[derive(Clone, Debug)]
pub(super) struct Topology {
    /// Whether all ranks are on one machine and share its clock.
    pub(super) one_machine: bool,
    /// By rank: whether it is on another machine than rank 0.
    pub(super) on_other_machine: Vec<bool>,
    /// The address at which this rank's node listens.
    pub(super) address: IpAddr,
    /// Client threads of each node.
    pub(super) threads: u32,
    /// A core for each daemon and each client thread, if there are enough.
    pub(super) daemons: Option<Vec<usize>>,
    pub(super) clients: Option<Vec<usize>>,
    /// The cores of all ranks as text.
    pub(super) cores: String,
    pub(super) spins: u32,
}

/// Exchanges the ranks' information and assigns the cores.
pub(super) fn discover(job: &mut dyn Bootstrap, plan: &Plan) -> Result<Topology, Error> {
    let infos = Collective { job }.gather_values(local_info(plan))?;
    let own = infos.get(job.rank() as usize).ok_or(Error::Protocol)?;
    if let Some(rank) = infos.iter().position(|info| info.plan != infos[0].plan) {
        return usage(format!("rank {rank} has other options than rank 0: give all ranks the same options"));
    }
    let one_machine = infos.iter().all(|info| info.boot == own.boot);
    let on_other_machine = infos.iter().map(|info| info.boot != infos[0].boot).collect();
    let address = match one_machine {
        true => IpAddr::V4(Ipv4Addr::LOCALHOST),
        false => own.address.ok_or(Error::NoAddress)?,
    };
    // The same number on all ranks, so that they can be compared.
    let threads = (0..infos.len()).map(|rank| client_threads(&infos, rank, plan)).min().unwrap_or(1);
    let each = (plan.daemons + threads) as usize;
    let shares: Vec<Option<Vec<usize>>> =
        (0..infos.len()).map(|rank| cores_of_rank(&infos, rank, each)).collect();
    // Either all ranks are pinned or none: ranks that wait in different ways cannot be compared.
    let pinned = plan.cores != Cores::None && shares.iter().all(Option::is_some);
    let share = shares[job.rank() as usize].clone().filter(|_| pinned);
    let split = |share: &[usize]| {
        let (daemons, clients) = share.split_at(plan.daemons as usize);
        (daemons.to_vec(), clients.to_vec())
    };
    let (daemons, clients) = share.as_deref().map(split).unzip();
    let mut cores = String::new();
    if pinned {
        let by_rank = shares.iter().flatten().enumerate().map(|(rank, share)| {
            let (daemons, clients) = split(share);
            let sharing = match threads {
                threads if threads == plan.clients => String::new(),
                1 => format!(" (one thread for {})", plan.clients),
                threads => format!(" ({threads} threads for {})", plan.clients),
            };
            format!(
                "rank {rank}: daemons {}, clients {}{sharing}",
                join_cores(&daemons),
                join_cores(&clients)
            )
        });
        cores = by_rank.collect::<Vec<_>>().join("; ");
        if cores.len() > 1000 {
            cores = format!("every daemon and client thread of {} ranks has its own core", shares.len());
        }
    }
    let spins = if pinned { SPINS } else { 0 };
    Ok(Topology { one_machine, on_other_machine, address, threads, daemons, clients, cores, spins })
}

fn local_info(plan: &Plan) -> Result<RankInfo, Error> {
    let failed = |what| move |source| Error::Os { what, source };
    let boot =
        fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(failed("reading the boot id"))?;
    let cores = match &plan.cores {
        Cores::List(cores) => cores.clone(),
        _ => allowed_cores()?,
    };
    Ok(RankInfo {
        boot: boot.trim().to_owned(),
        plan: plan.shared_parameters(),
        cores,
        address: local_address(),
    })
}

/// The cores that this thread may run on. Second hyperthreads of a core come last.
fn allowed_cores() -> Result<Vec<usize>, Error> {
    let mut cores = cores::allowed()?;
    cores.sort_by_key(|cpu| is_second_hyperthread(*cpu));
    Ok(cores)
}

/// Whether a hyperthread with a lower number shares the core.
fn is_second_hyperthread(cpu: usize) -> bool {
    // Such as "3,19" or "6-7".
    let siblings = cores::siblings(cpu).unwrap_or_default();
    let first = siblings.split([',', '-']).next().and_then(|first| first.trim().parse::<usize>().ok());
    first.is_some_and(|first| first < cpu)
}

/// The number of client threads of `rank`: one per client if every daemon and client can have a core, else one for each core that the
/// daemons leave free, and at least one. Client processes do not share a thread.
fn client_threads(infos: &[RankInfo], rank: usize, plan: &Plan) -> u32 {
    if !plan.clients_share_threads() {
        return plan.clients;
    }
    let ranks = infos.iter().filter(|other| share_cores(other, &infos[rank])).count();
    let cores = (infos[rank].cores.len() / ranks.max(1)) as u32;
    cores.saturating_sub(plan.daemons).clamp(1, plan.clients)
}

/// The cores of `rank`, one for `each` of its threads; `None` if there are not enough. Ranks that may run on the same cores of a
/// machine divide them.
fn cores_of_rank(infos: &[RankInfo], rank: usize, each: usize) -> Option<Vec<usize>> {
    let before = infos[..rank].iter().filter(|other| share_cores(other, &infos[rank])).count();
    infos[rank].cores.chunks_exact(each).nth(before).map(<[usize]>::to_vec)
}

/// Whether two ranks may run on the same cores of the same machine.
fn share_cores(one: &RankInfo, other: &RankInfo) -> bool {
    (&one.boot, &one.cores) == (&other.boot, &other.cores)
}

/// The address of this machine with the route to `host:port`, over IPv4 or IPv6.
fn address_towards(target: &str) -> Option<IpAddr> {
    target.to_socket_addrs().ok()?.find_map(|target| {
        let unspecified: IpAddr = match target {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((unspecified, 0)).ok()?;
        // Connecting a UDP socket sends nothing.
        socket.connect(target).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    })
}

/// The address by which other machines reach this one: the one with the route to the rendezvous, or that of the host name.
fn local_address() -> Option<IpAddr> {
    if let Ok(rendezvous) = std::env::var("CROSSTIE_RENDEZVOUS") {
        return address_towards(&rendezvous);
    }
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let mut addresses = (name.trim(), 0).to_socket_addrs().ok()?.map(|address| address.ip());
    addresses.find(|address| !address.is_loopback())
}

/// The processor and its number of cores as text.
pub(crate) fn machine_description() -> String {
    let model = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        line.split_once(':').map(|(_, name)| name.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = model.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{}, {cores} cores", model.chars().take(200).collect::<String>())
}

/// Bytes of memory that this process uses; shared memory counts in proportion. Mapped files do not count, because the share of
/// each process depends on how many run the same program.
pub(super) fn resident_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let bytes_of = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0)
    };
    1024 * (bytes_of("Pss_Anon:") + bytes_of("Pss_Shmem:"))
}

fn join_cores(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(boot: &str, cores: std::ops::Range<usize>) -> RankInfo {
        RankInfo { boot: boot.into(), plan: String::new(), cores: cores.collect(), address: None }
    }

    /// Needs the loopback addresses only.
    #[test]
    fn address_towards_a_rendezvous_is_found_over_ipv4_and_ipv6() {
        assert_eq!(address_towards("127.0.0.1:4000"), Some(Ipv4Addr::LOCALHOST.into()));
        if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            assert_eq!(address_towards("[::1]:4000"), Some(Ipv6Addr::LOCALHOST.into()));
        } else {
            println!("SKIPPED: IPv6, this machine has no IPv6 loopback address");
        }
        assert_eq!(address_towards("no port"), None);
    }

    #[test]
    fn ranks_on_one_machine_divide_its_cores() {
        let infos = [info("a", 0..6), info("b", 0..6), info("a", 0..6), info("a", 0..6)];
        let shares: Vec<_> = (0..4).map(|rank| cores_of_rank(&infos, rank, 3)).collect();
        let [first, second] = [Some(vec![0, 1, 2]), Some(vec![3, 4, 5])];
        // No cores are left for the third rank of a machine.
        assert_eq!(shares, [first.clone(), first, second, None]);
        // The launcher has assigned different cores to the ranks.
        let infos = [info("a", 0..3), info("a", 3..6)];
        assert_eq!(
            [0, 1].map(|rank| cores_of_rank(&infos, rank, 3)),
            [Some(vec![0, 1, 2]), Some(vec![3, 4, 5])]
        );
    }

    #[test]
    fn client_threads_use_the_cores_that_daemons_leave_free() {
        let plan = |daemons, clients| Plan { daemons, clients, ..Plan::default() };
        let of = |cores, ranks, plan: &Plan| {
            let infos: Vec<RankInfo> = (0..ranks).map(|_| info("a", 0..cores)).collect();
            (0..ranks).map(|rank| client_threads(&infos, rank, plan)).collect::<Vec<u32>>()
        };
        // One thread per client if there are enough cores, and never more.
        assert_eq!(of(5, 1, &plan(1, 4)), [4]);
        assert_eq!(of(64, 1, &plan(1, 4)), [4]);
        // Otherwise one thread per core that the daemons leave free.
        assert_eq!(of(4, 1, &plan(1, 4)), [3]);
        assert_eq!(of(2, 1, &plan(1, 4)), [1]);
        assert_eq!(of(8, 2, &plan(2, 4)), [2, 2]);
        // At least one thread.
        assert_eq!(of(2, 2, &plan(2, 4)), [1, 1]);
        assert_eq!(of(1, 1, &plan(3, 1)), [1]);
        // Ranks on different machines do not divide cores.
        let infos = [info("a", 0..4), info("b", 0..4)];
        assert_eq!([0, 1].map(|rank| client_threads(&infos, rank, &plan(1, 4))), [3, 3]);
        // Client processes cannot share a thread.
        assert_eq!(of(2, 1, &Plan { processes: Some(Vec::new()), ..plan(1, 4) }), [4]);
    }
}
