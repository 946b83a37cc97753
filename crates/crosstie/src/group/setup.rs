//! Joining a group: members prove that they know its secret, and exchange their addresses through the job.
//!
//! 1. Every rank publishes a *hello*: group, configuration, its part of the epoch, its datagram address, and a proof (an HMAC under
//!    the group's secret) over all of it and its rank. Members check the hellos of all members.
//! 2. Each pair of members exchanges the addresses of its two queue pairs, and connects them.

use std::sync::Arc;

use crosstie_protocol::group::{Config, GroupId, HEADER_SIZE, MAX_MTU, MemberId, MemberSet, TreeOptions};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::config::limits::{
    DATAGRAM_RECEIVES, MAX_RECEIVES, MIN_RECEIVES, SEND_QUEUE, STAGING_SLOTS, TOTAL_RECEIVES,
};
use super::config::{GroupConfig, ProgressMode, Transport};
use super::datagram::{DatagramPort, PeerPort};
use super::engine::Engine;
use super::error::JoinError;
use super::link::{Link, SLOT};
use super::one_sided::UnconnectedEndpoints;
use crate::bootstrap::{Bootstrap, Secret, random_bytes};
use crate::device::{
    Access, ConnectConfig, CqConfig, Device, DeviceAddress, DeviceError, Mr, PostError, QpAddress, QpConfig,
    RcQp, RemoteMemory,
};
use crate::endpoint::{EndpointAddress, Progress};

/// The last digit is the version of the packet format.
const MAGIC: u64 = 0x3430_7075_6f72_4743;
/// Longest packet that is copied into the send queue.
const MAX_INLINE: u32 = 220;

/// What a rank tells all others. All integers are little-endian, as the memory of all supported machines.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Hello {
    magic: u64,
    group: u64,
    /// Random; the epoch is a digest of those of all members.
    nonce: u64,
    /// Digest of the configuration.
    config: u64,
    device: DeviceAddress,
    datagram_qp: u32,
    qkey: u32,
    proof: [u8; 32],
}

/// What a member tells one other member.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct LinkAddress {
    qp: QpAddress,
    target: RemoteMemory,
}

/// The queue pair that will be connected to one other member, and its receives.
struct Unconnected {
    qp: RcQp,
    receives: Mr,
}

/// Takes part in the exchange of a group that this rank is not a member of.
pub(super) fn skip(job: &mut dyn Bootstrap) -> Result<(), JoinError> {
    job.all_gather(&[])?;
    job.exchange(&vec![Vec::new(); job.size() as usize])?;
    job.barrier()?;
    Ok(())
}

