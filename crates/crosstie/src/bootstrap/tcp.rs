//! Ranks anywhere that meet at an address.
//!
//! Rank 0 listens; the others connect, and try again until it is there or [`Limits::join_timeout`] has passed. Then:
//!
//! - **Protected:** who is in the job (mutual proof of the secret, before anything else is read), and that blobs
//!   arrive unchanged, once and in order (a tag per frame under keys made for the connection).
//! - **Not protected:** that blobs stay hidden from who can read the network, and that the job makes progress against
//!   who can cut or flood it. Such a one can end the job with an error, within the stated times.
//!
//! Anybody may connect to the port. Whoever stays silent, sends rubbish or proves the wrong secret is dropped after
//! at most [`HANDSHAKE_TIMEOUT`] and delays nobody. The listener stays open while rank 0
//! is in the job, so that a rank that comes twice hears of it.
//!
//! The times: a rank that never comes is reported to the others [`Limits::join_timeout`] after rank 0 started listening; seen
//! from a rank that started before rank 0, after at most twice that. A rank whose connection closes is reported at
//! once to all that wait. A rank that is alive but does not come to an operation, or whose machine vanished without
//! a word, is reported [`Limits::operation_timeout`] after the first rank began that operation.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::coordinator::Coordinator;
use super::error::{Error, Result, Operation};
use super::limits::{HANDSHAKE_TIMEOUT, Limits, check_rank};
use super::local::Children;
use super::member::{Host, Link, Member, NoLink};
use super::secret::Secret;
use super::stream::Stream;

/// Where and as whom to join.
#[derive(Debug, Clone)]
pub struct Config {
    /// This process's rank, from 0.
    pub rank: u32,
    /// How many ranks the job has.
    pub size: u32,
    /// `host:port` where rank 0 is found; IPv6 as `[::1]:4000`.
    pub rendezvous: String,
    /// `host:port` where rank 0 listens when that differs, as behind address translation.
    pub listen: Option<String>,
    /// What all ranks know.
    pub secret: Secret,
    /// Times and sizes.
    pub limits: Limits,
}

/// Joins as any rank: rank 0 listens, the others connect. Returns once all ranks have joined.
pub fn join(config: &Config) -> Result<Member> {
    check_rank(config.rank, config.size)?;
    if config.rank > 0 {
        return connect_with_retry(config);
    }
    let address = config.listen.as_ref().unwrap_or(&config.rendezvous);
    let listener = TcpListener::bind(address).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => ": another program, or another rank 0, is there",
            io::ErrorKind::AddrNotAvailable => {
                ": this machine does not have that address; run rank 0 there, or set CROSSTIE_LISTEN"
            }
            _ => "",
        };
        Error::io(format!("rank 0 cannot listen on {address}{hint}"), &error)
    })?;
    join_as_rank_zero(listener, config.size, &config.secret, config.limits)
}

/// Joins as rank 0 behind a listener of the caller's, for instance one bound to port 0.
pub fn join_as_rank_zero(listener: TcpListener, size: u32, secret: &Secret, limits: Limits) -> Result<Member> {
    check_rank(0, size)?;
    limits.check()?;
    let failed = |error: io::Error| Error::io("setting up the coordinator", &error);
    let (mine, theirs) = UnixStream::pair().map_err(failed)?;
    let mut coordinator = Coordinator::new(size, secret.clone(), limits, Some(listener)).map_err(failed)?;
    coordinator.expect(0, Stream::Unix(theirs))?;
    let host = Host::start(move || coordinator.run())?;
    let link = Link::open_local(Stream::Unix(mine), 0, size, secret, &limits)?;
    Member::new(0, size, limits, link).with_host(host, Children::default()).gather()
}

fn connect_with_retry(config: &Config) -> Result<Member> {
    config.limits.check()?;
    let deadline = Instant::now() + config.limits.join_timeout;
    let mut pause = Duration::from_millis(5);
    loop {
        let error = match connect(config, deadline) {
            Ok(link) => return Member::new(config.rank, config.size, config.limits, link).gather(),
            Err(NoLink::Refused(error)) => return Err(error),
            Err(NoLink::Broken(error)) => error,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::RankMissing {
                ranks: vec![0],
                during: Operation::Join,
                waited: config.limits.join_timeout,
                note: format!("last try at {}: {error}", config.rendezvous),
            });
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

fn connect(config: &Config, deadline: Instant) -> std::result::Result<Link, NoLink> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in config.rendezvous.to_socket_addrs()? {
        match connect_to(address, deadline) {
            Ok(stream) => {
                let until = deadline.min(Instant::now() + HANDSHAKE_TIMEOUT);
                let (rank, size) = (config.rank, config.size);
                let peer = format!("rank 0 at {address}");
                match Link::open(
                    Stream::Tcp(stream),
                    rank,
                    size,
                    &config.secret,
                    &config.limits,
                    &peer,
                    until,
                ) {
                    Err(NoLink::Broken(error)) => last = error,
                    decided => return decided,
                }
            }
            Err(error) => last = error,
        }
    }
    Err(NoLink::Broken(last))
}

fn connect_to(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).min(HANDSHAKE_TIMEOUT);
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let stream = TcpStream::connect_timeout(&address, left)?;
    // Trying a local port that nobody listens on can, by TCP's simultaneous open, end up connected to oneself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_from_elsewhere_becomes_rank_zero_or_a_rank_that_does_not_exist() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = listener.local_addr().expect("address");
        let (secret, limits) = (Secret::random().expect("secret"), Limits::default());
        let theirs = secret.clone();
        let first = std::thread::spawn(move || join_as_rank_zero(listener, 2, &theirs, limits));
        let deadline = Instant::now() + limits.join_timeout;
        for rank in [0, 2, u32::MAX] {
            let stream = Stream::Tcp(connect_to(address, deadline).expect("connect"));
            match Link::open(stream, rank, 2, &secret, &limits, "rank 0", deadline) {
                Err(NoLink::Refused(error)) => assert_eq!(error, Error::DuplicateRank { rank }),
                _ => panic!("rank {rank} was not refused"),
            }
        }
        let rendezvous = address.to_string();
        let config = Config { rank: 1, size: 2, rendezvous, listen: None, secret, limits };
        join(&config).expect("rank 1 joins");
        first.join().expect("no panic").expect("rank 0 joins");
    }
}
