//! Jobs on several machines: the ranks connect to the address of rank 0.
//!
//! Rank 0 listens. The others connect, and try again until rank 0 is there or [`Limits::join_timeout`] has passed.
//!
//! - **Protected:** who is in the job (both ends of a connection prove the secret before they read anything else), and that
//!   blobs arrive unchanged, once and in order (each frame has a tag under keys of its connection).
//! - **Not protected:** the confidentiality of blobs against someone who can read the network, and the job's progress
//!   against someone who can cut or flood it. Such an attacker can make the job fail, within the times stated below.
//!
//! Anyone may connect to the port. A peer that is silent, sends other bytes, or proves a wrong secret is disconnected after
//! at most [`HANDSHAKE_TIMEOUT`] and does not delay the ranks. The listener stays open while rank 0 is in the job, so that a second
//! process with the same rank is told about it.
//!
//! The times: the coordinator reports a rank that never joins [`Limits::join_timeout`] after rank 0 began to listen; a
//! rank that started before rank 0 waits at most twice that long. It reports a rank whose connection closes at once to
//! all ranks that wait. It reports a rank that is connected but does not call an operation, or whose machine
//! failed without closing the connection, [`Limits::operation_timeout`] after the first rank called that operation.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::children::Children;
use super::coordinator::{Coordinator, CoordinatorThread};
use super::error::{Error, Operation, Result};
use super::limits::{HANDSHAKE_TIMEOUT, Limits, check_rank};
use super::member::{ConnectError, CoordinatorConnection, Member};
use super::secret::Secret;
use super::stream::Stream;

/// Which job to join, and with which rank.
#[derive(Debug, Clone)]
pub struct Config {
    /// This process's rank, from 0.
    pub rank: u32,
    /// How many ranks the job has.
    pub size: u32,
    /// `host:port` to which the other ranks connect; IPv6 as `[::1]:4000`.
    pub rendezvous: String,
    /// `host:port` on which rank 0 listens when that differs from `rendezvous`, for instance behind address translation.
    pub listen: Option<String>,
    /// The secret that all ranks share.
    pub secret: Secret,
    /// Timeouts and sizes.
    pub limits: Limits,
}

/// Joins the job: rank 0 listens, the others connect. Returns when all ranks have joined.
pub fn join(config: &Config) -> Result<Member> {
    check_rank(config.rank, config.size)?;
    check_address(&config.rendezvous)?;
    if config.rank > 0 {
        return connect_with_retry(config);
    }
    let address = config.listen.as_ref().unwrap_or(&config.rendezvous);
    check_address(address)?;
    let listener = TcpListener::bind(address).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => ": another program, or another rank 0, uses it",
            io::ErrorKind::AddrNotAvailable => {
                ": this machine does not have that address; run rank 0 on the machine that has it, or set CROSSTIE_LISTEN"
            }
            _ => "",
        };
        Error::io(format!("rank 0 cannot listen on {address}{hint}"), &error)
    })?;
    join_as_rank_zero(listener, config.size, &config.secret, config.limits)
}

/// Refuses a text that can never be an address, so that nobody waits for it.
fn check_address(text: &str) -> Result<()> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(()),
        _ => Err(Error::Configuration(format!("{text:?} is not an address of rank 0: give HOST:PORT"))),
    }
}

/// Joins as rank 0 with a listener that the caller has bound, for instance to port 0.
pub fn join_as_rank_zero(
    listener: TcpListener,
    size: u32,
    secret: &Secret,
    limits: Limits,
) -> Result<Member> {
    check_rank(0, size)?;
    limits.check()?;
    let failed = |error: io::Error| Error::io("creating the coordinator", &error);
    let (mine, theirs) = UnixStream::pair().map_err(failed)?;
    let mut coordinator = Coordinator::new(size, secret.clone(), limits, Some(listener)).map_err(failed)?;
    coordinator.add_connection(0, Stream::Unix(theirs))?;
    let thread = CoordinatorThread::start(move || coordinator.run())?;
    let connection = CoordinatorConnection::open_local(Stream::Unix(mine), 0, size, secret, &limits)?;
    Member::new(0, size, limits, connection).with_coordinator(thread, Children::default()).wait_for_all()
}