pub(super) fn join(
    job: &mut dyn Bootstrap,
    device: &Device,
    config: &GroupConfig,
) -> Result<Engine, JoinError> {
    let ranks: Vec<u32> = config.ranks.clone().unwrap_or_else(|| (0..job.size()).collect());
    if let Some(index) =
        (0..ranks.len()).find(|index| ranks[*index] >= job.size() || ranks[..*index].contains(&ranks[*index]))
    {
        return Err(JoinError::InvalidRank(ranks[index]));
    }
    let me = ranks.iter().position(|rank| *rank == job.rank()).ok_or(JoinError::NotMember(job.rank()))?;
    let limit = crosstie_protocol::group::MAX_MEMBERS;
    if ranks.len() > limit {
        return Err(
            DeviceError::Limit { what: "members", asked: ranks.len() as u64, limit: limit as u64 }.into()
        );
    }
    let me = MemberId::new(me);
    let peers: Vec<MemberId> = (0..ranks.len()).map(MemberId::new).filter(|peer| *peer != me).collect();

    let pd = Arc::new(device.alloc_pd()?);
    let receives = (TOTAL_RECEIVES / peers.len().max(1)).clamp(MIN_RECEIVES, MAX_RECEIVES);
    let entries = (receives * peers.len()).max(2) as u32;
    let recv_cq = device.create_cq(&CqConfig { depth: 2 * entries })?;
    let sends = (SEND_QUEUE as usize * peers.len()).max(2) as u32;
    let send_cq = device.create_cq(&CqConfig { depth: sends.min(device.attr().max_cqe) })?;
    let max_inline = MAX_INLINE.min(device.attr().max_inline);
    let sizes = QpConfig {
        max_send_wr: SEND_QUEUE,
        max_recv_wr: receives as u32,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline,
    };
    // A cache line for each member, which its packets in completions are written to, and nobody reads.
    let target = pd.allocate(64 * ranks.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let mut unconnected = Vec::with_capacity(peers.len());
    for _ in &peers {
        let qp = pd.create_rc(&sizes, &send_cq, &recv_cq, None)?;
        unconnected.push(Unconnected { qp, receives: pd.allocate(receives * SLOT, Access::LOCAL_WRITE)? });
    }
    let mut datagrams = match config.transport {
        Transport::Rc => None,
        Transport::Ud => Some(DatagramPort::new(device, &pd, DATAGRAM_RECEIVES, max_inline)?),
    };
    let progress = match config.progress {
        ProgressMode::Thread => Progress::Thread,
        ProgressMode::Manual => Progress::Caller,
    };
    let endpoints = match config.one_sided {
        true => Some(UnconnectedEndpoints::new(device, &pd, ranks.len(), me, progress)?),
        false => None,
    };
    let staging = pd.allocate(STAGING_SLOTS * SLOT, Access::LOCAL_WRITE)?;

    // The hellos.
    let secret = config.secret.as_ref().map(|secret| secret.derive("crosstie group"));
    let mut hello = Hello {
        magic: MAGIC,
        group: config.id,
        nonce: u64::from_le_bytes(random_bytes::<8>()?),
        config: config_digest(config, &ranks),
        device: device.address(),
        datagram_qp: datagrams.as_ref().map_or(0, DatagramPort::qp_num),
        qkey: u32::from_le_bytes(random_bytes::<4>()?) & 0x7fff_ffff,
        proof: [0; 32],
    };
    hello.proof = proof(secret.as_ref(), &hello, job.rank());
    let hellos = job.all_gather(hello.as_bytes())?;
    let mut accepted = Vec::with_capacity(ranks.len());
    for &rank in &ranks {
        let hello = Hello::read_from_bytes(&hellos[rank as usize]);
        let hello = hello.ok().filter(|hello| hello.magic == MAGIC).ok_or(JoinError::InvalidAddress(rank))?;
        if hello.group != config.id {
            return Err(JoinError::OtherGroup { rank, theirs: hello.group, ours: config.id });
        }
        if !is_proven(secret.as_ref(), &hello, rank) {
            return Err(JoinError::WrongSecret(rank));
        }
        if hello.config != config_digest(config, &ranks) {
            return Err(JoinError::OtherConfig(rank));
        }
        accepted.push(hello);
    }
    let epoch = accepted.iter().fold(0u64, |epoch, hello| digest(epoch, &hello.nonce.to_le_bytes()));

    // The addresses.
    let mut blobs = vec![Vec::new(); job.size() as usize];
    for (peer, made) in peers.iter().zip(&unconnected) {
        let address = LinkAddress { qp: made.qp.address(), target: line_of(&target, *peer) };
        let blob = &mut blobs[ranks[peer.index()] as usize];
        *blob = address.as_bytes().to_vec();
        if let Some(endpoint) = endpoints.as_ref().and_then(|made| made.peers[peer.index()].as_ref()) {
            blob.extend(endpoint.address().to_bytes());
        }
    }
    let blobs = job.exchange(&blobs)?;
    let mut links: Vec<Option<Link>> = (0..ranks.len()).map(|_| None).collect();
    for (&peer, mut made) in peers.iter().zip(unconnected) {
        let rank = ranks[peer.index()];
        let theirs = LinkAddress::read_from_prefix(&blobs[rank as usize]);
        let (theirs, rest) = theirs.map_err(|_| JoinError::InvalidAddress(rank))?;
        if let Some(endpoint) = endpoints.as_ref().and_then(|made| made.peers[peer.index()].as_ref()) {
            let address = EndpointAddress::from_bytes(rest).map_err(|_| JoinError::InvalidAddress(rank))?;
            endpoint.connect(&address).map_err(|error| JoinError::Endpoint { rank, error })?;
        }
        made.qp.init(ConnectConfig::default().access)?;
        let mut link = Link::new(
            made.qp,
            peer,
            made.receives,
            theirs.target,
            max_inline as usize,
            device.attr().completion_data as usize,
        )
        .map_err(refused_receive)?;
        link.qp.connect(&theirs.qp, &ConnectConfig::default())?;
        links[peer.index()] = Some(link);
    }
    if let Some(port) = &mut datagrams {
        port.activate(hello.qkey).map_err(JoinError::Device)?;
        for &peer in &peers {
            let theirs = &accepted[peer.index()];
            let address = pd.create_ah(&theirs.device)?;
            port.add_peer(peer, PeerPort { address, qp_num: theirs.datagram_qp, qkey: theirs.qkey });
        }
    }
    job.barrier()?;
    let id = GroupId { group: config.id, epoch: epoch as u32 ^ (epoch >> 32) as u32 };
    let one_sided = match endpoints {
        Some(endpoints) => Some(Arc::new(endpoints.connected(id, me, device)?)),
        None => None,
    };
    let mtu = match config.transport {
        Transport::Rc => MAX_MTU,
        Transport::Ud => MAX_MTU.min((device.attr().max_datagram as usize).saturating_sub(HEADER_SIZE)),
    };
    let machine = Config {
        me,
        members: ranks.len(),
        locks: config.locks,
        barriers: config.barriers,
        barrier_members: config.barrier_members.unwrap_or(MemberSet::first(ranks.len())),
        tree: config.tree.clone(),
        // On one machine it is known who is dead. A network only knows who does not answer.
        needs_quorum: !device.attr().same_machine,
    };
    Engine::new(
        id,
        &machine,
        pd,
        one_sided,
        links,
        datagrams,
        recv_cq,
        send_cq,
        staging,
        target,
        mtu,
        config.receive_loss,
    )
}

/// The line of one member.
fn line_of(target: &Mr, member: MemberId) -> RemoteMemory {
    let all = target.remote();
    RemoteMemory { addr: all.at((64 * member.index()) as u64).addr, len: 64, ..all }
}

fn refused_receive(error: PostError) -> JoinError {
    JoinError::Device(DeviceError::Refused(error.to_string()))
}

/// FNV-1a.
fn digest(seed: u64, bytes: &[u8]) -> u64 {
    let start = if seed == 0 { 0xcbf2_9ce4_8422_2325 } else { seed };
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn config_digest(config: &GroupConfig, ranks: &[u32]) -> u64 {
    let GroupConfig { locks, barriers, tree, barrier_members, transport, one_sided, .. } = config;
    let TreeOptions { fanout, hosts } = tree;
    digest(
        0,
        format!(
            "{ranks:?} {locks} {barriers} {fanout} {hosts:?} {barrier_members:?} {transport:?} {one_sided}"
        )
        .as_bytes(),
    )
}

fn hmac_of(secret: &Secret, hello: &Hello, rank: u32) -> crate::bootstrap::HmacSha256 {
    let mut hmac = secret.hmac("crosstie group 1 hello");
    hmac.update(&rank.to_le_bytes());
    hmac.update(Hello { proof: [0; 32], ..*hello }.as_bytes());
    hmac
}

fn proof(secret: Option<&Secret>, hello: &Hello, rank: u32) -> [u8; 32] {
    secret.map_or([0; 32], |secret| hmac_of(secret, hello, rank).finish())
}

fn is_proven(secret: Option<&Secret>, hello: &Hello, rank: u32) -> bool {
    // Without a secret of the group, the secret of the job is enough; a member that has one is not in the same group.
    secret.map_or(hello.proof == [0; 32], |secret| hmac_of(secret, hello, rank).verify(&hello.proof))
}