fn connect_with_retry(config: &Config) -> Result<Member> {
    config.limits.check()?;
    let deadline = Instant::now() + config.limits.join_timeout;
    let mut pause = Duration::from_millis(5);
    loop {
        let error = match connect(config, deadline) {
            Ok(connection) => {
                return Member::new(config.rank, config.size, config.limits, connection).wait_for_all();
            }
            Err(ConnectError::Final(error)) => return Err(error),
            Err(ConnectError::Retryable(error)) => error,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(pause.min(left));
        if left <= pause {
            // Another attempt would have no time, and would hide why this one failed.
            return Err(Error::RankMissing {
                ranks: vec![0],
                during: Operation::Join,
                waited: config.limits.join_timeout,
                note: format!("last attempt to connect to {}: {error}", config.rendezvous),
            });
        }
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

fn connect(config: &Config, deadline: Instant) -> std::result::Result<CoordinatorConnection, ConnectError> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in config.rendezvous.to_socket_addrs()? {
        match connect_to(address, deadline) {
            Ok(stream) => {
                let handshake_deadline = deadline.min(Instant::now() + HANDSHAKE_TIMEOUT);
                let (rank, size) = (config.rank, config.size);
                let peer = format!("rank 0 at {address}");
                match CoordinatorConnection::open(
                    Stream::Tcp(stream),
                    rank,
                    size,
                    &config.secret,
                    &config.limits,
                    &peer,
                    handshake_deadline,
                ) {
                    Err(ConnectError::Retryable(error)) => last = error,
                    opened_or_final => return opened_or_final,
                }
            }
            Err(error) => last = error,
        }
    }
    Err(ConnectError::Retryable(last))
}

fn connect_to(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).min(HANDSHAKE_TIMEOUT);
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let stream = TcpStream::connect_timeout(&address, left)?;
    // A connection attempt to a local port without a listener can connect to itself (TCP simultaneous open).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_of_rank_1(rendezvous: &str) -> Config {
        let limits = Limits { join_timeout: Duration::from_millis(50), ..Limits::default() };
        let secret = Secret::random().expect("secret");
        Config { rank: 1, size: 2, rendezvous: rendezvous.to_owned(), listen: None, secret, limits }
    }

    #[test]
    fn text_that_is_not_an_address_is_refused_at_once() {
        for wrong in ["", "localhost", ":7000", "localhost:", "localhost:70000", "localhost:port"] {
            let refused = join(&config_of_rank_1(wrong)).map(drop);
            assert!(matches!(refused, Err(Error::Configuration(_))), "{wrong}: {refused:?}");
        }
    }

    #[test]
    fn error_says_why_the_last_attempt_to_connect_failed() {
        let free = TcpListener::bind("127.0.0.1:0").expect("listener").local_addr().expect("address");
        let missing = join(&config_of_rank_1(&free.to_string())).map(drop).expect_err("nobody listens");
        assert!(missing.to_string().contains("refused"), "{missing}");
    }

    #[test]
    fn remote_peer_cannot_join_as_rank_zero_or_as_a_rank_that_does_not_exist() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = listener.local_addr().expect("address");
        let (secret, limits) = (Secret::random().expect("secret"), Limits::default());
        let theirs = secret.clone();
        let first = std::thread::spawn(move || join_as_rank_zero(listener, 2, &theirs, limits));
        let deadline = Instant::now() + limits.join_timeout;
        for rank in [0, 2, u32::MAX] {
            let stream = Stream::Tcp(connect_to(address, deadline).expect("connect"));
            match CoordinatorConnection::open(stream, rank, 2, &secret, &limits, "rank 0", deadline) {
                Err(ConnectError::Final(error)) => assert_eq!(error, Error::DuplicateRank { rank }),
                _ => panic!("rank {rank} was not rejected"),
            }
        }
        let rendezvous = address.to_string();
        let config = Config { rank: 1, size: 2, rendezvous, listen: None, secret, limits };
        join(&config).expect("rank 1 joins");
        first.join().expect("no panic").expect("rank 0 joins");
    }
}
